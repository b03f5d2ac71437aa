"""What the studies of the suite `tuner` share: which networks and scans, how cases are called, and their rows.

A case reads workload/dtype/mode/study-way, as minkunet-kitti-1x/fp16/inference/splits-1-2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import DTYPES, Setup
from benchmarks.harness.timing import Times, in_pieces, together
from benchmarks.peers.published import PUBLISHED
from benchmarks.scenes.workloads import WORKLOADS, Sample, Workload, narrow, samples, stand_in
from benchmarks.suites.workloads import network
from pumice.errors import OptionError

INFERENCE, TRAINING = "inference", "training"
_TINY = 120
"""Voxels of a scan in a quick run."""
ITSELF = "itself"
"""The peer of what is compared with nothing."""


@dataclass(frozen=True)
class Subjected:
    """A workload in a dtype and a mode: what a row of a study is about."""

    workload: Workload
    dtype: torch.dtype
    mode: str = INFERENCE

    @property
    def name(self) -> str:
        made = "-generated" if self.workload.generated else ""
        return f"{self.workload.name}{made}/{DTYPES[self.dtype]}/{self.mode}"

    def case(self, study: str, way: str) -> str:
        return f"{self.name}/{study}-{way}"

    def net(self, setup: Setup) -> torch.nn.Module:
        """The network with the same weights each time, its norms used to the scan; in inference in the dtype."""
        (sample,) = self._samples(setup, torch.float32, 1, 1)
        net = network(self.workload, sample)
        return net.train() if self.mode == TRAINING else net.to(self.dtype)

    def samples(self, setup: Setup, count: int = 1, batch: int = 1) -> list[Sample]:
        """So many samples at most; tiny ones in a quick run. OptionError where the scans are not at hand."""
        return self._samples(setup, torch.float32 if self.mode == TRAINING else self.dtype, count, batch)

    def _samples(self, setup: Setup, dtype: torch.dtype, count: int, batch: int) -> list[Sample]:
        return samples(self.workload, setup.device, dtype, batch, count=count, most=_TINY if setup.quick else 0)


def subjects(setup: Setup, study: str, names: Sequence[str], mode: str = INFERENCE) -> Iterator[Subjected]:
    """These workloads in half precision, as far as they are wanted and at hand; in a quick run the last, on a street.

    What is left out is said; a network is, too, for which the study has less time left than its longest one took.
    """
    longest = 0.0
    for name in names[-1:] if setup.quick else names:
        workload = narrow(stand_in(WORKLOADS[name])) if setup.quick else WORKLOADS[name]
        found = Subjected(workload, setup.half, mode)
        if not setup.wants(f"{found.name}/{study}"):
            continue
        try:
            found.samples(setup)
        except OptionError as reason:
            setup.say(f"{name} is left out: {reason}")
            continue
        if longest and setup.left < longest:
            setup.say(f"{name} is left out: {max(0.0, setup.left):.0f} s are left, and one took {longest:.0f}")
            continue
        begin = time.perf_counter()
        yield found
        longest = max(longest, time.perf_counter() - begin)


def spent(setup: Setup, calls: Mapping[str, Callable[[], Any]], seconds: float = 0.0) -> dict[str, Times]:
    """The times of calls in turn, by name, on the clock of the device."""
    found = together(list(calls.values()), setup.device, setup.clock, seconds or setup.seconds)
    return dict(zip(calls, found, strict=True))


def spent_in_pieces(setup: Setup, calls: Mapping[str, Sequence[Callable[[], Any]]]) -> dict[str, Times]:
    """The same of calls that are made of pieces: the sum of what the pieces of a call take."""
    found = in_pieces(list(calls.values()), setup.device, setup.clock, setup.seconds)
    return dict(zip(calls, found, strict=True))


@dataclass(frozen=True)
class Writer:
    """Makes the rows of one study of one subject."""

    setup: Setup
    subject: Subjected
    study: str

    def timed(self, way: str, times: Times | float, peer: Peer, metric: str = "time", clock: str = "") -> Row:
        """A row in milliseconds, by default by the clock of the device; lower is better."""
        return self.row(way, times, clock or self.setup.clock, peer, metric, "ms")

    def counted(self, way: str, metric: str, value: float, unit: str, peer: Peer | None = None) -> Row:
        """A row of what was counted or worked out."""
        return self.row(way, value, "count", peer or Peer(ITSELF, value), metric, unit)

    def row(self, way: str, times: Times | float, clock: str, peer: Peer, metric: str, unit: str) -> Row:
        """A row of a way of the subject."""
        return self.setup.row(self.subject.case(self.study, way), times, clock, peer, metric, unit, self.subject.dtype)


def say_published(setup: Setup, study: str) -> None:
    """What was published about the question of a study, with where it stands."""
    for found in PUBLISHED.get(study, ()):
        setup.say(f"  published: {found.text} ({found.source})")
    if study not in PUBLISHED:
        setup.say("  published: no figure that could be looked up")
