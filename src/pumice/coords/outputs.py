"""Output coordinates of a relation: distinct candidates within bounds, in (batch, Morton) order, and their count.

Equivalent implementations: bricks (Triton kernels), sorted codes (plain torch without host synchronisation), bricks
in C on a CPU, and a fallback for any box (plain torch with host synchronisation)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction
from functools import lru_cache, partial

import torch
from torch import Tensor

from pumice.coords import bricks, native_maps
from pumice.coords.box import INT32_MAX, Bounds
from pumice.coords.bricks import Bricks, BrickSpace, Stencil
from pumice.coords.buffer import OVERFLOW, CoordBuffer, offset_table, read, set_status
from pumice.coords.codes import TABLE_ENTRIES, CodeLayout, interleave, morton_unique
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.lookup import MapSchedule
from pumice.coords.native_maps import Moves
from pumice.coords.relation import Relation
from pumice.errors import CoordinateError
from pumice.runtime.launch import cached_device_constant, has_triton, to_device_async

Axis = tuple[int, int, int, int, int]  # Minimum and maximum coordinate, minimum and maximum offset, stride


def make_outputs(
    inputs: CoordBuffer, site: GridSpec, relation: Relation, schedule: MapSchedule | None = None
) -> Outputs:
    """The outputs of a relation on coordinates with metadata `site`, by the fastest available implementation."""
    site = site_of(site, relation)
    if inputs.capacity == 0 or 0 in (site.spatial_shape or ()):
        return TorchOutputs(inputs, relation, site)
    if not has_triton(inputs.coords):
        way = NativeOutputs if NativeOutputs.available(inputs, relation, site) else TorchOutputs
        return way(inputs, relation, site)
    fused = schedule is None or schedule.fused
    if fused and bricks.refusal(inputs.coords, site.bounds, Stencil.of_neighbours(relation)) is None:
        return BrickOutputs(inputs, relation, site)
    return SortedOutputs(inputs, relation, site) if codes_fit(site.bounds) else TorchOutputs(inputs, relation, site)


def level_key(relation: Relation) -> Hashable:
    """Key that relations with equal outputs share, or None: floor(in / stride) does not depend on the kernel."""
    return ("floor_unique", relation.stride) if relation.policy == "floor_unique" else None


def site_of(site: GridSpec, relation: Relation) -> GridSpec:
    """Metadata of a relation's outputs on inputs with metadata `site`; no host synchronisation."""
    finer = relation.policy == "transposed_support"
    factor = tuple([Fraction(1, s) for s in relation.stride]) if finer else relation.stride
    bounded = site.spatial_shape is not None and relation.bounded
    shape = relation.output_shape(site.spatial_shape) if bounded and site.spatial_shape else None
    return site.scaled(factor, shape, _box(site.bounds, relation, shape))


