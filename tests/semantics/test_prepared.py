"""Layers whose kernels are started one after the other: the results are those of modules one by one, and whatever has
changed since the last call is heard. Kernels compute, on memory of the CPU (tests/emulated.py)."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from emulated import emulated, on_cpu, unprepared
from lined import (
    Twofold,
    anew,
    around,
    askew,
    exchanged,
    inner,
    problem_of,
    put,
    twice,
    ungrouped,
    unit,
    unnormed,
)
from nets import stirred
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import pumice as pm
from pumice import nn
from pumice.coords import KernelMap, Relation, kernel_map
from pumice.lower import direct, stamp
from pumice.lower import kernel as kernels
from pumice.models.minkunet import Decoder, Encoder
from pumice.nn import fused
from pumice.nn.prepared import Parts, Prepared, prepared
from pumice.ops import line, linear
from pumice.ops.tensor import unchecked_tensor
from pumice.schedule.tile import Tile
from pumice.schedule.tuned_tiles import Ledger
from pumice.testing import random_cloud

NEAR = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 0.03, "atol": 0.1},
}


@pytest.fixture
def gpu(tmp_path):
    with emulated(tmp_path) as found, torch.no_grad():
        yield found


COORDS = random_cloud(400, 3, extent=(24, 24, 12), seed=1)
WIDE = random_cloud(900, 3, extent=(80, 80, 40), seed=1)
"""Of several voxels on the coarsest level of a network."""


def cloud(channels=8, dtype=torch.float32, rows=400):
    feats = torch.randn(rows, channels, generator=torch.Generator().manual_seed(rows))
    return pm.SparseTensor(feats.to(dtype), COORDS[:rows])


def scan(dtype=torch.float32):
    return pm.SparseTensor(torch.zeros(len(WIDE), 4, dtype=dtype), WIDE)


TWINS = weakref.WeakKeyDictionary()
"""Of coordinates others, with maps of their own."""


def one_by_one(module, x):
    """What the modules give on a CPU."""
    with on_cpu():
        twin = TWINS.get(x.geometry) or TWINS.setdefault(x.geometry, pm.SparseTensor(x.feats, x.coords).geometry)
        return module(unchecked_tensor(x.feats, twin))


def agree(gpu, module, x, y=None):
    """That a call gives what kernels give that are started by modules one by one, to the last bit, and what modules
    give without kernels; the result."""
    y = module(x) if y is None else y
    after = len(gpu.started), len(gpu.lines), len(gpu.made)
    with unprepared():
        want = module(x)
    assert torch.equal(y.feats, want.feats) and y.dtype == want.dtype and y.feats.stride() == want.feats.stride()
    assert torch.equal(y.coords, want.coords) and y.stride == want.stride
    torch.testing.assert_close(y.feats, one_by_one(module, x).feats, **NEAR[y.dtype])
    # What the comparison has started is not the call's.
    del gpu.started[after[0] :], gpu.lines[after[1] :], gpu.made[after[2] :]
    return y


def kernels_of(module):
    """Of a module whose calls are known, in one line."""
    return sum(isinstance(part, nn.conv.Convolution | nn.Linear) for part in module.modules())


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
    "blocks that end in one of one": lambda: nn.Sequential(
        nn.ResidualBlock(8, 8), nn.ResidualBlock(8, 8), nn.ResidualBlock(8, 8), around(8, 8, *unit(8, 8)[:2])
    ),
    "one block three times": twice,
    "coarser": lambda: nn.Sequential(unit(8, 16, 2, stride=2), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 8)),
    "coarser twice": lambda: nn.Sequential(
        nn.ResidualBlock(8, 16), unit(16, 16, 2, stride=2), unit(16, 4, 3, stride=2), nn.ResidualBlock(4, 16)
    ),
    "encoder": lambda: Encoder(8, 16, 3),
    "finer": lambda: nn.Sequential(
        nn.ResidualBlock(8, 16),
        nn.ConvTranspose3d(16, 8, 2, stride=2, bias=False),
        nn.BatchNorm(8),
        nn.ReLU(),
        unit(8, 8),
    ),
    "offsets": lambda: nn.Sequential(
        nn.Conv3d(8, 16, None, offsets=((0, 0, 0), (0, 1, 0), (2, 0, -1)), bias=False), nn.SiLU(), unit(16, 8)
    ),
    "no scale": lambda: nn.Sequential(nn.Conv3d(8, 8, 3, bias=False), nn.BatchNorm(8, affine=False), nn.ReLU()),
}


IN_HALF = ("one", "block", "block, linear shortcut", "blocks that grow", "nested", "encoder")
KINDS = [(name, torch.float32) for name in LINES] + [(name, torch.float16) for name in IN_HALF]


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=[f"{name}, {str(dtype)[6:]}" for name, dtype in KINDS])
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
    ((out, memory), (*between, last)) = gpu.made[0], gpu.lines[0]
    assert memory.dtype == torch.uint8 and out.data_ptr() == y.feats.data_ptr() == last.bytes[""][0]
    begin, size = memory.data_ptr(), memory.numel()
    places = {one.bytes[""][0] for one in between}
    assert len(places) == min(3, len(between)) or not {"block", "linear"} & {*name.split()}
    # The last one writes where something lay that it does not read.
    own = places - {out.data_ptr()}
    step = size // len(own) if own else 0
    room = out.untyped_storage().nbytes()
    for one in between:
        first, length = one.bytes[""]
        if first == out.data_ptr():
            assert length <= room
            continue
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
    # What comes out of the first block is as it was.
    assert len(gpu.in_lines) == 3


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_few_rows(gpu, rows):
    module, x = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 8))), cloud(rows=rows)
    for seed in (0, 1, 2):
        y = agree(gpu, module, anew(x, seed))
        assert y.feats.shape == (rows, 8)
    # Another kernel's result is float32 where there is one row alone.
    assert len(gpu.lines) == (2 if rows else 0) or rows == 1


def test_another_cloud_goes_by_templates(gpu):
    """Where nothing was kept for its maps: a block in a line at once, of kernels that others were compiled for."""
    module = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, 24), unit(24, 8, 2, stride=2)))
    for rows in (400, 399) * 2:
        agree(gpu, module, cloud(rows=rows))
    for rows in (397, 398, 395):
        x = cloud(rows=rows)
        gpu.clear()
        y = module(x)
        # Some maps are not known before.
        assert max(len(each) for each in gpu.lines) >= 3 and all(one.by_address for one in gpu.in_lines)
        agree(gpu, module, x, y)


def test_another_scan_goes_by_templates(gpu, nets):
    """Of a network, which prepares its maps: its lines are longer."""
    net = nets[torch.float16]
    scans = [pm.SparseTensor(torch.randn(rows, 4).half(), WIDE[:rows]) for rows in (896, 893, 896, 893, 891)]
    for x in scans:
        gpu.clear()
        y = net(x)
        assert torch.equal(agree_with(net, x).feats, y.feats)
    assert len(gpu.in_lines) > 30 and max(len(each) for each in gpu.lines) > 4


@pytest.mark.parametrize("piece", [2, 8])
def test_what_programs_share_is_enough_for_all_of_a_line(gpu, monkeypatch, piece):
    """And is the same for all of them, which run one after the other."""
    module, x = chain(), cloud()
    monkeypatch.setattr(
        Ledger, "get", lambda self, key: Tile(64, 16, 16, stream_k_chunk=piece) if "map" in key.statement else None
    )
    lent, needed, whole, found_of = [], [], line.workspace, line.found_of

    def lends(count, size, device):
        lent.append((count, size))
        return whole(count, size, device)

    def told_of(*given):
        found = found_of(*given)
        needed.append([f.call.aimed.needs for f in found if f.call.aimed.slots.scratch is not None])
        return found

    monkeypatch.setattr(line, "workspace", lends)
    monkeypatch.setattr(line, "found_of", told_of)
    for seed in (0, 1):
        lent.clear(), needed.clear()
        agree(gpu, module, anew(x, seed))
    (own,) = needed
    assert len(own) > 4 and lent == [(max(n for n, _ in own), max(n for _, n in own))]


@pytest.fixture(scope="module")
def nets():
    torch.manual_seed(0)
    return {dtype: stirred(pm.models.MinkUNet(4, 5, 0.25)).to(dtype) for dtype in NEAR}


@pytest.mark.parametrize("dtype", NEAR, ids=["single", "half"])
def test_a_whole_network(gpu, nets, dtype):
    """Down, up again beside what came down, and the columns that the way up leaves free."""
    net, x = nets[dtype], scan(dtype)
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
    roomy = [made[0] for of_line, made in zip(gpu.lines, gpu.made, strict=True) if len(of_line) == 1]
    assert [made.shape[1] for made in roomy] == [64 + 32, 32 + 16, 24 + 8, 24 + 8]


def agree_with(module, *given):
    with unprepared():
        return module(*given)


def unprepared_problem_of(module, *given):
    with unprepared():
        return problem_of(module, *given)


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
    else:
        assert problem_of(decoder, below, other) == unprepared_problem_of(decoder, below, other) is not None


def test_calls_are_those_of_modules_one_by_one(gpu, nets):
    """Grid and arguments, when nothing is known, when all is, and without lines."""
    net, x = nets[torch.float16], scan(torch.float16)
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
    monkeypatch.setattr("pumice.nn.conv.convolve", None)
    monkeypatch.setattr(Prepared, "_made", None)
    gpu.clear()
    module(anew(x, 5))
    assert len(gpu.in_lines) == 7


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


def classed(module, kind):
    module.__class__ = kind


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


# How many kernels lines have when it is called again, and once more; 7 where all is as before.
CHANGES = {
    "activation of a block": (lambda n: put(n[1], "act", nn.SiLU()), 7),
    "activation behind a norm": (lambda n: put(n[0], 2, nn.SiLU()), 7),
    "torch's activation": (lambda n: put(n[0], 2, torch.nn.SiLU()), 7),
    "an activation that no kernel has": (lambda n: put(n[0], 2, nn.LeakyReLU(0.3)), 6),
    "an activation that no kernel has, in a block": (lambda n: put(n[1], "act", nn.LeakyReLU(0.3)), 4),
    "a norm": (lambda n: put(n, 4, stirred(nn.BatchNorm(8, eps=0.7))), 7),
    "a norm in a block": (lambda n: put(n[1].body, 4, stirred(nn.BatchNorm(16, eps=0.7))), 7),
    "a norm in a shortcut": (lambda n: put(n[2].shortcut, 1, stirred(nn.BatchNorm(24, eps=0.7))), 7),
    "another kind of norm": (lambda n: put(n[1].body, 1, nn.LayerNorm(16)), 4),
    "a convolution in a block": (lambda n: put(n[1].body, 3, nn.Conv3d(16, 16, 1, bias=False)), 7),
    "a convolution of other width": (
        lambda n: put(n[1], "body", stirred(nn.Sequential(*unit(16, 40), *unit(40, 16)[:2]))),
        7,
    ),
    "a body": (lambda n: put(n[1], "body", nn.Sequential(*stirred(unit(16, 16))[:2])), 6),
    "a body of one layer": (lambda n: put(n[1], "body", nn.Conv3d(16, 16, 3)), 4),
    "a shortcut": (
        lambda n: put(n[2], "shortcut", nn.Sequential(nn.Linear(16, 24, bias=False), nn.BatchNorm(24).eval())),
        7,
    ),
    "a shortcut where there was none": (
        lambda n: put(n[1], "shortcut", nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm(16).eval())),
        8,
    ),
    "a convolution as a shortcut": (lambda n: put(n[2], "shortcut", stirred(unit(16, 24, 1))), 7),
    "a shortcut with a bias": (lambda n: put(n[2].shortcut, 0, nn.Linear(16, 24)), 3),
    "a shortcut without a norm": (lambda n: put(n[2], "shortcut", nn.Linear(16, 24)), 3),
    "one more": (lambda n: n.append(nn.ReLU()), 7),
    "one more in a body": (lambda n: n[1].body.append(nn.ReLU()), 4),
    "one more within": (lambda n: n[0].append(nn.Conv3d(16, 16, 1, bias=False)), 8),
    "one less": (lambda n: n.__delitem__(4), 7),
    "one between": (lambda n: n.insert(1, nn.Tanh()), 6),
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
    "a weight's channels": (lambda n: exchanged(n[1].body[3].weight, lambda w: w.transpose(0, 4)), 7),
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
    "a bias of a shortcut": (lambda n: put(n[2].shortcut[0], "bias", torch.nn.Parameter(torch.rand(24))), 3),
    "no statistics": (lambda n: unnormed(n[1].body[1]), 4),
    "no scale": (lambda n: put(n[1].body[1], "weight", None), 7),
    "no shift": (lambda n: put(n[2].shortcut[1], "bias", None), 7),
    "class of an activation": (lambda n: classed(n[0][2], Doubled), 6),
    "class of a block's activation": (lambda n: classed(n[1].act, Doubled), 4),
    "class of a norm": (lambda n: classed(n[1].body[1], DoubledNorm), 4),
    "class of a convolution": (lambda n: classed(inner(n), DoubledConv), 4),
    "class of a container": (lambda n: classed(n[0], DoubledChain), 6),
    "class of a block": (lambda n: classed(n[1], DoubledBlock), 6),
    "class of a shortcut": (lambda n: classed(n[2].shortcut, DoubledChain), 4),
    "a function as activation": (lambda n: (delattr(n[1], "act"), put(n[1], "act", lambda y: y.map(torch.sigmoid))), 6),
    "a function as shortcut": (lambda n: (delattr(n[1], "shortcut"), put(n[1], "shortcut", lambda y: y * 2)), 6),
    "class of all": (lambda n: classed(n, DoubledChain), 7),
    "forward of an activation": (lambda n: put(n[0][2], "forward", lambda x: x * 2), 5),
    "forward of a container": (lambda n: put(n[0], "forward", lambda x: x.replace(x.feats.repeat(1, 2))), 5),
    "forward of a body": (lambda n: put(n[1].body, "forward", lambda x: x * 2), 4),
    "forward of a shortcut": (lambda n: put(n[1].shortcut, "forward", lambda x: x * 2), 4),
    "forward of a convolution": (lambda n: put(n[3], "forward", lambda x: x.replace(x.feats[:, :8])), 6),
    "parametrized": (lambda n: torch.nn.utils.parametrize.register_parametrization(inner(n), "weight", Twofold()), 4),
    "a parametrized norm": (
        lambda n: torch.nn.utils.parametrize.register_parametrization(n[0][1], "weight", Twofold()),
        6,
    ),
    "a parametrized shortcut": (
        lambda n: torch.nn.utils.parametrize.register_parametrization(n[2].shortcut[0], "weight", Twofold()),
        3,
    ),
    "pruned": (lambda n: torch.nn.utils.prune.random_unstructured(inner(n), "weight", 0.5), 4),
    "a pruned norm": (lambda n: torch.nn.utils.prune.random_unstructured(n[0][1], "bias", 0.5), 5),
    "a plain weight": (lambda n: plainly(inner(n)), 4),
    "a plain scale": (lambda n: plainly(n[1].body[1]), 4),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_heard(gpu, name):
    change, in_lines = CHANGES[name]
    x = cloud()
    net = known_chain(gpu, x)
    before = agree_with(net, anew(x, 1))
    change(net)
    for seed in (1, 2):
        gpu.clear()
        y = agree(gpu, net, anew(x, seed))
        if seed == 1:
            same = y.feats.shape == before.feats.shape and torch.allclose(y.feats, before.feats)
            assert same == (name == "a dataflow")
    # And the second time, where it can be, it is known.
    assert len(gpu.in_lines) == in_lines


@pytest.mark.parametrize("name", ["a weight in place", "statistics in place", "loaded into"])
def test_what_is_written_in_place_is_read_by_the_same_launches(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    net(x)
    before = [one.told for one in gpu.in_lines]
    CHANGES[name][0](net)
    gpu.clear()
    agree(gpu, net, x)
    assert [one.told for one in gpu.in_lines] == before and len(before) == 7


def test_what_was_there_before_is_known_again(gpu):
    """Back and forth between two weights."""
    x = cloud()
    net = known_chain(gpu, x)
    one, other = inner(net).weight, torch.nn.Parameter(torch.randn(16, 3, 3, 3, 16))
    for weight in (other, one, other, one):
        inner(net).weight = weight
        gpu.clear()
        agree(gpu, net, anew(x, 4))
        assert [len(each) for each in gpu.lines] == [7]
        assert weight.data_ptr() in {each.bytes["w"][0] for each in gpu.in_lines}


FLOATS = {
    "half": lambda net: net.half(),
    "double, and back": lambda net: net.double().float(),
    "features": lambda net: net,
}


@pytest.mark.parametrize("name", FLOATS)
def test_other_floats(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    FLOATS[name](net)
    x = x.to(torch.float16 if name == "half" else torch.float32)
    for seed in (1, 2):
        gpu.clear()
        agree(gpu, net, anew(x, seed))
    assert len(gpu.in_lines) == 7
    for wrong in (torch.float64, torch.float16 if name != "half" else torch.float32):
        for _ in range(2):
            assert problem_of(net, x.to(wrong)) == unprepared_problem_of(net, x.to(wrong)) is not None
    agree(gpu, net, anew(x, 3))


ERRORS = {
    "a convolution in half": lambda n: inner(n).half(),
    "a shortcut in half": lambda n: n[2].shortcut[0].half(),
    "a narrow convolution": lambda n: exchanged(inner(n).weight, lambda w: w[..., :8]),
    "a smaller window": lambda n: exchanged(inner(n).weight, lambda w: w[:, :1]),
    "fewer channels": lambda n: exchanged(inner(n).weight, lambda w: w[:12]),
    "a wide shortcut": lambda n: put(n[2].shortcut, 0, nn.Linear(20, 24, bias=False)),
    "a narrow norm": lambda n: put(n[1].body, 4, nn.BatchNorm(12).eval()),
    "short statistics": lambda n: exchanged(n[1].body[4].running_var, lambda v: v[:12]),
    "another relation's window": lambda n: put(inner(n), "relation", Relation.of(3, 2).shared()),
    "a plane's relation": lambda n: put(inner(n), "relation", Relation.of(2, 3).shared()),
    "no weight": lambda n: put(inner(n), "weight", None),
    "no shortcut's weight": lambda n: delattr(n[2].shortcut[0], "weight"),
    "no body": lambda n: delattr(n[1], "body"),
    "groups": lambda n: put(inner(n), "groups", 2),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_any_more_is_told_alike(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    ERRORS[name](net)
    for _ in range(2):
        assert problem_of(net, x) == unprepared_problem_of(net, x) is not None


def test_a_body_may_be_one_layer(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    torch.manual_seed(8)
    net[1].body = nn.Conv3d(16, 16, 3)
    for seed in (1, 2):
        agree(gpu, net, anew(x, seed))


# Who listens

HOOKS = {
    "behind": lambda module, heard: module.register_forward_hook(lambda module, given, y: heard.append(1) or y * 2),
    "before": lambda module, heard: module.register_forward_pre_hook(
        lambda module, given: heard.append(1) or (given[0] * 2,)
    ),
    "with keywords": lambda module, heard: module.register_forward_hook(
        lambda module, given, more, y: heard.append(1), with_kwargs=True
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("part", ["", "0", "1", "2", "3", "4"])
def test_hooks_of_every_module_hear(gpu, part, kind):
    x = cloud()
    net = known_chain(gpu, x)
    modules = net.get_submodule(part).named_modules() if part else [("", net)]
    for name, module in modules:
        heard = []
        handle = HOOKS[kind](module, heard)
        agree(gpu, net, anew(x, 1))
        # By the call, by the one that it is compared with, and on the CPU.
        assert len(heard) == 3, name
        handle.remove()
        gpu.clear()
        net(x)
        assert len(heard) == 3 and len(gpu.in_lines) == 7, name


@pytest.mark.parametrize("kind", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_of_all_modules_hear(gpu, kind):
    x = cloud()
    net, heard = known_chain(gpu, x), []
    handle = getattr(torch.nn.modules.module, kind)(lambda module, *given: heard.append(module))
    try:
        net(x)
    finally:
        handle.remove()
    assert {*heard} == {*net.modules()} and not gpu.lines


def test_a_hook_that_is_put_there_by_another_hook_hears(gpu):
    x = cloud()
    net, heard = known_chain(gpu, x), []
    handle = net.register_forward_pre_hook(
        lambda *given: net[1].act.register_forward_hook(lambda *given: heard.append(1)) and None
    )
    net(x)
    handle.remove()
    assert heard == [1] and max(len(each) for each in gpu.lines) < 7


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def transformed(net, x):
    def squared(feats):
        return net(x).feats.sum() * feats

    return torch.func.vmap(squared)(torch.ones(2))


def forwards(net, x):
    with forward_ad.dual_level():
        feats = forward_ad.make_dual(x.feats, torch.ones_like(x.feats))
        y = net(x.replace(feats))
        assert forward_ad.unpack_dual(y.feats).tangent is not None


def told(net, x, mode):
    with mode:
        net(x)


WATCHED = {
    "gradients": lambda net, x: told(net, x, torch.enable_grad()),
    "gradients of features": lambda net, x: told(net.requires_grad_(False), x.requires_grad_(), torch.enable_grad()),
    "autocast": lambda net, x: told(net, x, torch.autocast("cpu", torch.bfloat16)),
    "a dispatch mode": lambda net, x: told(net, x, Seen()),
    "a function mode": lambda net, x: told(net, x, Asked()),
    "a transform": transformed,
    "forward differentiation": forwards,
}


@pytest.mark.parametrize("name", WATCHED)
def test_where_somebody_watches_no_line_is_started(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    WATCHED[name](net, x)
    assert not gpu.lines
    agree(gpu, net, anew(x.detach(), 2))
    assert [len(each) for each in gpu.lines] == [7]


def test_gradients_are_those_of_modules(gpu):
    """Behind a line that was known."""
    x = cloud()
    net = known_chain(gpu, x)
    with torch.enable_grad():
        y = net(x).feats
        with on_cpu():
            want = net(pm.SparseTensor(x.feats, x.coords)).feats
        torch.testing.assert_close(y, want, **NEAR[torch.float32])
        assert y.requires_grad and not gpu.lines


@pytest.mark.parametrize("way", ["inference", "no gradients"])
def test_inference_is_no_gradients(gpu, way):
    x = cloud()
    net = known_chain(gpu, x)
    with torch.inference_mode() if way == "inference" else torch.no_grad():
        y = net(x)
    assert [len(each) for each in gpu.lines] == [7] and y.feats.is_inference() == (way == "inference")


@pytest.mark.parametrize("setting", ["deterministic", "tiles", "tuned since"])
def test_what_is_set_for_all_calls_counts(gpu, setting, monkeypatch):
    """Launches are looked up anew, under other keys."""
    x = cloud()
    net, keys, found_of = known_chain(gpu, x), [], line.found_of
    monkeypatch.setattr(
        line, "found_of", lambda *given: keys.append({each.key for each in given[0]}) or found_of(*given)
    )
    net(x)
    with monkeypatch.context() as patch:
        if setting == "deterministic":
            patch.setattr(direct, "deterministic", lambda: True)
        elif setting == "tiles":
            patch.setattr(kernels, "tuning_mode", lambda: kernels.DEFAULT)
        else:
            patch.setattr(direct, "ledger", lambda: SimpleNamespace(generation=77))
        agree(gpu, net, x)
        assert keys[-1].isdisjoint(keys[0])
        gpu.clear()
        agree(gpu, net, anew(x, 1))
        assert [len(each) for each in gpu.lines] == [7]
    keys.clear(), gpu.clear()
    agree(gpu, net, anew(x, 2))
    assert [len(each) for each in gpu.lines] == [7] and len(keys) == 1


def test_deterministic_algorithms_are_a_setting(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    want = net(x)
    torch.use_deterministic_algorithms(True)
    try:
        # Memory that is made is filled with NaN then.
        for lines in ([], [7]):
            gpu.clear()
            y = net(x)
            assert [len(each) for each in gpu.lines] == lines
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(y.feats, want.feats)


def test_precision_of_products_is_what_is_set(gpu, monkeypatch):
    x = cloud()
    net = known_chain(gpu, x)
    for setting, expected in (("ieee", "tf32x3"), ("tf32", "tf32"), ("ieee", "tf32x3"), ("tf32", "tf32")):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=setting))
        gpu.clear()
        net(x)
        assert all(expected in each.told for each in gpu.started) and len(gpu.started) == 7
    assert [len(each) for each in gpu.lines] == [7]


def test_precision_is_no_matter_of_half(gpu, monkeypatch):
    x = cloud(dtype=torch.float16)
    net = known_chain(gpu, x)
    monkeypatch.setattr(kernels, "float32_precision", lambda: pytest.fail("asked"))
    agree_in_line = net(x)
    assert agree_in_line.dtype == torch.float16 and [len(each) for each in gpu.lines] == [7]


def test_precision_is_a_matter_of_half_where_a_norm_is_wide(gpu, monkeypatch):
    x = cloud(dtype=torch.float16)
    net = chain(torch.float16)
    net[1].body[1].float()
    for setting in ("ieee", "tf32"):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=setting))
        for seed in (0, 1):
            gpu.clear()
            agree(gpu, net, anew(x, seed))
        assert [len(each) for each in gpu.lines] == [7]


def test_weights_that_are_given_with_a_call_are_read(gpu):
    x = cloud()
    net, other = known_chain(gpu, x), another()
    with unprepared():
        want = torch.func.functional_call(net, other, (x,))
    for _ in range(2):
        y = torch.func.functional_call(net, other, (x,))
        assert torch.equal(y.feats, want.feats)
    before = agree(gpu, net, x)
    assert not torch.allclose(before.feats, y.feats)


# In part, or not at all


def test_what_is_not_known_yet_follows_by_itself(gpu):
    x = cloud()
    first, second = stirred(unit(8, 16)), stirred(unit(16, 24))
    net = nn.Sequential(first, second, stirred(unit(24, 8)))
    first(x), first(x)
    gpu.clear()
    y = net(anew(x, 1))
    assert [len(each) for each in gpu.lines] == [1] and [each.by_address for each in gpu.started] == [
        True,
        False,
        False,
    ]
    agree(gpu, net, anew(x, 1), y)
    gpu.clear()
    agree(gpu, net, anew(x, 2))
    assert [len(each) for each in gpu.lines] == [3]


@pytest.mark.parametrize("linear", [False, True], ids=["identity", "linear"])
def test_a_block_is_started_whole_or_not_at_all(gpu, linear):
    """Where all but its last kernel are known, too."""
    x, count = cloud(), 24 if linear else 16
    net = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, count)))
    parts = [net[0], nn.Sequential(*net[1].body[:3]), *([net[1].shortcut] if linear else [])]
    for _ in range(2):
        between = net[0](x)
        for part in parts[1:]:
            part(between)
    gpu.clear()
    y = net(anew(x, 1))
    assert [len(each) for each in gpu.lines][:1] == [1]
    # What begins a block is no line of its own.
    assert sum(len(each) for each in gpu.lines) == 1 + linear and not gpu.started[-1].by_address
    agree(gpu, net, anew(x, 1), y)
    gpu.clear()
    agree(gpu, net, anew(x, 2))
    assert [len(each) for each in gpu.lines] == [3 + linear]


def test_features_that_are_not_aligned(gpu):
    x = cloud(dtype=torch.float16)
    net = known_chain(gpu, x)
    odd = x.replace(askew(anew(x, 1).feats))
    assert odd.feats.data_ptr() % 16
    for _ in range(2):
        gpu.clear()
        agree(gpu, net, odd)
        # The first kernel reads them; behind it all is aligned again.
        assert len(gpu.in_lines) == 5
        assert [each.bytes["x"][0] for each in gpu.started][0] == odd.feats.data_ptr()


@pytest.mark.parametrize("which", ["weight", "mean", "shortcut"])
def test_what_is_not_aligned_is_in_no_line(gpu, which):
    x = cloud()
    net = known_chain(gpu, x)
    block = net[2]
    tensor = {"weight": block.body[0].weight, "mean": block.body[4].running_mean, "shortcut": block.shortcut[0].weight}
    exchanged(tensor[which], askew)
    assert tensor[which].data_ptr() % 16
    for seed in (1, 2):
        gpu.clear()
        agree(gpu, net, anew(x, seed))
        # What is before the block, and a shortcut by itself.
        assert [len(each) for each in gpu.lines] == [3] + [1] * (which != "shortcut")


@pytest.mark.parametrize("rows", [399, 401, 1])
def test_features_of_other_rows_than_the_map(gpu, rows):
    x = cloud()
    net = known_chain(gpu, x)
    wrong = unchecked_tensor(torch.zeros(rows, 8), x.geometry)
    assert problem_of(net, wrong) == unprepared_problem_of(net, wrong) is not None
    assert not gpu.lines


def test_a_target_that_does_not_fit_is_told_alike(gpu):
    decoder, down = stirred(Decoder(8, 16, 8, 3)), stirred(unit(8, 8, 2, stride=2))
    x = cloud()
    below = down(x)
    for _ in range(2):
        decoder(below, x)
    apart = pm.SparseTensor(torch.randn(300, 8), torch.cat([COORDS[:300, :1], COORDS[:300, 1:] + 100], 1))
    for target in (apart, below, x.coords, "support", None, down(below)):
        found = problem_of(decoder, below, target)
        assert found == unprepared_problem_of(decoder, below, target)
    y = decoder(below, x)
    assert torch.equal(y.feats, agree_with(decoder, below, x).feats)


PLAIN = {
    "groups": lambda: nn.ResidualBlock(8, 8).requires_grad_(False),
    "bias": lambda: nn.ResidualBlock(8, 8, bias=True),
    "another norm": lambda: nn.ResidualBlock(8, 8, norm=nn.LayerNorm),
    "other coordinates": lambda: around(8, 8, nn.Conv3d(8, 8, 3, bias=False, out="support"), nn.BatchNorm(8)),
    "coordinates of the first": lambda: around(
        8, 8, *unit(8, 8, 3, out="support"), nn.Conv3d(8, 8, 3, bias=False), nn.BatchNorm(8)
    ),
    "an activation of a norm": lambda: around(8, 8, *unit(8, 8), act=lambda: nn.LayerNorm(8)),
    "a norm as activation": lambda: around(8, 8, nn.Conv3d(8, 8, 3, bias=False), act=lambda: nn.BatchNorm(8)),
    "a layer as activation": lambda: around(8, 8, *unit(8, 8), act=lambda: nn.Conv3d(8, 8, 3, bias=False)),
    "a chain as activation": lambda: around(8, 8, *unit(8, 8), act=lambda: unit(8, 8)),
    "a bare body": lambda: around(8, 8, nn.Conv3d(8, 8, 3, bias=False), nn.LayerNorm(8)),
    "a body of a linear map": lambda: around(8, 8, nn.Linear(8, 8, bias=False), nn.BatchNorm(8)),
    "no body": lambda: around(8, 8),
}


@pytest.mark.parametrize("name", PLAIN)
def test_blocks_that_are_no_lines(gpu, name):
    block, x = PLAIN[name](), cloud()
    if name == "groups":
        block.body[0] = nn.Conv3d(8, 8, 3, groups=2, bias=False)
    net = stirred(nn.Sequential(unit(8, 8), block, unit(8, 8)))
    for seed in (0, 1, 2):
        gpu.clear()
        agree(gpu, net, anew(x, seed))
    # None of which is the block's, though kernels of its body may be.
    assert all(len(each) == 1 and "*residual" not in each[0].bytes for each in gpu.lines) and gpu.lines


def test_a_block_over_other_strides_is_told_alike(gpu):
    block, x = stirred(around(8, 8, nn.Conv3d(8, 8, 2, stride=2, bias=False), nn.BatchNorm(8))), cloud()
    for _ in range(3):
        assert problem_of(block, x) == unprepared_problem_of(block, x) is not None
    assert not gpu.lines


def test_modules_of_the_users_own_are_called(gpu):
    net, x = stirred(nn.Sequential(unit(8, 8), DoubledBlock(8, 8), DoubledChain(*unit(8, 8)), unit(8, 8))), cloud()
    for seed in (0, 1, 2):
        gpu.clear()
        agree(gpu, net, anew(x, seed))
    assert [len(each) for each in gpu.lines] == [1, 2, 1, 1]


def test_dense_features_go_past(gpu):
    """A sequence of modules of torch's own, of a tensor."""
    net, x = nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()), torch.randn(5, 8)
    assert torch.equal(net(x), net[1](net[0](x))) and "_prepared" not in net.__dict__


