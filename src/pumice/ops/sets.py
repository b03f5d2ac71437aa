"""Operations on coordinate sets: dense conversion, batching, union, pruning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pumice.coords import (
    Bounds,
    CoordBuffer,
    Geometry,
    GridSpec,
    KeySpace,
    morton_argsort,
    morton_unique,
    same_geometry,
)
from pumice.coords.box import INT32_MAX, dtype_of, places_in
from pumice.coords.buffer import RANGE, set_status
from pumice.coords.tracing import subset as traced_subset
from pumice.coords.tracing import union as traced_union
from pumice.errors import CoordinateError, DeviceError, DtypeError, GeometryError, OptionError, ShapeError
from pumice.ops.tensor import SparseTensor, arithmetic_feats, from_raw_feats, not_sparse, one_node, raw_feats


def to_dense(
    x: SparseTensor, spatial_shape: Sequence[int] | None = None, origin: Sequence[int] | None = None
) -> Tensor:
    """The dense tensor: out[b, c, p - origin] = feats[n, c] where coords[n] = (b, p), 0 elsewhere.

    Parameters
    ----------
    spatial_shape: D extents; default: x.spatial_shape, else the bounding box.
    origin: D integers, the coordinate at index 0; default: 0 if an extent is known, else the corner of the box.

    Returns [batch_size, C, *spatial_shape]. Raises CoordinateError if a voxel is outside, or if a bounding box taken by
    default has more than 2^31 - 1 entries.
    """
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, "to_dense")
    shape = spatial_shape if spatial_shape is not None else x.spatial_shape
    buffered = x.geometry.buffered is not None
    if shape is None and torch.compiler.is_compiling():
        raise OptionError(
            "to_dense needs a spatial_shape under torch.compile, where the bounding box is unknown; found None"
        )
    if shape is None:
        x.geometry.require_host_size("to_dense without a spatial_shape")
    box = None
    if shape is None:
        box = Bounds.of(x.coords)
        origin = box.low if origin is None else origin
        shape = tuple(max(0, h - o + 1) for h, o in zip(box.high, origin, strict=True))
        if x.batch_size * math.prod(shape) * x.channels > INT32_MAX:
            raise CoordinateError(
                f"{x.batch_size} items of {shape} cells (the bounding box) and {x.channels} channels are more than "
                f"{INT32_MAX} entries; pass a spatial_shape"
            )
    shape, origin = tuple(shape), tuple(origin) if origin is not None else (0,) * x.spatial_dim
    if len(shape) != x.spatial_dim or len(origin) != x.spatial_dim:
        raise ShapeError(
            f"spatial_shape {shape} and origin {origin} must have one entry per axis, x has {x.spatial_dim} axes"
        )
    items = x.batch_size
    cells = items * math.prod(shape)
    if torch.compiler.is_compiling():
        index = torch.ops.pumice.places(x.coords, list(shape), list(origin), items)
    elif buffered:
        index = _places_in_buffer(x.geometry.cloud, shape, origin, items)
    else:
        index = places_in(x.coords, shape, origin, items, box)
    flat = x.feats.new_zeros(cells + buffered, x.channels).index_copy(0, index, x.feats)[:cells]
    return flat.view(items, *shape, x.channels).movedim(-1, 1)


def _places_in_buffer(cloud: CoordBuffer, shape: Sequence[int], origin: Sequence[int], items: int) -> Tensor:
    """places_in for the rows of a buffer: padding rows and voxels outside get an extra place at the end. Voxels outside
    also set RANGE in the status: the scene then runs without a buffer, which raises."""
    box = Bounds(tuple(origin), tuple(o + s - 1 for o, s in zip(origin, shape, strict=True)), items)
    valid, there = cloud.valid_mask(), box.contains(cloud.coords)
    set_status(cloud.status, RANGE, (valid & ~there).any())
    return torch.where(valid & there, KeySpace(box).keys(cloud.coords), items * math.prod(shape))


def from_dense(dense: Tensor, threshold: float = 0.0) -> SparseTensor:
    """The voxels of a dense [B, C, *spatial] where the magnitude of some channel exceeds `threshold`.

    Differentiable in the selected values. The result has spatial_shape and batch_size, in (batch, Morton) order.
    """
    if not isinstance(dense, Tensor):
        raise DtypeError(f"dense must be a torch tensor, found {type(dense).__name__}")
    if not dense.is_floating_point():
        raise DtypeError(f"dense must be floating point, found {dense.dtype}")
    if not 3 <= dense.ndim <= 6:
        raise ShapeError(f"dense must be [B, C, *spatial] with 1 to 4 spatial axes, found shape {list(dense.shape)}")
    batch, shape = dense.shape[0], tuple(dense.shape[2:])
    # Negated comparison, so that NaN counts as active.
    active = (~(dense.detach().abs() <= threshold)).any(dim=1).nonzero().int()
    bounds = Bounds((0,) * len(shape), tuple(max(0, s - 1) for s in shape), batch)
    coords, _ = morton_unique(active, bounds)
    geometry = Geometry(coords, GridSpec((1,) * len(shape), shape, batch, bounds))
    feats = dense.movedim(1, -1)[tuple(coords.long().unbind(1))]
    return SparseTensor(feats, geometry)


@one_node
def cat(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Concatenate channels: feats [N, C_0 + C_1 + ...] of tensors on the same coordinates in the same order.
    Raises GeometryError for different coordinates: use union(), or conv(out=...) onto the other's coordinates.
    """
    first = _first(tensors, "cat")
    for other in tensors[1:]:
        known = torch.compiler.is_compiling() or first.geometry.buffered is not None
        if not same_geometry(first, other, check=not known):
            raise GeometryError(f"cat needs one geometry; found {len(first)} and {len(other)} voxels of two geometries")
    return from_raw_feats(torch.cat([raw_feats(t) for t in tensors], dim=1), first.geometry)


