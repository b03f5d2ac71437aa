"""Time of a network: kernel time on a GPU, wall-clock time on a CPU.

An eager network on a GPU is often host-bound, so wall-clock time does not distinguish kernels. The criterion is kernel
time from CUPTI (torch.profiler), with kernel maps rebuilt in each pass.

Layers of a group also run in isolation, to compile their kernels in parallel and to time tiles.
"""

from __future__ import annotations

import ast
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pumice import coords
from pumice.coords import KernelMap
from pumice.engine.groups import EpilogueSpec, LayerCall, recording_calls
from pumice.engine.subject import Loss, Scene, TuningSubject, fresh, subject, undisturbed
from pumice.engine.text import first_line
from pumice.errors import DeviceError, OptionError
from pumice.lower.dataflow import Pass
from pumice.lower.kernel import measured, tuning
from pumice.ops import conv_features
from pumice.ops.conv import Flow, merge_small_groups
from pumice.schedule.dataflow import DGRAD, FORWARD, PASSES, PLANNED, Dataflow

Call = Callable[[], object]
KERNELS, EVENTS, WALL = "kernels", "events", "wall"
"""Clocks: sum of kernel times; time between CUDA events around a pass, gaps included; wall-clock time."""
OTHER = "other"
_ATTEMPTS = 3  # Largest number of traces until one has recorded every pass


@dataclass(frozen=True)
class PassTiming:
    """Time of a pass per scene, in seconds: mean over scenes of the median over repeats.

    total: by `clock`. parts: breakdown of total by PARTS, if clock is "kernels". wall: wall-clock time between idle
    device states. note: remark on the clock.
    """

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    wall: float = 0.0
    clock: str = WALL
    note: str = ""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in self.parts.items())
        wall = f", {1e3 * self.wall:.3f} ms wall-clock" if self.clock != WALL else ""
        return f"{1e3 * self.total:.3f} ms ({self.clock}{': ' if parts else ''}{parts}{wall})"


class Event(NamedTuple):
    """Device activity: name, start and duration in nanoseconds."""

    name: str
    start: int
    duration: int


def measure(
    model: nn.Module, samples: Sequence[Scene], mode: str = "inference", *, repeats: int = 5, loss: Loss | None = None
) -> PassTiming:
    """Time the program of a network (pumice.compile) in inference, or a training step without the optimizer: of the
    modules, or of the program if `model` is one.

    samples: SparseTensors (or pairs of coordinates and features); each pass rebuilds its kernel maps. loss: scalar
    function of the model's result; default the mean of squares of every tensor in it. Autocast is the caller's.
    Parameters, gradients, buffers, modes and torch's random state are restored.

    Raises as pumice.tune.
    """
    if not isinstance(repeats, int) or repeats < 1:
        raise OptionError(f"repeats must be an integer of at least 1, found {repeats!r}")
    tuned_model = subject(model, samples, mode, loss)
    with undisturbed(tuned_model.model, tuned_model.training):
        return PassTimer(tuned_model.device, repeats).measure(tuned_model.calls())


@lru_cache(maxsize=4)
def kernels_in(file: str) -> tuple[str, ...]:
    """Names of the kernels in a file of pumice.coords, parsed from source, since importing it needs Triton."""
    tree = ast.parse((Path(coords.__file__).parent / f"{file}.py").read_text(encoding="utf-8"))
    jitted = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list)
    return tuple(node.name for node in jitted if not node.name.startswith("_"))


def _own(*files: str) -> str:
    # Some versions of Triton append the specialisation to the name.
    return rf"^({'|'.join(name for file in files for name in kernels_in(file))})(_\d.*)?$"


PARTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "map": lambda: _own("lookup_kernels", "chain_kernels"),
        "sort": lambda: _own("tile_kernels", "pair_kernels") + r"|[Rr]adix_?[Ss]ort|[Mm]ergeSort|bitonicSort",
        "conv": lambda: r"^_(dot|mul)_",
        "product": lambda: r"gemm|gemv|cutlass|cublas|nvjet|xmma|Cijk",
        "scatter": lambda: r"scatter|indexFunc|index_(add|put|copy)|EmbeddingBag",
        "gather": lambda: r"gather|index",
        "copy": lambda: r"^Mem(cpy|set)",
    }
)
"""Patterns of kernel names by part of a pass; the first match wins. map: building of levels and neighbour search; sort:
sorts and map layouts; conv: generated kernels; product: library matrix products; scatter, gather: rows moved by
lower.movement or torch; copy: memory copies and fills. Other kernels are "other"."""


@lru_cache(maxsize=4096)
def part_of(name: str) -> str:
    """Key of PARTS, or OTHER, of a kernel's name."""
    return next((part for part, pattern in _patterns().items() if pattern.search(name)), OTHER)


@lru_cache(maxsize=1)
def _patterns() -> Mapping[str, re.Pattern[str]]:
    return {part: re.compile(pattern()) for part, pattern in PARTS.items()}


