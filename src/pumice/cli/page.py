"""One self-contained HTML page: its elements, number formats, and the writer, which embeds plotly.

The page forbids every network request. Its frame is report.html.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pumice.errors import FileError

MISSING = "–"


@dataclass(frozen=True)
class Page:
    """Content of a page. body: escaped HTML. data: input of the script. styles, script: files, see `asset`."""

    title: str
    body: str
    data: Mapping[str, Any]
    styles: tuple[str | Path, ...]
    script: str | Path


def write_page(path: str | Path, page: Page) -> Path:
    """Write the page (UTF-8 HTML; plotly is 5 MB of it) and return its path. Missing folders are made. Raises FileError
    if the file cannot be written."""
    path = Path(path)
    text = _fill(
        asset("report.html"),
        {
            "title": escape(page.title),
            "css": "\n".join(map(asset, page.styles)),
            "body": page.body,
            "plotly": plotly_source(),
            "data": json_text(page.data),
            "script": asset(page.script),
        },
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: expected a file that can be written, found: {error.strerror}") from error
    return path


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace every {{name}} in one pass, so that values are not expanded again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match.group(1)], template)


def asset(file: str | Path) -> str:
    """The text of a file, given by its name in this folder or by a path."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8")


def plotly_source() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def json_text(data: Mapping[str, Any]) -> str:
    """JSON for a script element: no text in it can close the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# Elements of a page


def card(key: str, value: str, unit: str, detail: str, main: bool = False) -> str:
    """HTML of a number with a title above and details below."""
    small = f"<small>{escape(unit)}</small>" if unit and value != MISSING else ""
    return (
        f'<div class="card{" main" if main else ""}"><div class="key">{escape(key)}</div>'
        f'<div class="value">{escape(value)}{small}</div><div class="detail">{escape(detail)}</div></div>'
    )


def panel(title: str, note: str, inside: str) -> str:
    """HTML of a section with a title around the HTML `inside`."""
    line = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="panel"><header><h2>{escape(title)}</h2>{line}</header>{inside}</section>'


# Numbers


def finite(value: float | None) -> float | None:
    """`value`, or None if it is not finite: JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else float(value)


def digits(value: float) -> str:
    """`value` with three significant digits, no exponent."""
    if not math.isfinite(value):
        return MISSING
    places = 2 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:,.{min(5, max(0, places))}f}"


def large(value: float) -> str:
    """The number with three digits and k, M or G."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{digits(value / factor)} {suffix}"
    return f"{value:.0f}"


def plural(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
