"""Convolution on a CPU through torch's own kernels; the plain twins are in reference.py.

    out[o, n] += x[i, c] * weight[n, k, c]        for every pair (o, k, i)

Outputs are processed in chunks. The inputs of a chunk's pairs are gathered (`index_select`), multiplied into a buffer
of products, and `embedding_bag` sums the products of each output: data stays in the cache, sums have a fixed order, and
there is no scatter. The identity offset of a submanifold map is multiplied without a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor

from pumice.coords import Pairs
from pumice.lower import reference
from pumice.schedule.cost import CpuSchedule

_PAIRS = 3  # the first tables are the pairs themselves


class Chunk(NamedTuple):
    """Output rows first..last and their pairs, without those of the identity offset.

    Each tile holds pairs of one kernel offset, taps [tiles], padded with input 0; no slot refers to padding.
    gather [tiles * tile]: the inputs, tile after tile, or interleaved: the first of every tile, the second of every
    tile, ... Output first + j is the sum of the products slots[starts[j]:starts[j + 1]].
    """

    first: int
    last: int
    taps: Tensor
    gather: Tensor
    slots: Tensor
    starts: Tensor


def chunks(pairs: Pairs, rows: int, inputs: int, schedule: CpuSchedule) -> tuple[Tensor, ...]:
    """The chunks of pairs between `inputs` and output `rows`: (gather, taps, slots, starts, layout).

    layout int64: [identity offset or -1, tiles are interleaved, rows, tiles and pairs of each chunk].
    """
    return _chunk(pairs, _identity_tap(pairs, rows, inputs), rows, schedule)


def forward(
    x: Float[Tensor, "inputs c_in"],
    weight: Float[Tensor, "c_out k c_group"],
    tables: Sequence[Tensor],
    rows: int,
    groups: int,
) -> Float[Tensor, "{rows} c_out"]:
    """x [N_in, G*C], weight [G*N, K, C] -> out [rows, G*N] in x's dtype.

    Half precisions are computed in float32 and rounded once. Several groups use the loop of reference.py.
    """
    pairs = Pairs(*tables[:_PAIRS])
    if groups > 1:
        return reference.forward(x, weight, pairs, rows, groups)
    schedule = CpuSchedule.default(weight.shape[2], weight.shape[0], len(pairs.inputs))
    chunked = tables[_PAIRS:] or _chunk(pairs, -1, rows, schedule)
    dtype, x = x.dtype, _computable(x)
    if 0 in weight.shape or not len(pairs.inputs):
        return x.new_zeros(rows, weight.shape[0], dtype=dtype)
    identity, interleaved = chunked[-1][:2].tolist()
    engine = _engine(bool(interleaved), x.dtype)
    filters = weight.to(x.dtype).permute(engine.axes).contiguous()
    whole = identity >= 0
    out = engine.dense(x, filters[identity]) if whole else x.new_zeros(rows, weight.shape[0])
    chunks = [chunk for chunk in _chunks(chunked) if len(chunk.slots)]
    # Buffers are reused for every chunk: page faults are expensive.
    longest = max((len(chunk.gather) for chunk in chunks), default=0)
    scratch = x.new_empty(longest, x.shape[1]), x.new_empty(longest if engine.buffered else 0, out.shape[1])
    for chunk in chunks:
        gathered = torch.index_select(x, 0, chunk.gather, out=scratch[0][: len(chunk.gather)])
        products = engine.multiply(gathered, filters.index_select(0, chunk.taps), scratch[1])
        total = torch.embedding_bag(products, chunk.slots, chunk.starts, False, 0, False, None, False)[0]
        part = out[chunk.first : chunk.last]
        part.add_(total) if whole else part.copy_(total)
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
            # The identity offset pairs row j with row j: no gather.
            a = x[here] if tap == identity else x.index_select(0, inputs[here])
            b = grad[here] if tap == identity else grad.index_select(0, outputs[here])
            (whole if len(a) == block else _outer_gemm)(a, b, result[tap])
    return result.permute(2, 0, 1).contiguous().to(dtype)


class ProductEngine(NamedTuple):
    """Implementation of the products of rows and filters.

    axes                               permutation of weight [C_out, K, C_in] that the engine reads, K first
    dense(x, filter)                   the product of every row with one filter
    multiply(rows, filters, buffer)    the product of every row with the filter of its tile, in order
    interleaved                        the rows of the tiles are interleaved
    buffered                           multiply writes into its buffer [at least len(rows), C_out]
    """

    axes: tuple[int, int, int]
    dense: Callable[[Tensor, Tensor], Tensor]
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]
    interleaved: bool
    buffered: bool


def _batched(rows: Tensor, filters: Tensor, buffer: Tensor) -> Tensor:
    """One batched product: full BLAS speed however few pairs a kernel offset has."""
    tiles, c_in, c_out = filters.shape
    products = buffer[: len(rows)]
    torch.bmm(rows.view(tiles, -1, c_in), filters, out=products.view(tiles, -1, c_out))
    return products


def _strided(rows: Tensor, filters: Tensor, buffer: Tensor) -> Tensor:
    """The same for interleaved rows."""
    tiles, c_in, c_out = filters.shape
    return torch.bmm(rows.view(-1, tiles, c_in).transpose(0, 1), filters).transpose(0, 1).reshape(-1, c_out)


def _grouped(rows: Tensor, filters: Tensor, buffer: Tensor | None = None) -> Tensor:
    """A 1x1 convolution with a group per tile, whose channels-last pixels are the interleaved rows."""
    tiles, c_out, c_in = filters.shape
    image = rows.view(1, -1, 1, tiles * c_in).permute(0, 3, 1, 2)
    out = torch.mkldnn_convolution(image, filters.view(-1, c_in, 1, 1), None, [0, 0], [1, 1], [1, 1], tiles)
    return out.permute(0, 2, 3, 1).reshape(-1, c_out)


def _grouped_dense(x: Tensor, filter: Tensor) -> Tensor:
    return _grouped(x, filter.unsqueeze(0))


@no_type_check  # here and below: called for every kernel offset; weight_gradient has checked the types
def _outer_gemm(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """out [C_in, C_out] += x.T @ grad for the pairs of a kernel offset: x [pairs, C_in], grad [pairs, C_out]."""
    out.addmm_(x.t(), grad)


@no_type_check
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
    "batched": ProductEngine((1, 2, 0), torch.mm, _batched, interleaved=False, buffered=True),
    "grouped": ProductEngine((1, 0, 2), _grouped_dense, _grouped, interleaved=True, buffered=False),
    "strided": ProductEngine((1, 2, 0), torch.mm, _strided, interleaved=True, buffered=False),
}
GRADIENTS = {"gemm": _outer_gemm, "convolution": _outer_convolution}


def _onednn(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _engine(interleaved: bool, dtype: torch.dtype) -> ProductEngine:
    """The engine for this layout; oneDNN does not support float64."""
    return ENGINES[("grouped" if _onednn(dtype) else "strided") if interleaved else "batched"]


def _identity_tap(pairs: Pairs, rows: int, inputs: int) -> int:
    """The kernel offset whose pairs are (0, 0), (1, 1), ... up to the last row, or -1."""
    if rows != inputs:
        return -1
    each, start = torch.arange(rows), 0
    for tap, size in enumerate(pairs.sizes.tolist()):
        here = slice(start, start + size)
        if size == rows and torch.equal(pairs.inputs[here], each) and torch.equal(pairs.outputs[here], each):
            return tap
        start += size
    return -1


def _chunk(pairs: Pairs, identity: int, num_outputs: int, schedule: CpuSchedule) -> tuple[Tensor, ...]:
    """(gather, taps, slots, starts, layout) of all chunks, which have about equally many pairs."""
    inputs, outputs, taps = _gathered_pairs(pairs, identity)
    count, tile, interleaved = len(pairs.sizes), schedule.tile, ENGINES[schedule.engine].interleaved
    met = torch.bincount(outputs, minlength=num_outputs)
    ends = met.cumsum(0)
    blocks = max(1, -(-len(inputs) // schedule.pairs))
    block_of = (ends - 1).clamp(min=0) * blocks // max(len(inputs), 1)  # the chunk of each output
    block = block_of[outputs]
    # Pairs are sorted by kernel offset: a stable sort by chunk sorts them by (chunk, kernel offset).
    order = block.argsort(stable=True)
    segment = block * count + taps
    lengths = torch.bincount(segment, minlength=blocks * count)
    tiles = ((lengths + tile - 1) // tile).view(blocks, count)
    tiles[:, 0] += -tiles.sum(dim=1) % schedule.multiple
    begin = (tiles.view(-1).cumsum(0) - tiles.view(-1)) * tile
    place = torch.empty_like(order)  # of each pair among all products
    place[order] = torch.arange(len(order)) + (begin - lengths.cumsum(0) + lengths)[segment[order]]
    gather = inputs.new_zeros(int(tiles.sum()) * tile)
    gather[place] = inputs
    slots = place - begin[block * count]
    tiles_of = tiles.sum(dim=1)
    if interleaved:
        gather = torch.cat([part.t().reshape(-1) for part in gather.view(-1, tile).split(tiles_of.tolist())])
        slots = slots % tile * tiles_of[block] + slots // tile
    slots = slots[outputs.argsort(stable=True)]
    rows, used = torch.bincount(block_of, minlength=blocks), lengths.view(blocks, count).sum(dim=1)
    starts = ends - met - (used.cumsum(0) - used)[block_of]
    of_tiles = torch.arange(count).repeat(blocks).repeat_interleave(tiles.view(-1))
    layout = torch.cat([rows.new_tensor([identity, interleaved]), rows, tiles_of, used])
    return gather.int(), of_tiles.int(), slots.int(), starts.int(), layout


def _chunks(chunked: Sequence[Tensor]) -> Iterator[Chunk]:
    gather, taps, slots, starts, layout = chunked
    rows, tiles, used = layout[2:].view(3, -1).tolist()
    tile = len(gather) // max(1, sum(tiles))
    inputs = gather.split([count * tile for count in tiles])
    parts = zip(rows, taps.split(tiles), inputs, slots.split(used), starts.split(rows), strict=True)
    first = 0
    for height, *tensors in parts:
        yield Chunk(first, first + height, *tensors)
        first += height


def _gathered_pairs(pairs: Pairs, identity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, outputs, kernel offset) of every pair outside the identity offset."""
    taps = torch.repeat_interleave(torch.arange(len(pairs.sizes)), pairs.sizes)
    if identity < 0:
        return pairs.inputs, pairs.outputs, taps
    kept = taps != identity
    return pairs.inputs[kept], pairs.outputs[kept], taps[kept]


def _computable(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
