"""How long a network takes: on a GPU the time that it is busy, kernel by kernel; on a CPU the wall clock.

An eager network on a GPU is often bound by the host, so that the wall clock does not tell a good kernel from a bad one.
What counts is how long kernels ran, as CUPTI tells it (torch.profiler), with maps found anew in each pass.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from pumice import coords
from pumice.engine.subject import Loss, Scene, subject, undisturbed
from pumice.errors import DeviceError, OptionError

Call = Callable[[], object]
KERNELS, EVENTS, WALL = "kernels", "events", "wall"
"""Clocks: what kernels took; between two events around a pass, gaps among kernels included; on the wall."""
OTHER = "other"
_ATTEMPTS = 3
"""Traces that are taken until one tells of every pass."""


@dataclass(frozen=True)
class PassTiming:
    """What a pass over a scene takes, in seconds: the mean over scenes, of the median of the repeats.

    total: by the clock. parts: of it, by PARTS, where the clock is "kernels"; they add up to it. wall: from an idle
    device to an idle device. note: what there is to say about the clock.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    wall: float = 0.0
    clock: str = WALL
    note: str = ""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in self.parts.items())
        wall = f", {1e3 * self.wall:.3f} ms on the wall" if self.clock != WALL else ""
        return f"{1e3 * self.total:.3f} ms ({self.clock}{': ' if parts else ''}{parts}{wall})"


class Event(NamedTuple):
    """What ran on the device: its name, and nanoseconds."""

    name: str
    start: int
    duration: int


def measure(
    model: nn.Module, samples: Sequence[Scene], mode: str = "inference", *, repeats: int = 5, loss: Loss | None = None
) -> PassTiming:
    """What a network takes as it is, for inference or for a training step without the optimizer's.

    samples: SparseTensors (or pairs of coordinates and features); each pass finds its maps anew. loss: of what the
    model returns, a scalar; by default the mean of squares of every tensor in it. Autocast is the caller's. The model
    is left as it was: parameters, gradients, buffers, modes, and torch's random numbers.

    Raises as pumice.tune does.
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise OptionError(f"repeats is at least 1, found {repeats!r}")
    asked = subject(model, samples, mode, loss)
    with undisturbed(asked.model, asked.training):
        return Meter(asked.device, repeats).spent(asked.calls())


# Kernels by name
@lru_cache(maxsize=4)
def kernels_in(file: str) -> tuple[str, ...]:
    """The kernels of a file of the room coords, by its source: importing it takes Triton."""
    tree = ast.parse((Path(coords.__file__).parent / f"{file}.py").read_text(encoding="utf-8"))
    jitted = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list)
    return tuple(node.name for node in jitted if not node.name.startswith("_"))


def _own(file: str) -> str:
    # Some versions of Triton add what they specialised on.
    return rf"^({'|'.join(kernels_in(file))})(_\d.*)?$"


PARTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "map": lambda: _own("lookup_kernels"),
        "sort": lambda: _own("tile_kernels") + r"|[Rr]adix_?[Ss]ort|[Mm]ergeSort|bitonicSort",
        "conv": lambda: r"^_(dot|mul)_",
        "product": lambda: r"gemm|gemv|cutlass|cublas|nvjet|xmma|Cijk",
        "movement": lambda: r"index|gather|scatter|EmbeddingBag",
        "copy": lambda: r"^Mem(cpy|set)",
    }
)
"""Patterns of names, the first that fits counts: finding neighbours; ordering and laying out; emitted kernels; products
and movements of torch's libraries, among them those of dataflows that use them; copies. All else is "other"."""


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """The part that a kernel belongs to."""
    return next((part for part, pattern in _patterns().items() if pattern.search(name)), OTHER)


@lru_cache(maxsize=1)
def _patterns() -> Mapping[str, re.Pattern[str]]:
    return {part: re.compile(pattern()) for part, pattern in PARTS.items()}


_MARK = "spin_kernel"
"""What torch.cuda._sleep runs: it stands before each pass."""


def passes(events: Iterable[Event], expected: int) -> Sequence[Mapping[str, float]]:
    """Seconds by part of each pass, in which a mark came first. Raises OptionError where there are not so many."""
    found = segments(events)
    if len(found) != expected or not all(found):
        raise OptionError(f"the profiler told of {len([each for each in found if each])} passes, expected {expected}")
    return found


def segments(events: Iterable[Event]) -> list[dict[str, float]]:
    """Seconds by part of what ran between each mark and the next one; while two kernels run, the first one counts."""
    found: list[dict[str, float]] = []
    until = 0
    for event in sorted(events, key=lambda event: event.start):
        if _MARK in event.name:
            found.append({})
        elif found:
            part, end = part_of(event.name), event.start + event.duration
            alone = max(0, end - max(event.start, until))
            found[-1][part] = found[-1].get(part, 0.0) + 1e-9 * alone
            until = max(until, end)
    return found


