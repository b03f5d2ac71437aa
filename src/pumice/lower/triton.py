"""Emitted kernels on the device: their source on disk, their arguments from tensors, their launch."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pumice.env import settings
from pumice.errors import OptionError
from pumice.language.bind import Bound
from pumice.language.nodes import Access, Statement, accesses_of
from pumice.language.roles import Roles, roles, segment_count
from pumice.lower.emit import Argument, Signature, Source, emit, grid
from pumice.lower.segments import Segments, segments
from pumice.schedule import tile as tiles
from pumice.schedule.tile import Tile

DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_STATIC = 1024
"""Extents of reductions and columns up to this are baked into the kernel; longer ones are arguments."""


@dataclass(frozen=True)
class Launch:
    """A kernel made ready for operands of certain dtypes and layouts; sizes are still open."""

    source: Source
    kernel: Any
    roles: Roles
    tile: Tile
    constants: Mapping[str, Any]


def refusal(statement: Statement, bound: Bound, operands: Mapping[str, Tensor]) -> str | None:
    """Why no kernel is made of the statement, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if statement.reduction != "sum" or len(statement.terms) != 1:
        return "a kernel sums one term"
    if not all(isinstance(factor, Access) for factor in statement.terms[0].factors):
        return "a condition (exists, equal) is not loaded"
    kinds = {t.dtype for name, t in operands.items() if name in {a.name for a in accesses_of(statement)}}
    odd = kinds - set(DTYPES)
    if odd:
        return f"{', '.join(map(str, odd))} is not a dtype of kernels; there are {', '.join(map(str, DTYPES))}"
    if not any(t.dtype.is_floating_point for t in operands.values()):
        return "nothing is floating point"
    try:
        form = roles(statement, {name: len(r) for name, r in bound.ranges.items()})
        emit(statement, form, _signature(statement, bound, operands, form, torch.float32, _smallest(form)))
    except OptionError as reason:
        return str(reason)
    return None


