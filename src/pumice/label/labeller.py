"""Labelling of many scans by one network: reads ahead, runs it, writes, and continues where an earlier run stopped."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from pumice.data import Scan, read_scan
from pumice.errors import CaptureError, FileError, OptionError, PumiceError
from pumice.label import checkpoint
from pumice.label.checkpoint import PRECISIONS, Task, network_inputs
from pumice.label.classify import Classifier, NetworkInput, OnTheirWay
from pumice.label.features import FEATURES, fit_to_task
from pumice.label.predictions import FORMATS, kind_of, remove_leftovers, write_prediction
from pumice.label.record import Record, digest
from pumice.label.slots import Slots
from pumice.label.sources import Input, Sources, local_file, place

_WRITERS = 4
_UNWRITTEN = 16
"""Threads that write, and scans that may wait for them: of two calls of the network at least."""
_AHEAD = 2
"""Scans that each reader is ahead."""
_TOGETHER = 8
_POINTS_TOGETHER = 400_000
"""Most scans in a call of the network on a GPU, and points from which on they are enough for a call."""
_READERS = 12
"""Most reading processes for a GPU; a scan takes a few of its milliseconds."""


@dataclass(frozen=True)
class Labelled:
    """What became of a scan. state: "labelled", "kept" (its output was there already) or "failed".

    source: its path or URL. output: the path of its file, "" if it failed. points: number of its points, 0 unless it
    was labelled. reason: why it failed."""

    source: str
    output: str
    state: str
    points: int = 0
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Labeller:
    """Writes the class of every point of scans, as a checkpoint of `pumice segment` predicts them:

        labeller = pm.Labeller("checkpoint.safetensors", "labels")
        for one in labeller.label(["scans/0.bin", "s3://bucket/1.bin"]):
            print(one.state, one.output or one.reason)

        output(scan)[p] = argmax over classes of net(voxels(scan))[voxel of p]

    Processes read and prepare scans ahead of the network, which is captured with its voxelisation on a GPU (see
    capture_points) and compiled on a CPU; threads write. Every file is written under another name and renamed, and a
    scan whose file is there is not done again. A scan that cannot be labelled is told as failed, and the others go on.
    `labels.json` in the folder keeps what its files were made by.

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
    readers: processes that read ahead; 0: none; None: one on a CPU, up to twelve for a GPU.

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
            if (found := getattr(self, name)) not in known:
                raise OptionError(f"{name}={found!r} is unknown; there are {', '.join(map(str, known))}")
        if (self.columns or 3) < 3 or (self.readers or 0) < 0:
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
        return Classifier(net, task, self._device, self.precision, _TOGETHER if self._device.type == "cuda" else 1)

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
        waiting: deque[Future[Labelled]] = deque()
        reached, readers = 0, self._readers(len(todo))
        # Of scans that readers are ahead, those of the network, and those that wait for their writers.
        count = _AHEAD * readers + _TOGETHER + _UNWRITTEN
        slots = Slots.of(count, self._net[1].in_channels) if readers else None
        with ExitStack() as held:
            if slots is not None and self._device.type == "cuda":
                held.enter_context(slots.pinned(self._device))
            writers = held.enter_context(ThreadPoolExecutor(_WRITERS, "pumice-writer"))
            try:
                for some in self._together(self._loader(todo, readers, slots)):
                    reached += len(some)
                    waiting += self._begun(some, slots, writers)
                    while waiting and (waiting[0].done() or len(waiting) > _UNWRITTEN):
                        yield waiting.popleft().result()
            except RuntimeError as error:
                # Raised wherever this process was when it was told.
                if "DataLoader worker" not in str(error):
                    raise
                near = todo[min(reached, len(todo) - 1)].source
                raise FileError(f"{near}, or a scan soon after it, ended the process that read it: {error}") from error
            while waiting:
                yield waiting.popleft().result()

    def _readers(self, scans: int) -> int:
        readers = self.readers
        if readers is None:
            gpu = self._device.type == "cuda"
            readers = min(_READERS, max(1, (os.cpu_count() or 1) - 1)) if gpu else 1
        return min(readers, scans)

    def _loader(self, todo: Sequence[Input], readers: int, slots: Slots | None) -> DataLoader[Any]:
        reading = _Reading(todo, self._net[1], self.features, self.columns, slots)
        ahead = _AHEAD if readers else None
        return DataLoader(reading, None, num_workers=readers, prefetch_factor=ahead, collate_fn=_unchanged)

    def _together(self, reads: Iterable[_Read | Labelled]) -> Iterator[list[_Read | Labelled]]:
        """The scans of each call of the network, among those that failed."""
        most = _TOGETHER if self._device.type == "cuda" else 1
        some: list[_Read | Labelled] = []
        for read in reads:
            some.append(read)
            points = sum(one.points for one in some)
            if len(some) == most or points >= _POINTS_TOGETHER:
                yield some
                some = []
        if some:
            yield some

    def _begun(
        self, some: Sequence[_Read | Labelled], slots: Slots | None, writers: ThreadPoolExecutor
    ) -> list[Future[Labelled]]:
        """Start the network on scans, and their writers; the result is there at once for those that failed."""
        given = {read: read.taken(slots) for read in some if isinstance(read, _Read)}
        try:
            found = dict(zip(given, self._classifier(list(given.values())), strict=True)) if given else {}
        except CaptureError:
            raise
        except (PumiceError, torch.OutOfMemoryError) as error:
            if len(some) > 1:
                return [future for read in some for future in self._begun([read], slots, writers)]
            return [_known(_failed(read.one, error)) for read in given]
        return [
            writers.submit(self._written, read, given[read], found[read]) if isinstance(read, _Read) else _known(read)
            for read in some
        ]

    def _written(self, read: _Read, given: NetworkInput, classes: OnTheirWay) -> Labelled:
        _, task, kind = self._net
        xyz = given.points.numpy()
        scan = Scan(xyz, xyz[:, :0], None, read.one.name, None, read.dropped, read.origin, read.rows)
        path = write_prediction(Path(self.out), scan, classes.wait(), task, kind)
        return Labelled(read.one.source, str(path), "labelled", read.points)


