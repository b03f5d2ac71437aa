"""Joins of sparse operands: neighbour retrieval, masked statements and products of sparse tensors.

    rows = every combination of one entry of each sparse factor, and indices, that satisfies all their coordinates

Where the entries of one factor lie in a window around those of another, the kernels of pumice.coords find them as a
kernel map. Other factors are joined one by one: the coordinates that are known by then are looked up by binary search
in the sorted entries of the next factor. An index that several coordinates leave open (the window of a convolution) is
either tried at each of its points, or solved for in each entry found, whichever makes fewer rows.

Maps and sorted entries are kept with the coordinates, for calls with other values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.errors import CoordinateError, OptionError
from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import declare, fresh
from pumice.language.formats import Format, Level
from pumice.language.meet import (
    Flattened,
    Source,
    StoredAxes,
    Window,
    aggregation,
    meets,
    position_axes,
    refusal,
    sized,
    window_of,
    with_pattern,
)
from pumice.language.nodes import Access, Affine, Index, Range, Statement, Term, accesses_of, indices_of
from pumice.language.rewrite import single_terms
from pumice.lower import maps, plan
from pumice.ops import autograd
from pumice.ops.convert import FormatBucket, raveled
from pumice.ops.operands import flatten_used
from pumice.ops.sparse import Sparse
from pumice.runtime.cache import cached_per_tensor

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

    def of(self, source: Source, shapes: Mapping[str, Sequence[int]]) -> Tensor:
        """What each row is on an axis of a pattern. shapes: of the operands."""
        if isinstance(source, Flattened):
            extents = [shapes[source.name][axis] for axis in source.axes]
            return raveled([self.indices[name] for name in source.indices], extents)
        return self.entries[source] if isinstance(source, int) else self.indices[source]


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

    def solvable(self, known: Mapping[str, Any]) -> bool:
        """True if each coordinate gives all unknown indices of its expression: at most one, not within an array."""
        unknown = set(self.unknown(known))
        return all(
            len(unknown.intersection(indices_of(e))) <= (not unknown.intersection(indices_of(*e.arrays)))
            for e in self.expressions
        )


def join(rows: Rows, sides: Sequence[Side], ranges: Mapping[str, Range]) -> Rows:
    """The rows with the entries of further factors. Raises OptionError if they are too many."""
    left = list(sides)
    while left:
        side = min(left, key=lambda s: (len(s.unknown(rows.indices)), 0 if rows.entries else s.entries))
        left.remove(side)
        rows = _joined(rows, side, ranges)
    return rows


def _joined(rows: Rows, side: Side, ranges: Mapping[str, Range]) -> Rows:
    """The rows with every entry of the factor that fits them."""
    tried = [name for name in side.unknown(rows.indices) if name in ranges]
    points = rows.count * math.prod(len(ranges[name]) for name in tried)
    search = _EntrySearch.of(rows, side) if side.solvable(rows.indices) else None
    if search is None or (tried and points < search.total):
        _check_rows(points, side)
        for name in tried:
            rows = rows.with_points(name, ranges[name])
        search = _EntrySearch.of(rows, side)
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
    def of(rows: Rows, side: Side) -> _EntrySearch:
        known = [n for n, e in enumerate(side.expressions) if set(indices_of(e)) <= rows.indices.keys()]
        extents = tuple(side.extents[n] for n in known)
        keys, order, distinct = _sorted_entries(*(side.coordinates[n] for n in known or (0,)), extents=extents)
        there = torch.ones(rows.count, dtype=torch.bool, device=rows.device)
        wanted = torch.zeros(rows.count, dtype=torch.int64, device=rows.device)
        for number, extent in zip(known, extents, strict=True):
            value = rows.value(side.expressions[number])
            there &= (value >= 0) & (value < extent)
            wanted = wanted * extent + value
        first = torch.searchsorted(keys, wanted)
        if distinct:
            counts = (there & (keys[first.clamp(max=len(keys) - 1)] == wanted)).long()
        else:
            counts = torch.where(there, torch.searchsorted(keys, wanted, right=True) - first, 0)
        return _EntrySearch(order, first, counts, int(counts.sum()), side.place)

    def found(self, rows: Rows) -> Rows:
        """A row for each of these entries."""
        numbers = torch.arange(rows.count, device=rows.device).repeat_interleave(self.counts)
        start = self.counts.cumsum(0) - self.counts
        rank = torch.arange(self.total, device=rows.device) - start[numbers]
        made = rows.taken(numbers)
        return replace(made, entries={**made.entries, self.place: self.order[self.first[numbers] + rank]})


@cached_per_tensor
def _sorted_entries(*coordinates: Tensor, extents: tuple[int, ...]) -> tuple[Tensor, Tensor, bool]:
    """(sorted row-major keys of entries, their order, True if no key occurs twice). No extents: all keys are 0."""
    lists = [x.long() for x in coordinates]
    keys = raveled(lists, extents) if extents else torch.zeros_like(lists[0])
    keys, order = torch.sort(keys, stable=True)
    return keys, order, len(keys) > 0 and not bool((keys[1:] == keys[:-1]).any())


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


# Kernel maps
@cached_per_tensor
def _geometry(*coordinates: Tensor, axes: tuple[int, ...], extents: tuple[int, ...]) -> Geometry | None:
    """The geometry of entries, with these of their coordinates (-1: none) as its columns; None if entries are equal."""
    none = torch.zeros_like(coordinates[0])
    columns = [none if axis < 0 else coordinates[axis] for axis in axes]
    items, *shape = (1 if axis < 0 else max(1, extents[axis]) for axis in axes)
    try:
        found = Geometry.checked(torch.stack(columns, 1).int(), spatial_shape=shape, batch_size=items)
        found.settle()
    except CoordinateError:
        return None
    return found


@cached_per_tensor
def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


@lru_cache(maxsize=256)
def _relation(window: Window, policy: str) -> Relation:
    return Relation.of_offsets(len(window.stride), window.offsets, stride=window.stride, policy=policy).shared()


def map_of(window: Window, base: Side, other: Side) -> KernelMap | None:
    """The kernel map of a window: its outputs are the entries of `base`. None if it is too large, or entries equal."""
    if base.entries * len(window.offsets) > MOST_ROWS:
        return None
    own, others = zip(*window.columns, strict=True)
    inputs = outputs = _geometry(*other.coordinates, axes=others, extents=other.extents)
    lists = ((base.coordinates[n], other.coordinates[m]) for n, m in window.columns if n >= 0)
    if not (same := all(_equal(one, two) for one, two in lists)):
        outputs = _geometry(*base.coordinates, axes=own, extents=base.extents)
    if outputs is None or inputs is None:
        return None
    same = same and {*window.stride} == {1}
    return kernel_map(inputs, _relation(window, "same" if same else "given"), None if same else outputs)[0]


def _pairs(found: KernelMap, turned: bool = False) -> dict[str, Tensor]:
    """The lists o, k, i of the pairs of a map, by k and then outputs. turned: it is the transpose of map[o, k, i]."""
    return dict(zip("iko" if turned else "oki", maps.form_operands(found, "pairs")[1], strict=True))


def _rows_of_map(found: KernelMap, window: Window, base: Side, arrays: Mapping[str, Tensor]) -> Rows:
    """The pairs of a map as rows of a join."""
    pairs = {role: x.long() for role, x in _pairs(found).items()}
    every = zip(base.expressions, base.coordinates, strict=True)
    indices, rest = {str(e): x[pairs["o"]].long() for e, x in every}, pairs["k"]
    for name, points in reversed(window.taps):
        indices[name], rest = rest % len(points) + points.start, rest // len(points)
    return Rows(len(rest), found.device, indices, {window.base: pairs["o"], window.other: pairs["i"]}, arrays)


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


def _stored_axes(operands: Mapping[str, Any]) -> dict[str, StoredAxes]:
    return {name: StoredAxes.of(x.format) for name, x in operands.items() if isinstance(x, Sparse)}


def _shapes(operands: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in operands.items()}


def _entries(x: Sparse) -> int:
    return next(iter(x.parts[0].coords.values())).shape[0]


class Joined:
    """A statement that takes a join, planned for operands of given shapes and formats.

    lowering: of the statements over the result of the join."""

    def __init__(self, statement: Statement, operands: Mapping[str, Any], lowering: str) -> None:
        operands, self.terms = stored(operands), list[_Term]()
        self.positions = _Positions(statement, operands) if statement.positions else None
        if self.positions is not None:
            return
        bound = bind(statement, _shapes(operands))
        self.total, self.shape = statement.target.name if statement.accumulate else "", bound.shape
        for step in single_terms(replace(statement, accumulate=False)):
            step = replace(step, text=statement.text)
            read = {access.name for access in accesses_of(step)} - {step.target.name}
            self.terms.append(_Term(step, {n: x for n, x in operands.items() if n in read}, bound, lowering))

    def __call__(self, operands: Mapping[str, Any]) -> Tensor | Sparse:
        """The result; a Sparse if the target has a pattern or positions."""
        operands = stored(operands)
        if self.positions is not None:
            return self.positions.found(operands)
        total = operands[self.total] if self.total else None
        for term in self.terms:
            found = term.evaluated({name: operands[name] for name in term.read})
            total = found if total is None else total + found
        return torch.zeros(self.shape) if total is None else total


@dataclass(frozen=True, eq=False)
class _Meeting:
    """What meets in a term: a pattern whose axes are `sources`, by name.

    shapes: of the operands and the target. window: in which two of the factors meet, or None."""

    term: Term
    sources: Mapping[str, Source]
    ranges: Mapping[str, Range]
    shapes: Mapping[str, Sequence[int]]
    window: Window | None

    @cached_property
    def roles(self) -> dict[str, str]:
        """The axes by their roles in the window's kernel map, in order; empty if they are not those of the map."""
        every = self.sources.items()
        roles = {} if self.window is None else {self.window.role(source): name for name, source in every}
        return roles if {*roles} == {"o", "k", "i"} and len(every) == 3 else {}

    @cached_property
    def turned(self) -> bool:
        """True if the axes are those of the map's transpose."""
        return bool(self.roles) and [*self.roles].index("i") < [*self.roles].index("o")

    def sides(self, operands: Mapping[str, Any]) -> dict[int, Side]:
        """The sparse factors, by place."""
        found = {}
        for place, factor in enumerate(self.term.factors):
            if isinstance(factor, Access) and isinstance(x := operands[factor.name], Sparse):
                axes = StoredAxes.of(x.format).coordinates
                coordinates = tuple(x.parts[0].coords[x.format.axes[n]] for n in axes)
                expressions, extents = (tuple(each[n] for n in axes) for each in (factor.indices, x.shape))
                found[place] = Side(place, factor, expressions, coordinates, extents)
        return found

    def map(self, sides: Mapping[int, Side]) -> KernelMap | None:
        """The kernel map of the window, if there is one."""
        return None if self.window is None else map_of(self.window, sides[self.window.base], sides[self.window.other])

    def whole_map(self, operands: Mapping[str, Any]) -> KernelMap | None:
        """The kernel map that is the pattern, turned as the axes are; None if it is not one."""
        found = self.map(self.sides(operands)) if self.roles else None
        return found.transpose() if found is not None and self.turned else found

    def lists(self, operands: Mapping[str, Any]) -> dict[str, Tensor]:
        """The coordinates of the pattern by a join, from the pairs of a kernel map on if there is one."""
        sides = self.sides(operands)
        rows = Rows(1, next(iter(sides.values())).coordinates[0].device, {}, {}, operands)
        if self.window is not None and (found := self.map(sides)) is not None:
            rows = _rows_of_map(found, self.window, sides[self.window.base], operands)
        rows = join(rows, [side for place, side in sides.items() if place not in rows.entries], self.ranges)
        for source in self.sources.values():
            for name in source.indices if isinstance(source, Flattened) else ():
                rows = rows if name in rows.indices else rows.with_points(name, self.ranges[name])
        return {name: rows.of(source, self.shapes) for name, source in self.sources.items()}


