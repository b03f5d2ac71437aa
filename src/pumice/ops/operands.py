"""Validation and flattening of einsum operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pumice.errors import DeviceError, DtypeError, OptionError, ShapeError
from pumice.language.nodes import Statement, accesses_of, arrays_of
from pumice.lower import plan
from pumice.ops.sparse import Sparse, sparse

Operand = Tensor | Sparse | int | float


def validate_operands(
    statement: Statement, operands: Mapping[str, Operand], formats: Mapping[str, str]
) -> dict[str, Any]:
    """The operands in one floating dtype on one device, scalars as tensors. Raises if they do not fit the statement."""
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
    return one_dtype(found, {name for name in value_names_of(statement) if name in found})


def problem_of(operands: Mapping[str, Any]) -> str:
    """Error message for an operand of an unsupported type or layout, else ""."""
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


def one_dtype(operands: dict[str, Any], values: set[str]) -> dict[str, Any]:
    """Convert values to one dtype: that of the floating ones, which must agree, or the autocast dtype."""
    kinds = {name: operands[name].dtype for name in sorted(values) if isinstance(operands[name], Tensor | Sparse)}
    strange = [name for name, kind in kinds.items() if kind not in _DTYPES]
    if strange:
        dtypes = ", ".join(f"{name} is {kinds[name]}" for name in strange)
        raise DtypeError(f"values are float16, bfloat16, float32, float64, integers or bools: {dtypes}")
    floating = {name: kind for name, kind in kinds.items() if kind.is_floating_point}
    dtype = _autocast(floating, operands)
    if len(set(floating.values())) > 1 and dtype is None:
        dtypes = ", ".join(f"{name} is {kind}" for name, kind in floating.items())
        raise DtypeError(f"values are of one floating dtype: {dtypes}; convert one, or use torch.autocast")
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
            # Filled on the device: a copy from the host would synchronise.
            done[name] = torch.full((), x, dtype=dtype, device=device)
        elif x.dtype != dtype:
            done[name] = x.to(dtype=dtype)
    return done


def _autocast(floating: Mapping[str, torch.dtype], operands: Mapping[str, Any]) -> torch.dtype | None:
    device = next((operands[name].device.type for name in floating), "cpu")
    if not floating or device == "meta" or not torch.is_autocast_enabled(device) or torch.float64 in floating.values():
        return None
    return torch.get_autocast_dtype(device)


def value_names_of(statement: Statement) -> tuple[str, ...]:
    """The operands used as values, including the target, as opposed to index arrays."""
    indices = {array.name for array in arrays_of(*statement.terms, statement.target)}
    names = dict.fromkeys((*plan.loops.value_names(statement), statement.target.name))
    return tuple(name for name in names if name not in indices)


def fixed(number: Any) -> Any:
    """The number as a constant while torch.compile traces: it becomes part of a text."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)


def flattened(operands: Mapping[str, Any], constants: Iterable[tuple[str, int]]) -> tuple[list[Tensor], str]:
    """The tensors of all operands, and the operator's `names`, including the integers that the text needs."""
    tensors: list[Tensor] = []
    tokens: list[str] = []
    notes: list[str] = []
    for name, x in operands.items():
        if isinstance(x, Sparse):
            form, named = str(x.format), x.named
            tokens += [plan.token(name, form, part, local) for part, local, _ in named]
            tensors += [array for _, _, array in named]
            notes.append(f"{name}=x" + "x".join([str(fixed(n)) for n in x.shape]))
        elif isinstance(x, Tensor):
            tokens.append(name)
            tensors.append(x)
    notes += [f"{name}={value}" for name, value in constants]
    return tensors, ";".join(["|".join(tokens), *notes])


def facts_of(operands: Mapping[str, Any]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors of all operands in the order of `flattened`, and the cache key of checks and plans. The key excludes
    the values of index arrays, which have checks of their own."""
    tensors: list[Tensor] = []
    facts: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    for name, x in operands.items():
        if isinstance(x, Tensor):
            tensors.append(x)
            facts.append((name, x.shape, x.dtype, x.device, x.layout))
        elif isinstance(x, Sparse):
            arrays, known = x.facts
            tensors += arrays
            facts.append((name, known))
        else:
            facts.append((name, type(x), x if type(x) in (int, float) else None))
    kind = tensors[0].device.type if tensors else "cpu"
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return tensors, (torch.get_autocast_dtype(kind) if on else None, *facts)
