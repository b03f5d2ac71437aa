"""Charts of speed-ups, redundant products, map sizes and the history, from rows of the results file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.harness.families import FAMILIES, SAME_RUN, Family, suites_of
from benchmarks.harness.results import Compared, current, geomean, grouped, told
from benchmarks.harness.rows import Row
from benchmarks.report.charts import Bars, Chart, Lines, RangeBar, Ranges, by_number, numbered, stem
from benchmarks.report.summary import Line, headlines, lines
from benchmarks.suites.roofline import ALL_TAPS, SPLITS

FASTER, LESS = "times as fast", "times as little memory"
_WALKS = {ALL_TAPS: "all taps", **{name: f"{n} split{'s' * (n > 1)}" if n else name for name, n in SPLITS.items()}}


def overview(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each device, a chart of all means on one axis, the greatest first; and one of peak memory."""
    every = lines(rows)
    for name, what, axis, found in (
        ("overview", "Speed-ups", FASTER, headlines(every)),
        ("memory", "Peak memory", LESS, [line for line in every if line.family.of_memory]),
    ):
        for device in dict.fromkeys(line.device for line in found):
            own = sorted((line for line in found if line.device == device), key=lambda line: -line.mean.geomean)
            spans = tuple(map(_span, own))
            clocks = ", ".join(dict.fromkeys(line.clock for line in own))
            title = f"geometric mean (cases), least and most; clock {clocks}"
            used = [row for line in own for row in line.rows]
            note = "Every comparison in short: ours against the best of its rivals, on a logarithmic axis."
            yield Chart(f"{name}-{stem(device)}", f"{what}: {device}", note, told(used), (Ranges(title, axis, spans),))


def _span(line: Line) -> RangeBar:
    mean = line.mean
    name = f"{line.family.suite}: {line.name}, against {line.against} ({mean.cells})"
    note = f"least {mean.least.ratio:.2f} at {mean.least.place}, most {mean.most.ratio:.2f} at {mean.most.place}"
    return RangeBar(name, mean.geomean, mean.least.ratio, mean.most.ratio, f"rivals: {line.source}", note)


def speedups(rows: Sequence[Row]) -> Iterator[Chart]:
    """For each family and device, a chart with a panel per clock and rival; series are widths, or precisions."""
    found = lines(rows)
    for family in FAMILIES:
        for device in dict.fromkeys(line.device for line in found if line.family == family):
            own = [line for line in found if line.family == family and line.device == device]
            title = f"{family.suite}: {family.name}, {LESS if family.of_memory else FASTER} as a peer"
            name = stem(f"{family.suite}-{family.name}" + ("" if _alone(found, family) else f"-{device}"))
            used = [row for line in own for row in line.rows]
            yield Chart(
                name, title, _note(family), told(used), tuple(_panels(own, LESS if family.of_memory else FASTER))
            )


def _alone(found: Sequence[Line], family: Family) -> bool:
    return len({line.device for line in found if line.family == family}) == 1


def _note(family: Family) -> str:
    told = "The best of our ways against the best of the rivals, in the same run unless it says recorded."
    return f"{told} Dashed: the geometric mean, where it is of one precision." if family.rivals else told


def _panels(own: Sequence[Line], axis: str) -> Iterator[Bars]:
    groups: tuple[str, ...] = ()
    for (clock, rivals), parts in grouped(own, lambda line: (line.clock, line.rivals)).items():
        cells = [one for line in parts for one in line.found]
        groups = groups or _sorted(cells)
        extra = tuple(name for name in _sorted(cells) if name not in groups)
        title = f"against {rivals}, clock {clock}: {_means(cells)}"
        shown = [name for name in (*groups, *extra) if any(one.place.group == name for one in cells)]
        yield _bars((title, axis), shown, cells)


def _sorted(cells: Sequence[Compared]) -> tuple[str, ...]:
    """Groups sorted by number if they differ in numbers only, else by mean, the greatest first."""
    names = list(dict.fromkeys(one.place.group for one in cells))
    if numbered(names):
        return tuple(sorted(names, key=by_number))
    return tuple(sorted(names, key=lambda name: -geomean(one.ratio for one in cells if one.place.group == name)))


