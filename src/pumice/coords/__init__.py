"""Who meets whom: integers in, integers out."""

from pumice.coords import operators  # noqa: F401  (registers them)
from pumice.coords.build import at_the_end, beside, check_steps, checked_geometry, kernel_map, pyramid
from pumice.coords.choice import MapSchedule
from pumice.coords.cloud import Cloud
from pumice.coords.codes import CodeLayout, morton_argsort, morton_unique
from pumice.coords.compact import Compacted, Grouped, Order
from pumice.coords.curve import CURVES, deserialize, serialize
from pumice.coords.geometry import Geometry, same_geometry
from pumice.coords.grid import ROUNDINGS, Frame, Site
from pumice.coords.kernel_map import KernelMap, Pairs, settle
from pumice.coords.keys import Bounds, KeySpace
from pumice.coords.lookup import mask_words
from pumice.coords.merge import merged
from pumice.coords.outputs import made_of
from pumice.coords.relation import POLICIES, Relation, as_axes
from pumice.coords.structures import lookup_of
from pumice.coords.traced import local
from pumice.coords.voxel import as_tensor, check_points, frame_of, quantize

__all__ = [
    "CURVES",
    "POLICIES",
    "ROUNDINGS",
    "Bounds",
    "Cloud",
    "CodeLayout",
    "Compacted",
    "Frame",
    "Geometry",
    "Grouped",
    "KernelMap",
    "KeySpace",
    "MapSchedule",
    "Order",
    "Pairs",
    "Relation",
    "Site",
    "as_axes",
    "as_tensor",
    "at_the_end",
    "beside",
    "check_points",
    "check_steps",
    "checked_geometry",
    "deserialize",
    "frame_of",
    "kernel_map",
    "local",
    "lookup_of",
    "made_of",
    "mask_words",
    "merged",
    "morton_argsort",
    "morton_unique",
    "pyramid",
    "quantize",
    "same_geometry",
    "serialize",
    "settle",
]
