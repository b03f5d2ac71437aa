"""Triton kernels that build and query the neighbour search structures: hash table, dense grid, bitmap; and bricks.

Requires Triton. Integer arguments are int64; per axis numbered 0 to 3, ignored from D on. Keyed range: box + margin."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

_NUMBERS = [
    "batch", "low0", "low1", "low2", "low3", "size0", "size1", "size2", "size3",
    "step0", "step1", "step2", "step3", "begin0", "begin1", "begin2", "begin3",
    "from0", "from1", "from2", "from3", "margin", "reach", "bits", "last", "limit", "capacity", "each",
]  # fmt: skip

EMPTY = tl.constexpr(2**63 - 1)  # Empty slot of a "hash" table: greater than any entry
NOBODY = tl.constexpr(-1)  # Empty slot of a "wide" table
FREE = tl.constexpr(2**31 - 1)  # Empty cell of a grid
DUPLICATE = tl.constexpr(1)
RANGE = tl.constexpr(2)
OVERFLOW = tl.constexpr(4)


@triton.jit
def _popcount(word):
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _mixed(x):
    """32-bit hash of an int64 (the finaliser of MurmurHash3 over both halves)."""
    u = x.to(tl.uint64, bitcast=True)
    h = u.to(tl.uint32) ^ ((u >> 32).to(tl.uint32) * 0x9E3779B1)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _slot(key, last):
    """(first slot, probe step) of a key among last + 1 slots. Four consecutive keys share 32 bytes; steps are odd."""
    h = _mixed(key >> 2)
    step = (((h >> 16) << 2) + 1).to(tl.int64)
    return ((h.to(tl.int64) << 2) | (key & 3)) & last, step


@triton.jit
def _axis(coords, offsets, r, k, there, tapped, step, low, D: tl.constexpr, AXIS: tl.constexpr):
    """step * c + offset - low along one axis, for rows r and kernel offsets k."""
    c = tl.load(coords + r * (D + 1) + AXIS + 1, mask=there, other=0).to(tl.int64)
    o = tl.load(offsets + k * D + AXIS, mask=tapped, other=0).to(tl.int64)
    return c * step + o - low


@triton.jit
def _entered(key, inside, v, size, margin):
    """(row-major key extended by one axis, True if v is in the keyed range less `margin` per side)."""
    return key * size + v, inside & (v >= margin) & (v < size - margin)


@triton.jit
def _cell(
    coords, offsets, r, k, there, tapped,
    batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, margin,
    D: tl.constexpr,
):  # fmt: skip
    """(row-major key, True if inside the box) of the cell that row r reaches through kernel offset k."""
    b = tl.load(coords + r * (D + 1), mask=there, other=-1).to(tl.int64)
    v = _axis(coords, offsets, r, k, there, tapped, step0, low0, D, 0)
    key, inside = _entered(b, there & tapped & (b >= 0) & (b < batch), v, size0, margin)
    if D > 1:
        v = _axis(coords, offsets, r, k, there, tapped, step1, low1, D, 1)
        key, inside = _entered(key, inside, v, size1, margin)
    if D > 2:
        v = _axis(coords, offsets, r, k, there, tapped, step2, low2, D, 2)
        key, inside = _entered(key, inside, v, size2, margin)
    if D > 3:
        v = _axis(coords, offsets, r, k, there, tapped, step3, low3, D, 3)
        key, inside = _entered(key, inside, v, size3, margin)
    return key, inside


@triton.jit
def _load_rows(coords, r, there, D: tl.constexpr):
    """int32: batch index and coordinates along axes 0 to 3 of rows r [R], -1 where masked; axes from D on are not to be
    read. The 16 bytes of a row of three axes are one load."""
    if D == 3:
        row = tl.load(coords + r[:, None] * 4 + tl.arange(0, 4)[None, :], mask=there[:, None], other=-1)
        even, odd = tl.split(tl.reshape(row, [row.shape[0], 2, 2]))
        b, c1 = tl.split(even)
        c0, c2 = tl.split(odd)
        c3 = c2
    else:
        at = coords + r * (D + 1)
        b, c0 = tl.load(at, mask=there, other=-1), tl.load(at + 1, mask=there, other=-1)
        c1, c2, c3 = c0, c0, c0
        if D > 1:
            c1 = tl.load(at + 2, mask=there, other=-1)
        if D > 3:
            c2, c3 = tl.load(at + 3, mask=there, other=-1), tl.load(at + 4, mask=there, other=-1)
    return b, c0, c1, c2, c3


@triton.jit
def _home(
    coords, r, there,
    batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, edge,
    D: tl.constexpr,
):  # fmt: skip
    """(row-major key of row r's coordinates times the steps, True if in the keyed range less `edge` per side); r [R]"""
    b, c0, c1, c2, c3 = _load_rows(coords, r, there, D)
    key, near = b.to(tl.int64), there & (b >= 0) & (b < batch)
    key, near = _entered(key, near, c0.to(tl.int64) * step0 - low0, size0, edge)
    if D > 1:
        key, near = _entered(key, near, c1.to(tl.int64) * step1 - low1, size1, edge)
    if D > 2:
        key, near = _entered(key, near, c2.to(tl.int64) * step2 - low2, size2, edge)
    if D > 3:
        key, near = _entered(key, near, c3.to(tl.int64) * step3 - low3, size3, edge)
    return key, near


@triton.jit
def _step(offsets, k, tapped, size0, size1, size2, size3, D: tl.constexpr):
    """Key difference of kernel offset k."""
    step = tl.load(offsets + k * D, mask=tapped, other=0).to(tl.int64)
    if D > 1:
        step = step * size1 + tl.load(offsets + k * D + 1, mask=tapped, other=0)
    if D > 2:
        step = step * size2 + tl.load(offsets + k * D + 2, mask=tapped, other=0)
    if D > 3:
        step = step * size3 + tl.load(offsets + k * D + 3, mask=tapped, other=0)
    return step


@triton.jit
def _digest(
    coords, offsets, r, k, there, tapped,
    batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3,
    D: tl.constexpr,
):  # fmt: skip
    """As _cell, for a box of more cells than int64 keys: the key is only a hash. The margin is 0."""
    b = tl.load(coords + r * (D + 1), mask=there, other=-1).to(tl.int64)
    v = _axis(coords, offsets, r, k, there, tapped, step0, low0, D, 0)
    inside = there & tapped & (b >= 0) & (b < batch) & (v >= 0) & (v < size0)
    key = (_mixed(b).to(tl.int64) << 31) + v
    if D > 1:
        v = _axis(coords, offsets, r, k, there, tapped, step1, low1, D, 1)
        inside = inside & (v >= 0) & (v < size1)
        key = (_mixed(key).to(tl.int64) << 31) + v
    if D > 2:
        v = _axis(coords, offsets, r, k, there, tapped, step2, low2, D, 2)
        inside = inside & (v >= 0) & (v < size2)
        key = (_mixed(key).to(tl.int64) << 31) + v
    if D > 3:
        v = _axis(coords, offsets, r, k, there, tapped, step3, low3, D, 3)
        inside = inside & (v >= 0) & (v < size3)
        key = (_mixed(key).to(tl.int64) << 31) + v
    return key, inside


@triton.jit
def _is_row(
    source, row, coords, offsets, r, k, there, tapped, step0, step1, step2, step3, D: tl.constexpr
):  # fmt: skip
    """True if row `row` of `source` has the coordinates that row r reaches through kernel offset k."""
    known = there & tapped & (row >= 0)
    at = row.to(tl.int64) * (D + 1)
    equal = known & (tl.load(source + at, mask=known, other=0) == tl.load(coords + r * (D + 1), mask=there, other=0))
    v = _axis(coords, offsets, r, k, there, tapped, step0, 0, D, 0)
    equal = equal & (tl.load(source + at + 1, mask=known, other=0).to(tl.int64) == v)
    if D > 1:
        v = _axis(coords, offsets, r, k, there, tapped, step1, 0, D, 1)
        equal = equal & (tl.load(source + at + 2, mask=known, other=0).to(tl.int64) == v)
    if D > 2:
        v = _axis(coords, offsets, r, k, there, tapped, step2, 0, D, 2)
        equal = equal & (tl.load(source + at + 3, mask=known, other=0).to(tl.int64) == v)
    if D > 3:
        v = _axis(coords, offsets, r, k, there, tapped, step3, 0, D, 3)
        equal = equal & (tl.load(source + at + 4, mask=known, other=0).to(tl.int64) == v)
    return equal


@triton.jit
def _report(status, bit: tl.constexpr, happened):
    """Set a bit of the status word if any lane of `happened` is set."""
    if tl.sum(happened.to(tl.int32)) > 0:
        tl.atomic_or(status, bit)


@triton.jit
def set_status(happened, status, BIT: tl.constexpr):
    """Set a bit of the status word if `happened` is nonzero."""
    if tl.load(happened) != 0:
        tl.atomic_or(status, BIT)


@triton.jit(do_not_specialize=_NUMBERS)
def insert(
    coords, count, offsets, table, status,
    batch: "i64", low0: "i64", low1: "i64", low2: "i64", low3: "i64",
    size0: "i64", size1: "i64", size2: "i64", size3: "i64",
    step0: "i64", step1: "i64", step2: "i64", step3: "i64", margin: "i64", bits: "i64", last: "i64",
    D: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Insert every row into a grid, bitmap, "hash" table (slots: key << bits | row) or "wide" table (slots: row).
    The lowest row of duplicates is kept. last: the table's last slot; a "wide" table has BLOCK more, for scratch."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = r < tl.load(count)
    k = tl.zeros([BLOCK], tl.int32)
    if KIND == "wide":
        key, inside = _digest(
            coords, offsets, r, k, live, live,
            batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, D,
        )  # fmt: skip
    else:
        key, inside = _home(
            coords, r, live,
            batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, margin, D,
        )  # fmt: skip
    _report(status, RANGE, live & (inside == 0))
    if KIND == "grid":
        old = tl.atomic_min(table + key, r.to(tl.int32), mask=inside, sem="relaxed")
        _report(status, DUPLICATE, inside & (old != FREE))
    elif KIND == "bitmap":
        bit = (tl.full([BLOCK], 1, tl.int32) << (key & 31).to(tl.int32)).to(tl.int32)
        old = tl.atomic_or(table + (key >> 5), bit, mask=inside, sem="relaxed")
        _report(status, DUPLICATE, inside & ((old & bit) != 0))
    elif KIND == "hash":
        # Ordered hashing: a slot keeps the lesser entry and the greater one probes on, so that the table is
        # deterministic and equal keys collide.
        slot, step = _slot(key, last)
        entry = (key << bits) | r
        pending = inside
        twice = inside & (r < 0)
        while tl.sum(pending.to(tl.int32)) > 0:
            old = tl.atomic_min(table + slot, entry, mask=pending, sem="relaxed")
            same = pending & (old != EMPTY) & ((old >> bits) == (entry >> bits))
            twice = twice | same
            pending = pending & (old != EMPTY) & (same == 0)
            entry = tl.where(pending, tl.maximum(old, entry), entry)
            _, step = _slot(entry >> bits, last)
            slot = (slot + step) & last
        _report(status, DUPLICATE, twice)
    else:
        # tl.atomic_cas takes no mask: finished lanes use the scratch slots after the table.
        slot, step = _slot(key, last)
        scratch = last + 1 + tl.arange(0, BLOCK)
        free, own = tl.full([BLOCK], NOBODY, tl.int32), r.to(tl.int32)
        pending = inside
        twice = inside & (r < 0)
        while tl.sum(pending.to(tl.int32)) > 0:
            at = tl.where(pending, slot, scratch)
            old = tl.atomic_cas(table + at, free, tl.where(pending, own, free), sem="relaxed")
            same = _is_row(coords, old, coords, offsets, r, k, pending, pending, 1, 1, 1, 1, D)
            tl.atomic_min(table + at, own, mask=same, sem="relaxed")
            twice = twice | same
            pending = pending & (old != NOBODY) & (same == 0)
            slot = (slot + step) & last
        _report(status, DUPLICATE, twice)


@triton.jit
def _paired(pairs, index, known):
    """(True if bit `index` of a bitmap is set, its rank). pairs: from pair_up."""
    pair = tl.load(pairs + (index >> 5), mask=known, other=0)
    word, shift = pair.to(tl.int32), (index & 31).to(tl.int32)
    above = (word.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)).to(tl.int32, bitcast=True)
    return known & ((above & 1) == 1), (pair >> 32).to(tl.int32) - _popcount(above)


@triton.jit
def _used(words, live, capacity, each, LIVE: tl.constexpr):
    """Number of words in use: all, or `each` per element of the device-side count `live`."""
    if LIVE:
        capacity = tl.minimum(capacity, tl.load(live).to(tl.int64) * each)
    return capacity


@triton.jit(do_not_specialize=_NUMBERS)
def clear(words, live, capacity: "i64", each: "i64", LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the words in use."""
    used = _used(words, live, capacity, each, LIVE)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, tl.zeros([BLOCK], tl.int32), mask=at < used)


@triton.jit
def _words(words, first, used, BLOCK: tl.constexpr):
    """Words of a bitmap from `first` on, packed if it has one byte per bit."""
    at = first + tl.arange(0, BLOCK)
    if words.dtype.element_ty == tl.int32:
        return tl.load(words + at, mask=at < used, other=0)
    lane = tl.arange(0, 32)[None, :]
    marks = tl.load(words + at[:, None] * 32 + lane, mask=at[:, None] < used, other=0)
    return tl.sum(marks.to(tl.int32) << lane, axis=1)


@triton.jit(do_not_specialize=_NUMBERS)
def count_bits(words, sums, live, capacity: "i64", each: "i64", LIVE: tl.constexpr, BLOCK: tl.constexpr):
    """sums[p] = number of set bits in the words of program p."""
    used = _used(words, live, capacity, each, LIVE)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if first < used:
        tl.store(sums + tl.program_id(0), tl.sum(_popcount(_words(words, first, used, BLOCK))))


@triton.jit(do_not_specialize=_NUMBERS)
def pair_up(
    words, sums, live, pairs, total, capacity: "i64", each: "i64",
    LIVE: tl.constexpr, ALONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """pairs[n] = inclusive prefix count of set bits << 32 | word n of a bitmap; total: number of set bits.
    sums: from count_bits, not read if ALONE (a single program). Pairs of unused words are not written."""
    used = _used(words, live, capacity, each, LIVE)
    p = tl.program_id(0)
    first = p.to(tl.int64) * BLOCK
    if (first < used) | (p == 0):
        before = tl.zeros([1024], tl.int32)
        if not ALONE:
            for start in range(0, p, 1024):
                turn = start + tl.arange(0, 1024)
                before += tl.load(sums + turn, mask=turn < p, other=0)
        at = first + tl.arange(0, BLOCK)
        word = _words(words, first, used, BLOCK)
        rank = tl.sum(before) + tl.cumsum(_popcount(word), axis=0)
        low = word.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(pairs + at, (rank.to(tl.int64) << 32) | low, mask=at < used)
        if first + BLOCK >= used:
            tl.store(total, tl.max(rank, axis=0))


@triton.jit(do_not_specialize=_NUMBERS)
def number_rows(
    coords, count, pairs, values,
    batch: "i64", low0: "i64", low1: "i64", low2: "i64", low3: "i64",
    size0: "i64", size1: "i64", size2: "i64", size3: "i64",
    step0: "i64", step1: "i64", step2: "i64", step3: "i64", margin: "i64",
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values[n] = the row of the n-th set cell of a bitmap. pairs: from pair_up."""
    r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live = r < tl.load(count)
    key, inside = _home(
        coords, r, live,
        batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, margin, D,
    )  # fmt: skip
    hit, rank = _paired(pairs, key, inside)
    tl.store(values + rank, r.to(tl.int32), mask=hit)


@triton.jit
def _note(masks, found, r, lane, there, word, K: tl.constexpr):
    """Store one mask word of each row: the bits of the lanes that found a row."""
    bit = tl.where(found >= 0, 1 << lane, 0)
    tl.store(masks + r * ((K + 30) // 31) + word, tl.sum(bit, axis=1)[:, None], mask=there)


@triton.jit
def _probed(
    table, values, source, coords, offsets, r, k, live, tapped, key, inside,
    step0, step1, step2, step3, bits, last,
    D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """int32: row of each cell, looked up in a grid, bitmap or hash table; -1 if absent."""
    if KIND == "grid":
        found = tl.load(table + key, mask=inside, other=FREE)
        found = tl.where(found == FREE, -1, found)
    elif KIND == "bitmap":
        hit, rank = _paired(table, key, inside)
        found = tl.load(values + rank, mask=hit, other=-1)
    else:
        slot, step = _slot(key, last)
        # The first probe finds most cells; all others probe on together.
        none = EMPTY if KIND == "hash" else NOBODY
        entry = tl.load(table + slot, mask=inside, other=none)
        found, pending = _compared(
            source, coords, offsets, r, k, live, tapped, key, inside, entry, step0, step1, step2, step3, bits, D, KIND
        )  # fmt: skip
        while tl.sum(pending.to(tl.int32)) > 0:
            slot = (slot + step) & last
            entry = tl.load(table + slot, mask=pending, other=none)
            more, pending = _compared(
                source, coords, offsets, r, k, live, tapped, key, pending, entry,
                step0, step1, step2, step3, bits, D, KIND,
            )  # fmt: skip
            found = tl.maximum(found, more)
    return found


@triton.jit
def _compared(
    source, coords, offsets, r, k, live, tapped, key, pending, entry, step0, step1, step2, step3, bits,
    D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """(row in a slot that holds the key, else -1; True if probing must continue)."""
    if KIND == "hash":
        held = entry >> bits
        hit = pending & (held == key)
        row = (entry & ((tl.zeros_like(entry) + 1 << bits) - 1)).to(tl.int32)
        # Ordered hashing: all entries before a key on its probe path are less.
        onward = pending & (held < key)
    else:
        hit = pending & _is_row(source, entry, coords, offsets, r, k, live, tapped, step0, step1, step2, step3, D)
        row = entry
        onward = pending & (entry != NOBODY) & (hit == 0)
    return tl.where(hit, row, -1), onward


@triton.jit(do_not_specialize=_NUMBERS)
def neighbours(
    coords, count, offsets, table, values, source, rows, masks,
    batch: "i64", low0: "i64", low1: "i64", low2: "i64", low3: "i64",
    size0: "i64", size1: "i64", size2: "i64", size3: "i64",
    step0: "i64", step1: "i64", step2: "i64", step3: "i64",
    margin: "i64", reach: "i64", bits: "i64", last: "i64", capacity: "i64",
    D: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, EACH: tl.constexpr, MIRROR: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """rows[r, k]: the input of row r at kernel offset k; masks[r]: its mask words. Padding rows get -1 and 0.
    EACH: bounds are checked per cell. Otherwise they are checked once per row (within `reach` of the box): the margin
    covers every offset from there, so that an offset adds a constant to the key.
    MIRROR: search the first half of a submanifold map's offsets and write each hit twice; no masks."""
    PER: tl.constexpr = 31 if LANES == 32 else LANES
    ASKED: tl.constexpr = K // 2 if MIRROR else K
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    base, near = _home(
        coords, r, r < tl.load(count),
        batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, margin - reach, D,
    )  # fmt: skip
    base, near, r = base[:, None], near[:, None], r[:, None]
    lane = tl.arange(0, LANES)[None, :]
    live = r < tl.load(count)
    there = r < capacity
    for word in range(0, (ASKED + PER - 1) // PER):
        k = word * PER + lane
        tapped = (lane < PER) & (k < ASKED)
        if not EACH:
            key = base + _step(offsets, k, tapped, size0, size1, size2, size3, D)
            inside = near & tapped
        elif KIND == "wide":
            key, inside = _digest(
                coords, offsets, r, k, live, tapped,
                batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, D,
            )  # fmt: skip
        else:
            key, inside = _cell(
                coords, offsets, r, k, live, tapped,
                batch, low0, low1, low2, low3, size0, size1, size2, size3, step0, step1, step2, step3, margin, D,
            )  # fmt: skip
        found = _probed(
            table, values, source, coords, offsets, r, k, live, tapped, key, inside,
            step0, step1, step2, step3, bits, last, D, KIND,
        )  # fmt: skip
        if MIRROR:
            met = found >= 0
            tl.store(rows + r * K + k, found, mask=met)
            tl.store(rows + found.to(tl.int64) * K + (K - 1 - k), tl.where(met, r, 0).to(tl.int32), mask=met)
        else:
            tl.store(rows + r * K + k, found, mask=there & tapped)
            _note(masks, found, r, lane, there, word, K)
    if MIRROR and K % 2 == 1:
        tl.store(rows + r * K + K // 2, r.to(tl.int32), mask=live)


@triton.jit(do_not_specialize=_NUMBERS)
def mask_words(rows, masks, capacity: "i64", K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """masks[r]: mask words of row r: a bit for each kernel offset that has an input."""
    PER: tl.constexpr = 31 if LANES == 32 else LANES
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    there = r < capacity
    for word in range(0, (K + PER - 1) // PER):
        k = word * PER + lane
        found = tl.load(rows + r * K + k, mask=there & (lane < PER) & (k < K), other=-1)
        _note(masks, found, r, lane, there, word, K)


@triton.jit
def _divided(coords, r, there, begin, D: tl.constexpr, AXIS: tl.constexpr, STEP: tl.constexpr):
    """(quotient, remainder, valid) of (c - begin) / STEP; invalid below `begin`."""
    t = tl.load(coords + r * (D + 1) + AXIS + 1, mask=there, other=0).to(tl.int64) - begin
    there = there & (t >= 0) & (t < 2**31)
    whole = tl.where(there, t, 0).to(tl.uint32)
    share = whole // STEP
    return share.to(tl.int32), (whole - share * STEP).to(tl.int32), there


@triton.jit
def _met(
    coords, taps, r, lane, there, from0, from1, from2, from3,
    D: tl.constexpr, PER: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """(kernel offset of each lane, its position in `taps`, valid) for each row. Lanes are all offsets, with FORM "over"
    only those of the row's residue class, which divide without remainder."""
    known = there & (lane < PER)
    k = lane + r.to(tl.int32) * 0
    at = k * D
    if FORM == "over":
        _, kind, more = _divided(coords, r, there, from0, D, 0, S0)
        known = known & more
        if D > 1:
            _, rest, more = _divided(coords, r, there, from1, D, 1, S1)
            kind, known = kind * S1 + rest, known & more
        if D > 2:
            _, rest, more = _divided(coords, r, there, from2, D, 2, S2)
            kind, known = kind * S2 + rest, known & more
        if D > 3:
            _, rest, more = _divided(coords, r, there, from3, D, 3, S3)
            kind, known = kind * S3 + rest, known & more
        at = (kind * PER + lane) * (D + 1)
        k = tl.load(taps + at, mask=known, other=-1)
        at, known = at + 1, known & (k >= 0)
    return k, at, known


@triton.jit
def _moved(
    coords, taps, r, at, known, begin, size, D: tl.constexpr, AXIS: tl.constexpr, STEP: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """(coordinate that row r reaches along one axis, relative to the box's low; True if inside). FORM: see Stencil."""
    if FORM == "times":
        c = tl.load(coords + r * (D + 1) + AXIS + 1, mask=known, other=0).to(tl.int64)
        v = c * STEP + tl.load(taps + at + AXIS, mask=known, other=0).to(tl.int64) - begin
    else:
        v, _, known = _divided(coords, r, known, begin, D, AXIS, STEP)
        if FORM == "over":
            v += tl.load(taps + at + AXIS, mask=known, other=0)
    return v, known & (v >= 0) & (v < size)


@triton.jit
def _code(
    coords, taps, tables, r, lane, there,
    batch, from0, from1, from2, from3, size0, size1, size2, size3, begin0, begin1, begin2, begin3, bits,
    D: tl.constexpr, PER: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """(Morton code of the cell that row r reaches in each lane, batch index in the top bits; True if inside the box;
    kernel offset; coordinate along each axis relative to the box's low corner)."""
    k, at, inside = _met(coords, taps, r, lane, there, from0, from1, from2, from3, D, PER, S0, S1, S2, S3, FORM)
    b = tl.load(coords + r * (D + 1), mask=there, other=-1).to(tl.int64)
    v0, inside = _moved(coords, taps, r, at, inside, from0, size0, D, 0, S0, FORM)
    v1, v2, v3 = v0, v0, v0
    inside = inside & (b >= 0) & (b < batch)
    code = (b << bits) | tl.load(tables + begin0 + v0, mask=inside, other=0)
    if D > 1:
        v1, inside = _moved(coords, taps, r, at, inside, from1, size1, D, 1, S1, FORM)
        code = code | tl.load(tables + begin1 + v1, mask=inside, other=0)
    if D > 2:
        v2, inside = _moved(coords, taps, r, at, inside, from2, size2, D, 2, S2, FORM)
        code = code | tl.load(tables + begin2 + v2, mask=inside, other=0)
    if D > 3:
        v3, inside = _moved(coords, taps, r, at, inside, from3, size3, D, 3, S3, FORM)
        code = code | tl.load(tables + begin3 + v3, mask=inside, other=0)
    return code, inside, k, v0, v1, v2, v3


@triton.jit
def _placed(directory, code, inside, limit, WHOLE: tl.constexpr, LOW: tl.constexpr):
    """(True if a code's brick exists, index of the code's bit in the cell bitmaps); WHOLE: all bricks exist."""
    hit, cell = inside, code
    if not WHOLE:
        hit, brick = _paired(directory, code >> LOW, inside)
        hit, cell = hit & (brick < limit), (brick.to(tl.int64) << LOW) | (code & ((1 << LOW) - 1))
    return hit, cell


@triton.jit
def _set(words, index, mask):
    """Set bits of a bitmap, skipping those that are set: a load is cheaper than a contended atomic."""
    bit = (tl.full(index.shape, 1, tl.int32) << (index & 31).to(tl.int32)).to(tl.int32)
    old = tl.load(words + (index >> 5), mask=mask, other=0, cache_modifier=".cg")
    tl.atomic_or(words + (index >> 5), bit, mask=mask & ((old & bit) == 0), sem="relaxed")


@triton.jit(do_not_specialize=_NUMBERS)
def mark(
    coords, count, taps, tables, directory,
    batch: "i64", from0: "i64", from1: "i64", from2: "i64", from3: "i64",
    size0: "i64", size1: "i64", size2: "i64", size3: "i64",
    begin0: "i64", begin1: "i64", begin2: "i64", begin3: "i64", bits: "i64",
    D: tl.constexpr, PER: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    FORM: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Set the directory byte of every reached cell's brick (bits would need contended atomics)."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    for first in range(0, PER, LANES):
        lane = first + tl.arange(0, LANES)[None, :]
        code, inside, _, _, _, _, _ = _code(
            coords, taps, tables, r, lane, live,
            batch, from0, from1, from2, from3, size0, size1, size2, size3, begin0, begin1, begin2, begin3, bits,
            D, PER, S0, S1, S2, S3, FORM,
        )  # fmt: skip
        tl.store(directory + (code >> LOW), tl.full(code.shape, 1, tl.int8), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS)
def occupy(
    coords, count, taps, tables, directory, cells, status,
    batch: "i64", from0: "i64", from1: "i64", from2: "i64", from3: "i64",
    size0: "i64", size1: "i64", size2: "i64", size3: "i64",
    begin0: "i64", begin1: "i64", begin2: "i64", begin3: "i64", bits: "i64", limit: "i64",
    D: tl.constexpr, PER: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    FORM: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Set the bit of every reached cell in its brick's bitmap. limit: capacity in bricks."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    for first in range(0, PER, LANES):
        lane = first + tl.arange(0, LANES)[None, :]
        code, inside, _, _, _, _, _ = _code(
            coords, taps, tables, r, lane, live,
            batch, from0, from1, from2, from3, size0, size1, size2, size3, begin0, begin1, begin2, begin3, bits,
            D, PER, S0, S1, S2, S3, FORM,
        )  # fmt: skip
        hit, cell = _placed(directory, code, inside, limit, WHOLE, LOW)
        if not WHOLE:
            _report(status, OVERFLOW, inside & (hit == 0))
        _set(cells, cell, hit)


@triton.jit(do_not_specialize=_NUMBERS)
def search_neighbours(
    coords, count, taps, tables, directory, cells, total, rows, outputs, living, status,
    batch: "i64", from0: "i64", from1: "i64", from2: "i64", from3: "i64",
    size0: "i64", size1: "i64", size2: "i64", size3: "i64",
    begin0: "i64", begin1: "i64", begin2: "i64", begin3: "i64", bits: "i64", limit: "i64", capacity: "i64",
    low0: "i64", low1: "i64", low2: "i64", low3: "i64",
    D: tl.constexpr, PER: tl.constexpr, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    FORM: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, K: tl.constexpr,
    MAP: tl.constexpr, PLACE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """For every existing cell, of rank o, that row r reaches through kernel offset k:
    MAP "rows": rows[o, k] = r; "turned": rows[r, k] = o; other entries are not written.
    PLACE: outputs[o] = the cell's coordinates, -1 past the total; living = number of valid outputs.
    Ranks at or past the capacity are dropped and reported."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    for first in range(0, PER, LANES):
        lane = first + tl.arange(0, LANES)[None, :]
        code, inside, k, v0, v1, v2, v3 = _code(
            coords, taps, tables, r, lane, live,
            batch, from0, from1, from2, from3, size0, size1, size2, size3, begin0, begin1, begin2, begin3, bits,
            D, PER, S0, S1, S2, S3, FORM,
        )  # fmt: skip
        hit, cell = _placed(directory, code, inside, limit, WHOLE, LOW)
        hit, rank = _paired(cells, cell, hit)
        o = rank.to(tl.int64)
        _report(status, OVERFLOW, hit & (o >= capacity))
        hit = hit & (o < capacity)
        if MAP == "rows":
            tl.store(rows + o * K + k, tl.where(hit, r, 0).to(tl.int32), mask=hit)
        if MAP == "turned":
            tl.store(rows + r * K + k, rank, mask=hit)
        if PLACE:
            at = outputs + o * (D + 1)
            tl.store(at, (code >> bits).to(tl.int32), mask=hit)
            tl.store(at + 1, (v0 + low0).to(tl.int32), mask=hit)
            if D > 1:
                tl.store(at + 2, (v1 + low1).to(tl.int32), mask=hit)
            if D > 2:
                tl.store(at + 3, (v2 + low2).to(tl.int32), mask=hit)
            if D > 3:
                tl.store(at + 4, (v3 + low3).to(tl.int32), mask=hit)
    if PLACE:
        made = tl.minimum(tl.load(total).to(tl.int64), capacity)
        if tl.program_id(0) == 0:
            tl.store(living, made.to(tl.int32))
        # Fill the padding rows, an equal share per program.
        most = capacity * (D + 1)
        part = (most - made * (D + 1) + tl.num_programs(0) - 1) // tl.num_programs(0)
        begin = made * (D + 1) + tl.program_id(0) * part
        for start in range(0, part.to(tl.int32), 128):
            inner = start + tl.arange(0, 128)
            left = (inner < part) & (begin + inner < most)
            tl.store(outputs + begin + inner, tl.full([128], -1, tl.int32), mask=left)
