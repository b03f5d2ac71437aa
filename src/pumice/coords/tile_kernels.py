"""Triton kernels that build the layouts of kernel maps: row orders, tiles with their kernel offsets, runs."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

OVERFLOW = tl.constexpr(4)
_NUMBERS = ["arrays", "first", "last", "shift", "then", "capacity", "tiles_most", "blocks", "width", "sampled"]


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _bits(masks, r, k, there, tapped, WORDS: tl.constexpr):
    """Bit k of row r's mask, 0 or 1."""
    word = tl.load(masks + r * WORDS + k // 31, mask=there & tapped, other=0)
    return (word >> (k % 31)) & 1


@triton.jit
def _meets(masks, groups, r, g, live, known, WORDS: tl.constexpr):
    """1 if row r has any kernel offset of group g, else 0."""
    at = groups + g * (WORDS + 1)
    common = tl.load(masks + r * WORDS, mask=live, other=0) & tl.load(at, mask=known, other=0)
    for w in range(1, WORDS):
        common |= tl.load(masks + r * WORDS + w, mask=live, other=0) & tl.load(at + w, mask=known, other=0)
    return (common != 0).to(tl.int32)


@triton.jit
def _step(rows, sampled):
    """Stride to sample at most `sampled` of `rows` rows."""
    return tl.maximum((rows + sampled - 1) // sampled, 1)


@triton.jit(do_not_specialize=_NUMBERS)
def count_groups(
    masks, count, groups, totals, sampled: "i64", capacity: "i64",
    G: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """totals[g] += number of sampled rows (at most `sampled`) with any kernel offset of group g."""
    rows = tl.load(count).to(tl.int64)
    r = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None] * _step(rows, sampled)
    live = r < rows
    lane = tl.arange(0, 32)
    for start in range(0, G, 32):
        g = start + lane
        met = _meets(masks, groups, r, g[None, :], live & (r < capacity), (g < G)[None, :], WORDS)
        tl.atomic_add(totals + g, tl.sum(tl.where(live, met, 0), axis=0), mask=g < G, sem="relaxed")


@triton.jit
def _chosen(groups, totals, rows, width, G: tl.constexpr, WORDS: tl.constexpr, SIDE: tl.constexpr):
    """[32]: index of the group for bit p of the sort key, for p < width. totals: rows per group, out of `rows`."""
    g = tl.arange(0, SIDE)
    uneven = tl.abs(2 * tl.load(totals + g, mask=g < G, other=0).to(tl.int64) - rows)
    even = tl.sort(tl.where(g < G, uneven * SIDE + g, 2**63 - 1))
    lane = tl.arange(0, 32)
    taken = lane < width
    g = tl.gather(even, lane, 0) & (SIDE - 1)
    absent = rows - tl.load(totals + g, mask=taken, other=0)
    size = tl.load(groups + g * (WORDS + 1) + WORDS, mask=taken, other=0)
    return tl.sort(tl.where(taken, size * absent * SIDE + g, 2**63 - 1)) & (SIDE - 1)


@triton.jit(do_not_specialize=_NUMBERS)
def gray_keys(
    masks, count, groups, totals, keys, counts, sampled: "i64", width: "i64", shift: "i64", capacity: "i64",
    G: tl.constexpr, WORDS: tl.constexpr, SIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    """keys[r]: sort key, the descending Gray-code rank of the bits of `width` groups that row r has.
    totals: from count_groups. shift: log2 of the superblock's rows; its index takes the high bits. Padding rows get
    the largest key. If BINS: counts[q, d] += rows of the q-th BLOCK whose lowest digit is d."""
    rows = tl.load(count).to(tl.int64)
    step = _step(rows, sampled)
    g = _chosen(groups, totals, (rows + step - 1) // step, width, G, WORDS, SIDE)[None, :]
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 32)[None, :]
    x = tl.sum(_meets(masks, groups, r[:, None], g, (r < capacity)[:, None], lane < width, WORDS) << lane, axis=1)
    x = x ^ (x >> 1)
    x = x ^ (x >> 2)
    x = x ^ (x >> 4)
    x = x ^ (x >> 8)
    x = x ^ (x >> 16)
    whole = (tl.full([ROWS], 1, tl.int64) << width) - 1
    key = (whole - x.to(tl.int64)) | ((r >> shift) << width)
    key = tl.where(r < rows, key, 2**31 - 1).to(tl.int32)
    tl.store(keys + r, key, mask=r < capacity)
    if BINS:
        tl.atomic_add(counts + r // BLOCK * BINS + (key & (BINS - 1)), 1, mask=r < capacity, sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def tile_taps(
    masks, count, order, slots, active, counts, first: "i64", last: "i64", capacity: "i64",
    K: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """slots[t, b]: row in slot b of tile t, -1 for padding. active[t, k]: 1 if any row of the tile has kernel offset k
    and first <= k < last. counts[t]: number of active offsets. SORTED: rows are in `order`, else in their own order."""
    WORDS: tl.constexpr = (K + 30) // 31
    t = tl.program_id(0).to(tl.int64)
    at = t * BLOCK + tl.arange(0, BLOCK)
    live = (at < tl.load(count)) & (at < capacity)
    if SORTED:
        # Masked by capacity: the load does not wait for that of the count.
        r = tl.load(order + at, mask=at < capacity, other=0).to(tl.int64)
    else:
        r = at
    tl.store(slots + at, tl.where(live, r, -1).to(tl.int32))
    lane = tl.arange(0, 32)
    total = tl.sum(tl.zeros([32], tl.int32))
    for w in range(0, WORDS):
        word = tl.where(live, tl.load(masks + r * WORDS + w, mask=at < capacity, other=0), 0)
        k = w * 31 + lane
        has = (tl.reduce(word, 0, _or) >> lane) & 1
        has = tl.where((lane < 31) & (k >= first) & (k < last), has, 0)
        tl.store(active + t * K + k, has.to(tl.int8), mask=(lane < 31) & (k < K))
        total += tl.sum(has)
    tl.store(counts + t, total)


@triton.jit
def _add_up(counts, size, BLOCK: tl.constexpr):
    """In-place inclusive prefix sum of `size` counts."""
    before = tl.sum(tl.zeros([BLOCK], tl.int32))
    for start in range(0, size, BLOCK):
        t = start + tl.arange(0, BLOCK)
        own = tl.load(counts + t, mask=t < size, other=0)
        tl.store(counts + t, before + tl.cumsum(own, axis=0), mask=t < size)
        before += tl.sum(own)


@triton.jit(do_not_specialize=_NUMBERS)
def add_up(counts, tiles_most: "i64", BLOCK: tl.constexpr):
    """In-place inclusive prefix sum of counts; one program."""
    _add_up(counts, tiles_most, BLOCK)


@triton.jit(do_not_specialize=_NUMBERS)
def fill_tiles(
    rows, slots, active, ends, taps, tiles, inputs, status, capacity: "i64", tiles_most: "i64",
    K: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the entries of tile t, one per active kernel offset, from ends[t - 1] on: offset, t, inputs of its rows.
    More than `capacity` set OVERFLOW. Programs past the T tiles write LANES padding entries each: tile T, inputs -1."""
    t = tl.program_id(0)
    b = tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, LANES)
    if t < tiles_most:
        if tl.load(ends + t) > capacity:
            tl.atomic_or(status, OVERFLOW)
        r = tl.load(slots + t.to(tl.int64) * BLOCK + b).to(tl.int64)
        entry = tl.load(ends + t - 1, mask=t > 0, other=0).to(tl.int64)
        for start in range(0, K, LANES):
            # One-dimensional scan: Triton 3.6 cannot lower others of this shape.
            one = tl.load(active + t.to(tl.int64) * K + start + lane, mask=start + lane < K, other=0).to(tl.int32)
            k, has = start + lane[None, :], one[None, :]
            e = (entry + tl.cumsum(one, axis=0) - one)[None, :]
            on = (has == 1) & (e < capacity)
            tl.store(taps + e, k.to(tl.int32), mask=on)
            tl.store(tiles + e, tl.zeros_like(k) + t, mask=on)
            met = tl.load(rows + r * K + k, mask=on & (r >= 0), other=-1)
            tl.store(inputs + e * BLOCK + b, met, mask=on & (b >= 0))
            entry += tl.sum(one)
    else:
        total = tl.load(ends + tiles_most - 1, mask=tiles_most > 0, other=0).to(tl.int64)
        e = ((t - tiles_most).to(tl.int64) * LANES + lane)[None, :]
        on = (e >= total) & (e < capacity)
        tl.store(taps + e, tl.zeros_like(e).to(tl.int32), mask=on)
        tl.store(tiles + e, (tl.zeros_like(e) + tiles_most).to(tl.int32), mask=on)
        tl.store(inputs + e * BLOCK + b, (tl.zeros_like(e) - 1 + tl.zeros_like(b)).to(tl.int32), mask=on & (b >= 0))


@triton.jit(do_not_specialize=_NUMBERS)
def transpose_table(rows, count, turned, K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """turned[i, k] = o wherever rows[o, k] = i."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    for start in range(0, K, LANES):
        k = start + tl.arange(0, LANES)[None, :]
        met = tl.load(rows + r * K + k, mask=live & (k < K), other=-1)
        at = tl.where(met >= 0, met, 0).to(tl.int64) * K + k
        tl.store(turned + at, (r + tl.zeros_like(at)).to(tl.int32), mask=met >= 0)


@triton.jit
def _digits(keys, r, shift, capacity, BINS: tl.constexpr, FIRST: tl.constexpr):
    """(digit, entry: key << 32 | row) at positions r, the greatest digit past the end. FIRST: `keys` has keys only."""
    if FIRST:
        entry = (tl.load(keys + r, mask=r < capacity, other=2**31 - 1).to(tl.int64) << 32) | r
    else:
        entry = tl.load(keys + r, mask=r < capacity, other=2**63 - 1)
    return ((entry >> (32 + shift)) & (BINS - 1)).to(tl.int32), entry


@triton.jit(do_not_specialize=_NUMBERS)
def scan_digits(
    counts, total, blocks: "i64", BINS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """In-place exclusive prefix sum over p of counts[p, d], for p <= blocks. If BLOCK, `blocks` is at most the
    number of BLOCK-row blocks that `total` rows take."""
    if BLOCK:
        blocks = tl.minimum(blocks, (tl.load(total).to(tl.int64) + BLOCK - 1) // BLOCK)
    d = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    before = tl.zeros([1, COLUMNS], tl.int32)
    for start in range(0, blocks.to(tl.int32) + 1, ROWS):
        p = start + tl.arange(0, ROWS)[:, None]
        at = counts + p.to(tl.int64) * BINS + d
        own = tl.load(at, mask=p < blocks, other=0)
        tl.store(at, before + tl.cumsum(own, axis=0) - own, mask=p <= blocks)
        before += tl.sum(own, axis=0)[None, :]


@triton.jit(do_not_specialize=_NUMBERS)
def place_digits(
    keys, starts, later, found, total, shift: "i64", capacity: "i64", blocks: "i64",
    BINS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Scatter a block's entries into stable order by digit. COUNTED: there are `total` entries, else `capacity`.
    starts: from scan_digits. LAST: write rows only; else later[q, d] += entries of next digit d placed in block q."""
    if COUNTED:
        capacity = tl.load(total).to(tl.int64)
        blocks = (capacity + BLOCK - 1) // BLOCK
    if tl.program_id(0) < blocks:
        _place(keys, starts, later, found, shift, capacity, blocks, BINS, BLOCK, FIRST, LAST)


@triton.jit
def _place(
    keys, starts, later, found, shift, capacity, blocks,
    BINS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    digit, _ = _digits(keys, at, shift, capacity, BINS, FIRST)
    r, place = _places(digit, starts, blocks, BINS, BLOCK)
    _, entry = _digits(keys, r, shift, capacity, BINS, FIRST)
    if LAST:
        tl.store(found + place, entry.to(tl.int32), mask=r < capacity)
    else:
        tl.store(found + place, entry, mask=r < capacity)
        then = ((entry >> (32 + shift)) // BINS & (BINS - 1)).to(tl.int32)
        tl.atomic_add(later + place // BLOCK * BINS + then, 1, mask=r < capacity, sem="relaxed")


@triton.jit
def _places(digit, starts, blocks, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """(positions of the program's entries in stable order by digit, their positions in the result). digit: of each
    entry."""
    p = tl.program_id(0)
    bins = tl.arange(0, BINS)
    totals = tl.load(starts + blocks * BINS + bins)
    mine = tl.load(starts + p * BINS + bins)
    own = tl.load(starts + (p + 1) * BINS + bins) - mine
    # By digit: first position of the program's entries in the result, less that within the program.
    begin = tl.cumsum(totals, axis=0) - totals + mine - (tl.cumsum(own, axis=0) - own)
    at = tl.arange(0, BLOCK)
    inner = tl.sort(digit * BLOCK + at)
    return p.to(tl.int64) * BLOCK + inner % BLOCK, tl.gather(begin, inner // BLOCK, 0) + at


@triton.jit(do_not_specialize=_NUMBERS)
def place_pairs(
    keys, values, starts, later, found, payload, total, shift: "i64", then: "i64", capacity: "i64",
    BINS: tl.constexpr, BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """As place_digits, of int64 keys with int32 values: `found` receives the keys unless LAST, `payload` the values.
    shift, then: lowest bits of this and the next digit. There are `total` pairs, at most `capacity`."""
    capacity = tl.minimum(tl.load(total).to(tl.int64), capacity)
    blocks = (capacity + BLOCK - 1) // BLOCK
    if tl.program_id(0) < blocks:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        key = tl.load(keys + at, mask=at < capacity, other=-1)
        r, place = _places(((key >> shift) & (BINS - 1)).to(tl.int32), starts, blocks, BINS, BLOCK)
        valid = r < capacity
        tl.store(payload + place, tl.load(values + r, mask=valid, other=0), mask=valid)
        if not LAST:
            key = tl.load(keys + r, mask=valid, other=-1)
            tl.store(found + place, key, mask=valid)
            tl.atomic_add(later + place // BLOCK * BINS + ((key >> then) & (BINS - 1)), 1, mask=valid, sem="relaxed")


@triton.jit
def rank_rows(keys, total, order, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """order: the stable argsort of the first `total` keys. A row's place is the number of rows with lesser keys, and of
    those with equal keys before it."""
    count = tl.load(total)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(keys + r, mask=r < count, other=0)
    place = tl.zeros([ROWS], tl.int32)
    for start in range(0, count, BLOCK):
        q = start + tl.arange(0, BLOCK)
        other = tl.load(keys + q, mask=q < count, other=2**31 - 1)[None, :]
        ahead = (other < own[:, None]) | ((other == own[:, None]) & (q[None, :] < r[:, None]))
        place += tl.sum(ahead.to(tl.int32), axis=1)
    tl.store(order + place, r, mask=r < count)


@triton.jit
def _first_not_below(array, value, size, steps):
    """Lower bound of each value in a sorted array."""
    low = tl.zeros_like(value)
    high = low + size.to(tl.int32)
    for _ in range(steps.to(tl.int32)):
        on = low < high
        middle = low + (high - low) // 2
        below = tl.load(array + middle, mask=on, other=0) < value
        low = tl.where(on & below, middle + 1, low)
        high = tl.where(on & ~below, middle, high)
    return low


@triton.jit(do_not_specialize=["size", "steps", "count", "most", "places"])
def order_runs(
    array, values, starts, stops, firsts, numbers,
    size: "i64", steps: "i64", count: "i64", most: "i64", places: "i64",
    LONG: tl.constexpr, SIDE: tl.constexpr, BITS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write runs of the values 0 to count - 1 in a sorted array of `size` entries, longest first; one program. PIECES:
    runs cut into pieces of at most `most` entries, `places` with padding. steps: bits of size. SIDE: 2**BITS."""
    i = tl.arange(0, SIDE)
    live = i < count
    begin = _first_not_below(array, i, size, steps)
    length = tl.where(live, _first_not_below(array, i + 1, size, steps) - begin, 0)
    own = tl.sort(tl.where(live, LONG - tl.minimum(length, LONG), LONG + 1) * SIDE + i) % SIDE
    begin, length = tl.gather(begin, own, 0), tl.gather(length, own, 0)
    if PIECES:
        number = tl.where(live, tl.maximum((length + most.to(tl.int32) - 1) // most.to(tl.int32), 1), 0)
        ends = tl.cumsum(number, axis=0)
        each = (length + number - 1) // tl.maximum(number, 1)
        for first in range(0, places.to(tl.int32), SIDE):
            p = first + i
            # Binary search: number of runs whose pieces end before or at p.
            owner = tl.zeros_like(p)
            for bit in tl.static_range(1, BITS + 1):
                ahead = owner + (SIDE >> bit)
                owner = tl.where(tl.gather(ends, ahead - 1, 0) <= p, ahead, owner)
            on, filling = p < places, p >= tl.max(ends)
            owner = tl.minimum(owner, count.to(tl.int32) - 1)
            whole, long, low = tl.gather(number, owner, 0), tl.gather(each, owner, 0), tl.gather(begin, owner, 0)
            at = tl.gather(ends, owner, 0) - whole
            stop = low + tl.gather(length, owner, 0)
            start = tl.minimum(low + (p - at) * long, stop)
            tl.store(values + p, tl.where(filling, 0, tl.gather(own, owner, 0)), mask=on)
            tl.store(starts + p, tl.where(filling, 0, start), mask=on)
            tl.store(stops + p, tl.where(filling, 0, tl.minimum(start + long, stop)), mask=on)
            tl.store(firsts + p, tl.where(filling, p, at), mask=on)
            tl.store(numbers + p, tl.where(filling, 0, whole), mask=on)
    else:
        tl.store(values + i, own, mask=live)
        tl.store(starts + i, begin, mask=live)
        tl.store(stops + i, begin + length, mask=live)


@triton.jit
def _run(ends, i, count, size):
    """(start, length) of run i in an array of `size` entries; length 0 if i >= count."""
    begin = tl.minimum(tl.load(ends + i - 1, mask=(i > 0) & (i < count), other=0), size)
    return begin, tl.maximum(tl.minimum(tl.load(ends + i, mask=i < count, other=0), size) - begin, 0)


@triton.jit
def _in_order(
    ends, values, starts, stops, firsts, numbers, program, programs, size, count, most, places,
    BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the pieces of the program's BLOCK runs at their positions in the order of all runs, longest first.
    A counting sort: a run follows longer ones, and earlier ones of equal length. Lengths must be below BINS - 1."""
    first = program * BLOCK
    bins = tl.arange(0, BINS)
    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for start in range(0, count, CHUNK):
        j = start + tl.arange(0, CHUNK)
        _, length = _run(ends, j, count, size)
        total += tl.histogram(tl.where(j < count, length, BINS - 1), BINS)
        if start < first:
            before += tl.histogram(tl.where((j < first) & (j < count), length, BINS - 1), BINS)
    parts = tl.maximum((bins + most - 1) // most, 1)
    whole = tl.where(bins < BINS - 1, total * parts, 0)
    used = tl.sum(whole)
    lead = used - tl.cumsum(whole, axis=0) + before * parts
    i, other = first + tl.arange(0, BLOCK), first + tl.arange(0, BLOCK)[None, :]
    begin, length = _run(ends, i, count, size)
    _, alike = _run(ends, other, count, size)
    within = tl.sum(((alike == length[:, None]) & (other < i[:, None])).to(tl.int32), axis=1)
    number = tl.maximum((length + most - 1) // most, 1)
    each = (length + number - 1) // number
    at = tl.sum(tl.where(length[:, None] == bins[None, :], lead[None, :], 0), axis=1) + within * number
    live = i < count
    for piece in range(0, tl.max(tl.where(live, number, 0))):
        on = live & (piece < number) & (at + piece < places)
        done = tl.minimum(piece * each, length)
        tl.store(values + at + piece, i, mask=on)
        tl.store(starts + at + piece, begin + done, mask=on)
        tl.store(stops + at + piece, begin + tl.minimum(done + each, length), mask=on)
        tl.store(firsts + at + piece, at, mask=on)
        tl.store(numbers + at + piece, number, mask=on)
    for place in range(used + first, places, programs * BLOCK):
        p = place + tl.arange(0, BLOCK)
        on, none = p < places, tl.zeros([BLOCK], tl.int32)
        tl.store(values + p, none, mask=on)
        tl.store(starts + p, none, mask=on)
        tl.store(stops + p, none, mask=on)
        tl.store(firsts + p, p, mask=on)
        tl.store(numbers + p, none, mask=on)


@triton.jit(do_not_specialize=["size", "count", "most", "places"])
def order_counted(
    ends, values, starts, stops, firsts, numbers, size: "i64", count: "i64", most: "i64", places: "i64",
    BINS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As order_runs with PIECES, for short runs with known ends; ends past the array's `size` are clamped to it."""
    _in_order(
        ends, values, starts, stops, firsts, numbers, tl.program_id(0), tl.num_programs(0),
        size.to(tl.int32), count.to(tl.int32), most.to(tl.int32), places.to(tl.int32), BINS, BLOCK, CHUNK,
    )  # fmt: skip


@triton.jit
def _copy(source, to, block, size, BLOCK: tl.constexpr):
    """to[i] = source[i] for i < size within a block."""
    i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to + i, tl.load(source + i, mask=i < size), mask=i < size)


@triton.jit(do_not_specialize=["rows", "size_a", "size_b", "size_c"])
def put(
    a, b, c, to_a, to_b, to_c, count, rows: "i64", size_a: "i64", size_b: "i64", size_c: "i64", BLOCK: tl.constexpr
):  # fmt: skip
    """Copy a to to_a, b to to_b, c to to_c; count[0] = rows."""
    p = tl.program_id(0)
    if p == 0:
        tl.store(count, rows.to(tl.int32))
    own_a, own_b = tl.cdiv(size_a, BLOCK), tl.cdiv(size_b, BLOCK)
    if p < own_a:
        _copy(a, to_a, p, size_a, BLOCK)
    elif p < own_a + own_b:
        _copy(b, to_b, p - own_a, size_b, BLOCK)
    else:
        _copy(c, to_c, p - own_a - own_b, size_c, BLOCK)
