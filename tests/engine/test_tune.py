"""pm.tune: what it chooses, keeps, uses again and leaves alone."""

import itertools
import math
import multiprocessing
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from engine import tuners
from nets import OneLevel
from torch import nn

import pumice as pm
from pumice.engine import tuned_network, tuning
from pumice.engine.measure import PassTiming
from pumice.engine.tuning import progress_text, watching
from pumice.errors import DeviceError, DtypeError, OptionError
from pumice.lower import dataflow as lowered
from pumice.nn.conv import convolutions
from pumice.ops import DATAFLOWS, Dataflows
from pumice.schedule.dataflow import chosen
from pumice.schedule.tile import Tile
from pumice.schedule.tuned_plans import Plans
from pumice.schedule.tuned_tiles import Key, Ledger
from pumice.schedule.tuner import Clock, SearchProgress
from pumice.testing import assert_close, random_tensor

SPAWN = multiprocessing.get_context("spawn")
EXPLICIT, FUSED, TABLE = "explicit-gemm", "gather-gemm-scatter-fused-adaptive", "implicit-gemm-table"
TRIED = [EXPLICIT, FUSED, TABLE]


def network(**more):
    torch.manual_seed(0)
    return pm.models.MinkUNet(width=0.125, **more).eval()


def flows(model):
    return {name: m.dataflow for name, m in model.named_modules() if isinstance(m, pm.nn.conv.Convolution)}


@pytest.fixture
def x():
    return random_tensor(300, 4)


class Fake:
    """Measures by a rule in place of a clock: milliseconds of a layer by its name and what it runs."""

    def __init__(self, monkeypatch, cost):
        self.cost, self.count = cost, 0
        monkeypatch.setattr(tuning._NetworkBench, "_measured", lambda bench: self.spent(bench.tuned_model.model))

    def spent(self, model):
        self.count += 1
        layers = ((name, m) for name, m in model.named_modules() if isinstance(m, pm.nn.conv.Convolution))
        total = sum(1e-3 * self.cost(name, layer.dataflow) for name, layer in layers)
        return PassTiming(total, {"conv": total}, 2 * total, "kernels")


def by_level(name, flow):
    """Explicit at the coarse levels, tables in the stem's group; the rest as it is."""
    coarse = name.startswith(("encoders.3", "decoders.0"))
    fine = name.startswith(("stem", "decoders.3.blocks"))
    return {EXPLICIT: 0.5 if coarse else 2.0, TABLE: 0.25 if fine else 3.0, None: 1.0}.get(flow, 4.0)


@pytest.fixture
def fake(monkeypatch):
    return Fake(monkeypatch, by_level)


# What is chosen
def test_every_group_gets_what_is_fastest(fake, x):
    net = network()
    found = pm.tune(net, [x], candidates=TRIED, progress=False)
    chosen = {choice.group: choice.flow for choice in found.choices}
    assert chosen.pop("k3 at 1") == TABLE
    assert {group for group, flow in chosen.items() if flow == EXPLICIT} == {"k2 s2 at 8", "k3 at 16"}
    assert flows(net)["stem.0.0"] == TABLE and flows(net)["encoders.3.blocks.0.body.0"] == EXPLICIT
    assert flows(net)["encoders.1.down.0"] is None and flows(net) == dict(found.flows)
    assert found.finished and not found.reused and found.mode == "inference" and found.device.startswith("cpu, ")
    assert found.before.total == pytest.approx(42e-3) and found.after.total == pytest.approx(42e-3 - 4.5e-3 - 3e-3)
    assert found.speedup == pytest.approx(42 / 34.5) and found.after.parts["conv"] == found.after.total
    assert fake.count <= 3 + 2 + 9 * (3 + 2) + 4 + 1, "linear in groups and candidates"


