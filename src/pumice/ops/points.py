"""Conversions between points and voxels: voxelise, coalesce, devoxelise, interpolate."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Geometry, as_tensor, check_points, frame_of, quantize, unique_coords
from pumice.errors import DeviceError, DtypeError, GeometryError, OptionError, ShapeError
from pumice.ops.pool import REDUCTIONS, pick
from pumice.ops.tensor import SparseTensor, arithmetic_feats, one_node
from pumice.runtime.launch import vector


def voxelize(
    points: Any,
    feats: Any = None,
    size: float | Sequence[float] | None = None,
    batch: Any = None,
    origin: float | Sequence[float] | Tensor | str = 0.0,
    rounding: str = "floor",
    reduce: str = "mean",
    *,
    spatial_shape: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    dim: int = 3,
) -> SparseTensor:
    """Voxelise points: the features of the points in a voxel are reduced to one row.

        y.feats[n] = reduce of feats[p] over the points p with  floor((points[p] - origin) / size) = y.coords[n]

    Parameters
    ----------
    points: floating point [P, D]. points, feats and batch are tensors, arrays or lists.
    feats: floating point [P, F]; default: the points.
    size: edge length of a voxel in the unit of the points, a number or one per axis; required.
    batch: integers [P], batch item of each point; default: 0.
    origin: position of coordinate 0: a number, one per axis, or "min" (the minimum over the points).
    rounding: "floor", or "round" (the nearest cell, as published MinkUNet pipelines do with origin="min").
    reduce: "mean", "sum", "max" or "first" (the point of lowest index).
    spatial_shape: extent of the grid; points outside are dropped and have -1 in `inverse`.
    batch_size: number of batch items; needed if the last ones may be empty.
    dim: D, from 1 to 4.

    Returns a SparseTensor in (batch, Morton) order. `inverse` int64 [P] is the row of each point:
    `y.feats[y.inverse]` is per point. Differentiable in feats.
    Raises ShapeError, DtypeError, DeviceError, CoordinateError (non-finite points, cells beyond int32), OptionError.
    """
    _check_reduce(reduce)
    points, batch = as_tensor(points, "points"), None if batch is None else as_tensor(batch, "batch")
    check_points(points, batch, dim)
    frame = frame_of(points, size, origin, rounding)
    geometry = quantize(points, frame, batch, batch_size=batch_size, spatial_shape=spatial_shape)
    values = points if feats is None else as_tensor(feats, "feats")
    _check_values(points, values, "points")
    return SparseTensor(_reduced(values, geometry, reduce), geometry)


def coalesce(
    feats: Tensor,
    coords: Tensor,
    reduce: str = "mean",
    *,
    stride: int | Sequence[int] = 1,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    dim: int = 3,
) -> SparseTensor:
    """SparseTensor of coordinates with duplicates, whose features are reduced.

        y.feats[n] = reduce of feats[p] over the p with coords[p] = y.coords[n]

    Parameters
    ----------
    feats: floating point [P, C], on the device of coords.
    coords: int32 [P, 1+D] = (batch, axes...).
    reduce: "mean", "sum", "max" or "first" (the lowest row).
    stride, spatial_shape, batch_size, dim: as for SparseTensor; a row outside spatial_shape is an error.

    Returns a SparseTensor in (batch, Morton) order. `inverse` int64 [P] is the output row of each input row.
    Differentiable in feats.
    Raises ShapeError, DtypeError, DeviceError, CoordinateError (out of range, too many voxels), OptionError.
    """
    _check_reduce(reduce)
    geometry = unique_coords(coords, stride, spatial_shape, batch_size, dim)
    _check_values(coords, feats, "coordinates")
    return SparseTensor(_reduced(feats, geometry, reduce), geometry)


@one_node
def devoxelize(
    x: SparseTensor, points: Tensor | None = None, batch: Tensor | None = None, mode: str = "nearest"
) -> Tensor:
    """Features at points: [P, C].

    points: [P, D] in the unit of voxelize(); default: the voxelised points, only with mode "nearest".
    batch: integers [P], batch item of each point; needed if x has several.
    mode: "nearest" (the voxel that contains the point, 0 if absent) or "trilinear" (see interpolate()).
    x may be at any level of a network: its stride is taken into account. Differentiable.
    Raises GeometryError if the coordinates do not derive from voxelize(), OptionError for an unknown mode, and for
    points of several items without `batch`.
    """
    OptionError.check("mode", mode, MODES)
    if points is None:
        if mode != "nearest":
            raise OptionError(f"mode={mode!r} needs points; without them only 'nearest' is available")
        return take(x.feats, x.inverse)
    if batch is None and x.batch_size > 1:
        raise OptionError(f"batch takes the item of each point, as x has {x.batch_size} items; found None")
    frame = x.geometry.frame
    if frame is None:
        raise GeometryError("these voxels were not made by voxelize(): use interpolate() with voxel positions")
    check_points(points, batch)
    if points.shape[1] != x.spatial_dim:
        raise ShapeError(f"points must be [P, {x.spatial_dim}], found shape {list(points.shape)}")
    positions = frame.positions(points)
    items = torch.zeros(len(points), device=points.device) if batch is None else batch
    return interpolate(x, torch.cat([items.to(positions.dtype)[:, None], positions], dim=1), mode)


@one_node
def interpolate(x: SparseTensor, positions: Tensor, mode: str = "trilinear", normalize: bool = True) -> Tensor:
    """Features at continuous positions: [P, C].

        y[p, c] = sum over the 2^D voxels v around p of  weight(p, v) * x[v, c]
        weight(p, v) = product over the axes of 1 - |p - centre(v)|

    Parameters
    ----------
    positions: floating point [P, 1+D] = (batch, axes...) in units of the finest voxels: at stride t voxel c covers
        [c * t, (c + 1) * t) and has its centre at (c + 1/2) * t.
    mode: "trilinear" (multilinear in D axes) or "nearest" (the voxel that contains the position).
    normalize: divide by the sum of the weights of the voxels present. Absent voxels contribute 0; a position without
        voxels gives 0.

    Differentiable in x.feats, and for "trilinear" in positions.
    """
    OptionError.check("mode", mode, MODES)
    if not isinstance(positions, Tensor):
        raise DtypeError(f"positions must be a torch tensor, found {type(positions).__name__}")
    if positions.ndim != 2 or positions.shape[1] != x.spatial_dim + 1:
        raise ShapeError(
            f"positions must be [P, {x.spatial_dim + 1}] = (batch, axes...), found shape {list(positions.shape)}"
        )
    if not positions.is_floating_point():
        raise DtypeError(f"positions must be floating point, found {positions.dtype}")
    if positions.device != x.device:
        raise DeviceError(f"positions are on {positions.device}, x is on {x.device}")
    arithmetic_feats(x)
    stride = vector(tuple(map(float, x.stride)), positions.dtype, x.device)
    batch = torch.floor(positions[:, :1].detach())
    return MODES[mode](x, batch, positions[:, 1:] / stride, normalize)


def _nearest(x: SparseTensor, batch: Tensor, units: Tensor, normalize: bool) -> Tensor:
    return take(x.feats, x.geometry.find(_cells(batch, torch.floor(units.detach()))))


def _trilinear(x: SparseTensor, batch: Tensor, units: Tensor, normalize: bool) -> Tensor:
    corner = torch.floor(units.detach() - 0.5)
    ahead = (units - 0.5 - corner).masked_fill(corner.isinf(), 0)
    # In at least float32, rounded once: half precision would round the weights and the sums of 2^D terms.
    wide = torch.promote_types(x.dtype, torch.float32)
    feats = x.feats.to(wide)
    total = y = None
    for side in itertools.product((0, 1), repeat=x.spatial_dim):
        sides = vector(side, corner.dtype, corner.device)
        rows = x.geometry.find(_cells(batch, corner + sides))
        # Not prod(): PyTorch compiles it with NVRTC on its first call on a GPU.
        along = torch.where(sides.bool(), ahead, 1 - ahead).unbind(1)
        weight = (functools.reduce(operator.mul, along) * (rows >= 0)).to(wide)
        part = take(feats, rows) * weight[:, None]
        y, total = (part, weight) if y is None or total is None else (y + part, total + weight)
    assert y is not None and total is not None
    if normalize:
        y = y / torch.where(total > 0, total, 1)[:, None]
    return y.to(x.dtype)


MODES: dict[str, Callable[[SparseTensor, Tensor, Tensor, bool], Tensor]] = {
    "nearest": _nearest,
    "trilinear": _trilinear,
}


def _cells(batch: Tensor, cells: Tensor) -> Tensor:
    """int32 coordinates of cells given as floats; batch item -1, which no voxel has, for values beyond int32."""
    coords = torch.cat([batch, cells], dim=1)
    held = (coords >= -(2.0**31)) & (coords < 2.0**31)
    return coords.where(held, 0).int().masked_fill(~held.all(dim=1, keepdim=True), -1)


def take(feats: Tensor, rows: Tensor) -> Tensor:
    """feats[rows], with 0 where a row is -1."""
    if torch.compiler.is_compiling():
        # The number of rows is symbolic and may be 0: -1 is an appended row.
        return pick(torch.cat([feats, feats.new_zeros(1, feats.shape[1])]), rows)
    if feats.shape[0] == 0:
        return feats.sum(dim=0).expand(rows.shape[0], -1)  # zeros, with the feats' graph
    absent = (rows < 0)[:, None]
    return pick(feats, rows.clamp(min=0)).masked_fill(absent, 0)


def _check_reduce(reduce: str) -> None:
    OptionError.check("reduce", reduce, REDUCTIONS)


def _check_values(rows: Tensor, values: Tensor, name: str) -> None:
    if values.ndim != 2 or values.shape[0] != rows.shape[0]:
        raise ShapeError(f"feats must be [P, F] with P = {rows.shape[0]} {name}, found shape {list(values.shape)}")
    if not values.is_floating_point():
        raise DtypeError(f"feats must be floating point, found {values.dtype}")
    if values.device != rows.device:
        raise DeviceError(f"feats are on {values.device}, the {name} on {rows.device}")


def _reduced(values: Tensor, geometry: Geometry, reduce: str) -> Tensor:
    place = geometry.inverse
    assert place is not None
    rows = torch.arange(len(values), device=values.device)
    if geometry.spatial_shape is not None:
        rows = (place >= 0).nonzero()[:, 0]
        place = place[rows]
    return REDUCTIONS[reduce](values, rows, place, geometry.coords.shape[0])
