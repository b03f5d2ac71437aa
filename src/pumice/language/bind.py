"""Binding of statements to shapes: the range of each index and the target's shape, from the operands' shapes.

An index runs over [0, n), n being the extent of an axis that it indexes alone; all such axes must agree. Without such
an axis it has the largest range that keeps every window (`I[2*p+r]`) in its operand, or must be declared (`; p:14`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from pumice.errors import ShapeError
from pumice.language.nodes import Access, Affine, Index, Range, Statement, accesses_of, indices_of

Shape = Sequence[int]


@dataclass(frozen=True, eq=False)
class BoundStatement:
    """A statement with its sizes; compared by identity, so that it can be a cache key.

    ranges: of every index, by name. shape: of the target. windowed: indices with declared ranges or those of windows.
    like: the statement that `resized` was given, cache key of everything that does not depend on exact sizes.
    """

    statement: Statement
    ranges: Mapping[str, Range]
    shape: tuple[int, ...]
    windowed: tuple[str, ...] = ()
    like: BoundStatement | None = None

    @cached_property
    def extents(self) -> Mapping[str, int]:
        """The number of points of each index."""
        return {name: len(extent) for name, extent in self.ranges.items()}

    def extent(self, index: str) -> int:
        return self.extents[index]

    def points(self, names: Iterable[str]) -> int:
        """The product of the extents of these indices."""
        return math.prod(self.extents[name] for name in names)


class Axis(NamedTuple):
    """An axis of an access, and its extent (None if not known yet)."""

    access: Access
    number: int
    expression: Affine
    extent: int | None

    def __str__(self) -> str:
        return f"axis {self.number} of {self.access}"


def bind(
    statement: Statement, shapes: Mapping[str, Shape], shape: Shape | None = None, strict: bool = True
) -> BoundStatement:
    """`statement` with sizes for operands of these shapes. shape: of the target, if known.

    strict: a window may leave its operand only along an index that the text declares. Derived statements are bound
    with strict=False: values outside an operand do not contribute.

    Raises ShapeError for missing or contradictory sizes, or windows that leave an operand; the message names
    index and both sizes.
    """
    for access in accesses_of(*statement.terms, *statement.target.indices):
        _check_rank(access, shapes)
    _check_shapes(statement, shapes)
    open_shape = _target_shape(statement, shapes, shape)
    read = list(_axes(accesses_of(*statement.terms, *statement.target.indices), shapes))
    written = [Axis(statement.target, i, e, open_shape[i]) for i, e in enumerate(statement.target.indices)]
    ranges = _bare_ranges(statement, [*read, *written])
    bare = set(ranges) - {name for name, _ in statement.ranges}
    _window_ranges(ranges, read)
    for name in indices_of(statement):
        if name not in ranges:
            raise ShapeError(
                f"index {name} has no size: it indexes no axis alone and no window determines it; "
                f"declare it, for instance `; {name}:10`{_in(statement)}"
            )
    if strict:
        _check_windows(statement, ranges, read)
    windowed = tuple(name for name in ranges if name not in bare)
    inferred = tuple(_target_extent(statement, ranges, axis, strict) for axis in written)
    return BoundStatement(statement, ranges, inferred, windowed)


def resizable(bound: BoundStatement) -> bool:
    """True if every index range is declared or the extent of an axis: none has to be solved from windows."""
    return bare_places(bound.like or bound) is not None


def resized(bound: BoundStatement, shapes: Mapping[str, Shape], shape: tuple[int, ...]) -> BoundStatement:
    """A `resizable` statement bound to other sizes, whose consistency is not checked."""
    ranges = {name: Range(0, extent) for name, extent in extents_at(bound, shapes, shape).items()}
    return BoundStatement(bound.statement, {**bound.ranges, **ranges}, shape, bound.windowed, bound.like or bound)


def extents_at(bound: BoundStatement, shapes: Mapping[str, Shape], shape: Shape) -> dict[str, int]:
    """By undeclared index that is alone on an axis: its number of points for operands of other sizes."""
    places = bare_places(bound.like or bound)
    assert places is not None
    return {name: (shapes[operand] if operand else shape)[axis] for name, operand, axis in places}


@lru_cache(maxsize=4096)
def bare_places(bound: BoundStatement) -> tuple[tuple[str, str, int], ...] | None:
    """(index, operand, axis) of each undeclared index alone on an axis, "" being the target; None: not resizable."""
    statement = bound.statement
    declared = {name for name, _ in statement.ranges}
    if set(bound.windowed) - declared:
        return None
    found: dict[str, tuple[str, int]] = {}
    read = ((a.name, a.indices) for a in accesses_of(*statement.terms, *statement.target.indices))
    for operand, expressions in (*read, ("", statement.target.indices)):
        for axis, expression in enumerate(expressions):
            if expression.bare is not None and expression.bare not in declared:
                found.setdefault(expression.bare, (operand, axis))
    return tuple((name, *place) for name, place in found.items())


def leading_indices(bound: BoundStatement) -> tuple[str, ...]:
    """The indices that occur on first axes only, in the order of `extents`."""
    return _leading_indices(bound.like or bound)


@lru_cache(maxsize=4096)
def _leading_indices(bound: BoundStatement) -> tuple[str, ...]:
    statement = bound.statement
    leading: dict[str, bool] = {}
    for access in (statement.target, *accesses_of(*statement.terms, *statement.target.indices)):
        for axis, expression in enumerate(access.indices):
            for _, atom in expression.terms:
                if isinstance(atom, Index):
                    leading[atom.name] = leading.get(atom.name, True) and axis == 0
    return tuple(name for name in bound.extents if leading.get(name))


def span_of(expression: Affine, ranges: Mapping[str, Range]) -> tuple[int, int]:
    """(minimum, maximum) of an expression without index arrays and with non-empty index ranges."""
    low = high = expression.constant
    for coefficient, atom in expression.terms:
        assert isinstance(atom, Index)
        ends = coefficient * ranges[atom.name].start, coefficient * (ranges[atom.name].stop - 1)
        low, high = low + min(ends), high + max(ends)
    return low, high


def reaches(
    bound: BoundStatement, target: Access, shapes: Mapping[str, Shape], tops: Mapping[str, int]
) -> dict[Affine, tuple[int, int]]:
    """(lower, upper) bounds of every index expression but bare indices. An added index array is bounded by the extent
    of the indexed axis, since its values are validated; a subtracted one by `tops`, the maxima of index arrays. target:
    the statement's, or that with a segment index."""
    found: dict[Affine, tuple[int, int]] = {}
    axes = [*zip(target.indices, bound.shape, strict=True)]
    for access in accesses_of(*bound.statement.terms, *target.indices):
        axes += zip(access.indices, shapes[access.name], strict=True)
    for expression, extent in axes:
        if expression.bare is None:
            low, high = _reach_of(expression, bound.ranges, extent, tops)
            lower, higher = found.get(expression, (low, high))
            found[expression] = min(low, lower), max(high, higher)
    return found


