"""The study `shells` of the suite `workloads`: a 3x3x3 layer on spherical shells, FlexGEMM's training benchmark.

FlexGEMM, tests/submconv/train_benchmark.py: resolutions 8 to 1024 with 1024 to 64 channels, fp16. Calls use a ready
kernel map, or build it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.rows import Row
from benchmarks.harness.study import DTYPES, Case, Setup, Way, by_choice, mean_told
from benchmarks.harness.whole import checked, compared
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.layers import FORWARD, TRAINING, WINDOW, Pass, Trained, Width, layer_on, map_of
from pumice.coords import kernel_map
from pumice.ops import SparseTensor

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


@dataclass(frozen=True)
class Kind:
    """A kind of call. anew: each call builds the kernel map."""

    passed: Pass
    anew: bool

    def __str__(self) -> str:
        return f"{'map+' if self.anew else ''}{self.passed.name}"


KINDS = tuple(Kind(passed, anew) for passed in (FORWARD, TRAINING) for anew in (False, True))


def shells(setup: Setup) -> Iterator[Row]:
    """Every shell: forward, and forward with backward; with a ready kernel map, and building it in each call."""
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for shell in TINY if setup.quick else SHELLS:
        wanted = [kind for kind in KINDS if setup.wants(_case(setup, shell, kind))]
        if not wanted:
            continue
        layer = _layer(setup, shell)
        for kind in wanted:
            for made in _compared(setup, _case(setup, shell, kind), kind, layer):
                ratios.setdefault((str(kind), made.clock), {})[made.case] = made.ratio
                yield made
    for (kind, clock), found in ratios.items():
        setup.say(f"{kind} over spconv, {clock}: {mean_told(found)}")


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
    return f"{shell}/{DTYPES[setup.half]}/{kind}{tuned}"


def _layer(setup: Setup, shell: Shell) -> Trained:
    coords = shell_coords(shell.size, shell.batch, setup.device)
    found = map_of(coords)
    setup.say(f"{shell}: {found}")
    return layer_on(setup, found, coords, Width.square(shell.channels))


def _compared(setup: Setup, case: str, kind: Kind, layer: Trained) -> Iterator[Row]:
    told = Case(case, setup.half, kind.passed.exact(layer))
    ways = (
        Way("pumice", lambda: by_choice(setup, partial(_ours, layer, kind))),
        spconv_peer.way(layer, kind.passed is TRAINING, kind.anew),
    )
    mine, theirs = (checked(setup, way, [(told, way)], ours=not way.package) for way in ways)
    if mine is not None:
        yield from compared(setup, case, mine, [theirs] if theirs else [])


def _ours(layer: Trained, kind: Kind) -> Any:
    if kind.anew:
        found, _ = kernel_map(SparseTensor(layer.feats, layer.coords).geometry, WINDOW)
        layer = replace(layer, found=found)
    return kind.passed.run(layer)
