"""The features of scans, and their classes, as a checkpoint takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pumice.data import Scan
from pumice.errors import FileError, OptionError
from pumice.label.checkpoint import IGNORE, Task

FEATURES = ("intensity", "rgb", "none", "constant")
_MEANT = {0: "none", 1: "intensity", 3: "rgb", 4: "intensity and rgb"}


def choose_features(scan: Scan, choice: str | None, fill: Sequence[float] = (1.0,)) -> Scan:
    """The scan with one of FEATURES as its features ("constant": `fill`). Raises OptionError if it lacks them."""
    if choice is None:
        return scan
    if choice == "constant":
        return replace(scan, feats=np.tile(np.asarray(fill, np.float32), (len(scan), 1)))
    own = _choices(scan.feats.shape[1])
    if choice not in own:
        raise OptionError(f"{scan.name}: expected {choice} at each point, found {_counted(scan.feats.shape[1])}")
    return replace(scan, feats=scan.feats[:, own[choice]])


def _choices(count: int) -> dict[str, slice]:
    """The columns of FEATURES in a scan with `count` feature columns: intensity comes first, colours last."""
    found = {"intensity": slice(0, 1)} if count not in (0, 3) else {}
    return {**found, **({"rgb": slice(-3, None)} if count in (3, 4) else {}), "none": slice(0, 0)}


def _counted(count: int) -> str:
    return f"{count} features per point" + (f" ({_MEANT[count]})" if count in _MEANT else "")


def fit_to_task(scans: Sequence[Scan], task: Task, features: str | None = None) -> list[Scan]:
    """The scans with the chosen features, and their classes renumbered as in the task; a scan with other classes loses
    its labels. Raises FileError if a scan differs from the task in the number of features."""
    fill = task.mean[len(task.mean) - task.features :]
    chosen = [choose_features(scan, features, fill) for scan in scans]
    for scan, own in zip(chosen, scans, strict=True):
        found, count = scan.feats.shape[1], own.feats.shape[1]
        if found != task.features:
            fitting = [name for name, cut in _choices(count).items() if len(range(count)[cut]) == task.features]
            remedy = f"give --features {' or '.join([*fitting, 'constant'])} (constant: the training scans' mean)"
            expected = f"expected {_counted(task.features)} as in training"
            raise FileError(f"{scan.name}: {expected}, found {_counted(found)}: {remedy}")
    return [_renumbered(scan, task) for scan in chosen]


def _renumbered(scan: Scan, task: Task) -> Scan:
    if scan.labels is None or scan.label_set is None or scan.label_set.names == task.names:
        return scan
    if not set(scan.label_set.names) <= set(task.names):
        return replace(scan, labels=None, label_set=None)
    table = np.array([*(task.names.index(name) for name in scan.label_set.names), IGNORE])
    return replace(scan, labels=table[np.maximum(scan.labels, -1)], label_set=task.label_set)
