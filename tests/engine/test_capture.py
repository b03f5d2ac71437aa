"""Captured networks give what their forward passes give, for every scene that they take and for those that they do not.

On a CPU the static program runs call by call; tests/gpu/test_capture.py has the graphs.
"""

import gc
import warnings
from dataclasses import replace
from itertools import pairwise
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from emulated import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import Asks, Dense, Layers, Levels, strange
from torch import nn
from torch.utils import _pytree as pytree

import pumice as pm
from benchmarks.scenes.stream_nets import ENCODER, UNET, Encoder, UNet
from pumice.coords import Relation, kernel_map
from pumice.engine.buckets import CapacityBucket
from pumice.engine.buffers import VoxelScene
from pumice.engine.compare import differ, perturb
from pumice.engine.static import CropContext, LevelOutput, PaddedProgram, PointOutput, SparseOutput
from pumice.errors import (
    CaptureError,
    CoordinateError,
    DeviceError,
    DtypeError,
    GeometryError,
    OptionError,
    ShapeError,
)
from pumice.ops.tensor import is_sparse
from pumice.runtime.compile import BACKGROUND
from pumice.testing import assert_close, random_cloud, random_tensor

pytestmark = pytest.mark.usefixtures("seeded")

SHAPE = (12, 11, 10)


def scene(count, seed=0, batch=1, extent=8, shape=None, dtype=torch.float32):
    """Random features on a random cloud; with a shape in a grid of it."""
    if not count:
        coords = torch.zeros(0, 4, dtype=torch.int32)
    else:
        coords = random_cloud(count, 3, extent=extent, batch_size=batch, seed=seed)
    feats = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return pm.SparseTensor(feats, coords, spatial_shape=shape, batch_size=batch if shape else None)


def eager(net, x):
    with torch.no_grad():
        return net(x)


def agrees(got, want):
    """Leaf by leaf: the same coordinates, and values within rounding."""
    got, want = pytree.tree_leaves(got, is_sparse), pytree.tree_leaves(want, is_sparse)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if isinstance(b, pm.SparseTensor):
            assert torch.equal(a.coords, b.coords) and a.stride == b.stride and a.batch_size == b.batch_size
            # Bounds need not be tight.
            assert replace(a.geometry.site, bounds=b.geometry.bounds) == b.geometry.site
            assert bool(a.geometry.bounds.contains(a.coords).all())
        if isinstance(b, torch.Tensor) and not b.is_floating_point():
            assert torch.equal(a, b)
        elif isinstance(b, torch.Tensor | pm.SparseTensor):
            values = b.feats if isinstance(b, pm.SparseTensor) else b
            # A norm of one voxel is 0 but for rounding.
            scale = float(values.detach().square().mean().sqrt().clamp(min=0.05)) if values.numel() else None
            assert_close(a, b, scale=scale)
        else:
            assert a == b