def middle(found: Sequence[Mapping[str, float]], scenes: int) -> Mapping[str, float]:
    """Of repeats over so many scenes, seconds by part of the repeat with the median total, for one scene."""
    rounds = [found[at : at + scenes] for at in range(0, len(found), scenes)]
    rounds.sort(key=lambda each: sum(sum(parts.values()) for parts in each))
    chosen = rounds[(len(rounds) - 1) // 2]
    names = [name for name in (*PARTS, OTHER) if any(name in parts for parts in chosen)]
    return {name: sum(parts.get(name, 0.0) for parts in chosen) / scenes for name in names}


@dataclass
class Meter:
    """Measures passes on a device, always by the same clock: the first measurement says which one can be had."""

    device: torch.device
    repeats: int = 3
    clock: str = ""
    note: str = ""

    def spent(self, calls: Sequence[Call]) -> PassTiming:
        """What calls take, one for each scene; each runs once before."""
        for call in calls:
            call()
        if self.device.type != "cuda":
            return _on_wall(calls, self.repeats)
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            return self._by_events(calls) if self.clock == EVENTS else self._by_kernels_if_possible(calls)

    def _by_kernels_if_possible(self, calls: Sequence[Call]) -> PassTiming:
        try:
            return self._by_kernels(calls)
        except Exception as problem:
            # A profiler that is not there, taken by another, or silent; a fault of the calls comes again below.
            if self.clock:
                raise DeviceError(f"the profiler failed all of a sudden: {_line(problem)}") from problem
            self.note = f"kernels could not be timed one by one ({_line(problem)})"
        self.clock = EVENTS
        return self._by_events(calls)

    def _by_kernels(self, calls: Sequence[Call]) -> PassTiming:
        each, walls = by_part(list(calls) * self.repeats)
        parts = middle(each, len(calls))
        self.clock = KERNELS
        return PassTiming(sum(parts.values()), parts, _wall(walls, len(calls)), KERNELS)

    def _by_events(self, calls: Sequence[Call]) -> PassTiming:
        walls, spans = [], []
        for call in list(calls) * self.repeats:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin = time.perf_counter()
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - begin)
            spans.append(1e-3 * first.elapsed_time(last))
        return PassTiming(_wall(spans, len(calls)), {}, _wall(walls, len(calls)), EVENTS, self.note)


def by_part(calls: Sequence[Call]) -> tuple[Sequence[Mapping[str, float]], list[float]]:
    """Seconds of each call by part, of what the current device did for it, and on the wall; each has run before.

    Work on several streams counts as often as there is some. Raises OptionError where the profiler does not tell of
    every call, and what it raises itself where it is not there, or taken by another.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            events, walls = profiled(calls)
            return passes(events, len(calls)), walls
        except Exception:
            # The first trace of a process may lack what ran at its beginning.
            if not left:
                raise
    raise AssertionError("unreachable")


def profiled(calls: Sequence[Call]) -> tuple[list[Event], list[float]]:
    """What ran on the current device, a mark before each call; and seconds of each call on the wall."""
    walls = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as listening:
        for call in calls:
            torch.cuda._sleep(1)
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            walls.append(time.perf_counter() - begin)
    return on_device(listening.profiler.kineto_results.events()), walls  # pyright: ignore[reportOptionalMemberAccess]


def on_device(events: Iterable[Any]) -> list[Event]:
    """What kernels and copies a profiler told of, without the spans that users name and those that waits make."""
    cuda = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    ran = (event for event in events if event.device_type() == cuda and not _is_named(event))
    found = [Event(event.name(), event.start_ns(), event.duration_ns()) for event in ran]
    return [event for event in found if not event.name.endswith((" Sync", "Wait Event"))]


def _is_named(event: Any) -> bool:
    """Whether an event is a span that somebody named, and no kernel."""
    asked = getattr(event, "is_user_annotation", None)
    return bool(asked and asked()) or event.name().startswith("ProfilerStep")


def _on_wall(calls: Sequence[Call], repeats: int) -> PassTiming:
    walls = []
    for call in list(calls) * repeats:
        begin = time.perf_counter()
        call()
        walls.append(time.perf_counter() - begin)
    took = _wall(walls, len(calls))
    return PassTiming(took, {}, took, WALL)


def _wall(spent: Sequence[float], scenes: int) -> float:
    """The mean over scenes of the median of the repeats."""
    return fmean(median(spent[at::scenes]) for at in range(scenes))


def _line(problem: Exception) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]
