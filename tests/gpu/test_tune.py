"""pm.tune on a GPU: kernels are told apart, what is chosen is not slower, and results stay the same.

Most of what this takes is compiling: the network is small, few dataflows are tried, and tiles are timed in one test.
Other work on the GPU may make any measurement longer, none shorter: what is compared are the least of several.
"""

import importlib
from dataclasses import replace

import pytest
import torch

import pumice as pm
from pumice.lower import kernel as kernels
from pumice.lower import maps
from pumice.nn.conv import convolutions
from pumice.schedule.tuned_plans import Plans
from pumice.schedule.tuned_tiles import Ledger

pytestmark = pytest.mark.gpu
measuring, tuning, networks = (
    importlib.import_module(f"pumice.engine.{name}") for name in ("measure", "tuning", "tuned_network")
)
ENOUGH = 120
"""A budget that is never spent: what ends early is interrupted."""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The user's plans and tiles, none at first."""
    plans, tiles = Plans(tmp_path / "plans.json"), Ledger(tmp_path / "tiles.json")
    monkeypatch.setattr(networks, "plans", lambda: plans)
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
    """Five layers over three maps: the voxels, the way down, and the level below."""
    torch.manual_seed(0)
    layers = []
    for channels, step in (((4, 32), 1), ((32, 32), 1), ((32, 64), 2), ((64, 64), 1), ((64, 64), 1)):
        layers += [
            pm.nn.Conv3d(*channels, 3 if step == 1 else 2, stride=step, bias=False),
            pm.nn.BatchNorm(channels[1]),
            pm.nn.ReLU(),
        ]
    return pm.nn.Sequential(*layers).half().cuda().eval()


def until_tiles(step):
    """Tells nothing, and interrupts where tiles would be timed; what was found until then is kept."""
    if step.candidate == "tiles":
        raise KeyboardInterrupt


def tuned(net, scenes, mode="inference", **more):
    return pm.tune(net, scenes, mode, budget=ENOUGH, progress=until_tiles, **more)


def least(scenes, *nets):
    """The least time of each network, measured in turn."""
    rounds = [[pm.engine.measure(net, scenes, repeats=3).total for net in nets] for _ in range(4)]
    return [min(times) for times in zip(*rounds, strict=True)]


def test_kernels_are_told_apart():
    net = network()
    for layer in convolutions(net):
        layer.dataflow = "implicit-gemm-sorted"
    found = pm.engine.measure(net, [scene(), scene(1)])
    assert found.clock == "kernels" and not found.note, found
    assert {"map", "sort", "conv"} <= set(found.parts) and min(found.parts.values()) > 0
    assert sum(found.parts.values()) == pytest.approx(found.total) and found.total < found.wall
    # By unknown names all would be "other".
    assert found.parts["conv"] > 0.05 * found.total > 0, found


def test_measurements_repeat():
    """At least once: others may be at work between two of them."""
    net, scenes = network(), [scene()]
    times = [pm.engine.measure(net, scenes).total for _ in range(8)]
    assert min(abs(one - two) / one for one, two in zip(times, times[1:], strict=False)) < 0.1, times


@pytest.mark.parametrize(
    ("mode", "candidates"),
    [
        ("inference", ["implicit-gemm-unsorted", "implicit-gemm-table"]),
        ("training", ["implicit-gemm-unsorted"]),
    ],
)
def test_a_tuned_network(mode, candidates, own):
    net, scenes = network(), [scene()]
    with torch.no_grad():
        want = net(scenes[0]).feats
    found = tuned(net, scenes, mode, candidates=candidates)
    print(found, found.before, found.after, sep="\n")
    assert found.finished and not found.reused and found.before.clock == "kernels"
    assert len(found.choices) == 3 and len(own.all()) == 1
    tried = {trial.flow for choice in found.choices for trial in choice.trials if not trial.refused}
    assert tried & set(candidates) and tried <= {*candidates, "planned"}
    with torch.no_grad():
        got = net(pm.SparseTensor(scenes[0].feats, scenes[0].coords)).feats
    assert (got.float() - want.float()).norm() < 1e-2 * want.float().norm()
    again = tuned(network(), [scene(1)], mode, candidates=candidates)
    assert again.reused and again.flows == found.flows
    if mode == "inference":
        mine, planned = least(scenes, net, network())
        assert mine < 1.1 * planned, "what is chosen is not slower"


