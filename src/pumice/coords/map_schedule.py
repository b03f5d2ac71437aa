"""Schedules of the neighbour search, and the cost model that chooses one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pumice.errors import OptionError

STRUCTURES = ("sorted", "hash", "grid", "bitmap", "bricks")


@dataclass(frozen=True)
class MapSchedule:
    """How neighbours are searched.

    structure: "hash" (open addressing), "grid" (an int32 per cell of the box), "bitmap" (a bit per cell with popcount
        ranks), "bricks" (two-level bitmap in Morton order), "sorted" (bisection of sorted keys; no kernel, any device).
    load: maximum load factor of a hash table. cells: maximum cells of a grid; 16 times as many for a bitmap.
    mirrored: query half of a submanifold map's offsets and write each hit twice.
    fused: generate, clip and look up output candidates in one kernel, not in stages through memory.
    block: cells that one program queries, a power of two; None: the structure's default. warps: warps per program.

    Raises OptionError for values out of range."""

    structure: str = "hash"
    load: float = 0.25
    cells: int = 1 << 27
    mirrored: bool = False
    fused: bool = True
    block: int | None = None
    warps: int = 1

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(f"structure={self.structure!r} is unknown; there are {', '.join(STRUCTURES)}")
        if not 0 < self.load <= 0.9:
            raise OptionError(f"load must be above 0 and at most 0.9, found {self.load}")
        if self.cells < 1:
            raise OptionError(f"cells must be at least 1, found {self.cells}")
        for name, value, least in (("block", self.block, 32), ("warps", self.warps, 1)):
            if value is not None and (value < least or value & (value - 1)):
                raise OptionError(f"{name} must be a power of two of at least {least}, found {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> MapSchedule:
        return MapSchedule(**json.loads(text))


def mirrors(rows: int) -> bool:
    """True if a hash table is faster with half the probes of a submanifold map: while the scattered writes stay in the
    cache (measured on an H200 with 18 thousand to a million rows)."""
    return 50_000 <= rows <= 500_000


@dataclass(frozen=True)
class Rates:
    """Parameters of the cost model: stream, bytes cleared per second; for each structure (fixed seconds, seconds per
    cell queried). Fitted to an H200, coordinates in random order."""

    stream: float = 4.0e12
    hash: tuple[float, float] = (14e-6, 11.5e-12)
    grid: tuple[float, float] = (8e-6, 5.0e-12)
    bitmap: tuple[float, float] = (17e-6, 5.5e-12)
    bricks: tuple[float, float] = (35e-6, 12e-12)


def costs(rows: int, cells: int, volume: int = 27, rates: Rates | None = None) -> dict[str, float]:
    """Estimated seconds for a submanifold map of `rows` rows in a box of `cells` cells, by structure."""
    rates = rates or Rates()
    passes = {
        "hash": 40.0 * rows,
        "grid": 4.0 * cells,
        "bitmap": 6.5 * cells / 8,
        "bricks": cells / 512 / 8 * 5 + 64 * rows,
    }
    found = {}
    for name, streamed in passes.items():
        fixed, per_cell = getattr(rates, name)
        found[name] = fixed + streamed / rates.stream + per_cell * rows * volume
    return found
