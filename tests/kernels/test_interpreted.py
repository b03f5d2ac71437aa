"""Kernels in Triton's interpreter do what plain torch, the reference and the oracle do: the checks of these modules."""

from importlib import import_module

import pytest

MODULES = (
    "block_rows", "captured", "entries", "interpret", "joins", "maps", "movement", "points", "segment_sums", "unrolled",
)  # fmt: skip
CHECKS = [
    (f"kernels.{module}", group, name)
    for module in MODULES
    for group, checks in import_module(f"kernels.{module}").GROUPS.items()
    for name in checks()
]


@pytest.mark.parametrize(("module", "group", "name"), CHECKS, ids=[f"{module}: {name}" for module, _, name in CHECKS])
def test_interpreted(interpreted, module, group, name):
    problem = interpreted(module, group, name)
    assert not problem, problem
