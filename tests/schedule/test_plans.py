"""Tuned plans: what they serve, and that their file keeps them."""

import json
import math
import multiprocessing
from dataclasses import replace

import pytest
from schedule import writers

from pumice.schedule.dataflow import DATAFLOWS, Grouping
from pumice.schedule.tuned_plans import NEAR, PlanKey, Plans, TunedPlan

SPAWN = multiprocessing.get_context("spawn")
WORKLOAD = ((14.0, 2.0), (12.3, 1.9))
UNSORTED = DATAFLOWS["implicit-gemm-unsorted"]
OWN = replace(DATAFLOWS["gather-gemm-scatter-fused-adaptive"], grouping=Grouping("adaptive", epsilon=0.1, size=50_000))


def key(workload=WORKLOAD, **more):
    names = {"device": "some GPU", "dtypes": "float16", "mode": "inference", "model": "0123", **more}
    return PlanKey.of(*names.values(), workload)


def plan(workload=WORKLOAD, **more):
    spent = {"total": 2e-3, "parts": {"conv": 1.5e-3, "map": 5e-4}, "wall": 5e-3, "clock": "kernels", "note": ""}
    told = {"flows": {"k3 at 1": UNSORTED, "k2 s2 at 1": OWN}, "before": spent, "after": {**spent, "total": 1e-3}}
    return TunedPlan(
        **{**told, "workload": workload, "tuned_groups": ("k3 at 1", "k2 s2 at 1"), "about": "a net", **more}
    )


@pytest.fixture
def own(tmp_path):
    return Plans(tmp_path / "deep" / "plans.json")


def test_what_is_kept_is_found_by_another_process(own):
    own.keep(key(), plan())
    found = Plans(own.path)
    assert found.all() == {key(): plan(date=own.find(key()).date)}
    assert found.near(key(), WORKLOAD)[1].flows == {"k3 at 1": UNSORTED, "k2 s2 at 1": OWN}
    assert json.loads(own.path.read_text())["plans"][0]["plan"]["flows"]["k3 at 1"] == "implicit-gemm-unsorted"


def moved(by, place=0):
    rows = [list(pair) for pair in WORKLOAD]
    rows[place // 2][place % 2] += by
    return tuple(map(tuple, rows))


@pytest.mark.parametrize("place", range(4))
def test_a_plan_serves_what_is_like_it_and_nothing_else(own, place):
    """Every number within a factor of sqrt 2, wherever it lies: there are no edges of buckets."""
    own.keep(key(), plan())
    for by in (-0.99 * NEAR, 0.3, 0.99 * NEAR):
        found = own.near(key(moved(by, place)), moved(by, place))
        assert found is not None and found[0] == key() and found[1].distance(moved(by, place)) == pytest.approx(abs(by))
    for by in (-1.01 * NEAR, 1.01 * NEAR, 5.0):
        far = moved(by, place)
        assert own.near(key(far), far) is None
        assert own.alike(key(far), far)[0] == key(), "it is known, though"
    assert plan().distance(WORKLOAD[:1]) == math.inf


@pytest.mark.parametrize("name", ["device", "dtypes", "mode", "model"])
def test_a_plan_serves_its_own_network_alone(own, name):
    own.keep(key(), plan())
    assert own.alike(key(**{name: "another"}), WORKLOAD) is None


def test_the_nearest_is_taken(own):
    for by in (0.0, 0.4, 3.0):
        own.keep(key(moved(by)), plan(moved(by)))
    assert own.near(key(moved(0.3)), moved(0.3))[1].workload == moved(0.4)
    assert own.near(key(moved(0.1)), moved(0.1))[1].workload == moved(0.0)
    assert own.alike(key(moved(2.0)), moved(2.0))[1].workload == moved(3.0)


def test_what_others_write_is_seen(own):
    assert own.near(key(), WORKLOAD) is None
    Plans(own.path).keep(key(), plan())
    assert own.near(key(), WORKLOAD) is not None


@pytest.mark.parametrize("spoil", [
    lambda e: {**e, "plan": {**e["plan"], "flows": {"k3 at 1": "woven"}}},
    lambda e: {**e, "plan": {**e["plan"], "woven": 3}},
    lambda e: {**e, "plan": {**e["plan"], "before": {}}},
    lambda e: {**e, "plan": {**e["plan"], "workload": [[1, "x"]]}},
    lambda e: {**e, "plan": {**e["plan"], "workload": [[1, 10**400]]}},
    lambda e: {**e, "key": {**e["key"], "workload": [[1, float("inf")]]}},
    lambda e: {**e, "plan": {**e["plan"], "date": "2026-01-01T00:00:00"}},
    lambda e: {**e, "plan": None},
    lambda e: {**e, "key": {**e["key"], "workload": 3}},
    lambda e: "a word",
])  # fmt: skip
def test_entries_that_cannot_be_read_are_passed_over_and_kept(own, spoil):
    own.keep(key(), plan())
    found = json.loads(own.path.read_text())
    strange = found["plans"][0] = spoil(found["plans"][0])
    own.path.write_text(json.dumps(found))
    other = Plans(own.path)
    assert other.all() == {} and other.near(key(), WORKLOAD) is None
    other.keep(key(model="other"), plan())
    assert strange in json.loads(own.path.read_text())["plans"]


def test_processes_that_tune_at_once_lose_nothing(own):
    start = SPAWN.Barrier(6)
    processes = [SPAWN.Process(target=writers.keep_plans, args=(own.path, n, 15, start)) for n in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    found = own.all()
    assert {k.model for k in found} == {f"{writer}.{number}" for writer in range(6) for number in range(15)}
    assert all(p.flows == {"a": UNSORTED} for p in found.values())
