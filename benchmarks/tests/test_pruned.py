"""The suite `ucf`: every study runs, and a wrong result is not timed."""

import pytest
import torch

import benchmarks.run as bench
from benchmarks.harness.study import Setup
from benchmarks.suites import pruned
from pumice.errors import PumiceError


def test_rows_and_the_mean_of_each_level():
    said: list[str] = []
    rows = list(bench.run("ucf", said.append, bench.Options("filters", quick=True, device="cpu")))
    assert [row.case for row in rows[:2]] == ["filters/0.8/random", "filters/0.8"]
    assert len(rows) == 2 * len(pruned.LEVELS)
    layer, mean = rows[:2]
    assert (layer.peer, layer.clock, layer.dtype, layer.unit) == ("oneDNN", "cpu", "fp32", "ms")
    assert mean.value == pytest.approx(layer.peer_value / layer.value, rel=1e-3)


def test_layers_in_blocks():
    rows = list(bench.run("ucf", print, bench.Options("blocks", quick=True, device="cpu")))
    assert [row.case for row in rows[:2]] == ["blocks/0.8/32/random", "blocks/0.8/32"]
    assert len(rows) == 2 * len(pruned.LEVELS) * len(pruned.SIDES)
    (one,) = pruned.layers(Setup(torch.device("cpu"), True, print), "0.8")
    for side in pruned.SIDES:
        blocked = pruned._blocked(one, side, 0.8)
        assert blocked is not None and pruned.PrunedConv2d.from_dense(blocked.conv).blocks == (side, side)


def test_a_wrong_result_is_told_and_not_timed(monkeypatch):
    monkeypatch.setattr(pruned.PrunedConv2d, "forward", lambda self, x: torch.zeros(1, 32, 12, 12))
    with pytest.raises(PumiceError, match="error 1.0e"):
        list(bench.run("ucf", print, bench.Options("filters", quick=True, device="cpu")))
