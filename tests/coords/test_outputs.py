"""Which outputs exist: as a loop says, in (batch, Morton) order, whatever way they are found."""

from dataclasses import replace

import pytest
import torch
from clouds import SHAPES, SIDES, NoWaits, Scene, levels, outputs_agree, site_around, within
from clouds import outputs as wanted

from pumice.coords import Bounds, Geometry, Relation, kernel_map
from pumice.coords.buffer import OVERFLOW
from pumice.coords.outputs import (
    NativeOutputs,
    SortedOutputs,
    TorchOutputs,
    codes_fit,
    make_outputs,
    max_outputs,
    site_of,
)
from pumice.errors import CoordinateError
from pumice.runtime import native

DIMS = pytest.mark.parametrize("dim", [1, 2, 3, 4])
WAYS = (TorchOutputs, SortedOutputs, *([] if isinstance(native.compiler(), str) else [NativeOutputs]))
"""How outputs are found without kernels; test_maps of the kernels adds the third."""

SCENES = {
    "plain": Scene(),
    "one": Scene(count=1, batch=1),
    "batch of 512": Scene(count=120, batch=512),
    "loose box": Scene(loose=40, spare=0),
    "clusters": Scene(clusters=3),
}


def scene(name, dim):
    return replace(SCENES[name], dim=dim, side=SIDES[dim])


@DIMS
@pytest.mark.parametrize("name", SCENES)
def test_outputs_are_those_of_a_loop(name, dim):
    cloud = scene(name, dim).cloud()
    for relation in levels(dim).values():
        outputs_agree(cloud, site_around(cloud), relation, WAYS)


@DIMS
def test_a_spatial_shape_cuts_outputs_off(dim):
    geometry = within(SHAPES[dim])
    site = Geometry.checked(geometry.coords, spatial_shape=SHAPES[dim]).site
    for relation in levels(dim).values():
        if relation.custom is None:
            outputs_agree(geometry.cloud, site, relation, WAYS)


def test_nothing_is_made_outside_a_shape_of_which_no_cell_is_reached():
    """The inputs' last cell meets the cell past the outputs' last one, and no other."""
    geometry = Geometry.checked(torch.tensor([[0, 5]], dtype=torch.int32), spatial_shape=(6,))
    outputs_agree(geometry.cloud, geometry.site, Relation.of(1, 3, stride=2, padding=0), WAYS)


@DIMS
def test_a_cloud_with_nobody_alive_has_no_outputs(dim):
    cloud = replace(SCENES["plain"], dim=dim, count=0, spare=9).cloud()
    site = Geometry.checked(cloud.coords[:0]).site
    for relation in levels(dim).values():
        for way in WAYS:
            made = way(cloud, relation, site_of(site, relation))
            assert int(made.count) == 0 and len(made.geometry(0)) == 0
            assert (made.cloud(4).coords == -1).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("label", ["floor k2 s2", "support k3 s2 p1", "transposed k3 s2 p1"])
def test_outputs_without_room_are_left_out_and_reported(way, label):
    relation = levels(3)[label]
    cloud = scene("plain", 3).cloud()
    made = way(cloud, relation, site_of(site_around(cloud), relation))
    whole = made.geometry(int(made.count)).coords
    for room in (len(whole) - 1, 3, 0):
        cloud.status.zero_()
        small = made.cloud(room)
        assert torch.equal(small.coords, whole[:room])
        assert int(small.status) == OVERFLOW and int(made.count) == len(whole)
        with pytest.raises(CoordinateError, match=f"{len(whole)} results exceed the capacity of {room}"):
            small.read()


def test_staged_waits_for_nothing():
    cloud = scene("plain", 3).cloud()
    site = site_around(cloud)
    for relation in levels(3).values():
        goal = site_of(site, relation)
        SortedOutputs(cloud, relation, goal)  # tables of codes are made once
        with NoWaits():
            SortedOutputs(cloud, relation, goal).cloud(50)


def test_outputs_of_outputs():
    """Levels in buffers, one made from the other, are those that are made one by one."""
    steps = [levels(3)[name] for name in ("floor k2 s2", "support k3 s2 p1", "transposed k2 s2", "support k3")]
    cloud = scene("plain", 3).cloud()
    site = site_around(cloud)
    geometry = Geometry.checked(cloud.coords[: int(cloud.count)])
    for relation in steps:
        goal = site_of(site, relation)
        cloud = SortedOutputs(cloud, relation, goal).cloud(max_outputs(cloud.capacity, relation, goal))
        site, geometry = goal, kernel_map(geometry, relation)[1]
        assert cloud.read() == len(geometry)
        assert torch.equal(cloud.coords[: len(geometry)], geometry.coords)


def test_codes_fit_only_where_a_word_holds_them():
    assert codes_fit(Bounds((-8,) * 3, (8,) * 3, 512))
    assert codes_fit(Bounds((0,), (2**31 - 1,), 1))
    assert codes_fit(Bounds((0,) * 4, (2**14 - 1,) * 4, 63)) and not codes_fit(Bounds((0,) * 4, (2**14 - 1,) * 4, 64))


def test_outputs_of_a_box_without_codes_are_listed():
    coords = Scene(3, clusters=2, far=True).coords()
    geometry = Geometry.checked(coords)
    made = make_outputs(geometry.cloud, geometry.site, levels(3)["floor k2 s2"])
    assert isinstance(made, TorchOutputs)
    assert set(map(tuple, made.geometry(int(made.count)).coords.tolist())) == wanted(
        coords, levels(3)["floor k2 s2"], None
    )


def test_outputs_beyond_int32_are_refused():
    geometry = Geometry.checked(torch.tensor([[0, 2**30], [0, 3]], dtype=torch.int32))
    with pytest.raises(CoordinateError, match="int32 holds"):
        kernel_map(geometry, Relation.of_transposed(1, 2, stride=2))
