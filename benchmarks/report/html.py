"""Charts for plotly.js: per panel, dictionaries of traces and layout, read by results.js."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.report.charts import Bars, Heat, HeatCell, Lines, Panel, Ranges, Stacks, colours
from benchmarks.report.png import readable

Drawn = dict[str, Any]
_TEXT, _SOFT, _RULE = "#e7ecf4", "#98a4b8", "#232c3d"


def drawn(panel: Panel) -> Drawn:
    """{"data": [...], "layout": {...}} of a panel; layout.height in pixels."""
    data, more = _DRAW[type(panel)](panel)
    return {"data": data, "layout": _merged(_base(panel.title), more)}


def table(names: Sequence[str], rows: Sequence[Sequence[str]], more: str = "") -> str:
    """An HTML table; cells and further rows are HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="inside wide"><table class="results"><tr>{head}</tr>{body}{more}</table></div>'


def _base(title: str) -> Drawn:
    axis = {"gridcolor": _RULE, "zerolinecolor": _RULE, "linecolor": _RULE, "automargin": True}
    return {
        "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 14, "color": _TEXT}},
        "height": 340,
        "margin": {"l": 56, "r": 18, "t": 64, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": _SOFT},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        "hoverlabel": {"bgcolor": "#0b0e14", "bordercolor": _RULE, "font": {"color": _TEXT}, "align": "left"},
        "xaxis": dict(axis),
        "yaxis": dict(axis),
    }


def _merged(base: Drawn, more: Drawn) -> Drawn:
    for key, value in more.items():
        base[key] = _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base


def _bars(panel: Bars) -> tuple[list[Drawn], Drawn]:
    data = [
        _trace("bar", name, panel.groups, values, panel.notes, colour)
        for (name, values), colour in zip(panel.series.items(), colours(list(panel.series)).values(), strict=True)
    ]
    layout: Drawn = {"barmode": "group", "bargap": 0.18, "xaxis": _named(panel.groups), **_valued(panel.axis)}
    layout["shapes"] = [] if panel.level is None else [_across(panel.level, "solid", _SOFT)]
    if panel.mean is not None:
        layout["shapes"].append(_across(panel.mean, "dash", _TEXT))
    return data, layout


def _stacks(panel: Stacks) -> tuple[list[Drawn], Drawn]:
    data = [
        _trace("bar", name, panel.bars, values, panel.notes, colour)
        for (name, values), colour in zip(panel.parts.items(), colours(list(panel.parts)).values(), strict=True)
    ]
    height = 340 if sum(map(len, panel.bars)) < 160 else 440
    layout = {"height": height, "barmode": "stack", "bargap": 0.25, "xaxis": _named(panel.bars)}
    return data, {**layout, **_valued(panel.axis)}


def _lines(panel: Lines) -> tuple[list[Drawn], Drawn]:
    symbols = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "x")
    data = []
    for place, (name, colour) in enumerate(colours(list(panel.lines)).items()):
        trace = _trace("scatter", name, panel.steps, panel.lines[name], panel.notes, colour)
        mark = {"color": colour, "size": 8, "symbol": symbols[place % len(symbols)]}
        text = {"text": list(panel.marks.get(name, ())), "textposition": "top right", "textfont": {"size": 10}}
        line = {"mode": "lines+markers+text", "connectgaps": True, "marker": mark, "line": {"color": colour}}
        data.append({**trace, **line, **text})
    layout = {"xaxis": {**_named(panel.steps), "title": {"text": panel.about}}, **_valued(panel.axis)}
    legend = {"orientation": "v", "x": 1.02, "xanchor": "left", "y": 0.5, "yanchor": "middle"}
    height = max(340, 120 + 21 * len(panel.lines))
    return data, _merged(layout, {"yaxis": _logarithmic(*panel.ends), "legend": legend, "height": height})


