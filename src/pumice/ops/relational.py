"""The relational graph convolution over a graph with typed edges.

    y[o, n] = sum over relations k of  (join over edges i -> o of relation k of x[i, c]) * w[k, c, n]

Source: Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", ESWC 2018, equation 2.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import MultiMap
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower.call import call_signature
from pumice.lower.relational_call import RelationalCall
from pumice.ops import autograd, relational_op
from pumice.ops.conv import autocast_dtype
from pumice.ops.graph import Graph, joins_of, transformed
from pumice.ops.relational_steps import (
    ORDERS,
    GraphJoin,
    by_kernels,
    cheapest,
    embedded,
    gradients,
    joined,
    orders_of,
    plus,
    product,
)
from pumice.runtime.cache import BoundedCache, cached_per_tensor
from pumice.runtime.streams import is_capturing

AGGREGATIONS = ("mean", "sum", "max")


def relational_conv(
    x: Tensor | None,
    weight: Tensor,
    graph: Graph,
    *,
    aggr: str = "mean",
    edge_weight: Tensor | None = None,
    order: str | None = None,
) -> Tensor:
    """Relational graph convolution.

        y[o, n] = sum over relations k of  (join over edges e = (i -> o) of relation k of v[e] * x[i, c]) * w[k, c, n]

    x: [sources, C_in]; None: one-hot nodes, of which each has its row of w; int64 [sources]: the rows of such. weight:
    [relations, C_in, C_out], or [relations, B, C_in / B, C_out / B] of block-diagonal matrices. aggr: "mean" (over the
    edges of a node and relation), "sum" or "max". edge_weight: v [edges] in the order of the graph's edges, default 1.
    order: a name of ORDERS; default: the cheapest by the cost model.

    Returns [targets, C_out] in the dtype of x (of one-hot nodes: of weight). Differentiable any number of times in x,
    weight and edge_weight; sums are in float32 at least. The gradient of a maximum is shared by those that attain it.
    Raises OptionError, ShapeError, DtypeError, DeviceError.
    """
    return convolved(x, weight, graph, (aggr, edge_weight, order))


def convolved(
    x: Tensor | None, weight: Tensor, graph: Graph, how: tuple[str, Tensor | None, str | None], own: Own | None = None
) -> Tensor:
    """`relational_conv` plus what nodes add to their own results. how: (aggr, edge_weight, order)."""
    aggr, edge_weight, order = how
    if own is not None and (y := _by_known_launches(x, weight, graph, how, own)) is not None:
        return y
    if (dtype := autocast_dtype(weight)) is not None:
        x, weight = x.to(dtype) if x is not None and x.is_floating_point() else x, weight.to(dtype)
    _check_once(x, weight, graph, aggr, edge_weight)
    if relational_op.takes(x, weight, edge_weight, order):
        assert x is not None
        _check_order(order, orders_of(aggr, False))
        rows = relational_op.relational(x, weight, graph.number, aggr, order)
        return rows if own is None else rows + own.rows()
    scale = None if edge_weight is None else edge_weight[graph.order].to(weight.dtype)
    layer = GraphJoin(graph.map, aggr, scale)
    if x is None or not x.is_floating_point():
        rows = embedded(weight if x is None else weight.index_select(1, x), layer)
        return rows if own is None else plus(rows, own.rows())
    able = orders_of(aggr, scale is not None)
    if order is None:
        order = cheapest(x, weight, graph.map, able)
    _check_order(order, able)
    if own is None or scale is not None or order == "direct" or weight.ndim != 3:
        return ORDERS[order](x, weight, layer, None if own is None else own.rows())
    if own.x is x and aggr != "max" and _is_recorded(x, weight, own):
        return _Layer.apply(x, weight, own.root, own.bias, layer, order)
    y = ORDERS[order](x, weight, layer, own.rows())
    _keep_launches(x, weight, graph.map, (aggr, how[2]), order)
    return y


class Own(NamedTuple):
    """What nodes add to their own results: x @ root + bias. x: [targets, C], None or int64 [targets] of one-hot nodes;
    bias: [C_out] or None."""

    x: Tensor | None
    root: Tensor
    bias: Tensor | None

    def rows(self) -> Tensor:
        """[targets, C_out], in new memory."""
        x, root, bias = self
        if x is not None and x.is_floating_point():
            return x @ root if bias is None else torch.addmm(bias, x, root)
        rows = root if x is None else root[x]
        return rows.clone() if bias is None else rows + bias


# Known launches


def _by_known_launches(
    x: Tensor | None, weight: Tensor, graph: Graph, how: tuple[str, Tensor | None, str | None], own: Own
) -> Tensor | None:
    """The result by the launches of an equal earlier call, without its checks; else None."""
    aggr, edge_weight, order = how
    if torch.compiler.is_compiling() or not isinstance(graph, Graph) or x is None or edge_weight is not None:
        return None
    known = graph.map.get_cached("launches")
    given = (x, weight, own.root) if own.x is x else (x, weight, own.root, own.x)
    if not known or own.x is None or not autograd.is_plain_call([t for t in (*given, own.bias) if t is not None]):
        return None
    call = known.get(call_signature((x, weight), _ROWS_VARY, aggr, order))
    if call is None or x.shape[0] != graph.map.num_inputs or own.root.dtype is not x.dtype:
        return None
    base = own.rows()
    return call(x, weight, base)


_ROWS_VARY = (True, False)
"""Of (x, weight): the number of rows of x is that of the graph."""


def _keep_launches(x: Tensor, weight: Tensor, found: MultiMap, key: tuple[str, str | None], order: str) -> None:
    """Keep the launches of a call that ran, for `_by_known_launches`."""
    if torch.compiler.is_compiling() or not autograd.uses_gpu(x) or not autograd.is_plain_call((x, weight)):
        return
    signature = call_signature((x, weight), _ROWS_VARY, *key)
    known = found.cached("launches", lambda _: BoundedCache[RelationalCall | None](_CALLS))
    if signature in known or not x.is_contiguous() or not by_kernels(x) or is_capturing(x.device):
        return
    aggr, first = key[0], order == "aggregate"
    over = found.segments().reduced if first else transformed(found).reduced
    sorts = joins_of(found, "pairs" if first else "transformed", aggr == "mean")
    known.keep(signature, RelationalCall.of(x, weight, (over, sorts), "max" if aggr == "max" else "sum", first))


_CALLS = 64
"""Kinds of calls whose launches a graph keeps."""


# Gradients of a whole layer


def _is_recorded(x: Tensor, weight: Tensor, own: Own) -> bool:
    """True if autograd, and nothing else, records a layer whose steps are kernels."""
    given = [x, weight, own.root, *([] if own.bias is None else [own.bias])]
    recorded = torch.is_grad_enabled() and any([t.requires_grad for t in given]) and autocast_dtype(weight) is None
    return recorded and own.root.dtype == x.dtype and by_kernels(x) and autograd.only_reverse_mode_active(given)


class _Layer(torch.autograd.Function):
    """A layer as one node: of a sum or mean over x, with x @ root + bias."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x: Tensor, weight: Tensor, root: Tensor, bias: Tensor | None, layer: GraphJoin, order: str
    ) -> Tensor:
        base, ctx.layer, ctx.order = Own(x, root, bias).rows(), layer, order
        if order == "transform":
            ctx.save_for_backward(x, weight, root, bias)
            return autograd.writable(ORDERS[order](x, weight, layer, base))
        rows = joined(x, layer, "pairs")
        ctx.save_for_backward(x, weight, root, bias, rows)
        return autograd.writable(product(rows, weight, layer.found.segments().reduced, base))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, root, bias, *rows = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return (*_by_steps(ctx, (x, weight, root, bias), grad), None, None)
        grad = grad.contiguous()
        given = x, weight, rows[0] if rows else None
        dx, dweight = gradients(given, grad, ctx.layer, ctx.order, needed[:2])
        return (
            None if dx is None else dx.addmm_(grad, root.t()),
            dweight,
            x.t() @ grad if needed[2] else None,
            grad.sum(0) if needed[3] else None,
            None,
            None,
        )