@dataclass(frozen=True, eq=False)
class _Read:
    """A scan as a reader hands it over. number: its slot's. given: the network's input, None: it is in the slot.

    rows, dropped, origin: as in Scan."""

    one: Input
    number: int
    points: int
    given: NetworkInput | None
    rows: np.ndarray | None
    dropped: int
    origin: tuple[float, float, float]

    def taken(self, slots: Slots | None) -> NetworkInput:
        given = self.given if slots is None or self.given is not None else slots.views(self.number, self.points)
        assert given is not None
        return given


@dataclass(frozen=True, eq=False)
class _Reading(Dataset[Any]):
    """The scans of inputs, read when they are asked for."""

    inputs: Sequence[Input]
    task: Task
    features: str | None
    columns: int | None
    slots: Slots | None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> _Read | Labelled:
        one = self.inputs[index]
        try:
            with local_file(one.source) as path:
                scan = self._scan(path, one)
            (scan,) = fit_to_task([scan], self.task, self.features)
            given = self._given(scan, index)
        except (PumiceError, OSError, MemoryError) as error:
            return _failed(one, error)
        return _Read(one, index, len(scan), given, scan.rows, scan.dropped, scan.origin)

    def _given(self, scan: Scan, index: int) -> NetworkInput | None:
        """The network's input, or None once it is in the scan's slot."""
        slot = None if self.slots is None else self.slots.views(index, len(scan))
        if slot is None:
            return NetworkInput.of(scan, self.task)
        slot.points.numpy()[:] = scan.xyz
        network_inputs(scan, self.task, slot.feats.numpy())
        return None

    def _scan(self, path: Path, one: Input) -> Scan:
        columns = self.columns if path.name.lower().endswith(".bin") else None
        try:
            return read_scan(path, False, columns=columns)
        except PumiceError as error:
            # The copy of a URL has a name that nobody knows.
            raise FileError(str(error).replace(str(path), one.source)) from error


def _known(label: Labelled) -> Future[Labelled]:
    done: Future[Labelled] = Future()
    done.set_result(label)
    return done


def _failed(one: Input, error: BaseException) -> Labelled:
    said = str(error).removeprefix(f"{one.source}: ").partition("\n")[0]
    return Labelled(one.source, "", "failed", reason=said or type(error).__name__)


def _unchanged(item: Any) -> Any:
    return item
