"""Reading of scans: a table of readers by suffix, and the search for scans and their labels."""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pumice.data.bins import read_bin
from pumice.data.labels import NUSCENES, SEMANTIC_KITTI, LabelSet, generic_labels, known_or_generic
from pumice.data.las import read_las
from pumice.data.pcd import read_pcd
from pumice.data.ply import read_ply
from pumice.data.point_file import PointFile, bad_file, from_columns, unit_scale
from pumice.data.scan import Scan
from pumice.data.tables import arrow_holds_points, read_arrow, read_obj, read_text, read_tns, text_holds_points
from pumice.errors import FileError, OptionError, PumiceError

__all__ = ["READERS", "find_scans", "read_labels", "read_scan"]

Reader = Callable[[Path, int | None], PointFile]
_POINT_KEYS = ("points", "xyz", "pc", "coords", "v", "vertices")
_FEAT_KEYS = ("feats", "features", "intensity", "rgb", "colors", "color")
_LABEL_KEYS = ("labels", "label", "segment")
_LIDARSEG = "_lidarseg.bin"


def read_scan(path: str | Path, labels: str | Path | bool | None = None, *, columns: int | None = None) -> Scan:
    """Read one point cloud; the suffix selects the reader.

    Ids of SemanticKITTI, nuScenes lidarseg and LAS are mapped to those class sets; any others get a generic set, one
    class per value. A few ids that such a set does not know are ignored, with a UserWarning.

    path: a file with one of the suffixes in `READERS`. labels: a label file (.label: uint32, .bin: uint8, .npy:
    integers) or a folder with one of the scan's name. None takes the labels in the file itself, if any; True those,
    else `NAME.label` beside the file or in `../labels` (SemanticKITTI), if any; False none. columns: numbers per point
    in a .bin or .pcd.bin file, if the guess would be wrong.

    Returns a Scan: xyz float32 [P, 3] in the file's unit; feats float32 [P, F]: intensity and colours scaled to [0, 1],
    other columns unchanged; labels int64 [P] or None.

    Raises FileError if the file is missing, empty, truncated, of unknown suffix or content, without points, or its
    labels differ from the points in number, or a package that the format needs is not installed; OptionError for
    `columns` below 3, or given for a format that names its columns.
    """
    path = _existing(Path(path))
    suffix = _suffix(path)
    if suffix is None:
        raise bad_file(path, f"one of the suffixes {', '.join(sorted(READERS))}", f"{path.suffix or 'no suffix'}")
    if columns is not None and not suffix.endswith("bin"):
        raise OptionError(f"columns= is for .bin and .pcd.bin, found {suffix} ({path})")
    with _any_error(path, f"a readable {suffix} file"):
        cloud = READERS[suffix](path, columns)
    if not len(cloud.xyz):
        raise bad_file(path, "points", "none")
    name = path.name[: -len(suffix)]
    given = _label_path(path, name, cloud, labels)
    raw, label_set = (cloud.labels, cloud.label_set) if given is None else read_labels(given)
    if labels is False:
        raw, label_set = None, None
    if raw is not None and len(raw) != len(cloud.xyz):
        raise bad_file(given or path, f"{len(cloud.xyz)} labels, one per point of {path.name}", str(len(raw)))
    return _scan(path, name, cloud, raw, label_set)


def find_scans(path: str | Path) -> list[Path]:
    """The scans under a folder (recursive, sorted), or the one file.

    Label files are skipped, as are arrays and tables (.npy, .csv, .parquet ...) without points. Raises FileError if
    there is nothing, or nothing with a reader; the message lists the suffixes.
    """
    root = Path(path)
    if not root.exists():
        raise bad_file(root, "a file or a folder", "nothing")
    if root.is_file():
        if _suffix(root) is None:
            raise bad_file(root, f"one of the suffixes {', '.join(sorted(READERS))}", f"{root.suffix or 'no suffix'}")
        return [root]
    files = sorted(f for f in root.rglob("*") if f.is_file())
    scans = [f for f in files if _is_scan(f)]
    if not scans:
        raise bad_file(
            root, f"scans with one of the suffixes {', '.join(sorted(READERS))}", f"{len(files)} other files"
        )
    return scans


