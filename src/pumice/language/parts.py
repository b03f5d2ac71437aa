"""Products of many factors as several statements, each of few indices.

    O[a] = A[a,b] * B[b,c] * C[c,d]    is    T[c] = C[c,d];  U[b] = B[b,c] * T[c];  O[a] = A[a,b] * U[b]

A sum over an index concerns the factors that have it: their product, summed over it, is a dense operand with the other
indices of these. A product that is evaluated at once visits every combination of entries that meet, which are more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from pumice.language.derive import fresh, names_of
from pumice.language.nodes import Access, Affine, Factor, Range, Statement, Term, index, indices_of

MOST_INDICES = 6  # Of a statement that is evaluated at once if it can be divided
_MOST_ELEMENTS = 1 << 24  # Of an operand that is made


def in_parts(statement: Statement, ranges: Mapping[str, Range]) -> tuple[Statement, ...]:
    """Statements of one term to be evaluated in order, the target of each being an operand of later ones; the statement
    alone if it has few indices or cannot be divided."""
    (term,), plain = statement.terms, not (statement.pattern or statement.accumulate)
    plain = plain and statement.reduction == "sum" and not any(extent.start for extent in ranges.values())
    if not plain or not all(isinstance(f, Access) and not any(e.arrays for e in f.indices) for f in term.factors):
        return (statement,)
    factors, found, taken = list(term.factors), list[Statement](), list(names_of(statement))
    while len(left := indices_of(statement.target, *factors)) > MOST_INDICES:
        summed = _summed_first(factors, [name for name in left if name not in indices_of(statement.target)], ranges)
        if summed is None:
            break
        group = [f for f in factors if summed in indices_of(f)]
        taken.append(fresh("part", taken))
        made = Access(taken[-1], _others(group, summed))
        found.append(_declared(Statement(made, (Term(tuple(group)),)), ranges))
        factors = [*(f for f in factors if f not in group), made]
    last = replace(statement, terms=(Term(tuple(factors), term.coefficient),), text="")
    return (*found, _declared(last, ranges)) if found else (statement,)


def _others(group: Sequence[Factor], summed: str) -> tuple[Affine, ...]:
    return tuple(index(name) for name in indices_of(*group) if name != summed)


def _summed_first(factors: Sequence[Factor], names: Sequence[str], ranges: Mapping[str, Range]) -> str | None:
    """The index whose factors have the fewest other points; None if each leaves too many, or none."""
    sizes = dict[str, tuple[int, int]]()
    for name in names:
        others = [n for n in indices_of(*(f for f in factors if name in indices_of(f))) if n != name]
        elements = prod(len(ranges[other]) for other in others)
        if others and len(others) < MOST_INDICES and elements <= _MOST_ELEMENTS:
            sizes[name] = len(others), elements
    return min(sizes, key=lambda name: sizes[name], default=None)


def _declared(statement: Statement, ranges: Mapping[str, Range]) -> Statement:
    return replace(statement, ranges=tuple((name, ranges[name]) for name in indices_of(statement)))
