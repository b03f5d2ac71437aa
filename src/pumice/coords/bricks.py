"""Sorted bricks with occupancy bits: which cells exist, in (batch, Morton) order, without a sort and without a value.

A brick is 2**LOW cells that follow one another in Morton order. A bitmap over all bricks of the box says which exist;
a prefix count of it numbers those. Each that exists has a bitmap of its cells, and a prefix count over all of these
is the place of a cell in (batch, Morton) order: one structure answers what is there, in which order, and at which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pumice.coords.choice import MapSchedule
from pumice.coords.cloud import Cloud, offset_table
from pumice.coords.codes import CodeLayout
from pumice.coords.keys import Bounds
from pumice.coords.launch import kernel, without_kernels
from pumice.coords.lookup import WARPS, WORD, Found, lanes_of, padded, prefix, rows_of
from pumice.coords.relation import Relation
from pumice.errors import CoordinateError

LOW = {1: 9, 2: 8, 3: 9, 4: 8}
"""The binary logarithm of a brick's cells: 512, 16 x 16, 8 x 8 x 8 and 4 x 4 x 4 x 4."""
MOST = 1 << 30
"""Bricks of a box, at most: their bitmap then takes 128 MiB."""


@dataclass(frozen=True)
class Reach:
    """Which cells the rows of a cloud reach, one for each offset.

    form: "times" (step * c + offset), "over" ((c - offset) / step, where it divides), "floor" (floor(c / step)).
    """

    form: str
    steps: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    @staticmethod
    def of_outputs(relation: Relation) -> Reach:
        """What makes the outputs of a relation exist."""
        if relation.policy == "floor_unique":
            return Reach("floor", relation.stride, ((0,) * relation.dim,))
        return Reach.of_meetings(relation)

    @staticmethod
    def of_meetings(relation: Relation) -> Reach:
        """Which outputs each input meets, tap by tap."""
        form = "times" if relation.policy == "transposed_support" else "over"
        return Reach(form, relation.stride, relation.offsets)

    @staticmethod
    def itself(dim: int) -> Reach:
        return Reach("floor", (1,) * dim, ((0,) * dim,))


@dataclass(frozen=True, eq=False)
class Space:
    """The cells of a box as kernels number them: Morton codes, put together from a table for each axis."""

    bounds: Bounds
    layout: CodeLayout

    @staticmethod
    def of(bounds: Bounds) -> Space:
        return Space(bounds, CodeLayout.of(bounds))

    @property
    def low(self) -> int:
        return LOW[len(self.bounds.low)]

    @property
    def bits(self) -> int:
        """Where the batch item stands in a code."""
        return max(self.layout.bits, self.low)

    @property
    def bricks(self) -> int:
        return max(self.bounds.batch, 1) << (self.bits - self.low)

    @property
    def numbers(self) -> tuple[int, ...]:
        """batch, four lows, four extents, where each axis's table starts for its low, bits."""
        box, layout = self.bounds, self.layout
        begins = tuple(s + a + b for s, a, b in zip(layout.starts, box.low, layout.bias, strict=True))
        return (box.batch, *padded(box.low, 0), *padded(box.extents, 1), *padded(begins, 0), self.bits)


def refusal(coords: Tensor, bounds: Bounds, steps: Sequence[int] = ()) -> str | None:
    """Why no bricks are made of what these coordinates reach in a box by these steps, or None."""
    if why := without_kernels(coords):
        return why
    try:
        space = Space.of(bounds)
        space.layout.tables(coords.device)
    except CoordinateError as problem:
        return str(problem)
    widest = max((extent * step for extent, step in zip(bounds.extents, steps, strict=False)), default=0)
    if widest >= 2**31:
        return f"an axis is {widest} cells of the inputs long, at most {2**31 - 1} are divided"
    return None if space.bricks <= MOST else f"the box has {space.bricks} bricks, at most {MOST} are counted"