def read_labels(path: str | Path) -> tuple[np.ndarray, LabelSet]:
    """Raw labels int64 [P] of a label file, and their label set.

    .label holds uint32, of which the lower 16 bits are the class (SemanticKITTI); .bin holds uint8 (nuScenes lidarseg);
    .npy holds integers. Raises FileError for any other file.
    """
    path = _existing(Path(path))
    suffix = path.suffix.lower()
    if suffix not in _LABEL_READERS:
        raise bad_file(path, f"labels in one of {', '.join(sorted(_LABEL_READERS))}", path.suffix or "no suffix")
    return _LABEL_READERS[suffix](path)


def _existing(path: Path) -> Path:
    if path.is_dir():
        raise bad_file(path, "a file", "a folder (find_scans lists the scans in it)")
    if not path.exists():
        raise bad_file(path, "a file", "nothing")
    if not path.stat().st_size:
        raise bad_file(path, "data", "an empty file (0 bytes)")
    return path


def _suffix(path: Path) -> str | None:
    """The longest known suffix, so that .pcd.bin is not taken for .bin."""
    name = path.name.lower()
    return max((s for s in READERS if name.endswith(s)), key=len, default=None)


def _is_scan(path: Path) -> bool:
    suffix = _suffix(path)
    if suffix is None or path.name.endswith(_LIDARSEG):
        return False
    try:
        return _PROBES[suffix](path) if suffix in _PROBES else True
    except Exception:
        return True  # A broken file should be reported when it is read, not skipped.


def _scan(path: Path, name: str, cloud: PointFile, raw: np.ndarray | None, label_set: LabelSet | None) -> Scan:
    try:
        if raw is not None:
            label_set = label_set if label_set and label_set.raw else generic_labels(raw)
            raw = label_set.from_raw(raw)
        scan = Scan(cloud.xyz, cloud.feats, raw, name, label_set)
    except FileError:
        raise
    except PumiceError as error:
        raise FileError(f"{path}: {error}") from error
    if not len(scan):
        raise bad_file(path, "points with finite coordinates", f"{scan.dropped} points, none of them finite")
    return scan


def _label_path(path: Path, name: str, cloud: PointFile, labels: str | Path | bool | None) -> Path | None:
    """The label file to use, or None for the labels inside the scan (if any)."""
    if labels is None or isinstance(labels, bool):
        if not labels or cloud.labels is not None:
            return None
        beside = (path.with_name(name + ".label"), path.parent.parent / "labels" / (name + ".label"))
        return next((f for f in beside if f.is_file()), None)
    labels = Path(labels)
    if not labels.is_dir():
        return _existing(labels)
    names = [name + ending for ending in (".label", _LIDARSEG, ".npy")]
    found = next((labels / n for n in names if (labels / n).is_file()), None)
    if found is None:
        raise bad_file(labels, f"one of {', '.join(names)} in the folder", "none of them")
    return found


def _semantic_kitti_labels(path: Path) -> tuple[np.ndarray, LabelSet]:
    data = path.read_bytes()
    if len(data) % 4:
        raise bad_file(path, "a multiple of 4 bytes (uint32 labels)", f"{len(data)} bytes")
    return known_or_generic(np.frombuffer(data, "<u4").astype(np.int64) & 0xFFFF, SEMANTIC_KITTI, path)


def _lidarseg_labels(path: Path) -> tuple[np.ndarray, LabelSet]:
    return known_or_generic(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), NUSCENES, path)


def _npy_labels(path: Path) -> tuple[np.ndarray, LabelSet]:
    with _loaded(path) as raw:
        if not isinstance(raw, np.ndarray) or raw.dtype.kind not in "iu":
            raise bad_file(path, "an array of integers", f"dtype {getattr(raw, 'dtype', 'none')}")
    return raw.reshape(-1).astype(np.int64), generic_labels(raw)


