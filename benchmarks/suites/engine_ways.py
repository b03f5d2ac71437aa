"""What the studies `inference` and `training` of the suite `engine` share: ways timed in turn, and rows of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from benchmarks.harness.families import RECORDED, SAME_RUN
from benchmarks.harness.rows import Peer, Row, Subject, row
from benchmarks.harness.study import DTYPES, Ready, Setup, mean_told
from benchmarks.harness.timing import Times, busy, clocks, together
from benchmarks.scenes.engine import BEST, Known
from benchmarks.scenes.workloads import Sample
from pumice.errors import PumiceError

CAPTURED, EAGER, SPCONV = "captured", "eager", "spconv"
OURS_EAGER = "our eager pass"
"""What the captured ways are held against, where it ran: a peer that is no other library."""


@dataclass(frozen=True)
class Timed:
    """The ways of one scene that were right, and what is known of the scene. mode: inference or training. seconds: to
    time them for; check: what is to be looked at behind that."""

    setup: Setup
    scene: str
    mode: str
    ways: Sequence[Ready]
    known: Known | None
    seconds: float
    check: Callable[[], None] = lambda: None

    def case(self, way: str) -> str:
        return f"{case_of(self.setup, self.scene, self.mode)}/{way}"

    @property
    def ours(self) -> list[Ready]:
        return [way for way in self.ways if way.name != SPCONV]

    def rows(self, clock: str) -> Iterator[Row]:
        """Of each of ours, on this clock, a row for each of its peers."""
        try:
            times = self._times(clock)
        except PumiceError as reason:
            self.setup.say(f"{self.case('')[:-1]} {clock} is left out: {reason}")
            return
        except RuntimeError as reason:  # what runs once may still run out of memory among the others
            self.setup.failed(f"{self.case('')[:-1]} {clock}: while timed: {str(reason).splitlines()[0]}")
            return
        self._tell(clock, times)
        self.check()
        for way in self.ours:
            yield from self._rows(way, clock, times)

    def _times(self, clock: str) -> dict[str, Times]:
        calls = [way.call for way in self.ways]
        found = [busy(call) for call in calls] if clock == "gpu" else together(
            calls, self.setup.device, clock, self.seconds
        )  # fmt: skip
        return dict(zip((way.name for way in self.ways), found, strict=True))

    def _rows(self, way: Ready, clock: str, times: Mapping[str, Times]) -> Iterator[Row]:
        device = self.setup.device
        subject = Subject(self.setup.suite, self.case(way.name), DTYPES[self.setup.half], device)
        for peer in self._peers(way, clock, times):
            packages = tuple(one.package for one in self.ways if one.name == peer.name == SPCONV)
            yield row(replace(subject, packages=packages), times[way.name], clock, peer)

    def _peers(self, way: Ready, clock: str, times: Mapping[str, Times]) -> Iterator[Peer]:
        if SPCONV in times:
            yield Peer(SPCONV, times[SPCONV].median)
        if EAGER in times and way.name != EAGER:
            yield Peer(OURS_EAGER, times[EAGER].median)
        if self.known and clock == "wall" and self.setup.device.type == "cuda":
            yield from self.known.peers(way.name == EAGER)
        if way.name == EAGER and SPCONV not in times:
            yield Peer("itself", times[EAGER].median)

    def _tell(self, clock: str, times: Mapping[str, Times]) -> None:
        say = self.setup.say
        told = (
            f"{one.name} {times[one.name].median:.4g} ms ({times[one.name].p20:.4g}, {times[one.name].p80:.4g}; "
            f"error {one.error:.1e})"
            for one in self.ways
        )
        say(f"{self.case('')[:-1]} {clock}: " + "   ".join(told))
        if self.known and clock == "wall":
            say("  " + ", ".join(_goal(self.known, way.name, times[way.name].median) for way in self.ours))


def _goal(known: Known, way: str, value: float) -> str:
    best, goal = known.peers(way == EAGER)
    met = "met" if value <= goal.value else "NOT met"
    return f"{way}: goal {goal.value:g} {met}, best recorded peer {best.value:g} ({best.value / value:.2f}x)"


def case_of(setup: Setup, scene: str, mode: str) -> str:
    """What rows of a scene are called, without the way."""
    tuned = "/tuned" if setup.thorough else ""
    return f"{'tiny/' * setup.quick}{scene}/{DTYPES[setup.half]}/{mode}{tuned}"


def in_time(setup: Setup, samples: Iterator[Sample], mode: str) -> Iterator[Sample]:
    """The samples that are wanted, as long as the study has the time that its longest one took."""
    longest = 0.0
    for sample in samples:
        if not any(setup.wants(f"{case_of(setup, sample.name, mode)}/{way}") for way in (CAPTURED, EAGER)):
            continue
        if longest and setup.left < longest:
            setup.say(f"{sample.name} is left out: {max(0.0, setup.left):.0f} s are left, and one took {longest:.0f}")
            continue
        begin = time.perf_counter()
        yield sample
        took = time.perf_counter() - begin
        setup.say(f"{sample.name}: {took:.1f} s in all")
        longest = max(longest, took)


@dataclass
class Reached:
    """How many times as fast as its peers a way was, by scene."""

    ratios: dict[tuple[str, str, str], dict[str, float]] = field(default_factory=dict)

    def add(self, made: Row) -> None:
        wanted = made.peer_source == SAME_RUN or (made.peer_source == RECORDED and made.peer == BEST)
        if wanted and made.value > 0 and made.peer != "itself":
            scene = made.case.removeprefix("tiny/").partition("/")[0]
            way = made.case.rpartition("/")[2]
            self.ratios.setdefault((way, made.peer, made.clock), {})[scene] = made.peer_value / made.value

    def of(self, rows: Iterator[Row]) -> Iterator[Row]:
        """These rows, each added."""
        for made in rows:
            self.add(made)
            yield made

    def tell(self, setup: Setup) -> None:
        for (way, peer, clock), found in self.ratios.items():
            setup.say(f"{way} over {peer}, {clock}: {mean_told(found)}")


def by_scene(
    setup: Setup, samples: Iterator[Sample], mode: str, one: Callable[[Setup, Sample], Timed | None]
) -> Iterator[Row]:
    """The rows of every sample that is wanted and that there is time for; what was reached is told last.

    The wall comes first, for all of them: behind a profiler's trace, which tells how long a GPU is busy, each launch of
    a graph takes 0.07 to 0.1 ms more in that process (H200, CUDA 13).
    """
    found, timed, (first, *others) = Reached(), [], clocks(setup.device)
    for sample in in_time(setup, samples, mode):
        ready = one(setup, sample)
        if ready is not None:
            timed.append(ready)
            yield from found.of(ready.rows(first))
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
    for ready in timed:
        for clock in others:
            yield from found.of(ready.rows(clock))
    found.tell(setup)
