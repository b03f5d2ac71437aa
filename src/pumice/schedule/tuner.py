"""Greedy search over groups of layers: one group after the other, each choice measured end to end.

Tang et al., "TorchSparse++", MICRO 2023, section 4: layers that share a kernel map form a group and run one dataflow; a
group takes the one that is fastest for the whole network while the others stay fixed, so that the number of
measurements is the sum of the groups' candidates, not their product. Additions of ours: every group first measures the
current assignment again, since clocks drift; a choice must win twice by more than the measurement noise; and the result
is compared with the default in the end, so that it is never slower as measured.

Values and a function `measure`: no tensors, no launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from time import monotonic

from pumice.errors import PumiceError

Choice = Hashable  # of a group; None is the default (the planner's)
Assignment = Mapping[str, Choice]  # choices by group name; a missing group runs the default
Measure = Callable[[Assignment], float]  # seconds of an assignment; raises PumiceError if it cannot run

LEAST = 0.002  # minimal relative gain of a choice
MOST = 0.05  # upper limit of the required gain, however noisy measurements are
LAST = 4  # measurements of the final comparison with the default


@dataclass(frozen=True)
class TuningTask:
    """A group and its candidates besides the default, in the order in which they are tried."""

    group: str
    candidates: tuple[Choice, ...]


@dataclass(frozen=True)
class TrialResult:
    """Result of a candidate: seconds of the network, or why it failed. stood: seconds of the current assignment."""

    candidate: Choice
    seconds: float = math.inf
    stood: float = math.inf
    refused: str = ""


@dataclass(frozen=True)
class SearchProgress:
    """State of a search. done, total: measurements; left: estimated seconds; best, before: seconds of the best
    assignment so far and of the default."""

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
    tried: trials by group, in order. asked: the groups that were tuned completely. measured: number of measurements.
    ended: why it stopped early, or why the default was kept.
    """

    assignment: Assignment
    before: float
    after: float
    tried: Mapping[str, tuple[TrialResult, ...]]
    asked: tuple[str, ...]
    measured: int
    finished: bool = True
    ended: str = ""


@dataclass(frozen=True)
class Clock:
    """A budget in seconds; now: a clock; watch: called with every step."""

    budget: float = math.inf
    now: Callable[[], float] = monotonic
    watch: Callable[[SearchProgress], object] = lambda step: None


class _Enough(Exception):
    """The budget does not allow another measurement."""


def measurements(questions: Sequence[TuningTask]) -> int:
    """The maximal number of measurements of a search: linear in the candidates."""
    return 3 + sum(len(question.candidates) + 2 for question in questions) + LAST


def search(
    questions: Sequence[TuningTask],
    measure: Measure,
    clock: Clock | None = None,
    start: Assignment | None = None,
    ready: Callable[[TuningTask], object] = lambda question: None,
) -> SearchResult:
    """Tune the groups in turn, beginning with the assignment `start`; the module docstring has the method.

    ready: called before each group, for instance to compile its candidates.

    KeyboardInterrupt and the end of the budget keep the results so far. A PumiceError rejects a candidate; one of the
    default is raised, as are all other errors of `measure`.
    """
    return _Search(questions, measure, clock or Clock(), dict(start or {}), ready).run()


