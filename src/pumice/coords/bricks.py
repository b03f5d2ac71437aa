"""Bricks: a two-level occupancy bitmap that finds, counts and orders cells in (batch, Morton) order without a sort.

A brick is 2**LOW consecutive cells in Morton order. A bitmap over the box's bricks (the directory) marks those that
exist, those with an existing cell; its prefix counts number them. Each existing brick has a bitmap of its cells, whose
prefix counts are the cells' ranks in (batch, Morton) order. In a small box all bricks have bitmaps, without directory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import CoordBuffer, offset_table
from pumice.coords.codes import CodeLayout
from pumice.coords.lookup import WARPS, UsedWords, lanes_of, padded, prefix_counts, rows_of, zeroed_words
from pumice.coords.relation import Relation
from pumice.errors import CoordinateError
from pumice.runtime.launch import cached_device_constant, kernel, to_device_async, triton_unavailable_reason

LOW = {1: 9, 2: 8, 3: 9, 4: 8}  # log2 of cells per brick by D: 512, 16 x 16, 8 x 8 x 8 and 4 x 4 x 4 x 4
MOST = 1 << 28  # Maximum number of bricks in a box: marking takes a byte each
WHOLE = 1 << 17  # Maximum bricks of a box without directory: a pass over 8 MiB beats one over the rows (H200)
FEW = 1 << 19  # Maximum bitmap words that are all cleared, not just those in use
KINDS = 1 << 16  # Maximum entries of the table of kernel offsets by residue class


@dataclass(frozen=True)
class Stencil:
    """The cells that a row at coordinate c reaches, at most one per offset.
    form: "times" (step * c + offset), "over" ((c - offset) / step, if whole), "floor" (floor(c / step))."""

    form: str
    steps: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_outputs(relation: Relation) -> Stencil:
        """The stencil by which inputs generate a relation's outputs."""
        if relation.policy == "floor_unique":
            return Stencil("floor", relation.stride, ((0,) * relation.dim,))
        return Stencil.of_neighbours(relation)

    @staticmethod
    def of_neighbours(relation: Relation) -> Stencil:
        """The stencil from each input to its outputs, one per kernel offset."""
        form = "times" if relation.policy == "transposed_support" else "over"
        return Stencil(form, relation.stride, relation.offsets)

    @property
    def lanes(self) -> int:
        """Maximum number of cells that a row reaches."""
        return _lanes(self)

    @property
    def lowest_offset(self) -> tuple[int, ...]:
        """Minimum offset along each axis."""
        return tuple(map(min, zip(*self.offsets, strict=True))) if self.offsets else (0,) * len(self.steps)

    @property
    def spread(self) -> int:
        """Maximum difference of offsets along an axis."""
        return max((max(axis) - min(axis) for axis in zip(*self.offsets, strict=True)), default=0)

    def origins(self, low: Sequence[int]) -> tuple[int, ...]:
        """Numbers that kernels subtract from coordinates ("times": from reached cells). low: lowest cell of the box."""
        if self.form == "times":
            return tuple(low)
        least = self.lowest_offset if self.form == "over" else (0,) * len(low)
        return tuple(first * step + o for first, step, o in zip(low, self.steps, least, strict=True))


@lru_cache(maxsize=256)
def _lanes(reach: Stencil) -> int:
    if reach.form != "over":
        return len(reach.offsets)
    # A row reaches cells only by the offsets of one residue class.
    return max(map(len, _by_rest(reach).values()), default=0)


def _by_rest(reach: Stencil) -> dict[int, list[int]]:
    """Indices of kernel offsets by residue class modulo the steps, a row-major index."""
    kinds: dict[int, list[int]] = {}
    for tap, offset in enumerate(reach.offsets):
        kind = 0
        for o, least, step in zip(offset, reach.lowest_offset, reach.steps, strict=True):
            kind = kind * step + (o - least) % step
        kinds.setdefault(kind, []).append(tap)
    return kinds


