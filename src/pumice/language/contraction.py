"""The contraction in a statement: its indices as batch, rows (M), columns (N) and reduction (K).

    C[32*AM[p]+bm, n] += A[p,q,bm,bk] * B[32*AK[p,q]+bk, n]      AM sorted
    segment p under s, rows bm, columns n, reduced bk, loops (p, q)

If a sorted index array addresses the target, the points that write one target entry are contiguous: a segment. Its sum
stays in registers and is written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pumice.language.derive import fresh, names_of
from pumice.language.nodes import Access, Affine, Index, Statement, Term, accesses_of, affine, arrays_of, indices_of

_SMALLEST = 8  # rows, columns or reduced points below which a tile of a matrix product is mostly padding

_SMALLEST_WITHIN = 4  # the same if the left side is a nested product

_DEEPEST_WITHIN, _LONGEST_WITHIN = 64, 8
"""Limits of a nested product: points of its shared index, and of its unrolled loops."""

_MANY = 4096  # results per segment from which they are the rows of a tile, in place of segments


@dataclass(frozen=True)
class Segment:
    """Contiguous equal entries of a sorted index array: `position` runs over the p with array[p] == `index`."""

    array: str
    position: str
    index: str


@dataclass(frozen=True)
class NestedProduct:
    """A matrix product that is the left side of another one, over reductions that occur in no other factor.

        Z[b,i,w] = A[b,l,i,j] * X[b,j,u] * W[b,l,u,w]       left[i,u] = A[i,j] * X[j,u], shared j

    shared      the reduction index of both of its sides, all in one tile
    summed      its other reductions, each in one side only; unrolled loops
    left, right positions of its factors without, with the outer reduction
    """

    shared: str
    summed: tuple[str, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]


@dataclass(frozen=True)
class ContractionRoles:
    """The role of each index.

    product     left and right form a matrix product; otherwise factors are multiplied elementwise
    rows, columns   the two axes of the result tile; several indices form one axis, the last one fastest
    reduced     the third axis of a matrix product; loops: the sequential reductions
    batch       target indices with one value per program
    left, right positions of the factors on either side of the product
    target      the target access, with the segment index in place of its array
    segment     see Segment; its index is the first of batch or the only row
    atomic      several programs may add to one target entry
    folds       the columns are a reduction too, summed at the end; in a matrix product after multiplying by the factors
                outside the loop: Z[b,p] = (G[b,w] . W[p,u,w]) * X[b,u], columns u
    stacked     the rows of a matrix product are consecutive segments, see stacked()
    packed      the third axis of a matrix product holds several entries of a segment, see packed()
    within      the left side if it is a nested product; infinities and NaN spread to all rows, since rows are
                multiplied by 0, as in every matrix product
    """

    product: bool
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    reduced: tuple[str, ...]
    loops: tuple[str, ...]
    batch: tuple[str, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    target: Access
    segment: Segment | None
    atomic: bool
    folds: bool = False
    stacked: bool = False
    packed: bool = False
    within: NestedProduct | None = None

    @property
    def laned(self) -> bool:
        """True if the rows are segments, each with its own loop; a tile then has many segments."""
        return self.segment is not None and self.rows == (self.segment.index,) and not self.stacked


def contraction_roles(statement: Statement, extents: Mapping[str, int]) -> ContractionRoles:
    """The roles of the indices in a statement of one term."""
    (term,) = statement.terms
    target, segment = _segmented(statement)
    out = indices_of(target)
    everything = indices_of(target, term)
    reduced = tuple(name for name in everything if name not in out)
    adds = not _injective(target, extents, statement)
    found = _product(term, target, reduced, segment, extents)
    if found is None and (segment is not None or adds):
        # Even mostly padded, tensor cores are faster than elementwise gathers.
        found = _product(term, target, reduced, segment, extents, narrow=True)
    common = {"target": target, "segment": segment, "atomic": adds}
    if found is not None:
        return replace(found, **common)
    folded = _folded_product(term, target, reduced, extents) if segment is None else None
    if folded is not None:
        # Several blocks of columns may add to one target entry.
        return replace(folded, target=target, atomic=True)
    return replace(_entrywise(term, target, reduced, segment, extents), **common)


def exchanged(roles: ContractionRoles) -> ContractionRoles:
    """The same product with rows and columns exchanged, and left and right."""
    return replace(roles, rows=roles.columns, columns=roles.rows, left=roles.right, right=roles.left)


def stacked(roles: ContractionRoles, statement: Statement) -> ContractionRoles | None:
    """Consecutive segments as the rows of one matrix product, or None if the statement has no such form.

        C[A_m[p],n] = V[p] * B[A_k[p],n]      left[s,p] = V[p] if A_m[p] == s else 0,   right[p,n] = B[A_k[p],n]

    The reduction runs over the entries of all segments of a tile. The left side is mostly zero; tensor cores multiply
    it faster than plain units convert and add the non-zeros.
    """
    if not roles.laned or roles.folds or roles.atomic or roles.segment is None or not roles.columns:
        return None
    deps = [set(indices_of(factor)) for factor in statement.terms[0].factors]
    right = tuple(i for i, dep in enumerate(deps) if dep & set(roles.columns))
    left = tuple(i for i, dep in enumerate(deps) if i not in right)
    if len(right) != 1 or len(left) > 1:
        return None
    position = roles.segment.position
    reduced = (position, *(name for name in roles.loops if name != position))
    return replace(roles, product=True, reduced=reduced, loops=(), left=left, right=right, stacked=True)


def packed(roles: ContractionRoles, statement: Statement, extents: Mapping[str, int]) -> ContractionRoles | None:
    """Roles in which the third axis of one matrix product holds consecutive entries of a segment, or None if the
    statement has no such form.

        O[rows[tile[e],b],n] = x[met[e,b],c] * w[n,k[e],c]      left[b,(e,c)], right[(e,c),n], few c

    c may have 1 point, too few for a product over c alone. No axis may depend on both e and c, or decrease along e.
    """
    segment = roles.segment
    if segment is None or roles.laned or roles.folds:
        return None
    (term,) = statement.terms
    out = indices_of(roles.target)
    reduced = tuple(name for name in indices_of(roles.target, term) if name not in out)
    found = _product(term, roles.target, reduced, segment, extents, 1)
    if found is None or found.loops != (segment.position,) or len(found.reduced) != 1:
        return None
    along = [e for access in accesses_of(term) for e in access.indices if segment.position in indices_of(e)]
    if any(set(found.reduced) <= set(indices_of(e)) or any(c < 0 for c, _ in e.terms) for e in along):
        return None
    return replace(found, target=roles.target, segment=segment, atomic=roles.atomic, packed=True)


def segment_axis(roles: ContractionRoles) -> tuple[str, int, int]:
    """(operand, axis, coefficient) of an axis that is indexed by coefficient * segment index; operand "" is the result.
    The segment index has extent / coefficient points."""
    assert roles.segment is not None
    for access in (roles.target, *accesses_of(*roles.target.indices)):
        for axis, expression in enumerate(access.indices):
            for coefficient, atom in expression.terms:
                if atom == Index(roles.segment.index):
                    return "" if access.name == roles.target.name else access.name, axis, coefficient
    raise AssertionError(f"{roles.segment.index} is not in {roles.target}")


def _segmented(statement: Statement) -> tuple[Access, Segment | None]:
    """(target with its first suitable sorted array replaced by a segment index, segment or None)."""
    sorted_ = {name for name, fact in statement.facts if fact == "sorted"}
    target, read = statement.target, indices_of(*statement.terms)
    for array in arrays_of(*target.indices):
        position = array.indices[0].bare if len(array.indices) == 1 else None
        # If no factor depends on the position, there is nothing to loop over in a segment.
        if array.name not in sorted_ or position not in read:
            continue
        # Segments take all entries, so a range that does not start at 0 rules them out.
        if (declared := statement.declared(position)) is not None and declared.start:
            continue
        name = fresh("s", names_of(statement))
        replaced = _exchange(target, array, Index(name))
        if position not in indices_of(replaced) and _is_bounded(replaced, name):
            return replaced, Segment(array.name, position, name)
    return target, None


def _is_bounded(target: Access, name: str) -> bool:
    """True if the axis of the segment index has no negative part: the index then has extent / coefficient points."""
    every = [e for access in (target, *accesses_of(*target.indices)) for e in access.indices]
    axis = next(e for e in every if Index(name) in [atom for _, atom in e.terms])
    return axis.constant >= 0 and all(coefficient > 0 for coefficient, _ in axis.terms)


def _exchange(access: Access, old: Access, new: Index) -> Access:
    return replace(access, indices=tuple(_exchanged(e, old, new) for e in access.indices))


def _exchanged(expression: Affine, old: Access, new: Index) -> Affine:
    terms: list[tuple[int, Index | Access]] = []
    for coefficient, atom in expression.terms:
        if atom == old:
            atom = new
        elif isinstance(atom, Access):
            atom = _exchange(atom, old, new)
        terms.append((coefficient, atom))
    return affine(terms, expression.constant, expression.span)


def _injective(target: Access, extents: Mapping[str, int], statement: Statement) -> bool:
    """True if different points of the target's indices write different entries."""
    distinct = {name for name, fact in statement.facts if fact == "distinct"}
    known: set[str] = set()
    before = -1
    # An index determined by one axis may help to determine those of another.
    while before < len(known):
        before = len(known)
        for expression in target.indices:
            known |= _determined(expression, known, extents, distinct)
    return set(indices_of(target)) <= known


