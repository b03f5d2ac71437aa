"""Tables and errors as text."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> Iterator[str]:
    """The lines of a table. right: the columns that are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]
