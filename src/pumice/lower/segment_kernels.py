"""The kernel of sums over segments; see segment_sums.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["programs", "width", "size"])
def segment_sums(
    x, values, places, slots, codes, firsts, pieces, scratch, waiting, y, programs: "i64", width: "i64", size: "i64",
    LANES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, MIDDLE: tl.constexpr, DEPTH: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr, LONG: tl.constexpr, VALUED: tl.constexpr,
    SPLIT: tl.constexpr
):  # fmt: skip
    """y[segment, n] = sum over entries e of the segment of values[e] * x[places[e], n]

    A program computes BLOCKS * LANES columns of some segments, whose entries are dealt out to its ROWS rows: 1, MIDDLE
    or all of them to a segment. An iteration reads DEPTH entries of each row. codes [programs]: 4 * iterations + 0, 1
    or 2 for these. slots [programs, 3 + DEPTH, ROWS]: of each row, its first entry, the end of the segment's entries,
    the segment (-1: none), and the places of its first DEPTH entries, so that no load waits for them. The first
    programs may have pieces of a segment: the one that finishes the last of `pieces` of them, the first of which is
    program `firsts`, adds up what they left in `scratch`."""
    number = tl.program_id(0)
    group = 0
    if SPLIT:
        group = number // programs.to(tl.int32)
        number = number % programs.to(tl.int32)
    slot = slots + number.to(tl.int64) * ((3 + DEPTH) * ROWS) + tl.arange(0, ROWS)
    at = tl.load(slot)
    stop = tl.load(slot + ROWS)
    segment = tl.load(slot + 2 * ROWS)
    place = tl.load(slot + 3 * ROWS)
    code = tl.load(codes + number)
    count = 0
    start = 0
    if LONG:
        count = tl.load(pieces + number)
        start = tl.load(firsts + number)
    kind = code & 3
    step = tl.where(kind == 0, 1, tl.where(kind == 1, MIDDLE, ROWS))
    column = group * (BLOCKS * LANES)
    value = _value(values, at, stop, place, VALUED)
    place1, value1 = place, value
    if DEPTH > 1:
        place1 = tl.load(slot + 4 * ROWS)
        value1 = _value(values, at + step, stop, place1, VALUED)
    first = tl.zeros([ROWS, LANES], tl.float32)
    second = first
    third = first
    fourth = first
    # The first iteration stands before the loop: its loads do not wait for the number of iterations.
    at += DEPTH * step
    ahead, held, ahead1, held1 = place, value, place1, value1
    if code >= 8:
        ahead, held, ahead1, held1 = _entries(places, values, at, step, stop, DEPTH, VALUED)
    first, second, third, fourth = _added(
        first, second, third, fourth, x, place, value, place1, value1, column, width, size, LANES, BLOCKS, DEPTH,
        VECTOR, EVEN, FAR, VALUED
    )  # fmt: skip
    place, value, place1, value1 = ahead, held, ahead1, held1
    for _ in tl.range(1, code >> 2):
        # Places are loaded an iteration ahead of the rows of x that they name.
        at += DEPTH * step
        ahead, held, ahead1, held1 = _entries(places, values, at, step, stop, DEPTH, VALUED)
        first, second, third, fourth = _added(
            first, second, third, fourth, x, place, value, place1, value1, column, width, size, LANES, BLOCKS, DEPTH,
            VECTOR, EVEN, FAR, VALUED
        )  # fmt: skip
        place, value, place1, value1 = ahead, held, ahead1, held1
    whole = kind == 2
    if LONG:
        shared = count > 1
        if shared:
            counter = waiting + start * (tl.num_programs(0) // programs.to(tl.int32)) + group
            whole = _left(first, second, third, fourth, scratch, counter, number, count, column, width, LANES, BLOCKS)
            if whole:
                _store_pieces(y, scratch, start, count, tl.max(segment, 0), column, width, LANES, BLOCKS, FAR)
                whole = False
    if kind == 0:
        _store(first, second, third, fourth, segment, y, column, width, LANES, BLOCKS, ROWS, 1, VECTOR, EVEN, FAR)
    elif kind == 1:
        _store(first, second, third, fourth, segment, y, column, width, LANES, BLOCKS, ROWS, MIDDLE, VECTOR, EVEN, FAR)
    elif whole:
        _store(first, second, third, fourth, segment, y, column, width, LANES, BLOCKS, ROWS, ROWS, VECTOR, EVEN, FAR)


@triton.jit
def _columns(
    column, width, LANES: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """(columns of a block, those of them that there are); others read the first ones."""
    lane = tl.arange(0, LANES)
    found = column + BLOCK * LANES + lane
    live = found < width.to(tl.int32)
    if not EVEN:
        found = tl.where(live, found, lane % VECTOR)
    return found, live


@triton.jit
def _addresses(offset, columns, LANES: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr):
    return tl.max_contiguous(
        tl.multiple_of(offset[:, None] + columns[None, :], [1, VECTOR]), [1, LANES if EVEN else VECTOR]
    )


@triton.jit
def _entry(places, values, at, stop, VALUED: tl.constexpr):
    """(row of x, value) of an entry of each row of the program; -1 where there is none."""
    place = tl.load(places + at, mask=at < stop, other=-1).to(tl.int32)
    return place, _value(values, at, stop, place, VALUED)


@triton.jit
def _entries(places, values, at, step, stop, DEPTH: tl.constexpr, VALUED: tl.constexpr):
    """The entries of an iteration: of DEPTH 1 the second one is the first."""
    place, value = _entry(places, values, at, stop, VALUED)
    place1, value1 = place, value
    if DEPTH > 1:
        place1, value1 = _entry(places, values, at + step, stop, VALUED)
    return place, value, place1, value1


@triton.jit
def _value(values, at, stop, place, VALUED: tl.constexpr):
    value = place.to(tl.float32)
    if VALUED:
        value = tl.load(values + at, mask=at < stop, other=0).to(tl.float32)
    return value


@triton.jit
def _added(
    first, second, third, fourth, x, place, value, place1, value1, column, width, size, LANES: tl.constexpr,
    BLOCKS: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr,
    VALUED: tl.constexpr
):  # fmt: skip
    """The sums with the entries of an iteration added."""
    first, second, third, fourth = _entry_added(
        first, second, third, fourth, x, place, value, column, width, size, LANES, BLOCKS, VECTOR, EVEN, FAR, VALUED
    )  # fmt: skip
    if DEPTH > 1:
        first, second, third, fourth = _entry_added(
            first, second, third, fourth, x, place1, value1, column, width, size, LANES, BLOCKS, VECTOR, EVEN, FAR,
            VALUED
        )  # fmt: skip
    return first, second, third, fourth


@triton.jit
def _entry_added(
    first, second, third, fourth, x, place, value, column, width, size, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr, VALUED: tl.constexpr
):  # fmt: skip
    """The sums with an entry of each row of the program added."""
    there = place.to(tl.uint32) < size.to(tl.uint32)
    if FAR:
        offset = place.to(tl.int64) * width
    else:
        offset = place * width.to(tl.int32)
    first = _block_added(first, x, offset, column, there, value, width, LANES, 0, VECTOR, EVEN, VALUED)
    if BLOCKS > 1:
        second = _block_added(second, x, offset, column, there, value, width, LANES, 1, VECTOR, EVEN, VALUED)
    if BLOCKS > 2:
        third = _block_added(third, x, offset, column, there, value, width, LANES, 2, VECTOR, EVEN, VALUED)
        fourth = _block_added(fourth, x, offset, column, there, value, width, LANES, 3, VECTOR, EVEN, VALUED)
    return first, second, third, fourth


@triton.jit
def _block_added(
    total, x, offset, column, there, value, width, LANES: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    EVEN: tl.constexpr, VALUED: tl.constexpr
):  # fmt: skip
    columns, _ = _columns(column, width, LANES, BLOCK, VECTOR, EVEN)
    where = x + _addresses(offset, columns, LANES, VECTOR, EVEN)
    read = tl.load(where, mask=there[:, None], other=0).to(tl.float32)
    if VALUED:
        total += value[:, None] * read
    else:
        total += read
    return total


@triton.jit
def _left(
    first, second, third, fourth, scratch, counter, number, count, column, width, LANES: tl.constexpr,
    BLOCKS: tl.constexpr
):  # fmt: skip
    """Leave the sums of a piece in scratch; True in the last program that does."""
    where = scratch + number * width
    _leave(first, where, column, width, LANES, 0)
    if BLOCKS > 1:
        _leave(second, where, column, width, LANES, 1)
    if BLOCKS > 2:
        _leave(third, where, column, width, LANES, 2)
        _leave(fourth, where, column, width, LANES, 3)
    tl.debug_barrier()
    done = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if done:
        tl.store(counter, 0)
    return done


@triton.jit
def _leave(total, where, column, width, LANES: tl.constexpr, BLOCK: tl.constexpr):
    columns = column + BLOCK * LANES + tl.arange(0, LANES)
    tl.store(where + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _store_pieces(
    y, scratch, start, count, segment, column, width, LANES: tl.constexpr, BLOCKS: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Add up the pieces of a segment, in their order."""
    if FAR:
        y += segment.to(tl.int64) * width
    else:
        y += segment * width.to(tl.int32)
    columns = column + tl.arange(0, BLOCKS * LANES)
    total = tl.zeros([BLOCKS * LANES], tl.float32)
    for piece in tl.range(0, count):
        # Past the first-level cache, which does not see what other programs wrote.
        where = scratch + (start + piece) * width + columns
        total += tl.load(where, mask=columns < width, other=0, cache_modifier=".cg")
    tl.store(y + columns, total.to(y.dtype.element_ty), mask=columns < width)