def _determined(expression: Affine, known: set[str], extents: Mapping[str, int], distinct: set[str]) -> set[str]:
    """The indices whose values follow from that of the expression and those of the indices in `known`."""
    if expression.arrays:
        ((_, atom), *rest) = expression.terms
        if rest or not isinstance(atom, Access) or atom.name not in distinct:
            return set()
        return {e.bare for e in atom.indices if e.bare}
    unknown = sorted((abs(c), a.name) for c, a in expression.terms if isinstance(a, Index) and a.name not in known)
    reach = 0
    for coefficient, name in unknown:
        if coefficient <= reach:
            return set()
        # The range of the segment index is unknown, so no larger coefficient can be decoded.
        reach += coefficient * (max(extents.get(name, 1 << 62), 1) - 1)
    return {name for _, name in unknown}


def _product(
    term: Term,
    target: Access,
    reduced: Sequence[str],
    segment: Segment | None,
    extents: Mapping[str, int],
    shallowest: int = _SMALLEST,
    narrow: bool = False,
) -> ContractionRoles | None:
    """Roles of the product with the largest tile, or None. shallowest: minimum reduction; narrow: a side may be 1."""
    deps = [set(indices_of(factor)) for factor in term.factors]
    if not all(isinstance(factor, Access) for factor in term.factors):
        return None
    own = segment.index if segment else None
    position = segment.position if segment else None
    out = [name for name in indices_of(target) if name != own]
    inside = set(indices_of(*arrays_of(term, target)))
    best: tuple[tuple[bool, int], ContractionRoles] | None = None
    for column in (name for name in out if name not in inside):
        right = tuple(i for i, dep in enumerate(deps) if column in dep)
        left = tuple(i for i, dep in enumerate(deps) if column not in dep)
        a, b = _union(deps, left), _union(deps, right)
        rows = tuple(name for name in out if name in a and name not in b)
        columns = tuple(name for name in out if name in b and name not in a and name not in inside)
        meets = tuple(name for name in reduced if name in a and name in b and name != position)
        if not rows or not meets:
            continue
        tile = _tile_of(meets, extents)
        alone = tuple(name for name in reduced if name in a and name not in b)
        within = _within(deps, left, meets[-1:], alone, extents) if segment is None else None
        if within is not None:
            tile = meets[-1:]
            both = _union(deps, within.right)
            rows = tuple(name for name in rows if name not in both)
        sizes = [_volume(names, extents) if names else 0 for names in (rows, columns, tile)]
        least = (_SMALLEST_WITHIN,) * 3 if within else (_SMALLEST, _SMALLEST, shallowest)
        if narrow and columns and max(sizes[:2]) >= _SMALLEST:
            least = (1, 1, shallowest)
        if any(size < few for size, few in zip(sizes, least, strict=True)):
            continue
        score = math.prod(min(size, cap) for size, cap in zip(sizes, (128, 128, 64), strict=True))
        # On a tie prefer columns that are the target's last axis: they are stored contiguously.
        score = 2 * score + (bool(target.indices) and target.indices[-1].bare in columns)
        # A nested product is preferred: it saves a loop around everything else.
        rank = (within is not None, score)
        if best is None or rank > best[0]:
            best = rank, _with_rest(target, reduced, (rows, columns, tile), (left, right), own, within)
    return best[1] if best else None


