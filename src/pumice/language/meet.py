"""Statements in which entries of several sparse operands meet, as a join and a statement over what it finds.

    O[n,p,q,m] = Mask[n,p,q] * I[n,p+r,q+s,c] * F[r,s,c,m]              with Mask and I sparse becomes

    map[a,k,b] = 1 for entries a of Mask and b of I, and k: n, p, q, r, s, that satisfy all coordinates       (the join)
    O[a,m] = map[a,k,b] * Mask_values[a] * I_values[b,c] * F[k,c,m]

where F and, if dense, O have as one axis those of their axes whose indices the join finds. Cf. the two phases of a
map-based convolution in "Unified Convolution Framework", 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import prod
from typing import TypeVar

from pumice.errors import OptionError, ShapeError
from pumice.language.derive import fresh, names_of
from pumice.language.formats import Format, layout
from pumice.language.nodes import (
    ANY,
    EVERY,
    Access,
    Affine,
    Factor,
    Index,
    Range,
    Statement,
    Term,
    accesses_of,
    arrays_of,
    index,
    indices_of,
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


def check_term(statement: Statement, term: Term, sparse: Mapping[str, StoredAxes]) -> None:
    """Raise OptionError for a term in which sparse operands meet and that cannot be joined."""
    text = f"`{statement.text or statement}`: entries of sparse operands meet"
    if statement.reduction != "sum":
        raise OptionError(f"{text} under {statement.operator}, expected under = or +=; pass all but one of them dense")
    for access in (*arrays_of(term), *accesses_of(*(f for f in term.factors if not isinstance(f, Access)))):
        if access.name in sparse:
            raise OptionError(f"{text}, and {access} is not a factor of the product; pass {access.name} dense")


def check_join(statement: Statement, sparse: Mapping[str, StoredAxes]) -> None:
    """Raise where a join cannot use operands stored so."""
    coordinates = {name: axes.coordinates for name, axes in sparse.items()}
    for term in statement.terms:
        if meets(term, coordinates):
            check_term(statement, term, sparse)
        for factor in term.factors if statement.positions else ():
            if isinstance(factor, Access) and factor.name in sparse:
                position_axes(factor, sparse)
    if statement.pattern in sparse:
        aggregation(statement, sparse)


def steps_of_join(statement: Statement, sparse: Mapping[str, StoredAxes]) -> list[Statement]:
    """The statements over the result of a join, and those of terms that need none."""
    coordinates = {name: axes.coordinates for name, axes in sparse.items()}
    steps = single_terms(statement)
    return [
        aggregation(step, sparse).statement if statement.pattern or meets(step.terms[0], coordinates) else step
        for step in steps
    ]


@dataclass(frozen=True)
class Flattened:
    """An axis of positions in the dense operand `name`: `axes` of it taken as one, indexed by `indices`."""

    name: str
    axes: tuple[int, ...]
    indices: tuple[str, ...]


Source = str | int | Flattened
"""What a join tells of each row: the value of an index, the entry of the factor at a place, or a position."""


@dataclass(frozen=True)
class Window:
    """Two sparse factors, of which the entries of one lie in a window around those of the other: on each axis

        coordinate of `other` = stride * coordinate of `base` + offset

    so that a kernel map holds all that meet. base, other: places of the factors. columns: their axes (of base, of
    other) in the order of the map's: first that of the batch, which has no offsets, (-1, -1) if there is none. stride,
    offsets: of the other axes, an offset for each point of `taps`, the window's indices, the last one fastest.
    """

    base: int
    other: int
    columns: tuple[tuple[int, int], ...]
    stride: tuple[int, ...]
    taps: tuple[tuple[str, Range], ...]
    offsets: tuple[tuple[int, ...], ...]

    def role(self, source: Source) -> str:
        """The index of map[o, k, i] that is this source; "" if none is."""
        if isinstance(source, int):
            return {self.base: "o", self.other: "i"}.get(source, "")
        names = (source,) if isinstance(source, str) else source.indices
        whole = names == tuple(name for name, _ in self.taps) and not any(r.start for _, r in self.taps)
        return "k" if whole else ""


_MOST_TAPS = 1 << 12  # of a window that is tried point by point
_MOST_AXES = 4
_INT32 = 1 << 31


def window_of(
    term: Term, sparse: Mapping[str, StoredAxes], ranges: Mapping[str, Range], shapes: Mapping[str, Sequence[int]]
) -> Window | None:
    """The window in which two sparse factors of a term meet; None if no pair of them does so."""
    factors = {n: f for n, f in enumerate(term.factors) if isinstance(f, Access)}
    order = indices_of(*(f for f in factors.values() if f.name not in sparse), *factors.values())
    for places in permutations([n for n, f in factors.items() if f.name in sparse], 2):
        base, window = ([factors[n].indices[a] for a in sparse[factors[n].name].coordinates] for n in places)
        extents = [shapes[factors[places[0]].name][a] for a in sparse[factors[places[0]].name].coordinates]
        steps = _steps([e.bare or "" for e in base], window)
        if steps is None or any(ranges[str(e)] != Range(0, n) for e, n in zip(base, extents, strict=True)):
            continue
        free = set(indices_of(*window)) - set(indices_of(*base))
        taps = tuple((name, ranges[name]) for name in order if name in free)
        batch = next((n for n, e in enumerate(window) if e.bare and len(window) > 1), -1)
        rest = [n for n in range(len(window)) if n != batch]
        offsets = _offsets([window[n] for n in rest], taps)
        stride, first = tuple(steps[n][1] for n in rest), (-1, -1) if batch < 0 else (steps[batch][0], batch)
        reach = max(stride) * max(extents) + max((abs(o) for offset in offsets for o in offset), default=0)
        if 0 < len(offsets) == len({*offsets}) and len(rest) <= _MOST_AXES and reach < _INT32:
            return Window(*places, (first, *((steps[n][0], n) for n in rest)), stride, taps, offsets)
    return None


def _steps(bare: Sequence[str], window: Sequence[Affine]) -> list[tuple[int, int]] | None:
    """(number of the bare index, stride) of each expression, if every bare index stands in just one; else None."""
    own = [[(bare.index(str(atom)), c) for c, atom in e.terms if str(atom) in bare] for e in window]
    if sorted(n for each in own for n, _ in each) != [*range(len(bare))] or any(len(each) != 1 for each in own):
        return None
    found = [each[0] for each in own]
    return found if all(c > 0 for _, c in found) and not any(e.arrays for e in window) else None


def _offsets(window: Sequence[Affine], taps: Sequence[tuple[str, Range]]) -> tuple[tuple[int, ...], ...]:
    """What the expressions add to their bare index at each point of the taps; none if these are too many."""
    if prod(len(points) for _, points in taps) > _MOST_TAPS:
        return ()
    points = product(*(range(points.start, points.stop) for _, points in taps))
    values = [dict(zip(dict(taps), at, strict=True)) for at in points]
    return tuple(tuple(e.constant + sum(c * at.get(str(a), 0) for c, a in e.terms) for e in window) for at in values)


@dataclass(frozen=True)
class Aggregation:
    """The statement over the result of a join, which is a sparse pattern: O[i,m] = map[i,k,j] * X[j,c] * W[k,c,m].

    map: the name of the pattern. sources: what its axes are, by their indices; a kernel map's come in the order o, k, i
        or i, k, o. first: the axis by which it is best sorted, that of a dense factor, a weight, else of the target.
    values: by name, the sparse operand. flattened: by name, the axes of a dense operand; target: those of the target.
    scale: the sparse operand whose values the result is multiplied by, as its entries are those of the target; or "".
    """

    statement: Statement
    map: str
    sources: Mapping[str, Source]
    first: str
    values: Mapping[str, str]
    flattened: Mapping[str, Flattened]
    target: Flattened | None
    scale: str


def aggregation(
    statement: Statement, sparse: Mapping[str, StoredAxes], patterns: Sequence[str] = (), window: Window | None = None
) -> Aggregation:
    """The second statement of one that joins, with one term. patterns: sparse operands without values. If the target's
    pattern is computed, its axis of coordinates is one that no other operand has."""
    return _AggregationBuilder(statement, sparse, patterns).built(window)


class _AggregationBuilder:
    """Collects the operands of an aggregation."""

    def __init__(self, statement: Statement, sparse: Mapping[str, StoredAxes], patterns: Sequence[str]) -> None:
        self.statement, self.sparse, self.patterns = statement, sparse, patterns
        self.taken = list(names_of(statement))
        self.bound = bound_indices(statement.terms[0], sparse)
        self.sources: dict[str, Source] = {}
        self.values: dict[str, str] = {}
        self.flattened: dict[str, Flattened] = {}
        self.pattern = pattern_place(statement, sparse) if statement.pattern not in ("", ANY) else None
        self.scale = ""

    def name(self, wanted: str) -> str:
        self.taken.append(fresh(wanted, self.taken))
        return self.taken[-1]

    def built(self, window: Window | None) -> Aggregation:
        (old,), map, target = self.statement.terms, self.name("map"), self.target()
        factors = [f for place, factor in enumerate(old.factors) if (f := self.factor(place, factor))]
        self.sources.update((name, name) for name in indices_of(target, *factors) if name in self.bound)
        if not self.sources:
            self.at("e", next(n for n, f in enumerate(old.factors) if isinstance(f, Access) and f.name in self.sparse))
        names = self.ordered(window)
        weights = (f for f in factors if isinstance(f, Access) and f.name not in self.values)
        first = next(n for n in (*indices_of(*weights), *indices_of(target), *names) if n in names)
        term = Term((*factors, Access(map, tuple(index(n) for n in names))), old.coefficient)
        left, operands = indices_of(target, term), {access.name for access in accesses_of(target, term)}
        ranges = tuple(r for r in self.statement.ranges if r[0] in left and r[0] not in names)
        facts = tuple(f for f in self.statement.facts if f[0] in operands)
        sources, new = {n: self.sources[n] for n in names}, Statement(target, (term,), ranges=ranges, facts=facts)
        flat = self.flattened.pop(target.name, None)
        return Aggregation(new, map, sources, first, self.values, self.flattened, flat, self.scale)

    def ordered(self, window: Window | None) -> list[str]:
        """The axes of the map, those of a kernel map in the order that its storage forms have."""
        names = [*self.sources]
        roles = [window.role(self.sources[name]) if window else "" for name in names]
        if sorted(roles) == ["i", "k", "o"]:
            names.insert(1, names.pop(roles.index("k")))
        return names

    def at(self, label: str, source: Source) -> Affine:
        """The index that stands for a source."""
        known = next((name for name, other in self.sources.items() if other == source), None)
        name = known or self.name(f"{label}_at")
        self.sources[name] = source
        return index(name)

    def factor(self, place: int, factor: Factor) -> Factor | None:
        if not isinstance(factor, Access) or factor.name in self.patterns:
            return None if isinstance(factor, Access) else factor
        if factor.name not in self.sparse:
            return self.dense(factor, f"{factor.name}_flat")
        dense = self.sparse[factor.name].dense
        if place == self.pattern and not dense:
            self.scale = factor.name
            return None
        name = next((n for n, operand in self.values.items() if operand == factor.name), None)
        name = name or self.name(f"{factor.name}_values")
        self.values[name] = factor.name
        return Access(name, (self.at(factor.name, place), *(factor.indices[n] for n in dense)))

    def dense(self, access: Access, wanted: str, least: int = 2) -> Access:
        """The access with the axes whose indices are bound as one, if they are `least`, all bare and different."""
        axes = tuple(n for n, e in enumerate(access.indices) if set(indices_of(e)) & set(self.bound))
        names = tuple(access.indices[n].bare or "" for n in axes)
        if not len(set(names) - {""}) == len(axes) >= least:
            return access
        name = wanted if wanted == access.name else self.name(wanted)
        self.flattened[name] = flat = Flattened(access.name, axes, names)
        rest = (e for n, e in enumerate(access.indices) if n not in axes)
        return Access(name, (self.at(access.name, flat), *rest))

    def target(self) -> Access:
        target = self.statement.target
        if self.pattern is None:
            return self.dense(target, target.name, 1 if self.statement.pattern == ANY else 2)
        rest = target.indices[len(self.sparse[self.statement.pattern].coordinates) :]
        return Access(target.name, (self.at(self.statement.pattern, self.pattern), *rest))


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
