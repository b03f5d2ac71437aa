"""Differentiable functions of sparse tensors."""

from pumice.ops.conv import conv, conv_features, conv_inverse, conv_transpose
from pumice.ops.points import devoxelize, interpolate, voxelize
from pumice.ops.pool import avg_pool, global_avg_pool, global_max_pool, global_sum_pool, max_pool, sum_pool
from pumice.ops.prepare import prepare
from pumice.ops.sets import cat, collate, from_dense, prune, split, to_dense, union
from pumice.ops.tensor import SparseTensor

__all__ = [
    "SparseTensor",
    "avg_pool",
    "cat",
    "collate",
    "conv",
    "conv_features",
    "conv_inverse",
    "conv_transpose",
    "devoxelize",
    "from_dense",
    "global_avg_pool",
    "global_max_pool",
    "global_sum_pool",
    "interpolate",
    "max_pool",
    "prepare",
    "prune",
    "split",
    "sum_pool",
    "to_dense",
    "union",
    "voxelize",
]
