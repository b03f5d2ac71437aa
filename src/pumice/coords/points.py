"""Points in space, and leaves: blocks of neighbouring points of one batch item, with boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords.codes import serialize

_AXES = 4  # Axes that the order of points follows
_DEPTH = 16  # Maximum bits of each


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

    order: int32 [N], the points item by item, neighbours together; block n holds up to `size` of them.
    points [leaves, D, size], inf for padding; index int32 [leaves, size], -1 for padding. boxes [2 D, leaves + some]:
    low sides, then high. item_leaf int64 [items + 1]: where the leaves of each item begin; item int64 [leaves]."""

    order: Tensor
    points: Tensor
    index: Tensor
    boxes: Tensor
    item_leaf: Tensor
    item: Tensor


class Blocks(NamedTuple):
    """Runs of `size` within segments. begins, counts int64 [blocks]; of [segments + 1]: where a segment's blocks begin;
    segment int64 [blocks]."""

    begins: Tensor
    counts: Tensor
    of: Tensor
    segment: Tensor


def blocks_of(ends: Tensor, size: int) -> Blocks:
    """ends: int64 [segments + 1], where each begins, then the end of the last."""
    each = (ends[1:] - ends[:-1] + size - 1) // size
    number = int(each.sum())
    of = torch.cat([each.new_zeros(1), each.cumsum(0)])
    segment = torch.repeat_interleave(torch.arange(len(each), device=each.device), each, output_size=number)
    begins = ends[segment] + (torch.arange(len(segment), device=each.device) - of[segment]) * size
    return Blocks(begins, (ends[1:][segment] - begins).clamp_(max=size), of, segment)


def item_ends(points: PointSet) -> Tensor:
    """int64 [items + 1]: where each item begins in an order by items."""
    if points.count == 1:
        return torch.arange(2, device=points.items.device) * len(points)
    counts = torch.bincount(points.items, minlength=points.count)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def morton_order(points: PointSet) -> Tensor:
    """int64 [N]: the points by (item, Morton code of their place on the widest axes)."""
    if not len(points):
        return points.items
    low, high = points.points.amin(0), points.points.amax(0)
    axes = (high - low).argsort(descending=True)[:_AXES]
    depth = min(_DEPTH, (62 - points.count.bit_length()) // len(axes))
    unit = (high - low)[axes].amax().clamp(min=torch.finfo(low.dtype).tiny) / (2**depth - 1)
    cells = ((points.points - low)[:, axes] / unit).int().clamp_(0, 2**depth - 1)
    codes = serialize(torch.cat([points.items.int()[:, None], cells], dim=1), depth=depth, check=False)
    return codes.argsort()


def leaves_of(points: PointSet, size: int) -> PointLeaves:
    """In plain torch, by Morton codes."""
    order, blocks = morton_order(points), blocks_of(item_ends(points), size)
    lane = torch.arange(size, device=order.device)
    place = blocks.begins[:, None] + lane
    there = lane < blocks.counts[:, None]
    index = order[place.clamp_(max=max(0, len(order) - 1))].where(there, -1) if len(order) else place
    held = points.points[index].movedim(2, 1)
    spread = held.masked_fill(~there[:, None], torch.inf)
    low, high = spread.amin(2), held.masked_fill(~there[:, None], -torch.inf).amax(2)
    boxes = torch.cat([low, high], dim=1).T.contiguous()
    return PointLeaves(order.int(), spread.contiguous(), index.int(), boxes, blocks.of, blocks.segment)
