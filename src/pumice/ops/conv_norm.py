"""A convolution and the batch norm behind it, by the statistics of its results, as one step of autograd.

    h = conv(x, weight)        y = relu((h - mean) / sqrt(variance + eps) * scale + shift + residual)

In place of four steps there is one node, h is all that is kept beside what others keep, and the sum and the ReLU take
no passes of their own. A bias of the convolution, which the norm takes away again, is added to the running mean alone.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Cloud, Geometry, KernelMap, Relation, kernel_map
from pumice.lower import norm as norms
from pumice.lower import plan
from pumice.lower.norm import Norm
from pumice.ops import register
from pumice.ops.conv import autocast, cast_within, check_weight, recorded_call
from pumice.ops.tensor import SparseTensor, on_rows, rows_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Of what is multiplied, and of the result."""


def conv_norm(x: SparseTensor, weight: Tensor, asked: tuple[Relation, Geometry | None], norm: Norm) -> SparseTensor:
    """The layer and what stands behind it, differentiable any number of times.

    weight: [C_out, *kernel, C_in]; its bias is the offset of the norm's statistics. asked: the layer's relation, and
    the coordinates of the outputs where they are named. `joins` says whether it may be called.

    Raises as pumice.ops.conv does.
    """
    relation, target = asked
    check_weight(x, weight, norm.statistics.offset, 1, spatial=relation.custom is None)
    mapped = kernel_map(x.geometry, relation, target)
    feats, weight, _ = autocast(rows_of(x), weight, None, cast_within(rows_of(x), weight))
    if x.geometry.buffered is None:
        return _over(feats, weight, mapped, norm)
    # Behind the cast nobody watches: what is made ready is a kernel's alone.
    with register.as_given((feats,)):
        return _over(feats, weight, mapped, norm)


def joins(x: SparseTensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether nobody but autograd watches, and all dtypes are one."""
    feats = rows_of(x)
    given = (feats, weight) if residual is None else (feats, weight, residual)
    if not register.recorded(given):
        return False
    kind = feats.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else feats.dtype
    alike = dtype == weight.dtype or torch.is_autocast_enabled(kind)
    return dtype in DTYPES and alike and (residual is None or residual.dtype == dtype)


def _over(feats: Tensor, weight: Tensor, mapped: tuple[KernelMap, Geometry], norm: Norm) -> SparseTensor:
    found, outputs = mapped
    flat = _flat(weight.detach())
    told = recorded_call(feats, flat, found, outputs.coords.shape[0]), flat, outputs.cloud, norm
    y = _ConvNorm.apply(told, feats, weight, norm.statistics.offset, norm.weight, norm.bias, norm.residual)
    return on_rows(y, outputs)


class _ConvNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        told: tuple[register.HeldCall, Tensor, Cloud, Norm],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.call, flat, ctx.rows, norm = told
        cast = ctx.call.cast((x, flat))
        with register.as_given((x,)):
            h = ctx.call.result(cast)
            y, normed = norms.normed(h, ctx.rows, norm)
        ctx.statistics, ctx.finish, ctx.tiles = norm.statistics, (normed.relu, normed.adds), plan.kernels.tile_source()
        narrow = None if cast[1] is flat else cast[1]
        kept = h, normed.mean, normed.scale, y if normed.reads_result else None
        ctx.save_for_backward(x, weight, scale, shift, narrow, *kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Gradients are computed in a thread of their own, which sees nothing of the caller's context.
        same = ctx.tiles == plan.kernels.tile_source()
        with nullcontext() if same else plan.kernels.tiles_from(ctx.tiles):
            return None, *(_recorded(ctx, grad) if torch.is_grad_enabled() else _gradients(ctx, grad))


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, scale, shift and residual."""
    x, weight, scale, shift, narrow, h, mean, factor, y = ctx.saved_tensors
    needed = ctx.needs_input_grad[1:]
    told = norms.Normed(mean, factor, scale, shift, *ctx.finish)
    dh, dscale, dshift, dresidual = norms.gradients(grad, (h, y), ctx.rows, told, (any(needed[:3]), *needed[3:]))
    dx = dweight = None
    if dh is not None:
        wanted = [like.dtype if need else None for like, need in zip((x, weight), needed[:2], strict=True)]
        dx, dweight = ctx.call.gradients((x, _flat(weight) if narrow is None else narrow), dh, wanted)
    dbias = _of_bias(dh, ctx) if needed[2] and dh is not None else None
    return dx, None if dweight is None else dweight.view_as(weight), dbias, dscale, dshift, dresidual


def _of_bias(dh: Tensor, ctx: Any) -> Tensor:
    """Its gradient: nothing, where it is taken away again."""
    rows, like = ctx.rows, ctx.statistics.offset
    if rows.exact and rows.capacity > 1:
        return torch.zeros_like(like)
    return (torch.where(rows.live()[:, None], dh, 0).sum(0) * (rows.count < 2)).to(like.dtype)


def _recorded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same, for gradients of gradients: each is recorded in turn."""
    x, weight, scale, shift, _, _, mean, factor, y = ctx.saved_tensors
    needed = ctx.needs_input_grad[1:]
    h = ctx.call(x, _flat(weight))
    again = norms.composed(h, ctx.rows, norms.Normed(mean, factor, scale, shift, *ctx.finish), ctx.statistics, y)
    sought = (*needed[:2], *needed[3:5], needed[2])
    dx, dweight, dscale, dshift, dh = norms.gradients_of(again, grad, (x, weight, scale, shift, h), sought)
    dbias = None if dh is None else _of_bias(dh, ctx)
    return dx, dweight, dbias, dscale, dshift, norms.let_through(grad, y) if needed[5] else None


def _flat(weight: Tensor) -> Tensor:
    """[C_out, K, C_in]: the taps in a row."""
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])
