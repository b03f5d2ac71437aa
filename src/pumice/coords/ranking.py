"""The stable order of integer keys: a radix sort of few digits, of as many bits as the keys have."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.runtime.launch import has_triton, kernel

_DIGIT = 10
"""Bits of a digit, at most."""
_MOST = 1 << 21
"""Keys times digits, at most: torch is as fast with so many, and faster with more (on an H200)."""
_BLOCK = 512
"""Rows of a block, which are sorted among themselves."""
_WARPS = 8
"""Warps of a program that sorts a block."""
_COLUMNS = 8
"""Digits whose counts a program adds up: the counts of a block fill 32 bytes."""
_ADDED = 512
"""Blocks whose counts it adds up at a time."""


class Digits(NamedTuple):
    """How keys are taken apart: `turns` digits of `width` bits, rows in blocks of `block`."""

    turns: int
    width: int
    block: int

    @staticmethod
    def of(keys: Tensor, bits: int) -> Digits | None:
        """For keys of so many bits; None where they are left to torch."""
        turns = max(1, -(-bits // _DIGIT))
        few = 0 < turns * keys.shape[0] <= _MOST
        return Digits(turns, -(-bits // turns), _BLOCK) if few and bits > 0 and has_triton(keys) else None

    def counts(self, keys: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
        """int32 [turns, blocks + 1, 2**width] and [more], all 0: how many rows of each block have each digit goes in
        the first.
        """
        shape = (self.turns, -(-keys.shape[0] // self.block) + 1, 1 << self.width)
        sizes = (math.prod(shape), more)
        counts, rest = torch.zeros(sum(sizes), dtype=torch.int32, device=keys.device).split(sizes)
        return counts.view(shape), rest


def ranked(keys: Tensor, digits: Digits, counts: Tensor) -> Tensor:
    """int32 [N]: the places of keys int32 [N], not falling, equal ones in their own order.

    digits: of which keys differ, the lowest ones; nothing is negative. counts: how many rows of each block have each
    lowest digit, then zeros.
    """
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
