"""Loop schedule of a sparse convolution on a CPU: chunk sizes and GEMM engine. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuSchedule:
    """Schedule of one sparse convolution on a CPU.

    engine         "batched" (one batched GEMM of the BLAS per chunk) or "grouped" (one grouped convolution of oneDNN
                   per chunk; "strided" replaces it where oneDNN has no kernel), see `pumice.lower.cpu.ENGINES`
    pairs          approximate pairs per chunk of outputs; gathered rows and products stay in the cache
    tile           pairs of one kernel offset multiplied together; its pairs in a chunk are padded to whole tiles
    multiple       the tiles of a chunk are padded to a multiple of it. oneDNN compiles a kernel per number of tiles
                   (about 1 ms), so the numbers must be few and recur with the next point cloud
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
