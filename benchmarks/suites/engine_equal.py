"""The study `equal` of the suite `engine`: captured results against eager ones over many geometries.

Random geometries of several kinds and sizes, empty ones, and ones with the voxels of a capacity, one fewer and one
more; with one more than the largest capacity, the captured network must run eagerly.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import DTYPES, Setup, quietly
from benchmarks.scenes.engine import net_for
from benchmarks.scenes.workloads import Sample
from pumice.engine import Captured, capture
from pumice.engine.compare import differ, perturb
from pumice.ops import SparseTensor

COUNT, TINY = 1000, 8
"""Number of geometries, and the same in a quick run."""
SIDE = 128
"""Coordinates are from -SIDE to SIDE - 1."""
BUCKETS: Mapping[bool, tuple[int, ...]] = {False: (1024, 4096, 16384), True: (40, 120)}
"""Capacities, by whether the run is quick."""

Make = Callable[[int, torch.Generator], Tensor]


def _anywhere(count: int, chance: torch.Generator) -> Tensor:
    return torch.randint(-SIDE, SIDE, (2 * count + 8, 3), generator=chance)


def _block(count: int, chance: torch.Generator) -> Tensor:
    """A solid box at a position aligned to no stride."""
    edges = torch.randint(2, 9, (3,), generator=chance).double()
    edges = (edges * (2 * max(1, count) / edges.prod()) ** (1 / 3)).ceil().long().clamp(1, SIDE)
    place = torch.randint(-SIDE, 0, (3,), generator=chance)
    return torch.cartesian_prod(*(torch.arange(int(n)) for n in edges)).view(-1, 3) + place


def _surface(count: int, chance: torch.Generator) -> Tensor:
    side = min(SIDE, math.ceil(math.sqrt(max(1, count)) * 1.2))
    plane = torch.cartesian_prod(torch.arange(side), torch.arange(side)).view(-1, 2)
    slopes = torch.rand(2, generator=chance) - 0.5
    height = (plane * slopes).sum(1) + 4 * torch.rand(len(plane), generator=chance)
    return torch.cat([plane - SIDE // 2, height.floor().long()[:, None]], dim=1)


def _clusters(count: int, chance: torch.Generator) -> Tensor:
    centres = torch.randint(-SIDE + 24, SIDE - 24, (1 + count // 300, 3), generator=chance)
    chosen = torch.randint(0, len(centres), (3 * count + 8,), generator=chance)
    return centres[chosen] + (4 * torch.randn(len(chosen), 3, generator=chance)).round().long().clamp(-23, 23)


def _lines(count: int, chance: torch.Generator) -> Tensor:
    starts = torch.randint(-SIDE, SIDE, (2 + count // 60, 3), generator=chance)
    axis = torch.randint(0, 3, (len(starts),), generator=chance)
    steps = torch.nn.functional.one_hot(axis, 3)[:, None] * torch.arange(2 * SIDE)[None, :, None]
    found = (starts[:, None] + steps).view(-1, 3)
    return found[(found < SIDE).all(1)]


KINDS: Mapping[str, Make] = {
    "anywhere": _anywhere,
    "block": _block,
    "surface": _surface,
    "clusters": _clusters,
    "lines": _lines,
}
"""Generators of about `count` voxels by kind; surplus voxels are dropped, missing ones are added anywhere."""


def geometry(kind: str, count: int, seed: int) -> Tensor:
    """int32 [count, 4]: distinct voxels of one batch item, in random order."""
    chance = torch.Generator().manual_seed(seed)
    found = KINDS[kind](count, chance).unique(dim=0)
    while len(found) < count:
        found = torch.cat([found, _anywhere(count - len(found), chance)]).unique(dim=0)
    found = found[torch.randperm(len(found), generator=chance)[:count]]
    return torch.cat([torch.zeros(count, 1, dtype=torch.int32), found.int()], dim=1)


def cases(count: int, buckets: tuple[int, ...], seed: int = 0) -> Iterator[tuple[str, int]]:
    """(kind, number of voxels) of each geometry: edge cases first, then log-uniform sizes."""
    yield from (("anywhere", 0), ("clusters", 1), ("clusters", 2))
    for number, capacity in enumerate(buckets):
        kind = list(KINDS)[number % len(KINDS)]
        yield from ((kind, capacity - 1), (kind, capacity), (kind, capacity + 1))
    chance = torch.Generator().manual_seed(seed)
    for number in range(count):
        # Every 50th geometry is empty.
        size = round(buckets[-1] ** float(torch.rand((), generator=chance)))
        yield list(KINDS)[number % len(KINDS)], 0 if number % 50 == 49 else size


@dataclass
class Compared:
    """Differences from eager results. most, mean: largest and rms error, relative to the eager result's rms; maxima.

    wrong: differences above rounding. noisy: number of results beyond the limits of rounding, where rounding the input
    features again changes the eager result as much; their errors are included.
    """

    most: float = 0.0
    mean: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    noisy: int = 0

    def add(
        self, name: str, got: SparseTensor, want: SparseTensor, again: Callable[[], SparseTensor] | None = None
    ) -> None:
        """Compare a result. again: computes the eager result for features with further roundings."""
        self.kinds[name.partition(",")[0]] += 1
        told = differ(got, want)
        if told and again is not None and differ(got, want, again()) is None:
            self.noisy, told = self.noisy + 1, None
        if told:
            self.wrong.append(f"{name}: {told}")
        elif len(want):
            error = (got.feats.double() - want.feats.double()).abs()
            scale = float(want.feats.double().square().mean().sqrt().clamp(min=1e-30))
            self.most = max(self.most, float(error.max()) / scale)
            self.mean = max(self.mean, float(error.square().mean().sqrt()) / scale)


def equal(setup: Setup) -> Iterator[Row]:
    """Check captured results of one geometry after the other against the eager pass, as many as time allows."""
    buckets, count = BUCKETS[setup.quick], setup.count or (TINY if setup.quick else COUNT)
    name = f"{'tiny/' * setup.quick}random/{DTYPES[setup.half]}/equal"
    if not setup.wants(name):
        return
    with quietly():
        net, fast = _captured(setup, buckets)
        found, done = _compare(setup, net, fast, buckets, count)
    for told in found.wrong[:5]:
        setup.failed(f"{name}: {told}")
    if len(found.wrong) > 5:
        setup.failed(f"{name}: {len(found.wrong)} of {done} geometries differ")
    kinds = ", ".join(f"{kind} {number}" for kind, number in found.kinds.items())
    setup.say(f"{name}: {done} geometries ({kinds}), {len(found.wrong)} wrong, {found.noisy} within noise")
    setup.say(f"  largest error {found.most:.2e} and rms error {found.mean:.2e} of the eager result's rms")
    setup.say(f"  {fast.replays} by graphs, eagerly {dict(fast.fallbacks) or 'none'}")
    yield from _rows(setup, name, found, fast, done)


def _captured(setup: Setup, buckets: tuple[int, ...]) -> tuple[nn.Module, Captured]:
    """The network captured for any geometry: all levels as large as the first, maps as full as a solid block's."""
    coords = geometry("block", buckets[-1], 1).to(setup.device)
    feats = setup.random(len(coords), 4)
    net = net_for(setup, Sample(coords, feats, None, 1, "random")).to(setup.half)
    begin = time.perf_counter()
    example = SparseTensor(feats.to(setup.half), coords)
    fast = capture(net, example, max_voxels=buckets[-1], buckets=buckets, level_capacity=1.0).ready()
    setup.say(f"  {len(buckets)} capacities in {time.perf_counter() - begin:.1f} s")
    return net, fast


