"""Layers without a kernel: norms per voxel, per channel, per batch item; activations; conversion; mixed containers."""

from importlib import import_module

import cases
import pytest
import torch

import pumice as pm
from pumice.coords import CoordBuffer, Geometry
from pumice.coords.capacity import BufferedState, CapacityPlanner
from pumice.ops.tensor import from_raw_feats
from pumice.testing import assert_close

linear = import_module("pumice.ops.linear")

ACTIVATIONS = ["ReLU", "LeakyReLU", "GELU", "SiLU", "ELU", "Sigmoid", "Tanh", "Softplus"]
NORMS = {
    "BatchNorm": lambda: pm.nn.BatchNorm(6),
    "LayerNorm": lambda: pm.nn.LayerNorm(6),
    "InstanceNorm": lambda: pm.nn.InstanceNorm(6),
    "GroupNorm": lambda: pm.nn.GroupNorm(3, 6),
}


def sample(count=20, channels=6, batches=3, dtype=torch.float64):
    """A cloud whose batch item 1 is missing."""
    coords = [c for c in cases.compact(2, -4, 4, count, batches) if c[0] != 1][:count]
    feats = torch.randn(len(coords), channels, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return cases.tensor(coords, 3 * feats + 1, dim=2, batch_size=batches)


def per_item(x, function):
    """A function of dense [1, C, N] applied to the voxels of each batch item."""
    out = torch.zeros_like(x.feats)
    for b in x.coords[:, 0].unique():
        rows = x.coords[:, 0] == b
        out[rows] = function(x.feats[rows].T[None])[0].T
    return out


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name):
    x = sample()
    y = getattr(pm.nn, name)()(x)
    assert y.geometry is x.geometry
    torch.testing.assert_close(y.feats, getattr(torch.nn, name)()(x.feats), atol=0, rtol=0)


def test_batch_norm_is_over_all_voxels():
    x, layer, theirs = sample(), pm.nn.BatchNorm(6).double(), torch.nn.BatchNorm1d(6).double()
    for _ in range(3):
        torch.testing.assert_close(layer(x).feats, theirs(x.feats))
    assert layer.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(layer.eval()(x).feats, theirs.eval()(x.feats))


def test_layer_norm_is_per_voxel():
    x = sample()
    torch.testing.assert_close(pm.nn.LayerNorm(6).double()(x).feats, torch.nn.functional.layer_norm(x.feats, (6,)))


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm_is_per_batch_item(groups):
    x = sample()
    layer = pm.nn.GroupNorm(groups, 6).double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    want = per_item(x, lambda t: torch.nn.functional.group_norm(t, groups, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x).feats, want)


def test_instance_norm_is_per_batch_item_and_channel():
    x = sample()
    torch.testing.assert_close(pm.nn.InstanceNorm(6).double()(x).feats, per_item(x, torch.nn.functional.instance_norm))


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_no_voxel(name):
    layer = NORMS[name]()
    x = cases.tensor([], torch.zeros(0, 6), dim=2, batch_size=2)
    assert layer(x).feats.shape == (0, 6) and layer.eval()(x).feats.shape == (0, 6)


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_one_voxel(name):
    """The deepest level of a network on a small cloud: no error and no NaN, in training too."""
    layer = NORMS[name]()
    x = cases.tensor([(0, 0, 0)], torch.randn(1, 6))
    for _ in range(2):
        assert torch.isfinite(layer(x).feats).all()
    for value in layer.state_dict().values():
        assert torch.isfinite(value).all()


@pytest.mark.parametrize("name", NORMS)
def test_norm_of_strided_features(name):
    x = sample()
    wide = torch.cat([x.feats, x.feats], 1)[:, 3:9]
    assert not wide.is_contiguous()
    layer = NORMS[name]().double()
    torch.testing.assert_close(layer(x.replace(wide)).feats, layer(x.replace(wide.contiguous())).feats)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["InstanceNorm", "GroupNorm"])
