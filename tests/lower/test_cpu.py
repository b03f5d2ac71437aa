"""The CPU back end agrees with its plain twin on every engine, in every dtype, and with itself bit for bit."""

import gc
import itertools
import weakref

import pytest
import torch
from windows import RELATIONS

import pumice as pm
from pumice.coords import Geometry, KernelMap, kernel_map
from pumice.lower import cpu, reference
from pumice.ops import autograd
from pumice.schedule.predict import CpuSchedule
from pumice.testing import random_cloud

CHANNELS = [(1, 1), (4, 32), (5, 7), (32, 32), (48, 64), (64, 33)]


@pytest.fixture(scope="module")
def cloud() -> Geometry:
    """A cube so full that its maps have enough pairs for every engine."""
    cells = torch.tensor(list(itertools.product([0], range(14), range(14), range(14))), dtype=torch.int32)
    kept = torch.rand(len(cells), generator=torch.Generator().manual_seed(0)) < 0.8
    return Geometry.checked(cells[kept])


def operands(found, channels, dtype):
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(found.num_inputs, channels[0], generator=chance, dtype=torch.float64).to(dtype)
    weight = torch.randn(channels[1], found.volume, channels[0], generator=chance, dtype=torch.float64)
    grad = torch.randn(found.num_outputs, channels[1], generator=chance, dtype=torch.float64)
    return x, (weight / (found.volume * channels[0]) ** 0.5).to(dtype), grad.to(dtype)


def engine_of(found, channels):
    return CpuSchedule.default(*channels, len(found.pairs().inputs))


def tables_of(found, channels):
    schedule = engine_of(found, channels)
    return (*found.pairs(), *cpu.chunks(found.pairs(), found.num_outputs, found.num_inputs, schedule))