def captured(net, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pm.capture(net, x, **options).ready()


NETS = {
    "minkunet": lambda: pm.models.MinkUNet(4, 5, 0.25),
    "levels": Levels,
    "layers": Layers,
    "torch modules": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 6, 3), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2)),
    "pointwise": lambda: pm.nn.Linear(4, 3),
}
STREAM = {
    "unet": lambda: UNet([width // 8 for width in UNET]),
    "encoder": lambda: Encoder([width // 4 for width in ENCODER]),
}
BOUNDED = {
    "centerpoint": lambda: pm.models.CenterPointBackbone(4),
    "dense": Dense,
    "levels": Levels,
}


@pytest.mark.parametrize("name", NETS)
def test_scenes_of_all_sizes(name):
    """Empty, at the edges of capacities and past them, in several batch items."""
    net = strange(NETS[name]())
    fast = captured(net, scene(150, batch=2), max_voxels=160, buckets=[40, 90], batch=3, margin=4.0)
    for seed, count in enumerate((0, 1, 2, 39, 40, 41, 89, 90, 91, 160)):
        for batch in (1, 2, 3)[: max(1, count)]:
            x = scene(count, seed + 10 * batch, batch)
            agrees(fast(x), eager(net, x))
    assert fast.prepared == fast.capacities == (40, 90, 160)
    assert not fast.fallbacks and fast.replays == 25


@pytest.mark.parametrize("name", BOUNDED)
def test_scenes_in_a_grid(name):
    net = strange(BOUNDED[name]())
    fast = captured(net, scene(150, batch=2, shape=SHAPE), max_voxels=200, buckets=[60], margin=4.0)
    for seed, count in enumerate((0, 5, 60, 61, 199, 200)):
        x = scene(count, seed, 2, shape=SHAPE)
        got, want = fast(x), eager(net, x)
        agrees(got, want)
    assert not fast.fallbacks and fast.replays == 6


@pytest.mark.parametrize("name", STREAM)
def test_captured_equals_compiled(name, tmp_path):
    """Bit for bit, by as many kernels, for scenes of all capacities, the program given or made."""
    net = strange(STREAM[name]())
    with emulated(tmp_path) as gpu, torch.no_grad():
        program = pm.compile(net)
        program(scene(1500, extent=20))
        fast = captured(program, scene(1500, extent=20), max_voxels=1600, buckets=[600], margin=4.0)
        other = captured(net, scene(1500, extent=20), max_voxels=1600, margin=4.0)
        for seed, count in enumerate((40, 250, 599, 600, 601, 1500)):
            x = scene(count, seed, extent=20)
            gpu.clear()
            got = fast(x.feats, x.coords)
            kernels = len(gpu.started)
            want = program(x)
            assert len(gpu.started) == 2 * kernels
            assert torch.equal(got.coords, want.coords) and torch.equal(got.feats, want.feats)
            agrees(other(x), want)
            assert torch.equal(other(x).feats, want.feats)
            agrees(want, eager(net, x))
    assert fast.replays == 6 and not fast.fallbacks


class Mixed(nn.Module):
    """Biases before norms, a sum over two kinds of coordinates, a module with hooks, one whose forward looks at values
    that do not depend on the scene, and a concatenation that a module of torch reads."""

    def __init__(self):
        super().__init__()
        self.stem = pm.nn.Sequential(pm.nn.Conv3d(4, 16, 3), pm.nn.BatchNorm(16), pm.nn.ReLU())
        self.down, self.norm = pm.nn.Conv3d(16, 24, 2, stride=2), pm.nn.BatchNorm(24)
        self.heard, self.up = pm.nn.Conv3d(24, 24, 3, bias=False), pm.nn.InverseConv3d(24, 16, 2, stride=2)
        self.pool, self.looks = pm.nn.MaxPool3d(3, stride=1), Looks()
        self.head = nn.Linear(48, 3)
        self.calls = []
        self.heard.register_forward_hook(lambda *given: self.calls.append(len(given[2].feats)))

    def forward(self, x):
        x = self.stem(x)
        y = self.up(self.looks(self.heard(self.norm(self.down(x)).map(torch.relu))), x)
        z = pm.cat([y, x, self.pool(x)])
        return z.replace(self.head(z.feats))


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pm.nn.Conv3d(24, 24, 3)

    def forward(self, x):
        return self.conv(x) if x.channels > 10 and x.feats.dtype.is_floating_point else x


@pytest.mark.parametrize("cast", [False, True])
def test_parts_that_are_called_as_they_are(cast, tmp_path):
    net = strange(Mixed())
    with emulated(tmp_path), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        program = pm.compile(net)
        program(scene(300, extent=12))
        fast = captured(net, scene(300, extent=12), max_voxels=320, margin=4.0)
        for seed, count in enumerate((40, 300)):
            x, calls = scene(count, seed, extent=12), len(net.calls)
            got = fast(x)
            assert len(net.calls) == calls + 1 and got.geometry is x.geometry
            # torch's own linear map of as many rows as there is room for is rounded otherwise.
            torch.testing.assert_close(got.feats, program(x).feats, rtol=0.02 * cast, atol=0.02 * cast)
    assert fast.replays == 2 and "it has hooks" in program.explain()


def test_capacities_are_planned_by_a_dense_and_a_thin_part_of_the_example():
    """The dense one has most neighbours; the thin one shares fewer cells of the next level."""
    cube = torch.cartesian_prod(torch.zeros(1).int(), *[torch.arange(12).int()] * 3)
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 4, 3), pm.nn.Conv3d(4, 4, 2, stride=2)).eval()
    fast = pm.capture(net, pm.SparseTensor(torch.randn(len(cube), 4), cube), buckets=[125], margin=1.0).ready()
    parts = [part.tensor() for part in fast._engine._examples(125)]
    pairs = [int((kernel_map(x.geometry, Relation.of(3, 3))[0].rows() >= 0).sum()) for x in parts]
    rows = [len(kernel_map(x.geometry, Relation.of(3, 2, stride=2))[1]) for x in parts]
    assert [len(x.coords) for x in parts] == [125, 125] and pairs[0] > 3 * pairs[1] and rows[0] < rows[1]
    (capacity,) = [n for key, n in fast._engine.buckets[125].capacities.capacities.items() if key[0] == "rows"]
    assert capacity >= rows[1]


def test_a_capacity_that_cannot_be_captured_is_refused_once(monkeypatch):
    net = strange(Levels())
    fast = pm.capture(net, scene(60), max_voxels=200, buckets=[80], margin=4.0)

    def fails(*given):
        raise CaptureError("not today")

    monkeypatch.setattr(type(fast._engine), "_build_bucket", fails)
    x = scene(150, 1)
    with pytest.warns(RuntimeWarning, match="run eagerly: not today"):
        agrees(fast(x), eager(net, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(fast(x), eager(net, x))
    assert fast.prepared == (80,) and fast.fallbacks == {"capture": 2}


def test_the_first_scene_of_a_capacity_runs_without_a_graph(tmp_path):
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    with emulated(tmp_path):
        fast = pm.capture(net, scene(300, extent=16), max_voxels=800, buckets=[400], margin=4.0)
        assert fast.prepared == (400,)
        x = scene(700, 1, extent=16)
        while fast.prepared == (400,):
            agrees(fast(x), eager(net, x))
        assert not fast.replays
        agrees(fast(x), eager(net, x))
    assert fast.prepared == (400, 800) and {*fast.fallbacks} == {"capture"} and fast.replays == 1


def test_kernels_of_a_capacity_are_compiled_beside(monkeypatch):
    """Calls do not wait for them: the capacity is planned when they are there."""
    net, asked, ends = strange(Levels()), [], Event()
    fast = pm.capture(net, scene(60, batch=2), max_voxels=200, buckets=[80], margin=4.0)
    build = type(fast._engine)._build_bucket

    def compiles(engine, *given):
        asked.append(given)
        BACKGROUND.run([ends.wait] if len(asked) == 1 else [])
        return build(engine, *given)

    monkeypatch.setattr(type(fast._engine), "_build_bucket", compiles)
    x = scene(150, 1, batch=2)
    for _ in range(2):
        agrees(fast(x), eager(net, x))
        assert fast.prepared == (80,) and len(asked) == 1
    ends.set()
    BACKGROUND.run([lambda: None])
    while fast.prepared == (80,):
        agrees(fast(x), eager(net, x))
    before = fast.replays
    agrees(fast(x), eager(net, x))
    assert len(asked) == 2 and fast.replays == before + 1


@pytest.fixture(scope="module")
def unet():
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    # So much room that nothing runs eagerly.
    return net, captured(net, scene(100, batch=2, extent=16), max_voxels=120, buckets=[50], margin=30.0)


@settings(max_examples=25)
@given(st.integers(0, 120), st.integers(1, 2), st.integers(7, 18), st.integers(0, 10**6))
def test_random_geometries(unet, count, batch, extent, seed):
    net, fast = unet
    x, before = scene(count, seed, batch if count else 1, extent), fast.replays
    agrees(fast(x), eager(net, x))
    assert fast.replays == before + 1


def test_what_comes_back_is_the_callers(unet):
    """On x's own geometry, in new memory, and without a grip on what comes later."""
    net, fast = unet
    x, other = scene(80, 1), scene(70, 2)
    y = fast(x)
    kept = y.feats.clone()
    fast(other)
    assert torch.equal(y.feats, kept)
    assert y.geometry is x.geometry and not y.requires_grad
    assert y.feats.untyped_storage().nbytes() == y.feats.numel() * 4
    z = fast(x.feats, x.coords)
    assert torch.equal(z.feats, y.feats) and torch.equal(z.coords, x.coords)
    # What is captured serves as x does elsewhere.
    assert z.batch_size == 2
    assert_close(net(z.replace(x.feats)).feats, net(x).feats)


def test_what_is_cut_shares_no_memory_with_a_graph():
    leaf, site = torch.ones(4, 2), scene(20).geometry.site
    cutter = CropContext(None, site, 3, 2, {(): 1}, {(): LevelOutput(torch.zeros(4, 4, dtype=torch.int32), (1, 1, 1))})
    for held, kind, rows in (
        (leaf, "items", 3),
        (leaf, "whole", 4),
        (leaf, (), 1),
        (PointOutput(leaf, True), "taken", 2),
        (SparseOutput(leaf, ()), (), 1),
    ):
        found = cutter.crop(held, kind)
        found = found.feats if isinstance(found, pm.SparseTensor) else found
        assert len(found) == rows and found.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr(), kind


def test_levels_that_come_back_know_where_they_lie():
    net = strange(Levels())
    x = scene(90)
    fast = captured(net, x)
    back, dilated, odd, finer, generative = fast(x)
    assert [t.stride[0] for t in (back, dilated, odd, finer, generative)] == [1, 2, 2, 1, 1]
    inverse = pm.nn.InverseConv3d(8, 3, 3, stride=2, padding=1).eval()
    agrees(inverse(odd, x), inverse(eager(net, x)[2], x))


def test_one_geometry_stays_one():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.conv = pm.nn.Conv3d(4, 4, 2, stride=2), pm.nn.Conv3d(4, 2, 3)

        def forward(self, x):
            y = self.down(x)
            return y, self.conv(y)

    net = strange(Two())
    x = scene(60)
    a, b = captured(net, x)(x)
    assert a.geometry is b.geometry


# Scenes that do not fit


def falls_back(fast, net, x, why, match):
    before = fast.fallbacks[why]
    with pytest.warns(RuntimeWarning, match=match):
        agrees(fast(x), eager(net, x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(fast(x), eager(net, x))
    assert fast.fallbacks[why] == before + 2


def test_a_larger_scene_runs_eagerly_and_says_so_once():
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    fast = captured(net, scene(60), max_voxels=100)
    agrees(fast(scene(100, 5)), eager(net, scene(100, 5)))
    assert fast.replays == 1
    falls_back(fast, net, scene(101, 6), "voxels", "101 voxels exceeds .* max_voxels=100")


def moved(x, along):
    coords = x.coords + torch.tensor([0, 0, along, 0], dtype=torch.int32)
    return pm.SparseTensor(x.feats, coords, batch_size=x.batch_size)


@pytest.mark.parametrize("along", [-65_000, -9, 13, 40_000])
def test_scenes_lie_where_they_like(along):
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    fast = captured(net, scene(60, batch=2), margin=4.0)
    x = moved(scene(70, 1, batch=2), along)
    agrees(fast(x), eager(net, x))
    agrees(fast(x.feats, x.coords).feats, eager(net, x).feats)
    assert not fast.fallbacks


def test_a_scene_too_far_from_the_origin_runs_eagerly():
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    fast, x = captured(net, scene(60)), moved(scene(60, 1), 70_000)
    falls_back(fast, net, x, "range", "coordinates beyond")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agrees(fast(x.feats, x.coords).feats, eager(net, x).feats)
    assert fast.fallbacks == {"range": 3}


def test_more_items_than_expected_run_eagerly():
    net = strange(Layers())
    fast = captured(net, scene(60, batch=2))
    falls_back(fast, net, scene(60, 1, batch=3), "batch", "3 items")
    x = scene(60, 2)
    x = pm.SparseTensor(x.feats, x.coords, batch_size=4)
    agrees(fast(x), eager(net, x))
    assert fast.fallbacks == {"batch": 3}


def test_more_items_than_expected_that_nobody_counted_run_eagerly(monkeypatch):
    """As on a GPU, where the host does not know the items of a new tensor."""
    net = strange(Layers())
    fast, x = captured(net, scene(60, batch=2, shape=SHAPE)), scene(60, 1, batch=3, shape=SHAPE)
    monkeypatch.setattr(VoxelScene, "known_batch", None)
    falls_back(fast, net, x, "batch", "3 items")
    with pytest.warns(RuntimeWarning, match="items beyond batch=2"):
        agrees(fast(x.feats, x.coords), eager(net, x))
    assert fast.fallbacks == {"batch": 2, "range": 1}


@pytest.mark.parametrize("name", ["items", "level", "rows"])
def test_items_are_read_before_the_graph_runs_if_results_need_them(name, monkeypatch):
    nets = {"items": pm.nn.GlobalAvgPool(), "level": pm.nn.Conv3d(4, 3, 2, stride=2), "rows": pm.nn.Linear(4, 3)}
    fast, order = captured(nets[name].eval(), scene(60, batch=2)), []
    read, run = VoxelScene.batch.fget, CapacityBucket.run
    monkeypatch.setattr(VoxelScene, "known_batch", None)
    monkeypatch.setattr(VoxelScene, "batch", property(lambda self: order.append("items") or read(self)))
    monkeypatch.setattr(CapacityBucket, "run", lambda *given: order.append("graph") or run(*given))
    fast(scene(50, 1, batch=2))
    assert order[0] == ("graph" if name == "rows" else "items") and ("items" in order) == (name != "rows")


def test_in_inference_mode():
    net = strange(Layers())
    x = scene(60)
    with torch.inference_mode():
        fast = captured(net, x, buckets=[80])
        agrees(fast(x), eager(net, x))
    agrees(fast(x), eager(net, x))
    agrees(fast(scene(100, 1)), eager(net, scene(100, 1)))


@pytest.mark.parametrize("share", [0.1, {2: 0.1}, {(2, 2, 2): 0.1}])
def test_an_inner_level_without_room_runs_eagerly(share):
    """64 voxels far from each other make 64 voxels of the next level, where an example of one block makes 8."""
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(8)] * 3).int()
    example = pm.SparseTensor(torch.randn(512, 4), block)
    fast = captured(net, example, max_voxels=640, buckets=[640], level_capacity=share)
    sparse = pm.SparseTensor(torch.randn(512, 4), block * torch.tensor([1, 4, 4, 4], dtype=torch.int32))
    agrees(fast(example), eager(net, example))
    assert fast.replays == 1
    falls_back(fast, net, sparse, "room", "512 voxels at stride .2, 2, 2., above the capacity of")


def test_a_capacity_without_room_is_planned_anew():
    """64 blocks of 8 voxels make 64 voxels of the next level, and as many voxels far from each other 512."""
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(8)] * 3).int()
    example = pm.SparseTensor(torch.randn(512, 4), block)
    fast = captured(net, example, max_voxels=640, buckets=[640])
    agrees(fast(example), eager(net, example))
    sparse = pm.SparseTensor(torch.randn(512, 4), block * torch.tensor([1, 4, 4, 4], dtype=torch.int32))
    with pytest.warns(RuntimeWarning, match="512 voxels at stride.*its capacity is re-planned, up to 3 times"):
        agrees(fast(sparse), eager(net, sparse))
    assert fast.fallbacks == {"room": 1}
    replays = fast.replays
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in (sparse, example, scene(300, 3), sparse):
            agrees(fast(x), eager(net, x))
    assert fast.replays == replays + 4 and fast.fallbacks == {"room": 1}


def test_a_capacity_is_planned_anew_so_many_times_and_no_more(monkeypatch):
    net, made = strange(pm.models.MinkUNet(4, 3, 0.125)), []
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(8)] * 3).int()
    example = pm.SparseTensor(torch.randn(512, 4), block)
    fast = captured(net, example, max_voxels=640, buckets=[640])
    fast(example)
    whole, held = type(fast._engine)._build_bucket, fast._engine.buckets[640]

    def no_wider(engine, capacity, scene=None, least=None):
        """As if every scene that comes needed more than the one before."""
        made.append(capacity)
        wider = whole(engine, capacity, scene, least)
        wider.capacities = held.capacities
        return wider

    monkeypatch.setattr(type(fast._engine), "_build_bucket", no_wider)
    sparse = pm.SparseTensor(torch.randn(512, 4), block * torch.tensor([1, 4, 4, 4], dtype=torch.int32))
    with pytest.warns(RuntimeWarning, match="re-planned"):
        for _ in range(6):
            agrees(fast(sparse), eager(net, sparse))
    assert len(made) == 3 and fast.fallbacks == {"room": 6}


