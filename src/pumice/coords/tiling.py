"""Kernels that lay a kernel map out for feature kernels: orders of rows, tiles with their taps, lists of pairs.

Only `compact.py`, where the twins in plain torch are, imports this file: it needs Triton.
"""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

OVERFLOW = tl.constexpr(4)
_NUMBERS = ["first", "last", "shift", "capacity", "group", "blocks"]


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
def gray_keys(
    masks, count, ends, keys, first: "i64", last: "i64", shift: "i64", capacity: "i64", blocks: "i64",
    K: tl.constexpr, ROWS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """keys[w, r]: word w of what rows are sorted by, falling rank of the Gray code of taps [first, last).

    The rarest tap is the highest bit. shift: rows of a superblock as a power of two; its number stands above the
    highest word. Rows past the count get the largest key. ends: as in list_pairs.
    """
    WORDS: tl.constexpr = (K + 30) // 31
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = r < tl.load(count)
    k = tl.arange(0, SIDE)
    tapped = (k >= first) & (k < last)
    mine = tl.load(ends + k * blocks + blocks - 1, mask=tapped, other=0)
    # The place of a tap: how many are more frequent, or as frequent and before it.
    place = tl.zeros([SIDE], tl.int32)
    for start in range(0, K, 32):
        j = (start + tl.arange(0, 32))[:, None]
        other = tl.load(ends + j * blocks + blocks - 1, mask=(j >= first) & (j < last), other=-1)
        more = (other > mine[None, :]) | ((other == mine[None, :]) & (j < k[None, :]))
        place += tl.sum((more & (other >= 0)).to(tl.int32), axis=0)
    bits = _bits(masks, r[:, None], k[None, :], live[:, None], tapped[None, :], WORDS)
    used = (last - first).to(tl.int32)
    odd = tl.zeros([ROWS], tl.int32)
    for turn in range(0, (used + 30) // 31):
        w = (used + 30) // 31 - 1 - turn
        here = tapped & (place // 31 == w)
        x = tl.sum(bits * tl.where(here, 1 << (place % 31), 0)[None, :], axis=1)
        x = x ^ (x >> 1)
        x = x ^ (x >> 2)
        x = x ^ (x >> 4)
        x = x ^ (x >> 8)
        x = x ^ (x >> 16)
        # An odd number of bits above turns the order below around.
        width = tl.minimum(used - w * 31, 31)
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
    K: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """slots[t, b]: the row in each slot of tile t, -1 past the last; active: the taps that any of them has.

    counts[t]: how many those are. SORTED: rows come in the given order, else in their own.
    """
    WORDS: tl.constexpr = (K + 30) // 31
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = (at < tl.load(count)) & (at < capacity)
    if SORTED:
        r = tl.load(order + at, mask=live, other=0).to(tl.int64)
    else:
        r = at
    tl.store(slots + at, tl.where(live, r, -1).to(tl.int32))
    total = tl.zeros([1], tl.int32)
    for start in range(0, K, LANES):
        k = start + tl.arange(0, LANES)[None, :]
        tapped = (k >= first) & (k < last)
        bits = _bits(masks, r[:, None], k, live[:, None], tapped, WORDS)
        has = tl.max(bits, axis=0)[None, :]
        tl.store(active + tl.program_id(0) * K + k, has.to(tl.int8), mask=k < K)
        total += tl.sum(has, axis=1)
    tl.store(counts + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=_NUMBERS)
def fill_tiles(
    rows, slots, active, ends, taps, tiles, inputs, status, capacity: "i64",
    K: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The entries of tile t, one for each of its taps, from ends[t - 1] on: its tap, t, and the inputs of its rows.

    capacity: entries that there is room for; that there are more is reported. BLOCK slots by LANES taps at a time.
    """
    t = tl.program_id(0)
    if tl.load(ends + t) > capacity:
        tl.atomic_or(status, OVERFLOW)
    b = tl.arange(0, BLOCK)[:, None]
    r = tl.load(slots + t.to(tl.int64) * BLOCK + b).to(tl.int64)
    entry = tl.load(ends + t - 1, mask=t > 0, other=0).to(tl.int64)
    for start in range(0, K, LANES):
        # Scans are along one axis of one-dimensional tensors: Triton 3.6 cannot lower others of this shape.
        lane = start + tl.arange(0, LANES)
        one = tl.load(active + t.to(tl.int64) * K + lane, mask=lane < K, other=0).to(tl.int32)
        k, has = lane[None, :], one[None, :]
        e = (entry + tl.cumsum(one, axis=0) - one)[None, :]
        on = (has == 1) & (e < capacity)
        tl.store(taps + e, k.to(tl.int32), mask=on)
        tl.store(tiles + e, tl.zeros_like(k) + t, mask=on)
        met = tl.load(rows + r * K + k, mask=on & (r >= 0), other=-1)
        tl.store(inputs + e * BLOCK + b, met, mask=on & (b >= 0))
        entry += tl.sum(one)


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
