"""Neighbour search: structures that find the rows of coordinates.

Hash tables, dense grids and bitmaps are built and queried by Triton kernels, bricks by C kernels on a CPU; sorted keys,
in plain torch on any device, are the fallback. All structures find the same rows; of duplicates, which are reported as
errors, any row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import native_maps
from pumice.coords.box import INT32_MAX, Bounds, KeySpace
from pumice.coords.buffer import DUPLICATE, RANGE, CoordBuffer, offset_table, set_status
from pumice.coords.native_maps import NativeBricks
from pumice.coords.relation import Relation
from pumice.errors import CoordinateError, OptionError
from pumice.runtime.launch import has_triton, kernel, triton_unavailable_reason

WORD = 31  # Kernel offsets per mask word: bits of an int32 without its sign


class Neighbours(NamedTuple):
    """Input rows of each output. rows: int32 [capacity, K], -1 if a kernel offset has no input. masks: int32 [capacity,
    ceil(K / 31)] or None; bit k % 31 of word k // 31 is set if offset k has an input."""

    rows: Tensor
    masks: Tensor | None


def find(lookup: Lookup, coords: Tensor, bounds: Bounds) -> Tensor:
    """int32 [M]: row of each of `coords` int [M, 1+D], -1 if absent."""
    narrow = coords.int()
    if coords.dtype != torch.int32:
        # Coordinates beyond int32 are absent, as batch -1.
        narrow[:, 0] = torch.where((narrow == coords).all(1), narrow[:, 0], -1)
    queries = CoordBuffer.of(narrow, bounds)
    return lookup.neighbours(queries, Relation.of(queries.dim, 1)).rows[:, 0]


def lanes_of(volume: int) -> int:
    """Number of kernel offsets that a program handles at once, a power of two."""
    return 32 if volume > 16 else 1 << max(0, volume - 1).bit_length()


CELLS = 128  # Cells (rows times kernel offsets) that a program queries: few, as the slowest probe delays the program
_ROWS = 64  # Maximum rows of such a program
_WORDS = 2048  # Words of a bitmap that a program counts
_NOTED = 2048  # Cells of a program that computes masks
WARPS = 1  # Warps of a querying program: one, which needs no barrier


