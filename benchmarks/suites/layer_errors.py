"""The study `errors` of the suite `conv-forward`: errors beside a dense convolution's, and whether runs repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness.rows import Peer, Row, Subject, row
from benchmarks.harness.study import DTYPES, TOLERANCE, Setup, error
from benchmarks.harness.timing import Times
from benchmarks.scenes.clouds import Voxels, shell
from benchmarks.scenes.layers import Cell, Choice, Trained, Width, both, cells, exact_both, layer_of, map_of
from benchmarks.suites.layer_precisions import Kind

PARTS = ("y", "dx", "dw")
NOISE = 1.1
"""How many times the dense convolution's error is no worse than it: another order of a sum is as good."""


KINDS = (
    Kind("fp16", torch.float16),
    Kind("bf16", torch.bfloat16),
    Kind("tf32", torch.float32, "tf32", 20),
    Kind("fp32", torch.float32, "ieee"),
)
"""precision: what torch is told."""


def errors(setup: Setup) -> Iterator[Row]:
    """Relative errors of a result and of its gradients against float64, ours and torch's; and what differs when
    computed twice with deterministic algorithms."""
    kinds = [kind for kind in KINDS if setup.device.type == "cuda" or kind.name == "fp32"]
    if len(kinds) < len(KINDS):
        setup.say(
            f"fp16, bf16 and tf32 are left out: a dense convolution has them on a GPU, not on {setup.device.type}"
        )
    side, coords = _box(setup)
    found = map_of(coords.coords)
    worse: list[str] = []
    for width in (8,) if setup.quick else (64, 128):
        for kind in kinds:
            case = f"errors/box_{side}/k3/C{width}/{kind.name}"
            if setup.wants(case):
                layer = layer_of(setup, Cell(case, "box", Width.square(width), found, coords), kind.dtype)
                yield from _beside(setup, (case, kind, side), layer, worse)
    setup.say(f"errors above {NOISE:g} times those of the dense convolution: {', '.join(worse) or 'none'}")
    yield from _repeated(setup)


def _box(setup: Setup) -> tuple[int, Voxels]:
    """The side of a box, and the voxels of a shell in it."""
    side, size = (8, 16) if setup.quick else (64, 128)
    cells_ = shell(size)
    cells_ = cells_[(cells_ < side).all(1)]
    coords = np.concatenate([np.zeros((len(cells_), 1), np.int32), cells_], axis=1)
    return side, Voxels.of(torch.from_numpy(coords).to(setup.device))


def _beside(setup: Setup, about: tuple[str, Kind, int], layer: Trained, worse: list[str]) -> Iterator[Row]:
    """The errors of a layer beside those of the dense convolution; parts that are worse are added."""
    case, kind, side = about
    truth, peer = exact_both(layer), "cuDNN" if setup.device.type == "cuda" else "torch"
    with multiplying(kind.precision) if kind.precision else nullcontext():
        own, dense = _errors(both(layer), truth), _errors(_dense(layer, side), truth)
    told = ", ".join(f"{part} {own[part]:.2e} ({peer} {dense[part]:.2e})" for part in PARTS)
    bound = kind.slack * TOLERANCE[kind.dtype]
    if not max(own.values()) < bound:
        setup.failed(f"{case}: {told}; expected below {bound:g}")
        return
    setup.say(f"{case}: {told}")
    for part in PARTS:
        if not own[part] <= NOISE * dense[part]:
            worse.append(f"{case}/{part}")
        subject = Subject(setup.suite, f"{case}/{part}", DTYPES[kind.dtype], setup.device, (), "error", "relative")
        yield row(subject, Times(own[part], own[part], own[part]), "count", Peer(peer, dense[part]))


def _errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> Mapping[str, float]:
    return {part: error(mine, right) for part, mine, right in zip(PARTS, found, truth, strict=True)}


def _dense(layer: Trained, side: int) -> tuple[Tensor, ...]:
    """The layer by torch's convolution of the whole box: its result and gradients where voxels are."""
    width = layer.feats.shape[1]
    x, weight = (t.detach().requires_grad_() for t in (layer.feats, layer.weight))
    at = _places(layer.coords, width)
    grid = torch.zeros(1, width, side, side, side, dtype=x.dtype, device=x.device).index_put(at, x)
    kernel = weight.view(width, 3, 3, 3, width).permute(0, 4, 1, 2, 3)
    y = functional.conv3d(grid, kernel, padding=1)[at]
    return y.detach(), *torch.autograd.grad(y, (x, weight), layer.grad)


def _places(coords: Tensor, width: int) -> tuple[Tensor, ...]:
    """Where the channels of voxels are in a dense batch [B, C, ...]: indices [N, C] of each axis."""
    batch, *place = coords.long()[:, :, None].unbind(1)
    return (batch, torch.arange(width, device=coords.device), *place)


@contextmanager
def multiplying(precision: str) -> Iterator[None]:
    """Within it torch multiplies float32 so, in products of matrices and in convolutions."""
    backends: Any = torch.backends
    switches = backends.cuda.matmul, backends.cudnn.conv
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = precision
        yield
    finally:
        for switch, held in zip(switches, before, strict=True):
            switch.fp32_precision = held


@contextmanager
def deterministic() -> Iterator[None]:
    """Within it torch's algorithms are deterministic, or raise."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _repeated(setup: Setup) -> Iterator[Row]:
    """Entries that differ when a result and its gradients are computed twice."""
    for cell in cells(setup, Choice("repeated", scenes=("nuscenes_1f_10cm", "waymo_1f_5cm"), channels=(64,))):
        for dtype in dict.fromkeys((setup.half, torch.float32)):
            layer = layer_of(setup, cell, dtype)
            case = f"{cell.case}/{DTYPES[dtype]}"
            try:
                with deterministic():
                    pairs = list(zip(both(layer), both(layer), strict=True))
            except RuntimeError as reason:  # torch's own libraries ask for a setting of theirs
                setup.failed(f"{case}: {str(reason).splitlines()[0]}")
                continue
            differing = sum(int((one != other).sum()) for one, other in pairs)
            told = f"{case}: {differing} of {sum(one.numel() for one, _ in pairs)} entries differ when computed twice"
            setup.failed(told) if differing else setup.say(told)
            subject = Subject(setup.suite, case, DTYPES[dtype], setup.device, (), "differing", "entries")
            yield row(subject, Times(differing, differing, differing), "count", Peer("goal", 0, "goal"))
