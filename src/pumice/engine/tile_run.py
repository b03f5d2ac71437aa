"""How a scene is cut into tiles for a network, and the run of these tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pumice.coords import Bounds, Geometry, GridSpec, as_axes, morton_argsort
from pumice.engine.cut import Cut, Grid, placed
from pumice.engine.receptive import Box, Reads, reads_of_network
from pumice.errors import DtypeError, OptionError
from pumice.ops import SparseTensor

Halo = int | str | Sequence[int]


@dataclass(frozen=True)
class Way:
    """How a scene is cut for a network.

    tile: voxels per axis. reads: the rules of the network, None if they are not known. margin: voxels of the halo per
    axis, None: exact. covers: True if tiles grew to the whole scene, which they would have read anyway."""

    tile: tuple[int, ...]
    reads: Reads | None
    margin: tuple[int, ...] | None
    covers: bool = False

    @property
    def boxes(self) -> tuple[Box, Box]:
        """Boxes around a tile at the origin: of the voxels that its outputs depend on, and by which they exist."""
        if self.margin is not None:
            axes = tuple(zip(self.tile, self.margin, strict=True))
            around = tuple((-m, t + m - 1) for t, m in axes)
            # Of an unknown network, outputs exist by voxels of the next tiles at most.
            near = tuple((-min(m, t), t + min(m, t) - 1) for t, m in axes)
            return around, near if self.reads is None else self.reads.halo(self.tile)[1]
        assert self.reads is not None
        return self.reads.halo(self.tile)

    def over(self, bounds: Bounds) -> tuple[Way, Grid]:
        """(way, tiles) over a scene with these bounds: tiles start at its corner, at a multiple of the stride."""
        steps = (1,) * len(self.tile) if self.reads is None else self.reads.stride
        origin = tuple(low // s * s for low, s in zip(bounds.low, steps, strict=True))
        spans = tuple(high - o for high, o in zip(bounds.high, origin, strict=True))
        last = tuple(span // t for span, t in zip(spans, self.tile, strict=True))
        axes = zip(self.boxes[0], origin, bounds.low, spans, last, self.tile, strict=True)
        covers = all(far >= span and n * t + near <= low - o for (near, far), o, low, span, n, t in axes)
        if not covers or not any(last):
            return self, Grid(origin, self.tile)
        whole = tuple((n + 1) * t for n, t in zip(last, self.tile, strict=True))
        return replace(self, tile=whole, covers=True), Grid(origin, whole)


def way_for(net: nn.Module, x: SparseTensor, tile: int | Sequence[int], halo: Halo) -> Way:
    """The way to cut scenes like x. Raises as pm.tiled."""
    if not isinstance(x, SparseTensor):
        raise DtypeError(f"pm.tiled takes a SparseTensor, found {type(x).__name__}")
    size = as_axes(tile, x.spatial_dim, "tile", 1)
    if isinstance(halo, str) and halo != "exact":
        raise OptionError(f"halo is 'exact' or a number of voxels, found {halo!r}")
    margin = None if isinstance(halo, str) else as_axes(halo, x.spatial_dim, "halo", 0)
    try:
        reads = reads_of_network(net, x)
    except OptionError:
        if margin is None:
            raise
        return Way(size, None, margin)
    return Way(tuple(-(-t // s) * s for t, s in zip(size, reads.stride, strict=True)), reads, margin)


class TileResult(NamedTuple):
    """Results of a tile on x's device. rows: of x, None if the results have coordinates of their own, `coords`;
    geometry: that they came with."""

    feats: Tensor
    rows: Tensor | None
    coords: Tensor
    geometry: Geometry


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs a network over tiles."""

    net: nn.Module
    way: Way

    def device(self, x: SparseTensor) -> torch.device:
        """Where the network is: the device of its parameters, else that of x."""
        first = next(self.net.parameters(), None)
        return x.device if first is None else first.device

    def call(self, x: SparseTensor) -> SparseTensor:
        """The network's result on a part of the scene, which moves to its device."""
        y = self.net(x)
        if not isinstance(y, SparseTensor):
            raise DtypeError(f"pm.tiled takes networks that return a SparseTensor, found {type(y).__name__}")
        return y

    def pieces(self, cut: Cut, tiles: Sequence[tuple[int, ...]], around: Box) -> Iterator[TileResult]:
        """The results of tiles, one after the other; without tiles, that of no voxels."""
        if not tiles:
            yield self._piece(cut, (0,) * (1 + len(around)), cut.order[:0], 0)
        for tile in tiles:
            yield self._piece(cut, tile, *cut.rows(tile, around))

    def _piece(self, cut: Cut, tile: tuple[int, ...], rows: Tensor, own: int) -> TileResult:
        x, home = cut.x, cut.x.device
        device = self.device(x)
        given = placed(x.feats[rows].to(device), x.coords[rows].to(device), x.geometry)
        y = self.call(given)
        if y.geometry is given.geometry:
            return TileResult(y.feats[:own].to(home), rows[:own], y.coords[:0], y.geometry)
        scale = [Fraction(a) / Fraction(b) for a, b in zip(y.stride, given.stride, strict=True)]
        kept = (cut.grid.tiles(y.coords, scale) == torch.tensor(tile, device=y.device)).all(1)
        return TileResult(y.feats[kept].to(home), None, y.coords[kept].to(home), y.geometry)


def joined(x: SparseTensor, pieces: Iterable[TileResult]) -> SparseTensor:
    """The results of all tiles as one tensor: in x's rows, or at coordinates of their own, in (batch, Morton) order."""
    out, parts = None, []
    for piece in pieces:
        if piece.rows is None:
            parts.append(piece)
            continue
        if out is None:
            out = piece.feats.new_zeros(len(x), piece.feats.shape[1])
        out[piece.rows] = piece.feats
    if out is not None:
        return x.replace(out)
    coords = torch.cat([piece.coords for piece in parts])
    bounds = Bounds.of(coords)
    order = morton_argsort(coords, bounds)
    site: GridSpec = replace(parts[0].geometry.site, bounds=bounds)
    feats = torch.cat([piece.feats for piece in parts])[order]
    return SparseTensor(feats, Geometry(coords[order], site))
