"""Fixtures of the benchmarks' tests: their command line in this process."""

from functools import partial

import pytest
from cases import one_thread  # noqa: F401
from commands import run_command

from benchmarks import __main__


@pytest.fixture
def command(monkeypatch, capsys):
    """`command("einsum", "--quick", ...)`: `python -m benchmarks` with these arguments."""
    return partial(run_command, __main__.main, "benchmarks", monkeypatch, capsys)
