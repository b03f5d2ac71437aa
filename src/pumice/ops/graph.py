"""Graphs with typed edges, and the relational graph convolution over them.

    y[o, n] = sum over relations k of  (join over edges i -> o of relation k of x[i, c]) * w[k, c, n]

A relation is a kernel offset: edges are the pairs of a coords.MultiMap. Source: Schlichtkrull et al., "Modeling
Relational Data with Graph Convolutional Networks", ESWC 2018, equation 2; TorchSparse++ (MICRO 2023), figure 16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import MultiMap
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError
from pumice.lower import maps
from pumice.ops import autograd
from pumice.ops.conv import autocast_dtype, conv_features
from pumice.runtime.cache import cached_per_tensor
from pumice.schedule.predict import DEVICES, Work, seconds

EdgeType = tuple[str, str, str]
AGGREGATIONS = ("mean", "sum", "max")
_JOINED = "H[s[e],c] {} X[i[e],c]{} ; s:sorted"
_JOINS = {"sum": "=", "max": "max="}  # A mean is a sum with weights: kernels on a GPU compute sums


class Graph:
    """Edges src -> dst of relations, checked and sorted once for the layers of graph networks.

    map: coords.MultiMap from source to target nodes, a kernel offset for each relation. order int64 [E]: the edge of
    each of its pairs. types: slices of the nodes of each type in a graph of several."""

    def __init__(
        self,
        edge_index: Tensor,
        edge_type: Tensor | None = None,
        *,
        num_nodes: int | tuple[int, int] | None = None,
        num_relations: int | None = None,
    ) -> None:
        """edge_index: int [2, E], sources and targets; edge_type: int [E], 0 without. num_nodes: of both sides, or
        (sources, targets) of a bipartite graph; default: the highest + 1. num_relations: default: the highest type + 1.

        Raises DtypeError, ShapeError, DeviceError, and CoordinateError for nodes or types out of range."""
        taps = _checked_edges(edge_index, edge_type)
        most = [int(x.max()) + 1 if len(x) else 0 for x in (*edge_index, taps)]
        both = num_nodes if isinstance(num_nodes, tuple) else (max(most[:2]) if num_nodes is None else num_nodes,) * 2
        sizes = both[0], both[1], most[2] if num_relations is None else num_relations
        for name, values, size in zip(("sources", "targets", "types"), (*edge_index, taps), sizes, strict=True):
            if len(values) and (int(values.min()) < 0 or int(values.max()) >= size):
                raise CoordinateError(f"{name} are 0 to {size - 1}, found {int(values.min())} to {int(values.max())}")
        self.map, self.order = MultiMap.of((edge_index[0], edge_index[1]), taps, sizes)
        self.types: Mapping[str, slice] = {}

    @staticmethod
    def of_types(edge_index: Mapping[EdgeType, Tensor], num_nodes: Mapping[str, int]) -> Graph:
        """The graph of several types of nodes, as HeteroData has it: a relation for each (source type, name, target
        type), in the order of `edge_index`; nodes are numbered type by type, in the order of `num_nodes`."""
        if not edge_index:
            raise OptionError("edge_index has no relation")
        ends = dict(zip(num_nodes, torch.tensor([0, *num_nodes.values()]).cumsum(0).tolist(), strict=False))
        unknown = {end for source, _, target in edge_index for end in (source, target)} - ends.keys()
        if unknown:
            raise OptionError(f"num_nodes has no {', '.join(sorted(unknown))}; it has {', '.join(num_nodes)}")
        whole, kinds = [], []
        for kind, ((source, name, target), edges) in enumerate(edge_index.items()):
            own = _checked_edges(edges, None) + kind
            _check_types(edges, (num_nodes[source], num_nodes[target]), (source, name, target))
            whole.append(edges + torch.tensor([[ends[source]], [ends[target]]], device=edges.device))
            kinds.append(own)
        sizes = {"num_nodes": sum(num_nodes.values()), "num_relations": len(edge_index)}
        found = Graph(torch.cat(whole, 1), torch.cat(kinds), **sizes)
        found.types = {name: slice(ends[name], ends[name] + count) for name, count in num_nodes.items()}
        return found

    @property
    def num_sources(self) -> int:
        return self.map.num_inputs

    @property
    def num_targets(self) -> int:
        return self.map.num_outputs

    @property
    def num_relations(self) -> int:
        return self.map.volume

    @property
    def num_edges(self) -> int:
        return len(self.order)

    @property
    def device(self) -> torch.device:
        return self.map.device

    def prepare(self) -> Graph:
        """Build now what layers otherwise build in their first call: for torch.compile with fullgraph, and before the
        capture of a CUDA graph. Returns the graph."""
        segments, turned = self.map.segments().reduced, self.map.cached("transformed", _transformed).reduced
        for by_segment in (False, True):
            self.map.cached(("rows", by_segment), lambda m, by_segment=by_segment: _rows(m, by_segment))
        maps.materialize([(found, maps.names_of(found, True)) for found in (self.map, segments, turned)])
        return self

    def to(self, device: torch.device | str) -> Graph:
        """The graph on another device."""
        found = object.__new__(Graph)
        found.map, found.order, found.types = self.map.to(device), self.order.to(device), self.types
        return found

    def __repr__(self) -> str:
        nodes = f"{self.num_sources} -> {self.num_targets} nodes"
        return f"Graph({nodes}, {self.num_edges} edges, {self.num_relations} relations)"


def ends_of(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    """The sources and the targets of edges: outside torch.compile the same tensors in every call, for what is cached
    with them."""
    return (edge_index[0], edge_index[1]) if torch.compiler.is_compiling() else _ends(edge_index)


@cached_per_tensor
def _ends(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    return edge_index[0].clone(), edge_index[1].clone()


@cached_per_tensor
def graph_of(edge_index: Tensor, edge_type: Tensor | None, num_nodes: tuple[int, int], num_relations: int) -> Graph:
    """The graph of these tensors, cached until one is written or freed."""
    return Graph(edge_index, edge_type, num_nodes=num_nodes, num_relations=num_relations)


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
    weight and edge_weight; sums are in float32 at least.
    Raises OptionError, ShapeError, DtypeError, DeviceError.
    """
    if (dtype := autocast_dtype(weight)) is not None:
        x, weight = x.to(dtype) if x is not None and x.is_floating_point() else x, weight.to(dtype)
    _check_operands(x, weight, graph, aggr, edge_weight)
    scale = None if edge_weight is None else edge_weight[graph.order].to(weight.dtype)
    if x is None or not x.is_floating_point():
        return _embedded(weight if x is None else weight.index_select(1, x), graph, aggr, scale)
    able = ["aggregate", *["transform"] * (aggr != "max"), *["direct"] * (aggr == "sum" and scale is None)]
    if order is None:
        order = _cheapest(x, weight, graph, tuple(able))
    if order not in able:
        raise OptionError(f"order is one of {', '.join(able)} for this aggregation, found {order!r}")
    return ORDERS[order](x, weight, graph, aggr, scale)


