"""Layers in training as one step of autograd, whose kernels are started one after the other: results, gradients and
statistics are those of layers one by one, and whatever has changed is heard. Kernels compute, on memory of the CPU
(tests/emulated.py)."""

import copy
import gc
import pickle
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.utils.parametrize
import torch.nn.utils.prune
from emulated import OF_NORMS, Gpu, OfNorm, emulated, on_cpu, unprepared
from lined import Twofold, anew, around, askew, exchanged, inner, problem_of, put, twice, ungrouped, unit, unnormed
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import pumice as pm
from pumice import nn
from pumice.coords import kernel_map
from pumice.lower import direct, norm
from pumice.lower import kernel as kernels
from pumice.models.minkunet import Decoder, Encoder
from pumice.nn.prepared import Parts
from pumice.ops import autograd, trained
from pumice.ops.tensor import unchecked_tensor
from pumice.testing import random_cloud

FAR = 1e-3
"""How far kernels may be from what torch's operators give: the norm of the difference, by that of the values."""
COORDS = random_cloud(120, 3, extent=(16, 16, 8), seed=1)
WIDE = random_cloud(300, 3, extent=(40, 40, 20), seed=1, batch_size=2)


@pytest.fixture(scope="module")
def settled():
    return Gpu()


@pytest.fixture
def cold():
    """For tests that begin with no kernels known; those of others know what was started in tests before."""


@pytest.fixture
def gpu(request, tmp_path, settled):
    torch.manual_seed(5)
    with emulated(tmp_path, None if "cold" in request.fixturenames else settled) as found:
        yield found


def cloud(channels=8, dtype=torch.float32, rows=120):
    feats = torch.randn(rows, channels, generator=torch.Generator().manual_seed(rows))
    return pm.SparseTensor(feats.to(dtype), COORDS[:rows])


