"""The suite `ucf`: rows of the paper's figures and tables, and of submanifold layers."""

import pytest
import torch

import benchmarks.run as bench
from benchmarks.harness.study import Setup
from benchmarks.suites import sparse_loops, structures
from pumice.errors import PumiceError
from pumice.lower import nest_c

pytestmark = pytest.mark.skipif(nest_c.unavailable() is not None, reason="no C compiler")


def rows(study):
    return list(bench.run("ucf", print, bench.Options(study, quick=True, device="cpu")))


def test_structures_and_their_storage():
    found = rows("structures")
    times = [row.case for row in found if row.metric == "time"]
    assert times[:2] == ["structures/0.8/RS/r:C s:C m:U c:U", "structures/0.8/RS/m:U (c r s):C"]
    assert times[-1] == "structures/shared/0.8" and len(times) == 2 * len(structures.STRUCTURES) + 1
    assert [row.peer_value for row in found if row.peer == "goal"] == [structures.GOAL, structures.SPREAD]
    stored = {(row.case, row.metric): row.value for row in found if row.case.startswith("structures/storage")}
    # RS keeps 2 of 9 taps: coordinates r and s, two and two at most, and the bounds of s: 4 bytes each.
    assert stored["structures/storage/RS/r:C s:C m:U c:U", "values"] == 4 * 2 * 16 * 16
    assert stored["structures/storage/RS/r:C s:C m:U c:U", "coordinates"] in (4 * 5, 4 * 7)


@pytest.mark.parametrize("name", structures.STRUCTURES)
def test_structures_repeat_what_is_drawn(name):
    mask = structures._mask(Setup(torch.device("cpu"), True, print), name, 0.8)
    assert mask is not None and 0.75 < 1 - mask.mean() < 0.85
    repeated = [bool((mask == mask.take([0], place)).all()) for place in range(4)]
    assert repeated == [axis not in name and name != "patterns" for axis in "MCRS"]


def test_layers_beside_presets_and_where_they_cross_dense_ones():
    found = rows("presets")
    assert [(row.case, row.peer) for row in found] == [
        ("presets/random", "skimcaffe preset"),
        ("presets/random", "xnnpack preset"),
    ]
    (share,) = rows("crossing")
    assert 0 <= share.value <= 1 and share.unit == "share of zeros"


def test_orders_and_window_search():
    found = rows("orders")
    counts = {row.case: row for row in found if row.metric == "positions"}
    assert set(counts) == {"orders/0.1/i-k", "orders/0.1/k-i"}
    assert all(0 < row.value <= row.peer_value for row in counts.values())
    assert counts["orders/0.1/k-i"].value < counts["orders/0.1/i-k"].value
    assert found[-1].case == "orders/window-search/200" and found[-1].peer == "without search"


def test_sparse_images():
    found = rows("activations")
    cases = [row.case for row in found]
    assert cases[:3] == ["activations/0.5/C4/sparse", "activations/0.5/C4/converted", "activations/0.5"]
    assert len([case for case in cases if case.startswith("activations/dual")]) == 6


def test_submanifold_layers():
    found = rows("submanifold")
    layers = [row for row in found if row.peer == "oneDNN's dense rate"]
    assert [(row.case, row.clock) for row in layers] == [
        (f"submanifold/{name}/fwd", clock) for name in ("shell_16", "surface_300") for clock in ("cpu", "wall")
    ]
    goals = [row.metric for row in found if row.peer == "goal" and "spconv" not in row.metric]
    assert goals == 2 * ["share of oneDNN's rate", "forward and backward over forward"]


def test_wrong_results_are_told_and_not_timed(monkeypatch):
    monkeypatch.setattr(structures, "_call", lambda *given: lambda: torch.zeros(1, 16, 12, 12))
    with pytest.raises(PumiceError, match="error 1.0e"):
        rows("structures")
    monkeypatch.setattr(sparse_loops, "error", lambda *given: 1.0)
    with pytest.raises(PumiceError, match="error 1.0e"):
        rows("orders")
