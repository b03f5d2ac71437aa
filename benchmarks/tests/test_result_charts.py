"""What the pictures of the report show, from made-up ledgers: numbers, order, and what is not there."""

import pytest

from benchmarks.report.charts import Bars, Heat, HeatCell, Stacks, colours, log_axis, numbered
from benchmarks.report.networks import PARTS, WHOLE, choices, parts
from benchmarks.report.results import history, overview, redundancy, speedups
from benchmarks.tests.ledgers import made, timed
from pumice.errors import OptionError, ShapeError


def network(case, metric, value, peer_value, **changes):
    return timed(case, value, peer_value, **{"suite": "tuner", "metric": metric, "peer": "default", **changes})


def only(charts):
    (found,) = charts
    return found


# speed-ups


def test_scenes_are_sorted_by_their_mean_and_widths_by_their_number():
    cells = {("slow", 256): 1.0, ("slow", 32): 2.0, ("fast", 256): 8.0, ("fast", 32): 4.0}
    rows = [timed(f"{scene}/k3/C{c}/fwd/tuned", 1.0, ratio) for (scene, c), ratio in cells.items()]
    chart = only(speedups(rows))
    panel = only(chart.panels)
    assert (chart.name, panel.groups) == ("conv-forward-layers", ("fast", "slow"))
    assert dict(panel.series) == {"C32": (4.0, 2.0), "C256": (8.0, 1.0)}
    assert panel.mean == pytest.approx(64**0.25)
    assert "against spconv (same run), clock gpu" in panel.title
    assert chart.source == "GPU · clock gpu · 2026-01-01 · commit c1"
    assert "2 ms (same run)" in panel.notes["C32"][1]


def test_a_cell_that_was_not_measured_is_left_open():
    rows = [timed("a/k3/C32/fwd/tuned", 1, 2), timed("a/k3/C64/fwd/tuned", 1, 3), timed("b/k3/C64/fwd/tuned", 1, 2)]
    panel = only(only(speedups(rows)).panels)
    assert panel.series["C32"] == (2.0, None) and panel.notes["C32"][1] == ""


def test_each_clock_and_rival_has_a_panel_with_the_groups_in_one_order():
    rows = [timed("a/k3/C32/fwd/tuned", 1, 3), timed("b/k3/C32/fwd/tuned", 1, 2)]
    rows += [timed("a/k3/C32/fwd/tuned", 1, 3, clock="wall"), timed("b/k3/C32/fwd/tuned", 1, 9, clock="wall")]
    rows.append(timed("b/k3/C32/fwd/tuned", 1, 5, peer="best recorded (x)", peer_source="recorded"))
    panels = only(speedups(rows)).panels
    assert [panel.groups for panel in panels] == [("a", "b"), ("b",), ("a", "b")]
    assert ["recorded" in panel.title for panel in panels] == [False, True, False]
    assert "clock wall" in panels[2].title


def test_networks_are_bars_by_model_and_precision():
    rows = [
        timed(f"{model}/{precision}/inference", 1.0, ratio, suite="workloads", dtype="fp32")
        for model, precision, ratio in (
            ("big/generated", "fp16", 4.0),
            ("big/generated", "tf32", 2.0),
            ("small", "fp16", 1.5),
        )
    ]
    chart = only(speedups(rows))
    panel = only(chart.panels)
    assert (chart.name, panel.groups) == ("workloads-inference", ("big/generated", "small"))
    assert dict(panel.series) == {"fp16": (4.0, 1.5), "tf32": (2.0, None)}
    # Means are of one precision.
    assert panel.mean is None and panel.title.endswith("geometric means fp16 2.45, tf32 2.00")


def test_widths_of_one_scene_stand_side_by_side():
    rows = [timed(f"s/k3/C{c}/fp32/fwd", 1, 2, suite="cpu-conv", dtype="fp32", clock="wall") for c in (16, 32)]
    panel = only(only(speedups(rows)).panels)
    assert (panel.groups, dict(panel.series)) == (("C16", "C32"), {"s": (2.0, 2.0)})


