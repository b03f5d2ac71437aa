"""The suite `graph`: R-GCN of two layers against plain PyTorch and PyG, and reductions by an index against torch's.

    relational/GRAPH/16-64-16/fwd          two layers with relu between, also by pm.capture and torch.compile
    relational/GRAPH/16-64-16/fwd+bwd      with the gradients of all, also by pm.capture_step, its update included
    relational/.../memory                  most bytes allocated beyond operands, on a GPU
    segment/sorted/sum/C32                 1,000,000 rows into 50,000 segments

Sources: TorchSparse++ (MICRO 2023), figure 16, for the graphs; Graphiler's R-GCN for 16-64-16. Graphs that are not at
hand are generated (`-like`). Peers: "padded bmm" is batched products of 256 edges of a relation, prepared; "PyG" layers
hold our parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import pumice as pm
from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, measured, summarize
from benchmarks.peers.graphs import Layer, PaddedConv, looped, pyg
from benchmarks.scenes.graphs import LIKE, REAL, Edges, generated, read

SIZES = ((16, 64, 16), (16, 32, 16), (64, 64, 64))
"""Channels of the input, between the layers, and of the output."""
PYG = ("RGCNConv", "FastRGCNConv")
Convs = Sequence[pm.nn.RelationalConv]
Made = tuple[Layer, Sequence[Tensor]]
"""A layer and its parameters."""


def relational(setup: Setup) -> Iterator[Row]:
    """Latency, training and memory of two layers over each graph."""
    done: list[Row] = []
    for name in ("tiny",) if setup.quick else (*REAL, *LIKE):
        edges = _edges(setup, name)
        for sizes in SIZES[:1] if setup.quick or not setup.thorough else SIZES:
            if edges is not None and setup.wants(f"relational/{name}/{'-'.join(map(str, sizes))}"):
                for row in _network(setup, f"relational/{name}/{'-'.join(map(str, sizes))}", edges, sizes):
                    done.append(row)
                    yield row
    for backward in ("fwd", "fwd+bwd"):
        own = [row for row in done if f"/{backward}/" in row.case and row.metric == "time"]
        summarize(setup, own, {"padded bmm": ("padded",), "PyG": ("PyG",)})


def _edges(setup: Setup, name: str) -> Edges | None:
    if name in REAL:
        found = read(name)
        if found is None:
            setup.say(f"PUMICE_DATA/rgcn/{name}.npz is not there")
    else:
        found = generated(*LIKE.get(name, (40, 300, 6)))
    return None if found is None else found.to(setup.device)


def _network(setup: Setup, name: str, edges: Edges, sizes: tuple[int, int, int]) -> Iterator[Row]:
    torch.manual_seed(0)
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    convs = [pm.nn.RelationalConv(a, b, edges.relations).to(setup.device) for a, b in pairs]
    x = setup.random(edges.nodes, sizes[0])
    graph = pm.Graph(edges.index, edges.kinds, num_nodes=edges.nodes, num_relations=edges.relations)
    ways: dict[str, Callable[[pm.nn.RelationalConv], Made]] = {
        "ours": lambda conv: (lambda x: conv(x, graph), [*conv.parameters()]),
        "padded bmm": lambda conv: (PaddedConv(conv, edges), [*conv.parameters()]),
        **{f"PyG {kind}": partial(pyg, kind, edges=edges) for kind in PYG},
    }
    for backward in (False, True):
        case, truth = f"{name}/fwd{'+bwd' * backward}", _exact(convs, edges, x, backward)
        found = [_way(label, make, convs, x, backward) for label, make in ways.items()]
        ours = [found[0], _captured(convs, graph, x, backward), *[_compiled(convs, graph, x)] * (not backward)]
        yield from measured(setup, Case(case, torch.float32, truth), ours, found[1:])


def _way(label: str, make: Callable[..., Made], convs: Convs, x: Tensor, backward: bool) -> Way:
    """Two layers, or the gradients of x and of all parameters."""

    def made() -> Callable[[], Tensor | tuple[Tensor, ...]]:
        (first, own), (second, others) = (make(conv) for conv in convs)
        if not backward:
            return torch.no_grad()(lambda: second(first(x).relu()))
        leaves = [x.clone().requires_grad_(), *own, *others]
        return lambda: torch.autograd.grad(second(first(leaves[0]).relu()).square().mean(), leaves)

    # The gradient of x depends on those of all that follows.
    view = (lambda found: found[0]) if backward else (lambda found: found)
    return Way(label, made, "torch_geometric" if label.startswith("PyG") else "", view)


class _Net(nn.Module):
    """Two layers; the nodes are a parameter."""

    def __init__(self, convs: Convs, x: Tensor) -> None:
        super().__init__()
        self.first, self.second = convs
        self.nodes = nn.Parameter(x.clone())

    def forward(self, graph: pm.Graph) -> Tensor:
        return self.second(self.first(self.nodes, graph).relu(), graph)


def _captured(convs: Convs, graph: pm.Graph, x: Tensor, backward: bool) -> Way:
    """pm.capture; or pm.capture_step, whose update, by a rate of 0, is part of the time."""

    def forward() -> Callable[[], Tensor]:
        fast = pm.capture(_Net(convs, x).eval(), (graph,))
        return lambda: fast(graph)

    def step() -> Callable[[], Tensor]:
        net = _Net(convs, x)
        run = pm.capture_step(net, lambda y: y.square().mean(), torch.optim.SGD(net.parameters(), 0.0), (graph,))

        def call() -> Tensor:
            run((graph,))
            assert net.nodes.grad is not None
            return net.nodes.grad

        return call

    return Way("captured", step if backward else forward)


def _compiled(convs: Convs, graph: pm.Graph, x: Tensor) -> Way:
    """torch.compile of both layers."""

    def made() -> Callable[[], Tensor]:
        net = torch.compile(_Net(convs, x), fullgraph=True)
        graph.prepare()
        return torch.no_grad()(lambda: net(graph))

    return Way("compiled", made, optional=True)


def _exact(convs: Convs, edges: Edges, x: Tensor, backward: bool) -> Tensor:
    """The result, or the gradient of x, in float64."""
    first, second = (copy.deepcopy(conv).double() for conv in convs)
    leaf = x.double().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        y = looped(second, edges, looped(first, edges, leaf).relu())
        return torch.autograd.grad(y.square().mean(), leaf)[0] if backward else y


# Reductions by an index
def segment(setup: Setup) -> Iterator[Row]:
    """Sums and maxima of rows by a sorted or an unsorted index."""
    count, segments = (2_000, 100) if setup.quick else (1_000_000, 50_000)
    for order in ("sorted", "unsorted"):
        index = torch.randint(0, segments, (count,), generator=torch.Generator().manual_seed(0)).to(setup.device)
        index = index.sort().values if order == "sorted" else index
        for channels in (32,) if setup.quick else (1, 32, 128):
            for reduce in ("sum", "mean", "max"):
                case = f"segment/{order}/{reduce}/C{channels}"
                if setup.wants(case):
                    yield from _reduction(setup, case, index, (segments, channels), reduce)


def _reduction(setup: Setup, case: str, index: Tensor, size: tuple[int, int], reduce: str) -> Iterator[Row]:
    segments, channels = size
    x = setup.filled(len(index), channels)
    every, name = index[:, None].expand(-1, channels), {"sum": "sum", "mean": "mean", "max": "amax"}[reduce]
    run = pm.ops.segment_reduce if "/sorted/" in case else pm.ops.scatter
    zeros = x.new_zeros(size)

    def torch_scatter() -> Callable[[], Tensor]:
        found = __import__("torch_scatter").scatter
        return lambda: found(x, index, 0, dim_size=segments, reduce=reduce)

    peers = [
        Way("scatter_reduce", lambda: lambda: zeros.zero_().scatter_reduce_(0, every, x, name, include_self=False)),
        Way("torch_scatter", torch_scatter, "torch_scatter"),
    ]
    if reduce == "sum":
        peers.append(Way("index_add", lambda: lambda: zeros.zero_().index_add_(0, index, x)))
    truth = x.new_zeros(size, dtype=torch.float64).scatter_reduce(0, every, x.double(), name, include_self=False)
    ours = Way("ours", lambda: lambda: run(x, index, dim=0, dim_size=segments, reduce=reduce))
    yield from measured(setup, Case(case, torch.float32, truth), [ours], peers)
