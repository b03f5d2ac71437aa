"""Statements in which entries of several sparse operands meet, as a join and a statement over what it finds.

    O[n,p,q,m] = Mask[n,p,q] * I[n,p+r,q+s,c] * F[r,s,c,m]              with Mask and I sparse becomes

    for each e: entries of Mask and I, and n, p, q, r, s, that satisfy all coordinates                 (the join)
    O[O_at[e],m] = Mask_values[Mask_at[e]] * I_values[I_at[e],c] * F[F_at[e],c,m]

X_at[e] is the position of an entry of a sparse operand, or of a dense one on those of its axes whose indices the join
finds, taken as one axis. Cf. the two phases of a map-based convolution in "Unified Convolution Framework", 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import prod
from typing import TypeVar

from pumice.errors import OptionError, ShapeError
from pumice.language.derive import fresh, names_of
from pumice.language.formats import Format, layout
from pumice.language.nodes import (
    EVERY,
    Access,
    Affine,
    Factor,
    Index,
    Range,
    Statement,
    Term,
    accesses_of,
    affine,
    arrays_of,
    index,
    indices_of,
    substitute,
)
from pumice.language.rewrite import single_terms

Node = TypeVar("Node", bound=Factor | Affine)


@dataclass(frozen=True)
class StoredAxes:
    """Axes of a sparse operand: those whose coordinates an entry has, and the dense axes of its value, as stored."""

    coordinates: tuple[int, ...]
    dense: tuple[int, ...]

    @staticmethod
    def of(format: Format) -> StoredAxes:
        """The axes in a format without groups and blocks."""
        found = enumerate(layout(format).coordinates)
        coordinates = tuple(number for number, c in found if c.array is not None)
        dense = (format.axes.index(name) for name in layout(format).values if name in format.axes)
        return StoredAxes(coordinates, tuple(number for number in dense if number not in coordinates))


def joins(statement: Statement, sparse: Mapping[str, Sequence[int]]) -> bool:
    """True if the statement takes a join. sparse: the axes of each sparse operand that have coordinates."""
    return bool(statement.positions or statement.pattern) or any(meets(term, sparse) for term in statement.terms)


def meets(term: Term, sparse: Mapping[str, Sequence[int]]) -> bool:
    """True if two sparse factors have an index in common among those of their coordinates."""
    read = [
        set(indices_of(*(factor.indices[axis] for axis in sparse[factor.name])))
        for factor in term.factors
        if isinstance(factor, Access) and factor.name in sparse
    ]
    return any(one & other for one, other in combinations(read, 2))


def refusal(statement: Statement, term: Term, sparse: Mapping[str, StoredAxes]) -> OptionError | None:
    """The reason why a term cannot be joined, or None."""
    text = f"`{statement.text or statement}`: entries of sparse operands meet"
    if statement.reduction != "sum":
        return OptionError(f"{text} under {statement.operator}, expected under = or +=; pass all but one of them dense")
    inside = (*arrays_of(term), *accesses_of(*(f for f in term.factors if not isinstance(f, Access))))
    for access in inside:
        if access.name in sparse:
            return OptionError(f"{text}, and {access} is not a factor of the product; pass {access.name} dense")
    return None


def check_join(statement: Statement, sparse: Mapping[str, StoredAxes]) -> None:
    """Raise where a join cannot use operands stored so."""
    coordinates = {name: axes.coordinates for name, axes in sparse.items()}
    for term in statement.terms:
        if meets(term, coordinates) and (reason := refusal(statement, term, sparse)) is not None:
            raise reason
        for factor in term.factors if statement.positions else ():
            if isinstance(factor, Access) and factor.name in sparse:
                position_axes(factor, sparse)
    if statement.pattern in sparse:
        aggregation(statement, sparse, ())


def steps_of_join(statement: Statement, sparse: Mapping[str, StoredAxes]) -> list[Statement]:
    """The statements over the result of a join, and those of terms that need none."""
    coordinates = {name: axes.coordinates for name, axes in sparse.items()}
    steps = single_terms(statement)
    return [
        aggregation(step, sparse, ()).statement if statement.pattern or meets(step.terms[0], coordinates) else step
        for step in steps
    ]


@dataclass(frozen=True)
class Flattened:
    """An axis of positions in the dense operand `name`: `axes` of it taken as one, indexed by `indices`."""

    name: str
    axes: tuple[int, ...]
    indices: tuple[str, ...]


Source = str | int | Flattened
"""What an index array holds: the values of an index, entries of the factor at a place, or positions."""


@dataclass(frozen=True)
class Window:
    """Two sparse factors, of which the entries of one lie in a window around those of the other: on each axis

        coordinate of `other` = stride * coordinate of `base` + offset

    so that a kernel map holds all that meet. base, other: places of the factors. columns: their axes (of base, of
    other) in the order of the map's, first that of the batch, which has no offsets, (-1, -1) if there is none. stride,
    offsets: of the axes but the batch's; an offset for each point of `taps`, the window's indices, the last one fastest.
    """

    base: int
    other: int
    columns: tuple[tuple[int, int], ...]
    stride: tuple[int, ...]
    taps: tuple[tuple[str, Range], ...]
    offsets: tuple[tuple[int, ...], ...]

    def role(self, source: Source) -> str | None:
        """The index of map[o, k, i] that stands for an index array of the join, or None."""
        if isinstance(source, int):
            return {self.base: "o", self.other: "i"}.get(source)
        names = (source,) if isinstance(source, str) else source.indices
        whole = names == tuple(name for name, _ in self.taps) and not any(r.start for _, r in self.taps)
        return "k" if whole else None


_MOST_TAPS = 1 << 12  # of a window that is tried point by point
_MOST_AXES = 4
_INT32 = 1 << 31


def window_of(
    term: Term, sparse: Mapping[str, StoredAxes], ranges: Mapping[str, Range], shapes: Mapping[str, Sequence[int]]
) -> Window | None:
    """The window in which two sparse factors of a term meet; None if no pair of them does so."""
    factors = {n: f for n, f in enumerate(term.factors) if isinstance(f, Access)}
    sides = {
        n: [f.indices[axis] for axis in sparse[f.name].coordinates] for n, f in factors.items() if f.name in sparse
    }
    dense = indices_of(*(f for f in factors.values() if f.name not in sparse))
    for base, other in permutations(sides, 2):
        bare, window = [e.bare for e in sides[base]], sides[other]
        extents = [shapes[factors[base].name][axis] for axis in sparse[factors[base].name].coordinates]
        whole = all(name and ranges[name] == Range(0, n) for name, n in zip(bare, extents, strict=True))
        strides = _strides(bare, window) if whole else None
        if strides is None:
            continue
        names = indices_of(*window)
        taps = tuple((n, ranges[n]) for n in dict.fromkeys((*dense, *names)) if n in names and n not in bare)
        columns = [(bare.index(name), number) for number, (name, _) in enumerate(strides)]
        batch = next((n for n, e in enumerate(window) if e.bare and len(window) > 1), -1)
        kept = [n for n in range(len(window)) if n != batch]
        if len(kept) > _MOST_AXES or not 0 < prod(len(points) for _, points in taps) <= _MOST_TAPS:
            continue
        offsets = tuple(
            _offset([window[n] for n in kept], dict(zip(dict(taps), at, strict=True))) for at in _points(taps)
        )
        step, first = tuple(strides[n][1] for n in kept), columns[batch] if batch >= 0 else (-1, -1)
        reach = max(step) * max(extents, default=0) + max((abs(o) for offset in offsets for o in offset), default=0)
        if len(set(offsets)) == len(offsets) and reach < _INT32:
            return Window(base, other, (first, *(columns[n] for n in kept)), step, taps, offsets)
    return None


def _strides(bare: Sequence[str | None], window: Sequence[Affine]) -> list[tuple[str, int]] | None:
    """(index, stride) of each expression of a window, in each of which one of the bare indices stands; else None."""
    found = []
    for expression in window:
        own = [(a.name, c) for c, a in expression.terms if isinstance(a, Index) and a.name in bare]
        if len(own) != 1 or own[0][1] < 1 or expression.arrays:
            return None
        found += own
    return found if len({*bare}) == len({name for name, _ in found}) == len(bare) == len(window) else None


def _points(taps: Sequence[tuple[str, Range]]) -> Iterator[tuple[int, ...]]:
    return product(*(range(points.start, points.stop) for _, points in taps))


def _offset(window: Sequence[Affine], values: Mapping[str, int]) -> tuple[int, ...]:
    """What the constants and the window's indices add up to in each expression."""
    return tuple(e.constant + sum(c * values.get(str(a), 0) for c, a in e.terms) for e in window)


