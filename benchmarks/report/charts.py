"""Charts as data, apart from drawing: png.py and html.py draw the same charts.

Colours suit colour-blind readers: those of Okabe and Ito for names, viridis for steps of one size.
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
"""By series, a remark on each of its values."""


@dataclass(frozen=True)
class Bars:
    """Grouped bars: in each group along the axis a bar of every series; None: no bar.

    mean: a dashed line across, at the mean of ratios. level: a solid line across, at 1 for ratios; None for times.
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
    """Stacked bars."""

    title: str
    axis: str
    bars: tuple[str, ...]
    parts: Mapping[str, Values]
    notes: Notes = field(default_factory=dict)

    def __post_init__(self) -> None:
        _fits(self.title, len(self.bars), self.parts, self.notes)


@dataclass(frozen=True)
class Lines:
    """Lines over named steps, on a logarithmic axis; None: no point.

    marks: by line, labels of its points. about: the title of the steps.
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
        """The axis's ends and ticks. If all values are close, more room makes the lines look flat."""
        found = [value for values in self.lines.values() for value in values if value is not None]
        room = 1.08 if max(found) > 2 * min(found) else 1.4
        return log_axis(found, (room, room))


@dataclass(frozen=True)
class RangeBar:
    """A bar of Ranges: a mean between a minimum and a maximum. kind: determines the colour."""

    name: str
    value: float
    least: float
    most: float
    kind: str
    note: str = ""


@dataclass(frozen=True)
class Ranges:
    """Horizontal bars with ranges, on a logarithmic axis."""

    title: str
    axis: str
    spans: tuple[RangeBar, ...]

    @property
    def ends(self) -> tuple[tuple[float, float], list[float]]:
        """The axis's ends and ticks, with room for the bars' start at 1 and their labels."""
        return log_axis([1.0, *(end for span in self.spans for end in (span.least, span.most))], (1.1, 1.4))


@dataclass(frozen=True)
class HeatCell:
    """A tile of a Heat. kind: determines the colour; text: written on the tile."""

    kind: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """A table of coloured tiles by (row, column); cells without a tile stay empty.

    kinds: of all panels of a chart, so that a kind has the same colour in each.
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
        """The kinds that occur in this panel."""
        found = {tile.kind for tile in self.tiles.values()}
        return tuple(kind for kind in self.kinds if kind in found)


Panel: TypeAlias = "Bars | Stacks | Lines | Ranges | Heat"


@dataclass(frozen=True)
class Chart:
    """Panels shown together. name: stem of its files; note: what is shown; source: device, clock, dates, commits."""

    name: str
    title: str
    note: str
    source: str
    panels: tuple[Panel, ...]


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name; a graded scale if the names differ in numbers only."""
    if not numbered(names):
        return {name: NAMED[place % len(NAMED)] for place, name in enumerate(names)}
    last = max(1, len(names) - 1)
    return {name: STEPPED[round(place * (len(STEPPED) - 1) / last)] for place, name in enumerate(names)}


def numbered(names: Sequence[str]) -> bool:
    """True for two or more names that differ in numbers only, such as C32 and C64."""
    return len(names) > 1 and len({re.sub(r"\d+(\.\d+)?", "", name) for name in names}) == 1


def by_number(name: str) -> tuple[float, ...]:
    """Sort key of `numbered` names."""
    return tuple(float(found) for found in re.findall(r"\d+(?:\.\d+)?", name))


def stem(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def log_axis(values: Sequence[float], room: tuple[float, float]) -> tuple[tuple[float, float], list[float]]:
    """Ends and ticks of a logarithmic axis. room: factors of space below and above the values."""
    low, high = min(values) / room[0], max(values) * room[1]
    steps = (1, 2, 5) if high > 8 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    marks = (round(step * 10.0**power, 9) for power in range(-6, 10) for step in steps)
    return (low, high), [mark for mark in marks if low <= mark <= high]


def _fits(title: str, count: int, series: Mapping[str, Values], notes: Notes) -> None:
    for what, held in (("values", series), ("notes", notes)):
        for name, found in held.items():
            if len(found) != count:
                raise ShapeError(f"{title!r}: expected {count} {what} of {name!r}, found {len(found)}")
