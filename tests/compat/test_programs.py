"""Networks in spconv's names, compiled and captured: equal to plain calls of them, and fused as ours are."""

import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated import emulated
from torch import nn
from torch.nn import functional as F
from wide import beyond

import pumice as pm
import pumice.compat.minkowski as ME
import pumice.compat.spconv as spconv
import pumice.compat.torchsparse as torchsparse
from pumice.engine.trace import Product
from pumice.errors import DtypeError, OptionError

sys.path.insert(0, str(Path(__file__).parent))
import levels
import networks
from spellings import Spelled

SHAPE = [41, 64, 64]
NETS = [networks.SpUNet, networks.VoxelBackBone8x, networks.VoxelResBackBone8x]


def tensor(seed, voxels=300):
    features, indices = networks.scene(seed=seed, voxels=voxels)
    return spconv.SparseConvTensor(features, indices, SHAPE, 2)


def made(kind):
    torch.manual_seed(0)
    net = kind()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    return net


def products(program):
    (traced,) = program._programs.values()
    assert traced.graph is not None, traced.why
    return [step for step in traced.graph.steps if isinstance(step, Product)], traced.graph.steps


@pytest.mark.parametrize("kind", NETS)
def test_compiled(kind):
    net = made(kind).eval()
    program = pm.compile(net)
    with torch.no_grad():
        for seed in (0, 1):
            x = tensor(seed)
            ours, wanted = program(x), net(tensor(seed))
            assert type(ours) is spconv.SparseConvTensor
            assert torch.equal(ours.indices, wanted.indices)
            assert ours.spatial_shape == wanted.spatial_shape
            torch.testing.assert_close(ours.features, wanted.features)
    fused, steps = products(program)
    # Only concatenations, and coordinates of the keys that the result carries, are steps of their own.
    names = {step.names[0] for step in steps if not isinstance(step, Product)}
    assert names <= {"cat", "coordinates_of"}
    convs = sum(isinstance(m, spconv.conv.SparseConvolution) for m in net.modules())
    assert len(fused) == convs
    assert sum(step.norm is not None for step in fused) == sum(isinstance(m, nn.BatchNorm1d) for m in net.modules())


def test_the_result_of_a_program_finds_its_keys():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = spconv.SparseConv3d(4, 8, 2, 2, indice_key="down")

        def forward(self, x):
            return self.down(x)

    net = Encoder().eval()
    up = spconv.SparseInverseConv3d(8, 4, 2, indice_key="down")
    with torch.no_grad():
        x = tensor(0)
        found, wanted = up(pm.compile(net)(x)), up(net(tensor(0)))
    assert torch.equal(found.indices, x.indices)
    torch.testing.assert_close(found.features, wanted.features)


class Module(nn.Module):
    """As detectors pass everything: a dict that each module changes and returns."""

    def __init__(self):
        super().__init__()
        self.net = networks.VoxelRes(shape=SHAPE)

    def forward(self, batch):
        batch["map"] = self.net(batch["features"], batch["coordinates"], batch["batch_size"])
        batch.update({"scale": 8, "names": batch["names"]})
        return batch


def test_dictionaries_are_changed_as_the_network_does():
    torch.manual_seed(0)
    net = Module().eval()
    program = pm.compile(net)
    with torch.no_grad():
        for seed in (0, 1):
            features, indices = networks.scene(seed=seed)
            own = {"features": features, "coordinates": indices, "batch_size": 2, "names": np.array(["a"])}
            wanted, found = net({**own}), program(own)
            assert found is own
            assert list(found) == list(wanted)
            assert found["scale"] == 8
            assert found["names"] is own["names"]
            torch.testing.assert_close(found["map"], wanted["map"])
    assert len(products(program)[0]) == 21


class Branching(nn.Module):
    """Reads an attribute of an argument that is no tensor, which a trace must not decide once."""

    def __init__(self):
        super().__init__()
        self.conv = pm.nn.Conv3d(4, 4, 3)

    def forward(self, x, options):
        y = self.conv(x)
        return y if options.scale is None else y * options.scale


def test_options_in_objects_are_read_in_every_call():
    class Options:
        def __init__(self, scale):
            self.scale = scale

    net = Branching().eval()
    program = pm.compile(net)
    x = tensor(0).sparse
    with torch.no_grad():
        for scale in (None, 2.0, None):
            torch.testing.assert_close(program(x, Options(scale)).feats, net(x, Options(scale)).feats)