def test_norm_statistics_are_kept_in_fp32(name, dtype):
    """Values whose squares overflow fp16."""
    x = sample()
    x = x.replace((x.feats * 1000).to(dtype))
    want = NORMS[name]().double()(x.double()).feats
    got = NORMS[name]().to(dtype)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.feats.double(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_norms(name):
    x = sample(8)
    layer = NORMS[name]().double()
    assert torch.autograd.gradcheck(lambda f: layer(x.replace(f)).feats, [x.feats.requires_grad_()], fast_mode=True)


def test_linear_is_a_convolution_with_a_kernel_of_one():
    x, layer = sample(), pm.nn.Linear(6, 4).double()
    want = pm.ops.conv(x, layer.weight[:, None, None], layer.bias)
    torch.testing.assert_close(layer(x).feats, want.feats)


@pytest.mark.parametrize("channels", [8, 7])
def test_linear_reads_features_of_a_captured_step_as_they_are(channels):
    """Rows that do not live are cleared once, by what sums over rows, and not by a look at dtypes before."""
    x = sample(channels=channels, dtype=torch.float32)
    word = torch.zeros(1, dtype=torch.int32)
    cloud = CoordBuffer(x.coords, word + len(x), x.geometry.bounds, word.clone())
    inside = Geometry.in_buffer(
        cloud, x.geometry.site, BufferedState(CapacityPlanner(len(x), len(x), 1.5, None), trains=True)
    )
    opened = from_raw_feats(x.feats, inside)
    pm.nn.Linear(channels, 8)(opened)
    assert opened._open


def test_dropout():
    x, layer = sample(), pm.nn.Dropout(0.5)
    dropped = layer(x).feats
    assert 0 < (dropped == 0).sum() < dropped.numel()
    assert torch.equal(layer.eval()(x).feats, x.feats)


def test_conversion_to_synchronous_batch_norm():
    torch.manual_seed(0)
    x = sample(channels=6)
    model = pm.nn.Sequential(pm.nn.Conv2d(6, 6, 3), pm.nn.BatchNorm(6), pm.nn.Sequential(pm.nn.BatchNorm(6))).double()
    model(x)  # statistics other than the first
    want, keys = model.eval()(x).feats, model.state_dict().keys()
    found = pm.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    kinds = [type(m) for m in found.modules()]
    assert kinds.count(pm.nn.SyncBatchNorm) == 2 and pm.nn.BatchNorm not in kinds
    assert found.state_dict().keys() == keys and not found.training
    torch.testing.assert_close(found(x).feats, want)


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, pm.nn.Sequential])
def test_containers(wrap):
    x = sample()
    inner = wrap(pm.nn.Conv2d(6, 6, 3).double(), pm.nn.ReLU())
    assert torch.equal(pm.nn.Sequential(inner, torch.nn.Identity())(x).feats, inner(x).feats)


@pytest.fixture
def own(monkeypatch):
    """Where rows are multiplied by a kernel of ours wherever it takes them: how often it was."""
    calls, real = [], linear.linear_features

    def product(*given):
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(linear, "fits_one_kernel", lambda *tensors: not torch.is_grad_enabled())
    monkeypatch.setattr(linear, "linear_features", product)
    return calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(96, 19), (19, 96), (7, 3), (96, 24)])
def test_rows_of_16_bits_have_a_kernel(own, sizes, bias, dtype):
    layer, x = pm.nn.Linear(*sizes, bias=bias).to(dtype), sample(channels=sizes[0], dtype=dtype)
    with torch.no_grad():
        y = layer(x)
    want = x.feats.double() @ layer.weight.detach().double().T
    want = want + layer.bias.detach().double() if bias else want
    assert len(own) == 1 and y.geometry is x.geometry and y.dtype == dtype
    assert_close(y.feats, want, dtype=dtype)


def test_other_rows_are_multiplied_by_torch(own):
    """Those of 32 bits, of several dtypes, those that train, and those that do not fit."""
    half, x = torch.float16, sample(channels=96, dtype=torch.float16)
    with torch.no_grad():
        pm.nn.Linear(96, 19)(x.to(torch.float32))
        layer, mixed = (pm.nn.Linear(96, 19).to(half) for _ in range(2))
        mixed.bias = torch.nn.Parameter(mixed.bias.float())
        with pytest.raises(RuntimeError, match="dtype"):
            mixed(x)
        with pytest.raises(pm.errors.ShapeError, match="takes 96 channels, x has 19"):
            layer(sample(channels=19, dtype=half))
    layer(x).feats.sum().backward()
    assert layer.weight.grad is not None and not own


def test_rows_of_a_captured_step_are_multiplied_by_torch(own, monkeypatch):
    """It has gradients of living rows alone, also where a pass of it is without."""
    x = sample(channels=96, dtype=torch.float16)
    monkeypatch.setattr(type(x.geometry), "trains", True)
    monkeypatch.setattr(linear, "row_by_row", lambda x, function: x.replace(function(x.feats)))
    with torch.no_grad():
        pm.nn.Linear(96, 19).half()(x)
    assert not own


def test_residual_block():
    torch.manual_seed(0)
    x = sample()
    block = pm.nn.ResidualBlock(6, 8, dim=2).double()
    y = block(x)
    assert y.channels == 8 and y.geometry is x.geometry and y.feats.min() >= 0
    y.feats.sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_what_a_strided_layer_does_by_default_shows():
    assert "padding=(1, 1, 1), dilation=1, out=floor_unique" in repr(pm.nn.Conv3d(2, 4, 3, 2))
    assert "padding=(1, 1, 1), dilation=1, out=support" in repr(pm.nn.Conv3d(2, 4, 3, 2, padding=1))
    assert "out=" not in repr(pm.nn.Conv3d(2, 4, 3))
