"""The study `filters` of the suite `ucf`: pruned convolutions on one CPU thread, against oneDNN's dense ones.

The layers and the patterns are those of ResNet-50 in PUMICE_DATA/pruned_resnet50_ucf, each distinct layer once, with
one image, in float32. "oneDNN" is the fastest of three forms for each layer: NCHW, channels last, and blocked with
prepacked weights.
Packing and unpacking are in our time. The clock `cpu` is the time of the calling thread, so that other processes
disturb little; calls are timed in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import mkldnn

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from pumice.env import settings
from pumice.nn import PrunedConv2d

LEVELS = {"0.8": 3.0, "0.91": 4.5, "0.96": 6.5, "0.98": 8.0}
"""Share of zeros, and the goal for the geometric mean of times as fast as oneDNN."""
_TOLERANCE = 1e-5
_RUNS = 25


class Filter(NamedTuple):
    """A layer: size of its input, and its dense form with the pattern's zeros."""

    name: str
    size: int
    conv: nn.Conv2d


def filters(setup: Setup) -> Iterator[Row]:
    """Every layer at every level, and the geometric mean of a level."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for level, goal in LEVELS.items():
            ratios = []
            for one in _layers(setup, level):
                rows = [*_row(setup, level, one)] if setup.wants(f"filters/{level}/{one.name}") else []
                ratios += [row.peer_value / row.value for row in rows]
                yield from rows
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                setup.say(f"{level}: {mean:.2f} times as fast as oneDNN, worst {min(ratios):.2f}, {len(ratios)} layers")
                yield setup.row(f"filters/{level}", mean, "cpu", Peer("goal", goal, "goal"), "over oneDNN", "times")
    finally:
        torch.set_num_threads(threads)


def _layers(setup: Setup, level: str) -> Iterator[Filter]:
    folder = settings().data
    if setup.quick:
        yield Filter("random", 12, _conv(np.random.default_rng(0).random((16, 8, 3, 3)) < 0.2, (1, 1)))
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
        yield Filter(kind, height, _conv(mask, (stride, padding)))


def _conv(mask: np.ndarray, form: tuple[int, int]) -> nn.Conv2d:
    """A dense layer with random weights where the mask is set. form: (stride, padding)."""
    outputs, channels, *kernel = mask.shape
    conv = nn.Conv2d(channels, outputs, (kernel[0], kernel[1]), form[0], form[1], bias=False).eval()
    with torch.no_grad():
        conv.weight.copy_(torch.randn(conv.weight.shape, generator=torch.Generator().manual_seed(0)))
        conv.weight.mul_(torch.from_numpy(mask))
    return conv.requires_grad_(False)


@torch.no_grad()
def _row(setup: Setup, level: str, one: Filter) -> Iterator[Row]:
    case = f"filters/{level}/{one.name}"
    x = setup.random(1, one.conv.in_channels, one.size, one.size)
    layer = PrunedConv2d.from_dense(one.conv)
    wanted = one.conv.double()(x.double())
    one.conv.float()
    wrong = float((layer(x).double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    if wrong > _TOLERANCE:
        setup.failed(f"{case}: error {wrong:.1e}")
        return
    ours, *dense = in_turn([lambda: layer(x), *_dense(one.conv, x)], 3 if setup.quick else _RUNS)
    peer = Peer("oneDNN", min(times.p20 for times in dense))
    setup.say(f"{case}: {ours.p20:.3f} ms, oneDNN {peer.value:.3f}: {peer.value / ours.p20:.2f} times as fast")
    # The 20 % quantile is the value: what is above it is mostly other processes.
    yield setup.row(case, Times(ours.p20, ours.p20, ours.p80), "cpu", peer, dtype=torch.float32)


def _dense(conv: nn.Conv2d, x: Tensor) -> Sequence[Callable[[], object]]:
    """oneDNN's convolution of NCHW, of channels last, and of blocked operands."""
    last, blocked = x.to(memory_format=torch.channels_last), x.to_mkldnn()
    weight = conv.weight.to(memory_format=torch.channels_last)
    packed = mkldnn.to_mkldnn(conv)
    stride, padding = conv.stride[0], int(conv.padding[0])
    return (
        lambda: nn.functional.conv2d(x, conv.weight, None, stride, padding),
        lambda: nn.functional.conv2d(last, weight, None, stride, padding),
        lambda: packed(blocked),
    )


def in_turn(calls: Sequence[Callable[[], object]], runs: int) -> list[Times]:
    """Milliseconds of the thread for each call, timed in turn after two runs of each."""
    spent: list[list[float]] = [[] for _ in calls]
    for run in range(runs + 2):
        for call, times in zip(calls, spent, strict=True):
            begin = time.thread_time()
            call()
            if run > 1:
                times.append(1e3 * (time.thread_time() - begin))
    return [Times.of(times) for times in spent]
