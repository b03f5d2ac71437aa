"""Calls that may wait for the device in their middle, a network or a layer with its map: checked, then timed, as rows.

wall  from an idle device to an idle device, in turn with the peers, the L2 flushed before each
gpu   the sum over what the device did for the call, as the profiler records it: no wait of the host counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import torch

from benchmarks.harness.rows import Peer, Row, Subject, row
from benchmarks.harness.study import Case, Ready, Setup, Way, ready
from benchmarks.harness.timing import Times, busy, clocks, together
from pumice.errors import PumiceError

Result = TypeVar("Result")
Clock = Callable[[Setup, Sequence[Ready]], list[Times]]


def checked(setup: Setup, way: Way, cases: Sequence[tuple[Case, Way]], ours: bool) -> Ready | None:
    """The way made once, and its result held against each truth: the view and slack are those of the way beside it.

    None where one of them is wrong, or where a peer cannot; the error is the largest.
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


def compared(setup: Setup, subject: Subject, mine: Ready, theirs: Sequence[Ready]) -> Iterator[Row]:
    """Ours against each peer: a row for each clock and each of them; without a peer the times are told only."""
    everyone = (mine, *theirs)
    for clock in clocks(setup.device):
        try:
            times = CLOCKS[clock](setup, everyone)
        except PumiceError as reason:
            setup.say(f"{subject.case} {clock} is left out: {reason}")
            continue
        except RuntimeError as reason:  # what runs once may still run out of memory among the others
            if setup.device.type == "cuda":
                torch.cuda.empty_cache()
            setup.failed(f"{subject.case} {clock}: while timed: {str(reason).splitlines()[0]}")
            continue
        told = (f"{one.name} {_ms(spent)}; error {one.error:.1e})" for one, spent in zip(everyone, times, strict=True))
        setup.say(f"{subject.case} {clock}: " + "   ".join(told))
        for one, spent in zip(theirs, times[1:], strict=True):
            packages = (one.package,) if one.package else ()
            yield row(replace(subject, packages=packages), times[0], clock, Peer(one.name, spent.median))


def in_tf32(call: Callable[[], Result]) -> Callable[[], Result]:
    """The call while torch multiplies float32 as tf32; Pumice does as torch is told."""

    def run() -> Result:
        with _fp32_precision("tf32"):
            return call()

    return run


@contextmanager
def _fp32_precision(name: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _on_wall(setup: Setup, calls: Sequence[Ready]) -> list[Times]:
    return together([one.call for one in calls], setup.device, "wall", setup.seconds)


def _on_device(setup: Setup, calls: Sequence[Ready]) -> list[Times]:
    return [busy(one.call) for one in calls]


CLOCKS: Mapping[str, Clock] = MappingProxyType({"wall": _on_wall, "gpu": _on_device})


def _ms(times: Times) -> str:
    return f"{times.median:.4g} ms ({times.p20:.4g}, {times.p80:.4g}"
