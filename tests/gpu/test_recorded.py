"""On a GPU maps that a graph finds are those that are found without one, and belong to their scene."""

import threading
from importlib import import_module

import pytest
import torch
from found import agree

import pumice as pm
from pumice.coords import Relation
from pumice.errors import CoordinateError
from pumice.runtime.cache import BoundedCache
from pumice.testing import random_cloud

recorded, prepare = import_module("pumice.ops.recorded"), import_module("pumice.ops.prepare")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False"),
]

GPU = torch.device("cuda")
STEPS = (Relation.of(3, 2, stride=2),) * 3
SAME = ((Relation.of(3, 3),),) * 4
STRIDED = (Relation.of(3, 3, stride=2, padding=1, policy="support"), Relation.of(3, 2, stride=2))
WINDOWS = ((Relation.of(3, 3), Relation.of(3, 3, dilation=2)), (), (Relation.of(3, 5),))


@pytest.fixture(autouse=True)
def shelves(monkeypatch):
    """Nothing is recorded yet, and the first scene will be: chains of halved levels are not built together."""
    monkeypatch.setattr(prepare._Wanted, "find_chain", lambda *_: False)
    monkeypatch.setattr(recorded, "_SHELVES", BoundedCache(8))
    monkeypatch.setattr(recorded, "_BEFORE", 0)


def shelf():
    return recorded._SHELVES.get(GPU) or recorded._SHELVES.get(torch.device("cuda", 0))


def scene(count, seed=0, extent=90, items=2):
    coords = random_cloud(count, 3, extent=extent, batch_size=items, seed=seed).to(GPU)
    return pm.SparseTensor(torch.zeros(len(coords), 4, device=GPU), coords)


def without(x):
    return pm.SparseTensor(x.feats, x.coords, x.stride, x.spatial_shape, x.batch_size)


def check(x, steps=STEPS, same=SAME):
    """Maps by a graph, and without."""
    wanted = prepare._RequestedMaps(steps, same, None)
    assert recorded.by_graph(x.geometry, wanted.graph_request())
    other = without(x)
    wanted.build(other.geometry)
    assert agree(x.geometry, other.geometry, exact=False) >= len(steps)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("steps", "same"), [(STEPS, SAME), (STRIDED, WINDOWS)], ids=["pooled", "strided"])
def test_maps_are_those_without_a_graph(training, steps, same):
    with torch.set_grad_enabled(training):
        for seed, count in enumerate((30_000, 29_000, 30_500, 200_000, 41, 190_000)):
            check(scene(count, seed, extent=90 if count < 100_000 else 250), steps, same)
    assert len(shelf()._held) >= 3


@pytest.mark.parametrize("training", [False, True])
def test_a_network_gives_the_same(training):
    torch.manual_seed(0)
    net = pm.models.MinkUNet(4, 5, 0.5).to(GPU).train(training)
    for seed in range(4):
        x = scene(20_000, seed)
        x = x.replace(torch.randn_like(x.feats))
        results = []
        for serves in (True, False):
            held = without(x)
            if not serves:
                net_steps = prepare._RequestedMaps(tuple(net.steps), tuple(map(tuple, net.windows)), None)
                net_steps.build(held.geometry)
            with torch.set_grad_enabled(training):
                y = net(held).feats
                if training:
                    net.zero_grad()
                    y.square().mean().backward()
                    results.append([y, *[p.grad.clone() for p in net.parameters()]])
                else:
                    results.append([y])
        for a, b in zip(*results, strict=True):
            # Rounding differs, and a ReLU may tell it.
            assert (a - b).norm() <= 2e-2 * b.norm() + 1e-6
    assert len(shelf()._held) == 1


