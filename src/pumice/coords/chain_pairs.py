"""Pair groups of all maps of a chain (coords.chain), counted, ranked and listed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pumice.coords import tiles
from pumice.coords.chain import SIDE, Chain
from pumice.coords.tiles import PairGroups
from pumice.runtime.launch import has_triton, integers, kernel
from pumice.runtime.parts import Part, aligned, allocate

_ADDED = 512  # Row blocks per step of the prefix sum of pairs
_WARPS = 8  # Warps of list_all


class GroupedPairs:
    """Pair groups of one map, in arrays shared by all maps; see PairGroups. count: groups; size: pairs per group."""

    __slots__ = ("_found", "_inputs", "_outputs", "_taps", "count", "size")

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
