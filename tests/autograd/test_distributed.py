"""Two processes (gloo) train one net by DistributedDataParallel, by captured steps of it, and by FSDP2: gradients are
those of both halves."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from emulated import emulated
from processes import spawn
from programs import Residual, Unit
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import pumice as pm
from pumice.errors import OptionError
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
    return DistributedDataParallel(pm.compile(model))


def by_fsdp2(model):
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def rank_of_two(rank, _, folder):
    want = wanted()
    ways = by_ddp, by_ddp_that_looks_for_unused, by_ddp_of_a_program, by_fsdp2
    for way, on_gpu in (*((way, False) for way in ways), (by_ddp_of_a_program, True)):
        with emulated(folder / f"{rank}") if on_gpu else nullcontext():
            model = way(net())
            # The kernels of the second step are known.
            for _ in range(1 + on_gpu):
                model.zero_grad()
                backward(model, rank)
        for p, grad in zip(model.parameters(), want, strict=True):
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(found, grad, msg=lambda told, way=way: f"{way.__name__}: {told}")


def trainable():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        pm.nn.Conv3d(4, 6, 3), pm.nn.BatchNorm(6), pm.nn.ReLU(), pm.nn.Conv3d(6, 6, 2, stride=2), pm.nn.Linear(6, 4)
    )


def mean_of(y, factor):
    return pm.ops.row_mean(y, (y.feats + 1).square().sum(1)) * factor


def scene_of(rank, step):
    """Of different sizes in both processes: one of them finds a graph, where the other has no room, or none at all."""
    if step == 2 and rank:
        # Far from each other: as many voxels on the next level.
        places = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), *[4 * torch.arange(6)] * 3)
        return pm.SparseTensor(torch.randn(216, 4), places.int(), batch_size=1)
    rows = 250 if step == 3 and rank else 64 + 20 * rank - 10 * (step == 1)
    return pm.SparseTensor(
        torch.randn(rows, 4), random_cloud(rows, 3, extent=7 if rows > 200 else 6, seed=10 * step + rank), batch_size=1
    )


def ways_of_steps():
    """Options of a captured step, and what the loss is multiplied by in one process and in each step."""
    plain = [1.0] * 6
    scaler = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)}
    return ({}, plain), ({"clip": 0.05}, plain), (scaler, [1.0, 1e37, 1.0, 1.0, 1e37, 1.0])


def steps_of_two(rank, _, folder):
    """Captured steps of DistributedDataParallel are its own, whether the scenes of the processes find graphs or not."""
    for options, factors in ways_of_steps():
        models = [DistributedDataParallel(trainable()) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]
        example, one = scene_of(rank, 0), torch.tensor(1.0)
        step = pm.capture_step(models[0], mean_of, optimizers[0], example, one, max_voxels=220, buckets=[70], **options)
        clip, scaler = options.get("clip"), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scaler = scaler if "scaler" in options else torch.amp.GradScaler("cpu", enabled=False)
        for number, factor in enumerate(factors):
            torch.manual_seed(10 * number + rank)
            x, factor = scene_of(rank, number), torch.tensor(factor if rank else 1.0)
            optimizers[1].zero_grad()
            value = mean_of(models[1](x), factor)
            scaler.scale(value).backward()
            scaler.unscale_(optimizers[1])
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(models[1].parameters(), clip)
            scaler.step(optimizers[1])
            scaler.update()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                torch.testing.assert_close(step(x, factor), value.detach(), rtol=1e-4, atol=1e-4)
            pairs = zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True)
            for got, want in pairs:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert step.skipped == (2 if "scaler" in options else 0)
        # Without those that found no room, or were too many.
        fallbacks = {"room": 1, "voxels": 1} if rank else {}
        assert {k: v for k, v in step.fallbacks.items() if k in ("room", "voxels")} == fallbacks, step.fallbacks
        assert step.replays == 6 - sum(step.fallbacks.values()) > 2
    refuses_what_it_does_not_do(models[0], example, one)


def refuses_what_it_does_not_do(model, example, one):
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(OptionError, match="one process: 0 is DistributedDataParallel"):
        pm.capture_step(torch.nn.Sequential(model), mean_of, sgd, example, one)
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(OptionError, match="communication hooks"):
        pm.capture_step(model, mean_of, sgd, example, one)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("each", [rank_of_two, steps_of_two])
def test_two_processes(each, tmp_path):
    spawn(each, RANKS, tmp_path)


def normed_net():
    torch.manual_seed(0)
    first = Unit(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), pm.nn.ReLU())
    return torch.nn.Sequential(first, Residual(8, False), pm.nn.ResidualBlock(8, 4))


def program_of_shards(net, **options):
    """Each part has hooks of its own, and is called as it is."""
    for module in (*net, net):
        fully_shard(module, **options)
    return pm.compile(net)


def shards_of_a_program(net, **options):
    program = pm.compile(net)
    fully_shard(program, **options)
    return program


def programs_sharded_each(net, **options):
    for place, module in enumerate(net):
        net[place] = pm.compile(module)
        fully_shard(net[place], **options)
    fully_shard(net, **options)
    return net


def plain_shards(net, **options):
    for module in (*net, net):
        fully_shard(module, **options)
    return net


SHARDED = {program_of_shards: [], shards_of_a_program: [5], programs_sharded_each: [1, 1, 3]}
"""Products of each stretch in training."""


def trained_twice(model, rank):
    """Results in evaluation, gradients, and buffers, of two steps of training."""
    optimizer, found = torch.optim.SGD(model.parameters(), 1e-3), []
    for seed in range(2):
        model.train()
        backward(model, 2 * seed + rank)
        # A copy: a gradient is given back to be written to.
        found += [p.grad.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(model(sample(7 + seed)).feats)
    return found + [b.clone() for b in model.buffers()]


def sharded_rank_of_two(rank, _, folder):
    mesh = init_device_mesh("cpu", (RANKS,))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # torch's batch norm takes no half parameters beside running statistics in float32.
    for policy, made, most in ((MixedPrecisionPolicy(), normed_net, 1e-3), (half, net, 3e-2)):
        options = {"mesh": mesh, "mp_policy": policy}
        want = trained_twice(plain_shards(made(), **options), rank)
        for way, on_gpu in ((way, on_gpu) for way in SHARDED for on_gpu in (False, True)):
            with emulated(folder / f"{rank}") if on_gpu else nullcontext() as gpu:
                found = trained_twice(way(made(), **options), rank)
            for one, other in zip(found, want, strict=True):
                assert one.dtype == other.dtype
                assert (one - other).double().norm() <= most * max(1, other.double().norm()), way.__name__
            assert gpu is None or made is net or sorted(gpu.passes) == sorted(gpu.back) == sorted(2 * SHARDED[way])


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_programs_over_two_processes(tmp_path):
    """Evaluation and training of programs of sharded networks, and of sharded programs: those of the network."""
    spawn(sharded_rank_of_two, RANKS, tmp_path)


def test_a_sparse_tensor_is_a_pytree_node():
    x = sample(0)
    (feats,), spec = pytree.tree_flatten(x)
    assert feats is x.feats
    y = pytree.tree_unflatten([feats * 2], spec)
    assert y.geometry is x.geometry and torch.equal(y.feats, x.feats * 2)
    assert pytree.tree_map(lambda leaf: leaf.shape, {"x": x})["x"]._feats == (60, 4)
