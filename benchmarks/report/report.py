"""`python -m benchmarks report`: the results file as a self-contained HTML page and static pictures.

Both draw the same charts (charts.py), which are made from rows (results.py, networks.py). A section without rows says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.harness.families import SUITES
from benchmarks.harness.results import chosen, commits_of, current, days, read
from benchmarks.harness.rows import Row
from benchmarks.report.charts import Chart
from benchmarks.report.engine import captured, latencies
from benchmarks.report.html import drawn, table
from benchmarks.report.networks import choices, parts
from benchmarks.report.png import draw
from benchmarks.report.results import history, offset_sizes, overview, redundancy, scaling, speedups
from benchmarks.report.stream import streams
from benchmarks.report.summary import CLOCKS, Line, about, bounded, lines, without_lines
from pumice.cli.page import Page, card, panel, plural, write_page

STYLE, SCRIPT = (Path(__file__).parent / name for name in ("results.css", "results.js"))
PAGE = "index.html"


@dataclass(frozen=True)
class Choice:
    """Filter of rows: part of the device name, and prefixes of commits; empty values match all rows."""

    device: str = ""
    commits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of the page. absent: the text shown if there are no charts."""

    title: str
    charts: Callable[[Sequence[Row]], Iterator[Chart]]
    absent: str
    superseded: bool = False
    """Whether the charts also include superseded rows."""


SECTIONS: tuple[Section, ...] = (
    Section("Speed-ups in short", overview, "no rows yet that hold us against another library"),
    Section("Speed-ups, case by case", speedups, "no rows yet that hold us against another library"),
    Section("Streams of scenes never seen", streams, "no rows yet: python -m benchmarks stream"),
    Section("Captured networks", captured, "no rows yet: python -m benchmarks engine --case inference and training"),
    Section("Latency over varied scans", latencies, "no rows yet: python -m benchmarks engine --case varied"),
    Section(
        "Where a pass spends its time",
        parts,
        "no rows yet: metrics part:map, part:sort, part:kernel and part:other of the suites workloads and tuner",
    ),
    Section(
        "Redundant computation",
        redundancy,
        "no rows yet: python -m benchmarks conv-forward --case redundancy counts them",
    ),
    Section("Maps by size", scaling, "no rows yet: python -m benchmarks maps --case scaling"),
    Section("Map sizes by offset", offset_sizes, "no rows yet: python -m benchmarks tuner --case offsets"),
    Section("Tuned choices", choices, "no rows yet: metrics choice:... and chosen:... of the suite tuner"),
    Section("History", history, "no rows yet that hold us against another library", superseded=True),
)


@dataclass(frozen=True)
class Written:
    """The files written. rows: number of rows chosen from the results file; kept: of these, those not superseded."""

    page: Path
    pictures: tuple[Path, ...]
    rows: int
    kept: int


def write(ledger: Path, folder: Path, choice: Choice | None = None) -> Written:
    """Write folder/index.html, and a PNG of each chart beside it.

    Raises FileError if the results file cannot be read, has a line that is not a row, or the folder cannot be written,
    and OptionError if no row is of the chosen devices and commits.
    """
    choice = choice or Choice()
    rows = chosen(read(ledger), choice.device, choice.commits)
    kept = current(rows)
    made = {section: tuple(section.charts(rows if section.superseded else kept)) for section in SECTIONS}
    pictures = tuple(draw(folder, chart) for charts in made.values() for chart in charts)
    body = "\n".join((_header(ledger, rows, kept), _summary(kept), _bounds(kept), *map(_section, made, made.values())))
    page = Page("Pumice: results", body, _data(made), ("report.css", STYLE), SCRIPT)
    return Written(write_page(folder / PAGE, page), pictures, len(rows), len(kept))


def _data(made: Mapping[Section, Sequence[Chart]]) -> dict[str, Any]:
    charts = [chart for found in made.values() for chart in found]
    return {_id(chart, number): drawn(one) for chart in charts for number, one in enumerate(chart.panels)}


def _id(chart: Chart, number: int) -> str:
    return f"{chart.name}-{number}"


# The pieces of the page


