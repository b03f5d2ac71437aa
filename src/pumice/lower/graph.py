"""Statements as torch.fx graphs: gather each factor over its own indices, one einsum for a term, scatter to the target.

A graph depends on the statement and the dtypes. It reads sizes from the operands, so one graph serves all sizes, and
uses torch operators only, which torch.compile may fuse.

A factor whose access is out of bounds at a point is 0; the other factors of the point are multiplied as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from pumice.language.bind import BoundStatement, reaches, span_of
from pumice.language.nodes import (
    Access,
    Affine,
    Equal,
    Exists,
    Factor,
    Index,
    Range,
    Statement,
    Term,
    accesses_of,
    indices_of,
)
from pumice.lower.reference import (
    WRAPS,
    dtypes_of,
    equal_dtype,
    equals,
    identity_value,
    read_names,
    tops_of,
    working_dtype,
)
from pumice.runtime.cache import BoundedCache

LIMIT = 16 << 30
"""Bytes of gathered operands at which `refusal` refuses."""


class Setting(NamedTuple):
    """Specialisation key of a graph, besides the statement.

    dtypes: of the operands; result: dtype of the result; low: half-precision products use the device's tensor cores,
    which accumulate in float32; in_bounds: accesses that are in bounds at every point; int64_expressions: index
    expressions whose values may not fit in int64.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...]
    result: torch.dtype
    low: bool = False
    in_bounds: frozenset[Access] = frozenset()
    int64_expressions: frozenset[Affine] = frozenset()


class IndexedTensor(NamedTuple):
    """A tensor with an axis for each index, in this order. In a mask an axis may have size 1, to be broadcast."""

    tensor: Any
    indices: tuple[str, ...]


