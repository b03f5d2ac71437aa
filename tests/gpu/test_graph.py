"""Graph layers and reductions by an index on a GPU: as on a CPU, deterministic where they say so, in a CUDA graph."""

import copy

import pytest
import torch
from torch.nn import functional

import pumice as pm
from pumice.errors import CaptureError
from pumice.ops.relational_steps import ORDERS
from pumice.ops.scatter import REDUCTIONS

pytestmark = pytest.mark.gpu
NODES, RELATIONS, EDGES = 3000, 9, 40_000


def made():
    chance = torch.Generator().manual_seed(0)
    edges = torch.randint(0, NODES, (2, EDGES), generator=chance)
    kinds = torch.randint(0, RELATIONS, (EDGES,), generator=chance)
    return pm.Graph(edges, kinds.square() // RELATIONS, num_nodes=NODES, num_relations=RELATIONS)


def close(ours, theirs, dtype):
    near = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    # What is too small for a normal number of the dtype is rounded to half a step of those below.
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * theirs.numel() ** 0.5
    assert float((ours.detach().cpu().double() - theirs).norm()) <= near * float(theirs.norm()) + step


CASES = [("mean", "aggregate"), ("mean", "transform"), ("sum", "direct"), ("sum", "aggregate"), ("max", "aggregate")]


@pytest.mark.parametrize(("aggr", "order"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channels", [(16, 64), (64, 16)])
def test_results_and_gradients(aggr, order, dtype, channels):
    assert order in ORDERS
    graph, (inner, outer) = made(), channels
    x, weight = torch.randn(NODES, inner).to(dtype), (torch.randn(RELATIONS, inner, outer) / 8).to(dtype)
    found = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        leaves = [value.to(device, kind).requires_grad_() for value in (x, weight)]
        y = pm.ops.relational_conv(*leaves, graph.to(device), aggr=aggr, order=order)
        found.append((y, *torch.autograd.grad(y.float().square().sum(), leaves)))
    for theirs, ours in zip(*found, strict=True):
        close(ours, theirs.detach(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", ["aggregate", "transform"])
@pytest.mark.parametrize("bias", [False, True])
def test_known_launches(dtype, order, bias):
    """Later calls of a layer are launches of the first, for other values, strided and unaligned nodes."""
    graph = made()
    layer = pm.nn.RelationalConv(16, 32, RELATIONS, bias=bias)
    layer.order = order
    mine, over = copy.deepcopy(layer).cuda().to(dtype), graph.to("cuda")
    with torch.no_grad():
        for n, cut in enumerate((slice(16), slice(16), slice(1, 17), slice(0, 32, 2))):
            x = torch.randn(NODES, 32, generator=torch.Generator().manual_seed(n))[:, cut].to(dtype)
            given = torch.randn(NODES, 32, device="cuda", dtype=dtype)[:, cut].copy_(x) if n > 1 else x.cuda()
            close(mine(given, over), layer.double()(x.double(), graph), dtype)
        assert [*over.map.get_cached("launches").values()][0] is not None
        flat = torch.empty(NODES * 16 + 1, device="cuda", dtype=dtype)[1:].view(NODES, 16).copy_(x)
        close(mine(flat, over), layer(x.double(), graph), dtype)


@pytest.mark.parametrize("onehot", [False, True])
def test_within_a_cuda_graph(onehot):
    graph = made().to("cuda").prepare()
    net = pm.models.RGCN(NODES if onehot else 16, 64, 16, RELATIONS).cuda()
    x = None if onehot else torch.randn(NODES, 16, device="cuda")
    with torch.no_grad():
        wanted = net(x, graph)
        net(x, graph)
        torch.cuda.synchronize()
        replayed = torch.cuda.CUDAGraph()
        with torch.cuda.graph(replayed):
            got = net(x, graph)
        replayed.replay()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("aggr", ["mean", "max"])
@pytest.mark.parametrize("onehot", [False, True])
def test_a_captured_network(aggr, onehot):
    """Results of new graphs and of written weights, by replays of graphs."""
    net = pm.models.RGCN(NODES if onehot else 16, 32, 16, RELATIONS, aggr=aggr).cuda().eval()
    graphs = [made().to("cuda"), made().to("cuda")]
    inputs = [None if onehot else torch.randn(NODES, 16, device="cuda") for _ in range(3)]
    fast = pm.capture(net, (inputs[0], graphs[0]))
    for graph in graphs:
        for x in inputs:
            with torch.no_grad():
                net.conv1.weight.mul_(0.9)
                torch.testing.assert_close(fast(x, graph), net(x, graph), rtol=1e-4, atol=1e-4)
    assert fast.replays == 6 and "2 CUDA graphs" in fast.explain()


@pytest.mark.parametrize("aggr", ["mean", "sum", "max"])
@pytest.mark.parametrize(("nodes", "edges"), [(5, 0), (1, 3), (400, 3)])
def test_few_edges(aggr, nodes, edges):
    """No edges, one node, nodes and relations without edges: eagerly, with gradients, and captured."""
    index = torch.randint(0, min(nodes, 4), (2, edges))
    graph = pm.Graph(index, torch.ones(edges, dtype=torch.int64), num_nodes=nodes, num_relations=3)
    net, x = pm.models.RGCN(16, 8, 4, 3, aggr=aggr).eval(), torch.randn(nodes, 16)
    wanted = torch.autograd.grad(net(x, graph).square().sum(), [*net.parameters()])
    scores = net(x, graph).detach().double()
    net, x, graph = net.cuda(), x.cuda(), graph.to("cuda")
    found = torch.autograd.grad(net(x, graph).square().sum(), [*net.parameters()])
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs.double(), torch.float32)
    close(pm.capture(net, (x, graph))(x, graph), scores, torch.float32)


def test_what_cannot_be_captured():
    edges = torch.randint(0, NODES, (2, 100), device="cuda")
    x, graph = torch.randn(NODES, 16, device="cuda"), made().to("cuda")

    class Reads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pm.nn.RelationalConv(16, 16, 1)

        def forward(self, x, edges, _):
            return self.conv(x, edges.clone())

    with pytest.raises(CaptureError, match="prepared graphs"):
        pm.capture(Reads().cuda().eval(), (x, edges, graph))
    assert float(x.sum()) == float(x.sum())


@pytest.mark.parametrize("aggr", ["mean", "max"])
def test_a_captured_step(aggr):
    torch.manual_seed(0)
    net = pm.models.RGCN(16, 32, 4, RELATIONS, aggr=aggr).cuda()
    other, graph = copy.deepcopy(net), made().to("cuda")
    x, labels = torch.randn(NODES, 16, device="cuda"), torch.arange(NODES, device="cuda") % 4
    mine, theirs = (torch.optim.Adam(each.parameters(), 0.01, capturable=True) for each in (net, other))
    step = pm.capture_step(net, functional.cross_entropy, mine, (x, graph), labels)
    for _ in range(4):
        theirs.zero_grad()
        wanted = functional.cross_entropy(other(x, graph), labels)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(step((x, graph), labels), wanted.detach(), rtol=1e-3, atol=1e-3)
    assert step.replays == 4


def test_tuned():
    graph, net = made().to("cuda"), pm.models.RGCN(16, 32, 4, RELATIONS).cuda().eval()
    x = torch.randn(NODES, 16, device="cuda")
    with torch.no_grad():
        wanted = net(x, graph)
        found = pm.tune(net, [(x, graph)], budget=10, save=False)
        assert found.orders.keys() == {"conv1", "conv2"} and 0 < found.after <= found.before
        torch.testing.assert_close(net(x, graph), wanted, rtol=1e-3, atol=1e-3)


def test_compiled():
    graph, net = made().to("cuda").prepare(), pm.models.RGCN(16, 32, 4, RELATIONS).cuda()
    x = torch.randn(NODES, 16, device="cuda")
    run = torch.compile(net, fullgraph=True)
    found = [torch.autograd.grad(each(x, graph).square().sum(), [*net.parameters()]) for each in (run, net)]
    for ours, wanted in zip(*found, strict=True):
        close(ours, wanted.cpu().double(), torch.float32)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("segments", [20, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reductions(reduce, segments, dtype):
    x = torch.randn(60_000, 24).to(dtype)
    index = torch.randint(0, segments, (60_000,), generator=torch.Generator().manual_seed(1))
    for at, run in ((index, pm.ops.scatter), (index.sort().values, pm.ops.segment_reduce)):
        found = []
        for device, kind in (("cpu", torch.float64), ("cuda", dtype), ("cuda", dtype)):
            leaf = x.to(device, kind).requires_grad_()
            y = run(leaf, at.to(device), dim=0, dim_size=segments, reduce=reduce)
            found.append((y, torch.autograd.grad(y.float().square().sum(), leaf)[0]))
        for theirs, ours, again in zip(*found, strict=True):
            close(ours, theirs.detach(), dtype)
            assert torch.equal(ours, again)