def test_the_table_says_why(fake, x):
    found = pm.tune(network(), [x], candidates=TRIED, progress=False)
    text = str(found)
    assert re.match(r"inference on cpu, 1 threads: 42.000 -> 34.500 ms a scene, 1.22x \(kernels, in \d+\.\d s\)", text)
    assert re.search(r"k3 at 1 +6 +300 +\d+\.\d +implicit-gemm-table +implicit-gemm-table -1\d\.\d %", text)
    assert re.search(r"default +best of 3 others: explicit-gemm \+", text)
    choice = next(choice for choice in found.choices if choice.group == "k3 at 1")
    assert {trial.flow for trial in choice.trials} == set(TRIED) and choice.layers[0] == "stem.0.0"
    best = min(choice.trials, key=lambda trial: trial.seconds)
    assert best.flow == TABLE and best.gain > 0.1 and best.predicted > 0 and best.passes == ("forward",)
    assert choice.predicted > 0 and choice.rows == 300 and 1 < choice.pairs < 27


def test_results_stay_the_same(x):
    """By the real clock, with a small budget, in all that makes sense on a CPU."""
    net = network()
    with torch.no_grad():
        want = net(x).feats
        found = pm.tune(net, [x, random_tensor(200, 4, seed=1)], budget=3, candidates="exhaustive", progress=False)
        assert_close(net(x).feats, want)
    assert found.after.total <= found.before.total and found.seconds < 30
    assert {trial.flow for choice in found.choices for trial in choice.trials} <= {*DATAFLOWS, "planned"}
    assert not any(re.match("implicit|fetch", t.flow) for choice in found.choices for t in choice.trials)


def test_what_pays_in_all_groups_only_is_found(monkeypatch, x):
    """Each layer that leaves the default alone costs what the maps of the others saved; a group may return."""

    def cost(name, flow):
        return {FUSED: 0.5, None: 1.0}.get(flow, 4.0) + 3.0 * (flow is None and name.startswith("stem"))

    fake = Fake(monkeypatch, cost)
    whole, mixed = fake.spent, []

    def spent(model):
        kinds = [layer.dataflow for layer in convolutions(model)]
        found = whole(model)
        mixed.append(kinds.count(None))
        return replace(found, total=found.total + 1e-3 * 40 * (0 < kinds.count(None) < len(kinds)))

    monkeypatch.setattr(fake, "spent", spent)
    net = network()
    found = pm.tune(net, [x], candidates=[FUSED, EXPLICIT], progress=False)
    assert set(flows(net).values()) == {FUSED} and found.after.total == pytest.approx(21e-3)
    assert found.finished and "gather-gemm-scatter-fused-adaptive, as in all groups" in str(found)
    assert {trial.flow for choice in found.choices for trial in choice.trials} == {"planned", EXPLICIT}


def test_only_what_is_promising_is_tried(fake, x):
    found = pm.tune(network(), [x], progress=False)
    tried = sum(len(choice.trials) for choice in found.choices)
    every = sum("cpu" in flow.devices for flow in DATAFLOWS.values())
    assert tried < 0.5 * 9 * every
    assert any("no competitive candidate" in choice.why for choice in found.choices)


def test_the_largest_groups_come_first(fake, x):
    steps = []
    found = pm.tune(network(), [x], candidates=TRIED, progress=steps.append)
    asked = list(dict.fromkeys(step.group for step in steps if step.group))
    order = sorted(found.choices, key=lambda choice: -choice.predicted)
    assert asked == [choice.group for choice in order] and asked[0].startswith("k3")
    assert [step.done for step in steps] == list(range(1, len(steps) + 1)) and steps[-1].done <= steps[-1].total


