"""A file of what was tuned, per user, safe with many processes: entries by key, of one kind each.

The file is one JSON document with a line for each entry. A change reads it, and replaces it by a whole new one, under a
lock of filelock (which torch brings). Lines added with O_APPEND would need no lock on a local disk, but two machines
that share a network file system write such lines over each other, while locks hold between its clients, too. The kernel
takes a dead process's lock from it, so none is stale; readers take none and never wait; and who does not get it in time
keeps its entry for the next change. Rename is atomic: nobody sees a half-written file. Where a file system has no
locks, filelock makes do with a file that exists: what a dead process leaves there holds others up once, for WAIT
seconds.
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

WAIT = 10.0
"""Seconds that a change waits for those of others, which take milliseconds; after a failure none waits any more."""

Entry: TypeAlias = Any
"""A value with its key as the file has them. One that cannot be read here (a newer version's) stays in the file."""
Stamp: TypeAlias = tuple[int, int, int]
"""What tells whether a file was replaced: its inode, size and time."""
UNREADABLE = (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading an entry raises where it is none of this version; a number without end and deep nesting are among it."""
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class RecordType(Generic[K, V]):
    """What a file holds. name: of its entries, in the file and to the user. version: of the file; another version's is
    left alone and not read.

    write(key, value) makes an entry; key and value read it, None where they cannot. date: when a value was made.
    """

    name: str
    version: int
    write: Callable[[K, V], Entry]
    key: Callable[[Entry], K | None]
    value: Callable[[Entry], V | None]
    date: Callable[[V], datetime]

    def document(self, entries: list[Entry]) -> str:
        lines = ",\n".join(map(json.dumps, entries))
        return f'{{"version": {self.version}, "{self.name}": [\n{lines}\n]}}\n'

    def entries(self, text: str | bytes, name: str) -> list[Entry]:
        """Those of a document; `name` is told where it is none. Raises FileError."""
        try:
            found = json.loads(text)
            version, entries = found["version"], found[self.name]
        except UNREADABLE as problem:
            raise FileError(f"{name} is no ledger of {self.name} ({problem!r})") from problem
        if version != self.version:
            raise FileError(f"{name} is a ledger of {self.name} of version {version!r}, expected {self.version}")
        if not isinstance(entries, list):
            found = type(entries).__name__
            raise FileError(f"{name} is no ledger of {self.name} (expected a list of them, found {found})")
        return entries

    def readable(self, entries: list[Entry]) -> dict[K, V]:
        pairs = ((self.key(entry), self.value(entry)) for entry in entries)
        return {key: value for key, value in pairs if key is not None and value is not None}

    def having(self, entries: list[Entry], more: Mapping[K, V]) -> list[Entry]:
        """Entries with others in the place of those of the same key."""
        return [e for e in entries if self.key(e) not in more] + [self.write(key, v) for key, v in more.items()]


class Store(Generic[K, V]):
    """The entries of a file, read when first asked for; what is kept is on disk when `keep` returns.

    Where the file cannot be read or written, `find`, `seek` and `keep` say so once, as a RuntimeWarning, and what is
    tuned serves this process alone: a read-only home on a cluster ends no computation. All else raises FileError.

    generation: how often entries have changed here; what was made ready before is made anew. What others write changes
    it where this process looks for it: in `seek`, and with each change of its own.
    """

    def __init__(self, path: Path, kind: RecordType[K, V]) -> None:
        self.path, self.kind = path, kind
        self.generation = 0
        self._held: dict[K, V] | None = None
        self._unsaved: dict[K, V] = {}
        self._stamp: Stamp | None = None
        self._failed = False

    def find(self, key: K) -> V | None:
        """What is kept under this key, or None. The file is read once."""
        return self._known().get(key)

    def seek(self, key: K) -> V | None:
        """The same; where there is nothing, the file is read again if others have written to it."""
        if key not in self._known():
            self.refresh()
        return self.find(key)

    def refresh(self) -> None:
        """Read the file again if others have written to it."""
        before = self._known()
        self._refresh()
        if self._held != before:
            self.generation += 1

    def known(self) -> Mapping[K, V]:
        """Every entry by its key as this process knows them; a file that cannot be read has none."""
        return dict(self._known())

    def keep(self, key: K, value: V) -> None:
        """Keep a value. What others have written meanwhile stays."""
        self._unsaved[key] = value
        try:
            self._save()
        except FileError as problem:
            self._say(problem)
        self._renew()

    def forget(self, keys: Collection[K]) -> None:
        """Remove the entries of these keys, where there are any."""
        for key in keys:
            self._unsaved.pop(key, None)
        try:
            if self.path.exists():
                self._change(lambda entries: [e for e in entries if self.kind.key(e) not in keys])
        except FileError as problem:
            self._say(problem)
            self._held = {key: value for key, value in self._known().items() if key not in keys}
            self.generation += 1
            return
        self._renew()

    def all(self) -> dict[K, V]:
        """Every value by its key. Raises FileError where the file cannot be read, or is no ledger of this version."""
        return {**self.kind.readable(_read(self.path, self.kind)[0] or []), **self._unsaved}

    def export(self) -> str:
        """Every entry as one JSON document with its version, for `merge`. Raises FileError as `all` does."""
        return self.kind.document([self.kind.write(key, value) for key, value in self.all().items()])

    def merge(self, source: Path | str) -> int:
        """Take what is new, or newer than here, from another ledger's file or the text of its export; how many.

        Entries that this version cannot read are left out. Raises FileError where the source is no ledger of this
        version, or where either file cannot be read or this one not written.
        """
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
        """Remove all entries; how many there were.

        Raises FileError where the file is no ledger or cannot be written.
        """
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
        """Only once the new entries are here may anything be made ready with them."""
        self._refresh()
        self.generation += 1

    def _save(self) -> None:
        """Write what is not on disk yet. Raises FileError."""
        unsaved = dict(self._unsaved)
        self._change(lambda entries: self.kind.having(entries, unsaved))
        for key, value in unsaved.items():
            if self._unsaved.get(key) is value:
                del self._unsaved[key]

    def _change(self, change: Callable[[list[Entry]], list[Entry]]) -> None:
        """Replace the entries of the file while no other process does. Raises FileError."""
        with _named(self.path, "written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0 if self._failed else WAIT, poll_interval=0.01):
                # A network file system remembers for a while that there was no such file; asked to make it, it looks.
                os.close(os.open(self.path, os.O_RDONLY | os.O_CREAT, 0o666))
                _replace(self.path, self.kind.document(change(_read(self.path, self.kind)[0] or [])))

    def _refresh(self) -> None:
        """Hold what the file has by now, and what could not be written to it."""
        found = self._held or {}
        try:
            entries, self._stamp = _read(self.path, self.kind, self._stamp)
            found = found if entries is None else self.kind.readable(entries)
        except FileError as problem:
            self._say(problem)
        self._held = {**found, **self._unsaved}

    def _say(self, problem: FileError) -> None:
        if not self._failed:
            self._failed = True
            told = f"{problem}; {self.kind.name} tuned here serve this process alone"
            warnings.warn(told, RuntimeWarning, stacklevel=2)


# The file
def _read(path: Path, kind: RecordType[Any, Any], seen: Stamp | None = None) -> tuple[list[Entry] | None, Stamp | None]:
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
        return kind.entries(text, str(path)), stamp
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
    """What the system raises becomes a FileError, and what an entry does that is nested too deeply for the stack."""
    try:
        yield
    except (OSError, RecursionError) as problem:
        raise FileError(f"{path} cannot be {done} ({getattr(problem, 'strerror', None) or problem})") from problem
