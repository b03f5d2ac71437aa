"""Layers whose kernels are started one after the other: the results are those of modules one by one, and whatever has
changed since the last call is heard. Kernels compute, on memory of the CPU (tests/emulated.py)."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from emulated import emulated, on_cpu, unprepared
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pumice as pm
from pumice import nn
from pumice.coords import KernelMap, Relation, kernel_map
from pumice.lower import direct, stamp
from pumice.lower import triton as kernels
from pumice.models.minkunet import Decoder, Encoder
from pumice.nn.prepared import Parts, Prepared
from pumice.ops import line
from pumice.ops.tensor import fitting
from pumice.testing import random_cloud

NEAR = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 0.03, "atol": 0.1},
}


@pytest.fixture
def gpu(tmp_path):
    with emulated(tmp_path) as found, torch.no_grad():
        yield found


def stirred(module):
    """Norms whose statistics and weights are not those of a new one."""
    torch.manual_seed(3)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm):
            for values in (part.running_mean, part.running_var, part.weight, part.bias):
                if values is not None:
                    values.data.uniform_(0.5, 2)
    return module.eval()


COORDS = random_cloud(400, 3, extent=(24, 24, 12), seed=1)


def cloud(channels=8, dtype=torch.float32, rows=400):
    feats = torch.randn(rows, channels, generator=torch.Generator().manual_seed(rows))
    return pm.SparseTensor(feats.to(dtype), COORDS[:rows])


def anew(x, seed=0):
    """Other features on the same coordinates: what lies where something was before is none of it."""
    values = torch.randn(x.feats.shape, generator=torch.Generator().manual_seed(seed))
    return x.replace(values.to(x.dtype))


def one_by_one(module, x):
    """What the modules give on a CPU, with maps of their own."""
    with on_cpu():
        return module(pm.SparseTensor(x.feats, x.coords))


def agree(gpu, module, x, y=None):
    """That a call gives what kernels give that are started by modules one by one, to the last bit, and what modules
    give without kernels; the result."""
    before = len(gpu.started), len(gpu.lines), len(gpu.made)
    y = module(x) if y is None else y
    after = len(gpu.started), len(gpu.lines), len(gpu.made)
    with unprepared():
        want = module(x)
    assert torch.equal(y.feats, want.feats) and y.geometry is want.geometry and y.dtype == want.dtype
    assert y.feats.stride() == want.feats.stride()
    torch.testing.assert_close(y.feats, one_by_one(module, x).feats, **NEAR[y.dtype])
    # What the comparison has started is not the call's.
    del gpu.started[after[0] :], gpu.lines[after[1] :], gpu.made[after[2] :]
    assert before <= after
    return y


def kernels_of(module):
    """Of a module whose calls are known, in one line."""
    return sum(isinstance(part, nn.conv.Convolution | nn.Linear) for part in module.modules())


def unit(before, after, size=3, act=nn.ReLU, **options):
    return nn.Sequential(nn.Conv3d(before, after, size, bias=False, **options), nn.BatchNorm(after, eps=0.1), act())


def around(before, after, *body, act=nn.ReLU):
    """A residual block with another body."""
    block = nn.ResidualBlock(before, after)
    block.body, block.act = nn.Sequential(*body), act()
    return block


def twice():
    block = nn.ResidualBlock(8, 8)
    return nn.Sequential(block, block, block)


# Data flow

LINES = {
    "one": lambda: unit(8, 16),
    "unit and norm": lambda: nn.Sequential(*unit(8, 16), nn.Conv3d(16, 8, 3, bias=False), nn.BatchNorm(8)),
    "bare": lambda: nn.Sequential(nn.Conv3d(8, 16, 3, bias=False), nn.Conv3d(16, 8, 1, bias=False), nn.SiLU()),
    "block": lambda: nn.ResidualBlock(8, 8),
    "block, linear shortcut": lambda: nn.ResidualBlock(8, 16),
    "block of SiLU": lambda: around(8, 8, *unit(8, 12, act=nn.SiLU), *unit(12, 8)[:2], act=nn.SiLU),
    "block without norms": lambda: around(8, 8, nn.Conv3d(8, 8, 3, bias=False), nn.Conv3d(8, 8, 1, bias=False)),
    "block of one": lambda: around(8, 8, *unit(8, 8)[:2]),
    "block of one, linear shortcut": lambda: around(8, 16, *unit(8, 16)[:2]),
    "block of four": lambda: around(8, 16, unit(8, 32), unit(32, 4), unit(4, 24), *unit(24, 16)[:2]),
    "blocks": lambda: nn.Sequential(
        nn.ResidualBlock(8, 8), nn.ResidualBlock(8, 16), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 12)
    ),
    "blocks that grow": lambda: nn.Sequential(
        nn.ResidualBlock(8, 16), nn.ResidualBlock(16, 32), nn.ResidualBlock(32, 8), nn.ResidualBlock(8, 48)
    ),
    "nested": lambda: nn.Sequential(
        nn.Sequential(unit(8, 16), nn.Sequential(nn.Sequential(*unit(16, 8)), nn.ResidualBlock(8, 16))),
        nn.Sequential(nn.ResidualBlock(16, 16)),
        nn.Linear(16, 8, bias=False),
        nn.BatchNorm(8),
    ),
    "one block three times": twice,
    "coarser": lambda: nn.Sequential(unit(8, 16, 2, stride=2), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 8)),
    "coarser twice": lambda: nn.Sequential(
        nn.ResidualBlock(8, 16), unit(16, 16, 2, stride=2), unit(16, 4, 3, stride=2), nn.ResidualBlock(4, 16)
    ),
    "encoder": lambda: Encoder(8, 16, 3),
    "no scale": lambda: nn.Sequential(nn.Conv3d(8, 8, 3, bias=False), nn.BatchNorm(8, affine=False), nn.ReLU()),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["single", "half"])
def test_a_line_gives_what_modules_give(gpu, name, dtype):
    module, x = stirred(LINES[name]()).to(dtype), cloud(dtype=dtype)
    agree(gpu, module, x)
    for seed in (1, 2):
        gpu.clear()
        agree(gpu, module, anew(x, seed))
        # All of it, of which nothing is started by a tensor.
        (of_line,) = gpu.lines
        count = 6 if name == "one block three times" else kernels_of(module)
        assert len(of_line) == len(gpu.started) == count and all(one.by_address for one in of_line)


@pytest.mark.parametrize("name", LINES)
def test_what_lies_between_is_in_three_places_of_one_tensor(gpu, name):
    module, x = stirred(LINES[name]()), cloud()
    for seed in (0, 1):
        gpu.clear()
        x = anew(x, seed)
        y = module(x)
    ((memory, out), (*between, last)) = gpu.made[0], gpu.lines[0]
    assert memory.dtype == torch.uint8 and out.data_ptr() == y.feats.data_ptr() == last.bytes[""][0]
    begin, size = memory.data_ptr(), memory.numel()
    places = {one.bytes[""][0] for one in between}
    assert len(places) == min(3, len(between)) or not {"block", "linear"} & {*name.split()}
    assert len(places) <= 3
    step = size // min(3, len(between)) if between else 0
    for one in between:
        first, length = one.bytes[""]
        assert begin <= first and first + length <= begin + size and not first % 16
        # None runs into the next place.
        assert (first - begin) % step == 0 and length <= step
    written = {x.feats.data_ptr()}
    for one in (*between, last):
        read = {one.bytes[name][0] for name in ("x", "*residual") if name in one.bytes}
        # And what was not written in this line is read nowhere.
        assert one.bytes[""][0] not in read and read <= written
        written.add(one.bytes[""][0])


def test_rows_that_lie_apart_are_read_where_they_lie(gpu):
    """Features that are columns of something wider, residual and all."""
    module, x = stirred(nn.Sequential(nn.ResidualBlock(8, 8), nn.ResidualBlock(8, 16))), cloud()
    for seed in (0, 1, 2):
        wide = anew(x.replace(torch.zeros(400, 24))).feats + seed
        gpu.clear()
        agree(gpu, module, x.replace(wide[:, :8]))
        assert len(gpu.in_lines) == (0 if seed == 0 else 5)
    gpu.clear()
    agree(gpu, module, x)
    assert not gpu.in_lines


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_few_rows(gpu, rows):
    module, x = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 8))), cloud(rows=rows)
    for seed in (0, 1, 2):
        y = agree(gpu, module, anew(x, seed))
        assert y.feats.shape == (rows, 8)
    # Another kernel's result is float32 where there is one row alone.
    assert len(gpu.lines) == (2 if rows else 0) or rows == 1


def test_another_cloud_goes_by_templates(gpu):
    """Where nothing was kept for its maps: in one line at once, of kernels that others were compiled for."""
    module = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, 24), unit(24, 8, 2, stride=2)))
    for rows in (400, 399) * 2:
        agree(gpu, module, cloud(rows=rows))
    for rows in (397, 398, 395):
        x = cloud(rows=rows)
        gpu.clear()
        y = module(x)
        assert len(gpu.in_lines) >= 4 and all(one.by_address for one in gpu.in_lines)
        agree(gpu, module, x, y)


@pytest.fixture(scope="module")
def nets():
    torch.manual_seed(0)
    return {dtype: stirred(pm.models.MinkUNet(4, 5, 0.25)).to(dtype) for dtype in NEAR}


@pytest.mark.parametrize("dtype", NEAR, ids=["single", "half"])
def test_a_whole_network(gpu, nets, dtype):
    """Down, up again beside what came down, and the columns that the way up leaves free."""
    net, x = nets[dtype], cloud(4, dtype)
    started = []
    for seed in (0, 1, 2):
        gpu.clear()
        y = net(anew(x, seed))
        started.append([one.told for one in gpu.started])
        want = one_by_one(net, anew(x, seed)).feats
        scale = float(want.abs().max())
        torch.testing.assert_close(y.feats / scale, want / scale, **NEAR[dtype])
        assert torch.equal(agree_with(net, anew(x, seed)).feats, y.feats)
    assert started[1] == started[2]
    # Stem, four levels down, and four times the way up and its blocks: one line each.
    assert len(gpu.lines) == 13 and len(gpu.in_lines) >= 42
    # The first of each decoder leaves room for what it is joined with.
    roomy = [made[-1] for of_line, made in zip(gpu.lines, gpu.made, strict=True) if len(of_line) == 1]
    assert [made.shape[1] for made in roomy] == [64 + 32, 32 + 16, 24 + 8, 24 + 8]


def agree_with(module, *given):
    with unprepared():
        return module(*given)


@pytest.mark.parametrize("reason", ["another dtype", "a wide view"])
def test_a_decoder_beside_what_does_not_fit_into_room(gpu, reason):
    decoder, encoder, x = stirred(Decoder(8, 16, 8, 3)), stirred(unit(8, 8, 2, stride=2)), cloud()
    below = encoder(x)
    for seed in (0, 1):
        skip = anew(x, seed)
        y = decoder(below, skip)
        assert torch.equal(y.feats, agree_with(decoder, below, skip).feats)
    other = skip.replace(torch.randn(400, 16)[:, ::2]) if reason == "a wide view" else skip.to(torch.float64)
    if reason == "a wide view":
        assert torch.equal(decoder(below, other).feats, agree_with(decoder, below, other).feats)
        return
    for way in (decoder, lambda *given: agree_with(decoder, *given)):
        with pytest.raises(pm.errors.DtypeError, match="float64"):
            way(below, other)


def test_calls_are_those_of_modules_one_by_one(gpu, nets):
    """Grid and arguments, when nothing is known, when all is, and without lines."""
    net, x = nets[torch.float16], cloud(4, torch.float16)
    found = []
    for way in (net, net, lambda x: agree_with(net, x), net):
        gpu.clear()
        way(x)
        found.append([one.told for one in gpu.started])
    assert len(gpu.lines) == 13
    # What a block adds is found before its body in a line as without.
    assert all(sorted(each, key=str) == sorted(found[0], key=str) for each in found)
    assert found[1] == found[3]


def test_settled_lines_are_started_with_nothing_looked_up(gpu, monkeypatch):
    module, x = chain(), cloud()
    module(x), module(x)
    monkeypatch.setattr("pumice.nn.blocks.chained", lambda modules, x, known: known.ahead(x, None, 0)[0])
    monkeypatch.setattr("pumice.ops.conv.convolve", None)
    monkeypatch.setattr(Prepared, "_made", None)
    gpu.clear()
    y = module(anew(x, 5))
    assert len(gpu.in_lines) == 7
    monkeypatch.undo()


# What has changed since


def chain(dtype=torch.float32):
    """Seven kernels, in containers, in blocks of both kinds, and alone."""
    net = nn.Sequential(
        unit(8, 16),
        nn.ResidualBlock(16, 16),
        nn.ResidualBlock(16, 24),
        nn.Conv3d(24, 8, 1, bias=False),
        nn.BatchNorm(8),
    )
    # One that may be read in other steps from the same address.
    net[0][1].running_mean = torch.zeros(32)[:16]
    return stirred(net).to(dtype)


def known_chain(gpu, x):
    """One that was called, in one line."""
    net = chain(x.dtype)
    for _ in range(2):
        gpu.clear()
        net(x)
    assert [len(each) for each in gpu.lines] == [7]
    gpu.clear()
    return net


class Doubled(nn.ReLU):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledChain(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledBlock(nn.ResidualBlock):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledNorm(nn.BatchNorm):
    def forward(self, x):
        return super().forward(x) * 2


class DoubledConv(nn.Conv3d):
    @property
    def weight(self):
        return self._parameters["weight"] * 2


class Twofold(torch.nn.Module):
    def forward(self, weight):
        return weight * 2


def put(holder, name, value):
    """Assignment as an expression."""
    if isinstance(name, int):
        holder[name] = value
    else:
        setattr(holder, name, value)


def exchanged(tensor, function):
    tensor.data = function(tensor.data)


def classed(module, kind):
    module.__class__ = kind


def unnormed(norm):
    norm.running_mean = norm.running_var = None


def ungrouped(conv):
    conv.groups, conv.weight = 2, torch.nn.Parameter(torch.randn(16, 3, 3, 3, 8))


def plainly(module):
    weight = module.weight.detach() * 2
    del module.weight
    module.weight = weight


def another():
    torch.manual_seed(11)
    net = chain()
    for p in (*net.parameters(), *net.buffers()):
        if p.is_floating_point():
            p.data += torch.rand_like(p)
    return net.state_dict()


def swapped(one, other):
    torch.utils.swap_tensors(one, other)


def inner(net):
    """The first convolution of the block whose shortcut is the identity."""
    return net[1].body[0]


# How many kernels lines have when it is called again, and once more; 7 where all is as before.
CHANGES = {
    "activation of a block": (lambda n: put(n[1], "act", nn.SiLU()), 7),
    "activation behind a norm": (lambda n: put(n[0], 2, nn.SiLU()), 7),
    "torch's activation": (lambda n: put(n[0], 2, torch.nn.SiLU()), 7),
    "an activation that no kernel has": (lambda n: put(n[0], 2, nn.LeakyReLU(0.3)), 0),
    "an activation that no kernel has, in a block": (lambda n: put(n[1], "act", nn.LeakyReLU(0.3)), 4),
    "a norm": (lambda n: put(n, 4, stirred(nn.BatchNorm(8, eps=0.7))), 7),
    "a norm in a block": (lambda n: put(n[1].body, 4, stirred(nn.BatchNorm(16, eps=0.7))), 7),
    "a norm in a shortcut": (lambda n: put(n[2].shortcut, 1, stirred(nn.BatchNorm(24, eps=0.7))), 7),
    "another kind of norm": (lambda n: put(n[1].body, 1, nn.LayerNorm(16)), 4),
    "a convolution in a block": (lambda n: put(n[1].body, 3, nn.Conv3d(16, 16, 1, bias=False)), 7),
    "a convolution of other width": (
        lambda n: put(n[1], "body", nn.Sequential(*unit(16, 40), *stirred(unit(40, 16))[:2])),
        7,
    ),
    "a body": (lambda n: put(n[1], "body", nn.Sequential(*stirred(unit(16, 16))[:2])), 6),
    "a shortcut": (
        lambda n: put(n[2], "shortcut", nn.Sequential(nn.Linear(16, 24, bias=False), nn.BatchNorm(24).eval())),
        7,
    ),
    "a shortcut where there was none": (
        lambda n: put(n[1], "shortcut", nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm(16).eval())),
        8,
    ),
    "a convolution as a shortcut": (lambda n: put(n[2], "shortcut", stirred(unit(16, 24, 1))), 7),
    "a shortcut with a bias": (lambda n: put(n[2].shortcut, 0, nn.Linear(16, 24)), 4),
    "a shortcut without a norm": (lambda n: put(n[2], "shortcut", nn.Linear(16, 24)), 4),
    "one more": (lambda n: n.append(nn.ReLU()), 7),
    "one more in a body": (lambda n: n[1].body.append(nn.ReLU()), 7 - 2),
    "one more within": (lambda n: n[0].append(nn.Conv3d(16, 16, 1, bias=False)), 8),
    "one less": (lambda n: n.__delitem__(4), 7),
    "one between": (lambda n: n.insert(1, nn.Tanh()), 1),
    "others in their order": (lambda n: n[1].body.__setitem__(0, n[1].body[3]), 7),
    "loaded": (lambda n: n.load_state_dict(another(), assign=True), 7),
    "loaded into": (lambda n: n.load_state_dict(another()), 7),
    "a weight in place": (lambda n: inner(n).weight.mul_(2), 7),
    "statistics in place": (lambda n: n[0][1].running_var.mul_(2), 7),
    "a weight": (lambda n: put(inner(n), "weight", torch.nn.Parameter(torch.randn(16, 3, 3, 3, 16))), 7),
    "a weight's data": (lambda n: exchanged(inner(n).weight, torch.randn_like), 7),
    "a shortcut's weight": (lambda n: exchanged(n[2].shortcut[0].weight, torch.randn_like), 7),
    "two weights": (lambda n: swapped(n[1].body[0].weight, n[1].body[3].weight), 7),
    "a weight's axes": (lambda n: exchanged(inner(n).weight, lambda w: w.transpose(1, 3)), 4),
    "a weight's channels": (lambda n: exchanged(n[1].body[3].weight, lambda w: w.transpose(0, 4)), 4),
    "one weight for all": (lambda n: exchanged(inner(n).weight, lambda w: w[:1].expand(16, 3, 3, 3, 16)), 7),
    "a shortcut's axes": (lambda n: exchanged(n[2].shortcut[0].weight, lambda w: w[:, :1].expand(24, 16)), 7),
    "every other of a buffer": (
        lambda n: exchanged(n[0][1].running_mean, lambda v: v.as_strided((16,), (2,)).add_(torch.arange(16.0))),
        7,
    ),
    "one value for all": (lambda n: exchanged(n[1].body[1].weight, lambda v: v[:1].expand(16)), 7),
    "eps": (lambda n: put(n[1].body[1], "eps", 5.0), 7),
    "eps of a shortcut": (lambda n: put(n[2].shortcut[1], "eps", 5.0), 7),
    "one norm trains": (lambda n: n[1].body[4].train(), 4),
    "all train": (lambda n: n.train(), 0),
    "a dataflow": (lambda n: put(inner(n), "dataflow", "explicit-gemm"), 4),
    "a relation": (lambda n: put(inner(n), "relation", Relation.of(3, 3, dilation=2).shared()), 7),
    "groups": (lambda n: ungrouped(inner(n)), 4),
    "a bias": (lambda n: put(inner(n), "bias", torch.nn.Parameter(torch.rand(16))), 4),
    "a bias of a shortcut": (lambda n: put(n[2].shortcut[0], "bias", torch.nn.Parameter(torch.rand(24))), 4),
    "no statistics": (lambda n: unnormed(n[1].body[1]), 4),
    "no scale": (lambda n: put(n[1].body[1], "weight", None), 7),
    "no shift": (lambda n: put(n[2].shortcut[1], "bias", None), 7),
    "class of an activation": (lambda n: classed(n[0][2], Doubled), 0),
    "class of a block's activation": (lambda n: classed(n[1].act, Doubled), 4),
    "class of a norm": (lambda n: classed(n[1].body[1], DoubledNorm), 4),
    "class of a convolution": (lambda n: classed(inner(n), DoubledConv), 4),
    "class of a container": (lambda n: classed(n[0], DoubledChain), 1),
    "class of a block": (lambda n: classed(n[1], DoubledBlock), 6),
    "class of a shortcut": (lambda n: classed(n[2].shortcut, DoubledChain), 4),
    "class of all": (lambda n: classed(n, DoubledChain), 7),
    "forward of an activation": (lambda n: put(n[0][2], "forward", lambda x: x * 2), 0),
    "forward of a container": (lambda n: put(n[0], "forward", lambda x: x.replace(x.feats.repeat(1, 2))), 0),
    "forward of a body": (lambda n: put(n[1].body, "forward", lambda x: x * 2), 4),
    "forward of a shortcut": (lambda n: put(n[1].shortcut, "forward", lambda x: x * 2), 4),
    "forward of a convolution": (lambda n: put(n[3], "forward", lambda x: x.replace(x.feats[:, :8])), 0),
    "parametrized": (lambda n: torch.nn.utils.parametrize.register_parametrization(inner(n), "weight", Twofold()), 4),
    "a parametrized norm": (
        lambda n: torch.nn.utils.parametrize.register_parametrization(n[0][1], "weight", Twofold()),
        0,
    ),
    "a parametrized shortcut": (
        lambda n: torch.nn.utils.parametrize.register_parametrization(n[2].shortcut[0], "weight", Twofold()),
        4,
    ),
    "pruned": (lambda n: torch.nn.utils.prune.random_unstructured(inner(n), "weight", 0.5), 4),
    "a pruned norm": (lambda n: torch.nn.utils.prune.random_unstructured(n[0][1], "bias", 0.5), 0),
    "a plain weight": (lambda n: plainly(inner(n)), 4),
    "a plain scale": (lambda n: plainly(n[1].body[1]), 4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_heard(gpu, name):
    change, _ = CHANGES[name]
    x = cloud()
    net = known_chain(gpu, x)
    before = agree_with(net, anew(x, 1))
    change(net)
    counts = []
    for seed in (1, 2, 3):
        gpu.clear()
        y = agree(gpu, net, anew(x, seed))
        counts.append(len(gpu.in_lines))
        if seed == 1:
            assert y.feats.shape != before.feats.shape or not torch.allclose(y.feats, before.feats)
    print("COUNT", name, counts, CHANGES[name][1])
