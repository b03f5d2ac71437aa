"""CenterPointBackbone: the two published forms, and the numbers of dense torch convolutions masked to active sites."""

import cases
import masked
import pytest
import torch
from masked import Grid, State
from nets import with_norms

import pumice as pm
from pumice.errors import OptionError
from pumice.models import CenterPointBackbone
from pumice.testing import random_tensor

# (in, out, kernel, stride, padding) of the convolutions that change the level, and of the first one
VOXELRES8X = [
    (5, 16, (3, 3, 3), 1, None),
    (16, 32, (3, 3, 3), 2, 1),
    (32, 64, (3, 3, 3), 2, 1),
    (64, 128, (3, 3, 3), 2, (0, 1, 1)),
    (128, 128, (3, 1, 1), (2, 1, 1), 0),
]
RESNET21D = [
    (5, 16, (3, 3, 3), 1, None),
    (16, 32, (3, 3, 3), 2, 0),
    (32, 64, (3, 3, 3), 2, 0),
    (64, 128, (3, 3, 3), 2, 0),
    (128, 128, (1, 3, 1), (1, 2, 1), 0),
]
FORMS = {"voxelres8x": VOXELRES8X, "resnet21d": RESNET21D}
STRIDES = {
    "voxelres8x": [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (16, 8, 8)],
    "resnet21d": [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (8, 16, 8)],
}
SHAPE = {"voxelres8x": (41, 16, 24), "resnet21d": (23, 39, 19)}


def convolutions(net):
    return [m for m in net.modules() if isinstance(m, pm.nn.Conv3d)]


def sample(form, dtype=torch.float64, device="cpu", batches=2, bounded=True):
    """A few clumps of voxels in the grid of the form."""
    rng = torch.Generator().manual_seed(0)
    shape = torch.tensor(SHAPE[form])
    centre = torch.rand(batches, 3, 3, generator=rng) * (shape - 8) + 4
    points = centre[:, :, None] + 1.5 * torch.randn(batches, 3, 40, 3, generator=rng)
    cells = points.floor().long().clamp(min=0).minimum(shape - 1)
    items = torch.arange(batches)[:, None, None, None].expand(-1, 3, 40, 1)
    coords = torch.cat([items, cells], dim=-1).reshape(-1, 4).unique(dim=0)
    coords = coords[torch.randperm(len(coords), generator=rng)].int()
    feats = torch.randn(len(coords), 5, dtype=torch.float64, generator=rng)
    grid = SHAPE[form] if bounded else None
    return pm.SparseTensor(feats.to(device, dtype), coords.to(device), spatial_shape=grid, batch_size=batches)


