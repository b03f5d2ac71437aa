"""Every format is written here byte by byte, read back, broken, and refused."""

import importlib
import io
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pumice
from pumice.data import ASPRS, NUSCENES, READERS, SEMANTIC_KITTI, find_scans, read_labels, read_scan
from pumice.data.pcd import lzf_decode
from pumice.errors import FileError, OptionError


def _sweep(points: int, columns: int) -> np.ndarray:
    """Rows in the order of a sensor: a slowly turning ring of points, then intensity and more in [0, 1]."""
    turn = np.linspace(0, 12, points)
    xyz = np.stack([30 * np.cos(turn), 20 * np.sin(turn), 0.2 * turn - 1.7], axis=1)
    rest = 0.5 + 0.4 * np.sin(turn[:, None] * np.arange(1, columns - 2) + 1)
    return np.concatenate([xyz, rest], axis=1).astype(np.float32)


SWEEP = _sweep(240, 5)
LABELS = np.arange(240) % 4


# --- raw binary


@pytest.mark.parametrize(("suffix", "columns"), [(".bin", 4), (".bin", 5), (".bin", 3), (".pcd.bin", 5)])
def test_float32_rows(tmp_path: Path, suffix: str, columns: int) -> None:
    path = tmp_path / f"frame{suffix}"
    path.write_bytes(SWEEP[:, :columns].tobytes())
    scan = read_scan(path)
    assert scan.name == "frame"
    assert scan.labels is None
    np.testing.assert_array_equal(scan.xyz, SWEEP[:, :3])
    np.testing.assert_array_equal(scan.feats, SWEEP[:, 3:columns])


def test_six_columns_are_colours(tmp_path: Path) -> None:
    rows = np.concatenate([SWEEP[:, :3], np.round(255 * _sweep(240, 6)[:, 3:])], axis=1)
    (tmp_path / "room.bin").write_bytes(rows.tobytes())
    scan = read_scan(tmp_path / "room.bin")
    np.testing.assert_array_equal(scan.xyz, rows[:, :3])
    np.testing.assert_allclose(scan.feats, rows[:, 3:] / 255, rtol=1e-6)


def test_half_precision_rows(tmp_path: Path) -> None:
    path = tmp_path / "half.bin"
    path.write_bytes(SWEEP.astype(np.float16).tobytes())
    scan = read_scan(path)
    np.testing.assert_array_equal(scan.xyz, SWEEP[:, :3].astype(np.float16).astype(np.float32))
    assert scan.feats.shape == (240, 2)


def test_ring_numbers_are_no_feature_and_intensity_is_scaled(tmp_path: Path) -> None:
    rows = SWEEP.copy()
    rows[:, 3] *= 255
    rows[:, 4] = np.arange(240) % 32
    (tmp_path / "a.pcd.bin").write_bytes(rows.tobytes())
    scan = read_scan(tmp_path / "a.pcd.bin")
    np.testing.assert_allclose(scan.feats, SWEEP[:, 3:4], rtol=1e-5)


def test_columns_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "wide.bin"
    path.write_bytes(_sweep(30, 7).tobytes())
    assert read_scan(path, columns=7).feats.shape == (30, 4)
    with pytest.raises(OptionError, match="3 or more.*found 2"):
        read_scan(path, columns=2)
    with pytest.raises(FileError, match=r"multiple of one of 44 \(11 x float32\).*found 840 bytes"):
        read_scan(path, columns=11)


@given(
    points=st.integers(1, 50),
    columns=st.integers(3, 8),
    dtype=st.sampled_from(["<f4", "<f2"]),
    seed=st.integers(0, 99),
)
def test_given_columns_read_any_rows(
    tmp_path_factory: pytest.TempPathFactory, points: int, columns: int, dtype: str, seed: int
) -> None:
    rows = np.random.default_rng(seed).uniform(20, 90, (points, columns)).astype(dtype)
    path = tmp_path_factory.mktemp("rows") / "x.bin"
    path.write_bytes(rows.tobytes())
    # Single precision goes first: halves of 20 and more read as singles far beyond 10 km.
    np.testing.assert_array_equal(read_scan(path, columns=columns).xyz, rows[:, :3].astype(np.float32))


def test_points_without_return_are_dropped(tmp_path: Path) -> None:
    rows = SWEEP[:, :4].copy()
    rows[::8] = np.nan
    (tmp_path / "gaps.bin").write_bytes(rows.tobytes())
    (tmp_path / "gaps.label").write_bytes(np.full(240, 10, "<u4").tobytes())
    scan = read_scan(tmp_path / "gaps.bin", labels=True)
    assert (len(scan), scan.dropped) == (210, 30)
    assert scan.label_counts()["car"] == 210


@pytest.mark.parametrize("cut", [1, 2, 4, 8, 12, 14])
def test_a_cut_sweep_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.bin"
    path.write_bytes(_sweep(240, 4).tobytes()[:-cut])
    with pytest.raises(FileError, match=f"cut.bin: expected .*multiple of .*found {3840 - cut} bytes"):
        read_scan(path)


