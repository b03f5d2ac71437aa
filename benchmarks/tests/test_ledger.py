"""The ledger of results holds whole rows, and every claim can be recomputed from it."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness import timing
from pumice.errors import OptionError

LEDGER = Path(__file__).parents[2] / "bench" / "results.jsonl"


def rows():
    return [json.loads(line) for line in LEDGER.read_text().splitlines()]


def test_every_row_is_whole():
    names = {field.name for field in fields(bench.Row)}
    for row in rows():
        assert set(row) == names
        assert row["p20"] <= row["value"] <= row["p80"]
        assert row["peer_value"] > 0 or row["metric"] != "time"
        assert row["commit"] and row["device"] and {"pumice", "torch"} <= set(row["versions"])


def test_rows_are_appended(tmp_path):
    ledger = tmp_path / "new" / "results.jsonl"
    row = bench.Row(**{**rows()[0], "value": 1.0})
    bench.append(ledger, row)
    bench.append(ledger, row)
    assert [json.loads(line)["value"] for line in ledger.read_text().splitlines()] == [1.0, 1.0]


def test_an_unknown_suite_lists_the_known():
    with pytest.raises(OptionError, match="cpu-conv"):
        bench.run("nothing", print)


def test_both_calls_are_timed_in_turn():
    order = []
    calls = (lambda: order.append("a"), lambda: order.append("b"))
    first, second = timing.together(calls, torch.device("cpu"), "wall", seconds=0)
    assert order == ["a", "b"] * (len(order) // 2) and len(order) == 18
    assert first.p20 <= first.median <= first.p80 and second.median >= 0
