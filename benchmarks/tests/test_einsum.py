"""The suite `einsum` runs in tiny on the CPU: whole rows, nothing timed that is wrong, one line for a missing peer."""

from dataclasses import fields

import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness import rows as ledger
from benchmarks.harness import study
from benchmarks.peers import equivariant
from benchmarks.suites import einsum_conv as bench_conv
from benchmarks.suites import einsum_figures
from benchmarks.suites import spmm as bench_spmm
from benchmarks.suites import tensor_product as bench_tensor_product
from pumice.env import Settings
from pumice.errors import OptionError

CPU = torch.device("cpu")
FAST = ("structured", "conv", "tensor-product", "messages", "figure7", "ablation")
# What must be among the ends of the cases of each study.
EXPECTED = {
    "structured": {"BlockGroupCOO", "BCSR"},
    "unstructured": {"GroupCOO", "COO", "CSR", "buckets"},
    "conv": {"planned", "pairs", "grouped", "compacted", "to-grouped", "to-compacted"},
    "tensor-product": {"COO", "grouped by path", "module"},
    "messages": {"module"},
    "figure7": {"g1", "g8"},
    "table3": {"random_400"},
    "lines": {"structured", "unstructured", "tensor-product", "conv"},
    "ablation": {"COO", "+ group", "+ block", "+ lazy broadcasting"},
    "compile": {"cold", "warm"},
}


@pytest.fixture
def measure(measured):
    """`measure("conv", ...)`: how a study ran, and its rows."""
    return lambda case, *more: measured("einsum", "--case", case, *more)


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(c, marks=pytest.mark.wide) for c in EXPECTED if c not in FAST)])
def test_a_study_gives_whole_rows(measure, case):
    ran, rows = measure(case)
    assert ran.code == 0 and "FAILED" not in ran.out, ran.out + ran.err
    names = {field.name for field in fields(ledger.Row)}
    for row in rows:
        assert set(row) == names and row["suite"] == "einsum" and row["lib"] == "pumice"
        assert row["case"].startswith(case) and row["clock"] in ("wall", "count")
        assert row["p20"] <= row["value"] <= row["p80"] and row["value"] > 0 and row["peer_value"] > 0
        assert row["peer"] and row["peer_source"] in ("same run", "recorded", "goal", "bound")
        assert row["commit"] and row["device"] and {"pumice", "torch"} <= set(row["versions"])
    assert {row["case"].rpartition("/")[2] for row in rows} >= EXPECTED[case]


def test_every_study_is_tested():
    assert set(EXPECTED) == set(bench.SUITES["einsum"].studies)


def test_a_case_of_a_study_is_picked_by_a_part_of_its_name(measure):
    ran, rows = measure("structured", "--only", "s0.75")
    assert ran.code == 0 and {row["case"].split("/")[3] for row in rows} == {"s0.75"}


@pytest.mark.parametrize("case", ["structured", "conv"])
def test_a_wrong_result_is_not_timed_and_the_exit_code_is_1(measure, monkeypatch, case):
    monkeypatch.setattr(study, "error", lambda found, truth: float("nan"))
    ran, rows = measure(case)
    assert ran.code == 1 and "FAILED" in ran.out and "not timed" in ran.out and ran.err.startswith("error: ")
    # What is left are conversions, which are checked by other means.
    assert not [row for row in rows if row["metric"] == "time"]


def test_a_map_with_lost_pairs_is_not_timed(measure, monkeypatch):
    monkeypatch.setattr(bench_conv, "_holds_all_pairs", lambda *given: False)
    ran, rows = measure("conv")
    assert ran.code == 1 and "not every pair" in ran.out
    assert not [row for row in rows if row["metric"] == "conversion"]


def test_a_peer_that_is_not_installed_is_one_line(measure, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(equivariant, "import_module", missing)
    ran, rows = measure("tensor-product")
    assert ran.code == 0 and {row["peer"] for row in rows} == {"dense einsum"}
    assert ran.out.count("e3nn is left out") == 1 and ran.out.count("cuequivariance-torch is left out") == 1


def test_a_data_folder_without_scenes_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_conv, "settings", lambda: Settings(tmp_path, tmp_path))
    monkeypatch.setattr(bench_spmm, "settings", lambda: Settings(tmp_path, tmp_path))
    said = []
    setup = study.Setup(CPU, False, said.append, only="unstructured/uniform/")
    assert [name for name, _ in bench_conv.scenes(setup)] == ["random_100000"]
    assert [matrix.name for matrix in bench_spmm._matrices(setup)] == ["uniform"]
    assert len(said) == 2 and all(str(tmp_path) in line for line in said)


