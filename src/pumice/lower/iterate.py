"""Products of sparse operands by loop nests over their levels, in C, for float32 and float64 on a CPU.

    O[n,p,q,m] = Mask[n,p,q] * I[n,p+r,q+s,c] * F[r,s,c,m]       direct: no list of the entries that meet is made

An index that stands in dense axes alone becomes the vector index: the last axis of every operand that has it.

Source: "Unified Convolution Framework", 3.2 and 4.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.iteration import (
    EntryLoop,
    IteratedAccess,
    IterationChoices,
    LevelProduct,
    LoopNest,
    densified,
    loop_nest,
    products_of,
    refused,
)
from pumice.language.nodes import Access, Affine, indices_of
from pumice.lower import nest_c
from pumice.lower.iterate_c import HEADER, Emitted, FactorReads, emitted, widths
from pumice.lower.levels import MOST_LEVELS, Fibers, StoredForm, StoredOperand
from pumice.lower.nest_form import MOST_ELEMENTS
from pumice.runtime.cache import BoundedCache, cached_per_values
from pumice.runtime.native import parallel_region
from pumice.runtime.workspace import require_memory

_TASKS = 8  # Tasks per thread
_REUSED, _MANY = 16, 1 << 12  # A factor stored by tiles: reads of each value, number of values
Factor = StoredOperand | Tensor


class FactorForm(NamedTuple):
    """What a nest depends on of a factor besides its entries. stored: of a sparse one; dense: its axes in the array of
    values, whose dtype is None without values."""

    shape: tuple[int, ...]
    dense: tuple[int, ...]
    dtype: torch.dtype | None
    device: str
    stored: StoredForm | None = None

    @staticmethod
    def of(x: Factor) -> FactorForm:
        if isinstance(x, Tensor):
            return FactorForm(tuple(x.shape), tuple(range(x.ndim)), x.dtype, x.device.type)
        form, dtype = x.levels.form, None if x.values is None else x.values.dtype
        return FactorForm(form.shape, form.dense, dtype, x.levels.coordinates[0].device.type, form)


class SparseProduct:
    """A product of sparse and dense operands of given forms, by place of the factor; its nests by the rounded counts of
    the operands' positions. pattern: the place of the factor at whose entries the target has values [entries, ...], -1
    if it is dense."""

    bound: BoundStatement
    pattern: int
    choices: IterationChoices

    def __init__(
        self,
        bound: BoundStatement,
        factors: Sequence[Factor],
        pattern: int = -1,
        choices: IterationChoices = IterationChoices(),  # noqa: B008 (immutable)
    ) -> None:
        self.bound, self.pattern, self.choices = bound, pattern, choices
        self.forms: tuple[FactorForm, ...] = tuple(map(FactorForm.of, factors))
        self.sparse: list[int] = [place for place, form in enumerate(self.forms) if form.stored is not None]
        self._refused = self._refusal()
        self._planned = BoundedCache[PlannedProduct](256)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return next(f.dtype for f in self.forms if f.dtype is not None and f.dtype.is_floating_point)

    def _refusal(self) -> str | None:
        """The reason why no operands of these forms are computed by nests over levels here, or None."""
        statement = self.bound.statement
        if statement.reduction != "sum" or not all(isinstance(f, Access) for f in statement.terms[0].factors):
            return "it is not a sum of products of operands"
        if not any(f.dtype is not None and f.dtype.is_floating_point for f in self.forms):
            return "no factor is of a floating-point dtype"
        if any(f.device != "cpu" for f in self.forms):
            return "the operands are not on a CPU"
        if why := nest_c.unavailable():
            return why
        shapes = (form.shape for form in self.forms)
        if not all((*self.bound.extents.values(), *self.bound.shape, *(n for shape in shapes for n in shape))):
            return "it is empty"
        if any(form.stored is not None and len(form.stored.axes) > MOST_LEVELS for form in self.forms):
            return f"an operand has more than {MOST_LEVELS} levels"
        return None

    def ready(self, factors: Sequence[Factor]) -> ReadyProduct | str:
        """The product of these operands, or the reason why it is not computed by nests over levels here."""
        if self._refused is not None:
            return self._refused
        values = [x if isinstance(x, Tensor) else x.values for x in factors]
        if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in values]):
            return "an operand takes gradients"
        held, keys = list[Fibers | None](), list[Hashable]()
        for x in factors:
            found = None
            if not isinstance(x, Tensor):
                if not x.entries:
                    return "it is empty"
                if (found := x.levels.fibers) is None:
                    return "entries of an operand have the same coordinates"
                keys.append(found.key)
            held.append(found)
        planned = self._planned.get(tuple(keys)) or self._planned.keep(tuple(keys), self._plan(held))
        return planned.refused or ReadyProduct(planned, held, values)

    def _plan(self, held: Sequence[Fibers | None]) -> PlannedProduct:
        bound, levels = self.bound, [() if found is None else found.levels for found in held]
        ranges = tuple((name, extent.start, extent.stop) for name, extent in bound.ranges.items())
        accesses = (f for f in bound.statement.terms[0].factors if isinstance(f, Access))
        given = zip(accesses, self.forms, levels, strict=True)
        iterated = tuple(IteratedAccess(access, form.shape, each) for access, form, each in given)
        symbols = LevelProduct(bound.statement.target, bound.shape, iterated, ranges, self.pattern)
        return PlannedProduct(self, symbols, tuple(found is not None and found.order is not None for found in held))


@dataclass(frozen=True, eq=False)
class PlannedProduct:
    """A product of operands with about these counts of positions. ordered: see Fibers.order, by factor."""

    product: SparseProduct
    symbols: LevelProduct
    ordered: tuple[bool, ...]

    @cached_property
    def refused(self) -> str | None:
        """The reason why it is no nest, or None."""
        return refused(self.symbols)

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """The places of the sparse factors that are best used in dense form."""
        if len(self.product.sparse) == 1:
            return ()
        found = densified(self.symbols)
        sizes = (math.prod(self.product.forms[place].shape) for place in found)
        return found if all(size <= MOST_ELEMENTS for size in sizes) else ()

    @cached_property
    def nest(self) -> PreparedNest:
        product = self.product
        dtype = torch.float64 if product.dtype == torch.float64 else torch.float32
        nest = loop_nest(self.symbols, product.choices)
        skipped = len(nest.factors[product.pattern].levels) if product.pattern >= 0 else 0
        axes, loops = range(skipped, len(nest.target.indices)), [name for step in nest.steps for name in step.indices]
        target = _Array.of(nest.target, axes, product.pattern >= 0, nest.vector, ())
        arrays = [
            _Array.of(f.access, form.dense, bool(f.levels), nest.vector, loops)
            for f, form in zip(nest.factors, product.forms, strict=True)
        ]
        along = tuple(bool(nest.vector) and nest.vector in a.indices for a in (target, *arrays))
        length = product.bound.extents[nest.vector] if nest.vector else 1
        tiles = widths(length, nest_c.lanes_of(dtype)[1]) if nest.vector and not nest.sums else []
        arrays = [
            a._replace(tiles=tuple(tiles)) if has and len(tiles) > 1 and self.reused(n) else a
            for n, (a, has) in enumerate(zip(arrays, along[1:], strict=True))
        ]
        valued = tuple(form.dtype is not None for form in product.forms)
        reads = FactorReads(along, valued, self.ordered, tuple(bool(a.tiles) for a in arrays))
        code = emitted(nest, reads, length, nest_c.lanes_of(dtype))
        return PreparedNest(product, nest, code, target, tuple(arrays), dtype)

    def reused(self, place: int) -> bool:
        """True if each value of a dense factor is read so often that it may be copied, and they are many."""
        values = math.prod(self.product.forms[place].shape)
        dense = not self.symbols.factors[place].levels and values >= _MANY
        return dense and values * _REUSED <= products_of(self.symbols)

    @property
    def source(self) -> str:
        """The loop nest, and its C source."""
        return f"{self.nest.nest}\n\n{self.nest.code.source}"


class ReadyProduct(NamedTuple):
    """A product and its operands: levels of sparse ones, and values."""

    planned: PlannedProduct
    fibers: list[Fibers | None]
    values: list[Tensor | None]

    def levels(self, factor: int) -> Fibers:
        found = self.fibers[factor]
        assert found is not None
        return found

    def run(self) -> Tensor:
        """The target, or its values at the entries of the pattern."""
        product = self.planned.product
        result, dtype = self.planned.nest.run(self), product.dtype
        if (coefficient := product.bound.statement.terms[0].coefficient) != 1:
            result *= coefficient
        return result if result.dtype == dtype else result.to(dtype)


class _Array(NamedTuple):
    """The array of an operand's values: expressions of its axes, behind one of the entries if stored sparse; order: of
    the axes as a nest reads and writes them, that of the vector index last; tiles: of the vector index, by which the
    array is stored, () if it is not."""

    axes: tuple[Affine, ...]
    stored: bool
    order: tuple[int, ...]
    tiles: tuple[int, ...] = ()

    @staticmethod
    def of(access: Access, axes: Sequence[int], stored: bool, vector: str, loops: Sequence[str]) -> _Array:
        """loops: the indices whose loops give the order of the other axes if the array is copied; () keeps it."""
        expressions = tuple(access.indices[axis] for axis in axes)
        order, at = [*range(len(expressions))], [n for n, e in enumerate(expressions) if vector and e.bare == vector]
        if at and at[0] != order[-1]:
            order.remove(at[0])
            depths = {name: depth for depth, name in enumerate(loops)}
            order.sort(key=lambda n: max((depths.get(name, -1) for name in indices_of(expressions[n])), default=-1))
            order.append(at[0])
        return _Array(expressions, stored, tuple(order))

    @property
    def indices(self) -> tuple[str, ...]:
        return indices_of(*self.axes)

    def held(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The values as a nest reads them."""
        if self.tiles:
            return _tiled(x, self.order, self.tiles, dtype)
        kept = self.order == _IN_ORDER[: len(self.order)]
        return x if kept and x.dtype == dtype and x.is_contiguous() else _copied(x, self._permutation(), dtype)

    def _permutation(self) -> tuple[int, ...]:
        return (*_IN_ORDER[: self.stored], *(n + self.stored for n in self.order))

    def shape(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The sizes of the axes as a nest reads and writes them."""
        return tuple(sizes[n] for n in self.order)

    def restored(self, x: Tensor) -> Tensor:
        if self.order == _IN_ORDER[: len(self.order)]:
            return x
        permutation = self._permutation()
        return x.permute([permutation.index(n) for n in range(x.ndim)]).contiguous()

    def strides(self, sizes: Sequence[int]) -> dict[str, int]:
        """Elements (of tiles: rows) between neighbouring points of each index; "": what constants add. sizes: of the
        axes."""
        found, stride = {"": 0}, 1
        for axis in reversed(self.order):
            expression, size = self.axes[axis], 1 if self.tiles and axis == self.order[-1] else sizes[axis]
            for coefficient, atom in expression.terms:
                found[str(atom)] = found.get(str(atom), 0) + coefficient * stride
            found[""] += expression.constant * stride
            stride *= size
        return found


_IN_ORDER = tuple(range(64))


@cached_per_values
def _tiled(x: Tensor, axes: tuple[int, ...], tiles: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    rows = x.permute(axes).to(dtype).flatten(0, -2) if x.ndim > 1 else x.to(dtype)[None]
    return torch.cat([part.reshape(-1) for part in rows.split(tiles, 1)])


@cached_per_values
def _copied(x: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return x.permute(axes).to(dtype).contiguous()


@dataclass(frozen=True, eq=False)
class PreparedNest:
    """A nest with its code, and the arrays of target and factors."""

    product: SparseProduct
    nest: LoopNest
    code: Emitted
    target: _Array
    arrays: tuple[_Array, ...]
    dtype: torch.dtype

    @cached_property
    def function(self) -> Callable[[int, int, int], None]:
        """The compiled nest: (address of the parallel region, threads, address of the integers)."""
        found = nest_c.library(self.code.source)["run"]
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p), None
        return found

    @cached_property
    def arguments(self) -> _Arguments:
        return _ArgumentBuilder(self).built()

    def run(self, ready: ReadyProduct) -> Tensor:
        given, pattern = self.arguments, self.product.pattern
        shape = given.shape if pattern < 0 else (ready.levels(pattern).entries, *given.shape)
        require_memory(shape, self.dtype, _CPU, "the target")
        result, threads = torch.zeros(shape, dtype=self.dtype, device=_CPU), torch.get_num_threads()
        held = [result]
        for values, each in zip(ready.values, self.arrays, strict=True):
            held.append(result if values is None else each.held(values, self.dtype))
        numbers, hints = given.numbers(ready, held, threads)
        self.function(parallel_region(), threads, numbers.buffer_info()[0])
        del hints  # Until here, as the held arrays.
        return self.target.restored(result)


_CPU = torch.device("cpu")
_OF_LEVELS = {"pos", "crd", "table", "hash_keys", "mask", "order", "coordinates"}


class _Arguments(NamedTuple):
    """The integers that a nest's C function takes, see iterate_c.Emitted: `known` for all operands of the forms, and
    the places of the others among them.

    shape: of the target, or of its part at an entry of the pattern. shared: the range of the loop that is shared among
    threads; its end is None if it is over the entries of the factor `whole`. tasks: per thread, 0 if it is not shared.
    values: (place, array, offset in bytes) of addresses of the target (0) and of the factors; levels: by factor,
    (place, place in Fibers.numbers); hints: (place, factor, depth) of where searches ended; held: the place of their
    number; last: that of the range's end."""

    known: array[int]
    shape: tuple[int, ...]
    shared: tuple[int, int | None]
    whole: int
    tasks: int
    values: Sequence[tuple[int, int, int]]
    levels: Sequence[tuple[int, Sequence[tuple[int, int]]]]
    hints: Sequence[tuple[int, int, int]]
    held: int
    last: int

    def numbers(self, ready: ReadyProduct, held: Sequence[Tensor], threads: int) -> tuple[array[int], Tensor | None]:
        """The integers, and the memory of hints that they refer to. held: the arrays of target and factors."""
        found, (first, last) = self.known[:], self.shared
        last = ready.levels(self.whole).entries if last is None else last
        tasks = min(max(1, last - first), self.tasks * threads) or 1
        each = max(1, -(-(last - first) // tasks))
        found[1], found[3], found[self.last] = -(-(last - first) // each), each, last
        for place, number, offset in self.values:
            found[place] = held[number].data_ptr() + offset
        for factor, places in self.levels:
            numbers = ready.levels(factor).numbers
            for place, at in places:
                found[place] = numbers[at]
        return found, self._with_hints(found, ready, threads) if self.hints else None

    def _with_hints(self, found: array[int], ready: ReadyProduct, threads: int) -> Tensor:
        """Adds the addresses of memory for hints, whose values may be any."""
        starts, total = list[int](), 0
        for _, factor, depth in self.hints:
            starts.append(total)
            total += ready.levels(factor).positions[depth - 1] if depth else 1
        memory = torch.empty(threads * total, dtype=torch.int32, device=_CPU)
        first = memory.data_ptr()
        for (place, _, _), start in zip(self.hints, starts, strict=True):
            found[place] = first + 4 * start
        found[self.held] = total
        return memory


class _ArgumentBuilder:
    """Sorts the arguments of a nest by what they depend on."""

    def __init__(self, prepared: PreparedNest) -> None:
        self.prepared, self.nest, self.product = prepared, prepared.nest, prepared.product
        self.layouts, pattern = (prepared.target, *prepared.arrays), self.product.pattern
        skipped = len(self.nest.factors[pattern].levels) if pattern >= 0 else 0
        self.sizes = [self.product.bound.shape[skipped:]]
        self.sizes += [tuple(form.shape[axis] for axis in form.dense) for form in self.product.forms]
        self.strides = [array.strides(sizes) for array, sizes in zip(self.layouts, self.sizes, strict=True)]

    def built(self) -> _Arguments:
        keys, loop, last, held = self.prepared.code.arguments, self.nest.steps[0].loop, 0, 0
        known, values, hints = array("q", [0] * (HEADER + len(keys))), list[Any](), list[Any]()
        levels = defaultdict[int, list[tuple[int, int]]](list)
        for place, (name, *of) in enumerate(keys, HEADER):
            if name == "values":
                tiled = of[0] >= 0 and self.prepared.arrays[of[0]].tiles
                constant = 0 if tiled else self.strides[of[0] + 1][""]
                values.append((place, of[0] + 1, constant * self.prepared.dtype.itemsize))
            elif name in _OF_LEVELS:
                levels[of[0]].append((place, self.place(str(name), *of)))
            elif name == "hints" and of:
                hints.append((place, *of))
            elif name == "hints":
                held = place
            elif name == "last":
                last = place
            else:
                known[place] = getattr(self, name)(*of)
        whole, tasks = loop.factor if isinstance(loop, EntryLoop) else -1, _TASKS * (self.nest.parallel >= 0)
        shape, lists = self.layouts[0].shape(self.sizes[0]), (values, [*levels.items()], hints)
        return _Arguments(known, shape, self.shared(), whole, tasks, *lists, held, last)

    def place(self, name: str, factor: int, depth: int = 0) -> int:
        form = self.product.forms[factor].stored
        assert form is not None
        return form.place(name, depth)

    def shared(self) -> tuple[int, int | None]:
        nest = self.nest
        if isinstance(nest.steps[0].loop, EntryLoop):
            return 0, None
        if nest.parallel < 0:
            return 0, 1
        extent = self.product.bound.ranges[nest.steps[nest.parallel].indices[0]]
        return extent.start, extent.stop

    def first(self) -> int:
        return self.shared()[0]

    def start(self, index: str) -> int:
        return self.product.bound.ranges[index].start

    def stop(self, index: str) -> int:
        return self.product.bound.ranges[index].stop

    def length(self) -> int:
        return self.product.bound.extents[self.nest.vector]

    def size(self, factor: int, axis: int) -> int:
        return (self.product.bound.shape if factor < 0 else self.product.forms[factor].shape)[axis]

    def constant(self, factor: int, axis: int) -> int:
        access = self.nest.target if factor < 0 else self.nest.factors[factor].access
        return access.indices[axis].constant

    def stride(self, factor: int, index: str) -> int:
        return self.strides[factor + 1][index]

    def offset(self, factor: int) -> int:
        return self.strides[factor + 1][""]

    def rows(self, factor: int) -> int:
        sizes = self.sizes[factor + 1]
        return math.prod(sizes) // sizes[self.prepared.arrays[factor].order[-1]]

    def span(self, factor: int) -> int:
        return math.prod(self.sizes[factor + 1])
