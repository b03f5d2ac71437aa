"""Loop nests over the levels of sparse operands, as symbols: which loops, in which order, over what.

    O[n,p,q,m] = Mask[n,p,q] * I[n,p+r,q+s,c] * F[r,s,c,m]              with Mask and I sparse, order n p q r s c m:

    Entries(Mask)              n, p, q of each entry               Locate(I, 0)        position of n
      Walk(I, 1)  r            coordinates p+r of I below it, r in its range
        Walk(I, 2)  s
          Count  c             a dense loop, vectors of m inside

The base of a coordinate is its innermost index in the order, the rest its offset (paper, 3.2). The loop of an index
walks a compressed level whose coordinate has it as base, and finds the position in the other ones by search (Locate) or
side by side (Merge). A dense loop and a walk run over the points at which no access leaves its operand.

Source: "Unified Convolution Framework", sections 3.2 (base variables, offsets, bounds) and 4 (co-iteration).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from pumice.errors import OptionError
from pumice.language.nodes import Access, Affine, indices_of

DENSE, COMPRESSED, HASHED = "multiply", "search", "hash"  # How a level locates, see formats.KINDS
_MERGED = 4  # Two levels are merged if the longer one has fewer than so many times the coordinates of the shorter
_MOST_INDICES, _MANY_INDICES, _MANY_FACTORS = 10, 6, 3
_MOST_SETS = 64  # Of indices, that are continued in the search for an order of loops
_MOST_POINTS = 1 << 36  # Of the loops, as estimated: declared ranges may be any
_LANES = 8
# Nanoseconds, measured on a core with AVX2: a step of loops over levels; a vector of products inside them, and of
# entries; an element of dense arrays that is read or written; the use of an operand in dense form
_STEP, _VECTOR, _ENTRY_VECTOR, _ELEMENT, _DENSE_FORM = 3.0, 0.8, 0.6, 3.0, 2e4
_COLUMNS = 64  # Of a tile of vectors
_CACHED = ((8192, 0.4), (32768, 0.4))  # Values that a level of caches holds, and the cost of reading a vector behind it
_SHARED = 16  # Points of a loop that are enough to share them among threads


class LevelSize(NamedTuple):
    """A level of a sparse operand: the axis, its extent, its kind, and the positions of the level."""

    axis: int
    extent: int
    kind: str
    positions: int


@dataclass(frozen=True)
class IteratedAccess:
    """An access of a product. levels: of a sparse operand, outermost first; sizes: of all axes."""

    access: Access
    sizes: tuple[int, ...]
    levels: tuple[LevelSize, ...] = ()

    def coordinate(self, depth: int) -> Affine:
        return self.access.indices[self.levels[depth].axis]

    @cached_property
    def used(self) -> frozenset[str]:
        return frozenset(indices_of(self.access))

    @cached_property
    def coordinate_indices(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(indices_of(self.coordinate(depth))) for depth in range(len(self.levels)))

    @property
    def dense(self) -> tuple[int, ...]:
        """The axes without a level."""
        stored = {level.axis for level in self.levels}
        return tuple(n for n in range(len(self.access.indices)) if n not in stored)

    @property
    def stored(self) -> tuple[str, ...]:
        """The indices in coordinates of levels."""
        return indices_of(*(self.coordinate(depth) for depth in range(len(self.levels))))

    def known(self, bound: frozenset[str]) -> int:
        """The number of leading levels whose coordinates have no other indices than these."""
        found = (depth for depth, names in enumerate(self.coordinate_indices) if not names <= bound)
        return next(found, len(self.levels))

    def share(self, depth: int) -> float:
        """Coordinates present in a level, of those below a position of the level above."""
        level, above = self.levels[depth], self.levels[depth - 1].positions if depth else 1
        if level.kind == DENSE:
            return 1.0  # Positions are rounded.
        return level.positions / max(1, above * level.extent)


class LevelOf(NamedTuple):
    """Level `depth` of factor `factor`."""

    factor: int
    depth: int

    def __str__(self) -> str:
        return f"level {self.depth} of factor {self.factor}"


class AxisOf(NamedTuple):
    """An axis of a factor, or of the target (-1), which the loop's index must not leave."""

    factor: int
    axis: int


