"""In what order a sparse convolution runs on a CPU: how much at once, and which multiplication. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuSchedule:
    """The order of one sparse convolution on a CPU.

    The outputs are taken in chunks, so that the products of a chunk stay in the cache until they are summed.

    engine         "gemm" (torch.mm, the BLAS) or "linear" (oneDNN), see `pumice.lower.cpu.ENGINES`
    pairs          products of a chunk, about; fixes the number of output rows of a chunk
    quantum        rows of a product are rounded up to a multiple of it. oneDNN compiles a kernel for each number of
                   rows (0.1 to 0.4 ms), so the numbers must be few and come back with the next point cloud
    gradient       engine of full blocks in the gradient of the weights: "gemm" or "convolution" (oneDNN)
    gradient_pairs pairs of a block in the gradient of the weights

    The numbers of `default` were measured on two cores of an AMD Zen 5 (AVX-512, 1 MiB of L2 a core, 32 MiB of L3)
    with torch 2.13, fp32, on a 3x3x3 submanifold map of 115 000 voxels and 6.8 pairs a voxel. There MKL runs at
    150 to 220 GFLOP/s and oneDNN at 350 to 450 once a product has 64 channels and 2000 rows; below 64 channels what
    oneDNN wins is lost on its calls, which take 12 us against 3.
    """

    engine: str = "batched"
    pairs: int = 32_768
    quantum: int = 64
    gradient: str = "gemm"
    gradient_pairs: int = 8192

    @classmethod
    def default(cls, channels_in: int, channels_out: int, pairs: int) -> CpuSchedule:
        """The schedule for these channels and this number of pairs (over all offsets of the map)."""
        narrow, wide = sorted((channels_in, channels_out))
        chunk = min(196_608, max(49_152, 3_145_728 // max(wide, 1)))
        if narrow < 32 or narrow * wide < 2048 or pairs < 16_384:
            return cls(pairs=chunk)
        return cls(engine="linear", pairs=chunk, quantum=256, gradient="convolution")
