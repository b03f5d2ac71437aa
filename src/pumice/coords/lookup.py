"""What says which row holds a coordinate: one interface for sorted keys, tables and bricks.

The structures differ in time and memory and in nothing else: each gives the same rows. Where coordinates are equal,
which is reported, it gives one of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import CoordBuffer
from pumice.coords.relation import Relation
from pumice.runtime.launch import has_triton, kernel

WORD = 31
"""Taps per word of a mask: an int32 without its sign."""


class Neighbours(NamedTuple):
    """rows int32 [capacity, K]: the input that each output meets through each tap, -1 where none.

    masks int32 [capacity, ceil(K / 31)]: bit k % 31 of word k // 31 says whether tap k has one; None where they were
    not made along the way.
    """

    rows: Tensor
    masks: Tensor | None


class Lookup(Protocol):
    """Which row of a cloud holds a coordinate."""

    def neighbours(self, outputs: CoordBuffer, relation: Relation) -> Neighbours:
        """For every output and tap the row of the cloud at stride * out + offset."""
        ...

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        ...


def find(lookup: Lookup, coords: Tensor, bounds: Bounds) -> Tensor:
    """The row of each of `coords` int [M, 1+D], -1 where it is not present; int32 [M]."""
    narrow = coords.int()
    if coords.dtype != torch.int32:
        # What int32 does not hold is nowhere.
        narrow[:, 0] = torch.where((narrow == coords).all(1), narrow[:, 0], -1)
    asked = CoordBuffer.of(narrow, bounds)
    return lookup.neighbours(asked, Relation.of(asked.dim, 1)).rows[:, 0]


def lanes_of(volume: int) -> int:
    """Taps that are asked for at once: a power of two."""
    return 32 if volume > 16 else 1 << max(0, volume - 1).bit_length()


CELLS = 128
"""Cells, rows times taps, that a program asks for: few, so that its slowest probe keeps few others waiting."""
_ROWS = 64
"""Rows of such a program, at most."""
_WORDS = 2048
"""Words of a bitmap that a program counts."""
_NOTED = 2048
"""Cells of a map that a program makes masks of: nothing keeps it waiting."""
WARPS = 1
"""Warps of such a program: one, which needs no barrier."""


def rows_of(lanes: int) -> int:
    """Rows of one program; where each asks for one cell few, as all that is read of a row comes one after the other."""
    return min(CELLS // lanes, _ROWS)


class Live(NamedTuple):
    """How many words of a bitmap count: `each` for every one of `count`, int32 [1] on the device."""

    count: Tensor
    each: int


def cleared(words: int, live: Live) -> Tensor:
    """int32 [words], 0 where they count."""
    found = torch.empty(words, dtype=torch.int32, device=live.count.device)
    constants = {"LIVE": True, "BLOCK": _WORDS}
    kernel("lookup_kernels.clear")(-(-words // _WORDS), (found, live.count), (words, live.each), constants)
    return found


def paired(words: Tensor, live: Live | None = None) -> tuple[Tensor, Tensor]:
    """(int64: the words of a bitmap with the bits set up to and with each beside them, so that one access gives both;
    int32 [1]: the bits of all). What words do not count is not looked at, and has no pairs.

    Of int8 each element is a bit; there are whole words of them.
    """
    count, each = (words, 0) if live is None else live
    length, block = (len(words), _WORDS) if words.dtype == torch.int32 else (len(words) // 32, _WORDS // 16)
    programs = -(-length // block)
    alone = programs == 1
    sums, total = (torch.empty(n, dtype=torch.int32, device=words.device) for n in (programs, 1))
    pairs = torch.empty(length, dtype=torch.int64, device=words.device)
    numbers, constants = (length, each), {"LIVE": live is not None, "BLOCK": block}
    if not alone:
        kernel("lookup_kernels.count_bits")(programs, (words, sums, count), numbers, constants)
    constants = {"LIVE": live is not None, "ALONE": alone, "BLOCK": block}
    kernel("lookup_kernels.pair_up")(programs, (words, sums, count, pairs, total), numbers, constants)
    return pairs, total


def mask_words(rows: Tensor) -> Tensor:
    """int32 [N, ceil(K / 31)]: bit k % 31 of word k // 31 of row n says whether rows[n, k] is an input."""
    count, volume = rows.shape
    if has_triton(rows):
        rows = rows.contiguous()
        masks = torch.empty(count, -(-volume // WORD), dtype=torch.int32, device=rows.device)
        lanes = lanes_of(volume)
        each = _NOTED // lanes
        kernel("lookup_kernels.mask_words")(
            -(-count // each), (rows, masks), (count,), {"K": volume, "ROWS": each, "LANES": lanes}
        )
        return masks
    return mask_words_twin(rows)


def mask_words_twin(rows: Tensor) -> Tensor:
    """As mask_words, in plain torch."""
    words = [(rows[:, first : first + WORD] >= 0) for first in range(0, rows.shape[1], WORD)]
    weights = [torch.tensor([1 << k for k in range(w.shape[1])], dtype=torch.int32, device=rows.device) for w in words]
    if not words:
        return rows.new_zeros((rows.shape[0], 0), dtype=torch.int32)
    return torch.stack([(w * v).sum(1, dtype=torch.int32) for w, v in zip(words, weights, strict=True)], dim=1)


def padded(values: Sequence[int], filler: int) -> tuple[int, ...]:
    """Four of them."""
    return (*values, *(filler,) * (4 - len(values)))
