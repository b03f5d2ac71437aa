"""Kernel maps: masks, orders, splits and superblocks, transposes, and how often the device is asked."""

import itertools
import math
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from clouds import Scene

from pumice.coords import Geometry, KernelMap, Relation, SortSpec, kernel_map, read_pending_sizes, tiles
from pumice.coords.capacity import BufferedMapState, BufferedState, CapacityPlanner, FixedCapacities
from pumice.coords.lookup import mask_words
from pumice.coords.tiles import Tiling, assign_tiles, group_totals, pair_counts, sort_rows
from pumice.errors import GeometryError, OptionError
from pumice.lower import maps
from pumice.testing import random_cloud

SAME = {
    "3x3x3": Relation.of(3, 3),
    "5x5x5": Relation.of(3, 5),
    "3x1x3 dilated": Relation.of(3, (3, 1, 3), dilation=2),
}
MADE = {
    "floor": Relation.of(3, 2, stride=2),
    "support": Relation.of(3, 3, stride=2, padding=1),
    "transposed": Relation.of_transposed(3, 3, stride=2),
    "even": Relation.of(3, 2, policy="support"),
}
EVERY = {**SAME, **MADE}


def found(name, count=500, seed=0):
    geometry = Geometry.checked(random_cloud(count, 3, batch_size=2, seed=seed))
    return kernel_map(geometry, EVERY[name])[0]


def pairs_of(part):
    """(output, tap, input) of every pair of tiles, by slot."""
    entry, slot = (part.inputs >= 0).nonzero(as_tuple=True)
    outputs, inputs = part.rows[part.tiles[entry], slot], part.inputs[entry, slot]
    return list(zip(outputs.tolist(), part.taps[entry].tolist(), inputs.tolist(), strict=True))


def wanted(m):
    inputs, outputs, _ = m.pairs()
    return sorted(zip(outputs.tolist(), m.taps().tolist(), inputs.tolist(), strict=True))


def codes_of(m):
    """The taps of each row as one integer, bit k for tap k."""
    words = m.masks().tolist()
    return [sum(word << (31 * place) for place, word in enumerate(row)) for row in words]


# Masks and lists


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("flipped", [False, True])
def test_masks_and_counts_are_those_of_the_pairs(name, flipped):
    m = found(name).transpose() if flipped else found(name)
    held = {}
    for output, tap, _ in wanted(m):
        held[output] = held.get(output, 0) | 1 << tap
    assert codes_of(m) == [held.get(row, 0) for row in range(m.num_outputs)]
    assert m.counts().tolist() == [bin(code).count("1") for code in codes_of(m)]
    assert m.pair_counts()[:, -1].tolist() == m.pairs().sizes.tolist()


@pytest.mark.parametrize("name", EVERY)
def test_a_transposed_map_holds_the_same_meetings(name):
    m = found(name)
    turned = m.transpose()
    rows = torch.full((turned.num_outputs, m.volume), -1, dtype=torch.int32)
    for output, tap, met in wanted(m):
        rows[met, tap] = output
    assert turned.rows().dtype == torch.int32 and torch.equal(turned.rows(), rows)
    assert turned.transpose().rows() is m.rows()


def test_other_coordinates_of_as_many_rows_are_not_their_own_transpose():
    inputs, outputs = (Geometry.checked(random_cloud(500, 3, batch_size=2, seed=seed)) for seed in (0, 1))
    m, _ = kernel_map(inputs, Relation.of(3, 3, policy="given"), outputs)
    assert m.num_inputs == m.num_outputs and not m.symmetric
    turned = m.transpose()
    assert wanted(KernelMap.from_rows(m.relation, turned.rows(), turned.num_inputs)) == wanted(turned)
    assert sorted(pairs_of(turned.split(64, 1)[0])) == wanted(turned)


# Tiles


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("splits", [0, 1, 2, 3, 4])
def test_splits_hold_every_pair_once_in_total(name, flipped, splits):
    m = found(name).transpose() if flipped else found(name)
    parts = m.split(64, splits)
    assert len(parts) == max(1, splits)
    for part in parts:
        assert sorted(part.rows[part.rows >= 0].tolist()) == list(range(m.num_outputs))
        assert bool((part.inputs >= 0).any(dim=1).all()), "an entry without a pair"
        entries = list(zip(part.tiles.tolist(), part.taps.tolist(), strict=True))
        assert len(set(entries)) == len(entries), "two entries of one tile and tap"
    for one, other in itertools.combinations(parts, 2):
        assert not set(one.taps.tolist()) & set(other.taps.tolist()), "a tap in two splits"
    assert sorted(itertools.chain.from_iterable(map(pairs_of, parts))) == wanted(m)


