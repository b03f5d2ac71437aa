"""What runs on a CPU runs on a GPU, with the same numbers: operators, networks, streams, devices, copies, compilation.

Needs pytest and no plugin of it, nothing of the other tests: `pytest --noconftest tests/gpu` runs where hypothesis is
not installed. The last GPU is used, so that a machine with several shows whether anything insists on the first.
"""

import copy
import functools
import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader, Dataset
from waits import wait_for_background

import pumice as pm
from pumice.coords import build
from pumice.data import street_scene
from pumice.engine import train_pass
from pumice.errors import DeviceError
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.testing import assert_close, random_tensor, reference_conv

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CROSS = ((0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 2, 0), (0, 0, -3))


@pytest.fixture
def gpu():
    """The last GPU."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


def weight(*shape):
    """Fixed random numbers in float64, scaled so that results are of order one."""
    values = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return values / (values[0].numel() ** 0.5)


def sample(dtype=torch.float64, device="cpu", channels=12, count=3000):
    return random_tensor(count, channels, batch_size=3, seed=1, dtype=dtype, device=device)


def level(x, kernel=2):
    """The coarser level that a convolution of stride 2 would make, holding the pooled features."""
    return pm.ops.avg_pool(x, kernel, stride=2)


# name: (function of (x, w), shape of w). Everything is made of x, so that it lies on x's device.
OPERATORS = {
    "conv k3": (pm.ops.conv, (10, 3, 3, 3, 12)),
    "conv k1": (pm.ops.conv, (10, 1, 1, 1, 12)),
    "conv k2 even": (pm.ops.conv, (10, 2, 2, 2, 12)),
    "conv k3 odd channels": (lambda x, w: pm.ops.conv(x.map(lambda f: f[:, :7]), w), (5, 3, 3, 3, 7)),
    "conv k3 dilated": (lambda x, w: pm.ops.conv(x, w, dilation=(1, 2, 3)), (10, 3, 3, 3, 12)),
    "conv k2 s2 floor_unique": (lambda x, w: pm.ops.conv(x, w, stride=2), (10, 2, 2, 2, 12)),
    "conv k3 s2 floor_unique": (lambda x, w: pm.ops.conv(x, w, stride=2), (10, 3, 3, 3, 12)),
    "conv k3 s2 support": (lambda x, w: pm.ops.conv(x, w, stride=2, padding=1), (10, 3, 3, 3, 12)),
    "conv k3 dilating": (lambda x, w: pm.ops.conv(x, w, out="support"), (10, 3, 3, 3, 12)),
    "conv k311 s211": (lambda x, w: pm.ops.conv(x, w, stride=(2, 1, 1), padding=0), (10, 3, 1, 1, 12)),
    "conv given": (lambda x, w: pm.ops.conv(x, w, stride=2, out=level(x)), (10, 3, 3, 3, 12)),
    "conv offsets": (lambda x, w: pm.ops.conv(x, w, offsets=CROSS), (10, 5, 12)),
    "conv groups": (lambda x, w: pm.ops.conv(x, w, groups=3), (9, 3, 3, 3, 4)),
    "conv depthwise": (lambda x, w: pm.ops.conv(x, w, groups=12), (12, 3, 3, 3, 1)),
    "transposed k2 s2": (lambda x, w: pm.ops.conv_transpose(x, w, stride=2), (10, 2, 2, 2, 12)),
    "transposed k3 s2 p1": (lambda x, w: pm.ops.conv_transpose(x, w, stride=2, padding=1), (10, 3, 3, 3, 12)),
    "inverse k2 s2": (lambda x, w: pm.ops.conv_inverse(level(x), w, x, stride=2), (10, 2, 2, 2, 12)),
    "inverse k3 s2": (lambda x, w: pm.ops.conv_inverse(level(x, 3), w, x, stride=2), (10, 3, 3, 3, 12)),
    "max pool": (lambda x, w: pm.ops.max_pool(x, 2) * w, (1, 12)),
    "max pool k3 s1": (lambda x, w: pm.ops.max_pool(x, 3, stride=1) * w, (1, 12)),
    "avg pool": (lambda x, w: pm.ops.avg_pool(x, 3, stride=2) * w, (1, 12)),
    "sum pool": (lambda x, w: pm.ops.sum_pool(x, 2) * w, (1, 12)),
    "global max pool": (lambda x, w: pm.ops.global_max_pool(x) * w, (1, 12)),
    "global avg pool": (lambda x, w: pm.ops.global_avg_pool(x) * w, (1, 12)),
    "global sum pool": (lambda x, w: pm.ops.global_sum_pool(x) * w, (1, 12)),
    "trilinear": (lambda x, w: pm.interpolate(x * w, places(x)), (1, 12)),
    "trilinear of a coarse level": (lambda x, w: pm.interpolate(level(x * w), places(x)), (1, 12)),
    "nearest": (lambda x, w: pm.interpolate(x * w, places(x), mode="nearest"), (1, 12)),
    "to dense": (lambda x, w: (x * w).to_dense((20, 20, 20)), (1, 12)),
    "union": (lambda x, w: x + pm.ops.max_pool(x, 3, stride=1, out="support") * w, (1, 12)),
    "prune": (lambda x, w: (x * w).prune(x.coords[:, 1] % 2 == 0), (1, 12)),
    "group norm": (lambda x, w: pm.nn.GroupNorm(3, 12, affine=False)(x * w), (1, 12)),
}


def places(x):
    """Positions (batch, axes...) between voxels, the same on every device."""
    shift = torch.linspace(0, 3, 3 * len(x), dtype=torch.float64).reshape(len(x), 3)
    return torch.cat([x.coords[:, :1].double(), x.coords[:, 1:] + shift.to(x.device)], dim=1)


def outcome(name, device, dtype):
    """(coordinates, result, gradient of the features, gradient of the weight) from operands of `dtype`."""
    function, shape = OPERATORS[name]
    kept = torch.float64 if device == "cpu" else dtype
    x = sample(dtype).to(device, kept).requires_grad_()
    w = weight(*shape).to(dtype).to(device, kept).requires_grad_()
    y = function(x, w)
    coords, values = (y.coords.cpu(), y.feats) if isinstance(y, pm.SparseTensor) else (None, y)
    dy = torch.randn(values.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    values.backward(dy.to(device, values.dtype))
    return coords, values, x.feats.grad, w.grad


@EVERY_DTYPE
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(gpu, name, dtype):
    """Against the same operator in float64 on the CPU, which is tested against the scalar oracle."""
    want = outcome(name, "cpu", dtype)
    got = outcome(name, gpu, dtype)
    assert (want[0] is None) or torch.equal(want[0], got[0])
    assert all(t.device == gpu and t.dtype == dtype for t in got[1:])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert_close(a, b, dtype=dtype)


@EVERY_DTYPE
def test_the_reference_agrees(gpu, dtype):
    x, w = sample(dtype, gpu), weight(10, 3, 3, 3, 12).to(gpu, dtype)
    bias = weight(10, 1)[:, 0].to(gpu, dtype)
    assert_close(pm.ops.conv(x, w, bias).cpu(), reference_conv(x, w, bias), dtype=dtype)
    strided = pm.ops.conv(x, w, bias, stride=2, padding=1)
    assert_close(strided.cpu(), reference_conv(x, w, bias, stride=2, padding=1), dtype=dtype)


RELATIONS = {
    "same": pm.Relation.of(3, 3),
    "support": pm.Relation.of(3, 3, stride=2, padding=1),
    "floor_unique": pm.Relation.of(3, 2, stride=2),
    "dilated": pm.Relation.of(3, (3, 1, 5), dilation=(1, 1, 2)),
    "transposed": pm.Relation.of_transposed(3, 3, stride=2),
    "offsets": pm.Relation.of_offsets(3, CROSS),
}


@pytest.mark.parametrize("name", RELATIONS)
def test_maps_are_the_same(gpu, name):
    x = sample()
    (a, one), (b, other) = (pm.kernel_map(t.geometry, RELATIONS[name]) for t in (x, x.to(gpu)))
    assert torch.equal(one.coords, other.coords.cpu()) and (one.stride, one.bounds) == (other.stride, other.bounds)
    for p, q in zip(a.pairs(), b.pairs(), strict=True):
        assert torch.equal(p, q.cpu())
    assert torch.equal(a.rows(), b.rows().cpu()) and torch.equal(a.masks(), b.masks().cpu())


@EVERY_DTYPE
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "first"])
def test_voxelize(gpu, reduce, dtype):
    rng = torch.Generator().manual_seed(0)
    points, batch = 20 * torch.rand(5000, 3, generator=rng) - 10, torch.randint(0, 3, (5000,), generator=rng)
    feats = torch.randn(5000, 6, generator=rng).to(dtype)
    want = pm.voxelize(points, feats.double(), 0.7, batch, origin="min", reduce=reduce)
    leaf = feats.to(gpu).requires_grad_()
    got = pm.voxelize(points.to(gpu), leaf, 0.7, batch.to(gpu), origin="min", reduce=reduce)
    assert torch.equal(got.coords.cpu(), want.coords) and torch.equal(got.inverse.cpu(), want.inverse)
    assert got.dtype == dtype
    assert_close(got.feats, want.feats, dtype=dtype)
    back = pm.devoxelize(got, points.to(gpu), batch.to(gpu), mode="trilinear")
    assert_close(back, pm.devoxelize(want, points, batch, mode="trilinear"), dtype=dtype)
    assert_close(pm.devoxelize(got), pm.devoxelize(want), dtype=dtype)
    got.feats.sum().backward()
    assert torch.isfinite(leaf.grad).all()


# Networks
def unet(device, dtype=torch.float32):
    torch.manual_seed(0)
    return MinkUNet(12, 5, 0.25).to(device, dtype)


@functools.lru_cache(maxsize=1)
def street():
    """Voxels of two small streets: large enough that the coarsest level has voxels to normalise over."""
    scans = [street_scene(seed, beams=16, azimuths=96) for seed in range(2)]
    return pm.collate([pm.voxelize(torch.from_numpy(scan.xyz), size=0.5) for scan in scans])


def scene(dtype=torch.float32, device="cpu"):
    """The streets, on coordinates of their own, with random features."""
    coords = street().coords.clone()
    feats = torch.randn(len(coords), 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return pm.SparseTensor(feats.to(device, dtype), coords.to(device))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_minkunet(gpu, training):
    """fp32 on the GPU against float64 on the CPU: rms error over rms, logits and gradients."""
    net, double = unet(gpu).train(training), unet("cpu", torch.float64).train(training)
    x, wide = scene(torch.float32, gpu), scene(torch.float64)
    got, want = net(x).feats, double(wide).feats
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(2))
    got.backward(dy.to(gpu))
    want.backward(dy.double())
    error = (got.detach().cpu().double() - want.detach()).norm() / want.detach().norm()
    assert error < 1e-5, f"logits: {error:.3g}"
    grads = [torch.cat([p.grad.cpu().double().flatten() for p in n.parameters()]) for n in (net, double)]
    error = (grads[0] - grads[1]).norm() / grads[1].norm()
    assert error < 1e-3, f"gradients: {error:.3g}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_training_under_autocast(gpu, dtype):
    net, x = unet(gpu), scene(torch.float32, gpu)
    goal = torch.randint(0, 5, (len(x),), generator=torch.Generator().manual_seed(0)).to(gpu)
    optimizer = torch.optim.AdamW(net.parameters(), 4e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    losses = []
    for _ in range(12):
        with torch.autocast("cuda", dtype=dtype):
            y = net(x)
        assert y.dtype == dtype
        loss = torch.nn.functional.cross_entropy(y.feats.float(), goal)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(torch.isfinite(p).all() for p in net.parameters())
    first = torch.nn.functional.cross_entropy(unet("cpu")(scene(torch.float32)).feats, goal.cpu()).item()
    assert abs(losses[0] - first) < 0.02 * first


def test_centerpoint(gpu):
    torch.manual_seed(0)
    net = CenterPointBackbone(5).eval()
    x = random_tensor(500, 5, extent=(40, 200, 200))
    x = pm.SparseTensor(x.feats, x.coords, spatial_shape=(41, 200, 200))
    with torch.no_grad():
        want, got = net.double()(x.double()), net.float().to(gpu)(x.to(gpu))
    assert torch.equal(want.coords, got.coords.cpu())
    assert_close(got.to_dense(), want.to_dense(), dtype=torch.float32)


def test_no_voxel(gpu):
    x = pm.SparseTensor(torch.zeros(0, 12, device=gpu), torch.zeros(0, 4, dtype=torch.int32, device=gpu), batch_size=2)
    for name, (function, shape) in OPERATORS.items():
        y = function(x.detach().requires_grad_(), weight(*shape).float().to(gpu).requires_grad_())
        y = y.feats if isinstance(y, pm.SparseTensor) else y
        assert torch.isfinite(y).all() and y.device == gpu, name
        y.sum().backward()
    net = unet(gpu)
    y = net(x)
    assert y.feats.shape == (0, 5)
    y.feats.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    assert len(pm.voxelize(torch.zeros(0, 3, device=gpu), size=0.1)) == 0


def test_one_voxel(gpu):
    x = pm.SparseTensor(torch.ones(1, 12, device=gpu), torch.zeros(1, 4, dtype=torch.int32, device=gpu))
    y = unet(gpu)(x)
    assert torch.isfinite(y.feats).all()


# Streams and devices
def test_another_stream(gpu):
    """Maps and features made late on a stream of their own: nothing may look at them from the default one."""
    net = unet(gpu).eval()
    host = scene(torch.float32).pin_memory()
    with torch.no_grad():
        want = net(host.to(gpu)).feats
        stream = torch.cuda.Stream(gpu)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # some 25 ms, so that the copies below are late
            x = host.to(gpu, non_blocking=True)
            got = net(x).feats
        stream.synchronize()
    assert torch.equal(got, want)


def test_maps_of_one_stream_serve_another(gpu):
    x, w = sample(torch.float32, gpu), weight(10, 3, 3, 3, 12).float().to(gpu)
    want = pm.ops.conv(sample(torch.float32, gpu), w).feats
    stream = torch.cuda.Stream(gpu)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(gpu))
        torch.cuda._sleep(50_000_000)
        pm.kernel_map(x.geometry, pm.Relation.of(3, 3))
    torch.cuda.default_stream(gpu).wait_stream(stream)
    assert torch.equal(pm.ops.conv(x, w).feats, want)


def test_the_current_device_does_not_matter(gpu):
    """Everything stays on x's device, whichever is current."""
    with torch.cuda.device(0):
        net, x = unet(gpu), scene(torch.float32, gpu)
        y = net(x)
        y.feats.sum().backward()
        voxels = pm.voxelize(torch.rand(100, 3, device=gpu), size=0.1)
        assert torch.cuda.current_device() == 0
    assert x.coords.device == y.feats.device == voxels.feats.device == voxels.inverse.device == gpu
    assert all(p.grad.device == gpu for p in net.parameters())


