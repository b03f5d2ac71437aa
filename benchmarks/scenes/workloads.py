"""The seven networks on scans that TorchSparse and TorchSparse++ use as benchmarks, and their voxels.

Tang et al., "TorchSparse: Efficient Point Cloud Inference Engine", MLSys 2022; Tang et al., "TorchSparse++: Efficient
Training and Inference Framework for Sparse Convolution on GPUs", MICRO 2023. Voxel sizes, ranges and limits are those
of the published configurations: spvnas for MinkUNet, OpenPCDet for the backbone of CenterPoint, and TorchSparse's data
sets for limits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pumice.coords import Relation
from pumice.data import Scan, read_scan, street_scene
from pumice.env import settings
from pumice.errors import OptionError
from pumice.models import CenterPointBackbone, MinkUNet
from pumice.nn import Conv3d, MaxPool3d, ReLU
from pumice.nn.conv import convolutions
from pumice.ops import SparseTensor, voxelize

Scans = Callable[[Path], list[Scan]]

EXACT = "gather-gemm-scatter-vectorised-separate"
"""The dataflow of reference runs: for each kernel offset a gather, a matrix product of torch and an addition."""


@dataclass(frozen=True)
class Grid:
    """Voxelization of points.

    size: voxel size in metres along (x, y, z). With low and cells (least corner in metres, extent in voxels), as in
    OpenPCDet: a voxel is floor((p - low) / size), points outside are dropped, coordinates are (z, y, x). Without low,
    as in spvnas: a voxel is round(p / size) minus the minimum, coordinates are (x, y, z). most: voxels kept at most,
    chosen at random; 0: all. layers: empty layers added on top of the extent.
    """

    size: tuple[float, float, float]
    low: tuple[float, float, float] | None = None
    cells: tuple[int, int, int] | None = None
    most: int = 0
    layers: int = 0


@dataclass(frozen=True)
class Workload:
    """A network and its scans.

    model: makes the network with weights from torch's generator. scans: reads the scans of a folder; raises OptionError
    if there are none. features: per voxel, the means of its points: x, y, z, then the scan's. generated: scans are
    generated from a seed and the folder is not read. source: origin of network, voxels and scans.
    """

    name: str
    model: Callable[[], nn.Module]
    scans: Scans
    grid: Grid
    features: int
    generated: bool = False
    source: str = ""


@dataclass(frozen=True, eq=False)
class Sample:
    """The voxels of a batch: coords int32 [N, 1+3], batch index first; feats [N, C].

    Rows are sorted by coordinates, as in published data sets. spatial_shape: the extent of the grid, or None if
    unbounded. batch: number of items. name: of the scans.
    """

    coords: Tensor
    feats: Tensor
    spatial_shape: tuple[int, ...] | None
    batch: int
    name: str

    def __len__(self) -> int:
        return len(self.coords)


class ConvPool(nn.Module):
    """The network of spconv's own benchmark (test/benchmark.py), of convolutions and pools only.

    For each width, two 3x3x3 submanifold convolutions without bias; between widths, max pooling over 2x2x2 and ReLU,
    since spconv's maximum includes 0. Weights are normal, scaled to keep the magnitude of features if 7 of 27
    neighbours exist: without norms, torch's default initialization would underflow in half precision.
    """

    WIDTHS = (64, 96, 128, 160, 192, 224, 256)

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for width in self.WIDTHS:
            if len(self.layers):
                self.layers += [MaxPool3d(2, 2, padding=0), ReLU()]
            self.layers += [Conv3d(in_channels, width, 3, bias=False), Conv3d(width, width, 3, bias=False)]
            in_channels = width
        for layer in self.layers:
            if isinstance(layer, Conv3d):
                nn.init.normal_(layer.weight, std=(7 * layer.in_channels) ** -0.5)
        self.steps = (Relation.of(3, 2, stride=2, padding=0),) * (len(self.WIDTHS) - 1)
        self.windows = ((Relation.of(3, 3),),) * len(self.WIDTHS)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x.prepare(self.steps, self.windows)
        for layer in self.layers:
            x = layer(x)
        return x


def samples(
    workload: Workload,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    *,
    count: int = 0,
    most: int = 0,
) -> list[Sample]:
    """The available samples of a workload, each of `batch` scans; samples share no scan.

    If there are fewer scans than `batch`, scans are repeated. count: maximum number of samples; 0: all. most: voxels
    kept around the middle of each scan, for tests; 0: all. Scans are read and voxelized once per process.

    Raises OptionError, naming PUMICE_DATA, if scans are missing, and if batch is below 1.
    """
    if batch < 1:
        raise OptionError(f"batch is at least 1, found {batch}")
    folder = _folder(workload)
    scans = _read(workload.scans, folder)
    whole = max(1, len(scans) // batch)
    made = []
    for first in range(0, batch * (min(whole, count) if count else whole), batch):
        items = [_voxels(workload, folder, (first + i) % len(scans)) for i in range(batch)]
        made.append(_joined([_middle(item, most) for item in items] if most else items))
    return [replace(one, coords=one.coords.to(device), feats=one.feats.to(device, dtype)) for one in made]


def varied(real: Sequence[Sample], count: int) -> list[Sample]:
    """`count` distinct samples: the real ones, then modified copies that no network has seen.

    A copy is rotated about the vertical axis by 1, 2, 3, ... quarter turns (by half a turn if the grid is not square),
    and 1 %, 2 %, 3 %, ... of its voxels are dropped at random, so that all copies differ in size.
    """
    chance = torch.Generator().manual_seed(0)
    copies = range(max(0, count - len(real)))
    made = (_turned(real[i % len(real)], i // len(real) + 1, 0.01 * (i + 1), chance) for i in copies)
    return [*real[:count], *made]


def _turned(sample: Sample, quarters: int, left_out: float, chance: torch.Generator) -> Sample:
    kept = torch.rand(len(sample), generator=chance).argsort()[max(1, round(len(sample) * left_out)) :]
    kept = kept.sort().values.to(sample.coords.device)
    coords, shape = sample.coords[kept].clone(), sample.spatial_shape
    # The vertical axis is the first of grids with an extent, else the last, and the least corner is 0.
    axes = [1, 2] if shape is None else [2, 3]
    extent = coords.amax(0) + 1 if shape is None else coords.new_tensor([1, *shape])
    square = shape is None or shape[-1] == shape[-2]
    for _ in range(quarters % 4 if square else 2):
        place, extent = coords[:, axes], extent.clone()
        extent[axes] = extent[axes[::-1]]
        coords[:, axes] = torch.stack([extent[axes[0]] - 1 - place[:, 1], place[:, 0]], dim=1)
    order = _by_coordinates(coords, 0)
    name = f"{sample.name}, turned {quarters} times, {left_out:.0%} left out"
    return replace(sample, coords=coords[order].contiguous(), feats=sample.feats[kept][order], name=name)


def fresh(sample: Sample) -> SparseTensor:
    """The sample as a tensor with a new geometry, without cached kernel maps."""
    return SparseTensor(sample.feats, sample.coords, spatial_shape=sample.spatial_shape, batch_size=sample.batch)


def with_dataflow(net: nn.Module, flow: str | None) -> nn.Module:
    """Set the dataflow of all convolutions of a network, and return it."""
    for layer in convolutions(net):
        layer.dataflow = flow
    return net


def exact_copy(net: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy in a wide dtype that computes with torch's matrix products only."""
    return with_dataflow(copy.deepcopy(net).to(dtype), EXACT)


