"""Sparse einsums: one line of text over dense and sparse operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError, StatementError
from pumice.language.formats import Format, parse_format
from pumice.language.nodes import Access, Statement, accesses_of, arrays_of
from pumice.language.parse import parse
from pumice.lower import plan
from pumice.lower.remember import Bounded, per_tensor
from pumice.ops import register
from pumice.ops.explain import explanation
from pumice.ops.sparse import Sparse, sparse

Operand = Tensor | Sparse | int | float
Given = ParamSpec("Given")
Found = TypeVar("Found")


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
        "triton/bf16x3" (or ieee, tf32x3, tf32) says how float32 is multiplied; by default as
        torch.set_float32_matmul_precision says.

    Returns
    -------
    A new tensor of the target's shape, in the operands' dtype (under autocast: in the autocast dtype). Half precisions
    are accumulated in float32 and rounded once per term. Differentiable any number of times in every floating operand.

    Raises StatementError, ShapeError, DtypeError, DeviceError, OptionError, and CoordinateError for an index array
    with values that are not there (looked at once per tensor; outside, kernels read and write nothing).

    Source: "Sparse GPU Kernels Simplified and Optimized with Indirect Einsums" (Insum) for indirect indices, "Unified
    Convolution Framework" (UCF) for affine ones and level formats.
    """
    result = _compiled(text, lowering)(**operands)
    return result if out is None else _written(out, result)


def _compiled(text: str, lowering: str) -> Einsum:
    """The callable of a statement; formats are told by the operands themselves."""
    if torch.compiler.is_compiling() or not (isinstance(text, str) and isinstance(lowering, str)):
        return compile_einsum(text, lowering=lowering)
    return _kept(text, lowering)


@lru_cache(maxsize=256)
def _kept(text: str, lowering: str) -> Einsum:
    return compile_einsum(text, lowering=lowering)


@lru_cache(maxsize=256)
def _parsed(text: str, integers: tuple[tuple[str, int], ...]) -> Statement:
    return parse(text, dict(integers))


@dataclass(frozen=True)
class Einsum:
    """A statement with the formats of its sparse operands: call it with operands by name."""

    text: str
    formats: tuple[tuple[str, str], ...] = ()
    lowering: str = ""

    def __call__(self, /, **operands: Operand) -> Tensor:
        tensors, names = self._passed(operands)
        return register.einsum(tensors, names, self.text, None, self.lowering)

    def explain(self, /, **operands: Operand) -> str:
        """The forms of the statement, what each lowering would cost on these operands, and the kernel's source.

        Operands may be left out of a statement without them: then only the forms are told.
        """
        if not operands:
            return explanation([], _bare_names(dict(self.formats)), self.text, self.lowering)
        tensors, names = self._passed(operands)
        return explanation(tensors, names, self.text, self.lowering)

    def tune(self, **operands: Operand) -> str:
        """Time the tiles of the kernels on these operands, and keep the fastest for sizes like these; the times.

        What was found is kept on disk and used from then on, in this process and in others.
        Raises OptionError where no kernel runs (on a CPU).
        """
        tensors, names = self._passed(operands)
        found = plan.tune(tensors, names, self.text, self.lowering)
        if not found:
            raise OptionError("there is nothing to tune: no step is a kernel here, see explain()")
        lines = []
        for step, times in found:
            lines.append(str(step))
            lines += [f"  {1e3 * t:9.4f} ms  {tile}" for tile, t in sorted(times.items(), key=lambda item: item[1])]
        return "\n".join(lines)

    def _passed(self, operands: Mapping[str, Operand]) -> tuple[list[Tensor], str]:
        if torch.compiler.is_compiling():
            # Nothing can be read while tracing; shapes are checked by the operator, values are masked by the kernels.
            return self._traced(operands)
        if problem := _problem(operands):
            raise DtypeError(problem)
        key = (self, _autocast_state(operands), *((name, *_signature(x)) for name, x in operands.items()))
        seen = _SEEN.get(key)
        if seen is None:
            return self._first_passed(operands, key)
        for check in seen.checks:
            check.look(operands)
        return _tensors(operands), seen.names

    def _traced(self, operands: Mapping[str, Operand]) -> tuple[list[Tensor], str]:
        operands = {n: _fixed(x) if type(x) in (int, float) else x for n, x in operands.items()}
        integers = tuple((name, x) for name, x in operands.items() if type(x) is int)
        values, constants = _numbers(self.text, integers)
        return _flattened(_one_dtype(dict(operands), {name for name in values if name in operands}), constants)

    def _first_passed(self, operands: Mapping[str, Operand], key: tuple[Any, ...]) -> tuple[list[Tensor], str]:
        """All checks, and whatever has to be converted; what needs no conversion is passed as it is from then on."""
        integers = tuple((name, x) for name, x in operands.items() if type(x) is int)
        statement = _parsed(self.text, integers)
        ready = _checked(statement, operands, dict(self.formats))
        constants = _numbers(self.text, integers)[1]
        tensors, names = _flattened(ready, constants)
        checks = _array_checks(statement, ready)
        for check in checks:
            check.look(ready)
        dense = _used_dense(self.text, names)
        if dense:
            return _flattened({n: x.to_dense() if n in dense else x for n, x in ready.items()}, constants)
        if all(ready[name] is x for name, x in operands.items()):
            _SEEN.keep(key, _Seen(names, checks))
        return tensors, names


