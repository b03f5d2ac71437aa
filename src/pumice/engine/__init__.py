"""A whole network at once: measured, tuned, and captured."""

from pumice.engine.capture import Captured, capture
from pumice.engine.measure import Spent, measure
from pumice.engine.result import Choice, Tiles, Trial, Tuning
from pumice.engine.tuning import BINDINGS, tune

__all__ = ["BINDINGS", "Captured", "Choice", "Spent", "Tiles", "Trial", "Tuning", "capture", "measure", "tune"]
