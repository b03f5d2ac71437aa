"""Networks in other libraries' names on a GPU: programs, captured networks, gradients; against plain calls on a CPU."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import pumice as pm
import pumice.compat.minkowski as ME
import pumice.compat.spconv as spconv
import pumice.compat.torchsparse as torchsparse

sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))
import levels
import networks

pytestmark = pytest.mark.gpu
SHAPE = [41, 64, 64]


def of_spconv(features, indices):
    return spconv.SparseConvTensor(features, indices, SHAPE, 2)


def of_torchsparse(features, indices):
    return torchsparse.SparseTensor(features, indices)


def of_minkowski(features, indices):
    return ME.SparseTensor(features, coordinates=indices)


CASES = {
    "SpUNet": (networks.SpUNet, of_spconv),
    "VoxelResBackBone8x": (networks.VoxelResBackBone8x, of_spconv),
    "torchsparse": (levels.OfTorchsparse, of_torchsparse),
    "MinkowskiEngine": (levels.OfMinkowski, of_minkowski),
}


def features_of(y):
    return y.features if hasattr(y, "features") else y.F


def scene(seed, voxels=1500):
    return networks.scene(seed=seed, voxels=voxels)


def close(ours, wanted, near=2e-3):
    assert float((ours.detach().cpu() - wanted.detach()).norm()) <= near * float(wanted.detach().norm()) + 1e-6


@pytest.fixture
def case(request):
    kind, tensor = CASES[request.param]
    torch.manual_seed(0)
    return kind(), tensor


@pytest.mark.parametrize("case", CASES, indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
def test_evaluated(case, compiled):
    net, tensor = case
    net = net.eval()
    own = copy.deepcopy(net).cuda()
    run = pm.compile(own) if compiled else own
    with torch.no_grad():
        for seed in (0, 1):
            features, indices = scene(seed)
            y, wanted = run(tensor(features.cuda(), indices.cuda())), net(tensor(features, indices))
            close(features_of(y), features_of(wanted))


@pytest.mark.parametrize("case", CASES, indirect=True)
@pytest.mark.parametrize("compiled", [False, True])
def test_trained(case, compiled):
    net, tensor = case
    own = copy.deepcopy(net).cuda()
    run = pm.compile(own) if compiled else own
    features, indices = scene(2)
    features_of(run(tensor(features.cuda(), indices.cuda()))).square().mean().backward()
    features_of(net(tensor(features, indices))).square().mean().backward()
    for ours, wanted in zip(own.parameters(), net.parameters(), strict=True):
        close(ours.grad, wanted.grad, 1e-2)


@pytest.mark.parametrize("case", ["SpUNet", "VoxelResBackBone8x"], indirect=True)
def test_captured(case):
    net, tensor = case
    net = net.eval().cuda()
    fast = pm.capture(net, tensor(*(x.cuda() for x in scene(0))), max_voxels=4000).ready()
    program = pm.compile(net)
    with torch.no_grad():
        for seed in (1, 2):
            given = [x.cuda() for x in scene(seed, 1400)]
            ours, wanted = fast(tensor(*given)), program(tensor(*given))
            assert torch.equal(ours.indices, wanted.indices)
            close(ours.features, wanted.features.cpu(), 1e-4)
    assert sum(fast.fallbacks.values()) == 0
