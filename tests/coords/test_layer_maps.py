"""Layers that find their own kernel maps: together with those that their network asked for before."""

from __future__ import annotations

import copy
from importlib import import_module

import pytest
import torch
from torch import nn

import pumice as pm
from pumice.coords import chain_build
from pumice.testing import random_cloud

layer_maps = import_module("pumice.ops.prepare")


class Net(nn.Module):
    """Two steps down and one back; a branch that is taken if asked for."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = pm.nn.Conv3d(2, 3, 3), pm.nn.Conv3d(3, 3, 3)
        self.down, self.step = pm.nn.Conv3d(3, 4, 2, stride=2), pm.nn.Conv3d(4, 4, 3, stride=2, padding=1)
        self.deep, self.up = pm.nn.Conv3d(4, 4, 3), pm.nn.InverseConv3d(4, 3, 3, stride=2, padding=1)
        self.wide = pm.nn.Conv3d(4, 4, 3, dilation=2)
        self.branches = False

    def forward(self, x):
        middle = self.down(self.conv(self.stem(x)))
        y = self.up(self.deep(self.step(middle)), middle)
        return self.wide(middle) if self.branches else y


@pytest.fixture
def built(monkeypatch):
    """How many maps were found together, by call."""
    found, build = [], chain_build.build_chain

    def counted(geometry, request, *given):
        found.append(len(request.maps))
        return build(geometry, request, *given)

    monkeypatch.setattr(import_module("pumice.ops.prepare"), "build_chain", counted)
    monkeypatch.setattr(layer_maps, "has_triton", lambda x: True)
    return found


def scene(seed: int) -> pm.SparseTensor:
    coords = random_cloud(300, 3, extent=12, seed=seed)
    return pm.SparseTensor(torch.randn(len(coords), 2), coords, spatial_shape=(12, 12, 12))


@pytest.mark.parametrize("grad", [False, True])
def test_the_second_scene_finds_all_maps_of_the_network_together(built, grad):
    torch.manual_seed(0)
    net = Net().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        for number in range(3):
            x = scene(number)
            y = net(x)
            # The same by maps that others find one by one.
            want = copy.deepcopy(net)(pm.SparseTensor(x.feats, x.coords, spatial_shape=(12, 12, 12)))
            assert torch.equal(y.coords, want.coords) and torch.allclose(y.feats, want.feats, atol=1e-5)
            own = built[: len(built) - 4]
            assert [len(own), max(own)] == ([4, 2] if number == 0 else [1, 5 + grad]), built
            built.clear()


def test_maps_that_were_not_asked_for_before_are_found_alone_and_remembered(built):
    net = Net()
    with torch.no_grad():
        net(scene(0))
        net.branches = True
        built.clear()
        net(scene(1))
        assert len(built) == 2
        built.clear()
        net(scene(2))
    assert len(built) == 1


def test_networks_of_one_first_layer_are_told_by_its_weight(built):
    """Another network, and a layer that is no first one, do not follow what this one asked for."""
    net, other = Net(), nn.Sequential(pm.nn.Conv3d(2, 3, 3))
    with torch.no_grad():
        net(scene(0)), other(scene(1))
        built.clear()
        other(scene(2)), net.conv(scene(3).replace(torch.randn(len(scene(3).coords), 3)))
    assert built == [1, 1]


def test_what_was_asked_for_is_forgotten_with_the_weight():
    net, before = Net(), len(layer_maps._ASKED)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_maps, "has_triton", lambda x: True)
        net(scene(0))
    assert len(layer_maps._ASKED) == before + 1
    del net
    assert len(layer_maps._ASKED) == before


def test_what_cannot_be_found_with_others_does_not_hold_these_up(built):
    """A step with dilation is found alone, the maps before it together."""
    net = nn.Sequential(
        pm.nn.Conv3d(2, 3, 3),
        pm.nn.Conv3d(3, 3, 2, stride=2),
        pm.nn.Conv3d(3, 3, 3),
        pm.nn.Conv3d(3, 3, 3, 2, 1, dilation=2),
    )
    with torch.no_grad():
        net(scene(0))
        built.clear()
        net(scene(1))
    assert built == [4]


def built_by(net, number, built):
    """The maps found together on a scene, after a check against a copy of the network, which finds its own."""
    x = scene(number)
    y, found = net(x), list(built)
    want = copy.deepcopy(net)(pm.SparseTensor(x.feats, x.coords, spatial_shape=(12, 12, 12)))
    assert torch.equal(y.coords, want.coords) and torch.allclose(y.feats, want.feats, atol=1e-5)
    built.clear()
    return found


def test_a_first_window_of_many_offsets_is_found_alone_and_the_rest_together(built):
    net = nn.Sequential(pm.nn.Conv3d(2, 3, 5), pm.nn.Conv3d(3, 3, 3), pm.nn.Conv3d(3, 3, 3, stride=2, padding=1))
    with torch.no_grad():
        for number, calls in enumerate(([1, 1], [2], [2])):
            assert built_by(net, number, built) == calls


def test_pools_are_found_with_the_layers_around_them(built):
    net = nn.Sequential(
        pm.nn.Conv3d(2, 3, 3),
        pm.nn.MaxPool3d(2),
        pm.nn.Conv3d(3, 3, 3),
        pm.nn.AvgPool3d(3, 2, 1),
        pm.nn.Conv3d(3, 3, 3),
    )
    with torch.no_grad():
        for number, calls in enumerate(([1, 1, 1], [6], [6])):
            assert built_by(net, number, built) == calls


def test_a_network_of_windows_of_many_offsets_alone(built):
    net = pm.nn.Conv3d(2, 3, 5)
    with torch.no_grad():
        for number in range(3):
            assert net(scene(number)).feats.shape[1] == 3
    assert not built


def test_maps_are_found_one_by_one_while_kernels_are_compiled(built, monkeypatch):
    net = Net()
    with torch.no_grad():
        net(scene(0))
        for ready, calls in ((False, 4), (True, 1)):
            built.clear()
            monkeypatch.setattr(layer_maps, "_compiled", lambda asked, request, device, ready=ready: ready)
            x = scene(1)
            y = net(x)
            assert len(built) == calls
            want = copy.deepcopy(net)(pm.SparseTensor(x.feats, x.coords, spatial_shape=(12, 12, 12)))
            assert torch.allclose(y.feats, want.feats, atol=1e-5)
