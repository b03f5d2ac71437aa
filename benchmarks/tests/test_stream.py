"""The suite `stream` in tiny on the CPU: its scenes, its metrics, what it refuses, its table and its chart."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pumice as pm
from benchmarks.harness.families import FAMILIES
from benchmarks.harness.results import compared, read
from benchmarks.harness.study import Options
from benchmarks.probes import stream_way
from benchmarks.probes.stream_way import Asked, Seen
from benchmarks.report import status
from benchmarks.report.charts import Ranges
from benchmarks.report.stream import stream_table, streams
from benchmarks.scenes.stream import Source, samples, stream
from benchmarks.scenes.stream_nets import NETS
from benchmarks.suites import stream as suite
from benchmarks.suites.stream import figures_of
from benchmarks.tests.ledgers import timed
from pumice.errors import FileError, OptionError
from pumice.lower.kernel import float32_precision

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Two scenes of random voxels."""
    chance = np.random.default_rng(0)
    for number in range(2):
        coords = np.unique(chance.integers(0, 24, (900, 3), dtype=np.int32), axis=0)
        np.savez(tmp_path / f"cloud{number}.npz", coords=coords)
    return tmp_path


@pytest.fixture
def no_spconv(monkeypatch):
    monkeypatch.setitem(sys.modules, "spconv", None)
    monkeypatch.setitem(sys.modules, "spconv.pytorch", None)


class Tensor:
    """Stands for spconv's tensor: ours, and by key what a strided convolution began with."""

    def __init__(self, x, keys):
        self.x, self.keys = x, keys

    features = property(lambda self: self.x.feats)
    indices = property(lambda self: self.x.coords)

    def replace_feature(self, feats):
        return Tensor(self.x.replace(feats), self.keys)


class Kept(pm.nn.Conv3d):
    def __init__(self, inputs, outputs, kernel, bias, indice_key):
        super().__init__(inputs, outputs, kernel, bias=bias)

    def forward(self, x):
        return Tensor(super().forward(x.x), x.keys)


class Strided(pm.nn.Conv3d):
    def __init__(self, inputs, outputs, kernel, stride, padding, bias, indice_key):
        super().__init__(inputs, outputs, kernel, stride, padding=padding, bias=bias)
        self.key = indice_key

    def forward(self, x):
        return Tensor(super().forward(x.x), {**x.keys, self.key: x.x})


class Inverse(pm.nn.InverseConv3d):
    def __init__(self, inputs, outputs, kernel, indice_key, bias):
        super().__init__(inputs, outputs, kernel, 2, bias=bias)
        self.key = indice_key

    def forward(self, x):
        return Tensor(super().forward(x.x, x.keys[self.key]), x.keys)


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for spconv's layers, made of ours."""
    made = SimpleNamespace(
        SparseConvTensor=lambda f, c, shape, batch: Tensor(pm.SparseTensor(f, c, spatial_shape=tuple(shape)), {}),
        SubMConv3d=Kept,
        SparseConv3d=Strided,
        SparseInverseConv3d=Inverse,
    )
    monkeypatch.setitem(sys.modules, "spconv", SimpleNamespace(pytorch=made))
    monkeypatch.setitem(sys.modules, "spconv.pytorch", made)
    monkeypatch.setitem(sys.modules, "spconv.pytorch.ops", SimpleNamespace())
    return made


def quick(command, folder, *options):
    """The command in this process; what it said, and its rows."""
    out = folder / "rows.jsonl"
    ran = command("stream", "--quick", "--inline", "--device", "cpu", "--count", 3, "--scenes", folder, "--out", out,
                  *options)  # fmt: skip
    return ran, read(out) if out.exists() else []


# scenes


def test_scenes_never_come_twice_and_lie_on_one_grid(folder):
    found = samples(Source(str(folder)), 6, CPU, torch.float32)
    assert len({one.coords.numpy().tobytes() for one in found}) == 6
    (extent,) = {one.spatial_shape for one in found}
    for one, again in zip(found, samples(Source(str(folder)), 6, CPU, torch.float32), strict=True):
        assert torch.equal(one.coords, again.coords) and torch.equal(one.feats, again.feats)
        assert len(one.coords.unique(dim=0)) == len(one.coords) and one.feats.shape == (len(one), 4)
        assert int(one.coords.min()) == 0 and bool((one.coords[:, 1:] < torch.tensor(extent)).all())
    assert all(side % 32 == 0 for side in extent)


