"""Networks in tiles against the same networks on the whole scene, bit for bit; over ranks of gloo too."""

import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nets import OneLevel, stirred
from torch import nn
from torch.multiprocessing.spawn import start_processes
from wide import beyond

import pumice as pm
from pumice.data import read_scan
from pumice.engine.tile_ranks import deal
from pumice.errors import DtypeError, OptionError


class ByHand(nn.Module):
    """Residuals, concatenations, operations on features, two strides, a dilation, a generative level that is pruned."""

    def __init__(self, dim=3, width=4):
        super().__init__()
        conv, inverse = (getattr(pm.nn, f"{name}{dim}d") for name in ("Conv", "InverseConv"))
        self.stem, self.wide = conv(4, width, 3), conv(width, width, 3, dilation=2)
        self.norm = pm.nn.BatchNorm(width)
        self.down, self.deep = conv(width, width, 3, stride=2, padding=1), conv(width, width, 3)
        self.low = conv(width, width, 3, stride=3)
        self.up, self.back = inverse(width, width, 3, stride=3), inverse(width, width, 3, stride=2, padding=1)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.wide(self.stem(x))).feats), x
        x = x[1].replace(x[0])
        y = self.down(x)
        y = y + self.deep(y)
        y = y + self.up(self.low(y), y)
        y = pm.cat([self.back(y, x), x])
        return y.replace(self.head(y.feats) * 2)


class Grown(nn.Module):
    """Ends at coordinates of its own: finer than the input's, some of which are dropped by what they hold."""

    def __init__(self):
        super().__init__()
        self.down = pm.nn.Conv3d(4, 8, 3, stride=2, padding=1)
        self.grow = pm.nn.GenerativeConvTranspose3d(8, 4, 3, stride=4)

    def forward(self, x):
        y = self.grow(self.down(x))
        return y.prune(y.feats[:, 0] > 0.1)


class Shuffled(nn.Module):
    """Back at the input's coordinates by layers and functions that are told these."""

    def __init__(self):
        super().__init__()
        self.blocks, self.back, self.head = pm.nn.SpaceToChannel(2), pm.nn.ChannelToSpace(2), pm.nn.Linear(32, 32)
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3, 4))

    def forward(self, x):
        y = self.back(self.head(self.blocks(x)), x)
        return pm.ops.conv(y + pm.ops.upsample_nearest(pm.ops.avg_pool(x, 2), 2, x), self.weight)


def encoder():
    return nn.Sequential(
        pm.nn.Conv3d(4, 8, 3), pm.nn.ReLU(), pm.nn.Conv3d(8, 8, 3, stride=2, padding=1), pm.nn.Conv3d(8, 8, 3),
        pm.nn.Conv3d(8, 8, (3, 1, 3), stride=(2, 1, 3), padding=(0, 0, 1)), pm.nn.MaxPool3d(2),
    )  # fmt: skip


def cloud(rows=900, dim=3, side=40, items=2, shape=None, seed=0):
    """Voxels around 0 (within `shape` if there is one), in no order; the last batch item is empty."""
    chance = torch.Generator().manual_seed(seed)
    sides = (side,) * dim if shape is None else shape
    axes = [torch.randint(-n if shape is None else 0, n, (rows, 1), generator=chance) for n in sides]
    coords = torch.unique(torch.cat([torch.randint(0, items, (rows, 1), generator=chance), *axes], 1), dim=0).int()
    coords = coords[torch.randperm(len(coords), generator=chance)]
    feats = torch.randn(len(coords), 4, generator=chance)
    return pm.SparseTensor(feats, coords, spatial_shape=shape, batch_size=items + 1, dim=dim)


def agree(got, want):
    assert torch.equal(got.coords, want.coords) and got.feats.dtype == want.feats.dtype
    assert torch.equal(got.feats, want.feats)
    assert got.stride == want.stride and got.spatial_shape == want.spatial_shape and got.batch_size == want.batch_size


