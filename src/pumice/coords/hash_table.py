"""Neighbour search by hash table, dense grid or bitmap: built by kernels, queried for all offsets by one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pumice.coords.box import INT32_MAX, Bounds
from pumice.coords.buffer import CoordBuffer, offset_table
from pumice.coords.lookup import WORD, MapSchedule, Neighbours, lanes_of, padded, prefix_counts
from pumice.coords.relation import Relation
from pumice.runtime.launch import kernel, triton_unavailable_reason

MARGINS = {"hash": 8, "grid": 2, "bitmap": 2, "wide": 0}
"""Cells beyond each side of the box that have keys: an offset adds a constant to a row's key."""
BLOCKS = {"hash": 128, "grid": 256, "bitmap": 256, "wide": 128}
"""Cells that a program queries: few for hash tables, as the longest probe sequence delays the program."""
_INSERT_BLOCK = 128


class Table:
    """A hash table, dense grid or bitmap, built and queried by kernels."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule, kind: str) -> None:
        self._cloud, self._kind, self._schedule = cloud, kind, schedule
        self._margin = MARGINS[kind]
        self._bounds = _key_bounds(cloud, kind)
        self._bits, self._last = _row_bits(cloud), (1 << table_bits(cloud.capacity, schedule.load)) - 1
        self._table = self._empty_table()
        zero = offset_table(((0,) * cloud.dim,), cloud.device)
        numbers = (*_box(self._bounds, (1,) * cloud.dim), self._margin, self._bits, self._last)
        tensors = (cloud.coords, cloud.count, zero, self._table, cloud.status)
        constants = {"D": cloud.dim, "KIND": kind, "BLOCK": _INSERT_BLOCK}
        programs = -(-cloud.capacity // _INSERT_BLOCK)
        kernel("lookup_kernels.insert")(programs, tensors, numbers, constants)
        self._values = self._table
        if kind == "bitmap":
            self._table, _ = prefix_counts(self._table)
            self._values = torch.empty(cloud.capacity, dtype=torch.int32, device=cloud.device)
            tensors = (cloud.coords, cloud.count, zero, self._table, self._values)
            constants = {"D": cloud.dim, "BLOCK": _INSERT_BLOCK}
            kernel("lookup_kernels.number_rows")(programs, tensors, numbers[:-2], constants)

    def _empty_table(self) -> Tensor:
        device = self._cloud.device
        if self._kind == "grid":
            return torch.full((self._bounds.cells,), INT32_MAX, dtype=torch.int32, device=device)
        if self._kind == "bitmap":
            return torch.zeros(-(-self._bounds.cells // 32), dtype=torch.int32, device=device)
        if self._kind == "hash":
            return torch.full((self._last + 1,), 2**63 - 1, dtype=torch.int64, device=device)
        return torch.full((self._last + 1 + _INSERT_BLOCK,), -1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        held = {id(t): t for t in (self._table, self._values)}
        return sum(t.numel() * t.element_size() for t in held.values())

    def neighbours(self, outputs: CoordBuffer, relation: Relation, mirrored: bool | None = None) -> Neighbours:
        """See Lookup. mirrored: query half of a submanifold map's offsets and write each hit twice (no masks); by
        default if the schedule sets it and the map is submanifold."""
        if mirrored is None:
            mirrored = self._schedule.mirrored and relation.mirrored and outputs.coords is self._cloud.coords
        volume, capacity, device = len(relation.offsets), outputs.capacity, outputs.device
        rows = torch.empty(capacity, volume, dtype=torch.int32, device=device)
        masks = torch.empty(capacity, -(-volume // WORD), dtype=torch.int32, device=device)
        if mirrored:
            rows.fill_(-1)
        lanes = lanes_of(volume // 2 if mirrored else volume)
        block = max(1, (self._schedule.block or BLOCKS[self._kind]) // lanes)
        reach = self._reach(outputs, relation)
        constants = {"D": outputs.dim, "K": volume, "KIND": self._kind, "EACH": reach is None, "MIRROR": mirrored}
        constants |= {"ROWS": block, "LANES": lanes}
        box = _box(self._bounds, relation.stride)
        numbers = (*box, self._margin, reach or 0, self._bits, self._last, capacity)
        offsets = offset_table(relation.offsets, device)
        held = (self._table, self._values, self._cloud.coords)
        tensors = (outputs.coords, outputs.count, offsets, *held, rows, masks)
        kernel("lookup_kernels.neighbours")(-(-capacity // block), tensors, numbers, constants, self._schedule.warps)
        return Neighbours(rows, None if mirrored else masks)

    def _reach(self, outputs: CoordBuffer, relation: Relation) -> int | None:
        """Distance from the box within which rows may have neighbours; None: margin too narrow, check each cell."""
        most = relation.reach
        if self._kind == "wide":
            return None
        if outputs.coords is self._cloud.coords and all(s == 1 for s in relation.stride):
            # Its own rows are inside the box.
            return 0 if most <= self._margin else None
        return most if 2 * most <= self._margin else None


class HashTable(Table):
    """Open addressing with double hashing: one int64 per slot, key << bits | row, if this fits into 63 bits.
    Else a slot holds only the row, and lookups compare coordinates ("wide"). Keys 4n to 4n + 3 are adjacent."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        super().__init__(
            cloud, schedule, "hash" if _key_bounds(cloud, "hash").cells << _row_bits(cloud) < 2**63 else "wide"
        )

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return triton_unavailable_reason(cloud.coords)


class DenseGrid(Table):
    """One int32 per cell of the box (TorchSparse, MLSys 2022, section 4.4)."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        super().__init__(cloud, schedule, "grid")

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return _too_many(cloud, "grid", schedule.cells)


class Bitmap(Table):
    """One bit per cell of the box, prefix counts, and the row of each set bit."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        super().__init__(cloud, schedule, "bitmap")

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return _too_many(cloud, "bitmap", 16 * schedule.cells)


def _too_many(cloud: CoordBuffer, kind: str, most: int) -> str | None:
    """Reason why an entry per cell of the box is not supported, or None."""
    cells = _key_bounds(cloud, kind).cells
    return triton_unavailable_reason(cloud.coords) or (
        f"the box has {cells} cells, a {kind} at most {most}" if cells > most else None
    )


def _key_bounds(cloud: CoordBuffer, kind: str) -> Bounds:
    """The box with its margin."""
    return cloud.bounds.grown([MARGINS[kind]] * cloud.dim)


def table_bits(capacity: int, load: float) -> int:
    """log2 of the number of slots for `capacity` rows at a load factor of at most `load`."""
    return max(6, math.ceil(math.log2(max(1, capacity) / load)))


def _row_bits(cloud: CoordBuffer) -> int:
    return max(1, (cloud.capacity - 1).bit_length())


def _box(bounds: Bounds, steps: Sequence[int]) -> tuple[int, ...]:
    """A box as kernel arguments: batch, four lows, four extents, four steps."""
    return (bounds.batch, *padded(bounds.low, 0), *padded(bounds.extents, 1), *padded(steps, 1))
