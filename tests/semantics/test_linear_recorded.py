"""Linear maps of 16 bits in training, by kernels of ours: results, and gradients of any order, are those of
torch's. Kernels compute, on memory of the CPU (tests/emulated.py)."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from emulated import emulated, on_cpu
from modes import deterministic
from torch.testing import assert_close

import pumice as pm
from pumice import nn
from pumice.lower import kernel as kernels
from pumice.lower import plan
from pumice.ops import autograd
from pumice.schedule.predict import Work
from pumice.testing import random_cloud

linear = import_module("pumice.ops.linear")

COORDS = random_cloud(700, 3, extent=(40, 40, 20), seed=1)
BF = torch.bfloat16


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    torch.manual_seed(3)
    with emulated(tmp_path) as found:
        yield found


def rows(count, channels, dtype=BF, **more):
    return pm.SparseTensor(torch.randn(count, channels).to(dtype).requires_grad_(), COORDS[:count], **more)


def step(layer, x, cast=None):
    """The result and the gradients of features, weight and bias."""
    for tensor in (x.feats, *layer.parameters()):
        tensor.grad = None
    with torch.autocast("cpu", cast, enabled=cast is not None):
        y = layer(x).feats
    weights = torch.linspace(-1, 2, y.numel()).view_as(y)
    (y.float() * weights).sum().backward()
    return [y.detach(), *[t.grad.clone() for t in (x.feats, *layer.parameters())]]


def agree(found, want, dtype=BF):
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert float((a.double() - b.double()).norm() / b.double().norm()) < (8e-3 if dtype == BF else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, BF])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(96, 19), (7, 40), (3, 1), (1, 5), (8, 16)])
@pytest.mark.parametrize("mixed", [False, True])
def test_gradients_are_those_of_torch(gpu, sizes, bias, dtype, mixed):
    """mixed: float32 weights and autocast. Other rows start what those before have compiled."""
    layer = nn.Linear(*sizes, bias=bias).to(torch.float32 if mixed else dtype)
    cast = dtype if mixed else None
    for count in (640, 639, 640, 700, 20):
        x = rows(count, sizes[0], torch.float32 if mixed and count == 639 else dtype)
        gpu.clear()
        found = step(layer, x, cast)
        assert len(gpu.started) == 3, "the result and two gradients"
        with on_cpu():
            agree(found, step(layer, x, cast), dtype)


def test_later_steps_look_for_nothing(gpu, monkeypatch):
    layer = nn.Linear(96, 19).to(BF)
    for count in (640, 639):
        step(layer, rows(count, 96))
    monkeypatch.setattr(linear.plan, "bound_plan", None)
    for count in (640, 639, 638):
        gpu.clear()
        step(layer, rows(count, 96))
        assert len(gpu.started) == 3 and all(one.by_address for one in gpu.started)


def test_a_gradient_that_is_not_wanted_has_no_kernel(gpu):
    layer, x = nn.Linear(96, 19).to(BF), rows(640, 96)
    layer.weight.requires_grad_(False)
    gpu.clear()
    layer(x.replace(x.feats.detach())).feats.sum().backward()
    assert len(gpu.started) == 1 and layer.bias.grad.eq(640).all()
    layer.weight.requires_grad_()
    layer(x.replace(x.feats.detach())).feats.sum().backward()
    assert len(gpu.started) == 3 and x.feats.grad is None and layer.weight.grad is not None


@pytest.mark.parametrize(
    ("written", "wants"), [("bias", ["x", "weight", "bias"]), ("weight", ["weight", "bias"]), ("x", ["x"])]
)
@pytest.mark.parametrize("mixed", [False, True])
def test_what_no_gradient_depends_on_may_be_written_to(gpu, written, wants, mixed):
    """Behind the result; as with torch's own product."""
    layer = nn.Linear(8, 3).to(torch.float32 if mixed else BF)
    x = torch.randn(640, 8).to(BF)
    own = {"x": x, "weight": layer.weight, "bias": layer.bias}
    start = {name: t.detach().clone() for name, t in own.items()}

    def gradients():
        for name, t in own.items():
            t.requires_grad_(False).copy_(start[name]).requires_grad_(name in wants)
        with torch.autocast("cpu", BF, enabled=mixed):
            y = layer(pm.SparseTensor(x, COORDS[:640])).feats
        with torch.no_grad():
            own[written].fill_(7)
        return torch.autograd.grad(y.float().square().sum(), [own[name] for name in wants])

    found = gradients()
    assert len(gpu.started) == 1 + len({"x", "weight"} & {*wants})
    with on_cpu():
        agree(found, gradients())


def test_a_gradient_that_is_not_wanted_holds_nothing(gpu):
    layer = nn.Linear(8, 3).to(BF).requires_grad_(False)
    y = layer(rows(640, 8)).feats
    held = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert held and all(t is layer.weight for t in held)


