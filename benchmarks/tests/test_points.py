"""The suite `points`: rows of every study; wrong results are told."""

import pytest

import benchmarks.run as bench
from benchmarks.suites import points
from pumice import ops
from pumice.errors import PumiceError

CASES = {"knn": 1, "ball": 1, "fps": 1, "attention": 6}


@pytest.mark.parametrize("case", CASES)
def test_rows(case: str):
    said: list[str] = []
    rows = list(bench.run("points", said.append, bench.Options(case, quick=True, device="cpu")))
    assert len({row.case for row in rows}) == CASES[case] or not rows
    assert sum("ms" in line or "pumice" in line for line in said) >= 1
    assert not any("FAILED" in line for line in said)


def test_wrong_neighbours_are_told_and_not_timed(monkeypatch: pytest.MonkeyPatch):
    right = ops.knn
    calls = iter(range(100))

    def wrong(*args: object) -> ops.Neighbors:
        index, squared = right(*args)  # pyright: ignore
        return ops.Neighbors(index, squared + (next(calls) > 0))

    monkeypatch.setattr(points.ops, "knn", wrong)
    with pytest.raises(PumiceError, match="relative error"):
        list(bench.run("points", print, bench.Options("knn", quick=True, device="cpu")))
