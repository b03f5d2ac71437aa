"""The results file as Markdown tables: papers' figures beside ours, and the studies of the suite `tuner` in full.

    python -m benchmarks.report.tables bench/results.jsonl                       prints the studies, a table for each
    python -m benchmarks.report.tables bench/results.jsonl docs/ablations.md     writes the papers' tables into a page

The page has marks <!-- table: PAPER --> and <!-- end -->, between which tables are written. A study's table has a line
for each network (or layer) and way, and a column for each measure; superseded rows are left out. A paper's table has a
line for each setting of its tables and figures (report.ablations).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.results import current, grouped, read
from benchmarks.harness.rows import Row
from benchmarks.report.ablations import LINES
from benchmarks.report.picks import Line
from pumice.errors import OptionError

SUITE = "tuner"
ALONE = "itself"
"""The peer of rows that are compared with nothing."""
_CHOICES = ("choice:", "chosen:")
_MARKS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """The parsed name of a case. whose: a network or layer; study; way; group: of layers."""

    whose: str
    study: str
    way: str
    group: str = ""

    @staticmethod
    def of(case: str) -> Place | None:
        """Parse a case of the suite `tuner`; None for other cases."""
        if case.startswith("dataflows/"):
            _, *whose, way = case.split("/")
            return Place(" ".join(whose), "dataflows", way)
        parts = case.split("/")
        if len(parts) < 4 or "-" not in parts[3]:
            return None
        study, _, way = parts[3].partition("-")
        return Place(" ".join(parts[:3]), study, way, "/".join(parts[4:]))


def tables(rows: Iterable[Row], study: str) -> Iterator[str]:
    """The lines of a study's tables, one set of tables per device."""
    newest = ((Place.of(row.case), row) for row in current(rows) if row.suite == SUITE)
    found = [(place, row) for place, row in newest if place and place.study == study]
    for device in dict.fromkeys(row.device for _, row in found):
        own = [(place, row) for place, row in found if row.device == device]
        measures = [(p, r) for p, r in own if not r.metric.startswith(_CHOICES)]
        choices = [(p, r) for p, r in own if r.metric.startswith(_CHOICES)]
        yield from _told(own, device)
        yield from _measured(measures)
        yield from _chosen(choices)


def studies(rows: Iterable[Row]) -> list[str]:
    """The studies that have rows, in the order of the results file."""
    places = (Place.of(row.case) for row in rows if row.suite == SUITE)
    return list(dict.fromkeys(place.study for place in places if place))


def filled(page: str, rows: Sequence[Row]) -> str:
    """The page with the papers' tables written between its marks. Raises OptionError for a mark of no known paper."""

    def table(found: re.Match[str]) -> str:
        if found[2] not in LINES:
            raise OptionError(f"the mark {found[2]!r} names no paper; there are {', '.join(LINES)}")
        return f"{found[1]}{chr(10).join(_beside(LINES[found[2]], rows))}\n{found[3]}"

    return _MARKS.sub(table, page)


def _beside(lines: Sequence[Line], rows: Sequence[Row]) -> Iterator[str]:
    """The table of a paper."""
    yield _line(["", "setting", "paper", "ours", "measured on"])
    yield _line(["---"] * 5)
    for line in lines:
        yield _line(line.cells(rows))


def _told(own: Sequence[tuple[Place, Row]], device: str) -> Iterator[str]:
    commits = ", ".join(dict.fromkeys(row.commit for _, row in own))
    yield f"{device}, {max(row.date for _, row in own)}, commit {commits}:"
    yield ""


def _measured(found: Sequence[tuple[Place, Row]]) -> Iterator[str]:
    """A line for each subject and way, a column for each measure."""
    columns = list(dict.fromkeys(_column(row) for _, row in found))
    cells = {
        place: grouped((row for _, row in own), _column) for place, own in grouped(found, lambda one: one[0]).items()
    }
    if not cells:
        return
    yield from _head(["of", "way", *columns])
    for place, held in cells.items():
        way = f"{place.way} {place.group}".strip()
        yield _line([place.whose, way, *(_cell(held.get(column, ())) for column in columns)])
    yield ""


def _chosen(found: Sequence[tuple[Place, Row]]) -> Iterator[str]:
    """Lines of the dataflow chosen for each group of layers, and the times of the five fastest candidates."""
    groups = grouped(found, lambda one: one[0])
    if not groups:
        return
    yield from _head(["of", "way", "group", "chosen", "candidates, ms end to end"])
    for place, own in groups.items():
        rows = [row for _, row in own]
        picked = [_name(row) for row in rows if row.metric.startswith("chosen:")]
        tried = sorted((r for r in rows if r.metric.startswith("choice:")), key=lambda r: r.value)
        told = ", ".join(f"{_name(row)} {row.value:.4g}" for row in tried[:5])
        yield _line([place.whose, place.way, place.group or "all", ", ".join(picked), told])
    yield ""


def _name(row: Row) -> str:
    return row.metric.partition(":")[2]


def _column(row: Row) -> str:
    """The title of a row's column: clock, metric and unit."""
    what = row.metric.removeprefix("fact:").removeprefix("part:")
    clock = "" if row.clock == "count" else f"{row.clock} "
    return f"{clock}{what}, {row.unit}"


def _cell(rows: Sequence[Row]) -> str:
    """The value, and in parentheses its comparison with each peer."""
    if not rows:
        return ""
    against = [told for row in rows if (told := _against(row))]
    return f"{rows[0].value:.4g}" + (f" ({'; '.join(against)})" if against else "")


def _against(row: Row) -> str:
    place, peer, value = Place.of(row.case), row.peer_value, row.value
    if row.peer in (ALONE, place.way if place else "") or not value or not peer:
        return ""
    if row.clock == "count" or row.unit not in ("ms", "us", "s"):
        return f"{row.peer} {peer:.4g}"
    return f"{peer / value:.2f}x {row.peer}"


def _head(names: Sequence[str]) -> Iterator[str]:
    yield _line(names)
    yield _line(["---"] * 2 + ["--:"] * (len(names) - 2))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main(arguments: Sequence[str]) -> None:
    """Print the studies of a results file, or write the papers' tables into a page."""
    if not 1 <= len(arguments) <= 2:
        raise OptionError(f"expected a ledger, and a page to write into if any; found {len(arguments)} arguments")
    rows = read(Path(arguments[0]))
    if len(arguments) == 1:
        for study in studies(rows):
            print(f"## {study}\n", *tables(rows, study), sep="\n")
        return
    page = Path(arguments[1])
    page.write_text(filled(page.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
