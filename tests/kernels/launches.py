"""Compile kernels of coordinates and of norms for GPUs that are not there.

What is compiled are the variants that typical maps launch, written down by a launcher that starts nothing. Jobs and
their results are those of kernels.cross.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import combinations, groupby
from typing import Any
from unittest.mock import patch

import torch
from clouds import Scene, levels, lookups
from kernels.cross import TARGETS, Built, spilled
from kernels.kept import Facts, facts_of
from norms import both_passes
from torch import Tensor

from pumice.coords import (
    CoordBuffer,
    Geometry,
    GridSpec,
    Limits,
    MapSchedule,
    PointSet,
    Relation,
    SortSpec,
    bricks,
    chain,
    chain_tiles,
    kernel_map,
    lookup,
    neighbor_search,
    segments,
    tiles,
)
from pumice.coords import buffer as packing
from pumice.coords import tiles as ranking
from pumice.coords.bricks import Bricks, Stencil
from pumice.coords.buffer import RANGE, new_status, set_status
from pumice.coords.lookup import Bitmap, CoordHashTable, DenseGrid, Table, mask_words, prefix_counts
from pumice.lower import block_rows, movement, norm, parts, segment_sums, unrolled
from pumice.lower import rows as by_rows
from pumice.runtime.launch import BoundKernel
from pumice.schedule.tile import Tile
from pumice.testing import random_cloud

LOWER = ("row_kernels", "block_row_kernels", "movement_kernels", "segment_kernels")
"""Files of kernels in pumice.lower, besides those of pumice.coords."""
_TYPES = {
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
}


@dataclass(frozen=True)
class Variant:
    """What Triton compiles: a kernel, the types of its tensors (a "!" where one is not aligned) and numbers, its
    constants."""

    kernel: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int


@dataclass(frozen=True)
class Launch:
    """A variant to compile for a target."""

    variant: Variant
    target: str

    @property
    def kernel(self) -> str:
        return self.variant.kernel

    @property
    def name(self) -> str:
        v = self.variant
        constants = " ".join(f"{name}={value}" for name, value in v.constants)
        return f"{v.kernel} {self.target} {constants} w{v.warps} {''.join(t[1:] for t in v.tensors)}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_json(held: dict[str, Any]) -> Launch:
        v = held["variant"]
        constants = tuple((name, value) for name, value in v["constants"])
        return Launch(
            Variant(**{**v, "tensors": tuple(v["tensors"]), "numbers": tuple(v["numbers"]), "constants": constants}),
            held["target"],
        )


# Writing down


class Recorder:
    """In place of BoundKernel: what would be launched."""

    def __init__(self) -> None:
        self.seen: dict[Variant, None] = {}

    def __call__(
        self, fixed: BoundKernel, programs: int, tensors: Sequence[Tensor], numbers: Sequence[float] = ()
    ) -> None:
        assert programs > 0
        name = f"{fixed.kernel.function.fn.__module__.rpartition('.')[2]}.{fixed.kernel.function.fn.__name__}"
        kinds = tuple(_TYPES[t.dtype] + "!" * (t.data_ptr() % 16 != 0) for t in tensors)
        sizes = tuple("fp32" if isinstance(number, float) else "i64" for number in numbers)
        names = fixed.kernel.function.arg_names[len(kinds) + len(sizes) :]
        constants = tuple(zip(names, fixed.constants, strict=True))
        self.seen[Variant(name, kinds, sizes, constants, fixed.warps)] = None


@lru_cache
def variants() -> tuple[Variant, ...]:
    """What typical maps launch; nothing is computed, so that sizes are given and results are nonsense."""
    recorder = Recorder()
    with (
        patch.object(BoundKernel, "__call__", lambda *args: recorder(*args)),
        patch.object(tiles, "has_triton", lambda tensor: True),
        patch.object(lookup, "has_triton", lambda tensor: True),
        patch("pumice.coords.buffer.has_triton", lambda tensor: True),
        patch.object(ranking, "has_triton", lambda tensor: True),
        patch.object(norm, "has_triton", lambda tensor: True),
        patch.object(by_rows, "has_triton", lambda tensor: True),
        patch.object(movement, "has_triton", lambda tensor: True),
        patch.object(parts, "has_triton", lambda tensor: True),
        patch.object(segments, "_fits_sort_kernel", lambda array, count: True),
        patch.object(segments, "has_triton", lambda tensor: True),
        patch.object(chain, "has_triton", lambda tensor: True),
        patch.object(chain_tiles, "has_triton", lambda tensor: True),
        patch.object(chain_tiles, "has_triton", lambda tensor: True),
        patch.object(packing, "has_triton", lambda tensor: True),
    ):
        for dim in (3, 1, 2, 4):
            _lookups(dim)
            _levels(dim)
        for dim, steps in ((3, 4), (3, 2), (1, 2), (2, 2)):
            _chain(dim, Relation.of(dim, 2, stride=2), steps)
            _chain(dim, Relation.of(dim, 3, stride=2, padding=1), steps)
        with patch.multiple(bricks, WHOLE=0, FEW=0):
            _lookups(3)
            _levels(3)
        for dim, count in ((3, 300), (2, 9000)):
            _points(dim, count)
        for volume in (27, 8, 125):
            _stages(volume)
        for count in (100, 500, 2000):
            segments.split_runs(torch.zeros(9000, dtype=torch.int32), count, 8)
            segments.segments_by_length(torch.zeros(9000, dtype=torch.int32), count)
            told = torch.zeros(9000, dtype=torch.int32)
            segments.RUNS.register(told, torch.full((count,), 9000, dtype=torch.int32), 27)
            segments.split_runs(told, count, 8)
            segments.segments_by_length(told, count)
        for dtype in (torch.float16, torch.float32):
            coords, feats = torch.zeros(9, 4, dtype=torch.int32), torch.zeros(9, 3, dtype=dtype)
            packing.put_first([coords, feats], [coords[:5], feats[:5]], torch.zeros(1, dtype=torch.int32))
        set_status(new_status(told.device), RANGE, told.any())
        weight = torch.zeros(64, 27, 64)
        for number in (1, 3):
            parts.WeightParts.of([weight], number).fill([weight])
        for dtype, channels in ((torch.float16, 96), (torch.bfloat16, 256), (torch.float32, 3)):
            _norms(torch.zeros(40_000, channels, dtype=dtype))
            by_rows.zero_padding_rows(torch.zeros(40, channels, dtype=dtype), torch.tensor([7], dtype=torch.int32))
            _maxima(torch.zeros(60, channels, dtype=dtype))
            _over_items(torch.zeros(60, channels, dtype=dtype))
            _movements(torch.zeros(60, channels, dtype=dtype))
            target = unrolled.Target((9, channels), dtype)
            unrolled._sum_by_rows(torch.zeros(60, channels), torch.arange(60) % 9, target)
        for dtype, width in ((torch.float16, 128), (torch.bfloat16, 72), (torch.float32, 128), (torch.float32, 9)):
            _segments(torch.zeros(50, width, dtype=dtype))
        for dtype, width, depth in ((torch.float16, 16384, 32), (torch.bfloat16, 200, 64)):
            _block_rows(torch.zeros(500, width, dtype=dtype), depth)
        by_rows.sum_items(torch.ones(60, 1, dtype=torch.int64), torch.zeros(60, dtype=torch.int64), 2)
    return tuple(recorder.seen)


def _segments(x: Tensor) -> None:
    """Sums of gathered rows over short segments, and over some that are cut; with values and without."""
    for longest in (3, 2000):
        segment = torch.repeat_interleave(torch.arange(9), torch.tensor([1, longest] + 7 * [2])).int()
        tile = segment_sums.SegmentTile.default(x.element_size(), len(segment), 9)
        places = torch.zeros_like(segment)
        ready = segment_sums.prepared(segment, places, 9, tile)
        for values in (None, torch.zeros(len(segment), dtype=x.dtype)):
            ready.run(x, values, places, x.new_empty(9, x.shape[1]))


def _block_rows(x: Tensor, depth: int) -> None:
    """Products of one and of two rows of blocks in a program, of turned blocks, too."""
    none, sizes = segment_sums.Roles("", "", "", ""), (32 * 40, len(x))
    for turned in (False, True):
        form = block_rows.RowForm(none, depth, ("i", "j"), turned)
        blocks = block_rows.PresentBlocks.of(torch.arange(40), torch.zeros(40, 1, dtype=torch.int32), (40, 1))
        for count in (1, 2):
            lists = block_rows.listed(blocks, (40, 1), form, count)
            assert lists is not None
            values = torch.zeros(40, 32, depth, dtype=x.dtype)
            block_rows.BlockRows(form, lists, sizes).run(x, values, x.new_empty(sizes[0], x.shape[1]))


def _norms(x: Tensor) -> None:
    """Norms of the living rows of a buffer, and their gradients."""
    like, channels = _cloud(3), x.shape[1]
    cloud = CoordBuffer(
        torch.zeros(len(x), 4, dtype=torch.int32), torch.tensor([1], dtype=torch.int32), like.bounds, like.status
    )
    running, tracked = (torch.zeros(channels), torch.ones(channels)), torch.tensor(0)
    affine = torch.ones(channels), torch.zeros(channels)
    offset = torch.zeros(channels)
    told = [norm.Statistics(running, 1e-5, True, momentum, tracked) for momentum in (0.1, None)]
    told += [norm.Statistics(None, 1e-5), norm.Statistics(running, 1e-5, True, 0.1, tracked, offset)]
    for statistics in told:
        for relu in (False, True):
            for residual in (None, torch.zeros_like(x)):
                both_passes(x, cloud, norm.Norm(*affine, statistics, residual, relu), torch.ones_like(x))
    both_passes(x, cloud, norm.Norm(None, None, told[0]), torch.ones_like(x))
    for vectors in ((*running, *affine), (*running, None, None)):
        norm.by_statistics(x, vectors, 1e-5)
    apart = torch.zeros(len(x), channels + 32, dtype=x.dtype)[:, :channels]
    both_passes(x, cloud, norm.Norm(*affine, told[0], None, True), apart)


def _maxima(x: Tensor) -> None:
    """Maxima over the inputs of a map's outputs, and their gradients."""
    found, _ = kernel_map(Geometry.checked(random_cloud(60, 3, extent=12)), Relation.of(3, 2, stride=2))
    by_rows.max_pool_rows(x[:60].requires_grad_(), found).sum().backward()
    with torch.no_grad():
        by_rows.max_pool_rows(x[:60], found)


