"""The class of every point of a scan: on a GPU by a captured network, from points to classes; on a CPU compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pumice.engine import CapturedPoints, capture_points, compile
from pumice.label.checkpoint import Task, autocast
from pumice.label.slots import ScanMemory
from pumice.ops import voxelize

_MOST_POINTS = 4_000_000
"""Largest scan that a network is captured for; larger ones are run without a graph."""


class Classifier:
    """A network on a device, for up to `most` scans in a call, which returns before a GPU has finished."""

    def __init__(self, net: nn.Module, task: Task, device: torch.device, precision: str, most: int = 1) -> None:
        net, gpu = net.to(device).eval(), device.type == "cuda"
        self._classes = _Captured(net, task.voxel, most) if gpu else _Compiled(net, task.voxel)
        self._device, self._precision = device, precision
        self._copies = torch.cuda.Stream(device) if gpu else None

    @torch.no_grad()
    def classes(self, points: Tensor, feats: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Classes int32 [P] on the device, of points float32 [P, 3] and feats float32 [P, C] on the device. counts: of
        the points of each scan, one after the other; None: one scan."""
        with autocast(self._device, self._precision):
            return self._classes(points, feats, counts or [len(points)]).to(torch.int32)

    def __call__(self, scans: Sequence[ScanMemory]) -> torch.cuda.Event | None:
        """Find the classes of scans; they are in their memory once the event (None: already) has happened."""
        counts = [len(scan.points) for scan in scans]
        classes = self.classes(*self._sent(scans), counts)
        for scan, its_classes in zip(scans, classes.split(counts), strict=True):
            scan.classes.copy_(its_classes, non_blocking=True)
        if self._copies is None:
            return None
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))
        return copied

    def _sent(self, scans: Sequence[ScanMemory]) -> tuple[Tensor, Tensor]:
        """Points and features on the device, of one scan after the other; copied beside the layers of the scans
        before."""
        if self._copies is None:
            return torch.cat([scan.points for scan in scans]), torch.cat([scan.feats for scan in scans])
        own, counts = torch.cuda.current_stream(self._device), [len(scan.points) for scan in scans]
        with torch.cuda.stream(self._copies):
            points, feats = (
                like.new_empty(sum(counts), like.shape[1], device=self._device)
                for like in (scans[0].points, scans[0].feats)
            )
            for scan, its_points, its_feats in zip(scans, points.split(counts), feats.split(counts), strict=True):
                its_points.copy_(scan.points, non_blocking=True)
                its_feats.copy_(scan.feats, non_blocking=True)
        own.wait_stream(self._copies)
        points.record_stream(own)
        feats.record_stream(own)
        return points, feats


class _Compiled:
    def __init__(self, net: nn.Module, voxel: float) -> None:
        self._program, self._voxel = compile(net), voxel

    def __call__(self, points: Tensor, feats: Tensor, counts: Sequence[int]) -> Tensor:
        found: list[Tensor] = []
        for own, inputs in zip(points.split(counts), feats.split(counts), strict=True):
            x = voxelize(own, inputs, self._voxel, origin="min")
            found.append(self._program(x).feats.argmax(dim=1)[x.inverse])
        return torch.cat(found)


class _Captured:
    """Captured for the first scans, and again for more than twice their points."""

    def __init__(self, net: nn.Module, voxel: float, scans: int) -> None:
        self._net, self._voxel, self._scans, self._most = net, voxel, scans, -1
        self._fast: CapturedPoints | None = None

    def __call__(self, points: Tensor, feats: Tensor, counts: Sequence[int]) -> Tensor:
        # From the low corner, exactly as voxelize(origin="min") does, but without the host.
        parts = [part - part.amin(dim=0) for part in points.double().split(counts)]
        points, items = torch.cat(parts) if len(parts) > 1 else parts[0], None
        if self._scans > 1:
            items = torch.empty(len(points), dtype=torch.int32, device=points.device)
            for number, part in enumerate(items.split(counts)):
                part.fill_(number)
        if self._fast is None or self._most < len(points) <= _MOST_POINTS:
            self._most = 2 * len(points)
            # Several scans have about as many points together as the first ones.
            buckets = 1.5 if items is None else [5 * len(points) // 4]
            options = {"batch_size": self._scans, "max_points": self._most, "buckets": buckets}
            self._fast = capture_points(self._net, points, feats, self._voxel, items, **options)
        return self._fast(points, feats, items).argmax(dim=1)
