"""Streams and events of CUDA: what waits for what, and whether a graph is being captured."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

FIRST = -1
"""The priority of streams on which maps are made: before what fills the device."""


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph is captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind all that the stream was given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


_LEVEL = "coords", "found"
"""What other streams make of a level: its coordinates, and all that was found with them."""


class PendingEvents(dict[Hashable, torch.cuda.Event]):
    """Events on other streams behind which things are there, by their keys, until all is over; under None the event
    behind which what the others are made of is there. A stream waits for an event once."""

    def __init__(self) -> None:
        super().__init__()
        self._met: set[tuple[int, int]] = set()
        self._tellers: list[torch.cuda.Event] = []

    def behind(self, event: torch.cuda.Event, keys: Iterable[Hashable]) -> None:
        """These things are there behind the event."""
        self.update(dict.fromkeys(keys, event))
        # An event that is gone leaves its number to another one.
        self._met.clear()

    def built(self, key: Hashable, device: torch.device) -> None:
        """Something was made on the current stream, of what that waited for: others wait for it, too."""
        if self and key not in self:
            self[key] = mark(torch.cuda.current_stream(device))

    def join(self, key: Hashable, device: torch.device) -> None:
        """Let what the current stream does from now on wait for something, or for what it is made of."""
        if self and (event := self.get(key) or self.get(None)) is not None:
            self._wait(event, device)

    def tells(self, device: torch.device) -> None:
        """What was started on the current stream tells when there was no room."""
        if self:
            self._tellers.append(mark(torch.cuda.current_stream(device)))

    def told(self, device: torch.device) -> None:
        """Let what the current stream does from now on wait for all that tells when there was no room."""
        for event in (*self._tellers, *(self[key] for key in (None, *_LEVEL) if key in self)):
            self._wait(event, device)

    def over(self, device: torch.device) -> None:
        """`join` for all, at the end of a program: what is read later comes behind all of it."""
        for event in self.values():
            self._wait(event, device)
        self._tellers.clear()
        self.clear()

    def _wait(self, event: torch.cuda.Event, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        known = stream.stream_id, id(event)
        if known not in self._met:
            self._met.add(known)
            stream.wait_event(event)
