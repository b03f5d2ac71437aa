"""The readers on real scans, found through PUMICE_DATA; counts are those of the folder's own notes."""

import re
from pathlib import Path

import numpy as np
import pytest

from pumice.data import SEMANTIC_KITTI, find_scans, read_scan

# name below the folder, points, features, and the corners of the box around them
SCANS = [
    ("semantickitti_labelled/000000.bin", 123_389, 1, (-79.60, -79.92, -27.64), (79.00, 78.37, 2.96)),
    ("kitti_seq00/000000.bin", 124_668, 1, (-78.09, -55.72, -11.56), (77.97, 44.88, 2.83)),
    ("kitti_seq00/000009.bin", 121_357, 1, (-80.29, -39.14, -2.71), (76.60, 44.58, 2.89)),
    ("waymo/seq_0_frame_100.bin", 177_125, 2, (-72.55, -45.53, -4.19), (76.08, 74.83, 6.09)),
    ("waymo/seq_0_frame_101.bin", 175_893, 2, (-73.12, -59.64, -3.58), (75.64, 74.78, 6.21)),
    ("nuscenes_single/*.pcd.bin", 34_688, 1, (-58.00, -96.29, -3.42), (96.85, 98.59, 19.03)),
    ("nuscenes_10sweeps/*.bin", 271_156, 2, (-95.06, -105.12, -9.01), (94.12, 99.50, 17.34)),
    ("indoor_scannet/scene0000_00.bin", 40_684, 3, (-0.01, 0, 0), (8.41, 8.73, 3.02)),
    ("indoor_scannet/scene0000_00_gt.npz", 81_369, 0, (-0.02, 0, 0), (8.41, 8.74, 3.02)),
    ("spconv_benchmark_pc/benchmark-pc.npz", 198_130, 0, (-74.11, -38.14, -1.09), (75.31, 61.07, 5.94)),
    ("las/lion_takanawa.npz", 341_989, 1, (0.01, 0.04, 0.55), (4.21, 5.72, 5.12)),
    ("meshes/stanford-bunny.npz", 35_947, 0, (-0.09, 0.03, -0.06), (0.06, 0.19, 0.06)),
    ("ucf_tns/LIDAR1.tns", 87_164, 0, (0, 0, 0), (2956, 1858, 153)),
]


@pytest.mark.parametrize("case", SCANS, ids=lambda case: case[0].partition("/")[0])
def test_counts_and_extent(data_folder: Path, case: tuple) -> None:
    pattern, points, features, low, high = case
    path = next(iter(data_folder.glob(pattern)), None)
    if path is None:
        pytest.skip(f"no {pattern} in the data folder")
    scan = read_scan(path)
    assert (len(scan), scan.dropped, scan.feats.shape[1]) == (points, 0, features)
    np.testing.assert_allclose(scan.xyz.min(0), low, atol=0.006)
    np.testing.assert_allclose(scan.xyz.max(0), high, atol=0.006)
    if features and not pattern.startswith("waymo"):
        assert scan.feats.min() >= 0
        assert scan.feats.max() <= 1


def _kitti(data_folder: Path) -> Path:
    folder = data_folder / "semantickitti_labelled"
    if not folder.is_dir():
        pytest.skip("no semantickitti_labelled in the data folder")
    return folder


def test_semantic_kitti_labels(data_folder: Path) -> None:
    scan = read_scan(_kitti(data_folder) / "000000.bin", labels=True)
    counts = scan.label_counts()
    assert scan.label_set == SEMANTIC_KITTI
    assert (counts["car"], counts["person"], counts["road"], counts["sidewalk"]) == (544 + 990, 23 + 138, 20975, 30092)
    assert int((scan.labels < 0).sum()) == 4458 + 5 + 809 + 1652


def test_semantic_kitti_set_is_the_published_one(data_folder: Path) -> None:
    text = (_kitti(data_folder) / "semantic-kitti.yaml").read_text()

    def section(name: str) -> str:
        return re.search(rf"^{name}:.*\n((?:  .*\n)+)", text, re.M)[1]

    learning = {int(a): int(b) for a, b in re.findall(r"(\d+) *: *(\d+)", section("learning_map"))}
    assert dict(SEMANTIC_KITTI.raw) == {raw: c - 1 for raw, c in learning.items()}
    back = {int(a): int(b) for a, b in re.findall(r"(\d+) *: *(\d+)", section("learning_map_inv"))}
    names = dict(re.findall(r'(\d+) *: *"(.*?)"', section("labels")))
    colors = {int(a): (r, g, b) for a, b, g, r in re.findall(r"(\d+): \[(\d+), (\d+), (\d+)\]", section("color_map"))}
    for c, (name, color) in enumerate(zip(SEMANTIC_KITTI.names, SEMANTIC_KITTI.colors, strict=True)):
        assert name == names[str(back[c + 1])]
        assert color == "#" + "".join(f"{int(v):02x}" for v in colors[back[c + 1]])


def test_a_folder_of_sweeps(data_folder: Path) -> None:
    folder = data_folder / "kitti_seq00"
    if not folder.is_dir():
        pytest.skip("no kitti_seq00 in the data folder")
    assert [f.name for f in find_scans(folder)] == [f"{i:06}.bin" for i in range(10)]
