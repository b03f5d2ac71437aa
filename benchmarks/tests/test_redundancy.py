"""What is multiplied by zero: counted again entry by entry, and what the study says and keeps."""

import pytest
import torch

from benchmarks.harness.rows import ANY
from benchmarks.scenes.layers import map_of
from benchmarks.suites.roofline import ALL_TAPS, SPLITS, redundancies
from pumice.coords import SortSpec
from pumice.testing import random_cloud


def cloud(count=150, side=7):
    return random_cloud(count, extent=side)


def counted_again(found, block, splits):
    """Row by row: a tile multiplies as many rows as it has room for by every tap that any of its rows has."""
    table, computed = found.rows().tolist(), 0
    for how in SortSpec.splits(found.volume, splits):
        own = [range(first, first + block) for first in range(0, len(table), block)]
        for tile in own if splits == 0 else found.tiling(block, how).slots.tolist():
            there = [row for row in tile if 0 <= row < len(table)]
            taps = {k for row in there for k in range(how.first, how.last) if table[row][k] >= 0}
            computed += len(taps) * len(tile)
    useful = sum(met >= 0 for row in table for met in row)
    return computed / useful


@pytest.mark.parametrize("block", [16, 64])
def test_ratios_are_those_of_a_count_row_by_row(block):
    found = map_of(cloud())
    ratios = redundancies(found, block)
    for name, splits in SPLITS.items():
        assert ratios[name] == pytest.approx(counted_again(found, block, splits)), name
    tiles = -(-found.num_outputs // block)
    assert ratios[ALL_TAPS] == pytest.approx(27 * tiles * block / len(found.pairs().inputs))
    assert ratios[ALL_TAPS] >= ratios["unsorted"] >= ratios["sorted"] > 1


def test_tiles_of_one_row_multiply_nothing_by_zero():
    ratios = redundancies(map_of(cloud(40)), 1)
    assert {name: ratios[name] for name in SPLITS} == dict.fromkeys(SPLITS, 1.0)


def test_a_voxel_alone_needs_one_tap_of_a_tile():
    ratios = redundancies(map_of(torch.zeros(1, 4, dtype=torch.int32)), 64)
    assert ratios == {ALL_TAPS: 27 * 64, **dict.fromkeys(SPLITS, 64.0)}


def test_the_study_keeps_a_row_for_each_way_and_tile(measured):
    ran, rows = measured("conv-forward", "--case", "redundancy", "--only", "surface_300")
    assert ran.code == 0, ran.out + ran.err
    ways = [f"redundancy/surface_300/k3/b{block}/{name}" for block in (64, 128) for name in (ALL_TAPS, *SPLITS)]
    assert [row["case"] for row in rows] == ways
    kinds = {(row["metric"], row["unit"], row["clock"], row["device"], row["peer_source"]) for row in rows}
    assert kinds == {("redundancy", "ratio", "count", ANY, "bound")}
    assert "surface_300" in ran.out and "split4" in ran.out
