"""pm.compile: a program gives what its module gives, whatever the module is and whatever becomes of it."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import weakref
from importlib import import_module

import pytest
import torch
from emulated import emulated, on_cpu
from journeys.calls import calls_of
from nets import Gate, strange
from programs import Maker, Residual, Unit, flat, scene
from torch import nn
from torch.utils.checkpoint import checkpoint
from wide import beyond

import pumice as pm
from benchmarks.scenes.stream_nets import ENCODER, UNET, Encoder, UNet
from pumice.coords import chain_build
from pumice.engine import stretch
from pumice.engine.trace import CallStep, Product
from pumice.errors import DtypeError, GeometryError, OptionError, PumiceError, ShapeError
from pumice.lower import kernel as kernels
from pumice.runtime.launch import without_collection
from pumice.testing import random_cloud

prepare, programs = import_module("pumice.ops.prepare"), import_module("pumice.engine.program")
NETS = {
    "unet": lambda: UNet([width // 8 for width in UNET]),
    "encoder": lambda: Encoder([width // 4 for width in ENCODER]),
    "minkunet": lambda: pm.models.MinkUNet(4, 19, width=0.125),
    "centerpoint": lambda: pm.models.CenterPointBackbone(4),
}
LAYERS = {"unet": 50, "encoder": 20, "minkunet": 50, "centerpoint": 21}


def check(found, expected, tolerance=0.0):
    found, expected = flat(found), flat(expected)
    assert [*map(type, found)] == [*map(type, expected)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.coords, other.coords)
        assert (one.stride, one.dtype) == (other.stride, other.dtype)
        if tolerance:
            torch.testing.assert_close(one.feats, other.feats, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(one.feats.nan_to_num(), other.feats.nan_to_num())


def steps(program):
    return program._programs.get(program._last).graph.steps


def attributes(net):
    return [{k: v for k, v in module.__dict__.items() if k in ("calls", "seen")} for module in net.modules()]


def made(seed):
    return Maker(seed).net(random.Random(seed).randint(2, 12))


def cloud(seed, rows=1200, channels=4):
    coords = random_cloud(rows, 3, extent=(48, 48, 32), seed=seed)
    feats = torch.randn(rows, channels, generator=torch.Generator().manual_seed(seed))
    return pm.SparseTensor(feats, coords)


def moved(x, cells):
    shift = torch.tensor([0, cells, cells, cells], dtype=torch.int32)
    return pm.SparseTensor(x.feats, x.coords + shift)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


# On a CPU


@pytest.mark.parametrize("first", beyond(1, range(0, 150, 15)))
def test_random_networks(first):
    for seed in range(first, first + 15):
        net = made(seed)
        eager, program = copy.deepcopy(net), pm.compile(net)
        for one in (seed, seed + 1, seed):
            check(program(scene(one)), eager(scene(one)))
        traced = [*program._programs.values()]
        assert len(traced) == 1
        assert traced[0].graph is not None, traced[0].why
        assert attributes(net) == attributes(eager)
        assert program.explain()


@pytest.mark.parametrize("name", NETS)
def test_networks(name):
    torch.manual_seed(0)
    net = strange(NETS[name]())
    program = pm.compile(net)
    for seed in range(2):
        check(program(cloud(seed)), net(cloud(seed)))
    products = [step for step in steps(program) if isinstance(step, Product)]
    assert len(products) == LAYERS[name]
    assert all(step.norm is not None for step in products[:-1])
    rest = {step.names[0] for step in steps(program) if isinstance(step, CallStep)}
    assert rest <= {"cat", ".feats", "replace"} and "called as they are" in program.explain()


class Functional(nn.Module):
    """A gate by pooled features, and functions of pumice.ops in place of layers."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8)), Gate(8)
        self.down, self.back = pm.nn.Conv3d(8, 16, 2, stride=2), nn.Parameter(torch.randn(8, 2, 2, 2, 16))
        self.wide, self.last = nn.Parameter(torch.randn(16, 3, 3, 3, 16)), pm.nn.Linear(8, 3)
        self.register_buffer("places", torch.rand(50, 4) * torch.tensor([1, 24, 24, 16]))

    def forward(self, x):
        x = self.gate(self.stem(x))
        y = pm.ops.group_norm(pm.ops.conv(self.down(x), self.wide), 4)
        y = pm.ops.conv_inverse(y, self.back, x, stride=2)
        z = self.last(pm.ops.max_pool(x + y, 3, stride=1))
        return (
            z,
            pm.ops.global_max_pool(z),
            pm.ops.row_mean(y, y.feats),
            pm.ops.interpolate(pm.ops.avg_pool(y, 2), self.places),
        )


