"""Results of `python -m benchmarks profile` as tables in a terminal, an HTML page, and a flame graph (PNG)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.profile.parts import OTHER, PARTS, HostTime, Shares, part_of, place_of
from benchmarks.profile.profile import Profiled
from benchmarks.profile.trace import Node
from benchmarks.report.charts import colours
from benchmarks.report.html import table
from benchmarks.report.png import readable, saved
from pumice.cli.page import MISSING, Page, card, digits, panel, write_page

COLOURS: Mapping[str, str] = colours(list(PARTS))
_MANY, _FEW = 60, 14
"""Rows of a table, on the page and in the terminal."""
STYLE, SCRIPT = (Path(__file__).parents[1] / "report" / name for name in ("results.css", "results.js"))
_THIN = 0.002
"""Blocks below this share of a pass are left out of the flame graph."""
_BARE = 0.001
"""A node with own time below this share of a pass and a single visible child is replaced by the child."""


@dataclass(frozen=True)
class FlameBlock:
    """A block of the flame graph: `width` microseconds from `start`, `depth` blocks below the top.

    number: its index; above: its parent's index (-1 for the top).
    """

    number: int
    above: int
    label: str
    told: str
    part: str
    start: float
    width: float
    depth: int
    layer: str = ""


def blocks(found: Profiled) -> list[FlameBlock]:
    """The call tree as blocks, without thin ones and without chains of calls that only call one another."""
    root, scale = found.traced.root, 1e6 / found.traced.passes
    whole = max(root.total * scale, 1e-9)
    made: list[FlameBlock] = []

    def add(node: Node, above: FlameBlock | None, start: float) -> None:
        node = _through(node, _BARE * whole / scale, _THIN * whole / scale)
        layer = next((one.layer for one in node.above() if one.layer), "")
        label = _label(node, layer, above)
        told = f"{layer} {node.name} ({place_of(node)}), {node.calls / found.traced.passes:.4g} calls"
        width, part = node.total * scale, part_of(node) if node.parent else OTHER
        number, depth = (-1, 0) if above is None else (above.number, above.depth + 1)
        block = FlameBlock(len(made), number, label, told, part, start, width, depth, layer)
        made.append(block)
        at = start
        for child in sorted(node.children.values(), key=lambda child: -child.total):
            if child.total * scale >= _THIN * whole:
                add(child, block, at)
                at += child.total * scale

    add(root, None, 0.0)
    return made


def _through(node: Node, bare: float, thin: float) -> Node:
    """The first descendant-or-self that spends time itself, or has several visible children."""
    while node.parent is not None and node.own < bare:
        thick = [child for child in node.children.values() if child.total >= thin]
        if len(thick) != 1 or node.total - thick[0].total > bare:
            break
        (node,) = thick
    return node


def _label(node: Node, layer: str, above: FlameBlock | None) -> str:
    """The layer's name relative to the enclosing layer if a layer begins here; else the function's name."""
    outer = "" if above is None else above.layer
    if not layer or layer == outer:
        return node.name
    return layer.removeprefix(f"{outer.partition(' ')[0]}.")


# The page


def write(found: Profiled, folder: Path) -> tuple[Path, Path]:
    """Write profile.html and profile.png into the folder. Raises FileError if they cannot be written."""
    made = blocks(found)
    picture = draw(folder / "profile.png", found, made)
    body = "\n".join((_header(found), _parts(found), _flame(), _functions(found.shares), _layers(found.shares)))
    page = Page(f"Pumice: {found.title}", body, {"flame": _icicle(made)}, ("report.css", STYLE), SCRIPT)
    return write_page(folder / "profile.html", page), picture


def _header(found: Profiled) -> str:
    wall, spent = 1e3 * found.traced.wall, found.busy
    device = MISSING if spent is None else digits(1e3 * spent)
    cards = (
        card("A pass", digits(wall), "ms", f"from idle to idle, the mean of {found.traced.passes}", main=True),
        card("The host", digits(found.shares.total / 1e3), "ms", "as it was traced, without what tracing costs"),
        card("The device", device, "ms", found.why or "busy with kernels and copies, as its profiler tells"),
        card("Calls", f"{sum(one.calls for one in found.shares.functions):,.0f}", "", "of Python and of C, in a pass"),
    )
    subtitle = f'<p class="subtitle">{escape(found.where)}</p>'
    title = f'<p class="brand">pumice</p><h1>{escape(found.title)}</h1>{subtitle}'
    return f'<header>{title}</header><section class="cards">{"".join(cards)}</section>'


def _parts(found: Profiled) -> str:
    rows = [[_key(part), _us(v), f"{v / found.shares.total:.1%}"] for part, v in _by_part(found.shares)]
    note = "Microseconds of the host in a pass. A call of torch belongs to what it was called from."
    if found.hidden > 1:
        note += f" {found.hidden:,.0f} us are missing: waits for the device, of which a traced, slower host has fewer."
    return panel("By part", note, table(("part", "us", "share"), rows))


def _flame() -> str:
    note = (
        "Each block is a function or a layer, as wide as the time in it and below it; a click goes into one. Chains of "
        "calls that do nothing themselves are one block, and the thinnest are left out."
    )
    return panel("Who calls whom", note, '<div class="inside"><div class="plot" id="flame"></div></div>')


def _functions(shares: Shares) -> str:
    rows = [
        [escape(one.name), escape(one.where), _calls(one), _us(one.total), _key(_most(one))]
        for one in shares.functions[:_MANY]
    ]
    note = f"What functions spend themselves; {len(shares.functions):,} in all."
    return panel("By function", note, table(("function", "file", "calls", "us", "part"), rows))


def _layers(shares: Shares) -> str:
    used = [part for part in PARTS if shares.parts.get(part)]
    rows = [
        [escape(one.name or "outside of layers"), _us(one.total), *(_us(one.parts.get(part, 0.0)) for part in used)]
        for one in shares.layers
    ]
    note = "A layer with what it calls, without the layers within it. Maps that several share are with who asked first."
    return panel("By layer", note, table(("layer", "us", *used), rows))


def _key(part: str) -> str:
    return f'<span style="color:{COLOURS[part]}">&#9632;</span> {escape(part)}'


def _us(value: float) -> str:
    return f"{value:,.1f}" if value else ""


def _calls(one: HostTime) -> str:
    return f"{one.calls:,.4g}"


def _most(one: HostTime) -> str:
    return max(one.parts, key=lambda part: one.parts[part])


def _by_part(shares: Shares) -> list[tuple[str, float]]:
    return sorted(shares.parts.items(), key=lambda item: -item[1])


def _icicle(made: Sequence[FlameBlock]) -> dict[str, Any]:
    """The flame graph for plotly.js, in which the value of a block is its width minus those of its children."""
    inner = [0.0] * len(made)
    for block in made:
        if block.above >= 0:
            inner[block.above] += block.width
    trace = {
        "type": "icicle",
        "ids": [str(block.number) for block in made],
        "parents": ["" if block.above < 0 else str(block.above) for block in made],
        "labels": [escape(block.label) for block in made],
        "values": [max(0.0, round(b.width - held, 3)) for b, held in zip(made, inner, strict=True)],
        "customdata": [[round(block.width, 1), escape(block.told), block.part] for block in made],
        "hovertemplate": "%{label}: %{customdata[0]} us<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
        "branchvalues": "remainder",
        "tiling": {"orientation": "v"},
        "sort": False,
        "marker": {"colors": [COLOURS[block.part] for block in made], "line": {"width": 0.5, "color": "#0b0e14"}},
        "textfont": {"color": [readable(COLOURS[block.part]) for block in made]},
    }
    layout = {
        "height": 120 + 26 * (1 + max(block.depth for block in made)),
        "margin": {"l": 4, "r": 4, "t": 28, "b": 4},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12},
    }
    return {"data": [trace], "layout": layout}


# The picture


def draw(path: Path, found: Profiled, made: Sequence[FlameBlock]) -> Path:
    """Draw the flame graph, with the pass on top and callees below. Raises FileError if it cannot be written."""
    # The object interface needs no display and changes no global state of matplotlib.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    levels = 1 + max(block.depth for block in made)
    figure = Figure(figsize=(15, 1.5 + 0.24 * levels), dpi=130, facecolor="white", layout="constrained")
    axis = figure.subplots()
    whole = max(block.width for block in made)
    for block in made:
        colour = COLOURS[block.part]
        axis.add_patch(
            Rectangle((block.start, block.depth), block.width, 0.94, facecolor=colour, edgecolor="white", linewidth=0.4)
        )
        room = int(170 * block.width / whole)
        if room >= 4:
            text = block.label if len(block.label) <= room else block.label[: room - 1] + "…"
            axis.text(
                block.start + whole / 700, block.depth + 0.5, text, fontsize=6.5, va="center", color=readable(colour)
            )
    axis.set(xlim=(0, whole), ylim=(levels, 0), yticks=[], xlabel="microseconds of the host, in a pass")
    axis.spines[:].set_visible(False)
    keys = [Patch(color=COLOURS[part], label=f"{part} {v:,.0f} us") for part, v in _by_part(found.shares)]
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12 - 0.5 / levels)}
    axis.legend(handles=keys, ncols=5, fontsize=8, frameon=False, **below)
    busy_ = "" if found.busy is None else f", device busy {1e3 * found.busy:.3g} ms"
    figure.suptitle(f"{found.title}: a pass {1e3 * found.traced.wall:.3g} ms{busy_}", x=0.01, ha="left", fontsize=12)
    axis.set_title(found.where, loc="left", fontsize=8, color="#5a6474")
    return saved(figure, path)


# The terminal


def summary(found: Profiled) -> str:
    """A pass in two lines of text."""
    lines = [f"{found.title}: {found.where}", f"a pass {1e3 * found.traced.wall:.3f} ms from idle to idle"]
    lines[1] += f", the host's calls {found.shares.total / 1e3:.3f} ms"
    lines[1] += f", the device {found.why}" if found.busy is None else f", the device busy {1e3 * found.busy:.3f} ms"
    return "\n".join(lines)


def tables(found: Profiled) -> Iterator[Table]:
    """Tables of the longest host times: by part, by function, by layer."""
    whole = found.shares.total
    parts = _rich("by part", "part", "us", "share")
    for part, value in _by_part(found.shares):
        parts.add_row(part, f"{value:,.1f}", f"{value / whole:.1%}")
    if found.hidden > 1:
        parts.add_row("[dim]not traced: more waiting[/]", f"{found.hidden:,.1f}", "")
    yield parts
    functions = _rich("by function, itself", "function", "us", "calls", "part", "file")
    for one in found.shares.functions[:_FEW]:
        functions.add_row(one.name.replace("[", "\\["), f"{one.total:,.1f}", _calls(one), _most(one), one.where)
    yield functions
    layers = _rich("by layer, without the layers within it", "layer", "us", "most of it")
    for one in found.shares.layers[:_FEW]:
        most = sorted(one.parts.items(), key=lambda item: -item[1])[:2]
        told = ", ".join(f"{part} {value:,.1f}" for part, value in most if value)
        layers.add_row(one.name or "outside of layers", f"{one.total:,.1f}", told)
    yield layers


def _rich(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    for name in columns:
        table.add_column(name, justify="right" if name in ("us", "share", "calls") else "left")
    return table
