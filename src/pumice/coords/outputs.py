"""Which outputs exist: candidates, bounds, distinct ones in (batch, Morton) order, and how many they are.

Three ways give the same: bricks (kernels; candidates, bounds, uniqueness and order in one structure), sorted codes
(plain torch without a wait for the host: staged, each step through memory) and the twin, which asks the host.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pumice.coords import bricks
from pumice.coords.box import INT32_MAX, Bounds
from pumice.coords.bricks import Bricks, Space, Stencil
from pumice.coords.buffer import OVERFLOW, CoordBuffer, read, set_status
from pumice.coords.codes import morton_unique
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.map_schedule import MapSchedule
from pumice.coords.relation import Relation
from pumice.errors import CoordinateError
from pumice.runtime.launch import has_triton

Axis = tuple[int, int, int, int, int]
"""Of an axis: least and greatest coordinate, least and greatest offset, stride."""


class Outputs(Protocol):
    """The outputs of a relation, before and after the host knows their number."""

    @property
    def count(self) -> Tensor:
        """int32 [1] on the device: how many there are."""
        ...

    def cloud(self, capacity: int, alone: bool = False) -> CoordBuffer:
        """The outputs in room for so many, with the inputs' status; rows past their count hold -1.

        alone: no table of this capacity will be asked for.
        """
        ...

    def geometry(self, count: int) -> Geometry:
        """The outputs, of which there are `count`."""
        ...

    def table(self, capacity: int) -> Tensor | None:
        """The map's table, int32, where it is had by the way: of the outputs, or (transposed) of the inputs."""
        ...


def make_outputs(
    inputs: CoordBuffer, site: GridSpec, relation: Relation, schedule: MapSchedule | None = None
) -> Outputs:
    """The outputs that a relation makes of coordinates at `site`, the fastest way that there is."""
    site = site_of(site, relation)
    if not has_triton(inputs.coords) or inputs.capacity == 0 or 0 in (site.spatial_shape or ()):
        return TorchOutputs(inputs, relation, site)
    fused = schedule is None or schedule.fused
    if fused and bricks.refusal(inputs.coords, site.bounds, Stencil.of_meetings(relation)) is None:
        return BrickOutputs(inputs, relation, site)
    return SortedOutputs(inputs, relation, site) if codes_fit(site.bounds) else TorchOutputs(inputs, relation, site)


def level_key(relation: Relation) -> Hashable:
    """What outputs of several relations are one geometry under: floor(in / stride) is the same for every kernel."""
    return ("floor_unique", relation.stride) if relation.policy == "floor_unique" else None


def site_of(site: GridSpec, relation: Relation) -> GridSpec:
    """What is known of the outputs of a relation without asking the device: a box around them, extents, strides."""
    finer = relation.policy == "transposed_support"
    factor = [Fraction(1, s) if finer else s for s in relation.stride]
    bounded = site.spatial_shape is not None and relation.bounded
    shape = relation.output_shape(site.spatial_shape) if bounded and site.spatial_shape else None
    return site.scaled(factor, bounds=_box(site.bounds, relation, shape), spatial_shape=shape)


def _box(bounds: Bounds, relation: Relation, shape: tuple[int, ...] | None) -> Bounds:
    axis_box = _AXIS_BOXES[relation.policy]
    low, high = [], []
    for axis, stride in enumerate(relation.stride):
        first, last = axis_box((bounds.low[axis], bounds.high[axis], *relation.spans[axis], stride))
        if shape is not None:
            # Outside the extent nothing is kept.
            first, last = max(first, 0), min(last, shape[axis] - 1)
        # Where nothing is left, a cell of the extent, which is not reached.
        low.append(first if first <= last else max(last, 0))
        high.append(max(last, 0) if first > last else last)
    return Bounds(tuple(low), tuple(high), bounds.batch).checked()


def _floor_box(axis: Axis) -> tuple[int, int]:
    low, high, _, _, stride = axis
    return low // stride, high // stride


