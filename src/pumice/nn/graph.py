"""Layers over graphs with typed edges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pumice.coords import as_axes
from pumice.errors import OptionError, ShapeError
from pumice.ops import Graph
from pumice.ops.graph import EdgeType, graph_of
from pumice.ops.relational import AGGREGATIONS, Own, convolved

Nodes = Tensor | None | tuple[Tensor | None, Tensor | None]


class RelationalConv(nn.Module):
    """Relational graph convolution (R-GCN), with the parameters of torch_geometric.nn.RGCNConv and FastRGCNConv.

        y[o] = x[o] @ root + bias + sum over relations k of (join over edges i -> o of relation k of x[i]) @ weight[k]

    in_channels: of the nodes, or of (sources, targets) in a bipartite graph; the number of nodes if these have no
    features. num_bases: weight[k] = sum over b of comp[k, b] * weight[b]. num_blocks: weight[k] is block-diagonal.
    aggr: "mean" over the edges of a node and relation, "sum" or "max".

    Parameters: weight [num_relations, C_in, C_out], [num_bases, C_in, C_out] with comp [num_relations, num_bases], or
    [num_relations, B, C_in / B, C_out / B]; root [C_in, C_out], bias [C_out]. Raises OptionError and ShapeError.

    order: how the layer computes, a name of pumice.ops.relational.ORDERS, set by hand or by pumice.tune; None: by the
    cost model.

    Source: Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", ESWC 2018, eq. 2 to 4.
    """

    in_channels: tuple[int, int] | int
    out_channels: int
    num_relations: int
    num_bases: int | None
    num_blocks: int | None

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        num_blocks: int | None = None,
        aggr: str = "mean",
        root_weight: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        inner, own = in_channels if isinstance(in_channels, tuple) else (in_channels, in_channels)
        counts = {"in_channels": inner, "out_channels": out_channels, "num_relations": num_relations}
        for name, number in {**counts, "num_bases": num_bases, "num_blocks": num_blocks}.items():
            if number is not None or name in counts:
                as_axes(number, 1, name, 1)
        if num_bases is not None and num_blocks is not None:
            raise OptionError("give one of num_bases and num_blocks")
        OptionError.check("aggr", aggr, AGGREGATIONS)
        if num_blocks is not None and (inner % num_blocks or out_channels % num_blocks):
            raise ShapeError(f"num_blocks={num_blocks} divides C_in={inner} and C_out={out_channels}")
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks = num_bases, num_blocks
        self.aggr: str = aggr
        self.order: str | None = None
        blocks = 1 if num_blocks is None else num_blocks
        shape = (inner, out_channels) if num_blocks is None else (blocks, inner // blocks, out_channels // blocks)
        self.weight: nn.Parameter = nn.Parameter(torch.empty(num_relations if num_bases is None else num_bases, *shape))
        if num_bases is not None:
            self.comp: nn.Parameter = nn.Parameter(torch.empty(num_relations, num_bases))
        self.root: nn.Parameter | None = nn.Parameter(torch.empty(own, out_channels)) if root_weight else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform initialisation of matrices, a bias of 0."""
        for name, values in self.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(values)
            else:
                bound = math.sqrt(6 / (values.shape[-2] + values.shape[-1]))
                nn.init.uniform_(values, -bound, bound)

    def forward(
        self,
        x: Nodes | Mapping[str, Tensor],
        edges: Tensor | Graph | Mapping[EdgeType, Tensor],
        edge_type: Tensor | None = None,
        edge_weight: Tensor | None = None,
    ) -> Any:
        """[targets, C_out]; by type of nodes if x is.

        x: [nodes, C_in]; None: one-hot nodes; int64 [nodes]: one-hot nodes with these numbers; (sources, targets) in a
        bipartite graph; a dict by type of nodes. edges: a prepared Graph, or edge_index [2, E] with edge_type [E], of
        which the graph is cached; for a dict of nodes also edge_index by (source, name, target). edge_weight: [E].
        Raises as pumice.ops.relational_conv."""
        if isinstance(x, Mapping):
            return self._over_types(x, edges, edge_weight)
        sources, targets = x if isinstance(x, tuple) else (x, x)
        graph = edges if isinstance(edges, Graph) else self._graph(sources, targets, edges, edge_type)
        bias, root = self.bias, self.root
        own = None if root is None else Own(targets, root, bias)
        y = convolved(sources, self._weights(), graph, (self.aggr, edge_weight, self.order), own)
        return y if bias is None or root is not None else y + bias.to(y.dtype)

    def _weights(self) -> Tensor:
        if self.num_bases is None:
            return self.weight
        return (self.comp @ self.weight.flatten(1)).view(self.num_relations, *self.weight.shape[1:])

    def _graph(
        self, sources: Tensor | None, targets: Tensor | None, edge_index: Any, edge_type: Tensor | None
    ) -> Graph:
        sizes = self.in_channels if isinstance(self.in_channels, tuple) else (self.in_channels,) * 2
        counts = [n if x is None else len(x) for x, n in zip((sources, targets), sizes, strict=True)]
        return graph_of(edge_index, edge_type, (counts[0], counts[1]), self.num_relations)

    def _over_types(self, x: Mapping[str, Tensor], edges: Any, edge_weight: Tensor | None) -> dict[str, Tensor]:
        graph = (
            edges if isinstance(edges, Graph) else Graph.of_types(edges, {name: len(own) for name, own in x.items()})
        )
        if [(name, len(own)) for name, own in x.items()] != [(n, s.stop - s.start) for n, s in graph.types.items()]:
            raise ShapeError(f"x is by types of nodes as the graph: {dict(graph.types)}, found {list(x)}")
        y = self.forward(torch.cat([*x.values()]), graph, None, edge_weight)
        return {name: y[own] for name, own in graph.types.items()}

    def extra_repr(self) -> str:
        how = f", num_bases={self.num_bases}" if self.num_bases else f", num_blocks={self.num_blocks}"
        how = how if self.num_bases or self.num_blocks else ""
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}{how}, aggr={self.aggr!r}"
