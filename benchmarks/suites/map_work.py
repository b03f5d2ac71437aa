"""What the suite `maps` times: maps, plans and whole networks of them, each with what says whether it came out right.

Nothing here waits for the device in what is timed, so that all of it can be captured.
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
"""Room of a fixed capacity, over what is needed."""


class Mapped(NamedTuple):
    """A map's table with the coordinates of its outputs. masks: where they were made along the way."""

    rows: Tensor
    masks: Tensor | None
    outputs: CoordBuffer
    relation: Relation


class Planned(NamedTuple):
    """A map laid out in tiles."""

    found: Mapped
    tiles: TileList


@dataclass(frozen=True, eq=False)
class Work:
    """A call, and what tells of its result what is wrong with it ("" where nothing is).

    graph: whether it can be captured; the twins, in plain torch, ask the host.
    """

    name: str
    call: Callable[[], Any]
    wrong: Callable[[Any], str]
    graph: bool = True


# maps


def submanifold(voxels: Voxels, schedule: MapSchedule | None = None) -> Mapped:
    """The 3x3x3 submanifold map, from coordinates to rows; `fused` and `mirrored` as the schedule says."""
    cloud = voxels.cloud()
    lookup = lookup_of(cloud, schedule)
    if schedule is not None and not schedule.fused:
        # Every coordinate that is asked for goes through memory, and a kernel asks for those of one kernel offset.
        near = cloud.coords.repeat(len(WINDOW.offsets), 1, 1)
        near[:, :, 1:] += offset_table(WINDOW.offsets, cloud.device)[:, None]
        return Mapped(torch.stack([find(lookup, part, cloud.bounds) for part in near], dim=1), None, cloud, WINDOW)
    return Mapped(*lookup.neighbours(cloud, WINDOW), cloud, WINDOW)


def strided(
    inputs: CoordBuffer, site: GridSpec, relation: Relation, capacity: int, schedule: MapSchedule | None = None
) -> Mapped:
    """The outputs of a relation and the map to them, both in room for so many."""
    made = make_outputs(inputs, site, relation, schedule)
    outputs = made.cloud(capacity)
    rows = made.table(capacity)
    if rows is not None:
        return Mapped(rows, None, outputs, relation)
    return Mapped(*lookup_of(inputs).neighbours(outputs, relation), outputs, relation)


# plans


@dataclass(frozen=True)
class Room:
    """What is set aside before the device has counted: a quarter more outputs and entries than there are."""

    outputs: int
    entries: int
    block: int

    @staticmethod
    def of(truth: Truth) -> Room:
        """For a map that was found elsewhere."""
        count = len(truth.rows)
        return Room(_more(count), _more(int(_whole(truth, tile_rows_for(count)).entries)), tile_rows_for(count))


def _more(count: int) -> int:
    return int(SPARE * count) + 1


def planned(found: Mapped, room: Room) -> Planned:
    """Masks, order, tiles and entries of a map."""
    rows = found.rows.contiguous()
    masks = mask_words(rows) if found.masks is None else found.masks
    tiling = _tiled(masks, found.outputs.count, found.relation, room.block)
    return Planned(found._replace(rows=rows), tiles_module.fill_tiles(rows, tiling, room.entries, found.outputs.status))


def compacted(truth: Truth, block: int) -> TileList:
    """The tiles of a map in just the room that they take."""
    tiling = _whole(truth, block)
    return tiles_module.fill_tiles(truth.rows, tiling, int(tiling.entries))


def _whole(truth: Truth, block: int) -> Tiling:
    """The tiles of a map all of whose rows live."""
    count = torch.full((1,), len(truth.rows), dtype=torch.int32, device=truth.rows.device)
    return _tiled(mask_words(truth.rows), count, truth.relation, block)


def _tiled(masks: Tensor, count: Tensor, relation: Relation, block: int) -> Tiling:
    return tiles_module.build_tiling(masks, count, relation, block, SortSpec(0, len(relation.offsets)))


# networks


