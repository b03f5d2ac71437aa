"""The studies `host` and `first-call` of the suite `conv-forward`: host time of a call, and of the first one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, ready
from benchmarks.harness.timing import Times, synchronize, together
from benchmarks.scenes.clouds import surface
from benchmarks.scenes.layers import FORWARD, TRAINING, Cell, Pass, Trained, Width, layer_of, map_of
from benchmarks.suites.first_call import probed
from pumice import nn
from pumice.errors import PumiceError
from pumice.ops import SparseTensor, conv_features

VOXELS, CHANNELS = 300, 16
"""A layer so small that the host takes longer than a GPU."""
_RUNS = 7
STATES: Mapping[str, Peer] = {"cold": Peer("goal", 20.0, "goal"), "warm": Peer("goal", 2.0, "goal")}
"""Goals for the first call, in seconds: with empty caches, and in a new process with filled ones."""


def host(setup: Setup) -> Iterator[Row]:
    """Host microseconds per eager call of a tiny layer, over many calls queued without waits."""
    coords = surface(VOXELS, setup.device)
    cell = Cell("host", "surface", Width.square(CHANNELS), map_of(coords.coords), coords)
    layer = layer_of(setup, cell)
    for name, (make, passed, goal) in CALLS.items():
        case = f"host/{name}"
        if not setup.wants(case):
            continue
        way = Way(name, lambda make=make: make(layer))
        done = ready(setup, Case(case, setup.half, passed.exact(layer)), way, ours=True)
        if done is None:
            continue
        times = queued(done.call, setup.device, 50 if setup.quick else 2000)
        told = f"{case}: {times.median:.2f} us of the host ({times.p20:.2f}, {times.p80:.2f}), goal {goal:g}"
        setup.say(told + _on_device(setup, done.call))
        yield setup.row(case, times, "wall", Peer("goal", goal, "goal"), "host", "us")


def queued(call: Callable[[], Any], device: torch.device, count: int) -> Times:
    """Microseconds per call, over `count` calls in a row without waits."""
    spent = []
    for _ in range(_RUNS):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        spent.append(1e6 * (time.perf_counter() - begin) / count)
    synchronize(device)
    return Times.of(spent)


def _on_device(setup: Setup, call: Callable[[], Any]) -> str:
    """Device time per call as text: while it is lower than host time, the host's was measured."""
    if setup.device.type != "cuda":
        return "; on a CPU the arithmetic is in it"
    (times,) = together([call], setup.device, "gpu", setup.seconds, cold=False)
    return f"; the device needs {1e3 * times.median:.2f} us"


def _function(layer: Trained) -> Callable[[], Tensor]:
    return torch.no_grad()(lambda: conv_features(layer.feats, layer.weight, layer.found, layer.rows))


def _function_and_gradients(layer: Trained) -> Callable[[], tuple[Tensor, ...]]:
    feats, weight = (x.detach().requires_grad_() for x in (layer.feats, layer.weight))

    def call() -> tuple[Tensor, ...]:
        y = conv_features(feats, weight, layer.found, layer.rows)
        return y.detach(), *torch.autograd.grad(y, (feats, weight), layer.grad)

    return call


def _module(layer: Trained) -> tuple[nn.Conv3d, SparseTensor]:
    """The layer as a module, and its input."""
    module = nn.Conv3d(CHANNELS, CHANNELS, 3, bias=False).to(layer.feats.device, layer.feats.dtype)
    with torch.no_grad():
        module.weight.copy_(layer.weight.view_as(module.weight))
    return module, SparseTensor(layer.feats, layer.coords)


def _layer(layer: Trained) -> Callable[[], Tensor]:
    module, x = _module(layer)
    return torch.no_grad()(lambda: module(x).feats)


def _layer_and_gradients(layer: Trained) -> Callable[[], tuple[Tensor, ...]]:
    module, x = _module(layer)
    x = x.detach().requires_grad_()

    def call() -> tuple[Tensor, ...]:
        y = module(x).feats
        dx, dw = torch.autograd.grad(y, (x.feats, module.weight), layer.grad)
        return y.detach(), dx, dw.view_as(layer.weight)

    return call


CALLS: Mapping[str, tuple[Callable[[Trained], Callable[[], Any]], Pass, float]] = {
    "function": (_function, FORWARD, 15.0),
    "layer": (_layer, FORWARD, 15.0),
    "function+backward": (_function_and_gradients, TRAINING, 70.0),
    "layer+backward": (_layer_and_gradients, TRAINING, 70.0),
}
"""By name: the function that makes the call, the pass it computes, and the goal in microseconds."""


def first_call(setup: Setup) -> Iterator[Row]:
    """Seconds of a network's first call (42 convolutions on a scan, maps included), each in a new process."""
    with tempfile.TemporaryDirectory(prefix="pumice-bench-") as folder:
        for state, goal in STATES.items():
            try:
                size = "quick" if setup.quick else "full"
                first, later = probed((str(setup.device), size, "network"), Path(folder))["network"]
            except PumiceError as reason:
                setup.failed(f"first-call/{state}: {reason}")
                return
            setup.say(f"first-call/{state}: {1e-3 * first:.3g} s, goal {goal.value:g}; a later call {later:.4g} ms")
            yield setup.row(f"first-call/MinkUNet/{state}", 1e-3 * first, "wall", goal, "first call", "s")