def _over_items(x: Tensor) -> None:
    """Sums and maxima over batch items, and rows of items."""
    items = torch.arange(len(x)) // 20
    by_rows.spread_items(by_rows.sum_items(x, items, 3), items)
    by_rows.max_items(x, items, 3)


def _movements(x: Tensor) -> None:
    """Rows to and from slots, in both orders, and one element at a time."""
    for distinct in (False, True):
        slots = movement.Slots(torch.arange(len(x), dtype=torch.int32), len(x), False, distinct)
        for scalar in (False, True):
            movement.gather_slots(x, slots, scalar)
            movement.scatter_slots(torch.zeros(x.shape), x, slots, scalar)
    movement.gather_stationary(x, slots)
    for base in (None, x):
        movement.scatter_stationary(x, slots, base)


def _cloud(dim: int) -> CoordBuffer:
    return Scene(dim, 40, 8).cloud()


def _lookups(dim: int) -> None:
    cloud = _cloud(dim)
    every = lookups(dim)
    asked = [every["k3"]] + ([every["k2 s2"], every["k5"]] if dim == 3 else [])
    tables: list[Table] = [CoordHashTable(cloud, MapSchedule()), Table(cloud, MapSchedule(), "wide")]
    tables += [DenseGrid(cloud, MapSchedule("grid")), Bitmap(cloud, MapSchedule("bitmap"))] if dim == 3 else []
    other = _cloud(dim)
    for relation in asked:
        tables[0].neighbours(cloud, relation)
    for table in tables:
        table.neighbours(cloud, asked[0])
        # Rows of others, and taps that reach past a table's margin.
        table.neighbours(other, Relation.of(dim, 3, dilation=9))
    if dim == 3:
        tables[0].neighbours(cloud, asked[0], mirrored=True)


