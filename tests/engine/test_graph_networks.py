"""Networks over graphs under pm.compile, pm.capture, pm.capture_step and pm.tune; a CPU records no CUDA graphs."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import pumice as pm
from pumice.engine import graph_tuning
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.schedule import tuned_orders

NODES, RELATIONS, EDGES = 30, 4, 120


def made(seed=0, nodes=NODES, edges=EDGES):
    chance = torch.Generator().manual_seed(seed)
    index = torch.randint(0, max(1, nodes - 1), (2, edges), generator=chance)
    kinds = torch.randint(0, RELATIONS - 1, (edges,), generator=chance)
    return pm.Graph(index, kinds, num_nodes=nodes, num_relations=RELATIONS)


@dataclass
class Timing:
    total: float


class Mixed(nn.Module):
    """Layers of graphs among operators of torch."""

    def __init__(self, aggr="mean"):
        super().__init__()
        self.first = pm.nn.RelationalConv(6, 8, RELATIONS, num_bases=2, aggr=aggr)
        self.norm = nn.LayerNorm(8)
        self.second = pm.nn.RelationalConv(8, 5, RELATIONS, num_blocks=1, aggr=aggr)

    def forward(self, x, graph, edge_weight=None):
        y = functional.gelu(self.norm(self.first(x, graph, edge_weight=edge_weight)))
        return self.second(torch.cat([y[:, :4], y[:, 4:]], 1), graph) * 2


GRAPHS = {"usual": made(), "no edges": made(edges=0), "one node": made(nodes=1, edges=3)}


WAYS = [(name, aggr, way) for name in GRAPHS for aggr in ("mean", "sum", "max") for way in ("compile", "capture")]
WAYS += [("usual", "mean", "torch.compile"), ("no edges", "max", "torch.compile"), ("one node", "sum", "torch.compile")]


@pytest.mark.parametrize(("name", "aggr", "way"), WAYS)
def test_inference(name, aggr, way):
    torch.compiler.reset()
    graph, net = GRAPHS[name].prepare(), Mixed(aggr).eval()
    x = torch.randn(graph.num_sources, 6)
    run = {
        "compile": lambda: pm.compile(net),
        "capture": lambda: pm.capture(net, (torch.zeros_like(x), graph)),
        "torch.compile": lambda: torch.compile(net, backend="aot_eager", fullgraph=True),
    }[way]()
    with torch.no_grad():
        torch.testing.assert_close(run(x, graph), net(x, graph))
        net.first.weight.mul_(2)
        torch.testing.assert_close(run(x, graph), net(x, graph))


@pytest.mark.parametrize("compiled", [pm.compile, partial(torch.compile, fullgraph=True, backend="aot_eager")])
def test_training(compiled):
    torch.compiler.reset()
    graph, net = made().prepare(), pm.models.RGCN(6, 8, 5, RELATIONS)
    other = copy.deepcopy(net)
    x = torch.randn(NODES, 6)
    compiled(net)(x, graph).square().mean().backward()
    other(x, graph).square().mean().backward()
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_other_graphs_and_arguments_of_a_captured_network():
    net = Mixed().eval()
    graph, x = made(), torch.randn(NODES, 6)
    fast = pm.capture(net, (x, graph))
    with torch.no_grad():
        for other in (made(1), made(2, 20, 50)):
            given = torch.randn(other.num_sources, 6)
            torch.testing.assert_close(fast(given, other), net(given, other))
    assert "CPU" in fast.explain()
    weighted = pm.capture(net, (x, graph, torch.ones(EDGES)))
    scale = torch.rand(EDGES)
    torch.testing.assert_close(weighted(x, graph, scale), net(x, graph, scale))
    onehot = pm.models.RGCN(NODES, 8, 3, RELATIONS).eval()
    torch.testing.assert_close(pm.capture(onehot, (None, graph))(None, graph), onehot(None, graph))


def test_what_a_captured_network_refuses():
    net, graph, x = Mixed().eval(), made(), torch.randn(NODES, 6)
    fast = pm.capture(net, (x, graph))
    edges = torch.zeros(2, 4, dtype=torch.int64)
    for error, call in (
        (DtypeError, lambda: pm.capture(net, (x, edges))),
        (DtypeError, lambda: pm.capture(net, x)),
        (OptionError, lambda: pm.capture(net, (x, graph), max_voxels=4)),
        (OptionError, lambda: pm.capture(Mixed(), (x, graph))),
        (OptionError, lambda: pm.capture(net.forward, (x, graph))),
        (DtypeError, lambda: fast(x, edges)),
        (DtypeError, lambda: fast(x)),
        (DtypeError, lambda: fast(x.double(), graph)),
        (ShapeError, lambda: fast(x[:, :4], graph)),
        (ShapeError, lambda: fast(x[:4], graph)),
        (DtypeError, lambda: fast(None, graph)),
    ):
        with pytest.raises(error):
            call()
    net.train()
    with pytest.raises(OptionError, match="training mode"):
        fast(x, graph)


def test_a_captured_step():
    torch.manual_seed(0)
    graph, net = made(), pm.models.RGCN(NODES, 8, 3, RELATIONS)
    other, labels = copy.deepcopy(net), torch.arange(NODES) % 3
    mine, theirs = (torch.optim.Adam(each.parameters(), 0.05, capturable=False) for each in (net, other))
    step = pm.capture_step(net, functional.cross_entropy, mine, (None, graph), labels)
    for _ in range(3):
        theirs.zero_grad()
        wanted = functional.cross_entropy(other(None, graph), labels)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(step((None, graph), labels), wanted.detach())
    for ours, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    with pytest.raises(OptionError, match="scalar"):
        pm.capture_step(net, lambda y, _: y, mine, (None, graph), labels)((None, graph), labels)
    with pytest.raises(OptionError, match="clip"):
        pm.capture_step(net, functional.cross_entropy, mine, (None, graph), labels, clip=1.0)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_orders_are_tuned_and_kept(mode, monkeypatch, tmp_path):
    store = tuned_orders.Store(tmp_path / "orders.json", tuned_orders.ORDERS)
    monkeypatch.setattr(graph_tuning, "orders", lambda: store)
    times = {"aggregate": 3.0, "transform": 1.0, None: 2.0}
    net, graph = Mixed(), made()
    monkeypatch.setattr(
        graph_tuning.PassTimer, "measure", lambda *_: Timing(times[net.first.order] + times[net.second.order])
    )
    found = pm.tune(net, [(torch.randn(NODES, 6), graph)], mode)
    assert found.orders == {"first": "transform", "second": "transform"} and net.first.order == "transform"
    assert (found.before, found.after, found.reused) == (4.0, 2.0, False) and "transform" in str(found)
    other = Mixed()
    assert pm.tune(other, [(torch.randn(NODES, 6), made(3))], mode).reused and other.second.order == "transform"
    found.remove(other)
    assert other.first.order is None
    assert not net.first._forward_pre_hooks


def test_what_tuning_over_graphs_refuses():
    net, graph, x = Mixed(), made(), torch.randn(NODES, 6)
    onehot = pm.models.RGCN(NODES, 8, 3, RELATIONS)
    for error, call in (
        (OptionError, lambda: pm.tune(nn.Linear(6, 5), [(x, graph)])),
        (OptionError, lambda: pm.tune(net, [(x, graph)], "both")),
        (OptionError, lambda: pm.tune(net, [(x, graph)], bind="all")),
        (OptionError, lambda: pm.tune(net, [(x, graph)], budget=0)),
        (DtypeError, lambda: pm.tune(net, [(x, graph), x])),
        (OptionError, lambda: pm.engine.GraphTuning("inference", "cpu", {"third": None}, 1, 1).apply(net)),
    ):
        with pytest.raises(error):
            call()
    # A layer of one-hot nodes has no order to choose.
    assert set(pm.tune(onehot, [(None, graph)], budget=0.5, save=False).orders) <= {"conv2"}
