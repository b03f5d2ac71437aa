"""Triton kernel of parts.py; its plain torch version is there. Imported lazily: needs Triton."""

import triton
import triton.language as tl


@triton.jit
def split_weights(blocks, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write a block of a weight in parts. blocks int64 [programs, 4]: address of the block, its place in `out`, its
    size, and that of the weight, which is the distance of the parts."""
    own = blocks + tl.program_id(0) * 4
    source = tl.multiple_of(tl.load(own).to(tl.pointer_type(tl.float32)), 16)
    place = tl.multiple_of(tl.load(own + 1), 4)
    r = tl.arange(0, BLOCK)
    there = r < tl.load(own + 2)
    x = tl.load(source + r, mask=there, other=0.0)
    if PARTS == 1:
        rounded = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
        # Not for NaN, whose bits may overflow, nor near the largest value, which would become infinite.
        tl.store(out + place + r, tl.where(tl.abs(x) < 3.4e38, rounded, x), mask=there)
    else:
        for part in tl.static_range(PARTS):
            high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
            tl.store(out + place + part * tl.load(own + 3) + r, high.to(tl.bfloat16), mask=there)
            x -= high
