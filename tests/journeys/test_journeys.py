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

# At most so many calls of functions of src/pumice, and entries into its folders.
BOUNDS = {
    "layer, first call": 5650,
    "layer, seen": 30,
    "layer, another map, with its layout": 233,
    "layer, another map, laid out": 99,
    "layer, a map of other sizes, with its layout": 239,
    "layer, training step, seen": 70,
    "Sequential, evaluation, seen": 160,
    "Sequential, training step, seen": 410,
    "program, evaluation, seen": 76,
    "program, first training step": 26500,
    "program, training step, seen": 175,
    "program of a U-Net, a scene never seen": 4330,
    "einsum text to Triton source": 1550,
    "einsum, repeated": 3,
    "einsum, seen (CPU)": 28,
    "kernel map of a cloud (CPU)": 800,
    # Until the launch: nn, ops, coords, lower, runtime.
    "layer, seen: rooms entered": 5,
    "layer, another map, laid out: rooms entered": 25,
    "layer, training step, seen: rooms entered": 10,
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