def _points(dim: int, count: int) -> None:
    """Searches among points."""
    points = PointSet(torch.zeros(count, dim), torch.zeros(count, dtype=torch.int64), 1)
    for limits in (Limits(3, 1.0), Limits(16, 1.0), Limits(32, 1.0, True), Limits(200, 1.0)):
        neighbor_search.nearest(points, points, limits)
    neighbor_search.within(points, points, 1.0)
    neighbor_search.farthest(points, [7], [0])


def _levels(dim: int) -> None:
    cloud = _cloud(dim)
    every = levels(dim)
    for label in ("floor k2 s2", "floor k3 s2", "support k3 s2 p1", "transposed k2 s2")[: 4 if dim == 3 else 1]:
        relation = every[label]
        reach, meets = Stencil.of_outputs(relation), Stencil.of_neighbours(relation)
        made = Bricks.of(cloud, reach, cloud.bounds, 40)
        if label.startswith("transposed"):
            made.coords(cloud, reach, 40), made.transposed_rows(cloud, meets, 40)
        elif label == "floor k3 s2":
            made.coords(cloud, reach, 40), made.rows(cloud, meets, 40)
        else:
            made.coords_and_rows(cloud, meets, 40)


def _chain(dim: int, step: Relation, steps: int) -> None:
    """The maps of a network."""
    cloud, window = _cloud(dim), Relation.of(dim, 3)
    tiled = [(chain.SAME, level, window) for level in range(steps + 1)]
    for level in range(steps):
        tiled += [(chain.DOWN, level + 1, step), (chain.UP, level, step)]
    windows = ((window,),) * (steps + 1)
    rule = chain.TileRule(24_000, 8, 1 << 15, (8,), ((1 << 30, 64),))
    request = chain.ChainRequest(dim, (step,) * steps, windows, tuple(tiled), rule, True)
    for few in (1 << 13, 0):
        with patch.object(chain, "RANKED", few):
            made = chain.find_maps(
                cloud.coords, GridSpec((1,) * dim, None, 1, cloud.bounds), request, chain.Room.of(request, 400)
            )
            chain_tiles.tile_maps(made)
    layout = chain.KeyLayout.of(request, cloud.bounds)
    buffered = chain.BufferedChain(cloud, request, (cloud.capacity, *(60,) * steps), layout)
    chain.start_kernels(buffered, GridSpec((1,) * dim, None, 1, cloud.bounds))
    chain_tiles.fill_tiles(made, [40] * request.num_read)
    chain_tiles.group_pairs(made, [40] * request.num_read)


