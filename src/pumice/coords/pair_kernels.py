"""Triton kernels that list the pairs of kernel maps by kernel offset, also in groups: of one map, or of all maps of a
network (coords.chain_tiles).

`ends` int32 [K, blocks]: inclusive prefix counts of a map's pairs over blocks of ROWS rows, by kernel offset; those of
several maps are concatenated. `plan` int64 [11, SIDE]: a column for each of several maps."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl

from pumice.coords.tile_kernels import _add_up, _bits

OVERFLOW = tl.constexpr(4)
SIDE = tl.constexpr(32)
# Rows of `plan`, "before" being of the maps before: starts of masks and table; rows; kernel offsets; row blocks before;
# start of prefix counts; pairs per group; groups; aligned groups before; rank_all's programs before; start of pairs
MASKS, TABLE, MAP_ROWS, VOLUME, BLOCKS_BEFORE, ENDS = (
    tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4), tl.constexpr(5),
)  # fmt: skip
GROUP, COUNT, GROUPS_BEFORE, RANKED_BEFORE, PAIRS = (
    tl.constexpr(6), tl.constexpr(7), tl.constexpr(8), tl.constexpr(9), tl.constexpr(10),
)  # fmt: skip
_NUMBERS = ["capacity", "group", "blocks", "maps"]


@triton.jit(do_not_specialize=_NUMBERS)
def pair_counts(masks, count, sums, blocks: "i64", K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """sums[k, program]: number of the program's ROWS rows that have kernel offset k."""
    WORDS: tl.constexpr = (K + 30) // 31
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    live = r < tl.load(count)
    for start in range(0, K, LANES):
        k = start + tl.arange(0, LANES)[None, :]
        bits = _bits(masks, r, k, live, k < K, WORDS)
        tl.store(sums + k * blocks + tl.program_id(0), tl.sum(bits, axis=0)[None, :], mask=k < K)


@triton.jit
def _groups_of(ends, lane, group, blocks, volume):
    """Number of pair groups of each kernel offset."""
    totals = tl.load(ends + lane * blocks + blocks - 1, mask=lane < volume, other=0).to(tl.int64)
    return (totals + group - 1) // group


