"""The examples run, in small."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pumice as pm

EXAMPLES = Path(__file__).parents[1] / "examples"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture(scope="module")
def robot_loop():
    yield from loaded("robot_loop")


@pytest.fixture(scope="module")
def potential():
    yield from loaded("potential")


def scan(count, seed=0):
    chance = np.random.default_rng(seed)
    return np.concatenate([chance.uniform(-5, 5, (count, 3)), chance.random((count, 1))], axis=1).astype(np.float32)


def test_a_robot_drives(robot_loop, tmp_path, capsys):
    np.savez(tmp_path / "one.npz", xyz=scan(200)[:, :3], feats=scan(200)[:, 3:])
    options = ["--scans", "12", "--rate", "200", "--deadline", "0.001", "--width", "0.125", "--voxel", "1"]
    ran = robot_loop.main([str(tmp_path / "one.npz"), *options, "--device", "cpu", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert len(ran.spent) == 12 and ran.missed == 12 and (ran.spent > 0).all() and 500 < ran.points < 2400
    assert "p99.9 is" in said and "12 of 12 scans missed 0.001 ms" in said and "eager fallbacks: none" in said
    assert said.count("#") > 10 and "memory, host: " in said
    assert (tmp_path / "latency.png").stat().st_size > 10_000


def test_every_point_has_the_label_of_its_voxel(robot_loop):
    torch.manual_seed(0)
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.ReLU(), pm.nn.Conv3d(8, 5, 3)).eval()
    robot = robot_loop.Robot(net, scan(300), robot_loop.Sensor([scan(300)]), 1.0)
    assert robot.fast.capacities == (134, 200, 300) == robot.fast.prepared
    for count in (300, 50, 1):
        points = torch.from_numpy(scan(count, count))
        x = pm.voxelize(points[:, :3], points, 1.0)
        with torch.no_grad():
            wanted = net(x).feats.argmax(1)[x.inverse]
        got = robot.labels(points.numpy())
        assert got.shape == (count,) and (got == wanted.numpy()).mean() > 0.98


class Clock:
    """Time that passes only where somebody waits or works."""

    def __init__(self):
        self.now = 5.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_rate_is_kept(robot_loop, monkeypatch):
    """Scans of 13 ms begin every 20 ms; behind one of 50 ms five begin late, one right after the other."""
    clock, begun = Clock(), []
    monkeypatch.setattr(robot_loop, "time", clock)

    class Robot:
        device = torch.device("cpu")

        def labels(self, scan):
            begun.append(clock.now - 5)
            clock.sleep(0.05 if len(begun) == 4 else 0.013)
            return np.zeros(len(scan))

    ran = robot_loop.drive(Robot(), robot_loop.Sensor([scan(20)]), 11, 50.0, 20.0)
    begins = [0, 0.02, 0.04, 0.06, 0.11, 0.123, 0.136, 0.149, 0.162, 0.18, 0.2]
    assert begun == pytest.approx(begins)
    assert ran.spent == pytest.approx([50.0 if number == 3 else 13.0 for number in range(11)])
    assert ran.missed == 1 and ran.late == 5


def test_scans_differ_and_keep_their_distances(robot_loop):
    sensor = robot_loop.Sensor([scan(500), scan(400, 1)])
    assert sensor.most == 500
    found = [sensor.scan(number) for number in range(4)]
    assert len({len(one) for one in found}) == 4 and all(len(one) < 500 for one in found)
    far = [np.sort(np.hypot(one[:, 0], one[:, 1])) for one in (found[0], sensor.scans[0])]
    assert np.isclose(far[0][:, None], far[1][None], atol=1e-4).any(1).all()
    assert max(float(np.linalg.norm(one[:, :3], axis=1).max()) for one in found) <= sensor.reach + 1e-4


def test_what_cannot_be_asked(robot_loop, capsys):
    with pytest.raises(SystemExit):
        robot_loop.main(["--scans", "0"])
    assert "--scans must be at least 1" in capsys.readouterr().err


def test_a_potential_is_learned(potential, capsys):
    """Forces of the reference are its slopes too; after some steps those of the network are better than none."""
    found = potential.main(["--steps", "60", "--channels", "4"])
    assert found.force < 0.7 * found.spread and found.exact < 1e-6 and found.turned < 1e-10
    assert "step    0: loss" in capsys.readouterr().out
    atoms, _, wanted = potential.labelled(2, 5)
    given = atoms.positions.detach().view(2, 8, 3).double()
    step = torch.zeros_like(given)
    step[1, 2, 0] = 1e-4
    ends = [potential.reference(potential.Atoms.of(given + sign * step))[1] for sign in (1, -1)]
    assert float((ends[0] - ends[1]) / 2e-4 + wanted.view(2, 8, 3)[1, 2, 0]) == pytest.approx(0, abs=1e-3)


@pytest.fixture(scope="module")
def rgcn():
    spec = importlib.util.spec_from_file_location("rgcn", EXAMPLES / "rgcn.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["rgcn"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["rgcn"]


def test_nodes_of_a_generated_graph_are_classified(rgcn, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PUMICE_DATA", str(tmp_path))
    (found,) = rgcn.main(["aifb", "--device", "cpu"])
    said = capsys.readouterr().out
    assert found > 0.8 and "a graph is generated" in said and "Graph(600 -> 600 nodes" in said


def test_triples_are_read(rgcn, tmp_path):
    triples = np.array([[0, 0, 1], [2, 1, 1]], np.int32)
    sides = {
        f"{side}_{name}": np.array([n], np.int32) for side, n in (("training", 0), ("test", 2)) for name in ("idx", "y")
    }
    np.savez(tmp_path / "one.npz", triples=triples, entities=np.zeros(3, np.uint8), **sides)
    task = rgcn.read(tmp_path / "one.npz")
    assert (task.graph.num_edges, task.graph.num_relations, task.classes) == (4, 4, 3)
    inputs, outputs, sizes = task.graph.map.pairs()
    assert inputs.tolist() == [0, 2, 1, 1] and outputs.tolist() == [1, 1, 0, 2] and sizes.tolist() == [1, 1, 1, 1]
