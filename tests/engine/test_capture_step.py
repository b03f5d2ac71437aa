"""Captured steps of training do what eager ones do: losses, gradients, statistics, updates, and nothing where they must
not.

On a CPU the static program runs call by call; tests/gpu/test_capture_step.py has the graphs.
"""

import copy
import warnings
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from emulated import Gpu, emulated, on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import Asks, Dense, Layers, Levels, OneLevel, check_casts, smooth
from programs import Maker, flat
from torch import nn
from torch.nn import functional
from wide import beyond

import pumice as pm
from pumice.coords import CoordBuffer, Geometry
from pumice.coords.capacity import BufferedState, FixedCapacities
from pumice.engine import train_program
from pumice.engine.train_program import GradientBuffers, Targets
from pumice.errors import (
    CaptureError,
    CoordinateError,
    DeviceError,
    DtypeError,
    GeometryError,
    OptionError,
    ShapeError,
)
from pumice.nn.conv import Convolution
from pumice.ops import row_mean, row_sum, tensor
from pumice.ops.tensor import row_by_row, unchecked_tensor
from pumice.testing import random_cloud

pytestmark = pytest.mark.usefixtures("seeded")

SHAPE = (12, 11, 10)


def scene(count, seed=0, batch=2, extent=8, shape=None, dtype=torch.float64):
    """Features and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    coords = torch.zeros(0, 4, dtype=torch.int32)
    if count:
        coords = random_cloud(count, 3, extent=extent, batch_size=min(batch, count), seed=seed)
    x = pm.SparseTensor(torch.randn(count, 4, generator=generator).to(dtype), coords, 1, shape, batch)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return x, torch.where(torch.rand(count, generator=generator) < 0.2, -100, labels)


def by_class(y, labels):
    return functional.cross_entropy(y.feats, labels)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "at once": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
}
"""The last, as all of torch's do on GPUs, takes all tensors at once; with nesterov it writes into gradients."""