@dataclass(frozen=True)
class _Check:
    """An index array, and the axis whose places it holds in units of `coefficient`."""

    array: str
    text: str
    coefficient: int
    extent: int
    where: str

    def look(self, operands: Mapping[str, Any]) -> None:
        """Raise CoordinateError unless the values are there; they are read once per tensor."""
        array = operands[self.array]
        if _held(array):
            _check_values(self, *_limits(array))


@dataclass(frozen=True)
class _Declared:
    """An index array of which the text says that it is sorted, distinct, or onto an axis of that extent."""

    array: str
    fact: str
    extent: int

    def look(self, operands: Mapping[str, Any]) -> None:
        """Raise CoordinateError unless it is; lowerings rely on it."""
        array = operands[self.array]
        if _held(array) and not _FACTS[self.fact](array, self.extent):
            where = f" an axis of extent {self.extent}" if self.fact == "onto" else ""
            raise CoordinateError(f"{self.array} is declared {self.fact}{where}, and is not")


@dataclass(frozen=True)
class _Seen:
    """What was found of operands that need no conversion: their names for the operator, and what is left to check."""

    names: str
    checks: tuple[_Check | _Declared, ...]


_SEEN: Bounded[_Seen] = Bounded(1024)


def _signature(x: Any) -> tuple[Any, ...]:
    """What the checks depend on, values of index arrays apart."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device
    if isinstance(x, Sparse):
        return x.shape, x.dtype, x.device, x.storage(("passed", *(p.values is None for p in x.parts)), _passed_tokens)
    return type(x), x


def _passed_tokens(x: Sparse) -> tuple[str, ...]:
    form = str(x.format)
    held = [(n, local) for n, p in enumerate(x.parts) for local in (*p.coords, *(["values"] * (p.values is not None)))]
    return tuple(f"{form}@{part}@{local}" for part, local in held)


def _tensors(operands: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of all operands, in the order of `_flattened`."""
    tensors: list[Tensor] = []
    for x in operands.values():
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, Sparse):
            for part in x.parts:
                tensors += part.coords.values()
                if part.values is not None:
                    tensors.append(part.values)
    return tensors


def _autocast_state(operands: Mapping[str, Any]) -> torch.dtype | None:
    kind = next((x.device.type for x in operands.values() if isinstance(x, Tensor | Sparse)), "cpu")
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def compile_einsum(text: str, formats: Mapping[str, str | Format] | None = None, *, lowering: str = "") -> Einsum:
    """A callable for a statement, its text checked now; `formats` of the sparse operands, by name.

    Calling it takes the operands by name, as einsum() does; a dense tensor where a format is told is converted on
    every call. Kernels are made once for (text, formats, dtypes, layouts); other sizes need no other kernel.
    `.explain(**operands)` tells the three forms, the choice and its reasons, and the kernel's source.

    Raises StatementError, OptionError.
    """
    if not isinstance(text, str):
        raise DtypeError(f"a statement is text, found {type(text).__name__}")
    _check_lowering(lowering)
    known = tuple(sorted((name, str(parse_format(f))) for name, f in (formats or {}).items()))
    return Einsum(text, known, lowering)


