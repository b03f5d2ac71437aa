"""Fixtures of the benchmarks' tests: their command line in this process."""

import json
from functools import partial
from pathlib import Path

import pytest
from cases import data_folder, one_thread  # noqa: F401
from commands import run_command, scenes, write  # noqa: F401

from benchmarks import __main__


@pytest.fixture
def command(monkeypatch, capsys):
    """`command("einsum", "--quick", ...)`: `python -m benchmarks` with these arguments."""
    return partial(run_command, __main__.main, "benchmarks", monkeypatch, capsys)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """No line of what is said is broken."""
    monkeypatch.setattr(__main__.console, "width", 400)
    monkeypatch.setenv("COLUMNS", "400")


RESULTS = Path(__file__).parents[2] / "bench" / "results.jsonl"


@pytest.fixture
def measured(command, tmp_path):
    """`measured("einsum", "--case", "conv")`: a suite in small on a CPU: how it ran, and its rows."""

    def measured(suite, *options):
        out, kept = tmp_path / "rows.jsonl", RESULTS.read_bytes()
        out.unlink(missing_ok=True)
        ran = command(suite, "--quick", "--device", "cpu", "--out", out, *options)
        assert RESULTS.read_bytes() == kept
        return ran, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return measured
