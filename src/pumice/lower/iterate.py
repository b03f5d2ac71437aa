"""Products of sparse operands by loop nests over their levels, in C, for float32 and float64 on a CPU.

    O[n,p,q,m] = Mask[n,p,q] * I[n,p+r,q+s,c] * F[r,s,c,m]       direct: no list of the entries that meet is made

An index that stands in dense axes alone becomes the vector index: the last axis of every operand that has it.

Source: "Unified Convolution Framework", 3.2 and 4.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.iteration import (
    EntryLoop,
    IteratedAccess,
    IterationChoices,
    LevelProduct,
    LevelSize,
    LoopNest,
    densified,
    loop_nest,
    refused,
)
from pumice.language.nodes import Access, Affine, indices_of
from pumice.lower import nest_c
from pumice.lower.iterate_c import Emitted, Reads, emitted
from pumice.lower.levels import MOST_LEVELS, Fibers, StoredOperand, fibers
from pumice.lower.nest_form import MOST_ELEMENTS
from pumice.runtime.cache import cached_per_values
from pumice.runtime.native import parallel_region
from pumice.runtime.workspace import require_memory

_TASKS = 8  # Tasks per thread


def _rounded(count: int) -> int:
    """The nearest power of two."""
    return 1 << round(math.log2(max(1, count)))


class _Key(NamedTuple):
    """What a nest depends on of a factor. positions: of the levels, rounded: similar scenes have one nest; shape: of
    the operand; dense: its axes in the array of values; ordered: see Fibers.order."""

    shape: tuple[int, ...]
    levels: tuple[LevelSize, ...]
    dense: tuple[int, ...]
    valued: bool = True
    ordered: bool = False


@dataclass(frozen=True, eq=False)
class SparseProduct:
    """A product of sparse and dense operands, by place of the factor. pattern: the place of the factor at whose entries
    the target has values [entries, ...], -1 if it is dense."""

    bound: BoundStatement
    factors: tuple[StoredOperand | Tensor, ...]
    pattern: int = -1
    choices: IterationChoices = IterationChoices()

    @cached_property
    def fibers(self) -> tuple[Fibers | None, ...]:
        """The levels of sparse factors without repeated entries, None of others."""
        return tuple(None if isinstance(x, Tensor) else fibers(x) for x in self.factors)

    @cached_property
    def keys(self) -> tuple[_Key, ...]:
        """Of the factors, without sparse ones with repeated entries."""
        found = []
        for x, levels in zip(self.factors, self.fibers, strict=True):
            if isinstance(x, Tensor):
                found.append(_Key(tuple(x.shape), (), tuple(range(x.ndim))))
            elif levels is not None:
                rounded = tuple(level._replace(positions=_rounded(level.positions)) for level in levels.levels)
                found.append(_Key(x.shape, rounded, x.dense, x.values is not None, levels.order is not None))
        return tuple(found)

    @property
    def sparse(self) -> Iterator[StoredOperand]:
        return (x for x in self.factors if not isinstance(x, Tensor))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the target, or of its values at the entries of the pattern."""
        if self.pattern < 0:
            return self.bound.shape
        stored = self.factors[self.pattern]
        assert not isinstance(stored, Tensor)
        return stored.entries, *self.bound.shape[len(stored.coordinates) :]


def refusal(product: SparseProduct) -> str | None:
    """The reason why a product is not computed by nests over levels here, or None."""
    statement = product.bound.statement
    if statement.reduction != "sum" or not all(isinstance(f, Access) for f in statement.terms[0].factors):
        return "it is not a sum of products of operands"
    values = [x if isinstance(x, Tensor) else x.values for x in product.factors]
    if not any(x is not None and x.is_floating_point() for x in values):
        return "no factor is of a floating-point dtype"
    tensors = [x.coordinates[0][1] for x in product.sparse] + [x for x in values if x is not None]
    if any(t.device.type != "cpu" for t in tensors):
        return "the operands are not on a CPU"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "an operand takes gradients"
    if why := nest_c.unavailable():
        return why
    if not all((*(t.numel() for t in tensors), *product.bound.extents.values(), *product.bound.shape)):
        return "it is empty"
    if any(len(x.coordinates) > MOST_LEVELS for x in product.sparse):
        return f"an operand has more than {MOST_LEVELS} levels"
    if len(product.keys) < len(product.factors):
        return "entries of an operand have the same coordinates"
    return _refused(product.bound, product.pattern, product.keys)


def dense_places(product: SparseProduct) -> tuple[int, ...]:
    """The places of the sparse factors of a product that `refusal` accepts that are best used in dense form."""
    if sum(not isinstance(x, Tensor) for x in product.factors) == 1:
        return ()
    found = _dense_places(product.bound, product.pattern, product.keys)
    sizes = (math.prod(product.keys[place].shape) for place in found)
    return found if all(size <= MOST_ELEMENTS for size in sizes) else ()


