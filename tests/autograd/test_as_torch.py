"""What works on a torch tensor or module works here: copies, files, workers, checkpoints, autocast, compile."""

import copy
import io
import pickle

import cases
import pytest
import torch
from cases import Case
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import pumice as pm
from pumice.errors import CoordinateError, DtypeError, OptionError, ShapeError


def sample(seed=0, dtype=torch.float32, batches=2, dim=3, channels=4):
    """A small SparseTensor."""
    coords = cases.compact(dim, -4, 4, 20, batches, seed)
    rng = torch.Generator().manual_seed(seed)
    return cases.tensor(coords, torch.randn(len(coords), channels, generator=rng).to(dtype))


class UNet(torch.nn.Module):
    """Down and up again: every kind of map, a skip connection, a torch module in a Sequential."""

    def __init__(self):
        super().__init__()
        self.stem = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.BatchNorm(8), torch.nn.ReLU())
        self.down = pm.nn.Conv3d(8, 16, 2, stride=2)
        self.deep = pm.nn.Conv3d(16, 16, 3)
        self.up = pm.nn.InverseConv3d(16, 8, 2, stride=2)
        self.head = pm.nn.Conv3d(16, 5, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(pm.cat([x, self.up(self.deep(self.down(x)), x)]))


def net(seed=0):
    """A UNet with fixed weights."""
    torch.manual_seed(seed)
    return UNet()


def same(a, b):
    """Equal coordinates and features."""
    return torch.equal(a.coords, b.coords) and torch.equal(a.feats, b.feats)


def test_deepcopy():
    x = sample().requires_grad_()
    y = copy.deepcopy(x)
    assert same(x, y) and y.feats.data_ptr() != x.feats.data_ptr()
    model = net()
    twin = copy.deepcopy(model)
    assert same(model(x), twin(x))
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not same(model(x), twin(x))


def test_pickle():
    x = sample()
    net()(x)  # with maps in its geometry
    y = pickle.loads(pickle.dumps(x))
    assert same(x, y) and y.stride == x.stride and y.batch_size == x.batch_size and y.spatial_shape == x.spatial_shape
    assert same(net()(x), net()(y))
    model = pickle.loads(pickle.dumps(net()))
    assert same(model(x), net()(x))


def test_pickled_together_share_a_geometry():
    x = sample()
    a, b = pickle.loads(pickle.dumps((x, x.replace(x.feats * 2))))
    assert a.geometry is b.geometry and torch.equal((a + b).feats, x.feats * 3)


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save_of_a_tensor(weights_only):
    x = pm.voxelize(torch.rand(30, 3), size=0.25)
    for t in (x, pm.ops.max_pool(x, 2), sample(), cases.tensor([], torch.zeros(0, 2), dim=2, batch_size=3)):
        file = io.BytesIO()
        torch.save({"x": t}, file)
        file.seek(0)
        y = torch.load(file, weights_only=weights_only)["x"]
        assert same(t, y) and (y.stride, y.batch_size) == (t.stride, t.batch_size)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=weights_only).inverse, x.inverse)


def test_torch_save_of_a_module():
    model, x = net(0).eval(), sample()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = net(1).eval()
    assert not same(model(x), other(x))
    assert other.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    assert same(model(x), other(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False)(x), model(x))


