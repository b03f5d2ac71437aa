"""The study `gradients` of the suite `conv-train`: what each gradient takes beside the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, by_choice, goals_told, ready, timed
from benchmarks.scenes.layers import TRAINING, Cell, Choice, Trained, cells, layer_of
from pumice.ops import conv_features

PARTS = ("forward", "dgrad", "wgrad")
GOALS = MappingProxyType({64: 1.6, 128: 1.3, 256: 1.3})
"""How many times the forward pass wgrad may take, by channels."""


def gradients(setup: Setup) -> Iterator[Row]:
    """Every cell: forward, the gradient of the features and that of the weights, each alone, by default tiles.

    All three are launched by autograd, or as autograd launches them; on the device's clock only kernels count.
    """
    ratios: dict[int, dict[str, float]] = {}
    for cell in cells(setup, Choice("gradients")):
        for made in _parts(setup, cell):
            if made.case.endswith("/wgrad") and made.clock == ("gpu" if setup.device.type == "cuda" else "wall"):
                ratios.setdefault(cell.channels, {})[cell.case] = made.peer_value / made.value
            yield made
    for channels, found in ratios.items():
        if channels in GOALS:
            goals_told(setup, f"forward over wgrad, C={channels}", found, 1 / GOALS[channels])


def _parts(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    truths = TRAINING.exact(layer)
    found = []
    for name, truth in zip(PARTS, truths, strict=True):
        way = Way(name, lambda name=name: by_choice(setup, _call(layer, name)))
        found.append(ready(setup, Case(cell.case, setup.half, truth), way, ours=True))
    forward, *backward = found
    if forward is not None and None not in backward:
        yield from timed(setup, Case(cell.case, setup.half, truths[0]), [r for r in backward if r], [forward])


def _call(layer: Trained, name: str) -> Callable[[], Tensor]:
    """One part; a gradient is asked for alone, since autograd finds those of all that require one."""
    wanted = {"dgrad": (0,), "wgrad": (1,)}.get(name, (0, 1))
    given = [x.detach().requires_grad_(n in wanted) for n, x in enumerate((layer.feats, layer.weight))]
    run = partial(conv_features, *given, layer.found, layer.rows)
    if name == "forward":
        return lambda: run().detach()
    kept: list[Tensor] = []

    def gradient() -> Tensor:
        # What the gradient's tiles come from is known from the first call on, which records.
        if not kept:
            kept.append(run())
        return torch.autograd.grad(kept[0], given[wanted[0]], layer.grad, retain_graph=True)[0]

    return gradient
