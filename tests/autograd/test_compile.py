"""torch.compile of networks that find their kernel maps inside: fresh coordinates of any number, one graph."""

import copy
from collections.abc import Callable
from dataclasses import replace

import cases
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from wide import beyond

import pumice as pm
from pumice import nn
from pumice.lower import maps, plan
from pumice.ops import autograd


def cloud(seed, voxels=20, batches=2, channels=4, dtype=torch.float32, **site):
    """Coordinates that nobody has met before, with features."""
    coords = torch.tensor(cases.compact(3, 0, 10, voxels, batches, seed), dtype=torch.int32)
    rng = torch.Generator().manual_seed(seed)
    return pm.SparseTensor(torch.randn(len(coords), channels, generator=rng, dtype=dtype), coords, **site)


def few(rows):
    """One batch item of no or one voxel."""
    return pm.SparseTensor(torch.ones(rows, 4), torch.zeros(rows, 4, dtype=torch.int32))


class UNet(torch.nn.Module):
    """Every kind of level, a norm, a skip connection; the last addition is to the input itself."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(4, 8, 3), nn.BatchNorm(8), torch.nn.ReLU())
        self.down = nn.Sequential(nn.Conv3d(8, 8, 2, stride=2), nn.BatchNorm(8))
        self.deep = nn.Conv3d(8, 8, 3)
        self.up = nn.InverseConv3d(8, 8, 2, stride=2)
        self.head = nn.Conv3d(16, 4, 1)

    def forward(self, x):
        y = self.stem(x)
        return self.head(pm.cat([y, self.up(self.deep(self.down(y)), y)])) + x


class Applied(torch.nn.Module):
    """A function of the input and modules."""

    def __init__(self, function: Callable[..., object], *modules: torch.nn.Module):
        super().__init__()
        self.function, self.parts = function, torch.nn.ModuleList(modules)

    def forward(self, x):
        return self.function(x, *self.parts)


def conv(*args, **options):
    return nn.Conv3d(4, 4, *args, **options)


NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "support, dilating": lambda: nn.Sequential(conv(3, stride=2, padding=1), conv(3, out="support"), conv(3)),
    "transposed": lambda: nn.Sequential(conv(3, stride=2), nn.ConvTranspose3d(4, 4, 3, stride=2)),
    "generative": lambda: nn.Sequential(nn.GenerativeConvTranspose3d(4, 4, 2, stride=2), conv(2, stride=2)),
    "groups, offsets": lambda: nn.Sequential(conv(3, groups=2), conv(None, offsets=[(0, 0, 0), (0, -2, 1)])),
    "dense": lambda: Applied(lambda x, a: a(x).to_dense((5, 6, 7)).square(), conv(2, stride=2)),
    "pools": lambda: nn.Sequential(nn.MaxPool3d(2), nn.AvgPool3d(3, stride=1), nn.SumPool3d(2)),
    "resampling": lambda: Applied(
        lambda x, a, b, c: c(b(a(x), x)) + pm.ops.upsample_nearest(pm.ops.avg_pool(x, 2), 2, x),
        nn.SpaceToChannel(2),
        nn.ChannelToSpace(2),
        conv(3),
    ),
    "norms": lambda: nn.Sequential(conv(2, stride=2), nn.GroupNorm(2, 4), nn.InstanceNorm(4), nn.LayerNorm(4)),
    "all of an item": lambda: nn.Sequential(conv(2, stride=2), nn.GlobalAvgPool()),
    "greatest of an item": lambda: nn.Sequential(conv(2, stride=2), nn.GlobalMaxPool()),
    "the input twice": lambda: Applied(
        lambda x, a, b, c: c(a(x) + b(x)), conv(3, stride=2), conv(1, stride=2, padding=0, out="floor_unique"), conv(3)
    ),
    "back to the input": lambda: Applied(
        lambda x, a, b: pm.cat([b(a(x), x), x]), conv(2, stride=2), nn.InverseConv3d(4, 4, 2, stride=2)
    ),
    "given": lambda: Applied(lambda x, a, b: b(a(x), out=x), conv(3, out="support"), conv(3)),
    "pruned": lambda: Applied(lambda x, a, b: b(a(x).prune(x.feats[:, 0] > 0)), conv(3), conv(3)),
    "union": lambda: Applied(lambda x, a, b: b(a(x) + x), conv(3, out="support"), conv(3)),
}


def compiled(model, backend="eager", **options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


def feats_of(y):
    return y if isinstance(y, torch.Tensor) else y.feats


def assert_same(got, want, tolerance=1e-4):
    """Equal coordinates and what belongs to them, about equal features."""
    torch.testing.assert_close(feats_of(got), feats_of(want), rtol=tolerance, atol=tolerance)
    if not isinstance(got, torch.Tensor):
        assert torch.equal(got.coords, want.coords)
        told = ("stride", "spatial_shape", "batch_size")
        assert [getattr(got, name) for name in told] == [getattr(want, name) for name in told]


def assert_same_gradients(model, twin, tolerance=1e-3):
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_any_number_of_voxels_in_two_compilations():
    """The first is for its own number, as torch does; the second for all."""
    torch.manual_seed(0)
    model = UNet()
    twin = copy.deepcopy(model)
    fast, counter = compiled(model, "aot_eager")
    for seed, voxels in enumerate((20, 31, 45, 2)):
        x = cloud(seed, voxels)
        got, want = fast(x), twin(x)
        assert_same(got, want)
        assert pm.same_geometry(got, x)
        got.feats.square().sum().backward()
        want.feats.square().sum().backward()
    assert counter.frame_count == 2
    assert_same_gradients(model, twin)
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_layer(name):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    twin = copy.deepcopy(model)
    fast, counter = compiled(model, "aot_eager" if name in ("pools", "the input twice") else "eager", dynamic=True)
    for seed, voxels in enumerate((20, 9)):
        x, other = cloud(seed, voxels), cloud(seed, voxels)
        for each in (x, other):
            each.requires_grad_()
        got, want = fast(x), twin(other)
        assert_same(got, want)
        feats_of(got).square().sum().backward()
        feats_of(want).square().sum().backward()
        torch.testing.assert_close(x.feats.grad, other.feats.grad, rtol=1e-3, atol=1e-3)
    assert counter.frame_count == 1
    assert_same_gradients(model, twin)


def test_none_one_and_two_voxels():
    """torch compiles for 0 and for 1 apart; levels of one voxel have no variance."""
    model = UNet()
    twin = copy.deepcopy(model)
    fast, _ = compiled(model, dynamic=True)
    for x in (cloud(0, 20), few(0), few(1), cloud(1, 1)):
        assert_same(fast(x), twin(x))
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def test_batch_items_and_extents_do_not_bind():
    model = nn.Sequential(conv(3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.GlobalSumPool())
    fast, counter = compiled(model)
    for seed, (batches, extent) in enumerate(((2, 11), (3, 12), (5, 14), (4, 20))):
        x = cloud(seed, 9 + seed, batches, spatial_shape=(extent,) * 3, batch_size=batches)
        assert_same(fast(x), model(x))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("context", beyond(1, ["autocast", "inference_mode", "no_grad"]))
def test_contexts(context):
    model = UNet().eval()
    fast, counter = compiled(model, "aot_eager", dynamic=True)
    contexts = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "inference_mode": torch.inference_mode}
    for seed in range(2):
        x = cloud(seed, 20 + seed)
        with contexts.get(context, torch.no_grad)():
            got, want = fast(x), model(x)
        assert got.dtype == want.dtype
        assert_same(got, want, 0.05 if context == "autocast" else 1e-4)
    assert counter.frame_count == 1


def test_tiles_and_groups_by_the_operator(monkeypatch):
    """The forms that a GPU reads."""
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": (("compacted",), ("compacted", "compacted_t", "grouped"))})
    model = nn.Sequential(conv(3), conv(2, stride=2), conv(3))
    twin = copy.deepcopy(model)
    fast, _ = compiled(model, "aot_eager", dynamic=True)
    for seed in range(2):
        got, want = fast(cloud(seed, 30 + seed)), twin(cloud(seed, 30 + seed))
        assert_same(got, want)
        got.feats.square().sum().backward()
        want.feats.square().sum().backward()
    assert_same_gradients(model, twin)


class Calls(TorchDispatchMode):
    """The operators of ours that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "pumice":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))

    def arguments(self, name):
        return [args for func, args in self.seen if func._schema.name == f"pumice::{name}"]

    def while_running(self, module, inputs):
        """A backend of torch.compile, which does not compile while such a mode is on."""

        def run(*given):
            with self:
                return module(*given)

        return run