class Pair:
    """A network that is trained by captured steps, and a copy that takes the same ones eagerly."""

    def __init__(self, net, loss, example, optimizer="momentum", ready=True, **options):
        self.net, self.loss, self.other = net, loss, copy.deepcopy(net)
        self.optimizer = OPTIMIZERS[optimizer](net.parameters())
        self.others = OPTIMIZERS[optimizer](self.other.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.step = pm.capture_step(net, loss, self.optimizer, *example, **options)
            if ready:
                self.step.ready()

    def follow(self):
        """The copy is what the network is."""
        self.other.load_state_dict(self.net.state_dict())
        self.others.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def eager(self, x, *targets):
        self.others.zero_grad()
        plain = [t.values if isinstance(t, pm.PerItemTarget) else t for t in targets]
        value = self.loss(self.other(x), *plain)
        value.backward()
        self.others.step()
        return value.detach()

    def both(self, *given, limit=1e-9):
        """One step of both; they stay the same."""
        self.follow()
        want, got = self.eager(*given), self.step(*given)
        assert not got.requires_grad
        close(got, want, limit)
        for (name, a), b in zip(self.net.named_parameters(), self.other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                close(a.grad, b.grad, limit, name)
        for (name, a), b in zip(self.net.state_dict().items(), self.other.state_dict().values(), strict=True):
            close(a, b, limit, name)
        mine, theirs = (o.state_dict()["state"] for o in (self.optimizer, self.others))
        assert mine.keys() == theirs.keys()
        for key, state in theirs.items():
            for name, value in state.items():
                close(mine[key][name], value, limit, name)
        return got


def close(got, want, limit, told=""):
    if want is None or not isinstance(want, torch.Tensor):
        assert got == want
        return
    assert got.shape == want.shape and got.dtype == want.dtype, told
    if not want.numel():
        return
    error = torch.where(got.isnan() & want.isnan(), 0.0, (got.double() - want.double()).abs()).max()
    assert float(error) <= limit * float(want.double().nan_to_num().abs().max().clamp(min=1)), (told, float(error))


def unet():
    return pm.models.MinkUNet(4, 3, 0.125).double()


def of_layers(found, labels, items):
    coarse, same = found["coarse"], found["same"]
    first = functional.cross_entropy(same.feats[:, :3], labels)
    pools = sum(((p.sum(1) - items) ** 2).mean() for p in found["items"])
    return first + 0.01 * row_mean(coarse, coarse.feats.square().sum(1)) + 1e-4 * pools


def of_levels(found, labels):
    return sum(row_mean(y, y.feats.square().mean(1)) for y in found) + functional.cross_entropy(
        found[0].feats[:, :3], labels
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_a_unet(optimizer):
    """Scenes below, at and above the edges of capacities, one after the other; none with a voxel or two."""
    example = scene(150, extent=40)
    # Of the optimizers the last one takes the whole network: what is slow are its forty layers.
    net = unet() if optimizer == "at once" else OneLevel().double()
    pair = Pair(net, by_class, example, optimizer, max_voxels=160, buckets=[60], margin=4.0)
    for seed, count in enumerate((150, 60, 61, 40, 160)):
        pair.both(*scene(count, seed, extent=40), limit=1e-8)
    assert pair.step.prepared == pair.step.capacities == (60, 160)
    assert pair.step.replays == 5 and not pair.step.fallbacks


def test_many_steps_stay_together():
    """Nothing drifts: fifteen steps without looking."""
    pair = Pair(OneLevel().double(), by_class, scene(150, extent=40), max_voxels=200, margin=4.0)
    values = []
    for seed in range(15):
        x, labels = scene(150 + seed % 3, 5 + seed % 3, extent=40)
        want, got = pair.eager(x, labels), pair.step(x, labels)
        close(got, want, 1e-3)
        values.append(float(got))
    assert sum(values[-3:]) < 0.9 * sum(values[:3])


@pytest.mark.parametrize("still", [False, True])
def test_a_step_that_seems_to_differ_is_asked_what_many_roundings_change(still, monkeypatch):
    """Before it is refused: of a ReLU that changes sides one rounding tells little."""
    step, asked = import_module("pumice.engine.train_step"), []

    def differ(names, steps, kind, more):
        asked.append((len(steps), more))
        return "the loss: much" if still or more > 1 else None

    monkeypatch.setattr(step, "steps_differ", differ)
    with pytest.raises(CaptureError, match="in the loss: much") if still else nullcontext():
        Pair(unet(), by_class, scene(60), max_voxels=100)
    assert asked == [(3, 16), (6, 1)]


def test_norms_pools_and_groups():
    net = Layers().double()
    items = pm.PerItemTarget(torch.randn(2, dtype=torch.float64))
    x, labels = scene(90)
    pair = Pair(net, of_layers, (x, labels, items), max_voxels=120, margin=4.0)
    for seed, count in enumerate((90, 120, 31)):
        pair.both(*scene(count, seed), pm.PerItemTarget(torch.randn(2, dtype=torch.float64)))
    assert pair.step.replays == 3


def test_a_relu_whose_gradient_a_hook_sees_is_called():
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 6, 3), pm.nn.BatchNorm(6), nn.ReLU(), pm.nn.Conv3d(6, 3, 3)).double()
    seen = []
    net[2].register_full_backward_hook(lambda module, given, found: seen.append(given[0].shape))
    pair = Pair(net, by_class, scene(60)[:2], max_voxels=100)
    seen.clear()
    pair.both(*scene(60, 1)[:2])
    assert len(seen) == 2


def test_all_relations():
    x, labels = scene(90, shape=SHAPE)
    pair = Pair(Levels().double(), of_levels, (x, labels), max_voxels=120, margin=4.0)
    for seed, count in enumerate((90, 120, 31)):
        pair.both(*scene(count, seed, shape=SHAPE))
    assert pair.step.replays == 3


def test_a_dense_head():
    def loss(y, wanted):
        return functional.mse_loss(y, wanted.expand_as(y))

    pair = Pair(Dense().double(), loss, (scene(60, shape=SHAPE)[0], torch.tensor(0.3, dtype=torch.float64)))
    for seed, count in enumerate((60, 100)):
        pair.both(scene(count, seed, shape=SHAPE)[0], torch.tensor(0.1 * seed, dtype=torch.float64))
    assert pair.step.replays == 2


def test_linear_maps_clear_what_an_operation_has_made_and_nothing_that_is_somebodys(monkeypatch):
    whole = scene(40)[0].geometry
    cloud = CoordBuffer(
        whole.coords, torch.tensor([25], dtype=torch.int32), whole.bounds, torch.zeros(1, dtype=torch.int32)
    )
    within = Geometry.in_buffer(cloud, whole.site, BufferedState(FixedCapacities({}), (), False, True))
    table, head = nn.Parameter(torch.randn(40, 4)), nn.Linear(4, 3)
    for rows in (table, table[:40], table.detach(), (table + 0).t().contiguous().t()):
        before = rows.detach().clone()
        y = row_by_row(unchecked_tensor(rows, within, True), head)
        assert torch.equal(rows, before) and torch.equal(y.feats[:25], head(before)[:25])
    made = table + 0
    y = row_by_row(unchecked_tensor(made, within, True), head)
    # Not a copy, and what has saved it does not complain.
    assert not made[25:].any() and torch.equal(made[:25], table[:25]) and made._version == 0
    (y._feats * torch.randn(40, 3)).sum().backward()
    assert not table.grad[25:].any() and table.grad[:25].all()
    grads = torch.autograd.grad(row_by_row(unchecked_tensor(made, within, True), head)._feats.sum(), head.bias)
    assert torch.equal(grads[0], torch.full((3,), 25.0))
    # The kernel takes rows one behind the other.
    monkeypatch.setattr(tensor, "zero_padding_rows", lambda *_: pytest.fail("columns one behind the other"))
    turned = nn.Parameter(torch.randn(4, 40).t()) + 0
    assert not turned._is_view() and not turned.is_contiguous()
    assert torch.equal(row_by_row(unchecked_tensor(turned, within, True), head)._feats[:25], head(turned)[:25])


NETS = {
    "bias before a norm": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3)),
    "norm without parameters": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3, affine=False)),
    "norm without statistics": lambda: pm.nn.Sequential(
        pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3, track_running_stats=False)
    ),
    "norm of all so far": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3, momentum=None)),
    "frozen norm": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3).eval()),
    "torch modules": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 6, 3), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)),
    "activations": lambda: pm.nn.Sequential(
        pm.nn.Conv3d(4, 6, 3, bias=False), pm.nn.SiLU(), pm.nn.LayerNorm(6), pm.nn.Softplus(), pm.nn.Linear(6, 3)
    ),
    "activation in place": lambda: pm.nn.Sequential(
        pm.nn.Linear(4, 6), pm.nn.ReLU(inplace=True), pm.nn.Linear(6, 6), nn.ReLU(inplace=True), pm.nn.Linear(6, 3)
    ),
    "depthwise": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 4, 3, groups=4), pm.nn.Conv3d(4, 3, 3, bias=False)),
    "pooled maximum": lambda: pm.nn.Sequential(
        pm.nn.Conv3d(4, 3, 3), pm.nn.ReLU(), pm.nn.MaxPool3d(3, stride=1), pm.nn.ReLU()
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_layers(name):
    net = NETS[name]().double()
    for module in net.modules():
        if isinstance(module, pm.nn.BatchNorm) and module.affine:
            nn.init.normal_(module.weight)
    modes = [m.training for m in net.modules()]
    pair = Pair(net, by_class, scene(50), max_voxels=80, buckets=[50])
    for seed, count in enumerate((50, 80, 0, 1, 2, 49)):
        pair.both(*scene(count, seed), limit=1e-7 if count == 2 else 1e-9)
    assert pair.step.replays == 6 and [m.training for m in net.modules()] == modes


def test_half_a_network_and_a_loss_with_parameters():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, y, wanted):
            return row_mean(y, (y.feats - wanted).square().mean(1)) * torch.exp(-self.log) + self.log

    net = pm.nn.ResidualBlock(4, 2).double()
    net.body[0].requires_grad_(False)
    net.unused = nn.Linear(2, 2).double()
    both = [(net, loss := Weighted()), copy.deepcopy((net, loss))]
    optimizers = [torch.optim.SGD([*n.parameters(), *f.parameters()], lr=0.1, momentum=0.5) for n, f in both]

    def given(count, seed):
        x, _ = scene(count, seed)
        return x, torch.sin(x.feats[:, :2])

    step = pm.capture_step(net, loss, optimizers[0], *given(60, 0), max_voxels=90)
    for seed, count in enumerate((60, 90, 17)):
        x, wanted = given(count, seed)
        other, plain = both[1]
        optimizers[1].zero_grad()
        value = plain(other(x), wanted)
        value.backward()
        optimizers[1].step()
        close(step(x, wanted), value.detach(), 1e-9)
        for a, b in zip((*net.parameters(), loss.log), (*other.parameters(), plain.log), strict=True):
            assert (a.grad is None) == (b.grad is None)
            close(a.detach(), b.detach(), 1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_empty_scene_has_no_gradients(optimizer):
    """What the update before wrote into gradients does not stay there."""
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 6, 3), pm.nn.BatchNorm(6), pm.nn.ReLU(), pm.nn.Conv3d(6, 3, 3)).double()
    pair, seen = Pair(net, by_class, scene(50), optimizer, max_voxels=80), []
    pair.optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in net.parameters()]))
    for seed, count in enumerate((0, 50, 80, 0, 0, 3)):
        pair.both(*scene(count, seed))
        assert count == 0 or any(bool(grad.any()) for grad in seen[-1])
        assert count or not any(bool(grad.any()) for grad in seen[-1])
    assert pair.step.replays == len(seen) == 6


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    net = pm.nn.Sequential(
        pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4), pm.nn.ReLU(), pm.nn.Conv3d(4, 4, 2, stride=2), pm.nn.BatchNorm(4)
    ).double()

    def loss(y, factor):
        return row_sum(y, torch.tanh(y.feats).sum(1)) * factor

    one = torch.tensor(0.01, dtype=torch.float64)
    return Pair(net, loss, (scene(100, extent=16)[0], one), max_voxels=120, buckets=[50], margin=30.0), one