def test_threads_share_a_module(gpu):
    """With features of two dtypes of layouts, in turn."""
    x = cloud()
    net = known_chain(gpu, x)
    wide = x.replace(torch.randn(400, 16)[:, :8])
    want = [agree_with(net, each).feats for each in (x, wide)]
    net(wide)
    wrong = []

    def go(number):
        with torch.no_grad():
            for _ in range(8):
                y = net((x, wide)[number % 2]).feats
                if not torch.equal(y, want[number % 2]):
                    wrong.append(number)

    threads = [threading.Thread(target=go, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_hooks_within_levels_of_a_network_hear(gpu, name):
    x, down = cloud(), stirred(unit(8, 8, 2, stride=2))
    level = stirred(Encoder(8, 16, 3) if name == "encoder" else Decoder(8, 16, 8, 3))
    given = (x,) if name == "encoder" else (down(x), x)
    for _ in range(2):
        gpu.clear()
        level(*given)
    known = [len(each) for each in gpu.lines]
    assert known == ([6] if name == "encoder" else [1, 5])
    for module in level.modules():
        heard = []
        handle = module.register_forward_hook(lambda module, given, y, heard=heard: heard.append(1) or y * 3)
        y = level(*given)
        assert torch.equal(agree_with(level, *given).feats, y.feats) and len(heard) == 2
        handle.remove()
    gpu.clear()
    level(*given)
    assert [len(each) for each in gpu.lines] == known


DECODERS = {
    "activation": lambda d: put(d.norm, 1, nn.SiLU()),
    "another activation": lambda d: put(d.norm, 1, nn.Tanh()),
    "one more": lambda d: d.norm.append(nn.Tanh()),
    "a norm": lambda d: put(d, "norm", stirred(nn.Sequential(nn.BatchNorm(16, eps=2.0)))),
    "a bias": lambda d: put(d.up, "bias", torch.nn.Parameter(torch.rand(16))),
    "a weight": lambda d: exchanged(d.up.weight, torch.randn_like),
    "groups": lambda d: put(d, "up", nn.InverseConv3d(8, 16, 2, stride=2, groups=2, bias=False)),
    "training": lambda d: d.norm.train(),
}


@pytest.mark.parametrize("name", DECODERS)
def test_what_has_changed_on_the_way_up_is_heard(gpu, name):
    decoder, down, x = stirred(Decoder(8, 16, 8, 3)), stirred(unit(8, 8, 2, stride=2)), cloud()
    below = down(x)
    for _ in range(2):
        before = decoder(below, x)
    DECODERS[name](decoder)
    for seed in (0, 1):
        given = anew(below, seed), anew(x, seed)
        y = decoder(*given)
        assert torch.equal(y.feats, agree_with(decoder, *given).feats)
        with on_cpu():
            fine = pm.SparseTensor(given[1].feats, x.coords)
            want = decoder(down(fine).replace(given[0].feats), fine)
        torch.testing.assert_close(y.feats, want.feats, **NEAR[torch.float32])
    assert not torch.allclose(decoder(below, x).feats, before.feats)


# Copies, and what lives as long


def reached(thing, past=()):
    """All that is held by a thing, but for what modules hold."""
    seen, found, left = set(past), [], [thing]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | torch.nn.Module):
            continue
        seen.add(id(one))
        found.append(one)
        left += gc.get_referents(one)
    return found


def held_by_modules(net):
    return {id(own) for m in net.modules() for own in (m._parameters, m._buffers, m._modules)}


def test_what_is_kept_holds_no_memory_and_no_kernels(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    kinds = {type(one) for one in reached(net.__dict__["_prepared"], held_by_modules(net))}
    assert line.Launch in kinds
    assert not kinds & {
        torch.Tensor,
        torch.nn.Parameter,
        direct.Direct,
        stamp.Aimed,
        KernelMap,
        torch.storage.UntypedStorage,
    }


def loaded(net):
    memory = io.BytesIO()
    torch.save(net, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), loaded, copy.copy])