def test_a_map_is_found_once():
    """Six layers over three maps; the input, which the compiled function was given, stays as it is."""
    x = cloud(0)
    model = nn.Sequential(conv(3), conv(3), conv(2, stride=2), conv(3), conv(3), conv(3)).eval()
    calls = Calls()
    fast, _ = compiled(model, calls.while_running)
    with torch.no_grad():
        fast(x)
    found = {name: len(calls.arguments(name)) for name in ("box", "meet", "level", "pairs", "einsum")}
    assert found == {"box": 1, "meet": 2, "level": 1, "pairs": 3, "einsum": 6}
    assert not x.geometry.maps


def test_prepared_coordinates_bring_their_maps():
    x, model = cloud(0), nn.Sequential(conv(3), conv(2, stride=2), conv(3)).eval()
    calls = Calls()
    fast, _ = compiled(model, calls.while_running)
    pm.prepare(model, x)
    with torch.no_grad():
        got = fast(x)
    assert {func._schema.name for func, _ in calls.seen} == {"pumice::einsum"}
    assert_same(got, model(x))


def test_maps_found_by_the_way_do_not_bind():
    """A geometry that eager code has used takes the same compiled code as one that it has not."""
    model = UNet().eval()
    fast, counter = compiled(model, dynamic=True)
    for seed in range(3):
        x = cloud(seed, 20 + seed)
        if seed:
            model(x)
        assert_same(fast(x), model(x))
        assert_same(fast(x), model(x))
    assert counter.frame_count == 1


