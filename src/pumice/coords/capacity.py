"""Fixed capacities of geometries and kernel maps in a CUDA graph, so that no size is read back from the device."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from pumice.coords.relation import Relation
from pumice.errors import CaptureError
from pumice.runtime.streams import PendingEvents

_STEP = 64  # Capacities of levels are distinct multiples of this

Shares = float | Mapping[Any, float] | None
"""Capacity of coarser levels as a share of the finest: one for all, or by stride (an int or one per axis)."""


class Capacities(Protocol):
    """Capacities of buffers whose counts stay on the device."""

    def capacity(self, place: Hashable, needed: Tensor, most: int) -> int:
        """Capacity of the buffer with key `place`, at most `most`. needed: int32 [1] on device, entries in use."""
        ...

    def pieces(self, place: Hashable) -> set[int]:
        """Maximum piece lengths into which runs at `place` are to be split; callers add to this lasting set."""
        ...


@dataclass(frozen=True, eq=False)
class BufferedState:
    """State of a geometry whose coordinates, and those of levels derived from it, are in buffers with padding rows.
    rooms: capacities of other levels. path: relations from the first coordinates to here. poison: fill features of
    padding rows with NaN, to expose reads of them. trains: gradients are required; padding rows must not contribute."""

    rooms: Capacities
    path: tuple[Relation, ...] = ()
    poison: bool = False
    trains: bool = False


@dataclass(frozen=True, eq=False)
class BufferedMapState:
    """State of a map between buffers. inputs, outputs: numbers of valid rows before transposition, int32 [1] on
    device; status: receives OVERFLOW; place: key of the map within a program. late: pending events of other streams
    by storage key, None for the map itself."""

    inputs: Tensor
    outputs: Tensor
    status: Tensor
    rooms: Capacities
    place: Hashable
    late: PendingEvents = field(default_factory=PendingEvents)

    def join(self, key: Hashable) -> None:
        """See PendingEvents."""
        self.late.join(key, self.status.device)

    def built(self, key: Hashable) -> None:
        """See PendingEvents."""
        self.late.built(key, self.status.device)

    def tells(self) -> None:
        """See PendingEvents."""
        self.late.tells(self.status.device)

    def told(self) -> None:
        """See PendingEvents."""
        self.late.told(self.status.device)

    def over(self) -> None:
        """See PendingEvents."""
        self.late.over(self.status.device)


class CapacityPlanner:
    """Capacities from an example of `count` voxels (a host synchronisation per place), scaled with a margin to
    `capacity` voxels. least: minima by place."""

    def __init__(
        self, capacity: int, count: int, margin: float, shares: Shares, least: Mapping[Any, int] | None = None
    ) -> None:
        self._scale, self._capacity, self._shares = margin * capacity / count, capacity, shares
        self._least = least or {}
        self.rooms: dict[Hashable, int] = {}
        self._taken, self._pieces = {capacity}, dict[Hashable, set[int]]()

    def capacity(self, place: Hashable, needed: Tensor, most: int) -> int:
        """See Capacities."""
        if place not in self.rooms:
            self.rooms[place] = self._planned(place, needed, most)
        return self.rooms[place]

    def pieces(self, place: Hashable) -> set[int]:
        """See Capacities."""
        return self._pieces.setdefault(place, set())

    def settled(self) -> FixedCapacities:
        """The planned capacities."""
        return FixedCapacities(self.rooms, self._pieces)

    def _planned(self, place: Any, needed: Tensor, most: int) -> int:
        what, *_, last = place
        share = _share(self._shares, last) if what == "rows" else None
        # No tiles: sum of [].
        wanted = self._scale * sum(needed.tolist()) if share is None else share * self._capacity
        found = max(1, min(most, math.ceil(wanted)), self._least.get(place, 0))
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
    """Capacities planned before."""

    rooms: Mapping[Any, int]
    asked: dict[Any, set[int]] = field(default_factory=dict)

    def levels(self) -> Iterator[tuple[Any, int]]:
        """Places of levels with their capacities."""
        return ((place, room) for place, room in self.rooms.items() if place[0] == "rows")

    def capacity(self, place: Hashable, needed: Tensor, most: int) -> int:
        """See Capacities. Raises CaptureError for a place that was not planned."""
        found = self.rooms.get(place)
        if found is None:
            raise CaptureError(
                f"the network needs coordinates or a map it did not use before ({place}): its control flow must not "
                "depend on the scene"
            )
        return found

    def pieces(self, place: Hashable) -> set[int]:
        """See Capacities."""
        return self.asked.setdefault(place, set())