_MARK = "spin_kernel"  # Kernel of torch.cuda._sleep, which marks the start of each pass


def passes(events: Iterable[Event], expected: int) -> Sequence[Mapping[str, float]]:
    """Seconds by part of each pass (see `segments`). Raises OptionError unless `expected` passes were recorded."""
    found = segments(events)
    if len(found) != expected or not all(found):
        raise OptionError(f"the profiler recorded {len([each for each in found if each])} passes, expected {expected}")
    return found


def segments(events: Iterable[Event]) -> list[dict[str, float]]:
    """Seconds by part between consecutive marks; overlapping time counts for the kernel that started first."""
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


def median_parts(found: Sequence[Mapping[str, float]], scenes: int) -> Mapping[str, float]:
    """Seconds by part per scene, of the repeat with the median total."""
    rounds = [found[at : at + scenes] for at in range(0, len(found), scenes)]
    rounds.sort(key=lambda each: sum(sum(parts.values()) for parts in each))
    chosen = rounds[(len(rounds) - 1) // 2]
    names = [name for name in (*PARTS, OTHER) if any(name in parts for parts in chosen)]
    return {name: sum(parts.get(name, 0.0) for parts in chosen) / scenes for name in names}


@dataclass
class PassTimer:
    """Measures passes on a device with one clock, chosen by the first measurement."""

    device: torch.device
    repeats: int = 3
    clock: str = ""
    note: str = ""

    def measure(self, calls: Sequence[Call]) -> PassTiming:
        """Time of the calls, one per scene, after a warm-up call each."""
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
            # The profiler is missing, in use or silent; an error of the calls recurs below.
            if self.clock:
                raise DeviceError(f"the profiler failed after earlier measurements: {first_line(problem)}") from problem
            self.note = f"the profiler is not available, timed by events ({first_line(problem)})"
        self.clock = EVENTS
        return self._by_events(calls)

    def _by_kernels(self, calls: Sequence[Call]) -> PassTiming:
        each, walls = by_part(list(calls) * self.repeats)
        parts = median_parts(each, len(calls))
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
    """Device time by part, and wall-clock time, of each warmed-up call, in seconds. Raises OptionError if the profiler
    did not record every call, and the profiler's own errors if it is unavailable."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            events, walls = profiled(calls)
            return passes(events, len(calls)), walls
        except Exception:
            # The first trace of a process may miss its first kernels.
            if not left:
                raise
    raise AssertionError("unreachable")


def profiled(calls: Sequence[Call]) -> tuple[list[Event], list[float]]:
    """Activity of the current device, with a mark before each call, and wall-clock seconds of each call."""
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
    """Recorded kernels and copies, without user annotations and synchronisation events."""
    cuda = torch.autograd.DeviceType.CUDA  # pyright: ignore[reportPrivateImportUsage]
    ran = (event for event in events if event.device_type() == cuda and not _is_named(event))
    found = [Event(event.name(), event.start_ns(), event.duration_ns()) for event in ran]
    return [event for event in found if not event.name.endswith((" Sync", "Wait Event"))]


def _is_named(event: Any) -> bool:
    """True if an event is a user annotation, not a kernel."""
    annotated = getattr(event, "is_user_annotation", None)
    return bool(annotated and annotated()) or event.name().startswith("ProfilerStep")


def _on_wall(calls: Sequence[Call], repeats: int) -> PassTiming:
    walls = []
    for call in list(calls) * repeats:
        begin = time.perf_counter()
        call()
        walls.append(time.perf_counter() - begin)
    took = _wall(walls, len(calls))
    return PassTiming(took, {}, took, WALL)


def _wall(spent: Sequence[float], scenes: int) -> float:
    """Mean over scenes of the median over repeats."""
    return fmean(median(spent[at::scenes]) for at in range(scenes))


# Layers in isolation
COMPILERS = 8  # Number of compiler threads


@dataclass(frozen=True, eq=False)
class IsolatedLayer:
    """A layer over its kernel map, with random features. weight: [C_out, K, C_in / groups], random, in the dtype of the
    multiplication. epilogue: fused, bias included."""

    found: KernelMap
    weight: Tensor
    groups: int
    epilogue: EpilogueSpec | None

    def random_operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random features x, the weight w, and random values y like the result."""
        inner, outer = self.weight.shape[-1] * self.groups, self.weight.shape[0]
        x = _random(self.weight.new_empty(self.found.num_inputs, inner))
        return x, self.weight, _random(self.weight.new_empty(self.found.num_outputs, outer))

    def run_pass(self, name: str, flow: Dataflow) -> None:
        """Run one pass without autograd. Raises PumiceError if it is unsupported."""
        x, w, y = self.random_operands()
        if name == FORWARD:
            conv_features(x, w, self.found, len(y), self.groups, self.epilogue and self.epilogue.like(y), flow)
            return
        w, groups = merge_small_groups(x, w, self.groups)
        Pass(name, flow, self.found, groups)((y, w) if name == DGRAD else (x, y))

    def run(self, flow: Flow, training: bool) -> None:
        """Run the layer as in a network, with both gradients if `training`."""
        x, w, y = self.random_operands()
        if not training:
            with torch.no_grad():
                conv_features(x, w, self.found, len(y), self.groups, self.epilogue and self.epilogue.like(y), flow)
            return
        with torch.enable_grad():
            x, w = x.requires_grad_(), w.clone().requires_grad_()
            result = conv_features(x, w, self.found, len(y), self.groups, None, flow)
            torch.autograd.grad(result, (x, w), y)


def isolated_layer(calls: Sequence[LayerCall], training: bool) -> list[IsolatedLayer]:
    """The distinct layers of these calls. Their maps are copies without cached layouts, so that layouts built for them
    are freed with them."""
    found: dict[object, IsolatedLayer] = {}
    copies: dict[int, KernelMap] = {}
    for call in calls:
        own = copies.setdefault(call.map_key, call.found.without_storages())
        over = own if own.flipped == call.found.flipped else own.transpose()
        weight, then = _weight(call), None if training else _epilogue_of(call)
        alike = (call.map_key, over.flipped, weight.shape, weight.dtype, call.layer.groups, then)
        if alike not in found:
            found[alike] = IsolatedLayer(over, weight, call.layer.groups, then)
    return list(found.values())


def _weight(call: LayerCall) -> Tensor:
    """Random weights of the layer's shape, in the dtype of the multiplication."""
    own = call.layer.weight
    shape = own.shape[0], call.found.volume, own.shape[-1]
    return _random(torch.empty(shape, dtype=call.compute_dtype, device=own.device))


def _epilogue_of(call: LayerCall) -> EpilogueSpec | None:
    """Fused epilogue of a layer, bias included."""
    if call.layer.bias is None:
        return call.epilogue
    y = torch.empty(0, call.layer.out_channels, dtype=call.compute_dtype)
    return EpilogueSpec.of((call.epilogue or EpilogueSpec()).like(y).with_bias(y.new_zeros(y.shape[1])))


def _random(x: Tensor) -> Tensor:
    # Zeros draw less power, which would make timings too short.
    return x.normal_() if x.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) else x.zero_()


