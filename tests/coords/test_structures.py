"""Whatever says which row holds a coordinate agrees with a dictionary; schedules are values; nothing waits."""

from dataclasses import replace

import pytest
import torch
from clouds import INT32, SIDES, NoWaits, Scene, asked, astray, buffered, fresh, lookups
from clouds import neighbours as wanted

import pumice as pm
from pumice.coords import Bounds, CoordBuffer, Geometry, MapSchedule, Relation, kernel_map, lookup, native_maps
from pumice.coords.buffer import DUPLICATE, OVERFLOW, RANGE, check, read
from pumice.coords.lookup import (
    STRUCTURES,
    NativeTable,
    Rates,
    SortedKeys,
    costs,
    default,
    lookup_of,
    mask_words,
    mask_words_torch,
)
from pumice.errors import CoordinateError, OptionError
from pumice.runtime import native
from pumice.testing import assert_close, random_cloud

SORTED = MapSchedule("sorted")
DIMS = pytest.mark.parametrize("dim", [1, 2, 3, 4])
needs_compiler = pytest.mark.skipif(isinstance(native.compiler(), str), reason=f"{native.compiler()}")
KINDS = pytest.mark.parametrize("kind", [SortedKeys, pytest.param(NativeTable, marks=needs_compiler)])

SCENES = {
    "plain": Scene(),
    "nothing": Scene(count=0),
    "nothing alive": Scene(count=0, spare=3),
    "one": Scene(count=1, batch=1),
    "full buffer": Scene(spare=0),
    "batch of 512": Scene(count=150, batch=512),
    "loose box": Scene(loose=1000),
    "clusters": Scene(clusters=4),
    "wide": Scene(clusters=5, far=True),
    "wide batch of 512": Scene(clusters=2, far=True, count=150, batch=512),
}


def scene(name, dim):
    return replace(SCENES[name], dim=dim, side=SIDES[dim])


def held(kind, cloud):
    """The structure over a cloud; skips if it does not hold it."""
    if (why := kind.refusal(cloud, SORTED)) is not None:
        pytest.skip(why)
    return kind(cloud, SORTED)


# Structures without Triton


@KINDS
@DIMS
@pytest.mark.parametrize("name", SCENES)
def test_neighbours_are_those_of_a_dictionary(name, dim, kind):
    cloud = scene(name, dim).cloud()
    structure = held(kind, cloud)
    for label, relation in lookups(dim).items():
        outputs = asked(cloud, relation.stride)
        found = structure.neighbours(outputs, relation)
        assert found.rows.dtype == torch.int32
        assert torch.equal(found.rows, wanted(cloud, outputs, relation)), label
    assert int(cloud.status) == 0


@KINDS
@DIMS
def test_one_structure_serves_reaches_of_all_sizes(dim, kind):
    """The box of sorted keys grows with the relation asked for; bricks leave a stride that spans many to these."""
    cloud = scene("plain", dim).cloud()
    lookup, long = held(kind, cloud), Relation.of(dim, 3, stride=1100, padding=1)
    for relation in (*lookups(dim).values(), Relation.of(dim, 3, dilation=50), Relation.of(dim, 1), long):
        outputs = asked(cloud, relation.stride)
        assert torch.equal(lookup.neighbours(outputs, relation).rows, wanted(cloud, outputs, relation))


@KINDS
@DIMS
def test_neighbours_do_not_wrap_around_int32(dim, kind):
    """Cells past either end of int32 are not those at the other."""
    ends = torch.tensor([[0, *(INT32[0],) * dim], [0, *(INT32[1],) * dim], [0, *(0,) * dim]], dtype=torch.int32)
    cloud = buffered(ends, 2)
    for relation in (
        Relation.of(dim, 3),
        Relation.of(dim, 3, stride=2, padding=1),
        Relation.of(dim, 3, dilation=2**30),
    ):
        assert torch.equal(held(kind, cloud).neighbours(cloud, relation).rows, wanted(cloud, cloud, relation))


