"""Families of cases in the results file: cases whose ratios may be averaged, their name patterns and their peers.

A case names a cell (what was computed) and, in many suites, the way (which of our implementations computed it), as in
waymo_1f_5cm/k3/C64/fwd/tuned. The family's pattern parses it: `group` and `series` locate the cell in a chart,
`precision` is optional (the row's dtype by default), and `way` names our implementation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from benchmarks.harness.rows import Row

SUITES: Mapping[str, str] = {
    "stream": "networks over scenes never seen",
    "workloads": "whole networks",
    "tuner": "tuned networks",
    "engine": "captured networks",
    "conv-forward": "single layers, forward",
    "conv-train": "single layers, forward and backward",
    "maps": "kernel maps",
    "einsum": "sparse einsums",
    "tensor-product": "equivariant tensor products",
    "graph": "graph layers",
    "points": "searches among points, attention",
    "ucf": "the unified convolution framework",
    "cpu-conv": "layers on a CPU",
}
"""Suites of the results file, in the order of the report, with their titles."""

SAME_RUN, RECORDED, BOUND = "same run", "recorded", "bound"
"""Sources of a peer's value; BOUND: a lower bound of the time."""
VARIED = "time over varied scans"
"""The metric of a network timed over several scans in turn; over a single scan the metric is "time"."""
PEAK = "peak memory"
"""The metric of peak memory (harness.memory), in rows of the clock `count`."""
DEFAULT = "default"
"""The name of our untuned way, also as the peer of tuned ways."""

PRECISIONS = ("fp16", "bf16", "tf32", "fp32", "fp64", "tf32x3", "bf16x3", "ieee", "int8", "fp8")
MODES = ("inference", "training")
_NETWORK = rf"(?P<group>.+?)/(?P<precision>{'|'.join(PRECISIONS)})"
_MARKS = r"(?P<generated>/generated)?(?:/(?P<way>default|tuned))?"
"""Suffixes of a mode: for scans generated from a seed, and for the choice of tiles."""
NETWORK = rf"{_NETWORK}/(?P<mode>{'|'.join(MODES)})(?:/(?P<rest>.+))?"
"""Pattern of a network's case: MODEL/PRECISION/MODE and an optional rest. Model names may contain slashes."""
STREAM = r"(?P<group>(?:[^/]+/)*(?:unet|encoder))"
"""Pattern of a network of the suite stream, preceded by the description of its scenes."""


@dataclass(frozen=True)
class Rivals:
    """Peers selected by name prefixes and by source."""

    names: tuple[str, ...]
    source: str = SAME_RUN

    def holds(self, row: Row) -> bool:
        return row.peer_source == self.source and row.peer.startswith(self.names)


@dataclass(frozen=True)
class Place:
    """The position of a case in its family: the cell, and the way."""

    group: str
    series: str
    precision: str
    way: str = ""

    def without_way(self) -> Place:
        return replace(self, way="")

    def __str__(self) -> str:
        return " ".join(part for part in (self.group, self.series) if part)


@dataclass(frozen=True, eq=False)
class Family:
    """Cases of a suite whose ratios may be averaged. rivals: peers by the title of their group. bounds: peers that are
    lower bounds."""

    suite: str
    name: str
    pattern: str
    rivals: Mapping[str, Rivals]
    bounds: tuple[str, ...] = ()
    metric: str = "time"

    @property
    def of_memory(self) -> bool:
        """True if ratios are of memory, not of time."""
        return self.metric == PEAK

    def place(self, row: Row) -> Place | None:
        """The place of a row's case; None if the row does not belong to this family."""
        if row.suite != self.suite or row.metric != self.metric:
            return None
        found = re.fullmatch(self.pattern, row.case)
        if found is None:
            return None
        parts = found.groupdict(default="")
        # The name used by studies of the suite tuner.
        group = parts["group"] + "-generated" * bool(parts.get("generated"))
        return Place(group, parts.get("series", ""), parts.get("precision") or row.dtype, parts.get("way", ""))


