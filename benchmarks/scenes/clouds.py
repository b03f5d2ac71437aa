"""Scenes on which kernel maps are timed, and peers' times recorded for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.study import Setup
from pumice.coords.box import Bounds
from pumice.coords.buffer import CoordBuffer
from pumice.coords.grid import GridSpec
from pumice.env import settings


@dataclass(frozen=True)
class Known:
    """Recorded data of a scene: peers' milliseconds on an H200, and goals.

    goals: milliseconds by study. lidar: a compacted plan should take less than half the bytes of int32 [N, 27].
    """

    peers: Mapping[str, float] = field(default_factory=dict)
    goals: Mapping[str, float] = field(default_factory=dict)
    lidar: bool = False


# Baselines recorded on 2026-11-20 for the 3x3x3 submanifold map, from coordinates on the device in the file's order
# (torch 2.11, spconv 2.3.8 including its sort of masks, FlexGEMM 1.1 without one; events around the call, L2 flushed,
# host time included). FlexGEMM fails on waymo_1f_5cm.
KNOWN: Mapping[str, Known] = {
    "nuscenes_1f_10cm": Known(
        {"FlexGEMM": 0.0800, "spconv": 0.2262}, {"map": 0.035, "plan": 0.09, "network": 0.6}, True
    ),
    "waymo_1f_10x10x15cm": Known({"FlexGEMM": 0.1213, "spconv": 0.1886}, {"map": 0.060}, True),
    "waymo_1f_5cm": Known({"spconv": 0.4229}, {"map": 0.080}, True),
    "shell_256": Known({"FlexGEMM": 0.1606, "spconv": 0.3181}, {"map": 0.080}),
    "shell_512": Known({"FlexGEMM": 0.4432, "spconv": 0.5380}, {"map": 0.22, "network": 1.5}),
}


@dataclass(frozen=True, eq=False)
class Voxels:
    """Coordinates int32 [N, 4] on the device, and a box around them, known on the host."""

    coords: Tensor
    bounds: Bounds

    @staticmethod
    def of(coords: Tensor) -> Voxels:
        return Voxels(coords, Bounds.of(coords))

    @property
    def site(self) -> GridSpec:
        return GridSpec((1,) * (self.coords.shape[1] - 1), None, self.bounds.batch, self.bounds)

    def cloud(self) -> CoordBuffer:
        return CoordBuffer.of(self.coords, self.bounds)

    def shuffled(self) -> Voxels:
        """The same rows in a fixed random order."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(11))
        return Voxels(self.coords[order.to(self.coords.device)].contiguous(), self.bounds)

    def __len__(self) -> int:
        return len(self.coords)


Scene = tuple[str, Callable[[], Voxels]]
"""A name, and a function that makes the voxels in the order of their file."""


def scenes(setup: Setup) -> Iterator[Scene]:
    """The scenes with goals. Shells are generated; files missing in PUMICE_DATA are reported."""
    if setup.quick:
        yield "shell_16", lambda: _voxels(setup, shell(16))
        yield "surface_300", partial(surface, 300, setup.device)
        return
    yield from named(setup, KNOWN)


def named(setup: Setup, names: Iterable[str]) -> Iterator[Scene]:
    """Scenes by name. Shells are generated; files missing in PUMICE_DATA are reported."""
    for name in names:
        path = _folder("scenes") / f"{name}.npz"
        if path.is_file():
            yield name, lambda path=path: _voxels(setup, np.load(path)["coords"])
        elif name.startswith("shell_"):
            yield name, lambda name=name: _voxels(setup, shell(int(name.removeprefix("shell_"))))
        else:
            setup.say(f"{name} is left out: PUMICE_DATA has no such scene")


def layer_scenes(setup: Setup) -> Iterator[Scene]:
    """Scenes on which layers are timed: those with goals, and two smaller ones."""
    if not setup.quick:
        yield from named(setup, ("scannet_2cm", "shell_128"))
    yield from scenes(setup)


def published(setup: Setup) -> Iterator[Scene]:
    """UCF's voxel sets for its benchmark of neighbour search."""
    paths = [] if setup.quick else sorted(_folder("ucf_tns").glob("*.tns"))
    if not paths and not setup.quick:
        setup.say("UCF's voxel sets are left out: PUMICE_DATA has none")
    for path in paths:
        yield f"ucf_{path.stem}", lambda path=path: _voxels(setup, np.loadtxt(path, np.int32, usecols=(0, 1, 2)))


def _folder(name: str) -> Path:
    return (settings().data or Path("no-data")) / name


def batched(coords: np.ndarray) -> Tensor:
    """Coordinates int32 [N, 3] as [N, 4] with batch index 0."""
    return torch.from_numpy(np.concatenate([np.zeros((len(coords), 1), np.int32), coords.astype(np.int32)], axis=1))


def _voxels(setup: Setup, coords: np.ndarray) -> Voxels:
    return Voxels.of(batched(coords).to(setup.device))


def shell(size: int) -> np.ndarray:
    """int32 [N, 3], sorted: cells of a cube of side `size` near a sphere of radius 0.45 size."""
    axis = np.square(np.arange(size) - (size - 1) / 2)
    found = []
    for x in range(size):
        distance = np.sqrt(axis[x] + axis[:, None] + axis[None, :])
        y, z = np.nonzero(np.abs(distance - 0.45 * size) <= 0.75)
        found.append(np.stack([np.full_like(y, x), y, z], axis=1))
    return np.concatenate(found).astype(np.int32)


def surface(count: int, device: torch.device) -> Voxels:
    """`count` voxels of a rough landscape, generated on the device, one in each column of a square."""
    chance = torch.Generator(device).manual_seed(12)
    side = int(np.ceil(np.sqrt(count)))
    place = torch.arange(count, device=device)
    x, y = place // side, place % side
    height = 40 * (torch.sin(x / 50) + torch.cos(y / 70) + 2) + torch.rand(count, generator=chance, device=device)
    return Voxels.of(torch.stack([torch.zeros_like(x), x, y, height.long()], dim=1).int())
