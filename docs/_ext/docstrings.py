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
from sphinx.util import inspect as sphinx_inspect
from sphinx.util.docutils import SphinxDirective

_SPAN = re.compile(r"(``?)(.+?)\1")
_NEXT = re.compile(r"(?<=\.) (?=[a-z]\w*(?:, [a-z]\w*)*: )")  # another item on the same line
_ITEM = re.compile(r"[\w*]+(?:, [\w*]+)*(?: \([^)]*\))?: ")


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", lambda *given: given[-1].__setitem__(slice(None), converted(given[-1])))
    app.connect("autodoc-process-signature", _of_init)
    return {"parallel_read_safe": True}


def _of_init(app: Any, what: str, name: str, obj: Any, options: Any, text: str | None, result: str) -> Any:
    """The signature of `__init__`, where a class has a `__new__` that takes anything."""
    if what != "class" or not (text or "").startswith("(*_"):
        return None
    found = sphinx_inspect.signature(obj.__init__, bound_method=True).replace(return_annotation=inspect.Signature.empty)
    return sphinx_inspect.stringify_signature(found, unqualified_typehints=True), result


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
    if inspect.ismodule(value):
        return [f".. automodule:: {value.__name__}", "   :members:"]
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
    items, rest = list[str](), list(lines)
    while rest and (_ITEM.match(rest[0]) or (items and rest[0].startswith(" "))):
        line = rest.pop(0)
        if _ITEM.match(line):
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    after = ["", *_text(rest)] if items and rest else []
    return [line for item in items for one in _NEXT.split(item) for line in _definition(one)] + after


def _definition(item: str) -> tuple[str, str]:
    names, _, meaning = item.partition(": ")
    return "    " + ", ".join(f"**{escaped(name)}**" for name in names.split(", ")), f"        {inline(meaning)}"


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
