"""Validation and flattening of einsum operands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pumice.coords.box import dtype_of
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.language.accesses import too_large
from pumice.language.nodes import Access, Statement, accesses_of, arrays_of
from pumice.lower import plan
from pumice.ops.sparse import Sparse, sparse
from pumice.runtime.cache import cached_per_tensor

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
    for access in accesses_of(*statement.terms):
        if isinstance(x := found[access.name], Sparse) and len(access.indices) != x.ndim:
            have = f"{len(access.indices)} indices, the operand {access.name} has {x.ndim} axes"
            raise ShapeError(f"{access} has {have} (shape {list(x.shape)})")
    for name in dict.fromkeys(array.name for array in arrays_of(*statement.terms, statement.target)):
        _check_index_array(name, found[name])
    values = {name for name in value_names_of(statement) if name in found}
    compared = {name for name in named - values if isinstance(found[name], int | float)}
    device = next((x.device for x in found.values() if isinstance(x, Tensor | Sparse)), None)
    ready = one_dtype(found, values)
    check_fractions(statement, are_integers(ready, values))
    return {**ready, **{name: torch.tensor(found[name], device=device) for name in compared}}


def are_integers(ready: Mapping[str, Any], values: Collection[str]) -> bool:
    """True if there are values, and none is of a floating dtype."""
    return bool(values) and not any([ready[name].dtype.is_floating_point for name in values])


def check_fractions(statement: Statement, integers: bool) -> None:
    """Raise DtypeError for a statement over integers whose results have fractions."""
    coefficient = next((t.coefficient for t in statement.terms if not float(t.coefficient).is_integer()), None)
    if integers and (statement.reduction == "mean" or coefficient is not None):
        what = "is a mean" if coefficient is None else f"has the coefficient {coefficient}"
        raise DtypeError(f"`{statement.text or statement}` {what}: expected floating-point values, found integers")


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
        elif type(x) is int and too_large(x):
            return f"operand {name} is an integer of {x.bit_length() + 1} bits, at most 64 are taken; pass a float"
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
        raise DtypeError(f"{name} is an index array: a tensor of int32 or int64, found {dtype_of(x)}")


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
        raise DtypeError(f"values must be float16, bfloat16, float32, float64, integers or bools: {dtypes}")
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
        elif x.dtype != dtype and not (isinstance(x, Sparse) and x.parts[0].values is None):
            done[name] = x.to(dtype=dtype)  # a pattern has no values to convert
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


def as_constant(number: Any) -> Any:
    """The number, specialised to a constant while torch.compile traces: it becomes part of a text."""
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)


def flatten_operands(operands: Mapping[str, Any], constants: Iterable[tuple[str, int]]) -> tuple[list[Tensor], str]:
    """(tensors of all operands, the operator's `names`, which include the integers that the text needs)."""
    tensors: list[Tensor] = []
    tokens: list[str] = []
    notes: list[str] = []
    for name, x in operands.items():
        if isinstance(x, Sparse):
            form, named = str(x.format), x.named
            tokens += [plan.token(name, form, part, local) for part, local, _ in named]
            tensors += [array for _, _, array in named]
            notes.append(f"{name}=x" + "x".join([str(as_constant(n)) for n in x.shape]))
        elif isinstance(x, Tensor):
            tokens.append(name)
            tensors.append(x)
    notes += [f"{name}={value}" for name, value in constants]
    return tensors, ";".join(["|".join(tokens), *notes])


def flatten_used(
    text: str, operands: Mapping[str, Any], constants: Iterable[tuple[str, int]]
) -> tuple[list[Tensor], str, Mapping[str, str]]:
    """`flatten_operands` for this statement; sparse operands that it uses in dense form are converted, and listed with
    the reason."""
    tensors, names = flatten_operands(operands, constants)
    forms = plan.read(names).first_forms
    dense = plan.rewritten(text, names, forms).dense if forms else {}
    if dense:
        ready = {n: x.to_dense() if n in dense else x for n, x in operands.items()}
        tensors, names = flatten_operands(ready, constants)
    return tensors, names, dense


def facts_of(operands: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cache key of the checks and plans of a call. It excludes the values of index arrays, which have checks of their
    own, and the numbers of entries of sparse operands."""
    facts: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    device = None
    for name, x in operands.items():
        if isinstance(x, Tensor):
            device = device or x.device
            facts.append((name, x.shape, x.dtype, x.device, x.layout))
        elif isinstance(x, Sparse):
            device = device or x.facts[-1]
            facts.append((name, x.facts))
        else:
            facts.append((name, type(x), x if type(x) in (int, float) else None))
    kind = "cpu" if device is None else device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None, *facts


def tensors_of(operands: Iterable[Any]) -> list[Tensor]:
    """The tensors of operands in the order of `flatten_operands`."""
    tensors: list[Tensor] = []
    for x in operands:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, Sparse):
            tensors += x.arrays
    return tensors


@dataclass(frozen=True)
class IndexCheck:
    """Range check of an index array on the axis that coefficient * its values address."""

    array: str
    text: str
    coefficient: int
    extent: int
    where: str

    def check(self, operands: Mapping[str, Any]) -> None:
        """Raise CoordinateError if values are out of range; they are read once per tensor."""
        array = operands[self.array]
        if _is_readable(array):
            _check_values(self, *_limits(array))


@dataclass(frozen=True)
class WriteCheck:
    """Check of an index array for writes that its version does not count: through numpy, or `.data`."""

    array: str

    def check(self, operands: Mapping[str, Any]) -> None:
        """Increment the version of an array that changed, which invalidates its caches. Compares values on a CPU; on a
        GPU, without a synchronisation, only address, shape and stride: writes through `.data` go undetected."""
        array = operands[self.array]
        if _is_readable(array) and not _matches(_snapshot(array), array):
            torch.autograd.graph.increment_version(array)
            _snapshot(array)


@dataclass(frozen=True)
class DeclarationCheck:
    """Check of an index array declared sorted, distinct, or onto an axis of this extent."""

    array: str
    fact: str
    extent: int

    def check(self, operands: Mapping[str, Any]) -> None:
        """Raise CoordinateError if the declaration is false; lowerings rely on it."""
        array = operands[self.array]
        if _is_readable(array) and not _FACTS[self.fact](array, self.extent):
            where = f" an axis of extent {self.extent}" if self.fact == "onto" else ""
            raise CoordinateError(f"{self.array} is declared {self.fact}{where}, and is not")


def checks_of(
    statement: Statement, operands: Mapping[str, Any]
) -> tuple[WriteCheck | IndexCheck | DeclarationCheck, ...]:
    """Checks that index arrays hold -1 or positions within the axes that they index, and that declarations hold."""
    found: list[IndexCheck | DeclarationCheck] = []
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
                    found.append(IndexCheck(atom.name, str(atom), coefficient, int(extent), where))
    extents = {(check.array, check.extent) for check in found if isinstance(check, IndexCheck)}
    for name, fact in statement.facts:
        if isinstance(operands.get(name), Tensor):
            # Every axis that the array addresses may become an axis of a gradient.
            reached = sorted(extent for array, extent in extents if array == name) if fact == "onto" else []
            found += [DeclarationCheck(name, fact, extent) for extent in reached or [0]]
    written = dict.fromkeys(WriteCheck(check.array) for check in found)
    return (*written, *dict.fromkeys(found))


def _check_values(check: IndexCheck, low: int, high: int) -> None:
    step = check.coefficient
    if low < -1 or (high >= 0 and step > 0 and step * high >= check.extent):
        raise CoordinateError(
            f"{check.text} holds {low if low < -1 else high}, but {check.where} has extent {check.extent}: values are "
            f"-1 (nothing) or from 0 to {max(0, -(-check.extent // max(step, 1)) - 1)}"
        )


def _is_readable(array: Tensor) -> bool:
    there = array.numel() and not array.is_meta and not isinstance(array, FakeTensor)
    # Only operators can read the values of a functorch wrapper, as of vmap.
    there = there and not torch._C._functorch.is_functorch_wrapped_tensor(array)  # pyright: ignore[reportAttributeAccessIssue]
    return bool(there) and not (array.is_cuda and torch.cuda.is_current_stream_capturing())


@cached_per_tensor
def _snapshot(array: Tensor) -> Tensor | tuple[Any, ...]:
    return (array.data_ptr(), array.shape, array.stride()) if array.is_cuda else array.clone()


def _matches(seen: Tensor | tuple[Any, ...], array: Tensor) -> bool:
    if isinstance(seen, Tensor):
        return torch.equal(seen, array)
    return seen == (array.data_ptr(), array.shape, array.stride())


@cached_per_tensor
def _sorted(array: Tensor, extent: int) -> bool:
    """True if values do not decrease along the first axis."""
    return bool((array[1:] >= array[:-1]).all())


@cached_per_tensor
def _distinct(array: Tensor, extent: int) -> bool:
    """True if no value other than -1 occurs twice."""
    places = array[array >= 0]
    return len(torch.unique(places)) == len(places)


@cached_per_tensor
def _onto(array: Tensor, extent: int) -> bool:
    """True if every position of the axis occurs."""
    return len(torch.unique(array[array >= 0])) == extent


_FACTS = {"sorted": _sorted, "distinct": _distinct, "onto": _onto}


@cached_per_tensor
def _limits(array: Tensor) -> tuple[int, int]:
    """Smallest and largest value; synchronises with the device."""
    low, high = torch.stack(torch.aminmax(array)).tolist()
    return low, high