def test_the_cases_reach_every_engine(cloud):
    schedules = [engine_of(kernel_map(cloud, r)[0], c) for r in RELATIONS.values() for c in CHANNELS]
    # "strided" takes what "grouped" cannot: float64 here, and machines without oneDNN.
    assert {s.engine for s in schedules} | {"strided"} == set(cpu.ENGINES)
    assert {s.gradient for s in schedules} == set(cpu.GRADIENTS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", RELATIONS)
def test_agrees_with_its_twin(cloud, name, channels, dtype):
    found, _ = kernel_map(cloud, RELATIONS[name])
    x, weight, grad = operands(found, channels, dtype)
    tables = tables_of(found, channels)
    eps = torch.finfo(dtype).eps
    truth = reference.forward(x.double(), weight.double(), found.pairs(), found.num_outputs, 1)
    y = cpu.forward(x, weight, tables, found.num_outputs, 1)
    assert y.dtype == dtype
    assert (y - truth).abs().max() <= 8 * eps * truth.abs().max()
    truth = reference.weight_gradient(x.double(), grad.double(), found.pairs(), 1)
    dw = cpu.weight_gradient(x, grad, tables, 1)
    assert dw.dtype == dtype and dw.shape == weight.shape
    assert (dw - truth).abs().max() <= 64 * eps * truth.abs().max()


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", RELATIONS)
def test_pairs_alone_serve_too(cloud, name, channels):
    """What compiled code gets when the chunks were not made before."""
    found, _ = kernel_map(cloud, RELATIONS[name])
    x, weight, _ = operands(found, channels, torch.float64)
    y = cpu.forward(x, weight, tuple(found.pairs()), found.num_outputs, 1)
    torch.testing.assert_close(y, cpu.forward(x, weight, tables_of(found, channels), found.num_outputs, 1))


@pytest.mark.parametrize("channels", CHANNELS)
def test_bitwise_the_same_every_time(cloud, channels):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    x, weight, grad = operands(found, channels, torch.float32)
    tables = tables_of(found, channels)
    y, dw = cpu.forward(x, weight, tables, len(x), 1), cpu.weight_gradient(x, grad, tables, 1)
    for _ in range(5):
        assert torch.equal(y, cpu.forward(x, weight, tables, len(x), 1))
        assert torch.equal(dw, cpu.weight_gradient(x, grad, tables, 1))


@pytest.mark.parametrize("schedule", [CpuSchedule("batched", 3000, 16), CpuSchedule("grouped", 3000, 16, 8)])
def test_chunks_cover_every_pair_once(cloud, schedule):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    chunked = cpu._chunk(found.pairs(), 13, found.num_outputs, schedule)
    seen, rows = set(), 0
    for chunk in cpu._chunks(chunked):
        tiles = len(chunk.taps)
        assert chunk.first == rows and tiles % schedule.multiple == 0 and len(chunk.gather) == 16 * tiles
        ends = [*chunk.starts.tolist()[1:], len(chunk.slots)]
        for row, (start, end) in enumerate(zip(chunk.starts.tolist(), ends, strict=True)):
            for slot in chunk.slots[start:end].tolist():
                tile = slot % tiles if schedule.engine == "grouped" else slot // 16
                seen.add((chunk.first + row, int(chunk.taps[tile]), int(chunk.gather[slot])))
        rows = chunk.last
    pairs = found.pairs()
    taps = torch.repeat_interleave(torch.arange(found.volume), pairs.sizes)
    kept = taps != 13
    wanted = set(zip(pairs.outputs[kept].tolist(), taps[kept].tolist(), pairs.inputs[kept].tolist(), strict=True))
    assert rows == found.num_outputs and seen == wanted and len(wanted) == int(kept.sum())


def test_a_layer_makes_the_chunks_of_a_map_once(cloud, monkeypatch):
    """Where there are no C kernels."""
    made = []
    monkeypatch.setattr(cpu.native_products, "kernels", lambda: None)
    chunks = cpu.chunks
    monkeypatch.setattr(cpu, "chunks", lambda *given: made.append(given) or chunks(*given))
    x = pm.SparseTensor(torch.randn(len(cloud), 4), Geometry.checked(cloud.coords))
    weight = torch.randn(8, 3, 3, 3, 4, requires_grad=True)
    for _ in range(3):
        pm.ops.conv(x, weight).feats.sum().backward()
    assert len(made) == 1
    x.map(lambda feats: feats.requires_grad_())
    pm.ops.conv(x, weight).feats.sum().backward()
    assert len(made) == 2, "the input gradient goes the other way"


def test_shapes_in_signatures_are_checked_under_test(cloud):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    with pytest.raises(Exception, match="weight"):
        reference.forward(torch.zeros(len(cloud), 4), torch.zeros(8, 4), found.pairs(), len(cloud), 1)


def test_a_map_made_by_hand(cloud):
    """Its middle tap need not be the identity, whatever its policy says."""
    found, _ = kernel_map(cloud, RELATIONS["same"])
    order = torch.randperm(len(cloud), generator=torch.Generator().manual_seed(3))
    mine = KernelMap.from_rows(found.relation, found.rows()[order], len(cloud))
    x, weight, grad = operands(mine, (16, 32), torch.float64)
    tables = tables_of(mine, (16, 32))
    truth = reference.forward(x, weight, mine.pairs(), len(cloud), 1)
    torch.testing.assert_close(cpu.forward(x, weight, tables, len(cloud), 1), truth)
    truth = reference.weight_gradient(x, grad, mine.pairs(), 1)
    torch.testing.assert_close(cpu.weight_gradient(x, grad, tables, 1), truth)


def test_a_device_without_a_back_end():
    with pytest.raises(pm.errors.DeviceError, match="'xpu' is not supported; expected one of cpu, cuda"):
        autograd.check_device(torch.device("xpu"))


def test_training_over_varying_scenes_keeps_nothing():
    net = pm.nn.Sequential(pm.nn.Conv3d(2, 4, 3, bias=False), pm.nn.Conv3d(4, 4, 3, bias=False))
    tables = []
    for seed in range(3):
        x = pm.SparseTensor(torch.randn(400, 2), random_cloud(400, seed=seed))
        net(x).feats.square().mean().backward()
        tables.append(weakref.ref(kernel_map(x.geometry, net[0].relation)[0].pairs().inputs))
    del x
    gc.collect()
    assert [table() for table in tables] == [None] * 3
