"""Layouts of kernel maps for feature kernels: row orders, tiles that share kernel offsets, pair lists per offset.

Every stage is a Triton kernel or, without Triton, plain torch (`*_torch`), with bitwise equal results. Kernels never
synchronise with the host: sizes stay on the device; `fill_tiles`, `list_pairs`, `group_pairs` take capacities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords.box import INT32_MAX
from pumice.coords.buffer import OVERFLOW
from pumice.coords.lookup import WORD, lanes_of
from pumice.coords.relation import Relation
from pumice.coords.segments import RUNS
from pumice.runtime.launch import Array, cached_device_constant, has_triton, kernel, to_device_async

BLOCK_ROWS = 128  # Rows per program of pair and transposition kernels, and per block of pair_counts
_SAMPLED = 1 << 14  # Maximum number of rows sampled to estimate the frequency of groups
_COUNTED = 128  # Sampled rows per program of count_groups
_KEYS = 512  # Rows per program of gray_keys
RANKED = 64  # Pair groups per program of rank_groups
_SUMMED = 2048  # Tiles per step of the prefix sum of entries
_FEW = 10  # Maximum kernel offsets to sort by offsets alone, not by planes too: their bits fill one radix-sort digit
_BITS = 20  # Maximum groups in a sort key, two radix-sort digits; if it covers more than WORD offsets, WORD groups


class TileList(NamedTuple):
    """Tiles of B outputs for implicit GEMM, each with only the kernel offsets that any of its outputs has.

    rows int32 [T, B]: outputs of each tile, -1 for padding.
    tiles int32 [E]: tile of each (tile, offset) entry, non-decreasing, T for padding entries; taps int32 [E]: offset.
    inputs int32 [E, B]: input of output rows[tiles[e], b] at offset taps[e], -1 if none."""

    rows: Tensor
    tiles: Tensor
    taps: Tensor
    inputs: Tensor

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)


class PairList(NamedTuple):
    """Pairs by kernel offset (tap), then output; int32 [P] each."""

    inputs: Tensor
    outputs: Tensor
    taps: Tensor


class PairGroups(NamedTuple):
    """The pairs of each kernel offset in groups of Q, the last group of an offset padded with -1.

    taps int32 [G]: offset of each group, -1 for padding groups and for ones dropped on overflow; inputs, outputs
    int32 [G, Q]. Groups are sorted by relative position within their offset, so that nearby groups read the same rows.
    """

    taps: Tensor
    inputs: Tensor
    outputs: Tensor


@dataclass(frozen=True)
class SortSpec:
    """How rows are sorted into tiles.

    first, last: tiles have only kernel offsets first <= k < last (a mask split). superblock: sort within blocks of this
    many rows, a power of two, for cache locality; 0 sorts all rows together. sort: False keeps the rows' order."""

    first: int
    last: int
    superblock: int = 0
    sort: bool = True

    @staticmethod
    def splits(volume: int, count: int, superblock: int = 0) -> tuple[SortSpec, ...]:
        """`count` specs for equal ranges of kernel offsets (TorchSparse++, section 4.1); 0: one, of all, unsorted."""
        if count == 0:
            return (SortSpec(0, volume, sort=False),)
        edges = [round(volume * n / count) for n in range(count + 1)]
        return tuple(SortSpec(a, b, superblock) for a, b in zip(edges, edges[1:], strict=False))


@dataclass(frozen=True, eq=False)
class Tiling:
    """Tiles of B outputs, from which fill_tiles makes a TileList.
    slots int32 [T, B]: outputs of each tile, -1 for padding. active int8 [T, K]: 1 if any output has kernel offset k.
    ends int32 [T]: inclusive prefix sum of the tiles' entries."""

    slots: Tensor
    active: Tensor
    ends: Tensor

    @property
    def entries(self) -> Tensor:
        """int32 [1] on the device, or [0] without tiles: number of entries."""
        return self.ends[-1:]


