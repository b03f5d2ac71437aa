"""The seven networks on scans with which TorchSparse and TorchSparse++ measure themselves, and their voxels.

Tang et al., "TorchSparse: Efficient Point Cloud Inference Engine", MLSys 2022; Tang et al., "TorchSparse++: Efficient
Training and Inference Framework for Sparse Convolution on GPUs", MICRO 2023. Voxel sizes, ranges and caps are those of
the published configurations: spvnas for MinkUNet, OpenPCDet for the backbone of CenterPoint, and the caps of
TorchSparse's data sets.
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
"""The dataflow of reference runs: a gather, a product of torch and an addition for each kernel offset."""


@dataclass(frozen=True)
class Grid:
    """How points become voxels.

    size: metres, per axis (x, y, z). low, cells: the least corner in metres and the extent in voxels; what lies outside
    is left out, the voxel is floor((p - low) / size), and coordinates are (z, y, x), as OpenPCDet has them. Without low
    nothing is left out, the voxel is round(p / size) less the least one, and coordinates are (x, y, z), as spvnas has
    them. most: a random choice of so many voxels where there are more. layers: empty ones more on top.
    """

    size: tuple[float, float, float]
    low: tuple[float, float, float] | None = None
    cells: tuple[int, int, int] | None = None
    most: int = 0
    layers: int = 0


@dataclass(frozen=True)
class Workload:
    """A network and its scans.

    model: makes the network, with the weights that torch's generator gives. scans: the scans in a folder of real ones,
    every one a sample of its own; OptionError where the folder has none. features: numbers per voxel, the means of
    its points: x, y, z, and then what the scans have. generated: the scans are made from a seed, the folder is not
    read. source: where network and voxels are defined, and where scans come from.
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
    """The voxels of a batch: coords int32 [N, 1+3] with the batch item first, feats [N, C].

    Rows are sorted by coordinates, as published data sets leave them. spatial_shape: the extent of the grid, None where
    it is not bounded. batch: the number of items. name: of the scans.
    """

    coords: Tensor
    feats: Tensor
    spatial_shape: tuple[int, ...] | None
    batch: int
    name: str

    def __len__(self) -> int:
        return len(self.coords)


