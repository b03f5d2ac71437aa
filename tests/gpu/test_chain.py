"""On a GPU the maps of a chain that are built together are those that are built one by one, after one wait."""

import threading
import warnings
from importlib import import_module

import pytest
import torch
from found import agree
from waits import no_wait, wait_for_background

import pumice as pm
from pumice.coords import Relation
from pumice.errors import CoordinateError
from pumice.testing import random_cloud

prepare = import_module("pumice.ops.prepare")

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def scene(count, dim=3, seed=0, extent=90, items=2, **options):
    coords = random_cloud(count, dim, extent=extent, batch_size=items, seed=seed).to(GPU)
    coords[:, 1:] -= extent // 3
    return pm.SparseTensor(torch.zeros(len(coords), 4, device=GPU), coords, dim=dim, **options)


def level_by_level(x, steps, same):
    other = pm.SparseTensor(x.feats, x.coords, x.stride, x.spatial_shape, x.batch_size, dim=x.spatial_dim)
    prepare.RequestedMaps(tuple(steps), tuple(map(tuple, same)), None).build(other.geometry)
    return other


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("dim", "depth"), [(3, 4), (3, 1), (2, 3), (1, 2)])
def test_maps_are_those_one_by_one(dim, depth, training):
    steps, same = [Relation.of(dim, 2, stride=2)] * depth, [[Relation.of(dim, 3)]] * (depth + 1)
    with torch.set_grad_enabled(training):
        for seed, count in enumerate((1, 41, 3000, 30_000, 200_000, 700_000)):
            extent = {1: 4 * count, 2: int(3 * count**0.5) + 2, 3: int(2 * count ** (1 / 3)) + 2}[dim]
            x = scene(count, dim, seed, extent + 3, min(2, count)).prepare(steps, same)
            assert agree(x.geometry, level_by_level(x, steps, same).geometry) >= 3 * depth + 1


def test_other_windows_are_added():
    steps = [Relation.of(3, 2, stride=2)] * 2
    same = [[Relation.of(3, 3), Relation.of(3, 5)], [Relation.of(3, 3, dilation=2)], []]
    x = scene(20_000).prepare(steps, same)
    assert agree(x.geometry, level_by_level(x, steps, same).geometry) > 0


@pytest.mark.parametrize("shape", [None, (90, 90, 90)])
def test_one_wait_for_all_sizes(shape):
    steps, same = [Relation.of(3, 2, stride=2)] * 4, [[Relation.of(3, 3)]] * 5
    with torch.no_grad():
        for seed in range(2):
            coords = random_cloud(20_000 + seed, 3, extent=90, seed=seed).to(GPU)
            feats = torch.zeros(len(coords), 4, device=GPU)
            x = pm.SparseTensor(feats, coords, spatial_shape=shape, batch_size=None if shape is None else 1)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    x.prepare(steps, same)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [each for each in told if "synchronizing" in str(each.message)]
            assert seed == 0 or len(waits) == 1, [str(each.message) for each in told]


@pytest.mark.parametrize("training", [False, True])
def test_layers_wait_for_nothing(training):
    """The second scene: on the first, kernels are compiled and constants are copied."""
    net = pm.models.MinkUNet(4, 5, 0.5).to(GPU).train(training)
    with torch.set_grad_enabled(training):
        for seed in range(3):
            x = scene(20_000 + 100 * seed, seed=seed).prepare(net.steps, net.windows)
            x = x.replace(torch.randn_like(x.feats))
            if seed < 2:
                net(x)
            else:
                with no_wait():
                    net(x)


def test_what_is_wrong_is_raised():
    steps, same = [Relation.of(3, 2, stride=2)] * 2, [[Relation.of(3, 3)]] * 3
    coords = random_cloud(5000, 3, extent=40).to(GPU)
    for change, problem in ((lambda c: c[7].copy_(c[9]), "duplicates"), (lambda c: c[7].fill_(40), "reach")):
        wrong = coords.clone()
        change(wrong)
        x = pm.SparseTensor(torch.zeros(len(wrong), 1, device=GPU), wrong, spatial_shape=(40,) * 3, batch_size=1)
        with pytest.raises(CoordinateError, match=problem):
            x.prepare(steps, same)


def test_nothing_is_kept_of_a_scene():
    steps, same = [Relation.of(3, 2, stride=2)] * 3, [[Relation.of(3, 3)]] * 4
    wait_for_background()
    with torch.no_grad():
        for n in range(20):
            x = scene(50_000, seed=n, extent=120).prepare(steps, same)
            del x
            torch.cuda.synchronize()
            if n == 3:
                start = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= start + (1 << 20)


def test_threads_and_streams():
    steps, same, wrong = [Relation.of(3, 2, stride=2)] * 3, [[Relation.of(3, 3)]] * 4, []
    scenes = [scene(20_000 + 400 * n, seed=n) for n in range(12)]
    torch.cuda.synchronize()

    def work(mine):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for x in mine:
                try:
                    x.prepare(steps, same)
                    agree(x.geometry, level_by_level(x, steps, same).geometry)
                except Exception as problem:
                    wrong.append(problem)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(scenes[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]
