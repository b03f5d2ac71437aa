"""Neighbours of points in space: what point networks take from pointops, torch_cluster and PointNet++.

Points [P, D] with their batch items, int [P] in any order, as `voxelize` takes them. Results are exact and the same on
a CPU and a GPU; of equal distances the lowest index comes first. Whether points are finite, and the number of items, is
read on the host. No result is differentiable but that of three_interpolate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import Limits, PointSet, farthest, nearest, within
from pumice.coords.box import check_integers, dtype_of
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.ops.scatter import gather

_ORDERS = ("distance", "index")


class Neighbors(NamedTuple):
    """index: int64 [Q, k], the rows of the found points, -1 where there are no more. squared_distance: [Q, k], in the
    dtype of the search, inf where there are no more."""

    index: Tensor
    squared_distance: Tensor


def knn(
    points: Tensor,
    k: int,
    queries: Tensor | None = None,
    *,
    batch: Tensor | None = None,
    query_batch: Tensor | None = None,
) -> Neighbors:
    """The k nearest points of each query, nearest first.

        index[q, j] = the p of j-th least |points[p] - queries[q]|^2 among those with batch[p] = query_batch[q]

    Parameters
    ----------
    points: floating point [P, D], finite. float64 is searched in float64, others in float32. Above D = 8 all points are
        compared with all queries, in parts.
    k: number of neighbours, at least 1.
    queries: [Q, D], of the dtype and on the device of points; default: the points, each its own first neighbour.
    batch, query_batch: int [P] and [Q], the batch item of each, in any order; default: 0.

    Raises ShapeError, DtypeError, DeviceError, CoordinateError (not finite, negative items), OptionError (k).
    Source: the kd-tree of Bentley, Communications of the ACM 18 (1975), cut down to its leaves."""
    held, asked = _sets(points, queries, batch, query_batch)
    return Neighbors(*nearest(held, asked, _limits(k, torch.finfo(held.points.dtype).max)))


def ball_query(
    points: Tensor,
    radius: float,
    k: int,
    queries: Tensor | None = None,
    *,
    batch: Tensor | None = None,
    query_batch: Tensor | None = None,
    order: str = "distance",
) -> Neighbors:
    """Up to k points of each query within a radius.

        index[q, j] = the j-th p with |points[p] - queries[q]|^2 < radius^2 and batch[p] = query_batch[q]

    order: which k come first: "distance" (the nearest) or "index" (the lowest rows, as PointNet++ takes them).
    The rest, also what is raised, is as of `knn`; OptionError also for a radius that is not positive.
    Source: C. R. Qi et al., PointNet++, NeurIPS 2017, section 3.2."""
    OptionError.check("order", order, _ORDERS)
    held, asked = _sets(points, queries, batch, query_batch)
    return Neighbors(*nearest(held, asked, _limits(k, _most(radius, held.points.dtype), order == "index")))


def radius_graph(
    points: Tensor,
    radius: float,
    queries: Tensor | None = None,
    *,
    batch: Tensor | None = None,
    query_batch: Tensor | None = None,
    loop: bool = False,
) -> Tensor:
    """Edges from all points within a radius of each query: int64 [2, E] = (point, query), by query, then by point.

        edges = {(p, q): |points[p] - queries[q]|^2 < radius^2 and batch[p] = query_batch[q]}

    loop: keep the edge of a point to itself, where queries are the points. The number of edges is read on the host.
    The rest, also what is raised, is as of `ball_query`; there is no limit k."""
    held, asked = _sets(points, queries, batch, query_batch)
    first, index = within(held, asked, _most(radius, held.points.dtype))
    of = torch.repeat_interleave(torch.arange(len(asked), device=first.device), first.diff(), output_size=len(index))
    edges = torch.stack([index, of])
    return edges if loop or queries is not None else edges[:, index != of]


def farthest_point_sample(
    points: Tensor,
    count: int | Sequence[int] | Tensor,
    *,
    batch: Tensor | None = None,
    start: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Rows of points far from each other: int64 [sum of counts], item by item, in the order in which they are taken.

        index[0] = start;  index[j] = argmax over p of  min over i < j of  |points[p] - points[index[i]]|^2

    points, batch: as of `knn`. count: samples of each item, a number for all or one for each; no point is taken twice,
    so at most the points of the item. start: the row of each item's first sample; default: its first point.

    Raises as `knn`, and OptionError for counts and starts that items do not have. Counts are read on the host.
    Source: Eldar et al., IEEE Transactions on Image Processing 6 (1997); the leaves that a sample passes over: Han et
    al., QuickFPS, IEEE TCAD 2023."""
    held, _ = _sets(points, None, batch, None)
    sizes = torch.bincount(held.items, minlength=held.count).tolist()
    counts = _per_item(count, held.count, "counts")
    for item, (wanted, there) in enumerate(zip(counts, sizes, strict=True)):
        if not 0 <= wanted <= there:
            raise OptionError(f"item {item} has {there} points, of which 0 to {there} can be sampled; found {wanted}")
    starts = _first_rows(held) if start is None else _per_item(start, held.count, "starts")
    if start is not None:
        own = held.items[[min(max(row, 0), len(held) - 1) for row in starts]].tolist()
        for item, (row, of, wanted) in enumerate(zip(starts, own, counts, strict=True)):
            if wanted and (not 0 <= row < len(held) or of != item):
                raise OptionError(f"start {item} is a row of item {item}, found {row}")
    return farthest(held, counts, starts)


