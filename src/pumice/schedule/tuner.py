"""Greedy search over groups of layers: one group after the other, each choice measured end to end.

Tang et al., "TorchSparse++", MICRO 2023, section 4: layers that share a kernel map form a group and run one dataflow; a
group takes the one that is fastest for the whole network while the others stay fixed, so that the number of
measurements is the sum of the groups' candidates, not their product. Our additions: every group first measures the
current assignment again, since clocks drift; a choice must win twice by more than the measurement noise; and the result
is compared with the default in the end, so that it is never slower as measured.

In training a task has some of the passes of a group, and its trials run only these (section 4.2, figure 13: the other
kernels are skipped). Such trials of one `part` are compared among themselves; what wins there also has to leave the
whole no slower.

Plain data and a function `measure`: no tensors, no launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import monotonic

from pumice.errors import PumiceError

Choice = Hashable  # of a group, such as a dataflow; None is the default (the planner's)
Assignment = Mapping[str, Choice]  # choice by group; a missing group runs the default
Measure = Callable[[Assignment], float]  # seconds of an assignment; raises PumiceError if it cannot run

MIN_NOISE = 0.002  # minimal relative gain of a choice
MAX_NOISE = 0.05  # upper limit of the required gain, however noisy measurements are
FINAL_MEASUREMENTS = 4  # measurements of the final comparison with the default


@dataclass(frozen=True)
class TuningTask:
    """A group and its candidates besides the default, in the order in which they are tried. part: names the part of
    the work that trials measure; "": all of it."""

    group: str
    candidates: tuple[Choice, ...]
    part: str = ""


@dataclass(frozen=True)
class TrialResult:
    """Seconds of the network with a candidate, or the reason why it failed. baseline: seconds without the candidate."""

    candidate: Choice
    seconds: float = math.inf
    baseline: float = math.inf
    refused: str = ""


@dataclass(frozen=True)
class SearchProgress:
    """State of a search. done, total: numbers of measurements. left: estimated seconds to the end. best, before:
    seconds of the best assignment so far and of the default."""

    group: str
    candidate: Choice
    done: int
    total: int
    left: float
    best: float
    before: float


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    assignment: choices that differ from the default. before, after: seconds of the default and of the assignment.
    tried: trials by group, in order. tuned_groups: completely tuned groups. measured: number of measurements.
    ended: why the search stopped early, or why the default was kept.
    """

    assignment: Assignment
    before: float
    after: float
    tried: Mapping[str, tuple[TrialResult, ...]]
    tuned_groups: tuple[str, ...]
    measured: int
    finished: bool = True
    ended: str = ""


@dataclass(frozen=True)
class Clock:
    """A budget in seconds. now: the time. watch: called after each measurement."""

    budget: float = math.inf
    now: Callable[[], float] = monotonic
    watch: Callable[[SearchProgress], object] = lambda step: None


class _BudgetSpent(Exception):
    """The budget does not allow another measurement."""


def measurements(tasks: Sequence[TuningTask]) -> int:
    """The maximum number of measurements of a search, linear in the number of candidates."""
    return 3 + sum(len(task.candidates) + 2 + bool(task.part) for task in tasks) + FINAL_MEASUREMENTS


def search(
    tasks: Sequence[TuningTask],
    measure: Measure,
    clock: Clock | None = None,
    start: Assignment | None = None,
    before_group: Callable[[TuningTask], object] = lambda task: None,
    measure_part: Callable[[Assignment, str], float] | None = None,
) -> SearchResult:
    """Tune the groups in turn, beginning with the assignment `start`; the module docstring describes the method.

    before_group: called before each group, for instance to compile its candidates. measure_part: as `measure`, for
    tasks of a part.

    After the first measurement, KeyboardInterrupt and the end of the budget return the results so far. A PumiceError
    in the trial of a candidate rejects it; all other errors of `measure` propagate.
    """
    return _Search(tasks, measure, clock or Clock(), dict(start or {}), before_group, measure_part).run()


