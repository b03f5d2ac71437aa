"""Neighbour search and output coordinates in C, on a CPU.

A brick is a block of 64 cells. Those that hold cells are found by a hash table; each has a 64-bit bitmap of its cells.

Search: ordered by (brick, cell), the rows of a brick begin at `first`, and the row of a cell is

    order[first[brick] + number of bits of the brick below the cell]

Which bricks and bits the kernel offsets of a cell reach relative to its own brick is tabulated per relation, so that a
brick's surroundings are looked up once for all of its rows. Where neighbours are mutual, one half of the offsets is
searched.

Outputs: there, a brick is 64 consecutive cells in Morton order, so that sorted bricks give sorted cells.

The plain twins are SortedKeys (coords.lookup) and distinct_outputs (coords.outputs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords.box import Bounds
from pumice.coords.buffer import DUPLICATE, RANGE, CoordBuffer
from pumice.coords.codes import CodeLayout
from pumice.coords.relation import Relation
from pumice.runtime.native import call, compiled_by

_SIDES = {1: (6,), 2: (3, 3), 3: (2, 2, 2), 4: (1, 1, 2, 2)}  # log2 of a brick's cells along each axis, by D
_NEAR = 1 << 10  # Maximum number of bricks that the offsets of a brick's cells reach
_WORD = 63  # Bits of a key

_SOURCE = """typedef unsigned long long u64;
enum {{ D = {dim}, NEAR = {near}, CHUNK = 1024 }};
static const int side[D] = {{{sides}}};
/* `first`: number of cells of all bricks before. */
typedef struct {{ i64 key; u64 cells; i64 first; }} brick;
/* slots [2^(64 - shift)]: brick in each slot of the hash table, 0 if none. list [most]: the bricks; brick 0 is empty,
   so that absent bricks need no branch. */
