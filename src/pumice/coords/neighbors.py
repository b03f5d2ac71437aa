"""Search among points in space: nearest points, points within a radius, farthest points.

    nearest     index[q, j] = argmin over the p of q's batch item of  |points[p] - queries[q]|^2, the j-th least
    within      all p of q's item with  |points[p] - queries[q]|^2 <= most
    farthest    index[j] = argmax over p of  min over i < j of  |points[p] - points[index[i]]|^2

Squared distances are sums of squares from the first axis to the last, each rounded to the dtype of the points; of equal
ones the lowest index comes first. Results are exact and the same on all devices.

Points are held in leaves: blocks of neighbours, with boxes. C (coords.native_points) and Triton kernels
(coords.neighbor_kernels) pass over leaves whose box is too far; the twins in plain torch compare all with all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import native_points, neighbor_search
from pumice.coords.native_points import GROUP
from pumice.coords.points import Found, Limits, PointSet, blocks_of, item_ends
from pumice.runtime.launch import has_triton

_PAIRS = 1 << 22  # Distances that the twins hold at once
_PAST = 16  # Entries behind the boxes, which vectors may read
_AXES = 8  # Axes up to which boxes keep points apart
_MOST = 1 << 14  # Results of a query that C keeps
_MOST_KEYS = 1 << 10  # And a kernel


def nearest(points: PointSet, queries: PointSet, limits: Limits) -> Found:
    """(int64 [Q, k]: found points, -1 for none; [Q, k]: squared distances, inf for none)."""
    if _in_c(points) and limits.k <= _MOST:
        return _nearest_native(points, queries, limits)
    if _in_triton(points) and limits.k <= _MOST_KEYS:
        return neighbor_search.nearest(points, queries, limits)
    return nearest_torch(points, queries, limits)


def within(points: PointSet, queries: PointSet, most: float) -> Found:
    """(int64 [Q + 1]: where the results of each query begin; int64 [E]: points at most so far, squared, ascending)."""
    if _in_c(points):
        return _within_native(points, queries, most)
    if _in_triton(points):
        return neighbor_search.within(points, queries, most)
    return within_torch(points, queries, most)


def farthest(points: PointSet, counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """int64 [sum of counts]: counts[b] samples of each item b, which begin with point starts[b]. No point is taken
    twice: counts are at most the numbers of points."""
    if _in_c(points):
        return _farthest_native(points, counts, starts)
    if _in_triton(points):
        return neighbor_search.farthest(points, counts, starts)
    return farthest_torch(points, counts, starts)


def _in_c(points: PointSet) -> bool:
    held = points.points
    return points.dim <= _AXES and not has_triton(held) and native_points.refusal(held) is None


def _in_triton(points: PointSet) -> bool:
    return points.dim <= _AXES and has_triton(points.points) and points.points.dtype == torch.float32


# Plain torch


def squared_distances(points: Tensor, queries: Tensor) -> Tensor:
    """[Q, N]."""
    total = queries.new_zeros(len(queries), len(points))
    for axis in range(points.shape[1]):
        apart = points[:, axis] - queries[:, axis, None]
        total = total + apart * apart
    return total


def _admitted(points: PointSet, queries: PointSet, part: slice, most: float) -> Tensor:
    """[part, N]: squared distances, inf where they exceed `most` or items differ."""
    apart = squared_distances(points.points, queries.points[part])
    other = points.items != queries.items[part, None]
    return apart.masked_fill_(other | (apart > most), torch.inf)


def _parts(points: PointSet, queries: PointSet) -> list[slice]:
    rows = max(1, _PAIRS // max(1, len(points)))
    return [slice(first, first + rows) for first in range(0, len(queries), rows)]


def nearest_torch(points: PointSet, queries: PointSet, limits: Limits) -> Found:
    """As nearest, in plain torch."""
    index = points.items.new_full((len(queries), limits.k), -1)
    squared = points.points.new_full((len(queries), limits.k), torch.inf)
    for part in _parts(points, queries):
        apart = _admitted(points, queries, part, limits.most)
        by = apart.isinf() if limits.by_index else apart
        order = by.sort(dim=1, stable=True).indices[:, : limits.k]
        found = apart.gather(1, order)
        squared[part, : order.shape[1]] = found
        index[part, : order.shape[1]] = order.masked_fill(found.isinf(), -1)
    return index, squared


def within_torch(points: PointSet, queries: PointSet, most: float) -> Found:
    """As within, in plain torch."""
    pairs = [points.items.new_zeros(0, 2)]
    for part in _parts(points, queries):
        found = _admitted(points, queries, part, most).isfinite().nonzero()
        pairs.append(found + found.new_tensor([part.start, 0]))
    query, index = torch.cat(pairs).unbind(1)
    first = torch.bincount(query + 1, minlength=len(queries) + 1).cumsum(0)
    return first, index.contiguous()


def farthest_torch(points: PointSet, counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """As farthest, in plain torch."""
    found = [points.items.new_zeros(0)]
    for item, (count, start) in enumerate(zip(counts, starts, strict=True)):
        own = (points.items == item).nonzero()[:, 0]
        apart = points.points.new_full((len(own),), torch.inf)
        taken = (own == start).nonzero()[:1, 0]
        for _ in range(count):
            found.append(own[taken])
            apart = torch.minimum(apart, squared_distances(points.points[own], points.points[own[taken]])[0])
            apart[taken] = -1
            taken = apart.argmax()[None]
    return torch.cat(found)


# C


class _Tree(NamedTuple):
    """Leaves and groups of these as the C kernels take them."""

    order: Tensor
    tensors: tuple[Tensor, ...]
    strides: tuple[int, int]


def _arranged(points: PointSet, ends: Tensor) -> Tensor:
    """int32 [N]: the points item by item, neighbours together."""
    order = (points.items.argsort(stable=True) if points.count > 1 else torch.arange(len(points))).int()
    native_points.run(points.points, "arrange", (points.points, order, ends), (points.count,))
    return order


def _tree(points: PointSet) -> _Tree:
    ends = item_ends(points)
    order, blocks = _arranged(points, ends), blocks_of(ends, native_points.LEAF)
    groups, number = blocks_of(blocks.of, GROUP), len(blocks.begins)
    held = points.points.new_empty(number, points.dim, native_points.LEAF)
    index = order.new_empty(number, native_points.LEAF)
    leaves = points.points.new_full((2 * points.dim, number + _PAST), torch.inf)
    tensors = (points.points, order, blocks.begins, blocks.counts, held, index, leaves)
    native_points.run(points.points, "fill", tensors, (number, leaves.shape[1]))
    outer = points.points.new_full((2 * points.dim, len(groups.begins) + _PAST), torch.inf)
    of = torch.repeat_interleave(torch.arange(len(groups.begins)), groups.counts).expand(points.dim, -1)
    outer[: points.dim].scatter_reduce_(1, of, leaves[: points.dim, :number], "amin")
    outer[points.dim :].neg_().scatter_reduce_(1, of, leaves[points.dim :, :number], "amax")
    begins = torch.cat([groups.begins, groups.begins.new_tensor([number])])
    return _Tree(order, (held, index, leaves, outer, begins, groups.of), (leaves.shape[1], outer.shape[1]))


def _turn(points: PointSet, queries: PointSet, tree: _Tree) -> Tensor:
    """int32 [Q]: an order of the queries in which neighbours are together."""
    return tree.order if queries is points else _arranged(queries, item_ends(queries))


def _nearest_native(points: PointSet, queries: PointSet, limits: Limits) -> Found:
    tree, most = _tree(points), points.points.new_tensor([limits.most])
    index = queries.items.new_empty(len(queries), limits.k)
    squared = points.points.new_empty(len(queries), limits.k)
    tensors = (points.points, queries.points, _turn(points, queries, tree), queries.items, index, squared, most)
    sizes = (*tree.strides, len(queries), limits.k, int(limits.by_index))
    native_points.run(points.points, "nearest", (*tree.tensors, *tensors), sizes)
    return index, squared


def _within_native(points: PointSet, queries: PointSet, most: float) -> Found:
    tree, limit = _tree(points), points.points.new_tensor([most])
    turn, counts = _turn(points, queries, tree), queries.items.new_zeros(len(queries) + 1)
    asked, sizes = (*tree.tensors, queries.points, turn, queries.items), (*tree.strides, len(queries))
    native_points.run(points.points, "within", (*asked, None, counts[1:], limit), sizes)
    first = counts.cumsum(0)
    found = first.new_empty(int(first[-1]))
    native_points.run(points.points, "within", (*asked, first, found, limit), sizes)
    return first, found


def _farthest_native(points: PointSet, counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    tree = _tree(points)
    index = tree.tensors[1]
    # The last entry is that of padding, -1.
    place = torch.empty(len(points) + 1, dtype=torch.int64)
    place[index.flatten().long()] = torch.arange(index.numel())
    begins = place[[start if count else -1 for start, count in zip(starts, counts, strict=True)]]
    first = torch.tensor([0, *counts]).cumsum(0)
    found = first.new_empty(sum(counts))
    apart = points.points.new_full(index.shape, torch.finfo(points.points.dtype).max).masked_fill_(index < 0, -1)
    far = [points.points.new_full((n,), torch.finfo(apart.dtype).max) for n in tree.strides]
    at = [first.new_zeros(n) for n in tree.strides]
    tensors = (*tree.tensors, begins, first, found, apart, *far, *at)
    native_points.run(points.points, "farthest", tensors, (*tree.strides, points.count))
    return found
