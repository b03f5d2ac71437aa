"""Convolutions of 8-bit values against the same of the numbers that they stand for; quantization itself."""

import pytest
import torch

import pumice as pm
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.ops import Epilogue, quantize
from pumice.testing import random_tensor

KINDS = (torch.int8, torch.float8_e4m3fn)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@EVERY_KIND
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_what_is_quantized_comes_back(kind, dim):
    x = normal(6, 3, 4) * torch.tensor([1.0, 10, 0, 1e-3])
    x[0] = 0
    values, scale = quantize(x, kind, dim)
    assert values.dtype == kind and scale.shape == (() if dim is None else (x.shape[dim],))
    shape = {None: (), 0: (-1, 1, 1), -1: (-1,)}[dim]
    back = values.float() * scale.view(shape)
    largest = x.abs().amax() if dim is None else x.abs().amax([a for a in range(3) if a != dim % 3], keepdim=True)
    step = largest / 254 if kind == torch.int8 else torch.maximum(back.abs() / 16, largest / 448 / 1024)
    assert bool(((back - x).abs() <= step * 1.001).all())


def test_the_largest_becomes_the_largest():
    values, scale = quantize(torch.tensor([[-2.0, 1.0], [0.0, 0.0]]), torch.int8, 0)
    assert values.tolist() == [[-127, 64], [0, 0]] and scale.tolist() == [pytest.approx(2 / 127), 1.0]


@EVERY_KIND
def test_nothing_is_quantized_too(kind):
    values, scale = quantize(torch.zeros(0, 4), kind)
    assert values.shape == (0, 4) and float(scale) == 1
    assert quantize(torch.zeros(3, 0), kind, 0)[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda x: quantize(x, torch.uint8), DtypeError, "to torch.int8 or torch.float8_e4m3fn, found torch.uint8"),
        (lambda x: quantize(x.int()), DtypeError, "x must be a tensor of floating point, found torch.int32"),
        (lambda x: quantize(x, dim=2), OptionError, "axis of x, which has 2; found 2"),
    ],
)
def test_what_cannot_be_quantized_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call(torch.ones(3, 4))


@EVERY_KIND
@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_a_convolution_is_that_of_the_numbers(kind, stride, groups):
    x, weight, bias = random_tensor(80, 8, 3), normal(6, 3, 3, 3, 8 // groups, seed=1), normal(6, seed=2)
    (x8, sx), (w8, sw) = quantize(x.feats, kind), quantize(weight, kind, 0)
    epilogue = Epilogue(scale=sx * sw, activation="relu", dtype=torch.float16)
    options = {"stride": stride, "groups": groups}
    y = pm.ops.conv(x.replace(x8), w8, bias, epilogue=epilogue, **options)
    exact = pm.ops.conv(x.replace(x8.double()), w8.double(), **options).feats
    wanted = ((exact + bias) * (sx * sw)).relu()
    assert y.feats.dtype == torch.float16
    torch.testing.assert_close(y.feats.double(), wanted.double(), rtol=2e-3, atol=1e-4)
    true = pm.ops.conv(x, weight, **options).feats
    # Each factor is off by half a step of its largest value, or by 1/16 of itself.
    assert (exact * sx * sw - true).norm() / true.norm() < {torch.int8: 0.03, torch.float8_e4m3fn: 0.06}[kind]


@EVERY_KIND
def test_sums_of_bytes_are_float32(kind):
    x, weight = random_tensor(40, 8, 3), normal(6, 3, 3, 3, 8)
    y = pm.ops.conv(x.replace(x.feats.to(kind)), weight.to(kind))
    assert y.feats.dtype == torch.float32
    torch.testing.assert_close(y.feats, pm.ops.conv(x.replace(x.feats.to(kind).float()), weight.to(kind).float()).feats)


def test_large_sums_do_not_wrap_around():
    x = random_tensor(40, 64, 3)
    full = x.replace(torch.full_like(x.feats, 127, dtype=torch.int8))
    y = pm.ops.conv(full, torch.full((2, 3, 3, 3, 64), -127, dtype=torch.int8))
    assert float(y.feats.max()) <= -64 * 127 * 127


def test_a_result_is_cast_and_kept_within_its_range():
    x, weight = random_tensor(40, 4, 3), normal(6, 3, 3, 3, 4)
    plain = pm.ops.conv(x, weight)
    half = pm.ops.conv(x, weight, epilogue=Epilogue(dtype=torch.float16)).feats
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), plain.feats, rtol=1e-3, atol=1e-3)
    byte = pm.ops.conv(x, weight * 1e4, epilogue=Epilogue(dtype=torch.float8_e4m3fn)).feats.float()
    assert byte.abs().max() == 448 and not byte.isnan().any()
    with pytest.raises(DtypeError, match="dtype of a result is one of .* found torch.int8"):
        Epilogue(dtype=torch.int8)


