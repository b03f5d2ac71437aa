"""The suite `engine` in tiny on the CPU: what is captured is checked, timed and told; scans and geometries by hand."""

import importlib
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness.families import FAMILIES
from benchmarks.harness.rows import Row
from benchmarks.harness.study import Ready, Setup
from benchmarks.harness.timing import Times
from benchmarks.report.charts import Bars
from benchmarks.report.engine import captured, latencies
from benchmarks.scenes import varied as varied_scans
from benchmarks.scenes.clouds import surface
from benchmarks.scenes.engine import INFERENCE, TINY, TRAINING, Known, sample_of
from benchmarks.scenes.varied import source
from benchmarks.suites import engine_equal as bench_engine_equal
from benchmarks.suites import engine_passes as bench_engine_passes
from benchmarks.suites.engine_equal import KINDS, SIDE, Compared, cases, geometry
from benchmarks.suites.engine_passes import Reached, Timed, by_scene, in_time
from benchmarks.suites.engine_varied import Memory, Seen, _parts, quantiles
from pumice.data import Scan
from pumice.engine import Captured
from pumice.errors import OptionError, PumiceError
from pumice.testing import random_tensor

CPU = torch.device("cpu")


def setup_of(said, **more):
    return Setup(CPU, True, said.append, suite="engine", **more)


def quick(case, only="", **more):
    said = []
    rows = list(bench.run("engine", said.append, bench.Options(case, only, quick=True, device="cpu", **more)))
    return "\n".join(map(str, said)), rows


def test_the_command(measured):
    ran, rows = measured("engine", "--case", "equal", "--count", 2)
    assert ran.code == 0, ran.out + ran.err
    rows = {row["metric"]: row for row in rows}
    # Two, and those that are always there: empty, one and two voxels, three about each of two capacities.
    assert rows["wrong"]["value"] == 0 and rows["wrong"]["unit"] == "of 11"
    assert rows["by graphs"]["value"] == 10 and 0 <= rows["largest error"]["value"] < 1e-4
    assert re.search(r"equal: \d+ s", ran.out)


def test_studies_that_are_known():
    with pytest.raises(OptionError, match="case 'fast' of engine is unknown; there are inference, equal, varied"):
        list(bench.run("engine", print, bench.Options("fast", device="cpu")))
    with pytest.raises(OptionError, match="count of a study is 0 or more, found -1"):
        bench.Options(count=-1)


# inference


def test_inference_in_tiny():
    said, rows = quick("inference")
    ways = {row.case.rpartition("/")[2]: row for row in rows}
    assert set(ways) == {"eager", "captured", "captured-tensor"} and all(row.value > 0 for row in rows)
    assert ways["captured"].peer == "our eager pass" and ways["captured"].peer_source == "same run"
    assert "tiny/surface_300/fp32/inference wall: eager " in said and "captured over our eager pass, wall" in said
    assert rows == [] or not any(row.peer in ("goal", "best recorded") for row in rows)


def test_a_captured_network_that_is_wrong_is_not_timed(monkeypatch):
    real = Captured.__call__
    monkeypatch.setattr(Captured, "__call__", lambda self, *given: (y := real(self, *given)).replace(2 * y.feats))
    with pytest.raises(PumiceError, match="fp32/inference: captured: relative error 1"):
        quick("inference")


@pytest.mark.filterwarnings("ignore:a scene somewhere else")
def test_calls_that_ran_eagerly_are_not_called_captured(monkeypatch):
    engine = importlib.import_module("pumice.engine.buckets").GraphRunner
    monkeypatch.setattr(engine, "_host_rejection", lambda self, scene: ("range", "somewhere else"))
    with pytest.raises(PumiceError, match=r"captured calls ran eagerly: \{'range': "):
        quick("inference")


