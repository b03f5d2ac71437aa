"""The studies `filters` and `blocks` of the suite `ucf`: convolutions with pruned filters, on one CPU thread against
oneDNN's dense convolutions, on a GPU against cuDNN's.

The layers and the patterns are those of ResNet-50 in PUMICE_DATA/pruned_resnet50_ucf, each distinct layer once, with
one image. "oneDNN" is the fastest of three forms for each layer: NCHW, channels last, and blocked with prepacked
weights; "cuDNN" the faster of NCHW and channels last, with its own choice of algorithms by measurement.
On a CPU the dtype is float32, packing and unpacking are in our time, and the clock `cpu` is the time of the calling
thread, so that other processes disturb little. On a GPU the dtypes are float32 without TF32 on both sides and float16
(cuDNN on tensor cores), and a time is that of 20 calls in a CUDA graph, by 20. Calls are timed in turn.

`blocks` has the same layers but the first, with random blocks of 32 x 32 or 16 x 16 outputs and channels at each tap
instead of the patterns; on a GPU in float16 and in TF32, on tensor cores on both sides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
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
SIDES = (32, 16)
GOALS: Mapping[tuple[str, int, str], float] = {("0.8", 32, "fp16"): 1.5}
"""Of the mean of a level, of a side of blocks in a precision."""


class Precision(NamedTuple):
    """dtype: of values; tf32: products of float32 may be rounded to it on both sides."""

    name: str
    dtype: torch.dtype
    tolerance: float
    tf32: bool = False


FP32, FP16 = Precision("fp32", torch.float32, 1e-5), Precision("fp16", torch.float16, 2e-3)
TF32 = Precision("tf32", torch.float32, 2e-3, True)
_RUNS = 25
_CALLS = 20  # In a CUDA graph


class Filter(NamedTuple):
    """A layer: size of its input, and its dense form with the pattern's zeros."""

    name: str
    size: int
    conv: nn.Conv2d


def filters(setup: Setup) -> Iterator[Row]:
    """Every layer at every level, and the geometric mean of a level."""
    cuda = setup.device.type == "cuda"
    for precision in (FP32, FP16)[: 1 + cuda]:
        for level in LEVELS:
            # Dense float16 layers run on tensor cores: there is no goal.
            goal = LEVELS[level][cuda] if precision == FP32 else None
            yield from _study(setup, f"filters/{level}", layers(setup, level), precision, goal)


def blocks(setup: Setup) -> Iterator[Row]:
    """Every layer with blocks of each size at every level, and the geometric mean of a level."""
    for precision in (FP16, TF32) if setup.device.type == "cuda" else (FP32,):
        for side, level in product(SIDES, LEVELS):
            goal = GOALS.get((level, side, precision.name))
            found = (_blocked(one, side, float(level)) for one in layers(setup, level))
            yield from _study(setup, f"blocks/{level}/{side}", (x for x in found if x), precision, goal)


def _blocked(one: Filter, side: int, zeros: float) -> Filter | None:
    """The layer with random blocks; None if they do not divide its channels."""
    conv = one.conv
    blocks = conv.out_channels // side, conv.in_channels // side, *conv.kernel_size
    if conv.out_channels % side or conv.in_channels % side:
        return None
    kept, count = np.zeros(math.prod(blocks), bool), math.prod(blocks)
    kept[np.random.default_rng(0).permutation(count)[: max(1, round((1 - zeros) * count))]] = True
    mask = kept.reshape(blocks).repeat(side, 0).repeat(side, 1)
    return one._replace(conv=conv_of(mask, (conv.stride[0], int(conv.padding[0]))))


def _study(setup: Setup, case: str, some: Iterable[Filter], precision: Precision, goal: float | None) -> Iterator[Row]:
    ratios = []
    cuda, name = setup.device.type == "cuda", precision.name
    with _settings(precision):
        for one in some:
            rows = [*_row(setup, f"{case}/{one.name}", one, precision)] if setup.wants(f"{case}/{one.name}") else []
            ratios += [row.peer_value / row.value for row in rows]
            yield from rows
    if ratios:
        mean, peer = math.exp(sum(map(math.log, ratios)) / len(ratios)), "cuDNN" if cuda else "oneDNN"
        found = f"{case}, {name}: {mean:.2f} times as fast as {peer}, worst {min(ratios):.2f}, {len(ratios)} layers"
        setup.say(found)
        against = Peer(peer, 1.0) if goal is None else Peer("goal", goal, "goal")
        yield setup.row(case, mean, "gpu" if cuda else "cpu", against, f"over {peer}", "times", name)


@contextmanager
def _settings(precision: Precision) -> Iterator[None]:
    """One thread, and the precision of float32 products in cuDNN and in our kernels."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision.tf32 else before)
    try:
        with on_threads(1), torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=precision.tf32):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def layers(setup: Setup, level: str) -> Iterator[Filter]:
    """The distinct layers with their patterns at a level, in the order of the network."""
    folder = settings().data
    if setup.quick:
        yield Filter("random", 12, conv_of(np.random.default_rng(0).random((32, 32, 3, 3)) < 0.2, (1, 1)))
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
def _row(setup: Setup, case: str, one: Filter, precision: Precision) -> Iterator[Row]:
    device, dtype = setup.device, precision.dtype
    x = setup.random(1, one.conv.in_channels, one.size, one.size).to(dtype)
    conv = one.conv.to(device, dtype)
    layer = PrunedConv2d.from_dense(conv)
    # Layers in blocks take images as they give them: channels last.
    given = x if layer.blocks is None else x.to(memory_format=torch.channels_last)
    wanted = copy.deepcopy(conv).double()(x.double())
    wrong = float((layer(given).double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if wrong > precision.tolerance:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    if device.type == "cuda":
        clock, peer, found = "gpu", "cuDNN", _in_graphs(setup, [lambda: layer(given), *dense_ways(conv, x)])
    else:
        clock, peer = "cpu", "oneDNN"
        found = on_cpu([lambda: layer(x), *dense_ways(conv, x)], 3 if setup.quick else _RUNS)
    ours, dense = found[0], Peer(peer, min(times.p20 for times in found[1:]))
    setup.say(f"{case}: {ours.p20:.4f} ms, {peer} {dense.value:.4f}: {dense.value / ours.p20:.2f} times as fast")
    # The 20 % quantile is the value: what is above it is mostly other processes.
    yield setup.row(case, Times(ours.p20, ours.p20, ours.p80), clock, dense, dtype=precision.name)


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