def stirred(module):
    """In training, with norms that are not new."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm):
            for values in (part.running_mean, part.running_var, part.weight, part.bias):
                if values is not None:
                    values.data.uniform_(0.5, 2)
    return module.train()


def halved(module):
    """In half precision, but for norms."""
    for part in module.modules():
        if isinstance(part, nn.conv.Convolution | nn.Linear):
            part.half()
    return module


def loss_of(y):
    weights = torch.randn(y.feats.shape, generator=torch.Generator().manual_seed(9))
    return (y.feats.float() * weights).sum()


def step(module, x, inner=True, cast=None, more=()):
    """The result, the gradients of the features and all parameters, and the statistics."""
    module.zero_grad()
    x = x.replace(x.feats.detach().requires_grad_(inner))
    with nullcontext() if cast is None else torch.autocast("cpu", cast):
        y = module(x, *more)
    loss_of(y).backward()
    return y, [x.feats.grad, *(p.grad for p in module.parameters())], [b.clone() for b in module.buffers()]


def near(found, wanted, most=0.0):
    """most: of the norm of the difference, by that of the values or 1; 0: equal to the last bit."""
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            wide, other = a.detach().double(), b.detach().double()
            assert torch.equal(a, b) or float((wide - other).norm()) <= most * max(1.0, float(other.norm()))


TWINS = weakref.WeakKeyDictionary()
"""Of coordinates others, with maps of their own."""


def on_plain(module, x, *given):
    """A step on a CPU."""
    with on_cpu():
        twin = TWINS.get(x.geometry)
        if twin is None:
            twin = TWINS[x.geometry] = pm.SparseTensor(x.feats, x.coords, batch_size=x.batch_size).geometry
        return step(module, unchecked_tensor(x.feats, twin), *given)


def agree(gpu, module, x, inner=True, cast=None, most=0.0, plain=FAR, more=(), twin=copy.deepcopy):
    """That a step is that of layers one by one, and one without kernels; the layers in lines, there and back.

    most, plain: how far gradients may be from either; plain 0: not compared.
    """
    other, third = twin(module), twin(module)
    gpu.clear()
    y, grads, kept = step(module, x, inner, cast, more)
    lines, back = [*gpu.trained], [*gpu.back]
    with unprepared():
        want = step(other, x, inner, cast, more)
    assert [*gpu.trained] == lines
    assert torch.equal(y.feats, want[0].feats) and y.dtype == want[0].dtype and y.feats.is_contiguous()
    assert torch.equal(y.coords, want[0].coords) and y.stride == want[0].stride
    near(grads, want[1], most)
    near(kept, want[2])
    if plain and not more:
        plainly = on_plain(third, x, inner, cast)
        near([y.feats], [plainly[0].feats], plain)
        near(kept, plainly[2], plain)
        if y.dtype is torch.float32:
            near(grads, plainly[1], plain)
    assert sorted(back) == sorted(lines)
    return lines


def chain():
    """Seven layers: in containers, in blocks of both kinds, and alone."""
    return stirred(
        nn.Sequential(
            unit(8, 16),
            nn.ResidualBlock(16, 16),
            nn.ResidualBlock(16, 24),
            nn.Conv3d(24, 8, 1, bias=False),
            nn.BatchNorm(8),
        )
    )


def known_chain(gpu, x):
    """One of which two steps were made."""
    net = chain()
    for _ in range(2):
        gpu.clear()
        step(net, x)
    assert gpu.trained == gpu.back == [7]
    gpu.clear()
    return net


def of_one_weight():
    net = nn.Sequential(unit(8, 8), unit(8, 8), unit(8, 8))
    net[2][0].weight = net[0][0].weight
    return net


# Data flow

LINES = {
    "one": (lambda: unit(8, 16), 1),
    "units": (lambda: nn.Sequential(unit(8, 16), unit(16, 40), unit(40, 8)), 3),
    "norm without a ReLU": (lambda: nn.Sequential(*unit(8, 16), nn.Conv3d(16, 8, 3, bias=False), nn.BatchNorm(8)), 2),
    "block": (lambda: nn.ResidualBlock(8, 8), 2),
    "block, linear shortcut": (lambda: nn.ResidualBlock(8, 16), 3),
    "block of one": (lambda: around(8, 8, *unit(8, 8)[:2]), 1),
    "block of four": (lambda: around(8, 16, unit(8, 32), unit(32, 4), unit(4, 24), *unit(24, 16)[:2]), 5),
    "blocks": (lambda: nn.Sequential(nn.ResidualBlock(8, 8), nn.ResidualBlock(8, 16), nn.ResidualBlock(16, 16)), 7),
    "blocks that shrink": (lambda: nn.Sequential(nn.ResidualBlock(8, 48), nn.ResidualBlock(48, 4)), 6),
    "a unit between blocks": (lambda: nn.Sequential(nn.ResidualBlock(8, 8), unit(8, 8), nn.ResidualBlock(8, 8)), 5),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(unit(8, 16), nn.Sequential(nn.Sequential(*unit(16, 8)), nn.ResidualBlock(8, 16))),
            nn.Linear(16, 8, bias=False),
            nn.BatchNorm(8),
            nn.ReLU(),
        ),
        6,
    ),
    "a linear map first": (lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm(16), unit(16, 8)), 2),
    "one block three times": (twice, 6),
    "one weight twice": (of_one_weight, 3),
    "coarser": (lambda: nn.Sequential(unit(8, 16, 2, stride=2), nn.ResidualBlock(16, 16)), 3),
    "encoder": (lambda: Encoder(8, 16, 3), 6),
    "offsets": (lambda: nn.Sequential(unit(8, 16, None, offsets=((0, 0, 0), (0, 1, 0), (2, 0, -1))), unit(16, 8)), 2),
    "no scale": (lambda: nn.Sequential(nn.Conv3d(8, 8, 3, bias=False), nn.BatchNorm(8, affine=False), nn.ReLU()), 1),
    "a shortcut of a convolution": (lambda: with_shortcut(unit(8, 8, 1)[:2]), 3),
}


def with_shortcut(shortcut):
    block = nn.ResidualBlock(8, 8)
    block.shortcut = nn.Sequential(*shortcut)
    return block


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("name", LINES)
def test_a_step_is_that_of_layers(gpu, name):
    make, layers = LINES[name]
    module, x = stirred(make()), cloud()
    # Gradients of what is read by several layers are added in another order.
    most = 1e-6 if name in ("one block three times", "one weight twice") else 0.0
    assert sum(agree(gpu, module, x, most=most, plain=0)) < layers
    for seed in (1, 2):
        assert agree(gpu, module, anew(x, seed), most=most, plain=FAR * (seed - 1)) == [layers]
    for seed in (3, 4):
        # A line that gives no gradient of the features is another one.
        lines = agree(gpu, module, anew(x, seed), inner=False, most=most, plain=0)
    assert lines == [layers]
    assert agree(gpu, module, anew(x, 5), most=most, plain=0) == [layers]


HALF = {"one": 0, "block": 0, "block, linear shortcut": 1, "blocks": 1, "nested": 1, "encoder": 1, "no scale": 0}


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("name", HALF)
def test_a_step_in_half(gpu, name):
    """Gradients of weights are added up in float32: where those are in half, shortcuts alone are in lines."""
    module, x = halved(stirred(LINES[name][0]())), cloud(dtype=torch.float16)
    for seed in (0, 1, 2):
        lines = agree(gpu, module, anew(x, seed), most=0.002, plain=0.02 * (seed == 2))
    assert sum(lines) == HALF[name]


CAST = {
    "one": 1,
    "units": 3,
    "norm without a ReLU": 2,
    "block, linear shortcut": 3,
    "block of four": 5,
    "blocks that shrink": 6,
    "nested": 6,
    "a linear map first": 2,
    "one weight twice": 3,
    "encoder": 6,
    "no scale": 1,
}


@pytest.mark.parametrize("name", CAST)
def test_a_step_under_autocast(gpu, name):
    """Weights are float32, and so are their gradients; where features were cast twice, sums are rounded otherwise."""
    module, x = stirred(LINES[name][0]()), cloud()
    for sought in (True, False):
        for seed in (0, 1, 2):
            lines = agree(gpu, module, anew(x, seed), sought, torch.bfloat16, most=0.01, plain=0.1 * (seed == 2))
        assert lines == [CAST[name]]
    # And without it again.
    for seed in (0, 1):
        lines = agree(gpu, module, anew(x, seed), most=1e-6, plain=0)
    assert lines == [CAST[name]]


def test_features_of_the_dtype_that_autocast_asks_for(gpu):
    module, x = stirred(nn.Sequential(nn.ResidualBlock(8, 8), unit(8, 16))), cloud(dtype=torch.bfloat16)
    for seed in (0, 1, 2):
        lines = agree(gpu, module, anew(x, seed), cast=torch.bfloat16, most=0.01, plain=0.1)
    assert lines == [3]


def test_what_a_block_adds_may_be_wider_than_autocast(gpu):
    """Behind layers one by one the sum is float32."""
    net, x = stirred(nn.Sequential(unit(8, 8), nn.ResidualBlock(8, 8))), cloud()
    for seed in (0, 1):
        agree(gpu, net, anew(x, seed), cast=torch.bfloat16, most=0.01, plain=0)
    agree(gpu, net[1], anew(x, 2), cast=torch.bfloat16, most=0.01, plain=0)


def test_a_way_down_and_up_again(gpu):
    """An inverse convolution, whose target is named, beside what came down."""
    down, up, x = stirred(unit(8, 8, 2, stride=2)), stirred(Decoder(8, 16, 8, 3)), cloud()
    for seed in (0, 1, 2):
        fine = anew(x, seed)
        # On the coordinates of the one level and the other, as modules find them.
        lines = agree(gpu, up, down(fine).replace(down(fine).feats.detach()), more=(fine,))
    assert lines == [1, 5]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return pm.models.MinkUNet(4, 5, 0.5).train()


@pytest.mark.usefixtures("cold")
def test_a_whole_network(gpu, net):
    """Of two clouds at once, with an optimizer between the steps; and another scan, by templates."""
    lines = []
    for seed, rows in enumerate((300, 300, 299, 297)):
        x = pm.SparseTensor(torch.randn(rows, 4), WIDE[:rows], batch_size=2)
        lines.append(agree(gpu, net, x, plain=0 if seed else 0.05))
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.01 * p.grad
    assert sum(lines[1]) == sum(lines[2]) == 49 and sum(lines[-1]) > 40


def test_a_whole_network_under_autocast(gpu, net):
    x = pm.SparseTensor(torch.randn(300, 4), WIDE, batch_size=2)
    for _ in range(2):
        lines = agree(gpu, net, x, cast=torch.bfloat16, most=0.02, plain=0)
    assert lines == [2, 5, 6, 6, 6, 1, 5, 1, 5, 1, 5, 1, 5]


@pytest.mark.usefixtures("cold")
def test_another_cloud_goes_by_templates(gpu):
    module = chain()
    for rows in (120, 119) * 2:
        agree(gpu, module, cloud(rows=rows), plain=0)
    for rows in (117, 118, 115):
        # The map of the last one is not known before.
        assert agree(gpu, module, cloud(rows=rows)) == [6]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 17])
def test_few_rows(gpu, rows):
    module, x = stirred(nn.Sequential(unit(8, 16), nn.ResidualBlock(16, 16), nn.ResidualBlock(16, 8))), cloud(rows=rows)
    for seed in (0, 1, 2):
        lines = agree(gpu, module, anew(x, seed), plain=0 if rows < 3 else FAR)
    # What one row is normalised by is not its own.
    assert sum(lines) == (6 if rows > 1 else 0)


@pytest.mark.usefixtures("cold")
def test_a_line_finds_the_map_without_which_it_ends_nothing(gpu):
    """Where a linear map, which reads none, is ahead of it."""
    block = stirred(nn.ResidualBlock(8, 16))
    for rows in (120, 119) * 2:
        agree(gpu, block, cloud(rows=rows), plain=0)
    assert agree(gpu, block, cloud(rows=117)) == [3]


def test_rows_that_lie_apart_are_read_where_they_lie(gpu):
    """Features that are columns of something wider; where nothing but a product reads them."""
    module, x = stirred(nn.Sequential(nn.ResidualBlock(8, 16), nn.ResidualBlock(16, 8))), cloud()
    for _ in range(3):
        lines = agree(gpu, module, x.replace(torch.randn(120, 24)[:, :8]))
    assert lines == [6]
    for seed in (0, 1):
        lines = agree(gpu, module, anew(x, seed))
    assert lines == [6]


APART = {
    "columns of something wider": lambda: torch.randn(120, 24)[:, :8],
    "columns in a row": lambda: torch.randn(8, 120).t(),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_lie_apart_are_added_as_they_lie(gpu, name):
    module, x = stirred(nn.Sequential(nn.ResidualBlock(8, 8), unit(8, 8))), cloud()
    for seed in (0, 1):
        agree(gpu, module, anew(x, seed))
    for _ in range(2):
        feats = APART[name]()
        other = copy.deepcopy(module)
        found = module(x.replace(feats)).feats
        loss_of(x.replace(found)).backward()
        with unprepared():
            want = other(x.replace(feats)).feats
        near([found], [want])


# How autograd asks

ASKS = {
    "a sum": lambda y: y.feats.sum(),
    "a part of a concatenation": lambda y: (torch.cat([torch.ones_like(y.feats), y.feats], 1) ** 2).sum(),
    "some rows": lambda y: (y.feats[3:9] ** 2).sum(),
    "columns": lambda y: (y.feats.t().contiguous() ** 2).sum(),
    "one value": lambda y: y.feats[5, 3] * 3,
    "askew": lambda y: (torch.cat([y.feats.new_zeros(1), y.feats.flatten()])[1:] ** 3).sum(),
    "twice": lambda y: (y.feats**2).sum() + (y.feats * 3).sum(),
}


@pytest.mark.parametrize("name", ASKS)
def test_gradients_that_come_in_other_layouts(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    other, results = copy.deepcopy(net), []
    for module, way in ((net, nullcontext()), (other, unprepared())):
        given = x.replace(x.feats.detach().requires_grad_())
        with way:
            module.zero_grad()
            ASKS[name](module(given)).backward()
        results.append([given.feats.grad, *(p.grad for p in module.parameters())])
    assert gpu.back == [7]
    near(*results)


@pytest.mark.parametrize("known", [True, False])
def test_gradients_whose_rows_are_apart_are_copied_where_no_kernel_reads_them(gpu, cold, monkeypatch, known):
    """known: a layer by itself has read such rows before."""
    x, copies, clone = cloud(), [], torch.Tensor.clone
    net = known_chain(gpu, x)
    other, part = copy.deepcopy(net), ASKS["a part of a concatenation"]
    if known:
        with unprepared():
            part(copy.deepcopy(net)(x)).backward()
    for _ in range(2):
        monkeypatch.setattr(torch.Tensor, "clone", lambda x, **more: copies.extend(more) or clone(x, **more))
        net.zero_grad()
        part(net(x)).backward()
        monkeypatch.undo()
    assert gpu.back == [7, 7] and len(copies) == (0 if known else 2)
    with unprepared():
        part(other(x)).backward()
    near([p.grad for p in net.parameters()], [p.grad for p in other.parameters()])


def missing(monkeypatch, layers):
    """As if kernels of the gradients of these layers were still to be compiled for such numbers of rows: for each call
    that is sought in their place where tiles come from, and whether it is asked for the gradient of the features."""
    sought, real, aimed = [], autograd.DifferentiableCall.gradients, trained.Products.gradients
    products = []

    def gradients(own):
        if own not in products:
            products.append(own)
        return None if products.index(own) in layers else aimed(own)

    def sought_too(own, given, grad, wanted):
        sought.append((kernels.tuning_mode(), wanted[0] is not None))
        return real(own, given, grad, wanted)

    monkeypatch.setattr(trained.Products, "gradients", gradients)
    monkeypatch.setattr(autograd.DifferentiableCall, "gradients", sought_too)
    return sought


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("layers", [{0}, {1, 4}, set(range(6))], ids=str)
def test_gradients_whose_kernels_are_still_to_be_compiled(gpu, monkeypatch, layers, cast, inner):
    """Within a line that has begun they go the way of layers one by one, which leaves them."""
    x, net = cloud(), chain()
    for _ in range(3):
        step(net, x, inner, cast)
    with monkeypatch.context() as patch:
        sought = missing(patch, layers)
        gpu.clear()
        step(copy.deepcopy(net), x, inner, cast)
        # No two layers of it have the same products but those of one block.
        assert gpu.back == [7] and len(layers) <= len(sought) <= 6
        # That of the features of the first layer alone may not be wanted.
        unwanted = sum(not features for _, features in sought)
        assert unwanted == (not inner) if len(layers) == 6 else unwanted <= (not inner)
    missing(monkeypatch, layers)
    assert agree(gpu, net, x, inner, cast, plain=2e-2 if cast else FAR) == [7]


def test_gradients_that_are_still_to_be_compiled_have_the_tiles_of_the_caller(gpu, monkeypatch):
    """Gradients are computed in a thread of their own."""
    x = cloud()
    with kernels.use_tuning_mode(kernels.DEFAULT):
        net = known_chain(gpu, x)
        y, sought = net(x), missing(monkeypatch, {0, 1})
    loss_of(y).backward()
    assert gpu.back == [7] and {tiles for tiles, _ in sought} == {kernels.DEFAULT}


@pytest.mark.parametrize("inner", [True, False])
def test_layers_alike_share_products_but_for_gradients_that_are_not_wanted(gpu, inner):
    """The first one, whose features may need none, has the shape and the map of the others."""
    net, x = stirred(nn.Sequential(unit(8, 8), unit(8, 8), unit(8, 8))), cloud()
    for seed in (0, 1, 2):
        lines = agree(gpu, net, anew(x, seed), inner)
    assert lines == [3]
    found, _ = x.geometry.maps[net[0][0].relation, None]
    products = {id(made) for made in found._storages.values() if isinstance(made, trained.Products)}
    assert len(products) == (1 if inner else 2)


class Aims:
    """A template: whether its kernel is compiled by now."""

    def __init__(self, there):
        self.there, self.asked = there, []

    def over(self, held, rows, shape):
        self.asked.append((held, rows, shape))
        return object() if self.there else None


@pytest.mark.parametrize("late", [0, 1])
def test_gradients_are_aimed_once_all_of_their_kernels_are_compiled(late):
    like, rows = [Aims(True), Aims(True)], ((5, 8), (16, 0), (7, 16))
    like[late].there = False
    own = trained.Products(object(), like, "held", (rows, (16, 27, 8)))
    assert own.gradients() is None
    like[late].there = True
    found = own.gradients()
    assert found is not None and None not in found and own.gradients() is found
    assert [each.asked[-1] for each in like] == [("held", rows, (16, 27, 8)), ("held", rows, (5, 8))]
    assert len(like[late].asked) == 2


def test_gradients_are_added_over_steps(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    other = copy.deepcopy(net)
    for module, way in ((net, nullcontext()), (other, unprepared())):
        module.zero_grad()
        with way:
            for seed in (1, 2, 3):
                loss_of(module(anew(x, seed))).backward()
    near([p.grad for p in net.parameters()], [p.grad for p in other.parameters()])
    # Features that need no gradient make another line, which is known from templates.
    assert gpu.back == [7] * 3


def test_a_graph_is_gone_through_twice(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    given = x.replace(x.feats.detach().requires_grad_())
    loss = loss_of(net(given))
    wanted = [given.feats, *net.parameters()]
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    before = [g.clone() for g in first]
    second = torch.autograd.grad(loss, wanted)
    assert gpu.back == [7, 7]
    near(second, before)
    near(first, before)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, wanted)


WANTED = {
    "features": lambda net, feats: [feats],
    "a weight": lambda net, feats: [net[1].body[0].weight],
    "a scale and a linear map": lambda net, feats: [net[0][1].weight, net[2].shortcut[0].weight],
    "features and a shift": lambda net, feats: [feats, net[4].bias],
}


@pytest.mark.parametrize("name", WANTED)
def test_some_gradients(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    given = x.replace(x.feats.detach().requires_grad_())
    wanted = WANTED[name](net, given.feats)
    net.zero_grad()
    loss_of(net(given)).backward(inputs=wanted)
    found = [t.grad.clone() for t in wanted]
    every = [given.feats, *net.parameters()]
    assert sum(t.grad is not None for t in every) == len(wanted) and gpu.trained == gpu.back == [7]
    with unprepared():
        want = torch.autograd.grad(loss_of(net(given)), wanted)
    near(found, want)


def test_two_calls_before_either_goes_back(gpu):
    """Of one module, on other features: each has what it made."""
    x = cloud()
    net = known_chain(gpu, x)
    other, results = copy.deepcopy(net), []
    for module, way in ((net, nullcontext()), (other, unprepared())):
        module.zero_grad()
        with way:
            first, second = module(anew(x, 1)), module(anew(x, 2))
            (loss_of(first) * first.feats.mean() + loss_of(second)).backward()
        results.append([*(p.grad for p in module.parameters()), *module.buffers()])
    assert gpu.trained == gpu.back == [7, 7]
    near(*results, most=1e-6)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("which", ["weight", "scale", "shift", "linear"])
def test_what_was_written_since_is_told(gpu, which, cast):
    """Weights before the gradients are asked for, as torch tells it."""
    x = cloud()
    net = chain()
    for _ in range(2):
        step(net, x, cast=cast)
    gpu.clear()
    with nullcontext() if cast is None else torch.autocast("cpu", cast):
        loss = loss_of(net(anew(x, 1)))
    tensor = {
        "weight": net[1].body[0].weight,
        "scale": net[0][1].weight,
        "shift": net[4].bias,
        "linear": net[2].shortcut[0].weight,
    }[which]
    with torch.no_grad():
        tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert gpu.trained and not gpu.back


@pytest.mark.parametrize("act", [torch.nn.LeakyReLU, torch.nn.ELU])
def test_a_result_may_be_written_to_where_no_gradient_depends_on_it(gpu, act):
    """As layers one by one let it."""
    net = stirred(nn.Sequential(unit(8, 8), nn.Conv3d(8, 8, 3, bias=False), nn.BatchNorm(8), act(inplace=True)))
    for seed in (0, 1, 2):
        agree(gpu, net, anew(cloud(), seed))


def test_a_result_that_gradients_depend_on_is_not_written_to(gpu):
    """That of a block, by layers as by lines."""
    net, x = stirred(nn.Sequential(nn.ResidualBlock(8, 8), torch.nn.LeakyReLU(inplace=True))), cloud()
    for _ in range(2):
        step(net[0], x)
    gpu.clear()
    assert problem_of(step, net, x)[0] is RuntimeError and gpu.trained == [2]
    with unprepared():
        assert problem_of(step, net, x)[0] is RuntimeError


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_is_heard(gpu, make):
    """It writes to weights where they lie: the same lines read them."""
    net, x = chain(), cloud()
    other = copy.deepcopy(net)
    optimizers = [make(each.parameters(), lr=0.05) for each in (net, other)]
    for seed in range(3):
        gpu.clear()
        found = step(net, anew(x, seed))
        optimizers[0].step()
        with unprepared():
            want = step(other, anew(x, seed))
            optimizers[1].step()
        near([found[0].feats, *found[1], *found[2]], [want[0].feats, *want[1], *want[2]])
    near(net.parameters(), other.parameters())
    assert sum(gpu.trained) == 7


@pytest.mark.parametrize("name", ["one", "block", "block, linear shortcut", "no scale", "coarser"])
def test_gradients_of_gradients(gpu, name):
    module, x = stirred(LINES[name][0]()), cloud(rows=60)
    for _ in range(2):
        step(module, x)

    def slopes(module, x):
        feats = x.feats.detach().requires_grad_()
        loss = module(x.replace(feats)).feats.pow(3).sum()
        first = torch.autograd.grad(loss, [feats, *module.parameters()], create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, [feats, *module.parameters()])
        return [*map(torch.Tensor.detach, first), *second, *(b.clone() for b in module.buffers())]

    gpu.clear()
    others = copy.deepcopy(module), copy.deepcopy(module)
    found = slopes(module, x)
    assert gpu.trained == [LINES[name][1]]
    with unprepared():
        near(found, slopes(others[0], x), 1e-3)
    with on_cpu():
        near(found, slopes(others[1], pm.SparseTensor(x.feats, x.coords)), 5e-3)


def test_weights_that_are_worked_out(gpu):
    """Given with a call: gradients go on to what they were made of."""
    x = cloud()
    net = known_chain(gpu, x)
    own = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    results = []
    for way in (nullcontext(), unprepared()):
        with way:
            y = torch.func.functional_call(net, {name: p * 2 for name, p in own.items()}, (x,))
        results.append([y.feats.detach(), *torch.autograd.grad(loss_of(y), list(own.values()))])
    near(*results)
    assert gpu.trained == gpu.back == [7]
    assert agree(gpu, net, x) == [7]


# What has changed since


# How many layers lines have in all when two more steps were made.
CHANGES = {
    "nothing": (lambda n: None, 7),
    "a weight in place": (lambda n: inner(n).weight.data.mul_(2), 7),
    "a weight": (lambda n: put(inner(n), "weight", torch.nn.Parameter(torch.randn(16, 3, 3, 3, 16))), 7),
    "a scale": (lambda n: put(n[0][1], "weight", torch.nn.Parameter(torch.rand(16))), 7),
    "a linear map": (lambda n: exchanged(n[2].shortcut[0].weight, torch.randn_like), 7),
    "statistics": (lambda n: put(n[0][1], "running_var", torch.rand(16) + 1), 7),
    "statistics in place": (lambda n: n[4].running_mean.add_(3), 7),
    "a count of batches": (lambda n: put(n[0][1], "num_batches_tracked", torch.tensor(40)), 7),
    "no count of batches": (lambda n: put(n[0][1], "num_batches_tracked", None), 7),
    "eps": (lambda n: put(n[1].body[1], "eps", 5.0), 7),
    "momentum": (lambda n: put(n[1].body[1], "momentum", 0.5), 7),
    "momentum of nothing": (lambda n: put(n[2].shortcut[1], "momentum", 0.0), 7),
    "the mean of all": (lambda n: put(n[1].body[1], "momentum", None), 1 + 3),
    "a norm in evaluation": (lambda n: n[1].body[4].eval(), 1 + 3),
    "the first norm in evaluation": (lambda n: n[0][1].eval(), 2 + 3),
    "all norms in evaluation": (lambda n: n.eval(), 0),
    "statistics that stay": (lambda n: put(n[1].body[1], "track_running_stats", False), 1 + 3),
    "no statistics": (lambda n: unnormed(n[1].body[1]), 1 + 3),
    "no scale": (lambda n: put(n[1].body[1], "weight", None), 7),
    "no shift": (lambda n: put(n[2].shortcut[1], "bias", None), 7),
    "a frozen weight": (lambda n: inner(n).weight.requires_grad_(False), 1 + 3),
    "a frozen scale": (lambda n: n[1].body[1].weight.requires_grad_(False), 1 + 3),
    "a frozen linear map": (lambda n: n[2].shortcut[0].weight.requires_grad_(False), 3),
    "all frozen": (lambda n: n.requires_grad_(False), 0),
    "a dataflow": (lambda n: put(inner(n), "dataflow", "explicit-gemm"), 1 + 3),
    "groups": (lambda n: ungrouped(inner(n)), 1 + 3),
    "a bias": (lambda n: put(inner(n), "bias", torch.nn.Parameter(torch.rand(16))), 1 + 3),
    "a bias of a shortcut": (lambda n: put(n[2].shortcut[0], "bias", torch.nn.Parameter(torch.rand(24))), 3),
    "a bias of the last": (lambda n: put(n[3], "bias", torch.nn.Parameter(torch.rand(8))), 6),
    "SiLU in a block": (lambda n: put(n[1], "act", nn.SiLU()), 1 + 3),
    "SiLU behind a norm": (lambda n: put(n[0], 2, nn.SiLU()), 2 + 3),
    "torch's ReLU": (lambda n: put(n[0], 2, torch.nn.ReLU()), 7),
    "another kind of norm": (lambda n: put(n[1].body, 1, nn.LayerNorm(16)), 1 + 3),
    "a norm": (lambda n: put(n, 4, nn.BatchNorm(8, eps=0.7)), 7),
    "one less": (lambda n: n.__delitem__(4), 6),
    "one between": (lambda n: n.insert(1, nn.Tanh()), 1 + 2 + 3),
    "one more": (lambda n: n.append(nn.Tanh()), 7),
    "a relation": (lambda n: put(inner(n), "relation", nn.Conv3d(1, 1, 3, dilation=2).relation), 7),
    "a parametrized weight": (
        lambda n: torch.nn.utils.parametrize.register_parametrization(inner(n), "weight", Twofold()),
        1 + 3,
    ),
    "a pruned weight": (lambda n: torch.nn.utils.prune.l1_unstructured(inner(n), "weight", 0.5), 1 + 3),
    "a pruned norm": (lambda n: torch.nn.utils.prune.l1_unstructured(n[0][1], "bias", 0.5), 2 + 3),
    "a weight that is not aligned": (lambda n: exchanged(inner(n).weight, askew), 1 + 3),
    "a scale that is not aligned": (lambda n: exchanged(n[0][1].weight, askew), 2 + 3),
    "axes of a weight": (lambda n: exchanged(inner(n).weight, lambda w: w.transpose(1, 3)), 1 + 3),
    "every other of a scale": (lambda n: exchanged(n[0][1].weight, lambda v: v.repeat(2)[::2]), 2 + 3),
    "one mean for all": (lambda n: exchanged(n[4].running_mean, lambda v: v.repeat(2)[::2]), 6),
    "forward of an activation": (lambda n: put(n[0][2], "forward", lambda x: x * 2), 2 + 3),
    "forward of a norm": (lambda n: put(n[1].body[1], "forward", lambda x: x * 2), 1 + 3),
    "weights that are one": (lambda n: put(n[1].body[3], "weight", inner(n).weight), 7),
    "two weights": (lambda n: torch.utils.swap_tensors(inner(n).weight, n[1].body[3].weight), 7),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_heard(gpu, name):
    change, layers = CHANGES[name]
    x = cloud()
    net = known_chain(gpu, x)
    change(net)

    def twin(net):
        if not name.startswith("a pruned"):
            return copy.deepcopy(net)
        # Torch copies no tensors that were worked out.
        other = chain()
        change(other)
        other.load_state_dict(net.state_dict())
        return other

    for seed in (1, 2):
        # Torch counts batches without statistics, too.
        plain = 0 if seed == 1 or name == "no statistics" else 0.01
        lines = agree(gpu, net, anew(x, seed), most=1e-6, plain=plain, twin=twin)
    assert sum(lines) == layers, lines


WRONG = {
    "a norm of fewer channels": lambda n: put(n[1].body, 4, nn.BatchNorm(12)),
    "short statistics": lambda n: exchanged(n[1].body[4].running_var, lambda v: v[:12]),
    "a scale of two axes": lambda n: exchanged(n[1].body[4].weight, lambda v: v.view(4, 4)),
    "a weight of other axes": lambda n: exchanged(inner(n).weight, lambda w: w.view(16, 9, 3, 16)),
    "taps in a row": lambda n: exchanged(inner(n).weight, lambda w: w.view(16, 27, 16)),
    "a weight without values": lambda n: put(inner(n), "weight", torch.nn.Parameter(inner(n).weight.to("meta"))),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_in_no_line(gpu, name, monkeypatch):
    """Where kernels are known for what would fit: they would write beyond."""
    x = cloud()
    net = known_chain(gpu, x)
    WRONG[name](net)
    started = []
    monkeypatch.setattr(trained, "started", lambda found, x, own: started.append(len(found)))
    for _ in range(2):
        with unprepared():
            want = problem_of(step, net, x)
        assert problem_of(step, net, x) == want is not None
    assert max(started) == 1


@pytest.mark.usefixtures("cold")
def test_features_of_more_channels_than_a_weight_are_told_alike(gpu):
    """Where columns of such were read before."""
    module, x = stirred(unit(4, 16)), cloud()
    for _ in range(2):
        step(module, x.replace(torch.randn(120, 8)[:, :4]))
    with unprepared():
        want = problem_of(step, module, x)
    assert problem_of(step, module, x) == want is not None


# Who listens

HOOKS = {
    "behind": lambda module, hook: module.register_forward_hook(hook),
    "before": lambda module, hook: module.register_forward_pre_hook(hook),
    "gradients": lambda module, hook: module.register_full_backward_hook(hook),
    "gradients before": lambda module, hook: module.register_full_backward_pre_hook(hook),
}


@pytest.mark.filterwarnings("ignore:For backward hooks")
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_every_module_hear(gpu, kind):
    x = cloud()
    net = known_chain(gpu, x)
    for name, module in net.named_modules():
        # Of the second block what the first has not.
        if not name or (name.startswith("2") and "shortcut" not in name):
            continue
        heard = []
        handle = HOOKS[kind](module, lambda *given, heard=heard: heard.append(1) and None)
        gpu.clear()
        step(net, x)
        first, lines = len(heard), sum(gpu.trained)
        with unprepared():
            step(net, x)
        handle.remove()
        assert len(heard) == 2 * first and lines < 7, name
        # What is no tensor has no gradients to hear of.
        assert first or "gradients" in kind, name
    gpu.clear()
    step(net, x)
    assert gpu.trained == [7]


@pytest.mark.filterwarnings("ignore:For backward hooks")
@pytest.mark.parametrize(
    "kind",
    [
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
        "register_module_full_backward_hook",
        "register_module_full_backward_pre_hook",
    ],
)
def test_hooks_of_all_modules_hear(gpu, kind):
    x = cloud()
    net = known_chain(gpu, x)
    handle = getattr(torch.nn.modules.module, kind)(lambda *given: None)
    try:
        step(net, x)
    finally:
        handle.remove()
    assert not gpu.trained
    step(net, x)
    assert gpu.trained == [7]


def test_hooks_of_tensors_hear(gpu):
    """They are autograd's own, and change gradients."""
    x = cloud()
    net = known_chain(gpu, x)
    want = step(net, x)[1]
    handles = [inner(net).weight.register_hook(lambda grad: grad * 2)]
    found = step(net, x)[1]
    place = 1 + [id(p) for p in net.parameters()].index(id(inner(net).weight))
    want[place] = want[place] * 2
    near(found, want)
    [handle.remove() for handle in handles]
    assert gpu.trained == [7, 7]