def test_copies_begin_anew(gpu, way):
    x = cloud()
    net = known_chain(gpu, x)
    size = len(pickle.dumps(net))
    copied = way(net)
    assert size < len(pickle.dumps(chain())) + 4000
    if way is not copy.copy:
        kept = copied.__dict__["_prepared"]
        assert (kept.parts, kept.steps, kept.watched) == (Parts(()), (), ())
        assert not {id(m) for m in copied.modules()} & {id(m) for m in net.modules()}
        for p in copied.parameters():
            p.data.mul_(1.5)
    for seed in (1, 2):
        gpu.clear()
        first, second = agree(gpu, net, anew(x, seed)), agree(gpu, copied, anew(x, seed))
        assert [len(each) for each in gpu.lines] == [7, 7]
        assert torch.equal(first.feats, second.feats) == (way is copy.copy)
    own = {p.data_ptr() for p in copied.parameters()}
    assert {each.bytes["w"][0] for each in gpu.lines[1]} <= own
    assert net.state_dict().keys() == chain().state_dict().keys() == copied.state_dict().keys()


def test_a_shallow_copy_may_get_parts_of_its_own(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    other = copy.copy(net)
    other._modules = OrderedDict(net._modules)
    other[4] = stirred(nn.BatchNorm(8, eps=3.0))
    for seed in (1, 2):
        first, second = agree(gpu, net, anew(x, seed)), agree(gpu, other, anew(x, seed))
        assert not torch.allclose(first.feats, second.feats)


def test_weights_that_were_replaced_are_freed(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    layer, norm, linear = inner(net), net[1].body[1], net[2].shortcut[0]
    refs = [weakref.ref(t) for t in (layer.weight, norm.weight, norm.running_mean, linear.weight)]
    # Two blocks keep what they know, and all of the chain.
    net[1](net[0](x))
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    norm.weight = torch.nn.Parameter(torch.randn_like(norm.weight))
    norm.running_mean = torch.randn(16)
    linear.weight = torch.nn.Parameter(torch.randn_like(linear.weight))
    assert [ref() for ref in refs] == [None] * 4


def test_modules_that_were_replaced_are_freed_by_the_next_call(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    refs = [weakref.ref(m) for m in (net[4], net[1].act, net[2].shortcut, net[1].body)]
    refs.append(weakref.ref(net[1].body[0].weight))
    net[4], net[1].act = stirred(nn.BatchNorm(8)), nn.ReLU()
    net[2].shortcut = stirred(nn.Sequential(nn.Linear(16, 24, bias=False), nn.BatchNorm(24)))
    net[1].body = stirred(nn.Sequential(*unit(16, 16)[:2]))
    net(x)
    assert [ref() for ref in refs] == [None] * 5


def test_a_module_is_freed_with_what_it_keeps(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    refs = [weakref.ref(m) for m in net.modules()] + [weakref.ref(p) for p in net.parameters()]
    del net
    assert [ref() for ref in refs] == [None] * len(refs)


def test_maps_and_features_are_freed_with_the_tensor(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    y = net(x)
    found = kernel_map(x.geometry, net[0][0].relation)[0]
    refs = [weakref.ref(t) for t in (x, x.feats, x.geometry, found, found.table, y.feats)]
    del x, y, found
    gpu.clear()
    assert [ref() for ref in refs] == [None] * len(refs)


# What is told of blocks and of modules


INNER = {
    "behind another": lambda: around(8, 8, unit(8, 8), nn.ResidualBlock(8, 8), *unit(8, 8)[:2]),
    "first, linear shortcut": lambda: around(8, 16, nn.ResidualBlock(8, 16), *unit(16, 16)[:2]),
    "first, identity": lambda: around(8, 16, nn.ResidualBlock(8, 8), *unit(8, 16)[:2]),
    "deep": lambda: around(8, 8, nn.Sequential(unit(8, 8), nn.Sequential(nn.ResidualBlock(8, 8))), *unit(8, 8)[:2]),
}


@pytest.mark.parametrize("name", INNER)
def test_a_block_within_a_block(gpu, name):
    """What the outer one adds is not what the inner one does."""
    net, x = stirred(INNER[name]()), cloud()
    for seed in (0, 1, 2):
        agree(gpu, net, anew(x, seed))


ASIDE = {
    "support": lambda: unit(8, 16, 3, out="support"),
    "strided": lambda: unit(8, 16, 2, stride=2),
}


@pytest.mark.parametrize("name", ASIDE)
def test_a_shortcut_over_other_coordinates(gpu, name):
    """The sum is over those of both, or there is none; where the kernels are known from another block, too."""
    plain, odd, x = nn.ResidualBlock(8, 16), nn.ResidualBlock(8, 16), cloud()
    odd.shortcut = nn.Sequential(*ASIDE[name]()[:2])
    stirred(plain), stirred(odd)
    for seed in (0, 1):
        agree(gpu, plain, anew(x, seed))
    if name == "support":
        for seed in (0, 1):
            agree(gpu, odd, anew(x, seed))
        return
    for _ in range(3):
        assert problem_of(odd, x) == unprepared_problem_of(odd, x) is not None


@pytest.mark.parametrize("linear", [False, True], ids=["identity", "linear"])
def test_a_body_over_other_coordinates(gpu, linear):
    """Though a kernel that adds features is known over its map."""
    count, x = 16 if linear else 8, cloud()
    block = around(8, count, nn.Conv3d(8, count, 3, bias=False, out="support"), nn.BatchNorm(count))
    layer, norm = stirred(block).body
    for _ in range(2):
        y = layer(x)
        layer.forward_with_epilogue(
            x, pm.ops.Epilogue.of_norm(norm.vectors(), norm.eps, torch.zeros_like(y.feats), "relu")
        )
    for seed in (0, 1):
        gpu.clear()
        agree(gpu, block, anew(x, seed))
        assert not any("*residual" in each.bytes for each in gpu.started)


def test_where_rows_lie_in_a_buffer_nothing_is_prepared(gpu, monkeypatch):
    """Of which the device alone knows how many live."""
    x = cloud()
    net = known_chain(gpu, x)
    parts = Parts(tuple(net))
    assert prepared(net, x, parts) is not None
    monkeypatch.setattr(type(x.geometry), "buffered", SimpleNamespace(trains=False))
    assert prepared(net, x, parts) is None


class Marked(torch.Tensor):
    """Of the same values, which somebody watches."""


@pytest.mark.parametrize("which", ["weight", "mean", "shift"])
def test_tensors_of_the_users_own_are_in_no_line(gpu, which):
    x = cloud()
    net = known_chain(gpu, x)
    layer, norm = net[1].body[0], net[1].body[1]
    if which == "mean":
        norm.running_mean = norm.running_mean.as_subclass(Marked)
    else:
        name, module = ("weight", layer) if which == "weight" else ("bias", norm)
        module._parameters[name] = module._parameters[name].detach().as_subclass(Marked)
    for seed in (1, 2):
        gpu.clear()
        want = one_by_one(net, anew(x, seed)).feats.as_subclass(torch.Tensor)
        y = net(anew(x, seed)).feats.as_subclass(torch.Tensor)
        torch.testing.assert_close(y, want, **NEAR[torch.float32])
        # What is before the block; behind it features are of that kind, too.
        assert [len(each) for each in gpu.lines] == [1]


def test_the_same_memory_in_other_floats(gpu):
    """Where it lies, and how, is what it was."""
    x = cloud(dtype=torch.float16)
    net = known_chain(gpu, x)
    before, norm = net(x).feats, net[1].body[1]
    exchanged(norm.bias, lambda v: v.view(torch.bfloat16))
    for _ in range(2):
        y = net(x)
        assert torch.equal(y.feats, agree_with(net, x).feats) and not torch.equal(y.feats, before)


@pytest.mark.parametrize("part", ["shortcut", "act", "body"])
def test_a_block_without_a_part_is_told_alike(gpu, part):
    x = cloud()
    net = known_chain(gpu, x)
    setattr(net[1], part, None)
    for _ in range(2):
        assert problem_of(net, x) == unprepared_problem_of(net, x) is not None


@pytest.mark.parametrize("which", ["running_mean", "weight"])
def test_a_vector_of_another_shape_is_told_alike(gpu, which):
    """Of as many values, where the other one lay."""
    x = cloud()
    net = known_chain(gpu, x)
    exchanged(getattr(net[1].body[1], which), lambda v: v.view(4, 4))
    for _ in range(2):
        assert problem_of(net, x) == unprepared_problem_of(net, x) is not None


PUT = {
    "a convolution": lambda n: inner(n),
    "a norm": lambda n: n[1].body[1],
    "a linear map": lambda n: n[2].shortcut[0],
}


@pytest.mark.parametrize("name", PUT)
def test_a_state_that_is_put_whole_is_read(gpu, name):
    """A module may get dictionaries of others; of its own ones nothing is kept."""
    x = cloud()
    net = known_chain(gpu, x)
    module = PUT[name](net)
    other, before = copy.deepcopy(module), weakref.ref(module.weight)
    for p in other.parameters():
        p.data.mul_(2)
    module.__setstate__({**other.__dict__})
    assert before() is None
    for seed in (1, 2):
        agree(gpu, net, anew(x, seed))


@pytest.mark.parametrize("name", ["a convolution", "a linear map"])
def test_a_weight_that_stands_before_the_parameter_is_read(gpu, name):
    """As tools leave it that work out weights."""
    x = cloud()
    net = known_chain(gpu, x)
    PUT[name](net).__dict__["weight"] = PUT[name](net).weight.detach() * 2
    for seed in (1, 2):
        agree(gpu, net, anew(x, seed))


def test_a_body_of_the_users_own_is_called(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    net[1].body.__class__ = DoubledChain
    for seed in (1, 2):
        agree(gpu, net, anew(x, seed))


def test_modules_may_be_called_parts(gpu):
    net, x = nn.Sequential(OrderedDict(parts=nn.Sequential(*unit(8, 8)))), cloud()
    agree(gpu, stirred(net), x)


class Assembled(nn.Sequential):
    def __init__(self):
        super().__init__(unit(8, 8))
        self.parts = 3


def test_attributes_may_be_called_parts(gpu):
    agree(gpu, stirred(Assembled()), cloud())


def test_room_is_what_is_asked_for(gpu, monkeypatch):
    """Of other widths, in turn: nothing is copied but what is put beside."""
    owner, x = stirred(nn.Sequential(unit(8, 16), unit(16, 8))), cloud()
    copied, cat = [], fused.cat
    monkeypatch.setattr(fused, "cat", lambda given: copied.append(1) or cat(given))
    modules = Parts((*owner[0], *owner[1]))
    for number, width in enumerate((5, 5, 12, 12, 0, 0, 5, 12, 0)):
        x, beside = anew(x, number), x.replace(torch.randn(400, width)) if width else None
        gpu.clear()
        y = fused.chained(modules.modules, x, beside=beside, known=prepared(owner, x, modules))
        with unprepared():
            want = owner(x).feats
        assert torch.equal(y.feats, want if beside is None else torch.cat([want, beside.feats], 1))
        assert y.feats.is_contiguous() and not copied
        assert number in (0, 2, 4) or [len(each) for each in gpu.lines] == [2]


def test_layers_with_a_finished_of_their_own_are_heard(gpu):
    """As whoever tunes a network puts there to see what it does."""
    from pumice.engine.groups import recording_calls

    x = cloud()
    net = known_chain(gpu, x)
    wanted = [name for name, m in net.named_modules() if isinstance(m, nn.Conv3d)]
    agree(gpu, net, anew(x, 1))
    with torch.no_grad(), recording_calls(net) as calls:
        net(anew(x, 2))
    assert sorted(call.name for call in calls) == sorted(wanted)
    gpu.clear()
    agree(gpu, net, anew(x, 3))
    assert gpu.in_lines


def test_a_template_is_told_the_same_rows_by_a_line(gpu, monkeypatch):
    """Those of every tensor of the call."""
    net = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, 24), nn.ResidualBlock(24, 24)))
    for rows in (400, 399) * 2:
        net(cloud(rows=rows))
    seen, told, at = [], [], direct.Template.at

    def noted(self, held, counts, shape):
        seen.append(tuple(counts))
        return at(self, held, counts, shape)

    monkeypatch.setattr(direct.Template, "at", noted)
    for known in (True, False):
        seen.clear(), gpu.clear(), linear._BOUND_CALLS.clear()
        with nullcontext() if known else unprepared():
            net(cloud(rows=397))
        assert bool(gpu.in_lines) == known
        told.append(sorted(seen))
    assert told[0] == told[1] and {len(counts) for counts in told[0]} >= {6, 7}


def test_what_a_kernel_does_not_fill_is_no_line(gpu, monkeypatch):
    """It is made and finished around the kernel."""
    x = cloud()
    net = known_chain(gpu, x)
    monkeypatch.setattr(kernels.KernelExecutor, "writes_result_dtype", None)
    gpu.clear()
    agree(gpu, net, anew(x, 1))
    assert not gpu.in_lines
