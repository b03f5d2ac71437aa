"""Levels and kernel maps of coords.chain as geometries keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import OVERFLOW, RANGE
from pumice.coords.chain import (
    COUNTS,
    DOWN,
    ENTRIES,
    PAIRS,
    SAME,
    SIDE,
    STRIDE,
    UP,
    Chain,
    ChainRequest,
    Place,
    estimate_of,
    find_maps,
)
from pumice.coords.chain_tiles import Tiled, fill_tiles, tile_maps
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.kernel_map import Deferred, KernelMap
from pumice.coords.outputs import level_key, site_of
from pumice.coords.tiles import SortSpec
from pumice.runtime.launch import compiling_launches, outside_inference_mode
from pumice.runtime.parts import Part

_SPARE = 1 << 25  # Unused entries of the tables up to which what is used of them is not copied


@dataclass(frozen=True, eq=False)
class TiledMap:
    """A map, transposed if it is of kind UP, and its tiles."""

    found: KernelMap
    tiled: Tiled


def build_chain(geometry: Geometry, request: ChainRequest) -> list[TiledMap] | None:
    """Build the levels and maps of a request that `refusal` does not refuse, and keep them in their geometries; those
    with tiles, in the order of the request. One host synchronisation, another where there was too little room. None for
    coordinates that exceed the keys, which nobody knew.

    Raises CoordinateError for duplicates and for coordinates outside the geometry's bounds."""
    geometry.require_unwritten()
    with outside_inference_mode():
        if geometry.coords.is_cuda:
            compile_kernels(request, geometry.device)
        estimate, needed, rows = estimate_of(request), 0, len(geometry)
        while True:
            most = estimate.most(rows, needed)
            chain = find_maps(geometry.coords, geometry.outline, request, most)
            tile_maps(chain)
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
        lists = fill_tiles(chain, words)
        chain.release()
        return _Assembler(chain, words, lists).assemble(geometry)


@lru_cache(maxsize=64)
def compile_kernels(request: ChainRequest, device: torch.device) -> None:
    """Compile the kernels of a request in parallel; once in a process."""
    coords, origin = torch.zeros(1, 1 + request.dim, dtype=torch.int32, device=device), (0,) * request.dim
    site = GridSpec((1,) * request.dim, None, 1, Bounds(origin, origin, 1))
    with compiling_launches():
        chain = find_maps(coords, site, request, 64)
        tile_maps(chain)
        fill_tiles(chain, [0] * request.num_read)


class _Assembler:
    """Builds levels and maps from the arrays of a chain. words: those that the host read."""

    def __init__(self, chain: Chain, words: Sequence[int], lists: Sequence[Tiled]) -> None:
        self._chain, self._request, self._words, self._lists = chain, chain.request, words, lists
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
        """Cache all levels and maps in their geometries; the maps with tiles, in the order of the request."""
        maps, request = dict[Place, KernelMap](), self._request
        for level in range(request.levels):
            for window in request.windows[level] if level < len(request.windows) else ():
                maps[SAME, level, window] = found = self._map((SAME, level, window), level)
                geometry.keep(window, None, (found, None))
            if level == len(request.steps):
                break
            step, coarse = request.steps[level], self._chain.coarse
            shape = self._counts[level + 1], coarse.shape[2]
            coords = coarse.cut(level * coarse.shape[1] * coarse.shape[2], shape).tensor()
            outputs = Geometry(coords.clone() if self._copies else coords, site_of(geometry.site, step))
            maps[DOWN, level + 1, step] = found = self._map((DOWN, level + 1, step), level)
            geometry.keep(step, None, (found, outputs))
            if (key := level_key(step)) is not None:
                geometry.levels[key] = outputs
            if (UP, level, step) in request.place_of:
                maps[UP, level, step] = found.transpose()
            geometry = outputs
        return [TiledMap(maps[place], one) for place, one in zip(request.tiled, self._lists, strict=True)]

    def _map(self, place: Place, inputs: int) -> KernelMap:
        """A map with all that is known of it. inputs: their level."""
        kind, level, relation = place
        number, chain = self._request.place_of[place], self._chain
        volume, rows, outputs = self._request.volumes[number], self._counts[inputs], self._counts[level]
        at = PAIRS + SIDE * number
        storages: dict[Any, Any] = {
            ("totals", False): self._words[at : at + volume],
            ("valid_count", True): self._valid[inputs],
            ("valid_count", False): self._valid[level],
            ("masks", False): Deferred(partial(_column, chain, number, outputs)),
        }
        self._tile(storages, place, False)
        if kind == DOWN and (turned := self._request.place_of.get((UP, inputs, relation))) is not None:
            self._tile(storages, (UP, inputs, relation), True)
            storages["rows", True] = Deferred(partial(_table, chain, turned, rows))
            storages["masks", True] = Deferred(partial(_column, chain, turned, rows))
        table = chain.table_of(number, outputs).tensor()
        return KernelMap(relation, table.clone() if self._copies else table, rows, outputs, _storages=storages)

    def _tile(self, storages: dict[Any, Any], place: Place, flipped: bool) -> None:
        """Tiles of a map, and the number of their entries."""
        number = self._request.place_of[place]
        if number < len(self._lists):
            one = self._lists[number]
            key = one.parts[0].shape[1], SortSpec(0, one.volume, sort=one.sorted)
            storages[("compacted", *key), flipped] = Deferred(one.tiles)
            storages[("entries", *key), flipped] = [self._words[ENTRIES + number]]


def _table(chain: Chain, place: int, count: int) -> Tensor:
    """The table of a map."""
    return chain.table_of(place, count).tensor()


def _column(chain: Chain, place: int, count: int) -> Tensor:
    """The masks of a map, as KernelMap has them."""
    return chain.masks_of(place, count).tensor()[:, None]


def _count(words: Part, level: int) -> Tensor:
    """int32 [1]: the number of rows of a level."""
    return words.cut(COUNTS + STRIDE * level, (1,)).tensor()
