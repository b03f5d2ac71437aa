"""Metadata of voxel grids: stride, extent and placement in space."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from pumice.coords.box import UNKNOWN, Bounds
from pumice.errors import OptionError
from pumice.runtime.launch import vector

Stride = tuple["int | Fraction", ...]
ROUNDINGS = ("floor", "round")


@dataclass(frozen=True)
class VoxelFrame:
    """Placement of voxels in space: the finest voxel c covers [c, c + 1) * size + origin, in units of the points.

    With `rounding="round"` the voxel covers [c - 1/2, c + 1/2) * size + origin instead."""

    size: tuple[float, ...]
    origin: tuple[float, ...]
    rounding: str = "floor"

    def __post_init__(self) -> None:
        if not all(0 < s < math.inf for s in self.size):
            raise OptionError(f"size takes positive, finite lengths, found {self.size}")
        if not all(map(math.isfinite, self.origin)):
            raise OptionError(f"origin takes finite numbers, found {self.origin}")
        OptionError.check("rounding", self.rounding, ROUNDINGS)

    def positions(self, points: Tensor) -> Tensor:
        """Points [P, D] in units of the finest voxels, so that voxel c covers [c, c + 1); float64."""
        size, origin = (vector(tuple(v), torch.float64, points.device) for v in (self.size, self.origin))
        units = (points.double() - origin) / size
        return units + 0.5 if self.rounding == "round" else units


@dataclass(frozen=True)
class GridSpec:
    """Metadata of a set of coordinates.

    stride: voxel size per axis, in units of the finest voxels (a Fraction for finer levels). spatial_shape: extent per
    axis if bounded. batch_size: number of batch items, including empty ones; -1 if unknown. bounds: bounding box of the
    coordinates (in a captured network, of all that it accepts). frame: placement of the finest voxels, if made from
    points."""

    stride: Stride
    spatial_shape: tuple[int, ...] | None
    batch_size: int
    bounds: Bounds
    frame: VoxelFrame | None = None

    def unread(self) -> GridSpec:
        """The metadata for other coordinates on this grid: without a spatial_shape, bounds become UNKNOWN."""
        return self if self.spatial_shape is not None else replace(self, bounds=UNKNOWN)

    def scaled(self, factor: Stride, shape: tuple[int, ...] | None, bounds: Bounds) -> GridSpec:
        """The metadata of a level whose voxels are `factor` times as large. shape: its spatial_shape."""
        return GridSpec(_scaled(self.stride, factor), shape, self.batch_size, bounds, self.frame)


@lru_cache(maxsize=256)
def _scaled(stride: Stride, factor: Stride) -> Stride:
    return tuple(tidy(Fraction(s) * f) for s, f in zip(stride, factor, strict=True))


def tidy(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value