def network(workload: Workload, sample: Sample) -> nn.Module:
    """The network in evaluation mode, with fixed random weights and the norm statistics of this sample.

    With initial norm statistics the features of a deep network would nearly vanish. The pass that collects statistics
    uses torch's products, to compile no kernels.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = workload.model().to(sample.coords.device).train()
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d)]
    usual = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        with_dataflow(net, EXACT)(fresh(sample))
    with_dataflow(net, None)
    for norm, momentum in zip(norms, usual, strict=True):
        norm.momentum = momentum
    return net.eval()


def stand_in(workload: Workload) -> Workload:
    """The workload over small generated streets, for tiny runs without real scans."""
    return replace(workload, scans=partial(_streets, sweeps=1, beams=32, azimuths=360), generated=True)


def narrow(workload: Workload) -> Workload:
    """The workload with a quarter of the channels if it is a MinkUNet, for tiny runs."""
    made = workload.model
    if not isinstance(made, partial) or made.func is not MinkUNet:
        return workload
    return replace(workload, model=partial(made, width=0.25))


def _folder(workload: Workload) -> Path:
    folder = settings().data
    if folder is None and not workload.generated:
        raise OptionError(f"{workload.name} reads real scans: set PUMICE_DATA to their folder")
    return folder or Path()


@lru_cache(maxsize=16)
def _read(scans: Scans, folder: Path) -> list[Scan]:
    return scans(folder)


@lru_cache(maxsize=64)
def _voxels(workload: Workload, folder: Path, place: int) -> Sample:
    """One scan as a sample in float32 on the CPU."""
    scan, grid = _read(workload.scans, folder)[place], workload.grid
    points = torch.from_numpy(scan.xyz)
    feats = torch.cat([points, torch.from_numpy(scan.feats)], dim=1)
    if feats.shape[1] < workload.features:
        raise OptionError(f"{workload.name} takes {workload.features} features, {scan.name} has {feats.shape[1]}")
    feats = feats[:, : workload.features].contiguous()
    if grid.low is None:
        x = voxelize(points, feats, grid.size, origin="min", rounding="round")
        coords, shape = x.coords, None
    else:
        x = voxelize(points, feats, grid.size, origin=grid.low, spatial_shape=grid.cells)
        coords, shape = x.coords[:, [0, 3, 2, 1]], _extent(grid)
    kept = _by_coordinates(coords, grid.most)
    return Sample(coords[kept].contiguous(), x.feats[kept], shape, 1, scan.name)


def _extent(grid: Grid) -> tuple[int, int, int] | None:
    return None if grid.cells is None else (grid.cells[2] + grid.layers, grid.cells[1], grid.cells[0])


def _by_coordinates(coords: Tensor, most: int) -> Tensor:
    """Row indices in order of coordinates; a random choice of `most` rows if there are more (0: all)."""
    rows = coords.long()
    extent = rows.amax(0) + 1 if len(rows) else rows.new_ones(4)
    order = (((rows[:, 0] * extent[1] + rows[:, 1]) * extent[2] + rows[:, 2]) * extent[3] + rows[:, 3]).argsort()
    if not most or len(order) <= most:
        return order
    kept = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))[:most]
    return order[kept.sort().values]


def _middle(sample: Sample, most: int) -> Sample:
    """The `most` voxels nearest to the median coordinates."""
    place = sample.coords[:, 1:].float()
    far = (place - place.median(dim=0).values).square().sum(1)
    kept = far.argsort(stable=True)[:most].sort().values
    return replace(sample, coords=sample.coords[kept], feats=sample.feats[kept])


def _joined(items: Sequence[Sample]) -> Sample:
    """Samples of one item each as a sample of a batch."""
    coords = torch.cat([one.coords for one in items])
    coords[:, 0] = torch.repeat_interleave(
        torch.arange(len(items), dtype=torch.int32), torch.tensor([len(one) for one in items])
    )
    name = "+".join(one.name for one in items)
    return Sample(coords, torch.cat([one.feats for one in items]), items[0].spatial_shape, len(items), name)


# What scans there are


def _files(folder: Path, patterns: Sequence[str]) -> list[Scan]:
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not paths:
        raise OptionError(f"PUMICE_DATA={folder}: expected scans {' or '.join(patterns)}, found none")
    return list(map(named_scan, paths))


def named_scan(path: Path) -> Scan:
    """Read a scan and name it by folder and file."""
    return replace(read_scan(path), name=f"{path.parent.name}/{path.name.partition('.')[0]}")


_kitti = partial(_files, patterns=("kitti_seq00/*.bin", "semantickitti_labelled/*.bin"))
_waymo = partial(_files, patterns=("waymo/*.bin",))
_ten_sweeps = partial(_files, patterns=("nuscenes_10sweeps/*.bin",))


def _nuscenes(folder: Path) -> list[Scan]:
    """Key sweeps: single-sweep files, and the newest sweep of each cloud of ten."""
    singles = _found(folder, "nuscenes_single/*.bin")
    clouds = _found(folder, "nuscenes_10sweeps/*.bin")
    found = singles + [_sweeps(cloud, 0, 1) for cloud in clouds]
    return found or _files(folder, ("nuscenes_single/*.bin", "nuscenes_10sweeps/*.bin"))


def _found(folder: Path, pattern: str) -> list[Scan]:
    return _files(folder, (pattern,)) if any(folder.glob(pattern)) else []


def _three_sweeps(folder: Path) -> list[Scan]:
    """From each cloud of ten sweeps three clouds of three successive sweeps, the newest first."""
    return [_sweeps(cloud, first, 3) for cloud in _ten_sweeps(folder) for first in (0, 3, 6)]


def _sweeps(cloud: Scan, first: int, count: int) -> Scan:
    """`count` sweeps of a cloud from the `first` newest (0) on; the last feature is the age of a point's sweep."""
    ages = np.unique(cloud.feats[:, -1])[first : first + count]
    return replace(cloud.select(np.isin(cloud.feats[:, -1], ages)), name=f"{cloud.name}[{first}:{first + count}]")


