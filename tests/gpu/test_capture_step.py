"""Captured steps of training on a GPU: graphs do what eager steps do, and wait for nothing but one transfer.

As in test_device, `pytest --noconftest tests/gpu` runs where hypothesis is not installed.
"""

import copy
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from nets import Layers, Levels, check_casts, smooth
from norms import both_passes
from torch import nn
from torch.nn import functional
from waits import no_wait

import pumice as pm
from pumice.errors import CaptureError, CoordinateError
from pumice.lower import norm
from pumice.ops import row_mean
from pumice.testing import random_cloud

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:.*capturable=True"),
]


@pytest.fixture
def gpu():
    """The last GPU."""
    torch.manual_seed(0)
    return torch.device("cuda", torch.cuda.device_count() - 1)


def scene(device, count, seed=0, batch=2, extent=60, shape=None):
    generator = torch.Generator().manual_seed(seed)
    coords = torch.zeros(0, 4, dtype=torch.int32)
    if count:
        coords = random_cloud(count, 3, extent=extent, batch_size=min(batch, count), seed=seed)
    feats, labels = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    labels[torch.rand(count, generator=generator) < 0.2] = -100
    return pm.SparseTensor(feats.to(device), coords.to(device), 1, shape, batch), labels.to(device)


def by_class(y, labels):
    return functional.cross_entropy(y.feats.float(), labels)


def of_layers(found, labels):
    coarse = found["coarse"]
    pools = sum(p.square().mean() for p in found["items"])
    first = functional.cross_entropy(found["same"].feats[:, :3], labels)
    return first + 0.01 * row_mean(coarse, coarse.feats.square().sum(1)) + 1e-6 * pools


def of_levels(found, labels):
    rest = sum(row_mean(y, y.feats.square().mean(1)) for y in found)
    return rest + functional.cross_entropy(found[0].feats[:, :3], labels)


OPTIMIZERS = {
    # With nesterov it writes into gradients.
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.001, device=p[0].device), eps=1e-3, capturable=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.001, eps=1e-3, capturable=True, fused=True),
    "not capturable": lambda p: torch.optim.Adam(p, lr=0.001, eps=1e-3),
}


class Pair:
    """A network that is trained by captured steps, and a copy that takes the same ones eagerly from where it stands."""

    def __init__(self, net, loss, example, optimizer="sgd", cast=None, **options):
        self.cast = cast
        self.net, self.loss, self.other = net, loss, copy.deepcopy(net)
        self.optimizer = OPTIMIZERS[optimizer](list(net.parameters()))
        self.others = OPTIMIZERS[optimizer](list(self.other.parameters()))
        with warnings.catch_warnings(), self.autocast():
            warnings.simplefilter("error", RuntimeWarning)
            self.step = pm.capture_step(net, loss, self.optimizer, *example, **options).ready()

    def autocast(self):
        return torch.autocast("cuda", self.cast or torch.float16, enabled=self.cast is not None)

    def follow(self):
        """The copy is what the network is."""
        self.other.load_state_dict(self.net.state_dict())
        self.others.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def both(self, x, labels, limit=0.01):
        self.follow()
        before = flat(self.net.parameters())
        self.others.zero_grad()
        with self.autocast():
            want = self.loss(self.other(x), labels)
        want.backward()
        self.others.step()
        got = self.step(x, labels)
        near(got, want.detach(), limit)
        near(*(flat(p.grad for p in n.parameters() if p.grad is not None) for n in (self.net, self.other)), limit)
        near(*(flat(n.parameters()) - before for n in (self.net, self.other)), 4 * limit)
        near(*(flat(b for b in n.buffers() if b.is_floating_point()) for n in (self.net, self.other)), limit)
        for a, b in zip(self.net.buffers(), self.other.buffers(), strict=True):
            assert a.is_floating_point() or torch.equal(a, b)


def flat(tensors):
    found = [t.detach().double().flatten() for t in tensors]
    return torch.cat(found) if found else torch.zeros(0)


def near(got, want, limit):
    if bool(want.isnan().any()):
        assert bool((got.isnan() == want.isnan()).all())
        return
    assert float((got - want).norm()) <= limit * max(1e-6, float(want.norm())), (float(got.norm()), float(want.norm()))


