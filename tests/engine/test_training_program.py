"""pm.compile in training: results, gradients and statistics are those of the module."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from emulated import Gpu, emulated, on_cpu
from journeys.calls import calls_of
from programs import Maker, Residual, Unit, far, flat, in_mixed_modes, scene
from torch import nn
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import checkpoint
from wide import beyond

import pumice as pm
from benchmarks.scenes.stream_nets import ENCODER, UNET, Encoder, UNet
from pumice.runtime.launch import without_collection
from pumice.testing import random_cloud


@pytest.fixture(scope="module")
def known():
    """A GPU that knows the kernels of the tests before."""
    return Gpu()


@pytest.fixture
def gpu(tmp_path, known):
    torch.manual_seed(0)
    with emulated(tmp_path, known) as found:
        yield found


def cloud(seed, rows=150, channels=4, extent=(16, 16, 10)):
    coords = random_cloud(rows, 3, extent=extent, seed=seed)
    return pm.SparseTensor(torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed)), coords)


def loss_of(results):
    generator = torch.Generator().manual_seed(9)
    return sum((y.feats.float() * torch.randn(y.feats.shape, generator=generator)).sum() for y in results)


def step(net, x, inner=False, cast=None):
    """Results, gradients of the features and all parameters, and buffers, after a step."""
    torch.manual_seed(7)
    net.zero_grad()
    feats = x.feats.detach().clone().requires_grad_(inner)
    with nullcontext() if cast is None else torch.autocast("cpu", cast, cache_enabled=False):
        results = flat(net(x.replace(feats)))
    loss = loss_of(results)
    if loss.requires_grad:
        loss.backward()
    grads = [feats.grad, *(p.grad for p in net.parameters())]
    return [y.feats.detach() for y in results], grads, [b.clone() for b in net.buffers()]


def near(found, expected, most, exact=None):
    """exact: in float64, from which the module may be farther. Of what is 0 but for rounding, as the gradient of a bias
    before a norm, a norm of nearly constant channels leaves a rounding of any size."""
    for ours, theirs, bests in zip(found, expected, exact or expected, strict=True):
        for one, other, best in zip(ours, theirs, bests, strict=True):
            # A branch whose results nobody reads may have gradients of 0.
            assert other is None or one is not None
            if one is not None:
                other, best = (torch.zeros_like(one) if t is None else t for t in (other, best))
                assert one.dtype == other.dtype and one.shape == other.shape
                assert far(one, other) <= most or far(one, best) <= most + 2 * far(other, best)


def on_plain(net, x, *given):
    with on_cpu():
        return step(net, pm.SparseTensor(x.feats, x.coords), *given)


def trained(net):
    """With norms that are not new."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            for values in (module.running_mean, module.running_var, module.weight, module.bias):
                if values is not None:
                    values.data.uniform_(0.5, 2)
    return net


def made(seed):
    """A random network with norms of all modes, and frozen parts."""
    return in_mixed_modes(Maker(seed).net(random.Random(seed).randint(2, 12)), seed + 1)


def compared(seed, most, rows=None):
    """Steps of a random network and of its program; False where the network itself does not train."""
    net = made(seed)
    eager, program = copy.deepcopy(net), pm.compile(net)
    for one in (seed, seed + 1, seed):
        exact = copy.deepcopy(eager).double()
        try:
            with on_cpu():
                expected = step(eager, scene(one, rows=rows), one % 2 == 0)
                best = step(exact, scene(one, rows=rows).double(), one % 2 == 0)
        except RuntimeError:
            return False
        except ValueError:
            # One voxel for a norm of torch.
            with pytest.raises(ValueError, match="more than 1 value"):
                step(program, scene(one, rows=rows))
            continue
        near(step(program, scene(one, rows=rows), one % 2 == 0), expected, most, best)
    return True