typedef struct {{ int *slots; brick *list; i64 shift, most, count; }} bricks;
/* Keys 4n to 4n + 3 begin in one group of slots: neighbours along the last axis share a cache line. */
static inline i64 slot_of(const bricks *t, i64 key) {{
    const u64 group = (u64)key >> 2, last = ~0ull >> t->shift;
    u64 at = (group ^ group >> 32) * 0x9E3779B97F4A7C15ull >> t->shift & ~3ull | (key & 3);
    while ((t->list[t->slots[at]].key != key) & (t->slots[at] != 0)) at = (at + 1) & last;
    return at;
}}
/* Index of the brick `key`, which is added if it is new; 0 if there is no room. */
static inline i64 brick_of(bricks *t, i64 key) {{
    const i64 at = slot_of(t, key);
    if (!t->slots[at] && t->count < t->most) {{
        t->list[t->count] = (brick){{key, 0, 0}};
        t->slots[at] = t->count++;
    }}
    return t->slots[at];
}}
/* Number the cells of all bricks; returns how many there are. */
static i64 count_cells(bricks *t) {{
    i64 total = 0;
    for (brick *b = t->list; b < t->list + t->count; b++) {{
        b->first = total;
        total += __builtin_popcountll(b->cells);
    }}
    return total;
}}
static inline int bits_below(u64 cells, int bit) {{ return __builtin_popcountll(cells & ((1ull << bit) - 1)); }}
static inline int inside(const int *c, const i64 *box) {{
    int found = c[0] >= 0 && c[0] < box[0];
    for (int a = 0; a < D; a++) found &= c[a + 1] >= box[1 + a] && c[a + 1] <= box[1 + D + a];
    return found;
}}
static inline int cell_of(const int *c) {{
    int cell = 0;
    for (int a = 0; a < D; a++) cell = cell << side[a] | (c[a + 1] & ((1 << side[a]) - 1));
    return cell;
}}
/* box: batch, low [D], high [D]; of bricks: first [D], extents [D]. errors: status bits. Returns 0 without room. */
int build(region parallel, int threads, const int *c, const i64 *box, int *slots, brick *list, int *order, i64 *home,
    int *errors, i64 n, i64 shift, i64 most) {{
    bricks t = {{slots, list, shift, most, 1}};
    const i64 *low = box + 1 + 2 * D, *extent = low + D;
    i64 last = -1, at = 0;
    list[0] = (brick){{-1, 0, 0}};
    for (i64 i = 0; i < n; i++, c += D + 1) {{
        home[i] = 0;
        if (!inside(c, box)) {{ *errors |= {range}; continue; }}
        i64 key = c[0];
        for (int a = 0; a < D; a++) key = key * extent[a] + (c[a + 1] >> side[a]) - low[a];
        if (key != last && !(at = brick_of(&t, key))) return 0;
        last = key;
        const int bit = cell_of(c);
        if (list[at].cells >> bit & 1) *errors |= {duplicate};
        list[at].cells |= 1ull << bit;
        home[i] = at << 6 | bit;
    }}
    for (i64 i = count_cells(&t); i <= n; i++) order[i] = 0;
    /* Backwards: of duplicates the first row is found. */
    for (i64 i = n - 1; i >= 0; i--) {{
        const brick *b = list + (home[i] >> 6);
        if (home[i]) order[b->first + bits_below(b->cells, home[i] & 63)] = i;
    }}
    return t.count;
}}
typedef struct {{
    bricks t; const int *c, *turn, *order; const i64 *box, *near; const unsigned short *taps; int *rows;
    i64 n, volume, searched, around, next;
}} search;
/* Look up the bricks around the output brick `at`. */
static void surround(const search *s, const i64 *at, i64 batch, brick *near) {{
    const i64 *low = s->box + 1 + 2 * D, *extent = low + D, *step = extent + D;
    const int within = batch >= 0 && batch < s->box[0];
    i64 base[D];
    u64 origin = batch;
    for (int a = 0; a < D; a++) {{
        base[a] = at[a] * step[a] - low[a];
        origin = origin * extent[a] + base[a];
    }}
    for (i64 m = 0; m < s->around; m++) {{
        const i64 *delta = s->near + m * (D + 1);
        int known = within;
        #pragma GCC unroll 4
        for (int a = 0; a < D; a++) known &= (u64)(base[a] + delta[a]) < (u64)extent[a];
        near[m] = s->t.list[s->t.slots[slot_of(&s->t, known ? origin + delta[D] : -1)]];
    }}
}}
static void work(void *data) {{
    search *s = data;
    brick near[NEAR];
    int spare;
    for (;;) {{
        const i64 begin = __atomic_fetch_add(&s->next, CHUNK, __ATOMIC_RELAXED);
        const i64 end = begin + CHUNK < s->n ? begin + CHUNK : s->n;
        i64 at[D], batch = 0;
        if (begin >= s->n) return;
        for (i64 j = begin; j < end; j++) {{
            const i64 o = s->turn ? s->turn[j] : j;
            const int *c = s->c + o * (D + 1);
            int changed = j == begin || batch != c[0];
            for (int a = 0; a < D; a++) changed |= at[a] != c[a + 1] >> side[a];
            if (changed) {{
                batch = c[0];
                for (int a = 0; a < D; a++) at[a] = c[a + 1] >> side[a];
                surround(s, at, batch, near);
            }}
            const unsigned short *taps = s->taps + cell_of(c) * s->searched;
            int *rows = s->rows + o * s->volume, *mirrored = s->rows + s->volume - 1;
            for (i64 k = 0; k < s->searched; k++) {{
                const brick *b = near + (taps[k] >> 6);
                const int bit = taps[k] & 63, row = s->order[b->first + bits_below(b->cells, bit)];
                const int absent = ~b->cells >> bit & 1;
                rows[k] = row | -absent;
                if (s->searched < s->volume) *(absent ? &spare : mirrored + row * s->volume - k) = o;
            }}
            if (2 * s->searched + 1 == s->volume) rows[s->searched] = o;
        }}
    }}
}}
/* rows [outputs, volume]. turn: the order of the outputs, by bricks. box: as in build, then the steps [D].
   near [around, D + 1]: bricks relative to the output's, and the differences of their keys. searched: the offsets to
   look up, all or the first half: then the others are their negatives, outputs are the inputs, and rows are -1. */
