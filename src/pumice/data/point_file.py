"""Result type of all readers, and conversions from named or numbered columns."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from pumice.data.labels import LabelSet
from pumice.errors import FileError

__all__ = ["PointFile", "bad_file", "from_columns", "from_fields", "optional_package", "unit_scale"]

_INTENSITY = ("intensity", "i", "reflectance", "reflectivity", "remission", "scalar_intensity")
_COLORS = (("red", "green", "blue"), ("r", "g", "b"), ("diffuse_red", "diffuse_green", "diffuse_blue"))
_LABELS = ("label", "labels", "class", "classification", "semantic", "segment", "scalar_label", "scalar_classification")


@dataclass(frozen=True, eq=False)
class PointFile:
    """The content of one file: xyz [P, 3], feats [P, F], raw labels [P] or None and their set."""

    xyz: np.ndarray
    feats: np.ndarray
    labels: np.ndarray | None = None
    label_set: LabelSet | None = None


def bad_file(path: Path, expected: str, found: str) -> FileError:
    """The error for an unusable file."""
    return FileError(f"{path}: expected {expected}, found {found}")


def optional_package(path: Path, module: str) -> ModuleType:
    """The module that reads a format of the extra `io`; FileError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        expected = f"the package {package} to read it (`pip install .[io]` in a clone of pumice)"
        raise bad_file(path, expected, f"no such package ({error})") from error


def unit_scale(values: np.ndarray) -> np.ndarray:
    """Intensities or colours as float32 in about [0, 1]: divided by 255 or 65535 if they exceed 1."""
    values = np.asarray(values)
    if values.dtype == np.uint8:
        return values.astype(np.float32) / 255
    finite = values[np.isfinite(values)].astype(np.float32)
    top = float(finite.max()) if finite.size else 0.0
    # Slightly above 1: rounding in half precision must not change the scale of a whole file.
    full = next((s for s in (1.0, 255.0, 65535.0) if top <= s * 1.01), max(top, 1.0))
    return values.astype(np.float32) / np.float32(full)


def from_columns(table: np.ndarray) -> PointFile:
    """A cloud from rows (x, y, z, ...): 4 columns end in intensity, 6 in r, g, b. The last of 5 columns is kept
    (elongation, or the age of a sweep in seconds) unless it holds ring numbers, which index the sensor's beams and are
    not measurements."""
    rest = table[:, 3:]
    if table.shape[1] in (4, 6):
        return PointFile(table[:, :3], unit_scale(rest))
    if table.shape[1] == 5:
        last = rest[np.isfinite(rest[:, 1]), 1]
        ring = len(last) > 0 and bool(np.all(last == np.round(last)))
        extra = rest[:, 2:] if ring else rest[:, 1:]
        return PointFile(table[:, :3], np.concatenate([unit_scale(rest[:, :1]), extra], axis=1))
    return PointFile(table[:, :3], rest)


def from_fields(path: Path, fields: Mapping[str, np.ndarray]) -> PointFile:
    """A cloud from named columns [P] (PLY properties, PCD fields): position, intensity, colours, label."""
    fields = {k.lower(): v for k, v in fields.items()}
    missing = [k for k in "xyz" if k not in fields]
    if missing:
        raise bad_file(path, "fields x, y, z", f"only {', '.join(fields) or 'none'}")
    xyz = np.stack([fields[k] for k in "xyz"], axis=1)
    feats = [unit_scale(fields[k])[:, None] for k in _INTENSITY if k in fields][:1]
    colors = [unit_scale(np.stack([fields[k] for k in c], axis=1)) for c in _COLORS if set(c) <= set(fields)]
    colors += [_packed_rgb(fields[k]) for k in ("rgb", "rgba") if k in fields]
    feats += colors[:1]
    labels = next((fields[k] for k in _LABELS if k in fields), None)
    none = np.zeros((len(xyz), 0), np.float32)
    return PointFile(xyz, np.concatenate([none, *feats], axis=1), _whole(path, labels))


def _packed_rgb(packed: np.ndarray) -> np.ndarray:
    """Colours [P, 3] in [0, 1] from 0x00RRGGBB words, which PCD files also store as the bits of a float."""
    if packed.dtype.kind == "f":
        words = np.ascontiguousarray(packed, np.float32).view(np.uint32)
    else:
        words = packed.astype(np.uint32)
    return np.stack([(words >> s) & 255 for s in (16, 8, 0)], axis=1).astype(np.float32) / 255


def _whole(path: Path, labels: np.ndarray | None) -> np.ndarray | None:
    """Labels as integers; some programs write whole numbers as floats."""
    if labels is None or labels.dtype.kind in "iu":
        return labels
    if not np.all(labels == np.round(labels)):
        raise bad_file(path, "whole numbers as labels", f"{labels[labels != np.round(labels)][0]}")
    return labels.astype(np.int64)