def test_goals_and_recorded_peers_stand_beside(monkeypatch):
    """As on a GPU: a row for each peer, and what is reached is told."""
    said = []
    setup = replace(setup_of(said), device=torch.device("cuda"), quick=False)
    monkeypatch.setattr("benchmarks.suites.engine_passes.clocks", lambda device: ("wall", "gpu"))
    spent = {"eager": 5.0, "captured": 1.0, "spconv": 12.0}
    times = {name: Times.exactly(value) for name, value in spent.items()}
    monkeypatch.setattr("benchmarks.suites.engine_passes.spent", lambda *given: times)
    monkeypatch.setattr("benchmarks.harness.rows.device_name", lambda device: "a GPU")
    ways = [Ready(name, lambda: None, "spconv" * (name == "spconv"), 1e-3) for name in spent]
    timed = Timed(setup, "scene", "inference", ways, Known(11.8, 1.2, 4.0))
    rows = [*timed.rows("wall"), *timed.rows("gpu")]
    held = {(row.case.rpartition("/")[2], row.clock, row.peer): row for row in rows}
    assert held["captured", "wall", "goal"].peer_value == 1.2 and held["eager", "wall", "goal"].peer_value == 4.0
    assert held["captured", "wall", "best recorded"].peer_source == "recorded"
    assert held["captured", "gpu", "spconv"].peer_value == 12.0 and ("captured", "gpu", "goal") not in held
    assert held["captured", "wall", "our eager pass"].peer_value == 5.0 and ("eager", "wall", "itself") not in held
    assert "eager: goal 4 NOT met, best recorded peer 11.8 (2.36x), captured: goal 1.2 met" in said[0]
    found = Reached()
    for row in rows:
        found.add(row)
    assert found.ratios["captured", "spconv", "wall"] == {"scene": 12.0}
    assert ("captured", "goal", "wall") not in found.ratios


def test_the_wall_of_all_scenes_comes_before_the_first_trace(monkeypatch):
    """A profiler leaves launches slower than they were."""
    order = []

    class Scene:
        def __init__(self, name):
            self.name = name

        def rows(self, clock):
            order.append((self.name, clock))
            return iter(())

    monkeypatch.setattr("benchmarks.suites.engine_passes.clocks", lambda device: ("wall", "gpu"))
    setup, sample = setup_of([]), sample_of(setup_of([]), "a", surface(TINY, CPU))
    samples = iter([sample, replace(sample, name="none"), replace(sample, name="b")])
    assert not list(by_scene(setup, samples, "inference", lambda _, x: None if x.name == "none" else Scene(x.name)))
    assert order == [("a", "wall"), ("b", "wall"), ("a", "gpu"), ("b", "gpu")]


def test_the_tables_are_those_of_the_goals():
    assert list(INFERENCE)[0] == "nuscenes_1f_10cm" and len(INFERENCE) == 6 and set(TRAINING) < set(INFERENCE)
    assert all(known.captured < known.eager < known.best for known in (*INFERENCE.values(), *TRAINING.values()))


def test_no_scene_is_begun_without_the_time_for_it():
    said = []
    setup = replace(setup_of(said), until=-math.inf)
    sample = sample_of(setup, "a", surface(TINY, CPU), batch=2)
    assert sample.coords[:, 0].unique().tolist() == [0, 1] and len(sample) == 2 * TINY
    samples = [sample, replace(sample, name="b")]
    assert [one.name for one in in_time(setup, iter(samples), "inference")] == ["a"]
    assert any(line.startswith("b is left out: 0 s are left") for line in said)
    assert not list(in_time(replace(setup, only="c/"), iter(samples), "inference"))


# equal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_random_geometries(kind, count):
    coords = geometry(kind, count, seed=3)
    assert coords.shape == (count, 4) and coords.dtype == torch.int32
    assert len(coords.unique(dim=0)) == count and not coords[:, 0].any()
    assert not count or (int(coords[:, 1:].min()) >= -SIDE and int(coords[:, 1:].max()) < SIDE)
    assert torch.equal(coords, geometry(kind, count, seed=3))


def test_edges_come_first_and_every_kind_comes():
    found = list(cases(100, (40, 120)))
    sizes = [size for _, size in found]
    assert sizes[:9] == [0, 1, 2, 39, 40, 41, 119, 120, 121] and len(found) == 109
    assert max(sizes[9:]) <= 120 and {kind for kind, _ in found[9:]} == set(KINDS) and sizes[9:].count(0) == 2