# Orders of aggregation and transformation


def _aggregate_first(x: Tensor, weight: Tensor, graph: Graph, aggr: str, scale: Tensor | None) -> Tensor:
    """Join the inputs of each (target, relation), then one product for each."""
    found = graph.map.segments()
    if aggr != "max":
        scale = _shared(graph, aggr, scale, x.dtype, ("pairs", found.order))
    joined = _joined(x, (found.inputs, found.segments), len(found.sizes), scale, "max" if aggr == "max" else "sum")
    return _product(joined, weight, found.reduced)


def _transform_first(x: Tensor, weight: Tensor, graph: Graph, aggr: str, scale: Tensor | None) -> Tensor:
    """One product for each (source, relation), then join the results of each target."""
    found = graph.map.cached("transformed", _transformed)
    rows = _product(x, weight, found.reduced)
    scale = _shared(graph, aggr, scale, x.dtype, ("transformed", found.order))
    return _joined(rows, (found.rows, found.targets), graph.num_targets, scale)


def _direct(x: Tensor, weight: Tensor, graph: Graph, aggr: str, scale: Tensor | None) -> Tensor:
    """A product for each edge, gathered and scattered within one kernel."""
    return _product(x, weight, graph.map)


ORDERS = {"aggregate": _aggregate_first, "transform": _transform_first, "direct": _direct}
"""Orders of the steps of `relational_conv`."""


