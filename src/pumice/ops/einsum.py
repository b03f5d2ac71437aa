"""Sparse einsums: one line of text over dense and sparse operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.language.formats import Format, parse_format
from pumice.language.nodes import Statement, accesses_of, arrays_of
from pumice.language.parse import parse
from pumice.lower import plan
from pumice.lower.remember import per_tensor
from pumice.ops import register
from pumice.ops.explain import explanation
from pumice.ops.sparse import Sparse, sparse

Operand = Tensor | Sparse | int | float


def einsum(text: str, /, *, out: Tensor | None = None, lowering: str = "", **operands: Operand) -> Tensor:
    """Carry out a statement of the einsum language.

        einsum("C[i,n] = A[i,k] * B[k,n]", A=A, B=B)                             affine or indirect indices, any depth
        einsum("C[D[y],x] += A[y,E[r]] * B[r,x]", C=C, D=D, A=A, E=E, B=B)
        einsum("O[p] = I[2*p+r-1] * F[r] ; p:14", I=I, F=F)                       a declared range pads with zeros
        einsum("C[m,n] = A[m,k] * B[k,n]", A=pm.sparse(a, "CSR"), B=B)            formats are found by themselves

    Parameters
    ----------
    text: target, an operator (= += max= min= mean=), a sum of products, and declarations after ";". An index that is
        not in the target is reduced; entries that are written several times are joined. Where an index array holds -1
        or an index leaves its operand, a term contributes nothing.
    operands: by name. Tensors of one floating dtype (integers and bools take part as values in it), index arrays of
        int32 or int64, `pm.sparse` operands, Python floats (scalars) and ints (scalars, or constants in indices).
        `+=` adds to the operand of the target's name, which stays as it is.
    out: where the result is written; a tensor of its shape. It is returned.
    lowering: "triton", "gathered", "graph" or "reference"; by default the cheapest, see compile_einsum().explain().

    Returns
    -------
    A new tensor of the target's shape, in the operands' dtype (under autocast: in the autocast dtype). Half precisions
    are accumulated in float32 and rounded once per term. Differentiable any number of times in every floating operand.

    Raises StatementError, ShapeError, DtypeError, DeviceError, OptionError, and CoordinateError for an index array
    with values that are not there (looked at once per tensor; outside, kernels read and write nothing).

    Source: "Sparse GPU Kernels Simplified and Optimized with Indirect Einsums" (Insum) for indirect indices, "Unified
    Convolution Framework" (UCF) for affine ones and level formats.
    """
    result = compile_einsum(text, _formats(operands), lowering=lowering)(**operands)
    return result if out is None else _written(out, result)


@lru_cache(maxsize=256)
def _parsed(text: str, integers: tuple[tuple[str, int], ...]) -> Statement:
    return parse(text, dict(integers))


@dataclass(frozen=True)
class Einsum:
    """A statement with the formats of its sparse operands: call it with operands by name."""

    text: str
    formats: tuple[tuple[str, str], ...] = ()
    lowering: str = ""

    def __call__(self, **operands: Operand) -> Tensor:
        tensors, names = self._passed(operands)
        return register.einsum(tensors, names, self.text, None, self.lowering)

    def explain(self, **operands: Operand) -> str:
        """The forms of the statement, what each lowering would cost on these operands, and the kernel's source.

        Operands may be left out of a statement without them: then only the forms are told.
        """
        if not operands:
            return explanation([], _bare_names(dict(self.formats)), self.text, self.lowering)
        tensors, names = self._passed(operands)
        return explanation(tensors, names, self.text, self.lowering)

    def _passed(self, operands: Mapping[str, Operand]) -> tuple[list[Tensor], str]:
        if torch.compiler.is_compiling():
            # Nothing can be read while tracing; shapes are checked by the operator, values are masked by the kernels.
            return _flattened(_autocasted(operands))
        integers = tuple((name, x) for name, x in operands.items() if type(x) is int)
        statement = _parsed(self.text, integers)
        operands = _checked(statement, operands, dict(self.formats))
        tensors, names = _flattened(operands)
        _check_arrays(statement, operands)
        dense = _used_dense(self.text, names)
        return (
            _flattened({n: x.to_dense() if n in dense else x for n, x in operands.items()})
            if dense
            else (tensors, names)
        )


def compile_einsum(text: str, formats: Mapping[str, str | Format] | None = None, *, lowering: str = "") -> Einsum:
    """A callable for a statement, its text checked now; `formats` of the sparse operands, by name.

    Calling it takes the operands by name, as einsum() does; a dense tensor where a format is told is converted on
    every call. Kernels are made once for (text, formats, dtypes, layouts); other sizes need no other kernel.
    `.explain(**operands)` tells the three forms, the choice and its reasons, and the kernel's source.

    Raises StatementError, OptionError.
    """
    if not isinstance(text, str):
        raise DtypeError(f"a statement is text, found {type(text).__name__}")
    if lowering and lowering not in plan.LOWERINGS:
        raise OptionError(f"lowering {lowering!r} is unknown; there are {', '.join(plan.LOWERINGS)}")
    known = tuple(sorted((name, str(parse_format(f))) for name, f in (formats or {}).items()))
    return Einsum(text, known, lowering)


def _formats(operands: Mapping[str, Operand]) -> dict[str, str]:
    return {name: str(x.format) for name, x in operands.items() if isinstance(x, Sparse)}


def _bare_names(formats: Mapping[str, str]) -> str:
    tokens = []
    for name, text in formats.items():
        stored = plan.Stored.of(parse_format(text))
        tokens += [plan.token(name, text, 0, local) for local in (*stored.arrays, "values")]
    return "|".join(tokens)


def _used_dense(text: str, names: str) -> set[str]:
    """The sparse operands that have no form over stored entries in this statement."""
    forms = tuple((name, next(iter(held))) for name, held in plan.read(names).forms.items())
    return set(plan.rewritten(text, names, forms).dense) if forms else set()


def _checked(statement: Statement, operands: Mapping[str, Operand], formats: Mapping[str, str]) -> dict[str, Any]:
    """The operands of one floating dtype and one device, scalars as tensors; what cannot be is refused."""
    target = statement.target.name
    named = {access.name for access in accesses_of(*statement.terms, *statement.target.indices)}
    missing = sorted(named - set(operands))
    if missing or (statement.accumulate and target not in operands):
        raise ShapeError(
            f"`{statement.text or statement}` needs the operand {', '.join(missing) or target}; "
            f"given are {', '.join(sorted(operands)) or 'none'}"
        )
    if isinstance(operands.get(target), Sparse):
        raise OptionError(f"the target {target} is a dense tensor, found a pm.sparse operand; pass its to_dense()")
    found: dict[str, Any] = {}
    for name, x in operands.items():
        found[name] = _operand(name, x, formats.get(name))
    _check_devices(found)
    values = plan.loops.value_names(statement)
    indices = {array.name for array in arrays_of(*statement.terms, statement.target)}
    for name in indices:
        _check_index_array(name, found[name])
    return _one_dtype(found, {*values, *([target] if target in found else [])} - indices)


def _operand(name: str, x: Any, format: str | None) -> Any:
    if isinstance(x, Tensor):
        return sparse(x, format) if format is not None else x
    if isinstance(x, Sparse) or type(x) in (int, float):
        return x
    raise DtypeError(
        f"operand {name} should be a tensor, a pm.sparse operand, an int or a float, found {type(x).__name__}"
    )


def _check_devices(operands: Mapping[str, Any]) -> None:
    first: tuple[str, torch.device] | None = None
    for name, x in operands.items():
        if isinstance(x, int | float) or (isinstance(x, Tensor) and x.is_meta):
            continue
        if first is not None and x.device != first[1]:
            raise DeviceError(f"operand {name} is on {x.device}, {first[0]} is on {first[1]}")
        first = first or (name, x.device)


def _check_index_array(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise DtypeError(f"{name} is an index array: a tensor of int32 or int64, found {kind}")


def _one_dtype(operands: dict[str, Any], values: set[str]) -> dict[str, Any]:
    """Values in one dtype: that of the floating ones, which must agree; under autocast in its dtype."""
    kinds = {name: operands[name].dtype for name in sorted(values) if isinstance(operands[name], Tensor | Sparse)}
    floating = {name: kind for name, kind in kinds.items() if kind.is_floating_point}
    dtype = _autocast(floating, operands)
    if len(set(floating.values())) > 1 and dtype is None:
        told = ", ".join(f"{name} is {kind}" for name, kind in floating.items())
        raise DtypeError(f"values are of one floating dtype: {told}; convert one, or use torch.autocast")
    if any(kind.is_complex for kind in kinds.values()):
        raise DtypeError(f"complex values are not supported: {', '.join(n for n, k in kinds.items() if k.is_complex)}")
    scalars = any(type(operands[name]) is float for name in values)
    if dtype is None:
        dtype = next(iter(floating.values()), torch.get_default_dtype() if scalars or not kinds else None)
    if dtype is None:
        dtype = torch.int64
    device = next((x.device for x in operands.values() if isinstance(x, Tensor | Sparse)), torch.device("cpu"))
    done = dict(operands)
    for name in values:
        x = operands[name]
        done[name] = torch.tensor(x, dtype=dtype, device=device) if isinstance(x, int | float) else x.to(dtype=dtype)
    return done


def _autocast(floating: Mapping[str, torch.dtype], operands: Mapping[str, Any]) -> torch.dtype | None:
    device = next((operands[name].device.type for name in floating), "cpu")
    if device == "meta" or not torch.is_autocast_enabled(device) or torch.float64 in floating.values():
        return None
    return torch.get_autocast_dtype(device)


def _autocasted(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Floating operands in the autocast dtype, floats as tensors."""
    device = next((x.device for x in operands.values() if isinstance(x, Tensor | Sparse)), torch.device("cpu"))
    found = {n: torch.tensor(x, device=device) if isinstance(x, float) else x for n, x in operands.items()}
    floating = {n: x.dtype for n, x in found.items() if not isinstance(x, int) and x.dtype.is_floating_point}
    dtype = _autocast(floating, found)
    return found if dtype is None else {n: x.to(dtype=dtype) if n in floating else x for n, x in found.items()}