@settings(max_examples=20)
@given(st.integers(0, 120), st.integers(7, 18), st.integers(0, 10**6))
def test_random_geometries(trained, count, extent, seed):
    pair, one = trained
    before = pair.step.replays
    pair.both(scene(count, seed, extent=extent)[0], one, limit=1e-6)
    assert pair.step.replays == before + 1


# The program, with its kernels emulated


@pytest.fixture(scope="module")
def known():
    """A GPU that knows the kernels of the tests before."""
    return Gpu()


@pytest.fixture
def gpu(tmp_path, known):
    with emulated(tmp_path, known) as found:
        yield found


class KernelPair(Pair):
    """The copy takes its steps by modules, in plain torch."""

    def eager(self, x, *targets):
        with on_cpu():
            return super().eager(pm.SparseTensor(x.feats, x.coords, 1, x.spatial_shape, x.batch_size), *targets)


def products(net):
    return sum(isinstance(m, Convolution | pm.nn.Linear) for m in net.modules())


IN_KERNELS = NETS | {
    "one level": OneLevel,
    "linear maps first": lambda: pm.nn.Sequential(
        pm.nn.Linear(4, 8), pm.nn.BatchNorm(8), pm.nn.SiLU(), pm.nn.Linear(8, 3), pm.nn.BatchNorm(3)
    ),
    "linear maps without norms": lambda: pm.nn.Sequential(
        pm.nn.Linear(4, 8), pm.nn.ReLU(), pm.nn.Linear(8, 8, bias=False), pm.nn.SiLU(), pm.nn.Conv3d(8, 3, 1)
    ),
    "residual": lambda: pm.nn.Sequential(pm.nn.ResidualBlock(4, 8), pm.nn.ResidualBlock(8, 8), pm.nn.Linear(8, 3)),
    "torch's norm": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), pm.nn.Linear(8, 3)),
    "statistics that stay": lambda: pm.nn.Sequential(
        pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8).eval(), pm.nn.ReLU(), pm.nn.Linear(8, 3), pm.nn.BatchNorm(3).eval()
    ),
}


