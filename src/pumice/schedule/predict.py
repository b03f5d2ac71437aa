"""Cost model of dataflows, from statistics of a kernel map and its layers.

    time of a layer = time of its kernels (padded products, data movement) + time to build the map's layout

Layers over one map share its layouts. Rates are those of an H200 and of two cores with AVX-512. Of kernels over tiles
and groups of pairs the iterations of all programs are counted, of which each takes a fixed time and one for its
products (_ITERATIONS); the others count data movement. Layouts are fitted to the benchmark maps.
For tuning, estimates only select and order the dataflows to measure; pumice.engine.estimate sums them over a network,
with the rates of the device at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pumice.schedule.dataflow import DATAFLOWS, DGRAD, PASSES, PLANNED, WGRAD, Dataflow, Grouping
from pumice.schedule.tile import PROCESSORS, WHOLE_SEGMENTS, Tile, power_above, table_parts


@dataclass(frozen=True)
class Work:
    """Work of a lowering: FLOP (2 per multiply-add), bytes of memory and cache, launches. matrix: on tensor cores."""

    flops: float = 0
    memory: float = 0
    cache: float = 0
    launches: int = 1
    matrix: bool = False

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.memory + other.memory,
            self.cache + other.cache,
            self.launches + other.launches,
            self.matrix or other.matrix,
        )


@dataclass(frozen=True)
class Device:
    """Rates of a device: 16-bit tensor core and plain FLOP/s, memory and cache bytes/s, seconds per kernel launch."""

    name: str
    matrix: float
    plain: float
    memory: float
    cache: float
    launch: float


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        # Measured: dense fp16 product, device copy, reads that hit the L2.
        "cuda": Device("H200", 742e12, 60e12, 4.3e12, 8.5e12, 8e-6),
        # Two AVX-512 cores.
        "cpu": Device("CPU", 4e11, 1e11, 2e10, 1e11, 4e-6),
    }
)


def seconds(work: Work, device: Device) -> float:
    """Estimated seconds: the maximum of compute, memory and cache time, plus launch time."""
    rate = device.matrix if work.matrix else device.plain
    return (
        max(work.flops / rate, work.memory / device.memory, work.cache / device.cache) + work.launches * device.launch
    )


DEFAULT = "implicit-gemm-sorted"  # the planner's default on a GPU
DEFAULT_WGRAD = "fetch-on-demand"  # the same for weight gradients


def _on_a_gpu(flow: Dataflow, name: str) -> Dataflow:
    """The dataflow of a pass on a GPU, where the planner has defaults."""
    if flow.movement != PLANNED.movement:
        return flow
    return DATAFLOWS[DEFAULT_WGRAD if name == WGRAD else DEFAULT]


@dataclass(frozen=True)
class MapStats:
    """Statistics of a kernel map. counts: pairs per kernel offset. entries: by form, the number of (tile, offset)
    entries in each part (range of offsets), for tiles of `block` outputs; empty if not counted."""

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

    @property
    def unmoved(self) -> int:
        """Pairs of the middle offset if it pairs every row with itself, which gather-GEMM-scatter does not move."""
        middle = self.counts[self.taps // 2] if self.taps % 2 else 0
        return middle if middle == self.inputs == self.outputs else 0

    def parts(self, form: str) -> tuple[int, ...]:
        """Number of entries in each part of a form. Not counted: an upper bound, one entry per pair."""
        tiles = -(-self.outputs // self.block)
        return self.entries.get(form) or (min(self.pairs, tiles * self.taps),)


@dataclass(frozen=True)
class LayerWork:
    """A layer, and its map as read by forward and by dgrad. channels: (in, out). itemsize: bytes per value. parts: in
    which its float32 weight is stored (lower.parts), or 0."""

    forward_map: MapStats
    dgrad_map: MapStats
    channels: tuple[int, int]
    groups: int = 1
    itemsize: int = 4
    parts: int = 0

    @property
    def macs_per_pair(self) -> float:
        """Multiply-adds per pair."""
        return self.channels[0] * self.channels[1] / self.groups

    def dgrad(self) -> LayerWork:
        """The dgrad pass as a layer: map and channels exchanged."""
        inner, outer = self.channels
        return LayerWork(self.dgrad_map, self.forward_map, (outer, inner), self.groups, self.itemsize, self.parts)


_STATED = ("implicit", "on-demand", "in-parts")
"""Movements that are statements over a form of the map, with the groups of pairs for wgrad."""


# Equivalent and applicable dataflows
def equivalence_key(flow: Dataflow, name: str, device: str) -> Hashable:
    """Equivalence key of a dataflow in one pass, to skip duplicate candidates."""
    if device == "cuda":
        flow = _on_a_gpu(flow, name)
    if flow.movement in _STATED:
        # Weight gradients are not summed in parts.
        movement = "implicit" if flow.movement == "in-parts" and name == WGRAD else flow.movement
        return movement, flow.form, flow.piece
    if name != WGRAD or flow.movement in ("explicit", PLANNED.movement):
        return flow.movement, flow.grouping
    order = "vectorised" if flow.movement == "on-demand-in-order" else flow.movement
    return "products", order, flow.grouping or Grouping("separate")


def is_applicable(name: str, flow: Dataflow, deterministic: bool, library: bool) -> bool:
    """True if a dataflow can run this pass. deterministic: bitwise; library: torch's GEMM supports the dtype."""
    stated = flow.movement in _STATED
    return (not deterministic or name in flow.repeats) and (library or stated or flow.movement == PLANNED.movement)