def _check_lowering(lowering: str) -> None:
    if not isinstance(lowering, str):
        raise OptionError(f"lowering is text, found {type(lowering).__name__}; there are {', '.join(plan.LOWERINGS)}")
    name, _, precision = lowering.partition("/")
    if name and name not in plan.LOWERINGS:
        raise OptionError(f"lowering {name!r} is unknown; there are {', '.join(plan.LOWERINGS)}")
    if precision and (name != "triton" or precision not in plan.kernels.PRECISIONS):
        raise OptionError(f"{lowering!r}: only triton takes a precision, one of {', '.join(plan.kernels.PRECISIONS)}")


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
    unused = sorted(name for name, x in operands.items() if name not in named | {target} and type(x) is not int)
    if unused:
        raise OptionError(f"`{statement.text or statement}` reads no operand {', '.join(unused)}")
    if isinstance(operands.get(target), Sparse):
        raise OptionError(f"the target {target} is a dense tensor, found a pm.sparse operand; pass its to_dense()")
    found: dict[str, Any] = {}
    for name, x in operands.items():
        found[name] = _operand(x, formats.get(name))
    _check_devices(found)
    for name in dict.fromkeys(array.name for array in arrays_of(*statement.terms, statement.target)):
        _check_index_array(name, found[name])
    return _one_dtype(found, {name for name in _value_names_of(statement) if name in found})


