"""Two and four processes (gloo) train as one process does with all their scenes: DistributedDataParallel and FSDP2 of
networks and programs, batch norms over all processes, accumulation, half precision, checkpoints."""

import json
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from emulated import emulated
from processes import spawn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import pumice as pm
from pumice.coords import CoordBuffer
from pumice.coords.box import UNKNOWN
from pumice.engine import DataflowChoice, Tiles, Trial
from pumice.env import settings
from pumice.errors import DeviceError, OptionError
from pumice.lower.norm import Statistics
from pumice.lower.synced_norm import synced_batch_norm
from pumice.schedule.dataflow import DATAFLOWS, Dataflows
from pumice.schedule.tuned_plans import plans
from pumice.schedule.tuned_tiles import ledger
from pumice.testing import random_cloud

STEPS, SCENES = 50, 2
KERNELS = {"moments", "normalise", "products", "gradient"}
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


def scene(rank, number, dtype=torch.float64):
    rows = 24 + 9 * rank + 5 * number
    feats = torch.randn(rows, 3, generator=torch.Generator().manual_seed(10 * rank + number)) + rank
    return pm.SparseTensor(feats.to(dtype), random_cloud(rows, 3, extent=5, seed=10 * rank + number), batch_size=1)


def net():
    """In double precision: an optimizer's steps amplify roundings."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        pm.nn.Conv3d(3, 6, 3, bias=False),
        pm.nn.SyncBatchNorm(6, momentum=None),
        pm.nn.ReLU(),
        pm.nn.Conv3d(6, 4, 2, stride=2),
    )
    return layers.double()


def loss_of(y, ranks):
    """Gradients of processes are averaged: those of the sum over all voxels."""
    return ranks * (y.feats * torch.arange(1, 5) - 1).square().sum() / 100


def sharded(model, **options):
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for module in (model[0], model):
        fully_shard(module, **options)
    return model


def ddp(model):
    return DistributedDataParallel(model)


def ddp_of_a_program(model):
    return DistributedDataParallel(pm.compile(model))


def program_of_shards(model):
    return pm.compile(sharded(model))


WAYS = ddp, ddp_of_a_program, sharded, program_of_shards


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def trained(model, optimizer, scenes, steps, ranks):
    """Losses of steps, summed over the processes if there are several."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model(scenes[step % SCENES]), ranks)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if ranks > 1:
        dist.all_reduce(losses)
    return losses / ranks


def alone(ranks):
    """(losses, buffers) of one process with the scenes of all."""
    model = pm.nn.Sequential(*net())
    for place, layer in enumerate(model):
        if isinstance(layer, pm.nn.SyncBatchNorm):
            model[place] = pm.nn.BatchNorm(layer.num_features, momentum=layer.momentum).double()
    every = [pm.collate([scene(rank, number) for rank in range(ranks)]) for number in range(SCENES)]
    return trained(model, optimizer_of(model), every, range(STEPS), 1), [*model.buffers()]


def as_one_process(rank, ranks, _):
    scenes = [scene(rank, number) for number in range(SCENES)]
    want, buffers = alone(ranks)
    for way in WAYS:
        model = way(net())
        found = trained(model, optimizer_of(model), scenes, range(STEPS), ranks)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6, msg=lambda told, way=way: f"{way}: {told}")
        for one, other in zip(model.buffers(), buffers, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert want[-1] < want[0] / 2
    if ranks == 2:
        for more in (norms, accumulates, resumes, in_half, refuses, tunes):
            more(rank, ranks, _)


def norms(rank, _, folder):
    """Rows far from 0, none in one process or only one: values and all gradients are those of torch's batch norm of all
    rows; in evaluation; and what is refused."""
    ways = (torch.float64, 1e-10, False), (torch.float32, 1e-3, False), (torch.float32, 1e-3, True)
    for dtype, most, on_gpu in ways:
        for counts in ((30, 17), (30, 1), (30, 0), (1, 0), (1, 1)):
            with emulated(folder / f"{rank}") if on_gpu else nullcontext() as gpu:
                found, want = norm_of_all(rank, counts, dtype)
            begun = {name for name, _ in gpu.norms} if gpu is not None and counts[rank] else KERNELS
            assert begun == KERNELS
            for number, (one, other) in enumerate(zip(found, want, strict=True)):
                told = lambda m, at=(counts, dtype, on_gpu, number): f"{at}: {m}"  # noqa: E731
                torch.testing.assert_close(one.double(), other, rtol=most, atol=most, msg=told)
    norm, own = pm.nn.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    z = pm.SparseTensor(torch.randn(5, 4), random_cloud(5, 3), batch_size=1)
    torch.testing.assert_close(norm.eval()(z).feats, z.map(own.eval()).feats)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad,) = torch.autograd.grad(norm.train()(z).feats.square().sum(), norm.weight, create_graph=True)
        grad.sum().backward()
    with pytest.raises(AttributeError, match="pm.nn.BatchNorm"):
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(pm.nn.BatchNorm(4))(z)