@pytest.mark.parametrize("first", beyond(1, range(0, 60, 20)))
def test_random_networks(first):
    # Gradients of what several modules read are added up in another order.
    assert sum(compared(seed, 5e-5) for seed in range(first, first + 20)) >= 16


@pytest.mark.parametrize("first", beyond(1, range(0, 36, 12)))
def test_random_networks_on_a_gpu(gpu, first):
    assert sum(compared(seed, 2e-3, 60) for seed in range(first, first + 12)) >= 9
    assert gpu.passes and gpu.back


class ReadsStatistics(nn.Module):
    """What is read of a norm is what its call has left there."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4), pm.nn.ReLU()

    def forward(self, x):
        y = self.norm(self.conv(x))
        z = x.replace(x.feats * self.norm.running_mean)
        return [self.relu(y), z]


def test_statistics_are_read_after_they_are_updated():
    net = ReadsStatistics().train()
    eager, program = copy.deepcopy(net), pm.compile(net)
    for seed in range(2):
        for found, expected in zip(program(scene(seed)), eager(scene(seed)), strict=True):
            assert torch.equal(found.feats, expected.feats)


# Networks


def conv(before, after, *behind, size=3, **options):
    return Unit(pm.nn.Conv3d(before, after, size, **options), *behind)


def norm(channels, kind=pm.nn.BatchNorm, **options):
    return kind(channels, **options)


class Shared(nn.Module):
    """One layer, one norm and one weight used twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4)
        self.other = pm.nn.Conv3d(4, 4, 3, bias=False)
        self.other.weight = self.conv.weight

    def forward(self, x):
        for _ in range(2):
            x = torch_relu(self.norm(self.conv(x)))
        return self.norm(self.other(x))


def torch_relu(x):
    return x.replace(torch.relu(x.feats))


