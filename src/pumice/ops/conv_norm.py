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

from pumice.coords import CoordBuffer, Geometry, Relation
from pumice.lower import norm as norms
from pumice.lower import plan
from pumice.lower.norm import Norm
from pumice.ops import autograd
from pumice.ops.conv import autocast_dtype, cached_call, check_layer, differentiable_call
from pumice.ops.prepare import layer_map
from pumice.ops.tensor import SparseTensor, from_raw_feats, raw_feats, unchecked_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Of what is multiplied, and of the result."""


def conv_norm(
    x: SparseTensor, weight: Tensor, asked: tuple[Relation, Geometry | None], norm: Norm
) -> SparseTensor | None:
    """The layer and what stands behind it, differentiable any number of times.

    weight: [C_out, *kernel, C_in]; its bias is the offset of the norm's statistics. asked: the layer's relation, and
    the coordinates of the outputs where they are named. None where somebody beside autograd watches, or dtypes differ.

    Raises ShapeError and DeviceError for what does not fit, and what pumice.ops.conv raises.
    """
    given = (raw_feats(x), weight) if norm.residual is None else (raw_feats(x), weight, norm.residual)
    dtype = _dtype(given)
    if dtype is None:
        return None
    relation, target = asked
    mapped = x.geometry.maps.get((relation, None)) if target is None else None
    if mapped is None or not _known(weight, norm, relation):
        check_layer(x, weight, norm.statistics.offset, 1, relation)
    if mapped is None:
        mapped = layer_map(x.geometry, relation, target)
    feats = given[0] if given[0].dtype == dtype else given[0].to(dtype)
    # Autocast's cast of a weight that is trained is the call's own: its gradient is in the weight's dtype.
    weight = weight if weight.dtype == dtype or weight.requires_grad else weight.to(dtype)
    flat = _flat(weight.detach())
    found, outputs = mapped[0], x.geometry if mapped[1] is None else mapped[1]
    call = cached_call(feats, flat, found, outputs.coords.shape[0])
    if call is not None and x.geometry.buffered is None:
        return unchecked_tensor(_ConvNorm.of((call, flat, outputs.cloud, norm), feats, weight), outputs)
    check_layer(x, weight, norm.statistics.offset, 1, relation)
    # What is made ready is a kernel's alone.
    with autograd.autocast_disabled((feats,)):
        call = differentiable_call(feats, flat, found, outputs.coords.shape[0])
        return from_raw_feats(_ConvNorm.of((call, flat, outputs.cloud, norm), feats, weight), outputs)


def _dtype(given: tuple[Tensor, ...]) -> torch.dtype | None:
    """In which the operands, features, weight and residual, are multiplied and added; None where that is another
    call's matter."""
    if not autograd.only_reverse_mode_active(given):
        return None
    feats, weight, *more = given
    cast = autocast_dtype(feats)
    dtype = feats.dtype if cast is None else cast
    narrowed = cast is not None and weight.dtype in DTYPES and weight.dtype != torch.float64
    fits = dtype in DTYPES and (weight.dtype == dtype or narrowed)
    return dtype if fits and all([x.dtype == dtype for x in more]) else None


def _known(weight: Tensor, norm: Norm, relation: Relation) -> bool:
    """Whether the axes of the weight, and the bias, are such as calls are kept for: the rest is in their keys."""
    shape, bias = weight.shape, norm.statistics.offset
    axes = relation.dim + 2 if relation.custom is None else 3
    return len(shape) == axes and (bias is None or bias.shape == shape[:1])


class _ConvNorm(torch.autograd.Function):
    @staticmethod
    def of(told: tuple[autograd.DifferentiableCall, Tensor, CoordBuffer, Norm], x: Tensor, weight: Tensor) -> Tensor:
        """told: the call, the weight [C_out, K, C_in], which rows live, and the norm."""
        norm = told[-1]
        return _ConvNorm.apply(told, x, weight, norm.statistics.offset, norm.weight, norm.bias, norm.residual)

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        told: tuple[autograd.DifferentiableCall, Tensor, CoordBuffer, Norm],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        ctx.call, flat, ctx.rows, norm = told
        cast = ctx.call.instantiate((x, flat))
        h = ctx.call.result(cast)
        # Kernels choose their dtypes themselves; of torch's operators autocast would.
        with nullcontext() if x.is_cuda else autograd.autocast_disabled((x,)):
            y, normed = norms.normed(h, ctx.rows, norm)
        ctx.statistics, ctx.finish, ctx.tiles = (
            norm.statistics,
            (normed.relu, normed.has_residual),
            plan.kernels.tuning_mode(),
        )
        narrow = None if cast[1] is flat else cast[1]
        ctx.save_for_backward(x, weight, scale, shift, narrow, h, normed.pair, y if normed.reads_result else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Whoever calls backward within autocast has every dtype as it was in the forward pass.
        with autograd.autocast_disabled((grad,)), plan.kernels.tiles_of(ctx.tiles):
            return None, *(_recorded(ctx, grad) if torch.is_grad_enabled() else _gradients(ctx, grad))


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias, scale, shift and residual."""
    x, weight, scale, shift, narrow, h, pair, y = ctx.saved_tensors
    needed = ctx.needs_input_grad[1:]
    told = norms.NormState(pair, scale, shift, *ctx.finish)
    within = needed[0] or needed[1] or needed[2]
    dh, dscale, dshift, dresidual = norms.gradients(grad, (h, y), ctx.rows, told, (within, *needed[3:]))
    dx = dweight = None
    if dh is not None:
        wanted = (x.dtype if needed[0] else None, weight.dtype if needed[1] else None)
        dx, dweight = ctx.call.gradients((x, _flat(weight) if narrow is None else narrow), dh, wanted)
    dbias = _of_bias(dh, ctx) if needed[2] and dh is not None else None
    return dx, None if dweight is None else dweight.view_as(weight), dbias, dscale, dshift, dresidual


def _of_bias(dh: Tensor, ctx: Any) -> Tensor:
    """Its gradient: nothing, where it is taken away again."""
    rows, like = ctx.rows, ctx.statistics.offset
    if _goes(rows):
        return torch.zeros_like(like)
    return (torch.where(rows.valid_mask()[:, None], dh, 0).sum(0) * (rows.count < 2)).to(like.dtype)


def _goes(rows: CoordBuffer) -> bool:
    """Whether a bias is known to be taken away again."""
    return rows.exact and rows.capacity > 1


def _recorded(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same, for gradients of gradients: each is recorded in turn."""
    x, weight, scale, shift, _, _, pair, y = ctx.saved_tensors
    needed = ctx.needs_input_grad[1:]
    h, bias = ctx.call(x, _flat(weight)), ctx.statistics.offset
    counts = needed[2] and not _goes(ctx.rows)
    if counts:
        # Nothing is added: what it is the gradient of was taken from the running mean.
        h = h + torch.where(ctx.rows.count < 2, bias - bias.detach(), 0).to(h.dtype)
    again = norms.recompute_with_autograd(
        h, ctx.rows, norms.NormState(pair, scale, shift, *ctx.finish), ctx.statistics, y
    )
    sought = (*needed[:2], counts, *needed[3:5])
    dx, dweight, dbias, dscale, dshift = norms.gradients_of(again, grad, (x, weight, bias, scale, shift), sought)
    dbias = torch.zeros_like(bias) if needed[2] and not counts else dbias
    return dx, dweight, dbias, dscale, dshift, norms.relu_grad(grad, y) if needed[5] else None


def _flat(weight: Tensor) -> Tensor:
    """[C_out, K, C_in]: the taps in a row."""
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])