@triton.jit
def _rank(ends, taps, ranks, g, group, capacity, blocks, volume, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """rank_groups for groups g."""
    first = tl.zeros([1], tl.int64)
    tap, own, j = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, volume, LANES):
        lane = start + tl.arange(0, LANES)
        n = _groups_of(ends, lane, group, blocks, volume)
        last = first + tl.cumsum(n, axis=0)
        past = g[:, None] - (last - n)[None, :]
        inside = (past >= 0) & (g[:, None] < last[None, :])
        tap += tl.sum(tl.where(inside, lane[None, :], 0), axis=1)
        own += tl.sum(tl.where(inside, n[None, :], 0), axis=1)
        j += tl.sum(tl.where(inside, past, 0), axis=1)
        first += tl.sum(n)
    rank = tl.zeros([BLOCK], tl.int64)
    for start in range(0, volume, LANES):
        lane = start + tl.arange(0, LANES)
        n = _groups_of(ends, lane, group, blocks, volume)[None, :]
        far = (2 * j + 1)[:, None] * n - (lane[None, :] >= tap[:, None]).to(tl.int64)
        rank += tl.sum(tl.minimum((far // tl.maximum(own, 1)[:, None] + 1) // 2, n), axis=1)
    there = (own > 0) & (g < capacity)
    tl.store(ranks + g, rank.to(tl.int32), mask=there)
    tl.store(taps + rank, tap, mask=there & (rank < capacity))


@triton.jit(do_not_specialize=_NUMBERS)
def rank_groups(
    ends, taps, ranks, group: "i64", capacity: "i64", blocks: "i64",
    K: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ranks[g]: position of group g (counted offset by offset) in the interleaved order; taps[ranks[g]]: its offset.
    Group j of a kernel offset with n groups sorts by (2 j + 1) / 2 n, ties by the lower offset: of another offset's n'
    groups as many precede it as there are odd numbers below (2 j + 1) n' / n. Entries past the last group are not
    written."""
    g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _rank(ends, taps, ranks, g, group, capacity, blocks, K, LANES, BLOCK)


@triton.jit
def _list(
    rows, live, r, block, ends, ranks, inputs, outputs, taps, status, group, capacity, blocks, volume,
    LANES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """list_pairs for the rows r [1, ROWS] of one block."""
    # Rows are the fast axis: an offset's pairs are stored contiguously.
    entry = tl.zeros([1], tl.int64)
    for start in range(0, volume, LANES):
        lane = start + tl.arange(0, LANES)
        groups = _groups_of(ends, lane, group, blocks, volume)
        k, begin = lane[:, None], (entry + tl.cumsum(groups, axis=0) - groups)[:, None]
        entry += tl.sum(groups)
        met = tl.load(rows + r * volume + k, mask=live & (k < volume), other=-1)
        has = (met >= 0).to(tl.int32)
        before = tl.load(ends + k * blocks + block - 1, mask=(k < volume) & (block > 0), other=0)
        at = before + tl.cumsum(has, axis=1) - has
        if RANKED:
            size = group.to(tl.int32)
            place, within = begin + at // size, at % size
            rank = tl.load(ranks + place, mask=(has == 1) & (place < capacity), other=0).to(tl.int64)
            at = rank * group + within
            on = (has == 1) & (place < capacity) & (rank < capacity)
        else:
            place = begin + at
            at, on = place, (has == 1) & (place < capacity)
        if tl.sum(((has == 1) & (place >= capacity)).to(tl.int32)) > 0:
            tl.atomic_or(status, OVERFLOW)
        tl.store(inputs + at, met, mask=on)
        tl.store(outputs + at, (r + tl.zeros_like(at)).to(tl.int32), mask=on)
        if not RANKED:
            tl.store(taps + at, k + tl.zeros_like(met), mask=on)


@triton.jit(do_not_specialize=_NUMBERS)
def list_pairs(
    rows, count, ends, ranks, inputs, outputs, taps, status, group: "i64", capacity: "i64", blocks: "i64",
    K: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Write pairs and their offsets (taps) by kernel offset, then by output; if RANKED in groups of `group` pairs, each
    at its rank's position, and no offsets. capacity: in pairs, or groups if RANKED; what exceeds it sets OVERFLOW."""
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :]
    live = r < tl.load(count)
    _list(
        rows, live, r, tl.program_id(0), ends, ranks, inputs, outputs, taps, status, group, capacity, blocks, K,
        LANES, RANKED,
    )  # fmt: skip


@triton.jit
def _own(plan, row, program, maps):
    """(map of a program, its index among the map's programs). row: of `plan`, with the programs of the maps before."""
    lane = tl.arange(0, SIDE)
    before = tl.load(plan + row * SIDE + lane, mask=lane < maps, other=2**62)
    m = tl.sum((before <= program).to(tl.int32)) - 1
    return m, program - tl.load(plan + row * SIDE + m)


@triton.jit
def _fact(plan, row, m):
    return tl.load(plan + row * SIDE + m)


@triton.jit(do_not_specialize=_NUMBERS)
def count_pairs(plan, masks, sums, maps: "i64", ROWS: tl.constexpr, LANES: tl.constexpr):
    """pair_counts for several maps of at most LANES kernel offsets."""
    m, block = _own(plan, BLOCKS_BEFORE, tl.program_id(0), maps)
    rows, k = _fact(plan, MAP_ROWS, m), tl.arange(0, LANES)
    r = block * ROWS + tl.arange(0, ROWS)
    mask = tl.load(masks + _fact(plan, MASKS, m) + r, mask=r < rows, other=0)
    bits = (mask[:, None] >> k[None, :]) & 1
    to = sums + _fact(plan, ENDS, m) + k * tl.cdiv(rows, ROWS) + block
    tl.store(to, tl.sum(bits, axis=0), mask=k < _fact(plan, VOLUME, m))


@triton.jit
def end_pairs(plan, ends, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """In-place inclusive prefix sum of one map's counts of one kernel offset; SIDE programs per map."""
    m, k = tl.program_id(0) // SIDE, tl.program_id(0) % SIDE
    if k < _fact(plan, VOLUME, m):
        blocks = tl.cdiv(_fact(plan, MAP_ROWS, m), ROWS)
        _add_up(ends + _fact(plan, ENDS, m) + k * blocks, blocks, BLOCK)


@triton.jit(do_not_specialize=_NUMBERS)
def rank_all(
    plan, ends, taps, ranks, maps: "i64", ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """rank_groups for several maps."""
    m, program = _own(plan, RANKED_BEFORE, tl.program_id(0), maps)
    first, g = _fact(plan, GROUPS_BEFORE, m), program * BLOCK + tl.arange(0, BLOCK)
    _rank(
        ends + _fact(plan, ENDS, m), taps + first, ranks + first, g, _fact(plan, GROUP, m), _fact(plan, COUNT, m),
        tl.cdiv(_fact(plan, MAP_ROWS, m), ROWS), _fact(plan, VOLUME, m).to(tl.int32), LANES, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def list_all(
    plan, tables, ends, ranks, inputs, outputs, status, maps: "i64", ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """list_pairs, RANKED, for several maps."""
    m, block = _own(plan, BLOCKS_BEFORE, tl.program_id(0), maps)
    rows, first = _fact(plan, MAP_ROWS, m), _fact(plan, PAIRS, m)
    r = (block * ROWS + tl.arange(0, ROWS))[None, :]
    _list(
        tables + _fact(plan, TABLE, m), r < rows, r, block, ends + _fact(plan, ENDS, m),
        ranks + _fact(plan, GROUPS_BEFORE, m), inputs + first, outputs + first, ranks, status, _fact(plan, GROUP, m),
        _fact(plan, COUNT, m), tl.cdiv(rows, ROWS), _fact(plan, VOLUME, m).to(tl.int32), LANES, True,
    )  # fmt: skip
