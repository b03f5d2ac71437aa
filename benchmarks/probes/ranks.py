"""Training steps of one of several processes, printed as JSON by the first.

    torchrun --standalone --nproc-per-node=8 -m benchmarks.probes.ranks auto|cpu quick|full

MinkUNet on streets of different sizes, in half precision by autocast on GPUs. Every process has its own scenes, as many
as a BalancedBatchSampler or a random one gives it. Milliseconds of each step from one barrier to the next, so that the
slowest process counts, and the voxels of all processes in them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pumice as pm
from pumice.cli.ranks import Ranks, end
from pumice.cli.segment import pick_device
from pumice.data import BalancedBatchSampler, street_scene
from pumice.models import MinkUNet

Step = Callable[[pm.SparseTensor], object]
CLASSES = 16
WARM = 5  # Steps of a way that are not measured


def scenes(quick: bool, device: torch.device) -> list[pm.SparseTensor]:
    """Streets, the largest of which has about four times as many voxels as the smallest."""
    found = []
    for seed in range(8 if quick else 64):
        scan = street_scene(seed, beams=8 if quick else 48, azimuths=(32 if quick else 400) * (2 + seed % 7))
        feats = torch.from_numpy(scan.feats)
        found.append(pm.voxelize(torch.from_numpy(scan.xyz), feats, size=0.5 if quick else 0.1).to(device))
    return found


def ways(device: torch.device, quick: bool) -> Iterator[tuple[str, Step]]:
    """(name, training step) of each way."""

    def net(synchronised: bool = False) -> nn.Module:
        made = MinkUNet(1, CLASSES, width=0.125 if quick else 0.5).to(device)
        return pm.nn.SyncBatchNorm.convert_sync_batchnorm(made) if synchronised else made

    yield "one process", step_of(pm.compile(net()), device)
    if dist.get_world_size() > 1:
        yield "ddp", step_of(DistributedDataParallel(net()), device)
        yield "ddp compiled", step_of(DistributedDataParallel(pm.compile(net())), device)
        yield "ddp compiled sync norms", step_of(DistributedDataParallel(pm.compile(net(True))), device)
        sharded = net()
        fully_shard(sharded, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
        yield "fsdp2 compiled", step_of(pm.compile(sharded), device)


def step_of(model: nn.Module, device: torch.device) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    half = device.type == "cuda"

    def step(x: pm.SparseTensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            loss = model(x).feats.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def batches(sizes: Sequence[int], balanced: bool, count: int) -> Iterator[int]:
    """The scene of this process in each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sampler = BalancedBatchSampler(sizes, 1, drop_last=True)
    for number in range(-(-count // len(sampler))):
        sampler.set_epoch(number)
        chance = np.random.default_rng(number).permutation(len(sizes))[rank::ranks].tolist()
        yield from [batch[0] for batch in sampler] if balanced else chance[: len(sampler)]


def timed(step: Step, given: Sequence[pm.SparseTensor], device: torch.device) -> tuple[list[float], float]:
    """(milliseconds of each step, voxels per second of all processes)."""
    spent, began = list[float](), 0.0
    for number, x in enumerate(given):
        _wait(device)
        start = time.perf_counter()
        began = began if number > WARM else start
        step(x)
        _wait(device)
        spent.append(1e3 * (time.perf_counter() - start))
    voxels = torch.tensor([float(sum(map(len, given[WARM:])))], device=device)
    dist.all_reduce(voxels)
    return spent[WARM:], voxels.item() / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def main(device_name: str, size: str) -> None:
    ranks, device = Ranks.start(pick_device(device_name))
    if ranks.count == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    quick = size == "quick"
    every, count = scenes(quick, device), WARM + (3 if quick else 50)
    sizes, found = [len(x) for x in every], dict[str, tuple[list[float], float]]()
    for name, step in ways(device, quick):
        for balanced in (True, False) if name == "ddp compiled" else (True,):
            # New geometries: maps are built in every step.
            chosen = [every[place] for place in [*batches(sizes, balanced, count)][:count]]
            given = [pm.SparseTensor(x.feats, x.coords, batch_size=1) for x in chosen]
            found[name if balanced else f"{name} random"] = timed(step, given, device)
    if ranks.first:
        print(json.dumps(found), flush=True)
    dist.barrier()
    end(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
