"""Kernels that lay a kernel map out for feature kernels: orders of rows, tiles with their taps, lists of pairs.

Only `compact.py`, where the twins in plain torch are, imports this file: it needs Triton.
"""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

OVERFLOW = tl.constexpr(4)
_NUMBERS = ["first", "last", "shift", "capacity", "tiles_most", "group", "blocks"]


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _bits(masks, r, k, there, tapped, WORDS: tl.constexpr):
    """Bit k of row r's mask, 0 or 1."""
    word = tl.load(masks + r * WORDS + k // 31, mask=there & tapped, other=0)
    return (word >> (k % 31)) & 1


@triton.jit(do_not_specialize=_NUMBERS)
def tally(masks, count, sums, blocks: "i64", K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """sums[k, program]: how many of the program's rows have tap k."""
    WORDS: tl.constexpr = (K + 30) // 31
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    for start in range(0, K, LANES):
        k = start + tl.arange(0, LANES)[None, :]
        bits = _bits(masks, r, k, live, k < K, WORDS)
        tl.store(sums + k * blocks + tl.program_id(0), tl.sum(bits, axis=0)[None, :], mask=k < K)


@triton.jit(do_not_specialize=_NUMBERS)
def count_taps(masks, count, totals, K: tl.constexpr, ROWS: tl.constexpr):
    """totals[k] += how many rows have tap k."""
    WORDS: tl.constexpr = (K + 30) // 31
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = r < tl.load(count)
    lane = tl.arange(0, 32)
    for w in range(0, WORDS):
        word = tl.load(masks + r * WORDS + w, mask=live, other=0)
        found = tl.sum((word[:, None] >> lane[None, :]) & 1, axis=0)
        tl.atomic_add(totals + w * 31 + lane, found, mask=(lane < 31) & (w * 31 + lane < K), sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def rank_taps(totals, ranks, first: "i64", last: "i64", SIDE: tl.constexpr):
    """ranks[p] = the tap of taps [first, last) that is the p-th most frequent, the first of equals first."""
    k = tl.arange(0, SIDE)
    tapped = (k >= first) & (k < last)
    mine = tl.load(totals + k, mask=tapped, other=0)
    place = tl.zeros([SIDE], tl.int32)
    for start in range(0, last.to(tl.int32), 32):
        j = (start + tl.arange(0, 32))[:, None]
        other = tl.load(totals + j, mask=(j >= first) & (j < last), other=-1)
        more = (other > mine[None, :]) | ((other == mine[None, :]) & (j < k[None, :]))
        place += tl.sum((more & (other >= 0)).to(tl.int32), axis=0)
    tl.store(ranks + place, k, mask=tapped)


@triton.jit(do_not_specialize=_NUMBERS)
def gray_keys(
    masks, count, ranks, keys, first: "i64", last: "i64", shift: "i64", capacity: "i64",
    K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """keys[w, r]: word w of what rows are sorted by, falling rank of the Gray code of taps [first, last).

    The rarest tap is the highest bit (ranks: as rank_taps gives them). shift: rows of a superblock as a power of two;
    its number stands above the highest word. Rows past the count get the largest key.
    """
    WORDS: tl.constexpr = (K + 30) // 31
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = r < tl.load(count)
    used = (last - first).to(tl.int32)
    words = (used + 30) // 31
    odd = tl.zeros([ROWS], tl.int32)
    for turn in range(0, words):
        w = words - 1 - turn
        width = tl.minimum(used - w * 31, 31)
        x = tl.zeros([ROWS], tl.int32)
        if WORDS == 1:
            word = tl.load(masks + r, mask=live, other=0)
            for p in range(0, width):
                x = x | (((word >> tl.load(ranks + p)) & 1) << p)
        else:
            for p in range(0, width):
                k = tl.load(ranks + w * 31 + p)
                word = tl.load(masks + r * WORDS + k // 31, mask=live, other=0)
                x = x | (((word >> (k % 31)) & 1) << p)
        x = x ^ (x >> 1)
        x = x ^ (x >> 2)
        x = x ^ (x >> 4)
        x = x ^ (x >> 8)
        x = x ^ (x >> 16)
        # An odd number of bits above turns the order below around.
        whole = (tl.full([ROWS], 1, tl.int64) << width.to(tl.int64)) - 1
        x = tl.where(odd == 1, x ^ whole.to(tl.int32), x)
        odd = x & 1
        key = whole - x.to(tl.int64)
        if turn == 0:
            key = key | ((r >> shift) << width.to(tl.int64))
        key = tl.where(live, key, 2**31 - 1 if keys.dtype.element_ty == tl.int32 else 2**63 - 1)
        tl.store(keys + w * capacity + r, key.to(keys.dtype.element_ty), mask=r < capacity)


@triton.jit(do_not_specialize=_NUMBERS)
def tile_taps(
    masks, count, order, slots, active, counts, first: "i64", last: "i64", capacity: "i64",
    K: tl.constexpr, BLOCK: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """slots[t, b]: the row in each slot of tile t, -1 past the last; active: the taps that any of them has.

    counts[t]: how many those are. SORTED: rows come in the given order, else in their own.
    """
    WORDS: tl.constexpr = (K + 30) // 31
    t = tl.program_id(0).to(tl.int64)
    at = t * BLOCK + tl.arange(0, BLOCK)
    live = (at < tl.load(count)) & (at < capacity)
    if SORTED:
        r = tl.load(order + at, mask=live, other=0).to(tl.int64)
    else:
        r = at
    tl.store(slots + at, tl.where(live, r, -1).to(tl.int32))
    lane = tl.arange(0, 32)
    total = tl.zeros([1], tl.int32)
    for w in range(0, WORDS):
        word = tl.load(masks + r * WORDS + w, mask=live, other=0)
        k = w * 31 + lane
        has = (tl.reduce(word, 0, _or) >> lane) & 1
        has = tl.where((lane < 31) & (k >= first) & (k < last), has, 0)
        tl.store(active + t * K + k, has.to(tl.int8), mask=(lane < 31) & (k < K))
        total += tl.sum(has)
    tl.store(counts + t + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=_NUMBERS)
def fill_tiles(
    rows, slots, active, ends, taps, tiles, inputs, status, capacity: "i64", tiles_most: "i64",
    K: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The entries of tile t, one for each of its taps, from ends[t - 1] on: its tap, t, and the inputs of its rows.

    capacity: entries that there is room for; that there are more is reported. The programs past the tiles fill up what
    room is left, LANES entries each: of the last tile, meeting nothing. BLOCK slots by LANES taps at a time.
    """
    t = tl.program_id(0)
    b = tl.arange(0, BLOCK)[:, None]
    lane = tl.arange(0, LANES)
    if t < tiles_most:
        if tl.load(ends + t) > capacity:
            tl.atomic_or(status, OVERFLOW)
        r = tl.load(slots + t.to(tl.int64) * BLOCK + b).to(tl.int64)
        entry = tl.load(ends + t - 1, mask=t > 0, other=0).to(tl.int64)
        for start in range(0, K, LANES):
            # Scans are along one axis of one-dimensional tensors: Triton 3.6 cannot lower others of this shape.
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
        tl.store(tiles + e, (tl.zeros_like(e) + tl.maximum(tiles_most - 1, 0)).to(tl.int32), mask=on)
        tl.store(inputs + e * BLOCK + b, (tl.zeros_like(e) - 1 + tl.zeros_like(b)).to(tl.int32), mask=on & (b >= 0))


@triton.jit(do_not_specialize=_NUMBERS)
def list_pairs(
    rows, count, ends, inputs, outputs, status, group: "i64", capacity: "i64", blocks: "i64",
    K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Pairs by tap, then by output; each tap's list begins at a multiple of `group`.

    ends[k, p]: pairs of tap k in the blocks of rows up to and with p, of `blocks` in all. capacity: places that there
    is room for; that there are more is reported.
    """
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    entry = tl.zeros([1], tl.int64)
    for start in range(0, K, LANES):
        lane = start + tl.arange(0, LANES)
        totals = tl.load(ends + lane * blocks + blocks - 1, mask=lane < K, other=0).to(tl.int64)
        whole = (totals + group - 1) // group * group
        k, begin = lane[None, :], (entry + tl.cumsum(whole, axis=0) - whole)[None, :]
        entry += tl.sum(whole)
        met = tl.load(rows + r * K + k, mask=live & (k < K), other=-1)
        has = (met >= 0).to(tl.int32)
        before = tl.load(ends + k * blocks + tl.program_id(0) - 1, mask=(k < K) & (tl.program_id(0) > 0), other=0)
        at = begin + before + tl.cumsum(has, axis=0) - has
        on = (has == 1) & (at < capacity)
        if tl.sum(((has == 1) & (at >= capacity)).to(tl.int32)) > 0:
            tl.atomic_or(status, OVERFLOW)
        tl.store(inputs + at, met, mask=on)
        tl.store(outputs + at, (r + tl.zeros_like(at)).to(tl.int32), mask=on)


@triton.jit(do_not_specialize=_NUMBERS)
def exchange(rows, count, turned, K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
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
    """(digit of each entry, the entry: its key above its row); past the last the greatest digit.

    FIRST: keys stand alone, and rows are in their own order.
    """
    if FIRST:
        entry = (tl.load(keys + r, mask=r < capacity, other=2**31 - 1).to(tl.int64) << 32) | r
    else:
        entry = tl.load(keys + r, mask=r < capacity, other=2**63 - 1)
    return ((entry >> (32 + shift)) & (BINS - 1)).to(tl.int32), entry


@triton.jit(do_not_specialize=_NUMBERS)
def count_digits(
    keys, counts, sums, shift: "i64", capacity: "i64",
    BINS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, SQUAD: tl.constexpr,
):  # fmt: skip
    """counts[p, d]: how many of the program's entries have digit d; sums[p / SQUAD, d] += that."""
    p = tl.program_id(0)
    r = p.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    digit, _ = _digits(keys, r, shift, capacity, BINS, FIRST)
    bins, found = tl.arange(0, BINS), tl.histogram(digit, BINS)
    tl.store(counts + p * BINS + bins, found)
    tl.atomic_add(sums + p // SQUAD * BINS + bins, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def place_digits(
    keys, counts, sums, found, shift: "i64", capacity: "i64",
    BINS: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, SQUAD: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The program's entries where they come in the order of their digits, equal ones as they are.

    counts and sums: as count_digits gives them, with SQUAD sums at most. LAST: rows alone are written.
    """
    p = tl.program_id(0)
    bins = tl.arange(0, BINS)
    mine = p // SQUAD
    every, before = tl.zeros([16, BINS], tl.int32), tl.zeros([16, BINS], tl.int32)
    for start in range(0, SQUAD, 16):
        squad = start + tl.arange(0, 16)[:, None]
        other = mine * SQUAD + squad
        some = tl.load(sums + squad * BINS + bins[None, :])
        every += some
        before += tl.where(squad < mine, some, 0)
        before += tl.load(counts + other * BINS + bins[None, :], mask=other < p, other=0)
    totals, own = tl.sum(every, axis=0), tl.load(counts + p * BINS + bins)
    # Where digit d begins among all, and from that on the program's own, less where it begins among the program's own.
    begin = tl.cumsum(totals, axis=0) - totals + tl.sum(before, axis=0) - (tl.cumsum(own, axis=0) - own)
    first, at = p.to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    digit, _ = _digits(keys, first + at, shift, capacity, BINS, FIRST)
    inner = tl.sort(digit * BLOCK + at)
    digit, r = inner // BLOCK, first + inner % BLOCK
    _, entry = _digits(keys, r, shift, capacity, BINS, FIRST)
    place = tl.gather(begin, digit, 0) + at
    if LAST:
        tl.store(found + place, entry.to(tl.int32), mask=r < capacity)
    else:
        tl.store(found + place, entry, mask=r < capacity)
