"""Sizes settled before the coordinates are known: geometries and maps in buffers, of which nothing is read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pumice.coords.relation import Relation


class Rooms(Protocol):
    """How much room is taken for what only the device counts."""

    def room(self, place: Hashable, needed: Tensor, most: int) -> int:
        """Room at a place of the program: at most `most` is ever needed; needed: int32 [1] on the device, now."""
        ...


@dataclass(frozen=True, eq=False)
class Buffered:
    """Of a geometry: its coordinates lie in a buffer of which the first rows live, and so do those made of it.

    rooms: how large the buffers of other levels are. path: the relations that lead here from the first coordinates.
    poison: whether features of rows that do not live become NaN wherever a tensor is made, so that what reads them
    shows. trains: whether gradients are asked for, which rows that do not live must not add to.
    """

    rooms: Rooms
    path: tuple[Relation, ...] = ()
    poison: bool = False
    trains: bool = False


@dataclass(frozen=True, eq=False)
class Between:
    """Of a map: it lies between buffers. inputs, outputs: rows of it as it was found that live, int32 [1] each on the
    device; status: what is told that there was no room; place: names it among the maps of a program. late: what makes
    its storages on other streams, until all is over; met: the streams that wait for that already."""

    inputs: Tensor
    outputs: Tensor
    status: Tensor
    rooms: Rooms
    place: Hashable
    late: list[torch.cuda.Event] = field(default_factory=list)
    met: set[int] = field(default_factory=set)

    def behind(self, event: torch.cuda.Event) -> None:
        """Storages are there behind this event."""
        self.late.append(event)
        self.met.clear()

    def join(self) -> None:
        """Let what the current stream does from now on wait for the storages."""
        if not self.late:
            return
        stream = torch.cuda.current_stream(self.status.device)
        if stream.stream_id not in self.met:
            self.met.add(stream.stream_id)
            for event in self.late:
                stream.wait_event(event)

    def over(self) -> None:
        """`join`, at the end of a program: what is read later comes behind all of it."""
        self.join()
        self.late.clear()
