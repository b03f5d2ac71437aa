"""Max pooling over a kernel map, sums and maxima over batch items, and zeroing the padding rows of a buffer.

    y[o, c] = max over kernel offsets k with an input of x[rows[o, k], c]          0 if there is no input

The gradient goes to the first kernel offset that attains the maximum. NaN propagates, the last of several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.lower import joins, native_scatter, plan
from pumice.runtime.cache import PERSISTENT, cached_per_tensor
from pumice.runtime.launch import has_triton, kernel
from pumice.runtime.streams import is_capturing

_ENTRIES = 512
"""Result elements per program."""
_CHANNELS = 64
"""Maximum channels per program."""
_BLOCK = 4096
"""Elements per program of zero_padding_rows; nearly all programs have nothing to zero and exit."""


def max_pool_rows(x: Tensor, found: KernelMap) -> Tensor:
    """Max pooling: x [num_inputs, C] -> y [num_outputs, C] in x's dtype; differentiable any number of times."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _MaxPoolFunction.apply(x, found)
    return forward(x.contiguous(), found.rows(), False)[0]


class _MaxPoolFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: KernelMap) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, taps = forward(x.contiguous(), found.rows(), True)
        ctx.found = found
        ctx.save_for_backward(taps)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (taps,), found = ctx.saved_tensors, ctx.found
        if torch.is_grad_enabled() and grad.requires_grad:
            return _spread(grad, found.rows(), taps, found.num_inputs), None
        return gradient(grad.contiguous(), found, taps), None


