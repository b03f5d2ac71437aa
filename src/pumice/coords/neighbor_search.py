"""Launches the kernels of coords.neighbor_kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pumice.coords.points import Found, Limits, PointSet, leaves_of
from pumice.runtime.launch import kernel

_CHUNK = 128  # Boxes that a program looks at together


@dataclass(frozen=True)
class SearchShape:
    """Sizes of the kernels: points and queries of a leaf, warps of a program."""

    leaf: int = 32
    queries: int = 32
    warps: int = 1


def shape_for(k: int) -> SearchShape:
    """For k results: few queries if the results are many."""
    return SearchShape(queries=max(2, min(32, 1024 // slots_of(k))))


def slots_of(k: int) -> int:
    return 1 << max(1, (k - 1).bit_length())


def _asked(points: PointSet, queries: PointSet, shape: SearchShape) -> tuple[list[Tensor], tuple[int, int], Any]:
    """Tensors, strides of boxes and constants of a search."""
    held = leaves_of(points, shape.leaf)
    asked = held if queries is points and shape.leaf == shape.queries else leaves_of(queries, shape.queries)
    tensors = [held.points, held.index, held.boxes, held.item_leaf, asked.points, asked.index, asked.boxes, asked.item]
    constants = {"D": points.dim, "LEAF": shape.leaf, "QUERIES": shape.queries}
    return tensors, (held.boxes.shape[1], asked.boxes.shape[1]), constants


def nearest(points: PointSet, queries: PointSet, limits: Limits, shape: SearchShape | None = None) -> Found:
    """As coords.neighbors.nearest."""
    shape = shape or shape_for(limits.k)
    tensors, strides, constants = _asked(points, queries, shape)
    index = queries.items.new_empty(len(queries), limits.k)
    apart = queries.points.new_empty(len(queries), limits.k)
    constants |= {"SLOTS": slots_of(limits.k), "CHUNK": _CHUNK, "BY_INDEX": limits.by_index}
    numbers = (limits.k, float(limits.most), *strides)
    kernel("neighbor_kernels.nearest")(
        strides[1], (*tensors, index, apart), numbers, constants, shape.warps, fused=False
    )
    return index, apart


def within(points: PointSet, queries: PointSet, most: float, shape: SearchShape = SearchShape()) -> Found:
    """As coords.neighbors.within."""
    tensors, strides, constants = _asked(points, queries, shape)
    first, run = queries.items.new_zeros(len(queries) + 1), kernel("neighbor_kernels.within")
    numbers, constants = (float(most), *strides), constants | {"CHUNK": _CHUNK}
    for listed in (False, True):
        found = first.new_empty(int(first[-1]))
        run(strides[1], (*tensors, first, found), numbers, constants | {"LIST": listed}, shape.warps, fused=False)
        first = first if listed else first.cumsum(0)
    # Leaves were met in the order of their distance.
    of = torch.repeat_interleave(torch.arange(len(queries), device=first.device), first.diff())
    return first, (of * len(points) + found).sort().values % max(1, len(points))


def farthest(points: PointSet, counts: Sequence[int], starts: Sequence[int], tile: int = 16, warps: int = 8) -> Tensor:
    """As coords.neighbors.farthest."""
    size = max(64, 1 << max(0, len(points) // 4096 - 1).bit_length())
    held = leaves_of(points, size)
    most = int(held.item_leaf.diff().max()) if points.count else 0
    first = torch.tensor([0, *counts]).cumsum(0).to(points.items.device)
    found, begins = first.new_empty(sum(counts)), torch.tensor(starts, device=first.device)
    apart = held.points.new_full(held.index.shape, torch.finfo(torch.float32).max).masked_fill_(held.index < 0, -1)
    tops, waiting = first.new_empty(len(held.index)), held.index.new_empty(len(held.index))
    tensors = (points.points, held.points, held.index, held.boxes, held.item_leaf, first, begins, found, apart, tops)
    constants = {"D": points.dim, "LEAF": size, "LEAVES": max(16, 1 << max(0, most - 1).bit_length()), "TILE": tile}
    run = kernel("neighbor_kernels.farthest")
    run(points.count, (*tensors, waiting), (held.boxes.shape[1],), constants, warps, fused=False)
    return found