def test_what_differs_is_a_failure(monkeypatch):
    real = bench_engine_equal._captured

    def wrong(setup, buckets):
        net, fast = real(setup, buckets)
        with torch.no_grad():
            other = real(setup, buckets)[0]
            next(other.parameters()).zero_()
        return other, fast

    monkeypatch.setattr(bench_engine_equal, "_captured", wrong)
    with pytest.raises(PumiceError, match=r"random/fp32/equal: clusters, 1 voxels, seed 1: rms error"):
        quick("equal", count=1)


def test_errors_are_over_the_rms():
    x = random_tensor(10, 4)
    other = x.feats.clone()
    scale = float(x.feats.square().mean().sqrt())
    other[3, 2] += 1e-3 * scale
    found = Compared()
    found.add("block, 10 voxels", x.replace(other), x)
    assert found.most == pytest.approx(1e-3, rel=1e-3) and found.mean == pytest.approx(1e-3 / 40**0.5, rel=1e-3)
    assert not found.wrong and found.kinds == {"block": 1} and not found.noisy
    # What rounding alone changes as much is no mistake, and what it does not is one.
    far = x.replace(x.feats + 0.1 * scale)
    found.add("block, 10 voxels", far, x, lambda: x.replace(x.feats - 0.1 * scale))
    found.add("lines, 10 voxels", far, x, lambda: x.replace(x.feats + 1e-4 * scale))
    assert found.noisy == 1 and len(found.wrong) == 1 and found.wrong[0].startswith("lines, 10 voxels: rms error 0.1")
    assert found.most == pytest.approx(0.1, rel=1e-3)


# varied


def test_varied_in_tiny():
    said, rows = quick("varied", count=12)
    places = {(row.case.partition("varied/")[2], row.metric): row for row in rows}
    counts = {key: row.value for key, row in places.items() if key[1] == "scans" and key[0].endswith("/all")}
    assert sum(counts.values()) == 12 and places["eagerly", "scans"].value == 0
    assert {row.peer for row in rows if row.metric == "p99.9"} == {"goal"}
    assert "12 scans, 12 by graphs, without {'capture': 2}" in said and "loading (the first scan of a capacity" in said


def test_the_first_scan_of_a_capacity_is_reported_apart():
    seen = Seen({200: [3.0, 1.0], 100: [50.0, 1.0, 2.0], 300: [9.0]}, {100: 50.0, 300: 9.0})
    assert list(_parts(seen)) == [
        (100, "all", [50.0, 1.0, 2.0]),
        (100, "later", [1.0, 2.0]),
        (200, "all", [3.0, 1.0]),
        (200, "later", [3.0, 1.0]),
        (300, "all", [9.0]),
    ]
    found = quantiles([1.0] * 999 + [2.0, 500.0])
    assert found["p50"] == found["p99"] == 1.0 and found["p99.9"] == pytest.approx(2.0) and found["max"] == 500.0


def test_memory_is_looked_at_from_the_last_capture_on():
    memory = Memory([0, 50, 100], {"live": [10.0, 30.0, 31.0]})
    assert memory.ends(30) == {"live": (30.0, 31.0)} and memory.ends(0) == {"live": (10.0, 31.0)}
    assert memory.ends(1000) == {"live": (31.0, 31.0)} and Memory().ends(0) == {}


def test_a_study_ends_when_its_time_is_up():
    said, rows = quick("varied", limit=0.1)
    assert "no time for more than 0 scans of 30" in said
    assert [row.value for row in rows] == [0.0]


def test_scans_are_turned_thinned_out_and_cut_off():
    scans = source(CPU, 60, 3000, generated=True)
    found = [scans.scan(number) for number in range(8)]
    for number, (feats, coords, name) in enumerate(found):
        again = scans.scan(number)
        assert torch.equal(feats, again[0]) and torch.equal(coords, again[1]) and name == again[2]
        assert len(coords.unique(dim=0)) == len(coords) <= 3000 and feats.shape == (len(coords), 4)
        cells = (feats[:, :3] / varied_scans.VOXEL - coords[:, 1:]).abs()
        assert float(cells.max()) <= 1.0  # the mean of a voxel's points lies in it
        low, high = torch.tensor([[-1024, -1024, -128], [1023, 1023, 127]])
        assert bool((coords[:, 1:] >= low).all()) and bool((coords[:, 1:] <= high).all())
    assert len({len(coords) for _, coords, _ in found}) == 8


