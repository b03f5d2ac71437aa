"""Named dataflows of a sparse convolution. Plain data: no tensors, no launches.

A dataflow is a form (storage layout) of the kernel map and a loop order of

    y[o, n] += map[o, k, i] * x[i, c] * w[n, k, c]      o outputs, i inputs, k kernel offsets, c and n channels

Sources: TorchSparse (Tang et al., MLSys 2022), TorchSparse++ (Tang et al., MICRO 2023), and the algorithms of spconv 2
and FlexGEMM.

Kernel offsets are multiplied in groups, which depend on the number of pairs per offset.

In a batched GEMM over a group g, every offset costs as much as the longest one. The share of padding rows is

    padding(g) = 1 - sum over k in g of n[k] / (len(g) * max over k in g of n[k])            n[k]: pairs of offset k

which is at most

    spread(g) = 1 - min over k in g of n[k] / max over k in g of n[k]

Groupings of TorchSparse (Tang et al., MLSys 2022), which trade padding for larger products:

    separate    every offset by itself
    symmetric   offsets k and K-1-k of a submanifold map, which have equally many pairs; the centre by itself
    fixed       runs of a fixed number of offsets; all at once if the map is not symmetric
    adaptive    runs with spread(g) <= epsilon; batched if max n[k] < S, otherwise one plain GEMM per offset

Offsets are taken in the order 0, K-1, 1, K-2, ..., the centre last. If n is symmetric, as for a submanifold map, no run
separates k from K-1-k, and the centre, which pairs every row with itself, is a group of its own.

Sources of the groups: order, spread, S and the ranges of epsilon and S follow TorchSparse's public code (torchsparse
2.1, files backend/convolution/convolution_gather_scatter_cuda.cu and utils/tune.py), which multiplies the centre of a
submanifold map without gathering. Its untuned epsilon and S are 0, equivalent to separate. Fixed and symmetric are in
the paper only (section 4.2.2), whose fixed grouping has three groups; the default `width` is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from pumice.errors import OptionError

# Groups of kernel offsets
Taps = tuple[int, ...]


class OffsetGroup(NamedTuple):
    """Kernel offsets of a group, in order. batched: one batched GEMM for all of them, otherwise one plain GEMM each."""

    taps: Taps
    batched: bool


@dataclass(frozen=True)
class Grouping:
    """A rule that groups kernel offsets; kind: a name in GROUPINGS.

    width (fixed): units per run, pairs of offsets if the map is symmetric. epsilon, size (adaptive): the maximum spread
    (0..1), and S, the number of pairs from which one offset fills a device. Both should be tuned per layer, as in the
    paper.
    """

    kind: str
    width: int = 4
    epsilon: float = 0.3
    size: int = 25_000

    def __post_init__(self) -> None:
        if self.kind not in GROUPINGS:
            raise OptionError(f"grouping {self.kind!r} is unknown; there are {', '.join(GROUPINGS)}")
        if self.width < 1 or self.size < 0 or not 0 <= self.epsilon <= 1:
            found = f"width={self.width}, size={self.size}, epsilon={self.epsilon}"
            raise OptionError(f"width is at least 1, size at least 0, epsilon from 0 to 1; found {found}")

    def groups(self, counts: Sequence[int]) -> tuple[OffsetGroup, ...]:
        """The groups for these pair counts by offset; each offset is in exactly one group."""
        return _groups(self, tuple(counts))

    def __str__(self) -> str:
        settings = {"fixed": f"(width={self.width})", "adaptive": f"(epsilon={self.epsilon}, S={self.size})"}
        return self.kind + settings.get(self.kind, "")


def padding(counts: Sequence[int], taps: Sequence[int]) -> float:
    """The share of padding rows in a batched GEMM over these offsets."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - sum(counts[tap] for tap in taps) / (len(taps) * longest) if longest else 0.0


