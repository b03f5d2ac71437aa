"""The segmentation task: scans as sparse tensors with labels, and the network for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from pumice.data import LabelSet, Scan
from pumice.errors import OptionError
from pumice.models import MinkUNet
from pumice.ops import SparseTensor, voxelize

IGNORE = -1
_DERIVED = 2  # inputs computed from the position: height, distance


@dataclass(frozen=True)
class Task:
    """Part of a checkpoint that is needed to run the network: classes, voxels, inputs.

    voxel: edge in metres. width: factor on MinkUNet's channels. mean, std: of each input (height above the low end of
    the scan, distance to the sensor, then the scan's own features) over the training scans; a constant 1 is appended.
    """

    names: tuple[str, ...]
    colors: tuple[str, ...]
    voxel: float
    width: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(scans: Sequence[Scan], labels: LabelSet, voxel: float, width: float) -> Task:
        """The task of these training scans. Raises OptionError if they differ in the number of features."""
        sizes = {scan.feats.shape[1] for scan in scans}
        if len(sizes) != 1:
            found = f"found {sorted(sizes)} of them; --features none leaves them out"
            raise OptionError(f"all scans need the same features per point, {found}")
        inputs = np.concatenate([_inputs(scan) for scan in scans])
        std = np.maximum(inputs.std(axis=0), 1e-3)
        mean = inputs.mean(axis=0)
        return Task(labels.names, labels.colors, voxel, width, tuple(mean.tolist()), tuple(std.tolist()))

    @property
    def in_channels(self) -> int:
        return len(self.mean) + 1

    @property
    def features(self) -> int:
        """Number of a point's own features."""
        return len(self.mean) - _DERIVED

    @property
    def label_set(self) -> LabelSet:
        return LabelSet(self.names, self.colors)

    def network(self) -> MinkUNet:
        """A new network for this task."""
        return MinkUNet(self.in_channels, len(self.names), self.width)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class LabelledScan:
    """Network input of a scan: voxels, and the class of each (int64 [N], -1 to ignore)."""

    x: SparseTensor
    labels: Tensor | None


def example(scan: Scan, task: Task, device: torch.device, turn: np.random.Generator | None = None) -> LabelledScan:
    """`scan` voxelised on `device`; with `turn`, first randomly rotated about the vertical, mirrored and scaled."""
    inputs = _inputs(scan)
    if inputs.shape[1] != len(task.mean):
        raise OptionError(
            f"{scan.name}: the network takes {task.features} features per point, the scan has {scan.feats.shape[1]}"
        )
    inputs = (inputs - np.asarray(task.mean, np.float32)) / np.asarray(task.std, np.float32)
    inputs = np.concatenate([inputs, np.ones((len(inputs), 1), np.float32)], axis=1)
    xyz = scan.xyz if turn is None else _turned(scan.xyz, turn)
    points = torch.from_numpy(np.ascontiguousarray(xyz)).to(device)
    x = voxelize(points, torch.from_numpy(inputs).to(device), task.voxel, origin="min")
    labels = None if scan.labels is None else torch.from_numpy(scan.labels).to(device)
    return LabelledScan(x, None if labels is None else voxel_labels(x, labels, len(task.names)))


def voxel_labels(x: SparseTensor, labels: Tensor, classes: int) -> Tensor:
    """int64 [N]: the majority class among each voxel's points (on a tie the lowest), -1 if no point has one."""
    counted = (labels >= 0) & (labels < classes)
    cells = x.inverse[counted] * classes + labels[counted]
    votes = torch.bincount(cells, minlength=len(x) * classes).view(len(x), classes)
    most, winner = votes.max(dim=1)
    return torch.where(most > 0, winner, IGNORE)


def _inputs(scan: Scan) -> np.ndarray:
    """float32 [P, 2 + F]: height above the low end of the scan, distance to the origin, the scan's features."""
    low = np.percentile(scan.xyz[:, 2], 2) if len(scan.xyz) else 0.0
    height = scan.xyz[:, 2:] - low
    distance = np.linalg.norm(scan.xyz[:, :2], axis=1, keepdims=True)
    return np.concatenate([height, distance, scan.feats], axis=1).astype(np.float32)


def _turned(xyz: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    angle, scale = chance.uniform(0, 2 * np.pi), chance.uniform(0.95, 1.05)
    sine, cosine = np.sin(angle) * scale, np.cos(angle) * scale
    mirror = 1.0 if chance.random() < 0.5 else -1.0
    turn = np.array([[cosine * mirror, -sine, 0], [sine * mirror, cosine, 0], [0, 0, scale]], np.float32)
    return xyz @ turn.T
