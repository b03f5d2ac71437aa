"""On a GPU channels that fill no tile, and rows that are no multiple of 16 bytes."""

from importlib import import_module

import pytest
import torch
from kernels.cases import Problem
from nets import strange

import pumice as pm
from pumice.coords import Relation, kernel_map
from pumice.language.parse import parse
from pumice.language.rewrite import lower_statement
from pumice.lower import kernel as lowered
from pumice.lower.dataflow import CONV
from pumice.lower.maps import FORMS
from pumice.testing import assert_close, random_cloud

pytestmark = pytest.mark.gpu

HALF = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture
def gpu():
    """The last GPU."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


def sample(device, count, channels, dtype, extent=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    coords = random_cloud(count, 3, extent=extent, seed=seed) if count else torch.zeros(0, 4, dtype=torch.int32)
    feats = torch.randn(count, channels, generator=generator).to(dtype)
    return pm.SparseTensor(feats.to(device), coords.to(device), batch_size=1)


def rms(values):
    return float(values.detach().square().mean().sqrt()) if values.numel() else None


@HALF
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", [(96, 19), (19, 96), (7, 3)], ids=str)
def test_a_linear_layer(gpu, sizes, bias, dtype):
    """Against float64, by a kernel of ours; several numbers of rows, as calls are prepared for others."""
    layer = pm.nn.Linear(*sizes, bias=bias).to(gpu, dtype).eval()
    for count in (20_000, 1, 4097, 20_000):
        x = sample(gpu, count, sizes[0], dtype, seed=count)
        with torch.no_grad():
            got, own = layer(x), import_module("pumice.ops.linear")._by_kernel(x, layer.weight, layer.bias)
        want = x.feats.double() @ layer.weight.detach().double().T
        want = want + layer.bias.detach().double() if bias else want
        assert own is not None and torch.equal(got.feats, own) and got.geometry is x.geometry
        assert got.dtype == dtype
        assert_close(got.feats, want, dtype=dtype, scale=rms(want))


@HALF
@pytest.mark.parametrize("mixed", [False, True], ids=["half", "mixed"])
@pytest.mark.parametrize("sizes", [(96, 19), (7, 40)], ids=str)
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_a_linear_layer_that_trains(gpu, monkeypatch, sizes, mixed, dtype):
    """Against torch's in float64, by kernels of ours for each number of rows."""
    linear, seen = import_module("pumice.ops.linear"), []
    real = linear.differentiable_features
    monkeypatch.setattr(linear, "differentiable_features", lambda *given: seen.append(real(*given)) or seen[-1])
    layer = pm.nn.Linear(*sizes).to(gpu, torch.float32 if mixed else dtype)
    exact = torch.nn.Linear(*sizes).to(gpu).double()
    exact.load_state_dict(layer.state_dict())
    for count in (3000, 80_000, 79_990, 80_000, 79_984):
        x = sample(gpu, count, sizes[0], dtype, extent=EXTENT, seed=count)
        x = x.replace(x.feats.requires_grad_())
        seen.clear()
        with torch.autocast("cuda", dtype, enabled=mixed):
            y = layer(x).feats
        assert [one is not None for one in seen] == [True] and y.dtype == dtype
        grad = torch.randn(count, sizes[1], device=gpu, dtype=dtype)
        got = torch.autograd.grad(y, [x.feats, *layer.parameters()], grad)
        wide = x.feats.detach().double().requires_grad_()
        want = torch.autograd.grad(exact(wide), [wide, *exact.parameters()], grad.double())
        for a, b, like in zip(got, want, (x.feats, *layer.parameters()), strict=True):
            assert a.dtype == like.dtype
            # Under autocast weights are rounded to the dtype before they are multiplied.
            assert_close(a, b, dtype=dtype, scale=rms(b))


def test_a_linear_layer_without_rows(gpu):
    layer = pm.nn.Linear(96, 19).to(gpu, torch.float16).eval()
    with torch.no_grad():
        assert layer(sample(gpu, 0, 96, torch.float16)).feats.shape == (0, 19)


@HALF
def test_a_linear_layer_in_a_captured_network(gpu, dtype):
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 96, 3), pm.nn.ReLU(), pm.nn.Linear(96, 19), pm.nn.Linear(19, 5, bias=False))
    net = strange(net).to(gpu, dtype)
    fast = pm.capture(net, sample(gpu, 9000, 4, dtype), max_voxels=9500, buckets=[3000, 9500], margin=27.0).ready()
    for seed, count in enumerate((9000, 17, 3001, 9500, 2999)):
        x = sample(gpu, count, 4, dtype, seed=seed)
        with torch.no_grad():
            want = net(x).feats
        assert_close(fast(x.feats, x.coords).feats, want, scale=2 * rms(want.double()))
    assert fast.replays == 5 and not fast.fallbacks


COUNT, EXTENT = 80_000, 80
"""More than 528 tiles of 128 outputs, also where their number is rounded, with some dozen entries each."""


def tile_of(x, w):
    """The default one of the convolution."""
    found, _ = kernel_map(x.geometry, Relation.of(3, 3))
    told = lower_statement(parse(CONV), {"map": FORMS["compacted"].storage_form})
    (parts,) = FORMS["compacted"].arrays(found)
    arrays = {name: parts[array.local] for name, array in told.arrays.items()}
    (step,) = told.steps
    operands = {"x": x.feats, "w": w.view(w.shape[0], -1, w.shape[-1]), **arrays}
    p = Problem.of(step, operands, (len(x), w.shape[0]))
    return lowered.tile_of(p.bound, p.operands)


@pytest.fixture(scope="module")
def sliced():
    """Features of 96 channels, a weight and a residual that both halves hold, and the product by torch's libraries."""
    gpu = torch.device("cuda", torch.cuda.device_count() - 1)
    x = sample(gpu, COUNT, 96, torch.bfloat16, EXTENT)
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(96, 3, 3, 3, 96, generator=generator).div(30).to(gpu, torch.bfloat16)
    residual = torch.randn(COUNT, 96, generator=generator).to(gpu, torch.bfloat16)
    with torch.no_grad():
        want = pm.ops.conv(x.to(torch.float64), w.double(), dataflow="explicit-gemm").feats
    return x, w, residual, want


@HALF
@pytest.mark.parametrize("epilogue", ["none", "shift", "residual", "all"])
def test_a_convolution_in_slices(sliced, epilogue, dtype):
    x, w, residual, want = sliced
    x, w, residual = x.to(dtype), w.to(dtype), residual.to(dtype)
    assert tile_of(x, w).epilogue_subtiles == 4
    scale, shift = torch.linspace(0.5, 2, 96, device=x.device), torch.linspace(-1, 1, 96, device=x.device)
    given = {
        "none": {},
        "shift": {"shift": shift},
        "residual": {"residual": residual, "activation": "relu"},
        "all": {"scale": scale, "shift": shift, "residual": residual, "activation": "relu"},
    }[epilogue]
    want = want * given["scale"] if "scale" in given else want
    want = want + given.get("shift", 0) + given.get("residual", torch.zeros_like(want)).double()
    want = want.relu() if given.get("activation") else want
    with torch.no_grad():
        # Triton's door, then the prepared launch.
        for _ in range(2):
            got = pm.ops.conv(x, w, epilogue=pm.ops.Epilogue(**given) if given else None)
            assert_close(got.feats, want, dtype=dtype, scale=2 * rms(want))
