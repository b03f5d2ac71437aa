"""Triton kernels of norm.py and rows.py; plain torch versions are there. Imported lazily: needs Triton."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl


@triton.jit
def _place(C: tl.constexpr, LANES: tl.constexpr):
    """(block of rows, channels [1, LANES]) of a program."""
    sides: tl.constexpr = (C + LANES - 1) // LANES
    number = tl.program_id(0)
    return number // sides, (number % sides) * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _affine(values, weight, bias, c, C: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """values * weight + bias per channel."""
    if WEIGHT:
        values *= tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
    if BIAS:
        values += tl.load(bias + c, mask=c < C, other=0).to(tl.float32)
    return values


@triton.jit
def _room(halves):
    """Workspace bytes as float32 pointer."""
    return halves.to(tl.pointer_type(tl.float32))


@triton.jit
def _last(waiting, parts, C: tl.constexpr, LANES: tl.constexpr):
    """True in the last program of these channels that stored its partial sums; it resets the counter."""
    sides: tl.constexpr = (C + LANES - 1) // LANES
    where = waiting + tl.program_id(0) % sides
    # All threads must have stored before one of them increments the counter.
    tl.debug_barrier()
    done = tl.atomic_add(where, 1, sem="acq_rel") == parts - 1
    if done:
        tl.store(where, 0)
    return done


@triton.jit
def _around(mean, spread, seen):
    """Merge rows of (mean, sum of squared deviations, count) into one (mean, sum of squared deviations)."""
    total = tl.maximum(tl.sum(seen, axis=0)[None, :], 1.0)
    centre = tl.sum(mean * (seen / total), axis=0)[None, :]
    apart = mean - centre
    return centre, tl.sum(spread + seen * apart * apart, axis=0)[None, :]


@triton.jit(do_not_specialize=["parts"])
def moments(
    x, count, known_mean, known_variance, tracked, offset, pair, halves, waiting, parts: "i64", momentum,
    C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr,
    EPS: tl.constexpr, MEAN: tl.constexpr, KNOWN: tl.constexpr, FOLLOWS: tl.constexpr, TRACKED: tl.constexpr,
    OFFSET: tl.constexpr
):  # fmt: skip
    """pair [2, C]: mean and 1 / sqrt(variance + eps) of valid rows; running ones (KNOWN, else 0 and 1) below two rows.

    With FOLLOWS these are updated by momentum, or by 1 / tracked for a cumulative MEAN; with OFFSET the running mean
    includes the offset. Each part (every parts-th block of rows) stores its mean and sum of squared deviations in
    halves [2, parts, C]; the last program merges them in a fixed order.
    """
    halves = _room(halves)
    part, c = _place(C, LANES)
    rows = tl.load(count)
    # A running mean per element of the block: a reduction over rows in the loop would stall the loads.
    mean = tl.zeros([ROWS, LANES], tl.float32)
    spread = tl.zeros([ROWS, LANES], tl.float32)
    seen = tl.zeros([ROWS, 1], tl.float32)
    turn = 0.0
    for start in tl.range(part * ROWS, rows, parts.to(tl.int32) * ROWS, num_stages=STAGES):
        r = start + tl.arange(0, ROWS)[:, None]
        live = (r < rows) & (c < C)
        values = tl.load(x + r.to(tl.int64) * C + c, mask=live, other=0).to(tl.float32)
        turn += 1.0
        apart = tl.where(live, values - mean, 0.0)
        mean += apart * (1.0 / turn)
        spread += apart * (values - mean)
        seen += tl.where(r < rows, 1.0, 0.0)
    centre, spread = _around(mean, spread, seen)
    tl.store(halves + part * C + c, centre, mask=c < C)
    tl.store(halves + (parts + part) * C + c, spread, mask=c < C)
    if _last(waiting, parts, C, LANES):
        total = tl.maximum(rows, 1).to(tl.float32)
        centre, spread = _joined_moments(halves, rows, parts, c, C, ROWS, LANES, SLOTS)
        variance = spread / total
        old_mean = tl.zeros([1, LANES], tl.float32)
        old_variance = tl.full([1, LANES], 1.0, tl.float32)
        beyond = tl.zeros([1, LANES], tl.float32)
        if KNOWN:
            old_mean = tl.load(known_mean + c, mask=c < C, other=0).to(tl.float32)
            old_variance = tl.load(known_variance + c, mask=c < C, other=0).to(tl.float32)
        if OFFSET:
            beyond = tl.load(offset + c, mask=c < C, other=0).to(tl.float32)
            old_mean -= beyond
        if KNOWN and FOLLOWS:
            if rows > 1:
                share = tl.zeros([1, 1], tl.float32)
                if not MEAN:
                    share += momentum
                    if TRACKED:
                        if tl.program_id(0) % ((C + LANES - 1) // LANES) == 0:
                            tl.store(tracked, tl.load(tracked) + 1)
                elif TRACKED:
                    share += 1.0 / tl.load(tracked).to(tl.float32)
                unbiased = variance * (total / (total - 1))
                tl.store(known_mean + c, old_mean + share * (centre - old_mean) + beyond, mask=c < C)
                tl.store(known_variance + c, old_variance + share * (unbiased - old_variance), mask=c < C)
        centre = tl.where(rows > 1, centre, old_mean)
        variance = tl.where(rows > 1, variance, old_variance)
        tl.store(pair + c, centre, mask=c < C)
        tl.store(pair + C + c, 1.0 / tl.sqrt(variance + EPS), mask=c < C)


@triton.jit
def _joined_moments(
    halves, rows, parts, c, C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """(mean, sum of squared deviations) of valid rows, merged from the parts."""
    # A part has whole blocks of rows; one part also has the partial block.
    blocks, left = rows // ROWS, rows % ROWS
    step = parts.to(tl.int32)
    mean = tl.zeros([SLOTS, LANES], tl.float32)
    spread = tl.zeros([SLOTS, LANES], tl.float32)
    seen = tl.zeros([SLOTS, LANES], tl.float32)
    for first in tl.range(0, step, SLOTS, loop_unroll_factor=4):
        p = first + tl.arange(0, SLOTS)[:, None]
        there = (p < step) & (c < C)
        number = (blocks // step + (p < blocks % step).to(tl.int32)) * ROWS + tl.where(p == blocks % step, left, 0)
        number = tl.where(there, number, 0).to(tl.float32)
        apart = tl.load(halves + p * C + c, mask=there, other=0, cache_modifier=".cg") - mean
        around = tl.load(halves + (step + p) * C + c, mask=there, other=0, cache_modifier=".cg")
        share = number / tl.maximum(seen + number, 1.0)
        spread += around + apart * apart * share * seen
        mean += apart * share
        seen += number
    return _around(mean, spread, seen)


@triton.jit
def normalise(
    x, count, pair, weight, bias, residual, y, C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """Valid rows y = (x - mean) * scale * weight + bias, (mean, scale) in pair; ADDS: + residual; RELU: max(y, 0)."""
    block, c = _place(C, LANES)
    r = block * ROWS + tl.arange(0, ROWS)[:, None]
    rows = tl.load(count)
    if block * ROWS < rows:
        live = (r < rows) & (c < C)
        at = r.to(tl.int64) * C + c
        found = tl.load(x + at, mask=live, other=0).to(tl.float32) - tl.load(pair + c, mask=c < C, other=0)
        found = _affine(found * tl.load(pair + C + c, mask=c < C, other=0), weight, bias, c, C, WEIGHT, BIAS)
        if ADDS:
            found += tl.load(residual + at, mask=live, other=0).to(tl.float32)
        if RELU:
            found = tl.where(found < 0.0, 0.0, found)
        tl.store(y + at, found, mask=live)


@triton.jit(do_not_specialize=["rows"])
def by_statistics(
    x, mean, variance, weight, bias, y, rows: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    EPS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """y = (x - mean) / sqrt(variance + eps) * weight + bias of all rows."""
    block, c = _place(C, LANES)
    r = block * ROWS + tl.arange(0, ROWS)[:, None]
    live = (r < rows) & (c < C)
    at = r.to(tl.int64) * C + c
    found = tl.load(x + at, mask=live, other=0).to(tl.float32) - tl.load(mean + c, mask=c < C, other=0).to(tl.float32)
    found *= 1.0 / tl.sqrt(tl.load(variance + c, mask=c < C, other=1).to(tl.float32) + EPS)
    tl.store(y + at, _affine(found, weight, bias, c, C, WEIGHT, BIAS), mask=live)


@triton.jit
def _relu_grad(
    values, centred, y, weight, bias, c, live, C: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ADDS: tl.constexpr, RELU: tl.constexpr
):  # fmt: skip
    """Gradient before the ReLU, whose result is loaded from addresses y with ADDS, else recomputed."""
    if RELU:
        if ADDS:
            result = tl.load(y, mask=live, other=0).to(tl.float32)
        else:
            result = _affine(centred, weight, bias, c, C, WEIGHT, BIAS)
        values = tl.where(result > 0.0, values, 0.0)
    return values


@triton.jit(do_not_specialize=["parts", "stride"])
def products(
    grad, x, count, pair, weight, bias, y, sums, halves, waiting, parts: "i64", stride: "i64", C: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr, STAGES: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """sums [2, C]: of grad (before the ReLU) and of grad * (x - mean) * scale; partial sums in halves. stride: row
    stride of grad, a multiple of UNIT."""
    halves, stride = _room(halves), tl.multiple_of(stride, UNIT)
    part, c = _place(C, LANES)
    rows = tl.load(count)
    centre = tl.load(pair + c, mask=c < C, other=0)
    factor = tl.load(pair + C + c, mask=c < C, other=0)
    own = tl.zeros([ROWS, LANES], tl.float32)
    multiplied = tl.zeros([ROWS, LANES], tl.float32)
    for start in tl.range(part * ROWS, rows, parts.to(tl.int32) * ROWS, num_stages=STAGES):
        r = start + tl.arange(0, ROWS)[:, None]
        live = (r < rows) & (c < C)
        at = r.to(tl.int64) * C + c
        values = tl.load(grad + r.to(tl.int64) * stride + c, mask=live, other=0).to(tl.float32)
        apart = tl.where(live, tl.load(x + at, mask=live, other=0).to(tl.float32) - centre, 0.0)
        values = _relu_grad(values, apart * factor, y + at, weight, bias, c, live, C, WEIGHT, BIAS, ADDS, RELU)
        own += values
        multiplied += values * apart
    tl.store(halves + part * C + c, tl.sum(own, axis=0)[None, :], mask=c < C)
    multiplied *= factor
    tl.store(halves + (parts + part) * C + c, tl.sum(multiplied, axis=0)[None, :], mask=c < C)
    if _last(waiting, parts, C, LANES):
        step = parts.to(tl.int32)
        first = tl.zeros([SLOTS, LANES], tl.float32)
        second = tl.zeros([SLOTS, LANES], tl.float32)
        for turn in tl.range(0, step, SLOTS, loop_unroll_factor=4):
            p = turn + tl.arange(0, SLOTS)[:, None]
            there = (p < step) & (c < C)
            first += tl.load(halves + p * C + c, mask=there, other=0, cache_modifier=".cg")
            second += tl.load(halves + (step + p) * C + c, mask=there, other=0, cache_modifier=".cg")
        tl.store(sums + c, tl.sum(first, axis=0)[None, :], mask=c < C)
        tl.store(sums + C + c, tl.sum(second, axis=0)[None, :], mask=c < C)


@triton.jit(do_not_specialize=["stride"])
def gradient(
    grad, x, count, pair, weight, bias, y, sums, dresidual, dx, stride: "i64", C: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
    UNIT: tl.constexpr
):  # fmt: skip
    """dx = scale * weight * (grad - (sums[0] + (x - mean) * scale * sums[1]) / rows), grad before the ReLU, which with
    ADDS and RELU is stored in dresidual. stride: row stride of grad, a multiple of UNIT."""
    stride = tl.multiple_of(stride, UNIT)
    block, c = _place(C, LANES)
    r = block * ROWS + tl.arange(0, ROWS)[:, None]
    rows = tl.load(count)
    if block * ROWS < rows:
        live = (r < rows) & (c < C)
        at = r.to(tl.int64) * C + c
        factor = tl.load(pair + C + c, mask=c < C, other=0)
        apart = tl.load(x + at, mask=live, other=0).to(tl.float32) - tl.load(pair + c, mask=c < C, other=0)
        apart *= factor
        own = tl.load(grad + r.to(tl.int64) * stride + c, mask=live, other=0).to(tl.float32)
        own = _relu_grad(own, apart, y + at, weight, bias, c, live, C, WEIGHT, BIAS, ADDS, RELU)
        if ADDS and RELU:
            tl.store(dresidual + at, own, mask=live)
        shared = apart * tl.load(sums + C + c, mask=c < C, other=0) + tl.load(sums + c, mask=c < C, other=0)
        # The statistics of fewer than two rows are constants.
        share = tl.where(rows > 1, 1.0 / tl.maximum(rows, 1), 0.0)
        if WEIGHT:
            factor *= tl.load(weight + c, mask=c < C, other=0).to(tl.float32)
        tl.store(dx + at, (own - shared * share) * factor, mask=live)


@triton.jit(do_not_specialize=["total", "channels"])
def zero_padding_rows(values, count, total: tl.int64, channels: tl.int64, BLOCK: tl.constexpr):
    """values[r, :] = 0 for padding rows r >= count; total: elements of values."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    living = tl.load(count) * channels
    at, nothing = first + tl.arange(0, BLOCK), tl.zeros((BLOCK,), values.dtype.element_ty)
    if (first >= living) & (first + BLOCK <= total):
        # Stores without a mask are vectorised.
        tl.store(values + at, nothing)
    elif first + BLOCK > living:
        tl.store(values + at, nothing, mask=(at >= living) & (at < total))


