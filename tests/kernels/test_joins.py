"""Joins of rows over segments are what plain torch says: sums, extremes, ties, gradients of maxima, segments cut."""

import pytest
from kernels.joins import GROUPS

CHECKS = [("kernels.joins", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
