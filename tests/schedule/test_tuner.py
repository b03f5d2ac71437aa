"""The search over groups, with made-up measurements: what it takes, what it leaves, when it stops."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pumice.errors import OptionError
from pumice.schedule.tuner import FINAL_MEASUREMENTS, Clock, TuningTask, measurements, search

NAMES = ("a", "b", "c")


class Network:
    """So many milliseconds for each group, by what it runs; counts and notes what is measured."""

    def __init__(self, costs, noise=0.0, extra=lambda assignment: 0.0, seed=0):
        self.costs, self.noise, self.extra = costs, noise, extra
        self.chance = random.Random(seed)
        self.asked = []
        self.time = 0.0

    def exact(self, assignment):
        costs = sum(ways[assignment.get(group)] for group, ways in self.costs.items())
        return 1e-3 * (costs + self.extra(assignment))

    def __call__(self, assignment):
        self.asked.append(dict(assignment))
        self.time += 1.0
        return self.exact(assignment) * (1 + self.noise * self.chance.uniform(-1, 1))

    def questions(self):
        return [TuningTask(group, tuple(c for c in ways if c is not None)) for group, ways in self.costs.items()]

    def clock(self, budget=math.inf, watch=lambda step: None):
        return Clock(budget, lambda: self.time, watch)


COSTS = {"a": {None: 4.0, "x": 3.0, "y": 5.0}, "b": {None: 2.0, "x": 2.5, "y": 1.0}, "c": {None: 1.0, "x": 1.0}}


def test_each_group_takes_its_fastest():
    network = Network(COSTS)
    found = search(network.questions(), network)
    assert found.assignment == {"a": "x", "b": "y"}
    assert (found.before, found.after) == pytest.approx((7e-3, 5e-3))
    assert found.finished and not found.ended and found.tuned_groups == ("a", "b", "c")
    assert {group: [tried.candidate for tried in each] for group, each in found.tried.items()} == {
        "a": ["x", "y"],
        "b": ["x", "y"],
        "c": ["x"],
    }
    assert found.tried["a"][0].seconds == pytest.approx(6e-3) and found.tried["a"][0].baseline == pytest.approx(7e-3)
    assert found.tried["b"][0].baseline == pytest.approx(6e-3), "what was taken before stands"


ways = st.dictionaries(st.sampled_from("uvwxyz"), st.floats(0.1, 10), max_size=4)
networks = st.lists(st.tuples(st.floats(0.1, 10), ways), min_size=1, max_size=5).map(
    lambda each: {f"g{n}": {None: default, **others} for n, (default, others) in enumerate(each)}
)


@given(networks)
def test_where_costs_add_up_nothing_much_better_is_missed(costs):
    network = Network(costs)
    found = search(network.questions(), network)
    best = 1e-3 * sum(min(group.values()) for group in costs.values())
    assert network.exact(found.assignment) <= best + len(costs) * 0.002 * found.before
    assert found.after == pytest.approx(network.exact(found.assignment))


@given(networks, st.floats(0, 0.2), st.integers(0, 100))
def test_never_worse_than_the_default_and_linear(costs, noise, seed):
    """Whatever the noise: the last measurements of both say which stands."""
    network = Network(costs, noise, seed=seed)
    found = search(network.questions(), network)
    assert found.after <= found.before
    assert found.measured == len(network.asked) <= measurements(network.questions())
    candidates = sum(len(group) - 1 for group in costs.values())
    assert measurements(network.questions()) <= 3 + FINAL_MEASUREMENTS + 2 * len(costs) + candidates
    if found.assignment:
        tail = network.asked[-FINAL_MEASUREMENTS:]
        assert tail == [{}, found.assignment] * (FINAL_MEASUREMENTS // 2)


def test_noise_is_no_reason_to_change():
    """Candidates that are the same as the default: nothing is taken, or it does no harm; and not often."""
    same = {f"g{n}": {None: 1.0, "x": 1.0, "y": 1.0, "z": 1.0} for n in range(5)}
    taken = 0
    for seed in range(40):
        network = Network(same, noise=0.02, seed=seed)
        taken += len(search(network.questions(), network).assignment)
    assert taken <= 0.1 * 40 * len(same)


def test_what_noise_does_not_hide_is_found():
    clear = {f"g{n}": {None: 1.0, "x": 0.5, "y": 1.2} for n in range(5)}
    for seed in range(20):
        network = Network(clear, noise=0.01, seed=seed)
        assert search(network.questions(), network).assignment == dict.fromkeys(clear, "x")


def test_choices_that_get_in_each_other_s_way():
    """Taken one after the other, each counts with what was taken before; together they may not be worth it."""

    def clash(assignment):
        return 3.0 if assignment.get("a") == "x" and assignment.get("b") == "y" else 0.0

    network = Network(COSTS, extra=clash)
    assert search(network.questions(), network).assignment == {"a": "x"}
    late = Network(COSTS, extra=lambda assignment: 5.0 if len(network_asked(late)) > 9 and assignment else 0.0)
    found = search(late.questions(), late)
    assert found.assignment == {} and found.after == found.before == pytest.approx(7e-3)
    assert found.finished and "all choices together took 11.000 ms, the default 7.000 ms" in found.ended


def network_asked(network):
    return network.asked


def test_what_cannot_run_is_passed_over():
    network = Network(COSTS)

    def measure(assignment):
        if assignment.get("a") == "x":
            raise OptionError("not here")
        return network(assignment)

    found = search(network.questions(), measure)
    assert found.assignment == {"b": "y"}
    assert [(tried.candidate, tried.refused) for tried in found.tried["a"]] == [("x", "not here"), ("y", "")]

    def broken(assignment):
        raise OptionError("nowhere")

    with pytest.raises(OptionError, match="nowhere"):
        search(network.questions(), broken)


@pytest.mark.parametrize("budget", range(1, 20))
def test_the_budget_is_kept(budget):
    """A measurement takes a second; what was found by then holds, compared in the end."""
    network = Network(COSTS)
    found = search(network.questions(), network, network.clock(budget))
    assert found.measured <= max(budget, 2)
    assert found.finished == (budget >= 16), found
    assert found.ended == ("" if found.finished else "the budget was spent")
    assert found.after <= found.before
    if budget >= 10:
        assert found.assignment["a"] == "x"


@pytest.mark.parametrize("after", range(2, 16))
def test_an_interrupt_keeps_what_was_found(after):
    network, counted = Network(COSTS), itertools.count()

    def measure(assignment):
        if next(counted) == after:
            raise KeyboardInterrupt
        return network(assignment)

    found = search(network.questions(), measure)
    assert not found.finished and found.ended == "it was interrupted"
    assert len(network.asked) == after, "nothing is measured any more"
    assert found.assignment.get("a") == ("x" if after >= 4 else None)
    assert found.assignment.get("b") == ("y" if after >= 9 else None)
    assert network.exact(found.assignment) <= network.exact({})
    assert found.tuned_groups == tuple(name for name, end in zip(NAMES, (6, 10, 12), strict=True) if after >= end)


def test_an_interrupt_before_anything_was_found_goes_through():
    def measure(assignment):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search([], measure)


def test_going_on_from_what_stands():
    network = Network(COSTS)
    found = search([TuningTask("b", ("x", "y"))], network, start={"a": "x"})
    assert found.assignment == {"a": "x", "b": "y"} and found.before == pytest.approx(7e-3)
    assert all(asked in ({}, *({"a": "x", **more} for more in ({}, {"b": "x"}, {"b": "y"}))) for asked in network.asked)


def test_every_step_is_told():
    network, steps = Network(COSTS), []
    found = search(network.questions(), network, network.clock(1000, steps.append))
    assert [step.done for step in steps] == list(range(1, found.measured + 1))
    assert {step.total for step in steps} == {measurements(network.questions())}
    assert steps[0].left == pytest.approx(measurements(network.questions()) - 1)
    assert [step.left for step in steps] == sorted((step.left for step in steps), reverse=True)
    assert {(step.group, step.candidate) for step in steps} >= {("a", "x"), ("b", "y"), ("c", None)}
    assert steps[-1].best <= steps[-1].before


def test_without_questions_the_default_is_measured():
    network = Network({"a": {None: 1.0}})
    found = search([], network)
    assert (found.assignment, found.before, found.after, found.finished) == ({}, 1e-3, 1e-3, True)


# Parts of the work
class Passes(Network):
    """Groups of which each names its part; a part's time is that of its groups, and of what all parts share."""

    def __init__(self, costs, parts, shared=1.0, **more):
        super().__init__(costs, **more)
        self.parts, self.shared, self.asked_of = parts, shared, []

    def part(self, assignment, part):
        self.asked_of.append((dict(assignment), part))
        self.time += 0.5
        own = (ways[assignment.get(group)] for group, ways in self.costs.items() if self.parts[group] == part)
        return 1e-3 * (self.shared + sum(own))

    def questions(self):
        return [replace(task, part=self.parts[task.group]) for task in super().questions()]

    def found(self, **more):
        return search(self.questions(), self, self.clock(), measure_part=self.part, **more)