@triton.jit
def _store(
    first, second, third, fourth, segment, y, column, width, LANES: tl.constexpr, BLOCKS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr, FAR: tl.constexpr
):  # fmt: skip
    """Add up the PARTS rows of each segment and write them to its row of y."""
    if PARTS > 1:
        segment = tl.max(tl.reshape(segment, [ROWS // PARTS, PARTS]), 1)
    if FAR:
        offset = segment.to(tl.int64) * width
    else:
        offset = segment * width.to(tl.int32)
    _store_block(first, segment, offset, y, column, width, LANES, 0, ROWS, PARTS, VECTOR, EVEN)
    if BLOCKS > 1:
        _store_block(second, segment, offset, y, column, width, LANES, 1, ROWS, PARTS, VECTOR, EVEN)
    if BLOCKS > 2:
        _store_block(third, segment, offset, y, column, width, LANES, 2, ROWS, PARTS, VECTOR, EVEN)
        _store_block(fourth, segment, offset, y, column, width, LANES, 3, ROWS, PARTS, VECTOR, EVEN)


@triton.jit
def _store_block(
    total, segment, offset, y, column, width, LANES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, VECTOR: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    if PARTS > 1:
        total = tl.sum(tl.reshape(total, [ROWS // PARTS, PARTS, LANES]), 1)
    columns, live = _columns(column, width, LANES, BLOCK, VECTOR, EVEN)
    where = y + _addresses(offset, columns, LANES, VECTOR, EVEN)
    if EVEN:
        tl.store(where, total.to(y.dtype.element_ty), mask=(segment >= 0)[:, None])
    else:
        tl.store(where, total.to(y.dtype.element_ty), mask=(segment >= 0)[:, None] & live[None, :])