def _by_steps(ctx: Any, given: Sequence[Tensor | None], grad: Tensor) -> list[Tensor | None]:
    """The gradients, of which autograd records derivatives: those of the steps of the layer."""
    x, weight, root, bias = given
    y = ORDERS[ctx.order](x, weight, ctx.layer, Own(x, root, bias).rows())  # pyright: ignore[reportArgumentType]
    wanted = [t for t, needed in zip(given, ctx.needs_input_grad, strict=False) if needed and t is not None]
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:4]]


# Checks


def _check_once(x: Tensor | None, weight: Tensor, graph: Graph, aggr: str, edge_weight: Tensor | None) -> None:
    """Check the operands, of equal calls over one graph the first time only."""
    if torch.compiler.is_compiling() or not isinstance(graph, Graph):
        return _check_operands(x, weight, graph, aggr, edge_weight)
    given = [(t.shape, t.dtype, t.device) if t is not None else None for t in (x, weight, edge_weight)]
    key, seen = (aggr, *given), graph.map.cached("checked", lambda _: set[Hashable]())
    if key not in seen:
        _check_operands(x, weight, graph, aggr, edge_weight)
        seen.add(key)
    if x is not None and not x.is_floating_point():
        lowest, highest = _extent(x)
        if lowest < 0 or highest >= weight.shape[1]:
            raise CoordinateError(f"one-hot nodes are 0 to {weight.shape[1] - 1}, found {lowest} to {highest}")


