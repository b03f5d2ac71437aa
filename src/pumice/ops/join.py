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
from typing import Any

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.errors import CoordinateError, OptionError
from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import declare, fresh
from pumice.language.formats import Format, Level
from pumice.language.meet import (
    Aggregation,
    Flattened,
    Source,
    StoredAxes,
    Window,
    aggregation,
    meets,
    over_map,
    position_axes,
    refusal,
    sized,
    window_of,
    with_pattern,
)
from pumice.language.nodes import Access, Affine, Index, Range, Statement, accesses_of, indices_of
from pumice.language.rewrite import single_terms
from pumice.lower import maps
from pumice.ops import autograd
from pumice.ops.convert import Entries, FormatBucket, arrange, raveled
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

    def array(self, source: Source, shapes: Mapping[str, Sequence[int]]) -> Tensor:
        """What an index array over the rows holds. shapes: of dense operands."""
        if isinstance(source, int):
            return self.entries[source]
        if isinstance(source, str):
            return self.indices[source]
        extents = [shapes[source.name][axis] for axis in source.axes]
        return raveled([self.indices[name] for name in source.indices], extents)


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


def _geometries(sides: Mapping[int, Side], window: Window) -> tuple[Geometry | None, ...]:
    places = (window.base, window.other)
    every = zip(map(sides.__getitem__, places), zip(*window.columns, strict=True), strict=True)
    return tuple(_geometry(*side.coordinates, axes=axes, extents=side.extents) for side, axes in every)


@cached_per_tensor
def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def found_map(sides: Mapping[int, Side], window: Window) -> KernelMap | None:
    """The kernel map of a window: its outputs are the entries of `base`; None if it is too large, or entries equal."""
    if sides[window.base].entries * len(window.offsets) > MOST_ROWS:
        return None
    outputs, inputs = _geometries(sides, window)
    if outputs is None or inputs is None:
        return None
    same = outputs is inputs or _equal(outputs.coords, inputs.coords)
    policy, target = ("same", None) if same and {*window.stride} == {1} else ("given", inputs if same else outputs)
    relation = Relation.of_offsets(inputs.dim, window.offsets, stride=window.stride, policy=policy).shared()
    return kernel_map(inputs, relation, target)[0]


def _pairs(found: KernelMap) -> dict[str, Tensor]:
    """The index arrays o, k, i of the pairs of a map, by k and then o."""
    tokens, arrays = maps.form_operands(found, "pairs")
    return {name.rpartition("@")[2]: x for name, x in zip(tokens, arrays, strict=True)}


def _rows_of_map(found: KernelMap, window: Window, base: Side, arrays: Mapping[str, Tensor]) -> Rows:
    """The pairs of a map as rows of a join."""
    pairs = {name: x.long() for name, x in _pairs(found).items()}
    every = zip(base.expressions, base.coordinates, strict=True)
    indices = {str(e): x[pairs["o"]].long() for e, x in every}
    rest = pairs["k"]
    for name, points in reversed(window.taps):
        indices[name], rest = rest % len(points) + points.start, rest // len(points)
    entries = {window.base: pairs["o"], window.other: pairs["i"]}
    return Rows(len(rest), found.device, indices, entries, arrays)


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
        operands = stored(operands)
        self.statement, self.terms = statement, list[_Term]()
        if statement.positions:
            self.positions = _Positions(statement, operands)
            return
        bound = bind(statement, _shapes(operands))
        self.shape = bound.shape
        for step in single_terms(replace(statement, accumulate=False)):
            step = replace(step, text=statement.text)
            read = {access.name for access in accesses_of(step)} - {step.target.name}
            self.terms.append(_Term(step, {n: x for n, x in operands.items() if n in read}, bound, lowering))

    def __call__(self, operands: Mapping[str, Any]) -> Tensor | Sparse:
        """The result; a Sparse if the target has a pattern or positions."""
        operands = stored(operands)
        if self.statement.positions:
            return self.positions.found(operands)
        total = operands[self.statement.target.name] if self.statement.accumulate else None
        for term in self.terms:
            found = term.evaluated(operands)
            total = found if total is None else total + found
        return torch.zeros(self.shape) if total is None else total


