"""Autotuning of the dataflow of each layer group, by timing the whole network: `pumice.tune`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import nn

from pumice.engine.graph_capture import takes_graph
from pumice.engine.graph_tuning import GraphTuning, tune_graph_network
from pumice.engine.grouping_tuning import GROUPING, GroupingRun, grouping_flows
from pumice.engine.groups import LayerGroup, Observed, observe, recording_calls
from pumice.engine.measure import (
    IsolatedLayer,
    PassTimer,
    PassTiming,
    compile_first,
    compile_in_parallel,
    isolated_layer,
    time_tiles,
)
from pumice.engine.ranks import in_group
from pumice.engine.result import NOT_ASKED, DataflowChoice, Tiles, Trial, Tuning
from pumice.engine.shared_tuning import tuned_by_first
from pumice.engine.subject import MODES, Loss, Scene, TuningSubject, fresh, subject, undisturbed
from pumice.engine.tuned_network import TuningRun, date_of, released
from pumice.errors import DeviceError, OptionError, PumiceError
from pumice.lower.reference import EIGHT_BITS
from pumice.ops import Graph
from pumice.ops.conv import Flow
from pumice.schedule.dataflow import (
    DATAFLOWS,
    DGRAD,
    FORWARD,
    PASSES,
    PLANNED,
    WGRAD,
    Dataflow,
    Dataflows,
    chosen,
    is_named,
    skipping,
)
from pumice.schedule.predict import CandidateFlow, LayerWork, candidate_flows, is_applicable, promising, total_seconds
from pumice.schedule.tuned_plans import TunedPlan
from pumice.schedule.tuned_tiles import Key, ledger
from pumice.schedule.tuner import (
    MIN_NOISE,
    Assignment,
    Clock,
    SearchProgress,
    SearchResult,
    TrialResult,
    TuningTask,
    search,
)

EXHAUSTIVE = "exhaustive"
"""Value of `candidates` for every dataflow of the device (TorchSparse++, section 4.2)."""
FACTOR = 2.5  # A dataflow is a candidate if its cost model estimate is within this factor of the best one
_MAX_CANDIDATES = {1: 6, 2: 4}  # Per task, by the number of tasks of a group; best estimates first
REPEATS = 3

BINDINGS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "forward with dgrad": ((FORWARD, DGRAD), (WGRAD,)),
        "dgrad with wgrad": ((FORWARD,), (DGRAD, WGRAD)),
        "all": (PASSES,),
    }
)
"""Passes of a group that share a dataflow in training. Two parts are two tasks, tuned in turn, so that the search
stays linear in groups and candidates."""
_INFERENCE = ((FORWARD,),)
_AND = " with "
_BEGINNINGS = 2  # Dataflows that are tried in all groups at once
_MANY = 100  # GPUs with at least this many multiprocessors count as large


@overload
def tune(
    model: nn.Module,
    samples: Sequence[tuple[Any, Graph]],
    mode: str = "inference",
    budget: float = 120.0,
    *,
    loss: Loss | None = None,
    fresh: bool = False,
    progress: Watch | bool | None = None,
    save: bool = True,
    shared: bool = True,
) -> GraphTuning: ...
@overload
def tune(
    model: nn.Module,
    samples: Sequence[Scene],
    mode: str = "inference",
    budget: float = 120.0,
    *,
    bind: str | None = None,
    candidates: str | Sequence[str | Dataflow] | None = None,
    loss: Loss | None = None,
    fresh: bool = False,
    progress: Watch | bool | None = None,
    save: bool = True,
    shared: bool = True,
) -> Tuning: ...
def tune(
    model: nn.Module,
    samples: Sequence[Any],
    mode: str = "inference",
    budget: float = 120.0,
    *,
    bind: str | None = None,
    candidates: str | Sequence[str | Dataflow] | None = None,
    loss: Loss | None = None,
    fresh: bool = False,
    progress: Watch | bool | None = None,
    save: bool = True,
    shared: bool = True,
) -> Tuning | GraphTuning:
    """Choose the dataflow of every convolution layer by timing the whole network on sample scenes.

    Layers that share a kernel map form a group and run one dataflow. Groups are tuned in turn, largest estimated time
    first; a candidate is accepted if it speeds up the network beyond measurement noise (Tang et al., "TorchSparse++",
    MICRO 2023, section 4). On a GPU the criterion is kernel time, map building included; remaining budget goes to
    timing the tiles of the largest groups' kernels. The result is applied to the model and saved in the user's cache
    folder, for the same network on the same device with a similar workload (rows and pairs of each map within a factor
    of 1.4). Ctrl-C keeps the results so far.

    Parameters
    ----------
    model: any torch.nn.Module with convolutions of pumice.nn, on its device and in its dtype; set autocast yourself.
        Only the layers' `dataflow` changes; a dataflow that was set by hand is kept.
    samples: one or a few representative SparseTensors (or pairs of coordinates and features, D = 3).
    mode: "inference"; "training": forward and backward, with the loss below; or "grouping": inference in which every
        layer runs gather-GEMM-scatter, with the epsilon and S of its adaptive grouping that are fastest for it (Tang et
        al., "TorchSparse", MLSys 2022, algorithm 5), on average over the samples.
    budget: seconds, compilation included.
    bind: in training, the passes of a group that share a dataflow: "forward with dgrad", "dgrad with wgrad" or "all".
        Default: the second on GPUs with at least 100 multiprocessors, else the first. Binding passes by device is from
        the paper; this rule is our own. With two parts, a trial of one skips the kernels of the other, whose results
        are zeros (figure 13); maps are built as in the whole step. What wins is then measured with all kernels. A
        network whose coordinates depend on its features is tuned by whole steps.
    candidates: dataflows to try, by name or value, or "exhaustive": every named one that is for the device, as the
        paper's exhaustive search of a group does. Default: those with a cost model estimate within 2.5 times of the
        best, for each group; at most six, or four for each of two tasks. In the mode "grouping": dataflows with
        adaptive grouping; default: gather-gemm-scatter-locality-aware-adaptive.
    loss: scalar function of the model's result; default the mean of squares of every tensor in it.
    fresh: ignore saved results. save: save the result.
    shared: in a process group of torch.distributed, process 0 tunes, on its samples, and all others wait for its
        result, apply and save it, so that all have the same plan. They wait at the group's store, up to an hour longer
        than the budget: no collective exceeds the group's timeout. False: this process tunes by itself.
    progress: called with every schedule.tuner.SearchProgress; None: a bar if standard error is a terminal; False: none.

    A network over graphs takes samples of its arguments, with a pumice.Graph among them, `pm.tune(net, [(x, graph)])`:
    each pumice.nn.RelationalConv gets the fastest of its orders (its `order`), kept in the same folder for the same
    network on graphs of like size; the result is a GraphTuning. It takes neither bind nor candidates.

    Returns
    -------
    Tuning. It prints as a table of choices and reasons; `.remove(model)` resets the layers to the default, as
    torch.compile requires.

    Raises OptionError (unknown mode, bind or candidate, no samples, budget not above 0, nothing to tune; shared, with
    a network whose passes wait for other processes: tune it before it is wrapped), DtypeError (model not a Module,
    samples of wrong type), DeviceError (samples and model on different devices).
    """
    if shared and in_group():
        options: Any = {"bind": bind, "candidates": candidates, "loss": loss, "progress": progress}
        by_one = partial(tune, model, samples, mode, budget, fresh=fresh, save=save, shared=False, **options)
        return tuned_by_first(by_one, model, mode, budget)
    if isinstance(samples, Sequence) and samples and takes_graph(samples[0]):
        _check_graph_options(budget, bind, candidates)
        with watching(progress) as watch:
            return tune_graph_network(model, samples, mode, loss, Clock(budget, watch=watch), fresh, save)
    began = time.monotonic()
    OptionError.check("mode", mode, (*MODES, GROUPING))
    if mode == GROUPING:
        return _tune_groupings(model, samples, budget, bind, candidates, progress, (fresh, save))
    tuned_model = subject(model, samples, mode, loss)
    options = _options(tuned_model, budget, bind, candidates)
    with released(tuned_model.model) as left, watching(progress) as watch:
        with undisturbed(tuned_model.model, False):
            compile_first(tuned_model)
            observed = observe(tuned_model, left)
        run = _TuningRun(tuned_model, observed, options, Clock(budget - (time.monotonic() - began), watch=watch))
        with undisturbed(tuned_model.model, tuned_model.training):
            result = run.result(fresh, save, began)
        result.apply(tuned_model.model)
    return result


def _tune_groupings(
    model: nn.Module,
    samples: Sequence[Scene],
    budget: float,
    bind: str | None,
    candidates: Any,
    progress: Any,
    kept: tuple[bool, bool],
) -> Tuning:
    """`tune` in the mode "grouping". kept: (fresh, save)."""
    _check_budget(budget)
    if bind is not None:
        raise OptionError(f"bind={bind!r} in mode {GROUPING!r}; it is an option of training")
    tuned_model, flows = subject(model, samples, "inference"), grouping_flows(candidates)
    with released(tuned_model.model) as left, watching(progress) as watch:
        with undisturbed(tuned_model.model, False):
            compile_first(tuned_model)
            result = GroupingRun(tuned_model, flows, Clock(budget, watch=watch), left).result(*kept)
        result.apply(tuned_model.model)
    return result


def _check_budget(budget: float) -> None:
    if not isinstance(budget, int | float) or not budget > 0:
        raise OptionError(f"budget is a number of seconds above 0, found {budget!r}")


def _check_graph_options(budget: float, bind: str | None, candidates: Any) -> None:
    _check_budget(budget)
    if bind is not None or candidates is not None:
        raise OptionError("bind and candidates are options of networks over voxels, found with a Graph")


@dataclass(frozen=True)
class TuningOptions:
    """Search space. flows: dataflows; explicit: given by the user, all are tried. bind, pass_groups: see BINDINGS."""

    flows: tuple[Dataflow, ...]
    explicit: bool
    bind: str
    pass_groups: tuple[tuple[str, ...], ...]

    def allows(self, flow: Dataflow, passes: Sequence[str], tuned_model: TuningSubject) -> bool:
        """True if a dataflow may be chosen for these passes."""
        ordered = torch.are_deterministic_algorithms_enabled() and tuned_model.device.type == "cuda"
        library = not {x.dtype for x in tuned_model.scenes} & {*EIGHT_BITS}
        return flow in self.flows and all(is_applicable(name, flow, ordered, library) for name in passes)


def _options(tuned_model: TuningSubject, budget: float, bind: str | None, candidates: Any) -> TuningOptions:
    _check_budget(budget)
    if bind is not None and (bind not in BINDINGS or not tuned_model.training):
        raise OptionError(f"bind={bind!r} in mode {tuned_model.mode!r}; in training there are {', '.join(BINDINGS)}")
    kind = tuned_model.device.type
    flows = tuple(flow for flow in DATAFLOWS.values() if kind in flow.devices)
    if candidates is not None and candidates != EXHAUSTIVE:
        if isinstance(candidates, str) or not isinstance(candidates, Sequence) or not candidates:
            raise OptionError(f"candidates takes {EXHAUSTIVE!r} or a list of dataflows, found {candidates!r}")
        flows = tuple(chosen(one)[0] for one in candidates)
    if not tuned_model.training:
        return TuningOptions(flows, candidates is not None, "", _INFERENCE)
    bind = bind or binding(tuned_model.device)
    return TuningOptions(flows, candidates is not None, bind, BINDINGS[bind])


def binding(device: torch.device) -> str:
    """Default key of BINDINGS for training on a device; the rule is ours.

    On a large GPU, a separate choice for the forward pass gains most: feature and weight gradients read other map
    layouts than the forward kernel. On a small one, the forward pass and the feature gradient, which are the same loop,
    have the same bottleneck.
    """
    if device.type == "cuda" and torch.cuda.get_device_properties(device).multi_processor_count >= _MANY:
        return "dgrad with wgrad"
    return "forward with dgrad"


@dataclass(frozen=True, eq=False)
class PassTask:
    """The task of choosing one dataflow for these passes of a group. default_seconds: estimate for the default.
    candidates: best estimate first. Seconds are summed over all scenes."""

    group: LayerGroup
    passes: tuple[str, ...]
    default_seconds: float
    candidates: tuple[CandidateFlow, ...]

    @property
    def key(self) -> str:
        return self.group.name if self.passes == (FORWARD,) else f"{self.group.name}, {self.part}"

    @property
    def part(self) -> str:
        """The passes as text."""
        return _AND.join(self.passes)

    def predicted(self, flow: Dataflow) -> float:
        found = (candidate.seconds for candidate in self.candidates if candidate.flow == flow)
        return next(found, math.nan) / len(self.group.works)


def tuning_tasks(tuned_model: TuningSubject, observed: Observed, options: TuningOptions) -> list[PassTask]:
    """All tuning tasks, largest estimated time first."""
    found = []
    for group in observed.groups:
        works: list[LayerWork] = [work for scene in group.works for work in scene]
        for passes in options.pass_groups:
            flows = [flow for flow in options.flows if options.allows(flow, passes, tuned_model)]
            default_seconds = total_seconds(PLANNED, works, passes, tuned_model.device.type)
            tried = candidate_flows(flows, works, passes, tuned_model.device.type)
            if not options.explicit:
                tried = promising(tried, default_seconds, FACTOR)[: _MAX_CANDIDATES[len(options.pass_groups)]]
            found.append(PassTask(group, passes, default_seconds, tuple(tried)))
    return sorted(found, key=lambda part: -part.default_seconds)


class _NetworkBench:
    """Measures a network under assignments of dataflows. timings: by assignment, of the whole network."""

    def __init__(self, tuned_model: TuningSubject, tasks: Sequence[PassTask]) -> None:
        self.tuned_model, self.tasks = tuned_model, {part.key: part for part in tasks}
        self.meter = PassTimer(tuned_model.device, REPEATS)
        self.timings: dict[frozenset[tuple[str, Any]], list[PassTiming]] = {}

    def __call__(self, assignment: Assignment) -> float:
        self._assign(self.flows(assignment))
        found = self._measured()
        self.timings.setdefault(frozenset(assignment.items()), []).append(found)
        return found.total

    def of_part(self, assignment: Assignment, part: str) -> float:
        """Seconds of an assignment in which only these passes have kernels: the others build their map layouts, and
        their results are zeros."""
        kept = part.split(_AND)
        self._assign({group: skipping(flow or PLANNED, kept) for group, flow in self.flows(assignment).items()})
        return self._measured().total

    def _assign(self, flows: Mapping[LayerGroup, Flow]) -> None:
        for group, flow in flows.items():
            for layer in group.layers.values():
                layer.dataflow = layer.tuned = flow

    def flows(self, assignment: Assignment) -> dict[LayerGroup, Flow]:
        """Dataflow of the layers of each group."""
        by_group: dict[LayerGroup, dict[str, Dataflow]] = {part.group: {} for part in self.tasks.values()}
        for key, flow in assignment.items():
            assert isinstance(flow, Dataflow)
            part = self.tasks[key]
            by_group[part.group].update(dict.fromkeys(part.passes, flow))
        return {group: flow_of(passes, self.tuned_model.training) for group, passes in by_group.items()}

    def mean_of_last(self, assignment: Assignment) -> PassTiming:
        """Mean of the last two measurements of an assignment."""
        found = self.timings[frozenset(assignment.items())][-2:]
        names = dict.fromkeys(name for each in found for name in each.parts)
        parts = {name: fmean(each.parts.get(name, 0.0) for each in found) for name in names}
        total, wall = fmean(each.total for each in found), fmean(each.wall for each in found)
        return PassTiming(total, parts, wall, found[-1].clock, found[-1].note)

    def _measured(self) -> PassTiming:
        try:
            return self.meter.measure(self.tuned_model.calls())
        except PumiceError:
            raise
        except torch.OutOfMemoryError as problem:
            torch.cuda.empty_cache()
            raise DeviceError(f"out of memory: {problem}") from problem
        except Exception as problem:
            if type(problem).__name__ not in ("OutOfResources", "CompilationError", "PTXASError"):
                raise
            raise DeviceError(f"a kernel does not fit the device: {problem}") from problem


def flow_of(passes: Mapping[str, Dataflow], training: bool) -> Flow:
    """A layer's `dataflow` for these passes; all others use the default."""
    if not passes:
        return None
    if not training:
        return _short(passes[FORWARD])
    three = [_short(passes.get(name, PLANNED)) for name in PASSES]
    return three[0] if three[0] == three[1] == three[2] else Dataflows(*three)


