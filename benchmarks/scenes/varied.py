"""Scans that vary as a robot's do: real sweeps, single or merged, rotated, thinned and cropped.

Sweeps are merged only if the data has their poses: nuScenes' clouds of ten sweeps, which share a frame, and KITTI's
sequence with its T_world_velo.npy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.scenes.workloads import named_scan
from pumice.data import Scan, street_scene
from pumice.env import settings
from pumice.ops import SparseTensor, voxelize

VOXEL, RANGE, HEIGHT = 0.1, 100.0, 12.0
"""Metres: voxel size, and the maximum distance of points from the sensor along the ground and vertically."""
_MERGED = (1, 2, 3, 5, 10)
"""Numbers of sweeps that are merged."""
_THINNED = 0.3
"""Maximum share of points dropped at random."""
_APART = 1_000_000
"""Number of the first scan that is only used to choose an example."""
_PLACES = torch.tensor([1 << 26, 1 << 13, 1])
_CUT = 4
"""Maximum voxels of a cloud, as a multiple of those wanted."""


@dataclass(frozen=True, eq=False)
class Cloud:
    """Points [P, 3] around a sensor with features [P, 4] (x, y, z, intensity). voxels: the number they occupy."""

    name: str
    points: Tensor
    voxels: int


@dataclass(frozen=True, eq=False)
class Varied:
    """A source of numbered, reproducible scans. low, high: limits of their voxels, which are log-uniform."""

    clouds: Sequence[Cloud]
    low: int
    high: int

    def scan(self, number: int) -> tuple[Tensor, Tensor, str]:
        """feats [N, 4], coords int32 [N, 4] with batch index 0, and the name of the cloud."""
        chance = torch.Generator().manual_seed(number)
        share, turn, thin, which = torch.rand(4, generator=chance).tolist()
        wanted = round(self.low * (self.high / self.low) ** share)
        cloud = self._large_enough(wanted, which)
        points = _turned(cloud.points, 2 * math.pi * turn)
        on_device = torch.Generator(points.device).manual_seed(number)
        kept = torch.rand(len(points), generator=on_device, device=points.device) >= _THINNED * thin
        x = voxelize(points[kept][:, :3], points[kept], VOXEL)
        feats, coords = _nearest(x, wanted)
        return feats, coords, cloud.name

    def _large_enough(self, wanted: int, which: float) -> Cloud:
        """A cloud with enough voxels even if thinned, and at most _CUT times those wanted; without one the smallest
        with enough, or the largest cloud. which: in [0, 1), selects among several."""
        enough = sorted((c for c in self.clouds if c.voxels * (1 - _THINNED) >= wanted), key=lambda cloud: cloud.voxels)
        near = [cloud for cloud in enough if cloud.voxels <= _CUT * wanted]
        found = near or enough[:1] or [max(self.clouds, key=lambda cloud: cloud.voxels)]
        return found[int(which * len(found)) % len(found)]


def hungry(scans: Varied, count: int) -> tuple[Tensor, Tensor, str]:
    """Of `count` scans that do not occur later, the one with the most voxels at coarser strides relative to its own:
    capacities chosen for it suffice for dense and sparse scans."""
    found = (scans.scan(_APART + number) for number in range(count))
    return max(found, key=lambda scan: _spread(scan[1]))


def _spread(coords: Tensor) -> float:
    """Voxels at strides 2 to 16 over those at stride 1."""
    cells = coords[:, 1:].long() + 4096
    counts = (len(((cells >> level) << level).mul(_PLACES.to(cells.device)).sum(1).unique()) for level in range(1, 5))
    return sum(counts) / max(1, len(coords))


def _turned(points: Tensor, angle: float) -> Tensor:
    """Points [P, 4] rotated about the vertical axis."""
    cos, sin = math.cos(angle), math.sin(angle)
    turn = points.new_tensor([[cos, sin, 0, 0], [-sin, cos, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    return points @ turn


def _nearest(x: SparseTensor, most: int) -> tuple[Tensor, Tensor]:
    """Features and coordinates of the `most` voxels nearest to the sensor along the ground, in order."""
    if len(x) <= most:
        return x.feats, x.coords
    far = x.coords[:, 1:3].float().square().sum(1)
    kept = far.argsort()[:most].sort().values
    return x.feats[kept], x.coords[kept]


def source(device: torch.device, low: int, high: int, generated: bool = False) -> Varied:
    """The scans in PUMICE_DATA; generated streets if there are none or `generated` is set."""
    scans = [] if generated else list(_real(settings().data))
    scans = scans or [replace(street_scene(seed, beams=32, azimuths=360), name=f"street {seed}") for seed in range(3)]
    return Varied([_cloud(scan, device) for scan in scans], low, high)


def _cloud(scan: Scan, device: torch.device) -> Cloud:
    near = (np.hypot(scan.xyz[:, 0], scan.xyz[:, 1]) < RANGE) & (np.abs(scan.xyz[:, 2]) < HEIGHT)
    own = scan.select(near)
    points = torch.from_numpy(np.concatenate([own.xyz, own.feats[:, :1]], axis=1)).to(device)
    return Cloud(scan.name, points, len(voxelize(points[:, :3].contiguous(), size=VOXEL)))


def _real(folder: Path | None) -> Iterator[Scan]:
    if folder is None:
        return
    for path in (*sorted(folder.glob("nuscenes_single/*.bin")), *sorted(folder.glob("waymo/*.bin"))):
        yield named_scan(path)
    for path in sorted(folder.glob("nuscenes_10sweeps/*.bin")):
        whole = named_scan(path)
        ages = np.unique(whole.feats[:, -1])
        for count in (n for n in _MERGED if n <= len(ages)):
            chosen = np.isin(whole.feats[:, -1], ages[:count])
            yield replace(whole.select(chosen), name=f"{whole.name}, {count} sweeps")
    yield from _kitti(folder / "kitti_seq00")


def _kitti(folder: Path) -> Iterator[Scan]:
    sweeps = [named_scan(path) for path in sorted(folder.glob("*.bin"))]
    yield from sweeps
    poses = folder / "T_world_velo.npy"
    if not poses.is_file():
        return
    frames = np.load(poses)
    for count in (n for n in _MERGED if 1 < n <= min(len(sweeps), len(frames))):
        yield _merged(sweeps[:count], frames)


def _merged(sweeps: Sequence[Scan], frames: np.ndarray) -> Scan:
    """Merge sweeps in the frame of the last one. frames: [n, 4, 4], transforms from sweep to world."""
    home = np.linalg.inv(frames[len(sweeps) - 1])
    moved = []
    for sweep, frame in zip(sweeps, frames, strict=False):
        move = home @ frame
        moved.append(sweep.xyz @ move[:3, :3].T + move[:3, 3])
    feats = np.concatenate([sweep.feats for sweep in sweeps])
    return Scan(np.concatenate(moved).astype(np.float32), feats, name=f"{sweeps[0].name}, {len(sweeps)} sweeps")
