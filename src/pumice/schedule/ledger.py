"""Tuned tiles that last: a file of them per user, safe with many processes.

A tile is kept under what it was tuned for: the device, the statement, the dtypes, the sizes to half a power of
two, and how float32 is multiplied.

The file is one JSON document with a line for each tile. A change reads it, and replaces it by a whole new one, under a
lock of filelock (which torch brings). Lines added with O_APPEND would need no lock on a local disk, but two machines
that share a network file system write such lines over each other, while locks hold between its clients, too. The kernel
takes a dead process's lock from it, so none is stale; readers take none and never wait; and who does not get it in time
keeps its tile for the next change. Rename is atomic: nobody sees a half-written file. Where a file system has no locks,
filelock makes do with a file that exists: what a dead process leaves there holds others up once, for WAIT seconds.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from filelock import FileLock

from pumice.env import settings
from pumice.errors import FileError
from pumice.schedule.tile import Tile

VERSION = 2
"""Of the file, and in its name; another version's is left alone and not read."""
WAIT = 10.0
"""Seconds that a change waits for those of others, which take milliseconds; after a failure none waits any more."""

Entry: TypeAlias = Any
"""A tile with its key as the file has them. One that cannot be read here (a newer version's) stays in the file."""
Stamp: TypeAlias = tuple[int, int, int]
"""What tells whether a file was replaced: its inode, size and time."""


@dataclass(frozen=True)
class Key:
    """What a tile was tuned for. sizes: twice the binary logarithms, rounded down."""

    device: str
    statement: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    precision: str = ""


@dataclass(frozen=True)
class Tuned:
    """A tuned tile, when that was, and the seconds of a call, where they are known."""

    tile: Tile
    date: datetime
    seconds: float | None = None


class Ledger:
    """The tuned tiles of a file, read when first asked for; what is put is on disk when `put` returns.

    Where the file cannot be read or written, `get`, `look` and `put` say so once, as a RuntimeWarning, and tiles that
    are tuned serve this process alone: a read-only home on a cluster ends no computation. All else raises FileError.

    generation: how often tiles have changed here; what was made ready before is made anew. What others write changes it
    where this process looks for it: in `look`, before a tile is timed, and with each change of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._tiles: dict[Key, Tuned] | None = None
        self._unsaved: dict[Key, Tuned] = {}
        self._stamp: Stamp | None = None
        self._failed = False

    def get(self, key: Key) -> Tile | None:
        """The tile that was tuned for this, or None. The file is read once."""
        found = self._known().get(key)
        return None if found is None else found.tile

    def look(self, key: Key) -> Tile | None:
        """The same; where there is none, the file is read again if others have written to it."""
        before = self._known()
        if key not in before:
            self._refresh()
            if self._tiles != before:
                self.generation += 1
        return self.get(key)

    def put(self, key: Key, tile: Tile, seconds: float | None = None) -> None:
        """Keep a tile, and the seconds of a call with it. What others have written meanwhile stays."""
        self._unsaved[key] = Tuned(tile, datetime.now(timezone.utc), seconds)
        try:
            self._save()
        except FileError as problem:
            self._say(problem)
        self._renew()

    def all(self) -> dict[Key, Tuned]:
        """Every tile by its key. Raises FileError where the file cannot be read, or is no ledger of this version."""
        return {**_readable(_read(self.path)[0] or []), **self._unsaved}

    def export(self) -> str:
        """Every tile as one JSON document with its version, for `merge`. Raises FileError as `all` does."""
        return _document([_entry(key, tuned) for key, tuned in self.all().items()])

    def merge(self, source: Path | str) -> int:
        """Take what is new, or newer than here, from another ledger's file or the text of its export; how many tiles.

        Entries that this version cannot read are left out. Raises FileError where the source is no ledger of this
        version, or where either file cannot be read or this one not written.
        """
        theirs = _readable(_given(source))
        newer: dict[Key, Tuned] = {}

        def merged(entries: list[Entry]) -> list[Entry]:
            ours = _readable(entries)
            newer.update({k: t for k, t in theirs.items() if k not in ours or t.date > ours[k].date})
            return _with(entries, newer)

        self._change(merged)
        self._renew()
        return len(newer)

    def clear(self) -> int:
        """Remove all tiles; how many there were. Raises FileError where the file is no ledger or cannot be written."""
        removed = len(self._unsaved)

        def cleared(entries: list[Entry]) -> list[Entry]:
            nonlocal removed
            removed += len(entries)
            return []

        if self.path.exists():
            self._change(cleared)
        self._unsaved.clear()
        self._renew()
        return removed

    def _known(self) -> dict[Key, Tuned]:
        if self._tiles is None:
            self._refresh()
        return self._tiles or {}

    def _renew(self) -> None:
        """Only once the new tiles are here may anything be made ready with them."""
        self._refresh()
        self.generation += 1

    def _save(self) -> None:
        """Write what is not on disk yet. Raises FileError."""
        unsaved = dict(self._unsaved)
        self._change(lambda entries: _with(entries, unsaved))
        for key, tuned in unsaved.items():
            if self._unsaved.get(key) is tuned:
                del self._unsaved[key]

    def _change(self, change: Callable[[list[Entry]], list[Entry]]) -> None:
        """Replace the entries of the file while no other process does. Raises FileError."""
        with _named(self.path, "written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0 if self._failed else WAIT, poll_interval=0.01):
                # A network file system remembers for a while that there was no such file; asked to make it, it looks.
                os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o666))
                _replace(self.path, _document(change(_read(self.path)[0] or [])))

    def _refresh(self) -> None:
        """Hold what the file has by now, and what could not be written to it."""
        found = self._tiles or {}
        try:
            entries, self._stamp = _read(self.path, self._stamp)
            found = found if entries is None else _readable(entries)
        except FileError as problem:
            self._say(problem)
        self._tiles = {**found, **self._unsaved}

    def _say(self, problem: FileError) -> None:
        if not self._failed:
            self._failed = True
            warnings.warn(f"{problem}; tiles tuned here serve this process alone", RuntimeWarning, stacklevel=2)


@lru_cache(maxsize=1)
def ledger() -> Ledger:
    """The user's ledger."""
    return Ledger(settings().cache / f"tiles-{VERSION}.json")


