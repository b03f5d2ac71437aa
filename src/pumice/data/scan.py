"""Scan, a point cloud validated on construction, and PointFile, the content of a file as readers return it."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pumice.data.labels import LabelSet, generic_labels
from pumice.errors import DtypeError, FileError, OptionError, ShapeError

# float32 resolves 0.5 mm up to 8 km; coordinates beyond that are shifted before they are rounded.
_FAR = 8192.0
_HUGE = 1e30


@dataclass(frozen=True, eq=False)
class Scan:
    """One point cloud with features and optional labels.

    Points with a non-finite position or feature are dropped, and counted in `dropped`. Coordinates beyond 8 km (map
    projections), which float32 cannot hold, are shifted by whole metres, kept in `origin`: the map position is
    `xyz + origin`. Labels without a `label_set` are raw values and get a generic one.

    xyz [P, 3]: positions in metres, any real dtype; kept as float32. feats [P, F] or [P]: features (intensity,
    colours); F may be 0; kept as float32. labels [P]: class indices of `label_set` or its `ignore`; integers, kept as
    int64; or None. name: for messages. label_set: the meaning of the labels. dropped: points dropped before; further
    ones are added. origin: the total shift subtracted from the positions so far. rows: int [P], indices of the points
    in their source; None: all points.

    Raises ShapeError if `xyz` is not [P, 3], or features or labels differ from it in length; DtypeError for positions
    or features that are not real numbers, or labels that are not integers; OptionError for a label that is no class of
    `label_set`.
    """

    xyz: np.ndarray
    feats: np.ndarray
    labels: np.ndarray | None = None
    name: str = ""
    label_set: LabelSet | None = None
    dropped: int = 0
    origin: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rows: np.ndarray | None = None

    def __post_init__(self) -> None:
        xyz = _real(self.xyz, "xyz")
        feats = _real(self.feats, "feats")
        feats = feats[:, None] if feats.ndim == 1 else feats
        labels = None if self.labels is None else np.asarray(self.labels)
        _check_shapes(xyz, feats, labels)
        # Overflow to infinity in float32 counts as not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            feats = feats.astype(np.float32)
            xyz, rows, dropped = packed(xyz), self.rows, 0
            whole = within(xyz, _HUGE) and within(feats, np.inf)
            keep = None if whole else all_columns(np.abs(xyz) < _HUGE) & all_columns(np.isfinite(feats))
        if keep is not None:
            dropped = len(keep) - int(keep.sum())
            rows = np.flatnonzero(keep) if rows is None else rows[keep]
            xyz, feats = xyz[keep], feats[keep]
            labels = None if labels is None else labels[keep]
        xyz, shift = _near(xyz)
        labels, label_set = _meaning(labels, self.label_set)
        self._set(
            xyz=np.ascontiguousarray(xyz, np.float32),
            feats=np.ascontiguousarray(feats),
            labels=labels,
            label_set=label_set,
            dropped=int(self.dropped) + dropped,
            origin=tuple(float(o + s) for o, s in zip(self.origin, shift, strict=True)),
            rows=rows,
        )

    def _set(self, **fields: object) -> None:
        for key, value in fields.items():
            object.__setattr__(self, key, value)

    def __len__(self) -> int:
        return len(self.xyz)

    def __repr__(self) -> str:
        labels = "no labels" if self.label_set is None else f"{len(self.label_set)} classes"
        lost = f", {self.dropped} dropped" if self.dropped else ""
        return f"Scan({self.name!r}, {len(self)} points, {self.feats.shape[1]} features, {labels}{lost})"

    def select(self, index: np.ndarray) -> "Scan":
        """The scan with the points that `index` (bool mask [P] or positions) selects."""
        labels = None if self.labels is None else self.labels[index]
        rows = (np.arange(len(self)) if self.rows is None else self.rows)[index]
        return replace(self, xyz=self.xyz[index], feats=self.feats[index], labels=labels, rows=rows)

    def label_counts(self) -> dict[str, int]:
        """Points per class name, in class order, without ignored points; empty without labels."""
        if self.labels is None or self.label_set is None:
            return {}
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.label_set))
        return dict(zip(self.label_set.names, counts.tolist(), strict=True))


def align_labels(scans: Sequence[Scan]) -> list[Scan]:
    """The same scans with one common label set.

    Scans that share one set already (or have no labels) are returned unchanged. Otherwise the common set is the union
    of the class names, in the order of their raw ids, and labels are renumbered.
    """
    sets = [s.label_set for s in scans if s.label_set is not None]
    if not sets or all(s == sets[0] for s in sets):
        return list(scans)
    common = _union(sets)
    return [s if s.label_set is None else _renumber(s, common) for s in scans]


def _union(sets: Sequence[LabelSet]) -> LabelSet:
    classes: dict[str, tuple[int, str, set[int]]] = {}
    for one in sets:
        for i, (name, color) in enumerate(zip(one.names, one.colors, strict=True)):
            ids = {r for r, c in one.raw if c == i}
            order, color, known = classes.get(name, (min(ids, default=i), color, set()))
            classes[name] = (order, color, known | ids)
    names = sorted(classes, key=lambda n: classes[n][0])
    raw = tuple((r, i) for i, n in enumerate(names) for r in sorted(classes[n][2]))
    return LabelSet(tuple(names), tuple(classes[n][1] for n in names), raw=raw)


def _renumber(scan: Scan, common: LabelSet) -> Scan:
    if scan.labels is None or scan.label_set is None:
        return scan
    table = np.array([common.names.index(n) for n in scan.label_set.names] + [common.ignore], np.int64)
    labels = table[np.where(scan.labels < 0, len(scan.label_set), scan.labels)]
    return replace(scan, labels=labels, label_set=common)


def _real(values: np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise DtypeError(f"{what} must hold real numbers, found dtype {array.dtype}")
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _check_shapes(xyz: np.ndarray, feats: np.ndarray, labels: np.ndarray | None) -> None:
    if xyz.ndim != 2 or xyz.shape[1] != 3:
        raise ShapeError(f"xyz is [P, 3], found {list(xyz.shape)}")
    if feats.ndim != 2:
        raise ShapeError(f"feats is [P, F], found {list(feats.shape)}")
    if len(feats) != len(xyz):
        raise ShapeError(f"one feature row per point, found {len(xyz)} points and {len(feats)} rows")
    if labels is None:
        return
    if labels.dtype.kind not in "iu":
        raise DtypeError(f"labels are integers, found dtype {labels.dtype}")
    if labels.ndim != 1 or len(labels) != len(xyz):
        raise ShapeError(f"one label per point, found {len(xyz)} points and labels {list(labels.shape)}")


def _near(xyz: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(positions [P, 3] shifted near zero for float32, the shift [3])."""
    if not len(xyz) or xyz.dtype == np.float32 or np.abs(xyz).max() <= _FAR:
        return xyz, np.zeros(3)
    # The median, so that one outlier does not cost all other points precision.
    shift = np.floor(np.median(xyz, axis=0))
    return xyz - shift, shift


