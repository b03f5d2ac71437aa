"""Weights of other libraries in the layout of pumice, [C_out, *kernel, C_in], and back.

Where each layout comes from: spconv 2.3.8, FILTER_HWIO; torchsparse 2.1, examples/converter.py and F.conv3d;
MinkowskiEngine 0.5.4, kernel_region.hpp; FlexGEMM, ops/spconv.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from pumice.errors import OptionError, ShapeError


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


LAYOUTS: Mapping[str, int] = {"KRSC": 0, "RSKC": -2, "RSCK": -1}
"""spconv's layouts, by the letters for C_out, kernel axes, C_in; and the place of C_out in each."""


def from_layout(weight: Tensor, layout: str, strided: bool = False) -> Tensor:
    """[C_out, *kernel, C_in], contiguous, of a weight in one of LAYOUTS.

    spconv 2 (KRSC, RSKC) multiplies by weights of kernel size 1, unless strided, as if their memory were [C_in, C_out]
    (spconv 2.3.8, pytorch/conv.py): these are transposed. Raises OptionError for another layout."""
    OptionError.check("layout", layout, LAYOUTS)
    moved = weight.movedim(LAYOUTS[layout], 0)
    if layout == "RSCK" or strided or math.prod(moved.shape[1:-1]) > 1:
        return moved.contiguous()
    outputs, inputs = moved.shape[0], moved.shape[-1]
    return weight.reshape(inputs, outputs).t().reshape(moved.shape).contiguous()
