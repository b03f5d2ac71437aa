"""Kernels that search among points find what plain torch finds, bit for bit."""

import pytest
from kernels.points import GROUPS

CHECKS = [("kernels.points", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
