"""A whole network at once: measured, tuned, captured, and exported."""

from pumice.engine.capture import Captured, CapturedPoints, capture, capture_points
from pumice.engine.export import Exportable, exportable
from pumice.engine.measure import Spent, measure
from pumice.engine.result import Choice, Tiles, Trial, Tuning
from pumice.engine.tuning import BINDINGS, tune

__all__ = [
    "BINDINGS",
    "Captured",
    "CapturedPoints",
    "Choice",
    "Exportable",
    "Spent",
    "Tiles",
    "Trial",
    "Tuning",
    "capture",
    "capture_points",
    "exportable",
    "measure",
    "tune",
]