@pytest.mark.parametrize("relu", [False, True], ids=["bare", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms(gpu, dtype, relu):
    """Kernels against plain torch, of any number of rows and channels."""
    from pumice.coords import Bounds, CoordBuffer

    for rows, count, channels in ((1, 1, 3), (5000, 4097, 96), (70_000, 65_000, 64), (300_000, 200_001, 33)):
        x = (3 * torch.randn(rows, channels, device=gpu) + 5).to(dtype)
        grad = torch.randn(rows, channels, device=gpu).to(dtype)
        x[count:], grad[count:] = torch.nan, torch.nan
        cloud = CoordBuffer(
            torch.zeros(rows, 4, dtype=torch.int32, device=gpu),
            torch.tensor([count], dtype=torch.int32, device=gpu),
            Bounds((0, 0, 0), (1, 1, 1), 1),
            torch.zeros(1, dtype=torch.int32, device=gpu),
        )
        running = torch.zeros(channels, device=gpu), torch.ones(channels, device=gpu)
        tracked = torch.tensor(3, device=gpu)
        affine = [torch.randn(channels, device=gpu) for _ in range(2)]
        told = norm.Statistics(running, 1e-5, True, 0.1, tracked)
        wide = x[:count].double().requires_grad_()
        twins = [a.double().requires_grad_() for a in affine]
        known = [torch.zeros(channels, device=gpu).double(), torch.ones(channels, device=gpu).double()]
        want = functional.batch_norm(wide, *known, *twins, count > 1, 0.1, 1e-5)
        if relu:
            # On which side of 0 the smallest lie is rounding's.
            grad[:count][want.abs() < 1e-4] = 0
            want = want.relu()
        y, (dx, dweight, dbias, _) = both_passes(x, cloud, norm.Norm(*affine, told, None, relu), grad)
        want.backward(grad[:count].double())
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        near(y[:count].double(), want.detach(), limit)
        near(dx[:count].double(), wide.grad, limit)
        for a, b in zip((dweight, dbias, *running), (*twins, *known), strict=True):
            near(a.double(), b if b.grad is None else b.grad, 1e-4)
        assert int(tracked) == 3 + (count > 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_of_a_unet(gpu, optimizer):
    """Below, at and above the edges of capacities, one after the other in one pool."""
    _steps_of_a_unet(gpu, smooth(pm.models.MinkUNet(4, 3, 0.5)), optimizer, 1e-3)


def test_steps_of_a_unet_with_kinks(gpu):
    """Where the argument of a ReLU is 0 but for rounding, gradients are others: by up to 2 % of scenes like these, of
    eager steps and captured ones alike (against float64)."""
    _steps_of_a_unet(gpu, pm.models.MinkUNet(4, 3, 0.5), "sgd", 0.05)


def _steps_of_a_unet(gpu, net, optimizer, limit):
    example = scene(gpu, 9000)
    pair = Pair(net.to(gpu), by_class, example, optimizer, max_voxels=9500, buckets=[3000], margin=3.0)
    pair.step.ready()
    for seed, count in enumerate((9000, 3000, 3001, 9500, 2000, 9000)):
        pair.both(*scene(gpu, count, seed), limit)
    assert not pair.step.fallbacks and pair.step.replays == 6


@pytest.mark.parametrize("name", ["layers", "levels"])
def test_all_layers(gpu, name):
    shape = None if name == "layers" else (64, 60, 60)
    net, loss = (Layers(16), of_layers) if name == "layers" else (Levels(16), of_levels)
    pair = Pair(net.to(gpu), loss, scene(gpu, 6000, shape=shape), max_voxels=6500, margin=3.0)
    for seed, count in enumerate((6000, 6500, 50)):
        pair.both(*scene(gpu, count, seed, shape=shape))
    assert not pair.step.fallbacks


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@HALVES
@pytest.mark.parametrize("kinks", [False, True])
def test_autocast(gpu, dtype, kinks):
    """Gradients are as far from the truth as those of the eager step, no further and no nearer, as those are that are
    cast elsewhere or not at all. Without kinks they are also close to the eager ones."""
    net = pm.models.MinkUNet(4, 3, 0.5).to(gpu)
    net = net if kinks else smooth(net)

    def loss(y, labels):
        # Gradients of single voxels are no numbers that float16 holds with all its digits.
        return 256 * by_class(y, labels)

    pair, most = Pair(net, loss, scene(gpu, 9000), "adamw", cast=dtype), 1.5 if kinks else 1.25
    for seed, count in enumerate((9000, 6000)):
        x, labels = scene(gpu, count, seed)
        pair.follow()
        exact = copy.deepcopy(net).cpu().double()
        plain = pm.SparseTensor(x.feats.cpu().double(), x.coords.cpu(), batch_size=x.batch_size)
        truth = gradients(exact, loss(exact(plain), labels.cpu())).cpu()
        with pair.autocast():
            want = loss(pair.other(x), labels)
        eager = gradients(pair.other, want).cpu()
        near(pair.step(x, labels), want.detach(), 2 * torch.finfo(dtype).eps)
        mine = flat(p.grad for p in net.parameters()).cpu()
        far, usual, apart = (
            float((a - b).norm() / truth.norm()) for a, b in ((mine, truth), (eager, truth), (mine, eager))
        )
        assert usual / most < far < most * usual, (far, usual)
        assert kinks or apart < 5 * torch.finfo(dtype).eps, apart
        near(*(flat(b for b in n.buffers() if b.is_floating_point()) for n in (net, pair.other)), 0.01)
    assert pair.step.replays == 2


def gradients(net, value):
    net.zero_grad()
    value.backward()
    return flat(p.grad for p in net.parameters())


@HALVES
@pytest.mark.parametrize("name", ["unet", "layers", "levels"])
def test_autocast_casts_at_the_same_places(gpu, dtype, name):
    make, loss, shape = {
        "unet": (lambda: pm.models.MinkUNet(4, 3, 0.5), by_class, None),
        "layers": (lambda: Layers(16), of_layers, None),
        "levels": (lambda: Levels(16), of_levels, (64, 60, 60)),
    }[name]
    check_casts((make().to(gpu), make().to(gpu)), loss, scene(gpu, 6000, shape=shape), dtype, margin=3.0)


@pytest.mark.parametrize("optimizer", ["plain", "sgd"])
def test_small_scenes(gpu, optimizer):
    net = nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.ReLU(), pm.nn.Conv3d(8, 3, 3)).to(gpu)
    pair = Pair(net, by_class, scene(gpu, 2000), optimizer)
    for seed, count in enumerate((0, 3, 4000, 64, 0, 2000)):
        pair.both(*scene(gpu, count, seed))
        # Of an empty scene there are none, but what the update writes there.
        assert count or optimizer == "sgd" or all(not bool(p.grad.any()) for p in net.parameters())
        assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert pair.step.replays == 6


def test_a_graph_of_the_update(gpu):
    """It is captured once its numbers stay, and left where they change."""
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3)).to(gpu)
    pair = Pair(net, by_class, scene(gpu, 1000))
    update, given = pair.step._update, scene(gpu, 1000)
    for number in range(5):
        pair.step(*given)
        # The first makes the state.
        assert update.replays == number
    pair.optimizer.param_groups[0]["lr"] = 0.01
    before, replays = flat(net.parameters()), update.replays
    pair.step(*given)
    assert update.replays == replays and not torch.equal(flat(net.parameters()), before)
    pair.step(*given)
    pair.step(*given)
    assert update.replays == replays + 2