def _short(flow: Dataflow) -> str | Dataflow:
    return flow.name if is_named(flow) else flow


class _TuningRun(TuningRun):
    tile_seconds: float = 8.0
    """Longest time of tuning a layer's tiles, in seconds; a guess until one has been timed."""
    timed: bool = False

    def __init__(self, tuned_model: TuningSubject, observed: Observed, options: TuningOptions, clock: Clock) -> None:
        super().__init__(tuned_model, observed, clock, tuned_model.mode, options.bind)
        self.options = options
        self.tasks = tuning_tasks(tuned_model, observed, options)
        self.bench = _NetworkBench(tuned_model, self.tasks)

    @cached_property
    def skips(self) -> bool:
        """True if trials of some passes can skip the kernels of the others: with features of zeros, the first scene has
        the same maps."""
        if len(self.options.pass_groups) == 1:
            return False
        try:
            x = fresh(self.tuned_model.scenes[0])
            with torch.no_grad(), recording_calls(self.tuned_model.model, x, arithmetic=False) as calls:
                self.tuned_model.model(x)
        except Exception:
            return self._whole_steps("it does not run on features of zeros")
        found = {call.name: (call.found.num_inputs, call.found.num_outputs) for call in calls}
        known = [call for group in self.observed.groups for call in group.calls]
        if all(found.get(call.name) == (call.found.num_inputs, call.found.num_outputs) for call in known):
            return True
        return self._whole_steps("its coordinates depend on features")

    def _whole_steps(self, why: str) -> bool:
        self.notes.append(f"trials run whole training steps: {why}")
        return False

    def result(self, fresh: bool, save: bool, began: float) -> Tuning:
        near, hints = (None, {}) if fresh else self._saved_plan()
        if near is not None and near.finished:
            return self._from_saved_plan(near)
        start = {} if near is None else dict(near.flows)
        done = () if near is None else near.tuned_groups
        found = self._search(start, done, hints)
        if near is not None and not found.finished and not found.tuned_groups:
            # Stopped before any new measurement.
            return self._from_saved_plan(near)
        kernels = self.tuned_model.device.type == "cuda"
        tiles = tuple(self.tiles(found)) if found.finished and kernels else ()
        for _ in tiles[:2]:
            # Earlier measurements may have used other tiles.
            self.bench(found.assignment)
        before, after = self.bench.mean_of_last({}), self.bench.mean_of_last(found.assignment)
        choices = tuple(self._choices(found, done))
        notes = (*self.notes, *self.observed.notes, found.ended, before.note)
        if save:
            about = f"{len(self.workload)} maps, {self.observed.groups[0]}"
            tuned = (*done, *found.tuned_groups)
            self.save(found.assignment, (before, after), tuned, found.finished, about)
        spent = time.monotonic() - began
        device = str(self.key.device)
        return Tuning(self.tuned_model.mode, device, choices, before, after, tiles, notes, found.finished, False, spent)

    def _saved_plan(self) -> tuple[TunedPlan | None, Mapping[str, Dataflow]]:
        """(saved plan for this workload, {}), or (None, dataflows of a similar plan to try first)."""
        plan = self.alike()
        if plan is None:
            return None, {}
        usable = all(
            key in self.bench.tasks and self.options.allows(flow, self.bench.tasks[key].passes, self.tuned_model)
            for key, flow in plan.flows.items()
        )
        near = self.near()
        if near is not None and usable:
            self.notes.append(f"{'tuned' if plan.finished else 'begun'} on {date_of(plan)}, for {plan.about}")
            return plan, {}
        why = "other scenes" if near is None else "other dataflows"
        self.notes.append(f"tuned on {date_of(plan)} for {why} ({plan.about}): tuned again")
        return None, plan.flows

    def _from_saved_plan(self, plan: TunedPlan) -> Tuning:
        flows, why = self.bench.flows(plan.flows), "from the tuning cache"
        groups = self.observed.groups
        return self.known(plan, [_choice(one, flows[one], (), why, self._default_seconds(one)) for one in groups])

    def _search(self, start: Assignment, done: Sequence[str], hints: Mapping[str, Dataflow]) -> SearchResult:
        tasks = []
        for part in self.tasks:
            flows = [candidate.flow for candidate in part.candidates]
            if (hint := hints.get(part.key)) in flows:
                flows.sort(key=lambda flow: flow != hint)
            if part.key not in done and flows:
                tasks.append(TuningTask(part.key, tuple(flows), part.part if self.skips else ""))
        beginnings = () if start or done else tuple(self._uniform(tasks))
        return search(tasks, self.bench, self.clock, start, self._compile, self.bench.of_part, beginnings)

    def _uniform(self, tasks: Sequence[TuningTask]) -> Iterator[Assignment]:
        """Assignments of one dataflow to all groups of which it is a candidate, if that is most, best estimates first:
        what all take may pay where it does not for one, as maps of the default are built together."""
        flows = dict.fromkeys(flow for task in tasks for flow in task.candidates)
        found = [{task.group: flow for task in tasks if flow in task.candidates} for flow in flows]
        wide = [one for one in found if len(one) > 1 and 2 * len(one) > len(tasks)]
        for one in sorted(wide, key=self._estimated)[:_BEGINNINGS]:
            for group, flow in one.items():
                self._compile(TuningTask(group, (flow,)))
            yield one

    def _estimated(self, assignment: Mapping[str, Any]) -> float:
        """Estimated seconds of an assignment."""
        each = ((part, assignment.get(key)) for key, part in self.bench.tasks.items())
        scenes = {key: len(part.group.works) for key, part in self.bench.tasks.items()}
        return sum(
            part.default_seconds / scenes[part.key] if flow is None else part.predicted(flow) for part, flow in each
        )

    def _compile(self, task: TuningTask) -> None:
        part = self.bench.tasks[task.group]
        flows: Any = task.candidates
        layers = isolated_layer(part.group.calls, self.tuned_model.training)
        # Compiling a large group may exceed the budget.
        compile_in_parallel(layers, part.passes, flows, lambda: self.left <= 0)

    def tiles(self, found: SearchResult) -> Iterator[Tiles]:
        """Time the tiles of the groups' kernels, largest group first, while the budget lasts. Tiles are timed in
        isolation, with a cold cache; those that slow down the network are dropped."""
        flows = self.bench.flows(found.assignment)
        best, largest = found.after, sorted(flows, key=lambda group: -self._default_seconds(group))
        try:
            for number, group in enumerate(largest):
                self.clock.watch(SearchProgress(group.name, "tiles", number, len(flows), self.left, best, found.before))
                new = self._time(group, flows[group])
                if new:
                    yield (judged := self._judge_tiles(group, new, best, found))
                    best = min(best, judged.after)
        except KeyboardInterrupt:
            self.notes.append("tile tuning was interrupted")

    def _judge_tiles(self, group: LayerGroup, new: set[Key], best: float, found: SearchResult) -> Tiles:
        """Keep new tiles unless the network is slower with them."""
        after = self.bench(found.assignment)
        if after > best:
            # Measure an apparent slowdown twice.
            after = min(after, self.bench(found.assignment))
        kept = after <= best * (1 + MIN_NOISE)
        if not kept:
            ledger().forget(new)
        return Tiles(group.name, len(new), best, after, kept)

    def _time(self, group: LayerGroup, flow: Flow) -> set[Key]:
        """Time the tiles of a group's layers within the budget; returns the new keys of the tile cache."""
        known = set(ledger().known())
        for layer in isolated_layer(group.calls, self.tuned_model.training):
            begin = self.clock.now()
            if self.left < 1.5 * self.tile_seconds:
                break
            _timed(layer, flow, self.tuned_model.training)
            self.tile_seconds = max(self.tile_seconds if self.timed else 0.0, self.clock.now() - begin)
            self.timed = True
        return set(ledger().known()) - known

    def _default_seconds(self, group: LayerGroup) -> float:
        return sum(part.default_seconds for part in self.tasks if part.group is group) / len(group.works)

    def _choices(self, found: SearchResult, done: Sequence[str]) -> Iterator[DataflowChoice]:
        flows = self.bench.flows(found.assignment)
        for group in self.observed.groups:
            own = [part for part in self.tasks if part.group is group]
            trials = tuple(_trial(part, tried) for part in own for tried in found.tried.get(part.key, ()))
            why = "; ".join(_why(part, found, part.key in done) for part in own)
            yield _choice(group, flows[group], trials, why, self._default_seconds(group))


