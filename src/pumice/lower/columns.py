"""Copy of features into a column slice of a wider buffer, for a concatenation in place."""

from __future__ import annotations

import importlib
from functools import lru_cache

from torch import Tensor

from pumice.runtime.launch import KernelLauncher, has_triton

_VALUES = 4096
"""Values per program."""


def write_columns(values: Tensor, wide: Tensor, begin: int) -> None:
    """wide[:, begin : begin + C] = values [N, C] in place; same dtype, column stride 1 in both."""
    if not has_triton(wide):
        return write_columns_twin(values, wide, begin)
    rows, columns = values.shape
    lanes = 1 << max(0, columns - 1).bit_length()
    each = max(1, _VALUES // lanes)
    constants = {"FROM": values.stride(0), "TO": wide.stride(0), "BEGIN": begin, "COLUMNS": columns}
    constants |= {"ROWS": each, "LANES": lanes}
    _kernel()(-(-rows // each), (values, wide), (rows,), constants)


def write_columns_twin(values: Tensor, wide: Tensor, begin: int) -> None:
    """Twin of write_columns in plain torch."""
    wide[:, begin : begin + values.shape[1]].copy_(values)


@lru_cache(maxsize=1)
def _kernel() -> KernelLauncher:
    """Imported lazily: needs Triton."""
    return KernelLauncher(importlib.import_module("pumice.lower.norm_kernels").put_columns)
