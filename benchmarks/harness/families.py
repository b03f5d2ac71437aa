"""Which cases of the results file answer one question: families of cases, how they are read, and who their rivals are.

A case names a cell (what was computed) and, in many suites, the way in which we did it, as in
waymo_1f_5cm/k3/C64/fwd/tuned. A family's pattern reads it: `group` and `series` say where the cell stands in a picture,
`precision` where the case has it (else the row's dtype counts), `way` which of ours it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    "ucf": "other libraries' benchmarks",
    "cpu-conv": "layers on a CPU",
}
"""The suites of the results file, and what they are about."""

SAME_RUN, RECORDED, BOUND = "same run", "recorded", "bound"
"""Where a peer's value comes from."""
VARIED = "time over varied scans"
"""The metric of a network that met several scans in turn; of one scan again and again it is "time"."""
DEFAULT = "default"
"""The way that takes nothing tuned, and the peer of what was."""

PRECISIONS = ("fp16", "bf16", "tf32", "fp32", "fp64", "tf32x3", "bf16x3", "ieee", "int8", "fp8")
MODES = ("inference", "training")
_NETWORK = rf"(?P<group>.+?)/(?P<precision>{'|'.join(PRECISIONS)})"
_MARKS = r"(?P<generated>/generated)?(?:/(?P<way>default|tuned))?"
"""Behind a mode: of scans that were made from a seed, and by which tiles."""
NETWORK = rf"{_NETWORK}/(?P<mode>{'|'.join(MODES)})(?:/(?P<rest>.+))?"
"""A case of a network: MODEL/PRECISION/MODE, and what may come after it. A model's name may have slashes."""
STREAM = r"(?P<group>(?:[^/]+/)*(?:unet|encoder))"
"""A network of the suite stream, behind what its scenes are."""


@dataclass(frozen=True)
class Rivals:
    """Peers whose names begin so, from the same run or recorded elsewhere."""

    names: tuple[str, ...]
    source: str = SAME_RUN

    def holds(self, row: Row) -> bool:
        return row.peer_source == self.source and row.peer.startswith(self.names)


@dataclass(frozen=True)
class Place:
    """Where a case stands in its family."""

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
    """Cases of a suite whose ratios may be averaged. rivals: by what the peers are called together; bounds: the names
    of what no kernel can beat."""

    suite: str
    name: str
    pattern: str
    rivals: Mapping[str, Rivals]
    bounds: tuple[str, ...] = ()
    metric: str = "time"

    def place(self, row: Row) -> Place | None:
        """Where a row's case stands; None if it is none of this family's."""
        if row.suite != self.suite or row.metric != self.metric:
            return None
        found = re.fullmatch(self.pattern, row.case)
        if found is None:
            return None
        parts = found.groupdict(default="")
        # As studies of the tuner call it.
        group = parts["group"] + "-generated" * bool(parts.get("generated"))
        return Place(group, parts.get("series", ""), parts.get("precision") or row.dtype, parts.get("way", ""))


LIBRARIES = (
    *("spconv", "torchsparse", "TorchSparse", "MinkowskiEngine", "FlexGEMM", "WarpConvNet", "fVDB"),
    *("torch.sparse", "torch BSR", "cuSPARSE", "Inductor", "eager", "e3nn", "cuEq", "torch_geometric", "PyG", "DGL"),
)
"""Beginnings of the names of other libraries: a peer of the same run may also be a way of our own."""
_SPCONV = {"spconv": Rivals(("spconv",))}
_DEFAULT = {"its default": Rivals((DEFAULT,))}
_LAYERS = {**_SPCONV, "the best recorded": Rivals(("best recorded",), RECORDED)}
_ANY = {"the best peer": Rivals(LIBRARIES)}
_LAYER = r"(?P<group>[^/]+)/k3/(?P<series>C[\d-]+)"
_PRODUCTS = {"e3nn or cuEquivariance": Rivals(("e3nn", "cuEq")), "dense einsum": Rivals(("dense",))}
_PRODUCT = r"tensor-product/(?P<group>l\d+/C\d+)/(?P<series>[^/]+)"


def _mode(mode: str) -> str:
    """Networks in one mode, as a whole."""
    return rf"{_NETWORK}/{mode}{_MARKS}"


def _kinds(name: str) -> str:
    return rf"dtypes/(?P<group>[^/]+)/k3/(?P<series>C\d+)/(?P<precision>{name})"


def _engine(mode: str, way: str) -> Family:
    """A mode of networks in one way, captured or eager."""
    rivals = {**_LAYERS, **({} if way == "eager" else {"our eager pass": Rivals(("our eager pass",))})}
    return Family("engine", f"{way} {mode}", rf"{_NETWORK}/{mode}(?:/tuned)?/{way}", rivals)


FAMILIES: tuple[Family, ...] = (
    *(
        Family("stream", f"{way} {name}", rf"{STREAM}/{mode}/{way}", _SPCONV, (), "p50")
        for mode, name in (("infer", "inference"), ("train", "training"))
        for way in ("eager", "compiled", "captured")
    ),
    *(Family("workloads", mode, _mode(mode), _SPCONV) for mode in MODES),
    Family("workloads", "inference, varied scans", rf"{_mode('inference')}/over-.+", _SPCONV, (), VARIED),
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
    *(Family(suite, "all", r"(?P<group>.+)", _ANY) for suite in ("tensor-product", "graph", "ucf")),
    Family("cpu-conv", "layers", rf"{_LAYER}/fp32/fwd", _SPCONV),
)
"""What the results file's ratios are averaged over, in the order of the report."""


def suites_of(rows: Iterable[Row]) -> list[str]:
    """The known suites in their order, then others that have rows."""
    return list(dict.fromkeys([*SUITES, *(row.suite for row in rows)]))
