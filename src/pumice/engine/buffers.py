"""Inputs of captured networks, voxels or points: scenes, and the fixed-capacity buffers that they are copied to."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Bounds, CoordBuffer, Geometry, GridSpec, Relation, make_outputs
from pumice.coords.buffer import RANGE, new_status, put_first
from pumice.coords.capacity import BufferedState
from pumice.coords.chain_build import distinct_cells
from pumice.coords.grid import VoxelFrame
from pumice.coords.outputs import max_outputs
from pumice.ops import SparseTensor, voxelize


@dataclass(frozen=True, eq=False)
class InputBatch:
    """Input tensor of a program. inverse: int64 [P], the voxel row of each point, -1 if none; None for voxel input."""

    x: SparseTensor
    inverse: Tensor | None = None


def sample_rows(places: Tensor, most: int, near: bool = False) -> Tensor | None:
    """Ascending indices of `most` rows of places [N, D], random or nearest to the middle; None if N <= most."""
    count = places.shape[0]
    if count <= most:
        return None
    if near:
        away = (places.double() - places.double().nanmedian(0).values).abs().amax(1)
        return away.nan_to_num(torch.inf).topk(most, largest=False).indices.sort()[0]
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].sort()[0].to(places.device)


@dataclass(frozen=True, eq=False)
class VoxelBuffers:
    """Voxel buffers: coords int32 [capacity, 1+D], feats [capacity, C], count int32 [1] (valid rows).

    As of all buffers: first() are the first rows as buffers of a smaller capacity; poison() fills features of padding
    rows with NaN; make_input() is the input tensor, outside whose grid coordinates set the status."""

    coords: Tensor
    feats: Tensor
    count: Tensor

    @staticmethod
    def of(capacity: int, like: SparseTensor) -> VoxelBuffers:
        device = like.device
        coords = torch.full((capacity, 1 + like.spatial_dim), -1, dtype=torch.int32, device=device)
        feats = torch.zeros(capacity, like.channels, dtype=like.dtype, device=device)
        return VoxelBuffers(coords, feats, torch.zeros(1, dtype=torch.int32, device=device))

    @property
    def capacity(self) -> int:
        return self.coords.shape[0]

    @property
    def device(self) -> torch.device:
        return self.coords.device

    def first(self, capacity: int) -> VoxelBuffers:
        return VoxelBuffers(self.coords[:capacity], self.feats[:capacity], self.count)

    def poison(self, count: int) -> None:
        self.feats[count:].fill_(torch.nan)

    def make_input(self, site: GridSpec, buffered: BufferedState) -> InputBatch:
        cloud = CoordBuffer(self.coords, self.count, site.bounds, new_status(self.coords.device))
        return InputBatch(SparseTensor(self.feats, Geometry.in_buffer(cloud, site, buffered)))


@dataclass(frozen=True, eq=False)
class VoxelScene:
    """Voxel input: feats [N, C] on coords int32 [N, 1+D]. own: their geometry, if known; like: the example.

    Interface of all inputs: count: voxels or points; whole: True if the number of input voxels equals count; batch:
    number of batch items, which may take a host synchronisation (None: the program's), known_batch: without one, else
    None; fill(): copy to the first rows of buffers; tensor(): as eager input, raises for an invalid scene; geometry():
    None for points; sample(): at most so many rows, random ones (a thin scene) or the nearest to the middle (dense)."""

    feats: Tensor
    coords: Tensor
    own: Geometry | None
    like: SparseTensor

    @property
    def count(self) -> int:
        return self.coords.shape[0]

    @property
    def whole(self) -> bool:
        return True

    @property
    def batch(self) -> int | None:
        return None if self.own is None else self.own.batch_size

    @property
    def known_batch(self) -> int | None:
        items = -1 if self.own is None else self.own.outline.batch_size
        return None if items < 0 else items

    def fill(self, buffers: Any) -> None:
        put_first((buffers.coords, buffers.feats), (self.coords, self.feats), buffers.count)

    def tensor(self) -> SparseTensor:
        feats = self.feats.to(self.like.dtype)
        if self.own is not None:
            return SparseTensor(feats, self.own)
        return SparseTensor(feats, self.coords, self.like.stride, self.like.spatial_shape, dim=self.like.spatial_dim)

    def geometry(self, site: GridSpec) -> Geometry:
        return Geometry(self.coords.contiguous(), site.unread()) if self.own is None else self.own

    def sample(self, most: int, near: bool = False) -> VoxelScene:
        chosen = sample_rows(self.coords[:, 1:], most, near)
        if chosen is None:
            return self
        coords = self.coords[chosen]
        own = None if self.own is None else Geometry(coords, self.own.site)
        return VoxelScene(self.feats[chosen], coords, own, self.like)


@dataclass(frozen=True, eq=False)
class VoxelGrid:
    """Voxelisation options for points in `batch` items. dtype: mean features are cast to it, if given."""

    frame: VoxelFrame
    spatial_shape: tuple[int, ...] | None
    batch: int
    dtype: torch.dtype | None = None


@dataclass(frozen=True, eq=False)
class PointBuffers:
    """Point buffers: points [capacity, D], feats [capacity, F] (None: points), items int32 [capacity], count int32 [1].
    size, origin: float64 [D], the grid's, on the device. limits: float64 [2, D], the smallest and the largest cell."""

    points: Tensor
    feats: Tensor | None
    items: Tensor
    count: Tensor
    grid: VoxelGrid
    size: Tensor
    origin: Tensor
    limits: Tensor

    @staticmethod
    def of(capacity: int, like: PointScene, bounds: Bounds) -> PointBuffers:
        device, frame = like.points.device, like.grid.frame
        points = torch.zeros(capacity, like.points.shape[1], dtype=like.points.dtype, device=device)
        feats = None if like.feats is None else like.feats.new_zeros(capacity, like.feats.shape[1])
        items, count = (torch.zeros(n, dtype=torch.int32, device=device) for n in (capacity, 1))
        size = torch.tensor(frame.size, dtype=torch.float64, device=device)
        origin = torch.tensor(frame.origin, dtype=torch.float64, device=device)
        limits = torch.tensor((bounds.low, bounds.high), dtype=torch.float64, device=device)
        return PointBuffers(points, feats, items, count, like.grid, size, origin, limits)

    @property
    def capacity(self) -> int:
        return self.points.shape[0]

    @property
    def device(self) -> torch.device:
        return self.points.device

    def first(self, capacity: int) -> PointBuffers:
        feats = None if self.feats is None else self.feats[:capacity]
        return replace(self, points=self.points[:capacity], feats=feats, items=self.items[:capacity])

    def poison(self, count: int) -> None:
        self.points[count:].fill_(torch.nan)
        if self.feats is not None:
            self.feats[count:].fill_(torch.nan)

    def make_input(self, site: GridSpec, buffered: BufferedState) -> InputBatch:
        cells = self._cells(site)
        geometry = distinct_cells(cells, site, buffered) or self._distinct(cells, site, buffered)
        rows = geometry.inverse
        assert rows is not None
        return InputBatch(SparseTensor(self._means(rows, len(geometry)), geometry), rows)

    def _distinct(self, cells: CoordBuffer, site: GridSpec, buffered: BufferedState) -> Geometry:
        """Geometry of the distinct cells, with each point's row: without the kernels of distinct_cells."""
        relation = Relation.of(cells.dim, 1, policy="floor_unique")
        made = make_outputs(cells, site, relation)
        key: Hashable = ("rows", buffered.path, site.stride)
        capacity = buffered.capacities.capacity(key, made.count, max_outputs(self.capacity, relation, site))
        geometry = Geometry.in_buffer(made.cloud(capacity, coords_only=True), site, buffered)
        geometry.assign_points(cells)
        return geometry

    def _cells(self, site: GridSpec) -> CoordBuffer:
        """Cell of each point; batch index -1 if the point is padding, invalid or outside the bounds."""
        live = torch.arange(self.capacity, device=self.points.device) < self.count
        units = (self.points.double() - self.origin) / self.size
        cells = torch.floor(units + 0.5 if self.grid.frame.rounding == "round" else units)
        # Comparisons with NaN are False, so non-finite points are outside.
        inside = ((cells >= self.limits[0]) & (cells <= self.limits[1])).all(1)
        inside &= (self.items >= 0) & (self.items < site.batch_size)
        wrong = live & ~inside
        if self.grid.spatial_shape is not None:
            # Points outside a spatial_shape are dropped; non-finite points and invalid batch indices are errors.
            wrong &= ~(torch.isfinite(cells).all(1) & (self.items >= 0) & (self.items < site.batch_size))
        status = new_status(self.points.device).bitwise_or_(RANGE * wrong.any().int())
        kept = live & inside
        items = torch.where(kept, self.items, -1)
        coords = torch.cat([items[:, None], torch.where(kept[:, None], cells, 0).int()], dim=1)
        return CoordBuffer(coords, self.count, site.bounds, status)

    def _means(self, rows: Tensor, capacity: int) -> Tensor:
        """Mean features of each voxel, summed in at least float32; points without a voxel go to an extra last row."""
        values = self.points if self.feats is None else self.feats
        wide = torch.promote_types(values.dtype, torch.float32)
        place = torch.where(rows >= 0, rows, capacity)
        sums = values.new_zeros(capacity + 1, values.shape[1], dtype=wide).index_add(0, place, values.to(wide))
        counts = sums.new_zeros(capacity + 1).index_add(0, place, torch.ones_like(place, dtype=wide))
        means = (sums / counts.clamp(min=1)[:, None])[:capacity].to(values.dtype)
        return means if self.grid.dtype is None else means.to(self.grid.dtype)


@dataclass(frozen=True, eq=False)
class PointScene:
    """Point input: points [P, D], features [P, F] (None: the points), batch indices [P] (None: one item)."""

    points: Tensor
    feats: Tensor | None
    items: Tensor | None
    grid: VoxelGrid

    @property
    def count(self) -> int:
        return self.points.shape[0]

    @property
    def whole(self) -> bool:
        return False

    @property
    def batch(self) -> None:
        return None

    known_batch = batch

    def fill(self, buffers: Any) -> None:
        to, arrays = [buffers.points], [self.points]
        if buffers.feats is not None and self.feats is not None:
            to.append(buffers.feats)
            arrays.append(self.feats)
        if self.items is None:
            buffers.items[: self.count].zero_()
        else:
            to.append(buffers.items)
            arrays.append(self.items)
        put_first(to, arrays, buffers.count)

    def tensor(self) -> SparseTensor:
        frame, shape = self.grid.frame, self.grid.spatial_shape
        cloud = (self.points, self.feats, frame.size, self.items, frame.origin, frame.rounding)
        x = voxelize(*cloud, spatial_shape=shape, batch_size=self.grid.batch, dim=len(frame.size))
        return x if self.grid.dtype is None else x.to(self.grid.dtype)

    def geometry(self, site: GridSpec) -> None:
        return None

    def sample(self, most: int, near: bool = False) -> PointScene:
        chosen = sample_rows(self.points, most, near)
        if chosen is None:
            return self
        feats, items = (None if t is None else t[chosen] for t in (self.feats, self.items))
        return PointScene(self.points[chosen], feats, items, self.grid)


def per_point(values: Tensor, inverse: Tensor) -> Tensor:
    """values[inverse]; rows of points without a voxel (-1) are 0 for floats, -1 otherwise."""
    filler = 0 if values.is_floating_point() else -1
    if not values.shape[0]:
        return values.new_full((len(inverse), *values.shape[1:]), filler)
    absent = (inverse < 0).view(-1, *(1,) * (values.ndim - 1))
    return values[inverse.clamp(min=0)].masked_fill(absent, filler)


Buffers = VoxelBuffers | PointBuffers
ModelInput = VoxelScene | PointScene
