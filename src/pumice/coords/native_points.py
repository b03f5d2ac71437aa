"""Search among points in C, on a CPU.

Points are split at medians of their widest axis until LEAF of them are left, as in a kd-tree (Bentley, Multidimensional
binary search trees used for associative searching, 1975); what is kept of the tree are its leaves and groups of these,
with boxes. A query is compared with the boxes of a whole vector of leaves at once and with all points of a leaf.

Both the distance to a point and the bound of a box are sums in the same order of squares of differences, each rounded,
never fused: rounding is monotone, so no bound exceeds the distance of a point in the box, and results are exact. A
query begins with the distances to what the query before has found, which is close by.

Farthest points: leaves keep the distance of their farthest point, so that a new sample touches only those leaves whose
box is nearer (Han et al., QuickFPS, IEEE TCAD 2023, section III).

The plain twins are those of coords.neighbors.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from functools import lru_cache

import torch
from torch import Tensor

from pumice.runtime.native import Compiler, call, compiled_by

LEAF = 32  # Points of a leaf
GROUP = 16  # Leaves of a group, at most the WIDE of the kernels

_TYPES = {
    torch.float32: {"real": "float", "whole": "int", "limit": "__FLT_MAX__", "highest": "__INT_MAX__"},
    torch.float64: {"real": "double", "whole": "i64", "limit": "__DBL_MAX__", "highest": "__LONG_LONG_MAX__"},
}

_SOURCE = """#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
enum {{ D = {dim}, V = {lanes}, LEAF = {leaf}, CHUNK = 256 }};
typedef {real} real;
typedef {whole} whole;
typedef real vec __attribute__((vector_size(V * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef whole mask __attribute__((vector_size(V * sizeof(real)), aligned(sizeof(real)), may_alias));
typedef unsigned long long u64;
static inline vec load(const real *x) {{ return *(const vec *)x; }}
static inline vec chosen(mask m, vec a, vec b) {{ return (vec)(((mask)a & m) | ((mask)b & ~m)); }}
/* Sets bits of the lanes that are set, from bit `first` on. */
static inline mask bits_of(mask m, int first) {{ const mask each = {{{weights}}}; return m & (each << first); }}
static inline u64 joined(mask m) {{
{joins}    return m[0] & {all};
}}
/* Iterate over set bits. */
#define EACH_BIT(bits, bit) for (u64 left = bits, bit; left && (bit = __builtin_ctzll(left), 1); left &= left - 1)
enum {{ WIDE = 16 }};

/* leaves [2 D, leaf_stride]: low and high sides of boxes; groups alike. points [leaf, D, LEAF], index [leaf, LEAF], -1
   for padding. group_leaf [groups + 1], item_group [items + 1]: where leaves of a group, groups of an item begin. */
typedef struct {{
    const real *points, *leaves, *groups; const int *index; const i64 *group_leaf, *item_group;
    i64 leaf_stride, group_stride;
}} tree;
static inline vec bound(const real *box, i64 stride, const real *q) {{
    vec sum = {{0}};
    const vec none = {{0}};
    for (int a = 0; a < D; a++) {{
        const vec below = load(box + a * stride) - q[a], above = q[a] - load(box + (D + a) * stride);
        const vec apart = chosen(below > above, below, above), d = chosen(apart > none, apart, none);
        sum += d * d;
    }}
    return sum;
}}
/* Bits of those of up to WIDE boxes that are at most `most` away, whose bounds are in `far`. */
static inline u64 near_boxes(const real *box, i64 stride, const real *q, real most, i64 count, real *far) {{
    mask near = {{0}};
    for (int i = 0; i < WIDE; i += V) {{
        const vec d = bound(box + i, stride, q);
        *(vec *)(far + i) = d;
        near |= bits_of(d <= most, i);
    }}
    return joined(near) & (count < WIDE ? (1ull << count) - 1 : ~0ull);
}}
/* Squared distances of a vector of points of a leaf. */
static inline vec distances(const real *points, const real *q) {{
    vec sum = {{0}};
    for (int a = 0; a < D; a++) {{ const vec d = load(points + a * LEAF) - q[a]; sum += d * d; }}
    return sum;
}}
/* Bits of the points of a leaf that are at most `most` away, whose distances are in `far`. */
static inline u64 near_points(const real *points, const real *q, real most, real *far) {{
    mask near = {{0}};
    for (int i = 0; i < LEAF; i += V) {{
        const vec d = distances(points + i, q);
        *(vec *)(far + i) = d;
        near |= bits_of(d <= most, i);
    }}
    return joined(near);
}}

/* Split order[0, n) at a multiple of LEAF; `k`-th smallest by Hoare's selection. */
static void select_kth(const real *x, int *order, i64 n, i64 k) {{
    i64 low = 0, high = n - 1;
    while (low < high) {{
        const real pivot = x[(i64)order[low + (high - low) / 2] * D];
        i64 i = low, j = high;
        while (i <= j) {{
            while (x[(i64)order[i] * D] < pivot) i++;
            while (x[(i64)order[j] * D] > pivot) j--;
            if (i <= j) {{ const int t = order[i]; order[i++] = order[j]; order[j--] = t; }}
        }}
        if (k <= j) high = j; else if (k >= i) low = i; else return;
    }}
}}
static void split(const real *x, int *order, i64 n) {{
    while (n > LEAF) {{
        real low[D], high[D];
        for (int a = 0; a < D; a++) low[a] = high[a] = x[(i64)order[0] * D + a];
        for (i64 i = 1; i < n; i++) for (int a = 0; a < D; a++) {{
            const real v = x[(i64)order[i] * D + a];
            low[a] = v < low[a] ? v : low[a];
            high[a] = v > high[a] ? v : high[a];
        }}
        int widest = 0;
        for (int a = 1; a < D; a++) if (high[a] - low[a] > high[widest] - low[widest]) widest = a;
        const i64 half = ((n + LEAF - 1) / LEAF + 1) / 2 * LEAF;
        if (high[widest] > low[widest]) select_kth(x + widest, order, n, half);
        split(x, order, half);
        order += half, n -= half;
    }}
}}
typedef struct {{ const real *x; int *order; const i64 *begins; i64 items, next; }} splitting;
static void split_work(void *data) {{
    splitting *s = data;
    for (i64 item; (item = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->items;)
        split(s->x, s->order + s->begins[item], s->begins[item + 1] - s->begins[item]);
}}
/* order: the points item by item; begins [items + 1]. */
int arrange(region parallel, int threads, const real *x, int *order, const i64 *begins, i64 items) {{
    splitting s = {{x, order, begins, items, 0}};
    start(parallel, threads, items, split_work, &s);
    return 0;
}}
/* Points and boxes of leaves. begins [leaves]: the place in `order` of the first point of each, count: of points. */
int fill(region parallel, int threads, const real *x, const int *order, const i64 *begins, const i64 *counts,
    real *points, int *index, real *leaves, i64 count, i64 stride) {{
    for (i64 leaf = 0; leaf < count; leaf++) {{
        const int *own = order + begins[leaf];
        real *to = points + leaf * D * LEAF;
        for (int a = 0; a < D; a++) {{
            real low = {limit}, high = -{limit};
            for (i64 i = 0; i < LEAF; i++) {{
                const int there = i < counts[leaf];
                const real v = there ? x[(i64)own[i] * D + a] : (real)__builtin_inf();
                to[a * LEAF + i] = v;
                low = there && v < low ? v : low;
                high = there && v > high ? v : high;
            }}
            leaves[a * stride + leaf] = low;
            leaves[(D + a) * stride + leaf] = high;
        }}
        for (i64 i = 0; i < LEAF; i++) index[leaf * LEAF + i] = i < counts[leaf] ? own[i] : -1;
    }}
    return 0;
}}

/* The best so far by (d, at), sorted, with room for whole vectors and d[-1] below all. most: the largest squared
   distance that is admitted. by_index: distances count as 0. */
typedef struct {{ real *d; whole *at; i64 k, by_index; real most; }} best;
static inline void offer(best *b, real d, whole at) {{
    const real x = b->by_index ? 0 : d;
    if (b->by_index && at >= b->at[b->k - 1]) return;
    /* Each takes the largest of what it had, what was before it and the new one but for the largest: no branches. */
    for (i64 j = (b->k - 1) / V * V; j >= 0; j -= V) {{
        const vec had = load(b->d + j), lower = load(b->d + j - 1);
        const mask had_at = *(mask *)(b->at + j), lower_at = *(mask *)(b->at + j - 1);
        const mask here = (x < had) | ((x == had) & (at < had_at));
        const mask below = (x < lower) | ((x == lower) & (at < lower_at));
        *(vec *)(b->d + j) = chosen(here, chosen(below, lower, (vec){{0}} + x), had);
        *(mask *)(b->at + j) = (here & ((below & lower_at) | (~below & at))) | (~here & had_at);
    }}
    if (b->d[b->k - 1] < b->most && !b->by_index) b->most = b->d[b->k - 1];
}}
static inline real squared(const real *p, const real *q) {{
    real sum = 0;
    for (int a = 0; a < D; a++) {{ const real d = p[a] - q[a]; sum += d * d; }}
    return sum;
}}
/* work(data, leaf) for each leaf of an item whose box is at most *most away from q, which may be lowered meanwhile. */
static inline __attribute__((always_inline)) void each_leaf(const tree *t, const real *q, i64 item, const real *most,
    void (*work)(void *, i64), void *data) {{
    const i64 last = t->item_group[item + 1];
    real outer[WIDE], far[WIDE];
    for (i64 g = t->item_group[item]; g < last; g += WIDE)
        EACH_BIT(near_boxes(t->groups + g, t->group_stride, q, *most, last - g, outer), one) {{
            const i64 leaf = t->group_leaf[g + one], count = t->group_leaf[g + one + 1] - leaf;
            if (outer[one] > *most) continue;
            EACH_BIT(near_boxes(t->leaves + leaf, t->leaf_stride, q, *most, count, far), other)
                if (far[other] <= *most) work(data, leaf + other);
        }}
}}

/* x: the points. turn: the order of the queries; item: of each. first [n + 1]: where the results of a query begin. */
typedef struct {{
    tree t; const real *x, *q; const int *turn; const i64 *item, *first; i64 *found; real *apart;
    i64 n, k, by_index, next; real most;
}} search;
typedef struct {{ const search *s; const real *q; best b; }} one_search;
static inline __attribute__((always_inline)) void offer_leaf(void *data, i64 leaf) {{
    one_search *one = data;
    const tree *t = &one->s->t;
    real far[LEAF];
    EACH_BIT(near_points(t->points + leaf * D * LEAF, one->q, one->b.most, far), i)
        offer(&one->b, far[i], t->index[leaf * LEAF + i]);
}}
/* Squared distance that the k nearest do not exceed: that of the farthest of k points. */
static real reach_of(const search *s, const i64 *of, const real *q) {{
    real far = 0;
    for (i64 j = 0; j < s->k; j++) {{ const real d = squared(s->x + of[j] * D, q); far = d > far ? d : far; }}
    return far < s->most ? far : s->most;
}}
static void search_work(void *data) {{
    search *s = data;
    const i64 room = (s->k + V - 1) / V * V + V;
    real d[room], *const nearest = d + V;
    whole at[room], *const which = at + V;
    for (i64 begin; (begin = __atomic_fetch_add(&s->next, CHUNK, __ATOMIC_RELAXED)) < s->n;) {{
        const i64 end = begin + CHUNK < s->n ? begin + CHUNK : s->n;
        const i64 *near = 0;
        for (i64 j = begin; j < end; j++) {{
            const i64 i = s->turn[j], item = s->item[i];
            const real *q = s->q + i * D;
            i64 *found = s->found + i * s->k, n = 0;
            if (near && s->item[s->turn[j - 1]] != item) near = 0;
            one_search one = {{s, q, {{nearest, which, s->k, s->by_index, near ? reach_of(s, near, q) : s->most}}}};
            for (i64 r = 0; r < room; r++) d[r] = r < V ? -1 : __builtin_inf(), at[r] = r < V ? -1 : {highest};
            each_leaf(&s->t, q, item, &one.b.most, offer_leaf, &one);
            for (; n < s->k && nearest[n] < (real)__builtin_inf(); n++) {{
                found[n] = which[n];
                s->apart[i * s->k + n] = s->by_index ? squared(s->x + found[n] * D, q) : nearest[n];
            }}
            near = n == s->k && !s->by_index ? found : 0;
            for (; n < s->k; n++) s->apart[i * s->k + n] = __builtin_inf(), found[n] = -1;
        }}
    }}
}}
/* The k nearest of each query that are at most `*most` away, squared; by_index: those of lowest index of these. */
int nearest(region parallel, int threads, const real *points, const int *index, const real *leaves, const real *groups,
    const i64 *group_leaf, const i64 *item_group, const real *x, const real *q, const int *turn, const i64 *item,
    i64 *found, real *apart, const real *most, i64 leaf_stride, i64 group_stride, i64 n, i64 k, i64 by_index) {{
    search s = {{{{points, leaves, groups, index, group_leaf, item_group, leaf_stride, group_stride}}, x, q, turn, item,
        0, found, apart, n, k, by_index, 0, *most}};
    start(parallel, threads, (n + CHUNK - 1) / CHUNK, search_work, &s);
    return 0;
}}

typedef struct {{ const search *s; const real *q; i64 *to; i64 n; }} listing;
static inline __attribute__((always_inline)) void list_leaf(void *data, i64 leaf) {{
    listing *l = data;
    const tree *t = &l->s->t;
    real far[LEAF];
    const u64 near = near_points(t->points + leaf * D * LEAF, l->q, l->s->most, far);
    if (l->to) EACH_BIT(near, i) l->to[l->n++] = t->index[leaf * LEAF + i];
    else l->n += __builtin_popcountll(near);
}}
/* Shell's sort. */
static void sort_indices(i64 *x, i64 n) {{
    static const i64 gaps[] = {{65921, 16001, 3905, 929, 209, 57, 23, 10, 4, 1}};
    for (int g = 0; g < 10; g++) for (i64 i = gaps[g]; i < n; i++) {{
        const i64 v = x[i];
        i64 j = i;
        for (; j >= gaps[g] && x[j - gaps[g]] > v; j -= gaps[g]) x[j] = x[j - gaps[g]];
        x[j] = v;
    }}
}}
static void list_work(void *data) {{
    search *s = data;
    for (i64 begin; (begin = __atomic_fetch_add(&s->next, CHUNK, __ATOMIC_RELAXED)) < s->n;) {{
        const i64 end = begin + CHUNK < s->n ? begin + CHUNK : s->n;
        for (i64 j = begin; j < end; j++) {{
            const i64 i = s->turn[j];
            listing l = {{s, s->q + i * D, s->first ? s->found + s->first[i] : 0, 0}};
            each_leaf(&s->t, l.q, s->item[i], &s->most, list_leaf, &l);
            if (s->first) sort_indices(l.to, l.n); else s->found[i] = l.n;
        }}
    }}
}}
/* All that are at most `*most` away, squared: their numbers if first is null, else they, in ascending order. */
int within(region parallel, int threads, const real *points, const int *index, const real *leaves, const real *groups,
    const i64 *group_leaf, const i64 *item_group, const real *q, const int *turn, const i64 *item, const i64 *first,
    i64 *found, const real *most, i64 leaf_stride, i64 group_stride, i64 n) {{
    search s = {{{{points, leaves, groups, index, group_leaf, item_group, leaf_stride, group_stride}}, 0, q, turn, item,
        first, found, 0, n, 0, 0, 0, *most}};
    start(parallel, threads, (n + CHUNK - 1) / CHUNK, list_work, &s);
    return 0;
}}

/* apart [leaf, LEAF]: squared distance to the nearest sample, below 0 for samples and padding. The farthest point of
   each leaf, and of each group: its distance and place leaf * LEAF + i; ties by index. */
typedef struct {{
    tree t; const i64 *begins, *first; i64 *found; real *apart, *leaf_far, *group_far; i64 *leaf_at, *group_at;
    i64 items, next;
}} sampling;
static inline int farther(const sampling *s, real d, i64 at, real than, i64 than_at) {{
    return d > than || (d == than && s->t.index[at] < s->t.index[than_at]);
}}
static void touch(sampling *s, i64 leaf, const real *q) {{
    real *apart = s->apart + leaf * LEAF;
    vec far = {{0}};
    far -= 2;
    for (int i = 0; i < LEAF; i += V) {{
        const vec d = distances(s->t.points + leaf * D * LEAF + i, q), had = load(apart + i);
        const vec now = chosen(d < had, d, had);
        *(vec *)(apart + i) = now;
        far = chosen(now > far, now, far);
    }}
    real top = far[0];
    for (int v = 1; v < V; v++) top = far[v] > top ? far[v] : top;
    mask equal = {{0}};
    for (int i = 0; i < LEAF; i += V) equal |= bits_of(load(apart + i) == top, i);
    i64 at = -1;
    EACH_BIT(joined(equal), i)
        if (at < 0 || s->t.index[leaf * LEAF + i] < s->t.index[at]) at = leaf * LEAF + i;
    s->leaf_far[leaf] = top, s->leaf_at[leaf] = at;
}}
static void refresh_group(sampling *s, i64 g) {{
    i64 leaf = s->t.group_leaf[g];
    real far = s->leaf_far[leaf];
    i64 at = s->leaf_at[leaf];
    while (++leaf < s->t.group_leaf[g + 1])
        if (farther(s, s->leaf_far[leaf], s->leaf_at[leaf], far, at)) far = s->leaf_far[leaf], at = s->leaf_at[leaf];
    s->group_far[g] = far, s->group_at[g] = at;
}}
/* Bits of those of up to WIDE boxes that are less far than their farthest point is from the samples. */
static inline u64 nearer_boxes(const real *box, i64 stride, const real *q, const real *most, i64 count) {{
    mask near = {{0}};
    for (int i = 0; i < WIDE; i += V) near |= bits_of(bound(box + i, stride, q) < load(most + i), i);
    return joined(near) & (count < WIDE ? (1ull << count) - 1 : ~0ull);
}}
/* Distances to a new sample, q. */
static void sample(sampling *s, i64 item, const real *q) {{
    const tree *t = &s->t;
    const i64 last = t->item_group[item + 1];
    for (i64 g = t->item_group[item]; g < last; g += WIDE)
        EACH_BIT(nearer_boxes(t->groups + g, t->group_stride, q, s->group_far + g, last - g), one) {{
            const i64 leaf = t->group_leaf[g + one], count = t->group_leaf[g + one + 1] - leaf;
            EACH_BIT(nearer_boxes(t->leaves + leaf, t->leaf_stride, q, s->leaf_far + leaf, count), other)
                touch(s, leaf + other, q);
            refresh_group(s, g + one);
        }}
}}
static void sample_work(void *data) {{
    sampling *s = data;
    const tree *t = &s->t;
    for (i64 item; (item = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->items;) {{
        const i64 begin = t->item_group[item], end = t->item_group[item + 1];
        i64 place = s->begins[item], own = begin;
        while (own + 1 < end && t->group_leaf[own + 1] <= place / LEAF) own++;
        for (i64 n = s->first[item]; n < s->first[item + 1]; n++) {{
            const i64 leaf = place / LEAF;
            real q[D];
            for (int a = 0; a < D; a++) q[a] = t->points[leaf * D * LEAF + a * LEAF + place % LEAF];
            s->found[n] = t->index[place];
            s->apart[place] = -1;
            sample(s, item, q);
            /* Again, as its bound is not below 0 if duplicates of the sample are all that is left there. */
            touch(s, leaf, q);
            refresh_group(s, own);
            own = begin;
            for (i64 g = begin + 1; g < end; g++)
                if (farther(s, s->group_far[g], s->group_at[g], s->group_far[own], s->group_at[own])) own = g;
            place = s->group_at[own];
        }}
    }}
}}
/* begins [items]: the place of each item's first sample; first [items + 1]: where its samples begin in found. */
int farthest(region parallel, int threads, const real *points, const int *index, const real *leaves, const real *groups,
    const i64 *group_leaf, const i64 *item_group, const i64 *begins, const i64 *first, i64 *found, real *apart,
    real *leaf_far, real *group_far, i64 *leaf_at, i64 *group_at, i64 leaf_stride, i64 group_stride, i64 items) {{
    sampling s = {{{{points, leaves, groups, index, group_leaf, item_group, leaf_stride, group_stride}}, begins, first,
        found, apart, leaf_far, group_far, leaf_at, group_at, items, 0}};
    start(parallel, threads, items, sample_work, &s);
    return 0;
}}
"""


@lru_cache(maxsize=16)
def library(dim: int, dtype: torch.dtype) -> CDLL | str:
    """The kernels for D = dim, or the reason why there are none. Kept: every search asks for them, and to find them on
    the disk, or to fail to compile them, takes longer than a small search."""

    def made(found: Compiler) -> CDLL:
        lanes = found.vector[0] * 4 // dtype.itemsize
        names = {"weights": ", ".join(str(1 << lane) for lane in range(lanes)), "joins": _joins(lanes)} | _TYPES[dtype]
        return found.library(_SOURCE.format(dim=dim, lanes=lanes, leaf=LEAF, all=f"0x{(1 << LEAF) - 1:x}", **names))

    return compiled_by(made)


def _joins(lanes: int) -> str:
    """Lines of C that make each lane of m the union of all."""
    halves = [lanes >> n for n in range(1, lanes.bit_length())]
    swaps = (", ".join(str(lane ^ half) for lane in range(lanes)) for half in halves)
    return "".join(f"    m |= __builtin_shufflevector(m, m, {swap});\n" for swap in swaps)


def run(points: Tensor, name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
    """Run a kernel for points [N, D]."""
    call(library(points.shape[1], points.dtype), name, tensors, sizes)


def refusal(points: Tensor) -> str | None:
    """Reason why these kernels do not search among points [N, D], or None."""
    if points.device.type != "cpu":
        return "C kernels run on a CPU"
    found = library(points.shape[1], points.dtype)
    return found if isinstance(found, str) else None
