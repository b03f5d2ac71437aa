"""Kernels of coordinates in Triton's interpreter, in a process of its own.

Everything is compared bit for bit with plain torch, which other tests compare with dictionaries and loops. Whatever is
allocated under a check lies between fences, which kernels must leave alone.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import chain_cases
import torch
from clouds import (
    INT32,
    SHAPES,
    SIDES,
    NoWaits,
    Scene,
    asked,
    astray,
    buffered,
    fresh,
    levels,
    lookups,
    neighbours,
    outputs_agree,
    site_around,
    within,
)
from found import agree
from kernels.interpret import answering
from torch import Tensor

import pumice as pm
from pumice.coords import (
    Bounds,
    CoordBuffer,
    Geometry,
    GridSpec,
    KernelMap,
    MapSchedule,
    Relation,
    SortSpec,
    bricks,
    chain,
    chain_build,
    chain_tiles,
    kernel_map,
    pyramid,
    segments,
    tiles,
)
from pumice.coords import tiles as ranking
from pumice.coords.box import UNKNOWN
from pumice.coords.bricks import Bricks, Stencil
from pumice.coords.buffer import DUPLICATE, OVERFLOW, RANGE, put_first, put_first_torch
from pumice.coords.lookup import (
    STRUCTURES,
    Bitmap,
    CoordHashTable,
    DenseGrid,
    Neighbours,
    SortedKeys,
    Table,
    default,
    mask_words,
    mask_words_torch,
    prefix_counts,
)
from pumice.coords.outputs import BrickOutputs, SortedOutputs, TorchOutputs, make_outputs, max_outputs, site_of
from pumice.coords.segments import segments_by_length, segments_by_length_torch, split_runs, split_runs_torch
from pumice.coords.tiles import Digits, stable_argsort, stable_argsort_torch
from pumice.lower import maps as lowered
from pumice.lower.dataflow import materialize
from pumice.runtime.launch import BoundKernel, Part, without_collection

prepared = import_module("pumice.ops.prepare")
layer_maps = import_module("pumice.ops.prepare")

Checks = Mapping[str, Callable[[], None]]
DIMS = (1, 2, 3, 4)
FENCE = 1024
"""Elements before and after a tensor that must stay what they are."""


# Comparing


def same(got: Any, want: Any, what: object = "") -> None:
    """Tensors, or tuples of them, that are equal bit for bit."""
    if not isinstance(want, Tensor):
        assert len(got) == len(want), what
        for a, b in zip(got, want, strict=True):
            same(a, b, what)
        return
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}, {want.dtype}"
    if not torch.equal(got, want):
        at = (got != want).nonzero()[0].tolist()
        raise AssertionError(f"{what}: {got[tuple(at)]} at {at}, expected {want[tuple(at)]}")


@contextmanager
def plain() -> Iterator[None]:
    """As on a machine where no kernel runs."""
    with ExitStack() as stack:
        for module in _rooms():
            stack.enter_context(patch.object(module, "has_triton", lambda tensor: False))
        yield


def _rooms() -> list[ModuleType]:
    places = "pumice.coords.", "pumice.runtime."
    rooms = [m for name, m in sys.modules.items() if name.startswith(places) and hasattr(m, "has_triton")]
    assert len(rooms) > 4
    return rooms


def marked(few: int = 0) -> Any:
    """As in a large box: the bricks that exist are marked, and they alone have bitmaps; few: words cleared before."""
    return patch.multiple(bricks, WHOLE=0, FEW=few)


@contextmanager
def fenced() -> Iterator[None]:
    """Tensors of this room are allocated between fences, and hold what could be rows where nobody wrote."""
    held: list[Tensor] = []

    def allocate(size: tuple[int, ...], fill: Any, dtype: torch.dtype) -> Tensor:
        shape = torch.Size(size)
        whole = real(shape.numel() + 2 * FENCE, dtype=dtype)
        whole.fill_(3)
        held.append(whole)
        inner = whole[FENCE : FENCE + shape.numel()].view(shape)
        return inner if fill is None else inner.fill_(fill)

    def sized(args: tuple[Any, ...]) -> tuple[int, ...]:
        return args if args and isinstance(args[0], int) else tuple(args[0])

    real = torch.empty
    with ExitStack() as stack:
        for module in (m for m in _rooms() if hasattr(m, "torch")):
            shadow = stack.enter_context(patch.object(module, "torch", _Torch()))
            shadow.empty = lambda *size, dtype, device=None: allocate(sized(size), None, dtype)
            shadow.zeros = lambda *size, dtype, device=None: allocate(sized(size), 0, dtype)
            shadow.full = lambda size, fill, dtype, device=None: allocate(tuple(size), fill, dtype)
        yield
    for whole in held:
        assert bool((whole[:FENCE] == 3).all() & (whole[-FENCE:] == 3).all()), "written out of bounds"


class _Torch:
    """torch, with some functions replaced."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def looked_up(cloud: CoordBuffer, outputs: CoordBuffer, relation: Relation) -> Neighbours:
    """What sorted keys say, with masks."""
    rows = SortedKeys(fresh(cloud), MapSchedule("sorted")).neighbours(outputs, relation).rows.contiguous()
    return Neighbours(rows, mask_words_torch(rows))


def structures(cloud: CoordBuffer, wide: bool = True) -> Iterator[tuple[str, Any, CoordBuffer]]:
    """Every structure of kernels that can be had; hash tables in both layouts."""
    for name, made in (("hash", CoordHashTable), ("grid", DenseGrid), ("bitmap", Bitmap)):
        if made.refusal(cloud, MapSchedule(name)) is None:
            own = fresh(cloud)
            yield name, made(own, MapSchedule(name)), own
    if wide:
        own = fresh(cloud)
        yield "wide", Table(own, MapSchedule(), "wide"), own


# Structures

SCENES = {
    "plain": Scene(count=40),
    "one": Scene(count=1, batch=1),
    "nothing alive": Scene(count=0, spare=3),
    "full buffer": Scene(count=40, spare=0),
    "several programs": Scene(count=150, spare=20),
    "batch of 512": Scene(count=60, batch=512),
    "loose box": Scene(count=40, loose=30),
    "clusters": Scene(count=40, clusters=3),
    "wide": Scene(count=40, clusters=3, far=True),
}


def scene(name: str, dim: int) -> Scene:
    return replace(SCENES[name], dim=dim, side=SIDES[dim])


def structure_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for dim in DIMS:
        for name in SCENES:
            if (name, dim) != ("several programs", 4):
                found[f"{name} D={dim}"] = partial(check_structures, scene(name, dim))
        found[f"mirrored D={dim}"] = partial(check_mirrored, dim)
        found[f"duplicates D={dim}"] = partial(check_duplicates, dim)
        for where in ("batch", "negative batch", "below", "above"):
            found[f"outside D={dim} {where}"] = partial(check_outside, dim, where)
    for kind in ("hash", "wide"):
        found[f"probes around the end {kind}"] = partial(check_probes, kind)
    found["ends of int32"] = check_ends
    found["refusals"] = check_refusals
    found["mask words"] = check_mask_words
    return found


def check_structures(asked_of: Scene) -> None:
    """The rows and masks of sorted keys; K from 1 to 125, strides 1 to 3, one-sided offsets."""
    cloud = asked_of.cloud()
    relations = lookups(asked_of.dim)
    if asked_of.count > 100:
        relations = {"k3": relations["k3"]}
    elif asked_of != scene("plain", asked_of.dim):
        # K = 81 and 125 take long, and strides that differ are the plain scene's.
        relations = {name: relations[name] for name in ("k3" if asked_of.dim < 4 else "k1", "k2 s2", "offsets")}
    cases = {name: (r, asked(cloud, r.stride)) for name, r in relations.items()}
    for name, structure, own in structures(cloud):
        for label, (relation, outputs) in cases.items():
            same(structure.neighbours(outputs, relation), looked_up(cloud, outputs, relation), (name, label))
        assert int(own.status) == 0, name
        assert structure.nbytes > 0


