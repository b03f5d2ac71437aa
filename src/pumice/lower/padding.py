"""Zeroing the padding rows of a buffer."""

from __future__ import annotations

import importlib
from functools import lru_cache

import torch
from torch import Tensor

from pumice.runtime.launch import KernelLauncher, has_triton

_BLOCK = 4096
"""Values per program; nearly all programs have nothing to do and exit."""


def zero_padding_rows(values: Tensor, count: Tensor) -> None:
    """values[count:] = 0 in place, invisible to autograd; values [N, C] contiguous, count int32 [1] on the device."""
    if not has_triton(values):
        return zero_padding_rows_torch(values, count)
    total = values.numel()
    _kernel()(-(-total // _BLOCK), (values, count), (total, values.shape[1]), {"BLOCK": _BLOCK})


def zero_padding_rows_torch(values: Tensor, count: Tensor) -> None:
    """Twin of zero_padding_rows in plain torch."""
    # .data instead of detach(): the version counter of saved tensors must not change.
    values.data.masked_fill_(torch.arange(values.shape[0], device=values.device)[:, None] >= count, 0)


@lru_cache(maxsize=1)
def _kernel() -> KernelLauncher:
    """Imported lazily: needs Triton."""
    return KernelLauncher(importlib.import_module("pumice.lower.norm_kernels").zero_padding_rows)
