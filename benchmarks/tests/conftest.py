"""Fixtures of the benchmarks' tests: their command line in this process."""

from functools import partial

import pytest
from cases import one_thread  # noqa: F401
from commands import run_command, scene, write_scan

from benchmarks import __main__
from pumice.env import settings


@pytest.fixture
def command(monkeypatch, capsys):
    """`command("einsum", "--quick", ...)`: `python -m benchmarks` with these arguments."""
    return partial(run_command, __main__.main, "benchmarks", monkeypatch, capsys)


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
