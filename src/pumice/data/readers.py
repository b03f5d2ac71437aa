"""Reading of scans: a table of readers by suffix, and the search for scans and their labels.

Here are the readers of arrays (.npy .npz), of tables of columns as text (.xyz .txt .csv .tns .obj), of Arrow files
(.feather .parquet, as in Argoverse 2), and of raw binary scans: rows of float32 or float16 without a header, so the
column count must be inferred.
"""

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pumice.data.labels import NUSCENES, SEMANTIC_KITTI, LabelSet, generic_labels, known_or_generic
from pumice.data.las import read_las
from pumice.data.pcd import read_pcd
from pumice.data.ply import read_ply
from pumice.data.scan import (
    PointFile,
    Scan,
    all_columns,
    bad_file,
    from_columns,
    from_fields,
    optional_package,
    unit_scale,
    within,
)
from pumice.errors import FileError, OptionError, PumiceError

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
    """The label file to read, or None to use the labels inside the scan file, if any."""
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
    """The array or archive in a numpy file, opened here, since numpy does not close a broken archive."""
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


# Text and tables
_SPACED = bytes.maketrans(b",;\t\r", b"    ")
_HEAD_BYTES = 4096
# Longer rows are hardly points: the poses of KITTI have 12 numbers.
_WIDEST = 10


def read_text(path: Path, columns: int | None = None) -> PointFile:
    """Points from lines of numbers separated by blanks, commas or semicolons; comments begin with # or //. A first line
    of words names the columns (as in PLY and PCD); without one `from_columns` interprets them."""
    lines = _lines(path.read_bytes())
    names = _names(lines)
    if not names:
        return from_columns(_numbers(path, lines))
    table = _numbers(path, lines[1:], len(names))
    return from_fields(path, dict(zip(names, table.T, strict=True)))


def read_obj(path: Path, columns: int | None = None) -> PointFile:
    """The vertices of a Wavefront OBJ file: `v x y z`, or `v x y z r g b`."""
    lines = [line[2:] for line in _lines(path.read_bytes()) if line.startswith(b"v ")]
    if not lines:
        raise bad_file(path, "vertices (lines that begin with v)", "none")
    table = _numbers(path, lines)
    return PointFile(table[:, :3], unit_scale(table[:, 3:6]) if table.shape[1] == 6 else table[:, :0])


def read_tns(path: Path, columns: int | None = None) -> PointFile:
    """Voxel text: i j k (and optional values, kept unchanged) per line."""
    table = _numbers(path, _lines(path.read_bytes()))
    return PointFile(table[:, :3], table[:, 3:])


def read_arrow(path: Path, columns: int | None = None) -> PointFile:
    """Points from the columns of a Feather or Parquet file, by name as in PLY and PCD."""
    table = _dataset(path).to_table()
    return from_fields(path, {name: column.to_numpy() for name, column in zip(table.column_names, table, strict=True)})


def text_holds_points(path: Path) -> bool:
    """True if the first line of a text file names x, y, z or is a row of 3 to 10 numbers."""
    with path.open("rb") as file:
        lines = _lines(file.read(_HEAD_BYTES))
    names = _names(lines)
    return set("xyz") <= set(names) if names else bool(lines) and 3 <= len(lines[0].split()) <= _WIDEST


def arrow_holds_points(path: Path) -> bool:
    """True if the columns of a Feather or Parquet file include x, y and z."""
    return set("xyz") <= {name.lower() for name in _dataset(path).schema.names}


def _dataset(path: Path) -> Any:
    dataset = optional_package("pyarrow.dataset", path=path)
    return dataset.dataset(path, format=path.suffix[1:].lower())


def _lines(data: bytes) -> list[bytes]:
    lines = (line.strip() for line in data.translate(_SPACED, delete=b'"').split(b"\n"))
    return [line for line in lines if line and not line.startswith((b"#", b"//"))]


def _names(lines: list[bytes]) -> list[str]:
    """The column names in the first line, in lower case; none if it holds numbers."""
    words = lines[0].decode("utf-8", "replace").lower().split() if lines else []
    try:
        return [] if [float(word) for word in words] else words
    except ValueError:
        return words


def _numbers(path: Path, lines: list[bytes], width: int | None = None) -> np.ndarray:
    """The numbers of lines [P, width]; width: that of the first line by default, at least 3."""
    width = width or (len(lines[0].split()) if lines else 0)
    words = b" ".join(lines).split()
    if width < 3 or len(words) != width * len(lines):
        raise bad_file(
            path,
            "lines of equally many numbers, 3 or more",
            f"{len(lines)} lines, {width} numbers in the first, {len(words)} in all",
        )
    try:
        return np.array(words, np.float64).reshape(-1, width)
    except ValueError as error:
        raise bad_file(path, "numbers", str(error)) from None


# Raw binary scans
Layout = tuple[int, str]
_FAR = 1e4
_OUTLIERS = 0.01
_SAMPLE = 200_000
# File size in bytes from which small differences in the roughness of layouts are significant.
_MANY = 20_000
# In order of preference; a later layout must fit clearly better.
_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    ".bin": ((4, "<f4"), (5, "<f4"), (3, "<f4"), (6, "<f4"), (4, "<f2"), (5, "<f2")),
    ".pcd.bin": ((5, "<f4"), (4, "<f4"), (5, "<f2"), (4, "<f2")),
}