@cached_device_constant(256)
def residue_lists(reach: Stencil, device: torch.device) -> Tensor:
    """int32 table of the offsets for kernels. "over": [prod(steps), lanes, 1+D], per residue class a list of (offset
    index, addend to the quotient along each axis), -1 past the end. Other forms: [K, D], the offsets."""
    if reach.form != "over":
        return offset_table(reach.offsets, device)
    lists = torch.full((math.prod(reach.steps), max(reach.lanes, 1), 1 + len(reach.steps)), -1, dtype=torch.int32)
    for kind, taps in _by_rest(reach).items():
        for lane, tap in enumerate(taps):
            shifts = zip(reach.offsets[tap], reach.lowest_offset, reach.steps, strict=True)
            lists[kind, lane] = torch.tensor([tap, *(-((o - least) // step) for o, least, step in shifts)])
    return to_device_async(lists, device)


@dataclass(frozen=True, eq=False)
class BrickSpace:
    """Numbering of a box's cells in kernels: Morton codes from one lookup table per axis."""

    bounds: Bounds
    layout: CodeLayout

    @staticmethod
    def of(bounds: Bounds) -> BrickSpace:
        return BrickSpace(bounds, CodeLayout.of(bounds))

    @property
    def low(self) -> int:
        return LOW[len(self.bounds.low)]

    @property
    def bits(self) -> int:
        """Bit position of the batch index in a code."""
        return max(self.layout.bits, self.low)

    @property
    def bricks(self) -> int:
        return max(self.bounds.batch, 1) << (self.bits - self.low)

    def kernel_arguments(self, reach: Stencil) -> tuple[int, ...]:
        """Kernel arguments: batch size, then by axis Stencil.origins, extents and table starts, then bits."""
        box, layout = self.bounds, self.layout
        begins = tuple(s + a + b for s, a, b in zip(layout.starts, box.low, layout.bias, strict=True))
        taken = padded(reach.origins(box.low), 0)
        return (box.batch, *taken, *padded(box.extents, 1), *padded(begins, 0), self.bits)


def refusal(coords: Tensor, bounds: Bounds, reach: Stencil) -> str | None:
    """Reason why bricks cannot hold the cells in `bounds` that coordinates reach, or None."""
    if why := triton_unavailable_reason(coords):
        return why
    try:
        space = BrickSpace.of(bounds)
        space.layout.tables(coords.device)
    except CoordinateError as problem:
        return str(problem)
    widest = max(extent * step for extent, step in zip(bounds.extents, reach.steps, strict=True)) + reach.spread
    if widest >= 2**31:
        return f"an axis spans {widest} input cells, at most {2**31 - 1} are supported"
    if reach.form == "over" and math.prod(reach.steps) * reach.lanes > KINDS:
        return f"steps of {reach.steps} have {math.prod(reach.steps)} residue classes, too many to tabulate"
    return None if space.bricks <= MOST else f"the box has {space.bricks} bricks, at most {MOST} are supported"


@dataclass(frozen=True, eq=False)
class Bricks:
    """Bitmaps of the existing cells of a box.
    directory int64 [ceil(bricks / 32)]: bitmap over bricks with prefix counts, see `prefix_counts`; None if all have
    bitmaps. cells int64 [limit * 2**LOW / 32]: the same for cells of up to `limit` bricks. count int32 [1] on the
    device: number of existing cells."""

    space: BrickSpace
    limit: int
    directory: Tensor | None
    cells: Tensor
    count: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """(directory, cells) as kernel arguments."""
        return self.cells if self.directory is None else self.directory, self.cells

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs of kernels."""
        return {"WHOLE": self.directory is None}

    @staticmethod
    def of(cloud: CoordBuffer, reach: Stencil, bounds: Bounds, most: int) -> Bricks:
        """The cells in `bounds` that rows reach; most: their maximum number."""
        space = BrickSpace.of(bounds)
        call = _BrickCall(cloud, reach, space)
        words = (1 << space.low) // 32
        if space.bricks <= WHOLE:
            cells = torch.zeros(space.bricks * words, dtype=torch.int32, device=cloud.device)
            call("lookup_kernels.occupy", (cells, cells, cloud.status), (space.bricks,), {"WHOLE": True})
            return Bricks(space, space.bricks, None, *prefix_counts(cells))
        limit = max(1, min(most, space.bricks))
        size, capacity = -(-space.bricks // 32) * 32, limit * words
        few = capacity <= FEW
        marks = torch.zeros(size + 4 * capacity * few, dtype=torch.int8, device=cloud.device)
        marks, cells = marks[:size], marks[size:].view(torch.int32)
        call("lookup_kernels.mark", (marks,), (), {})
        directory, count = prefix_counts(marks)
        live = UsedWords(count, words)
        cells = cells if few else zeroed_words(capacity, live)
        call("lookup_kernels.occupy", (directory, cells, cloud.status), (limit,), {"WHOLE": False})
        return Bricks(space, limit, directory, *prefix_counts(cells, live))

    def coords(self, cloud: CoordBuffer, reach: Stencil, capacity: int) -> tuple[Tensor, Tensor]:
        """int32 [capacity, 1+D]: cells in (batch, Morton) order, -1 for padding; int32 [1]: number of valid rows."""
        return self._run_search(cloud, reach, capacity, "", True)[1:]

    def rows(self, cloud: CoordBuffer, reach: Stencil, capacity: int) -> Tensor:
        """int32 [capacity, K]: row of `cloud` that reaches each cell through each offset, -1 if none."""
        return self._run_search(cloud, reach, capacity, "rows", False)[0]

    def transposed_rows(self, cloud: CoordBuffer, reach: Stencil, capacity: int) -> Tensor:
        """int32 [N, K]: rank of the cell that each row of `cloud` reaches through each offset, -1 if none."""
        return self._run_search(cloud, reach, capacity, "turned", False)[0]

    def coords_and_rows(self, cloud: CoordBuffer, reach: Stencil, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, *coords) in one pass, for offsets that reach every existing cell."""
        return self._run_search(cloud, reach, capacity, "rows", True)

    def _run_search(
        self, cloud: CoordBuffer, reach: Stencil, capacity: int, kind: str, place: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        volume, device = len(reach.offsets), cloud.device
        count = {"rows": capacity, "turned": cloud.capacity}.get(kind, 0)
        met = torch.full((count, volume), -1, dtype=torch.int32, device=device)
        placed = torch.empty(capacity if place else 0, cloud.dim + 1, dtype=torch.int32, device=device)
        valid = torch.empty(1, dtype=torch.int32, device=device)
        more = {"K": volume, "MAP": kind, "PLACE": place, **self.constants}
        numbers = (self.limit, capacity, *padded(self.space.bounds.low, 0))
        tensors = (*self.tensors, self.count, met, placed, valid, cloud.status)
        _BrickCall(cloud, reach, self.space)("lookup_kernels.search_neighbours", tensors, numbers, more)
        return met, placed, valid


@dataclass(frozen=True)
class _BrickCall:
    """Launches kernels over all cells that rows of `cloud` reach."""

    cloud: CoordBuffer
    reach: Stencil
    space: BrickSpace

    def __call__(self, name: str, tensors: Sequence[Tensor], numbers: Sequence[int], more: dict[str, Any]) -> None:
        cloud, reach, device = self.cloud, self.reach, self.cloud.device
        lanes = lanes_of(reach.lanes)
        given = (residue_lists(reach, device), self.space.layout.tables(device))
        steps = {f"S{axis}": step for axis, step in enumerate(padded(reach.steps, 1))}
        constants = {"D": cloud.dim, "PER": reach.lanes, **steps, "FORM": reach.form}
        constants |= {"LOW": self.space.low, "ROWS": rows_of(lanes), "LANES": lanes, **more}
        programs = -(-cloud.capacity // rows_of(lanes))
        tensors = (cloud.coords, cloud.count, *given, *tensors)
        kernel(name)(programs, tensors, (*self.space.kernel_arguments(reach), *numbers), constants, WARPS)