@pytest.mark.parametrize("name", IN_KERNELS)
def test_programs(gpu, name):
    """Padding rows are in no statistics and no gradients, of however few voxels."""
    net = IN_KERNELS[name]()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d) and module.affine:
            nn.init.normal_(module.weight)
            if not module.training:
                nn.init.uniform_(module.running_var, 0.5, 2.0)
    pair = KernelPair(net, by_class, scene(50, dtype=torch.float32), max_voxels=80, buckets=[50], margin=4.0)
    for seed, count in enumerate((50, 80, 0, 1, 2, 49)):
        if count < 2 and any(type(m) is nn.BatchNorm1d for m in net.modules()):
            # torch refuses to take statistics of one row.
            continue
        gpu.clear()
        pair.both(*scene(count, seed, dtype=torch.float32), limit=2e-2 if count == 2 else 2e-4)
        apart = name in ("depthwise", "pooled maximum", "torch modules", "activations")
        # The step is one stretch of all products, in both passes.
        assert apart or gpu.passes == gpu.back == [products(net)], (gpu.passes, gpu.back)
    assert not pair.step.fallbacks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_programs_under_autocast(gpu, dtype):
    """With gradients of weights that are not rounded, as those of the program outside buffers, which is as far off."""
    net, given = OneLevel(), scene(50, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        pair = KernelPair(net, by_class, given, max_voxels=80, margin=4.0)
    for seed, count in enumerate((80, 2, 50)):
        x, labels = scene(count, seed, dtype=torch.float32)
        pair.follow()
        program = pm.compile(pair.other)
        pair.others.zero_grad()
        with torch.autocast("cpu", dtype):
            want = by_class(program(x), labels)
        want.backward()
        close(pair.step(x, labels), want.detach(), 4 * torch.finfo(dtype).eps)
        mine, other = (torch.cat([p.grad.flatten() for p in n.parameters()]) for n in (net, pair.other))
        assert mine.dtype == torch.float32 and float((mine - other).norm()) <= 0.03 * float(other.norm())


class Decay(nn.Module):
    """A loss with a penalty on the weights of a network that it holds."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, y):
        return row_mean(y, y.feats.square().sum(1)) + sum(p.square().sum() for p in self.net.parameters())


def with_held_parameters(net):
    held = [*net.parameters()]
    return lambda y: row_mean(y, y.feats.square().sum(1)) + sum(p.square().sum() for p in held)


@pytest.mark.parametrize(("loss", "direct"), [(Decay, 0), (with_held_parameters, 6)])
def test_penalties_on_weights(monkeypatch, loss, direct):
    """Weights that the loss finds in the network are the views that the pass takes; those that it holds are not."""
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.ReLU(), pm.nn.Linear(8, 3)).double()
    found, used = [], train_program._used_directly
    monkeypatch.setattr(train_program, "_used_directly", lambda *given: found.append(used(*given)) or found[-1])
    pair = Pair(net, loss(net), scene(60)[:1], "sgd", margin=4.0)
    pair.loss = loss(pair.other)
    pair.both(scene(60)[0])
    assert {*map(len, found)} == {0, direct}


class Penalty(nn.Module):
    """A loss with a penalty on the gradient of a weight."""

    def __init__(self, net):
        super().__init__()
        self.of = [net]

    def forward(self, y):
        value = row_mean(y, torch.sin(y.feats).sum(1))
        (grad,) = torch.autograd.grad(value, self.of[0][0].weight, create_graph=True)
        # As large as the value, about.
        return value + 1000 * grad.square().sum()


@pytest.mark.parametrize("training", [False, True])
def test_gradients_of_gradients(gpu, training):
    net = pm.nn.Sequential(
        pm.nn.Linear(4, 6), pm.nn.BatchNorm(6), pm.nn.SiLU(), pm.nn.Conv3d(6, 6, 3), pm.nn.BatchNorm(6), pm.nn.ReLU(),
        pm.nn.Linear(6, 3), pm.nn.SiLU(), pm.nn.Linear(3, 3),
    )  # fmt: skip
    for module in net.modules():
        if isinstance(module, pm.nn.BatchNorm):
            module.train(training)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    pair = KernelPair(net, Penalty(net), scene(50, dtype=torch.float32)[:1], max_voxels=80, margin=4.0)
    pair.loss = Penalty(pair.other)
    for seed, count in enumerate((80, 30, 1)):
        pair.both(scene(count, seed, dtype=torch.float32)[0], limit=1e-3)
    assert gpu.back


class Known(Maker):
    """Networks without what cannot be captured, or is drawn anew in each call."""

    def _ways(self):
        refused = (self._odd, self._hooked)
        return [way for way in super()._ways() if way not in refused]

    def _behind(self, channels):
        return [part for part in super()._behind(channels) if not isinstance(part, nn.Dropout)]


def of_results(results):
    each = flat(results)
    return sum(row_sum(y, torch.sin(y.feats.float()).sum(1) * torch.arange(1, 1 + len(y.feats)).cos()) for y in each)


@pytest.mark.parametrize("first", beyond(1, range(0, 30, 10)))
def test_random_programs(gpu, first):
    trained = 0
    for seed in range(first, first + 10):
        net, example = Known(seed).net(seed % 9 + 2).train(), scene(60, dtype=torch.float32)[:1]
        if any(isinstance(m, nn.Dropout) or type(m) is nn.BatchNorm1d for m in net.modules()):
            continue
        with on_cpu():
            try:
                value = of_results(copy.deepcopy(net)(*example))
            except RuntimeError:
                # torch refuses to write over a view.
                continue
        if not value.requires_grad:
            continue
        gpu.clear()
        pair = KernelPair(net, of_results, example, "sgd", max_voxels=90, margin=30.0)
        for one, count in enumerate((60, 90, 5, 37)):
            pair.both(scene(count, one, dtype=torch.float32)[0], limit=2e-3)
        trained += bool(gpu.back)
    assert trained >= 4


# Precisions


HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.mark.parametrize(("dtype", "kinks"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)])
def test_autocast_is_that_of_the_capture(dtype, kinks):
    """Gradients are as far from the truth as those of the eager step, no further and no nearer, as those are that are
    cast elsewhere or not at all. Without kinks they are also close to the eager ones."""
    net = pm.models.MinkUNet(4, 3, 0.25)
    net = net if kinks else smooth(net)

    def loss(y, labels):
        # Gradients of single voxels are no numbers that float16 holds with all its digits.
        return 256 * by_class(y, labels)

    with torch.autocast("cpu", dtype):
        pair = Pair(net, loss, scene(1200, dtype=torch.float32, extent=44), max_voxels=1300, margin=2.0)
    x, labels = scene(1000, 1, dtype=torch.float32, extent=44)
    # Running statistics and parameters as they are before the step.
    pair.follow()
    with torch.autocast("cpu", dtype):
        want = loss(pair.other(x), labels)
    want.backward()
    exact = copy.deepcopy(pair.other).double()
    exact.zero_grad()
    loss(exact(x.double()), labels).backward()
    close(pair.step(x, labels), want.detach(), 2 * torch.finfo(dtype).eps)
    truth, eager, mine = (torch.cat([p.grad.flatten() for p in n.parameters()]) for n in (exact, pair.other, net))
    assert mine.dtype == torch.float32
    far, near, apart = (float((a - b).norm() / truth.norm()) for a, b in ((mine, truth), (eager, truth), (mine, eager)))
    most = 1.5 if kinks else 1.25
    assert near / most < far < most * near
    # 3.3 and 3.5 roundings; with statistics of norms in half a precision they are 4.4 to 5.1.
    assert kinks or apart < 4 * torch.finfo(dtype).eps
    for a, b in zip(net.buffers(), pair.other.buffers(), strict=True):
        close(a, b, 2 * torch.finfo(dtype).eps)


@HALVES
@pytest.mark.parametrize("name", ["unet", "layers", "levels"])
def test_autocast_casts_at_the_same_places(dtype, name):
    make, loss, shape = {
        "unet": (lambda: pm.models.MinkUNet(4, 3, 0.25), by_class, None),
        "layers": (Layers, lambda found, labels: of_layers(found, labels, 0.0), None),
        "levels": (Levels, of_levels, SHAPE),
    }[name]
    check_casts((make(), make()), loss, scene(90, shape=shape, dtype=torch.float32), dtype, margin=4.0)


def test_a_mean_of_halves_whose_sum_is_too_large_for_them():
    """As torch's mean, it is divided before it is rounded, and given in the dtype of the values."""
    kinds = []

    def loss(y, labels):
        value = row_mean(y, 60 + y.feats.square().sum(1))
        kinds.append(value.dtype)
        return value

    net, example = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3)), scene(1500, dtype=torch.float32, extent=20)
    with torch.autocast("cpu", torch.float16):
        pair = Pair(net, loss, example, "sgd", max_voxels=1600)
        pair.follow()
        want = loss(pair.other(example[0]), None)
    got = pair.step(*example)
    close(got, want.detach(), 1e-3)
    assert 60 < float(got) < 65 and {*kinds} == {torch.float16}


