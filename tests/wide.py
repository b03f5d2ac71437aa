"""Cases of which each run tries a few, and `make test-all` every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def beyond(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases (values of one parameter); those after the first `count` are marked wide."""
    return [case if place < count else pytest.param(case, marks=pytest.mark.wide) for place, case in enumerate(cases)]
