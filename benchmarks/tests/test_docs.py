"""The page docs/benchmarks.md: its snippet runs, and it names every workload and suite."""

import re
from pathlib import Path

import pytest

from benchmarks.run import SUITES
from benchmarks.scenes.workloads import WORKLOADS

TEXT = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_named(name):
    assert f"`{name}`" in TEXT or f"`-{name.rpartition('-')[2]}`" in TEXT


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_is_named(suite):
    assert f"benchmarks {suite}`" in TEXT or f"`{suite}`" in TEXT


def test_the_snippet_runs():
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    space: dict[str, object] = {}
    exec(compile(block, "benchmarks.md", "exec"), space)
    logits, other = space["logits"], space["other"]
    assert logits.feats.shape == (300, 19) and len(other) == 300  # pyright: ignore