def test_splits_take_about_as_many_taps_each():
    for volume, splits in itertools.product((1, 2, 27, 125), (1, 2, 3, 4)):
        if splits > volume:
            continue
        orders = SortSpec.splits(volume, splits, 64)
        sizes = [how.last - how.first for how in orders]
        assert sum(sizes) == volume and max(sizes) - min(sizes) <= 1
        assert [how.first for how in orders[1:]] == [how.last for how in orders[:-1]]
        assert all(how.superblock == 64 and how.sort for how in orders)
    assert SortSpec.splits(27, 0, 64) == (SortSpec(0, 27, 0, sort=False),)


@pytest.mark.parametrize("splits", [-1, 28])
def test_wrong_splits_are_refused(splits):
    with pytest.raises(OptionError, match="splits"):
        found("3x3x3").split(64, splits)
    with pytest.raises(OptionError, match="split()"):
        found("3x3x3").compacted(64, splits=2)


def test_without_a_split_rows_keep_their_order():
    m = found("3x3x3")
    (part,) = m.split(64, 0)
    assert part.rows.flatten()[: m.num_outputs].tolist() == list(range(m.num_outputs))
    assert (part.rows.flatten()[m.num_outputs :] == -1).all()


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_the_tiles_of_a_transposed_submanifold_map_are_its_own_mirrored(name, splits):
    m = found(name)
    mine, turned = m.split(32, splits), m.transpose().split(32, splits)
    for a, b in zip(mine, turned[::-1], strict=True):
        assert a.rows is b.rows and a.tiles is b.tiles and a.inputs is b.inputs
        assert torch.equal(b.taps, m.volume - 1 - a.taps) and b.taps.dtype == torch.int32


# Orders


def gray_rank(code, bits):
    """How many codewords come before this one in the reflected Gray code."""
    rank = 0
    for bit in reversed(range(bits)):
        rank = rank << 1 | ((rank & 1) ^ (code >> bit & 1))
    return rank


def groups_as_sets(m, how):
    """Taps one by one, and unless they are few those of a plane of the window, cut to the order's."""
    used, own = range(how.first, how.last), (0,) * m.relation.dim
    groups = [{tap} for tap in used]
    if len(used) > 10:
        for axis in range(m.relation.dim):
            for value in sorted({offset[axis] for offset in m.relation.offsets}):
                plane = {tap for tap in used if m.relation.offsets[tap][axis] == value}
                groups += [plane] if 1 < len(plane) < len(used) else []
    if m.relation.policy != "same":
        return groups
    return [group for group in groups if not any(m.relation.offsets[tap] == own for tap in group)]