def _reach_of(expression: Affine, ranges: Mapping[str, Range], extent: int, tops: Mapping[str, int]) -> tuple[int, int]:
    low = high = expression.constant
    for coefficient, atom in expression.terms:
        if isinstance(atom, Index) and atom.name in ranges:
            ends = coefficient * ranges[atom.name].start, coefficient * max(0, ranges[atom.name].stop - 1)
        else:
            ends = 0, (extent if coefficient > 0 else coefficient * tops[atom.name])
        low, high = low + min(ends), high + max(ends)
    return low, high


def _check_rank(access: Access, shapes: Mapping[str, Shape]) -> None:
    if access.name not in shapes:
        raise ShapeError(f"{access} is read, but no operand {access.name} is given; there are {sorted(shapes)}")
    if len(shapes[access.name]) != len(access.indices):
        raise ShapeError(
            f"{access} has {len(access.indices)} indices, the operand {access.name} has {len(shapes[access.name])} "
            f"axes (shape {list(shapes[access.name])})"
        )


def _check_shapes(statement: Statement, shapes: Mapping[str, Shape]) -> None:
    for name, declared in statement.shapes:
        found = shapes.get(name, declared) if name != statement.target.name else declared
        fits = len(found) == len(declared) and all(d in (None, n) for d, n in zip(declared, found, strict=True))
        if not fits:
            raise ShapeError(f"{name} is declared as {list(declared)}, the operand has shape {list(found)}")


def _target_shape(statement: Statement, shapes: Mapping[str, Shape], shape: Shape | None) -> tuple[int | None, ...]:
    """The target's shape as passed or declared; None for axes of unknown extent."""
    target = statement.target
    known = shape if shape is not None else shapes.get(target.name)
    declared = dict(statement.shapes).get(target.name)
    if known is not None and len(known) != len(target.indices):
        raise ShapeError(f"{target} has {len(target.indices)} indices, its operand has shape {list(known)}")
    if known is None:
        return declared or (None,) * len(target.indices)
    if declared and any(d is not None and d != k for d, k in zip(declared, known, strict=True)):
        raise ShapeError(f"{target.name} is declared as {list(declared)}, the operand has shape {list(known)}")
    return tuple(known)