def test_an_example_without_room_is_refused():
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    with pytest.raises(CaptureError, match="exceeds the capacity.*stride"):
        pm.capture(net, scene(300, extent=16), level_capacity=0.01)


def test_duplicates_raise_as_they_do_eagerly(unet):
    _, fast = unet
    x = scene(50, 3)
    coords = torch.cat([x.coords, x.coords[7:8]])
    feats = torch.randn(51, 4)
    with pytest.raises(CoordinateError) as want:
        pm.SparseTensor(feats, coords)
    with pytest.raises(CoordinateError) as got:
        fast(feats, coords)
    assert str(got.value) == str(want.value) and "duplicates" in str(got.value)
    agrees(fast(x), fast(x))


def test_plain_scenes_of_a_plane():
    net, (x, wide) = pm.nn.Conv2d(4, 3, 3).eval(), (random_tensor(n, 4, 2, seed=n) for n in (50, 120))
    fast = pm.capture(net, x, max_voxels=100)
    agrees(fast(x.feats, x.coords).feats, eager(net, x).feats)
    with pytest.warns(RuntimeWarning, match="120 voxels"):
        agrees(fast(wide.feats, wide.coords).feats, eager(net, wide).feats)


def test_a_scene_outside_its_grid_raises():
    net = strange(Dense())
    fast = captured(net, scene(60, shape=SHAPE))
    x = scene(40, 2, shape=SHAPE)
    coords = x.coords.clone()
    coords[11, 2] = SHAPE[1]
    with pytest.raises(CoordinateError, match="spatial_shape"):
        fast(x.feats, coords)
    agrees(fast(x.feats, x.coords), eager(net, x))


