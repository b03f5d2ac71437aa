"""Build the levels and kernel maps of coords.chain and cache them in geometries."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import OVERFLOW, RANGE, CoordBuffer, new_status
from pumice.coords.capacity import BufferedMapState, BufferedState
from pumice.coords.chain import (
    BATCHES,
    COUNTS,
    MARGIN,
    RANKED,
    SAME,
    STRIDE,
    UP,
    BufferedChain,
    Chain,
    ChainRequest,
    KeyLayout,
    Room,
    TileRule,
    begun,
    estimate_of,
    find_maps,
    request_refusal,
    start_kernels,
)
from pumice.coords.chain_tiles import GroupedPairs, Tiled, fill_tiles, group_pairs, tile_maps
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.kernel_map import Deferred, KernelMap
from pumice.coords.lookup import Neighbours
from pumice.coords.outputs import level_key, max_outputs, site_of
from pumice.coords.relation import Relation
from pumice.coords.tiles import SortSpec
from pumice.errors import GeometryError
from pumice.runtime.launch import Part, compiling_launches, has_triton, outside_inference_mode
from pumice.runtime.streams import is_capturing


@dataclass(frozen=True, eq=False)
class TiledMap:
    """A kernel map (of kind UP: a transposed one) and its tiles. turned: tiles of its transpose, if built; groups: its
    pair groups, if requested (ChainRequest.paired)."""

    found: KernelMap
    tiled: Tiled
    turned: Tiled | None = None
    groups: GroupedPairs | None = None


def build_chain(
    geometry: Geometry, request: ChainRequest, meanwhile: Callable[[], object] | None = None
) -> list[TiledMap] | None:
    """Build the levels and maps of a request that `refusal` accepts, and cache them in their geometries.

    Returns the tiled maps in the request's order; None if coordinates whose bounds were not known exceed the keys. One
    host synchronisation per attempt, with another attempt after an overflow, and for the first scene of a request if
    the first guess took much more memory than needed. meanwhile: called before the first one.
    Raises CoordinateError for duplicates and for coordinates outside the geometry's bounds."""
    geometry.require_unwritten()
    with outside_inference_mode():
        if geometry.coords.is_cuda:
            compile_kernels(request.compile_request, geometry.device)
        estimate, needed, rows = estimate_of(request), Room(0, 0), len(geometry)
        while True:
            room, site = estimate.room(rows, needed), geometry.outline
            chain = find_maps(geometry.coords, site, request, room, estimate.key_layout(site.bounds))
            tile_maps(chain)
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            words = chain.words.tensor().tolist()
            if geometry.outline.bounds.batch < 0:
                if words[0] & RANGE and geometry.bounds:
                    return None
                geometry.learn(request.box_in(words))
            geometry.settle(words[0] & ~OVERFLOW)
            found, least = request.found_in(words), KeyLayout.of(request, geometry.bounds)
            wanted = _more_room(needed, room, found, bool(words[0] & OVERFLOW))
            if wanted == needed and chain.key_layout.joined(least) == chain.key_layout:
                if not request.steps or not estimate.learn(rows, room, found, least):
                    break
                wanted = Room(0, 0)
            needed = wanted
        lists, groups = fill_tiles(chain, words), group_pairs(chain, words)
        chain.release()
        return _Assembler(chain, words, lists, groups).assemble(geometry)


def _more_room(before: Room, room: Room, found: Room, full: bool) -> Room:
    """The least capacity of another attempt: more where it was exceeded, and everywhere if the hash table was full."""
    each = zip(before, room, found, strict=True)
    return Room(*[max(n, there) if full or n > there else known for known, there, n in each])


