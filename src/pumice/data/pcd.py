"""Point Cloud Library files: ascii, binary and binary_compressed (LZF)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pumice.data.scan import PointFile, bad_file, from_fields

_KINDS = {"F": "f", "I": "i", "U": "u"}


@dataclass(frozen=True)
class _Header:
    """A parsed file: fields as a dtype (sub-array for COUNT > 1), number of points, encoding, and undecoded body."""

    dtype: np.dtype
    points: int
    encoding: str
    body: bytes


def read_pcd(path: Path, columns: int | None = None) -> PointFile:
    """Points of a PCD file; uses the fields x, y, z, intensity, rgb(a) and label."""
    header = _header(path, path.read_bytes())
    table = _DECODERS[header.encoding](path, header)
    names = [n for n in header.dtype.names or () if header.dtype[n].shape == ()]
    return from_fields(path, {n: table[n] for n in names})


def _header(path: Path, data: bytes) -> _Header:
    entries: dict[str, list[str]] = {}
    start = 0
    while "DATA" not in entries:
        end = data.find(b"\n", start)
        if end < 0:
            raise bad_file(path, "a PCD header that ends in DATA", f"no DATA line in {len(data)} bytes")
        words = data[start:end].decode("ascii", "replace").split()
        start = end + 1
        if words and not words[0].startswith("#"):
            entries[words[0].upper()] = words[1:]
    missing = [k for k in ("FIELDS", "SIZE", "TYPE") if k not in entries]
    if missing:
        raise bad_file(path, "FIELDS, SIZE and TYPE in the PCD header", f"no {', '.join(missing)}")
    encoding = (entries["DATA"] or [""])[0].lower()
    if encoding not in _DECODERS:
        raise bad_file(path, f"DATA {' | '.join(_DECODERS)}", f"DATA {encoding}")
    return _Header(_dtype(path, entries), _count(path, entries), encoding, data[start:])


def _dtype(path: Path, entries: dict[str, list[str]]) -> np.dtype:
    names = entries["FIELDS"]
    counts = entries.get("COUNT", ["1"] * len(names))
    columns = [names, entries["SIZE"], entries["TYPE"], counts]
    if len({len(c) for c in columns}) != 1:
        raise bad_file(path, f"{len(names)} entries in SIZE, TYPE and COUNT", f"{[len(c) for c in columns[1:]]}")
    fields = []
    for i, (name, size, kind, count) in enumerate(zip(*columns, strict=True)):
        # Padding fields are all called "_", which a dtype does not allow.
        name = f"_{i}" if name == "_" else name
        try:
            dtype = np.dtype(f"<{_KINDS[kind.upper()]}{int(size)}")
            fields.append((name, dtype) if int(count) == 1 else (name, dtype, (int(count),)))
        except (KeyError, TypeError, ValueError):
            raise bad_file(
                path, "TYPE F, I or U of SIZE 1, 2, 4 or 8", f"TYPE {kind} SIZE {size} COUNT {count} for {name}"
            ) from None
    try:
        return np.dtype(fields)
    except ValueError as error:
        raise bad_file(path, "field names that differ", str(error)) from None


def _count(path: Path, entries: dict[str, list[str]]) -> int:
    try:
        if entries.get("POINTS"):
            points = int(entries["POINTS"][0])
        else:
            points = int(entries["WIDTH"][0]) * int(entries.get("HEIGHT", ["1"])[0])
    except (KeyError, IndexError, ValueError):
        raise bad_file(path, "POINTS, or WIDTH and HEIGHT, as whole numbers", "none in the header") from None
    if points < 0:
        raise bad_file(path, "POINTS of 0 or more", str(points))
    return points


def _ascii(path: Path, header: _Header) -> np.ndarray:
    widths = [int(np.prod(header.dtype[n].shape, dtype=int)) for n in header.dtype.names or ()]
    words = header.body.split()
    if len(words) != header.points * sum(widths):
        raise bad_file(path, f"{header.points} points of {sum(widths)} numbers", f"{len(words)} numbers")
    try:
        values = np.array(words, np.float64).reshape(header.points, sum(widths))
    except ValueError as error:
        raise bad_file(path, "numbers", str(error)) from None
    table = np.zeros(header.points, header.dtype)
    starts = np.cumsum([0, *widths])
    for name, start, width in zip(header.dtype.names or (), starts, widths, strict=False):
        column = values[:, start : start + width] if header.dtype[name].shape else values[:, start]
        with np.errstate(invalid="ignore"):
            table[name] = column.astype(header.dtype[name].base)
    return table


def _binary(path: Path, header: _Header) -> np.ndarray:
    size = header.points * header.dtype.itemsize
    if len(header.body) < size:
        raise bad_file(path, f"{size} bytes of data for {header.points} points", f"{len(header.body)} bytes")
    return np.frombuffer(header.body, header.dtype, count=header.points)


def _compressed(path: Path, header: _Header) -> np.ndarray:
    """Read two uint32 sizes, then LZF data of the fields one after the other (all x, all y, ...)."""
    if len(header.body) < 8:
        raise bad_file(path, "8 bytes of sizes before the compressed data", f"{len(header.body)} bytes")
    packed, size = (int(v) for v in np.frombuffer(header.body, "<u4", count=2))
    if len(header.body) - 8 < packed:
        raise bad_file(path, f"{packed} bytes of compressed data", f"{len(header.body) - 8} bytes")
    if size != header.points * header.dtype.itemsize:
        raise bad_file(
            path,
            f"{header.points * header.dtype.itemsize} bytes for {header.points} points",
            f"{size} bytes in the compressed block",
        )
    try:
        data = lzf_decode(header.body[8 : 8 + packed], size)
    except ValueError as error:
        raise bad_file(path, "LZF data", str(error)) from None
    table, start = np.zeros(header.points, header.dtype), 0
    for name in header.dtype.names or ():
        kind = header.dtype[name]
        block = np.frombuffer(data, kind.base, header.points * kind.itemsize // kind.base.itemsize, start)
        table[name] = block.reshape(header.points, *kind.shape)
        start += header.points * kind.itemsize
    return table


def lzf_decode(packed: bytes, size: int) -> bytes:
    """Decode LZF data to `size` bytes; ValueError if it is not LZF of that size. A control byte c below 32 starts a run
    of c + 1 literal bytes; any other copies (c >> 5) + 2 bytes (7 << 5: a length byte follows and is added) from ((c &
    31) << 8 | next) + 1 bytes back."""
    out, i = bytearray(), 0
    try:
        while i < len(packed) and len(out) <= size:
            control = packed[i]
            i += 1
            if control < 32:
                out += packed[i : i + control + 1]
                i += control + 1
                continue
            length = control >> 5
            if length == 7:
                length += packed[i]
                i += 1
            _copy_back(out, ((control & 31) << 8 | packed[i]) + 1, length + 2)
            i += 1
    except IndexError:
        raise ValueError(f"a block that ends inside a token, after {len(out)} of {size} bytes") from None
    if len(out) != size:
        raise ValueError(f"a block that unpacks to {len(out)} bytes instead of {size}")
    return bytes(out)


def _copy_back(out: bytearray, back: int, length: int) -> None:
    start = len(out) - back
    if start < 0:
        raise ValueError(f"a reference {back} bytes back, {len(out)} bytes into the output")
    if back >= length:
        out += out[start : start + length]
    else:  # The copy overlaps what it writes: the last ``back`` bytes repeat.
        out += (out[start:] * (length // back + 1))[:length]


_DECODERS = {"ascii": _ascii, "binary": _binary, "binary_compressed": _compressed}
