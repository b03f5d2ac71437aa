"""Products of gathered rows in C, for float32 and float64 on a CPU:

    y[S[p], g, n]     += x[G[p], g, c] * w[g, n, K[p], c]          products
    dw[g, n, K[p], c] += x[G[p], g, c] * d[S[p], g, n]             gradients

A tile of R rows and up to four vectors of columns stays in registers while the other index is summed; rows are read in
place. Outputs are processed in chunks that stay in the cache, one per thread at a time: sums have a fixed order, for
any number of threads. The plain twin is reference.py.
"""

from __future__ import annotations

from ctypes import CDLL
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.runtime.native import Compiler, call, compiled_by

_CHUNK = 1024  # Outputs per chunk
_BLOCK = 128  # Pairs per block of the gradient
_FEW = 256  # Rows of a neighbour table that are listed at once, offset by offset: they stay in the cache
_SLAB = 132  # Most output channels of dw per task of the gradient
_HEAD = """typedef {real} real;
typedef real v __attribute__((vector_size({bytes}), aligned({align}), may_alias));
typedef int vi __attribute__((vector_size({ints} * 4), aligned(4), may_alias));
/* Arrays [rows, groups, channels]: x has c, y has n channels per group. */
typedef struct {{
    const real *x, *w; real *y; const int *gather, *scatter; const i64 *starts;
    i64 rows, chunks, taps, groups, c, n, parts, next;
}} job;
/* Blocks of columns of nearly equal width, in vectors. */
static i64 blocks_of(i64 n) {{ return (n + {columns} - 1) / {columns}; }}
static i64 width_of(i64 n) {{ return (n / {lanes} + blocks_of(n) - 1) / blocks_of(n); }}
/* Slabs of rows of a gradient, in whole tiles of nearly equal height. */
static i64 slab_of(i64 c) {{
    const i64 tiles = (c + {tall} - 1) / {tall}, most = {slab} / {tall}, slabs = (tiles + most - 1) / most;
    return (tiles + slabs - 1) / slabs * {tall};
}}
static i64 slabs_of(i64 c) {{ return (c + slab_of(c) - 1) / slab_of(c); }}
"""
_PRODUCTS = """static void products_{width}(const real *x, const real *w, real *y, const int *in, const int *to,
    i64 count, i64 c, i64 x_row, i64 y_row, i64 w_row) {{
    real spare[{columns}];
    for (i64 p = 0; p < count; p += {rows}) {{
        {pointers}
        v {sums};
        const real *b = w;
        for (i64 k = 0; k < c; k++, b += w_row) {{
            {loads}
            {steps}
        }}
        {adds}
    }}
}}
"""
_GRADIENTS = """static inline __attribute__((always_inline)) void gradient_{width}(const real *a, const real *b,
    real *y, i64 count, i64 rows, i64 y_row, int whole) {{
    {pointers}
    v {sums};
    for (i64 p = 0; p < count; p++, a += {slab}, b += {columns}) {{
        {loads}
        {steps}
    }}
    {adds}
}}
static void gradients_{width}(const real *a, const real *b, real *y, i64 count, i64 rows, i64 y_row) {{
    i64 r = 0;
    for (; r + {rows} <= rows; r += {rows}) gradient_{width}(a + r, b, y + r * y_row, count, {rows}, y_row, 1);
    if (r < rows) gradient_{width}(a + r, b, y + r * y_row, count, rows - r, y_row, 0);
}}
"""
_TAIL = """static void work_products(void *data) {{
    job *j = data;
    const i64 n = j->n, c = j->c, blocks = blocks_of(n), width = width_of(n), each = j->groups * blocks;
    const i64 x_row = j->groups * c, y_row = j->groups * n, w_row = width * {lanes};
    for (i64 q; (q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->chunks * each;) {{
        const i64 chunk = q / each, first = chunk * {chunk}, block = q % blocks, group = q % each / blocks;
        const i64 last = first + {chunk} < j->rows ? first + {chunk} : j->rows, at = block * w_row;
        const i64 rest = (n - at) / {lanes}, left = rest < width ? rest : width;
        const real *x = j->x + group * c;
        real *y = j->y + group * n + at;
        for (i64 o = first; o < last; o++) for (i64 e = 0; e < left * {lanes}; e++) y[o * y_row + e] = 0;
        for (i64 k = 0; k < j->taps; k++) {{
            const i64 *s = j->starts + k * (j->chunks + 1) + chunk, count = s[1] - s[0];
            if (!count) continue;
            const real *w = j->w + ((group * j->taps + k) * blocks + block) * c * w_row;
            const int *in = j->gather + s[0], *to = j->scatter + s[0];
            {call_products}
        }}
    }}
}}
/* dw of all pairs of a chunk of outputs, whose rows stay in the cache, before those of the next chunk. A part takes
   each `parts`-th slab of dw, in the order of chunks. The rows of a block of pairs are copied first: far apart in
   memory, they would evict each other from the cache. */
static void work_gradients(void *data) {{
    job *j = data;
    real a[{block} * {slab}], b[{block} * {columns}];
    const i64 n = j->n, c = j->c, slabs = slabs_of(c), each = slab_of(c), width = width_of(n), y_row = j->taps * n;
    const i64 x_row = j->groups * c, w_row = j->groups * n, units = j->taps * j->groups * slabs;
    for (i64 part; (part = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->parts;)
    for (i64 chunk = 0; chunk < j->chunks; chunk++) for (i64 q = part; q < units; q += j->parts) {{
        const i64 k = q / slabs / j->groups, group = q / slabs % j->groups, first = q % slabs * each;
        const i64 rows = c - first < each ? c - first : each, *s = j->starts + k * (j->chunks + 1) + chunk;
        const real *x = j->x + group * c + first, *w = j->w + group * n;
        real *dw = j->y + (group * c + first) * y_row + k * n;
        if (!chunk) for (i64 r = 0; r < rows; r++) for (i64 e = 0; e < n; e++) dw[r * y_row + e] = 0;
        const i64 all = s[1] - s[0], blocks = (all + {block} - 1) / {block};
        const i64 size = all ? (all + blocks - 1) / blocks : 1;
        for (i64 p = s[0]; p < s[1]; p += size) {{
            const i64 count = s[1] - p < size ? s[1] - p : size;
            for (i64 i = 0; i < count; i++)
                __builtin_memcpy(a + i * {slab}, x + j->gather[p + i] * x_row, rows * sizeof(real));
            for (i64 at = 0; at < n; at += width * {lanes}) {{
                const i64 rest = (n - at) / {lanes}, left = rest < width ? rest : width;
                for (i64 i = 0; i < count; i++) {{
                    const real *from = w + j->scatter[p + i] * w_row + at;
                    for (i64 u = 0; u < left * {lanes}; u += {lanes})
                        *(v *)(b + i * left * {lanes} + u) = *(const v *)(from + u);
                }}
                {call_gradients}
            }}
        }}
    }}
}}
typedef struct {{ const real *w; real *to; i64 taps, groups, c, n, group_step, n_step, k_step, c_step, next; }} packing;
static void work_pack(void *data) {{
    packing *j = data;
    const i64 n = (j->n + {lanes} - 1) / {lanes} * {lanes}, blocks = blocks_of(n), row = width_of(n) * {lanes};
    for (i64 q; (q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->groups * j->taps * blocks;) {{
        const i64 at = q % blocks * row, left = j->n - at < row ? j->n - at : row;
        const i64 c_step = j->c_step, n_step = j->n_step;
        const real *w = j->w + q / blocks / j->taps * j->group_step + q / blocks % j->taps * j->k_step + at * j->n_step;
        real *to = j->to + q * j->c * row;
        for (i64 k = 0; k < j->c; k++) for (i64 e = left; e < row; e++) to[k * row + e] = 0;
        if (n_step < c_step)
            for (i64 k = 0; k < j->c; k++) for (i64 e = 0; e < left; e++) to[k * row + e] = w[k * c_step + e * n_step];
        else
            for (i64 e = 0; e < left; e++) for (i64 k = 0; k < j->c; k++) to[k * row + e] = w[k * c_step + e * n_step];
    }}
}}
typedef struct {{
    const int *in, *out; const i64 *ends; i64 *starts; int *gather, *scatter; i64 volume, chunks, inputs, rows, next;
}} sorting;
static void work_sort(void *data) {{
    sorting *j = data;
    for (i64 k; (k = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->volume;)
        for (i64 p = j->ends[k]; p < j->ends[k + 1]; p++) {{
            const i64 i = j->in[p], o = j->out[p];
            if (i < 0 || i >= j->inputs || o < 0 || o >= j->rows) continue;
            i64 *at = j->starts + k * (j->chunks + 1) + o / {chunk};
            if (j->gather) j->gather[*at] = i, j->scatter[*at] = o;
            ++*at;
        }}
}}
typedef struct {{ const int *rows; i64 *starts; int *gather, *scatter, *taps; i64 n, chunks, volume, next; }} lists;
/* Adds the pairs of some outputs to the number at each offset. */
static void count_pairs(const lists *j, i64 first, i64 end, i64 *numbers) {{
    for (i64 k = 0; k < j->volume; k += {wide}) {{
        const i64 left = j->volume - k, whole = left < {wide} ? left / {ints} : {wide} / {ints};
        vi count[{wide} / {ints}] = {{0}};
        i64 rest[{ints}] = {{0}}, past = left < {wide} ? left % {ints} : 0;
        for (const int *r = j->rows + first * j->volume + k; r < j->rows + end * j->volume; r += j->volume) {{
            for (i64 u = 0; u < whole; u++) count[u] -= *(const vi *)(r + u * {ints}) >= 0;
            for (i64 e = 0; e < past; e++) rest[e] += r[whole * {ints} + e] >= 0;
        }}
        for (i64 e = 0; e < whole * {ints}; e++) numbers[(k + e) * (j->chunks + 1)] += count[e / {ints}][e % {ints}];
        for (i64 e = 0; e < past; e++) numbers[(k + whole * {ints} + e) * (j->chunks + 1)] += rest[e];
    }}
}}
static void work_lists(void *data) {{
    lists *j = data;
    int in[{few} + 1], out[{few} + 1];
    for (i64 q; (q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->chunks;) {{
        const i64 end = (q + 1) * {chunk} < j->n ? (q + 1) * {chunk} : j->n;
        if (!j->gather) {{ count_pairs(j, q * {chunk}, end, j->starts + q); continue; }}
        for (i64 first = q * {chunk}; first < end; first += {few})
            for (i64 k = 0; k < j->volume; k++) {{
                const i64 last = first + {few} < end ? first + {few} : end;
                i64 *at = j->starts + k * (j->chunks + 1) + q;
                int count = 0;
                for (i64 o = first; o < last; o++) {{
                    in[count] = j->rows[o * j->volume + k];
                    out[count] = o;
                    count += in[count] >= 0;
                }}
                for (i64 e = 0; e < count; e++) {{
                    j->gather[*at + e] = in[e]; j->scatter[*at + e] = out[e]; j->taps[*at + e] = k;
                }}
                *at += count;
            }}
    }}
}}
/* Add to starts [volume, chunks + 1] the pairs of each list. gather, if given: fill the lists, which begin there. */
void pairs(region parallel, int threads, const int *rows, i64 *starts, int *gather, int *scatter, int *taps, i64 n,
    i64 chunks, i64 volume) {{
    lists j = {{rows, starts, gather, scatter, taps, n, chunks, volume, 0}};
    start(parallel, threads, chunks, work_lists, &j);
}}
/* As `pairs`, of pairs of offset k from ends[k] to ends[k + 1]; those out of bounds are left out. */
void sort(region parallel, int threads, const int *in, const int *out, const i64 *ends, i64 *starts, int *gather,
    int *scatter, i64 volume, i64 chunks, i64 inputs, i64 rows) {{
    sorting j = {{in, out, ends, starts, gather, scatter, volume, chunks, inputs, rows, 0}};
    start(parallel, threads, volume, work_sort, &j);
}}
/* to [groups, taps, blocks of columns, c, columns] of w, whose strides are the steps. */
void pack(region parallel, int threads, const real *w, real *to, i64 taps, i64 groups, i64 c, i64 n, i64 group_step,
    i64 n_step, i64 k_step, i64 c_step) {{
    packing j = {{w, to, taps, groups, c, n, group_step, n_step, k_step, c_step, 0}};
    start(parallel, threads, groups * taps, work_pack, &j);
}}
void products(region parallel, int threads, const real *x, const real *w, real *y, const int *gather,
    const int *scatter, const i64 *starts, i64 rows, i64 chunks, i64 taps, i64 groups, i64 c, i64 n) {{
    job j = {{x, w, y, gather, scatter, starts, rows, chunks, taps, groups, c, n, 0, 0}};
    start(parallel, threads, chunks * groups * blocks_of(n), work_products, &j);
}}
/* dw [groups, c, taps, n] of x and w; gather: rows of x. */
void gradients(region parallel, int threads, const real *x, const real *w, real *dw, const int *gather,
    const int *scatter, const i64 *starts, i64 chunks, i64 taps, i64 groups, i64 c, i64 n) {{
    const i64 units = taps * groups * slabs_of(c), most = threads > 1 ? 2 * threads : 1;
    const i64 parts = units < most ? units : most;
    job j = {{x, w, dw, gather, scatter, starts, 0, chunks, taps, groups, c, n, parts, 0}};
    start(parallel, threads, parts, work_gradients, &j);
}}
"""


