"""Scenes with goals for captured networks: voxels, network, and recorded times.

The network is MinkUNet (SparseResUNet42) at full width, with 4 features per voxel and 19 classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from benchmarks.harness.rows import Peer
from benchmarks.harness.study import Setup
from benchmarks.scenes.clouds import Voxels as Found
from benchmarks.scenes.clouds import named, surface
from benchmarks.scenes.workloads import Grid, Sample, Workload, network
from pumice.models import MinkUNet

TINY = 300
"""Number of voxels of the scene in a quick run."""
GOAL, BEST = "goal", "best recorded"


@dataclass(frozen=True)
class Known:
    """Milliseconds on an H200, from an idle device to an idle device, kernel maps included.

    best: the fastest peer, recorded on 2026-11-20. captured, eager: the goals.
    """

    best: float
    captured: float
    eager: float

    def peers(self, eager: bool) -> tuple[Peer, Peer]:
        """Peers of our captured or eager way besides those timed in the same run."""
        goal = self.eager if eager else self.captured
        return Peer(BEST, self.best, "recorded"), Peer(GOAL, goal, "goal")


INFERENCE: Mapping[str, Known] = {
    "nuscenes_1f_10cm": Known(11.8, 1.2, 4.0),
    "scannet_2cm": Known(12.7, 1.4, 4.0),
    "waymo_1f_10x10x15cm": Known(14.5, 2.0, 4.5),
    "waymo_1f_5cm": Known(17.7, 2.3, 5.0),
    "shell_256": Known(19.1, 2.8, 5.5),
    "shell_512": Known(28.3, 8.0, 10.0),
}
"""Inference in fp16 on a single scene."""
TRAINING: Mapping[str, Known] = {
    "nuscenes_1f_10cm": Known(33.8, 6.0, 14.0),
    "waymo_1f_5cm": Known(78.0, 15.0, 20.0),
    "shell_512": Known(217.0, 45.0, 50.0),
}
"""A training step in mixed precision on a batch of two."""


def scenes(setup: Setup, known: Mapping[str, Known], batch: int = 1) -> Iterator[Sample]:
    """The wanted scenes of a table, each `batch` times, with float32 features; in a quick run a single tiny surface."""
    if setup.quick:
        yield sample_of(setup, f"surface_{TINY}", surface(TINY, setup.device), batch)
        return
    for name, make in named(setup, [name for name in known if setup.wants(name) or setup.only.startswith(name)]):
        yield sample_of(setup, name, make(), batch)


def sample_of(setup: Setup, name: str, found: Found, batch: int = 1) -> Sample:
    """A sample with the voxels repeated as each item of a batch, and normal random features."""
    items = []
    for item in range(batch):
        coords = found.coords.clone()
        coords[:, 0] = item
        items.append(coords)
    coords = torch.cat(items)
    return Sample(coords, setup.random(len(coords), 4), None, batch, name)


def net_for(setup: Setup, sample: Sample) -> nn.Module:
    """The network in evaluation mode and float32, with fixed random weights and norm statistics of the sample."""
    model = partial(MinkUNet, 4, 19, width=0.25 if setup.quick else 1.0)
    return network(Workload(sample.name, model, lambda folder: [], Grid((1.0, 1.0, 1.0)), 4), sample)
