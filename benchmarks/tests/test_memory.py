"""Peak memory: what is measured on a GPU, rows beside each peer, where the report and the status page show them."""

import pytest
import torch

from benchmarks.harness import memory, study, whole
from benchmarks.harness.families import FAMILIES, PEAK
from benchmarks.harness.study import Case, Ready, Setup, Way
from benchmarks.report import report, status
from benchmarks.report.results import LESS, overview, speedups
from benchmarks.report.summary import headlines, lines
from benchmarks.tests.ledgers import made, written

MB = 10**6
SIZES = {"ours": 10.0, "peer": 30.0, "spconv": 40.0}


@pytest.fixture
def allocator(monkeypatch):
    """A GPU's allocator: `held` bytes, and the most since the last reset."""
    state = {"held": 5 * MB, "most": 900 * MB}

    def take(size):
        state["held"] += size
        state["most"] = max(state["most"], state["held"])

    for name, call in {
        "synchronize": lambda device: None,
        "memory_allocated": lambda device: state["held"],
        "reset_peak_memory_stats": lambda device: state.update(most=state["held"]),
        "max_memory_allocated": lambda device: state["most"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, call)
    return take


def test_what_a_call_takes_above_what_was_there(allocator):
    def call():
        for size in (70 * MB, -60 * MB, 20 * MB):
            allocator(size)

    assert memory.peak(call, torch.device("cuda")) == 70.0
    assert memory.peak(lambda: None, torch.device("cuda")) == 0.0
    assert memory.peak(call, torch.device("cpu")) is None


@pytest.fixture
def setup(monkeypatch):
    """A setup whose ways take the memory of SIZES; "captured" takes none, "large" more than there is."""

    def peak(call, device):
        if call() == "large":
            raise torch.cuda.OutOfMemoryError("of 80 GiB")
        return SIZES.get(call(), 0.0)

    monkeypatch.setattr(study, "peak", peak)
    return Setup(torch.device("cpu"), True, lambda told: None, suite="conv-forward")


def way(name, package=""):
    return Ready(name, lambda: name, package, 0.0)


def test_rows_of_each_way_beside_each_peer(setup):
    ours = {"scene/k3/C32/fwd/default": way("ours"), "scene/captured": way("captured"), "scene/large": way("large")}
    rows = list(study.memory_rows(setup, ours, [way("peer"), way("large"), way("spconv", "spconv")], "fp16"))
    found = [(row.case, row.value, row.peer, row.peer_value) for row in rows]
    assert found == [("scene/k3/C32/fwd/default", 10.0, name, SIZES[name]) for name in ("peer", "spconv")]
    assert {(row.metric, row.unit, row.clock, row.dtype) for row in rows} == {(PEAK, "MB", "count", "fp16")}
    assert "spconv" in rows[1].versions and "spconv" not in rows[0].versions


def test_studies_measure_it(setup, monkeypatch):
    monkeypatch.setattr(study, "peak", lambda call, device: 8.0 if call() is one else 4.0)
    one, two = torch.ones(3), torch.ones(3)
    case = Case("scene", torch.float32, torch.ones(3))
    ways = [Way("ours", lambda: lambda: one)], [Way("peer", lambda: lambda: two)]
    (row,) = (row for row in study.measured(setup, case, *ways) if row.metric == PEAK)
    assert (row.case, row.value, row.peer_value, row.dtype) == ("scene/ours", 8.0, 4.0, "fp32")
    mine, theirs = Ready("ours", lambda: one, "", 0.0), Ready("peer", lambda: two, "", 0.0)
    rows = list(whole.compared(setup, "scene", mine, [theirs]))
    assert [(row.case, row.metric) for row in rows] == [("scene", "time"), ("scene", PEAK)]
    varied = list(whole.compared(setup, "scene", mine, [theirs], metric="time over varied scans"))
    assert PEAK not in {row.metric for row in varied}


def test_without_a_gpu_there_are_no_rows():
    plain = Setup(torch.device("cpu"), True, lambda told: None)
    assert not list(study.memory_rows(plain, {"scene": way("ours")}, [way("peer")]))


def test_suites_with_it():
    """Each family of times of these suites has one of memory, of the same cases and rivals."""
    for suite in ("workloads", "conv-forward", "conv-train", "maps", "einsum", "graph", "points"):
        timed = [family for family in FAMILIES if family.suite == suite and family.metric == "time"]
        assert timed
        for family in timed:
            (twin,) = (f for f in FAMILIES if f.suite == suite and f.name == f"{family.name}, {PEAK}")
            assert twin.of_memory and twin.pattern == family.pattern and set(twin.rivals) <= set(family.rivals)


ROWS = (made(), made(metric=PEAK, unit="MB", clock="count", value=10.0, peer_value=40.0))


def test_the_status_page_has_a_line():
    text = status.page(ROWS)
    assert "| layers | fp16 | gpu | spconv (same run) | 1 | **2.00**" in text
    assert f"| layers, {PEAK} | fp16 | count | spconv (same run) | 1 | **4.00**" in text


def test_the_report_has_charts_of_memory_alone(tmp_path):
    charts = {chart.name: chart for chart in (*overview(ROWS), *speedups(ROWS))}
    assert charts["overview-gpu"].panels[0].axis != LESS and charts["memory-gpu"].panels[0].axis == LESS
    assert charts["conv-forward-layers-peak-memory"].title.endswith(f"{LESS} as a peer")
    assert len(charts["overview-gpu"].panels[0].spans) == len(charts["memory-gpu"].panels[0].spans) == 1
    assert [line.family.of_memory for line in lines(ROWS)] == [False, True]
    assert not any(line.family.of_memory for line in headlines(lines(ROWS)))
    done = report.write(written(tmp_path / "rows.jsonl", ROWS), tmp_path)
    page = done.page.read_text(encoding="utf-8")
    assert f"layers, {PEAK}" in page and "4.00" in page
