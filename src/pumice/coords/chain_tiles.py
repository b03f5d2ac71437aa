"""Tiles of a chain's maps (coords.chain): rows of all segments, one per tiled map, are sorted and tiled together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import tiles
from pumice.coords.chain import (
    CHOSEN,
    ENTRIES,
    GROUPS,
    LARGE,
    SAMPLED,
    SIDE,
    SMALL,
    WIDTH,
    Chain,
    ChainRequest,
    plan_of,
)
from pumice.coords.segments import RUNS, WHOLE, Pieces, count_sort_constants
from pumice.coords.tiles import PairGroups, SortSpec, TileList
from pumice.runtime.launch import (
    Part,
    aligned,
    allocate,
    cached_device_constant,
    has_triton,
    integers,
    kernel,
    to_device_async,
)

_KEYED = 512  # Rows per program of order_keys
_SUMMED = 1024  # Tiles per step of the prefix sum of entries
_RUNS = 64  # Runs per program that cuts runs
_TOTAL = 9  # Row of `layout` with the number of rows of all segments


def tile_maps(chain: Chain) -> None:
    """Assign rows of all segments to tiles, count entries in `words`; no host synchronisation."""
    lay_out(chain)
    order_segments(chain)
    tile_segments(chain)


def lay_out(chain: Chain) -> None:
    """Fill `layout` int32 [10 + 32, 32]. Column s of rows 0 to 9 describes segment s: rows; first row in the
    concatenated order; outputs per tile; tiles; first slot; first tile (a multiple of 4); start of its masks; 1 if
    sorted, else 0; tiles of the segments before; rows of all segments. Row 10 + s has the mask words of the groups of
    kernel offsets by which segment s is sorted."""
    request, number = chain.request, len(chain.request.tiled)
    if not has_triton(chain.coords):
        return lay_out_torch(chain)
    plan, _, groups = plan_of(request, chain.coords.device)
    numbers = (chain.rows, chain.most, number, request.rule.few_rows, WIDTH, SAMPLED)
    tensors = (chain.words, plan, groups, chain.totals, chain.layout)
    kernel("chain_kernels.lay_out")(max(1, number), tensors, numbers, {}, 1)


def lay_out_torch(chain: Chain) -> None:
    counts, request, number = chain.counts(), chain.request, len(chain.request.tiled)
    plan, _, groups = plan_of(request, torch.device("cpu"))
    rows = torch.tensor(counts, dtype=torch.int32)[plan[0].long()] * (torch.arange(SIDE) < number)
    block = torch.where(rows < request.rule.few_rows, SMALL, LARGE)
    count = (rows + block - 1) // block
    whole = (count + 3) // 4 * 4
    befores = [x.cumsum(0) - x for x in (rows, count * block, whole, count)]
    masks = plan[7] * aligned(chain.rows) + plan[8] * chain.most
    listed = [rows, befores[0], block, count, *befores[1:3], masks, rows >= plan[4], befores[3]]
    layout = chain.layout.tensor().zero_()
    layout[:CHOSEN] = torch.stack([*(x.int() for x in listed), rows.sum().int().expand(SIDE)])
    for place in range(number):
        own = groups[place][:, groups[place, 0] != 0].t()
        step = max(1, -(-int(rows[place]) // SAMPLED))
        totals = chain.totals.tensor()[GROUPS * place :][: len(own)]
        chosen = tiles.select_groups(own, totals, (rows[place] + step - 1) // step, min(WIDTH, len(own)))
        layout[CHOSEN + place, : len(chosen)] = own[chosen, 0]


def order_segments(chain: Chain) -> None:
    """Fill `order` int32: rows of all segments, numbered consecutively. Within a segment they are sorted as by
    tiles.sort_rows, or in their own order."""
    number, digits = len(chain.request.tiled), chain.digits
    if not has_triton(chain.coords):
        return order_segments_torch(chain)
    per = -(-chain.largest // _KEYED)
    constants = {"ROWS_EACH": _KEYED, "BLOCK": digits.block, "BINS": 0 if chain.ranked else 1 << digits.width}
    _, _, groups = plan_of(chain.request, chain.coords.device)
    counts = chain.words if chain.ranked else chain.starts[0]
    tensors = (chain.layout, groups, chain.masks, chain.keys, counts)
    kernel("chain_kernels.order_keys")(number * per, tensors, (per, WIDTH), constants)
    total = chain.layout.cut(_TOTAL * SIDE, (1,))
    if chain.ranked:
        tiles.rank_rows(chain.keys, total, chain.order)
        return None
    tiles.stable_argsort(chain.keys, digits, chain.starts, total, (*chain.rooms, chain.order))
    return None


def order_segments_torch(chain: Chain) -> None:
    keys, layout = [torch.zeros(0, dtype=torch.int32)], chain.layout.tensor()
    for place in range(len(chain.request.tiled)):
        rows, sorts = int(layout[0, place]), bool(layout[7, place])
        own = torch.zeros(rows, dtype=torch.int32)
        if sorts:
            groups = plan_of(chain.request, layout.device)[2][place]
            groups = groups[:, groups[0] != 0].t().contiguous()
            totals = chain.totals.tensor()[GROUPS * place :][: len(groups)]
            masks, count = chain.masks_of(place, rows).tensor()[:, None], torch.tensor([rows], dtype=torch.int32)
            own = tiles.gray_keys_torch(masks, count, groups, totals, SortSpec(0, chain.request.volumes[place]))
        keys.append(own | place << WIDTH)
    order = tiles.stable_argsort_torch(torch.cat(keys))
    chain.order.tensor()[: len(order)] = order


def tile_segments(chain: Chain) -> None:
    """Fill tile_rows, tile_masks and ends, and the entry counts words[ENTRIES:]."""
    if not has_triton(chain.coords):
        return tile_segments_torch(chain)
    number = len(chain.request.tiled)
    per = -(-chain.largest // SMALL)
    tensors = (chain.layout, chain.order, chain.masks, chain.tile_rows, chain.tile_masks)
    kernel("chain_kernels.tile_segments")(number * per, tensors, (per,), {"BLOCK": LARGE})
    tensors = (chain.layout, chain.tile_masks, chain.ends, chain.words)
    kernel("chain_kernels.end_tiles")(number, tensors, (), {"BLOCK": _SUMMED})


def tile_segments_torch(chain: Chain) -> None:
    layout, tile_rows, order = chain.layout.tensor(), chain.tile_rows.tensor(), chain.order.tensor()
    for place in range(len(chain.request.tiled)):
        rows, begin, block, count, slot, tile, *_ = layout[:, place].tolist()
        slots = tile_rows[slot : slot + count * block]
        slots.fill_(-1)
        slots[:rows] = order[begin : begin + rows] - begin
        own = chain.masks_of(place, rows).tensor()
        masks = torch.where(slots >= 0, own[slots.long().clamp(min=0)], 0) if rows else slots
        bits = (masks.view(count, block, 1) >> torch.arange(SIDE - 1)) & 1
        tile_masks = bits.amax(1) if count else bits[:, 0]
        chain.tile_masks.tensor()[tile : tile + count] = (tile_masks << torch.arange(SIDE - 1)).sum(1).int()
        chain.ends.tensor()[tile : tile + count] = tile_masks.sum(1).cumsum(0, dtype=torch.int32)
        chain.words.tensor()[ENTRIES + place] = tile_masks.sum()


class PieceLists(NamedTuple):
    """The five lists of a segments.Pieces, `size` entries each, in `memory` from entry `begin` on, each aligned."""

    memory: Part
    begin: int
    size: int

    def addresses(self) -> list[int]:
        """Device address of each list."""
        first, each = self.memory.data_ptr() + 4 * self.begin, 4 * aligned(self.size)
        return [first, first + each, first + 2 * each, first + 3 * each, first + 4 * each]

    def tensors(self) -> Pieces:
        return Pieces(*self.memory.cut(self.begin, (5, aligned(self.size))).tensor()[:, : self.size])


class TileArrays(NamedTuple):
    """Arrays of all segments, concatenated: those of a TileList; ends: prefix counts of entries by tile; turned:
    K - 1 - taps, the kernel offsets of a symmetric map's transpose."""

    rows: Part
    tiles: Part
    taps: Part
    inputs: Part
    ends: Part
    turned: Part


