"""Triton kernels that search among points held in leaves (coords.points.PointLeaves).

Queries are held in leaves, too: a program serves those of one leaf, and meets the leaves of points that are not too far
from its box. Distances and bounds are sums of squares from the first axis to the last, not fused (`fused=False`).

A key orders points by (squared distance, index): the bits of the distance << 32 | index; -1 is below all keys."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

ABSENT = tl.constexpr((1 << 63) - 1)
LAST = tl.constexpr((1 << 31) - 1)
BEYOND = tl.constexpr(1 << 40)  # Above all indices
_NUMBERS = ["k", "most", "stride", "query_stride"]


@triton.jit(do_not_specialize=["count"])
def codes(
    points, items, low, unit, found, count: "i64",
    D: tl.constexpr, AXES: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found[p]: batch item and Morton code of point p's cell of size `unit` from `low`, on the first AXES axes."""
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = p < count
    code = tl.load(items + p, mask=there, other=0) << (AXES * DEPTH)
    for axis in tl.static_range(AXES):
        x = (tl.load(points + p * D + axis, mask=there, other=0.0) - tl.load(low + axis)) / tl.load(unit)
        cell = tl.minimum(x, (1 << DEPTH) - 1.0).to(tl.int64)
        for bit in tl.static_range(DEPTH):
            code |= ((cell >> bit) & 1) << (bit * AXES + AXES - 1 - axis)
    tl.store(found + p, code, mask=there)


@triton.jit(do_not_specialize=["stride"])
def leaves(points, order, begins, counts, held, index, boxes, stride: "i64", D: tl.constexpr, LEAF: tl.constexpr):
    """The leaf of the program: up to LEAF points in `order` from begins[leaf] on."""
    leaf = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LEAF)
    there = lane < tl.load(counts + leaf)
    which = tl.load(order + tl.load(begins + leaf) + lane, mask=there, other=-1)
    tl.store(index + leaf * LEAF + lane, which.to(tl.int32))
    for axis in tl.static_range(D):
        x = tl.load(points + which * D + axis, mask=there, other=float("inf"))
        tl.store(held + (leaf * D + axis) * LEAF + lane, x)
        tl.store(boxes + axis * stride + leaf, tl.min(x))
        tl.store(boxes + (D + axis) * stride + leaf, tl.max(tl.where(there, x, -float("inf"))))


@triton.jit
def _key(far, index):
    return (far.to(tl.int32, bitcast=True).to(tl.int64) << 32) | index.to(tl.int64)


@triton.jit
def _distances(points, queries, leaf, query_leaf, D: tl.constexpr, LEAF: tl.constexpr, QUERIES: tl.constexpr):
    """[LEAF, QUERIES]: squared distances of the points and queries of two leaves. Queries are the fast axis: a thread
    holds all points of a query, and sums and minima over points take no exchange between threads."""
    total = tl.zeros([LEAF, QUERIES], tl.float32)
    for axis in tl.static_range(D):
        p = tl.load(points + (leaf * D + axis) * LEAF + tl.arange(0, LEAF))
        q = tl.load(queries + (query_leaf * D + axis) * QUERIES + tl.arange(0, QUERIES))
        apart = p[:, None] - q[None, :]
        total += apart * apart
    return total