class _Meeting:
    """The sparse factors of a term, what is known of them before their coordinates, and how they are joined."""

    def __init__(self, statement: Statement, operands: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
        self.statement, self.ranges, self.sparse = statement, ranges, _stored_axes(operands)
        (self.term,) = statement.terms
        if (reason := refusal(statement, self.term, self.sparse)) is not None:
            raise reason
        self.window = window_of(self.term, self.sparse, ranges, _shapes(operands))

    def sides(self, operands: Mapping[str, Any]) -> dict[int, Side]:
        found = {}
        for place, factor in enumerate(self.term.factors):
            if isinstance(factor, Access) and factor.name in self.sparse:
                x, axes = operands[factor.name], self.sparse[factor.name].coordinates
                coordinates = tuple(x.parts[0].coords[x.format.axes[n]] for n in axes)
                expressions = tuple(factor.indices[n] for n in axes)
                found[place] = Side(place, factor, expressions, coordinates, tuple(x.shape[n] for n in axes))
        return found

    def map(self, sides: Mapping[int, Side]) -> KernelMap | None:
        return None if self.window is None else found_map(sides, self.window)

    def rows(self, sides: Mapping[int, Side], found: KernelMap | None, operands: Mapping[str, Any]) -> Rows:
        """The rows of the join, from a kernel map of two factors on if there is one."""
        if found is None or self.window is None:
            start = Rows(1, next(iter(sides.values())).coordinates[0].device, {}, {}, operands)
        else:
            start = _rows_of_map(found, self.window, sides[self.window.base], operands)
        return join(start, [side for place, side in sides.items() if place not in start.entries], self.ranges)


class _Term:
    """A statement of one term."""

    def __init__(self, step: Statement, operands: Mapping[str, Any], bound: BoundStatement, lowering: str) -> None:
        sparse, self.bound, self.lowering = _stored_axes(operands), bound, lowering
        self.text, self.read = str(declare(step, bound.ranges)), [*operands]
        self.meeting: _Meeting | None = None
        if not step.pattern and not meets(step.terms[0], {name: axes.coordinates for name, axes in sparse.items()}):
            return
        self.meeting = _Meeting(step, operands, bound.ranges)
        step = step if step.pattern else with_pattern(step, sparse)
        patterns = [name for name in sparse if operands[name].parts[0].values is None]
        self.pattern = step.pattern
        self.over_rows = aggregation(step, sparse, patterns)
        window = self.meeting.window
        self.over_map = None if window is None or len(sparse) > 2 else over_map(step, sparse, patterns, window)
        if self.pattern:
            self.format = _with_dense_axes(operands[self.pattern].format, step, sparse[self.pattern])

    def evaluated(self, operands: Mapping[str, Any]) -> Any:
        operands = {name: operands[name] for name in self.read}
        if self.meeting is None:
            tensors, names, _ = flatten_used(self.text, operands, ())
            return autograd.einsum(tensors, names, self.text, self.bound.shape, self.lowering)
        # From the fastest way on: a kernel map, a join.
        sides = self.meeting.sides(operands)
        found = self.meeting.map(sides)
        if found is not None and self.over_map is not None:
            return self.aggregated(self.over_map, operands, found)
        return self.aggregated(self.over_rows, operands, self.meeting.rows(sides, found, operands))

    def aggregated(self, found: Aggregation, operands: Mapping[str, Any], over: Rows | KernelMap) -> Tensor | Sparse:
        """The second statement, evaluated over the rows of the join or the kernel map."""
        bound, values = self.bound, _values(found, operands)
        statement = declare(found.statement, bound.ranges)
        if isinstance(over, Rows):
            statement, index_arrays = _over_rows(
                found, statement, over, _shapes(operands) | {statement.target.name: bound.shape}
            )
        else:
            index_arrays = _over_map(found, over, [*values.values()])
        read = {access.name for access in accesses_of(statement)}
        given = {name: x for name, x in (values | index_arrays).items() if name.partition("@")[0] in read}

        def evaluated(shape: Sequence[int]) -> Tensor:
            return autograd.einsum([*given.values()], "|".join(given), str(statement), shape, self.lowering)

        if self.pattern:
            like = operands[self.pattern]
            result = evaluated((_entries(like), *bound.shape[len(self.meeting.sparse[self.pattern].coordinates) :]))
            if found.scale:
                result = result * operands[found.scale].parts[0].values.reshape(-1, *[1] * (result.ndim - 1))
            coords = {axis: like.parts[0].coords[axis] for axis in self.format.axes if axis in like.parts[0].coords}
            made = Sparse(self.format, bound.shape, (FormatBucket(coords, result),), result.numel())
            return made if bound.statement.pattern else made.to_dense()
        if found.target is None:
            return evaluated(bound.shape)
        return _unflat(evaluated(_flat_shape(bound.shape, found.target)), found.target, bound.shape)


def _over_map(found: Aggregation, map: KernelMap, values: Sequence[Tensor]) -> dict[str, Tensor]:
    """The arrays of a kernel map by their names as operands."""
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in values)
    tokens, arrays = maps.planner_operands(map.transpose() if found.turned else map, differentiable)
    return {found.map + token.removeprefix("map"): x for token, x in zip(tokens, arrays, strict=True)}


