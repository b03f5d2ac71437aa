"""What stands behind a convolution in its kernel: the same results, and nothing that listens is passed by."""

import copy
import gc
import pickle
import threading
import weakref
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.nn.utils.prune
from nets import stirred
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import pumice as pm
from pumice import nn
from pumice.errors import DeviceError, DtypeError, ShapeError
from pumice.lower import norm as norms
from pumice.nn import training_chain
from pumice.ops import autograd
from pumice.testing import random_tensor


class Adapted(nn.Conv3d):
    """A layer whose class was exchanged, as adapters of few weights do."""

    @property
    def weight(self):
        return self._parameters["weight"] + self.more


def test_a_property_stands_before_a_parameter():
    layer, x = nn.Conv3d(8, 16, 3), random_tensor(50, 8, 3)
    own, bias = layer.weight.detach(), layer.bias.detach()
    layer.__class__, layer.more = Adapted, torch.rand(16, 3, 3, 3, 8)
    torch.testing.assert_close(layer(x).feats, pm.ops.conv(x, own + layer.more, bias).feats)


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_without_a_bias_has_none_among_its_parameters(bias):
    """Where it is not, whoever asks for it searches the module in vain at every call."""
    layer = nn.Conv3d(8, 16, 3, bias=bias)
    assert (layer._parameters["bias"] is not None) == bias and set(layer.state_dict()) == {"weight", "bias"} - (
        set() if bias else {"bias"}
    )
    older = nn.Conv3d(8, 16, 3, bias=False)
    # As it was pickled before.
    del older._parameters["bias"]
    older.__dict__["bias"] = None
    older.load_state_dict({"weight": layer.weight})
    x = random_tensor(50, 8, 3)
    torch.testing.assert_close(older(x).feats + (layer.bias if bias else 0.0), layer(x).feats)


@pytest.mark.parametrize(
    "last", [nn.BatchNorm, lambda n: nn.ReLU(), lambda n: nn.LeakyReLU(0.3)], ids=["norm", "relu", "other"]
)
@pytest.mark.parametrize("normed", [True, False])
def test_a_residual_is_added_before_the_last_module_whatever_that_is(last, normed):
    body = nn.Sequential(nn.Conv3d(8, 8, 3), *([nn.BatchNorm(8)] if normed else []))
    block, x = nn.ResidualBlock(8, 8), random_tensor(60, 8, 3, dtype=torch.float64)
    block.body, block.act = body, last(8)
    block = stirred(block).double()
    with torch.no_grad():
        expected = block.act(block.body(x) + x)
        torch.testing.assert_close(block(x).feats, expected.feats, rtol=1e-10, atol=1e-10)


def test_a_block_whose_activation_became_a_function():
    block, x = stirred(nn.ResidualBlock(8, 8)), random_tensor(40, 8, 3)
    want = block(x).feats
    del block.act
    block.act = lambda y: y.map(torch.relu)
    assert torch.equal(block(x).feats, want)


def test_parts_of_a_block_that_were_exchanged_are_called():
    block, x = stirred(nn.ResidualBlock(8, 8)).double(), random_tensor(60, 8, 3, dtype=torch.float64)
    with torch.no_grad():
        for name, part in (
            ("act", nn.SiLU()),
            ("shortcut", nn.Linear(8, 8).double()),
            ("body", nn.Sequential(nn.Conv3d(8, 8, 1))),
        ):
            setattr(block, name, part.double())
            expected = block.act(block.body(x) + block.shortcut(x))
            torch.testing.assert_close(block(x).feats, expected.feats, rtol=1e-10, atol=1e-10)


# Training: a convolution and the norm behind it by the statistics of its results are one step of autograd


@pytest.fixture
def steps(monkeypatch):
    """As on a GPU; of each call that may be one step whether it was."""
    seen, whole = [], training_chain.conv_norm
    monkeypatch.setattr(training_chain, "_is_captured", lambda x: isinstance(x, pm.SparseTensor))

    def told(*given):
        y = whole(*given)
        seen.append(y is not None)
        return y

    monkeypatch.setattr(training_chain, "conv_norm", told)
    return seen


@contextmanager
def one_by_one():
    """As on a CPU: every module is called."""
    with patch.object(training_chain, "_is_captured", lambda x: False):
        yield


def chained(modules, x, residual=None, target=None):
    """Modules in training, as their owner calls them."""
    if training_chain.trains(x, *modules):
        return training_chain.training_chain(modules, x, residual, target)
    first, *others = modules
    y = first(x) if target is None else first(x, target)
    for place, module in enumerate(others, 1):
        y = module(y + residual if residual is not None and place == len(others) else y)
    return y