class PreparedGraph(NamedTuple):
    """A graph and its arguments."""

    module: fx.GraphModule
    arguments: tuple[Any, ...]


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate any statement; a new tensor of `dtype`. On a CPU a long index is processed in cache-sized pieces."""
    piece = _piece(bound) if all(x.device.type == "cpu" for x in operands.values()) else None
    if piece is None:
        return _whole(bound, operands, dtype)
    parts = []
    for start in range(0, bound.extent(piece.index), piece.length):
        length = min(piece.length, bound.extent(piece.index) - start)
        cut = dict(operands)
        for name, axis in piece.axes:
            cut[name] = operands[name].narrow(axis, start, length)
        parts.append(_whole(_part(bound, piece, length), cut, dtype))
    return torch.cat(parts, dim=piece.axis)


def _whole(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    module, arguments = prepare(bound, operands, dtype)
    return module(*arguments)


class Piece(NamedTuple):
    """An index processed in pieces of `length`. axis: its axis of the target; axes: (operand, axis)."""

    index: str
    length: int
    axis: int
    axes: tuple[tuple[str, int], ...]


CACHED = 1 << 19
"""Points per piece, whose gathered values (some MiB) fit the cache."""


@lru_cache(maxsize=4096)
def _piece(bound: BoundStatement) -> Piece | None:
    """The longest target index that can be cut (see _axes_of); None without one or if nothing is gathered."""
    statement = bound.statement
    accesses = accesses_of(*statement.terms)
    gathers = any(e.arrays for access in accesses for e in access.indices)
    if not gathers or statement.reduction != "sum" or len(statement.terms) != 1 or statement.accumulate:
        return None
    for index in sorted(indices_of(statement.target), key=bound.extent, reverse=True):
        axes = _axes_of(index, statement)
        rest = bound.points(indices_of(*statement.terms)) // max(1, bound.extent(index))
        length = max(256, CACHED // max(1, rest))
        if axes is not None and bound.extent(index) >= 4 * length and not statement.declared(index):
            axis = next(i for i, e in enumerate(statement.target.indices) if e.bare == index)
            return Piece(index, length, axis, axes)
    return None


def _axes_of(index: str, statement: Statement) -> tuple[tuple[str, int], ...] | None:
    """(operand, axis) of each use of an index; None if it occurs in an expression, or on two axes of one operand."""
    found: dict[str, set[int]] = {}
    everywhere = (statement.target, *accesses_of(*statement.terms, *statement.target.indices))
    for access in everywhere:
        for axis, expression in enumerate(access.indices):
            if index in (atom.name for _, atom in expression.terms if isinstance(atom, Index)):
                if expression.bare is None:
                    return None
                found.setdefault(access.name, set()).add(axis)
    own = found.pop(statement.target.name, set())
    if len(own) != 1 or any(len(axes) != 1 for axes in found.values()):
        return None
    # An operand that is also read without the index cannot be sliced.
    if any(a.name in found and index not in [e.bare for e in a.indices] for a in everywhere):
        return None
    return tuple((name, axes.pop()) for name, axes in found.items())


@lru_cache(maxsize=4096)
def _part(bound: BoundStatement, piece: Piece, length: int) -> BoundStatement:
    shape = tuple(length if axis == piece.axis else n for axis, n in enumerate(bound.shape))
    return replace(bound, ranges={**bound.ranges, piece.index: Range(0, length)}, shape=shape)


def prepare(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> PreparedGraph:
    """The cached graph for these operands, and its arguments."""
    key = (bound, dtype, *((name, x.dtype, x.device) for name, x in operands.items()))
    known = _KNOWN.get(key) or _KNOWN.keep(key, _built(bound, operands, dtype))
    module, names, last = known
    return PreparedGraph(module, (*(operands[name] for name in names), last))


def _built(
    bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[fx.GraphModule, tuple[str, ...], tuple[int, ...]]:
    """(graph, names of its operands, its argument `sizes`)."""
    names = read_names(bound.statement) or tuple(operands)
    tensors = [operands[name] for name in names]
    dtypes = tuple((name, operands[name].dtype) for name in names)
    low = bool(tensors) and tensors[0].is_cuda
    setting = Setting(dtypes, dtype, low, _inside(bound, operands), _far(bound, operands))
    return graph(bound.statement, names, setting), names, sizes(bound)


_KNOWN: BoundedCache[tuple[fx.GraphModule, tuple[str, ...], tuple[int, ...]]] = BoundedCache(4096)


def sizes(bound: BoundStatement) -> tuple[int, ...]:
    """The last argument of a graph: the end of each index's range, then the target's shape."""
    return (*(bound.ranges[name].stop for name in indices_of(bound.statement)), *bound.shape)


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why the graph should not run on these operands, or None."""
    most = max((len(indices_of(term)) for term in statement.terms), default=0)
    if most > len(ascii_letters):
        return f"a term has {most} indices; einsum takes {len(ascii_letters)}"
    width = working_dtype(statement, dtypes_of(operands), torch.float32).itemsize
    count = max((_gathered(term, bound) for term in statement.terms), default=0)
    if statement.reduction != "sum":
        count = max(count, bound.points(indices_of(statement)))
    if count * width > LIMIT:
        return f"the gathered operands would take {count * width / 2**30:.1f} GiB, the limit is {LIMIT / 2**30:.1f} GiB"
    return None


@lru_cache(maxsize=1024)
def graph(statement: Statement, names: tuple[str, ...], setting: Setting) -> fx.GraphModule:
    """The statement as a module with arguments `names`, in this order, and `sizes`."""
    made = fx.Graph()
    operands = {name: fx.Proxy(made.placeholder(f"operand{place}")) for place, name in enumerate(names)}
    builder = _Builder(statement, setting, operands, fx.Proxy(made.placeholder("sizes")))
    made.output(builder.result().node)
    made.eliminate_dead_code()
    made.lint()
    return fx.GraphModule(torch.nn.Module(), made)


# Functions that graphs call besides torch's own operators.
def points(start: int, stop: int, like: Tensor | None) -> Tensor:
    """The values of an index, int64 on like's device."""
    return torch.arange(start, stop, device=None if like is None else like.device)


def filled(shape: Sequence[int], value: float, dtype: torch.dtype, like: Tensor | None) -> Tensor:
    return torch.full(tuple(shape), value, dtype=dtype, device=None if like is None else like.device)


