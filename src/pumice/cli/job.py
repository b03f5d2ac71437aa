"""A job for the segmentation command: its options, its device, and the scans it is given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from pumice.cli import checkpoint
from pumice.cli.predictions import FORMATS
from pumice.cli.task import IGNORE, Task
from pumice.cli.training import PRECISIONS, Recipe
from pumice.data import Scan, align_labels
from pumice.errors import DeviceError, FileError, OptionError

FEATURES = ("intensity", "rgb", "none", "constant")
_MEANT = {0: "none", 1: "intensity", 3: "rgb", 4: "intensity and rgb"}
Item = TypeVar("Item")


@dataclass(frozen=True)
class Job:
    """What to do: where the results go, on which device, and how to train. A checkpoint brings its own task.

    features: which of FEATURES every point gets, in place of its own. predictions: their folder, in place of one beside
    the report, and their format. timing: measure inference, too. save_every: epochs between checkpoints, 0 for none.

    Raises OptionError on values that cannot be.
    """

    out: Path
    device: torch.device
    voxel: float = 0.1
    width: float = 0.5
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=60))
    checkpoint: Path | None = None
    report: Path | None = None
    features: str | None = None
    predictions: Path | None = None
    predictions_as: str = "auto"
    timing: bool = False
    save_every: int = 1

    def __post_init__(self) -> None:
        if self.recipe.precision not in PRECISIONS:
            raise OptionError(f"precision={self.recipe.precision!r} is unknown; there are {', '.join(PRECISIONS)}")
        if self.recipe.epochs < 0 or self.recipe.seed < 0 or self.save_every < 0:
            found = f"{self.recipe.epochs}, {self.recipe.seed} and {self.save_every}"
            raise OptionError(f"epochs, seed and save_every are at least 0, found {found}")
        if self.features not in (None, *FEATURES):
            raise OptionError(f"features={self.features!r} is unknown; there are {', '.join(FEATURES)}")
        if self.predictions_as not in FORMATS:
            raise OptionError(f"predictions_as={self.predictions_as!r} is unknown; there are {', '.join(FORMATS)}")
        if not (0 < self.voxel < math.inf and 0 < self.width < math.inf):
            raise OptionError(f"voxel and width are positive and finite, found {self.voxel} and {self.width}")

    def checked(self) -> Job:
        """Itself. Raises what is wrong with its checkpoint, before scans are read."""
        if self.checkpoint is not None:
            checkpoint.load(self.checkpoint, self.device)
        return self

    def opened(self) -> Job:
        """Itself, once its folders are there. Raises FileError before any work is lost to one that cannot be made."""
        for folder in {self.out, (self.report or self.out / "report.html").parent, self.predictions or self.out}:
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


def hold_out(scans: Sequence[Item]) -> tuple[list[Item], list[Item]]:
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


def choose_features(scan: Scan, choice: str | None, fill: Sequence[float] = (1.0,)) -> Scan:
    """The scan with one of FEATURES in place of its own; "constant" gives each point `fill`.

    Raises OptionError where the scan does not have them.
    """
    if choice is None:
        return scan
    if choice == "constant":
        return replace(scan, feats=np.tile(np.asarray(fill, np.float32), (len(scan), 1)))
    own = _choices(scan.feats.shape[1])
    if choice not in own:
        raise OptionError(f"{scan.name}: expected {choice} at each point, found {_counted(scan.feats.shape[1])}")
    return replace(scan, feats=scan.feats[:, own[choice]])


def _choices(count: int) -> dict[str, slice]:
    """The columns that each of FEATURES has in a scan of so many: readers put intensity first and colours last."""
    found = {"intensity": slice(0, 1)} if count not in (0, 3) else {}
    return {**found, **({"rgb": slice(-3, None)} if count in (3, 4) else {}), "none": slice(0, 0)}


def _counted(count: int) -> str:
    return f"{count} features per point" + (f" ({_MEANT[count]})" if count in _MEANT else "")


def fit_to_task(scans: Sequence[Scan], task: Task, features: str | None = None) -> list[Scan]:
    """The scans with the features asked for, and their classes renumbered as the task numbers them.

    A scan whose classes are others keeps its points and loses its labels. Raises FileError when a scan has another
    number of features than the task.
    """
    fill = task.mean[len(task.mean) - task.features :]
    chosen = [choose_features(scan, features, fill) for scan in scans]
    for scan, own in zip(chosen, scans, strict=True):
        given, count = scan.feats.shape[1], own.feats.shape[1]
        if given != task.features:
            fitting = [name for name, cut in _choices(count).items() if len(range(count)[cut]) == task.features]
            remedy = f"give --features {' or '.join([*fitting, 'constant'])} (constant: the training scans' mean)"
            expected = f"expected {_counted(task.features)} as in training"
            raise FileError(f"{scan.name}: {expected}, found {_counted(given)}: {remedy}")
    return [_renumbered(scan, task) for scan in chosen]


def _renumbered(scan: Scan, task: Task) -> Scan:
    if scan.labels is None or scan.label_set is None or scan.label_set.names == task.names:
        return scan
    if not set(scan.label_set.names) <= set(task.names):
        return replace(scan, labels=None, label_set=None)
    table = np.array([*(task.names.index(name) for name in scan.label_set.names), IGNORE])
    return replace(scan, labels=table[np.maximum(scan.labels, -1)], label_set=task.label_set)