def test_many_gradients_at_once(gpu):
    """Which stand for one: torch multiplies."""
    layer, x, many = nn.Linear(8, 3).to(BF), rows(640, 8), torch.randn(4, 640, 3).to(BF)
    y = layer(x).feats
    own = x.feats, layer.weight, layer.bias
    every = torch.autograd.grad(y, own, many, is_grads_batched=True, retain_graph=True)
    for n, grad in enumerate(many):
        agree([g[n] for g in every], torch.autograd.grad(y, own, grad, retain_graph=True))


def test_gradients_of_gradients(gpu):
    layer, x = nn.Linear(8, 3).to(BF), rows(640, 8)

    def twice():
        y = layer(x).feats
        (first,) = torch.autograd.grad(y.float().square().sum(), x.feats, create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), (x.feats, layer.weight))

    found = twice()
    with on_cpu():
        agree(found, twice())


def test_gradients_whose_rows_are_apart(gpu):
    """Of a part of a concatenation, and of a sum, whose are all one number."""
    layer, x = nn.Linear(8, 3).to(BF), rows(640, 8)
    for end in (lambda y: torch.cat([y, y], 1)[:, 1:].float().square().sum(), torch.sum):
        found = torch.autograd.grad(end(layer(x).feats), (x.feats, layer.weight))
        with on_cpu():
            agree(found, torch.autograd.grad(end(layer(x).feats), (x.feats, layer.weight)))


def test_the_caller_says_where_tiles_come_from_behind_it_too(gpu, monkeypatch):
    """Gradients are computed in a thread of their own."""
    layer, seen, asked = nn.Linear(8, 3).to(BF), [], kernels.tile_of
    monkeypatch.setattr(kernels, "tile_of", lambda *given: seen.append(kernels.tuning_mode()) or asked(*given))
    with kernels.use_tuning_mode(kernels.DEFAULT):
        y = layer(rows(640, 8)).feats
    y.sum().backward()
    assert len(seen) >= 3 and set(seen) == {kernels.DEFAULT}


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: (layer.float(), x.replace(x.feats.float())),
        lambda layer, x: (layer, rows(0, 8)),
    ],
    ids=["float32", "no rows"],
)
def test_other_products_are_torch_s(gpu, change):
    layer, x = change(nn.Linear(8, 3).to(BF), rows(640, 8))
    gpu.clear()
    layer(x).feats.sum().backward()
    assert not gpu.started and layer.weight.grad is not None


def test_no_rows_have_no_kernel(gpu):
    """Whoever asks for them."""
    assert linear.differentiable_features(torch.zeros(0, 8, dtype=BF), torch.zeros(3, 8, dtype=BF), None) is None


def test_few_rows_of_a_captured_step_have_kernels(gpu, monkeypatch):
    """The host, which has more to do for them, does it once."""
    layer, x = nn.Linear(8, 3).to(BF), rows(90, 8)
    monkeypatch.setattr(type(x.geometry), "trains", True)
    monkeypatch.setattr(linear, "row_by_row", lambda x, function: x.replace(function(x.feats)))
    layer(x).feats.sum().backward()
    assert len(gpu.started) == 3


def test_gradients_are_kernels_whatever_else_seems_to_cost(gpu, monkeypatch):
    free = replace(plan.LOWERINGS["graph"], work=lambda *given: Work(launches=0))
    monkeypatch.setattr(plan, "LOWERINGS", {**plan.LOWERINGS, "graph": free})
    layer, x = nn.Linear(8, 3).to(BF), rows(640, 8)
    y = layer(x).feats
    gpu.clear()
    y.sum().backward()
    assert len(gpu.started) == 2


def test_sums_in_one_order_are_torch_s(gpu):
    layer, x = nn.Linear(8, 3).to(BF), rows(640, 8)
    with deterministic():
        layer(x).feats.sum().backward()
    assert not gpu.started and layer.weight.grad is not None


def test_what_does_not_fit_is_refused(gpu):
    layer = nn.Linear(8, 3).to(BF)
    with pytest.raises(pm.errors.ShapeError, match="takes 8 channels, x has 7"):
        layer(rows(640, 7))
    with pytest.raises(RuntimeError, match="dtype"):
        layer(rows(640, 8, torch.float16))
    assert not gpu.started


def test_on_a_cpu_torch_multiplies():
    assert not autograd.uses_gpu(torch.zeros(1))
    assert linear.differentiable_features(torch.zeros(4, 8, dtype=BF), torch.zeros(3, 8, dtype=BF), None) is None


def test_a_tangent_goes_torch_s_way(gpu):
    layer, x = nn.Linear(8, 3).to(BF), torch.randn(640, 8).to(BF)
    y, tangent = torch.func.jvp(lambda f: layer(pm.SparseTensor(f, COORDS[:640])).feats, (x,), (torch.ones_like(x),))
    assert not gpu.started
    assert_close(tangent[0].float(), layer.weight.detach().float().sum(1), rtol=2e-2, atol=2e-2)
