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

from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.runtime.launch import integers
from pumice.runtime.native import Compiler, NativeUnavailableError, call, compiler

HEADER = 10  # Integers before the factors'
_CPU = torch.device("cpu")


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
    unroll: of the entries' loop and of each inner one, 0: as the compiler likes."""

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

    def __str__(self) -> str:
        where = [
            f"F{n}[{'e' if f.entries else ''}{', vector' if f.vector else ''}]" for n, f in enumerate(self.factors)
        ]
        loops = [f"{n} dense loops" for n in (self.around, self.outer - self.around) if n]
        loops.insert(int(self.around > 0), "chunks of segments")
        lines = [f"parallel over {', '.join(loops)}", "for block, segment s"]
        lines.append(f"  {len(self.target)} accumulators of {self.lanes} {self.real}")
        lines.append(f"  for entry e of s{f', {self.inner} dense reductions' if self.inner else ''}")
        return "\n".join([*lines, f"    acc += {' * '.join(where)}", "  T[s] = acc"])


_HEAD = """typedef {real} real;
typedef long long i64;
typedef void (*region)(void (*)(void *), void *, unsigned, unsigned);
static void start(region parallel, int threads, i64 *z, void (*work)(void *)) {{
    if (parallel && threads > 1 && z[1] > 1) parallel(work, z, threads < z[1] ? threads : z[1], 0);
    else work(z);
}}
"""
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
void run(region parallel, int threads, i64 *z) {{ start(parallel, threads, z, work); }}
"""
_TILE = """static inline __attribute__((always_inline)) void {name}(const i64 *z, real *t, {arguments}, const i64 *at,
    int first) {{
    {declare}
    {unroll}for (i64 e = at[0]; e < at[1]; e++) {{
        {entry}
        {loops}
            {step}
        }}
    }}
    {store}
}}
"""


def source(nest: Nest) -> str:
    """The C source of a nest."""
    widths = [nest.lanes >> n for n in range(nest.lanes.bit_length() - 1)]
    size = 4 if nest.real == "float" else 8
    text = [_HEAD.format(real=nest.real)]
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
    kind = f"v{width}" if width > 1 else "real"
    declare = [
        f"{kind} a{n}; if (first) a{n} = ({kind}){{0}}; else a{n} = *({kind} *)(t + {d});"
        for n, d in enumerate(nest.target[:count])
    ]
    loads, products = _products(nest, count, kind)
    return _TILE.format(
        name=f"tile_{count}_{width}",
        declare="\n    ".join(declare),
        step="\n            ".join([*loads, *(f"a{n} += {product};" for n, product in enumerate(products))]),
        store=" ".join(f"*({kind} *)(t + {d}) = a{n};" for n, d in enumerate(nest.target[:count])),
        **_frame(nest),
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
    """Arguments, entry pointers and inner loops, which all tiles share."""
    each = range(len(nest.factors))
    at = {"": "", "order": " + e"}
    entry = [
        f"const real *p{n} = f{n}{at.get(f.entries, f' + ((const int *)z[{_factor(n) + 1}])[e]')};"
        for n, f in enumerate(nest.factors)
    ]
    slots = [_loop(nest, nest.outer + k) for k in range(nest.inner)]
    unroll = [f'_Pragma("GCC unroll {n}") ' if n else "" for n in nest.unroll or [0] * (1 + nest.inner)]
    loops = "".join(f"{unroll[k + 1]}for (i64 i{k} = 0; i{k} < z[{at}]; i{k}++) " for k, at in enumerate(slots))
    steps = ["".join(f" + i{k} * z[{at + 1 + n}]" for k, at in enumerate(slots)) for n in each]
    return {
        "arguments": ", ".join(f"const real *f{n}" for n in each),
        "unroll": unroll[0],
        "entry": " ".join(entry),
        "loops": loops + "{ " + " ".join(f"const real *q{n} = p{n}{steps[n]};" for n in each) + " ",
    }


_SUM = """static inline __attribute__((always_inline)) void tile(const i64 *z, real *t, {arguments}, const i64 *at,
    int first) {{
    real total = first ? 0 : *t;
    {declare}
    {unroll}for (i64 e = at[0]; e < at[1]; e++) {{
        {entry}
        {loops}
            i64 j = 0;
            {steps}
        }}
    }}
    {wide} sum = {sum};
    for (int k = 0; k < {lanes}; k++) total += sum[k];
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

    whole = " ".join(f"a{n} += {product(wide, n * lanes)};" for n in range(count))
    steps = [f"for (; j + {count * lanes} <= z[6]; j += {count * lanes}) {{ {whole} }}"]
    steps.append(f"for (; j + {lanes} <= z[6]; j += {lanes}) a0 += {product(wide, 0)};")
    steps.append(f"for (; j < z[6]; j++) total += {product('real', 0)};")
    text = _SUM.format(
        declare=f"{wide} {', '.join(f'a{n} = {{0}}' for n in range(count))};",
        steps="\n            ".join(steps),
        wide=wide,
        sum=" + ".join(f"a{n}" for n in range(count)),
        lanes=lanes,
        **_frame(nest),
    )
    return [text], f"tile(z, y, {', '.join(f'f{n}' for n in range(len(nest.factors)))}, at, !b);"