@dataclass(frozen=True)
class Count:
    """A dense loop."""

    index: str

    def __str__(self) -> str:
        return f"Count {self.index}"


@dataclass(frozen=True)
class Walk:
    """A loop over the coordinates of a compressed level below the position above. windowed: only those of a range;
    searched: its first one is searched for, else those before it are skipped."""

    index: str
    level: LevelOf
    windowed: bool
    searched: bool = True

    def __str__(self) -> str:
        window = ", windowed" * self.windowed + " without a search" * (self.windowed and not self.searched)
        return f"Walk {self.index} over {self.level}{window}"


@dataclass(frozen=True)
class Merge:
    """A loop over the coordinates that two compressed levels share."""

    index: str
    levels: tuple[LevelOf, LevelOf]

    def __str__(self) -> str:
        return f"Merge {self.index} over {self.levels[0]} and {self.levels[1]}"


@dataclass(frozen=True)
class EntryLoop:
    """A loop over the entries of a factor, which binds all indices of its coordinates."""

    indices: tuple[str, ...]
    factor: int

    def __str__(self) -> str:
        return f"Entries {', '.join(self.indices)} of factor {self.factor}"


Loop = Count | Walk | Merge | EntryLoop


class LoopStep(NamedTuple):
    """A loop; the axes that bound its index, or are checked in it; the levels whose positions are located in it."""

    loop: Loop
    within: tuple[AxisOf, ...]
    located: tuple[LevelOf, ...]

    @property
    def indices(self) -> tuple[str, ...]:
        return self.loop.indices if isinstance(self.loop, EntryLoop) else (self.loop.index,)


@dataclass(frozen=True)
class LoopNest:
    """The loops of a product. located: levels with constant coordinates; vector: the index of the vectors inside, ""
    if none; held: number of loops outside the accumulators; parallel: number of the loop whose points are shared among
    threads, -1 if none; pattern: the factor at whose entries the target has values, -1 if it is dense."""

    target: Access
    factors: tuple[IteratedAccess, ...]
    located: tuple[LevelOf, ...]
    steps: tuple[LoopStep, ...]
    vector: str
    held: int
    parallel: int
    pattern: int = -1

    @property
    def sums(self) -> bool:
        """True if the vector index is summed."""
        return bool(self.vector) and self.vector not in indices_of(self.target)

    def __str__(self) -> str:
        lines = []
        for number, step in enumerate(self.steps):
            notes = [f"Locate {level}" for level in step.located]
            notes += ["shared among threads"] * (number == self.parallel) + ["accumulators"] * (number + 1 == self.held)
            lines.append(f"{'  ' * number}{step.loop}{'    ' if notes else ''}{'; '.join(notes)}")
        product = " * ".join(str(f.access) for f in self.factors)
        vectors = f"    vectors of {self.vector}" if self.vector else ""
        return "\n".join([*lines, f"{'  ' * len(self.steps)}{self.target} += {product}{vectors}"])


class IterationChoices(NamedTuple):
    """What a schedule may prescribe. order: of the indices, () for the cheapest by the counts of positions; vector: the
    vector index, None for the longest; located: names of operands whose positions are searched for, where the levels
    of another one are walked; searched: whether the first coordinate of a window is searched for (paper, 4.2)."""

    order: tuple[str, ...] = ()
    vector: str | None = None
    located: tuple[str, ...] = ()
    searched: bool = True


@dataclass(frozen=True)
class LevelProduct:
    """A product of accesses that is added to the target of this shape. ranges: (start, stop) of the indices; pattern:
    the place of the factor at whose entries the target has values, -1 if the target is dense."""

    target: Access
    shape: tuple[int, ...]
    factors: tuple[IteratedAccess, ...]
    ranges: tuple[tuple[str, int, int], ...]
    pattern: int = -1


