"""Labelling of many scans by one network, continued where an earlier run stopped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from pumice.errors import CaptureError, FileError, OptionError, PumiceError
from pumice.label import checkpoint
from pumice.label.checkpoint import PRECISIONS, Task
from pumice.label.classify import Classifier
from pumice.label.features import FEATURES
from pumice.label.predictions import FORMATS, kind_of, remove_leftovers
from pumice.label.record import Record, digest
from pumice.label.slots import ScanSlots
from pumice.label.sources import Input, Sources, place
from pumice.label.work import FailedScan, Labelled, Orders, ReadScan, ScanWork, failed

_AHEAD = 2
"""Orders that each reader is ahead."""
_READERS = 12
"""Most processes that read and write for a GPU; a scan takes a few of their milliseconds."""
_TOGETHER = 8
_POINTS_TOGETHER = 400_000
"""Most scans in a call of the network on a GPU, and points from which on they are enough for a call."""


@dataclass(frozen=True, eq=False)
class Labeller:
    """Writes the class of every point of scans, as a checkpoint of `pumice segment` predicts them:

        labeller = pm.Labeller("checkpoint.safetensors", "labels")
        for one in labeller.label(["scans/0.bin", "s3://bucket/1.bin"]):
            print(one.state, one.output or one.reason)

        output(scan)[p] = argmax over classes of net(voxels(scan))[voxel of p]

    Processes read and prepare scans ahead of the network, and write files after it. It is captured with its
    voxelisation on a GPU (see capture_points), for several scans in a call, and compiled on a CPU. Every file is
    written under another name and renamed, and a scan whose file is there is not done again. A scan that cannot be
    labelled is told as failed, and the others go on. `labels.json` in the folder keeps what its files were made by.

    An object is small: it is pickled without the network, which each process loads when it labels its first scan. It is
    a callable of batches, as of Ray Data: from columns `path` and, optionally, `name` (the output's path below `out`,
    without suffix) it makes the columns of Labelled.

    Parameters
    ----------
    checkpoint: of `pumice segment`. out: the folder of the outputs.
    root: folder or URL that the names of outputs are relative to: `root/a/0.bin` becomes `out/a/0.label`. "": whole
        paths.
    kind: format of the files: label (uint32 per point, SemanticKITTI), npz, ply, parquet, or auto (label for
        SemanticKITTI's classes, else npz).
    device: None: a GPU if there is one. precision: fp32, bf16 or fp16 (autocast).
    features: intensity, rgb, none or constant, of each point; None: all of the scan. columns: numbers per point in .bin
        files, if the guess is wrong.
    readers: processes that read ahead, and write; 0: none; None: one on a CPU, up to twelve for a GPU.

    Raises OptionError for invalid options.
    """

    checkpoint: str | Path
    out: str | Path
    root: str = ""
    kind: str = "auto"
    device: str | None = None
    precision: str = "fp32"
    features: str | None = None
    columns: int | None = None
    readers: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("kind", FORMATS), ("precision", tuple(PRECISIONS)), ("features", (None, *FEATURES))):
            OptionError.check(name, getattr(self, name), known)
        if (self.columns is not None and self.columns < 3) or (self.readers or 0) < 0:
            raise OptionError(f"columns is at least 3, readers 0; found {self.columns} and {self.readers}")

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def label(self, scans: Iterable[str | Path | Input]) -> Iterator[Labelled]:
        """Label scans (paths and URLs of fsspec) and yield what became of each: first those that are there already,
        then the others in their order.

        Raises FileError (no checkpoint, a damaged labels.json), OptionError (the folder holds labels by another
        checkpoint or other options, a format that does not fit the classes), CaptureError, and OSError if an output
        cannot be written."""
        self.opened()
        todo: list[Input] = []
        for one in self._named(scans):
            if self._path(one).exists():
                yield Labelled(one.source, str(self._path(one)), "kept")
            else:
                todo.append(one)
        if todo:
            yield from self._all(todo)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Label the scans of a batch, by its columns `path` and `name`; returns columns of the same length."""
        paths = [place(path) for path in batch["path"]]
        given = map(Input, paths, map(str, batch["name"])) if "name" in batch else paths
        done = {one.source: one for one in self.label(given)}
        return {field.name: np.array([getattr(done[path], field.name) for path in paths]) for field in fields(Labelled)}

    def opened(self) -> Labeller:
        """Load the checkpoint, remove what killed runs left in the folder, and write or compare labels.json. Raises as
        label()."""
        _ = self._net
        return self

    @cached_property
    def _net(self) -> tuple[nn.Module, Task, str]:
        """(the network on the CPU, its task, the format of outputs)."""
        path, out = Path(self.checkpoint), Path(self.out)
        net, task = checkpoint.load(path, torch.device("cpu"))
        kind = kind_of(self.kind, task)
        options = self.precision, self.features, self.columns, self._root
        Record(str(path), digest(path), task.names, kind, *options).agree(out)
        remove_leftovers(out)
        return net, task, kind

    @cached_property
    def _classifier(self) -> Classifier:
        net, task, _ = self._net
        return Classifier(net, task, self._device, self.precision, self._together)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def _root(self) -> str:
        return place(self.root) if self.root else ""

    def _named(self, scans: Iterable[str | Path | Input]) -> Iterator[Input]:
        given = list(scans)
        plain = dict.fromkeys(place(scan) for scan in given if not isinstance(scan, Input))
        names = dict(zip(plain, Sources(tuple(plain), self._root).named(self._root), strict=True))
        return (scan if isinstance(scan, Input) else names[place(scan)] for scan in given)

    def _path(self, one: Input) -> Path:
        return Path(self.out) / f"{one.name}.{self._net[2]}"

    def _all(self, todo: Sequence[Input]) -> Iterator[Labelled]:
        readers = self._readers(len(todo))
        # Of scans that readers are ahead, those of two calls of the network, and those that are written.
        count = 2 * _AHEAD * readers + 3 * self._together
        slots = ScanSlots.of(count, self._net[1].in_channels) if readers else None
        orders, some = Orders(todo, count), list[ReadScan | FailedScan]()
        with slots.pinned(self._device) if slots is not None and self._device.type == "cuda" else nullcontext():
            try:
                for report in self._reports(orders, readers, slots):
                    orders.reported(report)
                    if report.read is not None:
                        some.append(report.read)
                    if some and (self._enough(some) or orders.all_read):
                        self._start(some, slots, orders)
                        some = []
                    yield from report.labels
                    if report.error is not None:
                        raise report.error
            except RuntimeError as error:
                # Raised wherever this process was when it was told.
                if "DataLoader worker" not in str(error):
                    raise
                near = orders.oldest or todo[-1]
                message = f"{near.source}, or a scan soon after it, ended the process that read it: {error}"
                raise FileError(message) from error

    def _reports(self, orders: Orders, readers: int, slots: ScanSlots | None) -> DataLoader[Any]:
        _, task, kind = self._net
        work = ScanWork(Path(self.out), kind, task, self.features, self.columns, slots)
        options = {} if slots is None else {"prefetch_factor": _AHEAD, "worker_init_fn": slots.touch}
        return DataLoader(work, None, sampler=orders, num_workers=readers, collate_fn=_unchanged, **options)

    def _readers(self, scans: int) -> int:
        readers = self.readers
        if readers is None:
            gpu = self._device.type == "cuda"
            readers = min(_READERS, max(1, (os.cpu_count() or 1) - 1)) if gpu else 1
        return min(readers, scans)

    @property
    def _together(self) -> int:
        return _TOGETHER if self._device.type == "cuda" else 1

    def _enough(self, some: Sequence[ReadScan | FailedScan]) -> bool:
        points = sum(one.points for one in some if isinstance(one, ReadScan))
        return len(some) >= self._together or points >= _POINTS_TOGETHER

    def _start(self, some: Sequence[ReadScan | FailedScan], slots: ScanSlots | None, orders: Orders) -> None:
        """Start the network on scans."""
        scans = [one for one in some if isinstance(one, ReadScan)]
        try:
            done = self._classifier([scan.memory(slots) for scan in scans]) if scans else None
        except CaptureError:
            raise
        except (PumiceError, torch.OutOfMemoryError) as error:
            if len(some) > 1:
                for one in some:
                    self._start([one], slots, orders)
                return
            done, some = None, [FailedScan(scan.slot, failed(scan.one, error)) for scan in scans]
        orders.started(done, some)


def _unchanged(item: Any) -> Any:
    return item