def test_the_overview_has_the_greatest_mean_first_for_each_device():
    rows = [timed("s/k3/C32/fwd/tuned", 1, 2), timed("map/s/k3/shuffled", 1, 5, suite="maps", dtype="int32")]
    rows.append(timed("s/k3/C16/fp32/fwd", 1, 3, suite="cpu-conv", dtype="fp32", clock="wall", device="CPU"))
    charts = list(overview(rows))
    assert [chart.name for chart in charts] == ["overview-gpu", "overview-cpu"]
    spans = only(charts[0].panels).spans
    assert [(span.value, span.kind) for span in spans] == [(5.0, "rivals: same run"), (2.0, "rivals: same run")]
    assert spans[0].name == "maps: 3x3x3 maps, int32, against spconv (1)"


# redundancy


def test_redundancy_goes_from_all_taps_to_four_splits():
    held = {"split2": 1.2, "unsorted": 4.0, "all-taps": 9.0, "sorted": 1.5}
    rows = [
        timed(f"redundancy/scene/k3/b{b}/{way}", value, 1.0, metric="redundancy", device="any", clock="count")
        for b in (128, 64)
        for way, value in held.items()
    ]
    rows.append(timed("redundancy/flat/k3/b64/sorted", 1.0, 1.0, metric="redundancy", device="any", clock="count"))
    chart = only(redundancy(rows))
    small, large = chart.panels
    assert "64" in small.title and "128" in large.title
    assert small.steps == ("all taps", "unsorted", "1 split", "2 splits")
    assert dict(small.lines) == {"scene": (9.0, 4.0, 1.5, 1.2), "flat": (None, None, 1.0, None)}
    assert small.notes["scene"][1].startswith("75.0%") and chart.source.startswith("counted")


# history


def test_history_is_the_ledger_after_each_commit():
    rows = [timed("a/k3/C32/fwd/tuned", 1, 2, commit="c1"), timed("b/k3/C32/fwd/tuned", 1, 8, commit="c1")]
    rows.append(made(suite="maps", case="scaling/all", commit="c2"))
    rows.append(timed("a/k3/C32/fwd/tuned", 1, 8, commit="c3", date="2026-03-01"))
    panel = only(only(history(rows)).panels)
    assert panel.steps == ("c1\n2026-01-01", "c3\n2026-03-01")
    assert dict(panel.lines) == {"layers, fp16 / spconv": (pytest.approx(4.0), pytest.approx(8.0))}
    assert panel.notes["layers, fp16 / spconv"][1].startswith("2 cells, 1 of them measured at this commit")
    assert panel.marks["layers, fp16 / spconv"] == ("2", "")


# networks


def test_parts_are_stacked_by_way_and_layer_by_layer():
    rows = []
    for layer in ("stem", "head/1"):
        rows += [network(f"net/fp16/inference/{layer}", f"part:{part}", 1.0, 2.0) for part in ("map", "kernel")]
    rows.append(timed("net/fp16/inference", 3.0, 9.0, suite="workloads"))
    chart = only(parts(rows))
    totals, layers = chart.panels
    assert chart.name == "parts-fp16-inference"
    assert totals.bars == ("net default", "net tuned", "net spconv")
    assert dict(totals.parts) == {
        "map": (4.0, 2.0, None),
        "sort": (0, 0, None),
        "kernel": (4.0, 2.0, None),
        "other": (0, 0, None),
        WHOLE: (None, None, 9.0),
    }
    assert layers.bars == ("stem", "head/1") and layers.parts["map"] == (1.0, 1.0)
    assert tuple(layers.parts) == PARTS


def test_parts_of_spconv_and_of_what_was_not_tuned():
    rows = [network("net/fp16/training/l", "part:map", 1.0, 5.0, peer="spconv")]
    totals = only(parts(rows)).panels[0]
    assert totals.bars == ("net default", "net spconv") and totals.parts["map"] == (1.0, 5.0)


def test_parts_of_a_study_are_none_of_a_pass():
    assert list(parts([network("net/fp16/inference/movement-fused", "part:movement", 1.0, 2.0)])) == []
    assert list(parts([network("net/fp16/inference/breakdown-fused", "part:other", 1.0, 2.0)])) == []


