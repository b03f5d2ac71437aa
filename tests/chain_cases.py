"""Maps that are found together, at random, on coordinates that are hard, against loops over tuples (`oracle`)."""

from __future__ import annotations

import random
from typing import NamedTuple

import oracle
import torch
from torch import Tensor

from pumice.coords import Geometry, GridSpec, Relation
from pumice.coords.box import UNKNOWN
from pumice.coords.chain import AXIS_BITS, DOWN, MARGIN, SAME, UP, ChainRequest, TileRule, refusal
from pumice.coords.chain_build import build_chain
from pumice.errors import CoordinateError
from pumice.runtime.launch import has_triton

EXTENTS = {1: 40, 2: 9, 3: 5, 4: 3}
KINDS = ("one", "cluster", "negative", "low end", "high end", "both ends", "gap", "many items", "extent", "spread")
REFUSED = ("beyond", "item 1024", "twice")
GROUPED = (200, 8), (1 << 30, 16)
RULES = (TileRule(24_000, 8, 1 << 15, groups=GROUPED), TileRule(20, 8, 10, groups=GROUPED))


class Case(NamedTuple):
    """Coordinates, in an extent or in none, and a request. known: their box is read beforehand."""

    kind: str
    rows: list[oracle.Coord]
    extent: tuple[int, ...] | None
    items: int | None
    known: bool
    request: ChainRequest