LIBRARIES = (
    *("spconv", "torchsparse", "TorchSparse", "MinkowskiEngine", "FlexGEMM", "WarpConvNet", "fVDB"),
    *("torch.sparse", "torch BSR", "cuSPARSE", "Inductor", "eager", "e3nn", "cuEq", "torch_geometric", "PyG", "DGL"),
)
"""Name prefixes of other libraries. (Other peers of the same run may be our own implementations.)"""
_SPCONV = {"spconv": Rivals(("spconv",))}
_DEFAULT = {"its default": Rivals((DEFAULT,))}
_LAYERS = {**_SPCONV, "the best recorded": Rivals(("best recorded",), RECORDED)}
_DENSE = {"oneDNN, dense": Rivals(("oneDNN",)), "cuDNN, dense": Rivals(("cuDNN",))}
_ANY = {"the best peer": Rivals(LIBRARIES)}
_LAYER = r"(?P<group>[^/]+)/k3/(?P<series>C[\d-]+)"
_GRAPHS = {"padded bmm": Rivals(("padded bmm",)), "PyG": Rivals(("PyG",))}
_PRODUCTS = {"e3nn or cuEquivariance": Rivals(("e3nn", "cuEq")), "dense einsum": Rivals(("dense",))}
_PRODUCT = r"tensor-product/(?P<group>l\d+/C\d+)/(?P<series>[^/]+)"


def _mode(mode: str) -> str:
    """Pattern of networks in one mode, timed as a whole."""
    return rf"{_NETWORK}/{mode}{_MARKS}"


def _kinds(name: str) -> str:
    return rf"dtypes/(?P<group>[^/]+)/k3/(?P<series>C\d+)/(?P<precision>{name})"


def _engine(mode: str, way: str) -> Family:
    """The family of networks in one mode and way, captured or eager."""
    rivals = {**_LAYERS, **({} if way == "eager" else {"our eager pass": Rivals(("our eager pass",))})}
    return Family("engine", f"{way} {mode}", rf"{_NETWORK}/{mode}(?:/tuned)?/{way}", rivals)


