"""The studies of conv-forward and conv-train in tiny on the CPU: what they say, what they keep, what they refuse."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness.study import Setup, error, goals_told
from benchmarks.harness.timing import Times
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes import layers as layer_cells
from benchmarks.scenes.layers import Layer, Width
from benchmarks.suites import host as bench_host
from benchmarks.suites import layer_ablation as bench_ablation
from benchmarks.suites import layer_accuracy as bench_accuracy
from benchmarks.suites import roofline as bench_roofline
from benchmarks.suites.layer_ablation import IDEAS
from benchmarks.suites.layer_accuracy import GOALS, Found
from benchmarks.suites.layer_model import Needs, walks
from benchmarks.suites.roofline import Placed
from benchmarks.suites.sensitivity import HALVED
from benchmarks.suites.sensitivity import seconds as sensitivity_of
from pumice.coords import Relation, kernel_map
from pumice.errors import PumiceError
from pumice.ops import SparseTensor
from pumice.schedule.predict import DEVICES

CELL = "surface_300/k3/C8"


@pytest.fixture
def study(measured):
    """`study("roofline")`: what it says, and its rows."""

    def study(name, suite="conv-forward", only=CELL):
        ran, rows = measured(suite, "--case", name, "--only", only)
        assert ran.code == 0, ran.out + ran.err
        assert all(r["suite"] == suite and r["value"] >= 0 for r in rows)
        return ran.out, rows

    return study


def times(value):
    return Times(value, value, value)


def setup_of(said):
    return Setup(torch.device("cpu"), True, said.append)


# gradients


def test_gradients_are_timed_one_by_one(study):
    out, rows = study("gradients", "conv-train", "surface_300/k3/C8")
    assert {row["case"].rpartition("/")[2] for row in rows} == {"dgrad", "wgrad"}
    assert {row["peer"] for row in rows} == {"forward"}
    assert "goal" not in out  # there is none of 8 channels


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", lambda y, x, *_, **__: (torch.zeros_like(x),))
    with pytest.raises(PumiceError, match="dgrad: relative error 1.*wgrad: relative error 1"):
        list(bench.run("conv-train", print, bench.Options("gradients", "surface_300/k3/C8", True, "cpu")))


# channels


def test_channels_are_held_against_one_group(study):
    out, rows = study("channels", only="surface_300/k3/C64")
    for width in ("C64-1000", "C64g2", "C64g64"):
        assert f"channels/surface_300/k3/{width}/fwd fp32 wall: default" in out
    assert [(r["case"], r["peer"]) for r in rows if r["peer"] != "spconv"] == [
        (f"channels/surface_300/k3/{width}/fwd/default", "one group") for width in ("C64g2", "C64g64")
    ]
    assert "spconv is left out where there are groups" in out and "one group fp32 wall: best of ours" in out


def test_tuned_tiles_are_of_thorough_runs(monkeypatch):
    said = []
    list(bench.run("conv-forward", said.append, bench.Options("channels", "surface_300/k3/C5-16", True, "cpu", True)))
    assert any("default " in line and "tuned " in line for line in said)


@pytest.mark.parametrize("width", ["C3-32", "C64g2"])
def test_layers_of_odd_widths_that_are_wrong_are_not_timed(monkeypatch, width):
    monkeypatch.setattr(layer_cells, "conv_features", lambda x, w, *_: x.new_zeros(len(x), len(w)))
    with pytest.raises(PumiceError, match="default: relative error 1"):
        list(bench.run("conv-forward", print, bench.Options("channels", f"surface_300/k3/{width}", True, "cpu")))


def test_groups_are_bounded_as_they_are_multiplied(monkeypatch):
    """On matrix units, several at once."""
    setup = replace(setup_of([]), only="surface_300")
    (cell,) = layer_cells.cells(setup, layer_cells.Choice(widths=(Width(64, 64, 64),)))
    layer, gpu = layer_cells.layer_of(setup, cell), DEVICES["cuda"]
    (walk,) = walks(cell.found, "compacted")
    flops = 2 * walk.entries * walk.block * 64
    assert bench_accuracy._bounds(layer)["matrix"] == pytest.approx(1e3 * flops / gpu.plain)
    monkeypatch.setattr(sys.modules["pumice.ops.conv"], "_has_tensor_cores", lambda x: True)
    assert bench_accuracy._bounds(layer)["matrix"] == pytest.approx(1e3 * flops * 32 / gpu.matrix)


def test_widths_make_layers():
    setup = replace(setup_of([]), only="surface_300")
    widths = (Width(3, 32), Width(64, 64, 2))
    made = [layer_cells.layer_of(setup, cell) for cell in layer_cells.cells(setup, layer_cells.Choice(widths=widths))]
    assert [str(w) for w in (*widths, Width.square(96))] == ["3-32", "64g2", "96"]
    assert [(x.feats.shape[1], x.grad.shape[1], tuple(x.weight.shape), x.groups) for x in made] == [
        (3, 32, (32, 27, 3), 1),
        (64, 64, (64, 27, 32), 2),
    ]


def test_training_of_groups_is_exact():
    setup = replace(setup_of([]), only="surface_300")
    (cell,) = layer_cells.cells(setup, layer_cells.Choice(widths=(Width(12, 6, 3),)))
    layer = layer_cells.layer_of(setup, cell)
    for found, truth in zip(layer_cells.both(layer), layer_cells.exact_both(layer), strict=True):
        assert found.shape == truth.shape and error(found, truth) < 1e-6


# dtypes


def test_dtypes_tell_times_and_errors(study):
    out, _ = study("dtypes")
    assert "tf32, bf16x3 and tf32x3 are left out" in out
    for kind in ("fp16", "bf16", "ieee", "int8", "fp8"):
        assert f"{kind} " in out
    for goal in GOALS:
        assert f"goal {goal.name}" in out
    assert "goal tf32 over spconv tf32, 1.5x: not measured" in out


def test_dtypes_time_nothing_wrong(monkeypatch):
    monkeypatch.setattr(layer_cells, "einsum", lambda operands, *_: torch.zeros_like(operands[0]))
    with pytest.raises(PumiceError, match="relative error 1"):
        list(bench.run("conv-forward", print, bench.Options("dtypes", CELL, True, "cpu")))


def test_bytes_are_held_against_halves(study):
    _, rows = study("dtypes")
    found = {(r["case"].rpartition("/")[2], r["dtype"], r["peer"]) for r in rows if r["metric"] == "time"}
    assert {("int8", "int8", "fp16"), ("fp8", "fp8", "fp16")} <= found


def test_wrong_layers_of_bytes_are_not_timed(monkeypatch):
    monkeypatch.setattr(bench_accuracy, "conv_features", lambda x, *_: torch.zeros(x.shape))
    with pytest.raises(PumiceError, match="2 failed: .*int8: relative error 1.*fp8: relative error 1"):
        list(bench.run("conv-forward", print, bench.Options("dtypes", CELL, True, "cpu")))


def test_a_device_without_fp8_is_told(study, monkeypatch):
    monkeypatch.setattr(bench_accuracy, "without_fp8", lambda device: "it has no units for it")
    out, rows = study("dtypes")
    assert "fp8 is left out: it has no units for it" in out and "goal fp8 over fp16, 1x: not measured" in out
    assert not [r for r in rows if r["dtype"] == "fp8"]


def test_a_goal_takes_the_fastest_that_is_exact_enough():
    (goal,) = (goal for goal in GOALS if "ieee" in goal.ours)
    spent = {"ieee": times(3), "tf32x3": times(1), "spconv fp32": times(4)}
    near = {"ieee": 1e-7, "tf32x3": 2e-7, "spconv fp32": 1e-7}
    assert Found("a", near, spent).own(goal) == "tf32x3"
    assert Found("a", {**near, "tf32x3": 3e-7}, spent).own(goal) == "ieee"
    assert Found("a", near, {"ieee": times(3)}).own(goal) == ""
    assert Found("a", {"tf32x3": 1e-7}, {"tf32x3": times(1), "spconv fp32": times(4)}).own(goal) == ""
    (goal,) = (goal for goal in GOALS if goal.ours == ("bf16x3",))
    found = Found("a", {"bf16x3": 2e-5, "spconv fp32": 1e-7}, {"bf16x3": times(1), "spconv fp32": times(3)})
    said = []
    bench_accuracy._say_goals(setup_of(said), [found])
    assert found.own(goal) == "" and "  a: none of bf16x3 has an error of at most 1e-05" in said


def test_goals_are_met_on_geometric_mean():
    said = []
    goals_told(setup_of(said), "a", {"x": 1.0, "y": 4.0}, 2.0)
    goals_told(setup_of(said), "a", {"x": 1.0, "y": 3.9}, 2.0)
    assert said[0].endswith(": met") and "least 1.00x at x" in said[0] and said[1].endswith(": NOT met")


def test_spconv_multiplies_as_tf32_only_where_asked(monkeypatch):
    modules = {"spconv.constants": SimpleNamespace(SPCONV_ALLOW_TF32=False)}
    modules["spconv.pytorch.ops"] = SimpleNamespace(CONV_CPP=Tuner(["own"]))
    algorithms = SimpleNamespace(get_conv_algo_desp_from_param=str.upper)
    modules["spconv.algo"] = SimpleNamespace(algocore=algorithms, ALL_IMPGEMM_PARAMS=["a", "b"])
    monkeypatch.setattr(spconv_peer, "import_module", modules.__getitem__)
    own, seen = modules["spconv.pytorch.ops"].CONV_CPP, []

    def call():
        seen.append((modules["spconv.constants"].SPCONV_ALLOW_TF32, modules["spconv.pytorch.ops"].CONV_CPP))

    run = spconv_peer.in_tf32(call)
    run()
    run()
    # Its tuner is another one, and the same each time.
    assert [on for on, _ in seen] == [True, True] and seen[0][1] is seen[1][1] is not own
    assert seen[0][1].known == ["A", "B"]
    assert modules["spconv.constants"].SPCONV_ALLOW_TF32 is False and modules["spconv.pytorch.ops"].CONV_CPP is own


class Tuner:
    """Stands for spconv's tuner of kernels."""

    def __init__(self, known):
        self.known = known


