"""Memory that readers and the network's process share, one slot for each scan on its way, made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import RawArray
from typing import Any, cast

import torch
from torch import Tensor

from pumice.errors import DeviceError
from pumice.label.classify import NetworkInput

_POINTS = 2**18
"""Points of a slot."""
_AXES = 3
_PORTABLE = 1
"""cudaHostRegisterPortable."""


@dataclass(frozen=True, eq=False)
class Slots:
    """Scan number i has slot i modulo `count`: points float32 [P, 3], then feats float32 [P, channels].

    memory: an array of multiprocessing, of which processes have no copies."""

    memory: Any
    count: int
    channels: int

    @staticmethod
    def of(count: int, channels: int) -> Slots:
        return Slots(RawArray("f", count * _POINTS * (_AXES + channels)), count, channels)

    def views(self, number: int, points: int) -> NetworkInput | None:
        """The tensors of a scan's slot; None for a scan that is larger than that."""
        if points > _POINTS:
            return None
        slot, cut = self._slots[number % self.count], _AXES * points
        feats = slot[cut : cut + self.channels * points]
        return NetworkInput(slot[:cut].view(points, _AXES), feats.view(points, self.channels))

    @property
    def _slots(self) -> Tensor:
        return torch.frombuffer(self.memory, dtype=torch.float32).view(self.count, -1)

    @contextmanager
    def pinned(self, device: torch.device) -> Iterator[None]:
        """Within it, copies to a GPU do not hold up the host. Raises DeviceError if the memory cannot be locked."""
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