def case_of(seed: int, most: int, kinds: tuple[str, ...] = KINDS) -> Case:
    """The case of a seed, of about `most` coordinates."""
    chance = random.Random(seed)
    dim, kind = chance.choice((1, 2, 3, 3, 3, 4)), chance.choice(kinds)
    # Keys of one axis hold every coordinate.
    dim = max(2, dim) if kind == "beyond" else dim
    rows = _rows(kind, dim, chance, chance.choice((2, most // 4, most)))
    extent = tuple(EXTENTS[dim] + chance.randrange(3) for _ in range(dim)) if kind == "extent" else None
    items = chance.choice((None, 1 + max(b for b, *_ in rows), 3 + max(b for b, *_ in rows)))
    return Case(
        kind, rows, extent, items, dim == 1 or extent is not None or chance.random() < 0.5, _request(dim, chance)
    )


def _request(dim: int, chance: random.Random) -> ChainRequest:
    steps = [_step(dim, chance) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]
    windows = [tuple({_window(dim, chance) for _ in range(chance.choice((0, 1, 1, 2)))}) for _ in range(len(steps) + 1)]
    tiled = [(SAME, level, window) for level, each in enumerate(windows) for window in each]
    tiled += [(kind, level + (kind == DOWN), step) for level, step in enumerate(steps) for kind in (DOWN, UP)]
    if chance.random() < 0.3:
        tiled = chance.sample(tiled, len(tiled) // 2)
    rule, paired = chance.choice(RULES), chance.random() < 0.5
    return ChainRequest(dim, tuple(steps), tuple(windows), tuple(tiled), rule, paired)


def _step(dim: int, chance: random.Random) -> Relation:
    """Strides larger than kernels, and kernels larger than strides; padding on some axes alone."""
    alike = chance.random() < 0.5
    kernel = (
        (chance.choice((1, 2, 3, 3)),) * dim if alike else tuple(chance.choice((1, 2, 2, 3, 4)) for _ in range(dim))
    )
    stride = (chance.choice((2, 2, 3)),) * dim if alike else tuple(chance.choice((1, 2, 2, 3, 4)) for _ in range(dim))
    if chance.random() < 0.4:
        return Relation.of(dim, kernel, stride=stride, policy="floor_unique")
    padding = tuple(chance.choice((0, 0, 1, 1, 2)) for _ in range(dim))
    return Relation.of(dim, kernel, stride=stride, padding=padding, policy="support")


def _window(dim: int, chance: random.Random) -> Relation:
    three = 3 if dim < 4 else 2
    way = chance.randrange(4)
    if way == 0:
        return Relation.of(dim, tuple(chance.randint(1, three) for _ in range(dim)), policy="same")
    if way == 1:
        return Relation.of(dim, three, dilation=chance.choice((2, 3)), policy="same")
    if way == 2:
        offsets = {tuple(chance.randint(-4, 4) for _ in range(dim)) for _ in range(chance.randint(1, 9))}
        return Relation.of_offsets(dim, sorted(offsets))
    return Relation.of(dim, three, policy="same")


def _rows(kind: str, dim: int, chance: random.Random, most: int) -> list[oracle.Coord]:
    margin = MARGIN + 1 if dim > 1 else 0
    low, high = margin - (1 << AXIS_BITS[dim] - 1), (1 << AXIS_BITS[dim] - 1) - margin - EXTENTS[dim]

    def near(corner: int, items: tuple[int, ...] = (0,), count: int = most) -> set[oracle.Coord]:
        cells = range(corner, corner + EXTENTS[dim])
        return {(chance.choice(items), *(chance.choice(cells) for _ in range(dim))) for _ in range(max(1, count))}

    wide = range(-500, 500)
    found = {
        "one": lambda: {(chance.choice((0, 3)), *(chance.choice((0, -1, 7, low, high)) for _ in range(dim)))},
        "cluster": lambda: near(0),
        "negative": lambda: near(-2, (0, 1)),
        "low end": lambda: near(low),
        "high end": lambda: near(high),
        "both ends": lambda: near(low, (0,), most // 2) | near(high, (0, 1023), most // 2),
        "gap": lambda: near(-2, (0, 7)),
        "many items": lambda: near(0, tuple(range(1024))),
        "extent": lambda: near(0, (0, 1)),
        "spread": lambda: {(0, *(chance.choice(wide) for _ in range(dim))) for _ in range(most)},
        "beyond": lambda: near(0) | {(0, *(high + 2 * EXTENTS[dim],) * dim)},
        "item 1024": lambda: near(0, (0, 1024)) | {(1024, *(0,) * dim)},
        "twice": lambda: near(0),
    }[kind]()
    rows = sorted(found)
    chance.shuffle(rows)
    return [*rows, rows[len(rows) // 2]] if kind == "twice" else rows


def geometry_of(case: Case) -> Geometry:
    """As on a GPU where the box is not known."""
    coords, dim = torch.tensor(case.rows, dtype=torch.int32), case.request.dim
    if case.known and case.kind != "twice":
        return Geometry.checked(coords, 1, case.extent, case.items, dim)
    items = -1 if case.items is None else case.items
    site = GridSpec((1,) * dim, None, items, UNKNOWN)
    if dim == 1:
        site = Geometry.checked(coords.unique(dim=0), 1, None, case.items, dim).site
    return Geometry(coords, site, settled=False)


def check(case: Case) -> bool:
    """False where the maps are not found together, which is refused or told, and raised for duplicates."""
    geometry, request = geometry_of(case), case.request
    if refusal(geometry, request) is not None:
        return False
    try:
        found = build_chain(geometry, request)
    except CoordinateError as error:
        assert case.kind == "twice" and "duplicates" in str(error)
        return False
    # Plain torch has no keys.
    assert (found is None) == (case.kind in REFUSED and has_triton(geometry.coords)) and case.kind != "twice"
    if found is None:
        return False
    fine, rows, extent = geometry, case.rows, case.extent
    for level, windows in enumerate((*request.windows, ())[: request.levels]):
        for window in windows:
            same(fine.maps[window, None][0].table, _table(rows, rows, window))
        if level < len(request.steps):
            step = request.steps[level]
            extent = None if extent is None else step.output_shape(extent)
            finer, rows = rows, _outputs(rows, step, extent)
            down, fine = fine.maps[step, None]
            same(fine.coords, rows)
            assert fine.spatial_shape == extent and all(_inside(row, fine) for row in rows)
            same(down.table, _table(finer, rows, step))
            same(down.transpose().rows(), _table_back(rows, finer, step))
    for one in found:
        _check_tiles(one.found.rows(), one.tiled.tiles())
        assert (one.groups is not None) == request.paired
        if one.groups is not None:
            _check_groups(one.found.rows(), one.groups.pairs())
            if one.turned is not None:
                _check_tiles(one.found.transpose().rows(), one.turned.tiles())
    return True


def _check_groups(rows: Tensor, groups: tuple[Tensor, ...]) -> None:
    """The pairs of the map, each in a group of its kernel offset; no group is empty."""
    taps, inputs, outputs = (x.tolist() for x in groups)
    assert all(max(group) >= 0 for group in inputs)
    listed = zip(taps, inputs, outputs, strict=True)
    pairs = [(k, i, o) for k, first, second in listed for i, o in zip(first, second, strict=True) if i >= 0]
    expected = [(k, i, o) for o, row in enumerate(rows.tolist()) for k, i in enumerate(row) if i >= 0]
    assert sorted(pairs) == sorted(expected)


def same(found: Tensor, expected: list[tuple[int, ...]]) -> None:
    assert found.dtype == torch.int32 and [*map(tuple, found.tolist())] == expected


def _inside(row: oracle.Coord, geometry: Geometry) -> bool:
    box = geometry.bounds
    return row[0] < box.batch and all(a <= c <= b for a, c, b in zip(box.low, row[1:], box.high, strict=True))


def _relation(step: Relation) -> oracle.Relation:
    return oracle.custom(step.offsets, step.stride, (1,) * step.dim)


def _outputs(rows: list[oracle.Coord], step: Relation, extent: tuple[int, ...] | None) -> list[oracle.Coord]:
    if step.policy == "floor_unique":
        return oracle.floor_unique(rows, step.stride)
    return oracle.support(rows, _relation(step), extent)


def _table(inputs: list[oracle.Coord], outputs: list[oracle.Coord], step: Relation) -> list[tuple[int, ...]]:
    rows, own = {c: n for n, c in enumerate(inputs)}, _relation(step)
    return [tuple(rows.get(own.fine(q, tap), -1) for tap in own.taps) for q in outputs]


def _table_back(inputs: list[oracle.Coord], outputs: list[oracle.Coord], step: Relation) -> list[tuple[int, ...]]:
    rows, own = {c: n for n, c in enumerate(inputs)}, _relation(step)
    return [tuple(-1 if (q := own.coarse(c, tap)) is None else rows.get(q, -1) for tap in own.taps) for c in outputs]


def _check_tiles(rows: Tensor, tiles: tuple[Tensor, ...]) -> None:
    """Each output is in one tile, and the entries of tiles are the pairs of the map."""
    outputs, tile_of, taps, inputs = (x.tolist() for x in tiles)
    assert sorted(o for tile in outputs for o in tile if o >= 0) == [*range(len(rows))]
    entries = zip(tile_of, taps, inputs, strict=True)
    pairs = [(k, i, o) for tile, k, met in entries for i, o in zip(met, outputs[tile], strict=True) if i >= 0]
    expected = [(k, i, o) for o, row in enumerate(rows.tolist()) for k, i in enumerate(row) if i >= 0]
    assert sorted(pairs) == sorted(expected)
