"""pm.tune in the mode "grouping": epsilon and S of each layer by the latency of the layer, and what is kept of them."""

import math
import multiprocessing
import re
from dataclasses import replace

import pytest
import torch
from engine import tuners
from torch import nn

import pumice as pm
from pumice.engine import grouping_tuning, tuned_network
from pumice.engine.grouping_tuning import ADAPTIVE, DEFAULT, GroupingRun, grouping_flows, layer_kinds
from pumice.engine.groups import observe_calls
from pumice.engine.subject import subject
from pumice.errors import OptionError
from pumice.nn.conv import Convolution
from pumice.ops import DATAFLOWS, Grouping
from pumice.schedule.grouping_search import UNTUNED, products, search_space
from pumice.schedule.tuned_plans import Plans
from pumice.schedule.tuner import Clock
from pumice.testing import assert_close, random_tensor

SPAWN = multiprocessing.get_context("spawn")
FUSED = "gather-gemm-scatter-fused-adaptive"


def network(width=0.125):
    torch.manual_seed(0)
    return pm.models.MinkUNet(width=width).eval()


def flows(model):
    return {name: m.dataflow for name, m in model.named_modules() if isinstance(m, Convolution)}


@pytest.fixture
def x():
    return random_tensor(400, 4)


class Fake:
    """Latencies by rule in place of a clock: seconds of a launch, and of a row multiplied. again: factor on what is not
    the default when it is timed once more."""

    def __init__(self, monkeypatch):
        self.launch, self.row, self.count, self.again, self.timed = 1e-3, 1e-6, 0, 1.0, set()
        monkeypatch.setattr(grouping_tuning, "latency", self.latency)

    def latency(self, call, device, best):
        self.count += 1
        x, weight, found, *_, flow = call.args
        if flow is None:
            return 0.5
        key = id(x), flow.movement, products(flow.grouping, tuple(found.pairs().sizes.tolist()))
        known = key in self.timed and flow.grouping != UNTUNED
        self.timed.add(key)
        return self.seconds(found, flow) * (self.again if known else 1.0)

    def seconds(self, found, flow):
        counts = tuple(found.pairs().sizes.tolist())
        made = products(flow.grouping, counts)
        slow = 1.0 if flow.movement == "locality-aware" else 2.0
        return slow * sum(self.launch + self.row * len(taps) * max(counts[tap] for tap in taps) for taps in made)


@pytest.fixture
def fake(monkeypatch):
    return Fake(monkeypatch)


def cheapest(fake, calls, flow):
    return min(sum(fake.seconds(call.found, replace(flow, grouping=how)) for call in calls) for how in search_space())


# What is found
def test_every_layer_gets_the_fastest_grouping(fake, x):
    net, samples = network(), [x, random_tensor(900, 4, seed=1)]
    found = pm.tune(net, samples, "grouping", progress=False)
    tuned = subject(net, samples, "inference")
    observed, scenes = observe_calls(tuned)
    kinds = layer_kinds(observed.groups, scenes)
    assert {name for kind in kinds for name in kind.layers} == set(flows(net)) and len(kinds) == len(found.choices)
    for kind in kinds:
        flow = net.get_submodule(next(iter(kind.layers))).dataflow
        assert flow.name == DEFAULT and flow.grouping.kind == "adaptive" and len(kind.calls) == 2
        assert sum(fake.seconds(call.found, flow) for call in kind.calls) == pytest.approx(
            cheapest(fake, kind.calls, flow)
        )
    assert flows(net) == dict(found.flows) and found.finished and found.mode == "grouping" and found.speedup > 1
    assert len({str(flow.grouping) for flow in flows(net).values()}) > 1, "not all alike"
    text = str(found)
    assert re.search(r"k3 at \d, \d+-\d+ .* ms a layer, .* by default; fastest of \d+ kinds of products by 98", text)
    assert "note: the planner's choice for these layers takes 21000.000 ms" in text
    layers = [(len(kind.layers), call) for kind in kinds for call in kind.calls]
    want = sum(count * fake.seconds(call.found, DATAFLOWS[DEFAULT]) for count, call in layers) / 2
    assert found.before.total == pytest.approx(want) and found.before.note in text
    with torch.no_grad():
        got = net(x).feats
        found.remove(net)
        assert set(flows(net).values()) == {None}
        assert_close(got, net(x).feats)


