"""The study `retrieval` of the suite `ucf`: the neighbours of every voxel in a 3x3x3 window, of coordinates that are
new in every call, from their lists to the lists of the pairs.

statement   the einsum of positions, Map[i,j,k] = A[n,x,y,z] * B[n,x+r-1,y+s-1,z+t-1] * W[r,s,t]
coords      the kernel map and its pairs, without the einsum
table       on a GPU: the kernel map without its pairs, a table padded with -1
spconv      its pairs, where it is installed; on a GPU a table, too, padded with -1, whose length no one waits for

On a CPU with one thread, by the time of that thread, and with two, by the minimum of the wall-clock time. On a GPU by
the wall clock and by the time that the GPU is busy.
Cf. "Unified Convolution Framework", 4.2.2 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

import pumice as pm
from benchmarks.harness.results import geomean
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times, busy, clocks, cpu_clock, on_cpu, on_threads, together
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.clouds import Voxels, published, scenes
from benchmarks.suites import map_work, maps
from benchmarks.suites.map_work import WINDOW, Truth, Work
from pumice.coords import Geometry, kernel_map
from pumice.language.formats import parse_format
from pumice.lower.maps import form_operands
from pumice.ops.convert import FormatBucket
from pumice.ops.sparse import Sparse

GOALS = {1: 4.0, 2: 6.0}
"""Times as fast as spconv on a CPU, geometric means by threads."""
GPU_GOAL = 3.0
_RUNS = 15
_TEXT = (
    "Map[i,j,k] = A[n,x,y,z] * B[n,x+r-1,y+s-1,z+t-1] * W[r,s,t] ; {x}, i:pos(A), j:pos(B), k:pos(W)"  # x: the ranges
)


def retrieval(setup: Setup) -> Iterator[Row]:
    """UCF's voxel sets (generated scenes, if quick): the statement over the kernels of coords, and over spconv."""
    goals = GOALS if setup.device.type == "cpu" else {torch.get_num_threads(): GPU_GOAL}
    ratios: dict[tuple[int, str, str], list[float]] = {}
    for name, load in chain(published(setup), scenes(setup) if setup.quick else ()):
        for threads, row in (
            _rows(setup, f"retrieval/{name}", load(), goals) if setup.wants(f"retrieval/{name}") else ()
        ):
            if row.peer == "spconv":
                ratios.setdefault((threads, row.clock, row.case.removeprefix(f"retrieval/{name}")), []).append(
                    row.ratio
                )
            yield row
    for (threads, clock, way), found in ratios.items():
        with on_threads(threads):
            yield from over_spconv(setup, f"retrieval{way}", found, goals[threads], clock)


def over_spconv(setup: Setup, case: str, ratios: Sequence[float], goal: float, clock: str = "") -> Iterator[Row]:
    """The geometric mean of times as fast as spconv beside its goal; nothing if spconv is not installed. clock: default
    the CPU's."""
    if ratios:
        mean, clock = geomean(ratios), clock or cpu_clock()
        setup.say(f"{case}: {mean:.2f} times as fast as spconv, {torch.get_num_threads()} threads, goal {goal:g}")
        yield setup.row(case, mean, clock, Peer("goal", goal, "goal"), "over spconv", "times", "int32")


def _rows(setup: Setup, case: str, voxels: Voxels, goals: Iterable[int]) -> Iterator[tuple[int, Row]]:
    """(threads, row) of one set of voxels."""
    truth = map_work.truth_of(voxels, WINDOW)
    columns = [x.clone(memory_format=torch.contiguous_format) for x in voxels.coords.unbind(1)]
    ways = {"statement": partial(_statement, voxels, columns), "coords": partial(_coords, voxels)}
    works = [Work(n, way, partial(_wrong, truth=truth), False) for n, way in ways.items()]
    if setup.device.type == "cuda":
        works.append(
            Work("table", partial(map_work.submanifold, voxels, None), partial(map_work.wrong_map, truth=truth))
        )
    done = [*maps.ready(setup, case, works), *maps.spconv_ready(setup, case, voxels, int((truth.rows >= 0).sum()))]
    if not any(one.name == "statement" for one in done):
        return
    for threads, clock in product(goals, clocks(setup.device) if setup.device.type == "cuda" else ("",)):
        with on_threads(threads):
            every = _times(setup, [one.call for one in done], clock)
            times, clock = dict(zip((one.name for one in done), every, strict=True)), clock or cpu_clock()
            for ours, name in product(("statement", "table"), times):
                if ours in times and name != ours and (name == "spconv" or ours == "statement"):
                    label = case if ours == "statement" else f"{case}/{ours}"
                    yield threads, _row(setup, label, times[ours], clock, (name, times[name]))


def _row(setup: Setup, case: str, ours: Times, clock: str, other: tuple[str, Times]) -> Row:
    """The 20 % quantiles are the values: what is above them is mostly other processes."""
    peer = Peer(other[0], other[1].p20, package=spconv_peer.package() if other[0] == "spconv" else "")
    setup.say(f"{case}, {clock}: {ours.p20:.3f} ms, {peer.name} {peer.value:.3f}, {peer.value / ours.p20:.2f}")
    return setup.row(case, Times(ours.p20, ours.p20, ours.p80), clock, peer, dtype="int32")


def _times(setup: Setup, calls: Sequence[Callable[[], Any]], clock: str) -> list[Times]:
    if setup.device.type == "cpu":
        return on_cpu(calls, 3 if setup.quick else _RUNS)
    # The lists wait for their length.
    return [busy(call) for call in calls] if clock == "gpu" else together(calls, setup.device, clock, setup.seconds)


def _statement(voxels: Voxels, columns: Sequence[Tensor]) -> Mapping[str, Tensor]:
    """columns: of the coordinates; the operands have tensors of their own over these, for which nothing is kept yet."""
    shape = (voxels.bounds.batch, *(high + 1 for high in voxels.bounds.high))
    coords = dict(zip("nxyz", (x.detach() for x in columns), strict=True))
    pattern = Sparse(parse_format("(n x y z):C"), shape, (FormatBucket(coords, None),), len(voxels))
    operands: dict[str, Any] = {"A": pattern, "B": pattern}
    text = _TEXT.format(x=", ".join(f"{axis}:{high + 1}" for axis, high in zip("xyz", voxels.bounds.high, strict=True)))
    return pm.einsum(text, **operands, W=torch.ones(3, 3, 3, device=voxels.coords.device)).parts[0].coords


def _coords(voxels: Voxels) -> Mapping[str, Tensor]:
    shape = tuple(high + 1 for high in voxels.bounds.high)
    found, _ = kernel_map(Geometry.checked(voxels.coords, 1, shape, voxels.bounds.batch), WINDOW)
    return dict(zip("ikj", form_operands(found, "pairs")[1], strict=True))


def _wrong(found: Mapping[str, Tensor], truth: Truth) -> str:
    """The error in the pairs, "" if none: each must be in the map, and be there once."""
    outputs, inputs, taps = (found[axis].long() for axis in "ijk")
    expected, pairs = int((truth.rows >= 0).sum()), outputs * truth.rows.shape[1] + taps
    if len(pairs) != expected or len(torch.unique(pairs)) != expected:
        return f"{len(pairs)} pairs, expected {expected} different ones"
    return "" if torch.equal(truth.rows[outputs, taps].long(), inputs) else "pairs are not those of the map"