class Branches(nn.Module):
    """Concatenations of what is read elsewhere too, twice the same, a dead branch, and several results."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(4, 8, norm(8), pm.nn.ReLU()), conv(8, 4, norm(4))
        self.c, self.dead = conv(16, 8, norm(8), pm.nn.SiLU()), conv(8, 4, norm(4))
        self.down, self.up = pm.nn.Conv3d(8, 8, 2, 2), pm.nn.InverseConv3d(8, 4, 2, 2)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        c = self.c(pm.cat([b, a, b]))
        self.dead(c)
        d = self.up(self.down(c), x)
        return c, pm.cat([d, c]), d + b


def frozen(net):
    net[0].requires_grad_(False)
    net[1].requires_grad_(False).eval()
    net[2].rest[0].requires_grad_(False)
    return net


CHAIN, WIDE = 3, (48, 48, 32)
NETS = {
    "chain": lambda: nn.Sequential(*(conv(4, 4, norm(4), pm.nn.ReLU(), bias=False) for _ in range(CHAIN))),
    "biases": lambda: nn.Sequential(conv(4, 8, norm(8), pm.nn.ReLU()), conv(8, 4, pm.nn.ReLU()), conv(4, 3)),
    "residuals": lambda: nn.Sequential(Residual(4, True), pm.nn.ResidualBlock(4, 8), pm.nn.ResidualBlock(8, 8)),
    "smooth": lambda: nn.Sequential(conv(4, 8, norm(8), pm.nn.SiLU()), conv(8, 8, pm.nn.SiLU()), Residual(8, False)),
    "linear": lambda: nn.Sequential(
        Unit(pm.nn.Linear(4, 8), norm(8), pm.nn.ReLU()), conv(8, 8, norm(8)), pm.nn.Linear(8, 5)
    ),
    "no scale": lambda: nn.Sequential(conv(4, 8, norm(8, affine=False), pm.nn.ReLU()), conv(8, 4, norm(4))),
    "of torch": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), pm.nn.Conv3d(8, 4, 3)),
    "cumulative": lambda: nn.Sequential(*(conv(4, 4, norm(4, momentum=None), pm.nn.ReLU()) for _ in range(2))),
    "no statistics": lambda: nn.Sequential(*(conv(4, 4, norm(4, track_running_stats=False)) for _ in range(2))),
    "strided": lambda: nn.Sequential(conv(4, 8, norm(8), size=2, stride=2), conv(8, 8, size=3, stride=2, padding=1)),
    "shared": Shared,
    "branches": Branches,
    "frozen": lambda: frozen(nn.Sequential(*(conv(4, 4, norm(4), pm.nn.ReLU()) for _ in range(4)))),
    "unet": lambda: UNet([width // 8 for width in UNET]),
    "encoder": lambda: Encoder([width // 4 for width in ENCODER]),
}
WHOLE = {"chain": CHAIN, "residuals": 6, "linear": 3, "shared": 3, "unet": 50, "encoder": 20, "frozen": 4}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_networks(gpu, name, inner):
    net = trained(NETS[name]())
    eager, program = copy.deepcopy(net), pm.compile(net)
    for seed in (0, 1, 2):
        gpu.clear()
        x = cloud(seed, 300, extent=WIDE) if name == "unet" else cloud(seed, 150 - seed)
        near(step(program, x, inner), on_plain(eager, x, inner), 2e-3)
        assert name not in WHOLE or gpu.passes == gpu.back == [WHOLE[name]]


@pytest.mark.parametrize("name", ["chain", "biases", "linear", "branches", "frozen", "encoder", "of torch"])
def test_autocast(gpu, name):
    net = trained(NETS[name]())
    eager, program = copy.deepcopy(net), pm.compile(net)
    for seed in (0, 1, 2):
        gpu.clear()
        x = cloud(seed, 300)
        exact = on_plain(copy.deepcopy(eager), x)
        found, expected = step(program, x, False, torch.bfloat16), on_plain(eager, x, False, torch.bfloat16)
        for ours, theirs, wide in zip(found, expected, exact, strict=True):
            for one, other, best in zip(ours, theirs, wide, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.dtype == other.dtype and far(one, best) <= 2 * far(other, best) + 0.1)
        assert gpu.passes == gpu.back and gpu.passes


def test_half_precision(gpu):
    """Gradients of weights in half precision are summed in float32."""
    net = trained(nn.Sequential(*(conv(8, 8, norm(8), pm.nn.ReLU()) for _ in range(2))))
    exact, program = copy.deepcopy(net), pm.compile(net.half())
    for seed in (0, 1):
        gpu.clear()
        x = cloud(seed, 150, 8)
        results, grads, _ = step(program, x.half(), True)
        expected = on_plain(exact, x, True)
        assert {t.dtype for t in (*results, *grads)} == {torch.float16} and gpu.passes == [2]
        near([[t.float() for t in results], [t.float() for t in grads]], expected[:2], 0.02)


def test_linear_maps_in_half_precision(gpu, monkeypatch):
    """By our kernels, for any number of rows: torch looks for one anew for each. Sums over many rows are split."""
    layers = (pm.nn.Linear(8, 24, bias=False), norm(24), pm.nn.Linear(24, 8))
    net = trained(nn.Sequential(conv(8, 8, norm(8), bias=False), *layers))
    exact, program = copy.deepcopy(net), pm.compile(net.half())
    step(program, cloud(0, 150, 8).half(), True)
    monkeypatch.setattr(torch, "mm", None)
    for seed, rows in enumerate((150, 40, 2500, 700)):
        gpu.clear()
        x = cloud(seed, rows, 8, extent=WIDE)
        results, grads, _ = step(program, x.half(), True)
        assert gpu.passes == gpu.back == [3] and all(one.by_address for one in gpu.started)
        # Of each product the result, and the gradients of features and weight.
        assert len(gpu.started) == 9
        expected = on_plain(exact, x, True)
        near([[t.float() for t in results], [t.float() for t in grads]], expected[:2], 0.02)


def test_kernels(gpu):
    """Of a network seen before: a kernel of the product and two of the norm, and in the backward pass two of each."""
    net = trained(UNet([width // 8 for width in UNET]))
    program = pm.compile(net)
    for seed in (0, 1):
        step(program, cloud(seed, 300, extent=WIDE))
    for seed in (2, 3):
        gpu.clear()
        step(program, cloud(seed, 300, extent=WIDE))
        # Eight linear maps are torch's; the first convolution's features need no gradient.
        assert [name for name, _ in gpu.norms].count("normalise") == 49 and len(gpu.norms) == 4 * 49
        assert len(gpu.started) == 42 + 42 + 41
    assert all(by_address for _, by_address in gpu.norms) and all(one.by_address for one in gpu.started)


def test_kernels_for_tiles_of_the_other_height_are_compiled_with_those_of_the_first_scene(tmp_path, monkeypatch):
    """Of both passes, in the background: the first scene whose maps have such tiles makes none."""
    family, maps = import_module("pumice.lower.tile_family").TileFamily, import_module("pumice.lower.maps")
    layers = import_module("pumice.engine.train_layers")
    made, heights = [], []
    monkeypatch.setattr(maps, "_FEW_ROWS", 100)
    monkeypatch.setattr(maps.TILE_HEIGHTS, "compile", lambda height, task: heights.append(height) or task())
    init = family.__init__
    monkeypatch.setattr(family, "__init__", lambda self, *given: (init(self, *given), made.append(self))[0])

    def as_on_a_gpu(whole):
        def planned(*given):
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
                return whole(*given)

        return planned

    for name in ("plan_for_other_tiles", "plan_gradient_for_other_tiles"):
        monkeypatch.setattr(layers, name, as_on_a_gpu(getattr(layers, name)))
    torch.manual_seed(0)
    net, counts = nn.Sequential(Residual(4, False), Residual(4, True), pm.nn.Conv3d(4, 32, 3)).train(), []
    program = pm.compile(net)
    with emulated(tmp_path):
        for rows in (60, 300, 70):
            x = scene(rows, 4, rows)
            found = torch.autograd.grad(program(x).feats.square().sum(), [*net.parameters()])
            counts.append(len(made))
            with on_cpu():
                expected = torch.autograd.grad(net(x).feats.square().sum(), [*net.parameters()])
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
    assert {*heights} == {128} and counts[0] and len({*counts}) == 1


def test_what_is_frozen_has_no_gradient_kernels(gpu):
    net = trained(NETS["frozen"]())
    program = pm.compile(net)
    step(program, cloud(0))
    gpu.clear()
    step(program, cloud(0))
    names = [name for name, _ in gpu.norms]
    # Two norms of frozen layers; the third one is frozen too, but its weight is not.
    assert [names.count(name) for name in ("moments", "normalise", "products", "gradient")] == [3, 4, 2, 2]
    assert len(gpu.started) == 4 + 2 + 1


def test_calls(gpu):
    """How many of our functions a step calls, which is what the host does."""
    found = {}
    for layers in (2, 12):
        net = trained(nn.Sequential(*(conv(8, 8, norm(8), pm.nn.ReLU(), bias=False) for _ in range(layers))))
        program, x = pm.compile(net), cloud(0, 150, 8)
        for _ in range(3):
            step(program, x)
        gc.collect()
        found[layers] = calls_of(lambda program=program, x=x: loss_of([program(x)]).backward())
    assert (found[12] - found[2]) / 10 <= 31 and found[2] <= 180, found


# What becomes of a program


def test_optimizers(gpu):
    net = trained(NETS["residuals"]())
    eager, program = copy.deepcopy(net), pm.compile(net)
    optimizers = [torch.optim.AdamW(one.parameters(), 1e-3) for one in (eager, program)]
    for seed in range(4):
        x = cloud(seed)
        near(step(program, x), on_plain(eager, x), 5e-3)
        for optimizer in optimizers:
            optimizer.step()


def test_modes_and_copies(gpu):
    net = trained(NETS["residuals"]())
    program, x = pm.compile(net), cloud(0)
    step(program, x)
    other = copy.deepcopy(program)
    other.load_state_dict({name: p + 0.1 if p.is_floating_point() else p for name, p in net.state_dict().items()})
    eager = copy.deepcopy(other._net)
    near(step(other, x), on_plain(eager, x), 2e-3)
    eager = copy.deepcopy(net)
    near(step(program, x), on_plain(eager, x), 2e-3)
    # By running statistics, with gradients and without; by its batch without gradients.
    for mode, needed in ((False, True), (False, False), (True, False), (True, True)):
        gpu.clear()
        for one in (program, eager):
            one.train(mode)
        with torch.set_grad_enabled(needed):
            near(step(program, x, needed), on_plain(eager, x, needed), 2e-3)
        assert len(gpu.passes) == (mode or needed) and len(gpu.back) == needed
    assert len(program._programs.values()) <= 4
    program.requires_grad_(False)
    assert not program(x).requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(gpu, reentrant):
    net = trained(NETS["residuals"]())
    eager, program, x = copy.deepcopy(net), pm.compile(net), cloud(0)

    class Checkpointed(nn.Module):
        def __init__(self, own):
            super().__init__()
            self.own = own

        def forward(self, x):
            feats = checkpoint(lambda feats: self.own(x.replace(feats)).feats, x.feats, use_reentrant=reentrant)
            return x.replace(feats)

    for _ in range(2):
        gpu.clear()
        near(step(Checkpointed(program), x, True), on_plain(Checkpointed(eager), x, True), 2e-3)
        # A second forward pass may end with the last tensor that is saved.
        assert gpu.passes[:1] == gpu.back == [6] and len(gpu.passes) <= 2


def test_tensors_that_are_saved_elsewhere(gpu):
    net = trained(NETS["branches"]())
    eager, program, x = copy.deepcopy(net), pm.compile(net), cloud(0)
    kept = []

    def pack(t):
        kept.append(t.clone())
        return len(kept) - 1

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda n: kept[n]):
            found = step(program, x, True)
        near(found, on_plain(eager, x, True), 2e-3)


@pytest.mark.parametrize("name", ["chain", "biases", "smooth", "linear", "no scale", "branches", "frozen"])
def test_gradients_of_gradients(gpu, name):
    net = trained(NETS[name]())

    def slopes(net, x):
        feats = x.feats.detach().requires_grad_()
        trained = [feats, *(p for p in net.parameters() if p.requires_grad)]
        loss = sum(y.feats.pow(3).sum() for y in flat(net(x.replace(feats))))
        first = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
        penalty = sum(g.square().sum() for g in first if g is not None)
        second = torch.autograd.grad(penalty, trained, allow_unused=True)
        return [[torch.zeros(1) if g is None else g.detach() for g in found] for found in (first, second)]

    eager, x = copy.deepcopy(net), cloud(0, 60)
    found = slopes(pm.compile(net), x)
    assert gpu.passes
    with on_cpu():
        expected = slopes(eager, pm.SparseTensor(x.feats, x.coords))
    for ours, theirs in zip(found, expected, strict=True):
        # The gradient of a bias before a norm is 0 but for rounding.
        most = max(float(t.norm()) for t in theirs)
        assert all(float((a - b).norm()) <= 1e-4 * most for a, b in zip(ours, theirs, strict=True))


def test_what_was_written_since_is_told(gpu):
    net = trained(NETS["residuals"]())
    program, x = pm.compile(net), cloud(0)
    y = program(x)
    with torch.no_grad():
        net[0].conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.feats.sum().backward()
    # The result of a block is read by its gradient; that of a layer without a sum is not.
    y = program(x)
    with torch.no_grad():
        y.feats.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.feats.sum().backward()
    program = pm.compile(trained(NETS["chain"]()))
    y = program(x)
    y.feats.mul_(2).sum().backward()


def test_gradients_are_written_to_one_by_one(gpu):
    net = trained(NETS["residuals"]())
    program, x = pm.compile(net), cloud(0)
    grads = torch.autograd.grad(loss_of([program(x)]), [*net.parameters()])
    before = grads[0].clone()
    scale = torch.ones_like(before, requires_grad=True)
    product = (grads[0] * scale).sum()
    for grad in grads[1:]:
        grad.mul_(2)
    product.backward()
    assert torch.equal(scale.grad, before)


def test_gradients_in_other_layouts(gpu):
    net = trained(NETS["biases"]())
    eager, program, x = copy.deepcopy(net), pm.compile(net), cloud(0)
    losses = (
        lambda y: (torch.cat([torch.ones_like(y), y], 1) ** 2).sum(),
        lambda y: (y.t().contiguous() ** 2).sum(),
        lambda y: y[5, 2] * 3,
        lambda y: (torch.cat([y.new_zeros(1), y.flatten()])[1:] ** 3).sum(),
    )
    for loss in losses:
        found = torch.autograd.grad(loss(program(x).feats), [*net.parameters()])
        with on_cpu():
            given = pm.SparseTensor(x.feats, x.coords)
            expected = torch.autograd.grad(loss(eager(given).feats), [*eager.parameters()])
        near([found], [expected], 2e-3)


def test_features_that_are_not_side_by_side(gpu):
    net = trained(NETS["residuals"]())
    eager, program, x = copy.deepcopy(net), pm.compile(net), cloud(0)
    for feats in (torch.randn(150, 8)[:, 3:7], torch.randn(601)[1:].view(150, 4), torch.randn(4, 150).t()):
        y = program(x.replace(feats))
        with on_cpu():
            assert far(y.feats, eager(pm.SparseTensor(feats, x.coords)).feats) < 2e-3


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_few_rows(gpu, rows):
    net = trained(NETS["residuals"]())
    eager, program, x = copy.deepcopy(net), pm.compile(net), cloud(0, max(rows, 1))
    x = pm.SparseTensor(x.feats[:rows], x.coords[:rows], batch_size=1)
    for _ in range(2):
        gpu.clear()
        found = step(program, x)
        with on_cpu():
            expected = step(eager, pm.SparseTensor(x.feats, x.coords, batch_size=1))
        near([found[0], found[2]], [expected[0], expected[2]], 2e-3)
        assert len(gpu.passes) == (rows > 1)


def test_what_is_not_a_kernel(gpu):
    """Groups, a dataflow, a dropout and a hooked layer lie between stretches; several dtypes are the modules' own."""
    grouped, named = conv(4, 4, norm(4), groups=2), conv(4, 4, norm(4), dataflow="fetch-on-demand")
    net = trained(nn.Sequential(NETS["chain"](), grouped, pm.nn.Dropout(0.5), named, NETS["chain"]()))
    eager, program = copy.deepcopy(net), pm.compile(net)
    for seed in (0, 1):
        gpu.clear()
        x = cloud(seed)
        near(step(program, x), on_plain(eager, x), 2e-3)
        assert gpu.passes == [3, 3] and gpu.back == [3, 3]
    gpu.clear()
    net, x = trained(Residual(4, False)), cloud(0)
    eager, program = copy.deepcopy(net), pm.compile(net)
    near(step(program, x, False, torch.bfloat16), on_plain(eager, x, False, torch.bfloat16), 0.05)
    assert not gpu.passes