@contextmanager
def _any_error(path: Path, expected: str) -> Iterator[None]:
    """Convert any error to FileError: third-party parsers raise anything on a damaged file."""
    try:
        yield
    except (PumiceError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # A Rust panic is not an Exception.
        raise bad_file(path, expected, f"{type(error).__name__}: {error}") from error


@contextmanager
def _loaded(path: Path) -> Iterator[Any]:
    """The array or archive in a numpy file; with our own handle, since numpy leaks that of a broken archive."""
    with path.open("rb") as file, _any_error(path, f"a numpy {path.suffix} file of plain arrays"):
        yield np.load(file, allow_pickle=False)


def _read_npy(path: Path, columns: int | None = None) -> PointFile:
    with _loaded(path) as table:
        table = np.asarray(table)
    if table.ndim != 2 or table.shape[1] < 3 or table.dtype.kind not in "fiu":
        raise bad_file(path, "numbers [P, 3 or more]", f"{table.dtype} {list(table.shape)}")
    return from_columns(table)


def _read_npz(path: Path, columns: int | None = None) -> PointFile:
    with _loaded(path) as archive:
        key = next((k for k in _POINT_KEYS if k in archive.files), None)
        if key is None:
            raise bad_file(path, f"an array called {' | '.join(_POINT_KEYS)}", f"{', '.join(archive.files) or 'none'}")
        keys = [key, *(k for k in (*_FEAT_KEYS, *_LABEL_KEYS) if k in archive.files)]
        arrays = {}
        for k in keys:
            with _any_error(path, f"a readable array {k}"):
                arrays[k] = np.asarray(archive[k])
    points = arrays[key]
    if points.ndim != 2 or points.shape[1] < 3 or points.dtype.kind not in "fiu":
        raise bad_file(path, f"{key} of numbers [P, 3 or more]", f"{points.dtype} {list(points.shape)}")
    if points.dtype.kind in "iu" and points.shape[1] != 3:
        raise bad_file(path, f"integer {key} [P, 3] (x, y, z, no batch column)", str(list(points.shape)))
    labels = next((arrays[k] for k in _LABEL_KEYS if k in arrays), None)
    if labels is not None and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise bad_file(path, "labels of integers [P]", f"{labels.dtype} {list(labels.shape)}")
    plain = from_columns(points)
    feats = next((k for k in _FEAT_KEYS if k in arrays), None)
    if feats is None:
        return PointFile(plain.xyz, plain.feats, labels)
    if arrays[feats].dtype.kind not in "fiu":
        raise bad_file(path, f"{feats} of numbers", str(arrays[feats].dtype))
    return PointFile(plain.xyz, _features(arrays[feats], scale=feats not in ("feats", "features")), labels)


def _features(values: np.ndarray, scale: bool) -> np.ndarray:
    values = unit_scale(values) if scale else values
    return values[:, None] if values.ndim == 1 else values


def _npy_holds_points(path: Path) -> bool:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return array.ndim == 2 and array.shape[1] >= 3


def _npz_holds_points(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(f"{k}.npy" in archive.namelist() for k in _POINT_KEYS)


READERS: Mapping[str, Reader] = MappingProxyType(
    {
        ".bin": read_bin,
        ".pcd.bin": read_bin,
        ".ply": read_ply,
        ".pcd": read_pcd,
        ".las": read_las,
        ".laz": read_las,
        ".npz": _read_npz,
        ".npy": _read_npy,
        ".tns": read_tns,
        ".xyz": read_text,
        ".txt": read_text,
        ".csv": read_text,
        ".obj": read_obj,
        ".feather": read_arrow,
        ".parquet": read_arrow,
    }
)
"""Suffix to reader (path, columns) -> Cloud."""
_LABEL_READERS: Mapping[str, Callable[[Path], tuple[np.ndarray, LabelSet]]] = MappingProxyType(
    {".label": _semantic_kitti_labels, ".bin": _lidarseg_labels, ".npy": _npy_labels}
)
_PROBES: Mapping[str, Callable[[Path], bool]] = MappingProxyType(
    {
        ".npy": _npy_holds_points,
        ".npz": _npz_holds_points,
        ".txt": text_holds_points,
        ".csv": text_holds_points,
        ".xyz": text_holds_points,
        ".feather": arrow_holds_points,
        ".parquet": arrow_holds_points,
    }
)