def _box(bounds: Bounds, relation: Relation, shape: tuple[int, ...] | None) -> Bounds:
    axis_box = _AXIS_BOXES[relation.policy]
    low, high, axes = [], [], zip(bounds.low, bounds.high, relation.spans, relation.stride, strict=True)
    for axis, (least, most, span, stride) in enumerate(axes):
        first, last = axis_box((least, most, *span, stride))
        if shape is not None:
            # Outputs outside the extent are dropped.
            first, last = max(first, 0), min(last, shape[axis] - 1)
        if first > last:
            # An empty range becomes one cell of the extent, which is not reached.
            first = last = max(last, 0)
        low.append(first)
        high.append(last)
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
    """Outputs by brick kernels, which generate candidates, clip them to the box, count and order the distinct ones.

    Interface of all outputs: count int32 [1], on the device; cloud(): a buffer with the inputs' status, padded with -1
    (coords_only: without the table); geometry(): for the value of `count`; table(): int32 [outputs, K] ([inputs, K]
    for transposed_support), None if it must be searched."""

    def __init__(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> None:
        self._inputs, self._relation, self._site = inputs, relation, site
        self._reach, self._meets = Stencil.of_outputs(relation), Stencil.of_neighbours(relation)
        most = min(INT32_MAX, inputs.capacity * self._reach.lanes)
        self._bricks = Bricks.of(inputs, self._reach, site.bounds, most)
        self._table: Tensor | None = None

    @property
    def count(self) -> Tensor:
        return self._bricks.count

    def cloud(self, capacity: int, coords_only: bool = False) -> CoordBuffer:
        way = partial(self._bricks.coords, self._inputs, self._reach) if coords_only else self._placed
        coords, valid = way(capacity)
        return CoordBuffer(coords, valid, self._site.bounds, self._inputs.status, needed=self.count)

    def geometry(self, count: int) -> Geometry:
        return Geometry(self._placed(count)[0], self._site)

    def table(self, capacity: int) -> Tensor | None:
        if self._relation.policy == "transposed_support":
            return self._bricks.transposed_rows(self._inputs, self._meets, capacity)
        if self._table is None or len(self._table) != capacity:
            return self._bricks.rows(self._inputs, self._meets, capacity)
        return self._table

    def _placed(self, capacity: int) -> tuple[Tensor, Tensor]:
        """(coordinates, number of valid rows); computes the table in the same pass if every output has an input."""
        if self._relation.policy == "transposed_support" or not _every_output_has_input(self._relation):
            return self._bricks.coords(self._inputs, self._reach, capacity)
        self._table, *placed = self._bricks.coords_and_rows(self._inputs, self._meets, capacity)
        return placed[0], placed[1]


class SortedOutputs:
    """Outputs by sorting the candidates' codes and dropping duplicates, without host synchronisation."""

    def __init__(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> None:
        self._site, self._inputs = site, inputs
        self._space = BrickSpace.of(site.bounds)
        codes = candidate_codes(self._inputs, Stencil.of_outputs(relation), self._space)
        self._codes = torch.sort(codes)[0]
        new = self._codes != _NO_CODE
        new[1:] &= self._codes[1:] != self._codes[:-1]
        self._places = new.cumsum(0, dtype=torch.int64)
        self._new = new

    @property
    def count(self) -> Tensor:
        return self._places[-1:].int()

    def cloud(self, capacity: int, coords_only: bool = False) -> CoordBuffer:
        return _buffered(self._coords(capacity), self.count, self._site, self._inputs)

    def geometry(self, count: int) -> Geometry:
        return Geometry(self._coords(count), self._site)

    def table(self, capacity: int) -> Tensor | None:
        return None

    def _coords(self, capacity: int) -> Tensor:
        # Duplicates and outputs beyond the capacity go to a dummy row past the last.
        set_status(self._inputs.status, OVERFLOW, self._places[-1] > capacity)
        place = torch.where(self._new & (self._places <= capacity), self._places - 1, capacity)
        codes = self._codes.new_full((capacity + 1,), _NO_CODE).scatter_(0, place, self._codes)[:capacity]
        return coords_of_codes(codes, self._space)


class TorchOutputs:
    """Outputs in plain torch with host synchronisation: the fallback for any box."""

    def __init__(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> None:
        self._coords = self._distinct(inputs, relation, site)
        self._site, self._inputs = site, inputs
        if len(self._coords) > INT32_MAX:
            raise CoordinateError(f"{len(self._coords)} output voxels; indices hold at most {INT32_MAX}")

    def _distinct(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> Tensor:
        coords = inputs.coords
        if not inputs.exact:
            # Inputs outside the box are dropped, as in the other implementations.
            coords = coords[inputs.valid_mask() & inputs.bounds.contains(coords)]
        return distinct_outputs(coords, inputs.bounds, relation, site)

    @property
    def count(self) -> Tensor:
        return torch.full((1,), len(self._coords), dtype=torch.int32, device=self._coords.device)

    def cloud(self, capacity: int, coords_only: bool = False) -> CoordBuffer:
        self._inputs.status.bitwise_or_(OVERFLOW * (len(self._coords) > capacity))
        coords = self._coords.new_full((capacity, self._coords.shape[1]), -1)
        coords[: len(self._coords)] = self._coords[:capacity]
        return _buffered(coords, self.count, self._site, self._inputs)

    def geometry(self, count: int) -> Geometry:
        return Geometry(self._coords[:count], self._site)

    def table(self, capacity: int) -> Tensor | None:
        return None


class NativeOutputs(TorchOutputs):
    """As TorchOutputs, in C."""

    def _distinct(self, inputs: CoordBuffer, relation: Relation, site: GridSpec) -> Tensor:
        moves = _moves(Stencil.of_outputs(relation))
        assert moves is not None
        return native_maps.distinct_cells(inputs, moves, site.bounds)

    @staticmethod
    def available(inputs: CoordBuffer, relation: Relation, site: GridSpec) -> bool:
        """True if C kernels find these outputs. site: metadata of the outputs."""
        if not codes_fit(site.bounds) or native_maps.refusal(inputs.coords, inputs.bounds) is not None:
            return False
        longest = max(map(len, CodeLayout.of(site.bounds).places))
        return 1 << longest <= TABLE_ENTRIES and _moves(Stencil.of_outputs(relation)) is not None


@lru_cache(maxsize=256)
def _moves(reach: Stencil) -> Moves | None:
    """The moves of a stencil; None if there are too many to tabulate."""
    none, ones, device = (0,) * len(reach.steps), (1,) * len(reach.steps), torch.device("cpu")
    if max(map(abs, (*reach.steps, *(o for offset in reach.offsets for o in offset))), default=0) > INT32_MAX:
        return None
    if reach.form == "times" or not reach.offsets:
        shifts = offset_table(reach.offsets, device).view(1, -1, len(reach.steps))
        return Moves(none, reach.steps, ones, none, shifts, shifts.new_tensor([shifts.shape[1]]))
    if reach.form == "floor":
        still = torch.zeros(1, 1, len(reach.steps), dtype=torch.int32, device=device)
        return Moves(none, ones, reach.steps, none, still, still.new_ones(1))
    if math.prod(reach.steps) * reach.lanes > bricks.KINDS:
        return None
    taps = bricks.residue_lists(reach, device)
    radix, lanes = (math.prod(reach.steps[axis + 1 :]) for axis in range(len(reach.steps))), (taps[..., 0] >= 0).sum(1)
    return Moves(reach.lowest_offset, ones, reach.steps, tuple(radix), taps[..., 1:].contiguous(), lanes.int())


Outputs = BrickOutputs | SortedOutputs | TorchOutputs


def read_counts(geometry: Geometry, counts: Sequence[Tensor]) -> list[int]:
    """Values of output counts, read in one transfer with the inputs' status; raises if that reports an error."""
    waiting = geometry.unsettled
    values = read([*counts] if waiting is None else [*counts, waiting])
    geometry.settle(0 if waiting is None else values[-1][0])
    return [value for (value,) in values[: len(counts)]]


def _buffered(coords: Tensor, needed: Tensor, site: GridSpec, inputs: CoordBuffer) -> CoordBuffer:
    """A buffer of outputs. needed: their number, int32 [1], possibly above the capacity."""
    return CoordBuffer(coords, needed.clamp(max=len(coords)), site.bounds, inputs.status, needed=needed)


def max_outputs(inputs: int, relation: Relation, site: GridSpec) -> int:
    """Upper bound of the number of outputs of `inputs` inputs. site: metadata of the outputs."""
    most = inputs * Stencil.of_outputs(relation).lanes
    return min(most, site.bounds.cells, INT32_MAX)


def _every_output_has_input(relation: Relation) -> bool:
    """True if every output has an input at one of the relation's offsets; False if unsure."""
    if relation.policy == "support":
        return True
    rests = {tuple(o % s for o, s in zip(offset, relation.stride, strict=True)) for offset in relation.offsets}
    inside = all(0 <= o < s for offset in relation.offsets for o, s in zip(offset, relation.stride, strict=True))
    return inside and len(rests) == math.prod(relation.stride)


_NO_CODE = 2**63 - 1


def codes_fit(bounds: Bounds) -> bool:
    """True if codes of a box's cells, with the batch index, fit into one word."""
    return BrickSpace.of(bounds).bits + bounds.batch.bit_length() <= 62


def candidate_codes(cloud: CoordBuffer, reach: Stencil, space: BrickSpace) -> Tensor:
    """int64 [K * N]: Morton code of the cell that each input reaches at each offset, _NO_CODE if none."""
    box, layout, coords = space.bounds, space.layout, cloud.coords.long()
    offsets, items = offset_table(reach.offsets, cloud.device), coords[:, 0]
    inside, values = (cloud.valid_mask() & (items >= 0) & (items < box.batch))[None], []
    for axis, step in enumerate(reach.steps):
        value, whole = _moved(coords[:, axis + 1], offsets[:, axis, None], step, reach.form)
        inside = inside & whole & (value >= box.low[axis]) & (value <= box.high[axis])
        values.append(value + layout.bias[axis])
    (code,) = interleave([torch.where(inside, value, 0) for value in values], layout.places, 1)
    return torch.where(inside, code | items << space.bits, _NO_CODE).flatten()


def _moved(values: Tensor, offset: Tensor | int, step: int, form: str) -> tuple[Tensor, Tensor]:
    """(coordinate reached along an axis, True if it exists); [K, N] for values [N] and offsets [K, 1]."""
    if form == "times":
        return values * step + offset, torch.ones_like(values, dtype=torch.bool)
    shifted = values - (offset if form == "over" else 0 * offset)
    share = torch.div(shifted, step, rounding_mode="floor")
    return share, (share * step == shifted) | (form == "floor")


def coords_of_codes(codes: Tensor, space: BrickSpace) -> Tensor:
    """int32 [N, 1+D]: coordinates of Morton codes, -1 for _NO_CODE."""
    columns = [codes >> space.bits]
    for places, bias in zip(space.layout.places, space.layout.bias, strict=True):
        of_code, of_value = _bit_positions(places, codes.device)
        columns.append((((codes[:, None] >> of_code) & 1) << of_value).sum(1) - bias)
    coords = torch.stack(columns, dim=1).int()
    return torch.where((codes != _NO_CODE)[:, None], coords, -1)


@cached_device_constant(256)
def _bit_positions(places: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(positions of an axis's bits in a code, in a value), int64 each."""
    of_code = torch.tensor(places, dtype=torch.int64)
    return to_device_async(of_code, device), to_device_async(torch.arange(len(places)), device)


def _floor_unique(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """Distinct floor(in / stride)."""
    stride = torch.tensor((1, *relation.stride), dtype=torch.int32, device=coords.device)
    coords = torch.div(coords, stride, rounding_mode="floor")
    return _drop_out_of_bounds(morton_unique(coords, _box(bounds, relation, None))[0], site)


def _support(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """Every out with stride * out + offset = in for some input: (in - offset) / stride, if divisible."""
    return _drop_out_of_bounds(_spread(coords, bounds, relation, "over"), site)


def _transposed_support(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """Every out = stride * in + offset."""
    return _drop_out_of_bounds(_spread(coords, bounds, relation, "times"), site)


_TWINS = {"floor_unique": _floor_unique, "support": _support, "transposed_support": _transposed_support}


def distinct_outputs(coords: Tensor, bounds: Bounds, relation: Relation, site: GridSpec) -> Tensor:
    """The outputs of a relation on coordinates in a box, in plain torch. site: metadata of the outputs."""
    return _TWINS[relation.policy](coords, bounds, relation, site)


_AxisOffsets = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def _separable(relation: Relation) -> list[_AxisOffsets]:
    """Passes (axes, offsets along these), applied in turn: custom offsets take one, a window one per axis.
    D passes of k candidates per voxel, with duplicates merged in between, replace one pass of K = k^D."""
    if relation.custom is not None:
        return [(tuple(range(relation.dim)), relation.custom)]
    rule = zip(relation.kernel, relation.dilation, relation.padding, strict=True)
    return [((axis,), tuple((d * t - p,) for t in range(k))) for axis, (k, d, p) in enumerate(rule)]


def _spread(coords: Tensor, bounds: Bounds, relation: Relation, form: str) -> Tensor:
    """The distinct cells reached at any offset. form: see Stencil."""
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


def _drop_out_of_bounds(coords: Tensor, site: GridSpec) -> Tensor:
    if site.spatial_shape is None:
        return coords
    extent = torch.tensor(site.spatial_shape, dtype=torch.int32, device=coords.device)
    return coords[((coords[:, 1:] >= 0) & (coords[:, 1:] < extent)).all(dim=1)]
