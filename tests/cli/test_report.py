"""The report page: self-contained, safe against its own texts, and whole for every set of missing parts."""

import base64

import numpy as np
import pytest
from pages import EVIL, Elements, data_of, loads_nothing

from pumice.cli import page as page_
from pumice.cli import report as module
from pumice.cli.evaluate import LayerTiming, Timing
from pumice.cli.report import CloudView, Metrics, Report, RunFacts, class_styles, code_type, packed_view, write_report
from pumice.cli.training import TrainingProgress
from pumice.errors import FileError, OptionError, ShapeError

PLOTLY = "/* the embedded plotly */"


def cloud(name="scan", points=50, classes=3, labelled=True, **more):
    rng = np.random.default_rng(1)
    labels, prediction = rng.integers(-1, classes, (2, points))
    xyz = rng.normal(0, 10, (points, 3)).astype(np.float32)
    return CloudView(name, xyz, labels if labelled else None, prediction, **more)


def full_report(text="a name"):
    return Report(
        title=text,
        views=[cloud(text, split="train"), cloud(text + "2", split="held out")],
        classes=class_styles([text, "b", "c"]),
        history=[TrainingProgress(i, 1 / (i + 1), i / 10, 1e5) for i in range(9)],
        metrics=Metrics(0.9, 0.6, (0.7, None, float("nan")), (30, 0, 20), text),
        timing=Timing(12.3, 12.0, 13.0, 20, 5000),
        precision=text,
        layers=[LayerTiming(text, 1.5, 5000, text), LayerTiming("b", 4.5, 1000, "4 to 8")],
        facts=RunFacts(text, {text: text}, (0.1, 0.1, 0.2), [text], {text: text}),
    )


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Writes a report without the 5 MB of plotly and gives back its text."""
    monkeypatch.setattr(page_, "plotly_source", lambda: PLOTLY)
    return lambda report: write_report(tmp_path / "sub" / "r.html", report).read_text(encoding="utf-8")


def test_the_file_embeds_plotly_and_fits(tmp_path):
    path = write_report(tmp_path / "r.html", full_report())
    text = path.read_text(encoding="utf-8")
    assert "plotly.js v" in text and "Plotly.newPlot" in text
    assert path.stat().st_size < 7e6


def test_nothing_is_loaded_from_elsewhere(page):
    loads_nothing(page(full_report()))


def test_every_text_is_escaped(page):
    text = page(full_report(EVIL))
    assert "<script>alert" not in text and "<img" not in text
    assert [tag for tag, _ in Elements(text).tags].count("script") == 4
    data = data_of(text)
    assert data["classes"][0]["name"] == data["views"][0]["name"] == data["layers"][0]["name"] == EVIL


def test_the_numbers_are_on_the_page(page):
    text = page(full_report())
    for expected in ("90.0", "60.0", "12.3", "p20 12.0", "maps included", "5,000", "0.1 × 0.1 × 0.2 m", "absent"):
        assert expected in text
    data = data_of(text)
    assert data["history"]["loss"][1] == 0.5
    assert [layer["share"] for layer in data["layers"]] == [0.25, 0.75]
    assert [view["split"] for view in data["views"]] == ["train", "held out"]


def test_placeholders_in_names_stay_text(page):
    assert "<h1>{{plotly}}</h1>" in page(Report("{{plotly}}", [], ()))


def test_parts_that_are_missing_leave_no_trace(page):
    text = page(Report("bare", [cloud(labelled=False)], class_styles(["only"])))
    data = data_of(text)
    assert data["views"][0]["labels"] is None and "error" not in data["views"][0]["counts"]
    assert data["history"]["step"] == [] and data["layers"] == []
    for absent in ('id="history"', 'id="layers"', 'class="cards"', "This run", "IoU per class"):
        assert absent not in text
    assert 'id="cloud"' in text


def test_no_scan_at_all(page):
    assert 'id="cloud"' not in page(Report("nothing", [], ()))


@pytest.mark.parametrize("points", [0, 1])
def test_tiny_scans(page, points):
    view = data_of(page(Report("t", [cloud(points=points, classes=1)], class_styles(["one"]))))["views"][0]
    assert view["shown"] == points
    assert all(high > low for low, high in zip(view["low"], view["high"], strict=True))


def test_numbers_that_are_not_finite(page):
    history = [TrainingProgress(0, float("nan"), float("inf"), float("nan"))]
    scores = Metrics(float("nan"), float("nan"), (None,), (0,))
    data = data_of(page(Report("t", [], class_styles(["a"]), history, scores)))
    assert data["history"]["loss"] == data["history"]["accuracy"] == [None]


def test_a_long_history_is_thinned_and_keeps_its_ends(page):
    history = [TrainingProgress(i, 1.0, 0.5, 1e5) for i in range(9000)]
    steps = data_of(page(Report("t", [], (), history)))["history"]["step"]
    assert len(steps) == module.MAX_STEPS and steps[0] == 0 and steps[-1] == 8999


def test_packing_keeps_places_and_codes():
    rng = np.random.default_rng(0)
    # Coordinates of a national grid: millions of metres, where float32 alone would be half a metre off.
    xyz = rng.uniform(-100, 100, (300, 3)) + np.array([4.5e6, 5.4e6, 300])
    labels = rng.integers(-1, 5, 300)
    view = packed_view(xyz, labels, None, 4, 1000)
    raw = np.frombuffer(base64.b64decode(view["xyz"]), "<u2").reshape(-1, 3)
    places = np.array(view["origin"]) + np.array(view["low"]) + raw * np.array(view["unit"])
    np.testing.assert_allclose(places, xyz, atol=2e-3)
    codes = np.frombuffer(base64.b64decode(view["labels"]), np.uint8)
    np.testing.assert_array_equal(codes, np.where((labels >= 0) & (labels < 4), labels, 255))
    assert view["counts"]["label"][4] == (codes == 255).sum()


def test_a_large_view_is_thinned_by_a_seeded_choice():
    xyz = np.random.default_rng(0).normal(size=(500, 3))
    xyz[7] = np.nan
    first, second = (packed_view(xyz, None, None, 1, 100) for _ in range(2))
    assert first == second
    assert (first["total"], first["shown"]) == (500, 100)


def test_errors_count_unlabelled_apart():
    labels, prediction = np.array([0, 1, -1, 9]), np.array([0, 0, 0, 1])
    view = packed_view(np.zeros((4, 3)), labels, prediction, 2, 10)
    assert view["counts"]["error"] == [1, 1, 2]
    assert view["accuracy"] == 0.5


def test_many_classes_need_two_bytes():
    assert code_type(254) is np.uint8 and code_type(255) is np.uint16


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ShapeError, match=r"\[3\].*\[2\]"):
        CloudView("v", np.zeros((3, 3)), np.zeros(2, int))
    with pytest.raises(ShapeError, match=r"\[P, 3\].*\[3, 4\]"):
        CloudView("v", np.zeros((3, 4)))
    with pytest.raises(OptionError, match="held out"):
        CloudView("v", np.zeros((3, 3)), split="test")
    with pytest.raises(OptionError, match="#rrggbb"):
        class_styles(["a"], ["red"])
    with pytest.raises(ShapeError, match="2 class names and 1"):
        class_styles(["a", "b"], ["#000000"])
    with pytest.raises(ShapeError, match="1 classes, 2 in iou"):
        Report("t", [], class_styles(["a"]), metrics=Metrics(1.0, 1.0, (1.0, 1.0), (1,)))
    with pytest.raises(FileError, match="can be written"):
        write_report(tmp_path, Report("t", [], ()))