def check_mirrored(dim: int) -> None:
    """Half of the taps asked for give the rows of all."""
    for cloud in (scene("plain", dim).cloud(), scene("one", dim).cloud(), scene("nothing alive", dim).cloud()):
        for relation in (
            Relation.of(dim, 1),
            Relation.of(dim, 3),
            Relation.of(dim, 5 if dim < 3 else (5, 3, 1, 1)[:dim]),
        ):
            assert relation.mirrored
            for name, structure, _ in structures(cloud):
                if isinstance(structure, Table):
                    got = structure.neighbours(cloud, relation, mirrored=True)
                    same(got.rows, looked_up(cloud, cloud, relation).rows, name)
                    assert got.masks is None


def repeated(dim: int) -> CoordBuffer:
    """Some coordinates twice and thrice, in other programs too."""
    coords = scene("several programs" if dim < 4 else "plain", dim).coords()
    return buffered(torch.cat([coords, coords[7:19].flip(0), coords[9:12]]), 4)


def check_duplicates(dim: int) -> None:
    """They are reported, and in tables with a place for each cell the least row is found."""
    cloud, relation = repeated(dim), Relation.of(dim, 3 if dim < 4 else (3, 1, 1, 3))
    want = neighbours(cloud, cloud, relation)
    for name, structure, own in structures(cloud):
        if isinstance(structure, Table) and name != "bitmap":
            same(structure.neighbours(cloud, relation).rows, want, name)
        assert int(own.status) == DUPLICATE, name


def check_outside(dim: int, where: str) -> None:
    """A row outside its box is reported, found by nobody, and harms no other; what it finds is not said."""
    coords, bounds = astray(dim, where)
    cloud, relation = buffered(coords, 3, bounds), Relation.of(dim, 3 if dim < 4 else 1)
    want = neighbours(cloud, cloud, relation)
    want[want == 11] = -1
    for name, structure, own in structures(cloud):
        got = structure.neighbours(cloud, relation).rows
        got[11] = want[11]
        same(got, want, name)
        assert int(own.status) == RANGE, name


def check_probes(kind: str) -> None:
    """57 keys in 64 slots: long probes, around the end of the table, for those there and those that are not."""
    places = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(0))[:157].int()
    coords = torch.stack([torch.zeros_like(places), places], dim=1)
    box = Bounds((0,), (1 << 20,), 1)
    cloud, others = buffered(coords[:57], 0, box), buffered(coords[57:], 0, box)
    table = Table(cloud, MapSchedule(load=0.9), kind)
    free = 2**63 - 1 if kind == "hash" else -1
    assert int((table._table[:64] != free).sum()) == 57 and bool((table._table[64:] == free).all())
    relation = Relation.of(1, 3)
    same(table.neighbours(cloud, relation), looked_up(cloud, cloud, relation))
    assert not bool((table.neighbours(others, Relation.of(1, 1)).rows >= 0).any())
    assert int(cloud.status) == 0


def check_ends() -> None:
    """Cells past either end of int32 are not those at the other."""
    for dim in (1, 2, 3):
        ends = torch.tensor([[0, *(INT32[0],) * dim], [0, *(INT32[1],) * dim], [0, *(0,) * dim]], dtype=torch.int32)
        cloud = buffered(ends, 2)
        for relation in (Relation.of(dim, 3), Relation.of(dim, 3, dilation=2**30), Relation.of(dim, 2, stride=2)):
            for name, structure, _ in structures(cloud):
                same(structure.neighbours(cloud, relation).rows, neighbours(cloud, cloud, relation), name)


def check_refusals() -> None:
    """What cannot be had says why, and the choice goes to what can."""
    wide, small = scene("wide", 3).cloud(), scene("plain", 3).cloud()
    assert "cells, a grid at most" in (DenseGrid.refusal(wide, MapSchedule("grid")) or "")
    assert DenseGrid.refusal(small, MapSchedule("grid", cells=10)) is not None
    assert CoordHashTable.refusal(wide, MapSchedule()) is None
    assert default(wide).structure == "hash"
    assert CoordHashTable(wide, MapSchedule())._kind == "wide" and CoordHashTable(small, MapSchedule())._kind == "hash"
    for cloud in (wide, small):
        name = default(cloud).structure
        assert STRUCTURES[name].refusal(cloud, MapSchedule(name)) is None
    with plain():
        assert all(STRUCTURES[name].refusal(small, MapSchedule(name)) for name in ("hash", "grid", "bitmap"))


def check_mask_words() -> None:
    for volume in (1, 8, 16, 17, 27, 31, 32, 62, 63, 125):
        rows = torch.randint(-2, 3, (70, volume), dtype=torch.int32, generator=torch.Generator().manual_seed(volume))
        same(mask_words(rows.clamp(min=-1)), mask_words_torch(rows), volume)


# Outputs


def output_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for dim in DIMS:
        for label, relation in levels(dim).items():
            # 81 taps take long.
            if dim < 4 or label in (
                "floor k2 s2",
                "support k3 s2 p1",
                "transposed k2 s2",
                "offsets floor",
                "mixed strides",
            ):
                found[f"{label} D={dim}"] = partial(check_outputs, dim, relation)
            if relation.custom is None and dim in (1, 3):
                found[f"{label} D={dim} bounded"] = partial(check_bounded, dim, relation)
    for label, relation in levels(3).items():
        if label.startswith(("floor k2", "floor k3", "support k3 s2 p1", "transposed k3 s2")):
            found[f"{label} without room"] = partial(check_room, relation)
    found["behind an overflow nobody is asked past the end"] = check_behind_overflow
    found["status words are never read and written back"] = check_status
    found["in a batch of 512"] = check_batch
    found["large strides"] = check_divided
    found["several programs"] = check_programs
    found["bricks without room"] = check_bricks_without_room
    found["an extent of which no cell is reached"] = check_unreached
    found["ends of int32 at a large stride"] = check_far_outputs
    found["levels of levels"] = check_pyramid
    return found


def check_outputs(dim: int, relation: Relation) -> None:
    """Kernels, sorted codes and the twin agree with a loop; the table that bricks give is that of sorted keys."""
    count = 40 if dim < 4 else 10
    # Between two clusters of four axes there are very many bricks.
    clusters = 1 if dim == 4 else 2
    for seed, part in enumerate(
        (Scene(dim, count, SIDES[dim]), Scene(dim, 1, 1, batch=1), Scene(dim, 12, 3, clusters=clusters))
    ):
        cloud = replace(part, seed=seed).cloud()
        outputs_agree(cloud, site_around(cloud), relation, (TorchOutputs, SortedOutputs, BrickOutputs))
        tables_agree(cloud, relation)
        with marked((seed > 0) << 19):
            outputs_agree(cloud, site_around(cloud), relation, (BrickOutputs,))
            tables_agree(cloud, relation)


def tables_agree(cloud: CoordBuffer, relation: Relation) -> None:
    """Of the outputs, or of the inputs where the relation is transposed; with more room than is needed too."""
    goal = site_of(site_around(cloud), relation)
    made, whole = BrickOutputs(cloud, relation, goal), TorchOutputs(cloud, relation, goal)
    count = int(made.count)
    geometry = made.geometry(count)
    transposed = relation.policy == "transposed_support"
    if transposed:
        want = looked_up(whole.geometry(count).cloud, cloud, relation).rows
    else:
        want = looked_up(cloud, whole.geometry(count).cloud, relation).rows
    same(made.table(count), want)
    padded = BrickOutputs(cloud, relation, goal)
    outputs = padded.cloud(count + 9)
    table = padded.table(count + 9)
    assert table is not None
    same(outputs.coords[:count], geometry.coords)
    same(table[: len(want)], want)
    assert transposed or bool((table[count:] == -1).all())