def order_of(m, how):
    """Rows as the docs have them: by superblock, then by falling Gray rank of the groups that tell most apart."""
    codes, rows, groups = codes_of(m), m.num_outputs, groups_as_sets(m, how)
    met = [[any(code >> tap & 1 for tap in group) for group in groups] for code in codes]
    totals = [sum(column) for column in zip(*met, strict=True)]
    block = how.superblock or rows
    room = 31 - ((rows - 1) // block).bit_length()
    width = min(20 if how.last - how.first <= 31 else 31, room)
    taken = sorted(sorted(range(len(groups)), key=lambda g: abs(2 * totals[g] - rows))[:width])
    taken.sort(key=lambda g: len(groups[g]) * (rows - totals[g]))
    ranks = [gray_rank(sum(row[g] << place for place, g in enumerate(taken)), len(taken)) for row in met]
    return sorted(range(rows), key=lambda row: (row // block, -ranks[row]))


@pytest.mark.parametrize("name", ["3x3x3", "5x5x5", "support", "even"])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("superblock", [0, 64])
def test_rows_fall_by_the_gray_rank_of_what_they_meet(name, splits, superblock):
    """Long integers in place of words of 31 bits."""
    m = found(name)
    for part, how in zip(m.split(16, splits, superblock), SortSpec.splits(m.volume, splits, superblock), strict=True):
        assert part.rows[part.rows >= 0].tolist() == order_of(m, how)


@pytest.mark.parametrize("superblock", [64, 128])
def test_superblocks_are_sorted_among_themselves(superblock):
    m = found("3x3x3", 700)
    plain, sorted_, blocked = (m.split(16, *how)[0] for how in ((0, 0), (1, 0), (1, superblock)))
    rows = blocked.rows[blocked.rows >= 0]
    assert torch.equal(rows // superblock, torch.arange(700) // superblock)
    assert len(sorted_.taps) <= len(blocked.taps) <= len(plain.taps) and len(blocked.taps) < len(plain.taps)


def test_rows_with_many_taps_come_first():
    """Work that takes long starts early: heavy tiles are ahead."""
    m = found("3x3x3", 900)
    rows = m.compacted(16).rows
    counts = m.counts()[rows[rows >= 0].long()].double()
    assert counts[:225].mean() > counts[-225:].mean()


@pytest.mark.parametrize("splits", [1, 3])
def test_planes_of_a_window_are_groups_of_more_than_ten_taps(splits):
    """Of 27 taps each plane has 9; of 9, which have a bit each, none is needed."""
    for how in SortSpec.splits(27, splits):
        met_by_all = how.first <= 13 < how.last
        groups = tiles.groups_of(Relation.of(3, 3), how, torch.device("cpu"))
        assert groups[:, -1].tolist() == [1] * (27 // splits - met_by_all) + [9] * (6 if splits == 1 else 0)
        groups = tiles.groups_of(Relation.of(3, 3, policy="support"), how, torch.device("cpu"))
        assert groups[:, -1].tolist() == [1] * (27 // splits) + [9] * (9 if splits == 1 else 0)
    assert Relation.of(2, 3).planes == ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8))


def test_a_key_has_31_bits_at_most():
    masks = torch.full((5000, 5), 2**31 - 1, dtype=torch.int32)
    masks[::2] = 0
    count, whole = torch.tensor([5000], dtype=torch.int32), Relation.of(3, 5)
    for how in (SortSpec(0, 27), SortSpec(0, 27, 1), SortSpec(0, 125), SortSpec(0, 125, 512), SortSpec(0, 125, 64)):
        groups = tiles.groups_of(whole, how, torch.device("cpu"))
        keys = tiles.sort_rows(masks, count, groups, how)
        assert sorted(keys.tolist()) == list(range(5000))
        block = how.superblock or 5000
        assert torch.equal(keys // block, torch.arange(5000) // block)


def test_dead_rows_come_last_and_in_no_tile():
    rows = kernel_map(Geometry.checked(Scene().coords()), Relation.of(3, 3))[0].rows()
    masks, count = mask_words(torch.cat([rows, rows[:9]])), torch.tensor([len(rows)], dtype=torch.int32)
    how = SortSpec(0, 27)
    ends = pair_counts(masks, count, 27)
    groups = tiles.groups_of(Relation.of(3, 3, policy="support"), how, masks.device)
    totals = group_totals(masks, count, groups)[:27]
    assert torch.equal(totals, (rows >= 0).sum(0).int()) and torch.equal(ends[:, -1], totals)
    order = sort_rows(masks, count, groups, how)
    assert sorted(order[: len(rows)].tolist()) == list(range(len(rows)))
    tiling = assign_tiles(masks, count, order, how, (16, 27))
    assert isinstance(tiling, Tiling) and sorted(tiling.slots[tiling.slots >= 0].tolist()) == list(range(len(rows)))


# Lists with less and more room


def test_lists_end_where_their_room_ends():
    m = found("3x3x3")
    whole = sum(m.pairs().sizes.tolist())
    listed = tiles.list_pairs(m.rows(), m.valid_count(), m.pair_counts(), whole)
    for mine, expected in zip(listed, (*m.pairs()[:2], m.taps()), strict=True):
        assert torch.equal(mine.long(), expected)
    for room in (whole - 7, whole + 7, 0):
        part = tiles.list_pairs(m.rows(), m.valid_count(), m.pair_counts(), room)
        for cut, full in zip(part, listed, strict=True):
            assert torch.equal(cut[:whole], full[:room]) and (cut[whole:] == -1).all()


@pytest.mark.parametrize("group", [8, 64])
def test_groups_lie_by_how_far_within_their_taps_they_are(group):
    m = found("3x3x3")
    taps, inputs, outputs = m.grouped(group)
    sizes = m.pairs().sizes.tolist()
    counts = [-(-size // group) for size in sizes]
    far = sorted((Fraction(2 * j + 1, 2 * n), tap) for tap, n in enumerate(counts) for j in range(n))
    assert taps.tolist() == [tap for _, tap in far] and max(counts) > 2
    back = taps.argsort(stable=True)
    kept = (inputs[back] >= 0).flatten()
    assert torch.equal(inputs[back].flatten()[kept].long(), m.pairs().inputs)
    assert torch.equal(outputs[back].flatten()[kept].long(), m.pairs().outputs)
    turned = m.transpose().grouped(group)
    assert turned.taps is taps and turned.inputs is outputs and turned.outputs is inputs


def test_groups_past_the_last_have_no_tap():
    m = found("3x3x3")
    whole = m.grouped(16)
    made = tiles.group_pairs(m.rows(), m.valid_count(), m.pair_counts(), (len(whole.taps) + 5, 16))
    for more, just in zip(made, whole, strict=True):
        assert torch.equal(more[:-5], just) and (more[-5:] == -1).all()
    less = tiles.group_pairs(
        m.rows(), m.valid_count(), m.pair_counts(), (9, 16), status := torch.zeros(1, dtype=torch.int32)
    )
    assert status.item() != 0 and all(len(part) == 9 for part in less)


# How often the device is asked


@pytest.fixture
def reads(monkeypatch):
    """Every transfer: how many tensors were read."""
    made = []
    module = sys.modules["pumice.coords.kernel_map"]  # the package has a function of this name
    before = module.read

    def counting(tensors):
        if tensors:
            made.append(len(tensors))
        return before(tensors)

    monkeypatch.setattr(module, "read", counting)
    return made


def test_what_was_settled_is_not_read_again(reads):
    """One transfer for the sizes of many maps, and none for their storages."""
    maps = [found("3x3x3"), found("support"), found("5x5x5").transpose(), found("floor").transpose()]
    splits = (1, 2, 4)
    wanted_ = [(m, 64, how) for m in maps for count in splits for how in SortSpec.splits(m.volume, count, 32)]
    # Tiles of a transposed submanifold map are those of the map itself.
    wanted_ = [(m.transpose() if m.flipped and m.symmetric else m, block, how) for m, block, how in wanted_]
    read_pending_sizes([*wanted_, *((m.transpose() if m.flipped else m, 0, None) for m in maps)])
    assert reads == [len(maps) * (1 + sum(splits))]
    for m in maps:
        for count in splits:
            m.split(64, count, 32)
        m.grouped(16), m.pairs(), m.taps(), repr(m)
    read_pending_sizes(wanted_)
    assert len(reads) == 1


def test_a_storage_reads_its_own_size_once(reads):
    m = found("3x3x3")
    m.tiling(64, SortSpec(0, 27)), m.pair_counts(), m.masks(), m.valid_count()
    assert reads == [], "tiles and tallies stay on the device"
    first = m.compacted(64)
    assert len(reads) == 1
    assert m.compacted(64) is first and len(reads) == 1
    m.grouped(8), m.grouped(16)
    assert len(reads) == 2
    m.transpose().compacted(64), m.transpose().grouped(8)
    assert len(reads) == 2


@pytest.mark.parametrize("block", [16, 64])
def test_maps_of_nothing_have_empty_storages(block):
    empty = Geometry.checked(torch.zeros(0, 4, dtype=torch.int32))
    for relation in EVERY.values():
        m, outputs = kernel_map(empty, relation)
        assert len(outputs) == 0 and m.masks().shape == (0, -(-m.volume // 31))
        read_pending_sizes([(m, block, how) for how in SortSpec.splits(m.volume, 2)] + [(m, 0, None)])
        for part in (*m.split(block, 2), *m.split(block, 0), *m.transpose().split(block, 1)):
            assert [len(t) for t in part] == [0, 0, 0, 0]
        assert [len(t) for t in m.grouped(block)] == [0, 0, 0] and "0 pairs" in repr(m)


def test_rows_that_were_given_have_the_same_storages():
    m = found("support")
    given = KernelMap.from_rows(m.relation, m.rows().long(), m.num_inputs)
    assert torch.equal(given.masks(), m.masks()) and wanted(given) == wanted(m)
    assert all(torch.equal(a, b) for a, b in zip(given.compacted(64), m.compacted(64), strict=True))
    moved = m.to("cpu")
    assert wanted(moved) == wanted(m) and replace(m, flipped=True).flipped


@pytest.mark.parametrize("pairs, size", [(0, 1024), (3_668_408, 1024), (4_000_000, 2048), (14_760_624, 2048)])
def test_groups_are_longer_where_there_are_many_pairs(pairs, size, monkeypatch):

    found = kernel_map(Geometry.checked(random_cloud(30, 3, extent=9)), Relation.of(3, 3))[0]
    monkeypatch.setattr(maps, "read_sizes", lambda found: ((pairs // 2, pairs - pairs // 2), {}))
    assert maps.group_of(found) == maps.group_of(found.transpose()) == size


def test_every_stream_waits_for_what_others_lay_out(monkeypatch):
    """Once each, whichever comes first; and anew for what is laid out later."""
    word, waits = torch.zeros(1, dtype=torch.int32), []

    class Stream:
        def __init__(self, number):
            self.stream_id = number

        def wait_event(self, event):
            waits.append((self.stream_id, event))

    def read(*streams):
        waits.clear()
        for number in streams:
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device, number=number: Stream(number))
            found.get_cached("rows")
            found.transpose().cached("something", lambda _: 1)
        return waits

    found = KernelMap.from_rows(Relation.of(1, 3), torch.zeros(4, 3), 4)
    between: Any = BufferedMapState(word, word, word, FixedCapacities({}), "here")
    found = replace(found, buffered=between)
    assert read(1) == []
    between.pending_events.register("found", [None])
    assert read(1, 2, 1, 2) == [(1, "found"), (2, "found")]
    between.pending_events.register("laid out", [("rows", False)])
    # What has no event of its own is made of the map.
    assert read(2) == [(2, "laid out"), (2, "found")]
    between.pending_events.register("and back", [("something", True)])
    assert read(2, 3) == [(2, "laid out"), (2, "and back"), (3, "laid out"), (3, "and back")]
    waits.clear()
    between.pending_events.wait_for_all()
    assert waits == [(3, "found")]
    assert read(1, 2, 3) == []


def test_tiles_are_smaller_where_there_are_few():
    assert [maps.tile_rows_for(outputs) for outputs in (0, 49_999, 50_000, 100_000)] == [64, 64, 128, 128]


def test_groups_in_buffers_are_as_long_as_the_room_for_pairs_says(monkeypatch):
    monkeypatch.setattr(maps, "_GROUPS_OF", ((500, 4), (1000, 8), (math.inf, 16)))
    whole = Geometry.checked(random_cloud(60, 3, extent=6))
    planner = CapacityPlanner(60, 60, 1.5, None)
    inside = Geometry.in_buffer(whole.cloud, whole.site, BufferedState(planner))
    found, _ = kernel_map(inside, Relation.of(3, 3))
    pairs = int(kernel_map(whole, Relation.of(3, 3))[0].pairs().sizes.sum())
    length = maps.group_of(found)
    (room,) = (room for place, room in planner.capacities.items() if place[0] == "pairs")
    assert pairs < 500 < room == -(-9 * pairs // 4)
    assert length == maps.group_of(found.transpose()) == 8
    taps, inputs, outputs = found.grouped(length)
    assert (inputs >= 0).sum() == (outputs >= 0).sum() == pairs and inputs.shape == (len(taps), length)


def test_equal_relations_are_shared_and_others_are_not():
    """Policies do not count in the hash."""
    relations = [Relation.of(3, 3), Relation.of(3, 3, policy="given"), Relation.of(3, 3, policy="cached_inverse")]
    relations += [Relation.of(3, 3, dilation=2), Relation.of_offsets(3, ((0, 0, 0), (1, 0, 0)))]
    shared = [one.shared() for one in relations]
    assert shared == relations and len(set(map(id, shared))) == len(shared)
    for one in relations:
        assert replace(one).shared() is one.shared()


def test_inverse_onto_given_coordinates():
    """Of another window than made the inputs, which cached_inverse refuses; of the same window it is that map."""
    fine = Geometry.checked(torch.tensor([[0, 0, 1, 2], [0, 3, 1, 0], [0, 4, 4, 4]], dtype=torch.int32))
    made, coarse = kernel_map(fine, Relation.of(3, 2, stride=2))
    window = Relation.of(3, 3, stride=2, policy="given_inverse")
    found, outputs = kernel_map(coarse, window, fine)
    assert outputs is fine and (found.num_inputs, found.num_outputs) == (len(coarse), len(fine))
    forward, _ = kernel_map(fine, replace(window, policy="given"), coarse)
    assert torch.equal(found.transpose().rows(), forward.rows())
    with pytest.raises(GeometryError, match="the inverse has kernel_size"):
        kernel_map(coarse, replace(window, policy="cached_inverse"), fine)
    same, _ = kernel_map(coarse, Relation.of(3, 2, stride=2, policy="given_inverse"), fine)
    assert same.table is made.table
    with pytest.raises(GeometryError, match="given_inverse needs a target"):
        kernel_map(coarse, window)
    with pytest.raises(GeometryError, match="strides are incompatible"):
        kernel_map(coarse, Relation.of(3, 2, stride=4, policy="given_inverse"), fine)
