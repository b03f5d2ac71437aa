"""Loop nests in C.

    parallel over tasks (outer dense loops, chunk of segments)
      for block, for segment s of the chunk
        acc = 0 or T[t(s)]
        for entry e of (block, segment), for dense reductions
          acc[i] += prod_f F_f[o_f(e) + strides + i]        a tile of registers
        T[t(s)] = acc

The tile is fixed at compile time; sizes, strides and addresses are arguments, in one array of 64-bit integers: the next
task, the number of tasks, chunks, segments, blocks, segments per chunk, length of the vector loop; addresses of starts,
target offsets and target; of each factor and its offsets; then (extent, stride in the target and each factor) of each
outer loop, and (extent, stride in each factor) of each inner one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from pumice.runtime.native import Compiler, compiled_by, compiler

HEADER, TARGET = 10, 9  # Integers before the factors', and the place of the target's address
MOVED = 3, 4, 17  # Places of the addresses of source, target and room among the integers of a move
_FEW = 4  # Accumulators of a tile that has two sets of them
AHEAD = 2  # Offsets are read so many entries ahead: arrays of offsets have as many more


class FactorAccess(NamedTuple):
    """How a factor is read. entries: "" at a fixed place, "offset" at an offset per entry, "order" one value per entry;
    vector: along the vector index, else one value for all lanes; offsets: of each accumulator, in elements."""

    entries: str
    vector: bool
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Nest:
    """A loop nest. real: "float" or "double"; lanes: of a vector; target: offsets of the accumulators; outer, inner:
    numbers of loops; tiled: the accumulators are the whole tile, else the vector loop moves them; sums: the vector
    index is summed, and the target has one value per segment; around: outer loops around the chunks of segments;
    unroll: of the entries' loop and of each inner one, 0: as the compiler likes;
    reduction: "sum", "max" or "min"."""

    real: str
    lanes: int
    target: tuple[int, ...]
    factors: tuple[FactorAccess, ...]
    outer: int
    inner: int
    tiled: bool = False
    sums: bool = False
    around: int = 0
    unroll: tuple[int, ...] = ()
    reduction: str = "sum"

    @property
    def start(self) -> str:
        """What is added to a zero to start with."""
        return {"max": " - (real)__builtin_inf()", "min": " + (real)__builtin_inf()"}.get(self.reduction, "")

    def add(self, to: str, value: str, kind: str) -> str:
        """C statement that reduces a value into an accumulator of type `kind`; a NaN stays, as in torch."""
        if self.reduction == "sum":
            return f"{to} += {value};"
        taken, bits = f"(p {'>' if self.reduction == 'max' else '<'} {to}) | (p != p)", "(__typeof__(m))"
        if kind == "real":
            return f"{{ const real p = {value}; if ({taken}) {to} = p; }}"
        chosen = f"{to} = ({kind})({bits}p & m | {bits}{to} & ~m);"
        return f"{{ const {kind} p = {value}; const __typeof__(p > p) m = {taken}; {chosen} }}"

    def __str__(self) -> str:
        where = [
            f"F{n}[{'e' if f.entries else ''}{', vector' if f.vector else ''}]" for n, f in enumerate(self.factors)
        ]
        loops = [f"{n} dense loops" for n in (self.around, self.outer - self.around) if n]
        loops.insert(int(self.around > 0), "chunks of segments")
        lines = [f"parallel over {', '.join(loops)}", "for block, segment s"]
        lines.append(f"  {len(self.target)} accumulators of {self.lanes} {self.real}")
        lines.append(f"  for entry e of s{f', {self.inner} dense reductions' if self.inner else ''}")
        lines.append(f"    acc {'+' if self.reduction == 'sum' else self.reduction}= {' * '.join(where)}")
        return "\n".join([*lines, "  T[s] = acc"])


_REAL = "typedef {real} real;\n"
_VECTOR = "typedef real v{lanes} __attribute__((vector_size({bytes}), aligned({align}), may_alias));\n"
_MAIN = """static void work(void *data) {{
    i64 *z = data;
    for (;;) {{
        const i64 task = __atomic_fetch_add(z, 1, __ATOMIC_RELAXED);
        if (task >= z[1]) return;
        i64 o = task, low;
        real *t = (real *)z[9];
        {bases}
        {decode}
        const i64 high = low + z[5] < z[3] ? low + z[5] : z[3];
        for (i64 b = 0; b < z[4]; b++) for (i64 s = low; s < high; s++) {{
            const i64 *at = (const i64 *)z[7] + b * z[3] + s;
            if (b && at[0] == at[1]) continue;
            real *y = t + ((const i64 *)z[8])[s];
            {tiles}
        }}
    }}
}}
void run(region parallel, int threads, i64 *z) {{ start(parallel, threads, z[1], work, z); }}
"""
_TILE = """static inline __attribute__((always_inline)) void {name}(const i64 *z, real *t, {arguments}, const i64 *at,
    int first) {{
    {declare}
    {ahead}
    i64 e = at[0];
    {body}
    {store}
}}
"""
_LOOP = """{unroll}for (; e{past} < at[1]; e += {sets}) {{
        {steps}
    }}"""
_STEP = """{{ {entry}
        {loops}
            {products}
        }} }}"""


def source(nest: Nest) -> str:
    """The C source of a nest."""
    widths = [nest.lanes >> n for n in range(nest.lanes.bit_length() - 1)]
    size = 4 if nest.real == "float" else 8
    text = [_REAL.format(real=nest.real)]
    text += [_VECTOR.format(lanes=w, bytes=w * size, align=size) for w in widths]
    makes = _summing if nest.sums else _fixed if nest.tiled else _moving
    tiles, calls = makes(nest, widths)
    bases = " ".join(f"const real *f{n} = (const real *)z[{_factor(n)}];" for n in range(len(nest.factors)))
    decode = [_decode(nest, loop) for loop in reversed(range(nest.outer))]
    decode.insert(nest.outer - nest.around, "low = o % z[2] * z[5]; o /= z[2];")
    return "".join([*text, *tiles, _MAIN.format(bases=bases, decode="\n        ".join(decode), tiles=calls)])


def _factor(number: int) -> int:
    return HEADER + 2 * number


def _loop(nest: Nest, number: int) -> int:
    """Slot of an outer loop; inner ones follow, without a stride of the target."""
    factors = len(nest.factors)
    past = max(0, number - nest.outer)
    return HEADER + 2 * factors + min(number, nest.outer) * (2 + factors) + past * (1 + factors)


def _decode(nest: Nest, loop: int) -> str:
    at = _loop(nest, loop)
    moves = [f"f{n} += j * z[{at + 2 + n}];" for n in range(len(nest.factors))]
    return f"{{ const i64 j = o % z[{at}]; o /= z[{at}]; t += j * z[{at + 1}]; {' '.join(moves)} }}"


def _moving(nest: Nest, widths: list[int]) -> tuple[list[str], str]:
    """Tiles that the vector loop moves: of all accumulators, of one vector, of narrower ones, of single values."""
    counts = [(len(nest.target), nest.lanes), *[(1, width) for width in (*widths, 1)]]
    tiles = [_tile(nest, count, width) for count, width in dict.fromkeys(counts)]
    moved = ", ".join(f"f{n} + j" if f.vector else f"f{n}" for n, f in enumerate(nest.factors))
    calls = "i64 j = 0; " + "\n            ".join(
        f"for (; j + {count * width} <= z[6]; j += {count * width}) tile_{count}_{width}(z, y + j, {moved}, at, !b);"
        for count, width in dict.fromkeys(counts)
    )
    return tiles, calls


def _fixed(nest: Nest, widths: list[int]) -> tuple[list[str], str]:
    """The one tile of a nest whose vector index has as many points as a vector."""
    count = len(nest.target)
    given = ", ".join(f"f{n}" for n in range(len(nest.factors)))
    return [_tile(nest, count, nest.lanes)], f"tile_{count}_{nest.lanes}(z, y, {given}, at, !b);"


def _tile(nest: Nest, count: int, width: int) -> str:
    """A tile of accumulators; few have a second set for every other entry, as additions wait for one another."""
    kind = f"v{width}" if width > 1 else "real"
    sets = 2 if count <= _FEW and not nest.inner else 1
    zero = f"({kind}){{0}}{nest.start}"
    declare = [
        f"{kind} a{n}; if (first) a{n} = {zero}; else a{n} = *({kind} *)(t + {d});"
        for n, d in enumerate(nest.target[:count])
    ]
    declare += [f"{kind} b{n} = {zero};" for n in range(count) if sets > 1]
    loads, products = _products(nest, count, kind)
    frame = _frame(nest)

    def step(accumulators: str, e: str) -> str:
        adds = (nest.add(f"{accumulators}{n}", product, kind) for n, product in enumerate(products))
        entry = frame["entry"].replace("@e", e)
        return _STEP.format(entry=entry, loops=frame["loops"], products="\n            ".join([*loads, *adds]))

    body = [_LOOP.format(unroll=frame["unroll"], past="", sets=1, steps=step("a", "e"))]
    if sets > 1:
        both = step("a", "e") + " " + step("b", "(e + 1)")
        body = [
            _LOOP.format(unroll=frame["unroll"], past=" + 1", sets=2, steps=both),
            f"if (e < at[1]) {step('a', 'e')}",
        ]
        body += [nest.add(f"a{n}", f"b{n}", kind) for n in range(count)]
    return _TILE.format(
        name=f"tile_{count}_{width}",
        declare="\n    ".join(declare),
        arguments=frame["arguments"],
        ahead=frame["ahead"],
        body="\n    ".join(body),
        store=" ".join(f"*({kind} *)(t + {d}) = a{n};" for n, d in enumerate(nest.target[:count])),
    )


def _products(nest: Nest, count: int, kind: str) -> tuple[list[str], list[str]]:
    """(loads, product of each accumulator): values that several accumulators need are loaded once."""
    loads: dict[str, str] = {}
    products = []
    for i in range(count):
        # Values for all lanes first: their product is one operation for all accumulators.
        order = sorted(enumerate(nest.factors), key=lambda item: item[1].vector)
        names = []
        for n, factor in order:
            name = f"x{n}_{factor.offsets[i]}".replace("-", "m")
            read = f"q{n}[{factor.offsets[i]}] - ({kind}){{0}}"
            loads[name] = f"*(const {kind} *)(q{n} + {factor.offsets[i]})" if factor.vector else read
            names.append(name)
        products.append(" * ".join(names))
    return [f"const {kind} {name} = {text};" for name, text in loads.items()], products


def _frame(nest: Nest) -> dict[str, str]:
    """Arguments, pointers of entry @e and inner loops, which all tiles share. Offsets are read AHEAD entries before
    their use: a load that waits for its address holds up those behind it."""
    each = range(len(nest.factors))
    ahead, entry = [], []
    for n, f in enumerate(nest.factors):
        if f.entries != "offset":
            entry.append(f"const real *p{n} = f{n}{' + @e' if f.entries else ''};")
            continue
        at = f"f{n} + ((const int *)z[{_factor(n) + 1}])"
        ahead += [f"const real *n{n}_{k} = {at}[at[0] + {k}];" for k in range(AHEAD)]
        moves = "".join(f" n{n}_{k} = n{n}_{k + 1};" for k in range(AHEAD - 1))
        entry.append(f"const real *p{n} = n{n}_0;{moves} n{n}_{AHEAD - 1} = {at}[@e + {AHEAD}];")
    slots = [_loop(nest, nest.outer + k) for k in range(nest.inner)]
    unroll = [f'_Pragma("GCC unroll {n}") ' if n else "" for n in nest.unroll or [0] * (1 + nest.inner)]
    loops = "".join(f"{unroll[k + 1]}for (i64 i{k} = 0; i{k} < z[{at}]; i{k}++) " for k, at in enumerate(slots))
    steps = ["".join(f" + i{k} * z[{at + 1 + n}]" for k, at in enumerate(slots)) for n in each]
    return {
        "arguments": ", ".join(f"const real *f{n}" for n in each),
        "unroll": unroll[0],
        "ahead": " ".join(ahead),
        "entry": " ".join(entry),
        "loops": loops + "{ " + " ".join(f"const real *q{n} = p{n}{steps[n]};" for n in each) + " ",
    }


_SUM = """static inline __attribute__((always_inline)) void tile(const i64 *z, real *t, {arguments}, const i64 *at,
    int first) {{
    real total = first ? (real)0{start} : *t;
    {declare}
    {ahead}
    {unroll}for (i64 e = at[0]; e < at[1]; e++) {{
        {entry}
        {loops}
            i64 j = 0;
            {steps}
        }}
    }}
    {wide} sum = a0;
    {sum}
    for (int k = 0; k < {lanes}; k++) {last}
    *t = total;
}}
"""


def _summing(nest: Nest, widths: list[int]) -> tuple[list[str], str]:
    """A tile in which the vector loop is a reduction: partial sums in vectors, added up at the end."""
    count, lanes, wide = len(nest.target), nest.lanes, f"v{nest.lanes}"

    def product(kind: str, past: int) -> str:
        reads = [
            f"*(const {kind} *)(q{n} + j + {past})" if f.vector else f"(q{n}[0] - ({kind}){{0}})"
            for n, f in enumerate(nest.factors)
        ]
        return " * ".join(reads)

    whole = " ".join(nest.add(f"a{n}", product(wide, n * lanes), wide) for n in range(count))
    steps = [f"for (; j + {count * lanes} <= z[6]; j += {count * lanes}) {{ {whole} }}"]
    steps.append(f"for (; j + {lanes} <= z[6]; j += {lanes}) {nest.add('a0', product(wide, 0), wide)}")
    steps.append(f"for (; j < z[6]; j++) {nest.add('total', product('real', 0), 'real')}")
    text = _SUM.format(
        start=nest.start,
        declare=f"{wide} {', '.join(f'a{n} = ({wide}){{0}}{nest.start}' for n in range(count))};",
        steps="\n            ".join(steps),
        wide=wide,
        sum=" ".join(nest.add("sum", f"a{n}", wide) for n in range(1, count)),
        last=nest.add("total", "sum[k]", "real"),
        lanes=lanes,
        **{name: text.replace("@e", "e") for name, text in _frame(nest).items()},
    )
    return [text], f"tile(z, y, {', '.join(f'f{n}' for n in range(len(nest.factors)))}, at, !b);"


_MOVES = """
#define V {lanes}
typedef v{lanes} v;
/* Rows of V values at from + at[k] into columns r[k]. */
static inline __attribute__((always_inline)) void transpose(v *r, const real *from, const i64 *at) {{
    {transpose}
}}
/* n values, the first at `from`, `step` apart. */
static inline __attribute__((always_inline)) void take(real *to, const real *from, i64 n, i64 step) {{
    i64 k = 0;
    if (step == 1) {{
        for (; k + V <= n; k += V) *(v *)(to + k) = *(const v *)(from + k);
        {rest}
    }} else if (step == 2) for (; n >= V && k < n; k += V) {{
        k = k + V <= n ? k : n - V;
        const v a = *(const v *)(from + 2 * k), b = *(const v *)(from + 2 * k + V - 1);
        *(v *)(to + k) = __builtin_shufflevector(a, b, {even});
    }}
    for (; k < n; k++) to[k] = from[k * step];
}}
/* P[a, y, x, lane] = X[a, y + step_y * (lane / gx) - pad_y, x + step_x * (lane % gx) - pad_x], zero outside */
static void pack_one(const i64 *z, const i64 *at, const real *from, real *to, real *s) {{
    const i64 H = z[5], W = z[6], py = z[7], px = z[8], SH = z[13], SW = z[14], hs = z[15], ws = z[16];
    const i64 rows = H < hs - py ? H : hs - py, columns = W < ws - px ? W : ws - px;
    for (i64 y = 0; y < rows; y++) take(s + (y + py) * ws + px, from + y * z[20], columns, z[21]);
    for (i64 y = 0; y < SH; y++) for (i64 x = 0; x < SW; x += V) {{
        v r[V];
        transpose(r, s + y * ws + x, at);
        real *d = to + (y * SW + x) * V;
        if (x + V <= SW) {{ {whole} }}
        else for (int k = 0; k < SW - x; k++) *(v *)(d + k * V) = r[k];
    }}
}}
/* T[a, y + bh * (lane / gx), x + bw * (lane % gx)] = B[a, y, x, lane] */
static void unpack_one(const i64 *z, const i64 *at, const real *from, real *to, real *s) {{
    const i64 H = z[5], W = z[6], lanes = z[12], bh = z[13], bw = z[14], ws = z[16];
    static const i64 rows[V] = {{ {rows} }};
    for (i64 y = 0; y < bh; y++) for (i64 x = (bw - 1) / V * V; x >= 0; x -= V) {{
        v r[V];
        transpose(r, from + (y * bw + x) * V, rows);
        /* Columns past the block are overwritten by the next one, whose first columns come last. */
        for (int l = 0; l < lanes; l++) *(v *)(s + at[l] + y * ws + x) = r[l];
    }}
    for (i64 y = 0; y < H; y++) take(to + y * W, s + y * ws, W, 1);
}}
/* P[a, i, k, lane] = X[a, i * L + min(k * V, L - V) + lane] of flat images: T vectors of a tile of L points */
static void copy_one(const i64 *z, const i64 *at, const real *from, real *to, real *s) {{
    const i64 H = z[5], W = z[6], L = z[9], n = z[11], T = z[14], whole = L == T * V;
    const int flat = z[21] == 1 && (H == 1 || z[20] == W);
    real *d = whole ? to : s;
    if (!flat) for (i64 y = 0; y < H; y++) take(d + y * W, from + y * z[20], W, z[21]);
    else if (whole) take(d, from, H * W, 1);
    const real *f = flat ? from : s;
    if (!whole) for (i64 i = 0; i < n; i++, f += L, to += T * V) {{
        for (i64 k = 0; k + 1 < T; k++) *(v *)(to + k * V) = *(const v *)(f + k * V);
        *(v *)(to + (T - 1) * V) = *(const v *)(f + L - V);
    }}
}}
static inline __attribute__((always_inline)) void move(
    void *data, void (*one)(const i64 *, const i64 *, const real *, real *, real *)) {{
    i64 *z = data, at[V];
    const i64 room = z[15] * z[16];
    real *s = (real *)z[17] + __atomic_fetch_add(z + 2, 1, __ATOMIC_RELAXED) * room;
    for (i64 k = 0; k < room; k++) s[k] = 0;
    for (int l = 0; l < V; l++) {{
        const i64 m = l < z[12] ? l : 0;
        at[l] = m / z[11] * z[9] * z[16] + m % z[11] * z[10];
    }}
    for (;;) {{
        const i64 a = __atomic_fetch_add(z, 1, __ATOMIC_RELAXED);
        if (a >= z[1]) return;
        one(z, at, (const real *)z[3] + a * z[18], (real *)z[4] + a * z[19], s);
    }}
}}
"""
_SEQUENCE = """void sequence(region parallel, int threads, i64 *z) {
    for (i64 *f = z; *f; f += 2) ((void (*)(region, int, i64 *))f[0])(parallel, threads, z + f[1]);
}
"""
_MOVE = """static void move_{name}(void *data) {{ move(data, {name}_one); }}
void {name}(region parallel, int threads, i64 *z) {{ start(parallel, threads, z[1], move_{name}, z); }}
"""


def moves_source(real: str, lanes: int) -> str:
    """C source of `pack` and `unpack` between rows and lanes that run over blocks of an image, of `copy` from rows to
    tiles of vectors, and of `sequence`, which calls functions: its integers are pairs of their addresses and the places
    of their integers among its own, and 0. Integers of the others: the next image, number of images, the next thread;
    addresses of source and target; rows, columns, padding and steps along y and x, columns of the grid, lanes in use,
    rows and columns of a block (`copy`: points of a tile as the step along y, tiles as columns of the grid, vectors of
    a tile as columns of a block); room of an image with its padding (rows, columns); address of that room for each
    thread; elements from an image to the next in source and target; strides of rows and columns in the source."""
    size = 4 if real == "float" else 8
    widths = [lanes >> n for n in range(lanes.bit_length() - 1)]
    head = _REAL.format(real=real) + "".join(_VECTOR.format(lanes=w, bytes=w * size, align=size) for w in widths)
    rest = [f"if (n & {w}) {{ *(v{w} *)(to + k) = *(const v{w} *)(from + k); k += {w}; }}" for w in widths[1:]]
    half = lanes // 2
    text = _MOVES.format(
        lanes=lanes,
        transpose="\n    ".join(_transpose(lanes, min(lanes, 16 // size))),
        rest="\n        ".join(rest),
        even=", ".join(str(2 * k if k < half else 2 * k + 1) for k in range(lanes)),
        whole=" ".join(f"*(v *)(d + {k * lanes}) = r[{k}];" for k in range(lanes)),
        rows=", ".join(str(k * lanes) for k in range(lanes)),
    )
    return head + text + "".join(_MOVE.format(name=name) for name in ("pack", "unpack", "copy")) + _SEQUENCE


def _transpose(lanes: int, short: int) -> list[str]:
    """Statements that transpose a square: exchanges of parts of at least `short` values, the largest while loading,
    then interleaving within such parts, which processors do in one instruction."""
    lines, half = [], lanes // 2
    if half < short:
        lines += [f"r[{k}] = *(const v *)(from + at[{k}]);" for k in range(lanes)]
    else:
        joined = ", ".join(map(str, range(lanes)))
        for k, past in product(range(half), (0, half)):
            parts = ", ".join(f"*(const v{half} *)(from + at[{k + n}] + {past})" for n in (0, half))
            lines.append(f"r[{k + past}] = __builtin_shufflevector({parts}, {joined});")
    distance = half // 2
    while distance >= short:
        low = [k if not k & distance else k - distance + lanes for k in range(lanes)]
        for k in (k for k in range(lanes) if not k & distance):
            lines.append(_exchanged((k, k + distance), (low, [n + distance for n in low]), (k, k + distance)))
        distance //= 2
    low = [k // short * short + k % short // 2 + k % 2 * lanes for k in range(lanes)]
    masks = low, [n + short // 2 for n in low]
    for _ in range(short.bit_length() - 1):
        lines.append("{ v t[V]; " + " ".join(f"t[{k}] = r[{k}];" for k in range(lanes)))
        for first, k in product(range(0, lanes, short), range(short // 2)):
            pair, into = (first + k, first + k + short // 2), (first + 2 * k, first + 2 * k + 1)
            lines.append(_exchanged(pair, masks, into).replace("(r[", "(t[").replace(", r[", ", t["))
        lines.append("}")
    return lines


def _exchanged(pair: tuple[int, int], masks: Sequence[Sequence[int]], into: tuple[int, int]) -> str:
    """Two rows r[into] of a pair's values, picked by two masks."""
    a, b = (f"__builtin_shufflevector(r[{pair[0]}], r[{pair[1]}], {', '.join(map(str, m))})" for m in masks)
    return f"{{ const v a = {a}, b = {b}; r[{into[0]}] = a; r[{into[1]}] = b; }}"


