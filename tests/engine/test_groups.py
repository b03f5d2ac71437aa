"""Groups of layers by their kernel maps, in any module."""

import math
from dataclasses import replace

import cases
import pytest
import torch
from torch import nn

import pumice as pm
from pumice.engine.groups import EpilogueSpec, observe, recording_calls
from pumice.engine.measure import isolated_layer
from pumice.engine.subject import fresh, subject
from pumice.lower import maps
from pumice.ops import DATAFLOWS
from pumice.schedule.dataflow import PASSES
from pumice.testing import random_tensor


def groups(model, *scenes, left=()):
    return observe(subject(model.eval(), scenes, "inference"), left)


def members(found):
    return [set(group.layers) for group in found.groups]


def test_a_minkunet_has_nine():
    net, x = pm.models.MinkUNet(width=0.125), random_tensor(300, 4)
    found = groups(net, x)
    names = [group.name for group in found.groups]
    assert sorted(names) == sorted([f"k3 at {s}" for s in (1, 2, 4, 8, 16)] + [f"k2 s2 at {s}" for s in (1, 2, 4, 8)])
    by_name = {group.name: group for group in found.groups}
    assert [len(by_name[f"k3 at {s}"].layers) for s in (1, 2, 4, 8, 16)] == [6, 8, 8, 8, 4]
    assert set(by_name["k2 s2 at 2"].layers) == {"encoders.1.down.0", "decoders.2.up"}
    assert sum(map(len, members(found))) == 42 and not found.notes
    assert by_name["k3 at 1"].layers["stem.0.0"] is net.stem[0][0]
    assert not x.geometry.maps, "the samples stay as they are"


def test_a_backbone_shares_one_map_among_the_first_six():
    found = groups(pm.models.CenterPointBackbone(5), pm.SparseTensor(torch.randn(200, 5), scene(200)))
    assert [len(each) for each in members(found)] == [5, 1, 4, 1, 4, 1, 4, 1]
    assert [group.name for group in found.groups][-1] == "k3x1x1 s2x1x1 at 8"


def scene(count):
    return torch.nn.functional.pad(torch.cartesian_prod(*[torch.arange(8)] * 3)[:count], (1, 0)).int()


class Twice(nn.Module):
    """One layer over two maps, which joins what is over each; an unused layer; a pool and a bare convolution."""

    def __init__(self):
        super().__init__()
        self.fine, self.down, self.coarse = (pm.nn.Conv3d(4, 4, 3, stride=s) for s in (1, 2, 1))
        self.shared, self.other, self.unused = (pm.nn.Conv3d(4, 4, k) for k in (3, 5, 3))
        self.weight = nn.Parameter(torch.randn(4, 1, 1, 3, 4))

    def forward(self, x):
        x = self.other(self.shared(self.fine(x)))
        y = pm.ops.conv(self.coarse(self.shared(self.down(x))), self.weight)
        return pm.ops.max_pool(y, 2)


def test_a_layer_on_two_maps_joins_their_groups():
    found = groups(Twice(), random_tensor(100, 4))
    assert members(found) == [{"fine", "shared", "coarse"}, {"other"}, {"down"}]
    assert any("2 of the maps (k1x1x3, k2) are read by no convolution layer" in note for note in found.notes)
    assert any("1 layer (unused) did not run" in note for note in found.notes)


def test_layers_that_only_some_scenes_reach():
    class Forks(Twice):
        def forward(self, x):
            return self.fine(x) if len(x) > 50 else self.coarse(self.down(x))

    found = groups(Forks(), random_tensor(40, 4), random_tensor(100, 4))
    assert members(found) == [{"down"}, {"coarse"}, {"fine"}]
    assert [len(group.works) for group in found.groups] == [1, 1, 1] and all(group.calls for group in found.groups)


def test_layers_that_are_left():
    found = groups(Twice(), random_tensor(100, 4), left=["shared", "down"])
    assert members(found) == [{"fine"}, {"other"}, {"coarse"}]
    assert "2 layers (down, shared) keep the dataflow that was set by hand" in found.notes


def test_calls_of_every_kind():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.given = pm.nn.Conv2d(3, 3, 3)
            self.named = pm.nn.Conv2d(3, 3, 3, offsets=[[0, 0], [1, 1]])
            self.up = pm.nn.ConvTranspose2d(3, 3, 2, 2)
            self.grow = pm.nn.GenerativeConvTranspose2d(3, 3, 3)
            self.back = pm.nn.InverseConv2d(3, 3, 3, 1)

        def forward(self, x):
            y = self.grow(self.up(self.named(self.given(x, out="support"))))
            return self.given(x, out=y), self.back(x, target=x)

    x = random_tensor(30, 3, 2)
    found = groups(Kinds(), x)
    # `back` reads what `given` would where it keeps the coordinates.
    assert members(found) == [{"given"}, {"named"}, {"up"}, {"grow"}, {"back"}]
    assert [group.name for group in found.groups] == [
        "k3 at 1",
        "2 offsets at 1",
        "k2 s2 at 1/2",
        "k3 at 1/2",
        "k3 at 1 (2)",
    ]
    assert len(found.groups[0].calls) == 2


