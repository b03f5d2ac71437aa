"""The operators on a CPU, through torch's own kernels; their plain twins are in reference.py.

    out[o, n] += x[i, c] * weight[n, k, c]        for every meeting (o, k, i)

Outputs are taken in chunks. The inputs of a chunk's pairs are gathered (`index_select`), multiplied into a buffer of
products, and `embedding_bag` sums the products of each output: movement stays in the cache, every sum runs in a fixed
order, and nothing is scattered. The tap of a submanifold map that meets each row with itself is multiplied in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pumice.coords import KernelMap, Pairs
from pumice.lower import reference
from pumice.schedule.cpu import CpuSchedule

_PAIRS = 3  # the first tables are the pairs themselves


class Chunk(NamedTuple):
    """Output rows first..last and the pairs that reach them, those of the identity tap left out.

    The pairs lie in segments, one per tap of `taps`; segment s has lengths[s] pairs, a multiple of the quantum: it is
    filled up with input 0, and no slot refers to a product of these. gather [sum of lengths] holds the inputs of all
    segments, tiles the tap of each quantum of pairs. Output first + j is the sum of the products
    slots[starts[j]:starts[j + 1]].
    """

    first: int
    last: int
    taps: tuple[int, ...]
    lengths: tuple[int, ...]
    gather: Tensor
    tiles: Tensor
    slots: Tensor
    starts: Tensor


def tables(kernel_map: KernelMap, channels: tuple[int, int]) -> tuple[Tensor, ...]:
    """A map as flat tensors, its pairs and its chunks: (inputs, outputs, sizes, gather, tiles, slots, starts, layout).

    layout int64 on the CPU: identity tap or -1, rows of a chunk, quantum, the length of each (chunk, tap) segment.
    `channels` (in, out) choose the schedule; the chunks depend on the map and the schedule only.
    """
    pairs = kernel_map.pairs()
    schedule = CpuSchedule.default(*channels, len(pairs.inputs))
    key = ("cpu", schedule.pairs, schedule.quantum)
    identity = _identity_tap(kernel_map)
    chunked = kernel_map.storage(key, lambda m: _chunk(pairs, identity, m.num_outputs, schedule))
    return (*pairs, *chunked)


def forward(
    x: Float[Tensor, "inputs c_in"],
    weight: Float[Tensor, "c_out k c_group"],
    tables: Sequence[Tensor],
    rows: int,
    groups: int,
) -> Float[Tensor, "{rows} c_out"]:
    """x [N_in, G*C], weight [G*N, K, C] -> out [rows, G*N] in x's dtype.

    Half precisions are computed in float32 throughout and rounded once. Groups take the loop of reference.py.
    """
    pairs = Pairs(*tables[:_PAIRS])
    if groups > 1:
        return reference.forward(x, weight, pairs, rows, groups)
    schedule = CpuSchedule.default(weight.shape[2], weight.shape[0], len(pairs.inputs))
    chunked = tables[_PAIRS:] or _chunk(pairs, -1, rows, schedule)
    dtype, x = x.dtype, _computable(x)
    filters = weight.to(x.dtype).permute(1, 2, 0).contiguous()  # [K, C_in, C_out]
    out = x.new_empty(rows, weight.shape[0])
    if 0 in filters.shape or not len(pairs.inputs):
        return out.zero_().to(dtype)
    identity, quantum = int(chunked[-1][0]), int(chunked[-1][2])
    chunks = list(_chunks(chunked, len(pairs.sizes), rows))
    engine = ENGINES[schedule.engine if _onednn(x.dtype) else "batched"]
    scratch = engine.scratch(filters, chunks)
    for chunk in chunks:
        part = out[chunk.first : chunk.last]
        if identity >= 0:
            engine.dense(x[chunk.first : chunk.last], filters[identity], part, quantum)
        elif not chunk.lengths:
            part.zero_()
        if chunk.lengths:
            products = engine.products(x, filters, chunk, scratch)
            total = torch.embedding_bag(products, chunk.slots, chunk.starts, False, 0, False, None, False)[0]
            part.add_(total) if identity >= 0 else part.copy_(total)
    return out.to(dtype)


def weight_gradient(
    x: Float[Tensor, "inputs c_in"], grad: Float[Tensor, "outputs c_out"], tables: Sequence[Tensor], groups: int
) -> Float[Tensor, "c_out k c_group"]:
    """x [N_in, G*C], grad [N_out, G*N] -> dw [G*N, K, C] in x's dtype, accumulated in float32 at least."""
    pairs = Pairs(*tables[:_PAIRS])
    if groups > 1:
        return reference.weight_gradient(x, grad, pairs, groups)
    schedule = CpuSchedule.default(x.shape[1], grad.shape[1], len(pairs.inputs))
    identity = int(tables[-1][0]) if len(tables) > _PAIRS else -1
    dtype, x, grad = x.dtype, _computable(x), _computable(grad)
    result = x.new_zeros(len(pairs.sizes), x.shape[1], grad.shape[1])  # [K, C_in, C_out]
    block = schedule.gradient_pairs
    whole = GRADIENTS[schedule.gradient if _onednn(x.dtype) else "gemm"]
    for tap, inputs, outputs in reference.meetings(pairs):
        for at in range(0, len(inputs), block):
            here = slice(at, at + block)
            # The identity tap meets row j with row j: nothing is gathered.
            a = x[here] if tap == identity else x.index_select(0, inputs[here])
            b = grad[here] if tap == identity else grad.index_select(0, outputs[here])
            (whole if len(a) == block else _outer_gemm)(a, b, result[tap])
    return result.permute(2, 0, 1).contiguous().to(dtype)


