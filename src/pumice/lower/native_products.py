"""Products of gathered rows in C, for float32 on a CPU:

    y[S[p], n]     += x[G[p], c] * w[K[p], c, n]          products
    dw[K[p], c, n] += x[G[p], c] * g[S[p], n]             gradients

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

from pumice.coords import Pairs
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.native import NativeUnavailableError, call, compiler

_CHUNK = 1024  # Outputs per chunk
_BLOCK = 128  # Pairs per block of the gradient
_FEW = 256  # Rows of a neighbour table that are listed at once, offset by offset: they stay in the cache
_SLAB = 64  # Rows of dw[k] per task of the gradient
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEAD = """typedef float v __attribute__((vector_size({bytes}), aligned(4), may_alias));
typedef long long i64;
typedef void (*region)(void (*)(void *), void *, unsigned, unsigned);
typedef struct {{
    const float *x, *w; float *y; const int *gather, *scatter; const i64 *starts;
    i64 rows, chunks, taps, c, n, next;
}} job;
static void run(region parallel, int threads, i64 tasks, void (*work)(void *), void *j) {{
    if (parallel && threads > 1 && tasks > 1) parallel(work, j, threads < tasks ? threads : tasks, 0);
    else work(j);
}}
"""
_PRODUCTS = """static void products_{width}(const job *j, const float *w, const int *in, const int *to, i64 count,
    i64 at) {{
    float spare[{columns}];
    const i64 c = j->c, n = j->n;
    for (i64 p = 0; p < count; p += {rows}) {{
        {pointers}
        v {sums};
        const float *b = w;
        for (i64 k = 0; k < c; k++, b += n) {{
            {loads}
            {steps}
        }}
        {adds}
    }}
}}
"""
_GRADIENTS = """static inline __attribute__((always_inline)) void gradient_{width}(const job *j, float *y,
    const int *in, const int *to, i64 count, i64 first, i64 rows, i64 at, int whole) {{
    const i64 c = j->c, n = j->n;
    {pointers}
    v {sums};
    for (i64 p = 0; p < count; p++) {{
        const float *a = j->x + in[p] * c + first, *b = j->w + to[p] * n + at;
        {loads}
        {steps}
    }}
    {adds}
}}
static void gradients_{width}(const job *j, float *y, const int *in, const int *to, i64 count, i64 first, i64 rows,
    i64 at) {{
    i64 r = 0;
    for (; r + {rows} <= rows; r += {rows}) gradient_{width}(j, y + r * j->n, in, to, count, first + r, {rows}, at, 1);
    if (r < rows) gradient_{width}(j, y + r * j->n, in, to, count, first + r, rows - r, at, 0);
}}
"""
_TAIL = """/* Blocks of columns of nearly equal width. */
static i64 blocks_of(i64 n) {{ return (n + {columns} - 1) / {columns}; }}
static i64 width_of(i64 n) {{ return (n / {lanes} + blocks_of(n) - 1) / blocks_of(n); }}
static void work_products(void *data) {{
    job *j = data;
    const i64 n = j->n, blocks = blocks_of(n), width = width_of(n);
    for (;;) {{
        i64 q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (q >= j->chunks * blocks) return;
        const i64 first = q / blocks * {chunk}, last = first + {chunk} < j->rows ? first + {chunk} : j->rows;
        const i64 at = q % blocks * width * {lanes}, rest = (n - at) / {lanes}, left = rest < width ? rest : width;
        for (i64 o = first; o < last; o++)
            for (i64 e = at; e < at + left * {lanes}; e++) j->y[o * n + e] = 0;
        for (i64 k = 0; k < j->taps; k++) {{
            const i64 *s = j->starts + k * (j->chunks + 1) + q / blocks;
            const i64 count = s[1] - s[0];
            if (!count) continue;
            const float *w = j->w + k * j->c * n + at;
            const int *in = j->gather + s[0], *to = j->scatter + s[0];
            {call_products}
        }}
    }}
}}
static void work_gradients(void *data) {{
    job *j = data;
    const i64 n = j->n, c = j->c, slabs = (c + {slab} - 1) / {slab}, width = width_of(n);
    for (;;) {{
        i64 q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
        if (q >= j->taps * slabs) return;
        const i64 k = q / slabs, first = q % slabs * {slab}, rows = c - first < {slab} ? c - first : {slab};
        float *y = j->y + (k * c + first) * n;
        for (i64 e = 0; e < rows * n; e++) y[e] = 0;
        for (i64 p = j->starts[k]; p < j->starts[k + 1]; p += {block}) {{
            const i64 left_pairs = j->starts[k + 1] - p, count = left_pairs < {block} ? left_pairs : {block};
            for (i64 at = 0; at < n; at += width * {lanes}) {{
                const i64 rest = (n - at) / {lanes}, left = rest < width ? rest : width;
                {call_gradients}
            }}
        }}
    }}
}}
typedef struct {{ const int *rows; i64 *starts; int *gather, *scatter, *taps; i64 n, chunks, volume, next; }} lists;
static void work_lists(void *data) {{
    lists *j = data;
    int in[{few} + 1], out[{few} + 1];
    for (i64 q; (q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->chunks;) {{
        const i64 end = (q + 1) * {chunk} < j->n ? (q + 1) * {chunk} : j->n;
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
                for (i64 e = 0; j->gather && e < count; e++) {{
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
    run(parallel, threads, chunks, work_lists, &j);
}}
void products(region parallel, int threads, const float *x, const float *w, float *y, const int *gather,
    const int *scatter, const i64 *starts, i64 rows, i64 chunks, i64 taps, i64 c, i64 n) {{
    job j = {{x, w, y, gather, scatter, starts, rows, chunks, taps, c, n, 0}};
    run(parallel, threads, chunks * blocks_of(n), work_products, &j);
}}
void gradients(region parallel, int threads, const float *x, const float *g, float *dw, const int *gather,
    const int *scatter, const i64 *starts, i64 taps, i64 c, i64 n) {{
    job j = {{x, g, dw, gather, scatter, starts, 0, 0, taps, c, n, 0}};
    run(parallel, threads, taps * ((c + {slab} - 1) / {slab}), work_gradients, &j);
}}
"""


def source(lanes: int, registers: int) -> str:
    """C source for vectors of `lanes` floats and this many registers."""
    widths = range(1, 1 + (4 if registers > 16 else 2))
    text = [_HEAD.format(bytes=4 * lanes)]
    for width in widths:
        rows = min(14, (registers - 2 - width) // width)
        text += [_products(rows, width, lanes), _gradients(rows, width, lanes)]
    sizes = {"chunk": _CHUNK, "columns": widths[-1] * lanes, "slab": _SLAB, "block": _BLOCK}
    sizes |= {"few": _FEW, "lanes": lanes}
    products = _calls("products", "j, w, in, to, count, at", widths)
    gradients = _calls("gradients", "j, y, j->gather + p, j->scatter + p, count, first, rows, at", widths)
    text.append(_TAIL.format(call_products=products, call_gradients=gradients, **sizes))
    return "".join(text)


def _calls(name: str, given: str, widths: range) -> str:
    """Calls of the tile for as many vectors of columns as are left, at most the widest."""
    each = [f"if (left == {width}) {name}_{width}({given});" for width in widths[:-1]]
    return " else ".join([*each, f"{name}_{widths[-1]}({given});"])


def _products(rows: int, width: int, lanes: int) -> str:
    # Rows past the end of a list repeat its first input and write to `spare`.
    pointers = [
        f"const float *x{r} = j->x + in[p + {r} < count ? p + {r} : 0] * c; "
        f"float *y{r} = p + {r} < count ? j->y + to[p + {r}] * n + at : spare;"
        for r in range(rows)
    ]
    steps = [f"v a{r} = x{r}[k] - (v){{}}; {_sums(r, width)}" for r in range(rows)]
    return _PRODUCTS.format(columns=width * lanes, **_tile(rows, width, lanes, pointers, steps))


def _gradients(rows: int, width: int, lanes: int) -> str:
    # Rows past the end of a slab repeat its last one, and are not written.
    pointers = [f"const i64 o{r} = whole || {r} < rows ? {r} : rows - 1;" for r in range(rows)]
    pointers += [f"float *y{r} = y + o{r} * n + at;" for r in range(rows)]
    steps = [f"v a{r} = a[o{r}] - (v){{}}; {_sums(r, width)}" for r in range(rows)]
    return _GRADIENTS.format(**_tile(rows, width, lanes, pointers, steps, "if (whole || {r} < rows) "))


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
    """Pairs by kernel offset, then output row. gather, scatter: int32 [P] rows; starts int64 [K, chunks + 1]: first
    pair of each chunk of outputs at each offset, then the end; ends int64 [K + 1]: first pair of each offset."""

    gather: Tensor
    scatter: Tensor
    starts: Tensor
    ends: Tensor


class Kernels(NamedTuple):
    """The compiled kernels, whose columns are multiples of `lanes` floats."""

    library: CDLL
    lanes: int

    def call(self, name: str, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """Run a kernel on torch's threads. tensors: contiguous float32 features and index arrays of PairLists."""
        call(self.library, name, tensors, sizes)

    def padded(self, x: Tensor) -> Tensor:
        """float32 x, contiguous, with columns of zeros up to whole vectors."""
        return functional.pad(x.float(), (0, -x.shape[-1] % self.lanes)).contiguous()


@lru_cache(maxsize=1)
def kernels() -> Kernels | None:
    """The kernels for this CPU; None without a C compiler."""
    found = compiler()
    if isinstance(found, str):
        return None
    try:
        return Kernels(found.library(source(*found.vector)), found.vector[0])
    except (NativeUnavailableError, OSError):
        return None


def kernels_for(*operands: Tensor) -> Kernels | None:
    """The kernels if they take these operands, else None; halves are computed in float32."""
    return kernels() if all(t.dtype in _DTYPES and t.numel() for t in operands) else None


def products(run: Kernels, x: Tensor, weight: Tensor, lists: PairLists, rows: int) -> Tensor:
    """float32 y [rows, N] of x [rows of x, C] and weight [N, K, C]."""
    n, taps, c = weight.shape
    w = run.padded(weight.permute(1, 2, 0))
    x, y = x.float().contiguous(), w.new_empty(rows, w.shape[2])
    sizes = rows, lists.starts.shape[1] - 1, taps, c, w.shape[2]
    run.call("products", (x, w, y, lists.gather, lists.scatter, lists.starts), sizes)
    return y if y.shape[1] == n else y[:, :n].contiguous()


def gradients(run: Kernels, x: Tensor, grad: Tensor, lists: PairLists) -> Tensor:
    """float32 dw [N, K, C] of x [rows of x, C] and grad [rows of y, N]."""
    g, c, taps = run.padded(grad), x.shape[1], len(lists.ends) - 1
    x, dw = x.float().contiguous(), g.new_empty(taps, c, g.shape[1])
    run.call("gradients", (x, g, dw, lists.gather, lists.scatter, lists.ends), (taps, c, g.shape[1]))
    return dw[..., : grad.shape[1]].permute(2, 0, 1).contiguous()


def lists_of_rows(run: Kernels, rows: Tensor) -> tuple[PairLists, Tensor]:
    """The lists of a neighbour table int32 [N, K] (-1: none), and int32 [P]: the kernel offset of each pair."""
    rows, (count, taps) = rows.contiguous(), rows.shape
    chunks = -(-count // _CHUNK)
    sizes = (count, chunks, taps)
    numbers = rows.new_zeros(taps, chunks + 1, dtype=torch.int64)
    run.call("pairs", (rows, numbers, None, None, None), sizes)
    ends = functional.pad(numbers.sum(1).cumsum(0), (1, 0))
    starts = numbers.flatten().cumsum(0).view_as(numbers) - numbers
    gather, scatter, listed = (rows.new_empty(int(ends[-1])) for _ in range(3))
    run.call("pairs", (rows, starts.clone(), gather, scatter, listed), sizes)
    return PairLists(gather, scatter, starts, ends), listed


@cached_per_tensor
def pair_lists(outputs: Tensor, inputs: Tensor, sizes: Tensor, rows: int) -> PairLists:
    """The lists of Pairs(inputs, outputs, sizes) to `rows` output rows."""
    pairs, taps = Pairs(inputs, outputs, sizes), len(sizes)
    keys = torch.repeat_interleave(torch.arange(taps) * rows, sizes) + outputs
    if not bool((keys[1:] > keys[:-1]).all()):
        keys, order = keys.sort(stable=True)
        pairs = Pairs(inputs[order], outputs[order], sizes)
    bounds = torch.arange(-(-rows // _CHUNK) + 1).mul_(_CHUNK).clamp_(max=rows)
    starts = torch.searchsorted(keys, torch.arange(taps)[:, None] * rows + bounds)
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    # Aliases: cached results must not hold the tensors that they are cached for.
    gather, scatter = (t.int().contiguous().detach() for t in (pairs.inputs, pairs.outputs))
    return PairLists(gather, scatter, starts.contiguous(), ends)