def scaled(net, loss, example, scenes, **options):
    """The step after it and torch's loop did the same for each (scene, factor of the loss) under a scaler each."""
    other = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9) for n in (net, other)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    step = pm.capture_step(net, loss, optimizers[0], example, torch.tensor(1.0), scaler=scalers[0], **options)
    for x, factor in scenes:
        optimizers[1].zero_grad()
        value = loss(other(x), torch.tensor(factor))
        scalers[1].scale(value).backward()
        scalers[1].step(optimizers[1])
        scalers[1].update()
        close(step(x, torch.tensor(factor)), value.detach(), 1e-5)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
            close(a, b, 1e-5)
    return step


def test_a_scaler_skips_what_is_infinite_and_scales_the_rest():
    net = nn.Sequential(pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4), pm.nn.Conv3d(4, 1, 3))

    def loss(y, factor):
        return row_mean(y, torch.sin(y.feats).sum(1)) * factor

    factors = (1.0, 1e37, 1e37, 1.0, 1.0, 1.0, 2.0)
    scenes = [(scene(50, seed, dtype=torch.float32)[0], factor) for seed, factor in enumerate(factors)]
    step = scaled(net, loss, scenes[0][0], scenes)
    assert step.skipped == 2 and step.replays == 7


def test_the_norm_of_gradients_is_clipped():
    pair = Pair(unet(), by_class, scene(100, extent=40), "sgd", max_voxels=120, clip=0.01, margin=4.0)
    pair.follow()
    x, labels = scene(90, 3, extent=40)
    by_class(pair.other(x), labels).backward()
    before = nn.utils.clip_grad_norm_(pair.other.parameters(), 0.01)
    pair.others.step()
    pair.step(x, labels)
    assert before > 0.1
    for a, b in zip(pair.net.parameters(), pair.other.parameters(), strict=True):
        close(a.grad, b.grad, 1e-9)
        close(a.detach(), b.detach(), 1e-9)


