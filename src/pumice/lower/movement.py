"""Movement of feature rows to and from the slots of batched products (TorchSparse, MLSys 2022, section 4.3).

    gather    y[s] = x[rows[s]]                 scatter    y[rows[s]] += x[s]           s: slots

in two orders:

by slots     each slot reads its row, or is added to it: the weight-stationary order, with slots sorted by offset
stationary   each row is read once and written to all of its slots, or sums all of its slots and is written once

Kernels move up to 16 bytes per access, or one element if `scalar`, which only a study of what vectors gain asks for.
Where no kernels run, rows are moved by torch: a CPU gathers by slots in both orders, to the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords.segments import bounds_of
from pumice.runtime.launch import has_triton, kernel, outside_inference_mode


class Programs(NamedTuple):
    """The bytes of rows per program, and its warps."""

    size: int
    warps: int


_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_GATHER, _SCATTER = Programs(4096, 4), Programs(2048, 4)
_GATHER_STATIONARY, _SCATTER_STATIONARY = Programs(1024, 2), Programs(512, 1)
"""The fastest on an H200 over the layers of a MinkUNet, together; 2 to 6 times as fast as torch's."""
_SCALARS = 512
"""Elements per program if each is an access of its own; twice as many took more than twice as long."""
_LANES, _ROWS = 128, 128
"""Maximum channels, and rows, per program."""


class SlotLists(NamedTuple):
    """The slots of each row. slots int32 [S]: sorted by row, then by slot, padding last; starts int32 [rows + 1]: of
    each row, and of padding."""

    slots: Tensor
    starts: Tensor


@dataclass(frozen=True, eq=False)
class Slots:
    """The row of each slot: int32 [S], `count` for padding. count: number of rows; padded: some slots are padding;
    distinct: no row has several slots."""

    rows: Tensor
    count: int
    padded: bool = False
    distinct: bool = False

    @cached_property
    def lists(self) -> SlotLists:
        """The slots of each row."""
        with outside_inference_mode():
            rows, order = self.rows.sort(stable=True)
            return SlotLists(order.int(), bounds_of(rows, self.count))

    @cached_property
    def padding(self) -> Tensor:
        """int64: the padding slots."""
        with outside_inference_mode():
            return (self.rows == self.count).nonzero()[:, 0]


def gather_slots(x: Tensor, slots: Slots, scalar: bool = False) -> Tensor:
    """x [rows, C] -> [S, C]: each slot reads its row; padding slots are 0."""
    if not _by_kernels(x):
        return _gather_torch(x, slots)
    y = x.new_empty(len(slots.rows), x.shape[1])
    shape = _shape(x, _GATHER, scalar)
    kernel("movement_kernels.gather_slots", "lower")(
        _programs(len(y), shape),
        (x, slots.rows, y),
        (len(y), slots.count, 1),
        shape | {"SCALAR": scalar},
        _GATHER.warps,
    )
    return y


def gather_stationary(x: Tensor, slots: Slots) -> Tensor:
    """As gather_slots, with each row of x read once; padding slots are undefined."""
    if not _by_kernels(x):
        return _gather_torch(x, slots)
    y = x.new_empty(len(slots.rows), x.shape[1])
    shape = _shape(x, _GATHER_STATIONARY)
    kernel("movement_kernels.gather_stationary", "lower")(
        _programs(len(x), shape), (x, *slots.lists, y), (len(x),), shape, _GATHER_STATIONARY.warps
    )
    return y


def gather_stationary_padded(x: Tensor, slots: Slots) -> Tensor:
    """As gather_stationary; padding slots are 0."""
    y = gather_stationary(x, slots)
    return y.index_fill_(0, slots.padding, 0) if slots.padded else y


def _gather_torch(x: Tensor, slots: Slots) -> Tensor:
    if not slots.padded:
        return x.index_select(0, slots.rows)
    return x.index_select(0, slots.rows.clamp(max=slots.count - 1)).index_fill_(0, slots.padding, 0)


def scatter_slots(y: Tensor, products: Tensor, slots: Slots, scalar: bool = False) -> None:
    """Add products [S, C] to their rows of y [rows, C] in place, in y's dtype; those of padding slots to none."""
    if not _by_kernels(products):
        return _scatter_torch(y, products, slots)
    shape = _shape(products, _SCATTER, scalar)
    kernel("movement_kernels.scatter_slots", "lower")(
        _programs(len(products), shape),
        (products, slots.rows, y),
        (len(products), slots.count, 1),
        shape | {"ATOMIC": not slots.distinct, "SCALAR": scalar},
        _SCATTER.warps,
    )


def _scatter_torch(y: Tensor, products: Tensor, slots: Slots) -> None:
    rows = slots.rows
    if slots.padded:
        filled = (rows < slots.count).nonzero()[:, 0]
        rows, products = rows[filled], products[filled]
    y.index_add_(0, rows, products.to(y.dtype))


def scatter_stationary(products: Tensor, slots: Slots, base: Tensor | None) -> Tensor:
    """products [S, C] -> [rows, C]: the sum of each row's slots in a fixed order, plus the row of base, in float32 at
    least, stored in products' dtype."""
    if not _by_kernels(products):
        return _sums_torch(products, slots, base)
    y = products.new_empty(slots.count, products.shape[1])
    shape = _shape(products, _SCATTER_STATIONARY)
    kernel("movement_kernels.scatter_stationary", "lower")(
        _programs(len(y), shape),
        (products, *slots.lists, y if base is None else base, y),
        (len(y),),
        shape | {"BASE": base is not None},
        _SCATTER_STATIONARY.warps,
    )
    return y


def _sums_torch(products: Tensor, slots: Slots, base: Tensor | None) -> Tensor:
    order, starts = slots.lists
    order = order[: int(starts[-1])]
    if not len(order) or not products.shape[1]:
        return products.new_zeros(slots.count, products.shape[1]) if base is None else base
    sums = torch.embedding_bag(products, order, starts[:-1], False, 0, False, None, False)[0]
    return sums if base is None else sums.add_(base)


def _by_kernels(x: Tensor) -> bool:
    return x.dtype in _TYPES and has_triton(x)


def _shape(x: Tensor, programs: Programs, scalar: bool = False) -> dict[str, int]:
    """Constants of a kernel that moves rows like those of x."""
    channels, entries = x.shape[1], _SCALARS if scalar else programs.size // x.element_size()
    whole = channels & -channels
    # Rows that are no whole number of vectors are masked.
    lanes = min(_LANES, whole if whole >= 8 else 1 << max(0, channels - 1).bit_length())
    return {"C": channels, "ROWS": max(1, min(entries // lanes, _ROWS)), "LANES": lanes}


def _programs(rows: int, shape: dict[str, int]) -> int:
    return -(-rows // shape["ROWS"]) * -(-shape["C"] // shape["LANES"])
