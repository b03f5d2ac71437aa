"""Charts and table of streams of new scenes: the median and the worst call of each way, and of spconv.

From the newest rows of each way in the suite `stream`. A ratio is of one row, and so of one run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.families import STREAM
from benchmarks.harness.results import told
from benchmarks.harness.rows import Row
from benchmarks.report.charts import Chart, RangeBar, Ranges, stem
from benchmarks.report.summary import CLOCKS

MODES: Mapping[str, str] = {
    "infer": "inference",
    "infer-tf32": "inference in tf32",
    "infer-fp32": "inference in fp32",
    "train": "training",
}
_WAYS = ("eager", "compiled", "captured")
_SPCONV, _ABSENT = "spconv", "–"
_P50, _WORST, _FIRST, _MAKE = "p50", "max_second_half", "first_call", "make"


@dataclass
class Cell:
    """A network in one mode on one device, by one clock. found: milliseconds by way, then by metric."""

    net: str
    mode: str
    device: str
    clock: str
    rows: list[Row] = field(default_factory=list)
    found: dict[str, dict[str, float]] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row, way: str) -> None:
        self.rows.append(row)
        metric = row.metric.removesuffix("_cold")
        self.found.setdefault(way, {})[metric] = row.value
        if row.peer == _SPCONV:
            rival, _, again = way.partition(", ")
            self.found.setdefault(f"{_SPCONV}, {again}" if again else _SPCONV, {})[metric] = row.peer_value
            if metric == _P50 and row.value > 0:
                self.ratios[way] = row.ratio

    @property
    def ways(self) -> list[str]:
        """The ways that have times: spconv first, then ours, then the same over repeated scenes."""
        names = [f"{way}{again}" for again in ("", ", repeated") for way in (_SPCONV, *_WAYS)]
        return [name for name in names if _P50 in self.found.get(name, {})]

    def span(self, way: str) -> RangeBar:
        found = self.found[way]
        first = f"first call {_ms(found[_FIRST])} ms" if _FIRST in found else ""
        made = f"made in {_ms(found[_MAKE])} ms" if _MAKE in found else ""
        note = "; ".join(part for part in (f"worst {_ms(found[_WORST])} ms", first, made) if part)
        kind = way.partition(", ")[0]
        return RangeBar(f"{self.net}, {way}", found[_P50], found[_P50], max(found[_P50], found[_WORST]), kind, note)

    def times(self, way: str) -> str:
        """The median, and in parentheses the worst call of the second half."""
        found = self.found.get(way, {})
        return f"{_ms(found[_P50])} ({_ms(found[_WORST])})" if _P50 in found and _WORST in found else _ABSENT

    def first(self, way: str) -> str:
        """Seconds until the first result, including capture or compilation."""
        found = self.found.get(way, {})
        return f"{(found[_FIRST] + found.get(_MAKE, 0.0)) / 1e3:.2g}" if _FIRST in found else _ABSENT

    def ratio(self, way: str) -> str:
        """Speedup over spconv, as text."""
        return f"{self.ratios[way]:.2f}" if way in self.ratios else _ABSENT


def cells(rows: Sequence[Row]) -> list[Cell]:
    """Cells by network, mode, device and clock, in the order of the rows; tiny scenes are left out."""
    found: dict[tuple[str, str, str, str], Cell] = {}
    for row in rows:
        place = re.fullmatch(rf"{STREAM}/(?P<mode>[\w-]+)/(?P<way>\w+)(?P<again>/repeated)?", row.case)
        if row.suite != "stream" or row.clock not in CLOCKS or place is None or row.case.startswith("tiny/"):
            continue
        key = place["group"], place["mode"], row.device, row.clock
        found.setdefault(key, Cell(*key)).add(row, place["way"] + (", repeated" if place["again"] else ""))
    return list(found.values())


def streams(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each device and clock, a panel per mode: p50 as a bar, with a line to the worst call of the second half."""
    found = [cell for cell in cells(rows) if cell.ways]
    for device, clock in dict.fromkeys((cell.device, cell.clock) for cell in found):
        own = [cell for cell in found if (cell.device, cell.clock) == (device, clock)]
        panels = tuple(
            Ranges(
                f"{title}, clock {clock}",
                "ms",
                tuple(cell.span(way) for cell in own if cell.mode == mode for way in cell.ways),
            )
            for mode, title in MODES.items()
            if any(cell.mode == mode for cell in own)
        )
        note = (
            "Milliseconds of a scene, kernel maps included; a bar is the median over scenes that never come twice, its "
            "line ends at the worst one of the second half. Networks of public layers alone. Lower is better."
        )
        every = [row for cell in own for row in cell.rows]
        name = stem(f"stream-{device}{'' if clock == 'wall' else f'-{clock}'}")
        yield Chart(name, "Streams of scenes never seen", note, told(every), panels)


def _newest(found: Sequence[Cell]) -> list[Cell]:
    """Of GPUs, and of CPUs by their number of threads, the newest cell of each network and mode, by the wall clock if
    there is one; GPUs first."""
    newest: dict[tuple[str, ...], Cell] = {}
    for cell in found:
        threads = re.search(r"\d+ threads", cell.device)
        key = threads[0] if threads else "", cell.net, cell.mode
        newest[key] = max(newest.get(key, cell), cell, key=_age)
    return [newest[key] for key in sorted(newest, key=lambda key: key[0])]


def _age(cell: Cell) -> tuple[str, bool]:
    return max(row.date for row in cell.rows), cell.clock == "wall"


def stream_table(rows: Sequence[Row]) -> str:
    """Markdown table with a line for each network, mode and kind of device, see _newest; "" without rows."""
    head = (
        "network, mode, device, clock",
        *(f"{way}, ms" for way in (_SPCONV, *_WAYS)),
        f"times as fast as spconv: {', '.join(_WAYS)}",
        f"first result, s: {', '.join((_SPCONV, *_WAYS))}",
    )
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    found = cells(rows)
    for cell in _newest(found):
        columns = (
            ", ".join((cell.net, MODES.get(cell.mode, cell.mode), cell.device, cell.clock)),
            *(cell.times(way) for way in (_SPCONV, *_WAYS)),
            ", ".join(cell.ratio(way) for way in _WAYS),
            ", ".join(cell.first(way) for way in (_SPCONV, *_WAYS)),
        )
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) if found else ""


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
