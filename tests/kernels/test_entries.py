"""Sums over entries are what torch says, in the kernel and in plain torch, for all tiles."""

import pytest
from kernels.entries import GROUPS

CHECKS = [("kernels.entries", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