def test_a_learning_rate_on_the_device(gpu):
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3)).to(gpu)
    other = copy.deepcopy(net)
    rates = [torch.tensor(0.01, device=gpu) for _ in range(2)]
    both = [
        torch.optim.AdamW(n.parameters(), lr=r, eps=1e-3, capturable=True)
        for n, r in zip((net, other), rates, strict=True)
    ]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in both]
    step = pm.capture_step(net, by_class, both[0], *scene(gpu, 1000))
    for seed in range(6):
        given = scene(gpu, 1000, seed)
        both[1].zero_grad()
        by_class(other(given[0]), given[1]).backward()
        both[1].step()
        step(*given)
        for schedule in schedules:
            schedule.step()
    near(flat(net.parameters()), flat(other.parameters()), 1e-3)
    assert step._update.replays >= 4 and "replays" in step.explain()


def test_a_scaler(gpu):
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 16, 3), pm.nn.BatchNorm(16), pm.nn.Conv3d(16, 3, 3)).to(gpu)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.autocast("cuda", torch.float16):
        step = pm.capture_step(net, by_class, optimizer, *scene(gpu, 3000), scaler=scaler, clip=1.0)
    given, values = scene(gpu, 3000), []
    for _ in range(80):
        before = flat(net.parameters())
        skipped = step.skipped
        values.append(float(step(*given)))
        assert torch.equal(flat(net.parameters()), before) == (step.skipped > skipped)
    assert 5 < step.skipped < 60 and scaler.get_scale() < 2.0**35 and values[-1] < values[0]


