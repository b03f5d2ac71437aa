"""Kernels of batch normalisation over the first rows of a buffer.

Only `norm.py`, where the twins in plain torch are, imports this file: it needs Triton.
"""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl


@triton.jit
def _place(C: tl.constexpr, LANES: tl.constexpr):
    """The row block of a program, and its channels."""
    sides: tl.constexpr = (C + LANES - 1) // LANES
    number = tl.program_id(0)
    return number // sides, (number % sides) * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _affine(values, weight, bias, c, C: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """Normalised values, scaled and shifted."""
    if WEIGHT:
        values *= tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + c, mask=c < C, other=0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["parts"])
def moments(x, count, halves, parts: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Of every parts-th block of rows: the mean, and the sum of squares around it; halves is [2, parts, C]."""
    part, c = _place(C, LANES)
    rows = tl.load(count)
    mean = tl.zeros([1, LANES], tl.float32)
    spread = tl.zeros([1, LANES], tl.float32)
    seen = 0
    for start in range(part * ROWS, rows, parts.to(tl.int32) * ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        live = (r < rows) & (c < C)
        values = tl.load(x + r.to(tl.int64) * C + c, mask=live, other=0).to(tl.float32)
        number = tl.minimum(rows - start, ROWS)
        own = tl.sum(values, axis=0)[None, :] / number
        around = tl.where(live, values - own, 0.0)
        apart = own - mean
        share = number.to(tl.float32) / (seen + number)
        spread += tl.sum(around * around, axis=0)[None, :] + apart * apart * share * seen
        mean += apart * share
        seen += number
    tl.store(halves + part * C + c, mean, mask=c < C)
    tl.store(halves + (parts + part) * C + c, spread, mask=c < C)


@triton.jit(do_not_specialize=["parts"])
def joined_moments(
    count, halves, known_mean, known_variance, tracked, mean, scale, parts: "i64", C: tl.constexpr, MOST: tl.constexpr,
    LANES: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr, KNOWN: tl.constexpr, FOLLOWS: tl.constexpr,
    TRACKED: tl.constexpr, MOMENTUM: tl.constexpr
):  # fmt: skip
    """Mean and 1 / sqrt(variance + eps) of all rows; those that are known follow, by 1 / tracked where MOMENTUM < 0."""
    c = tl.program_id(0) * LANES + tl.arange(0, LANES)[None, :]
    p = tl.arange(0, MOST)[:, None]
    there = (p < parts) & (c < C)
    rows = tl.load(count)
    # How many rows a part has: whole blocks, and what is left of the last one.
    blocks, left = rows // ROWS, rows % ROWS
    step = parts.to(tl.int32)
    number = (blocks // step + (p < blocks % step).to(tl.int32)) * ROWS + tl.where(p == blocks % step, left, 0)
    number = tl.where(p < parts, number, 0).to(tl.float32)
    own = tl.load(halves + p * C + c, mask=there, other=0)
    total = tl.maximum(rows, 1).to(tl.float32)
    centre = tl.sum(own * (number / total), axis=0)[None, :]
    apart = own - centre
    spread = tl.load(halves + (parts + p) * C + c, mask=there, other=0) + number * apart * apart
    variance = tl.sum(tl.where(there, spread, 0.0), axis=0)[None, :] / total
    old_mean = tl.zeros([1, LANES], tl.float32)
    old_variance = tl.full([1, LANES], 1.0, tl.float32)
    if KNOWN:
        old_mean = tl.load(known_mean + c, mask=c < C, other=0).to(tl.float32)
        old_variance = tl.load(known_variance + c, mask=c < C, other=0).to(tl.float32)
        if FOLLOWS:
            if rows > 1:
                if MOMENTUM >= 0:
                    share = tl.full([1, 1], MOMENTUM, tl.float32)
                    if TRACKED:
                        if tl.program_id(0) == 0:
                            tl.store(tracked, tl.load(tracked) + 1)
                elif TRACKED:
                    share = tl.full([1, 1], 1.0, tl.float32) / tl.load(tracked).to(tl.float32)
                else:
                    share = tl.zeros([1, 1], tl.float32)
                unbiased = variance * (total / (total - 1))
                tl.store(known_mean + c, old_mean + share * (centre - old_mean), mask=c < C)
                tl.store(known_variance + c, old_variance + share * (unbiased - old_variance), mask=c < C)
    centre = tl.where(rows > 1, centre, old_mean)
    variance = tl.where(rows > 1, variance, old_variance)
    tl.store(mean + c, centre, mask=c < C)
    tl.store(scale + c, 1.0 / tl.sqrt(variance + EPS), mask=c < C)


@triton.jit
def normalise(
    x, count, mean, scale, weight, bias, y, C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """y = (x - mean) * scale * weight + bias, with RELU 0 where that is below."""
    block, c = _place(C, LANES)
    r = block * ROWS + tl.arange(0, ROWS)[:, None]
    rows = tl.load(count)
    if block * ROWS < rows:
        live = (r < rows) & (c < C)
        at = r.to(tl.int64) * C + c
        found = tl.load(x + at, mask=live, other=0).to(tl.float32) - tl.load(mean + c, mask=c < C, other=0)
        found = _affine(found * tl.load(scale + c, mask=c < C, other=0), weight, bias, c, C, WEIGHT, BIAS)
        if RELU:
            found = tl.where(found < 0.0, 0.0, found)
        tl.store(y + at, found, mask=live)


@triton.jit(do_not_specialize=["parts"])
def products(
    grad, x, count, mean, scale, weight, bias, halves, parts: "i64", C: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """Of every parts-th block of rows: the sums of grad, and of grad * (x - mean) * scale; halves is [2, parts, C].

    With RELU grad counts where the result is above 0.
    """
    part, c = _place(C, LANES)
    rows = tl.load(count)
    centre = tl.load(mean + c, mask=c < C, other=0)
    factor = tl.load(scale + c, mask=c < C, other=0)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    found = tl.zeros([ROWS, LANES], tl.float32)
    for start in range(part * ROWS, rows, parts.to(tl.int32) * ROWS):
        r = start + tl.arange(0, ROWS)[:, None]
        live = (r < rows) & (c < C)
        at = r.to(tl.int64) * C + c
        values = tl.load(grad + at, mask=live, other=0).to(tl.float32)
        apart = tl.where(live, tl.load(x + at, mask=live, other=0).to(tl.float32) - centre, 0.0)
        if RELU:
            values = tl.where(_affine(apart * factor, weight, bias, c, C, WEIGHT, BIAS) > 0.0, values, 0.0)
        sums += values
        found += values * apart
    tl.store(halves + part * C + c, tl.sum(sums, axis=0)[None, :], mask=c < C)
    found *= factor
    tl.store(halves + (parts + part) * C + c, tl.sum(found, axis=0)[None, :], mask=c < C)


@triton.jit(do_not_specialize=["parts"])
def joined_sums(halves, sums, found, parts: "i64", C: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr):
    """The sums of all parts."""
    c = tl.program_id(0) * LANES + tl.arange(0, LANES)[None, :]
    p = tl.arange(0, MOST)[:, None]
    there = (p < parts) & (c < C)
    first = tl.load(halves + p * C + c, mask=there, other=0)
    second = tl.load(halves + (parts + p) * C + c, mask=there, other=0)
    tl.store(sums + c, tl.sum(first, axis=0)[None, :], mask=c < C)
    tl.store(found + c, tl.sum(second, axis=0)[None, :], mask=c < C)


@triton.jit
def gradient(
    grad, x, count, mean, scale, weight, bias, sums, found, dx, C: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """dx = scale * weight * (grad - (sums + (x - mean) * scale * found) / rows); with RELU as in `products`."""
    block, c = _place(C, LANES)
    r = block * ROWS + tl.arange(0, ROWS)[:, None]
    rows = tl.load(count)
    if block * ROWS < rows:
        live = (r < rows) & (c < C)
        at = r.to(tl.int64) * C + c
        factor = tl.load(scale + c, mask=c < C, other=0)
        apart = tl.load(x + at, mask=live, other=0).to(tl.float32) - tl.load(mean + c, mask=c < C, other=0)
        apart *= factor
        own = tl.load(grad + at, mask=live, other=0).to(tl.float32)
        if RELU:
            own = tl.where(_affine(apart, weight, bias, c, C, WEIGHT, BIAS) > 0.0, own, 0.0)
        shared = apart * tl.load(found + c, mask=c < C, other=0) + tl.load(sums + c, mask=c < C, other=0)
        # Fewer than two rows were normalised by what does not depend on them.
        share = tl.where(rows > 1, 1.0 / tl.maximum(rows, 1), 0.0)
        if WEIGHT:
            factor *= tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
        tl.store(dx + at, (own - shared * share) * factor, mask=live)