def test_a_box_is_wide_where_its_cells_pass_63_bits():
    """Else the scenes above test one path only."""
    kinds = {name: type(SortedKeys(scene(name, 3).cloud(), SORTED)._table).__name__ for name in ("plain", "wide")}
    assert kinds == {"plain": "_Narrow", "wide": "_Wide"}


@KINDS
@pytest.mark.parametrize("name", ["plain", "wide"])
@DIMS
def test_of_equal_coordinates_the_first_row_is_found(name, dim, kind):
    coords = scene(name, dim).coords()
    twice = buffered(torch.cat([coords, coords[7:19].flip(0), coords[9:12]]), 4)
    lookup = held(kind, twice)
    for relation in (Relation.of(dim, 1), Relation.of(dim, 3, dilation=2)):
        assert torch.equal(lookup.neighbours(twice, relation).rows, wanted(twice, twice, relation))
    assert int(twice.status) == DUPLICATE


@KINDS
@pytest.mark.parametrize("name", ["plain", "wide", "full buffer"])
@DIMS
def test_dead_rows_are_no_duplicates(name, dim, kind):
    """The rows past the count repeat the living."""
    cloud = scene(name, dim).cloud()
    held(kind, cloud)
    assert int(cloud.status) == 0


@KINDS
@DIMS
@pytest.mark.parametrize("where", ["batch", "negative batch", "below", "above"])
def test_coordinates_outside_their_box_are_reported(where, dim, kind):
    coords, bounds = astray(dim, where)
    cloud = buffered(coords, 3, bounds)
    held(kind, cloud).neighbours(cloud, Relation.of(dim, 3))
    assert int(cloud.status) & RANGE


@KINDS
def test_of_coordinates_outside_and_duplicates_those_outside_are_told(kind):
    cloud = CoordBuffer.of(torch.tensor([[0, 1, 1], [0, 0, 13]], dtype=torch.int32), Bounds((0, 0), (3, 9), 1))
    held(kind, cloud)
    with pytest.raises(CoordinateError, match="outside"):
        cloud.read()


@KINDS
def test_a_status_word_keeps_what_it_says(kind):
    cloud = scene("plain", 3).cloud()
    cloud.status.fill_(OVERFLOW)
    held(kind, cloud)
    assert int(cloud.status) == OVERFLOW


def test_bits_of_a_status_word_are_raised():
    check(0, 5)
    for status, words in ((DUPLICATE, "duplicates"), (RANGE, "outside"), (OVERFLOW, "exceed the capacity")):
        with pytest.raises(CoordinateError, match=words):
            check(status, 5)


def test_reading_a_cloud_raises_what_it_says():
    cloud = scene("plain", 3).cloud()
    assert cloud.read() == 60 and cloud.capacity == 67
    for status, words in ((DUPLICATE, "duplicates"), (RANGE, "outside"), (OVERFLOW, "exceed the capacity")):
        cloud.status.fill_(status)
        with pytest.raises(CoordinateError, match=words):
            cloud.read()
    cloud.status.zero_()
    with pytest.raises(CoordinateError, match="68 results exceed the capacity of 67"):
        replace(cloud, needed=torch.tensor([68])).read()


def test_values_are_read_together():
    tensors = [torch.tensor([3], dtype=torch.int32), torch.zeros(0), torch.tensor([[1, 2**40]]), torch.tensor(7)]
    assert read(tensors) == [[3], [], [1, 2**40], [7]]
    assert read([]) == []


# What was found, through the library


@DIMS
@pytest.mark.parametrize("name", ["plain", "batch of 512", "wide", "one", "nothing"])
def test_find(name, dim):
    cloud = scene(name, dim).cloud()
    coords = cloud.coords[: int(cloud.count)]
    geometry = Geometry.checked(coords)
    places = torch.cat([coords.flip(0), coords[:3], asked(cloud, (1,) * dim).coords])
    rows = {tuple(place): row for row, place in enumerate(coords.tolist())}
    found = geometry.find(places.long())
    assert found.dtype == torch.int64
    assert found.tolist() == [rows.get(tuple(place), -1) for place in places.tolist()]
    assert geometry.find(places[:0]).shape == (0,)


