"""From format-agnostic to format-conscious: sparse operands become the arrays that hold them.

    C[m,n] = A[m,k] * B[k,n]        with A in "m:C k:G4 m:B32 k:B32"  becomes
    C[32*A_m[p]+m_in, n] += A_values[p,q,m_in,k_in] * B[32*A_k[p,q]+k_in, n]

The index of a sparse axis is replaced by the coordinate that the format stores, where the equation can be solved for
it; an operand for which it cannot be is used in dense form, and the result says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pumice.errors import OptionError, ShapeError
from pumice.language.derive import fresh, names_of
from pumice.language.formats import Coordinate, Layout
from pumice.language.nodes import (
    Access,
    Affine,
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


@dataclass(frozen=True)
class Stored:
    """How a sparse operand is held: the layout of its parts (buckets), how many, and whether they have values.

    A part without values holds 1 wherever it stores an entry.
    """

    layout: Layout
    parts: int = 1
    values: bool = True


class Array(NamedTuple):
    """An array of a sparse operand: the coordinates of `axis` (None: the values) of part `part` of `operand`."""

    operand: str
    part: int
    axis: str | None


@dataclass(frozen=True)
class Conscious:
    """A statement in format-conscious form.

    steps: statements that are carried out one after another, each adding to the target what it computes.
    arrays: which array of which operand a name in the steps stands for; other names are the operands themselves.
    dense: sparse operands that are used in dense form, and why.
    """

    steps: tuple[Statement, ...]
    arrays: Mapping[str, Array]
    dense: Mapping[str, str]


class _Unsolvable(Exception):
    """No index of the access can be replaced by the stored coordinate."""

    def __init__(self, operand: str, reason: str) -> None:
        super().__init__(reason)
        self.operand, self.reason = operand, reason


def conscious(statement: Statement, stored: Mapping[str, Stored]) -> Conscious:
    """The steps of `statement` over the arrays of its sparse operands.

    Raises OptionError where a sparse operand cannot take part under max, min or mean (there an entry that is not
    stored does not exist, so that a dense form would mean something else).
    """
    dense: dict[str, str] = {}
    while True:
        held = {name: how for name, how in stored.items() if name not in dense}
        try:
            steps, arrays = _rewritten(statement, held)
            return Conscious(tuple(map(simplify, steps)), arrays, dense)
        except _Unsolvable as problem:
            if statement.reduction != "sum":
                raise OptionError(
                    f"{problem.operand} is sparse and {problem.reason}: under {statement.operator} that has no form "
                    "over stored entries; pass it dense"
                ) from None
            dense[problem.operand] = problem.reason


def simplify(statement: Statement) -> Statement:
    """The same with equal terms joined, terms of coefficient 0 and conditions that always hold left out."""
    terms: dict[tuple[Factor, ...], float] = {}
    for term in statement.terms:
        factors = tuple(f for f in dict.fromkeys(term.factors) if isinstance(f, Exists) and not _holds(f, term))
        kept = tuple(f for f in term.factors if not isinstance(f, Exists)) + factors
        terms[kept] = terms.get(kept, 0) + term.coefficient if statement.reduction == "sum" else term.coefficient
    if statement.reduction != "sum" and len(terms) != len(statement.terms):
        return statement
    return replace(statement, terms=tuple(Term(f, c) for f, c in terms.items() if c))


def single_terms(statement: Statement) -> tuple[Statement, ...]:
    """A sum as one statement per term; one of max, min or mean as it is."""
    if statement.reduction != "sum":
        return (statement,)
    return tuple(_step(statement, (term,)) for term in statement.terms)


def _step(statement: Statement, terms: tuple[Term, ...]) -> Statement:
    """These terms of the statement with the declarations that concern them."""
    step = replace(statement, terms=terms)
    left, names = set(indices_of(step)), {access.name for access in accesses_of(step)}
    return replace(
        step,
        ranges=tuple(r for r in step.ranges if r[0] in left),
        facts=tuple(f for f in step.facts if f[0] in names),
        text="",
    )


def _holds(condition: Exists, term: Term) -> bool:
    """Whether the term's own accesses, or its being bare, say so already."""
    inside = all(e.bare for e in condition.access.indices)
    return inside or condition.access in term.factors


def _rewritten(statement: Statement, stored: Mapping[str, Stored]) -> tuple[list[Statement], dict[str, Array]]:
    steps: list[Statement] = []
    arrays: dict[str, Array] = {}
    for step in single_terms(statement):
        sparse = [f for t in step.terms for f in t.factors if isinstance(f, Access) and f.name in stored]
        parts = [range(stored[access.name].parts) for access in sparse]
        for choice in _choices(parts):
            new = step
            for part, access in zip(choice, sparse, strict=True):
                new = _replaced(new, access, _Naming(part, stored[access.name], arrays, statement))
            steps.append(new)
    return steps, arrays


