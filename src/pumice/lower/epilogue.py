"""What is done with a result before it is written: a norm by known statistics, an affine map of each channel, a
residual, an activation, a cast.

    y = activation((x - mean[n]) / sqrt(variance[n] + eps) * scale[n] + shift[n] + residual)

A kernel does it in registers, in float32, and rounds once; `applied` is the same in plain torch, of a result that is in
float32 where no gradients are asked for, and rounded to its own dtype where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError


@dataclass(frozen=True)
class Activation:
    """An activation in torch, and in Triton as a function of the code of its argument."""

    plain: Callable[[Tensor], Tensor]
    code: Callable[[str], str]


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "": Activation(lambda x: x, lambda x: x),
        # As torch's, which hands NaN on.
        "relu": Activation(functional.relu, lambda x: f"tl.where({x} < 0.0, 0.0, {x})"),
        "leaky_relu": Activation(functional.leaky_relu, lambda x: f"tl.where({x} < 0.0, 0.01 * {x}, {x})"),
        "silu": Activation(functional.silu, lambda x: f"{x} * tl.sigmoid({x})"),
        "gelu": Activation(functional.gelu, lambda x: f"0.5 * {x} * (1.0 + tl.erf({x} * {math.sqrt(0.5)!r}))"),
        "sigmoid": Activation(torch.sigmoid, lambda x: f"tl.sigmoid({x})"),
    }
)
"""By name, with torch's defaults: the slope of leaky_relu is 0.01, gelu is that of erf."""


TENSORS = "mean", "variance", "scale", "shift", "residual"
EPILOGUE = MEAN, VARIANCE, SCALE, SHIFT, RESIDUAL = tuple(f"*{name}" for name in TENSORS)
"""The names under which the tensors of an epilogue stand among the operands of a statement."""


RESULTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
"""The dtypes to which a result may be cast."""


@dataclass(frozen=True)
class EpilogueSignature:
    """What a kernel has of an epilogue: the names of its tensors, the activation, the dtype of what it writes, eps, and
    how many columns of memory it leaves free behind each row of its result."""

    names: tuple[str, ...] = ()
    activation: str = ""
    dtype: torch.dtype | None = None
    eps: float = 0.0
    row_padding: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.activation, self.dtype, self.eps, self.row_padding))

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of names are not those of other processes.
        return EpilogueSignature, (self.names, self.activation, self.dtype, self.eps, self.row_padding)


NO_EPILOGUE = EpilogueSignature()
_finish = lru_cache(maxsize=64)(EpilogueSignature)


@dataclass(frozen=True, eq=False)
class Epilogue:
    """scale, shift, mean, variance: [C_out]; residual: of the result's shape; each may be missing. activation: one of
    ACTIVATIONS.

    dtype: of the result, one of RESULTS; by default what it is without an epilogue. Casts to float8_e4m3fn keep within
    +-448, its largest value. eps: what is added to a variance. spare: columns of memory that a kernel may leave free
    behind each row of a result [N, C_out].
    """

    scale: Tensor | None = None
    shift: Tensor | None = None
    residual: Tensor | None = None
    activation: str = ""
    dtype: torch.dtype | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    eps: float = 0.0
    row_padding: int = 0

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in RESULTS:
            raise DtypeError(f"a result is cast to one of {', '.join(map(str, RESULTS))}, found {self.dtype}")
        if not isinstance(self.row_padding, int) or self.row_padding < 0:
            raise OptionError(f"spare columns are 0 or more, found {self.row_padding!r}")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(name for name in ACTIVATIONS if name)
            raise OptionError(f"activation {self.activation!r} is unknown; there are {known}, and '' for none")

    @cached_property
    def operands(self) -> dict[str, Tensor]:
        """The tensors that are there, by their names among the operands."""
        return {f"*{name}": x for name in TENSORS if (x := getattr(self, name)) is not None}

    @cached_property
    def finish(self) -> EpilogueSignature:
        """What a kernel is made for."""
        return _finish(tuple(self.operands), self.activation, self.dtype, self.eps, self.row_padding)

    @staticmethod
    def of_norm(
        vectors: Sequence[Tensor | None],
        eps: float,
        residual: Tensor | None = None,
        activation: str = "",
        row_padding: int = 0,
    ) -> Epilogue:
        """That of a norm by known statistics, whose vectors are (mean, variance, scale, shift), and of an activation
        that is known: the same as by its fields, in a third of the time."""
        mean, variance, scale, shift = vectors
        operands: dict[str, Any] = {MEAN: mean, VARIANCE: variance, SCALE: scale, SHIFT: shift}
        if residual is not None:
            operands[RESIDUAL] = residual
        if mean is None or variance is None or scale is None or shift is None:
            operands = {name: x for name, x in operands.items() if x is not None}
        made = object.__new__(Epilogue)
        # What is worked out when it is asked for is there at once.
        held = {"operands": operands, "finish": _finish(tuple(operands), activation, None, eps, row_padding)}
        held |= {"mean": mean, "variance": variance, "eps": eps, "scale": scale, "shift": shift}
        held |= {"residual": residual, "activation": activation, "dtype": None, "row_padding": row_padding}
        object.__setattr__(made, "__dict__", held)
        return made

    def with_bias(self, bias: Tensor | None) -> Epilogue:
        """The same of results to which a bias is added first."""
        if bias is None:
            return self
        if self.mean is not None or self.variance is not None:
            return replace(self, mean=-bias if self.mean is None else self.mean - bias)
        before = bias if self.scale is None else bias * self.scale
        return replace(self, shift=before if self.shift is None else self.shift + before)

    def split(self, groups: int) -> Epilogue:
        """The same of results [..., groups, channels of a group]."""
        if groups == 1:
            return self
        held = ((name, getattr(self, name)) for name in TENSORS)
        parts = {name: x.unflatten(-1, (groups, -1)) for name, x in held if x is not None}
        return replace(self, row_padding=0, **parts)


def check_epilogue(epilogue: Epilogue, shape: tuple[int, int], device: torch.device) -> None:
    """Raise DtypeError, ShapeError or DeviceError where the epilogue does not fit a result [N, C_out] of that shape."""
    for name in TENSORS:
        expected = shape if name == "residual" else shape[1:]
        tensor = getattr(epilogue, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DtypeError(f"{name} of the epilogue is a tensor of floats, found {kind}")
        if tuple(tensor.shape) != expected:
            raise ShapeError(f"{name} of the epilogue is {list(expected)}, found shape {list(tensor.shape)}")
        if tensor.device != device:
            raise DeviceError(f"{name} of the epilogue is on {tensor.device}, x is on {device}")


def applied(result: Tensor, epilogue: Epilogue, dtype: torch.dtype | None = None) -> Tensor:
    """The epilogue of a result [..., C_out], worked out in float32 at least; in the epilogue's dtype, or else the given
    one, or else the result's."""
    y = result.to(torch.promote_types(result.dtype, torch.float32))
    if epilogue.mean is not None:
        y = y - epilogue.mean
    if epilogue.variance is not None:
        y = y * torch.rsqrt(epilogue.variance.to(y.dtype) + epilogue.eps)
    if epilogue.scale is not None:
        y = y * epilogue.scale
    if epilogue.shift is not None:
        y = y + epilogue.shift
    if epilogue.residual is not None:
        y = y + epilogue.residual
    return _cast(ACTIVATIONS[epilogue.activation].plain(y), epilogue.dtype or dtype or result.dtype)


def _cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        y = y.clamp(-most, most)
    return y.to(dtype)
