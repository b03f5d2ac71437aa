"""Sparse convolution on a CPU with torch's own kernels: forward and the gradient of the weights.

    out[o, n] += x[i, c] * weight[n, k, c]        for every pair (i, o) of offset k

Outputs are taken in chunks. The inputs of a chunk's pairs are gathered (`index_select`), multiplied into a buffer of
products, and `embedding_bag` sums the products of each output. All of it stays in the cache, every sum runs in a fixed
order, and nothing is scattered. An offset whose pairs are (0, 0), (1, 1), ... is multiplied in place.
The gradient of the input is `forward` again, with the two rows of the plan exchanged and the weights transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.schedule.cpu import CpuSchedule


class Chunk(NamedTuple):
    """Output rows first..last and the pairs that reach them, without those of the identity offset.

    The pairs lie in segments, one per offset of offsets; segment s has lengths[s] pairs, a multiple of the quantum:
    it is filled up with input 0, and no slot refers to a product of these. gather holds the inputs of all segments,
    tiles the offset of each quantum of pairs. Output first + j is the sum of products slots[starts[j]:starts[j + 1]].
    """

    first: int
    last: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    gather: Tensor
    tiles: Tensor
    slots: Tensor
    starts: Tensor


@dataclass(frozen=True, eq=False)
class CpuPlan:
    """Pairs of a kernel map, sorted by offset: sizes[k] pairs of offset k, each (in_rows, out_rows), integers [P].

    identity is the offset whose pairs are (0, 0), (1, 1), ..., (n_out - 1, n_out - 1), or -1. `chunks` is made when
    first asked for and kept; it depends on the map only.
    """

    in_rows: Tensor
    out_rows: Tensor
    sizes: tuple[int, ...]
    n_out: int
    identity: int
    _tables: dict[tuple[int, int], tuple[Chunk, ...]] = field(default_factory=dict, repr=False)

    def chunks(self, pairs: int, quantum: int) -> tuple[Chunk, ...]:
        """The outputs in chunks of about `pairs` pairs, segments filled up to a multiple of `quantum` pairs."""
        gathered = len(self.in_rows) - (self.n_out if self.identity >= 0 else 0)
        rows = _power_of_two(self.n_out * pairs // max(gathered, 1), self.n_out)
        key = (rows, quantum)
        if key not in self._tables:  # two threads may both make it: they make the same
            self._tables[key] = _chunks(self, rows, quantum)
        return self._tables[key]


def cpu_plan(in_rows: Tensor, out_rows: Tensor, sizes: tuple[int, ...], n_out: int) -> CpuPlan:
    """The plan of a kernel map given as pairs (in_rows, out_rows), integers [P], sorted by offset.

    sizes[k] is the number of pairs of offset k, n_out the number of outputs.
    """
    count = torch.arange(n_out, dtype=out_rows.dtype)
    start, identity = 0, -1
    for k, size in enumerate(sizes):
        if identity < 0 and size == n_out > 0:
            here = slice(start, start + size)
            identity = k if torch.equal(out_rows[here], count) and torch.equal(in_rows[here], count) else -1
        start += size
    return CpuPlan(_narrow(in_rows), _narrow(out_rows), tuple(sizes), n_out, identity)


def forward(x: Tensor, weight: Tensor, plan: CpuPlan, schedule: CpuSchedule | None = None) -> Tensor:
    """out[o, n] = sum of x[i, c] * weight[n, k, c] over the pairs (i, o) of every offset k.

    x [N_in, C_in], weight [C_out, K, C_in], result [plan.n_out, C_out] in the dtype of x. Half precisions are computed
    in float32 throughout and rounded once. No gradient is recorded.
    """
    schedule = schedule or CpuSchedule.default(weight.shape[2], weight.shape[0], len(plan.in_rows))
    x, dtype = _computable(x), x.dtype
    filters = weight.detach().to(x.dtype).permute(1, 2, 0).contiguous()  # [K, C_in, C_out]
    out = x.new_empty(plan.n_out, weight.shape[0])
    if 0 in filters.shape:
        return out.zero_().to(dtype)
    chunks = plan.chunks(schedule.pairs, schedule.quantum)
    engine = ENGINES[schedule.engine if _onednn(x.dtype) else "batched"]
    scratch = engine.scratch(filters, chunks)
    for chunk in chunks:
        part = out[chunk.first : chunk.last]
        if plan.identity >= 0:
            engine.dense(x[chunk.first : chunk.last], filters[plan.identity], part, schedule.quantum)
        elif not chunk.lengths:
            part.zero_()
        if chunk.lengths:
            products = engine.products(x, filters, chunk, scratch)
            total = torch.embedding_bag(products, chunk.slots, chunk.starts, False, 0, False, None, False)[0]
            part.add_(total) if plan.identity >= 0 else part.copy_(total)
    return out.to(dtype)


def weight_gradient(x: Tensor, grad: Tensor, plan: CpuPlan, schedule: CpuSchedule | None = None) -> Tensor:
    """dW[n, k, c] = sum of grad[o, n] * x[i, c] over the pairs (i, o) of offset k.

    x [N_in, C_in], grad [plan.n_out, C_out], result [C_out, K, C_in] in the dtype of x, accumulated in float32 at least.
    """
    schedule = schedule or CpuSchedule.default(x.shape[1], grad.shape[1], len(plan.in_rows))
    dtype = x.dtype
    x, grad = _computable(x), _computable(grad)
    result = x.new_zeros(len(plan.sizes), x.shape[1], grad.shape[1])  # [K, C_in, C_out]
    block = schedule.gradient_pairs
    full = GRADIENTS[schedule.gradient] if _onednn(x.dtype) else _outer_gemm
    left, right = x.new_empty(block, x.shape[1]), x.new_empty(block, grad.shape[1])
    start = 0
    for k, size in enumerate(plan.sizes):
        for at in range(0, size, block):
            count = min(block, size - at)
            if k == plan.identity:
                a, b = x[at : at + count], grad[at : at + count]
            else:
                pairs = slice(start + at, start + at + count)
                a = torch.index_select(x, 0, plan.in_rows[pairs], out=left[:count])
                b = torch.index_select(grad, 0, plan.out_rows[pairs], out=right[:count])
            (full if count == block else _outer_gemm)(a, b, result[k])
        start += size
    return result.permute(2, 0, 1).contiguous().to(dtype)


class Engine(NamedTuple):
    """How rows meet filters.

    scratch(filters, chunks)                the buffers that every chunk uses again: fresh pages are dear
    products(x, filters, chunk, scratch)    the product of each pair of the chunk, in the order of chunk.gather
    dense(rows, filter, out, quantum)       out = rows @ filter
    """

    scratch: Callable[[Tensor, tuple[Chunk, ...]], tuple[Tensor, ...]]
    products: Callable[[Tensor, Tensor, Chunk, tuple[Tensor, ...]], Tensor]
    dense: Callable[[Tensor, Tensor, Tensor, int], object]


def _batched_scratch(filters: Tensor, chunks: tuple[Chunk, ...]) -> tuple[Tensor, ...]:
    _, c_in, c_out = filters.shape
    pairs, tiles = (max((len(c[column]) for c in chunks), default=0) for column in (4, 5))
    return tuple(filters.new_empty(shape) for shape in ((pairs, c_in), (tiles, c_in, c_out), (pairs, c_out)))


def _batched_products(x: Tensor, filters: Tensor, chunk: Chunk, scratch: tuple[Tensor, ...]) -> Tensor:
    """One batched product of all tiles: the BLAS then runs at full speed however few pairs an offset has."""
    pairs, tiles = len(chunk.gather), len(chunk.tiles)
    rows = torch.index_select(x, 0, chunk.gather, out=scratch[0][:pairs])
    filters = torch.index_select(filters, 0, chunk.tiles, out=scratch[1][:tiles])
    products = scratch[2][:pairs]
    torch.bmm(rows.view(tiles, -1, rows.shape[1]), filters, out=products.view(tiles, -1, products.shape[1]))
    return products


def _batched_dense(rows: Tensor, filter: Tensor, out: Tensor, quantum: int) -> None:
    torch.mm(rows, filter, out=out)


def _linear_scratch(filters: Tensor, chunks: tuple[Chunk, ...]) -> tuple[Tensor, ...]:
    _, c_in, c_out = filters.shape
    pairs = max((len(c.gather) for c in chunks), default=0)
    segment = max((length for c in chunks for length in c.lengths), default=0)
    return filters.new_empty(segment, c_in), filters.new_empty(pairs, c_out)


def _linear_products(x: Tensor, filters: Tensor, chunk: Chunk, scratch: tuple[Tensor, ...]) -> Tensor:
    products = scratch[1][: len(chunk.gather)]
    segments = zip(chunk.offsets, chunk.gather.split(chunk.lengths), products.split(chunk.lengths), strict=True)
    for k, gather, part in segments:
        rows = torch.index_select(x, 0, gather, out=scratch[0][: len(gather)])
        part.copy_(torch.ops.mkldnn._linear_pointwise(rows, filters[k].t(), None, "none", [], ""))
    return products


def _linear_dense(rows: Tensor, filter: Tensor, out: Tensor, quantum: int) -> None:
    """A number of rows that will not come back is not worth compiling for: the BLAS takes it."""
    if len(rows) % quantum:
        torch.mm(rows, filter, out=out)
    else:
        out.copy_(torch.ops.mkldnn._linear_pointwise(rows, filter.t(), None, "none", [], ""))


def _outer_gemm(x: Tensor, grad: Tensor, out: Tensor) -> None:
    out.addmm_(x.t(), grad)


def _outer_convolution(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """The same as the gradient of a 1x1 convolution: the pairs are the pixels of one channels-last image."""
    count, (c_in, c_out) = len(x), out.shape
    image = x.view(1, count, 1, c_in).permute(0, 3, 1, 2)
    image_grad = grad.view(1, count, 1, c_out).permute(0, 3, 1, 2)
    shape = out.new_empty(c_out, c_in, 1, 1)  # only its shape is read
    gradient = torch.ops.aten.convolution_backward(
        image_grad, image, shape, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    out.add_(gradient.view(c_out, c_in).t())


ENGINES = {
    "batched": Engine(_batched_scratch, _batched_products, _batched_dense),
    "linear": Engine(_linear_scratch, _linear_products, _linear_dense),
}
GRADIENTS = {"gemm": _outer_gemm, "convolution": _outer_convolution}


def _onednn(dtype: torch.dtype) -> bool:
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and dtype == torch.float32


def _chunks(plan: CpuPlan, rows: int, quantum: int) -> tuple[Chunk, ...]:
    """Chunks of `rows` outputs. Pairs come sorted by offset, so a stable sort by chunk sorts by (chunk, offset)."""
    in_rows, out_rows, offset = _gathered_pairs(plan)
    taps, blocks = len(plan.sizes), -(-plan.n_out // rows)
    block = out_rows // rows
    order = block.argsort(stable=True)
    segment = block * taps + offset
    counts = torch.bincount(segment, minlength=blocks * taps)
    padded = (counts + quantum - 1) // quantum * quantum
    begin = padded.cumsum(0) - padded
    shift = begin - counts.cumsum(0) + counts
    place = torch.empty_like(order)  # of each pair among all products
    place[order] = torch.arange(len(order)) + shift[segment[order]]
    gather = in_rows.new_zeros(int(padded.sum()))
    gather[place] = in_rows
    slots = (place - begin[block * taps])[out_rows.argsort(stable=True)].int()
    ends = torch.bincount(out_rows, minlength=plan.n_out).cumsum(0)
    return _cut(plan.n_out, rows, quantum, (padded.view(blocks, taps), gather, slots, ends))


def _cut(n_out: int, rows: int, quantum: int, laid_out: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Chunk, ...]:
    """Cuts what is laid out for all chunks at once: gather by (chunk, offset), slots by output row."""
    padded, gather, slots, ends = laid_out
    taps = torch.arange(padded.shape[1], dtype=torch.int32)
    chunks: list[Chunk] = []
    at = done = 0
    for first, row in zip(range(0, n_out, rows), padded, strict=True):
        last = min(first + rows, n_out)
        lengths = row.tolist()
        offsets = tuple(k for k, length in enumerate(lengths) if length)
        stop, to = int(ends[last - 1]), at + sum(lengths)
        starts = torch.cat([ends.new_tensor([done]), ends[first : last - 1]]) - done
        tiles = taps.repeat_interleave(row // quantum)
        used = tuple(lengths[k] for k in offsets)
        chunks.append(Chunk(first, last, offsets, used, gather[at:to], tiles, slots[done:stop], starts.int()))
        at, done = to, stop
    return tuple(chunks)


def _gathered_pairs(plan: CpuPlan) -> tuple[Tensor, Tensor, Tensor]:
    """(in_rows, out_rows int64, offset) of every pair that is not of the identity offset."""
    offset = torch.repeat_interleave(torch.arange(len(plan.sizes)), torch.tensor(plan.sizes, dtype=torch.long))
    if plan.identity < 0:
        return plan.in_rows, plan.out_rows.long(), offset
    start = sum(plan.sizes[: plan.identity])
    others = [slice(0, start), slice(start + plan.n_out, None)]
    in_rows, out_rows, offset = (torch.cat([t[s] for s in others]) for t in (plan.in_rows, plan.out_rows, offset))
    return in_rows, out_rows.long(), offset


def _computable(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _narrow(index: Tensor) -> Tensor:
    """int32 where it suffices: half the memory, and a faster gather."""
    return index.int() if not len(index) or int(index.max()) < 2**31 else index


def _power_of_two(value: int, limit: int) -> int:
    """The power of two at or above value, no more than limit; at least 1."""
    return max(1, min(1 << max(value - 1, 0).bit_length(), limit))
