"""Charts as PNG pictures, drawn by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.charts import Bars, Chart, Heat, Lines, Ranges, Stacks, colours
from pumice.errors import FileError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 11.0
"""Width in inches, at 130 dots per inch."""
_INK, _SOFT, _RULE = "#1a1f2b", "#5a6474", "#d5dae2"
_ROOM = 140
"""Total letters of tick labels that fit below an axis."""
_BESIDE = 95
"""The same if the legend is beside the panel."""
_COLUMNS = 5
"""Minimum number of columns that a panel of tiles has room for."""
_FEW = 44
"""Maximum number of bars that are labelled with their values."""
_FEW_WHOLE = 24
"""The same for stacked bars, whose labels are longer."""


def draw(folder: Path, chart: Chart) -> Path:
    """Write folder/NAME.png and return its path. Raises FileError if it cannot be written."""
    # The object interface needs no display and changes no global state of matplotlib.
    from matplotlib.figure import Figure

    heights = [_HEIGHTS[type(panel)](panel) for panel in chart.panels]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.75), dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(chart.title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=_INK)
    figure.supxlabel(chart.source, x=0.01, ha="left", fontsize=7.5, color=_SOFT)
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, panel in zip(axes, chart.panels, strict=True):
        axis.set_title(panel.title, loc="left", fontsize=10, color=_INK)
        axis.tick_params(labelsize=8, colors=_SOFT, length=0)
        axis.spines[:].set_visible(False)
        _DRAW[type(panel)](axis, panel)
    return saved(figure, folder / f"{chart.name}.png")


def saved(figure: Any, path: Path) -> Path:
    """Write a figure. Raises FileError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise FileError(f"{path}: expected a file that can be written, found: {error.strerror}") from error
    return path


def _bars(axis: Axes, panel: Bars) -> None:
    # The second limit keeps few bars from becoming wide.
    width = min(0.82 / max(1, len(panel.series)), 0.1 * max(2, len(panel.groups)))
    found = colours(list(panel.series))
    small = len(panel.groups) * len(panel.series) <= _FEW
    for place, (name, values) in enumerate(panel.series.items()):
        shift = (place - (len(panel.series) - 1) / 2) * width
        there = [(n + shift, value) for n, value in enumerate(values) if value is not None]
        bars = axis.bar(*_sides(there), width=0.92 * width, color=found[name], label=name, zorder=2)
        if small:
            axis.bar_label(bars, fmt=_short, fontsize=6.5, color=_INK, padding=1, path_effects=_halo())
    if panel.mean is not None:
        axis.axhline(panel.mean, color=_INK, linewidth=1, linestyle=(0, (5, 3)), zorder=2.5)
    if panel.level is not None:
        axis.axhline(panel.level, color=_SOFT, linewidth=0.8, zorder=1.5)
    if len(panel.groups) == 1:
        axis.set_xlim(-1, 1)
    _ticks(axis, panel.groups)
    _valued(axis, panel.axis)
    _legend(axis, panel.title, list(panel.series))


def _stacks(axis: Axes, panel: Stacks) -> None:
    found, below = colours(list(panel.parts)), [0.0] * len(panel.bars)
    for name, values in panel.parts.items():
        held = [value or 0.0 for value in values]
        axis.bar(range(len(below)), held, bottom=below, width=0.72, color=found[name], label=name, zorder=2)
        below = [low + value for low, value in zip(below, held, strict=True)]
    if len(below) <= _FEW_WHOLE:
        for place, whole in enumerate(below):
            axis.annotate(f"{whole:.3g}", (place, whole), (0, 2), "data", "offset points", fontsize=7, ha="center")
    _ticks(axis, panel.bars)
    _valued(axis, panel.axis)
    _legend(axis, panel.title, list(panel.parts))


def _lines(axis: Axes, panel: Lines) -> None:
    for place, (name, colour) in enumerate(colours(list(panel.lines)).items()):
        there = [(n, value) for n, value in enumerate(panel.lines[name]) if value is not None]
        mark = "osD^vP*X"[place % 8]
        axis.plot(*_sides(there), marker=mark, markersize=5, linewidth=1.6, color=colour, label=name, zorder=2)
    axis.set_xlim(-0.4, len(panel.steps) - 0.6)
    for name, texts in panel.marks.items():
        for at, (text, value) in enumerate(zip(texts, panel.lines[name], strict=True)):
            if text and value is not None:
                place = (at, value), (5, 4), "data", "offset points"
                axis.annotate(text, *place, fontsize=6.5, color=_SOFT, path_effects=_halo())
    _ticks(axis, panel.steps, _BESIDE)
    axis.set_xlabel(panel.about, fontsize=8.5, color=_SOFT)
    _valued(axis, panel.axis)
    _logarithmic(axis, "y", *panel.ends)
    axis.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=_INK)