def union(x: SparseTensor, y: SparseTensor) -> SparseTensor:
    """Sum over the union of the coordinates: rows present in both are added; (batch, Morton) order.
    Raises ShapeError (channels or axes differ), GeometryError (strides differ), DeviceError.
    """
    _first((x, y), "union")
    if x.spatial_dim != y.spatial_dim or x.channels != y.channels:
        raise ShapeError(f"x has D={x.spatial_dim}, C={x.channels}; y has D={y.spatial_dim}, C={y.channels}")
    if x.device != y.device:
        raise DeviceError(f"x is on {x.device}, y is on {y.device}")
    if x.stride != y.stride:
        raise GeometryError(f"x has stride {x.stride}, y has stride {y.stride}")
    if same_geometry(x, y):
        return x + y
    for each in (x, y):
        each.geometry.require_host_size("union of two geometries")
    left, right = arithmetic_feats(x), arithmetic_feats(y)
    geometry, places = _united(x, y)
    dtype = torch.promote_types(x.dtype, y.dtype)
    feats = left.new_zeros((geometry.coords.shape[0], x.channels), dtype=dtype)
    # One index_add each: rows are distinct within a tensor, so the order of addition is deterministic.
    feats = feats.index_add(0, places[0], left.to(dtype))
    feats = feats.index_add(0, places[1], right.to(dtype))
    return SparseTensor(feats, geometry)


def _united(x: SparseTensor, y: SparseTensor) -> tuple[Geometry, tuple[Tensor, Tensor]]:
    """(union of the coordinates, (row in the union of each row of x, the same for y))."""
    if torch.compiler.is_compiling():
        return traced_union(x.geometry, y.geometry)
    site = _joint_site([x, y], max(x.batch_size, y.batch_size))
    distinct, place = morton_unique(torch.cat([x.coords, y.coords]), site.bounds)
    return Geometry(distinct, site), (place[: len(x)], place[len(x) :])


