"""Gather, multiply by the matrix of a group, scatter: CPU lowering by the engines of cpu.py for statements of the form

    T[S[p], g, n] += x[G[p], g, c] * w[K[p], g, c, n]           forward; the input gradient with S and G exchanged
    T[K[p], g, c, n] += x[G[p], g, c] * y[S[p], g, n]           weight gradient                             K sorted

with axes in any order and g optional, such as sparse convolutions and relational graph convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from pumice.coords import Pairs
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Statement, arrays_of, indices_of
from pumice.lower import cpu, graph, tables
from pumice.runtime.cache import cached_per_tensor
from pumice.schedule.cost import CpuSchedule


@dataclass(frozen=True)
class GatherMatch:
    """Parts of a statement. x: factor gathered by G; other: weights (forward) or factor gathered by S (gradient)."""

    x: Access
    other: Access
    gather: str
    scatter: str
    taps: str
    group: tuple[str, ...]
    inner: tuple[str, ...]
    outer: tuple[str, ...]
    weights: bool


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why this lowering does not apply, or None."""
    match = matched(statement)
    if isinstance(match, str):
        return match
    return tables.refusal((match.x.name, match.other.name), operands)


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    statement = bound.statement
    match = matched(statement)
    assert isinstance(match, GatherMatch)
    if not _places_valid(match, bound, operands):
        return graph.run(bound, operands, dtype)
    # Halves are summed in float32 anyway: for a float32 result, do not round in between.
    names = (match.x.name, match.other.name)
    operands = {**operands, **{n: operands[n].to(torch.promote_types(operands[n].dtype, dtype)) for n in names}}
    axis = tables.array_axis(statement.target if not match.weights else match.other)
    volume = int(bound.shape[axis] if not match.weights else operands[match.other.name].shape[axis])
    pairs = Pairs(operands[match.gather], operands[match.scatter], _sizes(operands[match.taps], volume))
    result = (_forward if match.weights else _gradient)(match, bound, operands, pairs).to(dtype)
    if statement.accumulate:
        result = operands[statement.target.name] + result
    return result


@lru_cache(maxsize=256)
def matched(statement: Statement) -> GatherMatch | str:
    """The match of a statement, or the reason why there is none."""
    if statement.reduction != "sum" or len(statement.terms) != 1 or statement.terms[0].coefficient != 1:
        return "it is not a plain sum of one product"
    factors = [f for f in statement.terms[0].factors if isinstance(f, Access)]
    if len(factors) != 2 or len(statement.terms[0].factors) != 2:
        return "it is not a product of two factors"
    if statement.ranges:
        return "a range is declared"
    accesses = (statement.target, *factors)
    arrays = [tables.array_of(access) for access in accesses]
    if any(array is None or len(array.indices) != 1 for array in arrays):
        return "target and factors are not each indexed by one index array and bare indices"
    taps = {name for name, fact in statement.facts if fact == "sorted"}
    names = [array.name for array in arrays if array is not None]
    if len(set(arrays_of(*accesses))) != 3 or len(set(indices_of(*(a for a in arrays if a)))) != 1:
        return "the index arrays do not share one position"
    place = next((i for i, name in enumerate(names) if name in taps), None)
    if place is None:
        return "no index array is known to be sorted"
    return _roles(accesses, names, place)


def _places_valid(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor]) -> bool:
    """True if all values of the index arrays are in bounds, so that no mask is needed."""
    target = bound.statement.target
    scattered, tapped = (target, match.other) if match.weights else (match.other, target)
    for name, access in ((match.gather, match.x), (match.scatter, scattered), (match.taps, tapped)):
        shape = bound.shape if access is target else operands[access.name].shape
        if not _valid(operands[name], int(shape[tables.array_axis(access)])):
            return False
    return True


