"""The kernel of products of rows of blocks; see block_rows.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["groups", "width", "size", "rows"])
def block_rows(
    x, values, heads, words, y, groups: "i64", width: "i64", size: "i64", rows: "i64", HEIGHT: tl.constexpr,
    DEPTH: tl.constexpr, STEP: tl.constexpr, TURNED: tl.constexpr, COUNT: tl.constexpr, COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, FAR: tl.constexpr, SWAPPED: tl.constexpr,
    STAGES: tl.constexpr
):  # fmt: skip
    """y[HEIGHT * s + i, n] = sum over blocks e of row s, depths j of values[e,i,j] * x[DEPTH * place[e] + j, n]

    A program computes COLUMNS columns of COUNT (1 or 2) rows of blocks, STEP depths of a block of each in an iteration.
    words [iterations + 1, 1 + COUNT]: which STEP rows of x, and which part of the values of each row of blocks, -1:
    none. heads [groups, 3 + 1 + COUNT]: first word, iterations, which rows of blocks, and the first word itself: no
    load waits. TURNED: values[e,j,i]. SWAPPED: columns are the rows of products. Programs of a slice of columns
    follow one another, so that it stays in the cache."""
    if not FAR:
        width = width.to(tl.int32)
    head = heads + (tl.program_id(0) % groups.to(tl.int32)) * (4 + COUNT)
    n = (tl.program_id(0) // groups.to(tl.int32)) * COLUMNS + tl.arange(0, COLUMNS)
    words += (tl.load(head) + 1) * (1 + COUNT)
    count = tl.load(head + 1)
    group = tl.load(head + 2)
    place, first, second = _word(head + 3, COUNT)
    r = tl.arange(0, HEIGHT * COUNT)
    k = tl.arange(0, STEP)
    if TURNED:
        inside = (r % HEIGHT)[:, None] + k[None, :] * HEIGHT
    else:
        inside = (r % HEIGHT)[:, None] * DEPTH + k[None, :]
    if SWAPPED:
        total = tl.zeros([COLUMNS, HEIGHT * COUNT], tl.float32)
    else:
        total = tl.zeros([HEIGHT * COUNT, COLUMNS], tl.float32)
    for _ in tl.range(0, count, num_stages=STAGES):
        at = place * STEP + k
        part = first
        if COUNT == 2:
            part = tl.where(r < HEIGHT, first, second)
        if FAR:
            at = at.to(tl.int64)
            part = part.to(tl.int64)
        where = _addresses(at[:, None] * width, n, VECTOR, EVEN, COLUMNS)
        if WHOLE and EVEN:
            right = tl.load(x + where)
        else:
            right = tl.load(x + where, mask=(at < size)[:, None] & _inside(n, width, VECTOR)[None, :], other=0)
        part = part * (STEP * HEIGHT if TURNED else STEP)
        if COUNT == 1:
            left = tl.load(values + part + inside)
        else:
            left = tl.load(values + part[:, None] + inside, mask=(part >= 0)[:, None], other=0)
        if SWAPPED:
            total = tl.dot(tl.trans(right), tl.trans(left), total)
        else:
            total = tl.dot(left, right, total)
        place, first, second = _word(words, COUNT)
        words += 1 + COUNT
    r += group * (HEIGHT * COUNT)
    row = r.to(tl.int64) if FAR else r
    if SWAPPED:
        total = tl.trans(total)
    where = _addresses(row[:, None] * width, n, VECTOR, EVEN, COLUMNS)
    tl.store(y + where, total.to(y.dtype.element_ty), mask=(row < rows)[:, None] & _inside(n, width, VECTOR)[None, :])


@triton.jit
def _word(words, COUNT: tl.constexpr):
    """(place in x, parts of the values of one or two rows of blocks): of one, the second is the first."""
    first = tl.load(words + 1)
    second = first
    if COUNT == 2:
        second = tl.load(words + 2)
    return tl.load(words), first, second


@triton.jit
def _inside(n, width, VECTOR: tl.constexpr):
    """Which columns there are: all of a vector, or none."""
    return n // VECTOR * VECTOR < width


@triton.jit
def _addresses(offset, n, VECTOR: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.max_contiguous(tl.multiple_of(offset + n[None, :], [1, VECTOR]), [1, COLUMNS if EVEN else VECTOR])