def products_of(product: LevelProduct) -> float:
    """The estimated number of products of present values."""
    shares = math.prod(f.share(depth) for f in product.factors for depth in range(len(f.levels)))
    return math.prod(stop - start for _, start, stop in product.ranges) * shares


def _nanoseconds(product: LevelProduct) -> float:
    """The estimated time of a product; of entries alone whose vectors are neighbours, that of loops over entries."""
    sparse, products = [f for f in product.factors if f.levels], products_of(product)
    bare = len(sparse) == 1 and all(sparse[0].coordinate(depth).bare for depth in range(len(sparse[0].levels)))
    if bare and not {*indices_of(*product.target.indices[-1:])} & {*sparse[0].stored}:
        dense = sum(math.prod(f.sizes) for f in product.factors if not f.levels)
        return products / _LANES * _ENTRY_VECTOR + (dense + math.prod(product.shape)) * _ELEMENT
    planner = _planner(product, IterationChoices())
    *_, spent = planner.order()
    last = product.target.indices[-1].bare if product.target.indices else None
    moved = math.prod(product.shape) if planner.vector in planner.written and planner.vector != last else 0
    return spent * _STEP + bool(planner.vector) * products / _LANES * _VECTOR + moved * _ELEMENT


def densified(product: LevelProduct) -> tuple[int, ...]:
    """The places of the sparse factors, at most all but one, that are best used in dense form.

    Vectors run along dense axes alone: with one factor dense, there are more products, in vectors."""
    sparse = [n for n, f in enumerate(product.factors) if f.levels and n != product.pattern]
    # Of many loops or factors, comparing all takes long.
    many = len(product.ranges) > _MANY_INDICES or len(sparse) > _MANY_FACTORS
    counts = {0, len(sparse) - 1} if many else range(len(sparse))
    every = (left for count in counts for left in combinations(sparse, count))
    return min(every, key=lambda places: _nanoseconds(_with_dense(product, places)) + len(places) * _DENSE_FORM)


def _with_dense(product: LevelProduct, places: Sequence[int]) -> LevelProduct:
    factors = (replace(f, levels=()) if n in places else f for n, f in enumerate(product.factors))
    return replace(product, factors=tuple(factors))


def loop_nest(product: LevelProduct, choices: IterationChoices) -> LoopNest:
    """The loops of a product that `refused` accepts. Raises OptionError if it cannot have the choices."""
    return _planner(product, choices).nest()