@triton.jit
def _bounds(boxes, query_boxes, leaf, query_leaf, there, stride, query_stride, D: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK]: squared distances of the boxes of leaves from that of a leaf of queries, inf where not `there`."""
    total = tl.zeros([CHUNK], tl.float32)
    for axis in tl.static_range(D):
        low = tl.load(boxes + axis * stride + leaf, mask=there, other=0.0)
        high = tl.load(boxes + (D + axis) * stride + leaf, mask=there, other=0.0)
        first = tl.load(query_boxes + axis * query_stride + query_leaf)
        last = tl.load(query_boxes + (D + axis) * query_stride + query_leaf)
        apart = tl.maximum(tl.maximum(low - last, first - high), 0.0)
        total += apart * apart
    return tl.where(there, total, float("inf"))


@triton.jit
def _middle_leaf(
    boxes, query_boxes, begin, end, query_leaf, stride, query_stride, D: tl.constexpr, CHUNK: tl.constexpr
):
    """The leaf whose box has its middle next to that of a leaf of queries; -1 without leaves."""
    found, least, start = begin * 0 - 1, tl.full([], float("inf"), tl.float32), begin
    while start < end:
        leaf = start + tl.arange(0, CHUNK)
        there = leaf < end
        total = tl.zeros([CHUNK], tl.float32)
        for axis in tl.static_range(D):
            sides = tl.load(boxes + axis * stride + leaf, mask=there, other=0.0)
            sides += tl.load(boxes + (D + axis) * stride + leaf, mask=there, other=0.0)
            first = tl.load(query_boxes + axis * query_stride + query_leaf)
            apart = sides - (first + tl.load(query_boxes + (D + axis) * query_stride + query_leaf))
            total += apart * apart
        total = tl.where(there, total, float("inf"))
        near = tl.min(total)
        found = tl.where(near < least, start + tl.argmin(total, 0), found)
        least = tl.minimum(near, least)
        start += CHUNK
    return found


@triton.jit
def _met(
    keys, points, index, queries, leaf, query_leaf, most,
    D: tl.constexpr, LEAF: tl.constexpr, QUERIES: tl.constexpr, BY_INDEX: tl.constexpr,
):  # fmt: skip
    """keys [SLOTS, QUERIES] with the points of a leaf that are better than the worst of them."""
    far = _distances(points, queries, leaf, query_leaf, D, LEAF, QUERIES)
    which = tl.load(index + leaf * LEAF + tl.arange(0, LEAF))[:, None]
    if BY_INDEX:
        fresh = tl.where(far <= most, which.to(tl.int64), ABSENT)
    else:
        fresh = tl.where(far <= most, _key(far, which), ABSENT)
    worst = tl.max(keys, 0)
    best = tl.min(fresh, 0)
    while tl.max((best < worst).to(tl.int32)) > 0:
        better = best < worst
        keys = tl.where((keys == worst[None, :]) & better[None, :], best[None, :], keys)
        fresh = tl.where(fresh == best[None, :], ABSENT, fresh)
        worst = tl.max(keys, 0)
        best = tl.min(fresh, 0)
    return keys


@triton.jit
def _reach(keys, there, most, BY_INDEX: tl.constexpr):
    """Squared distance beyond which no query has use for a point."""
    if BY_INDEX:
        return most
    bits = (tl.max(keys, 0) >> 32).to(tl.int32)
    return tl.minimum(tl.max(tl.where(there, bits, 0)).to(tl.float32, bitcast=True), most)


@triton.jit(do_not_specialize=_NUMBERS)
def nearest(
    points, index, boxes, item_leaf, queries, query_index, query_boxes, query_item, found, apart,
    k: "i64", most, stride: "i64", query_stride: "i64",
    D: tl.constexpr, LEAF: tl.constexpr, QUERIES: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
    BY_INDEX: tl.constexpr,
):  # fmt: skip
    """found, apart [Q, k]: the k best points of each query, sorted, -1 and inf for none; apart is that of the keys."""
    own = tl.program_id(0).to(tl.int64)
    which = tl.load(query_index + own * QUERIES + tl.arange(0, QUERIES))
    slot = tl.arange(0, SLOTS).to(tl.int64)
    there = which >= 0
    limit = tl.cast(most, tl.float32)
    empty = BEYOND if BY_INDEX else (limit.to(tl.int32, bitcast=True).to(tl.int64) + 1) << 32
    # Slots that are too many, and those of padding, hold what nothing is better than.
    keys = tl.where((slot < k)[:, None] & there[None, :], (empty + slot)[:, None], (-1 - slot)[:, None])
    item = tl.load(query_item + own)
    begin, end = tl.load(item_leaf + item), tl.load(item_leaf + item + 1)
    middle = _middle_leaf(boxes, query_boxes, begin, end, own, stride, query_stride, D, CHUNK)
    if middle >= 0:
        keys = _met(keys, points, index, queries, middle, own, limit, D, LEAF, QUERIES, BY_INDEX)
    start = begin
    while start < end:
        leaf = start + tl.arange(0, CHUNK)
        inside = (leaf < end) & (leaf != middle)
        bound = _bounds(boxes, query_boxes, leaf, own, inside, stride, query_stride, D, CHUNK)
        while tl.min(bound) <= _reach(keys, there, limit, BY_INDEX):
            next_leaf = start + tl.argmin(bound, 0)
            keys = _met(keys, points, index, queries, next_leaf, own, limit, D, LEAF, QUERIES, BY_INDEX)
            bound = tl.where(leaf == next_leaf, float("inf"), bound)
        start += CHUNK
    keys = tl.sort(tl.trans(keys), dim=1)
    # The k are the last of the slots.
    at = which[:, None].to(tl.int64) * k + (slot - (SLOTS - k))[None, :]
    mask = there[:, None] & (slot >= SLOTS - k)[None, :]
    none = keys >= empty
    far = (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(found + at, tl.where(none, -1, keys & 0xFFFFFFFF), mask=mask)
    tl.store(apart + at, tl.where(none, float("inf"), far), mask=mask)


@triton.jit(do_not_specialize=_NUMBERS)
def within(
    points, index, boxes, item_leaf, queries, query_index, query_boxes, query_item, first, found,
    most, stride: "i64", query_stride: "i64",
    D: tl.constexpr, LEAF: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """LIST: found from first[q] on: the points at most `most` away; else first[q + 1]: their number."""
    own = tl.program_id(0).to(tl.int64)
    which = tl.load(query_index + own * QUERIES + tl.arange(0, QUERIES)).to(tl.int64)
    there = which >= 0
    limit = tl.cast(most, tl.float32)
    item = tl.load(query_item + own)
    begin, end = tl.load(item_leaf + item), tl.load(item_leaf + item + 1)
    at = tl.load(first + which, mask=there, other=0) if LIST else tl.zeros([QUERIES], tl.int64)
    start = begin
    while start < end:
        leaf = start + tl.arange(0, CHUNK)
        bound = _bounds(boxes, query_boxes, leaf, own, leaf < end, stride, query_stride, D, CHUNK)
        while tl.min(bound) <= limit:
            next_leaf = start + tl.argmin(bound, 0)
            far = _distances(points, queries, next_leaf, own, D, LEAF, QUERIES)
            hit = ((far <= limit) & there[None, :]).to(tl.int32)
            if LIST:
                place = at[None, :] + tl.cumsum(hit, axis=0) - hit
                met = tl.load(index + next_leaf * LEAF + tl.arange(0, LEAF)).to(tl.int64)
                tl.store(found + place, tl.broadcast_to(met[:, None], [LEAF, QUERIES]), mask=hit > 0)
            at += tl.sum(hit, 0).to(tl.int64)
            bound = tl.where(leaf == next_leaf, float("inf"), bound)
        start += CHUNK
    if not LIST:
        tl.store(first + which + 1, at, mask=there)


@triton.jit(do_not_specialize=["stride"])
def farthest(
    whole, points, index, boxes, item_leaf, first, starts, found, apart, tops, waiting, stride: "i64",
    D: tl.constexpr, LEAF: tl.constexpr, LEAVES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Samples found[first[b]: first[b + 1]] of item b, the program. whole [N, D]: the points; apart [leaves, LEAF]: the
    squared distance to the nearest sample; tops, waiting [leaves]: memory. A key orders by (distance, -index); a leaf
    is touched by a sample if its box is nearer to it than its farthest point is to the samples before."""
    item = tl.program_id(0)
    begin, end = tl.load(item_leaf + item), tl.load(item_leaf + item + 1)
    lane, row, column = tl.arange(0, LEAVES), tl.arange(0, TILE), tl.arange(0, LEAF)[None, :]
    leaf = begin + lane
    there = leaf < end
    keys = tl.where(there, ABSENT, tl.full([LEAVES], -1, tl.int64))
    top = tl.max(keys)
    n, stop = tl.load(first + item), tl.load(first + item + 1)
    chosen = tl.load(starts + item)
    while n < stop:
        tl.store(found + n, chosen)
        total = tl.zeros([LEAVES], tl.float32)
        for axis in tl.static_range(D):
            q = tl.load(whole + chosen * D + axis)
            low = tl.load(boxes + axis * stride + leaf, mask=there, other=0.0)
            high = tl.load(boxes + (D + axis) * stride + leaf, mask=there, other=0.0)
            gap = tl.maximum(tl.maximum(low - q, q - high), 0.0)
            total += gap * gap
        farther = total.to(tl.int32, bitcast=True).to(tl.int64) < (keys >> 32)
        touched = (there & (farther | (keys == top))).to(tl.int32)
        count = tl.sum(touched)
        tl.store(waiting + begin + tl.cumsum(touched, axis=0) - 1, lane, mask=touched > 0)
        tl.debug_barrier()
        done = 0
        while done < count:
            on = done + row < count
            own = begin + tl.load(waiting + begin + done + row, mask=on, other=0)
            far = tl.zeros([TILE, LEAF], tl.float32)
            for axis in tl.static_range(D):
                p = tl.load(points + (own * D + axis)[:, None] * LEAF + column, mask=on[:, None], other=0.0)
                apart_by = p - tl.load(whole + chosen * D + axis)
                far += apart_by * apart_by
            at = own[:, None] * LEAF + column
            which = tl.load(index + at, mask=on[:, None], other=0)
            had = tl.load(apart + at, mask=on[:, None], other=-1.0)
            now = tl.where(which == chosen, -1.0, tl.minimum(far, had))
            tl.store(apart + at, now, mask=on[:, None])
            key = tl.where(now >= 0, _key(now, which ^ LAST), -1)
            tl.store(tops + own, tl.max(key, 1), mask=on)
            done += TILE
        tl.debug_barrier()
        keys = tl.load(tops + leaf, mask=there, other=-1)
        top = tl.max(keys)
        chosen = (top & LAST) ^ LAST
        n += 1