def test_devices_do_not_mix(gpu):
    x, w = sample(torch.float32, gpu), weight(10, 3, 3, 3, 12).float()
    with pytest.raises(DeviceError, match="weight is on cpu, x is on cuda"):
        pm.ops.conv(x, w)
    with pytest.raises(DeviceError, match="feats are on cuda.*coords on cpu"):
        pm.SparseTensor(x.feats, x.coords.cpu())
    with pytest.raises(DeviceError):
        pm.ops.conv(x, w.to(gpu), stride=1, out=sample(torch.float32))
    with pytest.raises(DeviceError):
        pm.voxelize(torch.rand(9, 3, device=gpu), size=1.0, batch=torch.zeros(9, dtype=torch.int64))
    if torch.cuda.device_count() > 1:
        with pytest.raises(DeviceError, match="cuda:0"):
            pm.ops.conv(x, w.to("cuda:0"))


# Copies
class Clouds(Dataset):
    """Six clouds, made in the worker."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return random_tensor(50 + index, 12, seed=index)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_pinned_memory(gpu, workers):
    loader = DataLoader(Clouds(), batch_size=3, num_workers=workers, collate_fn=pm.collate, pin_memory=True)
    net = unet(gpu).eval()
    for part, host in enumerate(loader):
        assert host.is_pinned() and host.batch_size == 3
        x = host.to(gpu, non_blocking=True)
        want = pm.collate([Clouds()[3 * part + i] for i in range(3)])
        assert x.device == gpu and torch.equal(x.coords.cpu(), want.coords) and torch.equal(x.feats.cpu(), want.feats)
        assert torch.isfinite(net(x).feats).all()


def test_there_and_back(gpu):
    x = pm.voxelize(torch.rand(500, 3), size=0.2)
    y = x.to(gpu)
    assert y.device == y.coords.device == y.inverse.device == gpu and y.stride == x.stride
    z = y.cpu()
    assert torch.equal(x.feats, z.feats) and torch.equal(x.coords, z.coords) and torch.equal(x.inverse, z.inverse)
    assert y.to(gpu).geometry is y.geometry
    half = x.to(gpu, torch.float16)
    assert half.dtype == torch.float16 and half.device == gpu
    assert x.cuda(gpu).device == x.cuda(gpu.index).device == gpu


@pytest.mark.parametrize("there", [True, False], ids=["to the GPU", "from the GPU"])
def test_moving_keeps_maps(gpu, monkeypatch, there):
    start, end = (torch.device("cpu"), gpu) if there else (gpu, torch.device("cpu"))
    x, net = scene(torch.float32, start), unet(start).eval()
    with torch.no_grad():
        want = net(x).feats

        def refuse(*args):
            raise AssertionError("a map was built again")

        monkeypatch.setattr(build, "_build", refuse)
        moved = x.to(end)
        assert len(moved.geometry.maps) == len(x.geometry.maps)
        got = net.to(end)(moved).feats
    assert (got.cpu() - want.cpu()).norm() < 1e-5 * want.norm()


def test_memory_comes_back(gpu):
    """No cycle of references holds device memory until the next garbage collection."""
    net = unet(gpu)
    net(scene(torch.float32, gpu)).feats.sum().backward()  # gradients, workspaces of the BLAS
    net.zero_grad(set_to_none=False)
    wait_for_background()
    gc.collect()
    torch.cuda.synchronize(gpu)
    before = torch.cuda.memory_allocated(gpu)
    gc.disable()
    try:
        for _ in range(2):
            x = scene(torch.float32, gpu)
            y = net(x)
            y.feats.sum().backward()
            del x, y
            # Less where a bounded cache lets go of what earlier tests left in it.
            assert torch.cuda.memory_allocated(gpu) <= before
    finally:
        gc.enable()


# Determinism
def one_step(device, dtype):
    """Logits and every gradient of a training step from scratch, maps included."""
    net, x = unet(device, dtype), scene(dtype, device).requires_grad_()
    y = net(x)
    y.feats.float().square().sum().backward()
    return [y.feats.detach(), x.feats.grad, *(p.grad for p in net.parameters())]


@pytest.fixture
def deterministic(monkeypatch):
    """The switch of torch, and what the BLAS wants to see with it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@EVERY_DTYPE