@cached_per_tensor
def _extent(nodes: Tensor) -> tuple[int, int]:
    """(lowest, highest); read once."""
    return (int(nodes.min()), int(nodes.max())) if len(nodes) else (0, -1)


def _check_order(order: str | None, able: tuple[str, ...]) -> None:
    if order is not None:
        OptionError.check("order", order, able)


def _check_operands(x: Tensor | None, weight: Tensor, graph: Graph, aggr: str, edge_weight: Tensor | None) -> None:
    if not isinstance(graph, Graph):
        raise DtypeError(f"graph is a pumice.Graph, found {type(graph).__name__}")
    OptionError.check("aggr", aggr, AGGREGATIONS)
    onehot, channels = x is None or not x.is_floating_point(), math.prod(weight.shape[1:-1])
    if weight.ndim not in ((3,) if onehot else (3, 4)) or weight.shape[0] != graph.num_relations:
        raise ShapeError(f"weight is [{graph.num_relations}, C_in, C_out], found shape {list(weight.shape)}")
    shape = [channels] if x is None else list(x.shape)
    wanted = [graph.num_sources] if onehot else [graph.num_sources, channels]
    if shape != wanted:
        raise ShapeError(f"x is {wanted} for this graph and weight, found shape {shape}")
    if x is not None and onehot and x.dtype != torch.int64:
        raise DtypeError(f"x is floating point, or int64 of one-hot nodes, found {x.dtype}")
    if x is not None and not onehot and x.dtype != weight.dtype:
        raise DtypeError(f"x is {x.dtype}, weight is {weight.dtype}; convert one, or use torch.autocast")
    for name, given in (("x", x), ("weight", weight), ("edge_weight", edge_weight)):
        if given is not None and given.device != graph.device:
            raise DeviceError(f"{name} is on {given.device}, the graph is on {graph.device}")
    if edge_weight is not None and (
        list(edge_weight.shape) != [graph.num_edges] or not edge_weight.is_floating_point()
    ):
        raise ShapeError(
            f"edge_weight is floats [{graph.num_edges}], found {edge_weight.dtype} {list(edge_weight.shape)}"
        )
