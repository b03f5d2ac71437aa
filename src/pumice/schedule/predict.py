"""What a dataflow is likely to cost, from the numbers of a map and of the layers over it: an order to try them in.

    time of a layer = its kernels' (padded products, what they move) + the layout of the map that it reads

A layout is shared by the layers over a map that read the same one. The figures are those of an H200 and of two cores
with AVX-512. Kernels over tiles and layouts are fitted to rows of the suites conv-forward and maps, within about a
third; the rest counts what is moved. They choose what is measured, and in which order; nothing is decided by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pumice.schedule.cost import DEVICES, Device
from pumice.schedule.dataflow import DATAFLOWS, DGRAD, PASSES, PLANNED, WGRAD, Dataflow
from pumice.schedule.grouping import Grouping

DEFAULT = "implicit-gemm-sorted"
"""The dataflow that the planner's choice comes to on a GPU."""


@dataclass(frozen=True)
class MapStats:
    """A map seen from its outputs. counts: pairs of each tap. entries: by form of tiles, (tile, tap) entries of each
    part, of `block` outputs each; empty where nobody counted them."""

    inputs: int
    outputs: int
    counts: tuple[int, ...]
    entries: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    block: int = 128

    @property
    def pairs(self) -> int:
        return sum(self.counts)

    @property
    def taps(self) -> int:
        return len(self.counts)

    def parts(self, form: str) -> tuple[int, ...]:
        """Entries of the parts of a form; where nobody counted them, as if no tile shared a tap."""
        tiles = -(-self.outputs // self.block)
        return self.entries.get(form) or (min(self.pairs, tiles * self.taps),)


@dataclass(frozen=True)
class LayerWork:
    """A layer over a map: the map as the forward pass reads it, and as the input gradient does.

    channels: in and out. size: bytes of a value.
    """

    side: MapStats
    back: MapStats
    channels: tuple[int, int]
    groups: int = 1
    size: int = 4

    @property
    def each(self) -> float:
        """Products of one pair."""
        return self.channels[0] * self.channels[1] / self.groups

    def turned(self) -> LayerWork:
        """What the input gradient is: the same with the roles exchanged."""
        inner, outer = self.channels
        return LayerWork(self.back, self.side, (outer, inner), self.groups, self.size)


# What distinguishes dataflows
def effect(flow: Dataflow, name: str, device: str) -> Hashable:
    """What a dataflow does in a pass: two that do the same need not both be tried."""
    if flow.movement == PLANNED.movement and device == "cuda":
        flow = DATAFLOWS[DEFAULT]
    if flow.movement in ("implicit", "on-demand"):
        return "pairs of a tap" if name == WGRAD else (flow.movement, flow.form, flow.piece)
    if name != WGRAD or flow.movement in ("explicit", PLANNED.movement):
        return flow.movement, flow.grouping
    separate = flow.movement in ("vectorised", "on-demand-in-order")
    return "products", separate, flow.grouping or Grouping("separate")


def is_applicable(name: str, flow: Dataflow, deterministic: bool, library: bool) -> bool:
    """Whether a dataflow may be taken for a pass here. library: whether torch's products take the values."""
    stated = flow.movement in ("implicit", "on-demand")
    return (not deterministic or name in flow.repeats) and (library or stated or flow.movement == PLANNED.movement)


# Seconds
def seconds(flow: Dataflow, work: LayerWork, name: str, device: str) -> float:
    """Of the kernels of a pass, its layout of the map apart."""
    return _MODELS[device](flow, work.turned() if name == DGRAD else work, name)


def layouts(flow: Dataflow, work: LayerWork, name: str, device: str) -> Mapping[Hashable, float]:
    """Seconds of what a pass lays out of its map, by what that is: layers over the map share it."""
    side = work.back if name == DGRAD else work.side
    return dict(_LAYOUTS[device](flow, side, name))


def together(flow: Dataflow, works: Sequence[LayerWork], passes: Iterable[str], device: str) -> float:
    """Seconds of the layers over one map, with the layouts that they share."""
    passes = tuple(passes)
    shared: dict[Hashable, float] = {}
    for work in works:
        for name in passes:
            shared.update(layouts(flow, work, name, device))
    return sum(seconds(flow, work, name, device) for work in works for name in passes) + sum(shared.values())


_MATRIX = {1: 900e12, 2: 620e12, 4: 100e12, 8: 30e12}
"""FLOP a second of such kernels, by the bytes of a value; float32 in three products of tf32."""
_TURN = 0.25e-6
"""Seconds of a turn of the loop, whose loads wait for an index, of 64 channels."""
_START = 5e-6
"""Seconds of a kernel besides its loop."""
_PART = 12
"""Bytes of a result that another part of a form takes: sums are left in float32, and read again."""


def _on_gpu(flow: Dataflow, work: LayerWork, name: str) -> float:
    if flow.movement == PLANNED.movement:
        flow = DATAFLOWS[DEFAULT]
    if flow.movement in ("implicit", "on-demand") and name == WGRAD:
        return _by_pairs(work, 1.0)
    if flow.movement == "implicit":
        return _by_table(work) if flow.form == "table" else _by_tiles(flow, work)
    if flow.movement == "on-demand":
        # Outputs are added to in memory, in float32.
        return _by_pairs(work, 2.0) + work.side.pairs * work.channels[1] * 8 / DEVICES["cuda"].cache
    return _by_library(flow, work, name, DEVICES["cuda"])


def _by_tiles(flow: Dataflow, work: LayerWork) -> float:
    parts = work.side.parts(flow.form)
    each = work.side.taps / len(parts), work.side.pairs / len(parts)
    total = sum(_tiled(entries, work, each, flow.piece) for entries in parts)
    return total + (len(parts) - 1) * work.side.outputs * work.channels[1] * _PART / DEVICES["cuda"].memory


def _by_table(work: LayerWork) -> float:
    entries = -(-work.side.outputs // work.side.block) * work.side.taps
    return _tiled(entries, work, (work.side.taps, work.side.pairs), 0)


def _tiled(entries: int, work: LayerWork, each: tuple[float, float], piece: int) -> float:
    """A kernel over entries of tiles; of the taps and pairs of its part. What is absent is multiplied, not gathered."""
    taps, pairs = each
    moved = (pairs * work.channels[0] + entries * work.each) * work.size
    flops = 2 * entries * work.side.block * work.each
    through = max(moved / DEVICES["cuda"].cache, flops / _MATRIX[work.size])
    # The longest tile alone, shared by several programs or not.
    longest = min(taps, entries) if not piece else min(taps, piece)
    chain = longest * math.ceil(work.channels[0] / work.groups / 64) * _TURN + (2e-6 if piece else 0)
    return _START + (through**1.5 + chain**1.5) ** (2 / 3)


def _by_pairs(work: LayerWork, slower: float) -> float:
    """A kernel over the pairs of each tap; both sides are gathered."""
    moved = work.side.pairs * sum(work.channels) * work.size
    return (
        _START
        + slower * max(moved / DEVICES["cuda"].cache, 2 * work.side.pairs * work.each / _MATRIX[work.size] * 1.5)
        + 6e-6
    )


def _by_library(flow: Dataflow, work: LayerWork, name: str, device: Device) -> float:
    """What is put in place is written and read again, tap by tap or at once."""
    pairs, ((inner, outer), size) = work.side.pairs, (work.channels, work.size)
    rate = min(device.matrix, _MATRIX[size]) if device.name != "CPU" else device.plain
    products, kernels = pairs, 2
    if flow.movement == "explicit":
        products = work.side.outputs * work.side.taps
        moved, kernels = 2.0 * products * inner * size + work.side.outputs * outer * size, 4
    else:
        groups = (flow.grouping or Grouping("separate")).groups(work.side.counts)
        lengths = [(max(work.side.counts[tap] for tap in group.taps), group) for group in groups]
        products = sum(length * len(group.taps) if group.batched else length for length, group in lengths)
        multiplied = sum(1 if group.batched else len(group.taps) for group in groups)
        moved = products * (2.0 * inner * size + (2.0 * size + 8) * outer)
        kernels = multiplied + 3 if flow.movement in ("fused", "locality-aware") else 3 * multiplied
    if name == WGRAD:
        moved = products * 2.0 * (inner + outer) * size
    launch = 2.5e-6 if device.name != "CPU" else device.launch
    return kernels * launch + moved / device.memory + 2 * products * inner * outer / work.groups / rate


def _on_cpu(flow: Dataflow, work: LayerWork, name: str) -> float:
    device = DEVICES["cpu"]
    if flow.movement == PLANNED.movement:
        # Chunks that stay in the cache, see schedule.cpu.
        moved = work.side.pairs * sum(work.channels) * work.size
        return 20e-6 + moved / (device.cache / 2) + 2 * work.side.pairs * work.each / (2.5 * device.plain)
    if flow.movement in ("implicit", "on-demand", "on-demand-in-order"):
        # Statements over forms that are meant for a GPU.
        return 10 * _by_library(DATAFLOWS["explicit-gemm"], work, name, device)
    return _by_library(flow, work, name, device)


def _laid_on_gpu(flow: Dataflow, side: MapStats, name: str) -> Iterator[tuple[Hashable, float]]:
    if flow.movement == PLANNED.movement:
        flow = DATAFLOWS[DEFAULT]
    rows = side.outputs
    if flow.movement == "implicit" and name != WGRAD:
        if flow.form != "table":
            parts = max(1, flow.splits)
            order = 14e-6 + rows * 0.06e-9 if flow.sorted else 0.0
            yield (id(side), flow.form), parts * (8e-6 + rows * 0.06e-9 + order)
    elif flow.movement in ("implicit", "on-demand"):
        yield (id(side), "grouped"), 10e-6 + side.pairs * 8 / DEVICES["cuda"].memory
    elif flow.movement != "explicit":
        # Lists of pairs, and their places worked out by torch.
        yield (
            (id(side), flow.movement, flow.grouping),
            40e-6 + side.taps * 5e-6 + side.pairs * 64 / DEVICES["cuda"].memory,
        )


def _laid_on_cpu(flow: Dataflow, side: MapStats, name: str) -> Iterator[tuple[Hashable, float]]:
    if flow.movement not in (PLANNED.movement, "explicit"):
        yield (id(side), flow.movement, flow.grouping), 40e-6 + side.taps * 20e-6 + side.pairs * 4e-9


_MODELS: Mapping[str, Callable[[Dataflow, LayerWork, str], float]] = MappingProxyType({"cuda": _on_gpu, "cpu": _on_cpu})
_LAYOUTS: Mapping[str, Callable[[Dataflow, MapStats, str], Iterator[tuple[Hashable, float]]]] = MappingProxyType(
    {"cuda": _laid_on_gpu, "cpu": _laid_on_cpu}
)


# What is tried
@dataclass(frozen=True)
class CandidateFlow:
    """A dataflow that is worth trying, and what the layers over a map are reckoned to take with it, in seconds."""

    flow: Dataflow
    seconds: float


def candidate_flows(
    flows: Iterable[Dataflow], works: Sequence[LayerWork], passes: Sequence[str] = PASSES, device: str = "cuda"
) -> list[CandidateFlow]:
    """Each dataflow that differs from the default and from those before, the most promising first."""
    seen = {tuple(effect(PLANNED, name, device) for name in passes)}
    found = []
    for flow in flows:
        does = tuple(effect(flow, name, device) for name in passes)
        if does not in seen:
            seen.add(does)
            found.append(CandidateFlow(flow, together(flow, works, passes, device)))
    return sorted(found, key=lambda prospect: prospect.seconds)


def promising(found: Sequence[CandidateFlow], standing: float, factor: float) -> list[CandidateFlow]:
    """Those within a factor of the best, that of the default being `standing`."""
    best = min([standing, *(prospect.seconds for prospect in found)])
    return [prospect for prospect in found if prospect.seconds <= factor * best]
