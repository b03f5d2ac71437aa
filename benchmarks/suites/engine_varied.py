"""The study `varied` of the suite `engine`: latency of a captured network on scans that it has not seen.

Thousands of scans (scenes/varied.py) run in turn, each made on the device before its call is timed. A call begins on an
idle device with features and coordinates there, and ends when the logits are computed. Capacities are not captured
ahead: the first scan of a capacity waits for its capture, which counts in rows `all` but not in `later`.

Objects that exist before the first scan are excluded from garbage collection (gc.freeze), as in a real-time program.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import DTYPES, Setup, quietly
from benchmarks.harness.timing import synchronize
from benchmarks.scenes.engine import net_for
from benchmarks.scenes.varied import Varied, hungry, source
from benchmarks.scenes.workloads import Sample
from pumice.engine import Captured, capture
from pumice.engine.compare import differ, perturb
from pumice.ops import SparseTensor

COUNT, TINY = 10_000, 30
SIZES: Mapping[bool, tuple[int, int]] = {False: (7_200, 120_000), True: (60, 300)}
"""Minimum and maximum voxels of a scan, by whether the run is quick."""
FEW: tuple[int, ...] = (100, 200)
"""Capacities of a quick run, besides the largest."""
GOAL = 1.5
"""Goal for p99.9 over p50 within a capacity."""
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
_ASKED = 64
"""Number of scans among which the example is chosen."""
_CHECKED = 20
"""Number of scans compared with the eager pass, after all timing."""
_EVERY = 50
"""Number of scans between measurements of memory."""


@dataclass
class Memory:
    """MiB over the scans, by kind: "live" in tensors, "kept" by torch's allocator, "used" of the device."""

    at: list[int] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)

    def look(self, number: int, device: torch.device) -> None:
        """Measure memory before the scan of this number; no effect on a CPU."""
        if device.type != "cuda":
            return
        free, whole = torch.cuda.mem_get_info(device)
        now = {
            "live": torch.cuda.memory_allocated(device),
            "kept": torch.cuda.memory_reserved(device),
            "used": whole - free,
        }
        self.at.append(number)
        for what, value in now.items():
            self.series.setdefault(what, []).append(value / 2**20)

    def ends(self, since: int) -> dict[str, tuple[float, float]]:
        """By kind, the MiB at the first measurement at or after a scan, and at the last one."""
        first = next((place for place, at in enumerate(self.at) if at >= since), len(self.at) - 1)
        return {what: (series[first], series[-1]) for what, series in self.series.items()}


@dataclass
class Seen:
    """Measurements. spent: milliseconds by capacity, in order of the scans; 0: scans larger than every capacity.

    loading: milliseconds of the first scan of a capacity, including its capture. last: number of scans up to the last
    one that waited for a capture.
    """

    spent: dict[int, list[float]] = field(default_factory=dict)
    loading: dict[int, float] = field(default_factory=dict)
    last: int = 0
    memory: Memory = field(default_factory=Memory)

    @property
    def count(self) -> int:
        return sum(map(len, self.spent.values()))


def varied(setup: Setup) -> Iterator[Row]:
    """Time as many scans as asked for, or as time allows."""
    name = f"{'tiny/' * setup.quick}scans/{DTYPES[setup.half]}/varied"
    if not setup.wants(name):
        return
    scans = source(setup.device, *SIZES[setup.quick], generated=setup.quick)
    folders = sorted({cloud.name.partition("/")[0] for cloud in scans.clouds})
    setup.say(f"{name}: {len(scans.clouds)} clouds of {', '.join(folders)}")
    with quietly():
        net, fast = _captured(setup, scans)
        with _frozen():
            seen = _seen(setup, scans, fast, setup.count or (TINY if setup.quick else COUNT))
        _check(setup, name, scans, net, fast)
    _tell(setup, name, seen, fast)
    yield from _rows(setup, name, seen, fast)


def _captured(setup: Setup, scans: Varied) -> tuple[nn.Module, Captured]:
    feats, coords, cloud = hungry(scans, _ASKED)
    setup.say(f"  example: {len(coords)} voxels of {cloud}")
    net = net_for(setup, Sample(coords, feats, None, 1, "scans")).to(setup.half)
    buckets = [*FEW, scans.high] if setup.quick else 1.5
    example = SparseTensor(feats.to(setup.half), coords)
    return net, capture(net, example, max_voxels=scans.high, buckets=buckets)


