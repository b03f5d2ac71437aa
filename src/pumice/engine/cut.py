"""A scene cut into tiles: the rows of each tile and of its halo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import Bounds, Geometry, KeySpace
from pumice.engine.receptive import Box
from pumice.ops import SparseTensor


@dataclass(frozen=True)
class Grid:
    """Tiles of `size` voxels per axis from `origin` on, of each batch item by itself: tile t of an item covers
    [origin + t * size, origin + (t + 1) * size)."""

    origin: tuple[int, ...]
    size: tuple[int, ...]

    def tiles(self, coords: Tensor, scale: Sequence[Fraction] = ()) -> Tensor:
        """int64 [N, 1+D]: (item, tile per axis) of `coords` int [N, 1+D]; scale: size of their voxels."""
        columns = [coords[:, 0].long()]
        for axis, (origin, size) in enumerate(zip(self.origin, self.size, strict=True)):
            over, under = scale[axis].as_integer_ratio() if scale else (1, 1)
            own = coords[:, axis + 1].long() * over - origin * under
            columns.append(own.div(size * under, rounding_mode="floor"))
        return torch.stack(columns, 1)

    def box(self, tile: Sequence[int], around: Box) -> Box:
        """The box `around` the tile at the origin, moved to `tile` (item, tile per axis)."""
        starts = [o + t * s for o, t, s in zip(self.origin, tile[1:], self.size, strict=True)]
        return tuple((start + low, start + high) for start, (low, high) in zip(starts, around, strict=True))


class TileTable(NamedTuple):
    """Non-empty tiles, int64: (item, tile per axis) [M, 1+D], first and last coordinates [M, D], rows [M]."""

    tiles: Tensor
    low: Tensor
    high: Tensor
    rows: Tensor

    def near(self, item: int, box: Box) -> Tensor:
        """int64: the tiles whose voxels may be in a box."""
        low, high = (torch.tensor(side) for side in zip(*box, strict=True))
        return ((self.tiles[:, 0] == item) & (self.high >= low).all(1) & (self.low <= high).all(1)).nonzero()[:, 0]

    def runs(self, grid: Grid, existence: Box) -> list[tuple[int, ...]]:
        """The tiles to run, in order: those whose outputs exist by the voxels of tiles in the table."""
        found: set[tuple[int, ...]] = set()
        for (item, *_), low, high in zip(*(part.tolist() for part in self[:3]), strict=True):
            axes = []
            for a, b, o, size, (near, far) in zip(low, high, grid.origin, grid.size, existence, strict=True):
                # Tiles t with o + t * size + near <= b and o + t * size + far >= a.
                axes.append(range(-((o + far - a) // size), (b - o - near) // size + 1))
            found.update((item, *tile) for tile in product(*axes))
        return sorted(found)


@dataclass(frozen=True, eq=False)
class Cut:
    """The rows of x ordered by tile, so that those of a tile are one run."""

    x: SparseTensor
    grid: Grid
    order: Tensor = field(init=False)
    coords: Tensor = field(init=False)
    table: TileTable = field(init=False)
    ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        coords = self.x.coords
        tiles = self.grid.tiles(coords)
        keys = KeySpace(Bounds.of(tiles)).keys(tiles)
        order = torch.argsort(keys, stable=True)
        _, counts = torch.unique_consecutive(keys[order], return_counts=True)
        ends = counts.cumsum(0)
        places = torch.repeat_interleave(torch.arange(len(counts), device=keys.device), counts)[:, None]
        ranked = coords[order]
        places = places.expand(-1, ranked.shape[1] - 1)
        empty = ranked.new_zeros(len(counts), ranked.shape[1] - 1)
        sides = [empty.scatter_reduce(0, places, ranked[:, 1:], how, include_self=False) for how in ("amin", "amax")]
        found = (tiles[order[ends - counts]], *sides, counts)
        values = {"order": order, "coords": ranked, "table": TileTable(*(part.long().cpu() for part in found))}
        for name, value in (values | {"ends": ends.tolist()}).items():
            object.__setattr__(self, name, value)

    @cached_property
    def numbers(self) -> dict[tuple[int, ...], int]:
        """Places of tiles in the table."""
        return {tuple(tile): number for number, tile in enumerate(self.table.tiles.tolist())}

    def rows(self, tile: tuple[int, ...], around: Box) -> tuple[Tensor, int]:
        """(rows of x in the box around a tile, the tile's own first; number of own rows)."""
        own = self.numbers.get(tile)
        first = [] if own is None else [self.order[self._run(own)]]
        return torch.cat([*first, *self._halo(tile, around)]), sum(map(len, first))

    def _halo(self, tile: tuple[int, ...], around: Box) -> Iterator[Tensor]:
        box = self.grid.box(tile, around)
        yield self.order[:0]
        for other in self.table.near(tile[0], box).tolist():
            if other != self.numbers.get(tile):
                run = self._run(other)
                inside = torch.ones(len(self.order[run]), dtype=torch.bool, device=self.order.device)
                for axis, (low, high) in enumerate(box):
                    values = self.coords[run, axis + 1]
                    inside &= (values >= low) & (values <= high)
                yield self.order[run][inside]

    def _run(self, number: int) -> slice:
        end = self.ends[number]
        return slice(end - int(self.table.rows[number]), end)

    def of_tiles(self, tiles: Sequence[tuple[int, ...]]) -> Tensor:
        """The tiles' own rows of x, in order."""
        runs = [self._run(self.numbers[tile]) for tile in tiles if tile in self.numbers]
        return torch.cat([self.order[:0], *(self.order[run] for run in runs)]).sort()[0]


def placed(feats: Tensor, coords: Tensor, like: Geometry) -> SparseTensor:
    """A tensor on other coordinates int32 [N, 1+D] of the same grid as `like`, on the device of feats."""
    site = replace(like.site, bounds=Bounds.of(coords))
    return SparseTensor(feats, Geometry(coords.contiguous(), site, settled=like.settled))
