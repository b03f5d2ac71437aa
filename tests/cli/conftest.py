"""Fixtures of this folder: tiny labelled scenes, scenes as files, and the command line in this process."""

import functools
from functools import partial

import pytest
from cases import one_thread  # noqa: F401
from commands import run_command, scenes, write  # noqa: F401

from pumice.cli import evaluate, main, page


@pytest.fixture
def pumice(monkeypatch, capsys):
    """`pumice("segment", path, ...)`: the command line as its entry point runs it."""
    return partial(run_command, main.main, "pumice", monkeypatch, capsys)


@pytest.fixture
def quick(monkeypatch):
    """Three timed inferences instead of twenty, and reports without the 5 MB of plotly."""
    timed = functools.partial(evaluate.time_inference, runs=2)
    monkeypatch.setattr(evaluate, "time_inference", timed)
    monkeypatch.setattr(page, "plotly_source", lambda: "/* plotly */")