CASES = {
    "unet": (OneLevel, cloud, 33),
    "by hand": (ByHand, cloud, 30),
    # Full enough that the farthest voxels of halos count.
    "by hand, 2-D": (lambda: ByHand(2), lambda: cloud(12_000, dim=2, side=50, items=1), (30, 24)),
    "minkunet, 2-D": (
        lambda: pm.models.MinkUNet(width=0.125, dim=2),
        lambda: cloud(700, dim=2, side=350, items=1),
        300,
    ),
    "encoder": (encoder, lambda: cloud(12_000, side=15, items=1), 12),
    "encoder, bounded": (encoder, lambda: cloud(shape=(40, 50, 45)), 30),
    "grown": (Grown, lambda: cloud(200), 40),
    "shuffled": (Shuffled, cloud, 30),
    "compiled": (lambda: pm.compile(stirred(OneLevel())), cloud, 50),
    "empty": (OneLevel, lambda: cloud(0), 8),
    "unet, bounded": (OneLevel, lambda: cloud(shape=(50, 64, 33)), (20, 64, 16)),
    "empty encoder": (encoder, lambda: cloud(0), 8),
}


@pytest.mark.parametrize("case", beyond(8, CASES))
def test_tiles_are_the_whole(case):
    make, scene, tile = CASES[case]
    torch.manual_seed(0)
    net, x = stirred(make()), scene()
    with torch.no_grad():
        want = net(x)
    plan = pm.plan_tiles(net, x, tile)
    assert plan.voxels == len(x) and not plan.covers
    assert len(plan.tiles) > 3 or not len(x)
    got = pm.tiled(net, x, tile)
    agree(got, want)
    assert not got.requires_grad
    assert got.geometry is x.geometry or case in ("encoder", "encoder, bounded", "grown", "empty encoder")


def test_real_scan(data_folder):
    path = next(iter(Path(data_folder).glob("semantickitti_labelled/000000.bin")), None)
    if path is None:
        pytest.skip("no such scan in the data folder")
    scan = read_scan(path)
    points, feats = torch.from_numpy(scan.xyz), torch.from_numpy(scan.feats)[:, :1]
    torch.manual_seed(0)
    x, net = pm.voxelize(points, feats, size=0.4, origin="min"), stirred(pm.models.MinkUNet(1, width=0.125))
    with torch.no_grad():
        want = net(x)
    agree(pm.tiled(net, x, (128, 256, 64)), want)


def test_a_smaller_halo_is_the_users_choice():
    torch.manual_seed(0)
    net, x = stirred(OneLevel()), cloud(300, side=9, items=1)
    with torch.no_grad():
        want = net(x)
    y, near = pm.tiled(net, x, 10, halo=1), pm.tiled(net, x, 10, halo=8)
    assert not torch.equal(y.feats, want.feats) and y.geometry is x.geometry
    assert torch.equal(near.feats, want.feats)
    # Of unknown fields: as good as their halo, here the whole scene.
    net = nn.Sequential(pm.nn.Conv3d(4, 8, 3, stride=2), pm.nn.GroupNorm(2, 8)).eval()
    with torch.no_grad():
        want = net(x)
    with pytest.warns(UserWarning, match="covers the scene"):
        y = pm.tiled(net, x, 10, halo=100)
    assert torch.equal(y.coords, want.coords)
    torch.testing.assert_close(y.feats, want.feats)
    assert "not known" in str(pm.plan_tiles(net, x, 10, halo=3))