def readable(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Pad axes of extent 0 to 1, so that masked reads have an element."""
    for axis in axes:
        if x.shape[axis] == 0:
            x = pad(x, [0, 0] * (x.ndim - axis - 1) + [0, 1])
    return x


def extreme(x: Tensor, axes: Sequence[int], largest: bool) -> Tensor:
    """The largest or smallest values along the axes; the identity of max or min if empty."""
    if 0 in x.shape:
        shape = [n for axis, n in enumerate(x.shape) if axis not in axes]
        return x.new_full(shape, identity_value(x.dtype, largest))
    return x.amax(list(axes)) if largest else x.amin(list(axes))


class _Builder:
    """Builds the graph of one statement; tensors are fx proxies."""

    def __init__(self, statement: Statement, setting: Setting, operands: Mapping[str, Any], sizes: Any) -> None:
        self.statement, self.setting, self.operands, self.sizes = statement, setting, operands, sizes
        self.dtypes = dict(setting.dtypes)
        self.dtype = working_dtype(statement, self.dtypes, setting.result)
        self.names = indices_of(statement)
        self.like = next(iter(operands.values()), None)
        self.made: dict[Any, Any] = {}

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.sizes.tracer.create_proxy("call_function", function, arguments, {})

    def once(self, make: Callable[[Any], Any], key: Any) -> Any:
        """make(key), cached."""
        full = (make.__name__, key)
        if full not in self.made:
            self.made[full] = make(key)
        return self.made[full]

    # Sizes
    def start(self, name: str) -> int:
        declared = self.statement.declared(name)
        return 0 if declared is None else declared.start

    def extent(self, name: str) -> Any:
        """Number of values of an index: an integer if declared, else the extent of an axis where it is bare."""
        declared = self.statement.declared(name)
        return self.once(self._extent, name) if declared is None else len(declared)

    def _extent(self, name: str) -> Any:
        for access in accesses_of(self.statement):
            for axis, expression in enumerate(access.indices):
                if expression.bare == name and access.name in self.operands:
                    return self.operands[access.name].shape[axis]
        return self.sizes[self.names.index(name)]

    def extents(self, names: Sequence[str]) -> list[Any]:
        return [self.extent(name) for name in names]

    def length(self, axis: int) -> Any:
        """The target's extent on an axis."""
        return self.once(self._length, axis)

    def _length(self, axis: int) -> Any:
        if self.statement.accumulate:
            return self.operands[self.statement.target.name].shape[axis]
        return self.sizes[len(self.names) + axis]

    # Positions
    def points(self, name: str) -> Any:
        start = self.start(name)
        return self.call(points, start, self.extent(name) + start if start else self.extent(name), self.like)

    def position(self, expression: Affine) -> tuple[IndexedTensor, IndexedTensor | None]:
        """(value of an index expression; mask of valid array values, None if implied by bounds)."""
        names = indices_of(expression)
        total: Any = None
        about: Any = float(expression.constant)
        conditions: list[IndexedTensor | None] = []
        for coefficient, atom in expression.terms:
            if isinstance(atom, Index):
                part = IndexedTensor(self.once(self.points, atom.name), (atom.name,))
            else:
                part, there = self.read(atom)
                part = IndexedTensor(part.tensor.to(torch.int64), part.indices)
                conditions.append(there)
                if len(expression.terms) > 1 or coefficient < 0 or expression.constant > 0:
                    conditions.append(IndexedTensor(part.tensor >= 0, part.indices))
            value = aligned(part, names)
            if expression in self.setting.int64_expressions:
                about = value.to(torch.float64) * float(coefficient) + about
            value = value if coefficient == 1 else value * coefficient
            total = value if total is None else total + value
        if total is None:
            total = self.call(filled, (), expression.constant, torch.int64, self.like)
        elif expression.constant:
            total = total + expression.constant
        if expression in self.setting.int64_expressions:
            conditions.append(IndexedTensor(abs(about) < WRAPS, names))
        return IndexedTensor(total, names), both(conditions)

    def place(
        self, access: Access, axes: Sequence[int], lengths: Sequence[Any]
    ) -> tuple[list[IndexedTensor], IndexedTensor | None]:
        """(positions along the axes, 0 if out of bounds; mask of points in bounds, None for all)."""
        positions, conditions = [], []
        for axis, length in zip(axes, lengths, strict=True):
            position, there = self.once(self.position, access.indices[axis])
            if access.indices[axis].bare is None and access not in self.setting.in_bounds:
                value = position.tensor
                there = both([there, IndexedTensor((value >= 0) & (value < length), position.indices)])
            if there is not None:
                value = self.call(torch.where, aligned(there, position.indices), position.tensor, 0)
                position = IndexedTensor(value, position.indices)
            positions.append(position)
            conditions.append(there)
        return positions, both(conditions)

    # Factors
    def read(self, access: Access) -> tuple[IndexedTensor, IndexedTensor | None]:
        """(values of an access, 0 if out of bounds; mask of points in bounds, None for all)."""
        return self.once(self._read, access)

    def _read(self, access: Access) -> tuple[IndexedTensor, IndexedTensor | None]:
        x = self.operands[access.name]
        looked = looked_up(access)
        lengths = [x.shape[axis] for axis in looked]
        names = [expression.bare for expression in access.indices]
        for axis, name in enumerate(names):
            if axis not in looked and name and self.start(name):
                x = x.narrow(axis, self.start(name), self.extent(name))
        if not looked:
            return diagonal(IndexedTensor(x, tuple(filter(None, names)))), None
        positions, there = self.place(access, looked, lengths)
        if there is not None:
            x = self.call(readable, x, looked)
        part = diagonal(self._gathered(x, names, looked, positions))
        if there is not None:
            part = IndexedTensor(part.tensor.masked_fill(~aligned(there, part.indices), 0), part.indices)
        return part, there

    def _gathered(
        self, x: Any, names: Sequence[str | None], looked: Sequence[int], positions: Sequence[IndexedTensor]
    ) -> IndexedTensor:
        """Gather x at positions along the axes `looked`; the other axes are kept."""
        kept = [axis for axis in range(len(names)) if axis not in looked]
        if len(looked) == 1:
            (axis,), (position,) = looked, positions
            before, after = tuple(map(str, names[:axis])), tuple(map(str, names[axis + 1 :]))
            value = self.call(torch.index_select, x, axis, position.tensor.reshape(-1))
            if len(position.indices) != 1:
                shape = [x.shape[other] for other in range(len(names))]
                value = value.reshape([*shape[:axis], *self.extents(position.indices), *shape[axis + 1 :]])
            return IndexedTensor(value, (*before, *position.indices, *after))
        grid = tuple(dict.fromkeys(name for position in positions for name in position.indices))
        x = x.permute(*looked, *kept) if [*looked, *kept] != sorted((*looked, *kept)) else x
        # Permuted positions would permute the result's strides, which the tracer of torch 2.13 gets wrong.
        found = [aligned(p, grid).contiguous() if grid else p.tensor.reshape(1) for p in positions]
        value = x[tuple(found)] if grid else x[tuple(found)].squeeze(0)
        return IndexedTensor(value, (*grid, *(str(names[axis]) for axis in kept)))

    def factor(self, factor: Factor, dtype: torch.dtype) -> tuple[IndexedTensor, IndexedTensor | None]:
        """(a factor in `dtype`, 0 if out of bounds; mask of points in bounds, None for all)."""
        if isinstance(factor, Access):
            part, there = self.read(factor)
            same = self.dtypes[factor.name] == dtype
            return (part if same else IndexedTensor(part.tensor.to(dtype), part.indices)), there
        if isinstance(factor, Exists):
            return self._exists(factor.access, dtype), None
        return self._equal(factor, dtype)

    def _exists(self, access: Access, dtype: torch.dtype) -> IndexedTensor:
        names = indices_of(access)
        there = self.read(access)[1]
        if there is None:
            one = self.call(filled, (), 1, dtype, self.like)
            return IndexedTensor(one.expand(*self.extents(names)) if names else one, names)
        return IndexedTensor(self.whole(there, names).to(dtype), names)

    def _equal(self, factor: Equal, dtype: torch.dtype) -> tuple[IndexedTensor, IndexedTensor | None]:
        part, there = self.read(factor.access)
        other, others = self.elementwise(factor.terms, equal_dtype(factor, self.dtypes))
        names = tuple(dict.fromkeys((*part.indices, *other.indices)))
        value = self.call(equals, aligned(part, names), aligned(other, names))
        there = both([there, others])
        if there is not None:
            value = value & aligned(there, names)
        return IndexedTensor(value.to(dtype), names), there

    # Terms
    def elementwise(self, terms: Sequence[Term], dtype: torch.dtype) -> tuple[IndexedTensor, IndexedTensor | None]:
        """(sum of the terms at every point of their indices; mask where all factors are in bounds, None for all)."""
        names = indices_of(*terms)
        conditions: list[IndexedTensor | None] = []
        total: Any = None
        for term in terms:
            value: Any = None if term.coefficient == 1 and term.factors else self.constant(term.coefficient, dtype)
            for factor in term.factors:
                part, there = self.factor(factor, dtype)
                conditions.append(there)
                value = aligned(part, names) if value is None else value * aligned(part, names)
            total = value if total is None else total + value
        return IndexedTensor(self.constant(0, dtype) if total is None else total, names), both(conditions)

    def constant(self, value: float, dtype: torch.dtype) -> Any:
        return self.call(filled, (), value, dtype, self.like)

    def term(self, term: Term) -> IndexedTensor:
        """The term, summed over the indices that are not in the target."""
        dtype = self.product_dtype(term)
        parts = [self.factor(factor, dtype)[0] for factor in term.factors]
        tensors = [part for part in parts if part.indices]
        needed = [n for n in indices_of(self.statement.target) if any(n in part.indices for part in parts)]
        found = contracted(self.call, tensors, tuple(needed)) if tensors else IndexedTensor(None, ())
        value = None if found.tensor is None else found.tensor.to(self.dtype)
        for part in parts:
            if not part.indices:
                scalar = part.tensor.to(self.dtype)
                value = scalar if value is None else value * scalar
        if value is None:
            value = self.constant(term.coefficient, self.dtype)
        elif term.coefficient != 1:
            value = value * term.coefficient
        return IndexedTensor(value, found.indices)

    def product_dtype(self, term: Term) -> torch.dtype:
        kinds = {self.dtypes[f.name] for f in term.factors if isinstance(f, Access)}
        kinds = {kind for kind in kinds if kind.is_floating_point}
        low = self.setting.low and self.dtype == torch.float32 and len(kinds) == 1
        return kinds.pop() if low else self.dtype

    # The target
    def whole(self, part: IndexedTensor, names: Sequence[str]) -> Any:
        """The tensor expanded to all points of these indices."""
        return aligned(part, names).expand(*self.extents(names)) if names else part.tensor

    def scatter(self, part: IndexedTensor, how: str = "sum", fill: float = 0) -> Any:
        """Scatter the values into a new target of `fill`; points whose position is out of bounds are dropped."""
        target = self.statement.target
        looked = looked_up(target, distinct=True)
        kept = [axis for axis in range(len(target.indices)) if axis not in looked]
        columns = tuple(str(target.indices[axis].bare) for axis in kept)
        if not looked:
            return self._padded(self.whole(part, columns), kept, 0)
        rows = tuple(dict.fromkeys(n for axis in looked for n in indices_of(target.indices[axis])))
        value = self.whole(part, (*rows, *columns))
        if len(rows) != 1:
            value = value.flatten(0, len(rows) - 1) if rows else value.unsqueeze(0)
        value = self._padded(value, kept, 1)
        entries, count = self.once(self._entries, rows)
        shape = [self.length(axis) for axis in kept]
        start = value.new_full([count + 1, *shape], fill)
        if how == "sum":
            written = start.index_add(0, entries, value)
        else:
            spread = entries.reshape([-1, *[1] * len(kept)]).expand_as(value)
            written = start.scatter_reduce(0, spread, value, how)
        written = written.narrow(0, 0, count).reshape([*(self.length(axis) for axis in looked), *shape])
        order = [*looked, *kept]
        return written.permute(*map(order.index, sorted(order))) if order != sorted(order) else written

    def _entries(self, rows: tuple[str, ...]) -> tuple[Any, Any]:
        """(position of each point in the flattened looked-up axes, `count` if out of bounds; count)."""
        target = self.statement.target
        looked = looked_up(target, distinct=True)
        lengths = [self.length(axis) for axis in looked]
        positions, there = self.place(target, looked, lengths)
        entries, count = aligned(positions[0], rows), lengths[0]
        for position, length in zip(positions[1:], lengths[1:], strict=True):
            entries, count = entries * length + aligned(position, rows), count * length
        if there is not None:
            entries = self.call(torch.where, aligned(there, rows), entries, count)
        return self.whole(IndexedTensor(entries, rows), rows).reshape(-1), count

    def _padded(self, value: Any, axes: Sequence[int], first: int) -> Any:
        """Zero-pad declared ranges that do not start at 0; the target's `axes` are those of `value` from `first` on."""
        names = [str(self.statement.target.indices[axis].bare) for axis in axes]
        if not any(map(self.start, names)):
            return value
        sides: list[Any] = []
        for axis, name in zip(reversed(axes), reversed(names), strict=True):
            start = self.start(name)
            sides += [start, self.length(axis) - (start + self.extent(name)) if start else 0]
        return self.call(pad, value, sides)

    # The result
    def result(self) -> Any:
        old = self.operands[self.statement.target.name].to(self.dtype) if self.statement.accumulate else None
        total = self._sum(old) if self.statement.reduction == "sum" else self._joined(old)
        total = total.to(self.setting.result)
        return total.clone(memory_format=torch.contiguous_format) if self._viewed() else total.contiguous()

    def _viewed(self) -> bool:
        """True if the result may be a view of an operand."""
        factors = [factor for term in self.statement.terms for factor in term.factors]
        gathered = any(looked_up(factor) for factor in factors if isinstance(factor, Access))
        return len(factors) <= 1 and not gathered and not self.statement.accumulate

    def _sum(self, old: Any) -> Any:
        total = old
        for term in self.statement.terms:
            value = self.scatter(self.term(term))
            total = value if total is None else total + value
        if total is None:
            shape = [self.length(axis) for axis in range(len(self.statement.target.indices))]
            total = self.call(filled, shape, 0, self.dtype, self.like)
        return total

    def _joined(self, old: Any) -> Any:
        """max, min, mean over the full index grid; a point counts only if all factors are in bounds."""
        how = self.statement.reduction
        value, there = self.elementwise(self.statement.terms, self.dtype)
        kept = indices_of(self.statement.target)
        nest = tuple(dict.fromkeys((*kept, *value.indices)))
        reduced = list(range(len(kept), len(nest)))
        there = there or IndexedTensor(self.call(filled, (), 1, torch.bool, self.like), ())
        counted, values = self.whole(there, nest), self.whole(value, nest)
        fill = 0 if how == "mean" else identity_value(self.dtype, how == "max")
        values = self.call(torch.where, counted, values, fill)
        counted = counted.to(torch.int64)
        if reduced:
            counted = counted.sum(reduced)
            values = values.sum(reduced) if how == "mean" else self.call(extreme, values, reduced, how == "max")
        count = self.scatter(IndexedTensor(counted, kept))
        total = self.scatter(IndexedTensor(values, kept), {"mean": "sum", "max": "amax", "min": "amin"}[how], fill)
        if how == "mean":
            return total / count.clamp(min=1)
        if old is None:
            return self.call(torch.where, count > 0, total, 0)
        join = torch.maximum if how == "max" else torch.minimum
        return self.call(torch.where, count > 0, self.call(join, total, old), old)


def contracted(call: Callable[..., Any], parts: Sequence[IndexedTensor], wanted: tuple[str, ...]) -> IndexedTensor:
    """The product of the parts, summed over all indices but `wanted`."""
    if len(parts) == 1 and set(parts[0].indices) == set(wanted):
        return parts[0]
    letters = dict(zip(dict.fromkeys(n for part in parts for n in part.indices), ascii_letters, strict=False))
    sides = ("".join(letters[name] for name in names) for names in (*(part.indices for part in parts), wanted))
    *left, right = sides
    return IndexedTensor(call(torch.einsum, f"{','.join(left)}->{right}", *(part.tensor for part in parts)), wanted)


def looked_up(access: Access, distinct: bool = False) -> tuple[int, ...]:
    """The axes to gather or scatter along: not bare, or sharing an index with one; distinct: or a repeated index."""
    bare = [expression.bare for expression in access.indices]
    shared = set(indices_of(*(expression for expression in access.indices if not expression.bare)))
    if distinct:
        shared |= {name for name in bare if name and bare.count(name) > 1}
    return tuple(axis for axis, name in enumerate(bare) if name is None or name in shared)


def aligned(part: IndexedTensor, names: Sequence[str]) -> Any:
    """The tensor with its axes in the order of `names`, size 1 for missing ones."""
    tensor = part.tensor
    order = sorted(range(len(part.indices)), key=lambda axis: names.index(part.indices[axis]))
    if order != list(range(len(order))):
        tensor = tensor.permute(*order)
    if len(names) > len(order):
        tensor = tensor[tuple(slice(None) if name in part.indices else None for name in names)]
    return tensor


def diagonal(part: IndexedTensor) -> IndexedTensor:
    """Take diagonals of repeated indices: one axis per index."""
    tensor, names = part
    while len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        first = names.index(twice)
        second = names.index(twice, first + 1)
        tensor = tensor.diagonal(0, first, second)
        names = (*(name for axis, name in enumerate(names) if axis not in (first, second)), twice)
    return IndexedTensor(tensor, names)


def both(conditions: Sequence[IndexedTensor | None]) -> IndexedTensor | None:
    """The logical and of masks; None if there are none."""
    parts = list(dict.fromkeys(part for part in conditions if part is not None))
    names = tuple(dict.fromkeys(name for part in parts for name in part.indices))
    held: Any = None
    for part in parts:
        held = aligned(part, names) if held is None else held & aligned(part, names)
    return None if held is None else IndexedTensor(held, names)


def _inside(bound: BoundStatement, operands: Mapping[str, Tensor]) -> frozenset[Access]:
    """The accesses without index arrays that are in bounds at every point."""
    target = bound.statement.target
    found = {target} if _is_in_bounds(target, bound.shape, bound) else set()
    accesses = accesses_of(*target.indices, *bound.statement.terms)
    return frozenset(found.union(a for a in accesses if _is_in_bounds(a, operands[a.name].shape, bound)))


def _far(bound: BoundStatement, operands: Mapping[str, Tensor]) -> frozenset[Affine]:
    """The index expressions whose values may not fit in int64."""
    shapes = {name: x.shape for name, x in operands.items()}
    found = reaches(bound, bound.statement.target, shapes, tops_of(operands))
    return frozenset(e for e, (low, high) in found.items() if low < -(1 << 63) or high >= 1 << 63)


def _is_in_bounds(access: Access, shape: Sequence[int], bound: BoundStatement) -> bool:
    return all(_fits(e, extent, bound) for e, extent in zip(access.indices, shape, strict=True))


def _fits(expression: Affine, extent: int, bound: BoundStatement) -> bool:
    if expression.arrays:
        return False
    if not bound.points(indices_of(expression)):
        return True
    low, high = span_of(expression, bound.ranges)
    return low >= 0 and high < extent


def _gathered(term: Term, bound: BoundStatement) -> int:
    """Number of values gathered for the term."""
    read = [f for f in term.factors if not isinstance(f, Access) or looked_up(f)]
    return sum(bound.points(indices_of(factor)) for factor in read)
