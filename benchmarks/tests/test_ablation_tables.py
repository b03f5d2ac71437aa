"""Tables of papers' figures beside ours and of the suite tuner, from rows that were made up; published numbers."""

import math
import re
from pathlib import Path

import pytest

from benchmarks.harness.rows import ANY, Row
from benchmarks.peers.published import COUNTS, DRAWINGS, FIGURES, PAPERS, PUBLISHED, figure
from benchmarks.report import tables as ablation_tables
from benchmarks.report.ablations import LINES
from benchmarks.report.picks import Line, Pick
from benchmarks.report.tables import Place, filled, studies, tables
from benchmarks.tests.ledgers import written
from pumice.errors import FileError, OptionError


def made(case, value, metric="time", **more):
    row = {"suite": "tuner", "case": case, "metric": metric, "value": value, "unit": "ms", "p20": value, "p80": value}
    row |= {"dtype": "fp16", "clock": "gpu", "peer": "default", "peer_value": 2.0, "peer_source": "same run"}
    return Row(**{**row, "device": "H200", "versions": {}, "commit": "abc", "date": "2026-11-22", **more})


CASE = "minkunet-kitti-1x/fp16/inference/splits-"
ROWS = [
    made(CASE + "1", 3.0),
    made(CASE + "1", 1.6),
    made(CASE + "1-2", 1.25),
    made(CASE + "1-2", 0.5, "part:map"),
    made(CASE + "1-2", 0.3, "fact:redundancy", unit="share", clock="count", peer="itself", peer_value=0.3),
    made(CASE + "1-2/group 0", 1.25, "choice:implicit-gemm-sorted"),
    made(CASE + "1-2/group 0", 1.2, "choice:implicit-gemm-split2"),
    made(CASE + "1-2/group 0", 1.2, "chosen:implicit-gemm-split2"),
    made("centerpoint-waymo-1f/fp16/inference/splits-1", 1.0, device="another"),
    made("dataflows/waymo_1f_5cm/k3/C32/explicit-gemm", 4.0),
    made("layers/x", 4.0, suite="conv-forward"),
]


def test_places():
    assert Place.of(CASE + "1-2/a/b") == Place("minkunet-kitti-1x fp16 inference", "splits", "1-2", "a/b")
    assert Place.of("dataflows/x/k3/C32/explicit-gemm") == Place("x k3 C32", "dataflows", "explicit-gemm")
    assert Place.of("map/x/k3") is None
    assert studies(ROWS) == ["splits", "dataflows"]


def test_a_line_for_each_way_and_a_column_for_each_measure():
    text = "\n".join(tables(ROWS, "splits"))
    assert "H200, 2026-11-22, commit abc:" in text and text.count("another, 2026") == 1
    assert "| of | way | gpu time, ms | gpu map, ms | redundancy, share |" in text
    # The last row of a measure counts.
    assert "| minkunet-kitti-1x fp16 inference | 1 | 1.6 (1.25x default) |  |  |" in text
    assert "| minkunet-kitti-1x fp16 inference | 1-2 | 1.25 (1.60x default) | 0.5 (4.00x default) | 0.3 |" in text
    assert "| group 0 | implicit-gemm-split2 | implicit-gemm-split2 1.2, implicit-gemm-sorted 1.25 |" in text


