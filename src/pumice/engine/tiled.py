"""pumice.tiled: a network over a scene larger than memory, one tile with its halo at a time, or over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pumice.engine.cut import Cut
from pumice.engine.receptive import ReceptiveField
from pumice.engine.tile_ranks import over_ranks
from pumice.engine.tile_run import Runner, Way, joined, way_for
from pumice.ops import SparseTensor


@dataclass(frozen=True)
class SceneTile:
    """A tile of a batch item: index per axis, voxels of its own, and voxels of others that it reads besides."""

    item: int
    index: tuple[int, ...]
    voxels: int
    halo: int


@dataclass(frozen=True)
class TilePlan:
    """What pm.tiled does on a scene, and what it costs, known before it runs.

    tile: voxels per axis, rounded up to the stride of the field; the whole scene's if the field covers it. halo: voxels
    that are read (before, after) a tile, per axis. field: of the network, None if not known. tiles: the tiles to run.
    covers: True if every tile would have read the whole scene, so that each batch item is one."""

    tile: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    field: ReceptiveField | None
    tiles: tuple[SceneTile, ...]
    covers: bool

    @property
    def voxels(self) -> int:
        """Voxels of the scene."""
        return sum(tile.voxels for tile in self.tiles)

    @property
    def halo_voxels(self) -> int:
        """Voxels that are computed again as part of halos, over all tiles."""
        return sum(tile.halo for tile in self.tiles)

    @property
    def overhead(self) -> float:
        """Voxels computed for each voxel of the scene; 1 without halos."""
        return 1 + self.halo_voxels / max(self.voxels, 1)

    @property
    def largest(self) -> int:
        """Voxels of the largest tile with its halo: memory is that of a scene of as many."""
        return max((tile.voxels + tile.halo for tile in self.tiles), default=0)

    def __str__(self) -> str:
        halo = ", ".join(f"-{before} +{after}" for before, after in self.halo)
        lines = [
            f"{len(self.tiles)} tiles of {self.tile} voxels, halo {halo}",
            f"{self.voxels:,} voxels of the scene, {self.halo_voxels:,} of halos: {self.overhead:.2f} times the work",
            f"largest tile: {self.largest:,} voxels, {self.largest / max(self.voxels, 1):.1%} of the scene",
            "receptive field not known: results depend on the halo" if self.field is None else str(self.field),
        ]
        return "\n".join([*lines, *([_COVERS] if self.covers else [])])


_COVERS = "the receptive field covers the scene: tiles would save nothing, each batch item runs as one"


def plan_tiles(
    net: nn.Module, x: SparseTensor, tile: int | Sequence[int], halo: str | int | Sequence[int] = "exact"
) -> TilePlan:
    """What `pm.tiled` would do with the same arguments, without running the network: tiles, voxels, halos, overhead.

        print(pm.plan_tiles(net, x, tile=512))

    Arguments and errors as of pm.tiled. Over ranks the tiles of the whole scene are the same ones."""
    way = way_for(net, x, tile, halo)
    way, grid = way.over(x.geometry.bounds)
    around, existence = way.boxes
    cut, tiles = Cut(x, grid), []
    for one in cut.table.runs(grid, existence):
        rows, own = cut.rows(one, around)
        tiles.append(SceneTile(one[0], one[1:], own, len(rows) - own))
    halos = tuple((-low, high - t + 1) for (low, high), t in zip(around, way.tile, strict=True))
    return TilePlan(way.tile, halos, None if way.reads is None else way.reads.field, tuple(tiles), way.covers)


def tiled(
    net: nn.Module,
    x: SparseTensor,
    tile: int | Sequence[int],
    halo: str | int | Sequence[int] = "exact",
    group: Any = None,
) -> SparseTensor:
    """net(x), tile by tile: for scenes larger than the device's memory, or over the ranks of a process group.

        y = net(x)       with the memory of one tile and its halo

    Each tile of each batch item runs with all the voxels that its outputs depend on (the halo, from the network's
    receptive field), and its own outputs are kept. So the result is that of the whole scene: on a CPU bit for bit, on
    a GPU up to the rounding of kernels, which are chosen by the number of rows. Without gradients.

    Parameters
    ----------
    net: from a SparseTensor to a SparseTensor, in evaluation. Tiles move to the device of its parameters.
    x: N voxels x C channels. It, and the result, may be in the host's memory.
    tile: voxels along an axis, an int or one per axis; rounded up to the stride of the network's coarsest level.
    halo: "exact", or a number of voxels, an int or one per axis: less work, and results differ where the network sees
        farther. With a number, networks of which no receptive field is known run, too.
    group: a torch.distributed process group. Each rank passes its own rows, in any partition, and the same other
        arguments. Tiles are dealt to ranks by numbers of voxels; rows and results travel by all_to_all.

    Returns a SparseTensor: in the rows of x (of each rank) if the results are at x's coordinates; else in (batch,
    Morton) order, as networks give new coordinates (over ranks, each has the results of the tiles that it ran).
    Warns if the receptive field covers the scene: each batch item then runs as one tile.
    Raises DtypeError if x or the result is not a SparseTensor, OptionError and ShapeError for other tiles and halos,
    and, with "exact", OptionError as pm.receptive_field for networks that see the whole scene or are not known.
    """
    runner = Runner(net, way_for(net, x, tile, halo))
    with torch.no_grad():
        y, way = _one_process(runner, x) if group is None else over_ranks(runner, x, group)
    if way.covers:
        warnings.warn(_COVERS, stacklevel=2)
    return y


def _one_process(runner: Runner, x: SparseTensor) -> tuple[SparseTensor, Way]:
    way, grid = runner.way.over(x.geometry.bounds)
    around, existence = way.boxes
    cut = Cut(x, grid)
    return joined(x, runner.pieces(cut, cut.table.runs(grid, existence), around)), way
