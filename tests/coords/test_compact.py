"""Tiles and groups of a kernel map hold each pair once, and nothing else."""

import pytest
import torch

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.testing import random_cloud

RELATIONS = {
    "3x3x3": Relation.of(3, 3),
    "5x5x5": Relation.of(3, 5),
    "7x7x7": Relation.of(3, 7),
    "down": Relation.of(3, 2, stride=2),
    "up": Relation.of_transposed(3, 2, stride=2),
    "point": Relation.of(3, 1),
}


def found(name, count=300):
    geometry = Geometry.checked(random_cloud(count, 3, batch_size=2))
    return kernel_map(geometry, RELATIONS[name])[0]


def wanted(kernel_map):
    inputs, outputs, _ = kernel_map.pairs()
    return sorted(zip(outputs.tolist(), kernel_map.taps().tolist(), inputs.tolist(), strict=True))


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize("name", RELATIONS)
@pytest.mark.parametrize("flipped", [False, True])
def test_tiles_hold_every_pair_once(name, block, flipped):
    m = found(name).transpose() if flipped else found(name)
    rows, tiles, taps, inputs = m.compacted(block)
    assert sorted(rows[rows >= 0].tolist()) == list(range(m.num_outputs))
    assert bool((tiles[1:] >= tiles[:-1]).all())
    entry, slot = (inputs >= 0).nonzero(as_tuple=True)
    got = zip(rows[tiles[entry], slot].tolist(), taps[entry].tolist(), inputs[entry, slot].tolist(), strict=True)
    assert sorted(got) == wanted(m)
    assert bool((inputs >= 0).any(dim=1).all()), "an entry without a pair"


@pytest.mark.parametrize("group", [8, 2048])
@pytest.mark.parametrize("name", RELATIONS)
def test_groups_hold_every_pair_once(name, group):
    m = found(name)
    taps, inputs, outputs = m.grouped(group)
    assert bool(((inputs >= 0) == (outputs >= 0)).all())
    g, slot = (inputs >= 0).nonzero(as_tuple=True)
    got = zip(outputs[g, slot].tolist(), taps[g].tolist(), inputs[g, slot].tolist(), strict=True)
    assert sorted(got) == wanted(m)


def test_like_outputs_share_a_tile():
    """Fewer absent pairs than in the order of the coordinates."""
    m = found("3x3x3", 2000)
    entries = len(m.compacted(64).taps)
    rows = m.rows()
    plain = sum(int((part >= 0).any(dim=0).sum()) for part in rows.split(64))
    assert entries < 0.85 * plain


def test_a_list_of_tiles_tells_its_bytes():
    tiles = found("3x3x3").compacted(16)
    entries = len(tiles.taps)
    assert tiles.nbytes == 4 * (tiles.rows.numel() + 2 * entries + 16 * entries)


def test_nothing():
    empty = Geometry.checked(torch.zeros(0, 4, dtype=torch.int32))
    m, _ = kernel_map(empty, RELATIONS["3x3x3"])
    assert [len(part) for part in m.compacted(64)] == [0, 0, 0, 0]
    assert [len(part) for part in m.grouped(64)] == [0, 0, 0]


def test_a_map_found_in_inference_serves_training():
    geometry = Geometry.checked(random_cloud(50, 3))
    with torch.inference_mode():
        m, _ = kernel_map(geometry, RELATIONS["3x3x3"])
        made = [*m.pairs()[:2], m.taps(), *m.compacted(16), *m.grouped(16)]
    assert isinstance(m, KernelMap) and not any(part.is_inference() for part in made)