def run(product: SparseProduct, dtype: torch.dtype) -> Tensor:
    """Evaluate a product that `refusal` accepts: the target, or its values at the entries of the pattern."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    require_memory(product.shape, wide, torch.device("cpu"), "the target")
    nest = _prepared(product, wide)
    result = nest.run(product)
    if (coefficient := product.bound.statement.terms[0].coefficient) != 1:
        result *= coefficient
    return result.to(dtype)


def source_of(product: SparseProduct, dtype: torch.dtype) -> str:
    """The loop nest of a product that `refusal` accepts, and its C source."""
    found = _prepared(product, torch.float64 if dtype == torch.float64 else torch.float32)
    return f"{found.nest}\n\n{found.code.source}"


@lru_cache(maxsize=1024)
def _refused(bound: BoundStatement, pattern: int, keys: tuple[_Key, ...]) -> str | None:
    return refused(_symbols(bound, pattern, keys))


@lru_cache(maxsize=1024)
def _dense_places(bound: BoundStatement, pattern: int, keys: tuple[_Key, ...]) -> tuple[int, ...]:
    return densified(_symbols(bound, pattern, keys))


def _symbols(bound: BoundStatement, pattern: int, keys: Sequence[_Key]) -> LevelProduct:
    ranges = tuple((name, extent.start, extent.stop) for name, extent in bound.ranges.items())
    accesses = (f for f in bound.statement.terms[0].factors if isinstance(f, Access))
    factors = tuple(IteratedAccess(a, key.shape, key.levels) for a, key in zip(accesses, keys, strict=True))
    return LevelProduct(bound.statement.target, bound.shape, factors, ranges, pattern)


def _prepared(product: SparseProduct, dtype: torch.dtype) -> PreparedNest:
    return _prepare(product.bound, product.pattern, product.choices, product.keys, dtype)


@lru_cache(maxsize=1024)
def _prepare(
    bound: BoundStatement, pattern: int, choices: IterationChoices, keys: tuple[_Key, ...], dtype: torch.dtype
) -> PreparedNest:
    nest = loop_nest(_symbols(bound, pattern, keys), choices)
    skipped = len(keys[pattern].levels) if pattern >= 0 else 0
    target = _Array.of(nest.target, tuple(range(skipped, len(nest.target.indices))), nest.vector, pattern >= 0)
    arrays = [
        _Array.of(f.access, key.dense, nest.vector, bool(f.levels)) for f, key in zip(nest.factors, keys, strict=True)
    ]
    along = tuple(bool(nest.vector) and nest.vector in a.indices for a in (target, *arrays))
    length = bound.extents[nest.vector] if nest.vector else 1
    reads = Reads(along, tuple(key.valued for key in keys), tuple(key.ordered for key in keys))
    return PreparedNest(nest, emitted(nest, reads, length, nest_c.lanes_of(dtype)), target, tuple(arrays), dtype)


class _Array(NamedTuple):
    """The array of an operand's values: expressions of its axes, behind one of the entries if stored sparse; vector:
    the axis of the vector index, None without."""

    axes: tuple[Affine, ...]
    stored: bool
    vector: int | None

    @staticmethod
    def of(access: Access, axes: Sequence[int], vector: str, stored: bool) -> _Array:
        expressions = tuple(access.indices[axis] for axis in axes)
        at = next((n for n, e in enumerate(expressions) if vector and e.bare == vector), None)
        return _Array(expressions, stored, at)

    @property
    def indices(self) -> tuple[str, ...]:
        return indices_of(*self.axes)

    @property
    def last(self) -> tuple[Affine, ...]:
        """The axes with that of the vector index last."""
        at = len(self.axes) if self.vector is None else self.vector
        return (*self.axes[:at], *self.axes[at + 1 :], *self.axes[at : at + 1])

    def held(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The values as a nest reads them."""
        at = None if self.vector is None else self.vector + self.stored
        if x.dtype == dtype and x.is_contiguous() and at in (None, x.ndim - 1):
            return x
        return _copied(x, at, dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros of the shape, as a nest writes them."""
        if self.vector is None:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        at = self.vector + self.stored
        return torch.zeros(*shape[:at], *shape[at + 1 :], shape[at], dtype=dtype, device="cpu")

    def restored(self, x: Tensor) -> Tensor:
        return x if self.vector is None else x.movedim(-1, self.vector + self.stored).contiguous()

    def strides(self, x: Tensor) -> dict[str, int]:
        """Elements between neighbouring points of each index; "": what constants add."""
        found = {"": 0}
        for expression, stride in zip(self.last, x.stride()[1 if self.stored else 0 :], strict=True):
            for coefficient, atom in expression.terms:
                found[str(atom)] = found.get(str(atom), 0) + coefficient * stride
            found[""] += expression.constant * stride
        return found


@cached_per_values
def _copied(x: Tensor, axis: int | None, dtype: torch.dtype) -> Tensor:
    return (x if axis is None else x.movedim(axis, -1)).to(dtype).contiguous()


@dataclass(frozen=True, eq=False)
class PreparedNest:
    """A nest with its code, and the arrays of target and factors."""

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

    def run(self, product: SparseProduct) -> Tensor:
        result = self.target.empty(product.shape, self.dtype)
        given = (x if isinstance(x, Tensor) else x.values for x in product.factors)
        held = [None if x is None else array.held(x, self.dtype) for x, array in zip(given, self.arrays, strict=True)]
        call = _Call(self, product, (result, *held))
        numbers = array("q", call.numbers())
        self.function(parallel_region(), torch.get_num_threads(), numbers.buffer_info()[0])
        return self.target.restored(result)


class _Call:
    """The integers that a nest's C function takes: see iterate_c.Emitted. arrays: of target and factors."""

    def __init__(self, prepared: PreparedNest, product: SparseProduct, arrays: Sequence[Tensor | None]) -> None:
        self.prepared, self.product, self.arrays = prepared, product, arrays
        layouts = (prepared.target, *prepared.arrays)
        self.strides = [{} if x is None else a.strides(x) for a, x in zip(layouts, arrays, strict=True)]
        self.offsets, self.positions = dict[tuple[int, int], int](), 0
        for n, found in enumerate(product.fibers):
            for depth in range(0 if found is None else len(found.levels)):
                self.offsets[n, depth] = self.positions
                self.positions += found.levels[depth - 1].positions if depth and found else 1
        self.hint_array = torch.zeros(torch.get_num_threads() * self.positions, dtype=torch.int32, device="cpu")

    def numbers(self) -> list[int]:
        first, last = self.shared()
        tasks = 1 if self.prepared.nest.parallel < 0 else min(max(1, last - first), _TASKS * torch.get_num_threads())
        each = max(1, -(-(last - first) // tasks))
        values = [getattr(self, str(key[0]))(*key[1:]) for key in self.prepared.code.arguments]
        return [0, -(-(last - first) // each), 0, each, *values]

    def shared(self) -> tuple[int, int]:
        """The range of the loop that is shared among threads."""
        nest = self.prepared.nest
        if isinstance(loop := nest.steps[0].loop, EntryLoop):
            return 0, len(self.stored(loop.factor).coordinates[0][1])
        if nest.parallel < 0:
            return 0, 1
        extent = self.product.bound.ranges[nest.steps[nest.parallel].indices[0]]
        return extent.start, extent.stop

    def stored(self, factor: int) -> StoredOperand:
        found = self.product.factors[factor]
        assert not isinstance(found, Tensor)
        return found

    def fibers(self, factor: int) -> Fibers:
        found = self.product.fibers[factor]
        assert found is not None
        return found

    def access(self, factor: int) -> Access:
        nest = self.prepared.nest
        return nest.target if factor < 0 else nest.factors[factor].access

    def first(self) -> int:
        return self.shared()[0]

    def last(self) -> int:
        return self.shared()[1]

    def start(self, index: str) -> int:
        return self.product.bound.ranges[index].start

    def stop(self, index: str) -> int:
        return self.product.bound.ranges[index].stop

    def length(self) -> int:
        return self.product.bound.extents[self.prepared.nest.vector]

    def size(self, factor: int, axis: int) -> int:
        return (self.product.bound.shape if factor < 0 else self.product.factors[factor].shape)[axis]

    def constant(self, factor: int, axis: int) -> int:
        return self.access(factor).indices[axis].constant

    def stride(self, factor: int, index: str) -> int:
        return self.strides[factor + 1][index]

    def span(self, factor: int) -> int:
        x = self.arrays[factor + 1]
        return 0 if x is None else x.stride(0)

    def values(self, factor: int) -> int:
        x = self.arrays[factor + 1]
        return 0 if x is None else x.data_ptr() + self.strides[factor + 1][""] * x.element_size()

    def order(self, factor: int) -> int:
        found = self.fibers(factor).order
        return 0 if found is None else found.data_ptr()

    def pos(self, factor: int, depth: int) -> int:
        return self.fibers(factor).pos[depth].data_ptr()

    def crd(self, factor: int, depth: int) -> int:
        return self.fibers(factor).crd[depth].data_ptr()

    def table(self, factor: int, depth: int) -> int:
        return self.fibers(factor).hashes[depth][0].data_ptr()

    def mask(self, factor: int, depth: int) -> int:
        return len(self.fibers(factor).hashes[depth][0]) - 1

    def hash_keys(self, factor: int, depth: int) -> int:
        return self.fibers(factor).hashes[depth][1].data_ptr()

    def hints(self, *level: int) -> int:
        return self.hint_array.data_ptr() + 4 * self.offsets[level[0], level[1]] if level else self.positions

    def coordinates(self, factor: int, depth: int) -> int:
        return self.stored(factor).coordinates[depth][1].data_ptr()
