"""One point cloud, checked at birth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pumice.data.labels import LabelSet, generic_labels
from pumice.errors import DtypeError, OptionError, ShapeError

__all__ = ["Scan", "align_labels"]

# float32 resolves 0.5 mm up to 8 km; map coordinates beyond that are shifted before they are rounded.
_FAR = 8192.0


@dataclass(frozen=True, eq=False)
class Scan:
    """One point cloud with features and, maybe, labels.

    Points whose position or feature is not finite are dropped, and counted in ``dropped``. Coordinates that
    lie beyond 8 km (map projections) are shifted by whole metres, kept in ``origin``, because float32 could
    not hold them: the position on the map is ``xyz + origin``. Labels without a ``label_set`` are taken as
    raw values and get a generic one, so a scan with labels always has a label set.

    Parameters
    ----------
    xyz : array [P, 3]
        Positions in metres, any real dtype; kept as float32.
    feats : array [P, F] or [P]
        Features (intensity, colours); F may be 0; kept as float32.
    labels : integer array [P] or None
        Class indices of ``label_set`` or its ``ignore``; kept as int64.
    name : str
        What messages call this scan.
    label_set : LabelSet or None
        What the labels mean.
    dropped : int
        Points that were dropped before; what is dropped now is added.
    origin : (float, float, float)
        What was subtracted from the positions so far.
    rows : int array [P] or None
        Where the points stand in what they were taken from; None: nothing was dropped or left out.

    Raises
    ------
    ShapeError
        ``xyz`` is not [P, 3], or features or labels differ from it in length (both numbers are given).
    DtypeError
        Positions or features that are not real numbers, labels that are not integers.
    OptionError
        A label that is no class of ``label_set``.
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
            keep: np.ndarray = np.logical_and((np.abs(xyz) < 1e30).all(1), np.isfinite(feats).all(1))
        dropped = len(keep) - int(keep.sum())
        rows = self.rows
        if dropped:
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
        """The scan with the points that ``index`` (bool mask [P] or positions) picks."""
        labels = None if self.labels is None else self.labels[index]
        rows = (np.arange(len(self)) if self.rows is None else self.rows)[index]
        return replace(self, xyz=self.xyz[index], feats=self.feats[index], labels=labels, rows=rows)

    def label_counts(self) -> dict[str, int]:
        """Points per class name, in class order; ignored points are left out; empty without labels."""
        if self.labels is None or self.label_set is None:
            return {}
        counts = np.bincount(self.labels[self.labels >= 0], minlength=len(self.label_set))
        return dict(zip(self.label_set.names, counts.tolist(), strict=True))


def align_labels(scans: Sequence[Scan]) -> list[Scan]:
    """The same scans with one label set in common.

    Scans that share one set already (or have no labels) come back as they are. Otherwise the common set
    holds the union of the class names, in the order of their raw ids, and labels are renumbered.
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
        raise DtypeError(f"{what} holds real numbers, found dtype {array.dtype}")
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
    """The positions close enough to zero for float32, and what was subtracted [3]."""
    if not len(xyz) or xyz.dtype == np.float32 or np.abs(xyz).max() <= _FAR:
        return xyz, np.zeros(3)
    # The median: one point far from all others must not cost them their decimals.
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