def test_two_runs_are_equal_bit_for_bit(gpu, dtype, deterministic):
    first, second = one_step(gpu, dtype), one_step(gpu, dtype)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_deterministic_switch(gpu, deterministic, name):
    """Nothing refuses to run under it, and two runs are equal."""
    first, second = (outcome(name, gpu, torch.float32) for _ in range(2))
    for a, b in zip(first[1:], second[1:], strict=True):
        assert torch.equal(a, b)


def test_the_deterministic_switch_on_a_network(gpu, deterministic):
    first, second = one_step(gpu, torch.float32), one_step(gpu, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    points = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)).to(gpu).requires_grad_()
    x = pm.voxelize(points, size=0.2)
    pm.devoxelize(x, points.detach(), mode="trilinear").sum().backward()
    assert torch.isfinite(points.grad).all()


# Training: a convolution with the norm, the residual and the ReLU behind it
norm_of = functools.partial(pm.nn.BatchNorm, eps=0.01)

UNITS = {
    "norm": lambda: pm.nn.Sequential(pm.nn.Conv3d(12, 32, 3, bias=False), norm_of(32)),
    "norm and activation": lambda: pm.nn.Sequential(pm.nn.Conv3d(12, 40, 3), norm_of(40), pm.nn.ReLU()),
    "mean of all": lambda: pm.nn.Sequential(pm.nn.Conv3d(12, 32, 3), norm_of(32, momentum=None), pm.nn.ReLU()),
    "nothing known": lambda: pm.nn.Sequential(pm.nn.Conv3d(12, 7, 3), norm_of(7, track_running_stats=False)),
    "strided": lambda: pm.nn.Sequential(pm.nn.Conv3d(12, 64, 2, stride=2), norm_of(64), pm.nn.ReLU()),
    "block": lambda: pm.nn.ResidualBlock(12, 12, norm=norm_of),
    "block, shortcut": lambda: pm.nn.ResidualBlock(12, 32, norm=norm_of, bias=True),
}
CAST = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Rounding, and the gradients of what a ReLU lets through or not by it.
WITHIN = {"float32": (2e-5, 5e-3), "float16": (1e-2, 0.1), "bfloat16": (5e-2, 0.3)}


