"""How far a user's call walks through the package, and what it launches: neither grows unseen."""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import Future, ThreadPoolExecutor
from difflib import unified_diff
from typing import Any

import pytest
from journeys import golden
from journeys.children import measured

# At most so many calls of functions of src/pumice. To make one smaller is what the redesign is for.
BOUNDS = {
    "layer, first call": 5800,
    "layer, seen": 38,
    "layer, another map, with its layout": 256,
    "layer, another map, laid out": 123,
    "layer, a map of other sizes, with its layout": 262,
    "layer, training step, seen": 121,
    "Sequential, evaluation, seen": 191,
    "Sequential, training step, seen": 528,
    "program, evaluation, seen": 77,
    "program, first training step": 32500,
    "program, training step, seen": 179,
    "einsum text to Triton source": 1550,
    "einsum, seen (CPU)": 28,
    "kernel map of a cloud (CPU)": 800,
}
KNOWN = json.loads(golden.PATH.read_text(encoding="utf-8"))
SHOWN = 40
"""Lines of a difference."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def found():
    """Both processes, side by side."""
    with ThreadPoolExecutor() as pool:
        yield {"calls": pool.submit(measured, "journeys.calls"), "launches": pool.submit(golden.launches)}


@pytest.mark.parametrize("journey", BOUNDS)
def test_calls(found: dict[str, Future[Any]], journey: str):
    assert found["calls"].result()[journey] <= BOUNDS[journey]


def test_every_journey_has_a_bound(found: dict[str, Future[Any]]):
    assert found["calls"].result().keys() == BOUNDS.keys()
    assert found["launches"].result().keys() == KNOWN.keys()


@pytest.mark.parametrize("journey", KNOWN)
def test_launches(found: dict[str, Future[Any]], journey: str):
    known, now = (json.dumps(of.get(journey), indent=0).splitlines() for of in (KNOWN, found["launches"].result()))
    difference = [*unified_diff(known, now, "known", "now", lineterm="", n=0)]
    more = f"\n... and {len(difference) - SHOWN} lines more" if len(difference) > SHOWN else ""
    assert not difference, "\n".join(difference[:SHOWN]) + more + "\nIf this is meant: python -m journeys.golden"
