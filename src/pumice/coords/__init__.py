"""Coordinates, kernel maps and their layouts: integers in, integers out."""

from pumice.coords import traced_ops  # noqa: F401  (registers them)
from pumice.coords.box import Bounds, KeySpace
from pumice.coords.buffer import CoordBuffer
from pumice.coords.build import check_steps, checked_geometry, join_side_streams, kernel_map, on_side_stream, pyramid
from pumice.coords.codes import CURVES, CodeLayout, deserialize, morton_argsort, morton_unique, serialize
from pumice.coords.geometry import Geometry, same_geometry
from pumice.coords.grid import ROUNDINGS, GridSpec, VoxelFrame
from pumice.coords.kernel_map import KernelMap, Pairs, read_pending_sizes
from pumice.coords.lookup import MapSchedule, lookup_of, mask_words
from pumice.coords.multi_map import MultiMap, PairSegments
from pumice.coords.neighbors import farthest, nearest, within
from pumice.coords.outputs import make_outputs
from pumice.coords.points import Limits, PointSet
from pumice.coords.relation import POLICIES, Relation, as_axes
from pumice.coords.tiles import PairGroups, SortSpec, TileList
from pumice.coords.tracing import trace_local
from pumice.coords.voxel import as_tensor, check_points, frame_of, quantize, unique_coords

__all__ = [
    "CURVES",
    "POLICIES",
    "ROUNDINGS",
    "Bounds",
    "CodeLayout",
    "CoordBuffer",
    "Geometry",
    "GridSpec",
    "KernelMap",
    "KeySpace",
    "Limits",
    "MapSchedule",
    "MultiMap",
    "PairGroups",
    "PairSegments",
    "Pairs",
    "PointSet",
    "Relation",
    "SortSpec",
    "TileList",
    "VoxelFrame",
    "as_axes",
    "as_tensor",
    "check_points",
    "check_steps",
    "checked_geometry",
    "deserialize",
    "farthest",
    "frame_of",
    "join_side_streams",
    "kernel_map",
    "lookup_of",
    "make_outputs",
    "mask_words",
    "morton_argsort",
    "morton_unique",
    "nearest",
    "on_side_stream",
    "pyramid",
    "quantize",
    "read_pending_sizes",
    "same_geometry",
    "serialize",
    "trace_local",
    "unique_coords",
    "within",
]
