"""The study `default-tile` of the suites `conv-forward` and `conv-train`: the tile before any tuning, and the best."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, goals_told, ready, timed, tuned, untuned
from benchmarks.scenes.layers import FORWARD, Cell, Choice, Pass, Trained, cells, layer_of
from benchmarks.suites.layer_model import Step
from pumice.runtime.launch import triton_unavailable_reason

WITHIN = 1.1
"""How many times the best tile's time the default's may be."""


def default_tile(setup: Setup, passed: Pass) -> Iterator[Row]:
    """Every cell by default tiles, against the fastest of all tiles that are worth timing."""
    if why := triton_unavailable_reason(torch.empty(0, device=setup.device)):
        setup.say(f"default-tile is left out: tiles are those of kernels, and {why}")
        return
    ratios: dict[str, float] = {}
    for cell in cells(setup, Choice("default-tile", passed.name)):
        for made in _compared(setup, cell, passed):
            if made.clock == ("gpu" if setup.device.type == "cuda" else "wall"):
                ratios[cell.case] = made.peer_value / made.value
            yield made
    goals_told(setup, "best tile over default tile", ratios, 1 / WITHIN)


def _compared(setup: Setup, cell: Cell, passed: Pass) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case, call = Case(cell.case, setup.half, passed.exact(layer)), partial(passed.run, layer)
    best = ready(setup, case, Way("best", lambda: tuned(call)), ours=True)
    default = ready(setup, case, Way("default", lambda: untuned(call)), ours=True)
    if default is None or best is None:
        return
    if passed is FORWARD:
        _say_tiles(setup, layer)
    yield from timed(setup, case, [default], [best])


def _say_tiles(setup: Setup, layer: Trained) -> None:
    step = Step.of(layer, "compacted")
    setup.say(f"  default {step.default()}, best {step.best()}")
