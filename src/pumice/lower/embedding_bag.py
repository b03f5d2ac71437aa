"""Sums of gathered rows on a CPU: statements of the form

    T[S[p,q], n...] += V[p,q] * W[p] * ... * B[G[p,q], n...]

by `embedding_bag`, which weights and sums the rows of B without materialising them. S is an index array or an index,
there are one or more positions, and V is optional. SpMM in any list format (COO, CSR, ELL, GroupCOO) is of this form,
and so are its gradient and sums over neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Access, Statement, indices_of
from pumice.lower import tables
from pumice.runtime.cache import cached_per_tensor


@dataclass(frozen=True)
class BagMatch:
    """The parts of a statement of the form above.

    rows: B, the factor whose rows are gathered; gather: its index array; positions: the indices of `gather`.
    scatter: the target's index array, or the position that is the target's row itself.
    weights: the factors over positions only. columns: the bare indices of the target and of B.
    """

    rows: Access
    gather: Access
    scatter: Access | str
    positions: tuple[str, ...]
    weights: tuple[Access, ...]
    columns: tuple[str, ...]


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why this lowering does not apply, or None."""
    match = matched(statement)
    if isinstance(match, str):
        return match
    return tables.refusal((access.name for access in (match.rows, *match.weights)), operands)


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    statement = bound.statement
    match = matched(statement)
    assert isinstance(match, BagMatch)
    wide = torch.promote_types(operands[match.rows.name].dtype, torch.float32)
    row = match.scatter if isinstance(match.scatter, str) else ""
    count = int(bound.shape[[e.bare or "" for e in statement.target.indices].index(row)])
    table = tables.rows_of(operands[match.rows.name], match.rows, match.columns).to(wide)
    bags = _bags_of(match, bound, operands, (count, len(table)))
    weights = _weights(match, bound, operands, wide)
    if weights is not None:
        weights = weights[bags.order] if bags.order is not None else weights
    total = _summed(table, bags, weights, count)
    if statement.terms[0].coefficient != 1:
        total = total * statement.terms[0].coefficient
    result = tables.restored(total, (row, *match.columns), bound).to(dtype)
    return operands[statement.target.name] + result if statement.accumulate else result


@lru_cache(maxsize=256)
def matched(statement: Statement) -> BagMatch | str:
    """The match of a statement, or the reason why there is none."""
    if statement.reduction != "sum" or len(statement.terms) != 1:
        return "it is not a sum of one term"
    factors = [f for f in statement.terms[0].factors if isinstance(f, Access)]
    if len(factors) != len(statement.terms[0].factors) or statement.ranges:
        return "it has conditions or declared ranges"
    gathering = [f for f in factors if any(e.arrays for e in f.indices)]
    if len(gathering) != 1 or tables.array_of(gathering[0]) is None:
        return "there is not one factor whose rows are gathered by one index array"
    gathered = gathering[0]
    gather, columns = tables.array_of(gathered), tables.bare_of(gathered)
    assert gather is not None
    positions = tuple(e.bare for e in gather.indices if e.bare)
    scatter = _scatter_of(statement.target, positions, columns)
    weights = tuple(f for f in factors if f is not gathered)
    if scatter is None or not columns:
        return "the target is not written by rows of the gathered factor"
    if any(not set(indices_of(f)) <= set(positions) or not _plain(f) for f in weights):
        return "a weight has indices other than the positions"
    return BagMatch(gathered, gather, scatter, positions, weights, columns)


def _scatter_of(target: Access, positions: tuple[str, ...], columns: tuple[str, ...]) -> Access | str | None:
    """The target's row: an index array over positions, or a position; None if there is none."""
    bare = tables.bare_of(target)
    array = tables.array_of(target)
    if array is not None:
        inside = {e.bare for e in array.indices}
        return array if inside <= set(positions) and set(bare) == set(columns) else None
    own = [name for name in bare if name in positions]
    whole = len(bare) == len(target.indices) and len(own) == 1 and set(bare) == {*columns, *own}
    return own[0] if whole and len(set(bare)) == len(bare) else None


def _plain(access: Access) -> bool:
    names = [e.bare for e in access.indices]
    return all(names) and len(set(names)) == len(names)


def _bags_of(match: BagMatch, bound: BoundStatement, operands: Mapping[str, Tensor], extents: tuple[int, int]) -> Bags:
    """The bags of these operands, cached per pair of index arrays."""
    sizes = [bound.extent(name) for name in match.positions]
    gather = operands[match.gather.name]
    if isinstance(match.scatter, str):
        return _bags_by_position(gather, match.positions.index(match.scatter), extents)
    names = [e.bare or "" for e in match.scatter.indices]
    order = tuple(sorted(range(len(names)), key=lambda i: match.positions.index(names[i])))
    shape = tuple(size if name in names else 1 for name, size in zip(match.positions, sizes, strict=True))
    return _bags(gather, operands[match.scatter.name], order, shape, extents)


def _weights(
    match: BagMatch, bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor | None:
    """The product of the weights, flat over all positions, or None if there are none."""
    total: Tensor | None = None
    for access in match.weights:
        names = [e.bare for e in access.indices]
        order = sorted(range(len(names)), key=lambda i: match.positions.index(names[i] or ""))
        shape = [bound.extent(name) if name in names else 1 for name in match.positions]
        value = operands[access.name].permute(order).reshape(shape).to(dtype)
        total = value if total is None else total * value
    if total is None:
        return None
    return total.expand([bound.extent(name) for name in match.positions]).reshape(-1)


@dataclass(frozen=True, eq=False)
class Bags:
    """Valid entries, sorted by target row.

    order: their positions, or None if all are valid and sorted; rows: of the table; starts: of each target row.
    """

    order: Tensor | None
    rows: Tensor
    starts: Tensor


@cached_per_tensor
def _bags(
    gather: Tensor, scatter: Tensor, order: tuple[int, ...], shape: tuple[int, ...], extents: tuple[int, int]
) -> Bags:
    """Bags for an index array as target row; its axes in that order broadcast with this shape."""
    return _found(gather, scatter.permute(order).reshape(shape), extents)


@cached_per_tensor
def _bags_by_position(gather: Tensor, axis: int, extents: tuple[int, int]) -> Bags:
    """Bags for the position along an axis of the index array as target row."""
    shape = [-1 if place == axis else 1 for place in range(gather.ndim)]
    return _found(gather, torch.arange(gather.shape[axis]).view(shape), extents)


def _found(gather: Tensor, scatter: Tensor, extents: tuple[int, int]) -> Bags:
    """Sort the entries by target row and drop those with an invalid row on either side."""
    count, table = extents
    to = scatter.expand(gather.shape).reshape(-1).long().contiguous()
    rows = gather.reshape(-1).long().contiguous()
    there = (to >= 0) & (to < count) & (rows >= 0) & (rows < table)
    order = None
    if not bool((to[1:] >= to[:-1]).all()) or not bool(there.all()):
        order = there.nonzero()[:, 0]
        order = order[to[order].argsort(stable=True)]
        to, rows = to[order], rows[order]
    return Bags(order, rows, torch.searchsorted(to, torch.arange(count)))


def _summed(table: Tensor, bags: Bags, weights: Tensor | None, count: int) -> Tensor:
    if not len(bags.rows) or not table.numel():
        return table.new_zeros(count, table.shape[1])
    # Arguments: scale_grad_by_freq, mode (0: sum), sparse, weights, include_last_offset.
    return torch.embedding_bag(table.contiguous(), bags.rows, bags.starts, False, 0, False, weights, False)[0]