def in_training(name, device, count, cast="float32", kept=torch.float32, x=None, how=lambda net: net):
    """By their names the result, gradients, and what norms have kept, of two passes. how: what is called for a
    network."""
    torch.manual_seed(0)
    net = UNITS[name]().to(device, kept).train()
    called = how(net)
    x = sample(torch.float32, device, count=count) if x is None else x
    x = x.replace(x.feats.to(kept).requires_grad_())
    for _ in range(2):
        with torch.autocast(device.type, CAST[cast] or torch.bfloat16, enabled=CAST[cast] is not None):
            y = called(x)
        grad = torch.randn(y.feats.shape, generator=torch.Generator().manual_seed(2))
        y.feats.backward(grad.to(device, y.dtype))
    found = {f"gradient of {n}": p.grad for n, p in net.named_parameters()}
    return {"y": y.feats.detach(), "gradient of x": x.feats.grad, **found, **dict(net.named_buffers())}


@pytest.fixture
def steps(monkeypatch):
    """How many layers each stretch of a program has that is one node of autograd."""
    seen, run = [], train_pass.Started.run
    monkeypatch.setattr(train_pass.Started, "run", lambda own, x: seen.append(len(own.plan.layers)) or run(own, x))
    return seen


def off(got, want):
    """The error over what there should be, of everything but counters."""
    return {
        name: float((got[name].cpu().double() - value.double()).norm() / (value.double().norm() + 1))
        for name, value in want.items()
        if value.is_floating_point()
    }


