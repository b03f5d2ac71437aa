"""Build the levels and kernel maps of coords.chain and cache them in geometries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import OVERFLOW, RANGE
from pumice.coords.chain import (
    COUNTS,
    STRIDE,
    Chain,
    ChainRequest,
    estimate_of,
    find_maps,
)
from pumice.coords.chain_pairs import GroupedPairs, group_pairs
from pumice.coords.chain_tiles import Tiled, Turned, fill_tiles, tile_maps
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.kernel_map import Deferred, KernelMap
from pumice.coords.outputs import level_key, site_of
from pumice.coords.tiles import SortSpec
from pumice.runtime.launch import compiling_launches, outside_inference_mode
from pumice.runtime.parts import Part

_SPARE = 1 << 25  # Maximum unused table entries to keep allocated; beyond, the used parts are copied


@dataclass(frozen=True, eq=False)
class TiledMap:
    """A kernel map (of kind UP: a transposed one) and its tiles. turned: tiles of its transpose, if built; groups: its
    pair groups, if requested (ChainRequest.paired)."""

    found: KernelMap
    tiled: Tiled
    turned: Tiled | Turned | None = None
    groups: GroupedPairs | None = None


def build_chain(
    geometry: Geometry, request: ChainRequest, meanwhile: Callable[[], object] | None = None
) -> list[TiledMap] | None:
    """Build the levels and maps of a request that `refusal` accepts, and cache them in their geometries.

    Returns the tiled maps in the request's order; None if coordinates whose bounds were not known exceed the keys. One
    host synchronisation per attempt, with another attempt after an overflow. meanwhile: called before the first one.
    Raises CoordinateError for duplicates and for coordinates outside the geometry's bounds."""
    geometry.require_unwritten()
    with outside_inference_mode():
        if geometry.coords.is_cuda:
            compile_kernels(request.compile_request, geometry.device)
        estimate, needed, rows = estimate_of(request), 0, len(geometry)
        while True:
            most = estimate.most(rows, needed)
            chain = find_maps(geometry.coords, geometry.outline, request, most)
            tile_maps(chain)
            if meanwhile is not None and not needed:
                meanwhile()
            words = chain.words.tensor().tolist()
            if geometry.outline.bounds.batch < 0:
                if words[0] & RANGE and geometry.bounds:
                    return None
                geometry.learn(request.box_in(words))
            geometry.settle(words[0] & ~OVERFLOW)
            largest = max(words[COUNTS + STRIDE : COUNTS + STRIDE * request.levels : STRIDE], default=0)
            if not words[0] & OVERFLOW and largest <= most:
                break
            needed = max(largest, most)
        if request.steps:
            estimate.learn(rows, largest)
        lists, groups = fill_tiles(chain, words), group_pairs(chain, words)
        chain.release()
        return _Assembler(chain, words, lists, groups).assemble(geometry)


@lru_cache(maxsize=64)
def compile_kernels(request: ChainRequest, device: torch.device) -> None:
    """Compile the kernels of a `ChainRequest.compile_request` in parallel, once per process."""
    coords, origin = torch.zeros(1, 1 + request.dim, dtype=torch.int32, device=device), (0,) * request.dim
    site = GridSpec((1,) * request.dim, None, 1, Bounds(origin, origin, 1))
    with compiling_launches():
        chain = find_maps(coords, site, request, 64)
        tile_maps(chain)
        nothing = [0] * request.num_read
        fill_tiles(chain, nothing)
        group_pairs(chain, nothing)


