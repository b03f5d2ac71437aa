"""Tables of the suite tuner, from rows that were made up."""

import json
from dataclasses import asdict

import pytest

from benchmarks.harness.rows import Row
from benchmarks.report import tables as ablation_tables
from benchmarks.report.tables import Place, filled, studies, tables
from pumice.errors import FileError, OptionError


def made(case, value, metric="time", **more):
    row = {"suite": "tuner", "case": case, "metric": metric, "value": value, "unit": "ms", "p20": value, "p80": value}
    row |= {"dtype": "fp16", "clock": "gpu", "peer": "default", "peer_value": 2.0, "peer_source": "same run"}
    return Row(**{**row, "device": "H200", "versions": {}, "commit": "abc", "date": "2026-11-22", **more})


CASE = "minkunet-kitti-1x/fp16/inference/splits-"
ROWS = [
    made(CASE + "1", 3.0),
    made(CASE + "1", 1.6),
    made(CASE + "1-2", 1.25),
    made(CASE + "1-2", 0.5, "part:map"),
    made(CASE + "1-2", 0.3, "fact:redundancy", unit="share", clock="count", peer="itself", peer_value=0.3),
    made(CASE + "1-2/group 0", 1.25, "choice:implicit-gemm-sorted"),
    made(CASE + "1-2/group 0", 1.2, "choice:implicit-gemm-split2"),
    made(CASE + "1-2/group 0", 1.2, "chosen:implicit-gemm-split2"),
    made("centerpoint-waymo-1f/fp16/inference/splits-1", 1.0, device="another"),
    made("dataflows/waymo_1f_5cm/k3/C32/explicit-gemm", 4.0),
    made("layers/x", 4.0, suite="conv-forward"),
]


def test_places():
    assert Place.of(CASE + "1-2/a/b") == Place("minkunet-kitti-1x fp16 inference", "splits", "1-2", "a/b")
    assert Place.of("dataflows/x/k3/C32/explicit-gemm") == Place("x k3 C32", "dataflows", "explicit-gemm")
    assert Place.of("map/x/k3") is None
    assert studies(ROWS) == ["splits", "dataflows"]


def test_a_line_for_each_way_and_a_column_for_each_measure():
    text = "\n".join(tables(ROWS, "splits"))
    assert "H200, 2026-11-22, commit abc:" in text and text.count("another, 2026") == 1
    assert "| of | way | gpu time, ms | gpu map, ms | redundancy, share |" in text
    # The last row of a measure counts.
    assert "| minkunet-kitti-1x fp16 inference | 1 | 1.6 (1.25x default) |  |  |" in text
    assert "| minkunet-kitti-1x fp16 inference | 1-2 | 1.25 (1.60x default) | 0.5 (4.00x default) | 0.3 |" in text
    assert "| group 0 | implicit-gemm-split2 | implicit-gemm-split2 1.2, implicit-gemm-sorted 1.25 |" in text


def test_pages_are_filled_between_their_marks(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table: splits -->\nold\n<!-- end -->\nb\n<!-- table: hybrid -->\n<!-- end -->\nc\n")
    ledger = tmp_path / "rows.jsonl"
    ledger.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ROWS))
    ablation_tables.main([str(ledger), str(page)])
    text = page.read_text()
    assert "old" not in text and "1.60x default" in text and text.startswith("a\n<!--") and text.endswith("-->\nc\n")
    assert "<!-- table: hybrid -->\nNot measured yet.\n<!-- end -->" in text
    assert filled(text, ROWS) == text
    ablation_tables.main([str(ledger)])
    assert "## dataflows" in capsys.readouterr().out


def test_ledgers_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match="expected a ledger"):
        ablation_tables.main([str(tmp_path / "none.jsonl")])
    (tmp_path / "bad.jsonl").write_text("{}\nnot a row\n")
    with pytest.raises(FileError, match="bad.jsonl, line 1: expected the fields of a row"):
        ablation_tables.main([str(tmp_path / "bad.jsonl")])
    with pytest.raises(OptionError, match="found 0"):
        ablation_tables.main([])
