"""The epilogue of a convolution against the same in torch: values, gradients, what is refused."""

import pickle
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import pumice as pm
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import epilogue as epilogues
from pumice.lower.epilogue import ACTIVATIONS
from pumice.ops import Epilogue
from pumice.ops.linear import linear_features
from pumice.testing import random_tensor

CHANNELS = 6
PLAIN = {"relu": functional.relu, "leaky_relu": functional.leaky_relu, "silu": functional.silu}
PLAIN |= {"gelu": functional.gelu, "sigmoid": torch.sigmoid, "": lambda x: x}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(stride=1, groups=1, dtype=torch.float64, voxels=60):
    """x, weight, options, and how many outputs there are."""
    x = random_tensor(voxels, 4, 3, dtype=dtype)
    weight, options = normal(CHANNELS, 3, 3, 3, 4 // groups, dtype=dtype), {"stride": stride, "groups": groups}
    return x, weight, options, len(pm.ops.conv(x, weight, **options).feats)


def full(rows, activation, dtype=torch.float64):
    sizes = ((CHANNELS,), (CHANNELS,), (rows, CHANNELS))
    return Epilogue(*(normal(*size, seed=n + 1, dtype=dtype) for n, size in enumerate(sizes)), activation)


def test_every_activation_is_tested():
    assert set(PLAIN) == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_it_is_what_torch_makes_of_the_result(stride, groups, activation):
    x, weight, options, rows = layer(stride, groups)
    bias, epilogue = normal(CHANNELS, seed=9), full(rows, activation)
    y = pm.ops.conv(x, weight, bias, **options)
    wanted = PLAIN[activation](y.feats * epilogue.scale + epilogue.shift + epilogue.residual)
    got = pm.ops.conv(x, weight, bias, epilogue=epilogue, **options)
    torch.testing.assert_close(got.feats, wanted)
    assert got.geometry is y.geometry


@pytest.mark.parametrize("missing", ["scale", "shift", "residual"])
def test_each_part_may_be_missing(missing):
    x, weight, options, rows = layer()
    held = vars(full(rows, "relu")) | {missing: None}
    y = pm.ops.conv(x, weight, **options).feats
    for name, join in (("scale", torch.mul), ("shift", torch.add), ("residual", torch.add)):
        y = y if held[name] is None else join(y, held[name])
    epilogue = Epilogue(held["scale"], held["shift"], held["residual"], "relu")
    torch.testing.assert_close(pm.ops.conv(x, weight, epilogue=epilogue, **options).feats, y.relu())


def test_gradients_reach_all_of_it():
    x, weight, options, rows = layer(groups=2, voxels=20)
    bias, held = normal(CHANNELS, seed=9), full(rows, "")
    given = [t.clone().requires_grad_() for t in (x.feats, weight, bias, held.scale, held.shift, held.residual)]

    def run(feats, weight, bias, scale, shift, residual):
        epilogue = Epilogue(scale, shift, residual, "silu")
        return pm.ops.conv(x.replace(feats), weight, bias, epilogue=epilogue, **options).feats

    assert torch.autograd.gradcheck(run, given)


def test_half_precision_is_rounded_once():
    x, weight, options, rows = layer(dtype=torch.float16)
    epilogue = full(rows, "relu", torch.float32)
    exact = pm.ops.conv(x.replace(x.feats.double()), weight.double(), **options).feats
    wanted = (exact * epilogue.scale + epilogue.shift + epilogue.residual).relu()
    got = pm.ops.conv(x, weight, epilogue=epilogue, **options).feats
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), wanted, rtol=5e-3, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_in_it_is_rounded_before_its_end(grad, dtype):
    """2 ** 11 + 1 is no number of either dtype."""
    x = pm.SparseTensor(torch.ones(1, 1, dtype=dtype), torch.zeros(1, 2, dtype=torch.int32), dim=1)
    weight = torch.full((1, 1, 1), 2.0**11, dtype=dtype, requires_grad=grad)
    one, less = torch.ones(1, dtype=dtype), torch.full((1, 1), -(2.0**11), dtype=dtype)
    y = pm.ops.conv(x, weight, epilogue=Epilogue(shift=one, residual=less)).feats
    assert y.dtype == dtype and y.requires_grad == grad and y.item() == 1.0


