"""Tuning of the adaptive grouping of each layer, `pumice.tune` in the mode "grouping" (TorchSparse, Tang et al., MLSys
2022, section 4.2.3, algorithm 5).

Each layer runs gather-GEMM-scatter with the epsilon and S that are fastest for it by the latency of the whole layer on
all samples: gather, products, scatter, without building the map and its layout. What is found is then timed against the
default epsilon and S once more, in turn, and dropped unless it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pumice.engine.groups import LayerCall, LayerGroup, observe_calls
from pumice.engine.measure import EVENTS, WALL, IsolatedLayer, PassTiming, isolated_layer, latency
from pumice.engine.result import NOT_ASKED, DataflowChoice, Trial, Tuning
from pumice.engine.subject import TuningSubject
from pumice.engine.tuned_network import TuningRun, date_of
from pumice.errors import OptionError
from pumice.nn.conv import Convolution
from pumice.ops import conv_features
from pumice.schedule.dataflow import DATAFLOWS, FORWARD, Dataflow, chosen
from pumice.schedule.grouping_search import UNTUNED, GroupingSearch, Seconds, search_grouping, search_space
from pumice.schedule.predict import total_seconds
from pumice.schedule.tuned_plans import TunedPlan
from pumice.schedule.tuner import Clock, SearchProgress

GROUPING = "grouping"
DEFAULT = "gather-gemm-scatter-locality-aware-adaptive"
ADAPTIVE = tuple(name for name, flow in DATAFLOWS.items() if flow.grouping == UNTUNED)
_CONFIRMATIONS = 3  # Measurements of a layer with the default grouping and with the best one, in turn


def grouping_flows(candidates: Any) -> tuple[Dataflow, ...]:
    """The dataflows in which groupings are tried. Raises OptionError unless all of them group adaptively."""
    if candidates is None:
        return (DATAFLOWS[DEFAULT],)
    if candidates == "all":
        return tuple(DATAFLOWS[name] for name in ADAPTIVE)
    if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
        raise OptionError(f"candidates takes 'all' or a list of dataflows, found {candidates!r}")
    flows = tuple(chosen(one)[0] for one in candidates)
    for flow in flows:
        if flow.grouping is None or flow.grouping.kind != UNTUNED.kind:
            raise OptionError(f"mode {GROUPING!r} tunes {', '.join(ADAPTIVE)}; found {flow.name}")
    return tuple(replace(flow, grouping=UNTUNED) for flow in flows)


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers over the same maps with the same channels and dtype. name: of the map and the channels. layers: by name.
    calls: those of one of the layers on all samples."""

    name: str
    layers: Mapping[str, Convolution]
    calls: tuple[LayerCall, ...]
    group: LayerGroup

    @property
    def predicted(self) -> float:
        """Estimated seconds per sample of all of the layers, with the default dataflow of the mode."""
        own = [work for works in self.group.works for work in works if work.channels == _channels(self.calls[0])]
        kind = self.calls[0].geometry.device.type
        return total_seconds(DATAFLOWS[DEFAULT], own, (FORWARD,), kind) / len(self.group.works)


def layer_kinds(groups: Sequence[LayerGroup], scenes: Sequence[Sequence[LayerCall]]) -> list[LayerKind]:
    """The kinds of layers of a network, those with the largest estimated time first."""
    calls: dict[str, list[LayerCall]] = {}
    alike: dict[Any, dict[str, Convolution]] = {}
    for call in (call for scene in scenes for call in scene):
        calls.setdefault(call.name, []).append(call)
    for name, own in calls.items():
        maps = tuple((call.map_key, call.found.flipped, call.compute_dtype) for call in own)
        key = (maps, _channels(own[0]), own[0].layer.groups)
        alike.setdefault(key, {})[name] = own[0].layer
    found = list[LayerKind]()
    for layers in alike.values():
        first = next(iter(layers))
        group = next(group for group in groups if first in group.layers)
        found.append(LayerKind(_name(group, calls[first][0]), layers, tuple(calls[first]), group))
    return sorted(_numbered(found), key=lambda kind: -kind.predicted)


