"""One self-contained HTML page about a run: the cloud in 3D, training, scores, timing.

The page includes plotly and forbids every network request. Its sources are report.html, report.css and report.js.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pumice.cli.page import MISSING, Page, card, digits, finite, large, panel, plural, write_page
from pumice.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from pumice.cli.evaluate import LayerTiming, Timing
    from pumice.cli.training import TrainingProgress

MAX_POINTS_PER_VIEW = 80_000
# 8 bytes a point: with plotly's 5 MB the file stays below 12 MB however many scans are shown.
MAX_POINTS_IN_ALL = 600_000
MAX_STEPS = 4_000
SPLITS = ("train", "held out", "")
PALETTE = (
    "#4e9af1", "#f5b861", "#5fd38d", "#e06c9f", "#9d7bf0", "#45d0d6", "#f0803c", "#b7d968",
    "#d66ee0", "#c9a27e", "#6f8df7", "#f2e267", "#3fae7f", "#f28b82", "#7fc4f8", "#a48bc9",
    "#d9d0a0", "#58a06a", "#e39ad0", "#8fa3b5",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class CloudView:
    """A scan to draw. xyz [P, 3] in metres; labels, prediction int [P]: values outside 0..classes-1 are unlabelled.

    Raises ShapeError if the lengths differ, OptionError for a split that is not in SPLITS.
    """

    name: str
    xyz: np.ndarray
    labels: np.ndarray | None = None
    prediction: np.ndarray | None = None
    split: str = ""

    def __post_init__(self) -> None:
        shape = np.shape(self.xyz)
        if len(shape) != 2 or shape[1] != 3:
            raise ShapeError(f"view {self.name!r}: xyz should be [P, 3], found {list(shape)}")
        for what in ("labels", "prediction"):
            found = np.shape(getattr(self, what))
            if getattr(self, what) is not None and found != shape[:1]:
                expected = f"{what} should be [{shape[0]}] as xyz is"
                raise ShapeError(f"view {self.name!r}: {expected}, found {list(found)}")
        if self.split not in SPLITS:
            raise OptionError(f"view {self.name!r}: split should be one of {SPLITS}, found {self.split!r}")


@dataclass(frozen=True)
class ClassStyle:
    """A class with its name and colour (#rrggbb)."""

    name: str
    colour: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", self.colour):
            raise OptionError(f"class {self.name!r}: the colour should read #rrggbb, found {self.colour!r}")


@dataclass(frozen=True)
class Metrics:
    """Scores from 0 to 1. iou, counts (labelled points): one entry per class; None, NaN: class absent."""

    point_accuracy: float
    miou: float
    iou: Sequence[float | None]
    counts: Sequence[int]
    where: str = ""


@dataclass(frozen=True)
class RunFacts:
    """Facts needed to repeat the run. voxel_size in metres; extra holds more rows of the table, in order."""

    device: str
    versions: Mapping[str, str]
    voxel_size: float | Sequence[float] | None = None
    commands: Sequence[str] = ()
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Report:
    """Content of the page; empty or None leaves a section out."""

    title: str
    views: Sequence[CloudView]
    classes: Sequence[ClassStyle]
    history: Sequence[TrainingProgress] = ()
    metrics: Metrics | None = None
    timing: Timing | None = None
    precision: str = ""
    layers: Sequence[LayerTiming] = ()
    facts: RunFacts | None = None
    subtitle: str = ""

    def __post_init__(self) -> None:
        scores = self.metrics
        if scores is not None and not len(scores.iou) == len(scores.counts) == len(self.classes):
            raise ShapeError(
                f"metrics should have one entry per class: {len(self.classes)} classes,"
                f" {len(scores.iou)} in iou, {len(scores.counts)} in counts"
            )


def class_styles(names: Sequence[str], colours: Sequence[str] | None = None) -> tuple[ClassStyle, ...]:
    """Names with colours (#rrggbb; default: a palette of 20). Raises ShapeError if the lengths differ."""
    if colours is None:
        colours = [PALETTE[i % len(PALETTE)] for i in range(len(names))]
    if len(colours) != len(names):
        raise ShapeError(f"{len(names)} class names and {len(colours)} colours")
    return tuple(ClassStyle(name, colour) for name, colour in zip(names, colours, strict=True))


def write_report(path: str | Path, report: Report) -> Path:
    """Write the page (UTF-8 HTML, about 5 MB and 11 bytes per drawn point) and return its path. A view of more than
    80,000 points (fewer with more than seven views) is thinned by a seeded choice, and the page says so. Missing
    folders are made. Raises FileError if the file cannot be written."""
    body = "\n".join(part for part in (make(report) for make in SECTIONS) if part)
    return write_page(path, Page(report.title, body, _payload(report), ("report.css",), "report.js"))


# Data of the page
def _payload(report: Report) -> dict[str, Any]:
    classes = len(report.classes)
    spent = max(sum(layer.ms for layer in report.layers), 1e-9)
    limit = min(MAX_POINTS_PER_VIEW, MAX_POINTS_IN_ALL // max(1, len(report.views)))
    steps = _thinned_steps(report.history)
    return {
        "codeBytes": code_type(classes)().itemsize,
        "classes": [{"name": style.name, "colour": style.colour} for style in report.classes],
        "views": [
            {
                "name": view.name,
                "split": view.split,
                **packed_view(view.xyz, view.labels, view.prediction, classes, limit),
            }
            for view in report.views
        ],
        "history": {
            "step": [int(step.number) for step in steps],
            "loss": [finite(step.loss) for step in steps],
            "accuracy": [finite(step.accuracy) for step in steps],
            "rate": [finite(step.speed) for step in steps],
        },
        "layers": [
            {
                "name": layer.name,
                "ms": finite(layer.ms),
                "share": finite(layer.ms / spent),
                "voxels": int(layer.voxels),
                "channels": str(layer.channels),
            }
            for layer in report.layers
        ],
    }


def _thinned_steps(history: Sequence[TrainingProgress]) -> list[TrainingProgress]:
    if len(history) <= MAX_STEPS:
        return list(history)
    return [history[i] for i in np.linspace(0, len(history) - 1, MAX_STEPS).round().astype(int)]


# Sections of the page; "" if there is nothing to show
def _header(report: Report) -> str:
    subtitle = report.subtitle or _default_subtitle(report)
    line = f'<p class="subtitle">{escape(subtitle)}</p>' if subtitle else ""
    return f'<header><p class="brand">pumice</p><h1>{escape(report.title)}</h1>{line}</header>'


def _default_subtitle(report: Report) -> str:
    scans = plural(len(report.views), "scan")
    facts = report.facts
    if facts is None:
        return scans
    torch = f"torch {facts.versions['torch']}" if "torch" in facts.versions else ""
    return " · ".join(part for part in (scans, facts.device, torch) if part)


def _cards(report: Report) -> str:
    cards = [one for make in (_score_cards, _time_cards, _train_cards) for one in make(report)]
    return f'<section class="cards">{"".join(cards)}</section>' if cards else ""


def _score_cards(report: Report) -> list[str]:
    scores = report.metrics
    if scores is None:
        return []
    present = sum(finite(value) is not None for value in scores.iou)
    classes = f"over {present} of {len(scores.iou)} classes"
    return [
        card("Point accuracy", _percent(scores.point_accuracy), "%", scores.where, main=True),
        card("Mean IoU", _percent(scores.miou), "%", classes, main=True),
    ]


def _time_cards(report: Report) -> list[str]:
    timing = report.timing
    if timing is None:
        return []
    spread = f"p20 {digits(timing.p20)} · p80 {digits(timing.p80)} · maps included · {timing.runs} runs"
    rate = timing.voxels / timing.median * 1e3 if timing.median > 0 else 0.0
    on = (f"{large(rate)} voxels/s", report.precision, report.facts.device if report.facts else "")
    return [
        card("Inference, median", digits(timing.median), "ms", spread),
        card("Voxels", f"{timing.voxels:,}", "", " · ".join(filter(None, on))),
    ]


def _train_cards(report: Report) -> list[str]:
    if not report.history:
        return []
    last = report.history[-1]
    rates = [finite(step.speed) for step in report.history]
    known = [rate for rate in rates if rate is not None]
    speed = f"{large(float(np.median(known)))} voxels/s" if known else ""
    loss = MISSING if finite(last.loss) is None else digits(last.loss)
    steps = plural(len(report.history), "step")
    return [card("Training loss", loss, "", " · ".join(part for part in (steps, speed) if part))]


def _cloud(report: Report) -> str:
    if not report.views:
        return ""
    return """<section class="panel" aria-label="point cloud">
<div class="toolbar"><h2>Point cloud</h2><select id="scans" aria-label="scan"></select>
<div class="segments" id="modes" role="group" aria-label="colour by"></div><span class="space"></span>
<label>point size <input type="range" id="size" min="0.6" max="5" step="0.2" value="1.4"></label>
<div class="segments"><button id="reset">Reset view</button><button id="above">From above</button></div></div>
<div class="stage"><div class="scene"><div class="plot" id="cloud"></div><canvas id="flat"></canvas>
<div class="readout" id="readout" hidden></div></div><div class="legend" id="legend"></div></div>
<div class="caption" id="caption"></div></section>"""


def _curves(report: Report) -> str:
    panels = [one for one in (_history(report), _scores(report)) if one]
    return f'<div class="pair">{"".join(panels)}</div>' if panels else ""


def _history(report: Report) -> str:
    if not report.history:
        return ""
    note = "smoothed; the raw values are drawn faintly" if len(report.history) > 40 else "each step"
    return panel("Training", f"loss and accuracy, {note}", '<div class="chart" id="history"></div>')


def _scores(report: Report) -> str:
    scores = report.metrics
    if scores is None or not report.classes:
        return ""
    rows = zip(report.classes, scores.iou, scores.counts, strict=True)
    bars = "".join(_bar(style, finite(iou), int(count)) for style, iou, count in rows)
    note = "intersection over union, and the number of labelled points"
    return panel("IoU per class", note, f'<div class="inside"><div class="bars">{bars}</div></div>')


def _bar(style: ClassStyle, iou: float | None, count: int) -> str:
    width = 0.0 if iou is None else 100 * min(1.0, max(0.0, iou))
    fill = f'<span class="fill" style="width:{width:.2f}%;background:{style.colour}"></span>'
    return (
        f'<div class="bar{" absent" if iou is None else ""}">'
        f'<span class="swatch" style="background:{style.colour}"></span>'
        f'<span class="name">{escape(style.name)}</span><span class="track">{fill}</span>'
        f'<span class="iou">{"absent" if iou is None else f"{100 * iou:.1f} %"}</span>'
        f'<span class="count">{count:,}</span></div>'
    )


def _layers(report: Report) -> str:
    if not report.layers:
        return ""
    longest = sorted((layer.ms for layer in report.layers), reverse=True)[:5]
    whole = sum(layer.ms for layer in report.layers)
    note = f"{plural(len(report.layers), 'layer')}, {digits(whole)} ms in all"
    if len(report.layers) > 5:
        note += f"; the five longest take {100 * sum(longest) / max(whole, 1e-9):.0f} %"
    return panel("Time per layer", note, '<div class="chart" id="layers"></div>')


def _facts(report: Report) -> str:
    facts = report.facts
    if facts is None:
        return ""
    rows = {"Device": facts.device, "Voxel size": _size(facts.voxel_size), **facts.extra}
    rows["Versions"] = " · ".join(f"{name} {version}" for name, version in facts.versions.items())
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items() if v)
    if facts.commands:
        lines = escape("\n".join(facts.commands))
        cells += f"<tr><th>Command</th><td><pre>{lines}</pre></td></tr>"
    return panel("This run", "", f'<div class="inside"><table>{cells}</table></div>')


def _footer(report: Report) -> str:
    return "<footer>Self-contained: no network requests. Drawn with plotly.js.</footer>"


SECTIONS: tuple[Callable[[Report], str], ...] = (_header, _cards, _cloud, _curves, _layers, _facts, _footer)


# Text
def _percent(share: float) -> str:
    return MISSING if finite(share) is None else f"{100 * share:.1f}"


def _size(size: float | Sequence[float] | None) -> str:
    if size is None:
        return ""
    sizes = np.atleast_1d(np.asarray(size, dtype=float)).tolist()
    return " × ".join(f"{value:g}" for value in sizes) + " m"


def packed_view(
    xyz: np.ndarray, labels: np.ndarray | None, prediction: np.ndarray | None, classes: int, limit: int
) -> dict[str, Any]:
    """A scan in 8 bytes a point: uint16 per axis between the bounds (3 mm over 200 m), and two class codes. xyz [P, 3]
    metres; labels, prediction int [P] or None. At most `limit` finite points are drawn, by a seeded choice. Counts and
    accuracy are those of all P points."""
    xyz = np.asarray(xyz, dtype=np.float64)
    labels = _codes(labels, classes)
    prediction = _codes(prediction, classes)
    finite = np.flatnonzero(np.isfinite(xyz).all(axis=1))
    drawn = finite
    if len(finite) > limit:
        drawn = np.sort(np.random.default_rng(0).choice(finite, size=limit, replace=False))
    frame = _framing(xyz[finite])
    unit = (frame["high"] - frame["low"]) / 65535
    packed = np.rint((xyz[drawn] - frame["origin"] - frame["low"]) / unit)
    return {
        "total": len(xyz),
        "shown": len(drawn),
        "xyz": _base64(packed.astype("<u2")),
        "labels": None if labels is None else _base64(labels[drawn]),
        "prediction": None if prediction is None else _base64(prediction[drawn]),
        **_view_counts(labels, prediction, classes, len(xyz)),
        **{key: value.tolist() for key, value in frame.items()},
        "unit": unit.tolist(),
    }


def _view_counts(labels: np.ndarray | None, prediction: np.ndarray | None, classes: int, total: int) -> dict[str, Any]:
    """Counts over the whole scan: points per class (last: no class), right/wrong/unlabelled; and the accuracy."""
    counts: dict[str, list[int]] = {"points": [total]}
    for key, codes in (("label", labels), ("prediction", prediction)):
        if codes is not None:
            counts[key] = np.bincount(np.minimum(codes, classes), minlength=classes + 1).tolist()
    accuracy = None
    if labels is not None and prediction is not None:
        known = labels < classes
        right = int((known & (labels == prediction)).sum())
        counts["error"] = [right, int(known.sum()) - right, int((~known).sum())]
        accuracy = right / int(known.sum()) if known.any() else None
    return {"counts": counts, "accuracy": accuracy}


def _framing(xyz: np.ndarray) -> dict[str, np.ndarray]:
    """The median of all points as origin, their bounds relative to it, and the span of most of them."""
    if not len(xyz):
        xyz = np.zeros((1, 3))
    # Relative to the median, because the page draws in float32: national grids have coordinates of millions of metres.
    origin = np.median(xyz, axis=0)
    xyz = xyz - origin
    low, high = xyz.min(axis=0), xyz.max(axis=0)
    bulk = np.percentile(xyz, (3, 97), axis=0)
    span = max(float((bulk[1] - bulk[0]).max()), float((high - low).max()) / 8, 1e-3)
    # A flat cloud still needs an axis of some height.
    thin = np.maximum(0, 1e-3 * span - (high - low)) / 2
    return {"low": low - thin, "high": high + thin, "origin": origin, "span": np.asarray(span)}


def _codes(values: np.ndarray | None, classes: int) -> np.ndarray | None:
    """Class codes as small unsigned integers; anything that is not a class becomes the largest one."""
    if values is None:
        return None
    values = np.asarray(values).astype(np.int64)
    code = code_type(classes)
    return np.where((values >= 0) & (values < classes), values, np.iinfo(code).max).astype(code)


def code_type(classes: int) -> type[np.unsignedinteger]:
    """The smallest unsigned integer type for every class and one more code for none."""
    return np.uint8 if classes < 255 else np.uint16


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