# Training
@pytest.mark.parametrize("bind", [None, *tuning.BINDINGS])
def test_training_binds_passes(monkeypatch, x, bind):
    def cost(name, flow):
        passes = [] if flow is None else enumerate(chosen(flow))
        own = [(n, None if one.name == "planned" else one.name) for n, one in passes if not one.skipped]
        return sum(by_level(name, one) / (n + 1) for n, one in own) if flow else sum(1 / (n + 1) for n in range(3))

    Fake(monkeypatch, cost)
    net = network()
    found = pm.tune(net, [x], "training", bind=bind, candidates=[EXPLICIT, TABLE], progress=False)
    assert set(found.choices[0].trials[0].passes) <= set(pm.schedule.dataflow.PASSES)
    parts = {trial.passes for choice in found.choices for trial in choice.trials}
    assert parts <= set(tuning.BINDINGS[bind or "forward with dgrad"]), "on a CPU the forward pass goes with dgrad"
    # A table is no way to gradients of weights other than that of explicit GEMM: it was tried once.
    assert flows(net)["stem.0.0"] == {"all": TABLE}.get(bind, flows(net)["stem.0.0"])
    y = net.train()(x)
    y.feats.square().mean().backward()
    assert all(p.grad is not None for p in net.parameters())


class Recorded:
    """Wraps the engines of dataflows: which passes ran in trials of which part."""

    def __init__(self, monkeypatch):
        self.part, self.ran, self.trials = "", {}, 0
        engines = {name: partial(self.run, engine) for name, engine in lowered.ENGINES.items()}
        monkeypatch.setattr(lowered, "ENGINES", engines)
        real = tuning._NetworkBench.of_part
        monkeypatch.setattr(tuning._NetworkBench, "of_part", lambda bench, *given: self.trial(real, bench, *given))

    def run(self, engine, map_pass, *given):
        self.ran.setdefault(self.part, set()).add(map_pass.name)
        return engine(map_pass, *given)

    def trial(self, real, bench, assignment, part):
        self.part, self.trials = part, self.trials + 1
        try:
            return real(bench, assignment, part)
        finally:
            self.part = ""


@pytest.mark.parametrize("bind", tuning.BINDINGS)
def test_a_trial_of_a_pass_runs_no_other(monkeypatch, x, bind):
    """By the real clock: of the other passes the layouts are built, and features and gradients are zeros."""
    seen, net = Recorded(monkeypatch), OneLevel()
    found = pm.tune(net, [x], "training", budget=4, bind=bind, candidates=[EXPLICIT, FUSED], progress=False)
    parts = {" with ".join(passes): set(passes) for passes in tuning.BINDINGS[bind]}
    if bind == "all":
        assert not seen.trials
    else:
        assert seen.trials and seen.ran and all(ran <= parts[part] for part, ran in seen.ran.items() if part)
        assert any(part and ran == parts[part] for part, ran in seen.ran.items())
    assert not any("whole training steps" in note for note in found.notes)
    assert all(flow is None or not any(one.skipped for one in chosen(flow)) for flow in flows(net).values())


