"""A whole network at once: measured, tuned, and exported."""

from pumice.engine.export import Exportable, exportable
from pumice.engine.measure import Spent, measure
from pumice.engine.result import Choice, Tiles, Trial, Tuning
from pumice.engine.tuning import BINDINGS, tune

__all__ = ["BINDINGS", "Choice", "Exportable", "Spent", "Tiles", "Trial", "Tuning", "exportable", "measure", "tune"]
