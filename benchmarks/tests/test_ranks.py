"""The suite `ranks`: rows of what the processes print, and groups that fail."""

import subprocess
from types import SimpleNamespace

import pytest

import benchmarks.run as bench
from benchmarks.suites import ranks
from pumice.errors import PumiceError


def test_rows(monkeypatch: pytest.MonkeyPatch):
    def ran(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-3:] == ["benchmarks.probes.ranks", "cpu", "quick"]
        group = int(command[4].rpartition("=")[2])
        ways = ["one process", *(["ddp"] if group > 1 else [])]
        found = ", ".join(f'"{way}": [[{group}.0, 4.0, 5.0], {1000 * group}.0]' for way in ways)
        return SimpleNamespace(stdout=f"read\n{{{found}}}\n")

    kinds = {name: getattr(subprocess, name) for name in ("CalledProcessError", "TimeoutExpired")}
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(run=ran, **kinds))
    said: list[str] = []
    rows = list(bench.run("ranks", said.append, bench.Options(quick=True, device="cpu")))
    assert [row.case for row in rows] == ["training/1/one process", "training/2/one process", "training/2/ddp"]
    assert rows[2].value == rows[2].peer_value == 4 and "2.0k voxels/s, 1.00 of 2" in said[-2]


def test_a_group_that_fails_is_told(monkeypatch: pytest.MonkeyPatch):
    def ran(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="first\nno GPU")

    kinds = {name: getattr(subprocess, name) for name in ("CalledProcessError", "TimeoutExpired")}
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(run=ran, **kinds))
    with pytest.raises(PumiceError, match="2 failed.*2 processes ended with 1: no GPU"):
        list(bench.run("ranks", print, bench.Options(quick=True, device="cpu")))