@triton.jit
def _pool_place(C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """(rows [ROWS], channels [1, LANES]) of a program."""
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
    o, c = _pool_place(C, ROWS, LANES)
    within = c < C
    top = tl.full([ROWS, LANES], float("-inf"), tl.float32)
    first = tl.full([ROWS, LANES], -1, tl.int32)
    for tap in range(VOLUME):
        met = tl.load(rows + o * VOLUME + tap, mask=o < outputs, other=-1).to(tl.int64)[:, None]
        value = tl.load(x + met * C + c, mask=(met >= 0) & within, other=0.0).to(tl.float32)
        # NaN propagates; of several, taps has the last.
        better = (met >= 0) & ((value > top) | (value != value) | (first < 0))
        top = tl.where(better, value, top)
        first = tl.where(better, tap, first)
    at, there = o[:, None] * C + c, (o < outputs)[:, None] & within
    tl.store(y + at, tl.where(first < 0, 0.0, top), mask=there)
    if KEPT:
        tl.store(taps + at, first, mask=there)


@triton.jit(do_not_specialize=["inputs"])
def max_pool_gradient(
    grad, rows, taps, dx, inputs: "i64", C: tl.constexpr, VOLUME: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """dx[i, c] = sum over k of grad[rows[i, k], c] where taps[rows[i, k], c] = k."""
    i, c = _pool_place(C, ROWS, LANES)
    within = c < C
    found = tl.zeros([ROWS, LANES], tl.float32)
    for tap in range(VOLUME):
        met = tl.load(rows + i * VOLUME + tap, mask=i < inputs, other=-1).to(tl.int64)[:, None]
        there = (met >= 0) & within
        own = tl.load(taps + met * C + c, mask=there, other=-1).to(tl.int32) == tap
        found += tl.load(grad + met * C + c, mask=there & own, other=0.0).to(tl.float32)
    tl.store(dx + i[:, None] * C + c, found, mask=(i < inputs)[:, None] & within)


@triton.jit
def _item_block(items, start, last, batch, ROWS: tl.constexpr):
    """Rows [ROWS, 1] of a block, their batch items (-1: none), and the range of items that occur."""
    r = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
    item = tl.load(items + r, mask=r < last, other=-1).to(tl.int32)
    # Coordinates may not have been checked yet.
    item = tl.where(item < batch, item, -1)
    return r, item, tl.min(tl.where(item < 0, 0x7FFFFFFF, item)), tl.max(item)


@triton.jit(do_not_specialize=["rows", "chunk", "batch"])
def sum_items(
    x, items, sums, rows: "i64", chunk: "i64", batch: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """sums[p, b, c] += sum of x[r, c] over the rows r of chunk p with items[r] = b."""
    part, c = _place(C, LANES)
    last = tl.minimum((part + 1) * chunk, rows)
    for start in range(part * chunk, last, ROWS):
        r, item, low, high = _item_block(items, start, last, batch, ROWS)
        values = tl.load(x + r * C + c, mask=(item >= 0) & (c < C), other=0).to(sums.dtype.element_ty)
        for b in range(low, high + 1):
            found = tl.sum(tl.where(item == b, values, 0), axis=0)[None, :]
            # No other program writes to this part, so that the order of additions is fixed.
            tl.atomic_add(sums + (part * batch + b) * C + c, found, mask=c < C, sem="relaxed")


@triton.jit(do_not_specialize=["rows", "batch"])
def spread_items(
    values, items, y, rows: "i64", batch: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """y[r, c] = values[items[r], c], 0 for item -1 and for items beyond the batch."""
    block, c = _place(C, LANES)
    r = block * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
    item = tl.load(items + r, mask=r < rows, other=-1)
    found = tl.load(values + item * C + c, mask=(item >= 0) & (item < batch) & (c < C), other=0)
    tl.store(y + r * C + c, found, mask=(r < rows) & (c < C))


@triton.jit(do_not_specialize=["rows", "chunk", "batch"])
def max_items(
    x, items, tops, rows: "i64", chunk: "i64", batch: "i64", C: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """tops[p, b, c] = the largest key of x[r, c] over the rows r of chunk p with items[r] = b. Keys order by value (NaN
    above infinity), then by row, the first above the last."""
    part, c = _place(C, LANES)
    last = tl.minimum((part + 1) * chunk, rows)
    for start in range(part * chunk, last, ROWS):
        r, item, low, high = _item_block(items, start, last, batch, ROWS)
        values = tl.load(x + r * C + c, mask=(item >= 0) & (c < C), other=0).to(tl.float32)
        # Zeros of both signs are equal.
        bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
        bits = tl.where(values != values, 0x7FC00000, bits ^ ((bits >> 31) & 0x7FFFFFFF))
        key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - r)
        for b in range(low, high + 1):
            found = tl.max(tl.where(item == b, key, -0x8000000000000000), axis=0)[None, :]
            tl.atomic_max(tops + (part * batch + b) * C + c, found, mask=c < C, sem="relaxed")


@triton.jit(do_not_specialize=["width"])
def sum_by_rows(x, order, starts, out, width: "i64", BLOCK: tl.constexpr):
    """out[n, c] = sum of x[order[p], c] over starts[n] <= p < starts[n + 1], in a fixed order."""
    blocks = tl.cdiv(width, BLOCK)
    row, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    kind = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    total, last = tl.zeros([8, BLOCK], kind), tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), last, 8):
        p = first + tl.arange(0, 8)[:, None]
        b = tl.load(order + p, mask=p < last, other=0).to(tl.int64)
        total += tl.load(x + b * width + c, mask=(p < last) & (c < width), other=0).to(kind)
    tl.store(out + row * width + tl.arange(0, 1)[:, None] + c, tl.sum(total, 0)[None, :], mask=c < width)