@lru_cache(maxsize=64)
def compile_kernels(request: ChainRequest, device: torch.device) -> None:
    """Compile the kernels of a `ChainRequest.compile_request` in parallel, once per process."""
    origin = (0,) * request.dim
    site = GridSpec((1,) * request.dim, None, 1, Bounds(origin, origin, 1))
    with compiling_launches():
        for rows in (1, RANKED + 1):
            # Few rows are sorted by another kernel than many.
            coords = torch.zeros(rows, 1 + request.dim, dtype=torch.int32, device=device)
            chain = find_maps(coords, site, request, Room.of(request, 64))
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
        self._valid = [Deferred(partial(_count, chain.words, n)) for n in range(len(self._counts))]

    def assemble(self, geometry: Geometry) -> list[TiledMap]:
        """Cache all levels and maps in their geometries. Returns the tiled maps in the request's order."""
        maps, coarse = dict[int, KernelMap](), self._chain.coarse
        turned, groups = dict[int, Tiled](), {**self._groups}
        for level, (windows, step) in enumerate(self._request.by_level):
            for number, window in windows:
                maps[number] = found = self._map(number, level)
                geometry.keep(window, None, (found, None))
            if step is None:
                break
            down, up, relation = step
            shape = self._counts[level + 1], coarse.shape[2]
            coords = coarse.cut(level * coarse.shape[1] * coarse.shape[2], shape).tensor()
            outputs = Geometry(coords, site_of(geometry.site, relation))
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
        return KernelMap(relation, table, rows, outputs, _storages=storages)

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


_REACH = {1: 1 << 24, 2: 1 << 24, 3: 1 << 16, 4: 1 << 11}
"""Exclusive upper bound of a coordinate's magnitude, by D."""
NO_TILES = TileRule(0, 0, 0)


def key_bounds(dim: int, batch: int) -> Bounds:
    """Bounds of the coordinates that keys can represent, for `batch` items."""
    most = _REACH[dim] - MARGIN - 1
    return Bounds((-most,) * dim, (most,) * dim, batch)


def build_in_buffer(geometry: Geometry, request: ChainRequest) -> bool:
    """Build the levels and maps of a request and cache them in their geometries. False if Triton cannot run, the
    request is not supported, or some of it is cached already. Duplicates, coordinates outside the bounds and levels
    that exceed their capacity set bits of the coordinates' status."""
    state = geometry.buffered
    if state is None or _refused(geometry, request):
        return False
    with outside_inference_mode():
        _keep(_started(geometry.cloud, geometry.site, request, state), geometry, state)
    geometry.searched = True
    return True


def build_one_in_buffer(geometry: Geometry, relation: Relation) -> bool:
    own = relation.policy == "same"
    steps, windows = ((), ((relation,),)) if own else ((relation,), ())
    return build_in_buffer(geometry, ChainRequest(relation.dim, steps, windows, (), NO_TILES))


def distinct_cells(cells: CoordBuffer, site: GridSpec, state: BufferedState) -> Geometry | None:
    """The distinct cells among `cells`, in (batch, Morton) order. `inverse` int64: cell of each row, -1 for rows of
    batch index -1, which are ignored. None if Triton cannot run, there are no rows, or `site` exceeds the keys."""
    relation = Relation.of(cells.dim, 1, policy="floor_unique")
    request = ChainRequest(cells.dim, (relation,), (), ((UP, 0, relation),), NO_TILES)
    if not has_triton(cells.coords) or not cells.capacity or not _within_keys(site.bounds):
        return None
    status = new_status(cells.device)
    chain = _started(replace(cells, status=status), site, request, state, from_cells=True)
    # Duplicates and rows of batch index -1 are valid input here, no errors to report.
    cells.status.bitwise_or_(status & OVERFLOW)
    rows = torch.where(cells.coords[:, 0] >= 0, chain.table_of(0)[:, 0], -1).long()
    return Geometry.in_buffer(chain.level(1, site.bounds, cells.status), site, state, rows)


def _refused(geometry: Geometry, request: ChainRequest) -> bool:
    if not has_triton(geometry.coords) or geometry.dim != request.dim or request_refusal(request) is not None:
        return True
    return begun(geometry, request) or not len(geometry) or not _within_keys(geometry.bounds)


def _within_keys(bounds: Bounds) -> bool:
    return bounds.batch <= BATCHES and key_bounds(len(bounds.low), bounds.batch).holds(bounds)


