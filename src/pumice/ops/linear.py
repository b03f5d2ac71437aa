"""Linear layers, with a fused epilogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pumice.errors import DeviceError, DtypeError, ShapeError
from pumice.lower import plan
from pumice.lower.call import keep_call, product_call, run_product
from pumice.lower.epilogue import Epilogue, check_epilogue
from pumice.lower.maps import NO_ARRAYS, NoMap, bound_map, no_map
from pumice.ops import autograd
from pumice.ops.ahead import Calls, Compilation, compilations_of, compile_layers
from pumice.ops.conv import autocast_dtype
from pumice.ops.tensor import SparseTensor, one_node, raw_feats, row_by_row

LINEAR, _NAMES = "y[n,m] = x[n,c] * w[m,c]", "x|w"


@one_node
def linear(x: SparseTensor, weight: Tensor, bias: Tensor | None = None) -> SparseTensor:
    """y[n] = x[n] @ weight.T + bias: x N voxels x C_in, weight [C_out, C_in], bias [C_out] -> N voxels x C_out.

    Raises DtypeError if x is not a SparseTensor, ShapeError for another number of channels, and what torch raises.
    """
    feats, geometry = raw_feats(x), x.geometry
    if feats.shape[1] != weight.shape[1]:
        raise ShapeError(f"Linear takes {weight.shape[1]} channels, x has {feats.shape[1]}")
    # cuBLAS is slow for 16-bit rows that are not a multiple of 16 bytes (45 us on an H200 for 173,000 rows of 96 to
    # 19 channels), and selects a kernel for each new number of rows (660 us of host time).
    odd = weight.shape[1] % 8 or weight.shape[0] % 8
    own = odd or geometry.buffered is None
    if own and not geometry.trains and (y := _by_kernel(x, weight, bias)) is not None:
        return x.replace(y)
    # Compiled code uses torch's operator, for any number of rows.
    own = own and not torch.compiler.is_compiling()

    def product(feats: Tensor) -> Tensor:
        y = differentiable_features(feats, weight, bias) if own else None
        return _by_torch(feats, weight, bias) if y is None else y

    return row_by_row(x, product)


_FEW = 16
"""Rows for each thread below which libraries of a CPU multiply by other kernels, with other roundings."""


def _by_torch(feats: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear map. On a CPU few rows are padded: the bits of a row do not depend on their number."""
    rows = feats.shape[0]
    if feats.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < rows < _FEW * torch.get_num_threads():
        return functional.linear(feats, weight, bias)
    missing = _FEW * torch.get_num_threads() - rows
    return functional.linear(functional.pad(feats, (0, 0, 0, missing)), weight, bias)[:rows]


