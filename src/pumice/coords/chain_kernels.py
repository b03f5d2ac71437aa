"""Triton kernels of coords.chain, which build all levels and kernel maps of a network together. Sizes are read from
device memory (`words`, see coords.chain; `layout`, see chain_tiles), so no launch waits for the host; `status` receives
error bits. BUFFERED: coordinates are in a buffer of `rows` rows, `count` of them valid, and `limits` has the capacities
of levels (BufferedChain)."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

from pumice.coords.lookup_kernels import _load_rows, _slot
from pumice.coords.tile_kernels import _in_order, _or, _step

DUPLICATE, RANGE, OVERFLOW = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
CELLS = tl.constexpr(4)  # words[CELLS]: distinct cells of all coarser levels
COUNTS, STRIDE = tl.constexpr(8), tl.constexpr(4)  # Level l has words[COUNTS + STRIDE * l] rows
LEVELS = tl.constexpr(8)
ENTRIES = tl.constexpr(8 + 4 * 8)  # words[ENTRIES + s]: tile entries of segment s
SIDE = tl.constexpr(32)  # Entries of a row of `plan`, `layout` and `limits`, and of a map's pair counts
PAIRS = tl.constexpr(8 + 4 * 8 + 32)  # words[PAIRS + SIDE * m + k]: pairs of kernel offset k of map m
GROUPS = tl.constexpr(64)  # Maximum groups of kernel offsets of a map
BATCHES = tl.constexpr(1 << 10)
FAR = tl.constexpr(1 << 30)  # Bias of the box in `words`; larger coordinates are refused
TAG = tl.constexpr(61)  # Lowest bit of the level in a key
FREE = tl.constexpr(0)  # Key of an empty slot, so that a table is cleared with other arrays
NEVER = tl.constexpr(-(2**63))  # Idle lanes compare with it and store it, which changes nothing
PROBES = tl.constexpr(1 << 10)  # Maximum slots probed; an insertion that needs more sets OVERFLOW
# Rows of `plan`: levels of outputs and inputs, kernel offsets, 1 if UP, minimum rows to sort a map; coefficients of the
# starts of tables and masks (chain._coefficients); first of the map's kernel offsets; strides
OUTPUT, INPUT, VOLUME, TURNED, LEAST = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4),
)  # fmt: skip
TABLE_ROWS, TABLE_MOST, MASK_ROWS, MASK_MOST, FIRST_OFFSET, STEP = (
    tl.constexpr(5), tl.constexpr(6), tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10),
)  # fmt: skip
# Rows of `layout`, see chain_tiles.lay_out
ROWS, FIRST_ROW, BLOCK_ROWS, TILES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FIRST_SLOT, FIRST_TILE, FIRST_MASK, SORTS = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
TILES_BEFORE, TOTAL, CHOSEN = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
# Rows of `limits`: capacity and first row in `coarse`, by level; starts of table and masks, programs before, by map
LIMIT, FIRST, TABLE, MASK, BEFORE = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4),
)  # fmt: skip
_NUMBERS = [
    "rows", "most", "room", "batch", "low0", "low1", "low2", "low3", "high0", "high1", "high2", "high3", "last",
    "sampled", "segments", "few", "per", "width", "maps", "lists", "blocks", "filled", "half", "item_at", "level_at",
]  # fmt: skip


@triton.jit
def _rows_of(words, level, rows, most):
    """Rows of a level; of a coarser one at most its capacity."""
    return tl.where(level == 0, rows, tl.minimum(tl.load(words + COUNTS + STRIDE * level), most)).to(tl.int32)


@triton.jit
def _room_of(limits, level, most, BUFFERED: tl.constexpr):
    """(first row in `coarse`, capacity) of a coarser level."""
    if BUFFERED:
        begin, limit = tl.load(limits + FIRST * SIDE + level), tl.load(limits + LIMIT * SIDE + level)
    else:
        begin, limit = (level - 1) * most, most
    return begin, limit


@triton.jit
def _upper_bits(level, item, D: tl.constexpr, AXIS: tl.constexpr):
    """Bits of a key above those of coordinates. Keys are not FREE: of several axes, no margin reaches the first cell;
    for a single axis bit 60 is set."""
    bits = ((level.to(tl.int64) - 4) << TAG) + (item << (D * AXIS))
    if AXIS == 32:
        bits += (item * 0 + 1) << 60
    return bits


@triton.jit
def _reached(low, moves, level, valid, a: tl.constexpr, D: tl.constexpr):
    """(first, last, True if not empty): range of coordinates along axis a that the coordinate `low` reaches on a level.
    moves: see chain._moves."""
    if D == 1:
        # Differences may exceed int32.
        low = low.to(tl.int64)
    high, any_ = low, valid
    for n in range(level):
        at = moves + (n * D + a) * 5
        step = tl.load(at + 2)
        first, last = low - tl.load(at + 1), high - tl.load(at)
        rest, over = first % step, last % step
        # Round `first` up and `last` down.
        first = first // step + (rest > 0).to(tl.int32)
        last = last // step - (over < 0).to(tl.int32)
        low, high = tl.maximum(first, tl.load(at + 3)), tl.minimum(last, tl.load(at + 4))
        any_ = any_ & (low <= high)
    return low, high, any_


@triton.jit(do_not_specialize=_NUMBERS)
def insert_cells(
    coords, moves, table, values, found, slots, digits, words, status, count, rows: "i64", room: "i64", last: "i64",
    half: "i64", item_at: "i64", level_at: "i64",
    batch: "i64", low0: "i64", low1: "i64", low2: "i64", low3: "i64", high0: "i64", high1: "i64", high2: "i64",
    high3: "i64",
    D: tl.constexpr, AXIS: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    BUFFERED: tl.constexpr, BINS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """Insert the cells that rows reach on one level into the hash table. Finest level: a row is its own cell, `values`
    receives its number, duplicates set DUPLICATE. Coarser levels: found, slots receive sort keys and slots of the
    distinct cells, unordered; digits[q, d] += cells of the q-th SORTED whose lowest digit is d. `words` receives row
    counts, batch items and, if D > 1 and not BUFFERED, the box. Rows outside the given box or the key range set RANGE.
    WIDE: maximum cells along an axis that a row reaches. half, item_at, level_at: see chain.KeyLayout."""
    blocks = tl.cdiv(rows, BLOCK)
    level = (tl.program_id(0) // blocks).to(tl.int32)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    living = rows
    if BUFFERED:
        living = tl.load(count).to(tl.int64)
    valid = i < living
    lane = tl.arange(0, LANES)[None, :]
    b, c0, c1, c2, c3 = _load_rows(coords, i, valid, D)
    item = b.to(tl.int64)
    inside = valid & (item >= 0) & (item < batch) & (item < BATCHES)
    bias = (item * 0 + 1) << (AXIS - 1)
    there = inside[:, None] & (lane < WIDE**D) & ((level > 0) | (lane == 0))
    linear = _upper_bits(level, item, D, AXIS)[:, None] + tl.zeros([1, LANES], tl.int64)
    first_bits = ((level.to(tl.int64) - 1) << level_at) + (item << item_at)
    sorted_by = first_bits[:, None] + tl.zeros([1, LANES], tl.int64)
    for a in tl.static_range(D):
        own = c0 if a == 0 else (c1 if a == 1 else (c2 if a == 2 else c3))
        c = own.to(tl.int64)
        low = low0 if a == 0 else (low1 if a == 1 else (low2 if a == 2 else low3))
        high = high0 if a == 0 else (high1 if a == 1 else (high2 if a == 2 else high3))
        fits = (c >= low) & (c <= high) & (c > -bias + 64) & (c < bias - 64)
        if AXIS == 32:
            fits = (c >= low) & (c <= high)
        inside = inside & fits
        if AXIS < 32 and not BUFFERED:  # noqa: SIM102  (known when the kernel is compiled)
            if level == 0:
                box = words + COUNTS + STRIDE * a
                tl.atomic_max(box + 1, (tl.max(tl.where(valid, c, -FAR)) + FAR).to(tl.int32))
                tl.atomic_max(box + 2, (tl.max(tl.where(valid, -c, -FAR)) + FAR).to(tl.int32))
        begin, end, any_ = _reached(own, moves, level, valid, a, D)
        value = begin.to(tl.int64)[:, None] + lane // WIDE ** (D - 1 - a) % WIDE
        there = there & fits[:, None] & any_[:, None] & (value <= end[:, None])
        linear += (value + bias[:, None]) << (AXIS * (D - 1 - a))
        for bit in tl.static_range(AXIS):
            sorted_by += (((value + half) >> bit) & 1) << (D * bit + D - 1 - a)
    if level == 0:
        tl.atomic_max(words + 1, tl.max(tl.where(valid, item, -1)).to(tl.int32) + 1)
    if tl.sum((valid & ~inside).to(tl.int32)) > 0:
        tl.atomic_or(status, RANGE)
    key = tl.reshape(linear, [BLOCK * LANES])
    sorted_by = tl.reshape(sorted_by, [BLOCK * LANES])
    row = tl.reshape(i[:, None] + tl.zeros([1, LANES], tl.int64), [BLOCK * LANES])
    pending = tl.reshape(there.to(tl.int32), [BLOCK * LANES]) > 0
    slot, step = _slot(key, last)
    new, twice = key != key, key != key
    turn = 0
    while (tl.sum(pending.to(tl.int32)) > 0) & (turn < PROBES):
        # atomic_cas takes no mask: see NEVER.
        old = tl.atomic_cas(table + slot, tl.where(pending, FREE, NEVER), tl.where(pending, key, NEVER), sem="relaxed")
        new = new | (pending & (old == FREE))
        twice = twice | (pending & (old == key))
        pending = pending & (old != FREE) & (old != key)
        slot = tl.where(pending, (slot + step) & last, slot)
        turn += 1
    if tl.sum(pending.to(tl.int32)) > 0:
        tl.atomic_or(status, OVERFLOW)
    if level == 0:
        tl.store(words + COUNTS, living.to(tl.int32))
        tl.store(values + slot, row.to(tl.int32), mask=new)
        if tl.sum(twice.to(tl.int32)) > 0:
            tl.atomic_or(status, DUPLICATE)
    else:
        mine = new.to(tl.int32)
        many = tl.sum(mine)
        tl.atomic_add(words + COUNTS + STRIDE * level, many, sem="relaxed")
        at = (tl.atomic_add(words + CELLS, many, sem="relaxed") + tl.cumsum(mine, axis=0) - mine).to(tl.int64)
        new = new & (at < room)
        tl.store(found + at, sorted_by, mask=new)
        tl.store(slots + at, slot.to(tl.int32), mask=new)
        tl.atomic_add(digits + at // SORTED * BINS + (sorted_by & (BINS - 1)), 1, mask=new, sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def place(
    slots, table, words, values, coarse, status, limits, counts, most: "i64", room: "i64",
    D: tl.constexpr, AXIS: tl.constexpr, BLOCK: tl.constexpr, BUFFERED: tl.constexpr,
):  # fmt: skip
    """Write coordinates of coarser levels in the order of the sorted slots, and row numbers to `values`. room: capacity
    of `slots`. BUFFERED: write rows of level l to counts[4 l]; set OVERFLOW if a level exceeds its capacity."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if BUFFERED:  # noqa: SIM102
        if tl.program_id(0) == 0:
            each = tl.arange(0, LEVELS)
            needed = tl.load(words + COUNTS + STRIDE * each)
            most_of = tl.load(limits + LIMIT * SIDE + each).to(tl.int32)
            tl.store(counts + 4 * each, tl.minimum(needed, most_of))
            if tl.sum((needed > most_of).to(tl.int32)) > 0:
                tl.atomic_or(status, OVERFLOW)
    valid = p < tl.minimum(tl.load(words + CELLS).to(tl.int64), room)
    slot = tl.load(slots + p, mask=valid, other=0)
    key = tl.load(table + slot, mask=valid, other=0)
    level = (key >> TAG).to(tl.int32) + 4
    row = p
    for n in tl.static_range(1, LEVELS):
        row -= tl.where(n < level, tl.load(words + COUNTS + STRIDE * n), 0)
    begin, limit = _room_of(limits, level, most, BUFFERED)
    # Cells for which there was no room are counted, so that rows of the levels after them may be negative.
    valid = valid & (row >= 0) & (row < limit)
    tl.store(values + slot, row.to(tl.int32), mask=valid)
    to = coarse + (begin + row) * (D + 1)
    tl.store(to, ((key >> (D * AXIS)) & (BATCHES - 1)).to(tl.int32), mask=valid)
    one = key * 0 + 1
    for a in tl.static_range(D):
        biased = (key >> (AXIS * (D - 1 - a))) & ((one << AXIS) - 1)
        tl.store(to + 1 + a, (biased - (one << (AXIS - 1))).to(tl.int32), mask=valid)


