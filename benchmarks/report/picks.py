"""Numbers picked from the rows of the results file: what we measured, beside what a paper publishes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.results import geomean, grouped
from benchmarks.harness.rows import ANY, Row
from benchmarks.peers.published import figure

MISSING = "not measured"
_GPU = "NVIDIA "


@dataclass(frozen=True)
class Found:
    """A number, and the row that it is of."""

    value: float
    row: Row


@dataclass(frozen=True)
class Pick:
    """The newest number of each case on a GPU (or counted).

    case: pattern of whole names. peer: pattern of how peers' names begin. dtype: "" for any. show: "ratio": the peer's
    value over ours, of several peers the best one's; "value"; "share": our value over the peer's, in percent; "per
    second": of milliseconds. over: show the value of this case over ours, of the same device and date. times: a factor.
    best: the last part of a case names one of our ways, and the one with the greatest number counts.
    """

    suite: str
    case: str
    metric: str = "time"
    clock: str = "gpu"
    peer: str = ""
    dtype: str = ""
    show: str = "ratio"
    over: str = ""
    times: float = 1.0
    best: bool = False

    def found(self, rows: Sequence[Row]) -> list[Found]:
        """A number for each case, in the order of the rows."""
        held = grouped((row for row in rows if self._holds(row)), lambda row: row.case)
        numbers = [Found(self.times * value, row) for own in held.values() for value, row in self._of(own, rows)]
        if not self.best:
            return numbers
        cells = grouped(numbers, lambda one: one.row.case.rpartition("/")[0])
        return [max(own, key=lambda one: one.value) for own in cells.values()]

    def _holds(self, row: Row, case: str = "") -> bool:
        known = (row.suite, row.metric, row.clock) == (self.suite, self.metric, self.clock)
        at_hand = (row.device == ANY or row.device.startswith(_GPU)) and self.dtype in ("", row.dtype)
        if not known or not at_hand:
            return False
        return bool(re.match(self.peer, row.peer) and re.fullmatch(case or self.case, row.case))

    def _of(self, own: Sequence[Row], rows: Sequence[Row]) -> list[tuple[float, Row]]:
        """The number of one case, from the rows of its newest run; none if there is nothing to compare with."""
        run = _newest(own)
        newest = run[-1]
        if self.over:
            rivals = [row for row in rows if self._holds(row, self.over)]
            same = [row for row in rivals if (row.device, row.date) == (newest.device, newest.date)]
            return [(same[-1].value / newest.value, newest)] if same and newest.value else []
        if self.show == "ratio":
            ratios = [row.ratio for row in run if row.value]
            return [(min(ratios), newest)] if ratios else []
        shown = {"value": newest.value, "share": 100 * newest.value / (newest.peer_value or 1)}
        return [(shown[self.show] if self.show in shown else 1e3 / newest.value, newest)]

    def text(self, rows: Sequence[Row]) -> str:
        """The number; of several cases the geometric mean, the least and the greatest."""
        values = [one.value for one in self.found(rows)]
        if not values:
            return MISSING
        if len(values) == 1:
            return told(values[0])
        return f"{told(geomean(values))} ({told(min(values))} to {told(max(values))})"


def _newest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the newest run: of its day, commit and device."""
    last = max(enumerate(rows), key=lambda one: (one[1].date, one[0]))[1]
    return [row for row in rows if (row.date, row.commit, row.device) == (last.date, last.commit, last.device)]


def told(value: float) -> str:
    """Three digits, whole numbers from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Line:
    """A line of a table. place: of the paper, "" as in the line before; paper: its numbers; ours: numbers side by side,
    or a text where nothing can be measured."""

    place: str
    setting: str
    paper: str
    ours: Sequence[Pick] | str
    unit: str = ""

    def cells(self, rows: Sequence[Row]) -> list[str]:
        """Place, setting, the paper's, ours, and where ours was measured."""
        head = [self.place, self.setting, self.paper + (self.unit if self.paper[-1:].isdigit() else "")]
        if isinstance(self.ours, str):
            return [*head, self.ours, ""]
        texts = [pick.text(rows) for pick in self.ours]
        if all(text == MISSING for text in texts):
            return [*head, MISSING, ""]
        used = [one.row for pick in self.ours for one in pick.found(rows)]
        return [*head, ", ".join("–" if text == MISSING else text for text in texts) + self.unit, _where(used)]


def _where(rows: Sequence[Row]) -> str:
    """Cards and last day: H200, 11-22."""
    cards = dict.fromkeys("counted" if row.device == ANY else row.device.split()[1] for row in rows)
    return f"{' and '.join(cards)}, {max(row.date for row in rows)[5:]}"


# What lines of several papers have in common

KITTI, NUSCENES = "minkunet-kitti-1x/fp16/inference", "minkunet-nuscenes-1f/fp16/inference"
WAYMO, DETECTED = "centerpoint-waymo-1f/fp16/inference", "centerpoint-nuscenes-10f/fp16/inference"
tuner, workloads = partial(Pick, "tuner"), partial(Pick, "workloads")
"""Picks of these suites."""
_SEVEN = r"(?!spconv-net)[^/]+/{}/{}(/generated)?"
"""The seven networks in a precision and a mode."""
LATER = 2.9 / 1.7, 3.3 / 1.7, 2.2 / 1.7
"""How much slower than SpConv 2.3 MinkowskiEngine, SpConv 1.2 and TorchSparse are: TorchSparse++, figure 14, A100."""


def numbers(paper: str, place: str, row: str, *columns: str) -> str:
    """Numbers of a row of a table or figure: of these columns, or all."""
    held = figure(paper, place).values[row]
    if set(held) == {"least", "most"}:
        return f"{held['least']:g} to {held['most']:g}"
    return ", ".join(f"{held[column]:g}" for column in columns or held)


def seven(precision: str, mode: str, clock: str, times: float = 1.0) -> Pick:
    """The seven networks over spconv, times a factor."""
    return workloads(_SEVEN.format(precision, mode), clock=clock, peer="spconv", times=times)


def stream(mode: str, way: str = "compiled") -> tuple[Pick, ...]:
    """U-Net and encoder on streams of new scenes."""
    return tuple(Pick("stream", f"{net}/{mode}/{way}", "p50", "wall", "spconv") for net in ("unet", "encoder"))


def ways(network: str, study: str, names: str, metric: str = "time", show: str = "ratio") -> tuple[Pick, ...]:
    """The ways of these names, separated by spaces, of a study of the suite `tuner`."""
    return tuple(tuner(f"{network}/{study}-{way}", metric, show=show) for way in names.split())
