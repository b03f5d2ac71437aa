"""Timing of several calls in turn, with quantiles, by one of three clocks.

wall   from an idle device to an idle device: includes all host time
gpu    between two events on the stream, the host far ahead: device time only. For calls that wait for the device
       midway, `busy` adds up the device's work instead
events between two events on the stream, the host ahead only by the L2 flush: how many libraries time themselves

On a GPU the L2 is flushed before every call, as in triton.testing.do_bench. A CPU has the wall clock, and `on_cpu` the
time of the calling thread as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from pumice.engine.measure import by_part

Call = Callable[[], object]
Result = TypeVar("Result")
FLUSH = 256 << 20  # bytes, several times the L2 of any GPU
_LEAST, _MOST = 7, 200


@dataclass(frozen=True)
class Times:
    """Median and quantiles of a timed call, in milliseconds."""

    median: float
    p20: float
    p80: float

    @staticmethod
    def of(spent: Sequence[float]) -> Times:
        return Times(*np.quantile(spent, (0.5, 0.2, 0.8)).tolist())

    @staticmethod
    def exactly(value: float) -> Times:
        """A value without quantiles."""
        return Times(value, value, value)

    def __str__(self) -> str:
        return f"{self.median:.4g} ms ({self.p20:.4g}, {self.p80:.4g})"


def clocks(device: torch.device) -> tuple[str, ...]:
    """The clocks of a device; the last one is the device's own, if it has one."""
    return ("wall", "gpu") if device.type == "cuda" else ("wall",)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def together(calls: Sequence[Call], device: torch.device, clock: str, seconds: float, cold: bool = True) -> list[Times]:
    """Time calls in turn for about `seconds` in all: two warm-up runs of each, then 7 to 200 timed ones.

    cold: flush the L2 before each timed run; otherwise run the call once more instead. The wall clock always flushes.
    """
    for _ in range(2):
        for call in calls:
            call()
    if clock == "wall":
        return [Times.of(spent) for spent in _on_wall(calls, device, seconds)]
    return [Times.of(spent) for spent in _on_gpu(calls, device, seconds, clock == "gpu", cold)]


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Run the block on so many of torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_clock() -> str:
    """The clock of `on_cpu`: that of the thread, `cpu`, with one of torch's threads, else `wall`."""
    return "cpu" if torch.get_num_threads() == 1 else "wall"


def on_cpu(calls: Sequence[Call], runs: int, warm: int = 2) -> list[Times]:
    """Time calls on the CPU in turn, after `warm` runs of each. The value is the 20 % quantile of the thread's time, or
    with several threads the minimum of the wall-clock time: what is above either is mostly other processes."""
    single = cpu_clock() == "cpu"
    now, spent = time.thread_time if single else time.perf_counter, [list[float]() for _ in calls]
    for run in range(runs + warm):
        for call, times in zip(calls, spent, strict=True):
            begin = now()
            call()
            if run >= warm:
                times.append(1e3 * (now() - begin))
    least, most = np.quantile(spent, (0.2 if single else 0.0, 0.8), axis=1).tolist()
    return [Times(value, value, above) for value, above in zip(least, most, strict=True)]


def in_pieces(calls: Sequence[Sequence[Call]], device: torch.device, clock: str, seconds: float) -> list[Times]:
    """Time calls given as pieces, piece by piece and all in turn; a call's time is the sum over its pieces.

    For calls of more kernels than a stream can queue (about a thousand): while the device sleeps, a piece can be queued
    but not the whole call. Seconds and runs are as in `together`, for all pieces.
    """
    pieces = [piece for call in calls for piece in call]
    for _ in range(2):
        for piece in pieces:
            piece()
    spent = (
        _on_wall(pieces, device, seconds) if clock == "wall" else _on_gpu(pieces, device, seconds, clock == "gpu", True)
    )
    each = iter(spent)
    return [Times.of([sum(run) for run in zip(*islice(each, len(call)), strict=True)]) for call in calls]


def busy(call: Call, runs: int = 7) -> Times:
    """Total time of the device's work on a call (kernels, copies, fills), for calls that wait for the device midway:
    the time between two events would include that wait.

    The call must have run before, or its compilation counts. Raises as pumice.engine.measure.by_part.
    """
    found, _ = by_part([call] * runs)
    return Times.of([1e3 * sum(parts.values()) for parts in found])


def captured(call: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """Capture a call as a CUDA graph; the function returned replays it and returns the same tensors each time.

    The call must not wait for the device. It runs three times before the capture, to compile kernels and fill caches.
    """
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()

    def replay() -> Result:
        graph.replay()
        return kept

    return replay


def _on_wall(calls: Sequence[Call], device: torch.device, seconds: float) -> list[list[float]]:
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device) if device.type == "cuda" else None
    spent: list[list[float]] = [[] for _ in calls]
    start = time.perf_counter()
    while _goes_on(spent[0], start, seconds):
        for call, times in zip(calls, spent, strict=True):
            if flush is not None:
                flush.zero_()
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            call()
            if flush is not None:
                torch.cuda.synchronize(device)
            times.append(1e3 * (time.perf_counter() - begin))
    return spent


def _on_gpu(calls: Sequence[Call], device: torch.device, seconds: float, ahead: bool, cold: bool) -> list[list[float]]:
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device)
    naps = [_nap(call, device) if ahead else 0 for call in calls]
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    start = time.perf_counter()
    while _goes_on(events[0], start, seconds):
        for call, nap, marks in zip(calls, naps, events, strict=True):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_() if cold else call()
            if nap:
                # The device sleeps while the host queues the call: no wait for the host lies between the events.
                torch.cuda._sleep(nap)
            first.record()
            call()
            last.record()
            marks.append((first, last))
            if not ahead:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
    return [[first.elapsed_time(last) for first, last in marks] for marks in events]


def _nap(call: Call, device: torch.device) -> int:
    """Cycles of a 2 GHz clock that suffice for the host to queue the call; at most 20 ms."""
    took = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return int(2e9 * min(20e-3, 2 * min(took) + 50e-6))


def _goes_on(done: Sequence[object], start: float, seconds: float) -> bool:
    return len(done) < _LEAST or (len(done) < _MOST and time.perf_counter() - start < seconds)
