"""Weights of float32 products in the parts that tensor cores multiply, for kernels that read them so (Signature.parts).

    tf32      one part: the weight rounded to tf32
    tf32x3    three parts of 8 bits, as bfloat16: six products of these are as exact, in the same time

A kernel that computes the parts does so for every tile, and writes them back to shared memory, from which tensor cores
read the right side of a product. On an H200, 63,000 outputs of 128 channels: tf32 268 us, 157 with the weight in parts;
float32 456 us, 338 in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.lower.tile_family import INT32_LIMIT
from pumice.runtime.launch import has_triton, keep_for_graph, kernel, outside_inference_mode, to_device_async

_PARTS = {"tf32": 1, "tf32x3": 3}
DTYPES = {1: torch.float32, 3: torch.bfloat16}
"""Of the parts, by their number."""
_BLOCK = 4096
_ALIGNED = 64
_FEWEST = 16
"""Weights per program; alignment of weights in the buffer; fewest channels on either side of a product on tensor
cores."""


def number_of_parts(precision: str) -> int:
    """The number of parts for a precision of float32 products, 0 if kernels take weights as they are."""
    return 0 if torch.version.hip else _PARTS.get(precision, 0)


def fits_parts(weight: Tensor) -> bool:
    """True if a weight [C_out, ..., C_in] may be stored in parts."""
    wide = min(weight.shape[0], weight.shape[-1]) >= _FEWEST and not weight.numel() % 4
    aligned = weight.is_contiguous() and not weight.data_ptr() % 16
    return weight.dtype is torch.float32 and wide and aligned and 3 * weight.numel() < INT32_LIMIT


def rounded(x: Tensor) -> Tensor:
    """float32 rounded to tf32; what is not finite, or would no longer be, is left."""
    return torch.where(x.abs() < 3.4e38, ((x.view(torch.int32) + 4096) & -8192).view(torch.float32), x)


@dataclass(frozen=True, eq=False)
class WeightParts:
    """Weights in `parts` parts. first: the first part of each, in its shape, which the others follow in memory."""

    parts: int
    first: tuple[Tensor, ...]
    _memory: Tensor
    _blocks: Tensor

    @staticmethod
    def of(weights: Sequence[Tensor], parts: int) -> WeightParts:
        """Memory for weights that fit (fits_parts), not yet filled."""
        places, size, blocks = list[int](), 0, list[tuple[int, int, int, int]]()
        for weight in weights:
            count, address = weight.numel(), weight.data_ptr()
            begins = range(0, count, _BLOCK)
            blocks += [(address + 4 * n, size + n, min(_BLOCK, count - n), count) for n in begins]
            places.append(size)
            size += -(-parts * count // _ALIGNED) * _ALIGNED
        with outside_inference_mode(), torch.no_grad():
            memory = weights[0].new_empty(size, dtype=DTYPES[parts])
            table = to_device_async(torch.tensor(blocks), memory.device)
            first = [memory[n : n + w.numel()].view(w.shape) for n, w in zip(places, weights, strict=True)]
        return WeightParts(parts, tuple(first), memory, table)

    def fill(self, weights: Sequence[Tensor]) -> None:
        """Compute the parts of the weights as they are now."""
        memory, blocks = keep_for_graph(self._memory), keep_for_graph(self._blocks)
        if has_triton(memory):
            constants = {"PARTS": self.parts, "BLOCK": _BLOCK}
            kernel("movement_kernels.split_weights", "lower")(len(blocks), (blocks, memory), (), constants)
        else:
            self._fill_torch(weights)

    def _fill_torch(self, weights: Sequence[Tensor]) -> None:
        for weight, first in zip(weights, self.first, strict=True):
            if self.parts == 1:
                first.copy_(rounded(weight.detach()))
                continue
            rest = weight.detach()
            for part in range(self.parts):
                high = (rest.view(torch.int32) & -65536).view(torch.float32)
                begin = first.storage_offset() + part * first.numel()
                self._memory.as_strided(first.shape, first.stride(), begin).copy_(high)
                rest = rest - high
