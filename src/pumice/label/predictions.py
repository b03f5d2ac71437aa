"""Files of predictions, each written under another name and then renamed, so that no half of one is ever seen."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from pumice.data import SEMANTIC_KITTI, Scan
from pumice.data.scan import optional_package
from pumice.errors import OptionError
from pumice.label.checkpoint import Task

_PARTIAL = ".partial"
# Another machine's unfinished file is left alone for a day: its writer cannot be asked.
_DAY = 86400.0


def kind_of(kind: str, task: Task) -> str:
    """The format that `kind` means for this task, one of FORMATS but auto, with its package at hand. Raises OptionError
    for an unknown one, for label with classes that are not SemanticKITTI's, and for parquet without pyarrow."""
    OptionError.check("kind", kind, FORMATS)
    kitti = task.names == SEMANTIC_KITTI.names
    if kind == "auto":
        return "label" if kitti else "npz"
    if kind == "label" and not kitti:
        others = ", ".join(name for name in _WRITERS if name != "label")
        raise OptionError(
            f".label files hold classes of SemanticKITTI, found {', '.join(task.names[:4])}, ...: {others}"
        )
    if kind == "parquet":
        optional_package("pyarrow.parquet")
    return kind


def write_prediction(folder: Path, scan: Scan, classes: np.ndarray, task: Task, kind: str) -> Path:
    """Write the classes int [P] of a scan to FOLDER/NAME.KIND and return the path.

    label: one uint32 per point of the scan's file, ids of SemanticKITTI, 0 for dropped points. npz: xyz, labels (class
    indices) and names. ply: x, y, z, label. parquet: a row per point that was not dropped, of point (its number in the
    scan's file), x, y, z, label (class index) and class (its name). auto: label for SemanticKITTI's classes, else npz.
    The file appears as a whole or not at all. Raises as kind_of() does, OSError if it cannot be written.
    """
    kind = kind_of(kind, task)
    path = folder / f"{scan.name}.{kind}"
    with whole_file(path) as partial:
        _WRITERS[kind](partial, scan, classes, task)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to, which becomes `path` at the end, or is removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The writer is named, so that a later run can tell whether it is still at work.
    owner = f"{socket.gethostname()}-{os.getpid()}"
    partial = path.with_name(f".{uuid.uuid4().hex[:12]}.{owner}{_PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> int:
    """Remove files that killed writers left below `folder`; returns their number."""
    stale = [path for path in folder.rglob(f".*{_PARTIAL}") if _abandoned(path)]
    for path in stale:
        path.unlink(missing_ok=True)
    return len(stale)


def _abandoned(path: Path) -> bool:
    """True if the writer, a process of this machine, has ended, or if the file is a day old."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY:
            return True
    host, _, pid = path.name.removesuffix(_PARTIAL).rpartition("-")
    if os.name != "posix" or not host.endswith(f".{socket.gethostname()}") or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _write_label(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    ids = {c: raw for raw, c in reversed(SEMANTIC_KITTI.raw)}
    labels = np.array([ids[c] for c in range(len(ids) - 1)], "<u4")[classes]
    if scan.rows is not None:
        kept, labels = labels, np.zeros(len(scan) + scan.dropped, "<u4")
        labels[scan.rows] = kept
    labels.tofile(path)


def _write_npz(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    # To an open file: numpy would append its suffix to the name.
    with path.open("wb") as file:
        np.savez(file, xyz=_positions(scan), labels=classes, names=np.array(task.names))


def _write_ply(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    rows = np.empty(len(scan), [("x", "<f8"), ("y", "<f8"), ("z", "<f8"), ("label", "<i4")])
    rows["x"], rows["y"], rows["z"] = _positions(scan).T
    rows["label"] = classes
    names = "".join(f"comment class {i} {name}\n" for i, name in enumerate(task.names))
    header = f"ply\nformat binary_little_endian 1.0\n{names}element vertex {len(scan)}\n"
    header += "".join(f"property double {axis}\n" for axis in "xyz") + "property int label\nend_header\n"
    path.write_bytes(header.encode() + rows.tobytes())


def _write_parquet(path: Path, scan: Scan, classes: np.ndarray, task: Task) -> None:
    arrow = optional_package("pyarrow")
    x, y, z = _positions(scan).T
    rows = np.arange(len(scan)) if scan.rows is None else scan.rows
    label = arrow.array(classes.astype(np.int16))
    name = arrow.DictionaryArray.from_arrays(label, arrow.array(task.names))
    columns = {"point": rows.astype(np.int64), "x": x, "y": y, "z": z, "label": label, "class": name}
    optional_package("pyarrow.parquet").write_table(arrow.table(columns), path)


def _positions(scan: Scan) -> np.ndarray:
    """[P, 3]: the positions as in the file, float64 if the scan was shifted."""
    return scan.xyz + np.asarray(scan.origin) if any(scan.origin) else scan.xyz


_WRITERS: dict[str, Callable[[Path, Scan, np.ndarray, Task], None]] = {
    "label": _write_label,
    "npz": _write_npz,
    "ply": _write_ply,
    "parquet": _write_parquet,
}
FORMATS = ("auto", *_WRITERS)
