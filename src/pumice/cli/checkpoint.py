"""A trained network in one safetensors file: its weights, and the task in the header."""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from pumice.cli.task import Task
from pumice.errors import FileError

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
    """save(); if `path` cannot be written, into the folder of temporary files, with a warning that names the file."""
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
