"""Sparse convolution on a CPU with torch's own kernels: forward and the gradient of the weights.

    out[o, n] += x[i, c] * weight[n, k, c]        for every pair (i, o) of offset k

Outputs are taken in chunks. For each chunk and offset the inputs are gathered (`index_select`) and multiplied into a
buffer of products, then `embedding_bag` sums the products of each output. All three stay in the cache, every sum runs
in a fixed order, and nothing is scattered. An offset whose pairs are (0, 0), (1, 1), ... is multiplied in place.
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

    Segment s holds the pairs of offset offsets[s]: inputs gather[s], their products at rows of the buffer that follow
    those of segment s - 1. It is padded with input 0; no slot refers to a padded product. Output first + j is the sum
    of the products slots[starts[j]:starts[j + 1]].
    """

    first: int
    last: int
    offsets: tuple[int, ...]
    gather: tuple[Tensor, ...]
    lengths: tuple[int, ...]
    slots: Tensor
    starts: Tensor


@dataclass(frozen=True, eq=False)
class CpuPlan:
    """Pairs of a kernel map, sorted by offset: sizes[k] pairs of offset k, each (in_rows, out_rows), int32 or int64 [P].

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
        """The outputs in chunks of about `pairs` pairs, segments padded to a multiple of `quantum` rows."""
        gathered = len(self.in_rows) - (self.n_out if self.identity >= 0 else 0)
        rows = _power_of_two(self.n_out * pairs // max(gathered, 1), self.n_out)
        key = (rows, quantum)
        if key not in self._tables:  # two threads may both make it: they make the same
            self._tables[key] = _chunks(self, rows, quantum)
        return self._tables[key]


def cpu_plan(in_rows: Tensor, out_rows: Tensor, sizes: tuple[int, ...], n_out: int) -> CpuPlan:
    """The plan of a kernel map given as pairs (in_rows, out_rows), integers [P], sorted by offset.

    sizes[k] is the number of pairs of offset k; n_out the number of outputs. A pair (o, k) occurs at most once.
    """
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    count = torch.arange(n_out, dtype=out_rows.dtype)
    identity = -1
    for k, start in enumerate(starts):
        if n_out and sizes[k] == n_out and identity < 0:
            here = slice(start, start + n_out)
            same = torch.equal(out_rows[here], count) and torch.equal(in_rows[here], count)
            identity = k if same else -1
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
    rows = max((len(g) for chunk in chunks for g in chunk.gather), default=0)
    products = max((sum(chunk.lengths) for chunk in chunks), default=0)
    buffers = x.new_empty(rows, x.shape[1]), x.new_empty(products, out.shape[1])
    engine = _engine(schedule.engine, x.dtype)
    own = filters[plan.identity] if plan.identity >= 0 else None
    for chunk in chunks:
        part = out[chunk.first : chunk.last]
        total = _sum_of_products(x, filters, chunk, engine, buffers)
        if own is None:
            part.copy_(total) if total is not None else part.zero_()
            continue
        # a chunk cut short has a number of rows that will not come back: not worth a kernel of oneDNN
        direct = ENGINES["gemm"] if len(part) % schedule.quantum else engine
        rows_in = x[chunk.first : chunk.last]
        if total is None:
            direct.multiply(rows_in, own, part)
        else:
            direct.multiply_add(total, rows_in, own, part)
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
        for at in range(start, start + size, block):
            pairs = slice(at, min(at + block, start + size))
            count = pairs.stop - pairs.start
            if k == plan.identity:
                a, b = x[at - start : pairs.stop - start], grad[at - start : pairs.stop - start]
            else:
                a = torch.index_select(x, 0, plan.in_rows[pairs], out=left[:count])
                b = torch.index_select(grad, 0, plan.out_rows[pairs], out=right[:count])
            (full if count == block else _outer_gemm)(a, b, result[k])
        start += size
    return result.permute(2, 0, 1).contiguous().to(dtype)


class Engine(NamedTuple):
    """multiply(rows [M, C], filter [C, N], out) and multiply_add(bias [M, N], rows, filter, out)."""

    multiply: Callable[[Tensor, Tensor, Tensor], object]
    multiply_add: Callable[[Tensor, Tensor, Tensor, Tensor], object]


def _gemm(rows: Tensor, filter: Tensor, out: Tensor) -> None:
    torch.mm(rows, filter, out=out)


def _gemm_add(bias: Tensor, rows: Tensor, filter: Tensor, out: Tensor) -> None:
    torch.addmm(bias, rows, filter, out=out)


def _linear(rows: Tensor, filter: Tensor, out: Tensor) -> None:
    out.copy_(torch.ops.mkldnn._linear_pointwise(rows, filter.t(), None, "none", [], ""))


def _linear_add(bias: Tensor, rows: Tensor, filter: Tensor, out: Tensor) -> None:
    torch.add(bias, torch.ops.mkldnn._linear_pointwise(rows, filter.t(), None, "none", [], ""), out=out)


def _outer_gemm(x: Tensor, grad: Tensor, out: Tensor) -> None:
    out.addmm_(x.t(), grad)


def _outer_convolution(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """The same as a 1x1 convolution's gradient: the pairs are the pixels of one channels-last image."""
    count, (c_in, c_out) = len(x), out.shape
    image = x.view(1, count, 1, c_in).permute(0, 3, 1, 2)
    image_grad = grad.view(1, count, 1, c_out).permute(0, 3, 1, 2)
    shape = out.new_empty(c_out, c_in, 1, 1)  # only its shape is read
    gradient = torch.ops.aten.convolution_backward(
        image_grad, image, shape, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]
    out.add_(gradient.view(c_out, c_in).t())


