"""Derivatives of statements, as statements.

For  C[t] += a(..) * x[e] * b(..)  and an upstream gradient G of C's shape, the gradient of x is

    dx[e] += a(..) * G[t] * b(..)

over the same points: target and operand are exchanged. An operand that is read several times has one term per read.
Under max and min the gradient is shared evenly by the points equal to the result, under mean by all: G is first
divided by their number, the result of the statement `count`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pumice.language.nodes import Access, Equal, Exists, Factor, Range, Statement, Term, accesses_of, indices_of

GRADIENT = "grad"  # name of the upstream gradient as an operand, made unique by `fresh`


def fresh(name: str, taken: Iterable[str]) -> str:
    """`name` with underscores appended until it is not in `taken`."""
    taken = set(taken)
    while name in taken:
        name += "_"
    return name


def names_of(statement: Statement) -> tuple[str, ...]:
    """The operands and indices of the statement, the target's name first."""
    operands = (access.name for access in accesses_of(statement))
    return tuple(dict.fromkeys((*operands, *indices_of(statement))))


def gradient_name(statement: Statement) -> str:
    return fresh(GRADIENT, names_of(statement))


def result_name(statement: Statement) -> str:
    """Name of the operand for the statement's own result, read by `derivative` and `count` under max and min."""
    return fresh(f"{statement.target.name}_result", names_of(statement))


def derivative(statement: Statement, operand: str) -> tuple[Statement, ...]:
    """The gradient of `operand` as statements to be added, one for each read of `operand` as a value.

    They read the operands gradient_name(statement), the upstream gradient (divided by `count` under max, min and mean),
    and under max and min result_name(statement), the result. The target is "d" + the operand's name. An index that is
    alone on no axis any more needs `declare`. Under mean, multiply by the number of points of `lost_points`.

    Source: the derivative rule of indirect einsums, Insum (section 4); extended to affine and repeated indices.
    """
    upstream = Access(gradient_name(statement), statement.target.indices)
    selects = _selection(statement)
    target_name = fresh(f"d{operand}", names_of(statement))
    found = []
    for term in statement.terms:
        # Under max, min and mean a point contributes only if every access of the right side exists.
        others = () if statement.reduction == "sum" else existence(t for t in statement.terms if t is not term)
        for place, factor in enumerate(term.factors):
            if isinstance(factor, Access) and factor.name == operand:
                rest = (*term.factors[:place], upstream, *term.factors[place + 1 :], *others, *selects)
                new = Statement(Access(target_name, factor.indices), (Term(rest, term.coefficient),))
                found.append(_with_declarations(new, statement))
    return tuple(found)


def count(statement: Statement) -> Statement:
    """A statement for the points per target entry: all under mean, those equal to the result under max and min."""
    points = _selection(statement) or existence(statement.terms)
    new = _with_declarations(Statement(statement.target, (Term(points),)), statement)
    return replace(new, shapes=tuple((name, n) for name, n in statement.shapes if name in names_of(new)))


def _selection(statement: Statement) -> tuple[Factor, ...]:
    if statement.reduction not in ("max", "min"):
        return ()
    return (Equal(Access(result_name(statement), statement.target.indices), statement.terms),)


def existence(terms: Iterable[Term]) -> tuple[Exists, ...]:
    """The conditions under which the terms contribute at a point."""
    return tuple(Exists(access) for access in dict.fromkeys(_required(terms)))


def _required(terms: Iterable[Term]) -> Iterator[Access]:
    """Accesses that must exist for a point to contribute: all but those inside `exists`."""
    for factor in (factor for term in terms for factor in term.factors):
        if isinstance(factor, Equal):
            yield factor.access
            yield from _required(factor.terms)
        elif isinstance(factor, Access):
            yield factor


def lost_points(new: Statement, old: Statement) -> tuple[str, ...]:
    """Indices of a mean that its derivative `new` lacks: `new` must be multiplied by their number of points."""
    left = indices_of(new)
    return tuple(name for name in indices_of(old) if name not in left) if old.reduction == "mean" else ()


def declare(new: Statement, ranges: Mapping[str, Range]) -> Statement:
    """`new` with declared ranges for the indices that are alone on no axis of an operand or the target."""
    bare = {e.bare for access in accesses_of(new) for e in access.indices}
    declared = {name for name, _ in new.ranges}
    lost = [name for name in indices_of(new) if name not in bare and name not in declared]
    return replace(new, ranges=(*new.ranges, *((name, ranges[name]) for name in lost)))


def _with_declarations(new: Statement, old: Statement) -> Statement:
    """`new` with the ranges and facts of `old` whose names it has."""
    left, names = set(indices_of(new)), {access.name for access in accesses_of(new)}
    return replace(
        new,
        ranges=tuple((name, extent) for name, extent in old.ranges if name in left),
        facts=tuple((name, fact) for name, fact in old.facts if name in names),
    )