def run(bound: Bound, operands: Mapping[str, Tensor], dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """The result of a statement of one term as one kernel, in `dtype`; a new tensor."""
    statement = bound.statement
    extents = {name: len(r) for name, r in bound.ranges.items()}
    form = roles(statement, extents)
    empty = math.prod(extents.values()) == 0
    out = _result(bound, operands, dtype, form, empty)
    if empty:
        return out.to(dtype)
    parts = _segments(statement, bound, operands, form)
    for part in parts or [None]:
        chosen = tile or tiles.default(form, extents, part.mean if part else 1.0, _bits(operands))
        launch = prepare(bound, operands, out, chosen)
        _launch(launch, bound, {**operands, "": out}, part)
    return out.to(dtype)


def source_of(bound: Bound, operands: Mapping[str, Tensor]) -> str:
    """The source of the kernel for these operands; "" where none is made."""
    if refusal(bound.statement, bound, operands):
        return ""
    form = roles(bound.statement, {name: len(r) for name, r in bound.ranges.items()})
    dtype = next(t.dtype for t in operands.values() if t.dtype.is_floating_point)
    signature = _signature(bound.statement, bound, operands, form, dtype, _smallest(form))
    return emit(bound.statement, form, signature).text


def prepare(bound: Bound, operands: Mapping[str, Tensor], out: Tensor, tile: Tile) -> Launch:
    """The kernel for these operands."""
    statement = bound.statement
    extents = {name: len(r) for name, r in bound.ranges.items()}
    form = roles(statement, extents)
    signature = _signature(statement, bound, {**operands, "": out}, form, out.dtype, tile)
    source = _emitted(statement, form, signature)
    constants = {"BY": tile.rows, "BX": tile.columns, "BR": tile.reduced, "PRECISION": _precision(operands)}
    tiled = (form.reduced, tile.reduced) if form.product else (form.columns, tile.columns)
    constants["BLOCKS"] = -(-math.prod(extents[n] for n in tiled[0]) // tiled[1])
    return Launch(source, loaded(source), form, tile, constants)


@lru_cache(maxsize=1024)
def _emitted(statement: Statement, form: Roles, signature: Signature) -> Source:
    return emit(statement, form, signature)


@lru_cache(maxsize=1024)
def loaded(source: Source) -> Any:
    """The kernel of a source: Triton reads it from a file, which is kept."""
    digest = hashlib.sha256(source.text.encode()).hexdigest()[:24]
    path = settings().cache / "kernels" / f"k{digest}.py"
    if not path.exists():
        _write(path, source.text)
    spec = importlib.util.spec_from_file_location(f"pumice_kernel_{digest}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, source.name)


def _write(path: Path, text: str) -> None:
    """Write whole or not at all: other processes may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


def _launch(launch: Launch, bound: Bound, operands: Mapping[str, Tensor], part: Segments | None) -> None:
    extents = {name: len(r) for name, r in bound.ranges.items()}
    count = part.rows.shape[0] if part else 0
    if launch.roles.segment:
        extents[launch.roles.segment.index] = count
    tile = launch.tile
    programs = grid(launch.roles, extents, (tile.rows, tile.columns), count, tile.lanes)
    if not programs:
        return
    values = {a.variable: _value(a, extents, operands, part, launch.constants) for a in launch.source.arguments}
    launch.kernel[(programs,)](**values, num_warps=tile.warps, num_stages=tile.stages)


def _value(
    argument: Argument,
    extents: Mapping[str, int],
    operands: Mapping[str, Tensor],
    part: Segments | None,
    constants: Mapping[str, Any],
) -> Any:
    match argument.kind:
        case "result" | "operand":
            return operands[argument.name]
        case "segment":
            return getattr(part, argument.name)
        case "extent":
            return extents[argument.name]
        case "size":
            return operands[argument.name].shape[argument.axis]
        case "stride":
            return operands[argument.name].stride(argument.axis)
    return constants[argument.variable]


def _signature(
    statement: Statement,
    bound: Bound,
    operands: Mapping[str, Tensor],
    form: Roles,
    dtype: torch.dtype,
    tile: Tile,
) -> Signature:
    names = {access.name for access in accesses_of(*statement.terms, *statement.target.indices)}
    used = {name: tensor for name, tensor in operands.items() if name in names or name == ""}
    extents = {name: len(r) for name, r in bound.ranges.items()}
    own = form.segment.index if form.segment else None
    fixed = {n: extents[n] for n in (*form.reduced, *form.columns, *form.loops) if n != own and extents[n] <= _STATIC}
    if form.segment:
        fixed.pop(form.segment.position, None)
    even = "".join(
        axis
        for axis, names_, side in (("R", form.reduced, tile.reduced), ("X", form.columns, tile.columns))
        if all(n in fixed for n in names_) and names_ and math.prod(fixed[n] for n in names_) % side == 0
    )
    return Signature(
        dtypes=(*((name, DTYPES[t.dtype]) for name, t in sorted(used.items()) if name), ("", DTYPES[dtype])),
        unit=frozenset((name, axis) for name, t in used.items() for axis, s in enumerate(t.stride()) if s == 1),
        wide=frozenset(name for name, t in used.items() if _reach(t) >= 1 << 31),
        static=tuple(sorted(fixed.items())),
        starts=tuple((name, r.start) for name, r in sorted(bound.ranges.items()) if r.start),
        even=even,
        lanes=tile.lanes,
        accumulate=statement.accumulate,
    )


def _reach(tensor: Tensor) -> int:
    """The furthest element's distance from the first."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size)


def _result(bound: Bound, operands: Mapping[str, Tensor], dtype: torch.dtype, form: Roles, empty: bool) -> Tensor:
    """The tensor that the kernel writes: what is added to in at least float32, zeros where not all is written."""
    statement = bound.statement
    device = next(iter(operands.values())).device
    summed = torch.promote_types(dtype, torch.float32) if form.adds else dtype
    if statement.accumulate:
        return operands[statement.target.name].to(summed, copy=True, memory_format=torch.contiguous_format)
    whole = not empty and not form.adds and _covers(bound, form)
    make = torch.empty if whole else torch.zeros
    return make(bound.shape, dtype=summed, device=device)


def _covers(bound: Bound, form: Roles) -> bool:
    """Whether every entry of the target is written."""
    names = [expression.bare for expression in form.target.indices]
    if len(set(names)) < len(names):
        return False
    for extent, expression in zip(bound.shape, form.target.indices, strict=True):
        if expression.bare is None:
            return False
        if form.segment and expression.bare == form.segment.index:
            continue
        name = bound.ranges[expression.bare]
        if name.start or name.stop != extent:
            return False
    return True


def _segments(
    statement: Statement, bound: Bound, operands: Mapping[str, Tensor], form: Roles
) -> Sequence[Segments] | None:
    if form.segment is None:
        return None
    count = segment_count(form, bound.shape, {name: t.shape for name, t in operands.items()})
    return segments(operands[form.segment.array], count, split=form.rows == (form.segment.index,))


def _smallest(form: Roles) -> Tile:
    return Tile(16, 16, 16) if form.product else Tile(1, 1)


def _bits(operands: Mapping[str, Tensor]) -> int:
    return max(t.dtype.itemsize * 8 for t in operands.values() if t.dtype.is_floating_point)


def _precision(operands: Mapping[str, Tensor]) -> str:
    """How float32 is multiplied: as torch is told to."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"