def _choice(
    group: LayerGroup, flow: Flow, trials: tuple[Trial, ...], why: str, default_seconds: float
) -> DataflowChoice:
    pairs = group.pairs / max(1.0, group.rows)
    return DataflowChoice(group.name, tuple(group.layers), group.rows, pairs, default_seconds, flow, trials, why)


def _trial(part: PassTask, tried: TrialResult) -> Trial:
    flow: Any = PLANNED if tried.candidate is None else tried.candidate
    return Trial(str(flow), part.passes, part.predicted(flow), tried.seconds, tried.baseline, tried.refused)


def _why(part: PassTask, found: SearchResult, done: bool) -> str:
    """Why a task got its dataflow."""
    trials = sorted((_trial(part, tried) for tried in found.tried.get(part.key, ())), key=lambda trial: trial.seconds)
    taken = found.assignment.get(part.key)
    names = "" if part.passes == (FORWARD,) else f"{' with '.join(part.passes)}: "
    if done:
        return f"{names}tuned before"
    if taken is not None:
        own = [trial for trial in trials if trial.flow == str(taken)]
        return f"{names}{own[0] if own else f'{taken}, as in all groups'}"
    if not part.candidates:
        return f"{names}no competitive candidate by cost model estimate"
    if not trials:
        return f"{names}{NOT_ASKED}"
    return f"{names}best of {len(trials)} others: {trials[0]}"