def _meaning(labels: np.ndarray | None, label_set: LabelSet | None) -> tuple[np.ndarray | None, LabelSet | None]:
    if labels is None:
        return None, label_set
    if label_set is None:
        label_set = generic_labels(labels)
        return label_set.from_raw(labels), label_set
    labels = np.ascontiguousarray(labels, np.int64)
    wrong = labels[(labels != label_set.ignore) & ((labels < 0) | (labels >= len(label_set)))]
    if len(wrong):
        raise OptionError(
            f"labels are 0..{len(label_set) - 1} or {label_set.ignore} (ignored), "
            f"found {int(wrong[0])} ({len(wrong)} such labels)"
        )
    return labels, label_set


def within(values: np.ndarray, limit: float) -> bool:
    """True if all values are between -limit and limit, both excluded; none of them is NaN then."""
    return not values.size or bool(values.max() < limit and values.min() > -limit)


def packed(rows: np.ndarray) -> np.ndarray:
    """The rows [P, C] in contiguous memory, copied by columns: by short rows it takes five times as long."""
    if rows.flags.c_contiguous:
        return rows
    made = np.empty(rows.shape, rows.dtype)
    for place, column in zip(made.T, rows.T, strict=True):
        place[:] = column
    return made


def all_columns(rows: np.ndarray) -> np.ndarray:
    """bool [P]: rows.all(axis=1) of bool [P, C], by columns, since a reduction over a short axis takes ten times as
    long."""
    found = np.ones(len(rows), bool)
    for column in rows.T:
        found &= column
    return found


# Files
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


def optional_package(module: str, extra: str = "io", path: Path | None = None) -> Any:
    """A module of an extra of pumice. Raises an error that names the extra if it is not installed: FileError for `path`
    if it is needed to read that file, else OptionError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, install = module.partition(".")[0], f"(`pip install .[{extra}]` in a clone of pumice)"
        if path is not None:
            raise bad_file(path, f"the package {package} to read it {install}", f"no such package ({error})") from error
        raise OptionError(f"expected the package {package} {install}, found none ({error})") from error


def unit_scale(values: np.ndarray) -> np.ndarray:
    """Intensities or colours as float32 in about [0, 1]: divided by 255 or 65535 if they exceed 1."""
    values = np.asarray(values)
    if values.dtype == np.uint8:
        return values.astype(np.float32) / 255
    finite = (values if within(values, np.inf) else values[np.isfinite(values)]).astype(np.float32)
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
