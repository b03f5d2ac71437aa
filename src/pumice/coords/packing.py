"""Copies of the first rows of many arrays into one allocation, and of arrays into the first rows of buffers: one
kernel each, or plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.errors import DtypeError
from pumice.runtime.launch import has_triton, integers, kernel

_BLOCK = 2048  # Entries of one program; every array starts at a multiple of it
_PUT = 3  # Arrays that one kernel copies into buffers


@dataclass(frozen=True, eq=False)
class Packer:
    """Contiguous int32 arrays. addresses: int64 on their device; layouts: (row shape, entries per row, strides)."""

    arrays: Sequence[Tensor]
    addresses: Tensor
    layouts: Sequence[tuple[tuple[int, ...], int, tuple[int, ...]]]

    @staticmethod
    def of(arrays: Sequence[Tensor]) -> Packer:
        """A packer of these arrays. Raises DtypeError for arrays of another dtype or not contiguous."""
        for array in arrays:
            if array.dtype != torch.int32 or not array.is_contiguous():
                raise DtypeError(f"contiguous torch.int32 is packed, found {array.dtype} of strides {array.stride()}")
        layouts = [(tuple(a.shape[1:]), math.prod(a.shape[1:]), a.stride()) for a in arrays]
        return Packer(arrays, torch.tensor([a.data_ptr() for a in arrays], device=arrays[0].device), layouts)

    def first(self, rows: Sequence[int]) -> list[Tensor]:
        """Copies of the first rows[i] rows of each array i."""
        starts, sizes, end = [], [], 0
        for n, (_, width, _) in zip(rows, self.layouts, strict=True):
            size = n * width
            starts.append(end)
            sizes.append(size)
            end += -(-size // _BLOCK)
        out = torch.empty(end * _BLOCK, dtype=torch.int32, device=self.addresses.device)
        view, begin = out.as_strided, out.storage_offset()
        found = [
            view((n, *shape), strides, begin + start * _BLOCK)
            for n, (shape, _, strides), start in zip(rows, self.layouts, starts, strict=True)
        ]
        if has_triton(out):
            layout = integers((*starts, *sizes), out.device)
            constants = {"MOST": 1 << (len(starts) - 1).bit_length(), "BLOCK": _BLOCK}
            kernel("tile_kernels.pack")(end, (self.addresses, layout, out), (len(starts),), constants)
        else:
            pack_twin(self.arrays, found)
        return found


def alone(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is part of a larger storage: pickling would save the whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def put_first(buffers: Sequence[Tensor], arrays: Sequence[Tensor], count: Tensor) -> None:
    """Copy arrays of n rows each, one to three, to the first rows of contiguous buffers, and n to count, int32 [1]."""
    alike = all(a.dtype == b.dtype and a.is_contiguous() for a, b in zip(arrays, buffers, strict=True))
    if not alike or not has_triton(count):
        return put_first_twin(buffers, arrays, count)
    sizes = [array.numel() for array in arrays]
    programs = max(1, sum(-(-size // _BLOCK) for size in sizes))
    # Unused arguments: the first array, with no entries.
    spare = range(_PUT - len(arrays))
    tensors = (*arrays, *(arrays[0] for _ in spare), *buffers, *(buffers[0] for _ in spare), count)
    numbers = (arrays[0].shape[0], *sizes, *(0 for _ in spare))
    kernel("tile_kernels.put")(programs, tensors, numbers, {"BLOCK": _BLOCK})


def put_first_twin(buffers: Sequence[Tensor], arrays: Sequence[Tensor], count: Tensor) -> None:
    """As put_first, in plain torch."""
    for buffer, array in zip(buffers, arrays, strict=True):
        buffer[: len(array)].copy_(array)
    count.fill_(len(arrays[0]))


def pack_twin(arrays: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """As Packer.first, in plain torch; writes `found`."""
    for array, copy in zip(arrays, found, strict=True):
        copy.copy_(array[: len(copy)])
