"""Who meets whom: integers in, integers out."""

from pumice.coords.build import kernel_map
from pumice.coords.compact import Compacted, Grouped
from pumice.coords.geometry import Frame, Geometry, Site, same_geometry
from pumice.coords.kernel_map import KernelMap, Pairs
from pumice.coords.keys import Bounds, KeySpace, morton_argsort, morton_unique
from pumice.coords.relation import POLICIES, Relation, as_axes
from pumice.coords.voxel import ROUNDINGS, check_points, frame_of, quantize

__all__ = [
    "POLICIES",
    "ROUNDINGS",
    "Bounds",
    "Compacted",
    "Frame",
    "Geometry",
    "Grouped",
    "KernelMap",
    "KeySpace",
    "Pairs",
    "Relation",
    "Site",
    "as_axes",
    "check_points",
    "frame_of",
    "kernel_map",
    "morton_argsort",
    "morton_unique",
    "quantize",
    "same_geometry",
]