def test_targets_of_rows_that_do_not_live():
    x, _ = scene(3)
    targets = torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3, dtype=torch.bool)
    told = Targets.like(5, x, targets, -100).with_padding_ignored(torch.arange(5)[:, None] < 3)
    assert [t.tolist() for t in told] == [[0, 0, 0, -100, -100], [0.0] * 5, [False] * 5]


class Scaled(nn.Module):
    """A convolution whose epilogue has parameters: their gradients are sums over rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3, 4).double())
        self.scale, self.shift = (nn.Parameter(torch.rand(3).double()) for _ in range(2))

    def forward(self, x):
        return pm.ops.conv(x, self.weight, epilogue=pm.ops.Epilogue(self.scale, self.shift, activation="relu"))


def test_parameters_of_an_epilogue_sum_valid_rows_alone():
    torch.manual_seed(0)
    pair = Pair(Scaled(), by_class, scene(40), max_voxels=60)
    for seed, count in enumerate((40, 25, 60)):
        pair.both(*scene(count, seed))


def test_gradients_that_a_step_does_not_find_are_zero():
    one, other = (torch.zeros(3, requires_grad=True) for _ in range(2))
    gradients = GradientBuffers()
    gradients.store({one: torch.ones(3), other: torch.ones(3)})
    gradients.store({other: torch.full((3,), 2.0)})
    gradients.assign_to([one, other])
    assert one.grad is not None and other.grad is not None
    assert one.grad.tolist() == [0.0] * 3 and other.grad.tolist() == [2.0] * 3


def test_a_schedule():
    pair = Pair(OneLevel().double(), by_class, scene(100, extent=40), max_voxels=120, margin=4.0)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (pair.optimizer, pair.others)]
    for seed in range(3):
        x, labels = scene(100, seed, extent=40)
        close(pair.step(x, labels), pair.eager(x, labels), 1e-8)
        for schedule in schedules:
            schedule.step()
    for a, b in zip(pair.net.parameters(), pair.other.parameters(), strict=True):
        close(a.detach(), b.detach(), 1e-6)


# Capturing changes nothing


def test_capturing_leaves_everything_as_it_is():
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3), pm.nn.Dropout(0.5))
    net[0].weight.grad = torch.ones_like(net[0].weight)
    optimizer = torch.optim.AdamW(net.parameters())
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    x, labels = scene(50, dtype=torch.float32)
    pm.capture_step(net, by_class, optimizer, x, labels, buckets=[60]).ready()
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), before.values(), strict=True))
    assert torch.equal(torch.get_rng_state(), random) and not optimizer.state
    assert torch.equal(net[0].weight.grad, torch.ones_like(net[0].weight)) and net[2].training


def test_dropout_is_drawn_anew():
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.Dropout(0.5))
    x, labels = scene(50, dtype=torch.float32)
    step = pm.capture_step(net, by_class, torch.optim.SGD(net.parameters(), lr=0.0), x, labels)
    values = {float(step(x, labels)) for _ in range(5)}
    assert len(values) == 5


# Scenes that do not fit


def falls_back(pair, given, why, match):
    before = pair.step.fallbacks[why]
    with pytest.warns(RuntimeWarning, match=match):
        pair.both(*given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.both(*given)
    assert pair.step.fallbacks[why] == before + 2


def small():
    return pm.nn.Sequential(
        pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4), pm.nn.Conv3d(4, 4, 2, stride=2), pm.nn.BatchNorm(4)
    ).double()


def squared(y):
    return row_mean(y, (y.feats + 1).square().sum(1) / 8)


def test_what_has_no_graph_runs_eagerly():
    pair = Pair(small(), squared, scene(60)[:1], max_voxels=100)
    pair.both(scene(100, 1)[0])
    falls_back(pair, scene(101, 2)[:1], "voxels", "101 voxels")
    falls_back(pair, scene(50, 3, batch=1)[:1], "batch", "1 items")
    x, _ = scene(60, 4)
    for along in (-9_000, 70_000):
        far = pm.SparseTensor(x.feats, x.coords + torch.tensor([0, along, 0, 0], dtype=torch.int32), batch_size=2)
        if along < 0:
            pair.both(far)
        else:
            falls_back(pair, (far,), "range", "coordinates beyond")
    pair.both(scene(100, 1)[0])
    assert pair.step.replays == 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_first_scene_of_a_capacity_is_captured_behind_its_step(optimizer):
    """Whose gradients, statistics and update stay as they are."""
    pair = Pair(small(), squared, scene(60)[:1], optimizer, ready=False, max_voxels=100, buckets=[60])
    assert pair.step.prepared == (60,)
    pair.both(scene(100, 1)[0])
    assert pair.step.prepared == (60, 100) and pair.step.fallbacks == {"capture": 1} and not pair.step.replays
    pair.both(scene(90, 2)[0])
    assert pair.step.fallbacks == {"capture": 1} and pair.step.replays == 1


def test_the_first_capacity_is_compared_with_the_eager_step_and_again_after_a_change(monkeypatch):
    steps, compared = import_module("pumice.engine.train_step")._Steps, []
    compare = steps._compare

    def counted(self, bucket, sample):
        compared.append(bucket.buffers.capacity)
        return compare(self, bucket, sample)

    monkeypatch.setattr(steps, "_compare", counted)
    pair = Pair(small(), squared, scene(60)[:1], max_voxels=100, buckets=[60, 80])
    assert pair.step.prepared == (60, 80, 100) and compared == [60]
    for net in (pair.net, pair.other):
        net[1].eval()
    pair.step.ready()
    assert compared[1:] == [60]
    pair.both(scene(90, 1)[0])


def test_a_capacity_that_cannot_be_captured_is_refused_once(monkeypatch):
    pair, tried = Pair(small(), squared, scene(60)[:1], ready=False, max_voxels=100, buckets=[60]), []

    def fails(*given):
        tried.append(given)
        raise CaptureError("no memory")

    monkeypatch.setattr(type(pair.step._engine), "_build_bucket", fails)
    with pytest.warns(RuntimeWarning, match="run eagerly: no memory"):
        for seed in range(3):
            pair.both(scene(100, seed)[0])
    assert len(tried) == 1 and pair.step.fallbacks == {"capture": 3}


def block_and_sparse(dtype=torch.float64):
    """512 voxels in a block, of which 64 are on the next level, and 512 far from each other, which stay as many."""
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(8)] * 3).int()
    feats = torch.randn(512, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    far = block * torch.tensor([1, 4, 4, 4], dtype=torch.int32)
    return pm.SparseTensor(feats, block), pm.SparseTensor(feats, far)


ROOM = {"max_voxels": 640, "buckets": [640]}
NO_ROOM = "512 voxels at stride .2, 2, 2., above the capacity of.*re-planned, up to 3 times"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_inner_level_without_room_updates_once(optimizer):
    """Statistics of the pass that had no room are taken back before the scene runs eagerly; then there is room, and
    what was planned left no trace in statistics, gradients and the optimizer's state."""
    example, sparse = block_and_sparse()
    pair = Pair(small(), squared, (example,), optimizer, **ROOM)
    pair.both(example)
    with pytest.warns(RuntimeWarning, match=NO_ROOM):
        pair.both(sparse)
    assert pair.step.replays == 1 and pair.step.fallbacks == {"room": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (sparse, example, sparse):
            pair.both(x)
    assert pair.step.replays == 4 and pair.step.fallbacks == {"room": 1}


def test_an_inner_level_that_was_given_stays_as_narrow():
    example, sparse = block_and_sparse()
    pair = Pair(small(), squared, (example,), **ROOM, level_capacity=0.2)
    falls_back(pair, (sparse,), "room", NO_ROOM)
    pair.both(example)
    assert pair.step.replays == 1


def test_a_capacity_is_planned_anew_so_many_times_and_no_more(monkeypatch):
    example, sparse = block_and_sparse()
    pair, made = Pair(small(), squared, (example,), **ROOM), []
    engine = pair.step._engine
    whole, held = type(engine)._build_bucket, engine.buckets[640]

    def no_wider(engine, capacity, scene=None, least=None):
        """As if every scene that comes needed more than the one before."""
        made.append(capacity)
        wider = whole(engine, capacity, scene, least)
        wider.capacities = held.capacities
        return wider

    monkeypatch.setattr(type(engine), "_build_bucket", no_wider)
    with pytest.warns(RuntimeWarning, match=NO_ROOM):
        for _ in range(6):
            pair.both(sparse)
    assert len(made) == 3 and pair.step.fallbacks == {"room": 6}


def test_no_room_under_a_scaler():
    """The same updates and scales as torch's loop, whether gradients of the scene without room are finite or not."""
    example, sparse = block_and_sparse(torch.float32)
    far = pm.SparseTensor(sparse.feats, sparse.coords + torch.tensor([0, 1, 0, 0], dtype=torch.int32))
    scenes = ((example, 1.0), (sparse, 1e37), (sparse, 1.0), (far, 1.0), (example, 1e37), (sparse, 1.0))
    with pytest.warns(RuntimeWarning, match=NO_ROOM):
        step = scaled(small().float(), lambda y, factor: squared(y) * factor, example, scenes, **ROOM)
    assert step.skipped == 2 and step.replays == 5 and step.fallbacks == {"room": 1}


def test_an_error_changes_nothing():
    pair = Pair(small(), squared, scene(60, shape=SHAPE)[:1], max_voxels=100)
    pair.both(scene(60, 1, shape=SHAPE)[0])
    before = copy.deepcopy(pair.net.state_dict())
    x, _ = scene(60, 1, shape=SHAPE)
    double = pm.SparseTensor(x.feats, x.coords, 1, SHAPE, 2)
    # Coordinates that were written to after they had been checked.
    double.coords[5] = double.coords[6]
    with pytest.raises(CoordinateError):
        pair.step(double)
    assert all(torch.equal(a, b) for a, b in zip(pair.net.state_dict().values(), before.values(), strict=True))
    pair.both(scene(60, 1, shape=SHAPE)[0])


def test_a_network_that_is_changed_is_captured_anew():
    pair = Pair(small(), squared, scene(60)[:1], max_voxels=100)
    pair.both(scene(70)[0])
    for net in (pair.net, pair.other):
        net[1].eval()
        net[0].weight.requires_grad_(False)
        net[2].weight = nn.Parameter(net[2].weight.detach() * 2)
    pair.optimizer, pair.others = (OPTIMIZERS["sgd"](n.parameters()) for n in (pair.net, pair.other))
    # The parameters that are updated are those of the first optimizer.
    with pytest.raises(OptionError, match="capture_step"):
        pair.step(scene(70)[0])
    pair = Pair(pair.net, squared, scene(60)[:1], "sgd", max_voxels=100)
    pair.both(scene(70)[0])
    for net in (pair.net, pair.other):
        net.train()
    pair.both(scene(70, 1)[0])


# At the door


def mean_of(y):
    return y.feats.mean()


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return x


WRONG = {
    "len": (lambda x: x if len(x) > 5 else x * 2, squared, GeometryError, "len"),
    "prune": (lambda x: x.prune(x.feats[:, 0] > 0), squared, GeometryError, "prune"),
    "a mean over rows as the loss": (lambda x: x, mean_of, CaptureError, "in the loss"),
    "centred": (lambda x: x.map(lambda f: f - f.mean(0)), squared, CaptureError, "row_mean"),
    "torch's norm": (lambda x: x.map(nn.BatchNorm1d(4)), squared, CaptureError, "row_mean"),
    "no scalar": (lambda x: x, lambda y: y.feats.sum(1), OptionError, "scalar"),
    "no tensor": (lambda x: x, lambda y: y, OptionError, "scalar.*SparseTensor"),
    "nothing to learn": (lambda x: x.detach(), mean_of, OptionError, "parameters"),
    "a new buffer": (Replaces(), squared, CaptureError, "buffers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_captured_is_refused(name):
    what, loss, error, match = WRONG[name]
    net = Asks(what)
    with pytest.raises(error, match=match):
        pm.capture_step(net, loss, torch.optim.SGD(net.parameters()), scene(40, dtype=torch.float32)[0], buckets=[40])


def test_the_whole_example_may_fill_its_capacity():
    """Rows that do not live are there for the comparison all the same."""
    net = Asks(lambda x: x)
    x = scene(40, dtype=torch.float32)[0]
    with pytest.raises(CaptureError):
        pm.capture_step(net, mean_of, torch.optim.SGD(net.parameters()), x, max_voxels=40)


def test_arguments():
    x, labels = scene(30)
    net = unet()
    sgd = torch.optim.SGD(net.parameters())
    with pytest.raises(OptionError, match="Module"):
        pm.capture_step(lambda x: x, by_class, sgd, x, labels)
    with pytest.raises(OptionError, match="optimizer"):
        pm.capture_step(net, by_class, torch.optim.LBFGS(net.parameters()), x, labels)
    with pytest.raises(OptionError, match="loss"):
        pm.capture_step(net, None, sgd, x, labels)
    with pytest.raises(OptionError, match="one process"):
        pm.capture_step(nn.Sequential(pm.nn.SyncBatchNorm(4), net), by_class, sgd, x, labels)
    with pytest.raises(OptionError, match="clip"):
        pm.capture_step(net, by_class, sgd, x, labels, clip=0.0)
    with pytest.raises(OptionError, match="scaler takes a torch.amp.GradScaler, found float"):
        pm.capture_step(net, by_class, sgd, x, labels, scaler=1024.0)
    with pytest.raises(OptionError, match="margin"):
        pm.capture_step(net, by_class, sgd, x, labels, margin=0.5)
    with pytest.raises(DtypeError, match="SparseTensor"):
        pm.capture_step(net, by_class, sgd, x.feats, labels)
    with pytest.raises(ShapeError, match="no voxels"):
        pm.capture_step(net, by_class, sgd, *scene(0))
    with pytest.raises(ShapeError, match="target 0"):
        pm.capture_step(net, by_class, sgd, x, labels[:5])
    with pytest.raises(ShapeError, match="batch items"):
        pm.capture_step(net, by_class, sgd, x, pm.PerItemTarget(labels))
    with pytest.raises(DtypeError, match="tensors"):
        pm.capture_step(net, by_class, sgd, x, 5)
    with pytest.raises(DeviceError, match="meta"):
        pm.capture_step(net, by_class, sgd, x, labels.to("meta"))
    with pytest.raises(OptionError, match="requires gradients"):
        pm.capture_step(net, by_class, sgd, x, torch.ones(30, requires_grad=True))
    net.requires_grad_(False)
    with pytest.raises(OptionError, match="requires gradients"):
        pm.capture_step(net, by_class, sgd, x, labels)


def test_calls():
    x, labels = scene(30)
    pair = Pair(small(), lambda y, t: squared(y), (x, labels))
    step = pair.step
    with pytest.raises(DtypeError, match="SparseTensor"):
        step(x.feats, labels)
    with pytest.raises(ShapeError, match=r"\[N, 4\]"):
        step(x.replace(x.feats[:, :3]), labels)
    with pytest.raises(DtypeError, match="float32"):
        step(x.float(), labels)
    with pytest.raises(ShapeError, match="targets"):
        step(x)
    with pytest.raises(ShapeError, match="target 0"):
        step(x, labels[:7])
    with pytest.raises(ShapeError, match="int32"):
        step(x, labels.int())
    with pytest.raises(ShapeError, match="target 0"):
        step(x, pm.PerItemTarget(labels[:2]))
    with pytest.raises(OptionError, match="gradients"):
        step(x.replace(x.feats.clone().requires_grad_()), labels)
    told = step.explain()
    assert "capacities" in told and "no graphs" in told and "Sequential" in repr(step)


def test_means_and_sums_over_voxels():
    x, _ = scene(20)
    values = torch.randn(20, 3, dtype=torch.float64)
    assert torch.equal(row_mean(x, values), values.mean(0)) and torch.equal(row_sum(x, values), values.sum(0))
    assert bool(x.valid_mask.all()) and x.valid_mask.shape == (20,)
    with pytest.raises(ShapeError, match="20 voxels"):
        row_mean(x, values[:5])
