"""How kernel maps are found: a value that can be chosen, printed, kept and overridden."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pumice.errors import OptionError

STRUCTURES = ("sorted", "hash", "grid", "bitmap", "bricks")


@dataclass(frozen=True)
class MapSchedule:
    """How neighbours are looked up.

    structure: "hash" (open addressing), "grid" (an int32 for each cell of the box), "bitmap" (a bit for each cell, and
        popcount ranks), "bricks" (sorted bricks with occupancy bits and popcount ranks), "sorted" (bisection of sorted
        keys; no kernel, any device).
    load: slots of a hash table that are taken, at most. cells: of a grid, at most; of a bitmap 16 times as many.
    mirrored: whether half of the taps of a submanifold map are asked for, and each find is written twice.
    fused: whether candidates, bounds and lookups are one kernel, or one after the other through memory.
    block: cells that one program of a lookup asks for, a power of two, by default the structure's own; warps: of 32
        threads, that it runs on.
    """

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
            raise OptionError(f"load is above 0 and at most 0.9, found {self.load}")
        if self.cells < 1:
            raise OptionError(f"cells is at least 1, found {self.cells}")
        for name, value, least in (("block", self.block, 32), ("warps", self.warps, 1)):
            if value is not None and (value < least or value & (value - 1)):
                raise OptionError(f"{name} is a power of two of at least {least}, found {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> MapSchedule:
        return MapSchedule(**json.loads(text))


def mirrors(rows: int) -> bool:
    """Whether a submanifold map from a hash table is faster by its own symmetry: with half of the probes, while the
    writes that are scattered still lie in the cache (measured on an H200 with 18 thousand to a million rows)."""
    return 50_000 <= rows <= 500_000


@dataclass(frozen=True)
class Rates:
    """What a device is reckoned with: bytes cleared a second, and for each structure seconds in any case and seconds
    of a cell that is asked for. Fitted to an H200, coordinates in random order."""

    stream: float = 4.0e12
    hash: tuple[float, float] = (14e-6, 11.5e-12)
    grid: tuple[float, float] = (8e-6, 5.0e-12)
    bitmap: tuple[float, float] = (17e-6, 5.5e-12)
    bricks: tuple[float, float] = (35e-6, 12e-12)


def costs(rows: int, cells: int, volume: int = 27, rates: Rates | None = None) -> dict[str, float]:
    """Seconds that a submanifold map of `rows` rows in a box of `cells` cells is reckoned to take, by structure."""
    rates = rates or Rates()
    passes = {
        "hash": 40.0 * rows,
        "grid": 4.0 * cells,
        "bitmap": 6.5 * cells / 8,
        "bricks": cells / 512 / 8 * 5 + 64 * rows,
    }
    found = {}
    for name, streamed in passes.items():
        fixed, asked = getattr(rates, name)
        found[name] = fixed + streamed / rates.stream + asked * rows * volume
    return found
