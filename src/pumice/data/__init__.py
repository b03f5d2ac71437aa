"""Point clouds from files, and generated from a seed, with their labels."""

from pumice.data.balanced import BalancedBatchSampler
from pumice.data.labels import ASPRS, NUSCENES, SEMANTIC_KITTI, STREET, LabelSet, generic_labels
from pumice.data.readers import READERS, find_scans, read_labels, read_scan
from pumice.data.scan import Scan, align_labels
from pumice.data.street import street_scene

__all__ = [
    "ASPRS",
    "NUSCENES",
    "READERS",
    "SEMANTIC_KITTI",
    "STREET",
    "BalancedBatchSampler",
    "LabelSet",
    "Scan",
    "align_labels",
    "find_scans",
    "generic_labels",
    "read_labels",
    "read_scan",
    "street_scene",
]
