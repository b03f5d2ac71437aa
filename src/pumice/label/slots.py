"""Memory that readers and the network's process share, one slot for each scan on its way, made once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import RawArray
from typing import Any

import torch
from torch import Tensor

from pumice.label.classify import NetworkInput

_POINTS = 2**18
"""Points of a slot."""
_AXES = 3


@dataclass(frozen=True, eq=False)
class Slots:
    """Scan number i uses slot i modulo their number: points float32 [P, 3], then feats float32 [P, channels].

    memory: float32 [slots * numbers of one], an array of multiprocessing, which is not copied to processes."""

    memory: Any
    count: int
    channels: int

    @staticmethod
    def of(count: int, channels: int) -> Slots:
        return Slots(RawArray("f", count * _POINTS * (_AXES + channels)), count, channels)

    @property
    def tensor(self) -> Tensor:
        """float32 [slots, numbers of one]."""
        return torch.frombuffer(self.memory, dtype=torch.float32).view(self.count, -1)

    def views(self, number: int, points: int) -> NetworkInput | None:
        """The tensors of a scan's slot; None for a scan that is larger than that."""
        if points > _POINTS:
            return None
        slot, cut = self.tensor[number % self.count], _AXES * points
        feats = slot[cut : cut + self.channels * points]
        return NetworkInput(slot[:cut].view(points, _AXES), feats.view(points, self.channels))

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Copies to a GPU do not hold up the host within it."""
        cuda: Any = torch.cuda.cudart()
        place = self.tensor.data_ptr()
        if error := int(cuda.cudaHostRegister(place, self.tensor.nbytes, 0)):
            raise RuntimeError(f"cudaHostRegister: {error}")
        try:
            yield
        finally:
            torch.cuda.synchronize()
            cuda.cudaHostUnregister(place)
