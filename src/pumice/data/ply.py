"""PLY files: the scalar properties of the vertices, ascii or binary of either byte order."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pumice.data.scan import PointFile, bad_file, from_fields

_TYPES = {
    "char": "i1",
    "int8": "i1",
    "uchar": "u1",
    "uint8": "u1",
    "short": "i2",
    "int16": "i2",
    "ushort": "u2",
    "uint16": "u2",
    "int": "i4",
    "int32": "i4",
    "uint": "u4",
    "uint32": "u4",
    "float": "f4",
    "float32": "f4",
    "double": "f8",
    "float64": "f8",
}
_ORDERS = {"ascii": "=", "binary_little_endian": "<", "binary_big_endian": ">"}


@dataclass(frozen=True)
class _Element:
    """An element of the header: its rows, scalar properties (name, numpy code), and list properties."""

    name: str
    rows: int
    properties: list[tuple[str, str]]
    lists: list[str]


def read_ply(path: Path, columns: int | None = None) -> PointFile:
    """Points from the vertices of a PLY file; positions, colours, intensity and label, not the faces."""
    data = path.read_bytes()
    encoding, elements, body = _header(path, data)
    names = [e.name for e in elements]
    if "vertex" not in names:
        raise bad_file(path, "an element vertex", f"elements {', '.join(names) or 'none'}")
    before, vertex = elements[: names.index("vertex")], elements[names.index("vertex")]
    for element in (*before, vertex):
        if element.lists:
            raise bad_file(
                path, "no list property up to the vertices", f"list {element.lists[0]} in element {element.name}"
            )
    read = _ascii if encoding == "ascii" else _binary
    table = read(path, body, before, _dtype(path, vertex, _ORDERS[encoding]), vertex.rows)
    return from_fields(path, {n: table[n].astype(table.dtype[n].newbyteorder("=")) for n in table.dtype.names or ()})


def _header(path: Path, data: bytes) -> tuple[str, list[_Element], bytes]:
    if data[:3] != b"ply":
        raise bad_file(path, "a PLY file (first bytes 'ply')", f"first bytes {data[:8]!r}")
    end = data.find(b"end_header")
    stop = data.find(b"\n", end)
    if end < 0 or stop < 0:
        raise bad_file(path, "a PLY header that ends in end_header", f"none in {len(data)} bytes")
    encoding, elements = "", []
    for line in data[:end].decode("ascii", "replace").splitlines():
        words = line.split()
        try:
            if words[:1] == ["format"]:
                encoding = words[1]
            elif words[:1] == ["element"]:
                elements.append(_Element(words[1], int(words[2]), [], []))
                if elements[-1].rows < 0:
                    raise ValueError(line)
            elif words[:1] == ["property"]:
                _add_property(elements[-1], words[1:])
        except (IndexError, KeyError, ValueError):
            raise bad_file(path, "a PLY header line", repr(line)) from None
    if encoding not in _ORDERS:
        raise bad_file(path, f"format {' | '.join(_ORDERS)}", f"format {encoding or 'missing'}")
    return encoding, elements, data[stop + 1 :]


def _add_property(element: _Element, words: list[str]) -> None:
    if words[0] == "list":
        element.lists.append(words[3])
    else:
        element.properties.append((words[1], _TYPES[words[0]]))


def _dtype(path: Path, element: _Element, order: str) -> np.dtype:
    try:
        return np.dtype([(name, order + code) for name, code in element.properties])
    except ValueError as error:
        raise bad_file(path, f"properties of {element.name} that differ in name", str(error)) from None


def _binary(path: Path, body: bytes, before: list[_Element], dtype: np.dtype, rows: int) -> np.ndarray:
    start = sum(e.rows * sum(np.dtype(c).itemsize for _, c in e.properties) for e in before)
    if len(body) - start < rows * dtype.itemsize:
        raise bad_file(path, f"{rows * dtype.itemsize} bytes for {rows} vertices", f"{max(len(body) - start, 0)} bytes")
    return np.frombuffer(body, dtype, count=rows, offset=start)


def _ascii(path: Path, body: bytes, before: list[_Element], dtype: np.dtype, rows: int) -> np.ndarray:
    names = dtype.names or ()
    lines = [line for line in body.split(b"\n") if line.strip()]
    lines = lines[sum(e.rows for e in before) :][:rows]
    words = b" ".join(lines).split()
    if len(lines) != rows or len(words) != rows * len(names):
        raise bad_file(path, f"{rows} vertices of {len(names)} numbers", f"{len(lines)} lines, {len(words)} numbers")
    try:
        values = np.array(words, np.float64).reshape(rows, len(names))
    except ValueError as error:
        raise bad_file(path, "numbers", str(error)) from None
    table = np.zeros(rows, dtype)
    for i, name in enumerate(names):
        table[name] = values[:, i]
    return table
