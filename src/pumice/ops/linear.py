"""Linear maps of features with what stands behind them, in one kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from pumice.errors import DtypeError, ShapeError
from pumice.lower import direct, plan
from pumice.lower import triton as kernels
from pumice.lower.epilogue import Epilogue, Finish
from pumice.lower.remember import Bounded
from pumice.ops import register

_LINEAR, _NAMES = "y[n,m] = x[n,c] * w[m,c]", "x|w"
_NOTHING = direct.Held((), (), False)
_CALLS: Bounded[direct.Direct] = Bounded(1024)
"""Calls that were carried out, by what their launch depends on."""


def linear_features(x: Tensor, weight: Tensor, epilogue: Epilogue) -> Tensor:
    """y[n] = epilogue(x[n] @ weight.T): x [N, C_in], weight [C_out, C_in] -> [N, C_out], without gradients.

    Raises ShapeError and DtypeError for what does not fit.
    """
    _check(x, weight)
    finish, tensors = epilogue.finish, (x, weight, *epilogue.operands.values())
    key = direct.told(tensors, "linear", finish)
    call = _CALLS.get(key) or _of_other_sizes(key, tensors, finish)
    if call is not None and (y := call(tensors)) is not None:
        return y
    ask = plan.Ask(_NAMES, _LINEAR, (x.shape[0], weight.shape[0]), (1,), (0, 1), finish=finish)
    ready = plan.held_for((x, weight), ask)
    y = plan.carry_out(ready, (x, weight), epilogue)
    _leave(key, ready, tensors, finish)
    return y


def takes(*tensors: Tensor) -> bool:
    """Whether there is one kernel for these: on a GPU, with nobody watching."""
    return tensors[0].is_cuda and register.plain(tensors)


def _of_other_sizes(key: Hashable, tensors: Sequence[Tensor], finish: Finish) -> direct.Direct | None:
    template = direct.TEMPLATES.get(_kind(tensors, finish))
    if template is None or any(map(kernels.is_far, tensors)):
        return None
    call = template.at(_NOTHING, [t.shape for t in tensors], (tensors[0].shape[0], tensors[1].shape[0]))
    return None if call is None else _CALLS.keep(key, call)


def _leave(key: Hashable, ready: plan.Ready, tensors: Sequence[Tensor], finish: Finish) -> None:
    if len(ready.parts) != 1 or not ready.finishes:
        return
    order = {**dict(ready.parts[0].places), **{name: n for n, name in enumerate(finish.names, 2)}}
    given = {name: tensors[n] for name, n in order.items()}
    call, template = direct.of_ready(ready, given, order), direct.template_of(ready, _NOTHING, given, order)
    if call is not None and template is not None:
        _CALLS.keep(key, call)
        direct.TEMPLATES.keep(_kind(tensors, finish), template)


def _kind(tensors: Sequence[Tensor], finish: Finish) -> Hashable:
    counting = (True, False, *[name == "*residual" for name in finish.names])
    return direct.like(tensors, counting, "linear", finish)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise DtypeError(f"x and weight are of one floating point dtype, found {x.dtype} and {weight.dtype}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x is [N, C_in] and weight [C_out, C_in], found {list(x.shape)} and {list(weight.shape)}")
