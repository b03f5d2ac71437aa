"""Groups of few channels that are multiplied several at once: the same convolution, its gradients, any layout."""

import sys

import pytest
import torch

import pumice as pm
from pumice.testing import assert_close, random_tensor, reference_conv

conv = sys.modules["pumice.ops.conv"]
SIZES = {
    (12, 12, 12): 12,
    (64, 128, 64): 32,
    (96, 96, 3): 1,
    (64, 128, 16): 8,
    (24, 48, 6): 6,
    (40, 40, 5): 5,
    (6, 4, 2): 2,
}
"""(C_in, C_out, groups), and how many groups become one."""


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch):
    monkeypatch.setattr(conv, "_has_tensor_cores", lambda x: True)


def layer(inputs, outputs, groups, dtype=torch.float64):
    x = random_tensor(80, inputs, 3, dtype=dtype)
    chance = torch.Generator().manual_seed(groups)
    return x, torch.randn(outputs, 3, 3, 3, inputs // groups, generator=chance, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_together_are_the_same_convolution(sizes):
    groups = sizes[2]
    x, w = layer(*sizes)
    assert conv._groups_to_merge(x.feats, w.flatten(1, 3), groups) == SIZES[sizes]
    feats, w = x.feats.requires_grad_(), w.requires_grad_()
    got, want = (f(x.replace(feats), w, groups=groups).feats for f in (pm.ops.conv, reference_conv))
    assert_close(got.detach(), want.detach())
    cotangent = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(y, (feats, w), cotangent) for y in (got, want)), strict=True):
        assert_close(a, b)


def test_second_derivatives_of_groups_together():
    x, w = layer(6, 6, 6)
    found, _ = pm.kernel_map(x.geometry, pm.coords.Relation.of(3, 3))
    feats, w = x.feats[:80].requires_grad_(), w.flatten(1, 3).requires_grad_()
    torch.autograd.gradgradcheck(lambda f, k: pm.ops.conv_features(f, k, found, 80, 6), (feats, w), fast_mode=True)


def test_an_epilogue_of_groups_together():
    x, w = layer(16, 16, 4)
    epilogue = pm.ops.Epilogue(torch.rand(16), torch.randn(16), torch.randn(80, 16, dtype=torch.float64), "relu")
    got = pm.ops.conv(x, w, groups=4, epilogue=epilogue).feats
    want = (reference_conv(x, w, groups=4).feats * epilogue.scale + epilogue.shift + epilogue.residual).relu()
    assert_close(got, want)


def test_weights_that_are_written_to_count():
    x, w = layer(8, 8, 8)
    first = pm.ops.conv(x, w, groups=8).feats
    assert torch.equal(first, pm.ops.conv(x, w, groups=8).feats)
    w.mul_(2)
    assert torch.equal(2 * first, pm.ops.conv(x, w, groups=8).feats)


def test_weights_that_are_written_behind_their_back_count():
    """As optimizers, averages of weights and loaders do it; and a layer that changes its dtype."""
    x, w = layer(8, 8, 8)
    weight = torch.nn.Parameter(w)
    with torch.no_grad():
        first = pm.ops.conv(x, weight, groups=8).feats
        weight.data.mul_(2)
        assert torch.equal(2 * first, pm.ops.conv(x, weight, groups=8).feats)
        weight.data = weight.data.float()
        single = pm.ops.conv(x.replace(x.feats.float()), weight, groups=8).feats
    assert_close(single, 2 * first, dtype=torch.float32, scale=4.0)


@pytest.mark.parametrize("how", ["turned", "part", "typed"])
def test_weights_that_are_views(how):
    """Of tensors that hold as many numbers, in another order or of another kind, or more of them."""
    x, w = layer(8, 8, 8, torch.float32)
    flat = w.flatten(1, 3)
    held = {
        "turned": lambda: flat.transpose(0, 1).contiguous().transpose(0, 1),
        "part": lambda: torch.cat([flat, flat])[:8],
        "typed": lambda: flat.contiguous().view(torch.int32).clone().view(torch.float32),
    }[how]()
    found, _ = pm.kernel_map(x.geometry, pm.coords.Relation.of(3, 3))
    with torch.no_grad():
        got = pm.ops.conv_features(x.feats, held, found, 80, 8)
    assert_close(got, reference_conv(x, w, groups=8).feats, dtype=torch.float32, scale=4.0)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_groups_of_bytes_together(kind):
    x, w = layer(8, 16, 8, torch.float32)
    (x8, sx), (w8, sw) = pm.ops.quantize(x.feats, kind), pm.ops.quantize(w, kind, 0)
    epilogue = pm.ops.Epilogue(scale=sx * sw)
    got = pm.ops.conv(x.replace(x8), w8, groups=8, epilogue=epilogue).feats
    want = reference_conv(x.replace(x8.double()), w8.double(), groups=8).feats * (sx * sw)
    assert_close(got, want, dtype=torch.float32, scale=float(want.abs().max()))


def test_what_does_not_fit_is_still_refused():
    x, w = layer(8, 8, 8)
    found, _ = pm.kernel_map(x.geometry, pm.coords.Relation.of(3, 3))
    with pytest.raises(pm.errors.ShapeError, match=r"C_out a multiple of the groups, found shape \[8, 27, 1\]"):
        pm.ops.conv_features(x.feats, w.flatten(1, 3), found, 80, 4)
