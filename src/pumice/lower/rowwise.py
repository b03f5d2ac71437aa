"""Statements whose rows are gathered and added up through index arrays, on a CPU: message passing above all.

    Z[T[b],K[q],u] = C[q] * X[S[b],I[q],u] * Y[b,J[q]]
    is  M[b,K[q],u] = C[q] * X_S[b,I[q],u] * Y[b,J[q]]  with X_S[b] = X[S[b]],  and then  Z[T[b]] += M[b]

Loop nests read several operands through an index array of one index only (see nest.py). Here the rows of b are copied
first, and M is a nest. That is done for a block of b at a time: a few nests serve all numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement, bind
from pumice.language.derive import fresh, names_of
from pumice.language.nodes import Access, Affine, Index, Statement, accesses_of, arrays_of, indices_of
from pumice.lower import nest
from pumice.lower.unrolled import indexed
from pumice.lower.work import nest_work
from pumice.schedule.predict import Work

_MOST = 1 << 14  # Rows of a block


@dataclass(frozen=True)
class Rowwise:
    """A statement over rows. statement: of M; copied: (operand, index array, its copy's name); target: the index array
    of the result's rows, "" if they are b; row: b."""

    statement: Statement
    copied: tuple[tuple[str, str, str], ...]
    target: str
    row: str

    @cached_property
    def by_row(self) -> frozenset[str]:
        """The operands of M whose first axis is b, M included."""
        found = (a for a in accesses_of(self.statement) if a.indices and a.indices[0].bare == self.row)
        return frozenset(access.name for access in found)

    @cached_property
    def divides(self) -> bool:
        """True if M is that of blocks of b."""
        others = [e for a in accesses_of(self.statement) for e in a.indices[a.name in self.by_row :]]
        return all(e.bare != self.row and not e.arrays or self.row not in indices_of(Access("", (e,))) for e in others)


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
    form, wide = _form(bound, *_shapes(operands)), torch.promote_types(dtype, torch.float32)
    rows, name = bound.extents[form.row], form.statement.target.name
    first, blocks = 0, _blocks(rows) if form.divides else [rows] * bool(rows)
    used = {a.name for a in accesses_of(*form.statement.terms, *form.statement.target.indices)}
    whole = name in form.by_row and not form.target
    out = torch.empty(bound.shape, dtype=wide) if whole else torch.zeros(bound.shape, dtype=wide)
    for block in blocks:
        held = {n: _cut(operands[n], first, block) if n in form.by_row else operands[n] for n in used & operands.keys()}
        for operand, array, copy in form.copied:
            held[copy] = gathered(operands[operand], _cut(operands[array], first, block, -1))
        shape = (block, *bound.shape[1:]) if name in form.by_row else bound.shape
        found = _step(form, shape, wide, *_shapes(held))(held)
        if form.target:
            add_rows(out, found, operands[form.target][first : first + block])
        elif whole:
            out[first : first + block] = found[: rows - first]
        else:
            out += found
        first += block
    old = operands[bound.statement.target.name] if bound.statement.accumulate else None
    return out.to(dtype) if old is None else (old + out).to(dtype)


def _blocks(rows: int) -> list[int]:
    """Sizes of blocks, few different ones for all numbers of rows, so that few nests are made; the last is padded."""
    if rows > _MOST:
        return [_MOST, *_blocks(rows - _MOST)]
    step = 1 << max(2, rows.bit_length() - 3)
    rest = -(-(rows % step) // (step // 4)) * (step // 4)
    return [size for size in (rows // step * step, rest) if size]


def _cut(x: Tensor, first: int, count: int, padding: int = 0) -> Tensor:
    """The next `count` rows, padded where x ends."""
    part = x[first : first + count]
    missing = count - len(part)
    return torch.cat([part, part.new_full((missing, *x.shape[1:]), padding)]) if missing else part


def gathered(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], 0 for rows that x does not have."""
    inside = (rows >= 0) & (rows < len(x))
    if inside.all():
        return x.index_select(0, rows)
    kept = x.index_select(0, torch.where(inside, rows, 0)) if len(x) else x.new_zeros(len(rows), *x.shape[1:])
    return kept.masked_fill_(~inside.view(-1, *[1] * (x.dim() - 1)), 0)


def add_rows(out: Tensor, x: Tensor, rows: Tensor) -> None:
    """out[rows[b]] += x[b]; rows that `out` does not have are left out, and so are rows of x past those of `rows`."""
    x, inside = x[: len(rows)], (rows >= 0) & (rows < len(out))
    if not inside.all():
        x, rows = x[inside], rows[inside]
    out.index_add_(0, rows, x)


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def _shapes(operands: Mapping[str, Tensor]) -> Shapes:
    return tuple((name, tuple(x.shape)) for name, x in operands.items())


def _ways(bound: BoundStatement, operands: Mapping[str, Tensor]) -> Iterator[tuple[Rowwise, dict[str, Tensor]]]:
    """Every form with its operands; copies are uninitialised and take no memory."""
    for form in rowwise(bound.statement):
        arrays = [array for _, array, _ in form.copied] + [form.target] * bool(form.target)
        by_row = [*arrays, *(form.by_row & operands.keys() - {form.statement.target.name})]
        if bound.ranges[form.row].start or any(len(operands[name]) != bound.extents[form.row] for name in by_row):
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
def _form(bound: BoundStatement, *shapes: tuple[str, tuple[int, ...]]) -> Rowwise:
    """The form of a statement that `refusal` accepts."""
    return _chosen(bound, {name: torch.empty(()).expand(shape) for name, shape in shapes})[0]


@lru_cache(maxsize=1024)
def _step(
    form: Rowwise, shape: tuple[int, ...], dtype: torch.dtype, *shapes: tuple[str, tuple[int, ...]]
) -> nest.NestStep:
    """The nest of a block, which keeps what it prepares. shape: of its result."""
    ranges = tuple((name, extent) for name, extent in form.statement.ranges if name != form.row)
    return nest.NestStep(bind(replace(form.statement, ranges=ranges), dict(shapes), shape, strict=False), dtype)


@lru_cache(maxsize=1024)
def _bound(form: Rowwise, bound: BoundStatement, *shapes: tuple[str, tuple[int, ...]]) -> BoundStatement:
    shape = (bound.extents[form.row], *bound.shape[1:]) if form.target else bound.shape
    return bind(form.statement, dict(shapes), shape, strict=False)