def test_passes_that_a_study_asks_for_are_not_added_up():
    asked = [network(f"net/fp16/inference/{way}", "part:map", 7.0, 8.0) for way in ("splits-1", "networks-default")]
    assert list(parts(asked)) == []
    (chart,) = parts([*asked, network("net/fp16/inference/networks-tuned", "part:map", 1.0, 2.0)])
    (whole,) = chart.panels
    assert dict(zip(whole.bars, whole.parts["map"], strict=True)) == {"net default": 2.0, "net tuned": 1.0}


def test_choices_are_tiles_by_group_and_model():
    rows = [
        network("a/fp16/inference/g0", "choice:fast", 1.0, 2.0),
        network("a/fp16/inference/g0", "choice:slow", 3.0, 2.0),
        network("a/fp16/inference/g0", "chosen:fast", 1.0, 2.0),
        network("b/fp16/inference/g1", "chosen:slow", 2.0, 2.0),
        network("b/fp16/inference/g2", "choice:slow", 2.0, 2.0),
        network("b/fp16/inference/splits-1-2/g0", "chosen:split2", 2.0, 3.0),
    ]
    plain, study = choices(rows)
    panel = only(plain.panels)
    assert (plain.name, study.name) == ("choices", "choices-splits")
    assert (panel.title, panel.rows, panel.columns) == ("fp16, inference", ("g0", "g1", "g2"), ("a", "b"))
    assert dict(panel.tiles) == {
        ("g0", "a"): HeatCell("fast", "2.00x", "fast 1 ms\nslow 3 ms"),
        ("g1", "b"): HeatCell("slow", "1.00x", ""),
    }
    assert only(study.panels).tiles["g0", "b"].text == "1.50x"


def test_ways_of_a_study_are_columns_and_passes_are_told_with_their_group():
    def asked(way, group, metric, value, peer_value):
        return network(f"a/fp16/training/bindings-{way}/{group}", metric, value, peer_value, peer="planned")

    rows = [
        asked("all", "k3 at 1", "chosen:planned", 1.0, 4.0),
        asked("all", "k3 at 1, forward with dgrad with wgrad", "choice:slow", 5.0, 4.0),
        asked("dgrad-wgrad", "k3 at 1", "chosen:fast / planned / planned", 1.0, 4.0),
        asked("dgrad-wgrad", "k3 at 1", "choice:fast", 3.0, 4.0),
        asked("dgrad-wgrad", "k3 at 1, dgrad with wgrad", "choice:slow", 5.0, 4.0),
        asked("dgrad-wgrad", "k2 at 1", "choice:fast", 2.0, 4.0),
        asked("dgrad-wgrad", "k2 at 1", "chosen:fast", 1.0, 4.0),
    ]
    panel = only(only(choices(rows)).panels)
    assert (panel.rows, panel.columns) == (("k3 at 1", "k2 at 1"), ("a: all", "a: dgrad-wgrad"))
    assert dict(panel.tiles) == {
        # The whole network's gain is none of a group.
        ("k3 at 1", "a: all"): HeatCell("planned", "", "slow (forward with dgrad with wgrad) 5 ms"),
        ("k3 at 1", "a: dgrad-wgrad"): HeatCell(
            "fast / planned / planned", "", "fast 3 ms\nslow (dgrad with wgrad) 5 ms"
        ),
        ("k2 at 1", "a: dgrad-wgrad"): HeatCell("fast", "2.00x", "fast 2 ms"),
    }


def test_generated_scans_count_and_are_called_so():
    """In the suite workloads the mark stands behind the mode, in the tuner's behind the model."""
    rows = [timed(f"net/fp16/inference{mark}", 3.0, 9.0, suite="workloads") for mark in ("", "/generated")]
    rows.append(network("net-generated/fp16/inference/networks-tuned", "part:kernel", 1.0, 2.0))
    bars = only(only(speedups(rows[:2])).panels)
    assert sorted(bars.groups) == ["net", "net-generated"]
    assert only(only(parts(rows)).panels).bars[-1] == "net-generated spconv"


