"""LAS and LAZ files, read by laspy after their header has been checked against the file size."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np

from pumice.data.labels import ASPRS, known_or_generic
from pumice.data.scan import PointFile, bad_file, optional_package, unit_scale

_HEADER = 227
_RECORD, _EXTENDED_RECORD = 54, 60
_COMPRESSED = 128
# In the best case of LAZ, identical points, a point takes a hundredth of a byte.
_POINTS_PER_BYTE = 128
_LARGEST_CHUNK = 1_000_000
_VARIABLE = 0xFFFFFFFF
_LAYERED = 3
# Layers of the items of LAZ 3: positions and returns, colours, colours and infrared, wave packets.
_LAYERS = {10: 9, 11: 1, 12: 2, 13: 1}


def read_las(path: Path, columns: int | None = None) -> PointFile:
    """Points of a LAS or LAZ file: position, intensity, colours, and classes if points are classified."""
    laspy = optional_package("laspy", path=path)
    data = path.read_bytes()
    _check_counts(path, data)
    # Read from memory: a read beyond the end is short instead of allocating the announced length.
    with laspy.open(io.BytesIO(data)) as reader:
        if reader.header.are_points_compressed:
            _check_chunks(path, data, reader.header)
        las = reader.read()
    xyz = np.stack([np.asarray(las.x), np.asarray(las.y), np.asarray(las.z)], axis=1)
    if las.header.point_count != len(xyz):
        raise bad_file(path, f"{las.header.point_count} points", f"{len(xyz)} points")
    names = set(las.point_format.dimension_names)
    feats = [unit_scale(np.asarray(las.intensity))[:, None]]
    if {"red", "green", "blue"} <= names:
        feats.append(unit_scale(np.stack([np.asarray(las[c]) for c in ("red", "green", "blue")], axis=1)))
    classes = np.asarray(las.classification).astype(np.int64)
    # 0 and 1 mean "never classified" and "unclassified": no labels rather than a scan of ignored points.
    labels, label_set = known_or_generic(classes, ASPRS, path) if np.any(classes > 1) else (None, None)
    return PointFile(xyz, np.concatenate(feats, axis=1), labels, label_set)


def _check_counts(path: Path, data: bytes) -> None:
    """Raise FileError unless the counts in the header fit the file: laspy and lazrs allocate and loop by them."""
    if len(data) < _HEADER or data[:4] != b"LASF":
        raise bad_file(path, f"a LAS header of {_HEADER} bytes", f"{len(data)} bytes that begin with {data[:4]!r}")
    header, start, records, kind, size, points = struct.unpack_from("<HIIBHI", data, 94)
    _fits(path, "the header and its records", header + _RECORD * records, start)
    _fits(path, "the points", start, len(data))
    if data[25] >= 4:
        _fits(path, "the header", 255, header)
        extended, number, points = struct.unpack_from("<QIQ", data, 235)
        if number:
            _fits(path, "the extended records", extended + _EXTENDED_RECORD * number, len(data))
    needed = start + size * points if kind < _COMPRESSED else points // _POINTS_PER_BYTE
    _fits(path, f"{points} points", needed, len(data))


def _check_chunks(path: Path, data: bytes, header: Any) -> None:
    """Raise FileError unless chunks and layers of a LAZ file lie within it: lazrs allocates the announced sizes."""
    lazrs = optional_package("lazrs", path=path)
    start, record = header.offset_to_point_data, header.vlrs.get("LasZipVlr")[0].record_data
    _check_table(path, data, start)
    compressor, chunk = struct.unpack_from("<H10xI", record)
    items = [(kind, size) for kind, size, _ in struct.iter_unpack("<HHH", record[34:])]
    if sum(size for _, size in items) != header.point_format.size:
        raise bad_file(path, f"items of {header.point_format.size} bytes per point", f"items {items}")
    if chunk != _VARIABLE:
        _fits(path, f"chunks of {chunk} points", chunk, max(header.point_count, _LARGEST_CHUNK))
    source = io.BytesIO(data)
    source.seek(start)
    sizes = [size for _, size in lazrs.read_chunk_table(source, lazrs.LazVlr(record))]
    _fits(path, "the chunks", start + 8 + sum(sizes), len(data))
    if compressor == _LAYERED:
        # A chunk is its first point, the number of its points, the sizes of its layers, and the layers.
        layers, head = sum(_LAYERS.get(kind, size) for kind, size in items), header.point_format.size + 4
        for begin, size in zip(np.cumsum([start + 8, *sizes]).tolist(), sizes, strict=False):
            held = np.frombuffer(data, "<u4", layers, begin + head).sum(dtype=np.int64)
            _fits(path, "the layers of a chunk", head + 4 * layers + int(held), size)


def _check_table(path: Path, data: bytes, start: int) -> None:
    """Raise FileError unless the chunk table of a LAZ file lies within it, with a plausible number of chunks."""
    _fits(path, "the offset of the chunk table", start + 8, len(data))
    table = struct.unpack_from("<q", data, start)[0]
    if table == -1:  # A writer that could not seek back left the offset at the end.
        table = struct.unpack_from("<q", data, len(data) - 8)[0]
    _fits(path, "the chunk table", table + 8 if table >= 0 else len(data) + 1, len(data))
    _fits(path, "the chunks", struct.unpack_from("<I", data, table + 4)[0], len(data))


def _fits(path: Path, what: str, end: int, size: int) -> None:
    if end > size:
        raise bad_file(path, f"{what} within {size} bytes", f"a header that needs {end}")