def _product(x: Tensor, weight: Tensor, found: MultiMap) -> Tensor:
    """Sum over pairs (i, o) of offset k of x[i] * weight[k]."""
    if weight.ndim == 3:
        return conv_features(x, weight.permute(2, 0, 1), found, found.num_outputs)
    relations, groups, inner, outer = weight.shape
    filters = weight.permute(1, 3, 0, 2).reshape(groups * outer, relations, inner)
    return conv_features(x, filters, found, found.num_outputs, groups)


def _joined(x: Tensor, ends: tuple[Tensor, Tensor], count: int, scale: Tensor | None, join: str = "sum") -> Tensor:
    """h[s[e], c] = join of x[i[e], c] * scale[e]. ends: (i, s), s ascending."""
    more = [] if scale is None else [scale]
    text = _JOINED.format(_JOINS[join], " * V[e]" * len(more))
    return autograd.einsum([x, *ends, *more], "X|i|s" + "|V" * len(more), text, (count, x.shape[1]))


class _Transformed(NamedTuple):
    """Edges by target. reduced: map from nodes to (source, relation) segments; order: pairs by target; rows, targets:
    the segment and target of each."""

    reduced: MultiMap
    order: Tensor
    rows: Tensor
    targets: Tensor


def _transformed(found: Any) -> _Transformed:
    turned = found.transpose().segments()
    targets, order = found.pairs().outputs[turned.order].sort(stable=True)
    return _Transformed(turned.reduced.transpose(), turned.order[order], turned.segments[order], targets)


def _embedded(weight: Tensor, graph: Graph, aggr: str, scale: Tensor | None) -> Tensor:
    """One-hot nodes: a product is a row of the weight."""
    rows, found = (
        weight.reshape(-1, weight.shape[2]),
        graph.map.cached(("rows", aggr == "max"), lambda m: _rows(m, aggr == "max")),
    )
    if aggr == "max":
        segments = graph.map.segments()
        rows = _joined(rows, (found.segments, segments.segments), len(segments.sizes), scale, "max")
        scale = None
    scale = _shared(graph, aggr, scale, weight.dtype, ("rows", found.order))
    return _joined(rows, (found.rows, found.targets), graph.num_targets, scale)


class _Rows(NamedTuple):
    """Edges, or (target, relation) segments, by target. order: their places; rows: those of the weight, or segments;
    targets: of each; segments: rows of the weight of edges in the order of segments."""

    order: Tensor
    rows: Tensor
    targets: Tensor
    segments: Tensor


def _rows(found: Any, by_segment: bool) -> _Rows:
    inputs, targets, _ = found.pairs()
    places = found.taps() * found.num_inputs + inputs
    rows = places
    if by_segment:
        targets = found.segments().reduced.pairs().outputs
        rows = torch.arange(len(targets), device=targets.device)
    targets, order = targets.sort(stable=True)
    return _Rows(order, rows[order], targets, places)