@pytest.mark.parametrize("far", [1e9, -1e9, 1e20])
def test_a_single_far_point_is_dropped(tmp_path: Path, far: float) -> None:
    rows = SWEEP[:, :4].copy()
    rows[7, 1] = far
    (tmp_path / "a.bin").write_bytes(rows.tobytes())
    scan = read_scan(tmp_path / "a.bin")
    assert scan.dropped == 1
    np.testing.assert_array_equal(scan.xyz, np.delete(rows[:, :3], 7, axis=0))
    assert len(read_scan(tmp_path / "a.bin", columns=4)) == 240, "given columns are taken as they are"


def test_bytes_that_are_no_coordinates_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise.bin"
    path.write_bytes(np.full(400, 1e30, np.float32).tobytes())
    with pytest.raises(FileError, match=r"finite coordinates within 10 km, found 1600 bytes of implausible"):
        read_scan(path)


# --- labels


def _kitti(folder: Path, labels: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    labels.mkdir(parents=True, exist_ok=True)
    (folder / "000000.bin").write_bytes(SWEEP[:, :4].tobytes())
    raw = np.array([10, 252, 40, 99], np.uint32)[LABELS] | (7 << 16)
    (labels / "000000.label").write_bytes(raw.tobytes())
    return folder / "000000.bin"


@pytest.mark.parametrize(
    ("scan", "labels", "argument"),
    [
        ("", "", True),
        ("velodyne", "labels", True),
        ("points", "elsewhere", "elsewhere"),
        ("points", "elsewhere", "elsewhere/000000.label"),
    ],
)
def test_labels_are_found(tmp_path: Path, scan: str, labels: str, argument: str | bool) -> None:
    path = _kitti(tmp_path / scan, tmp_path / labels)
    found = read_scan(path, labels=argument if isinstance(argument, bool) else tmp_path / argument)
    assert found.label_set == SEMANTIC_KITTI
    np.testing.assert_array_equal(found.labels, np.array([0, 0, 8, -1])[LABELS])


def test_labels_beside_a_scan_are_read_when_asked_for(tmp_path: Path) -> None:
    path = _kitti(tmp_path, tmp_path)
    assert read_scan(path).labels is None
    np.savez(tmp_path / "own.npz", xyz=SWEEP[:, :3], labels=LABELS)
    assert read_scan(tmp_path / "own.npz").labels is not None
    assert read_scan(tmp_path / "own.npz", labels=False).labels is None
    assert read_scan(path, labels=False).labels is None
    path.with_suffix(".label").unlink()
    assert read_scan(path, labels=True).labels is None


def test_a_stray_id_is_ignored_with_a_warning(tmp_path: Path) -> None:
    path = _kitti(tmp_path, tmp_path)
    raw = np.array([10, 252, 40, 99], np.uint32)[LABELS]
    raw[17] = 65000
    path.with_suffix(".label").write_bytes(raw.tobytes())
    with pytest.warns(UserWarning, match=r"000000.label: 1 of 240 labels .* \[65000\].*ignored"):
        scan = read_scan(path, labels=True)
    assert scan.label_set == SEMANTIC_KITTI
    assert scan.labels is not None and scan.labels[17] == -1 and scan.label_counts()["road"] == 60


def test_many_unknown_ids_give_generic_classes_with_a_warning(tmp_path: Path) -> None:
    path = _kitti(tmp_path, tmp_path)
    path.with_suffix(".label").write_bytes(np.array([10, 2, 3, 4], "<u4")[LABELS].tobytes())
    with pytest.warns(UserWarning, match=r"180 of 240 labels .* \[2, 3, 4\].*one class per value"):
        scan = read_scan(path, labels=True)
    assert scan.label_set is not None and scan.label_set.names == ("class 2", "class 3", "class 4", "class 10")


def test_ids_that_no_set_knows_become_generic_classes(tmp_path: Path) -> None:
    path = _kitti(tmp_path, tmp_path)
    path.with_suffix(".label").write_bytes((LABELS.astype("<u4") + 2).tobytes())
    scan = read_scan(path, labels=True)
    assert scan.label_set is not None
    assert scan.label_set.names == ("class 2", "class 3", "class 4", "class 5")
    np.testing.assert_array_equal(scan.labels, LABELS)


def test_lidarseg_and_numpy_labels(tmp_path: Path) -> None:
    (tmp_path / "a.pcd.bin").write_bytes(SWEEP.tobytes())
    (tmp_path / "a_lidarseg.bin").write_bytes(np.array([17, 24, 0, 30], np.uint8)[LABELS].tobytes())
    scan = read_scan(tmp_path / "a.pcd.bin", labels=tmp_path)
    assert scan.label_set == NUSCENES
    np.testing.assert_array_equal(scan.labels, np.array([3, 10, -1, 15])[LABELS])
    np.save(tmp_path / "own.npy", LABELS)
    assert read_scan(tmp_path / "a.pcd.bin", labels=tmp_path / "own.npy").label_counts()["class 3"] == 60
    assert [f.name for f in find_scans(tmp_path)] == ["a.pcd.bin"]


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = _kitti(tmp_path, tmp_path)
    label = path.with_suffix(".label")
    label.write_bytes(np.zeros(239, "<u4").tobytes())
    with pytest.raises(FileError, match="000000.label: expected 240 labels, one per point of 000000.bin, found 239"):
        read_scan(path, labels=True)
    label.write_bytes(b"abc")
    with pytest.raises(FileError, match=r"multiple of 4 bytes \(uint32 labels\), found 3 bytes"):
        read_scan(path, labels=True)
    label.write_bytes(b"")
    with pytest.raises(FileError, match="000000.label: expected data, found an empty file"):
        read_scan(path, labels=True)
    with pytest.raises(FileError, match="none.label: expected a file, found nothing"):
        read_scan(path, labels=tmp_path / "none.label")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="one of 000000.label, 000000_lidarseg.bin, 000000.npy in the folder"):
        read_scan(path, labels=tmp_path / "empty")
    (tmp_path / "a.txt").write_text("1")
    with pytest.raises(FileError, match=r"labels in one of .bin, .label, .npy, found .txt"):
        read_labels(tmp_path / "a.txt")
    np.save(tmp_path / "f.npy", np.zeros(240))
    with pytest.raises(FileError, match="an array of integers, found dtype float64"):
        read_scan(path, labels=tmp_path / "f.npy")
    np.save(tmp_path / "many.npy", np.arange(240) ** 3)
    np.save(tmp_path / "many.npy", np.arange(240))
    assert len(read_scan(path, labels=tmp_path / "many.npy").label_counts()) == 240


