"""Products of sparse operands by loop nests over their levels, in C, for float32 and float64 on a CPU.

    O[n,p,q,m] = Mask[n,p,q] * I[n,p+r,q+s,c] * F[r,s,c,m]       direct: no list of the entries that meet is made

The levels of an operand are derived from the coordinates of its entries, once per tensor: per level, the positions of
its coordinates (`pos`) below each position of the level above, and the coordinates (`crd`). Leading levels of kind U
are dense. An index that stands in dense axes alone becomes the vector index: the last axis of every operand that has it.

Source: "Unified Convolution Framework", 3.2 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.formats import Format
from pumice.language.iteration import (
    COMPRESSED,
    DENSE,
    Entries,
    IteratedAccess,
    IterationChoices,
    LevelSize,
    LoopNest,
    Product,
    loop_nest,
    refused,
)
from pumice.language.nodes import Access, indices_of
from pumice.lower import nest_c
from pumice.lower.iterate_c import Emitted, emitted
from pumice.runtime.cache import cached_per_tensor

_TASKS = 8  # Tasks per thread


class StoredOperand(NamedTuple):
    """A sparse operand: its format, shape, coordinates of the entries by axis (int32), values [entries, dense...]."""

    format: Format
    shape: tuple[int, ...]
    coordinates: tuple[tuple[int, Tensor], ...]
    values: Tensor | None


@dataclass(frozen=True, eq=False)
class Fibers:
    """The levels of a sparse operand. order: entries by position of the last level, None if they are the same."""

    levels: tuple[LevelSize, ...]
    pos: tuple[Tensor, ...]
    crd: tuple[Tensor, ...]
    order: Tensor | None


def fibers(operand: StoredOperand) -> Fibers | None:
    """The levels of an operand; None if two entries have the same coordinates."""
    axes, arrays = zip(*operand.coordinates, strict=True)
    levels = [level for level in operand.format.levels if set(level.axes) & {operand.format.axes[a] for a in axes}]
    dense = next((n for n, level in enumerate(levels) if level.kind != "U"), len(levels))
    return _fibers(arrays[0], axes, tuple(operand.shape[a] for a in axes), dense, *arrays[1:])


@cached_per_tensor
def _fibers(first: Tensor, axes: tuple[int, ...], sizes: tuple[int, ...], dense: int, *others: Tensor) -> Fibers | None:
    coordinates = [x.long() for x in (first, *others)]
    order = _sorting(coordinates, sizes)
    if order is not None:
        coordinates = [x[order] for x in coordinates]
    count, position = len(first), torch.zeros(len(first), dtype=torch.int64, device="cpu")
    levels, pos, crd, positions = list[LevelSize](), list[Tensor](), list[Tensor](), 1
    none = torch.zeros(0, dtype=torch.int32, device="cpu")
    for number, (axis, size, x) in enumerate(zip(axes, sizes, coordinates, strict=True)):
        if number < dense:
            position, positions = position * size + x, positions * size
            levels.append(LevelSize(axis, size, DENSE, positions))
            pos.append(none)
            crd.append(none)
            continue
        starts = torch.ones(count, dtype=torch.bool, device="cpu")
        starts[1:] = (x[1:] != x[:-1]) | (position[1:] != position[:-1])
        firsts = starts.nonzero()[:, 0]
        above = torch.arange(positions + 1, device="cpu")
        pos.append(torch.searchsorted(position[firsts], above).int())
        crd.append(x[firsts].int())
        position, positions = starts.cumsum(0) - 1, len(firsts)
        levels.append(LevelSize(axis, size, COMPRESSED, positions))
    if positions != count or dense == len(axes):
        return None
    return Fibers(tuple(levels), tuple(pos), tuple(crd), None if order is None else order.int())


def _sorting(coordinates: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """The order of the entries by coordinates, outermost first; None if they are in order."""
    keys = coordinates[0]
    for x, size in zip(coordinates[1:], sizes[1:], strict=True):
        keys = keys * size + x
    return None if bool((keys[1:] > keys[:-1]).all()) else keys.argsort(stable=True)


@dataclass(frozen=True, eq=False)
class SparseProduct:
    """A product of sparse and dense operands, by place of the factor. pattern: the place of the factor at whose entries
    the target has values [entries, ...], -1 if it is dense."""

    bound: BoundStatement
    sparse: Mapping[int, StoredOperand]
    dense: Mapping[int, Tensor]
    pattern: int = -1
    choices: IterationChoices = IterationChoices()

    @property
    def factors(self) -> tuple[Access, ...]:
        return tuple(f for f in self.bound.statement.terms[0].factors if isinstance(f, Access))


@dataclass(frozen=True, eq=False)
class _Planned:
    nest: LoopNest
    along: tuple[bool, ...]
    code: Emitted


def refusal(product: SparseProduct) -> str | None:
    """The reason why a product is not computed by nests over levels here, or None."""
    statement = product.bound.statement
    if statement.reduction != "sum" or not all(isinstance(f, Access) for f in statement.terms[0].factors):
        return "it is not a sum of products of operands"
    tensors = [*product.dense.values(), *(x for s in product.sparse.values() for _, x in s.coordinates)]
    tensors += [s.values for s in product.sparse.values() if s.values is not None]
    if any(t.device.type != "cpu" for t in tensors):
        return "the operands are not on a CPU"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "an operand takes gradients"
    if why := nest_c.unavailable():
        return why
    if not _counted(product):
        return "it is empty"
    found = [fibers(operand) for operand in product.sparse.values()]
    if None in found:
        return "entries of an operand have the same coordinates"
    return refused(_symbols(product))


def _counted(product: SparseProduct) -> bool:
    entries = [len(s.coordinates[0][1]) for s in product.sparse.values()]
    dense = [x.numel() for x in product.dense.values()]
    return all((*entries, *dense, *product.bound.extents.values()))


def run(product: SparseProduct, dtype: torch.dtype) -> Tensor:
    """Evaluate a product that `refusal` accepts: the target, or its values at the entries of the pattern."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    planned = _planned(product, wide)
    nest = planned.nest
    values = [_values(product, number, nest.vector, wide) for number in range(len(nest.factors))]
    shape = _target_shape(product)
    result = torch.zeros(_moved_shape(shape, _axis(nest.target, nest.vector, _skipped(product))), dtype=wide)
    numbers, _held = _arguments(product, planned, values, result)
    nest_c.run(nest_c.library(planned.code.source), "run", numbers)
    axis = _axis(nest.target, nest.vector, _skipped(product))
    result = result if axis is None else result.movedim(-1, axis).contiguous()
    if (coefficient := product.bound.statement.terms[0].coefficient) != 1:
        result *= coefficient
    return result.to(dtype)