@pytest.mark.parametrize("kind", [networks.SpUNet, networks.VoxelRes])
def test_trained(kind):
    net = made(kind).train()
    other = copy.deepcopy(net)
    program = pm.compile(other)
    for seed in (0, 1):
        features, indices = networks.scene(seed=seed)
        for run in (net, program):
            y = run(tensor(seed)).features if kind is networks.SpUNet else run(features, indices, 2)
            y.square().sum().backward()
    for ours, wanted in zip(other.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-5)
    for ours, wanted in zip(other.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("kind", [networks.SpUNet, networks.VoxelBackBone8x])
def test_captured(kind):
    net = made(kind).eval()
    fast = pm.capture(net, tensor(0), max_voxels=1000)
    with torch.no_grad():
        for seed in (1, 2):
            ours, wanted = fast(tensor(seed, 250 + 20 * seed)), net(tensor(seed, 250 + 20 * seed))
            assert type(ours) is spconv.SparseConvTensor
            assert torch.equal(ours.indices, wanted.indices)
            torch.testing.assert_close(ours.features, wanted.features)
    with pytest.raises(OptionError, match="expected"):
        fast(spconv.SparseConvTensor(*networks.scene(seed=3, items=1), SHAPE, 1))
    with pytest.raises(DtypeError):
        fast([tensor(0)] * 2)


def test_captured_step():
    net = made(networks.SpUNet).train()
    other = copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.01) for each in (net, other))

    def loss(y, labels):
        return F.cross_entropy(y.features, labels)

    def labels(x):
        return torch.arange(len(x.features)) % 13

    x = tensor(0)
    step = pm.capture_step(net, loss, ours, x, labels(x))
    for seed in (1, 2, 3):
        x = tensor(seed, 280)
        theirs.zero_grad()
        wanted = loss(other(x), labels(x))
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(step(x, labels(x)), wanted.detach(), rtol=1e-5, atol=1e-5)


