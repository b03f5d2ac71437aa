"""Layers, norms and blocks whose parts were exchanged, and training of single layers under autocast."""

import pytest
import torch
from nets import stirred

import pumice as pm
from pumice import nn
from pumice.ops import autograd
from pumice.testing import random_tensor


class Adapted(nn.Conv3d):
    """A layer whose class was exchanged, as adapters of few weights do."""

    @property
    def weight(self):
        return self._parameters["weight"] + self.more


def test_a_property_stands_before_a_parameter():
    layer, x = nn.Conv3d(8, 16, 3), random_tensor(50, 8, 3)
    own, bias = layer.weight.detach(), layer.bias.detach()
    layer.__class__, layer.more = Adapted, torch.rand(16, 3, 3, 3, 8)
    torch.testing.assert_close(layer(x).feats, pm.ops.conv(x, own + layer.more, bias).feats)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_without_a_bias_has_none_among_its_parameters(bias):
    """Where it is not, whoever asks for it searches the module in vain at every call."""
    layer = nn.Conv3d(8, 16, 3, bias=bias)
    assert (layer._parameters["bias"] is not None) == bias and set(layer.state_dict()) == {"weight", "bias"} - (
        set() if bias else {"bias"}
    )
    older = nn.Conv3d(8, 16, 3, bias=False)
    # As it was pickled before.
    del older._parameters["bias"]
    older.__dict__["bias"] = None
    older.load_state_dict({"weight": layer.weight})
    x = random_tensor(50, 8, 3)
    torch.testing.assert_close(older(x).feats + (layer.bias if bias else 0.0), layer(x).feats)


@pytest.mark.parametrize(
    "last", [nn.BatchNorm, lambda n: nn.ReLU(), lambda n: nn.LeakyReLU(0.3)], ids=["norm", "relu", "other"]
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_residual_is_added_before_the_last_module_whatever_that_is(last, normed):
    body = nn.Sequential(nn.Conv3d(8, 8, 3), *([nn.BatchNorm(8)] if normed else []))
    block, x = nn.ResidualBlock(8, 8), random_tensor(60, 8, 3, dtype=torch.float64)
    block.body, block.act = body, last(8)
    block = stirred(block).double()
    with torch.no_grad():
        expected = block.act(block.body(x) + x)
        torch.testing.assert_close(block(x).feats, expected.feats, rtol=1e-10, atol=1e-10)


def test_a_block_whose_activation_became_a_function():
    block, x = stirred(nn.ResidualBlock(8, 8)), random_tensor(40, 8, 3)
    want = block(x).feats
    del block.act
    block.act = lambda y: y.map(torch.relu)
    assert torch.equal(block(x).feats, want)


def test_parts_of_a_block_that_were_exchanged_are_called():
    block, x = stirred(nn.ResidualBlock(8, 8)).double(), random_tensor(60, 8, 3, dtype=torch.float64)
    with torch.no_grad():
        for name, part in (
            ("act", nn.SiLU()),
            ("shortcut", nn.Linear(8, 8).double()),
            ("body", nn.Sequential(nn.Conv3d(8, 8, 1))),
        ):
            setattr(block, name, part.double())
            expected = block.act(block.body(x) + block.shortcut(x))
            torch.testing.assert_close(block(x).feats, expected.feats, rtol=1e-10, atol=1e-10)


# Training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_narrow_voxel_without_statistics(dtype):
    """Under autocast the norm's parameters are wider than what it is given."""
    found = []
    for kept in (torch.float32, dtype):
        torch.manual_seed(3)
        norm, x = nn.BatchNorm(8, track_running_stats=False), random_tensor(1, 8, 3, seed=0, dtype=torch.float64)
        norm.weight.data.uniform_(0.5, 2)
        with torch.autocast("cpu", dtype, enabled=kept != dtype):
            found.append(norm.to(kept)(x.to(dtype)).feats)
        found[-1].sum().backward()
    assert all(y.dtype == dtype for y in found)
    torch.testing.assert_close(found[1], found[0], rtol=0.03, atol=0.03)


def test_one_voxel_without_statistics_is_left_as_it_is():
    """Evaluated too, where its own statistics would count."""
    norm = nn.BatchNorm(8, affine=False, track_running_stats=False, eps=0.0)
    x = random_tensor(1, 8, 3, dtype=torch.float64)
    for module in (norm.train(), norm.eval()):
        torch.testing.assert_close(module(x).feats, x.feats)


def test_compiled_statistics_that_are_not_tracked_any_more_stay():
    module, x = nn.Sequential(nn.Conv3d(8, 16, 3), nn.BatchNorm(16)).double(), random_tensor(40, 8, 3).double()
    module[1].track_running_stats = False
    kept = {name: b.clone() for name, b in module.named_buffers()}
    torch.compiler.reset()
    y = torch.compile(module, backend="eager", fullgraph=True)(x).feats
    assert all(torch.equal(b, kept[name]) for name, b in module.named_buffers())
    torch.testing.assert_close(y, module(x).feats)


def test_gradients_read_the_weight_as_it_was_multiplied(monkeypatch):
    """Under autocast narrow: a kernel for narrow rows takes no wide weight."""
    seen, whole = [], autograd.DifferentiableCall.gradients

    def told(call, given, grad, wanted):
        seen.append(({x.dtype for x in given}, grad.dtype, [*wanted]))
        return whole(call, given, grad, wanted)

    monkeypatch.setattr(autograd.DifferentiableCall, "gradients", told)
    x = random_tensor(30, 8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y = nn.Conv3d(8, 16, 3, bias=False)(x.replace(x.feats.requires_grad_()))
    y.feats.sum().backward()
    assert seen == [({torch.bfloat16}, torch.bfloat16, [torch.bfloat16, torch.float32])]


def test_backward_within_autocast_is_that_outside(monkeypatch):
    """By the calls that the forward pass left, not by the statements of derivatives."""
    torch.manual_seed(0)
    module, x = nn.Conv3d(8, 16, 3).train(), random_tensor(60, 8, 3)

    def refused(*given):
        raise AssertionError("derived anew")

    monkeypatch.setattr(autograd, "_gradients", refused)
    found = []
    for within in (False, True):
        module.zero_grad()
        feats = x.feats.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x.replace(feats)).feats.float().square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append([feats.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
