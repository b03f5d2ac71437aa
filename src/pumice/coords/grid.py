"""The grid that coordinates lie on: size and extent of its voxels, and their place in space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.errors import OptionError
from pumice.runtime.launch import vector

Stride = tuple["int | Fraction", ...]
ROUNDINGS = ("floor", "round")


@dataclass(frozen=True)
class VoxelFrame:
    """Where voxels lie in space: the finest voxel c covers [c, c + 1) * size + origin (metres, say).

    With `rounding="round"` it covers [c - 1/2, c + 1/2) * size + origin instead.
    """

    size: tuple[float, ...]
    origin: tuple[float, ...]
    rounding: str = "floor"

    def __post_init__(self) -> None:
        if not all(0 < s < math.inf for s in self.size):
            raise OptionError(f"size takes positive, finite lengths, found {self.size}")
        if not all(map(math.isfinite, self.origin)):
            raise OptionError(f"origin takes finite numbers, found {self.origin}")
        if self.rounding not in ROUNDINGS:
            raise OptionError(f"rounding={self.rounding!r} is unknown; there are {', '.join(ROUNDINGS)}")

    def positions(self, points: Tensor) -> Tensor:
        """Points [P, D] in units of the finest voxels, so that voxel c covers [c, c + 1); float64."""
        size, origin = (vector(tuple(v), torch.float64, points.device) for v in (self.size, self.origin))
        units = (points.double() - origin) / size
        return units + 0.5 if self.rounding == "round" else units


@dataclass(frozen=True)
class GridSpec:
    """What is known of a set of coordinates beside the coordinates.

    stride: size of a voxel in finest voxels, per axis (a Fraction where a level is finer than the finest).
    spatial_shape: extent per axis if the grid is bounded. batch_size: number of batch items, empty ones counted.
    frame: where the finest voxels lie, if they were made from points. bounds: a box around all coordinates.
    """

    stride: Stride
    spatial_shape: tuple[int, ...] | None
    batch_size: int
    bounds: Bounds
    frame: VoxelFrame | None = None

    def scaled(self, factor: Sequence[Fraction | int], **changes: Any) -> GridSpec:
        """The site of a level whose voxels are `factor` times as large."""
        return replace(self, stride=_scaled(self.stride, tuple(factor)), **changes)


@lru_cache(maxsize=256)
def _scaled(stride: Stride, factor: Stride) -> Stride:
    return tuple(tidy(Fraction(s) * f) for s, f in zip(stride, factor, strict=True))


def tidy(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value
