"""The suite tuner runs in tiny on the CPU: every study checks, times and tells; its numbers by hand."""

import importlib
import math
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness import rows as ledger
from benchmarks.harness import study as study_
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from benchmarks.peers.published import PUBLISHED
from benchmarks.report import tables as ablation_tables
from benchmarks.report.networks import parts
from benchmarks.report.results import offset_sizes
from benchmarks.scenes import network_layers
from benchmarks.scenes.network_layers import Fed, layers_of
from benchmarks.scenes.workloads import WORKLOADS, fresh
from benchmarks.suites import tuner_asked as bench_tuner_asked
from benchmarks.suites import tuner_cases
from benchmarks.suites import tuner_groupings as bench_tuner_groupings
from benchmarks.suites import tuner_layers as bench_tuner_layers
from benchmarks.suites import tuner_movement as bench_tuner_movement
from benchmarks.suites import tuner_networks as bench_tuner_networks
from benchmarks.suites import tuner_passes as bench_tuner_passes
from benchmarks.suites.tuner_asked import Answer, Asked, answered, budget, differing
from benchmarks.suites.tuner_cases import TRAINING, Subjected, Writer, subjects
from benchmarks.suites.tuner_networks import Network, Ran, checked
from benchmarks.suites.tuner_passes import CONVOLUTIONS, Taken, rows_of, tiles_of
from benchmarks.suites.tuner_ways import Gains, _say_apart
from pumice.engine import DataflowChoice, PassTiming, Trial, Tuning, tuned_network
from pumice.engine.measure import Event
from pumice.errors import OptionError, PumiceError
from pumice.lower import dataflow, reference
from pumice.schedule.dataflow import DATAFLOWS, PASSES, PLANNED, Dataflows, Grouping
from pumice.schedule.tuned_plans import Plans
from pumice.schedule.tuner import SearchProgress

CPU = torch.device("cpu")
measuring = importlib.import_module("pumice.engine.measure")


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(bench_tuner_asked, "_QUICK", 0.3)


@pytest.fixture
def setup():
    said = []
    made = Setup(CPU, True, said.append, suite="tuner")
    return made, said


def quick(study, only=""):
    said = []
    rows = list(bench.run("tuner", said.append, bench.Options(study, only, quick=True, device="cpu")))
    return "\n".join(map(str, said)), rows


def subject_of(setup, name="centerpoint-waymo-1f", mode="inference"):
    (found,) = subjects(setup, "any", (name,), mode)
    return found


WAYS = {
    "movement": {"fp32", "vectorised-fp32", "scalar", "vectorised", "fused", "locality-aware"},
    "breakdown": {"offset-by-offset", "locality-aware", "default"},
    "grouping": {"separate", "symmetric", "fixed", "adaptive", "adaptive-tuned"},
    "strategies": {"own", "other-width", "default"},
    "splits": {"1", "1-2", "0-4"},
    "sorted": {"no", "yes", "split2"},
    "reordering": {"offline", "online"},
    "hybrid": {"implicit-gemm", "weight-stationary", "all"},
    "bindings": {"forward-dgrad", "dgrad-wgrad", "all"},
    "networks": {"default", "tuned"},
    "transfer": {"native", "default", "from-centerpoint-waymo-1f"},
}


@pytest.mark.parametrize(
    "study",
    [name for name in bench.SUITES["tuner"].studies if name not in ("dataflows", "layers", "batching", "offsets")],
)
def test_every_study_in_tiny(study):
    out, rows = quick(study)
    assert rows and all(row.suite == "tuner" and row.value >= 0 and math.isfinite(row.value) for row in rows)
    places = [ablation_tables.Place.of(row.case) for row in rows]
    assert {place.study for place in places} == {study}
    timed = [(place, row) for place, row in zip(places, rows, strict=True) if row.metric == "time" and not place.group]
    ways = {place.way for place, _ in timed}
    assert ways == WAYS.get(study, ways) and len(ways) > 1
    # Whose peer is among them, on the clock of this machine, of generated scans.
    assert {row.peer for _, row in timed} <= ways and {row.clock for _, row in timed} == {"wall"}
    assert all("-generated fp32" in place.whose for place in places)
    assert ("published: no figure" in out) == (study not in PUBLISHED) and f"{study}: " in out
    # And they make a table.
    assert f"| {next(iter(ways))} |" in "\n".join(ablation_tables.tables(rows, study))