class Tiled:
    """Tiles of one segment, in arrays shared by all segments; see TileList.

    begins: its start in each of `arrays` but turned. sizes: count of tiles, block (outputs per tile), entries. sorted:
    False if rows keep their order. pieces: of its runs, by maximum length. of: for the transpose of a symmetric map,
    the map's tiles, which differ only in the order of kernel offsets; else None."""

    __slots__ = ("_arrays", "_begins", "_list", "block", "count", "entries", "of", "pieces", "sorted", "volume")
    volume: int
    count: int
    block: int
    entries: int

    def __init__(
        self,
        arrays: TileArrays,
        begins: tuple[int, int, int, int, int],
        sizes: tuple[int, int, int],
        volume: int,
    ) -> None:
        self._arrays, self._begins, self.volume = arrays, begins, volume
        self.count, self.block, self.entries = sizes
        self.pieces: dict[int, PieceLists] = {}
        self.sorted: bool = True
        self.of: Tiled | None = None
        self._list: TileList | None = None

    def lengths(self) -> list[int]:
        """Length of each array of the TileList."""
        return [self.count, self.entries, self.entries, self.entries]

    def addresses(self) -> list[int]:
        """Device address of each array of the TileList."""
        return [array.data_ptr() + 4 * begin for array, begin in zip(self._arrays[:4], self._begins, strict=False)]

    def tensors(self) -> list[Tensor]:
        """The arrays of the TileList, then the prefix counts of entries."""
        shapes = (self.count, self.block), (self.entries,), (self.entries,), (self.entries, self.block), (self.count,)
        places = zip(self._arrays, self._begins, shapes, strict=False)
        return [array.cut(begin, shape).tensor() for array, begin, shape in places]

    def tiles(self) -> TileList:
        """The tiles as tensors, cached, with their runs registered in RUNS."""
        if self._list is None and self.of is not None:
            self._list = self.of.tiles()._replace(taps=self.tensors()[2])
        elif self._list is None:
            *own, ends = self.tensors()
            self._list = TileList(*own)
            pieces = {most: known.tensors() for most, known in self.pieces.items()}
            RUNS.register(self._list.tiles, ends, self.volume, pieces=pieces)
        return self._list

    def transpose(self) -> Tiled:
        """The tiles of the transpose, for a symmetric map: they share all arrays but the kernel offsets."""
        arrays = self._arrays._replace(taps=self._arrays.turned, turned=self._arrays.taps)
        found = Tiled(arrays, self._begins, (self.count, self.block, self.entries), self.volume)
        found.of, found.pieces, found.sorted = self, self.pieces, self.sorted
        return found