def _within(
    deps: Sequence[set[str]],
    places: Sequence[int],
    tile: Sequence[str],
    own_reductions: Sequence[str],
    extents: Mapping[str, int],
) -> NestedProduct | None:
    """The factors at `places` as a nested product over `own_reductions`, which no other factor has, or None."""
    right = tuple(place for place in places if deps[place] & set(tile))
    left = tuple(place for place in places if place not in right)
    shared = [name for name in own_reductions if name in _union(deps, left) and name in _union(deps, right)]
    if len(shared) != 1 or not _SMALLEST_WITHIN <= extents[shared[0]] <= _DEEPEST_WITHIN:
        return None
    summed = tuple(name for name in own_reductions if name != shared[0])
    return NestedProduct(shared[0], summed, left, right) if _volume(summed, extents) <= _LONGEST_WITHIN else None


def _folded_product(
    term: Term, target: Access, reduced: Sequence[str], extents: Mapping[str, int]
) -> ContractionRoles | None:
    """Roles (`folds`) of the largest product whose columns are a reduction, or None."""
    if not all(isinstance(factor, Access) for factor in term.factors):
        return None
    deps = [set(indices_of(factor)) for factor in term.factors]
    inside = set(indices_of(*arrays_of(term, target)))
    best: tuple[int, ContractionRoles] | None = None
    for column, meet in ((c, k) for c in reduced for k in reduced if c != k and not {c, k} & inside):
        inner = [i for i, dep in enumerate(deps) if meet in dep]
        right = tuple(i for i in inner if column in deps[i])
        left = tuple(i for i in inner if column not in deps[i])
        a, b = _union(deps, left), _union(deps, right)
        turning = set(reduced) - {column}
        if not left or not right or any(turning & deps[i] for i in range(len(deps)) if i not in inner):
            continue
        rows = tuple(name for name in indices_of(target) if name in a and name not in b)
        sizes = [_volume(names, extents) for names in (rows, (column,), (meet,))]
        if not rows or min(sizes) < _SMALLEST:
            continue
        score = math.prod(min(size, cap) for size, cap in zip(sizes, (128, 128, 64), strict=True))
        if best is None or score > best[0]:
            rest = tuple(name for name in reduced if name != column)
            found = _with_rest(target, rest, (rows, (column,), (meet,)), (left, right), None)
            best = score, replace(found, folds=True)
    return best[1] if best else None


