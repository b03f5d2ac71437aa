"""Row kernels: zeroing the padding rows of a buffer, writing a column slice."""

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


_VALUES = 4096
"""Values per program."""


def write_columns(values: Tensor, wide: Tensor, begin: int) -> None:
    """wide[:, begin : begin + C] = values [N, C] in place; same dtype, column stride 1 in both."""
    if not has_triton(wide):
        return write_columns_torch(values, wide, begin)
    rows, columns = values.shape
    lanes = 1 << max(0, columns - 1).bit_length()
    each = max(1, _VALUES // lanes)
    constants = {"FROM": values.stride(0), "TO": wide.stride(0), "BEGIN": begin, "COLUMNS": columns}
    constants |= {"ROWS": each, "LANES": lanes}
    _columns_kernel()(-(-rows // each), (values, wide), (rows,), constants)


def write_columns_torch(values: Tensor, wide: Tensor, begin: int) -> None:
    """Twin of write_columns in plain torch."""
    wide[:, begin : begin + values.shape[1]].copy_(values)


@lru_cache(maxsize=1)
def _columns_kernel() -> KernelLauncher:
    """Imported lazily: needs Triton."""
    return KernelLauncher(importlib.import_module("pumice.lower.norm_kernels").write_columns)
