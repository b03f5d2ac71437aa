"""The interface of neighbour search structures: from coordinates to rows.

All structures give the same rows and differ in time and memory only. Of duplicates, which are reported, any row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import CoordBuffer
from pumice.coords.relation import Relation
from pumice.runtime.launch import has_triton, kernel

WORD = 31  # Kernel offsets per mask word: an int32 without its sign


class Neighbours(NamedTuple):
    """rows int32 [capacity, K]: input of each output at each kernel offset, -1 if none.
    masks int32 [capacity, ceil(K / 31)], or None: bit k % 31 of word k // 31 is set if offset k has an input."""

    rows: Tensor
    masks: Tensor | None


class Lookup(Protocol):
    """A search structure from coordinates to the rows of a buffer."""

    def neighbours(self, outputs: CoordBuffer, relation: Relation) -> Neighbours:
        """For every output and kernel offset the buffer's row at stride * out + offset."""
        ...

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        ...


def find(lookup: Lookup, coords: Tensor, bounds: Bounds) -> Tensor:
    """int32 [M]: row of each of `coords` int [M, 1+D], -1 if absent."""
    narrow = coords.int()
    if coords.dtype != torch.int32:
        # Coordinates beyond int32 are absent.
        narrow[:, 0] = torch.where((narrow == coords).all(1), narrow[:, 0], -1)
    queries = CoordBuffer.of(narrow, bounds)
    return lookup.neighbours(queries, Relation.of(queries.dim, 1)).rows[:, 0]


def lanes_of(volume: int) -> int:
    """Kernel offsets that a program handles at once: a power of two."""
    return 32 if volume > 16 else 1 << max(0, volume - 1).bit_length()


CELLS = 128  # Cells (rows times kernel offsets) that a program queries: few, as the slowest probe delays the program
_ROWS = 64  # Maximum rows of such a program
_WORDS = 2048  # Words of a bitmap that a program counts
_NOTED = 2048  # Cells of a map that a program makes masks of
WARPS = 1  # Warps of a querying program: one, which needs no barrier


def rows_of(lanes: int) -> int:
    """Rows of one program, at most _ROWS: with one cell per row, the loads of a row are dependent."""
    return min(CELLS // lanes, _ROWS)


class Live(NamedTuple):
    """Words of a bitmap in use: `each` times `count`, int32 [1] on the device."""

    count: Tensor
    each: int


def cleared(words: int, live: Live) -> Tensor:
    """int32 [words]: zero in the words in use, the rest uninitialised."""
    found = torch.empty(words, dtype=torch.int32, device=live.count.device)
    constants = {"LIVE": True, "BLOCK": _WORDS}
    kernel("lookup_kernels.clear")(-(-words // _WORDS), (found, live.count), (words, live.each), constants)
    return found


def paired(words: Tensor, live: Live | None = None) -> tuple[Tensor, Tensor]:
    """(int64: inclusive prefix count of set bits << 32 | word, for each bitmap word; int32 [1]: number of set bits).
    words: int32, or int8 with one element per bit and a multiple of 32 of them. Unused words are skipped."""
    count, each = (words, 0) if live is None else live
    length, block = (len(words), _WORDS) if words.dtype == torch.int32 else (len(words) // 32, _WORDS // 16)
    programs = -(-length // block)
    single = programs == 1
    sums, total = (torch.empty(n, dtype=torch.int32, device=words.device) for n in (programs, 1))
    pairs = torch.empty(length, dtype=torch.int64, device=words.device)
    numbers, constants = (length, each), {"LIVE": live is not None, "BLOCK": block}
    if not single:
        kernel("lookup_kernels.count_bits")(programs, (words, sums, count), numbers, constants)
    constants = {"LIVE": live is not None, "ALONE": single, "BLOCK": block}
    kernel("lookup_kernels.pair_up")(programs, (words, sums, count, pairs, total), numbers, constants)
    return pairs, total


def mask_words(rows: Tensor) -> Tensor:
    """int32 [N, ceil(K / 31)]: bit k % 31 of word k // 31 of row n is set if rows[n, k] >= 0."""
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
    """The values, filled up to four."""
    return (*values, *(filler,) * (4 - len(values)))