def _format(names: Sequence[str], first: str) -> Format:
    """A pattern stored as lists of coordinates, sorted by one of its axes."""
    return Format(tuple(names), (Level((first, *(name for name in names if name != first)), "C"),))


def _in_order(lists: Mapping[str, Tensor], key: Tensor) -> dict[str, Tensor]:
    """The lists sorted by a key."""
    if bool((key[1:] >= key[:-1]).all()):
        return dict(lists)
    order = torch.argsort(key, stable=True)
    return {name: x[order] for name, x in lists.items()}


class _Term:
    """A statement of one term."""

    def __init__(self, step: Statement, operands: Mapping[str, Any], bound: BoundStatement, lowering: str) -> None:
        sparse, self.shape, self.lowering, self.read = _stored_axes(operands), bound.shape, lowering, [*operands]
        self.meeting, self.text, self.pattern = None, str(declare(step, bound.ranges)), step.pattern
        if not step.pattern and not meets(step.terms[0], {name: axes.coordinates for name, axes in sparse.items()}):
            return
        if (reason := refusal(step, step.terms[0], sparse)) is not None:
            raise reason
        shapes = _shapes(operands) | {step.target.name: bound.shape}
        window = window_of(step.terms[0], sparse, bound.ranges, shapes)
        step = step if step.pattern else with_pattern(step, sparse)
        patterns = [name for name in sparse if operands[name].parts[0].values is None]
        self.second = aggregation(step, sparse, patterns, window)
        self.meeting = _Meeting(step.terms[0], self.second.sources, bound.ranges, shapes, window)
        self.text = str(declare(self.second.statement, bound.ranges))
        self.format, self.target = _format([*self.second.sources], self.second.first), step.target.name
        self.like = step.pattern
        self.made = _with_dense_axes(operands[step.pattern].format, step) if step.pattern else None

    def evaluated(self, operands: Mapping[str, Any]) -> Tensor | Sparse:
        """The result, by the first way that applies; a Sparse if the statement has a pattern."""
        if self.meeting is None:
            tensors, names, _ = flatten_used(self.text, operands, ())
            return autograd.einsum(tensors, names, self.text, self.shape, self.lowering)
        result = self.over_map(operands)
        result = self.over_join(operands) if result is None else result
        if self.made is None:
            return result
        part = FormatBucket(dict(operands[self.like].parts[0].coords), result)
        found = Sparse(self.made, self.shape, (part,), result.numel())
        return found if self.pattern else found.to_dense()

    def over_map(self, operands: Mapping[str, Any]) -> Tensor | None:
        """The result over a kernel map; None if what meets is none."""
        if (found := self.meeting.whole_map(operands)) is None:
            return None
        values = self.values(operands)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in values.values())
        tokens, arrays = maps.planner_operands(found, differentiable)
        named = (self.second.map + token.removeprefix("map") for token in tokens)
        return self.aggregated(operands, values | dict(zip(named, arrays, strict=True)))

    def over_join(self, operands: Mapping[str, Any]) -> Tensor:
        """The result over the rows of a join."""
        lists = self.meeting.lists(operands)
        lists = _in_order(lists, lists[self.second.first])
        named = {plan.token(self.second.map, str(self.format), 0, axis): x for axis, x in lists.items()}
        return self.aggregated(operands, self.values(operands) | named)

    def values(self, operands: Mapping[str, Any]) -> dict[str, Tensor]:
        """The operands of the second statement by name: dense ones, some flattened, and the values of sparse ones."""
        flat = {name: axes for name, axes in self.second.flattened.items() if name != self.target}
        kept = {*operands} - {axes.name for axes in flat.values()}
        given = {name: x for name, x in operands.items() if isinstance(x, Tensor) and name in kept}
        given.update((name, operands[operand].parts[0].values) for name, operand in self.second.values.items())
        given.update((name, _flat(operands[axes.name], axes)) for name, axes in flat.items())
        return given

    def aggregated(self, operands: Mapping[str, Any], given: Mapping[str, Tensor]) -> Tensor:
        """The second statement, evaluated: the target, or its values at the entries of the pattern."""
        shape, flat = self.shape, self.second.flattened.get(self.target)
        if self.made is not None:
            like = operands[self.like]
            shape = _entries(like), *shape[len(like.parts[0].coords) :]
        elif flat is not None:
            shape = (
                math.prod(shape[n] for n in flat.axes),
                *(size for n, size in enumerate(shape) if n not in flat.axes),
            )
        result = autograd.einsum([*given.values()], "|".join(given), self.text, shape, self.lowering)
        if self.second.scale:
            scale = operands[self.second.scale].parts[0].values
            return result * scale.reshape(-1, *[1] * (result.ndim - 1))
        if self.made is None and flat is not None:
            order = range(len(flat.axes))
            return result.unflatten(0, [self.shape[n] for n in flat.axes]).movedim([*order], flat.axes)
        return result


