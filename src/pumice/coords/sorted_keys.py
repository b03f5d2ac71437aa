"""Neighbour search by bisection of sorted keys, in plain torch: the fallback of all structures, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pumice.coords.box import Bounds, KeySpace
from pumice.coords.buffer import DUPLICATE, RANGE, CoordBuffer, set_status
from pumice.coords.lookup import MapSchedule, Neighbours
from pumice.coords.relation import Relation
from pumice.errors import CoordinateError

_DEAD = 2**63 - 1  # The key of padding rows; no cell has it


class SortedKeys:
    """Row-major keys of a box, sorted, with their rows.
    In a box grown by a relation's reach every kernel offset is a constant key difference, and offsets of consecutive
    differences share one search. If the box has 2**63 cells or more, keys are built axis by axis from ranks among the
    keys so far (the wide path: any extents)."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        self._cloud = cloud
        self._table: _Narrow | _Wide = _table_of(cloud, (1,) * cloud.dim)
        live = cloud.valid_mask()
        set_status(cloud.status, RANGE, (live & ~_inside(cloud.coords, cloud.bounds)).any())
        keys = self._table.keys
        twice = (keys[1:] == keys[:-1]) & (keys[1:] != _DEAD)
        set_status(cloud.status, DUPLICATE, twice.any())

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return None

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def neighbours(self, outputs: CoordBuffer, relation: Relation) -> Neighbours:
        """See Lookup. rows is stored offset by offset."""
        volume, device = len(relation.offsets), outputs.device
        if self._cloud.capacity == 0 or outputs.capacity == 0 or volume == 0:
            return Neighbours(torch.full((outputs.capacity, volume), -1, dtype=torch.int32, device=device), None)
        reach = [max(abs(o[axis]) for o in relation.offsets) for axis in range(relation.dim)]
        # Outputs within reach of the box query up to twice as far; others have no neighbours.
        table = self._table  # read once: other threads may put another one there
        if isinstance(table, _Narrow) and not table.reaches([2 * r for r in reach]):
            table = self._table = _table_of(self._cloud, [max(1, 2 * r) for r in reach])
        met = table.search(outputs, relation, reach)
        if not outputs.exact:
            met = torch.where(outputs.valid_mask(), met, -1)
        return Neighbours(met.t(), None)


def _table_of(cloud: CoordBuffer, reach: Sequence[int]) -> _Narrow | _Wide:
    try:
        return _Narrow(cloud, KeySpace(cloud.bounds.grown(reach)))
    except CoordinateError:
        return _Wide(cloud)


class _Narrow:
    """Sorted keys of a box of less than 2**63 cells."""

    def __init__(self, cloud: CoordBuffer, space: KeySpace) -> None:
        self._bounds, self._space = cloud.bounds, space
        keys = space.keys(cloud.coords)
        if not cloud.exact:
            keys = torch.where(cloud.valid_mask(), keys, _DEAD)
        self.keys, self._rows = torch.sort(keys, stable=True)

    @property
    def nbytes(self) -> int:
        return 16 * len(self.keys)

    def reaches(self, reach: Sequence[int]) -> bool:
        grown = self._space.bounds
        return all(a - low >= r for a, low, r in zip(self._bounds.low, grown.low, reach, strict=True))

    def search(self, outputs: CoordBuffer, relation: Relation, reach: Sequence[int]) -> Tensor:
        """int32 [K, capacity]"""
        space, steps = self._space, [self._space.step(o) for o in relation.offsets]
        near = _inside(outputs.coords, self._bounds.grown(reach), relation.stride)
        base = torch.where(near, space.keys(outputs.coords, relation.stride), min(-max(steps), 0) - 1)
        found: list[Tensor] = [base] * len(steps)
        for taps in _runs(steps):
            self._find_run(base + steps[taps[0]], taps, found)
        return torch.stack(found)

    def _find_run(self, wanted: Tensor, taps: list[int], found: list[Tensor]) -> None:
        """Store the rows of the keys wanted, wanted + 1, ... in `found[tap]`, -1 if absent."""
        last = len(self.keys) - 1
        at = torch.searchsorted(self.keys, wanted)
        for distance, tap in enumerate(taps):
            place = at.clamp(max=last)
            hit = self.keys[place] == wanted + distance
            found[tap] = torch.where(hit, self._rows[place], -1).int()
            at += hit


class _Wide:
    """Sorted keys of a box of any extents: if the next axis would exceed 63 bits, keys become ranks first."""

    def __init__(self, cloud: CoordBuffer) -> None:
        self._bounds = cloud.bounds
        self._levels: list[Tensor | None] = []
        keys, cells = cloud.coords[:, 0].long(), max(cloud.bounds.batch, 1)
        known = cloud.valid_mask() & _inside(cloud.coords, cloud.bounds)
        for axis, (low, high) in enumerate(zip(cloud.bounds.low, cloud.bounds.high, strict=True)):
            level = None
            if cells * (high - low + 1) >= _DEAD:
                level = torch.sort(torch.where(known, keys, _DEAD))[0]
                keys, cells = torch.searchsorted(level, keys), len(level)
            self._levels.append(level)
            keys = keys * (high - low + 1) + cloud.coords[:, axis + 1].long() - low
            cells *= high - low + 1
        self.keys, self._rows = torch.sort(torch.where(known, keys, _DEAD), stable=True)

    @property
    def nbytes(self) -> int:
        return 16 * len(self.keys) + 8 * sum(len(level) for level in self._levels if level is not None)

    def search(self, outputs: CoordBuffer, relation: Relation, reach: Sequence[int]) -> Tensor:
        """int32 [K, capacity]"""
        scaled = outputs.coords.long() * torch.tensor((1, *relation.stride), device=outputs.device)
        offsets = (torch.tensor((0, *o), device=outputs.device) for o in relation.offsets)
        return torch.stack([self._rows_of(scaled + offset) for offset in offsets])

    def _rows_of(self, coords: Tensor) -> Tensor:
        known, keys = _inside(coords, self._bounds), coords[:, 0]
        axes = zip(self._levels, self._bounds.low, self._bounds.high, strict=True)
        for axis, (level, low, high) in enumerate(axes):
            if level is not None:
                keys, hit = _bisect(level, keys)
                known &= hit
            keys = keys * (high - low + 1) + coords[:, axis + 1] - low
        at, hit = _bisect(self.keys, torch.where(known, keys, -1))
        return torch.where(hit, self._rows[at], -1).int()


def _bisect(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(index of each wanted key in a sorted list, True if present)."""
    at = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return at, keys[at] == wanted


def _inside(coords: Tensor, bounds: Bounds, scale: Sequence[int] | None = None) -> Tensor:
    inside = (coords[:, 0] >= 0) & (coords[:, 0] < bounds.batch)
    for axis, (low, high) in enumerate(zip(bounds.low, bounds.high, strict=True)):
        value = coords[:, axis + 1].long() * (scale[axis] if scale else 1)
        inside &= (value >= low) & (value <= high)
    return inside


def _runs(steps: Sequence[int]) -> list[list[int]]:
    """Kernel offsets grouped by consecutive key differences: one search serves a group."""
    runs: list[list[int]] = []
    for tap in sorted(range(len(steps)), key=lambda t: steps[t]):
        if runs and steps[tap] == steps[runs[-1][-1]] + 1:
            runs[-1].append(tap)
        else:
            runs.append([tap])
    return runs