def three_interpolate(
    feats: Tensor,
    points: Tensor,
    queries: Tensor,
    k: int = 3,
    *,
    batch: Tensor | None = None,
    query_batch: Tensor | None = None,
) -> Tensor:
    """Features at queries from the k nearest points, weighted by inverse distance: [Q, C].

        y[q] = sum over the k nearest p of w(p, q) * feats[p],  w(p, q) = (1 / (|points[p] - queries[q]| + 1e-8)) / sum

    feats: floating point [P, C], differentiable. Where an item has fewer than k points these are taken, and 0 where it
    has none. The rest is as of `knn`. Source: PointNet++, section 3.4, with the weights of Pointcept's pointops."""
    index, squared = knn(points, k, queries, batch=batch, query_batch=query_batch)
    if not isinstance(feats, Tensor) or feats.ndim != 2 or len(feats) != len(points):
        raise ShapeError(f"feats are [P, C] with P = {len(points)} points, found {list(getattr(feats, 'shape', []))}")
    if not feats.is_floating_point():
        raise DtypeError(f"feats are floating point, found {feats.dtype}")
    near = 1 / (squared.sqrt() + 1e-8)
    weight = (near / near.sum(1, keepdim=True).clamp(min=torch.finfo(near.dtype).tiny)).to(feats.dtype)
    if not len(feats):
        return feats.new_zeros(len(queries), feats.shape[1]) + feats.sum()
    met = gather(feats, index.clamp(min=0).flatten()).reshape(*index.shape, feats.shape[1])
    return torch.einsum("qkc,qk->qc", met.masked_fill((index < 0)[..., None], 0), weight)


def _limits(k: int, most: float, by_index: bool = False) -> Limits:
    if not isinstance(k, int) or k < 1:
        raise OptionError(f"k is an integer of at least 1, found {k!r}")
    return Limits(k, most, by_index)


def _most(radius: float, dtype: torch.dtype) -> float:
    """The largest squared distance below radius^2, which is rounded to the dtype."""
    if not isinstance(radius, int | float) or not radius > 0:
        raise OptionError(f"radius is a number above 0, found {radius!r}")
    # Points are closer than the largest number.
    least = min(radius, math.sqrt(torch.finfo(dtype).max))
    squared = torch.tensor(least * least, dtype=torch.float64).to(dtype)
    return float(torch.nextafter(squared, squared.new_zeros(())))


def _sets(
    points: Tensor, queries: Tensor | None, batch: Tensor | None, query_batch: Tensor | None
) -> tuple[PointSet, PointSet]:
    points = _checked(points, "points")
    items = _items(points, batch, "batch")
    if queries is None:
        if query_batch is not None:
            raise OptionError("query_batch is that of queries: give these too")
        held = PointSet(points, items, _count(points, items))
        return held, held
    asked = _checked(queries, "queries")
    for name, expected, found in (
        ("axes", points.shape[1], asked.shape[1]),
        ("dtype", points.dtype, asked.dtype),
        ("device", points.device, asked.device),
    ):
        if expected != found:
            kind = {"axes": ShapeError, "dtype": DtypeError, "device": DeviceError}[name]
            raise kind(f"queries have the {name} of points, {expected}; found {found}")
    own = _items(asked, query_batch, "query_batch")
    count = max(_count(points, items), _count(asked, own))
    return PointSet(points, items, count), PointSet(asked, own, count)


def _checked(points: Tensor, name: str) -> Tensor:
    """Contiguous, in float32 or float64, detached."""
    if not isinstance(points, Tensor) or not points.is_floating_point():
        raise DtypeError(f"{name} are a floating point tensor, found {dtype_of(points)}")
    if points.ndim != 2 or not points.shape[1]:
        raise ShapeError(f"{name} are [N, D] with D of at least 1, found shape {list(points.shape)}")
    found = points.detach()
    return (found if found.dtype == torch.float64 else found.float()).contiguous()


def _items(points: Tensor, batch: Tensor | None, name: str) -> Tensor:
    if batch is None:
        return torch.zeros(len(points), dtype=torch.int64, device=points.device)
    check_integers(batch, name)
    if batch.shape != (len(points),):
        raise ShapeError(f"{name} is [{len(points)}], an item for each point; found shape {list(batch.shape)}")
    if batch.device != points.device:
        raise DeviceError(f"{name} is on {batch.device}, the points on {points.device}")
    return batch.long()


def _count(points: Tensor, items: Tensor) -> int:
    """Number of items; checks what only the host can, in one read: that points are finite and items not negative."""
    if not len(points):
        return 0
    # The sum of a row that is not finite is not finite; that of others does not overflow in float64.
    extent = points.abs().amax().double()
    lowest, highest, far = torch.stack([items.amin().double(), items.amax().double(), extent]).tolist()
    if not far <= math.sqrt(torch.finfo(points.dtype).max / max(16, points.shape[1])) / 2:
        raise CoordinateError(f"points are finite, with distances whose squares are; found a coordinate of {far}")
    if lowest < 0:
        raise CoordinateError(f"batch items are 0 and above, found {int(lowest)}")
    return int(highest) + 1


def _per_item(values: int | Sequence[int] | Tensor, count: int, name: str) -> Sequence[int]:
    found = values.flatten().tolist() if isinstance(values, Tensor) else values
    found = [found] * count if isinstance(found, int) else found
    if not isinstance(found, Sequence) or len(found) != count or not all(isinstance(value, int) for value in found):
        raise OptionError(f"{name} are {count} integers, one for each batch item; found {found}")
    return found


def _first_rows(points: PointSet) -> list[int]:
    """The first row of each item, 0 of those without points."""
    rows = torch.arange(len(points), device=points.items.device)
    first = torch.full((points.count,), len(points), dtype=torch.int64, device=rows.device)
    return first.scatter_reduce_(0, points.items, rows, "amin").remainder(max(1, len(points))).tolist()
