"""MinkUNet: the published network, and the same numbers as dense torch convolutions masked to the active sites."""

from functools import lru_cache

import cases
import masked
import pytest
import torch
from masked import Grid, State
from nets import with_norms
from torch.nn.functional import cosine_similarity

import pumice as pm
from pumice.models import MinkUNet

LOW, SIDE = -16, 32  # a cube with negative coordinates, whole at stride 16

# notes of the published models: (in, out, kernel) of every convolution in order, widths 32 32 64 128 256 256 128 96 96
PUBLISHED = [
    *[(4, 32, 3), (32, 32, 3)],
    *[(32, 32, 2), (32, 32, 3), (32, 32, 3), (32, 32, 3), (32, 32, 3)],
    *[(32, 32, 2), (32, 64, 3), (64, 64, 3), (64, 64, 3), (64, 64, 3)],
    *[(64, 64, 2), (64, 128, 3), (128, 128, 3), (128, 128, 3), (128, 128, 3)],
    *[(128, 128, 2), (128, 256, 3), (256, 256, 3), (256, 256, 3), (256, 256, 3)],
    *[(256, 256, 2), (384, 256, 3), (256, 256, 3), (256, 256, 3), (256, 256, 3)],
    *[(256, 128, 2), (192, 128, 3), (128, 128, 3), (128, 128, 3), (128, 128, 3)],
    *[(128, 96, 2), (128, 96, 3), (96, 96, 3), (96, 96, 3), (96, 96, 3)],
    *[(96, 96, 2), (128, 96, 3), (96, 96, 3), (96, 96, 3), (96, 96, 3)],
]
POINTWISE = [(32, 64), (64, 128), (128, 256), (384, 256), (192, 128), (128, 96), (128, 96)]


def shell(seed=0, batches=2):
    """Coordinates of rough spherical shells, one per batch item, rows in random order: surfaces, as scans have them."""
    rng = torch.Generator().manual_seed(seed)
    axis = torch.arange(LOW, LOW + SIDE)
    cells = torch.cartesian_prod(torch.arange(batches), axis, axis, axis)
    radius = (cells[:, 1:] + 0.5).norm(dim=1)
    keep = ((radius - 9 - cells[:, 0]).abs() < 0.8) & (torch.rand(len(cells), generator=rng) < 0.5)
    cells = cells[keep]
    return cells[torch.randperm(len(cells), generator=rng)].int()


