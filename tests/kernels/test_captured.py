"""Static programs by kernels: rooms that are not full change nothing, and nothing waits."""

import pytest
from kernels.captured import GROUPS

CHECKS = [("kernels.captured", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