def forward(x: Tensor, rows: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
    """(y; kernel offset of each maximum, -1 if none, int8 or int16, not computed by kernels unless `kept`)."""
    if not _by_kernels(x):
        return forward_torch(x, rows)
    (outputs, volume), channels = rows.shape, x.shape[1]
    y = x.new_empty(outputs, channels)
    taps = torch.empty((outputs, channels) if kept else (1,), dtype=_of_taps(volume), device=x.device)
    shape = _shape(channels, _ENTRIES, VOLUME=volume)
    run = kernel("row_kernels.max_pool", "lower")
    run(_programs(outputs, shape), (x, rows, y, taps), (outputs,), shape | {"KEPT": kept})
    return y, taps


def forward_torch(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """As forward, in plain torch."""
    top = x.new_full((rows.shape[0], x.shape[1]), -torch.inf)
    first = torch.full(top.shape, -1, dtype=_of_taps(rows.shape[1]), device=x.device)
    for tap, met in enumerate(rows.unbind(1)):
        values, there = x[met.clamp(min=0)], (met >= 0)[:, None]
        better = there & ((values > top) | values.isnan() | (first < 0))
        top, first = torch.where(better, values, top), torch.where(better, tap, first).to(first.dtype)
    return torch.where(first >= 0, top, 0), first


def gradient(grad: Tensor, found: KernelMap, taps: Tensor) -> Tensor:
    """The gradient of x in grad's dtype, summed in at least float32."""
    if not _by_kernels(grad):
        return _spread(grad, found.rows(), taps, found.num_inputs)
    rows, channels = found.transpose().rows(), grad.shape[1]
    dx = grad.new_empty(found.num_inputs, channels)
    shape = _shape(channels, _ENTRIES, VOLUME=rows.shape[1])
    run = kernel("row_kernels.max_pool_gradient", "lower")
    run(_programs(len(dx), shape), (grad, rows, taps, dx), (len(dx),), shape)
    return dx


def _spread(grad: Tensor, rows: Tensor, taps: Tensor, inputs: int) -> Tensor:
    """As gradient, in plain torch; differentiable in grad."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    source = rows.gather(1, taps.long().clamp(min=0)).long().clamp(min=0)
    channels = torch.arange(grad.shape[1], device=grad.device).expand_as(source)
    found = wide.new_zeros(inputs, grad.shape[1])
    return found.index_put((source, channels), torch.where(taps >= 0, wide, 0), accumulate=True).to(grad.dtype)


def _by_kernels(x: Tensor) -> bool:
    return x.dtype != torch.float64 and has_triton(x)


def _of_taps(volume: int) -> torch.dtype:
    return torch.int8 if volume <= 127 else torch.int16


def _shape(channels: int, entries: int, **more: int) -> dict[str, int]:
    """Constants of a kernel whose programs hold `entries` values."""
    lanes = min(_CHANNELS, max(1, 1 << (channels - 1).bit_length()))
    return {"C": channels, **more, "ROWS": entries // lanes, "LANES": lanes}


def _programs(rows: int, shape: dict[str, int]) -> int:
    return -(-rows // shape["ROWS"]) * -(-shape["C"] // shape["LANES"])


# Padding rows
def zero_padding_rows(values: Tensor, count: Tensor) -> None:
    """values[count:] = 0 in place, invisible to autograd; values [N, C] contiguous, count int32 [1] on the device."""
    if not has_triton(values):
        return zero_padding_rows_torch(values, count)
    total = values.numel()
    run = kernel("row_kernels.zero_padding_rows", "lower")
    run(-(-total // _BLOCK), (values, count), (total, values.shape[1]), {"BLOCK": _BLOCK})


def zero_padding_rows_torch(values: Tensor, count: Tensor) -> None:
    """As zero_padding_rows, in plain torch."""
    # .data instead of detach(): the version counter of saved tensors must not change.
    values.data.masked_fill_(torch.arange(values.shape[0], device=values.device)[:, None] >= count, 0)


# Batch items


def sum_items(values: Tensor, items: Tensor, batch: int, is_sorted: bool = False) -> Tensor:
    """[B, C]: sums over the rows of each batch item, in a fixed order.

        sums[b, c] = sum of values[n, c] over the rows n with items[n] = b

    values: [N, C], integers or floats, which are summed in at least float32; items: int64 [N], -1 for rows that are
    left out. Differentiable, any number of times.
    """
    if not _sums_by_kernels(values, batch):
        return sum_items_torch(values, items, batch)
    if values.requires_grad:
        return _ItemSums.apply(values, items, batch, False, is_sorted)
    return _sums(values, items, batch, is_sorted)


def sum_items_torch(values: Tensor, items: Tensor, batch: int) -> Tensor:
    """As sum_items, in plain torch."""
    values = values.to(_sum_dtype(values))
    # Row 0 is that of item -1.
    return values.new_zeros((batch + 1, values.shape[1])).index_add(0, items + 1, values)[1:]


def spread_items(values: Tensor, items: Tensor) -> Tensor:
    """[N, C]: values[items], 0 for item -1. values: [B, C]; items: int64 [N]. The gradient is `sum_items`."""
    if not _sums_by_kernels(values, len(values)):
        return spread_items_torch(values, items)
    if values.requires_grad:
        return _ItemSums.apply(values, items, len(values), True, False)
    return _spread_rows(values, items)


def spread_items_torch(values: Tensor, items: Tensor) -> Tensor:
    """As spread_items, in plain torch."""
    return torch.cat([values.new_zeros(1, values.shape[1]), values]).index_select(0, items + 1)


def max_items(values: Tensor, items: Tensor, batch: int, least: bool = False) -> Tensor:
    """int64 [B, C]: the first row of each batch item that attains its maximum (its minimum if `least`), -1 for an item
    without rows. A NaN is the maximum, and the minimum. values: [N, C]; items: as in `sum_items`."""
    if _by_native(values):
        return native_scatter.extremes(values, items, batch, least)[1].long()
    if least or batch > _FEW_ITEMS or not values.is_floating_point() or not _over_items(values, batch):
        return max_items_torch(values, torch.where(items < batch, items, -1), batch, least)
    tops = _by_parts("max_items", values, items, batch, (_NO_KEY, torch.int64)).amax(0)
    return torch.where(tops == _NO_KEY, -1, _LAST_ROW - (tops & _LAST_ROW))


def extreme_items(
    values: Tensor, items: Tensor, batch: int, least: bool, places: bool = True, is_sorted: bool = False
) -> tuple[Tensor, Tensor | None]:
    """[B, C] each: (maxima or minima over batch items, 0 for none; with `places` their rows as of `max_items`).
    Differentiable."""
    if not (values.requires_grad and torch.is_grad_enabled()):
        if _by_native(values):
            found, first = native_scatter.extremes(values, items, batch, least, places)
            return found.to(values.dtype), first if places else None
        if not places and batch > _FEW_ITEMS and joins.runs(values) and _is_settled(items):
            return joins.join(values, _joins(items, batch, is_sorted), "min" if least else "max")[0], None
    with torch.no_grad():
        first = max_items(values, items, batch, least)
    return rows_at(values, first), first


def extreme_items_torch(
    values: Tensor, items: Tensor, batch: int, least: bool, places: bool = True
) -> tuple[Tensor, Tensor | None]:
    """As extreme_items, in plain torch."""
    with torch.no_grad():
        first = max_items_torch(values, items, batch, least)
    return rows_at(values, first), first


def rows_at(values: Tensor, first: Tensor) -> Tensor:
    """y[b, c] = values[first[b, c], c], 0 for row -1, where a row is that of one b at most."""
    # Of no rows there is none to read.
    padded = torch.cat([values, values.new_zeros(1, values.shape[1])]) if len(values) == 0 else values
    return torch.where(first < 0, 0, padded.gather(0, first.clamp(min=0)))


def max_items_torch(values: Tensor, items: Tensor, batch: int, least: bool = False) -> Tensor:
    """As max_items, in plain torch."""
    # No len(): sizes may be symbolic.
    (count, channels), index = values.shape, (items + 1)[:, None].expand(-1, values.shape[1])
    tops = values.new_zeros((batch + 1, channels))
    tops = tops.scatter_reduce(0, index, values, "amin" if least else "amax", include_self=False)
    rows = torch.arange(count, device=values.device)[:, None]
    attaining = torch.where((values == tops.gather(0, index)) | values.isnan(), rows, count)
    first = attaining.new_full(tops.shape, count).scatter_reduce(0, index, attaining, "amin")[1:]
    return torch.where(first < count, first, -1)


_ITEM_BLOCK, _ITEM_PROGRAMS, _ITEM_PARTIALS = 4096, 264, 1 << 22
"""Values per iteration of a kernel over items; maximum programs, and maximum partial results."""
_NO_KEY, _LAST_ROW = -(1 << 63), (1 << 31) - 1
_FEW_ITEMS = 64
"""Items up to which programs of a GPU reduce parts of the rows for all items; more are sorted."""
_SUMS, _SUMS_IN_ORDER = "O[i[p],c] = X[q[p],c] ; i:sorted", "O[i[p],c] = X[p,c] ; i:sorted"


class _ItemSums(torch.autograd.Function):
    """sum_items, or spread_items: each is the other's gradient."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values: Tensor, items: Tensor, batch: int, spreads: bool, is_sorted: bool
    ) -> Tensor:
        ctx.batch, ctx.spreads, ctx.dtype, ctx.is_sorted = batch, spreads, values.dtype, is_sorted
        ctx.save_for_backward(items)
        return _spread_rows(values, items) if spreads else _sums(values, items, batch, is_sorted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (items,) = ctx.saved_tensors
        found = _ItemSums.apply(grad, items, ctx.batch, not ctx.spreads, ctx.is_sorted)
        return found.to(ctx.dtype), None, None, None, None


def _sums_by_kernels(values: Tensor, batch: int) -> bool:
    """True if kernels for sums over items, or for rows of items, run on these values."""
    return _over_items(values, batch) or (_by_native(values) and values.numel() > 0)


def _by_native(values: Tensor) -> bool:
    return not has_triton(values) and native_scatter.runs(values)


def _over_items(values: Tensor, batch: int) -> bool:
    """True if kernels over batch items run on these values."""
    return _by_kernels(values) and values.numel() > 0 and batch > 0


def _sums(values: Tensor, items: Tensor, batch: int, is_sorted: bool) -> Tensor:
    if _by_native(values):
        return native_scatter.sums(values, items, batch)
    if batch <= _FEW_ITEMS:
        return _by_parts("sum_items", values, items, batch, (0, _sum_dtype(values))).sum(0)
    if not values.is_floating_point():
        return sum_items_torch(values, torch.where(items < batch, items, -1), batch)
    if _is_settled(items):
        return joins.join(values, _joins(items, batch, is_sorted), "sum", dtype=_sum_dtype(values))[0]
    wide, shape = values.to(_sum_dtype(values)), (batch, values.shape[1])
    if is_sorted:
        return plan.execute([wide, items], "X|i", _SUMS_IN_ORDER, shape, "triton")
    found, order = _in_order(items)
    return plan.execute([wide, found, order], "X|i|q", _SUMS, shape, "triton")


@cached_per_tensor
def _in_order(items: Tensor) -> tuple[Tensor, Tensor]:
    """The items in order, and their rows."""
    found, order = items.sort(stable=True)
    return found, order


def _is_settled(items: Tensor) -> bool:
    """True unless a CUDA graph is captured, in which the host cannot read items and replays may have others."""
    return items not in PERSISTENT and not is_capturing(items.device)


@cached_per_tensor
def _joins(items: Tensor, batch: int, is_sorted: bool) -> joins.Joins:
    """The rows of each item, -1s left out, as kernels read them."""
    if is_sorted:
        return joins.Joins.of(None, items.detach(), (len(items), batch))
    found, order = items.sort(stable=True)
    return joins.Joins.of(order, found, (len(items), batch))


def _spread_rows(values: Tensor, items: Tensor) -> Tensor:
    if not _by_kernels(values):
        return spread_items_torch(values, items)
    found = values.new_empty(len(items), values.shape[1])
    shape, tensors = _shape(values.shape[1], _ITEM_BLOCK), (values.contiguous(), items, found)
    kernel("row_kernels.spread_items", "lower")(_programs(len(items), shape), tensors, (len(items), len(values)), shape)
    return found


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32) if values.is_floating_point() else values.dtype


def _by_parts(name: str, values: Tensor, items: Tensor, batch: int, like: tuple[int, torch.dtype]) -> Tensor:
    """[parts, B, C]: results of a kernel for parts of the rows; like: (initial value, dtype)."""
    (count, channels), (start, dtype) = values.shape, like
    shape = _shape(channels, _ITEM_BLOCK)
    blocks = _programs(1, shape)
    parts = max(1, min(_ITEM_PROGRAMS // blocks, _ITEM_PARTIALS // (batch * channels), count // (4 * shape["ROWS"])))
    found = torch.full((parts, batch, channels), start, dtype=dtype, device=values.device)
    numbers = count, -(-count // parts), batch
    kernel(f"row_kernels.{name}", "lower")(parts * blocks, (values.contiguous(), items, found), numbers, shape)
    return found