def _bars(titles: tuple[str, str], groups: Sequence[str], cells: Sequence[Compared]) -> Bars:
    series = list(dict.fromkeys(_series(cells, one) for one in cells))
    series = sorted(series, key=by_number) if numbered(series) else series
    held = {(one.place.group, _series(cells, one)): one for one in cells}
    if len(groups) == 1 and len(series) > 1:
        held = {(name, group): one for (group, name), one in held.items()}
        groups, series = series, list(groups)
    values, notes = {}, {}
    for name in series:
        own = [held.get((group, name)) for group in groups]
        values[name] = tuple(None if one is None else one.ratio for one in own)
        notes[name] = tuple("" if one is None else _cell(one) for one in own)
    means = list(_by_precision(cells).values())
    return Bars(*titles, tuple(groups), values, means[0] if len(means) == 1 else None, notes)


def _by_precision(cells: Sequence[Compared]) -> dict[str, float]:
    """The mean of each precision; precisions are not averaged."""
    names = dict.fromkeys(one.place.precision for one in cells)
    return {name: geomean(one.ratio for one in cells if one.place.precision == name) for name in names}


def _means(cells: Sequence[Compared]) -> str:
    found = _by_precision(cells)
    if len(found) == 1:
        return f"geometric mean {next(iter(found.values())):.2f}"
    return "geometric means " + ", ".join(f"{name} {mean:.2f}" for name, mean in found.items())


def _series(cells: Sequence[Compared], one: Compared) -> str:
    """The name of a cell's series: its width or the like, and its precision if there are several or no other name."""
    several = len({other.place.precision for other in cells}) > 1
    parts = (one.place.series, one.place.precision if several or not one.place.series else "")
    return " ".join(part for part in parts if part)


def _cell(one: Compared) -> str:
    row, way = one.row, f", {one.way}" if one.way else ""
    return (
        f"{row.value:.4g} {row.unit}{way}; {row.peer} {row.peer_value:.4g} {row.unit} ({row.peer_source})"
        f"\n{row.date}, {row.commit}"
    )


def redundancy(rows: Sequence[Row]) -> Iterator[Chart]:
    """Products computed over products needed, by number of splits; a panel per tile height."""
    own = [row for row in rows if row.metric == "redundancy" and re.fullmatch(_REDUNDANCY, row.case)]
    if not own:
        return
    places = {tuple(row.case.split("/")[i] for i in (1, 3, 4)): row for row in own}
    panels = []
    for block in sorted({int(key[1].removeprefix("b")) for key in places}):
        held = {(scene, way): row.value for (scene, size, way), row in places.items() if size == f"b{block}"}
        scenes = sorted({scene for scene, _ in held}, key=lambda scene: -held.get((scene, "unsorted"), 0.0))
        ways = [way for way in _WALKS if any(way == name for _, name in held)]
        values = {scene: tuple(held.get((scene, way)) for way in ways) for scene in scenes}
        notes = {scene: tuple(_wasted(held.get((scene, way))) for way in ways) for scene in scenes}
        steps = tuple(_WALKS[way] for way in ways)
        axis = "computed / needed"
        panels.append(Lines(f"tiles of {block} rows, 3x3x3", axis, steps, values, notes, about="splits of sorted rows"))
    note = (
        "Products that implicit GEMM computes, over those that meet an input: 1 is none in vain. Counted exactly, the "
        "same on every device."
    )
    yield Chart("redundancy", "Redundant computation against splits", note, told(own), tuple(panels))


def scaling(rows: Sequence[Row]) -> Iterator[Chart]:
    """Time to build a kernel map by number of voxels; a chart per device, by the gpu clock if there is one."""
    own = [row for row in rows if re.fullmatch(_SCALING, row.case) and row.peer_source == SAME_RUN]
    for device in dict.fromkeys(row.device for row in own):
        clock = min(row.clock for row in own if row.device == device)
        used = [row for row in own if (row.device, row.clock) == (device, clock)]
        places = {int(row.case.split("_")[1].partition("/")[0]): row for row in used}
        steps = sorted(places)
        names = {"Pumice": [places[n].value for n in steps], used[0].peer: [places[n].peer_value for n in steps]}
        values = {name: tuple(found) for name, found in names.items()}
        panel = Lines(f"clock {clock}", "ms", tuple(f"{n:,}" for n in steps), values, about="voxels")
        title = "3x3x3 submanifold map by number of voxels"
        yield Chart(f"maps-scaling-{stem(device)}", title, "Lower is better.", told(used), (panel,))


