"""pm.tune on a GPU: kernels are told apart, what is chosen is not slower, and results stay the same."""

import importlib
from dataclasses import replace

import pytest
import torch

import pumice as pm
from pumice.lower import maps
from pumice.lower import triton as kernels
from pumice.nn.conv import convolutions
from pumice.schedule.ledger import Ledger
from pumice.schedule.plans import Plans

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False"),
]
measuring, tuning = (importlib.import_module(f"pumice.engine.{name}") for name in ("measure", "tuning"))


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The user's plans and tiles, none at first."""
    plans, tiles = Plans(tmp_path / "plans.json"), Ledger(tmp_path / "tiles.json")
    monkeypatch.setattr(tuning, "plans", lambda: plans)
    for module in (tuning, kernels):
        monkeypatch.setattr(module, "ledger", lambda: tiles)
    return plans


def scene(seed=0, count=6000):
    """A rough surface: each column of a square has a voxel, and some have two."""
    chance = torch.Generator().manual_seed(seed)
    side = int(count**0.5)
    place = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    height = (8 * (torch.sin(place[:, 0] / 9) + torch.cos(place[:, 1] / 7))).round() + 20
    more = torch.rand(len(place), generator=chance) < 0.3
    points = torch.cat(
        [torch.stack([*place.unbind(1), height], 1), torch.stack([*place[more].unbind(1), height[more] + 1], 1)]
    )
    coords = torch.nn.functional.pad(points, (1, 0)).int().cuda()
    return pm.SparseTensor(torch.randn(len(coords), 4, generator=chance).half().cuda(), coords)


def network():
    torch.manual_seed(0)
    return pm.models.MinkUNet(width=0.5).half().cuda().eval()


def test_kernels_are_told_apart():
    found = pm.engine.measure(network(), [scene(), scene(1)])
    assert found.clock == "kernels" and not found.note, found
    assert {"map", "sort", "conv"} <= set(found.parts) and found.parts["conv"] > found.parts["map"] > 0
    assert sum(found.parts.values()) == pytest.approx(found.total) and found.total < found.wall < 1
    assert found.parts["conv"] > 0.2 * found.total, "names of kernels are known"


def test_measurements_repeat():
    net, scenes = network(), [scene()]
    one, two = (pm.engine.measure(net, scenes).total for _ in range(2))
    assert abs(one - two) < 0.1 * max(one, two)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_tuned_network(mode, own):
    net, scenes = network(), [scene()]
    with torch.no_grad():
        want = net(scenes[0]).feats
    found = pm.tune(net, scenes, mode, budget=40, progress=False)
    print(found, found.before, found.after, sep="\n")
    assert found.before.clock == "kernels" and found.after.total <= 1.02 * found.before.total
    assert len(found.choices) == 9 and len(own.all()) == 1
    with torch.no_grad():
        got = net(pm.SparseTensor(scenes[0].feats, scenes[0].coords)).feats
    assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()
    again = pm.tune(network(), [scene(1)], mode, progress=False)
    assert again.reused and again.flows == found.flows


@pytest.mark.parametrize("name", ["implicit-gemm-unsorted", "implicit-gemm-split2", "implicit-gemm-table"])
def test_only_what_is_read_is_laid_out(name):
    """No order of rows is made for layers that want none."""
    net, x = network(), scene()
    for layer in convolutions(net):
        layer.dataflow = name
    with torch.no_grad():
        net(x)
    (found,) = (found for (relation, _), (found, _) in x.geometry.maps.items() if relation.policy == "same")
    form = pm.ops.DATAFLOWS[name].form
    assert {one for one in maps.FORMS if found.has(("form", one))} == {form}


def test_entries_are_counted_on_the_device():
    found, _ = pm.kernel_map(scene().geometry, pm.Relation.of(3, 3))
    counts, entries = maps.counted(found, maps.tile_forms(found))
    assert counts == tuple(found.pairs().sizes.tolist())
    for name, parts in entries.items():
        laid = found.split(maps.block_of(found.num_outputs), maps._SPLITS[name])
        assert parts == tuple(len(part.tiles) for part in laid)


def test_without_a_profiler(monkeypatch):
    def taken(calls):
        raise RuntimeError("taken")

    monkeypatch.setattr(measuring, "profiled", taken)
    found = pm.tune(network(), [scene()], budget=10, candidates=["implicit-gemm-unsorted"], progress=False)
    assert found.before.clock == "events" and "could not be timed one by one (taken)" in str(found)


def test_a_dataflow_that_cannot_run_is_passed_over(monkeypatch):
    broken = replace(pm.ops.DATAFLOWS["implicit-gemm-unsorted"], name="broken", movement="on foot")
    monkeypatch.setattr(tuning, "prospects", lambda flows, *more: [tuning.Prospect(broken, 1.0)])
    found = pm.tune(network(), [scene()], budget=10, candidates=[broken], progress=False)
    assert all(choice.flow is None for choice in found.choices)
    assert "movement 'on foot' is unknown" in found.choices[0].trials[0].refused