class Pooled(nn.Module):
    """Levels made by pools, with layers between that keep coordinates."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.pool = pm.nn.Conv3d(4, 8, 3), pm.nn.InstanceNorm(8), pm.nn.MaxPool3d(2)
        self.b, self.own, self.down = pm.nn.Conv3d(8, 8, 5), pm.nn.Identity(), pm.nn.Conv3d(8, 8, 3, 2, 1)
        self.again, self.c = pm.nn.AvgPool3d(3, 2, 1), pm.nn.Conv3d(8, 8, 3, dilation=2)

    def forward(self, x):
        x = self.own(self.b(self.pool(self.norm(self.a(x)))))
        return self.c(self.down(x) + self.again(x))


def test_maps_below_pools_are_built_with_the_others(monkeypatch):
    requested = []
    monkeypatch.setattr(programs, "requested_maps", lambda *given: requested.append(given) or wanted(*given))
    wanted = prepare.requested_maps
    net = strange(Pooled()).eval()
    program = pm.compile(net)
    for seed in range(2):
        check(program(cloud(seed)), net(cloud(seed)), 1e-5)
    ((steps, same, consumers),) = requested
    assert [(step.kernel, step.stride) for step in steps] == [((2,) * 3, (2,) * 3), ((3,) * 3, (2,) * 3)]
    assert [[window.kernel[0] for window in each] for each in same] == [[3], [5], [3]]
    # The layouts are those of convolutions.
    assert consumers.steps == [[], [net.down]]


def test_functions_of_ops_are_steps(tmp_path):
    """Layers behind them are fused as before, on a GPU as well."""
    net = strange(Functional())
    program = pm.compile(net)
    for seed in range(2):
        (y, *found), (z, *expected) = program(cloud(seed)), net(cloud(seed))
        check(y, z)
        assert all(map(torch.equal, found, expected)) and len(found) == 3
        with emulated(tmp_path):
            check(program(cloud(seed))[0], z, 2e-3)
    assert " 0 modules called as they are" in program.explain()
    products = [step.names for step in steps(program) if isinstance(step, Product)]
    assert products == [("stem.0", "stem.1"), ("down",), ("last",)]


# On a GPU


@pytest.mark.parametrize("first", beyond(1, range(0, 24, 6)))
def test_random_networks_on_a_gpu(first, tmp_path):
    for seed in range(first, first + 6):
        net = made(seed)
        eager, program = copy.deepcopy(net), pm.compile(net)
        with emulated(tmp_path):
            for one in (seed, seed + 1, seed, seed + 1):
                found = program(scene(one))
                with on_cpu():
                    check(found, eager(scene(one)), 2e-3)
                assert all(y.feats.is_contiguous() for y in flat(found) if y.feats.shape[1] != 1)


@pytest.mark.parametrize("name", NETS)
def test_a_kernel_for_each_layer(name, tmp_path):
    torch.manual_seed(0)
    net = strange(NETS[name]())
    program, x = pm.compile(net), cloud(0)
    with emulated(tmp_path) as gpu:
        # Kernels of a result's own, and of its columns in another, are not the same.
        program(x), program(moved(x, 32))
        for y, by_address in ((cloud(1), False), (moved(x, 64), True)):
            gpu.clear()
            found = program(y)
            assert len(gpu.launches) == len(gpu.started) == LAYERS[name]
            assert not by_address or all(one.by_address for one in gpu.started)
            with on_cpu():
                check(found, net(moved(y, 0)), 1e-4)
        calls = calls_of(lambda: program(x))
    assert calls <= 6 * LAYERS[name] + 132


def test_a_network_on_another_gpu_runs_with_that_as_the_current_one(monkeypatch):
    """Its kernels are launched on the current device, and only while it runs."""
    current, entered = [False], []

    class Device:
        def __init__(self, device):
            entered.append(device)

        def __enter__(self):
            current[0] = True

        def __exit__(self, *_):
            current[0] = False

    net, x = strange(NETS["encoder"]()), scene(4)
    program = pm.compile(net)
    with torch.no_grad():
        want = program(x)
    monkeypatch.setattr(programs, "_is_current", lambda x: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    with torch.no_grad():
        check(program(x), want)
    assert entered == [torch.device("cpu")] and not current[0]


def test_levels_share_memory(tmp_path, monkeypatch):
    """An arena is little larger than what lives at once; slots are never shared by values that do."""
    runs, allocate = [], stretch.StretchRun.allocate

    def spy(self, starting):
        runs.append([(one.starts, self.rows(one.at_y) * one.starts.width) for one in starting])
        allocate(self, starting)

    monkeypatch.setattr(stretch.StretchRun, "allocate", spy)
    program = pm.compile(UNet().eval())
    with emulated(tmp_path):
        program(cloud(0, rows=3000))
    (found,) = runs
    inside = [(buffer, size) for buffer, size in found if not buffer.own]
    slots = {}
    for buffer, size in inside:
        slots.setdefault(buffer.slot, []).append((buffer.born, buffer.last, size))
    for own in slots.values():
        own.sort()
        assert all(last < born for (_, last, _), (born, _, _) in zip(own, own[1:], strict=False))
    times = range(max(buffer.last for buffer, _ in inside) + 1)
    live = max(sum(size for buffer, size in inside if buffer.born <= t <= buffer.last) for t in times)
    total = sum(max(size for _, _, size in own) for own in slots.values())
    assert len(slots) < 10 and total <= 1.5 * live


@pytest.mark.parametrize("name", NETS)
def test_scenes_without_voxels(name, tmp_path):
    net = strange(NETS[name]())
    program, x, none = pm.compile(net), cloud(0), pm.SparseTensor(torch.zeros(0, 4), torch.zeros(0, 4).int())
    with emulated(tmp_path):
        for y in (none, x, none):
            found = program(y)
            with on_cpu():
                check(found, net(moved(y, 0)) if len(y.coords) else net(y), 1e-4)


def test_tensors_are_checked_while_maps_are_built(tmp_path, monkeypatch):
    """Before the host waits for the sizes of maps, once in a call; the next call has its maps."""
    order, launches, fill = [], stretch.Stretch._launches, chain_build.fill_tiles
    monkeypatch.setattr(stretch.Stretch, "_launches", lambda *given: order.append("checked") or launches(*given))
    monkeypatch.setattr(chain_build, "fill_tiles", lambda *given: order.append("sizes are known") or fill(*given))
    monkeypatch.setattr(prepare, "has_triton", lambda tensor: True)
    net, x = strange(NETS["unet"]()).eval(), scene(0, 4, 300)
    program = pm.compile(net)
    with emulated(tmp_path), torch.no_grad():
        found = [program(x), program(x)]
        with on_cpu():
            expected = net(x)
    assert order == ["checked", "sizes are known", "checked"]
    for one in found:
        check(one, expected, 1e-4)


def test_a_product_that_has_no_kernel_is_compiled_ahead_once(tmp_path, monkeypatch):
    """Of one row: the planner takes another way than a kernel."""
    asked, compiled = [], stretch.StretchRun._compile
    monkeypatch.setattr(stretch.StretchRun, "_compile", lambda self, maps: asked.append(1) or compiled(self, maps))
    program = pm.compile(torch.nn.Sequential(pm.nn.Linear(128, 256), pm.nn.BatchNorm(256)).half().eval())
    with emulated(tmp_path), torch.no_grad():
        for rows in (1, 1, 1):
            coords = torch.arange(rows).int()[:, None].expand(rows, 4).contiguous() * torch.tensor([0, 1, 1, 1]).int()
            program(pm.SparseTensor(torch.randn(rows, 128).half(), coords))
    assert len(asked) == 1


def test_half_precision(tmp_path):
    torch.manual_seed(0)
    net = strange(UNet([width // 4 for width in UNET]))
    program, x = pm.compile(net), cloud(0)
    expected = net(x).feats
    net.half()
    with emulated(tmp_path) as gpu:
        for shift in (0, 32, 64):
            gpu.clear()
            found = program(moved(x.half(), shift))
            assert found.dtype == torch.float16 and len(gpu.launches) == 50
            torch.testing.assert_close(found.feats.float(), expected, rtol=2e-2, atol=2e-2)
        # Back in single precision, where nothing of the half is left.
        net.float()
        found = program(moved(x, 0))
        with on_cpu():
            torch.testing.assert_close(found.feats, net(moved(x, 0)).feats, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("precision", "parts", "tolerance"), [("tf32x3", 3, 1e-5), ("tf32", 1, 1e-2), ("ieee", 0, 1e-5)]
)
def test_weights_of_float32_products_are_stored_in_parts(precision, parts, tolerance, tmp_path, monkeypatch):
    """Those of matrix products on tensor cores, in every call as they are then."""
    monkeypatch.setattr(kernels, "float32_precision", lambda: precision)
    torch.manual_seed(0)
    net = strange(UNet([max(16, width // 8) for width in UNET]))
    x, program = cloud(0), pm.compile(net)
    with emulated(tmp_path) as gpu, torch.no_grad():
        for _ in range(2):
            check(program(x), by_modules(net, x), tolerance)
            for weight in net.parameters():
                weight.data.mul_(1.1)
    # The first layer has 4 channels.
    assert {made.finish.weight_parts for made in gpu.sources.values()} == {0, parts}
    kept = {made.finish.in_tf32 for made in gpu.sources.values()}
    # What comes from outside, is added, or is given back, is not rounded.
    assert kept == ({"x", "y", "xy"} if parts == 1 else {""})


def by_modules(net, x):
    with on_cpu():
        return net(x)


@pytest.mark.parametrize("name", NETS)
def test_autocast(name, tmp_path):
    """What autocast casts is cast on the way in; a sum with what it does not cast is not."""
    torch.manual_seed(0)
    net = strange(NETS[name]())
    program, x = pm.compile(net), cloud(0)
    with emulated(tmp_path) as gpu, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for shift in (0, 32, 64):
            gpu.clear()
            found = program(moved(x, shift))
            with on_cpu():
                expected = net(moved(x, shift))
            assert found.dtype == expected.dtype == torch.bfloat16 and len(gpu.launches) == LAYERS[name]
            error = (found.feats.float() - expected.feats.float()).norm() / expected.feats.float().norm()
            assert error < 0.03
        assert all(one.by_address for one in gpu.started)
        for parameter in net.parameters():
            parameter.mul_(0.5)
        with torch.inference_mode():
            found = program(moved(x, 96))
        with on_cpu():
            expected = net(moved(x, 96))
        assert (found.feats.float() - expected.feats.float()).norm() < 0.03 * expected.feats.float().norm()
        wide = strange(Residual(4, False))
        found = pm.compile(wide)(moved(x, 0))
        with on_cpu():
            expected = wide(moved(x, 0))
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found.feats, expected.feats, rtol=3e-2, atol=3e-2)


def test_slices(tmp_path):
    """Parts of a concatenation: columns of it, one that is read elsewhere, one that is there twice, and one that is a
    result."""
    torch.manual_seed(0)
    conv = pm.nn.Conv3d
    first, second = Unit(conv(4, 8, 3), pm.nn.ReLU()), Unit(conv(8, 4, 3), pm.nn.ReLU())

    class Cats(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.first, self.second, self.last, self.how = first, second, conv(12 if how < 2 else 16, 8, 3), how

        def forward(self, x):
            y = self.first(x)
            z = self.second(y)
            if self.how == 0:
                return self.last(pm.cat([y, z]))
            if self.how == 1:
                both = pm.cat((z, y))
                return self.last(both), z
            return self.last(pm.cat([y, y]))

    for how in range(3):
        net = strange(Cats(how))
        program = pm.compile(net)
        with emulated(tmp_path):
            for shift in (0, 16, 32, 48):
                found = program(moved(cloud(2), shift))
                with on_cpu():
                    check(found, net(moved(cloud(2), shift)), 1e-4)


def test_a_bias_before_a_norm(tmp_path):
    """Taken from the mean, which is that of the call."""
    torch.manual_seed(0)
    units = [Unit(pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4, affine=n > 0), pm.nn.ReLU()) for n in range(3)]
    net = strange(nn.Sequential(*units))
    program, x = pm.compile(net), cloud(4)
    with emulated(tmp_path) as gpu:
        for shift in (0, 16, 32, 48):
            gpu.clear()
            found = program(moved(x, shift))
            assert len(gpu.launches) == 3
            with on_cpu():
                check(found, net(moved(x, shift)), 1e-4)
            for unit in units:
                unit.conv.bias.add_(0.1)
                unit.rest[0].running_mean.data = torch.rand(4)
        assert all(one.by_address for one in gpu.started)
        units[1].conv.bias = nn.Parameter(torch.rand(4).half())
        with pytest.raises(DtypeError):
            program(moved(x, 0))
        units[1].conv.bias = None
        units[1].rest[0].running_mean = torch.rand(5)
        with pytest.raises(RuntimeError):
            program(moved(x, 0))


def test_misaligned_features(tmp_path):
    torch.manual_seed(0)
    net = strange(nn.Sequential(*(Residual(4, True) for _ in range(2))))
    program, x = pm.compile(net), cloud(3)
    feats = torch.randn(1201 * 4 + 1)[1:4801].view(1200, 4)
    with emulated(tmp_path):
        for given in (x.feats, feats, torch.randn(1200, 8)[:, 4:], x.feats):
            found = program(x.replace(given))
            with on_cpu():
                check(found, net(x.replace(given)), 1e-4)


# Guards


def weight_replaced(net):
    net.conv.weight = nn.Parameter(torch.randn_like(net.conv.weight))


def weight_written(net):
    net.conv.weight.data.mul_(2)


def data_replaced(net):
    net.norm.running_var.data = torch.rand_like(net.norm.running_var) + 0.5


def state_loaded(net):
    net.load_state_dict({name: x + 1 if x.is_floating_point() else x for name, x in net.state_dict().items()})


def hook_added(net):
    net.norm.register_forward_hook(lambda module, given, found: found * 2)


def hook_on_root(net):
    net.register_forward_hook(lambda module, given, found: found * 2)


def submodule_replaced(net):
    net.conv = pm.nn.Conv3d(8, 8, 1)


def activation_replaced(net):
    net.relu = pm.nn.ELU()


def option_changed(net):
    net.norm.eps = 0.5


def dataflow_changed(net):
    net.conv.dataflow = "fetch-on-demand"


def forward_replaced(net):
    net.forward = lambda x: x


def class_changed(net):
    class Other(Residual):
        def forward(self, x):
            return x * 2.0

    net.__class__ = Other


def norm_in_training(net):
    net.norm.train()


def attribute_changed(net):
    net.swapped = not net.swapped
    net.extra = [1]


def parametrized(net):
    torch.nn.utils.parametrizations.weight_norm(net.conv)


CHANGES = (
    weight_replaced,
    weight_written,
    data_replaced,
    state_loaded,
    hook_added,
    hook_on_root,
    submodule_replaced,
    activation_replaced,
    option_changed,
    dataflow_changed,
    forward_replaced,
    class_changed,
    norm_in_training,
    attribute_changed,
    parametrized,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_changes(change, device, tmp_path, request):
    torch.manual_seed(0)
    net = strange(Residual(8, False))
    program, x = pm.compile(net), scene(4, 8, 60)

    def same():
        found, eager = program(x), copy.deepcopy(net)
        if device == "gpu":
            with on_cpu():
                return check(found, eager(x), 1e-3)
        return check(found, eager(x))

    if device == "gpu":
        context = emulated(tmp_path)
        context.__enter__()
        request.addfinalizer(lambda: context.__exit__(None, None, None))
    same()
    same()
    if change is norm_in_training:
        # Each of the two counts a batch.
        change(net)
        expected = copy.deepcopy(net)(x)
        torch.testing.assert_close(program(x).feats, expected.feats)
        net.norm.eval()
        net.norm.reset_running_stats()
    else:
        change(net)
    same()
    same()


def test_hooks_come_and_go():
    net = strange(UNet([width // 8 for width in UNET]))
    program, x, heard = pm.compile(net), cloud(0, 300), []
    program(x)
    handle = net.enc[1][0].norm1.register_forward_hook(lambda *given: heard.append(1))
    check(program(x), net(x))
    assert len(heard) == 2 and "enc.1.0.norm1" in program.explain() and "it has hooks" in program.explain()
    handle.remove()
    program(x)
    assert len(heard) == 2 and "it has hooks" not in program.explain()
    handle = nn.modules.module.register_module_forward_hook(lambda *given: heard.append(2))
    try:
        program(x)
    finally:
        handle.remove()
    assert heard.count(2) > 100


def test_modes():
    torch.manual_seed(0)
    net = strange(nn.Sequential(Residual(4, True), pm.nn.Dropout(0.5)))
    program, x = pm.compile(net), cloud(0, 300)
    check(program(x), net(x))
    assert program.train() is program and net.training and net[0].norm.training and program.training
    torch.manual_seed(3)
    found = program(x)
    torch.manual_seed(3)
    assert torch.equal(found.feats, net(x).feats) and (found.feats == 0).any()
    net.eval()
    assert not program.training
    check(program(x), net(x))
    net[1].train()
    torch.manual_seed(3)
    found = program(x)
    torch.manual_seed(3)
    check(found, net(x))


def test_it_is_the_module():
    net = Residual(4, True)
    program = pm.compile(net)
    assert isinstance(program, pm.Program) and pm.compile(program) is program
    assert [*dict(program.named_parameters())] == [*dict(net.named_parameters())]
    assert [*program.state_dict()] == [*net.state_dict()] and [*program.children()] == [*net.children()]
    assert [name for name, _ in program.named_modules()] == [name for name, _ in net.named_modules()]
    assert program.conv is net.conv and program.swapped
    program.half()
    assert net.conv.weight.dtype == torch.float16
    program.load_state_dict(Residual(4, True).half().state_dict())
    outer = nn.ModuleDict({"inner": program})
    outer.load_state_dict({f"inner.{name}": x for name, x in Residual(4, True).state_dict().items()})
    assert [*outer.state_dict()][0] == "inner.conv.weight"
    program.conv = pm.nn.Conv3d(4, 4, 1)
    program.swapped = False
    assert net.conv is program.conv and not net.swapped
    assert "Residual" in repr(program) and "not traced yet" in program.explain()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda program: pickle.loads(pickle.dumps(program))])
def test_copies(again):
    torch.manual_seed(0)
    program, x = pm.compile(strange(Residual(4, True))), cloud(0, 300)
    found = program(x)
    other = again(program)
    check(other(x), found)
    assert other._net.conv is other.conv and other._net is not program._net
    other.conv.weight.data.zero_()
    check(program(x), found)
    assert not torch.equal(other(x).feats, found.feats)


def test_gradients():
    torch.manual_seed(0)
    net = strange(Residual(4, False))
    program, x = pm.compile(net), cloud(0, 300)
    with torch.enable_grad():
        y, z = program(x), net(x)
        given = y.feats.sum().backward()
        found = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        z.feats.sum().backward()
        assert given is None and all(torch.equal(a, p.grad) for a, p in zip(found, net.parameters(), strict=True))
        # Frozen: of the features alone.
        net.requires_grad_(False)
        assert not program(x).requires_grad
        leaf = x.replace(x.feats.clone().requires_grad_())
        program(leaf).feats.sum().backward()
        assert leaf.feats.grad is not None
        again = checkpoint(program, x.replace(x.feats.clone().requires_grad_()), use_reentrant=False)
        assert again.requires_grad


def test_contexts():
    torch.manual_seed(0)
    net = strange(Residual(4, False))
    program, x = pm.compile(net), cloud(0, 300)
    with torch.autocast("cpu", torch.bfloat16):
        check(program(x), net(x))
    with torch.inference_mode():
        check(program(x), net(x))
    weights = {name: p * 2 for name, p in net.named_parameters()}
    found = torch.func.functional_call(program, weights, (x,))
    check(found, torch.func.functional_call(net, weights, (x,)))
    tangent = torch.randn_like(x.feats)
    for module in (program, net):
        _, found = torch.func.jvp(lambda feats, m=module: m(x.replace(feats)).feats, (x.feats,), (tangent,))
        assert found.abs().sum() > 0
    compiled = torch.compile(program, backend="eager")
    check(compiled(x), net(x), 1e-5)
    captured = pm.capture(program, x)
    torch.testing.assert_close(captured(x).feats, net(x).feats, rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_of_a_scene():
    program, x = pm.compile(strange(UNet([width // 8 for width in UNET]))), cloud(0, 300)
    y = program(x)
    held = [weakref.ref(one) for one in (x.feats, x.geometry, y.feats)]
    with without_collection():
        del x, y
        assert [ref() for ref in held] == [None] * 3


class Looking(pm.nn.Conv3d):
    """Cannot be traced: it branches on values."""

    def forward(self, x):
        return super().forward(x) if x.feats.sum() < 1e9 else x


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: UNet([width // 8 for width in UNET]), lambda: Looking(4, 4, 3)], ids=["whole", "not traced"]
)
def test_nothing_is_kept_of_a_network(make, trains):
    net = strange(make()).train(trains)
    program, held = pm.compile(net), [weakref.ref(one) for one in (net, *net.parameters())]
    with without_collection():
        program(cloud(0, 300))
        del net, program
        assert [ref() for ref in held] == [None] * len(held)


def test_checkpoints_within():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Residual(4, True)

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False) * 2.0

    net = strange(Checkpointed())
    program = pm.compile(net)
    check(program(cloud(0, 300)), net(cloud(0, 300)))
    program.train()
    with torch.enable_grad():
        program(cloud(0, 300)).feats.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_program_within():
    torch.manual_seed(0)
    inner = strange(Residual(4, False))
    net = nn.Sequential(pm.compile(inner), Residual(4, True)).eval()
    program, x = pm.compile(net), cloud(0, 300)
    check(program(x), net(x))


def test_threads():
    torch.manual_seed(0)
    nets = [strange(made(seed)) for seed in range(4)]
    programs, wrong = [pm.compile(net) for net in nets], []

    def run(program, net):
        try:
            with torch.no_grad():
                for seed in range(3):
                    check(program(scene(seed)), net(scene(seed)))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(programs, copy.deepcopy(nets), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# What is told


def test_explain_tells_the_line():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.other = pm.nn.Conv3d(4, 4, 3), pm.nn.Linear(4, 4)

        def forward(self, x):
            return self.conv(x) if x.feats.mean() > 0 else self.other(x)

    torch.manual_seed(0)
    net = nn.Sequential(Residual(4, True), Picks(), pm.nn.ReLU()).eval()
    program = pm.compile(net)
    check(program(cloud(0)), net(cloud(0)))
    told = program.explain()
    assert "return self.conv(x) if x.feats.mean() > 0 else self.other(x)" in told and "test_program.py:" in told
    assert "convolution + norm + sum + relu" in told and "3 steps: 1 convolutions" in told
    whole = pm.compile(Picks().eval())
    whole(cloud(0))
    assert whole.explain().startswith("the module is called as it is: test_program.py:")


def test_a_forward_that_catches():
    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pm.nn.Conv3d(4, 4, 3)

        def forward(self, x):
            try:
                return self.conv(x) if x.feats.mean() > -9 else x
            except ValueError:
                return x

    net = nn.Sequential(Catches(), pm.nn.ReLU()).eval()
    program = pm.compile(net)
    check(program(cloud(0, 300)), net(cloud(0, 300)))
    assert "catches exceptions" in program.explain()


def test_scripted_and_printing_modules(capsys):
    class Prints(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Residual(4, True)
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

        def forward(self, x):
            print("called")
            return x.replace(self.scripted(self.block(x).feats))

    class Scripted(Prints):
        def forward(self, x):
            return x.replace(self.scripted(self.block(x).feats))

    torch.manual_seed(0)
    for kind, count in ((Prints, 4), (Scripted, 0)):
        net = strange(kind())
        program = pm.compile(net)
        for _ in range(2):
            check(program(cloud(0, 300)), net(cloud(0, 300)))
        assert capsys.readouterr().out.count("called") == count
    assert len([step for step in steps(program) if isinstance(step, Product)]) == 1


def test_arguments():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pm.nn.InverseConv3d(4, 4, 2, 2)

        def forward(self, x, y=None, scale=1.0):
            return (x if y is None else self.conv(y, x)) * scale

    net = Two().eval()
    program, x = pm.compile(net), cloud(0)
    y = pm.nn.Conv3d(4, 4, 2, 2)(x)
    for args, kwargs in (((x,), {}), ((x, y), {}), ((x,), {"y": y, "scale": 3.0}), ((x, None, 2.0), {}), ((x, y), {})):
        check(program(*args, **kwargs), net(*args, **kwargs))
    assert len(program._programs.values()) == 4
    for scale in range(40):
        check(program(x, scale=scale), net(x, scale=scale))
    assert len(program._programs.values()) == 16


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_errors(device, tmp_path):
    with pytest.raises(OptionError, match="a torch.nn.Module, found int"):
        pm.compile(3)  # pyright: ignore[reportArgumentType]

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = pm.nn.Conv3d(4, 4, 2, 2)

        def forward(self, x):
            return pm.cat([x, self.down(x)])

    program = pm.compile(strange(Residual(4, True)))
    wrong = pm.compile(Other().eval())

    def run():
        with pytest.raises(ShapeError):
            program(cloud(0, 300, 8))
        with pytest.raises(GeometryError):
            wrong(cloud(0, 300))
        with pytest.raises(PumiceError):
            program(torch.randn(3, 4))
        assert len(program(cloud(0, 300))) == 300

    if device == "cpu":
        return run()
    with emulated(tmp_path):
        return run()


def test_dead_branches_are_dropped_where_nobody_notices():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (pm.nn.Conv3d(4, 4, 3) for _ in range(3))
            self.drop = pm.nn.Dropout(0.5)

        def forward(self, x):
            self.a(x)
            self.drop(self.b(x))
            y = self.c(x)
            nn.functional.relu(y.feats, inplace=True)
            return y

    net = Branches().eval()
    net.drop.train()
    program = pm.compile(net)
    check(program(cloud(0)), net(cloud(0)))
    assert [step.names for step in steps(program)] == [("b",), ("drop",), ("c",), (".feats",), ("relu",)]


def test_kernels_for_tiles_of_the_other_height_are_compiled_with_those_of_the_first_scene(tmp_path, monkeypatch):
    """In the background: the first scene whose maps have such tiles makes none."""
    family, maps = import_module("pumice.lower.tile_family").TileFamily, import_module("pumice.lower.maps")
    made, heights, whole = [], [], stretch.plan_for_other_tiles
    monkeypatch.setattr(maps, "_FEW_ROWS", 100)
    monkeypatch.setattr(maps.TILE_HEIGHTS, "compile", lambda height, task: heights.append(height) or task())
    init = family.__init__
    monkeypatch.setattr(family, "__init__", lambda self, *given: (init(self, *given), made.append(self))[0])

    def on_a_gpu(x, *given):
        assert len(x) == 1
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
            return whole(x, *given)

    monkeypatch.setattr(stretch, "plan_for_other_tiles", on_a_gpu)
    net, counts = strange(Residual(4, False)).half(), []
    program = pm.compile(net)
    with emulated(tmp_path), torch.no_grad():
        for rows, height in ((40, 64), (300, 128), (60, 64)):
            x = scene(rows, 4, rows).half()
            found = program(x)
            counts.append(len(made))
            tiled = [maps.bound_map(one).arrays[0].shape[1] for one, _ in x.geometry.maps.values()]
            assert tiled and {*tiled} == {height}
            with on_cpu():
                check(found, net(x), 1e-2)
    assert heights and {*heights} == {128}
    assert counts[0] and len({*counts}) == 1
