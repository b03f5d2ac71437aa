"""Coordinate buffers with a device-side count, for kernels that never synchronise with the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.errors import CoordinateError
from pumice.runtime.launch import cached_device_constant, has_triton, kernel, to_device_async

DUPLICATE, RANGE, OVERFLOW = 1, 2, 4  # Status bits: duplicates, out of bounds, capacity exceeded


@dataclass(frozen=True, eq=False)
class CoordBuffer:
    """Coordinates in a buffer: int32 [capacity, 1+D]; the first `count` rows (int32 [1], on the device) are valid.

    bounds: box that contains the valid rows, known on the host. status: int32 [1] on the device, error bits set by
    kernels, read with the count. exact: True if all rows are valid. needed: rows needed, int32 [1] on the device, which
    may exceed the capacity; None if it cannot."""

    coords: Tensor
    count: Tensor
    bounds: Bounds
    status: Tensor
    exact: bool = False
    needed: Tensor | None = None

    @staticmethod
    def of(coords: Tensor, bounds: Bounds) -> CoordBuffer:
        """A buffer of `coords`, all rows valid."""
        # Status and count 16 bytes apart: kernels are compiled ahead for aligned addresses.
        words = torch.full((5,), len(coords), dtype=torch.int32, device=coords.device)
        return CoordBuffer(coords.contiguous(), words[4:], bounds, words[:1].zero_(), True)

    @property
    def capacity(self) -> int:
        return self.coords.shape[0]

    @property
    def dim(self) -> int:
        return self.coords.shape[1] - 1

    @property
    def device(self) -> torch.device:
        return self.coords.device

    def valid_mask(self) -> Tensor:
        """bool [capacity]: True for valid rows."""
        return torch.arange(self.capacity, device=self.device) < self.count

    def read(self) -> int:
        """Number of valid rows; synchronises with the host. Raises CoordinateError for an error bit or an overflow."""
        words = [self.count, self.status, self.count if self.needed is None else self.needed]
        count, status, needed = (values[0] for values in read(words))
        if needed > self.capacity and not status & (RANGE | DUPLICATE):
            raise CoordinateError(f"{needed} results exceed the capacity of {self.capacity}; give a larger one")
        check(status, self.capacity)
        return count


def new_status(device: torch.device) -> Tensor:
    """int32 [1]: a status word without error bits."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def set_status(status: Tensor, bit: int, happened: Tensor) -> None:
    """Set a bit of a status word if `happened`, bool of one entry. Atomic with Triton: other streams set bits too."""
    if has_triton(status):
        kernel("lookup_kernels.set_status")(1, (happened.int(), status), (), {"BIT": bit})
    else:
        status.bitwise_or_(bit * happened.int())


def read(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Values of small integer tensors of one device, read in one host synchronisation."""
    if not tensors:
        return []
    flat = (torch.cat([t.reshape(-1) for t in tensors]) if len(tensors) > 1 else tensors[0].reshape(-1)).tolist()
    found, start = [], 0
    for tensor in tensors:
        found.append(flat[start : start + tensor.numel()])
        start += tensor.numel()
    return found


def check(status: int, capacity: int) -> None:
    """Raise CoordinateError if a status word has an error bit. capacity: of the buffer, for the message."""
    if status & RANGE:
        raise CoordinateError("coordinates are outside the given spatial_shape or batch_size")
    if status & DUPLICATE:
        raise CoordinateError("coordinates are duplicates; coalesce() merges them")
    if status & OVERFLOW:
        raise CoordinateError(f"results exceed the capacity of this buffer, {capacity}, or of one it was made from")


@cached_device_constant(256)
def offset_table(offsets: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int32 [K, D]: the offsets on the device."""
    return to_device_async(torch.tensor(offsets, dtype=torch.int32), device)


_BLOCK = 2048  # Entries per program of tile_kernels.put, all of one array
_PUT = 3  # Arrays that tile_kernels.put copies


def with_own_storage(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is part of a larger storage: pickling would save the whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def put_first(buffers: Sequence[Tensor], arrays: Sequence[Tensor], count: Tensor) -> None:
    """Copy one to three arrays, of n rows each, to the first rows of contiguous buffers; set count, int32 [1], to n."""
    alike = all(a.dtype == b.dtype and a.is_contiguous() for a, b in zip(arrays, buffers, strict=True))
    if not alike or not has_triton(count):
        return put_first_torch(buffers, arrays, count)
    sizes = [array.numel() for array in arrays]
    programs = max(1, sum(-(-size // _BLOCK) for size in sizes))
    # Unused arguments: the first array, with size 0.
    spare = range(_PUT - len(arrays))
    tensors = (*arrays, *(arrays[0] for _ in spare), *buffers, *(buffers[0] for _ in spare), count)
    numbers = (arrays[0].shape[0], *sizes, *(0 for _ in spare))
    kernel("tile_kernels.put")(programs, tensors, numbers, {"BLOCK": _BLOCK})


def put_first_torch(buffers: Sequence[Tensor], arrays: Sequence[Tensor], count: Tensor) -> None:
    for buffer, array in zip(buffers, arrays, strict=True):
        buffer[: len(array)].copy_(array)
    count.fill_(len(arrays[0]))
