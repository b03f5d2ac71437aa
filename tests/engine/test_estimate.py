"""pm.estimate: memory and time of a network from its steps, against figures by hand and against measured memory."""

import copy
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from emulated import emulated
from torch import nn

import pumice as pm
from benchmarks.scenes.workloads import WORKLOADS, fresh, narrow, samples, stand_in
from benchmarks.suites.estimates import Mode, _on_cpu
from pumice.coords import kernel_map
from pumice.engine import dry_stretch, train_pass
from pumice.engine.dry_run import Machine, Meter
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import native_products
from pumice.lower.dataflow import Pass
from pumice.runtime import workspace as workspaces
from pumice.schedule.dataflow import PASSES, PLANNED
from pumice.schedule.predict import DEVICES, LayerWork, MapStats
from pumice.schedule.tile import WHOLE_SEGMENTS, Tile
from pumice.testing import random_cloud

estimates = import_module("pumice.engine.estimate")
INFERENCE, TRAINING = Mode(torch.float32, False), Mode(torch.float32, True)


def scene(voxels=500, channels=4, seed=0):
    coords = random_cloud(voxels, seed=seed)
    return pm.SparseTensor(torch.ones(len(coords), channels), coords, batch_size=1)


def unit(before, after):
    return nn.Sequential(pm.nn.Conv3d(before, after, 3, bias=False), pm.nn.BatchNorm(after), pm.nn.ReLU())


class Branch(nn.Module):
    """Control flow that depends on values: no trace holds."""

    def forward(self, x):
        return x if x.feats.sum() > 0 else -x


class OntoItself(nn.Module):
    """Ends at the coordinates that it is given, by name."""

    def __init__(self):
        super().__init__()
        self.conv = pm.nn.Conv3d(4, 4, 3, bias=False)

    def forward(self, x):
        return self.conv(x, out=x)


@pytest.fixture
def rates(monkeypatch):
    """Rates that do not depend on the machine."""
    monkeypatch.setattr(estimates, "rates_of", lambda device: DEVICES["cpu"])


def test_bytes_by_hand(rates):
    if (run := native_products.kernels(torch.float32)) is None:
        pytest.skip("there is no C compiler")
    net, x = unit(4, 8), scene()
    found, (table, _) = pm.estimate(net, x), kernel_map(fresh_copy(x).geometry, net[0].relation)
    rows, pairs = len(x), int((table.table >= 0).sum())
    # Of the norm: weight and bias, mean and variance, an int64 count.
    own = 4 * 8 * 27 * 4 + 4 * 4 * 8 + 8
    packed, result = 4 * 27 * 4 * (8 + -8 % run.lanes), 4 * rows * 8
    for told in (found.inference, found.training):
        assert (told.parts["parameters"], told.parts["input"]) == (own, 4 * rows * 4 + 4 * rows * 4)
        assert told.memory == sum(told.parts.values())
    # The product, and the norm's result and statistics beside it; ReLU is in place.
    assert found.inference.parts["features"] == packed + 2 * result + 4 * 2 * 8
    # Product, norm, ReLU and the norm's statistics stay until the gradient of the mean square: that of the mean, twice
    # the values, and the product of both; two numbers are the loss and its gradient.
    kept = packed + 3 * result + 4 * 2 * 8
    assert found.training.parts["features and gradients"] == kept + 3 * result + 4 * 2
    conv = next(step for step in found.inference.steps if step.name == "0")
    assert (conv.voxels, conv.channels, conv.pairs) == (rows, 8, pairs)
    assert found.inference.parts["maps"] >= 4 * (rows * 27 + 3 * pairs)


def fresh_copy(x):
    return pm.SparseTensor(x.feats, x.coords, batch_size=1)


def arithmetic(told):
    """Seconds of all but kernel maps, whose are measured."""
    return sum(step.time for step in told.steps[1:])