_SHELL = r"shell_(?P<group>\d+/B\d+)/k3/(?P<series>C\d+)/(?P<precision>fp16|fp32)"
ALGORITHMS: Mapping[str, str] = {
    "explicit-gemm": "explicit_gemm",
    "implicit-gemm-table": "implicit_gemm",
    "implicit-gemm-table-split-k": "implicit_gemm_splitk",
    "implicit-gemm-sorted": "masked_implicit_gemm",
    "implicit-gemm-split-k": "masked_implicit_gemm_splitk",
}
"""FlexGEMM's algorithms by our dataflows, in the order of its article."""
_SHELLS = {name: Rivals((name,)) for name in ("spconv", "FlexGEMM", "torchsparse")}
_POINTS = {"torch_cluster": Rivals(("torch_cluster",)), "SciPy": Rivals(("SciPy",)), "all pairs": Rivals(("cdist",))}
_TIMED: tuple[Family, ...] = (
    *(
        Family("stream", f"{told}{way} {name}", rf"{STREAM}/{mode}/{kind}{way}", _SPCONV, (), "p50")
        for mode, name in (
            ("infer", "inference"),
            ("infer-tf32", "inference in tf32"),
            ("infer-fp32", "inference in fp32"),
            ("train", "training"),
        )
        for kind, told in (("", ""), ("compat-", "spconv's code on pumice.compat, "))
        for way in ("eager", "compiled", "captured")
    ),
    *(Family("workloads", mode, _mode(mode), _SPCONV) for mode in MODES),
    Family("workloads", "inference, varied scans", rf"{_mode('inference')}/over-.+", _SPCONV, (), VARIED),
    *(
        Family("workloads", f"a layer on shells, {name}", rf"{_SHELL}/{kind}(?:/(?P<way>tuned))?", _SHELLS)
        for kind, name in (
            ("fwd", "forward"),
            (r"map\+fwd", "the first, with its map"),
            (r"fwd\+bwd", "training"),
            (r"map\+fwd\+bwd", "the first, with its map, training"),
        )
    ),
    *(
        Family(
            "workloads",
            f"{flow} on shells, {name}",
            rf"algorithms/{_SHELL}/{kind}/{flow}",
            {**_SHELLS, "FlexGEMM by the same algorithm": Rivals((f"FlexGEMM {algorithm} (",))},
        )
        for flow, algorithm in ALGORITHMS.items()
        for kind, name in (("fwd", "forward"), (r"fwd\+bwd", "training"))
    ),
    *(Family("tuner", mode, _mode(mode), {**_SPCONV, **_DEFAULT}) for mode in MODES),
    *(
        Family("tuner", f"tuned {mode}", rf"{_NETWORK}/{mode}/networks-tuned", _DEFAULT, (), "convolutions")
        for mode in MODES
    ),
    Family("tuner", "dataflows", rf"dataflows/{_LAYER}/(?P<way>.+)", _DEFAULT),
    *(_engine(mode, way) for mode in MODES for way in ("captured", "eager")),
    Family("conv-forward", "layers", rf"{_LAYER}/fwd/(?P<way>default|tuned)", _LAYERS, ("bound",)),
    Family(
        "conv-forward",
        "channels",
        r"channels/(?P<series>[^/]+)/k3/(?P<group>C[\d-]+)/fwd/(?P<way>default|tuned)",
        _SPCONV,
        ("memory", "cache", "matrix"),
    ),
    Family("conv-forward", "layers in tf32", _kinds("tf32"), {"spconv": Rivals(("spconv tf32",))}),
    Family("conv-forward", "layers in exact fp32", _kinds("ieee|tf32x3"), {"spconv": Rivals(("spconv fp32",))}),
    Family("conv-forward", "layers in bf16x3", _kinds("bf16x3"), {"spconv": Rivals(("spconv fp32",))}),
    Family("conv-train", "layers", rf"{_LAYER}/fwd\+bwd/(?P<way>default|tuned)", _LAYERS),
    Family(
        "maps",
        "3x3x3 maps",
        r"map/(?P<group>[^/]+)/k3/(?P<series>shuffled)",
        {**_SPCONV, "the best recorded": Rivals(("spconv", "FlexGEMM"), RECORDED)},
    ),
    Family(
        "einsum",
        "structured SpMM",
        r"structured/(?P<series>\d+/B\d+)/(?P<group>s[\d.]+)/(?P<way>[^/]+)",
        {"PyTorch's BSR": Rivals(("torch BSR",)), "dense": Rivals(("dense",))},
        ("L2 bound",),
    ),
    Family(
        "einsum",
        "unstructured SpMM",
        r"unstructured/(?P<group>[^/]+)/(?P<series>N\d+)/(?P<way>[^/]+)",
        {"cuSPARSE or torch.sparse": Rivals(("torch.sparse.mm", "cuSPARSE"))},
        ("L2 bound",),
    ),
    Family(
        "einsum",
        "convolution",
        r"conv/(?P<group>[^/]+)/k3/(?P<series>C\d+)/(?P<way>[^/]+)",
        {**_SPCONV, "Inductor": Rivals(("Inductor",)), "eager PyTorch": Rivals(("eager",))},
    ),
    *(
        Family("einsum", f"tensor product, {name}", rf"{_PRODUCT}/{part}/(?P<way>[^/]+)", _PRODUCTS, ("memory bound",))
        for name, part in (("forward", "fwd"), ("fwd+bwd", r"fwd\+bwd"))
    ),
    Family(
        "einsum",
        "channelwise products along edges",
        r"messages/(?P<series>N\d+/C\d+)/(?P<group>[^/]+)/(?P<way>[^/]+)",
        {"cuEquivariance": Rivals(("cuEq",)), "e3nn": Rivals(("e3nn",))},
        ("memory bound",),
    ),
    Family("tensor-product", "all", r"(?P<group>.+)", _ANY),
    *(
        Family(
            "graph", f"R-GCN, {name}", rf"relational/(?P<group>[^/]+)/(?P<series>[\d-]+)/{part}/(?P<way>[^/]+)", _GRAPHS
        )
        for name, part in (("forward", "fwd"), ("fwd+bwd", r"fwd\+bwd"))
    ),
    Family(
        "graph",
        "reductions by an index",
        r"segment/(?P<group>[^/]+/[^/]+)/(?P<series>C\d+)/(?P<way>[^/]+)",
        {
            "index_add or scatter_reduce": Rivals(("index_add", "scatter_reduce")),
            "torch_scatter": Rivals(("torch_scatter",)),
        },
    ),
    *(
        Family("points", title, rf"{case}/(?P<group>[^/]+)/(?P<series>[^/]+)/(?P<way>[^/]+)", _POINTS)
        for case, title in (("knn", "k nearest"), ("ball", "within a radius"), ("fps", "farthest points"))
    ),
    *(
        Family(
            "points",
            f"attention, {name}",
            rf"attention/(?P<group>T\d+)/(?P<series>H\d+/D\d+)/{part}/(?P<way>[^/]+)",
            {name: Rivals((f"SDPA {name}",)) for name in ("flash", "cuDNN", "efficient")},
        )
        for name, part in (("forward", "fwd"), ("fwd+bwd", r"fwd\+bwd"))
    ),
    *(
        Family("ucf", f"{zeros} zeros", rf"filters/{level}/(?P<group>.+)", _DENSE)
        for level, zeros in (("0.8", "80 %"), ("0.91", "91 %"), ("0.96", "96 %"), ("0.98", "98 %"))
    ),
    *(
        Family("ucf", f"blocks of {side}, {zeros} zeros", rf"blocks/{level}/{side}/(?P<group>.+)", _DENSE)
        for side in (32, 16)
        for level, zeros in (("0.8", "80 %"), ("0.91", "91 %"), ("0.96", "96 %"), ("0.98", "98 %"))
    ),
    *(
        Family("ucf", f"structures, {zeros}", rf"structures/{zeros}/(?P<group>[^/]+)/(?P<way>.+)", _DENSE)
        for zeros in ("0.5", "0.8", "0.9", "0.95", "0.98")
    ),
    Family("ucf", "sparse images", r"activations/(?P<group>[\d.]+)/(?P<series>C\d+)/converted", _DENSE),
    Family("ucf", "submanifold layers", r"submanifold/(?P<group>[^/]+)/fwd", {**_SPCONV, **_DENSE}),
    Family("ucf", "neighbour retrieval", r"retrieval/(?P<group>[^/]+)", {**_SPCONV, "coords": Rivals(("coords",))}),
    Family("ucf", "neighbour tables", r"retrieval/(?P<group>[^/]+)/table", _SPCONV),
    Family("cpu-conv", "layers", rf"{_LAYER}/fp32/fwd", _SPCONV),
)


def _with_memory(family: Family) -> Iterator[Family]:
    """A family, and behind it that of the peak memory of its cases if they are measured for it."""
    yield family
    rivals = {name: rival for name, rival in family.rivals.items() if rival.source == SAME_RUN}
    if family.suite in _MEASURED and family.metric == "time" and rivals:
        yield replace(family, name=f"{family.name}, {PEAK}", metric=PEAK, rivals=rivals, bounds=())


_MEASURED = ("workloads", "conv-forward", "conv-train", "maps", "einsum", "graph", "points")
"""Suites whose cases are measured for peak memory."""
FAMILIES: tuple[Family, ...] = tuple(each for family in _TIMED for each in _with_memory(family))
"""All families, in the order of the report."""


def suites_of(rows: Iterable[Row]) -> list[str]:
    """The suites of SUITES in order, then other suites that have rows."""
    return list(dict.fromkeys([*SUITES, *(row.suite for row in rows)]))
