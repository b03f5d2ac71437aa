"""Algorithm 5: the pair of epsilon and S of the least total latency, each set of products timed once."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pumice.errors import OptionError
from pumice.schedule.dataflow import Grouping, padding
from pumice.schedule.grouping_search import EPSILONS, SIZES, UNTUNED, products, search_grouping, search_space

HALF = st.lists(st.integers(0, 3000), min_size=1, max_size=13)
COUNTS = st.builds(lambda half: (*half, 5000, *half[::-1]), HALF) | HALF.map(tuple)


def cost(counts, grouping, launch=2.0, row=0.01):
    """Milliseconds by hand: a launch for each product, and a time for each row with the padded ones."""
    return sum(launch + row * len(taps) * max(counts[tap] for tap in taps) for taps in products(grouping, counts))


def test_the_space_of_the_paper():
    space = search_space()
    assert 900 < len(space) < 1000 and space[0] == UNTUNED == Grouping("adaptive") and len({*space}) == len(space)
    assert {grouping.epsilon for grouping in space} >= {0.0, 1.0} and 0 in SIZES
    counts = (3, 5, 9, 90, 9, 5, 3)
    # Its ends are the dense, separate and symmetric ones.
    assert products(Grouping("adaptive", 1.0, SIZES[-1]), counts) == ((0, 1, 2, 4, 5, 6), (3,))
    assert products(Grouping("adaptive", 0.0, SIZES[-1]), counts) == products(Grouping("symmetric"), counts)
    assert products(Grouping("adaptive", 1.0, 0), counts) == ((0,), (1,), (2,), (4,), (5,), (6,), (3,))


@settings(max_examples=25, deadline=None)
@given(st.lists(COUNTS, min_size=1, max_size=3))
def test_the_best_of_all_pairs_is_found(samples):
    """As by the two loops of the algorithm, which try every pair on every sample."""
    asked = []

    def seconds(sample, grouping, least):
        asked.append((sample, products(grouping, samples[sample])))
        return cost(samples[sample], grouping)

    found = search_grouping(samples, seconds)
    pairs = [UNTUNED, *(Grouping("adaptive", *pair) for pair in product(EPSILONS, SIZES))]
    assert found.seconds[found.best] == pytest.approx(min(sum(cost(own, how) for own in samples) for how in pairs))
    assert found.seconds[found.best] <= found.untuned
    assert len(asked) == len({*asked}), "products are timed once for each sample"


def test_what_costs_decides():
    """Dear launches join everything, dear rows nothing, and both of them what is alike."""
    counts = (10, 11, 12, 500, 510, 90_000, 510, 500, 12, 11, 10)

    def best(launch, row):
        return products(search_grouping([counts], lambda _, how, least: cost(counts, how, launch, row)).best, counts)

    assert best(1.0, 0.0) == ((0, 1, 2, 3, 4, 6, 7, 8, 9, 10), (5,))
    assert all(padding(counts, taps) == 0 for taps in best(0.0, 1.0))
    assert best(50.0, 0.5) == ((0, 1, 2, 8, 9, 10), (3, 4, 6, 7), (5,))


def test_a_draw_keeps_the_default_and_the_least_is_told():
    told = []

    def seconds(sample, grouping, least):
        told.append(least)
        return 1.0 if len(told) == 1 else 2.0

    found = search_grouping([(5, 9, 30, 2)], seconds)
    assert told[:2] == [math.inf, 1.0] and found.best == UNTUNED
    assert search_grouping([(5, 5)], lambda *_: 1.0).best == UNTUNED
    with pytest.raises(OptionError, match="no room"):
        search_grouping([(5, 5)], lambda *_: (_ for _ in ()).throw(OptionError("no room")))