_BLOCKS = """
#define V {lanes}
typedef v{lanes} v;
static inline __attribute__((always_inline)) void transpose(v *r) {{
    {stages}
}}
static inline __attribute__((always_inline)) void copy(real *to, const real *from, i64 n) {{
    i64 k = 0;
    for (; k + V <= n; k += V) *(v *)(to + k) = *(const v *)(from + k);
    {rest}
}}
/* P[a, y, x, lane] = X[a, y + step_y * (lane / gx) - pad_y, x + step_x * (lane % gx) - pad_x], zero outside */
static void pack_one(const i64 *z, const real *from, real *to, real *s) {{
    const i64 H = z[5], W = z[6], py = z[7], px = z[8], sy = z[9], sx = z[10], gx = z[11], lanes = z[12], SH = z[13],
        SW = z[14], hs = z[15], ws = z[16];
    const i64 rows = H < hs - py ? H : hs - py, columns = W < ws - px ? W : ws - px;
    for (i64 y = 0; y < rows; y++) copy(s + (y + py) * ws + px, from + y * W, columns);
    for (i64 y = 0; y < SH; y++) for (i64 x = 0; x < SW; x += V) {{
        v r[V];
        for (int l = 0; l < V; l++) {{
            const i64 m = l < lanes ? l : 0;
            r[l] = *(const v *)(s + (m / gx * sy + y) * ws + m % gx * sx + x);
        }}
        transpose(r);
        real *d = to + (y * SW + x) * V;
        if (x + V <= SW) for (int k = 0; k < V; k++) *(v *)(d + k * V) = r[k];
        else for (int k = 0; k < SW - x; k++) *(v *)(d + k * V) = r[k];
    }}
}}
/* T[a, y + bh * (lane / gx), x + bw * (lane % gx)] = B[a, y, x, lane] */
static void unpack_one(const i64 *z, const real *from, real *to, real *s) {{
    const i64 H = z[5], W = z[6], gx = z[11], lanes = z[12], bh = z[13], bw = z[14], ws = z[16];
    for (i64 y = 0; y < bh; y++) for (i64 x = (bw - 1) / V * V; x >= 0; x -= V) {{
        v r[V];
        const real *f = from + (y * bw + x) * V;
        for (int k = 0; k < V; k++) r[k] = *(const v *)(f + (x + k < bw ? k : 0) * V);
        transpose(r);
        /* Columns past the block are overwritten by the next one, whose first columns come last. */
        for (int l = 0; l < lanes; l++) *(v *)(s + (l / gx * bh + y) * ws + l % gx * bw + x) = r[l];
    }}
    for (i64 y = 0; y < H; y++) copy(to + y * W, s + y * ws, W);
}}
static void move(void *data, void (*one)(const i64 *, const real *, real *, real *)) {{
    i64 *z = data;
    real *s = (real *)z[17] + __atomic_fetch_add(z + 2, 1, __ATOMIC_RELAXED) * z[15] * z[16];
    for (;;) {{
        const i64 a = __atomic_fetch_add(z, 1, __ATOMIC_RELAXED);
        if (a >= z[1]) return;
        one(z, (const real *)z[3] + a * z[18], (real *)z[4] + a * z[19], s);
    }}
}}
static void move_in(void *data) {{ move(data, pack_one); }}
static void move_out(void *data) {{ move(data, unpack_one); }}
void pack(region parallel, int threads, i64 *z) {{ start(parallel, threads, z, move_in); }}
void unpack(region parallel, int threads, i64 *z) {{ start(parallel, threads, z, move_out); }}
"""


def blocks_source(real: str, lanes: int) -> str:
    """C source of `pack` and `unpack` between rows and lanes that run over blocks of an image."""
    size, stages = 4 if real == "float" else 8, []
    for d in (1 << n for n in range(lanes.bit_length() - 1)):
        low = [k if k % (2 * d) < d else k - d + lanes for k in range(lanes)]
        high = [k + d if k % (2 * d) < d else k + lanes for k in range(lanes)]
        for i in (k for k in range(lanes) if k % (2 * d) < d):
            a, b = (f"__builtin_shufflevector(r[{i}], r[{i + d}], {', '.join(map(str, m))})" for m in (low, high))
            stages.append(f"{{ const v a = {a}, b = {b}; r[{i}] = a; r[{i + d}] = b; }}")
    widths = [lanes >> n for n in range(lanes.bit_length() - 1)]
    head = _HEAD.format(real=real) + "".join(_VECTOR.format(lanes=w, bytes=w * size, align=size) for w in widths)
    rest = [f"if (n & {w}) {{ *(v{w} *)(to + k) = *(const v{w} *)(from + k); k += {w}; }}" for w in widths[1:]]
    rest.append("if (n & 1) to[k] = from[k];")
    return head + _BLOCKS.format(lanes=lanes, stages="\n    ".join(stages), rest="\n    ".join(rest))


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
    if isinstance(found := compiler(), str):
        return found
    try:
        _moves(torch.float32)
    except (NativeUnavailableError, OSError) as error:
        return str(error)
    return None


@lru_cache(maxsize=2)
def _moves(dtype: torch.dtype) -> CDLL:
    return library(blocks_source(*lanes_of(dtype)))


def run(kernels: CDLL, name: str, numbers: Sequence[int]) -> None:
    """Call a function of an array of integers."""
    call(kernels, name, (integers(numbers, _CPU),), ())


def move(name: str, arrays: tuple[Tensor, Tensor], images: int, sizes: Sequence[int], room: tuple[int, int]) -> None:
    """Call `pack` or `unpack` from an array of images to another. sizes: rows, columns, padding and steps along y and
    x, columns of the grid, lanes in use, rows and columns of a block; room: of an image with its padding."""
    source, target = arrays
    scratch = source.new_zeros(torch.get_num_threads(), *room)
    addresses = (t.data_ptr() for t in (source, target))
    each = (t.numel() // images for t in (source, target))
    run(_moves(source.dtype), name, [0, images, 0, *addresses, *sizes, *room, scratch.data_ptr(), *each])