# roofline and utilisation


def test_roofline_counts_what_is_needed(study):
    out, _ = study("roofline")
    assert "shares of bounds are left out" in out and f"  roofline/{CELL} " in out and "latency" in out


def test_a_slow_cell_has_a_reason():
    needed = Needs(useful=1e9, padded=742e6, memory=4.3e6, cache=8.5e6, chain=1e-6, waves=0.5)
    said = []
    bench_roofline._say_table(setup_of(said), [Placed("slow", needed, 8e-6), Placed("fast", needed, 2e-6)], 2e-6)
    (reason,) = [line for line in said if "below 50 %" in line]
    # Three microseconds of latency, one of products beside.
    assert "loads and products take turns 1.0 us" in reason and "with the bound 50% of 8.0 us" in reason
    assert "125.0" in said[1] and "latency" in said[1]


def test_utilisation_holds_layers_against_a_dense_product(study):
    out, rows = study("utilisation")
    assert f"utilisation/{CELL} " in out and "torch.mm" in out
    assert {r["metric"] for r in rows} == {"time", "useful", "padded"}
    found = {r["metric"]: r for r in rows}
    assert all(r["peer"] == "torch.mm" for r in rows) and found["padded"]["value"] > found["useful"]["value"]


def test_layers_of_a_minkunet_are_held_against_products_of_all_taps(study):
    out, rows = study("utilisation", only="minkunet-kitti-1x/0")
    cases = dict.fromkeys(r["case"] for r in rows)
    # Its stem of two layers, both of which are submanifold.
    assert list(cases)[:2] == [f"utilisation/minkunet-kitti-1x/{layer}/default" for layer in ("01/C4-8", "02/C8")]
    (mm,) = {r["peer_value"] for r in rows if r["case"] == list(cases)[1] and r["metric"] == "padded"}
    time = next(r for r in rows if r["case"] == list(cases)[1] and r["metric"] == "time")
    assert mm * time["peer_value"] * 1e9 == pytest.approx(2 * 120 * 27 * 8 * 8, rel=0.05), out


