"""On a GPU maps of captured networks that are found beside layers are there when these read them.

Scenes differ from each to the next, so that what is read too early is another scene's.
"""

import warnings
from importlib import import_module

import pytest
import torch
from nets import strange
from torch import nn

import pumice as pm
from pumice.coords import Relation
from pumice.lower import maps
from pumice.testing import assert_close, random_cloud

prepare = import_module("pumice.ops.prepare")

pytestmark = pytest.mark.gpu

STEPS, WINDOWS = (Relation.of(3, 2, stride=2),) * 3, ((Relation.of(3, 3),),) * 4
SLEEP = 1_000_000
"""Cycles: longer than the layers of a level take."""


@pytest.fixture
def gpu():
    """The last GPU."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


class Pyramid(nn.Module):
    """Down and up, with a pool, a map that nobody asked for before, and rows found by coordinates at inner levels.

    asked: how many of the steps each call of prepare is told; none calls none.
    """

    def __init__(self, width=16, asked=(3,)):
        super().__init__()
        self.asked = asked
        self.stem = pm.nn.Sequential(pm.nn.Conv3d(4, width, 3), pm.nn.BatchNorm(width), pm.nn.ReLU())
        self.down = nn.ModuleList(pm.nn.Conv3d(width, width, 2, stride=2) for _ in STEPS)
        self.same = nn.ModuleList(pm.nn.Conv3d(width, width, 3) for _ in STEPS)
        self.back = nn.ModuleList(pm.nn.InverseConv3d(width, width, 2, stride=2) for _ in STEPS)
        self.norms = nn.ModuleList(pm.nn.BatchNorm(width) for _ in STEPS)
        self.wide = pm.nn.Conv3d(width, width, 3, dilation=2)
        self.pool, self.around = pm.nn.AvgPool3d(2, stride=2), pm.nn.MaxPool3d(3, stride=1)
        self.head = pm.nn.Linear(2 * width, 19)

    def forward(self, x):
        for count in self.asked:
            x = x.prepare(STEPS[:count], WINDOWS[: count + 1])
        levels = [self.stem(x)]
        for down, same, norm in zip(self.down, self.same, self.norms, strict=True):
            above = levels[-1]
            levels.append(norm(same(down(above) + self.pool(above))))
        inner = levels[1]
        levels[1] = inner + self.wide(inner) + self.around(inner)
        y = levels[-1]
        for back, above in zip(self.back, reversed(levels[:-1]), strict=True):
            y = back(y, above) + above
        return self.head(pm.cat([y, y.replace(at_voxels(levels[2], x))]))


def at_voxels(level, x):
    """The features of a level of stride 4 at the voxels of x: the nearest of each."""
    cells = torch.cat([x.coords[:, :1], x.coords[:, 1:].div(4, rounding_mode="floor")], dim=1)
    return level.feats[level.geometry.find(cells).clamp(min=0)]


class Sampled(nn.Module):
    """Features of a coarse level at the centres of the first voxels, between voxels and at the nearest one."""

    def __init__(self):
        super().__init__()
        self.down, self.head = pm.nn.Conv3d(4, 6, 2, stride=2), pm.nn.Linear(12, 3)

    def forward(self, x):
        level = self.down(x)
        centres = torch.cat([x.coords[:, :1].float(), x.coords[:, 1:] + 0.5], dim=1)
        ways = [pm.interpolate(level, centres, mode) for mode in ("trilinear", "nearest")]
        return self.head(x.replace(torch.cat(ways, dim=1)))


NETS = {
    "interpolated": lambda: Sampled(),
    "asked once": lambda: Pyramid(),
    "asked twice": lambda: Pyramid(asked=(1, 3)),
    "not asked": lambda: Pyramid(asked=()),
    "minkunet": lambda: pm.models.MinkUNet(4, 5, 0.5),
}


def scene(device, count, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    extent = int(torch.randint(24, 64, (1,), generator=generator))
    coords = random_cloud(count, 3, extent=extent, seed=seed)
    return pm.SparseTensor(torch.randn(count, 4, generator=generator).to(device, dtype), coords.to(device))


def captured(net, device, dtype=torch.float32):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        net, x = strange(net).to(device, dtype), scene(device, 9000, 1000, dtype)
        return net, pm.capture(net, x, max_voxels=10_000, buckets=[3000, 10_000], margin=27.0).ready()


def agrees(net, fast, scenes, limit):
    """Errors over the rms of what is wanted, found on the device: scenes come one after the other."""
    wants, worst = [], []
    with torch.no_grad():
        for x in scenes:
            wants.append(net(x).feats)
    for x, want in zip(scenes, wants, strict=True):
        got = fast(x.feats, x.coords).feats
        assert got.shape == want.shape
        worst.append((got.double() - want.double()).abs().max() / want.double().square().mean().sqrt())
    worst = torch.stack(worst)
    assert float(worst.max()) < limit, worst
    assert not fast.fallbacks and fast.replays == len(scenes)


@pytest.mark.parametrize("name", NETS)
def test_scene_after_scene(gpu, name):
    """In two graphs, captured one after the other in one pool, that take turns."""
    net, fast = captured(NETS[name](), gpu)
    counts = torch.randint(5, 10_000, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    agrees(net, fast, [scene(gpu, n // (4 if i % 2 else 1), i) for i, n in enumerate(counts)], 0.01)


def test_in_half(gpu):
    net, fast = captured(Pyramid(), gpu, torch.float16)
    agrees(net, fast, [scene(gpu, 9000 - 700 * n, n, torch.float16) for n in range(10)], 0.1)


@pytest.mark.parametrize("name", NETS)
def test_slow_searches(gpu, name, monkeypatch):
    """Every map is found, and every one laid out, long after what is not beside has come to its layers."""
    find, held = prepare._maps, maps.form_operands

    def slow(*given):
        for found in find(*given):
            rest()
            yield found

    def rest():
        stream = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing() and stream.priority < 0:
            rests.append(stream.stream_id)
            torch.cuda._sleep(SLEEP)

    def slowly(found, form):
        if not found.has(("form", form)):
            rest()
        return held(found, form)

    rests = []
    monkeypatch.setattr(prepare, "_maps", slow)
    monkeypatch.setattr(maps, "form_operands", slowly)
    net, fast = captured(NETS[name](), gpu)
    monkeypatch.undo()
    assert len(set(rests)) > 2
    agrees(net, fast, [scene(gpu, 9500 - 900 * n, n) for n in range(8)], 0.01)


def test_points(gpu):
    """They enter by the first lookup, before anything is beside, and are read at the end."""
    net = strange(Pyramid(asked=(1, 3))).to(gpu)

    def scan(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(8000, 3, generator=generator).to(gpu) * 3, torch.randn(8000, 4, generator=generator).to(gpu)

    fast = pm.capture_points(net, *scan(0), size=0.1, margin=2.0)
    for seed in range(8):
        points, feats = scan(seed)
        with torch.no_grad():
            want = pm.devoxelize(net(pm.voxelize(points, feats, size=0.1)))
        got = fast(points, feats)
        assert_close(got, want, dtype=torch.float16, scale=float(want.square().mean().sqrt()))
    assert fast.replays == 8 and not fast.fallbacks
