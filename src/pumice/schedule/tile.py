"""How big a tile of results a program owns, and how deep its loads run ahead. Values: no tensors, no launches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from pumice.errors import OptionError
from pumice.language.roles import Roles


@dataclass(frozen=True)
class Tile:
    """The tile of a kernel.

    rows, columns: of the results of one program; reduced: points of the reduction per turn of a matrix product.
    lanes: rows of the tile that share one segment (only where segments are the rows).
    warps: of 32 threads (64 on CDNA); stages: turns whose loads are under way at once.
    """

    rows: int
    columns: int
    reduced: int = 1
    lanes: int = 1
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1 or (name != "stages" and value & (value - 1)):
                raise OptionError(f"{name} of a tile is a power of two, at least 1; found {value}")
        if self.rows % self.lanes:
            raise OptionError(f"{self.lanes} lanes do not divide {self.rows} rows")
        if self.rows * self.columns > 1 << 20:
            raise OptionError(f"a tile has at most 1048576 results, found {self.rows} x {self.columns}")

    def __str__(self) -> str:
        lanes = f"/{self.lanes}" if self.lanes > 1 else ""
        return f"{self.rows}{lanes}x{self.columns}x{self.reduced} w{self.warps} s{self.stages}"


def power_above(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()


def default(roles: Roles, extents: Mapping[str, int], mean_segment: float = 1.0, bits: int = 16) -> Tile:
    """A good tile before any tuning.

    mean_segment: entries of a segment on average; bits: of the values. The figures for matrix products are those of
    the convolution prototype on an H200 (C = 32, 64, 128, 256); the others keep a program at 2 to 8 KiB in registers.
    """
    rows, columns, reduced = (_volume(names, extents) for names in (roles.rows, roles.columns, roles.reduced))
    if roles.product:
        return _product_tile(rows, columns, reduced, bits)
    if roles.folds:
        return Tile(_below(rows, 16), max(16, _below(columns, 512)), warps=4)
    wide = _below(columns, 128)
    if roles.segment and roles.rows == (roles.segment.index,):
        lanes = min(16, power_above(max(1, int(mean_segment / 8))))
        height = max(lanes, min(16, 2048 // wide))
        return Tile(height, wide, lanes=lanes, warps=_warps(height * wide, 512))
    height = _below(rows, max(1, 2048 // wide))
    return Tile(height, wide, warps=_warps(height * wide, 512))


def candidates(roles: Roles, extents: Mapping[str, int], mean_segment: float = 1.0, bits: int = 16) -> Iterator[Tile]:
    """Tiles worth timing, the default first, none twice."""
    seen: set[Tile] = set()
    for tile in _candidates(roles, extents, default(roles, extents, mean_segment, bits)):
        if tile not in seen:
            seen.add(tile)
            yield tile


def _candidates(roles: Roles, extents: Mapping[str, int], first: Tile) -> Iterator[Tile]:
    yield first
    if not roles.product:
        for scale in (0.5, 2, 4):
            for warps in (1, 2, 4, 8):
                rows = max(first.lanes, int(first.rows * scale)) if roles.rows else 1
                yield replace(first, rows=power_above(rows), warps=warps)
        if first.lanes >= 1 and roles.segment and not roles.folds:
            for lanes in (1, 2, 4, 8, 16, 32):
                for warps in (1, 2, 4):
                    yield replace(first, rows=max(first.rows, lanes), lanes=lanes, warps=warps)
        return
    rows, columns, reduced = (_volume(names, extents) for names in (roles.rows, roles.columns, roles.reduced))
    for height in {_tile_side(rows, cap) for cap in (32, 64, 128, 256)}:
        for width in {_tile_side(columns, cap) for cap in (32, 64, 128, 256)}:
            for depth in {_tile_side(reduced, cap) for cap in (32, 64)}:
                if height * width > 128 * 256:
                    continue
                for warps, stages in ((4, 3), (4, 5), (8, 3), (8, 4)):
                    if height * width >= 64 * 32 * warps / 4:
                        yield Tile(height, width, depth, warps=warps, stages=stages)


def _product_tile(rows: int, columns: int, reduced: int, bits: int) -> Tile:
    width = _tile_side(columns, 256 if rows < 64 else 128)
    height = _tile_side(rows, 128)
    depth = _tile_side(reduced, 64 if bits <= 16 else 32)
    return Tile(height, width, depth, warps=8 if height * width >= 128 * 128 else 4, stages=3 if width > 32 else 4)


def _tile_side(extent: int, most: int) -> int:
    """A power of two from 16 to `most`."""
    return max(16, min(most, power_above(extent)))


def _below(extent: int, most: int) -> int:
    return max(1, min(most, power_above(extent)))


def _warps(entries: int, each: int) -> int:
    return max(1, min(8, power_above(entries // each)))


def _volume(names: tuple[str, ...], extents: Mapping[str, int]) -> int:
    return math.prod(extents[name] for name in names if name in extents)