def test_what_int32_does_not_hold_is_not_found():
    geometry = Geometry.checked(torch.tensor([[0, 5]], dtype=torch.int32))
    assert geometry.find(torch.tensor([[0, 5 + 2**32], [2**32, 5], [0, 5]])).tolist() == [-1, -1, 0]


@DIMS
def test_duplicates_are_raised_with_an_example(dim):
    coords = scene("plain", dim).coords()
    with pytest.raises(CoordinateError, match="1 of 61 coordinates are duplicates; .* at rows 4 and 60"):
        Geometry.checked(torch.cat([coords, coords[4:5]]))


WIDE = {
    "submanifold": {},
    "floor_unique": {"stride": 2},
    "support": {"stride": 2, "padding": 1},
    "dilated": {"dilation": 3},
}


@pytest.mark.parametrize("form", WIDE)
@DIMS
def test_convolutions_in_a_box_as_wide_as_int32(form, dim):
    """The same values as the same clusters give one by one, each moved to the origin."""
    side = 4
    generator = torch.Generator().manual_seed(dim)
    parts = [random_cloud(20, dim, extent={1: 40}.get(dim, side + 2), seed=seed) for seed in range(3)]
    # Moves by multiples of the stride keep the outputs' places.
    moves = [(INT32[0] + 64,) * dim, (2**30,) * dim, (INT32[1] - 127,) * dim]
    moved = [part + torch.tensor((0, *move), dtype=torch.int32) for part, move in zip(parts, moves, strict=True)]
    feats = [torch.randn(20, 3, dtype=torch.float64, generator=generator) for _ in parts]
    weight = torch.randn(2, *(3,) * dim, 3, dtype=torch.float64, generator=generator)
    got = pm.ops.conv(pm.SparseTensor(torch.cat(feats), torch.cat(moved), dim=dim), weight, **WIDE[form])
    stride = WIDE[form].get("stride", 1)
    values = {tuple(c): f for c, f in zip(got.coords.tolist(), got.feats, strict=True)}
    for part, move, x in zip(parts, moves, feats, strict=True):
        want = pm.ops.conv(pm.SparseTensor(x, part, dim=dim), weight, **WIDE[form])
        shift = torch.tensor((0, *(m // stride for m in move)))
        for place, value in zip((want.coords.long() + shift).tolist(), want.feats, strict=True):
            assert_close(values.pop(tuple(place)), value)
    assert not values


# Masks


@pytest.mark.parametrize("volume", [0, 1, 8, 27, 30, 31, 32, 62, 63, 125])
def test_mask_words_hold_a_bit_for_every_tap(volume):
    generator = torch.Generator().manual_seed(volume)
    rows = torch.randint(-3, 4, (40, volume), dtype=torch.int32, generator=generator).clamp(min=-1)
    rows[0], rows[1] = 5, -1
    masks = mask_words(rows)
    assert masks.dtype == torch.int32 and masks.shape == (40, -(-volume // 31)) and not (masks < 0).any()
    assert torch.equal(masks, mask_words_torch(rows))
    for row, words in zip(rows.tolist(), masks.tolist(), strict=True):
        bits = sum(word << (31 * place) for place, word in enumerate(words))
        assert bits == sum(1 << tap for tap, met in enumerate(row) if met >= 0)


# The host is not waited for


def test_the_watch_sees_waits():
    x = torch.tensor([1, 0, 2])
    for wait in (lambda: x[0].item(), lambda: bool(x[0]), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.unique()):
        with NoWaits(), pytest.raises(AssertionError, match="waits"):
            wait()


@pytest.mark.parametrize("name", ["plain", "wide"])
@DIMS
def test_sorted_keys_wait_for_nothing(name, dim):
    cloud = scene(name, dim).cloud()
    outputs = {label: asked(cloud, relation.stride) for label, relation in lookups(dim).items()}
    with NoWaits():
        lookup = SortedKeys(cloud, SORTED)
        for label, relation in lookups(dim).items():
            mask_words_torch(lookup.neighbours(outputs[label], relation).rows)


# Schedules


def test_a_schedule_survives_json():
    for schedule in (MapSchedule(), MapSchedule("grid", 0.75, 5, True, False), *map(MapSchedule, STRUCTURES)):
        assert MapSchedule.of_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    "wrong",
    [
        {"structure": "tree"},
        {"load": 0.0},
        {"load": 0.95},
        {"load": -1.0},
        {"cells": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_schedules_are_refused(wrong):
    with pytest.raises(OptionError, match=next(iter(wrong))):
        MapSchedule(**wrong)


def test_structures_of_kernels_are_refused_without_kernels(monkeypatch):
    monkeypatch.setattr(native_maps, "library", lambda dim: "kernels do not run here")
    cloud = scene("plain", 3).cloud()
    for name in set(STRUCTURES) - {"sorted"}:
        with pytest.raises(OptionError, match=f"structure='{name}' is not available: kernels do not run here"):
            lookup_of(cloud, MapSchedule(name))
    assert default(cloud) == SORTED
    assert isinstance(lookup_of(fresh(cloud)), SortedKeys)


def cheapest(rows, cells, volume=27):
    found = costs(rows, cells, volume)
    return min(found, key=found.__getitem__)


def test_a_small_dense_box_gets_a_grid():
    assert cheapest(100_000, 300_000) == "grid"


def test_a_wide_sparse_box_gets_no_grid():
    assert cheapest(100_000, 1 << 36) != "grid"


def test_costs_rise_with_what_is_asked():
    for name, few in costs(100_000, 1 << 24).items():
        assert few > 0
        assert costs(200_000, 1 << 24)[name] > few
        assert costs(100_000, 1 << 24, 125)[name] > few
        assert costs(100_000, 1 << 24, rates=Rates(stream=1e9))[name] > few or name == "hash"
    assert costs(100_000, 1 << 34)["grid"] > costs(100_000, 1 << 24)["grid"]
    assert costs(100_000, 1 << 34)["hash"] == costs(100_000, 1 << 24)["hash"]


@pytest.mark.parametrize("policy", ["same", "floor_unique", "support", "transposed"])
def test_a_schedule_changes_no_map(policy):
    relation = {
        "same": Relation.of(3, 3),
        "floor_unique": Relation.of(3, 3, stride=2),
        "support": Relation.of(3, 3, stride=2, padding=1),
        "transposed": Relation.of_transposed(3, 3, stride=2),
    }[policy]
    coords = scene("plain", 3).coords()
    want, outputs = kernel_map(Geometry.checked(coords), relation)
    for schedule in (SORTED, replace(SORTED, fused=False), replace(SORTED, mirrored=True)):
        got, made = kernel_map(Geometry.checked(coords), relation, schedule=schedule)
        assert torch.equal(got.rows(), want.rows()) and torch.equal(made.coords, outputs.coords)
    with pytest.raises(OptionError, match="kernels do not run here"):
        kernel_map(Geometry.checked(coords), Relation.of(3, 3), None, MapSchedule())


def test_a_schedule_asks_for_nothing_that_was_found_before():
    geometry = Geometry.checked(scene("plain", 3).coords())
    found, _ = kernel_map(geometry, Relation.of(3, 3))
    assert kernel_map(geometry, Relation.of(3, 3), schedule=MapSchedule("grid"))[0] is found


def test_a_table_that_another_thread_replaces_is_not_read(monkeypatch):
    cloud = scene("plain", 3).cloud()
    far = Relation.of(3, 3, dilation=5)
    keys = SortedKeys(cloud, SORTED)
    want = keys.neighbours(cloud, far).rows
    small, reaches = SortedKeys(cloud, SORTED)._table, lookup._Narrow.reaches

    def interrupted(table, reach):
        enough = reaches(table, reach)
        keys._table = small  # what another thread has just made for a relation of less reach
        return enough

    monkeypatch.setattr(lookup._Narrow, "reaches", interrupted)
    assert torch.equal(keys.neighbours(cloud, far).rows, want)
