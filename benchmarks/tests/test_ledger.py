"""The ledger of results holds whole rows, and every claim can be recomputed from it."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import run as bench
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


def test_the_readme_quotes_the_ledger():
    latest = {row["case"]: row for row in rows() if row["suite"] == "cpu-conv"}
    ratios = [row["peer_value"] / row["value"] for row in latest.values()]
    assert len(ratios) == 4 and min(ratios) >= 1.1
    readme = (LEDGER.parents[1] / "README.md").read_text()
    assert all(f"{ratio:.2f}" in readme for ratio in ratios)


def test_the_readme_quotes_spmm_on_a_cpu():
    latest = {
        row["case"]: row["peer_value"] / row["value"]
        for row in rows()
        if row["case"].startswith("unstructured/") and row["case"].endswith("/CSR") and row["peer"] == "torch.sparse.mm"
        if "threads" in row["device"]
    }
    mean = math.exp(sum(map(math.log, latest.values())) / len(latest))
    readme = (LEDGER.parents[1] / "README.md").read_text()
    said = (
        f"{mean:.2f} times `torch.sparse.mm` (geometric mean of {len(latest)} matrices, {min(latest.values()):.2f} to"
    )
    assert said in readme


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
    first, second = bench.interleaved(lambda: order.append("a"), lambda: order.append("b"), seconds=0)
    assert order == ["a", "b"] * (len(order) // 2) and len(order) == 18
    assert first.p20 <= first.median <= first.p80 and second.median >= 0
