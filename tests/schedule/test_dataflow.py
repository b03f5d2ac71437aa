"""Dataflows and groupings: values that print and last, and pure functions of the counts of pairs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pumice.errors import OptionError
from pumice.schedule.dataflow import (
    DATAFLOWS,
    GROUPINGS,
    Dataflow,
    Dataflows,
    Grouping,
    OffsetGroup,
    chosen,
    padding,
)

NUMBERS = st.lists(st.integers(0, 50), min_size=1, max_size=30)
COUNTS = NUMBERS | st.builds(lambda half, middle: [*half, *middle, *half[::-1]], NUMBERS, st.just([]) | st.just([60]))
"""Of any map, and of submanifold ones."""
SHARE, SIZE = st.floats(0, 1, allow_nan=False), st.integers(0, 60)
HOW = st.builds(Grouping, st.sampled_from(sorted(GROUPINGS)), SHARE, SIZE)


@given(HOW, COUNTS)
def test_every_tap_is_in_one_group(how, counts):
    groups = how.groups(counts)
    assert sorted(tap for group in groups for tap in group.taps) == list(range(len(counts)))


@given(HOW, COUNTS)
def test_groups_keep_the_order(how, counts):
    """Of the taps in a group, and of the groups by their first taps."""
    groups = how.groups(counts)
    assert all(list(group.taps) == sorted(group.taps) for group in groups)
    assert [group.taps[0] for group in groups] == sorted(group.taps[0] for group in groups)


def redundant(counts, taps):
    """1 - theoretical / actual operations, by hand."""
    actual = len(taps) * max(counts[tap] for tap in taps)
    return 1 - sum(counts[tap] for tap in taps) / actual if actual else 0.0


def units_of(counts):
    """What adaptive scans: of a symmetric map a tap with its mirror image, without the centre."""
    if counts != counts[::-1] or len(counts) == 1:
        return [[tap] for tap in range(len(counts))]
    return [[tap, len(counts) - 1 - tap] for tap in range(len(counts) // 2)]


@given(COUNTS, SHARE, SIZE)
def test_adaptive_groups_bound_redundant_operations(counts, epsilon, size):
    """Batched below S alone; with the first unit of the next group it would be too much."""
    groups = Grouping("adaptive", epsilon=epsilon, size=size).groups(counts)
    units = units_of(counts)
    runs = groups[:-1] if len(units[0]) == 2 and len(counts) % 2 else groups
    for group, after in zip(runs, [*runs[1:], None], strict=True):
        assert padding(counts, group.taps) == redundant(counts, group.taps)
        assert redundant(counts, group.taps) <= epsilon or [*group.taps] in units
        assert group.batched == (len(group.taps) > 1 and max(counts[tap] for tap in group.taps) < size)
        if after is not None:
            (unit,) = (unit for unit in units if unit[0] == after.taps[0])
            assert redundant(counts, [*group.taps, *unit]) > epsilon


def test_adaptive_bounds_the_sum_and_not_the_ends():
    """Of many long lists and a short one few operations are redundant, however short it is."""
    counts = [10] * 9 + [1]
    assert Grouping("adaptive", epsilon=0.1).groups(counts) == (OffsetGroup(tuple(range(10)), True),)
    assert Grouping("adaptive", epsilon=0.08).groups(counts)[1] == OffsetGroup((9,), False)


@given(COUNTS)
def test_the_ends_of_adaptive_are_the_others(counts):
    """Section 4.2.3: dense for epsilon 1 and any S, separate for S = 0, symmetric for epsilon 0."""
    separate = Grouping("adaptive", epsilon=0.5, size=0).groups(counts)
    assert not any(group.batched for group in separate)
    whole, units = Grouping("adaptive", epsilon=1.0, size=1000).groups(counts), units_of(counts)
    mirrored = len(units[0]) == 2
    assert len(whole) == 1 + (mirrored and len(counts) % 2) and whole[0].batched == (len(counts) > 1)
    met = {tap: group for group in Grouping("adaptive", epsilon=0.0, size=1000).groups(counts) for tap in group.taps}
    assert all(met[unit[0]] is met[unit[-1]] for unit in units) and all(
        not redundant(counts, g.taps) for g in {*met.values()}
    )
    different = [*range(1, 8), 90, *range(7, 0, -1)]
    assert Grouping("adaptive", epsilon=0.0).groups(different) == Grouping("symmetric").groups(different)


def test_the_groups_of_a_submanifold_map():
    counts = [3, 5, 6, 90, 6, 5, 3]
    alone = OffsetGroup((3,), False)
    assert Grouping("separate").groups(counts) == tuple(OffsetGroup((tap,), False) for tap in range(7))
    assert Grouping("symmetric").groups(counts) == (*(OffsetGroup((k, 6 - k), True) for k in range(3)), alone)
    # 1 - 16 / 20 is above 0.1, 1 - 22 / 24 is not.
    two, four = OffsetGroup((0, 6), True), OffsetGroup((1, 2, 4, 5), True)
    assert Grouping("adaptive", epsilon=0.1).groups(counts) == (two, four, alone)
    assert Grouping("adaptive", epsilon=0.1, size=6).groups(counts) == (two, four._replace(batched=False), alone)
    assert Grouping("adaptive", epsilon=0.25).groups(counts) == (OffsetGroup((0, 1, 2, 4, 5, 6), True), alone)
    assert padding(counts, four.taps) == pytest.approx(1 / 12)


def test_fixed_makes_three_groups():
    """W0 to W3 with their mirror images, the rest, and the middle; fewer of small kernels."""
    half = [3, 5, 6, 7, 20, 21, 22, 23, 24, 25, 26, 27, 28]
    first, rest = (0, 1, 2, 3, 23, 24, 25, 26), (*range(4, 13), *range(14, 23))
    groups = (OffsetGroup(first, True), OffsetGroup(rest, True), OffsetGroup((13,), False))
    assert Grouping("fixed").groups([*half, 90, *half[::-1]]) == groups
    assert Grouping("fixed").groups([3, 90, 3]) == (OffsetGroup((0, 2), True), OffsetGroup((1,), False))
    assert Grouping("fixed").groups([90]) == (OffsetGroup((0,), False),)


def test_the_groups_of_a_strided_map():
    """Downsampling is one group, where it is fixed; adaptive scans it from the first tap to the last."""
    counts = [10, 9, 30, 12]
    assert Grouping("symmetric").groups(counts) == tuple(OffsetGroup((tap,), False) for tap in range(4))
    assert Grouping("fixed").groups(counts) == (OffsetGroup((0, 1, 2, 3), True),)
    found = (OffsetGroup((0, 1), True), OffsetGroup((2, 3), True))
    assert Grouping("adaptive", epsilon=0.35).groups(counts) == found
    # The middle tap of an odd kernel is an ordinary one where not every row meets itself.
    assert Grouping("adaptive").groups([7, 8, 9]) == (OffsetGroup((0, 1, 2), True),)


@pytest.mark.parametrize("bad", [{"kind": "some"}, {"epsilon": 1.5}, {"epsilon": -0.1}, {"size": -1}], ids=str)
def test_groupings_that_do_not_exist(bad):
    with pytest.raises(OptionError):
        Grouping(**{"kind": "adaptive", **bad})


@pytest.mark.parametrize("name", DATAFLOWS)
def test_dataflows_last(name):
    flow = DATAFLOWS[name]
    assert flow.name == name and str(flow) == name and flow.source
    assert Dataflow.of_json(json.loads(json.dumps(flow.to_json()))) == flow


def test_three_passes():
    names = "explicit-gemm", "fetch-on-demand", "implicit-gemm-sorted"
    assert [flow.name for flow in chosen(Dataflows(*names))] == [*names]
    assert str(Dataflows(names[0], wgrad=names[1])) == "explicit-gemm / explicit-gemm / fetch-on-demand"
    assert chosen(Dataflows(names[0])) == chosen(names[0]) == chosen(DATAFLOWS[names[0]])
    tuned = Dataflow("mine", "fused", "pairs", "a test", grouping=Grouping("adaptive", epsilon=0.5, size=9))
    assert str(tuned) == "mine adaptive(epsilon=0.5, S=9)"
