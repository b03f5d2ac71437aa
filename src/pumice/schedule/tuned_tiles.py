"""Tuned tiles in a file per user, safe for concurrent processes (see record_store).

The key of a tile is the device, the statement, the dtypes, the sizes rounded down to powers of sqrt(2), and the
precision of float32 products.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path

from pumice.env import settings
from pumice.schedule.record_store import Entry, RecordType, Store, date_of
from pumice.schedule.tile import Tile

VERSION = 2  # of the file format; part of the file name


@dataclass(frozen=True)
class Key:
    """Key of a tuned tile. sizes: 2 * log2 of each extent, rounded down."""

    device: str
    statement: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    precision: str = ""


@dataclass(frozen=True)
class Tuned:
    """A tuned tile, the date of its tuning, and the seconds of a call, if known."""

    tile: Tile
    date: datetime
    seconds: float | None = None


class Ledger(Store[Key, Tuned]):
    """The tuned tiles of a file; see Store."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, TILES)

    def get(self, key: Key) -> Tile | None:
        """The tile tuned for this key, or None. Only the first call reads the file."""
        found = self.find(key)
        return None if found is None else found.tile

    def look(self, key: Key) -> Tile | None:
        """As `get`, but a miss reads the file again if it has changed."""
        found = self.seek(key)
        return None if found is None else found.tile

    def put(self, key: Key, tile: Tile, seconds: float | None = None) -> None:
        """Store a tile and the seconds of a call; records written by other processes are not lost."""
        self.keep(key, Tuned(tile, datetime.now(timezone.utc), seconds))


@lru_cache(maxsize=1)
def ledger() -> Ledger:
    """The user's tuned tiles."""
    return Ledger(settings().cache / f"tiles-{VERSION}.json")


def _entry(key: Key, tuned: Tuned) -> Entry:
    date = tuned.date.isoformat(timespec="microseconds")
    return {"key": asdict(key), "tile": asdict(tuned.tile), "date": date, "seconds": tuned.seconds}


def _key(entry: Entry) -> Key:
    key = entry["key"]
    dtypes, sizes = tuple(map(str, key["dtypes"])), tuple(map(int, key["sizes"]))
    return Key(str(key["device"]), str(key["statement"]), dtypes, sizes, str(key["precision"]))


def _tuned(entry: Entry) -> Tuned:
    """The value of an entry; unreadable if the tile has an unknown field, which must not be ignored."""
    seconds = entry.get("seconds")
    return Tuned(Tile(**entry["tile"]), date_of(entry["date"]), None if seconds is None else float(seconds))


TILES: RecordType[Key, Tuned] = RecordType("tiles", VERSION, _entry, _key, _tuned, lambda tuned: tuned.date)
"""Format of the file of tuned tiles."""
