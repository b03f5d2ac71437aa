"""Rows of a buffer that do not live, cleared."""

from __future__ import annotations

import importlib
from functools import lru_cache

import torch
from torch import Tensor

from pumice.runtime.launch import KernelLauncher, has_triton

_BLOCK = 4096
"""Values of one program: nearly all have nothing to do, and end."""


def zero_padding_rows(values: Tensor, count: Tensor) -> None:
    """0 in the rows of values [N, C] behind the first `count` (int32 [1]): in place, and no gradient hears of it.

    Raises nothing: values are contiguous.
    """
    if not has_triton(values):
        return zero_padding_rows_twin(values, count)
    total = values.numel()
    _kernel()(-(-total // _BLOCK), (values, count), (total, values.shape[1]), {"BLOCK": _BLOCK})


def zero_padding_rows_twin(values: Tensor, count: Tensor) -> None:
    """As clear_rows, in plain torch."""
    # Not detach(): what others have saved of the tensor is no other for this.
    values.data.masked_fill_(torch.arange(values.shape[0], device=values.device)[:, None] >= count, 0)


@lru_cache(maxsize=1)
def _kernel() -> KernelLauncher:
    """Its file is imported here first: it needs Triton."""
    return KernelLauncher(importlib.import_module("pumice.lower.norm_kernels").clear_rows)