def _roles(accesses: Sequence[Access], names: Sequence[str], place: int) -> GatherMatch | str:
    target, first, second = (tables.bare_of(access) for access in accesses)
    if place == 0:
        group = tuple(i for i in first if i in second and i in target)
        inner = tuple(i for i in first if i in target and i not in second)
        outer = tuple(i for i in second if i in target and i not in first)
        whole = (
            set(first) == {*group, *inner}
            and set(second) == {*group, *outer}
            and len(target) == len({*group, *inner, *outer})
        )
        match = GatherMatch(accesses[1], accesses[2], names[1], names[2], names[0], group, inner, outer, False)
        return match if whole else "an index other than the position is reduced"
    weights, x = (1, 2) if place == 1 else (2, 1)
    axes = tables.bare_of(accesses[x]), tables.bare_of(accesses[weights])
    group = tuple(i for i in axes[0] if i in axes[1] and i in target)
    inner = tuple(i for i in axes[0] if i in axes[1] and i not in target)
    outer = tuple(i for i in axes[1] if i in target and i not in axes[0])
    found = [set(axes[0]), set(axes[1]), set(target)]
    whole = found == [{*group, *inner}, {*group, *inner, *outer}, {*group, *outer}]
    match = GatherMatch(accesses[x], accesses[weights], names[x], names[0], names[weights], group, inner, outer, True)
    return match if whole else "the indices of factors and target do not form a product of matrices"


def _forward(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor], pairs: Pairs) -> Tensor:
    sizes = [bound.points(names) for names in (match.group, match.inner, match.outer)]
    groups, c_in, c_out = sizes
    x = tables.rows_of(operands[match.x.name], match.x, (*match.group, *match.inner))
    order = (*match.group, *match.outer, "", *match.inner)
    weight = tables.arranged(operands[match.other.name], match.other, order).reshape(groups * c_out, -1, c_in)
    target = bound.statement.target
    rows = int(bound.shape[tables.array_axis(target)])
    prepared = _prepared(pairs, rows, len(x), (groups * c_in, groups * c_out))
    flat = cpu.forward(x, weight, prepared, rows, groups)
    return tables.restored(flat, ("", *match.group, *match.outer), bound)


def _gradient(match: GatherMatch, bound: BoundStatement, operands: Mapping[str, Tensor], pairs: Pairs) -> Tensor:
    groups = bound.points(match.group)
    x = tables.rows_of(operands[match.x.name], match.x, (*match.group, *match.inner))
    y = tables.rows_of(operands[match.other.name], match.other, (*match.group, *match.outer))
    prepared = _prepared(pairs, len(y), len(x), (x.shape[1], y.shape[1]))
    flat = cpu.weight_gradient(x, y, prepared, groups)  # [G*N, K, C]
    return tables.restored(flat, (*match.group, *match.outer, "", *match.inner), bound)


@cached_per_tensor
def _sizes(taps: Tensor, volume: int) -> Tensor:
    """The number of positions per kernel offset."""
    return torch.bincount(taps, minlength=volume)


@cached_per_tensor
def _valid(array: Tensor, extent: int) -> bool:
    """True if all values of an index array are in bounds."""
    return not len(array) or (int(array.min()) >= 0 and int(array.max()) < extent)


def _prepared(pairs: Pairs, rows: int, inputs: int, channels: tuple[int, int]) -> tuple[Tensor, ...]:
    """The pairs and their cached chunks, which do not depend on the gradient fields of the schedule."""
    schedule = replace(CpuSchedule.default(*channels, len(pairs.inputs)), gradient="gemm", gradient_pairs=1)
    return (*pairs, *_chunks(pairs.outputs, pairs.inputs, pairs.sizes, rows, inputs, schedule))


@cached_per_tensor
def _chunks(
    outputs: Tensor, inputs: Tensor, sizes: Tensor, rows: int, other_rows: int, schedule: CpuSchedule
) -> tuple[Tensor, ...]:
    return cpu.chunks(Pairs(inputs, outputs, sizes), rows, other_rows, schedule)