def test_dataflows_with_and_without_their_forms():
    _, rows = quick("dataflows", "surface_300/k3/C8")
    flows = {row.case.rpartition("/")[2] for row in rows}
    assert flows == {"default", *DATAFLOWS}
    assert {row.metric for row in rows} == {"time", "time with form"} and len(rows) == 2 * len(flows)
    assert {row.peer for row in rows} == {"default"}


def test_layers_one_by_one():
    said, rows = quick("layers")
    places = [ablation_tables.Place.of(row.case) for row in rows]
    assert {(place.study, place.way) for place in places} == {
        ("layers", way) for way in ("default", "unsorted", "sorted")
    }
    layers = [p.group for p in places if p.way == "default" and p.group[:2] not in ("00", "99")]
    # CenterPoint's backbone: 21 convolutions, in their order, each with its map and channels.
    assert layers == sorted(layers) and len(layers) == len(set(layers)) == 21
    assert layers[0] == "01 k3 at 1, 6-16" and layers[-1] == "21 k3x1x1 s2x1x1 at 8, 128-128"
    assert {row.metric for row in rows} == {"part:kernel", "part:other"} and all(row.value > 0 for row in rows)
    (chart,) = parts([replace(row, device="a GPU") for row in rows])
    whole, by_layer = chart.panels
    assert whole.bars == ("centerpoint-waymo-3f-generated default",) and len(by_layer.bars) == 23


def test_marks_tell_layers_apart(setup, monkeypatch):
    """As on a GPU: every mark runs a kernel, and the trace is split by them."""
    made, _ = setup
    network, trace = Network.of(made, subject_of(made)), []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: trace.append("spin_kernel"))
    real = bench_tuner_passes.Convolution.convolve
    monkeypatch.setattr(
        bench_tuner_passes.Convolution,
        "convolve",
        lambda *given: trace.extend(["neighbours", "_dot_x"]) or real(*given),
    )

    def profiled(calls):
        trace.clear()
        for call in calls:
            trace.append("spin_kernel")
            call()
            trace.append("relu")
        lost = 1 if not tries else 0
        tries.append(lost)
        return [Event(name, 2_000_000 * at, 2_000_000) for at, name in enumerate(trace[: len(trace) - 40 * lost])], []

    tries = []
    monkeypatch.setattr(bench_tuner_passes, "profiled", profiled)
    monkeypatch.setattr(bench_tuner_passes, "_on_cuda", lambda network: True)
    found = bench_tuner_passes.layered(network, network.all_in(None))
    assert tries == [1, 0], "a trace that lacks marks is taken again"
    labels = sorted(found)
    assert len(labels) == 22 and labels[-1] == bench_tuner_passes.BETWEEN
    for label in labels[:-1]:
        assert {part: times.median for part, times in found[label].items()} == pytest.approx(
            {"map": 2.0, "kernel": 2.0}
        )
    assert {part: times.median for part, times in found[labels[-1]].items()} == pytest.approx({"other": 2.0})
    assert all("convolve" not in vars(layer) for layer in network.net.modules())


def test_only_some_and_none_at_hand(monkeypatch):
    assert quick("sorted", "minkunet")[1] == []
    monkeypatch.setattr(bench_tuner_groupings, "NETWORKS", ("minkunet-kitti-1x",))
    said = []
    setup = Setup(CPU, False, said.append, suite="tuner")
    monkeypatch.setattr(Subjected, "samples", lambda *_: (_ for _ in ()).throw(OptionError("no scans here")))
    assert not list(bench_tuner_groupings.grouping(setup)) and "left out: no scans here" in said[0]


def test_a_study_that_is_not_known():
    with pytest.raises(
        OptionError, match="case 'shells' of tuner is unknown; there are movement, .*transfer, dataflows"
    ):
        quick("shells")