def _over_rows(
    found: Aggregation, statement: Statement, rows: Rows, shapes: Mapping[str, Sequence[int]]
) -> tuple[Statement, dict[str, Tensor]]:
    """(the statement with facts of its index arrays, these by name)."""
    arrays = {name: rows.array(source, shapes) for name, source in found.arrays.items()}
    if (order := found.order()) is not None:
        if not bool((arrays[order][1:] >= arrays[order][:-1]).all()):
            by = torch.argsort(arrays[order], stable=True)
            arrays = {name: x[by] for name, x in arrays.items()}
        statement = replace(statement, facts=(*statement.facts, (order, "sorted")))
    return statement, arrays


def _values(found: Aggregation, operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """The dense operands, flattened ones, and the values of sparse ones, by their names in the second statement."""
    given: dict[str, Tensor] = {name: x for name, x in operands.items() if isinstance(x, Tensor)}
    given.update((name, operands[operand].parts[0].values) for name, operand in found.values.items())
    given.update((name, _flat(operands[flat.name], flat)) for name, flat in found.flattened.items())
    return given


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


def _with_dense_axes(format: Format, step: Statement, stored: StoredAxes) -> Format:
    """The coordinates of a format, and dense axes for the indices of the target behind them."""
    levels, taken = format.flattened, list(format.axes)
    names = [axis for axis in format.axes if any(axis in level.axes for level in levels)]
    more = []
    for expression in step.target.indices[len(stored.coordinates) :]:
        more.append(fresh(str(expression.bare), taken))
        taken.append(more[-1])
    return Format((*names, *more), (*levels, *(Level((name,), "U") for name in more)))


class _Positions:
    """A statement whose target has positions of its operands as axes."""

    def __init__(self, statement: Statement, operands: Mapping[str, Any]) -> None:
        sparse, of = _stored_axes(operands), dict(statement.positions)
        if not sparse:
            raise OptionError(f"`{statement.text or statement}` finds positions of sparse operands, and all are dense")
        own = dict[str, Source]()
        for place, access in enumerate(f for f in statement.terms[0].factors if isinstance(f, Access)):
            axes = position_axes(access, sparse)
            flat = Flattened(access.name, axes, tuple(access.indices[axis].bare or "" for axis in axes))
            own[access.name] = place if access.name in sparse else flat
        names = [str(expression.bare) for expression in statement.target.indices]
        self.operands, self.sources = [of[name] for name in names], [own[of[name]] for name in names]
        self.meeting = _Meeting(statement, operands, bind(sized(statement), _shapes(operands)).ranges)
        extents = self.extents(operands)
        # Grouped by the smallest axis, in a convolution the offsets of its window.
        self.first = extents.index(min(extents))
        axes = (names[self.first], *(name for name in names if name != names[self.first]))
        self.format = Format(tuple(names), (Level(axes, "C"),))

    def extents(self, operands: Mapping[str, Any]) -> tuple[int, ...]:
        """The number of positions of each operand."""
        every = zip(self.operands, self.sources, strict=True)
        return tuple(
            math.prod(operands[name].shape[axis] for axis in source.axes)
            if isinstance(source, Flattened)
            else _entries(operands[name])
            for name, source in every
        )

    def found(self, operands: Mapping[str, Any]) -> Sparse:
        """The positions of the entries that meet."""
        sides, shape = self.meeting.sides(operands), self.extents(operands)
        found = self.meeting.map(sides)
        if found is not None and (part := self.listed(found)) is not None:
            return Sparse(self.format, shape, (part,), len(part.coords[self.format.axes[0]]))
        rows = self.meeting.rows(sides, found, operands)
        for source in self.sources:
            for name in source.indices if isinstance(source, Flattened) else ():
                rows = rows if name in rows.indices else rows.with_points(name, self.meeting.ranges[name])
        coords = tuple(rows.array(source, _shapes(operands)) for source in self.sources)
        resolved, parts = arrange(entries := Entries(coords, None, shape), self.format, "count")
        return Sparse(resolved, shape, parts, len(entries))

    def listed(self, found: KernelMap) -> FormatBucket | None:
        """The pairs of a kernel map in the order of the format, which is theirs; None if it is another."""
        window = self.meeting.window
        roles = [window and window.role(source) for source in self.sources]
        if roles[self.first] != "k" or {*roles} != {"o", "k", "i"}:
            return None
        if turned := roles.index("i") < roles.index("o"):
            found = found.transpose()
        pairs, names = _pairs(found), {"o": "i", "i": "o", "k": "k"} if turned else dict(zip("oki", "oki", strict=True))
        every = zip(self.format.axes, roles, strict=True)
        return FormatBucket({axis: pairs[names[role or ""]].int() for axis, role in every}, None)
