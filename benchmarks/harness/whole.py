"""Checks and timings of calls that may wait for the device midway: a network, or a layer with its kernel map.

wall  from an idle device to an idle device, in turn with the peers, the L2 flushed before each run
gpu   the profiler's sum over the device's work for the call, without waits for the host
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Ready, Setup, Way, memory_rows, ready, recover, times_told
from benchmarks.harness.timing import Times, busy, clocks, together
from pumice.errors import PumiceError

Result = TypeVar("Result")


def checked(setup: Setup, way: Way, cases: Sequence[tuple[Case, Way]], ours: bool) -> Ready | None:
    """Make a way once and compare its result with each case, by view and slack of the way paired with the case.

    None if a result is wrong or a peer cannot run; otherwise `error` is the largest.
    """
    calls: list[Callable[[], object]] = []

    def made() -> Callable[[], object]:
        if not calls:
            calls.append(way.make())
        return calls[0]

    worst: Ready | None = None
    for case, by in cases:
        found = ready(setup, case, replace(way, make=made, view=by.view, slack=by.slack), ours)
        if found is None:
            return None
        worst = found if worst is None or found.error > worst.error else worst
    return worst


def spent(setup: Setup, case: str, clock: str, ways: Sequence[Ready], seconds: float = 0.0) -> dict[str, Times]:
    """Time ways in turn: times by name. Empty, with a message, if the profiler fails or memory runs out."""
    calls = [way.call for way in ways]
    try:
        if clock == "gpu":
            found = [busy(call) for call in calls]
        else:
            found = together(calls, setup.device, clock, seconds or setup.seconds)
    except PumiceError as reason:
        setup.say(f"{case} {clock} is left out: {reason}")
        return {}
    except RuntimeError as reason:  # a way that ran alone may run out of memory beside the others
        recover(setup)
        setup.failed(f"{case} {clock}: while timed: {str(reason).splitlines()[0]}")
        return {}
    times = {way.name: time for way, time in zip(ways, found, strict=True)}
    setup.say(f"{case} {clock}: {times_told(ways, times)}")
    return times


def compared(
    setup: Setup, case: str, mine: Ready, theirs: Sequence[Ready], seconds: float = 0.0, **about: Any
) -> Iterator[Row]:
    """Time ours against each peer and yield a row per clock and peer, and of the peak memory; without peers the times
    are only printed.

    about: metric and dtype of the rows; rows of another metric than the time have none of memory beside.
    """
    for clock in clocks(setup.device):
        times = spent(setup, case, clock, (mine, *theirs), seconds)
        for one in theirs if times else ():
            peer = Peer(one.name, times[one.name].median, package=one.package)
            yield setup.row(case, times[mine.name], clock, peer, **about)
    if about.get("metric", "time") == "time":
        yield from memory_rows(setup, {case: mine}, theirs, about.get("dtype", ""))


def in_tf32(call: Callable[[], Result]) -> Callable[[], Result]:
    """The call with torch's float32 precision set to tf32; Pumice follows torch's setting."""

    def run() -> Result:
        with multiplying("tf32"):
            return call()

    return run


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Set torch's precision of float32 matrix products and convolutions within a block."""
    backends: Any = torch.backends
    switches = backends.cuda.matmul, backends.cudnn.conv
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = precision
        yield
    finally:
        for switch, kept in zip(switches, before, strict=True):
            switch.fp32_precision = kept