@pytest.mark.parametrize("study", ["movement", "sorted"])
def test_what_is_wrong_is_not_timed(study, monkeypatch):
    right = network_layers.conv_features
    monkeypatch.setattr(network_layers, "conv_features", lambda *a, **k: 1.01 * right(*a, **k))
    with pytest.raises(PumiceError, match="relative error 0.01"):
        quick(study)


def test_a_layer_that_is_wrong_is_named(setup, monkeypatch):
    made, _ = setup
    network = Network.of(made, subject_of(made))
    right = Fed.passes
    wrong = "fetch-on-demand"
    monkeypatch.setattr(Fed, "passes", lambda f, flow, t: [x * (1 + (flow == wrong)) for x in right(f, flow, t)])
    ways = {"one": network.all_in("explicit-gemm"), "two": network.each_in({network.names[3]: wrong})}
    assert list(checked(made, network, ways, str)) == ["one"]
    assert made.failures == [
        f"two: layer {network.names[3]} in {wrong}: relative error 1, expected below 0.0001; not timed"
    ]


def test_layers_of_a_network_and_what_they_multiply(setup):
    made, _ = setup
    subject = subject_of(made, "minkunet-kitti-1x")
    layers = layers_of(subject.net(made), fresh(subject.samples(made)[0]))
    assert len(layers) == 42 and len({id(one.found.table) for one in layers}) == 9
    first = layers[0]
    assert (first.inputs, first.flops) == (4, 2.0 * first.pairs * 4 * first.outputs)
    # Unsorted tiles of 64: entries by hand.
    rows = first.found.rows() >= 0
    entries = sum(int(tile.any(0).sum()) for tile in rows.split(64))
    assert tiles_of([first], 0) == (pytest.approx(64 * entries / first.pairs), math.ceil(len(rows) / 64))
    assert tiles_of(layers, 1)[0] >= 1 and tiles_of(layers, 4)[1] > tiles_of(layers, 1)[1]


def test_gradients_of_layers_and_networks(setup):
    made, _ = setup
    subject = subject_of(made, mode=TRAINING)
    network = Network.of(made, subject)
    ways = {"named": network.all_in("gather-gemm-scatter-fused-adaptive")}
    assert list(checked(made, network, ways, str)) == ["named"] and len(network.run(ways["named"])) == 2
    assert network.run(network.all_in(None))[1].numel() == sum(p.numel() for p in network.net.parameters())


def test_kernels_of_all_ways_are_compiled_first(setup, monkeypatch):
    made, _ = setup
    network = Network.of(made, subject_of(made, mode=TRAINING))
    first, *others = network.names
    flows = Dataflows("fetch-on-demand", dgrad="planned", wgrad="explicit-gemm")
    ways = [network.all_in(None), network.each_in({first: flows})]
    want = {(name, PLANNED): {first, *others} for name in PASSES}
    want |= {("forward", DATAFLOWS["fetch-on-demand"]): {first}, ("wgrad", DATAFLOWS["explicit-gemm"]): {first}}
    assert bench_tuner_networks.used(network, ways) == want
    seen = []
    monkeypatch.setattr(bench_tuner_networks, "compile_in_parallel", lambda *told: seen.append(told))
    before = {name: x.clone() for name, x in network.net.state_dict().items()}
    bench_tuner_networks.compiled(network, ways)
    assert all(torch.equal(x, before[name]) for name, x in network.net.state_dict().items())
    assert {(names, flow) for _, names, flow in seen} == {((name,), (flow,)) for name, flow in want}
    # Layers that are alike once; what is compiled can be run.
    counts = {(name, flow): len(layers) for layers, (name,), (flow,) in seen}
    assert counts["forward", DATAFLOWS["fetch-on-demand"]] == 1 < counts["forward", PLANNED] < len(network.names)
    for layers, (name,), (flow,) in seen:
        layers[0].run_pass(name, flow)


def test_in_evaluation_layers_are_compiled_with_and_without_what_follows(setup, monkeypatch):
    made, _ = setup
    network, seen = Network.of(made, subject_of(made)), []
    monkeypatch.setattr(bench_tuner_networks, "compile_in_parallel", lambda *told: seen.append(told))
    monkeypatch.setattr("pumice.engine.groups._is_fused", lambda x: True)
    bench_tuner_networks.compiled(network, [network.all_in(None)])
    (((layers, names, flows)),) = seen
    assert (names, flows) == (("forward",), (PLANNED,)) and {one.epilogue is None for one in layers} == {True, False}


