"""The study `estimates` of the suite `workloads`: pm.estimate against measured memory and time, compiled networks.

memory  on a GPU torch.cuda.max_memory_allocated() of a pass whose kernels are compiled, without the workspaces of
        torch's libraries; on a CPU the allocations of a pass as torch's profiler tells them; parameters, scene and
        kernel maps included
time    pumice.engine.measure on a GPU: kernel time; on a CPU that of one thread

Rows have the estimate as value and the measurement as peer; the goals are 15 % of memory and 25 % of time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pumice as pm
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import DTYPES, Setup
from benchmarks.harness.timing import cpu_clock, on_cpu, on_threads
from benchmarks.scenes.workloads import WORKLOADS, Sample, Workload, fresh, narrow, samples, stand_in
from pumice.engine import measure
from pumice.engine.estimate import PassEstimate
from pumice.engine.subject import sum_of_squares_loss
from pumice.errors import OptionError
from pumice.runtime.compile import BACKGROUND
from pumice.runtime.workspace import release_workspaces

TINY = 150  # maximum voxels of a scan in a quick run
GOALS = {"memory": 0.15, "time": 0.25}
_SETTLING = 3
"""Passes until kernels for the sizes of a scene are compiled; until then those for other sizes stand in."""


@dataclass(frozen=True)
class Mode:
    """A pass in a dtype. Half precision is mixed in training."""

    dtype: torch.dtype
    training: bool

    @property
    def kept(self) -> torch.dtype:
        """The dtype of weights and features."""
        return torch.float32 if self.training else self.dtype

    @property
    def name(self) -> str:
        return f"{DTYPES[self.dtype]}/{'training' if self.training else 'inference'}"


def estimates(setup: Setup) -> Iterator[Row]:
    """Estimated against measured memory and time of the seven networks."""
    dtypes = (torch.float16, torch.float32) if setup.device.type == "cuda" else (torch.float32,)
    for workload in WORKLOADS.values():
        for mode in (Mode(dtype, training) for dtype in dtypes for training in (False, True)):
            case = f"{'tiny/' * setup.quick}estimates/{workload.name}/{mode.name}"
            if setup.wants(case):
                with on_threads(1) if setup.device.type == "cpu" else nullcontext():
                    yield from _case(setup, case, workload, mode)


def _case(setup: Setup, case: str, workload: Workload, mode: Mode) -> Iterator[Row]:
    # Programs, which refer to themselves, are freed by the garbage collector; what is freed later would count.
    gc.collect()
    begin = _held_before(setup.device) if setup.device.type == "cuda" else 0
    try:
        workload, sample = _sample(setup, workload, mode)
    except OptionError as reason:
        setup.say(f"{case} is left out: {reason}")
        return
    net = (narrow(workload) if setup.quick else workload).model().to(setup.device, mode.kept).train(mode.training)
    mixed = mode.training and mode.dtype != torch.float32
    with torch.autocast("cuda", mode.dtype) if mixed else nullcontext():
        found = pm.estimate(net, fresh(sample))
        told = found.training if mode.training else found.inference
        assert told is not None
        if setup.device.type == "cuda":
            memory = _on_gpu(net, sample, mode, begin)
            # Of a network in training `measure` would time the modules.
            timing = measure(pm.compile(net), [fresh(sample)], "training" if mode.training else "inference")
            setup.say(f"{case}: {timing}")
            spent = timing.total
        else:
            memory = _on_cpu(net, sample, mode)
            spent = 1e-3 * on_cpu([_pass(pm.compile(net), sample, mode)], 3, warm=1)[0].p20
    setup.say(f"{case}: {len(sample)} voxels{', unknown: ' + found.unknown[0] if found.unknown else ''}")
    yield from _rows(setup, case, mode, told, (memory, spent))


def _sample(setup: Setup, workload: Workload, mode: Mode) -> tuple[Workload, Sample]:
    """The first scan, in a quick run a small one. On a CPU, setup.count limits its thousands of voxels."""
    most = TINY if setup.quick else 1000 * setup.count
    try:
        return workload, samples(workload, setup.device, mode.kept, count=1, most=most)[0]
    except OptionError:
        if not setup.quick:
            raise
        other = stand_in(workload)
        return other, samples(other, setup.device, mode.kept, count=1, most=most)[0]


def _rows(setup: Setup, case: str, mode: Mode, told: PassEstimate, measured: tuple[float, float]) -> Iterator[Row]:
    values = ("memory", "MiB", 2.0**-20, told.memory, measured[0]), ("time", "ms", 1e3, told.time, measured[1])
    for what, unit, scale, estimated, real in values:
        ratio = estimated / real
        mark = "" if abs(ratio - 1) <= GOALS[what] else f", beyond {GOALS[what]:.0%}"
        setup.say(f"{case} {what}: {scale * estimated:.4g} {unit} of {scale * real:.4g}, ratio {ratio:.2f}{mark}")
        peer, clock = Peer("measured", scale * real), _clock(setup) if what == "time" else ""
        yield setup.row(case, scale * estimated, clock, peer, f"estimated {what}", unit, mode.dtype)


def _clock(setup: Setup) -> str:
    return setup.clock if setup.device.type == "cuda" else cpu_clock()


def _pass(program: nn.Module, sample: Sample, mode: Mode) -> Callable[[], object]:
    """A pass; the scene lives until it ends."""

    def run() -> Any:
        x = fresh(sample)
        if not mode.training:
            with torch.no_grad():
                return program(x)
        for p in program.parameters():
            p.grad = None
        return sum_of_squares_loss(program(x)).backward()

    return run


def _held_before(device: torch.device) -> int:
    """Bytes that are allocated before a case, without kernels' workspaces, with those of torch's libraries: they are
    kept for each thread."""
    release_workspaces()
    for dtype in (torch.float16, torch.float32):
        x = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
        (x @ x).sum().backward()
    del x
    return torch.cuda.memory_allocated()


def _on_gpu(net: nn.Module, sample: Sample, mode: Mode, begin: int) -> float:
    """Peak bytes of a pass, beyond `begin`."""
    run = _pass(pm.compile(net), sample, mode)
    for _ in range(_SETTLING):
        run()
    for p in net.parameters():
        p.grad = None
    # Kernels that are compiled in the background hold tensors.
    while BACKGROUND.left:
        time.sleep(0.1)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    run()
    peak = torch.cuda.max_memory_allocated() - begin
    for p in net.parameters():
        p.grad = None
    return float(peak)


def _on_cpu(net: nn.Module, sample: Sample, mode: Mode) -> float:
    """Peak bytes of the first pass, which packs weights, with those of parameters and scene."""
    given = [*net.parameters(), *net.buffers(), sample.feats, sample.coords]
    run = _pass(pm.compile(net), sample, mode)
    # What is freed meanwhile must not count.
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as listening:
        run()
    kineto: Any = listening.profiler
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return float(peak + sum(t.nbytes for t in given))
