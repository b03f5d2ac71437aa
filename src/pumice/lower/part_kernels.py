"""Triton kernels of parts.py; its plain torch versions are there. Imported lazily: needs Triton."""

# No `from __future__ import annotations`: Triton reads the types of integers from the annotations.
import triton
import triton.language as tl


@triton.jit
def _block(blocks, BLOCK: tl.constexpr):
    """(row of `blocks` of this program, its values, which of them exist)."""
    own = blocks + tl.program_id(0) * 5
    source = tl.multiple_of(tl.load(own).to(tl.pointer_type(tl.float32)), 16)
    r = tl.arange(0, BLOCK)
    there = r < tl.load(own + 2)
    return own, tl.load(source + r, mask=there, other=0.0), there


@triton.jit
def _raise(top, values):
    """Raise a top to the largest finite magnitude of these values."""
    size = tl.abs(values)
    size = tl.where(size < float("inf"), size, 0.0)
    tl.atomic_max(top, tl.max(size, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def tops_of_weights(blocks, tops, BLOCK: tl.constexpr):
    """Raise the top of each block's weight. tops int32 [., 4], of which the first column counts."""
    own, x, _ = _block(blocks, BLOCK)
    _raise(tops + tl.load(own + 4) * 4, x)


@triton.jit(do_not_specialize=["rows", "lead", "columns"])
def top_of_rows(x, top, rows: "i64", lead: "i64", columns: "i64", BLOCK: tl.constexpr):
    """Raise the top of x [rows, columns], whose rows are `lead` values apart."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < rows * columns
    _raise(top, tl.load(x + place // columns * lead + place % columns, mask=there, other=0.0))


@triton.jit
def split_weights(blocks, tops, out, PARTS: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of a weight in parts. blocks int64 [programs, 5]: address of the block, its place in `out`, its
    size, that of the weight, which is the distance of the parts, and the weight's number."""
    own, x, there = _block(blocks, BLOCK)
    where = out + tl.multiple_of(tl.load(own + 1), 4) + tl.arange(0, BLOCK)
    if PARTS == 1:
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        # Not for NaN, whose bits may overflow, nor near the largest value, which would become infinite.
        tl.store(where, tl.where(tl.abs(x) < 3.4e38, rounded, x), mask=there)
    elif PARTS == 2:
        top = tl.load(tops + tl.load(own + 4) * 4)
        x *= ((268 - tl.minimum(tl.maximum(top >> 23, 15), 254)) << 23).to(tl.float32, bitcast=True)
        high = x.to(tl.float16)
        tl.store(where, high, mask=there)
        tl.store(where + tl.load(own + 3), ((x - high.to(tl.float32)) * APART).to(tl.float16), mask=there)
    else:
        for part in tl.static_range(PARTS):
            high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
            tl.store(where + part * tl.load(own + 3), high.to(tl.bfloat16), mask=there)
            x -= high