def test_more_voxels_and_channels_take_more(rates):
    for wide in (lambda n: (unit(4, 16), scene(500 * n)), lambda n: (unit(4, 16 * n), scene(500))):
        small, large = (pm.estimate(*wide(n)) for n in (1, 3))
        for one, other in ((small.inference, large.inference), (small.training, large.training)):
            assert one.memory < other.memory and arithmetic(one) < arithmetic(other)
        assert arithmetic(small.inference) < arithmetic(small.training)
        assert small.inference.memory < small.training.memory


@pytest.mark.parametrize("name", ["minkunet-kitti-0.5x", "centerpoint-nuscenes-10f"])
def test_memory_is_as_measured(name, rates):
    if native_products.kernels(torch.float32) is None:
        pytest.skip("there is no C compiler")
    workload = narrow(stand_in(WORKLOADS[name]))
    sample, net = samples(workload, "cpu", count=1, most=1500)[0], workload.model()
    found = pm.estimate(net, fresh(sample))
    assert found.unknown == () and all(p.grad is None for p in net.parameters())
    for mode, told in ((INFERENCE, found.inference), (TRAINING, found.training)):
        assert told.memory == pytest.approx(_on_cpu(copy.deepcopy(net).train(mode.training), sample, mode), rel=0.06)


def test_nothing_changes(rates):
    net, x = unit(4, 8).train(), scene()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    first = pm.estimate(net, x)
    assert net.training and not x.geometry.maps and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    again = pm.estimate(pm.compile(net), x)
    assert again.inference.parts == first.inference.parts and again.training.parts == first.training.parts
    for p in net.parameters():
        p.requires_grad_(False)
    assert pm.estimate(net, x).training is None


def test_what_cannot_be_followed_is_told(rates):
    net = nn.Sequential(unit(4, 8), Branch(), unit(8, 8))
    found = pm.estimate(net, scene())
    assert found.unknown[0].startswith("1: ") and {name.partition(":")[0] for name in found.unknown} >= {"1", "2.0"}
    assert found.inference.parts["features"] > 0 and arithmetic(found.training) > arithmetic(found.inference)
    assert "not known: 1: " in str(found)
    assert pm.estimate(Branch(), scene()).unknown[0].startswith("Branch: ")


class Thinned(nn.Module):
    """The mean of a column, a number, chooses the voxels that stay."""

    def forward(self, x):
        return x.prune(x.feats[:, 0] >= x.feats.mean())


def test_numbers_and_masks_are_steps(rates):
    found = pm.estimate(Thinned(), scene(channels=4))
    assert found.unknown == ("prune: its result depends on the values of features",)
    steps = {one.name: (one.voxels, one.channels) for one in found.inference.steps}
    assert steps["ge"] == (len(scene()), 1) and steps["mean"] == (0, 0)


def test_coordinates_that_are_their_own_target(rates):
    found, like = (pm.estimate(net, scene()).inference for net in (OntoItself(), pm.nn.Conv3d(4, 4, 3, bias=False)))
    assert found.parts["features"] == like.parts["features"] and found.parts["maps"] > 0


def test_a_table_tells_passes_and_steps(rates):
    lines = str(pm.estimate(unit(4, 8), scene())).splitlines()
    assert lines[0] == "on CPU" and [line.split()[0] for line in lines[2:4]] == ["inference", "training"]
    names = [line.split()[0] for line in lines if line.endswith(" ms")]
    assert names == ["kernel", "0", "other"]


def test_wrong_arguments():
    net, x = unit(4, 8), scene()
    with pytest.raises(DtypeError, match=r"takes a torch.nn.Module, found int"):
        pm.estimate(3, x)
    with pytest.raises(DtypeError, match=r"takes a SparseTensor, found Tensor"):
        pm.estimate(net, x.feats)
    with pytest.raises(OptionError, match=r"loss takes a function .* found int"):
        pm.estimate(net, x, loss=3)
    with pytest.raises(DeviceError, match=r"x is on cpu, the network on meta"):
        pm.estimate(unit(4, 8).to("meta"), x)
    with pytest.raises(ShapeError, match=r"takes 3 channels .*, x has 4"):
        pm.estimate(unit(3, 8), x)
    with pytest.raises(OptionError, match=r"torch.compile"):
        net._orig_mod = net[0]
        pm.estimate(net, x)


