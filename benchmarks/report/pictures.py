"""Static pictures (PNG) of a scan, for a README or a paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pumice.cli.report import ClassStyle, CloudView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["static_picture"]

BACKGROUND = "#0a0d13"
TEXT = "#e7ecf4"
UNLABELLED = "#39424f"
RIGHT, WRONG = "#76808f", "#ff4d5e"
# Inches: above the panels, and below them for each row of the legend.
LEGEND_COLUMNS = 10
TITLE, LEGEND_ROW = 0.4, 0.3


def static_picture(
    path: str | Path,
    view: CloudView,
    classes: Sequence[ClassStyle],
    *,
    radius: float | None = None,
    point_size: float = 1.2,
    width: float = 14.0,
) -> Path:
    """Writes the scan from above as panels label | prediction | error (those that exist); returns the path.

    radius: half the side of the square shown around the median, in metres (default: the bulk of the points).
    point_size: area of a point in points^2; width: of the picture in inches (150 dots each).
    """
    # The object interface needs no display and changes no global state of matplotlib.
    from matplotlib.figure import Figure

    xyz = np.asarray(view.xyz, dtype=np.float64)
    panels = _panels(view, classes)
    centre, half = _window(xyz, radius)
    low, high = centre - half, centre + half
    present = _present(view, classes)
    legend = LEGEND_ROW * -(-len(present) // LEGEND_COLUMNS) + 0.1
    side = width / len(panels)
    height = side * half[1] / half[0] + TITLE + legend
    figure = Figure(figsize=(width, height), facecolor=BACKGROUND, dpi=150)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, (colours, rank)) in zip(axes, panels.items(), strict=True):
        # Low points first, so that what stands on the ground covers it and not the other way round.
        order = np.lexsort((xyz[:, 2], rank))
        axis.scatter(xyz[order, 0], xyz[order, 1], s=point_size, c=colours[order], linewidths=0)
        axis.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
        axis.set_title(title, color=TEXT, fontsize=13, pad=6)
        axis.set_axis_off()
    _legend(figure, present)
    edges = {"left": 0.004, "right": 0.996, "top": 1 - TITLE / height, "bottom": legend / height}
    figure.subplots_adjust(**edges, wspace=0.02)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor=BACKGROUND)
    return path


def _panels(view: CloudView, classes: Sequence[ClassStyle]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Title to (colours [P, 3], rank [P]); a point of a higher rank is drawn over one of a lower."""
    level = np.zeros(len(view.xyz), dtype=np.int64)
    panels = {}
    if view.labels is not None:
        panels["label"] = (_class_colours(view.labels, classes), level)
    if view.prediction is not None:
        panels["prediction"] = (_class_colours(view.prediction, classes), level)
    if view.labels is not None and view.prediction is not None:
        labels = np.asarray(view.labels)
        state = np.where(labels == np.asarray(view.prediction), 1, 2)
        state[(labels < 0) | (labels >= len(classes))] = 0
        panels["error (red: wrong)"] = (_rgb([UNLABELLED, RIGHT, WRONG])[state], state)
    return panels or {"points": (np.broadcast_to(_rgb([RIGHT]), (len(level), 3)), level)}


def _class_colours(values: np.ndarray, classes: Sequence[ClassStyle]) -> np.ndarray:
    codes = np.asarray(values).astype(np.int64)
    codes = np.where((codes >= 0) & (codes < len(classes)), codes, len(classes))
    return _rgb([style.colour for style in classes] + [UNLABELLED])[codes]


def _rgb(colours: Sequence[str]) -> np.ndarray:
    return np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])


def _window(xyz: np.ndarray, radius: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Middle [2] and half sides [2] of what is shown; by default the bulk, no flatter than 5 : 3."""
    flat = xyz[np.isfinite(xyz).all(axis=1), :2]
    if not len(flat):
        flat = np.zeros((1, 2))
    if radius is not None:
        return np.median(flat, axis=0), np.array([radius, radius])
    low, high = np.percentile(flat, (3, 97), axis=0)
    half = np.maximum((high - low) * 0.54, 1e-3)
    return (low + high) / 2, np.maximum(half, half[::-1] * 0.6)


def _present(view: CloudView, classes: Sequence[ClassStyle]) -> list[ClassStyle]:
    """The classes that occur in the labels or in the prediction."""
    found = [np.unique(values) for values in (view.labels, view.prediction) if values is not None]
    codes = set(np.concatenate(found).tolist()) if found else set()
    return [style for code, style in enumerate(classes) if code in codes]


def _legend(figure: "Figure", styles: Sequence[ClassStyle]) -> None:
    from matplotlib.lines import Line2D

    if not styles:
        return
    handles = [
        Line2D([], [], linestyle="", marker="s", markersize=7, color=style.colour, label=style.name) for style in styles
    ]
    look = {"frameon": False, "labelcolor": TEXT, "fontsize": 10}
    figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), LEGEND_COLUMNS), **look)
