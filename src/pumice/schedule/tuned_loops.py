"""Tuned schedules of loop nests in a file per user (see record_store).

The key is the processor, the statement, the dtype, and the sizes rounded down to powers of sqrt(2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache

from pumice.env import settings
from pumice.schedule.loops import LoopSchedule
from pumice.schedule.record_store import Entry, RecordType, Store, date_of

VERSION = 1  # of the file format; part of the file name


@dataclass(frozen=True)
class LoopKey:
    """Key of a tuned schedule. sizes: half_octaves of the extents."""

    device: str
    statement: str
    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TunedLoops:
    """A tuned schedule, the rule's if it is empty, its seconds and the rule's, and the date."""

    schedule: LoopSchedule
    seconds: float
    rule: float
    date: datetime

    @staticmethod
    def now(schedule: LoopSchedule, seconds: float, rule: float) -> TunedLoops:
        return TunedLoops(schedule, seconds, rule, datetime.now(timezone.utc))


def half_octaves(extent: int) -> int:
    """2 * log2 of an extent, rounded down."""
    return (extent * extent).bit_length() - 1


Records = Store[LoopKey, TunedLoops]


@lru_cache(maxsize=1)
def loop_records() -> Records:
    """The user's tuned schedules."""
    return Store(settings().cache / f"loops-{VERSION}.json", LOOPS)


def _entry(key: LoopKey, tuned: TunedLoops) -> Entry:
    date = tuned.date.isoformat(timespec="microseconds")
    times = {"seconds": tuned.seconds, "rule": tuned.rule, "date": date}
    return {"key": asdict(key), "schedule": str(tuned.schedule), **times}


def _key(entry: Entry) -> LoopKey:
    device, statement, dtype = (str(entry["key"][name]) for name in ("device", "statement", "dtype"))
    return LoopKey(device, statement, dtype, tuple(map(int, entry["key"]["sizes"])))


def _tuned(entry: Entry) -> TunedLoops:
    schedule = LoopSchedule.parse(entry["schedule"])
    return TunedLoops(schedule, float(entry["seconds"]), float(entry["rule"]), date_of(entry["date"]))


LOOPS: RecordType[LoopKey, TunedLoops] = RecordType("loops", VERSION, _entry, _key, _tuned, lambda tuned: tuned.date)
"""Format of the file of tuned schedules."""