# Parameters


def test_parameters_are_read_where_they_lie():
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    x = scene(60)
    fast = captured(net, x)
    before = fast(x).feats
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5)
    agrees(fast(x), eager(net, x))
    assert not torch.allclose(fast(x).feats, before)
    net.load_state_dict(strange(pm.models.MinkUNet(4, 3, 0.125), 3).state_dict())
    agrees(fast(x), eager(net, x))
    net.head = pm.nn.Linear(12, 3).eval()
    fast.refresh()
    agrees(fast(x), eager(net, x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_is_a_copys(dtype):
    net = strange(pm.models.MinkUNet(4, 3, 0.125))
    x = scene(60)
    fast = captured(net, x, dtype=dtype)
    y = fast(x)
    assert y.dtype == dtype and all(p.dtype == torch.float32 for p in net.parameters())
    scale = float(eager(net, x).feats.square().mean().sqrt())
    assert_close(y.feats, eager(net, x).feats.to(dtype), dtype=torch.bfloat16, scale=8 * scale)
    with torch.no_grad():
        net.head.weight.add_(1)
    assert torch.equal(fast(x).feats, y.feats)
    fast.refresh()
    assert not torch.allclose(fast(x).feats, y.feats)
    assert_close(fast(x).feats, eager(net, x).feats.to(dtype), dtype=torch.bfloat16, scale=64 * scale)


def test_autocast_is_that_of_the_capture():
    net, x = strange(pm.models.MinkUNet(4, 3, 0.125)), scene(60)
    with torch.autocast("cpu", torch.bfloat16):
        fast = captured(net, x)
        want = eager(net, x)
    assert want.dtype == torch.bfloat16
    agrees(fast(x), want)
    with torch.autocast("cpu", torch.float16):
        agrees(fast(x), want)


# At the door


WRONG = {
    "len": (lambda x: x if len(x) > 5 else x * 2, GeometryError, "len"),
    "truth": (lambda x: x * 2 if x else x, GeometryError, "len"),
    "prune": (lambda x: x.prune(x.feats[:, 0] > 0), GeometryError, "prune"),
    "split": (lambda x: x.split(), GeometryError, "split"),
    "collate": (lambda x: pm.collate([x, x]), GeometryError, "collate"),
    "coalesce": (lambda x: pm.coalesce(x.feats, x.coords), CoordinateError, "found -1.*captured network"),
    "dense without a grid": (lambda x: x.to_dense(), GeometryError, "spatial_shape"),
    "union": (lambda x: pm.union(x, pm.nn.Conv3d(4, 4, 1, out="support")(x)), GeometryError, "union"),
    "elsewhere": (lambda x: pm.nn.Conv3d(4, 4, 3)(x, out=scene(9)), GeometryError, "made outside"),
    "mean of all rows": (lambda x: x.feats.mean(0), CaptureError, "differs from its forward pass"),
    "centred": (lambda x: x.map(lambda f: f - f.mean(0)), CaptureError, "differs from its forward pass"),
    "maximum": (lambda x: x.map(lambda f: f / f.abs().max()), CaptureError, "differs from its forward pass"),
    "own coordinates": (lambda x: pm.SparseTensor(torch.ones(3, 2), random_cloud(3)), CaptureError, "coordinates"),
    "rows": (lambda x: x.feats.new_zeros(2 * x.feats.shape[0]), CaptureError, "sizes"),
    "batch statistics": (pm.nn.BatchNorm(4, track_running_stats=False).eval(), GeometryError, "statistics"),
    "torch's statistics": (
        lambda x: x.map(nn.BatchNorm1d(4, track_running_stats=False).eval()),
        CaptureError,
        "differs",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_captured_is_refused(name):
    what, error, match = WRONG[name]
    with pytest.raises(error, match=match):
        pm.capture(Asks(what).eval(), scene(40))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_voxels": 39}, ShapeError, "39.*40"),
        ({"max_voxels": 100.5}, OptionError, "max_voxels takes an integer, found 100.5"),
        ({"max_voxels": "100"}, OptionError, "max_voxels takes an integer, found '100'"),
        ({"batch": 0}, OptionError, "batch"),
        ({"batch": "2"}, OptionError, "batch takes an integer"),
        ({"level_capacity": "half"}, OptionError, "level_capacity takes a share, .* found 'half'"),
        ({"dtype": "half"}, DtypeError, "cast to a torch.dtype.* found 'half'"),
        ({"buckets": 1.0}, OptionError, "buckets"),
        ({"buckets": [50]}, None, ""),
        ({"buckets": [100]}, OptionError, "buckets"),
        ({"margin": 0.5}, OptionError, "margin"),
        ({"box": ((0, 0, 0), (9, 9, 9))}, TypeError, "box"),
        ({"dtype": torch.int8}, DtypeError, "cast"),
        ({"dtype": torch.float8_e4m3fn}, DtypeError, "cast"),
        ({"capacity": 5}, TypeError, "capacity"),
    ],
    ids=str,
)
def test_options(options, error, match):
    net = strange(pm.nn.Sequential(pm.nn.Conv3d(4, 4, 3)))
    if error is None:
        pm.capture(net, scene(40), **options)
        return
    with pytest.raises(error, match=match):
        pm.capture(net, scene(40), **options)


def test_models_and_examples():
    x, net = scene(30), pm.nn.Conv3d(4, 4, 3)
    with pytest.raises(OptionError, match="eval"):
        pm.capture(net, x)
    with pytest.raises(OptionError, match="eval.*0"):
        pm.capture(nn.Sequential(net).eval().train(), x)
    net.eval()
    with pytest.raises(OptionError, match="Module"):
        pm.capture(lambda x: x, x)
    with pytest.raises(DtypeError, match="SparseTensor"):
        pm.capture(net, x.feats)
    with pytest.raises(ShapeError, match="no voxels"):
        pm.capture(net, scene(0))
    with pytest.raises(CaptureError, match="the example has coordinates beyond"):
        pm.capture(net, moved(x, 70_000))


def test_calls(unet):
    net, fast = unet
    x = scene(30)
    with pytest.raises(DtypeError, match="SparseTensor"):
        fast(x.feats)
    with pytest.raises(ShapeError, match=r"\[N, 4\]"):
        fast(x.replace(x.feats[:, :3]))
    with pytest.raises(ShapeError, match=r"\[30, 4\]"):
        fast(x.feats, x.coords[:20])
    with pytest.raises(DtypeError, match="int32"):
        fast(x.feats, x.coords.long())
    with pytest.raises(DtypeError, match="float64"):
        fast(x.feats.double(), x.coords)
    with pytest.raises(DtypeError, match="floating"):
        fast(x.feats.int(), x.coords)
    with pytest.raises(DeviceError, match="meta"):
        fast(x.feats.to("meta"), x.coords)
    with pytest.raises(GeometryError, match="stride"):
        fast(pm.SparseTensor(x.feats, x.coords, stride=2))
    with pytest.raises(GeometryError, match="spatial_shape"):
        fast(scene(30, shape=SHAPE))
    net.train()
    with pytest.raises(OptionError, match="eval"):
        fast(x)
    net.eval()


@pytest.mark.parametrize("width", [1, 4])
def test_a_result_that_is_nothing_but_rounding_is_no_error(width, monkeypatch):
    """A mean over what was normalised: two ways of summing it have no digit in common."""
    net = pm.nn.Sequential(pm.nn.InstanceNorm(4 * width, affine=False), pm.nn.GlobalAvgPool()).eval()
    x = scene(100, extent=6)
    x = x.replace(x.feats.repeat(1, width))
    run = PaddedProgram.run

    def otherwise(program, buffers, rooms, poison=False):
        results = run(program, buffers, rooms, poison)
        results.leaves[0].add_(3e-8 * torch.randn(results.leaves[0].shape))
        return results

    monkeypatch.setattr(PaddedProgram, "run", otherwise)
    fast = captured(net, x)
    assert float(fast(x).abs().max()) < 1e-6


def test_what_is_more_than_rounding_is_an_error():
    want, rng = torch.full((50, 4), 1.0), torch.Generator().manual_seed(0)
    noise = [1e-7 * torch.randn(50, 4, generator=rng) for _ in range(3)]
    assert differ(noise[0], noise[1]) and not differ(noise[0], noise[1], noise[2])
    assert differ(1e-4 + noise[0], noise[1], noise[2])
    for place, wrong in ((7, torch.nan), (8, 1.5)):
        got = want + noise[0]
        got[place] = wrong
        assert differ(got, want, want + noise[1])
    assert not differ(want + noise[0], want)


def test_features_are_shaken_by_roundings_of_the_coarsest_dtype():
    x = torch.rand(1000, 4) + 0.5
    for like, eps in (((), 2**-23), ((x.half(), 7), 2**-10)):
        error = (perturb(x, like) - x).abs() / x / eps
        assert float(error.min()) > 2 and float(error.max()) < 6
    assert perturb(x.int(), ()).dtype == torch.int32


def test_what_depends_on_the_scene_is_refused_when_it_shows():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.other = pm.nn.Conv3d(4, 4, 2, stride=2), pm.nn.Conv3d(4, 4, 3, stride=3)
            self.turn = False

        def forward(self, x):
            return self.other(x) if self.turn else self.down(x)

    net = strange(Changes())
    fast = captured(net, scene(40))
    net.turn = True
    with pytest.raises(CaptureError, match="must not depend"):
        fast(scene(40))


# Capacities and memory


def test_capacities_grow_geometrically(unet):
    net, _ = unet
    fast = pm.capture(net, scene(60), max_voxels=100_000)
    assert fast.capacities[-1] == 100_000 and fast.capacities[0] >= 1024
    assert all(1.4 < b / a < 1.6 for a, b in pairwise(fast.capacities))
    assert fast.prepared == fast.capacities[:1]
    assert fast.ready(5000).prepared == (fast.capacities[0], min(c for c in fast.capacities if c >= 5000))
    told = fast.explain()
    assert "not yet captured" in told and "stride" in told and str(fast.capacities[-1]) in told


def test_memory_stays(unet):
    """What is made for a call goes with it."""
    _, fast = unet
    scenes = [scene(count, seed) for seed, count in enumerate((20, 45, 70, 100))]

    def held():
        gc.collect()
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    for x in scenes:
        fast(x)
    before = held()
    for _ in range(5):
        for x in scenes:
            fast(x.feats, x.coords)
    assert held() <= before


# What a graph tells early


class Graph:
    """Its words are there after so many looks at the stream, or never."""

    def __init__(self, told, words, looks):
        self.told, self.words, self.looks = told, words, looks

    def replay(self):
        assert (self.told == -1).all()
        self.seen = 0

    def query(self):
        self.seen += 1
        if self.seen == self.looks and self.words is not None:
            self.told.copy_(torch.tensor(self.words))
        return self.seen > self.looks


@pytest.mark.parametrize("words", [[0, 40, 7], [4, 0, 0], None])
def test_words_are_read_where_the_graph_writes_them(words, monkeypatch):
    """And where it never does, from the device when all is over."""
    told = torch.tensor([0, 3, 3], dtype=torch.int32)
    graph = Graph(told, words, 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: graph)
    results = SimpleNamespace(status_words=torch.tensor([0, 1, 2], dtype=torch.int32))
    bucket = CapacityBucket(SimpleNamespace(device=None), None, graph, results, told)
    assert bucket.run(None) is results
    assert bucket.status_words(results) == (words or [0, 1, 2]) and graph.seen == (3 if words else 4)
    bucket = CapacityBucket(SimpleNamespace(device=None), None, graph, results)
    assert bucket.status_words(results) == [0, 1, 2]


def test_a_fault_of_the_device_is_raised(monkeypatch):
    told = torch.zeros(2, dtype=torch.int32)
    graph = Graph(told, None, 0)
    monkeypatch.setattr(graph, "query", lambda: (_ for _ in ()).throw(RuntimeError("CUDA error")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: graph)
    bucket = CapacityBucket(SimpleNamespace(device=None), None, graph, "results", told)
    bucket.run(None)
    with pytest.raises(RuntimeError, match="CUDA error"):
        bucket.status_words("results")


def test_what_a_call_that_broke_off_is_told_is_no_other_calls(monkeypatch):
    """Its graph may still write its words, if they are not all there."""
    order, told = [], torch.zeros(2, dtype=torch.int32)
    stream = SimpleNamespace(synchronize=lambda: order.append(told.tolist()))
    graph = SimpleNamespace(replay=lambda: order.append("begins"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    bucket = CapacityBucket(SimpleNamespace(device=None), None, graph, "results", told)
    for there in ([-1, -1], [0, -1]):
        bucket.run(None)
        told.copy_(torch.tensor(there))
        bucket.run(None)
        assert order == ["begins", there, "begins"] and told.tolist() == [-1, -1]
        told.copy_(torch.tensor([0, 7]))
        assert bucket.status_words("results") == [0, 7]
        order.clear()
    # All of them are: nothing writes there any more.
    bucket.run(None)
    told.copy_(torch.tensor([4, 0]))
    bucket.run(None)
    assert order == ["begins", "begins"]


def test_calls_on_several_streams_come_one_behind_the_other(monkeypatch):
    """A call returns while layers are still at work on its stream."""
    order, current = [], []
    streams = [SimpleNamespace(wait_stream=lambda other, n=n: order.append((n, streams.index(other)))) for n in (0, 1)]
    net = strange(Levels(4))
    fast = captured(net, scene(60))
    engine = fast._engine
    engine._wait_for_previous_call()
    assert engine._stream is None, "there is no stream on a CPU"
    engine._pool = "a pool"
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    for number in (0, 0, 1, 1, 0):
        current.append(streams[number])
        engine._wait_for_previous_call()
    assert order == [(1, 0), (0, 1)]
