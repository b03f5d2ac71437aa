"""Tuning of loop-nest schedules: candidates pruned by the model of their cost, measured beside the rule's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pumice.lower.nest import NestStep, Prepared, Wanted, key_of
from pumice.schedule.loop_rule import candidates
from pumice.schedule.loops import LoopSchedule
from pumice.schedule.tuned_loops import TunedLoops, loop_records
from pumice.schedule.tuner import Clock, TuningTask, search

_CALLS = 9  # Of a candidate and of the rule, in turns
_SECONDS = 0.2  # After which a measurement ends, if each was called thrice


def tune(step: NestStep, tensors: Mapping[str, Tensor], most: int, clock: Clock) -> dict[LoopSchedule, float]:
    """Seconds by schedule of the rule's and of at most `most` others; the fastest is kept on disk."""
    ready = _with(step, LoopSchedule()).prepared(tensors)
    if ready is None:
        return {}
    others = tuple(_candidates(step, tensors, ready, most))
    found = search([TuningTask("nest", others)], _Measure(step, tensors), clock)
    best = found.assignment.get("nest", LoopSchedule())
    assert isinstance(best, LoopSchedule)
    loop_records().keep(key_of(step.bound, step.dtype), TunedLoops.now(best, found.after, found.before))
    times = {trial.candidate: trial.seconds for each in found.tried.values() for trial in each}
    measured = {s: t for s, t in times.items() if isinstance(s, LoopSchedule) and t < math.inf}
    # The last measurements are the most exact.
    return measured | {ready.schedule: found.before} | ({best: found.after} if found.assignment else {})


def seconds_of(call: Callable[[], object]) -> float:
    """20 % quantile of the seconds of a call."""
    return _interleaved([call])[0]


def _with(step: NestStep, schedule: LoopSchedule) -> NestStep:
    return NestStep(step.bound, step.dtype, Wanted(schedule))


def _candidates(step: NestStep, tensors: Mapping[str, Tensor], ready: Prepared, most: int) -> list[LoopSchedule]:
    """The cheapest schedules by the model, of fused and of separate indices."""
    threads = torch.get_num_threads()
    found = candidates(ready.facts, threads, most)
    if apart := tuple(part for name in ready.facts.dense if "." in name for part in name.split(".")):
        other = _with(step, LoopSchedule(order=apart)).prepared(tensors)
        assert other is not None
        half = max(1, most // 2)
        found = [*found[: most - half], *candidates(other.facts, threads, half)]
    return found


class _Measure:
    """Seconds of schedules, in turns with the rule's, so that clocks that drift do not matter."""

    def __init__(self, step: NestStep, tensors: Mapping[str, Tensor]) -> None:
        self._step, self._tensors, self._rule = step, tensors, 0.0
        self._expected = self._call(LoopSchedule())()

    def __call__(self, assignment: Mapping[str, object]) -> float:
        schedule = assignment.get("nest", LoopSchedule())
        assert isinstance(schedule, LoopSchedule)
        calls = [self._call(LoopSchedule()), self._call(schedule)]
        result = calls[1]()
        near = 1e-9 if result.dtype == torch.float64 else 1e-3
        torch.testing.assert_close(result, self._expected, rtol=near, atol=near * float(self._expected.abs().max()))
        rule, own = _interleaved(calls)
        self._rule = self._rule or rule
        return self._rule * own / rule

    def _call(self, schedule: LoopSchedule) -> Callable[[], Tensor]:
        step = _with(self._step, schedule)
        return lambda: step(self._tensors)


def _interleaved(calls: Sequence[Callable[[], object]]) -> list[float]:
    """20 % quantiles of the seconds of calls in turns: of the thread's time if there is one thread."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    end = time.monotonic() + _SECONDS
    while len(times[0]) < 3 or (len(times[0]) < _CALLS and time.monotonic() < end):
        for call, taken in zip(calls, times, strict=True):
            begin = now()
            call()
            taken.append(now() - begin)
    return [sorted(taken)[len(taken) // 5] for taken in times]