def test_there_are_no_gradients():
    x, weight = random_tensor(40, 4, 3), normal(6, 3, 3, 3, 4).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(DtypeError, match="float8_e4m3fn is for inference"):
        pm.ops.conv(x.replace(x.feats.to(torch.float8_e4m3fn)), weight)
    with pytest.raises(DtypeError, match="x is torch.int8, weight is torch.float32; quantize both"):
        pm.ops.conv(x.replace(x.feats.to(torch.int8)), torch.ones(6, 3, 3, 3, 4))


def test_autocast_leaves_bytes_alone():
    x, weight = random_tensor(40, 4, 3), normal(6, 3, 3, 3, 4).to(torch.int8)
    with torch.autocast("cpu", torch.bfloat16):
        assert pm.ops.conv(x.replace(x.feats.to(torch.int8)), weight).feats.dtype == torch.float32


@EVERY_KIND
@pytest.mark.parametrize(
    "call",
    [
        lambda x: pm.ops.max_pool(x, 2),
        lambda x: pm.ops.sum_pool(x, 2),
        lambda x: pm.ops.avg_pool(x, 2),
        pm.ops.global_max_pool,
        pm.ops.global_sum_pool,
        pm.ops.global_avg_pool,
        lambda x: x + x,
        lambda x: x * 2,
        lambda x: pm.ops.union(x, random_tensor(9, 4, 3).map(lambda f: f.to(x.dtype))),
        lambda x: pm.interpolate(x, torch.rand(5, 4)),
    ],
)
def test_what_would_add_them_without_their_scales_is_refused(kind, call):
    x = random_tensor(40, 4, 3)
    with pytest.raises(DtypeError, match=f"x is {kind}: only convolutions take 8 bits, with scales"):
        call(x.replace(x.feats.to(kind)))


@EVERY_KIND
def test_a_bias_is_wider(kind):
    x, weight = random_tensor(40, 4, 3), normal(6, 3, 3, 3, 4).to(kind)
    for bias in (torch.zeros(6, dtype=torch.int32), torch.zeros(6).to(kind)):
        with pytest.raises(DtypeError, match="a bias of .* weights is in wider floats, found"):
            pm.ops.conv(x.replace(x.feats.to(kind)), weight, bias)


@EVERY_KIND
def test_parameters_are_quantized_without_a_graph(kind):
    weight = torch.nn.Parameter(normal(6, 3, 3, 3, 4))
    values, scale = quantize(weight, kind, 0)
    assert not values.requires_grad and not scale.requires_grad
    x = random_tensor(20, 4, 3)
    assert pm.ops.conv(x.replace(x.feats.to(kind)), values, epilogue=Epilogue(scale=scale)).feats.dtype == torch.float32


def test_the_ends_of_the_range():
    values, scale = quantize(torch.tensor([1e-44, -1e-44]))
    assert values.tolist() == [0, 0] and scale > 0
    assert quantize(torch.tensor([1.0, torch.nan]))[1].isnan()


@EVERY_KIND
@pytest.mark.parametrize("which", ["x", "weight"])
def test_autocast_takes_no_codes_for_numbers(kind, which):
    x, weight = random_tensor(40, 4, 3), normal(6, 3, 3, 3, 4)
    x, weight = (x.replace(x.feats.to(kind)), weight) if which == "x" else (x, weight.to(kind))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(DtypeError, match="quantize both"):
        pm.ops.conv(x, weight)


def test_sums_that_an_int32_may_not_hold_are_refused():
    x = random_tensor(5, 400, 3)
    weight = torch.zeros(1, 7, 7, 7, 400, dtype=torch.int8)
    with pytest.raises(ShapeError, match="at most 131072 terms, within int32; found 343 kernel offsets x 400 channels"):
        pm.ops.conv(x.replace(x.feats.to(torch.int8)), weight)