def _started(
    cloud: CoordBuffer, site: GridSpec, request: ChainRequest, state: BufferedState, from_cells: bool = False
) -> BufferedChain:
    """A chain with its kernels launched and the planned capacity of each level, planned from these coordinates if not
    known. from_cells: `state` belongs to the coarser level."""
    if not is_capturing(cloud.device):
        _compile(request, cloud.device)
    path, coarse, found = state.path, site, [cloud.capacity]
    needed: BufferedChain | None = None
    for level, step in enumerate(request.steps, 1):
        path, coarse = path if from_cells else (*path, step), site_of(coarse, step)
        key = "rows", path, coarse.stride
        own = state.capacities.planned(key)
        if own is None:
            needed = needed or _needed(cloud, site, request)
            own = state.capacities.capacity(key, needed.rows_needed(level), max_outputs(found[-1], step, coarse))
        found.append(own)
    chain = BufferedChain(cloud, request, tuple(found), KeyLayout.of(request, site.bounds))
    start_kernels(chain, site)
    return chain


def _needed(cloud: CoordBuffer, site: GridSpec, request: ChainRequest) -> BufferedChain:
    """A chain with enough capacity for each level; synchronises with the host."""
    needed = 0
    while True:
        most = estimate_of(request).most(cloud.capacity, needed)
        # The run that follows reports errors.
        tried = replace(cloud, status=new_status(cloud.device))
        layout = KeyLayout.of(request, site.bounds)
        chain = BufferedChain(tried, request, (cloud.capacity, *(most,) * len(request.steps)), layout)
        start_kernels(chain, site)
        needed = max([int(chain.rows_needed(level)) for level in range(1, request.levels)])
        if needed <= most:
            return chain


@lru_cache(maxsize=64)
def _compile(request: ChainRequest, device: torch.device) -> None:
    """Compile the kernels of a request in parallel, once per process."""
    if device.type != "cuda":
        return
    coords, count = (torch.zeros(n, dtype=torch.int32, device=device) for n in ((1, 1 + request.dim), 1))
    bounds = key_bounds(request.dim, 1)
    cloud = CoordBuffer(coords, count, bounds, new_status(device))
    with compiling_launches():
        chain = BufferedChain(cloud, request, (1, *(64,) * len(request.steps)), KeyLayout.of(request, bounds))
        start_kernels(chain, GridSpec((1,) * request.dim, None, 1, bounds))


def map_between(relation: Relation, found: Neighbours, inputs: Geometry, outputs: Geometry) -> KernelMap:
    """The kernel map of a search result. Raises GeometryError if only one of the geometries is in a buffer."""
    made = KernelMap.from_neighbours(relation, found, len(inputs), (inputs.cloud.count, outputs.cloud.count))
    here = there = inputs.buffered
    if outputs is not inputs:
        there = outputs.buffered
    if here is None and there is None:
        return made
    if here is None or there is None:
        raise GeometryError("a captured network cannot combine its own coordinates with coordinates made outside of it")
    key = here.path, there.path, relation
    state = BufferedMapState(inputs.cloud.count, outputs.cloud.count, inputs.cloud.status, here.capacities, key)
    return replace(made, buffered=state)


def _keep(chain: BufferedChain, geometry: Geometry, state: BufferedState) -> None:
    request, levels = chain.request, [geometry]
    for number, step in enumerate(request.steps, 1):
        here, path = levels[-1], (*state.path, *request.steps[:number])
        site = site_of(here.site, step)
        cloud = chain.level(number, site.bounds, geometry.cloud.status)
        levels.append(Geometry.in_buffer(cloud, site, replace(state, path=path)))
        if (key := level_key(step)) is not None:
            here.levels[key] = levels[-1]
    for place, (kind, level, relation) in enumerate(request.maps):
        inputs, outputs = levels[level - (kind != SAME)], levels[level]
        found = map_between(relation, chain.neighbours(place), inputs, outputs)
        inputs.keep(relation, None, (found, None if kind == SAME else outputs))
