"""Common parts of the studies of the suite `tuner`: networks and scans, names of cases, and rows.

A case is workload/dtype/mode/study-way, such as minkunet-kitti-1x/fp16/inference/splits-1-2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import DTYPES, TOLERANCE, Setup
from benchmarks.harness.timing import Times, in_pieces, together
from benchmarks.harness.whole import multiplying
from benchmarks.peers.published import PUBLISHED
from benchmarks.scenes.workloads import WORKLOADS, Sample, Workload, narrow, samples, stand_in
from benchmarks.suites.workloads import network
from pumice.errors import OptionError

INFERENCE, TRAINING = "inference", "training"
_TINY = 120
"""Maximum voxels of a scan in a quick run."""
_TF32 = 20.0
"""Factor on the tolerance of float32 with products in tf32."""
ITSELF = "itself"
"""The peer of rows that are compared with nothing."""


@dataclass(frozen=True)
class Subjected:
    """A workload in a dtype and a mode, the subject of a study's rows. tf32: float32 is multiplied as tf32."""

    workload: Workload
    dtype: torch.dtype
    mode: str = INFERENCE
    tf32: bool = False

    @property
    def precision(self) -> str:
        """fp16, tf32 or fp32."""
        return "tf32" if self.tf32 else DTYPES[self.dtype]

    @property
    def tolerance(self) -> float:
        """Relative error of a layer's result above which it is not timed."""
        return TOLERANCE[self.dtype] * (_TF32 if self.tf32 else 1.0)

    def multiplying(self) -> AbstractContextManager[object]:
        """The context in which products of float32 are those of the precision."""
        return multiplying("tf32") if self.tf32 else nullcontext()

    @property
    def name(self) -> str:
        made = "-generated" if self.workload.generated else ""
        return f"{self.workload.name}{made}/{self.precision}/{self.mode}"

    def case(self, study: str, way: str) -> str:
        return f"{self.name}/{study}-{way}"

    def net(self, setup: Setup) -> torch.nn.Module:
        """The network with fixed random weights and norm statistics of the scan; for inference in the dtype."""
        (sample,) = self._samples(setup, torch.float32, 1, 1)
        net = network(self.workload, sample)
        return net.train() if self.mode == TRAINING else net.to(self.dtype)

    def samples(self, setup: Setup, count: int = 1, batch: int = 1) -> list[Sample]:
        """At most `count` samples; tiny ones in a quick run. Raises OptionError if scans are missing."""
        return self._samples(setup, torch.float32 if self.mode == TRAINING else self.dtype, count, batch)

    def _samples(self, setup: Setup, dtype: torch.dtype, count: int, batch: int) -> list[Sample]:
        return samples(self.workload, setup.device, dtype, batch, count=count, most=_TINY if setup.quick else 0)


def subject_of(setup: Setup, name: str, mode: str = INFERENCE, precision: str = "half") -> Subjected:
    """A workload in half precision, fp32 or tf32; in a quick run a narrow network on a street."""
    workload = narrow(stand_in(WORKLOADS[name])) if setup.quick else WORKLOADS[name]
    return Subjected(workload, setup.half if precision == "half" else torch.float32, mode, precision == "tf32")


def subjects(
    setup: Setup, study: str, names: Sequence[str], mode: str = INFERENCE, precisions: Sequence[str] = ("half",)
) -> Iterator[Subjected]:
    """These workloads in these precisions (half, fp32 or tf32), if wanted and available; a quick run has the last one
    only, on a street. On a CPU all precisions are fp32.

    Workloads left out are reported; one is also left out if less time is left than the longest one took.
    """
    longest = 0.0
    precisions = precisions if setup.device.type == "cuda" else precisions[:1]
    for name, precision in product(names[-1:] if setup.quick else names, precisions):
        found = subject_of(setup, name, mode, precision)
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
    """Times of calls in turn by the device's clock, by name."""
    found = together(list(calls.values()), setup.device, setup.clock, seconds or setup.seconds)
    return dict(zip(calls, found, strict=True))


def spent_in_pieces(setup: Setup, calls: Mapping[str, Sequence[Callable[[], Any]]]) -> dict[str, Times]:
    """The same for calls given as pieces; a call's time is the sum over its pieces."""
    found = in_pieces(list(calls.values()), setup.device, setup.clock, setup.seconds)
    return dict(zip(calls, found, strict=True))


@dataclass(frozen=True)
class Writer:
    """Makes the rows of one study of one subject."""

    setup: Setup
    subject: Subjected
    study: str

    def timed(self, way: str, times: Times | float, peer: Peer, metric: str = "time", clock: str = "") -> Row:
        """A row in milliseconds, by default by the device's clock."""
        return self.row(way, times, clock or self.setup.clock, peer, metric, "ms")

    def counted(self, way: str, metric: str, value: float, unit: str, peer: Peer | None = None) -> Row:
        """A row of a counted or computed value."""
        return self.row(way, value, "count", peer or Peer(ITSELF, value), metric, unit)

    def row(self, way: str, times: Times | float, clock: str, peer: Peer, metric: str, unit: str) -> Row:
        """A row of a way of the subject."""
        case = self.subject.case(self.study, way)
        return self.setup.row(case, times, clock, peer, metric, unit, self.subject.precision)


def say_published(setup: Setup, study: str) -> None:
    """Print published results on the question of a study, with their sources."""
    for found in PUBLISHED.get(study, ()):
        setup.say(f"  published: {found.text} ({found.source})")
    if study not in PUBLISHED:
        setup.say("  published: no figure on this question")