def test_crops_keep_the_voxels_about_a_column():
    cloud = np.stack(np.meshgrid(*[np.arange(12)] * 3), -1).reshape(-1, 3).astype(np.int32)
    found = list(stream([cloud], 8, Source(most=100)))
    assert all(40 <= len(coords) <= 100 for coords in found)
    assert all(np.ptp(coords[:, :2], axis=0).max() <= 8 for coords in found)


def test_folders_without_scenes_are_refused(tmp_path):
    with pytest.raises(FileError, match="expected a folder of scenes"):
        Source(str(tmp_path)).files()
    with pytest.raises(OptionError, match="0 or more, found -1"):
        Source(most=-1)


def test_streets_are_generated_without_data(monkeypatch):
    monkeypatch.setattr("benchmarks.scenes.stream.settings", lambda: SimpleNamespace(data=None))
    found = samples(Source(most=200), 2, CPU, torch.float32)
    assert not Source().files() and all(80 <= len(one) <= 200 for one in found)


def test_shells_are_no_scans(monkeypatch, tmp_path):
    (tmp_path / "scenes").mkdir()
    for name in ("shell_512", "a_scan"):
        (tmp_path / "scenes" / f"{name}.npz").touch()
    monkeypatch.setattr("benchmarks.scenes.stream.settings", lambda: SimpleNamespace(data=tmp_path))
    assert [path.stem for path in Source().files()] == ["a_scan"]


# metrics


def test_the_first_call_is_told_apart():
    found = figures_of([900.0, 9.0, 1.0, 2.0, 3.0, 4.0])
    assert found["first_call"].median == 900 and found["p50"].median == 3 and found["p50"].p80 == pytest.approx(5)
    assert found["p90"].median == pytest.approx(7) and found["max_second_half"].median == 4
    assert found["over_p50"].median == pytest.approx(4 / 3)
    again = figures_of([9.0, 1.0, 2.0, 3.0], first=False)
    assert "first_call" not in again and again["p50"].median == 2.5 and again["max_second_half"].median == 3


def test_few_calls_have_no_median():
    assert (
        figures_of([]) == {}
        and set(figures_of([5.0])) == {"first_call"}
        and set(figures_of([5.0, 6.0])) == {"first_call"}
    )


# runs


def test_without_spconv_rows_are_held_against_plain_gathers(command, folder, no_spconv):
    ran, rows = quick(command, folder, "--case", "encoder", "--only", "eager")
    assert ran.code == 0, ran.out + ran.err
    assert "encoder/infer/spconv is left out" in ran.out and "error of the gradients" in ran.out
    held = {(row.case, row.metric): row for row in rows if row.clock != "wall"}
    assert {row.clock for row in rows} == {"wall", "cpu", "count"}
    assert {row.peer for row in rows} == {"itself"} and {row.suite for row in rows} == {"stream"}
    for mode in ("infer", "train"):
        case = f"tiny/encoder/{mode}/eager"
        assert held[case, "scenes"].value == 3 and held[case, "scenes"].unit == "scenes"
        assert held[case, "first_call"].value > 0 and held[case, "p50"].p20 <= held[case, "p50"].value
        assert held[f"{case}/repeated", "p50"].value > 0 and (f"{case}/repeated", "first_call") not in held


def test_each_way_is_held_against_spconv_in_the_same_run(command, folder, fake):
    ran, rows = quick(command, folder, "--case", "encoder")
    assert ran.code == 0, ran.out + ran.err
    held = {(row.case.removeprefix("tiny/encoder/"), row.metric): row for row in rows}
    assert {case for case, _ in held} >= {f"{m}/{w}" for m in ("infer", "train") for w in ("eager", "captured")}
    assert {row.peer for key, row in held.items() if key[1] in ("p50", "p90", "first_call", "total")} == {"spconv"}
    assert held["infer/captured", "make"].peer == "itself" and held["infer/captured", "fallbacks"].clock == "count"
    assert held["train/eager", "over_p50"].unit == "x" and "spconv" in held["infer/eager", "p50"].versions


