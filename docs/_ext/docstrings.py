"""Docstrings of Pumice as reStructuredText, and the directive `public` of the API reference.

Docstrings are plain text: `names` in backticks, indented lines for equations, and under "Parameters" a list of
`name, name: meaning`, with continued lines indented, after which the text goes on.

    .. public:: pumice.nn

       Conv3d Linear

documents these names of a module; `*` stands for the public names that the page does not have yet.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

_SPAN = re.compile(r"(``?)(.+?)\1")
_ITEM = re.compile(r"[\w*]+(?:, [\w*]+)*(?: \([^)]*\))?: ")


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", lambda *given: given[-1].__setitem__(slice(None), converted(given[-1])))
    return {"parallel_read_safe": True}


class Public(SphinxDirective):
    """The names in its content, each by the directive of autodoc for its kind; `*`: what is not on the page yet."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = importlib.import_module(self.arguments[0])
        names, lines = " ".join(self.content).split(), list[str]()
        if names == ["*"]:
            page = self.env.doc2path(self.env.docname).read_text(encoding="utf-8")
            names = [name for name in module.__all__ if not re.search(rf"\b{name}\b", page)]
            lines = [".. rubric:: More", ""] if names else []
        lines += [line for name in names for line in (*_directive(module.__name__, name, getattr(module, name)), "")]
        found = nodes.container()
        self.state.nested_parse(StringList(lines, module.__name__), 0, found)
        return found.children


def _directive(module: str, name: str, value: object) -> list[str]:
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, Exception) else "class"
        return [f".. auto{kind}:: {module}.{name}", *(["   :members:"] if kind == "class" else [])]
    if callable(value):
        return [f".. autofunction:: {module}.{name}"]
    return [f".. autodata:: {module}.{name}", "   :no-value:"]


def converted(lines: Sequence[str]) -> list[str]:
    """The lines of a docstring as reStructuredText."""
    found, within = list[str](), False
    for paragraph in _paragraphs(lines):
        if len(paragraph) > 1 and re.fullmatch("-{3,}", paragraph[1]):
            found += [f":{paragraph[0]}:", ""]
            paragraph, within = paragraph[2:], True
        items = _items(paragraph) if within else []
        within = bool(items)
        found += [*(items or _text(paragraph)), ""]
    return found


def _paragraphs(lines: Sequence[str]) -> list[list[str]]:
    return [list(group) for filled, group in groupby(lines, lambda line: bool(line.strip())) if filled]


def _items(lines: Sequence[str]) -> list[str]:
    """The list of a section as definitions, indented below its name, then what follows the last item; [] if none."""
    found = list[str]()
    for number, line in enumerate(lines):
        item = _ITEM.match(line)
        if item:
            names = ", ".join(f"**{escaped(part)}**" for part in item[0][:-2].split(", "))
            found += [f"    {names}", "        " + line[item.end() :]]
        elif found and line.startswith(" "):
            found[-1] += " " + line.strip()
        else:
            rest = ["", *_text(lines[number:])] if found else []
            return [*_inline_of_items(found), *rest]
    return _inline_of_items(found)


def _inline_of_items(lines: Sequence[str]) -> list[str]:
    return [line if line.lstrip().startswith("**") else "        " + inline(line.strip()) for line in lines]


def _text(paragraph: Sequence[str]) -> Iterator[str]:
    """A paragraph; lines that are indented are an equation."""
    for indented, group in groupby(paragraph, lambda line: line.startswith("   ")):
        if indented:
            yield from ("", ".. code-block:: text", "", *group, "")
        else:
            yield inline(" ".join(group))


def inline(text: str) -> str:
    """Text with `names` as literals, and nothing else that reStructuredText reads as markup."""
    found, end = "", 0
    for span in _SPAN.finditer(text):
        before, after = text[: span.start()][-1:], text[span.end() :][:1]
        found += escaped(text[end : span.start()]) + ("\\ " if before.isalnum() else "")
        found += f"``{span[2].strip()}``" + ("\\ " if after.isalnum() else "")
        end = span.end()
    return found + escaped(text[end:])


def escaped(text: str) -> str:
    return re.sub(r"([\\*|_`])", r"\\\1", text)
