"""Convolutions by library products: gather, multiply, scatter.

    y[o, g*n] += x[i, g*c] * w[g*n, k, c]          forward; the input gradient is that of the transposed map
    w[g*n, k, c] += x[i, g*c] * y[o, g*n]          weight gradient                     for every pair (o, k, i)

explicit        im2col: columns[o, k, c] of many outputs at once, 0 where there is no input, and one product
vectorised      for each group of kernel offsets: gather, multiply, scatter-add (TorchSparse, MLSys 2022)
fused           one gather of all pairs, sorted by kernel offset, a product per group, and one scatter-add
locality-aware  the same with a segment sum per output instead of the scatter, in a fixed order

The last writes as TorchSparse's public code (2.1) does. That code also reads by input, each once into all its slots;
here every slot reads its input. It accumulates halves in half precision and multiplies the centre offset of a
submanifold map without a gather; here sums are in float32 at least, and the centre offset is gathered. As there,
half-precision products on a GPU are stored in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.lower import reference
from pumice.schedule.grouping import Grouping

_COLUMNS = 1 << 28
"""Maximum bytes of columns held at a time."""


# Explicit
def columns_forward(x: Tensor, weight: Tensor, found: KernelMap, groups: int) -> Tensor:
    """y[o, g*n] = columns[o, g, k*c] @ w[g, k*c, n], by slices of the outputs."""
    volume, channels = weight.shape[1:]
    x = _in_compute_dtype(x)
    filters = weight.to(x.dtype).reshape(groups, -1, volume * channels).transpose(1, 2)
    out = x.new_empty(found.num_outputs, weight.shape[0])
    for rows, columns in _columns(x, found, groups):
        out[rows] = torch.bmm(columns.transpose(0, 1), filters).transpose(0, 1).flatten(1)
    return out


def columns_weight_gradient(x: Tensor, y: Tensor, found: KernelMap, groups: int) -> Tensor:
    """w[g, n, k*c] = y[o, g, n]^T @ columns[o, g, k*c], summed over slices of the outputs."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, y = _in_compute_dtype(x), _in_compute_dtype(y)
    channels, volume = x.shape[1] // groups, found.volume
    out = x.new_zeros(groups, y.shape[1] // groups, volume * channels, dtype=wide)
    for rows, columns in _columns(x, found, groups):
        out += torch.bmm(y[rows].view(-1, groups, out.shape[1]).permute(1, 2, 0), columns.transpose(0, 1))
    return out.view(y.shape[1], volume, channels)


def _columns(x: Tensor, found: KernelMap, groups: int) -> Iterator[tuple[slice, Tensor]]:
    """(slice of the outputs, its columns [rows, groups, K * C]); 0 where there is no input."""
    table = found.cached("padded rows", _padded_rows)
    # A zero row instead of a mask: inf * 0 would be NaN.
    x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    each = max(1, found.volume * x.shape[1] * x.element_size())
    step = max(1, _COLUMNS // each)
    for first in range(0, len(table), step):
        rows = slice(first, min(first + step, len(table)))
        met = x.index_select(0, table[rows].reshape(-1))
        parts = met.view(rows.stop - first, found.volume, groups, x.shape[1] // groups).transpose(1, 2)
        yield rows, parts.reshape(rows.stop - first, groups, -1)


def _padded_rows(found: KernelMap) -> Tensor:
    rows = found.rows()
    return torch.where(rows >= 0, rows, found.num_inputs)


# Gather, multiply, scatter
class SlotBlock(NamedTuple):
    """Slots first to last: the same number for each of these kernel offsets."""

    first: int
    last: int
    taps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PairLayout:
    """Slots in which the pairs of a map are multiplied, sorted by block and kernel offset.

    gather, scatter int64 [S]: input and output of each slot; padding slots have input 0 and output num_outputs.
    filling int64: the padding slots. order int64 [P]: the other slots, sorted by output, then by kernel offset;
    starts int64 [rows]: first position of each output. chosen: kernel offsets of blocks of several, on the device.
    """

    blocks: tuple[SlotBlock, ...]
    gather: Tensor
    scatter: Tensor
    filling: Tensor
    order: Tensor
    starts: Tensor
    chosen: tuple[Tensor | None, ...]


def layout(found: KernelMap, grouping: Grouping) -> PairLayout:
    """The layout of a map, cached with the map."""
    return found.cached(("layout", grouping), lambda m: _laid_out(m, grouping))


def _laid_out(found: KernelMap, grouping: Grouping) -> PairLayout:
    inputs, outputs, sizes = found.pairs()
    counts, device, rows = sizes.tolist(), inputs.device, found.num_outputs
    blocks = tuple(_blocks(grouping, counts))
    total = blocks[-1].last if blocks else 0
    gather = torch.zeros(total, dtype=torch.int64, device=device)
    scatter = torch.full((total,), rows, dtype=torch.int64, device=device)
    begins = sizes.cumsum(0).sub(sizes).tolist()
    for first, last, taps in blocks:
        each = (last - first) // len(taps)
        for number, tap in enumerate(taps):
            at, own = slice(first + number * each, first + number * each + counts[tap]), begins[tap]
            gather[at], scatter[at] = inputs[own : own + counts[tap]], outputs[own : own + counts[tap]]
    filled = scatter == rows
    order = scatter.argsort(stable=True)[: len(inputs)]
    met = torch.bincount(outputs, minlength=rows)
    chosen = tuple(torch.tensor(b.taps, device=device) if len(b.taps) > 1 else None for b in blocks)
    return PairLayout(blocks, gather, scatter, filled.nonzero()[:, 0], order, met.cumsum(0) - met, chosen)


def _blocks(grouping: Grouping, counts: list[int]) -> Iterator[SlotBlock]:
    """The non-empty blocks of slots."""
    first = 0
    for group in grouping.groups(counts):
        for taps in [group.taps] if group.batched else [(tap,) for tap in group.taps]:
            last = first + len(taps) * max(counts[tap] for tap in taps)
            if last > first:
                yield SlotBlock(first, last, taps)
            first = last


def forward_by_group(x: Tensor, weight: Tensor, how: PairLayout, rows: int, groups: int) -> Tensor:
    """Gather, multiply and scatter-add, one group of kernel offsets after another."""
    x, filters, out = _prepare_operands(x, weight, rows, groups)
    for number, block in enumerate(how.blocks):
        at = slice(block.first, block.last)
        products = x.new_empty(block.last - block.first, weight.shape[0])
        _multiplied(x.index_select(0, how.gather[at]), _filters(filters, how, number), products)
        out.index_add_(0, how.scatter[at], products.to(out.dtype))
    return out[:rows]


def forward_fused(x: Tensor, weight: Tensor, how: PairLayout, rows: int, groups: int) -> Tensor:
    """Gather all pairs, multiply, scatter-add all products."""
    x, filters, out = _prepare_operands(x, weight, rows, groups)
    return out.index_add_(0, how.scatter, _all_products(x, filters, how).to(out.dtype))[:rows]


def forward_in_order(x: Tensor, weight: Tensor, how: PairLayout, rows: int, groups: int) -> Tensor:
    """Gather all pairs, multiply, sum the products of each output in a fixed order."""
    x, filters, _ = _prepare_operands(x, weight, 0, groups)
    if not len(how.order) or not weight.shape[0]:
        return x.new_zeros(rows, weight.shape[0])
    products = _all_products(x, filters, how)
    return torch.embedding_bag(products, how.order, how.starts, False, 0, False, None, False)[0]


def weight_gradient(x: Tensor, y: Tensor, how: PairLayout, shape: tuple[int, int], fused: bool) -> Tensor:
    """w[g*n, k, c]: x^T @ y per block; fused: gather all at once; shape: (kernel volume, groups)."""
    (volume, groups), kind = shape, torch.promote_types(x.dtype, torch.float32)
    x, y = _in_compute_dtype(x), torch.cat([_in_compute_dtype(y), _in_compute_dtype(y).new_zeros(1, y.shape[1])])
    channels, width = x.shape[1] // groups, y.shape[1] // groups
    out = x.new_zeros(volume, groups, channels, width)
    sides = _sides(x, y, how, slice(None)) if fused else None
    for block, chosen in zip(how.blocks, how.chosen, strict=True):
        at = slice(block.first, block.last)
        left, right = _sides(x, y, how, at) if sides is None else (side[at] for side in sides)
        taps = len(block.taps)
        products = torch.bmm(_split(left, taps, groups).transpose(1, 2), _split(right, taps, groups))
        products = products.view(taps, groups, channels, width)
        if chosen is None:
            out[block.taps[0]] = products[0]
        else:
            out.index_copy_(0, chosen, products)
    return out.permute(1, 3, 0, 2).reshape(groups * width, volume, channels).to(kind)


def _sides(x: Tensor, y: Tensor, how: PairLayout, at: slice) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of the slots; 0 on both sides for padding slots."""
    left, right = x.index_select(0, how.gather[at]), y.index_select(0, how.scatter[at])
    if not len(how.filling):
        return left, right
    return left.masked_fill_((how.scatter[at] == len(y) - 1)[:, None], 0), right


def _prepare_operands(x: Tensor, weight: Tensor, rows: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(features, filters [K, G, C, N], zeroed accumulator with an extra row for padding slots)."""
    x = _in_compute_dtype(x)
    filters = reference.grouped(weight.to(x.dtype).contiguous(), groups)
    return x, filters, x.new_zeros(rows + 1, weight.shape[0], dtype=reference.accumulator(x.dtype))


def _all_products(x: Tensor, filters: Tensor, how: PairLayout) -> Tensor:
    return multiplied(x.index_select(0, how.gather), filters, how)


def multiplied(gathered: Tensor, filters: Tensor, how: PairLayout) -> Tensor:
    """Products of gathered rows [S, G * C] and filters [K, G, C, N]: [S, G * N]."""
    products = gathered.new_empty(len(gathered), filters.shape[1] * filters.shape[3])
    for number, block in enumerate(how.blocks):
        at = slice(block.first, block.last)
        _multiplied(gathered[at], _filters(filters, how, number), products[at])
    return products


def _filters(filters: Tensor, how: PairLayout, number: int) -> Tensor:
    """Filters [T, G, C, N] of the kernel offsets of a block."""
    chosen = how.chosen[number]
    if chosen is not None:
        return filters.index_select(0, chosen)
    tap = how.blocks[number].taps[0]
    return filters[tap : tap + 1]


def _multiplied(rows: Tensor, filters: Tensor, out: Tensor) -> None:
    """Rows [T * M, G * C], M per kernel offset, times [T, G, C, N] into out [T * M, G * N]."""
    taps, groups, channels, width = filters.shape
    if taps == groups == 1:
        torch.mm(rows, filters[0, 0], out=out)
    elif groups == 1:
        torch.bmm(rows.view(taps, -1, channels), filters[:, 0], out=out.view(taps, -1, width))
    else:
        products = torch.bmm(_split(rows, taps, groups), filters.reshape(-1, channels, width))
        out.copy_(products.view(taps, groups, -1, width).transpose(1, 2).reshape(len(rows), -1))


def _split(rows: Tensor, taps: int, groups: int) -> Tensor:
    """Rows [T * M, G * C] as [T * G, M, C]."""
    each = rows.shape[0] // taps
    return rows.view(taps, each, groups, rows.shape[1] // groups).transpose(1, 2).reshape(taps * groups, each, -1)


def _in_compute_dtype(x: Tensor) -> Tensor:
    """Contiguous x in its compute dtype: half precision only on a GPU, which accumulates in float32."""
    return x.contiguous() if x.is_cuda else x.to(reference.accumulator(x.dtype)).contiguous()


Forward = Callable[[Tensor, Tensor, PairLayout, int, int], Tensor]