class Engine(NamedTuple):
    """How rows meet filters.

    scratch(filters, chunks)                the buffers that every chunk uses again: fresh pages are dear
    products(x, filters, chunk, scratch)    the product of each pair of the chunk, in the order of chunk.gather
    dense(rows, filter, out, quantum)       out = rows @ filter
    """

    scratch: Callable[[Tensor, list[Chunk]], tuple[Tensor, ...]]
    products: Callable[[Tensor, Tensor, Chunk, tuple[Tensor, ...]], Tensor]
    dense: Callable[[Tensor, Tensor, Tensor, int], object]


def _batched_scratch(filters: Tensor, chunks: list[Chunk]) -> tuple[Tensor, ...]:
    _, c_in, c_out = filters.shape
    pairs = max((c.gather.shape[0] for c in chunks), default=0)
    tiles = max((c.tiles.shape[0] for c in chunks), default=0)
    return filters.new_empty(pairs, c_in), filters.new_empty(tiles, c_in, c_out), filters.new_empty(pairs, c_out)


def _batched_products(x: Tensor, filters: Tensor, chunk: Chunk, scratch: tuple[Tensor, ...]) -> Tensor:
    """One batched product of all tiles: the BLAS then runs at full speed however few pairs a tap has."""
    pairs, tiles = len(chunk.gather), len(chunk.tiles)
    rows = torch.index_select(x, 0, chunk.gather, out=scratch[0][:pairs])
    filters = torch.index_select(filters, 0, chunk.tiles, out=scratch[1][:tiles])
    products = scratch[2][:pairs]
    torch.bmm(rows.view(tiles, -1, rows.shape[1]), filters, out=products.view(tiles, -1, products.shape[1]))
    return products


def _batched_dense(rows: Tensor, filter: Tensor, out: Tensor, quantum: int) -> None:
    torch.mm(rows, filter, out=out)


def _linear_scratch(filters: Tensor, chunks: list[Chunk]) -> tuple[Tensor, ...]:
    _, c_in, c_out = filters.shape
    pairs = max((c.gather.shape[0] for c in chunks), default=0)
    segment = max((length for c in chunks for length in c.lengths), default=0)
    return filters.new_empty(segment, c_in), filters.new_empty(pairs, c_out)


def _linear_products(x: Tensor, filters: Tensor, chunk: Chunk, scratch: tuple[Tensor, ...]) -> Tensor:
    """A product of oneDNN per tap: on AMD it runs at twice the rate of the BLAS."""
    products = scratch[1][: len(chunk.gather)]
    segments = zip(chunk.taps, chunk.gather.split(chunk.lengths), products.split(chunk.lengths), strict=True)
    for tap, gather, part in segments:
        rows = torch.index_select(x, 0, gather, out=scratch[0][: len(gather)])
        part.copy_(torch.ops.mkldnn._linear_pointwise(rows, filters[tap].t(), None, "none", [], ""))
    return products


