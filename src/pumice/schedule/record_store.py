"""Tuning results, records by key, in a per-user file that concurrent processes may read and write.

The file is one JSON document with one line per entry. A change reads it and replaces it atomically (rename) under a
file lock (filelock, a dependency of torch). Appending with O_APPEND needs no lock on a local disk, but machines that
share a network file system would overwrite each other's lines; locks work there. The kernel releases the lock of a dead
process. Readers take no lock. After a timeout a record stays unsaved until the next change. On file systems without
locks, filelock uses a lock file; if a dead process left one, each process waits for it once, WAIT seconds.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import uuid4

from filelock import FileLock

from pumice.errors import FileError

WAIT = 10.0  # timeout of the lock in seconds (a change takes milliseconds); after the first failure it is 0

Entry: TypeAlias = Any  # a record in JSON form; unreadable ones (of a newer version) stay in the file
Stamp: TypeAlias = tuple[int, int, int]  # inode, size and modification time, to detect that a file was replaced
UNREADABLE = (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors raised by parsing a record of another version, also for infinite numbers and deep nesting."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class RecordType(Generic[K, V]):
    """File format of a record type. name: of its records, in the file and in messages. version: others are rejected.

    write(key, value) returns an entry; key(entry), value(entry) parse it, or raise an error of UNREADABLE. date(value):
    its creation.
    """

    name: str
    version: int
    write: Callable[[K, V], Entry]
    key: Callable[[Entry], K]
    value: Callable[[Entry], V]
    date: Callable[[V], datetime]

    def document(self, entries: list[Entry]) -> str:
        lines = ",\n".join(map(json.dumps, entries))
        return f'{{"version": {self.version}, "{self.name}": [\n{lines}\n]}}\n'

    def entries(self, text: str | bytes, name: str) -> list[Entry]:
        """The entries of a document called `name` in messages. Raises FileError for another format or version."""
        try:
            found = json.loads(text)
            version, entries = found["version"], found[self.name]
        except UNREADABLE as problem:
            raise FileError(f"{name} is not a tuning cache of {self.name} ({problem!r})") from problem
        if version != self.version:
            raise FileError(f"{name} is a tuning cache of {self.name} of version {version!r}, expected {self.version}")
        if not isinstance(entries, list):
            found = type(entries).__name__
            raise FileError(f"{name} is not a tuning cache of {self.name} (expected a list, found {found})")
        return entries

    def readable(self, entries: list[Entry]) -> dict[K, V]:
        pairs = ((_parsed(self.key, entry), _parsed(self.value, entry)) for entry in entries)
        return {key: value for key, value in pairs if key is not None and value is not None}

    def without(self, entries: list[Entry], keys: Collection[K]) -> list[Entry]:
        return [entry for entry in entries if _parsed(self.key, entry) not in keys]

    def having(self, entries: list[Entry], more: Mapping[K, V]) -> list[Entry]:
        """`entries` with the records `more` added; they replace entries of equal key."""
        return self.without(entries, more) + [self.write(key, value) for key, value in more.items()]


def _parsed(parse: Callable[[Entry], V], entry: Entry) -> V | None:
    try:
        return parse(entry)
    except UNREADABLE:
        return None


def date_of(text: str) -> datetime:
    """A date in ISO form. Raises ValueError without a time zone, which dates are compared by."""
    date = datetime.fromisoformat(text)
    if date.tzinfo is None:
        raise ValueError(f"{text} has no time zone")
    return date


class Store(Generic[K, V]):
    """The records of a file, read on first use; `keep` returns once a record is on disk.

    If the file cannot be read or written, `all`, `export`, `merge` and `clear` raise FileError. All other methods warn
    once (RuntimeWarning) and keep records in memory: a read-only home directory must not stop a computation.

    generation: incremented when loaded records change; plans of an older one are rebuilt. Records of other processes
    are loaded by `seek`, `refresh` and each change.
    """

    generation: int
    path: Path

    def __init__(self, path: Path, kind: RecordType[K, V]) -> None:
        self.path = path
        self.kind: RecordType[K, V] = kind
        self.generation = 0
        self._held: dict[K, V] | None = None
        self._unsaved: dict[K, V] = {}
        self._stamp: Stamp | None = None
        self._failed = False

    @property
    def is_empty(self) -> bool:
        """True if no records are known to this process."""
        return not self._known()

    def find(self, key: K) -> V | None:
        """The value of this key, or None. Only the first call reads the file."""
        return self._known().get(key)

    def seek(self, key: K) -> V | None:
        """As `find`, but a miss reads the file again if it has changed."""
        if key not in self._known():
            self.refresh()
        return self.find(key)

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        before = self._known()
        self._refresh()
        if self._held != before:
            self.generation += 1

    def known(self) -> Mapping[K, V]:
        """All records known to this process; empty if the file cannot be read."""
        return dict(self._known())

    def keep(self, key: K, value: V) -> None:
        """Store a value; records written by other processes are not lost."""
        self._unsaved[key] = value
        try:
            self._save()
        except FileError as problem:
            self._warn(problem)
        self._renew()

    def forget(self, keys: Collection[K]) -> None:
        """Remove the records of these keys, if present."""
        for key in keys:
            self._unsaved.pop(key, None)
        try:
            if self.path.exists():
                self._change(lambda entries: self.kind.without(entries, keys))
        except FileError as problem:
            self._warn(problem)
            self._held = {key: value for key, value in self._known().items() if key not in keys}
            self.generation += 1
            return
        self._renew()

    def all(self) -> dict[K, V]:
        """All values by key. Raises FileError if the file cannot be read or has another format or version."""
        return {**self.kind.readable(_read(self.path, self.kind)[0] or []), **self._unsaved}

    def export(self) -> str:
        """All records as one JSON document with its version, for `merge`. Raises FileError as `all` does."""
        return self.kind.document([self.kind.write(key, value) for key, value in self.all().items()])

    def merge(self, source: Path | str) -> int:
        """Add records that are new or newer from another file or the text of an export; returns how many. Unreadable
        records are skipped. Raises FileError if the source has another format or version, or if a file cannot be read
        or written."""
        theirs = self.kind.readable(_given(source, self.kind))
        newer: dict[K, V] = {}

        def merged(entries: list[Entry]) -> list[Entry]:
            ours, date = self.kind.readable(entries), self.kind.date
            newer.update({k: v for k, v in theirs.items() if k not in ours or date(v) > date(ours[k])})
            return self.kind.having(entries, newer)

        self._change(merged)
        self._renew()
        return len(newer)

    def clear(self) -> int:
        """Remove all records; returns how many. Raises FileError for another format, or if writing fails."""
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

    def _known(self) -> dict[K, V]:
        if self._held is None:
            self._refresh()
        return self._held or {}

    def _renew(self) -> None:
        """Load the new records, then increment the generation, in this order."""
        self._refresh()
        self.generation += 1

    def _save(self) -> None:
        """Write records that are not on disk yet. Raises FileError."""
        unsaved = dict(self._unsaved)
        self._change(lambda entries: self.kind.having(entries, unsaved))
        for key, value in unsaved.items():
            if self._unsaved.get(key) is value:
                del self._unsaved[key]

    def _change(self, change: Callable[[list[Entry]], list[Entry]]) -> None:
        """Replace the records of the file under its lock. Raises FileError."""
        with _named(self.path, "written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0 if self._failed else WAIT, poll_interval=0.01):
                # A network file system caches that a file is missing; O_CREAT makes it ask the server.
                os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o666))
                _replace(self.path, self.kind.document(change(_read(self.path, self.kind)[0] or [])))

    def _refresh(self) -> None:
        """Load the records of the file if it has changed; unsaved records take precedence."""
        found = self._held or {}
        try:
            entries, self._stamp = _read(self.path, self.kind, self._stamp)
            found = found if entries is None else self.kind.readable(entries)
        except FileError as problem:
            self._warn(problem)
        self._held = {**found, **self._unsaved}

    def _warn(self, problem: FileError) -> None:
        if not self._failed:
            self._failed = True
            message = f"{problem}; {self.kind.name} tuned here are kept in this process only"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


# The file
def _read(path: Path, kind: RecordType[Any, Any], seen: Stamp | None = None) -> tuple[list[Entry] | None, Stamp | None]:
    """The entries (None if unchanged since `seen`; [] without a file) and the stamp. Raises FileError."""
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
        return kind.entries(text, str(path)), stamp
    except FileError as problem:
        raise FileError(f"{problem}; remove it to start over") from problem


def _text(path: Path, seen: Stamp | None) -> tuple[bytes | None, Stamp | None]:
    """(bytes, or None if unchanged since `seen`; stamp); (None, None) for a missing file."""
    try:
        # Not only stat: opening a file makes a network file system ask its server.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            stamp = status.st_ino, status.st_size, status.st_mtime_ns
            return None if stamp == seen else file.read(), stamp
    except FileNotFoundError:
        return None, None


def _given(source: Path | str, kind: RecordType[Any, Any]) -> list[Entry]:
    if isinstance(source, str):
        return kind.entries(source, "the text")
    with _named(source, "read"):
        return kind.entries(source.read_bytes(), str(source))


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
    """Context that converts OSError, lock timeouts and RecursionError (deeply nested records) to FileError."""
    try:
        yield
    except (OSError, RecursionError) as problem:
        raise FileError(f"{path} cannot be {done} ({getattr(problem, 'strerror', None) or problem})") from problem