def _support_box(axis: Axis) -> tuple[int, int]:
    low, high, near, far, stride = axis
    return -((far - low) // stride), (high - near) // stride


def _transposed_box(axis: Axis) -> tuple[int, int]:
    low, high, near, far, stride = axis
    return low * stride + near, high * stride + far


_AXIS_BOXES = {"floor_unique": _floor_box, "support": _support_box, "transposed_support": _transposed_box}


class BrickOutputs:
    """By bricks: kernels that generate candidates, cut them off at the box, and count and order the distinct ones."""

    def __init__(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> None:
        self._inputs, self._relation, self._site = inputs, relation, site
        self._reach, self._meets = Stencil.of_outputs(relation), Stencil.of_meetings(relation)
        most = min(INT32_MAX, inputs.capacity * self._reach.lanes)
        self._bricks = Bricks.of(inputs, self._reach, site.bounds, most)
        self._table: Tensor | None = None

    @property
    def count(self) -> Tensor:
        return self._bricks.count

    def cloud(self, capacity: int, alone: bool = False) -> CoordBuffer:
        way = partial(self._bricks.coords, self._inputs, self._reach) if alone else self._placed
        coords, living = way(capacity)
        return CoordBuffer(coords, living, self._site.bounds, self._inputs.status, needed=self.count)

    def geometry(self, count: int) -> Geometry:
        return Geometry(self._placed(count)[0], self._site)

    def table(self, capacity: int) -> Tensor | None:
        if self._relation.policy == "transposed_support":
            return self._bricks.turned(self._inputs, self._meets, capacity)
        if self._table is None or len(self._table) != capacity:
            return self._bricks.rows(self._inputs, self._meets, capacity)
        return self._table

    def _placed(self, capacity: int) -> tuple[Tensor, Tensor]:
        """The outputs' coordinates, and how many live; where some tap meets each, the table comes in the same pass."""
        if self._relation.policy == "transposed_support" or not _covers(self._relation):
            return self._bricks.coords(self._inputs, self._reach, capacity)
        self._table, *placed = self._bricks.both(self._inputs, self._meets, capacity)
        return placed[0], placed[1]


class SortedOutputs:
    """By sorting codes: every candidate's code, sorted; the first of its kind stays. No wait for the host."""

    def __init__(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> None:
        self._site, self._inputs = site, inputs
        self._space = Space.of(site.bounds)
        codes = candidate_codes(self._inputs, Stencil.of_outputs(relation), self._space)
        self._codes = torch.sort(codes)[0]
        new = self._codes != _NO_CODE
        new[1:] &= self._codes[1:] != self._codes[:-1]
        self._places = new.cumsum(0, dtype=torch.int64)
        self._new = new

    @property
    def count(self) -> Tensor:
        return self._places[-1:].int()

    def cloud(self, capacity: int, alone: bool = False) -> CoordBuffer:
        return _buffered(self._coords(capacity), self.count, self._site, self._inputs)

    def geometry(self, count: int) -> Geometry:
        return Geometry(self._coords(count), self._site)

    def table(self, capacity: int) -> Tensor | None:
        return None

    def _coords(self, capacity: int) -> Tensor:
        # What is not new, and what there is no room for, goes to a place past the last.
        set_status(self._inputs.status, OVERFLOW, self._places[-1] > capacity)
        place = torch.where(self._new & (self._places <= capacity), self._places - 1, capacity)
        codes = self._codes.new_full((capacity + 1,), _NO_CODE).scatter_(0, place, self._codes)[:capacity]
        return coords_of_codes(codes, self._space)


class TorchOutputs:
    """In plain torch, with the host: the twin of the others, for any box."""

    def __init__(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> None:
        # What lies outside the box is not there, as in the other ways.
        coords = inputs.coords if inputs.exact else inputs.coords[inputs.valid_mask() & inputs.inside()]
        self._coords = _TWINS[relation.policy](coords, inputs.bounds, relation, site)
        self._site, self._inputs = site, inputs
        if len(self._coords) > INT32_MAX:
            raise CoordinateError(f"{len(self._coords)} output voxels; indices hold at most {INT32_MAX}")

    @property
    def count(self) -> Tensor:
        return torch.full((1,), len(self._coords), dtype=torch.int32, device=self._coords.device)

    def cloud(self, capacity: int, alone: bool = False) -> CoordBuffer:
        self._inputs.status.bitwise_or_(OVERFLOW * (len(self._coords) > capacity))
        coords = self._coords.new_full((capacity, self._coords.shape[1]), -1)
        coords[: len(self._coords)] = self._coords[:capacity]
        return _buffered(coords, self.count, self._site, self._inputs)

    def geometry(self, count: int) -> Geometry:
        return Geometry(self._coords[:count], self._site)

    def table(self, capacity: int) -> Tensor | None:
        return None


def counted(geometry: Geometry, counts: Sequence[Tensor]) -> list[int]:
    """Numbers of outputs on the host, in one transfer; what was found wrong with the inputs is read too, and raised."""
    waiting = geometry.unsettled
    values = read([*counts] if waiting is None else [*counts, waiting])
    geometry.settle(0 if waiting is None else values[-1][0])
    return [value for (value,) in values[: len(counts)]]


def _buffered(coords: Tensor, needed: Tensor, site: GridSpec, inputs: CoordBuffer) -> CoordBuffer:
    """A buffer of outputs; where there are more than it holds, the status says so."""
    return CoordBuffer(coords, needed.clamp(max=len(coords)), site.bounds, inputs.status, needed=needed)


def max_outputs(inputs: int, relation: Relation, site: GridSpec) -> int:
    """How many outputs so many inputs have at most, at the outputs' site."""
    most = inputs * Stencil.of_outputs(relation).lanes
    return min(most, site.bounds.cells, INT32_MAX)


def _covers(relation: Relation) -> bool:
    """Whether every output of the relation meets an input through one of its own taps."""
    if relation.policy == "support":
        return True
    rests = {tuple(o % s for o, s in zip(offset, relation.stride, strict=True)) for offset in relation.offsets}
    inside = all(0 <= o < s for offset in relation.offsets for o, s in zip(offset, relation.stride, strict=True))
    return inside and len(rests) == math.prod(relation.stride)


# codes in plain torch

_NO_CODE = 2**63 - 1


def codes_fit(bounds: Bounds) -> bool:
    """Whether a box's cells have codes of one word, with the batch item on top."""
    try:
        space = Space.of(bounds)
        space.layout.tables("cpu")
    except CoordinateError:
        return False
    return space.bits + bounds.batch.bit_length() <= 62


def candidate_codes(cloud: CoordBuffer, reach: Stencil, space: Space) -> Tensor:
    """int64 [K * N]: the Morton code of every cell that is reached, the largest int64 where there is none."""
    box, layout = space.bounds, space.layout
    tables, coords = layout.tables(cloud.device), cloud.coords.long()
    found = []
    for offset in reach.offsets:
        inside = cloud.valid_mask() & (coords[:, 0] >= 0) & (coords[:, 0] < box.batch)
        code = coords[:, 0] << space.bits
        for axis, (o, step) in enumerate(zip(offset, reach.steps, strict=True)):
            value, whole = _moved(coords[:, axis + 1], o, step, reach.form)
            inside &= whole & (value >= box.low[axis]) & (value <= box.high[axis])
            at = torch.where(inside, value + layout.bias[axis], 0) + layout.starts[axis]
            code = code | tables[at]
        found.append(torch.where(inside, code, _NO_CODE))
    return torch.cat(found)


def _moved(values: Tensor, offset: int, step: int, form: str) -> tuple[Tensor, Tensor]:
    """(the coordinate that is reached along an axis, whether there is one)."""
    if form == "times":
        return values * step + offset, torch.ones_like(values, dtype=torch.bool)
    shifted = values - (offset if form == "over" else 0)
    share = torch.div(shifted, step, rounding_mode="floor")
    return share, (share * step == shifted) | (form == "floor")


def coords_of_codes(codes: Tensor, space: Space) -> Tensor:
    """int32 [N, 1+D] of codes; -1 throughout where there is none."""
    columns = [codes >> space.bits]
    for places, bias in zip(space.layout.places, space.layout.bias, strict=True):
        value = torch.zeros_like(codes)
        for bit, place in enumerate(places):
            value |= ((codes >> place) & 1) << bit
        columns.append(value - bias)
    coords = torch.stack(columns, dim=1).int()
    return torch.where((codes != _NO_CODE)[:, None], coords, -1)


# the twin


def _floor_unique(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """Distinct floor(in / stride)."""
    stride = torch.tensor((1, *relation.stride), dtype=torch.int32, device=coords.device)
    coords = torch.div(coords, stride, rounding_mode="floor")
    return _kept(morton_unique(coords, _box(bounds, relation, None))[0], site)


def _support(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """Every out with stride * out + offset = in for some active input: (in - offset) / stride, where it divides."""
    return _kept(_spread(coords, bounds, relation, "over"), site)


def _transposed_support(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """Every out = stride * in + offset."""
    return _kept(_spread(coords, bounds, relation, "times"), site)


_TWINS = {"floor_unique": _floor_unique, "support": _support, "transposed_support": _transposed_support}

_AxisOffsets = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def _separable(relation: Relation) -> list[_AxisOffsets]:
    """(axes, offsets along them) to apply one after the other: one axis at a time for a full kernel window.

    A window is the product of its axes, so that K = k^D candidates a voxel become D times k, merged in between.
    """
    if relation.custom is not None:
        return [(tuple(range(relation.dim)), relation.custom)]
    rule = zip(relation.kernel, relation.dilation, relation.padding, strict=True)
    return [((axis,), tuple((d * t - p,) for t in range(k))) for axis, (k, d, p) in enumerate(rule)]


def _spread(coords: Tensor, bounds: Bounds, relation: Relation, form: str) -> Tensor:
    """The distinct cells that any offset reaches."""
    whole = _box(bounds, relation, None)
    for axes, offsets in _separable(relation):
        low, high = list(bounds.low), list(bounds.high)
        for axis in axes:
            low[axis], high[axis] = whole.low[axis], whole.high[axis]
        bounds = Bounds(tuple(low), tuple(high), bounds.batch)
        found = []
        for offset in offsets:
            out, kept = coords.clone(), torch.ones(len(coords), dtype=torch.bool, device=coords.device)
            for axis, o in zip(axes, offset, strict=True):
                value, there = _moved(coords[:, axis + 1].long(), o, relation.stride[axis], form)
                out[:, axis + 1] = value.int()
                kept &= there
            found.append(out if form == "times" else out[kept])
        coords, _ = morton_unique(torch.cat(found), bounds)
    return coords


def _kept(coords: Tensor, site: GridSpec) -> Tensor:
    """Less what lies outside the extent, where there is one."""
    if site.spatial_shape is None:
        return coords
    extent = torch.tensor(site.spatial_shape, dtype=torch.int32, device=coords.device)
    return coords[((coords[:, 1:] >= 0) & (coords[:, 1:] < extent)).all(dim=1)]
