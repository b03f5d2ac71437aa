"""Kernels of max pooling. Imported lazily by `max_pool.py`, which holds the twins in plain torch: needs Triton."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl


@triton.jit
def _place(C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """The rows of a program, and its channels."""
    sides: tl.constexpr = (C + LANES - 1) // LANES
    number = tl.program_id(0)
    rows = (number // sides) * ROWS + tl.arange(0, ROWS)
    return rows.to(tl.int64), (number % sides) * LANES + tl.arange(0, LANES)[None, :]


@triton.jit(do_not_specialize=["outputs"])
def max_pool(
    x, rows, y, taps, outputs: "i64", C: tl.constexpr, VOLUME: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    KEPT: tl.constexpr
):  # fmt: skip
    """y[o, c] = max over k of x[rows[o, k], c], 0 if none; taps[o, c] = the first k that attains it, -1 if none."""
    o, c = _place(C, ROWS, LANES)
    within = c < C
    top = tl.full([ROWS, LANES], float("-inf"), tl.float32)
    first = tl.full([ROWS, LANES], -1, tl.int32)
    for tap in range(VOLUME):
        met = tl.load(rows + o * VOLUME + tap, mask=o < outputs, other=-1).to(tl.int64)[:, None]
        value = tl.load(x + met * C + c, mask=(met >= 0) & within, other=0.0).to(tl.float32)
        # NaN propagates, the last of several.
        better = (met >= 0) & ((value > top) | (value != value) | (first < 0))
        top = tl.where(better, value, top)
        first = tl.where(better, tap, first)
    at, there = o[:, None] * C + c, (o < outputs)[:, None] & within
    tl.store(y + at, tl.where(first < 0, 0.0, top), mask=there)
    if KEPT:
        tl.store(taps + at, first, mask=there)


@triton.jit(do_not_specialize=["inputs"])
def gradient(
    grad, rows, taps, dx, inputs: "i64", C: tl.constexpr, VOLUME: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """dx[i, c] = sum over k of grad[rows[i, k], c] where taps[rows[i, k], c] = k."""
    i, c = _place(C, ROWS, LANES)
    within = c < C
    found = tl.zeros([ROWS, LANES], tl.float32)
    for tap in range(VOLUME):
        met = tl.load(rows + i * VOLUME + tap, mask=i < inputs, other=-1).to(tl.int64)[:, None]
        there = (met >= 0) & within
        own = tl.load(taps + met * C + c, mask=there, other=-1).to(tl.int32) == tap
        found += tl.load(grad + met * C + c, mask=there & own, other=0.0).to(tl.float32)
    tl.store(dx + i[:, None] * C + c, found, mask=(i < inputs)[:, None] & within)