def _seen(setup: Setup, scans: Varied, fast: Captured, count: int) -> Seen:
    # The capacity of the example is already captured.
    seen, known = Seen(), fast.prepared
    for number in range(count):
        if setup.left < 3:
            setup.say(f"  no time for more than {number} scans of {count}")
            break
        if number % _EVERY == 0:
            seen.memory.look(number, setup.device)
        feats, coords, _ = scans.scan(number)
        spent = _timed(setup, fast, feats.to(setup.half), coords)
        capacity = next((c for c in fast.capacities if c >= len(coords)), 0)
        seen.spent.setdefault(capacity, []).append(spent)
        if fast.prepared != known:
            known, seen.last = fast.prepared, number + 1
            seen.loading[capacity] = spent
        # Free the scan, so that memory measurements do not include it.
        del feats, coords
    seen.memory.look(seen.count, setup.device)
    return seen


def _timed(setup: Setup, fast: Captured, feats: torch.Tensor, coords: torch.Tensor) -> float:
    synchronize(setup.device)
    begin = time.perf_counter()
    fast(feats, coords)
    synchronize(setup.device)
    return 1e3 * (time.perf_counter() - begin)


@contextmanager
def _frozen() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check(setup: Setup, name: str, scans: Varied, net: nn.Module, fast: Captured) -> None:
    for number in range(2 if setup.quick else _CHECKED):
        feats, coords, cloud = scans.scan(10_007 * (number + 1))
        given = feats.to(setup.half)
        with torch.no_grad():
            want = net(SparseTensor(given, coords))
            again = net(SparseTensor(perturb(given, [want]), coords))
        if told := differ(fast(given, coords), want, again):
            setup.failed(f"{name}: {len(coords)} voxels of {cloud}: {told}")


def quantiles(spent: Sequence[float]) -> dict[str, float]:
    """The quantiles of QUANTILES, by name."""
    return dict(zip(QUANTILES, np.quantile(spent, list(QUANTILES.values())).tolist(), strict=True))


def _parts(seen: Seen) -> Iterator[tuple[int, str, list[float]]]:
    """(capacity, "all" or "later", milliseconds) by capacity; later: without a first scan that waited for capture."""
    for capacity in sorted(seen.spent):
        spent = seen.spent[capacity]
        yield capacity, "all", spent
        if later := spent[capacity in seen.loading :]:
            yield capacity, "later", later


def _tell(setup: Setup, name: str, seen: Seen, fast: Captured) -> None:
    say = setup.say
    say(f"{name}: {seen.count} scans, {fast.replays} by graphs, without {dict(fast.fallbacks) or 'none'}")
    say("  capacity  scans           p50      p99    p99.9      max  p99.9/p50")
    for capacity, which, spent in _parts(seen):
        found = quantiles(spent)
        ratio = found["p99.9"] / found["p50"]
        numbers = "".join(f"{found[what]:9.3f}" for what in QUANTILES)
        met = "met" if ratio < GOAL else "NOT met"
        say(f"  {capacity:8}  {len(spent):5}  {which:5}{numbers}  {ratio:5.2f}: goal {GOAL} {met}")
    waits = ", ".join(f"{capacity}: {spent / 1e3:.2f} s" for capacity, spent in sorted(seen.loading.items()))
    say(f"  loading (the first scan of a capacity, with the recording of its graph): {waits or 'none'}")
    ends = seen.memory.ends(seen.last)
    if ends:
        told = ", ".join(f"{what} {first:.2f} to {last:.2f} MiB" for what, (first, last) in ends.items())
        say(f"  device memory since scan {seen.last}, the last one to wait: {told}")


def _rows(setup: Setup, name: str, seen: Seen, fast: Captured) -> Iterator[Row]:
    """Latencies by capacity, waits of first scans, growth of memory, and scans that ran eagerly."""

    def made(case: str, metric: str, value: float, unit: str, clock: str, peer: Peer | None = None) -> Row:
        return setup.row(f"{name}/{case}", value, clock, peer or Peer("itself", value), metric, unit)

    for capacity, which, spent in _parts(seen):
        found = quantiles(spent)
        for what, value in found.items():
            goal = Peer("goal", GOAL * found["p50"], "goal") if what == "p99.9" else None
            yield made(f"{capacity}/{which}", what, value, "ms", "wall", goal)
        yield made(f"{capacity}/{which}", "scans", float(len(spent)), "scans", "count")
    for capacity, waited in sorted(seen.loading.items()):
        yield made(f"{capacity}/first", "loading", waited, "ms", "wall")
    for what, (first, last) in seen.memory.ends(seen.last).items():
        yield made("memory", f"growth, {what}", last - first, "MiB", "count", Peer("goal", 0.0, "goal"))
    # Scans that ran eagerly because their capacity was being captured are in `loading`.
    eagerly = sum(count for why, count in fast.fallbacks.items() if why != "capture")
    yield made("eagerly", "scans", float(eagerly), "scans", "count")
