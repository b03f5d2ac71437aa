"""Dataflows of a sparse convolution by name. Values: no tensors, no launches.

A dataflow is a form of the kernel map and a loop order of

    y[o, n] += map[o, k, i] * x[i, c] * w[n, k, c]      o outputs, i inputs, k kernel offsets, c and n channels

Sources: TorchSparse (Tang et al., MLSys 2022), TorchSparse++ (Tang et al., MICRO 2023), and the algorithms of spconv 2
and FlexGEMM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pumice.errors import OptionError
from pumice.schedule.grouping import GROUPINGS, Grouping

PASSES = FORWARD, DGRAD, WGRAD = "forward", "dgrad", "wgrad"
"""Passes of a layer: output, input gradient, weight gradient."""


@dataclass(frozen=True)
class Dataflow:
    """One algorithm for a convolution; DATAFLOWS has the named ones.

    movement: how features reach the products and return (lower.dataflow.ENGINES has an engine for each).
    form: of the kernel map (coords: "rows" or "pairs"; others: lower.maps.FORMS). splits: number of ranges of kernel
    offsets, each with its own row order. sorted: rows are sorted by their kernel offsets.
    piece: entries of a segment per program where several share it; 0: not shared.
    grouping: which kernel offsets are multiplied together. repeats: passes that are bitwise deterministic on a GPU (on
    a CPU all are). devices: where it is worthwhile; it runs on all. source: the paper.
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
    """Dataflows of the three passes, each a name or a value; one left out is that of the forward pass.

    dgrad runs its dataflow on the transposed map. "planned" leaves a pass to the planner.
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
    """The dataflows of the three passes. Raises OptionError for an unknown name; the message lists the known ones."""
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
_ADDED = (WGRAD,)  # passes that are deterministic where results are accumulated by atomics
_OVER_TILES = (FORWARD, DGRAD)  # the same where one program owns each output and many add to the weights


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
    _implicit("split-k", "compacted", "FlexGEMM, masked implicit GEMM with split-K; stream-K: PPoPP 2023", 1, 8),
)

DATAFLOWS: Mapping[str, Dataflow] = MappingProxyType({flow.name: flow for flow in _LIST})  # the dataflows by name

PLANNED = Dataflow("planned", "planned", "planned", "the planner's choice without a named dataflow")
"""For one pass next to named dataflows of others; a layer without a named dataflow has none."""
