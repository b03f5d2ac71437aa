"""docs/status.md is made of the results file."""

from pathlib import Path

import pytest

from benchmarks.harness.results import current, read
from benchmarks.report import status
from benchmarks.tests.ledgers import made, written
from pumice.errors import FileError

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_results_file():
    text = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
    assert text == status.page(current(read(ROOT / "bench" / "results.jsonl")))


def test_the_readme_has_the_table_of_streams():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == status.front(text, current(read(ROOT / "bench" / "results.jsonl"))) and "| unet, inference" in text


def test_ratios_and_caveats_of_a_suite():
    text = status.page([made(value=2.0, peer_value=6.0)])
    assert "## `conv-forward`" in text and status.CAVEATS["conv-forward"] in text
    assert "**3.00**" in text and "- `maps`: no rows yet" in text


def test_a_file_that_cannot_be_written(tmp_path):
    ledger = written(tmp_path / "rows.jsonl", [made()])
    with pytest.raises(FileError, match="can be written"):
        status.write(ledger, tmp_path / "missing" / "status.md")