# Groups of kernel offsets


def first_layer(made):
    subject = subject_of(made, "minkunet-kitti-1x")
    return bench_tuner_layers.fed(made, subject)[0]


def test_padding_of_groups(setup):
    made, _ = setup
    layer = first_layer(made)
    counts = layer.found.pairs().sizes.tolist()
    share, calls = bench_tuner_groupings.padded([layer], [Grouping("separate")])
    assert (share, calls) == (0.0, sum(count > 0 for count in counts))
    share, calls = bench_tuner_groupings.padded([layer], [Grouping("fixed")])
    first, rest = [*counts[:4], *counts[23:]], [*counts[4:13], *counts[14:23]]
    filled = 8 * max(first) - sum(first) + 18 * max(rest) - sum(rest)
    assert calls == 3 and share == pytest.approx(filled / (8 * max(first) + 18 * max(rest) + counts[13]))


@pytest.mark.parametrize("length", bench_tuner_groupings.LENGTHS)
def test_runs_of_figure_7(setup, length):
    """Batches of so many offsets, mirror images side by side, and the centre by itself."""
    made, _ = setup
    layer, how = first_layer(made), bench_tuner_groupings.Runs(length=length)
    groups = how.groups(layer.found.pairs().sizes.tolist())
    assert sorted(tap for group in groups for tap in group.taps) == list(range(27))
    assert {len(group.taps) for group in groups[:-2]} <= {length} and groups[-1].taps == (13,)
    assert len(groups) == 1 + math.ceil(26 / length)
    if length == 2:
        assert groups == Grouping("symmetric").groups(layer.found.pairs().sizes.tolist())
    assert how.groups([1] * 27) == groups, "whatever the counts"


def test_batching_tells_time_rate_and_padding():
    _, rows = quick("batching")
    places = {ablation_tables.Place.of(row.case) for row in rows}
    lengths = {str(length) for length in bench_tuner_groupings.LENGTHS}
    assert "| 26 8-8 |" in "\n".join(ablation_tables.tables(rows, "batching"))
    assert {place.way for place in places} == lengths and {place.group for place in places} == {
        "4-8",
        "8-8",
        "24-24",
        "32-24",
    }
    by_case = {(row.case, row.metric): row for row in rows}
    for (case, metric), row in by_case.items():
        if metric == "time":
            assert row.peer == "1" and by_case[case, "rate"].value == pytest.approx(
                by_case[case, "rate"].peer_value * row.ratio, rel=1e-2
            )
        if metric == "fact:padding":
            assert 0 <= row.value < 1 and (row.value == 0) == (ablation_tables.Place.of(case).way in "12")


def test_pairs_of_every_map_by_offset(setup):
    made, _ = setup
    _, rows = quick("offsets")
    places = [(ablation_tables.Place.of(row.case), row) for row in rows]
    assert {row.metric for _, row in places} == {"fact:pairs"} and {row.unit for _, row in places} == {"pairs"}
    maps = list(dict.fromkeys(place.group for place, _ in places))
    assert maps[:3] == ["0 k3x3x3", "1 k2x2x2 s2", "2 k3x3x3"] and len(maps) == 9
    found = [row.value for place, row in places if place.group == maps[0]]
    (subject,) = subjects(made, "offsets", bench_tuner_groupings.NETWORKS)
    counts = bench_tuner_layers.fed(made, subject)[0].found.pairs().sizes.tolist()
    assert found == counts[:14], "up to the centre, whose mirror images have as many"
    assert len([row for place, row in places if place.group == maps[1]]) == 8
    (chart,) = offset_sizes(rows)
    (panel,) = chart.panels
    assert panel.steps == tuple(f"W{tap}" for tap in range(14)) and [*panel.lines] == maps
    assert panel.lines[maps[0]] == tuple(counts[:14]) and panel.lines[maps[1]][8:] == (None,) * 6


