"""Named dataflows of a sparse convolution. Plain data: no tensors, no launches.

A dataflow is a form (storage layout) of the kernel map and a loop order of

    y[o, n] += map[o, k, i] * x[i, c] * w[n, k, c]      o outputs, i inputs, k kernel offsets, c and n channels

Sources: TorchSparse (Tang et al., MLSys 2022), TorchSparse++ (Tang et al., MICRO 2023), and the algorithms of spconv 2
and FlexGEMM.

Kernel offsets are multiplied in groups, which depend on the number of pairs per offset.

In a batched GEMM over a group g, every offset costs as much as the longest one. The share of redundant operations, that
of padding rows, is

    padding(g) = 1 - sum over k in g of n[k] / (len(g) * max over k in g of n[k])            n[k]: pairs of offset k

Groupings of TorchSparse (Tang et al., MLSys 2022, section 4.2), which trade padding for larger products:

    separate    every offset by itself
    symmetric   offsets k and K-1-k of a submanifold map, which have equally many pairs; the centre by itself
    fixed       a submanifold map in three groups: the first four offsets with their mirror images, all others, and the
                centre; any other map in one
    adaptive    runs with padding(g) <= epsilon; batched if max n[k] < S, otherwise one plain GEMM per offset

Offsets are taken in the order 0, 1, 2, ..., on a submanifold map each with its mirror image K-1-k, and the centre,
which pairs every row with itself, by itself. Without the centre, adaptive is one dense group for epsilon = 1 and S
above all n[k], separate for S = 0, and symmetric for epsilon = 0 and such an S, where neighbours in this order differ
in n[k].

The paper bounds two shares by epsilon: section 4.2.3 that of redundant operations, as here, and algorithm 4 the larger
1 - min n[k] / max n[k]. For the fixed grouping it names W0 to W3 without their mirror images, which have the same
sizes, and does not say in which order offsets are numbered; here the last coordinate runs fastest.
Epsilon and S are to be found for each layer: schedule/grouping_search.py.
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


_FIRST = 4  # The first offsets of a submanifold map that the fixed grouping keeps apart, W0 to W3


class OffsetGroup(NamedTuple):
    """Kernel offsets of a group, in order. batched: one batched GEMM for all of them, otherwise one plain GEMM each."""

    taps: Taps
    batched: bool


@dataclass(frozen=True)
class Grouping:
    """A rule that groups kernel offsets; kind: a name in GROUPINGS.

    epsilon, size (adaptive): the maximum share of redundant operations (0..1), and S, the number of pairs from which
    one offset fills a device. `pumice.tune` finds both for each layer in the mode "grouping".
    """

    kind: str
    epsilon: float = 0.3
    size: int = 25_000

    def __post_init__(self) -> None:
        OptionError.check("grouping", self.kind, GROUPINGS)
        if self.size < 0 or not 0 <= self.epsilon <= 1:
            found = f"size={self.size}, epsilon={self.epsilon}"
            raise OptionError(f"size is at least 0, epsilon from 0 to 1; found {found}")

    def groups(self, counts: Sequence[int]) -> tuple[OffsetGroup, ...]:
        """The groups for these pair counts by offset; each offset is in exactly one group."""
        return _groups(self, tuple(counts))

    def __str__(self) -> str:
        return f"adaptive(epsilon={self.epsilon:g}, S={self.size})" if self.kind == "adaptive" else self.kind


def padding(counts: Sequence[int], taps: Sequence[int]) -> float:
    """The share of redundant operations, those of padding rows, in a batched GEMM over these offsets."""
    longest = max((counts[tap] for tap in taps), default=0)
    return 1 - sum(counts[tap] for tap in taps) / (len(taps) * longest) if longest else 0.0


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
    first = _FIRST if _mirrored(counts) else len(units)
    for unit in (_merge_units(units[:first]), _merge_units(units[first:]), *_centre(counts)):
        if unit:
            yield OffsetGroup(unit, len(unit) > 1)


def _adaptive(how: Grouping, counts: Taps) -> Iterator[OffsetGroup]:
    run: Taps = ()
    for unit in _units(counts):
        if run and padding(counts, run + unit) > how.epsilon:
            yield _as_group(how, counts, run)
            run = ()
        run += unit
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
    all are). devices: device types on which it is worth trying; it runs on both. source: the paper. skipped: its
    layouts of the map are built, but no kernel runs and the result is zeros, in trials of other passes.
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
    skipped: bool = False

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
    if choice in DATAFLOWS:
        return DATAFLOWS[choice]
    count = number_after(_SPLIT, choice)
    if count is None:
        raise OptionError(
            f"dataflow {choice!r} is unknown; there are {', '.join(DATAFLOWS)}, and {_SPLIT}N for any N from 2 on"
        )
    return split_dataflow(count)


def number_after(prefix: str, name: str) -> int | None:
    """N of the name prefixN, from 2 on; None for other names."""
    count = name.removeprefix(prefix)
    other = count == name or not count.isdecimal() or str(int(count)) != count or int(count) < 2
    return None if other else int(count)


def is_named(flow: Dataflow) -> bool:
    """True if the dataflow is the one of its name."""
    try:
        return _named(flow.name) == flow
    except OptionError:
        return False


def skipping(choice: str | Dataflow | Dataflows, kept: Sequence[str]) -> Dataflows:
    """The choice with the kernels of all passes but `kept` skipped (Dataflow.skipped)."""
    passes = zip(PASSES, chosen(choice), strict=True)
    return Dataflows(*(flow if name in kept else replace(flow, skipped=True) for name, flow in passes))


_TS, _TSPP = "TorchSparse, MLSys 2022", "TorchSparse++, MICRO 2023"
_ADDED = (WGRAD,)  # deterministic passes of dataflows that accumulate outputs by atomics


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
        f"implicit-gemm-{how}", "implicit", form, source, splits, splits > 0, piece, None, PASSES, ("cuda",)
    )


_SPLIT = "implicit-gemm-split"


@lru_cache(maxsize=64)
def split_dataflow(count: int) -> Dataflow:
    """Implicit GEMM over rows sorted in `count` ranges of kernel offsets, 0: not sorted. A map with fewer offsets has
    as many ranges as offsets. Raises OptionError for a negative count."""
    if count < 0:
        raise OptionError(f"a number of splits is at least 0, found {count}")
    how = {0: "unsorted", 1: "sorted"}.get(count, f"split{count}")
    form = {0: "unsorted", 1: "compacted"}.get(count, how)
    return _implicit(how, form, f"{_TSPP}, sec. 4.1 ({count} split{'s' * (count != 1)})", count)


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
    *map(split_dataflow, range(5)),
    _implicit("online", "online", f"{_TSPP}, sec. 6.2: rows are reordered in the kernel"),
    # With few outputs, programs split the loop over all kernel offsets and accumulate.
    replace(_implicit("table", "table", f"{_TSPP}; FlexGEMM, implicit GEMM", 0), repeats=()),
    replace(
        _implicit("table-split-k", "table", "FlexGEMM, implicit GEMM with split-K and a final sum", 0),
        movement="in-parts",
        # Weight gradients are those of the table.
        repeats=(FORWARD, DGRAD),
    ),
    _implicit("split-k", "compacted", "FlexGEMM, masked implicit GEMM with split-K; stream-K: PPoPP 2023", 1, 8),
)

DATAFLOWS: Mapping[str, Dataflow] = MappingProxyType({flow.name: flow for flow in _LIST})  # the dataflows by name

PLANNED = Dataflow("planned", "planned", "planned", "the planner's choice without a named dataflow")
"""Leaves one pass to the planner beside named dataflows. A layer without any has None."""
