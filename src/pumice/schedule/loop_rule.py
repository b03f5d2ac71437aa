"""The schedule of a loop nest where none is given, the presets of "Unified Convolution Framework" (table 2), and the
candidates of the tuner with a model of their cost.

The rule: lanes run over blocks of an image if copying it pays, in the grid that needs the fewest operations, with up to
14 accumulators; otherwise a vector moves along the longest index that is contiguous. Blocks of the entries are chosen
such that what a tile reads of the image stays in the first-level cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any

from pumice.errors import OptionError
from pumice.schedule.loops import Image, LoopSchedule, NestFacts, arranged, check

_ACROSS = 4  # Vectors per tile along a vector index
_TILE = 14  # Accumulators of a tile over an image
_PAYS = 2  # Multiply-adds per copied value from which copying an image to lanes pays
_ALIGNS = 8  # Multiply-adds per value from which a copy that aligns vectors pays
_LINE = 64  # Bytes of a line of the cache
# Times of the model, in aligned loads from the first-level cache that feed a multiply-add
_MISS = 0.35  # Of a load from the second-level cache, besides
_SPLIT = 0.6  # Of a load from two lines of the cache, besides
_ENTRY = 3.0  # Of an entry's offset and value
_PAGE = 10  # Of results on another page
_COPY = 1.5  # Of copying a vector to or from lanes


@dataclass(frozen=True)
class ImageTiles:
    """An image in lanes. grid: blocks along its axes, or () if lanes are neighbours in tiles of `points` outputs, whose
    last vector ends with the tile; tile: outputs of a lane's tile, or vectors of one; copied: packed, else in place."""

    image: Image
    grid: tuple[int, ...]
    tile: tuple[int, ...]
    points: int = 0
    copied: bool = True

    @staticmethod
    def of(schedule: LoopSchedule, facts: NestFacts) -> ImageTiles | None:
        """The image tiles of a complete schedule; None if the vector moves along its index."""
        if (image := facts.image(schedule)) is None:
            return None
        tile, packed = tuple(schedule.sizes()[name] for name in image.names), bool(schedule.pack)
        if grid := tuple(n for _, n in schedule.vector if n):
            return ImageTiles(image, grid, tile, 0, packed)
        return ImageTiles(image, (), (-(-tile[0] // facts.lanes),), tile[0], packed)

    @property
    def numbers(self) -> list[int]:
        """Tiles of a block along each axis."""
        if self.points:
            return [self.image.sizes[0] // self.points]
        blocks = (-(-n // g) for n, g in zip(self.image.sizes, self.grid, strict=True))
        return [-(-b // t) for b, t in zip(blocks, self.tile, strict=True)]

    @property
    def block(self) -> tuple[int, ...]:
        """Outputs of a block along each axis, in whole tiles."""
        return tuple(n * t for n, t in zip(self.numbers, self.tile, strict=True))

    def reads(self, outputs: Sequence[int]) -> list[int]:
        """Rows and columns of the factor that so many outputs read."""
        if self.points:
            return list(outputs)
        each = zip(outputs, self.image.steps, self.image.spans, strict=True)
        return [(n - 1) * step + 1 + span for n, step, span in each]

    @property
    def schedule(self) -> LoopSchedule:
        names, tile = self.image.names, (self.points,) if self.points else self.tile
        return LoopSchedule(
            vector=tuple(zip(names, self.grid or (0,), strict=True)),
            split=tuple(zip(names, tile, strict=True)),
            pack=(self.image.factor,) if self.copied else (),
            hold=math.prod(self.tile),
        )

    def cost(self, facts: NestFacts) -> tuple[float, int]:
        """Vector operations with those of copies, then values that a tile reads: the rule takes the least."""
        window = 0 if self.points else math.prod(self.reads(self.tile))
        others = math.prod(n for name, n in facts.dense.items() if name not in self.image.names)
        visits = facts.entries[1] * others * math.prod(self.numbers)
        load = 1.0 if self.copied else _load(self.points, facts)
        return visits * (math.prod(self.tile) * load + 1) + self.copies(facts), window

    def copies(self, facts: NestFacts) -> float:
        """Vector operations that copy the image to lanes and, unless they are neighbours, the results from them."""
        return 2 * _COPY * sum(self.image.values[: 1 if self.points else 2]) / facts.lanes * self.copied

    def pays(self, facts: NestFacts) -> bool:
        """True if there are enough points for a vector and, to be copied, multiply-adds for each value."""
        if math.prod(self.image.sizes) < facts.lanes:
            return False
        return bool(self.points) or _products(facts) >= _PAYS * sum(self.image.values)


def _load(points: int, facts: NestFacts) -> float:
    """Time of a load in place from rows of so many points: unless they are whole vectors, it may cross a line."""
    return 1 + _SPLIT * facts.lanes * facts.processor[2] / _LINE if points % facts.lanes else 1.0


def _products(facts: NestFacts) -> int:
    return facts.entries[1] * math.prod(facts.dense.values())


def completed(schedule: LoopSchedule, facts: NestFacts) -> LoopSchedule:
    """The schedule with what it does not say, by the rule. Raises OptionError if the nest cannot have it."""
    check(schedule, facts)
    schedule = _with_tile(schedule, facts)
    schedule = replace(
        schedule,
        fuse=tuple(tuple(name.split(".")) for name in facts.dense if "." in name),
        split=_with_blocks(schedule, facts),
    )
    order = _loops_that_repeat(schedule, facts)
    parallel = schedule.parallel or tuple((name, int(_inside(order, schedule, facts))) for name in facts.segments[:1])
    schedule = replace(schedule, order=order, parallel=parallel)
    check(schedule, facts)
    return schedule


def _loops_that_repeat(schedule: LoopSchedule, facts: NestFacts) -> tuple[str, ...]:
    tiles = ImageTiles.of(schedule, facts)
    counts = dict(facts.dense) | (dict(zip(tiles.image.names, tiles.numbers, strict=True)) if tiles else {})
    return tuple(name for name in arranged(schedule, facts) if counts.get(name, 2) > 1)


def _inside(order: Sequence[str], schedule: LoopSchedule, facts: NestFacts) -> bool:
    """True if a loop over results runs inside the segments': then a task is one segment."""
    moving = set() if facts.image(schedule) else {name for name, _ in schedule.vector}
    inner = order[order.index(facts.segments[-1]) + 1 : order.index(facts.entries[0])]
    return bool({*inner} - moving)


def _with_tile(schedule: LoopSchedule, facts: NestFacts) -> LoopSchedule:
    """The schedule with its vector, the splits of an image, and hold."""
    if schedule.vector and facts.image(schedule) is None:
        return _moving(schedule, facts)
    blocks = tuple(pair for pair in schedule.split if pair[0] not in facts.dense)
    asked = bool(schedule.vector or schedule.pack or len(blocks) < len(schedule.split))
    for image in facts.images:
        best = min(image_tiles(image, schedule, facts), key=lambda t: t.cost(facts), default=None)
        if best and (asked or best.pays(facts)):
            own = best.schedule
            return replace(schedule, vector=own.vector, split=(*own.split, *blocks), pack=own.pack, hold=own.hold)
    if asked:
        raise OptionError(f"`{schedule}`: {_no_tiles(schedule, facts)}")
    return _moving(replace(schedule, vector=tuple((name, 0) for name in facts.vectors[:1])), facts)


def _no_tiles(schedule: LoopSchedule, facts: NestFacts) -> str:
    images = "; ".join(f"{i.factor} along {' '.join(i.names)}, {i.sizes}" for i in facts.images)
    tiles = f"tiles of {facts.lanes} or more neighbours divide the axis of a flat image"
    return f"blocks of an image need `pack`, and {tiles}; images are {images or 'none'}"


def _moving(schedule: LoopSchedule, facts: NestFacts) -> LoopSchedule:
    points = max([facts.dense[name] for name, _ in schedule.vector], default=1)
    return replace(schedule, hold=min(schedule.hold or _ACROSS, -(-points // facts.lanes)))


def image_tiles(image: Image, schedule: LoopSchedule, facts: NestFacts) -> Iterator[ImageTiles]:
    """The best tiles of an image as neighbours and in each grid, as far as the schedule allows."""
    names, given = tuple(name for name, _ in schedule.vector), schedule.sizes()
    if (names and names != image.names) or {*schedule.pack} - {image.factor}:
        return
    if any(name in facts.dense and name not in image.names for name in given):
        return
    grids = (
        [grid] if (grid := tuple(n for _, n in schedule.vector if n)) else [] if names else _grids(image, facts.lanes)
    )
    hold = schedule.hold or max(_TILE, math.prod(given[name] for name in image.names if name in given))
    asked = bool(names or schedule.pack or given.keys() & {*image.names})
    if image.bare and len(image.names) == 1 and not grid:
        # Aligned vectors are read in place; parts of an operand are copied anyway.
        aligns = image.cut or (image.sizes[0] % facts.lanes and _products(facts) >= _ALIGNS * image.values[0])
        copied = bool(schedule.pack or (aligns and not asked))
        yield from (replace(t, copied=copied) for t in _neighbours(image, given.get(image.names[0], 0), hold, facts))
    for grid in grids:
        tile, left = list[int](), hold
        for name, size, blocks in reversed([*zip(image.names, image.sizes, grid, strict=True)]):
            tile.insert(0, given.get(name) or _tile_length(-(-size // blocks), max(1, left)))
            left //= tile[0]
        found = ImageTiles(image, grid, tuple(tile))
        if (schedule.pack or not names) and math.prod(found.reads(found.block)) <= image.most:
            yield found


def _neighbours(image: Image, points: int, hold: int, facts: NestFacts) -> Iterator[ImageTiles]:
    """Equal tiles of a flat image in line, the fastest. points: of a tile, if they are given."""
    length, lanes = image.sizes[0], facts.lanes
    equal = [points] if points else [length // n for n in range(1, length // lanes + 1) if length % n == 0]
    tiles = [ImageTiles(image, (), (-(-n // lanes),), n) for n in equal if n >= lanes and length % n == 0]
    best = min((t for t in tiles if t.tile[0] <= hold or points), key=lambda t: t.cost(facts), default=None)
    if best:
        yield best


def _grids(image: Image, lanes: int) -> list[tuple[int, ...]]:
    if len(image.names) == 1:
        return [(lanes,)]
    rows, columns = image.sizes
    return [(min(rows, lanes // across), min(columns, across)) for across in range(1, lanes + 1)]


def _tile_length(points: int, most: int) -> int:
    """Outputs of a tile along an axis of `points`: a tile takes about as long as one more output."""
    return min(range(1, min(points, most) + 1), key=lambda t: -(-points // t) * (t + 1))


def _with_blocks(schedule: LoopSchedule, facts: NestFacts) -> tuple[tuple[str, int], ...]:
    """The splits with blocks of the image's channels: a block's part of a tile's window stays in the cache."""
    tiles, sizes = ImageTiles.of(schedule, facts), schedule.sizes()
    if tiles is None or not tiles.image.channel or {*sizes} & {*facts.coordinates}:
        return schedule.split
    _, _, value, cache = facts.processor
    channels, size = facts.coordinates[tiles.image.channel], math.prod(tiles.reads(tiles.tile)) * facts.lanes * value
    # Every block reads and writes all results again.
    blocks = min(-(-channels * size // (cache * 7 // 8)), max(1, facts.entries[1] // (8 * facts.results)))
    return (*schedule.split, (tiles.image.channel, -(-channels // blocks))) if blocks > 1 else schedule.split


# Presets


def _along(facts: NestFacts) -> LoopSchedule:
    """A vector along the last contiguous index of the target; along packed rows of an image if there is none."""
    names = [name for name in facts.outer if name in facts.vectors]
    if names or not facts.images:
        return LoopSchedule(vector=tuple((name, 0) for name in names[-1:]))
    image = facts.images[-1]
    return next((t.schedule for t in image_tiles(image, LoopSchedule(), facts)), LoopSchedule())


def _skimcaffe(facts: NestFacts) -> LoopSchedule:
    """F: m:U (c r s):C. Direct convolution: for every output channel, over its image in place."""
    first = _along(facts)
    free = [name for name in facts.outer if (name, 0) not in first.vector and facts.dense[name] > 1]
    return replace(first, order=(*facts.segments, *free, facts.entries[0]))


def _deepsparse(facts: NestFacts) -> LoopSchedule:
    """I: n:U h:U w:U c:C. Entries are activations of a pixel; a vector moves along the output channels."""
    return replace(_along(facts), order=(*facts.segments, facts.entries[0]))


def _xnnpack(facts: NestFacts) -> LoopSchedule:
    """F: m:U (r s c):C. Products of the filter's rows with tiles of 32 pixels; pixels outermost, in parallel. Where the
    paper has an im2col copy, windows read a packed image, which holds every pixel once."""
    for image in facts.images:
        given = LoopSchedule(hold=max(1, 32 // facts.lanes))
        best = min(image_tiles(image, given, facts), key=lambda t: t.cost(facts), default=None)
        if best:
            whole = tuple((name, facts.coordinates[name]) for name in (image.channel,) if name)
            split = (*best.schedule.split, *whole)
            return replace(best.schedule, split=split, parallel=((image.names[0], 0),))
    return _along(facts)


def _map_based(facts: NestFacts) -> LoopSchedule:
    """Map: (k i j):C. For every output its pairs, for every pair a row times its offset's matrix."""
    summed = [name for name in facts.reduced if name not in dict(_along(facts).vector)]
    return replace(_along(facts), order=(*facts.segments, facts.entries[0], *summed))


PRESETS: Mapping[str, Callable[[NestFacts], LoopSchedule]] = MappingProxyType(
    {"skimcaffe": _skimcaffe, "deepsparse": _deepsparse, "xnnpack": _xnnpack, "direct": _along, "map-based": _map_based}
)
"""Schedules of the rows of the paper's table 2, by name."""


# Candidates


def candidates(facts: NestFacts, threads: int, most: int) -> list[LoopSchedule]:
    """Complete schedules besides the rule's, the cheapest `most` by the model, in its order: of vectors, tiles and
    packing; of the best of them in blocks and orders."""
    tiles = _cheapest([*_images(facts), *_vectors(facts)], facts)[:most]
    varied = [
        replace(part, split=tuple(dict((*part.split, *blocks)).items()), **order)
        for part in tiles
        for blocks, order in product(_blocks(part, facts), _orders(part, facts, threads))
    ]
    rule = completed(LoopSchedule(), facts)
    return [one for one in _cheapest([*tiles, *varied], facts) if one != rule][:most]


def _cheapest(schedules: Sequence[LoopSchedule], facts: NestFacts) -> list[LoopSchedule]:
    """The schedules that the nest can have, complete, the cheapest first."""
    found = dict[LoopSchedule, float]()
    for schedule in schedules:
        with suppress(OptionError):
            one = completed(schedule, facts)
            found[one] = estimate(one, facts)
    return sorted(found, key=found.__getitem__)


def _images(facts: NestFacts) -> Iterator[LoopSchedule]:
    """Every grid and tile of an image, packed and, if possible, in place."""
    most = facts.processor[1] - 2
    for image in facts.images:
        for grid in dict.fromkeys(_grids(image, facts.lanes)):
            blocks = [-(-n // g) for n, g in zip(image.sizes, grid, strict=True)]
            for tile in product(*(range(1, min(block, most) + 1) for block in blocks)):
                # Few accumulators wait for one another.
                if 4 <= math.prod(tile) <= most or list(tile) == blocks:
                    yield ImageTiles(image, grid, tile).schedule
        if len(image.names) == 1 and image.bare:
            for points, copied in product(range(facts.lanes, most * facts.lanes + 1), (False, True)):
                if not image.sizes[0] % points:
                    yield ImageTiles(image, (), (-(-points // facts.lanes),), points, copied).schedule


def _vectors(facts: NestFacts) -> Iterator[LoopSchedule]:
    for name, hold in product(facts.vectors[:2], (1, 2, 4, 8)):
        for unroll in ((), ((facts.entries[0], 2),), ((facts.entries[0], 4),)):
            yield LoopSchedule(vector=((name, 0),), hold=hold, unroll=unroll)


def _blocks(part: LoopSchedule, facts: NestFacts) -> list[tuple[tuple[str, int], ...]]:
    """No blocks of the image's channels, half and twice as many as now."""
    image, sizes = facts.image(part), part.sizes()
    if image is None or not image.channel:
        return [()]
    most = facts.coordinates[image.channel]
    now = sizes.get(image.channel, most)
    return [((image.channel, size),) for size in sorted({most, now, max(1, now // 2), min(most, 2 * now)})]


def _orders(part: LoopSchedule, facts: NestFacts, threads: int) -> list[dict[str, Any]]:
    """The rule's order; segments outermost; with several threads, chunks of segments."""
    first = facts.segments[:1]
    found: list[dict[str, Any]] = [
        {"order": (), "parallel": tuple((name, chunk) for name in first)}
        for chunk in ([0, 4, 16] if threads > 1 else [0])
    ]
    if first and (image := facts.image(part)):
        order = (*facts.segments, *image.names, facts.entries[0])
        found += [{"order": order, "parallel": ((first[0], chunk),)} for chunk in (1, 8)]
    return found


def estimate(schedule: LoopSchedule, facts: NestFacts) -> float:
    """Relative time of a complete schedule: vector loads of the multiply-adds, of results and of copies."""
    tiles, entries, hold = ImageTiles.of(schedule, facts), facts.entries[1], schedule.hold
    moved = {n for n, _ in schedule.vector}
    points = math.prod(extent for n, extent in facts.dense.items() if n not in moved)
    blocks = math.prod(-(-facts.coordinates[n] // size) for n, size in schedule.split if n in facts.coordinates)
    length = math.prod(facts.dense[n] for n in moved)
    load = 1.0 if schedule.pack else _load(length, facts)
    if tiles is None:
        visits = points * -(-length // (hold * facts.lanes))
        return visits * (entries * (load * max(hold, 4) + _ENTRY) + blocks * facts.results * 2 * hold)
    # A tile's window of all channels of a block is read for every segment, and the whole image if tiles are inside.
    inside = bool(facts.segments) and _inside(schedule.order, schedule, facts)
    window = math.prod(tiles.reads(tiles.block if inside else tiles.tile)) * facts.lanes * facts.processor[2]
    channels = facts.coordinates.get(tiles.image.channel, 1)
    held = window * min(schedule.sizes().get(tiles.image.channel, channels), channels)
    missed = _MISS * min(1.0, max(0.0, held / facts.processor[3] - 0.9))
    # Results of the next segment are on another page, unless the tiles of one follow each other.
    result = 2 * hold + (0 if inside else _PAGE)
    visits = points * math.prod(tiles.numbers)
    return visits * (
        entries * ((load + missed) * max(hold, 4) + _ENTRY) + blocks * facts.results * result
    ) + tiles.copies(facts)