def test_strategies_are_searched_on_other_scans_and_kept(setup, monkeypatch, tmp_path):
    """And those of another device are found among the plans that are kept."""
    (made, said), kept = setup, Plans(tmp_path / "plans.json")
    for module in (bench_tuner_groupings, tuned_network):
        monkeypatch.setattr(module, "plans", lambda: kept)
    monkeypatch.setattr(bench_tuner_groupings, "_limit", lambda _: 30.0)
    subject = tuner_cases.subject_of(made, "minkunet-kitti-0.5x")
    asked = []
    samples = Subjected.samples
    monkeypatch.setattr(Subjected, "samples", lambda *a: asked.append(samples(*a)) or asked[-1])
    own = bench_tuner_groupings.searched(made, subject, keep=True)
    (scans,) = asked
    first = int(own.run.tuned_model.scenes[0].coords.shape[0])
    assert 1 < len(scans) <= 1 + bench_tuner_groupings.SEARCHED and first == len(scans[1])
    assert len(own.strategy) == 42 and own.configurations > 42 and len(own.run.found) == len(own.run.kinds)
    layers = bench_tuner_layers.fed(made, subject)
    assert own.groupings(layers) == [own.strategy[one.met.name] for one in layers]
    assert list(bench_tuner_groupings._of_devices(made, own)) == [] and "no plan of one is kept" in said[-1]
    ((key, plan),) = kept.all().items()
    kept.keep(replace(key, device="another GPU"), plan)
    ((way, strategy),) = bench_tuner_groupings._of_devices(made, own)
    assert way == "from another GPU" and strategy == own.strategy


# Limits of time


@pytest.mark.parametrize("study", ["splits", "bindings"])
def test_a_study_with_a_limit_asks_less_and_says_so(study, monkeypatch):
    monkeypatch.setattr(bench_tuner_asked, "_LEAST", 1e-3)
    said = []
    options = bench.Options(study, "", quick=True, device="cpu", limit=0.01)
    rows = list(bench.run("tuner", said.append, options))
    cut = [row for row in rows if row.metric == "tuning, cut short"]
    asked = [row for row in rows if row.metric == "fact:groups asked"]
    assert len(cut) == len(asked) > 0 and all(row.value < row.peer_value for row in asked)
    assert {row.peer for row in asked} == {"all groups"}
    # What was tuned is checked and timed all the same.
    assert len([row for row in rows if row.metric == "time"]) > 1


def test_the_first_question_has_most_of_what_is_left(monkeypatch):
    monkeypatch.setattr(study_.time, "perf_counter", lambda: 100.0)
    setup = Setup(CPU, False, print, until=190.0)
    assert setup.left == 90.0 and [budget(setup, n) for n in (3, 2, 1)] == [30.0, 40.0, 60.0]
    assert budget(setup, kept=89.0) == 3.0, "the least"
    assert budget(Setup(CPU, False, print), 3) == math.inf


def test_a_network_is_begun_only_where_there_is_time_for_it(setup, monkeypatch):
    made, said = setup
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Subjected, "samples", lambda *_: [])
    names = tuple(WORKLOADS)[:4]
    for until, count in ((math.inf, 4), (65.0, 2), (59.0, 1), (10.0, 1)):
        now[0], found = 0.0, 0
        for _ in subjects(replace(made, quick=False, until=until), "any", names):
            now[0] += 30.0
            found += 1
        assert found == count, until
    assert f"{names[3]} is left out: 5 s are left, and one took 30" in said


def test_a_limit_below_nothing():
    with pytest.raises(OptionError, match="seconds of a study are 0 or more, found -1"):
        bench.Options(limit=-1)


# The tuner's answers


def choice(group, flow, *trials):
    return DataflowChoice(group, (f"{group}.a", f"{group}.b"), 10.0, 3.0, 1.0, flow, trials, "why")


def tuning(*choices):
    return Tuning("inference", "cpu", choices, PassTiming(2e-3), PassTiming(1e-3))


SLOW, FAST = Trial("explicit-gemm", ("forward",), 1, 4e-3, 2e-3), Trial("fetch-on-demand", ("forward",), 1, 3e-3, 2e-3)
REFUSED = Trial("implicit-gemm-table", ("forward",), 1, math.inf, 2e-3, "no room")


