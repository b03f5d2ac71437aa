"""Compile, capture, measure, tune and export whole networks."""

from pumice.engine.capture import Captured, CapturedPoints, capture, capture_points
from pumice.engine.estimate import Estimate, PassEstimate, StepEstimate, estimate
from pumice.engine.export import Exportable, exportable
from pumice.engine.graph_capture import CapturedGraphNet, CapturedGraphStep
from pumice.engine.graph_tuning import GraphTuning
from pumice.engine.measure import PassTiming, measure
from pumice.engine.program import Program, compile
from pumice.engine.ranks import first_on_each_host
from pumice.engine.receptive import ReceptiveField, receptive_field
from pumice.engine.result import DataflowChoice, Tiles, Trial, Tuning
from pumice.engine.tiled import SceneTile, TilePlan, plan_tiles, tiled
from pumice.engine.train_program import PerItemTarget
from pumice.engine.train_step import CapturedStep, capture_step
from pumice.engine.tuning import BINDINGS, tune

__all__ = [
    "BINDINGS",
    "Captured",
    "CapturedGraphNet",
    "CapturedGraphStep",
    "CapturedPoints",
    "CapturedStep",
    "DataflowChoice",
    "Estimate",
    "Exportable",
    "GraphTuning",
    "PassEstimate",
    "PassTiming",
    "PerItemTarget",
    "Program",
    "ReceptiveField",
    "StepEstimate",
    "SceneTile",
    "TilePlan",
    "Tiles",
    "Trial",
    "Tuning",
    "capture",
    "capture_points",
    "capture_step",
    "compile",
    "estimate",
    "exportable",
    "first_on_each_host",
    "measure",
    "plan_tiles",
    "receptive_field",
    "tiled",
    "tune",
]