def _streets(folder: Path, sweeps: int, beams: int, azimuths: int) -> list[Scan]:
    """Two clouds of generated sweeps, with the features intensity, elongation (0) and age.

    The generator's sensor does not move: each sweep is a different street, merged with the others. Three sweeps of the
    size of Waymo's occupy 149,000 and 166,000 voxels of its grid, with 8.8 neighbours each; two real frames occupy
    136,000 with 6.6.
    """
    return [_overlaid(range(sweeps * i, sweeps * (i + 1)), beams, azimuths) for i in range(2)]


def _overlaid(seeds: range, beams: int, azimuths: int) -> Scan:
    parts = [street_scene(seed, beams, azimuths, max_range=105.0) for seed in seeds]
    feats = [_with_age(part.feats, 0.1 * age) for age, part in enumerate(parts)]
    name = f"streets {seeds.start} to {seeds.stop - 1}"
    return Scan(np.concatenate([part.xyz for part in parts]), np.concatenate(feats), name=name)


def _with_age(feats: np.ndarray, age: float) -> np.ndarray:
    rest = np.tile(np.array([[0.0, age]], np.float32), (len(feats), 1))
    return np.concatenate([feats, rest], axis=1)


# The seven

_KITTI = Grid((0.05, 0.05, 0.05))
_LIDARSEG = Grid((0.1, 0.1, 0.1), most=60_000)
_NUSCENES = Grid((0.1, 0.1, 0.2), (-51.2, -51.2, -5.0), (1024, 1024, 40), 60_000, 1)
_WAYMO = Grid((0.1, 0.1, 0.15), (-75.2, -75.2, -2.0), (1504, 1504, 40), 150_000, 1)
_SEGMENT = "spvnas MinkUNet, voxels round(p / size); "
_DETECT = "OpenPCDet VoxelResBackBone8x; "