def _ranges(panel: Ranges) -> tuple[list[Drawn], Drawn]:
    data = []
    for kind, colour in colours(list(dict.fromkeys(span.kind for span in panel.spans))).items():
        spans = [span for span in panel.spans if span.kind == kind]
        values = [span.value for span in spans]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [span.name for span in spans],
                "x": [value - 1 for value in values],
                "base": [1.0] * len(spans),
                "customdata": [[value, span.note] for value, span in zip(values, spans, strict=True)],
                "hovertemplate": "%{customdata[0]:.2f}<br>%{customdata[1]}<extra></extra>",
                "marker": {"color": colour},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [span.most - span.value for span in spans],
                    "arrayminus": [span.value - span.least for span in spans],
                    "color": _TEXT,
                    "thickness": 1,
                    "width": 3,
                },
            }
        )
    order = {"categoryorder": "array", "categoryarray": [span.name for span in panel.spans][::-1]}
    across = {**_logarithmic(*panel.ends), "title": {"text": panel.axis}}
    height = 120 + 24 * len(panel.spans)
    return data, {"height": height, "barmode": "overlay", "xaxis": across, "yaxis": {"color": _TEXT, **order}}


def _heat(panel: Heat) -> tuple[list[Drawn], Drawn]:
    """Draw tiles coloured by kind, by a colour scale with one step per kind."""
    kinds = panel.kinds
    found = colours(list(kinds))
    table = [[panel.tiles.get((row, column)) for column in panel.columns] for row in panel.rows]
    steps = [(place / len(kinds), (place + 1) / len(kinds), found[kind]) for place, kind in enumerate(kinds)]
    trace = {
        "type": "heatmap",
        "x": list(panel.columns),
        "y": list(panel.rows),
        "z": [[None if tile is None else kinds.index(tile.kind) for tile in row] for row in table],
        "customdata": [["" if tile is None else _line(f"{tile.kind}\n{tile.note}") for tile in row] for row in table],
        "hovertemplate": "%{customdata}<extra>%{x}, %{y}</extra>",
        "colorscale": [[edge, colour] for low, high, colour in steps for edge in (low, high)],
        "zmin": -0.5,
        "zmax": len(kinds) - 0.5,
        "showscale": False,
        "xgap": 3,
        "ygap": 3,
    }
    keys = [
        {"type": "scatter", "x": [None], "y": [None], "name": kind, "mode": "markers", "marker": _square(found[kind])}
        for kind in panel.used
    ]
    texts = [_text(row, column, tile, found[tile.kind]) for (row, column), tile in panel.tiles.items()]
    layout = {
        "height": 150 + 34 * len(panel.rows),
        "annotations": texts,
        "xaxis": {**_named(panel.columns), "showgrid": False},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False, "color": _TEXT},
    }
    return [trace, *keys], layout


_DRAW: Mapping[type, Callable[[Any], tuple[list[Drawn], Drawn]]] = {
    Bars: _bars,
    Stacks: _stacks,
    Lines: _lines,
    Ranges: _ranges,
    Heat: _heat,
}


def _trace(kind: str, name: str, x: tuple[str, ...], y: Any, notes: Mapping[str, Any], colour: str) -> Drawn:
    told = notes.get(name)
    return {
        "type": kind,
        "name": name,
        "x": [_line(text) for text in x],
        "y": list(y),
        "customdata": [_line(text) for text in told] if told else [""] * len(x),
        "hovertemplate": "%{y:.3~f}<br>%{customdata}<extra>%{x} " + name + "</extra>",
        "marker": {"color": colour},
    }


def _named(names: tuple[str, ...]) -> Drawn:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [_line(name) for name in names],
        "color": _TEXT,
    }


def _line(text: str) -> str:
    """Line breaks for plotly."""
    return text.replace("\n", "<br>")


def _valued(text: str) -> Drawn:
    return {"yaxis": {"title": {"text": text}}}


def _logarithmic(ends: tuple[float, float], marks: list[float]) -> Drawn:
    names = [f"{mark:g}" for mark in marks]
    return {"type": "log", "range": [math.log10(end) for end in ends], "tickvals": marks, "ticktext": names}


def _across(at: float, dash: str, colour: str) -> Drawn:
    line = {"color": colour, "width": 1, "dash": dash}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line}


def _square(colour: str) -> Drawn:
    return {"symbol": "square", "size": 11, "color": colour}


def _text(row: str, column: str, tile: HeatCell, colour: str) -> Drawn:
    font = {"color": readable(colour), "size": 12}
    return {"x": column, "y": row, "text": tile.text, "showarrow": False, "font": font}