def collate(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Concatenate tensors along the batch; batch items are renumbered, feats and `inverse` concatenated in order."""
    first = _first(tensors, "collate")
    for each in tensors:
        each.geometry.require_host_size("collate")
    shift, coords, inverses, rows = 0, [], [], 0
    for t in tensors:
        if t.spatial_dim != first.spatial_dim or t.stride != first.stride or t.device != first.device:
            raise GeometryError(
                f"collate needs one D, stride and device; found {first.spatial_dim}, {first.stride}, {first.device} "
                f"and {t.spatial_dim}, {t.stride}, {t.device}"
            )
        if t.channels != first.channels or t.dtype != first.dtype:
            raise ShapeError(
                f"collate needs one number of channels and one dtype; found {first.channels} {first.dtype} and "
                f"{t.channels} {t.dtype}"
            )
        moved = t.coords.clone()
        moved[:, 0] += shift
        coords.append(moved)
        if t.geometry.inverse is not None:
            inverses.append(torch.where(t.geometry.inverse < 0, -1, t.geometry.inverse + rows))
        shift, rows = shift + t.batch_size, rows + len(t)
    inverse = torch.cat(inverses) if len(inverses) == len(tensors) else None
    settled = all(t.geometry.settled for t in tensors)
    geometry = Geometry(torch.cat(coords), _joint_site(tensors, shift), inverse, settled)
    return SparseTensor(torch.cat([t.feats for t in tensors]), geometry)


def split(x: SparseTensor) -> list[SparseTensor]:
    """One tensor per batch item, each with batch index 0; rows keep their order."""
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, "split")
    x.geometry.require_host_size("split")
    pieces = []
    for item in range(x.batch_size):
        rows = (x.coords[:, 0] == item).nonzero()[:, 0]
        coords = x.coords[rows]
        coords[:, 0] = 0
        own = x.geometry.site
        site = replace(own, batch_size=1, bounds=replace(own.bounds, batch=1 if len(rows) else 0))
        pieces.append(SparseTensor(x.feats[rows], Geometry(coords, site, settled=x.geometry.settled)))
    return pieces


def prune(x: SparseTensor, mask: Tensor) -> SparseTensor:
    """The voxels where `mask` bool [N] is true, in (batch, Morton) order; differentiable in the features."""
    if not isinstance(x, SparseTensor):
        raise not_sparse(x, "prune")
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise DtypeError(f"mask must be a tensor of torch.bool, found {dtype_of(mask)}")
    if mask.shape != x.feats.shape[:1]:
        raise ShapeError(f"mask must be [N] = [{len(x.feats)}], found shape {list(mask.shape)}")
    if mask.device != x.device:
        raise DeviceError(f"mask is on {mask.device}, x is on {x.device}")
    x.geometry.require_host_size("prune")
    if torch.compiler.is_compiling():
        geometry, rows = traced_subset(x.geometry, mask)
        return SparseTensor(x.feats[rows], geometry)
    rows = mask.nonzero()[:, 0]
    rows = rows[morton_argsort(x.coords[rows], x.geometry.bounds)]
    return SparseTensor(x.feats[rows], Geometry(x.coords[rows], x.geometry.site, settled=x.geometry.settled))


def _joint_site(tensors: Sequence[SparseTensor], batch_size: int) -> GridSpec:
    """GridSpec that covers all tensors: the joint bounds, the largest extents, and the frame if it is common."""
    sites = [t.geometry.site for t in tensors]
    boxes = [s.bounds for s in sites if s.bounds.batch] or [sites[0].bounds]
    low = tuple(min(side) for side in zip(*(b.low for b in boxes), strict=True))
    high = tuple(max(side) for side in zip(*(b.high for b in boxes), strict=True))
    shapes = [s.spatial_shape for s in sites if s.spatial_shape is not None]
    shape = tuple(max(e) for e in zip(*shapes, strict=True)) if len(shapes) == len(sites) else None
    frame = sites[0].frame if all(s.frame == sites[0].frame for s in sites) else None
    return GridSpec(sites[0].stride, shape, batch_size, Bounds(low, high, batch_size), frame)


def _first(tensors: Sequence[SparseTensor], name: str) -> SparseTensor:
    if not isinstance(tensors, list | tuple):
        raise DtypeError(f"{name} takes a list of SparseTensors, found {type(tensors).__name__}")
    if not tensors:
        raise OptionError(f"{name} takes at least one tensor, found 0")
    for x in tensors:
        if not isinstance(x, SparseTensor):
            raise not_sparse(x, name)
    return tensors[0]