int neighbours(region parallel, int threads, const int *c, const int *turn, int *slots, brick *list, const int *order,
    const i64 *box, const i64 *near, const unsigned short *taps, int *rows, i64 n, i64 volume, i64 searched, i64 around,
    i64 shift) {{
    search s = {{{{slots, list, shift, 0, 0}}, c, turn, order, box, near, taps, rows, n, volume, searched, around, 0}};
    start(parallel, threads, (n + CHUNK - 1) / CHUNK, work, &s);
    return 0;
}}
static inline i64 floor_of(i64 x, i64 step) {{ return x / step - (x % step < 0); }}
/* Bricks of the cells that rows reach by `Moves`. own: the rows' box; box: the cells', then by axis least, scale, step,
   radix and the place of 0 in its codes, then the position of the batch in a code. places [D, 64]: position in a code
   of each bit of an axis, -1 past the last. codes: memory for the codes of each value of each axis. Returns the number
   of bricks, with brick 0, or 0 without room; total: the number of cells. */
int occupy(region parallel, int threads, const int *c, const i64 *own, const i64 *box, const int *shifts,
    const int *lanes, const i64 *places, i64 *codes, int *slots, brick *list, i64 *total, i64 n, i64 most_lanes,
    i64 shift, i64 most) {{
    bricks t = {{slots, list, shift, most, 1}};
    const i64 *low = box + 1, *high = low + D, *least = high + D, *scale = least + D, *step = scale + D;
    const i64 *radix = step + D, *begin = radix + D, batch_bit = begin[D];
    i64 last = -1, at = 0;
    list[0] = (brick){{-1, 0, 0}};
    i64 *of = codes;
    for (int a = 0; a < D; a++, places += 64) {{
        i64 count = of[0] = 0;
        while (places[count] >= 0) count++;
        for (i64 v = 1; v < 1ll << count; v++) of[v] = of[v & (v - 1)] | 1ll << places[__builtin_ctzll(v)];
        of += 1ll << count;
    }}
    for (i64 i = 0; i < n; i++, c += D + 1) {{
        if (!inside(c, own) || c[0] >= box[0]) continue;
        i64 q[D], kind = 0;
        for (int a = 0; a < D; a++) {{
            const i64 x = c[a + 1] * scale[a] - least[a];
            q[a] = floor_of(x, step[a]);
            kind += (x - q[a] * step[a]) * radix[a];
        }}
        for (i64 lane = 0; lane < lanes[kind]; lane++) {{
            const int *moved = shifts + (kind * most_lanes + lane) * D;
            i64 code = (i64)c[0] << batch_bit;
            int known = 1;
            for (int a = 0; a < D; a++) {{
                const i64 x = q[a] + moved[a];
                known &= x >= low[a] && x <= high[a];
                code += known ? codes[begin[a] + x] : 0;
            }}
            if (!known) continue;
            if (code >> 6 != last && !(at = brick_of(&t, code >> 6))) return 0;
            last = code >> 6;
            list[at].cells |= 1ull << (code & 63);
        }}
    }}
    *total = count_cells(&t);
    return t.count;
}}
static inline i64 axis_of(i64 code, const i64 *places) {{
    i64 x = 0;
    for (int i = 0; places[i] >= 0; i++) x |= (code >> places[i] & 1) << i;
    return x;
}}
/* Coordinates c [total, 1 + D] of bricks in this order. */
int decode(region parallel, int threads, const brick *list, const i64 *order, const i64 *places, const i64 *bias,
    int *c, i64 count, i64 batch_bit) {{
    int within[64][D];
    for (int bit = 0; bit < 64; bit++)
        for (int a = 0; a < D; a++) within[bit][a] = axis_of(bit, places + 64 * a);
    for (i64 i = 0; i < count; i++) {{
        const brick *b = list + order[i];
        const i64 code = (i64)((u64)b->key << 6);
        i64 base[D];
        for (int a = 0; a < D; a++) base[a] = axis_of(code, places + 64 * a) - bias[a];
        for (u64 left = b->cells; left; left &= left - 1, c += D + 1) {{
            c[0] = code >> batch_bit;
            for (int a = 0; a < D; a++) c[a + 1] = base[a] + within[__builtin_ctzll(left)][a];
        }}
    }}
    return 0;
}}
"""


@lru_cache(maxsize=4)
def library(dim: int) -> CDLL | str:
    """The kernels for D = dim, or the reason why there are none."""
    sizes = {"dim": dim, "near": _NEAR, "sides": ", ".join(map(str, _SIDES[dim]))}
    source = _SOURCE.format(range=RANGE, duplicate=DUPLICATE, **sizes)
    return compiled_by(lambda found: found.library(source))


def _run(dim: int, name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> int:
    return call(library(dim), name, tensors, sizes)


def refusal(coords: Tensor, bounds: Bounds) -> str | None:
    """Reason why bricks cannot hold coordinates in a box, or None."""
    if coords.device.type != "cpu":
        return "C kernels run on a CPU"
    if isinstance(found := library(coords.shape[1] - 1), str):
        return found
    bricks = max(bounds.batch, 1) * math.prod(_extents(bounds))
    return None if bricks < 1 << _WORD else f"the box has {bricks} bricks, at most {(1 << _WORD) - 1} are supported"


def _extents(bounds: Bounds) -> list[int]:
    """Bricks along each axis of a box."""
    axes = zip(bounds.low, bounds.high, _SIDES[len(bounds.low)], strict=True)
    return [(high >> side) - (low >> side) + 1 for low, high, side in axes]


class _Table(NamedTuple):
    """A hash table of bricks: arguments of the kernels. shift: 64 - log2 of the number of slots."""

    slots: Tensor
    bricks: Tensor
    shift: int

    @staticmethod
    def empty(bits: int) -> _Table:
        """A table of 2**bits slots, which holds a quarter as many bricks."""
        slots = torch.zeros(1 << bits, dtype=torch.int32, device="cpu")
        return _Table(slots, torch.empty(1 << (bits - 2), 3, dtype=torch.int64, device="cpu"), 64 - bits)


class NativeBricks:
    """The rows of a buffer by brick, see the module. Duplicates and rows out of bounds set bits of its status."""

    def __init__(self, cloud: CoordBuffer) -> None:
        self._cloud, self._coords, self._count = cloud, cloud.coords.contiguous(), _valid(cloud)
        box, bits, made = cloud.bounds, max(8, self._count.bit_length() + 1), 0
        lows = (low >> side for low, side in zip(box.low, _SIDES[cloud.dim], strict=True))
        self._box = (box.batch, *box.low, *box.high, *lows, *_extents(box))
        self._order, errors = self._coords.new_empty(self._count + 1), self._coords.new_zeros(1)
        home, box = self._coords.new_empty(self._count, dtype=torch.int64), _numbers(self._box)
        while not made:
            self._table = table = _Table.empty(bits)
            tensors = (self._coords, box, *table[:2], self._order, home, errors)
            made = _run(cloud.dim, "build", tensors, (self._count, table.shift, len(table.bricks)))
            bits += 2
        cloud.status.bitwise_or_(errors)
        # Otherwise rows are missing in the order.
        self._whole = not int(errors)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._table[:2], self._order))

    def rows(self, outputs: CoordBuffer, relation: Relation) -> Tensor | None:
        """int32 [capacity, K]: the row at `stride * out + offset`, -1 if none. None: the offsets reach too far."""
        count, searched = _valid(outputs), relation.offsets
        own = self._whole and outputs.coords is self._cloud.coords and count == self._count
        if own and {*relation.stride} == {1} and _symmetric(searched):
            searched = searched[: len(searched) // 2]
        reach = _reach(relation.stride, searched)
        if reach is None:
            return None
        rows = self._coords.new_full((outputs.capacity, len(relation.offsets)), -1)
        turn, box = self._order if own else None, _numbers((*self._box, *relation.stride))
        extents = self._box[-len(relation.stride) :]
        radix = _numbers([math.prod(extents[axis + 1 :]) for axis in range(len(extents))])
        near = torch.cat([reach.near, (reach.near * radix).sum(1, keepdim=True)], dim=1)
        tensors = (outputs.coords.contiguous(), turn, *self._table[:2], self._order, box, near, reach.taps, rows)
        _run(
            outputs.dim,
            "neighbours",
            tensors,
            (count, rows.shape[1], len(searched), len(reach.near), self._table.shift),
        )
        return rows


def _numbers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _valid(cloud: CoordBuffer) -> int:
    return cloud.capacity if cloud.exact else min(max(int(cloud.count), 0), cloud.capacity)


class _Reach(NamedTuple):
    """near int64 [M, D]: bricks that the offsets of a brick's cells reach, relative to its own times the stride.
    taps int16 [64, K]: for each cell and offset 64 * m + bit, the cell reached within brick m."""

    near: Tensor
    taps: Tensor


@lru_cache(maxsize=256)
def _symmetric(offsets: tuple[tuple[int, ...], ...]) -> bool:
    """True if each offset is the negative of that as far from the other end: then neighbours are mutual."""
    return len(offsets) > 1 and all(
        a == -b for x, y in zip(offsets, offsets[::-1], strict=True) for a, b in zip(x, y, strict=True)
    )


@lru_cache(maxsize=256)
def _reach(stride: tuple[int, ...], offsets: tuple[tuple[int, ...], ...]) -> _Reach | None:
    """None if they reach more than _NEAR bricks or exceed int32."""
    sides, widest = _SIDES[len(stride)], max(map(abs, (*stride, *(o for offset in offsets for o in offset))), default=0)
    if not offsets or widest >= 1 << 31:
        return None
    cells = torch.tensor(list(product(*(range(1 << side) for side in sides))), device="cpu")
    reached = cells[:, None] * _numbers(stride) + _numbers(offsets)
    near, which = torch.unique((reached >> _numbers(sides)).flatten(0, 1), dim=0, return_inverse=True)
    if len(near) > _NEAR:
        return None
    bit = torch.zeros_like(which)
    for axis, side in enumerate(sides):
        bit = bit << side | (reached[..., axis] & ((1 << side) - 1)).flatten()
    # Above 2**15 the kernel reads the same bits as unsigned.
    return _Reach(near.contiguous(), (which << 6 | bit).to(torch.int16))


@dataclass(frozen=True)
class Moves:
    """Cells q + shift that coordinates c reach: q, r = divmod(scale * c - least, step) along each axis, shift any of
    those of residue class sum(r * radix). shifts int32 [classes, lanes, D]; lanes int32 [classes]: number of each."""

    least: tuple[int, ...]
    scale: tuple[int, ...]
    step: tuple[int, ...]
    radix: tuple[int, ...]
    shifts: Tensor
    lanes: Tensor


def distinct_cells(cloud: CoordBuffer, moves: Moves, bounds: Bounds) -> Tensor:
    """int32 [M, 1+D]: the distinct cells in a box that rows reach, in (batch, Morton) order."""
    layout, dim = CodeLayout.of(bounds), cloud.dim
    top = max(layout.bits, 6)
    starts = (a + b for a, b in zip(layout.starts, layout.bias, strict=True))
    box = (bounds.batch, *bounds.low, *bounds.high, *moves.least, *moves.scale, *moves.step, *moves.radix, *starts, top)
    own = _numbers((cloud.bounds.batch, *cloud.bounds.low, *cloud.bounds.high))
    places = _numbers([[*axis, *(-1,) * (64 - len(axis))] for axis in layout.places])
    codes = places.new_empty(sum(1 << len(axis) for axis in layout.places))
    total, count, made = _numbers((0,)), _valid(cloud), 0
    bits = max(8, count.bit_length() + 1)
    while not made:
        table = _Table.empty(bits)
        tensors = (cloud.coords.contiguous(), own, _numbers(box), moves.shifts, moves.lanes, places, codes)
        sizes = (count, moves.shifts.shape[1], table.shift, len(table.bricks))
        made = _run(dim, "occupy", (*tensors, *table[:2], total), sizes)
        bits += 2
    order = torch.argsort(table.bricks[1:made, 0]) + 1
    coords = cloud.coords.new_empty(int(total), dim + 1)
    tensors = (table.bricks, order, places, _numbers(layout.bias), coords)
    _run(dim, "decode", tensors, (len(order), top))
    return coords
