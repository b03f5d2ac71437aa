"""Cost model of a lowering: work in FLOP and bytes over the rates of a device.

The estimates rank lowerings and formats; they do not predict times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Work:
    """Work of a lowering: FLOP (2 per multiply-add), bytes from memory and cache, launches; matrix: on tensor cores."""

    flops: float = 0
    memory: float = 0
    cache: float = 0
    launches: int = 1
    matrix: bool = False

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.memory + other.memory,
            self.cache + other.cache,
            self.launches + other.launches,
            self.matrix or other.matrix,
        )


@dataclass(frozen=True)
class Device:
    """Rates: FLOP/s of tensor cores (16 bits) and of plain units, bytes/s of memory and cache, seconds per launch."""

    name: str
    matrix: float
    plain: float
    memory: float
    cache: float
    launch: float


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        # Measured: dense fp16 product, device copy, reads that hit the L2.
        "cuda": Device("H200", 742e12, 60e12, 4.3e12, 8.5e12, 8e-6),
        # Two AVX-512 cores.
        "cpu": Device("CPU", 4e11, 1e11, 2e10, 1e11, 4e-6),
    }
)


def seconds(work: Work, device: Device) -> float:
    """The maximum of compute, memory and cache time, plus the launches."""
    rate = device.matrix if work.matrix else device.plain
    return (
        max(work.flops / rate, work.memory / device.memory, work.cache / device.cache) + work.launches * device.launch
    )
