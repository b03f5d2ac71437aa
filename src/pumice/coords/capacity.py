"""Sizes settled before the coordinates are known: geometries and maps in buffers, of which nothing is read."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from pumice.coords.relation import Relation
from pumice.errors import CaptureError
from pumice.runtime.streams import PendingEvents

_STEP = 64
"""Capacities of levels are multiples of it, no two the same."""

Shares = float | Mapping[Any, float] | None
"""Room of inner levels, as a share of the first one's: of all, or by stride (an int or one per axis)."""


class Capacities(Protocol):
    """How much room is taken for what only the device counts."""

    def capacity(self, place: Hashable, needed: Tensor, most: int) -> int:
        """Room at a place of the program: at most `most` is ever needed; needed: int32 [1] on the device, now."""
        ...

    def pieces(self, place: Hashable) -> set[int]:
        """How long pieces of the runs of what has its room there are wanted: kept from pass to pass, to be added to."""
        ...


@dataclass(frozen=True, eq=False)
class BufferedState:
    """Of a geometry: its coordinates lie in a buffer of which the first rows live, and so do those made of it.

    rooms: how large the buffers of other levels are. path: the relations that lead here from the first coordinates.
    poison: whether features of rows that do not live become NaN wherever a tensor is made, so that what reads them
    shows. trains: whether gradients are asked for, which rows that do not live must not add to.
    """

    rooms: Capacities
    path: tuple[Relation, ...] = ()
    poison: bool = False
    trains: bool = False


@dataclass(frozen=True, eq=False)
class BufferedMapState:
    """Of a map: it lies between buffers. inputs, outputs: rows of it as it was found that live, int32 [1] each on the
    device; status: what is told that there was no room; place: names it among the maps of a program. late: what other
    streams make, by the keys of storages; under None the map itself.
    """

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
    """Rooms as they are found to be needed for an example of `count` voxels, with a margin, for `capacity` voxels.

    It waits for the device at every place that it meets for the first time. least: rooms that are not made smaller.
    """

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
        """What was planned."""
        return FixedCapacities(self.rooms, self._pieces)

    def _planned(self, place: Any, needed: Tensor, most: int) -> int:
        what, *_, last = place
        share = _share(self._shares, last) if what == "rows" else None
        # Without tiles there is no number.
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
    """Rooms that were planned."""

    rooms: Mapping[Any, int]
    asked: dict[Any, set[int]] = field(default_factory=dict)

    def levels(self) -> Iterator[tuple[Any, int]]:
        """The places of levels, with their rooms."""
        return ((place, room) for place, room in self.rooms.items() if place[0] == "rows")

    def capacity(self, place: Hashable, needed: Tensor, most: int) -> int:
        """See Capacities."""
        found = self.rooms.get(place)
        if found is None:
            raise CaptureError(
                "the network asks for coordinates or maps that it did not ask for before: what it does must not depend "
                f"on the scene ({place})"
            )
        return found

    def pieces(self, place: Hashable) -> set[int]:
        """See Capacities."""
        return self.asked.setdefault(place, set())
