"""The class of every point of a scan: on a GPU by a captured network, from points to classes; on a CPU compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pumice.data import Scan
from pumice.engine import CapturedPoints, capture_points, compile
from pumice.label.checkpoint import Task, autocast, network_inputs
from pumice.ops import voxelize

_MOST_POINTS = 4_000_000
"""Largest scan that a network is captured for; larger ones are run without a graph."""


@dataclass(frozen=True, eq=False)
class NetworkInput:
    """points float32 [P, 3], feats float32 [P, C]."""

    points: Tensor
    feats: Tensor

    @staticmethod
    def of(scan: Scan, task: Task) -> NetworkInput:
        """The input of a scan. Raises OptionError for another number of features than the task's."""
        return NetworkInput(torch.from_numpy(scan.xyz), torch.from_numpy(network_inputs(scan, task)))


class Classifier:
    """A network on a device, in three steps that different threads may take: send() scans there, classes(), fetch()."""

    def __init__(self, net: nn.Module, task: Task, device: torch.device, precision: str) -> None:
        net, gpu = net.to(device).eval(), device.type == "cuda"
        self._classes = _Captured(net, task.voxel) if gpu else _Compiled(net, task.voxel)
        self._device, self._precision = device, precision
        # Beside the network's stream: where a driver encrypts copies, they hold up whoever asks for them.
        self._there, self._back = (torch.cuda.Stream(device) if gpu else None for _ in range(2))

    def send(self, given: NetworkInput) -> NetworkInput:
        """The input on the device, where it is when this returns."""
        with torch.cuda.stream(self._there):
            return NetworkInput(given.points.to(self._device), given.feats.to(self._device))

    @torch.no_grad()
    def classes(self, points: Tensor, feats: Tensor) -> Tensor:
        """Classes int32 [P] on the device, of points float32 [P, 3] and feats float32 [P, C] on the device."""
        with autocast(self._device, self._precision):
            return self._classes(points, feats).to(torch.int32)

    def __call__(self, sent: NetworkInput) -> OnTheirWay:
        """The classes, before a GPU has finished."""
        classes, done = self.classes(sent.points, sent.feats), None
        if self._there is not None:
            own = torch.cuda.current_stream(self._device)
            for tensor in (sent.points, sent.feats):
                tensor.record_stream(own)
            # Sleeps while it waits: writers must not take processors from readers.
            done = torch.cuda.Event(blocking=True)
            done.record(own)
        return OnTheirWay(classes, done, self._back)


@dataclass(frozen=True, eq=False)
class OnTheirWay:
    """Classes int32 [P] on the device, complete once `done` (None: already) has happened."""

    classes: Tensor
    done: torch.cuda.Event | None = None
    back: torch.cuda.Stream | None = None

    def fetch(self) -> np.ndarray:
        """The classes on the host."""
        if self.done is not None:
            self.done.synchronize()
        with torch.cuda.stream(self.back):
            return self.classes.cpu().numpy()


class _Compiled:
    def __init__(self, net: nn.Module, voxel: float) -> None:
        self._program, self._voxel = compile(net), voxel

    def __call__(self, points: Tensor, feats: Tensor) -> Tensor:
        x = voxelize(points, feats, self._voxel, origin="min")
        return self._program(x).feats.argmax(dim=1)[x.inverse]


class _Captured:
    """Captured for the first scan, and again for one of more than twice its points."""

    def __init__(self, net: nn.Module, voxel: float) -> None:
        self._net, self._voxel, self._most = net, voxel, -1
        self._fast: CapturedPoints | None = None

    def __call__(self, points: Tensor, feats: Tensor) -> Tensor:
        # From the low corner, exactly as voxelize(origin="min") does, but without the host.
        points = points.double()
        points = points - points.amin(dim=0)
        if self._fast is None or self._most < len(points) <= _MOST_POINTS:
            self._most = 2 * len(points)
            self._fast = capture_points(self._net, points, feats, self._voxel, max_points=self._most)
        return self._fast(points, feats).argmax(dim=1)
