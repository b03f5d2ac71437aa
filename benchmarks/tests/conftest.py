"""Fixtures of the benchmarks' tests: their command line in this process."""

import json
from functools import partial
from pathlib import Path

import pytest
from cases import one_thread  # noqa: F401
from commands import run_command, scene, write_scan

from benchmarks import __main__
from pumice.env import settings


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


@pytest.fixture
def write(tmp_path):
    """`write("name.npz", scan)`: a scan as a file in the test's own folder."""
    return partial(write_scan, tmp_path)


@pytest.fixture
def scenes():
    """`scenes(n)`: the first n tiny streets."""
    return lambda count: [scene(seed) for seed in range(count)]


@pytest.fixture(scope="session")
def data_folder():
    """The folder of real scans."""
    folder = settings().data
    if folder is None:
        pytest.skip("PUMICE_DATA is not set: no real scans to read")
    return folder
