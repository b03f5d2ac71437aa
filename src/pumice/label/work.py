"""The work beside the network: scans are read, and their files written, by processes of their own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch.utils.data import Dataset, get_worker_info

from pumice.data import Scan, read_scan
from pumice.errors import FileError, PumiceError
from pumice.label.checkpoint import Task, network_inputs
from pumice.label.features import fit_to_task
from pumice.label.predictions import write_prediction
from pumice.label.slots import ScanMemory, ScanSlots
from pumice.label.sources import Input, local_file

_WRITTEN = 2
"""Most files of an order: more than the scan that it reads, so that files catch up."""


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


def failed(one: Input, error: BaseException) -> Labelled:
    said = str(error).removeprefix(f"{one.source}: ").partition("\n")[0]
    return Labelled(one.source, "", "failed", reason=said or type(error).__name__)


@dataclass(frozen=True, eq=False)
class ReadScan:
    """A scan that was read into a slot, or into memory of its own. dropped, origin: as in Scan."""

    one: Input
    slot: int
    points: int
    dropped: int
    origin: tuple[float, float, float]
    own: ScanMemory | None

    def memory(self, slots: ScanSlots | None) -> ScanMemory:
        found = self.own if slots is None or self.own is not None else slots.scan(self.slot, self.points)
        assert found is not None
        return found


@dataclass(frozen=True, eq=False)
class FailedScan:
    """A scan that cannot be labelled, which is told in its turn."""

    slot: int
    label: Labelled


@dataclass(frozen=True, eq=False)
class WorkOrder:
    """read: the scan to read and its slot, if there is one. write: scans whose classes are there, or that failed."""

    read: tuple[Input, int] | None
    write: Sequence[ReadScan | FailedScan]


@dataclass(frozen=True, eq=False)
class WorkReport:
    """What became of an order. slots: those that are free again. error: why a file could not be written."""

    read: ReadScan | FailedScan | None
    labels: Sequence[Labelled]
    slots: Sequence[int]
    error: OSError | None = None


@dataclass(frozen=True, eq=False)
class ScanWork(Dataset[WorkReport]):
    """Carries out orders: work[order] is its report."""

    out: Path
    kind: str
    task: Task
    features: str | None
    columns: int | None
    slots: ScanSlots | None

    def __getitem__(self, order: WorkOrder) -> WorkReport:
        if get_worker_info() is not None and os.getppid() != self._parent:
            # Killed: whoever goes on has listed the files that are there.
            os._exit(1)
        free = [scan.slot for scan in order.write]
        try:
            labels = [scan.label if isinstance(scan, FailedScan) else self._written(scan) for scan in order.write]
        except OSError as error:
            return WorkReport(None, (), free, error)
        return WorkReport(None if order.read is None else self._read(*order.read), labels, free)

    @cached_property
    def _parent(self) -> int:
        """The process that gives orders, as it was at the first one."""
        return os.getppid()

    def _written(self, read: ReadScan) -> Labelled:
        memory = read.memory(self.slots)
        xyz = memory.points.numpy()
        rows = memory.rows.numpy() if read.dropped else None
        scan = Scan(xyz, xyz[:, :0], None, read.one.name, None, read.dropped, read.origin, rows)
        path = write_prediction(self.out, scan, memory.classes.numpy(), self.task, self.kind)
        return Labelled(read.one.source, str(path), "labelled", read.points)

    def _read(self, one: Input, slot: int) -> ReadScan | FailedScan:
        try:
            with local_file(one.source) as path:
                scan = self._scan(path, one)
            (scan,) = fit_to_task([scan], self.task, self.features)
            channels, count = self.task.in_channels, len(scan)
            shared = None if self.slots is None else self.slots.scan(slot, count)
            memory = ScanMemory.of(count, channels) if shared is None else shared
            network_inputs(scan, self.task, memory.feats.numpy())
        except (PumiceError, OSError, MemoryError) as error:
            return FailedScan(slot, failed(one, error))
        memory.points.numpy()[:] = scan.xyz
        if scan.rows is not None:
            memory.rows.numpy()[:] = scan.rows
        return ReadScan(one, slot, count, scan.dropped, scan.origin, memory if shared is None else None)

    def _scan(self, path: Path, one: Input) -> Scan:
        columns = self.columns if path.name.lower().endswith(".bin") else None
        try:
            return read_scan(path, False, columns=columns)
        except PumiceError as error:
            # The copy of a URL has a name that nobody knows.
            raise FileError(str(error).replace(str(path), one.source)) from error


class Orders:
    """The orders of a run, one after the other: each reads the next scan, and writes scans that the network has done.

    slots: their number, that of scans on their way at most."""

    def __init__(self, todo: Sequence[Input], slots: int) -> None:
        self._todo, self._free, self._unwritten = deque(todo), deque(range(slots)), len(todo)
        self._reading = deque[Input]()
        self._running = deque[tuple[torch.cuda.Event | None, Sequence[ReadScan | FailedScan]]]()
        self._done = deque[ReadScan | FailedScan]()

    def __iter__(self) -> Iterator[WorkOrder]:
        while self._unwritten:
            self._collect()
            write = [self._done.popleft() for _ in range(min(_WRITTEN, len(self._done)))]
            self._unwritten -= len(write)
            yield WorkOrder(self._next_read(), write)

    def reported(self, report: WorkReport) -> None:
        self._free.extend(report.slots)
        if report.read is not None:
            self._reading.popleft()

    def started(self, done: torch.cuda.Event | None, scans: Sequence[ReadScan | FailedScan]) -> None:
        """The network has these scans' classes in their memory once `done` (None: already) has happened."""
        self._running.append((done, scans))

    @property
    def all_read(self) -> bool:
        return not self._todo and not self._reading

    @property
    def oldest(self) -> Input | None:
        """The scan that is read, or to be read, before the others."""
        return next(iter((*self._reading, *self._todo)), None)

    def _next_read(self) -> tuple[Input, int] | None:
        if not self._todo or not self._free:
            return None
        self._reading.append(self._todo.popleft())
        return self._reading[-1], self._free.popleft()

    def _collect(self) -> None:
        """Find the scans that the network has done; wait for it if there is nothing else to do."""
        while self._running:
            done, scans = self._running[0]
            if done is not None and not done.query():
                if self._done or not self.all_read:
                    return
                done.synchronize()
            self._done += scans
            self._running.popleft()