def _header(ledger: Path, rows: Sequence[Row], kept: Sequence[Row]) -> str:
    devices, commits = list(dict.fromkeys(row.device for row in rows)), commits_of(rows)
    told = " · ".join(part for part in (str(ledger), days(rows)) if part)
    cards = (
        card("Rows", f"{len(kept):,}", "", f"{len(rows):,} in the ledger, the others are superseded", main=True),
        card("Suites", str(len({row.suite for row in rows})), "", f"of {len(SUITES)} that are planned"),
        card("Devices", str(len(devices)), "", ", ".join(devices)),
        card("Commits", str(len(commits)), "", f"the last one {commits[-1]}" if commits else ""),
    )
    title = f'<p class="brand">pumice</p><h1>Results</h1><p class="subtitle">{escape(told)}</p>'
    return f'<header>{title}</header><section class="cards">{"".join(cards)}</section>'


COLUMNS: Mapping[str, Callable[[Line], str]] = {
    "suite": lambda line: line.family.suite,
    "what": lambda line: line.family.name,
    "precision": lambda line: line.precision,
    "clock": lambda line: line.clock,
    "against": lambda line: line.rivals,
    "cases": lambda line: str(line.mean.cells),
    "geomean": lambda line: f"{line.mean.geomean:.2f}",
    "least": lambda line: f"{line.mean.least.ratio:.2f} ({line.mean.least.place})",
    "most": lambda line: f"{line.mean.most.ratio:.2f}",
    "untuned": lambda line: "" if line.mean.plain is None else f"{line.mean.plain:.2f}",
    "date": lambda line: days(line.rows),
    "commit": lambda line: _few(commits_of(line.rows)),
    "device": lambda line: line.device,
}
"""Columns of the summary, with the functions that make their cells."""


def _summary(kept: Sequence[Row]) -> str:
    found = lines(kept)
    note = (
        "Times as fast as the best of the rivals of each case: geometric means, and the case where we are the least "
        "ahead. Every ratio is of one run (or of one run and a recorded time, where it says recorded). "
        + "; ".join(f"clock {name}: {told}" for name, told in CLOCKS.items())
        + ". Lines of peak memory (clock count): times as little memory, above what was allocated at a call's start. "
        "Untuned: the same mean by default tiles alone."
    )
    rows = [[escape(make(line)) for make in COLUMNS.values()] for line in found]
    told = "".join(
        f"<tr><td>{escape(suite)}</td><td>{escape(about(suite))}</td>"
        f'<td class="absent" colspan="{len(COLUMNS) - 2}">{escape(what)}</td></tr>'
        for suite, what in without_lines(kept, found).items()
    )
    return panel("Summary", note, table(list(COLUMNS), rows, told))


def _bounds(kept: Sequence[Row]) -> str:
    names = {"suite", "what", "precision", "clock", "cases", "date", "commit", "device"}
    shown = {name: make for name, make in COLUMNS.items() if name in names}
    rows = [
        [*(escape(make(line)) for make in shown.values()), escape(line.against)]
        + [f"{share:.0%}" for share in (line.mean.geomean, line.mean.least.ratio)]
        for line in bounded(kept)
        if line.clock != "wall"
    ]
    note = (
        "The least time that memory, caches or multipliers allow, over ours: the best of our ways of each case, its "
        "longest bound. Models of the device, not measurements."
    )
    absent = "" if rows else f'<tr><td class="absent" colspan="{len(shown) + 3}">no rows yet</td></tr>'
    return panel("Shares of bounds", note, table([*shown, "bounds", "geomean", "least"], rows, absent))


def _section(section: Section, charts: Sequence[Chart]) -> str:
    title = f'<h2 class="chapter">{escape(section.title)}</h2>'
    if not charts:
        return title + panel(section.title, "", f'<div class="inside absent">{escape(section.absent)}</div>')
    return title + "".join(map(_chart, charts))


def _chart(chart: Chart) -> str:
    drawn_ = "".join(f'<div class="plot" id="{escape(_id(chart, n))}"></div>' for n in range(len(chart.panels)))
    source = f'<p class="source">{escape(chart.source)}</p>'
    return panel(chart.title, chart.note, f'<div class="inside">{drawn_}{source}</div>')


def _few(commits: Sequence[str]) -> str:
    return ", ".join(commits[-2:]) + (f" and {len(commits) - 2} more" if len(commits) > 2 else "")


def told(written: Written) -> str:
    """A summary of the files written, in a few lines."""
    return (
        f"read  {plural(written.rows, 'row')}, {written.rows - written.kept} of them superseded\n"
        f"page  {written.page}\ndrawn {plural(len(written.pictures), 'picture')} beside it"
    )
