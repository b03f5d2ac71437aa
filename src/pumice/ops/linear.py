"""Linear layers with a fused epilogue."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pumice.errors import DeviceError, DtypeError, ShapeError
from pumice.lower import direct, plan
from pumice.lower.epilogue import Epilogue, EpilogueSignature, check_epilogue
from pumice.ops import autograd
from pumice.ops.conv import autocast_dtype
from pumice.runtime.cache import BoundedCache

_LINEAR, _NAMES = "y[n,m] = x[n,c] * w[m,c]", "x|w"
NO_MAP = direct.Held.of((), direct.Pattern((), ()))
_BOUND_CALLS: BoundedCache[direct.Direct] = BoundedCache(1024)
"""Launch cache."""


def linear_features(x: Tensor, weight: Tensor, epilogue: Epilogue) -> Tensor:
    """y[n] = epilogue(x[n] @ weight.T): x [N, C_in], weight [C_out, C_in] -> [N, C_out], not differentiable.
    Raises ShapeError, DtypeError and DeviceError."""
    finish, tensors = epilogue.signature, (x, weight, *epilogue.operands.values())
    key, counting = key_of(tensors, finish), direct.counting(finish)
    # The key does not include row counts.
    if x.ndim == 2 and direct.residual_fits(tensors, finish, (x.shape[0], weight.shape[0])):
        call = cached_call(key, direct.counted(tensors, counting), weight.shape[0])
        if call is not None and (y := call(tensors)) is not None:
            return y
    _check(x, weight)
    shape = x.shape[0], weight.shape[0]
    check_epilogue(epilogue, shape, x.device)
    call_plan = plan.bound_plan((x, weight), plan.PlanRequest(_NAMES, _LINEAR, shape, (1,), (0, 1), finish=finish))
    y = plan.execute_plan(call_plan, (x, weight), epilogue)
    call = direct.Call(tensors, counting, shape, key)
    call = call.leave(call_plan, NO_MAP, tensors, (0, 1), finish)
    if call is not None:
        _BOUND_CALLS.keep((x.shape[0], key), call)
    return y


def compilation(x: Tensor, weight: Tensor, epilogue: Epilogue) -> Callable[[], object] | None:
    """What compiles the kernel of linear_features on tensors like these, without running it; None where it is known, or
    the call is not one kernel."""
    finish, tensors, shape = epilogue.signature, (x, weight, *epilogue.operands.values()), (x.shape[0], weight.shape[0])
    ready = plan.bound_plan((x, weight), plan.PlanRequest(_NAMES, _LINEAR, shape, (1,), (0, 1), finish=finish))
    call = direct.Call(tensors, direct.counting(finish), shape, key_of(tensors, finish))
    return call.ahead(ready, NO_MAP, tensors, (0, 1), finish)


def key_of(tensors: Sequence[Tensor], finish: EpilogueSignature) -> Hashable:
    """Cache key of a call on (features, weight, operands of the epilogue...)."""
    return direct.told(tensors, direct.counting(finish), "linear", finish)


def cached_call(key: Hashable, rows: Sequence[tuple[int, int]], columns: int) -> direct.Direct | None:
    """A cached call of as many rows, or instantiated from a template, or None. key: from
    `key_of`; rows: from direct.counted, the features first; columns: of the result."""
    count, _ = rows[0]
    call = _BOUND_CALLS.get((count, key))
    if call is None:
        call = direct.cast(key, NO_MAP, rows, (count, columns))
        return None if call is None else _BOUND_CALLS.keep((count, key), call)
    return call


def fits_one_kernel(*tensors: Tensor) -> bool:
    """True if one kernel can take these: a plain call on a GPU."""
    return tensors[0].is_cuda and autograd.is_plain_call(tensors)


def differentiable_features(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """y[n] = x[n] @ weight.T + bias in half precision (or under autocast to it), differentiable any number of times:
    x [N, C_in], weight [C_out, C_in], bias [C_out] -> [N, C_out]. Gradients of weights that autocast casts are not
    rounded to half precision. None if torch should compute it: other dtypes, CPU, deterministic algorithms, anything
    active besides autograd, or operands that do not match."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if not direct.starts_kernels(x) or plan.deterministic() or not autograd.only_reverse_mode_active(given):
        return None
    cast = autocast_dtype(x)
    dtype = x.dtype if cast is None else cast
    kinds = (dtype,) if cast is None else (dtype, torch.float32)
    if dtype not in HALF or any([t.dtype not in kinds or t.device != x.device for t in given]):
        return None
    # An empty product has no kernel.
    if x.ndim != 2 or not x.numel() or weight.shape != (weight.shape[0], x.shape[1]):
        return None
    return _LinearFunction.apply(dtype, x, weight, bias)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        feats, narrow = x.to(dtype), weight.to(dtype)
        to_x, to_weight, _ = ctx.needs_input_grad[1:]
        # Save only what gradients read: the rest may be written in place.
        held = x if to_weight else None, weight if to_x else None, narrow if to_x and narrow is not weight else None
        ctx.save_for_backward(*held)
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (x, weight, bias)]
        ctx.dtype, ctx.tiles = dtype, plan.kernels.tuning_mode()
        with autograd.autocast_disabled((x,)):
            return linear_features(feats, narrow, Epilogue(shift=bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = ctx.needs_input_grad[1:]
        wanted = [like[1] if need else None for need, like in zip(needed, ctx.like, strict=True)]
        # Backward uses the dtypes of the forward pass, even when called within autocast.
        with autograd.autocast_disabled((grad,)), plan.kernels.tiles_of(ctx.tiles):
            dbias = grad.sum(0, dtype=torch.float32).to(wanted[2]) if needed[2] else None
            return None, *_gradients(ctx, grad, wanted[:2]), dbias


def _gradients(ctx: Any, grad: Tensor, wanted: Sequence[torch.dtype | None]) -> Sequence[Tensor | None]:
    """The gradients of x and weight in the wanted dtypes, None where the dtype is None."""
    x, weight, narrow = ctx.saved_tensors
    if torch.is_grad_enabled() or _is_batched(grad):
        # Double backward: torch records these products.
        dx = None if wanted[0] is None else (grad @ weight.to(ctx.dtype)).to(wanted[0])
        return dx, None if wanted[1] is None else (grad.t() @ x.to(ctx.dtype)).to(wanted[1])
    # Tensors that were not saved are not read: placeholders of their shapes.
    (of_x, _), (of_weight, _), nothing = *ctx.like[:2], grad.new_empty(1)
    feats = nothing.expand(of_x) if wanted[1] is None else x.to(ctx.dtype)
    own = nothing.expand(of_weight) if wanted[0] is None else weight if narrow is None else narrow
    return _call(feats, own).gradients((feats, own), grad, wanted)


_is_batched = attrgetter("_functorch.is_legacy_batchedtensor")(torch._C)
"""True for a batched tensor of torch.autograd.grad(is_grads_batched=True), which kernels do not support."""


def _call(x: Tensor, weight: Tensor) -> autograd.DifferentiableCall:
    """The cached differentiable call for as many rows, without a map."""
    rows, outputs = x.shape[0], weight.shape[0]
    key = rows, weight.shape, x.dtype, x.device
    known = _DIFFERENTIABLE_CALLS.get(key)
    if known is None:
        ask = plan.PlanRequest(_NAMES, _LINEAR, (rows, outputs), (1,), (0, 1), "triton")
        nothing = direct.Held.of((), direct.Pattern((str(x.device),), ()))
        known = _DIFFERENTIABLE_CALLS.keep(
            key, autograd.DifferentiableCall((None, None), ask, ((x, weight), x.dtype), nothing)
        )
    return known


HALF = (torch.float16, torch.bfloat16)
_DIFFERENTIABLE_CALLS: BoundedCache[autograd.DifferentiableCall] = BoundedCache(256)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise DtypeError(f"x and weight are of one floating point dtype, found {x.dtype} and {weight.dtype}")
    if x.device != weight.device:
        raise DeviceError(f"weight is on {weight.device}, x is on {x.device}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x is [N, C_in] and weight [C_out, C_in], found {list(x.shape)} and {list(weight.shape)}")
