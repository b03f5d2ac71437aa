"""All kernel maps of a chain of halved levels in some twenty launches and one host synchronisation.

Coordinates get keys of a fixed width, whatever box they lie in: int64, the batch index less 512 in the bits above the
Morton code of c + 2^17 (D = 3: 18 bits an axis and 10 of the batch, all 64; others in AXIS_BITS), so that signed order
is (batch, Morton) order. Coordinates beyond are refused and built level by level. One sort of the finest keys gives
every level: a row of level l begins where the keys, shifted by l * D bits, change. A row's neighbours are
children of its parent's neighbours, so that, from the coarsest level down, two loads and a popcount find each: there is
no hash table. Sizes stay on the device in `words` until all maps are counted:

    words[0]                     status bits
    words[4 + 4 l]               rows of level l
    words[entries + s]           tile entries of segment s
    words[pairs + (k L + l) 32 + v]   pairs of kernel offset v in the map of kind k to level l of L levels

A segment is a map that is laid out in tiles: SAME, a window of 3 on a level; DOWN, a step to a level; UP, the
transposed step to a level. Arrays of levels and of segments are concatenated at offsets that kernels read from `layout`
(`lay_out`). Every stage is a Triton kernel (chain_kernels.py) or, where none runs, plain torch (`*_torch`), bit for bit
the same where rows are valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.coords import tiles
from pumice.coords.box import Bounds
from pumice.coords.buffer import DUPLICATE, RANGE, read
from pumice.coords.geometry import Geometry
from pumice.coords.kernel_map import KernelMap
from pumice.coords.outputs import level_key, site_of
from pumice.coords.relation import Relation
from pumice.coords.segments import RUNS, split_runs_together
from pumice.coords.tiles import Digits, SortSpec, TileList
from pumice.runtime.launch import (
    cached_device_constant,
    compiling_launches,
    has_triton,
    kernel,
    outside_inference_mode,
    to_device_async,
)

SAME, DOWN, UP = range(3)  # Kinds of segments
AXIS_BITS = {1: 32, 2: 27, 3: 18}  # Bits of an axis in a key, by D; the batch index above takes 10
BATCHES = 1 << 10
MOST_ROWS = 1 << 20  # Beyond, buffers for the worst case would be large, and launches no longer matter
_SIDE = 32  # Lanes of a row of `plan`, `layout`, pair and group totals: as many segments and kernel offsets at most
_COUNTS, _STRIDE = 4, 4
_KEYED, _BLOCK, _PART = 512, 512, 512  # Rows of programs, and blocks added up at a time
_NEIGHBOURS, _WARPS = 64, 8  # Rows and warps of a program that finds neighbours
_SAMPLED = 1 << 14  # Maximum number of rows sampled to estimate the frequency of groups
_WIDTH = 20  # Bits of a row's sort key within its segment
_DIGIT = 9  # Maximum bits of a digit of the sort
_SORTED = 512  # Rows of a block of the sort
_SUMMED = 1024  # Tiles per step of the prefix sum of entries
_SMALL, _LARGE = 64, 128  # Rows of a tile
_SPARE = 1 << 23  # Unused entries of the tables up to which what is used of them is not copied
_TOTAL = 9  # Row of `layout` with the number of rows of all segments


@dataclass(frozen=True)
class TileRule:
    """Tiles have 64 outputs below `few_rows` outputs, else 128. Maps of at most `few_taps` kernel offsets keep the
    order of rows below `sorted_rows` outputs."""

    few_rows: int
    few_taps: int
    sorted_rows: int

    def block(self, rows: int) -> int:
        return _SMALL if rows < self.few_rows else _LARGE

    def least(self, volume: int) -> int:
        """Number of outputs from which a map is sorted."""
        return self.sorted_rows if volume <= self.few_taps else 0


@dataclass(frozen=True)
class ChainRequest:
    """Maps to build. windows: per level the requested window of 3, or None; tiled: (kind, level of the outputs)
    of each map that is laid out in tiles."""

    steps: tuple[Relation, ...]
    windows: tuple[Relation | None, ...]
    tiled: tuple[tuple[int, int], ...]
    rule: TileRule

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.steps, self.windows, self.tiled, self.rule))

    @cached_property
    def dim(self) -> int:
        return self.steps[0].dim

    @cached_property
    def levels(self) -> int:
        return len(self.steps) + 1

    @cached_property
    def window(self) -> int:
        """Kernel offsets of a window."""
        return 3**self.dim

    @cached_property
    def volumes(self) -> tuple[int, int, int]:
        """Kernel offsets of a map, by kind."""
        return self.window, 1 << self.dim, 1 << self.dim

    @cached_property
    def entries(self) -> int:
        """Start of the entries' totals in `words`."""
        return _COUNTS + _STRIDE * self.levels

    @cached_property
    def pairs(self) -> int:
        """Start of the pairs' totals in `words`, of windows and of steps."""
        return self.entries + _SIDE

    @cached_property
    def num_read(self) -> int:
        """Number of words that the host reads; totals of groups of all kinds follow."""
        return self.pairs + 2 * self.levels * _SIDE