def test_stretches_of_a_gpu_allocate_as_told(tmp_path, monkeypatch):
    """The buffers of both passes, and the gradients that the backward pass makes."""
    net, x = pm.models.MinkUNet(4, 5, width=0.125).train(), scene(2000)
    made, needed = {"real": [], "dry": []}, []

    def spy(module, key):
        known = module._allocated

        def allocated(*given):
            memory = known(*given)
            tensors = [*memory[:4], *memory.outs.values()]
            made[key].append([(t.shape, t.dtype) for t in tensors if t is not None])
            return memory

        monkeypatch.setattr(module, "_allocated", allocated)

    spy(train_pass, "real")
    spy(dry_stretch, "dry")
    with emulated(tmp_path):
        take = train_pass.workspace
        monkeypatch.setattr(train_pass, "workspace", lambda *given: needed.append(given[:2]) or take(*given))
        monkeypatch.setattr(estimates, "rates_of", lambda device: replace(DEVICES["cuda"], launch=2e-6))
        found = pm.estimate(net, x)
        pm.compile(net)(fresh_copy(x)).feats.square().mean().backward()
    assert made["real"] == made["dry"] != [] and found.unknown == ()
    grads = sum(p.nbytes for p in net.parameters())
    assert (
        found.training.parts["features and gradients"]
        > grads
        + sum(shape.numel() * dtype.itemsize for shape, dtype in made["dry"][0])
        - 4 * found.training.steps[1].voxels * 5
    )
    assert 0 < found.inference.time < found.training.time < 0.01
    least = workspaces.workspace_bytes(*map(max, zip(*needed, strict=True)))
    assert found.training.parts["workspace"] == pytest.approx(least, rel=0.01) and least > 0


def test_a_tile_is_chosen_without_memory():
    meter = Meter(Machine(DEVICES["cuda"], True), ())
    found, _ = kernel_map(scene().geometry, pm.coords.Relation.of(3, 3))
    works = [LayerWork(MapStats(500, 500, ()), MapStats(500, 500, ()), (32, 64), parts=parts) for parts in (0, 3)]
    with meter:
        tiles = [dry_stretch._tile(Pass(name, PLANNED, found, 1), works[0]) for name in PASSES]
        tiles.append(dry_stretch._tile(Pass("forward", PLANNED, found, 1), works[1]))
        assert meter.peak == 0 and all(isinstance(tile, Tile) for tile in tiles)
        torch.empty(100, device="meta")
    assert meter.peak == 400


def test_the_workspace_of_shared_tiles():
    """A program for each piece of a tile and block of columns, whose sums are kept."""
    side = MapStats(4493, 4493, (1000,) * 27, {"compacted": (861,)}, 64)
    tile = Tile(64, 128, 64, stream_k_chunk=8)
    programs = (71 + 861 // 8) * 2
    assert dry_stretch._shared(side, tile, 256) == (programs, programs * 64 * 128 * 4)
    assert dry_stretch._shared(side, replace(tile, stream_k_chunk=WHOLE_SEGMENTS), 256) == (142, 0)
    turned = replace(tile, rows=128, columns=64, swapped=True)
    assert dry_stretch._shared(side, turned, 256) == (programs, programs * 64 * 128 * 4)
    assert dry_stretch._shared(side, replace(tile, stream_k_chunk=0), 256) == (0, 0)
    assert workspaces.workspace_bytes(programs, 2000) == (1 << 22) + 4 * 512 + 2048