@pytest.mark.parametrize("cast", CAST)
@pytest.mark.parametrize("count", [1, 2, 5000])
@pytest.mark.parametrize("name", UNITS)
def test_a_step_of_convolution_and_norm(gpu, name, count, cast, steps):
    """Against float64 on a CPU, and no further off than modules one by one on the GPU."""
    want = in_training(name, torch.device("cpu"), count, kept=torch.float64)
    other = in_training(name, gpu, count, cast)
    assert not steps
    got = in_training(name, gpu, count, cast, how=pm.compile)
    # The sum of a block with features that autocast does not cast is of two dtypes.
    assert count < 5000 or (name == "block" and CAST[cast] is not None) or len(steps) == 2
    assert all(got[n].dtype == other[n].dtype and got[n].device == gpu for n in want)
    assert all(torch.equal(got[n].cpu(), want[n]) for n in want if not want[n].is_floating_point())
    # Of biases that a norm takes away again others have rounding.
    biases = [n for n in got if n in ("gradient of 0.bias", "gradient of body.0.bias", "gradient of body.3.bias")]
    assert len(got["y"]) < 2 or not steps or not any(got[n].any() for n in biases)
    mine, theirs, (near, let) = off(got, want), off(other, want), WITHIN[cast]
    for n, error in mine.items():
        assert error < (let if n.startswith("gradient") else near) + 1.5 * theirs[n], f"{n}: {error}, {theirs[n]}"