def test_a_unet_agrees_with_its_twin(folder, fake):
    seen = Seen()
    stream_way.run(Asked("unet", "infer", "eager", "cpu", 2, Source(str(folder)), quick=True), seen.add)
    assert seen.wrong == "" and seen.errors["result"] < 1e-5 and len(seen.calls) == len(seen.again) == 2


@pytest.mark.parametrize("way", ["eager", "spconv"])
@pytest.mark.parametrize("mode", ["infer", "infer-tf32", "infer-fp32"])
def test_each_precision_is_that_of_its_mode(folder, fake, monkeypatch, mode, way):
    """Of float32 products while calls are timed, in spconv by a tuner of its own; the reference is exact."""
    told, timed_, exact = [], stream_way._timed, stream_way._exact

    def noted(call):
        return lambda *given: [told.append((float32_precision(), list(tuners))), call(*given)][1]

    @contextmanager
    def multiplying(tuner):
        tuners.append(tuner)
        yield
        tuners.clear()

    tuners = []
    monkeypatch.setattr(stream_way.spconv_peer, "new_tuner", lambda: "tuner")
    monkeypatch.setattr(stream_way.spconv_peer, "multiplying", multiplying)
    monkeypatch.setattr(stream_way, "_timed", noted(timed_))
    monkeypatch.setattr(stream_way, "_exact", noted(exact))
    seen = Seen()
    stream_way.run(Asked("encoder", mode, way, "cpu", 2, Source(str(folder)), quick=True), seen.add)
    of_mode = "tf32" if mode == "infer-tf32" else "tf32x3"
    assert told == [(of_mode, ["tuner"] * (mode == "infer-tf32" and way == "spconv")), ("tf32x3", [])]
    assert seen.wrong == "" and len(seen.again) == 2


def test_fp32_is_allowed_less_than_tf32():
    modes = stream_way.MODES
    assert modes["infer-fp32"].allowed < modes["infer-tf32"].allowed == modes["infer"].allowed
    assert [name for name, mode in modes.items() if mode.training] == ["train"]


def test_rows_of_wrong_results_are_refused(command, folder, fake, monkeypatch):
    monkeypatch.setattr(Kept, "forward", lambda self, x: Tensor(2 * pm.nn.Conv3d.forward(self, x.x), x.keys))
    ran, rows = quick(command, folder, "--case", "encoder", "--only", "infer/eager")
    assert ran.code == 1 and "result: relative error" in ran.out and "1 failed" in ran.err
    assert [(row.metric, row.value) for row in rows] == [("scenes", 3)]