class Plain(nn.Module):
    """torch's modules on features, in every spelling that networks have."""

    def __init__(self, spelling):
        super().__init__()
        self.first, self.second = pm.nn.Conv3d(4, 8, 3, bias=False), pm.nn.Conv3d(8, 8, 3, bias=False)
        self.short = nn.Linear(4, 8, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.act = nn.ReLU(inplace=spelling == "in place")
        self.head, self.spelling = nn.Linear(16, 5), spelling

    def forward(self, x):
        y = self.first(x)
        act = F.relu if self.spelling == "functions" else self.act
        y = y.replace(act(self.norms[0](y.feats)))
        y = self.second(y)
        if self.spelling == "other order":
            y = y.replace(self.norms[2](self.short(x.feats)) + self.norms[1](y.feats))
        else:
            y = y.replace(self.norms[1](y.feats) + self.norms[2](self.short(x.feats)))
        y = y.replace(act(y.feats))
        z = self.second(y)
        y = y.replace(torch.cat((y.feats, z.feats), dim=-1 if self.spelling == "functions" else 1))
        return y.replace(self.head(y.feats))


@pytest.mark.parametrize("spelling", ["modules", "functions", "in place", "other order"])
@pytest.mark.parametrize("training", [False, True])
def test_operations_on_features_are_fused(spelling, training):
    torch.manual_seed(0)
    net = Plain(spelling).train(training)
    other = copy.deepcopy(net)
    program = pm.compile(other)
    with torch.set_grad_enabled(training):
        for seed in (0, 1):
            x = tensor(seed).sparse
            ours, wanted = program(x), net(x)
            torch.testing.assert_close(ours.feats, wanted.feats, rtol=1e-4, atol=1e-5)
            if training:
                for y in (ours, wanted):
                    y.feats.square().sum().backward()
    if training:
        for a, b in zip(other.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    fused, steps = products(program)
    assert len(fused) == 5
    assert {step.names[0] for step in steps if not isinstance(step, Product)} == {"cat"}


def test_sums_of_other_coordinates_are_not_rewritten():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (pm.nn.Conv3d(4, 4, 2, 2) for _ in range(2))

        def forward(self, x, y):
            a, b = self.one(x), self.two(y)
            return a.replace(torch.relu(a.feats + b.feats))

    features, indices = networks.scene(seed=0)
    x, y = (pm.SparseTensor(f, indices, spatial_shape=SHAPE) for f in (features, features.flip(0)))
    net = Halves().eval()
    with torch.no_grad():
        torch.testing.assert_close(pm.compile(net)(x, y).feats, net(x, y).feats)


class Cropped(nn.Module):
    """Reads the spatial shape of its argument, which differs between calls."""

    def __init__(self):
        super().__init__()
        self.net = networks.SpUNet()

    def forward(self, x):
        y = self.net(x)
        return y.dense()[..., : y.spatial_shape[0] // 2, :, :]


def test_spatial_shapes_of_each_scene_need_no_other_program():
    """As networks do that take the extent of each batch."""
    net, cropped = made(networks.SpUNet).eval(), Cropped().eval()
    program, reading = pm.compile(net), pm.compile(cropped)
    with torch.no_grad():
        for seed, shape in enumerate(([41, 64, 64], [50, 80, 64], [44, 64, 72])):
            given = networks.scene(seed=seed, voxels=200)
            ours, wanted = (each(spconv.SparseConvTensor(*given, shape, 2)) for each in (program, net))
            assert ours.spatial_shape == wanted.spatial_shape == shape
            assert torch.equal(ours.indices, wanted.indices)
            torch.testing.assert_close(ours.features, wanted.features)
            found, dense = (each(spconv.SparseConvTensor(*given, shape, 2)) for each in (reading, cropped))
            torch.testing.assert_close(found, dense)
    assert len(program._programs.values()) == 1
    assert len(products(program)[0]) == 16


class Spoken(nn.Module):
    """What must not be rewritten, or not wrongly: sums that broadcast, features that are read again after an operation
    in place, norms with hooks, targets of a user's own layer."""

    def __init__(self):
        super().__init__()
        self.gate, self.conv, self.other = (pm.nn.Conv3d(4, n, 3) for n in (1, 8, 8))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        wide = self.conv(x)
        y = wide.replace(wide.feats + self.gate(x).feats)
        joined = torch.cat((y.feats, self.other(x).feats), 1)
        positive = self.act(y.feats)
        return y.replace(joined).feats, y.replace(positive).feats, y.feats


def test_operations_that_broadcast_or_write_in_place():
    torch.manual_seed(0)
    net = Spoken().eval()
    x = tensor(0).sparse
    with torch.no_grad():
        for ours, wanted in zip(pm.compile(net)(x), net(x), strict=True):
            torch.testing.assert_close(ours, wanted)


class Down(pm.nn.InverseConv3d):
    """A user's layer, which reads the coordinates of its target."""

    def forward(self, x, target=None):
        return super().forward(x, target).map(lambda feats: feats + target.coords[:, 1:2])


def test_layers_of_users_get_the_target_that_they_are_given():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = pm.nn.Conv3d(4, 8, 2, 2), Down(8, 4, 2, 2)

        def forward(self, x):
            return self.up(self.down(x), x.geometry)

    net = Net().eval()
    x = tensor(0).sparse
    with torch.no_grad():
        torch.testing.assert_close(pm.compile(net)(x).feats, net(x).feats)


def _scene(seed):
    features, indices = networks.scene(seed=seed, shape=(12, 12, 12), voxels=60)
    return pm.SparseTensor(features, indices, spatial_shape=(12, 12, 12), batch_size=2)


def _passed(net, run, training, tensor=lambda x: x):
    """Results and gradients of two scenes, given as `tensor` makes them."""
    found = []
    with torch.set_grad_enabled(training):
        for seed in (0, 1):
            results = run(tensor(_scene(seed)))
            results = results if isinstance(results, list) else [results.F]
            found += [y.detach() for y in results]
            if training and any(y.requires_grad for y in results):
                sum(y.square().sum() for y in results).backward()
    return [*found, *(p.grad for p in net.parameters() if p.grad is not None), *net.buffers()]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", beyond(1, range(0, 40, 10)))
def test_random_spellings(first, training, tmp_path):
    for seed in range(first, first + 10):
        nets = [copy.deepcopy(Spelled(seed)).train(training) for _ in range(3)]
        wanted = _passed(nets[0], nets[0], training)
        found = [_passed(nets[1], pm.compile(nets[1]), training)]
        with emulated(tmp_path):
            found.append(_passed(nets[2], pm.compile(nets[2]), training))
        for ours in found:
            for a, b in zip(ours, wanted, strict=True):
                assert float((a - b).abs().max()) <= 1e-3 * (1 + float(b.abs().max()))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        (levels.OfTorchsparse, lambda x: torchsparse.SparseTensor(x.feats, x.coords)),
        (levels.OfMinkowski, lambda x: ME.SparseTensor(x.feats, coordinates=x.coords)),
    ],
)
def test_weights_that_layers_compute_on_a_gpu(kind, tensor, training, tmp_path):
    """Kernels read the weight that a layer makes of its `kernel`, and its gradient arrives there."""
    torch.manual_seed(0)
    net = kind().train(training)
    other = copy.deepcopy(net)
    wanted = _passed(net, net, training, tensor)
    with emulated(tmp_path):
        program = pm.compile(other)
        found = _passed(other, program, training, tensor)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-3 * (1 + float(b.abs().max()))
    assert len(products(program)[0]) == 4


def test_names_of_scans_need_no_other_program():
    """As batches carry them: a text that differs in every call."""
    torch.manual_seed(0)
    net = Module().eval()
    program = pm.compile(net)
    features, indices = networks.scene(seed=0, voxels=40)
    with torch.no_grad():
        for number in range(40):
            own = {"features": features, "coordinates": indices, "batch_size": 2, "names": [f"scan {number}"]}
            wanted, found = net({**own}), program({**own})
            assert found["names"] == [f"scan {number}"]
            torch.testing.assert_close(found["map"], wanted["map"])
    traced = [*program._programs.values()]
    assert len(traced) == 17
    assert all(one.graph is not None for one in traced)
