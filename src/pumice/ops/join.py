"""Joins of sparse operands: neighbour retrieval, masked statements and products of sparse tensors.

    rows = every combination of one entry of each sparse factor, and indices, that satisfies all their coordinates

computed factor by factor: the coordinates that are known by then are looked up by binary search in the sorted entries
of the next factor. An index that several coordinates leave open (the window of a convolution) is either tried at each
of its points, or solved for in each entry found, whichever makes fewer rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pumice.errors import OptionError
from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import declare, fresh
from pumice.language.formats import Format, Level
from pumice.language.meet import (
    Aggregation,
    Flattened,
    StoredAxes,
    aggregation,
    meets,
    position_axes,
    refusal,
    sized,
    with_pattern,
)
from pumice.language.nodes import Access, Affine, Index, Range, Statement, accesses_of, indices_of
from pumice.language.rewrite import single_terms
from pumice.ops import autograd
from pumice.ops.convert import Entries, FormatBucket, arrange, raveled
from pumice.ops.operands import flatten_used
from pumice.ops.sparse import Sparse

MOST_ROWS = 1 << 26
"""Rows of a join at which it is refused: half a GiB for each index."""

_NOWHERE = -(1 << 62)  # a position outside every operand


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a join. indices: by index, its value in each row; entries: by place of a factor, the entry's position;
    arrays: index arrays, by name."""

    count: int
    device: torch.device
    indices: Mapping[str, Tensor]
    entries: Mapping[int, Tensor]
    arrays: Mapping[str, Tensor]

    def taken(self, rows: Tensor) -> Rows:
        """The rows at these numbers, or where the mask is True."""
        indices = {name: x[rows] for name, x in self.indices.items()}
        entries = {place: x[rows] for place, x in self.entries.items()}
        count = len(rows) if rows.dtype != torch.bool else int(rows.sum())
        return Rows(count, self.device, indices, entries, self.arrays)

    def value(self, expression: Affine) -> Tensor:
        """The constant and the terms that are known in each row; _NOWHERE if an index array holds nothing there."""
        total = torch.full((self.count,), expression.constant, dtype=torch.int64, device=self.device)
        there = torch.ones_like(total, dtype=torch.bool)
        for coefficient, atom in expression.terms:
            if set(indices_of(atom)) <= self.indices.keys():
                value = self.indices[atom.name] if isinstance(atom, Index) else self.read(atom)
                total += coefficient * value
                there &= value >= 0
        return torch.where(there, total, _NOWHERE)

    def read(self, access: Access) -> Tensor:
        """The values of an index array in each row, -1 outside it."""
        array, there = self.arrays[access.name], torch.ones(self.count, dtype=torch.bool, device=self.device)
        positions = []
        for expression, extent in zip(access.indices, array.shape, strict=True):
            positions.append(self.value(expression))
            there &= (positions[-1] >= 0) & (positions[-1] < extent)
        if not array.numel():
            return torch.full_like(positions[0], -1)
        return torch.where(there, array[tuple(torch.where(there, p, 0) for p in positions)].long(), -1)

    def with_points(self, name: str, points: Range) -> Rows:
        """Each row at every point of an index."""
        values = torch.arange(points.start, points.stop, device=self.device)
        rows = torch.arange(self.count, device=self.device).repeat_interleave(len(values))
        found = self.taken(rows)
        return replace(found, indices={**found.indices, name: values.repeat(self.count)})


@dataclass(frozen=True, eq=False)
class Side:
    """A sparse factor of a join: its coordinates, one list for each of `expressions`, and the extents of these axes."""

    place: int
    access: Access
    expressions: tuple[Affine, ...]
    coordinates: tuple[Tensor, ...]
    extents: tuple[int, ...]

    @property
    def entries(self) -> int:
        return self.coordinates[0].shape[0]

    def unknown(self, known: Mapping[str, Any]) -> tuple[str, ...]:
        """The indices that are not known and stand in a sum, so that no coordinate of this factor gives them."""
        bare = {e.bare for e in self.expressions}
        return tuple(name for name in indices_of(*self.expressions) if name not in known and name not in bare)

    def solvable(self, known: Mapping[str, Any]) -> Callable[[Affine], bool]:
        """Whether a coordinate gives all unknown indices of an expression: at most one, and not within an array."""
        unknown = set(self.unknown(known))
        return lambda e: len(unknown.intersection(indices_of(e))) <= (not unknown.intersection(indices_of(*e.arrays)))


