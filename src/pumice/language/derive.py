"""Derivatives of statements, as statements.

For  C[t] += a(..) * x[e] * b(..)  and an upstream gradient G of C's shape, the gradient of x is

    dx[e] += a(..) * G[t] * b(..)

over the same points: target and operand are exchanged. An operand that is read several times gets one term for each.
Under max and min the gradient is shared evenly among the entries equal to the result, under mean among all; both first
divide G by a count, which is again a statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from pumice.language.nodes import Access, Equal, Exists, Factor, Range, Statement, Term, accesses_of, indices_of

GRADIENT = "grad"  # operand name of the upstream gradient, made unique by `fresh`


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
    """The operand that stands for the statement's own result in `derivative` and `count` of max and min."""
    return fresh(f"{statement.target.name}_result", names_of(statement))


def derivative(statement: Statement, operand: str) -> tuple[Statement, ...]:
    """Statements, one for each read of `operand` as a value; its gradient is their sum.

    The operand gradient_name(statement) is the upstream gradient (divided by `count` under max, min and mean), and
    result_name(statement), where it occurs, the result. The target is "d" + the operand's name, with its shape. An
    index left alone on no axis needs `declare`. Under mean each statement counts once for each point of `lost_points`.

    Source: the derivative rule of indirect einsums, Insum (section 4); extended to affine and repeated indices.
    """
    upstream = Access(gradient_name(statement), statement.target.indices)
    selects = _selection(statement)
    target_name = fresh(f"d{operand}", names_of(statement))
    found = []
    for term in statement.terms:
        # Under max, min and mean a point counts only if every factor of the right side exists.
        others = () if statement.reduction == "sum" else _existence(t for t in statement.terms if t is not term)
        for place, factor in enumerate(term.factors):
            if isinstance(factor, Access) and factor.name == operand:
                rest = (*term.factors[:place], upstream, *term.factors[place + 1 :], *others, *selects)
                new = Statement(Access(target_name, factor.indices), (Term(rest, term.coefficient),))
                found.append(_with_declarations(new, statement))
    return tuple(found)


def count(statement: Statement) -> Statement:
    """Number of points per target entry: all of them under mean, those equal to the result under max and min."""
    points = _selection(statement) or _existence(statement.terms)
    new = _with_declarations(Statement(statement.target, (Term(points),)), statement)
    return replace(new, shapes=tuple((name, n) for name, n in statement.shapes if name in names_of(new)))


def _selection(statement: Statement) -> tuple[Factor, ...]:
    if statement.reduction not in ("max", "min"):
        return ()
    return (Equal(Access(result_name(statement), statement.target.indices), statement.terms),)


def _existence(terms: Iterable[Term]) -> tuple[Factor, ...]:
    return tuple(Exists(access) for access in dict.fromkeys(_required(terms)))


def _required(terms: Iterable[Term]) -> Iterator[Access]:
    """Accesses that must exist for a point to count; those inside `exists` do not."""
    for factor in (factor for term in terms for factor in term.factors):
        if isinstance(factor, Equal):
            yield factor.access
            yield from _required(factor.terms)
        elif isinstance(factor, Access):
            yield factor


def lost_points(new: Statement, old: Statement) -> tuple[str, ...]:
    """Indices of a mean that `new` no longer has: it counts once for each of their points."""
    left = indices_of(new)
    return tuple(name for name in indices_of(old) if name not in left) if old.reduction == "mean" else ()


def declare(new: Statement, ranges: Mapping[str, Range]) -> Statement:
    """`new` with declared ranges for its indices that are alone on no axis, the target's included."""
    bare = {e.bare for access in accesses_of(new) for e in access.indices}
    declared = {name for name, _ in new.ranges}
    lost = [name for name in indices_of(new) if name not in bare and name not in declared]
    return replace(new, ranges=(*new.ranges, *((name, ranges[name]) for name in lost)))


def _with_declarations(new: Statement, old: Statement) -> Statement:
    """`new` with those declarations of `old` that still apply."""
    left, names = set(indices_of(new)), {access.name for access in accesses_of(new)}
    return replace(
        new,
        ranges=tuple((name, extent) for name, extent in old.ranges if name in left),
        facts=tuple((name, fact) for name, fact in old.facts if name in names),
    )
