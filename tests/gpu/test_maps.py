"""Kernel maps on a GPU are those of a CPU, bit for bit, at real sizes; nothing waits that need not, and graphs replay.

As in test_device, `pytest --noconftest tests/gpu` runs where hypothesis is not installed.
"""

from dataclasses import replace

import pytest
import torch
from clouds import INT32, fresh, levels
from waits import no_wait

from pumice.coords import (
    Bounds,
    CoordBuffer,
    Geometry,
    MapSchedule,
    Relation,
    SortSpec,
    kernel_map,
    pyramid,
    read_pending_sizes,
    tiles,
)
from pumice.coords.buffer import DUPLICATE, OVERFLOW, new_status
from pumice.coords.lookup import (
    STRUCTURES,
    CoordHashTable,
    Neighbours,
    SortedKeys,
    Table,
    default,
    mask_words,
    mask_words_torch,
)
from pumice.coords.outputs import BrickOutputs, SortedOutputs, make_outputs, max_outputs, site_of
from pumice.errors import CoordinateError
from pumice.testing import random_cloud

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

ROWS = 100_000
SPARE = 999
"""Rows of a buffer that do not live; they repeat the first of those that do."""


@pytest.fixture
def gpu():
    """The last GPU."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


def wide(count=ROWS, dim=3):
    """Clusters all over int32, its corners among them."""
    coords = random_cloud(count, dim, batch_size=4, seed=1)
    moves = torch.randint(*INT32, (50, dim), generator=torch.Generator().manual_seed(2)) // 2
    moves[0] = INT32[0]
    chosen = torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(3))
    moved = coords.long()
    moved[:, 1:] += moves[chosen]
    return torch.unique(moved, dim=0).int()


CLOUDS = {
    "dense": lambda: random_cloud(ROWS, 3, batch_size=2),
    "sparse": lambda: random_cloud(ROWS, 3, extent=400, batch_size=3) - torch.tensor([0, 200, 200, 200]),
    "batch of 512": lambda: random_cloud(ROWS, 3, batch_size=512),
    "line": lambda: random_cloud(ROWS, 1) - torch.tensor([0, 70_000]),
    "plane": lambda: random_cloud(ROWS, 2, batch_size=2),
    "four axes": lambda: random_cloud(ROWS // 5, 4),
    "wide": wide,
    "one": lambda: torch.tensor([[0, -3, 5, 7]]),
    "nothing": lambda: torch.zeros(0, 4),
}


def coords_of(name):
    return CLOUDS[name]().int()


def cloud_of(coords, device, spare=SPARE):
    """In a buffer with `spare` rows more."""
    spare = spare if len(coords) else 0
    bounds = Bounds.of(coords)
    filler = coords[:1].expand(spare, -1)
    count = torch.tensor([len(coords)], dtype=torch.int32)
    buffer = torch.cat([coords, filler])
    return CoordBuffer(buffer.to(device), count.to(device), bounds, new_status(device), spare == 0)


def same(got, want, what=""):
    """Equal bit for bit, wherever each lies."""
    if not isinstance(want, torch.Tensor):
        assert len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            same(a, b, what)
        return
    assert got.dtype == want.dtype and got.shape == want.shape, what
    assert torch.equal(got.cpu(), want.cpu()), what


def looked_up(cloud, outputs, relation):
    rows = SortedKeys(fresh(cloud), MapSchedule("sorted")).neighbours(outputs, relation).rows.contiguous()
    return Neighbours(rows, mask_words_torch(rows))


# Structures


@pytest.mark.parametrize("structure", [*STRUCTURES, "hash as wide"])
@pytest.mark.parametrize("name", CLOUDS)
def test_structures_find_what_sorted_keys_find_on_a_cpu(gpu, name, structure):
    coords = coords_of(name)
    here, there = cloud_of(coords, torch.device("cpu")), cloud_of(coords, gpu)
    dim = here.dim
    if structure == "hash as wide":
        made = Table(there, MapSchedule(), "wide")
    else:
        refused = STRUCTURES[structure].refusal(there, MapSchedule(structure))
        if refused:
            pytest.skip(refused)
        made = STRUCTURES[structure](there, MapSchedule(structure))
    relations = [Relation.of(dim, 1), Relation.of(dim, 3), Relation.of(dim, 3, dilation=9)]
    for relation in [*relations, *([Relation.of(dim, 5)] if dim < 4 else [])]:
        got, want = made.neighbours(there, relation), looked_up(here, here, relation)
        same(got.rows, want.rows, relation)
        if structure != "sorted":
            same(got.masks, want.masks, relation)
        if isinstance(made, Table):
            same(made.neighbours(there, relation, mirrored=True).rows, want.rows, relation)
    coarse = torch.unique(torch.div(coords, torch.tensor((1, *(2,) * dim)), rounding_mode="floor"), dim=0).int()
    outputs = [cloud_of(coarse, device) for device in (torch.device("cpu"), gpu)]
    relation = Relation.of(dim, 3, stride=2)
    same(made.neighbours(outputs[1], relation).rows, looked_up(here, outputs[0], relation).rows)
    assert int(there.status) == 0


def test_every_cloud_gets_a_structure_of_kernels(gpu):
    for name in CLOUDS:
        cloud = cloud_of(coords_of(name), gpu)
        assert default(cloud).structure != "sorted"


@pytest.mark.parametrize("structure", STRUCTURES)
def test_duplicates_are_seen_in_every_structure(gpu, structure):
    coords = coords_of("dense")
    cloud = cloud_of(torch.cat([coords, coords[5000:5003]]), gpu)
    if refused := STRUCTURES[structure].refusal(cloud, MapSchedule(structure)):
        pytest.skip(refused)
    STRUCTURES[structure](cloud, MapSchedule(structure))
    assert int(cloud.status) == DUPLICATE
    whole = CoordBuffer.of(coords.to(gpu), Bounds.of(coords))
    STRUCTURES[structure](whole, MapSchedule(structure))
    assert int(whole.status) == 0


def test_the_first_of_equal_rows_is_found(gpu):
    """However threads race."""
    coords = coords_of("dense")[:20_000]
    twice = torch.cat([coords, coords.flip(0), coords])
    for structure in ("hash", "grid"):
        cloud = cloud_of(twice, gpu)
        got = STRUCTURES[structure](cloud, MapSchedule(structure)).neighbours(cloud, Relation.of(3, 1)).rows
        want = torch.cat([torch.arange(20_000), torch.arange(20_000).flip(0), torch.arange(20_000)])
        same(got[: len(twice), 0], want.int(), structure)


# Maps

POLICIES = {
    "same k3": Relation.of(3, 3),
    "same k5": Relation.of(3, 5),
    **levels(3),
}
SCHEDULES = {
    "default": None,
    "staged": MapSchedule("hash", fused=False),
    "mirrored": MapSchedule("hash", mirrored=True),
    "tight": MapSchedule("hash", load=0.9),
    "grid": MapSchedule("grid"),
    "bitmap": MapSchedule("bitmap"),
    "sorted": MapSchedule("sorted"),
}


def storages(found):
    """What feature kernels read, both ways."""
    for m in (found, found.transpose()):
        yield m.rows()
        yield m.masks()
        yield m.counts()
        yield m.taps()
        yield tuple(m.pairs())
        yield tuple(m.compacted(64))
        yield tuple(m.split(128, min(2, m.volume), 4096))
        yield tuple(m.grouped(2048))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["dense", "sparse", "wide", "one", "nothing"])
def test_maps_are_those_of_a_cpu(gpu, name, policy):
    coords = coords_of(name) // 8 * 2 if name == "wide" else coords_of(name)
    coords = torch.unique(coords, dim=0)[torch.randperm(len(torch.unique(coords, dim=0)))]
    want, outputs = kernel_map(Geometry.checked(coords), POLICIES[policy])
    got, made = kernel_map(Geometry.checked(coords.to(gpu)), POLICIES[policy])
    same(made.coords, outputs.coords)
    assert made.site == outputs.site
    for a, b in zip(storages(got), storages(want), strict=True):
        same(a, b, policy)


@pytest.mark.parametrize("label", SCHEDULES)
@pytest.mark.parametrize("policy", ["same k3", "floor k3 s2", "support k3 s2 p1", "transposed k2 s2"])
def test_schedules_change_no_map(gpu, label, policy):
    coords = coords_of("dense")
    want, outputs = kernel_map(Geometry.checked(coords), POLICIES[policy])
    got, made = kernel_map(Geometry.checked(coords.to(gpu)), POLICIES[policy], schedule=SCHEDULES[label])
    same(made.coords, outputs.coords)
    same(got.rows(), want.rows())
    same(got.masks(), want.masks())


@pytest.mark.parametrize("policy", [name for name, r in levels(3).items() if r.custom is None])
def test_a_spatial_shape_cuts_as_on_a_cpu(gpu, policy):
    coords, shape = random_cloud(ROWS, 3, extent=(60, 61, 62)), (60, 61, 62)
    want, outputs = kernel_map(Geometry.checked(coords, spatial_shape=shape, batch_size=1), POLICIES[policy])
    got, made = kernel_map(Geometry.checked(coords.to(gpu), spatial_shape=shape, batch_size=1), POLICIES[policy])
    same(made.coords, outputs.coords)
    same(got.rows(), want.rows())
    assert made.spatial_shape == outputs.spatial_shape


STEPS = [levels(3)[name] for name in ("floor k2 s2", "support k3 s2 p1", "floor k2 s2", "transposed k2 s2")]


@pytest.mark.parametrize("name", ["dense", "sparse", "nothing"])
def test_a_pyramid_has_the_levels_and_maps_of_a_cpu(gpu, name):
    coords = coords_of(name)
    here, there = (pyramid(Geometry.checked(coords.to(d)), STEPS) for d in ("cpu", gpu))
    for fine, other, coarse, beside, step in zip(here, there, here[1:], there[1:], STEPS, strict=False):
        same(beside.coords, coarse.coords, step)
        same(kernel_map(other, step)[0].rows(), kernel_map(fine, step)[0].rows(), step)


# The door


def test_a_bounded_geometry_reads_nothing_at_the_door(gpu):
    coords = random_cloud(ROWS, 3, extent=70, batch_size=2).to(gpu)
    with no_wait():
        geometry = Geometry.checked(coords, spatial_shape=(70, 70, 70), batch_size=2)
    assert len(kernel_map(geometry, Relation.of(3, 3))[0].pairs().inputs) > ROWS
    assert geometry.unsettled is None


@pytest.mark.parametrize("policy", ["same k3", "floor k2 s2"])
def test_duplicates_and_strays_are_raised_when_a_count_is_read(gpu, policy):
    coords = random_cloud(ROWS, 3, extent=70).to(gpu)
    twice, outside, foreign = coords.clone(), coords.clone(), coords.clone()
    twice[ROWS - 1], outside[77, 2], foreign[3, 0] = twice[12], 70, 1
    for wrong, words in ((twice, f"rows 12 and {ROWS - 1}"), (outside, "spatial_shape"), (foreign, "batch_size")):
        with no_wait():
            geometry = Geometry.checked(wrong, spatial_shape=(70, 70, 70), batch_size=1)
        with pytest.raises(CoordinateError, match=words):
            kernel_map(geometry, POLICIES[policy])[0].compacted(64)
    geometry = Geometry.checked(twice)
    with pytest.raises(CoordinateError, match=f"rows 12 and {ROWS - 1}"):
        kernel_map(geometry, POLICIES[policy])[0].pairs()


# No waits, and graphs

ROOM = 1 << 21


def pipeline(cloud, relation, level, structure=CoordHashTable):
    """From coordinates to tiles and lists of a level and its outputs, all in buffers of a given size."""
    site = site_of(around(cloud), level)
    made = (BrickOutputs if cloud.device.type == "cuda" else SortedOutputs)(cloud, level, site)
    outputs = made.cloud(max_outputs(cloud.capacity, level, site))
    lookup = (structure if cloud.device.type == "cuda" else SortedKeys)(cloud, MapSchedule())
    found = []
    for targets, asked in ((cloud, relation), (outputs, replace(level, policy="given"))):
        rows = lookup.neighbours(targets, asked).rows.contiguous()
        masks = mask_words(rows)
        ends = tiles.pair_counts(masks, targets.count, rows.shape[1])
        (how,) = SortSpec.splits(rows.shape[1], 1, 4096)
        order = tiles.sort_rows(masks, targets.count, tiles.groups_of(asked, how, masks.device), how)
        tiling = tiles.assign_tiles(masks, targets.count, order, how, (64, rows.shape[1]))
        found += [rows, masks, ends, order, tiling.slots, tiling.active, tiling.ends]
        found += [*tiles.fill_tiles(rows, tiling, ROOM // 8, cloud.status)]
        found += [*tiles.list_pairs(rows, targets.count, ends, ROOM, cloud.status)]
        found += [*tiles.group_pairs(rows, targets.count, ends, (ROOM // 8, 8), cloud.status)]
    return [*found, outputs.coords, outputs.count, cloud.status]


def around(cloud):
    return replace(Geometry.checked(torch.zeros(1, cloud.dim + 1, dtype=torch.int32)).site, bounds=cloud.bounds)


def buffers(clouds, device):
    """Clouds in one box, in buffers of the longest."""
    bounds = Bounds.of(torch.cat(clouds))
    longest = max(map(len, clouds)) + SPARE
    for coords in clouds:
        whole = torch.cat([coords, coords[:1].expand(longest - len(coords), -1)]).to(device)
        yield CoordBuffer(whole, torch.tensor([len(coords)], dtype=torch.int32).to(device), bounds, new_status(device))


LEVELS = {"floor": levels(3)["floor k2 s2"], "support": levels(3)["support k3 s2 p1"]}


@pytest.mark.parametrize("structure", ["hash", "grid", "bitmap"])
@pytest.mark.parametrize("level", LEVELS)
def test_from_coordinates_to_tiles_without_a_wait(gpu, level, structure):
    (cloud,) = buffers([random_cloud(30_000, 3)], gpu)
    pipeline(cloud, Relation.of(3, 3), LEVELS[level], STRUCTURES[structure])  # compiles
    with no_wait():
        pipeline(fresh_on(cloud), Relation.of(3, 3), LEVELS[level], STRUCTURES[structure])


def fresh_on(cloud):
    return replace(cloud, status=torch.zeros_like(cloud.status))


@pytest.mark.parametrize("structure", ["hash", "grid", "bitmap"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_captured_pipeline_replays_for_other_coordinates(gpu, level, structure):
    """Other voxels, and another number of them, in the same buffers."""
    scenes = [random_cloud(count, 3, extent=44, seed=count) for count in (30_000, 100, 29_000, 1)]
    here, there = list(buffers(scenes, torch.device("cpu"))), list(buffers(scenes, gpu))
    relation, made = Relation.of(3, 3), STRUCTURES[structure]
    held = replace(there[0], coords=there[0].coords.clone(), count=there[0].count.clone())
    side = torch.cuda.Stream(gpu)
    side.wait_stream(torch.cuda.current_stream(gpu))
    with torch.cuda.stream(side):
        pipeline(held, relation, LEVELS[level], made)
    torch.cuda.current_stream(gpu).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(gpu), torch.cuda.graph(graph):
        got = pipeline(held, relation, LEVELS[level], made)
    for mine, other in zip(here, there, strict=True):
        held.coords.copy_(other.coords), held.count.copy_(other.count), held.status.zero_()
        graph.replay()
        for place, (a, b) in enumerate(zip(got, pipeline(mine, relation, LEVELS[level]), strict=True)):
            same(a, b, place)


def test_a_step_reads_once(gpu, monkeypatch):
    """A whole pyramid's counts in one transfer, the sizes of its storages in another."""
    geometry = Geometry.checked(random_cloud(ROWS, 3, extent=70).to(gpu), spatial_shape=(70, 70, 70), batch_size=1)
    steps = STEPS[:2]
    pyramid(Geometry.checked(random_cloud(50, 3, extent=70).to(gpu)), steps)
    waits = []
    before = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: waits.append(1) or before(tensor))
    made = pyramid(geometry, steps)
    assert len(waits) == 1
    maps = [kernel_map(level, step)[0] for level, step in zip(made, steps, strict=False)]
    read_pending_sizes(
        [(m, 64, how) for m in maps for how in SortSpec.splits(m.volume, 1)] + [(m, 0, None) for m in maps]
    )
    assert len(waits) == 2
    for m in maps:
        m.compacted(64), m.grouped(64), m.pairs()
    assert len(waits) == 2


def test_outputs_without_room_are_reported(gpu):
    cloud = cloud_of(coords_of("dense"), gpu)
    for level in LEVELS.values():
        made = make_outputs(cloud, around(cloud), level)
        assert isinstance(made, BrickOutputs)
        whole = made.cloud(int(made.count))
        assert whole.read() == whole.capacity
        small = made.cloud(1000)
        same(small.coords, whole.coords[:1000])
        assert int(cloud.status) == OVERFLOW
        with pytest.raises(CoordinateError, match="exceed the capacity"):
            small.read()
        cloud.status.zero_()