def join(sides: Sequence[Side], ranges: Mapping[str, Range], arrays: Mapping[str, Tensor]) -> Rows:
    """The rows of a join. arrays: the index arrays that coordinates read. Raises OptionError if they are too many."""
    rows, left = Rows(1, sides[0].coordinates[0].device, {}, {}, arrays), list(sides)
    while left:
        side = min(left, key=lambda s: (len(s.unknown(rows.indices)), s.entries if len(left) == len(sides) else 0))
        left.remove(side)
        rows = _joined(rows, side, ranges)
    return rows


def _joined(rows: Rows, side: Side, ranges: Mapping[str, Range]) -> Rows:
    """The rows with every entry of the factor that fits them."""
    tried = [name for name in side.unknown(rows.indices) if name in ranges]
    points = rows.count * math.prod(len(ranges[name]) for name in tried)
    search = _EntrySearch.of(rows, side)
    if tried and (search is None or points < search.total):
        _check_rows(points, side)
        for name in tried:
            rows = rows.with_points(name, ranges[name])
        search = _EntrySearch.of(rows, side)
    assert search is not None
    _check_rows(search.total, side)
    return _solved(search.found(rows), side, rows.indices, ranges)


def _check_rows(count: int, side: Side) -> None:
    if count > MOST_ROWS:
        raise OptionError(
            f"{side.access} meets the other sparse operands in {count} combinations of entries, expected at most "
            f"{MOST_ROWS}: too few of its coordinates are known from them; pass one of the operands dense"
        )


@dataclass(frozen=True, eq=False)
class _EntrySearch:
    """The entries of a factor that have the known coordinates of each row: `counts` from `first` on, in `order`."""

    order: Tensor
    first: Tensor
    counts: Tensor
    total: int
    place: int

    @staticmethod
    def of(rows: Rows, side: Side) -> _EntrySearch | None:
        """None if a coordinate does not give all indices of its expression."""
        known = [n for n, e in enumerate(side.expressions) if set(indices_of(e)) <= rows.indices.keys()]
        if not all(map(side.solvable(rows.indices), side.expressions)):
            return None
        there = torch.ones(rows.count, dtype=torch.bool, device=rows.device)
        wanted = torch.zeros(rows.count, dtype=torch.int64, device=rows.device)
        keys = torch.zeros(side.entries, dtype=torch.int64, device=rows.device)
        for number in known:
            value, extent = rows.value(side.expressions[number]), side.extents[number]
            there &= (value >= 0) & (value < extent)
            wanted = wanted * extent + value
            keys = keys * extent + side.coordinates[number].long()
        keys, order = torch.sort(keys)
        first = torch.searchsorted(keys, wanted)
        counts = torch.where(there, torch.searchsorted(keys, wanted, right=True) - first, 0)
        return _EntrySearch(order, first, counts, int(counts.sum()), side.place)

    def found(self, rows: Rows) -> Rows:
        """A row for each of these entries."""
        numbers = torch.arange(rows.count, device=rows.device).repeat_interleave(self.counts)
        start = self.counts.cumsum(0) - self.counts
        rank = torch.arange(self.total, device=rows.device) - start[numbers]
        made = rows.taken(numbers)
        return replace(made, entries={**made.entries, self.place: self.order[self.first[numbers] + rank]})


def _solved(rows: Rows, side: Side, known: Mapping[str, Any], ranges: Mapping[str, Range]) -> Rows:
    """The rows with the indices that the coordinates of their entries give, without those that contradict."""
    every = zip(side.expressions, side.coordinates, strict=True)
    for expression, coordinates in sorted(every, key=lambda each: each[0].bare is None):
        if set(indices_of(expression)) <= known.keys():
            continue
        rest = coordinates[rows.entries[side.place]].long() - rows.value(expression)
        left = [
            (c, atom.name) for c, atom in expression.terms if isinstance(atom, Index) and atom.name not in rows.indices
        ]
        if not left:
            rows = rows.taken(rest == 0)
            continue
        ((coefficient, name),) = left
        found = torch.div(rest, coefficient, rounding_mode="floor")
        fits = (found * coefficient == rest) & (found >= ranges[name].start) & (found < ranges[name].stop)
        rows = replace(rows, indices={**rows.indices, name: found}).taken(fits)
    return rows