def _choices(parts: Sequence[range]) -> list[tuple[int, ...]]:
    choices: list[tuple[int, ...]] = [()]
    for numbers in parts:
        choices = [(*choice, number) for choice in choices for number in numbers]
    return choices


@dataclass(frozen=True)
class _Naming:
    """Names for the arrays and positions of one part of a sparse operand, free of clashes; fills `arrays`."""

    part: int
    stored: Stored
    arrays: dict[str, Array]
    statement: Statement

    def array(self, operand: str, axis: str | None) -> str:
        wanted = Array(operand, self.part, axis)
        for name, known in self.arrays.items():
            if known == wanted:
                return name
        suffix = f"_{self.part}" if self.stored.parts > 1 else ""
        taken = (*names_of(self.statement), *self.arrays)
        name = fresh(f"{operand}_{axis or 'values'}{suffix}", taken)
        self.arrays[name] = wanted
        return name


def _replaced(step: Statement, access: Access, naming: _Naming) -> Statement:
    """The step with one access to a sparse operand replaced by accesses to its arrays."""
    layout = naming.stored.layout
    if len(access.indices) != len(layout.coordinates):
        raise ShapeError(
            f"{access} has {len(access.indices)} indices, its format has {len(layout.coordinates)} axes "
            f"({', '.join(c.axis for c in layout.coordinates)})"
        )
    taken = [*names_of(step), *naming.arrays]
    positions: dict[str, Affine] = {}
    for symbol in layout.values:
        positions[symbol] = index(fresh(f"{symbol}_{access.name}" if len(symbol) == 1 else symbol, taken))
        taken.append(str(positions[symbol]))
    # A dense level keeps the expression that the statement wrote for it.
    for coordinate, expression in zip(layout.coordinates, access.indices, strict=True):
        if coordinate.array is None and coordinate.inner is None:
            positions[coordinate.position or ""] = expression
    place = _place(step, access)
    new = _without(step, place)
    pending = [
        (coordinate, number)
        for number, coordinate in enumerate(layout.coordinates)
        if coordinate.array is not None or coordinate.inner is not None
    ]
    expressions = list(access.indices)
    for coordinate, number in pending:
        value = _coordinate(coordinate, access.name, positions, naming)
        name, solution = _solve(new, access.name, expressions[number], value, expressions, number)
        new = substitute(new, {name: solution})
        expressions = [substitute(e, {name: solution}) for e in expressions]
        positions = {symbol: substitute(e, {name: solution}) for symbol, e in positions.items()}
    if naming.stored.values:
        values = Access(naming.array(access.name, None), tuple(positions[s] for s in layout.values))
        new = _with(new, place, values)
    _check_used(new, access, naming, layout)
    return new


def _coordinate(c: Coordinate, operand: str, positions: Mapping[str, Affine], naming: _Naming) -> Affine:
    """block * (array[positions] or position) + inner."""
    if c.array is None:
        outer = positions[c.position or ""].terms
    else:
        at = tuple(positions[symbol] for symbol in c.array)
        outer = ((1, Access(naming.array(operand, c.axis), at)),)
    inner = positions[c.inner].terms if c.inner else ()
    return affine([*((c_ * c.block, atom) for c_, atom in outer), *inner])


def _solve(
    step: Statement, operand: str, expression: Affine, value: Affine, expressions: Sequence[Affine], number: int
) -> tuple[str, Affine]:
    """An index and what it equals where `expression` equals the stored coordinate `value`."""
    if expression.bare and step.declared(expression.bare) is None:
        return expression.bare, value
    implied = {e.bare for access in accesses_of(step) for e in access.indices} | {
        e.bare for i, e in enumerate(expressions) if i != number
    }
    for coefficient, atom in expression.terms:
        if not isinstance(atom, Index) or abs(coefficient) != 1 or step.declared(atom.name) or atom.name not in implied:
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


def _check_used(step: Statement, access: Access, naming: _Naming, layout: Layout) -> None:
    """A position that is padding must be seen as such: by its value 0, or by its negative coordinate."""
    used = {array.name for array in arrays_of(step)}
    needed = [c.axis for c in layout.coordinates if c.array is not None]
    if naming.stored.values and step.reduction == "sum":
        return
    missing = [axis for axis in needed if naming.array(access.name, axis) not in used]
    if missing:
        raise _Unsolvable(access.name, f"its axis {missing[0]} meets nothing else in the statement")


def _place(step: Statement, access: Access) -> tuple[int, int]:
    for t, term in enumerate(step.terms):
        for f, factor in enumerate(term.factors):
            if factor == access:
                return t, f
    raise AssertionError(f"{access} is not a factor of {step}")


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
