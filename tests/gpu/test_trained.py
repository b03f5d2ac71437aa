"""Steps of training by lines, against the same steps layer by layer."""

import copy
from contextlib import nullcontext

import pytest
import torch

import pumice as pm
from pumice import nn
from pumice.nn.prepared import Prepared
from pumice.ops import trained

pytestmark = pytest.mark.gpu


@pytest.fixture
def lines(monkeypatch):
    """How many layers each line had that was started."""
    seen, started = [], trained.started

    def told(found, x, own):
        y = started(found, x, own)
        seen.append(0 if y is None else len(found))
        return y

    monkeypatch.setattr(trained, "started", told)
    return seen


NETS = {
    "MinkUNet": (lambda: pm.models.MinkUNet(4, 3, 0.5), 49),
    "blocks": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv3d(4, 32, 3, bias=False), nn.BatchNorm(32), nn.ReLU()),
            nn.Conv3d(32, 32, 2, stride=2, bias=False),
            nn.BatchNorm(32, affine=False),
            nn.Sequential(nn.ResidualBlock(32, 48), nn.ResidualBlock(48, 48)),
        ),
        # The strided convolution finds a map of its own.
        6,
    ),
}


def scan(count, seed, device, batch=2):
    """About so many voxels on wavy sheets."""
    g = torch.Generator().manual_seed(seed)
    side = int((count / batch) ** 0.5) + 1
    grid = torch.stack(torch.meshgrid(*map(torch.arange, (batch, side, side)), indexing="ij"), -1).reshape(-1, 3)
    z = (8 * torch.sin(grid[:, 1:2] / 9) + torch.randint(0, 2, (len(grid), 1), generator=g)).int()
    coords = torch.cat([grid.int(), z], 1)[torch.randperm(len(grid), generator=g)[:count]].int()
    feats = torch.randn(count, 4, generator=g)
    return pm.SparseTensor(feats.to(device).requires_grad_(seed % 2 == 0), coords.to(device), batch_size=batch)


def step(net, x, cast):
    """Of a step the results, gradients and statistics."""
    net.zero_grad()
    x = pm.SparseTensor(x.feats.detach().requires_grad_(x.feats.requires_grad), x.coords, batch_size=x.batch_size)
    with nullcontext() if cast is None else torch.autocast("cuda", cast):
        y = net(x)
    (16 * y.feats.float().square().mean()).backward()
    grads = [p.grad for p in net.parameters()]
    return y.feats.detach(), grads + [x.feats.grad], [b.double() for b in net.buffers()]


def one_by_one(net, x, cast):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "ahead", lambda self, x, target, spare: (x, 0, 0))
        return step(net, x, cast)


def near(found, wanted, most):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or float((a.double() - b.double()).norm()) <= most * float(b.double().norm()) + 1e-12


@pytest.mark.parametrize(("name", "cast"), [("MinkUNet", torch.bfloat16), ("blocks", torch.float16), ("blocks", None)])
def test_steps_are_those_of_layers_one_by_one(gpu, lines, name, cast):
    """Sums of gradients are in any order; all else is equal to the last bit."""
    torch.manual_seed(5)
    make, layers = NETS[name]
    net = make().to(gpu).train()
    for seed, count in enumerate((9000, 9000, 9100, 8900)):
        other = copy.deepcopy(net)
        want = one_by_one(other, scan(count, seed, gpu), cast)
        lines.clear()
        found = step(net, scan(count, seed, gpu), cast)
        assert sum(lines) == layers, lines
        torch.testing.assert_close(found[0], want[0], rtol=0, atol=0)
        near(found[1], want[1], 1e-5 if cast is None else 1e-3)
        near(found[2], want[2], 0)
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.01 * p.grad


def test_gradients_of_gradients(gpu, lines):
    torch.manual_seed(5)
    net = NETS["blocks"][0]().to(gpu).train()

    def twice():
        x = scan(3000, 2, gpu)
        slope = torch.autograd.grad(net(x).feats.square().sum(), x.feats, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), [x.feats, *net.parameters()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "ahead", lambda self, x, target, spare: (x, 0, 0))
        step(net, scan(3000, 2, gpu), None)
        want = twice()
    near(twice(), want, 1e-4)
    assert sum(lines) == 6


def test_memory_is_given_back(gpu, lines):
    torch.manual_seed(5)
    net, seen = NETS["blocks"][0]().to(gpu).train(), []
    for seed in (1, 2, 3, 4, 5, 6):
        step(net, scan(9000, seed, gpu), torch.float16)
        net.zero_grad()
        seen.append(torch.cuda.memory_allocated())
    assert len(set(seen[2:])) == 1 and any(lines)