class Clouds(Dataset):
    """Eight clouds, made in the worker."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return sample(seed=index, batches=1)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers):
    loader = DataLoader(
        Clouds(), batch_size=4, num_workers=workers, collate_fn=pm.collate, pin_memory=torch.cuda.is_available()
    )
    found = list(loader)
    assert len(found) == 2
    for part, x in enumerate(found):
        assert isinstance(x, pm.SparseTensor) and x.batch_size == 4
        assert same(x, pm.collate([Clouds()[4 * part + i] for i in range(4)]))
        assert x.is_pinned() == torch.cuda.is_available()
        assert net()(x).channels == 5


def test_a_training_step_lowers_the_loss():
    model, x = net(), sample()
    goal = torch.randn(len(x), 5, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.mse_loss(model(x).feats, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


WRITTEN = {
    "conv": lambda: pm.nn.Conv3d(4, 8, 3, bias=False),
    "bias": lambda: pm.nn.Conv3d(4, 8, 3),
    "point": lambda: pm.nn.Conv3d(4, 8, 1, bias=False),
    "strided": lambda: pm.nn.Conv3d(4, 8, 2, stride=2, bias=False),
    "groups": lambda: pm.nn.Conv3d(4, 8, 3, groups=2, bias=False),
    "depthwise": lambda: pm.nn.Conv3d(4, 4, 3, groups=4, bias=False),
    "transposed": lambda: pm.nn.ConvTranspose3d(4, 8, 2, stride=2, bias=False),
    "dataflow": lambda: pm.nn.Conv3d(4, 8, 3, bias=False, dataflow="fetch-on-demand"),
    "linear": lambda: pm.nn.Linear(4, 8, bias=False),
    "norm": lambda: pm.nn.BatchNorm(4),
    "sum": lambda: pm.nn.SumPool3d(2),
    "mean": lambda: pm.nn.AvgPool3d(2),
    "maximum": lambda: pm.nn.MaxPool3d(2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_results_may_be_written_to(name):
    """An in-place ReLU behind a layer, as torch's layers allow; gradients are those of one that is not in place."""
    torch.manual_seed(0)
    layer, x = WRITTEN[name](), sample(channels=4)
    found = []
    for act in (pm.nn.ReLU(inplace=True), pm.nn.ReLU(), lambda y: y.replace(torch.relu_(y.feats))):
        feats = x.feats.detach().clone().requires_grad_()
        y = act(layer(x.replace(feats))).feats
        found.append(torch.autograd.grad(y.square().sum(), [feats, *layer.parameters()]))
    for other in (found[0], found[2]):
        assert all(torch.equal(a, b) for a, b in zip(found[1], other, strict=True))


@pytest.mark.parametrize(
    "text", ["y[b,a] = x[a,b]", "y[a,b] = x[a,b]", "y[a,c] = x[a,b]*w[b,c]", "y[a,d] = x[a,d]*z[d]"]
)
def test_results_of_einsums_may_be_written_to(text):
    given = {"x": torch.randn(3, 4), "w": torch.randn(4, 1), "z": torch.ones(4)}
    given = {name: t.requires_grad_() for name, t in given.items() if f"{name}[" in text.partition("=")[2]}
    kept = given["x"].detach().clone()
    pm.einsum(text, **given).mul_(2).sum().backward()
    with torch.no_grad():
        pm.einsum(text, **given).mul_(2)
    assert torch.equal(given["x"], kept) and all(t.grad is not None for t in given.values())


def test_gradient_checkpointing():
    model, x = net(), sample(dtype=torch.float32)
    feats = x.feats.clone().requires_grad_()

    def through(f):
        return model(x.replace(f)).feats

    plain = torch.autograd.grad(through(feats).pow(2).sum(), [feats, *model.parameters()])
    kept = torch.autograd.grad(
        checkpoint(through, feats, use_reentrant=False).pow(2).sum(), [feats, *model.parameters()]
    )
    for a, b in zip(plain, kept, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpoint_of_a_module_that_takes_a_sparse_tensor():
    model, x = net(), sample()
    y = checkpoint(model, x.replace(x.feats.clone().requires_grad_()), use_reentrant=False)
    y.feats.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autocast(device):
    model, x = net().to(device), sample().to(device)
    want = model(x).feats
    with torch.autocast(device, dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert (y.feats.float() - want).abs().max() <= 0.05 * want.abs().max()
    y.feats.float().pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        assert model(x).dtype == torch.float32


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_gradients_of_weights_under_autocast_are_not_rounded(second, device):
    """They are those of the cast weight, in the weight's own dtype; so are gradients of gradients."""
    torch.manual_seed(0)
    x, values = sample(channels=5).to(device), torch.randn(7, 3, 3, 3, 5, device=device)
    found = []
    for kind in (torch.float32, torch.float64):
        given = [t.clone() if kind == torch.float32 else t.bfloat16().double() for t in (x.feats, values)]
        feats, weight = (t.requires_grad_() for t in given)
        with torch.autocast(device, torch.bfloat16):
            y = pm.ops.conv(x.replace(feats), weight).feats
        assert y.dtype == (torch.bfloat16 if kind == torch.float32 else kind)
        grad = torch.linspace(-1, 1, y.numel(), device=device).view_as(y).bfloat16().to(y.dtype)
        (first,) = torch.autograd.grad(y, weight, grad, create_graph=second)
        assert first.dtype == kind
        found.append(torch.autograd.grad(first.square().sum(), feats)[0] if second else first)
    limit = 0.03 if second else 1e-5
    assert float((found[0] - found[1]).norm()) <= limit * float(found[1].norm())


def test_autocast_of_each_operator():
    x, w = sample(), torch.randn(4, 3, 3, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pm.ops.conv(x, w, torch.randn(4)).dtype == torch.bfloat16
        assert pm.ops.conv_transpose(x, w, stride=2).dtype == torch.bfloat16
        assert pm.ops.conv_inverse(pm.ops.max_pool(x, 3, stride=2), w, x, stride=2).dtype == torch.bfloat16


def test_compile_without_a_graph_break():
    torch._dynamo.reset()
    model, x = net().eval(), sample()
    with torch.no_grad():
        want = model(x)  # builds the maps
        got = torch.compile(model, fullgraph=True, backend="eager")(x)
    assert torch.equal(got.coords, want.coords)
    torch.testing.assert_close(got.feats, want.feats)


def test_compiled_training():
    torch._dynamo.reset()
    model, x = net(), sample()
    model(x).feats.pow(2).sum().backward()
    want = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).feats.pow(2).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], msg=name)