def test_an_empty_tensor_has_one_too():
    x = random_tensor(0, 4, 3)
    weight, epilogue = torch.randn(CHANNELS, 3, 3, 3, 4), Epilogue(torch.ones(CHANNELS), activation="relu")
    assert pm.ops.conv(x, weight, epilogue=epilogue).feats.shape == (0, CHANNELS)


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (lambda n: Epilogue(torch.ones(4)), ShapeError, r"scale of the epilogue is \[6\], found shape \[4\]"),
        (lambda n: Epilogue(shift=torch.ones(6, dtype=torch.int32)), DtypeError, "shift .* found torch.int32"),
        (lambda n: Epilogue(residual=torch.ones(3, 6)), ShapeError, r"residual .* found shape \[3, 6\]"),
        (lambda n: Epilogue(scale=2.0), DtypeError, "scale .* found float"),
        (lambda n: torch.nn.ReLU(), OptionError, "epilogue takes a pumice.ops.Epilogue, found ReLU"),
        (lambda n: Epilogue(activation="tanh"), OptionError, "activation 'tanh' is unknown; there are relu"),
        (lambda n: Epilogue(row_padding=-1), OptionError, "row_padding is 0 or more, found -1"),
    ],
)
def test_what_does_not_fit_is_refused(made, error, said):
    x, weight, options, rows = layer(dtype=torch.float32)
    with pytest.raises(error, match=said):
        pm.ops.conv(x, weight, epilogue=made(rows), **options)


def test_plain_features_are_checked_too():
    x, weight, _, rows = layer(dtype=torch.float32)
    relation = pm.coords.Relation.of(3, 3)
    found, _ = pm.kernel_map(x.geometry, relation)
    flat = weight.flatten(1, 3)
    with pytest.raises(ShapeError, match=r"shift of the epilogue is \[6\], found shape \[5\]"):
        pm.ops.conv_features(x.feats, flat, found, rows, epilogue=Epilogue(shift=torch.ones(5)))
    with pytest.raises(DeviceError, match="weight is on meta, the kernel map on cpu"):
        pm.ops.conv_features(x.feats, flat.to("meta"), found, rows)
    with pytest.raises(DeviceError, match="scale of the epilogue is on meta, x is on cpu"):
        pm.ops.conv_features(x.feats, flat, found, rows, epilogue=Epilogue(torch.ones(6, device="meta")))