@contextmanager
def packed(seen):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        yield


@pytest.mark.parametrize("way", ["on the CPU", "hooks"])
def test_whoever_keeps_tensors_elsewhere_sees_them(gpu, way):
    x, seen = cloud(), []
    net = known_chain(gpu, x)
    want = step(copy.deepcopy(net), x)
    gpu.clear()
    with torch.autograd.graph.save_on_cpu() if way == "on the CPU" else packed(seen):
        found = step(net, x)
    assert not gpu.trained and (len(seen) > 20 or way == "on the CPU")
    near([found[0].feats, *found[1], *found[2]], [want[0].feats, *want[1], *want[2]])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(gpu, reentrant):
    """What is computed again gives the same gradients, in every step."""
    x = cloud()
    net, other = chain(), None
    other = copy.deepcopy(net)

    def through(module, feats):
        feats = module[0](x.replace(feats)).feats
        for part in (module[1], module[2]):
            feats = checkpoint(lambda f, part=part: part(x.replace(f)).feats, feats, use_reentrant=reentrant)
        return module[3:](x.replace(feats))

    for seed in range(3):
        results = []
        for module, way in ((net, nullcontext()), (other, unprepared())):
            module.zero_grad()
            feats = anew(x, seed).feats.requires_grad_()
            with way:
                y = through(module, feats)
                loss_of(y).backward()
            results.append([y.feats.detach(), feats.grad, *(p.grad for p in module.parameters()), *module.buffers()])
        near(*results)
        plain = copy.deepcopy(net)
        plain.zero_grad()
        want = [p.grad for p in net.parameters()]
        loss_of(plain(anew(x, seed))).backward()
        near([p.grad for p in plain.parameters()], want, 1e-5)