def source(real: str, lanes: int, registers: int) -> str:
    """C source for vectors of `lanes` numbers of type `real` ("float", "double") and this many registers."""
    widths, align = range(1, 1 + _most(registers)), 4 if real == "float" else 8
    sizes: dict[str, object] = {"chunk": _CHUNK, "columns": widths[-1] * lanes, "slab": _SLAB, "block": _BLOCK}
    sizes |= {
        "tall": _tall(registers, widths[-1]),
        "few": _FEW,
        "ints": align * lanes // 4,
        "wide": 4 * align * lanes // 4,
        "lanes": lanes,
        "real": real,
        "bytes": align * lanes,
        "align": align,
    }
    text = [_HEAD.format(**sizes)]
    for width in widths:
        rows = _tall(registers, width)
        text += [_products(rows, width, lanes), _gradients(rows, width, lanes)]
    products = _calls("products", "x, w, y, in, to, count, c, x_row, y_row, w_row", widths)
    gradients = _calls("gradients", "a, b, dw + at, count, rows, y_row", widths)
    text.append(_TAIL.format(call_products=products, call_gradients=gradients, **sizes))
    return "".join(text)


def _tall(registers: int, width: int) -> int:
    """Rows of a tile of so many vectors of columns."""
    return min(14, (registers - 2 - width) // width)


def _most(registers: int) -> int:
    """Vectors of a tile's columns, at most."""
    return 4 if registers > 16 else 2


def _calls(name: str, given: str, widths: range) -> str:
    """Calls of the tile for as many vectors of columns as are left, at most the widest."""
    each = [f"if (left == {width}) {name}_{width}({given});" for width in widths[:-1]]
    return " else ".join([*each, f"{name}_{widths[-1]}({given});"])


def _products(rows: int, width: int, lanes: int) -> str:
    # Rows past the end of a list repeat its first input and write to `spare`.
    pointers = [
        f"const real *x{r} = x + in[p + {r} < count ? p + {r} : 0] * x_row; "
        f"real *y{r} = p + {r} < count ? y + to[p + {r}] * y_row : spare;"
        for r in range(rows)
    ]
    steps = [f"v a{r} = x{r}[k] - (v){{}}; {_sums(r, width)}" for r in range(rows)]
    return _PRODUCTS.format(columns=width * lanes, **_tile(rows, width, lanes, pointers, steps))


def _gradients(rows: int, width: int, lanes: int) -> str:
    # Rows past the end of a slab repeat its last one, and are not written.
    pointers = [f"const i64 o{r} = whole || {r} < rows ? {r} : rows - 1;" for r in range(rows)]
    pointers += [f"real *y{r} = y + o{r} * y_row;" for r in range(rows)]
    steps = [f"v a{r} = a[o{r}] - (v){{}}; {_sums(r, width)}" for r in range(rows)]
    tile = _tile(rows, width, lanes, pointers, steps, "if (whole || {r} < rows) ")
    return _GRADIENTS.format(slab=_SLAB, columns=width * lanes, **tile)


def _sums(row: int, width: int) -> str:
    return " ".join(f"s{row}_{u} += a{row} * b{u};" for u in range(width))


def _tile(
    rows: int, width: int, lanes: int, pointers: list[str], steps: list[str], guard: str = ""
) -> dict[str, object]:
    adds = [
        guard.format(r=r) + "{ " + " ".join(f"*(v *)(y{r} + {u * lanes}) += s{r}_{u};" for u in range(width)) + " }"
        for r in range(rows)
    ]
    return {
        "rows": rows,
        "width": width,
        "pointers": "\n        ".join(pointers),
        "sums": ", ".join(f"s{r}_{u} = {{0}}" for r in range(rows) for u in range(width)),
        "loads": " ".join(f"const v b{u} = *(const v *)(b + {u * lanes});" for u in range(width)),
        "steps": "\n            ".join(steps),
        "adds": "\n        ".join(adds),
    }


class PairLists(NamedTuple):
    """Pairs by kernel offset and chunk of output rows. gather, scatter: int32 [P] rows; starts int64 [K, chunks + 1]:
    first pair of each chunk at each offset, then the end."""

    gather: Tensor
    scatter: Tensor
    starts: Tensor


class Kernels(NamedTuple):
    """The compiled kernels for a dtype: lanes of a vector, vectors of a tile at most."""

    library: CDLL
    dtype: torch.dtype
    lanes: int
    vectors: int

    @staticmethod
    def compiled(found: Compiler, dtype: torch.dtype, lanes: int, registers: int) -> Kernels:
        """The kernels for float32 or float64, and vector registers of `lanes` float32 values."""
        real, lanes = ("float", lanes) if dtype == torch.float32 else ("double", lanes // 2)
        return Kernels(found.library(source(real, lanes, registers)), dtype, lanes, _most(registers))

    def call(self, name: str, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """Run a kernel on torch's threads. tensors: contiguous features and index arrays of PairLists."""
        call(self.library, name, tensors, sizes)

    def padded(self, x: Tensor) -> Tensor:
        """x, contiguous, with zeros up to whole vectors along the last axis."""
        return functional.pad(x.to(self.dtype), (0, -x.shape[-1] % self.lanes)).contiguous()


@lru_cache(maxsize=2)
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for float32 or float64 on this CPU; None without a C compiler."""
    made = compiled_by(lambda found: Kernels.compiled(found, dtype, *found.vector))
    return None if isinstance(made, str) else made


def packed(run: Kernels, weight: Tensor) -> Tensor:
    """weight [G, N, K, C] in the order in which `products` reads it: [G, K, blocks of columns, C, columns]."""
    (groups, n, taps, c), weight = weight.shape, weight.to(run.dtype)
    vectors = -(-n // run.lanes)
    blocks = -(-vectors // run.vectors)
    to = weight.new_empty(groups, taps, blocks, c, -(-vectors // blocks) * run.lanes)
    steps = (weight.stride(0), weight.stride(1), weight.stride(2), weight.stride(3))
    run.call("pack", (weight, to), (taps, groups, c, n, *steps))
    return to


def products(run: Kernels, x: Tensor, weight: Tensor, n: int, lists: PairLists, rows: int) -> Tensor:
    """y [rows, G, N] of x [rows of x, G, C] and the packed weight [G, N, K, C], in the kernels' dtype."""
    groups, taps, c = weight.shape[0], weight.shape[1], weight.shape[3]
    x, y = x.to(run.dtype).contiguous(), weight.new_empty(rows, groups, n + -n % run.lanes)
    sizes = rows, lists.starts.shape[1] - 1, taps, groups, c, y.shape[2]
    run.call("products", (x, weight, y, lists.gather, lists.scatter, lists.starts), sizes)
    return y if y.shape[2] == n else y[..., :n].contiguous()


def gradients(run: Kernels, x: Tensor, grad: Tensor, lists: PairLists) -> Tensor:
    """dw [G, N, K, C] of x [rows of x, G, C] and grad [rows of y, G, N], in the kernels' dtype."""
    (_, groups, n), (taps, ends), c = grad.shape, lists.starts.shape, x.shape[2]
    x, grad = run.padded(x), grad.to(run.dtype).contiguous()
    dw = x.new_empty(groups, n, taps, x.shape[2])
    sizes = ends - 1, taps, groups, n, x.shape[2]
    run.call("gradients", (grad, x, dw, lists.scatter, lists.gather, lists.starts), sizes)
    return dw if x.shape[2] == c else dw[..., :c].contiguous()


def chunks_of(rows: int) -> int:
    """The number of chunks of so many output rows."""
    return -(-rows // _CHUNK)


def lists_of_rows(run: Kernels, rows: Tensor) -> tuple[PairLists, Tensor]:
    """The lists of a neighbour table int32 [N, K] (-1: none), and int32 [P]: the kernel offset of each pair."""
    rows, (count, taps) = rows.contiguous(), rows.shape
    chunks = chunks_of(count)
    numbers = rows.new_zeros(taps, chunks + 1, dtype=torch.int64)
    run.call("pairs", (rows, numbers, None, None, None), (count, chunks, taps))
    starts, total = _starts(numbers)
    gather, scatter, listed = (rows.new_empty(total) for _ in range(3))
    run.call("pairs", (rows, starts.clone(), gather, scatter, listed), (count, chunks, taps))
    return PairLists(gather, scatter, starts), listed


def lists_of_pairs(run: Kernels, sides: tuple[Tensor, Tensor], ends: Tensor, extents: tuple[int, int]) -> PairLists:
    """The lists of pairs that are sorted by kernel offset. sides: rows of inputs and of outputs, at most `extents`;
    others are left out. ends int64 [K + 1]: first pair of each offset, then the end."""
    own = [side.clamp(-1, extent).int().contiguous() for side, extent in zip(sides, extents, strict=True)]
    taps, chunks = len(ends) - 1, chunks_of(extents[1])
    numbers = ends.new_zeros(taps, chunks + 1)
    run.call("sort", (*own, ends, numbers, None, None), (taps, chunks, *extents))
    starts, total = _starts(numbers)
    gather, scatter = (own[0].new_empty(total) for _ in range(2))
    run.call("sort", (*own, ends, starts.clone(), gather, scatter), (taps, chunks, *extents))
    return PairLists(gather, scatter, starts)


def _starts(numbers: Tensor) -> tuple[Tensor, int]:
    """(first pair of each list, number of pairs) from the numbers of pairs."""
    ends = numbers.flatten().cumsum(0)
    return ends.view_as(numbers) - numbers, int(ends[-1]) if len(ends) else 0
