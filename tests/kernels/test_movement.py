"""Kernels that move rows do as plain torch says, and read or write a stationary row once."""

import pytest
from kernels.movement import GROUPS

CHECKS = [("kernels.movement", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
