"""Arrays that share an allocation: kernels take their addresses, tensors are made of those that somebody reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 4
"""Entries between the beginnings of arrays: 16 bytes of int32."""


class Part:
    """A contiguous array within an allocation, from entry `start` on."""

    __slots__ = ("_address", "_tensor", "dtype", "memory", "shape", "start")

    def __init__(self, memory: Tensor, address: int, start: int, shape: tuple[int, ...]) -> None:
        self.memory, self._address, self.start, self.shape = memory, address, start, shape
        self.dtype = memory.dtype
        self._tensor: Tensor | None = None

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return self.memory.get_device()

    @property
    def device(self) -> torch.device:
        return self.memory.device

    def tensor(self) -> Tensor:
        """The array as a tensor, the same in each call."""
        if self._tensor is None:
            shape, strides = self.shape, [1] * len(self.shape)
            for axis in range(len(shape) - 1, 0, -1):
                strides[axis - 1] = strides[axis] * shape[axis]
            begin = self.memory.storage_offset() + self.start
            self._tensor = self.memory.as_strided(shape, strides, begin)
        return self._tensor

    def cut(self, start: int, shape: tuple[int, ...]) -> Part:
        """Another array that begins `start` entries behind this one's beginning."""
        return Part(self.memory, self._address + start * self.memory.element_size(), self.start + start, shape)


Array = Tensor | Part


def aligned(count: int) -> int:
    """Entries that an array of `count` takes in an allocation."""
    return -(-count // _ALIGNED) * _ALIGNED


def begins_of(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """Where arrays of these shapes begin, one after the other and aligned to 16 bytes of int32; where they end."""
    begins, end = [], 0
    for shape in shapes:
        begins.append(end)
        end += aligned(math.prod(shape))
    return begins, end


def carve(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Part]:
    """Arrays of these shapes within an allocation; see `begins_of`."""
    return _placed(memory, shapes, begins_of(shapes)[0])


def allocate(
    device: torch.device, shapes: Sequence[tuple[int, ...]], make: Callable[..., Tensor] = torch.empty
) -> list[Part]:
    """int32 arrays of these shapes in one allocation by `make`."""
    begins, end = begins_of(shapes)
    return _placed(make(end, dtype=torch.int32, device=device), shapes, begins)


def _placed(memory: Tensor, shapes: Sequence[tuple[int, ...]], begins: Sequence[int]) -> list[Part]:
    base, size = memory.data_ptr(), memory.element_size()
    return [Part(memory, base + size * begin, begin, shape) for begin, shape in zip(begins, shapes, strict=True)]


def tensor_of(array: Array | Any) -> Any:
    """The tensor that an array is."""
    return array.tensor() if type(array) is Part else array