def build_tiling(masks: Tensor, count: Tensor, relation: Relation, block: int, how: SortSpec) -> Tiling:
    """Tiles of `block` outputs for rows with these masks; with Triton, no host synchronisation."""
    order = sort_rows(masks, count, groups_of(relation, how, masks.device), how) if how.sort else None
    return assign_tiles(masks, count, order, how, (block, len(relation.offsets)))


@cached_device_constant(256)
def groups_of(relation: Relation, how: SortSpec, device: torch.device) -> Tensor:
    """int32 [G, ceil(K / 31) + 1]: mask words of groups of kernel offsets to sort by; last column: offsets per group.
    First each offset of `how`, then each plane if offsets exceed _FEW; none with a submanifold map's centre offset."""
    volume, used = len(relation.offsets), range(how.first, how.last)
    groups = [[tap] for tap in used]
    if len(used) > _FEW:
        planes = ([tap for tap in plane if tap in used] for plane in relation.planes)
        groups += [plane for plane in planes if 1 < len(plane) < len(used)]
    if relation.policy == "same" and len(used) > 1:
        groups = [group for group in groups if all(any(relation.offsets[tap]) for tap in group)]
    table = torch.zeros(len(groups), -(-volume // WORD) + 1, dtype=torch.int32)
    for group, taps in zip(table, groups, strict=True):
        for tap in taps:
            group[tap // WORD] |= 1 << tap % WORD
        group[-1] = len(taps)
    return to_device_async(table, device)


def group_totals(masks: Tensor, count: Tensor, groups: Tensor, blank: Tensor | None = None) -> Tensor:
    """int32 [G]: number of sampled rows with any kernel offset of a group. blank: an optional zeroed output, [G]."""
    if not has_triton(masks):
        return group_totals_torch(masks, count, groups)
    totals = torch.zeros(groups.shape[0], dtype=torch.int32, device=masks.device) if blank is None else blank
    constants = {"G": groups.shape[0], "WORDS": masks.shape[1], "ROWS": _COUNTED}
    programs = -(-min(masks.shape[0], _SAMPLED) // _COUNTED)
    kernel("tile_kernels.count_groups")(programs, (masks, count, groups, totals), (_SAMPLED, masks.shape[0]), constants)
    return totals


def group_totals_torch(masks: Tensor, count: Tensor, groups: Tensor) -> Tensor:
    step = _step(count)
    return (_has_any(masks[::step], groups) & _valid_rows(masks, count)[::step, None]).sum(0, dtype=torch.int32)


def select_groups(groups: Tensor, totals: Tensor, rows: Tensor, width: int) -> Tensor:
    """int64 [width]: indices of groups to sort by, lowest bit first. totals: rows per group, out of `rows`.
    Selects groups that about half of the rows have, and orders them by (rows without the group) * (its offsets), which
    is what separate tiles save."""
    uneven = (2 * totals.long() - rows).abs()
    taken = torch.sort(torch.sort(uneven, stable=True)[1][:width])[0]
    weights = groups[taken, -1] * (rows - totals[taken].long())
    return taken[torch.sort(weights, stable=True)[1]]


def pair_counts(masks: Tensor, count: Tensor, volume: int) -> Tensor:
    """int32 [K, ceil(N / 128)]: inclusive prefix counts over row blocks of rows with kernel offset k."""
    if not has_triton(masks):
        return pair_counts_torch(masks, count, volume)
    blocks, lanes = max(1, -(-masks.shape[0] // BLOCK_ROWS)), lanes_of(volume)
    sums = torch.empty(volume, blocks, dtype=torch.int32, device=masks.device)
    constants = {"K": volume, "ROWS": BLOCK_ROWS, "LANES": lanes}
    kernel("pair_kernels.pair_counts")(blocks, (masks, count, sums), (blocks,), constants)
    return sums.cumsum(1, dtype=torch.int32)


def pair_counts_torch(masks: Tensor, count: Tensor, volume: int) -> Tensor:
    blocks = max(1, -(-masks.shape[0] // BLOCK_ROWS))
    bits = torch.zeros(blocks * BLOCK_ROWS, volume, dtype=torch.int32, device=masks.device)
    bits[: masks.shape[0]] = _bits(masks, volume) * _valid_rows(masks, count)[:, None]
    return bits.view(blocks, BLOCK_ROWS, volume).sum(1).t().cumsum(1, dtype=torch.int32).contiguous()


def sort_rows(masks: Tensor, count: Tensor, groups: Tensor, how: SortSpec) -> Tensor:
    """int32 [N]: row order that puts rows with similar kernel offsets together, padding rows last.
    Sorts by descending Gray-code rank of the selected groups. With planes among them LiDAR scans need a tenth fewer
    tile entries than with single offsets, shells as many (measured on five scenes)."""
    digits = Digits.of(masks, _width(groups, how, masks.shape[0]) + _block_bits(how, masks.shape[0]))
    if digits is None:
        return stable_argsort_torch(gray_keys(masks, count, groups, group_totals(masks, count, groups), how))
    counts, blank = digits.counts(masks, groups.shape[0])
    totals = group_totals(masks, count, groups, blank)
    return stable_argsort(gray_keys(masks, count, groups, totals, how, (digits, counts)), digits, counts)


def gray_keys(
    masks: Tensor,
    count: Tensor,
    groups: Tensor,
    totals: Tensor,
    how: SortSpec,
    tally: tuple[Digits, Tensor] | None = None,
) -> Tensor:
    """int32 [N]: sort keys. totals: from group_totals. tally: digits, and counts in which to count the lowest digit."""
    width, rows = _width(groups, how, masks.shape[0]), masks.shape[0]
    if not has_triton(masks):
        return gray_keys_torch(masks, count, groups, totals, how)
    keys = torch.empty(rows, dtype=torch.int32, device=masks.device)
    digits, counts = tally or (Digits(0, 0, 1), keys)
    number = groups.shape[0]
    constants = {"G": number, "WORDS": masks.shape[1], "SIDE": max(32, 1 << (number - 1).bit_length())}
    constants |= {"ROWS": _KEYS, "BLOCK": digits.block, "BINS": 0 if tally is None else 1 << digits.width}
    tensors = (masks, count, groups, totals, keys, counts)
    kernel("tile_kernels.gray_keys")(-(-rows // _KEYS), tensors, (_SAMPLED, width, _shift(how), rows), constants)
    return keys


def gray_keys_torch(masks: Tensor, count: Tensor, groups: Tensor, totals: Tensor, how: SortSpec) -> Tensor:
    width, step = _width(groups, how, masks.shape[0]), _step(count)
    met = _has_any(masks, groups[select_groups(groups, totals, (count + step - 1) // step, width)])
    rank = (met.long() << torch.arange(width, device=masks.device)).sum(1)
    for shift in (1, 2, 4, 8, 16):
        rank = rank ^ (rank >> shift)
    block = torch.arange(masks.shape[0], device=masks.device) >> _shift(how)
    keys = (1 << width) - 1 - rank | block << width
    return torch.where(_valid_rows(masks, count), keys, INT32_MAX).int()


def assign_tiles(masks: Tensor, count: Tensor, order: Tensor | None, how: SortSpec, shape: tuple[int, int]) -> Tiling:
    """Tiles of B rows in `order`, int32 [N], or in their own order if None. shape: (B, K)."""
    if not has_triton(masks):
        return assign_tiles_torch(masks, count, order, how, shape)
    block, volume = shape
    tiles, device = -(-masks.shape[0] // block), masks.device
    slots = torch.empty(tiles, block, dtype=torch.int32, device=device)
    active = torch.empty(tiles, volume, dtype=torch.int8, device=device)
    ends = torch.empty(tiles, dtype=torch.int32, device=device)
    constants = {"K": volume, "BLOCK": block, "SORTED": order is not None}
    tensors = (masks, count, masks if order is None else order, slots, active, ends)
    kernel("tile_kernels.tile_taps")(tiles, tensors, (how.first, how.last, masks.shape[0]), constants)
    if tiles:
        kernel("tile_kernels.add_up")(1, (ends,), (tiles,), {"BLOCK": _SUMMED})
    return Tiling(slots, active, ends)


def assign_tiles_torch(
    masks: Tensor, count: Tensor, order: Tensor | None, how: SortSpec, shape: tuple[int, int]
) -> Tiling:
    block, volume = shape
    tiles, device = -(-masks.shape[0] // block), masks.device
    slots = torch.full((tiles * block,), -1, dtype=torch.int32, device=device)
    own = torch.arange(masks.shape[0], device=device) if order is None else order
    slots[: masks.shape[0]] = torch.where(_valid_rows(masks, count), own, -1).int()
    bits = _bits(masks, volume)[slots.long().clamp(min=0)] if masks.shape[0] else slots.new_zeros(0, volume)
    bits = bits * (slots >= 0)[:, None]
    bits[:, : how.first], bits[:, how.last :] = 0, 0
    active = bits.view(tiles, block, volume).sum(1) > 0
    return Tiling(slots.view(tiles, block), active.to(torch.int8), active.sum(1).cumsum(0, dtype=torch.int32))


def fill_tiles(rows: Tensor, tiling: Tiling, capacity: int, status: Tensor | None = None) -> TileList:
    """The tile list, of `capacity` entries. status: int32 [1], receives OVERFLOW; None: the capacity is exact."""
    tiles, block = tiling.slots.shape
    device = rows.device
    tap, tile = (torch.empty(capacity, dtype=torch.int32, device=device) for _ in range(2))
    inputs = torch.empty(capacity, block, dtype=torch.int32, device=device)
    # Without a status no overflow is possible: the kernel gets a placeholder.
    found, overflow = TileList(tiling.slots, tile, tap, inputs), tiling.ends if status is None else status
    if not has_triton(rows):
        fill_tiles_torch(rows, tiling, found, overflow)
        RUNS.register(tile, tiling.ends, rows.shape[1])
        return found
    RUNS.register(tile, tiling.ends, rows.shape[1])
    lanes = lanes_of(rows.shape[1])
    constants = {"K": rows.shape[1], "BLOCK": block, "LANES": lanes}
    tensors = (rows, tiling.slots, tiling.active, tiling.ends, tap, tile, inputs, overflow)
    spare = 0 if status is None else -(-capacity // lanes)
    kernel("tile_kernels.fill_tiles")(tiles + spare, tensors, (capacity, tiles), constants)
    return found


def fill_tiles_torch(rows: Tensor, tiling: Tiling, found: TileList, status: Tensor) -> None:
    """As fill_tiles, in plain torch; writes `found`."""
    status.bitwise_or_(OVERFLOW * (tiling.entries > len(found.taps)).any().int())
    found.tiles.fill_(len(tiling.slots))
    found.taps.zero_()
    found.inputs.fill_(-1)
    tile, tap = (part[: len(found.tiles)] for part in tiling.active.nonzero().unbind(1))
    slots = tiling.slots[tile].long()
    met = rows[slots.clamp(min=0), tap[:, None]]
    found.tiles[: len(tile)], found.taps[: len(tap)] = tile.int(), tap.int()
    found.inputs[: len(tile)] = torch.where(slots >= 0, met, -1)


def list_pairs(rows: Tensor, count: Tensor, ends: Tensor, capacity: int, status: Tensor | None = None) -> PairList:
    """The pairs by offset, then output, padded with -1 to `capacity`. Others: see group_pairs."""
    made = PairList(*_padding((3, capacity), dtype=torch.int32, device=rows.device))
    overflow = rows.new_empty(1) if status is None else status
    _list((rows, count, ends, ends, *made, overflow), (1, capacity), ranked=False)
    return made


def group_pairs(
    rows: Tensor, count: Tensor, ends: Tensor, shape: tuple[int, int], status: Tensor | None = None
) -> PairGroups:
    """Pair groups of a neighbour table. ends: from pair_counts. shape: (G, Q), a capacity. status: see fill_tiles."""
    groups, size = shape
    inputs, outputs = _padding((2, *shape), dtype=torch.int32, device=rows.device)
    overflow = rows.new_empty(1) if status is None else status
    taps, ranks = group_ranks(ends, groups, size)
    _list((rows, count, ends, ranks, inputs, outputs, taps, overflow), (size, groups), ranked=True)
    return PairGroups(taps, inputs, outputs)


def group_ranks(ends: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """int32 [groups] each: (kernel offset of each group, -1 past the last; position of each group, counted offset by
    offset, in the order of PairGroups)."""
    taps = _padding((groups,), dtype=torch.int32, device=ends.device)
    ranks = torch.empty_like(taps)
    if not has_triton(ends):
        group_ranks_torch(ends, size, (taps, ranks))
        return taps, ranks
    volume, blocks = ends.shape
    constants = {"K": volume, "LANES": lanes_of(volume), "BLOCK": RANKED}
    kernel("pair_kernels.rank_groups")(-(-groups // RANKED), (ends, taps, ranks), (size, groups, blocks), constants)
    return taps, ranks


def group_ranks_torch(ends: Tensor, size: int, found: tuple[Tensor, Tensor]) -> None:
    """As group_ranks, in plain torch; writes `found`."""
    taps, ranks = found
    whole = _groups_of(ends, size)
    own = torch.repeat_interleave(torch.arange(len(whole), device=ends.device), whole)
    nth = torch.arange(len(own), device=ends.device) - (whole.cumsum(0) - whole)[own]
    # Equal fractions round equally, and distinct ones differ by far more than rounding.
    order = ((2 * nth + 1).double() / whole[own]).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=ends.device)
    there = rank[: len(ranks)]
    ranks[: len(there)] = there.int()
    kept = there < len(taps)
    taps[there[kept]] = own[: len(there)][kept].int()


def _list(tensors: Sequence[Tensor], shape: tuple[int, int], ranked: bool) -> None:
    """tensors: rows, count, ends, ranks; to fill: inputs, outputs, taps unless ranked, status. shape: (pairs per group,
    groups)."""
    rows, _, ends, *_ = tensors
    if not has_triton(rows):
        return _list_torch(tensors, shape, ranked)
    volume = rows.shape[1]
    constants = {"K": volume, "ROWS": BLOCK_ROWS, "LANES": lanes_of(volume), "RANKED": ranked}
    kernel("pair_kernels.list_pairs")(-(-rows.shape[0] // BLOCK_ROWS), tensors, (*shape, ends.shape[1]), constants)


def _list_torch(tensors: Sequence[Tensor], shape: tuple[int, int], ranked: bool) -> None:
    rows, count, ends, ranks, inputs, outputs, kernel_offsets, status = tensors
    (size, groups), totals = shape, ends[:, -1].long()
    met = torch.where(_valid_rows(rows, count)[:, None], rows, -1).t()
    taps, at = (met >= 0).nonzero().unbind(1)
    nth = torch.arange(len(at), device=rows.device) - (totals.cumsum(0) - totals)[taps]
    whole = _groups_of(ends, size)
    group = (whole.cumsum(0) - whole)[taps] + nth // size
    kept = group < groups
    status.bitwise_or_(OVERFLOW * (~kept).any().int())
    if ranked:
        group[kept] = ranks[group[kept]].long()
        kept = group < groups
    place = (group * size + nth % size)[kept]
    inputs.view(-1)[place], outputs.view(-1)[place] = met[taps, at][kept], at[kept].int()
    if not ranked:
        kernel_offsets[place] = taps[kept].int()


def _groups_of(ends: Tensor, size: int) -> Tensor:
    """Number of pair groups of each kernel offset."""
    return (ends[:, -1].long() + size - 1) // size


def transpose_table(rows: Tensor, count: Tensor, inputs: int) -> Tensor:
    """int32 [inputs, K]: the transposed neighbour table: turned[i, k] = o where rows[o, k] = i, else -1."""
    volume = rows.shape[1]
    turned = _padding((inputs, volume), dtype=torch.int32, device=rows.device)
    if not has_triton(rows):
        return transpose_table_torch(rows, count, turned)
    constants = {"K": volume, "ROWS": BLOCK_ROWS, "LANES": lanes_of(volume)}
    kernel("tile_kernels.transpose_table")(-(-rows.shape[0] // BLOCK_ROWS), (rows, count, turned), (), constants)
    return turned


def transpose_table_torch(rows: Tensor, count: Tensor, turned: Tensor) -> Tensor:
    """As transpose_table, in plain torch; writes `turned`."""
    at, taps = (torch.where(_valid_rows(rows, count)[:, None], rows, -1) >= 0).nonzero().unbind(1)
    turned[rows[at, taps].long(), taps] = at.int()
    return turned


def _padding(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, -1, dtype=dtype, device=device)


def _valid_rows(rows: Tensor, count: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device) < count


def _has_any(masks: Tensor, groups: Tensor) -> Tensor:
    """bool [N, G]: True if a row has any kernel offset of a group."""
    met = masks.new_zeros(masks.shape[0], groups.shape[0], dtype=torch.bool)
    for word in range(masks.shape[1]):
        met |= (masks[:, word, None] & groups[:, word]) != 0
    return met


def _bits(masks: Tensor, volume: int) -> Tensor:
    """int32 [N, K]: bits of the mask words, 0 or 1."""
    taps = torch.arange(volume, device=masks.device)
    return (masks[:, taps // WORD] >> (taps % WORD).int()) & 1


def _shift(how: SortSpec) -> int:
    return how.superblock.bit_length() - 1 if how.superblock else 62


def _step(count: Tensor) -> int:
    """Sampling stride over the valid rows."""
    return max(1, -(-int(count) // _SAMPLED))


def _width(groups: Tensor, how: SortSpec, rows: int) -> int:
    """Number of groups to sort by: their bits and the superblock's fit the key. Padding rows need none: stable sort."""
    most = _BITS if how.last - how.first <= WORD else WORD
    return min(most, groups.shape[0], WORD - _block_bits(how, rows))


def _block_bits(how: SortSpec, rows: int) -> int:
    return (max(rows - 1, 0) >> _shift(how)).bit_length()


_DIGIT = 10  # Maximum bits of a radix-sort digit
_MOST = 1 << 21  # Maximum keys times digits: torch.sort is faster beyond (on an H200)
_BLOCK = 512  # Rows per block, which one program sorts by a digit
_WARPS = 8  # Warps of place_digits
_COLUMNS = 8  # Digit values per program of scan_digits: 32 bytes of counts per block
_ADDED = 512  # Blocks per step of the prefix sum


class Digits(NamedTuple):
    """Radix sort of keys: `turns` passes, each by a digit of `width` bits, over blocks of `block` rows."""

    turns: int
    width: int
    block: int

    @staticmethod
    def of(keys: Tensor, bits: int) -> Digits | None:
        """Digits for keys of `bits` bits; None if torch.sort is faster or Triton cannot run."""
        turns = max(1, -(-bits // _DIGIT))
        few = 0 < turns * keys.shape[0] <= _MOST
        return Digits(turns, -(-bits // turns), _BLOCK) if few and bits > 0 and has_triton(keys) else None

    def counts(self, keys: Tensor, more: int = 0) -> tuple[Tensor, Tensor]:
        """Zeroed int32 [turns, blocks + 1, 2**width], for rows per block and digit value, and zeroed int32 [more]."""
        shape = (self.turns, -(-keys.shape[0] // self.block) + 1, 1 << self.width)
        sizes = (math.prod(shape), more)
        counts, rest = torch.zeros(sum(sizes), dtype=torch.int32, device=keys.device).split(sizes)
        return counts.view(shape), rest


def stable_argsort(
    keys: Array,
    digits: Digits,
    counts: Tensor | Sequence[Array],
    total: Array | None = None,
    rooms: Sequence[Array] = (),
) -> Any:
    """int32 [N]: stable argsort of non-negative keys int32 [N] by their lowest `digits`.
    counts: from Digits.counts, with counts of the lowest digit filled in. total: int32 [1] on the device, number of
    leading keys to sort and of entries written; None: N. rooms: output array of each pass, allocated if empty."""
    starts = counts.unbind() if isinstance(counts, Tensor) else counts
    given = starts[0] if total is None else total
    bins, blocks, columns = 1 << digits.width, starts[0].shape[0] - 1, min(_COLUMNS, 1 << digits.width)
    rows = keys.shape[0]
    for turn in range(digits.turns):
        last = turn + 1 == digits.turns
        dtype = torch.int32 if last else torch.int64
        found = rooms[turn] if rooms else torch.empty(rows, dtype=dtype, device=keys.device)
        added = {"BINS": bins, "COLUMNS": columns, "ROWS": _ADDED, "BLOCK": 0 if total is None else digits.block}
        kernel("tile_kernels.scan_digits")(bins // columns, (starts[turn], given), (blocks,), added)
        tensors = (keys, starts[turn], starts[turn if last else turn + 1], found, given)
        constants = {"BINS": bins, "BLOCK": digits.block, "FIRST": turn == 0, "LAST": last}
        constants["COUNTED"] = total is not None
        kernel("tile_kernels.place_digits")(blocks, tensors, (turn * digits.width, rows, blocks), constants, _WARPS)
        keys = found
    return keys


def sort_pairs(
    digits: Digits, keys: Sequence[Array], values: Sequence[Array], starts: Sequence[Array], total: Array
) -> Array:
    """Sort int64 keys, with int32 values, by their lowest `digits`; stable. Returns the sorted values: one of `values`.
    keys, values: two arrays each, of which the first are given. starts, total: as in stable_argsort, at most the length
    of the arrays."""
    capacity, bins = keys[0].shape[0], 1 << digits.width
    blocks, columns = starts[0].shape[0] - 1, min(_COLUMNS, bins)
    added = {"BINS": bins, "COLUMNS": columns, "ROWS": _ADDED, "BLOCK": digits.block}
    for turn in range(digits.turns):
        last, one, other = turn + 1 == digits.turns, turn % 2, 1 - turn % 2
        kernel("tile_kernels.scan_digits")(bins // columns, (starts[turn], total), (blocks,), added)
        later = starts[turn if last else turn + 1]
        tensors = (keys[one], values[one], starts[turn], later, keys[other], values[other], total)
        shift, constants = turn * digits.width, {"BINS": bins, "BLOCK": digits.block, "LAST": last}
        kernel("tile_kernels.place_pairs")(blocks, tensors, (shift, shift + digits.width, capacity), constants, _WARPS)
    return values[digits.turns % 2]


def rank_rows(keys: Array, total: Array, order: Array) -> None:
    """As stable_argsort, in one launch that compares each row with all others, into `order`. total: number of keys."""
    rows, block = _COMPARED
    constants = {"ROWS": rows, "BLOCK": block}
    kernel("tile_kernels.rank_rows")(-(-keys.shape[0] // rows), (keys, total, order), (), constants)


_COMPARED = 32, 256  # Rows per program of rank_rows, and rows that it compares them with at a time


def sort_pairs_torch(keys: Tensor, values: Tensor) -> Tensor:
    """The values in the order of their keys; stable."""
    return values[torch.sort(keys, stable=True)[1]]


def stable_argsort_torch(keys: Tensor) -> Tensor:
    return torch.sort(keys, stable=True)[1].int()