def _ranges(axis: Axes, panel: Ranges) -> None:
    found = colours(list(dict.fromkeys(span.kind for span in panel.spans)))
    for kind, colour in found.items():
        chosen = [(n, span) for n, span in enumerate(panel.spans) if span.kind == kind]
        places, spans = zip(*chosen, strict=True)
        values = [span.value for span in spans]
        axis.barh(places, [v - 1 for v in values], left=1, height=0.66, color=colour, label=kind, zorder=2)
        ends = [[s.value - s.least for s in spans], [s.most - s.value for s in spans]]
        axis.errorbar(values, places, xerr=ends, fmt="none", ecolor=_INK, elinewidth=0.9, capsize=2.5, zorder=3)
    for place, span in enumerate(panel.spans):
        told = _short(span.value)
        axis.annotate(told, (max(span.most, 1), place), (6, 0), "data", "offset points", fontsize=8, va="center")
    axis.set_yticks(range(len(panel.spans)), [span.name for span in panel.spans])
    axis.invert_yaxis()
    axis.set_ylim(len(panel.spans) - 0.4, -0.6)
    _logarithmic(axis, "x", *panel.ends)
    axis.axvline(1, color=_SOFT, linewidth=0.9, zorder=2.5)
    axis.set_xlabel(panel.axis, fontsize=8.5, color=_SOFT)
    axis.grid(axis="x", color=_RULE, linewidth=0.6, zorder=0)
    axis.tick_params(axis="y", labelcolor=_INK)
    axis.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=_INK)


def _heat(axis: Axes, panel: Heat) -> None:
    from matplotlib.patches import Patch, Rectangle

    found = colours(list(panel.kinds))
    for (row, column), tile in panel.tiles.items():
        x, y = panel.columns.index(column), panel.rows.index(row)
        axis.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=found[tile.kind], linewidth=0))
        axis.text(x, y, tile.text, ha="center", va="center", fontsize=7.5, color=readable(found[tile.kind]))
    # Room for several columns keeps a single one from filling the panel.
    width = max(len(panel.columns), _COLUMNS)
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(len(panel.rows) - 0.5, -0.5)
    axis.set_yticks(range(len(panel.rows)), panel.rows)
    _ticks(axis, panel.columns, _BESIDE * len(panel.columns) // width)
    patches = [Patch(color=found[kind], label=kind) for kind in panel.used]
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axis.legend(handles=patches, fontsize=7.5, frameon=False, labelcolor=_INK, **place)


_DRAW: Mapping[type, Callable[[Any, Any], None]] = {
    Bars: _bars,
    Stacks: _stacks,
    Lines: _lines,
    Ranges: _ranges,
    Heat: _heat,
}
_HEIGHTS: Mapping[type, Callable[[Any], float]] = {
    Bars: lambda panel: 2.9,
    Stacks: lambda panel: 3.0,
    Lines: lambda panel: 2.7,
    Ranges: lambda panel: 0.9 + 0.27 * len(panel.spans),
    Heat: lambda panel: 0.8 + 0.36 * len(panel.rows),
}
"""Height of a panel in inches."""


def readable(colour: str) -> str:
    """Black or white, whichever is readable on a background colour (#rrggbb)."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#ffffff"


def _halo() -> list[Any]:
    """A white outline that keeps text readable on lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2, foreground="white")]


def _sides(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ticks(axis: Axes, names: tuple[str, ...], letters: int = _ROOM) -> None:
    """Label ticks with names, broken into lines if too long for one, slanted if still too long."""
    room = letters // max(1, len(names))
    broken = [_broken(name, room) for name in names]
    slanted = any(len(line) > room for name in broken for line in name.split("\n"))
    how = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axis.set_xticks(range(len(names)), names if slanted else broken, **how)
    axis.tick_params(axis="x", labelcolor=_INK)


def _broken(name: str, room: int) -> str:
    """A name broken at word ends into lines of at most `room` letters."""
    lines = [""]
    for word in re.findall(r"\n|[^-_/ \n]*[-_/ ]|[^-_/ \n]+", name):
        if word == "\n" or (lines[-1] and len(lines[-1]) + len(word.rstrip()) > room):
            lines.append("")
        lines[-1] += word.strip("\n")
    return "\n".join(lines)


def _valued(axis: Axes, text: str) -> None:
    axis.margins(y=0.08)
    axis.set_ylabel(text, fontsize=8.5, color=_SOFT)
    axis.grid(axis="y", color=_RULE, linewidth=0.6, zorder=0)
    axis.set_axisbelow(True)


def _legend(axis: Axes, title: str, names: list[str]) -> None:
    """Place the legend beside the title if both fit, else beside the panel."""
    if len(names) < 2:
        return
    above = len(title) + sum(len(name) + 6 for name in names) < _ROOM
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": len(names), "borderaxespad": 0.1}
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axis.legend(fontsize=8, frameon=False, labelcolor=_INK, columnspacing=1.2, **(place if above else beside))


def _logarithmic(axis: Axes, which: str, ends: tuple[float, float], marks: list[float]) -> None:
    """Set a logarithmic axis with plain numbers at these ticks."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    side = axis.xaxis if which == "x" else axis.yaxis
    getattr(axis, f"set_{which}scale")("log")
    getattr(axis, f"set_{which}lim")(*ends)
    side.set_major_locator(FixedLocator(marks))
    side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    side.set_minor_locator(NullLocator())
