"""Tuned tiles that last: a file of them per user, safe with many processes.

A tile is kept under what it was tuned for: the device, the statement, the dtypes, the sizes to half a power of
two, and how float32 is multiplied.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from pumice.env import settings
from pumice.errors import FileError
from pumice.schedule.tile import Tile

VERSION = 1
"""Of the file; another version's is left alone and not read."""


@dataclass(frozen=True)
class Key:
    """What a tile was tuned for."""

    device: str
    statement: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    precision: str = ""

    def __str__(self) -> str:
        parts = self.device, self.statement, ",".join(self.dtypes), ",".join(map(str, self.sizes)), self.precision
        return " | ".join(parts)


class Ledger:
    """The tuned tiles of a file, read when first asked for; what is put is on disk when `put` returns.

    generation: how often this one was put to; what was made ready before is made anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._tiles: dict[str, Tile] | None = None

    def get(self, key: Key) -> Tile | None:
        """The tile that was tuned for this, or None."""
        if self._tiles is None:
            self._tiles = self._read()
        return self._tiles.get(str(key))

    def put(self, key: Key, tile: Tile) -> None:
        """Keep a tile. What others have written meanwhile stays."""
        self.generation += 1
        tiles = {**self._read(), **(self._tiles or {}), str(key): tile}
        self._tiles = tiles
        text = json.dumps({"version": VERSION, "tiles": {k: asdict(t) for k, t in tiles.items()}}, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, self.path)

    def all(self) -> dict[str, Tile]:
        """Every tile by its key's text."""
        return dict(self._read())

    def _read(self) -> dict[str, Tile]:
        if not self.path.exists():
            return {}
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            if found.get("version") != VERSION:
                return {}
            return {key: Tile(**tile) for key, tile in found["tiles"].items()}
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise FileError(f"{self.path} is no ledger of tiles ({problem}); remove it to begin anew") from problem


@lru_cache(maxsize=1)
def ledger() -> Ledger:
    """The user's ledger."""
    return Ledger(settings().cache / "tiles.json")
