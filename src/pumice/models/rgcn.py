"""R-GCN, a network of two relational graph convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from pumice.nn import RelationalConv
from pumice.ops import Graph


class RGCN(nn.Module):
    """y = conv2(dropout(relu(conv1(x)))): scores of each node.

    in_channels: channels of the nodes, or their number if they have no features (x=None). Other arguments as of
    pumice.nn.RelationalConv, for both layers.

    Source: Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks", ESWC 2018, section 3.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        num_relations: int,
        num_bases: int | None = None,
        aggr: str = "mean",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1: RelationalConv = RelationalConv(in_channels, hidden, num_relations, num_bases, aggr=aggr)
        self.conv2: RelationalConv = RelationalConv(hidden, out_channels, num_relations, num_bases, aggr=aggr)
        self.dropout: nn.Dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor | None, edges: Tensor | Graph, edge_type: Tensor | None = None) -> Tensor:
        """[nodes, out_channels]. x: [nodes, in_channels] or None; edges: a Graph, or edge_index with edge_type."""
        return self.conv2(self.dropout(self.conv1(x, edges, edge_type).relu()), edges, edge_type)
