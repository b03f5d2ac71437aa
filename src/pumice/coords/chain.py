"""Build all kernel maps of a network in some twenty launches and one host synchronisation.

Steps (strided convolutions) derive coarser levels from the network's coordinates, the finest level; windows
(submanifold convolutions) stay on a level. The cells of a level that a finest voxel reaches form a box, computed by
shifting, dividing and clipping intervals, so all levels are built at once: one kernel inserts their cells into one hash
table and lists the distinct ones, a radix sort puts these in (level, batch, Morton) order, one kernel finds all
neighbours.

Keys are int64: level - 4 from bit 61 up, then the batch index (10 bits) and c + 2^(bits - 1) of each axis (AXIS_BITS).
Axes are concatenated in the table's keys. Coordinates out of range are refused: callers build their maps level by
level. There is room for some rows on each coarser level and on all together (Room), and sort keys have few bits
(KeyLayout), both estimated from earlier scenes; if they do not suffice, the maps are built again. Sizes stay on the
device, in int32 `words`, until all maps are counted:

    words[0], words[1]       status bits, number of batch items
    words[4]                 rows of all coarser levels
    words[8 + 4 l]           rows of level l
    words[9 + 4 a]           2^30 + the maximum coordinate of axis a, words[10 + 4 a]: 2^30 - the minimum
    words[ENTRIES + s]       tile entries of segment s
    words[PAIRS + 32 m + k]  pairs of kernel offset k of map m

Segment s is map s of those laid out in tiles (chain_tiles), which are numbered first. Every stage is a Triton kernel
(chain_kernels) or, without Triton, plain torch (`*_torch`), with bitwise equal valid rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import tiles
from pumice.coords.box import INT32_MAX, Bounds
from pumice.coords.buffer import DUPLICATE, RANGE, CoordBuffer
from pumice.coords.codes import morton_unique
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.lookup import WORD, Neighbours
from pumice.coords.outputs import distinct_outputs, level_key, site_of
from pumice.coords.relation import Relation
from pumice.coords.segments import WHOLE
from pumice.coords.tiles import Digits, SortSpec
from pumice.runtime.launch import (
    Part,
    aligned,
    allocate,
    cached_device_constant,
    carve,
    has_triton,
    kernel,
    to_device_async,
)

SAME, DOWN, UP = range(3)  # Kinds of maps, see Place
Place = tuple[int, int, Relation]
"""A map: (kind, level of its outputs, relation). Its inputs are on that level (SAME: a window), the next finer one
(DOWN: a step) or the next coarser one (UP: a transposed step)."""
Level = tuple[tuple[tuple[int, Relation], ...], tuple[int, int | None, Relation] | None]
"""Maps of a level: ((number, window) each, (number, number of its UP map if any, step) to the next level if any)."""
AXIS_BITS = {1: 32, 2: 25, 3: 17, 4: 12}  # Bits per axis in a key, by D
BATCHES = 1 << 10
MARGIN = 64  # Coordinates within this distance of the key range's ends are refused
MOST_ROWS = 1 << 20  # Beyond, buffers would be large, and launch overhead no longer matters
LEVELS = 8
SIDE, GROUPS = 32, 64  # Maximum numbers of maps, and of a map's groups of kernel offsets
CELLS, COUNTS, STRIDE = 4, 8, 4
_APART = 4  # Entries between the row counts of buffered levels: kernels take 16-byte aligned addresses
ENTRIES = COUNTS + STRIDE * LEVELS
PAIRS = ENTRIES + SIDE
_FAR = 1 << 30
_LANES = 256  # Cells per program of insert_cells
_PLACED = 512  # Rows per program of place
_SEARCHED, _MOST_SEARCHED = 512, 64  # Neighbours per program of find_neighbours, and its maximum rows
_WARPS = 4  # Warps of find_neighbours
SAMPLED = 1 << 14  # Maximum number of rows sampled to estimate the frequency of groups
WIDTH = 20  # Bits of a row's sort key, below its segment's number
_DIGIT, _LEAST_DIGIT = 9, 8  # Maximum and minimum bits of a radix-sort digit: 1 to 16 segments share kernels
_SORTED = 512  # Rows per block of the radix sorts
RANKED = 1 << 13  # Up to so many rows are ranked by comparing each with all: one launch, where the radix sort has six
SMALL, LARGE = 64, 128  # Outputs per tile
CHOSEN = 10  # First row of `layout` with mask words of sort groups
_FIRST_ESTIMATE = 1.5  # Capacity of a coarser level per finest row, before any scene was seen
_LEAST = 1 << 12  # Minimum capacity of a coarser level that can have as many rows
_ROOM = 1.15  # Capacity per row of the coarser levels seen
_WASTED = 1.5  # A guess of so many times the room that is then learnt is not kept
_SLOTS = 3  # Slots of the hash table per cell for which there is room: with 2, probes of large scenes take 10 % longer


@dataclass(frozen=True)
class TileRule:
    """Layout of maps. Tiles have 64 outputs if a map has fewer than `few_rows`, else 128. Maps of at most `few_taps`
    kernel offsets are sorted from `sorted_rows` outputs on, others always; only others have their runs of tile entries
    also cut into pieces of `lengths`. groups: ascending (upper bound of pairs, pairs per group)."""

    few_rows: int
    few_taps: int
    sorted_rows: int
    lengths: tuple[int, ...] = ()
    groups: tuple[tuple[float, int], ...] = ()

    def group(self, pairs: int) -> int:
        """Pairs per group of a map with `pairs` pairs."""
        return next(length for below, length in self.groups if pairs < below)

    def block(self, rows: int) -> int:
        return SMALL if rows < self.few_rows else LARGE

    def least(self, volume: int) -> int:
        """Minimum outputs for which a map of `volume` kernel offsets is sorted."""
        return self.sorted_rows if volume <= self.few_taps else 0

    def pieces(self, volume: int) -> tuple[int, ...]:
        """Maximum piece lengths of the runs of a map of `volume` kernel offsets."""
        return (WHOLE,) if volume <= self.few_taps else (*self.lengths, WHOLE)


@dataclass(frozen=True)
class ChainRequest:
    """Maps to build. steps: from each level to the next; windows: per level; tiled: maps to lay out in tiles; paired:
    also list the pair groups, needed for gradients, of tiled maps; for an UP map those of its DOWN map."""

    dim: int
    steps: tuple[Relation, ...]
    windows: tuple[tuple[Relation, ...], ...]
    tiled: tuple[Place, ...]
    rule: TileRule
    paired: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dim, self.steps, self.windows, self.tiled, self.rule, self.paired))

    @cached_property
    def compile_request(self) -> ChainRequest:
        """The request without `rule.few_rows`, on which no kernel depends: the cache key of compilation."""
        return replace(self, rule=replace(self.rule, few_rows=0))

    @cached_property
    def levels(self) -> int:
        return len(self.steps) + 1

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(number of a tiled map, maximum piece length) of every list of pieces."""
        each = zip(range(len(self.tiled)), self.volumes, strict=False)
        return tuple([(place, most) for place, volume in each for most in self.rule.pieces(volume)])

    @cached_property
    def grouped(self) -> tuple[int, ...]:
        """Numbers of the maps with pair groups."""
        if not self.paired:
            return ()
        steps = {(DOWN, level + 1, step) for kind, level, step in self.tiled if kind == UP}
        return tuple([n for n, place in enumerate(self.maps) if place[0] != UP and place in {*self.tiled, *steps}])

    @cached_property
    def maps(self) -> tuple[Place, ...]:
        """All maps in the order of their numbers, tiled ones first."""
        same = [(SAME, level, window) for level, windows in enumerate(self.windows) for window in windows]
        down = [(DOWN, level + 1, step) for level, step in enumerate(self.steps)]
        return tuple(dict.fromkeys((*self.tiled, *same, *down)))

    @cached_property
    def by_level(self) -> tuple[Level, ...]:
        number = {place: number for number, place in enumerate(self.maps)}
        found: list[Level] = []
        for level in range(self.levels):
            windows = self.windows[level] if level < len(self.windows) else ()
            steps = [(number[DOWN, level + 1, s], number.get((UP, level, s)), s) for s in self.steps[level : level + 1]]
            found.append((tuple([(number[SAME, level, w], w) for w in windows]), steps[0] if steps else None))
        return tuple(found)

    @cached_property
    def volumes(self) -> tuple[int, ...]:
        """Number of kernel offsets of each map."""
        return tuple(len(relation.offsets) for *_, relation in self.maps)

    @cached_property
    def num_read(self) -> int:
        """Length of `words`, which the host reads and passes to the methods below."""
        return PAIRS + SIDE * len(self.maps)

    def rows_in(self, words: Sequence[int], level: int) -> int:
        return words[COUNTS + STRIDE * level]

    def found_in(self, words: Sequence[int]) -> Room:
        """Rows of the largest coarser level, and of all."""
        counts = words[COUNTS + STRIDE : COUNTS + STRIDE * self.levels : STRIDE]
        return Room(max(counts, default=0), sum(counts))

    def pairs_in(self, words: Sequence[int], number: int) -> Sequence[int]:
        """Pairs of map `number`, per kernel offset."""
        at = PAIRS + SIDE * number
        return words[at : at + self.volumes[number]]

    def box_in(self, words: Sequence[int]) -> Bounds:
        """Bounding box of the finest level, for D > 1."""
        at = range(COUNTS, COUNTS + STRIDE * self.dim, STRIDE)
        return Bounds(tuple([_FAR - words[n + 2] for n in at]), tuple([words[n + 1] - _FAR for n in at]), words[1])

    @cached_property
    def spans(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """(minimum, maximum offset, stride) by step and axis."""
        each = [zip(_spans(step), step.stride, strict=True) for step in self.steps]
        return tuple([tuple([(first, last, stride) for (first, last), stride in step]) for step in each])

    @cached_property
    def wide(self) -> int:
        """Maximum cells along an axis, of any level, that a finest voxel reaches."""
        most = [1] * self.dim
        found = 1
        for step in self.steps:
            spans = zip(most, _spans(step), step.stride, strict=True)
            most = [(cells - 1 + last - first) // stride + 1 for cells, (first, last), stride in spans]
            found = max(found, *most)
        return found

    @cached_property
    def lanes(self) -> int:
        """Maximum cells of a level that a finest voxel reaches, as a power of two."""
        return 1 << (self.wide**self.dim - 1).bit_length()


def _spans(step: Relation) -> tuple[tuple[int, int], ...]:
    """(minimum, maximum) offset of an output's inputs, by axis."""
    return tuple((0, s - 1) for s in step.stride) if step.policy == "floor_unique" else step.spans


def refusal(geometry: Geometry, request: ChainRequest) -> str | None:
    """Reason why a request's maps cannot be built together, or None."""
    reason = request_refusal(request)
    if reason is not None:
        return reason
    if geometry.dim != request.dim or geometry.buffered is not None:
        return "other axes, or coordinates in a buffer"
    if begun(geometry, request):
        return "there are levels or maps already"
    if not 0 < len(geometry) <= MOST_ROWS:
        return f"{len(geometry)} voxels; 1 to {MOST_ROWS} are supported"
    bounds = geometry.outline.bounds
    if bounds.batch < 0 and geometry.dim > 1:
        # Bounds not read yet: insert_cells finds and checks them.
        return None
    bounds = geometry.bounds
    half, margin = 1 << AXIS_BITS[geometry.dim] - 1, MARGIN if geometry.dim > 1 else 0
    low, high = margin - half, half - margin
    if min(bounds.low) < low + (margin > 0) or max(bounds.high) >= high or not 0 < bounds.batch <= BATCHES:
        return f"coordinates from {bounds.low} to {bounds.high} with {bounds.batch} batch items exceed the keys"
    return None


def begun(geometry: Geometry, request: ChainRequest) -> bool:
    """True if a requested map of the finest level, or the next level, is cached already."""
    first = (*(request.windows[0] if request.windows else ()), *request.steps[:1])
    there = any((relation, None) in geometry.maps for relation in first)
    return there or (bool(request.steps) and level_key(request.steps[0]) in geometry.levels)


@lru_cache(maxsize=256)
def request_refusal(request: ChainRequest) -> str | None:
    """As `refusal`, for reasons that depend on the request alone."""
    if not request.maps:
        return "there are no maps"
    if request.levels > LEVELS or len(request.maps) > SIDE or request.dim not in AXIS_BITS:
        return f"{request.dim} axes, {len(request.steps)} steps and {len(request.maps)} maps are not supported"
    if any(not _is_supported_step(step) for step in request.steps):
        return "steps are not strided windows without dilation"
    if request.lanes > 32 or sum(step.reach for step in request.steps) + request.levels > MARGIN // 2:
        return "a voxel reaches too many cells"
    unsupported = [relation for _, _, relation in request.maps if not is_supported(relation)]
    return f"{len(unsupported[0].offsets)} kernel offsets are not supported" if unsupported else None


@lru_cache(maxsize=256)
def is_supported(relation: Relation) -> bool:
    """True if the relation has 1 to WORD kernel offsets, few groups of them, and a short reach."""
    volume = len(relation.offsets)
    groups = tiles.groups_of(relation, SortSpec(0, volume), torch.device("cpu"))
    return 0 < volume <= WORD and len(groups) <= GROUPS and relation.reach <= MARGIN // 2


def _is_supported_step(step: Relation) -> bool:
    if step.custom is not None or step.policy not in ("support", "floor_unique"):
        return False
    return step.policy == "floor_unique" or all(
        d == 1 or k == 1 for d, k in zip(step.dilation, step.kernel, strict=True)
    )


class KeyLayout(NamedTuple):
    """Sort key of a coarser cell: level - 1 from bit `level_at` up, batch index from bit `item_at` up, then the Morton
    code of the coordinates plus `half`. bits: of a coordinate's magnitude; signed: some are negative; items: bits of a
    batch index; levels: bits of a level."""

    dim: int
    bits: int
    signed: bool
    items: int
    levels: int

    @staticmethod
    def of(request: ChainRequest, bounds: Bounds) -> KeyLayout:
        """The least layout for finest coordinates within `bounds`; for unknown bounds that of all that keys can
        represent."""
        dim, levels = request.dim, max(0, len(request.steps) - 1).bit_length()
        if bounds.batch < 0:
            return KeyLayout(dim, AXIS_BITS[dim] - 1, True, BATCHES.bit_length() - 1, levels)
        low, high = [*bounds.low], [*bounds.high]
        least, most = 0, 0
        for step in request.spans:
            for axis, (first, last, stride) in enumerate(step):
                low[axis], high[axis] = -((last - low[axis]) // stride), (high[axis] - first) // stride
            least, most = min(least, *low), max(most, *high)
        return KeyLayout(dim, max(most, ~least).bit_length(), least < 0, max(bounds.batch - 1, 0).bit_length(), levels)

    def joined(self, other: KeyLayout) -> KeyLayout:
        """The least layout for the coordinates of both."""
        signed, items = self.signed or other.signed, max(self.items, other.items)
        return self._replace(bits=max(self.bits, other.bits), signed=signed, items=items)

    @property
    def half(self) -> int:
        return self.signed << self.bits

    @property
    def item_at(self) -> int:
        return self.dim * (self.bits + self.signed)

    @property
    def level_at(self) -> int:
        return self.item_at + self.items

    @property
    def digits(self) -> Digits:
        """Radix-sort digits of the keys."""
        return Digits(max(1, -(-(self.level_at + self.levels) // _DIGIT)), _DIGIT, _SORTED)

    def counted(self, room: int) -> list[tuple[int, int]]:
        """Shapes of the digit counts of at most `room` cells."""
        return [(-(-room // _SORTED) + 1, 1 << _DIGIT)] * (self.digits.turns if room else 0)


class Room(NamedTuple):
    """A capacity, in rows: `most` on each coarser level, `cells` on all of them together."""

    most: int
    cells: int

    @staticmethod
    def of(request: ChainRequest, most: int) -> Room:
        """Room for this many rows on every coarser level."""
        return Room(most, len(request.steps) * most)


class Chain:
    """Device arrays of the levels and maps of N coordinates, carved out of a few allocations.

    most: capacity of each coarser level, room: of all together. key_layout: of the sort keys of coarser levels' cells;
    cell_keys int64, cell_slots int32: two arrays each, whose first ones receive sort keys and hash slots, unordered;
    cell_starts int32: counts of digits for their sort. words: see the module. totals int32: sampled rows per group of
    kernel offsets, by map (tiles.group_totals). table int64, values int32: keys of the hash table and their rows.
    coarse int32 [levels - 1, most, 1 + D]: coordinates of coarser levels. tables, masks int32: neighbour tables and
    masks of all maps, concatenated; begins: their starts by map, then the ends (`starts_of`). status: words[0],
    receives error bits.

    For tiles: layout: see chain_tiles.lay_out; keys, order: of the sort of all segments' rows; ranked: True if they are
    few (see RANKED), else starts and rooms are those of their radix sort; tile_rows int32: rows of tiles, -1 for
    padding; tile_masks int32: kernel offsets of each tile; ends int32: prefix counts of tile entries within each
    segment."""

    buffered = False
    request: ChainRequest
    coords: Tensor
    rows: int
    most: int
    room: int
    ranked: bool
    digits: Digits
    words: Part
    totals: Part
    starts: list[Part]
    table: Part
    key_layout: KeyLayout
    cell_keys: list[Part]
    cell_slots: list[Part]
    cell_starts: list[Part]
    rooms: list[Part]
    values: Part
    coarse: Part
    tables: Part
    masks: Part
    layout: Part
    keys: Part
    order: Part
    tile_rows: Part
    tile_masks: Part
    ends: Part
    count: Part
    valid: Part
    limits: Part
    status: Part

    def __init__(self, coords: Tensor, capacity: Room, request: ChainRequest, key_layout: KeyLayout) -> None:
        self.request, self.coords, self.rows = request, coords, len(coords)
        self.most, self.room = most, room = capacity
        self.key_layout = key_layout
        steps, number, device = len(request.steps), len(request.tiled), coords.device
        levels = [level for _, level, _ in request.tiled]
        self.largest: int = max([most if level else self.rows for level in levels], default=0)
        tiled = sum([most if level else self.rows for level in levels])
        self.digits = digits = digits_of(number)
        self.ranked = tiled <= RANKED
        turns = 0 if self.ranked else digits.turns
        bins, counted = (-(-tiled // digits.block) + 1, 1 << digits.width), key_layout.counted(room)
        self.size: int = _slots(self.rows + room)
        cleared = (request.num_read,), (GROUPS * len(request.maps),), *counted, *(bins,) * turns
        self.table, self.words, self.totals, *starts = _cleared(device, self.size, cleared)
        self.cell_starts, self.starts = starts[: len(counted)], starts[len(counted) :]
        shapes = (room,), (room,), *((tiled,),) * max(0, turns - 1)
        wide = torch.empty(sum([aligned(count) for (count,) in shapes]), dtype=torch.int64, device=device)
        first, second, *self.rooms = carve(wide, shapes)
        self.cell_keys = [first, second]
        self.begins: list[tuple[int, int]] = starts_of(request, aligned(self.rows), most)
        entries, masked = self.begins[-1]
        of_tiles = -(-tiled // SMALL) + 5 * number
        of_levels = (self.size,), (room,), (room,), (steps, most, 1 + request.dim), (entries,), (masked,)
        of_rows = (CHOSEN + SIDE, SIDE), (tiled,), (tiled,), (tiled + number * LARGE,), (of_tiles,), (of_tiles,)
        parts = allocate(device, (*of_levels, *of_rows))
        self.values, *self.cell_slots, self.coarse, self.tables, self.masks = parts[:6]
        self.layout, self.keys, self.order, self.tile_rows, self.tile_masks, self.ends = parts[6:]
        # valid, limits: placeholders for kernel arguments that only BufferedChain has.
        self.count = self.valid = self.limits = self.status = self.words

    def programs(self, rows: int) -> int:
        """Programs of find_neighbours, `rows` rows each."""
        *_, (_, _, fine, coarse) = _coefficients(self.request)
        return fine * -(-self.rows // rows) + coarse * -(-self.most // rows)

    def release(self) -> None:
        """Free the workspace that maps do not need."""
        del self.cell_keys, self.rooms

    def counts(self) -> list[int]:
        """Rows of each level; for torch fallbacks, as it synchronises with the host."""
        found = self.words.tensor()[COUNTS : COUNTS + STRIDE * self.request.levels : STRIDE].tolist()
        return [self.rows, *(min(count, self.most) for count in found[1:])]

    def table_of(self, place: int, count: int) -> Part:
        """int32 [count, K]: neighbour table of map `place`."""
        return self.tables.cut(self.begins[place][0], (count, self.request.volumes[place]))

    def masks_of(self, place: int, count: int) -> Part:
        """int32 [count]: masks of map `place`."""
        return self.masks.cut(self.begins[place][1], (count,))


class BufferedChain:
    """Chain without tiles for a coordinate buffer. most_rows: capacity of each level. Padding rows of levels and tables
    are -1, of masks 0. valid int32: row count of coarser level l at entry 4 l. limits: see chain_kernels."""

    buffered = True
    request: ChainRequest
    coords: Tensor
    count: Tensor
    status: Tensor
    rows: int
    most: int
    room: int
    words: Part
    valid: Part
    masks: Part
    values: Part
    coarse: Part
    tables: Part
    table: Part
    key_layout: KeyLayout
    cell_keys: list[Part]
    cell_slots: list[Part]
    cell_starts: list[Part]
    totals: Part
    limits: Tensor

    def __init__(
        self, cloud: CoordBuffer, request: ChainRequest, most_rows: tuple[int, ...], key_layout: KeyLayout
    ) -> None:
        self.request, self._rows = request, most_rows
        self.coords, self.count, self.status = cloud.coords, cloud.count, cloud.status
        self.rows, self.most, self.room, device = cloud.capacity, max(most_rows), sum(most_rows[1:]), cloud.device
        self.size: int = _slots(sum(most_rows))
        self._places = _places(request, most_rows)
        *_, (entries, masked, _) = self._places
        self.key_layout, counted = key_layout, key_layout.counted(self.room)
        cleared = (COUNTS + STRIDE * LEVELS,), (_APART * LEVELS,), (masked,), *counted
        self.table, self.words, self.valid, self.masks, *self.cell_starts = _cleared(device, self.size, cleared)
        shapes = (self.size,), (self.room, 1 + request.dim), (entries,)
        count = sum([aligned(torch.Size(shape).numel()) for shape in shapes])
        nowhere = torch.full((count,), -1, dtype=torch.int32, device=device)
        self.values, self.coarse, self.tables = carve(nowhere, shapes)
        shapes = ((self.room,),) * 2
        wide = torch.empty(2 * aligned(self.room), dtype=torch.int64, device=device)
        self.cell_keys, self.cell_slots = carve(wide, shapes), allocate(device, shapes)
        self.totals, self.limits = self.words, _limit_table(request, most_rows, device)

    def programs(self, rows: int) -> int:
        assert rows == search_block(self.request)
        return self._places[-1][2]

    def table_of(self, place: int) -> Tensor:
        """int32 [capacity, K]: neighbour table of map `place`."""
        _, level, _ = self.request.maps[place]
        return self.tables.cut(self._places[place][0], (self._rows[level], self.request.volumes[place])).tensor()

    def neighbours(self, place: int) -> Neighbours:
        _, level, _ = self.request.maps[place]
        masks = self.masks.cut(self._places[place][1], (self._rows[level],)).tensor()
        return Neighbours(self.table_of(place), masks[:, None])

    def level(self, level: int, bounds: Bounds, status: Tensor) -> CoordBuffer:
        """The coordinates of a coarser level."""
        columns = 1 + self.request.dim
        first = sum(self._rows[1:level])
        coords = self.coarse.cut(first * columns, (self._rows[level], columns)).tensor()
        count = self.valid.cut(_APART * level, (1,)).tensor()
        return CoordBuffer(coords, count, bounds, status, needed=self.rows_needed(level))

    def rows_needed(self, level: int) -> Tensor:
        """int32 [1] on the device: rows of a coarser level, which may exceed its capacity."""
        return self.words.cut(COUNTS + STRIDE * level, (1,)).tensor()


def _slots(cells: int) -> int:
    """Size of the hash table for at most so many cells."""
    return 1 << max(6, (_SLOTS * cells - 1).bit_length())


def _cleared(device: torch.device, size: int, shapes: Sequence[tuple[int, ...]]) -> list[Part]:
    """An int64 array of this size and int32 arrays of these shapes, of zeros, in one allocation."""
    first, *rest = allocate(device, ((2 * size,), *shapes), torch.zeros)
    return [*carve(first.memory.view(torch.int64), ((size,),)), *rest]


@lru_cache(maxsize=256)
def _places(request: ChainRequest, most_rows: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(start of table, start of masks, programs of the maps before) of each map, then the totals."""
    found, block = [(0, 0, 0)], search_block(request)
    for (_, level, _), volume in zip(request.maps, request.volumes, strict=True):
        (table, mask, programs), rows = found[-1], most_rows[level]
        found.append((table + aligned(rows * volume), mask + aligned(rows), programs - rows // -block))
    return found


@cached_device_constant(1024)
def _limit_table(request: ChainRequest, most_rows: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [5, 32]: `limits` of chain_kernels."""
    found = torch.zeros(5, SIDE, dtype=torch.int64)
    found[0, : len(most_rows)] = torch.tensor(most_rows)
    found[1, : len(most_rows)] = torch.tensor([0, *accumulate(most_rows[1:], initial=0)][: len(most_rows)])
    places = _places(request, most_rows)[:-1]
    found[2:, : len(places)] = torch.tensor(places).t()
    return to_device_async(found, device)


@lru_cache(maxsize=64)
def digits_of(number: int) -> Digits:
    """Radix-sort digits for the rows of `number` segments."""
    bits = WIDTH + max(number - 1, 0).bit_length()
    turns = -(-bits // _DIGIT)
    return Digits(turns, max(_LEAST_DIGIT, -(-bits // turns)), _SORTED)


@lru_cache(maxsize=256)
def _coefficients(request: ChainRequest) -> list[tuple[int, int, int, int]]:
    """(a, b, c, d) of each map, then of the ends: its table starts at a * rows + b * most, its masks at c * rows +
    d * most. rows: of the finest level; most: capacity of a coarser one."""
    found, last = [(0, 0, 0, 0)], (0, 0, 0, 0)
    for (_, level, _), volume in zip(request.maps, request.volumes, strict=True):
        more = (volume, 0, 1, 0) if level == 0 else (0, volume, 0, 1)
        last = tuple(a + b for a, b in zip(last, more, strict=True))
        found.append(last)  # pyright: ignore[reportArgumentType]
    return found


def starts_of(request: ChainRequest, rows: int, most: int) -> list[tuple[int, int]]:
    """(start of table, start of masks) of each map, then the ends. rows: of the finest level, aligned."""
    return [(a * rows + b * most, c * rows + d * most) for a, b, c, d in _coefficients(request)]


class SizeEstimate:
    """Capacity of coarser levels per finest row, and layout of sort keys, estimated from earlier scenes. ratio: of the
    largest level; cells: of all."""

    def __init__(self, request: ChainRequest) -> None:
        self._bound = request.wide**request.dim
        self.ratio: float = min(self._bound, _FIRST_ESTIMATE)
        self.cells: float = len(request.steps) * self.ratio
        self._request, self._layout, self._guessed = request, None, True

    def most(self, rows: int, needed: int = 0) -> int:
        """Capacity for `rows` finest rows. needed: rows needed by a run that overflowed, or 0."""
        wanted = max(int(self.ratio * rows), 2 * needed, _LEAST) + 64
        return aligned(min(wanted, self._bound * rows))

    def room(self, rows: int, needed: Room) -> Room:
        """Room for `rows` finest rows. needed: by a run that overflowed, or 0."""
        most = self.most(rows, needed.most)
        cells = max(int(self.cells * rows), 2 * needed.cells, _LEAST) + 64
        return Room(most, min(aligned(cells), len(self._request.steps) * most))

    def key_layout(self, bounds: Bounds) -> KeyLayout:
        """The layout for coordinates within these bounds, possibly unknown ones."""
        if bounds.batch >= 0 or self._layout is None:
            return KeyLayout.of(self._request, bounds)
        return self._layout

    def learn(self, rows: int, room: Room, found: Room, needed: KeyLayout) -> bool:
        """Learn from a scene of `rows` finest rows. room: its capacity; found: rows of its coarser levels; needed: the
        least layout for its cells. True if the capacity was a first guess far above what is needed."""
        self._layout, guessed = needed if self._layout is None else self._layout.joined(needed), self._guessed
        if rows < _SORTED:
            return False
        before = (0.0, 0.0) if guessed else (self.ratio, self.cells)
        self.ratio, self.cells = (_remembered(was, _ROOM * n / rows) for was, n in zip(before, found, strict=True))
        self._guessed = False
        return guessed and room.cells > _WASTED * self.room(rows, Room(0, 0)).cells


def _remembered(before: float, seen: float) -> float:
    """The capacity per row, after a scene. It decays slowly: rare large scenes would overflow again."""
    return max(seen, 0.99 * before + 0.01 * seen)


@lru_cache(maxsize=64)
def estimate_of(request: ChainRequest) -> SizeEstimate:
    return SizeEstimate(request)


# Levels and neighbours


def find_maps(
    coords: Tensor, site: GridSpec, request: ChainRequest, room: Room, key_layout: KeyLayout | None = None
) -> Chain:
    """A chain with levels, neighbours and counts; no host synchronisation. key_layout: of sort keys; None: the least
    for the bounds of `site`."""
    chain = Chain(coords, room, request, key_layout or KeyLayout.of(request, site.bounds))
    if not has_triton(coords):
        find_maps_torch(chain, site)
        return chain
    start_kernels(chain, site)
    return chain


def start_kernels(chain: Chain | BufferedChain, site: GridSpec) -> None:
    """Launch the kernels that fill the hash table, order coarser levels and find all neighbours."""
    request = chain.request
    _insert(chain, site)
    if request.steps:
        total = chain.words.cut(CELLS, (1,))
        slots = tiles.sort_pairs(chain.key_layout.digits, chain.cell_keys, chain.cell_slots, chain.cell_starts, total)
        tensors = (slots, chain.table, chain.words, chain.values, chain.coarse, chain.status, chain.limits, chain.valid)
        constants = {"D": request.dim, "AXIS": AXIS_BITS[request.dim], "BLOCK": _PLACED, "BUFFERED": chain.buffered}
        kernel("chain_kernels.place")(-(-chain.room // _PLACED), tensors, (chain.most, chain.room), constants)
    _find_neighbours(chain)


def _insert(chain: Chain | BufferedChain, site: GridSpec) -> None:
    """Launch insert_cells."""
    request, rows, dim, box = chain.request, chain.rows, chain.request.dim, site.bounds
    if box.batch < 0:
        box = Bounds((-INT32_MAX,) * dim, (INT32_MAX,) * dim, BATCHES)
    block, zeros = max(1, _LANES // request.lanes), (0,) * (4 - dim)
    constants = {"D": dim, "AXIS": AXIS_BITS[dim], "WIDE": request.wide, "LANES": request.lanes}
    constants |= {"BLOCK": block, "BUFFERED": chain.buffered, "BINS": 1 << _DIGIT, "SORTED": _SORTED}
    own = chain.key_layout
    numbers = (rows, chain.room, chain.size - 1, own.half, own.item_at, own.level_at)
    numbers += (box.batch, *box.low, *zeros, *box.high, *zeros)
    moves = _moves(request, site.spatial_shape, chain.coords.device)
    digits = chain.cell_starts[0] if chain.cell_starts else chain.words
    tensors = (chain.coords, moves, chain.table, chain.values, chain.cell_keys[0], chain.cell_slots[0], digits)
    tensors += (chain.words, chain.status, chain.count)
    kernel("chain_kernels.insert_cells")(-(-rows // block) * request.levels, tensors, numbers, constants)


def search_block(request: ChainRequest) -> int:
    """Rows per program of find_neighbours."""
    return min(_MOST_SEARCHED, _SEARCHED // tiles.lanes_of(max(request.volumes)))


def _find_neighbours(chain: Chain | BufferedChain) -> None:
    """Launch find_neighbours."""
    request, rows, device = chain.request, chain.rows, chain.coords.device
    block = search_block(request)
    constants = {"D": request.dim, "AXIS": AXIS_BITS[request.dim], "LANES": tiles.lanes_of(max(request.volumes))}
    constants |= {"BLOCK": block, "BUFFERED": chain.buffered}
    plan, offsets, groups = plan_of(request, device)
    tensors = (chain.coords, chain.coarse, chain.table, chain.values, plan, offsets, groups)
    tensors += (chain.words, chain.totals, chain.tables, chain.masks, chain.limits)
    numbers = (rows, chain.most, chain.size - 1, len(request.maps), SAMPLED)
    kernel("chain_kernels.find_neighbours")(chain.programs(block), tensors, numbers, constants, _WARPS)


@cached_device_constant(256)
def _moves(request: ChainRequest, shape: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """int32 [steps, D, 5]: minimum and maximum offset, stride, minimum and maximum output coordinate, by step and axis.
    shape: spatial shape of the finest level."""
    found = torch.zeros(max(1, len(request.steps)), request.dim, 5, dtype=torch.int32)
    for number, step in enumerate(request.steps):
        shape = None if shape is None or not step.bounded else step.output_shape(shape)
        for axis, ((first, last), stride) in enumerate(zip(_spans(step), step.stride, strict=True)):
            ends = (-INT32_MAX, INT32_MAX) if shape is None else (0, shape[axis] - 1)
            found[number, axis] = torch.tensor((first, last, stride, *ends))
    return to_device_async(found, device)


@cached_device_constant(256)
def plan_of(request: ChainRequest, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(int32 [14, 32]: `plan` of chain_kernels, a column per map; int32 [., D]: kernel offsets of all maps; int32
    [maps, 2, 64]: mask words and sizes of each map's groups of kernel offsets)."""
    plan = torch.zeros(14, SIDE, dtype=torch.int32)
    groups = torch.zeros(len(request.maps), 2, GROUPS, dtype=torch.int32)
    offsets: list[tuple[int, ...]] = []
    for number, (kind, level, relation) in enumerate(request.maps):
        volume = len(relation.offsets)
        inputs = level + {SAME: 0, DOWN: -1, UP: 1}[kind]
        facts = (level, inputs, volume, kind == UP, request.rule.least(volume))
        plan[:, number][:14] = torch.tensor(
            (*facts, *_coefficients(request)[number], len(offsets), *relation.stride, *(1,) * (4 - relation.dim))
        )
        offsets += relation.offsets
        table = tiles.groups_of(relation, SortSpec(0, volume), torch.device("cpu"))
        groups[number, :, : len(table)] = table.t()
    padded = [*offsets, *[(0,) * request.dim] * SIDE]
    moved = (plan, torch.tensor(padded, dtype=torch.int32), groups)
    first, second, third = (to_device_async(each, device) for each in moved)
    return first, second, third


def find_maps_torch(chain: Chain, site: GridSpec) -> None:
    """As find_maps, in plain torch, level by level; fills `chain`."""
    request, wide, words = chain.request, chain.coords.long(), chain.words.tensor()
    if site.bounds.batch < 0:
        site = replace(site, bounds=Bounds.of(chain.coords))
    bounds = site.bounds
    low, high = wide.new_tensor((0, *bounds.low)), wide.new_tensor((bounds.batch - 1, *bounds.high))
    inside = ((wide >= low) & (wide <= high)).all(1)
    levels = [chain.coords[inside]]
    status = RANGE * (not bool(inside.all()))
    box = bounds
    if not status:
        status |= DUPLICATE * (len(morton_unique(levels[0], box)[0]) < len(levels[0]))
    for number, step in enumerate(request.steps):
        site = site_of(site, step)
        levels.append(distinct_outputs(levels[-1], box, step, site))
        box, kept = site.bounds, levels[-1][: chain.most]
        chain.coarse.tensor()[number, : len(kept)] = kept
        words[COUNTS + STRIDE * (number + 1)] = len(levels[-1])
    words[0], words[1], words[COUNTS] = status, int(wide[:, 0].max()) + 1, chain.rows
    words[CELLS] = sum(map(len, levels[1:]))
    for axis in range(request.dim if request.dim > 1 else 0):
        ends = wide[:, axis + 1].aminmax()
        words[COUNTS + STRIDE * axis + 1], words[COUNTS + STRIDE * axis + 2] = _FAR + ends.max, _FAR - ends.min
    if not status:
        for place in range(len(request.maps)):
            _find_map_torch(chain, place, levels)


def _find_map_torch(chain: Chain, place: int, levels: Sequence[Tensor]) -> None:
    kind, level, relation = chain.request.maps[place]
    outputs, volume = levels[level][: chain.most if level else None].long(), chain.request.volumes[place]
    inputs = levels[level + {SAME: 0, DOWN: -1, UP: 1}[kind]]
    offsets, stride = torch.tensor(relation.offsets), torch.tensor(relation.stride)
    if kind == UP:
        rest = outputs[:, None, 1:] - offsets
        want, on = rest.div(stride, rounding_mode="floor"), (rest % stride == 0).all(2)
    else:
        want = outputs[:, None, 1:] * stride + offsets
        on = torch.ones(want.shape[:2], dtype=torch.bool)
    rows = torch.where(on, _rows_at_torch(inputs, outputs[:, :1].expand(-1, volume), want), -1)
    chain.table_of(place, len(rows)).tensor().copy_(rows)
    masks = ((rows >= 0).int() << torch.arange(volume)).sum(1, dtype=torch.int32)
    chain.masks_of(place, len(rows)).tensor().copy_(masks)
    at = PAIRS + SIDE * place
    chain.words.tensor()[at : at + volume] = (rows >= 0).sum(0, dtype=torch.int32)
    sampled = masks[torch.arange(len(rows)) % max(1, -(-len(rows) // SAMPLED)) == 0]
    words = plan_of(chain.request, masks.device)[2][place, 0]
    at = GROUPS * place
    chain.totals.tensor()[at : at + GROUPS] = ((sampled[:, None] & words) != 0).sum(0, dtype=torch.int32)


def _rows_at_torch(inputs: Tensor, items: Tensor, want: Tensor) -> Tensor:
    """int64 [N, K]: row of `inputs` with these batch items and coordinates, -1 if absent."""
    cells = torch.cat([inputs.long(), torch.cat([items[..., None], want], dim=2).flatten(0, 1)])
    _, place = torch.unique(cells, dim=0, return_inverse=True)
    rows = torch.full((len(cells),), -1, dtype=torch.int64)
    rows[place[: len(inputs)]] = torch.arange(len(inputs))
    return rows[place[len(inputs) :]].view(items.shape)