def source_of(product: SparseProduct, dtype: torch.dtype) -> str:
    """The loop nest of a product that `refusal` accepts, and its C source."""
    planned = _planned(product, torch.float64 if dtype == torch.float64 else torch.float32)
    return f"{planned.nest}\n\n{planned.code.source}"


def _symbols(product: SparseProduct) -> Product:
    """The product as symbols, with rounded numbers of positions: similar scenes have one nest."""
    bound, accesses = product.bound, []
    for number, access in enumerate(product.factors):
        stored = product.sparse.get(number)
        found = None if stored is None else fibers(stored)
        shape = tuple(product.dense[number].shape) if stored is None else stored.shape
        levels = (
            () if found is None else tuple(l._replace(positions=1 << l.positions.bit_length()) for l in found.levels)
        )
        accesses.append(IteratedAccess(access, shape, levels))
    ranges = tuple((name, extent.start, extent.stop) for name, extent in bound.ranges.items())
    return Product(bound.statement.target, bound.shape, tuple(accesses), ranges, product.pattern)


def _planned(product: SparseProduct, dtype: torch.dtype) -> _Planned:
    valued = tuple(n in product.dense or product.sparse[n].values is not None for n in range(len(product.factors)))
    ordered = tuple(_order(product, n) is not None for n in range(len(product.factors)))
    return _plan(_symbols(product), product.choices, valued, ordered, dtype)


