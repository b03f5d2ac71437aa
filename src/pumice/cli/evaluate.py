"""Evaluation of a trained network on scans: accuracy and speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from pumice.data import Scan
from pumice.engine import compile
from pumice.label.checkpoint import Task, autocast, example
from pumice.ops import SparseTensor

_BINS = 120


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of a confusion matrix [true, predicted] over labelled points. iou: NaN for a class without points."""

    confusion: np.ndarray

    @property
    def accuracy(self) -> float:
        return float(np.trace(self.confusion) / max(self.confusion.sum(), 1))

    @property
    def counts(self) -> np.ndarray:
        """Labelled points per class."""
        return self.confusion.sum(axis=1)

    @property
    def present(self) -> int:
        """Number of classes with labelled points."""
        return int((self.counts > 0).sum())

    @property
    def iou(self) -> np.ndarray:
        """|true and predicted| / |true or predicted| per class."""
        hit = np.diag(self.confusion).astype(float)
        joint = self.confusion.sum(axis=0) + self.confusion.sum(axis=1) - hit
        return np.where(self.counts > 0, hit / np.maximum(joint, 1), np.nan)

    @property
    def miou(self) -> float:
        """Mean of iou over the classes with labelled points."""
        present = self.iou[self.counts > 0]
        return float(present.mean()) if len(present) else 0.0


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """int64 [classes, classes]: how many points of each class (row) were predicted as each (column)."""
    counted = (labels >= 0) & (labels < classes)
    cells = labels[counted] * classes + predicted[counted]
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


@torch.no_grad()
def predict(net: nn.Module, scan: Scan, task: Task, device: torch.device, precision: str) -> np.ndarray:
    """int64 [P]: the class of every point."""
    program, sample = compile(net.eval()), example(scan, task, device)
    with autocast(device, precision):
        classes = program(sample.x).feats.argmax(dim=1)
    return classes[sample.x.inverse].cpu().numpy()


@dataclass(frozen=True)
class Timing:
    """Milliseconds of `runs` inferences from coordinates to logits, with validation and all kernel maps."""

    median: float
    p20: float
    p80: float
    runs: int
    voxels: int


@torch.no_grad()
def time_inference(net: nn.Module, x: SparseTensor, precision: str, runs: int = 20, budget: float = 15.0) -> Timing:
    """Time `net`, compiled, on fresh coordinates equal to x's, so that every kernel map is rebuilt: one warm-up run,
    then at most `runs` runs, none of which starts after `budget` seconds."""
    program, times = compile(net.eval()), list[float]()
    start = time.perf_counter()
    while len(times) < runs + 1 and (len(times) < 3 or time.perf_counter() - start < budget):
        _wait(x.device)
        begin = time.perf_counter()
        # Timed too: validation sorts the coordinates, which the neighbour search reuses.
        fresh = SparseTensor(x.feats, x.coords, spatial_shape=x.spatial_shape, batch_size=x.batch_size)
        with autocast(x.device, precision):
            program(fresh)
        _wait(x.device)
        times.append(1e3 * (time.perf_counter() - begin))
    p20, median, p80 = np.quantile(times[1:], (0.2, 0.5, 0.8))
    return Timing(float(median), float(p20), float(p80), len(times) - 1, len(x))


@dataclass(frozen=True)
class LayerTiming:
    """One module of a network in one run: name, milliseconds, voxels and channels of its result ("32 to 64")."""

    name: str
    ms: float
    voxels: int
    channels: str


@torch.no_grad()
def time_layers(net: nn.Module, x: SparseTensor, precision: str, runs: int = 3) -> list[LayerTiming]:
    """The median time of every leaf module over `runs` runs with cached kernel maps, in order of use."""
    net.eval()
    order: list[str] = []
    times: dict[str, list[float]] = {}
    shapes: dict[str, tuple[int, str]] = {}
    begun: dict[str, float] = {}

    def before(name: str) -> None:
        _wait(x.device)
        begun[name] = time.perf_counter()

    def after(name: str, inputs: tuple[object, ...], output: object) -> None:
        _wait(x.device)
        if name not in times:
            order.append(name)
        times.setdefault(name, []).append(1e3 * (time.perf_counter() - begun[name]))
        if isinstance(output, SparseTensor):
            channels = inputs[0].channels if isinstance(inputs[0], SparseTensor) else output.channels
            shapes[name] = (len(output), f"{channels} to {output.channels}")

    handles = []
    for name, module in net.named_modules():
        if not list(module.children()):
            handles.append(module.register_forward_pre_hook(lambda m, i, name=name: before(name)))
            handles.append(module.register_forward_hook(lambda m, i, o, name=name: after(name, i, o)))
    try:
        for _ in range(runs + 1):
            with autocast(x.device, precision):
                net(x)
    finally:
        for handle in handles:
            handle.remove()
    return [LayerTiming(name, float(np.median(times[name][1:])), *shapes.get(name, (0, ""))) for name in order]


def trivial_scores(train: Sequence[Scan], held_out: Sequence[Scan], classes: int) -> dict[str, Scores]:
    """Baselines without a network: the majority class, and the majority class at each height (0.25 m bins)."""
    votes = np.zeros((_BINS, classes), np.int64)
    for scan in train:
        assert scan.labels is not None
        counted = scan.labels >= 0
        np.add.at(votes, (_height_bin(scan)[counted], scan.labels[counted]), 1)
    commonest = int(votes.sum(axis=0).argmax())
    by_height = np.where(votes.sum(axis=1) > 0, votes.argmax(axis=1), commonest)
    sums = {
        name: np.zeros((classes, classes), np.int64) for name in ("majority class", "majority class at each height")
    }
    for scan in held_out:
        assert scan.labels is not None
        sums["majority class"] += confusion(scan.labels, np.full(len(scan.labels), commonest), classes)
        sums["majority class at each height"] += confusion(scan.labels, by_height[_height_bin(scan)], classes)
    return {name: Scores(total) for name, total in sums.items()}


def _height_bin(scan: Scan) -> np.ndarray:
    height = scan.xyz[:, 2] - np.percentile(scan.xyz[:, 2], 2)
    return np.clip((height + 2) / 0.25, 0, _BINS - 1).astype(np.int64)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