def check_bounded(dim: int, relation: Relation) -> None:
    geometry = within(SHAPES[dim])
    site = Geometry.checked(geometry.coords, spatial_shape=SHAPES[dim]).site
    outputs_agree(geometry.cloud, site, relation, (TorchOutputs, SortedOutputs, BrickOutputs))


def check_divided() -> None:
    """More kinds of rests than are listed: codes are sorted. So many that they are: far lists, of one tap each."""
    cloud = Scene(2, 60, 900, batch=2).cloud()
    for stride, way in ((200, BrickOutputs), (300, SortedOutputs)):
        relation = Relation.of(2, 3, stride=stride, padding=1)
        assert isinstance(make_outputs(cloud, site_around(cloud), relation), way)
        outputs_agree(cloud, site_around(cloud), relation, (TorchOutputs, way))


def check_batch() -> None:
    cloud = Scene(3, 60, 5, batch=512).cloud()
    for label in ("floor k2 s2", "support k3 s2 p1"):
        outputs_agree(cloud, site_around(cloud), levels(3)[label], (TorchOutputs, SortedOutputs, BrickOutputs))


def check_programs() -> None:
    cloud = Scene(3, 400, 12, batch=1).cloud()
    for label in ("floor k2 s2", "support k2 s2 p0"):
        for box in (nullcontext, marked):
            with box():
                outputs_agree(cloud, site_around(cloud), levels(3)[label], (TorchOutputs, BrickOutputs))
                tables_agree(cloud, levels(3)[label])


def check_room(relation: Relation) -> None:
    """Outputs that there is no room for are reported, and written nowhere."""
    cloud = scene("plain", 3).cloud()
    goal = site_of(site_around(cloud), relation)
    whole = TorchOutputs(cloud, relation, goal)
    count = int(whole.count)
    for way in (BrickOutputs, SortedOutputs, TorchOutputs):
        for room in (count - 1, 5, 0):
            own = fresh(cloud)
            made = way(own, relation, goal)
            small = made.cloud(room)
            same(small.coords, whole.geometry(room).coords, way)
            same(made.count, whole.count, way)
            assert int(own.status) == OVERFLOW, (way, room)
            table = made.table(room)
            if table is not None and relation.policy != "transposed_support":
                same(table, looked_up(cloud, small, relation).rows)


def check_status() -> None:
    """Kernels that lay out other maps at the same time set bits, too: in a captured graph, on other streams."""
    relation = levels(3)["floor k2 s2"]
    cloud = scene("plain", 3).cloud()
    twice = fresh(replace(cloud, coords=cloud.coords[[0, *range(cloud.capacity - 1)]]))
    twice.status.fill_(OVERFLOW)
    own = fresh(cloud)
    own.status.fill_(RANGE)

    def refused(*given: object) -> None:
        raise AssertionError("not in one go")

    with patch.object(torch.Tensor, "bitwise_or_", refused):
        SortedKeys(twice, MapSchedule("sorted"))
        SortedOutputs(own, relation, site_of(site_around(own), relation)).cloud(3)
    assert int(twice.status) == DUPLICATE | OVERFLOW and int(own.status) == OVERFLOW | RANGE


def check_behind_overflow() -> None:
    """What there was no room for is not looked for in memory of others: the fence would be a voxel at (3, 3, 3, 3)."""
    cloud = Scene(3, 80, 16, batch=5).cloud()
    relation = levels(3)["floor k2 s2"]
    small = BrickOutputs(cloud, relation, site_of(site_around(cloud), relation)).cloud(20)
    assert int(small.status) == OVERFLOW and not bool((small.coords == 3).all(dim=1).any())
    asked_for = buffered(torch.tensor([[3, 3, 3, 3]], dtype=torch.int32), 0)
    for name, structure, own in structures(small):
        rows = structure.neighbours(asked_for, Relation.of(3, 1)).rows
        assert bool((rows == -1).all()) and int(own.status) & ~OVERFLOW == 0, name


ITSELF = Stencil("floor", (1,), ((0,),))
"""Every row reaches its own cell."""


def check_bricks_without_room() -> None:
    """More bricks than there is room for are reported, and no other cell is lost or written."""
    coords = torch.tensor([[0, 100 * n] for n in range(40)], dtype=torch.int32)
    cloud = buffered(coords, 0)
    with marked():
        found = Bricks.of(cloud, ITSELF, cloud.bounds, 3)
        enough = fresh(cloud)
        Bricks.of(enough, ITSELF, cloud.bounds, 40)
    assert found.limit == 3 and int(cloud.status) == OVERFLOW
    first = [c for c in coords.tolist() if c[1] < 3 * 512]
    assert int(found.count) == len(first)
    assert found.coords(fresh(cloud), ITSELF, len(first))[0].tolist() == first
    assert int(enough.status) == 0


def check_unreached() -> None:
    """The inputs' last cell meets the cell past the outputs' last one, and no other."""
    geometry = Geometry.checked(torch.tensor([[0, 5]], dtype=torch.int32), spatial_shape=(6,))
    outputs_agree(
        geometry.cloud,
        geometry.site,
        Relation.of(1, 3, stride=2, padding=0),
        (TorchOutputs, SortedOutputs, BrickOutputs),
    )


def check_far_outputs() -> None:
    """Boxes of 2**32 cells, whose outputs have codes: more than bricks divide."""
    cloud = CoordBuffer.of(
        torch.tensor([[0, INT32[0]], [0, INT32[1]], [0, 4095]], dtype=torch.int32), Bounds(*((v,) for v in INT32), 1)
    )
    for relation in (Relation.of(1, 3, stride=4096, padding=1), Relation.of(1, 3, stride=4096)):
        outputs_agree(cloud, site_around(cloud), relation, (TorchOutputs, SortedOutputs))
        assert isinstance(make_outputs(cloud, site_around(cloud), relation), SortedOutputs)


def check_pyramid() -> None:
    """Levels made in buffers, one from the other, have the maps of those made one by one."""
    steps = [levels(3)[name] for name in ("floor k2 s2", "support k3 s2 p1", "transposed k2 s2")]
    coords = Scene(3, 60, 9).coords()
    first = Geometry.checked(coords)
    made = pyramid(first, steps)
    with plain():
        want = Geometry.checked(coords)
        for step, level, above in zip(steps, made[1:], made, strict=False):
            held = kernel_map(above, step)[0]
            found, want = kernel_map(want, step)
            same(level.coords, want.coords, step)
            assert level.site == want.site
            same(held.rows(), found.rows(), step)
            same(held.table, found.table, step)


# Stages of a map's layout


def stage_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for volume, count in ((1, 130), (8, 140), (27, 140), (27, 0), (27, 1), (31, 64), (32, 64), (62, 40), (125, 40)):
        name = f"K={volume} N={count}"
        found[f"orders {name}"] = partial(check_orders, volume, count)
        found[f"tiles {name}"] = partial(check_tiles, volume, count)
        found[f"lists {name}"] = partial(check_lists, volume, count)
    for count, bits in ((1, 5), (1500, 1), (1500, 9), (1500, 10), (3000, 27), (1024, 31)):
        found[f"ranks of {count} keys of {bits} bits"] = partial(check_ranks, count, bits)
    found["ranks of very many keys"] = check_many_ranks
    for count, bits in ((70, 4), (500, 12), (500, 64), (1500, 38)):
        found[f"{count} pairs by keys of {bits} bits"] = partial(check_pairs, count, bits)
    for words in (5, 64, 65, 128):
        found[f"bits of {words} words"] = partial(check_bits, words)
    for size, count, most in ((0, 1, 4), (50, 7, 4), (900, 128, 8), (900, 130, 1), (5000, 2048, 16), (5000, 5100, 16)):
        found[f"{count} runs of {size} entries"] = partial(check_runs, size, count, most)
    for name, shapes in PUT.items():
        found[f"put {name}"] = partial(check_put, *shapes)
    return found