# --- PLY


PLY_FIELDS = [("x", "f4"), ("y", "f4"), ("z", "f4"), ("red", "u1"), ("green", "u1"), ("blue", "u1"), ("label", "i4")]
PLY_NAMES = {"f4": "float", "u1": "uchar", "i4": "int", "f8": "double"}


def _table(fields: list[tuple[str, str]], order: str = "<") -> np.ndarray:
    table = np.zeros(240, [(name, order + code) for name, code in fields])
    values = {"x": SWEEP[:, 0], "y": SWEEP[:, 1], "z": SWEEP[:, 2], "intensity": SWEEP[:, 3], "label": LABELS}
    for i, name in enumerate(table.dtype.names or ()):
        table[name] = values.get(name, (np.arange(240) * (i + 1)) % 256)
    return table


def _ply(encoding: str, body: bytes, fields: list[tuple[str, str]] = PLY_FIELDS, before: str = "") -> bytes:
    properties = "".join(f"property {PLY_NAMES[code]} {name}\n" for name, code in fields)
    faces = "element face 1\nproperty list uchar int vertex_indices\n"
    header = f"ply\nformat {encoding} 1.0\ncomment made by hand\n{before}element vertex 240\n{properties}{faces}"
    return header.encode() + b"end_header\n" + body


def _ascii_rows(table: np.ndarray) -> bytes:
    return b"".join(" ".join(repr(v) for v in row.tolist()).encode() + b"\n" for row in table)


@pytest.mark.parametrize(
    ("encoding", "order"),
    [("ascii", "<"), ("binary_little_endian", "<"), ("binary_big_endian", ">")],
)
def test_ply(tmp_path: Path, encoding: str, order: str) -> None:
    table = _table(PLY_FIELDS, order)
    body = _ascii_rows(table) + b"3 0 1 2\n" if encoding == "ascii" else table.tobytes() + b"\x03" + bytes(12)
    (tmp_path / "mesh.ply").write_bytes(_ply(encoding, body))
    scan = read_scan(tmp_path / "mesh.ply")
    np.testing.assert_array_equal(scan.xyz, SWEEP[:, :3])
    colours = np.stack([table[c] for c in ("red", "green", "blue")], axis=1) / 255
    np.testing.assert_allclose(scan.feats, colours, rtol=1e-6)
    np.testing.assert_array_equal(scan.labels, LABELS)


def test_ply_with_another_element_first(tmp_path: Path) -> None:
    fields = [("x", "f8"), ("y", "f8"), ("z", "f8"), ("intensity", "f4")]
    before = "element camera 2\nproperty float view\n"
    body = bytes(8) + _table(fields).tobytes()
    (tmp_path / "a.ply").write_bytes(_ply("binary_little_endian", body, fields, before))
    scan = read_scan(tmp_path / "a.ply")
    np.testing.assert_array_equal(scan.xyz, SWEEP[:, :3])
    np.testing.assert_array_equal(scan.feats, SWEEP[:, 3:4])


