"""Scans and label sets: what is checked at birth, and what comes out."""

import numpy as np
import pytest

from pumice.data import NUSCENES, SEMANTIC_KITTI, STREET, LabelSet, Scan, align_labels, generic_labels
from pumice.errors import DtypeError, OptionError, ShapeError

XYZ = np.arange(12.0).reshape(4, 3)
NONE = np.zeros((4, 0))


def test_dtypes_and_shapes_are_settled_at_birth() -> None:
    scan = Scan(XYZ.astype(np.int16), np.ones(4), np.array([0, 1, 5, -1], np.int8), "a", STREET)
    assert (scan.xyz.dtype, scan.feats.dtype, scan.labels.dtype) == (np.float32, np.float32, np.int64)
    assert scan.feats.shape == (4, 1)
    assert len(scan) == 4
    assert repr(scan) == "Scan('a', 4 points, 1 features, 6 classes)"
    assert scan.label_counts() == {
        "ground": 1,
        "building": 1,
        "vehicle": 0,
        "pole": 0,
        "tree": 0,
        "person": 1,
    }


def test_points_that_are_not_finite_are_dropped_and_counted() -> None:
    xyz, feats = XYZ.copy(), np.zeros((4, 1))
    xyz[1, 2], feats[3, 0] = np.nan, np.inf
    scan = Scan(xyz, feats, np.array([7, 8, 9, 10]))
    assert scan.dropped == 2
    np.testing.assert_array_equal(scan.xyz, XYZ[[0, 2]].astype(np.float32))
    assert scan.label_counts() == {"class 7": 1, "class 9": 1}
    assert scan.select(np.array([True, False])).dropped == 2
    assert "2 dropped" in repr(scan)


def test_an_empty_scan_is_a_scan() -> None:
    scan = Scan(np.zeros((0, 3)), np.zeros((0, 2)), np.zeros(0, np.int64), label_set=STREET)
    assert len(scan) == 0
    assert sum(scan.label_counts().values()) == 0


def test_map_coordinates_keep_their_millimetres() -> None:
    far = np.array([[455_000.123, 5_210_000.456, 800.0], [455_010.125, 5_210_003.0, 801.0]])
    scan = Scan(far, np.zeros((2, 0)))
    np.testing.assert_allclose(scan.xyz.astype(np.float64) + scan.origin, far, atol=1e-3)
    assert scan.select(np.array([1])).origin == scan.origin


def test_one_far_point_does_not_cost_the_others_their_millimetres() -> None:
    far = np.concatenate([XYZ + 0.001, [[-1e9, 0, 0]]])
    scan = Scan(far, np.zeros((5, 0)))
    np.testing.assert_allclose(scan.xyz[:4].astype(np.float64) + scan.origin, far[:4], atol=1e-3)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ShapeError, (np.zeros((4, 2)), NONE), r"xyz is \[P, 3\], found \[4, 2\]"),
        (ShapeError, (XYZ, np.zeros((5, 1))), "4 points and 5 rows"),
        (ShapeError, (XYZ, np.zeros((4, 1, 1))), r"feats is \[P, F\], found \[4, 1, 1\]"),
        (ShapeError, (XYZ, NONE, np.zeros(3, np.int64)), r"4 points and labels \[3\]"),
        (DtypeError, (XYZ, NONE, np.zeros(4)), "labels are integers, found dtype float64"),
        (DtypeError, (XYZ.astype(str), NONE), "xyz holds real numbers, found dtype <U"),
        (OptionError, (XYZ, NONE, np.array([0, 6, 7, -1]), "", STREET), r"0..5 or -1 \(ignored\), found 6 \(2 "),
        (OptionError, (XYZ, NONE, np.array([0, -2, 1, 1]), "", STREET), "found -2"),
    ],
)
def test_what_does_not_fit_is_refused(error: type[Exception], arguments: tuple, message: str) -> None:
    with pytest.raises(error, match=message):
        Scan(*arguments)


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (ShapeError, (("a", "b"), ("#000000",)), "2 names and 1 colours"),
        (OptionError, (("a", "a"), ("#000000", "#000000")), "must differ"),
        (OptionError, (("a",), ("red",)), "#rrggbb, found 'red'"),
        (OptionError, (("a",), ("#000000",), 0), "ignore must be negative"),
        (OptionError, (("a",), ("#000000",), -1, ((3, 1),)), "classes 0..0 or -1, found 1"),
    ],
)
def test_a_label_set_is_checked(error: type[Exception], arguments: tuple, message: str) -> None:
    with pytest.raises(error, match=message):
        LabelSet(*arguments)


def test_moving_counts_as_static_and_other_things_are_ignored() -> None:
    raw = np.array([10, 252, 40, 60, 0, 1, 52, 99, 81, 257])
    assert SEMANTIC_KITTI.from_raw(raw).tolist() == [0, 0, 8, 8, -1, -1, -1, -1, 18, 4]
    assert (len(SEMANTIC_KITTI), len(NUSCENES), len(STREET)) == (19, 16, 6)
    assert len(NUSCENES.from_raw(np.arange(32))) == 32
    with pytest.raises(OptionError, match=r"found \[77\]"):
        SEMANTIC_KITTI.from_raw(np.array([10, 77]))


def test_generic_labels_follow_the_values() -> None:
    found = generic_labels([5, 2, 2, -3])
    assert found.names == ("class 2", "class 5")
    assert found.from_raw(np.array([2, 5, -3])).tolist() == [0, 1, -1]
    assert found.colors[1] == generic_labels([5]).colors[0]
    with pytest.raises(OptionError, match="found 2000 different"):
        generic_labels(np.arange(2000))
    with pytest.raises(DtypeError, match="float64"):
        generic_labels(np.array([0.5]))


def test_scans_come_to_one_label_set() -> None:
    a = Scan(XYZ, NONE, np.array([2, 9, -1, 2]))
    b = Scan(XYZ, NONE, np.array([4, 2, 4, 9]))
    bare = Scan(XYZ, NONE)
    first, second, third = align_labels([a, b, bare])
    assert first.label_set == second.label_set
    assert first.label_set is not None
    assert first.label_set.names == ("class 2", "class 4", "class 9")
    assert first.labels.tolist() == [0, 2, -1, 0]
    assert second.labels.tolist() == [1, 0, 1, 2]
    assert third is bare
    same = [Scan(XYZ, NONE, np.zeros(4, int), label_set=STREET) for _ in range(2)]
    assert align_labels(same) == same