def _minkunet(name: str, scans: Scans, grid: Grid, classes: int, width: float, source: str) -> Workload:
    model = partial(MinkUNet, 4, classes, width=width)
    return Workload(name, model, scans, grid, 4, source=_SEGMENT + source)


def _centerpoint(name: str, scans: Scans, grid: Grid, features: int, source: str, generated: bool = False) -> Workload:
    model = partial(CenterPointBackbone, features, "voxelres8x")
    return Workload(name, model, scans, grid, features, generated, _DETECT + source)


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        _minkunet("minkunet-kitti-1x", _kitti, _KITTI, 19, 1.0, "KITTI sequence 00, SemanticKITTI"),
        _minkunet("minkunet-kitti-0.5x", _kitti, _KITTI, 19, 0.5, "KITTI sequence 00, SemanticKITTI"),
        _minkunet("minkunet-nuscenes-1f", _nuscenes, _LIDARSEG, 16, 1.0, "nuScenes, key sweeps"),
        _minkunet("minkunet-nuscenes-3f", _three_sweeps, _LIDARSEG, 16, 1.0, "nuScenes, 3 of 10 sweeps"),
        _centerpoint("centerpoint-nuscenes-10f", _ten_sweeps, _NUSCENES, 5, "nuScenes, 10 sweeps"),
        _centerpoint("centerpoint-waymo-1f", _waymo, _WAYMO, 5, "Waymo, frames as they are"),
        _centerpoint(
            "centerpoint-waymo-3f",
            partial(_streets, sweeps=3, beams=64, azimuths=2650),
            _WAYMO,
            6,
            "generated streets, since no three Waymo frames with poses are at hand",
            generated=True,
        ),
    )
}
"""Workloads by name, in the order of the papers."""

SPCONV_NET = Workload(
    "spconv-net",
    ConvPool,
    partial(_files, patterns=("spconv_benchmark_pc/benchmark-pc.npz",)),
    Grid((0.1, 0.1, 0.1), (-80.0, -80.0, -2.0), (1600, 1600, 80), 150_000),
    3,
    source="spconv test/benchmark.py, its network and its cloud",
)
"""spconv's own benchmark: 125,562 voxels in a grid of 80 x 1600 x 1600."""