def random_rows(volume: int, count: int, spare: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, masks, count): no tap has an input twice; taps differ in how frequent they are; some rows have none."""
    generator = torch.Generator().manual_seed(volume + count)
    capacity = count + spare
    inputs = torch.stack([torch.randperm(capacity, generator=generator) for _ in range(volume)], dim=1)
    often = torch.rand(volume, generator=generator)
    rows = torch.where(torch.rand(capacity, volume, generator=generator) < often, inputs, -1).int()
    rows[:: max(1, count // 3)] = -1
    # Dead rows have masks too: whoever reads them is found out.
    return rows, mask_words_torch(rows), torch.tensor([count], dtype=torch.int32)


def orders(volume: int, count: int) -> list[SortSpec]:
    found = {how for splits in (1, 2, 4) if splits <= volume for how in SortSpec.splits(volume, splits)}
    return [*sorted(found, key=repr), SortSpec(0, volume, 32)] if count > 1 else [SortSpec(0, volume)]


def check_orders(volume: int, count: int) -> None:
    rows, masks, living = random_rows(volume, count)
    ends = tiles.pair_counts(masks, living, volume)
    same(ends, tiles.pair_counts_torch(masks, living, volume))
    for how in orders(volume, count):
        groups = tiles.groups_of(cube(volume), how, masks.device)
        totals = tiles.group_totals(masks, living, groups)
        same(totals, tiles.group_totals_torch(masks, living, groups), how)
        same(totals[: how.last - how.first], ends[how.first : how.last, -1].contiguous(), how)
        with patch.object(tiles, "_SAMPLED", 50):
            sampled = tiles.group_totals(masks, living, groups)
            same(sampled, tiles.group_totals_torch(masks, living, groups), how)
            keys = tiles.gray_keys(masks, living, groups, sampled, how)
            same(keys, tiles.gray_keys_torch(masks, living, groups, sampled, how), how)
        keys = tiles.gray_keys(masks, living, groups, totals, how)
        same(keys, tiles.gray_keys_torch(masks, living, groups, totals, how), how)
        order = tiles.sort_rows(masks, living, groups, how)
        with plain():
            same(order, tiles.sort_rows(masks, living, groups, how), how)


def cube(volume: int) -> Relation:
    """A window of so many taps, in planes."""
    return Relation.of_offsets(3, [(k // 9, k // 3 % 3, k % 3) for k in range(volume)], policy="support")


def check_ranks(count: int, bits: int) -> None:
    """Few keys of all bits, and some that are equal to none; the last have all bits, and more than are asked for."""
    generator = torch.Generator().manual_seed(count + bits)
    keys = torch.randint(0, 1 << bits, (count,), generator=generator)
    keys[count // 4 :] = keys[torch.randint(0, max(1, count // 40), (count - count // 4,), generator=generator)]
    keys[-7:] = 2**31 - 1
    keys = keys.int()
    digits = Digits.of(keys, bits)
    assert digits is not None
    counts, blank = digits.counts(keys, 3)
    assert len(blank) == 3
    for block, part in enumerate(keys.split(digits.block)):
        counts[0, block] = torch.bincount(part & (1 << digits.width) - 1, minlength=1 << digits.width)
    want = stable_argsort_torch(keys)
    same(stable_argsort(keys, digits, counts), want)
    for total in (count, count // 2):
        order = torch.full((count + FENCE,), -7, dtype=torch.int32)
        ranking.rank_rows(keys, torch.tensor([total], dtype=torch.int32), order)
        same(order[:total], stable_argsort_torch(keys[:total]))
        assert bool((order[total:] == -7).all())


def check_pairs(count: int, bits: int) -> None:
    """Keys of up to 64 bits, of which some are equal: pairs beyond the total, or the room, stay as they are."""
    generator = torch.Generator().manual_seed(count + bits)
    keys = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    keys = keys if bits == 64 else keys & ((1 << bits) - 1)
    keys[count // 2 :] = keys[torch.randint(0, max(1, count // 2), (count - count // 2,), generator=generator)]
    values, digits = torch.arange(count, dtype=torch.int32) * 3, Digits(-(-bits // 5), 5, 64)
    for total in (count, count - 9, count + 9):
        own = keys[:total]
        starts = [torch.zeros(-(-count // 64) + 1, 32, dtype=torch.int32) for _ in range(digits.turns)]
        for block, part in enumerate(own.split(64)):
            starts[0][block] = torch.bincount(part & 31, minlength=32)
        rooms = [torch.full((count + FENCE,), -7, dtype=kind) for kind in (torch.int64, torch.int32)]
        given = (keys.clone(), rooms[0][:count]), (values.clone(), rooms[1][:count])
        found = tiles.sort_pairs(digits, *given, starts, torch.tensor([total], dtype=torch.int32))
        # Without a sign, keys of 64 bits are in another order.
        unsigned = own ^ (-(2**63) if bits == 64 else 0)
        same(found[:total], tiles.sort_pairs_torch(unsigned, values[:total]))
        assert all(bool((room[count:] == -7).all()) for room in rooms)


def check_bits(count: int) -> None:
    """The bits set up to and with each word of a bitmap, and of all; words may fill their blocks."""
    words = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count)).int()
    ends = torch.tensor([(word & (2**32 - 1)).bit_count() for word in words.tolist()]).cumsum(0)
    with patch(f"{prefix_counts.__module__}._WORDS", 64):
        pairs, total = prefix_counts(words)
    assert total.tolist() == ends[-1:].tolist()
    assert torch.equal(pairs >> 32, ends) and torch.equal(pairs.int(), words)


def check_many_ranks() -> None:
    """Counts of many blocks, a few of which are added up at a time."""
    for added, columns in ((16, 8), (64, 2)):
        with patch.multiple(ranking, _BLOCK=32, _ADDED=added, _COLUMNS=columns):
            check_ranks(2500, 6), check_ranks(1500, 13)


def check_tiles(volume: int, count: int) -> None:
    rows, masks, living = random_rows(volume, count)
    every = [*orders(volume, count)[:3], SortSpec(0, volume, sort=False)]
    for how, block in [(how, 16) for how in every] + [(every[0], 64)]:
        groups = tiles.groups_of(cube(volume), how, masks.device)
        order = tiles.sort_rows(masks, living, groups, how) if how.sort else None
        tiling = tiles.assign_tiles(masks, living, order, how, (block, volume))
        twin = tiles.assign_tiles_torch(masks, living, order, how, (block, volume))
        for part in ("slots", "active", "ends", "entries"):
            same(getattr(tiling, part), getattr(twin, part), (how, part))
        entries = int(tiling.entries)
        exact = tiles.fill_tiles(rows, tiling, entries)
        for room in (entries, entries + 5, max(0, entries - 3)):
            told = words()
            got = tiles.fill_tiles(rows, tiling, room, told[0])
            with plain():
                same(got, tiles.fill_tiles(rows, twin, room, told[1]), (how, room))
            same(told[0], told[1], room)
            assert int(told[0]) == OVERFLOW * (room < entries)
            if room == entries:
                same(exact, got)


def check_runs(size: int, count: int, most: int) -> None:
    """Of values from -1 on, most of them few; then of one value alone; runs that are longer than a key can tell."""
    generator = torch.Generator().manual_seed(size + count)
    values = (torch.rand(size, generator=generator) ** 2 * (count + 3)).floor() - 1
    for array in (values.sort()[0].int(), values.sort()[0].long(), torch.full((size,), count // 2).int()):
        for long in (segments._LONG, 9):
            with patch.object(segments, "_LONG", long), patch.object(segments, "_is_worthwhile", lambda array: True):
                same(split_runs(array, count, most), split_runs_torch(array, count, most), (size, count))
                same(segments_by_length(array, count), segments_by_length_torch(array, count), (size, count))
        check_told(array.clamp(min=0), count, most)


def check_told(array: Tensor, count: int, most: int) -> None:
    """Of an array of values from 0 on where it is known where runs end."""
    few = array[: len(array) // 2].contiguous()
    # Room that nothing lies in, for far more pieces than there are.
    roomy = torch.cat([few, few.new_full((max(3000, 200 * most),), count + 5)])
    for each in (array, few, roomy):
        tell_ends(each, count)
    same(split_runs(roomy, count, most), split_runs_torch(roomy, count, most), (len(array), count, "roomy"))
    with patch.object(segments, "_is_worthwhile", lambda array: True):
        same(split_runs(array, count, most), split_runs_torch(array, count, most), (len(array), count, "told"))
        same(segments_by_length(array, count), segments_by_length_torch(array, count), (len(array), count, "told"))


def tell_ends(array: Tensor, count: int) -> None:
    """Where the runs of an array of the values 0 to count - 1 end, and how long the longest is."""
    bounds = segments.bounds_of(array, count)
    segments.RUNS.register(array, bounds[1:], int(bounds.diff().max()))


PUT = {
    "nothing": ((0, 4), torch.float16, (0, 4)),
    "two": ((700, 4), torch.float16, (700, 3)),
    "three": ((513, 4), torch.float32, (513, 7), (513,)),
    "one": ((2048, 1), torch.float64),
}


def check_put(first: tuple[int, ...], dtype: torch.dtype, *others: tuple[int, ...]) -> None:
    """Arrays in the first rows of buffers with spare rows and with none; what lies behind is left alone."""
    generator = torch.Generator().manual_seed(len(others))
    arrays = [torch.randint(*INT32, first, generator=generator, dtype=torch.int32)]
    arrays += [torch.randn(shape, generator=generator).to(dtype) for shape in others]
    for spare in (0, 5, 4000):
        buffers = [array.new_full((len(array) + spare, *array.shape[1:]), -7) for array in arrays]
        want, (got, twin) = [buffer.clone() for buffer in buffers], words()
        put_first(buffers, arrays, got)
        put_first_torch(want, arrays, twin)
        same(tuple(buffers), tuple(want), spare)
        same(got, twin, spare)
        for other in (
            [array.repeat_interleave(2, dim=0)[::2] for array in arrays],
            [array.double() if array.is_floating_point() else array.long() for array in arrays],
        ):
            for buffer in buffers:
                buffer.fill_(-7)
            put_first(buffers, other, got)
            same(tuple(buffers), tuple(want), (spare, "with gaps, or of another dtype"))


def words() -> tuple[Tensor, Tensor]:
    """Two status words that say nothing."""
    return torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


Lists = Callable[..., tuple[Tensor, ...]]


def check_list(make: Lists, whole: int, less: int) -> None:
    """Lists with just enough room, with more, with less and with none."""
    for room in (whole, whole + 3, max(0, whole - less), 0):
        told = words()
        got = make(room, told[0])
        with plain():
            same(got, make(room, told[1]), room)
        same(told[0], told[1], room)
        assert int(told[0]) == (OVERFLOW if room < whole else 0)
        if room >= whole:
            same(make(room), got)


def check_lists(volume: int, count: int) -> None:
    rows, masks, living = random_rows(volume, count)
    ends = tiles.pair_counts_torch(masks, living, volume)
    check_list(partial(tiles.list_pairs, rows, living, ends), int(ends[:, -1].sum()), 12)
    for size in (1, 8):
        whole = int(((ends[:, -1] + size - 1) // size).sum())
        check_list(lambda room, *told, q=size: tiles.group_pairs(rows, living, ends, (room, q), *told), whole, 3)
    got = tiles.transpose_table(rows, living, len(rows) + 4)
    with plain():
        same(got, tiles.transpose_table(rows, living, len(rows) + 4))


# Whole maps

POLICIES = {
    "same k3": (Relation.of(3, 3), None),
    "same k5": (Relation.of(3, 5), None),
    "same offsets": (Relation.of_offsets(3, ((0, 0, 0), (2, 0, -1), (-1, 1, 0))), None),
    "given": (Relation.of(3, 3, stride=2, policy="given"), "floor k2 s2"),
    "cached inverse": (Relation.of(3, 2, stride=2, policy="cached_inverse"), None),
    **{name: (relation, None) for name, relation in levels(3).items()},
}
SCHEDULES = {
    "default": None,
    "staged": MapSchedule("hash", fused=False),
    "mirrored": MapSchedule("hash", mirrored=True),
    "grid": MapSchedule("grid"),
    "bitmap": MapSchedule("bitmap"),
}


def map_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for name, (relation, target) in POLICIES.items():
        found[name] = partial(check_map, relation, target, {"default": None})
    for name in ("same k3", "floor k3 s2", "support k3 s2 p1", "transposed k2 s2"):
        found[f"{name} by every schedule"] = partial(check_map, POLICIES[name][0], None, SCHEDULES)
    for form in ("same", "floor", "support", "transposed"):
        found[f"convolution {form}"] = partial(check_convolution, form)
    found["nothing"] = check_nothing
    found["find"] = check_find
    found["no wait for the host"] = check_waits
    return found


def built(
    coords: Tensor, relation: Relation, target: str | None, schedule: MapSchedule | None
) -> tuple[KernelMap, Geometry]:
    geometry = Geometry.checked(coords)
    if relation.policy == "cached_inverse":
        _, coarse = kernel_map(geometry, replace(relation, policy="floor_unique"), schedule=schedule)
        return kernel_map(coarse, relation, geometry)
    aim = None if target is None else kernel_map(geometry, levels(3)[target])[1]
    return kernel_map(geometry, relation, aim, schedule)


def storages(found: KernelMap) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for side, m in (("", found), ("transposed ", found.transpose())):
        inputs, outputs, sizes = m.pairs()
        parts = {"rows": m.rows(), "masks": m.masks(), "counts": m.counts(), "taps": m.taps(), "tally": m.pair_counts()}
        parts |= {"pairs": (inputs, outputs, sizes), "compacted": m.compacted(32), "grouped": m.grouped(8)}
        parts["listed"] = m.listed()
        if 1 < m.volume < 64:
            parts |= {f"part {n} of 2": part for n, part in enumerate(m.split(16, 2, 16))}
        held |= {side + name: part for name, part in parts.items()}
    return held


def check_map(relation: Relation, target: str | None, schedules: Mapping[str, MapSchedule | None]) -> None:
    """Rows, outputs and all storages are those of plain torch, whatever schedule finds them."""
    coords = Scene(3, 70 if relation.kernel != (5,) * 3 else 30, 7).coords()
    with plain():
        found, outputs = built(coords, relation, target, None)
        want = storages(found)
    for label, schedule in schedules.items():
        got, made = built(coords, relation, target, schedule)
        same(made.coords, outputs.coords, label)
        assert made.site == outputs.site and (got.num_inputs, got.num_outputs) == (found.num_inputs, found.num_outputs)
        same(got.rows(), found.rows(), label)
        if label in ("default", "mirrored"):
            for name, part in storages(got).items():
                same(part, want[name], (label, name))


CONVOLUTIONS: Mapping[str, Callable[[pm.SparseTensor, Tensor], pm.SparseTensor]] = {
    "same": pm.ops.conv,
    "floor": lambda x, w: pm.ops.conv(x, w, stride=2),
    "support": lambda x, w: pm.ops.conv(x, w, stride=2, padding=1),
    "transposed": lambda x, w: pm.ops.conv_transpose(x, w, stride=2),
}


def check_convolution(form: str) -> None:
    """The same values and gradients, bit for bit."""
    coords = Scene(3, 60, 7).coords()
    generator = torch.Generator().manual_seed(5)
    feats, weight = torch.randn(60, 4, generator=generator), torch.randn(3, 3, 3, 3, 4, generator=generator)
    results = []
    for _ in range(2):
        x, w = feats.clone().requires_grad_(), weight.clone().requires_grad_()
        with ExitStack() as stack:
            if results:
                stack.enter_context(plain())
            y = CONVOLUTIONS[form](pm.SparseTensor(x, coords), w)
            y.feats.square().sum().backward()
        results.append((y.coords, y.feats.detach(), x.grad, w.grad))
    same(*results)


def check_nothing() -> None:
    for relation in (Relation.of(3, 3), *levels(3).values()):
        found, outputs = kernel_map(Geometry.checked(torch.zeros(0, 4, dtype=torch.int32)), relation)
        assert len(outputs) == 0
        for part in storages(found).values():
            assert all(len(t) in (0, 1, found.volume) for t in (part if isinstance(part, tuple) else (part,)))


def check_find() -> None:
    coords = Scene(3, 40, 7).coords()
    asked_for = torch.cat([coords.flip(0), coords + 1, coords[:3]])
    with plain():
        want = Geometry.checked(coords).find(asked_for)
    for name in STRUCTURES:
        geometry = Geometry.checked(coords)
        geometry.lookup(MapSchedule(name))
        same(geometry.find(asked_for), want, name)


class DeviceOnly(NoWaits):
    """NoWaits but inside kernels: the interpreter reads what it likes."""

    inside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) if self.inside else super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def kernels_inside(watch: DeviceOnly) -> Iterator[None]:
    """Kernels, which the interpreter runs in Python, are inside."""
    start = BoundKernel.__call__

    def launched(*args: Any, **kwargs: Any) -> None:
        watch.inside = True
        try:
            start(*args, **kwargs)
        finally:
            watch.inside = False

    with patch.object(BoundKernel, "__call__", launched):
        yield


def check_waits() -> None:
    """From coordinates to tiles and lists of several levels, into buffers, without a value that Python sees."""
    watch = DeviceOnly()
    steps = [levels(3)[name] for name in ("floor k2 s2", "support k3 s2 p1", "transposed k2 s2")]
    cloud = Scene(3, 40, 7).cloud()
    # The first turn fills what is kept on the host and the device from call to call.
    with kernels_inside(watch):
        _pipeline(cloud, steps)
        with watch:
            _pipeline(cloud, steps)


def _pipeline(first: CoordBuffer, steps: list[Relation]) -> None:
    cloud, site = fresh(first), site_around(first)
    for step in steps:
        goal = site_of(site, step)
        for way in (SortedOutputs, BrickOutputs):
            made = way(cloud, step, goal)
            outputs = made.cloud(max_outputs(cloud.capacity, step, goal))
            made.table(outputs.capacity)
        if step.policy != "transposed_support":
            for _, lookup, _ in structures(cloud):
                _lay_out(cloud, outputs, lookup.neighbours(outputs, step))
        cloud, site = outputs, goal


def _lay_out(inputs: CoordBuffer, outputs: CoordBuffer, found: Neighbours) -> None:
    rows, masks = found
    volume, count, status = rows.shape[1], outputs.count, outputs.status
    ends = tiles.pair_counts(masks, count, volume)
    for how in (*SortSpec.splits(volume, 2, 64), *SortSpec.splits(volume, 0)):
        groups = tiles.groups_of(cube(volume), how, masks.device)
        order = tiles.sort_rows(masks, count, groups, how) if how.sort else None
        tiles.fill_tiles(rows, tiles.assign_tiles(masks, count, order, how, (16, volume)), 50, status)
    tiles.list_pairs(rows, count, ends, 100, status)
    tiles.group_pairs(rows, count, ends, (20, 8), status)
    tiles.transpose_table(rows, count, inputs.capacity)
    mask_words(rows)


# Maps of a network

GROUPED = (300, 8), (1 << 30, 16)
RULES = {
    "tiled alike": chain.TileRule(24_000, 8, 1 << 15, (8,), GROUPED),
    "sorted and large tiles": chain.TileRule(60, 8, 80, (4,), GROUPED),
}
STEPS: Mapping[str, Callable[[int], list[Relation]]] = {
    "no steps": lambda dim: [],
    "halved": lambda dim: [Relation.of(dim, 2, stride=2)] * 2,
    "padded": lambda dim: [Relation.of(dim, 3, stride=2, padding=1)] * 2,
    "both": lambda dim: [Relation.of(dim, 3, stride=2, padding=1), Relation.of(dim, 2, stride=2)],
    "three": lambda dim: [Relation.of(dim, 3, stride=3, padding=0), Relation.of(dim, 2, stride=1, policy="support")],
    "many": lambda dim: [Relation.of(dim, 2, stride=2)] * 7,
}
TOGETHER = (
    (3, "halved", 140), (3, "padded", 140), (3, "both", 40), (3, "three", 40), (3, "halved", 1), (3, "padded", 1),
    (3, "no steps", 40), (2, "padded", 140), (2, "both", 40), (1, "padded", 140), (1, "many", 40), (4, "halved", 60),
)  # fmt: skip


def chain_checks() -> Checks:
    found: dict[str, Callable[[], None]] = {}
    for dim, steps, count in TOGETHER:
        for name, rule in RULES.items():
            found[f"D={dim} {steps} N={count} {name}"] = partial(check_chain, dim, steps, count, rule)
    found["an extent"] = check_extent
    found["rows are sampled"] = check_sampled
    found["ends of the keys"] = check_key_ends
    found["several blocks"] = check_blocks
    found["too little room"] = check_little_room
    found["a box that nobody knows"] = check_unknown_box
    found["short keys"] = check_short_keys
    for name in ("twice", "all alike", "below", "above", "batch"):
        found[f"status {name}"] = partial(check_chain_status, name)
    found["a request of a network"] = check_network
    found["all kernels are compiled beforehand"] = check_compiled
    found["a network has the kernels of its layers"] = check_kernels_of_layers
    found["pieces"] = check_pieces
    found["no wait for the host in a chain"] = check_chain_waits
    found["no map outlives its coordinates"] = check_not_kept
    for first in range(0, 40, 10):
        found[f"hard coordinates from seed {first}"] = partial(check_hard, first)
    return found


def check_not_kept() -> None:
    """Without a collection: nothing holds itself, but for what is told by weak references."""
    steps, windows = [Relation.of(3, 2, stride=2)] * 2, [[Relation.of(3, 3)]] * 3
    gc.collect()
    with without_collection():
        x = pm.SparseTensor(torch.zeros(40, 1), Scene(3, 40, 9).coords())
        with torch.no_grad():
            x.prepare(steps, windows)
            held = [weakref.ref(x.geometry)]
            for found, outputs in x.geometry.maps.values():
                lowered.bound_map(found).arrays  # noqa: B018
                held += [weakref.ref(found), weakref.ref(outputs or found)]
        del x, found, outputs
        assert len(held) == 5 and all(ref() is None for ref in held)


def check_hard(first: int) -> None:
    """Against loops over tuples; those that are refused or raised, too."""
    assert sum(chain_cases.check(chain_cases.case_of(seed, 24)) for seed in range(first, first + 10)) >= 4
    for seed in range(first, first + 3):
        assert not chain_cases.check(chain_cases.case_of(seed, 24, chain_cases.REFUSED))


def chain_request(dim: int, steps: str, rule: chain.TileRule | None = None) -> chain.ChainRequest:
    """Every map of a network, in tiles."""
    window = Relation.of(dim, 3) if dim < 4 else Relation.of(dim, 2, policy="same")
    made = STEPS[steps](dim)
    kinds = [(chain.SAME, level, window) for level in range(len(made) + 1)]
    for level, step in enumerate(made):
        kinds += [(chain.DOWN, level + 1, step), (chain.UP, level, step)]
    windows = ((window,),) * (len(made) + 1)
    return chain.ChainRequest(dim, tuple(made), windows, tuple(kinds), rule or RULES["tiled alike"], True)


def site_in(bounds: Bounds, shape: tuple[int, ...] | None = None) -> GridSpec:
    return GridSpec((1,) * len(bounds.low), shape, bounds.batch, bounds)


def parts_of(found: chain.Chain) -> dict[str, Any]:
    """The valid rows of every array."""
    counts, request = found.counts(), found.request
    parts: dict[str, Any] = {"words": found.words.tensor(), "totals": found.totals.tensor()}
    for level, count in enumerate(counts[1:]):
        parts[f"coarse {level}"] = found.coarse.tensor()[level, :count]
    for place, (_, level, _) in enumerate(request.maps):
        parts[f"table {place}"] = found.table_of(place, counts[level]).tensor()
        parts[f"masks {place}"] = found.masks_of(place, counts[level]).tensor()
    layout, number = found.layout.tensor(), len(request.tiled)
    parts["layout"] = layout[: chain.CHOSEN + number]
    for place, column in enumerate(layout.t().tolist()[:number]):
        rows, first, block, count, slot, tile, *_ = column
        parts[f"order {place}"] = found.order.tensor()[first : first + rows]
        parts[f"rows {place}"] = found.tile_rows.tensor()[slot : slot + count * block]
        parts[f"tile_masks {place}"] = found.tile_masks.tensor()[tile : tile + count]
        parts[f"ends {place}"] = found.ends.tensor()[tile : tile + count]
    return parts


def check_parts(coords: Tensor, site: GridSpec, request: chain.ChainRequest, most: int | None = None) -> None:
    """All that kernels make is what plain torch makes."""
    room = chain.aligned(len(coords) * request.wide**request.dim) if most is None else most
    assert chain.refusal(Geometry(coords, site), request) is None
    found = chain.find_maps(coords, site, request, chain.Room.of(request, room))
    chain_tiles.tile_maps(found)
    with plain():
        want = chain.find_maps(coords, site, request, chain.Room.of(request, room))
        chain_tiles.tile_maps(want)
        expected = parts_of(want)
    for name, part in parts_of(found).items():
        same(part, expected[name], name)
    told = want.words.tensor().tolist()
    got = chain_tiles.fill_tiles(found, told)
    with plain():
        lists = chain_tiles.fill_tiles(want, told)
        expected = chain_tiles.group_pairs(want, told)
    same([one.tiles() for one in got], [one.tiles() for one in lists])
    same([one.transpose().tiles() for one in got], [one.transpose().tiles() for one in lists])
    groups = chain_tiles.group_pairs(found, told)
    assert groups.keys() == expected.keys() and groups
    for number, one in groups.items():
        same(one.pairs(), expected[number].pairs())


def check_chain(dim: int, steps: str, count: int, rule: chain.TileRule) -> None:
    for seed, clusters in enumerate((0, 3)):
        cloud = Scene(dim, count, SIDES.get(dim, 6) if count < 100 or dim < 3 else 12, clusters=clusters, seed=seed)
        check_parts(cloud.coords(), site_in(cloud.bounds()), chain_request(dim, steps, rule))


def check_extent() -> None:
    """Outputs beyond the extent are dropped on each level."""
    for extent in (8, 9, 11):
        cloud = Scene(3, 60, extent)
        coords = cloud.coords()
        coords[:, 1:] %= extent
        coords = torch.unique(coords, dim=0)
        bounds = Bounds((0,) * 3, (extent - 1,) * 3, cloud.bounds().batch)
        check_parts(coords, site_in(bounds, (extent,) * 3), chain_request(3, "both"))


def check_compiled() -> None:
    """All that a chain starts is among what is compiled for its request, whatever the scene and the tiles."""
    request = chain_request(3, "both", RULES["sorted and large tiles"])
    started, whole = set(), BoundKernel.__call__

    def heard(kernel, *given):
        started.add(kernel)
        whole(kernel, *given)

    with patch.object(BoundKernel, "__call__", heard):
        seen = compiled_for(request)
        assert seen and not started
        for count in (1, 140, 100):
            chain_build.build_chain(Geometry.checked(Scene(3, count, 12, seed=count).coords()), request)
    # How coordinates are checked is no part of it.
    own = {k for k in started if k.kernel.function.fn.__module__.endswith(("chain_kernels", "pair_kernels"))}
    assert own <= seen and len(own) == 12


def compiled_for(*requests: chain.ChainRequest) -> set[BoundKernel]:
    """The kernels that are compiled for requests."""
    seen, compiling = set(), import_module("pumice.runtime.launch").compiling_launches

    @contextmanager
    def noted():
        with compiling() as found:
            yield found
        seen.update(found)

    with patch.object(chain_build, "compiling_launches", noted):
        for request in requests:
            chain_build.compile_kernels.cache_clear()
            chain_build.compile_kernels(request.compile_request, torch.device("cpu"))
    return seen


def check_kernels_of_layers() -> None:
    """All maps of a network are found by the kernels that find those of single layers."""
    window, rule = Relation.of(3, 3), lowered.TILE_HEIGHTS.rule()
    for step, count in ((Relation.of(3, 2, stride=2), 5), (Relation.of(3, 3, stride=2, padding=1), 4)):
        for grad in (False, True):
            steps, windows = (step,) * (count - 1), ((window,),) * count
            together, *_ = layer_maps._together(3, steps, windows, grad, rule)
            assert len(together.maps) >= 2 * count - 1
            single = [layer_maps._of_layer(one, grad, rule) for one in (window, step)]
            assert compiled_for(together) <= compiled_for(*single)


def check_sampled() -> None:
    rooms = (chain, "SAMPLED"), (chain_tiles, "SAMPLED"), (tiles, "_SAMPLED")
    with ExitStack() as stack:
        for room, name in rooms:
            stack.enter_context(patch.object(room, name, 50))
        check_chain(3, "both", 140, RULES["sorted and large tiles"])


def check_blocks() -> None:
    """Rows are sorted in several blocks."""
    chain.digits_of.cache_clear()
    with (
        patch.multiple(chain, _LANES=16, _PLACED=32, _SEARCHED=256, _SORTED=64, _DIGIT=5, RANKED=0),
        patch.multiple(chain_tiles, _KEYED=32, _SUMMED=1),
    ):
        check_chain(3, "padded", 90, RULES["sorted and large tiles"])
    chain.digits_of.cache_clear()


def check_key_ends() -> None:
    """At the first and last cell of an axis, and of a batch, nothing lies beyond."""
    for dim, bits in chain.AXIS_BITS.items():
        margin = chain.MARGIN + 1 if dim > 1 else 0
        low, high = margin - (1 << bits - 1), (1 << bits - 1) - 1 - margin
        values = [low, low + 1, -1, 0, high][:: 2 if dim == 4 else 1]
        ends = torch.cartesian_prod(torch.tensor([0, 1, 1023]), *[torch.tensor(values)] * dim)
        bounds = Bounds((low,) * dim, (high,) * dim, 1024)
        steps = "halved" if dim == 4 else "padded"
        check_parts(ends[torch.randperm(len(ends))].int(), site_in(bounds), chain_request(dim, steps))


def check_cells_without_room(request: chain.ChainRequest) -> None:
    """Where cells of level 1 are counted but had no room, as those of level 2 came first, nothing is written before."""
    coords, bounds = Scene(3, 40, 7).coords(), Scene(3, 40, 7).bounds()
    found = chain.Chain(coords, chain.Room(400, 800), request, chain.KeyLayout.of(request, bounds))
    memory, begin, size = torch.full((1 << 14,), 7, dtype=torch.int32), 1 << 13, math.prod(found.coarse.shape)
    found.coarse = Part(memory, memory.data_ptr() + 4 * begin, begin, found.coarse.shape)
    ordered = chain.tiles.sort_pairs

    def counted(*given: Any) -> Any:
        found.words.tensor()[chain.COUNTS + chain.STRIDE] += 1000
        return ordered(*given)

    with patch.object(chain.tiles, "sort_pairs", counted):
        chain.start_kernels(found, site_in(bounds))
    assert bool((memory[:begin] == 7).all()) and bool((memory[begin + size :] == 7).all())
    assert int((memory != 7).sum()) > 40


def check_little_room() -> None:
    """Nothing is written elsewhere, and more rows than there is room for are told."""
    cloud, request = Scene(3, 70, 9), chain_request(3, "padded")
    found = chain.find_maps(cloud.coords(), site_in(cloud.bounds()), request, chain.Room.of(request, 8))
    chain_tiles.tile_maps(found)
    told = found.words.tensor().tolist()
    assert told[0] & OVERFLOW or max(told[12], told[16]) > 8
    check_cells_without_room(request)
    chain.estimate_of.cache_clear()
    got, want = (Geometry.checked(cloud.coords()) for _ in range(2))
    with patch.multiple(chain, _FIRST_ESTIMATE=0.01, _LEAST=0):
        chain_build.build_chain(got, request)
    with plain():
        chain_build.build_chain(want, request)
    assert agree(got, want) == 0 and len(got.maps) == 2


def check_short_keys() -> None:
    """Keys of earlier scenes are used, and are made longer for a scene that exceeds them."""
    chain.estimate_of.cache_clear()
    request, near = chain_request(3, "padded"), Scene(3, 60, 7).coords()
    far, items = near.clone(), near.clone()
    far[:, 1] *= 40
    items[:, 0], items[:, 3] = items[:, 0] + 3, items[:, 3] - 4
    for coords in (near, near, far, items, near):
        got, want = (Geometry(coords, GridSpec((1, 1, 1), None, -1, UNKNOWN), settled=False) for _ in range(2))
        chain_build.build_chain(got, request)
        with plain():
            chain_build.build_chain(want, request)
        assert agree(got, want) == 0 and len(got.maps) == 2


def check_unknown_box() -> None:
    for dim in (2, 3, 4):
        cloud = Scene(dim, 60, 7)
        coords = cloud.coords()
        want, nobody = Geometry.checked(coords), GridSpec((1,) * dim, None, -1, UNKNOWN)
        got = Geometry(coords, nobody, settled=False)
        chain_build.build_chain(got, chain_request(dim, "halved"))
        assert got.outline == want.site
        coords[3, 1] = 1 << 27
        beyond = Geometry(coords, nobody, settled=False)
        assert chain_build.build_chain(beyond, chain_request(dim, "halved")) is None
        assert beyond.bounds == Bounds.of(coords) and not beyond.maps


def check_chain_status(name: str) -> None:
    """What is wrong with coordinates is told, and no kernel reads or writes elsewhere."""
    cloud = Scene(3, 80, 9)
    coords, bounds = cloud.coords(), cloud.bounds()
    if name == "twice":
        coords[[3, 50, 51]] = coords[7].clone()
    elif name == "all alike":
        coords[:] = coords[7].clone()
    elif name == "batch":
        coords[11, 0] = 2000
    else:
        coords[11, 2] = INT32[name == "above"]
    found = chain.find_maps(coords, site_in(bounds), chain_request(3, "padded"), chain.Room(400, 800))
    chain_tiles.tile_maps(found)
    assert int(found.words.tensor()[0]) == (DUPLICATE if name in ("twice", "all alike") else RANGE)


def check_network() -> None:
    """`prepare` finds the maps of a U-Net and of an encoder in eight launches and two sorts, one read, no other search.
    Few rows are sorted by one launch, many by six; cells by two for each nine bits of their keys."""
    for few, sorts in ((chain.RANKED, ["rank_rows"]), (0, ["scan_digits", "place_digits"] * 3)):
        for steps in ([Relation.of(3, 2, stride=2)] * 4, [Relation.of(3, 3, stride=2, padding=1)] * 3):
            with patch.object(chain, "RANKED", few):
                _check_network(steps, [[Relation.of(3, 3)]] * (len(steps) + 1), sorts)


def _check_network(steps: list[Relation], windows: list[list[Relation]], sorts: list[str]) -> None:
    coords = Scene(3, 120, 12).coords()
    started: list[str] = []
    start = BoundKernel.__call__

    def launched(fixed: BoundKernel, *args: Any) -> None:
        started.append(fixed.kernel.function.fn.__name__)
        start(fixed, *args)

    def no_read(tensors: Sequence[Tensor]) -> list[list[int]]:
        assert not tensors, "a read of its own"
        return []

    x, forms = pm.SparseTensor(torch.zeros(len(coords), 1), coords), {"cpu": lowered._FORMS_OF["cuda"]}
    with ExitStack() as stack:
        stack.enter_context(patch.object(BoundKernel, "__call__", launched))
        stack.enter_context(patch.object(lowered, "_FORMS_OF", forms))
        stack.enter_context(patch.object(sys.modules["pumice.coords.kernel_map"], "read", no_read))
        with torch.no_grad():
            x.prepare(steps, windows)
            made = list(prepared._maps(x.geometry, steps, windows))
            materialize([(one, [None]) for one in made], False)
    both = [*["scan_digits", "place_pairs"] * 2, *sorts]
    assert [name for name in started if name in ("rank_rows", "scan_digits", "place_digits", "place_pairs")] == both
    assert len(started) - len(both) <= 8, started
    assert len(made) == 3 * len(steps) + 1 and all(one.cached_keys() for one in made)
    other = Geometry.checked(coords)
    with plain(), patch.object(lowered, "_FORMS_OF", forms):
        want = list(prepared._maps(other, steps, windows))
        materialize([(one, [None]) for one in want], False)
    assert agree(x.geometry, other) == len(made)


def check_pieces() -> None:
    """Runs of maps are cut into pieces of all lengths of the rule, but for those of few kernel offsets."""
    request = chain_request(3, "both", chain.TileRule(10, 8, 10, (4,), GROUPED))
    made = chain_build.build_chain(Geometry.checked(Scene(3, 300, 12, seed=1).coords()), request)
    assert made and {one.found.volume > 8 for one in made} == {True, False}
    for one in made:
        array, count = one.tiled.tiles().tiles, len(one.tiled.tiles().rows)
        found, runs = (segments.cached_pieces(array, count, most) for most in (4, segments.WHOLE))
        assert (found is not None) == (one.found.volume > 8)
        if found is not None:
            same(found, split_runs_torch(array, count, 4))
        assert runs is not None
        same(runs[:3], segments_by_length_torch(array, count))


def check_chain_waits() -> None:
    """Until sizes are read nothing waits, once constants are on the device."""
    coords, site, request = Scene(3, 60, 9).coords(), site_in(Scene(3, 60, 9).bounds()), chain_request(3, "padded")
    watch = DeviceOnly()
    with kernels_inside(watch):
        for context in (nullcontext(), watch):
            with context:
                chain_tiles.tile_maps(chain.find_maps(coords, site, request, chain.Room.of(request, 200)))


GROUPS: Mapping[str, Callable[[], Checks]] = {
    "chains": chain_checks,
    "structures": structure_checks,
    "outputs": output_checks,
    "stages": stage_checks,
    "whole maps": map_checks,
}
"""The checks, by name, of each group."""


answer = answering(GROUPS, fenced)
