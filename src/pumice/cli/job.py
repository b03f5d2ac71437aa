"""A job for the segmentation command: its options, its device, and the scans it is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pumice.cli.task import IGNORE, Task
from pumice.cli.training import PRECISIONS, Recipe
from pumice.data import Scan, align_labels
from pumice.errors import DeviceError, FileError, OptionError


@dataclass(frozen=True)
class Job:
    """What to do: where the results go, on which device, and how to train. A checkpoint brings its own task.

    Raises OptionError on values that cannot be.
    """

    out: Path
    device: torch.device
    voxel: float = 0.1
    width: float = 0.5
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=60))
    checkpoint: Path | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.recipe.precision not in PRECISIONS:
            raise OptionError(f"precision={self.recipe.precision!r} is unknown; there are {', '.join(PRECISIONS)}")
        if self.recipe.epochs < 0 or self.recipe.seed < 0:
            raise OptionError(f"epochs and seed are at least 0, found {self.recipe.epochs} and {self.recipe.seed}")
        if not (0 < self.voxel < math.inf and 0 < self.width < math.inf):
            raise OptionError(f"voxel and width are positive and finite, found {self.voxel} and {self.width}")

    def opened(self) -> Job:
        """Itself, once its folders are there. Raises FileError before any work is lost to one that cannot be made."""
        for folder in {self.out, (self.report or self.out / "report.html").parent}:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise FileError(f"{folder}: expected a folder to write to, found: {error.strerror}") from None
        return self


def pick_device(name: str) -> torch.device:
    """ "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1"; DeviceError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device {name!r} is unknown; there are auto, cpu, cuda and cuda:0, cuda:1, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name!r} is not supported; there are auto, cpu and cuda")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= found:
        raise DeviceError(f"device {name!r} was asked for, torch finds {found} GPUs; `pumice info` says why")
    return device


def hold_out(scans: Sequence[Scan]) -> tuple[list[Scan], list[Scan]]:
    """(to train on, to evaluate on): every fifth scan is held out, the last of fewer; one serves as both."""
    if len(scans) == 1:
        return list(scans), list(scans)
    held = {i for i in range(len(scans)) if i % 5 == 4} | ({len(scans) - 1} if len(scans) < 5 else set())
    return [s for i, s in enumerate(scans) if i not in held], [scans[i] for i in sorted(held)]


def common_labels(scans: Sequence[Scan]) -> list[Scan]:
    """The scans with one label set for all. Raises FileError when some have labels and others do not."""
    bare = [scan.name for scan in scans if scan.labels is None]
    if bare and len(bare) < len(scans):
        raise FileError(f"{bare[0]}: expected labels as the other scans have, found none ({len(bare)} of {len(scans)})")
    return list(scans) if bare else list(align_labels(scans))


def labelled(scan: Scan) -> bool:
    """Whether some point of the scan has a class."""
    return scan.labels is not None and bool((scan.labels >= 0).any())


def fit_to_task(scans: Sequence[Scan], task: Task) -> list[Scan]:
    """The scans with their classes renumbered as the task numbers them.

    A scan whose classes are others keeps its points and loses its labels. Raises FileError when a scan has another
    number of features than the task.
    """
    for scan in scans:
        if scan.feats.shape[1] != task.features:
            raise FileError(
                f"{scan.name}: expected {task.features} features per point as in training, found {scan.feats.shape[1]}"
            )
    return [_renumbered(scan, task) for scan in scans]


def _renumbered(scan: Scan, task: Task) -> Scan:
    if scan.labels is None or scan.label_set is None or scan.label_set.names == task.names:
        return scan
    if not set(scan.label_set.names) <= set(task.names):
        return replace(scan, labels=None, label_set=None)
    table = np.array([*(task.names.index(name) for name in scan.label_set.names), IGNORE])
    return replace(scan, labels=table[np.maximum(scan.labels, -1)], label_set=task.label_set)