def answer(found, finished=True):
    return Answer(found, 7.5, found.flows, Ran(()))


def test_rows_of_an_answer(setup):
    made, _ = setup
    found = answer(tuning(choice("k3 at 1", None, SLOW, FAST, REFUSED), choice("k3 at 2", "explicit-gemm")))
    rows = list(
        found.rows(Writer(made, Subjected(WORKLOADS["minkunet-kitti-1x"], torch.float32), "networks"), "tuned", 120)
    )
    case = "minkunet-kitti-1x/fp32/inference/networks-tuned"
    told = [(row.case, row.metric, row.value, row.peer, row.peer_value) for row in rows]
    assert told == [
        (case, "tuning", 7.5, "goal", 120),
        (case, "fact:groups not as planned", 1, "all groups", 2),
        (f"{case}/k3 at 1", "choice:explicit-gemm", 4.0, "planned", 2.0),
        (f"{case}/k3 at 1", "choice:fetch-on-demand", 3.0, "planned", 2.0),
        (f"{case}/k3 at 1", "chosen:planned", 1.0, "planned", 2.0),
        (f"{case}/k3 at 2", "chosen:explicit-gemm", 1.0, "planned", 2.0),
    ]


def test_answers_that_differ_and_the_best_that_was_tried():
    here, there = choice("k3 at 1", None, SLOW, FAST, REFUSED), choice("k3 at 1", "explicit-gemm")
    same = choice("k2 at 1", None)
    assert differing(answer(tuning(here, same)), answer(tuning(there, same))) == [
        "k3 at 1: planned natively, explicit-gemm from there"
    ]
    best = bench_tuner_asked._best_tried
    assert best(tuning(here, same), ()) == dict.fromkeys(here.layers, "fetch-on-demand")
    # A group that began with explicit-gemm: what it is compared with.
    for seconds, fastest in ((1.5e-3, "fetch-on-demand"), (2.5e-3, "explicit-gemm")):
        began = choice("k3 at 1", None, replace(FAST, flow="planned"), replace(FAST, seconds=seconds))
        names = ("explicit-gemm", "fetch-on-demand")
        assert best(tuning(began), names) == dict.fromkeys(here.layers, fastest)


def test_the_tuner_is_asked_and_leaves_nothing(setup, monkeypatch):
    made, _ = setup
    network = Network.of(made, subject_of(made))
    monkeypatch.setattr(bench_tuner_asked, "_QUICK", 30.0)
    found = answered(made, network, Asked(("explicit-gemm",), always=True))
    tried = {trial.flow for one in found.tuning.choices for trial in one.trials}
    # Where it begins with it in all groups, the planner's choice is tried.
    assert tried in ({"explicit-gemm"}, {"planned"}) and set(found.flows.values()) == {"explicit-gemm"}
    assert found.ran.flows == network.all_in("explicit-gemm").flows
    assert not found.tuning.reused and all(
        layer.dataflow is None for layer in network.net.modules() if hasattr(layer, "dataflow")
    )
    with pytest.raises(KeyboardInterrupt):
        bench_tuner_asked._without_tiles(SearchProgress("k3 at 1", "tiles", 1, 2, 0, 1, 1))
    bench_tuner_asked._without_tiles(SearchProgress("k3 at 1", "explicit-gemm", 1, 2, 0, 1, 1))


# Times of a device that is not here


