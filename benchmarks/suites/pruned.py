"""The study `filters` of the suite `ucf`: convolutions with pruned filters, on one CPU thread against oneDNN's dense
convolutions, on a GPU against cuDNN's.

The layers and the patterns are those of ResNet-50 in PUMICE_DATA/pruned_resnet50_ucf, each distinct layer once, with
one image. "oneDNN" is the fastest of three forms for each layer: NCHW, channels last, and blocked with prepacked
weights; "cuDNN" the faster of NCHW and channels last, with its own choice of algorithms by measurement.
On a CPU the dtype is float32, packing and unpacking are in our time, and the clock `cpu` is the time of the calling
thread, so that other processes disturb little. On a GPU the dtypes are float32 without TF32 on both sides and float16
(cuDNN on tensor cores), and a time is that of 20 calls in a CUDA graph, by 20. Calls are timed in turn.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import mkldnn

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times, captured, on_cpu, on_threads, together
from pumice.env import settings
from pumice.nn import PrunedConv2d

LEVELS = {"0.8": (3.0, 1.5), "0.91": (4.5, 2.5), "0.96": (6.5, 3.5), "0.98": (8.0, 4.5)}
"""Share of zeros, and the goals for the geometric mean of times as fast as oneDNN and cuDNN in float32."""
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
_RUNS = 25
_CALLS = 20  # In a CUDA graph


class Filter(NamedTuple):
    """A layer: size of its input, and its dense form with the pattern's zeros."""

    name: str
    size: int
    conv: nn.Conv2d


def filters(setup: Setup) -> Iterator[Row]:
    """Every layer at every level, and the geometric mean of a level."""
    with on_threads(1), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        for dtype in (torch.float32, torch.float16)[: 2 if setup.device.type == "cuda" else 1]:
            for level in LEVELS:
                yield from _level(setup, level, dtype)


def _level(setup: Setup, level: str, dtype: torch.dtype) -> Iterator[Row]:
    ratios = []
    cuda = setup.device.type == "cuda"
    for one in layers(setup, level):
        rows = [*_row(setup, level, one, dtype)] if setup.wants(f"filters/{level}/{one.name}") else []
        ratios += [row.peer_value / row.value for row in rows]
        yield from rows
    if ratios:
        mean, peer = math.exp(sum(map(math.log, ratios)) / len(ratios)), "cuDNN" if cuda else "oneDNN"
        found = f"{level}, {dtype}: {mean:.2f} times as fast as {peer}, worst {min(ratios):.2f}, {len(ratios)} layers"
        setup.say(found)
        # Dense float16 layers run on tensor cores: there is no goal.
        goal = Peer("goal", LEVELS[level][cuda], "goal") if dtype == torch.float32 else Peer(peer, 1.0)
        clock = "gpu" if cuda else "cpu"
        yield setup.row(f"filters/{level}", mean, clock, goal, f"over {peer}", "times", dtype)


def layers(setup: Setup, level: str) -> Iterator[Filter]:
    """The distinct layers with their patterns at a level, in the order of the network."""
    folder = settings().data
    if setup.quick:
        yield Filter("random", 12, conv_of(np.random.default_rng(0).random((16, 8, 3, 3)) < 0.2, (1, 1)))
        return
    if folder is None:
        setup.say("PUMICE_DATA is not set: there are no patterns")
        return
    found = np.load(folder / "pruned_resnet50_ucf" / f"resnet50_{level}_masks.npz")
    seen: set[tuple[str, ...]] = set()
    for name, _, *shape in found["conv_cfg"].tolist():
        if tuple(shape) in seen:
            continue
        seen.add(tuple(shape))
        height, _, rows, columns, stride, padding, channels, outputs = map(int, shape)
        mask = np.unpackbits(found[name], axis=1)[:, : channels * rows * columns]
        mask = mask.reshape(outputs, channels, rows, columns).astype(bool)
        kind = f"{height}x{height}/k{rows}s{stride}/{channels}to{outputs}"
        yield Filter(kind, height, conv_of(mask, (stride, padding)))


def conv_of(mask: np.ndarray, form: tuple[int, int]) -> nn.Conv2d:
    """A dense layer with random weights where the mask is set. form: (stride, padding)."""
    outputs, channels, *kernel = mask.shape
    conv = nn.Conv2d(channels, outputs, (kernel[0], kernel[1]), form[0], form[1], bias=False).eval()
    with torch.no_grad():
        conv.weight.copy_(torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(0)))
        conv.weight.mul_(torch.from_numpy(mask))
    return conv.requires_grad_(False)


@torch.no_grad()
def _row(setup: Setup, level: str, one: Filter, dtype: torch.dtype) -> Iterator[Row]:
    case, device = f"filters/{level}/{one.name}", setup.device
    x = setup.random(1, one.conv.in_channels, one.size, one.size).to(dtype)
    conv = one.conv.to(device, dtype)
    layer = PrunedConv2d.from_dense(conv)
    wanted = copy.deepcopy(conv).double()(x.double())
    wrong = float((layer(x).double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if wrong > _TOLERANCE[dtype]:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    if device.type == "cuda":
        clock, peer, found = "gpu", "cuDNN", _in_graphs(setup, [lambda: layer(x), *dense_ways(conv, x)])
    else:
        clock, peer = "cpu", "oneDNN"
        found = on_cpu([lambda: layer(x), *dense_ways(conv, x)], 3 if setup.quick else _RUNS)
    ours, dense = found[0], Peer(peer, min(times.p20 for times in found[1:]))
    setup.say(f"{case}: {ours.p20:.4f} ms, {peer} {dense.value:.4f}: {dense.value / ours.p20:.2f} times as fast")
    # The 20 % quantile is the value: what is above it is mostly other processes.
    yield setup.row(case, Times(ours.p20, ours.p20, ours.p80), clock, dense, dtype=dtype)


def _in_graphs(setup: Setup, calls: Sequence[Callable[[], object]]) -> list[Times]:
    """Milliseconds on the device for each call, among _CALLS of it in a CUDA graph."""
    graphs = [captured(lambda call=call: [call() for _ in range(_CALLS)], setup.device) for call in calls]
    found = together(graphs, setup.device, "gpu", setup.seconds / 4, cold=False)
    return [Times(*(t / _CALLS for t in (times.median, times.p20, times.p80))) for times in found]


def dense_ways(conv: nn.Conv2d, x: Tensor) -> Sequence[Callable[[], object]]:
    """Dense convolutions of NCHW, of channels last and, on a CPU, of blocked operands."""
    last = x.to(memory_format=torch.channels_last)
    weight = conv.weight.to(memory_format=torch.channels_last)
    stride, padding = conv.stride[0], int(conv.padding[0])
    plain = (
        lambda: nn.functional.conv2d(x, conv.weight, None, stride, padding),
        lambda: nn.functional.conv2d(last, weight, None, stride, padding),
    )
    if x.is_cuda:
        return plain
    blocked, packed = x.to_mkldnn(), mkldnn.to_mkldnn(conv)
    return (*plain, lambda: packed(blocked))