@pytest.mark.parametrize("name", ["roofline", "utilisation"])
def test_rates_of_wrong_results_are_not_told(monkeypatch, name):
    monkeypatch.setattr(layer_cells, "conv_features", lambda x, *_: torch.zeros_like(x))
    with pytest.raises(PumiceError, match="relative error 1"):
        list(bench.run("conv-forward", print, bench.Options(name, CELL, True, "cpu")))


def test_every_study_is_told_where_one_is_unknown():
    with pytest.raises(PumiceError) as raised:
        list(bench.run("conv-forward", print, bench.Options("roof", device="cpu")))
    assert all(name in str(raised.value) for name in bench.SUITES["conv-forward"].studies)


# ablation and default tiles


def test_ablation_holds_every_idea_against_its_prediction(study):
    out, rows = study("ablation")
    of_tiles = ("look-ahead", "tile-by-size", "sharing", "hoisting", "padding")
    done = [name for name in IDEAS if not name.startswith(of_tiles)]
    gains = {r["case"]: r for r in rows if r["metric"] == "gain"}
    spent = {r["case"].rpartition("/")[0]: r for r in rows if r["metric"] == "time"}
    assert [name.rpartition("/")[2] for name in gains] == done == [name.rpartition("/")[2] for name in spent]
    for name, gain in gains.items():
        assert gain["peer"] == "predicted" and gain["peer_source"] == "model" and gain["peer_value"] > 0
        assert gain["value"] == pytest.approx(spent[name]["peer_value"] / spent[name]["value"], rel=0.01)
    assert out.count("is left out: tiles are those of kernels") == len(IDEAS) - len(done)


