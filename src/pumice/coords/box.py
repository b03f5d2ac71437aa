"""Integer coordinates: validation, bounding boxes, and linear search keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pumice.errors import CoordinateError, DtypeError, ShapeError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Bounds:
    """A bounding box, not necessarily tight: `low <= c <= high` per axis, batch indices below `batch`. On the host."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    batch: int

    @staticmethod
    def of(coords: Tensor) -> Bounds:
        """The tight box of `coords` int32 [N, 1+D]; one host synchronisation. Raises CoordinateError (batch < 0)."""
        dim = coords.shape[1] - 1
        if coords.shape[0] == 0:
            return Bounds((0,) * dim, (0,) * dim, 0)
        low, high = torch.stack(torch.aminmax(coords, dim=0)).tolist()
        if low[0] < 0:
            hint = "; rows of a captured network that hold no voxel have -1" if low[0] == -1 else ""
            raise CoordinateError(f"batch indices start at 0, found {low[0]}; coordinates are (batch, axes...){hint}")
        return Bounds(tuple(low[1:]), tuple(high[1:]), high[0] + 1)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(h - a + 1 for a, h in zip(self.low, self.high, strict=True))

    @cached_property
    def cells(self) -> int:
        """Number of cells, over all batch items."""
        return max(self.batch, 1) * math.prod(self.extents)

    def grown(self, margin: Sequence[int]) -> Bounds:
        low = tuple(a - m for a, m in zip(self.low, margin, strict=True))
        high = tuple(a + m for a, m in zip(self.high, margin, strict=True))
        return Bounds(low, high, self.batch)

    def holds(self, other: Bounds) -> bool:
        """True if the other box is within this one along each axis; batches are not compared."""
        above = all(a <= b for a, b in zip(self.low, other.low, strict=True))
        return above and all(a >= b for a, b in zip(self.high, other.high, strict=True))

    def contains(self, coords: Tensor, scale: Sequence[int] | None = None) -> Tensor:
        """bool [N]: True for `coords` int [N, 1+D] in the box, each axis first multiplied by `scale`."""
        inside = (coords[:, 0] >= 0) & (coords[:, 0] < self.batch)
        for axis, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            value = coords[:, axis + 1].long() * (scale[axis] if scale else 1)
            inside &= (value >= low) & (value <= high)
        return inside

    def checked(self) -> Bounds:
        """The box itself. Raises CoordinateError if it exceeds int32."""
        if min(self.low) < -(2**31) or max(self.high) > INT32_MAX:
            raise CoordinateError(
                f"coordinates would range from {self.low} to {self.high}; int32 holds {-(2**31)} to {INT32_MAX}"
            )
        return self


UNKNOWN = Bounds((), (), -1)  # Bounds of coordinates made under torch.compile: not read yet


def check_integers(x: object, name: str) -> None:
    """Raise DtypeError unless x is an int32 or int64 tensor."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"{name} is an int32 or int64 tensor, found {dtype_of(x)}")


def dtype_of(x: object) -> object:
    """The dtype of a tensor, for anything else the name of its type: what a message tells."""
    return x.dtype if isinstance(x, Tensor) else type(x).__name__


def check_form(coords: Tensor, dim: int | None = None) -> None:
    """Raise unless coordinates are int32 [N, 1+D] with D = dim (None: any) from 1 to 4."""
    if not isinstance(coords, Tensor) or coords.dtype != torch.int32:
        found = dtype_of(coords)
        hint = "coords.int() converts them" if found == torch.int64 else "voxelize() turns points into them"
        raise DtypeError(f"coordinates must be a tensor of torch.int32, found {found}; {hint}")
    if coords.ndim != 2 or not 2 <= coords.shape[1] <= 5:
        raise ShapeError(
            f"coordinates are [N, 1+D] = (batch, axes...) with D from 1 to 4, found shape {list(coords.shape)}"
        )
    columns = coords.shape[1]
    if dim is not None and columns - 1 != dim:
        hint = "prepend a batch column, torch.nn.functional.pad(coords, (1, 0)), or " if columns == dim else ""
        raise ShapeError(
            f"coordinates are [N, {dim + 1}] = (batch, axes...) with dim={dim}, found shape {list(coords.shape)}; "
            f"{hint}pass dim={columns - 1}"
        )
    if not torch.compiler.is_compiling() and coords.shape[0] > INT32_MAX:
        raise CoordinateError(f"{coords.shape[0]} voxels exceed the limit of {INT32_MAX}")


@dataclass(frozen=True)
class KeySpace:
    """Row-major numbering of a box: key = ((b * E0 + x - low0) * E1 + y - low1) * ... , in int64.

    Equal coordinate differences give equal key differences. Raises CoordinateError at 2**63 cells or more."""

    bounds: Bounds

    def __post_init__(self) -> None:
        cells = self.bounds.cells
        if cells >= 2**63:
            raise CoordinateError(
                f"the box {self.bounds.low} to {self.bounds.high} with {self.bounds.batch} batch items has "
                f"{cells} cells; keys allow at most {2**63 - 1}. Shift or crop outliers, or split the batch"
            )

    @property
    def extents(self) -> tuple[int, ...]:
        return self.bounds.extents

    @property
    def radix(self) -> tuple[int, ...]:
        """Key difference of a unit step along each axis."""
        return tuple(math.prod(self.extents[axis + 1 :]) for axis in range(len(self.extents)))

    def keys(self, coords: Tensor, scale: Sequence[int] | None = None) -> Tensor:
        """int64 [N] keys of `coords` int [N, 1+D], each axis first multiplied by `scale`."""
        scale = scale or (1,) * len(self.radix)
        key = coords[:, 0].long() * math.prod(self.extents)
        for axis, (radix, factor) in enumerate(zip(self.radix, scale, strict=True)):
            key += coords[:, axis + 1].long() * (factor * radix)
        # Far from 0 terms may exceed int64 and wrap around; their sum does not.
        least = sum(a * r for a, r in zip(self.bounds.low, self.radix, strict=True))
        return key - ((least + 2**63) % 2**64 - 2**63)

    def step(self, offset: Sequence[int]) -> int:
        return sum(o * r for o, r in zip(offset, self.radix, strict=True))


def places_in(
    coords: Tensor, shape: Sequence[int], origin: Sequence[int], items: int, box: Bounds | None = None
) -> Tensor:
    """int64 [N]: row-major index of `coords` int32 [N, 1+D] in a dense [items, *shape] grid; `origin`: its first cell.
    box: bounds of coords, by default read from the device. Raises CoordinateError if coords exceed the grid."""
    if not len(coords):
        return coords[:, 0].long()
    box, top = box or Bounds.of(coords), tuple(o + s - 1 for o, s in zip(origin, shape, strict=True))
    if any(a < o or h > t for a, o, h, t in zip(box.low, origin, box.high, top, strict=True)):
        raise CoordinateError(f"voxels reach {box.low} to {box.high}, the dense tensor holds {tuple(origin)} to {top}")
    return KeySpace(Bounds(tuple(origin), top, items)).keys(coords)
