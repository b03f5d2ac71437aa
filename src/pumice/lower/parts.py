"""Weights of float32 products in the parts that tensor cores multiply, for kernels that read them so (Signature.parts).

    1    rounded to tf32
    2    a pair of float16 numbers of 11 bits each, of the weight times a power of two. Three products of these are as
         exact as float32, in half the time of three of tf32, if features are scaled as well: their largest magnitude
         must be known beforehand, so that nothing overflows. It is a top: the bits of a float32, as int32 [1]
    3    three bfloat16 numbers of 8 bits each; six products of these are as exact as float32

A kernel that computes the parts does so for every tile, and writes them back to shared memory, from which tensor cores
read the right side of a product. On an H200, 63,000 outputs of 128 channels: tf32 268 us, 157 with the weight in parts;
float32 456 us, 338 in three parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.lower.emit import APART
from pumice.lower.tile_family import INT32_LIMIT
from pumice.runtime.launch import has_triton, keep_for_graph, kernel, outside_inference_mode, to_device_async

_PARTS = {("tf32", False): 1, ("tf32", True): 1, ("tf32x3", False): 3, ("tf32x3", True): 2}
_DTYPES = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16}
_BLOCK = 4096
_ALIGNED = 64
_FEWEST = 16
"""Weights per program; alignment of weights in the buffer; fewest channels on either side of a product on tensor
cores."""


def number_of_parts(precision: str, tops: bool) -> int:
    """The number of parts for a precision of float32 products, 0 if kernels take weights as they are. tops: those of
    features can be known."""
    return 0 if torch.version.hip else _PARTS.get((precision, tops), 0)


def fits_parts(weight: Tensor) -> bool:
    """True if a weight [C_out, ..., C_in] may be stored in parts."""
    wide = min(weight.shape[0], weight.shape[-1]) >= _FEWEST and not weight.numel() % 4
    aligned = weight.is_contiguous() and not weight.data_ptr() % 16
    return weight.dtype is torch.float32 and wide and aligned and 3 * weight.numel() < INT32_LIMIT


def bytes_of_parts(weight: Tensor, parts: int) -> int:
    """Memory that a weight takes in parts."""
    return weight.numel() * parts * _DTYPES[parts].itemsize if parts else 0


def rounded(x: Tensor) -> Tensor:
    """float32 rounded to tf32; what is not finite, or would no longer be, is left."""
    return torch.where(x.abs() < 3.4e38, ((x.view(torch.int32) + 4096) & -8192).view(torch.float32), x)


def raise_top(top: Tensor, x: Tensor) -> None:
    """Raise a top to the largest finite magnitude of x [N, C]."""
    if has_triton(x):
        x = x if x.stride(1) == 1 else x.contiguous()
        programs, numbers = -(-x.numel() // _BLOCK), (x.shape[0], x.stride(0), x.shape[1])
        kernel("part_kernels.top_of_rows", "lower")(programs, (x, top), numbers, {"BLOCK": _BLOCK})
    elif x.numel():
        sizes = x.detach().abs().nan_to_num(0.0, 0.0)
        torch.maximum(top, sizes.max().view(torch.int32), out=top)


@dataclass(frozen=True, eq=False)
class WeightParts:
    """Weights in `parts` parts. first: the first part of each, in its shape, which the others follow in memory. tops:
    of the weights, then others, which `fill` sets to 0: int32 [., 4], of which the first column counts."""

    parts: int
    first: tuple[Tensor, ...]
    tops: Tensor
    _memory: Tensor
    _blocks: Tensor

    @staticmethod
    def of(weights: Sequence[Tensor], parts: int, others: int = 0) -> WeightParts:
        """Memory for weights that fit (fits_parts), not yet filled. others: the number of other tops."""
        places, size, blocks = list[int](), 0, list[tuple[int, ...]]()
        for number, weight in enumerate(weights):
            count, address = weight.numel(), weight.data_ptr()
            begins = range(0, count, _BLOCK)
            blocks += [(address + 4 * n, size + n, min(_BLOCK, count - n), count, number) for n in begins]
            places.append(size)
            size += -(-parts * count // _ALIGNED) * _ALIGNED
        with outside_inference_mode(), torch.no_grad():
            memory = weights[0].new_empty(size, dtype=_DTYPES[parts])
            tops = memory.new_zeros((len(weights) + others, 4), dtype=torch.int32)
            table = to_device_async(torch.tensor(blocks), memory.device)
            first = [memory[n : n + w.numel()].view(w.shape) for n, w in zip(places, weights, strict=True)]
        return WeightParts(parts, tuple(first), tops, memory, table)

    def top(self, number: int) -> Tensor:
        """A top: of a weight, or behind these of others."""
        return self.tops[number, :1]

    def fill(self, weights: Sequence[Tensor]) -> None:
        """Compute the parts of the weights as they are now, and set other tops to 0."""
        memory, blocks, tops = map(keep_for_graph, (self._memory, self._blocks, self.tops))
        if self.parts == 2:
            tops.zero_()
        if not has_triton(memory):
            return self._fill_torch(weights)
        programs, block = len(blocks), {"BLOCK": _BLOCK}
        if self.parts == 2:
            kernel("part_kernels.tops_of_weights", "lower")(programs, (blocks, tops), (), block)
        constants = {"PARTS": self.parts, "APART": float(APART), **block}
        kernel("part_kernels.split_weights", "lower")(programs, (blocks, tops, memory), (), constants)
        return None

    def _fill_torch(self, weights: Sequence[Tensor]) -> None:
        for number, (weight, first) in enumerate(zip(weights, self.first, strict=True)):
            rest = weight.detach()
            if self.parts == 2:
                top = self.tops[number, 0].copy_(rest.abs().nan_to_num(0.0, 0.0).max().view(torch.int32))
                # The power of two that puts it below 2^15.
                rest = rest * ((268 - (top >> 23).clamp(15, 254)) << 23).view(torch.float32)
            for part in range(self.parts):
                begin = first.storage_offset() + part * first.numel()
                into = self._memory.as_strided(first.shape, first.stride(), begin)
                if self.parts == 3:
                    into.copy_((rest.view(torch.int32) & -65536).view(torch.float32))
                else:
                    into.copy_(rounded(rest) if self.parts == 1 else rest)
                rest = (rest - into.float()) * (APART if self.parts == 2 else 1)
