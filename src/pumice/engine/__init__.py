"""A whole network at once: measured, and tuned."""

from pumice.engine.measure import Spent, measure
from pumice.engine.result import Choice, Tiles, Trial, Tuning
from pumice.engine.tuning import BINDINGS, tune

__all__ = ["BINDINGS", "Choice", "Spent", "Tiles", "Trial", "Tuning", "measure", "tune"]