def norm_of_all(rank, counts, dtype):
    """(result, gradients and statistics of a SyncBatchNorm, those of torch's batch norm of all rows in float64)."""
    every = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n + 7)) + 20 for n in counts]
    own, ours = torch.nn.BatchNorm1d(4).double(), pm.nn.SyncBatchNorm(4, dtype=dtype)
    both = torch.cat(every).double().requires_grad_()
    for each in (own, ours):
        torch.nn.init.constant_(each.weight, 0.5)
    # torch's raises for a single row: its statistics are the running ones.
    want = own.train(len(both) > 1)(both)
    want.pow(3).sum().backward()
    x = every[rank].to(dtype).requires_grad_()
    places = torch.stack([torch.zeros(len(x)), *[torch.arange(len(x))] * 3], 1).int()
    y = padded(x, ours) if dtype is torch.float64 else ours(pm.SparseTensor(x, places, batch_size=1)).feats
    y.pow(3).sum().backward()
    dist.all_reduce(ours.weight.grad)
    part = slice(rank * counts[0], rank * counts[0] + counts[rank])
    found = y, x.grad, ours.weight.grad, ours.running_mean, ours.running_var
    return found, (want[part], both.grad[part], own.weight.grad, own.running_mean, own.running_var)


def padded(x, norm):
    """The norm, as of a buffer with rows that are no voxels."""
    rows, count = torch.cat([x, torch.full((3, 4), torch.nan)]), torch.tensor([len(x)], dtype=torch.int32)
    running = norm.running_mean, norm.running_var
    statistics = Statistics(running, norm.eps, True, norm.momentum, norm.num_batches_tracked)
    own = CoordBuffer(rows, count, UNKNOWN, count)
    return synced_batch_norm(rows, own, (norm.weight, norm.bias), statistics, dist.group.WORLD)[: len(x)]


@contextmanager
def unsynchronised(model):
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def accumulates(rank, ranks, _):
    """Gradients of two scenes, averaged once."""
    want = net()
    loss = sum(loss_of(want(scene(rank, number)), 1) for number in range(SCENES))
    loss.backward()
    for p in want.parameters():
        dist.all_reduce(p.grad)
    for way in WAYS:
        model = way(net())
        with unsynchronised(model):
            loss_of(model(scene(rank, 0)), ranks).backward()
        loss_of(model(scene(rank, 1)), ranks).backward()
        for p, q in zip(model.parameters(), want.parameters(), strict=True):
            found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(found, q.grad)


def resumes(rank, ranks, folder):
    """From a checkpoint of torch.distributed.checkpoint, training goes on as without a stop."""
    for way in (pm.compile, *WAYS):
        # Without a wrapper, all processes have the same weights if they have the same scenes.
        scenes = [scene(rank * (way is not pm.compile), number) for number in range(SCENES)]
        model = way(net())
        optimizer = optimizer_of(model)
        trained(model, optimizer, scenes, range(3), ranks)
        weights, state = get_state_dict(model, optimizer)
        # Without the names of wrappers: any way loads the checkpoint of another.
        assert weights.keys() == net().state_dict().keys()
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / way.__name__)
        want = trained(model, optimizer, scenes, range(3, 6), ranks)
        for other in (way, sharded) if way is ddp_of_a_program else (way,):
            model = other(net())
            optimizer = optimizer_of(model)
            weights, state = get_state_dict(model, optimizer)
            kept = {"model": weights, "optimizer": state}
            dcp.load(kept, checkpoint_id=folder / way.__name__)
            set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
            found = trained(model, optimizer, scenes, range(3, 6), ranks)
            torch.testing.assert_close(found, want, msg=lambda told, at=(way, other): f"{at} {told}")