# Seconds
def flow_seconds(flow: Dataflow, work: LayerWork, name: str, device: str) -> float:
    """Estimated seconds of the kernels of a pass, without building the map's layout."""
    return _MODELS[device](flow, work.dgrad() if name == DGRAD else work, name)


def seconds_on_gpu(flow: Dataflow, work: LayerWork, name: str, rates: Device, tile: Tile | None = None) -> float:
    """`flow_seconds` on a GPU of these rates. tile: of the kernel, if known."""
    spent = _on_gpu(flow, work.dgrad() if name == DGRAD else work, name, tile)
    return spent * DEVICES["cuda"].matrix / rates.matrix


def norm_seconds(size: int, rates: Device) -> float:
    """Estimated seconds of both passes of a batch norm on a GPU, with the activation behind it. size: bytes of its
    result."""
    fixed, each = _NORM_SECONDS
    return fixed + each * size * DEVICES["cuda"].memory / rates.memory


def map_seconds(rows: int, training: bool) -> float:
    """Estimated seconds to build a kernel map and its layouts on a GPU, in training for both passes. rows: of its finer
    side."""
    fixed, each = _MAP_SECONDS
    return (fixed + each * rows) * (_BOTH_PASSES if training else 1.0)


_NORM_SECONDS = 13e-6, 4.3e-12
_MAP_SECONDS = 10e-6, 1.3e-9
_BOTH_PASSES = 1.3
"""Fixed seconds, and seconds per byte or row, fitted to GPU times of the seven networks of the suite `workloads` on an
H200."""


def layouts(flow: Dataflow, work: LayerWork, name: str, device: str) -> Mapping[Hashable, float]:
    """Estimated seconds to build each map layout that a pass needs. Equal keys: a layout shared by several layers."""
    side = work.dgrad_map if name == DGRAD else work.forward_map
    return dict(_LAYOUTS[device](flow, side, name))


def total_seconds(flow: Dataflow, works: Sequence[LayerWork], passes: Iterable[str], device: str) -> float:
    """Estimated seconds of all layers over one map, with shared layouts counted once."""
    passes = tuple(passes)
    shared: dict[Hashable, float] = {}
    for work in works:
        for name in passes:
            shared.update(layouts(flow, work, name, device))
    return sum(flow_seconds(flow, work, name, device) for work in works for name in passes) + sum(shared.values())


_MATRIX = {1: 900e12, 2: 620e12, 4: 100e12, 8: 30e12}
"""FLOP/s of products by bytes per value; float32 products are three TF32 products."""
_KERNEL_SECONDS = 4e-6  # seconds of a kernel outside its loop
CALL_SECONDS = 0.3e-3  # seconds of a call of the C kernels of a CPU outside them
_PART_BYTES = 12  # memory traffic per result for each part after the first: float32 partial sums
_GROUP = 1024  # pairs that a program of a weight gradient takes at most
_ITERATIONS: Mapping[int, tuple[float, float]] = MappingProxyType(
    {1: (0.15e-6, 0.15e-12), 2: (0.16e-6, 0.2e-12), 4: (0.35e-6, 2.1e-12), 8: (0.5e-6, 9e-12)}
)
_IN_PARTS: Mapping[int, tuple[float, float]] = MappingProxyType({1: (0.2e-6, 0.5e-12), 3: (0.29e-6, 1.33e-12)})
_SUMS: Mapping[int, tuple[float, float]] = MappingProxyType({**_ITERATIONS, 4: (0.67e-6, 3e-12)})
_NARROW_SUMS: Mapping[int, tuple[float, float]] = MappingProxyType({**_ITERATIONS, 4: (0.22e-6, 6.4e-12)})
"""Seconds of an iteration of a program over a tile, by bytes per value: fixed, and per multiply-add. _IN_PARTS: of
float32 features and a weight in so many parts; that of one, in TF32, is from a single layer. Of weight gradients in
float32 those with 64 or more channels are six products of bfloat16, the others three of TF32 whose operands are turned.
Fitted to the kernels of the networks of the suite `workloads` on an H200: each kernel within 23 % (float16) and 15 %
(float32), root mean square; with weights in parts all kernels of a network within 6 %."""


