"""Sums over segments are what torch says, in the kernel and in plain torch, for all tiles and formats."""

import pytest
from kernels.segment_sums import GROUPS

CHECKS = [("kernels.segment_sums", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
