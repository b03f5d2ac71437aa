"""Predicted classes of every point, as files beside a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from pumice.cli.task import Task
from pumice.data import SEMANTIC_KITTI, Scan
from pumice.errors import OptionError

__all__ = ["FORMATS", "write_prediction"]


def write_prediction(folder: Path, scan: Scan, classes: np.ndarray, task: Task, kind: str) -> Path:
    """Write the classes int [P] of a scan to FOLDER/NAME.KIND and return the path.

    label: one uint32 per point of the scan's file, ids of SemanticKITTI, 0 for dropped points. npz: xyz, labels (class
    indices) and names. ply: x, y, z, label. auto: label for SemanticKITTI's classes, else npz. Raises OptionError for
    label with other classes.
    """
    kitti = task.names == SEMANTIC_KITTI.names
    if kind == "auto":
        kind = "label" if kitti else "npz"
    if kind == "label" and not kitti:
        raise OptionError(
            f".label files hold classes of SemanticKITTI, found {', '.join(task.names[:4])}, ...: npz, ply"
        )
    path = folder / f"{scan.name}.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    _WRITERS[kind](path, scan, classes, task)
    return path


def _write_label(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    ids = {c: raw for raw, c in reversed(SEMANTIC_KITTI.raw)}
    labels = np.zeros(len(scan) + scan.dropped, "<u4")
    labels[slice(None) if scan.rows is None else scan.rows] = np.array([ids[c] for c in range(len(ids) - 1)])[classes]
    labels.tofile(path)


def _write_npz(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    np.savez(path, xyz=_positions(scan), labels=classes, names=np.array(task.names))


def _write_ply(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    rows = np.empty(len(scan), [("x", "<f8"), ("y", "<f8"), ("z", "<f8"), ("label", "<i4")])
    rows["x"], rows["y"], rows["z"] = _positions(scan).T
    rows["label"] = classes
    names = "".join(f"comment class {i} {name}\n" for i, name in enumerate(task.names))
    header = f"ply\nformat binary_little_endian 1.0\n{names}element vertex {len(scan)}\n"
    header += "".join(f"property double {axis}\n" for axis in "xyz") + "property int label\nend_header\n"
    path.write_bytes(header.encode() + rows.tobytes())


def _positions(scan: Scan) -> np.ndarray:
    """The positions as in the file, float64 if they were shifted."""
    return scan.xyz + np.asarray(scan.origin) if any(scan.origin) else scan.xyz


_WRITERS: dict[str, Callable[[Path, Scan, np.ndarray, Task], None]] = {
    "label": _write_label,
    "npz": _write_npz,
    "ply": _write_ply,
}
FORMATS = ("auto", *_WRITERS)