def _constant(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Let torch.compile run `function` while it traces and keep what it gives.

    What torch.compiler.assume_constant_result does, without its import of the compiler (and of Triton).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _numbers(text: str, integers: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The operands whose values take part, and the given integers that the text cannot be read without."""
    values = _value_names_of(_parsed(text, integers))
    return values, tuple((n, x) for n, x in integers if n not in values or _needed(text, integers, n))


def _needed(text: str, integers: tuple[tuple[str, int], ...], name: str) -> bool:
    """Whether a given integer, a value elsewhere in the text, is a constant of an index or a range too."""
    try:
        _parsed(text, tuple(given for given in integers if given[0] != name))
    except StatementError:
        return True
    return False


def _value_names_of(statement: Statement) -> tuple[str, ...]:
    """The operands whose values take part, the target's name among them; index arrays stay as they are."""
    indices = {array.name for array in arrays_of(*statement.terms, statement.target)}
    names = dict.fromkeys((*plan.loops.value_names(statement), statement.target.name))
    return tuple(name for name in names if name not in indices)


def _problem(operands: Mapping[str, Any]) -> str:
    """What is wrong with the kind of an operand, if anything."""
    for name, x in operands.items():
        if isinstance(x, Tensor):
            if x.layout != torch.strided:
                return f"operand {name} has layout {x.layout}, expected a dense tensor; pm.sparse({name}) reads it"
            if x.is_quantized:
                return f"operand {name} is quantized, which is not supported"
        elif not isinstance(x, Sparse) and type(x) not in (int, float):
            kind = type(x).__name__
            return f"operand {name} should be a tensor, a pm.sparse operand, an int or a float, found {kind}"
    return ""


def _operand(x: Any, format: str | None) -> Any:
    return sparse(x, format) if isinstance(x, Tensor) and format is not None else x


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


_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def _one_dtype(operands: dict[str, Any], values: set[str]) -> dict[str, Any]:
    """Values in one dtype: that of the floating ones, which must agree; under autocast in its dtype."""
    kinds = {name: operands[name].dtype for name in sorted(values) if isinstance(operands[name], Tensor | Sparse)}
    strange = [name for name, kind in kinds.items() if kind not in _DTYPES]
    if strange:
        told = ", ".join(f"{name} is {kinds[name]}" for name in strange)
        raise DtypeError(f"values are float16, bfloat16, float32, float64, integers or bools: {told}")
    floating = {name: kind for name, kind in kinds.items() if kind.is_floating_point}
    dtype = _autocast(floating, operands)
    if len(set(floating.values())) > 1 and dtype is None:
        told = ", ".join(f"{name} is {kind}" for name, kind in floating.items())
        raise DtypeError(f"values are of one floating dtype: {told}; convert one, or use torch.autocast")
    scalars = any(type(operands[name]) is float for name in values)
    if dtype is None:
        dtype = next(iter(floating.values()), torch.get_default_dtype() if scalars or not kinds else None)
    if dtype is None:
        dtype = torch.int64
    device = next((x.device for x in operands.values() if isinstance(x, Tensor | Sparse)), torch.device("cpu"))
    done = dict(operands)
    for name in values:
        x = operands[name]
        if isinstance(x, int | float):
            done[name] = torch.tensor(x, dtype=dtype, device=device)
        elif x.dtype != dtype:
            done[name] = x.to(dtype=dtype)
    return done


def _autocast(floating: Mapping[str, torch.dtype], operands: Mapping[str, Any]) -> torch.dtype | None:
    device = next((operands[name].device.type for name in floating), "cpu")
    if not floating or device == "meta" or not torch.is_autocast_enabled(device) or torch.float64 in floating.values():
        return None
    return torch.get_autocast_dtype(device)


def _fixed(number: Any) -> Any:
    """The number itself, where torch.compile would put a symbol for it: it is part of a text."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)


def _flattened(operands: Mapping[str, Any], constants: Iterable[tuple[str, int]]) -> tuple[list[Tensor], str]:
    """The tensors of all operands, and their names for the operator, with the integers that the text needs."""
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
            notes.append(f"{name}=x" + "x".join([str(_fixed(n)) for n in x.shape]))
        elif isinstance(x, Tensor):
            tokens.append(name)
            tensors.append(x)
    notes += [f"{name}={value}" for name, value in constants]
    return tensors, ";".join(["|".join(tokens), *notes])


def _array_checks(statement: Statement, operands: Mapping[str, Any]) -> tuple[_Check | _Declared, ...]:
    """What the values of the index arrays must be: -1, or a place along each axis that they index."""
    found: list[_Check | _Declared] = []
    declared = dict(statement.shapes)
    for access in (statement.target, *accesses_of(*statement.terms, *statement.target.indices)):
        x = operands.get(access.name)
        shape = declared.get(access.name) if x is None else tuple(x.shape)
        if shape is None or len(shape) != len(access.indices):
            continue
        for axis, (extent, expression) in enumerate(zip(shape, access.indices, strict=True)):
            for coefficient, atom in expression.terms:
                if extent is not None and isinstance(atom, Access) and isinstance(operands.get(atom.name), Tensor):
                    where = f"axis {axis} of {access}"
                    found.append(_Check(atom.name, str(atom), coefficient, int(extent), where))
    extents = {check.array: check.extent for check in found if isinstance(check, _Check)}
    found += [
        _Declared(name, fact, extents.get(name, 0))
        for name, fact in statement.facts
        if isinstance(operands.get(name), Tensor)
    ]
    return tuple(dict.fromkeys(found))


def _check_values(check: _Check, low: int, high: int) -> None:
    step = check.coefficient
    if low < -1 or (high >= 0 and step > 0 and step * high >= check.extent):
        raise CoordinateError(
            f"{check.text} holds {low if low < -1 else high}, but {check.where} has extent {check.extent}: values are "
            f"-1 (nothing) or from 0 to {max(0, -(-check.extent // max(step, 1)) - 1)}"
        )


def _held(array: Tensor) -> bool:
    """Whether there are values, and whether they may be looked at now."""
    there = array.numel() and not array.is_meta and not isinstance(array, FakeTensor)
    return bool(there) and not (array.is_cuda and torch.cuda.is_current_stream_capturing())


@per_tensor
def _sorted(array: Tensor, extent: int) -> bool:
    """Whether no value is smaller than the one before it on the first axis."""
    return bool((array[1:] >= array[:-1]).all())


@per_tensor
def _distinct(array: Tensor, extent: int) -> bool:
    """Whether no place occurs twice; -1 may."""
    places = array[array >= 0]
    return len(torch.unique(places)) == len(places)


@per_tensor
def _onto(array: Tensor, extent: int) -> bool:
    """Whether every place of the axis occurs."""
    return len(torch.unique(array[array >= 0])) == extent


_FACTS = {"sorted": _sorted, "distinct": _distinct, "onto": _onto}


@per_tensor
def _limits(array: Tensor) -> tuple[int, int]:
    """The smallest and the largest value; reads the device."""
    low, high = torch.stack(torch.aminmax(array)).tolist()
    return low, high


def _written(out: Tensor, result: Tensor) -> Tensor:
    if not isinstance(out, Tensor):
        raise DtypeError(f"out is a tensor, found {type(out).__name__}")
    if out.device != result.device:
        raise DeviceError(f"out is on {out.device}, the result on {result.device}")
    if out.shape != result.shape:
        raise ShapeError(f"out has shape {list(out.shape)}, the result {list(result.shape)}")
    if out.dtype != result.dtype:
        raise DtypeError(f"out is {out.dtype}, the result {result.dtype}")
    return out.copy_(result)