class Back(torch.nn.Module):
    """To a coarser level and back to the coordinates of the input."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(8, 12, 2, stride=2, bias=False), nn.BatchNorm(12))
        self.up, self.norm, self.act = nn.InverseConv3d(12, 8, 2, stride=2), nn.BatchNorm(8), nn.ReLU()

    def forward(self, x):
        return chained((self.up, self.norm, self.act), self.down(x), target=x)


def unit(bias=False, relu=True, conv=None, **options):
    behind = [nn.ReLU()] if relu else []
    return nn.Sequential(conv or nn.Conv3d(8, 16, 3, bias=bias), nn.BatchNorm(16, **options), *behind)


def without(module, name):
    setattr(module[1], name, None)
    return module


def frozen(module, *names):
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(names))
    return module


# How many convolutions of each are one step with their norm.
TRAINED = {
    "norm": (lambda: unit(relu=False, eps=0.01), 1),
    "norm and activation": (unit, 1),
    "torch's activation": (lambda: nn.Sequential(*unit(relu=False), torch.nn.ReLU(inplace=True)), 1),
    "bias": (lambda: unit(bias=True), 1),
    "bias, norm": (lambda: unit(bias=True, relu=False), 1),
    "another activation": (lambda: nn.Sequential(*unit(relu=False), nn.SiLU()), 1),
    "strided": (lambda: unit(conv=nn.Conv3d(8, 16, 3, stride=2, padding=1)), 1),
    "offsets": (lambda: unit(conv=nn.Conv3d(8, 16, None, offsets=((0, 0, 0), (0, 1, 0), (2, 0, -1)))), 1),
    "transposed": (lambda: unit(conv=nn.ConvTranspose3d(8, 16, 2, stride=2)), 1),
    "two": (lambda: nn.Sequential(*unit(True), nn.Conv3d(16, 8, 1), nn.BatchNorm(8)), 2),
    "inverse": (Back, 2),
    "block": (lambda: nn.ResidualBlock(8, 8), 2),
    "block, shortcut": (lambda: nn.ResidualBlock(8, 12, bias=True), 2),
    "not affine": (lambda: unit(bias=True, affine=False), 1),
    "scale alone": (lambda: without(unit(), "bias"), 1),
    "shift alone": (lambda: without(unit(bias=True), "weight"), 1),
    "no running statistics": (lambda: unit(bias=True, track_running_stats=False), 1),
    "no running statistics, evaluated": (lambda: unit(bias=True, track_running_stats=False).eval(), 1),
    "mean of all": (lambda: unit(momentum=None), 1),
    "no momentum": (lambda: unit(momentum=0.0), 1),
    "frozen convolution": (lambda: frozen(unit(bias=True), "0"), 1),
    "frozen weight": (lambda: frozen(unit(bias=True), "0.weight"), 1),
    "frozen bias": (lambda: frozen(unit(bias=True), "0.bias"), 1),
    "frozen norm": (lambda: frozen(unit(bias=True), "1"), 1),
    "frozen scale": (lambda: frozen(unit(), "1.weight"), 1),
    "all frozen": (lambda: frozen(unit(bias=True), "0", "1"), 1),
    "evaluated norm": (lambda: nn.Sequential(nn.Conv3d(8, 16, 3), nn.BatchNorm(16).eval(), nn.ReLU()), 0),
    "groups": (lambda: unit(conv=nn.Conv3d(8, 16, 3, groups=2)), 0),
    "dataflow": (lambda: unit(conv=nn.Conv3d(8, 16, 3, dataflow="explicit-gemm")), 0),
    "another norm": (lambda: nn.Sequential(nn.Conv3d(8, 16, 3), nn.LayerNorm(16), nn.ReLU()), 0),
}


def made(name, dtype=torch.float64):
    """The module with parameters and statistics that differ from new ones'."""
    torch.manual_seed(3)
    module = TRAINED[name][0]()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm):
            for values in (part.running_mean, part.running_var, part.weight, part.bias):
                if values is not None:
                    values.data.uniform_(0.5, 2)
            if part.num_batches_tracked is not None:
                part.num_batches_tracked.fill_(3)
    return module.to(dtype)


def sample(count, dtype=torch.float64, seed=0, wide=False):
    """wide: values of the dtype in float64."""
    x = random_tensor(count, 8, 3, seed=seed, dtype=torch.float64)
    return x.replace(x.feats.to(dtype).to(torch.float64 if wide else dtype).requires_grad_())


