"""The steps of a relational graph convolution, in each of its orders: joins of rows, and products over relations.

aggregate    y[o] = sum over k of (join over edges i -> o of relation k of x[i]) @ w[k]
transform    y[o] = join over edges i -> o of (x[i] @ w[k])
direct       y[o] = sum over edges, gathered and scattered within the kernel of the product
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import MultiMap
from pumice.lower import joins
from pumice.lower.call import add_product
from pumice.lower.joins import Joins
from pumice.ops import autograd
from pumice.ops.conv import conv_features, differentiable_call
from pumice.ops.graph import JOINS, joins_of, share_of, transformed
from pumice.schedule.predict import DEVICES, Work, seconds

_JOINED = "H[s[e],c] {} X[i[e],c]{} ; s:sorted"
_OPERATORS = {"sum": "=", "max": "max="}  # A mean is a sum with factors: kernels on a GPU compute sums


def orders_of(aggr: str, weighted: bool) -> tuple[str, ...]:
    """The orders that compute this aggregation, with or without weights of edges."""
    if aggr == "max":
        return ("aggregate",)
    return ("aggregate", "transform") if aggr == "mean" or weighted else ("aggregate", "transform", "direct")


class GraphJoin(NamedTuple):
    """found: the map of a graph; aggr: aggregation; scale: [E] of pairs, or None."""

    found: MultiMap
    aggr: str
    scale: Tensor | None


# Orders of aggregation and transformation


def aggregate_first(x: Tensor, weight: Tensor, layer: GraphJoin, base: Tensor | None) -> Tensor:
    """Join the inputs of each (target, relation), then one product for each."""
    return product(joined(x, layer, "pairs"), weight, layer.found.segments().reduced, base)


def transform_first(x: Tensor, weight: Tensor, layer: GraphJoin, base: Tensor | None) -> Tensor:
    """One product for each (source, relation), then join the results of each target."""
    rows = product(x, weight, transformed(layer.found).reduced, None)
    if base is not None and layer.scale is None and by_kernels(rows) and autograd.is_plain_call((rows, base)):
        joins.add_join(rows, joins_of(layer.found, "transformed", layer.aggr == "mean"), base)
        return base
    return plus(joined(rows, layer, "transformed"), base)


def _direct(x: Tensor, weight: Tensor, layer: GraphJoin, base: Tensor | None) -> Tensor:
    """A product for each edge, gathered and scattered within one kernel."""
    return product(x, weight, layer.found, base)


ORDERS = {"aggregate": aggregate_first, "transform": transform_first, "direct": _direct}
"""Orders of the steps of `relational_conv`."""


def embedded(weight: Tensor, layer: GraphJoin) -> Tensor:
    """One-hot nodes: a product is a row of the weight."""
    rows = weight.reshape(-1, weight.shape[2])
    if layer.aggr != "max":
        return joined(rows, layer, "rows")
    return joined(joined(rows, layer, "rows by segment"), layer._replace(aggr="sum", scale=None), "segments")


def product(x: Tensor, weight: Tensor, found: MultiMap, base: Tensor | None) -> Tensor:
    """base + the sum over pairs (i, o) of offset k of x[i] * weight[k]."""
    if weight.ndim == 4:
        relations, groups, inner, outer = weight.shape
        filters = weight.permute(1, 3, 0, 2).reshape(groups * outer, relations, inner)
        return plus(conv_features(x, filters, found, found.num_outputs, groups), base)
    filters = weight.permute(2, 0, 1)
    if base is not None and autograd.is_plain_call((x, filters, base)) and add_product((x, filters), found, base):
        return base
    return plus(conv_features(x, filters, found, found.num_outputs), base)


def plus(y: Tensor, base: Tensor | None) -> Tensor:
    """y + base; in the memory of y unless autograd or a transform is active."""
    if base is None:
        return y
    return y.add_(base) if autograd.is_plain_call((y, base)) else y + base


# Joins of rows


def joined(x: Tensor, layer: GraphJoin, name: str) -> Tensor:
    """[results, C]: the join of the rows of one of JOINS, in the aggregation of the layer."""
    found, aggr, scale = layer
    how = "max" if aggr == "max" else "sum"
    if scale is None and by_kernels(x):
        return _join(x, joins_of(found, name, aggr == "mean"), how)
    order, inputs, outputs, sizes = JOINS[name](found)
    factors = None if scale is None else scale[order]
    if aggr == "mean":
        share = share_of(found, (name, order), x.dtype)
        factors = share if factors is None else share * factors
    more = [] if factors is None else [factors]
    text = _JOINED.format(_OPERATORS[how], " * V[e]" * len(more))
    return autograd.einsum([x, inputs, outputs, *more], "X|i|s" + "|V" * len(more), text, (sizes[1], x.shape[1]))


def by_kernels(x: Tensor) -> bool:
    """True if the kernels of lower.joins apply: other devices have loop nests in C, and tracing sees statements."""
    return not torch.compiler.is_compiling() and joins.runs(x) and autograd.only_reverse_mode_active((x,))


def _join(x: Tensor, found: Joins, how: str) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Join.apply(x, found, how)
    return joins.join(x, found, how)[0]


class _Join(torch.autograd.Function):
    """joins.join; of sums each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Joins, how: str) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.found, ctx.how = found, how
        y, ties = joins.join(x, found, how, how == "max")
        if ties is not None:
            ctx.save_for_backward(x, y, ties)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.how == "sum":
            return _join(grad, ctx.found.transposed, "sum"), None, None
        x, y, ties = ctx.saved_tensors
        shares = grad.to(ties.dtype) / ties.clamp(min=1)
        recorded = torch.is_grad_enabled() and grad.requires_grad
        run = joins.of_maxima_torch if recorded else joins.of_maxima
        return run(shares, x, y, ctx.found.transposed), None, None


