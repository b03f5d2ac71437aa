"""Fixed capacities of geometries and kernel maps in a CUDA graph, so that no size is read back from the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from pumice.coords.relation import Relation
from pumice.errors import CaptureError
from pumice.runtime.streams import PendingEvents

_STEP = 64  # Capacities of levels are distinct multiples of it
_MAP_MARGIN = 1.5  # Extra factor for kernel maps: scenes differ most in neighbours; extra capacity costs only memory

Shares = float | Mapping[Any, float] | None
"""Capacity of coarser levels as a share of the finest: one for all, or by stride (an int or one per axis)."""


@dataclass(frozen=True, eq=False)
class BufferedState:
    """State of a geometry whose coordinates, like those of levels derived from it, are in a buffer with padding rows.
    capacities: of levels and maps. path: relations that lead here from the network's input. poison: fill features of
    padding rows with NaN, to expose reads of them. trains: gradients are required; padding rows must not contribute."""

    capacities: Capacities
    path: tuple[Relation, ...] = ()
    poison: bool = False
    trains: bool = False


@dataclass(frozen=True, eq=False)
class BufferedMapState:
    """State of a map between buffers. inputs, outputs: valid rows of the untransposed map, int32 [1] on the device;
    status: receives OVERFLOW; key: of the map in `capacities`. pending_events: of side streams, by storage key, None
    for the map itself."""

    inputs: Tensor
    outputs: Tensor
    status: Tensor
    capacities: Capacities
    key: Hashable

    @cached_property
    def pending_events(self) -> PendingEvents:
        return PendingEvents(self.status.device)


class CapacityPlanner:
    """Capacities planned from an example of `count` voxels, with a host synchronisation per buffer, times margin *
    capacity / count, for kernel maps also times _MAP_MARGIN. least: minimum capacities by key."""

    def __init__(
        self, capacity: int, count: int, margin: float, shares: Shares, least: Mapping[Any, int] | None = None
    ) -> None:
        self._scale, self._capacity, self._shares = margin * capacity / count, capacity, shares
        self._minima = least or {}
        self.capacities: dict[Hashable, int] = {}
        self._taken, self._lengths = {capacity}, dict[Hashable, set[int]]()

    def capacity(self, key: Hashable, needed: Tensor, most: int) -> int:
        """Capacity of the buffer `key`. needed: int32 [1] on the device, entries in use; most: maximum of `needed`."""
        if key not in self.capacities:
            self.capacities[key] = self._planned(key, needed, most)
        return self.capacities[key]

    def planned(self, key: Hashable) -> int | None:
        """Capacity of the buffer `key`; None if not planned yet."""
        return self.capacities.get(key)

    def piece_lengths(self, key: Hashable) -> set[int]:
        """Maximum lengths of the pieces into which runs of `key` are cut; callers add to the set."""
        return self._lengths.setdefault(key, set())

    def to_fixed(self) -> FixedCapacities:
        """The capacities planned so far."""
        return FixedCapacities(self.capacities, self._lengths)

    def _planned(self, key: Any, needed: Tensor, most: int) -> int:
        what, *_, last = key
        share = _share(self._shares, last) if what == "rows" else None
        # `needed` is empty for a map without tiles.
        scale = self._scale if what == "rows" else self._scale * _MAP_MARGIN
        wanted = scale * sum(needed.tolist()) if share is None else share * self._capacity
        found = max(1, min(most, math.ceil(wanted)), self._minima.get(key, 0))
        if what != "rows":
            return found
        found = -(-found // _STEP) * _STEP
        while found in self._taken:
            found += _STEP
        self._taken.add(found)
        return found


def _share(shares: Shares, stride: tuple[Any, ...]) -> float | None:
    if shares is None or isinstance(shares, float | int):
        return shares
    alike = stride[0] if len(set(stride)) == 1 else None
    return shares.get(stride, shares.get(alike))


@dataclass(frozen=True, eq=False)
class FixedCapacities:
    """Capacities planned by a CapacityPlanner; others raise CaptureError."""

    capacities: Mapping[Any, int]
    lengths_by_key: dict[Any, set[int]] = field(default_factory=dict)

    def levels(self) -> Iterator[tuple[Any, int]]:
        """Keys of levels with their capacities."""
        return ((key, capacity) for key, capacity in self.capacities.items() if key[0] == "rows")

    def capacity(self, key: Hashable, needed: Tensor, most: int) -> int:
        """See CapacityPlanner. Raises CaptureError for a buffer that was not planned."""
        return self.planned(key)

    def planned(self, key: Hashable) -> int:
        """See CapacityPlanner. Raises CaptureError for a buffer that was not planned."""
        found = self.capacities.get(key)
        if found is None:
            raise CaptureError(
                f"the network needs coordinates or a map it did not use before ({key}): its control flow must not "
                "depend on the scene"
            )
        return found

    def piece_lengths(self, key: Hashable) -> set[int]:
        """See CapacityPlanner."""
        return self.lengths_by_key.setdefault(key, set())


Capacities = CapacityPlanner | FixedCapacities
