"""Pumice: sparse convolution and sparse einsums for PyTorch."""

import torch

from pumice import coords, engine, errors, models, nn, ops
from pumice.compat import convert
from pumice.coords import Geometry, KernelMap, Relation, deserialize, kernel_map, same_geometry, serialize
from pumice.coords.geometry import _rebuild
from pumice.engine import (
    Captured,
    CapturedPoints,
    CapturedStep,
    Estimate,
    Exportable,
    PerItemTarget,
    Program,
    ReceptiveField,
    TilePlan,
    Tuning,
    capture,
    capture_points,
    capture_step,
    compile,
    estimate,
    exportable,
    plan_tiles,
    receptive_field,
    tiled,
    tune,
)
from pumice.label import Labelled, Labeller
from pumice.nn import prune_model
from pumice.ops import (
    Graph,
    Sparse,
    SparseTensor,
    cat,
    coalesce,
    collate,
    compile_einsum,
    devoxelize,
    einsum,
    from_dense,
    interpolate,
    prepare,
    sparse,
    to_dense,
    tuning,
    union,
    voxelize,
)

__version__ = "0.1.0"

# Let torch.load(weights_only=True) load a SparseTensor: it consists of two tensors and plain numbers.
torch.serialization.add_safe_globals([SparseTensor, _rebuild])

__all__ = [
    "Captured",
    "CapturedPoints",
    "CapturedStep",
    "Estimate",
    "Exportable",
    "Geometry",
    "Graph",
    "KernelMap",
    "Labelled",
    "Labeller",
    "PerItemTarget",
    "Program",
    "ReceptiveField",
    "Relation",
    "Sparse",
    "SparseTensor",
    "TilePlan",
    "Tuning",
    "capture",
    "capture_points",
    "capture_step",
    "cat",
    "coalesce",
    "collate",
    "compile",
    "compile_einsum",
    "convert",
    "coords",
    "deserialize",
    "devoxelize",
    "einsum",
    "engine",
    "errors",
    "estimate",
    "exportable",
    "from_dense",
    "interpolate",
    "kernel_map",
    "models",
    "nn",
    "ops",
    "plan_tiles",
    "prepare",
    "prune_model",
    "receptive_field",
    "same_geometry",
    "serialize",
    "sparse",
    "to_dense",
    "tiled",
    "tune",
    "tuning",
    "union",
    "voxelize",
]
