"""The suites of single layers run in tiny on the CPU: checked, timed, told."""

import pytest
import torch

from benchmarks import run as bench
from benchmarks.scenes import layers as layer_cells
from benchmarks.scenes.clouds import KNOWN
from benchmarks.scenes.layers import FORWARD, TRAINING
from benchmarks.suites import layers as bench_layers
from pumice.errors import OptionError, PumiceError


@pytest.mark.parametrize("suite", ["conv-forward", "conv-train"])
def test_rows_say_what_was_timed(suite, measured):
    ran, rows = measured(suite, "--only", "surface_300/k3/C8/")
    assert ran.code == 0, ran.out + ran.err
    assert "surface_300/k3/C8/" in ran.out and "shell_16" not in ran.out
    for way in ("default", "tuned"):
        assert f"{way} " in ran.out and "error" in ran.out
    assert all(r["suite"] == suite and r["case"].startswith("surface_300/k3/C8/") and r["value"] > 0 for r in rows)


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(layer_cells, "conv_features", lambda x, *_: torch.zeros_like(x))
    with pytest.raises(PumiceError, match="relative error 1"):
        list(bench.run("conv-forward", print, bench.Options(quick=True, device="cpu", only="surface_300/k3/C8/")))


@pytest.mark.parametrize("suite", ["conv-forward", "conv-train"])
def test_a_study_that_is_not_known(suite):
    with pytest.raises(OptionError, match=f"case 'map' of {suite} is unknown; there are layers"):
        list(bench.run(suite, print, bench.Options(case="map", device="cpu")))


def test_cells_have_what_was_recorded_of_them():
    for passed in (FORWARD, TRAINING):
        recorded = bench_layers.RECORDED[passed.name]
        assert set(recorded) == {*KNOWN, "scannet_2cm", "shell_128"}
        assert all(len(cells) == len(layer_cells.CHANNELS) for cells in recorded.values())
    known = {peer.name: peer.value for peer in bench_layers._known("shell_512", 128, FORWARD)}
    assert known == {"best recorded (flexgemm)": 2.11, "goal": pytest.approx(2.11 / 3), "prototype": 0.958}
    assert [p.source for p in bench_layers._known("scannet_2cm", 32, TRAINING)] == ["recorded", "goal"]
    assert not list(bench_layers._known("surface_300", 8, FORWARD))
