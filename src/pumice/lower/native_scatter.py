"""Sums and maxima of rows by an index in C, for float32 and float64 on a CPU:

    y[i[p], c] += x[p, c]           y[i[p], c] max= x[p, c], with the first p that attains it

x is read once, in order; each task owns a range of results and skips the rows of others, so that sums have a fixed
order for any number of threads. The plain twins are in rows.py.
"""

from __future__ import annotations

from ctypes import CDLL
from functools import lru_cache

import torch
from torch import Tensor

from pumice.runtime.native import Compiler, call, compiled_by

_AHEAD = 12  # Rows from the current one to that whose results are fetched into the cache
_SOURCE = """typedef {real} real; typedef {integer} integer;
typedef real v __attribute__((vector_size({bytes}), aligned({align}), may_alias));
typedef integer iv __attribute__((vector_size({bytes}), aligned({align}), may_alias));
typedef struct {{
    const real *x; const i64 *index; real *y; integer *arg; char *seen; i64 rows, count, c, parts, next;
}} job;
/* Tasks take ranges of results; loops over runs of rows, from p to end, with the same result s. */
#define EACH(...) \\
    job *j = data; \\
    const i64 c = j->c, *index = j->index, rows = j->rows; \\
    for (i64 q; (q = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->parts;) {{ \\
        const i64 low = q * j->count / j->parts, high = (q + 1) * j->count / j->parts; \\
        for (i64 e = low * c; e < high * c; e++) j->y[e] = 0; \\
        for (i64 e = low * c; j->arg && e < high * c; e++) j->arg[e] = -1; \\
        for (i64 s = low; j->seen && s < high; s++) j->seen[s] = 0; \\
        for (i64 p = 0, end; p < rows; p = end) {{ \\
            const i64 s = index[p]; \\
            for (end = p + 1; end < rows && index[end] == s;) end++; \\
            const i64 n = index[end + {ahead} < rows ? end + {ahead} : p]; \\
            if (n >= low && n < high) for (i64 e = 0; e < c && e < 64; e += 64 / sizeof(real)) {{ \\
                __builtin_prefetch(j->y + n * c + e, 1); \\
                if (j->arg) __builtin_prefetch(j->arg + n * c + e, 1); \\
            }} \\
            if (s < low || s >= high) continue; \\
            const real *from = j->x + p * c, *last = j->x + end * c; \\
            real *y = j->y + s * c; \\
            i64 e = 0; \\
            __VA_ARGS__ \\
        }} \\
    }}
static void work_sums(void *data) {{
    EACH(for (; e + 4 * {lanes} <= c; e += 4 * {lanes}) {{
             v *to = (v *)(y + e);
             v a = to[0], b = to[1], d = to[2], f = to[3];
             for (const real *x = from; x < last; x += c) {{
                 const v *at = (const v *)(x + e);
                 a += at[0]; b += at[1]; d += at[2]; f += at[3];
             }}
             to[0] = a; to[1] = b; to[2] = d; to[3] = f;
         }}
         for (; e + {lanes} <= c; e += {lanes}) {{
             v a = *(v *)(y + e);
             for (const real *x = from; x < last; x += c) a += *(const v *)(x + e);
             *(v *)(y + e) = a;
         }}
         for (; e < c; e++) {{
             real a = y[e];
             for (const real *x = from; x < last; x += c) a += x[e];
             y[e] = a;
         }})
}}
/* A NaN is above all numbers, the first of several. */
#define EXTREMES(OP) \\
    EACH(integer *arg = j->arg ? j->arg + s * c : 0; \\
         if (!j->seen[s]) {{ \\
             for (i64 u = 0; u < c; u++) y[u] = from[u]; \\
             for (i64 u = 0; arg && u < c; u++) arg[u] = p; \\
             j->seen[s] = 1; from += c; p++; \\
         }} \\
         for (; e + {lanes} <= c; e += {lanes}) {{ \\
             v b = *(v *)(y + e); \\
             iv g = arg ? *(iv *)(arg + e) : (iv){{}}, at = (iv){{}} + (integer)p; \\
             for (const real *x = from; x < last; x += c, at += 1) {{ \\
                 const v a = *(const v *)(x + e); \\
                 const iv m = (iv)(a OP b) | ((iv)(a != a) & (iv)(b == b)); \\
                 b = (v)(((iv)a & m) | ((iv)b & ~m)); \\
                 g = (at & m) | (g & ~m); \\
             }} \\
             *(v *)(y + e) = b; \\
             if (arg) *(iv *)(arg + e) = g; \\
         }} \\
         for (const real *x = from; x < last; x += c, p++) for (i64 u = e; u < c; u++) \\
             if (x[u] OP y[u] || (x[u] != x[u] && y[u] == y[u])) {{ y[u] = x[u]; if (arg) arg[u] = p; }})
static void work_largest(void *data) {{ EXTREMES(>) }}
static void work_smallest(void *data) {{ EXTREMES(<) }}
#define RUN(NAME) \\
    void NAME(region parallel, int threads, const real *x, const i64 *index, real *y, integer *arg, \\
        char *seen, i64 rows, i64 count, i64 c) {{ \\
        job j = {{x, index, y, arg, seen, rows, count, c, threads, 0}}; \\
        start(parallel, threads, threads, work_##NAME, &j); \\
    }}
RUN(sums) RUN(largest) RUN(smallest)
"""


@lru_cache(maxsize=2)
def _library(dtype: torch.dtype) -> CDLL | None:
    real, integer, size = ("float", "int", 4) if dtype == torch.float32 else ("double", "i64", 8)
    facts = {"real": real, "integer": integer, "align": size, "ahead": _AHEAD}

    def made(found: Compiler) -> CDLL:
        lanes = min(8, found.vector[0]) * 4 // size
        return found.library(_SOURCE.format(**facts, bytes=lanes * size, lanes=lanes))

    found = compiled_by(made)
    return None if isinstance(found, str) else found


def runs(values: Tensor) -> bool:
    """True if the kernels take these values, of any floating dtype, as float32 or float64."""
    on_cpu = values.device.type == "cpu" and type(values) in (Tensor, torch.nn.Parameter)
    return on_cpu and values.is_floating_point() and values.element_size() > 1 and _library(torch.float32) is not None


def sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    """[count, C] in float32 at least: sums of the rows of values [P, C] by index, int64 [P]; others than 0 to count - 1
    are left out."""
    x, y = _sides(values, count)
    _run("sums", (x, index, y, None, None))
    return y


def extremes(values: Tensor, index: Tensor, count: int, least: bool, places: bool = True) -> tuple[Tensor, Tensor]:
    """[count, C] each: maxima (or minima), 0 for none; with `places` the first row that attains it, -1 for none, int32
    or int64."""
    x, y = _sides(values, count)
    kind = torch.int32 if x.dtype == torch.float32 else torch.int64
    arg = torch.empty(y.shape if places else (0,), dtype=kind, device="cpu")
    seen = torch.empty(count, dtype=torch.uint8, device="cpu")
    _run("smallest" if least else "largest", (x, index, y, arg if places else None, seen))
    return y, arg


def _sides(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    x = values.detach().to(torch.promote_types(values.dtype, torch.float32)).contiguous()
    return x, x.new_empty(count, x.shape[1])


def _run(name: str, arrays: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]) -> None:
    x, index, y, *more = arrays
    library = _library(x.dtype)
    assert library is not None
    call(library, name, (x, index.contiguous(), y, *more), (*x.shape[:1], *y.shape))