class ConvPool(nn.Module):
    """The network of spconv's own benchmark (test/benchmark.py): nothing but convolutions and pools.

    For each width, two convolutions of 3x3x3 without bias that keep the coordinates; between widths a maximum over
    2x2x2 voxels and 0, which spconv's pool has among the values. Weights are normal, with the scale that keeps the size
    of features where 7 of 27 neighbours are there: those that torch's rule gives would, without norms, leave nothing
    that half precision could hold.
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
    """The samples of a workload that are at hand, each of `batch` scans, no scan in two of them.

    Where there are fewer scans than a batch takes, scans come several times. count: no more samples than this; 0: all.
    most: of each scan only so many voxels around its middle, for tests; 0: all. Scans are read and voxelised once in
    a process.

    Raises OptionError where the scans are not at hand (it names PUMICE_DATA), or batch is below 1.
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
    """So many different samples: the real ones, and then copies of them that no network has met.

    A copy is turned about the vertical axis by a quarter, two, three, ... (by a half where the grid is longer than
    wide), and of its voxels 1 %, 2 %, 3 %, ... are left out at random, so that no number of voxels comes again.
    """
    chance = torch.Generator().manual_seed(0)
    copies = range(max(0, count - len(real)))
    made = (_turned(real[i % len(real)], i // len(real) + 1, 0.01 * (i + 1), chance) for i in copies)
    return [*real[:count], *made]


def _turned(sample: Sample, quarters: int, left_out: float, chance: torch.Generator) -> Sample:
    kept = torch.rand(len(sample), generator=chance).argsort()[max(1, round(len(sample) * left_out)) :]
    kept = kept.sort().values.to(sample.coords.device)
    coords, shape = sample.coords[kept].clone(), sample.spatial_shape
    # Of grids with an extent the vertical axis is the first, of others the last, and the least corner is 0.
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
    """The sample as a tensor whose geometry is new: every kernel map has yet to be found."""
    return SparseTensor(sample.feats, sample.coords, spatial_shape=sample.spatial_shape, batch_size=sample.batch)


def with_dataflow(net: nn.Module, flow: str | None) -> nn.Module:
    """The network, all of its convolutions set to one dataflow."""
    for layer in convolutions(net):
        layer.dataflow = flow
    return net


def exact_copy(net: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy in a wide dtype that runs by library products alone."""
    return with_dataflow(copy.deepcopy(net).to(dtype), EXACT)


def network(workload: Workload, sample: Sample) -> nn.Module:
    """The network with the same weights each time, its norms' statistics those of this sample, in evaluation.

    With the statistics that norms begin with, the features of a deep network would all but vanish. They are found by
    library products, so that no kernel is compiled for them.
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
    """The workload on small generated streets, for where no real scan is at hand and a tiny run is wanted."""
    return replace(workload, scans=partial(_streets, sweeps=1, beams=32, azimuths=360), generated=True)


def narrow(workload: Workload) -> Workload:
    """The workload with a quarter of MinkUNet's channels, for tiny runs; others as they are."""
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
    """One scan as a sample, float32, on the CPU."""
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
    """The order of rows by coordinates, of a random choice where there are more than `most`."""
    rows = coords.long()
    extent = rows.amax(0) + 1 if len(rows) else rows.new_ones(4)
    order = (((rows[:, 0] * extent[1] + rows[:, 1]) * extent[2] + rows[:, 2]) * extent[3] + rows[:, 3]).argsort()
    if not most or len(order) <= most:
        return order
    kept = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))[:most]
    return order[kept.sort().values]


def _middle(sample: Sample, most: int) -> Sample:
    """The voxels next to the middle one."""
    place = sample.coords[:, 1:].float()
    far = (place - place.median(dim=0).values).square().sum(1)
    kept = far.argsort(stable=True)[:most].sort().values
    return replace(sample, coords=sample.coords[kept], feats=sample.feats[kept])


def _joined(items: Sequence[Sample]) -> Sample:
    """Samples of one item as one of several."""
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
    """A scan, named by its folder and file."""
    return replace(read_scan(path), name=f"{path.parent.name}/{path.name.partition('.')[0]}")


_kitti = partial(_files, patterns=("kitti_seq00/*.bin", "semantickitti_labelled/*.bin"))
_waymo = partial(_files, patterns=("waymo/*.bin",))
_ten_sweeps = partial(_files, patterns=("nuscenes_10sweeps/*.bin",))


def _nuscenes(folder: Path) -> list[Scan]:
    """Key sweeps: whole files, and the newest sweep of each cloud of several."""
    singles = _found(folder, "nuscenes_single/*.bin")
    clouds = _found(folder, "nuscenes_10sweeps/*.bin")
    found = singles + [_sweeps(cloud, 0, 1) for cloud in clouds]
    return found or _files(folder, ("nuscenes_single/*.bin", "nuscenes_10sweeps/*.bin"))


def _found(folder: Path, pattern: str) -> list[Scan]:
    return _files(folder, (pattern,)) if any(folder.glob(pattern)) else []


def _three_sweeps(folder: Path) -> list[Scan]:
    """Three sweeps in a row, of each cloud of ten: the newest ones, those before, and those before these."""
    return [_sweeps(cloud, first, 3) for cloud in _ten_sweeps(folder) for first in (0, 3, 6)]


def _sweeps(cloud: Scan, first: int, count: int) -> Scan:
    """So many of the sweeps of a cloud whose last feature is the age of a point's sweep, from the first-newest on."""
    ages = np.unique(cloud.feats[:, -1])[first : first + count]
    return replace(cloud.select(np.isin(cloud.feats[:, -1], ages)), name=f"{cloud.name}[{first}:{first + count}]")


def _streets(folder: Path, sweeps: int, beams: int, azimuths: int) -> list[Scan]:
    """Two clouds of so many generated sweeps, with the features intensity, elongation (0) and age.

    The generator does not move its sensor: every sweep has a street of its own, laid over the others. Three of the size
    of Waymo's fill 149,000 and 166,000 voxels of its grid with 8.8 neighbours each; two real frames fill 136,000
    with 6.6.
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
"""By name, in the order of the papers."""

SPCONV_NET = Workload(
    "spconv-net",
    ConvPool,
    partial(_files, patterns=("spconv_benchmark_pc/benchmark-pc.npz",)),
    Grid((0.1, 0.1, 0.1), (-80.0, -80.0, -2.0), (1600, 1600, 80), 150_000),
    3,
    source="spconv test/benchmark.py, its network and its cloud",
)
"""What spconv measures itself with: 125,562 voxels in a grid of 80 x 1600 x 1600."""