def test_an_idea_with_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(layer_cells, "einsum", lambda operands, *_: torch.zeros_like(operands[0]))
    done = []
    with pytest.raises(PumiceError, match="relative error 1"):
        done.extend(bench.run("conv-forward", print, bench.Options("ablation", CELL, True, "cpu")))


def test_predicted_gains_follow_the_work():
    setup = setup_of([])
    (cell,) = layer_cells.cells(replace(setup, only="shell_16/k3/C16"), layer_cells.Choice())
    layer = layer_cells.layer_of(setup, cell)
    subjected = bench_ablation.Subjected(layer, layer.feats)
    entries = {form: sum(w.entries for w in walks(cell.found, form)) for form in ("compacted", "unsorted")}
    order, dense = IDEAS["row-order"](subjected), IDEAS["compaction"](subjected)
    # Fewer entries of tiles are worth more than none, and walking all taps costs at least what unsorted rows do.
    assert entries["unsorted"] > entries["compacted"] and 1 <= order.predicted <= dense.predicted
    assert IDEAS["split2"](subjected).predicted < 1 < IDEAS["fused-epilogue"](subjected).predicted


def test_tiles_of_another_size_are_predicted_to_cost_more(monkeypatch):
    monkeypatch.setattr(bench_ablation, "has_triton", lambda x: True)
    setup = replace(setup_of([]), only="shell_16/k3/C256")
    (cell,) = layer_cells.cells(setup, layer_cells.Choice(widths=(Width.square(256),)))
    idea = IDEAS["tile-by-size"](bench_ablation.Subjected(layer_cells.layer_of(setup, cell), torch.empty(0)))
    # 68 programs of 64 x 64 results, or 18 of 128 x 128.
    assert 1 < idea.predicted < 8


def test_sharing_is_predicted_to_help_where_one_tile_is_far_longer(monkeypatch):
    monkeypatch.setattr(bench_ablation, "has_triton", lambda x: True)
    layer = layer_of_a_clump()
    idea = IDEAS["sharing"](bench_ablation.Subjected(layer, torch.empty(0)))
    assert 1.5 < idea.predicted < 4
    assert IDEAS["hoisting"](bench_ablation.Subjected(layer, torch.empty(0))).predicted > 1


def test_packed_tiles_have_no_switches(monkeypatch):
    monkeypatch.setattr(bench_ablation, "has_triton", lambda x: True)
    setup = replace(setup_of([]), only="surface_300/k3/C8")
    (cell,) = layer_cells.cells(setup, layer_cells.Choice(widths=(Width.square(8),)))
    subjected = bench_ablation.Subjected(layer_cells.layer_of(setup, cell), torch.empty(0))
    for name in ("hoisting", "padding"):
        assert IDEAS[name](subjected) == "channels are few, and packs of entries have no such switch"


def layer_of_a_clump():
    """A few full neighbourhoods among many voxels that are alone."""
    alone = torch.cartesian_prod(*[torch.arange(0, 80, 4)] * 3)
    clump = torch.cartesian_prod(*[torch.arange(100, 105)] * 3)
    coords = torch.nn.functional.pad(torch.cat([alone, clump]), (1, 0)).int()
    feats = torch.zeros(len(coords), 32, dtype=torch.float16)
    found, _ = kernel_map(SparseTensor(feats, coords).geometry, Relation.of(3, 3))
    return Layer(found, feats, torch.zeros(32, 27, 32, dtype=torch.float16), coords)


@pytest.mark.parametrize(("suite", "name"), [("conv-forward", "fwd"), ("conv-train", "fwd+bwd")])
def test_default_tiles_are_held_against_the_best(study, monkeypatch, suite, name):
    out, rows = study("default-tile", suite)
    assert "default-tile is left out: tiles are those of kernels" in out and not rows
    monkeypatch.setattr(bench_ablation, "triton_unavailable_reason", lambda tensor: None)
    out, rows = study("default-tile", suite)
    assert [(r["case"], r["peer"]) for r in rows] == [(f"default-tile/{CELL}/{name}/default", "best")]
    assert "goal best tile over default tile, 0.909x" in out and ("  default 64x" in out) == (name == "fwd")


# the host


