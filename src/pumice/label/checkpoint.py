"""The segmentation task (scans as labelled sparse tensors, the network for them), and its checkpoint: one safetensors
file of the weights with the task in the header."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pumice.data import LabelSet, Scan
from pumice.errors import FileError, OptionError
from pumice.models import MinkUNet
from pumice.ops import SparseTensor, voxelize

IGNORE = -1
PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
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
        inputs = np.concatenate([np.stack(_inputs(scan), axis=1) for scan in scans])
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
    inputs = network_inputs(scan, task)
    xyz = scan.xyz if turn is None else _turned(scan.xyz, turn)
    points = torch.from_numpy(np.ascontiguousarray(xyz)).to(device)
    x = voxelize(points, torch.from_numpy(inputs).to(device), task.voxel, origin="min")
    labels = None if scan.labels is None else torch.from_numpy(scan.labels).to(device)
    return LabelledScan(x, None if labels is None else voxel_labels(x, labels, len(task.names)))


def network_inputs(scan: Scan, task: Task, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [P, task.in_channels], `out` if it is given: the network's input at each point. Raises OptionError for a
    scan with another number of features than the task's."""
    columns = _inputs(scan)
    if len(columns) != len(task.mean):
        raise OptionError(
            f"{scan.name}: the network takes {task.features} features per point, the scan has {scan.feats.shape[1]}"
        )
    made = np.empty((len(scan), task.in_channels), np.float32) if out is None else out
    for place, column, mean, std in zip(made.T[:-1], columns, task.mean, task.std, strict=True):
        place[:] = (column - np.float32(mean)) / np.float32(std)
    made[:, -1] = 1
    return made


def voxel_labels(x: SparseTensor, labels: Tensor, classes: int) -> Tensor:
    """int64 [N]: the majority class among each voxel's points (on a tie the lowest), -1 if no point has one."""
    counted = (labels >= 0) & (labels < classes)
    cells = x.inverse[counted] * classes + labels[counted]
    votes = torch.bincount(cells, minlength=len(x) * classes).view(len(x), classes)
    most, winner = votes.max(dim=1)
    return torch.where(most > 0, winner, IGNORE)


def _inputs(scan: Scan) -> list[np.ndarray]:
    """float32 [P] each: height above the low end of the scan, distance to the origin, the scan's features. By columns,
    since numpy is slow on rows of a few numbers."""
    x, y, z = scan.xyz.T
    low = np.percentile(z, 2) if len(scan) else 0.0
    return [(z - low).astype(np.float32), np.sqrt(x * x + y * y), *scan.feats.T]


def _turned(xyz: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    angle, scale = chance.uniform(0, 2 * np.pi), chance.uniform(0.95, 1.05)
    sine, cosine = np.sin(angle) * scale, np.cos(angle) * scale
    mirror = 1.0 if chance.random() < 0.5 else -1.0
    turn = np.array([[cosine * mirror, -sine, 0], [sine * mirror, cosine, 0], [0, 0, scale]], np.float32)
    return xyz @ turn.T


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The autocast context of a precision; disabled for fp32."""
    dtype = PRECISIONS[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


# Checkpoints
FORMAT = "pumice-segmentation-1"


def save(path: Path, net: nn.Module, task: Task) -> Path:
    """Write the weights of `net` and `task` atomically. Raises FileError if that fails."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in net.state_dict().items()}
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, partial, metadata={"format": FORMAT, "task": json.dumps(task.as_dict())})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise FileError(f"{path}: expected a checkpoint that can be written, found: {error}") from error
    return path


def save_or_elsewhere(path: Path, net: nn.Module, task: Task) -> Path:
    """As save(); if `path` cannot be written, saves to a temporary folder, and warns. Returns the path written."""
    try:
        return save(path, net, task)
    except FileError as error:
        other = save(Path(tempfile.mkdtemp(prefix="pumice-")) / path.name, net, task)
        warnings.warn(f"{error}; the weights are in {other} instead", stacklevel=2)
        return other


def load(path: Path, device: torch.device) -> tuple[nn.Module, Task]:
    """The network and the task of a file written by save(). Raises FileError if the file is missing, is not a
    checkpoint of pumice, or its weights do not fit its task."""
    if path.is_dir():
        raise FileError(f"{path}: expected a checkpoint written by pumice, found a folder")
    if not path.is_file():
        raise FileError(f"{path}: expected a checkpoint written by pumice, found no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path}: expected a safetensors checkpoint, found something else ({error})") from None
    if header.get("format") != FORMAT:
        raise FileError(f"{path}: expected format {FORMAT!r}, found {header.get('format')!r}")
    task = _task(path, header.get("task", ""))
    net = task.network()
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise FileError(f"{path}: expected the weights of its own network, found others: {error}") from None
    return net.to(device), task


def _task(path: Path, text: str) -> Task:
    try:
        fields = json.loads(text)
        lists = {name: tuple(fields[name]) for name in ("names", "colors", "mean", "std")}
        return Task(voxel=float(fields["voxel"]), width=float(fields["width"]), **lists)
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: expected the task in the header, found it damaged ({error!r})") from None