def test_what_raises_is_a_failure_of_its_way(command, folder, fake, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no graphs today")

    monkeypatch.setattr(pm, "capture", broken)
    ran, rows = quick(command, folder, "--case", "encoder", "--only", "infer/captured")
    assert ran.code == 1 and "no graphs today" in ran.out and [row.value for row in rows] == [0]


def test_no_scene_is_begun_behind_the_limit(folder, no_spconv):
    seen = Seen()
    stream_way.run(Asked("encoder", "infer", "eager", "cpu", 2, Source(str(folder)), 0.0, True), seen.add)
    assert seen.calls == seen.again == [] and seen.wrong == "" and seen.voxels[0] > 0


def test_a_process_of_its_own(folder):
    """It tells all as it goes; how it ended is said where it ended badly."""
    run = suite.Stream(suite.Setup(CPU, True, print, count=2), Source(str(folder), 300), 60.0, True, False)
    seen = suite._seen(run, run.asked("encoder", "infer", "eager"))
    assert seen.wrong == "" and len(seen.calls) == 2 and seen.errors["result"] < 1e-4
    bad = suite._seen(run, run.asked("no net", "infer", "eager"))
    assert "KeyError" in bad.wrong


def test_a_process_that_hangs_is_ended(tmp_path):
    said, errors = tmp_path / "said", tmp_path / "errors"
    program = "import time; print('[\"calls\", 1.5]', flush=True); time.sleep(60)"
    assert suite._ended([sys.executable, "-c", program], said, errors, 2.0).startswith("stopped after 2 s")
    assert json.loads(said.read_text()) == ["calls", 1.5]
    assert suite._ended([sys.executable, "-c", "raise SystemExit(3)"], said, errors, None) == "ended with 3 ({})"
    assert suite._most(20.0) == 50 and suite._most(200.0) == 300 and suite._most(float("inf")) is None


def test_networks_and_cases_that_are_known():
    with pytest.raises(OptionError, match="case 'resnet' of stream is unknown; there are unet, encoder"):
        list(suite.stream(print, Options("resnet", device="cpu")))
    convolutions = [m for m in NETS["unet"](False).modules() if isinstance(m, pm.nn.Conv3d | pm.nn.InverseConv3d)]
    assert len(convolutions) == 42


# report


def rows_of(case, value, worst, first, rival, **more):
    """Median, worst and first call of a way; of spconv the half of its median, and so on."""
    given = dict(suite="stream") | dict(clock="wall") | more
    values = {"p50": (value, rival), "max_second_half": (worst, 2 * rival), "first_call": (first, 700.0)}
    return [timed(case, mine, theirs, metric=metric, **given) for metric, (mine, theirs) in values.items()]


ROWS = [
    *rows_of("unet/infer/eager", 90.0, 1106.0, 50_000.0, 30.0),
    *rows_of("unet/infer/compiled", 5.0, 6.0, 1300.0, 30.0),
    *rows_of("unet/infer/captured", 3.3, 3.9, 40.0, 30.0),
    timed("unet/infer/captured", 53_000.0, 53_000.0, suite="stream", clock="wall", metric="make", peer="itself"),
    *rows_of("unet/infer/eager/repeated", 21.0, 22.0, 1.0, 28.0),
    *rows_of("encoder/train/eager", 8.0, 9.0, 2000.0, 4.0, device="CPU", clock="cpu"),
    *rows_of("tiny/encoder/train/eager", 8.0, 9.0, 2000.0, 4.0),
    *rows_of("unet/infer-tf32/compiled", 6.0, 7.0, 1300.0, 24.0, device="Another GPU"),
]


def test_the_table_has_losses_too():
    head, rule, *lines = stream_table(ROWS).splitlines()
    assert head.count("|") == rule.count("|") == 8
    assert lines == [
        "| unet, inference, GPU, wall | 30 (60) | 90 (1,106) | 5 (6) | 3.3 (3.9) | 0.33, 6.00, 9.09 | "
        "0.7, 50, 1.3, 53 |",
        "| encoder, training, CPU, cpu | 4 (8) | 8 (9) | – | – | 0.50, –, – | 0.7, 2, –, – |",
        "| unet, inference in tf32, Another GPU, wall | 24 (48) | – | 6 (7) | – | –, 4.00, – | 0.7, –, 1.3, – |",
    ]
    assert stream_table([timed("a", 1, 2)]) == ""


def test_the_table_stands_on_the_page_of_figures():
    text = status.page(ROWS)
    assert stream_table(ROWS) in text and status.CAVEATS["stream"] in text


def test_bars_end_at_the_median_and_lines_at_the_worst_call():
    charts = {chart.name: chart for chart in streams(ROWS)}
    assert set(charts) == {"stream-gpu", "stream-cpu-cpu", "stream-another-gpu"}
    (panel,) = charts["stream-gpu"].panels
    assert isinstance(panel, Ranges) and panel.title == "inference, clock wall"
    assert [(span.name, span.value, span.most, span.kind) for span in panel.spans] == [
        ("unet, spconv", 30.0, 60.0, "spconv"),
        ("unet, eager", 90.0, 1106.0, "eager"),
        ("unet, compiled", 5.0, 6.0, "compiled"),
        ("unet, captured", 3.3, 3.9, "captured"),
        ("unet, spconv, repeated", 28.0, 56.0, "spconv"),
        ("unet, eager, repeated", 21.0, 22.0, "eager"),
    ]
    assert "first call 50,000 ms" in panel.spans[1].note and "made in 53,000 ms" in panel.spans[3].note


def test_ratios_are_of_medians_and_of_each_way():
    names = {
        (f.name, f"{one.ratio:.2f}") for f in FAMILIES if f.suite == "stream" for one in compared(ROWS, f, "spconv")
    }
    inference = {("eager inference", "0.33"), ("compiled inference", "6.00"), ("captured inference", "9.09")}
    assert names == inference | {("eager training", "0.50"), ("compiled inference in tf32", "4.00")}