def in_half(rank, ranks, _):
    """MixedPrecisionPolicy of FSDP2, and autocast under DistributedDataParallel: near to single precision."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    scenes = [scene(rank, number, torch.float32) for number in range(SCENES)]
    model = ddp(net().float())
    want = trained(model, optimizer_of(model), scenes, range(4), ranks)
    for program in (False, True):
        model = sharded(net().float(), mp_policy=half)
        model = pm.compile(model) if program else model
        found = trained(model, optimizer_of(model), scenes, range(4), ranks).float()
        torch.testing.assert_close(found, want, rtol=0.05, atol=0.1)
        model = (ddp_of_a_program if program else ddp)(net().float())
        with torch.autocast("cpu", torch.bfloat16):
            found = trained(model, optimizer_of(model), scenes, range(4), ranks).float()
        torch.testing.assert_close(found, want, rtol=0.05, atol=0.1)


def refuses(rank, *_):
    """Captured steps, in which processes do not wait for each other."""
    model, one = sharded(pm.nn.Sequential(pm.nn.Conv3d(3, 4, 3))), scene(rank, 0)
    assert isinstance(model, FSDPModule)
    for each in (model, ddp(net())):
        with pytest.raises(OptionError, match="run in one process.*capture the DistributedDataParallel"):
            pm.capture_step(each, lambda y: y.feats.sum(), torch.optim.SGD(each.parameters()), one)


def tunes(rank, _, folder):
    """Process 0 tunes, with its folder of plans; all get its result, or its error."""
    os.environ["PUMICE_CACHE"] = str(folder / f"cache{rank}")
    for each in (settings, plans, ledger):
        each.cache_clear()
    layers = pm.nn.Sequential(pm.nn.Conv3d(3, 4, 3), pm.nn.Conv3d(4, 4, 2, stride=2))
    for mode in ("inference", "training"):
        found = pm.tune(layers, [scene(0, 0, torch.float32)] if rank == 0 else [], mode, budget=0.5, progress=False)
        told = json.dumps(found.to_json(), sort_keys=True)
        every = [None, None]
        dist.all_gather_object(every, (told, [str(layer.dataflow) for layer in layers], plans().export()))
        assert every[0] == every[1] and found.before.total > 0 and len(found.choices) == 2
    of_edges = pm.nn.RelationalConv(4, 4, 2)
    graph = pm.Graph(torch.randint(5, (2, 12)), torch.randint(2, (12,)), num_nodes=5)
    found = pm.tune(of_edges, [(torch.randn(5, 4), graph)], budget=0.2, progress=False)
    dist.all_gather_object(every, (found.before, found.orders, of_edges.order))
    assert every[0] == every[1]
    with pytest.raises(OptionError, match="no scene"):
        pm.tune(layers, [])
    with pytest.raises(OptionError, match="DistributedDataParallel waits"):
        pm.tune(ddp(layers), [scene(0, 0, torch.float32)], "training")
    with pytest.raises(OptionError, match="SyncBatchNorm waits"):
        pm.tune(net(), [scene(0, 0)], "training")
    mark = folder / "compiled"
    with pm.engine.first_on_each_host():
        assert mark.exists() == (rank > 0)
        time.sleep(0.3 * (rank == 0))
        mark.touch()
    refused = pytest.raises(ValueError if rank == 0 else DeviceError, match="told|process 0 has raised")
    with refused, pm.engine.first_on_each_host():
        raise ValueError("told")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_processes_train_as_one(ranks, tmp_path):
    spawn(as_one_process, ranks, tmp_path)


def test_a_synchronised_norm_fuses_in_evaluation():
    model, x = net(), scene(0, 0)
    model(x)
    want, program = model.eval()(x).feats, pm.compile(model)
    torch.testing.assert_close(program(x).feats, want)
    assert "convolution + norm + relu" in program.explain()
    program.train()(x)
    assert "convolution + norm + relu" not in program.explain()


def test_a_tuning_as_text():
    own = DATAFLOWS["gather-gemm-scatter-fused-adaptive"]
    three = Dataflows("planned", own, None)
    flows = None, "explicit-gemm", replace(own, piece=3), three
    trial = Trial("explicit-gemm", ("forward",), 0.5, refused="why")
    choices = tuple(DataflowChoice("g", ("0.conv",), 5.0, 2.0, 0.1, flow, (trial,), "") for flow in flows)
    spent = pm.engine.PassTiming(0.5, {"maps": 0.25})
    found = pm.Tuning("training", "cpu", choices, spent, spent, (Tiles("0", 1, 2.0, 1.0, True),), ("a note",), False)
    assert repr(pm.Tuning.of_json(json.loads(json.dumps(found.to_json())))) == repr(found)
