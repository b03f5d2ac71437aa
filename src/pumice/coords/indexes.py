"""Registry of neighbour search structures, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pumice.coords.bricks import BrickLookup
from pumice.coords.buffer import CoordBuffer
from pumice.coords.hash_table import Bitmap, DenseGrid, HashTable
from pumice.coords.lookup import Lookup, MapSchedule, costs, mirrors
from pumice.coords.sorted_keys import SortedKeys
from pumice.errors import OptionError


class Structure(Protocol):
    """Factory of a Lookup over a buffer."""

    def __call__(self, cloud: CoordBuffer, schedule: MapSchedule) -> Lookup: ...

    @staticmethod
    def refusal(cloud: CoordBuffer, schedule: MapSchedule) -> str | None:
        """Reason why the structure is not available, or None."""
        ...


STRUCTURES: Mapping[str, Structure] = {
    "sorted": SortedKeys,
    "hash": HashTable,
    "grid": DenseGrid,
    "bitmap": Bitmap,
    "bricks": BrickLookup,
}


def lookup_of(cloud: CoordBuffer, schedule: MapSchedule | None = None) -> Lookup:
    """The structure named by the schedule (None: the cost model's choice), built over the buffer.

    Duplicates and coordinates out of bounds are reported in the buffer's status. Raises OptionError if the structure is
    not available, with the reason."""
    schedule = schedule or default(cloud)
    reason = STRUCTURES[schedule.structure].refusal(cloud, schedule)
    if reason is not None:
        raise OptionError(f"structure={schedule.structure!r} is not available: {reason}")
    return STRUCTURES[schedule.structure](cloud, schedule)


def default(cloud: CoordBuffer) -> MapSchedule:
    """The available structure of the least estimated cost; sorted keys where kernels do not run."""
    estimates = costs(cloud.capacity, cloud.bounds.cells)
    for name in sorted(estimates, key=estimates.__getitem__):
        schedule = MapSchedule(name, mirrored=name == "hash" and mirrors(cloud.capacity))
        if STRUCTURES[name].refusal(cloud, schedule) is None:
            return schedule
    return MapSchedule("sorted")


def explain(cloud: CoordBuffer) -> str:
    """Estimated cost of each structure for 27 kernel offsets on these coordinates, and the structure chosen."""
    chosen = default(cloud).structure
    estimates = costs(cloud.capacity, cloud.bounds.cells)
    lines = [f"{cloud.capacity} rows in a box of {cloud.bounds.cells} cells, {cloud.bounds.batch} batch items"]
    for name, structure in STRUCTURES.items():
        reason = structure.refusal(cloud, MapSchedule(name))
        cost = f"{1e3 * estimates[name]:.3f} ms estimated" if name in estimates else "without kernels"
        lines.append(f"{'->' if name == chosen else '  '} {name:7} {cost if reason is None else reason}")
    return "\n".join(lines)