def test_pages_are_filled_between_their_marks(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table: flexgemm -->\nold\n<!-- end -->\nb\n<!-- table: insum -->\n<!-- end -->\nc\n")
    ledger = tmp_path / "rows.jsonl"
    shell = made("shell_8/B16/k3/C1024/fp16/fwd", 1.0, suite="workloads", peer="spconv", device="NVIDIA H100 PCIe")
    written(ledger, [*ROWS, shell])
    ablation_tables.main([str(ledger), str(page)])
    text = page.read_text()
    assert "old" not in text and text.startswith("a\n<!--") and text.endswith("-->\nc\n")
    assert (
        "| preface | sphere of 8, fp16, over spconv: forward, with gradients | up to 2x | 2, –x | H100, 11-22 |" in text
    )
    assert "| table 3 | compile and tune | 14800 ms | not measured |" in text
    assert filled(text, [*ROWS, shell]) == text
    ablation_tables.main([str(ledger)])
    assert "## dataflows" in capsys.readouterr().out
    with pytest.raises(OptionError, match="'ufc' names no paper; there are torchsparse, "):
        filled("<!-- table: ufc -->\n<!-- end -->", [])


def test_ledgers_that_cannot_be_read(tmp_path):
    with pytest.raises(FileError, match="expected a ledger"):
        ablation_tables.main([str(tmp_path / "none.jsonl")])
    (tmp_path / "bad.jsonl").write_text("{}\nnot a row\n")
    with pytest.raises(FileError, match="bad.jsonl, line 1: expected the fields of a row"):
        ablation_tables.main([str(tmp_path / "bad.jsonl")])
    with pytest.raises(OptionError, match="found 0"):
        ablation_tables.main([])


# picks


def on_gpu(case, value, peer="spconv", peer_value=6.0, **more):
    return made(case, value, peer=peer, peer_value=peer_value, suite="s", **{"device": "NVIDIA H200", **more})


def test_the_newest_run_counts_and_its_best_peer():
    rows = [
        on_gpu("a", 1.0, date="2026-11-20", peer_value=0.5),
        on_gpu("a", 2.0, "other 1"),
        on_gpu("a", 2.0, "other 2", 5.0),
        on_gpu("a", 0.1, device="AMD EPYC, 2 threads, AVX2", date="2026-11-28"),
    ]
    assert Pick("s", "a").text(rows) == "2.5" and Pick("s", "a", peer="other 1").text(rows) == "3"
    assert Pick("s", "a", peer="spconv").text(rows) == "0.5"
    assert Pick("s", "a", show="value").text(rows) == "2" and Pick("s", "a", show="per second").text(rows) == "500"
    assert Pick("s", "a", peer="other 2", show="share", times=2).text(rows) == "80"
    assert Pick("s", "b").text(rows) == Pick("s", "a", dtype="fp32").text(rows) == "not measured"


def test_several_cases_are_a_mean_and_of_ways_the_best_counts():
    rows = [on_gpu("x/one", 6.0), on_gpu("x/two", 3.0), on_gpu("y/one", 1.5), on_gpu("z", 0.0)]
    assert Pick("s", "x/.+|y/.+").text(rows) == "2 (1 to 4)"
    assert Pick("s", "x/.+|y/.+", best=True).text(rows) == "2.83 (2 to 4)"
    assert Pick("s", "z").text(rows) == "not measured"


def test_cases_of_one_run_are_divided_and_of_others_not():
    rows = [on_gpu("a", 1.0), on_gpu("b", 4.0), on_gpu("c", 9.0, date="2026-11-23")]
    assert Pick("s", "a", over="b").text(rows) == "4" and Pick("s", "a", over="c").text(rows) == "not measured"


def test_a_line_tells_cards_and_what_is_missing():
    counted = on_gpu("b", 3.0, device=ANY, clock="count", date="2026-11-23")
    picks = [Pick("s", "a"), Pick("s", "b", clock="count", show="value"), Pick("s", "c")]
    line = Line("table 1", "a, b, c", "1.5", picks, "x")
    assert line.cells([on_gpu("a", 2.0), counted]) == [
        "table 1",
        "a, b, c",
        "1.5x",
        "3, 3, –x",
        "H200 and counted, 11-23",
    ]
    assert line.cells([]) == ["table 1", "a, b, c", "1.5x", "not measured", ""]
    assert Line("", "d", "drawn", "not at hand", "x").cells([]) == ["", "d", "drawn", "not at hand", ""]


# the page and the published numbers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ablations.md"
NAMES = {"torchsparse": "TorchSparse", "torchsparse2": "TorchSparse++", "insum": "Insum", "flexgemm": "FlexGEMM"}


def places_of(lines):
    """table 2, figure 1, figure 11, ...: what the lines of a paper are of."""
    found = set()
    for line in lines:
        kind = line.place.split()[0].removesuffix("s") if line.place[:5] in ("table", "figur") else ""
        found |= {f"{kind} {number}" for number in re.findall(r"\d+", line.place)} if kind else {line.place}
    return found - {""}


def test_the_page_is_short_and_has_every_table_and_figure_of_four_papers():
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert re.findall(r"<!-- table: (\w+) -->", text) == list(LINES) == list(NAMES)
    for name, paper in NAMES.items():
        told = {found.place for found in FIGURES if found.paper == paper and found.place[:5] in ("table", "figur")}
        assert told - places_of(LINES[name]) == set() and LINES[name][0].place
        for line in LINES[name]:
            assert f"| {line.setting} |" in text, "the page was not written again"


def test_nothing_published_is_said_not_to_be_found():
    for path in (PAGE, ROOT / "benchmarks" / "peers" / "published.py", ROOT / "docs" / "papers.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search("not (be )?found|could not be looked up|have yet to be put", text), path


def test_every_table_and_figure_is_published_or_a_drawing():
    for paper, (tables_, figures) in COUNTS.items():
        wanted = {f"table {n}" for n in range(1, tables_ + 1)} | {f"figure {n}" for n in range(1, figures + 1)}
        held = {found.place for found in FIGURES if found.paper == paper}
        assert (
            held >= wanted - set(DRAWINGS[paper]) and not held & set(DRAWINGS[paper]) and wanted >= set(DRAWINGS[paper])
        )


def test_published_numbers_name_their_place():
    assert {found.paper for found in FIGURES} == set(PAPERS) and len({f.source for f in FIGURES}) == len(FIGURES)
    for found in FIGURES:
        assert re.fullmatch(r"(table|figure) \d+|section [\d.]+|[a-z ]*(GEMM|preface)[a-z, ]*", found.place), found
        numbers = [value for held in found.values.values() for value in held.values()]
        assert (
            numbers
            and all(math.isfinite(value) and value > 0 for value in numbers)
            and found.what
            and found.unit
            or (found.place == "figure 12")
        )
        assert found.text.count(":") >= len(found.values) and figure(found.paper, found.place) is found
    assert all(held and all(study in found.studies for found in held) for study, held in PUBLISHED.items())


@pytest.mark.parametrize(
    ("paper", "place", "row", "column", "value"),
    [
        ("TorchSparse", "table 2", "fixed", "KITTI, gain", 0.87),
        ("TorchSparse++", "table 5", "tf32", "0-4", 21.28),
        ("Insum", "table 2", "3, 64", "cuEquivariance", 0.3),
        ("UCF", "table 4", "top 1", "98", 69.26),
    ],
)
def test_some_numbers_by_hand(paper, place, row, column, value):
    assert figure(paper, place).values[row][column] == value
