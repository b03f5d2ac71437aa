"""A whole network at once: measured, tuned, captured, and exported."""

from pumice.engine.capture import Captured, CapturedPoints, capture, capture_points
from pumice.engine.export import Exportable, exportable
from pumice.engine.measure import Spent, measure
from pumice.engine.result import Choice, Tiles, Trial, Tuning
from pumice.engine.step import CapturedStep, capture_step
from pumice.engine.train import PerItem
from pumice.engine.tuning import BINDINGS, tune

__all__ = [
    "BINDINGS",
    "Captured",
    "CapturedPoints",
    "CapturedStep",
    "Choice",
    "PerItem",
    "Exportable",
    "Spent",
    "Tiles",
    "Trial",
    "Tuning",
    "capture",
    "capture_points",
    "capture_step",
    "exportable",
    "measure",
    "tune",
]