def _axes(accesses: Iterable[Access], shapes: Mapping[str, Shape]) -> Iterator[Axis]:
    for access in accesses:
        for number, expression in enumerate(access.indices):
            yield Axis(access, number, expression, shapes[access.name][number])


def _bare_ranges(statement: Statement, axes: Sequence[Axis]) -> dict[str, Range]:
    """The declared ranges, and ranges of indices that are alone on an axis of known extent."""
    ranges = dict(statement.ranges)
    first: dict[str, Axis] = {}
    for axis in axes:
        name = axis.expression.bare
        if name is None or axis.extent is None:
            continue
        declared = statement.declared(name)
        if declared is not None:
            _check_declared(name, declared, axis)
        elif name in first and first[name].extent != axis.extent:
            raise ShapeError(
                f"index {name} is {first[name].extent} on {first[name]} and {axis.extent} on {axis}{_in(statement)}"
            )
        else:
            first.setdefault(name, axis)
            ranges[name] = Range(0, axis.extent)
    return ranges


def _check_declared(name: str, declared: Range, axis: Axis) -> None:
    assert axis.extent is not None
    if axis.extent != declared.stop if not declared.start else axis.extent < declared.stop:
        raise ShapeError(f"index {name} is declared as {declared}, {axis} has extent {axis.extent}")


def _window_ranges(ranges: dict[str, Range], axes: Sequence[Axis]) -> None:
    """Add the ranges determined by windows: the largest that keep every window inside its operand."""
    while True:
        found: dict[str, int] = {}
        for axis in axes:
            if axis.expression.arrays:
                continue
            unknown = [a.name for _, a in axis.expression.terms if isinstance(a, Index) and a.name not in ranges]
            if len(unknown) == 1:
                stop = _largest(unknown[0], axis, ranges)
                found[unknown[0]] = min(found.get(unknown[0], stop), stop)
        if not found:
            return
        ranges.update((name, Range(0, stop)) for name, stop in found.items())


def _largest(name: str, axis: Axis, ranges: Mapping[str, Range]) -> int:
    """The largest stop for which the axis' expression stays in [0, extent) while `name` is in [0, stop)."""
    assert axis.extent is not None
    rest = Affine(tuple(t for t in axis.expression.terms if t[1] != Index(name)), axis.expression.constant)
    coefficient = next(c for c, atom in axis.expression.terms if atom == Index(name))
    if any(not len(ranges[a.name]) for _, a in rest.terms if isinstance(a, Index)):
        return 0
    low, high = span_of(rest, ranges)
    room = axis.extent - 1 - high if coefficient > 0 else low
    return max(0, room // abs(coefficient) + 1)


def _check_windows(statement: Statement, ranges: Mapping[str, Range], axes: Sequence[Axis]) -> None:
    for axis in axes:
        names = [atom.name for _, atom in axis.expression.terms if isinstance(atom, Index)]
        if axis.expression.bare or axis.expression.arrays or any(not len(ranges[name]) for name in names):
            continue
        low, high = span_of(axis.expression, ranges)
        assert axis.extent is not None
        if low >= 0 and high < axis.extent or any(statement.declared(name) for name in names):
            continue
        example = f"`; {names[0]}:{len(ranges[names[0]])}`" if names else ""
        hint = f"; declare an index to allow windows beyond the operand, for instance {example}" if names else ""
        raise ShapeError(
            f"{axis.expression} runs from {low} to {high}, but {axis} has extent {axis.extent}{hint}{_in(statement)}"
        )


def _target_extent(statement: Statement, ranges: Mapping[str, Range], axis: Axis, strict: bool) -> int:
    expression = axis.expression
    if expression.arrays:
        if axis.extent is None:
            raise ShapeError(
                f"{axis} is addressed through {', '.join(map(str, expression.arrays))}, which has no known extent; "
                f"pass {axis.access.name} or declare it, for instance `; {axis.access.name}:[...]`{_in(statement)}"
            )
        return axis.extent
    if expression.bare:
        return axis.extent if axis.extent is not None else ranges[expression.bare].stop
    names = [atom.name for _, atom in expression.terms if isinstance(atom, Index)]
    if any(not len(ranges[name]) for name in names):
        return axis.extent or 0
    low, high = span_of(expression, ranges)
    padded = not strict or any(statement.declared(name) for name in names)
    if low < 0 and not padded or axis.extent is not None and high >= axis.extent and not padded:
        limit = "" if axis.extent is None else f", but {axis} has extent {axis.extent}"
        raise ShapeError(f"{expression} writes to {low} up to {high}{limit}{_in(statement)}")
    return axis.extent if axis.extent is not None else max(0, high + 1)


def _in(statement: Statement) -> str:
    return f", in `{statement.text or statement}`"
