"""What a layer's kernels need, counted by hand for maps that are small enough."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.scenes.layers import Layer, map_of
from benchmarks.suites.layer_model import LATENCY, Needs, Step, Walk, bounds, in_turn, least, needs, walks, why
from pumice.schedule.predict import DEVICES
from pumice.schedule.tile import Tile

TILE = Tile(64, 16, 16, warps=4, stages=3, prefetch_indices=True)


def row_of(count, channels=16, dtype=torch.float32, groups=1):
    """A layer over a row of voxels along z: the middle meets three of 27 taps, the ends two."""
    coords = torch.zeros(count, 4, dtype=torch.int32)
    coords[:, 3] = torch.arange(count)
    chance = torch.Generator().manual_seed(1)
    feats = torch.randn(count, channels, generator=chance).to(dtype)
    weight = torch.randn(channels, 27, channels // groups, generator=chance).to(dtype)
    return Layer(map_of(coords), feats, weight, coords)


def test_walks_count_entries_of_tiles():
    layer = row_of(100)
    # Two tiles of 64 rows, three taps in each: rows 0 and 99 have two, whatever tile they are in.
    (walk,) = walks(layer.found, "compacted")
    assert (walk.block, walk.tiles, walk.entries, walk.heaviest) == (64, 2, 6, 3)
    assert walk.indices == 4 * (2 * 64 + 6 + 6 + 6 * 64)
    parts = walks(layer.found, "split3")
    # The three taps lie in the middle third.
    assert [part.entries for part in parts] == [0, 6, 0]
    assert Walk.of_all_taps(layer.found, 64) == Walk(64, 2, 54, 27, 4 * 27 * 100)


def test_needs_of_a_row():
    layer = row_of(100)
    pairs = 3 * 100 - 2
    found = needs(layer, walks(layer.found, "compacted"), TILE)
    assert found.useful == 2 * pairs * 16 * 16
    assert found.padded == 2 * 6 * 64 * 16 * 16
    indices = 4 * (2 * 64 + 6 + 6 + 6 * 64)
    features, weights = 4 * 100 * 16, 4 * 16 * 27 * 16
    assert found.memory == 2 * features + weights + indices
    assert found.cache == 4 * 16 * pairs + 4 * 6 * 16 * 16 + features + indices
    # Three turns, two of them under way at once.
    assert found.chain == pytest.approx(LATENCY * 2.5)


def test_packed_entries_are_one_turn():
    layer = row_of(100, 3)
    walked = walks(layer.found, "compacted")
    # Three taps in packs of two, then in one of four: a tap has three channels, and a fourth is idle.
    for reduced, turns in ((8, 2), (16, 1)):
        found = needs(layer, walked, Tile(64, 16, reduced, stages=3, prefetch_indices=True, packed=True))
        assert found.chain == pytest.approx(LATENCY * (1 + turns / 2))


def test_more_of_a_tile_costs_more():
    layer = row_of(300, 32)
    walked = walks(layer.found, "compacted")
    wide, narrow = (
        needs(layer, walked, Tile(64, columns, 32, stages=3, prefetch_indices=True)) for columns in (32, 16)
    )
    # Rows are gathered once for each block of columns.
    assert narrow.cache > wide.cache and narrow.waves > wide.waves
    chained = needs(layer, walked, Tile(64, 32, 32, stages=3))
    assert chained.chain > wide.chain
    halves = needs(layer, walks(layer.found, "split2"), Tile(64, 32, 32, stages=3, prefetch_indices=True))
    # A second part reads and writes what the first has found.
    assert halves.memory > wide.memory and halves.useful == wide.useful


def test_needs_of_groups():
    layer, pairs = row_of(100, 32, groups=2), 3 * 100 - 2
    indices = 4 * (2 * 64 + 6 + 6 + 6 * 64)
    found = needs(layer, walks(layer.found, "compacted"), TILE)
    assert found.useful == 2 * pairs * 32 * 16 and found.padded == 2 * 6 * 64 * 32 * 16 and found.plain == 0
    # Each program has the 16 channels of one group: a row is read once, the indices twice.
    assert found.programs == 2 * 2
    assert found.cache == 4 * (32 * pairs + 6 * 32 * 16 + 100 * 32) + 2 * indices
    deep = row_of(100, 32, groups=32)
    found = needs(deep, walks(deep.found, "compacted"), Tile(16, 32))
    # Four programs of 16 rows in a tile; all columns are in one block.
    assert found.plain == found.padded == 2 * 6 * 64 * 32 and found.programs == 2 * 4
    assert found.cache == 4 * (32 * pairs + 6 * 4 * 32 + 100 * 32) + indices


def test_entries_are_multiplied_on_plain_units():
    gpu = DEVICES["cuda"]
    found = bounds(Needs(padded=gpu.matrix + gpu.plain, plain=gpu.plain))
    assert found["matrix"] == 2


def test_whole_programs_are_waited_for():
    gpu = DEVICES["cuda"]
    for programs, times in ((66, 2.0), (132, 1.0), (198, 4 / 3), (1320, 1.0)):
        assert in_turn(Needs(cache=gpu.cache, programs=programs)) == pytest.approx(times)
    assert in_turn(Needs(memory=gpu.memory, programs=66)) == 1


def test_bounds_are_rates_of_the_device():
    gpu = DEVICES["cuda"]
    found = bounds(Needs(padded=gpu.matrix, memory=2 * gpu.memory, cache=3 * gpu.cache, chain=0.5), floor=0.25)
    assert {name: round(seconds, 9) for name, seconds in found.items()} == {
        "memory": 2,
        "cache": 3,
        "matrix": 1,
        "latency": 0.75,
    }
    assert least(Needs(cache=3 * gpu.cache)) == 3


def test_why_names_what_the_bound_leaves_out():
    gpu = DEVICES["cuda"]
    needed = Needs(padded=gpu.matrix, cache=3 * gpu.cache, chain=0.5, waves=1.5)
    left = why(needed, floor=0.25)
    # Three seconds of the L2: a third of the second wave is empty, and the products take their second after the loads.
    assert list(left.values()) == pytest.approx([1.0, 1.0, 0.75, 0])
    assert left["the launch and the longest program"] == 0.75
    assert why(Needs(chain=2.0, cache=gpu.cache), 0.0)["the launch and the longest program"] == 0


def test_the_step_of_a_form_has_the_layers_sizes():
    layer = row_of(100, dtype=torch.float16)
    step = Step.of(layer, "compacted")
    assert step.bound.shape == (100, 16) and set(step.tensors) >= {"x", "w"}
    assert step.default().rows == 64 == step.best().rows
    wide = Step.of(layer, "compacted", 128)
    # As many tiles as a large scene has leave room for 128 rows.
    assert wide.default().rows == 64 and wide.default(1000).rows == 128
    assert Step.of(row_of(100, 32, groups=2), "compacted").bound.shape == (100, 2, 16)


BY_TILES = """
import sys
sys.path += {paths!r}
from dataclasses import replace
from benchmarks.tests.test_layer_model import row_of
from benchmarks.scenes.layers import exact
from benchmarks.suites.layer_model import Step
from benchmarks.harness.study import error
layer = row_of(70)
step = Step.of(layer, "compacted")
for ahead, stages in ((True, 3), (False, 3), (False, 5)):
    print(error(step.by(replace(step.default(), prefetch_indices=ahead, stages=stages)), exact(layer)) < 1e-6)
# Blocks of another size, two groups, and a depthwise layer.
for width, block in ((16, 128), (8, 0), (1, 0)):
    layer = replace(layer, weight=layer.weight[:, :, :width].contiguous())
    step = Step.of(layer, "compacted", block)
    print(error(step.by(step.default(100)), exact(layer)) < 1e-6)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_step_by_any_tile_is_the_layer(tmp_path):
    # Triton reads TRITON_INTERPRET once: a process of its own.
    tests = Path(__file__).resolve().parents[1]
    program = BY_TILES.format(paths=[str(tests), str(tests.parent / "src")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PUMICE_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True"] * 6, done.stderr[-2000:]
