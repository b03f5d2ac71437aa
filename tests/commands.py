"""Run a command line in this process, as its entry point does, on scans in files."""

import functools
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from pumice.data import street_scene


@dataclass(frozen=True)
class Ran:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


def run_command(main, name, monkeypatch, capsys, *args):
    """Call `main` with these arguments in `sys.argv`; returns what it printed and its exit code."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
    capsys.readouterr()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    caught = capsys.readouterr()
    return Ran(code, caught.out, caught.err)


@functools.lru_cache
def scene(seed=0):
    """A labelled street of about 1300 points, every class present."""
    return street_scene(seed, beams=16, azimuths=96)


def write_scan(folder, name, scan, labels=True):
    """Write a scan as an .npz file into the folder; returns its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"xyz": scan.xyz, "feats": scan.feats}
    if labels and scan.labels is not None:
        arrays["labels"] = scan.labels
    np.savez(path, **arrays)
    return path


@pytest.fixture
def scenes():
    """`scenes(n)`: the first n tiny streets."""
    return lambda count: [scene(seed) for seed in range(count)]


@pytest.fixture
def write(tmp_path):
    """`write("name.npz", scan, labels=False)`: a scan as a file in the test's own folder."""
    return partial(write_scan, tmp_path)