def _on_gpu(flow: Dataflow, work: LayerWork, name: str, tile: Tile | None = None) -> float:
    """Seconds of a pass, on the map that it reads. tile: of its kernel, default: as the heuristics choose it mostly."""
    flow = _on_a_gpu(flow, name)
    if name == WGRAD and flow.movement in _STATED:
        return _weights_by_pairs(work, tile) if flow.movement == "on-demand" else _weights_by_tiles(flow, work, tile)
    if flow.movement == "in-parts":
        return _by_table_in_parts(work)
    if flow.movement == "implicit":
        return _by_table(work) if flow.form == "table" else _by_tiles(flow, work, tile)
    return _by_pairs(work) if flow.movement == "on-demand" else _by_library(flow, work, name, DEVICES["cuda"])


def _by_tiles(flow: Dataflow, work: LayerWork, tile: Tile | None) -> float:
    parts = work.forward_map.parts(flow.form)
    each = work.forward_map.taps / len(parts), work.forward_map.pairs / len(parts)
    total = sum(_tiled(entries, work, each, tile or _usual_tile(work, flow.piece)) for entries in parts)
    return total + (len(parts) - 1) * work.forward_map.outputs * work.channels[1] * _PART_BYTES / DEVICES["cuda"].memory


def _by_table(work: LayerWork) -> float:
    entries = -(-work.forward_map.outputs // work.forward_map.block) * work.forward_map.taps
    return _tiled(entries, work, (work.forward_map.taps, work.forward_map.pairs), _usual_tile(work))


def _by_table_in_parts(work: LayerWork) -> float:
    side, columns = work.forward_map, work.channels[1]
    parts = table_parts(side.outputs, columns, side.taps)
    entries = -(-side.outputs // side.block) * side.taps
    # All parts run at once; each is written and read again in float32.
    sums = _KERNEL_SECONDS + parts * side.outputs * columns * 8 / DEVICES["cuda"].memory
    return _tiled(entries, work, (-(-side.taps // parts), side.pairs), _usual_tile(work)) + sums


def _usual_tile(work: LayerWork, piece: int = 0) -> Tile:
    """The tile of most kernels over tiles of a map. piece: its stream_k_chunk."""
    inner, outer = (power_above(n // work.groups) for n in work.channels)
    sides = work.forward_map.block, max(16, min(128, outer)), max(16, min(64 if work.itemsize < 4 else 32, inner))
    return Tile(*sides, packed=inner < 16, stream_k_chunk=piece)


def _tiled(entries: int, work: LayerWork, each: tuple[float, float], tile: Tile) -> float:
    """Seconds of a kernel over one part, each: (offsets, pairs) of it. Absent pairs are multiplied, not gathered."""
    side, (inner, outer), (taps, pairs) = work.forward_map, work.channels, each
    columns, rows = (tile.rows, tile.columns) if tile.swapped else (tile.columns, tile.rows)
    blocks = work.groups * -(-outer // work.groups // columns) * max(1, side.block // rows)
    turns = -(-inner // work.groups // tile.reduced)
    if tile.packed:
        turns /= max(1, tile.reduced // power_above(inner // work.groups))
    piece = tile.stream_k_chunk % WHOLE_SEGMENTS
    # The longest tile, or one piece of it if several programs share it.
    longest = min(taps, entries, piece or taps)
    moved = (pairs * inner + entries * work.macs_per_pair) * work.itemsize
    rates = _IN_PARTS.get(work.parts) or _ITERATIONS[work.itemsize]
    spent = _looped((blocks * entries * turns, longest * turns), _iteration(rates, tile), moved)
    written = side.outputs * outer * work.itemsize / DEVICES["cuda"].memory
    return _KERNEL_SECONDS + written + spent + (2e-6 if piece else 0)


def _looped(turns: tuple[float, float], each: float, moved: float) -> float:
    """Seconds of loops. turns: iterations of all programs, of the longest one; each: seconds of one; moved: bytes."""
    every, longest = turns
    through = max(every * each / PROCESSORS, moved / DEVICES["cuda"].cache)
    return (through**1.5 + (longest * each) ** 1.5) ** (2 / 3)


def _iteration(rates: tuple[float, float], tile: Tile) -> float:
    """Seconds of an iteration of a program that has a multiprocessor for itself."""
    fixed, each = rates
    return fixed + each * tile.rows * tile.columns * tile.reduced


def _weights_by_pairs(work: LayerWork, tile: Tile | None) -> float:
    """Seconds of weight gradients over groups of pairs of one offset; gathers both sides."""
    counts, (inner, outer) = work.forward_map.counts, work.channels
    each, blocks, tile = _sums(work, tile)
    turns = [-(-count // tile.reduced) for count in counts]
    longest = min(_GROUP // tile.reduced, max(turns, default=0))
    moved = sum(counts) * (inner + outer) * work.itemsize
    return _KERNEL_SECONDS + _looped((blocks * sum(turns), longest), each, moved)


def _weights_by_tiles(flow: Dataflow, work: LayerWork, tile: Tile | None) -> float:
    """Seconds of weight gradients over the tiles of each offset: gathers pairs and whole tiles of the other side, and
    multiplies absent pairs, too."""
    side, (inner, outer) = work.forward_map, work.channels
    entries = -(-side.outputs // side.block) * side.taps if flow.form == "table" else sum(side.parts(flow.form))
    each, blocks, tile = _sums(work, tile)
    turns = blocks * entries * side.block / tile.reduced
    moved = (side.pairs * inner + entries * side.block * outer) * work.itemsize
    return _KERNEL_SECONDS + 6e-6 + 2 * _looped((turns, 0), each, moved)


def _sums(work: LayerWork, tile: Tile | None) -> tuple[float, int, Tile]:
    """(seconds of an iteration, programs per group, tile) of weight gradients."""
    inner, outer = (n // work.groups for n in work.channels)
    if tile is None:
        rows, columns = (max(16, min(128, power_above(n))) for n in (outer, inner))
        tile = Tile(rows, columns, 64 if work.itemsize < 4 or min(rows, columns) == 128 else 32)
    rows, columns = (inner, outer) if tile.swapped else (outer, inner)
    blocks = work.groups * -(-rows // tile.rows) * -(-columns // tile.columns)
    rates = _SUMS if min(inner, outer) >= 64 else _NARROW_SUMS
    return _iteration(rates[work.itemsize], tile), blocks, tile


def _by_pairs(work: LayerWork) -> float:
    """Seconds of a kernel over the pairs of each offset; gathers both sides, and adds to outputs in float32."""
    pairs = work.forward_map.pairs
    moved, macs = pairs * sum(work.channels) * work.itemsize, pairs * work.macs_per_pair
    longest = max(moved / DEVICES["cuda"].cache, 2 * macs / _MATRIX[work.itemsize] * 1.5)
    return _KERNEL_SECONDS + 6e-6 + 2 * longest + pairs * work.channels[1] * 8 / DEVICES["cuda"].cache


def _by_library(flow: Dataflow, work: LayerWork, name: str, device: Device) -> float:
    """Seconds of GEMMs by torch; gathered rows and products go through memory."""
    pairs, ((inner, outer), size) = work.forward_map.pairs, (work.channels, work.itemsize)
    rate = min(device.matrix, _MATRIX[size]) if device.name != "CPU" else device.plain
    products, kernels = pairs, 2
    if flow.movement == "explicit":
        products = work.forward_map.outputs * work.forward_map.taps
        moved, kernels = 2.0 * products * inner * size + work.forward_map.outputs * outer * size, 4
    else:
        groups = (flow.grouping or Grouping("separate")).groups(work.forward_map.counts)
        lengths = [(max(work.forward_map.counts[tap] for tap in group.taps), group) for group in groups]
        products = sum(length * len(group.taps) if group.batched else length for length, group in lengths)
        multiplied = sum(1 if group.batched else len(group.taps) for group in groups)
        moved = (products - work.forward_map.unmoved) * (2.0 * inner * size + (2.0 * size + 8) * outer)
        kernels = multiplied + 3 if flow.movement in ("fused", "locality-aware") else 3 * multiplied
    if name == WGRAD:
        unmoved = 0 if flow.movement == "explicit" else work.forward_map.unmoved
        moved = (products - unmoved) * 2.0 * (inner + outer) * size
    launch = 2.5e-6 if device.name != "CPU" else device.launch
    return kernels * launch + moved / device.memory + 2 * products * inner * outer / work.groups / rate


def pairs_on_cpu(size: tuple[int, tuple[int, int], float, int], name: str, device: Device) -> float:
    """Estimated seconds of a pass by the C kernels, whose chunks stay in the cache (lower.native_products).

    size: pairs, channels on both sides, multiply-adds per pair, bytes per value. The weight gradient copies rows. The
    call itself, some CALL_SECONDS, is not counted: as long a one belongs to every dataflow."""
    pairs, channels, macs, itemsize = size
    copies, slower = (1.5, 1.13) if name == WGRAD else (1.0, 1.0)
    moved, flops = pairs * sum(channels) * itemsize, 2 * pairs * macs
    return copies * moved / (device.cache / 2) + slower * flops / (2.5 * device.plain)


def _on_cpu(flow: Dataflow, work: LayerWork, name: str) -> float:
    device = DEVICES["cpu"]
    if flow.movement == PLANNED.movement:
        size = work.forward_map.pairs, work.channels, work.macs_per_pair, work.itemsize
        return 20e-6 + pairs_on_cpu(size, name, device)
    if flow.movement in (*_STATED, "on-demand-in-order"):
        # Slow: einsums over map forms that are meant for a GPU.
        return 10 * _by_library(DATAFLOWS["explicit-gemm"], work, name, device)
    return _by_library(flow, work, name, device)


def _layouts_on_gpu(flow: Dataflow, side: MapStats, name: str) -> Iterator[tuple[Hashable, float]]:
    flow, rows = _on_a_gpu(flow, name), side.outputs
    if flow.movement in ("implicit", "in-parts"):
        if flow.form != "table":
            parts = max(1, flow.splits)
            order = 14e-6 + rows * 0.06e-9 if flow.sorted else 0.0
            yield (id(side), flow.form), parts * (8e-6 + rows * 0.06e-9 + order)
            if name == WGRAD:
                # The tiles in the order of the offsets.
                tiles = sum(side.parts(flow.form)) * side.block
                yield (id(side), flow.form, WGRAD), parts * 30e-6 + tiles * 8 / DEVICES["cuda"].memory
    elif flow.movement == "on-demand":
        yield (id(side), "grouped"), 10e-6 + side.pairs * 8 / DEVICES["cuda"].memory
    elif flow.movement != "explicit":
        # Lists of pairs and their row indices, computed by torch.
        yield (
            (id(side), flow.movement, flow.grouping),
            40e-6 + side.taps * 5e-6 + side.pairs * 64 / DEVICES["cuda"].memory,
        )


def _layouts_on_cpu(flow: Dataflow, side: MapStats, name: str) -> Iterator[tuple[Hashable, float]]:
    if flow.movement not in (PLANNED.movement, "explicit"):
        yield (id(side), flow.movement, flow.grouping), 40e-6 + side.taps * 20e-6 + side.pairs * 4e-9


_MODELS: Mapping[str, Callable[[Dataflow, LayerWork, str], float]] = MappingProxyType({"cuda": _on_gpu, "cpu": _on_cpu})
_LAYOUTS: Mapping[str, Callable[[Dataflow, MapStats, str], Iterator[tuple[Hashable, float]]]] = MappingProxyType(
    {"cuda": _layouts_on_gpu, "cpu": _layouts_on_cpu}
)


# Candidates
@dataclass(frozen=True)
class CandidateFlow:
    """A candidate dataflow, and its estimated seconds for all layers over the map."""

    flow: Dataflow
    seconds: float


def candidate_flows(
    flows: Iterable[Dataflow], works: Sequence[LayerWork], passes: Sequence[str] = PASSES, device: str = "cuda"
) -> list[CandidateFlow]:
    """Candidates, lowest estimate first, without those equivalent to the default or to one another."""
    seen = {tuple(equivalence_key(PLANNED, name, device) for name in passes)}
    found = []
    for flow in flows:
        does = tuple(equivalence_key(flow, name, device) for name in passes)
        if does not in seen:
            seen.add(does)
            found.append(CandidateFlow(flow, total_seconds(flow, works, passes, device)))
    return sorted(found, key=lambda candidate: candidate.seconds)


def promising(found: Sequence[CandidateFlow], default_seconds: float, factor: float) -> list[CandidateFlow]:
    """Candidates within `factor` of the lowest estimate. default_seconds: estimate of the default dataflow."""
    best = min([default_seconds, *(candidate.seconds for candidate in found)])
    return [candidate for candidate in found if candidate.seconds <= factor * best]