def spread(counts: Sequence[int], taps: Sequence[int]) -> float:
    """1 - smallest / largest pair count of these offsets; an upper bound of their padding."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - min(counts[tap] for tap in taps) / longest if longest else 0.0


@lru_cache(maxsize=1024)
def _groups(how: Grouping, counts: Taps) -> tuple[OffsetGroup, ...]:
    return tuple(GROUPINGS[how.kind](how, counts))


def _separate(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    for tap in range(len(counts)):
        yield OffsetGroup((tap,), False)


def _symmetric(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    for unit in (*_units(counts), *_centre(counts)):
        yield OffsetGroup(unit, len(unit) > 1)


def _fixed(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    units = _units(counts)
    width = how.width if _mirrored(counts) else max(1, len(units))
    for at in range(0, len(units), width):
        yield OffsetGroup(_merge_units(units[at : at + width]), True)
    for unit in _centre(counts):
        yield OffsetGroup(unit, False)


def _adaptive(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    run: list[int] = []
    for tap in _outside_in(counts):
        if run and spread(counts, [*run, tap]) > how.epsilon:
            yield _as_group(how, counts, run)
            run = []
        run.append(tap)
    if run:
        yield _as_group(how, counts, run)
    for unit in _centre(counts):
        yield OffsetGroup(unit, False)


def _as_group(how: Grouping, counts: Taps, run: Sequence[int]) -> OffsetGroup:
    return OffsetGroup(tuple(sorted(run)), len(run) > 1 and max(counts[tap] for tap in run) < how.size)


def _mirrored(counts: Taps) -> bool:
    return len(counts) > 1 and counts == counts[::-1]


def _units(counts: Taps) -> list[Taps]:
    """Pairs (k, K-1-k) of symmetric counts, without the centre; single offsets of others."""
    if not _mirrored(counts):
        return [(tap,) for tap in range(len(counts))]
    return [(tap, len(counts) - 1 - tap) for tap in range(len(counts) // 2)]


def _outside_in(counts: Taps) -> Iterator[int]:
    """0, K-1, 1, K-2, ..., without the centre of symmetric counts."""
    for tap in range(len(counts) // 2):
        yield from (tap, len(counts) - 1 - tap)
    if len(counts) % 2 and not _mirrored(counts):
        yield len(counts) // 2


def _centre(counts: Taps) -> list[Taps]:
    return [(len(counts) // 2,)] if _mirrored(counts) and len(counts) % 2 else []


def _merge_units(units: Sequence[Taps]) -> Taps:
    return tuple(sorted(tap for unit in units for tap in unit))


GROUPINGS: Mapping[str, Callable[[Grouping, Taps], Iterator[OffsetGroup]]] = MappingProxyType(
    {"separate": _separate, "symmetric": _symmetric, "fixed": _fixed, "adaptive": _adaptive}
)  # the groupings by name


# Dataflows
PASSES = FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"
"""Passes of a layer, for the output, input gradient, weight gradient."""


@dataclass(frozen=True)
class Dataflow:
    """A convolution algorithm; DATAFLOWS has the named ones.

    movement: how features are gathered and results written, a key of lower.dataflow.ENGINES.
    form: layout of the kernel map ("rows" or "pairs" of coords, or one of lower.maps.FORMS). splits: number of ranges
    of kernel offsets, each with its own row order. sorted: rows are sorted by the kernel offsets that they have.
    piece: stream-K, the maximum entries of a segment per program; 0: one program per segment.
    grouping: of kernel offsets, for batched GEMMs. repeats: passes that are bitwise deterministic on a GPU (on a CPU
    all are). devices: device types on which it is worth trying; it runs on both. source: the paper.
    """

    name: str
    movement: str
    form: str
    source: str
    splits: int = 0
    sorted: bool = False
    piece: int = 0
    grouping: Grouping | None = None
    repeats: tuple[str, ...] = PASSES
    devices: tuple[str, ...] = ("cuda", "cpu")

    def __str__(self) -> str:
        known = self.grouping is None or self == DATAFLOWS.get(self.name)
        return self.name if known else f"{self.name} {self.grouping}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> Dataflow:
        grouping = data["grouping"]
        tuples = {name: tuple(data[name]) for name in ("repeats", "devices")}
        return Dataflow(**{**data, **tuples, "grouping": grouping and Grouping(**grouping)})


@dataclass(frozen=True)
class Dataflows:
    """Dataflows of the three passes, each a name or a Dataflow; None: the one of the forward pass.

    dgrad runs its dataflow on the transposed map. The name "planned" leaves a pass to the planner.
    """

    forward: str | Dataflow
    dgrad: str | Dataflow | None = None
    wgrad: str | Dataflow | None = None

    def __post_init__(self) -> None:
        chosen(self)

    def __str__(self) -> str:
        return " / ".join(str(flow) for flow in chosen(self))


Chosen = tuple[Dataflow, Dataflow, Dataflow]  # dataflows of forward, dgrad and wgrad


def chosen(choice: str | Dataflow | Dataflows) -> Chosen:
    """(forward, dgrad, wgrad) dataflows of a choice. Raises OptionError with the known names for an unknown one."""
    if not isinstance(choice, str | Dataflow | Dataflows):
        raise OptionError(f"a dataflow is a name, a Dataflow or Dataflows, found {type(choice).__name__}")
    return _chosen(choice)


@lru_cache(maxsize=256)
def _chosen(choice: str | Dataflow | Dataflows) -> Chosen:
    if not isinstance(choice, Dataflows):
        flow = _named(choice)
        return flow, flow, flow
    forward = _named(choice.forward)
    dgrad, wgrad = (forward if other is None else _named(other) for other in (choice.dgrad, choice.wgrad))
    return forward, dgrad, wgrad


def _named(choice: str | Dataflow) -> Dataflow:
    if isinstance(choice, Dataflow):
        return choice
    if choice == PLANNED.name:
        return PLANNED
    if choice not in DATAFLOWS:
        raise OptionError(f"dataflow {choice!r} is unknown; there are {', '.join(DATAFLOWS)}")
    return DATAFLOWS[choice]


_TS, _TSPP = "TorchSparse, MLSys 2022", "TorchSparse++, MICRO 2023"
_ADDED = (WGRAD,)  # deterministic passes of dataflows that accumulate outputs by atomics
_OVER_TILES = (FORWARD, DGRAD)  # the same if each output has one program and only wgrad uses atomics


def _gathering(movement: str, repeats: tuple[str, ...]) -> list[Dataflow]:
    """Gather-GEMM-scatter with every grouping."""
    found = []
    for kind in GROUPINGS:
        # Within one kernel offset an output occurs once: no atomics.
        each = PASSES if movement == "vectorised" and kind == "separate" else repeats
        name, source = f"gather-gemm-scatter-{movement}-{kind}", f"{_TS}: data movement; algorithms 4 and 5: grouping"
        found.append(Dataflow(name, movement, "pairs", source, grouping=Grouping(kind), repeats=each))
    return found


def _implicit(how: str, form: str, source: str, splits: int = 1, piece: int = 0) -> Dataflow:
    return Dataflow(
        f"implicit-gemm-{how}", "implicit", form, source, splits, splits > 0, piece, None, _OVER_TILES, ("cuda",)
    )


_LIST = (
    Dataflow("explicit-gemm", "explicit", "rows", "FlexGEMM, explicit GEMM; im2col: Chellapilla et al., IWFHR 2006"),
    *_gathering("vectorised", _ADDED),
    *_gathering("fused", _ADDED),
    *_gathering("locality-aware", PASSES),
    Dataflow("fetch-on-demand", "on-demand", "grouped", _TSPP, repeats=(), devices=("cuda",)),
    Dataflow(
        "fetch-on-demand-deterministic",
        "on-demand-in-order",
        "grouped",
        f"{_TSPP}; products are written in the order of the outputs and then summed, not added by atomics",
        devices=("cuda",),
    ),
    _implicit("unsorted", "unsorted", f"{_TSPP}, sec. 4 (0 splits)", 0),
    _implicit("sorted", "compacted", f"{_TSPP}, sec. 4 (1 split)"),
    *(_implicit(f"split{n}", f"split{n}", f"{_TSPP}, sec. 4 ({n} splits)", n) for n in (2, 3, 4)),
    # With few outputs, programs split the loop over all kernel offsets and accumulate.
    replace(_implicit("table", "table", f"{_TSPP}; FlexGEMM, implicit GEMM", 0), repeats=()),
    replace(
        _implicit("table-split-k", "table", "FlexGEMM, implicit GEMM with split-K and a final sum", 0),
        movement="in-parts",
    ),
    _implicit("split-k", "compacted", "FlexGEMM, masked implicit GEMM with split-K; stream-K: PPoPP 2023", 1, 8),
)

DATAFLOWS: Mapping[str, Dataflow] = MappingProxyType({flow.name: flow for flow in _LIST})  # the dataflows by name

PLANNED = Dataflow("planned", "planned", "planned", "the planner's choice without a named dataflow")
"""Leaves one pass to the planner beside named dataflows. A layer without any has None."""