def test_host_times_calls_and_their_gradients(study):
    out, rows = study("host", only="host/")
    assert [r["case"] for r in rows] == [f"host/{name}" for name in bench_host.CALLS]
    assert [r["peer_value"] for r in rows] == [15, 15, 70, 70] and {r["unit"] for r in rows} == {"us"}
    assert out.count("on a CPU the arithmetic is in it") == len(rows)
    assert rows[2]["value"] > rows[0]["value"] > 1


def test_a_layer_with_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_host, "conv_features", lambda x, *_: torch.zeros_like(x))
    with pytest.raises(PumiceError, match="2 failed: host/function: .*relative error 1"):
        list(bench.run("conv-forward", print, bench.Options("host", "host/function", True, "cpu")))


def test_queued_calls_are_counted():
    spent = []
    found = bench_host.queued(lambda: time.sleep(1e-4) or spent.append(0), torch.device("cpu"), 10)
    assert len(spent) == 70 and 100 <= found.median < 10_000


def test_first_calls_are_cold_and_warm(study):
    out, rows = study("first-call", only="")
    cold, warm = rows
    assert (cold["case"], warm["case"]) == ("first-call/MinkUNet/cold", "first-call/MinkUNet/warm")
    assert (cold["peer_value"], warm["peer_value"], cold["unit"]) == (20, 2, "s")
    assert "a later call" in out


def test_a_process_that_fails_is_a_failure(monkeypatch):
    def probed(*_):
        raise PumiceError("its process ended with 1: no kernel")

    monkeypatch.setattr(bench_host, "probed", probed)
    with pytest.raises(PumiceError, match="first-call/cold: its process ended with 1: no kernel"):
        list(bench.run("conv-forward", print, bench.Options("first-call", quick=True, device="cpu")))


# errors


def test_errors_stand_beside_those_of_a_dense_convolution(study):
    out, rows = study("errors", only="")
    assert "fp16, bf16 and tf32 are left out" in out and "errors above 1.1 times" in out
    beside = {r["case"]: r for r in rows if r["metric"] == "error"}
    assert list(beside) == [f"errors/box_8/k3/C8/fp32/{part}" for part in ("y", "dx", "dw")]
    # Both are right: the dense convolution of the box is the layer.
    assert all(0 < r["value"] < 1e-6 and 0 < r["peer_value"] < 1e-6 for r in beside.values())
    repeated = [r for r in rows if r["metric"] == "differing"]
    assert len(repeated) == 4 and all(r["value"] == 0 for r in repeated)


def test_results_that_differ_when_repeated_are_failures(monkeypatch):
    chance = iter(range(100))
    monkeypatch.setattr(bench_accuracy, "both", lambda layer: (torch.tensor([0.0, next(chance)]),))
    said = []
    with pytest.raises(PumiceError, match="1 of 2 entries differ"):
        list(bench.run("conv-forward", said.append, bench.Options("errors", "repeated/" + CELL, True, "cpu")))


def test_wrong_results_have_no_place_among_errors(monkeypatch):
    monkeypatch.setattr(layer_cells, "conv_features", lambda x, w, *_: x * w.sum())
    with pytest.raises(PumiceError, match="errors/box_8/k3/C8/fp32: .*expected below 0.0001"):
        list(bench.run("conv-forward", print, bench.Options("errors", "errors/box", True, "cpu")))


def test_switches_are_put_back():
    switches = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [s.fp32_precision for s in switches], torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), bench_accuracy.multiplying("tf32"), bench_accuracy.deterministic():
        assert [s.fp32_precision for s in switches] == ["tf32", "tf32"]
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError
    assert ([s.fp32_precision for s in switches], torch.are_deterministic_algorithms_enabled()) == before


# sensitivity


def test_half_of_a_rate_takes_longer_and_never_twice_as_long(study):
    out, rows = study("sensitivity", only="minkunet")
    assert {r["case"].rpartition("/")[2] for r in rows} == set(HALVED) and {r["device"] for r in rows} == {"any"}
    assert all(1 <= r["value"] <= 2 and r["unit"] == "x" for r in rows) and "42 layers" in out
    assert {r["peer_value"] for r in rows if r["peer_source"] == "recorded"} == {1.2, 1.4}


def test_the_rate_that_limits_is_the_one_that_counts():
    layers = [Needs(useful=1e12, padded=1e12, memory=1e6, cache=1e6, programs=1e6)]
    whole = sensitivity_of(layers, DEVICES["cuda"])
    assert sensitivity_of(layers, HALVED["arithmetic"]) / whole == pytest.approx(2, rel=0.01)
    assert sensitivity_of(layers, HALVED["memory"]) / whole == pytest.approx(1, rel=0.01)