@triton.jit
def _aligned(count):
    """`count` rounded up to a multiple of 4."""
    return (count + 3) // 4 * 4


@triton.jit
def _popcount(x):
    """Number of set bits of a non-negative int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 0x3F


@triton.jit
def _count_groups(totals, groups, mask, sampled):
    """totals[g] += sampled rows with any kernel offset of group g in their mask. groups: mask words, then sizes."""
    g = tl.arange(0, GROUPS)
    word = tl.load(groups + g)
    has = ((mask[:, None] & word[None, :]) != 0) & sampled[:, None]
    tl.atomic_add(totals + g, tl.sum(has.to(tl.int32), axis=0), mask=word != 0, sem="relaxed")


@triton.jit
def _key_at(
    here, offsets, stride, j, v, level, turned, valid, on, D: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """(keys of the neighbours on `level` of output rows j at kernel offsets v, True where one can exist)."""
    b, c0, c1, c2, c3 = _load_rows(here, j.to(tl.int64), valid, D)
    item = b.to(tl.int64)
    key = _upper_bits(level, item, D, AXIS)[:, None] + v.to(tl.int64) * 0
    for a in tl.static_range(D):
        c = (c0 if a == 0 else (c1 if a == 1 else (c2 if a == 2 else c3)))[:, None]
        o = tl.load(offsets + v * D + a)
        step = tl.load(stride + SIDE * a)
        if AXIS == 32:
            # Sums may exceed int32.
            c, o, step = c.to(tl.int64), o.to(tl.int64), step.to(tl.int64)
        if turned != 0:
            value = (c - o) // step
            on = on & (value * step == c - o)
        else:
            value = c * step + o
        wide = value.to(tl.int64)
        half = (wide * 0 + 1) << (AXIS - 1)
        on = on & (wide >= -half) & (wide < half)
        key += (wide + half) << (AXIS * (D - 1 - a))
    return key, on


@triton.jit
def _search(table, values, key, on, last):
    """int32: row of each key, -1 if absent."""
    near = key.to(tl.int32) * 0 - 1
    slot, step = _slot(key, last)
    # Most keys are found within four probes, which need no reduction over the program's threads.
    for _ in tl.static_range(4):
        old = tl.load(table + slot, mask=on, other=FREE)
        hit = on & (old == key)
        near = tl.where(hit, tl.load(values + slot, mask=hit, other=-1), near)
        on = on & (old != FREE) & (old != key)
        slot = (slot + step) & last
    turn = 0
    while (tl.sum(tl.sum(on.to(tl.int32), axis=1), axis=0) > 0) & (turn < PROBES):
        old = tl.load(table + slot, mask=on, other=FREE)
        hit = on & (old == key)
        near = tl.where(hit, tl.load(values + slot, mask=hit, other=-1), near)
        on = on & (old != FREE) & (old != key)
        slot = (slot + step) & last
        turn += 1
    return near


@triton.jit(do_not_specialize=_NUMBERS)
def find_neighbours(
    coords, coarse, table, values, plan, offsets, groups, words, totals, tables, masks, limits, rows: "i64",
    most: "i64", last: "i64", maps: "i64", sampled: "i64",
    D: tl.constexpr, AXIS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, BUFFERED: tl.constexpr,
):  # fmt: skip
    """Write the tables and masks of all maps and, unless BUFFERED, pairs per kernel offset to words[PAIRS:] and group
    totals (_count_groups)."""
    lane = tl.arange(0, SIDE)
    fine, wide = tl.cdiv(rows, BLOCK), tl.cdiv(most, BLOCK)
    if BUFFERED:
        before = tl.load(limits + BEFORE * SIDE + lane)
    else:
        before = tl.load(plan + MASK_ROWS * SIDE + lane) * fine + tl.load(plan + MASK_MOST * SIDE + lane) * wide
    m = tl.sum(((lane < maps) & (before <= tl.program_id(0))).to(tl.int32)) - 1
    level = tl.load(plan + OUTPUT * SIDE + m)
    if BUFFERED:
        base, to = tl.load(limits + MASK * SIDE + m), tl.load(limits + TABLE * SIDE + m)
    else:
        base = tl.load(plan + MASK_ROWS * SIDE + m) * _aligned(rows) + tl.load(plan + MASK_MOST * SIDE + m) * most
        to = tl.load(plan + TABLE_ROWS * SIDE + m) * _aligned(rows) + tl.load(plan + TABLE_MOST * SIDE + m) * most
    block = tl.program_id(0) - tl.sum(tl.where(lane == m, before, 0)).to(tl.int32)
    begin, limit = _room_of(limits, level, most, BUFFERED)
    if BUFFERED:
        count = tl.minimum(tl.load(words + COUNTS + STRIDE * level), limit).to(tl.int32)
    else:
        count = _rows_of(words, level, rows, most)
    if block * BLOCK < count:
        j = block * BLOCK + tl.arange(0, BLOCK)
        valid = j < count
        v = tl.arange(0, LANES)[None, :]
        volume = tl.load(plan + VOLUME * SIDE + m)
        on = valid[:, None] & (v < volume)
        here = coords
        if level > 0:
            here = coarse + begin * (D + 1)
        key, there = _key_at(
            here, offsets + tl.load(plan + FIRST_OFFSET * SIDE + m) * D, plan + STEP * SIDE + m, j, v,
            tl.load(plan + INPUT * SIDE + m), tl.load(plan + TURNED * SIDE + m), valid, on, D, AXIS,
        )  # fmt: skip
        near = _search(table, values, key, there, last)
        tl.store(tables + (to + j.to(tl.int64) * volume)[:, None] + v, near, mask=on)
        has = (near >= 0).to(tl.int32)
        mask = tl.sum(has << v, axis=1)
        tl.store(masks + base + j, mask, mask=valid)
        if not BUFFERED:
            pairs = tl.sum(has, axis=0)[None, :]
            tl.atomic_add(words + PAIRS + m * SIDE + v, pairs, mask=v < volume, sem="relaxed")
            chosen = valid & (j % _step(count.to(tl.int64), sampled).to(tl.int32) == 0)
            _count_groups(totals + m * GROUPS, groups + m * 2 * GROUPS, mask, chosen)


@triton.jit
def _chosen_groups(groups, totals, rows, width):
    """As tile_kernels._chosen, of at most GROUPS groups: mask word for bit p of the sort key, for p < width."""
    g = tl.arange(0, GROUPS)
    known = tl.load(groups + g) != 0
    uneven = tl.abs(2 * tl.load(totals + g).to(tl.int64) - rows)
    even = tl.sort(tl.where(known, uneven * GROUPS + g, 2**63 - 1))
    taken = g < width
    best = (even & (GROUPS - 1)).to(tl.int32)
    absent = rows - tl.load(totals + best, mask=taken, other=0)
    size = tl.load(groups + GROUPS + best, mask=taken, other=0)
    last = tl.sort(tl.where(taken, size * absent * GROUPS + best, 2**63 - 1)) & (GROUPS - 1)
    return tl.where(taken, tl.load(groups + last, mask=taken, other=0), 0)


@triton.jit(do_not_specialize=_NUMBERS)
def lay_out(
    words, plan, groups, totals, layout, rows: "i64", most: "i64", segments: "i64", few: "i64", width: "i64",
    sampled: "i64",
):  # fmt: skip
    """Write `layout`: program 0 the rows before CHOSEN, program s row CHOSEN + s, the mask words by which segment s is
    sorted. few: segments of fewer rows have tiles of 64 outputs, not 128."""
    s = tl.arange(0, SIDE)
    own = _rows_of(words, tl.load(plan + OUTPUT * SIDE + s), rows, most)
    own = tl.where(s < segments, own, 0)
    if tl.program_id(0) == 0:
        block = tl.where(own < few, 64, 128)
        tiles = (own + block - 1) // block
        mask = tl.load(plan + MASK_ROWS * SIDE + s) * _aligned(rows) + tl.load(plan + MASK_MOST * SIDE + s) * most
        ends = tl.cumsum(own, axis=0)
        tl.store(layout + ROWS * SIDE + s, own)
        tl.store(layout + FIRST_ROW * SIDE + s, ends - own)
        tl.store(layout + BLOCK_ROWS * SIDE + s, block)
        tl.store(layout + TILES * SIDE + s, tiles)
        tl.store(layout + FIRST_SLOT * SIDE + s, tl.cumsum(tiles * block, axis=0) - tiles * block)
        tl.store(layout + FIRST_TILE * SIDE + s, tl.cumsum(_aligned(tiles), axis=0) - _aligned(tiles))
        tl.store(layout + FIRST_MASK * SIDE + s, mask.to(tl.int32))
        tl.store(layout + SORTS * SIDE + s, (own >= tl.load(plan + LEAST * SIDE + s)).to(tl.int32))
        tl.store(layout + TILES_BEFORE * SIDE + s, tl.cumsum(tiles, axis=0) - tiles)
        tl.store(layout + TOTAL * SIDE + s, tl.sum(own) + s * 0)
    m = tl.program_id(0)
    count = tl.sum(tl.where(s == m, own, 0)).to(tl.int64)
    step = _step(count, sampled)
    known = tl.load(groups + m * 2 * GROUPS + tl.arange(0, GROUPS)) != 0
    used = tl.minimum(width, tl.sum(known.to(tl.int64)))
    chosen = _chosen_groups(groups + m * 2 * GROUPS, totals + m * GROUPS, (count + step - 1) // step, used)
    g = tl.arange(0, GROUPS)
    tl.store(layout + (CHOSEN + m) * SIDE + g, chosen, mask=g < SIDE)


@triton.jit(do_not_specialize=_NUMBERS)
def order_keys(
    layout, groups, masks, keys, counts, per: "i64", width: "i64",
    ROWS_EACH: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """keys: sort key of each row, segment << width | descending Gray-code rank as in gray_keys, 0 if unsorted. If BINS:
    counts[q, d] += rows of the q-th BLOCK, over all segments, whose lowest digit is d. per: programs per segment."""
    s = (tl.program_id(0) // per).to(tl.int32)
    first = (tl.program_id(0) % per).to(tl.int32) * ROWS_EACH
    rows = tl.load(layout + ROWS * SIDE + s)
    if first < rows:
        r = first + tl.arange(0, ROWS_EACH)
        valid = r < rows
        mask = tl.load(masks + tl.load(layout + FIRST_MASK * SIDE + s) + r, mask=valid, other=0)
        known = tl.load(groups + s * 2 * GROUPS + tl.arange(0, GROUPS)) != 0
        used = tl.minimum(width.to(tl.int32), tl.sum(known.to(tl.int32)))
        lane = tl.arange(0, SIDE)
        chosen = tl.load(layout + (CHOSEN + s) * SIDE + lane)
        x = tl.sum(((mask[:, None] & chosen[None, :]) != 0).to(tl.int32) << lane[None, :], axis=1)
        x = x ^ (x >> 1)
        x = x ^ (x >> 2)
        x = x ^ (x >> 4)
        x = x ^ (x >> 8)
        x = x ^ (x >> 16)
        key = tl.where(tl.load(layout + SORTS * SIDE + s) != 0, (1 << used) - 1 - x, 0)
        key = (s << width.to(tl.int32)) | key
        at = tl.load(layout + FIRST_ROW * SIDE + s) + r
        tl.store(keys + at, key, mask=valid)
        if BINS:
            bin = (at // BLOCK).to(tl.int64) * BINS + (key & (BINS - 1))
            tl.atomic_add(counts + bin, 1, mask=valid, sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def tile_segments(layout, order, masks, slots, tile_masks, per: "i64", BLOCK: tl.constexpr):
    """slots: rows of each tile of each segment, -1 for padding; tile_masks: kernel offsets of any row of a tile."""
    s = (tl.program_id(0) // per).to(tl.int32)
    t = (tl.program_id(0) % per).to(tl.int32)
    rows, block = tl.load(layout + ROWS * SIDE + s), tl.load(layout + BLOCK_ROWS * SIDE + s)
    if t * block < rows:
        first, lane = tl.load(layout + FIRST_ROW * SIDE + s), tl.arange(0, BLOCK)
        at = t * block + lane
        valid = (lane < block) & (at < rows)
        r = tl.load(order + first + at, mask=valid, other=0) - first
        tl.store(slots + tl.load(layout + FIRST_SLOT * SIDE + s) + at, tl.where(valid, r, -1), mask=lane < block)
        mask = tl.load(masks + tl.load(layout + FIRST_MASK * SIDE + s) + r, mask=valid, other=0)
        tl.store(tile_masks + tl.load(layout + FIRST_TILE * SIDE + s) + t, tl.reduce(mask, 0, _or))


@triton.jit
def end_tiles(layout, tile_masks, ends, words, BLOCK: tl.constexpr):
    """ends: inclusive prefix counts of the tiles' entries; words[ENTRIES + s]: their total. Program s: segment s."""
    s = tl.program_id(0)
    tiles, first = tl.load(layout + TILES * SIDE + s), tl.load(layout + FIRST_TILE * SIDE + s)
    before = tl.sum(tl.zeros([BLOCK], tl.int32))
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        own = _popcount(tl.load(tile_masks + first + t, mask=t < tiles, other=0))
        tl.store(ends + first + t, before + tl.cumsum(own, axis=0), mask=t < tiles)
        before += tl.sum(own)
    tl.store(words + ENTRIES + s, before)