class _Assembler:
    """Makes geometries and kernel maps of a chain's arrays. words: read by the host; groups: by map number."""

    def __init__(
        self, chain: Chain, words: Sequence[int], lists: Sequence[Tiled], groups: Mapping[int, GroupedPairs]
    ) -> None:
        self._chain, self._request, self._words, self._lists, self._groups = chain, chain.request, words, lists, groups
        self._counts = [chain.request.rows_in(words, level) for level in range(chain.request.levels)]
        least = chain.request.rule.least
        for (_, level, _), volume, one in zip(chain.request.tiled, chain.request.volumes, lists, strict=False):
            one.sorted = self._counts[level] >= least(volume)
        used = sum(
            [self._counts[place[1]] * n for place, n in zip(chain.request.maps, chain.request.volumes, strict=True)]
        )
        self._copies = chain.tables.shape[0] - used > _SPARE
        self._valid = [Deferred(partial(_count, chain.words, n)) for n in range(len(self._counts))]

    def assemble(self, geometry: Geometry) -> list[TiledMap]:
        """Cache all levels and maps in their geometries. Returns the tiled maps in the request's order."""
        maps, coarse = dict[int, KernelMap](), self._chain.coarse
        turned, groups = dict[int, Tiled | Turned](), {**self._groups}
        for level, (windows, step) in enumerate(self._request.by_level):
            for number, window in windows:
                maps[number] = found = self._map(number, level)
                geometry.keep(window, None, (found, None))
            if step is None:
                break
            down, up, relation = step
            shape = self._counts[level + 1], coarse.shape[2]
            coords = coarse.cut(level * coarse.shape[1] * coarse.shape[2], shape).tensor()
            outputs = Geometry(coords.clone() if self._copies else coords, site_of(geometry.site, relation))
            maps[down] = found = self._map(down, level, up)
            geometry.keep(relation, None, (found, outputs))
            if (key := level_key(relation)) is not None:
                geometry.levels[key] = outputs
            if up is not None:
                maps[up] = found.transpose()
                if down in groups:
                    groups[up] = groups[down].transpose()
                for one, other in ((down, up), (up, down)):
                    if other < len(self._lists):
                        turned[one] = self._lists[other]
            geometry = outputs
        for number, one in enumerate(self._lists):
            if number in groups and maps[number].symmetric:
                turned[number] = one.transpose()
        return [TiledMap(maps[n], one, turned.get(n), groups.get(n)) for n, one in enumerate(self._lists)]

    def _map(self, number: int, inputs: int, turned: int | None = None) -> KernelMap:
        """A kernel map with its known storages. inputs: level of its inputs; turned: number of its UP map, if any."""
        (_, level, relation), chain = self._request.maps[number], self._chain
        rows, outputs = self._counts[inputs], self._counts[level]
        storages: dict[Any, Any] = {
            ("totals", False): self._request.pairs_in(self._words, number),
            ("valid_count", True): self._valid[inputs],
            ("valid_count", False): self._valid[level],
            ("masks", False): Deferred(partial(_column, chain, number, outputs)),
        }
        self._tile(storages, number, False)
        if turned is not None:
            self._tile(storages, turned, True)
            storages["rows", True] = Deferred(partial(_table, chain, turned, rows))
            storages["masks", True] = Deferred(partial(_column, chain, turned, rows))
        table = chain.table_of(number, outputs).tensor()
        return KernelMap(relation, table.clone() if self._copies else table, rows, outputs, _storages=storages)

    def _tile(self, storages: dict[Any, Any], number: int, flipped: bool) -> None:
        """Add the tiles of map `number`, if any, and their entry count to `storages`."""
        if number < len(self._lists):
            one = self._lists[number]
            tiles, entries = _names(one.block, one.volume, one.sorted)
            storages[tiles, flipped] = Deferred(one.tiles)
            storages[entries, flipped] = [one.entries]


@lru_cache(maxsize=256)
def _names(block: int, volume: int, sort: bool) -> tuple[Hashable, Hashable]:
    """Storage keys of a KernelMap for its tiles and their entry count."""
    how = SortSpec(0, volume, sort=sort)
    return ("compacted", block, how), ("entries", block, how)


def _table(chain: Chain, place: int, count: int) -> Tensor:
    return chain.table_of(place, count).tensor()


def _column(chain: Chain, place: int, count: int) -> Tensor:
    """int32 [count, 1]: masks of a map, in KernelMap's shape."""
    return chain.masks_of(place, count).tensor()[:, None]


def _count(words: Part, level: int) -> Tensor:
    """int32 [1] on the device: rows of a level."""
    return words.cut(COUNTS + STRIDE * level, (1,)).tensor()
