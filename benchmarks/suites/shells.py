"""The studies `shells` and `shell-algorithms` of the suite `workloads`: a 3x3x3 layer on spherical shells.

FlexGEMM, tests/submconv: resolutions 8 to 1024 with 1024 to 64 channels, fp16. `shells` (train_benchmark.py): calls use
a ready kernel map, or are the first on a new tensor and build it. `shell-algorithms` (train_ablation.py): explicit,
implicit, split-K, masked and masked split-K in turn, by our dataflows and by FlexGEMM's own algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.families import ALGORITHMS
from benchmarks.harness.rows import Row
from benchmarks.harness.study import DTYPES, Case, Ready, Setup, Way, by_choice, mean_told, measured
from benchmarks.harness.whole import checked, compared
from benchmarks.peers import flexgemm, torchsparse
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.layers import FORWARD, TRAINING, Pass, Trained, Width, layer_on, map_of
from pumice.ops import SparseTensor, conv, conv_features

THICKNESS = 1.25


@dataclass(frozen=True)
class Shell:
    """A batch of equal shells in cubes of side `size`, and the channels of the layer on them."""

    size: int
    channels: int
    batch: int

    def __str__(self) -> str:
        return f"shell_{self.size}/B{self.batch}/k3/C{self.channels}"


SHELLS = (
    Shell(8, 1024, 16),
    Shell(16, 1024, 8),
    Shell(32, 1024, 4),
    Shell(64, 1024, 2),
    Shell(128, 512, 2),
    Shell(256, 256, 2),
    Shell(512, 128, 2),
    Shell(1024, 64, 2),
)
TINY = (Shell(8, 16, 2), Shell(16, 8, 1))
COMPARED = (Shell(64, 1024, 2), Shell(256, 256, 2), Shell(1024, 64, 1))
"""Shells of the study of algorithms; the columns of the largest, in a batch of two, would fill a device."""


@dataclass(frozen=True)
class Kind:
    """A kind of call. anew: each call is the first on a new tensor, and builds the kernel map."""

    passed: Pass
    anew: bool

    def __str__(self) -> str:
        return f"{'map+' if self.anew else ''}{self.passed.name}"


KINDS = tuple(Kind(passed, anew) for passed in (FORWARD, TRAINING) for anew in (False, True))


def shells(setup: Setup) -> Iterator[Row]:
    """Every shell: forward, and forward with backward; with a ready kernel map, and building it in each call."""
    ratios: dict[str, dict[str, float]] = {}
    for shell in TINY if setup.quick else SHELLS:
        wanted = [kind for kind in KINDS if setup.wants(_case(setup, shell, kind))]
        if not wanted:
            continue
        layer = _layer(setup, shell)
        for kind in wanted:
            for made in _compared(setup, _case(setup, shell, kind), kind, layer):
                what = f"{kind} over {made.peer}, {made.metric}, {made.clock}"
                ratios.setdefault(what, {})[made.case] = made.ratio
                yield made
    for what, found in ratios.items():
        setup.say(f"{what}: {mean_told(found)}")


def algorithms(setup: Setup) -> Iterator[Row]:
    """Every algorithm on three shells, forward and training, over a ready map."""
    for shell in TINY[:1] if setup.quick else COMPARED:
        cases = {passed: f"algorithms/{_of(setup, shell)}/{passed.name}" for passed in (FORWARD, TRAINING)}
        wanted = {passed: case for passed, case in cases.items() if setup.wants(case)}
        layer = _layer(setup, shell) if wanted else None
        for passed, case in wanted.items():
            assert layer is not None
            training = passed is TRAINING
            ours = [Way(flow, partial(partial, _in_dataflow, layer, flow, training)) for flow in ALGORITHMS]
            peers = [spconv_peer.way(layer, training), torchsparse.way(layer, training)]
            peers += [flexgemm.way(layer, training, algorithm=name) for name in ALGORITHMS.values()]
            yield from measured(setup, Case(case, setup.half, passed.exact(layer)), ours, peers)


def _in_dataflow(layer: Trained, flow: str, training: bool) -> Any:
    if not training:
        with torch.no_grad():
            return conv_features(layer.feats, layer.weight, layer.found, layer.rows, dataflow=flow)
    given = [x.detach().requires_grad_() for x in (layer.feats, layer.weight)]
    y = conv_features(given[0], given[1], layer.found, layer.rows, dataflow=flow)
    return y.detach(), *torch.autograd.grad(y, given, layer.grad)


def shell_coords(size: int, batch: int, device: torch.device) -> Tensor:
    """int32 [N, 4], sorted: cells of a cube of side `size` whose centres lie inside its inscribed sphere, within 1.25
    of the surface; the same for each batch item."""
    axis = (torch.arange(size, device=device) - (size - 1) / 2).square()
    found = []
    for x in range(size):  # plane by plane: a whole cube of 1024 does not fit in memory
        distance = (axis[x] + axis[:, None] + axis[None, :]).sqrt()
        plane = ((distance <= size / 2) & (distance >= size / 2 - THICKNESS)).nonzero()
        found.append(torch.cat([torch.full_like(plane[:, :1], x), plane], dim=1))
    cells = torch.cat(found).int()
    items = torch.arange(batch, device=device, dtype=torch.int32).repeat_interleave(len(cells))
    return torch.cat([items[:, None], cells.repeat(batch, 1)], dim=1)


def _case(setup: Setup, shell: Shell, kind: Kind) -> str:
    tuned = "/tuned" if setup.thorough else ""
    return f"{_of(setup, shell)}/{kind}{tuned}"


def _of(setup: Setup, shell: Shell) -> str:
    return f"{shell}/{DTYPES[setup.half]}"


def _layer(setup: Setup, shell: Shell) -> Trained:
    coords = shell_coords(shell.size, shell.batch, setup.device)
    found = map_of(coords)
    setup.say(f"{shell}: {found}")
    return layer_on(setup, found, coords, Width.square(shell.channels))


def _compared(setup: Setup, case: str, kind: Kind, layer: Trained) -> Iterator[Row]:
    told, training = Case(case, setup.half, kind.passed.exact(layer)), kind.passed is TRAINING
    ways = [Way("pumice", lambda: by_choice(setup, partial(_ours, layer, kind)))]
    ways += [peer.way(layer, training, kind.anew) for peer in (spconv_peer, torchsparse, flexgemm)]
    mine, *theirs = (checked(setup, way, [(told, way)], ours=not way.package) for way in ways)
    if mine is not None:
        yield from compared(setup, case, mine, [found for found in theirs if isinstance(found, Ready)])


def _ours(layer: Trained, kind: Kind) -> Any:
    if not kind.anew:
        return kind.passed.run(layer)
    training = kind.passed is TRAINING
    feats, weight = (x.detach().requires_grad_(training) for x in (layer.feats, layer.weight))
    with torch.set_grad_enabled(training):
        y = conv(SparseTensor(feats, layer.coords), weight.view(len(weight), 3, 3, 3, -1)).feats
    if not training:
        return y
    return y.detach(), *torch.autograd.grad(y, (feats, weight), layer.grad)