def test_a_plan_tells_the_cost():
    net, x = OneLevel().eval(), cloud(3000, side=30, items=1)
    plan = pm.plan_tiles(net, x, 21)
    assert plan.tile == (22,) * 3 and plan.halo == ((7, 7),) * 3
    for tile in plan.tiles:
        first = torch.tensor([-30 + 22 * place for place in tile.index])
        own, around = (
            int(((x.coords[:, 1:] >= first - by) & (x.coords[:, 1:] < first + 22 + by)).all(1).sum()) for by in (0, 7)
        )
        assert (tile.voxels, tile.halo) == (own, around - own)
    assert plan.overhead == pytest.approx(1 + plan.halo_voxels / len(x)) and plan.largest < len(x)
    assert f"{plan.overhead:.2f} times the work" in str(plan)


def test_a_field_that_covers_the_scene_is_told():
    torch.manual_seed(0)
    net, x = stirred(pm.models.MinkUNet(width=0.125)), cloud(500, side=40)
    with torch.no_grad():
        want = net(x)
    plan = pm.plan_tiles(net, x, 16)
    assert plan.covers and plan.halo_voxels == 0 and "covers the scene" in str(plan)
    with pytest.warns(UserWarning, match="covers the scene"):
        agree(pm.tiled(net, x, 16), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm.tiled(net, x, 160)


def test_errors():
    net, x = OneLevel().eval(), cloud(20)
    with pytest.raises(DtypeError, match="takes a SparseTensor, found Tensor"):
        pm.tiled(net, x.feats, 8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DtypeError, match=r"a torch.nn.Module, found str"):
        pm.tiled("net", x, 8, halo=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="tile takes integers of at least 1, found 0"):
        pm.tiled(net, x, 0)
    with pytest.raises(OptionError, match="halo is 'exact' or a number of voxels, found 'all'"):
        pm.tiled(net, x, 8, halo="all")
    with pytest.raises(OptionError, match="in training"):
        pm.tiled(net.train(), x, 8)
    with pytest.raises(DtypeError, match="return a SparseTensor, found Tensor"):
        pm.tiled(nn.Sequential(pm.nn.GlobalMaxPool()), x, 8, halo=2)


def test_tiles_are_dealt_evenly():
    assert deal([5, 1, 4, 3, 3], 2) == [0, 1, 1, 1, 0]
    assert deal([], 3) == [] and deal([7], 3) == [0]


def parted(x, rank, ranks):
    """A rank's rows: the last rank has none if there are more than two."""
    owner = torch.randint(0, max(2, ranks - 1), (len(x),), generator=torch.Generator().manual_seed(1))
    return (owner == rank).nonzero()[:, 0]


def rows_of(x, rows):
    return pm.SparseTensor(x.feats[rows], x.coords[rows], batch_size=x.batch_size)


def one_rank(rank, file, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    groups = {size: dist.new_group([*range(size)]) for size in (2, 4)}
    for size in (2, 4)[: 1 + (rank < ranks)]:
        for make in (OneLevel, encoder)[: size // 2] if rank < size else ():
            torch.manual_seed(0)
            net, x = stirred(make()), cloud(300, items=1)
            rows = parted(x, rank, size)
            with torch.no_grad():
                want = net(x)
            y = pm.tiled(net, rows_of(x, rows), 30, group=groups[size])
            if make is OneLevel:
                assert torch.equal(y.coords, x.coords[rows]) and torch.equal(y.feats, want.feats[rows])
                continue
            every = [None] * size
            dist.all_gather_object(every, (y.coords, y.feats), groups[size])
            coords, feats = (torch.cat(parts) for parts in zip(*every, strict=True))
            order = want.geometry.find(coords)
            assert torch.equal(order.sort()[0], torch.arange(len(want))) and torch.equal(feats, want.feats[order])
    dist.barrier()
    # At once: the last reference to a group joins threads of gloo that may wait for Python's lock (torch 2.13).
    os._exit(0)


def test_ranks_are_one_process(tmp_path):
    # One process imports torch, the ranks are forks of it.
    multiprocessing.set_forkserver_preload(["pumice", "pytest"])
    start_processes(one_rank, (tmp_path / "meeting", 4), 4, start_method="forkserver")
