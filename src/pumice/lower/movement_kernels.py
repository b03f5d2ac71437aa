"""Triton kernels of movement.py and parts.py; plain torch versions are there. Imported lazily: needs Triton."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl


@triton.jit
def _rows(ROWS: tl.constexpr, C: tl.constexpr, LANES: tl.constexpr):
    """(rows [ROWS], first channel) of a program."""
    sides: tl.constexpr = (C + LANES - 1) // LANES
    number = tl.program_id(0)
    return (number // sides) * ROWS + tl.arange(0, ROWS), (number % sides) * LANES


@triton.jit
def _channels(first, one, LANES: tl.constexpr, SCALAR: tl.constexpr):
    """Channels [1, LANES]. SCALAR: that they follow one another is kept from the compiler, so that each is an access
    of its own."""
    c = first + tl.arange(0, LANES)[None, :]
    if SCALAR:
        c = c * one
    return c


@triton.jit
def _within(mask, c, C: tl.constexpr, LANES: tl.constexpr):
    """The mask [ROWS, 1] for these channels."""
    if C % LANES:
        mask = mask & (c < C)
    return mask


@triton.jit(do_not_specialize=["count", "limit", "one"])
def gather_slots(
    x, rows, y, count: "i64", limit: "i64", one: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    SCALAR: tl.constexpr
):  # fmt: skip
    """y[s] = x[rows[s]] for s < count; 0 where rows[s] >= limit."""
    s, first = _rows(ROWS, C, LANES)
    live = s < count
    row = tl.load(rows + s, mask=live, other=0).to(tl.int64)[:, None]
    c = _channels(first, one, LANES, SCALAR)
    there = _within(live[:, None] & (row < limit), c, C, LANES)
    values = tl.load(x + (row * C + c), mask=there, other=0)
    tl.store(y + (s.to(tl.int64)[:, None] * C + c), values, mask=_within(live[:, None], c, C, LANES))


@triton.jit(do_not_specialize=["count", "limit", "one"])
def scatter_slots(
    x, rows, y, count: "i64", limit: "i64", one: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    ATOMIC: tl.constexpr, SCALAR: tl.constexpr
):  # fmt: skip
    """y[rows[s]] += x[s] for s < count and rows[s] < limit. ATOMIC: a row may be that of several slots."""
    s, first = _rows(ROWS, C, LANES)
    live = s < count
    row = tl.load(rows + s, mask=live, other=0).to(tl.int64)[:, None]
    c = _channels(first, one, LANES, SCALAR)
    there = _within(live[:, None] & (row < limit), c, C, LANES)
    values = tl.load(x + (s.to(tl.int64)[:, None] * C + c), mask=there, other=0).to(y.dtype.element_ty)
    places = y + (row * C + c)
    if ATOMIC:
        tl.atomic_add(places, values, mask=there, sem="relaxed")
    else:
        tl.store(places, tl.load(places, mask=there, other=0) + values, mask=there)


@triton.jit(do_not_specialize=["count"])
def gather_stationary(
    x, slots, starts, y, count: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """y[slots[e]] = x[r] for starts[r] <= e < starts[r + 1]: each row is read once and kept in registers."""
    r, first = _rows(ROWS, C, LANES)
    live = r < count
    c = _channels(first, 1, LANES, False)
    values = tl.load(x + (r.to(tl.int64)[:, None] * C + c), mask=_within(live[:, None], c, C, LANES), other=0)
    begin = tl.load(starts + r, mask=live, other=0)
    end = tl.load(starts + r + 1, mask=live, other=0)
    for step in tl.range(0, tl.max(end - begin)):
        there = begin + step < end
        slot = tl.load(slots + begin + step, mask=there, other=0).to(tl.int64)[:, None]
        tl.store(y + (slot * C + c), values, mask=_within(there[:, None], c, C, LANES))


@triton.jit(do_not_specialize=["count"])
def scatter_stationary(
    x, slots, starts, base, y, count: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    BASE: tl.constexpr
):  # fmt: skip
    """y[r] = sum over starts[r] <= e < starts[r + 1] of x[slots[e]], in this order in float32, written once. BASE: the
    sum begins with base[r]."""
    r, first = _rows(ROWS, C, LANES)
    live = r < count
    c = _channels(first, 1, LANES, False)
    own = _within(live[:, None], c, C, LANES)
    at = r.to(tl.int64)[:, None] * C + c
    total = tl.zeros([ROWS, LANES], tl.float32)
    if BASE:
        total += tl.load(base + at, mask=own, other=0).to(tl.float32)
    begin = tl.load(starts + r, mask=live, other=0)
    end = tl.load(starts + r + 1, mask=live, other=0)
    for step in tl.range(0, tl.max(end - begin)):
        there = begin + step < end
        slot = tl.load(slots + begin + step, mask=there, other=0).to(tl.int64)[:, None]
        total += tl.load(x + (slot * C + c), mask=_within(there[:, None], c, C, LANES), other=0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=own)


@triton.jit
def split_weights(blocks, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of a weight in parts. blocks int64 [programs, 4]: address of the block, its place in `out`, its
    size, and that of the weight, which is the distance of the parts."""
    own = blocks + tl.program_id(0) * 4
    source = tl.multiple_of(tl.load(own).to(tl.pointer_type(tl.float32)), 16)
    place = tl.multiple_of(tl.load(own + 1), 4)
    r = tl.arange(0, BLOCK)
    there = r < tl.load(own + 2)
    x = tl.load(source + r, mask=there, other=0.0)
    if PARTS == 1:
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        # Not for NaN, whose bits may overflow, nor near the largest value, which would become infinite.
        tl.store(out + place + r, tl.where(tl.abs(x) < 3.4e38, rounded, x), mask=there)
    else:
        for part in tl.static_range(PARTS):
            high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
            tl.store(out + place + part * tl.load(own + 3) + r, high.to(tl.bfloat16), mask=there)
            x -= high