def network(form, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    net = CenterPointBackbone(form=form).double()
    return with_norms(net).to(device, dtype)


def oracle(form: str, state: State, x: Grid, training: bool) -> list[Grid]:
    """Every stage, out of dense convolutions."""
    eps = 1e-3 if form == "voxelres8x" else 1e-5
    stages = []
    for level, (_, _, _, stride, padding) in enumerate(FORMS[form]):
        # The last level of voxelres8x is a bare unit, every other one a sequence of a unit and blocks.
        name = f"levels.{level}" if f"levels.{level}.1.running_mean" in state else f"levels.{level}.0"
        weight = state[f"{name}.0.weight"]
        kept = stride == 1
        x = masked.same(x, weight) if kept else masked.strided(x, weight, triple(stride), triple(padding))
        x = masked.relu(masked.norm(x, state, f"{name}.1", training, eps))
        for block in range(2 if level < 4 else 0):
            x = masked.residual(x, state, f"levels.{level}.{block + 1}", training, eps)
        stages.append(x)
    return stages


def triple(value):
    return (value,) * 3 if isinstance(value, int) else value


# Structure
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_published_network(form):
    with torch.device("meta"):
        net = CenterPointBackbone(5, form)
    convs = convolutions(net)
    assert len(convs) == 21
    options = [(m.in_channels, m.out_channels, tuple(m.weight.shape[1:-1]), m.options["stride"], m.options["padding"])
               for m in convs]  # fmt: skip
    assert [o for o in options if o[0] != o[1] or o[3] != 1] == FORMS[form]
    rest = [o for o in options if o[0] == o[1] and o[3] == 1]
    assert [o[1] for o in rest] == [w for w in (16, 32, 64, 128) for _ in range(4)]
    assert all(o[2] == (3, 3, 3) for o in rest)


def test_norms_and_biases_of_the_forms():
    for form, (eps, momentum, biased) in {"voxelres8x": (1e-3, 0.01, 16), "resnet21d": (1e-5, 0.1, 0)}.items():
        net = CenterPointBackbone(5, form)
        norms = [m for m in net.modules() if isinstance(m, pm.nn.BatchNorm)]
        assert len(norms) == 21 and {(n.eps, n.momentum) for n in norms} == {(eps, momentum)}
        assert sum(m.bias is not None for m in convolutions(net)) == biased


def test_an_unknown_form():
    with pytest.raises(OptionError, match="voxelres8x, resnet21d"):
        CenterPointBackbone(form="resnet50")


@pytest.mark.parametrize("form", FORMS)
def test_eight_kernel_maps(form):
    net, x = network(form), sample(form)
    for _ in range(2):
        net(x)
        kinds = sorted((m.volume, m.relation.policy) for m in cases.maps_below(x.geometry))
        assert kinds == sorted([(27, "same")] * 4 + [(27, "support")] * 3 + [(3, "support")])


@pytest.mark.parametrize("form", FORMS)
def test_strides_and_channels(form):
    x = sample(form)
    stages = network(form).stages(x)
    assert [y.stride for y in stages] == STRIDES[form]
    assert [y.channels for y in stages] == [16, 32, 64, 128, 128]
    assert stages[0].geometry is x.geometry


def test_the_nuscenes_grid():
    """1440 x 1440 x 40 voxels of 0.075 x 0.075 x 0.2 m, one layer added on top as in OpenPCDet."""
    net = CenterPointBackbone(5).eval()
    x = random_tensor(300, 5, extent=(40, 1440, 1440))
    x = pm.SparseTensor(x.feats, x.coords, spatial_shape=(41, 1440, 1440))
    with torch.no_grad():
        y = net(x)
    assert y.spatial_shape == (2, 180, 180) and y.stride == (16, 8, 8)
    dense = y.to_dense()
    assert dense.shape == (1, 128, 2, 180, 180)
    assert int((dense != 0).any(1).sum()) <= len(y)
    rows = y.coords.long()
    assert torch.equal(dense[rows[:, 0], :, rows[:, 1], rows[:, 2], rows[:, 3]], y.feats)


# Numbers
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("form", FORMS)
def test_float64_is_the_oracle(device, form, training):
    net, x = network(form, device=device).train(training), sample(form, device=device).requires_grad_()
    state = {k: v.detach().cpu().clone().requires_grad_() for k, v in net.state_dict().items() if v.ndim}
    feats = x.feats.detach().cpu().clone().requires_grad_()
    grid = masked.scatter(x.coords.cpu(), feats, x.batch_size, SHAPE[form], (0, 0, 0))
    stages = net.stages(x)
    wanted = oracle(form, state, grid, training)
    for y, want in zip(stages, wanted, strict=True):
        assert tuple(want.values.shape[2:]) == y.spatial_shape
        rows = want.at(y.coords.cpu(), (0, 0, 0))
        assert (y.feats.detach().cpu() - rows).abs().max() <= 1e-9 * rows.abs().max()
    dy = torch.randn(stages[-1].feats.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    stages[-1].feats.backward(dy.to(device))
    names = [name for name, _ in net.named_parameters()]
    last = wanted[-1].at(stages[-1].coords.cpu(), (0, 0, 0))
    grads = torch.autograd.grad(last, [feats, *(state[name] for name in names)], dy)
    scale = max(g.abs().max() for g in grads)
    for name, got, want in zip(["x", *names], [x.feats.grad, *(p.grad for p in net.parameters())], grads, strict=True):
        # The bias of a convolution before a norm in training has the gradient zero, by cancellation.
        assert (got.cpu() - want).abs().max() <= 1e-9 * max(want.abs().max(), 1e-3 * scale), name


def test_without_a_shape_nothing_is_cut_off():
    """resnet21d unbounded is the same network in a grid with room on every side."""
    form, margin = "resnet21d", 64
    net, x = network(form).eval(), sample(form, bounded=False)
    moved = x.coords + torch.tensor([0, *(margin,) * 3], dtype=torch.int32)
    room = pm.SparseTensor(x.feats, moved, spatial_shape=[s + 2 * margin for s in SHAPE[form]], batch_size=2)
    with torch.no_grad():
        free, bounded = net(x), net(room)
    step = torch.tensor([0, *(margin // s for s in free.stride)], dtype=torch.int32)
    assert torch.equal(free.coords + step, bounded.coords[_order(bounded.coords - step, free.coords)])
    assert torch.allclose(free.feats, bounded.feats[_order(bounded.coords - step, free.coords)], rtol=0, atol=1e-12)
    assert len(free) > len(net(sample(form)))


def _order(rows, wanted):
    """The place of each of `wanted` among `rows`."""
    place = {tuple(row): i for i, row in enumerate(rows.tolist())}
    return torch.tensor([place[tuple(row)] for row in wanted.tolist()])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 3e-7), (torch.bfloat16, 6e-3), (torch.float16, 7e-4)])
def test_low_precision(device, form, dtype, limit):
    """rms error over rms of the float64 network with the same rounded operands, eval mode; twice what was measured."""
    net, x = network(form, dtype, device).eval(), sample(form, dtype, device)
    with torch.no_grad():
        y, want = net(x), net.double()(x.double())
    error = float((y.feats.double() - want.feats).norm() / want.feats.norm())
    assert error <= limit


@pytest.mark.parametrize("form", FORMS)
def test_no_voxel(device, form):
    x = pm.SparseTensor(
        torch.zeros(0, 5, device=device), torch.zeros(0, 4, dtype=torch.int32, device=device),
        spatial_shape=SHAPE[form], batch_size=1,
    )  # fmt: skip
    net = CenterPointBackbone(5, form).to(device)
    y = net(x)
    assert len(y) == 0 and y.to_dense().shape == (1, 128, *y.spatial_shape)