@dataclass(frozen=True)
class Aggregation:
    """The statement over the result of a join.

    statement: its operands are index arrays of the join, or the kernel map `map`, values of sparse operands, dense
        operands, of which some are flattened; facts: it has none yet.
    arrays: by name, what an index array holds. values: by name, the sparse operand. flattened: by name, the axes of a
        dense operand; target: those of the target. scale: the sparse operand whose values the result is multiplied by,
        as its entries are those of the target; or "". turned: the map is the transpose of the window's.
    """

    statement: Statement
    arrays: Mapping[str, Source]
    values: Mapping[str, str]
    flattened: Mapping[str, Flattened]
    target: Flattened | None
    scale: str
    map: str = ""
    turned: bool = False

    def order(self) -> str | None:
        """The index array by which entries are best sorted: that of a dense factor, a weight, else of the target."""
        dense = [f for f in self.statement.terms[0].factors if isinstance(f, Access) and f.name not in self.values]
        for access in (*dense, self.statement.target):
            found = [array.name for e in access.indices for array in e.arrays if array.name in self.arrays]
            if found:
                return found[0]
        return None


def aggregation(statement: Statement, sparse: Mapping[str, StoredAxes], patterns: Sequence[str]) -> Aggregation:
    """The second statement of one that joins, with one term. patterns: sparse operands without values."""
    return _AggregationBuilder(statement, sparse, patterns, None).built()