def _compare(
    setup: Setup, net: nn.Module, fast: Captured, buckets: tuple[int, ...], count: int
) -> tuple[Compared, int]:
    found, done = Compared(), 0
    for seed, (kind, size) in enumerate(cases(count, buckets)):
        if setup.left < 1:
            setup.say(f"  no time for more than {done} geometries")
            break
        coords = geometry(kind, size, seed).to(setup.device)
        feats = setup.random(size, 4, dtype=setup.half, seed=seed)
        want = _eager(net, feats, coords)
        # Half of the geometries are passed as features and coordinates, half as a tensor.
        got = fast(feats, coords) if seed % 2 else fast(SparseTensor(feats, coords))
        again = lambda f=feats, c=coords: _eager(net, perturb(f, ()), c)  # noqa: E731
        found.add(f"{kind}, {size} voxels, seed {seed}", got, want, again)
        done += 1
    return found, done


def _eager(net: nn.Module, feats: Tensor, coords: Tensor) -> SparseTensor:
    with torch.no_grad():
        return net(SparseTensor(feats, coords))


def _rows(setup: Setup, name: str, found: Compared, fast: Captured, done: int) -> Iterator[Row]:
    """Rows of the largest errors and of counts, each compared with itself."""
    values = {
        "largest error": (found.most, "of rms"),
        "rms error": (found.mean, "of rms"),
        "wrong": (float(len(found.wrong)), f"of {done}"),
        "within noise": (float(found.noisy), f"of {done}"),
        "by graphs": (float(fast.replays), f"of {done}"),
    }
    for metric, (value, unit) in values.items():
        yield setup.row(name, value, "count", Peer("itself", value), metric, unit)