def test_what_costs_decides(fake, x):
    """Dear launches join offsets, dear rows part them."""
    groups = []
    for launch, row in ((1.0, 0.0), (0.0, 1.0)):
        fake.launch, fake.row = launch, row
        net = network()
        pm.tune(net, [x], "grouping", progress=False, fresh=True)
        _, ((*_, call),) = observe_calls(subject(net, [x], "inference"))
        assert call.name.startswith("decoders.3") and call.found.volume == 27
        counts = tuple(call.found.pairs().sizes.tolist())
        groups.append(products(call.layer.dataflow.grouping, counts))
    assert len(groups[0]) == 2 and len(groups[1]) > 10


def test_kinds_of_layers(x):
    """Of one map and one pair of widths; a strided layer and its inverse are two."""
    net = network()
    observed, scenes = observe_calls(subject(net, [x], "inference"), ["stem.0.0"])
    kinds = {kind.name: kind for kind in layer_kinds(observed.groups, scenes)}
    assert "stem.0.0" not in kinds["k3 at 1, 4-4"].layers and {*kinds["k3 at 1, 4-4"].layers} == {"stem.1.0"}
    assert {"k2 s2 at 1, 4-4", "k2 s2 at 1 transposed, 12-12"} <= {*kinds}
    assert sum(len(kind.layers) for kind in kinds.values()) == 41 and len(kinds) == len({*kinds})
    assert [*kinds.values()] == sorted(kinds.values(), key=lambda kind: -kind.predicted)


def test_several_dataflows(fake, x):
    net = network()
    found = pm.tune(net, [x], "grouping", candidates=[FUSED, DEFAULT], progress=False)
    assert {flow.name for flow in flows(net).values()} == {DEFAULT}
    assert {trial.flow.split()[0] for choice in found.choices for trial in choice.trials} == {FUSED, DEFAULT}
    assert [flow.name for flow in grouping_flows("all")] == list(ADAPTIVE) and len(ADAPTIVE) == 3


# Never worse
def test_never_worse_than_the_default(fake, x):
    """What is slower when it is timed again is dropped, and the default stays."""
    fake.again = 100.0
    net = network()
    found = pm.tune(net, [x], "grouping", progress=False)
    assert set(flows(net).values()) == {DATAFLOWS[DEFAULT]} and found.speedup == 1.0
    assert all("the default is fastest" in choice.why for choice in found.choices)


def test_never_worse_by_the_real_clock(x):
    net = network()
    with torch.no_grad():
        want = net(x).feats
        found = pm.tune(net, [x], "grouping", budget=30, progress=False)
        assert_close(net(x).feats, want)
    assert found.after.total <= found.before.total and found.seconds < 60
    for choice in found.choices:
        assert DEFAULT in {trial.flow for trial in choice.trials}, "the default is among those tried"
        assert list(choice.trials) == sorted(choice.trials, key=lambda trial: trial.seconds)


def test_what_does_not_fit_is_not_taken(fake, x, monkeypatch):
    def latency(call, device, best):
        flow = call.args[-1]
        if flow is not None and flow.grouping.epsilon > 0.5:
            raise torch.OutOfMemoryError("no room")
        return Fake.latency(fake, call, device, best)

    fake.row = 0.0
    monkeypatch.setattr(grouping_tuning, "latency", latency)
    net = network()
    found = pm.tune(net, [x], "grouping", progress=False)
    assert all(flow.grouping.epsilon <= 0.5 for flow in flows(net).values())
    assert any(trial.seconds == math.inf for choice in found.choices for trial in choice.trials)


# Kept
def test_kept_and_found_again(fake, x, own, monkeypatch):
    first = pm.tune(network(), [x], "grouping", progress=False)
    count, net = fake.count, network()
    theirs = Plans(own.path)
    monkeypatch.setattr(tuned_network, "plans", lambda: theirs)
    again = pm.tune(net, [random_tensor(390, 4, seed=3)], "grouping", progress=False)
    assert again.reused and fake.count == count and flows(net) == dict(first.flows) and again.before == first.before
    assert "note: tuned on" in str(again)
    ((key, plan),) = own.all().items()
    assert key.mode == f"inference, grouping of {DEFAULT}" and plan.finished
    assert not pm.tune(net, [x], "grouping", progress=False, fresh=True, save=False).reused and fake.count > count
    # A plan of dataflows is another one.
    assert not pm.tune(network(), [x], budget=0.1, progress=False).reused and len(own.all()) == 2


