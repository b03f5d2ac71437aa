"""Raw binary scans: rows of float32 or float16 without a header, so the column count must be inferred."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from pumice.data.point_file import PointFile, bad_file, from_columns
from pumice.errors import OptionError

__all__ = ["read_bin"]

Layout = tuple[int, str]
_FAR = 1e4
_OUTLIERS = 0.01
_SAMPLE = 200_000
# File size in bytes from which small differences between layouts are significant.
_MANY = 20_000
# In order of preference; a later one must fit clearly better.
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
    sane = [one for one in fitting if _sane(_rows(data, one))]
    if not sane:
        raise bad_file(
            path,
            _sizes(layouts) + ", with finite coordinates within 10 km",
            f"{len(data)} bytes" + (" of implausible coordinates (columns= accepts any)" if fitting else ""),
        )
    # Round float32 numbers read as plausible float16, hardly ever the other way.
    sane = [one for one in sane if one[1] == sane[0][1]]
    scores = {one: _roughness(data, one) for one in sane}
    best = min(scores.values())
    margin = 1.15 if len(data) > _MANY else 1.3
    chosen = next(one for one in sane if scores[one] <= margin * best)
    _refuse_truncated(path, data, chosen, scores[chosen])
    table = _rows(data, chosen)
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
    return _rows(data, next((one for one in fitting if _sane(_rows(data, one))), fitting[0]))


def _sane(table: np.ndarray) -> bool:
    """True if half of the rows are finite (sensors mark lost returns as NaN), and hardly any is beyond 10 km."""
    return bool(np.isfinite(table).all(1).mean() >= 0.5 and _far(table).sum() <= _OUTLIERS * len(table))


def _far(table: np.ndarray) -> np.ndarray:
    """bool [P]: the row is finite and beyond 10 km."""
    return np.logical_and(np.isfinite(table).all(1), (np.abs(table[:, :3]) >= _FAR).any(1))


def _roughness(data: bytes, layout: Layout) -> float:
    """Mean step between rows; a wrong column count compares x with y or z, and is rougher."""
    flat = np.frombuffer(data, layout[1], count=min(_SAMPLE, len(data) // np.dtype(layout[1]).itemsize))
    with np.errstate(all="ignore"):
        flat = np.arcsinh(np.nan_to_num(flat.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0))
    step = np.abs(flat[layout[0] :] - flat[: -layout[0]])
    return float(step.mean()) if step.size else 0.0


def _refuse_truncated(path: Path, data: bytes, chosen: Layout, score: float) -> None:
    """FileError for a truncated file, which may divide by a wrong row size while another fits far better."""
    limit = score * (0.85 if len(data) > _MANY else 0.6)
    for columns in (3, 4, 5, 6):
        other = (columns, chosen[1])
        if len(data) % _row(other) and _roughness(data, other) < limit:
            period = f"a multiple of {_row(other)} bytes, as the values repeat every {columns} numbers"
            raise bad_file(path, period, f"{len(data)} bytes (truncated?)")
