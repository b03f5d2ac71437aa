"""In what order a sparse convolution runs on a CPU: how much at once, and which multiplication. No tensors here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CpuSchedule:
    """The order of one sparse convolution on a CPU.

    The outputs are taken in chunks, so that the products of a chunk stay in the cache until they are summed.

    engine         "batched" (one batched product of the BLAS a chunk) or "linear" (oneDNN, one product a tap), see
                   `pumice.lower.cpu.ENGINES`
    pairs          products of a chunk, about; fixes the number of output rows of a chunk
    quantum        pairs of a tap in a chunk are rounded up to a multiple of it. oneDNN compiles a kernel for each
                   number of rows (0.1 to 0.4 ms): the numbers must be few and come back with the next point cloud
    gradient       engine of full blocks in the gradient of the weights: "gemm" or "convolution" (oneDNN)
    gradient_pairs pairs of a block in the gradient of the weights

    The numbers of `default` were measured on two cores of an AMD Zen 5 (AVX-512, 1 MiB of L2 a core, 32 MiB of L3)
    with torch 2.13, fp32, on a 3x3x3 submanifold map of 115 000 voxels and 6.8 pairs a voxel. There MKL runs at
    150 to 220 GFLOP/s and oneDNN at 350 to 450 once a product has 32 channels and 2000 rows; below, what oneDNN wins is
    lost on its calls, which take 12 us against 3. Buffers that outgrow 12 MiB together are given back to the system
    after each call and cost a page fault per 4 KiB at the next.
    """

    engine: str = "batched"
    pairs: int = 24_576
    quantum: int = 128
    gradient: str = "gemm"
    gradient_pairs: int = 8192

    @classmethod
    def default(cls, channels_in: int, channels_out: int, pairs: int) -> CpuSchedule:
        """The schedule for these channels and this number of pairs (over all taps of the map)."""
        narrow, wide = sorted((channels_in, channels_out))
        if narrow < 32 or pairs < 16_384:
            return cls(quantum=128 if pairs >= 16_384 else 32)
        return cls("linear", min(49_152, 3_145_728 // wide), 256, "convolution")
