"""Tables of columns: text (.xyz .txt .csv .tns .obj), and Arrow files (.feather .parquet, as in Argoverse 2)."""

from pathlib import Path
from typing import Any

import numpy as np

from pumice.data.point_file import PointFile, bad_file, from_columns, from_fields, optional_package, unit_scale

__all__ = ["arrow_holds_points", "read_arrow", "read_obj", "read_text", "read_tns", "text_holds_points"]

_SPACED = bytes.maketrans(b",;\t\r", b"    ")
_HEAD_BYTES = 4096
# Longer rows are hardly points: the poses of KITTI have 12 numbers.
_WIDEST = 10


def read_text(path: Path, columns: int | None = None) -> PointFile:
    """Points of lines of numbers, separated by blanks, commas or semicolons; comments begin with # or //. A first line
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
    dataset = optional_package(path, "pyarrow.dataset")
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