def _with_rest(
    target: Access,
    reduced: Sequence[str],
    axes: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]],
    sides: tuple[tuple[int, ...], tuple[int, ...]],
    own: str | None,
    within: NestedProduct | None = None,
) -> ContractionRoles:
    rows, columns, tile = axes
    inside = (within.shared, *within.summed) if within else ()
    loops = tuple(name for name in reduced if name not in tile and name not in inside)
    batch = tuple(n for n in indices_of(target) if n not in rows and n not in columns and n != own)
    batch = (own, *batch) if own else batch
    return ContractionRoles(True, rows, columns, tile, loops, batch, *sides, target, None, False, within=within)


def _tile_of(meets: Sequence[str], extents: Mapping[str, int]) -> tuple[str, ...]:
    """The reduction indices of a tile: the last one, and those before it until they have 16 points."""
    tile: list[str] = []
    for name in reversed(meets):
        if tile and _volume(tile, extents) >= 16:
            break
        tile.insert(0, name)
    return tuple(tile)


def _entrywise(
    term: Term, target: Access, reduced: Sequence[str], segment: Segment | None, extents: Mapping[str, int]
) -> ContractionRoles:
    """Roles without a matrix product; if the target has too few indices, the columns are a reduction."""
    own, position = (segment.index, segment.position) if segment else (None, None)
    out = [name for name in indices_of(target) if name != own]
    inside = set(indices_of(*arrays_of(term, target)))
    free = [name for name in out if name not in inside]
    folded = [name for name in reduced if name != position and name not in inside]

    def made(rows: Sequence[str], columns: Sequence[str], folds: bool = False) -> ContractionRoles:
        loops = tuple(name for name in reduced if name not in columns)
        names = [own, *out] if own else out
        batch = tuple(name for name in names if name not in rows and name not in columns)
        every = tuple(range(len(term.factors)))
        return ContractionRoles(
            False, tuple(rows), tuple(columns), (), loops, batch, every, (), target, None, False, folds
        )

    along = _runs_along(term, extents)
    if own is None and along in folded and extents[along] >= _SMALLEST and free:
        # The largest factor is stored contiguously along a reduction.
        return made(free, [along], True)
    last = target.indices[-1].bare if target.indices else None
    # The only index outside arrays is rarely the contiguous axis of the result.
    together = () if own or len(free) != 1 or last in free else _side_by_side(term, target, extents)
    if together:
        return made(_longest([name for name in out if name not in together], extents), together)
    column = [last] if last in free else _longest(free, extents)
    if own is None and len(out) == 1 and folded:
        column = []
    if not column and folded:
        return made([own] if own else _longest(out, extents), _longest(folded, extents), True)
    if own and column:
        side = _widened(column[0], target, free, extents)
        indirect = [name for name in out if name in inside and extents[name] >= _SIDE]
        if indirect:
            # Each segment has indirect positions of its own, as a tile of a kernel map: they are the rows.
            return made(_longest(indirect, extents), side)
        many = [name for name in free if name not in column]
        if _volume(many, extents) >= _MANY:
            return made(many, column)
    return made([own] if own else _longest([name for name in out if name not in column], extents), column)