def over_map(
    statement: Statement, sparse: Mapping[str, StoredAxes], patterns: Sequence[str], window: Window
) -> Aggregation | None:
    """As `aggregation`, over the kernel map of a window; None if it reads more than which entries meet at which tap."""
    found = _AggregationBuilder(statement, sparse, patterns, window).built()
    return found if found.map and not found.arrays else None


class _AggregationBuilder:
    """Collects the operands of an aggregation."""

    def __init__(
        self, statement: Statement, sparse: Mapping[str, StoredAxes], patterns: Sequence[str], window: Window | None
    ) -> None:
        self.statement, self.sparse, self.patterns, self.window = statement, sparse, patterns, window
        self.taken = list(names_of(statement))
        self.entry = self.name("e")
        self.bound = bound_indices(statement.terms[0], sparse)
        self.arrays: dict[str, Source] = {}
        self.values: dict[str, str] = {}
        self.flattened: dict[str, Flattened] = {}
        self.roles: dict[str, str] = {}
        self.pattern = pattern_place(statement, sparse) if statement.pattern else None
        self.scale = ""

    def name(self, wanted: str) -> str:
        self.taken.append(fresh(wanted, self.taken))
        return self.taken[-1]

    def built(self) -> Aggregation:
        target, flat = self.target()
        factors = [self.factor(place, f) for place, f in enumerate(self.statement.terms[0].factors)]
        turned = self.window is not None and self.pattern == self.window.other
        map = self.name("map") if len(self.roles) == 3 else ""
        if map:
            factors.append(Access(map, tuple(index(self.roles[role]) for role in ("iko" if turned else "oki"))))
        term = Term(tuple(f for f in factors if f is not None), self.statement.terms[0].coefficient)
        left = indices_of(target, term)
        names = {access.name for access in accesses_of(target, term)}
        new = Statement(
            target,
            (term,),
            ranges=tuple(r for r in self.statement.ranges if r[0] in left),
            facts=tuple(fact for fact in self.statement.facts if fact[0] in names),
        )
        return Aggregation(new, self.arrays, self.values, self.flattened, flat, self.scale, map, turned)

    def at(self, label: str, source: Source) -> Affine:
        """The value of an index array at the entry, or the index of the kernel map that stands for it."""
        if self.window is not None and (role := self.window.role(source)) is not None:
            self.roles[role] = self.roles.get(role) or self.name(role)
            return index(self.roles[role])
        known = next((name for name, other in self.arrays.items() if other == source), None)
        name = known or self.name(f"{label}_at")
        self.arrays[name] = source
        return affine([(1, Access(name, (index(self.entry),)))])

    def replaced(self, node: Node) -> Node:
        inside = [name for name in indices_of(node) if name in self.bound]
        return substitute(node, {name: self.at(name, name) for name in inside}) if inside else node

    def factor(self, place: int, factor: Factor) -> Factor | None:
        if not isinstance(factor, Access):
            return self.replaced(factor)
        if factor.name not in self.sparse:
            flat = self.flat(factor)
            if flat is None:
                return self.replaced(factor)
            name = self.name(f"{factor.name}_flat")
            self.flattened[name] = flat
            return Access(name, self.beside(factor, flat, self.at(factor.name, flat)))
        stored = self.sparse[factor.name]
        if factor.name in self.patterns:
            return None
        if place == self.pattern and not stored.dense:
            self.scale = factor.name
            return None
        name = next((n for n, operand in self.values.items() if operand == factor.name), None)
        name = name or self.name(f"{factor.name}_values")
        self.values[name] = factor.name
        return Access(name, (self.at(factor.name, place), *(self.replaced(factor.indices[n]) for n in stored.dense)))

    def flat(self, access: Access) -> Flattened | None:
        """The axes of a dense operand whose indices are bound, if there are several, all bare and different."""
        axes = tuple(n for n, e in enumerate(access.indices) if set(indices_of(e)) & set(self.bound))
        names = tuple(access.indices[n].bare or "" for n in axes)
        return Flattened(access.name, axes, names) if len(set(names) - {""}) == len(axes) > 1 else None

    def beside(self, access: Access, flat: Flattened, position: Affine) -> tuple[Affine, ...]:
        return (position, *(self.replaced(e) for n, e in enumerate(access.indices) if n not in flat.axes))

    def target(self) -> tuple[Access, Flattened | None]:
        target, pattern = self.statement.target, self.statement.pattern
        if self.pattern is not None:
            rest = target.indices[len(self.sparse[pattern].coordinates) :]
            return Access(target.name, (self.at(pattern, self.pattern), *map(self.replaced, rest))), None
        flat = self.flat(target)
        if flat is None:
            return Access(target.name, tuple(self.replaced(e) for e in target.indices)), None
        return Access(target.name, self.beside(target, flat, self.at(target.name, flat))), flat