def _stages(volume: int) -> None:
    rows, count = torch.full((600, volume), -1, dtype=torch.int32), torch.tensor([600], dtype=torch.int32)
    masks = mask_words(rows)
    prefix_counts(torch.zeros(20_000, dtype=torch.int32))
    ends, (how,) = tiles.pair_counts(masks, count, volume), SortSpec.splits(volume, 1)
    window = {8: Relation.of(3, 2, stride=2), 27: Relation.of(3, 3), 125: Relation.of(3, 5)}[volume]
    order = tiles.sort_rows(masks, count, tiles.groups_of(window, how, masks.device), how)
    for block in (64, 128) if volume == 27 else (64,):
        tiling = tiles.assign_tiles(masks, count, order, how, (block, volume))
        tiles.fill_tiles(rows, tiling, 50)
    tiles.assign_tiles(masks, count, None, SortSpec(0, volume, sort=False), (64, volume))
    tiles.list_pairs(rows, count, ends, 50)
    tiles.group_pairs(rows, count, ends, (50, 8))
    tiles.transpose_table(rows, count, 600)


def jobs() -> Iterator[Launch]:
    """For sm_90, variants of each kernel in which any two properties meet that meet in a launch; for the other targets,
    variants that have every property."""
    for _, same in groupby(sorted(variants(), key=_kernel), _kernel):
        found = list(same)
        yield from (Launch(variant, "sm_90") for variant in covering(found, 2))
        yield from (Launch(v, target) for target in TARGETS if target != "sm_90" for v in covering(found, 1))


