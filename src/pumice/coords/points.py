"""Points in space, and leaves: blocks of neighbouring points of one batch item, with boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class PointSet:
    """Points [N, D], float32 or float64, contiguous; items int64 [N]: the batch item of each, of `count` items."""

    points: Tensor
    items: Tensor
    count: int

    def __len__(self) -> int:
        return len(self.points)

    @property
    def dim(self) -> int:
        return self.points.shape[1]


class Limits(NamedTuple):
    """What a search admits. k: results of each query; most: largest squared distance; by_index: of those admitted take
    the k of lowest index, not the nearest."""

    k: int
    most: float
    by_index: bool = False


Found = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PointLeaves:
    """Points in blocks of `size` neighbours of one item, the last block of an item padded.

    points [leaves, D, size], inf for padding; index int32 [leaves, size], -1 for padding. boxes [2 D, leaves]: low
    sides, then high. item_leaf int64 [items + 1]: where the leaves of each item begin; item int64 [leaves]."""

    points: Tensor
    index: Tensor
    boxes: Tensor
    item_leaf: Tensor
    item: Tensor


class SegmentBlocks(NamedTuple):
    """Runs of `size` within segments. begins, counts int64 [blocks]; of [segments + 1]: where a segment's blocks begin;
    segment int64 [blocks]."""

    begins: Tensor
    counts: Tensor
    of: Tensor
    segment: Tensor


def blocks_of(ends: Tensor, size: int) -> SegmentBlocks:
    """ends: int64 [segments + 1], where each begins, then the end of the last."""
    each = (ends[1:] - ends[:-1] + size - 1) // size
    number = int(each.sum())
    of = torch.cat([each.new_zeros(1), each.cumsum(0)])
    segment = torch.repeat_interleave(torch.arange(len(each), device=each.device), each, output_size=number)
    begins = ends[segment] + (torch.arange(len(segment), device=each.device) - of[segment]) * size
    return SegmentBlocks(begins, (ends[1:][segment] - begins).clamp_(max=size), of, segment)


def item_ends(points: PointSet) -> Tensor:
    """int64 [items + 1]: where each item begins in an order by items."""
    if points.count == 1:
        return torch.arange(2, device=points.items.device) * len(points)
    counts = torch.bincount(points.items, minlength=points.count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