def test_results_go_on():
    """New coordinates that compiled code made: in other compiled code, and outside of it."""
    first, second = nn.Sequential(conv(3), conv(2, stride=2), conv(3)), nn.Sequential(conv(3), conv(2, stride=2))
    fast, _ = compiled(first, "aot_eager", dynamic=True)
    counter = CompileCounterWithBackend("aot_eager")
    faster = torch.compile(second, fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for seed in range(3):
            x = cloud(seed, 20 + seed)
            y, want = fast(x), first(x)
            assert_same(y, want)
            assert (y.geometry.bounds, y.batch_size) == (pm.coords.Bounds.of(want.coords), want.batch_size)
            for result in (faster(y), second(y), faster(y)):
                assert_same(result, second(want))
            assert torch.equal(copy.deepcopy(y).to_dense(), y.to_dense())
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "options",
    beyond(1, [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]),
    ids=lambda o: str([*o]),
)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_of_a_symbolic_number(options, training):
    model = nn.Sequential(nn.MaxPool3d(1), nn.BatchNorm(4, **options)).double().train(training)
    twin = copy.deepcopy(model)
    fast, _ = compiled(model, dynamic=True)
    for seed in range(3):
        x, other = (cloud(seed, 9, dtype=torch.float64).requires_grad_() for _ in range(2))
        got, want = fast(x), twin(other)
        torch.testing.assert_close(got.feats, want.feats)
        got.feats.pow(3).sum().backward()
        want.feats.pow(3).sum().backward()
        torch.testing.assert_close(x.feats.grad, other.feats.grad)
    for p, q in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(p, q)