def pattern_place(statement: Statement, sparse: Mapping[str, StoredAxes]) -> int:
    """The place of the factor whose pattern the target has. Raises if it is not sparse or has other indices."""
    name = statement.pattern
    if name not in sparse:
        raise OptionError(f"{statement.target.name} has the pattern of {name}, which is expected to be sparse")
    found = [f for f in statement.terms[0].factors if isinstance(f, Access) and f.name == name]
    for factor in found:
        if _has_pattern(statement, factor, sparse):
            return statement.terms[0].factors.index(factor)
    raise ShapeError(
        f"{statement.target} has the pattern of {name}: its axes are expected to be the stored ones of {name}, "
        f"and then indices that are in no coordinate; found {name} as {', '.join(map(str, found))}"
    )


def with_pattern(statement: Statement, sparse: Mapping[str, StoredAxes]) -> Statement:
    """A statement with a dense target that is 0 but at the entries of a sparse factor, with the pattern of that one."""
    for factor in statement.terms[0].factors:
        if isinstance(factor, Access) and factor.name in sparse and _has_pattern(statement, factor, sparse):
            return replace(statement, pattern=factor.name)
    return statement


def _has_pattern(statement: Statement, factor: Access, sparse: Mapping[str, StoredAxes]) -> bool:
    axes, target = sparse[factor.name].coordinates, statement.target.indices
    rest = [e.bare for e in target[len(axes) :]]
    bound = bound_indices(statement.terms[0], sparse)
    same = axes == tuple(range(len(axes))) and list(target[: len(axes)]) == [factor.indices[n] for n in axes]
    return same and len(set(rest) - {None, *bound}) == len(rest)


def bound_indices(term: Term, sparse: Mapping[str, StoredAxes]) -> tuple[str, ...]:
    """The indices in coordinates of sparse factors."""
    factors = [f for f in term.factors if isinstance(f, Access) and f.name in sparse]
    return indices_of(*(f.indices[n] for f in factors for n in sparse[f.name].coordinates))


def position_axes(access: Access, sparse: Mapping[str, StoredAxes]) -> tuple[int, ...]:
    """The axes over which a position of this access runs: all but `:`. Raises ShapeError if they have no position."""
    every = tuple(n for n, e in enumerate(access.indices) if indices_of(e) == (EVERY,))
    axes = tuple(n for n in range(len(access.indices)) if n not in every)
    stored = sparse.get(access.name)
    if stored is not None and axes != stored.coordinates:
        shown = [":" if n in stored.dense else str(e).replace(EVERY, "_") for n, e in enumerate(access.indices)]
        expected = f"expected {access.name}[{','.join(shown)}], found {access}"
        raise ShapeError(f"a position of {access.name} is that of a stored entry: {expected}")
    leading = axes == tuple(range(len(axes)))
    if stored is None and not (axes and leading and all(access.indices[n].bare for n in axes)):
        raise ShapeError(f"a position of a dense operand is that of its first axes, as in A[r,s,:]; found {access}")
    return axes


def sized(statement: Statement) -> Statement:
    """The statement of positions without its target and with an index for each `:`, to be bound."""
    taken = list(names_of(statement))
    factors = []
    for access in (f for f in statement.terms[0].factors if isinstance(f, Access)):
        expressions = []
        for expression in access.indices:
            if expression.terms and expression.terms[0][1] == Index(EVERY):
                taken.append(fresh("every", taken))
                expression = index(taken[-1])
            expressions.append(expression)
        factors.append(replace(access, indices=tuple(expressions)))
    return replace(statement, target=Access(statement.target.name), terms=(Term(tuple(factors)),), positions=())