# Statements
def stored(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The operands, sparse ones in formats that give each entry its coordinates, or dense if all their levels are."""
    found = {name: _entrywise(x) if isinstance(x, Sparse) else x for name, x in operands.items()}
    return {name: x for name, x in found.items() if not isinstance(x, int)}


def _entrywise(x: Sparse) -> Sparse | Tensor:
    if x.layout.position is None and x.layout.group is None:
        return x.to_dense()
    if any(level.kind in "GB" for level in x.format.levels):
        return x.to_format(Format(x.format.axes, (Level(x.format.axes, "C"),)))
    return x


def joined_einsum(statement: Statement, operands: Mapping[str, Any], lowering: str) -> Tensor | Sparse:
    """Evaluate a statement that takes a join; a Sparse if the target has a pattern or positions."""
    operands = stored(operands)
    if statement.positions:
        return _retrieved(statement, operands)
    bound = bind(statement, {name: tuple(x.shape) for name, x in operands.items()})
    total = operands[statement.target.name] if statement.accumulate else None
    for step in single_terms(replace(statement, accumulate=False)):
        read = {access.name for access in accesses_of(step)}
        given = {name: x for name, x in operands.items() if name in read and name != statement.target.name}
        found = _term(replace(step, text=statement.text), given, bound, lowering)
        total = found if total is None else total + found
    return torch.zeros(bound.shape) if total is None else total


def _term(step: Statement, operands: Mapping[str, Any], bound: BoundStatement, lowering: str) -> Any:
    sparse = _stored_axes(operands)
    coordinates = {name: axes.coordinates for name, axes in sparse.items()}
    if not step.pattern and not meets(step.terms[0], coordinates):
        text = str(declare(step, bound.ranges))
        tensors, names, _ = flatten_used(text, operands, ())
        return autograd.einsum(tensors, names, text, bound.shape, lowering)
    if (reason := refusal(step, step.terms[0], sparse)) is not None:
        raise reason
    step = step if step.pattern else with_pattern(step, sparse)
    found = aggregation(step, sparse, [name for name in sparse if operands[name].parts[0].values is None])
    rows = join(_sides(step, operands, sparse), bound.ranges, operands)
    result = _aggregated(found, operands, replace(bound, statement=step), rows, lowering)
    return result if bound.statement.pattern or isinstance(result, Tensor) else result.to_dense()


def _stored_axes(operands: Mapping[str, Any]) -> dict[str, StoredAxes]:
    return {name: StoredAxes.of(x.format) for name, x in operands.items() if isinstance(x, Sparse)}


def _sides(step: Statement, operands: Mapping[str, Any], sparse: Mapping[str, StoredAxes]) -> list[Side]:
    found = []
    for place, factor in enumerate(step.terms[0].factors):
        if isinstance(factor, Access) and factor.name in sparse:
            x, axes = operands[factor.name], sparse[factor.name].coordinates
            coordinates = tuple(x.parts[0].coords[x.format.axes[n]] for n in axes)
            expressions = tuple(factor.indices[n] for n in axes)
            found.append(Side(place, factor, expressions, coordinates, tuple(x.shape[n] for n in axes)))
    return found


def _aggregated(
    found: Aggregation, operands: Mapping[str, Any], bound: BoundStatement, rows: Rows, lowering: str
) -> Tensor | Sparse:
    """The second statement, evaluated over the rows of the join."""
    shapes = {name: x.shape for name, x in operands.items()} | {bound.statement.target.name: bound.shape}
    arrays = {name: _array(source, rows, shapes) for name, source in found.arrays.items()}
    statement, order = declare(found.statement, bound.ranges), found.order()
    if order is not None:
        by = torch.argsort(arrays[order], stable=True)
        arrays = {name: x[by] for name, x in arrays.items()}
        statement = replace(statement, facts=(*statement.facts, (order, "sorted")))
    read = {access.name for access in accesses_of(statement)}
    given = {name: x for name, x in (_values(found, operands) | arrays).items() if name in read}

    def evaluated(shape: Sequence[int]) -> Tensor:
        return autograd.einsum([*given.values()], "|".join(given), str(statement), shape, lowering)

    if pattern := bound.statement.pattern:
        like = operands[pattern]
        values = evaluated((_entries(like), *bound.shape[len(StoredAxes.of(like.format).coordinates) :]))
        if found.scale:
            values = values * operands[found.scale].parts[0].values.reshape(-1, *[1] * (values.ndim - 1))
        return _with_pattern(values, like, bound)
    if found.target is None:
        return evaluated(bound.shape)
    return _unflat(evaluated(_flat_shape(bound.shape, found.target)), found.target, bound.shape)


def _entries(x: Sparse) -> int:
    return next(iter(x.parts[0].coords.values())).shape[0]


def _values(found: Aggregation, operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """The dense operands, flattened ones, and the values of sparse ones, by their names in the second statement."""
    given: dict[str, Tensor] = {name: x for name, x in operands.items() if isinstance(x, Tensor)}
    given.update((name, operands[operand].parts[0].values) for name, operand in found.values.items())
    given.update((name, _flat(operands[flat.name], flat)) for name, flat in found.flattened.items())
    return given


def _array(source: str | int | Flattened, rows: Rows, shapes: Mapping[str, Sequence[int]]) -> Tensor:
    if isinstance(source, str):
        return rows.indices[source]
    if isinstance(source, int):
        return rows.entries[source]
    extents = [shapes[source.name][axis] for axis in source.axes]
    return raveled([rows.indices[name] for name in source.indices], extents)


def _order(flat: Flattened, count: int) -> list[int]:
    return [*flat.axes, *(axis for axis in range(count) if axis not in flat.axes)]


def _flat_shape(shape: Sequence[int], flat: Flattened) -> tuple[int, ...]:
    first, *rest = [shape[axis] for axis in flat.axes], *[n for axis, n in enumerate(shape) if axis not in flat.axes]
    return math.prod(first), *rest


def _flat(x: Tensor, flat: Flattened) -> Tensor:
    return x.permute(_order(flat, x.ndim)).reshape(_flat_shape(x.shape, flat))


def _unflat(x: Tensor, flat: Flattened, shape: Sequence[int]) -> Tensor:
    order = _order(flat, len(shape))
    return x.reshape([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])


def _with_pattern(values: Tensor, like: Sparse, bound: BoundStatement) -> Sparse:
    """A sparse tensor of these values [entries, ...] at the coordinates of `like`, with dense axes behind them."""
    levels, taken = like.format.flattened, list(like.format.axes)
    names = [axis for axis in like.format.axes if any(axis in level.axes for level in levels)]
    more = []
    for expression in bound.statement.target.indices[len(names) :]:
        more.append(fresh(str(expression.bare), taken))
        taken.append(more[-1])
    format = Format((*names, *more), (*levels, *(Level((name,), "U") for name in more)))
    coords = {axis: like.parts[0].coords[axis] for axis in names}
    return Sparse(format, bound.shape, (FormatBucket(coords, values),), values.numel())


def _retrieved(statement: Statement, operands: Mapping[str, Any]) -> Sparse:
    """The positions of the entries that meet."""
    sparse = _stored_axes(operands)
    if not sparse:
        raise OptionError(f"`{statement.text or statement}` finds positions of sparse operands, and all are dense")
    if (reason := refusal(statement, statement.terms[0], sparse)) is not None:
        raise reason
    factors = {place: f for place, f in enumerate(statement.terms[0].factors) if isinstance(f, Access)}
    axes = {place: position_axes(factor, sparse) for place, factor in factors.items()}
    names = {place: [factors[place].indices[axis].bare or "" for axis in axes[place]] for place in factors}
    bound = bind(sized(statement), {name: tuple(x.shape) for name, x in operands.items()})
    rows = join(_sides(statement, operands, sparse), bound.ranges, operands)
    dense = [place for place, factor in factors.items() if factor.name not in sparse]
    for name in dict.fromkeys(name for place in dense for name in names[place]):
        rows = rows if name in rows.indices else rows.with_points(name, bound.ranges[name])
    found, extents = dict[str, Tensor](), dict[str, int]()
    for place, factor in factors.items():
        x, shape = operands[factor.name], operands[factor.name].shape[: len(axes[place])]
        extents[factor.name] = math.prod(shape) if place in dense else _entries(x)
        own = raveled([rows.indices[name] for name in names[place]], shape) if place in dense else rows.entries[place]
        found[factor.name] = own
    return _as_pattern(statement, found, extents)


def _as_pattern(statement: Statement, found: Mapping[str, Tensor], extents: Mapping[str, int]) -> Sparse:
    of = dict(statement.positions)
    names = [str(expression.bare) for expression in statement.target.indices]
    shape = tuple(extents[of[name]] for name in names)
    entries = Entries(tuple(found[of[name]] for name in names), None, shape)
    # Grouped by the smallest axis, in a convolution the offsets of its window.
    first = min(names, key=lambda name: extents[of[name]])
    format = Format(tuple(names), (Level((first, *(name for name in names if name != first)), "C"),))
    resolved, parts = arrange(entries, format, "count")
    return Sparse(resolved, shape, parts, len(entries))