def offset_sizes(rows: Sequence[Row]) -> Iterator[Chart]:
    """Pairs per kernel offset of the maps of networks, a panel per network; see the study `offsets` of the tuner."""
    own = [(row, found) for row in rows if (found := re.fullmatch(_OFFSETS, row.case)) and row.metric == _PAIRS]
    # Counted, and so the same on all devices.
    newest = {(found["network"], found["map"], int(found["tap"])): row for row, found in own}
    panels = []
    for network in dict.fromkeys(network for network, _, _ in newest):
        maps = dict.fromkeys(name for of, name, _ in newest if of == network)
        steps = range(1 + max(tap for of, _, tap in newest if of == network))
        values = {name: tuple(_pairs(newest.get((network, name, tap))) for tap in steps) for name in maps}
        panels.append(Lines(network, "pairs", tuple(f"W{tap}" for tap in steps), values, about="kernel offset"))
    if panels:
        note = (
            "Of submanifold maps up to the centre, since mirror images have as many pairs; of strided maps all. "
            "Offsets are numbered with the last coordinate running fastest."
        )
        yield Chart("offset-sizes", "Map sizes by kernel offset", note, told([row for row, _ in own]), tuple(panels))


def _pairs(row: Row | None) -> float | None:
    return row.value if row is not None and row.value else None


_OFFSETS = r"(?P<network>[^/]+)/[^/]+/inference/offsets-W(?P<tap>\d+)/(?P<map>.+)"
_PAIRS = "fact:pairs"
_SCALING = r"scaling/surface_\d+/k3"
_REDUNDANCY = r"redundancy/[^/]+/k3/b\d+/[^/]+"


def _wasted(ratio: float | None) -> str:
    return "" if not ratio else f"{1 - 1 / ratio:.1%} of the products are with nothing"


def history(rows: Sequence[Row]) -> Iterator[Chart]:
    """Means of each suite, as of the results file after each commit, in order of the commits' first rows.

    rows: include superseded ones. If a commit measured only some cells of a family, older rows count for the others.
    """
    known: Known = {}
    dates: dict[str, str] = {}
    for row in rows:
        dates.setdefault(row.commit, row.date)
    until: set[str] = set()
    for commit in dates:
        until.add(commit)
        suites = {row.suite for row in rows if row.commit == commit}
        for line in headlines(lines(current([r for r in rows if r.commit in until and r.suite in suites]))):
            if any(row.commit == commit for row in line.rows):
                known.setdefault((line.family.suite, _label(line)), {})[commit] = line
    panels = [_history(suite, known, dates) for suite in suites_of(rows) if any(suite == name for name, _ in known)]
    used = [row for held in known.values() for line in held.values() for row in line.rows]
    if panels:
        note = (
            "Geometric means of speed-ups against rivals. Each point is the ledger as it stood after that commit's "
            "measurements; there is one where a commit measured some of the cells anew."
        )
        yield Chart("history", "History over commits", note, told(used), tuple(panels))


Known = dict[tuple[str, str], dict[str, Line]]
"""By suite and label, the line after each commit."""


def _label(line: Line) -> str:
    device = "" if line.clock == "gpu" else f" ({line.clock}, {line.device.split(',')[0]})"
    return f"{line.name} / {line.against}{device}"


def _history(suite: str, known: Known, dates: Mapping[str, str]) -> Lines:
    own = {label: held for (name, label), held in known.items() if name == suite}
    steps = [commit for commit in dates if any(commit in held for held in own.values())]
    values, notes, marks = {}, {}, {}
    for label, held in own.items():
        found = [held.get(commit) for commit in steps]
        values[label] = tuple(None if line is None else line.mean.geomean for line in found)
        notes[label] = tuple("" if line is None else _anew(line, c) for line, c in zip(found, steps, strict=True))
        marks[label] = tuple(_counts([None if line is None else line.mean.cells for line in found]))
    return Lines(
        suite,
        FASTER,
        tuple(_dated(steps, dates)),
        values,
        notes,
        marks,
        "commit; small numbers: cases, where they change",
    )


def _dated(commits: Sequence[str], dates: Mapping[str, str]) -> Iterator[str]:
    """Tick labels: commits, each with its date below if it differs from the previous one."""
    last = ""
    for commit in commits:
        yield commit[:7] + ("" if dates[commit] == last else f"\n{dates[commit]}")
        last = dates[commit]


def _counts(cells: Sequence[int | None]) -> Iterator[str]:
    """Numbers as text, "" where a number equals the one before."""
    last = None
    for count in cells:
        yield "" if count in (None, last) else str(count)
        last = last if count is None else count


def _anew(line: Line, commit: str) -> str:
    count = sum(row.commit == commit for row in line.rows)
    return f"{line.mean.cells} cells, {count} of them measured at this commit; least {line.mean.least.ratio:.2f}"
