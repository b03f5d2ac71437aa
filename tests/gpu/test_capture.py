"""Captured networks on a GPU: graphs give what eager networks give, wait for nothing but one transfer, and do not grow.

As in test_device, `pytest --noconftest tests/gpu` runs where hypothesis is not installed.
"""

import gc
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from nets import Dense, Layers, Levels, strange
from torch import nn
from torch.utils import _pytree as pytree
from waits import no_wait

import pumice as pm
from benchmarks.scenes.stream_nets import UNET, Encoder, UNet
from pumice.coords import CodeLayout
from pumice.engine.buckets import CapacityBucket
from pumice.errors import CaptureError, CoordinateError, OptionError
from pumice.ops.tensor import is_sparse
from pumice.runtime.launch import record_graph
from pumice.schedule.dataflow import DATAFLOWS
from pumice.testing import assert_close, random_cloud

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

SHAPE = (64, 60, 40)


@pytest.fixture
def gpu():
    """The last GPU."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


def scene(device, count, seed=0, batch=1, extent=40, shape=None, dtype=torch.float32):
    if not count:
        coords = torch.zeros(0, 4, dtype=torch.int32)
    else:
        coords = random_cloud(count, 3, extent=extent, batch_size=batch, seed=seed)
    feats = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    sizes = {"spatial_shape": shape, "batch_size": batch} if shape else {}
    return pm.SparseTensor(feats.to(device), coords.to(device), **sizes)


def eager(net, x):
    with torch.no_grad():
        return net(x)


def agrees(got, want, limit=None):
    """Leaf by leaf; limit: the largest error over the rms of what is wanted, for whole networks in half precision."""
    got, want = pytree.tree_leaves(got, is_sparse), pytree.tree_leaves(want, is_sparse)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if isinstance(b, pm.SparseTensor):
            assert torch.equal(a.coords, b.coords)
            # Bounds may be wider than what lies in them, and are where they follow from those of other coordinates.
            own, site = a.geometry.site, b.geometry.site
            assert own == replace(site, bounds=own.bounds) and site.bounds.holds(own.bounds)
            a, b = a.feats, b.feats
        if not isinstance(b, torch.Tensor):
            assert a == b
        elif not b.is_floating_point():
            assert a.shape == b.shape and int((a != b).sum()) <= 1 + 0.002 * b.numel()
        elif limit is None or not b.numel():
            assert_close(a, b, dtype=torch.float16 if b.dtype == torch.float32 else None)
        else:
            error = (a.double() - b.double()).abs().max() / b.double().square().mean().sqrt().clamp(min=1e-3)
            assert a.shape == b.shape and float(error) < limit


def captured(net, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return pm.capture(net, x, **options).ready()


NETS = {
    "minkunet": lambda: pm.models.MinkUNet(4, 5, 0.5),
    "levels": lambda: Levels(16),
    "layers": lambda: Layers(16),
    "torch modules": lambda: pm.nn.Sequential(pm.nn.Conv3d(4, 6, 3), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(6, 2)),
    "bounded levels": lambda: Levels(16),
    "centerpoint": lambda: pm.models.CenterPointBackbone(4),
    "dense": Dense,
}
BOUNDED = ("bounded levels", "centerpoint", "dense")


@pytest.mark.parametrize("name", NETS)
def test_scenes_of_all_sizes(gpu, name):
    """Empty, at the edges of capacities and past them, in several batch items, one after the other in one pool."""
    net = strange(NETS[name]()).to(gpu)
    shape = SHAPE if name in BOUNDED else None
    fast = captured(net, scene(gpu, 9000, batch=2, shape=shape), max_voxels=9500, buckets=[50, 3000], margin=3.0)
    fast.ready()
    for seed, count in enumerate((9500, 0, 1, 3001, 49, 50, 51, 2999, 3000, 9499, 2)):
        for batch in (1, 2) if count > 1 and not shape else (2 if shape else 1,):
            x = scene(gpu, count, seed + 20 * batch, batch, shape=shape)
            agrees(fast(x), eager(net, x), 0.02)
    assert not fast.fallbacks and fast.prepared == fast.capacities


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(gpu, dtype):
    net = strange(pm.models.MinkUNet(4, 5, 0.5)).to(gpu).to(dtype)
    x = scene(gpu, 20_000, dtype=dtype)
    fast = captured(net, x)
    limit = {torch.float16: 0.1, torch.bfloat16: 0.8, torch.float32: 0.01}[dtype]
    for seed in (0, 1):
        x = scene(gpu, 19_000, seed, dtype=dtype)
        agrees(fast(x), eager(net, x), limit)
        agrees(fast(x.feats, x.coords).feats, eager(net, x).feats, limit)


def test_graphs_are_made_anew_after_all_are_dropped(gpu):
    """In other memory: torch refuses that of graphs that are gone."""
    net, x = strange(pm.models.MinkUNet(4, 5, 0.5)).to(gpu), scene(gpu, 5000)
    fast = captured(net, x)
    agrees(fast(x), eager(net, x), 0.01)
    net.head.weight = nn.Parameter(net.head.weight.detach() * 2)
    fast.refresh()
    assert not fast.prepared
    fast.ready()
    agrees(fast(x), eager(net, x), 0.01)
    assert not fast.fallbacks and fast.replays == 2


def test_a_copy_in_half_and_autocast(gpu):
    net, x = strange(pm.models.MinkUNet(4, 5, 0.5)).to(gpu), scene(gpu, 20_000)
    want = eager(net, x).feats
    half = captured(net, x, dtype=torch.float16)
    assert half(x).dtype == torch.float16
    agrees(half(x).feats, want, 0.1)
    with torch.autocast("cuda", torch.float16):
        cast = captured(net, x)
    agrees(cast(x).feats, want, 0.1)
    assert cast(x).dtype == torch.float16


@pytest.mark.filterwarnings("ignore:a scene needs more kernel map entries")
def test_a_thousand_random_geometries(gpu):
    """Clusters, boxes and lines, from none to all voxels, as one after the other comes; full boxes have no room."""
    net = strange(pm.models.MinkUNet(4, 3, 0.25)).to(gpu)
    fast = captured(net, scene(gpu, 4000, extent=48), max_voxels=4000, buckets=[128, 1000], margin=6.0, batch=2)
    rng, worst = np.random.default_rng(0), 0.0
    for number in range(1000):
        count = int(rng.choice([0, 1, 127, 128, 129, 1000, 4000, *rng.integers(0, 4000, 8)]))
        extent = [int(n) for n in rng.integers(1, 48, 3)]
        while count > np.prod(extent):
            extent = [min(48, n + 8) for n in extent]
        batch = int(rng.integers(1, 3)) if count > 1 and count <= np.prod(extent) else 1
        coords = random_cloud(count, 3, extent=extent, batch_size=batch, seed=number).to(gpu)
        feats = torch.randn(count, 4, device=gpu)
        want = eager(net, pm.SparseTensor(feats, coords, batch_size=2)).feats
        got = fast(feats, coords).feats
        assert got.shape == want.shape
        if count:
            worst = max(worst, float((got - want).abs().max() / want.square().mean().sqrt()))
    assert worst < 0.01 and {*fast.fallbacks} <= {"room"} and fast.replays > 950


STREAM = {"unet": lambda: UNet([width // 2 for width in UNET]), "encoder": Encoder}


@pytest.mark.parametrize("name", STREAM)
def test_captured_networks_are_recorded_programs(gpu, name):
    """Sums are rounded otherwise where a capacity takes other tiles than the scene."""
    net = strange(STREAM[name]()).to(gpu).half()
    program, x = pm.compile(net), scene(gpu, 20_000, dtype=torch.float16)
    fast = pm.capture(program, x, max_voxels=21_000, margin=3.0)
    for seed, count in enumerate((20_000, 19_000, 6000, 5900, 5800, 300, 20_500)):
        x = scene(gpu, count, seed, dtype=torch.float16)
        with torch.no_grad():
            want = program(x).feats.float()
        off = (fast(x).feats.float() - want).norm() / want.norm()
        assert float(off) < 5e-3
    assert {*fast.fallbacks} <= {"capture"} and fast.replays >= 2


def test_the_first_scene_of_a_capacity_runs_without_a_graph(gpu):
    """It is recorded at the end of that call, or of a later one if kernels are compiled first."""
    net = strange(pm.models.MinkUNet(4, 3, 0.5)).to(gpu)
    fast = pm.capture(net, scene(gpu, 3000), max_voxels=9000, buckets=[4000], margin=3.0)
    x, turns = scene(gpu, 8000, 1), 0
    want = eager(net, x)
    while fast.prepared == (4000,) and turns < 600:
        agrees(fast(x), want, 0.01)
        turns += 1
        time.sleep(0.1)
    assert fast.prepared == (4000, 9000) and fast.fallbacks == {"capture": turns} and not fast.replays
    agrees(fast(x), want, 0.01)
    assert fast.replays == 1


# Waits, and memory


@pytest.mark.parametrize("name", ["minkunet", "levels"])
def test_nothing_waits_but_for_a_few_words(gpu, name, monkeypatch):
    """Of a network that finds its maps beside its layers, and of one that does not."""
    net, x = strange(NETS[name]()).to(gpu), scene(gpu, 20_000)
    fast, feats, coords = captured(net, x), x.feats, x.coords
    fast(feats, coords)
    asked, words = [], CapacityBucket.status_words
    spy = lambda *given: asked.append(given[0].host_words) or words(*given)  # noqa: E731
    monkeypatch.setattr(CapacityBucket, "status_words", spy)
    with no_wait():
        fast(feats, coords)
    assert len(asked) == 1 and asked[0].is_pinned()


def test_a_call_returns_while_layers_are_at_work(gpu):
    """And the next ones come behind it, on whatever streams."""
    net = strange(pm.models.MinkUNet(4, 3)).to(gpu)
    scenes = [scene(gpu, 150_000, seed, extent=128) for seed in range(3)]
    fast = captured(net, scenes[0], max_voxels=150_000).ready(150_000)
    wants, streams = [eager(net, x).feats for x in scenes], [torch.cuda.Stream(gpu) for _ in range(2)]
    early = 0
    for turn in range(12):
        torch.cuda.synchronize(gpu)
        got = []
        for number in range(6):
            with torch.cuda.stream(streams[number * turn % 2]):
                x = scenes[number % 3]
                got.append(fast(x.feats, x.coords).feats)
                early += not torch.cuda.current_stream().query()
        torch.cuda.synchronize(gpu)
        for number, feats in enumerate(got):
            agrees(feats, wants[number % 3], 0.01)
    assert early > 60 and not fast.fallbacks


def test_the_static_program_waits_for_nothing(gpu):
    """Also where it is not captured, once it is compiled."""
    for net in (pm.models.MinkUNet(4, 3, 0.25), Levels(16), Layers(16)):
        x = scene(gpu, 9000, batch=2)
        engine = captured(strange(net).to(gpu), x)._engine
        bucket = engine.bucket(len(x))
        with no_wait():
            engine.program.run(bucket.buffers, bucket.capacities)


def test_memory_is_flat(gpu):
    net = strange(pm.models.MinkUNet(4, 3, 0.5)).to(gpu)
    fast = captured(net, scene(gpu, 9000), buckets=3.0).ready()
    scenes = [scene(gpu, count, count) for count in (100, 3000, 9000, 15_000)]
    for x in scenes:
        fast(x)
    torch.cuda.synchronize(gpu)
    allocated, reserved = torch.cuda.memory_allocated(gpu), torch.cuda.memory_reserved(gpu)
    for _ in range(50):
        for x in scenes:
            fast(x.feats, x.coords)
    torch.cuda.synchronize(gpu)
    assert torch.cuda.memory_allocated(gpu) == allocated and torch.cuda.memory_reserved(gpu) == reserved


def test_graphs_of_several_networks_on_several_streams(gpu):
    """Two captured networks, each on a stream of its own."""
    x = scene(gpu, 15_000)
    nets = [strange(pm.models.MinkUNet(4, 3, 0.5), seed).to(gpu) for seed in (1, 2)]
    both = [captured(net, x) for net in nets]
    wants = [eager(net, x).feats for net in nets]
    streams = [torch.cuda.Stream(gpu) for _ in nets]
    torch.cuda.synchronize(gpu)
    for _ in range(20):
        for fast, stream, want in zip(both, streams, wants, strict=True):
            with torch.cuda.stream(stream):
                got = fast(x).feats
            stream.synchronize()
            agrees(got, want, 0.01)


def test_a_graph_holds_the_constants_that_it_reads(gpu):
    """Eager scenes in other boxes have tables of their own, for which those of the graph are kept no longer."""
    net, x = strange(pm.models.MinkUNet(4, 3, 0.25)).to(gpu), scene(gpu, 3000, extent=48)
    fast, want = captured(net, x), eager(net, x).feats
    agrees(fast(x.feats, x.coords).feats, want, 0.01)
    for number in range(100):
        CodeLayout(((*range(number % 10),), (*range(number // 10),)), (0, 0)).tables(gpu)
    # Whoever gets their memory writes what is no place in any code.
    others = [torch.full((64 * n,), 1 << 50, device=gpu) for n in range(1, 64) for _ in range(16)]
    agrees(fast(x.feats, x.coords).feats, want, 0.01)
    assert others and fast.replays == 2 and not fast.fallbacks


# Scenes that do not fit


def test_scenes_that_do_not_fit_run_eagerly(gpu):
    """Each time; where a level had no room, until there is a graph for such scenes."""
    net = strange(pm.models.MinkUNet(4, 3, 0.25)).to(gpu)
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(16)] * 3).int().to(gpu)
    feats = torch.randn(4096, 4, device=gpu)
    fast = captured(net, pm.SparseTensor(feats, block), max_voxels=5000, buckets=[5000], margin=1.2)
    cases = {
        "room": block * torch.tensor([1, 4, 4, 4], dtype=torch.int32, device=gpu),
        "range": block - torch.tensor([0, 0, 70_000, 0], dtype=torch.int32, device=gpu),
        "voxels": torch.cat([block, block + torch.tensor([0, 20, 0, 0], dtype=torch.int32, device=gpu)])[:5001],
    }
    replays = 0
    for why, coords in cases.items():
        values = torch.randn(len(coords), 4, device=gpu)
        want = eager(net, pm.SparseTensor(values, coords)).feats
        with pytest.warns(RuntimeWarning, match="it runs eagerly"):
            agrees(fast(values, coords).feats, want, 0.01)
        assert fast.fallbacks[why] == 1 and fast.replays == replays
        if why == "room":
            replay(fast, values, coords)
            replays += 1
        agrees(fast(pm.SparseTensor(values, coords)).feats, want, 0.01)
        replays += why == "room"
        assert (why == "room" or fast.fallbacks[why] == 2) and fast.replays == replays
    agrees(fast(feats, block).feats, eager(net, pm.SparseTensor(feats, block)).feats, 0.01)
    assert fast.replays == 3 and fast.fallbacks.keys() == {"room", "range", "voxels"}


def replay(fast, *scene):
    """Call until there is a graph for scenes like this; its kernels may still be compiled."""
    before, begin = fast.replays, time.monotonic()
    while fast.replays == before:
        assert time.monotonic() < begin + 60
        fast(*scene)
        time.sleep(0.1)


def test_scenes_lie_where_they_like(gpu):
    """One graph, wherever a scene is: the same result, in the same order."""
    net, x = strange(pm.models.MinkUNet(4, 3, 0.25)).to(gpu), scene(gpu, 3000, extent=48)
    fast = captured(net, x, margin=2.0)
    for along in (0, -60_000, 1, 33_333, 60_001):
        y = pm.SparseTensor(x.feats, x.coords + torch.tensor([0, along, -along, 7], dtype=torch.int32, device=gpu))
        found = fast(y.feats, y.coords)
        assert torch.equal(found.coords, y.coords)
        agrees(found.feats, eager(net, y).feats, 0.01)
    assert fast.replays == 5 and not fast.fallbacks


def test_a_level_that_was_given_stays_as_narrow(gpu):
    net = strange(pm.models.MinkUNet(4, 3, 0.25)).to(gpu)
    block = torch.cartesian_prod(torch.arange(1), *[torch.arange(16)] * 3).int().to(gpu)
    x = pm.SparseTensor(torch.randn(4096, 4, device=gpu), block)
    sparse = pm.SparseTensor(x.feats, block * torch.tensor([1, 4, 4, 4], dtype=torch.int32, device=gpu))
    given = {"level_capacity": {2: 0.2}, "max_voxels": 5000, "buckets": [5000]}
    fast = captured(net, x, **given)
    with pytest.warns(RuntimeWarning, match="above the capacity.*it runs eagerly"):
        for _ in range(2):
            agrees(fast(sparse).feats, eager(net, sparse).feats, 0.01)
    agrees(fast(x).feats, eager(net, x).feats, 0.01)
    assert fast.fallbacks == {"room": 2} and fast.replays == 1


def test_what_is_wrong_raises(gpu):
    net, x = strange(Dense()).to(gpu), scene(gpu, 3000, shape=SHAPE)
    fast = captured(net, x)
    twice = torch.cat([x.coords, x.coords[100:101]])
    feats = torch.randn(3001, 4, device=gpu)
    for given in ((feats, twice), (pm.SparseTensor(feats, twice, spatial_shape=SHAPE, batch_size=1),)):
        with pytest.raises(CoordinateError, match="rows 100 and 3000"):
            fast(*given)
    outside = x.coords.clone()
    outside[11, 2] = SHAPE[1]
    with pytest.raises(CoordinateError, match="spatial_shape"):
        fast(x.feats, outside)
    agrees(fast(x), eager(net, x))


def test_a_network_that_asks_the_host_is_refused(gpu):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pm.nn.Conv3d(4, 4, 3)

        def forward(self, x):
            x = self.conv(x)
            return x * 2 if float(x.feats.abs().max()) > 1e9 else x

    with pytest.raises(CaptureError, match="cannot be captured"):
        pm.capture(strange(Asks()).to(gpu), scene(gpu, 1000))
    # What comes afterwards is not hurt.
    net, x = strange(pm.nn.Sequential(pm.nn.Conv3d(4, 4, 3))).to(gpu), scene(gpu, 1000)
    agrees(captured(net, x)(x), eager(net, x))


# Dataflows, parameters, points


@pytest.mark.parametrize("flow", DATAFLOWS)
def test_dataflows(gpu, flow):
    """Those that need no sizes on the host are captured; the others are refused."""
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 32, 3, dataflow=flow), pm.nn.Conv3d(32, 32, 2, stride=2, dataflow=flow))
    net, x = strange(net).to(gpu), scene(gpu, 9000)
    waits = flow.startswith("gather") or flow in ("fetch-on-demand-deterministic", "implicit-gemm-online")
    if waits:
        with pytest.raises(OptionError, match="capture"):
            pm.capture(net, x)
        return
    # In one box 17,000 voxels have up to 3.1 times the entries of 9,000, sorted by a few taps.
    fast = captured(net, x, margin=2.0)
    for seed, count in enumerate((9000, 10, 17_000)):
        x = scene(gpu, count, seed)
        agrees(fast(x), eager(net, x), 0.01)
    assert not fast.fallbacks and fast.replays == 3


def test_the_collector_frees_no_graph_within_a_capture(gpu):
    """A graph that is part of a reference cycle is destroyed by the garbage collector, which CUDA forbids meanwhile."""
    x, side = torch.ones(8, device=gpu), torch.cuda.Stream(gpu)
    old = [record_graph(lambda: x + 1, side)[0]]

    def work():
        ring = [old.pop()]
        ring.append(ring)
        del ring
        assert len([[] for _ in range(10_000)]) == 10_000
        return x + 2

    threshold = gc.get_threshold()
    gc.set_threshold(10)
    try:
        graph, y, _ = record_graph(work, side)
    finally:
        gc.set_threshold(*threshold)
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [7] * 8 and gc.isenabled()


def test_parameters_are_read_where_they_lie(gpu):
    net, x = strange(pm.models.MinkUNet(4, 3, 0.25)).to(gpu), scene(gpu, 5000)
    fast = captured(net, x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.3)
    agrees(fast(x), eager(net, x), 0.01)
    net.load_state_dict(strange(pm.models.MinkUNet(4, 3, 0.25), 3).state_dict())
    agrees(fast(x), eager(net, x), 0.01)


@pytest.mark.parametrize("grid", [{"size": 0.1}, {"size": 0.1, "spatial_shape": (30, 25, 20)}], ids=str)
def test_points(gpu, grid):
    net = strange(pm.models.MinkUNet(2, 4, 0.25)).to(gpu)

    def cloud(count, seed):
        generator = torch.Generator().manual_seed(seed)
        points, feats = torch.rand(count, 3, generator=generator) * 3, torch.randn(count, 2, generator=generator)
        return points.to(gpu), feats.to(gpu), torch.randint(0, 2, (count,), generator=generator).to(gpu)

    points, feats, items = cloud(20_000, 0)
    fast = pm.capture_points(net, points, feats, batch=items, buckets=[500, 5000], margin=3.0, **grid).ready()
    for seed, count in enumerate((0, 1, 499, 500, 501, 5000, 40_000)):
        points, feats, items = cloud(count, seed)
        fast.ready(count)
        with torch.no_grad():
            want = pm.devoxelize(net(pm.voxelize(points, feats, batch=items, batch_size=2, **grid)))
        agrees(fast(points, feats, items), want, 0.01)
    assert not fast.fallbacks
    points[7] = torch.nan
    warned = pytest.warns(RuntimeWarning) if "spatial_shape" not in grid else nullcontext()
    with warned, pytest.raises(CoordinateError, match="not finite"):
        fast(points, feats, items)
