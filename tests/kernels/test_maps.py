"""Kernels of coordinates give what plain torch gives, bit for bit, write nowhere else and wait for nothing."""

import pytest
from kernels.maps import GROUPS


def _checks():
    for group, checks in GROUPS.items():
        for name in checks():
            yield pytest.param(group, name, id=name)


@pytest.mark.parametrize(("group", "name"), list(_checks()))
def test_interpreted(interpreted, group, name):
    ended = interpreted("kernels.maps", group)
    problem = ended.get(name, f"the process ended before this check: {ended['']}")
    assert not problem, problem