def _shared(
    graph: Graph, aggr: str, scale: Tensor | None, dtype: torch.dtype, order: tuple[str, Tensor]
) -> Tensor | None:
    """The factors of messages, with those of a mean. order: (name, pairs)."""
    name, pairs = order
    own = None if scale is None else scale[pairs]
    if aggr != "mean":
        return own
    share = graph.map.cached(("share", name, dtype), lambda m: _share(m)[pairs].to(dtype))
    return share if own is None else share * own


def _share(found: Any) -> Tensor:
    """float64 [E]: 1 / the number of edges of each pair's target and relation."""
    _, _, segments, sizes, _ = found.segments()
    return (1 / sizes.double())[segments]


def _cheapest(x: Tensor, weight: Tensor, graph: Graph, able: tuple[str, ...]) -> str:
    """The order of least estimated time."""
    if len(able) == 1:
        return able[0]
    shape, size = tuple(weight.shape), x.element_size()
    costs = graph.map.cached(("costs", shape, size), lambda m: _costs(m, shape, size))
    return min(able, key=costs.__getitem__)


def _costs(found: Any, shape: tuple[int, ...], size: int) -> Mapping[str, float]:
    """Estimated seconds of each order. shape: of the weight; size: bytes of a value."""
    inner, outer, groups = shape[-2], shape[-1], 1 if len(shape) == 3 else shape[1]
    edges, targets, device = len(found.table), found.num_outputs, DEVICES.get(found.device.type, DEVICES["cpu"])
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


# Checks


def _checked_edges(edge_index: Tensor, edge_type: Tensor | None) -> Tensor:
    """The relations of the edges, after checks of dtypes, shapes and devices."""
    for name, x in (("edge_index", edge_index), ("edge_type", edge_type)):
        if x is not None and (not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64)):
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DtypeError(f"{name} is an int32 or int64 tensor, found {found}")
    if edge_index.ndim != 2 or len(edge_index) != 2:
        raise ShapeError(f"edge_index is [2, E], found shape {list(edge_index.shape)}")
    if edge_type is None:
        return edge_index.new_zeros(edge_index.shape[1], dtype=torch.int64)
    if edge_type.shape != edge_index.shape[1:]:
        raise ShapeError(f"edge_type is [{edge_index.shape[1]}], one for each edge, found {list(edge_type.shape)}")
    if edge_type.device != edge_index.device:
        raise DeviceError(f"edge_type is on {edge_type.device}, edge_index is on {edge_index.device}")
    return edge_type


def _check_types(edges: Tensor, sizes: tuple[int, int], name: EdgeType) -> None:
    for end, size in zip(edges, sizes, strict=True):
        if len(end) and (int(end.min()) < 0 or int(end.max()) >= size):
            raise CoordinateError(f"nodes of {name} are 0 to {size - 1}, found {int(end.min())} to {int(end.max())}")


def _check_operands(x: Tensor | None, weight: Tensor, graph: Graph, aggr: str, edge_weight: Tensor | None) -> None:
    if not isinstance(graph, Graph):
        raise DtypeError(f"graph is a pumice.Graph, found {type(graph).__name__}")
    if aggr not in AGGREGATIONS:
        raise OptionError(f"aggr is one of {', '.join(AGGREGATIONS)}, found {aggr!r}")
    onehot, channels = x is None or not x.is_floating_point(), math.prod(weight.shape[1:-1])
    if weight.ndim not in ((3,) if onehot else (3, 4)) or weight.shape[0] != graph.num_relations:
        raise ShapeError(f"weight is [{graph.num_relations}, C_in, C_out], found shape {list(weight.shape)}")
    shape = [channels] if x is None else list(x.shape)
    wanted = [graph.num_sources] if onehot else [graph.num_sources, channels]
    if shape != wanted:
        raise ShapeError(f"x is {wanted} for this graph and weight, found shape {shape}")
    if x is not None and onehot and (x.dtype != torch.int64 or (len(x) and not 0 <= x.min() <= x.max() < channels)):
        raise CoordinateError(f"one-hot nodes are int64, 0 to {channels - 1}")
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