def fill_tiles(chain: Chain, words: Sequence[int]) -> list[Tiled]:
    """Tile lists of all segments; with Triton also pieces of their runs. words: `chain.words`, read by the host."""
    request, found = chain.request, list[Tiled]()
    shapes = [_shape(chain, words, place) for place in range(len(request.tiled))]
    long = sum([aligned(entries) for _, _, entries in shapes])
    wide = sum([entries * block for _, block, entries in shapes])
    own, taps, turned, inputs = allocate(chain.coords.device, ((long,), (long,), (long,), (wide,)))
    arrays = TileArrays(chain.tile_rows, own, taps, inputs, chain.ends, turned)
    slot, tile, entry, cell = 0, 0, 0, 0
    for shape, volume in zip(shapes, request.volumes, strict=False):
        found.append(Tiled(arrays, (slot, entry, entry, cell, tile), shape, volume))
        count, block, entries = shape
        slot, tile = slot + count * block, tile + aligned(count)
        entry, cell = entry + aligned(entries), cell + entries * block
    if not has_triton(chain.coords):
        fill_segments_torch(chain, found)
        return found
    pieces, lists = _place_pieces(chain, found)
    plan, *_ = plan_of(request, chain.coords.device)
    tensors = (plan, chain.layout, chain.words, chain.tile_rows, chain.tile_masks, chain.ends, chain.tables)
    tensors += (_piece_lists(request, chain.coords.device), taps, turned, own, inputs, pieces)
    counts = [count for count, *_ in shapes]
    filled, blocks = sum(counts), max(1, -(-max(counts, default=0) // _RUNS))
    volume = max(request.volumes)
    cut = count_sort_constants(0, volume)
    constants = {"BLOCK": LARGE, "LANES": tiles.lanes_of(volume)}
    constants |= {"BINS": cut["BINS"], "RUNS": cut["BLOCK"], "CHUNK": cut["CHUNK"]}
    numbers = (chain.rows, chain.most, len(found), filled, lists, blocks)
    kernel("chain_kernels.fill_segments")(filled + lists * blocks, tensors, numbers, constants)
    return found


def _shape(chain: Chain, words: Sequence[int], place: int) -> tuple[int, int, int]:
    """(tiles, outputs per tile, entries) of a segment."""
    rows = chain.request.rows_in(words, chain.request.tiled[place][1])
    block = chain.request.rule.block(rows)
    return -(-rows // block), block, words[ENTRIES + place]


def _place_pieces(chain: Chain, found: Sequence[Tiled]) -> tuple[Part, int]:
    """(memory of all lists of pieces, their number); sets the pieces of `found`."""
    lists = chain.request.pieces
    sizes = [found[place].count + found[place].entries // most for place, most in lists]
    begins = itertools.accumulate([5 * aligned(size) for size in sizes], initial=0)
    (out,) = allocate(chain.coords.device, ((5 * sum(map(aligned, sizes)),),))
    for (place, most), begin, size in zip(lists, begins, sizes, strict=False):
        found[place].pieces[most] = PieceLists(out, begin, size)
    return out, len(lists)


@cached_device_constant(256)
def _piece_lists(request: ChainRequest, device: torch.device) -> Tensor:
    """int32 [2, 64]: segment and maximum piece length of each list of pieces."""
    found = torch.zeros(2, GROUPS, dtype=torch.int32)
    found[1] = WHOLE
    found[:, : len(request.pieces)] = torch.tensor(request.pieces).t()
    return to_device_async(found, device)


def fill_segments_torch(chain: Chain, lists: Sequence[Tiled]) -> None:
    """Fill the entries of `lists`, in plain torch."""
    layout = chain.layout.tensor()
    for place, tiled in enumerate(lists):
        tile_rows, own, offsets, inputs, _ = tiled.tensors()
        tile, rows = int(layout[5, place]), int(layout[0, place])
        tile_masks = chain.tile_masks.tensor()[tile : tile + len(tile_rows)]
        tile_of, taps = ((tile_masks[:, None] >> torch.arange(tiled.volume)) & 1).nonzero().unbind(1)
        own.copy_(tile_of)
        offsets.copy_(taps)
        tiled.transpose().tensors()[2].copy_(tiled.volume - 1 - taps)
        slots, table = tile_rows[tile_of].long(), chain.table_of(place, rows).tensor()
        if rows:
            inputs.copy_(torch.where(slots >= 0, table[slots.clamp(min=0), taps[:, None]], -1))


_ADDED = 512  # Row blocks per step of the prefix sum of pairs
_WARPS = 8  # Warps of list_all


class GroupedPairs:
    """Pair groups of one map, in arrays shared by all maps; see PairGroups. count: groups; size: pairs per group."""

    __slots__ = ("_found", "_inputs", "_outputs", "_taps", "count", "size")
    count: int
    size: int

    def __init__(self, taps: Part, inputs: Part, outputs: Part) -> None:
        self._taps, self._inputs, self._outputs = taps, inputs, outputs
        self.count, self.size = inputs.shape
        self._found: PairGroups | None = None

    def transpose(self) -> GroupedPairs:
        """The pair groups of the transposed map."""
        return GroupedPairs(self._taps, self._outputs, self._inputs)

    def addresses(self) -> list[int]:
        """Device addresses of outputs, kernel offsets and inputs."""
        return [self._outputs.data_ptr(), self._taps.data_ptr(), self._inputs.data_ptr()]

    def pairs(self) -> PairGroups:
        """The groups as tensors, cached."""
        if self._found is None:
            self._found = PairGroups(self._taps.tensor(), self._inputs.tensor(), self._outputs.tensor())
        return self._found


class _Sizes(NamedTuple):
    """Sizes of one map: rows, row blocks, kernel offsets, groups, pairs per group."""

    rows: int
    blocks: int
    volume: int
    groups: int
    size: int


def group_pairs(chain: Chain, words: Sequence[int]) -> dict[int, GroupedPairs]:
    """Pair groups of the maps in `request.grouped`, by map number. words: `chain.words`, read by the host."""
    numbers = chain.request.grouped
    if not numbers:
        return {}
    sizes = [_sizes(chain, words, number) for number in numbers]
    listed, whole = [one.groups * one.size for one in sizes], sum([aligned(one.groups) for one in sizes])
    device = chain.coords.device
    inputs, outputs = allocate(device, ((sum(listed),),) * 2, _minus_ones)
    taps, ranks, ends = allocate(device, ((whole,), (whole,), (sum([n.blocks * n.volume for n in sizes]),)))
    found, group, pair = dict[int, GroupedPairs](), 0, 0
    for number, one, length in zip(numbers, sizes, listed, strict=True):
        shape = one.groups, one.size
        found[number] = GroupedPairs(taps.cut(group, shape[:1]), inputs.cut(pair, shape), outputs.cut(pair, shape))
        group, pair = group + aligned(one.groups), pair + length
    if has_triton(chain.coords):
        _start(chain, sizes, (taps, ranks, ends, inputs, outputs))
    else:
        group_pairs_torch(chain, found)
    return found


def group_pairs_torch(chain: Chain, found: dict[int, GroupedPairs]) -> None:
    """Fill the pair groups `found` by map number, in plain torch."""
    counts = chain.counts()
    for number, one in found.items():
        rows = counts[chain.request.maps[number][1]]
        masks, count = chain.masks_of(number, rows).tensor()[:, None], torch.tensor([rows], dtype=torch.int32)
        ends = tiles.pair_counts_torch(masks, count, chain.request.volumes[number])
        table = chain.table_of(number, rows).tensor()
        made = tiles.group_pairs(table, count, ends, (one.count, one.size))
        for own, values in zip(one.pairs(), made, strict=True):
            own.copy_(values)


def _minus_ones(count: int, **options: Any) -> torch.Tensor:
    return torch.full((count,), -1, **options)


def _sizes(chain: Chain, words: Sequence[int], number: int) -> _Sizes:
    request = chain.request
    rows, pairs = request.rows_in(words, request.maps[number][1]), request.pairs_in(words, number)
    size = request.rule.group(sum(pairs))
    groups = sum([-(-count // size) for count in pairs])
    return _Sizes(rows, -(-rows // tiles.BLOCK_ROWS), request.volumes[number], groups, size)


def _start(chain: Chain, sizes: Sequence[_Sizes], arrays: Sequence[Part]) -> None:
    """Launch the kernels. arrays: kernel offsets and ranks of groups, prefix counts of pairs, inputs, outputs."""
    taps, ranks, ends, inputs, outputs = arrays
    plan, (blocks, ranked) = _plan(chain, sizes)
    lanes, number = tiles.lanes_of(max([one.volume for one in sizes])), len(sizes)
    of_rows = {"ROWS": tiles.BLOCK_ROWS, "LANES": lanes}
    kernel("pair_kernels.count_pairs")(blocks, (plan, chain.masks, ends), (number,), of_rows)
    added = {"ROWS": tiles.BLOCK_ROWS, "BLOCK": _ADDED}
    kernel("pair_kernels.end_pairs")(SIDE * number, (plan, ends), (), added)
    kernel("pair_kernels.rank_all")(ranked, (plan, ends, taps, ranks), (number,), of_rows | {"BLOCK": tiles.RANKED})
    tensors = (plan, chain.tables, ends, ranks, inputs, outputs, chain.words)
    kernel("pair_kernels.list_all")(blocks, tensors, (number,), of_rows, _WARPS)


def _plan(chain: Chain, sizes: Sequence[_Sizes]) -> tuple[torch.Tensor, tuple[int, int]]:
    """(int64 [11 * 32]: `plan` of pair_kernels; (row blocks of all maps, programs of rank_all))."""
    columns = list[tuple[int, ...]]()
    block, end, group, ranked, pair = 0, 0, 0, 0, 0
    for number, one in zip(chain.request.grouped, sizes, strict=True):
        table, masks = chain.begins[number]
        columns.append((masks, table, one.rows, one.volume, block, end, one.size, one.groups, group, ranked, pair))
        block, end, group = block + one.blocks, end + one.blocks * one.volume, group + aligned(one.groups)
        ranked, pair = ranked - one.groups // -tiles.RANKED, pair + one.groups * one.size
    spare = [0] * (SIDE - len(columns))
    values = [n for row in zip(*columns, strict=True) for n in (*row, *spare)]
    return integers(values, chain.coords.device), (block, ranked)