def test_nothing_is_kept_of_a_scene(gpu):
    program, x = pm.compile(trained(NETS["branches"]())), cloud(0)
    results = flat(program(x))
    loss_of(results).backward()
    held = [weakref.ref(one) for one in (x.feats, x.geometry, *(y.feats for y in results))]
    gc.collect()
    with without_collection():
        del x, results
        assert [ref() for ref in held] == [None] * len(held)


def test_interleaved_norms():
    """Two products share a norm, whose statistics follow in the order of its calls."""

    class Interleaved(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.norm = pm.nn.Conv3d(4, 4, 3), pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4)
            self.own = pm.nn.BatchNorm(4)

        def forward(self, x):
            a, b = self.norm(self.one(x)), self.norm(self.two(x))
            seen = x.replace(x.feats * self.own.running_mean)
            c = self.own(self.one(seen))
            return torch_relu(b), torch_relu(a), x.replace(c.feats * self.own.running_var)

    net = trained(Interleaved())
    eager, program = copy.deepcopy(net), pm.compile(net)
    for seed in range(2):
        near(step(program, cloud(seed)), step(eager, cloud(seed)), 1e-5)


# torch.func


def parameters_of(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def stacked(net):
    return {name: torch.stack([p, p * 0.5]) for name, p in parameters_of(net).items()}


def loss_by(net, x):
    return lambda parameters: functional_call(net, parameters, (x,)).feats.square().sum()


def called_with_others(net, x):
    own = {name: (2 * p).requires_grad_() for name, p in parameters_of(net).items()}
    return torch.autograd.grad(loss_by(net, x)(own), [*own.values()])


def gradient_transform(net, x):
    return [*torch.func.grad(loss_by(net, x))(parameters_of(net)).values()]


def gradient_of_features(net, x):
    return [torch.func.grad(lambda feats: net(x.replace(feats)).feats.square().sum())(x.feats)]


def tangents(net, x):
    own = parameters_of(net)
    return jvp(loss_by(net, x), (own,), ({name: torch.ones_like(p) for name, p in own.items()},))


def per_parameters(net, x):
    buffers = dict(net.named_buffers())
    return [vmap(lambda own: functional_call(net, (own, buffers), (x,)).feats)(stacked(net))]


def gradients_per_parameters(net, x):
    return [*vmap(torch.func.grad(loss_by(net, x)))(stacked(net)).values()]


def per_features(net, x):
    return [vmap(lambda feats: net(x.replace(feats)).feats)(torch.stack([x.feats, 2 * x.feats]))]


def hessian_products(net, x):
    own = parameters_of(net)
    ones = {name: torch.ones_like(p) for name, p in own.items()}
    return [*jvp(torch.func.grad(loss_by(net, x)), (own,), (ones,))[1].values()]


def without_gradients(net, x):
    with torch.inference_mode():
        return [net(x).feats.clone()]


TRANSFORMS = (
    called_with_others,
    gradient_transform,
    gradient_of_features,
    tangents,
    per_parameters,
    gradients_per_parameters,
    per_features,
    hessian_products,
    without_gradients,
)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_transforms(transform, training, device, tmp_path, known):
    """Those of the module, on coordinates that no map is known of; a step of training after them is the module's."""
    torch.manual_seed(0)
    # torch's transforms refuse the writes to running statistics.
    units = [conv(4, 8, norm(8, track_running_stats=not training), pm.nn.ReLU()), conv(8, 8, size=2, stride=2)]
    net = trained(nn.Sequential(*units, pm.nn.ReLU(), pm.nn.Linear(8, 3))).train(training)
    eager, program, x = copy.deepcopy(net), pm.compile(net), cloud(0, 60)
    with emulated(tmp_path, known) if device == "gpu" else nullcontext():
        for _ in range(2):
            found = transform(program, pm.SparseTensor(x.feats, x.coords))
            with on_cpu():
                expected = transform(eager, pm.SparseTensor(x.feats, x.coords))
            near([found], [expected], 1e-3)
            near(step(program, x, True), on_plain(eager, x, True), 1e-3)
        transform(program, x)
        near(step(program, x, True), on_plain(eager, x, True), 1e-3)