def test_tiles_are_timed_and_kept_where_the_network_is_no_slower():
    layer = pm.nn.Conv3d(32, 32, 3, bias=False).half().cuda()
    x = scene()
    x = pm.SparseTensor(torch.randn(len(x), 32, device="cuda").half(), x.coords)
    found = pm.tune(layer, [x], budget=ENOUGH, candidates=["implicit-gemm-unsorted"], progress=False)
    known = len(kernels.ledger().known())
    assert found.finished and len(found.tiles) == 1, found
    (tiles,) = found.tiles
    assert tiles.kernels >= 1 and known == (tiles.kernels if tiles.kept else 0)


@pytest.mark.parametrize("name", ["implicit-gemm-unsorted", "implicit-gemm-split2", "implicit-gemm-table"])
def test_only_what_is_read_is_laid_out(name):
    """No order of rows is made for layers that want none."""
    net, x = pm.models.MinkUNet(width=0.5).half().cuda().eval(), scene()
    for layer in convolutions(net):
        layer.dataflow = name
    with torch.no_grad():
        x.prepare(net.steps, net.windows, net.consumers)
        net.stem(x)
    (found,) = (found for (relation, _), (found, _) in x.geometry.maps.items() if relation.policy == "same")
    form = pm.ops.DATAFLOWS[name].form
    assert {one for one in maps.FORMS if found.has(("form", one))} == {form}


def test_entries_are_counted_on_the_device():
    found, _ = pm.kernel_map(scene().geometry, pm.Relation.of(3, 3))
    counts, entries = maps.read_sizes(found, maps.tile_forms(found))
    assert counts == tuple(found.pairs().sizes.tolist())
    for name, parts in entries.items():
        laid = found.split(maps.tile_rows_for(found.num_outputs), maps._SPLITS[name])
        assert parts == tuple(len(part.tiles) for part in laid)


def test_without_a_profiler(monkeypatch):
    def taken(calls):
        raise RuntimeError("taken")

    monkeypatch.setattr(measuring, "profiled", taken)
    found = tuned(network(), [scene()], candidates=["implicit-gemm-unsorted"])
    assert found.before.clock == "events" and "timed by events (taken)" in str(found)


def test_a_dataflow_that_cannot_run_is_passed_over(monkeypatch):
    broken = replace(pm.ops.DATAFLOWS["implicit-gemm-unsorted"], name="broken", movement="on foot")
    monkeypatch.setattr(tuning, "candidate_flows", lambda flows, *more: [tuning.CandidateFlow(broken, 1.0)])
    found = tuned(network(), [scene()], candidates=[broken])
    assert all(choice.flow is None for choice in found.choices)
    assert "movement 'on foot' is unknown" in found.choices[0].trials[0].refused


def test_groupings_are_tuned_and_change_no_result():
    net, scenes = network(), [scene(), scene(1, 3000)]
    with torch.no_grad():
        want = net(scenes[0]).feats.float()
        found = pm.tune(net, scenes, "grouping", budget=ENOUGH, candidates="all", progress=False)
        got = net(scenes[0]).feats.float()
    assert float((got - want).norm() / want.norm()) < 5e-3
    assert found.finished and found.before.clock == "events" and found.after.total <= found.before.total
    assert all(
        layer.dataflow.startswith("gather") if isinstance(layer.dataflow, str) else layer.dataflow.grouping
        for layer in convolutions(net)
    )
    again = pm.tune(network(), scenes, "grouping", candidates="all", progress=False)
    assert again.reused and again.flows == found.flows


def test_a_call_of_many_kernels_is_timed_without_its_launches():
    """The GPU waits until the host has queued all: the time of the kernels alone, whatever the host takes."""
    x = torch.ones(1 << 16, device="cuda")

    def many():
        for _ in range(200):
            x.mul_(1.0)

    def slow():
        for _ in range(200):
            x.mul_(1.0)
            sum(range(2000))

    fast, slower = (measuring.latency(call, x.device) for call in (many, slow))
    assert slower < 1.5 * fast < 2e-3