def biases(module):
    """Names of those that a norm takes away again."""
    parts = dict(module.named_modules())
    return [f"{name}.bias" for name, part in parts.items() if isinstance(part, nn.conv.Convolution)]


def outcome(module, x, cast=None, passes=1):
    """The result, and by their names the gradients and what the norms have kept."""
    for _ in range(passes):
        with nullcontext() if cast is None else torch.autocast("cpu", cast):
            y = module(x)
        grad = torch.randn(y.feats.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        if y.feats.requires_grad:
            y.feats.backward(grad)
    found = {"x": x.feats.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return y, found, dict(module.named_buffers())


def compare(one, two, exact=(), **tolerance):
    """exact: which gradients are nothing in the first, and rounding in the other."""
    assert one[0].stride == two[0].stride and torch.equal(one[0].coords, two[0].coords)
    assert one[0].dtype == two[0].dtype
    torch.testing.assert_close(one[0].feats, two[0].feats, **tolerance)
    assert one[1].keys() == two[1].keys() and one[2].keys() == two[2].keys()
    for name, want in two[1].items():
        got = one[1][name]
        assert (got is None) == (want is None), name
        if got is None:
            continue
        assert got.dtype == want.dtype and got.shape == want.shape, name
        if name in exact:
            assert not got.any(), name
        else:
            near = dict(tolerance, atol=tolerance["atol"] * max(1.0, float(want.abs().max()) if want.numel() else 1.0))
            torch.testing.assert_close(got, want, **near, msg=lambda text, name=name: f"{name}: {text}")
    for name, want in two[2].items():
        torch.testing.assert_close(one[2][name], want, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("count", [0, 1, 2, 120])
def test_trained_as_modules_one_by_one(name, count, steps):
    module, twin = made(name), made(name)
    got = outcome(module, sample(count), passes=2)
    joined = TRAINED[name][1]
    assert steps == [True] * 2 * joined, steps
    with one_by_one():
        want = outcome(twin, sample(count), passes=2)
    rows = len(got[0]) if name in ("strided", "transposed") else count
    several = rows > 1 and joined
    exact = [name for name in biases(module) if several and (got[1].get(name) is not None)]
    if name == "inverse" and count == 2:
        # Of the coarser level's one voxel is known whether it is one.
        exact = ["up.bias"]
    compare(got, want, exact, rtol=1e-9, atol=1e-9)
    if exact:
        assert all(float(want[1][name].abs().max()) < 1e-9 for name in exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bias", "norm and activation", "block, shortcut", "inverse", "strided"])
def test_trained_in_narrower_floats(name, dtype, steps):
    """Against float64, within what modules one by one are off by."""
    rounding = {torch.float32: 2e-5, torch.bfloat16: 0.2, torch.float16: 0.02}[dtype]
    exact = outcome(made(name, dtype).double(), sample(120, dtype, wide=True))
    got = outcome(made(name, dtype), sample(120, dtype))
    with one_by_one():
        want = outcome(made(name, dtype), sample(120, dtype))
    assert all(steps) and got[0].dtype == want[0].dtype == dtype
    for part in (1, 2):
        for key, value in exact[part].items():
            one, two = got[part][key], want[part][key]
            if one is not None and two is not None and value is not None and value.is_floating_point():
                assert one.dtype == two.dtype, key
                error = (one.double() - value).norm() / (value.norm() + 1)
                assert error < rounding, f"{key}: {error}, and {(two.double() - value).norm() / (value.norm() + 1)}"
    assert (got[0].feats.double() - exact[0].feats).norm() < rounding * exact[0].feats.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["bias", "norm", "block", "block, shortcut", "inverse", "frozen weight"])
def test_trained_under_autocast(name, dtype, steps):
    """dtype: of the features; float64 is left alone. Parameters keep gradients of their own dtype."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    got = outcome(made(name, kept), sample(120, dtype), torch.bfloat16)
    with one_by_one():
        want = outcome(made(name, kept), sample(120, dtype), torch.bfloat16)
        exact = outcome(made(name, kept).double(), sample(120, dtype, wide=True))
    assert all(steps) and got[0].dtype == want[0].dtype
    for key, value in {**got[1], **got[2]}.items():
        other, true = ({**found[1], **found[2]}[key] for found in (want, exact))
        assert (value is None) == (other is None), key
        if value is None or key in biases(made(name)):
            continue
        assert value.dtype == other.dtype and value.dtype in (kept, dtype, torch.int64), key
        mine, theirs = ((x.double() - true).norm() / (true.double().norm() + 1) for x in (value, other))
        assert mine < (1e-9 if dtype == torch.float64 else max(0.05, 1.5 * theirs)), f"{key}: {mine}, {theirs}"


# Torch's norm on a CPU has no gradients of gradients of a shift alone.
@pytest.mark.parametrize("name", [name for name in TRAINED if TRAINED[name][1] and name != "shift alone"])
@pytest.mark.parametrize("count", [1, 2, 60])
def test_gradients_of_gradients(name, count, steps):
    """Those of the gradients' squares; those with a graph behind them are those without."""
    found = []
    for _ in range(2):
        module, x = made(name), sample(count)
        with one_by_one() if found else nullcontext():
            y = module(x).feats
        sought = {"x": x.feats, **{n: p for n, p in module.named_parameters() if p.requires_grad}}
        exact = biases(module) if len(y) > 1 else []
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        plain = torch.autograd.grad(y, [*sought.values()], grad, retain_graph=True)
        first = torch.autograd.grad(y, [*sought.values()], grad, create_graph=True)
        for a, b in zip(plain, first, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * max(1.0, float(a.detach().abs().max())))
        named = {n: g for n, g in zip(sought, first, strict=True) if n not in exact and g.requires_grad}
        total = sum(g.square().sum() for g in named.values())
        wanted = {n: x for n, x in sought.items() if n not in exact} | {"the gradient": grad}
        second = torch.autograd.grad(total, [*wanted.values()], allow_unused=True)
        found.append({n: g for n, g in zip(wanted, second, strict=True)} | {f"{n}, first": g for n, g in named.items()})
    got, want = found
    for n in got.keys() | want.keys():
        one, two = got.get(n), want.get(n)
        if one is None or two is None:
            assert one is two or not (two if one is None else one).any(), n
            continue
        near = 1e-7 * max(1.0, float(two.detach().abs().max()))
        torch.testing.assert_close(one, two, rtol=1e-7, atol=near, msg=lambda text, n=n: f"{n}: {text}")
    assert any(steps)


def test_gradients_of_gradients_are_those_of_differences(steps):
    x = random_tensor(6, 2, 3, dtype=torch.float64)

    def norm_of(feats, weight, bias, scale, shift, residual):
        told = norms.Norm(scale, shift, norms.Statistics(None, 0.1, offset=bias), residual, True)
        layer = nn.Conv3d(2, 3, (3, 1, 1), bias=False)
        return pm.ops.conv_norm.conv_norm(x.replace(feats), weight, layer.map_request(), told).feats

    torch.manual_seed(0)
    shapes = (3, 3, 1, 1, 2), (3,), (3,), (3,), (6, 3)
    given = [x.feats.detach().clone().requires_grad_(), *(torch.randn(s).double().requires_grad_() for s in shapes)]
    assert torch.autograd.gradcheck(norm_of, given)
    assert torch.autograd.gradgradcheck(norm_of, given)


def test_a_frozen_convolution_has_gradients_of_gradients(steps):
    """Its result needs no gradient, that of its bias is made of one; a residual alone may need one."""
    module, x = frozen(unit(bias=True).double(), "0.weight"), sample(50).detach()
    y = module(x).feats
    sought = [p for p in module.parameters() if p.requires_grad]
    first = torch.autograd.grad(y.square().sum(), sought, create_graph=True)
    assert not first[0].any()
    sum(g.square().sum() for g in first).backward()
    assert all(p.grad is not None and p.grad.any() for p in sought[1:])
    module = frozen(unit().double(), "0", "1")
    residual = x.replace(torch.randn(50, 16).double().requires_grad_())
    found = []
    for way in (nullcontext, one_by_one):
        with way():
            y = chained(tuple(module), x, residual).feats
        (first,) = torch.autograd.grad(y.square().sum(), residual.feats, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), residual.feats)[0])
    torch.testing.assert_close(*found)
    assert len(steps) == 2 and all(steps)


def test_one_voxel_is_normalised_by_what_was_known_then(steps):
    """Running statistics have followed others since; gradients of gradients are of what was computed."""
    module, x = made("bias"), sample(1)
    y = module(x).feats
    module(sample(50, seed=1))
    sought = [x.feats, *module.parameters()]
    plain = torch.autograd.grad(y.square().sum(), sought, retain_graph=True)
    for got, want in zip(torch.autograd.grad(y.square().sum(), sought, create_graph=True), plain, strict=True):
        torch.testing.assert_close(got, want)


def test_networks_are_trained_the_same(steps):
    for make, channels in ((lambda: pm.models.MinkUNet(4, 5, 0.25), 4), (lambda: pm.models.CenterPointBackbone(5), 5)):
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            module, x = make().double().train(), random_tensor(300, channels, 3, dtype=torch.float64)
            with one_by_one() if found else nullcontext():
                found.append(outcome(module, x.replace(x.feats.requires_grad_())))
        exact = [name for name, grad in found[0][1].items() if name in biases(module) and not grad.any()]
        compare(*found, exact, rtol=1e-7, atol=1e-7)
        assert len(steps) > 15 and all(steps)
        steps.clear()


def test_checkpoints_find_the_same(steps):
    found = []
    for reentrant in (None, True, False):
        module, x = made("block, shortcut"), sample(80)

        def run(feats, module=module, x=x):
            return module(x.replace(feats)).feats

        y = run(x.feats) if reentrant is None else checkpoint(run, x.feats, use_reentrant=reentrant)
        y.square().sum().backward()
        found.append([x.feats.grad, *(p.grad for p in module.parameters())])
        # What is computed again is counted again, as of torch's norms.
        assert int(module.body[1].num_batches_tracked) == (4 if reentrant is None else 5)
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_saved_tensors_are_packed_and_unpacked(steps):
    module, x = made("block"), sample(80)
    want = torch.autograd.grad(module(x).feats.square().sum(), [x.feats, *module.parameters()])
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: unpacked.append(1) or t):
        loss = module(x).feats.square().sum()
    got = torch.autograd.grad(loss, [x.feats, *module.parameters()])
    assert all(map(torch.equal, got, want)) and packed.count((8, 3, 3, 3, 8)) == 2 and unpacked