def test_sums_are_not_rounded_before_it():
    """65,504 is the largest half: what a scale brings back has not been infinite."""
    x, weight, options, _ = layer(dtype=torch.float16)
    x, weight = x.replace(x.feats * 80), weight * 80
    exact = pm.ops.conv(x.replace(x.feats.double()), weight.double(), **options).feats
    got = pm.ops.conv(x, weight, epilogue=Epilogue(torch.full((CHANNELS,), 0.01)), **options).feats
    assert exact.abs().max() > 65_504 and got.dtype == torch.float16
    torch.testing.assert_close(got.double(), exact * 0.01, rtol=2e-3, atol=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_an_epilogue_of_nothing_changes_nothing(dtype):
    x, weight, options, _ = layer(dtype=dtype)
    got, plain = pm.ops.conv(x, weight, epilogue=Epilogue(), **options), pm.ops.conv(x, weight, **options)
    assert got.feats.dtype == dtype and torch.equal(got.feats, plain.feats)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"rows": 59}, ShapeError, "rows are the 60 outputs of the kernel map, found 59"),
        ({"x": (10, 4)}, ShapeError, r"x is \[60, C_in\] for this kernel map, found shape \[10, 4\]"),
        ({"weight": (6, 26, 4)}, ShapeError, r"weight is \[C_out, 27, 4 / 1\], .* found shape \[6, 26, 4\]"),
        ({"groups": 4}, ShapeError, r"weight is \[C_out, 27, 4 / 4\], C_out a multiple of the groups, found"),
        ({"dtype": torch.float16}, DtypeError, "of one dtype, floating point or int8, found .*float16 and .*float32"),
        ({"dtype": torch.int32}, DtypeError, "of one dtype, floating point or int8, found .*int32"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_plain_features_that_do_not_fit_are_refused(change, error, said, grad):
    found, _ = pm.kernel_map(random_tensor(60, 4, 3).geometry, pm.coords.Relation.of(3, 3))
    given = {"x": (60, 4), "weight": (6, 27, 4), "rows": 60, "groups": 1, "dtype": torch.float32, **change}
    x, weight = torch.zeros(given["x"], dtype=given["dtype"]), torch.zeros(given["weight"], requires_grad=grad)
    with pytest.raises(error, match=said):
        pm.ops.conv_features(x, weight, found, given["rows"], given["groups"])


def test_what_linear_maps_do_not_take():
    weight, end = torch.zeros(4, 8), pm.ops.Epilogue(activation="relu")
    with pytest.raises(DtypeError, match="of one floating point dtype, found torch.float64 and torch.float32"):
        linear_features(torch.zeros(3, 8).double(), weight, end)
    with pytest.raises(ShapeError, match="found \\[3, 7\\] and \\[4, 8\\]"):
        linear_features(torch.zeros(3, 7), weight, end)
    with pytest.raises(DeviceError, match="weight is on meta, x is on cpu"):
        linear_features(torch.zeros(3, 8), weight.to("meta"), end)
    with pytest.raises(DeviceError, match="scale of the epilogue is on meta"):
        linear_features(torch.zeros(3, 8), weight, pm.ops.Epilogue(torch.zeros(4, device="meta")))
    with pytest.raises(ShapeError, match="shift of the epilogue is \\[4\\], found shape \\[8\\]"):
        linear_features(torch.zeros(3, 8), weight, pm.ops.Epilogue(shift=torch.zeros(8)))


def test_an_epilogue_with_statistics():
    """(y - mean) / sqrt(variance + eps) * scale + shift + residual, and a bias before all of it."""
    torch.manual_seed(1)
    x, w, b = random_tensor(60, 4, 3, dtype=torch.float64), torch.randn(6, 3, 3, 3, 4).double(), torch.randn(6).double()
    mean, variance, scale, shift = torch.rand(4, 6).double()
    y = pm.ops.conv(x, w, b).feats
    residual = torch.randn_like(y)
    told = pm.ops.Epilogue(scale, shift, residual, "relu", mean=mean, variance=variance, eps=0.1)
    expected = ((y - mean) / (variance + 0.1).sqrt() * scale + shift + residual).relu()
    torch.testing.assert_close(pm.ops.conv(x, w, b, epilogue=told).feats, expected)
    assert told.signature.eps == 0.1 and set(told.operands) == set(epilogues.EPILOGUE)
    with pytest.raises(ShapeError, match=r"mean of the epilogue is \[6\]"):
        pm.ops.conv(x, w, epilogue=pm.ops.Epilogue(mean=mean[:3]))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("ended", [True, False])
def test_the_epilogue_of_a_norm_is_that_of_its_fields(affine, ended):
    mean, variance, *more = torch.rand(4, 6)
    scale, shift = more if affine else (None, None)
    residual = torch.rand(5, 6) if ended else None
    made = pm.ops.Epilogue.of_norm((mean, variance, scale, shift), 0.1, residual, "relu")
    told = pm.ops.Epilogue(scale, shift, residual, "relu", None, mean, variance, 0.1)
    assert made.signature == told.signature and [*made.operands] == [*told.operands]
    assert all(made.operands[name] is x for name, x in told.operands.items())
    for one in (made, made.with_bias(torch.rand(6)), pickle.loads(pickle.dumps(made))):
        assert (one.activation, one.dtype, one.eps, one.residual is None) == ("relu", None, 0.1, not ended)
    assert all(getattr(made, name) is getattr(told, name) for name in epilogues.TENSORS)


def test_a_finish_takes_no_hash_to_other_processes():
    """Names hash otherwise there."""
    told = pm.ops.Epilogue(torch.rand(3), activation="relu").signature
    assert hash(told) == hash(replace(told)) != hash(replace(told, eps=1.0))
    there = pickle.loads(pickle.dumps(told))
    assert there == told and "_hash" not in there.__dict__


def test_eight_bits_are_clamped():
    most = torch.finfo(torch.float8_e4m3fn).max
    values = torch.tensor([[-1e4, -2.0, 0.0, 3.0, 1e4]])
    found = epilogues.applied(values, Epilogue(), torch.float8_e4m3fn)
    assert found.dtype is torch.float8_e4m3fn and found.float().tolist() == [[-most, -2.0, 0.0, 3.0, most]]
