"""Voxelisation of points in space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pumice.coords.box import INT32_MAX, Bounds, check_form, dtype_of
from pumice.coords.codes import morton_unique
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec, VoxelFrame
from pumice.coords.relation import as_axes
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError


def quantize(
    points: Tensor,
    frame: VoxelFrame,
    batch: Tensor | None = None,
    *,
    batch_size: int | None = None,
    spatial_shape: int | Sequence[int] | None = None,
) -> Geometry:
    """The geometry of the distinct voxels floor((p - origin) / size) of points [P, D], in (batch, Morton) order.

    batch: int [P], batch index of each point (default all 0). spatial_shape: points outside [0, spatial_shape) are
    dropped. The geometry's `inverse`, int64 [P], is each point's voxel row, -1 if dropped.

    Raises CoordinateError (non-finite points, cells beyond int32, batch index outside batch_size); see check_points.
    """
    check_points(points, batch)
    cells = torch.floor(frame.positions(points))
    _check_cells(cells)
    coords = torch.empty(len(points), points.shape[1] + 1, dtype=torch.int32, device=points.device)
    coords[:, 0] = 0 if batch is None else _batch_column(batch)
    coords[:, 1:] = cells.int()
    kept = None
    shape = None if spatial_shape is None else as_axes(spatial_shape, points.shape[1], "spatial_shape", 1)
    if shape is not None:
        extent = torch.tensor(shape, device=points.device)
        kept = ((cells >= 0) & (cells < extent)).all(dim=1)
        coords = coords[kept]
    bounds = Bounds.of(coords)
    size = bounds.batch if batch_size is None else as_axes(batch_size, 1, "batch_size", 0)[0]
    if bounds.batch > size:
        raise CoordinateError(f"batch indices reach {bounds.batch - 1}, batch_size is {size}")
    distinct, place = morton_unique(coords, bounds)
    site = GridSpec((1,) * points.shape[1], shape, size, bounds, frame)
    return Geometry(distinct, site, place if kept is None else _inverse_of(place, kept))


def frame_of(
    points: Tensor, size: float | Sequence[float] | None, origin: float | Sequence[float] | Tensor | str, rounding: str
) -> VoxelFrame:
    """The placement of voxels of `size`. origin: a number, one per axis, or "min" (the minimum of the points).

    With rounding "round" the minimum is rounded to a multiple of `size`, as in published MinkUNet pipelines. Raises
    OptionError, ShapeError (lengths), CoordinateError (non-finite points)."""
    dim = points.shape[1] if points.ndim == 2 else 0
    named = isinstance(origin, str)
    frame = VoxelFrame(
        _numbers(size, dim, "size"), (0.0,) * dim if named else _numbers(origin, dim, "origin"), rounding
    )
    if named:
        if origin != "min":
            raise OptionError(f"origin takes numbers or 'min', found {origin!r}")
        low = points.double().amin(dim=0).tolist() if len(points) else [0.0] * dim
        if not all(map(math.isfinite, low)):
            raise _not_finite(points)
        if rounding == "round":
            low = [round(a / s) * s for a, s in zip(low, frame.size, strict=True)]
        frame = VoxelFrame(frame.size, tuple(low), rounding)
    return frame


def _numbers(value: Any, dim: int, name: str) -> tuple[float, ...]:
    try:
        found = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError) as problem:
        raise OptionError(f"{name} takes a number or one per axis, found {value!r}") from problem
    values = (found.item(),) * dim if found.ndim == 0 else tuple(found.tolist())
    if len(values) != dim:
        raise ShapeError(f"{name} has {len(values)} entries, the points have {dim} axes")
    return values


def _batch_column(batch: Tensor) -> Tensor:
    if batch.element_size() == 8 and len(batch):
        low, high = torch.stack(torch.aminmax(batch)).tolist()
        if low < 0 or high > INT32_MAX:
            raise CoordinateError(f"batch indices reach {low} to {high}; they start at 0, int32 holds {INT32_MAX}")
    return batch.int()


def _inverse_of(place: Tensor, kept: Tensor) -> Tensor:
    inverse = torch.full(kept.shape, -1, dtype=torch.int64, device=kept.device)
    inverse[kept] = place
    return inverse


def as_tensor(value: Any, name: str) -> Tensor:
    """`value`, a tensor, an array or nested lists of numbers, as a tensor. Raises DtypeError for anything else."""
    try:
        return value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DtypeError(f"{name} takes a tensor, an array or lists, found {type(value).__name__}: {problem}") from None


def check_points(points: Tensor, batch: Tensor | None, dim: int | None = None) -> None:
    """Raise DtypeError, ShapeError, DeviceError or CoordinateError for invalid points [P, D] or batch indices [P].
    dim: D; None: any."""
    if not isinstance(points, Tensor) or not points.is_floating_point():
        raise DtypeError(f"points must be a tensor of floating point, found {dtype_of(points)}")
    columns = points.shape[1] if points.ndim == 2 else 0
    if dim is not None and columns > dim:
        raise ShapeError(
            f"points are [P, {dim}] with dim={dim}, found shape {list(points.shape)}; pass points[:, :{dim}], and the "
            f"rest within feats{f', or dim={columns}' if columns <= 4 else ''}"
        )
    if not 1 <= columns <= 4:
        raise ShapeError(f"points are [P, D] with D from 1 to 4, found shape {list(points.shape)}")
    if dim is not None and columns < dim:
        raise ShapeError(f"points are [P, {dim}] with dim={dim}, found shape {list(points.shape)}; pass dim={columns}")
    if len(points) > INT32_MAX:
        raise CoordinateError(f"{len(points)} points; indices hold at most {INT32_MAX}")
    if batch is None:
        return
    if batch.is_floating_point() or batch.dtype == torch.bool:
        raise DtypeError(f"batch holds integers, found {batch.dtype}")
    if batch.shape != points.shape[:1]:
        raise ShapeError(f"batch is [{len(points)}] for {len(points)} points, found shape {list(batch.shape)}")
    if batch.device != points.device:
        raise DeviceError(f"batch is on {batch.device}, the points on {points.device}")


def _not_finite(points: Tensor) -> CoordinateError:
    bad = int((~torch.isfinite(points)).any(dim=1).sum())
    return CoordinateError(f"{bad} of {len(points)} points are not finite")


def _check_cells(cells: Tensor) -> None:
    if len(cells) == 0:
        return
    low, high = torch.stack(torch.aminmax(cells.reshape(-1), dim=0)).tolist()
    if not (low >= -(2**31) and high <= INT32_MAX):  # a NaN fails both
        if not bool(torch.isfinite(cells).all()):
            raise _not_finite(cells)
        raise CoordinateError(
            f"voxels would range from {low:.0f} to {high:.0f}; int32 holds {-(2**31)} to {INT32_MAX}. Use a larger size"
        )


def unique_coords(
    coords: Tensor,
    stride: int | Sequence[int] = 1,
    spatial_shape: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    dim: int | None = None,
) -> Geometry:
    """The geometry of the distinct rows of a user's `coords`, int32 [P, 1+D], in (batch, Morton) order.

    Its `inverse`, int64 [P], gives `result.coords[inverse] == coords`. Raises as Geometry.checked(), but not for
    duplicates."""
    check_form(coords, dim)
    distinct, place = morton_unique(coords, Bounds.of(coords))
    site = Geometry.checked(distinct, stride, spatial_shape, batch_size).site
    return Geometry(distinct, site, place)