def _channels(call: LayerCall) -> tuple[int, int]:
    return call.layer.in_channels, call.layer.out_channels


def _name(group: LayerGroup, call: LayerCall) -> str:
    inner, outer = _channels(call)
    groups = f" in {call.layer.groups} groups" if call.layer.groups > 1 else ""
    return f"{group.name}{' transposed' if call.found.flipped else ''}, {inner}-{outer}{groups}"


def _numbered(kinds: Sequence[LayerKind]) -> Iterator[LayerKind]:
    """The kinds with distinct names."""
    names: dict[str, int] = {}
    for kind in kinds:
        names[kind.name] = count = names.get(kind.name, 0) + 1
        yield replace(kind, name=f"{kind.name} ({count})") if count > 1 else kind


class LayerBench:
    """Times the forward pass of a layer on its samples, on random features."""

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        self.layers: list[IsolatedLayer] = [isolated_layer([call], training=True)[0] for call in calls]
        self.operands: list[tuple[Tensor, Tensor, Tensor]] = [layer.random_operands() for layer in self.layers]

    @torch.no_grad()
    def seconds(self, sample: int, flow: Dataflow | None, least: float = math.inf) -> float:
        """Seconds on a sample; inf if memory does not suffice."""
        layer, (x, w, y) = self.layers[sample], self.operands[sample]
        # A copy of the map: layouts of groupings that are only tried are freed.
        found = layer.found.without_storages()
        try:
            return latency(partial(conv_features, x, w, found, len(y), layer.groups, None, flow), x.device, least)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return math.inf

    def in_flow(self, flow: Dataflow) -> Seconds:
        """The times of a dataflow by grouping."""
        return lambda sample, grouping, least: self.seconds(sample, replace(flow, grouping=grouping), least)

    def total(self, flow: Dataflow | None) -> float:
        """Seconds on all samples."""
        return sum(self.seconds(sample, flow) for sample in range(len(self.layers)))


@dataclass(frozen=True)
class FoundGrouping:
    """What was found for a kind of layers. flow: the dataflow that is taken. seconds: of a layer per sample, tuned;
    untuned, by default; planned, of the planner's choice. searches: by dataflow."""

    flow: Dataflow
    seconds: float
    untuned: float
    planned: float
    searches: Mapping[Dataflow, GroupingSearch]

    def trials(self, samples: int) -> tuple[Trial, ...]:
        """What was tried, the fastest first, in seconds per sample."""
        tried = [
            Trial(str(replace(flow, grouping=how)), (FORWARD,), math.nan, seconds / samples, self.untuned)
            for flow, search in self.searches.items()
            for how, seconds in search.seconds.items()
        ]
        return tuple(sorted(tried, key=lambda trial: trial.seconds))


def find_grouping(calls: Sequence[LayerCall], flows: Sequence[Dataflow]) -> FoundGrouping:
    """Search these dataflows for a layer with these calls; the first one with its own grouping is the default."""
    bench, default = LayerBench(calls), flows[0]
    counts = [tuple(call.found.pairs().sizes.tolist()) for call in calls]
    searches = {flow: search_grouping(counts, bench.in_flow(flow)) for flow in flows}
    best = min(searches, key=lambda flow: searches[flow].seconds[searches[flow].best])
    tuned = replace(best, grouping=searches[best].best)
    rounds = [(bench.total(default), bench.total(tuned)) for _ in range(_CONFIRMATIONS)]
    untuned, seconds = (median(side) / len(calls) for side in zip(*rounds, strict=True))
    if seconds >= untuned:
        tuned, seconds = default, untuned
    return FoundGrouping(tuned, seconds, untuned, bench.total(None) / len(calls), searches)


