"""Nothing is kept of a scene: over scenes that never come twice neither tensors nor Python objects grow in number."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
import warnings

import pytest
import torch
from emulated import Gpu, emulated
from programs import Residual, Unit
from torch import nn
from wide import beyond

import pumice as pm
from pumice.runtime.cache import BoundedCache
from pumice.testing import random_cloud

WARM, MORE = 60, 150
ROWS = (7, 20, 33)
OBJECTS = 0.25
"""How many more objects a scene may leave: torch makes some at times, of a scene one at least is kept."""


class Net(nn.Module):
    """Levels, a skip connection, a pool, norms and a step that is no product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = Unit(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.ReLU()), Residual(8, False)
        self.down, self.pool = pm.nn.Conv3d(8, 8, 2, 2), pm.nn.MaxPool3d(2, 2)
        self.up, self.head = pm.nn.InverseConv3d(8, 4, 2, 2), pm.nn.Linear(12, 3)
        self.norm = pm.nn.GroupNorm(2, 8)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.block(self.down(x)))
        return self.head(pm.cat([self.up(y, x), x])), self.pool(y)


def scenes(first, count):
    """Scenes of a few shapes, each somewhere else: what depends on sizes is soon known, what is kept of a scene is not.
    Shifts keep the cells of all levels."""
    for seed in range(first, first + count):
        rows = ROWS[seed % len(ROWS)]
        coords = random_cloud(rows, 3, extent=8, seed=rows)
        coords[:, 1:] += 16 * torch.randint(-9, 9, (3,), generator=torch.Generator().manual_seed(seed)).int()
        yield pm.SparseTensor(torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)), coords)


def evaluated(run):
    def each(x):
        with torch.no_grad():
            run(x)

    return each


def trained(run):
    def each(x):
        y, z = run(x)
        (y.feats.sum() + z.feats.sum()).backward()

    return each


def example():
    """As large as any scene, within the corners of all."""
    coords = random_cloud(40, 3, extent=8)
    coords[0, 1:], coords[1, 1:] = -16 * 9, 16 * 9 + 7
    return pm.SparseTensor(torch.randn(40, 4), coords)


def captured(net):
    return evaluated(pm.capture(net, example()))


def captured_step(net):
    def loss(found, labels):
        return nn.functional.cross_entropy(found[0].feats, labels)

    x = example()
    optimizer = torch.optim.SGD(net.parameters(), 1e-4)
    step = pm.capture_step(net, loss, optimizer, x, torch.zeros(40, dtype=torch.int64))
    return lambda x: step(x, torch.zeros(len(x), dtype=torch.int64))


WAYS = {
    "layers": lambda net: evaluated(net.eval()),
    "layers, training": trained,
    "program": lambda net: evaluated(pm.compile(net.eval())),
    "program, training": lambda net: trained(pm.compile(net)),
    "captured": lambda net: captured(net.eval()),
    "captured step": captured_step,
}


def objects() -> tuple[int, int]:
    """How many there are, and how many of them are tensors."""
    gc.collect()
    with warnings.catch_warnings():
        # Some modules of torch warn of what is asked of them.
        warnings.simplefilter("ignore")
        found = gc.get_objects()
        return len(found), sum(issubclass(type(one), torch.Tensor) for one in found)


def growth(way, gpu: Gpu | None = None) -> tuple[float, int]:
    """How many more objects a scene leaves, and how many more tensors all of them."""

    def run(first, count):
        for x in scenes(first, count):
            way(x)
            if gpu is not None:
                gpu.clear()
        if gpu is not None:
            # It knows of arrays that are gone until others are at their place.
            gpu.forms.clear()
            gpu.rooms.clear()
        return objects()

    run(0, WARM)
    # The first census makes objects of its own.
    before = run(WARM, len(ROWS))
    after = run(WARM + len(ROWS), MORE)
    return (after[0] - before[0]) / MORE, after[1] - before[1]


@pytest.mark.parametrize("way", WAYS)
def test_on_a_cpu(way):
    torch.manual_seed(0)
    found, tensors = growth(WAYS[way](Net()))
    assert found < OBJECTS and tensors <= 0


@pytest.mark.parametrize("way", beyond(1, ["program, training", "program", "layers, training", "layers"]))
def test_on_a_gpu(way, tmp_path):
    torch.manual_seed(0)
    with emulated(tmp_path) as gpu:
        found, tensors = growth(WAYS[way](Net()), gpu)
    assert found < OBJECTS and tensors <= 0


def test_what_is_kept_is_told():
    kept = []
    found, tensors = growth(lambda x: kept.append((x.feats, object())))
    assert found >= 1 and tensors >= MORE


def modules():
    names = [m.name for m in pkgutil.walk_packages(pm.__path__, "pumice.")]
    return [importlib.import_module(name) for name in names if not name.endswith((".compile_worker", "__main__"))]


def test_caches_are_bounded():
    for module in modules():
        for name, value in vars(module).items():
            owners = [value, *vars(value).values()] if isinstance(value, type) else [value]
            for each in (getattr(one, "__func__", one) for one in owners):
                if isinstance(each, functools._lru_cache_wrapper):
                    assert each.cache_parameters()["maxsize"] is not None, f"{module.__name__}.{name}"
                if isinstance(each, BoundedCache):
                    assert each._most <= 1 << 14, f"{module.__name__}.{name}"
