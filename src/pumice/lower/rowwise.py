"""Statements whose rows are gathered and added up through index arrays, on a CPU: message passing above all.

    Z[T[b],K[q],u] = C[q] * X[S[b],I[q],u] * Y[b,J[q]]
    is  M[b,K[q],u] = C[q] * X_S[b,I[q],u] * Y[b,J[q]]  with X_S[b] = X[S[b]],  and then  Z[T[b]] += M[b]

Loop nests read several operands through an index array of one index only (see nest.py). Here the rows of b are copied
first, and M is a nest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import fresh, names_of
from pumice.language.nodes import Access, Affine, Index, Statement, arrays_of, indices_of
from pumice.lower import nest
from pumice.lower.unrolled import indexed
from pumice.lower.work import nest_work
from pumice.schedule.predict import Work


@dataclass(frozen=True)
class Rowwise:
    """A statement over rows. statement: of M; copied: (operand, index array, its copy's name); target: the index array
    of the result's rows, "" if they are b; row: b."""

    statement: Statement
    copied: tuple[tuple[str, str, str], ...]
    target: str
    row: str


@lru_cache(maxsize=1024)
def rowwise(statement: Statement) -> tuple[Rowwise, ...]:
    """The forms of a statement, one for each index of an index array on a first axis."""
    if len(statement.terms) != 1 or statement.reduction != "sum":
        return ()
    factors = [f for f in statement.terms[0].factors if isinstance(f, Access)]
    leading = [indexed(access.indices[0]) for access in (*factors, statement.target) if access.indices]
    names = dict.fromkeys(index for array, index in leading if array)
    whole = len(factors) == len(statement.terms[0].factors)
    accesses = (*factors, statement.target)
    return tuple(_over(statement, name) for name in names if _plain(name, accesses)) if whole else ()


def _plain(row: str, accesses: Sequence[Access]) -> bool:
    """True if an index is alone on the axes, and in the arrays, that have it."""
    every = [e for access in accesses for e in access.indices if row in indices_of(Access("", (e,)))]
    return all(row == indexed(e)[1] for e in every)


def _over(statement: Statement, row: str) -> Rowwise:
    taken, copied = set(names_of(statement)), dict[tuple[str, str], str]()

    def moved(access: Access) -> Access:
        array, index = indexed(access.indices[0]) if access.indices else ("", "")
        if not array or index != row:
            return access
        if (access.name, array) not in copied:
            copied[access.name, array] = fresh(f"{access.name}_{array}", taken)
            taken.add(copied[access.name, array])
        return Access(copied[access.name, array], (_bare(row), *access.indices[1:]))

    (term,) = statement.terms
    factors = tuple(moved(factor) if isinstance(factor, Access) else factor for factor in term.factors)
    array, index = indexed(statement.target.indices[0]) if statement.target.indices else ("", "")
    scattered = array if index == row else ""
    target = replace(statement.target, indices=(_bare(row), *statement.target.indices[1:])) if scattered else None
    new = Statement(target or statement.target, (replace(term, factors=factors),), ranges=statement.ranges)
    left = {access.name for access in arrays_of(*factors, new.target)}
    new = replace(new, facts=tuple((name, fact) for name, fact in statement.facts if name in left))
    return Rowwise(new, tuple((*key, name) for key, name in copied.items()), scattered, row)


def _bare(name: str) -> Affine:
    return Affine(((1, Index(name)),))


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement is no loop nest over rows, or None."""
    reasons = [
        nest.refusal(form.statement, _bound(form, bound, *_shapes(held)), held) for form, held in _ways(bound, operands)
    ]
    return None if None in reasons else next(iter(reasons), "no rows are gathered through an index array")


def work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """That of the nest, and copies of the rows."""
    form, held = _chosen(bound, operands)
    inner = _bound(form, bound, *_shapes(held))
    size = max(held[name].element_size() for *_, name in form.copied) if form.copied else 4
    copied = sum(size * held[name].numel() for *_, name in form.copied)
    copied += size * math.prod(inner.shape) if form.target else 0
    return nest_work(form.statement, inner, held) + Work(memory=3 * copied, launches=1 + len(form.copied))


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    form, step = _step(bound, torch.promote_types(dtype, torch.float32), *_shapes(operands))
    copies = {name: gathered(operands[operand], operands[array]) for operand, array, name in form.copied}
    found = step({**operands, **copies})
    if form.target:
        found = scattered(found, operands[form.target], bound.shape[0])
    old = operands[bound.statement.target.name] if bound.statement.accumulate else None
    return found.to(dtype) if old is None else (old + found).to(dtype)


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], 0 for rows that x does not have."""
    inside = (rows >= 0) & (rows < len(x))
    if inside.all():
        return x.index_select(0, rows)
    kept = x.index_select(0, torch.where(inside, rows, 0)) if len(x) else x.new_zeros(len(rows), *x.shape[1:])
    return kept.masked_fill_(~inside.view(-1, *[1] * (x.dim() - 1)), 0)


def scattered(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """y [count, ...] with y[rows[b]] += x[b]; rows that y does not have are left out."""
    inside = (rows >= 0) & (rows < count)
    if not inside.all():
        x, rows = x[inside], rows[inside]
    return x.new_zeros(count, *x.shape[1:]).index_add_(0, rows, x)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def _shapes(operands: Mapping[str, Tensor]) -> Shapes:
    return tuple((name, tuple(x.shape)) for name, x in operands.items())


def _ways(bound: BoundStatement, operands: Mapping[str, Tensor]) -> Iterator[tuple[Rowwise, dict[str, Tensor]]]:
    """Every form with its operands; copies are uninitialised and take no memory."""
    for form in rowwise(bound.statement):
        arrays = [array for _, array, _ in form.copied] + [form.target] * bool(form.target)
        if bound.ranges[form.row].start or any(len(operands[name]) != bound.extents[form.row] for name in arrays):
            continue
        copies = dict[str, Tensor]()
        for operand, array, name in form.copied:
            x = operands[operand]
            copies[name] = x.new_empty(()).expand(len(operands[array]), *x.shape[1:])
        yield form, {**operands, **copies}


def _chosen(bound: BoundStatement, operands: Mapping[str, Tensor]) -> tuple[Rowwise, dict[str, Tensor]]:
    """The first form that is a nest."""
    for form, held in _ways(bound, operands):
        if nest.refusal(form.statement, _bound(form, bound, *_shapes(held)), held) is None:
            return form, held
    raise AssertionError(f"`{bound.statement}` was refused")


@lru_cache(maxsize=1024)
def _step(
    bound: BoundStatement, dtype: torch.dtype, *shapes: tuple[str, tuple[int, ...]]
) -> tuple[Rowwise, nest.NestStep]:
    """The form of a statement that `refusal` accepts, and its nest, which keeps what it prepares."""
    form, held = _chosen(bound, {name: torch.empty(()).expand(shape) for name, shape in shapes})
    return form, nest.NestStep(_bound(form, bound, *_shapes(held)), dtype)


@lru_cache(maxsize=1024)
def _bound(form: Rowwise, bound: BoundStatement, *shapes: tuple[str, tuple[int, ...]]) -> BoundStatement:
    shape = (bound.extents[form.row], *bound.shape[1:]) if form.target else bound.shape
    return bind(form.statement, dict(shapes), shape, strict=False)
