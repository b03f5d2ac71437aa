"""How kernel maps are found: a value that can be chosen, printed, kept and overridden."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pumice.errors import OptionError

STRUCTURES = ("sorted", "hash", "grid", "bricks")


@dataclass(frozen=True)
class MapSchedule:
    """How neighbours are looked up.

    structure: "hash" (open addressing), "grid" (an int32 for each cell of the box), "bricks" (sorted bricks with
        occupancy bits and popcount ranks), "sorted" (bisection of sorted keys; no kernel, any device).
    load: slots of a hash table that are taken, at most. cells: of a grid, at most.
    mirrored: whether half of the taps of a submanifold map are asked for, and each find is written twice.
    fused: whether candidates, bounds and lookups are one kernel, or one after the other through memory.
    block: cells that one program of a lookup asks for, a power of two; warps: of 32 threads, that it runs on.
    """

    structure: str = "hash"
    load: float = 0.5
    cells: int = 1 << 27
    mirrored: bool = False
    fused: bool = True
    block: int = 512
    warps: int = 4

    def __post_init__(self) -> None:
        if self.structure not in STRUCTURES:
            raise OptionError(f"structure={self.structure!r} is unknown; there are {', '.join(STRUCTURES)}")
        if not 0 < self.load <= 0.9:
            raise OptionError(f"load is above 0 and at most 0.9, found {self.load}")
        if self.cells < 1:
            raise OptionError(f"cells is at least 1, found {self.cells}")
        for name, value, least in (("block", self.block, 32), ("warps", self.warps, 1)):
            if value < least or value & (value - 1):
                raise OptionError(f"{name} is a power of two of at least {least}, found {value}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> MapSchedule:
        return MapSchedule(**json.loads(text))


@dataclass(frozen=True)
class Rates:
    """What a device is reckoned with: seconds of a kernel, bytes a second written in order, sectors a second asked for.

    An H200's, by reckoning: no figure of them was measured yet.
    """

    kernel: float = 2e-6
    stream: float = 3.5e12
    sectors: float = 1.2e11
    cached: int = 50 << 20


def costs(rows: int, cells: int, volume: int = 27, rates: Rates | None = None) -> dict[str, float]:
    """Seconds that a submanifold map of `rows` rows in a box of `cells` cells is reckoned to take, by structure.

    Each is kernels * time of a kernel + bytes cleared / rate + 32-byte sectors asked for / rate. Taps along the last
    axis share sectors: a tap asks for half of one on average, with chance neighbours in a hash table for 0.6.
    """
    rates = rates or Rates()
    slots = 8 * 2 * rows / 0.75
    found = {
        "grid": (3, 4 * cells, rows * (1 + 0.5 * volume), 4 * cells),
        "hash": (3, slots, rows * (1.5 + 0.6 * volume), slots),
        "bricks": (9, cells / 8 / 16 + 64 * rows, rows * (6 + 1.0 * volume), 80 * rows),
    }
    return {name: _seconds(rates, *parts) for name, parts in found.items()}


def _seconds(rates: Rates, kernels: int, cleared: float, sectors: float, held: float) -> float:
    # What the cache does not hold is fetched from memory, at a third of the rate.
    slow = 3.0 if held > rates.cached else 1.0
    return kernels * rates.kernel + cleared / rates.stream + slow * sectors / rates.sectors
