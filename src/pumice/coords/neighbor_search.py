"""Launches the kernels of coords.neighbor_kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pumice.coords.points import Found, Limits, PointLeaves, PointSet, blocks_of, item_ends
from pumice.runtime.launch import kernel

_CHUNK = 128  # Boxes that a program looks at together
_MANY = 30_000  # Points from which on leaves are of 64
_BLOCK = 256  # Points whose codes a program computes
_TILE = 16  # Leaves that a program of `farthest` updates together
_AXES = 4  # Axes that the order of points follows
_DEPTH = 16  # Maximum bits of each


@dataclass(frozen=True)
class SearchShape:
    """Sizes of the kernels, whose programs have one warp: points and queries of a leaf."""

    leaf: int = 32
    queries: int = 32


def shape_for(k: int, points: int) -> SearchShape:
    """For k results: few queries if the results are many. Leaves of 64 among many points: those to look at are fewer
    (measured on an H200 with 10, 100 and 120 thousand points)."""
    return SearchShape(64 if points > _MANY else 32, max(2, min(32, 1024 // slots_of(k))))


def slots_of(k: int) -> int:
    return 1 << max(1, (k - 1).bit_length())


def leaves_of(points: PointSet, size: int) -> PointLeaves:
    """Leaves along the Morton curve of the first axes."""
    like, number = points.points, len(points)
    low, high = torch.aminmax(like, dim=0) if number else (like.new_zeros(points.dim),) * 2
    axes = min(points.dim, _AXES)
    depth = min(_DEPTH, (62 - points.count.bit_length()) // axes)
    unit = (high - low)[:axes].amax().clamp_(min=torch.finfo(like.dtype).tiny).div_(2**depth - 1)
    codes = points.items.new_empty(number)
    constants = {"D": points.dim, "AXES": axes, "DEPTH": depth, "BLOCK": _BLOCK}
    tensors = (like, points.items, low, unit, codes)
    kernel("neighbor_kernels.codes")(-(-number // _BLOCK), tensors, (number,), constants)
    order, blocks = codes.argsort(), blocks_of(item_ends(points), size)
    count = len(blocks.begins)
    held, boxes = like.new_empty(count, points.dim, size), like.new_empty(2 * points.dim, count)
    index = torch.empty(count, size, dtype=torch.int32, device=like.device)
    tensors = (like, order, blocks.begins, blocks.counts, held, index, boxes)
    kernel("neighbor_kernels.leaves")(count, tensors, (count,), {"D": points.dim, "LEAF": size}, 1)
    return PointLeaves(held, index, boxes, blocks.of, blocks.segment)


def _asked(points: PointSet, queries: PointSet, shape: SearchShape) -> tuple[list[Tensor], tuple[int, int], Any]:
    """Tensors, strides of boxes and constants of a search."""
    held = leaves_of(points, shape.leaf)
    asked = held if queries is points and shape.leaf == shape.queries else leaves_of(queries, shape.queries)
    tensors = [held.points, held.index, held.boxes, held.item_leaf, asked.points, asked.index, asked.boxes, asked.item]
    constants = {"D": points.dim, "LEAF": shape.leaf, "QUERIES": shape.queries}
    return tensors, (held.boxes.shape[1], asked.boxes.shape[1]), constants


def nearest(points: PointSet, queries: PointSet, limits: Limits, shape: SearchShape | None = None) -> Found:
    """As coords.neighbors.nearest."""
    shape = shape or shape_for(limits.k, len(points))
    tensors, strides, constants = _asked(points, queries, shape)
    index = queries.items.new_empty(len(queries), limits.k)
    apart = queries.points.new_empty(len(queries), limits.k)
    constants |= {"SLOTS": slots_of(limits.k), "CHUNK": _CHUNK, "BY_INDEX": limits.by_index}
    numbers = (limits.k, float(limits.most), *strides)
    kernel("neighbor_kernels.nearest")(strides[1], (*tensors, index, apart), numbers, constants, 1, fused=False)
    return index, _squared(points, queries, index) if limits.by_index else apart


def _squared(points: PointSet, queries: PointSet, index: Tensor) -> Tensor:
    """[Q, k]: squared distances of found points, inf for none."""
    total = queries.points.new_zeros(index.shape)
    for axis in range(points.dim if len(points) else 0):
        apart = points.points[:, axis][index.clamp(0, len(points) - 1)] - queries.points[:, axis, None]
        total += apart * apart
    return total.masked_fill_(index < 0, torch.inf)


def within(points: PointSet, queries: PointSet, most: float, shape: SearchShape = SearchShape()) -> Found:
    """As coords.neighbors.within."""
    tensors, strides, constants = _asked(points, queries, shape)
    first, run = queries.items.new_zeros(len(queries) + 1), kernel("neighbor_kernels.within")
    numbers, constants = (float(most), *strides), constants | {"CHUNK": _CHUNK}
    for listed in (False, True):
        found = first.new_empty(int(first[-1]))
        run(strides[1], (*tensors, first, found), numbers, constants | {"LIST": listed}, 1, fused=False)
        first = first if listed else first.cumsum(0)
    # Leaves were met in the order of their distance.
    of = torch.repeat_interleave(torch.arange(len(queries), device=first.device), first.diff())
    return first, (of * len(points) + found).sort().values % max(1, len(points))


def farthest(points: PointSet, counts: Sequence[int], starts: Sequence[int]) -> Tensor:
    """As coords.neighbors.farthest."""
    size = max(64, 1 << max(0, len(points) // 4096 - 1).bit_length())
    held = leaves_of(points, size)
    most = int(held.item_leaf.diff().max()) if points.count else 0
    first = torch.tensor([0, *counts]).cumsum(0).to(points.items.device)
    found, begins = first.new_empty(sum(counts)), torch.tensor(starts, device=first.device)
    apart = held.points.new_full(held.index.shape, torch.finfo(torch.float32).max).masked_fill_(held.index < 0, -1)
    tops, waiting = first.new_empty(len(held.index)), held.index.new_empty(len(held.index))
    tensors = (points.points, held.points, held.index, held.boxes, held.item_leaf, first, begins, found, apart, tops)
    constants = {"D": points.dim, "LEAF": size, "LEAVES": max(16, 1 << max(0, most - 1).bit_length()), "TILE": _TILE}
    run = kernel("neighbor_kernels.farthest")
    run(points.count, (*tensors, waiting), (held.boxes.shape[1],), constants, 8, fused=False)
    return found