def read_bin(path: Path, columns: int | None = None) -> PointFile:
    """Points of a headerless file of float32 (or float16) rows. Rows are x, y, z, then intensity (KITTI), intensity and
    ring (nuScenes), intensity and elongation (Waymo), r, g, b (ScanNet), or nothing. Without `columns` the layout is
    the one that divides the file, gives plausible numbers (finite, within 10 km), and has the smoothest sequence of
    rows; the few rows beyond 10 km become NaN, which a scan drops."""
    data = path.read_bytes()
    if columns is not None:
        return from_columns(_given(path, data, columns))
    suffix = ".pcd.bin" if path.name.lower().endswith(".pcd.bin") else ".bin"
    layouts = _LAYOUTS[suffix]
    fitting = [one for one in layouts if len(data) % _row(one) == 0]
    # Round float32 numbers read as plausible float16, hardly ever the other way.
    for kind in dict.fromkeys(kind for _, kind in fitting):
        if sane := [one for one in fitting if one[1] == kind and _sane(data, one)]:
            break
    else:
        raise bad_file(
            path,
            _sizes(layouts) + ", with finite coordinates within 10 km",
            f"{len(data)} bytes" + (" of implausible coordinates (columns= accepts any)" if fitting else ""),
        )
    flat = _compressed(data, kind)
    scores = {one: _roughness(flat, one[0]) for one in sane}
    best = min(scores.values())
    margin = 1.15 if len(data) > _MANY else 1.3
    chosen = next(one for one in sane if scores[one] <= margin * best)
    _refuse_truncated(path, len(data), flat, chosen, scores[chosen])
    table = _rows(data, chosen)
    if not _plain(data, kind):
        table[_far(table)] = np.nan
    return from_columns(table)


def _row(layout: Layout) -> int:
    return layout[0] * np.dtype(layout[1]).itemsize


def _rows(data: bytes, layout: Layout) -> np.ndarray:
    return np.frombuffer(data, layout[1]).astype(np.float32).reshape(-1, layout[0])


def _sizes(layouts: Iterable[Layout]) -> str:
    sizes = ", ".join(f"{_row(one)} ({one[0]} x float{8 * np.dtype(one[1]).itemsize})" for one in layouts)
    return f"a size that is a multiple of one of {sizes}"


def _given(path: Path, data: bytes, columns: int) -> np.ndarray:
    if columns < 3:
        raise OptionError(f"columns= is 3 or more (x, y, z, ...), found {columns}")
    layouts = [(columns, "<f4"), (columns, "<f2")]
    fitting = [one for one in layouts if len(data) % _row(one) == 0]
    if not fitting:
        raise bad_file(path, _sizes(layouts), f"{len(data)} bytes")
    return _rows(data, next((one for one in fitting if _sane(data, one)), fitting[0]))


def _plain(data: bytes, kind: str) -> bool:
    """True if all numbers are finite and within 10 km."""
    return within(np.frombuffer(data, kind), _FAR)


def _sane(data: bytes, layout: Layout) -> bool:
    """True if half of the rows are finite (sensors mark lost returns as NaN), and hardly any is beyond 10 km."""
    if _plain(data, layout[1]):
        return True
    table = _rows(data, layout)
    return bool(all_columns(np.isfinite(table)).mean() >= 0.5 and _far(table).sum() <= _OUTLIERS * len(table))


def _far(table: np.ndarray) -> np.ndarray:
    """bool [P]: the row is finite and beyond 10 km."""
    return all_columns(np.isfinite(table)) & ~all_columns(np.abs(table[:, :3]) < _FAR)


def _compressed(data: bytes, kind: str) -> np.ndarray:
    """The first numbers of a file, without regard to rows, so that large ones count less."""
    flat = np.frombuffer(data, kind, count=min(_SAMPLE, len(data) // np.dtype(kind).itemsize))
    with np.errstate(all="ignore"):
        flat = flat.astype(np.float32)
        return np.arcsinh(flat if within(flat, np.inf) else np.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0))


def _roughness(flat: np.ndarray, columns: int) -> float:
    """Mean step between rows; a wrong column count compares x with y or z, and is rougher."""
    step = np.abs(flat[columns:] - flat[:-columns])
    return float(step.mean()) if step.size else 0.0


def _refuse_truncated(path: Path, size: int, flat: np.ndarray, chosen: Layout, score: float) -> None:
    """FileError for a truncated file, which may divide by a wrong row size while another fits far better."""
    limit = score * (0.85 if size > _MANY else 0.6)
    for columns in (3, 4, 5, 6):
        row = _row((columns, chosen[1]))
        if size % row and _roughness(flat, columns) < limit:
            period = f"a multiple of {row} bytes, as the values repeat every {columns} numbers"
            raise bad_file(path, period, f"{size} bytes (truncated?)")


# Readers by suffix
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
"""Suffix to reader (path, columns) -> PointFile."""
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