def _flattened(operands: Mapping[str, Any]) -> tuple[list[Tensor], str]:
    """The tensors of all operands, and their names for the operator."""
    tensors: list[Tensor] = []
    tokens: list[str] = []
    notes: list[str] = []
    for name, x in operands.items():
        if isinstance(x, Sparse):
            for part, arrays in enumerate(x.parts):
                form = str(x.format)
                held = {**arrays.coords, **({} if arrays.values is None else {"values": arrays.values})}
                tokens += [plan.token(name, form, part, local) for local in held]
                tensors += held.values()
            notes.append(f"{name}=x" + "x".join(map(str, x.shape)))
        elif isinstance(x, int | float):
            notes.append(f"{name}={x}")
        else:
            tokens.append(name)
            tensors.append(x)
    return tensors, ";".join(["|".join(tokens), *notes])


def _check_arrays(statement: Statement, operands: Mapping[str, Any]) -> None:
    """The values of index arrays, looked at once per tensor: -1, or a place along each axis that they index."""
    for access in (statement.target, *accesses_of(*statement.terms, *statement.target.indices)):
        x = operands.get(access.name)
        if x is None:
            continue
        for axis, expression in enumerate(access.indices):
            for coefficient, atom in expression.terms:
                array = operands.get(getattr(atom, "name", "")) if atom in expression.arrays else None
                if array is None or array.is_meta or not array.numel():
                    continue
                _check_values(str(atom), array, coefficient, int(x.shape[axis]), f"axis {axis} of {access}")


def _check_values(text: str, array: Tensor, coefficient: int, extent: int, where: str) -> None:
    if array.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    low, high = _limits(array)
    if low < -1 or (high >= 0 and coefficient > 0 and coefficient * high >= extent):
        found = low if low < -1 else high
        raise CoordinateError(
            f"{text} holds {found}, but {where} has extent {extent}: values are -1 (nothing) or from 0 to "
            f"{max(0, -(-extent // max(coefficient, 1)) - 1)}"
        )


@per_tensor
def _limits(array: Tensor) -> tuple[int, int]:
    """The smallest and the largest value; reads the device."""
    low, high = torch.stack(torch.aminmax(array)).tolist()
    return low, high


def _written(out: Tensor, result: Tensor) -> Tensor:
    if out.shape != result.shape:
        raise ShapeError(f"out has shape {list(out.shape)}, the result {list(result.shape)}")
    if out.dtype != result.dtype:
        raise DtypeError(f"out is {out.dtype}, the result {result.dtype}")
    return out.copy_(result)
