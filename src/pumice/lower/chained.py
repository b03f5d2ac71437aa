"""A product of three or more factors in two kernels: the first contracts some, the second its result with the rest.

    Z[b,i[p],w] = c[p,q] * X[b,j[p,q],u] * Y[b,k[p,q]] * W[b,l[p],u,w]

    chained[b,p,u] = c[p,q] * X[b,j[p,q],u] * Y[b,k[p,q]]
    Z[b,i[p],w] = chained[b,p,u] * W[b,l[p],u,w]

One kernel would read W once per q. Two kernels pay off if an index that is summed occurs in some factors only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement, bind
from pumice.language.contraction import ContractionRoles, contraction_roles
from pumice.language.derive import fresh, names_of
from pumice.language.nodes import Access, Affine, Index, Statement, Term, accesses_of, index, indices_of
from pumice.lower import kernel as kernels
from pumice.lower import work
from pumice.schedule.predict import DEVICES, Work, seconds

Steps = tuple[BoundStatement, BoundStatement]
Facts = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


class TwoStepLowering:
    """Executor of a statement of fixed sizes in two steps; call it with the operands by name."""

    def __init__(
        self, bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype, precision: str = ""
    ) -> None:
        self.bound = bound
        first, second = _steps_of(bound, operands)
        self.name: str = first.statement.target.name
        self.first: kernels.KernelExecutor = kernels.runner(first, _intermediate_dtype(operands), None, precision)
        self.second: kernels.KernelExecutor = kernels.runner(second, dtype, None, precision)

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        return self.second(self.run_first(operands), before)

    def run_first(self, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the first step, and return the operands of the second one."""
        return {**operands, self.name: self.first(operands)}


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why the statement does not run in two steps, or None."""
    if statement.ranges or len(statement.terms[0].factors) < 3:
        return "there are fewer than three factors, or declared ranges"
    if why := kernels.refusal(statement, bound, operands):
        return why
    found = _steps(bound, _facts(operands))
    return found if isinstance(found, str) else None


def of_chain(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """The work of both steps."""
    return _work(_steps_of(bound, operands), operands)


def _steps_of(bound: BoundStatement, operands: Mapping[str, Tensor]) -> Steps:
    found = _steps(bound, _facts(operands))
    assert not isinstance(found, str)
    return found


def _intermediate_dtype(operands: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of the first step's result, which is not rounded to half precision."""
    kinds = {t.dtype for t in operands.values() if t.dtype.is_floating_point}
    return torch.float64 if torch.float64 in kinds else torch.float32


def _facts(operands: Mapping[str, Tensor]) -> Facts:
    return tuple((name, tuple(t.shape), t.dtype) for name, t in operands.items())


@lru_cache(maxsize=1024)
def _steps(bound: BoundStatement, facts: Facts) -> Steps | str:
    """The two steps of least cost, or the reason why there are none."""
    statement = bound.statement
    operands = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in facts}
    if not all(_plain(expression) for a in _accesses(statement) for expression in a.indices):
        return "an index is an expression"
    form = contraction_roles(statement, bound.extents)
    if form.product and form.within is None and not form.folds:
        return "the statement is one matrix product"
    ways = list(_candidate_steps(bound, operands))
    if form.product:
        # Keep a matrix product: nested in the second step if the statement has a nested one, else the first step.
        ways = [way for way in ways if (_role(way[1]).within if form.within else _role(way[0]).product)]
    if not ways:
        return "no index is summed over some of the factors only"
    return min(ways, key=lambda way: seconds(_work(way, operands), DEVICES["cuda"]))


def _role(bound: BoundStatement) -> ContractionRoles:
    return contraction_roles(bound.statement, bound.extents)


def _accesses(statement: Statement) -> tuple[Access, ...]:
    factors = (factor for factor in statement.terms[0].factors if isinstance(factor, Access))
    return (statement.target, *factors)


def _plain(expression: Affine) -> bool:
    """True for an index, or an index array at bare indices."""
    if expression.bare is not None:
        return True
    ((coefficient, atom), *more) = expression.terms or ((0, Index("")),)
    if more or expression.constant or coefficient != 1 or not isinstance(atom, Access):
        return False
    return all(e.bare is not None for e in atom.indices)


def _candidate_steps(bound: BoundStatement, operands: Mapping[str, Tensor]) -> Iterator[Steps]:
    """All supported pairs of steps whose first step sums over an index."""
    statement = bound.statement
    (term,) = statement.terms
    name = fresh("chained", names_of(statement))
    for size in range(2, len(term.factors)):
        for taken in itertools.combinations(range(len(term.factors)), size):
            inner = [f for n, f in enumerate(term.factors) if n in taken]
            outer = [f for n, f in enumerate(term.factors) if n not in taken]
            kept = set(indices_of(statement.target, *outer))
            largest = max(inner, key=lambda f: math.prod(bound.extents[n] for n in indices_of(f)))
            axes = tuple(n for n in dict.fromkeys(indices_of(largest, *inner)) if n in kept)
            if not axes or set(indices_of(*inner)) <= kept:
                continue
            target = Access(name, tuple(map(index, axes)))
            first = _with(statement, target, Term(tuple(inner)))
            second = _with(statement, statement.target, replace(term, factors=(target, *outer)))
            shape = tuple(bound.extents[n] for n in axes)
            given = {**operands, name: torch.empty(shape, dtype=_intermediate_dtype(operands), device="meta")}
            steps = _bound(replace(first, accumulate=False), given, shape), _bound(second, given, bound.shape)
            if not any(kernels.refusal(step.statement, step, given) for step in steps):
                yield steps


def _with(statement: Statement, target: Access, term: Term) -> Statement:
    """The statement with another target and term, and the facts about the arrays left in it."""
    new = replace(statement, target=target, terms=(term,))
    names = {access.name for access in accesses_of(new)}
    return replace(new, facts=tuple(fact for fact in statement.facts if fact[0] in names))


def _bound(statement: Statement, operands: Mapping[str, Tensor], shape: tuple[int, ...]) -> BoundStatement:
    names = {access.name for access in accesses_of(statement)}
    return bind(statement, {n: tuple(t.shape) for n, t in operands.items() if n in names}, shape, strict=False)


def _work(steps: Steps, operands: Mapping[str, Tensor]) -> Work:
    first, second = steps
    target = first.statement.target.name
    given = {**operands, target: torch.empty(first.shape, dtype=_intermediate_dtype(operands), device="meta")}
    return work.kernel_work(first.statement, first, given) + work.kernel_work(second.statement, second, given)
