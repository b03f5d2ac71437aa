"""Dataflows and groupings: values that print and last, and pure functions of the counts of pairs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pumice.errors import OptionError
from pumice.schedule.dataflow import DATAFLOWS, Dataflow, Dataflows, chosen
from pumice.schedule.grouping import GROUPINGS, Group, Grouping, padding

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
    """Of the taps in a group, and of the groups by their first taps; the middle one, alone, is the last."""
    groups = how.groups(counts)
    assert all(list(group.taps) == sorted(group.taps) for group in groups)
    firsts = [group.taps[0] for group in groups]
    assert firsts == sorted(firsts)


@given(COUNTS, SHARE, SIZE)
def test_adaptive_groups_are_padded_within_epsilon(counts, epsilon, size):
    """A batched group is below S; a run ends only where the next would be too much."""
    for group in Grouping("adaptive", epsilon=epsilon, size=size).groups(counts):
        if group.batched:
            assert padding(counts, group.taps) <= epsilon
            assert max(counts[tap] for tap in group.taps) < size


@given(COUNTS)
def test_the_ends_of_adaptive_are_the_others(counts):
    """epsilon 0 groups what is as long, as symmetric does at least; S = 0 multiplies all plainly; epsilon 1 runs on."""
    assert not any(group.batched for group in Grouping("adaptive", size=0).groups(counts))
    whole = Grouping("adaptive", epsilon=1.0, size=1000).groups(counts)
    middle = len(counts) % 2 and len(counts) > 1 and counts == counts[::-1]
    assert len(whole) == 1 + bool(middle)


def test_the_groups_of_a_submanifold_map():
    counts = [3, 5, 6, 90, 6, 5, 3]
    alone = Group((3,), False)
    assert Grouping("separate").groups(counts) == tuple(Group((tap,), False) for tap in range(7))
    assert Grouping("symmetric").groups(counts) == (*(Group((k, 6 - k), True) for k in range(3)), alone)
    assert Grouping("fixed", 2).groups(counts) == (Group((0, 1, 5, 6), True), Group((2, 4), True), alone)
    assert Grouping("adaptive", epsilon=0.2).groups(counts) == (Group((0, 1, 5, 6), True), Group((2, 4), True), alone)
    assert Grouping("adaptive", epsilon=0.2, size=6).groups(counts)[1] == Group((2, 4), False)
    assert padding(counts, (0, 1, 5, 6)) == pytest.approx(0.2)


def test_the_groups_of_a_strided_map():
    counts = [10, 9, 12, 30]
    assert Grouping("symmetric").groups(counts) == tuple(Group((tap,), False) for tap in range(4))
    assert Grouping("fixed").groups(counts) == (Group((0, 1, 2, 3), True),)
    assert Grouping("adaptive").groups(counts) == (Group((0, 1, 2), True), Group((3,), False))


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
