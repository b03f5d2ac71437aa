"""Cost model of a lowering: work in FLOP and bytes over the rates of a device.

The estimates rank lowerings and formats; they do not predict times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Work:
    """Work of a lowering: FLOP (2 per multiply-add), bytes of memory and cache, launches. matrix: on tensor cores."""

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
    """Rates of a device: 16-bit tensor core and plain FLOP/s, memory and cache bytes/s, seconds per kernel launch."""

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
    """Estimated seconds: the maximum of compute, memory and cache time, plus launch time."""
    rate = device.matrix if work.matrix else device.plain
    return (
        max(work.flops / rate, work.memory / device.memory, work.cache / device.cache) + work.launches * device.launch
    )


@dataclass(frozen=True)
class CpuSchedule:
    """Schedule of one sparse convolution on a CPU.

    engine         "batched" (one batched GEMM of the BLAS per chunk) or "grouped" (one grouped convolution of oneDNN
                   per chunk; "strided" replaces it where oneDNN has no kernel), see `pumice.lower.cpu.ENGINES`
    pairs          approximate pairs per chunk of outputs; its gathered rows and products stay in the cache
    tile           pairs per tile, all of one kernel offset; in each chunk they are padded to whole tiles
    multiple       the number of tiles per chunk is padded to a multiple of it, so that few numbers occur: oneDNN
                   compiles a kernel for each (about 1 ms)
    gradient       engine of full blocks in the weight gradient: "gemm" or "convolution" (oneDNN)
    gradient_pairs pairs per block in the weight gradient

    `default` was measured on two cores of an AMD Zen 5 (AVX-512, 1 MiB of L2 per core, 32 MiB of L3) with torch 2.13,
    fp32, on a 3x3x3 submanifold map of 115 000 voxels and 6.8 pairs per voxel. MKL stays below 220 GFLOP/s at any
    width; a grouped oneDNN convolution reaches 240 to 400 from 32 channels on, if channels are multiples of 16. Chunks
    are small because a buffer beyond the allocator's cache costs a page fault per 4 KiB (1.3 us) in every call.
    """

    engine: str = "batched"
    pairs: int = 32_768
    tile: int = 128
    multiple: int = 1
    gradient: str = "gemm"
    gradient_pairs: int = 8192

    @classmethod
    def default(cls, channels_in: int, channels_out: int, pairs: int) -> CpuSchedule:
        """The schedule for these channels and this number of pairs (over all kernel offsets of the map)."""
        wide = max(channels_in, channels_out, 1)
        chunk = max(16_384, min(32_768, 1_048_576 // wide))
        if pairs < 16_384:
            return cls(pairs=chunk, tile=32)
        if min(channels_in, channels_out) < 32:
            return cls(pairs=chunk)
        if channels_in % 16 or channels_out % 16:
            return cls(pairs=chunk, gradient="convolution")
        return cls("grouped", chunk, 256, 8, "convolution")
