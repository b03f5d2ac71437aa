"""Weights of other libraries in the layout of pumice, [C_out, *kernel, C_in], and back.

Where each layout comes from: spconv 2.3.8, FILTER_HWIO; torchsparse 2.1, examples/converter.py and F.conv3d;
MinkowskiEngine 0.5.4, kernel_region.hpp; FlexGEMM, ops/spconv.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from pumice.errors import ShapeError


def from_taps(kernel: Tensor, size: Sequence[int], first_fastest: bool) -> Tensor:
    """A view [C_out, *size, C_in] of a kernel [K, C_in, C_out] (or [C_in, C_out] if K = 1), as of torchsparse and
    MinkowskiEngine. first_fastest: whether the first spatial axis varies fastest along K, else the last.
    Raises ShapeError if K is not the product of `size`."""
    taps = 1 if kernel.ndim == 2 else kernel.shape[0]
    if kernel.ndim not in (2, 3) or taps != math.prod(size):
        raise ShapeError(f"a kernel of size {tuple(size)} is [{math.prod(size)}, C_in, C_out], found {[*kernel.shape]}")
    order = range(len(size), 0, -1) if first_fastest else range(1, len(size) + 1)
    spread = kernel.reshape(*(reversed(size) if first_fastest else size), *kernel.shape[-2:])
    return spread.permute(-1, *(axis - 1 for axis in order), -2)


def to_taps(weight: Tensor, first_fastest: bool) -> Tensor:
    """The inverse of `from_taps`: [K, C_in, C_out] of a weight [C_out, *size, C_in]."""
    dim = weight.ndim - 2
    axes = range(dim, 0, -1) if first_fastest else range(1, dim + 1)
    return weight.permute(*axes, -1, 0).reshape(-1, weight.shape[-1], weight.shape[0])