def _flat(x: Tensor, flat: Flattened) -> Tensor:
    """The operand with these axes as one, the first."""
    return x.movedim(flat.axes, [*range(len(flat.axes))]).flatten(0, len(flat.axes) - 1)


def _with_dense_axes(format: Format, step: Statement) -> Format:
    """The coordinates of a format, and dense axes for the indices of the target behind them."""
    levels, taken = format.flattened, list(format.axes)
    names = [axis for axis in format.axes if any(axis in level.axes for level in levels)]
    more = []
    for expression in step.target.indices[len(names) :]:
        more.append(fresh(str(expression.bare), taken))
        taken.append(more[-1])
    return Format((*names, *more), (*levels, *(Level((name,), "U") for name in more)))


class _Positions:
    """A statement whose target has positions of its operands as axes."""

    def __init__(self, statement: Statement, operands: Mapping[str, Any]) -> None:
        (term,), sparse, own = statement.terms, _stored_axes(operands), dict[str, Source]()
        if not sparse:
            raise OptionError(f"`{statement.text or statement}` finds positions of sparse operands, and all are dense")
        if (reason := refusal(statement, term, sparse)) is not None:
            raise reason
        for place, access in enumerate(f for f in term.factors if isinstance(f, Access)):
            axes = position_axes(access, sparse)
            flat = Flattened(access.name, axes, tuple(access.indices[axis].bare or "" for axis in axes))
            own[access.name] = place if access.name in sparse else flat
        shapes, of = _shapes(operands), dict(statement.positions)
        ranges, names = bind(sized(statement), shapes).ranges, [str(e.bare) for e in statement.target.indices]
        window, sources = window_of(term, sparse, ranges, shapes), {name: own[of[name]] for name in names}
        self.meeting = _Meeting(term, sources, ranges, shapes, window)
        every = ((operands[of[name]], own[of[name]]) for name in names)
        self.shape = tuple(
            math.prod(x.shape[n] for n in s.axes) if isinstance(s, Flattened) else _entries(x) for x, s in every
        )
        # Grouped by the smallest axis, in a convolution the offsets of its window.
        self.format = _format(names, min(names, key=lambda name: self.shape[names.index(name)]))

    def found(self, operands: Mapping[str, Any]) -> Sparse:
        """The positions of the entries that meet."""
        axes, found = self.format.levels[0].axes, self.meeting.whole_map(operands)
        if found is not None and axes[0] == self.meeting.roles["k"]:
            # Pairs are sorted so.
            lists = {self.meeting.roles[role]: x for role, x in _pairs(found, self.meeting.turned).items()}
        else:
            lists, extents = self.meeting.lists(operands), [self.shape[self.format.axes.index(axis)] for axis in axes]
            lists = _in_order(lists, raveled([lists[axis] for axis in axes], extents))
        part = FormatBucket({axis: lists[axis].int() for axis in self.format.axes}, None)
        return Sparse(self.format, self.shape, (part,), len(lists[axes[0]]))
