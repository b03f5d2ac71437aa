"""pm.compile in training and in evaluation, against the module, on new scenes of several sizes."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from programs import Maker, flat
from torch import nn

import pumice as pm
from benchmarks.scenes.stream_nets import NETS

pytestmark = pytest.mark.gpu

SIZES = (3000, 517, 9000)


def sheets(count, seed, device, batch=2):
    """About so many voxels on wavy sheets."""
    g = torch.Generator().manual_seed(seed)
    side = int((count / batch) ** 0.5) + 1
    grid = torch.stack(torch.meshgrid(*map(torch.arange, (batch, side, side)), indexing="ij"), -1).reshape(-1, 3)
    z = (8 * torch.sin(grid[:, 1:2] / 9) + torch.randint(0, 2, (len(grid), 1), generator=g)).int()
    coords = torch.cat([grid.int(), z], 1)[torch.randperm(len(grid), generator=g)[:count]].int()
    return pm.SparseTensor(torch.randn(count, 4, generator=g).to(device), coords.to(device), batch_size=batch)


def step(net, x, cast):
    """Results, gradients and buffers."""
    torch.manual_seed(1)
    net.zero_grad()
    x = pm.SparseTensor(x.feats.detach().clone(), x.coords, batch_size=x.batch_size)
    with nullcontext() if cast is None else torch.autocast("cuda", cast):
        results = flat(net(x))
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(y.feats.shape, generator=generator).to(x.device) for y in results]
    loss = sum((y.feats.float() * w).sum() for y, w in zip(results, weights, strict=True))
    if loss.requires_grad:
        loss.backward()
    return [y.feats.detach() for y in results], [p.grad for p in net.parameters()], [*net.buffers()]


def far(one, other):
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm()) / max(1.0, float(other.norm()))


def compared(net, cast, device, most):
    eager, program = copy.deepcopy(net).to(device), pm.compile(net.to(device))
    for seed, size in enumerate(SIZES):
        x = sheets(size, seed, device)
        state = copy.deepcopy(eager.state_dict())
        found, expected = step(program, x, cast), step(eager, x, cast)
        worst = 0.0
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                if one is not None:
                    other = torch.zeros_like(one) if other is None else other
                    assert one.dtype == other.dtype
                    worst = max(worst, far(one, other))
        if cast is not None:
            # By how far a step in half precision is from one in single precision.
            exact = copy.deepcopy(eager)
            exact.load_state_dict(state)
            wide = step(exact, x, None)
            theirs = max(
                far(one, other)
                for each in zip(expected, wide, strict=True)
                for one, other in zip(*each, strict=True)
                if one is not None and other is not None
            )
            assert worst <= most + 2 * theirs
        else:
            assert worst <= most
        program.load_state_dict(eager.state_dict())


@pytest.fixture
def exact():
    """Products of single precision, unrounded: a ReLU of what is 0 but for rounding has another gradient."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("cast", [None, torch.float16], ids=["single", "autocast"])
def test_random_networks(gpu, exact, seed, cast):
    net = Maker(seed).net(random.Random(seed).randint(3, 8)).train()
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            # After a convolution one in place raises in training.
            module.inplace = False
    compared(net, cast, gpu, 5e-3 if cast is None else 0.05)


@pytest.mark.parametrize("cast", [None, torch.float16], ids=["single", "autocast"])
@pytest.mark.parametrize("name", NETS)
def test_networks(gpu, exact, name, cast):
    torch.manual_seed(0)
    compared(NETS[name](True).train(), cast, gpu, 2e-2 if cast is None else 0.05)


@pytest.mark.parametrize("name", NETS)
def test_half_precision(gpu, name):
    torch.manual_seed(0)
    net = NETS[name](True).to(gpu).half().eval()
    program = pm.compile(net)
    with torch.no_grad():
        for seed, size in enumerate(SIZES):
            x = sheets(size, seed, gpu).half()
            assert far(program(x).feats, net(pm.SparseTensor(x.feats, x.coords, batch_size=2)).feats) < 2e-2