def test_memory_is_the_scenes_own():
    """Neither later scenes nor other streams write to it, and nothing of it is kept when it goes."""
    wanted = prepare._RequestedMaps(STEPS, SAME, None)
    kept, copies = [], []
    for seed in range(3):
        x = scene(50_000, seed, extent=120)
        assert recorded.by_graph(x.geometry, wanted.graph_request())
        maps = [found for found, _ in x.geometry.maps.values()]
        kept.append(maps)
        copies.append([found.table.clone() for found in maps])
    other = torch.cuda.Stream()
    for n in range(6):
        x = scene(50_000, 10 + n, extent=120)
        torch.cuda.synchronize()
        with torch.cuda.stream(other if n % 2 else torch.cuda.current_stream()):
            check(x)
    for maps, before in zip(kept, copies, strict=True):
        assert all(torch.equal(found.table, copy) for found, copy in zip(maps, before, strict=True))
    del kept, copies, maps, before, x
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    for n in range(20):
        y = scene(50_000, n, extent=120)
        assert recorded.by_graph(y.geometry, wanted.graph_request())
        del y
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= start + (1 << 20)


def test_threads_take_turns():
    wanted, wrong = prepare._RequestedMaps(STEPS, SAME, None), []
    scenes = [scene(20_000 + 400 * n, n) for n in range(12)]
    torch.cuda.synchronize()

    def work(mine):
        with torch.cuda.stream(torch.cuda.Stream()):
            for x in mine:
                try:
                    recorded.by_graph(x.geometry, wanted.graph_request())
                    other = without(x)
                    wanted.build(other.geometry)
                    agree(x.geometry, other.geometry, exact=False)
                except Exception as problem:
                    wrong.append(problem)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(scenes[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_scenes_that_do_not_fit_are_recorded_anew():
    check(scene(30_000, 0, extent=40))
    (first,) = shelf()._held.values()
    assert shelf()._times.values() == [1]
    # Scattered voxels: far more of them on the coarser levels, and outside of the box.
    check(scene(30_000, 1, extent=400))
    check(scene(30_000, 2, extent=40))
    (last,) = shelf()._held.values()
    assert shelf()._times.values()[0] > 1 and last.site.bounds.cells > first.site.bounds.cells


def test_what_is_wrong_with_coordinates_is_raised():
    wanted = prepare._RequestedMaps(STEPS, SAME, None)
    good = random_cloud(5000, 3, extent=60).to(GPU)
    for place in (0, 4000, 0):
        bad = good.clone()
        bad[place] = bad[7]
        x = pm.SparseTensor(torch.zeros(len(bad), 1, device=GPU), bad, spatial_shape=(60, 60, 60), batch_size=1)
        with pytest.raises(CoordinateError, match="1 of 5000 coordinates are duplicates"):
            recorded.by_graph(x.geometry, wanted.graph_request())
        bad[place, 2] = 77
        x = pm.SparseTensor(torch.zeros(len(bad), 1, device=GPU), bad, spatial_shape=(60, 60, 60), batch_size=1)
        with pytest.raises(CoordinateError, match="spatial_shape is"):
            recorded.by_graph(x.geometry, wanted.graph_request())
        check(pm.SparseTensor(torch.zeros(len(good), 1, device=GPU), good, spatial_shape=(60, 60, 60), batch_size=1))


def test_nothing_is_recorded_while_a_graph_is():
    net = pm.models.MinkUNet(4, 5, 0.25).to(GPU).eval()
    x = scene(5000)
    with torch.no_grad():
        want = net(x).feats
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            net(x)
        torch.cuda.current_stream().wait_stream(side)
        graph, other = torch.cuda.CUDAGraph(), without(x).geometry
        assert recorded._serves(other)
        with torch.cuda.graph(graph):
            assert not recorded._serves(other)
            y = net(x).feats
        graph.replay()
    assert torch.allclose(y, want, atol=1e-4)


def test_inference_serves_training_afterwards():
    net = pm.models.MinkUNet(4, 5, 0.25).to(GPU)
    x = scene(8000)
    with torch.inference_mode():
        held = without(x)
        net.eval()(held)
    y = net.train()(held.replace(torch.randn_like(x.feats))).feats
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
