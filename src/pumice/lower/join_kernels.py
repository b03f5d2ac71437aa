"""Triton kernels of joins.py; plain torch versions are there. Imported lazily: needs Triton."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pieces"])
def join(
    x, inputs, factors, own, like, owners, slots, starts, stops, y, ties, parts, part_ties, pieces: "i64",
    C: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, LANES: tl.constexpr, HOW: tl.constexpr,
    TIES: tl.constexpr, ADDS: tl.constexpr, INDEXED: tl.constexpr, SCALED: tl.constexpr, FOLDS: tl.constexpr
):  # fmt: skip
    """y[s, c] = sum, max or min over p of x[inputs[p], c] * factors[p], s the owner of a piece; HOW "share": the sum of
    those p for which own[s, c] * factors[p] = like[inputs[p], c]. A piece with a slot is stored in `parts` instead.
    TIES: also the number of entries that attain an extreme. ADDS: to what is in y. FOLDS: entries are parts, and
    `inputs` their ties."""
    sides: tl.constexpr = (C + LANES - 1) // LANES
    number = tl.program_id(0)
    n = (number // sides) * ROWS + tl.arange(0, ROWS)
    c = (number % sides) * LANES + tl.arange(0, LANES)[None, :]
    alive = n < pieces
    owner = tl.load(owners + n, mask=alive, other=0).to(tl.int64)[:, None]
    slot = tl.load(slots + n, mask=alive, other=-1).to(tl.int64)[:, None]
    start = tl.load(starts + n, mask=alive, other=0)
    stop = tl.load(stops + n, mask=alive, other=0)
    found = tl.zeros([ROWS, LANES], tl.float32)
    met = tl.zeros([ROWS, LANES], tl.float32)
    here = alive[:, None] & (c < C)
    if HOW == "share":
        mine = tl.load(own + owner * C + c, mask=here, other=0).to(tl.float32)
    if HOW == "max" or HOW == "min":
        found += float("-inf")
    for first in range(0, tl.max(stop - start), STEP):
        for k in tl.static_range(STEP):
            p = start + (first + k)
            live = p < stop
            i = p.to(tl.int64)[:, None]
            if INDEXED:
                i = tl.load(inputs + p, mask=live, other=0).to(tl.int64)[:, None]
            there = live[:, None] & (c < C)
            value = tl.load(x + i * C + c, mask=there, other=0).to(tl.float32)
            if SCALED:
                factor = tl.load(factors + p, mask=live, other=0)[:, None]
            if HOW == "sum":
                if SCALED:
                    value *= factor
                found += value
            elif HOW == "share":
                meant = mine
                if SCALED:
                    meant = mine * factor
                    value *= factor
                result = tl.load(like + i * C + c, mask=there, other=0)
                equal = there & (meant.to(like.dtype.element_ty) == result)
                found += tl.where(equal, value, 0.0)
            else:
                if SCALED:
                    # Compared as the result is rounded.
                    value = (value * factor).to(y.dtype.element_ty).to(tl.float32)
                number_of = tl.full([ROWS, LANES], 1.0, tl.float32)
                if FOLDS and TIES:
                    number_of = tl.load(inputs + i * C + c, mask=there, other=0)
                # NaN propagates, and is attained by none.
                if HOW == "min":
                    value = -value
                nan = (value != value) | (found != found)
                number_of = tl.where(nan, 0.0, number_of)
                more = there & ((value > found) | (value != value))
                met = tl.where(more, number_of, tl.where(there & (value == found), met + number_of, met))
                found = tl.where(more, value, found)
    if HOW == "max" or HOW == "min":
        if HOW == "min":
            found = -found
        found = tl.where((stop > start)[:, None], found, 0.0)
    if FOLDS:
        whole = here
    else:
        whole = here & (slot < 0)
        tl.store(parts + slot * C + c, found, mask=here & (slot >= 0))
        if TIES:
            tl.store(part_ties + slot * C + c, met, mask=here & (slot >= 0))
    if ADDS:
        found += tl.load(y + owner * C + c, mask=whole, other=0).to(tl.float32)
    tl.store(y + owner * C + c, found, mask=whole)
    if TIES:
        tl.store(ties + owner * C + c, met, mask=whole)
