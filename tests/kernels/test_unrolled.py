"""Products over constant tables are what the reference says, in the kernel and in plain torch, with gradients."""

import pytest
from kernels.cross import TARGETS
from kernels.unrolled import GROUPS

CHECKS = [("kernels.unrolled", group, name) for group, checks in GROUPS.items() for name in checks()]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[name for *_, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem


@pytest.mark.parametrize("target", TARGETS)
def test_compiled(compiler, target):
    """A message and the kernel of its three gradients spill nothing, and need no shared memory."""
    found = compiler.ask("kernels.unrolled_targets", target)
    assert set(found) == {"message", "gradients"}
    assert not any(facts["spilled"] or facts["shared"] for facts in found.values()), found
