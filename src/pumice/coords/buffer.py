"""Coordinates whose number the device knows: what flows between kernels that never wait for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.errors import CoordinateError
from pumice.runtime.launch import cached_device_constant, has_triton, kernel, to_device_async

DUPLICATE, RANGE, OVERFLOW = 1, 2, 4
"""Bits of a status word: equal coordinates; coordinates outside their box; more results than there is room for."""


@dataclass(frozen=True, eq=False)
class CoordBuffer:
    """Coordinates in a buffer: int32 [capacity, 1+D], of which the first `count` (int32 [1], on the device) live.

    bounds: a box around the living, known on the host. status: int32 [1] on the device, the bits of what went wrong
    so far; kernels set them, and whoever reads a count reads them too. exact: whether all rows are known to live.
    needed: how many rows there would be if there were room for all, int32 [1]; None where there is.
    """

    coords: Tensor
    count: Tensor
    bounds: Bounds
    status: Tensor
    exact: bool = False
    needed: Tensor | None = None

    @staticmethod
    def of(coords: Tensor, bounds: Bounds) -> CoordBuffer:
        """All of `coords`."""
        # One kernel writes both: 0 and the number.
        words = torch.arange(0, len(coords) + 1, max(len(coords), 1), dtype=torch.int32, device=coords.device)
        status = words[:1] if len(coords) else new_status(coords.device)
        return CoordBuffer(coords.contiguous(), words[-1:], bounds, status, True)

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
        """bool [capacity]: which rows live."""
        return torch.arange(self.capacity, device=self.device) < self.count

    def inside(self) -> Tensor:
        """bool [capacity]: which rows lie in the box."""
        low = torch.tensor((0, *self.bounds.low), dtype=torch.int64, device=self.device)
        high = torch.tensor((self.bounds.batch - 1, *self.bounds.high), dtype=torch.int64, device=self.device)
        return ((self.coords >= low) & (self.coords <= high)).all(1)

    def read(self) -> int:
        """How many rows live: waits for the device. Raises CoordinateError for what went wrong on the way to them."""
        words = [self.count, self.status, self.count if self.needed is None else self.needed]
        count, status, needed = (values[0] for values in read(words))
        if needed > self.capacity and not status & (RANGE | DUPLICATE):
            raise CoordinateError(f"{needed} results, and room for {self.capacity}; give a larger capacity")
        check(status, self.capacity)
        return count


def new_status(device: torch.device) -> Tensor:
    """A status word that says nothing."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def set_status(status: Tensor, bit: int, happened: Tensor) -> None:
    """Set a bit of a status word where `happened`, bool of one entry, is so.

    In one go: kernels on other streams set other bits meanwhile, which a word that is read and written back would lose.
    """
    if has_triton(status):
        kernel("lookup_kernels.set_status")(1, (happened.int(), status), (), {"BIT": bit})
    else:
        status.bitwise_or_(bit * happened.int())


def read(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The values of small integer tensors of one device, in one transfer: the one place where counts are waited for."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors]).tolist()
    found, start = [], 0
    for tensor in tensors:
        found.append(flat[start : start + tensor.numel()])
        start += tensor.numel()
    return found


def check(status: int, capacity: int) -> None:
    """Raise what the bits of a status word say of a buffer of so much capacity and of those before it."""
    if status & RANGE:
        raise CoordinateError("coordinates lie outside the spatial_shape or the batch_size that was given for them")
    if status & DUPLICATE:
        raise CoordinateError("coordinates are duplicates; coalesce() merges them")
    if status & OVERFLOW:
        raise CoordinateError(f"more results than there is room for, in this buffer of {capacity} or in one before it")


@cached_device_constant(256)
def offset_table(offsets: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int32 [K, D]: offsets on the device, copied there once."""
    return to_device_async(torch.tensor(offsets, dtype=torch.int32), device)