def test_parts_of_what_a_device_does(setup, monkeypatch):
    made, said = setup
    names = {"probe_spin": 0, "_dot_conv": 3000, "ampere_fp16_gemm": 2000, "radixSort": 500, "Memcpy HtoD": 100}

    def profiled(calls):
        at, events = 0, []
        for _ in calls:
            events.append(Event("void spin_kernel(long)", at, 1))
            for name, duration in names.items():
                if duration:
                    events.append(Event(name, at := at + 10_000, duration))
            at += 10_000
        return events, []

    monkeypatch.setattr(measuring, "profiled", profiled)
    wall = Times(9.0, 9.0, 9.0)
    found = bench_tuner_passes._on_device(made, lambda: None, wall)
    assert {name: times.median for name, times in found.parts.items()} == pytest.approx(
        {"map": 0.0, "sort": 0.0005, "kernel": 0.005, "other": 0.0001}
    )
    assert found.convolutions.median == pytest.approx(0.0055) and found.device.median == pytest.approx(0.0056)
    monkeypatch.setattr(measuring, "profiled", lambda calls: ([], []))
    monkeypatch.setattr(bench_tuner_passes, "together", lambda *_: [Times(2.0, 1.0, 3.0)])
    found = bench_tuner_passes._on_device(made, lambda: None, wall)
    assert not found.parts and found.device.median == 2.0 and "no parts" in said[-1]


def test_ways_of_movement_move_as_they_say(setup, monkeypatch):
    """All pairs but those of the middle offset, once, whole layers and their parts alike."""
    made, _ = setup
    layers = [one.to(torch.float32) for one in bench_tuner_layers.fed(made, subject_of(made, "minkunet-kitti-1x"))[:3]]
    pairs = sum(one.met.pairs - (one.found.num_outputs if one.found.volume == 27 else 0) for one in layers)
    products = [bench_tuner_movement._products(one) for one in layers]
    moved: dict[str, int] = {}

    def counted(name, at, run, *given):
        told = name + "_scalar" * any(one is True for one in given)
        moved[told] = moved.get(told, 0) + len(given[at].rows)
        return run(*given)

    for name, at in (("gather_slots", 1), ("gather_stationary", 1), ("scatter_slots", 2), ("scatter_stationary", 1)):
        run = getattr(bench_tuner_movement.movement, name)
        monkeypatch.setattr(bench_tuner_movement.movement, name, partial(counted, name, at, run))
    for name, way in bench_tuner_movement.MOVEMENTS.items():
        order = "stationary" if name == "locality-aware" else "slots_scalar" if name in ("fp32", "scalar") else "slots"
        moved.clear()
        gathered, sums = (
            bench_tuner_layers.results(run) for run in (way.gathers(layers), way.scatters(layers, products))
        )
        assert moved == {f"gather_{order}": pairs, f"scatter_{order}": pairs}, name
        if name in ("fused", "locality-aware"):
            assert [len(x) for x in gathered] == [len(x) for x in products]
        for one, sum_, whole in zip(layers, sums, bench_tuner_layers.results(way.whole(layers)), strict=True):
            how = dataflow.layout(one.found, Grouping("separate"))
            middle = dataflow.middle_product(one.feats, reference.grouped(one.weight, 1), how)
            torch.testing.assert_close(whole, sum_ if middle is None else sum_ + middle, rtol=1e-4, atol=1e-4)


def test_a_network_is_broken_down_by_kernels(setup, monkeypatch):
    """Mapping is what new maps cost; the rest is told by kernels of passes over maps at hand."""
    made, said = setup
    gpu = replace(made, device=torch.device("cuda"))
    network = Network.of(made, subject_of(made))
    kernels = {"gather_slots": 4000, "nvjet_hsh": 3000, "_dot_x": 1000, "scatter_slots": 5000, "relu_kernel": 2000}
    asked = []

    def profiled(calls):
        mapping = {"neighbours": 1500, "radixSort": 500} if not asked else {}
        asked.append(len(calls))
        at, events = 0, []
        for _ in calls:
            events.append(Event("spin_kernel", at := at + 10_000, 1))
            events += [Event(name, at := at + 10_000, took) for name, took in {**mapping, **kernels}.items()]
        return events, []

    monkeypatch.setattr(measuring, "profiled", profiled)
    found = bench_tuner_movement.broken_down(gpu, network, network.all_in(None))
    want = {"mapping": 0.002, "gather": 0.004, "product": 0.004, "scatter": 0.005, "other": 0.002}
    assert {part: times.median for part, times in found.items()} == pytest.approx(want) and len(asked) == 2
    write = Writer(made, network.subject, "breakdown")
    rows = list(bench_tuner_movement._breakdown_rows(write, {"offset-by-offset": found}))
    shares = {row.metric: row.value for row in rows if row.unit == "%"}
    assert shares["fact:share of scatter"] == pytest.approx(100 * 5 / 17, rel=1e-4)
    assert sum(shares.values()) == pytest.approx(100, rel=1e-4)
    assert rows[0].value == pytest.approx(0.017)