@lru_cache(maxsize=1024)
def _plan(
    product: Product,
    choices: IterationChoices,
    valued: tuple[bool, ...],
    ordered: tuple[bool, ...],
    dtype: torch.dtype,
) -> _Planned:
    nest = loop_nest(product, choices)
    accesses = (product.target, *(f.access for f in product.factors))
    along = tuple(bool(nest.vector) and nest.vector in indices_of(access) for access in accesses)
    return _Planned(nest, along, emitted(nest, along, valued, ordered, *nest_c.lanes_of(dtype)))


def _order(product: SparseProduct, number: int) -> Tensor | None:
    if number not in product.sparse:
        return None
    found = fibers(product.sparse[number])
    return None if found is None else found.order


def _skipped(product: SparseProduct) -> int:
    """The target's leading axes that the entries of the pattern stand for."""
    return len(product.sparse[product.pattern].coordinates) if product.pattern >= 0 else 0


def _target_shape(product: SparseProduct) -> tuple[int, ...]:
    if product.pattern < 0:
        return product.bound.shape
    entries = len(product.sparse[product.pattern].coordinates[0][1])
    return entries, *product.bound.shape[_skipped(product) :]


def _axis(access: Access, vector: str, skipped: int = 0) -> int | None:
    """The axis of the vector index in the array of an access, whose first `skipped` axes are one."""
    for axis, expression in enumerate(access.indices[skipped:]):
        if vector and expression.bare == vector:
            return axis + (1 if skipped else 0)
    return None


def _moved_shape(shape: tuple[int, ...], axis: int | None) -> tuple[int, ...]:
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :], shape[axis])


def _values(product: SparseProduct, number: int, vector: str, dtype: torch.dtype) -> Tensor | None:
    """The values of a factor, the vector index last."""
    if number in product.dense:
        return _last(product.dense[number], _axis(product.factors[number], vector), dtype)
    stored = product.sparse[number]
    if stored.values is None:
        return None
    axes = _dense_axes(product, number)
    at = next(
        (1 + n for n, axis in enumerate(axes) if vector and product.factors[number].indices[axis].bare == vector), None
    )
    return _last(stored.values, at, dtype)


def _last(x: Tensor, axis: int | None, dtype: torch.dtype) -> Tensor:
    moved = x if axis is None else x.movedim(axis, -1)
    return moved if moved.is_contiguous() and moved.dtype == dtype else _copied(x, axis, dtype)


@cached_per_tensor
def _copied(x: Tensor, axis: int | None, dtype: torch.dtype) -> Tensor:
    return (x if axis is None else x.movedim(axis, -1)).to(dtype).contiguous()


def _dense_axes(product: SparseProduct, number: int) -> list[int]:
    """The axes of a sparse factor that its values have, as stored."""
    format, stored = product.sparse[number].format, {axis for axis, _ in product.sparse[number].coordinates}
    order = [format.axes.index(name) for level in format.levels for name in level.axes]
    return [axis for axis in order if axis not in stored]


