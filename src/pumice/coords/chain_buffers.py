"""Build levels and kernel maps of a coordinate buffer with the kernels of coords.chain. Each level has a fixed
capacity, so no size is read back; the layout of keys is fixed, so no kernel depends on the range of coordinates."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from pumice.coords.box import Bounds
from pumice.coords.buffer import OVERFLOW, CoordBuffer, new_status
from pumice.coords.capacity import BufferedMapState, BufferedState
from pumice.coords.chain import (
    BATCHES,
    MARGIN,
    SAME,
    UP,
    BufferedChain,
    ChainRequest,
    TileRule,
    begun,
    estimate_of,
    request_refusal,
    start_kernels,
)
from pumice.coords.geometry import Geometry
from pumice.coords.grid import GridSpec
from pumice.coords.kernel_map import KernelMap
from pumice.coords.lookup import Neighbours
from pumice.coords.outputs import level_key, max_outputs, site_of
from pumice.coords.relation import Relation
from pumice.errors import GeometryError
from pumice.runtime.launch import compiling_launches, has_triton, outside_inference_mode
from pumice.runtime.streams import is_capturing

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
    chain = BufferedChain(cloud, request, tuple(found))
    start_kernels(chain, site)
    return chain


def _needed(cloud: CoordBuffer, site: GridSpec, request: ChainRequest) -> BufferedChain:
    """A chain with enough capacity for each level; synchronises with the host."""
    needed = 0
    while True:
        most = estimate_of(request).most(cloud.capacity, needed)
        # The run that follows reports errors.
        tried = replace(cloud, status=new_status(cloud.device))
        chain = BufferedChain(tried, request, (cloud.capacity, *(most,) * len(request.steps)))
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
        chain = BufferedChain(cloud, request, (1, *(64,) * len(request.steps)))
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
