"""Graphs with typed edges, and what layers over them read, built once.

A relation is a kernel offset: edges are the pairs of a coords.MultiMap. Source: TorchSparse++ (MICRO 2023), figure 16.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from pumice.coords import MultiMap
from pumice.coords.box import check_integers
from pumice.errors import CoordinateError, DeviceError, OptionError, ShapeError
from pumice.lower import maps
from pumice.lower.joins import Joins
from pumice.runtime.cache import cached_per_tensor

EdgeType = tuple[str, str, str]


class Graph:
    """Edges src -> dst of relations, checked and sorted once for the layers of graph networks.

    map: coords.MultiMap from source to target nodes, a kernel offset for each relation. order int64 [E]: the edge of
    each of its pairs. types: slices of the nodes of each type in a graph of several. number: of the graph, for
    compiled code."""

    map: MultiMap
    order: Tensor

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
            _check_range(values, size, name)
        self.map, self.order = MultiMap.of((edge_index[0], edge_index[1]), taps, sizes)
        self.types: Mapping[str, slice] = {}
        self._register()

    def _register(self) -> None:
        self.number: int = next(_NUMBERS)
        _GRAPHS[self.number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "number"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._register()

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
            for end, side in zip(edges, (source, target), strict=True):
                _check_range(end, num_nodes[side], f"nodes of {(source, name, target)}")
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
        """Build now what layers otherwise build in their first call, for torch.compile with fullgraph. Returns the
        graph."""
        segments, turned = self.map.segments().reduced, transformed(self.map).reduced
        for by_segment in (False, True):
            weight_rows(self.map, by_segment)
        maps.materialize([(found, maps.names_of(found, True)) for found in (self.map, segments, turned)])
        return self

    def to(self, device: torch.device | str) -> Graph:
        """The graph on another device."""
        found = object.__new__(Graph)
        found.map, found.order, found.types = self.map.to(device), self.order.to(device), self.types
        found._register()
        return found

    def __repr__(self) -> str:
        nodes = f"{self.num_sources} -> {self.num_targets} nodes"
        return f"Graph({nodes}, {self.num_edges} edges, {self.num_relations} relations)"


_NUMBERS = itertools.count()
_GRAPHS: WeakValueDictionary[int, Graph] = WeakValueDictionary()


def graph_of_number(number: int) -> Graph:
    """The graph of this number. Raises OptionError if it is gone."""
    found = _GRAPHS.get(number)
    if found is None:
        raise OptionError(f"there is no graph {number}: compiled code was called without the graph it was compiled for")
    return found


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


class Transformed(NamedTuple):
    """Edges by target. reduced: map from nodes to (source, relation) segments; order: pairs by target; rows, targets:
    the segment and target of each."""

    reduced: MultiMap
    order: Tensor
    rows: Tensor
    targets: Tensor


def transformed(found: MultiMap) -> Transformed:
    """The edges of a graph's map by target, cached with the map."""
    return found.cached("transformed", _transformed)


def _transformed(found: Any) -> Transformed:
    turned = found.transpose().segments()
    targets, order = found.pairs().outputs[turned.order].sort(stable=True)
    return Transformed(turned.reduced.transpose(), turned.order[order], turned.segments[order], targets)


class WeightRows(NamedTuple):
    """Edges, or (target, relation) segments, by target. order: their places; rows: those of the weight, or segments;
    targets: of each; segments: rows of the weight of edges in the order of segments."""

    order: Tensor
    rows: Tensor
    targets: Tensor
    segments: Tensor


def weight_rows(found: MultiMap, by_segment: bool) -> WeightRows:
    """The rows of a weight that one-hot nodes add to each target, cached with the map."""
    return found.cached(("rows", by_segment), lambda m: _weight_rows(m, by_segment))