PARTS = {"a": "forward", "b": "wgrad", "c": "forward"}


def test_a_trial_measures_its_part_alone():
    network = Passes(COSTS, PARTS)
    found = network.found()
    assert found.assignment == {"a": "x", "b": "y"}
    assert (found.before, found.after) == pytest.approx((7e-3, 5e-3)), "of the whole"
    assert found.tried["a"][0].seconds == pytest.approx(5e-3) and found.tried["a"][0].baseline == pytest.approx(6e-3)
    assert found.tried["b"][1].seconds == pytest.approx(2e-3) and found.tried["b"][1].baseline == pytest.approx(3e-3)
    # The whole: the default twice, each of the winners, and the last comparison.
    assert len(network.asked) == 2 + 2 + FINAL_MEASUREMENTS
    assert {part for _, part in network.asked_of} == {"forward", "wgrad"}
    assert found.measured == len(network.asked) + len(network.asked_of) <= measurements(network.questions())


def test_what_wins_in_its_part_and_slows_the_whole_is_dropped():
    network = Passes(COSTS, PARTS, extra=lambda assignment: 2.0 * (assignment.get("a") == "x"))
    found = network.found()
    assert found.assignment == {"b": "y"} and found.after == pytest.approx(6e-3)


@given(networks, st.floats(0, 0.2), st.integers(0, 100))
def test_parts_are_never_worse_than_the_default_and_linear(costs, noise, seed):
    parts = {group: "forward" if n % 2 else "wgrad" for n, group in enumerate(costs)}
    network = Passes(costs, parts, noise=noise, seed=seed)
    found = network.found()
    assert found.after <= found.before
    assert found.measured == len(network.asked) + len(network.asked_of) <= measurements(network.questions())


def test_an_end_within_a_part_keeps_what_was_found():
    network = Passes(COSTS, PARTS)

    def watch(step):
        if step.group == "b" and step.candidate == "y":
            raise KeyboardInterrupt

    found = search(network.questions(), network, network.clock(watch=watch), measure_part=network.part)
    assert found.assignment["a"] == "x" and found.after < found.before and not found.finished
