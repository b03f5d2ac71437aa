"""The interface of neighbour search structures: from coordinates to rows.

All structures give the same rows and differ in time and memory only. Of duplicates, which are reported, any row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import CoordBuffer
from pumice.coords.relation import Relation
from pumice.errors import OptionError
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


class UsedWords(NamedTuple):
    """Words of a bitmap in use: `each` times `count`, int32 [1] on the device."""

    count: Tensor
    each: int


def zeroed_words(words: int, live: UsedWords) -> Tensor:
    """int32 [words]: zero in the words in use, the rest uninitialised."""
    found = torch.empty(words, dtype=torch.int32, device=live.count.device)
    constants = {"LIVE": True, "BLOCK": _WORDS}
    kernel("lookup_kernels.clear")(-(-words // _WORDS), (found, live.count), (words, live.each), constants)
    return found


def prefix_counts(words: Tensor, live: UsedWords | None = None) -> tuple[Tensor, Tensor]:
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
    return mask_words_torch(rows)


def mask_words_torch(rows: Tensor) -> Tensor:
    """As mask_words, in plain torch."""
    words = [(rows[:, first : first + WORD] >= 0) for first in range(0, rows.shape[1], WORD)]
    weights = [torch.tensor([1 << k for k in range(w.shape[1])], dtype=torch.int32, device=rows.device) for w in words]
    if not words:
        return rows.new_zeros((rows.shape[0], 0), dtype=torch.int32)
    return torch.stack([(w * v).sum(1, dtype=torch.int32) for w, v in zip(words, weights, strict=True)], dim=1)


def padded(values: Sequence[int], filler: int) -> tuple[int, ...]:
    """The values, filled up to four."""
    return (*values, *(filler,) * (4 - len(values)))


STRUCTURES = ("sorted", "hash", "grid", "bitmap", "bricks")


@dataclass(frozen=True)
class MapSchedule:
    """How neighbours are searched.

    structure: "hash" (open addressing), "grid" (an int32 per cell of the box), "bitmap" (a bit per cell with popcount
        ranks), "bricks" (two-level bitmap in Morton order), "sorted" (bisection of sorted keys; no kernel, any device).
    load: maximum load factor of a hash table. cells: maximum cells of a grid; 16 times as many for a bitmap.
    mirrored: query half of a submanifold map's offsets and write each hit twice.
    fused: generate, clip and look up output candidates in one kernel, not in stages through memory.
    block: cells that one program queries, a power of two; None: the structure's default. warps: warps per program.

    Raises OptionError for values out of range."""

    structure: str = "hash"
    load: float = 0.25
    cells: int = 1 << 27
    mirrored: bool = False
    fused: bool = True
    block: int | None = None
    warps: int = 1

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(f"structure={self.structure!r} is unknown; there are {', '.join(STRUCTURES)}")
        if not 0 < self.load <= 0.9:
            raise OptionError(f"load must be above 0 and at most 0.9, found {self.load}")
        if self.cells < 1:
            raise OptionError(f"cells must be at least 1, found {self.cells}")
        for name, value, least in (("block", self.block, 32), ("warps", self.warps, 1)):
            if value is not None and (value < least or value & (value - 1)):
                raise OptionError(f"{name} must be a power of two of at least {least}, found {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> MapSchedule:
        return MapSchedule(**json.loads(text))


def mirrors(rows: int) -> bool:
    """True if a hash table is faster with half the probes of a submanifold map: while the scattered writes stay in the
    cache (measured on an H200 with 18 thousand to a million rows)."""
    return 50_000 <= rows <= 500_000


@dataclass(frozen=True)
class Rates:
    """Parameters of the cost model: stream, bytes cleared per second; for each structure (fixed seconds, seconds per
    cell queried). Fitted to an H200, coordinates in random order."""

    stream: float = 4.0e12
    hash: tuple[float, float] = (14e-6, 11.5e-12)
    grid: tuple[float, float] = (8e-6, 5.0e-12)
    bitmap: tuple[float, float] = (17e-6, 5.5e-12)
    bricks: tuple[float, float] = (35e-6, 12e-12)


def costs(rows: int, cells: int, volume: int = 27, rates: Rates | None = None) -> dict[str, float]:
    """Estimated seconds for a submanifold map of `rows` rows in a box of `cells` cells, by structure."""
    rates = rates or Rates()
    passes = {
        "hash": 40.0 * rows,
        "grid": 4.0 * cells,
        "bitmap": 6.5 * cells / 8,
        "bricks": cells / 512 / 8 * 5 + 64 * rows,
    }
    found = {}
    for name, streamed in passes.items():
        fixed, per_cell = getattr(rates, name)
        found[name] = fixed + streamed / rates.stream + per_cell * rows * volume
    return found