@dataclass
class _Search:
    tasks: Sequence[TuningTask]
    measure: Measure
    clock: Clock
    current: dict[str, Choice]
    before_group: Callable[[TuningTask], object]
    measure_part: Callable[[Assignment, str], float] | None
    tried: dict[str, list[TrialResult]] = field(default_factory=dict)
    tuned_groups: list[str] = field(default_factory=list)
    before: float = math.inf
    best: float = math.inf
    durations: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    measuring: tuple[str, Choice] = ("", None)
    standing: dict[str, float] = field(default_factory=dict)
    """Seconds of the current assignment by part, as last measured."""

    def __post_init__(self) -> None:
        self.began = self.clock.now()

    def run(self) -> SearchResult:
        ended = ""
        try:
            self._begin()
            for task in self.tasks:
                self._tune_group(task)
        except _BudgetSpent:
            ended = "the budget was spent"
        except KeyboardInterrupt:
            if self.before == math.inf:
                raise
            return self._result("it was interrupted", False)
        try:
            stands = self._verify_against_default()
        except KeyboardInterrupt:
            return self._result("it was interrupted", False)
        return self._result(ended or stands, not ended)

    def _begin(self) -> None:
        self.before = self.best = self._measure({})
        self._update_noise(self.before, self._measure({}))
        if self.current:
            self.best = self._measure(self.current)
        self.standing[""] = self.best

    def _tune_group(self, task: TuningTask) -> None:
        """Choose the fastest candidate of a group if it beats the current assignment twice."""
        self.measuring = (task.group, None)
        self._check_budget()
        self.before_group(task)
        baseline = self._measure(self.current, task.part)
        self._update_noise(self.standing.get(task.part, math.inf), baseline)
        self.standing[task.part] = baseline
        if not task.part:
            self.best = baseline
        results = self.tried.setdefault(task.group, [])
        try:
            for candidate in task.candidates:
                results.append(self._measure_candidate(task, candidate, baseline))
        except (_BudgetSpent, KeyboardInterrupt):
            # The candidates measured so far count.
            self._take_best(task, results, baseline)
            raise
        whole = self.best
        winner = self._take_best(task, results, baseline)
        if winner is not None:
            self._confirm(task, winner, whole)
        self.tuned_groups.append(task.group)

    def _measure_candidate(self, task: TuningTask, candidate: Choice, baseline: float) -> TrialResult:
        self.measuring = (task.group, candidate)
        try:
            return TrialResult(candidate, self._measure({**self.current, task.group: candidate}, task.part), baseline)
        except PumiceError as reason:
            return TrialResult(candidate, baseline=baseline, refused=str(reason))

    def _take_best(self, task: TuningTask, results: Sequence[TrialResult], baseline: float) -> TrialResult | None:
        winner = min(results, key=lambda tried: tried.seconds, default=None)
        if winner is None or not self._is_faster(winner.seconds, baseline):
            return None
        self.current[task.group], self.standing[task.part] = winner.candidate, winner.seconds
        # What a part gains, the whole is taken to gain, until it is measured.
        self.best -= baseline - winner.seconds
        return winner

    def _confirm(self, task: TuningTask, winner: TrialResult, whole: float) -> None:
        """Measure a winner again, and one of a part also with all the rest. whole: seconds of all without it."""
        self.measuring = (task.group, winner.candidate)
        again = self._measure(self.current, task.part)
        self._update_noise(winner.seconds, again)
        mean = fmean((winner.seconds, again))
        stands = self._is_faster(mean, winner.baseline)
        if stands and task.part:
            now = self._measure(self.current)
            stands = not self._is_faster(whole, now)
            whole = now if stands else whole
        if not stands:
            del self.current[task.group]
        self.standing[task.part] = mean if stands else winner.baseline
        self.best = whole if task.part else self.standing[""]

    def _verify_against_default(self) -> str:
        """Measure default and assignment again, alternating; returns why the default is kept."""
        if not self.current:
            return ""
        self.measuring = ("", None)
        both = {}, self.current
        pairs = [tuple(self._measure(one, last=True) for one in both) for _ in range(FINAL_MEASUREMENTS // 2)]
        # These replace earlier measurements, since clocks drift.
        self.before, self.best = (fmean(side) for side in zip(*pairs, strict=True))
        if self.best < self.before:
            return ""
        reason = f"all choices together took {1e3 * self.best:.3f} ms, the default {1e3 * self.before:.3f} ms"
        self.current = {}
        return reason

    def _is_faster(self, seconds: float, baseline: float) -> bool:
        """True if `seconds` is below `baseline` by more than the measurement noise."""
        noise = 2 * median(self.noise) if self.noise else 0.0
        return seconds < baseline * (1 - min(MAX_NOISE, max(MIN_NOISE, noise)))

    def _update_noise(self, one: float, other: float) -> None:
        """Update the noise estimate from two measurements of the same assignment."""
        if 0 < max(one, other) < math.inf:
            self.noise.append(abs(one - other) / max(one, other))

    def _measure(self, assignment: Assignment, part: str = "", last: bool = False) -> float:
        """Seconds of an assignment, or of a part of the work. Checks the budget before, unless `last`."""
        if not last:
            self._check_budget()
        begin = self.clock.now()
        seconds = self.measure_part(assignment, part) if part and self.measure_part else self.measure(assignment)
        self.durations.append(self.clock.now() - begin)
        self._report_progress()
        return seconds

    def _check_budget(self) -> None:
        if self.durations:
            spent, kept = self.clock.now() - self.began, FINAL_MEASUREMENTS * min(self.durations)
            if spent + fmean(self.durations) + kept > self.clock.budget:
                raise _BudgetSpent

    def _report_progress(self) -> None:
        total, done, spent = measurements(self.tasks), len(self.durations), self.clock.now() - self.began
        left = min(spent / done * max(0, total - done), max(0.0, self.clock.budget - spent))
        group, candidate = self.measuring
        self.clock.watch(SearchProgress(group, candidate, done, max(total, done), left, self.best, self.before))

    def _result(self, ended: str, finished: bool) -> SearchResult:
        tried = {group: tuple(results) for group, results in self.tried.items()}
        # Never return an assignment that was measured slower, wherever the search stopped.
        assignment, after = dict(self.current), self.best
        if not assignment or after >= self.before:
            assignment, after = {}, self.before
        return SearchResult(
            assignment, self.before, after, tried, tuple(self.tuned_groups), len(self.durations), finished, ended
        )