def compile_in_parallel(
    layers: Sequence[IsolatedLayer],
    passes: Sequence[str],
    flows: Sequence[Dataflow],
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Compile the kernels of these dataflows in parallel; errors are ignored, since they recur when measured. No-op on
    a CPU, and for dataflows of library products. stop: called before each kernel; True stops."""
    flows = [flow for flow in flows if flow == PLANNED or flow.devices == ("cuda",)]
    if not layers or layers[0].weight.device.type != "cuda":
        return
    device = layers[0].weight.device
    stream = torch.cuda.current_stream(device)

    def one(task: tuple[Dataflow, IsolatedLayer, str]) -> None:
        flow, layer, name = task
        if stop():
            return
        # Streams and modes are thread-local. An error here recurs when the layer is measured.
        with torch.no_grad(), torch.cuda.stream(stream), suppress(Exception):
            layer.run_pass(name, flow)

    pool = ThreadPoolExecutor(COMPILERS)
    try:
        list(pool.map(one, product(flows, layers, passes)))
    finally:
        # After an interrupt, do not wait for pending tasks.
        pool.shutdown(cancel_futures=True)
    torch.cuda.synchronize(device)


def compile_first(tuned_model: TuningSubject) -> None:
    """Compile a network's kernels for the default dataflow in parallel; the first pass would compile them one by one.
    Layers are found by a pass without arithmetic. No-op on a CPU, or if that pass fails."""
    if tuned_model.device.type != "cuda":
        return
    with suppress(Exception):
        x = fresh(tuned_model.scenes[0])
        with torch.no_grad(), recording_calls(tuned_model.model, x, arithmetic=False) as calls:
            tuned_model.model(x)
        compile_in_parallel(
            isolated_layer(calls, tuned_model.training), PASSES if tuned_model.training else PASSES[:1], [PLANNED]
        )


def time_tiles(layer: IsolatedLayer, flow: Flow, training: bool) -> None:
    """Time the tiles of a layer's kernels that were not timed before; the tile cache keeps the fastest."""
    with tuning():
        layer.run(flow, training)


def latency(call: Call, device: torch.device, best: float = math.inf) -> float:
    """Median seconds of a call after a warm-up: of its kernels on a GPU, with a cold cache and launches hidden; by the
    wall clock on a CPU. One far slower than `best` may be timed less often."""
    call()
    if device.type == "cuda":
        with torch.cuda.device(device):
            return measured(call, best, _LATENCY_RUNS)
    first = _on_wall([call], 1).total
    return first if first > 3 * best else _on_wall([call], _LATENCY_RUNS).total


_LATENCY_RUNS = 5