@triton.jit(do_not_specialize=_NUMBERS)
def fill_segments(
    plan, layout, words, slots, tile_masks, ends, tables, wanted, taps, turned, tiles, inputs, pieces, rows: "i64",
    most: "i64", segments: "i64", filled: "i64", lists: "i64", blocks: "i64",
    BLOCK: tl.constexpr, LANES: tl.constexpr, BINS: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The first `filled` programs write the entries of one tile each, the others lists of pieces (_cut_runs)."""
    if tl.program_id(0) < filled:
        _fill_tile(
            plan, layout, words, slots, tile_masks, ends, tables, taps, turned, tiles, inputs, rows, most, segments,
            tl.program_id(0), BLOCK, LANES,
        )  # fmt: skip
    else:
        p = tl.program_id(0) - filled.to(tl.int32)
        _cut_runs(layout, words, wanted, ends, pieces, p, lists, blocks, BINS, RUNS, CHUNK)


@triton.jit
def _fill_tile(
    plan, layout, words, slots, tile_masks, ends, tables, taps, turned, tiles, inputs, rows, most, segments, program,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the entries of one tile, as tile_kernels.fill_tiles; segments are concatenated. turned: K - 1 - taps."""
    lane = tl.arange(0, SIDE)
    before = tl.load(layout + TILES_BEFORE * SIDE + lane)
    s = tl.sum(((lane < segments) & (before <= program)).to(tl.int32)) - 1
    t = program - tl.load(layout + TILES_BEFORE * SIDE + s)
    block = tl.load(layout + BLOCK_ROWS * SIDE + s)
    sizes = tl.where(lane < s, tl.load(words + ENTRIES + lane), 0).to(tl.int64)
    own = tl.sum(_aligned(sizes))
    wide = tl.sum(sizes * tl.load(layout + BLOCK_ROWS * SIDE + lane))
    tile = tl.load(layout + FIRST_TILE * SIDE + s) + t
    k = tl.arange(0, LANES)
    has = (tl.load(tile_masks + tile) >> k) & 1
    e = tl.load(ends + tile) - tl.sum(has) + tl.cumsum(has, axis=0) - has
    volume = tl.load(plan + VOLUME * SIDE + s)
    tl.store(taps + own + e, k, mask=has == 1)
    tl.store(turned + own + e, volume - 1 - k, mask=has == 1)
    tl.store(tiles + own + e, k * 0 + t, mask=has == 1)
    b = tl.arange(0, BLOCK)
    slot = tl.load(slots + tl.load(layout + FIRST_SLOT * SIDE + s) + t * block + b, mask=b < block, other=-1)
    base = tl.load(plan + TABLE_ROWS * SIDE + s) * _aligned(rows) + tl.load(plan + TABLE_MOST * SIDE + s) * most
    at = base + slot.to(tl.int64) * volume
    on = (slot >= 0)[:, None] & (has == 1)[None, :]
    input_rows = tl.load(tables + at[:, None] + k[None, :], mask=on, other=-1)
    where = wide + e.to(tl.int64)[None, :] * block + b[:, None]
    tl.store(inputs + where, input_rows, mask=(b < block)[:, None] & (has == 1)[None, :])


@triton.jit
def _cut_runs(
    layout, words, wanted, ends, out, program, lists, blocks,
    BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write lists of pieces of segments' runs, as tile_kernels.order_counted, `blocks` programs per list. wanted: a row
    of the lists' segments and one of their maximum piece lengths, GROUPS each. out: five aligned arrays per list."""
    lane = tl.arange(0, GROUPS)
    s, most = tl.load(wanted + lane), tl.load(wanted + GROUPS + lane)
    count, size = tl.load(layout + TILES * SIDE + s), tl.load(words + ENTRIES + s)
    places = count + size // most
    q = (program // blocks).to(tl.int32)
    own = lane == q
    begin = tl.sum(tl.where(lane < q, 5 * _aligned(places), 0).to(tl.int64))
    count, size = tl.sum(tl.where(own, count, 0)), tl.sum(tl.where(own, size, 0))
    most, places = tl.sum(tl.where(own, most, 0)), tl.sum(tl.where(own, places, 0))
    first = tl.sum(tl.where(own, tl.load(layout + FIRST_TILE * SIDE + s), 0))
    found, each = out + begin, _aligned(places)
    _in_order(
        ends + first, found, found + each, found + 2 * each, found + 3 * each, found + 4 * each,
        (program % blocks).to(tl.int32), blocks.to(tl.int32), size, count, most, places,
        BINS, BLOCK, CHUNK,
    )  # fmt: skip
