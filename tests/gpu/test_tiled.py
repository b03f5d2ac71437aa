"""Scenes in the host's memory, in tiles on a GPU, against the whole scene on the GPU; also of compiled networks."""

import pytest
import torch
from nets import OneLevel, stirred

import pumice as pm
from pumice.testing import random_tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_tiles_are_the_whole(gpu, home: str, compiled: bool):
    torch.manual_seed(0)
    net, x = stirred(OneLevel()).to(gpu), random_tensor(20_000, 4, extent=128, batch_size=2)
    with torch.no_grad():
        want = net(x.to(gpu)).feats
    y = pm.tiled(pm.compile(net) if compiled else net, x.to(home), 64)
    assert y.device.type == home and torch.equal(y.coords.cpu(), x.coords)
    torch.testing.assert_close(y.feats.to(gpu), want, rtol=1e-4, atol=1e-4)


def test_an_encoder_makes_the_same_coordinates(gpu):
    torch.manual_seed(0)
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3, stride=2, padding=1), pm.nn.Conv3d(8, 8, 3, stride=2, padding=1)).to(
        gpu
    )
    x = random_tensor(5_000, 4, extent=96)
    with torch.no_grad():
        want = net(x.to(gpu))
    y = pm.tiled(net, x, 32)
    assert torch.equal(y.coords, want.coords.cpu())
    torch.testing.assert_close(y.feats, want.feats.cpu(), rtol=1e-4, atol=1e-4)