def test_the_numbers_of_a_group():
    x = random_tensor(200, 4)
    found = groups(
        nn.Sequential(pm.nn.Conv3d(4, 6, 3), pm.nn.Conv3d(6, 8, 2, stride=2)), x, random_tensor(300, 4, seed=1)
    )
    same, step = found.groups
    first, _ = pm.kernel_map(x.geometry, pm.Relation.of(3, 3))
    (work,) = same.works[0]
    assert (
        work.channels == (4, 6)
        and work.itemsize == 4
        and work.forward_map.counts == tuple(first.pairs().sizes.tolist())
    )
    assert (work.forward_map.inputs, work.forward_map.outputs) == (200, 200) and same.rows == 250
    (down,) = step.works[0]
    assert (down.forward_map.inputs, down.forward_map.outputs) == (
        down.dgrad_map.outputs,
        down.dgrad_map.inputs,
    ) and step.rows < 200
    assert same.workload == step.workload == (9, 3), "few rows are few rows"
    big = groups(pm.nn.Conv3d(4, 4, 3), random_tensor(3000, 4)).groups[0]
    assert big.workload == pytest.approx((11.5507, math.log2(big.pairs / 3000)), abs=1e-3) and big.pairs > 4096
    assert 1 <= same.pairs / same.rows < 27 and "1 layer, 250 rows" in str(same)


def test_values_as_they_are_multiplied():
    model, x = pm.nn.Conv3d(4, 4, 3), random_tensor(20, 4)
    assert groups(model, x).groups[0].works[0][0].itemsize == 4
    with torch.autocast("cpu", torch.bfloat16):
        found = groups(model, x).groups[0]
        assert found.works[0][0].itemsize == 2 and isolated_layer(found.calls, False)[0].weight.dtype == torch.bfloat16


def test_entries_of_tiles_are_counted_as_they_are_laid_out():
    """With one read, in both directions, for few taps and many."""
    x = random_tensor(400, 4)
    down, _ = pm.kernel_map(x.geometry, pm.Relation.of(3, 2, stride=2))
    same, _ = pm.kernel_map(x.geometry, pm.Relation.of(3, 3))
    one, _ = pm.kernel_map(x.geometry, pm.Relation.of(3, 1))
    for found in (down, down.transpose(), same, same.transpose(), one):
        counts, entries = maps.read_sizes(found, maps.tile_forms(found))
        assert counts == tuple(found.pairs().sizes.tolist())
        assert set(entries) == ({"unsorted", "compacted"} if found is one else set(maps._SPLITS))
        for name, parts in entries.items():
            laid = found.split(maps.tile_rows_for(found.num_outputs), maps._SPLITS[name])
            # Those of a submanifold map turned around are the same, the last first.
            assert sorted(parts) == sorted(len(part.tiles) for part in laid), name


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cast", [False, True])
def test_layers_are_seen_without_arithmetic(monkeypatch, fused, cast):
    """As on a GPU, where kernels are compiled before the first pass, and norms are part of them: the same layers over
    the same maps with the same epilogues, and results as they are."""
    monkeypatch.setattr("pumice.engine.groups._is_fused", lambda x: fused)
    net, x = pm.models.MinkUNet(width=0.125).eval(), random_tensor(100, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        want = net(fresh(x)).feats
        with recording_calls(net, x, arithmetic=False) as ahead:
            net(fresh(x))
        with recording_calls(net, x) as calls:
            assert torch.equal(net(fresh(x)).feats, want)
        assert "convolve" not in vars(net.stem[0][0]) and len(calls) == 42
        one, two = (
            [
                (call.name, call.found.num_outputs, call.found.flipped, call.compute_dtype, call.epilogue)
                for call in each
            ]
            for each in (ahead, calls)
        )
        assert one == two
        names = [name for name, _ in calls[3].epilogue.tensors] if calls[3].epilogue else []
        assert names == (["mean", "variance", "scale", "shift"] if fused else [])
        layers = [
            [(o.weight.shape, o.weight.dtype, o.epilogue) for o in isolated_layer(own, False)] for own in (ahead, calls)
        ]
        assert layers[0] == layers[1] and len(layers[0]) > 20
        for layer in isolated_layer(calls, False):
            layer.run(None, training=False)


def test_a_bias_is_part_of_what_follows():
    net = pm.nn.Sequential(pm.nn.Conv3d(4, 4, 3), pm.nn.BatchNorm(4), pm.nn.ReLU()).eval()
    x = random_tensor(20, 4)
    with recording_calls(net, x) as calls, torch.no_grad():
        net(x)
    (layer,) = isolated_layer(calls, False)
    assert layer.epilogue == EpilogueSpec((("shift", torch.float32),))
    calls[0] = replace(calls[0], epilogue=EpilogueSpec((("variance", torch.float32),), "relu", None, 1e-5))
    (layer,) = isolated_layer(calls, False)
    assert layer.epilogue == EpilogueSpec((("mean", torch.float32), ("variance", torch.float32)), "relu", None, 1e-5)
    (layer,) = isolated_layer(calls, True)
    assert layer.epilogue is None


@pytest.mark.parametrize("training", [False, True])
def test_layers_run_alone(training):
    """Every pass in every dataflow, those that are alike once; nothing that was laid out stays."""
    net = nn.Sequential(*(pm.nn.Conv3d(4, 4, 3) for _ in range(3)), pm.nn.Conv3d(4, 6, 3, bias=False, groups=2))
    (group,) = groups(net, random_tensor(40, 4)).groups
    held = dict(group.calls[0].found._storages)
    layers = isolated_layer(group.calls, training)
    shift = None if training else EpilogueSpec((("shift", torch.float32),))
    assert [(tuple(layer.weight.shape), layer.epilogue) for layer in layers] == [
        ((4, 27, 4), shift),
        ((6, 27, 2), None),
    ]
    for layer in layers:
        for name in PASSES:
            for flow in DATAFLOWS.values():
                layer.run_pass(name, flow)
        layer.run(None, training)
    assert group.calls[0].found._storages == held
    assert all(p.grad is None for p in net.parameters()) and len(cases.maps_below(group.calls[0].geometry)) == 1
