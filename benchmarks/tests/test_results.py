"""The ledger, read: what is no row, what supersedes what, and which ratios are averaged."""

import json
import math
from dataclasses import asdict

import pytest

from benchmarks.harness.families import FAMILIES, SUITES
from benchmarks.harness.results import chosen, compared, current, geomean, mean_of, reached, read, told
from benchmarks.report.summary import bounded, headlines, lines, without_lines
from benchmarks.tests.ledgers import made, timed, written
from pumice.errors import FileError, OptionError


def family(suite, name):
    (found,) = (one for one in FAMILIES if (one.suite, one.name) == (suite, name))
    return found


LAYERS = family("conv-forward", "layers")


def ratios(rows, own=LAYERS, against="spconv", **more):
    return {str(one.place): one.ratio for one in compared(rows, own, against, **more)}


# reading


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [made(), made(value=3.0, commit="c2")]
    path = written(tmp_path / "rows.jsonl", rows)
    path.write_text(path.read_text() + "\n  \n")
    assert read(path) == rows


def test_an_empty_ledger_has_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert read(path) == []


def changed(**changes):
    return json.dumps({**asdict(made()), **changes})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "expected a JSON object, found"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "lacks case, clock, commit"),
        (changed(extra=1), "has besides extra"),
        (changed(value="1"), "expected a finite number as value, found '1'"),
        (changed(value=True), "expected a finite number as value, found True"),
        (changed(value=None), "expected a finite number as value, found None"),
        (changed().replace("1.0", "NaN", 1), "expected a finite number as value, found nan"),
        (changed(suite=3), "expected str as suite, found 3"),
        (changed(versions="2"), "expected dict as versions, found '2'"),
        (changed(date="yesterday"), "expected a date as YYYY-MM-DD, found 'yesterday'"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, problem):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{changed()}\n\n{line}\n{changed()}\n")
    with pytest.raises(FileError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 3: ") and problem in str(caught.value)


def test_a_ledger_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileError, match=r"absent\.jsonl: expected a ledger"):
        read(tmp_path / "absent.jsonl")


# superseding


def test_a_newer_row_supersedes_and_of_equal_dates_the_later_line():
    old, new = made(value=1.0, date="2026-01-02"), made(value=2.0, date="2026-01-03")
    assert current([old, new]) == [new]
    assert current([new, old]) == [new]
    same = made(value=3.0, date="2026-01-03", commit="c2")
    assert current([new, same]) == [same]
    assert current([same, new, old]) == [new]


@pytest.mark.parametrize("name", ["suite", "case", "metric", "peer", "clock", "device", "dtype", "peer_source"])
def test_rows_that_differ_in_what_they_measure_both_stand(name):
    rows = [made(), made(**{name: "another"})]
    assert current(rows) == rows


def test_what_stands_is_in_the_order_of_the_ledger():
    first, second = made(case="a"), made(case="b")
    again = made(case="a", value=9.0)
    assert current([first, second, again]) == [second, again]


def test_rows_are_chosen_by_device_and_by_commit():
    gpu, cpu = made(device="NVIDIA H200", commit="abc1"), made(device="AMD EPYC, 2 threads", commit="def2")
    anywhere = made(device="any", commit="abc1")
    rows = [gpu, cpu, anywhere]
    assert chosen(rows) == rows
    assert chosen(rows, device="h200") == [gpu, anywhere]
    assert chosen(rows, commits=["abc"]) == [gpu, anywhere]
    assert chosen(rows, device="epyc", commits=["def", "abc"]) == [cpu, anywhere]
    with pytest.raises(OptionError, match="like 'tpu'; there are AMD EPYC, 2 threads, NVIDIA H200"):
        chosen(rows, device="tpu")
    with pytest.raises(OptionError, match="like 'f'; there are abc1, def2"):
        chosen(rows, commits=["f"])
    assert chosen([], device="tpu", commits=["f"]) == []


# ratios


def test_a_geometric_mean():
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert geomean([3.0]) == pytest.approx(3.0)
    for wrong in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(OptionError, match="numbers above 0"):
            geomean(wrong)


def test_the_best_of_our_ways_counts():
    rows = [timed("s/k3/C32/fwd/default", 2.0, 4.0), timed("s/k3/C32/fwd/tuned", 1.0, 4.0)]
    assert ratios(rows) == {"s C32": 4.0}
    assert ratios(rows, ways=["default"]) == {"s C32": 2.0}


def test_the_best_of_the_rivals_counts_and_our_own_variants_do_not():
    products = family("einsum", "tensor product, forward")
    case = "tensor-product/l1/C16/shared/fwd/COO"
    peers = {"e3nn script": 6.0, "cuEquivariance naive": 3.0, "dense einsum": 1.5, "COO by path": 0.5}
    rows = [timed(case, 1.0, value, suite="einsum", peer=name) for name, value in peers.items()]
    assert ratios(rows, products, "e3nn or cuEquivariance") == {"l1/C16 shared": 3.0}
    assert ratios(rows, products, "dense einsum") == {"l1/C16 shared": 1.5}


