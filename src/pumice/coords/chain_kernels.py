"""Triton kernels that build all kernel maps of a chain of halved levels. Sizes are read from device counters (`words`,
`layout`, see coords.chain), so that no launch waits for the host."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

from pumice.coords.tile_kernels import _or, _step

DUPLICATE, RANGE = tl.constexpr(1), tl.constexpr(2)
COUNTS, STRIDE = tl.constexpr(4), tl.constexpr(4)  # Level l has words[COUNTS + STRIDE * l] rows
SIDE = tl.constexpr(32)  # Lanes of a row of `layout`, of pair totals and of group totals
ROWS, FIRST_ROW, BLOCK_ROWS, TILES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIRST_SLOT, FIRST_TILE, FIRST_OF_LEVEL, SORTS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
TILES_BEFORE, TOTAL = tl.constexpr(8), tl.constexpr(9)  # Rows of `layout`
SAME, DOWN, UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # Kinds of segments
BATCHES = tl.constexpr(1 << 10)
_NUMBERS = [
    "rows", "blocks", "batch", "low0", "low1", "low2", "high0", "high1", "high2", "level", "steps", "sampled",
    "segments", "few", "per", "width", "entries",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def make_keys(
    coords, found, words, rows: "i64", batch: "i64", low0: "i64", low1: "i64", low2: "i64", high0: "i64", high1: "i64",
    high2: "i64", D: tl.constexpr, AXIS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found[r]: Morton code of row r below its batch index. Rows outside the box set RANGE."""
    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = r < rows
    item = tl.load(coords + r * (D + 1), mask=valid, other=0).to(tl.int64)
    inside = (item >= 0) & (item < batch)
    key = (item - BATCHES // 2) << (D * AXIS)
    for a in tl.static_range(D):
        low = low0 if a == 0 else (low1 if a == 1 else low2)
        high = high0 if a == 0 else (high1 if a == 1 else high2)
        c = tl.load(coords + r * (D + 1) + 1 + a, mask=valid, other=0).to(tl.int64)
        inside = inside & (c >= low) & (c <= high)
        c += 1 << (AXIS - 1)
        for bit in tl.static_range(AXIS):
            key |= ((c >> bit) & 1) << (D * bit + D - 1 - a)
    tl.store(found + r, key, mask=valid)
    if tl.sum((valid & ~inside).to(tl.int32)) > 0:
        tl.atomic_or(words, RANGE)


@triton.jit
def _changes(keys, i, rows):
    """(key, bits in which it differs from the one before, True if there is one before) of sorted keys."""
    key = tl.load(keys + i, mask=i < rows, other=0)
    return key, key ^ tl.load(keys + i - 1, mask=(i < rows) & (i > 0), other=0), (i < rows) & (i > 0)


@triton.jit
def _begins(i, changed, behind, rows, level: tl.constexpr, D: tl.constexpr):
    """True where a row of a level begins."""
    new = i < rows
    if level > 0:
        new = new & (~behind | ((changed >> (D * level)) != 0))
    return new


@triton.jit(do_not_specialize=_NUMBERS)
def count_levels(
    keys, words, sums, rows: "i64", blocks: "i64", D: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    """sums[l, p]: rows of level l that begin in block p of the sorted keys. Equal keys set DUPLICATE; the finest level
    has a row for each, so that every row has its place in all arrays."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _, changed, behind = _changes(keys, i, rows)
    if tl.sum((behind & (changed == 0)).to(tl.int32)) > 0:
        tl.atomic_or(words, DUPLICATE)
    for n in tl.static_range(LEVELS):
        new = _begins(i, changed, behind, rows, n, D)
        tl.store(sums + n * blocks + tl.program_id(0), tl.sum(new.to(tl.int32)))


@triton.jit
def _aligned(count):
    """Rows that a level takes in concatenated arrays: levels start at multiples of four."""
    return (count + 3) // 4 * 4


@triton.jit(do_not_specialize=_NUMBERS)
def make_levels(
    keys, order, coords, sums, words, links, first_child, top, coarse, rows: "i64", blocks: "i64",
    D: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Concatenated levels, each in (batch, Morton) order. links: parent << 3 | octant; first_child: its position;
    coarse: coordinates of coarser levels; top: keys of the coarsest. sums: from count_levels; words: receive the
    counts."""
    p = tl.program_id(0)
    i = p.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key, changed, behind = _changes(keys, i, rows)
    source = tl.load(order + i, mask=i < rows, other=0) * (D + 1)
    base, below = rows * 0, rows * 0
    was = i < 0
    rank_below = tl.zeros([BLOCK], tl.int32)
    for n in tl.static_range(LEVELS):
        new = _begins(i, changed, behind, rows, n, D)
        before, total = tl.sum(tl.zeros([PART], tl.int32)), tl.sum(tl.zeros([PART], tl.int32))
        for start in range(0, blocks.to(tl.int32), PART):
            q = start + tl.arange(0, PART)
            each = tl.load(sums + n * blocks + q, mask=q < blocks, other=0)
            before += tl.sum(tl.where(q < p, each, 0))
            total += tl.sum(each)
        rank = before + tl.cumsum(new.to(tl.int32), axis=0) - 1
        if n > 0:
            link = (rank << 3) | ((key >> (D * (n - 1))) & ((1 << D) - 1)).to(tl.int32)
            tl.store(links + below + rank_below, link, mask=was)
            tl.store(first_child + base + rank, rank_below, mask=new)
            for a in tl.static_range(D + 1):
                c = tl.load(coords + source + a, mask=new, other=0)
                tl.store(coarse + (base + rank) * (D + 1) + a, c if a == 0 else c >> n, mask=new)
        if n == LEVELS - 1:
            tl.store(top + rank, key >> (D * n), mask=new)
        tl.store(words + COUNTS + STRIDE * n, total, mask=p == 0)
        below = base
        base = base + _aligned(total)
        was = new
        rank_below = rank


@triton.jit
def _first_of(words, level, LEVELS: tl.constexpr):
    """Start of a level in concatenated arrays."""
    first = tl.load(words + COUNTS) * 0
    for n in tl.static_range(LEVELS):
        first += tl.where(n < level, _aligned(tl.load(words + COUNTS + STRIDE * n)), 0)
    return first


@triton.jit(do_not_specialize=_NUMBERS)
def lay_out(words, plan, layout, segments: "i64", few: "i64", LEVELS: tl.constexpr):
    """layout[:, s]: where segment s lies in concatenated arrays. plan[:, s]: its kind, its level, its kernel offsets,
    and the number of rows from which it is sorted. few: rows below which tiles have 64 rows, not 128."""
    s = tl.arange(0, SIDE)
    level = tl.load(plan + SIDE + s)
    rows = tl.where(s < segments, tl.load(words + COUNTS + STRIDE * level), 0)
    block = tl.where(rows < few, 64, 128)
    tiles = (rows + block - 1) // block
    first = level * 0
    for n in tl.static_range(LEVELS):
        first += tl.where(n < level, _aligned(tl.load(words + COUNTS + STRIDE * n)), 0)
    ends = tl.cumsum(rows, axis=0)
    tl.store(layout + ROWS * SIDE + s, rows)
    tl.store(layout + FIRST_ROW * SIDE + s, ends - rows)
    tl.store(layout + BLOCK_ROWS * SIDE + s, block)
    tl.store(layout + TILES * SIDE + s, tiles)
    tl.store(layout + FIRST_SLOT * SIDE + s, tl.cumsum(tiles * block, axis=0) - tiles * block)
    tl.store(layout + FIRST_TILE * SIDE + s, tl.cumsum(_aligned(tiles), axis=0) - _aligned(tiles))
    tl.store(layout + FIRST_OF_LEVEL * SIDE + s, first)
    tl.store(layout + SORTS * SIDE + s, (rows >= tl.load(plan + 3 * SIDE + s)).to(tl.int32))
    tl.store(layout + TILES_BEFORE * SIDE + s, tl.cumsum(tiles, axis=0) - tiles)
    tl.store(layout + TOTAL * SIDE + s, tl.sum(rows) + s * 0)


@triton.jit
def _popcount(x):
    """Set bits of a non-negative int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def _count_groups(totals, groups, mask, sampled):
    """totals[g] += sampled rows whose mask has any kernel offset of group g. groups: mask words, then sizes."""
    g = tl.arange(0, SIDE)
    word = tl.load(groups + g)
    has = ((mask[:, None] & word[None, :]) != 0) & sampled[:, None]
    tl.atomic_add(totals + g, tl.sum(has.to(tl.int32), axis=0), mask=word != 0, sem="relaxed")


@triton.jit
def _digit(v, a, D: tl.constexpr):
    """-1, 0 or 1: offset along axis a of kernel offset v of a window of 3."""
    power: tl.constexpr = 1 if a == D - 1 else (3 if a == D - 2 else 9)
    return v // power % 3 - 1


@triton.jit
def _search_top(top, code, valid, v, rows, level, steps, D: tl.constexpr, AXIS: tl.constexpr, BITS: tl.constexpr):
    """Neighbours of rows with these codes, by bisection; -1 if absent. BITS: the bits of the last axis."""
    none = level.to(tl.int64) * 0
    low = ((none + 1) << (D * (AXIS - level))) - 1
    want = code & ~low
    on = valid
    for a in tl.static_range(D):
        bits = ((none + BITS) << (D - 1 - a)) & low
        x, move = code & bits, _digit(v, a, D)
        on = on & ~((move > 0) & (x == bits)) & ~((move < 0) & (x == 0))
        want = want | tl.where(move > 0, ((x | ~bits) + 1) & bits, tl.where(move < 0, (x - 1) & bits, x))
    begin = tl.zeros_like(want).to(tl.int32)
    end = begin + rows
    for _ in range(steps.to(tl.int32)):
        middle = begin + (end - begin) // 2
        open_ = on & (begin < end)
        less = tl.load(top + middle, mask=open_, other=0) < want
        begin = tl.where(open_ & less, middle + 1, begin)
        end = tl.where(open_ & ~less, middle, end)
    on = on & (begin < rows)
    return tl.where(on & (tl.load(top + begin, mask=on, other=0) == want), begin, -1)


@triton.jit
def _search_below(table, children, link, valid, v, first, D: tl.constexpr, K: tl.constexpr):
    """Neighbours of rows by those of their parents, which begin at `first` of `table` and `children`; -1 if absent."""
    towards, octant = tl.zeros_like(v), tl.zeros_like(v)
    for a in tl.static_range(D):
        t = ((link >> (D - 1 - a)) & 1) + _digit(v, a, D)
        towards = towards * 3 + (t >> 1) + 1
        octant = octant * 2 + (t & 1)
    parent = (first + (link >> 3)).to(tl.int64)
    parent_neighbour = tl.load(table + parent * K + towards, mask=valid, other=-1)
    packed = tl.load(children + first + parent_neighbour, mask=parent_neighbour >= 0, other=0)
    there = (parent_neighbour >= 0) & (((packed >> octant) & 1) != 0)
    return tl.where(there, (packed >> 8) + _popcount(packed & ((1 << octant) - 1)), -1)


@triton.jit
def _list_children(
    links, first_child, order, children, down, words, r, valid, level, rows, D: tl.constexpr, LEVELS: tl.constexpr
):
    """Fill `children` (first child << 8 | octants that have one) and `down`, the table of the map to this level; the
    octants of each row."""
    WIDTH: tl.constexpr = 1 << D
    finer, first = tl.load(words + COUNTS + STRIDE * (level - 1)), _first_of(words, level, LEVELS)
    begin = tl.load(first_child + first + r, mask=valid, other=0)
    end = tl.load(first_child + first + r + 1, mask=valid & (r + 1 < rows), other=0)
    end = tl.where(r + 1 < rows, end, finer)
    j = tl.arange(0, WIDTH)[None, :]
    at = begin[:, None] + j
    there = valid[:, None] & (at < end[:, None])
    octant = tl.load(links + first - _aligned(finer) + at, mask=there, other=0) & 7
    # Duplicates have the same octant.
    octants = tl.reduce(tl.where(there, 1 << octant, 0), 1, _or)
    tl.store(children + first + r, (begin << 8) | octants, mask=valid)
    child = begin[:, None] + _popcount(octants[:, None] & ((1 << j) - 1))
    has = ((octants[:, None] >> j) & 1) != 0
    finest = has & (level == 1)
    child = tl.where(level == 1, tl.load(order + child, mask=finest, other=0).to(tl.int32), child)
    place = (first - _aligned(tl.load(words + COUNTS)) + r).to(tl.int64)
    tl.store(down + place[:, None] * WIDTH + j, tl.where(has, child, -1), mask=valid[:, None])
    return octants


@triton.jit(do_not_specialize=_NUMBERS)
def find_neighbours(
    links, first_child, top, order, groups, words, totals, table, children, down, masks, parents,
    rows: "i64", level: "i64", steps: "i64", sampled: "i64",
    D: tl.constexpr, AXIS: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr, LANES: tl.constexpr,
    LEVELS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, FINEST: tl.constexpr,
):  # fmt: skip
    """The maps of one level, of which the coarser ones are done: a window of 3, its parents' children (`down`), its
    parents in the rows' order (`parents`). words[PAIRS:]: pairs per kernel offset; totals: from _count_groups.
    order: user's rows in the finest level's order. TOP: the coarsest level; FINEST: the finest."""
    own = level.to(tl.int32)
    count = tl.load(words + COUNTS + STRIDE * own)
    if tl.program_id(0) * BLOCK < count:
        j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = j < count
        first = _first_of(words, own, LEVELS)
        above = first + _aligned(count)
        v = tl.arange(0, LANES)[None, :]
        wanted = valid[:, None] & (v < K)
        if FINEST:
            r = tl.load(order + j, mask=valid, other=0).to(tl.int32)
        else:
            r = j
        if TOP:
            code = tl.load(top + j, mask=valid, other=0)
            near = _search_top(top, code[:, None], wanted, v, count, level, steps, D, AXIS, BITS)
        else:
            link = tl.load(links + first + j, mask=valid, other=0)
            near = _search_below(table, children, link[:, None], wanted, v + tl.zeros_like(j)[:, None], above, D, K)
            tl.store(parents + first + r, link, mask=valid)
        if FINEST:
            near = tl.where(near >= 0, tl.load(order + near, mask=near >= 0, other=0).to(tl.int32), -1)
        tl.store(table + (first + r).to(tl.int64)[:, None] * K + v, near, mask=wanted)
        has = (near >= 0).to(tl.int32)
        mask = tl.sum(has << v, axis=1)
        tl.store(masks + first + r, mask, mask=valid)
        tl.atomic_add(words + PAIRS + own * SIDE + v, tl.sum(has, axis=0)[None, :], mask=v < K, sem="relaxed")
        chosen = valid & (r % _step(count.to(tl.int64), sampled).to(tl.int32) == 0)
        _count_groups(totals + own * SIDE, groups, mask, chosen)
        if not TOP:
            _count_groups(totals + (UP * LEVELS + own) * SIDE, groups + 2 * SIDE, 1 << (link & 7), chosen)
        if not FINEST:
            octants = _list_children(links, first_child, order, children, down, words, j, valid, own, count, D, LEVELS)
            o = tl.arange(0, 1 << D)
            pairs = tl.sum((octants[:, None] >> o[None, :]) & 1, axis=0)
            tl.atomic_add(words + PAIRS + (LEVELS + own) * SIDE + o, pairs, sem="relaxed")
            _count_groups(totals + (DOWN * LEVELS + own) * SIDE, groups + 2 * SIDE, octants, chosen)


@triton.jit
def _mask_of(masks, children, parents, kind, at, valid):
    """Mask of each row of a segment: its kernel offsets that have an input."""
    same = tl.load(masks + at, mask=valid & (kind == SAME), other=0)
    down = tl.load(children + at, mask=valid & (kind == DOWN), other=0) & 255
    up = 1 << (tl.load(parents + at, mask=valid & (kind == UP), other=0) & 7)
    return tl.where(valid, tl.where(kind == SAME, same, tl.where(kind == DOWN, down, up)), 0)


@triton.jit
def _chosen_groups(groups, totals, rows, width):
    """As tile_kernels._chosen, of at most 32 groups: mask word behind bit p of the sort key, for p < width."""
    g = tl.arange(0, SIDE)
    known = tl.load(groups + g) != 0
    uneven = tl.abs(2 * tl.load(totals + g).to(tl.int64) - rows)
    even = tl.sort(tl.where(known, uneven * SIDE + g, 2**63 - 1))
    taken = g < width
    best = (even & (SIDE - 1)).to(tl.int32)
    absent = rows - tl.load(totals + best, mask=taken, other=0)
    size = tl.load(groups + SIDE + best, mask=taken, other=0)
    last = tl.sort(tl.where(taken, size * absent * SIDE + best, 2**63 - 1)) & (SIDE - 1)
    return tl.where(taken, tl.load(groups + last, mask=taken, other=0), 0)


@triton.jit(do_not_specialize=_NUMBERS)
def order_keys(
    plan, layout, groups, totals, masks, children, parents, keys, counts, per: "i64", width: "i64", sampled: "i64",
    LEVELS: tl.constexpr, ROWS_EACH: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """keys: sort key of each row of each segment, segment << width | descending Gray-code rank as in gray_keys, 0 if
    unsorted. counts[q, d] += rows of block q of all segments whose lowest digit is d. per: programs of a segment."""
    s = (tl.program_id(0) // per).to(tl.int32)
    first = (tl.program_id(0) % per).to(tl.int32) * ROWS_EACH
    rows = tl.load(layout + ROWS * SIDE + s)
    if first < rows:
        r = first + tl.arange(0, ROWS_EACH)
        valid = r < rows
        kind, level = tl.load(plan + s), tl.load(plan + SIDE + s)
        mask = _mask_of(masks, children, parents, kind, tl.load(layout + FIRST_OF_LEVEL * SIDE + s) + r, valid)
        own = groups + tl.where(kind == SAME, 0, 2 * SIDE)
        number = tl.sum((tl.load(own + tl.arange(0, SIDE)) != 0).to(tl.int32))
        used = tl.minimum(width.to(tl.int32), number)
        step = _step(rows.to(tl.int64), sampled)
        chosen = _chosen_groups(own, totals + (kind * LEVELS + level) * SIDE, (rows + step - 1) // step, used)
        lane = tl.arange(0, SIDE)[None, :]
        x = tl.sum(((mask[:, None] & chosen[None, :]) != 0).to(tl.int32) << lane, axis=1)
        x = x ^ (x >> 1)
        x = x ^ (x >> 2)
        x = x ^ (x >> 4)
        x = x ^ (x >> 8)
        x = x ^ (x >> 16)
        key = tl.where(tl.load(layout + SORTS * SIDE + s) != 0, (1 << used) - 1 - x, 0)
        key = (s << width.to(tl.int32)) | key
        at = tl.load(layout + FIRST_ROW * SIDE + s) + r
        tl.store(keys + at, key, mask=valid)
        tl.atomic_add(counts + (at // BLOCK).to(tl.int64) * BINS + (key & (BINS - 1)), 1, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def tile_segments(plan, layout, order, masks, children, parents, slots, tile_masks, per: "i64", BLOCK: tl.constexpr):
    """slots: rows of each tile of each segment, -1 for padding; tile_masks: kernel offsets that any of them has."""
    s, t = (tl.program_id(0) // per).to(tl.int32), (tl.program_id(0) % per).to(tl.int32)
    if t < tl.load(layout + TILES * SIDE + s):
        block, first = tl.load(layout + BLOCK_ROWS * SIDE + s), tl.load(layout + FIRST_ROW * SIDE + s)
        lane = tl.arange(0, BLOCK)
        at = t * block + lane
        valid = (lane < block) & (at < tl.load(layout + ROWS * SIDE + s))
        r = tl.load(order + first + at, mask=valid, other=0) - first
        tl.store(slots + tl.load(layout + FIRST_SLOT * SIDE + s) + at, tl.where(valid, r, -1), mask=lane < block)
        place = tl.load(layout + FIRST_OF_LEVEL * SIDE + s) + r
        mask = _mask_of(masks, children, parents, tl.load(plan + s), place, valid)
        tl.store(tile_masks + tl.load(layout + FIRST_TILE * SIDE + s) + t, tl.reduce(mask, 0, _or))


@triton.jit(do_not_specialize=_NUMBERS)
def end_tiles(layout, tile_masks, ends, words, entries: "i64", BLOCK: tl.constexpr):
    """ends: inclusive prefix counts of the tiles' entries; words[entries + s]: all of segment s. A program each."""
    s = tl.program_id(0)
    tiles, first = tl.load(layout + TILES * SIDE + s), tl.load(layout + FIRST_TILE * SIDE + s)
    before = tl.sum(tl.zeros([BLOCK], tl.int32))
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        own = _popcount(tl.load(tile_masks + first + t, mask=t < tiles, other=0))
        tl.store(ends + first + t, before + tl.cumsum(own, axis=0), mask=t < tiles)
        before += tl.sum(own)
    tl.store(words + entries + s, before)


@triton.jit(do_not_specialize=_NUMBERS)
def fill_segments(
    plan, layout, words, slots, tile_masks, ends, table, down, parents, taps, tiles, inputs, entries: "i64",
    segments: "i64", K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Entries of one tile, as tile_kernels.fill_tiles; the lists of segments are concatenated."""
    lane = tl.arange(0, SIDE)
    before = tl.load(layout + TILES_BEFORE * SIDE + lane)
    s = tl.sum(((lane < segments) & (before <= tl.program_id(0))).to(tl.int32)) - 1
    t = tl.program_id(0) - tl.load(layout + TILES_BEFORE * SIDE + s)
    block = tl.load(layout + BLOCK_ROWS * SIDE + s)
    sizes = tl.where(lane < s, tl.load(words + entries + lane), 0).to(tl.int64)
    own = tl.sum(_aligned(sizes))
    wide = tl.sum(sizes * tl.load(layout + BLOCK_ROWS * SIDE + lane))
    tile = tl.load(layout + FIRST_TILE * SIDE + s) + t
    k = tl.arange(0, LANES)
    has = (tl.load(tile_masks + tile) >> k) & 1
    e = tl.load(ends + tile) - tl.sum(has) + tl.cumsum(has, axis=0) - has
    tl.store(taps + own + e, k, mask=has == 1)
    tl.store(tiles + own + e, k * 0 + t, mask=has == 1)
    b = tl.arange(0, BLOCK)
    slot = tl.load(slots + tl.load(layout + FIRST_SLOT * SIDE + s) + t * block + b, mask=b < block, other=-1)
    kind = tl.load(plan + s)
    at = (tl.load(layout + FIRST_OF_LEVEL * SIDE + s) + slot).to(tl.int64)[:, None]
    on = (slot >= 0)[:, None] & (has == 1)[None, :]
    same = tl.load(table + at * K + k[None, :], mask=on & (kind == SAME), other=-1)
    below = at - _aligned(tl.load(words + COUNTS))
    child = tl.load(down + below * WIDTH + k[None, :], mask=on & (kind == DOWN), other=-1)
    link = tl.load(parents + at, mask=(slot >= 0)[:, None] & (kind == UP), other=-1)
    parent = tl.where(on & (link >= 0) & ((link & 7) == k[None, :]), link >> 3, -1)
    input_rows = tl.where(kind == SAME, same, tl.where(kind == DOWN, child, parent))
    where = wide + e.to(tl.int64)[None, :] * block + b[:, None]
    tl.store(inputs + where, input_rows, mask=(b < block)[:, None] & (has == 1)[None, :])
