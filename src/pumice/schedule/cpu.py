"""In what order a sparse convolution runs on a CPU: how much at once, and which multiplication. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuSchedule:
    """The order of one sparse convolution on a CPU.

    engine         "batched" (one batched product of the BLAS a chunk) or "grouped" (one grouped convolution of oneDNN a
                   chunk; "strided" stands in for it where oneDNN has no kernel), see `pumice.lower.cpu.ENGINES`
    pairs          pairs of a chunk of outputs, about: what is gathered and multiplied stays in the cache
    tile           pairs of one tap that are multiplied together; what a tap has in a chunk is filled up to whole tiles
    multiple       tiles of a chunk are filled up to a multiple of it. oneDNN compiles a kernel for each number of tiles
                   (about 1 ms): the numbers must be few and come back with the next point cloud
    gradient       engine of full blocks in the gradient of the weights: "gemm" or "convolution" (oneDNN)
    gradient_pairs pairs of a block in the gradient of the weights

    The numbers of `default` were measured on two cores of an AMD Zen 5 (AVX-512, 1 MiB of L2 a core, 32 MiB of L3)
    with torch 2.13, fp32, on a 3x3x3 submanifold map of 115 000 voxels and 6.8 pairs a voxel. There MKL stays below
    220 GFLOP/s at any width; a grouped convolution of oneDNN runs at 240 to 400 from 32 channels on, but only where
    channels are multiples of 16. Buffers that outgrow what the allocator keeps cost a page
    fault per 4 KiB (1.3 us) at every call, so that chunks are small.
    """

    engine: str = "batched"
    pairs: int = 32_768
    tile: int = 128
    multiple: int = 1
    gradient: str = "gemm"
    gradient_pairs: int = 8192

    @classmethod
    def default(cls, channels_in: int, channels_out: int, pairs: int) -> CpuSchedule:
        """The schedule for these channels and this number of pairs (over all taps of the map)."""
        wide = max(channels_in, channels_out, 1)
        chunk = max(16_384, min(32_768, 1_048_576 // wide))
        if pairs < 16_384:
            return cls(pairs=chunk, tile=32)
        if min(channels_in, channels_out) < 32:
            return cls(pairs=chunk)
        if channels_in % 16 or channels_out % 16:
            return cls(pairs=chunk, gradient="convolution")
        return cls("grouped", chunk, 256, 8, "convolution")
