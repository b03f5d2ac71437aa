"""Neighbours of points and attention on a GPU are those of a CPU."""

import pytest
import torch

import pumice as pm
from pumice.ops import Neighbors

pytestmark = pytest.mark.gpu


def cloud(kind: str, count: int, dim: int = 3) -> torch.Tensor:
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(0))
    return (x * 4).round() if kind == "lattice" else x * torch.logspace(-2, 2, count)[:, None]


def same(found: Neighbors, wanted: Neighbors) -> None:
    assert torch.equal(found.index.cpu(), wanted.index)
    assert torch.equal(found.squared_distance.cpu(), wanted.squared_distance)


@pytest.mark.parametrize("dim", [2, 3, 5])
@pytest.mark.parametrize("kind", ["lattice", "clumps"])
def test_neighbours(kind: str, dim: int):
    x, q = cloud(kind, 40_000, dim), cloud(kind, 5_000, dim) + 0.25
    of, query_of = torch.arange(40_000) % 3, torch.arange(5_000) % 4
    on_cpu, items = (x, q), {"batch": of, "query_batch": query_of}
    on_gpu, gpu_items = (x.cuda(), q.cuda()), {name: i.cuda() for name, i in items.items()}
    same(pm.ops.knn(on_gpu[0], 16, on_gpu[1], **gpu_items), pm.ops.knn(on_cpu[0], 16, on_cpu[1], **items))
    for order in ("distance", "index"):
        found = pm.ops.ball_query(on_gpu[0], 0.5, 9, on_gpu[1], **gpu_items, order=order)
        same(found, pm.ops.ball_query(on_cpu[0], 0.5, 9, on_cpu[1], **items, order=order))
    edges = pm.ops.radius_graph(on_gpu[0], 0.1, on_gpu[1], **gpu_items)
    assert torch.equal(edges.cpu(), pm.ops.radius_graph(on_cpu[0], 0.1, on_cpu[1], **items))


@pytest.mark.parametrize("kind", ["lattice", "clumps"])
def test_farthest_points(kind: str):
    x, of = cloud(kind, 20_000), torch.arange(20_000) % 3
    found = pm.ops.farthest_point_sample(x.cuda(), [500, 1, 3000], batch=of.cuda())
    assert torch.equal(found.cpu(), pm.ops.farthest_point_sample(x, [500, 1, 3000], batch=of))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[64, 64, 64], [100, 3, 64, 1]], ids=["equal", "different"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention(dtype: torch.dtype, lengths: list[int], causal: bool):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    torch.manual_seed(0)
    given = [torch.randn(int(ends[-1]), 4, 32) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    q, k, v = leaves
    wanted = pm.ops.attention(q, k, v, ends, causal=causal)
    grads = torch.autograd.grad(wanted, leaves, given[3])
    own = [x.to("cuda", dtype).requires_grad_() for x in given[:3]]
    q, k, v = own
    found = pm.ops.attention(q, k, v, ends.cuda(), causal=causal)
    got = torch.autograd.grad(found, own, given[3].to("cuda", dtype))
    bound = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-3}[dtype]
    for mine, right in zip((found, *got), (wanted, *grads), strict=True):
        assert float((mine.detach().float().cpu() - right.detach()).norm() / right.detach().norm()) < bound