def test_kept_for_another_process(tmp_path):
    path, queue = tmp_path / "plans.json", SPAWN.Queue()
    for reused in (False, True):
        process = SPAWN.Process(target=tuners.tune_groupings, args=(path, queue))
        process.start()
        found, told = queue.get(timeout=120)
        process.join()
        assert process.exitcode == 0 and found == reused
    assert len(told) == 2 and all("adaptive" in text for text in told)


@pytest.mark.parametrize("change", ["data", "width", "dataflow", "dtype"])
def test_other_data_widths_and_dataflows_are_tuned_apart(fake, x, own, change):
    """The strategies of table 1; of another device as well, whose name is in the key."""
    pm.tune(network(), [x], "grouping", progress=False)
    net, samples, candidates = network(), [x], None
    if change == "data":
        samples = [random_tensor(3000, 4)]
    elif change == "width":
        net = network(0.25)
    elif change == "dataflow":
        candidates = [FUSED]
    else:
        net, samples = net.double(), [x.double()]
    assert not pm.tune(net, samples, "grouping", candidates=candidates, progress=False).reused and len(own.all()) == 2


# Cut short
def test_a_budget_that_is_spent_and_a_later_tune(fake, x, own):
    net, now = network(), [0.0]

    def spent(step):
        now[0] += 30.0

    tuned = subject(net, [x], "inference")
    run = GroupingRun(tuned, grouping_flows(None), Clock(100.0, lambda: now[0], spent))
    found = run.result(False, True)
    assert not found.finished and len(run.found) == 4 and "note: the budget was spent" in str(found)
    assert sum(choice.asked for choice in found.choices) == 4
    ((_, plan),) = own.all().items()
    assert not plan.finished and plan.tuned_groups == tuple(run.found)
    steps = []
    later = pm.tune(net, [x], "grouping", progress=steps.append)
    assert later.finished and not {step.group for step in steps} & {*plan.tuned_groups}
    assert (
        dict(later.flows).items()
        >= {name: flow for name, flow in found.flows.items() if flow.grouping != UNTUNED}.items()
    )
    assert {choice.why for choice in later.choices if choice.group in plan.tuned_groups} == {"tuned before"}


def test_ctrl_c_keeps_what_was_found(fake, x):
    def stop(step):
        if step.done == 3:
            raise KeyboardInterrupt

    net = network()
    found = pm.tune(net, [x], "grouping", progress=stop, save=False)
    assert not found.finished and "note: it was interrupted" in str(found) and None not in flows(net).values()

    def at_once(step):
        raise KeyboardInterrupt

    other = network()
    with pytest.raises(KeyboardInterrupt):
        pm.tune(other, [x], "grouping", progress=at_once, save=False)
    assert set(flows(other).values()) == {None}


def test_what_was_set_by_hand_stays(fake, x):
    net = network()
    net.stem[0][0].dataflow = "explicit-gemm"
    found = pm.tune(net, [x], "grouping", progress=False)
    assert net.stem[0][0].dataflow == "explicit-gemm" and "stem.0.0" not in found.flows


REFUSED = [
    ("mode 'grouping' tunes gather-.*-adaptive; found explicit-gemm", {"candidates": ["explicit-gemm"]}),
    ("found gather-gemm-scatter-fused-fixed", {"candidates": ["gather-gemm-scatter-fused-fixed"]}),
    ("'all' or a list of dataflows", {"candidates": FUSED}),
    ("bind='all' in mode 'grouping'", {"bind": "all"}),
    ("budget is a number of seconds above 0, found 0", {"budget": 0}),
    ("has no convolution of pumice.nn", {"model": nn.Linear(3, 3)}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "given"), REFUSED, ids=str)
def test_what_is_refused(message, given, x):
    with pytest.raises(OptionError, match=message):
        pm.tune(**{"model": network(), "samples": [x], "mode": "grouping", **given})


def test_groupings_of_ones_own_are_started_from_the_default(fake, x):
    own = replace(DATAFLOWS[FUSED], grouping=Grouping("adaptive", 0.7, 3))
    assert grouping_flows([own]) == (DATAFLOWS[FUSED],)
