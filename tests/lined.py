"""Modules of convolutions, norms and blocks, whose kernels are started in lines, and what is changed about them."""

from __future__ import annotations

import gc

import pytest
import torch

from pumice import nn


def anew(x, seed=0):
    """Other features on the same coordinates: what lies where something was before is none of it."""
    values = torch.randn(x.feats.shape, generator=torch.Generator().manual_seed(seed))
    return x.replace(values.to(x.dtype))


def unit(before, after, size=3, act=nn.ReLU, **options):
    return nn.Sequential(nn.Conv3d(before, after, size, bias=False, **options), nn.BatchNorm(after, eps=0.1), act())


def around(before, after, *body, act=nn.ReLU):
    """A residual block with another body."""
    block = nn.ResidualBlock(before, after)
    block.body, block.act = nn.Sequential(*body), act()
    return block


def twice():
    block = nn.ResidualBlock(8, 8)
    return nn.Sequential(block, block, block)


class Twofold(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def put(holder, name, value):
    """Assignment as an expression."""
    if isinstance(name, int):
        holder[name] = value
    else:
        setattr(holder, name, value)


def askew(x):
    """The same values, not aligned to 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def exchanged(tensor, function):
    tensor.data = function(tensor.data)


def ungrouped(conv):
    conv.groups, conv.weight = 2, torch.nn.Parameter(torch.randn(16, 3, 3, 3, 8))


def unnormed(norm):
    norm.running_mean = norm.running_var = None


def inner(net):
    """The first convolution of the block whose shortcut is the identity."""
    return net[1].body[0]


@pytest.fixture
def uncollected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def problem_of(module, *given):
    """What a call raises."""
    try:
        module(*given)
    except Exception as problem:
        return type(problem), str(problem)
    return None