def _longest(names: Sequence[str], extents: Mapping[str, int]) -> list[str]:
    return [max(names, key=lambda name: extents[name])] if names else []


def _widened(column: str, target: Access, free: Sequence[str], extents: Mapping[str, int]) -> tuple[str, ...]:
    """The column and the indices before it in the target until they have _SIDE points: channels of a group, groups."""
    bare = [expression.bare for expression in target.indices]
    found = [column]
    for name in reversed(bare[: bare.index(column)] if column in bare else []):
        if name is None or name not in free or _volume(found, extents) >= _SIDE:
            break
        found.insert(0, name)
    return tuple(found)


_SIDE = 16  # points that are enough for a side of a tile
_ACROSS = 128  # contiguous results that are enough for the columns of a tile


def _side_by_side(term: Term, target: Access, extents: Mapping[str, int]) -> tuple[str, ...]:
    """Indices, also inside arrays, along which the result is contiguous; if it is scattered, the largest factor."""
    scattered = not target.indices or target.indices[-1].bare is None
    along = _largest(term, extents) if scattered else target
    places = [name for expression in target.indices for name in indices_of(expression)]
    found: list[str] = []
    for expression in reversed(along.indices if along else ()):
        name = expression.bare
        if name is None or name in found or places.count(name) != 1 or _volume(found, extents) >= _ACROSS:
            break
        found.insert(0, name)
    return tuple(found)


def _runs_along(term: Term, extents: Mapping[str, int]) -> str | None:
    """The bare index of the last axis of the factor with the most points, or None."""
    largest = _largest(term, extents)
    return largest.indices[-1].bare if largest else None


def _largest(term: Term, extents: Mapping[str, int]) -> Access | None:
    factors = [factor for factor in term.factors if isinstance(factor, Access) and factor.indices]
    return max(factors, key=lambda f: _volume(indices_of(f), extents), default=None)


def _union(deps: Sequence[set[str]], places: Iterable[int]) -> set[str]:
    return set().union(*(deps[place] for place in places))


def _volume(names: Sequence[str], extents: Mapping[str, int]) -> int:
    return math.prod(extents[name] for name in names)
