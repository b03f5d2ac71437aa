"""The suite `maps` runs in tiny on the CPU: whole rows, nothing timed that is wrong, goals and recorded peers."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from benchmarks import run as bench
from benchmarks.harness import rows as ledger
from benchmarks.harness import study
from benchmarks.harness.rows import Peer
from benchmarks.harness.timing import Times
from benchmarks.scenes import clouds as map_scenes
from benchmarks.suites import map_work
from benchmarks.suites import maps as bench_maps
from benchmarks.suites.map_steps import STEPS, made, truths_of
from pumice.env import Settings
from pumice.errors import OptionError, PumiceError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# What must be among the ends of the cases of each study.
EXPECTED = {
    "map": {"shuffled", "file-order"},
    "plan": {"k3"},
    "outputs": {"k2s2", "k3s2"},
    "network": {"one-stream"},
    "pyramid": {"chain", "level-by-level", "host"},
    "scaling": {"k3", "all", "large"},
    "ablation": {"sorted-staged", "sorted", "listed"},
    "steps": set(STEPS),
}


@pytest.fixture
def measure(measured):
    """`measure("map", ...)`: how a study ran, and its rows."""
    return lambda case, *more: measured("maps", "--case", case, *more)


@pytest.fixture
def voxels():
    return map_scenes.surface(60, CPU).shuffled()


def setup_of(device=CPU, quick=True, **more):
    said = []
    return study.Setup(device, quick, said.append, suite="maps", **more), said


def times(value):
    return Times(value, value, value)


@pytest.mark.parametrize("case", EXPECTED)
def test_a_study_gives_whole_rows(measure, case):
    ran, rows = measure(case)
    assert ran.code == 0 and "FAILED" not in ran.out, ran.out + ran.err
    names = {field.name for field in fields(ledger.Row)}
    for row in rows:
        assert set(row) == names and row["suite"] == "maps" and row["lib"] == "pumice" and row["dtype"] == "int32"
        assert row["case"].startswith(case) and row["clock"] in ("wall", "count")
        assert row["p20"] <= row["value"] <= row["p80"] and row["peer_value"] > 0
        assert row["value"] > 0 or row["metric"] == "slope"
        assert row["peer"] and row["peer_source"] in ("same run", "recorded", "goal", "bound")
        assert row["commit"] and row["device"] and {"pumice", "torch"} <= set(row["versions"])
    assert {row["case"].rpartition("/")[2] for row in rows} >= EXPECTED[case]
    assert ("memory" in {row["metric"] for row in rows}) == (case == "plan")


def test_every_study_is_tested():
    assert set(EXPECTED) == set(bench.SUITES["maps"].studies)


def test_a_case_is_picked_by_a_part_of_its_name(measure):
    ran, rows = measure("outputs", "--only", "shell")
    assert ran.code == 0 and {row["case"].split("/")[1] for row in rows} == {"shell_16"}


@pytest.mark.parametrize("case", EXPECTED)
def test_a_wrong_map_is_not_timed_and_the_exit_code_is_1(measure, monkeypatch, case):
    monkeypatch.setattr(map_work, "wrong_map", lambda found, truth: "rows differ from the twin's")
    ran, rows = measure(case)
    assert ran.code == 1 and "FAILED" in ran.out and "not timed" in ran.out and ran.err.startswith("error: ")
    assert not [row for row in rows if row["metric"] != "memory"]


def test_a_plan_with_lost_pairs_is_not_timed(measure, monkeypatch):
    monkeypatch.setattr(map_work, "wrong_tiles", lambda tiles, rows: "the entries hold 3 pairs, expected 4")
    ran, rows = measure("plan")
    assert ran.code == 1 and "expected 4; not timed" in ran.out and "the tiles in exact room" in ran.out and not rows


def test_a_missing_peer_is_one_line(measure, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(map_work, "import_module", missing)
    ran, rows = measure("map")
    assert ran.code == 0 and ran.out.count("spconv is left out") == 1
    assert {row["peer"] for row in rows} == {"its shuffled", "its file-order"}


def test_a_peer_that_finds_other_pairs_is_not_timed(monkeypatch, voxels):
    monkeypatch.setattr(map_work, "spconv_map", lambda voxels: lambda: torch.zeros(27, 3))
    setup, said = setup_of()
    assert bench_maps.spconv_ready(setup, "map/a", voxels, 80) == [] and "81 pairs, there are 80" in said[0]


def test_what_fails_in_one_study_does_not_end_the_others(monkeypatch):
    def broken(setup):
        raise ValueError("a file that cannot be read")
        yield

    suite = study.Suite("maps", {"broken": broken, "map": lambda setup: iter(["a row"])})
    rows = suite(print, bench.Options(device="cpu"))
    assert next(rows) == "a row"
    with pytest.raises(PumiceError, match="1 failed: broken: ValueError: a file"):
        next(rows)


def test_an_unknown_study_lists_the_known():
    with pytest.raises(OptionError, match="scaling"):
        list(bench.run("maps", print, bench.Options(case="nothing", device="cpu")))


# on a GPU


def test_what_a_graph_gives_is_checked_too(monkeypatch):
    monkeypatch.setattr(bench_maps, "captured", lambda call, device: lambda: "stale")
    setup, said = setup_of(CUDA)
    wrong = lambda found: "" if found == "good" else "rows differ"  # noqa: E731
    works = [
        map_work.Work("ours", lambda: "good", wrong),
        map_work.Work("twin", lambda: "good", wrong, graph=False),
        map_work.Work("broken", lambda: 1 / 0, wrong),
    ]
    assert [one.name for one in bench_maps.ready(setup, "map/a", works)] == ["twin"]
    assert said[0] == "FAILED map/a: ours: captured: rows differ; not timed"
    assert "broken: ZeroDivisionError" in said[1]


def test_on_a_gpu_graphs_are_timed_flushed_and_warm_and_peers_as_they_were_recorded(monkeypatch):
    asked = []

    def together(calls, device, clock, seconds, cold=True):
        asked.append((clock, cold, [call() for call in calls]))
        return [times(1.0) for _ in calls]

    monkeypatch.setattr(bench_maps, "together", together)
    setup, _ = setup_of(CUDA)
    ours = bench_maps.Ready("ours", lambda: "eager", lambda: "graph")
    peer = bench_maps.Ready("spconv", lambda: "peer", lambda: "peer")
    found = bench_maps._spent(setup, [ours], [peer])
    assert asked == [
        ("wall", True, ["eager", "peer"]),
        ("gpu", False, ["graph"]),
        ("events", True, ["peer"]),
        ("gpu", True, ["graph", "peer"]),
    ]
    assert list(found) == ["wall", "warm", "events", "gpu"] and set(found["gpu"]) == {"ours", "spconv"}


def test_recorded_peers_are_scaled_by_spconv_and_the_goal_stands_beside_them(monkeypatch):
    monkeypatch.setattr(bench_maps, "device_name", lambda device: "NVIDIA H200")
    setup, said = setup_of()
    known = map_scenes.Known({"FlexGEMM": 0.08, "spconv": 0.2}, {"map": 0.035})
    by_name = {"shuffled": times(0.03), "file-order": times(0.02), "spconv": times(0.3)}
    found = {"wall": by_name, "warm": by_name, "events": {"spconv": times(0.25)}, "gpu": by_name}
    rows = list(bench_maps._map_rows(setup, "map/a/k3", "shuffled", found, known))
    gpu = [row for row in rows if row.clock == "gpu" and not row.case.endswith("/warm")]
    assert [(row.peer, row.peer_value, row.peer_source) for row in gpu] == [
        ("its file-order", 0.02, "same run"),
        ("spconv", 0.3, "same run"),
        ("FlexGEMM", 0.08, "recorded"),
        ("FlexGEMM scaled by spconv", 0.1, "recorded"),
        ("spconv", 0.2, "recorded"),
        ("goal", 0.035, "goal"),
    ]
    assert [row.peer for row in rows if row.case.endswith("/warm")] == ["a flushed L2"]
    assert {row.peer for row in rows if row.clock == "wall"} == {"its file-order", "spconv"}
    assert any("1.25 times what was recorded" in line for line in said)


def test_recorded_peers_are_of_one_device(monkeypatch):
    monkeypatch.setattr(bench_maps, "device_name", lambda device: "another")
    setup, _ = setup_of()
    assert list(bench_maps._recorded(setup, {}, map_scenes.KNOWN["shell_256"])) == []


def test_goals_of_a_plan(voxels):
    known = map_scenes.KNOWN["nuscenes_1f_10cm"]
    assert bench_maps._plan_peers(times(2.0), "wall", voxels, known) == [Peer("its map", 2.0)]
    few = bench_maps._plan_peers(times(2.0), "gpu", voxels, known)
    assert few == [Peer("its map", 2.0), Peer("goal", 0.09, "goal")]
    many = bench_maps._plan_peers(times(2.0), "gpu", range(100_000), map_scenes.Known())
    assert many[1:] == [Peer("goal: 2 of its map", 4.0, "goal")]


# what says that a result is right


def test_a_map_is_held_against_its_twin(voxels):
    truth = map_work.truth_of(voxels, map_work.WINDOW)
    found = map_work.submanifold(voxels)
    assert map_work.wrong_map(found, truth) == ""
    rows = found.rows.clone()
    rows[3, 13] = 4
    assert "rows differ" in map_work.wrong_map(found._replace(rows=rows), truth)
    other = map_work.truth_of(map_scenes.surface(61, CPU), map_work.WINDOW)
    assert "60 outputs, expected 61" in map_work.wrong_map(found, other)
    assert "outputs differ" in map_work.wrong_map(found, truth._replace(outputs=map_scenes.surface(60, CPU)))
    found.outputs.status.fill_(1)
    assert "status is 1" in map_work.wrong_map(found, truth)


def test_tiles_hold_each_pair_once(voxels):
    truth = map_work.truth_of(voxels, map_work.WINDOW)
    rows, tiles = truth.rows, map_work.compacted(truth, 16)
    assert map_work.wrong_tiles(tiles, rows) == ""
    held = (tiles.inputs >= 0).nonzero()
    lost, moved = tiles.inputs.clone(), tiles.inputs.clone()
    lost[tuple(held[0])] = -1
    moved[tuple(held[0])] += 1
    pairs = int((rows >= 0).sum())
    told = map_work.wrong_tiles(tiles._replace(inputs=lost), rows)
    assert told == f"the entries hold {pairs - 1} pairs, expected {pairs}"
    assert "other pairs" in map_work.wrong_tiles(tiles._replace(inputs=moved), rows)


def test_a_plan_without_enough_room_is_wrong(voxels):
    truth = map_work.truth_of(voxels, map_work.WINDOW)
    room = map_work.Room.of(truth)
    assert map_work.wrong_plan(map_work.planned(map_work.submanifold(voxels), room), truth) == ""
    tight = map_work.Room(room.outputs, room.entries // 2, room.block)
    assert map_work.wrong_plan(map_work.planned(map_work.submanifold(voxels), tight), truth)


def test_steps_make_the_maps_of_a_chain(voxels):
    relations = [map_work.WINDOW, map_work.SUPPORT, map_work.WINDOW, map_work.HALVED]
    truths = truths_of(voxels, relations)
    assert [len(t.outputs) for t in truths] == [len(t.rows) for t in truths] and len(truths[3].outputs) < len(voxels)
    for name, step in STEPS.items():
        found = made(step, voxels, truths)
        assert [map_work.wrong_map(own, truth) for own, truth in zip(found, truths, strict=True)] == [""] * 4, name


def test_a_network_names_the_map_that_is_wrong(voxels):
    truths = map_work.truths_of_network(voxels)
    assert [truth.rows.shape[1] for truth in truths] == [27, 8, 27, 8, 27, 8, 27, 8, 27]
    found = map_work.network(voxels, [map_work.Room.of(truth) for truth in truths])
    assert map_work.wrong_network(found, truths) == ""
    found[3].found.rows.fill_(0)
    assert map_work.wrong_network(found, truths) == "map 3: rows differ from the twin's"


# scenes and pictures


def test_shells_are_those_of_the_recorded_baselines():
    assert len(map_scenes.shell(128)) == 62_000 and len(map_scenes.shell(256)) == 248_720


def test_a_landscape_has_each_voxel_once():
    found = map_scenes.surface(1000, CPU)
    assert len(torch.unique(found.coords, dim=0)) == 1000 and min(found.bounds.low) >= 0
    mixed = found.shuffled()
    assert not torch.equal(mixed.coords, found.coords) and torch.equal(mixed.coords, found.shuffled().coords)


def test_scenes_are_read_and_what_is_missing_is_said(monkeypatch, tmp_path):
    (tmp_path / "scenes").mkdir()
    (tmp_path / "ucf_tns").mkdir()
    np.savez(tmp_path / "scenes" / "waymo_1f_5cm.npz", coords=np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    (tmp_path / "ucf_tns" / "hall.tns").write_text("# 9 9 9 2 1 1 1\n0 1 2\n3 4 5\n")
    monkeypatch.setattr(map_scenes, "settings", lambda: Settings(tmp_path, tmp_path))
    setup, said = setup_of(quick=False)
    found = dict(map_scenes.scenes(setup))
    assert list(found) == ["waymo_1f_5cm", "shell_256", "shell_512"] and len(said) == 2
    assert found["waymo_1f_5cm"]().coords.tolist() == [[0, 1, 2, 3], [0, 4, 5, 6]]
    ((name, load),) = map_scenes.published(setup)
    assert name == "ucf_hall" and load().coords.tolist() == [[0, 0, 1, 2], [0, 3, 4, 5]]


def test_the_slope_of_a_linear_law_is_1():
    setup, said = setup_of()
    rows = list(bench_maps._slopes(setup, {100: 1.0, 1000: 10.0, 10_000: 100.0}))
    assert [(row.case, row.value) for row in rows] == [("scaling/all", 1.0), ("scaling/large", 1.0)]
    assert list(bench_maps._slopes(setup, {100: 1.0})) == []