@dataclass(frozen=True, eq=False)
class Bricks:
    """Which cells of a box exist.

    directory int32 [ceil(bricks / 32)]: the bitmap over bricks; brick_ranks: how many there are up to each word.
    cells int32 [limit * 2**LOW / 32]: the bitmaps of those that exist; cell_ranks: as brick_ranks.
    """

    space: Space
    limit: int
    directory: Tensor
    brick_ranks: Tensor
    cells: Tensor
    cell_ranks: Tensor

    @property
    def count(self) -> Tensor:
        """int32 [1] on the device: how many cells exist."""
        return self.cell_ranks[-1:]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """As kernels take them."""
        return self.directory, self.brick_ranks, self.cells, self.cell_ranks

    @staticmethod
    def of(cloud: Cloud, reach: Reach, bounds: Bounds, most: int, strict: bool = False) -> Bricks:
        """The cells in `bounds` that the cloud's rows reach, with room for `most` of them in the worst case.

        strict: cells outside, and cells that are reached twice, are reported in the cloud's status.
        """
        space, device = Space.of(bounds), cloud.device
        limit = max(1, min(most, space.bricks))
        words = limit * (1 << space.low) // 32
        head = -(-space.bricks // 1024) * 32  # whole lines of memory
        zeros = torch.zeros(head + words, dtype=torch.int32, device=device)
        directory, cells = zeros[:head], zeros[head:]
        call = _Call(cloud, reach, space)
        more = {"STRICT": strict}
        call("probes.mark", (directory, cloud.status), (), more)
        ranks = prefix(directory)
        call("probes.occupy", (directory, ranks, cells, cloud.status), (limit,), more)
        return Bricks(space, limit, directory, ranks, cells, prefix(cells))

    def coords(self, cloud: Cloud, reach: Reach, capacity: int) -> Tensor:
        """int32 [capacity, 1+D]: the cells in (batch, Morton) order; rows past their count hold -1."""
        return self._met(cloud, reach, capacity, "", True)[1]

    def rows(self, cloud: Cloud, reach: Reach, capacity: int) -> Tensor:
        """int32 [capacity, K]: the row of the cloud that reaches each cell through each offset, -1 where none does."""
        return self._met(cloud, reach, capacity, "rows", False)[0]

    def turned(self, cloud: Cloud, reach: Reach, capacity: int) -> Tensor:
        """int32 [N, K]: the place of the cell that each row of the cloud reaches through each offset, else -1."""
        return self._met(cloud, reach, capacity, "turned", False)[0]

    def both(self, cloud: Cloud, reach: Reach, capacity: int) -> tuple[Tensor, Tensor]:
        """(rows, coords) in one pass, for offsets that reach every cell that exists."""
        return self._met(cloud, reach, capacity, "rows", True)

    def _met(self, cloud: Cloud, reach: Reach, capacity: int, kind: str, place: bool) -> tuple[Tensor, Tensor]:
        volume = len(reach.offsets)
        count = {"rows": capacity, "turned": cloud.capacity}.get(kind, 0)
        sizes = (count, volume), (capacity if place else 0, cloud.dim + 1)
        met, placed = (torch.full(size, -1, dtype=torch.int32, device=cloud.device) for size in sizes)
        more = {"MAP": kind, "PLACE": place}
        _Call(cloud, reach, self.space)(
            "probes.meet", (*self.tensors, met, placed, cloud.status), (self.limit, capacity), more
        )
        return met, placed


@dataclass(frozen=True)
class _Call:
    """A kernel over all cells that rows reach."""

    cloud: Cloud
    reach: Reach
    space: Space

    def __call__(self, name: str, tensors: Sequence[Tensor], numbers: Sequence[int], more: dict[str, Any]) -> None:
        cloud, reach, device = self.cloud, self.reach, self.cloud.device
        lanes = lanes_of(len(reach.offsets))
        given = (offset_table(reach.offsets, device), self.space.layout.tables(device))
        constants = {"D": cloud.dim, "K": len(reach.offsets), **_steps(reach.steps), "FORM": reach.form, **more}
        constants |= {"LOW": self.space.low, "ROWS": rows_of(lanes), "LANES": lanes}
        programs = -(-cloud.capacity // rows_of(lanes))
        kernel(name)(
            programs, (cloud.coords, cloud.count, *given, *tensors), (*self.space.numbers, *numbers), constants, WARPS
        )


class BrickLookup:
    """Bricks of a cloud's own cells, with the row of each."""

    def __init__(self, cloud: Cloud, schedule: MapSchedule) -> None:
        own = Reach.itself(cloud.dim)
        self._bricks = Bricks.of(cloud, own, cloud.bounds, cloud.capacity, strict=True)
        self._values = self._bricks.rows(cloud, own, cloud.capacity)

    @staticmethod
    def refusal(cloud: Cloud, schedule: MapSchedule) -> str | None:
        return refusal(cloud.coords, cloud.bounds)

    @property
    def nbytes(self) -> int:
        return self._bricks.nbytes + self._values.numel() * 4

    def neighbours(self, outputs: Cloud, relation: Relation) -> Found:
        """See Lookup."""
        bricks, space, device = self._bricks, self._bricks.space, outputs.device
        volume, capacity = len(relation.offsets), outputs.capacity
        rows = torch.empty(capacity, volume, dtype=torch.int32, device=device)
        masks = torch.empty(capacity, -(-volume // WORD), dtype=torch.int32, device=device)
        lanes = lanes_of(volume)
        constants = {"D": outputs.dim, "K": volume, **_steps(relation.stride)}
        constants |= {"LOW": space.low, "ROWS": rows_of(lanes), "LANES": lanes}
        given = (offset_table(relation.offsets, device), space.layout.tables(device))
        kernel("probes.brick_neighbours")(
            -(-capacity // rows_of(lanes)),
            (outputs.coords, outputs.count, *given, *bricks.tensors, self._values, rows, masks),
            (*space.numbers, bricks.limit, capacity),
            constants,
            WARPS,
        )
        return Found(rows, masks)


def _steps(steps: Sequence[int]) -> dict[str, int]:
    """The steps as kernels know them when they are compiled."""
    return {f"S{axis}": step for axis, step in enumerate(padded(steps, 1))}