def test_sweeps_are_laid_over_each_other_by_their_poses():
    """A wall seen from two places."""
    wall = np.array([[5.0, y, 1.0] for y in range(8)], np.float32)
    frames = np.stack([np.eye(4), np.eye(4)])
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    frames[0, :3, 3], frames[1, :3, :3], frames[1, :3, 3] = (1, 2, 0), turn, (3, -1, 0)
    seen = [Scan((wall - f[:3, 3]) @ f[:3, :3], np.zeros((8, 1)), name="a") for f in frames]
    merged = varied_scans._merged(seen, frames)
    assert merged.name == "a, 2 sweeps"
    np.testing.assert_allclose(merged.xyz[:8], merged.xyz[8:], atol=1e-5)
    np.testing.assert_allclose(merged.xyz[8:], seen[1].xyz, atol=1e-5)


def test_real_scans_are_there(data_folder):
    names = {cloud.name for cloud in source(CPU, 60, 3000).clouds}
    assert {name.partition("/")[0] for name in names} >= {"waymo", "nuscenes_10sweeps"}
    assert any(name.endswith("10 sweeps") for name in names)


# training


def test_training_in_tiny():
    said, rows = quick("training")
    assert "600 voxels in 2 items" in said and "fp32/training wall: eager " in said
    assert {row.case.rpartition("/")[2] for row in rows} >= {"eager", "captured"} and "captured in" in said


def test_wrong_gradients_are_not_timed(monkeypatch):
    right = bench_engine_passes._truths

    def other(net, sample):
        truths = right(net, sample)
        return truths | {"gradients": 2 * truths["gradients"]}

    monkeypatch.setattr(bench_engine_passes, "_truths", other)
    with pytest.raises(PumiceError, match=r"fp32/training: eager: relative error 0\.5"):
        quick("training")


# charts


def row_of(case, value=1.0, peer="itself", peer_value=1.0, **more):
    given = dict(metric="time", unit="ms", p20=value, p80=value, dtype="fp16", clock="wall", peer_source="same run",
                 device="a GPU", versions={}, commit="c", date="2026-01-01")  # fmt: skip
    return Row("engine", case, value=value, peer=peer, peer_value=peer_value, **(given | more))


def test_bars_by_scene():
    rows = [
        row_of("a/fp16/inference/captured", 1.0, "spconv", 12.0),
        row_of("a/fp16/inference/captured", 1.0, "goal", 1.2, peer_source="goal"),
        row_of("a/fp16/inference/eager", 4.0, "best recorded", 11.0, peer_source="recorded"),
        row_of("b/fp16/inference/tuned/captured", 2.0, "our eager pass", 5.0),
        row_of("b/fp16/inference/captured", 0.5, "spconv", 3.0, clock="gpu"),
    ]
    (chart,) = captured(rows)
    wall, gpu = chart.panels
    assert isinstance(wall, Bars) and wall.groups == ("a", "b") and wall.level is None and wall.axis == "ms"
    assert wall.series == {
        "captured": (1.0, 2.0),
        "eager": (4.0, None),
        "spconv": (12.0, None),
        "best recorded peer": (11.0, None),
        "goal, captured": (1.2, None),
    }
    assert gpu.series == {"captured": (0.5,), "spconv": (3.0,)}
    names = [[family.name for family in FAMILIES if family.place(row)] for row in rows]
    assert names == [["captured inference"]] * 2 + [["eager inference"]] + [["captured inference"]] * 2


def test_bars_by_capacity():
    spread = [("p50", 1.0), ("p99.9", 1.4)]
    rows = [row_of(f"s/fp16/varied/{c}/later", v * c, metric=m) for c in (2000, 100) for m, v in spread]
    (chart,) = latencies(rows)
    (panel,) = chart.panels
    assert panel.groups == ("100 voxels", "2,000 voxels") and panel.series["p99.9"] == (140.0, 2800.0)
    assert not list(captured(rows)) and not list(latencies([row_of("s/fp16/varied/100/first", metric="loading")]))
