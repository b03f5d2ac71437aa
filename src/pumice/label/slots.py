"""Memory of scans on their way: a slot for each, shared by processes and made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import RawArray
from typing import Any, cast

import torch
from torch import Tensor

from pumice.errors import DeviceError

_POINTS = 200_000
"""Points of a slot."""
_PAGE = 1024
"""Numbers of a page of memory."""
_PORTABLE = 1
"""cudaHostRegisterPortable."""


@dataclass(frozen=True, eq=False)
class ScanMemory:
    """points float32 [P, 3] and feats float32 [P, C]: the network's input. classes int32 [P]: its result. rows int32
    [P]: of the points in their file, if some were dropped."""

    points: Tensor
    feats: Tensor
    classes: Tensor
    rows: Tensor

    @staticmethod
    def of(points: int, channels: int, memory: Tensor | None = None) -> ScanMemory:
        """Of a scan, within `memory` (float32), if it is given."""
        widths = 3, channels, 1, 1
        memory = torch.empty(points * sum(widths)) if memory is None else memory[: points * sum(widths)]
        xyz, feats, classes, rows = memory.split([points * width for width in widths])
        return ScanMemory(
            xyz.view(-1, 3), feats.view(points, channels), classes.view(torch.int32), rows.view(torch.int32)
        )


@dataclass(frozen=True, eq=False)
class ScanSlots:
    """`count` slots for scans of `channels` input channels; memory: an array of multiprocessing."""

    memory: Any
    count: int
    channels: int

    @staticmethod
    def of(count: int, channels: int) -> ScanSlots:
        return ScanSlots(RawArray("f", count * _POINTS * (3 + channels + 1 + 1)), count, channels)

    def scan(self, slot: int, points: int) -> ScanMemory | None:
        """The memory of a scan in a slot; None for a scan that is larger than that."""
        return None if points > _POINTS else ScanMemory.of(points, self.channels, self._slots[slot])

    def touch(self, worker: int = 0) -> None:
        """Have all pages in this process from the beginning, where they would seem to be a growth of memory later."""
        self._slots.view(-1)[::_PAGE].sum()

    @property
    def _slots(self) -> Tensor:
        return torch.frombuffer(self.memory, dtype=torch.float32).view(self.count, -1)

    @contextmanager
    def pinned(self, device: torch.device) -> Iterator[None]:
        """Within it, copies to and from a GPU do not hold up the host. Raises DeviceError if the memory cannot be
        locked."""
        slots, cuda = self._slots, cast(Any, torch.cuda.cudart())
        with torch.cuda.device(device):
            error = int(cuda.cudaHostRegister(slots.data_ptr(), slots.nbytes, _PORTABLE))
        if error:
            raise DeviceError(f"expected to lock {slots.nbytes} bytes of memory, found CUDA error {error}")
        try:
            yield
        finally:
            torch.cuda.synchronize(device)
            cuda.cudaHostUnregister(slots.data_ptr())
