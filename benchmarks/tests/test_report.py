"""`python -m benchmarks report` from end to end: the page, the pictures, and what is said of what is not there."""

import re

import pytest
from pages import EVIL, Elements, data_of, loads_nothing

from benchmarks.report.html import drawn
from benchmarks.report.report import SECTIONS
from benchmarks.tests.ledgers import made, timed, written
from pumice.cli import page


def network(case, metric, value, peer_value):
    return timed(case, value, peer_value, suite="tuner", metric=metric, peer="default")


def full():
    """A ledger with something for every section."""
    rows = [timed(f"{s}/k3/C{c}/fwd/tuned", 1, 2, commit=f"c{c}") for s in ("a", "b") for c in (32, 64)]
    rows.append(timed("a/k3/C32/fwd/tuned", 1.0, 0.5, peer="bound", peer_source="bound"))
    rows += [network("net/fp16/inference/stem", f"part:{part}", 1.0, 2.0) for part in ("map", "kernel")]
    rows.append(network("net/fp16/inference/g0", "chosen:implicit-gemm-sorted", 1.0, 2.0))
    engine = {"suite": "engine", "clock": "wall"}
    rows.append(timed("a/fp16/inference/captured", 1.0, 1.2, peer="goal", peer_source="goal", **engine))
    rows.append(timed("scans/fp16/varied/100/later", 1.0, 1.0, metric="p50", peer="itself", **engine))
    rows += [
        timed("unet/infer/eager", 60, 30, suite="stream", clock="wall", metric=m) for m in ("p50", "max_second_half")
    ]
    rows += [timed(f"scaling/surface_{n}/k3", n, 2 * n, suite="maps", peer="sorted keys in torch") for n in (200, 400)]
    rows += [network(f"net/fp16/inference/offsets-W{tap}/0 k3", "fact:pairs", 100 * tap, 1.0) for tap in range(2)]
    counted = {"metric": "redundancy", "device": "any", "clock": "count", "peer_source": "bound"}
    return [*rows, *(timed(f"redundancy/a/k3/b64/{way}", 1.5, 1.0, **counted) for way in ("unsorted", "sorted"))]


@pytest.fixture
def report(command, tmp_path, monkeypatch):
    """`report(rows, *options)`: the command on these rows; what it said, and the page without plotly's 5 MB."""
    monkeypatch.setattr(page, "plotly_source", lambda: "/* plotly */")

    def report(rows, *options):
        ledger = written(tmp_path / "rows.jsonl", rows)
        ran = command("report", "--ledger", ledger, "--out", tmp_path / "out", *options)
        html = tmp_path / "out" / "index.html"
        return ran, html.read_text(encoding="utf-8") if html.exists() else ""

    return report


def test_every_section_is_drawn_on_the_page_and_as_pictures(report, tmp_path):
    ran, text = report(full())
    assert ran.code == 0, ran.out + ran.err
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    expected = {"overview-gpu", "conv-forward-layers", "parts-fp16-inference", "redundancy", "choices", "history"}
    expected |= {"engine-inference-fp16-gpu", "engine-varied-fp16-gpu", "stream-gpu", "stream-eager-inference"}
    expected |= {"maps-scaling-gpu", "offset-sizes"}
    assert names == {f"{name}.png" for name in expected}
    assert all((tmp_path / "out" / name).stat().st_size > 5_000 for name in names)
    found = Elements(text)
    assert not found.open
    places = {attrs["id"] for tag, attrs in found.tags if attrs.get("class") == "plot"}
    assert places == set(data_of(text)) and {f"{name}-0" for name in expected} <= places
    assert f"drawn {len(names)} pictures" in ran.out and "18 rows, 0 of them superseded" in ran.out
    assert "no rows yet: " not in text


def test_nothing_is_loaded_from_elsewhere(report):
    _, text = report(full())
    loads_nothing(text)


def test_the_page_embeds_plotly_and_fits(command, tmp_path):
    ledger = written(tmp_path / "rows.jsonl", full()[:1])
    assert command("report", "--ledger", ledger, "--out", tmp_path).code == 0
    text = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "plotly.js v" in text and len(text) < 6e6


def test_the_summary_has_the_numbers_and_says_what_is_missing(report):
    _, text = report(full())
    (row,) = re.findall(r"<tr><td>conv-forward</td><td>layers</td>(.*?)</tr>", text.partition("Shares of bounds")[0])
    cells = re.findall(r"<td>(.*?)</td>", row)
    assert cells[:5] == ["fp16", "gpu", "spconv (same run)", "4", "2.00"]
    assert cells[-3:] == ["2026-01-01", "c32, c64", "GPU"]
    assert re.search(r"<td>graph</td><td>graph layers</td><td[^>]*>no rows yet</td>", text)
    assert "<td>50%</td>" in text.partition("Shares of bounds")[2]


def test_an_empty_ledger_is_a_page_that_says_so(report, tmp_path):
    ran, text = report([])
    assert ran.code == 0 and not list((tmp_path / "out").glob("*.png"))
    assert data_of(text) == {} and all(section.absent in text for section in SECTIONS)
    assert text.count("no rows yet</td>") >= 10


def test_texts_of_the_ledger_are_escaped(report):
    _, text = report([made(device=EVIL, commit=EVIL, case=f"{EVIL.replace('/', '')}/k3/C32/fwd/tuned")])
    assert "<script>alert" not in text and "<img" not in text
    assert [tag for tag, _ in Elements(text).tags].count("script") == 4


def test_rows_are_chosen_by_device_and_commit(report):
    rows = [*full(), timed("a/k3/C32/fwd/tuned", 1, 7, device="Other", commit="d1")]
    _, text = report(rows, "--device", "other")
    assert "overview-other-0" in data_of(text) and "overview-gpu-0" not in data_of(text)
    _, text = report(rows, "--commit", "d", "--commit", "c32")
    assert {"overview-other-0", "overview-gpu-0"} <= set(data_of(text))
    ran, _ = report(rows, "--device", "tpu")
    assert ran.code == 1 and "no row is of a device like 'tpu'; there are GPU, Other" in ran.err


def test_a_wrong_line_ends_the_command_with_its_place(command, tmp_path):
    ledger = tmp_path / "rows.jsonl"
    ledger.write_text("{}\n")
    ran = command("report", "--ledger", ledger, "--out", tmp_path / "out")
    assert ran.code == 1 and "rows.jsonl, line 1: expected the fields of a row" in ran.err
    assert not (tmp_path / "out").exists()


def test_plotly_knows_all_that_is_drawn():
    from plotly import graph_objects

    kinds = set()
    for section in SECTIONS:
        for panel in (panel for chart in section.charts(full()) for panel in chart.panels):
            figure = drawn(panel)
            graph_objects.Figure(figure["data"], figure["layout"])
            kinds.add(type(panel).__name__)
    assert kinds == {"Bars", "Heat", "Lines", "Ranges", "Stacks"}


def test_a_suite_is_measured_with_and_without_the_name_of_the_command(command):
    for given in (("nothing",), ("run", "nothing"), ("--quick", "nothing")):
        ran = command(*given)
        assert ran.code == 1 and "suite 'nothing' is unknown" in ran.err
    assert "report" in command("--help").out
