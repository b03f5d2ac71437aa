"""A whole network at once: measured, tuned, and captured."""

from pumice.engine.capture import Captured, CapturedPoints, capture, capture_points
from pumice.engine.measure import Spent, measure
from pumice.engine.result import Choice, Tiles, Trial, Tuning
from pumice.engine.tuning import BINDINGS, tune

__all__ = [
    "BINDINGS",
    "Captured",
    "CapturedPoints",
    "Choice",
    "Spent",
    "Tiles",
    "Trial",
    "Tuning",
    "capture",
    "capture_points",
    "measure",
    "tune",
]