class GroupingRun(TuningRun):
    """Tuning of a network in these dataflows; the first one with the default grouping is the default. excluded: names
    of layers that are left as they are. found: what was found for each kind of layers."""

    def __init__(
        self, tuned_model: TuningSubject, flows: tuple[Dataflow, ...], clock: Clock, excluded: Sequence[str] = ()
    ) -> None:
        began, (observed, scenes) = clock.now(), observe_calls(tuned_model, excluded)
        details = f"{GROUPING} of {' or '.join(flow.name for flow in flows)}"
        super().__init__(tuned_model, observed, clock, GROUPING, details)
        self.began: float = began
        self.flows: tuple[Dataflow, ...] = flows
        self.kinds: list[LayerKind] = layer_kinds(observed.groups, scenes)
        self.found: dict[str, FoundGrouping] = {}

    def result(self, fresh: bool, save: bool) -> Tuning:
        """Search, or read what an earlier search found."""
        plan = None if fresh else self.near()
        if plan is not None and plan.finished:
            self.notes.append(f"tuned on {date_of(plan)}, for {plan.about}")
            return self.known(plan, [self._choice(kind, plan.flows, plan.tuned_groups) for kind in self.kinds])
        flows = {} if plan is None else dict(plan.flows)
        done = () if plan is None else plan.tuned_groups
        finished = self.search(done)
        flows |= {name: found.flow for name, found in self.found.items()}
        before, after = self._timings(plan)
        if save:
            about = f"{len(self.kinds)} kinds of layers"
            self.save(flows, (before, after), (*done, *self.found), finished, about)
        choices = tuple(self._choice(kind, flows, done) for kind in self.kinds)
        notes, spent = (*self.notes, *self.observed.notes, before.note), self.clock.now() - self.began
        return Tuning(GROUPING, self.key.device, choices, before, after, (), notes, finished, False, spent)

    def _timings(self, plan: TunedPlan | None) -> tuple[PassTiming, PassTiming]:
        """Seconds of all searched layers per sample, with the default and tuned. plan: of an earlier search."""
        found = [(len(kind.layers), self.found[kind.name]) for kind in self.kinds if kind.name in self.found]
        before, after, planned = (
            sum(layers * getattr(one, name) for layers, one in found) for name in ("untuned", "seconds", "planned")
        )
        if found:
            self.notes.append(f"the planner's choice for these layers takes {1e3 * planned:.3f} ms")
        if plan is not None:
            before, after = before + float(plan.before["total"]), after + float(plan.after["total"])
        clock = EVENTS if self.tuned_model.device.type == "cuda" else WALL
        note = "the time is that of the layers, over maps at hand"
        return PassTiming(before, {}, before, clock, note), PassTiming(after, {}, after, clock, note)

    def search(self, done: Sequence[str] = ()) -> bool:
        """Search all kinds of layers but those of these names; False if the budget did not suffice."""
        best = before = 0.0
        kinds = [kind for kind in self.kinds if kind.name not in done]
        try:
            for number, kind in enumerate(kinds):
                if self.left <= 0:
                    self.notes.append("the budget was spent")
                    return False
                self.clock.watch(SearchProgress(kind.name, None, number, len(kinds), self.left, best, before))
                found = self.found[kind.name] = find_grouping(kind.calls, self.flows)
                best, before = best + found.seconds, before + found.untuned
        except KeyboardInterrupt:
            if not self.found:
                raise
            self.notes.append("it was interrupted")
            return False
        return True

    def _choice(self, kind: LayerKind, flows: Mapping[str, Dataflow], done: Sequence[str]) -> DataflowChoice:
        flow, found, group = flows.get(kind.name, self.flows[0]), self.found.get(kind.name), kind.group
        trials = () if found is None else found.trials(len(kind.calls))
        pairs = group.pairs / max(1.0, group.rows)
        why = ("tuned before" if kind.name in done else NOT_ASKED) if found is None else _why(found, trials)
        return DataflowChoice(kind.name, tuple(kind.layers), group.rows, pairs, kind.predicted, flow, trials, why)


def _why(found: FoundGrouping, trials: Sequence[Trial]) -> str:
    tried = f"of {len(trials)} kinds of products by {len(search_space())} groupings"
    if found.seconds >= found.untuned:
        return f"the default is fastest {tried}: {1e3 * found.untuned:.3f} ms a layer"
    return f"{1e3 * found.seconds:.3f} ms a layer, {1e3 * found.untuned:.3f} by default; fastest {tried}"