def test_no_room_updates_once(gpu):
    net = pm.nn.Sequential(
        pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.Conv3d(8, 8, 2, stride=2), pm.nn.BatchNorm(8)
    ).to(gpu)
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(16)] * 3).int().to(gpu)
    feats, unused = torch.randn(4096, 4, device=gpu), torch.zeros((), device=gpu)

    def loss(y, _):
        return row_mean(y, (y.feats + 1).square().sum(1))

    example = pm.SparseTensor(feats, block)
    pair = Pair(net, loss, (example, unused), max_voxels=5000, buckets=[5000], margin=1.2)
    pair.both(example, unused)
    sparse = pm.SparseTensor(feats, block * torch.tensor([1, 4, 4, 4], dtype=torch.int32, device=gpu))
    with pytest.warns(RuntimeWarning, match="above the capacity.*re-planned"):
        pair.both(sparse, unused)
    assert pair.step.fallbacks == {"room": 1} and pair.step.replays == 1
    begin = time.monotonic()
    while pair.step.replays == 1:
        # Kernels may still be compiled.
        assert time.monotonic() < begin + 60
        pair.both(sparse, unused)
        time.sleep(0.1)
    # Now there is room; what was planned left gradients, statistics and the optimizer's state as they were.
    known = pair.step.fallbacks["room"]
    for x in (sparse, example, sparse):
        pair.both(x, unused)
    assert pair.step.fallbacks == {"room": known} and pair.step.replays == 5


def test_duplicates_change_nothing(gpu):
    shape = (64, 64, 64)
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.BatchNorm(3)).to(gpu)
    pair = Pair(net, by_class, scene(gpu, 3000, shape=shape))
    x, labels = scene(gpu, 3000, shape=shape)
    twice = torch.cat([x.coords, x.coords[100:101]])
    before = flat((*net.parameters(), *net.buffers()))
    wrong = pm.SparseTensor(torch.randn(3001, 4, device=gpu), twice, 1, shape, 2)
    with pytest.raises(CoordinateError, match="rows 100 and 3000"):
        pair.step(wrong, torch.cat([labels, labels[:1]]))
    assert torch.equal(flat((*net.parameters(), *net.buffers())), before)
    pair.both(x, labels)


def test_a_replicated_model(gpu, tmp_path):
    """Gradients are averaged behind the graph; of one process they are its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        net = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.ReLU(), pm.nn.Linear(8, 3)).to(gpu)
        pair = Pair(nn.parallel.DistributedDataParallel(net, [gpu.index]), by_class, scene(gpu, 3000), "fused")
        for seed, count in enumerate((3000, 2500, 4000, 6000)):
            pair.both(*scene(gpu, count, seed))
        assert pair.step.replays == 4 and not pair.step.fallbacks
    finally:
        dist.destroy_process_group()


def test_results_of_earlier_passes_are_held(gpu):
    """autograd keeps the nodes of parameters, which are of the stream of the earlier pass."""
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.ReLU(), pm.nn.Linear(8, 3)).to(gpu)
    given = scene(gpu, 3000)
    held = by_class(net(given[0]), given[1])
    pair = Pair(net, by_class, given)
    pair.both(*given)
    assert pair.step.replays == 1 and bool(held.isfinite())


def test_dropout_is_drawn_anew(gpu):
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3), pm.nn.Dropout(0.5)).to(gpu)
    given = scene(gpu, 3000)
    state = torch.cuda.get_rng_state(gpu)
    step = pm.capture_step(net, by_class, torch.optim.SGD(net.parameters(), lr=0.0), *given)
    assert torch.equal(torch.cuda.get_rng_state(gpu), state)
    assert len({float(step(*given)) for _ in range(6)}) == 6


def test_one_wait_and_flat_memory(gpu, monkeypatch):
    net = pm.models.MinkUNet(4, 3, 0.5).to(gpu)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, capturable=True, fused=True)
    step = pm.capture_step(net, by_class, optimizer, *scene(gpu, 9000), buckets=3.0).ready()
    scenes = [scene(gpu, count, count) for count in (3000, 9000, 15_000)]
    for given in scenes * 2:
        step(*given)
    torch.cuda.synchronize(gpu)
    waits, before = [], torch.Tensor.tolist

    def waiting(tensor):
        waits.append(1)
        torch.cuda.set_sync_debug_mode("default")
        found = before(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return found

    monkeypatch.setattr(torch.Tensor, "tolist", waiting)
    with no_wait():
        step(*scenes[0])
    monkeypatch.undo()
    assert len(waits) == 1
    allocated, reserved = torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)
    for _ in range(30):
        for given in scenes:
            step(*given)
    torch.cuda.synchronize(gpu)
    assert torch.cuda.memory_allocated(gpu) == allocated and torch.cuda.memory_reserved(gpu) == reserved


def test_a_step_that_asks_the_host_is_refused(gpu):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pm.nn.Conv3d(4, 3, 3)

        def forward(self, x):
            x = self.conv(x)
            return x * 2 if float(x.feats.detach().abs().max()) > 1e9 else x

    net = Asks().to(gpu)
    with pytest.raises(CaptureError, match="cannot be captured"):
        pm.capture_step(net, by_class, torch.optim.SGD(net.parameters()), *scene(gpu, 1000))
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 3, 3)).to(gpu)
    Pair(net, by_class, scene(gpu, 1000)).both(*scene(gpu, 1000))
