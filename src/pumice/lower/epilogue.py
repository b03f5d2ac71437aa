"""Epilogue of a result before its store: norm by given statistics, affine per channel, residual, activation, cast.

    y = activation((x - mean[n]) / sqrt(variance[n] + eps) * scale[n] + shift[n] + residual)

Kernels apply it in registers, in at least float32, and round once. `applied` does the same in plain torch; under
autograd its input has already been rounded.
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

from pumice.coords.box import dtype_of
from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError


@dataclass(frozen=True)
class Activation:
    """An activation. plain: in torch; code: its Triton code, given that of the argument."""

    plain: Callable[[Tensor], Tensor]
    code: Callable[[str], str]


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "": Activation(lambda x: x, lambda x: x),
        # Propagates NaN, as torch does.
        "relu": Activation(functional.relu, lambda x: f"tl.where({x} < 0.0, 0.0, {x})"),
        "leaky_relu": Activation(functional.leaky_relu, lambda x: f"tl.where({x} < 0.0, 0.01 * {x}, {x})"),
        "silu": Activation(functional.silu, lambda x: f"{x} * tl.sigmoid({x})"),
        "gelu": Activation(functional.gelu, lambda x: f"0.5 * {x} * (1.0 + tl.erf({x} * {math.sqrt(0.5)!r}))"),
        "sigmoid": Activation(torch.sigmoid, lambda x: f"tl.sigmoid({x})"),
    }
)
"""Activations by name, with torch's defaults: leaky_relu has slope 0.01, gelu uses erf."""

TENSORS = "mean", "variance", "scale", "shift", "residual"
EPILOGUE = MEAN, VARIANCE, SCALE, SHIFT, RESIDUAL = tuple(f"*{name}" for name in TENSORS)
"""Keys of the epilogue's tensors among the operands of a statement."""

RESULTS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
"""Dtypes to which a result may be cast."""


@dataclass(frozen=True)
class EpilogueSignature:
    """Static part of an epilogue. names: keys of its tensors (EPILOGUE); weight_parts: of the product in front of it
    (lower.parts), 0 for a weight as it is; in_tf32: "x" if its features are rounded to tf32 already, and "y" if the
    result is to be; other fields: as in Epilogue."""

    names: tuple[str, ...] = ()
    activation: str = ""
    dtype: torch.dtype | None = None
    eps: float = 0.0
    row_padding: int = 0
    weight_parts: int = 0
    in_tf32: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _facts(self) -> tuple[Any, ...]:
        kept = self.weight_parts, self.in_tf32
        return self.names, self.activation, self.dtype, self.eps, self.row_padding, *kept

    @cached_property
    def _hash(self) -> int:
        return hash(self._facts)

    def __reduce__(self) -> tuple[Any, ...]:
        # Drop the cached hash: string hashes differ between processes.
        return EpilogueSignature, self._facts


NO_EPILOGUE = EpilogueSignature()
_cached_signature = lru_cache(maxsize=64)(EpilogueSignature)


@dataclass(frozen=True, eq=False)
class Epilogue:
    """scale, shift, mean, variance: [C_out] or None; residual: shape of the result, or None. activation: one of
    ACTIVATIONS.

    dtype: of the result, one of RESULTS; default: as without an epilogue. Casts to float8_e4m3fn clamp to +-448, its
    largest value. eps: added to the variance. row_padding: columns that a kernel may allocate behind each row of a
    result [N, C_out] and leave unwritten. Raises DtypeError or OptionError for invalid values.
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
            raise DtypeError(f"dtype of a result is one of {', '.join(map(str, RESULTS))}, found {self.dtype}")
        if not isinstance(self.row_padding, int) or self.row_padding < 0:
            raise OptionError(f"row_padding is 0 or more, found {self.row_padding!r}")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(name for name in ACTIVATIONS if name)
            raise OptionError(f"activation {self.activation!r} is unknown; there are {known}, and '' for none")

    @cached_property
    def operands(self) -> dict[str, Tensor]:
        """The given tensors, by their keys among the operands."""
        return {f"*{name}": x for name in TENSORS if (x := getattr(self, name)) is not None}

    @cached_property
    def signature(self) -> EpilogueSignature:
        """The signature on which kernels are specialised."""
        return _cached_signature(tuple(self.operands), self.activation, self.dtype, self.eps, self.row_padding)

    @staticmethod
    def of_norm(
        vectors: Sequence[Tensor | None],
        eps: float,
        residual: Tensor | None = None,
        activation: str = "",
        row_padding: int = 0,
    ) -> Epilogue:
        """Epilogue of a norm, unchecked, 3x faster than the constructor. vectors: mean, variance, scale, shift."""
        mean, variance, scale, shift = vectors
        operands: dict[str, Any] = {MEAN: mean, VARIANCE: variance, SCALE: scale, SHIFT: shift}
        if residual is not None:
            operands[RESIDUAL] = residual
        if mean is None or variance is None or scale is None or shift is None:
            operands = {name: x for name, x in operands.items() if x is not None}
        made = object.__new__(Epilogue)
        # Fill the cached properties.
        signature = _cached_signature(tuple(operands), activation, None, eps, row_padding)
        held = {"operands": operands, "signature": signature}
        held |= {"mean": mean, "variance": variance, "eps": eps, "scale": scale, "shift": shift}
        held |= {"residual": residual, "activation": activation, "dtype": None, "row_padding": row_padding}
        object.__setattr__(made, "__dict__", held)
        return made

    def with_bias(self, bias: Tensor | None) -> Epilogue:
        """An epilogue that adds a bias to the result, then applies this one."""
        if bias is None:
            return self
        if self.mean is not None or self.variance is not None:
            return replace(self, mean=-bias if self.mean is None else self.mean - bias)
        before = bias if self.scale is None else bias * self.scale
        return replace(self, shift=before if self.shift is None else self.shift + before)

    def stored(self, weight_parts: int, in_tf32: str) -> Epilogue:
        """This epilogue, with how the weight of the product in front of it, its features and the result are stored; see
        EpilogueSignature."""
        if not (weight_parts or in_tf32):
            return self
        signature = replace(self.signature, weight_parts=weight_parts, in_tf32=in_tf32)
        made = object.__new__(Epilogue)
        object.__setattr__(made, "__dict__", {**self.__dict__, "operands": self.operands, "signature": signature})
        return made

    def split(self, groups: int) -> Epilogue:
        """The epilogue for results [..., groups, channels of a group], without row padding."""
        if groups == 1:
            return self
        held = ((name, getattr(self, name)) for name in TENSORS)
        parts = {name: x.unflatten(-1, (groups, -1)) for name, x in held if x is not None}
        return replace(self, row_padding=0, **parts)


def check_epilogue(epilogue: Epilogue, shape: tuple[int, int], device: torch.device) -> None:
    """Raise DtypeError, ShapeError or DeviceError unless the epilogue fits a result [N, C_out] of that shape."""
    for name in TENSORS:
        expected = shape if name == "residual" else shape[1:]
        tensor = getattr(epilogue, name)
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise DtypeError(f"{name} of the epilogue is a floating-point tensor, found {dtype_of(tensor)}")
        if tuple(tensor.shape) != expected:
            raise ShapeError(f"{name} of the epilogue is {list(expected)}, found shape {list(tensor.shape)}")
        if tensor.device != device:
            raise DeviceError(f"{name} of the epilogue is on {tensor.device}, x is on {device}")


def applied(result: Tensor, epilogue: Epilogue, dtype: torch.dtype | None = None) -> Tensor:
    """Apply an epilogue to a result [..., C_out] in at least float32; cast to its dtype, `dtype`, or the result's."""
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