@dataclass
class _Search:
    questions: Sequence[TuningTask]
    measure: Measure
    clock: Clock
    standing: dict[str, Choice]
    ready: Callable[[TuningTask], object]
    tried: dict[str, list[TrialResult]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    before: float = math.inf
    best: float = math.inf
    took: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    asking: tuple[str, Choice] = ("", None)

    def __post_init__(self) -> None:
        self.began = self.clock.now()

    def run(self) -> SearchResult:
        ended = ""
        try:
            self._begin()
            for question in self.questions:
                self._ask(question)
        except _Enough:
            ended = "the budget was spent"
        except KeyboardInterrupt:
            if self.before == math.inf:
                raise
            return self._found("it was interrupted", False)
        try:
            stands = self._held_against_the_default()
        except KeyboardInterrupt:
            return self._found("it was interrupted", False)
        return self._found(ended or stands, not ended)

    def _begin(self) -> None:
        self.before = self.best = self._timed({})
        self._learn(self.before, self._timed({}))
        if self.standing:
            self.best = self._timed(self.standing)

    def _ask(self, question: TuningTask) -> None:
        """Take the best candidate of a group if it beats the current assignment twice."""
        self.asking = (question.group, None)
        self._check_budget()
        self.ready(question)
        stood = self._timed(self.standing)
        self._learn(self.best, stood)
        self.best = stood
        results = self.tried.setdefault(question.group, [])
        try:
            for candidate in question.candidates:
                results.append(self._try(question.group, candidate, stood))
        except (_Enough, KeyboardInterrupt):
            # Completed measurements count.
            self._take(question.group, results, stood)
            raise
        winner = self._take(question.group, results, stood)
        if winner is not None:
            self._confirm(question.group, winner)
        self.asked.append(question.group)

    def _try(self, group: str, candidate: Choice, stood: float) -> TrialResult:
        self.asking = (group, candidate)
        try:
            return TrialResult(candidate, self._timed({**self.standing, group: candidate}), stood)
        except PumiceError as reason:
            return TrialResult(candidate, stood=stood, refused=str(reason))

    def _take(self, group: str, results: Sequence[TrialResult], stood: float) -> TrialResult | None:
        winner = min(results, key=lambda tried: tried.seconds, default=None)
        if winner is None or not self._better(winner.seconds, stood):
            return None
        self.standing[group], self.best = winner.candidate, winner.seconds
        return winner

    def _confirm(self, group: str, winner: TrialResult) -> None:
        self.asking = (group, winner.candidate)
        again = self._timed(self.standing)
        self._learn(winner.seconds, again)
        self.best = fmean((winner.seconds, again))
        if not self._better(self.best, winner.stood):
            del self.standing[group]
            self.best = winner.stood

    def _held_against_the_default(self) -> str:
        """Measure both once more, alternating; why the default is kept, if it is."""
        if not self.standing:
            return ""
        self.asking = ("", None)
        pairs = [(self._timed({}, True), self._timed(self.standing, True)) for _ in range(LAST // 2)]
        # Earlier measurements may be off by clock drift.
        self.before, self.best = (fmean(side) for side in zip(*pairs, strict=True))
        if self.best < self.before:
            return ""
        reason = f"all choices together took {1e3 * self.best:.3f} ms, the default {1e3 * self.before:.3f} ms"
        self.standing = {}
        return reason

    def _better(self, seconds: float, stood: float) -> bool:
        """True if the difference exceeds the usual measurement noise."""
        noise = 2 * median(self.apart) if self.apart else 0.0
        return seconds < stood * (1 - min(MOST, max(LEAST, noise)))

    def _learn(self, one: float, other: float) -> None:
        """Update the noise estimate from two measurements of the same assignment."""
        if 0 < max(one, other) < math.inf:
            self.apart.append(abs(one - other) / max(one, other))

    def _timed(self, assignment: Assignment, last: bool = False) -> float:
        """Measure, if the budget allows this and the final comparison."""
        if not last:
            self._check_budget()
        begin = self.clock.now()
        seconds = self.measure(assignment)
        self.took.append(self.clock.now() - begin)
        self._tell()
        return seconds

    def _check_budget(self) -> None:
        if self.took:
            spent, kept = self.clock.now() - self.began, LAST * min(self.took)
            if spent + fmean(self.took) + kept > self.clock.budget:
                raise _Enough

    def _tell(self) -> None:
        total, done, spent = measurements(self.questions), len(self.took), self.clock.now() - self.began
        left = min(spent / done * max(0, total - done), max(0.0, self.clock.budget - spent))
        group, candidate = self.asking
        self.clock.watch(SearchProgress(group, candidate, done, max(total, done), left, self.best, self.before))

    def _found(self, ended: str, finished: bool) -> SearchResult:
        tried = {group: tuple(results) for group, results in self.tried.items()}
        # Never return an assignment that was measured slower, wherever the search stopped.
        assignment, after = dict(self.standing), self.best
        if not assignment or after >= self.before:
            assignment, after = {}, self.before
        return SearchResult(assignment, self.before, after, tried, tuple(self.asked), len(self.took), finished, ended)
