"""Arrays within one allocation: kernels take their addresses; tensors are created only on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 4
"""Elements: arrays begin at multiples of it, 16 bytes of int32."""


class Part:
    """A contiguous array within the tensor `memory`, from element `start` on."""

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
        """The array as a tensor, created once."""
        if self._tensor is None:
            shape, strides = self.shape, [1] * len(self.shape)
            for axis in range(len(shape) - 1, 0, -1):
                strides[axis - 1] = strides[axis] * shape[axis]
            begin = self.memory.storage_offset() + self.start
            self._tensor = self.memory.as_strided(shape, strides, begin)
        return self._tensor

    def cut(self, start: int, shape: tuple[int, ...]) -> Part:
        """An array of the same memory that begins `start` elements after this one."""
        return Part(self.memory, self._address + start * self.memory.element_size(), self.start + start, shape)


Array = Tensor | Part


def aligned(count: int) -> int:
    """`count` rounded up to a multiple of _ALIGNED."""
    return -(-count // _ALIGNED) * _ALIGNED


def begins_of(shapes: Sequence[tuple[int, ...]]) -> tuple[list[int], int]:
    """(offsets of consecutive aligned arrays of these shapes, end of the last one), in elements."""
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
    """The tensor of a Part; anything else unchanged."""
    return array.tensor() if type(array) is Part else array