def test_layers_of_a_study_are_not_added_to_whole_passes():
    rows = [network("net/fp16/inference/networks-tuned", "part:kernel", 1.0, 2.0)]
    rows += [
        network(
            f"net/fp16/inference/layers-default/{layer}", "part:kernel", value, value, peer="itself", commit="other"
        )
        for layer, value in (("01 k3 at 1, 4-32", 0.5), ("02 k3 at 1, 32-32", 0.75))
    ]
    whole, layers = only(parts(rows)).panels
    assert dict(zip(whole.bars, whole.parts["kernel"], strict=True)) == {"net default": 2.0, "net tuned": 1.0}
    assert (layers.bars, layers.parts["kernel"]) == (("01 k3 at 1, 4-32", "02 k3 at 1, 32-32"), (0.5, 0.75))
    assert layers.title == "net, default, layer by layer"


def test_a_dataflow_has_one_colour_in_all_panels_of_a_chart():
    rows = [network("a/fp16/inference/g0", "chosen:x", 1.0, 2.0)]
    rows += [network(f"a/fp16/training/{name}", f"chosen:{name}", 1.0, 2.0) for name in "yx"]
    first, second = only(choices(rows)).panels
    assert first.kinds == second.kinds == ("x", "y") and first.used == ("x",)


def test_of_a_network_the_newest_run_counts_as_a_whole():
    # A layer was renamed, and another dataflow chosen: the metrics differ, and nothing is superseded.
    old, new = {"commit": "c1"}, {"commit": "c2", "date": "2026-02-01"}
    rows = [network("a/fp16/inference/before", "part:map", 7.0, 7.0, **old)]
    rows += [network("a/fp16/inference/after", "part:map", 1.0, 2.0, **new)]
    totals = only(parts(rows)).panels[0]
    assert totals.parts["map"] == (2.0, 1.0)
    rows = [network("a/fp16/inference/g", f"{kind}:x", 1.0, 2.0, **new) for kind in ("choice", "chosen")]
    rows += [network("a/fp16/inference/g", f"{kind}:y", 1.0, 2.0, **old) for kind in ("choice", "chosen")]
    assert dict(only(only(choices(rows)).panels).tiles) == {("g", "a"): HeatCell("x", "2.00x", "x 1 ms")}


def test_devices_and_clocks_are_not_mixed():
    rows = [network("a/fp16/inference/l", "part:map", 1.0, 2.0)]
    rows += [
        network("a/fp16/inference/l", "part:map", 5.0, 6.0, **more) for more in ({"device": "B"}, {"clock": "wall"})
    ]
    charts = list(parts(rows))
    names = ["parts-fp16-inference-gpu-gpu", "parts-fp16-inference-b-gpu", "parts-fp16-inference-gpu-wall"]
    assert [chart.name for chart in charts] == names
    assert [chart.panels[0].parts["map"] for chart in charts] == [(2.0, 1.0), (6.0, 5.0), (6.0, 5.0)]


@pytest.mark.parametrize("make", [overview, speedups, redundancy, history, parts, choices])
def test_without_rows_there_is_no_chart(make):
    assert list(make([])) == []


# charts


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="'t': expected 2 values of 's', found 1"):
        Bars("t", "axis", ("a", "b"), {"s": (1.0,)})
    with pytest.raises(ShapeError, match="expected 1 notes of 's', found 2"):
        Stacks("t", "axis", ("a",), {"s": (1.0,)}, {"s": ("x", "y")})
    with pytest.raises(OptionError, match="expected tiles of known, found strange"):
        Heat("t", ("r",), ("c",), {("r", "c"): HeatCell("strange", "")}, ("known",))


def test_colours_are_steps_where_names_differ_by_a_number():
    assert numbered(["C32", "C64"]) and not numbered(["C32"]) and not numbered(["a", "b1"])
    assert len(set(colours(["C32", "C64", "C128", "C256"]).values())) == 4
    assert colours(["a", "b"]) == {"a": "#0072B2", "b": "#E69F00"}


@pytest.mark.parametrize(("values", "few"), [([0.02, 900.0], 20), ([2.9, 3.1], 6), ([1.0], 6)])
def test_logarithmic_axes_hold_all_values_and_some_numbers(values, few):
    (low, high), marks = log_axis(values, (1.4, 1.4))
    assert low < min(values) and max(values) < high
    assert 2 <= len(marks) <= few and all(low <= mark <= high for mark in marks)
