"""Max pooling over a kernel map, and zeroing the padding rows of a buffer.

    y[o, c] = max over kernel offsets k with an input of x[rows[o, k], c]          0 if there is no input

The gradient goes to the first kernel offset that attains the maximum. NaN propagates, the last of several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.runtime.launch import has_triton, kernel

_ENTRIES = 512
"""Result elements per program."""
_CHANNELS = 64
"""Maximum channels per program."""
_BLOCK = 4096
"""Elements per program of zero_padding_rows; nearly all programs have nothing to zero and exit."""


def max_pool_rows(x: Tensor, found: KernelMap) -> Tensor:
    """Max pooling: x [num_inputs, C] -> y [num_outputs, C] in x's dtype; differentiable any number of times."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _MaxPool.apply(x, found)
    return forward(x.contiguous(), found.rows(), False)[0]


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: KernelMap) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, taps = forward(x.contiguous(), found.rows(), True)
        ctx.found = found
        ctx.save_for_backward(taps)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (taps,), found = ctx.saved_tensors, ctx.found
        if torch.is_grad_enabled() and grad.requires_grad:
            return _spread(grad, found.rows(), taps, found.num_inputs), None
        return gradient(grad.contiguous(), found, taps), None


def forward(x: Tensor, rows: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
    """(y; kernel offset of each maximum, -1 if none, int8 or int16, not computed by kernels unless `kept`)."""
    if not _by_kernels(x):
        return forward_torch(x, rows)
    (outputs, volume), channels = rows.shape, x.shape[1]
    y = x.new_empty(outputs, channels)
    taps = torch.empty((outputs, channels) if kept else (1,), dtype=_of_taps(volume), device=x.device)
    shape = _shape(channels, volume)
    run = kernel("row_kernels.max_pool", "lower")
    run(_programs(outputs, shape), (x, rows, y, taps), (outputs,), shape | {"KEPT": kept})
    return y, taps


def forward_torch(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """As forward, in plain torch."""
    top = x.new_full((rows.shape[0], x.shape[1]), -torch.inf)
    first = torch.full(top.shape, -1, dtype=_of_taps(rows.shape[1]), device=x.device)
    for tap, met in enumerate(rows.unbind(1)):
        values, there = x[met.clamp(min=0)], (met >= 0)[:, None]
        better = there & ((values > top) | values.isnan() | (first < 0))
        top, first = torch.where(better, values, top), torch.where(better, tap, first).to(first.dtype)
    return torch.where(first >= 0, top, 0), first


def gradient(grad: Tensor, found: KernelMap, taps: Tensor) -> Tensor:
    """The gradient of x in grad's dtype, summed in at least float32."""
    if not _by_kernels(grad):
        return _spread(grad, found.rows(), taps, found.num_inputs)
    rows, channels = found.transpose().rows(), grad.shape[1]
    dx = grad.new_empty(found.num_inputs, channels)
    shape = _shape(channels, rows.shape[1])
    run = kernel("row_kernels.max_pool_gradient", "lower")
    run(_programs(len(dx), shape), (grad, rows, taps, dx), (len(dx),), shape)
    return dx


def _spread(grad: Tensor, rows: Tensor, taps: Tensor, inputs: int) -> Tensor:
    """As gradient, in plain torch; differentiable in grad."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    source = rows.gather(1, taps.long().clamp(min=0)).long().clamp(min=0)
    channels = torch.arange(grad.shape[1], device=grad.device).expand_as(source)
    found = wide.new_zeros(inputs, grad.shape[1])
    return found.index_put((source, channels), torch.where(taps >= 0, wide, 0), accumulate=True).to(grad.dtype)


def _by_kernels(x: Tensor) -> bool:
    return x.dtype != torch.float64 and has_triton(x)


def _of_taps(volume: int) -> torch.dtype:
    return torch.int8 if volume <= 127 else torch.int16


def _shape(channels: int, volume: int) -> dict[str, int]:
    lanes = min(_CHANNELS, max(1, 1 << (channels - 1).bit_length()))
    return {"C": channels, "VOLUME": volume, "ROWS": _ENTRIES // lanes, "LANES": lanes}


def _programs(rows: int, shape: dict[str, int]) -> int:
    return -(-rows // shape["ROWS"]) * -(-shape["C"] // shape["LANES"])


# Padding rows
def zero_padding_rows(values: Tensor, count: Tensor) -> None:
    """values[count:] = 0 in place, invisible to autograd; values [N, C] contiguous, count int32 [1] on the device."""
    if not has_triton(values):
        return zero_padding_rows_torch(values, count)
    total = values.numel()
    run = kernel("row_kernels.zero_padding_rows", "lower")
    run(-(-total // _BLOCK), (values, count), (total, values.shape[1]), {"BLOCK": _BLOCK})


def zero_padding_rows_torch(values: Tensor, count: Tensor) -> None:
    """As zero_padding_rows, in plain torch."""
    # .data instead of detach(): the version counter of saved tensors must not change.
    values.data.masked_fill_(torch.arange(values.shape[0], device=values.device)[:, None] >= count, 0)
