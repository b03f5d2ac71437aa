"""Memory that is no result: workspace of GPU kernels, buffers of C kernels; and checks before a large allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.errors import ShapeError
from pumice.runtime.cache import BoundedCache
from pumice.runtime.launch import outside_inference_mode

_POOL_SIZE = 1 << 20  # Size of a device's counter pool for captured graphs: 4 MiB, enough for a thousand kernels
_ALIGNED = 64
_MAX_CACHED_BYTES = 64 << 20  # Largest per-stream workspace in bytes that is kept between calls


@dataclass(frozen=True, eq=False)
class Workspace:
    """Workspace that no concurrently running kernel shares. counters: int32, 0 between kernels: a kernel resets those
    that it increments. scratch: uninitialised bytes."""

    counters: Tensor
    scratch: Tensor

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """(address of counters, address of scratch)."""
        return self.counters.data_ptr(), self.scratch.data_ptr()

    def holds(self, count: int, size: int) -> bool:
        """True if there are at least `count` counters and `size` bytes."""
        return self.count >= count and self.size >= size

    @cached_property
    def count(self) -> int:
        """Number of counters."""
        return self.counters.shape[0]

    @cached_property
    def size(self) -> int:
        """Size of `scratch` in bytes."""
        return self.scratch.shape[0]


def workspace(count: int, size: int, device: torch.device) -> Workspace:
    """Workspace of at least `count` counters and `size` bytes.

    Kernels of one stream run in order and share a workspace. A captured graph may run beside any kernel, so it
    permanently owns its counters; its scratch bytes are in its memory pool.
    """
    if device.type != "cuda":
        return Workspace(torch.zeros(count, dtype=torch.int32, device=device), _bytes(size, device))
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        spare = _COUNTER_POOLS.get(index)
        # Counters allocated during capture are zeroed only in that graph, so they are not cached.
        return Workspace(spare.take(count) if spare else _zeros(count, device), _bytes(size, device))
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    cached = _WORKSPACES.get(key)
    if cached is not None and cached.holds(count, size):
        return cached
    if _COUNTER_POOLS.get(index) is None:
        _COUNTER_POOLS.keep(index, _CounterPool(device))
    if size > _MAX_CACHED_BYTES:
        return Workspace(workspace(count, 0, device).counters, _bytes(size, device))
    if cached is not None:
        count, size = max(count, cached.count), max(size, cached.size)
    return _WORKSPACES.keep(key, Workspace(_zeros(_rounded(count), device), _bytes(_rounded(size), device)))


def workspace_bytes(count: int, size: int) -> int:
    """Bytes that stay allocated on a GPU once kernels of one stream took workspaces of at most so many counters and
    bytes; 0 if they took none."""
    if not count:
        return 0
    return 4 * (_POOL_SIZE + _rounded(count)) + (_rounded(size) if size <= _MAX_CACHED_BYTES else size)


def release_workspaces() -> None:
    """Free all workspaces that no kernel uses; later kernels take new ones."""
    _WORKSPACES.clear()
    _COUNTER_POOLS.clear()


def _rounded(size: int) -> int:
    return max(_ALIGNED, 1 << (size - 1).bit_length())


class _CounterPool:
    """Preallocated zeroed counters for captured graphs."""

    def __init__(self, device: torch.device) -> None:
        self._left, self._lock, self._device = _zeros(_POOL_SIZE, device), Lock(), device

    def take(self, count: int) -> Tensor:
        """Take `count` counters; if the pool is exhausted, allocate new ones, which the graph itself zeroes."""
        count = -(-count // _ALIGNED) * _ALIGNED
        with self._lock:
            if count > self._left.shape[0]:
                return _zeros(count, self._device)
            found, self._left = self._left[:count], self._left[count:]
            return found


def _zeros(count: int, device: torch.device) -> Tensor:
    # Usable under autograd later.
    with outside_inference_mode():
        return torch.zeros(count, dtype=torch.int32, device=device)


def _bytes(size: int, device: torch.device) -> Tensor:
    with outside_inference_mode():
        return torch.empty(size, dtype=torch.uint8, device=device)


class SpareBuffer(NamedTuple):
    """Uninitialised memory of a C kernel. address: 64-byte aligned."""

    memory: Tensor
    size: int
    address: int


class SpareBuffers:
    """Buffers between the calls of C kernels, which take one each: as many as calls run at a time."""

    def __init__(self) -> None:
        self._free: list[SpareBuffer] = []

    def take(self, size: int) -> SpareBuffer:
        """A buffer of at least `size` bytes, for `give`."""
        with suppress(IndexError):
            if (found := self._free.pop()).size >= size:
                return found
        memory = _bytes(_rounded(size), torch.device("cpu"))
        return SpareBuffer(memory, memory.numel(), memory.data_ptr())

    def give(self, buffer: SpareBuffer) -> None:
        """Return a buffer that is no longer used."""
        if buffer.size <= _MAX_CACHED_BYTES:
            self._free.append(buffer)


SPARE = SpareBuffers()
_COUNTER_POOLS: BoundedCache[_CounterPool] = BoundedCache(64)
_WORKSPACES: BoundedCache[Workspace] = BoundedCache(256)


def require_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device, what: str, copies: int = 1) -> None:
    """Raise ShapeError, on behalf of `what`, if the device's whole memory is smaller than `copies` such tensors."""
    needed, held = math.prod(shape) * dtype.itemsize, _memory(device)
    if copies * needed > held:
        times = f", and is held {copies} times" if copies > 1 else ""
        raise ShapeError(
            f"{what} has {math.prod(shape)} entries (shape {list(shape)}), {needed / 2**30:.1f} GiB of {dtype}{times}; "
            f"the device {device} has {held / 2**30:.1f} GiB"
        )


@lru_cache(maxsize=64)
def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "meta" or not hasattr(os, "sysconf"):
        return 2**63 - 1  # the largest size in torch
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
