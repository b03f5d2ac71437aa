"""The kernel of sums over segments; see segment_sums.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs", "width", "size"])
def segment_sums(
    x, values, places, starts, stops, rows, items, steps, firsts, pieces, scratch, waiting, y, programs: "i64",
    width: "i64", size: "i64", LANES: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, THREADS: tl.constexpr,
    MIDDLE: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr, LONG: tl.constexpr,
    VALUED: tl.constexpr, HINT: tl.constexpr = 0, INNER: tl.constexpr = False
):  # fmt: skip
    """y[rows[i], n] = sum over entries starts[i] <= e < stops[i] of values[e] * x[places[e], n]

    A program computes LANES columns of some items i, whose entries are dealt out to its ROWS rows: 1, MIDDLE,
    ROWS / WARPS or all of them to an item. items [programs]: 4 * the first item + 0, 1, 2 or 3 for these; steps
    [programs]: iterations. Items of all rows may be pieces of a segment: the program that finishes the last of `pieces`
    of them, the first of which is item `firsts`, adds up what they left in `scratch`."""
    blocks = tl.num_programs(0) // programs.to(tl.int32)
    if INNER:
        number = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks
    else:
        number = tl.program_id(0) % programs.to(tl.int32)
        block = tl.program_id(0) // programs.to(tl.int32)
    code = tl.load(items + number)
    turns = tl.load(steps + number)
    kind = code & 3
    first = code >> 2
    OWN: tl.constexpr = ROWS // WARPS
    parts = tl.where(kind == 0, 1, tl.where(kind == 1, MIDDLE, tl.where(kind == 2, OWN, ROWS)))
    # Rows are numbered so that those of an item belong to one warp.
    r = tl.arange(0, ROWS)
    within = r // (THREADS * WARPS) * THREADS + r % THREADS
    within += tl.where(kind == 3, r // THREADS % WARPS * OWN, 0)
    item = first + tl.where(kind == 3, 0, r // THREADS % WARPS * (OWN // parts)) + within // parts
    column = block * LANES + tl.arange(0, LANES)
    live = column < width.to(tl.int32)
    if not EVEN:
        column = tl.where(live, column, tl.arange(0, LANES) % VECTOR)
    at = tl.load(starts + item) + within % parts
    stop = tl.load(stops + item)
    total = tl.zeros([ROWS, LANES], tl.float32)
    place = tl.load(places + at, mask=at < stop, other=-1)
    if VALUED:
        value = tl.load(values + at, mask=at < stop, other=0).to(tl.float32)
    for _ in tl.range(0, turns):
        at += parts
        following = tl.load(places + at, mask=at < stop, other=-1)
        there = place.to(tl.uint32) < size.to(tl.uint32)
        if FAR:
            offset = place.to(tl.int64) * width
        else:
            offset = place * width.to(tl.int32)
        address = tl.max_contiguous(
            tl.multiple_of(offset[:, None] + column[None, :], [1, VECTOR]), [1, LANES if EVEN else VECTOR]
        )
        if HINT & 1:
            read = tl.load(x + address, mask=there[:, None], other=0, eviction_policy="evict_last").to(tl.float32)
        else:
            read = tl.load(x + address, mask=there[:, None], other=0).to(tl.float32)
        if VALUED:
            total += value[:, None] * read
            value = tl.load(values + at, mask=at < stop, other=0).to(tl.float32)
        else:
            total += read
        place = following
    if kind == 0:
        _store(total, item, rows, y, column, live, width, LANES, ROWS, WARPS, THREADS, 1, VECTOR, EVEN, FAR, HINT)
    elif kind == 1:
        _store(total, item, rows, y, column, live, width, LANES, ROWS, WARPS, THREADS, MIDDLE, VECTOR, EVEN, FAR, HINT)
    elif kind == 2:
        _store(total, item, rows, y, column, live, width, LANES, ROWS, WARPS, THREADS, OWN, VECTOR, EVEN, FAR, HINT)
    else:
        if LONG:
            _store_piece(
                total, first, rows, firsts, pieces, scratch, waiting, y, block, blocks, column, live, width, FAR
            )


@triton.jit
def _store_piece(
    total, item, rows, firsts, pieces, scratch, waiting, y, block, blocks, column, live, width, FAR: tl.constexpr
):  # fmt: skip
    """Write the sum of all rows to the item's row of y, or leave it for the last piece of the segment."""
    summed = tl.sum(total, 0)
    start = tl.load(firsts + item)
    count = tl.load(pieces + item)
    done = count == 1
    if count > 1:
        tl.store(scratch + item * width + column, summed, mask=live)
        tl.debug_barrier()
        counter = waiting + start * blocks + block
        done = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
        if done:
            tl.store(counter, 0)
            summed = tl.zeros_like(summed)
            for piece in tl.range(0, count):
                # Past the first-level cache, which does not see what other programs wrote.
                summed += tl.load(scratch + (start + piece) * width + column, mask=live, other=0, cache_modifier=".cg")
    if done:
        row = tl.load(rows + item)
        if FAR:
            offset = row.to(tl.int64) * width
        else:
            offset = row * width.to(tl.int32)
        tl.store(y + offset + column, summed.to(y.dtype.element_ty), mask=live)


@triton.jit
def _store(
    total, item, rows, y, column, live, width, LANES: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
    THREADS: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr, HINT: tl.constexpr
):  # fmt: skip
    """Add up the PARTS rows of each item and write them to its row of y."""
    TURNS: tl.constexpr = ROWS // (WARPS * THREADS)
    INNER: tl.constexpr = PARTS if PARTS < THREADS else THREADS
    OUTER: tl.constexpr = PARTS // INNER
    COUNT: tl.constexpr = ROWS // PARTS
    if PARTS > 1:
        total = tl.reshape(total, [TURNS // OUTER, OUTER, WARPS, THREADS // INNER, INNER, LANES])
        total = tl.reshape(tl.sum(tl.sum(total, 4), 1), [COUNT, LANES])
        item = tl.reshape(item, [TURNS // OUTER, OUTER, WARPS, THREADS // INNER, INNER])
        item = tl.reshape(tl.max(tl.max(item, 4), 1), [COUNT])
    row = tl.load(rows + item)
    if FAR:
        offset = row.to(tl.int64) * width
    else:
        offset = row * width.to(tl.int32)
    address = tl.max_contiguous(
        tl.multiple_of(offset[:, None] + column[None, :], [1, VECTOR]), [1, LANES if EVEN else VECTOR]
    )
    if HINT & 2:
        tl.store(
            y + address, total.to(y.dtype.element_ty), mask=(row >= 0)[:, None] & live[None, :], cache_modifier=".cs"
        )
    else:
        tl.store(y + address, total.to(y.dtype.element_ty), mask=(row >= 0)[:, None] & live[None, :])