def _linear_dense(rows: Tensor, filter: Tensor, out: Tensor, quantum: int) -> None:
    # oneDNN compiles for each number of rows; one that will not come back is left to the BLAS.
    if len(rows) % quantum:
        torch.mm(rows, filter, out=out)
    else:
        out.copy_(torch.ops.mkldnn._linear_pointwise(rows, filter.t(), None, "none", [], ""))


def _outer_gemm(
    x: Float[Tensor, "pairs c_in"], grad: Float[Tensor, "pairs c_out"], out: Float[Tensor, "c_in c_out"]
) -> None:
    out.addmm_(x.t(), grad)


def _outer_convolution(
    x: Float[Tensor, "pairs c_in"], grad: Float[Tensor, "pairs c_out"], out: Float[Tensor, "c_in c_out"]
) -> None:
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


def _identity_tap(kernel_map: KernelMap) -> int:
    """The tap whose pairs are (0, 0), (1, 1), ...: the zero offset of a map that keeps the coordinates; else -1."""
    relation = kernel_map.relation
    zero = (0,) * relation.dim
    return relation.offsets.index(zero) if relation.policy == "same" and zero in relation.offsets else -1


def _chunk(pairs: Pairs, identity: int, num_outputs: int, schedule: CpuSchedule) -> tuple[Tensor, ...]:
    """(gather, tiles, slots, starts, layout) of all chunks, laid out by (chunk, tap)."""
    inputs, outputs, taps = _gathered_pairs(pairs, identity)
    count = len(pairs.sizes)
    rows = _power_of_two(num_outputs * schedule.pairs // max(len(inputs), 1), num_outputs)
    blocks, block = -(-num_outputs // rows), outputs // rows
    # Pairs come sorted by tap, so that a stable sort by chunk sorts them by (chunk, tap).
    order = block.argsort(stable=True)
    segment = block * count + taps
    lengths = torch.bincount(segment, minlength=blocks * count)
    padded = (lengths + schedule.quantum - 1) // schedule.quantum * schedule.quantum
    begin = padded.cumsum(0) - padded
    shift = begin - lengths.cumsum(0) + lengths
    place = torch.empty_like(order)  # of each pair among all products
    place[order] = torch.arange(len(order)) + shift[segment[order]]
    gather = inputs.new_zeros(int(padded.sum()))
    gather[place] = inputs
    tiles = torch.arange(count).repeat(blocks).repeat_interleave(padded // schedule.quantum)
    slots = (place - begin.view(blocks, count)[:, 0][block])[outputs.argsort(stable=True)]
    met = torch.bincount(outputs, minlength=num_outputs)
    starts = met.cumsum(0) - met
    starts -= starts[::rows].repeat_interleave(rows)[:num_outputs]
    used = lengths.view(blocks, count).sum(dim=1)
    layout = torch.cat([padded.new_tensor([identity, rows, schedule.quantum]), padded, used])
    return gather.int(), tiles.int(), slots.int(), starts.int(), layout


def _chunks(chunked: Sequence[Tensor], taps: int, num_outputs: int) -> Iterator[Chunk]:
    """The chunks laid out by _chunk()."""
    gather, tiles, slots, starts, layout = chunked
    _, rows, quantum, *numbers = layout.tolist()
    blocks = -(-num_outputs // rows)
    segments = [numbers[b * taps : (b + 1) * taps] for b in range(blocks)]
    padded = [sum(lengths) for lengths in segments]
    parts = zip(
        segments,
        gather.split(padded),
        tiles.split([pairs // quantum for pairs in padded]),
        slots.split(numbers[blocks * taps :]),
        starts.split(rows),
        strict=True,
    )
    for block, (lengths, *tensors) in enumerate(parts):
        present = tuple(tap for tap, length in enumerate(lengths) if length)
        first = block * rows
        last = min(first + rows, num_outputs)
        yield Chunk(first, last, present, tuple(lengths[tap] for tap in present), *tensors)


def _gathered_pairs(pairs: Pairs, identity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, outputs, tap) of every pair that is not of the identity tap."""
    taps = torch.repeat_interleave(torch.arange(len(pairs.sizes)), pairs.sizes)
    if identity < 0:
        return pairs.inputs, pairs.outputs, taps
    kept = taps != identity
    return pairs.inputs[kept], pairs.outputs[kept], taps[kept]


def _computable(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def _power_of_two(value: int, limit: int) -> int:
    """The power of two at or above value, no more than limit; at least 1."""
    return max(1, min(1 << max(value - 1, 0).bit_length(), limit))
