"""Statements in which entries of sparse operands meet: neighbour retrieval, masked statements, sparse products.

Each term is evaluated in two halves, as pumice.language.meet describes: what meets, as a pattern, then a statement over
it. The pattern is a kernel map where there is one, else the rows of a join (pumice.ops.join).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.errors import DeviceError, OptionError, ShapeError
from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import declare, fresh
from pumice.language.formats import Format, Level
from pumice.language.iteration import IterationChoices
from pumice.language.meet import (
    Flattened,
    Source,
    StoredAxes,
    Window,
    aggregation,
    check_term,
    meets,
    pattern_place,
    position_axes,
    sized,
    window_of,
    with_pattern,
)
from pumice.language.nodes import ANY, Access, Range, Statement, Term, accesses_of
from pumice.language.parts import in_parts
from pumice.language.rewrite import single_terms
from pumice.lower import maps, plan
from pumice.lower.levels import StoredOperand, scattered
from pumice.ops import autograd
from pumice.ops.convert import FormatBucket, raveled
from pumice.ops.direct import LevelNests, choices_of, choices_of_windows, contiguous, stored_operand, windowed
from pumice.ops.join import Rows, Side, join, map_of, pairs_of, rows_of_map, stored
from pumice.ops.operands import flatten_used, tensors_of
from pumice.ops.sparse import Sparse
from pumice.runtime.cache import KeptResult


def _stored_axes(operands: Mapping[str, Any]) -> dict[str, StoredAxes]:
    return {name: StoredAxes.of(x.format) for name, x in operands.items() if isinstance(x, Sparse)}


def _shapes(operands: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in operands.items()}


def _entries(x: Sparse) -> int:
    return next(iter(x.parts[0].coords.values())).shape[0]


def _dense(x: Sparse) -> Tensor:
    """The dense tensor on a CPU, kept with the values."""
    return x.to_dense() if x.parts[0].values is None else x.kept("dense", _dense_of).get()


def _dense_of(x: Sparse) -> KeptResult[Tensor]:
    levels = stored_operand(x).levels

    def made(values: Tensor) -> Tensor:
        found = scattered(StoredOperand(levels, values), values.dtype)
        return x.to_dense() if found is None else found

    values = x.parts[0].values
    assert values is not None
    return KeptResult(values, made)


class JoinedStatement:
    """A statement of sparse operands that meet, or that are read through windows, planned for given shapes and formats.

    lowering: of the statements over the result of the join. shape: of the target, if known."""

    total: str
    shape: tuple[int, ...]

    def __init__(
        self, statement: Statement, operands: Mapping[str, Any], lowering: str, shape: tuple[int, ...] | None = None
    ) -> None:
        if meta := [name for name, x in operands.items() if isinstance(x, Sparse) and x.device.type == "meta"]:
            raise DeviceError(f"entries meet by their coordinates: {meta[0]} is on the device meta, which has none")
        given, operands = operands, stored(operands)
        self.entrywise: bool = [*map(id, given.values())] == [*map(id, operands.values())]
        self.terms: list[_Plain | _Term | _Parts] = list[_Plain | _Term | _Parts]()
        self.positions: _Positions | None = _Positions(statement, operands) if statement.positions else None
        self.union: _Union | None = None
        if self.positions is not None:
            return
        bound, union = bind(statement, _shapes(operands), shape), statement.pattern == ANY
        self.total, self.shape = statement.target.name if statement.accumulate else "", bound.shape
        for step in single_terms(replace(statement, accumulate=False)):
            step = replace(step, text=statement.text)
            read = {access.name for access in accesses_of(step)} - {step.target.name}
            given = {name: x for name, x in operands.items() if name in read}
            axes = {name: found.coordinates for name, found in _stored_axes(given).items()}
            joins = step.pattern or meets(step.terms[0], axes)
            parts = in_parts(step, bound.ranges) if joins and not lowering and _is_wide(given) else (step,)
            if len(parts) > 1:
                self.terms.append(_Parts(parts, bound.shape))
            else:
                self.terms.append((_Term if joins else _Plain)(step, given, bound, lowering))
        self.union = _Union(statement, bound.shape, self.terms) if union else None

    def __call__(self, operands: Mapping[str, Any]) -> Tensor | Sparse:
        """The result; a Sparse if the target has a pattern or positions."""
        operands = operands if self.entrywise else stored(operands)
        if self.positions is not None:
            return self.positions.found(operands)
        if self.union is not None:
            return self.union.found(operands)
        total: Any = operands[self.total] if self.total else None
        for term in self.terms:
            found = term.evaluated(operands)
            total = found if total is None else total + found
        return torch.zeros(self.shape) if total is None else total

    def explained(self, operands: Mapping[str, Any]) -> list[str]:
        """How each term is computed, as text."""
        operands = stored(operands)
        return [term.explained(operands) for term in self.terms]


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
                expressions, extents = tuple(factor.indices[n] for n in axes), tuple(x.shape[n] for n in axes)
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
            rows = rows_of_map(found, self.window, sides[self.window.base], operands)
        rows = join(rows, [side for place, side in sides.items() if place not in rows.entries], self.ranges)
        flat = (source.indices for source in self.sources.values() if isinstance(source, Flattened))
        left = dict.fromkeys(name for names in flat for name in names if name not in rows.indices)
        rows = rows.with_points([*left], self.ranges) if left else rows
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


def _is_wide(operands: Mapping[str, Any]) -> bool:
    """True if sums of these operands may be rounded in their dtype: they are not of half precision."""
    return all(x.dtype not in (torch.float16, torch.bfloat16) for x in operands.values())


class _Parts:
    """A statement of one term that is evaluated as several, see pumice.language.parts."""

    def __init__(self, parts: Sequence[Statement], shape: tuple[int, ...]) -> None:
        self.parts, self.shape, self.made = parts, shape, list[JoinedStatement]()

    def explained(self, operands: Mapping[str, Any]) -> str:
        return "\n".join(["as several statements", *(f"  {part}" for part in self.parts)])

    def evaluated(self, operands: Mapping[str, Any]) -> Any:
        given, result = dict(operands), None
        for number, part in enumerate(self.parts):
            read = {access.name: given[access.name] for access in accesses_of(*part.terms)}
            if number == len(self.made):
                shape = self.shape if number + 1 == len(self.parts) else None
                self.made.append(JoinedStatement(part, read, "", shape))
            given[part.target.name] = result = self.made[number](read)
        return result

    def over_keys(self, operands: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        raise AssertionError("a statement with a pattern is not evaluated in parts")


class _Plain:
    """A statement of one term that takes no join."""

    def __init__(self, step: Statement, operands: Mapping[str, Any], bound: BoundStatement, lowering: str) -> None:
        self.read, self.text, self.shape = [*operands], str(declare(step, bound.ranges)), bound.shape
        axes = {name: found.coordinates for name, found in _stored_axes(operands).items()}
        choices = choices_of_windows(lowering, step, axes) if windowed(step, axes) else None
        # Not of levels: vectors in place are faster, in a loop over the entries.
        if choices is None and not lowering and not contiguous(step, axes):
            choices = IterationChoices()
        self.nests = None if choices is None else LevelNests(replace(bound, statement=step), operands, -1, choices)
        # A schedule is of the nest. Where that does not run, the statement has none.
        self.lowering = lowering if choices is None else ""
        self.known: tuple[autograd.KnownStatement, bool] | None = None

    def explained(self, operands: Mapping[str, Any]) -> str:
        return f"a statement of its own: {self.text}" if self.nests is None else self.nests.explained(operands)

    def evaluated(self, operands: Mapping[str, Any]) -> Any:
        if self.nests is not None and (ready := self.nests.ready(operands)) is not None:
            return ready.run()
        if self.known is None or self.known[1]:
            given = {name: operands[name] for name in self.read}
            tensors, names, dense = flatten_used(self.text, given, ())
            statement = autograd.KnownStatement(names, self.text, self.shape, self.lowering)
            self.known = statement, bool(dense)
            return statement(tensors)
        return self.known[0](tensors_of([operands[name] for name in self.read]))


class _Term:
    """A statement of one term in which sparse operands meet."""

    def __init__(self, step: Statement, operands: Mapping[str, Any], bound: BoundStatement, lowering: str) -> None:
        sparse, self.shape, self.read = _stored_axes(operands), bound.shape, [*operands]
        # A schedule is of the nest over levels. Where that does not run, the statement over what meets has none.
        self.choices = choices_of(lowering, [*sparse])
        self.prescribed = bool(lowering) and self.choices is not None
        self.lowering = "" if self.prescribed else lowering
        check_term(step, step.terms[0], sparse)
        if not sparse:
            raise OptionError(f"{step.target} has a computed pattern: expected a sparse operand in `{step.terms[0]}`")
        union, step = step.pattern == ANY, step if step.pattern != ANY else replace(step, pattern="")
        self.bound, place = replace(bound, statement=step), pattern_place(step, sparse) if step.pattern else -1
        shapes, self.is_sparse = _shapes(operands) | {step.target.name: bound.shape}, bool(step.pattern)
        window = window_of(step.terms[0], sparse, bound.ranges, shapes)
        step = step if step.pattern or union else with_pattern(step, sparse)
        patterns = [name for name in sparse if operands[name].parts[0].values is None]
        self.second = found = aggregation(replace(step, pattern=ANY) if union else step, sparse, patterns, window)
        self.meeting = _Meeting(step.terms[0], found.sources, bound.ranges, shapes, window)
        self.text, read = str(declare(found.statement, bound.ranges)), accesses_of(found.statement)
        self.dense = [name for name in {access.name: 0 for access in read} if isinstance(operands.get(name), Tensor)]
        self.denser = dict[frozenset[str], JoinedStatement]()  # by the operands that are used in dense form
        self.nests = None if self.choices is None else LevelNests(self.bound, operands, place, self.choices)
        self.format, self.like = _format([*found.sources], found.first), step.pattern
        self.made = _with_dense_axes(operands[step.pattern].format, step) if step.pattern else None

    def evaluated(self, operands: Mapping[str, Any]) -> Tensor | Sparse:
        """The result; a Sparse if the statement has a pattern."""
        # The first way that applies, the fastest first.
        result = None if self.prescribed else self.over_map(operands)
        if result is None and self.nests is not None:
            ready = self.nests.choose(operands) if self.tried_dense else self.nests.ready(operands)
            if isinstance(ready, frozenset):
                return self.partly_dense(operands, ready)
            result = None if ready is None else ready.run()
            if result is not None and not self.is_sparse:
                return result
        result = self.over_join(operands) if result is None else result
        if self.made is None:
            return result
        part = FormatBucket(dict(operands[self.like].parts[0].coords), result)
        found = Sparse(self.made, self.shape, (part,), result.numel())
        return found if self.is_sparse else found.to_dense()

    @property
    def tried_dense(self) -> bool:
        """True if operands may be used in dense form."""
        return not (self.lowering or self.prescribed or self.is_sparse)

    def explained(self, operands: Mapping[str, Any]) -> str:
        if self.meeting.roles and not self.prescribed:
            return "kernel map of the window"
        if self.nests is None:
            return "a join of the entries"
        if self.tried_dense and isinstance(names := self.nests.choose(operands), frozenset):
            return f"with {', '.join(sorted(names))} in dense form, by the cost model"
        return self.nests.explained(operands)

    def over_map(self, operands: Mapping[str, Any]) -> Tensor | None:
        """The result over a kernel map; None if what meets is none."""
        if (found := self.meeting.whole_map(operands)) is None:
            return None
        values = self.values(operands)
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in values.values())
        tokens, arrays = maps.planner_operands(found, differentiable)
        named = (self.second.map + token.removeprefix("map") for token in tokens)
        return self.aggregated(operands, values | dict(zip(named, arrays, strict=True)))

    def partly_dense(self, operands: Mapping[str, Any], names: frozenset[str]) -> Tensor:
        """The result with these operands in dense form."""
        operands = {name: _dense(operands[name]) if name in names else operands[name] for name in self.read}
        if names not in self.denser:
            statement = declare(self.bound.statement, self.bound.ranges)
            self.denser[names] = JoinedStatement(statement, operands, self.lowering, self.shape)
        result = self.denser[names](operands)
        assert isinstance(result, Tensor)
        return result

    def over_join(self, operands: Mapping[str, Any]) -> Tensor:
        """The result over the rows of a join."""
        return self.aggregated(operands, self.over_lists(operands, self.meeting.lists(operands)))

    def over_lists(self, operands: Mapping[str, Any], lists: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The operands of the second statement over a pattern of these coordinates."""
        lists = _in_order(lists, lists[self.second.first])
        named = {plan.token(self.second.map, str(self.format), 0, axis): x for axis, x in lists.items()}
        return self.values(operands) | named

    def stored_axes(self) -> tuple[int, ...]:
        """The axes of the target with indices that coordinates of sparse operands give; none unless these are bare."""
        return () if self.second.target is None else self.second.target.axes

    def over_keys(self, operands: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """(row-major coordinates of the target that products reach, ascending; values [coordinates, dense axes...])."""
        lists = self.meeting.lists(operands)
        name = str(self.second.statement.target.indices[0].bare)
        keys, lists[name] = lists[name].long().unique(return_inverse=True)
        shape = len(keys), *self.shape[len(self.stored_axes()) :]
        given = self.over_lists(operands, lists)
        return keys, autograd.einsum([*given.values()], "|".join(given), self.text, shape, self.lowering)

    def values(self, operands: Mapping[str, Any]) -> dict[str, Tensor]:
        """The operands of the second statement by name: dense ones, flattened ones, and the values of sparse ones."""
        given = {name: operands[name] for name in self.dense}
        given.update((name, operands[operand].parts[0].values) for name, operand in self.second.values.items())
        for name, flat in self.second.flattened.items():
            every = [*range(len(flat.axes))]
            given[name] = operands[flat.name].movedim(flat.axes, every).flatten(0, every[-1])
        return given

    def aggregated(self, operands: Mapping[str, Any], given: Mapping[str, Tensor]) -> Tensor:
        """The second statement, evaluated: the target, or its values at the entries of the pattern."""
        shape, target = self.shape, self.second.target
        if self.made is not None:
            like = operands[self.like]
            shape = _entries(like), *shape[len(like.parts[0].coords) :]
        elif target is not None:
            rest = (size for axis, size in enumerate(shape) if axis not in target.axes)
            shape = math.prod(shape[axis] for axis in target.axes), *rest
        result = autograd.einsum([*given.values()], "|".join(given), self.text, shape, self.lowering)
        if self.second.scale:
            scale = operands[self.second.scale].parts[0].values
            return result * scale.reshape(-1, *[1] * (result.ndim - 1))
        if self.made is None and target is not None:
            sizes, every = [self.shape[axis] for axis in target.axes], [*range(len(target.axes))]
            return result.unflatten(0, sizes).movedim(every, target.axes)
        return result


def _with_dense_axes(format: Format, step: Statement) -> Format:
    """The coordinates of a format, and dense axes for the indices of the target behind them."""
    levels, taken = format.flattened, list(format.axes)
    names = [axis for axis in format.axes if any(axis in level.axes for level in levels)]
    more = []
    for expression in step.target.indices[len(names) :]:
        more.append(fresh(str(expression.bare), taken))
        taken.append(more[-1])
    return Format((*names, *more), (*levels, *(Level((name,), "U") for name in more)))


class _Union:
    """A target whose pattern is computed: the coordinates that a product of some term reaches.

    Its leading axes, those whose indices coordinates of sparse operands give, are stored as one level of kind C."""

    terms: Sequence[Any]
    shape: tuple[int, ...]

    def __init__(self, statement: Statement, shape: tuple[int, ...], terms: Sequence[Any]) -> None:
        self.terms, self.shape, target = terms, shape, statement.target
        every = {term.stored_axes() for term in terms}
        axes = next(iter(every), ())
        names = [e.bare for e in target.indices]
        if len(every) != 1 or not axes or axes != tuple(range(len(axes))) or len({*names} - {None}) != len(names):
            found = ", ".join(str([*each]) for each in sorted(every)) or "none"
            raise ShapeError(
                f"the computed pattern of {target} is over its first axes, expected to be bare and the same that "
                f"sparse operands give in each term; found axes {found}"
            )
        self.stored: tuple[int, ...] = shape[: len(axes)]
        kept = tuple(map(str, names))
        levels = (Level(kept[: len(axes)], "C"), *(Level((name,), "U") for name in kept[len(axes) :]))
        self.format: Format = Format(kept, levels)

    def found(self, operands: Mapping[str, Any]) -> Sparse:
        results = [term.over_keys(operands) for term in self.terms]
        keys = results[0][0] if len(results) == 1 else torch.cat([each for each, _ in results]).unique()
        total = results[0][1]
        if len(results) > 1:
            total = total.new_zeros(len(keys), *total.shape[1:])
            for each, values in results:
                total = total.index_add(0, torch.searchsorted(keys, each), values)
        coords, rest = dict[str, Tensor](), keys
        for name, size in reversed([*zip(self.format.axes, self.stored, strict=False)]):
            coords[name], rest = (rest % size).int(), rest // size
        coords = {name: coords[name] for name in self.format.axes[: len(self.stored)]}
        return Sparse(self.format, self.shape, (FormatBucket(coords, total),), total.numel())


class _Positions:
    """A statement whose target has positions of its operands as axes."""

    def __init__(self, statement: Statement, operands: Mapping[str, Any]) -> None:
        (term,), sparse, own = statement.terms, _stored_axes(operands), dict[str, Source]()
        if not sparse:
            raise OptionError(f"`{statement.text or statement}` finds positions of sparse operands, and all are dense")
        check_term(statement, term, sparse)
        for place, access in enumerate(f for f in term.factors if isinstance(f, Access)):
            axes = position_axes(access, sparse)
            flat = Flattened(access.name, axes, tuple(access.indices[axis].bare or "" for axis in axes))
            own[access.name] = place if access.name in sparse else flat
        shapes, of = _shapes(operands), dict(statement.positions)
        ranges, names = bind(sized(statement), shapes).ranges, [str(e.bare) for e in statement.target.indices]
        window, sources = window_of(term, sparse, ranges, shapes), {name: own[of[name]] for name in names}
        self.meeting: _Meeting = _Meeting(term, sources, ranges, shapes, window)
        self.axes: dict[str, tuple[str, Source]] = {name: (of[name], own[of[name]]) for name in names}

    def extent(self, name: str, operands: Mapping[str, Any]) -> int:
        """The number of positions along an axis."""
        operand, source = self.axes[name]
        x = operands[operand]
        return math.prod(x.shape[n] for n in source.axes) if isinstance(source, Flattened) else _entries(x)

    def found(self, operands: Mapping[str, Any]) -> Sparse:
        """The positions of the entries that meet."""
        sizes = {name: self.extent(name, operands) for name in self.axes}
        # Grouped by the smallest axis, in a convolution the offsets of its window.
        format = _format([*sizes], min(sizes, key=lambda name: sizes[name]))
        axes, found = format.levels[0].axes, self.meeting.whole_map(operands)
        if found is not None and axes[0] == self.meeting.roles["k"]:
            # Pairs are sorted so.
            lists = {self.meeting.roles[role]: x for role, x in pairs_of(found, self.meeting.turned).items()}
        else:
            lists = self.meeting.lists(operands)
            lists = _in_order(lists, raveled([lists[axis] for axis in axes], [sizes[axis] for axis in axes]))
        part = FormatBucket({axis: lists[axis].int() for axis in sizes}, None)
        return Sparse(format, (*sizes.values(),), (part,), len(lists[axes[0]]))
