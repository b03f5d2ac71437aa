"""Dataflows and groupings: values that print and last, and pure functions of the counts of pairs."""

import itertools
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
    spread,
)

NUMBERS = st.lists(st.integers(0, 50), min_size=1, max_size=30)
COUNTS = NUMBERS | st.builds(lambda half, middle: [*half, *middle, *half[::-1]], NUMBERS, st.just([]) | st.just([60]))
"""Of any map, and of submanifold ones."""
SHARE, SIZE = st.floats(0, 1, allow_nan=False), st.integers(0, 60)
HOW = st.builds(Grouping, st.sampled_from(sorted(GROUPINGS)), st.integers(1, 5), SHARE, SIZE)


@given(HOW, COUNTS)
def test_every_tap_is_in_one_group(how, counts):
    groups = how.groups(counts)
    assert sorted(tap for group in groups for tap in group.taps) == list(range(len(counts)))


@given(HOW, COUNTS)
def test_groups_keep_the_order(how, counts):
    """Of the taps in a group. Runs of taps go from the ends to the middle, which is last where it is alone."""
    groups = how.groups(counts)
    assert all(list(group.taps) == sorted(group.taps) for group in groups)
    if how.kind == "adaptive":
        depths = [min(tap, len(counts) - 1 - tap) for group in groups for tap in group.taps[:1]]
        assert depths == sorted(depths)
    else:
        assert [group.taps[0] for group in groups] == sorted(group.taps[0] for group in groups)


@given(COUNTS, SHARE, SIZE)
def test_adaptive_groups_are_spread_within_epsilon(counts, epsilon, size):
    """And padded by less; batched below S alone; the first tap of the next group would be too much."""
    groups = Grouping("adaptive", epsilon=epsilon, size=size).groups(counts)
    for group in groups:
        assert 0 <= padding(counts, group.taps) <= spread(counts, group.taps) + 1e-12
        assert spread(counts, group.taps) <= epsilon or len(group.taps) == 1
        assert group.batched == (len(group.taps) > 1 and max(counts[tap] for tap in group.taps) < size)
    if counts != counts[::-1]:
        order = [tap for k in range(len(counts)) for tap in (k, len(counts) - 1 - k)][: len(counts)]
        for group, after in itertools.pairwise(groups):
            first = min(after.taps, key=order.index)
            assert spread(counts, [*group.taps, first]) > epsilon


@given(COUNTS)
def test_the_ends_of_adaptive_are_the_others(counts):
    """Epsilon 0 parts no twos; S = 0, which is where TorchSparse is without tuning, multiplies all plainly; epsilon 1
    runs on."""
    assert not any(group.batched for group in Grouping("adaptive", epsilon=0.0, size=0).groups(counts))
    whole = Grouping("adaptive", epsilon=1.0, size=1000).groups(counts)
    mirrored = len(counts) > 1 and counts == counts[::-1]
    assert len(whole) == 1 + (mirrored and len(counts) % 2)
    if mirrored:
        met = {tap: group.taps for group in Grouping("adaptive", epsilon=0.0).groups(counts) for tap in group.taps}
        assert all(len(counts) - 1 - tap in taps for tap, taps in met.items())


def test_the_groups_of_a_submanifold_map():
    counts = [3, 5, 6, 90, 6, 5, 3]
    alone = OffsetGroup((3,), False)
    assert Grouping("separate").groups(counts) == tuple(OffsetGroup((tap,), False) for tap in range(7))
    assert Grouping("symmetric").groups(counts) == (*(OffsetGroup((k, 6 - k), True) for k in range(3)), alone)
    assert Grouping("fixed", 2).groups(counts) == (OffsetGroup((0, 1, 5, 6), True), OffsetGroup((2, 4), True), alone)
    # 1 - 3 / 5 is above 0.3, 1 - 5 / 6 is not.
    two, four = OffsetGroup((0, 6), True), OffsetGroup((1, 2, 4, 5), True)
    assert Grouping("adaptive", epsilon=0.3).groups(counts) == (two, four, alone)
    assert Grouping("adaptive", epsilon=0.3, size=6).groups(counts) == (two, four._replace(batched=False), alone)
    assert padding(counts, four.taps) == pytest.approx(1 / 12) and spread(counts, four.taps) == pytest.approx(1 / 6)


def test_the_groups_of_a_strided_map():
    """Taps are taken from the ends here too: 0, 3, 1, 2."""
    counts = [10, 9, 30, 12]
    assert Grouping("symmetric").groups(counts) == tuple(OffsetGroup((tap,), False) for tap in range(4))
    assert Grouping("fixed").groups(counts) == (OffsetGroup((0, 1, 2, 3), True),)
    assert Grouping("adaptive").groups(counts) == (OffsetGroup((0, 1, 3), True), OffsetGroup((2,), False))
    # The middle tap of an odd kernel is an ordinary one where not every row meets itself.
    assert Grouping("adaptive").groups([7, 8, 9]) == (OffsetGroup((0, 1, 2), True),)


@pytest.mark.parametrize("bad", [{"kind": "some"}, {"epsilon": 1.5}, {"width": 0}, {"size": -1}], ids=str)
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
