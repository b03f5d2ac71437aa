"""Reads the results file: rows, the rows still current, and ratios to peers.

A row supersedes older ones of the same suite, case, metric, peer, clock, device, dtype and peer source. The last two
belong to the key since some cases do not name their dtype, and spconv is both recorded and measured in the same run. Of
rows of one date, the later line is the newer one.

A ratio is peer_value / value of one row, and so of one run: times of different runs are never divided.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.families import BOUND, Family, Place
from benchmarks.harness.rows import ANY, Row
from pumice.errors import FileError, OptionError

__all__ = ["Compared", "Mean", "chosen", "compared", "current", "geomean", "mean_of", "reached", "read", "told"]

Item = TypeVar("Item")
Key = TypeVar("Key")
_KEY = ("suite", "case", "metric", "peer", "clock", "device", "dtype", "peer_source")
_KINDS: Mapping[str, tuple[type, ...]] = {"str": (str,), "float": (int, float), "dict[str, str]": (dict,)}
_FIELDS = {field.name: _KINDS[str(field.type)] for field in fields(Row)}
_NEEDED = {field.name for field in fields(Row) if field.default is MISSING}


def read(path: Path) -> list[Row]:
    """The rows of a results file in order; blank lines are skipped.

    Raises FileError, naming the file and the line, if the file cannot be read or a line is not a row.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as reason:
        raise FileError(f"{path}: expected a ledger (one JSON object a line), found: {reason}") from None
    return [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _row(line: str, where: str) -> Row:
    try:
        found = json.loads(line)
    except ValueError as reason:
        raise FileError(f"{where}: expected a JSON object, found: {reason}") from None
    if problem := _problem(found):
        raise FileError(f"{where}: {problem}")
    return Row(**found)


def _problem(found: Any) -> str:
    """The error in a parsed line, or "" if it is a row."""
    if not isinstance(found, dict):
        return f"expected a JSON object, found {type(found).__name__}"
    lost, strange = sorted(_NEEDED - found.keys()), sorted(found.keys() - _FIELDS.keys())
    if lost or strange:
        told = (f"{what} {', '.join(names)}" for what, names in (("lacks", lost), ("has besides", strange)) if names)
        return f"expected the fields of a row, found one that {' and '.join(told)}"
    for name, value in found.items():
        right = isinstance(value, _FIELDS[name]) and not isinstance(value, bool)
        if not right or (isinstance(value, float) and not math.isfinite(value)):
            kinds = "a finite number" if float in _FIELDS[name] else _FIELDS[name][0].__name__
            return f"expected {kinds} as {name}, found {value!r}"
    return _wrong_date(found["date"])


def _wrong_date(text: str) -> str:
    try:
        date.fromisoformat(text)
    except ValueError:
        return f"expected a date as YYYY-MM-DD, found {text!r}"
    return ""


def current(rows: Iterable[Row]) -> list[Row]:
    """The rows not superseded by newer ones, in the order of the results file."""
    kept: dict[tuple[str, ...], tuple[int, Row]] = {}
    for place, row in enumerate(rows):
        key = tuple(getattr(row, name) for name in _KEY)
        if key not in kept or kept[key][1].date <= row.date:
            kept[key] = place, row
    return [row for _, row in sorted(kept.values(), key=lambda found: found[0])]


def chosen(rows: Sequence[Row], device: str = "", commits: Collection[str] = ()) -> list[Row]:
    """The rows whose device name contains `device` (in any case) and whose commit starts with one of `commits`.

    Rows of counted values (device ANY) match any device. Raises OptionError if no row matches the device or a commit;
    the message lists those present.
    """
    devices = sorted({row.device for row in rows} - {ANY})
    if rows and device and not any(device.lower() in name.lower() for name in devices):
        raise OptionError(f"no row is of a device like {device!r}; there are {', '.join(devices)}")
    known = commits_of(rows)
    for commit in commits if rows else ():
        if not any(name.startswith(commit) for name in known):
            raise OptionError(f"no row is of a commit like {commit!r}; there are {', '.join(known)}")
    beginnings = tuple(commits) or ("",)
    return [
        row
        for row in rows
        if (row.device == ANY or device.lower() in row.device.lower()) and row.commit.startswith(beginnings)
    ]


def geomean(values: Iterable[float]) -> float:
    """The geometric mean. Raises OptionError if there are no values, or one is not positive."""
    found = list(values)
    if not found or min(found) <= 0:
        raise OptionError(f"a geometric mean is of numbers above 0, found {found or 'none'}")
    # Rounding must not move the mean out of the range of the values.
    return min(max(math.exp(sum(map(math.log, found)) / len(found)), min(found)), max(found))


@dataclass(frozen=True)
class Compared:
    """The best of our ways in a cell against the best of its rivals. row: holds both values."""

    place: Place
    way: str
    row: Row

    @property
    def ratio(self) -> float:
        """The speedup over the peer."""
        return self.row.ratio


def compared(rows: Iterable[Row], family: Family, against: str, ways: Collection[str] = ()) -> list[Compared]:
    """Compare each cell of a family with rivals, in the order of the rows, all of one device and clock.

    against: a key of family.rivals. ways: if given, only these of our ways count. A way's ratio is the least over all
    rivals; the cell's ratio is the greatest over its ways.
    """
    worst: dict[Place, Compared] = {}
    for row in rows:
        place = family.place(row)
        if place is None or (ways and place.way not in ways) or not family.rivals[against].holds(row):
            continue
        found = Compared(place.without_way(), place.way, row)
        if row.value > 0 and row.peer_value > 0 and (place not in worst or found.ratio < worst[place].ratio):
            worst[place] = found
    return _greatest(worst.values())


def reached(rows: Iterable[Row], family: Family) -> list[Compared]:
    """Compare each cell of a family with the largest of its lower bounds; at a ratio of 1 the bound is reached."""
    found = []
    for row in rows:
        place = family.place(row)
        if place and family.bounds and row.peer_source == BOUND and row.peer in family.bounds and row.value > 0:
            found.append(Compared(place.without_way(), place.way, row))
    return _greatest(found)


def _greatest(found: Iterable[Compared]) -> list[Compared]:
    """The comparison with the greatest ratio of each cell."""
    best: dict[Place, Compared] = {}
    for one in found:
        if one.place not in best or one.ratio > best[one.place].ratio:
            best[one.place] = one
    return list(best.values())


@dataclass(frozen=True)
class Mean:
    """Ratios of several cells, summarized. plain: the geometric mean of our untuned way, if it covers all cells."""

    cells: int
    geomean: float
    least: Compared
    most: Compared
    plain: float | None = None


def mean_of(found: Sequence[Compared], plain: Sequence[Compared] = ()) -> Mean:
    """The summary of ratios. Raises OptionError if there are none."""
    whole = geomean(one.ratio for one in found)
    least, most = (pick(found, key=lambda one: one.ratio) for pick in (min, max))
    return Mean(len(found), whole, least, most, geomean(p.ratio for p in plain) if len(plain) == len(found) else None)


def grouped(items: Iterable[Item], key: Callable[[Item], Key | None]) -> dict[Key, list[Item]]:
    """Items by key, in the order of the keys' first appearance; items whose key is None are dropped."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        if (held := key(item)) is not None:
            found.setdefault(held, []).append(item)
    return found


def days(rows: Iterable[Row]) -> str:
    """The date of the rows, or their first and last date."""
    dates = sorted({row.date for row in rows})
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""


def commits_of(rows: Iterable[Row]) -> list[str]:
    """The distinct commits of rows, in order of appearance."""
    return list(dict.fromkeys(row.commit for row in rows))


def told(rows: Iterable[Row]) -> str:
    """Device, clocks, dates and commits of rows in one line: the caption of a figure."""
    found = list(rows)
    devices = dict.fromkeys("counted, the same on any device" if row.device == ANY else row.device for row in found)
    clocks = dict.fromkeys(row.clock for row in found)
    commits = commits_of(found)
    more = f" and {len(commits) - 3} more" if len(commits) > 3 else ""
    name = "commit" if len(commits) == 1 else "commits"
    last = f"{name} {', '.join(commits[-3:])}{more}"
    return " · ".join((" and ".join(devices), f"clock {', '.join(clocks)}", days(found), last))
