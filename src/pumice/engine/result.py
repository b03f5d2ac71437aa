"""Result of tuning a network: can be printed, applied to a model, and removed from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import nn

from pumice.engine.measure import PassTiming
from pumice.engine.subject import bare
from pumice.engine.text import aligned
from pumice.errors import OptionError
from pumice.nn.conv import Convolution
from pumice.ops.conv import Flow
from pumice.schedule.dataflow import Dataflow, Dataflows

NOT_ASKED = "skipped: out of budget"  # Reason of a group that the budget did not suffice for


@dataclass(frozen=True)
class Trial:
    """A dataflow tried for these passes of a group. predicted: cost model estimate of the group's layers, in seconds.

    seconds: time of the network per scene, nan if not measured; stood: that of the assignment it was compared with.
    refused: reason why it could not run.
    """

    flow: str
    passes: tuple[str, ...]
    predicted: float
    seconds: float = math.nan
    stood: float = math.nan
    refused: str = ""

    @property
    def gain(self) -> float:
        """Reduction of the network's time, as a fraction."""
        return 1 - self.seconds / self.stood

    def __str__(self) -> str:
        if self.refused:
            return f"{self.flow}: refused ({self.refused})"
        return f"{self.flow} {100 * -self.gain:+.1f} %"


@dataclass(frozen=True)
class DataflowChoice:
    """Dataflow of a layer group, and why. rows: of the kernel map; pairs: per row; both means over the scenes.

    predicted: cost model estimate of its layers with the default, in seconds. flow: the layers' `dataflow`.
    trials: empty if the group was skipped.
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
        """True if the budget sufficed for all tasks of the group."""
        return NOT_ASKED not in self.why


@dataclass(frozen=True)
class Tiles:
    """Tile tuning of a group. kernels: tiles found. before, after: seconds of the network with old and new tiles. kept:
    True if the new ones stay in the tile cache."""

    group: str
    kernels: int
    before: float
    after: float
    kept: bool

    def __str__(self) -> str:
        change = f"{self.kernels} tiles timed, the network {100 * (self.after / self.before - 1):+.1f} %"
        return f"{self.group}: {change}, {'kept' if self.kept else 'dropped: faster only in isolation'}"


@dataclass(frozen=True)
class Tuning:
    """Dataflows chosen for a network, and their effect.

    choices: one per group. before, after: time of a pass per scene, with the default and as chosen. tiles: results of
    tile tuning. notes: remarks. finished: True if every group was tuned; otherwise a later tune resumes. reused: True
    if from the tuning cache. seconds: duration of the tuning.
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
        """Speed-up, before / after."""
        return self.before.total / self.after.total if self.after.total else 1.0

    @cached_property
    def flows(self) -> Mapping[str, Flow]:
        """Dataflow of each layer, by name."""
        return MappingProxyType({layer: choice.flow for choice in self.choices for layer in choice.layers})

    def apply(self, model: nn.Module) -> None:
        """Set the dataflows of a model with the same layers; those set by hand are kept.

        Raises OptionError if the model lacks one of the layers.
        """
        for layer, flow in self._layers(model):
            if layer.dataflow == layer.tuned:
                layer.dataflow = layer.tuned = flow

    def remove(self, model: nn.Module) -> None:
        """Reset tuned layers to the default dataflow, which torch.compile requires. Raises as `apply`."""
        for layer, _ in self._layers(model):
            if layer.dataflow == layer.tuned:
                layer.dataflow = layer.tuned = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, for of_json: no code is run to read it."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        choices = [{**vars(c), "flow": _flow_to_json(c.flow), "trials": [*map(vars, c.trials)]} for c in self.choices]
        before, after = ({**vars(each), "parts": dict(each.parts)} for each in (self.before, self.after))
        return {**told, "choices": choices, "before": before, "after": after, "tiles": [*map(vars, self.tiles)]}

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> Tuning:
        """The result that to_json told."""
        choices = tuple(_choice_of_json(choice) for choice in data["choices"])
        before, after = (PassTiming(**data[name]) for name in ("before", "after"))
        tiles, notes = tuple(Tiles(**each) for each in data["tiles"]), tuple(data["notes"])
        more = {"choices": choices, "before": before, "after": after, "tiles": tiles, "notes": notes}
        return Tuning(**{**data, **more})

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
        state += ", from the tuning cache" if self.reused else f", in {self.seconds:.1f} s"
        head = f"{self.mode} on {self.device}: {1e3 * self.before.total:.3f} -> {1e3 * self.after.total:.3f} ms"
        lines = [f"{head} a scene, {self.speedup:.2f}x ({self.after.clock}{state})", *self._table()]
        lines += [f"tiles of {each}" for each in self.tiles]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes if note)])

    def _table(self) -> Iterator[str]:
        head = ("map", "layers", "rows", "pairs/row", "dataflow", "why")
        rows = [
            (c.group, str(len(c.layers)), f"{c.rows:.0f}", f"{c.pairs:.1f}", _text(c.flow), c.why) for c in self.choices
        ]
        yield from aligned([head, *rows], (1, 2, 3))


def _choice_of_json(data: Mapping[str, Any]) -> DataflowChoice:
    trials = tuple(Trial(**{**each, "passes": tuple(each["passes"])}) for each in data["trials"])
    more = {"layers": tuple(data["layers"]), "flow": _flow_of_json(data["flow"]), "trials": trials}
    return DataflowChoice(**{**data, **more})


def _flow_to_json(flow: Flow) -> Any:
    if isinstance(flow, Dataflows):
        return [_flow_to_json(one) for one in (flow.forward, flow.dgrad, flow.wgrad)]
    return flow.to_json() if isinstance(flow, Dataflow) else flow


def _flow_of_json(data: Any) -> Any:
    if isinstance(data, list):
        return Dataflows(*map(_flow_of_json, data))
    return Dataflow.of_json(data) if isinstance(data, dict) else data


def _text(flow: Flow) -> str:
    return "default" if flow is None else str(flow)
