"""Calls timed by the suite `maps`: kernel maps, plans and networks of plans, each with a check of its result.

Calls do not wait for the device and so can be captured, except those marked with graph=False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.scenes.clouds import Voxels
from pumice.coords import Geometry
from pumice.coords import tiles as tiles_module
from pumice.coords.buffer import CoordBuffer, offset_table
from pumice.coords.grid import GridSpec
from pumice.coords.lookup import MapSchedule, find, lookup_of, mask_words
from pumice.coords.outputs import TorchOutputs, make_outputs, site_of
from pumice.coords.relation import Relation
from pumice.coords.tiles import SortSpec, TileList, Tiling
from pumice.lower.maps import tile_rows_for
from pumice.ops import SparseTensor, prepare_levels
from pumice.ops.prepare import RequestedMaps

WINDOW = Relation.of(3, 3)
HALVED = Relation.of(3, 2, stride=2)
SUPPORT = Relation.of(3, 3, stride=2, padding=1)
LEVELS = 5
SPARE = 1.25
"""Factor of a fixed capacity over the actual size."""


class Mapped(NamedTuple):
    """The table of a map, and the coordinates of its outputs. masks: if they were made in the same kernel."""

    rows: Tensor
    masks: Tensor | None
    outputs: CoordBuffer
    relation: Relation


class Planned(NamedTuple):
    """A map and its tiles."""

    found: Mapped
    tiles: TileList


@dataclass(frozen=True, eq=False)
class Work:
    """A call, and a function that describes the error of its result ("" if correct).

    graph: whether the call can be captured; plain-torch versions wait for the device.
    """

    name: str
    call: Callable[[], Any]
    wrong: Callable[[Any], str]
    graph: bool = True


# maps


def submanifold(voxels: Voxels, schedule: MapSchedule | None = None) -> Mapped:
    """Build the 3x3x3 submanifold map as rows. schedule: structure, and the options `fused` and `mirrored`."""
    cloud = voxels.cloud()
    lookup = lookup_of(cloud, schedule)
    if schedule is not None and not schedule.fused:
        # Unfused: all neighbour coordinates go through memory, and each kernel looks up those of one kernel offset.
        near = cloud.coords.repeat(len(WINDOW.offsets), 1, 1)
        near[:, :, 1:] += offset_table(WINDOW.offsets, cloud.device)[:, None]
        return Mapped(torch.stack([find(lookup, part, cloud.bounds) for part in near], dim=1), None, cloud, WINDOW)
    return Mapped(*lookup.neighbours(cloud, WINDOW), cloud, WINDOW)


def strided(
    inputs: CoordBuffer, site: GridSpec, relation: Relation, capacity: int, schedule: MapSchedule | None = None
) -> Mapped:
    """The outputs of a relation and the map to them, both at a fixed capacity."""
    made = make_outputs(inputs, site, relation, schedule)
    outputs = made.cloud(capacity)
    rows = made.table(capacity)
    if rows is not None:
        return Mapped(rows, None, outputs, relation)
    return Mapped(*lookup_of(inputs).neighbours(outputs, relation), outputs, relation)


# plans


@dataclass(frozen=True)
class Room:
    """Capacities set before the device has counted: SPARE times the actual counts. block: outputs per tile."""

    outputs: int
    entries: int
    block: int

    @staticmethod
    def of(truth: Truth) -> Room:
        """The capacities for a map of known size."""
        count = len(truth.rows)
        return Room(_more(count), _more(int(_whole(truth, tile_rows_for(count)).entries)), tile_rows_for(count))


def _more(count: int) -> int:
    return int(SPARE * count) + 1


def planned(found: Mapped, room: Room) -> Planned:
    """Masks, row order, tiles and entries of a map."""
    rows = found.rows.contiguous()
    masks = mask_words(rows) if found.masks is None else found.masks
    tiling = _tiled(masks, found.outputs.count, found.relation, room.block)
    return Planned(found._replace(rows=rows), tiles_module.fill_tiles(rows, tiling, room.entries, found.outputs.status))


def compacted(truth: Truth, block: int) -> TileList:
    """The tiles of a map at their exact size."""
    tiling = _whole(truth, block)
    return tiles_module.fill_tiles(truth.rows, tiling, int(tiling.entries))


def _whole(truth: Truth, block: int) -> Tiling:
    """The tiling of a map without padding rows."""
    count = torch.full((1,), len(truth.rows), dtype=torch.int32, device=truth.rows.device)
    return _tiled(mask_words(truth.rows), count, truth.relation, block)


def _tiled(masks: Tensor, count: Tensor, relation: Relation, block: int) -> Tiling:
    return tiles_module.build_tiling(masks, count, relation, block, SortSpec(0, len(relation.offsets)))


# networks


def network(voxels: Voxels, rooms: Sequence[Room], streams: Sequence[Any] = ()) -> list[Planned]:
    """The nine plans of a MinkUNet: submanifold maps on five levels, and the four maps between levels.

    streams: side streams on which plans are made in turn, while the chain of levels goes on.
    """
    cloud, site, made = voxels.cloud(), voxels.site, list[Planned]()
    for level in range(LEVELS):
        with _beside(streams, len(made)):
            found = Mapped(*lookup_of(cloud).neighbours(cloud, WINDOW), cloud, WINDOW)
            made.append(planned(found, rooms[len(made)]))
        if level + 1 < LEVELS:
            room = rooms[len(made)]
            coarser = strided(cloud, site, HALVED, room.outputs)
            with _beside(streams, len(made)):
                made.append(planned(coarser, room))
            cloud, site = coarser.outputs, site_of(site, HALVED)
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
    return made


@contextmanager
def _beside(streams: Sequence[Any], turn: int) -> Iterator[None]:
    """Run the block on one of the streams, after the work queued so far; without streams, on the current stream."""
    if not streams:
        yield
        return
    stream = streams[turn % len(streams)]
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


# pyramids: maps as `prepare` leaves them

STEPS, WINDOWS = [HALVED] * (LEVELS - 1), [[WINDOW]] * LEVELS


def prepared(voxels: Voxels) -> Geometry:
    """New coordinates with the maps of a U-Net and their tiles, built by `prepare`."""
    geometry = Geometry(voxels.coords, voxels.site, settled=False)
    with torch.no_grad():
        prepare_levels(SparseTensor(torch.empty(len(voxels), 1, device=voxels.coords.device), geometry), STEPS, WINDOWS)
    return geometry


def level_by_level(voxels: Voxels) -> Geometry:
    """The same as `prepared`, with each level and map built on its own, without CUDA graphs."""
    geometry = Geometry(voxels.coords, voxels.site, settled=False)
    with torch.no_grad():
        RequestedMaps(tuple(STEPS), tuple(map(tuple, WINDOWS)), None).build(geometry)
    return geometry


def thinned(voxels: Voxels, count: int) -> list[Voxels]:
    """`count` scenes of different sizes, each a random 60 to 95 % of the voxels."""
    chance = torch.Generator().manual_seed(7)
    orders = [torch.randperm(len(voxels), generator=chance).to(voxels.coords.device) for _ in range(count)]
    sizes = [int(len(voxels) * (0.6 + 0.35 * n / count)) for n in range(count)]
    return [
        Voxels(voxels.coords[order[:n]].contiguous(), voxels.bounds) for order, n in zip(orders, sizes, strict=True)
    ]


def wrong_pyramid(geometry: Geometry, truths: Sequence[Truth]) -> str:
    """The error in the maps of all levels or in their tiles, "" if none. truths: see truths_of_network."""
    for place, truth in enumerate(truths):
        found, outputs = geometry.maps[truth.relation, None]
        cloud = (geometry if outputs is None else outputs).cloud
        problem = wrong_map(Mapped(found.rows(), None, cloud, truth.relation), truth)
        if not problem and found.device.type == "cuda":
            splits = int(found.volume > 8 or found.num_outputs >= 1 << 15)
            problem = wrong_tiles(found.compacted(tile_rows_for(found.num_outputs), splits), truth.rows)
        if problem:
            return f"map {place}: {problem}"
        geometry = geometry if outputs is None else outputs
    return ""


# truths: in plain torch


class Truth(NamedTuple):
    """A map by plain torch: rows int32 [N, K], and the coordinates of the outputs in order."""

    rows: Tensor
    outputs: Voxels
    relation: Relation


def truth_of(inputs: Voxels, relation: Relation) -> Truth:
    """The map by lookup in sorted keys; outputs are counted on the host."""
    outputs = inputs
    if relation.policy != "same":
        site = site_of(inputs.site, relation)
        made = TorchOutputs(inputs.cloud(), relation, site)
        outputs = Voxels(made.geometry(int(made.count)).coords, site.bounds)
    keys = lookup_of(inputs.cloud(), MapSchedule("sorted"))
    return Truth(keys.neighbours(outputs.cloud(), relation).rows.contiguous(), outputs, relation)


def truths_of_network(voxels: Voxels) -> list[Truth]:
    """The truths of the nine maps of `network`."""
    found = []
    for level in range(LEVELS):
        found.append(truth_of(voxels, WINDOW))
        if level + 1 < LEVELS:
            found.append(truth_of(voxels, HALVED))
            voxels = found[-1].outputs
    return found


def wrong_map(found: Mapped, truth: Truth) -> str:
    """The error in a map, "" if none; padding rows are ignored."""
    count, status = int(found.outputs.count), int(found.outputs.status)
    if status:
        return f"the status is {status}, expected 0"
    if count != len(truth.outputs):
        return f"{count} outputs, expected {len(truth.outputs)}"
    if not torch.equal(found.outputs.coords[:count], truth.outputs.coords):
        return "outputs differ from the twin's"
    return "" if torch.equal(found.rows[:count], truth.rows) else "rows differ from the twin's"


def wrong_plan(found: Planned, truth: Truth) -> str:
    """The error in a plan, "" if none: in its map, or in its entries, which must hold each pair once."""
    return wrong_map(found.found, truth) or wrong_tiles(found.tiles, truth.rows)


def wrong_tiles(tiles: TileList, rows: Tensor) -> str:
    """The error in tiles, "" if the entries hold each pair once. Unused entries have tile indices past the end."""
    used = tiles.tiles < len(tiles.rows)
    tiles = tiles._replace(tiles=tiles.tiles[used], taps=tiles.taps[used], inputs=tiles.inputs[used])
    there = tiles.inputs >= 0
    outputs = tiles.rows[tiles.tiles.long()][there].long()
    taps = tiles.taps[:, None].expand_as(tiles.inputs)[there].long()
    pairs = int((rows >= 0).sum())
    if len(outputs) != pairs:
        return f"the entries hold {len(outputs)} pairs, expected {pairs}"
    again = torch.full_like(rows, -1)
    again[outputs, taps] = tiles.inputs[there]
    return "" if torch.equal(again, rows) else "the entries hold other pairs than the map"


def wrong_network(found: Sequence[Planned], truths: Sequence[Truth]) -> str:
    problems = (wrong_plan(plan, truth) for plan, truth in zip(found, truths, strict=True))
    return next((f"map {n}: {problem}" for n, problem in enumerate(problems) if problem), "")


# a peer


def spconv_map(voxels: Voxels) -> Callable[[], Tensor]:
    """spconv's pairs of the submanifold map, for its implicit GEMM; on a CPU for its algorithm Native."""
    ops: Any = import_module("spconv.pytorch.ops")
    algorithms: Any = import_module("spconv.core").ConvAlgo
    shape = [high + 1 for high in voxels.bounds.high]
    window = ([3] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3)
    if voxels.coords.is_cuda:
        whole = (voxels.coords, voxels.bounds.batch, shape, algorithms.MaskImplicitGemm, *window)
        return lambda: ops.get_indice_pairs_implicit_gemm(*whole, subm=True, transpose=False, is_train=False)[2]
    given = (voxels.coords, voxels.bounds.batch, shape, algorithms.Native, *window)
    return lambda: ops.get_indice_pairs(*given, subm=True, transpose=False)[1][0]
