"""The summary of the results file: a mean per family, device, clock, precision and kind of rival."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.families import DEFAULT, FAMILIES, SUITES, Family, suites_of
from benchmarks.harness.results import Compared, Mean, compared, grouped, mean_of, reached
from benchmarks.harness.rows import Row

CLOCKS: Mapping[str, str] = {
    "gpu": "the device alone",
    "wall": "from an idle device to an idle device, the host's time in it",
    "cpu": "the processor's time for the process, whatever else runs on the machine",
}
"""Clocks, with what their times include."""
_SHOWN = (*CLOCKS, "count")
"""Clocks of lines, in order; peak memory has the clock `count`."""


@dataclass(frozen=True)
class Line:
    """The mean of one family against one kind of rival, on one device, by one clock and in one precision."""

    family: Family
    device: str
    clock: str
    precision: str
    against: str
    found: tuple[Compared, ...]
    mean: Mean

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(one.row for one in self.found)

    @property
    def source(self) -> str:
        """The source of the rival's times."""
        return self.found[0].row.peer_source

    @property
    def rivals(self) -> str:
        """The rival's name, with the source of its times unless the name includes it."""
        return self.against if self.source in self.against else f"{self.against} ({self.source})"

    @property
    def name(self) -> str:
        """The family's name, with the precision unless the name includes it."""
        name = self.family.name
        return name if self.precision in name else f"{name}, {self.precision}"


def lines(rows: Sequence[Row]) -> list[Line]:
    """All means against rivals, in the order of the families; for each family the clock `gpu` first."""
    found = []
    for family, key, own in _parts(rows):
        for against in family.rivals:
            cells = compared(own, family, against)
            if cells:
                plain = compared(own, family, against, (DEFAULT,))
                found.append(Line(family, *key, against, tuple(cells), mean_of(cells, plain)))
    return found


def bounded(rows: Sequence[Row]) -> list[Line]:
    """The same against lower bounds; ratios are the bound over our time."""
    found = []
    for family, key, own in _parts(rows):
        cells = reached(own, family)
        if cells:
            against = ", ".join(dict.fromkeys(one.row.peer for one in cells))
            found.append(Line(family, *key, against, tuple(cells), mean_of(cells)))
    return found


def headlines(found: Sequence[Line]) -> list[Line]:
    """The lines of times, by one clock per family and device: `gpu` if there is one."""
    found = [line for line in found if not line.family.of_memory]
    alone = {(line.family, line.device) for line in found if line.clock == "gpu"}
    return [line for line in found if line.clock == "gpu" or (line.family, line.device) not in alone]


def without_lines(rows: Sequence[Row], found: Sequence[Line]) -> dict[str, str]:
    """By suite without a mean, a text that says why."""
    have = {line.family.suite for line in found}
    told = {}
    for suite in suites_of(rows):
        count = sum(row.suite == suite for row in rows)
        if suite not in have:
            told[suite] = f"{count} rows, none of a case that is compared here" if count else "no rows yet"
    return told


def about(suite: str) -> str:
    """The title of a suite."""
    return SUITES.get(suite, "")


def _parts(rows: Sequence[Row]) -> Iterator[tuple[Family, tuple[str, str, str], list[Row]]]:
    """Each family's rows, by (device, clock, precision)."""
    for family in FAMILIES:

        def part(row: Row, family: Family = family) -> tuple[str, str, str] | None:
            place = family.place(row)
            return (row.device, row.clock, place.precision) if place and row.clock in _SHOWN else None

        parts = grouped(rows, part)
        order = sorted(parts, key=lambda key: _SHOWN.index(key[1]))
        yield from ((family, key, parts[key]) for key in order)
