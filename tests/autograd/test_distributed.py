"""Two processes (gloo) train one net by DistributedDataParallel and by FSDP2: gradients are those of both halves."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from emulated import emulated
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import pumice as pm
from pumice.testing import random_cloud

RANKS = 2


def sample(seed):
    rng = torch.Generator().manual_seed(seed)
    return pm.SparseTensor(torch.randn(60, 4, generator=rng), random_cloud(60, seed=seed))


def net():
    torch.manual_seed(0)
    layers = pm.nn.Conv3d(4, 6, 3, bias=False), pm.nn.Conv3d(6, 6, 3, bias=False), pm.nn.Conv3d(6, 4, 3, bias=False)
    return torch.nn.Sequential(*layers)


def backward(model, seed):
    model(sample(seed)).feats.square().sum().backward()


def wanted():
    """Gradients of the mean of both ranks' losses."""
    model = net()
    for seed in range(RANKS):
        backward(model, seed)
    return [p.grad / RANKS for p in model.parameters()]


def by_ddp(model):
    return DistributedDataParallel(model)


def by_ddp_that_looks_for_unused(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def by_ddp_of_a_program(model):
    return DistributedDataParallel(pm.compile(model), find_unused_parameters=True)


def by_fsdp2(model):
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def rank_of_two(rank, file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    want = wanted()
    ways = by_ddp, by_ddp_that_looks_for_unused, by_ddp_of_a_program, by_fsdp2
    for way, on_gpu in (*((way, False) for way in ways), (by_ddp_of_a_program, True)):
        with emulated(file.parent / f"{rank}") if on_gpu else nullcontext():
            model = way(net())
            # The kernels of the second step are known.
            for _ in range(1 + on_gpu):
                model.zero_grad()
                backward(model, rank)
        for p, grad in zip(model.parameters(), want, strict=True):
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(found, grad, msg=lambda told, way=way: f"{way.__name__}: {told}")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_gradients_over_two_processes(tmp_path):
    torch.multiprocessing.spawn(rank_of_two, (tmp_path / "store",), RANKS)


def test_a_sparse_tensor_is_a_pytree_node():
    x = sample(0)
    (feats,), spec = pytree.tree_flatten(x)
    assert feats is x.feats
    y = pytree.tree_unflatten([feats * 2], spec)
    assert y.geometry is x.geometry and torch.equal(y.feats, x.feats * 2)
    assert pytree.tree_map(lambda leaf: leaf.shape, {"x": x})["x"]._feats == (60, 4)