def _arguments(
    product: SparseProduct, planned: _Planned, values: Sequence[Tensor | None], result: Tensor
) -> tuple[list[int], list[Any]]:
    """(integers of the call, tensors that must live until it ends)."""
    filler = _Arguments(product, planned, values, result)
    numbers = [filler.value(key) for key in planned.code.arguments]
    first, last = filler.span
    tasks = 1 if planned.nest.parallel < 0 else min(max(1, last - first), _TASKS * torch.get_num_threads())
    each = max(1, -(-(last - first) // tasks))
    return [0, -(-(last - first) // each), 0, each, *numbers], filler.held


class _Arguments:
    """The integers that a nest's C function takes."""

    def __init__(
        self, product: SparseProduct, planned: _Planned, values: Sequence[Tensor | None], result: Tensor
    ) -> None:
        self.product, self.nest = product, planned.nest
        self.values, self.result = values, result
        self.fibers = {n: found for n, s in product.sparse.items() if (found := fibers(s)) is not None}
        sizes = {
            (n, d): (f.levels[d - 1].positions if d else 1)
            for n, f in self.fibers.items()
            for d in range(len(f.levels))
        }
        offsets, total = dict[tuple[int, int], int](), 0
        for key, size in sizes.items():
            offsets[key], total = total, total + size
        self.hints = torch.zeros(torch.get_num_threads() * total, dtype=torch.int32, device="cpu")
        self.offsets, self.total = offsets, total
        self.strides = {number: self._strides(number) for number in range(-1, len(product.factors))}
        self.held = [values, result, self.hints, self.fibers]

    @property
    def span(self) -> tuple[int, int]:
        """The range of the loop that is shared among threads."""
        if isinstance(loop := self.nest.steps[0].loop, Entries):
            return 0, len(self.product.sparse[loop.factor].coordinates[0][1])
        if self.nest.parallel < 0:
            return 0, 1
        extent = self.product.bound.ranges[self.nest.steps[self.nest.parallel].indices[0]]
        return extent.start, extent.stop

    def _strides(self, number: int) -> dict[str, int]:
        """Elements between neighbouring points of each index; "": of constants."""
        access = self.nest.target if number < 0 else self.product.factors[number]
        x = self.result if number < 0 else self.values[number]
        if x is None:
            return {"": 0}
        stored = number in self.product.sparse or (number < 0 and self.product.pattern >= 0)
        if number in self.product.sparse:
            axes = _dense_axes(self.product, number)
        else:
            axes = list(range(_skipped(self.product) if number < 0 else 0, len(access.indices)))
        vector = [axis for axis in axes if self.nest.vector and access.indices[axis].bare == self.nest.vector]
        axes = [axis for axis in axes if axis not in vector] + vector
        found = {"": 0}
        for axis, stride in zip(axes, x.stride()[1 if stored else 0 :], strict=True):
            for coefficient, atom in access.indices[axis].terms:
                found[str(atom)] = found.get(str(atom), 0) + coefficient * stride
            found[""] += access.indices[axis].constant * stride
        found["span"] = x.stride(0) if stored else 0
        return found

    def value(self, key: tuple[Hashable, ...]) -> int:
        return getattr(self, f"_{key[0]}")(*key[1:])

    def _first(self) -> int:
        return self.span[0]

    def _last(self) -> int:
        return self.span[1]

    def _start(self, index: str) -> int:
        return self.product.bound.ranges[index].start

    def _stop(self, index: str) -> int:
        return self.product.bound.ranges[index].stop

    def _length(self) -> int:
        return self.product.bound.extents[self.nest.vector]

    def _size(self, factor: int, axis: int) -> int:
        if factor < 0:
            return self.product.bound.shape[axis]
        stored = self.product.sparse.get(factor)
        return self.product.dense[factor].shape[axis] if stored is None else stored.shape[axis]

    def _constant(self, factor: int, axis: int) -> int:
        access = self.nest.target if factor < 0 else self.product.factors[factor]
        return access.indices[axis].constant

    def _stride(self, factor: int, index: str) -> int:
        return self.strides[factor][index]

    def _span(self, factor: int) -> int:
        return self.strides[factor]["span"]

    def _values(self, factor: int) -> int:
        x = self.result if factor < 0 else self.values[factor]
        assert x is not None
        return x.data_ptr() + self.strides[factor][""] * x.element_size()

    def _order(self, factor: int) -> int:
        order = self.fibers[factor].order
        assert order is not None
        return order.data_ptr()

    def _pos(self, factor: int, depth: int) -> int:
        return self.fibers[factor].pos[depth].data_ptr()

    def _crd(self, factor: int, depth: int) -> int:
        return self.fibers[factor].crd[depth].data_ptr()

    def _hints(self, *level: int) -> int:
        if not level:
            return self.total
        return self.hints.data_ptr() + 4 * self.offsets[level[0], level[1]]

    def _coordinates(self, factor: int, depth: int) -> int:
        return self.product.sparse[factor].coordinates[depth][1].data_ptr()
