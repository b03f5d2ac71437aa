"""CUDA streams and events, and graph capture state."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

MAP_STREAM_PRIORITY = -1  # Priority of the streams that build kernel maps: above that of the layers


def is_capturing(device: torch.device) -> bool:
    """True while the current stream captures a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Record an event on the stream."""
    event = torch.cuda.Event()
    event.record(stream)
    return event


_LEVEL = "coords", "found"  # Keys of a level's coordinates and its lookup results


class PendingEvents(dict[Hashable, torch.cuda.Event]):
    """CUDA events to wait for before using an array built on a side stream, by array key; key None is the map that the
    other arrays derive from. A stream of the device waits for each event once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._waited: set[tuple[int, int]] = set()
        self._status_writers: list[torch.cuda.Event] = []

    def register(self, event: torch.cuda.Event, keys: Iterable[Hashable]) -> None:
        """Register the arrays of `keys` as ready after the event."""
        self.update(dict.fromkeys(keys, event))
        # A new event may have the id of a freed one.
        self._waited.clear()

    def register_derived(self, key: Hashable) -> None:
        """Register an array derived on the current stream, so that other streams wait for it."""
        if self and key not in self:
            self[key] = record_event(torch.cuda.current_stream(self._device))

    def wait_for(self, key: Hashable) -> None:
        """Make the current stream wait for an array, or for the map that it derives from."""
        if self and (event := self.get(key) or self.get(None)) is not None:
            self._wait(event)

    def register_status_writer(self) -> None:
        """Register that kernels on the current stream write the status (overflow)."""
        if self:
            self._status_writers.append(record_event(torch.cuda.current_stream(self._device)))

    def wait_for_status(self) -> None:
        """Make the current stream wait for all kernels that write the status."""
        for event in (*self._status_writers, *(self[key] for key in (None, *_LEVEL) if key in self)):
            self._wait(event)

    def wait_for_all(self) -> None:
        """Make the current stream wait for all events and clear them, at the end of a program."""
        for event in self.values():
            self._wait(event)
        self._status_writers.clear()
        self.clear()

    def _wait(self, event: torch.cuda.Event) -> None:
        stream = torch.cuda.current_stream(self._device)
        known = stream.stream_id, id(event)
        if known not in self._waited:
            self._waited.add(known)
            stream.wait_event(event)
