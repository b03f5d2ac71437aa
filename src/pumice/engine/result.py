"""What tuning a network gave: a value that can be printed, applied to the network and taken off it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from torch import nn

from pumice.engine.measure import PassTiming
from pumice.engine.subject import bare
from pumice.errors import OptionError
from pumice.nn.conv import Convolution
from pumice.ops.conv import Flow

NOT_ASKED = "not asked"
"""Why a group runs what it does that the budget did not reach for."""


@dataclass(frozen=True)
class Trial:
    """A dataflow that a group tried, in these passes. predicted: seconds of the group's layers, by the cost model.

    seconds: of the network for a scene, nan where it was not measured; stood: of what it was compared with.
    refused: why it could not be run.
    """

    flow: str
    passes: tuple[str, ...]
    predicted: float
    seconds: float = math.nan
    stood: float = math.nan
    refused: str = ""

    @property
    def gain(self) -> float:
        """By what share of the network's time it was faster."""
        return 1 - self.seconds / self.stood

    def __str__(self) -> str:
        if self.refused:
            return f"{self.flow}: refused ({self.refused})"
        return f"{self.flow} {100 * -self.gain:+.1f} %"


@dataclass(frozen=True)
class DataflowChoice:
    """What a group of layers runs, and why. rows, pairs: of the map, on average over the scenes; pairs of a row.

    predicted: seconds of its layers by the cost model, as the planner picks. flow: what the layers have as `dataflow`.
    trials: nothing where it was not asked.
    """

    group: str
    layers: tuple[str, ...]
    rows: float
    pairs: float
    predicted: float
    flow: Flow
    trials: tuple[Trial, ...]
    why: str

    @property
    def asked(self) -> bool:
        """Whether the budget reached for all that there was to ask it."""
        return NOT_ASKED not in self.why


@dataclass(frozen=True)
class Tiles:
    """Tiles that were timed for a group's kernels: how many, seconds of the network with the tiles before and with
    these, and whether these stay in the ledger."""

    group: str
    kernels: int
    before: float
    after: float
    kept: bool

    def __str__(self) -> str:
        told = f"{self.kernels} tiles timed, the network {100 * (self.after / self.before - 1):+.1f} %"
        return f"{self.group}: {told}, {'kept' if self.kept else 'not kept: by themselves they were faster'}"


@dataclass(frozen=True)
class Tuning:
    """The dataflows that were chosen for a network, and what they bring.

    choices: of every group. before, after: what a pass over a scene takes, as the planner picks and as chosen.
    tiles: what the timing of tiles gave. notes: what there is to say besides. finished: whether every group was asked;
    a later tune goes on where not. reused: whether it was found in the ledger. seconds: that it took.
    """

    mode: str
    device: str
    choices: tuple[DataflowChoice, ...]
    before: PassTiming
    after: PassTiming
    tiles: tuple[Tiles, ...] = ()
    notes: tuple[str, ...] = ()
    finished: bool = True
    reused: bool = False
    seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """How many times as fast, by the clock of `before` and `after`."""
        return self.before.total / self.after.total if self.after.total else 1.0

    @cached_property
    def flows(self) -> Mapping[str, Flow]:
        """What each layer runs, by its name."""
        return MappingProxyType({layer: choice.flow for choice in self.choices for layer in choice.layers})

    def apply(self, model: nn.Module) -> None:
        """Have the layers of a model of the same shape run what was chosen; those set by hand keep what they have.

        Raises OptionError for a model that has no such layers.
        """
        for layer, flow in self._layers(model):
            if layer.dataflow == layer.tuned:
                layer.dataflow = layer.tuned = flow

    def remove(self, model: nn.Module) -> None:
        """Have the planner pick again for the layers that were tuned, as torch.compile needs it. Raises as `apply`."""
        for layer, _ in self._layers(model):
            if layer.dataflow == layer.tuned:
                layer.dataflow = layer.tuned = None

    def _layers(self, model: nn.Module) -> Iterator[tuple[Convolution, Flow]]:
        modules = dict(bare(model).named_modules())
        for name, flow in self.flows.items():
            layer = modules.get(name)
            if not isinstance(layer, Convolution):
                raise OptionError(
                    f"{type(model).__name__} has no convolution {name!r}; this tuning is of another model"
                )
            yield layer, flow

    def __str__(self) -> str:
        state = "" if self.finished else ", unfinished"
        state += ", from the ledger" if self.reused else f", in {self.seconds:.1f} s"
        head = f"{self.mode} on {self.device}: {1e3 * self.before.total:.3f} -> {1e3 * self.after.total:.3f} ms"
        lines = [f"{head} a scene, {self.speedup:.2f}x ({self.after.clock}{state})", *self._table()]
        lines += [f"tiles of {told}" for told in map(str, self.tiles)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes if note)])

    def _table(self) -> Iterator[str]:
        head = ("map", "layers", "rows", "pairs/row", "dataflow", "why")
        rows = [
            (c.group, str(len(c.layers)), f"{c.rows:.0f}", f"{c.pairs:.1f}", _told(c.flow), c.why) for c in self.choices
        ]
        yield from _aligned([head, *rows], (1, 2, 3))


def _told(flow: Flow) -> str:
    return "as the planner picks" if flow is None else str(flow)


def _aligned(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> Iterator[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