def sample(channels=4, dtype=torch.float64, device="cpu", batches=2):
    coords = shell(batches=batches)
    feats = torch.randn(len(coords), channels, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return pm.SparseTensor(feats.to(device, dtype), coords.to(device))


def network(width=0.125, classes=5, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    net = MinkUNet(4, classes, width).double()
    return with_norms(net).to(device, dtype)


def oracle(state: State, x: Grid, training: bool) -> Grid:
    """SparseResUNet42, as the notes have it, out of dense convolutions."""

    def unit(y: Grid, name: str) -> Grid:
        return masked.relu(masked.norm(masked.same(y, state[f"{name}.0.weight"]), state, f"{name}.1", training))

    def blocks(y: Grid, name: str) -> Grid:
        for i in range(2):
            y = masked.residual(y, state, f"{name}.blocks.{i}", training)
        return y

    levels = [unit(unit(x, "stem.0"), "stem.1")]
    for i in range(4):
        y = masked.strided(levels[-1], state[f"encoders.{i}.down.0.weight"], (2, 2, 2))
        y = masked.relu(masked.norm(y, state, f"encoders.{i}.down.1", training))
        levels.append(blocks(y, f"encoders.{i}"))
    y = levels.pop()
    for i in range(4):
        skip = levels.pop()
        y = masked.back(y, state[f"decoders.{i}.up.weight"], 2, skip)
        y = masked.relu(masked.norm(y, state, f"decoders.{i}.norm.0", training))
        y = blocks(masked.join(y, skip), f"decoders.{i}")
    return masked.same(y, state["head.weight"][:, None, None, None], state["head.bias"])


def by_oracle(net: MinkUNet, x: pm.SparseTensor, training: bool) -> tuple[torch.Tensor, torch.Tensor, State]:
    """(logits [N, classes], the leaf of features, the leaves of parameters) in float64 on the CPU."""
    state = {k: v.detach().cpu().double().requires_grad_() for k, v in net.state_dict().items() if v.ndim}
    feats = x.feats.detach().cpu().double().requires_grad_()
    grid = masked.scatter(x.coords.cpu(), feats, x.batch_size, (SIDE,) * 3, (LOW,) * 3)
    return oracle(state, grid, training).at(x.coords.cpu(), (LOW,) * 3), feats, state


def rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """rms of the difference over rms of the reference."""
    want = want.detach()
    return float((got.detach().double().cpu() - want).norm() / want.norm())


# Structure
def convolutions(net):
    return [m for m in net.modules() if isinstance(m, pm.nn.Conv3d | pm.nn.InverseConv3d)]


def linears(net):
    return [m for m in net.modules() if isinstance(m, pm.nn.Linear)]


def widths(net):
    found = []
    for m in convolutions(net):
        assert len(set(m.weight.shape[1:-1])) == 1 and m.bias is None
        assert m.weight.shape[0] == m.out_channels and m.weight.shape[-1] == m.in_channels
        found.append((m.in_channels, m.out_channels, m.weight.shape[1]))
    return found


def test_it_is_the_published_network():
    with torch.device("meta"):
        net = MinkUNet(in_channels=4, num_classes=19)
    assert len(convolutions(net)) == 42
    assert widths(net) == PUBLISHED
    assert [(m.in_features, m.out_features) for m in linears(net)] == [*POINTWISE, (96, 19)]
    assert [m.bias is not None for m in linears(net)] == [False] * 7 + [True]
    assert round(sum(p.numel() for p in net.parameters()) / 1e6, 1) == 21.7


def test_half_the_width():
    with torch.device("meta"):
        net = MinkUNet(in_channels=4, num_classes=19, width=0.5)
    assert widths(net) == [(4 if i == 4 else i // 2, o // 2, k) for i, o, k in PUBLISHED]
    assert (linears(net)[-1].in_features, linears(net)[-1].out_features) == (48, 19)


def test_nine_kernel_maps():
    net, x = network(), sample()
    net(x)
    maps = cases.maps_below(x.geometry)
    volumes = sorted((m.volume, m.relation.policy) for m in maps)
    assert volumes == [(8, "floor_unique")] * 4 + [(27, "same")] * 5
    levels = {m.num_inputs for m in maps if m.volume == 27}
    assert levels == {len((x.coords // torch.tensor([1, s, s, s])).unique(dim=0)) for s in (1, 2, 4, 8, 16)}
    net.eval()(x)
    net.train()(x.replace(x.feats * 2)).feats.sum().backward()
    assert len(cases.maps_below(x.geometry)) == 9


def test_prepare_finds_the_same_nine():
    net, x = network(), sample()
    pm.prepare(net, x)
    found = {id(m) for m in cases.maps_below(x.geometry)}
    assert len(found) == 9
    net(x)
    assert {id(m) for m in cases.maps_below(x.geometry)} == found


# Numbers, float64
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_float64_is_the_oracle(device, training):
    net, x = network(device=device).train(training), sample(device=device).requires_grad_()
    want, feats, state = by_oracle(net, x, training)
    y = net(x)
    assert y.geometry is x.geometry and y.stride == (1, 1, 1)
    assert (y.feats.detach().cpu() - want).abs().max() <= 1e-9 * want.abs().max()
    dy = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y.feats.backward(dy.to(device))
    names = [name for name, _ in net.named_parameters()]
    wanted = torch.autograd.grad(want, [feats, *(state[name] for name in names)], dy)
    got = [x.feats.grad, *(p.grad for p in net.parameters())]
    for name, a, b in zip(["x", *names], got, wanted, strict=True):
        assert (a.cpu() - b).abs().max() <= 1e-9 * b.abs().max(), name


def test_float64_statistics(device):
    net, x = network(device=device).train(), sample(device=device)
    net(x)
    grid = masked.scatter(x.coords.cpu(), x.feats.cpu(), 2, (SIDE,) * 3, (LOW,) * 3)
    fresh = network()
    y = masked.same(grid, fresh.stem[0][0].weight.detach()).at(x.coords.cpu(), (LOW,) * 3)
    want = 0.9 * fresh.stem[0][1].running_var + 0.1 * y.var(0)
    torch.testing.assert_close(net.stem[0][1].running_var.cpu(), want)


def test_rows_may_come_in_any_order(device):
    net, x = network(device=device).eval(), sample(device=device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3)).to(device)
    turned = pm.SparseTensor(x.feats[order], x.coords[order])
    assert rms_error(net(turned).feats, net(x).feats[order].cpu()) < 1e-13


def test_batch_items_do_not_meet(device):
    net, x = network(device=device).eval(), sample(device=device)
    together = net(x).split()
    for item, alone in zip(together, x.split(), strict=True):
        assert torch.equal(item.coords, alone.coords)
        assert rms_error(item.feats, net(alone).feats.cpu()) < 1e-13


# Numbers, low precision
# rms error over rms of the float64 network with the same (rounded) parameters and features. In eval mode: (logits,
# gradient of x, gradient of all parameters); in training: (logits, 1 - cosine of the gradients of all parameters).
# Measured on a CPU, then given room of a factor of two to three. What costs so much in the gradients is ReLU: a
# pre-activation that changes its sign switches a path on or off, 26 times in a row.
PRECISIONS = {
    "fp32": (torch.float32, None, (2e-7, 4e-7, 6e-7), (4e-6, 4e-12)),
    "autocast bf16": (torch.float32, torch.bfloat16, (0.01, 0.02, 0.02), (0.06, 0.2)),
    "autocast fp16": (torch.float32, torch.float16, (0.001, 0.013, 0.02), (0.01, 0.04)),
    "bf16": (torch.bfloat16, None, (0.008, 0.02, 0.02), (0.06, 0.2)),
    "fp16": (torch.float16, None, (0.001, 0.013, 0.02), (0.008, 0.02)),
}


@lru_cache
def reference(dtype: torch.dtype, training: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, what is fed back, gradient of x, gradient of all parameters) by the oracle, operands of `dtype`."""
    net, x = network(dtype=dtype), sample(dtype=dtype, batches=1)
    want, feats, state = by_oracle(net, x, training)
    dy = torch.randn(want.shape, generator=torch.Generator().manual_seed(2)).bfloat16().double()
    leaves = [state[name] for name, _ in net.named_parameters()]
    dx, *dw = torch.autograd.grad(want, [feats, *leaves], dy)
    return want.detach(), dy, dx, torch.cat([g.flatten() for g in dw])


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_low_precision(device, name, training):
    dtype, autocast, still, moving = PRECISIONS[name]
    net = network(dtype=dtype, device=device).train(training)
    x = sample(dtype=dtype, device=device, batches=1).requires_grad_()
    with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = net(x)
    assert y.dtype == (autocast or dtype)
    want, dy, dx, dw = reference(dtype, training)
    y.feats.backward(dy.to(device, y.dtype))
    assert all(p.grad is not None and p.grad.dtype == dtype for p in net.parameters())
    grads = torch.cat([p.grad.double().cpu().flatten() for p in net.parameters()])
    if training:
        found, limits = (rms_error(y.feats, want), 1 - float(cosine_similarity(grads, dw, dim=0))), moving
    else:
        found, limits = (rms_error(y.feats, want), rms_error(x.feats.grad, dx), rms_error(grads, dw)), still
    assert all(a <= limit for a, limit in zip(found, limits, strict=True)), f"{found} over {limits}"


# Other forms
def test_predict_is_per_point():
    rng = torch.Generator().manual_seed(0)
    points = 3 * torch.rand(500, 3, generator=rng)
    x = pm.voxelize(points, torch.rand(500, 4, generator=rng), size=0.25)
    net = MinkUNet(4, 5, 0.125).eval()
    assert torch.equal(net.predict(x), net(x).feats.argmax(1)[x.inverse]) and len(net.predict(x)) == 500
    bare = pm.SparseTensor(x.feats, x.coords)
    assert torch.equal(net.predict(bare), net(x).feats.argmax(1))


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_other_dimensions(device, dim):
    coords = cases.compact(dim, -8, 8, 60, 2)
    x = cases.tensor(coords, torch.randn(len(coords), 3).to(device))
    net = MinkUNet(3, 2, 0.125, dim=dim).to(device)
    y = net(x)
    assert y.channels == 2 and y.geometry is x.geometry
    y.feats.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_no_voxel_and_one(device, count, training):
    net = MinkUNet(4, 5, 0.125).to(device).train(training)
    x = pm.SparseTensor(torch.ones(count, 4, device=device), torch.zeros(count, 4, dtype=torch.int32, device=device))
    y = net(x)
    assert y.feats.shape == (count, 5) and torch.isfinite(y.feats).all()
    y.feats.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