def test_recorded_rivals_those_of_the_same_run_and_bounds_are_kept_apart():
    rows = [
        timed("s/k3/C32/fwd/tuned", 1.0, 2.0),
        timed("s/k3/C32/fwd/tuned", 1.0, 3.0, peer="best recorded (x)", peer_source="recorded"),
        timed("s/k3/C32/fwd/tuned", 1.0, 0.5, peer="bound", peer_source="bound"),
        timed("s/k3/C32/fwd/tuned", 1.0, 0.1, peer="spconv", peer_source="goal"),
    ]
    assert ratios(rows) == {"s C32": 2.0}
    assert ratios(rows, against="the best recorded") == {"s C32": 3.0}
    assert [one.ratio for one in reached(rows, LAYERS)] == [0.5]


def test_a_ratio_is_of_one_row():
    # Another run was slower on both sides: its rival is not held against the faster run of ours.
    rows = [
        timed("tensor-product/l1/C16/shared/fwd/COO", 1.0, 3.0, suite="einsum", peer="e3nn script"),
        timed("tensor-product/l1/C16/shared/fwd/COO", 2.0, 5.0, suite="einsum", peer="e3nn eager"),
    ]
    products = family("einsum", "tensor product, forward")
    assert ratios(rows, products, "e3nn or cuEquivariance") == {"l1/C16 shared": 2.5}


def test_other_studies_metrics_and_groups_are_no_cells():
    rows = [
        made(case="ablation/s/k3/C32/padding/with"),
        made(case="s/k3/C32/fwd/tuned", metric="error"),
        made(case="channels/s/k3/C64g2/fwd/default"),
        made(case="s/k3/C32/fwd+bwd/tuned"),
    ]
    assert all(family.place(row) is None for row in rows for family in FAMILIES)


def test_the_longest_bound_counts():
    channels = family("conv-forward", "channels")
    bounds = {"memory": 0.2, "cache": 0.6, "matrix": 0.4}
    rows = [
        timed("channels/s/k3/C3-32/fwd/default", 1.0, value, peer=name, peer_source="bound")
        for name, value in bounds.items()
    ]
    assert [one.ratio for one in reached(rows, channels)] == [0.6]


def test_a_mean_says_its_ends_and_the_default_alone():
    cells = [timed(f"s/k3/C{c}/fwd/{way}", 1.0, ratio) for c, way, ratio in _cells()]
    found = mean_of(compared(cells, LAYERS, "spconv"), compared(cells, LAYERS, "spconv", ["default"]))
    assert (found.cells, found.geomean) == (2, pytest.approx(math.sqrt(4 * 9)))
    assert (found.least.ratio, found.most.ratio) == (4.0, 9.0)
    assert found.plain == pytest.approx(math.sqrt(2 * 8))
    # Where the default was not measured of all cells, there is no such mean.
    assert mean_of(compared(cells, LAYERS, "spconv"), compared(cells[2:], LAYERS, "spconv", ["default"])).plain is None


def _cells():
    return [(32, "default", 2.0), (32, "tuned", 4.0), (64, "default", 8.0), (64, "tuned", 9.0)]


# the summary


def test_a_line_for_each_device_clock_precision_and_kind_of_rival():
    rows = [
        timed("s/k3/C32/fwd/tuned", 1.0, 2.0, clock=clock, device=device, commit=device)
        for clock in ("wall", "gpu")
        for device in ("A", "B")
    ]
    rows.append(timed("dtypes/s/k3/C64/tf32", 1.0, 3.0, peer="spconv tf32", dtype="fp32", device="A"))
    found = lines(rows)
    told = [(line.device, line.clock, line.precision, line.mean.geomean) for line in found]
    layers = [(device, clock, "fp16", 2.0) for clock in ("gpu", "wall") for device in ("A", "B")]
    assert told == [*layers, ("A", "gpu", "tf32", pytest.approx(3.0))]
    assert {line.clock for line in headlines(found)} == {"gpu"}


def test_suites_without_means_are_said():
    told = without_lines([made(), made(suite="maps", case="scaling/all"), made(suite="new", case="x")], lines([made()]))
    assert set(told) == {*SUITES, "new"} - {"conv-forward"}
    assert told["maps"].startswith("1 rows, none") and told["graph"] == "no rows yet"


def test_bounds_are_a_table_of_their_own():
    row = timed("s/k3/C32/fwd/tuned", 1.0, 0.5, peer="bound", peer_source="bound")
    assert lines([row]) == []
    assert [(line.against, line.mean.geomean) for line in bounded([row])] == [("bound", 0.5)]


def test_every_figure_says_device_clock_date_and_commit():
    rows = [made(), made(clock="wall", date="2026-02-01", commit="c2")]
    assert told(rows) == "GPU · clock gpu, wall · 2026-01-01 to 2026-02-01 · commits c1, c2"
    assert told([made(device="any")]).startswith("counted, the same on any device · ")
