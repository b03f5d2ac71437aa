"""Tiles over the ranks of a torch.distributed process group: rows travel to the ranks of their tiles and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from pumice.coords import Bounds, Geometry
from pumice.engine.cut import Cut, TileTable, placed
from pumice.engine.tile_run import Runner, Way, joined
from pumice.ops import SparseTensor


def over_ranks(runner: Runner, x: SparseTensor, group: Any) -> tuple[SparseTensor, Way]:
    """(the results of this rank, the way): see pm.tiled. x: this rank's rows."""
    told = _from_all((x.geometry.bounds, x.batch_size, len(x)), group)
    way, grid = runner.way.over(_joint([bounds for bounds, _, rows in told if rows] or [x.geometry.bounds]))
    around, existence = way.boxes
    cut = Cut(x, grid)
    runs = TileTable(*map(torch.cat, zip(*_from_all(cut.table, group), strict=True))).runs(grid, existence)
    counts = _from_all([len(cut.rows(tile, around)[0]) for tile in runs], group)
    ranks = deal([*map(sum, zip(*counts, strict=True))], len(told))
    dealt = [[tile for tile, owner in zip(runs, ranks, strict=True) if owner == rank] for rank in range(len(told))]

    parts = [_distinct(cut, [cut.rows(tile, around)[0] for tile in tiles]) for tiles in dealt]
    local, ends = _received(x, parts, max(items for _, items, _ in told), group)
    mine, there = dealt[distributed.get_rank(group)], Cut(local, grid)
    y = joined(local, runner.pieces(there, mine, around))
    if y.geometry is not local.geometry:
        return y, way
    return x.replace(
        _sent_back(y.feats, ends, there.of_tiles(mine), [cut.of_tiles(tiles) for tiles in dealt], group)
    ), way


def deal(voxels: Sequence[int], ranks: int) -> list[int]:
    """The rank of each tile: largest tiles first, each to the rank with the fewest voxels so far."""
    loads, found = [0] * ranks, [0] * len(voxels)
    for tile in sorted(range(len(voxels)), key=lambda n: (-voxels[n], n)):
        found[tile] = loads.index(min(loads))
        loads[found[tile]] += voxels[tile]
    return found


def _joint(boxes: Sequence[Bounds]) -> Bounds:
    low, high = (
        map(how, zip(*sides, strict=True))
        for how, sides in ((min, [b.low for b in boxes]), (max, [b.high for b in boxes]))
    )
    return Bounds(tuple(low), tuple(high), max(b.batch for b in boxes))


def _distinct(cut: Cut, parts: Sequence[Tensor]) -> Tensor:
    """Distinct rows, in order."""
    return torch.unique(torch.cat([cut.order[:0], *parts]))


def _received(x: SparseTensor, parts: Sequence[Tensor], items: int, group: Any) -> tuple[SparseTensor, list[int]]:
    """(the rows that all ranks send to this one, where those of each rank end). parts: rows of x for each rank."""
    coords, feats = (_exchanged([values[rows] for rows in parts], group) for values in (x.coords, x.feats))
    site = replace(x.geometry.site, batch_size=items)
    local = placed(torch.cat(feats), torch.cat(coords), Geometry(x.coords, site, settled=False))
    return local, torch.tensor([*map(len, coords)]).cumsum(0).tolist()


def _sent_back(feats: Tensor, ends: Sequence[int], owned: Tensor, places: Sequence[Tensor], group: Any) -> Tensor:
    """The results [N, C] of this rank's rows. feats: of the rows received, of each rank up to its end; owned: those of
    this rank's tiles, in order; places: this rank's rows in the tiles of each rank, in order."""
    cuts = torch.searchsorted(owned, torch.tensor(ends, device=owned.device)).tolist()
    parts = [feats[owned[begin:end]] for begin, end in zip([0, *cuts], cuts, strict=False)]
    out = feats.new_empty(sum(map(len, places)), feats.shape[1])
    for rows, found in zip(places, _exchanged(parts, group), strict=True):
        out[rows] = found
    return out


def _from_all(value: Any, group: Any) -> list[Any]:
    """The value of each rank."""
    found = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, value, group)
    return found


def _exchanged(parts: Sequence[Tensor], group: Any) -> list[Tensor]:
    """What each rank sends to this one, on the device of `parts`: tensors [rows, C], one for each rank."""
    home, first = parts[0].device, parts[0]
    over = torch.device("cuda", torch.cuda.current_device()) if "nccl" in distributed.get_backend(group) else home
    sizes = torch.tensor([*map(len, parts)], device=over)
    coming = torch.empty_like(sizes)
    distributed.all_to_all_single(coming, sizes, group=group)
    # As bytes: back ends do not send every dtype.
    sent = torch.cat([*parts]).contiguous().view(torch.uint8).to(over)
    received = sent.new_empty(int(coming.sum()), sent.shape[1])
    distributed.all_to_all_single(received, sent, coming.tolist(), sizes.tolist(), group)
    return [*received.to(home).view(first.dtype).split(coming.tolist())]
