"""Fixtures of this folder."""

import pytest
from cases import device, one_thread  # noqa: F401

from pumice.engine import tuned_network
from pumice.schedule.tuned_plans import Plans


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The user's plans, none at first."""
    found = Plans(tmp_path / "own" / "plans.json")
    monkeypatch.setattr(tuned_network, "plans", lambda: found)
    return found
