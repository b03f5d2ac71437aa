"""The study `retrieval` of the suite `ucf`: rows beside the kernels of coords; a wrong result is not timed."""

import pytest
import torch

import benchmarks.run as bench
from benchmarks.suites import retrieval
from pumice.errors import PumiceError

QUICK = bench.Options("retrieval", quick=True, device="cpu")


def test_rows():
    said: list[str] = []
    rows = [row for row in bench.run("ucf", said.append, QUICK) if row.peer == "coords"]
    assert [(row.case, row.clock) for row in rows] == [
        (f"retrieval/{name}", clock) for name in ("shell_16", "surface_300") for clock in ("cpu", "wall")
    ]
    assert {(row.dtype, row.unit) for row in rows} == {("int32", "ms")}
    assert all(("1 threads" in row.device) == (row.clock == "cpu") for row in rows)


def test_pairs_that_are_not_those_of_the_map_are_told_and_not_timed(monkeypatch):
    statement = retrieval._statement

    def wrong(voxels, columns):
        found = dict(statement(voxels, columns))
        return found | {"j": torch.roll(found["j"], 1)}

    monkeypatch.setattr(retrieval, "_statement", wrong)
    with pytest.raises(PumiceError, match="pairs are not those of the map"):
        list(bench.run("ucf", print, QUICK))