def _weight_rows(found: Any, by_segment: bool) -> WeightRows:
    inputs, targets, _ = found.pairs()
    places = found.taps() * found.num_inputs + inputs
    rows = places
    if by_segment:
        targets = found.segments().reduced.pairs().outputs
        rows = torch.arange(len(targets), device=targets.device)
    targets, order = targets.sort(stable=True)
    return WeightRows(order, rows[order], targets, places)


def share_of(found: MultiMap, order: tuple[str, Tensor], dtype: torch.dtype) -> Tensor:
    """1 / the number of edges of each pair's target and relation, cached with the map. order: (name, pairs)."""
    name, pairs = order
    return found.cached(("share", name, dtype), lambda m: _share(m)[pairs].to(dtype))


def _share(found: Any) -> Tensor:
    """float64 [E], in the order of pairs."""
    _, _, segments, sizes, _ = found.segments()
    return (1 / sizes.double())[segments]


def joins_of(found: MultiMap, name: str, mean: bool) -> Joins:
    """The entries of one of JOINS as kernels read them, cached with the map. mean: with the factors of a mean."""
    return found.cached(("joins", name, mean), lambda m: _joins(m, name, mean))


def _joins(found: Any, name: str, mean: bool) -> Joins:
    order, inputs, outputs, sizes = JOINS[name](found)
    return Joins.of(inputs, outputs, sizes, share_of(found, (name, order), torch.float32) if mean else None)


Ends = tuple[Tensor, Tensor, Tensor, tuple[int, int]]
"""(pairs of the entries, their rows, their results in ascending order, number of rows and of results)."""


def _by_segment(found: MultiMap) -> Ends:
    """Nodes to (target, relation) segments."""
    own = found.segments()
    return own.order, own.inputs, own.segments, (found.num_inputs, len(own.sizes))


def _by_target(found: MultiMap) -> Ends:
    """(source, relation) segments to targets."""
    own = transformed(found)
    return own.order, own.rows, own.targets, (own.reduced.num_outputs, found.num_outputs)


def _rows_by_target(found: MultiMap) -> Ends:
    """Rows of the weight to targets."""
    own = weight_rows(found, False)
    return own.order, own.rows, own.targets, (found.volume * found.num_inputs, found.num_outputs)


def _rows_by_segment(found: MultiMap) -> Ends:
    """Rows of the weight to (target, relation) segments."""
    own, segments = weight_rows(found, True), found.segments()
    return segments.order, own.segments, segments.segments, (found.volume * found.num_inputs, len(segments.sizes))


def _segments_by_target(found: MultiMap) -> Ends:
    """(target, relation) segments to targets."""
    own = weight_rows(found, True)
    return own.order, own.rows, own.targets, (len(own.rows), found.num_outputs)


JOINS = {
    "pairs": _by_segment,
    "transformed": _by_target,
    "rows": _rows_by_target,
    "rows by segment": _rows_by_segment,
    "segments": _segments_by_target,
}
"""Joins of rows that layers compute, by name."""


# Checks


def _checked_edges(edge_index: Tensor, edge_type: Tensor | None) -> Tensor:
    """The relations of the edges, after checks of dtypes, shapes and devices."""
    given = {"edge_index": edge_index} | ({} if edge_type is None else {"edge_type": edge_type})
    for name, x in given.items():
        check_integers(x, name)
    if edge_index.ndim != 2 or len(edge_index) != 2:
        raise ShapeError(f"edge_index is [2, E], found shape {list(edge_index.shape)}")
    if edge_type is None:
        return edge_index.new_zeros(edge_index.shape[1], dtype=torch.int64)
    if edge_type.shape != edge_index.shape[1:]:
        raise ShapeError(f"edge_type is [{edge_index.shape[1]}], one for each edge, found {list(edge_type.shape)}")
    if edge_type.device != edge_index.device:
        raise DeviceError(f"edge_type is on {edge_type.device}, edge_index is on {edge_index.device}")
    return edge_type


def _check_range(values: Tensor, size: int, name: str) -> None:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= size):
        raise CoordinateError(f"{name} are 0 to {size - 1}, found {int(values.min())} to {int(values.max())}")
