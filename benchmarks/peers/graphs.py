"""R-GCN layers of others: padded batched products in plain PyTorch, and PyG's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.scenes.graphs import Edges
from pumice.nn import RelationalConv

GROUP = 256  # Edges of a relation per batched product
Layer = Callable[[Tensor], Tensor]


class PaddedConv(nn.Module):
    """The layer as one batched product of groups of edges of one relation, padded, then index_add; prepared."""

    def __init__(self, like: RelationalConv, edges: Edges) -> None:
        super().__init__()
        self.like, self.nodes, device = like, edges.nodes, edges.index.device
        order = edges.kinds.argsort(stable=True)
        sizes = torch.bincount(edges.kinds, minlength=edges.relations)
        groups = -(-sizes // GROUP)
        self.kinds = torch.repeat_interleave(torch.arange(edges.relations, device=device), groups)
        shift = (groups.cumsum(0) - groups) * GROUP - (sizes.cumsum(0) - sizes)
        slots = torch.arange(len(order), device=device) + shift[edges.kinds[order]]
        total = len(self.kinds) * GROUP
        self.sources = torch.zeros(total, dtype=torch.int64, device=device)
        # Padding is added to one more row.
        self.targets = torch.full((total,), edges.nodes, dtype=torch.int64, device=device)
        self.sources[slots], self.targets[slots] = edges.index[0][order], edges.index[1][order]
        self.share = torch.zeros(total, 1, device=device)
        self.share[slots, 0] = degree_share(edges)[order]

    def forward(self, x: Tensor) -> Tensor:
        layer, channels = self.like, self.like.weight.shape[2]
        rows = torch.bmm(x[self.sources].view(-1, GROUP, x.shape[1]), layer.weight[self.kinds])
        rows = rows.view(-1, channels) * self.share.to(x.dtype)
        y = x.new_zeros(self.nodes + 1, channels).index_add(0, self.targets, rows)[:-1]
        return y + of_itself(layer, x)


def of_itself(layer: RelationalConv, x: Tensor) -> Tensor:
    """What a node adds to its own result."""
    assert layer.root is not None and layer.bias is not None
    return x @ layer.root + layer.bias


def degree_share(edges: Edges) -> Tensor:
    """[E]: 1 / the number of edges of each edge's target and relation."""
    keys = edges.index[1] * edges.relations + edges.kinds
    _, own, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    return 1 / counts[own].float()


def pyg(name: str, like: RelationalConv, edges: Edges) -> tuple[Layer, list[nn.Parameter]]:
    """A layer of torch_geometric.nn with our parameters, and its copies of these. Raises ModuleNotFoundError
    without it."""
    kind = getattr(import_module("torch_geometric.nn"), name)
    inner = like.in_channels
    layer = kind(inner, like.out_channels, like.num_relations).to(like.weight.device, like.weight.dtype)
    layer.load_state_dict(like.state_dict())
    return lambda x: layer(x, edges.index, edges.kinds), [*layer.parameters()]


def looped(like: RelationalConv, edges: Edges, x: Tensor) -> Tensor:
    """The layer by a loop over the relations."""
    share, y = degree_share(edges).to(x.dtype)[:, None], of_itself(like, x)
    for kind, own in enumerate(edges.kinds.argsort(stable=True).split(sizes_of(edges))):
        met = x.new_zeros(edges.nodes, x.shape[1]).index_add(
            0, edges.index[1][own], x[edges.index[0][own]] * share[own]
        )
        y = y + met @ like.weight[kind]
    return y


def sizes_of(edges: Edges) -> list[int]:
    """The number of edges of each relation."""
    return torch.bincount(edges.kinds, minlength=edges.relations).tolist()
