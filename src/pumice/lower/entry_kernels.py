"""The kernel of sums over entries; see entry_sums.py."""

import triton
import triton.language as tl

_PLACES = ["n1", "n2", "n3", "x0", "x1", "x2", "x3", "y0", "y1", "y2", "y3"]


@triton.jit(do_not_specialize=["points", "groups", "begin", "inside", *_PLACES])
def entry_sums(
    x, values, words, starts, targets, edges, y, points: "i64", groups: "i64", begin: "i64", inside: "i64", n1: "i64",
    n2: "i64", n3: "i64", x0: "i64", x1: "i64", x2: "i64", x3: "i64", y0: "i64", y1: "i64", y2: "i64", y3: "i64",
    LOOPS: tl.constexpr, TURNS: tl.constexpr, LANES: tl.constexpr, SEGMENTS: tl.constexpr, PARTS: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, MISSING: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """y[target[s] + point] = sum over entries e of segment s of values[e] * x[offset[e] + point]

    A program computes TURNS * LANES points of SEGMENTS segments, in rows of PARTS interleaved parts each.
    words [steps + 1, SEGMENTS * PARTS]: place of an entry's value in the upper half, (edge, offset) in the lower one;
    edge MISSING: no entry. starts: first step of each group of segments, and the end. edges [inside]: by point, bit k
    is set if windows of edge k are inside x there."""
    group = tl.program_id(0) % groups.to(tl.int32)
    lane = tl.arange(0, LANES)[None, None, :]
    point = (tl.program_id(0) // groups.to(tl.int32)) * (TURNS * LANES)
    point = point + tl.arange(0, TURNS)[None, :, None] * LANES + lane
    live = point < points.to(tl.int32)
    # Lanes that are left over read what is there.
    point = tl.where(live, point, lane % VECTOR)
    reads, writes = _places(point, n1, n2, n3, x0, x1, x2, x3, y0, y1, y2, y3, LOOPS)
    reads += begin.to(tl.int32)
    target = tl.load(targets + group * SEGMENTS + tl.arange(0, SEGMENTS))[:, None, None]
    inner = point
    if EDGES:
        inner = tl.load(edges + point % inside.to(tl.int32))
    start = tl.load(starts + group)
    end = tl.load(starts + group + 1)
    total = tl.zeros([SEGMENTS * PARTS, TURNS, LANES], tl.float32)
    words += start.to(tl.int64) * (SEGMENTS * PARTS) + tl.arange(0, SEGMENTS * PARTS)
    word = tl.load(words)
    for _ in tl.range(start, end):
        words += SEGMENTS * PARTS
        following = tl.load(words)
        low = word.to(tl.uint32)
        edge = (low >> OFFSET).to(tl.int32)
        value = tl.load(values + (word >> 32), mask=edge != MISSING, other=0).to(tl.float32)
        offset = (low & ((1 << OFFSET) - 1)).to(tl.int32)
        # Lanes are said to be contiguous so that threads follow them; only VECTOR of them are read at once.
        at = tl.max_contiguous(tl.multiple_of(offset[:, None, None] + reads, [1, 1, VECTOR]), [1, 1, LANES])
        there = (edge != MISSING)[:, None, None]
        if EDGES:
            # Bit MISSING is not set.
            there = ((inner >> edge[:, None, None]) & 1) != 0
        total += value[:, None, None] * tl.load(x + at, mask=there, other=0).to(tl.float32)
        word = following
    if PARTS > 1:
        total = tl.sum(tl.reshape(total, [SEGMENTS, PARTS, TURNS, LANES]), 1)
    at = tl.max_contiguous(tl.multiple_of(target + writes, [1, 1, VECTOR]), [1, 1, LANES])
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live & (target >= 0))


@triton.jit
def _places(point, n1, n2, n3, x0, x1, x2, x3, y0, y1, y2, y3, LOOPS: tl.constexpr):
    """(offsets in x, in y) of points, numbered along LOOPS loops of which the innermost is the last."""
    reads = tl.zeros(point.shape, tl.int32)
    writes = tl.zeros(point.shape, tl.int32)
    if LOOPS > 3:
        at = point % n3.to(tl.int32)
        point = point // n3.to(tl.int32)
        reads += at * x3.to(tl.int32)
        writes += at * y3.to(tl.int32)
    if LOOPS > 2:
        at = point % n2.to(tl.int32)
        point = point // n2.to(tl.int32)
        reads += at * x2.to(tl.int32)
        writes += at * y2.to(tl.int32)
    if LOOPS > 1:
        at = point % n1.to(tl.int32)
        point = point // n1.to(tl.int32)
        reads += at * x1.to(tl.int32)
        writes += at * y1.to(tl.int32)
    return reads + point * x0.to(tl.int32), writes + point * y0.to(tl.int32)


@triton.jit(do_not_specialize=["points", "groups", "begin", "inside", "zero", "width", *_PLACES])
def block_sums(
    x, values, words, counts, targets, edges, y, points: "i64", groups: "i64", begin: "i64", inside: "i64",
    zero: "i64", width: "i64", n1: "i64", n2: "i64", n3: "i64", x0: "i64", x1: "i64", x2: "i64", x3: "i64", y0: "i64",
    y1: "i64", y2: "i64", y3: "i64", LOOPS: tl.constexpr, POINTS: tl.constexpr, PARTS: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr, EDGES: tl.constexpr, MISSING: tl.constexpr,
    OFFSET: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """y[target[s] + point, m] = sum over blocks e of segment s, channels c of values[e,m,c] * x[offset[e] + point, c]

    Offsets are in vectors of CHANNELS or OUTPUTS. A program computes POINTS points of a segment, PARTS blocks in each
    iteration, one after another along the reduction of one matrix product. words [segments, width]: as in entry_sums,
    of which the other arguments are; counts: iterations of a segment. TURNED: values[e,c,m]."""
    group = tl.program_id(0) % groups.to(tl.int32)
    point = (tl.program_id(0) // groups.to(tl.int32)) * POINTS + tl.arange(0, POINTS)
    live = point < points.to(tl.int32)
    point = tl.where(live, point, 0)
    reads, writes = _places(point, n1, n2, n3, x0, x1, x2, x3, y0, y1, y2, y3, LOOPS)
    reads += begin.to(tl.int32)
    m = tl.arange(0, OUTPUTS)
    c = tl.arange(0, CHANNELS)
    inner = point
    if EDGES:
        inner = tl.load(edges + point % inside.to(tl.int32))
    end = tl.load(counts + group)
    words += group * width + tl.arange(0, PARTS)
    # Indices are loaded two iterations ahead, so that no load waits for another.
    word = tl.load(words)
    following = tl.load(words + PARTS, mask=end > 1, other=MISSING << OFFSET)
    if OVERLAP:
        # Index arrays are older than the kernels in front, x and values may be results of these.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([POINTS, OUTPUTS], tl.float32)
    for step in tl.range(0, end, num_stages=STAGES):
        low = word.to(tl.uint32)
        edge = (low >> OFFSET).to(tl.int32)
        there = (edge != MISSING)[:, None, None]
        block = (word >> 32)[:, None, None] * (OUTPUTS * CHANNELS)
        if TURNED:
            block += c[None, :, None] * OUTPUTS + m[None, None, :]
        else:
            block += c[None, :, None] + m[None, None, :] * CHANNELS
        right = tl.reshape(tl.load(values + block, mask=there, other=0), [PARTS * CHANNELS, OUTPUTS])
        offset = (low & ((1 << OFFSET) - 1)).to(tl.int32)
        at = (reads[:, None] + offset[None, :]) * CHANNELS
        if EDGES:
            # Bit MISSING is not set.
            inner_there = ((inner[:, None] >> edge[None, :]) & 1) != 0
        else:
            inner_there = live[:, None] & (edge != MISSING)[None, :]
        left = tl.load(x + at[:, :, None] + c[None, None, :], mask=inner_there[:, :, None], other=0)
        left = tl.reshape(left, [POINTS, PARTS * CHANNELS])
        total = tl.dot(left, right, total, input_precision=PRECISION)
        # `| zero` makes a new value of it: Triton does not pipeline a loop that carries a value unchanged.
        word = following | zero
        words += PARTS
        following = tl.load(words + PARTS, mask=step + 2 < end, other=MISSING << OFFSET)
    at = (tl.load(targets + group) + writes)[:, None] * OUTPUTS + m[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=live[:, None])