@lru_cache(maxsize=8)
def halving(dim: int) -> Relation:
    """The relation of a step."""
    return Relation.of(dim, 2, stride=2)


@lru_cache(maxsize=8)
def window_of(dim: int) -> Relation:
    """The relation of a window of 3."""
    return Relation.of(dim, 3)


def refusal(geometry: Geometry, steps: Sequence[Relation], segments: int) -> str | None:
    """Reason why the maps of these steps are not built as a chain, or None."""
    if not steps or any(step != halving(geometry.dim) for step in steps):
        return "steps are not convolutions of kernel 2 and stride 2"
    if geometry.dim not in AXIS_BITS or len(steps) >= AXIS_BITS[geometry.dim] or segments > _SIDE:
        return f"{geometry.dim} axes, {len(steps)} steps and {segments} maps in tiles are not supported"
    if geometry.maps or geometry.levels or geometry.buffered is not None:
        return "there are maps already"
    if not 0 < len(geometry) <= MOST_ROWS:
        return f"{len(geometry)} voxels; 1 to {MOST_ROWS} are supported"
    bounds, half = geometry.bounds, 1 << AXIS_BITS[geometry.dim] - 1
    if min(bounds.low) < -half or max(bounds.high) >= half or not 0 < bounds.batch <= BATCHES:
        return f"coordinates from {bounds.low} to {bounds.high} with {bounds.batch} batch items exceed the keys"
    return None


@dataclass(frozen=True, eq=False)
class Chain:
    """Device arrays of the levels of N coordinates, concatenated; levels but the finest in (batch, Morton) order.

    order int64 [N]: rows of the finest level in that order.
    links int32: parent << 3 | octant, in that order; parents: the same in the order of the level's rows.
    first_child int32: position of the first child; children int32: first_child << 8 | mask of octants with a child.
    top int64: keys of the coarsest level. coarse int32 [., 1+D]: coordinates of all levels but the finest.
    table int32 [., 3**D], down int32 [., 2**D] (without the finest level): the kernel maps; masks int32: of `table`.
    totals int32: sampled rows per group of kernel offsets, see tiles.group_totals."""

    request: ChainRequest
    coords: Tensor
    words: Tensor
    order: Tensor
    links: Tensor
    first_child: Tensor
    children: Tensor
    masks: Tensor
    parents: Tensor
    top: Tensor
    coarse: Tensor
    table: Tensor
    down: Tensor

    @staticmethod
    def empty(coords: Tensor, order: Tensor, words: Tensor, request: ChainRequest) -> Chain:
        rows, device = len(coords), coords.device
        most = aligned(request.levels * (rows + 3))
        masks, table, down = _arrays(device, (most,), (most, request.window), (most - rows, 1 << request.dim))
        *flat, coarse = _arrays(device, *((most,),) * 4, (most, request.dim + 1))
        links, first_child, children, parents = flat
        top = torch.empty(rows, dtype=torch.int64, device=device)
        return Chain(
            request, coords, words, order, links, first_child, children, masks, parents, top, coarse, table, down
        )

    @property
    def totals(self) -> Tensor:
        return self.words[self.request.num_read :]

    def counts(self) -> list[int]:
        """Rows of each level; for the twins, as it waits for the device."""
        return self.words[_COUNTS : self.request.entries : _STRIDE].tolist()


