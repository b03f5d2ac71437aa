"""The lines of docs/ablations.md: every table and figure with numbers of four papers, theirs beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.report import of_flexgemm, of_insum, of_torchsparse, of_torchsparse2
from benchmarks.report.picks import Line

LINES: Mapping[str, Sequence[Line]] = {
    "torchsparse": of_torchsparse.lines(),
    "torchsparse2": of_torchsparse2.lines(),
    "insum": of_insum.lines(),
    "flexgemm": of_flexgemm.lines(),
}
"""By paper, under the names of the marks on the page."""