@pytest.mark.parametrize("cast", CAST)
@pytest.mark.parametrize("name", UNITS)
def test_steps_are_equal_bit_for_bit(gpu, name, cast, deterministic, steps):
    first, second = (in_training(name, gpu, 5000, cast, how=pm.compile) for _ in range(2))
    assert (steps or name == "block") and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.parametrize("name", ["norm and activation", "block, shortcut"])
def test_a_step_on_another_stream(gpu, name, deterministic, steps):
    """What programs leave for each other is another stream's own."""
    host = sample(torch.float32, count=5000).pin_memory()
    want = in_training(name, gpu, 5000, x=host.to(gpu), how=pm.compile)
    stream = torch.cuda.Stream(gpu)
    torch.cuda.synchronize(gpu)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        got = in_training(name, gpu, 5000, x=host.to(gpu, non_blocking=True), how=pm.compile)
        # Work of the default stream meanwhile, with the same kernels.
        with torch.cuda.stream(torch.cuda.default_stream(gpu)):
            beside = in_training(name, gpu, 5000, x=host.to(gpu), how=pm.compile)
    torch.cuda.synchronize(gpu)
    assert steps and all(torch.equal(got[n], want[n]) and torch.equal(beside[n], want[n]) for n in want)


def test_vectors_of_a_norm_that_lie_otherwise(gpu, steps):
    """A scale and statistics that are columns are read and written there, and nothing beside them."""
    x = sample(torch.float32, gpu, count=500)
    torch.manual_seed(0)
    conv, table = pm.nn.Conv3d(12, 32, 3).to(gpu), torch.rand(32, 2).to(gpu) + 0.5
    found = []
    for columns in (True, False):
        norm, kept = norm_of(32).to(gpu), torch.stack([torch.zeros(32), torch.ones(32)], 1).to(gpu)
        norm.weight = torch.nn.Parameter(table.clone()[:, 0] if columns else table[:, 0].clone())
        norm.running_mean = kept[:, 0] if columns else kept[:, 0].clone()
        conv.zero_grad()
        y = pm.compile(pm.nn.Sequential(conv, norm, pm.nn.ReLU()))(x).feats
        y.square().sum().backward()
        assert norm.weight.stride() == ((2,) if columns else (1,)) and bool((kept[:, 1] == 1).all())
        found.append((y.detach(), norm.running_mean, norm.weight.grad, conv.weight.grad))
    # Kernels that are started with addresses take vectors without gaps.
    assert len(steps) == 1
    for got, want in zip(*found, strict=True):
        assert_close(got, want, dtype=torch.float32, scale=float(want.abs().max()))