def test_our_networks_give_the_geometry_they_were_given():
    model = pm.models.MinkUNet(4, 3, width=0.1).eval()
    fast, counter = compiled(model, dynamic=True)
    with torch.no_grad():
        for seed in range(2):
            x = cloud(seed, 40 + seed)
            got = fast(x)
            assert got.geometry is x.geometry
            assert_same(got, model(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("capture", [False, True])
def test_without_fullgraph(capture):
    """torch breaks graphs at sizes that the data tells, unless it is told to capture them."""
    torch._dynamo.reset()
    model, counter = conv(2, stride=2), CompileCounterWithBackend("eager")
    fast = torch.compile(model, backend=counter, dynamic=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=capture), torch.no_grad():
        for seed in range(2):
            x = cloud(seed, 20 + seed)
            assert_same(fast(x), model(x))
    assert (counter.frame_count == 1) == capture


def test_mistakes_are_told():
    with pytest.raises(Exception, match="weight takes 4 channels .* x has 3"):
        compiled(conv(3))[0](cloud(0, channels=3))
    wrong = Applied(lambda x, a: a(pm.SparseTensor(x.feats, x.coords.long())), conv(3))
    with pytest.raises(Exception, match=r"must be a tensor of torch.int32, found torch.int64"):
        compiled(wrong)[0](cloud(0))


def test_dense_grids_need_an_extent():
    model = Applied(lambda x, a: a(x).to_dense(), conv(3))
    fast, _ = compiled(model)
    with pytest.raises(Exception, match="to_dense needs a spatial_shape under torch.compile"):
        fast(cloud(0))
    x = cloud(0, spatial_shape=(10, 11, 12))
    assert_same(fast(x), model(x))
    with pytest.raises(pm.errors.CoordinateError, match="the dense tensor holds"):
        compiled(Applied(lambda x, a: a(x).to_dense((2, 2, 2)), conv(3)))[0](cloud(0))


def test_codes_are_made_without_a_check():
    coded = [Applied(lambda x, check=check: pm.serialize(x.coords, check=check)) for check in (True, False)]
    with pytest.raises(Exception, match="under torch.compile: pass check=False"):
        compiled(coded[0])[0](cloud(0))
    x = cloud(0)
    assert torch.equal(compiled(coded[1])[0](x), coded[0](x))


def test_coordinates_made_inside_are_checked_when_it_runs():
    doubled = Applied(lambda x, a: a(pm.SparseTensor(x.feats, x.coords * 0)), conv(3))
    with pytest.raises(pm.errors.CoordinateError, match="39 of 40 coordinates are duplicates"):
        compiled(doubled)[0](cloud(0))


def test_the_operators_pass_opcheck():
    """Schemas, fake kernels, no shared memory, under functionalization and with symbols for sizes."""
    model = nn.Sequential(conv(3), nn.ConvTranspose3d(4, 4, 2, stride=2), nn.GlobalMaxPool())
    calls, x = Calls(), cloud(0)
    inside = Applied(
        lambda x, a: a(pm.SparseTensor(x.feats, x.coords) + x.prune(x.feats[:, 0] > 0)) + x.to_dense((10,) * 3).sum(),
        model,
    )
    with torch.no_grad():
        compiled(inside, calls.while_running)[0](x)
    table = torch.ops.pumice.meet(*calls.arguments("meet")[0])
    asked = [(func, args) for func, args in calls.seen if func._schema.name != "pumice::einsum"]
    told = (len(x), False, *calls.arguments("meet")[0][4:])
    asked += [(torch.ops.pumice.form.default, (table, *told, name)) for name in ("compacted", "split2_t", "grouped")]
    names = {func._schema.name.removeprefix("pumice::") for func, _ in asked}
    assert names == {"box", "meet", "level", "pairs", "kept", "united", "items", "form", "places"}
    for func, args in asked:
        torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_what_is_planned_for_about_this_size_is_the_same():
    """How a GPU carries a convolution of compiled code out; forward and both derivatives, with and without groups."""
    for groups in (1, 2):
        x = cloud(0).requires_grad_()
        layer = conv(3, groups=groups)
        with Calls() as calls:
            layer(x).feats.square().sum().backward()
        asked = calls.arguments("einsum")
        assert len(asked) == 3
        for operands, names, text, shape, _ in asked:
            ask = autograd._convolution_request(names, text)
            assert ask is not None
            with torch.no_grad():
                got = autograd._run_bucketed(operands, replace(ask, shape=tuple(shape)))
                torch.testing.assert_close(got, plan.execute(operands, names, text, tuple(shape), ""))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_map_that_is_met_again_passes_each_array_once(kind, monkeypatch):
    """In the forms of a GPU, too, and carried out as there."""
    monkeypatch.setattr(maps, "_FORMS_OF", {"cpu": maps._FORMS_OF[kind]})
    calls, model = Calls(), nn.Sequential(conv(3), conv(3))
    twin, x = copy.deepcopy(model), cloud(0)
    y = compiled(model, calls.while_running)[0](x)
    with calls:
        y.feats.square().sum().backward()
    twin(x).feats.square().sum().backward()
    assert_same_gradients(model, twin)
    asked = calls.arguments("einsum")
    assert len(asked) == 5
    for operands, names, text, shape, _ in asked:
        tokens = names.split("|")
        assert len({*tokens}) == len(tokens) == len(operands)
        ask = autograd._convolution_request(names, text)
        assert ask is not None
        with torch.no_grad():
            autograd._run_bucketed(operands, replace(ask, shape=tuple(shape)))


def test_other_statements_are_planned_as_they_are():
    assert autograd._convolution_request("A|B", "C[i] = A[i,j] * B[j]") is None
    assert (
        autograd._convolution_request(
            "x|map@pairs@0@o|map@pairs@0@k|map@pairs@0@i", "O[o] max= max(k, i, map[o,k,i] * x[i])"
        )
        is None
    )


def test_inductor():
    cpp = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        cpp.get_cpp_compiler()
    except Exception as reason:
        pytest.skip(f"Inductor finds no C++ compiler: {reason}")
    model = nn.Sequential(conv(3), nn.ReLU(), conv(2, stride=2)).eval()
    fast, counter = compiled(model, "inductor", dynamic=True)
    with torch.no_grad():
        for seed in range(2):
            x = cloud(seed, 20 + seed)
            assert_same(fast(x), model(x))
    assert counter.frame_count == 1