def _kernel(variant: Variant) -> str:
    return variant.kernel


def covering(found: Sequence[Variant], together: int) -> list[Variant]:
    """Few of the variants, with all sets of so many properties that any of them has."""
    held = {v: {*combinations([*enumerate(v.tensors), *v.constants], together)} for v in found}
    left, chosen = set().union(*held.values()), []
    while left:
        chosen.append(max(found, key=lambda v: len(held[v] & left)))
        left -= held[chosen[-1]]
    return chosen


# Compiling

INSTRUCTIONS = {
    "min64": r"\batom\.\S*min\.s64",
    "cas64": r"\batom\.\S*cas\.b64",
    "cas32": r"\batom\.\S*cas\.b32",
    "load16": r"\bld\.global\S*\.v4\.b32",
    "popc": r"\bpopc\.b32|\bv_bcnt_u32",
    # A count of bits in steps: every other one first.
    "halves": r"\b1431655765\b|\b0x55555555\b",
    # Accesses of 16 bytes, of one or two bytes, and additions of four numbers in memory.
    "wide": r"\b(?:ld|st)\.global\.v4\.b32",
    "narrow": r"\b(?:ld|st)\.global\.b(?:8|16)\b",
    "add4": r"\batom\.\S*add\.v4\.f32",
    "wgmma": r"\bwgmma\.mma_async",
    "copies": r"\bcp\.async\.cg\.\S+ .*, 0x10\b",
}


def built(job: Launch) -> Built:
    """The job done; an error of the compiler is told, not raised."""
    found = Built(Tile(1, 1, warps=job.variant.warps), False, False)
    try:
        facts = facts_of(_source(job), job.target, {"num_warps": job.variant.warps}, _read)
    except Exception as error:
        return replace(found, error=f"{type(error).__name__}: {str(error)[-1500:]}")
    return replace(found, **facts)


def _read(compiled: Any, log: str) -> Facts:
    """What is asserted of what the compiler made."""
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    counts = {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()}
    return {"shared": compiled.metadata.shared, "spilled": spilled(compiled.asm, log), "instructions": counts}


def _source(job: Launch) -> Any:
    """As a launch has it: tensors, integers of 64 bits that nothing is known of, constants."""
    from triton.compiler import ASTSource

    file, _, name = job.variant.kernel.partition(".")
    room = "lower" if file in LOWER else "coords"
    fn, v = getattr(importlib.import_module(f"pumice.{room}.{file}"), name), job.variant
    names = [p.name for p in fn.params]
    kinds = [*(t.rstrip("!") for t in v.tensors), *v.numbers, *("constexpr",) * len(v.constants)]
    assert len(kinds) == len(names), f"{v.kernel} takes {names}"
    assert names[len(kinds) - len(v.constants) :] == [name for name, _ in v.constants], "constants in another order"
    constants = {(names.index(name),): value for name, value in v.constants}
    attributes = {(at,): [["tt.divisibility", 16]] for at, t in enumerate(v.tensors) if not t.endswith("!")}
    return ASTSource(fn=fn, signature=dict(zip(names, kinds, strict=True)), constexprs=constants, attrs=attributes)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    return asdict(built(Launch.of_json(job)))
