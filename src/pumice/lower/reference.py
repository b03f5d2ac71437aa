"""Reference of convolution and its gradients: a loop over kernel offsets in plain torch.

    forward          out[o, g, n]  += x[i, g, c] * w[k, g, c, n]
    input gradient   the forward loop with inputs and outputs exchanged and w transposed
    weight gradient  dw[k, g, c, n] += x[i, g, c] * dout[o, g, n]            for every pair (o, k, i)

Any device, any floating dtype. Half precisions are accumulated in float32. Within one kernel offset an output occurs at
most once, so sums have a fixed order and the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from pumice.coords import Pairs


def forward(
    x: Float[Tensor, "inputs c_in"], weight: Float[Tensor, "c_out k c_group"], pairs: Pairs, rows: int, groups: int
) -> Float[Tensor, "{rows} c_out"]:
    """x [N_in, G*C], weight [G*N, K, C] -> out [rows, G*N], in x's dtype."""
    out = x.new_zeros((rows, weight.shape[0]), dtype=accumulator(x.dtype))
    taps = grouped(weight, groups)
    for tap, inputs, outputs in meetings(pairs):
        out.index_add_(0, outputs, products(x[inputs], taps[tap], out.dtype))
    return out.to(x.dtype)


def weight_gradient(
    x: Float[Tensor, "inputs c_in"], grad: Float[Tensor, "outputs c_out"], pairs: Pairs, groups: int
) -> Float[Tensor, "c_out k c_group"]:
    """x [N_in, G*C], grad [N_out, G*N] -> dw [G*N, K, C], in x's dtype."""
    channels, width = x.shape[1] // groups, grad.shape[1] // groups
    out = x.new_zeros((len(pairs.sizes), groups, channels, width), dtype=accumulator(x.dtype))
    for tap, inputs, outputs in meetings(pairs):
        left = x[inputs].view(-1, groups, channels).permute(1, 2, 0)
        right = grad[outputs].view(-1, groups, width).permute(1, 0, 2)
        out[tap] = torch.bmm(left.to(out.dtype), right.to(out.dtype))
    return out.permute(1, 3, 0, 2).reshape(grad.shape[1], -1, channels).to(x.dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The accumulator dtype: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def grouped(weight: Float[Tensor, "c_out k c_group"], groups: int) -> Float[Tensor, "k {groups} c_group n"]:
    """The view [K, G, C, N] of a weight [G*N, K, C]."""
    return weight.view(groups, -1, *weight.shape[1:]).permute(2, 0, 3, 1)


def transposed(weight: Float[Tensor, "c_out k c_group"], groups: int) -> Float[Tensor, "c_in k n"]:
    """The weight [G*C, K, N] of the input gradient from the forward weight [G*N, K, C]."""
    if groups == 1:
        return weight.transpose(0, 2)
    return grouped(weight, groups).permute(1, 2, 0, 3).flatten(0, 1)


def meetings(pairs: Pairs) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(kernel offset, inputs, outputs) of every kernel offset with pairs."""
    start = 0
    for tap, size in enumerate(pairs.sizes.tolist()):
        if size:
            yield tap, pairs.inputs[start : start + size], pairs.outputs[start : start + size]
        start += size


def products(
    x: Float[Tensor, "pairs c_in"], weight: Float[Tensor, "g c n"], dtype: torch.dtype
) -> Float[Tensor, "pairs c_out"]:
    """x [P, G*C] times weight [G, C, N] -> [P, G*N] in `dtype`."""
    groups, channels, width = weight.shape
    if groups == 1:
        return _matmul(x, weight[0], dtype)
    if channels == 1:
        return (x[:, :, None].to(dtype) * weight[:, 0].to(dtype)).flatten(1)
    left = x.view(-1, groups, channels).transpose(0, 1).to(dtype)
    return torch.bmm(left, weight.to(dtype)).transpose(0, 1).reshape(-1, groups * width)


def _matmul(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype:
        return x @ weight
    if x.is_cuda:
        return torch.mm(x, weight, out_dtype=dtype)
    return x.to(dtype) @ weight.to(dtype)