def dual(net, x):
    with forward_ad.dual_level():
        feats = forward_ad.make_dual(x.feats, torch.ones_like(x.feats))
        return forward_ad.unpack_dual(net(x.replace(feats)).feats).tangent


def dual_weight(net, x):
    """Of a norm within, where features have no tangent."""
    own = {name: p.detach() for name, p in net.named_parameters()}
    with forward_ad.dual_level():
        own["1.body.1.weight"] = forward_ad.make_dual(own["1.body.1.weight"], torch.ones(16))
        return forward_ad.unpack_dual(torch.func.functional_call(net, own, (x,)).feats).tangent


def functional(net, x):
    own = {name: p.detach() for name, p in net.named_parameters()}
    kept = {name: b.clone() for name, b in net.named_buffers()}

    def value(own):
        return loss_of(torch.func.functional_call(net, (own, kept), (x,)))

    return torch.func.grad(value)(own)["0.0.weight"]


WATCHED = {"forward differentiation": dual, "forward differentiation of a scale": dual_weight, "functorch": functional}


@pytest.mark.parametrize("name", WATCHED)
def test_where_somebody_watches_no_line_is_started(gpu, name):
    x = cloud()
    net = known_chain(gpu, x)
    other, found = copy.deepcopy(net), []
    for module, way in ((net, nullcontext()), (other, unprepared())):
        with way:
            try:
                found.append([WATCHED[name](module, x)])
            except Exception as problem:
                found.append(str(problem))
    assert not gpu.trained
    if isinstance(found[1], str):
        assert found[0] == found[1]
    else:
        near(*found)
    assert agree(gpu, net, x) == [7]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients(gpu, mode):
    """Norms take the statistics of what they are given, and follow."""
    x = cloud()
    net = known_chain(gpu, x)
    other = copy.deepcopy(net)
    with mode():
        y = net(anew(x, 1))
        with unprepared():
            want = other(anew(x, 1))
    near([y.feats, *net.buffers()], [want.feats, *other.buffers()])
    assert not gpu.trained and not y.requires_grad
    assert agree(gpu, net, x) == [7]


