"""The structures that find neighbours, one registry, and which of them a cloud gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pumice.coords.bricks import BrickLookup
from pumice.coords.buffer import CoordBuffer
from pumice.coords.hash_table import Bitmap, DenseGrid, HashTable
from pumice.coords.lookup import Lookup
from pumice.coords.map_schedule import MapSchedule, costs, mirrors
from pumice.coords.sorted_keys import SortedKeys
from pumice.errors import OptionError


class Structure(Protocol):
    """How a Lookup is made of a cloud."""

    def __call__(self, cloud: CoordBuffer, schedule: MapSchedule) -> Lookup: ...

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        """Why it cannot be, or None."""
        ...


STRUCTURES: Mapping[str, Structure] = {
    "sorted": SortedKeys,
    "hash": HashTable,
    "grid": DenseGrid,
    "bitmap": Bitmap,
    "bricks": BrickLookup,
}


def lookup_of(cloud: CoordBuffer, schedule: MapSchedule | None = None) -> Lookup:
    """The structure that the schedule names (the default's without one), filled with the cloud.

    Duplicates and coordinates outside the cloud's box are reported in its status. Raises OptionError where the
    structure cannot be had, with the reason.
    """
    schedule = schedule or default(cloud)
    reason = STRUCTURES[schedule.structure].refusal(cloud, schedule)
    if reason is not None:
        raise OptionError(f"structure={schedule.structure!r} cannot be had: {reason}")
    return STRUCTURES[schedule.structure](cloud, schedule)


def default(cloud: CoordBuffer) -> MapSchedule:
    """The structure of the least cost among those that can be had; sorted keys where kernels do not run."""
    reckoned = costs(cloud.capacity, cloud.bounds.cells)
    for name in sorted(reckoned, key=reckoned.__getitem__):
        schedule = MapSchedule(name, mirrored=name == "hash" and mirrors(cloud.capacity))
        if STRUCTURES[name].refusal(cloud, schedule) is None:
            return schedule
    return MapSchedule("sorted")


def explain(cloud: CoordBuffer) -> str:
    """What each structure is reckoned to cost for a window of 27 taps on these coordinates, and which is taken."""
    chosen = default(cloud).structure
    reckoned = costs(cloud.capacity, cloud.bounds.cells)
    lines = [f"{cloud.capacity} rows in a box of {cloud.bounds.cells} cells, {cloud.bounds.batch} batch items"]
    for name, structure in STRUCTURES.items():
        reason = structure.refusal(cloud, MapSchedule(name))
        cost = f"{1e3 * reckoned[name]:.3f} ms reckoned" if name in reckoned else "without kernels"
        lines.append(f"{'->' if name == chosen else '  '} {name:7} {cost if reason is None else reason}")
    return "\n".join(lines)