def test_a_norm_that_was_left_behind_is_named(gpu):
    x, norm = sample(torch.float32, gpu, count=50), norm_of(32)
    net = pm.nn.Sequential(pm.nn.Conv3d(12, 32, 3).to(gpu), norm)
    with pytest.raises(DeviceError, match="the norm is on cpu, its input on cuda"):
        net(x)
    counter = norm.num_batches_tracked
    norm.to(gpu).num_batches_tracked = counter.cpu()
    with pytest.raises(DeviceError, match="num_batches_tracked is on cpu, the input on cuda"):
        net(x)


# Compilation
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(gpu, backend):
    torch._dynamo.reset()
    net, x = unet(gpu).eval(), scene(torch.float32, gpu)
    pm.prepare(net, x)
    with torch.no_grad():
        got = torch.compile(net, fullgraph=True, backend=backend)(x)
        want = net(x)
    assert got.device == gpu and torch.equal(got.coords, want.coords)
    assert (got.feats - want.feats).norm() < 1e-5 * want.feats.norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training(gpu, backend):
    """A smaller network: Inductor compiles the backward pass of a whole MinkUNet for minutes."""
    torch._dynamo.reset()
    x = scene(torch.float32, gpu)
    grads = []
    for wrap in (lambda n: n, lambda n: torch.compile(n, fullgraph=True, backend=backend)):
        torch.manual_seed(0)
        net = pm.nn.Sequential(pm.nn.Conv3d(12, 16, 2, stride=2), pm.nn.BatchNorm(16), pm.nn.ResidualBlock(16, 8)).to(
            gpu
        )
        pm.prepare(net, x)
        wrap(net)(x).feats.square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert (grads[0] - grads[1]).norm() < 1e-3 * grads[0].norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_finds_maps(gpu, backend):
    """Forward and backward on coordinates that nobody has met, of three sizes, with extents told and not."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = pm.nn.Sequential(pm.nn.Conv3d(12, 16, 2, stride=2), pm.nn.BatchNorm(16), pm.nn.ResidualBlock(16, 8)).to(gpu)
    twin = copy.deepcopy(net)
    counter = CompileCounterWithBackend(backend)
    fast = torch.compile(net, fullgraph=True, backend=counter, dynamic=True)
    for told in ({}, {"spatial_shape": (4096,) * 3, "batch_size": 2}):
        counter.frame_count = 0
        for seed in range(3):
            x = random_tensor(400 + 900 * seed, 12, batch_size=2, seed=seed, device=gpu)
            got, want = (f(pm.SparseTensor(x.feats, x.coords, **told)) for f in (fast, twin))
            assert torch.equal(got.coords, want.coords)
            assert (got.feats - want.feats).norm() < 1e-4 * want.feats.norm()
            got.feats.square().sum().backward()
            want.feats.square().sum().backward()
        assert counter.frame_count <= 1
    grads = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (net, twin)]
    assert (grads[0] - grads[1]).norm() < 1e-3 * grads[1].norm()


@pytest.mark.filterwarnings("ignore")
def test_an_exported_network(gpu, tmp_path):
    model = unet(gpu).eval()
    x = scene(torch.float32, gpu)
    module = pm.exportable(model)
    program = torch.export.export(module, (x.coords, x.feats), dynamic_shapes=module.dynamic_shapes)
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    half = len(x) // 2
    for rows in (slice(None), slice(0, half)):
        coords, feats = x.coords[rows].contiguous(), x.feats[rows].contiguous()
        with torch.no_grad():
            got, want = loaded(coords, feats), model(pm.SparseTensor(feats, coords))
        assert torch.equal(got[0], want.coords)
        assert (got[1] - want.feats).norm() < 1e-4 * want.feats.norm()


# The main job
def test_the_main_job(gpu, tmp_path):
    """Train, evaluate, time and draw on the GPU, then run the checkpoint on the CPU."""
    pytest.importorskip("plotly")
    from pumice.cli import evaluate, segment
    from pumice.cli.training import Recipe
    from pumice.label import checkpoint

    scans = [street_scene(seed, beams=16, azimuths=96) for seed in range(3)]
    for precision in ("fp32", "bf16", "fp16"):
        job = segment.Job(tmp_path / precision, gpu, 0.5, 0.1, Recipe(4, precision=precision))
        result = segment.run(scans[:2], scans[2:], job, lambda step, total: None)
        assert result.steps[-1].loss < result.steps[0].loss and result.report.is_file()
        bare = [replace(scans[2], labels=None)]
        again = segment.apply(bare, replace(job, checkpoint=result.checkpoint, out=tmp_path / "again"))
        assert again.timing.voxels > 0
    classes = []
    for device in (gpu, torch.device("cpu")):
        net, task = checkpoint.load(tmp_path / "fp32" / "checkpoint.safetensors", device)
        classes.append(evaluate.predict(net, scans[2], task, device, "fp32"))
    assert (classes[0] == classes[1]).mean() > 0.999


def test_labels_of_a_captured_network(gpu, tmp_path):
    """Read ahead by two processes, captured, with a larger scan later; nearly all points as on the CPU."""
    from pumice.label import checkpoint
    from pumice.label.checkpoint import Task

    scans = [street_scene(seed, beams=16, azimuths=width) for seed, width in enumerate((96, 96, 400, 96))]
    task = Task.of(scans, scans[0].label_set, 0.5, 0.1)
    path = checkpoint.save(tmp_path / "net.safetensors", task.network(), task)
    for number, scan in enumerate(scans):
        np.savez(tmp_path / f"{number}.npz", xyz=scan.xyz, feats=scan.feats)
    found = {}
    for device in ("cuda", "cpu"):
        labeller = pm.Labeller(path, tmp_path / device, str(tmp_path), "npz", device, readers=2)
        states = [one.state for one in labeller.label(tmp_path / f"{number}.npz" for number in range(4))]
        assert states == ["labelled"] * 4
        found[device] = [np.load(tmp_path / device / f"{number}.npz")["labels"] for number in range(4)]
    for mine, other in zip(found["cuda"], found["cpu"], strict=True):
        assert (mine == other).mean() > 0.99