# The file
def _read(path: Path, seen: Stamp | None = None) -> tuple[list[Entry] | None, Stamp | None]:
    """Its entries, or None where it is as it was seen; and how it is seen now. No file, or an empty one, has none.

    Raises FileError.
    """
    with _named(path, "read"):
        try:
            text, stamp = _text(path, seen)
        except OSError as problem:
            # A network file system may lose a file that is replaced while it is read.
            if problem.errno != errno.ESTALE:
                raise
            text, stamp = _text(path, None)
    if text is None and stamp is not None:
        return None, stamp
    if not text:
        return [], stamp
    try:
        return _entries(text, str(path)), stamp
    except FileError as problem:
        raise FileError(f"{problem}; remove it to begin anew") from problem


def _text(path: Path, seen: Stamp | None) -> tuple[bytes | None, Stamp | None]:
    """The bytes of a file, None where it is as it was seen or not there."""
    try:
        # Opened rather than only asked about: then a network file system asks its server.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            return None if stamp == seen else file.read(), stamp
    except FileNotFoundError:
        return None, None


def _given(source: Path | str) -> list[Entry]:
    if isinstance(source, str):
        return _entries(source, "the text")
    with _named(source, "read"):
        return _entries(source.read_bytes(), str(source))


def _entries(text: str | bytes, name: str) -> list[Entry]:
    try:
        found = json.loads(text)
        version, entries = found["version"], found["tiles"]
    except (ValueError, TypeError, KeyError) as problem:
        raise FileError(f"{name} is no ledger of tiles ({problem!r})") from problem
    if version != VERSION:
        raise FileError(f"{name} is a ledger of tiles of version {version!r}, expected {VERSION}")
    if not isinstance(entries, list):
        raise FileError(f"{name} is no ledger of tiles (expected a list of them, found {type(entries).__name__})")
    return entries


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _named(path: Path, done: str) -> Iterator[None]:
    """What the system raises becomes a FileError."""
    try:
        yield
    except OSError as problem:
        raise FileError(f"{path} cannot be {done} ({problem.strerror or problem})") from problem


# Its entries
def _document(entries: list[Entry]) -> str:
    lines = ",\n".join(map(json.dumps, entries))
    return f'{{"version": {VERSION}, "tiles": [\n{lines}\n]}}\n'


def _entry(key: Key, tuned: Tuned) -> Entry:
    date = tuned.date.isoformat(timespec="microseconds")
    return {"key": asdict(key), "tile": asdict(tuned.tile), "date": date, "seconds": tuned.seconds}


def _with(entries: list[Entry], tiles: Mapping[Key, Tuned]) -> list[Entry]:
    return [e for e in entries if _key(e) not in tiles] + [_entry(key, tuned) for key, tuned in tiles.items()]


def _readable(entries: list[Entry]) -> dict[Key, Tuned]:
    pairs = ((_key(entry), _tuned(entry)) for entry in entries)
    return {key: tuned for key, tuned in pairs if key is not None and tuned is not None}


def _key(entry: Entry) -> Key | None:
    try:
        key = entry["key"]
        dtypes, sizes = tuple(map(str, key["dtypes"])), tuple(map(int, key["sizes"]))
        return Key(str(key["device"]), str(key["statement"]), dtypes, sizes, str(key["precision"]))
    except (TypeError, KeyError, ValueError):
        return None


def _tuned(entry: Entry) -> Tuned | None:
    """None for a tile with a field that is not known here: without that field it would be another tile."""
    try:
        date, seconds = datetime.fromisoformat(entry["date"]), entry.get("seconds")
        if date.tzinfo is None:
            return None
        return Tuned(Tile(**entry["tile"]), date, None if seconds is None else float(seconds))
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
