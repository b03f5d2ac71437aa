"""Linear maps of features with what stands behind them, in one kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from pumice.errors import DeviceError, DtypeError, ShapeError
from pumice.lower import direct, plan
from pumice.lower.epilogue import Epilogue, Finish, check_epilogue
from pumice.lower.remember import Bounded
from pumice.ops import register
from pumice.schedule.tile import about

_LINEAR, _NAMES = "y[n,m] = x[n,c] * w[m,c]", "x|w"
_NOTHING = direct.Held.of((), direct.Pattern((), ()))
_CALLS: Bounded[direct.Direct] = Bounded(1024)
"""Calls that were carried out, by what their launch depends on."""


def linear_features(x: Tensor, weight: Tensor, epilogue: Epilogue) -> Tensor:
    """y[n] = epilogue(x[n] @ weight.T): x [N, C_in], weight [C_out, C_in] -> [N, C_out], without gradients.

    Raises ShapeError, DtypeError and DeviceError for what does not fit.
    """
    finish, tensors = epilogue.finish, (x, weight, *epilogue.operands.values())
    key = x.shape[0], direct.told(tensors, direct.counting(finish), "linear", finish)
    # The key tells how many rows x has, and of no other tensor.
    fits = x.ndim == 2 and direct.residual_fits(tensors, finish, (x.shape[0], weight.shape[0]))
    call = (_CALLS.get(key) or _of_other_sizes(key, tensors, finish)) if fits else None
    if call is not None and (y := call(tensors)) is not None:
        return y
    _check(x, weight)
    shape = x.shape[0], weight.shape[0]
    check_epilogue(epilogue, shape, x.device)
    ready = plan.held_for((x, weight), plan.Ask(_NAMES, _LINEAR, shape, (1,), (0, 1), finish=finish))
    y = plan.carry_out(ready, (x, weight), epilogue)
    call = _straight(key, tensors, finish).leave(ready, _NOTHING, tensors, (0, 1), finish)
    if call is not None:
        _CALLS.keep(key, call)
    return y


def takes(*tensors: Tensor) -> bool:
    """Whether there is one kernel for these: on a GPU, with nobody watching."""
    return tensors[0].is_cuda and register.plain(tensors)


def _straight(key: tuple[int, Hashable], tensors: Sequence[Tensor], finish: Finish) -> direct.Call:
    x, weight, *_ = tensors
    shape, kind = (x.shape[0], weight.shape[0]), (about(key[0]), key[1])
    return direct.Call(tensors, direct.counting(finish), shape, kind)


def _of_other_sizes(key: tuple[int, Hashable], tensors: Sequence[Tensor], finish: Finish) -> direct.Direct | None:
    call = _straight(key, tensors, finish).from_template(_NOTHING)
    return None if call is None else _CALLS.keep(key, call)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise DtypeError(f"x and weight are of one floating point dtype, found {x.dtype} and {weight.dtype}")
    if x.device != weight.device:
        raise DeviceError(f"weight is on {weight.device}, x is on {x.device}")
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x is [N, C_in] and weight [C_out, C_in], found {list(x.shape)} and {list(weight.shape)}")
