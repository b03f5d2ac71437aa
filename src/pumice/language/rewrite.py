"""Lowering of statements with sparse operands to statements over the arrays that store these operands.

    C[m,n] = A[m,k] * B[k,n]        with A in "m:C k:G4 m:B32 k:B32"  becomes
    C[32*A_m[p]+m_in, n] += A_values[p,q,m_in,k_in] * B[32*A_k[p,q]+k_in, n]

The index of a sparse axis is replaced by the stored coordinate, if expression = coordinate can be solved for it;
otherwise the operand is used in dense form, and the result has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pumice.errors import OptionError, ShapeError
from pumice.language.derive import fresh, names_of
from pumice.language.formats import Coordinate, Format, layout
from pumice.language.nested import unnested
from pumice.language.nodes import (
    Access,
    Affine,
    Equal,
    Exists,
    Factor,
    Index,
    Statement,
    Term,
    accesses_of,
    affine,
    arrays_of,
    index,
    indices_of,
    substitute,
)

VALUES = "values"  # local name of the values array


@dataclass(frozen=True)
class StorageForm:
    """The arrays that store a sparse operand, with local names of arrays and of positions.

    coordinates: for each axis, its coordinate as an expression over positions and index arrays; None for a dense axis,
        whose index is a position.
    values: the positions that index the values array, in storage order.
    dense: (position, axis) for each position that is the index of a dense axis.
    facts: (index array, "sorted" or "distinct").
    parts: number of buckets; each has its own arrays.
    ones: there is no values array; every stored entry is 1.
    listed: the index arrays without padding, which have a coordinate for each entry.
    """

    coordinates: tuple[Affine | None, ...]
    values: tuple[str, ...] = ()
    dense: tuple[tuple[str, int], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    parts: int = 1
    ones: bool = False
    listed: tuple[str, ...] = ()

    @property
    def arrays(self) -> tuple[str, ...]:
        """The local names of the index arrays."""
        found = (array.name for c in self.coordinates if c is not None for array in arrays_of(c))
        return tuple(dict.fromkeys(found))

    @staticmethod
    @lru_cache(maxsize=256)
    def of(format: Format, parts: int = 1, ones: bool = False) -> StorageForm:
        """The storage form of a format; index arrays have the names of their axes."""
        shape = layout(format)
        plain = enumerate(shape.coordinates)
        dense = tuple((c.position or "", n) for n, c in plain if c.array is None and c.inner is None)
        first = format.flattened[0] if format.flattened else None
        facts = ((first.axes[0], "sorted"),) if first and format.sorting[0][1] == 1 else ()
        listed = tuple(c.axis for c in shape.coordinates if c.array == (shape.position,) and c.inner is None)
        expressions = tuple(map(_expression, shape.coordinates))
        return StorageForm(expressions, shape.values, dense, facts, parts, ones, listed)


def _expression(c: Coordinate) -> Affine | None:
    """block * (array[positions] or position) + inner."""
    if c.array is None and c.inner is None:
        return None
    outer = Index(c.position or "") if c.array is None else Access(c.axis, tuple(index(symbol) for symbol in c.array))
    return affine([(c.block, outer), *([(1, Index(c.inner))] if c.inner else [])])


class Array(NamedTuple):
    """The array with local name `local` (VALUES: the values) in part `part` of the sparse operand `operand`."""

    operand: str
    part: int
    local: str


@dataclass(frozen=True)
class LoweredStatement:
    """A statement lowered to the arrays of its sparse operands.

    steps: statements executed in order, each adding to the target or computing an operand of later ones (`unnested`).
    arrays: by name in the steps, the stored array; all other names are those of operands.
    dense: by sparse operand that is used in dense form, the reason.
    """

    steps: tuple[Statement, ...]
    arrays: Mapping[str, Array]
    dense: Mapping[str, str]


class _Unsolvable(Exception):
    """A sparse operand cannot be replaced by its arrays."""

    def __init__(self, operand: str, reason: str) -> None:
        super().__init__(reason)
        self.operand, self.reason = operand, reason


def lower_statement(statement: Statement, stored: Mapping[str, StorageForm]) -> LoweredStatement:
    """`statement` lowered to the arrays of its sparse operands. Raises OptionError if under max, min or mean an operand
    cannot be replaced by its arrays: its dense form would have another meaning, since there an entry that is not stored
    does not exist."""
    dense: dict[str, str] = {}
    while True:
        held = {name: how for name, how in stored.items() if name not in dense}
        try:
            steps, arrays = _rewritten(statement, held)
            parts = (part for step in steps for part in unnested(simplify(step)))
            return LoweredStatement(tuple(parts), arrays, dense)
        except _Unsolvable as problem:
            if statement.reduction != "sum":
                raise OptionError(
                    f"{problem.operand} is sparse and {problem.reason}: under {statement.operator} its stored "
                    "entries alone do not give the result; pass it dense"
                ) from None
            dense[problem.operand] = problem.reason


def simplify(statement: Statement) -> Statement:
    """The statement with equal terms added up, without terms of coefficient 0 and conditions that always hold."""
    terms: dict[tuple[Factor, ...], float] = {}
    for term in statement.terms:
        kept = _without_conditions(term, statement)
        terms[kept] = terms.get(kept, 0) + term.coefficient if statement.reduction == "sum" else term.coefficient
    if statement.reduction != "sum" and len(terms) != len(statement.terms):
        return statement
    return _step(statement, tuple(Term(f, c) for f, c in terms.items() if c))


def _without_conditions(term: Term, statement: Statement) -> tuple[Factor, ...]:
    """The factors, Exists conditions last, without those that always hold."""
    conditions = [f for f in dict.fromkeys(term.factors) if isinstance(f, Exists)]
    kept = tuple(f for f in term.factors if not isinstance(f, Exists))
    for condition in tuple(conditions):
        others = tuple(f for f in conditions if f is not condition)
        if _holds(condition, (statement.target, *kept, *others), kept):
            conditions.remove(condition)
    return kept + tuple(conditions)


def single_terms(statement: Statement) -> tuple[Statement, ...]:
    """One statement per term of a sum; a max, min or mean statement unchanged."""
    if statement.reduction != "sum":
        return (statement,)
    return tuple(_step(statement, (term,)) for term in statement.terms)


def _step(statement: Statement, terms: tuple[Term, ...]) -> Statement:
    """The statement with these terms only, and the declarations of their names."""
    step = replace(statement, terms=terms)
    left, names = set(indices_of(step)), {access.name for access in accesses_of(step)}
    return replace(
        step,
        ranges=tuple(r for r in step.ranges if r[0] in left),
        facts=tuple(f for f in step.facts if f[0] in names),
        text="",
    )


def _holds(condition: Exists, others: Sequence[Factor], factors: Sequence[Factor]) -> bool:
    """True if the condition always holds: `factors` read its access, or its indices are bare, in `others` too."""
    if condition.access in factors:
        return True
    bare = {e.bare for access in accesses_of(*others) for e in access.indices}
    return all(e.bare and e.bare in bare for e in condition.access.indices)


def _rewritten(statement: Statement, stored: Mapping[str, StorageForm]) -> tuple[list[Statement], dict[str, Array]]:
    steps: list[Statement] = []
    arrays: dict[str, Array] = {}
    for step in single_terms(statement):
        places = [
            (place, stored[factor.name])
            for place, factor in _factors(step)
            if isinstance(factor, Access) and factor.name in stored
        ]
        _check_parts(step, stored)
        for choice in _choices([range(how.parts) for _, how in places]):
            new = step
            # In reverse order: a replacement may change the positions of later factors.
            for part, (place, how) in reversed(list(zip(choice, places, strict=True))):
                new = _replaced(new, place, _Naming(part, how, arrays, statement))
            _check_read(new, stored)
            steps.append(new)
    return steps, arrays


def _check_read(step: Statement, stored: Mapping[str, StorageForm]) -> None:
    """Raise _Unsolvable for a sparse operand that is read other than as a factor of a term."""
    for access in accesses_of(step):
        if access.name in stored and access.name != step.target.name:
            raise _Unsolvable(access.name, f"`{access}` is not a factor of a term")


def _check_parts(step: Statement, stored: Mapping[str, StorageForm]) -> None:
    """Raise _Unsolvable for several parts under max, min or mean, which do not add parts."""
    for access in accesses_of(step):
        if step.reduction != "sum" and access.name in stored and stored[access.name].parts > 1:
            raise _Unsolvable(access.name, f"stored in {stored[access.name].parts} parts")


def _factors(step: Statement) -> list[tuple[tuple[int, int], Factor]]:
    return [((t, f), factor) for t, term in enumerate(step.terms) for f, factor in enumerate(term.factors)]


def _choices(parts: Sequence[range]) -> list[tuple[int, ...]]:
    choices: list[tuple[int, ...]] = [()]
    for numbers in parts:
        choices = [(*choice, number) for choice in choices for number in numbers]
    return choices


@dataclass(frozen=True)
class _Naming:
    """Translates local names of one part of a sparse operand to unique names in the statement; fills `arrays`."""

    part: int
    stored: StorageForm
    arrays: dict[str, Array]
    statement: Statement

    def array(self, operand: str, local: str) -> str:
        wanted = Array(operand, self.part, local)
        for name, known in self.arrays.items():
            if known == wanted:
                return name
        suffix = f"_{self.part}" if self.stored.parts > 1 else ""
        name = fresh(f"{operand}_{local}{suffix}", (*names_of(self.statement), *self.arrays))
        self.arrays[name] = wanted
        return name

    def renamed(self, operand: str, expression: Affine, positions: Mapping[str, Affine]) -> Affine:
        """An expression in local names, translated; positions: their expressions in the statement."""
        terms: list[tuple[int, Index | Access]] = []
        constant = expression.constant
        for coefficient, atom in expression.terms:
            if isinstance(atom, Index):
                terms += [(coefficient * c, a) for c, a in positions[atom.name].terms]
                constant += coefficient * positions[atom.name].constant
            else:
                inner = tuple(self.renamed(operand, e, positions) for e in atom.indices)
                terms.append((coefficient, Access(self.array(operand, atom.name), inner)))
        return affine(terms, constant)


def _replaced(step: Statement, place: tuple[int, int], naming: _Naming) -> Statement:
    """The step with the access to a sparse operand at `place` replaced by accesses to its arrays."""
    stored, access = naming.stored, step.terms[place[0]].factors[place[1]]
    assert isinstance(access, Access)
    if len(access.indices) != len(stored.coordinates):
        raise ShapeError(f"{access} has {len(access.indices)} indices, its format has {len(stored.coordinates)} axes")
    positions = _positions(step, access, naming)
    new = _without(step, place)
    expressions = list(access.indices)
    solutions: dict[str, Affine] = {}
    for number, coordinate in enumerate(stored.coordinates):
        if coordinate is None:
            continue
        value = naming.renamed(access.name, coordinate, positions)
        name, solution = _solve(new, access.name, expressions, number, value)
        if not arrays_of(coordinate) and name not in indices_of(new):
            _check_counted(step, access, number, naming)
        solutions[name] = solution
        new = substitute(new, {name: solution})
        expressions = [substitute(e, {name: solution}) for e in expressions]
        positions = {symbol: substitute(e, {name: solution}) for symbol, e in positions.items()}
    values = (
        None if stored.ones else Access(naming.array(access.name, VALUES), tuple(positions[s] for s in stored.values))
    )
    new = _with_term(
        new, place[0], _repeated(new.terms[place[0]].factors, replace(access, indices=tuple(expressions)), values)
    )
    if values is not None:
        new = _with(new, place, values)
    new = replace(new, summed=_summed(step, access, solutions))
    _check_used(new, access, naming)
    facts = tuple((naming.array(access.name, local), fact) for local, fact in stored.facts)
    used, left = {a.name for a in arrays_of(new)}, set(indices_of(new))
    new = replace(new, ranges=tuple(r for r in new.ranges if r[0] in left))
    return replace(new, facts=(*new.facts, *(f for f in facts if f[0] in used and f not in new.facts)))


def _summed(step: Statement, access: Access, solutions: Mapping[str, Affine]) -> tuple[str, ...]:
    """The summed indices once those of a sparse operand are replaced by positions; raises _Unsolvable if a position is
    of summed indices and others, so that its entries belong to sums in no fixed number."""
    if not step.summed:
        return ()
    known, kinds = set(indices_of(step)), dict[str, bool]()
    for name, solution in solutions.items():
        inner = name in step.summed
        for found in indices_of(solution):
            mixed = not inner and found in step.summed if found in known else kinds.setdefault(found, inner) != inner
            if mixed:
                raise _Unsolvable(access.name, f"stores `{access}` by indices that are summed first and others")
    return (*(n for n in step.summed if n not in solutions), *(n for n, inner in kinds.items() if inner))


def _repeated(factors: Sequence[Factor], access: Access, values: Access | None) -> tuple[Factor, ...]:
    """The factors for stored entries of `access`: its Exists conditions hold, and Equal reads its `values` instead."""
    found: list[Factor] = []
    for factor in factors:
        if isinstance(factor, Exists) and factor.access == access:
            continue
        if isinstance(factor, Equal):
            own = values if values is not None and factor.access == access else factor.access
            stored = (values,) if values is not None else ()
            terms = tuple(
                replace(term, factors=tuple(n for f in term.factors for n in (stored if f == access else (f,))))
                for term in factor.terms
            )
            factor = Equal(own, terms)
        found.append(factor)
    return tuple(found)


def _positions(step: Statement, access: Access, naming: _Naming) -> dict[str, Affine]:
    """By stored position, its expression in the statement: a new index, or that of a dense axis."""
    taken = [*names_of(step), *naming.arrays]
    positions = {symbol: access.indices[number] for symbol, number in naming.stored.dense}
    inside = indices_of(*(c for c in naming.stored.coordinates if c is not None))
    for symbol in dict.fromkeys((*naming.stored.values, *inside)):
        if symbol in positions:
            continue
        name = fresh(symbol, taken)
        positions[symbol] = index(name)
        taken.append(name)
    return positions


def _solve(
    step: Statement, operand: str, expressions: Sequence[Affine], number: int, value: Affine
) -> tuple[str, Affine]:
    """(index, solution) of expressions[number] == value, the stored coordinate. Raises _Unsolvable."""
    expression = expressions[number]
    # An index alone on an axis may be declared: with a range from 0, which then is the whole axis.
    shut = {name for name, extent in step.ranges if extent.start} | set(indices_of(value))
    if expression.bare and expression.bare not in shut:
        return expression.bare, value
    implied = {e.bare for access in accesses_of(step) for e in access.indices} | {
        e.bare for i, e in enumerate(expressions) if i != number
    }
    for coefficient, atom in expression.terms:
        if not isinstance(atom, Index) or abs(coefficient) != 1 or atom.name in shut or atom.name not in implied:
            continue
        if atom.name in indices_of(*(a for _, a in expression.terms if isinstance(a, Access))):
            continue
        rest = [(-c * coefficient, a) for c, a in expression.terms if a != atom]
        solution = affine(
            [*((c * coefficient, a) for c, a in value.terms), *rest],
            coefficient * (value.constant - expression.constant),
        )
        return atom.name, solution
    raise _Unsolvable(operand, f"`{expression}` cannot be solved for an index that is free there")


def _check_counted(step: Statement, access: Access, number: int, naming: _Naming) -> None:
    """Raise _Unsolvable if the zeros that may pad the last block of a dense axis would affect the result."""
    if naming.stored.ones or step.reduction != "sum":
        raise _Unsolvable(
            access.name, f"its index `{access.indices[number]}`, in blocks, appears nowhere else in the statement"
        )


def _check_used(step: Statement, access: Access, naming: _Naming) -> None:
    """Raise _Unsolvable unless padding is recognised: by its value 0 in a sum, or its negative coordinate; or if
    entries would not be counted."""
    if not naming.stored.ones and step.reduction == "sum":
        return
    used, stored = {array.name for array in arrays_of(step)}, naming.stored
    missing = [local for local in stored.arrays if naming.array(access.name, local) not in used]
    # Without padding, each position is an entry, as long as it is read at all.
    if missing and (set(missing) - {*stored.listed} or (stored.ones and len(missing) == len(stored.arrays))):
        raise _Unsolvable(access.name, f"its coordinate {missing[0]} appears nowhere else in the statement")


def _without(step: Statement, place: tuple[int, int]) -> Statement:
    term = step.terms[place[0]]
    return _with_term(step, place[0], (*term.factors[: place[1]], *term.factors[place[1] + 1 :]))


def _with(step: Statement, place: tuple[int, int], factor: Factor) -> Statement:
    term = step.terms[place[0]]
    return _with_term(step, place[0], (*term.factors[: place[1]], factor, *term.factors[place[1] :]))


def _with_term(step: Statement, number: int, factors: tuple[Factor, ...]) -> Statement:
    terms = list(step.terms)
    terms[number] = replace(terms[number], factors=factors)
    return replace(step, terms=tuple(terms))
