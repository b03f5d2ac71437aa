"""labels.json of an output folder: what its files were made by, so that a later run continues with the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pumice.errors import FileError, OptionError
from pumice.label.predictions import whole_file

_NAME = "labels.json"
_FORMAT = "pumice-labels-1"


@dataclass(frozen=True)
class Record:
    """What determines the files of an output folder.

    checkpoint, digest: its path, and the SHA-256 of its content. classes: their names, by index. kind: of the files.
    precision, features, columns: as in Labeller. root: the folder or URL that names of outputs are relative to."""

    checkpoint: str
    digest: str
    classes: tuple[str, ...]
    kind: str
    precision: str
    features: str | None
    columns: int | None
    root: str

    def agree(self, out: Path) -> None:
        """Write this record into `out`, or compare it with that of the labels that are there. Raises OptionError that
        names both if they differ (in the path of the checkpoint they may)."""
        found = read_record(out)
        if found is None or (found != self and not any(out.rglob(f"*.{found.kind}"))):
            text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"
            with whole_file(out / _NAME) as partial:
                partial.write_text(text, encoding="utf-8")
            return
        if found.digest != self.digest:
            mine, theirs = (f"{one.checkpoint} (sha256 {one.digest[:12]})" for one in (self, found))
            raise OptionError(f"{out} holds labels by {theirs}, and the checkpoint is {mine}: give another folder")
        for name in ("kind", "precision", "features", "columns", "root"):
            mine, theirs = getattr(self, name), getattr(found, name)
            if mine != theirs:
                raise OptionError(f"{out} holds labels with {name} {theirs}, found {name} {mine}: give another folder")


def read_record(out: Path) -> Record | None:
    """The record in a folder, None if there is none. Raises FileError for a damaged one."""
    path = out / _NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: expected the record of a folder of labels, found {error}") from None
    try:
        fields: dict[str, Any] = json.loads(text)
        if fields.pop("format") != _FORMAT:
            raise ValueError("another format")
        return Record(**{**fields, "classes": tuple(fields["classes"])})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path}: expected the record of a folder of labels, found it damaged ({error!r})") from None


def digest(path: Path) -> str:
    """The SHA-256 of a file. Raises FileError if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise FileError(f"{path}: expected a file, found {error.strerror}") from None
