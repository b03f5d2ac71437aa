"""Quantization to 8 bits with scales, for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from pumice.coords.box import dtype_of
from pumice.errors import DtypeError, OptionError

_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}


def quantize(x: Tensor, dtype: torch.dtype = torch.int8, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize x: (values, scale) with  x = values * scale  up to rounding.

        scale[n] = max |x[n, ...]| / 127  (float8_e4m3fn: / 448),   values = x / scale, int8 to the nearest even

    Parameters
    ----------
    x: finite floating point within the range of float32, any shape; not differentiable.
    dtype: torch.int8 or torch.float8_e4m3fn.
    dim: axis with one scale per index (weights: 0, the output channels); None: one scale for the tensor.

    Returns values of x's shape in `dtype`, and scale float32, [x.shape[dim]] or []. The scale of zeros is 1.

    An 8-bit convolution takes the scales in its epilogue, and the bias of the layer as `shift` (conv adds `bias`
    before the scale, in units of the integer sums):

        x8, sx = quantize(x.feats)
        w8, sw = quantize(weight, dim=0)
        y = conv(x.replace(x8), w8, epilogue=Epilogue(scale=sx * sw, shift=bias, dtype=torch.float16))

    Raises DtypeError for other dtypes, OptionError for an axis that x does not have.

    Symmetric, per channel: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", CVPR 2018, sec. 2; e4m3: Micikevicius et al., "FP8 Formats for Deep Learning",
    2022, sec. 3.
    """
    if dtype not in _MOST:
        raise DtypeError(f"values are quantized to {' or '.join(map(str, _MOST))}, found {dtype}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise DtypeError(f"x must be a tensor of floating point, found {dtype_of(x)}")
    if dim is not None and not -x.ndim <= dim < x.ndim:
        raise OptionError(f"dim is an axis of x, which has {x.ndim}; found {dim}")
    wide = x.detach().to(torch.float32)
    most = _largest(wide, dim)
    scale = torch.where(most == 0, 1.0, (most / _MOST[dtype]).clamp(min=torch.finfo(torch.float32).tiny))
    shape = [1] * x.ndim
    if dim is not None:
        shape[dim] = -1
    values = (wide / scale.view(shape)).clamp(-_MOST[dtype], _MOST[dtype])
    return (values.round() if dtype == torch.int8 else values).to(dtype), scale


def _largest(x: Tensor, dim: int | None) -> Tensor:
    """Largest magnitude over the tensor, or per index of an axis."""
    others = [axis for axis in range(x.ndim) if dim is None or axis != dim % x.ndim]
    if not x.numel():
        return x.new_zeros([] if dim is None else [x.shape[dim]])
    return x.abs().amax(others) if others else x.abs()