# Gradients of both steps at once


def gradients(
    given: tuple[Tensor, Tensor, Tensor | None], grad: Tensor, layer: GraphJoin, order: str, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of (x, weight), of a plain call. given: (x, weight, joined rows if they are known); grad: of the
    result, contiguous; order: "aggregate" or "transform"."""
    x, weight, rows = given
    found, first = layer.found, order == "aggregate"
    sorts = joins_of(found, "pairs" if first else "transformed", layer.aggr == "mean")
    over = found.segments().reduced if first else transformed(found).reduced
    ties = None
    if first and (rows is None or layer.aggr == "max"):
        rows, ties = joins.join(x, sorts, "max" if layer.aggr == "max" else "sum", layer.aggr == "max")
    up = grad if first else joins.join(grad, sorts.transposed, "sum")[0]
    operands = x if rows is None else rows, weight.permute(2, 0, 1)
    wanted = [x.dtype if needed[0] else None, weight.dtype if needed[1] else None]
    dx, filters = differentiable_call(*operands, over, over.num_outputs).gradients(operands, up, wanted)
    if dx is not None and ties is not None:
        dx = joins.of_maxima(dx.to(ties.dtype) / ties.clamp(min=1), x, operands[0], sorts.transposed)
    elif dx is not None and first:
        dx = joins.join(dx, sorts.transposed, "sum")[0]
    return dx, None if filters is None else filters.permute(1, 2, 0)


# The cost model

_DEVICES = dict(DEVICES)  # torch.compile reads no mapping proxy once a dictionary has changed


def cheapest(x: Tensor, weight: Tensor, found: MultiMap, able: tuple[str, ...]) -> str:
    """The order of least estimated time."""
    if len(able) == 1:
        return able[0]
    shape, size = tuple(weight.shape), x.element_size()
    costs = found.cached(("costs", shape, size), lambda m: _costs(m, shape, size))
    best, *others = able
    # torch.compile knows no min() by a key.
    for name in others:
        best = name if costs[name] < costs[best] else best
    return best


def _costs(found: Any, shape: tuple[int, ...], size: int) -> Mapping[str, float]:
    """Estimated seconds of each order. shape: of the weight; size: bytes of a value."""
    inner, outer, groups = shape[-2], shape[-1], 1 if len(shape) == 3 else shape[1]
    edges, targets, device = len(found.table), found.num_outputs, _DEVICES.get(found.device.type, _DEVICES["cpu"])
    segments, turned = len(found.segments().sizes), len(found.transpose().segments().sizes)

    def product(rows: int, adds: int) -> float:
        flops, moved = 2.0 * rows * inner * outer * groups, size * groups * (rows * inner + (1 + adds) * rows * outer)
        return seconds(Work(flops, moved, matrix=found.device.type == "cuda"), device)

    def join(rows: int, channels: int) -> float:
        return seconds(Work(2.0 * edges * channels, size * channels * (edges + rows)), device)

    return {
        "aggregate": join(segments, inner * groups) + product(segments, 1),
        "transform": product(turned, 0) + join(targets, outer * groups),
        "direct": product(edges, 1),
    }
