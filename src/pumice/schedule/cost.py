"""What a way of computing costs: work counted by the hand, divided by what a device can do.

The figures choose between lowerings and between formats; they are not a forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Work:
    """What is to be done: multiply-adds as 2 FLOP each, bytes from memory and from the cache, kernels launched.

    matrix: whether the FLOP are those of matrix units.
    """

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
    """Rates per second: FLOP of matrix units (16 bits) and of plain ones, bytes of memory and cache; s a launch."""

    name: str
    matrix: float
    plain: float
    memory: float
    cache: float
    launch: float


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        # Measured: dense fp16 product, device copy, reads that hit the L2 (shared/baselines of the project).
        "cuda": Device("H200", 742e12, 60e12, 4.3e12, 8.5e12, 8e-6),
        # Two AVX-512 cores.
        "cpu": Device("CPU", 4e11, 1e11, 2e10, 1e11, 4e-6),
    }
)


def seconds(work: Work, device: Device) -> float:
    """The longest of computing, memory and cache, and the launches."""
    rate = device.matrix if work.matrix else device.plain
    return (
        max(work.flops / rate, work.memory / device.memory, work.cache / device.cache) + work.launches * device.launch
    )
