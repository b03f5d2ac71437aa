"""Charts of captured networks in the report: milliseconds by scene, and latencies over varied scans.

From rows of the suite `engine`. Of each way, captured or eager, the newest row counts, with its peers' values. Each
scene has a panel per clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from benchmarks.harness.families import MODES, NETWORK
from benchmarks.harness.results import grouped, told
from benchmarks.harness.rows import Row
from benchmarks.report.charts import Bars, Chart, Values, stem
from benchmarks.scenes.engine import BEST, GOAL

_WAYS = ("captured", "captured-tensor", "eager")
_PEERS = {"spconv": "spconv", BEST: f"{BEST} peer"}
_QUANTILES = ("p50", "p99", "p99.9", "max")
_VARIED = r"(?P<scans>.+)/(?P<precision>[^/]+)/varied/(?P<capacity>\d+)/(?P<which>all|later)"
Held = dict[str, dict[str, float]]
"""Values by series, then by group."""


def captured(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each mode, precision and device, milliseconds by scene: captured, eager, spconv, the best peer, the goals."""
    times = [row for row in rows if row.suite == "engine" and row.metric == "time"]
    found = grouped(
        times,
        lambda row: (place := re.fullmatch(NETWORK, row.case)) and (place["mode"], place["precision"], row.device),
    )
    for mode in MODES:
        for (other, precision, device), own in found.items():
            if other == mode:
                panels = tuple(_by_scene(own, clock) for clock in dict.fromkeys(row.clock for row in own))
                title = f"Captured and eager MinkUNet, {mode} in {precision}"
                note = "Milliseconds by scene, kernel maps included; lower is better."
                yield Chart(stem(f"engine-{mode}-{precision}-{device}"), title, note, told(own), panels)


def _by_scene(rows: Sequence[Row], clock: str) -> Bars:
    held: Held = {}
    for row in rows:
        place = re.fullmatch(NETWORK, row.case)
        if place is None or row.clock != clock:
            continue
        way = (place["rest"] or "").removeprefix("tuned/")
        held.setdefault(way, {})[place["group"]] = row.value
        if row.peer in _PEERS:
            held.setdefault(_PEERS[row.peer], {})[place["group"]] = row.peer_value
        elif row.peer == GOAL:
            name = f"goal, {'eager' if way == 'eager' else 'captured'}"
            held.setdefault(name, {})[place["group"]] = row.peer_value
    order = [*_WAYS, *_PEERS.values(), "goal, captured", "goal, eager"]
    return _bars(f"clock {clock}", held, [name for name in order if name in held])


def _bars(title: str, held: Held, order: Sequence[str]) -> Bars:
    groups = tuple(dict.fromkeys(group for name in order for group in held[name]))
    series: dict[str, Values] = {name: tuple(held[name].get(group) for group in groups) for name in order}
    return Bars(title, "ms", groups, series, level=None)


def latencies(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each device, p50, p99, p99.9 and maximum by capacity, with and without scans that waited for a capture."""
    times = [row for row in rows if row.suite == "engine" and row.metric in _QUANTILES]
    found = grouped(times, lambda row: (place := re.fullmatch(_VARIED, row.case)) and (place["precision"], row.device))
    for (precision, device), own in found.items():
        panels = tuple(panel for which in ("later", "all") if (panel := _spread(own, which)))
        title = f"Latency of captured MinkUNet over varied scans, {precision}"
        note = (
            "Milliseconds by capacity. The first scan of a capacity waits for its capture: the second panel has it, "
            "the first has not."
        )
        yield Chart(stem(f"engine-varied-{precision}-{device}"), title, note, told(own), panels)


def _spread(rows: Sequence[Row], which: str) -> Bars | None:
    held: dict[str, dict[int, float]] = {}
    for row in rows:
        place = re.fullmatch(_VARIED, row.case)
        if place is not None and place["which"] == which:
            held.setdefault(row.metric, {})[int(place["capacity"])] = row.value
    names = {"all": "all scans", "later": "without the first scan of each capacity"}
    ordered = {
        name: {f"{size:,} voxels": value for size, value in sorted(values.items())} for name, values in held.items()
    }
    return _bars(names[which], ordered, [name for name in _QUANTILES if name in held]) if held else None