def test_ply_agrees_with_plyfile(tmp_path: Path) -> None:
    plyfile = pytest.importorskip("plyfile")
    for text in (True, False):
        element = plyfile.PlyElement.describe(_table(PLY_FIELDS), "vertex")
        plyfile.PlyData([element], text=text).write(tmp_path / "a.ply")
        scan = read_scan(tmp_path / "a.ply")
        np.testing.assert_allclose(scan.xyz, SWEEP[:, :3], rtol=1e-6)
        np.testing.assert_array_equal(scan.labels, LABELS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"obj\n", r"a PLY file \(first bytes 'ply'\), found first bytes b'obj"),
        (b"ply\nformat ascii 1.0\n", "a PLY header that ends in end_header, found none in 21 bytes"),
        (b"ply\nformat binary 1.0\nend_header\n", "format ascii | .*found format binary"),
        (b"ply\nformat ascii 1.0\nelement face 0\nend_header\n", "an element vertex, found elements face"),
        (b"ply\nformat ascii 1.0\nelement vertex many\nend_header\n", "header line, found 'element vertex many'"),
        (b"ply\nformat ascii 1.0\nelement vertex -1\nend_header\n", "header line, found 'element vertex -1'"),
        (b"ply\nformat ascii 1.0\nelement vertex 1\nproperty tiny x\nend_header\n", "'property tiny x'"),
        (_ply("ascii", b"1 2 3\n"), "240 vertices of 7 numbers, found 1 lines, 3 numbers"),
        (_ply("binary_little_endian", bytes(100)), "4560 bytes for 240 vertices, found 100 bytes"),
        (_ply("ascii", b"a b c d e f g\n" * 240), "numbers, found could not convert"),
        (_ply("ascii", b"1 2\n" * 240, PLY_FIELDS[:2]), "fields x, y, z, found only x, y"),
        (
            b"ply\nformat ascii 1.0\nelement vertex 1\nproperty list uchar int n\nend_header\n1 0\n",
            "no list property up to the vertices, found list n in element vertex",
        ),
    ],
)
def test_bad_ply(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.ply").write_bytes(content)
    with pytest.raises(FileError, match=f"bad.ply: expected .*{message}"):
        read_scan(tmp_path / "bad.ply")


# --- PCD


def _pcd_header(encoding: str, points: int = 240, fields: str = "x y z _ intensity label n") -> bytes:
    return (
        f"# .PCD v0.7\nVERSION 0.7\nFIELDS {fields}\nSIZE 4 4 4 1 4 2 4\nTYPE F F F U F U F\n"
        f"COUNT 1 1 1 4 1 1 2\nWIDTH {points}\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS {points}\n"
        f"DATA {encoding}\n"
    ).encode()


PCD_DTYPE = [("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("_", "u1", 4), ("intensity", "<f4"), ("label", "<u2"),
             ("n", "<f4", 2)]  # fmt: skip


def _pcd_table() -> np.ndarray:
    table = np.zeros(240, PCD_DTYPE)
    table["x"], table["y"], table["z"], table["intensity"], table["label"] = (*SWEEP[:, :4].T, LABELS)
    table["n"] = 0.5
    return table


def _lzf_encode(data: bytes) -> bytes:
    """A plain LZF packer: the longest earlier match of three bytes, found through a table, else literals."""
    out, literals, seen, i = bytearray(), bytearray(), {}, 0

    def flush() -> None:
        for start in range(0, len(literals), 32):
            run = literals[start : start + 32]
            out.append(len(run) - 1)
            out.extend(run)
        literals.clear()

    while i < len(data):
        key = data[i : i + 3]
        start = seen.get(key) if len(key) == 3 else None
        seen[key] = i
        if start is None or i - start > 8192:
            literals.append(data[i])
            i += 1
            continue
        length = 3
        while length < 264 and i + length < len(data) and data[start + length] == data[i + length]:
            length += 1
        flush()
        back = i - start - 1
        if length - 2 < 7:
            out += bytes([(length - 2) << 5 | back >> 8, back & 255])
        else:
            out += bytes([7 << 5 | back >> 8, length - 9, back & 255])
        i += length
    flush()
    return bytes(out)


def _compressed(table: np.ndarray) -> bytes:
    columns = b"".join(np.ascontiguousarray(table[n]).tobytes() for n in table.dtype.names or ())
    packed = _lzf_encode(columns)
    return struct.pack("<II", len(packed), len(columns)) + packed


PCD_BODIES: dict[str, Callable[[np.ndarray], bytes]] = {
    "ascii": lambda t: b"".join(
        " ".join(str(v) for v in np.hstack([np.ravel(f) for f in row.tolist()])).encode() + b"\n" for row in t
    ),
    "binary": lambda t: t.tobytes(),
    "binary_compressed": _compressed,
}


@pytest.mark.parametrize("encoding", PCD_BODIES)
def test_pcd(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.pcd").write_bytes(_pcd_header(encoding) + PCD_BODIES[encoding](_pcd_table()))
    scan = read_scan(tmp_path / "a.pcd")
    np.testing.assert_allclose(scan.xyz, SWEEP[:, :3], rtol=1e-6)
    np.testing.assert_allclose(scan.feats, SWEEP[:, 3:4], rtol=1e-6)
    np.testing.assert_array_equal(scan.labels, LABELS)


def test_pcd_colours_in_the_bits_of_a_float(tmp_path: Path) -> None:
    header = b"FIELDS x y z rgb\nSIZE 4 4 4 4\nTYPE F F F F\nPOINTS 1\nDATA binary\n"
    (tmp_path / "a.pcd").write_bytes(header + struct.pack("<fffI", 1, 2, 3, 0x00FF8000))
    np.testing.assert_allclose(read_scan(tmp_path / "a.pcd").feats, [[1, 128 / 255, 0]], rtol=1e-6)


def test_pcd_with_intensity_and_packed_colours_keeps_both(tmp_path: Path) -> None:
    header = b"FIELDS x y z intensity rgb\nSIZE 4 4 4 4 4\nTYPE F F F F U\nPOINTS 1\nDATA binary\n"
    (tmp_path / "a.pcd").write_bytes(header + struct.pack("<ffffI", 1, 2, 3, 0.5, 0x00FF8000))
    np.testing.assert_allclose(read_scan(tmp_path / "a.pcd").feats, [[0.5, 1, 128 / 255, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no header", "a PCD header that ends in DATA, found no DATA line in 9 bytes"),
        (b"FIELDS x\nDATA ascii\n", "FIELDS, SIZE and TYPE in the PCD header, found no SIZE, TYPE"),
        (b"FIELDS x\nSIZE 4\nTYPE F\nPOINTS 1\nDATA zip\n", "DATA ascii | .*found DATA zip"),
        (b"FIELDS x\nSIZE 3\nTYPE F\nPOINTS 1\nDATA ascii\n", "found TYPE F SIZE 3 COUNT 1 for x"),
        (
            b"FIELDS x y\nSIZE 4\nTYPE F\nPOINTS 1\nDATA ascii\n",
            r"2 entries in SIZE, TYPE and COUNT, found \[1, 1, 2\]",
        ),
        (b"FIELDS x\nSIZE 4\nTYPE F\nDATA ascii\n1\n", "POINTS, or WIDTH and HEIGHT"),
        (b"FIELDS x\nSIZE 4\nTYPE F\nPOINTS 1\nDATA ascii\n1\n", "fields x, y, z, found only x"),
        (_pcd_header("ascii") + b"1 2 3", "240 points of 11 numbers, found 3 numbers"),
        (_pcd_header("ascii", 1) + b"1 2 3 0 0 0 0 1 a 1 1", "numbers, found could not convert"),
        (_pcd_header("binary") + bytes(99), "7200 bytes of data for 240 points, found 99 bytes"),
        (_pcd_header("binary_compressed") + b"abc", "8 bytes of sizes before the compressed data, found 3"),
        (_pcd_header("binary_compressed") + struct.pack("<II", 50, 7200), "50 bytes of compressed data, found 0"),
        (_pcd_header("binary_compressed") + struct.pack("<II", 0, 9), "7200 bytes for 240 points, found 9 bytes"),
        (_pcd_header("binary_compressed") + struct.pack("<II", 2, 7200) + b"\x20\x00", "a reference 1 bytes back"),
        (_pcd_header("binary_compressed") + struct.pack("<II", 2, 7200) + b"\x00a", "1 bytes instead of 7200"),
        (_pcd_header("binary_compressed") + struct.pack("<II", 1, 7200) + b"\xe0", "inside a token, after 0 of 7200"),
    ],
)
def test_bad_pcd(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.pcd").write_bytes(content)
    with pytest.raises(FileError, match=f"bad.pcd: expected .*{message}"):
        read_scan(tmp_path / "bad.pcd")


@given(st.lists(st.sampled_from([b"\0" * 40, b"abcabcab", b"x", b"0123456789"]), max_size=200), st.binary(max_size=99))
def test_lzf_round_trip(parts: list[bytes], tail: bytes) -> None:
    data = b"".join(parts) + tail
    assert lzf_decode(_lzf_encode(data), len(data)) == data


@given(st.binary(max_size=60), st.integers(0, 200))
def test_lzf_never_fails_otherwise(packed: bytes, size: int) -> None:
    try:
        assert len(lzf_decode(packed, size)) == size
    except ValueError as error:
        assert "block" in str(error) or "reference" in str(error)


# --- LAS


def _las(path: Path, classes: np.ndarray, point_format: int = 3) -> np.ndarray:
    laspy = pytest.importorskip("laspy")
    header = laspy.LasHeader(point_format=point_format, version="1.4" if point_format >= 6 else "1.2")
    header.scales, header.offsets = np.full(3, 0.001), np.array([450_000.0, 5_200_000.0, 0.0])
    las = laspy.LasData(header)
    xyz = np.round(SWEEP[:, :3].astype(np.float64), 3) + header.offsets
    las.x, las.y, las.z = xyz.T
    las.intensity = (SWEEP[:, 3] * 65535).astype(np.uint16)
    las.classification = classes.astype(np.uint8)
    if point_format == 3:
        las.red = las.green = las.blue = np.full(240, 65535, np.uint16)
    las.write(path)
    return xyz


@pytest.mark.parametrize("suffix", [".las", ".laz"])
def test_las(tmp_path: Path, suffix: str) -> None:
    if suffix == ".laz":
        pytest.importorskip("lazrs")
    xyz = _las(tmp_path / f"tile{suffix}", np.array([2, 5, 6, 1])[LABELS])
    scan = read_scan(tmp_path / f"tile{suffix}")
    np.testing.assert_allclose(scan.xyz.astype(np.float64) + scan.origin, xyz, atol=1e-4)
    np.testing.assert_allclose(scan.feats[:, 0], SWEEP[:, 3], atol=2e-5)
    np.testing.assert_array_equal(scan.feats[:, 1:], 1)
    assert scan.label_set == ASPRS
    np.testing.assert_array_equal(scan.labels, np.array([0, 3, 4, -1])[LABELS])


def test_las_that_was_never_classified_has_no_labels(tmp_path: Path) -> None:
    _las(tmp_path / "a.las", LABELS % 2, point_format=0)
    scan = read_scan(tmp_path / "a.las")
    assert scan.labels is None
    assert scan.feats.shape == (240, 1)


def test_bad_las(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.las"
    _las(path, LABELS)
    data = path.read_bytes()
    for broken in (b"nothing of the kind", data[:100], data[:-50], data[: -40 * 34]):
        path.write_bytes(broken)
        with pytest.raises(FileError, match="bad.las: expected"):
            read_scan(path)
    monkeypatch.setitem(sys.modules, "laspy", None)
    with pytest.raises(FileError, match=r"package laspy to read it \(`pip install \.\[io\]` in a clone of pumice\)"):
        read_scan(path)


def _patched(data: bytes, code: str, *fields: tuple[int, int]) -> bytes:
    """The bytes with (offset, value) fields written over, all of one struct code."""
    out = bytearray(data)
    for offset, value in fields:
        struct.pack_into("<" + code, out, offset, value)
    return bytes(out)


LIMITED = """
import resource, sys
from pumice.data import read_scan
from pumice.errors import FileError
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + 2**29,) * 2)
for path in sys.argv[1:]:
    try:
        read_scan(path)
    except FileError as error:
        print(str(error).partition(": ")[2])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits its memory as Linux does")
def test_las_counts_are_held_against_the_size_of_the_file(tmp_path: Path) -> None:
    """Each of these took minutes or gigabytes, or ended the process in lazrs."""
    pytest.importorskip("lazrs")
    _las(tmp_path / "a.las", LABELS)
    _las(tmp_path / "a.laz", LABELS)
    _las(tmp_path / "layered.laz", LABELS, point_format=6)
    layered = (tmp_path / "layered.laz").read_bytes()
    las, laz = (tmp_path / "a.las").read_bytes(), (tmp_path / "a.laz").read_bytes()
    points = struct.unpack_from("<I", laz, 96)[0]
    table = struct.unpack_from("<q", laz, points)[0]
    broken = {
        "records.las": _patched(las, "I", (100, 3_810_525_184)),
        "records.laz": _patched(laz, "I", (100, 1_000_000_000)),
        "count.las": _patched(las, "I", (107, 0xFFFFFFFF)),
        "count.laz": _patched(laz, "I", (107, 0xFFFFFFFF)),
        "header.las": _patched(las, "H", (94, 0xFFFF)),
        "start.las": _patched(las, "I", (96, 0xFFFFFFF0)),
        "chunks.laz": _patched(laz, "I", (table + 4, 1_429_398_244)),
        "table.laz": _patched(laz, "q", (points, 1 << 40)),
        "chunk.laz": _patched(laz, "I", (227 + 54 + 12, 0xFFFFFFF0)),
        "items.laz": _patched(laz, "H", (227 + 54 + 32, 0)),
        "layers.laz": _patched(layered, "I", (struct.unpack_from("<I", layered, 96)[0] + 8 + 30 + 4, 0xEFFFFFFF)),
    }
    for name, data in broken.items():
        (tmp_path / name).write_bytes(data)
    command = [sys.executable, "-c", LIMITED, *(str(tmp_path / name) for name in broken)]
    source = str(Path(pumice.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, "RAYON_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    told = ran.stdout.splitlines()
    assert (ran.returncode, len(told)) == (0, len(broken)), ran.stdout + ran.stderr
    assert all("expected" in line and "found" in line for line in told), told


# --- numpy and voxel text


@pytest.mark.parametrize("points", ["points", "xyz", "pc", "coords", "vertices"])
@pytest.mark.parametrize("labels", ["labels", "label", "segment"])
def test_npz(tmp_path: Path, points: str, labels: str) -> None:
    np.savez(tmp_path / "a.npz", **{points: SWEEP[:, :3], "intensity": SWEEP[:, 3], labels: LABELS})
    scan = read_scan(tmp_path / "a.npz")
    np.testing.assert_array_equal(scan.xyz, SWEEP[:, :3])
    np.testing.assert_array_equal(scan.feats, SWEEP[:, 3:4])
    np.testing.assert_array_equal(scan.labels, LABELS)


def test_npz_features(tmp_path: Path) -> None:
    rgb = np.full((240, 3), 51, np.uint8)
    np.savez(tmp_path / "rgb.npz", xyz=SWEEP[:, :3], rgb=rgb)
    np.testing.assert_allclose(read_scan(tmp_path / "rgb.npz").feats, 0.2, rtol=1e-6)
    np.savez(tmp_path / "wide.npz", points=SWEEP[:, :4])
    np.testing.assert_array_equal(read_scan(tmp_path / "wide.npz").feats, SWEEP[:, 3:4])
    np.savez(tmp_path / "own.npz", xyz=SWEEP[:, :3], feats=SWEEP[:, 3:] * 1000)
    np.testing.assert_array_equal(read_scan(tmp_path / "own.npz").feats, SWEEP[:, 3:] * 1000)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"cloud": SWEEP}, r"an array called points \| xyz .*, found cloud"),
        ({"xyz": SWEEP[:, :2]}, r"xyz of numbers \[P, 3 or more\], found float32 \[240, 2\]"),
        ({"coords": np.zeros((5, 4), np.int32)}, r"integer coords \[P, 3\].*found \[5, 4\]"),
        ({"xyz": SWEEP[:, :3], "labels": np.zeros(240)}, r"labels of integers \[P\], found float64"),
        ({"xyz": SWEEP[:, :3], "labels": np.zeros(9, int)}, "expected 240 labels, .*found 9"),
        ({"xyz": SWEEP[:, :3], "feats": np.zeros((9, 1))}, "240 points and 9 rows"),
        ({"xyz": SWEEP[:, :3], "labels": np.array([None] * 240)}, "a readable array labels"),
        ({"xyz": np.zeros((0, 3))}, "expected points, found none"),
        ({"xyz": np.full((3, 3), np.nan)}, "finite coordinates, found 3 points, none of them finite"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(FileError, match=f"bad.npz: .*{message}"):
        read_scan(tmp_path / "bad.npz")


def _npy(header: str) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def _zipped(content: bytes, flag: int = 0, method: int = 0) -> bytes:
    """An archive with points.npy, its flags and compression method overwritten in both headers."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("points.npy", content)
    data = buffer.getvalue()
    start = data.rfind(b"PK\x01\x02")
    return _patched(data, "H", (6, flag), (8, method), (start + 8, flag), (start + 10, method))


def _saved() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, SWEEP)
    return buffer.getvalue()


BROKEN_ARRAYS = {
    "token.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,3"),
    "huge.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (6000000000000,), }"),
    "over.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,3), }"),
    "syntax.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3 3), }"),
    "keys.npy": _npy("{b'descr': '<f4', 'fortran_order': False, 'shape': (3,3), }"),
    "member.npz": _zipped(b"not an array"),
    "deflated.npz": _zipped(b"not deflated at all", method=8),
    "encrypted.npz": _zipped(_saved(), flag=1),
    "method.npz": _zipped(_saved(), method=99),
}


@pytest.mark.parametrize("name", BROKEN_ARRAYS)
def test_whatever_numpy_raises_is_a_file_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(BROKEN_ARRAYS[name])
    with pytest.raises(FileError, match=f"{name}: expected .*found"):
        read_scan(tmp_path / name)
    if name.endswith("npy"):
        with pytest.raises(FileError, match=f"{name}: expected .*found"):
            read_labels(tmp_path / name)
        assert find_scans(tmp_path) == [tmp_path / name], "a broken file is reported when it is read"


def test_colours_that_are_words(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", xyz=SWEEP[:, :3], colors=np.array(["red"] * 240))
    with pytest.raises(FileError, match=r"a.npz: expected .*colors"):
        read_scan(tmp_path / "a.npz")


# --- text and columns


TEXT_FILES = {
    "a.xyz": "1 2 3\n4 5 6\n",
    "a.txt": "# made by hand\n\n1\t2 3\r\n4  5 6\r\n",
    "a.csv": "1,2,3\n4,5, 6\n",
    "semicolons.csv": "1;2;3\n4;5;6\n",
    "names.csv": '"Z","Y","X"\n3,2,1\n6,5,4\n',
    "cloudcompare.xyz": "//X Y Z\n1 2 3\n4 5 6\n",
    "a.obj": "o mesh\nv 1 2 3\nv 4 5 6\nvn 0 0 1\nf 1 2 1\n",
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(TEXT_FILES[name].encode())
    scan = read_scan(tmp_path / name)
    assert scan.xyz.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert scan.feats.shape == (2, 0) and scan.labels is None
    assert find_scans(tmp_path) == [tmp_path / name]


def test_text_with_colours_intensity_and_labels(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("1 2 3 255 0 51\n4 5 6 0 0 0\n")
    np.testing.assert_allclose(read_scan(tmp_path / "a.xyz").feats[0], [1, 0, 0.2], rtol=1e-6)
    (tmp_path / "a.obj").write_text("v 1 2 3 1 0 0.2\nv 4 5 6 0 0 0\n")
    np.testing.assert_allclose(read_scan(tmp_path / "a.obj").feats[0], [1, 0, 0.2], rtol=1e-6)
    (tmp_path / "a.csv").write_text("x,y,z,intensity,label\n1,2,3,0.5,7\n4,5,6,0.25,7\n")
    scan = read_scan(tmp_path / "a.csv")
    assert scan.feats.tolist() == [[0.5], [0.25]] and scan.label_counts() == {"class 7": 2}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.xyz", "1 2 3\n4 5\n", "2 lines, 3 numbers in the first, 5 in all"),
        ("a.txt", "1 2\n", "lines of equally many numbers, 3 or more"),
        ("a.csv", "x,y\n1,2\n", "lines of equally many numbers, 3 or more|fields x, y, z"),
        ("a.csv", "x,y,w\n1,2,3\n", "fields x, y, z, found only x, y, w"),
        ("a.csv", "x,y,z\n1,2,c\n", "numbers, found could not convert"),
        ("a.csv", "x,y,z\n", "points, found none"),
        ("a.obj", "f 1 2 3\n", "vertices"),
    ],
)
def test_bad_text(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(FileError, match=f"{name}: expected .*({message})"):
        read_scan(tmp_path / name)


def test_text_that_is_no_cloud_is_passed_over_in_a_folder(tmp_path: Path) -> None:
    poses = " ".join(["1.0"] * 12)
    for name, text in {
        "times.txt": "0.1\n0.2\n",
        "calib.txt": "P0: 7 0 6\n",
        "poses.txt": poses,
        "n.csv": "a,b,c\n1,2,3",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "cloud.txt").write_text("1 2 3 0.5\n")
    assert find_scans(tmp_path) == [tmp_path / "cloud.txt"]


@pytest.mark.parametrize("suffix", [".feather", ".parquet"])
def test_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """The columns of an Argoverse 2 sweep; the annotations beside it are no scan."""
    pyarrow = pytest.importorskip("pyarrow")
    write = {".feather": importlib.import_module("pyarrow.feather").write_feather,
             ".parquet": importlib.import_module("pyarrow.parquet").write_table}[suffix]  # fmt: skip
    half = SWEEP[:, :3].astype(np.float16)
    columns = {n: pyarrow.array(half[:, i]) for i, n in enumerate("xyz")}
    columns["intensity"] = pyarrow.array(np.full(240, 51, np.uint8))
    columns["sensor"] = pyarrow.array(["up"] * 240)
    path = tmp_path / f"315966265659927216{suffix}"
    write(pyarrow.table(columns), path)
    write(pyarrow.table({"tx_m": pyarrow.array([1.0])}), tmp_path / f"annotations{suffix}")
    scan = read_scan(path)
    np.testing.assert_array_equal(scan.xyz, half.astype(np.float32))
    np.testing.assert_allclose(scan.feats, np.full((240, 1), 0.2), rtol=1e-6)
    assert find_scans(tmp_path) == [path]
    with pytest.raises(FileError, match="fields x, y, z, found only tx_m"):
        read_scan(tmp_path / f"annotations{suffix}")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FileError, match=f"a readable {suffix} file"):
        read_scan(path)
    monkeypatch.setitem(sys.modules, "pyarrow.dataset", None)
    with pytest.raises(FileError, match=r"package pyarrow to read it \(`pip install \.\[io\]` in a clone of pumice\)"):
        read_scan(path)


def test_npy_and_tns(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SWEEP[:, :4])
    np.testing.assert_array_equal(read_scan(tmp_path / "a.npy").feats, SWEEP[:, 3:4])
    np.save(tmp_path / "b.npy", SWEEP[:, 0])
    with pytest.raises(FileError, match=r"numbers \[P, 3 or more\], found float32 \[240\]"):
        read_scan(tmp_path / "b.npy")
    (tmp_path / "a.tns").write_text("# 10 10 10 2\n1 2 3\n4 5 6\n")
    assert read_scan(tmp_path / "a.tns").xyz.tolist() == [[1, 2, 3], [4, 5, 6]]
    (tmp_path / "b.tns").write_text("1 2 3\n4 5\n")
    with pytest.raises(FileError, match="2 lines, 3 numbers in the first, 5 in all"):
        read_scan(tmp_path / "b.tns")


# --- what holds for every format


@pytest.mark.parametrize("suffix", sorted(READERS))
def test_empty_missing_and_folders_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    with pytest.raises(FileError, match="expected a file, found nothing"):
        read_scan(path)
    path.write_bytes(b"")
    with pytest.raises(FileError, match=r"expected data, found an empty file \(0 bytes\)"):
        read_scan(path)
    path.write_bytes(b"\x01\x02\x03 nonsense \xff")
    if suffix in (".las", ".laz", ".feather", ".parquet"):
        pytest.importorskip("laspy" if suffix.startswith(".la") else "pyarrow")
    with pytest.raises(FileError, match=f"x{suffix}: expected"):
        read_scan(path)
    with pytest.raises(FileError, match="found a folder"):
        read_scan(tmp_path)


def test_unknown_suffixes_list_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "scan.e57"
    path.write_text("1 2 3")
    known = ", ".join(sorted(READERS)).replace(".", r"\.") + ", found "
    for read in (read_scan, find_scans):
        with pytest.raises(FileError, match=known + r"\.e57"):
            read(path)
    with pytest.raises(FileError, match=known + "1 other files"):
        find_scans(tmp_path)
    with pytest.raises(FileError, match="a file or a folder, found nothing"):
        find_scans(tmp_path / "none")


def test_columns_are_only_for_raw_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SWEEP)
    with pytest.raises(OptionError, match=r"for \.bin and \.pcd\.bin, found \.npy"):
        read_scan(tmp_path / "a.npy", columns=4)


def test_a_folder_is_searched_in_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("b/2.BIN", "b/c/1.ply", "a.bin", "notes.txt", "a.label", "x_lidarseg.bin"):
        (tmp_path / name).write_bytes(b"1")
    np.save(tmp_path / "pose.npy", np.eye(3)[None])
    np.save(tmp_path / "points.npy", SWEEP)
    np.savez(tmp_path / "graph.npz", edges=np.zeros((3, 2)))
    np.savez(tmp_path / "cloud.npz", xyz=SWEEP[:, :3])
    found = [f.relative_to(tmp_path).as_posix() for f in find_scans(tmp_path)]
    assert found == ["a.bin", "b/2.BIN", "b/c/1.ply", "cloud.npz", "points.npy"]
    assert find_scans(tmp_path / "a.bin") == [tmp_path / "a.bin"]
