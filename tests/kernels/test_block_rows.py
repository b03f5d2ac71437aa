"""Products of rows of blocks are what torch says, in the kernel and in plain torch, for all sides and formats."""

import pytest
from kernels.block_rows import GROUPS

CHECKS = [("kernels.block_rows", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
