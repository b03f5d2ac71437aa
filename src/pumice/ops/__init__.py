"""Differentiable functions on sparse tensors."""

from pumice.lower.epilogue import Epilogue
from pumice.lower.kernel import tuning
from pumice.ops.attention import attention
from pumice.ops.conv import conv, conv_features, conv_inverse, conv_transpose
from pumice.ops.einsum import compile_einsum, einsum
from pumice.ops.graph import Graph
from pumice.ops.harmonics import clebsch_gordan, spherical_harmonics
from pumice.ops.irreps import Irrep, Irreps
from pumice.ops.linear import linear
from pumice.ops.neighbors import Neighbors, ball_query, farthest_point_sample, knn, radius_graph, three_interpolate
from pumice.ops.norm import batch_norm, group_norm
from pumice.ops.points import coalesce, devoxelize, interpolate, voxelize
from pumice.ops.pool import (
    avg_pool,
    broadcast,
    global_avg_pool,
    global_max_pool,
    global_sum_pool,
    max_pool,
    row_mean,
    row_sum,
    sum_pool,
    unpool,
)
from pumice.ops.prepare import MapConsumers, prepare, prepare_levels
from pumice.ops.quantize import quantize
from pumice.ops.relational import relational_conv
from pumice.ops.resample import channel_to_space, space_to_channel, to_bev, upsample_nearest
from pumice.ops.scatter import gather, scatter, segment_reduce
from pumice.ops.sets import cat, collate, from_dense, prune, split, to_dense, union
from pumice.ops.sparse import Sparse, sparse, sparse_from_coords
from pumice.ops.tensor import SparseTensor
from pumice.schedule.dataflow import DATAFLOWS, Dataflow, Dataflows, Grouping

__all__ = [
    "DATAFLOWS",
    "Dataflow",
    "Dataflows",
    "Epilogue",
    "Graph",
    "Grouping",
    "Irrep",
    "Irreps",
    "MapConsumers",
    "Neighbors",
    "Sparse",
    "SparseTensor",
    "attention",
    "avg_pool",
    "ball_query",
    "batch_norm",
    "broadcast",
    "cat",
    "channel_to_space",
    "clebsch_gordan",
    "coalesce",
    "collate",
    "compile_einsum",
    "conv",
    "conv_features",
    "conv_inverse",
    "conv_transpose",
    "devoxelize",
    "einsum",
    "farthest_point_sample",
    "from_dense",
    "gather",
    "global_avg_pool",
    "global_max_pool",
    "global_sum_pool",
    "group_norm",
    "interpolate",
    "knn",
    "linear",
    "max_pool",
    "prepare",
    "prune",
    "quantize",
    "radius_graph",
    "relational_conv",
    "row_mean",
    "row_sum",
    "scatter",
    "segment_reduce",
    "space_to_channel",
    "sparse",
    "sparse_from_coords",
    "spherical_harmonics",
    "split",
    "sum_pool",
    "to_bev",
    "three_interpolate",
    "to_dense",
    "tuning",
    "union",
    "upsample_nearest",
    "unpool",
    "voxelize",
]

SparseTensor.prepare = prepare_levels
SparseTensor.to_dense = to_dense
SparseTensor.prune = prune
SparseTensor.split = split
SparseTensor._union = union