def test_evaluation_and_training_in_turn(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    for seed in range(3):
        net.eval()
        with torch.no_grad():
            y = net(anew(x, seed))
            with unprepared():
                assert torch.equal(net(anew(x, seed)).feats, y.feats)
        net.train()
        assert agree(gpu, net, anew(x, seed)) == [7]


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("setting", ["deterministic", "tiles", "tuned since", "precision"])
def test_what_is_set_for_all_calls_counts(gpu, setting, monkeypatch):
    """Kernels are those that were carried out under it."""
    x = cloud()
    net = known_chain(gpu, x)
    with monkeypatch.context() as patch:
        if setting == "deterministic":
            patch.setattr(direct, "deterministic", lambda: True)
        elif setting == "tiles":
            patch.setattr(kernels, "tuning_mode", lambda: kernels.DEFAULT)
        elif setting == "precision":
            patch.setattr(kernels, "float32_precision", lambda: "tf32")
        else:
            patch.setattr(direct, "ledger", lambda: type("Other", (), {"generation": 77}))
        counts = [sum(agree(gpu, net, anew(x, seed), plain=0)) for seed in range(2)]
        # What one block has left under it the other one may read.
        assert counts[0] < 4 and counts[1] == 7
        assert setting != "precision" or all("tf32" in one.told for one in gpu.started)
    assert agree(gpu, net, x) == [7]


def test_deterministic_algorithms(gpu):
    """No sums in any order then."""
    x = cloud()
    net = known_chain(gpu, x)
    torch.use_deterministic_algorithms(True)
    try:
        for seed in range(3):
            agree(gpu, net, anew(x, seed))
            assert not any("tl.atomic_add(out" in one.told[0] for one in gpu.started)
    finally:
        torch.use_deterministic_algorithms(False)
    assert agree(gpu, net, x) == [7]


def test_features_that_are_not_aligned(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    for seed in (1, 2):
        feats = askew(anew(x, seed).feats)
        assert feats.data_ptr() % 16
        other, results = copy.deepcopy(net), []
        for module, way in ((net, nullcontext()), (other, unprepared())):
            module.zero_grad()
            gpu.clear()
            with way:
                y = module(x.replace(feats))
                loss_of(y).backward()
            results.append([y.feats, *(p.grad for p in module.parameters())])
            # All but the first unit, and the last, which has no container of its own.
            assert gpu.trained == ([2, 3] if module is net else [])
        near(*results)


def test_features_of_other_rows_than_the_map_are_told_alike(gpu):
    x = cloud()
    net = known_chain(gpu, x)
    for rows in (119, 121, 1):
        wrong = unchecked_tensor(torch.zeros(rows, 8), x.geometry)
        with unprepared():
            want = problem_of(net, wrong)
        assert problem_of(net, wrong) == want is not None
    assert not gpu.trained


# Copies, and what lives as long


@pytest.mark.parametrize("way", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_begin_anew(gpu, way):
    x = cloud()
    net = known_chain(gpu, x)
    net.zero_grad()
    copied = way(net)
    assert copied.__dict__["_prepared"].parts == Parts(())
    for p in copied.parameters():
        p.data.mul_(1.5)
    for seed in (1, 2):
        for each in (net, copied):
            assert agree(gpu, each, anew(x, seed)) == [7]
    before = [b.clone() for b in net.buffers()]
    step(copied, x)
    near(net.buffers(), before)


def test_maps_and_features_are_freed_behind_a_step(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    y = net(x.replace(x.feats.detach().requires_grad_()))
    found = kernel_map(x.geometry, net[0][0].relation)[0]
    refs = [weakref.ref(t) for t in (x, x.feats, x.geometry, found, found.table, y, y.feats)]
    loss_of(y).backward()
    del x, y, found
    gpu.clear()
    assert gpu.sources
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_graph_holds_what_it_reads(gpu, uncollected):
    """Where the cloud is gone before gradients are asked for."""
    x = cloud()
    net = known_chain(gpu, x)
    want = step(copy.deepcopy(net), x)[1]
    net.zero_grad()
    feats = x.feats.detach().requires_grad_()
    loss = loss_of(net(x.replace(feats)))
    del x
    gc.collect()
    loss.backward()
    assert gpu.back[-1] == 7
    near([feats.grad, *(p.grad for p in net.parameters())], want)


def test_weights_that_were_replaced_are_freed_by_the_next_call(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    layer, norm_, linear = inner(net), net[1].body[1], net[2].shortcut[0]
    refs = [weakref.ref(t) for t in (layer.weight, norm_.weight, norm_.running_mean, linear.weight)]
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    norm_.weight = torch.nn.Parameter(torch.randn_like(norm_.weight))
    norm_.running_mean = torch.randn(16)
    linear.weight = torch.nn.Parameter(torch.randn_like(linear.weight))
    step(net, x)
    assert [ref() for ref in refs] == [None] * 4


def test_a_module_is_freed_with_what_it_keeps(gpu, uncollected):
    x = cloud()
    net = known_chain(gpu, x)
    refs = [weakref.ref(m) for m in net.modules()] + [weakref.ref(p) for p in net.parameters()]
    del net
    assert [ref() for ref in refs] == [None] * len(refs)


# Norms that are started with addresses

TOLD = {
    "all": (True, True, False, True),
    "a residual": (True, True, True, True),
    "nothing": (False, False, False, False),
    "a shift": (False, True, False, True),
    "a scale and a residual": (True, False, True, True),
}


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOLD)
def test_kernels_of_a_norm_by_addresses(gpu, name, dtype):
    """They write what calls with tensors write, and are none before those."""
    (has_weight, has_bias, adds, relu), (rows, c) = TOLD[name], (70, 24)
    count = pm.SparseTensor(torch.zeros(rows, 1), COORDS[:rows]).geometry.cloud
    x, grad, residual = (torch.randn(rows, c).to(dtype) for _ in range(3))
    weight, bias = torch.rand(c) + 0.5 if has_weight else None, torch.rand(c) if has_bias else None
    own = [[torch.rand(c), torch.rand(c) + 0.5, torch.tensor(3)]]
    own.append([t.clone() for t in own[0]])
    statistics = [norm.Statistics((mean, var), 1e-3, True, 0.3, tracked) for mean, var, tracked in own]
    settled = norm.NormKernels(statistics[1], TOLD[name], (c, dtype, -1))
    beyond = count.count.data_ptr() & 15
    assert settled.launches_for(rows, beyond) is None
    whole = norm.Norm(weight, bias, statistics[0], residual if adds else None, relu)
    y, told = norm.normed(x, count, whole)
    assert settled.launches_for(rows, beyond) is None
    sums = norm.sums_of(grad, (x, y if told.reads_result else None), count, told)
    dx, dresidual = norm.gradient(grad, (x, y if told.reads_result else None), count, told, sums)
    started = settled.launches_for(rows, beyond)
    assert started is not None and settled.launches_for(0, beyond) is None
    # Of other rows it is the same kernels.
    assert settled.launches_for(rows - 7, beyond) is not None and (
        settled.launches_for(rows, (beyond + 4) % 16) is None
    )
    gpu.clear()
    shared = norm.workspace(*started.needs, x.device)
    room = shared.scratch.data_ptr(), shared.counters.data_ptr()
    pair, twin, again = torch.empty(2, c), torch.empty_like(x), torch.empty(2, c)
    mean, var, tracked = (t.data_ptr() for t in own[1])
    p = pair.data_ptr()
    started.moments((x.data_ptr(), count.count.data_ptr(), mean, var, tracked, p, p, *room), 0.3)
    near([pair, *own[1]], [told.pair, *own[0]])
    affine = [p if t is None else t.data_ptr() for t in (weight, bias)]
    first = x.data_ptr(), count.count.data_ptr(), p, *affine
    started.normalise((*first, residual.data_ptr() if adds else x.data_ptr(), twin.data_ptr()))
    near([twin], [y])
    kept = (y if told.reads_result else x).data_ptr()
    started.products((grad.data_ptr(), *first, kept, again.data_ptr(), *room))
    near([again], [sums])
    dtwin, dheld = torch.empty_like(x), torch.empty_like(x)
    started.gradient((grad.data_ptr(), *first, kept, sums.data_ptr(), dheld.data_ptr(), dtwin.data_ptr()))
    near([dtwin], [dx])
    assert not told.reads_result or torch.equal(dheld, dresidual)
    assert gpu.norms == [(name, True) for name in ("moments", "normalise", "products", "gradient")]


def test_norms_of_the_emulated_gpu_are_those_of_torch(gpu):
    """What everything else here is compared with."""
    x, count = torch.randn(50, 8), pm.SparseTensor(torch.zeros(50, 1), COORDS[:50]).geometry.cloud
    weight, bias, residual = torch.rand(8) + 0.5, torch.rand(8), torch.randn(50, 8)
    results = []
    for way in (nullcontext(), on_cpu()):
        own = [torch.zeros(8), torch.ones(8), torch.tensor(0)]
        told = norm.Statistics((own[0], own[1]), 1e-3, True, 0.1, own[2])
        given = [t.clone().requires_grad_() for t in (x, weight, bias, residual)]
        with way:
            y = norm.batch_norm(given[0], count, norm.Norm(given[1], given[2], told, given[3], True))
            grads = torch.autograd.grad(y.pow(2).sum(), given)
        results.append([y.detach(), *grads, *own])
    near(*results, most=1e-4)
    assert len(gpu.norms) == 4


def test_nothing_is_left_behind(tmp_path):
    """Kernels of norms are forgotten with the emulated GPU."""
    before = [cache.cache_info().currsize for cache in OF_NORMS]
    with emulated(tmp_path) as gpu:
        step(stirred(unit(8, 8)), cloud())
        assert isinstance(norm._kernel("moments"), OfNorm) and gpu.norms
        assert all(cache.cache_info().currsize for cache in gpu.of_norms)
    assert [cache.cache_info().currsize for cache in OF_NORMS] == before
    assert (norm._of_blocks, norm._of_parts) == OF_NORMS


def test_gradients_are_written_to_one_by_one(gpu):
    """They lie in one piece of memory, and none is another's view."""
    x = cloud()
    net = known_chain(gpu, x)
    parameters = [*net.parameters()]
    grads = torch.autograd.grad(loss_of(net(x)), parameters)
    assert gpu.back == [7]
    scale = torch.ones_like(grads[0], requires_grad=True)
    product = (grads[0] * scale).sum()
    before = grads[0].clone()
    for grad in grads[1:]:
        grad.mul_(2)
    product.backward()
    assert torch.equal(scale.grad, before) and torch.equal(grads[0], before)
    grads[1].add_(parameters[1])
    assert grads[1].requires_grad and not grads[0].requires_grad