def test_a_thorough_run_has_every_size_of_the_tensor_product():
    some = set(bench_tensor_product._sizes(study.Setup(CPU, False, print)))
    every = set(bench_tensor_product._sizes(study.Setup(CPU, False, print, thorough=True)))
    assert (
        some < every and {highest for highest, _ in some} == {1, 2, 3} and {width for _, width in some} == {16, 32, 64}
    )


@pytest.mark.parametrize("highest, paths, nnz", [(1, 4, 10), (2, 11, 83), (3, 23, 353)])
def test_the_coefficients_are_the_known_ones(highest, paths, nnz):
    found = bench_tensor_product.coefficients(highest, 1)
    assert found.shape[3] == paths and found.count_nonzero() == nnz
    # Results of inputs of unit variance have unit variance.
    torch.testing.assert_close(found.square().sum((1, 2, 3)), torch.ones(len(found), dtype=torch.float64))


def test_an_unknown_study_lists_the_known():
    with pytest.raises(OptionError, match="tensor-product"):
        list(bench.run("einsum", print, bench.Options(case="nothing", device="cpu")))


def test_the_cpu_suite_takes_no_options():
    with pytest.raises(OptionError, match="cpu-conv"):
        list(bench.run("cpu-conv", print, bench.Options(quick=True)))


def test_errors_are_relative_and_see_what_is_not_a_number():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert study.error(truth.float(), truth) == 0
    assert study.error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert study.error([truth, 1.1 * truth], [truth, truth]) == pytest.approx(0.1)
    found = study.error([torch.full((2,), float("nan")), truth], [truth, truth])
    assert found != found
    assert study.error(torch.zeros(3), truth) == float("inf")


@pytest.mark.parametrize(
    "points, told",
    [
        ([(0.25, 0.5), (0.75, 1.5)], "from about 50%"),
        ([(0.25, 0.4), (0.25, 1.2), (0.75, 1.5)], "from 25% on, the least"),
        ([(0.25, 0.5), (0.75, 0.9)], "nowhere"),
        ([(0.25, 1.5), (0.75, 0.9)], "slower than dense at 75%"),
    ],
)
def test_the_crossing_lies_where_the_ratio_is_one(points, told):
    assert told in bench_spmm.crossing(points)


def test_a_block_sparse_matrix_is_filled_out():
    setup = study.Setup(CPU, True, print)
    a = bench_spmm.block_matrix(setup, 96, 32, 0.5)
    torch.testing.assert_close(bench_spmm.filled_out(a), a.to_dense())


def test_layouts_go_back():
    x = torch.randn(2, 9, 5)
    assert torch.equal(equivariant.channels_last(equivariant.channels_first(x), 5), x)
    flat = equivariant.channels_first(x)
    assert torch.equal(flat[:, :5], x[:, 0]) and torch.equal(flat[:, 5:8], x[:, 1:4, 0])


def test_ways_beside_the_others_are_held_against_the_fastest_peer_alone():
    rows = [
        _row(f"s/a/{way}", value, peer, theirs)
        for way, value in (("main", 3.0), ("fast", 1.0), ("slow", 2.0))
        for peer, theirs in (("quick", 1.0), ("lame", 9.0))
    ]
    found = {(row.case.rpartition("/")[2], row.peer) for row in study.kept(rows, ("fast", "slow"))}
    assert found == {(way, peer) for way in ("main", "fast") for peer in ("quick", "lame")} | {("slow", "quick")}
    assert study.kept([], ()) == []


def _row(case, value, peer, theirs):
    return study.Setup(CPU, True, print).row(case, value, "wall", ledger.Peer(peer, theirs))


def test_the_summary_weighs_the_best_of_ours_against_the_best_of_a_family():
    setup = study.Setup(CPU, True, (said := []).append)
    rows = [_row("s/a/COO", 2.0, "p one", 8.0), _row("s/a/CSR", 1.0, "p two", 4.0), _row("s/b/COO", 1.0, "p one", 1.0)]
    study.summarize(setup, rows, {"peers": ("p ",), "others": ("q",)})
    assert said[:3] == [
        "peers fp32 wall: best of ours 2.00x (geometric mean of 2), least 1.00x at s/b",
        "  COO: 2.00x (geometric mean of 2), least 1.00x at s/b",
        "  CSR: 4.00x (geometric mean of 1), least 4.00x at s/a",
    ]
    assert "CSR 1" in said[3] and len(said) == 4


def test_what_groups_cost_by_hand():
    cost = einsum_figures.group_cost([3, 0, 1], 2, itemsize=2)
    assert (cost.gathers, cost.scatters, cost.total, cost.padded, cost.bytes) == (6, 3, 9, 2, 48)
    assert einsum_figures.group_cost([], 4).total == 0
