"""Graph layers and reductions by an index on a GPU: as on a CPU, deterministic where they say so, in a CUDA graph."""

import pytest
import torch

import pumice as pm
from pumice.ops.relational import ORDERS
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
    assert float((ours.detach().cpu().double() - theirs).norm()) <= near * float(theirs.norm())


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