def _planner(product: LevelProduct, choices: IterationChoices) -> _Planner:
    possible = _vector_indices(product)
    vector = max(possible, default=(False, 0, ""))[2] if choices.vector is None else choices.vector
    if vector and vector not in (found := [name for *_, name in possible]):
        raise OptionError(f"vector {vector}: expected an index of dense axes alone, {', '.join(found) or 'none'}")
    every = indices_of(product.target, *(f.access for f in product.factors))
    if choices.order and sorted({*choices.order, vector} - {""}) != sorted(every):
        raise OptionError(f"order {' '.join(choices.order)}: expected the indices {', '.join(every)}")
    ranges = {name: (start, stop) for name, start, stop in product.ranges}
    vectors = -(-(ranges[vector][1] if vector else 1) // _LANES)
    sizes = product.target, product.shape, product.factors, ranges, product.pattern
    return _Planner(*sizes, choices, vector, vectors)


def refused(product: LevelProduct) -> str | None:
    """The reason why a product is no nest over levels, or None."""
    target, factors = product.target, product.factors
    names = indices_of(target, *(f.access for f in factors))
    if not 0 < len(names) <= _MOST_INDICES:
        return f"it has {len(names)} indices, expected 1 to {_MOST_INDICES}"
    if any(e.arrays for e in (*target.indices, *(e for f in factors for e in f.access.indices))):
        return "it has index arrays"
    if (points := products_of(product)) > _MOST_POINTS:
        return f"its loops have some {points:.0e} points, at most {_MOST_POINTS} are taken"
    return None if any(f.levels for f in factors) else "no factor is sparse"


def _vector_indices(product: LevelProduct) -> list[tuple[bool, int, str]]:
    """(in the target, extent, name) of the indices that stand alone in dense axes."""
    skipped = len(product.factors[product.pattern].levels) if product.pattern >= 0 else 0
    dense = [list(product.target.indices[skipped:])]
    dense += [[f.access.indices[axis] for axis in f.dense] for f in product.factors]
    taken = {*indices_of(*product.target.indices[:skipped])}.union(*(f.stored for f in product.factors))
    extents = {name: stop - start for name, start, stop in product.ranges if start == 0}
    found = []
    for name in indices_of(*(e for each in dense for e in each)):
        uses = [sum(name in indices_of(e) for e in each) for each in dense]
        bare = [sum(e.bare == name for e in each) for each in dense]
        if name not in taken and uses == bare and max(uses) == 1 and any(uses[1:]) and extents.get(name, 0) > 1:
            found.append((bool(uses[0]), extents[name], name))
    return found


@dataclass(frozen=True)
class _Planner:
    """Finds the loops of a product."""

    target: Access
    shape: tuple[int, ...]
    factors: tuple[IteratedAccess, ...]
    ranges: Mapping[str, tuple[int, int]]
    pattern: int
    choices: IterationChoices
    vector: str
    vectors: int  # Operations for all points of the vector index, about
    seen: dict[frozenset[str], tuple[tuple[int, ...], float]] = field(default_factory=dict)

    @cached_property
    def written(self) -> frozenset[str]:
        return frozenset(indices_of(self.target))

    @cached_property
    def names(self) -> frozenset[str]:
        return self.written.union(*(f.used for f in self.factors))

    def nest(self) -> LoopNest:
        order, entries, _ = self.order()
        bound, steps = frozenset[str](), list[LoopStep]()
        located = self.locatable(bound, ())
        done = set(located)
        while order:
            if entries >= 0 and not steps:
                names = self.factors[entries].stored
                done |= {LevelOf(entries, d) for d in range(len(self.factors[entries].levels))}
                loop: Loop = EntryLoop(names, entries)
            else:
                names = (order[0],)
                loop = self.loop(order[0], bound)
                done |= set(_levels_of(loop))
            order = [name for name in order if name not in names]
            bound |= {*names}
            more = self.locatable(bound, done)
            done |= set(more)
            steps.append(LoopStep(loop, self.bounds(names, bound), more))
        held = self.held(steps)
        parallel = self.parallel(steps)
        return LoopNest(self.target, self.factors, located, tuple(steps), self.vector, held, parallel, self.pattern)

    def extent(self, index: str) -> int:
        start, stop = self.ranges[index]
        return stop - start

    def locatable(self, bound: frozenset[str], done: Sequence[LevelOf] | set[LevelOf]) -> tuple[LevelOf, ...]:
        """The levels whose coordinates are known, in order."""
        every = (LevelOf(n, depth) for n, f in enumerate(self.factors) for depth in range(f.known(bound)))
        return tuple(level for level in every if level not in done)

    def loop(self, index: str, bound: frozenset[str]) -> Loop:
        """The loop of an index: over the compressed level with the fewest coordinates, or a dense one."""
        walkable = []
        for number, factor in enumerate(self.factors):
            depth = factor.known(bound)
            if depth == len(factor.levels) or not factor.coordinate_indices[depth] <= bound | {index}:
                continue
            kind, at = factor.levels[depth].kind, LevelOf(number, depth)
            # A hash finds no first coordinate of a window.
            if kind == COMPRESSED or (kind == HASHED and not (self._windowed(index, at) and self.choices.searched)):
                walkable.append((factor.share(depth) * factor.levels[depth].extent, at))
        if not walkable:
            return Count(index)
        free = [w for w in walkable if self.factors[w[1].factor].access.name not in self.choices.located]
        walkable = sorted(free or walkable)
        first = walkable[0][1]
        if len(walkable) == 2 and self._merges(index, walkable):
            return Merge(index, (first, walkable[1][1]))
        return Walk(index, first, self._windowed(index, first), self.choices.searched)

    def _merges(self, index: str, walkable: Sequence[tuple[float, LevelOf]]) -> bool:
        one = all(self.factors[at.factor].levels[at.depth].kind == COMPRESSED for _, at in walkable)
        one = one and all((1, index) in _pairs(self.factors[at.factor].coordinate(at.depth)) for _, at in walkable)
        return one and walkable[1][0] < _MERGED * walkable[0][0]

    def _windowed(self, index: str, level: LevelOf) -> bool:
        """False if all coordinates of the level are in the range of the index, and nothing else bounds it."""
        bare = self.factors[level.factor].coordinate(level.depth).bare == index
        extent = self.factors[level.factor].levels[level.depth].extent
        bounding = any(index in indices_of(self.expression(at)) and not self.inside(at) for at in self.axes())
        return not bare or self.ranges[index] != (0, extent) or bounding

    def axes(self) -> Iterator[AxisOf]:
        """The dense axes and levels of the product."""
        for number, factor in enumerate(self.factors):
            dense = [level.axis for level in factor.levels if level.kind == DENSE]
            yield from (AxisOf(number, axis) for axis in (*dense, *factor.dense))
        if self.pattern < 0:
            yield from (AxisOf(-1, axis) for axis in range(len(self.target.indices)))

    def expression(self, at: AxisOf) -> Affine:
        return (self.target if at.factor < 0 else self.factors[at.factor].access).indices[at.axis]

    def inside(self, at: AxisOf) -> bool:
        """True if the expression is within the axis at all points."""
        expression = self.expression(at)
        size = self.shape[at.axis] if at.factor < 0 else self.factors[at.factor].sizes[at.axis]
        ends = [sorted((c * self.ranges[i][0], c * (self.ranges[i][1] - 1))) for c, i in _pairs(expression)]
        low, high = (expression.constant + sum(end[side] for end in ends) for side in (0, 1))
        return low >= 0 and high < size

    def bounds(self, names: Sequence[str], bound: frozenset[str]) -> tuple[AxisOf, ...]:
        """The axes whose expressions have one of these indices as base and may leave their operands."""
        found = []
        for at in self.axes():
            used = {*indices_of(self.expression(at))}
            if used & {*names} and used <= bound and not self.inside(at):
                found.append(at)
        return tuple(found)

    def held(self, steps: Sequence[LoopStep]) -> int:
        """The number of loops that the target's position depends on."""
        return max((number for number, step in enumerate(steps, 1) if self.written & {*step.indices}), default=0)

    def parallel(self, steps: Sequence[LoopStep]) -> int:
        """The outermost loop with enough points, among those whose points write different parts of the target."""
        safe = {str(e.terms[0][1]) for e in self.target.indices if len(e.terms) == 1}
        sizes = {}
        for number, step in enumerate(steps):
            if isinstance(step.loop, EntryLoop):
                return number if safe.issuperset(step.indices) else -1
            if step.loop.index in safe:
                sizes[number] = min(_SHARED, self.extent(step.loop.index))
        return max(sizes, key=lambda number: sizes[number], default=-1)

    # Order

    def order(self) -> tuple[list[str], int, float]:
        """(indices in the order of their loops, the factor whose entries the first loop runs over, or -1, estimated
        steps, 0 if the order is prescribed)."""
        names = [n for n in indices_of(*(f.access for f in self.factors), self.target) if n != self.vector]
        entries = self.entries()
        if self.choices.order:
            first = self.factors[entries].stored if entries >= 0 else ()
            kept = [name for name in self.choices.order if name in names]
            return kept, entries if kept[: len(first)] == [*first] else -1, 0.0
        start = frozenset(self.factors[entries].stored) if entries >= 0 else frozenset[str]()
        order, spent = _cheapest(names, start, self.cost)
        return ([*self.factors[entries].stored] if entries >= 0 else []) + order, entries, spent

    def entries(self) -> int:
        """The factor with entries at which alone the target is written, -1 if there is none."""
        for number, factor in enumerate(self.factors):
            pairs = [(factor.coordinate(depth), level) for depth, level in enumerate(factor.levels)]
            bare = [e.bare for e, _ in pairs]
            plain = bool(bare) and None not in bare and len({*bare}) == len(bare)
            plain = plain and all(self.ranges[e.bare or ""] == (0, level.extent) for e, level in pairs)
            target = {e.bare for e in self.target.indices}
            if plain and (number == self.pattern or (self.pattern < 0 and target.issuperset(bare))):
                return number
        return -1

    def reached(self, bound: frozenset[str]) -> tuple[tuple[int, ...], float]:
        """(levels of each factor whose coordinates are known, estimated number of points of these indices at which all
        known coordinates are present)."""
        if (found := self.seen.get(bound)) is None:
            depths = tuple(factor.known(bound) for factor in self.factors)
            shares = (f.share(d) for f, depth in zip(self.factors, depths, strict=True) for d in range(depth))
            found = self.seen[bound] = depths, math.prod(map(self.extent, bound)) * math.prod(shares)
        return found

    def cost(self, bound: frozenset[str], index: str) -> float:
        """The estimated operations of the loop of an index inside the loops of others."""
        after = bound | {index}
        (depths, before), (reached, _) = self.reached(bound), self.reached(after)
        located, shares = 0, list[float]()
        for factor, start, stop in zip(self.factors, depths, reached, strict=True):
            kinds = [level.kind != DENSE for level in factor.levels[start:stop]]
            located += sum(kinds)
            if kinds and kinds[0]:
                shares.append(factor.share(start))
        points = before * self.extent(index) * min(shares, default=1.0)
        # Inside a loop that sums, each point of the target's last loop reads and writes its part.
        stored = index in self.written and not bound <= self.written and self.written <= after | {self.vector}
        stores = 2 * self.vectors * points * stored
        return 4 * before + points * (1 + 4 * max(0, located - bool(shares))) + stores + self.reloads(after, index)

    def reloads(self, bound: frozenset[str], index: str) -> float:
        """The cost of reading dense factors from behind the first-level cache, if this is the last loop that repeats
        what is read of them inside it."""
        names, total = self.names - {self.vector}, 0.0
        for factor in self.factors:
            used = factor.used
            if not factor.levels and self.vector in used and index not in used and names - bound <= used:
                values = min(_COLUMNS, self.extent(self.vector)) * math.prod(map(self.extent, names - bound))
                each = sum(cost for held, cost in _CACHED if values > held)
                total += each * self.vectors * self.reached(names)[1]
        return total


def _cheapest(
    names: Sequence[str], start: frozenset[str], cost: Callable[[frozenset[str], str], float]
) -> tuple[list[str], float]:
    """The order of the indices not in `start` with the least sum of costs, and the sum; of equal ones, that of the
    names: loops over axes that are stored next to each other are the inner ones."""
    best: dict[frozenset[str], tuple[float, tuple[int, ...]]] = {start: (0.0, ())}
    for _ in range(len(names) - len(start)):
        found: dict[frozenset[str], tuple[float, tuple[int, ...]]] = {}
        for bound, (spent, order) in best.items():
            for place, name in enumerate(names):
                if name not in bound:
                    total, after = float(f"{spent + cost(bound, name):.9g}"), bound | {name}
                    found[after] = min(found.get(after, (math.inf, ())), (total, (*order, place)))
        best = dict(sorted(found.items(), key=lambda item: item[1])[:_MOST_SETS])
    ((spent, order),) = best.values()
    return [names[place] for place in order], spent


def _pairs(expression: Affine) -> list[tuple[int, str]]:
    return [(c, str(atom)) for c, atom in expression.terms]


def _levels_of(loop: Loop) -> tuple[LevelOf, ...]:
    return loop.levels if isinstance(loop, Merge) else (loop.level,) if isinstance(loop, Walk) else ()