ENGINES = {"gemm": Engine(_gemm, _gemm_add), "linear": Engine(_linear, _linear_add)}
GRADIENTS = {"gemm": _outer_gemm, "convolution": _outer_convolution}


def _onednn(dtype: torch.dtype) -> bool:
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and dtype == torch.float32


def _engine(name: str, dtype: torch.dtype) -> Engine:
    return ENGINES[name] if _onednn(dtype) else ENGINES["gemm"]


def _sum_of_products(
    x: Tensor, filters: Tensor, chunk: Chunk, engine: Engine, buffers: tuple[Tensor, Tensor]
) -> Tensor | None:
    """The outputs of a chunk without the identity offset, [last - first, C_out]; None where nothing reaches them."""
    if not chunk.gather:
        return None
    gathered, products = buffers[0], buffers[1][: sum(chunk.lengths)]
    parts = products.split(chunk.lengths)
    for k, rows, length, part in zip(chunk.offsets, chunk.gather, chunk.lengths, parts, strict=True):
        engine.multiply(torch.index_select(x, 0, rows, out=gathered[:length]), filters[k], part)
    return torch.embedding_bag(products, chunk.slots, chunk.starts, False, 0, False, None, False)[0]


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
    place = torch.empty_like(order)  # of each pair among all products, padding included
    sorted_segment = segment[order]
    place[order] = torch.arange(len(order)) + (begin - counts.cumsum(0) + counts)[sorted_segment]
    gather = in_rows.new_zeros(int(padded.sum()))
    gather[place] = in_rows
    base = begin.view(blocks, taps)[:, 0]
    by_output = out_rows.argsort(stable=True)
    slots = (place - base[block])[by_output].int()
    ends = torch.bincount(out_rows, minlength=plan.n_out).cumsum(0)
    return _cut(plan.n_out, rows, padded.view(blocks, taps), gather, slots, ends)


def _cut(n_out: int, rows: int, padded: Tensor, gather: Tensor, slots: Tensor, ends: Tensor) -> tuple[Chunk, ...]:
    """Cuts what is laid out for all chunks at once: gather by (chunk, offset), slots by output row."""
    chunks: list[Chunk] = []
    at = done = 0
    for first, lengths in zip(range(0, n_out, rows), padded.tolist(), strict=True):
        last = min(first + rows, n_out)
        offsets = tuple(k for k, length in enumerate(lengths) if length)
        used = tuple(lengths[k] for k in offsets)
        parts = gather[at : at + sum(used)].split(used) if used else ()
        stop = int(ends[last - 1])
        starts = torch.cat([ends.new_tensor([done]), ends[first : last - 1]]) - done
        chunks.append(Chunk(first, last, offsets, tuple(parts), used, slots[done:stop], starts.int()))
        at, done = at + sum(used), stop
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
    """The power of two at or above value; limit where that is smaller. At least 1."""
    return max(1, min(1 << max(value - 1, 0).bit_length(), limit))
