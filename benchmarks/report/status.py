"""docs/status.md: all measured figures of the results file as Markdown tables, with the limits of each suite."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.families import SUITES
from benchmarks.harness.results import commits_of, current, days, read
from benchmarks.harness.rows import Row
from benchmarks.report.stream import stream_table
from benchmarks.report.summary import Line, about, bounded, lines, without_lines
from pumice.errors import FileError

HEAD = """# Status: what was measured

Generated from `bench/results.jsonl` by `python -m benchmarks report --markdown`; do not edit either by hand. A
speed-up is the baseline's time over ours, both of one run; `recorded` marks a baseline's time of another run. `wall` is
wall-clock time from an idle device to an idle device, `gpu` the time of its kernels alone. A newer row replaces an
older one of the same case, metric, baseline, clock and device.

Lines of peak memory (clock `count`) compare what a call takes at most on the GPU above what was allocated at its start,
results included: the baseline's memory over ours, so that more than 1 is less memory.
"""

CAVEATS: Mapping[str, str] = {
    "stream": "Networks written only with public layers, over scenes that never repeat; each mode of execution runs "
    "in a process of its own. Milliseconds: the median, in brackets the worst scene of the second half; speed-ups are "
    "of medians. The first result is the first call, and for captured networks the capture before it. `most-12000`: "
    "scenes cropped to 12,000 voxels at most. Cases ending in `repeated` (results file): the same scenes again.",
    "workloads": "Each case repeats one scene (`varied scans`: several scenes in turn), so kernels and plans for its "
    "sizes exist already. The suite `stream` has streams of new scenes.",
    "tuner": "Repeated scenes. `its default` is the same network untuned.",
    "engine": "Repeated scenes, only `pumice.models`; the host limits eager passes, and differs between machines.",
    "conv-forward": "One layer, its kernel map already built, repeated. Building the map is the suite `maps`.",
    "conv-train": "One layer, its kernel map already built, repeated.",
    "maps": "Shuffled coordinates; `gpu` times are of a CUDA graph.",
    "einsum": "Operands already converted to their formats, repeated.",
    "points": "The blocks of points are built in every call, as torch_cluster and SciPy build their trees. Attention: "
    "patches of 1,024 tokens, all full.",
    "cpu-conv": "The kernel map is already built, which favours both: if it is built in the call, and for whole "
    "networks (suite `stream` on a CPU), spconv is faster. spconv has a data race: with two threads it is wrong.",
}
"""Remarks on the figures of a suite."""

_MARKS = re.compile(r"(<!-- table: stream -->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = ("what", "precision", "clock", "against", "cases", "speed-up (geometric mean)", "least", "most", "measured")


def write(ledger: Path, file: Path) -> Path:
    """Write the page of a results file and return its path. Raises FileError if either file fails."""
    text = page(current(read(ledger)))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{file}: expected a file that can be written, found: {error.strerror}") from error
    return file


def front(readme: str, rows: Sequence[Row]) -> str:
    """The README with the table of the suite `stream` replaced between its markers."""
    return _MARKS.sub(lambda found: f"{found[1]}{stream_table(rows)}\n{found[2]}", readme)


def page(rows: Sequence[Row]) -> str:
    """The page as Markdown. rows: not superseded ones."""
    found, shares = lines(rows), bounded(rows)
    parts = [HEAD]
    for suite in SUITES:
        own = [line for line in found if line.family.suite == suite]
        if own:
            parts.append("\n".join(_suite(suite, own)))
        if suite == "stream" and own:
            parts.append(stream_table(rows))
    parts.append("\n".join(_bounds(shares)))
    absent = without_lines(rows, found)
    parts.append("\n".join(["## Not compared\n", *(f"- `{suite}`: {what}" for suite, what in absent.items())]))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table; "|" within a cell becomes "/"."""
    for cells in (names, ["---"] * len(names), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _suite(suite: str, found: Sequence[Line]) -> Iterator[str]:
    yield f"## `{suite}`: {about(suite)}\n"
    if suite in CAVEATS:
        yield CAVEATS[suite] + "\n"
    for device in dict.fromkeys(line.device for line in found):
        own = sorted((line for line in found if line.device == device), key=lambda line: line.clock != "wall")
        yield f"{device}:\n"
        yield from table(COLUMNS, [_cells(line) for line in own])
        yield ""


def _cells(line: Line) -> list[str]:
    mean = line.mean
    least = f"{mean.least.ratio:.2f} ({mean.least.place})"
    figures = [str(mean.cells), f"**{mean.geomean:.2f}**", least, f"{mean.most.ratio:.2f}"]
    return [line.family.name, line.precision, line.clock, line.rivals, *figures, _measured(line)]


def _measured(line: Line) -> str:
    commits = commits_of(line.rows)
    return f"{days(line.rows)}, {commits[-1]}" + (f" and {len(commits) - 1} more" if len(commits) > 1 else "")


def _bounds(found: Sequence[Line]) -> Iterator[str]:
    yield "## Fractions of the bounds\n"
    yield "The lower bound of time by memory, caches or arithmetic, over our time; bounds are modelled, not measured.\n"
    names = ("suite", "what", "precision", "bounds", "cases", "geometric mean", "least", "device")
    rows = [
        [line.family.suite, line.family.name, line.precision, line.against, str(line.mean.cells)]
        + [f"{line.mean.geomean:.0%}", f"{line.mean.least.ratio:.0%}", line.device]
        for line in found
        if line.clock != "wall"
    ]
    yield from table(names, rows)
