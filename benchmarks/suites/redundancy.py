"""The study `redundancy` of the suite `conv-forward`: what implicit GEMM multiplies by zero, against splits.

A tile of B outputs multiplies all of them by the weights of a tap if any of them meets an input through it. For a map
of P pairs whose tiles have E entries (tile, tap) in all, redundancy = E * B / P: 1 is none, and the share of products
with nothing is 1 - 1 / redundancy. Rows that fill up the last tile count too, as they are multiplied. The question, and
splits of masks, are TorchSparse++'s (MICRO 2023); the order of rows is ours.

It is counted, not timed: the same for every device, dtype and number of channels, so rows say "any" for the device.
Rows of a scene are in its file's order, which "unsorted" keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.harness.rows import ANY, Peer, Row, Subject, row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from benchmarks.scenes.clouds import layer_scenes
from benchmarks.scenes.layers import map_of
from benchmarks.suites.layer_model import Walk
from pumice.coords import KernelMap, SortSpec

BLOCKS = (64, 128)
"""Rows of a tile."""
ALL_TAPS = "all-taps"
SPLITS: Mapping[str, int] = MappingProxyType({"unsorted": 0, "sorted": 1, "split2": 2, "split3": 3, "split4": 4})
"""By name, into how many parts the taps are split, each with an order of rows of its own; 0: rows in their order."""


def redundancy(setup: Setup) -> Iterator[Row]:
    """Every scene: all taps of every row, unsorted tiles, and sorted ones in one to four splits."""
    for scene, load in layer_scenes(setup):
        case = f"redundancy/{scene}/k3"
        if not setup.wants(case):
            continue
        found = map_of(load().coords)
        setup.say(f"{scene}: {found}")
        for block in BLOCKS:
            ratios = redundancies(found, block)
            setup.say(f"  tiles of {block:3} rows: " + ", ".join(f"{name} {x:.3f}" for name, x in ratios.items()))
            for name, ratio in ratios.items():
                yield _row(setup, f"{case}/b{block}/{name}", ratio)


def redundancies(found: KernelMap, block: int) -> dict[str, float]:
    """By way of walking a map in tiles of `block` outputs: products that are computed over those that are needed."""
    pairs = max(1, int(found.counts().sum()))
    entries = {ALL_TAPS: Walk.of_all_taps(found, block).entries}
    entries |= {name: _entries(found, block, splits) for name, splits in SPLITS.items() if splits <= found.volume}
    return {name: count * block / pairs for name, count in entries.items()}


def _entries(found: KernelMap, block: int, splits: int) -> int:
    """Entries (tile, tap) of all parts."""
    return sum(int(found.tiling(block, how).entries.sum()) for how in SortSpec.splits(found.volume, splits))


def _row(setup: Setup, case: str, ratio: float) -> Row:
    subject = Subject(setup.suite, case, "int32", setup.device, (), "redundancy", "ratio")
    return replace(row(subject, Times(ratio, ratio, ratio), "count", Peer("pairs", 1.0, "bound")), device=ANY)