class Pruned(nn.Module):
    """Keeps the voxels whose first channel is above 0: coordinates that depend on features."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pm.nn.Conv3d(4, 4, 3), pm.nn.Conv3d(4, 4, 3)

    def forward(self, x):
        y = self.first(x)
        return self.second(pm.ops.prune(y, y.feats[:, 0] > 0))


def test_a_network_whose_voxels_depend_on_features_runs_whole_steps(monkeypatch, x):
    seen = Recorded(monkeypatch)
    torch.manual_seed(0)
    found = pm.tune(Pruned(), [x], "training", budget=2, candidates=[EXPLICIT], progress=False)
    assert not seen.trials and "trials run whole training steps: its coordinates depend on features" in str(found)


def test_flows_of_passes():
    table, explicit = DATAFLOWS[TABLE], DATAFLOWS[EXPLICIT]
    own = replace(DATAFLOWS[FUSED], grouping=pm.ops.Grouping("adaptive", epsilon=0.1))
    assert tuning.flow_of({}, True) is None is tuning.flow_of({}, False)
    assert tuning.flow_of({"forward": table}, False) == TABLE and tuning.flow_of({"forward": own}, False) is own
    assert tuning.flow_of({"forward": table}, True) == Dataflows(TABLE, "planned", "planned")
    both = {"dgrad": table, "wgrad": explicit}
    assert tuning.flow_of(both, True) == Dataflows("planned", TABLE, EXPLICIT)
    assert tuning.flow_of(dict.fromkeys(("forward", "dgrad", "wgrad"), own), True) is own


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_model_is_left_as_it_was(x, mode):
    net = network().train()
    net.stem[0][1].eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    flags, chance = [m.training for m in net.modules()], torch.get_rng_state()
    pm.tune(net, [x], mode, budget=1, candidates=[EXPLICIT], progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [m.training for m in net.modules()] == flags and torch.equal(torch.get_rng_state(), chance)
    assert all(p.grad is None for p in net.parameters()) and not x.geometry.maps


# By hand, and off again
def test_what_was_set_by_hand_stays(fake, x):
    net = network()
    net.stem[0][0].dataflow = FUSED
    found = pm.tune(net, [x], candidates=TRIED, progress=False)
    assert net.stem[0][0].dataflow == FUSED and net.stem[1][0].dataflow == TABLE
    assert "stem.0.0" not in found.flows and "1 layer (stem.0.0) keep the dataflow that was set by hand" in str(found)
    net.stem[1][0].dataflow = EXPLICIT
    again = pm.tune(net, [x], candidates=TRIED, progress=False)
    assert net.stem[1][0].dataflow == EXPLICIT and "stem.1.0" not in again.flows
    for layer in convolutions(net):
        layer.dataflow = FUSED
    with pytest.raises(OptionError, match="nothing to tune: 42 layers .* set by hand"):
        pm.tune(net, [x])


def test_taken_off_and_put_on(fake, x):
    net, other = network(), network()
    found = pm.tune(net, [x], candidates=TRIED, progress=False)
    tuned = flows(net)
    found.remove(net)
    assert set(flows(net).values()) == {None}
    other.stem[0][0].dataflow = FUSED
    found.apply(nn.DataParallel(other))
    assert flows(other) == {**tuned, "stem.0.0": FUSED}
    found.remove(other)
    assert flows(other) == {**dict.fromkeys(tuned), "stem.0.0": FUSED}
    with pytest.raises(OptionError, match="CenterPointBackbone has no convolution 'stem.0.0'"):
        found.apply(pm.models.CenterPointBackbone(5))


def test_torch_compile_takes_what_was_taken_off(fake, x):
    torch.manual_seed(0)
    net = OneLevel().eval()
    found = pm.tune(net, [x], candidates=TRIED, progress=False)
    found.remove(net)
    pm.prepare(net, x)
    with torch.no_grad():
        assert_close(torch.compile(net, fullgraph=True, backend="eager")(x).feats, net(x).feats)


# Kept, and used again
def test_the_same_network_is_tuned_once(fake, x, own, monkeypatch):
    first = pm.tune(network(), [x], candidates=TRIED, progress=False)
    count, net = fake.count, network()
    assert len(own.all()) == 1
    # Another sample of the same kind, other weights, and another process's view of the file.
    theirs = Plans(own.path)
    monkeypatch.setattr(tuned_network, "plans", lambda: theirs)
    with torch.no_grad():
        net.stem[0][0].weight.mul_(2)
    again = pm.tune(net, [random_tensor(280, 4, seed=3)], candidates=TRIED, progress=False)
    assert again.reused and fake.count == count and flows(net) == dict(first.flows)
    assert again.before == first.before and again.after == first.after and again.speedup == first.speedup
    assert re.search(
        r"from the tuning cache\)\n.*\nnote: tuned on \d{4}-.* MinkUNet, 9 maps, k3 at 1: 6 layers", str(again), re.S
    )
    assert not pm.tune(net, [x], candidates=TRIED, progress=False, fresh=True).reused and fake.count > count
    assert len(own.all()) == 1, "the newer one stands in the older one's place"


def test_another_data_set_is_another_plan(fake, own):
    """It is said that there is one, its choices are tried first, and both are kept."""
    pm.tune(network(), [random_tensor(400, 4)], candidates=TRIED, progress=False)
    count, steps, net = fake.count, [], network()
    found = pm.tune(net, [random_tensor(2000, 4)], candidates=TRIED, progress=steps.append)
    assert not found.reused and fake.count > count and len(own.all()) == 2
    assert re.search(r"note: tuned on .* for other scenes \(MinkUNet, .* 400 rows, .*\): tuned again", str(found))
    tried = [str(step.candidate) for step in steps if step.group == "k3 at 1" and step.candidate is not None]
    assert tried[0] == TABLE


@pytest.mark.parametrize("change", ["width", "mode", "dtype", "hand", "autocast", "candidates"])
def test_what_a_plan_is_not_for(fake, x, change):
    pm.tune(network(), [x], candidates=TRIED, progress=False)
    net, mode, candidates = network(), "inference", TRIED
    cast = torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast")
    if change == "width":
        net = pm.models.MinkUNet(width=0.25)
    elif change == "mode":
        mode = "training"
    elif change == "dtype":
        net, x = net.double(), x.double()
    elif change == "hand":
        net.stem[0][0].dataflow = FUSED
    elif change == "candidates":
        candidates = [EXPLICIT]
    with cast:
        found = pm.tune(net, [x], mode, candidates=candidates, progress=False)
    assert not found.reused
    if change == "candidates":
        assert "for other dataflows" in str(found) and TABLE not in flows(net).values()


def test_nothing_is_kept_where_that_is_not_wanted(fake, x, own):
    pm.tune(network(), [x], candidates=TRIED, progress=False, save=False)
    assert own.all() == {} and not own.path.exists()


# Cut short
class Interrupts:
    """Ctrl-C at the n-th measurement."""

    def __init__(self, monkeypatch, cost, at):
        self.fake, self.left = Fake(monkeypatch, cost), at
        monkeypatch.setattr(tuning._NetworkBench, "_measured", self.measured)
        self.patch = monkeypatch

    def measured(self, bench=None):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.fake.spent(self.model)


def test_ctrl_c_keeps_what_was_found_and_a_later_tune_goes_on(monkeypatch, x, own):
    net = network()
    # Two measurements of the network as it is, two of one dataflow everywhere, four for each of the three largest
    # groups, five for the next, which gains, and one of the fifth.
    stop = Interrupts(monkeypatch, by_level, 2 + 2 + 3 * 4 + 5 + 1)
    stop.model = net
    found = pm.tune(net, [x], candidates=TRIED, progress=False)
    assert not found.finished and ", unfinished" in str(found) and "note: it was interrupted" in str(found)
    assert net.stem[0][0].dataflow == TABLE and flows(net)["encoders.3.blocks.0.body.0"] is None
    ((_, plan),) = own.all().items()
    assert (
        not plan.finished
        and plan.tuned_groups == ("k3 at 2", "k3 at 4", "k3 at 8", "k3 at 1")
        and plan.flows == {"k3 at 1": DATAFLOWS[TABLE]}
    )
    fake, net, steps = Fake(monkeypatch, by_level), network(), []
    again = pm.tune(net, [x], candidates=TRIED, progress=steps.append)
    assert again.finished and not again.reused
    assert {step.group for step in steps} == {choice.group for choice in again.choices} - {*plan.tuned_groups} | {""}
    assert net.stem[0][0].dataflow == TABLE and net.encoders[3].blocks[0].body[0].dataflow == EXPLICIT
    assert "tuned before" in next(choice.why for choice in again.choices if choice.group == "k3 at 1")
    count = fake.count
    assert pm.tune(network(), [x], candidates=TRIED, progress=False).reused and fake.count == count


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_ctrl_c_again_loses_nothing(monkeypatch, x, own, at):
    for left in (2 + 2 + 3 * 4 + 5 + 1, at):
        net = network()
        stop = Interrupts(monkeypatch, by_level, left)
        stop.model = net
        try:
            found = pm.tune(net, [x], candidates=TRIED, progress=False)
        except KeyboardInterrupt:
            # Nothing was measured at all: the model is as it came.
            assert at == 0 and set(flows(net).values()) == {None}
            continue
        assert not found.finished and net.stem[0][0].dataflow == TABLE
    ((_, plan),) = own.all().items()
    assert plan.flows == {"k3 at 1": DATAFLOWS[TABLE]} and len(plan.tuned_groups) == 4 and not plan.finished


def test_ctrl_c_before_anything_was_found(monkeypatch, x):
    net = network()
    net.stem[0][0].dataflow = net.stem[0][0].tuned = EXPLICIT
    stop = Interrupts(monkeypatch, by_level, 0)
    stop.model = net
    with pytest.raises(KeyboardInterrupt):
        pm.tune(net, [x], candidates=TRIED, progress=False)
    assert flows(net)["stem.0.0"] == EXPLICIT and set(flows(net).values()) == {EXPLICIT, None}


def test_a_budget_that_is_spent(monkeypatch, x):
    time = itertools.count()
    Fake(monkeypatch, by_level)
    monkeypatch.setattr(tuning, "Clock", lambda budget, watch: Clock(88, lambda: float(next(time)), watch))
    found = pm.tune(network(), [x], candidates=TRIED, progress=False)
    assert not found.finished and "note: the budget was spent" in str(found)
    assert (
        any(choice.why == "skipped: out of budget" for choice in found.choices)
        and found.after.total < found.before.total
    )


def test_what_fails_for_the_network_as_it_is_goes_through(monkeypatch, x):
    def fails(bench):
        raise DtypeError("no such product")

    monkeypatch.setattr(tuning._NetworkBench, "_measured", fails)
    net = network()
    net.stem[0][0].dataflow = net.stem[0][0].tuned = EXPLICIT
    with pytest.raises(DtypeError, match="no such product"):
        pm.tune(net, [x], progress=False)
    assert flows(net)["stem.0.0"] == EXPLICIT, "as it was"


def test_a_candidate_that_cannot_run(monkeypatch, x):
    def cost(name, flow):
        if flow == TABLE:
            raise torch.OutOfMemoryError("of 80 GiB")
        return by_level(name, flow)

    fake = Fake(monkeypatch, cost)
    monkeypatch.undo()
    meter = tuning.PassTimer
    monkeypatch.setattr(meter, "measure", lambda self, calls: fake.spent(net))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    net = network()
    found = pm.tune(net, [x], candidates=TRIED, progress=False, save=False, fresh=True)
    trial = next(t for choice in found.choices for t in choice.trials if t.flow == TABLE)
    assert trial.refused == "out of memory: of 80 GiB" and math.isinf(trial.seconds)
    assert found.finished and TABLE not in flows(net).values() and EXPLICIT in flows(net).values()
    assert str(trial) == "implicit-gemm-table: refused (out of memory: of 80 GiB)"


# Tiles
def test_tiles_that_do_not_help_are_forgotten(monkeypatch, x, tmp_path):
    """As on a GPU: the tiles of two groups are timed, those of one make the network slower."""
    tiles = Ledger(tmp_path / "tiles.json")
    monkeypatch.setattr(tuning, "ledger", lambda: tiles)
    net = network()
    tiles.put(Key("here", "before", (), ()), Tile(16, 16))

    def cost(name, flow):
        slower = any(key.statement == "k3 at 2" for key in tiles.all())
        return by_level(name, flow) * (1.1 if slower else 0.99 if len(tiles.all()) > 1 else 1.0)

    def timed(layer, flow, training):
        name = next(name for name, table in tables.items() if table is layer.found.table)
        if name in ("k3 at 1", "k3 at 2"):
            tiles.put(Key("here", name, (), (len(tiles.all()),)), Tile(32, 32))

    Fake(monkeypatch, cost)
    monkeypatch.setattr(tuning, "_timed", timed)
    asked = tuning.subject(net, [x], "inference")
    observed = tuning.observe(asked)
    tables = {group.name: group.calls[0].found.table for group in observed.groups}
    options = tuning._options(asked, 100, None, TRIED)
    run = tuning._TuningRun(asked, observed, options, Clock(1000))
    found = run._search({}, (), {})
    told = list(run.tiles(found))
    assert {each.group: each.kept for each in told} == {"k3 at 1": True, "k3 at 2": False}
    assert {key.statement for key in tiles.all()} == {"before", "k3 at 1"}
    assert any(str(each).startswith("k3 at 2: ") and "the network +1" in str(each) for each in told)
    short = tuning._TuningRun(asked, observed, options, Clock(10))
    assert list(short.tiles(found)) == [], "the budget does not reach for any"


def test_an_interrupt_while_tiles_are_timed(monkeypatch, x, tmp_path):
    def stop(*args):
        raise KeyboardInterrupt

    Fake(monkeypatch, by_level)
    monkeypatch.setattr(tuning, "_timed", stop)
    monkeypatch.setattr(tuning, "ledger", lambda: Ledger(tmp_path / "tiles.json"))
    asked = tuning.subject(network(), [x], "inference")
    run = tuning._TuningRun(asked, tuning.observe(asked), tuning._options(asked, 100, None, TRIED), Clock(1000))
    assert list(run.tiles(run._search({}, (), {}))) == [] and run.notes == ["tile tuning was interrupted"]


# Several processes
def test_processes_that_tune_at_once(tmp_path):
    path, start = tmp_path / "plans.json", SPAWN.Barrier(2)
    processes = [SPAWN.Process(target=tuners.tune, args=(path, mode, start)) for mode in ("inference", "training")]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert {key.mode for key in Plans(Path(path)).all()} == {"inference", "training, forward with dgrad"}


# Progress
def test_progress(capsys, monkeypatch):
    step = SearchProgress("k3 at 1", DATAFLOWS[TABLE], 3, 60, 75.0, 1e-3, 2e-3)
    assert progress_text(step) == "best 1.000 ms (2.00x)  k3 at 1: implicit-gemm-table"
    assert progress_text(replace(step, group="", candidate=None, best=math.inf)).endswith("(1.00x)  the default")
    with watching(True) as watch:
        watch(step)
    assert "3/60 1:15 left" in (err := capsys.readouterr().err) and "k3 at 1: implicit-gemm-table" in err
    for quiet in (None, False):
        with watching(quiet) as watch:
            watch(step)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with watching(None) as watch:
        watch(step)
    assert "left" in capsys.readouterr().err


# Refusals
REFUSED = [
    (OptionError, "mode='fast' is unknown; there are inference, training, grouping", {"mode": "fast"}),
    (OptionError, "budget is a number of seconds above 0, found 0", {"budget": 0}),
    (OptionError, "found nan", {"budget": math.nan}),
    (OptionError, "found '10'", {"budget": "10"}),
    (OptionError, "bind='both' in mode 'training'; in training there are", {"bind": "both", "mode": "training"}),
    (OptionError, "bind='all' in mode 'inference'", {"bind": "all"}),
    (OptionError, "'gemm' is unknown; there are explicit-gemm", {"candidates": ["gemm"]}),
    (OptionError, r"'exhaustive' or a list of dataflows, found 'explicit-gemm'", {"candidates": EXPLICIT}),
    (OptionError, r"found \[\]", {"candidates": []}),
    (OptionError, "progress takes a function of a step, True, False or None, found 'bar'", {"progress": "bar"}),
    (OptionError, "no scene", {"samples": []}),
    (DtypeError, "a sample must be a SparseTensor or a pair", {"samples": [3]}),
    (DtypeError, "model must be a torch.nn.Module, found str", {"model": "net"}),
    (OptionError, "Linear has no convolution of pumice.nn", {"model": nn.Linear(3, 3)}),
    (DeviceError, "the model is on cpu, sample 0 on meta", {"device": "meta"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "given"), REFUSED, ids=str)
def test_what_is_refused(kind, message, given, x):
    if given.pop("device", None):
        given["samples"] = [x.replace(x.feats.to("meta"))]
    with pytest.raises(kind, match=message):
        pm.tune(**{"model": network(), "samples": [x], **given})
