"""What docs/papers.md names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`([\w/.+-]+\.py):(:?)(\w+)`")


def named(text):
    """(file, "" for code or ":" for a test, name) of every `file.py:name` and `file.py::test`."""
    return NAMED.findall(text)


def missing(file, test, name):
    folders = (ROOT / "tests", ROOT) if test else (ROOT / "src" / "pumice", ROOT)
    found = [folder / file for folder in folders if (folder / file).is_file()]
    return not any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in found)


def test_every_file_class_and_test_exists():
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    items = [item for line in text.splitlines() if line.startswith("|") for item in named(line)]
    assert len(items) > 200
    assert [item for item in items if missing(*item)] == []


@pytest.mark.parametrize("text", ["`lower/maps.py:nothing_here`", "`engine/test_tune.py::test_nothing`", "`no.py:x`"])
def test_the_check_can_fail(text):
    assert missing(*named(text)[0])