def test_compiled_network_takes_another_cloud():
    """Other sizes, after an eager run: compiled again with dynamic shapes, the same numbers."""
    torch._dynamo.reset()
    model = net().eval()
    fast = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for seed in range(3):
            x = sample(seed)
            want = model(x)
            torch.testing.assert_close(fast(x).feats, want.feats)


@pytest.mark.parametrize("case", [Case("same", (3, 3)), Case("groups", (3, 3), groups=2, channels=(4, 2))], ids=str)
def test_registered_operators_pass_opcheck(case):
    """Schemas, fake kernels and autograd registrations of the dispatcher's operators that a convolution calls."""
    ops = cases.operands(case, torch.float32)
    seen = {}

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "pumice":
                seen.setdefault(func, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Spy():
        y = pm.ops.conv(cases.tensor(ops.coords, ops.feats), ops.weight, ops.bias, groups=case.groups)
        y.feats.sum().backward()
    assert seen, "no operator of the library was dispatched"
    for func, (args, kwargs) in seen.items():
        inputs = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
        torch.library.opcheck(func, inputs, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_modules_show_their_sizes():
    text = repr(net())
    assert "Conv3d(4, 8" in text and "InverseConv3d(16, 8" in text


def test_mixed_sequential_and_residual_block():
    torch.manual_seed(0)
    x = sample()
    model = pm.nn.Sequential(torch.nn.Linear(4, 8), pm.nn.ReLU(), pm.nn.ResidualBlock(8, 8), pm.nn.Linear(8, 3))
    y = model(x)
    assert y.channels == 3 and y.geometry is x.geometry


class Everything(torch.nn.Module):
    """One of each kind of layer that asks for a map or for the batch items."""

    def __init__(self):
        super().__init__()
        self.stem = pm.nn.Sequential(pm.nn.Conv3d(4, 8, 3), pm.nn.GroupNorm(2, 8), pm.nn.InstanceNorm(8))
        self.pools = torch.nn.ModuleList([pm.nn.MaxPool3d(2), pm.nn.AvgPool3d(2), pm.nn.SumPool3d(2)])
        self.up = pm.nn.InverseConv3d(8, 8, 2, stride=2)
        self.grow = pm.nn.GenerativeConvTranspose3d(8, 8, 2, stride=2)
        self.tops = torch.nn.ModuleList([pm.nn.GlobalMaxPool(), pm.nn.GlobalAvgPool(), pm.nn.GlobalSumPool()])

    def forward(self, x):
        x = self.stem(x)
        for pool in self.pools:
            x = self.up(pool(x), x)
        return sum(top(self.grow(x)) for top in self.tops)


def test_prepare_finds_every_map_without_arithmetic():
    x, model = sample(), Everything()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert pm.prepare(model, x) is x
    maps = dict(x.geometry.maps)
    assert len(maps) == 3
    assert model(x).shape == (2, 8)
    assert dict(x.geometry.maps) == maps
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def saved(change, weights_only=True, x=None):
    """What torch.load makes of a file in which the geometry's parts were changed."""
    coords = torch.cartesian_prod(torch.zeros(1), *[torch.arange(4.0)] * 3).int()
    x = pm.voxelize(coords[:, 1:].float(), size=1.0, spatial_shape=(4, 4, 4)) if x is None else x
    function, parts = x.geometry.__reduce__()
    file = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pm.Geometry, "__reduce__", lambda _: (function, tuple(change(list(parts)))))
        torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def changed(place, value):
    """A file whose part at this place is what `value` makes of it."""
    return lambda parts: [*parts[:place], value(parts[place]), *parts[place + 1 :]]


WRONG = {
    "floats": (DtypeError, changed(0, lambda c: c.double())),
    "negative items": (CoordinateError, changed(0, lambda c: c - torch.tensor([5, 0, 0, 0]).int())),
    "outside": (CoordinateError, changed(2, lambda _: (2, 4, 4))),
    "axes": (ShapeError, changed(1, lambda _: ((1, 1),))),
    "items": (CoordinateError, changed(3, lambda _: 0)),
    "frame": (OptionError, changed(4, lambda f: ((0.0, 1.0, 1.0), *f[1:]))),
    "inverse": (CoordinateError, changed(5, lambda i: i + 1)),
    "inverse of floats": (DtypeError, changed(5, lambda i: i.double())),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_file_is_checked_when_it_is_loaded(name, weights_only):
    error, change = WRONG[name]
    with pytest.raises(error):
        saved(change, weights_only)


@pytest.mark.parametrize("moved", [lambda x: x, lambda x: x.split()[0], lambda x: pm.collate([x, x])])
def test_duplicates_of_a_file_are_raised_before_neighbours_are_used(moved):
    x = moved(saved(changed(0, torch.zeros_like)))
    for _ in range(2):
        with pytest.raises(CoordinateError, match="duplicates"):
            pm.ops.conv(x, torch.ones(1, 3, 3, 3, 3))
    with pytest.raises(CoordinateError, match="duplicates"):
        x.geometry.find(x.coords)


def over_features(x, net):
    return lambda feats: net(x.replace(feats)).feats.square().sum()


def with_others(x, net):
    other = sample(seed=5)
    return lambda feats: net(pm.ops.prune(x.replace(feats) + other, (x + other).coords[:, 1] > -2)).feats.sum()


def with_prepare(x, net):
    steps, same = [pm.Relation.of(3, 2, stride=2)], [[pm.Relation.of(3, 3)]] * 2
    return lambda feats: net(x.replace(feats).prepare(steps, same)).feats.square().sum()


@pytest.mark.parametrize("of", [over_features, with_others, with_prepare])
@pytest.mark.parametrize("transform", ["grad", "jvp", "per sample"])
def test_maps_found_within_a_transform_serve_without_it(of, transform):
    x, model = sample(), net().eval()
    loss = of(x, model)
    if transform == "grad":
        torch.func.grad(loss)(x.feats)
    elif transform == "jvp":
        torch.func.jvp(loss, (x.feats,), (x.feats,))
    else:
        torch.func.vmap(torch.func.grad(loss))(torch.stack([x.feats, x.feats]))
    feats = x.feats.clone().requires_grad_()
    found = torch.autograd.grad(loss(feats), feats)
    expected = torch.autograd.grad(of(sample(), model)(feats), feats)
    torch.testing.assert_close(found, expected)
    assert torch.equal(pickle.loads(pickle.dumps(x)).coords, x.coords)


def test_coordinates_made_within_a_transform_are_no_wrappers():
    kept, x = [], sample()

    def loss(feats):
        y = x.replace(feats) + sample(seed=5)
        kept.append(y)
        return y.feats.sum()

    torch.func.grad(loss)(x.feats)
    assert kept[0].coords.data_ptr() and len(kept[0].geometry.coords) == len(kept[0].coords)
