"""Tiles of kernels: sizes, warps, pipeline stages, and heuristics to choose them. No tensors, no launches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pumice.errors import OptionError
from pumice.language.contraction import ContractionRoles

SHARED_CHUNK = 8
"""Maximum entries per program of a segment shared by several programs (stream-K)."""
WHOLE_SEGMENTS = 1 << 30
"""A chunk longer than any segment: none is shared."""


@dataclass(frozen=True)
class Tile:
    """The tile of a kernel. For segments see language.contraction.

    rows, columns: results of one program. reduced: reduction points per loop iteration of a matrix product.
    segment_threads: rows that work on one segment together (only if the rows are segments).
    warps: per program, of 32 threads (64 on CDNA). stages: loop iterations whose loads are in flight.
    swapped: the columns of the statement are the rows of the tile, since wgmma needs at least 64 rows.
    column_major_grid: programs run through all rows of one block of columns (of the statement), then the next: gathered
        rows stay cached.
    stacked: consecutive segments are the rows of a matrix product (language.contraction.stacked).
    prefetch_indices: matrix products load indices two iterations ahead, so that no load waits for another.
    packed: an iteration takes as many entries of a segment as fit in `reduced`, at least one, each with all of its few
        reduction points (language.contraction.packed).
    stream_k_chunk: in a matrix product over segments, the maximum entries of a segment per program. Several programs
        share a longer one; the last adds the partial sums in a fixed order. 0: the kernel cannot share segments. One
        kernel serves all other values, also WHOLE_SEGMENTS.
    epilogue_subtiles: number of column slices that the epilogue of a matrix product writes one by one; more slices need
        fewer registers. Slices of padding are skipped.
    hoisted, padded, lazy: False for ablations only: every iteration recomputes addresses, or reads the number of
        outputs though the map is padded with -1, or loads over rows, columns and reduction at once (emit.py).
    """

    rows: int
    columns: int
    reduced: int = 1
    segment_threads: int = 1
    warps: int = 4
    stages: int = 2
    swapped: bool = False
    column_major_grid: bool = False
    stacked: bool = False
    prefetch_indices: bool = False
    packed: bool = False
    stream_k_chunk: int = 0
    epilogue_subtiles: int = 1
    hoisted: bool = True
    padded: bool = True
    lazy: bool = True

    def __post_init__(self) -> None:
        for name in (
            "rows",
            "columns",
            "reduced",
            "segment_threads",
            "warps",
            "stages",
            "stream_k_chunk",
            "epilogue_subtiles",
        ):
            value = getattr(self, name)
            if (value < 1 or (name != "stages" and value & (value - 1))) and (name != "stream_k_chunk" or value != 0):
                raise OptionError(f"{name} of a tile is a power of two, at least 1; found {value}")
        if self.rows % self.segment_threads:
            raise OptionError(f"{self.segment_threads} lanes do not divide {self.rows} rows")
        if self.epilogue_subtiles > self.columns:
            raise OptionError(f"{self.epilogue_subtiles} slices do not divide {self.columns} columns")
        if self.packed and (self.stacked or self.segment_threads > 1):
            raise OptionError("a packed tile cannot be stacked or have several segment_threads")
        if self.rows * self.columns > 1 << 20:
            raise OptionError(f"a tile has at most 1048576 results, found {self.rows} x {self.columns}")
        if self.reduced * max(self.rows, self.columns) > 1 << 20:
            raise OptionError(f"a tile reads at most 1048576 values, found {self.reduced} for each row and column")
        if self.warps > 32:
            raise OptionError(f"a program has at most 32 warps, found {self.warps}")

    def has_code_of(self, other: Tile) -> bool:
        """True if both have the same code: they may differ in a nonzero stream_k_chunk only."""
        mine, its = self.stream_k_chunk, other.stream_k_chunk
        return self == (other if mine == its or not (mine and its) else replace(other, stream_k_chunk=mine))

    def smaller(self) -> Tile | None:
        """The next tile that needs fewer resources: a stage fewer, then half the longer side; None at the minimum. The
        number of stacked segments is kept, since the map was built for it."""
        if self.stages > 2:
            return replace(self, stages=self.stages - 1)
        if self.stacked:
            return self._narrower() if self.columns > 16 else None
        if max(self.rows // self.segment_threads, self.columns) <= 16:
            return None
        if self.columns >= self.rows // self.segment_threads:
            return self._narrower()
        return replace(self, rows=self.rows // 2)

    def _narrower(self) -> Tile:
        columns = self.columns // 2
        return replace(self, columns=columns, epilogue_subtiles=min(self.epilogue_subtiles, columns))

    def __str__(self) -> str:
        lanes = f"/{self.segment_threads}" if self.segment_threads > 1 else ""
        words = {"column_major_grid": "column-major", "prefetch_indices": "prefetch"}
        ways = ("swapped", "column_major_grid", "stacked", "packed", "prefetch_indices")
        order = "".join(f" {words.get(way, way)}" for way in ways if getattr(self, way))
        order += f" pieces of {self.stream_k_chunk}" if 0 < self.stream_k_chunk < WHOLE_SEGMENTS else ""
        order += " whole pieces" if self.stream_k_chunk == WHOLE_SEGMENTS else ""
        order += f" in {self.epilogue_subtiles} slices" if self.epilogue_subtiles > 1 else ""
        order += " not hoisted" * (not self.hoisted) + " not padded" * (not self.padded)
        order += " not lazy" * (not self.lazy)
        return f"{self.rows}{lanes}x{self.columns}x{self.reduced} w{self.warps} s{self.stages}{order}"


def power_above(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def size_class(count: int) -> int:
    """Representative of the size class of a count: up to 64, where counts limit the sides of tiles, the next power of
    two; above, one class per factor of 4, so that a layer needs few kernels."""
    return power_above(count) if count <= 64 else 2 << 2 * ((count.bit_length() - 1) // 2)


def segment_class(count: int) -> int:
    """Representative of the size class of a number of segments: as `size_class` up to 64, above one per factor of 2,
    since it decides whether programs share segments, by the same kernel."""
    return power_above(count) if count <= 64 else 3 << (count.bit_length() - 2)


_HALF_WAY = math.sqrt(0.5)


def mean_class(entries: int, segments: int) -> float:
    """Mean entries per segment, rounded to the nearest power of two on a logarithmic scale."""
    part, exponent = math.frexp(max(entries, 1) / max(segments, 1))
    return math.ldexp(1.0, exponent - (part < _HALF_WAY))


LONGEST = 27  # entries assumed in the longest segment if unknown: the kernel offsets of 3 x 3 x 3


class Problem(NamedTuple):
    """Input of the tile heuristics.

    roles, extents: of the statement. mean, longest: mean and maximum entries per segment. bits: per value. chained:
    loads in the loop use indices loaded in it. stacks: stacked tiles are possible. segments: their number. packed:
    roles for packed tiles, if possible. waits: barriers order stores for other programs too (not on AMD). mixed: values
    have several dtypes, as features and a weight in three parts (lower.parts). across: the rows' factor is contiguous
    along the reduction, the columns' factor along the columns.
    """

    roles: ContractionRoles
    extents: Mapping[str, int]
    mean: float = 1.0
    bits: int = 16
    chained: bool = False
    stacks: bool = False
    segments: int = 1
    packed: ContractionRoles | None = None
    waits: bool = True
    longest: int = LONGEST
    mixed: bool = False
    across: bool = False

    @property
    def shares(self) -> bool:
        """True if programs may share segments: not very many segments, each the loop of a matrix product."""
        roles = self.roles
        own = roles.product and roles.segment is not None and not roles.laned
        return own and self.waits and self.segments < _MANY_SEGMENTS

    def volume(self, names: tuple[str, ...]) -> int:
        return math.prod(self.extents[name] for name in names if name in self.extents)


PROCESSORS = 132  # streaming multiprocessors of an H200


def programs(roles: ContractionRoles, extents: Mapping[str, int]) -> int:
    """Approximate number of programs, assuming PROCESSORS segments if there are segments."""
    rows, columns = _sides(roles)
    across = 1 if roles.folds and not roles.product else _blocks(roles.columns, extents, columns)
    inner = 1 if roles.segment is None else PROCESSORS
    return _blocks(roles.rows, extents, rows) * across * _blocks(roles.batch, extents, 1) * inner


def splits(roles: ContractionRoles, extents: Mapping[str, int]) -> int:
    """Split-K factor: above 1 for few tiles with long loops; 1 with segments, whose results are written once."""
    if roles.segment is not None:
        return 1
    tiled, side = (roles.reduced, 64) if roles.product else (roles.columns if roles.folds else (), _sides(roles)[1])
    turns = _blocks(roles.loops, extents, 1) * _blocks(tiled, extents, side)
    tiles = max(1, programs(roles, extents))
    if tiles >= PROCESSORS or turns < 32:
        return 1
    return max(1, min(-(-2 * PROCESSORS // tiles), turns // 8))


def table_parts(rows: int, columns: int, volume: int) -> int:
    """Parts of a split-K over a neighbour table: as many that their tiles fill the device twice, at least two, at most
    one per kernel offset. rows, columns: of the result; volume: kernel offsets."""
    tiles = max(1, -(-rows // _PRODUCT_SIDE) * -(-columns // _PRODUCT_SIDE))
    parts = max(1, min(volume, max(2, -(-2 * PROCESSORS // tiles))))
    # As many offsets in each, but the last.
    return -(-max(1, volume) // -(-max(1, volume) // parts))


_PRODUCT_SIDE = 128


def _sides(roles: ContractionRoles) -> tuple[int, int]:
    """Rows and columns of a typical tile."""
    return (_PRODUCT_SIDE, _PRODUCT_SIDE) if roles.product else (8, 256) if roles.folds else (16, 128)


def _blocks(names: tuple[str, ...], extents: Mapping[str, int], side: int) -> int:
    return -(-math.prod(extents[name] for name in names if name in extents) // side)


def default(problem: Problem) -> Tile:
    """The tile used without autotuning. Heuristics for matrix products come from convolutions on an H200 (C = 32, 64,
    128, 256); other tiles limit a program to 2 to 8 KiB of registers."""
    roles = problem.roles
    rows, columns = problem.volume(roles.rows), problem.volume(roles.columns)
    if _should_pack(problem):
        return _packed_tile(problem)
    if roles.product:
        return _product_tile(problem)
    if roles.folds:
        wide = max(16, _below(columns, 256))
        return Tile(_below(rows, 2048 // wide), wide, warps=4)
    wide = _below(columns, 128)
    if problem.stacks and problem.mean >= _STACKED and columns >= 16:
        return Tile(16, _tile_side(columns, 128), 128, stages=2, stacked=True, prefetch_indices=True)
    if problem.roles.laned:
        lanes = min(16, power_above(max(1, int(problem.mean / 8))))
        height = max(lanes, min(16, 2048 // wide))
        # Short loops end before prefetching pays.
        stages = 2 if problem.mean > 16 else 1
        return Tile(height, wide, segment_threads=lanes, warps=_warps(height * wide, 512), stages=stages)
    height = _below(rows, max(1, 2048 // wide))
    stages = 1 if math.prod(problem.extents.get(name, 16) for name in roles.loops) <= 8 else 2
    return Tile(height, wide, warps=_warps(height * wide, 512), stages=stages)


_STACKED = 16  # mean entries per segment from which segments are stacked; below, stacking does not pay


def of_long_segments(roles: ContractionRoles, extents: Mapping[str, int], tile: Tile) -> Tile:
    """The tile for segments far longer than `tile` suits: one segment by many threads, or stacked ones of depth 256."""
    columns = math.prod(extents[name] for name in roles.columns)
    if tile.stacked:
        return Tile(16, _tile_side(columns, 64), 256, stages=3, stacked=True, prefetch_indices=True)
    wide = _below(columns, 32)
    lanes = min(256, 4096 // wide)
    return Tile(lanes, wide, segment_threads=lanes, warps=4)


def candidates(problem: Problem) -> Iterator[Tile]:
    """Distinct tiles for autotuning, the default first."""
    seen: set[Tile] = set()
    plain = default(problem._replace(packed=None))
    others = (_product_tiles if problem.roles.product else _plain_tiles)(problem, plain)
    for tile in (default(problem), plain, *_packed_tiles(problem), *others):
        if tile not in seen:
            seen.add(tile)
            yield tile


def _plain_tiles(problem: Problem, first: Tile) -> Iterator[Tile]:
    for stages in (1, 2, 3, 4):
        yield replace(first, stages=stages)
    for scale in (0.5, 1, 2, 4):
        rows = power_above(max(first.segment_threads, int(first.rows * scale))) if problem.roles.rows else 1
        for warps in (1, 2, 4, 8):
            # More than 64 results per thread spill.
            if rows * first.columns <= 64 * 32 * warps:
                yield replace(first, rows=rows, warps=warps)
    if not problem.roles.laned:
        return
    columns = problem.volume(problem.roles.columns)
    if problem.stacks:
        yield from _stacked_tiles(columns)
    for width in (32, 64, 128):
        for lanes in (1, 2, 4, 8, 16, 32):
            for rows in (1, 4, 16, 32):
                tile = replace(
                    first, rows=rows * lanes, columns=min(width, power_above(columns)), segment_threads=lanes
                )
                if 256 <= tile.rows * tile.columns <= 8192:
                    warps = _warps(tile.rows * tile.columns, 512)
                    yield replace(tile, warps=warps, column_major_grid=False)
                    if width < columns:
                        yield replace(tile, warps=warps, column_major_grid=True)


def _stacked_tiles(columns: int) -> Iterator[Tile]:
    for width in sorted({_tile_side(columns, cap) for cap in (64, 128)}):
        for depth, warps in ((128, 4), (64, 4), (64, 2)):
            for stages, ahead in ((2, True), (3, True), (2, False)):
                yield Tile(16, width, depth, warps=warps, stages=stages, stacked=True, prefetch_indices=ahead)


def _product_tiles(problem: Problem, first: Tile) -> Iterator[Tile]:
    roles = problem.roles
    if roles.within:
        yield from _tiles_within(problem)
        return
    rows, columns = problem.volume(roles.rows), problem.volume(roles.columns)
    # With a side below 64 either order is tried, otherwise only the order of the statement.
    orders = (False, True) if min(rows, columns) < 64 and not roles.folds else (False,)
    # Without prefetch, a load that depends on another gets half of the stages.
    loads = ((3, True), (4, True), (5, False)) if problem.chained else ((3, False), (5, False))
    for swapped in orders:
        sides = (columns, rows) if swapped else (rows, columns)
        for height in sorted({_tile_side(sides[0], cap) for cap in (32, 64, 128, 256)}):
            for width in sorted({_tile_side(sides[1], cap) for cap in (32, 64, 128, 256)}):
                if not 1024 <= height * width <= 128 * 256:
                    continue
                for warps in _warps_of_product(height * width):
                    for stages, ahead in loads:
                        tile = Tile(height, width, first.reduced, warps=warps, stages=stages, swapped=swapped)
                        yield replace(tile, prefetch_indices=ahead)
    for depth in (first.reduced // 2, 2 * first.reduced) if problem.chained and problem.bits == 16 else ():
        if 32 <= depth <= _max_depth(problem):
            for stages, ahead in loads:
                yield replace(first, reduced=depth, stages=stages, prefetch_indices=ahead)
    if problem.chained and first.columns >= 64 and not problem.roles.folds:
        for slices in {1, 2, 4} - {first.epilogue_subtiles}:
            yield replace(first, epilogue_subtiles=slices)
    if problem.shares:
        for piece in (4, 8, 16):
            for stages, ahead in loads:
                yield replace(first, stages=stages, prefetch_indices=ahead, stream_k_chunk=piece)


def _warps_of_product(area: int) -> tuple[int, ...]:
    return (4,) if area < 128 * 128 else (4, 8) if area == 128 * 128 else (8,)


def _tiles_within(problem: Problem) -> Iterator[Tile]:
    """Candidates for a nested product, with the outer reduction at once or in two parts."""
    first = _product_tile(problem)
    # Several wgmma products in a kernel: Triton 3.6 and 3.7 may read past shared memory (its issues 10573, 11366).
    for warps in (1, 2) if first.rows >= 64 else (1, 2, 4, 8):
        for stages in (1, 2, 3, 4):
            for parts in (1, 2):
                if first.reduced // parts >= 16:
                    yield replace(first, reduced=first.reduced // parts, warps=warps, stages=stages)


def _tile_within(problem: Problem) -> Tile:
    """The tile of a nested product: sides of at most 64, and few warps, since each splits shared operands for TF32."""
    roles = problem.roles
    rows, columns = (_tile_side(problem.volume(names), 64) for names in (roles.rows, roles.columns))
    depth = _tile_side(problem.volume(roles.reduced), 64)
    return Tile(rows, columns, depth, warps=_warps(columns * depth, 2048), stages=3)


def _product_tile(problem: Problem) -> Tile:
    """The tile of a matrix product, `swapped` if only its columns number 64 or more."""
    roles, wide = problem.roles, problem.bits > 16
    if roles.within:
        return _tile_within(problem)
    rows, columns = problem.volume(roles.rows), problem.volume(roles.columns)
    swapped = (rows < 64 <= columns and not wide and not roles.folds) or _is_turned(problem)
    if swapped:
        rows, columns = columns, rows
    depth = _depth(problem)
    if problem.chained:
        return _chained_tile(problem, (rows, columns, depth), swapped)
    if (short := _short_product(problem, (rows, columns), swapped)) is not None:
        return short
    # 128 x 256 results of 32-bit factors do not fit into registers.
    height, width = _tile_side(rows, 128), _tile_side(columns, 128 if wide else 256)
    warps = 8 if height * width >= 128 * 128 else 4
    return Tile(height, width, depth, warps=warps, stages=3, swapped=swapped)


def _is_turned(problem: Problem) -> bool:
    """True if the columns of a 32-bit product over segments are the rows of the tile, as in a feature gradient: wgmma
    reads its second operand along the reduction only."""
    roles = problem.roles
    own = roles.segment is not None and not (roles.packed or roles.atomic or roles.folds)
    return own and problem.across and problem.bits == 32 and problem.volume(roles.columns) >= 64


def _short_product(problem: Problem, sides: tuple[int, int], swapped: bool) -> Tile | None:
    """The tile of a memory-bound product of many rows by a small matrix: many small programs. On an H200 (fp16, with an
    epilogue) 173,000 rows of 128 to 96 channels take 31 us (41 with eight warps), a million 138 (211), 66,000 rows of
    192 to 128 channels 15 (18)."""
    (rows, columns), reduced = sides, problem.volume(problem.roles.reduced)
    plain = problem.bits == 16 and not (swapped or problem.roles.folds or problem.roles.atomic)
    if not plain or problem.roles.loops or not 64 < columns <= 128 or reduced > 192 or rows <= 64:
        return None
    return Tile(128, 128, 32, stages=4, epilogue_subtiles=4) if columns <= 96 else Tile(64, 128, 64, stages=2)


def _depth(problem: Problem) -> int:
    """Reduction points per iteration: halved if the last iteration would otherwise multiply mostly padding
    (96 channels on an H200, 173k voxels of Waymo, fp16: 0.063 ms with 32, 0.073 with 64)."""
    extent = problem.volume(problem.roles.reduced)
    depth = max(_min_depth(problem), _tile_side(extent, _max_depth(problem)))
    return depth // 2 if problem.chained and problem.bits == 16 and _wastes(extent, depth) else depth


def _wastes(extent: int, depth: int) -> bool:
    """True if halving the depth saves at least a fifth of the multiplications."""
    half = depth // 2
    return half >= 32 and 5 * -(-extent // half) * half <= 4 * -(-extent // depth) * depth


def _chained_tile(problem: Problem, sides: tuple[int, int, int], swapped: bool) -> Tile:
    """The tile if loads use loaded indices, which are prefetched except in short loops. Tuned on H200 convolutions."""
    (rows, columns, depth), roles = sides, problem.roles
    own = roles.segment is not None and not (roles.packed or roles.atomic or roles.folds or swapped)
    if own and problem.bits in (16, 32):
        return _tile_of_segments(problem, sides)
    turns = problem.mean * -(-problem.volume(roles.reduced) // depth)
    if roles.atomic and problem.bits in (16, 32) and not (roles.packed or roles.folds):
        tile = _tile_of_sums((rows, columns, depth), swapped, problem.bits == 32)
        return tile if turns >= _SHORT_LOOP else _without_prefetch(tile)
    height, width, count = _chained_sides(problem, (rows, columns), turns)
    # 32-bit operands are split into several parts, for which 4 warps have too few registers.
    warps = 8 if problem.bits > 16 and height * width >= 128 * 128 else 4
    tile = Tile(height, width, depth, warps=warps, stages=3, swapped=swapped, prefetch_indices=True)
    if width == 256:
        return replace(tile, warps=8)
    tile = _with_loads(problem, tile, (columns, count)) if turns >= _SHORT_LOOP else _without_prefetch(tile)
    return replace(tile, stream_k_chunk=_stream_k_chunk(problem, tile, count)) if problem.shares else tile


def _tile_of_segments(problem: Problem, sides: tuple[int, int, int]) -> Tile:
    """The tile of a 16- or 32-bit product over segments, as in a convolution: nearly the same for all sizes, since each
    tile is a kernel to compile. Only stream_k_chunk depends on the number of segments.

    On an H100 (fp16, U-Net and encoder on 10 scans of 5,000 to 136,000 voxels) convolutions took as long as with
    special tiles (narrower, other stages) for few or short segments, with half as many kernels.
    """
    rows, columns, depth = sides
    wide, height, width = problem.bits > 16, _tile_side(rows, 128), _tile_side(columns, 128)
    # 32-bit operands go through registers, for which 4 warps have too few.
    warps = 8 if wide and height == width == 128 else 4
    if problem.longest <= _SHORT:
        slices = 4 if width == 128 and not wide else 1
        return Tile(height, width, depth, 1, warps, 3, prefetch_indices=True, epilogue_subtiles=slices)
    if height == 128 and columns >= 256 and not wide:
        # One program for 256 columns gathers each row once.
        return Tile(height, 256, depth, warps=8, stages=3, prefetch_indices=True)
    # 96 to 128 channels on an H200: 112 us for 346,000 voxels of Waymo (122 without prefetch), 885 us for a million
    # of a shell (979).
    sliced = width == 128 and depth < min(_max_depth(problem), problem.volume(problem.roles.reduced))
    # Three parts of a weight leave no room for a fourth stage of two programs.
    stages = 4 if (height <= 64 and not problem.mixed) or (depth <= 32 and not wide) else 3
    slices = 4 if sliced else 1
    tile = Tile(height, width, depth, 1, warps, stages, prefetch_indices=True, epilogue_subtiles=slices)
    if height > 64 or not problem.waits:
        return tile
    programs = problem.segments * problem.volume(problem.roles.batch) * -(-columns // width)
    return replace(tile, stream_k_chunk=_stream_k_chunk(problem, tile, programs) or WHOLE_SEGMENTS)


def _tile_of_sums(sides: tuple[int, int, int], swapped: bool, wide: bool) -> Tile:
    """The tile of a product that programs accumulate by atomics, as a weight gradient: the same for any number of
    programs, since another tile is another kernel to compile. wide: of 32-bit factors, else 16-bit.

    On an H100 (fp16, groups of 1024 pairs of scans), us, with tiles of 64 x 64 and of 128 x 128:
    channels, voxels   96, 2,552   128, 18,737   128, 67,068   256, 2,552   256, 18,737
    64 x 64                  7.0          26.8          83.7         16.7          94.8
    128 x 128               11.3          20.9          59.1         13.0          62.8

    On an H200 (float32), us, of 128 x 128 x 32 with three products of tf32 and 128 x 128 x 64 with six of bfloat16:
    channels, voxels   96, 115,000   128, 23,500   256, 9,000
    three                      845           268          608
    six                        433           153          224"""
    rows, columns, depth = sides
    height, width = _tile_side(rows, 128), _tile_side(columns, 128)
    large = height * width == 128 * 128
    depth, stages = (64, 2) if wide and large else (depth, 3)
    return Tile(height, width, depth, warps=8 if large else 4, stages=stages, swapped=swapped, prefetch_indices=True)


def _chained_sides(problem: Problem, sides: tuple[int, int], turns: float) -> tuple[int, int, int]:
    """(rows, columns) of a tile, and the number of programs. Halving the columns doubles gathers, but fills a GPU."""
    rows, columns = sides
    height, width = _tile_side(rows, 128), _tile_side(columns, 128)
    tiles = problem.segments * problem.volume(problem.roles.batch)
    long = turns >= _LONG_LOOP and not problem.roles.atomic

    def programs() -> int:
        return tiles * -(-rows // height) * -(-columns // width)

    if height > 64 and (programs() < _FEW_LONG if long else tiles * -(-rows // height) < _FEW):
        height = 64
    if width > 64 and programs() < (_FEW_LONG if long else _FEW):
        width = 64
    return height, width, programs()


def _with_loads(problem: Problem, tile: Tile, sizes: tuple[int, int]) -> Tile:
    """`tile`, with a fourth stage if it suits: it may lower occupancy. sizes: (columns of the result, programs)."""
    (columns, programs), more, area = sizes, replace(tile, stages=4), tile.rows * tile.columns
    roomy = tile.rows <= 64 or (area < 128 * 128 and programs < _MANY)
    few = problem.bits <= 16 and not problem.roles.atomic and programs <= 1.75 * _wave_size(problem, more)
    halved = tile.reduced < _max_depth(problem) and problem.volume(problem.roles.reduced) > tile.reduced
    if halved and programs >= _MANY:
        # Padding columns are not written. With subtiles three programs fit instead of two.
        sparse = 4 * columns <= 3 * tile.columns and not problem.roles.folds
        full = (
            columns == tile.columns == 128 and problem.bits <= 16 and not (problem.roles.folds or problem.roles.atomic)
        )
        return replace(more, epilogue_subtiles=4) if sparse or full else _without_prefetch(tile)
    alike = roomy and _waves(problem, more, programs) <= _waves(problem, tile, programs)
    return more if tile.reduced <= 32 or few or alike else tile


def _without_prefetch(tile: Tile) -> Tile:
    return replace(tile, stages=5, prefetch_indices=False)


def _stream_k_chunk(problem: Problem, tile: Tile, programs: int) -> int:
    """stream_k_chunk of a tile: SHARED_CHUNK if the longest segment outlasts the mean work of a program slot by far,
    else 0. Partial sums go through memory, which does not pay for segments of similar length or short ones."""
    each, longest = problem.mean * programs / _wave_size(problem, tile), max(problem.longest, 1.4 * problem.mean)
    alike = 0.8 * problem.longest < problem.mean <= problem.longest
    if longest < 2.25 * each or alike or problem.longest <= _SHORT:
        return 0
    return SHARED_CHUNK


def _waves(problem: Problem, tile: Tile, programs: int) -> int:
    """Waves of programs, if all take equally long."""
    # Short segments vary most in length: other programs fill the gaps, as in one wave.
    alike = problem.roles.segment is None or problem.mean > _SHORT_LOOP
    return -(-programs // _wave_size(problem, tile)) if alike else 1


def _wave_size(problem: Problem, tile: Tile) -> int:
    return PROCESSORS * occupancy(tile, problem.bits)


_SHARED, _REGISTERS, _WARPS = 227 << 10, 64 << 10, 64
"""Per multiprocessor: bytes of shared memory for programs, registers, resident warps."""
_USED = 56  # registers per thread besides those of results


def occupancy(tile: Tile, bits: int) -> int:
    """Concurrent programs of a matrix product on a multiprocessor; bits: of the values."""
    # Without prefetched indices, half of the stages hold values.
    buffers = tile.stages if tile.prefetch_indices else (tile.stages + 1) // 2
    shared = buffers * (tile.rows + tile.columns) * tile.reduced * bits // 8
    registers = tile.rows * tile.columns + 32 * tile.warps * _USED
    return max(1, min(_SHARED // max(1, shared), _REGISTERS // registers, _WARPS // tile.warps))


_MANY_SEGMENTS = 2048
"""Number from which segments are not shared: the others keep a GPU busy while the longest one finishes."""
_FEW = 3 * PROCESSORS  # programs below which a tile is made smaller

_FEW_LONG = 96
"""The same with long loops. On an H200 (fp16, convolutions over tiles of 64 outputs):
channels, programs        256, 320   128, 334   256, 214   256, 124   256, 74   128, 124
64 x 64, us                     73         44         62         39        24         15
64 x 128, us                    51         34         50         32        24         15
Over 122 tiles of 128 outputs, 128 channels take 25 us in tiles of 128 x 128 and 34 in tiles of 64 x 64."""

_LONG_LOOP = 16  # minimum iterations of a long loop

_MANY = 512  # programs (a size class) from which a fourth stage must not lower the occupancy
_SHORT_LOOP = 6  # iterations below which indices are not prefetched
_SHORT = 8
"""Entries up to which segments are short: never shared; programs are mostly prologue and epilogue. On an H200, 96
channels: 31 us for 173,000 outputs with one entry each (42 with more stages), 168 us for a million (213)."""

_FEW_POINTS = 16  # reduction points per entry up to which entries are packed: with more, iterations take no longer


def _should_pack(problem: Problem) -> bool:
    """True if entries have few reduction points, and only packing fills or makes a matrix product."""
    if problem.packed is None or problem.volume(problem.packed.reduced) > _FEW_POINTS:
        return False
    return problem.mean > 1 or not problem.roles.product


def _packed_tile(problem: Problem) -> Tile:
    """The tile for packed entries: an iteration takes a segment of mean length, limited by the depth of other tiles. In
    16 and 32 bits it takes the longest segment (mean: half of it), so that other scenes need no other kernel."""
    assert problem.packed is not None
    points = power_above(problem.volume(problem.packed.reduced))
    own = problem.bits in (16, 32) and problem.packed.segment is not None
    most, mean = (problem.longest, problem.longest / 2) if own else (math.ceil(problem.mean), problem.mean)
    depth = max(_min_depth(problem), min(_max_depth(problem), points * power_above(most)))
    turns = math.ceil(mean * points / depth)
    found = _product_tile(problem._replace(roles=problem.packed, mean=turns, packed=None))
    # For up to two iterations, more buffers would only lower occupancy. Small tiles prefetch indices in short loops
    # too. Packed segments are too short to be shared.
    stages, ahead = 3 if turns <= 2 else found.stages, found.prefetch_indices or found.rows <= 64
    return replace(found, reduced=depth, stages=stages, packed=True, stream_k_chunk=0, prefetch_indices=ahead)


def _packed_tiles(problem: Problem) -> Iterator[Tile]:
    """Candidates around the default packed tile, with other depths and loads."""
    if problem.packed is None:
        return
    points = power_above(problem.volume(problem.packed.reduced))
    if 2 * points > _max_depth(problem):
        return
    first = _packed_tile(problem)
    heights = sorted({min(first.rows, cap) for cap in (64, 128)})
    for depth in (32, 64, 128):
        if depth < max(2 * points, _min_depth(problem)) or depth > 2 * _max_depth(problem):
            continue
        for height in heights:
            for warps in _warps_of_product(height * first.columns):
                for stages, ahead in ((2, False), (3, False), (5, False), (3, True), (4, True)):
                    yield replace(first, rows=height, reduced=depth, warps=warps, stages=stages, prefetch_indices=ahead)


def _max_depth(problem: Problem) -> int:
    """Maximum reduction per iteration: 128 bytes of a row."""
    return {8: 128, 16: 64}.get(problem.bits, 32)


def _min_depth(problem: Problem) -> int:
    """Minimum reduction per iteration: tensor cores take 32 8-bit values."""
    return 32 if problem.bits == 8 else 16


def _tile_side(extent: int, most: int) -> int:
    """The next power of two, clamped to 16..`most`."""
    return max(16, min(most, power_above(extent)))


def _below(extent: int, most: int) -> int:
    return max(1, min(most, power_above(extent)))


def _warps(entries: int, each: int) -> int:
    return max(1, min(8, power_above(entries // each)))
