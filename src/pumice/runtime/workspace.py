"""Memory of a device that programs of one kernel leave something in for each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import outside_inference_mode

_SPARE = 1 << 20
"""Counters of a device that captured graphs get theirs from: 4 MiB, enough for a thousand kernels."""
_ALIGNED = 64
_MOST = 64 << 20
"""Bytes up to which the room of a stream is kept from call to call."""


@dataclass(frozen=True, eq=False)
class Workspace:
    """What no kernel has that may run at the same time.

    counters: int32, 0 whenever nobody counts: a kernel that raises one puts it back. room: bytes of any value.
    """

    counters: Tensor
    room: Tensor

    @cached_property
    def count(self) -> int:
        """Of counters."""
        return self.counters.shape[0]

    @cached_property
    def size(self) -> int:
        """Of the room, in bytes."""
        return self.room.shape[0]


def workspace(count: int, size: int, device: torch.device) -> Workspace:
    """At least so many counters and so many bytes.

    The kernels of one stream run one after another and share theirs. A captured graph runs on any stream, beside any
    kernel: each of its kernels has counters of its own, for good, and room in the memory of the graph.
    """
    if device.type != "cuda":
        return Workspace(torch.zeros(count, dtype=torch.int32, device=device), _room(size, device))
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        spare = _SPARES.get(index)
        # What is made while a graph is captured is 0 in that graph alone: it is not kept for others.
        return Workspace(spare.taken(count) if spare else _zeros(count, device), _room(size, device))
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    held = _HELD.get(key)
    if held is not None and held.count >= count and held.size >= size:
        return held
    if _SPARES.get(index) is None:
        _SPARES.keep(index, _CounterPool(device))
    if size > _MOST:
        return Workspace(workspace(count, 0, device).counters, _room(size, device))
    if held is not None:
        count, size = max(count, held.count), max(size, held.size)
    return _HELD.keep(key, Workspace(_zeros(_rounded(count), device), _room(_rounded(size), device)))


def _rounded(size: int) -> int:
    return max(_ALIGNED, 1 << (size - 1).bit_length())


class _CounterPool:
    """Counters to be given away."""

    def __init__(self, device: torch.device) -> None:
        self._left, self._lock, self._device = _zeros(_SPARE, device), Lock(), device

    def taken(self, count: int) -> Tensor:
        """The next ones; where none are left, new ones that the graph itself sets to 0."""
        count = -(-count // _ALIGNED) * _ALIGNED
        with self._lock:
            if count > self._left.shape[0]:
                return _zeros(count, self._device)
            found, self._left = self._left[:count], self._left[count:]
            return found


def _zeros(count: int, device: torch.device) -> Tensor:
    # What was made in inference serves training afterwards.
    with outside_inference_mode():
        return torch.zeros(count, dtype=torch.int32, device=device)


def _room(size: int, device: torch.device) -> Tensor:
    with outside_inference_mode():
        return torch.empty(size, dtype=torch.uint8, device=device)


_SPARES: BoundedCache[_CounterPool] = BoundedCache(64)
_HELD: BoundedCache[Workspace] = BoundedCache(256)