def lanes_of(dtype: torch.dtype) -> tuple[str, int]:
    """(C type, lanes of a vector) for this CPU. Raises AssertionError without a compiler."""
    found = compiler()
    assert isinstance(found, Compiler)
    lanes = found.vector[0]
    return ("float", lanes) if dtype == torch.float32 else ("double", lanes // 2)


def registers() -> int:
    """Vector registers of this CPU. Raises AssertionError without a compiler."""
    found = compiler()
    assert isinstance(found, Compiler)
    return found.vector[1]


@lru_cache(maxsize=1024)
def library(source: str) -> CDLL:
    """The library compiled from a source, which is found on the disk and checked once."""
    found = compiler()
    assert isinstance(found, Compiler)
    return found.library(source)


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """The reason why nests cannot be compiled, or None. Their other kernels are compiled to see: old compilers lack
    shuffles of vectors."""
    found = compiled_by(lambda _: _moves(torch.float32))
    return found if isinstance(found, str) else None


@lru_cache(maxsize=2)
def _moves(dtype: torch.dtype) -> CDLL:
    return library(moves_source(*lanes_of(dtype)))


@lru_cache(maxsize=8)
def mover(name: str, real: str) -> int:
    """Address of `pack`, `unpack` or `copy` of moves_source."""
    return address(_moves(torch.float32 if real == "float" else torch.float64), name)


def address(kernels: CDLL, name: str) -> int:
    """Address of a function of a library, which stays loaded."""
    return ctypes.cast(kernels[name], ctypes.c_void_p).value or 0


Sequenced = Callable[[int, int, int], None]


@lru_cache(maxsize=1)
def sequence() -> Sequenced:
    """`sequence` of moves_source as a function of (parallel_region(), threads, address of its integers)."""
    found = _moves(torch.float32)["sequence"]
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p), None
    return found
