"""Kernels of coordinates give what plain torch gives, bit for bit, write nowhere else and wait for nothing."""

import pytest
from kernels.maps import GROUPS

CHECKS = [("kernels.maps", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
