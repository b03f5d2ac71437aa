"""Emitted kernels compute what the reference and the oracle say: any size, dtype, layout and tile."""

import pytest
from kernels.interpret import GROUPS

CHECKS = [("kernels.interpret", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
