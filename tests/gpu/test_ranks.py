"""Processes on GPUs of their own (NCCL) train as one process does with all their scenes, and share a scene in tiles."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pumice as pm
from pumice.data import street_scene
from pumice.testing import random_cloud

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"torch.cuda.device_count() is {GPUS}, 2 are needed"),
]
STEPS = 50


def scene(rank, number, device):
    rows = 240 + 90 * rank + 50 * number
    feats = torch.randn(rows, 3, generator=torch.Generator().manual_seed(10 * rank + number)) + rank
    coords = random_cloud(rows, 3, extent=9, seed=10 * rank + number)
    return pm.SparseTensor(feats.double(), coords, batch_size=1).to(device)


def network(norm, device):
    torch.manual_seed(0)
    layers = pm.nn.Conv3d(3, 16, 3, bias=False), norm(16, momentum=None), pm.nn.ReLU(), pm.nn.Conv3d(16, 8, 2, stride=2)
    return torch.nn.Sequential(*layers).double().to(device)


def trained(model, scenes, ranks):
    """Losses of all processes. Gradients are averaged: those of the sum over all voxels."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = ranks * (model(scenes[step % 2]).feats - 1).square().sum() / 1000
        loss.backward()
        optimizer.step()
        losses.append(loss.detach() / ranks)
    losses = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(losses)
    return losses


def shards(model, ranks):
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cuda", (ranks,)))
    return model


def trains(rank, ranks, device):
    scenes = [scene(rank, number, device) for number in range(2)]
    every = [pm.collate([scene(one, number, device) for one in range(ranks)]) for number in range(2)]
    want = trained(network(pm.nn.BatchNorm, device), every, 1)
    assert want[-1] < want[0] / 2
    ways = {
        "ddp": DistributedDataParallel,
        "ddp compiled": lambda net: DistributedDataParallel(pm.compile(net)),
        "fsdp2": lambda net: shards(net, ranks),
        "fsdp2 compiled": lambda net: pm.compile(shards(net, ranks)),
    }
    for name, way in ways.items():
        found = trained(way(network(pm.nn.SyncBatchNorm, device)), scenes, ranks)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}")


def shares_a_scene(rank, ranks, device):
    scan = street_scene(seed=1, beams=32, azimuths=512)
    x = pm.voxelize(torch.from_numpy(scan.xyz), torch.from_numpy(scan.feats), size=0.2)
    torch.manual_seed(0)
    net = pm.models.MinkUNet(x.feats.shape[1], 8, width=0.25).eval().to(device)
    with torch.no_grad():
        want = net(x.to(device)).feats.cpu()
    rows = torch.arange(rank, len(x), ranks)
    own = pm.SparseTensor(x.feats[rows], x.coords[rows], batch_size=1)
    found = pm.tiled(net, own, tile=128, group=dist.group.WORLD)
    torch.testing.assert_close(found.feats.cpu(), want[rows], rtol=1e-4, atol=1e-4)


def _process(rank, ranks, store):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, timeout=limit, device_id=device)
    for way in (trains, shares_a_scene):
        way(rank, ranks, device)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [count for count in (2, 4) if count <= GPUS])
def test_processes_on_gpus_are_as_one(ranks, tmp_path):
    torch.multiprocessing.spawn(_process, (ranks, f"file://{tmp_path / 'store'}"), ranks)