def rows_of(lanes: int) -> int:
    """Rows of one program, at most _ROWS: with one cell per row, a row's loads depend on each other."""
    return min(CELLS // lanes, _ROWS)


class UsedWords(NamedTuple):
    """Number of bitmap words in use: `each * count`. count: int32 [1] on the device."""

    count: Tensor
    each: int


def zeroed_words(words: int, live: UsedWords) -> Tensor:
    """int32 [words]: zero in the words in use, the rest uninitialised."""
    found = torch.empty(words, dtype=torch.int32, device=live.count.device)
    constants = {"LIVE": True, "BLOCK": _WORDS}
    kernel("lookup_kernels.clear")(-(-words // _WORDS), (found, live.count), (words, live.each), constants)
    return found


def prefix_counts(words: Tensor, live: UsedWords | None = None) -> tuple[Tensor, Tensor]:
    """(int64 [W]: inclusive prefix count of set bits << 32 | word, per bitmap word; int32 [1]: number of set bits).
    words: int32 [W], or int8 [32 * W] with one element per bit. live: words in use, None: all; others are skipped."""
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
    """The values, padded with `filler` to four."""
    return (*values, *(filler,) * (4 - len(values)))


# Schedules
@dataclass(frozen=True)
class MapSchedule:
    """Options of a neighbour search.

    structure: "hash" (open addressing), "grid" (an int32 per cell of the box), "bitmap" (a bit per cell with popcount
        ranks), "bricks" (a hash table of bricks of 64 cells, in C on a CPU), "sorted" (bisection of sorted keys; no
        kernel, any device).
    load: maximum load factor of a hash table. cells: maximum cells of a grid; 16 times as many for a bitmap.
    mirrored: query half of a submanifold map's offsets and write each hit twice.
    fused: find output coordinates by brick kernels, without candidates in memory; False: by sorting these.

    Raises OptionError for values out of range."""

    structure: str = "hash"
    load: float = 0.25
    cells: int = 1 << 27
    mirrored: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        OptionError.check("structure", self.structure, STRUCTURES)
        if not 0 < self.load <= 0.9:
            raise OptionError(f"load must be above 0 and at most 0.9, found {self.load}")
        if self.cells < 1:
            raise OptionError(f"cells must be at least 1, found {self.cells}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> MapSchedule:
        return MapSchedule(**json.loads(text))


def mirrors(rows: int) -> bool:
    """True if `MapSchedule.mirrored` speeds up a hash table of `rows` rows: its scattered writes must stay in the cache
    (measured on an H200 with 18 thousand to a million rows)."""
    return 50_000 <= rows <= 500_000


@dataclass(frozen=True)
class Rates:
    """Parameters of the cost model. stream: bytes cleared per second. By structure: (fixed seconds, seconds per queried
    cell). Fitted to an H200 with coordinates in random order."""

    stream: float = 4.0e12
    hash: tuple[float, float] = (14e-6, 11.5e-12)
    grid: tuple[float, float] = (8e-6, 5.0e-12)
    bitmap: tuple[float, float] = (17e-6, 5.5e-12)


def costs(rows: int, cells: int, volume: int = 27, rates: Rates = Rates()) -> dict[str, float]:  # noqa: B008 (immutable)
    """Estimated seconds for a submanifold map of `rows` rows in a box of `cells` cells, by structure."""
    passes = {"hash": 40.0 * rows, "grid": 4.0 * cells, "bitmap": 6.5 * cells / 8}
    found = {}
    for name, streamed in passes.items():
        fixed, per_cell = getattr(rates, name)
        found[name] = fixed + streamed / rates.stream + per_cell * rows * volume
    return found


# Structures that kernels query
MARGINS = {"hash": 8, "grid": 2, "bitmap": 2, "wide": 0}
"""Cells beyond each side of the box that have keys, so that an offset adds a constant to a row's key."""
BLOCKS = {"hash": 128, "grid": 256, "bitmap": 256, "wide": 128}
"""Cells that a program queries: few for hash tables, as the longest probe sequence delays the program."""
_INSERT_BLOCK = 128


class Table:
    """A hash table, dense grid or bitmap, built and queried by kernels."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule, kind: str) -> None:
        self._cloud, self._kind, self._schedule = cloud, kind, schedule
        self._margin = MARGINS[kind]
        self._bounds = _key_bounds(cloud, kind)
        self._bits, self._last = _row_bits(cloud), (1 << table_bits(cloud.capacity, schedule.load)) - 1
        self._table = self._empty_table()
        zero = offset_table(((0,) * cloud.dim,), cloud.device)
        numbers = (*_box(self._bounds, (1,) * cloud.dim), self._margin, self._bits, self._last)
        tensors = (cloud.coords, cloud.count, zero, self._table, cloud.status)
        constants = {"D": cloud.dim, "KIND": kind, "BLOCK": _INSERT_BLOCK}
        programs = -(-cloud.capacity // _INSERT_BLOCK)
        kernel("lookup_kernels.insert")(programs, tensors, numbers, constants)
        self._values = self._table
        if kind == "bitmap":
            self._table, _ = prefix_counts(self._table)
            self._values = torch.empty(cloud.capacity, dtype=torch.int32, device=cloud.device)
            tensors = (cloud.coords, cloud.count, self._table, self._values)
            constants = {"D": cloud.dim, "BLOCK": _INSERT_BLOCK}
            kernel("lookup_kernels.number_rows")(programs, tensors, numbers[:-2], constants)

    def _empty_table(self) -> Tensor:
        device = self._cloud.device
        if self._kind == "grid":
            return torch.full((self._bounds.cells,), INT32_MAX, dtype=torch.int32, device=device)
        if self._kind == "bitmap":
            return torch.zeros(-(-self._bounds.cells // 32), dtype=torch.int32, device=device)
        if self._kind == "hash":
            return torch.full((self._last + 1,), 2**63 - 1, dtype=torch.int64, device=device)
        return torch.full((self._last + 1 + _INSERT_BLOCK,), -1, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        held = {id(t): t for t in (self._table, self._values)}
        return sum(t.numel() * t.element_size() for t in held.values())

    def neighbours(self, outputs: CoordBuffer, relation: Relation, mirrored: bool | None = None) -> Neighbours:
        """See Lookup. mirrored: query half of a submanifold map's offsets and write each hit twice (no masks); None:
        as in the schedule, for submanifold maps only."""
        if mirrored is None:
            mirrored = self._schedule.mirrored and relation.mirrored and outputs.coords is self._cloud.coords
        volume, capacity, device = len(relation.offsets), outputs.capacity, outputs.device
        rows = torch.empty(capacity, volume, dtype=torch.int32, device=device)
        masks = torch.empty(capacity, -(-volume // WORD), dtype=torch.int32, device=device)
        if mirrored:
            rows.fill_(-1)
        lanes = lanes_of(volume // 2 if mirrored else volume)
        block = max(1, BLOCKS[self._kind] // lanes)
        reach = self._reach(outputs, relation)
        constants = {"D": outputs.dim, "K": volume, "KIND": self._kind, "EACH": reach is None, "MIRROR": mirrored}
        constants |= {"ROWS": block, "LANES": lanes}
        box = _box(self._bounds, relation.stride)
        numbers = (*box, self._margin, reach or 0, self._bits, self._last, capacity)
        offsets = offset_table(relation.offsets, device)
        held = (self._table, self._values, self._cloud.coords)
        tensors = (outputs.coords, outputs.count, offsets, *held, rows, masks)
        kernel("lookup_kernels.neighbours")(-(-capacity // block), tensors, numbers, constants, WARPS)
        return Neighbours(rows, None if mirrored else masks)

    def _reach(self, outputs: CoordBuffer, relation: Relation) -> int | None:
        """Distance from the box within which rows have neighbours; None: the margin is too narrow, check each cell."""
        most = relation.reach
        if self._kind == "wide":
            return None
        if outputs.coords is self._cloud.coords and all(s == 1 for s in relation.stride):
            # The outputs are the table's own rows.
            return 0 if most <= self._margin else None
        return most if 2 * most <= self._margin else None


class CoordHashTable(Table):
    """Open addressing with double hashing: a slot holds the int64 `key << bits | row` if this fits into 63 bits, else
    only the row, and lookups compare coordinates ("wide"). Keys 4n to 4n + 3 start in one group of four slots."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        super().__init__(
            cloud, schedule, "hash" if _key_bounds(cloud, "hash").cells << _row_bits(cloud) < 2**63 else "wide"
        )

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return triton_unavailable_reason(cloud.coords)


class DenseGrid(Table):
    """One int32 per cell of the box (TorchSparse, MLSys 2022, section 4.4)."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        super().__init__(cloud, schedule, "grid")

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return _too_many(cloud, "grid", schedule.cells)


class Bitmap(Table):
    """One bit per cell of the box, with prefix counts and the row of each set bit."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        super().__init__(cloud, schedule, "bitmap")

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return _too_many(cloud, "bitmap", 16 * schedule.cells)


def _too_many(cloud: CoordBuffer, kind: str, most: int) -> str | None:
    """Reason why an entry per cell of the box is not available, or None."""
    cells = _key_bounds(cloud, kind).cells
    return triton_unavailable_reason(cloud.coords) or (
        f"the box has {cells} cells, a {kind} at most {most}" if cells > most else None
    )


def _key_bounds(cloud: CoordBuffer, kind: str) -> Bounds:
    return cloud.bounds.grown([MARGINS[kind]] * cloud.dim)


def table_bits(capacity: int, load: float) -> int:
    """log2 of the number of slots for `capacity` rows at a load factor of at most `load`."""
    return max(6, math.ceil(math.log2(max(1, capacity) / load)))


def _row_bits(cloud: CoordBuffer) -> int:
    return max(1, (cloud.capacity - 1).bit_length())


def _box(bounds: Bounds, steps: Sequence[int]) -> tuple[int, ...]:
    """Kernel arguments of a box: batch size, four low corners, four extents, four steps."""
    return (bounds.batch, *padded(bounds.low, 0), *padded(bounds.extents, 1), *padded(steps, 1))


# Sorted keys
_DEAD = 2**63 - 1  # The key of padding rows; no cell has it


class SortedKeys:
    """Sorted row-major keys of the rows, searched by bisection in plain torch.
    _Narrow: in a box grown by a relation's reach every kernel offset is a constant key difference, and offsets of
    consecutive differences share a search. _Wide: a box of any extents."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        self._cloud = cloud
        self._table: _Narrow | _Wide = _table_of(cloud, (1,) * cloud.dim)
        live = cloud.valid_mask()
        set_status(cloud.status, RANGE, (live & ~cloud.bounds.contains(cloud.coords)).any())
        keys = self._table.keys
        twice = (keys[1:] == keys[:-1]) & (keys[1:] != _DEAD)
        set_status(cloud.status, DUPLICATE, twice.any())

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return None

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def neighbours(self, outputs: CoordBuffer, relation: Relation) -> Neighbours:
        """See Lookup. `rows` is a transposed view of [K, capacity]."""
        volume, device = len(relation.offsets), outputs.device
        if self._cloud.capacity == 0 or outputs.capacity == 0 or volume == 0:
            return Neighbours(torch.full((outputs.capacity, volume), -1, dtype=torch.int32, device=device), None)
        reach = [max(abs(o[axis]) for o in relation.offsets) for axis in range(relation.dim)]
        # Outputs within reach of the box query up to twice as far; others have no neighbours.
        table = self._table  # Read once: another thread may replace it.
        if isinstance(table, _Narrow) and not table.reaches([2 * r for r in reach]):
            table = self._table = _table_of(self._cloud, [max(1, 2 * r) for r in reach])
        met = table.search(outputs, relation, reach)
        if not outputs.exact:
            met = torch.where(outputs.valid_mask(), met, -1)
        return Neighbours(met.t(), None)


def _table_of(cloud: CoordBuffer, reach: Sequence[int]) -> _Narrow | _Wide:
    try:
        return _Narrow(cloud, KeySpace(cloud.bounds.grown(reach)))
    except CoordinateError:
        return _Wide(cloud)


class _Narrow:
    """Sorted keys of a box of less than 2**63 cells."""

    def __init__(self, cloud: CoordBuffer, space: KeySpace) -> None:
        self._bounds, self._space = cloud.bounds, space
        keys = space.keys(cloud.coords)
        if not cloud.exact:
            keys = torch.where(cloud.valid_mask(), keys, _DEAD)
        self.keys, self._rows = torch.sort(keys, stable=True)

    @property
    def nbytes(self) -> int:
        return 16 * len(self.keys)

    def reaches(self, reach: Sequence[int]) -> bool:
        grown = self._space.bounds
        return all(a - low >= r for a, low, r in zip(self._bounds.low, grown.low, reach, strict=True))

    def search(self, outputs: CoordBuffer, relation: Relation, reach: Sequence[int]) -> Tensor:
        """int32 [K, capacity]: row of each output at each kernel offset, -1 if none."""
        space, steps = self._space, [self._space.step(o) for o in relation.offsets]
        near = self._bounds.grown(reach).contains(outputs.coords, relation.stride)
        base = torch.where(near, space.keys(outputs.coords, relation.stride), min(-max(steps), 0) - 1)
        found: list[Tensor] = [base] * len(steps)
        for taps in _runs(steps):
            self._find_run(base + steps[taps[0]], taps, found)
        return torch.stack(found)

    def _find_run(self, wanted: Tensor, taps: list[int], found: list[Tensor]) -> None:
        """Set found[taps[n]] to the rows of the keys `wanted + n`, -1 if absent."""
        last = len(self.keys) - 1
        at = torch.searchsorted(self.keys, wanted)
        for distance, tap in enumerate(taps):
            place = at.clamp(max=last)
            hit = self.keys[place] == wanted + distance
            found[tap] = torch.where(hit, self._rows[place], -1).int()
            at += hit


class _Wide:
    """Sorted keys of a box of any extents: before an axis that would exceed 63 bits, keys are replaced by ranks."""

    def __init__(self, cloud: CoordBuffer) -> None:
        self._bounds = cloud.bounds
        self._levels: list[Tensor | None] = []
        keys, cells = cloud.coords[:, 0].long(), max(cloud.bounds.batch, 1)
        known = cloud.valid_mask() & cloud.bounds.contains(cloud.coords)
        for axis, (low, high) in enumerate(zip(cloud.bounds.low, cloud.bounds.high, strict=True)):
            level = None
            if cells * (high - low + 1) >= _DEAD:
                level = torch.sort(torch.where(known, keys, _DEAD))[0]
                keys, cells = torch.searchsorted(level, keys), len(level)
            self._levels.append(level)
            keys = keys * (high - low + 1) + cloud.coords[:, axis + 1].long() - low
            cells *= high - low + 1
        self.keys, self._rows = torch.sort(torch.where(known, keys, _DEAD), stable=True)

    @property
    def nbytes(self) -> int:
        return 16 * len(self.keys) + 8 * sum(len(level) for level in self._levels if level is not None)

    def search(self, outputs: CoordBuffer, relation: Relation, reach: Sequence[int]) -> Tensor:
        """As _Narrow.search."""
        scaled = outputs.coords.long() * torch.tensor((1, *relation.stride), device=outputs.device)
        offsets = (torch.tensor((0, *o), device=outputs.device) for o in relation.offsets)
        return torch.stack([self._rows_of(scaled + offset) for offset in offsets])

    def _rows_of(self, coords: Tensor) -> Tensor:
        known, keys = self._bounds.contains(coords), coords[:, 0]
        axes = zip(self._levels, self._bounds.low, self._bounds.high, strict=True)
        for axis, (level, low, high) in enumerate(axes):
            if level is not None:
                keys, hit = _bisect(level, keys)
                known &= hit
            keys = keys * (high - low + 1) + coords[:, axis + 1] - low
        at, hit = _bisect(self.keys, torch.where(known, keys, -1))
        return torch.where(hit, self._rows[at], -1).int()


def _bisect(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(index of each wanted key in sorted `keys`, True if present)."""
    at = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return at, keys[at] == wanted


def _runs(steps: Sequence[int]) -> list[list[int]]:
    """Kernel offsets in groups of consecutive key differences, which share one search."""
    runs: list[list[int]] = []
    for tap in sorted(range(len(steps)), key=lambda t: steps[t]):
        if runs and steps[tap] == steps[runs[-1][-1]] + 1:
            runs[-1].append(tap)
        else:
            runs.append([tap])
    return runs


class NativeTable:
    """Bricks in C, on a CPU (coords.native_maps)."""

    def __init__(self, cloud: CoordBuffer, schedule: MapSchedule) -> None:
        self._cloud, self._schedule = cloud, schedule
        self._bricks = NativeBricks(cloud)

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        return native_maps.refusal(cloud.coords, cloud.bounds)

    @property
    def nbytes(self) -> int:
        return self._bricks.nbytes

    def neighbours(self, outputs: CoordBuffer, relation: Relation) -> Neighbours:
        """See Lookup. Offsets that reach too many bricks are searched in sorted keys."""
        rows = self._bricks.rows(outputs, relation)
        if rows is None:
            return SortedKeys(self._cloud, self._schedule).neighbours(outputs, relation)
        return Neighbours(rows, None)


# Choice of the structure
Lookup = Table | SortedKeys | NativeTable
"""A search structure from coordinates to the rows of a buffer. neighbours(outputs, relation): the row at
`stride * out + offset` for every output and kernel offset; nbytes: device memory in use."""


STRUCTURES: Mapping[str, type[SortedKeys | NativeTable | CoordHashTable | DenseGrid | Bitmap]] = {
    "sorted": SortedKeys,
    "bricks": NativeTable,
    "hash": CoordHashTable,
    "grid": DenseGrid,
    "bitmap": Bitmap,
}


def lookup_of(cloud: CoordBuffer, schedule: MapSchedule | None = None) -> Lookup:
    """The structure that the schedule names (None: the cost model's choice), built over the buffer.

    Duplicates and out-of-bounds coordinates set bits of the buffer's status. Raises OptionError, with the reason, if
    the structure is not available."""
    schedule = schedule or default(cloud)
    reason = STRUCTURES[schedule.structure].refusal(cloud, schedule)
    if reason is not None:
        raise OptionError(f"structure={schedule.structure!r} is not available: {reason}")
    return STRUCTURES[schedule.structure](cloud, schedule)


def default(cloud: CoordBuffer) -> MapSchedule:
    """The schedule of the cheapest available structure by the cost model. Without Triton: bricks, or sorted keys if
    there is no C compiler."""
    estimates = costs(cloud.capacity, cloud.bounds.cells)
    for name in sorted(estimates, key=estimates.__getitem__):
        schedule = MapSchedule(name, mirrored=name == "hash" and mirrors(cloud.capacity))
        if STRUCTURES[name].refusal(cloud, schedule) is None:
            return schedule
    return MapSchedule("bricks" if NativeTable.refusal(cloud, MapSchedule()) is None else "sorted")


def explain(cloud: CoordBuffer) -> str:
    """Text: each structure's estimated time for 27 kernel offsets; the chosen one is marked."""
    chosen = default(cloud).structure
    estimates = costs(cloud.capacity, cloud.bounds.cells)
    lines = [f"{cloud.capacity} rows in a box of {cloud.bounds.cells} cells, {cloud.bounds.batch} batch items"]
    for name, structure in STRUCTURES.items():
        reason = structure.refusal(cloud, MapSchedule(name))
        cost = f"{1e3 * estimates[name]:.3f} ms estimated" if name in estimates else "without kernels"
        lines.append(f"{'->' if name == chosen else '  '} {name:7} {cost if reason is None else reason}")
    return "\n".join(lines)
