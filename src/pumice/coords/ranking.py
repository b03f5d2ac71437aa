"""Stable argsort of integer keys by a radix sort over only the bits that the keys have."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.runtime.launch import has_triton, kernel

_DIGIT = 10  # Maximum bits of a digit
_MOST = 1 << 21  # Maximum keys times digits: torch.sort is faster beyond (on an H200)
_BLOCK = 512  # Rows of a block, sorted locally
_WARPS = 8  # Warps of a program that sorts a block
_COLUMNS = 8  # Digits that a program of the prefix sum handles: 32 bytes of counts per block
_ADDED = 512  # Blocks per step of the prefix sum


class Digits(NamedTuple):
    """Decomposition of keys: `turns` digits of `width` bits, rows in blocks of `block`."""

    turns: int
    width: int
    block: int

    @staticmethod
    def of(keys: Tensor, bits: int) -> Digits | None:
        """The digits of keys of `bits` bits; None: use torch.sort."""
        turns = max(1, -(-bits // _DIGIT))
        few = 0 < turns * keys.shape[0] <= _MOST
        return Digits(turns, -(-bits // turns), _BLOCK) if few and bits > 0 and has_triton(keys) else None

    def counts(self, keys: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
        """Zeroed int32 [turns, blocks + 1, 2**width], for the number of rows per block and digit, and [more]."""
        shape = (self.turns, -(-keys.shape[0] // self.block) + 1, 1 << self.width)
        sizes = (math.prod(shape), more)
        counts, rest = torch.zeros(sum(sizes), dtype=torch.int32, device=keys.device).split(sizes)
        return counts.view(shape), rest


def ranked(keys: Tensor, digits: Digits, counts: Tensor) -> Tensor:
    """int32 [N]: stable argsort of non-negative keys int32 [N] by their lowest `digits`.
    counts: from Digits.counts, with the rows of each block per lowest digit filled in."""
    bins, blocks, columns = 1 << digits.width, counts.shape[1] - 1, min(_COLUMNS, 1 << digits.width)
    starts = counts.unbind()
    for turn in range(digits.turns):
        last = turn + 1 == digits.turns
        found = torch.empty(keys.shape[0], dtype=torch.int32 if last else torch.int64, device=keys.device)
        added = {"BINS": bins, "COLUMNS": columns, "ROWS": _ADDED}
        kernel("tile_kernels.scan_digits")(bins // columns, (starts[turn],), (blocks,), added)
        tensors = (keys, starts[turn], starts[turn if last else turn + 1], found)
        constants = {"BINS": bins, "BLOCK": digits.block, "FIRST": turn == 0, "LAST": last}
        kernel("tile_kernels.place_digits")(
            blocks, tensors, (turn * digits.width, keys.shape[0], blocks), constants, _WARPS
        )
        keys = found
    return keys


def ranked_twin(keys: Tensor) -> Tensor:
    """As ranked, in plain torch."""
    return torch.sort(keys, stable=True)[1].int()
