"""Charts as data: what a picture shows, apart from how it is drawn. png.py and html.py draw the same ones.

Colours are told apart by people who are blind to some: those of Okabe and Ito for names, viridis for steps of one size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pumice.errors import OptionError, ShapeError

NAMED = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"),
    *("#999999", "#AA4499", "#44AA99", "#DDCC77", "#88CCEE"),
)
STEPPED = ("#46327e", "#3e4f8a", "#31688e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#e2d810")

Values: TypeAlias = "tuple[float | None, ...]"
Notes: TypeAlias = "Mapping[str, tuple[str, ...]]"
"""By series, what is said of each of its values besides the number."""


@dataclass(frozen=True)
class Bars:
    """Bars side by side: groups along the axis, in each a bar of every series; None: no bar.

    mean: a line across, where ratios have one mean. level: another one, for ratios at 1; None: none, for times.
    """

    title: str
    axis: str
    groups: tuple[str, ...]
    series: Mapping[str, Values]
    mean: float | None = None
    notes: Notes = field(default_factory=dict)
    level: float | None = 1.0

    def __post_init__(self) -> None:
        _fits(self.title, len(self.groups), self.series, self.notes)


@dataclass(frozen=True)
class Stacks:
    """Bars of parts that lie on each other."""

    title: str
    axis: str
    bars: tuple[str, ...]
    parts: Mapping[str, Values]
    notes: Notes = field(default_factory=dict)

    def __post_init__(self) -> None:
        _fits(self.title, len(self.bars), self.parts, self.notes)


@dataclass(frozen=True)
class Lines:
    """Lines over steps that are named, not measured; None: no point. On a logarithmic axis.

    marks: by line, what is written at its points. about: what the steps are.
    """

    title: str
    axis: str
    steps: tuple[str, ...]
    lines: Mapping[str, Values]
    notes: Notes = field(default_factory=dict)
    marks: Notes = field(default_factory=dict)
    about: str = ""

    def __post_init__(self) -> None:
        _fits(self.title, len(self.steps), self.lines, self.notes)
        _fits(self.title, len(self.steps), {}, self.marks)

    @property
    def ends(self) -> tuple[tuple[float, float], list[float]]:
        """Of the axis, and its numbers; what is about the same looks so."""
        found = [value for values in self.lines.values() for value in values if value is not None]
        room = 1.08 if max(found) > 2 * min(found) else 1.4
        return log_axis(found, (room, room))


@dataclass(frozen=True)
class RangeBar:
    """One line of Ranges: a mean between the least and the most. kind: what gives its colour."""

    name: str
    value: float
    least: float
    most: float
    kind: str
    note: str = ""


@dataclass(frozen=True)
class Ranges:
    """Lying bars on a logarithmic axis, each with its range."""

    title: str
    axis: str
    spans: tuple[RangeBar, ...]

    @property
    def ends(self) -> tuple[tuple[float, float], list[float]]:
        """Of the axis, and its numbers; bars begin at 1 and have a number behind them."""
        return log_axis([1.0, *(end for span in self.spans for end in (span.least, span.most))], (1.1, 1.4))


@dataclass(frozen=True)
class HeatCell:
    """One field of a Heat: its kind gives the colour, its text is written there."""

    kind: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """A table of coloured tiles by (row, column); where there is none the table is empty.

    kinds: those of all tiles of a chart, so that a kind has one colour in all of its panels.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    tiles: Mapping[tuple[str, str], HeatCell]
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        strange = {tile.kind for tile in self.tiles.values()} - set(self.kinds)
        if strange:
            raise OptionError(f"{self.title!r}: expected tiles of {', '.join(self.kinds)}, found {', '.join(strange)}")

    @property
    def used(self) -> tuple[str, ...]:
        """The kinds that occur here."""
        found = {tile.kind for tile in self.tiles.values()}
        return tuple(kind for kind in self.kinds if kind in found)


Panel: TypeAlias = "Bars | Stacks | Lines | Ranges | Heat"


@dataclass(frozen=True)
class Chart:
    """Panels that belong together. name: of its files; note: what is shown; source: device, clock, dates, commits."""

    name: str
    title: str
    note: str
    source: str
    panels: tuple[Panel, ...]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: steps of a scale where the names differ by a number alone."""
    if not numbered(names):
        return {name: NAMED[place % len(NAMED)] for place, name in enumerate(names)}
    last = max(1, len(names) - 1)
    return {name: STEPPED[round(place * (len(STEPPED) - 1) / last)] for place, name in enumerate(names)}


def numbered(names: Sequence[str]) -> bool:
    """Whether two names or more differ by their numbers alone, as C32 and C64 do."""
    return len(names) > 1 and len({re.sub(r"\d+(\.\d+)?", "", name) for name in names}) == 1


def by_number(name: str) -> tuple[float, ...]:
    """What puts names that are `numbered` in order."""
    return tuple(float(found) for found in re.findall(r"\d+(?:\.\d+)?", name))


def stem(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def log_axis(values: Sequence[float], room: tuple[float, float]) -> tuple[tuple[float, float], list[float]]:
    """The ends of a logarithmic axis, so many times below and above all values, and where it has its numbers."""
    low, high = min(values) / room[0], max(values) * room[1]
    steps = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    marks = (round(step * 10.0**power, 9) for power in range(-6, 10) for step in steps)
    return (low, high), [mark for mark in marks if low <= mark <= high]


def _fits(title: str, count: int, series: Mapping[str, Values], notes: Notes) -> None:
    for what, held in (("values", series), ("notes", notes)):
        for name, found in held.items():
            if len(found) != count:
                raise ShapeError(f"{title!r}: expected {count} {what} of {name!r}, found {len(found)}")