def _timed(layer: IsolatedLayer, flow: Flow, training: bool) -> None:
    """Time a layer's tiles; skip a layer that cannot run in isolation."""
    try:
        time_tiles(layer, flow, training)
    except (PumiceError, torch.OutOfMemoryError):
        torch.cuda.empty_cache()


Watch = Callable[[SearchProgress], object]


def progress_text(step: SearchProgress) -> str:
    """Text of a step: the best time so far, and the candidate being measured."""
    what = f"{step.group}: {step.candidate}" if step.candidate is not None else step.group or "the default"
    share = step.before / step.best if 0 < step.best < float("inf") else 1.0
    return f"best {1e3 * step.best:.3f} ms ({share:.2f}x)  {what}"


@contextmanager
def watching(progress: Watch | bool | None) -> Iterator[Watch]:
    """Yield the callback for steps: the caller's function; a bar for True, or for None on a terminal; else a no-op.
    Raises OptionError for any other value."""
    if callable(progress):
        yield progress
    elif progress is True or (progress is None and sys.stderr.isatty()):
        with _bar() as watch:
            yield watch
    elif progress is None or progress is False:
        yield lambda step: None
    else:
        raise OptionError(f"progress takes a function of a step, True, False or None, found {progress!r}")


@contextmanager
def _bar() -> Iterator[Watch]:
    # Imported lazily, to keep `import pumice` fast.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = ("tune", BarColumn(bar_width=24), "{task.completed:.0f}/{task.total:.0f}", "{task.fields[left]}")
    shown: Any = Progress(*columns, TextColumn("{task.description}", markup=False), console=Console(stderr=True))
    with shown:
        task = shown.add_task("finding groups", total=1, left="")

        def watch(step: SearchProgress) -> None:
            left = f"{step.left // 60:.0f}:{step.left % 60:02.0f} left"
            shown.update(task, total=step.total, completed=step.done, description=progress_text(step), left=left)

        yield watch
