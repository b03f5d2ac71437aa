"""Cost model estimates: the work of a step in each lowering."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.contraction import ContractionRoles, contraction_roles
from pumice.language.nodes import Statement, accesses_of, arrays_of, indices_of
from pumice.schedule.predict import Work
from pumice.schedule.tile import PROCESSORS, programs, splits


def loop_work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """Reference loops: every access is read at every point."""
    points = bound.points(indices_of(statement))
    reads = len(accesses_of(statement))
    return Work(flops=2 * points, memory=24 * points * reads, launches=12 * reads)


def graph_work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """Gather, einsum, scatter: gathered values are written and read again."""
    total = Work(launches=0)
    for term in statement.terms:
        moved = 0.0
        for access in accesses_of(term):
            if access.name in operands:
                gathers = any(e.bare is None for e in access.indices)
                moved += (3 if gathers else 1) * operands[access.name].element_size() * bound.points(indices_of(access))
        moved += 12 * bound.points(indices_of(statement.target))
        flops = 2 * bound.points(indices_of(term, statement.target))
        if len(term.factors) > 2:
            # Intermediate products are materialised, at worst over all indices.
            moved += 4 * flops
        total = total + Work(flops, moved, 0, 3 + 2 * len(term.factors), matrix=len(term.factors) > 1)
    return total


def kernel_work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """One kernel: a factor is read once per tile along the axis it lacks; without a matrix product, per iteration."""
    extents = bound.extents
    form = contraction_roles(statement, extents)
    moved = 4 * bound.points(indices_of(statement.target)) * (3 if form.atomic else 1)
    cached = 0.0
    turning = {*form.loops, *(form.columns if form.folds else ())}
    for place, factor in enumerate(statement.terms[0].factors):
        own = bound.points(indices_of(factor))
        size = operands[accesses_of(factor)[0].name].element_size()
        other = form.columns if place in form.left else form.rows
        again = -(-bound.points(n for n in other if n in extents) // 128) if form.product else 1
        if form.folds and form.product:
            again *= bound.points(set(form.batch) - set(indices_of(factor)))
        if not form.product and turning & set(indices_of(factor)):
            again = bound.points((set(form.loops) | set(form.batch)) & set(extents) - set(indices_of(factor)))
        if form.within and place in form.within.left:
            # These factors and their index arrays are read element by element.
            again = _tables(bound, form) / max(own, 1)
            size += sum(operands[array.name].element_size() for array in arrays_of(factor))
        cached += own * size * again
    flops = 2 * _multiplied(statement, bound, form)
    tiles = programs(form, extents) * splits(form, extents)
    # Too few programs to fill the device take proportionally longer.
    idle = max(1.0, PROCESSORS / max(1.0, tiles))
    cached *= idle
    if form.atomic and form.product:
        cached = max(cached, _SHORTEST * tiles)
    return Work(flops * idle, moved, cached, _launches(form, operands), matrix=form.product)


def _launches(form: ContractionRoles, operands: Mapping[str, Tensor]) -> int:
    """Kernels to launch: atomics need a zeroed output, and a cast if it is wider than the values."""
    narrow = any(x.is_floating_point() and x.element_size() < 4 for x in operands.values())
    return 1 + form.atomic + (form.atomic and narrow)


_SHORTEST = 40_000
"""Minimum cost, in cache bytes, of a product's program that ends in atomics: 241,732 programs took 1.16 ms on an H200
(weight gradient, 4 to 32 channels, 2 million rows, one iteration each)."""


def _tables(bound: BoundStatement, form: ContractionRoles) -> float:
    """Values read of a factor of a nested product: full tiles, in every program."""
    within, least = form.within, 16
    assert within is not None
    others = bound.points((*form.batch, *form.loops, *within.summed))
    return others * max(least, bound.points(form.rows)) * max(least, bound.points((within.shared,)))


def _multiplied(statement: Statement, bound: BoundStatement, form: ContractionRoles) -> float:
    """Multiply-adds of a kernel, including those of a nested product."""
    names = indices_of(statement)
    if form.within is None:
        return bound.points(names)
    inside = (form.within.shared, *form.within.summed)
    factors = statement.terms[0].factors
    left = indices_of(*(factors[place] for place in form.left))
    return bound.points(n for n in names if n not in inside) + bound.points(left)


def gathered_work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """Gather, multiply, sum in chunks that stay in the cache: no traffic is counted."""
    return Work(2 * bound.points(indices_of(statement)), launches=8, matrix=True)


def nest_work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """Operands are read in place, at cache bandwidth."""
    reads = sum(
        operands[access.name].element_size() * bound.points(indices_of(access))
        for access in accesses_of(*statement.terms)
        if access.name in operands
    )
    return Work(2 * bound.points(indices_of(statement)), cache=reads, launches=8)
