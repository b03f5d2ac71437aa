"""The user's tuned tiles at the command line: as a table, to a file and back, and gone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten

from rich.table import Table
from rich.text import Text

from pumice.errors import FileError
from pumice.schedule.ledger import Key, Ledger, Tuned

__all__ = ["clear", "export", "merge", "nothing", "render"]

STATEMENT = 64
"""Characters of a statement in the table."""


def render(found: Mapping[Key, Tuned]) -> Table:
    """The tiles as a table, by device and statement."""
    table = Table(box=None, padding=(0, 1))
    for name in ("device", "statement", "dtypes", "sizes from", "tile"):
        table.add_column(name)
    table.add_column("ms", justify="right")
    table.add_column("tuned")
    order = sorted(found.items(), key=lambda item: (item[0].device, item[0].statement, item[0].dtypes, item[0].sizes))
    for key, tuned in order:
        # Text, not markup: "[m,n]" is no style.
        table.add_row(*map(Text, _cells(key, tuned)))
    return table


def clear(own: Ledger) -> str:
    """Remove all tiles; what was done. Raises FileError."""
    removed = own.clear()
    return f"removed {_count(removed)} from {own.path}" if removed else nothing(own)


def export(own: Ledger, file: Path) -> str:
    """Write all tiles to a file, if there are any; what was done. Raises FileError."""
    count = len(own.all())
    if not count:
        return nothing(own)
    try:
        file.write_text(own.export(), encoding="utf-8")
    except OSError as problem:
        raise FileError(f"{file} cannot be written ({problem.strerror or problem})") from problem
    return f"wrote {_count(count)} to {file}"


def merge(own: Ledger, file: Path) -> str:
    """Take what is new or newer from a file; what was done. Raises FileError."""
    return f"took {_count(own.merge(file))} that {file} has new or newer"


def nothing(own: Ledger) -> str:
    """What is said where there are none."""
    return f"no tuned tiles in {own.path}: f.tune(...) and `with pm.tuning():` make some on a GPU"


def _cells(key: Key, tuned: Tuned) -> tuple[str, ...]:
    dtypes = " ".join(key.dtypes) + (f" ({key.precision})" if key.precision else "")
    sizes = " ".join(str(round(2 ** (size / 2))) for size in key.sizes)
    best = "" if tuned.seconds is None else f"{1e3 * tuned.seconds:.4f}"
    date = tuned.date.astimezone().strftime("%Y-%m-%d %H:%M")
    return key.device, shorten(key.statement, STATEMENT, placeholder=" ..."), dtypes, sizes, str(tuned.tile), best, date


def _count(number: int) -> str:
    return f"{number} tuned tile{'s' * (number != 1)}"