def test_maps_at_hand_are_not_built_again(setup, monkeypatch):
    made, _ = setup
    network, built = Network.of(made, subject_of(made)), []
    real = bench_tuner_movement._spent

    def spent(setup, call):
        with patch.object(dataflow, "_laid_out", lambda *given: built.append(1) or laid_out(*given)):
            return real(setup, call)

    laid_out = dataflow._laid_out
    monkeypatch.setattr(bench_tuner_movement, "_spent", spent)
    counts = []
    monkeypatch.setattr(bench_tuner_movement, "_on_wall", lambda call: counts.append(len(built)) or call() is None)
    found = bench_tuner_movement.broken_down(made, network, network.all_in("gather-gemm-scatter-fused-adaptive"))
    runs = bench_tuner_movement._RUNS
    assert len(counts) == 2 * runs and counts[1] > counts[0] > 0
    assert len(set(counts[runs:])) == 1 == len({*counts[runs:], len(built)}) and set(found) == {"mapping", "other"}


@pytest.mark.parametrize("study", ["movement", "grouping"])
def test_layers_are_timed_one_by_one_and_never_captured(study, monkeypatch):
    """As on a GPU, where the whole of a network's products is more than a stream holds."""
    kinds, counts = set(), []

    def in_pieces(calls, device, clock, seconds):
        kinds.update(type(piece()) for call in calls for piece in call)
        counts.append({len(call) for call in calls})
        return [Times(2.0, 1.0, 3.0)] * len(calls)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    monkeypatch.setattr("benchmarks.suites.tuner_cases.in_pieces", in_pieces)
    _, rows = quick(study)
    # Of MinkUNet's 42 convolutions.
    assert kinds == {torch.Tensor} and counts[0] == {42} and {r.value for r in rows if r.metric == "time"} == {2.0}


def test_rows_of_a_device(monkeypatch):
    monkeypatch.setattr(ledger, "device_name", lambda device: "a GPU")
    write = Writer(
        Setup(torch.device("cuda"), False, print, suite="tuner"),
        Subjected(WORKLOADS["minkunet-kitti-1x"], torch.float16),
        "sorted",
    )
    ways = {
        name: Taken(
            Times(t, t, t), Times(t / 2, t / 2, t / 2), {"map": Times(t / 4, t / 4, t / 4)}, Times(9.0, 9.0, 9.0)
        )
        for name, t in (("no", 4.0), ("yes", 2.0))
    }
    rows = list(rows_of(write, ways, "no"))
    assert [(r.metric, r.clock, r.value, r.peer_value) for r in rows if r.case.endswith("sorted-yes")] == [
        (CONVOLUTIONS, "gpu", 1.0, 2.0),
        ("time", "gpu", 2.0, 4.0),
        ("part:map", "gpu", 0.5, 1.0),
        ("time", "wall", 9.0, 9.0),
    ]
    assert {r.case for r in rows if r.metric == "time"} == {
        f"minkunet-kitti-1x/fp16/inference/sorted-{way}" for way in ("no", "yes")
    }


def test_goals(setup):
    made, said = setup
    _, (row, *_) = quick("sorted")
    gains = Gains()

    def like(value, p20, peer):
        return type(row)(**{**vars(row), "value": value, "p20": p20, "peer_value": peer})

    for one in (like(1.0, 0.9, 1.2), like(1.5, 1.3, 1.4), like(1.5, 1.45, 1.4)):
        gains.note(one)
    assert gains.slower == [row.case] and gains.ratios[row.case] == pytest.approx(1.4 / 1.5)
    _say_apart(made, like(1.0, 1.0, 1.0), ["k3 at 1: x natively, y from there"])
    _say_apart(made, like(1.2, 1.0, 1.0), ["k3 at 1: x natively, y from there"])
    assert said[-2].endswith("1.000: met") and said[-1].endswith(
        "groups that differ: k3 at 1: x natively, y from there"
    )