def _arrays(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """int32 arrays of these shapes in one allocation, aligned to 16 bytes."""
    sizes = [aligned(math.prod(shape)) for shape in shapes]
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return [part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def aligned(count: int) -> int:
    """Rows that a level takes in concatenated arrays."""
    return -(-count // 4) * 4


def starts_of(counts: Sequence[int]) -> list[int]:
    """Start of each level in concatenated arrays."""
    return [sum(map(aligned, counts[:level])) for level in range(len(counts))]


def build_chain(geometry: Geometry, request: ChainRequest) -> list[TiledMap]:
    """Build the levels and maps of a request that `refusal` does not refuse, and keep them in their geometries; those
    with tiles, in the order of the request. One host synchronisation.

    Raises CoordinateError for duplicates and for coordinates outside the geometry's bounds."""
    geometry.require_unwritten()
    with outside_inference_mode():
        if geometry.coords.is_cuda:
            compile_kernels(request, geometry.device)
        chain = find_maps(geometry.coords, geometry.bounds, request)
        segments = tile_maps(chain)
        (words,) = read([chain.words[: request.num_read]])
        geometry.settle(words[0])
        lists = fill_tiles(chain, segments, words)
        return _Assembler(chain, words, lists).assemble(geometry)


@lru_cache(maxsize=64)
def compile_kernels(request: ChainRequest, device: torch.device) -> None:
    """Compile the kernels of a request in parallel; once in a process."""
    coords, origin = torch.zeros(1, 1 + request.dim, dtype=torch.int32, device=device), (0,) * request.dim
    with compiling_launches():
        chain = find_maps(coords, Bounds(origin, origin, 1), request)
        fill_tiles(chain, tile_maps(chain), [0] * request.num_read)


def find_maps(coords: Tensor, bounds: Bounds, request: ChainRequest) -> Chain:
    """Levels, neighbours and their counts; no host synchronisation."""
    size = request.num_read + 3 * request.levels * _SIDE
    words = torch.zeros(size, dtype=torch.int32, device=coords.device)
    keys, order = torch.sort(make_keys(coords, bounds, words))
    chain = Chain.empty(coords, order, words, request)
    make_levels(chain, keys)
    for level in reversed(range(request.levels)):
        find_neighbours(chain, level)
    return chain


# Keys and levels


def make_keys(coords: Tensor, bounds: Bounds, words: Tensor) -> Tensor:
    """int64 [N]: keys; rows outside the bounds set RANGE in words[0], and their keys are arbitrary."""
    if not has_triton(coords):
        return make_keys_torch(coords, bounds, words)
    rows, dim = len(coords), coords.shape[1] - 1
    keys = torch.empty(rows, dtype=torch.int64, device=coords.device)
    zeros = (0,) * (3 - dim)
    numbers = (rows, bounds.batch, *bounds.low, *zeros, *bounds.high, *zeros)
    constants = {"D": dim, "AXIS": AXIS_BITS[dim], "BLOCK": _KEYED}
    kernel("chain_kernels.make_keys")(-(-rows // _KEYED), (coords, keys, words), numbers, constants)
    return keys


def make_keys_torch(coords: Tensor, bounds: Bounds, words: Tensor) -> Tensor:
    """As make_keys, in plain torch."""
    dim, wide = coords.shape[1] - 1, coords.long()
    low, high = wide.new_tensor((0, *bounds.low)), wide.new_tensor((bounds.batch - 1, *bounds.high))
    words[:1] |= RANGE * ((wide < low) | (wide > high)).any().int()
    keys = (wide[:, 0] - BATCHES // 2) << (dim * AXIS_BITS[dim])
    for axis in range(dim):
        value = wide[:, axis + 1] + (1 << AXIS_BITS[dim] - 1)
        for bit in range(AXIS_BITS[dim]):
            keys |= ((value >> bit) & 1) << (dim * bit + dim - 1 - axis)
    return keys


def make_levels(chain: Chain, keys: Tensor) -> None:
    """Fill the counts, links, first_child, top and coarse from sorted keys. Equal keys set DUPLICATE; each has its row
    of the finest level all the same."""
    if not has_triton(keys):
        return make_levels_torch(chain, keys)
    request, rows = chain.request, len(keys)
    blocks = -(-rows // _BLOCK)
    sums = torch.empty(request.levels * blocks, dtype=torch.int32, device=keys.device)
    constants = {"D": request.dim, "LEVELS": request.levels, "BLOCK": _BLOCK}
    kernel("chain_kernels.count_levels")(blocks, (keys, chain.words, sums), (rows, blocks), constants)
    tensors = (
        keys,
        chain.order,
        chain.coords,
        sums,
        chain.words,
        chain.links,
        chain.first_child,
        chain.top,
        chain.coarse,
    )
    kernel("chain_kernels.make_levels")(blocks, tensors, (rows, blocks), {**constants, "PART": _PART})


def make_levels_torch(chain: Chain, keys: Tensor) -> None:
    """As make_levels, in plain torch."""
    request, dim = chain.request, chain.request.dim
    changed = keys[1:] ^ keys[:-1]
    chain.words[:1] |= DUPLICATE * (changed == 0).any().int()
    first, below, place, ranks = 0, 0, keys[:0], keys[:0]
    for level in range(request.levels):
        new = torch.ones_like(keys, dtype=torch.bool)
        new[1:] = (changed >> (dim * level)) != 0 if level else True
        at, rank = new.nonzero()[:, 0], new.cumsum(0, dtype=torch.int32) - 1
        if level:
            octant = (keys[place] >> (dim * (level - 1))) & ((1 << dim) - 1)
            chain.links[below : below + len(place)] = (rank[place] << 3) | octant.int()
            chain.first_child[first : first + len(at)] = ranks[at].int()
            rows = chain.coords[chain.order[at]]
            chain.coarse[first : first + len(at)] = torch.cat([rows[:, :1], rows[:, 1:] >> level], dim=1)
        chain.words[_COUNTS + _STRIDE * level] = len(at)
        first, below, place, ranks = first + aligned(len(at)), first, at, rank
    chain.top[: len(place)] = keys[place] >> (dim * (request.levels - 1))


# Neighbours


@cached_device_constant(64)
def _groups(dim: int, device: torch.device) -> Tensor:
    """int32 [4, 32]: mask words and sizes of the groups (tiles.groups_of) of a window, then those of a step."""
    found = torch.zeros(4, _SIDE, dtype=torch.int32)
    for row, relation in ((0, window_of(dim)), (2, halving(dim))):
        table = tiles.groups_of(relation, SortSpec(0, len(relation.offsets)), torch.device("cpu"))
        found[row : row + 2, : len(table)] = table.t()
    return to_device_async(found, device)


def find_neighbours(chain: Chain, level: int) -> None:
    """Fill the table, masks and parents of a level, children and down of one above the finest, and their totals. The
    coarser levels are filled already."""
    if not has_triton(chain.coords):
        return find_neighbours_torch(chain, level)
    request, rows = chain.request, len(chain.coords)
    tensors = (chain.links, chain.first_child, chain.top, chain.order, _groups(request.dim, chain.coords.device))
    tensors += (chain.words, chain.totals, chain.table, chain.children, chain.down, chain.masks, chain.parents)
    axis = AXIS_BITS[request.dim]
    constants = {"D": request.dim, "AXIS": axis, "BITS": _interleaved(request.dim), "K": request.window}
    constants |= {"LANES": tiles.lanes_of(request.window), "LEVELS": request.levels, "PAIRS": request.pairs}
    constants |= {"BLOCK": _NEIGHBOURS, "TOP": level == len(request.steps), "FINEST": level == 0}
    numbers = (rows, level, rows.bit_length(), _SAMPLED)
    kernel("chain_kernels.find_neighbours")(-(-rows // _NEIGHBOURS), tensors, numbers, constants, _WARPS)


@lru_cache(maxsize=8)
def _interleaved(dim: int) -> int:
    """Bits of the last axis in a key."""
    return sum(1 << dim * bit for bit in range(AXIS_BITS[dim]))


def find_neighbours_torch(chain: Chain, level: int) -> None:
    """As find_neighbours, in plain torch."""
    request, counts = chain.request, chain.counts()
    starts, count = starts_of(counts), counts[level]
    first, window = starts[level], torch.arange(request.window)
    own = chain.order.int() if level == 0 else torch.arange(count, dtype=torch.int32)
    if level == len(request.steps):
        input_rows = _search_top_torch(chain, level, count)
    else:
        links = chain.links[first : first + count]
        input_rows = _search_below_torch(chain, links.long(), starts[level + 1])
        chain.parents[first + own.long()] = links
    if level == 0:
        input_rows = torch.where(input_rows >= 0, chain.order[input_rows.clamp(min=0)], -1)
    chain.table[first + own.long()] = input_rows.int()
    masks = ((input_rows >= 0).int() << window).sum(1, dtype=torch.int32)
    chain.masks[first + own.long()] = masks
    _store_pairs(chain, SAME, level, input_rows >= 0)
    sampled = own % max(1, -(-count // _SAMPLED)) == 0
    _count_groups_torch(chain, SAME, level, masks[sampled])
    if level < len(request.steps):
        links = chain.parents[first : first + count][own.long()]
        _count_groups_torch(chain, UP, level, (1 << (links & 7))[sampled])
    if level > 0:
        octants = _list_children_torch(chain, level, counts)
        _store_pairs(chain, DOWN, level, ((octants[:, None] >> torch.arange(1 << request.dim)) & 1) == 1)
        _count_groups_torch(chain, DOWN, level, octants[sampled])


def _store_pairs(chain: Chain, kind: int, level: int, has: Tensor) -> None:
    at = chain.request.pairs + (kind * chain.request.levels + level) * _SIDE
    chain.words[at : at + has.shape[1]] = has.sum(0, dtype=torch.int32)


def _count_groups_torch(chain: Chain, kind: int, level: int, masks: Tensor) -> None:
    """Totals of the groups of a map, of the masks of sampled rows."""
    words = _groups(chain.request.dim, masks.device)[0 if kind == SAME else 2]
    at = (kind * chain.request.levels + level) * _SIDE
    chain.totals[at : at + _SIDE] = ((masks[:, None] & words) != 0).sum(0, dtype=torch.int32)


def _digits(dim: int) -> Tensor:
    """int64 [3**D, D]: the kernel offsets of a window."""
    return torch.tensor(window_of(dim).offsets)


def _search_top_torch(chain: Chain, level: int, count: int) -> Tensor:
    """int64 [count, 3**D]: neighbours on the coarsest level by bisection, -1 if absent."""
    dim, moves = chain.request.dim, _digits(chain.request.dim)
    code = chain.top[:count, None]
    low = (1 << dim * (AXIS_BITS[dim] - level)) - 1
    want, on = code & ~low, torch.ones(count, len(moves), dtype=torch.bool)
    for axis in range(dim):
        bits = (_interleaved(dim) << (dim - 1 - axis)) & low
        x, move = code & bits, moves[:, axis]
        on = on & ~((move > 0) & (x == bits)) & ~((move < 0) & (x == 0))
        moved = torch.where(move < 0, (x - 1) & bits, x)
        want = want | torch.where(move > 0, ((x | ~bits) + 1) & bits, moved)
    at = torch.searchsorted(chain.top[:count], want).clamp(max=count - 1)
    return torch.where(on & (chain.top[at] == want), at, -1)


def _search_below_torch(chain: Chain, links: Tensor, first: int) -> Tensor:
    """int64 [count, 3**D]: neighbours by those of the parents, which begin at `first`; -1 if absent."""
    dim = chain.request.dim
    towards, octant = torch.zeros(2, len(links), chain.request.window, dtype=torch.int64)
    for axis, move in enumerate(_digits(dim).t()):
        t = ((links[:, None] >> (dim - 1 - axis)) & 1) + move
        towards, octant = towards * 3 + (t >> 1) + 1, octant * 2 + (t & 1)
    parent_neighbours = chain.table[(first + (links >> 3))[:, None], towards].long()
    packed = chain.children[first + parent_neighbours.clamp(min=0)].long()
    below = packed & ((1 << octant) - 1)
    rank = sum((below >> bit) & 1 for bit in range(1 << dim))
    return torch.where((parent_neighbours >= 0) & (((packed >> octant) & 1) == 1), (packed >> 8) + rank, -1)


def _list_children_torch(chain: Chain, level: int, counts: Sequence[int]) -> Tensor:
    """Fill children and down of a level; int32 [count]: the octants that have a child."""
    starts, count, width = starts_of(counts), counts[level], 1 << chain.request.dim
    first, below, children = starts[level], starts[level - 1], torch.arange(counts[level - 1])
    links = chain.links[below : below + counts[level - 1]].long()
    input_rows = chain.order.int() if level == 1 else children.int()
    down = chain.down[first - starts[1] :][:count]
    down.fill_(-1)
    down[links >> 3, links & 7] = input_rows
    octants = ((down >= 0).int() << torch.arange(width)).sum(1, dtype=torch.int32)
    chain.children[first : first + count] = (chain.first_child[first : first + count] << 8) | octants
    return octants


# Tiles


@dataclass(frozen=True, eq=False)
class TileSegments:
    """Tiles of all segments before their entries are written.

    plan int32 [4, 32], layout int32 [10, 32]: see lay_out. slots int32: rows of tiles, -1 for padding.
    tile_masks int32: kernel offsets of each tile. ends int32: prefix counts of entries within each segment."""

    plan: Tensor
    layout: Tensor
    slots: Tensor
    tile_masks: Tensor
    ends: Tensor


@cached_device_constant(256)
def _plan(request: ChainRequest, device: torch.device) -> Tensor:
    """int32 [4, 32]: kind, level, kernel offsets of each segment, and the rows from which it is sorted."""
    found = torch.zeros(4, _SIDE, dtype=torch.int32)
    for place, (kind, level) in enumerate(request.tiled):
        volume = request.volumes[kind]
        found[:, place] = torch.tensor((kind, level, volume, request.rule.least(volume)))
    return to_device_async(found, device)


def tile_maps(chain: Chain) -> TileSegments:
    """Tiles of all segments, and the number of their entries in `words`; no host synchronisation."""
    request, device, number = chain.request, chain.coords.device, len(chain.request.tiled)
    most = number * (len(chain.coords) + _LARGE)
    plan = _plan(request, device)
    layout = lay_out(chain, plan)
    order = order_segments(chain, plan, layout)
    slots, tile_masks, ends = _arrays(device, (most,), *((number * (-(-len(chain.coords) // _SMALL) + 4),),) * 2)
    segments = TileSegments(plan, layout, slots, tile_masks, ends)
    tile_segments(chain, segments, order)
    return segments


def lay_out(chain: Chain, plan: Tensor) -> Tensor:
    """int32 [10, 32], a column for each segment: its rows, its first row in the concatenated order, rows of a tile,
    tiles, first slot, first tile (at multiples of 4), start of its level, whether it is sorted, tiles of the segments
    before; the rows of all segments."""
    request = chain.request
    if not has_triton(plan):
        return lay_out_torch(chain, plan)
    layout = torch.empty(_TOTAL + 1, _SIDE, dtype=torch.int32, device=plan.device)
    numbers = (len(request.tiled), request.rule.few_rows)
    kernel("chain_kernels.lay_out")(1, (chain.words, plan, layout), numbers, {"LEVELS": request.levels}, 1)
    return layout


def lay_out_torch(chain: Chain, plan: Tensor) -> Tensor:
    """As lay_out, in plain torch."""
    counts, level = chain.counts(), plan[1].long()
    rows = torch.tensor(counts, dtype=torch.int32)[level] * (torch.arange(_SIDE) < len(chain.request.tiled))
    block = torch.where(rows < chain.request.rule.few_rows, _SMALL, _LARGE)
    count = (rows + block - 1) // block
    whole = (count + 3) // 4 * 4
    befores = [x.cumsum(0) - x for x in (rows, count * block, whole, count)]
    starts = torch.tensor(starts_of(counts))[level]
    listed = [rows, befores[0], block, count, *befores[1:3], starts, rows >= plan[3], befores[3]]
    return torch.stack([*(x.int() for x in listed), rows.sum().int().expand(_SIDE)])


def order_segments(chain: Chain, plan: Tensor, layout: Tensor) -> Tensor:
    """int32: the rows of all segments, numbered one after the other, in the order of tiles (tiles.sort_rows), or their
    own."""
    request, rows = chain.request, len(chain.coords)
    if not has_triton(plan):
        return order_segments_torch(chain, plan, layout)
    number = len(request.tiled)
    keys = torch.empty(number * rows, dtype=torch.int32, device=plan.device)
    bits = _WIDTH + max(number - 1, 0).bit_length()
    turns = -(-bits // _DIGIT)
    digits = Digits(turns, -(-bits // turns), _SORTED)
    counts, _ = digits.counts(keys)
    per = -(-rows // _KEYED)
    constants = {"LEVELS": request.levels, "ROWS_EACH": _KEYED, "BLOCK": _SORTED, "BINS": 1 << digits.width}
    tensors = (
        plan,
        layout,
        _groups(request.dim, plan.device),
        chain.totals,
        chain.masks,
        chain.children,
        chain.parents,
    )
    kernel("chain_kernels.order_keys")(number * per, (*tensors, keys, counts), (per, _WIDTH, _SAMPLED), constants)
    return tiles.stable_argsort(keys, digits, counts, layout[_TOTAL])


def order_segments_torch(chain: Chain, plan: Tensor, layout: Tensor) -> Tensor:
    """As order_segments, in plain torch."""
    return tiles.stable_argsort_torch(order_keys_torch(chain, plan, layout))


def order_keys_torch(chain: Chain, plan: Tensor, layout: Tensor) -> Tensor:
    """int32: sort key of each row of all segments: segment << 20 | key of its map."""
    keys, levels = [], chain.request.levels
    for place, (kind, level) in enumerate(chain.request.tiled):
        rows, sorts = int(layout[0, place]), bool(layout[7, place])
        own = torch.zeros(rows, dtype=torch.int32)
        if sorts:
            groups = (
                _groups(chain.request.dim, plan.device)[:2]
                if kind == SAME
                else _groups(chain.request.dim, plan.device)[2:]
            )
            groups = groups[:, groups[0] != 0].t().contiguous()
            at = (kind * levels + level) * _SIDE
            totals = chain.totals[at : at + len(groups)]
            masks = _masks_torch(chain, layout, place)[:, None]
            how = SortSpec(0, chain.request.volumes[kind])
            own = tiles.gray_keys_torch(masks, torch.tensor([rows], dtype=torch.int32), groups, totals, how)
        keys.append(own | place << _WIDTH)
    return torch.cat(keys) if keys else torch.zeros(0, dtype=torch.int32)


def _masks_torch(chain: Chain, layout: Tensor, place: int) -> Tensor:
    """int32: mask of each row of a segment."""
    kind, (rows, first) = chain.request.tiled[place][0], (int(layout[0, place]), int(layout[6, place]))
    if kind == SAME:
        return chain.masks[first : first + rows]
    if kind == DOWN:
        return chain.children[first : first + rows] & 255
    return 1 << (chain.parents[first : first + rows] & 7)


def tile_segments(chain: Chain, segments: TileSegments, order: Tensor) -> None:
    """Fill slots, tile_masks and ends, and tell the number of entries."""
    if not has_triton(order):
        return tile_segments_torch(chain, segments, order)
    request, number = chain.request, len(chain.request.tiled)
    per = -(-len(chain.coords) // _SMALL)
    tensors = (segments.plan, segments.layout, order, chain.masks, chain.children, chain.parents)
    kernel("chain_kernels.tile_segments")(
        number * per, (*tensors, segments.slots, segments.tile_masks), (per,), {"BLOCK": _LARGE}
    )
    tensors = (segments.layout, segments.tile_masks, segments.ends, chain.words)
    kernel("chain_kernels.end_tiles")(number, tensors, (request.entries,), {"BLOCK": _SUMMED})


def tile_segments_torch(chain: Chain, segments: TileSegments, order: Tensor) -> None:
    """As tile_segments, in plain torch."""
    for place, (rows, begin, block, count, slot, tile, *_) in enumerate(segments.layout.t().tolist()):
        if place >= len(chain.request.tiled):
            break
        slots = segments.slots[slot : slot + count * block]
        slots.fill_(-1)
        slots[:rows] = order[begin : begin + rows] - begin
        masks = torch.where(slots >= 0, _masks_torch(chain, segments.layout, place)[slots.long().clamp(min=0)], 0)
        bits = (masks.view(count, block, 1) >> torch.arange(_SIDE - 1)) & 1
        tile_masks = bits.amax(1) if count else bits[:, 0]
        segments.tile_masks[tile : tile + count] = (tile_masks << torch.arange(_SIDE - 1)).sum(1, dtype=torch.int32)
        segments.ends[tile : tile + count] = tile_masks.sum(1).cumsum(0, dtype=torch.int32)
        chain.words[chain.request.entries + place] = tile_masks.sum()


def fill_tiles(chain: Chain, segments: TileSegments, words: Sequence[int]) -> list[TileList]:
    """The tile lists of all segments, with pieces of their runs. words: the words that the host read."""
    request = chain.request
    shapes = [_shape(request, words, place) for place in range(len(request.tiled))]
    long = sum(aligned(entries) for _, _, entries in shapes)
    wide = sum(entries * block for _, block, entries in shapes)
    memory = torch.empty(2 * long + wide, dtype=torch.int32, device=chain.coords.device)
    lists, ends, (slot, tile, entry, cell) = [], [], (0, 0, 0, 0)
    base, view, slots, last = segments.slots.storage_offset(), memory.as_strided, segments.slots, segments.ends
    begin, end = memory.storage_offset(), last.storage_offset()
    for count, block, entries in shapes:
        rows = slots.as_strided((count, block), (block, 1), base + slot)
        own, taps = view((entries,), (1,), begin + entry), view((entries,), (1,), begin + long + entry)
        lists.append(TileList(rows, own, taps, view((entries, block), (block, 1), begin + 2 * long + cell)))
        ends.append(last.as_strided((count,), (1,), end + tile))
        slot, tile = slot + count * block, tile + aligned(count)
        entry, cell = entry + aligned(entries), cell + entries * block
    fill_segments(chain, segments, lists, (memory[:long], memory[long : 2 * long], memory[2 * long :]))
    wanted: list[tuple[Tensor, int, int]] = []
    for found, last, (kind, _), pieces in zip(lists, ends, request.tiled, _requested_pieces(request), strict=True):
        RUNS.register(found.tiles, last, request.volumes[kind], pieces)
        # Other threads' calls may ask for more meanwhile.
        wanted += [(found.tiles, len(found.rows), most) for most in tuple(pieces)]
    split_runs_together(wanted)
    return lists


@lru_cache(maxsize=64)
def _requested_pieces(request: ChainRequest) -> tuple[set[int], ...]:
    """By segment the piece lengths (segments.RunInfo) that layers asked for on scenes before: those of all segments are
    then coarse by one kernel."""
    return tuple(set[int]() for _ in request.tiled)


def _shape(request: ChainRequest, words: Sequence[int], place: int) -> tuple[int, int, int]:
    """(tiles, rows of a tile, entries) of a segment."""
    rows = words[_COUNTS + _STRIDE * request.tiled[place][1]]
    block = request.rule.block(rows)
    return -(-rows // block), block, words[request.entries + place]


def fill_segments(
    chain: Chain, segments: TileSegments, lists: Sequence[TileList], flat: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Write the entries. flat: tiles, taps and inputs of all lists."""
    if not has_triton(chain.coords):
        return fill_segments_torch(chain, segments, lists)
    request, (own, taps, inputs) = chain.request, flat
    tensors = (segments.plan, segments.layout, chain.words, segments.slots, segments.tile_masks, segments.ends)
    tensors += (chain.table, chain.down, chain.parents, taps, own, inputs)
    constants = {"K": request.window, "WIDTH": 1 << request.dim, "BLOCK": _LARGE}
    constants["LANES"] = max(tiles.lanes_of(request.window), 1 << request.dim)
    kernel("chain_kernels.fill_segments")(
        sum(len(one.rows) for one in lists), tensors, (request.entries, len(lists)), constants
    )


def fill_segments_torch(chain: Chain, segments: TileSegments, lists: Sequence[TileList]) -> None:
    """As fill_segments, in plain torch."""
    for place, found in enumerate(lists):
        kind, tile = chain.request.tiled[place][0], int(segments.layout[5, place])
        rows, first = int(segments.layout[0, place]), int(segments.layout[6, place])
        tile_masks = segments.tile_masks[tile : tile + len(found.rows)]
        volume = chain.request.volumes[kind]
        tiles_, taps = ((tile_masks[:, None] >> torch.arange(volume)) & 1).nonzero().unbind(1)
        found.tiles.copy_(tiles_)
        found.taps.copy_(taps)
        if kind == UP:
            links = chain.parents[first : first + rows, None]
            table = torch.where((links & 7) == torch.arange(volume), links >> 3, -1)
        else:
            table = chain.table[first:] if kind == SAME else chain.down[first - aligned(chain.counts()[0]) :]
        slots = found.rows[tiles_].long()
        found.inputs.copy_(torch.where(slots >= 0, table[slots.clamp(min=0), taps[:, None]], -1))


# Maps


@dataclass(frozen=True, eq=False)
class TiledMap:
    """A map, transposed if it is of kind UP, and its tiles; sorted: False if rows keep their order."""

    found: KernelMap
    tiles: TileList
    sorted: bool


class _Assembler:
    """Builds levels and maps from the arrays of a chain. words: those that the host read."""

    def __init__(self, chain: Chain, words: Sequence[int], lists: Sequence[TileList]) -> None:
        request = chain.request
        self._request, self._words = request, words
        self._counts = words[_COUNTS : request.entries : _STRIDE]
        self._starts = starts_of(self._counts)
        last = self._starts[-1] + self._counts[-1]
        used = chain.masks[:last], chain.table[:last], chain.down[: last - self._starts[1]]
        if (len(chain.table) - last) * request.window > _SPARE:
            used = tuple(array.clone() for array in used)
        self._masks, self._table, self._down = used
        self._made = chain.coarse[self._starts[1] : last].clone()
        self._valid = [chain.words[at : at + 1] for at in range(_COUNTS, request.entries, _STRIDE)]
        self._tiles = dict(zip(request.tiled, enumerate(lists), strict=True))

    def assemble(self, geometry: Geometry) -> list[TiledMap]:
        """Cache all levels and maps in their geometries; the maps with tiles, in the order of the request."""
        maps, windows = dict[tuple[int, int], KernelMap](), self._request.windows
        for level in range(self._request.levels):
            window = windows[level] if level < len(windows) else None
            if window is not None:
                maps[SAME, level] = found = self._window(window, level)
                geometry.keep(window, None, (found, None))
            if level == len(self._request.steps):
                break
            step, first = self._request.steps[level], self._starts[level + 1] - self._starts[1]
            coords = self._made[first : first + self._counts[level + 1]]
            outputs = Geometry(coords, site_of(geometry.site, step))
            maps[DOWN, level + 1] = found = self._step(step, level)
            geometry.keep(step, None, (found, outputs))
            geometry.levels[level_key(step)] = outputs
            if (UP, level) in self._tiles:
                maps[UP, level] = found.transpose()
            geometry = outputs
        places = ((place, maps[place]) for place in self._request.tiled)
        return [TiledMap(found, self._tiles[place][1], self._sorts(*place)) for place, found in places]

    def _window(self, window: Relation, level: int) -> KernelMap:
        begin, count = self._starts[level], self._counts[level]
        storages = self._known(SAME, level, level, level) | self._tiled(SAME, level, False)
        storages["masks", False] = self._masks[begin : begin + count, None]
        return KernelMap(window, self._table[begin : begin + count], count, count, _storages=storages)

    def _step(self, step: Relation, level: int) -> KernelMap:
        begin, (inputs, outputs) = self._starts[level + 1] - self._starts[1], self._counts[level : level + 2]
        storages = self._known(DOWN, level + 1, level, level + 1)
        storages |= self._tiled(DOWN, level + 1, False) | self._tiled(UP, level, True)
        return KernelMap(step, self._down[begin : begin + outputs], inputs, outputs, _storages=storages)

    def _known(self, kind: int, level: int, inputs: int, outputs: int) -> dict[Any, Any]:
        """Pairs per kernel offset and the numbers of rows. level: of the outputs."""
        at = self._request.pairs + (kind * self._request.levels + level) * _SIDE
        totals = list(self._words[at : at + self._request.volumes[kind]])
        valid = {("valid_count", True): self._valid[inputs], ("valid_count", False): self._valid[outputs]}
        return {("totals", False): totals, **valid}

    def _sorts(self, kind: int, level: int) -> bool:
        return self._counts[level] >= self._request.rule.least(self._request.volumes[kind])

    def _tiled(self, kind: int, level: int, flipped: bool) -> dict[Any, Any]:
        """Tiles of a map, and the number of their entries."""
        if (kind, level) not in self._tiles:
            return {}
        place, found = self._tiles[kind, level]
        key = found.rows.shape[1], SortSpec(0, self._request.volumes[kind], sort=self._sorts(kind, level))
        entries = [self._words[self._request.entries + place]]
        return {(("compacted", *key), flipped): found, (("entries", *key), flipped): entries}