def network(voxels: Voxels, rooms: Sequence[Room], streams: Sequence[Any] = ()) -> list[Planned]:
    """The nine plans of a MinkUNet: a submanifold map on each of five levels, and the four maps between them.

    streams: where plans are made beside the chain of levels; they take turns.
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
    """On one of the streams, after all that was asked for so far; without streams where one is."""
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
    """New coordinates with the 13 maps of a U-Net in tiles, by `prepare`."""
    geometry = Geometry(voxels.coords, voxels.site, settled=False)
    with torch.no_grad():
        prepare_levels(SparseTensor(torch.empty(len(voxels), 1, device=voxels.coords.device), geometry), STEPS, WINDOWS)
    return geometry


def level_by_level(voxels: Voxels) -> Geometry:
    """As prepared, each level and map by itself, without CUDA graphs."""
    geometry = Geometry(voxels.coords, voxels.site, settled=False)
    with torch.no_grad():
        RequestedMaps(tuple(STEPS), tuple(map(tuple, WINDOWS)), None).build(geometry)
    return geometry


def thinned(voxels: Voxels, count: int) -> list[Voxels]:
    """So many scenes of 60 to 95 % of the voxels, each of another size."""
    chance = torch.Generator().manual_seed(7)
    orders = [torch.randperm(len(voxels), generator=chance).to(voxels.coords.device) for _ in range(count)]
    sizes = [int(len(voxels) * (0.6 + 0.35 * n / count)) for n in range(count)]
    return [
        Voxels(voxels.coords[order[:n]].contiguous(), voxels.bounds) for order, n in zip(orders, sizes, strict=True)
    ]


def wrong_pyramid(geometry: Geometry, truths: Sequence[Truth]) -> str:
    """What is wrong with the maps of each level and their tiles. truths: see truths_of_network."""
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
    """A map as the twins find it: rows int32 [N, K] and coordinates of the outputs, in their order."""

    rows: Tensor
    outputs: Voxels
    relation: Relation


def truth_of(inputs: Voxels, relation: Relation) -> Truth:
    """By sorted keys, outputs by way of the host."""
    outputs = inputs
    if relation.policy != "same":
        site = site_of(inputs.site, relation)
        made = TorchOutputs(inputs.cloud(), relation, site)
        outputs = Voxels(made.geometry(int(made.count)).coords, site.bounds)
    keys = lookup_of(inputs.cloud(), MapSchedule("sorted"))
    return Truth(keys.neighbours(outputs.cloud(), relation).rows.contiguous(), outputs, relation)


def truths_of_network(voxels: Voxels) -> list[Truth]:
    """Those of the nine maps of `network`."""
    found = []
    for level in range(LEVELS):
        found.append(truth_of(voxels, WINDOW))
        if level + 1 < LEVELS:
            found.append(truth_of(voxels, HALVED))
            voxels = found[-1].outputs
    return found


def wrong_map(found: Mapped, truth: Truth) -> str:
    """What is wrong with a map; rows past the count are not looked at."""
    count, status = int(found.outputs.count), int(found.outputs.status)
    if status:
        return f"the status is {status}, expected 0"
    if count != len(truth.outputs):
        return f"{count} outputs, expected {len(truth.outputs)}"
    if not torch.equal(found.outputs.coords[:count], truth.outputs.coords):
        return "outputs differ from the twin's"
    return "" if torch.equal(found.rows[:count], truth.rows) else "rows differ from the twin's"


def wrong_plan(found: Planned, truth: Truth) -> str:
    """What is wrong with a plan: its map, or its entries, which hold each pair once."""
    return wrong_map(found.found, truth) or wrong_tiles(found.tiles, truth.rows)


def wrong_tiles(tiles: TileList, rows: Tensor) -> str:
    """Whether the entries hold each pair of a map once; what is left over of their room belongs to no tile."""
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
    """spconv's indice pairs of the submanifold map, as its implicit GEMM takes them; on a CPU as its Native does."""
    ops: Any = import_module("spconv.pytorch.ops")
    algorithms: Any = import_module("spconv.core").ConvAlgo
    shape = [high + 1 for high in voxels.bounds.high]
    window = ([3] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3)
    if voxels.coords.is_cuda:
        whole = (voxels.coords, voxels.bounds.batch, shape, algorithms.MaskImplicitGemm, *window)
        return lambda: ops.get_indice_pairs_implicit_gemm(*whole, subm=True, transpose=False, is_train=False)[2]
    given = (voxels.coords, voxels.bounds.batch, shape, algorithms.Native, *window)
    return lambda: ops.get_indice_pairs(*given, subm=True, transpose=False)[1][0]
