"""Real scans through the library: voxel counts as the folder's notes have them, MinkUNet, and training on labels.

The scans are found through PUMICE_DATA; where it is not set, everything here is skipped.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import one_thread  # noqa: F401

import pumice as pm
from pumice.cli.evaluate import Scores, confusion, predict
from pumice.cli.training import Recipe, train
from pumice.data import Scan, read_scan
from pumice.label.checkpoint import Task
from pumice.models import MinkUNet

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Real:
    """A cloud: where it lies, {voxel size: voxels} by the notes, and a size at which a network is quick on it."""

    pattern: str
    voxels: dict[float, int]
    coarse: float


# Counts are of floor((xyz - min) / size), exact where they were taken of these very files.
REAL = [
    Real("nuscenes_single/*.pcd.bin", {0.05: 23_091, 0.1: 17_856}, 0.4),
    Real("waymo/seq_0_frame_100.bin", {0.05: 117_685, 0.1: 81_417}, 0.8),
    Real("waymo/seq_0_frame_101.bin", {0.05: 116_893, 0.1: 81_679}, 0.8),
    Real("indoor_scannet/scene0000_00.bin", {0.02: 40_349, 0.05: 32_493}, 0.15),
    Real("indoor_scannet/scene0000_00_gt.npz", {0.02: 80_020, 0.05: 53_365}, 0.15),
    Real("semantickitti_labelled/000000.bin", {0.05: 94_594, 0.1: 68_867}, 0.6),
]


@pytest.fixture
def scan(data_folder):
    """`scan(pattern)`: the scan of that name below the data folder."""

    def scan(pattern: str) -> Scan:
        path = next(iter(data_folder.glob(pattern)), None)
        if path is None:
            pytest.skip(f"no {pattern} in the data folder")
        return _read(path)

    return scan


@lru_cache(maxsize=2)
def _read(path: Path) -> Scan:
    return read_scan(path, labels=True)


def voxels_of(scan: Scan, size: float) -> pm.SparseTensor:
    """The scan's own features, a height and a one for every point, averaged per voxel."""
    xyz = torch.from_numpy(scan.xyz)
    feats = torch.cat([torch.from_numpy(scan.feats), xyz[:, 2:], torch.ones(len(xyz), 1)], dim=1)
    return pm.voxelize(xyz, feats, size, origin="min")


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.pattern)
def test_voxel_counts(scan, real):
    cloud = scan(real.pattern)
    for size, count in real.voxels.items():
        x = voxels_of(cloud, size)
        # A point on a cell's face falls to either side as its decimals are rounded.
        assert abs(len(x) - count) <= 1, f"{len(x)} voxels at {size} m, expected {count}"
        assert x.inverse.shape == (len(cloud),) and int(x.inverse.min()) == 0 and int(x.inverse.max()) == len(x) - 1
        assert len(x.coords.unique(dim=0)) == len(x) and int(x.coords.min()) == 0
        assert torch.allclose(x.feats[:, -1], torch.ones(()))


def test_the_published_rounding(scan):
    """round(xyz / 0.05) less the minimum, as the published MinkUNet pipelines have it."""
    x = pm.voxelize(torch.from_numpy(scan("semantickitti_labelled/000000.bin").xyz), size=0.05, origin="min",
                    rounding="round")  # fmt: skip
    assert abs(len(x) - 94_625) <= 1 and int(x.coords.min()) == 0


def test_negative_coordinates(scan):
    """CenterPoint's voxels of a whole Waymo frame, which reach below zero; counted without and with clipping."""
    xyz = torch.from_numpy(scan("waymo/seq_0_frame_100.bin").xyz)
    grid = {"size": (0.1, 0.1, 0.15), "origin": (-75.2, -75.2, -2.0)}
    free = pm.voxelize(xyz, **grid)
    # Outside the published grid lie points at both ends; a few of them round to its faces.
    bounded = pm.voxelize(xyz, **grid, spatial_shape=(1504, 1504, 40))
    assert abs(len(free) - 76_226) <= 10 and int(free.coords.min()) < 0
    assert abs(len(bounded) - 74_902) <= 10 and int(bounded.inverse.min()) == -1
    weight = torch.randn(2, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    y = pm.ops.conv(free, weight, stride=2, padding=1)
    assert torch.isfinite(y.feats).all() and int(y.coords.min()) < 0


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.pattern)
def test_minkunet(scan, real):
    cloud = scan(real.pattern)
    x = voxels_of(cloud, real.coarse)
    torch.manual_seed(0)
    net = MinkUNet(x.channels, 19, 0.25)
    y = net(x)
    assert y.geometry is x.geometry and y.feats.shape == (len(x), 19) and torch.isfinite(y.feats).all()
    y.feats.logsumexp(1).mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
    classes = net.eval().predict(x)
    assert classes.shape == (len(cloud),) and int(classes.min()) >= 0 and int(classes.max()) < 19


@lru_cache(maxsize=1)
def surface(path: Path) -> np.ndarray:
    """Three million points drawn evenly from a mesh's surface, as the notes draw them: [P, 3]."""
    mesh = np.load(path)
    corners, rng = mesh["v"][mesh["f"]], np.random.default_rng(0)
    area = np.linalg.norm(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]), axis=1)
    chosen = rng.choice(len(area), 3_000_000, p=area / area.sum())
    return (corners[chosen] * rng.dirichlet([1, 1, 1], len(chosen))[:, :, None]).sum(1)


def test_a_mesh(data_folder):
    path = data_folder / "meshes" / "stanford-bunny.npz"
    if not path.is_file():
        pytest.skip("no meshes in the data folder")
    points, vertices = torch.from_numpy(surface(path)), np.load(path)["v"]
    edge, low = float(np.ptp(vertices, 0).max()), vertices.min(0).tolist()
    shell = pm.voxelize(points, size=edge / 511.999, origin=low, spatial_shape=(512, 512, 512))
    assert abs(len(shell) - 722_156) <= 10 and len(shell) < 0.01 * 512**3
    x = pm.voxelize(points.float(), size=edge / 48, origin=low)
    net = MinkUNet(3, 8, 0.25).eval()
    with torch.no_grad():
        y = net(x)
    assert 4_000 < len(x) < 20_000 and torch.isfinite(y.feats).all()


def test_training_reaches_an_accuracy(scan):
    """SemanticKITTI, one scan, learned by heart: point accuracy above 0.90."""
    cloud = scan("semantickitti_labelled/000000.bin")
    task = Task.of([cloud], cloud.label_set, 0.5, 0.25)
    torch.manual_seed(0)
    net = task.network()
    steps = list(train(net, [cloud], task, Recipe(50, rate=8e-3, augment=False), CPU))
    scores = Scores(confusion(cloud.labels, predict(net, cloud, task, CPU, "fp32"), len(task.names)))
    assert int(scores.counts.sum()) == int((cloud.labels >= 0).sum())
    assert steps[-1].loss < 0.1 * steps[0].loss
    assert scores.accuracy > 0.90, f"point accuracy {scores.accuracy:.3f}, mIoU {scores.miou:.3f}"
    assert scores.miou > 0.6
