"""Networks captured from raw points on give what voxelize(), the network and devoxelize() give one after the other."""

import warnings

import pytest
import torch
from nets import strange
from torch import nn

import pumice as pm
from pumice.errors import CaptureError, CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.testing import assert_close

pytestmark = pytest.mark.usefixtures("seeded")

GRIDS = {
    "floor": {"size": 0.5},
    "round": {"size": (0.5, 0.25, 0.7), "origin": (-1.0, 0.3, 2.0), "rounding": "round"},
    "bounded": {"size": 0.5, "spatial_shape": (6, 7, 5)},
}


def cloud(count, seed=0, batch=None, extent=3.0):
    """Points, two features of each, and batch items."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(count, 3, generator=generator) * extent
    feats = torch.randn(count, 2, generator=generator)
    items = None if batch is None else torch.randint(0, batch, (count,), generator=generator)
    return points, feats, items


class Heads(nn.Module):
    """Logits of voxels, their labels, a coarser level, and a mean of each item."""

    def __init__(self, channels=2):
        super().__init__()
        self.net = pm.models.MinkUNet(channels, 4, 0.125)
        self.down, self.pool = pm.nn.Conv3d(channels, 3, 2, stride=2), pm.nn.GlobalAvgPool()

    def forward(self, x):
        y = self.net(x)
        return y, y.feats.argmax(1), self.down(x), self.pool(y)


def eager(net, points, feats, items, grid, batch=None):
    with torch.no_grad():
        x = pm.voxelize(points, feats, batch=items, batch_size=batch, **grid)
        return x, net(x)


def agrees(got, want, x):
    logits, labels, coarse, means = got
    y, tags, level, sums = want
    assert_close(logits, pm.devoxelize(y))
    inside = x.inverse >= 0
    assert torch.equal(labels[inside], tags[x.inverse[inside]]) and bool((labels[~inside] == -1).all())
    assert_close(coarse, level)
    assert coarse.stride == level.stride and coarse.geometry.frame == level.geometry.frame
    assert_close(means, sums)


@pytest.mark.parametrize("grid", GRIDS)
def test_points_in_and_points_out(grid):
    net, options = strange(Heads()), GRIDS[grid]
    points, feats, items = cloud(300, batch=2)
    fast = pm.capture_points(net, points, feats, batch=items, max_points=320, buckets=[100], margin=4.0, **options)
    fast.ready()
    for seed, count in enumerate((0, 1, 99, 100, 101, 320)):
        scan = cloud(count, seed + 5, 2, extent=3.0)
        x, want = eager(net, *scan, options, 2)
        agrees(fast(*scan), want, x)
    assert fast.prepared == (100, 320) and not fast.fallbacks and fast.replays == 6


def test_a_network_that_goes_back_to_points_itself():
    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = pm.models.MinkUNet(2, 4, 0.125), nn.Linear(4, 3)

        def forward(self, x):
            y = self.net(x)
            return self.head(pm.devoxelize(y)), y

    net = strange(Back())
    points, feats, _ = cloud(200)
    fast = pm.capture_points(net, points, feats, size=0.5, max_points=210)
    for count in (200, 210, 0, 13, 211):
        scan = cloud(count, count)
        x, (heads, y) = eager(net, *scan, {"size": 0.5})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = fast(*scan)
        assert_close(got[0], heads)
        assert_close(got[1], pm.devoxelize(y))
    assert fast.replays == 4


def test_points_are_their_own_features():
    net = strange(Heads(3))
    points, _, _ = cloud(200)
    fast = pm.capture_points(net, points, size=0.5)
    x, want = eager(net, points, None, None, {"size": 0.5})
    agrees(fast(points), want, x)
    with pytest.raises(ShapeError, match="no feats"):
        fast(points, torch.ones(200, 2))


def test_points_of_a_plane():
    net, points = pm.nn.Conv2d(2, 3, 3).eval(), cloud(200)[0][:, :2]
    fast = pm.capture_points(net, points, size=0.5, dim=2, max_points=250)
    for scan in (points, points + 0.25):
        x = pm.voxelize(scan, size=0.5, dim=2)
        assert_close(fast(scan), pm.devoxelize(net(x)))
    with pytest.warns(RuntimeWarning, match="251 points"):
        assert fast(cloud(251)[0][:, :2]).shape == (251, 3)


def test_means_are_cast_once():
    net = strange(pm.models.MinkUNet(2, 4, 0.125))
    points, feats, _ = cloud(200)
    fast = pm.capture_points(net, points, feats, size=0.5, dtype=torch.bfloat16)
    y = fast(points, feats)
    assert y.dtype == torch.bfloat16
    _, want = eager(net, points, feats, None, {"size": 0.5})
    scale = float(want.feats.square().mean().sqrt())
    assert_close(y, pm.devoxelize(want).to(torch.bfloat16), scale=8 * scale)


def test_scans_that_do_not_fit():
    net = strange(Heads())
    points, feats, _ = cloud(200)
    fast = pm.capture_points(net, points, feats, size=0.5, max_points=250)
    with pytest.warns(RuntimeWarning, match="251 points.*max_points=250"):
        scan = cloud(251, 3)
        x, want = eager(net, *scan, {"size": 0.5})
        agrees(fast(*scan), want, x)
    for far in (100, -30_000):
        scan = (points + far, feats, None)
        x, want = eager(net, *scan, {"size": 0.5})
        agrees(fast(*scan), want, x)
    scan = (points + 40_000, feats, None)
    with pytest.warns(RuntimeWarning, match="coordinates beyond"):
        x, want = eager(net, *scan, {"size": 0.5})
        agrees(fast(*scan), want, x)
    assert fast.fallbacks == {"points": 1, "range": 1}


def test_more_voxels_than_expected():
    """Points close to each other are an example of few voxels."""
    net = strange(Heads())
    near, feats, _ = cloud(200, extent=1.0)
    fast = pm.capture_points(net, near, feats, size=0.5, max_points=300)
    far = cloud(300, 1, extent=15.0)
    with pytest.warns(RuntimeWarning, match="voxels at stride .1, 1, 1., above the capacity"):
        x, want = eager(net, *far, {"size": 0.5})
        agrees(fast(*far), want, x)
    assert fast.fallbacks == {"room": 1}


@pytest.mark.parametrize("grid", ["floor", "bounded"])
def test_what_is_wrong_with_points_raises(grid):
    net = strange(Heads())
    points, feats, items = cloud(100, batch=2)
    fast = pm.capture_points(net, points, feats, batch=items, **GRIDS[grid])
    for value in (torch.nan, torch.inf):
        bad = points.clone()
        bad[7, 1] = value
        with warnings.catch_warnings(), pytest.raises(CoordinateError, match="1 of 100 points are not finite"):
            warnings.simplefilter("ignore")
            fast(bad, feats, items)
    with warnings.catch_warnings(), pytest.raises(CoordinateError, match="batch"):
        warnings.simplefilter("ignore")
        fast(points, feats, items + 1)
    with pytest.raises(ShapeError, match=r"\[100, 2\]"):
        fast(points, feats[:, :1], items)
    with pytest.raises(ShapeError, match=r"\[100, 3\]"):
        fast(points[:, :2], feats, items)
    with pytest.raises(DtypeError, match="integers"):
        fast(points, feats, items.float())
    with pytest.raises(DeviceError, match="meta"):
        fast(points, feats.to("meta"), items)


def test_options_of_points():
    net = strange(Heads())
    points, feats, items = cloud(100, batch=2)
    with pytest.raises(OptionError, match="origin"):
        pm.capture_points(net, points, feats, size=1.0, origin="min")
    with pytest.raises(OptionError, match="size.*None"):
        pm.capture_points(net, points, feats)
    with pytest.raises(ShapeError, match="max_points=99.*100"):
        pm.capture_points(net, points, feats, size=1.0, max_points=99)
    with pytest.raises(OptionError, match="1 items.*has 2"):
        pm.capture_points(net, points, feats, size=1.0, batch=items, batch_size=1)
    with pytest.raises(TypeError, match="voxels"):
        pm.capture_points(net, points, feats, size=1.0, max_voxels=99)
    with pytest.raises(ShapeError, match="no points"):
        pm.capture_points(net, points[:0], feats[:0], size=1.0)
    with pytest.raises(CaptureError, match="exceeds the capacity"):
        pm.capture_points(net, points, feats, size=0.2, level_capacity=0.01, max_points=1000)