def test_what_was_changed_since_is_refused(steps):
    """As torch does: gradients of other values would be wrong."""
    changes = {
        "weight": lambda module, x, y: module[0].weight,
        "scale": lambda module, x, y: module[1].weight,
        "features": lambda module, x, y: x.feats,
    }
    for change in changes.values():
        module, x = made("bias"), sample(40)
        y = module(x).feats
        with torch.no_grad():
            change(module, x, y).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    block, x = made("block"), sample(40)
    y = block(x).feats
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    module, x = made("norm"), sample(40)
    y = module(x).feats
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_a_result_that_nothing_reads_may_be_changed(steps):
    found = []
    for way in (nullcontext, one_by_one):
        module, x = made("norm"), sample(40)
        with way():
            y = module(x).feats
        y.mul_(2)
        y.square().sum().backward()
        found.append(module[0].weight.grad)
    torch.testing.assert_close(*found)


BACKWARD = pytest.mark.filterwarnings("ignore:(For|Full) backward hook")


@BACKWARD
@pytest.mark.parametrize("name", ["norm and activation", "block", "inverse"])
@pytest.mark.parametrize("listens", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_hear_what_they_listen_to_in_training(name, listens, steps):
    parts = [n for n, _ in made(name).named_modules() if n]
    for part in parts:
        module, heard = made(name), []
        register = getattr(module.get_submodule(part), f"register_{listens}_hook")
        register(lambda *given, heard=heard: heard.append(1) and None)
        module(sample(30)).feats.sum().backward()
        # Torch's own hooks on gradients find no tensors in what a module takes that is not a tensor.
        if listens.startswith("forward"):
            assert len(heard) == 1, part


@BACKWARD
@pytest.mark.parametrize("listens", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_on_all_modules_hear_them(listens, steps):
    module, heard = made("norm and activation"), []
    listener = getattr(torch.nn.modules.module, f"register_module_{listens}_hook")
    handle = listener(lambda module, *given: heard.append(type(module)) and None)
    try:
        module(sample(30)).feats.sum().backward()
    finally:
        handle.remove()
    assert not steps and (not listens.startswith("forward") or {nn.Conv3d, nn.BatchNorm, nn.ReLU} <= {*heard})


def test_a_forward_that_was_put_in_place_is_called(steps):
    for part in range(3):
        module, heard = made("norm and activation"), []
        whole = module[part].forward
        module[part].forward = lambda *given, whole=whole, heard=heard: heard.append(1) or whole(*given)
        module(sample(30))
        with torch.no_grad():
            module.eval()(sample(30))
        assert len(heard) == 2, part


def test_hooks_on_parameters_hear_their_gradients(steps):
    module, heard = made("bias"), []
    for name, p in module.named_parameters():
        p.register_hook(lambda grad, name=name: heard.append(name) or 2 * grad)
        p.register_post_accumulate_grad_hook(lambda p, name=name: heard.append(f"{name} done"))
    twin = made("bias")
    outcome(module, sample(40)), outcome(twin, sample(40))
    names = [name for name, _ in module.named_parameters()]
    assert sorted(heard) == sorted(names + [f"{name} done" for name in names]) and all(steps)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * q.grad)
    # Gradients lie as their parameters do, for whoever puts them in a row.
    assert all(p.grad.is_contiguous() and p.grad.shape == p.shape for p in module.parameters())


def test_other_parameters_for_one_call(steps):
    module, x = made("bias"), sample(50)
    others = {name: torch.rand_like(p).requires_grad_() for name, p in module.named_parameters()}
    kept = {name: b.clone() for name, b in module.named_buffers()}
    found = []
    for way in (nullcontext, one_by_one):
        buffers = {name: b.clone() for name, b in kept.items()}
        with way():
            y = torch.func.functional_call(module, {**others, **buffers}, (x,)).feats
        found.append([y, *torch.autograd.grad(y.square().sum(), [*others.values()]), *buffers.values()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * float(found[0][1].abs().max()))
    assert steps == [True] and int(found[0][-1]) == 4
    assert all(torch.equal(b, kept[name]) for name, b in module.named_buffers())


def test_transforms_and_tangents_call_modules(steps):
    module, x = frozen(made("norm and activation")), sample(40)
    module[1].track_running_stats = False

    def loss(feats):
        return module(x.replace(feats)).feats.square().sum()

    (want,) = torch.autograd.grad(loss(x.feats), x.feats)
    assert steps == [True]
    torch.testing.assert_close(torch.func.grad(loss)(x.feats.detach()), want)
    assert steps == [True, False]
    direction = torch.randn(40, 8).double()
    _, along = torch.func.jvp(loss, (x.feats.detach(),), (direction,))
    torch.testing.assert_close(along, (want * direction).sum())
    # Of a scale alone, too.
    scale = module[1].weight.detach()
    del module[1].weight
    with forward_ad.dual_level():
        module[1].weight = forward_ad.make_dual(scale, torch.ones_like(scale))
        tangent = forward_ad.unpack_dual(module(x).feats).tangent
    assert tangent is not None and tangent.any() and not any(steps[1:])


def test_a_map_over_many_calls_modules(steps):
    module, x = made("norm").eval(), sample(20).detach()
    many = torch.randn(3, 20, 8).double()
    module[1].running_mean = module[1].running_var = None
    module[1].track_running_stats = False
    many_at_once = torch.func.vmap(lambda f: module(x.replace(f)).feats)(many)
    assert not any(steps)
    torch.testing.assert_close(many_at_once, torch.stack([module(x.replace(f)).feats for f in many]))


def test_statistics_that_are_not_tracked_any_more_stay(steps):
    """By the attribute, as torch reads it in training: what it has is left alone."""
    module, x = made("bias"), sample(40)
    module[1].track_running_stats = False
    kept = {name: b.clone() for name, b in module.named_buffers()}
    y = module(x).feats
    assert steps == [True] and all(torch.equal(b, kept[name]) for name, b in module.named_buffers())
    with one_by_one():
        torch.testing.assert_close(y, module(x).feats)


def test_no_coordinates_are_those_of_no_others(steps):
    """Of a cloud without voxels the coarser one is none either, and a target may be empty."""
    x, none = sample(40), sample(0)
    module = unit(relu=False, conv=nn.Conv3d(8, 16, 2, stride=2)).double()
    assert module(none).stride == (2, 2, 2)
    y = chained((nn.Conv3d(8, 16, 3).double(), nn.BatchNorm(16).double()), x, target=none)
    assert y.geometry is none.geometry and y.feats.shape == (0, 16) and all(steps)


def test_a_residual_over_other_coordinates_is_added_over_those_of_both(steps):
    """As many rows, in another order or at other places."""
    module, x = made("bias").train(), sample(40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    feats = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).double()
    places = x.coords[order], x.coords + torch.tensor([0, 40, 0, 0], dtype=torch.int32)
    others = [pm.SparseTensor(feats, coords) for coords in places]
    for residual in others:
        y = chained(tuple(module), x, residual)
        expected = module[2](module[1](module[0](x)) + residual)
        assert torch.equal(y.coords, expected.coords)
        torch.testing.assert_close(y.feats, expected.feats)


def test_a_residual_of_another_dtype_is_added_apart(steps):
    module, x = made("norm and activation", torch.float32), sample(40, torch.float32)
    residual = x.replace(torch.randn(40, 16).double().requires_grad_())
    y = chained(tuple(module), x, residual)
    want = (module[1](module[0](x)).feats.double() + residual.feats).relu()
    assert y.dtype == torch.float64 and steps == [True]
    torch.testing.assert_close(y.feats, want, rtol=1e-4, atol=1e-4)
    y.feats.sum().backward()
    assert residual.feats.grad.dtype == torch.float64 and module[0].weight.grad.dtype == torch.float32


def test_a_residual_before_a_norm_is_no_part_of_it(steps):
    module, x = made("norm", torch.float64), sample(40)
    residual = x.replace(torch.randn(40, 16).double())
    y = chained(tuple(module), x, residual)
    assert not steps
    torch.testing.assert_close(y.feats, module[1](module[0](x) + residual).feats)


def test_what_does_not_fit_is_said(steps):
    module, x = made("bias"), sample(40)
    for _ in range(2):
        # Before there was a call, and behind one that went well.
        for part, other, error, text in (
            (1, nn.BatchNorm(12), ShapeError, "the norm has 12 channels, its input 16"),
            (1, nn.BatchNorm(16).to("meta"), DeviceError, "the norm is on meta, its input on cpu"),
            (0, nn.Conv3d(7, 16, 3), ShapeError, "weight takes 7 channels .* x has 8"),
            (0, nn.Conv2d(8, 16, 3), ShapeError, "3 spatial axes, found shape \\[16, 3, 3, 8\\]"),
            (0, nn.Conv3d(8, 16, 3).to("meta"), DeviceError, "weight is on meta"),
        ):
            exchanged = nn.Sequential(*module)
            exchanged[part] = other.double()
            with pytest.raises(error, match=text):
                exchanged(x)
        for name, shape, text in (
            ("weight", (16,), "with 3 kernel axes for a tensor of 3 spatial axes, found shape \\[16\\]"),
            ("weight", (16, 27, 8), "with 3 kernel axes for a tensor of 3 spatial axes"),
            ("weight", (16, 2, 2, 2, 8), "weight is \\[C_out, 27, 8 / 1\\]"),
            ("bias", (12,), "bias is \\[C_out\\] = \\[16\\], found shape \\[12\\]"),
        ):
            exchanged = copy.deepcopy(module)
            setattr(exchanged[0], name, torch.nn.Parameter(torch.zeros(shape).double()))
            with pytest.raises(ShapeError, match=text):
                exchanged(x)
        with pytest.raises(ShapeError, match="a residual \\[40, 16\\] on cpu, found \\[40, 8\\]"):
            chained(tuple(module), x, x)
        module(x)


def test_weights_that_lie_otherwise(steps):
    """Views of larger tensors, and the axes in another order."""
    found = []
    for way in (nullcontext, one_by_one):
        module, x = made("bias"), sample(60)
        weight = module[0].weight.detach().permute(0, 4, 1, 2, 3).contiguous().permute(0, 2, 3, 4, 1)
        module[0].weight = torch.nn.Parameter(weight)
        base = torch.stack([module[1].weight.detach(), torch.zeros(16).double()], 1).requires_grad_()
        del module[1].weight
        # Torch's norm on a CPU has wrong gradients behind a weight that is no row.
        module[1].weight = base[:, 0] if way is nullcontext else base[:, 0].clone()
        with way():
            y = module(x).feats
        y.square().sum().backward()
        found.append((y.detach(), module[0].weight.grad, base.grad, module[1].running_mean))
        assert found[-1][1].stride() == weight.stride()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-6)


def test_copies_train_alike(steps):
    module = made("block, shortcut")
    want = outcome(module, sample(50))
    for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        # Behind a call, too: nothing of it stays with the module.
        fresh = copied(made("block, shortcut"))
        fresh(sample(20))
        fresh = copied(fresh)
        fresh.load_state_dict(made("block, shortcut").state_dict())
        got = outcome(fresh, sample(50))
        assert all(torch.equal(got[1][name], grad) for name, grad in want[1].items())
        assert all(torch.equal(got[2][name], b) for name, b in want[2].items())


def test_threads_train_alike(steps):
    want, found = outcome(made("block"), sample(60)), [None] * 4
    # What makes the modules draws from the one generator.
    modules = [made("block") for _ in found]
    shared = sample(60)

    def step(number):
        x = shared.replace(shared.feats.detach().clone().requires_grad_())
        for _ in range(3):
            modules[number].zero_grad()
            x.feats.grad = None
            found[number] = outcome(modules[number], x)[1]

    threads = [threading.Thread(target=step, args=(n,)) for n in range(len(found))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for got in found:
        assert all(torch.equal(got[name], grad) for name, grad in want[1].items())


def test_nothing_is_kept_behind_a_step(steps):
    """Results and what they are made of go with the last one who holds them, without a collection."""
    module, x = made("block"), sample(50)
    y = module(x).feats
    node = y.grad_fn
    held = [weakref.ref(y), *(weakref.ref(t) for t in node.saved_tensors if t is not None and not t.is_leaf)]
    kept = weakref.ref(node)
    gc.disable()
    try:
        y.sum().backward()
        del y, node
        assert kept() is None and all(ref() is None for ref in held)
    finally:
        gc.enable()


def test_compiled_training_calls_modules(steps):
    module, twin, x = made("bias", torch.float32), made("bias", torch.float32), sample(40, torch.float32).detach()
    torch.compiler.reset()
    got = outcome(torch.compile(module, backend="eager", fullgraph=True), x)[0].feats
    assert not steps
    torch.testing.assert_close(got, outcome(twin, x)[0].feats, rtol=1e-4, atol=1e-4)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-2)


def test_gradients_within_autocast_are_those_behind_it(steps):
    found = []
    for within in (True, False):
        module, x = made("bias", torch.float32), sample(60, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x).feats
            grad = torch.ones_like(y)
            if within:
                y.backward(grad)
        if not within:
            y.backward(grad)
        found.append([x.feats.grad, *(p.grad for p in module.parameters())])
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.02 * max(1.0, float(want.abs().max())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_narrow_voxel_without_statistics(dtype, steps):
    """Under autocast the norm's parameters are wider than what it is given."""
    found = []
    for way in (nullcontext, one_by_one):
        for kept in (torch.float32, dtype):
            module = made("no running statistics", kept)
            with way(), torch.autocast("cpu", dtype, enabled=kept != dtype):
                found.append(module(sample(1, kept)).feats)
            found[-1].sum().backward()
    assert all(y.dtype == dtype for y in found)
    for y in found[1:]:
        torch.testing.assert_close(y, found[0], rtol=0.03, atol=0.03)


def test_one_voxel_without_statistics_is_left_as_it_is():
    """Evaluated too, where its own statistics would count."""
    norm, x = nn.BatchNorm(8, affine=False, track_running_stats=False, eps=0.0), sample(1)
    for module in (norm.train(), norm.eval()):
        torch.testing.assert_close(module(x).feats, x.feats)


def test_gradients_read_the_weight_as_it_was_multiplied(steps, monkeypatch):
    """Under autocast narrow: a kernel for narrow rows takes no wide weight."""
    seen, whole = [], pm.ops.autograd.DifferentiableCall.gradients

    def told(call, given, grad, wanted):
        seen.append(({x.dtype for x in given}, grad.dtype, [*wanted]))
        return whole(call, given, grad, wanted)

    monkeypatch.setattr(pm.ops.autograd.DifferentiableCall, "gradients", told)
    outcome(made("norm and activation", torch.float32), sample(30, torch.float32), torch.bfloat16)
    assert steps == [True]
    assert seen == [({torch.bfloat16}, torch.bfloat16, [torch.bfloat16, torch.float32])]


def test_compiled_statistics_that_are_not_tracked_any_more_stay():
    module, x = made("bias"), sample(40).detach()
    module[1].track_running_stats = False
    kept = {name: b.clone() for name, b in module.named_buffers()}
    torch.compiler.reset()
    y = torch.compile(module, backend="eager", fullgraph=True)(x).feats
    assert all(torch.equal(b, kept[name]) for name, b in module.named_buffers())
    torch.testing.assert_close(y, module(x).feats)


@pytest.mark.parametrize("name", ["norm and activation", "block", "layer alone"])
def test_backward_within_autocast_is_that_outside(name, steps, monkeypatch):
    """By the calls that the forward pass left, not by the statements of derivatives."""
    torch.manual_seed(0)
    make = TRAINED[name][0] if name in TRAINED else lambda: nn.Conv3d(8, 16, 3)
    module, x = make().train(), random_tensor(60, 8, 3)

    def refused(*given):
        raise AssertionError("derived anew")

    monkeypatch.setattr(autograd, "_gradients", refused)
    found = []
    for within in (False, True):
        module.zero_grad()
        feats = x.feats.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x.replace(feats)).feats.float().square().sum()
            if within:
                loss.backward()
        if not within:
            loss.backward()
        found.append([feats.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_dtypes_without_autocast_are_refused(steps):
    """As they are by a layer alone."""
    module = unit()
    module[0].half()
    with pytest.raises(DtypeError, match=r"x is torch.float32, weight is torch.float16; convert one, or use"):
        module(random_tensor(40, 8, 3))
    assert steps == [False]
