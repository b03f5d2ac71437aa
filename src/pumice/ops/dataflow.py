"""Convolutions in named dataflows, differentiable any number of times.

A convolution is a trilinear form of x, w and y; each pass is its derivative by one of them:

    T(x, w, y) = sum of map[o, k, i] * x[i, c] * w[n, k, c] * y[o, n]       y = dT/dy, dx = dT/dx, dw = dT/dw

so the gradients of a pass are the two other passes, each in its own dataflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.errors import DtypeError, OptionError
from pumice.lower import plan
from pumice.lower.dataflow import Pass, check
from pumice.lower.epilogue import Epilogue, applied
from pumice.lower.loops import EIGHT_BITS
from pumice.ops import autograd
from pumice.schedule.dataflow import PASSES, Chosen

_X, _W, _Y = range(3)
_MISSING = (_Y, _X, _W)
"""The result of each of PASSES, among x, w and y."""


def by_dataflow(
    operands: tuple[Tensor, Tensor], found: KernelMap, groups: int, flows: Chosen, epilogue: Epilogue | None
) -> Tensor:
    """The convolution of checked x [N_in, G*C] and w [G*N, K, C] over a map, in these dataflows."""
    form = _TrilinearForm(tuple(Pass(name, flow, found, groups) for name, flow in zip(PASSES, flows, strict=True)))
    more = () if epilogue is None else tuple(epilogue.operands.values())
    if operands[0].is_meta:
        # `prepare`: shapes only.
        kept = None if epilogue is None else epilogue.signature.dtype
        return operands[0].new_empty(found.num_outputs, operands[1].shape[0], dtype=kept or operands[0].dtype)
    if autograd.is_plain_call((*operands, *more)):
        return form.passes[0](operands, epilogue)
    if not autograd.only_autograd_active((*operands, *more)):
        raise OptionError(
            f"dataflow {flows[0].name} does not support torch.compile, torch.func transforms or forward-mode AD; "
            "the automatic dataflow does: set layer.dataflow = None, or call Tuning.remove(model) if pumice.tune set it"
        )
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in operands]
    if any(wanted) and operands[0].dtype in EIGHT_BITS:
        raise DtypeError(f"{operands[0].dtype} is for inference and has no gradients; train in wider floats")
    for one, needed in zip(form.passes, (True, *wanted), strict=True):
        # Fail before the forward pass rather than in backward.
        if needed:
            check(one)
    y = _Trilinear.apply(form, _Y, *operands)
    return y if epilogue is None else applied(y, epilogue)


class _TrilinearForm:
    """The three passes of the trilinear form."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = passes

    def without(self, missing: int, given: tuple[Tensor, Tensor]) -> Tensor:
        """The operand `missing` from the two others, given in the order x, w, y."""
        one = self.passes[_MISSING.index(missing)]
        # The input gradient takes y first.
        return one((given[1], given[0]) if missing == _X else given)


class _Trilinear(torch.autograd.Function):
    """One operand from the two others; its gradients are applications of the same function."""

    @staticmethod
    def forward(ctx: Any, form: _TrilinearForm, missing: int, *given: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.form, ctx.missing, ctx.tiles = form, missing, plan.kernels.tuning_mode()
        ctx.save_for_backward(*given)
        with autograd.autocast_disabled(given):
            return form.without(missing, (given[0], given[1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        places = [place for place in (_X, _W, _Y) if place != ctx.missing]
        operands = {**dict(zip(places, ctx.saved_tensors, strict=True)), ctx.missing: grad}
        with plan.kernels.tiles_of(ctx.tiles):
            found = [
                _gradient(ctx.form, place, operands, wanted)
                for place, wanted in zip(places, ctx.needs_input_grad[2:], strict=True)
            ]
        return None, None, *found


def _gradient(form: _TrilinearForm, place: int, operands: dict[int, Tensor], wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    first, second = (operands[other] for other in (_X, _W, _Y) if other != place)
    return _Trilinear.apply(form, place, first, second)
