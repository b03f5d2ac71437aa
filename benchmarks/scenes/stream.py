"""Streams of scenes without repetition: scans rotated about the vertical axis and randomly thinned, all on one grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.scenes.clouds import batched
from benchmarks.scenes.workloads import Sample
from pumice.data import street_scene
from pumice.env import settings
from pumice.errors import FileError, OptionError

_VOXEL, _STREETS, _ROUNDED = 0.1, 3, 32
"""Voxel size in metres and number of generated scans; divisor of the grid's sides, to keep all levels even."""


@dataclass(frozen=True)
class Source:
    """The source of scenes. folder: of NAME.npz with `coords` int32 [N, 3]; "": the scans of PUMICE_DATA/scenes
    (without its shells), or generated streets if there are none. most: maximum voxels, by cropping; 0: no limit. seed:
    of angles, thinning and crops."""

    folder: str = ""
    most: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.most < 0:
            raise OptionError(f"the most voxels of a scene are 0 or more, found {self.most}")

    def files(self) -> list[Path]:
        """The files of scenes; empty if streets are to be generated. Raises FileError for a folder without scenes."""
        data = settings().data
        if self.folder:
            found = sorted(Path(self.folder).glob("*.npz"))
            if not found:
                raise FileError(f"{self.folder}: expected a folder of scenes (NAME.npz with coords [N, 3]), found none")
            return found
        return [p for p in sorted((data / "scenes").glob("*.npz")) if not p.name.startswith("shell")] if data else []


def samples(source: Source, count: int, device: torch.device, dtype: torch.dtype) -> list[Sample]:
    """`count` scenes in order, with 4 normal random features per voxel and one spatial shape."""
    found = list(stream(_clouds(source), count, source))
    most = np.max([coords.max(0) for coords in found], axis=0)
    extent = tuple(int(_ROUNDED * (side // _ROUNDED + 1)) for side in most)
    chance = torch.Generator().manual_seed(source.seed)
    made = []
    for number, coords in enumerate(found):
        feats = torch.randn(len(coords), 4, generator=chance).to(device, dtype)
        made.append(Sample(batched(coords).to(device), feats, extent, 1, f"scene {number}"))
    return made


def stream(clouds: Sequence[np.ndarray], count: int, source: Source) -> Iterator[np.ndarray]:
    """int32 [N, 3], from 0: the clouds in turn, each thinned to a share of 0.15 to 1, rotated and cropped."""
    chance = np.random.default_rng(source.seed)
    for number in range(count):
        cloud = clouds[number % len(clouds)]
        points = cloud[chance.random(len(cloud)) < chance.uniform(0.15, 1)].astype(np.float64)
        angle = chance.uniform(0, 2 * np.pi)
        cos, sin = np.cos(angle), np.sin(angle)
        points[:, :2] = points[:, :2] @ np.array([[cos, -sin], [sin, cos]])
        coords = np.unique(np.floor(points).astype(np.int32), axis=0)
        if source.most and len(coords) > source.most:
            coords = _cropped(coords, int(source.most * chance.uniform(0.4, 1)), chance)
        yield coords - coords.min(0)


def _cropped(coords: np.ndarray, count: int, chance: np.random.Generator) -> np.ndarray:
    """The `count` voxels that are horizontally nearest to a random voxel, in order."""
    away = np.square(coords[:, :2] - coords[chance.integers(len(coords)), :2]).sum(1)
    return coords[np.sort(np.argsort(away, kind="stable")[: max(1, count)])]


def _clouds(source: Source) -> list[np.ndarray]:
    files = source.files()
    if files:
        return [np.load(path)["coords"].astype(np.int32) for path in files]
    scans = [street_scene(seed, beams=32, azimuths=720) for seed in range(_STREETS)]
    return [np.unique(np.floor(scan.xyz / _VOXEL).astype(np.int32), axis=0) for scan in scans]
