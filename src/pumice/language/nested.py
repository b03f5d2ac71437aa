"""Max, min and mean of sums, as statements without nested reductions.

C[D[e],o] max= sum(i, X[S[e],i] * W[R[e],i,o])                    becomes
C_sum[e,o] = X[S[e],i] * W[R[e],i,o]
C_at[e] max= exists(X[S[e],0]) * exists(W[R[e],0,0]) + -1         0, or -1 where the sum has no point
C[D[e],o] max= C_sum[e+C_at[e],o]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from pumice.language.derive import existence, fresh, names_of
from pumice.language.nodes import (
    Access,
    Affine,
    Exists,
    Factor,
    Index,
    Range,
    Statement,
    Term,
    accesses_of,
    affine,
    index,
    indices_of,
)

_ALONE = "u"  # an index of one point, for a sum that depends on no other


@lru_cache(maxsize=1024)
def unnested(statement: Statement) -> tuple[Statement, ...]:
    """Statements to be executed in order, of which the last has the target; the others compute operands of it: sums of
    terms, and index arrays that are -1 where such a sum has no point."""
    if not statement.summed:
        return (statement,)
    steps: list[Statement] = []
    terms: list[Term] = []
    alone: list[tuple[str, Range]] = []
    taken = list(names_of(statement))
    for term in statement.terms:
        if not set(statement.summed).intersection(indices_of(term)):
            terms.append(term)
            continue
        found = _split(statement, term, taken)
        steps += [_declared(found.sum, statement), _declared(found.place, statement)]
        alone += [r for r in found.sum.ranges if r not in alone]
        terms.append(found.term)
    last = replace(statement, terms=tuple(terms), summed=(), ranges=(*statement.ranges, *alone))
    return (*steps, _declared(last, last))


class _Split(NamedTuple):
    """A term with its sum computed by a statement of its own."""

    sum: Statement
    place: Statement
    term: Term


def _split(statement: Statement, term: Term, taken: list[str]) -> _Split:
    inner = tuple(f for f in term.factors if set(statement.summed).intersection(indices_of(f)))
    left = tuple(f for f in term.factors if f not in inner)
    names = [fresh(f"{statement.target.name}_{what}", taken) for what in ("sum", "at")]
    alone = fresh(_ALONE, taken)
    taken += [*names, alone]
    conditions = tuple(Exists(_without_bare(e.access, statement)) for e in existence((Term(inner),)))
    outer, where = _outer(inner, statement), _outer(conditions, statement)
    ranges: tuple[tuple[str, Range], ...] = ()
    if not where:
        outer, where, ranges = (alone, *outer), (alone,), ((alone, Range(0, 1)),)
    total = Access(names[0], tuple(map(index, outer)))
    place = Access(names[1], tuple(map(index, where)))
    # One axis is read through the array of -1; its index remains alone on an axis of this array.
    read = tuple(affine([(1, Index(n)), (1, place)]) if n == where[0] else index(n) for n in outer)
    return _Split(
        Statement(total, (Term(inner),), ranges=ranges),
        Statement(place, (Term(conditions), Term((), -1)), "max", ranges=ranges),
        Term((Access(names[0], read), *left), term.coefficient),
    )


def _outer(factors: Sequence[Factor], statement: Statement) -> tuple[str, ...]:
    return tuple(name for name in indices_of(*factors) if name not in statement.summed)


def _without_bare(access: Access, statement: Statement) -> Access:
    """The access at the first point of the indices that are alone on an axis, which are always inside it."""
    return replace(access, indices=tuple(_first(e, statement) for e in access.indices))


def _first(expression: Affine, statement: Statement) -> Affine:
    if expression.bare is None:
        return expression
    declared = statement.declared(expression.bare)
    return affine([], declared.start if declared else 0)


def _declared(step: Statement, statement: Statement) -> Statement:
    """The step with the declarations of `statement` for its names."""
    left, names = indices_of(step), {access.name for access in accesses_of(step)}
    return replace(
        step,
        ranges=tuple(dict.fromkeys(r for r in (*statement.ranges, *step.ranges) if r[0] in left)),
        facts=tuple(fact for fact in statement.facts if fact[0] in names),
        shapes=tuple(shape for shape in statement.shapes if shape[0] in names),
        text="",
    )