def _by_kernel(x: SparseTensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The result of our kernel for 16-bit plain calls on a GPU, without gradients; else None."""
    feats = x.feats
    tensors = (feats, weight) if bias is None else (feats, weight, bias)
    if feats.dtype not in HALF or any(t.dtype != feats.dtype for t in tensors):
        return None
    return linear_features(feats, weight, Epilogue(shift=bias)) if fits_one_kernel(*tensors) else None


def linear_features(x: Tensor, weight: Tensor, epilogue: Epilogue, training: bool = False) -> Tensor:
    """y[n] = epilogue(x[n] @ weight.T): x [N, C_in], weight [C_out, C_in] -> [N, C_out], not differentiable. training:
    True if autograd records calls of the network.
    Raises ShapeError, DtypeError and DeviceError."""
    finish, tensors = epilogue.signature, (x, weight, *epilogue.operands.values())
    if x.ndim == 2 and (y := run_product(tensors, no_map(x.shape[0]), finish)) is not None:
        return y
    compile_layers(Calls(x, x.shape[0], training))
    _check(x, weight)
    shape = x.shape[0], weight.shape[0]
    check_epilogue(epilogue, shape, x.device)
    call_plan = plan.bound_plan((x, weight), plan.PlanRequest(_NAMES, LINEAR, shape, (1,), (0, 1), finish=finish))
    y, found = plan.execute_plan(call_plan, (x, weight), epilogue), no_map(x.shape[0])
    call = product_call(tensors, finish, bound_map(found), x.shape[0])
    bound = call_plan.keep_call(call, tensors, (0, 1), finish)
    if bound is not None:
        keep_call(found, call.signature, bound)
    return y


def compilation(x: Tensor, weight: Tensor, epilogue: Epilogue) -> Callable[[], object] | None:
    """Task that compiles the kernel of linear_features on such tensors, without running it; None if a template is known
    or none can be made."""
    finish, tensors, shape = epilogue.signature, (x, weight, *epilogue.operands.values()), (x.shape[0], weight.shape[0])
    ready = plan.bound_plan((x, weight), plan.PlanRequest(_NAMES, LINEAR, shape, (1,), (0, 1), finish=finish))
    call = product_call(tensors, finish, bound_map(no_map(x.shape[0])), x.shape[0])
    return ready.compilation(call, tensors, (0, 1), finish)


@compilations_of("linear map")
def _layer_compilations(layer: Any, calls: Calls) -> Iterator[Compilation]:
    """Compilations of a linear layer on 16-bit features; torch computes others."""
    like, weight, bias = calls.like, layer.weight, layer.bias
    # Under autocast a float32 weight is cast.
    kinds = (like.dtype, torch.float32) if calls.training else (like.dtype,)
    if like.dtype in HALF and weight.dtype in kinds and weight.device == like.device:
        x, narrow = like.new_empty((_USUAL, weight.shape[1])), like.new_empty(weight.shape)
        key = weight.shape, None if bias is None else bias.dtype
        yield Compilation(("linear", *key), partial(_compile, x, narrow, bias))
        if calls.training:
            gradients = "linear, gradients", *key, weight.dtype
            yield Compilation(gradients, partial(_compile_gradients, narrow, weight.dtype), back=True)


_USUAL = 1024
"""Rows of example features; the kernels for more rows are the same."""


def _compile(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if (task := compilation(x, weight, Epilogue(shift=None if bias is None else bias.detach()))) is not None:
        task()


def _compile_gradients(weight: Tensor, dtype: torch.dtype) -> None:
    """dtype: of the weight gradient."""
    for number, wanted in enumerate((weight.dtype, dtype)):
        for task in _gradient_compilations(weight, (number, wanted)):
            task()


def compilations_of_passes(weight: Tensor, wanted: Sequence[torch.dtype | None]) -> Iterator[Callable[[], object]]:
    """Tasks that compile the missing kernels of both passes. weight: example, in the features' dtype; wanted: dtypes of
    the (feature, weight) gradients, None if not needed."""
    task = compilation(weight.new_empty((_USUAL, weight.shape[1])), weight, Epilogue())
    if task is not None:
        yield task
    for number, dtype in enumerate(wanted):
        if dtype is not None:
            yield from _gradient_compilations(weight, (number, dtype))


def _gradient_compilations(weight: Tensor, of: tuple[int, torch.dtype]) -> Iterator[Callable[[], object]]:
    """Tasks that compile the kernels of a gradient, for few rows and for many (split-K). of: (0 for the feature
    gradient or 1 for the weight gradient, its dtype)."""
    planned = set[bool]()
    for rows in _ROWS:
        feats, grad = weight.new_empty((rows, weight.shape[1])), weight.new_empty((rows, weight.shape[0]))
        call, tensors = _call(feats, weight), (feats, weight, grad)
        splits = call.splits(tensors, of)
        if splits not in planned:
            planned.add(splits)
            task = call.compilation(tensors, of)
            if task is not None:
                yield task


_ROWS = (1 << 15, _USUAL, 256, 16)
"""Row counts to plan gradients for: weight gradients of the most rows use split-K, of the fewest do not."""


def fits_one_kernel(*tensors: Tensor) -> bool:
    """True if one kernel can take the tensors: a plain call on a GPU."""
    return autograd.uses_gpu(tensors[0]) and autograd.is_plain_call(tensors)


def differentiable_features(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """y[n] = x[n] @ weight.T + bias in half precision (or under autocast to it), differentiable any number of times:
    x [N, C_in], weight [C_out, C_in], bias [C_out] -> [N, C_out]. Gradients of weights that autocast casts are not
    rounded to half precision. None if torch should compute it: other dtypes, CPU, deterministic algorithms, anything
    active besides autograd, or operands that do not match."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if not autograd.uses_gpu(x) or plan.deterministic() or not autograd.only_reverse_mode_active(given):
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
        saved = x if to_weight else None, weight if to_x else None, narrow if to_x and narrow is not weight else None
        ctx.save_for_backward(*saved)
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (x, weight, bias)]
        ctx.dtype, ctx.tiles = dtype, plan.kernels.tuning_mode()
        with autograd.autocast_disabled((x,)):
            return linear_features(feats, narrow, Epilogue(shift=bias), True)

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
    # Placeholders for tensors that were not saved: only their shapes are read.
    (of_x, _), (of_weight, _), nothing = *ctx.like[:2], grad.new_empty(1)
    feats = nothing.expand(of_x) if wanted[1] is None else x.to(ctx.dtype)
    own = nothing.expand(of_weight) if wanted[0] is None else weight if narrow is None else narrow
    return _call(feats, own).gradients((feats, own), grad, wanted)


_is_batched = attrgetter("_functorch.is_legacy_batchedtensor")(torch._C)
"""True for a batched tensor of torch.autograd.grad(is_grads_batched=True), which kernels do not support."""


def _call(x: Tensor, weight: Tensor) -> autograd.DifferentiableCall:
    """The DifferentiableCall for operands like these, cached by number of rows."""
    return no_map(x.shape[0]).cached((weight.shape, x.dtype, x.device), lambda found: _make_call(x, weight, found))


def _make_call(x: Tensor, weight: Tensor, found: NoMap) -> autograd.DifferentiableCall:
    ask = plan.PlanRequest(_NAMES, LINEAR, (x.shape[0], weight.shape[0]), (1,), (0, 1), "triton")
    return autograd.DifferentiableCall(ask, ((x, weight), x.dtype), NO_ARRAYS, found.calls)


HALF = (torch.float16, torch.bfloat16)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise DtypeError(f"x and weight must be of one floating point dtype, found {x.dtype} and {weight.dtype}")
    if x.device != weight.device:
        raise DeviceError(f"weight is on {weight.device}, x is on {x.device}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x is [N, C_in] and weight [C_out, C_in], found {list(x.shape)} and {list(weight.shape)}")
