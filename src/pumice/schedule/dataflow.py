"""In what order a sparse convolution runs: dataflows by name. Values: no tensors, no launches.

A dataflow is a form of the kernel map and an order of the loops of

    y[o, n] += map[o, k, i] * x[i, c] * w[n, k, c]              o outputs, i inputs, k taps, c and n channels

Sources: TorchSparse (Tang et al., MLSys 2022), TorchSparse++ (Tang et al., MICRO 2023), and the algorithms that
spconv 2 and FlexGEMM offer.
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
"""What a layer computes: its result, the gradient of its input, and that of its weight."""


@dataclass(frozen=True)
class Dataflow:
    """One way of carrying out a convolution; DATAFLOWS has those with a name.

    movement: how features get to the products and back (lower.dataflow.ENGINES has an engine for each).
    form: of the map that is read (coords: "rows" or "pairs"; lower.maps.FORMS the others). splits: into how many ranges
    the taps are split, each with an order of rows of its own. sorted: whether rows are sorted by the taps they have.
    piece: entries of a segment that one program takes, where several share it; 0: none is shared.
    grouping: which taps are multiplied together, where taps are. repeats: the passes that are the same bit for bit from
    run to run on a GPU; on a CPU all are. devices: on which it makes sense; it runs on all. source: the paper.
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
    """The dataflows of the three passes of a layer, each by name or as a value; those left out are the forward one's.

    dgrad runs its dataflow on the transposed map. "planned" is what the planner picks, for one of the passes.
    """

    forward: str | Dataflow
    dgrad: str | Dataflow | None = None
    wgrad: str | Dataflow | None = None

    def __post_init__(self) -> None:
        chosen(self)

    def __str__(self) -> str:
        return " / ".join(str(flow) for flow in chosen(self))


Chosen = tuple[Dataflow, Dataflow, Dataflow]
"""Of forward, dgrad and wgrad."""


def chosen(choice: str | Dataflow | Dataflows) -> Chosen:
    """The three dataflows that are asked for. Raises OptionError for what has no such name, with those that exist."""
    if not isinstance(choice, str | Dataflow | Dataflows):
        raise OptionError(f"a dataflow is a name, a Dataflow or Dataflows, found {type(choice).__name__}")
    return _chosen(choice)


@lru_cache(maxsize=256)
def _chosen(asked: str | Dataflow | Dataflows) -> Chosen:
    if not isinstance(asked, Dataflows):
        flow = _named(asked)
        return flow, flow, flow
    forward = _named(asked.forward)
    dgrad, wgrad = (forward if other is None else _named(other) for other in (asked.dgrad, asked.wgrad))
    return forward, dgrad, wgrad


def _named(asked: str | Dataflow) -> Dataflow:
    if isinstance(asked, Dataflow):
        return asked
    if asked == PLANNED.name:
        return PLANNED
    if asked not in DATAFLOWS:
        raise OptionError(f"dataflow {asked!r} is unknown; there are {', '.join(DATAFLOWS)}")
    return DATAFLOWS[asked]


_TS, _TSPP = "TorchSparse, MLSys 2022", "TorchSparse++, MICRO 2023"
_ADDED = (WGRAD,)
"""What repeats where results are added in any order."""
_OVER_TILES = (FORWARD, DGRAD)
"""What repeats where each output is one program's, and weights are added up by many."""


def _gathering(movement: str, repeats: tuple[str, ...]) -> list[Dataflow]:
    """Gather-GEMM-scatter with every grouping."""
    found = []
    for kind in GROUPINGS:
        # Within one tap an output occurs once: nothing is added in any order.
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
    # Of few outputs the loop over all taps is shared by programs that add.
    replace(_implicit("table", "table", f"{_TSPP}; FlexGEMM, implicit GEMM", 0), repeats=()),
    _implicit("split-k", "compacted", "FlexGEMM, masked implicit GEMM with split-K; stream-K: PPoPP 2023", 1, 8),
)

DATAFLOWS: Mapping[str, Dataflow] = MappingProxyType({flow.name: flow for flow in _LIST})
"""The dataflows by name."""

PLANNED = Dataflow("planned", "planned", "planned", "what the planner picks where no dataflow is named")
"""For a pass beside others that have a name; a layer without any has none."""
