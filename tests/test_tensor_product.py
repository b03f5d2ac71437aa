"""Tensor products are what their definition says, with derivatives, along edges, and as e3nn where it is installed."""

import copy
import math
import pickle

import pytest
import torch
from harmonics import turned

import pumice as pm
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.nn import FullyConnectedTensorProduct, TensorProduct
from pumice.ops import Irreps, clebsch_gordan

AXIS = [0.4, 1.2, -0.5]
# mode -> irreps of both factors and the result, with and without weights where these differ
SHAPES = {
    "uvw": ("3x0e+2x1o+3x1e", "1x0e+1x1o+2x2e", "2x0e+3x1o+2x1e+1x2e"),
    "uvu": ("3x0e+3x1o+2x1e", "2x0e+1x1o", "3x0e+3x1o+2x1o+3x2e"),
    "uvv": ("3x0e+2x1o", "2x0e+2x1o", "2x0e+2x1o+2x1e"),
    "uuw": ("3x0e+3x1o", "3x0e+3x1o", "2x0e+1x1o+1x1e"),
    "uuu": ("3x0e+3x1o", "3x0e+3x1o", "3x0e+3x1o+3x1e"),
    "uvuv": ("3x0e+3x1o", "2x0e+2x1o", "6x0e+6x1o+6x2e"),
    "uvu<v": ("4x0e+4x1o", "4x0e+4x1o", "6x0e+6x1o+6x1e"),
    "u<vw": ("3x0e+2x1o+2x0e", "3x0e+2x1o+2x0e", "2x0e+3x1o+1x1e"),
}
SUMS = {
    "uvw": "buv,uvw->bw",
    "uvu": "buv,uv->bu",
    "uvv": "buv,uv->bv",
    "uuw": "bu,uw->bw",
    "uuu": "bu,u->bu",
    "uvuv": "buv,uv->buv",
    "uvu<v": "bq,q->bq",
    "u<vw": "bq,qw->bw",
}
"""Channels of a path's products x[u] y[v] and of its weight, per mode."""


def count(module, path):
    """Products in one result of a path."""
    u, v = module.irreps_in1[path.first].mul, module.irreps_in2[path.second].mul
    return {"uvw": u * v, "uvu": v, "uvv": u, "uuw": u, "u<vw": u * (u - 1) // 2}.get(path.mode, 1)


def defined(module, x, y, weight, by_irrep="component", by_path="element"):
    """The product by its definition, one path at a time; x and y [B, dim], weight [B, numel]."""
    out, begin = torch.zeros(len(x), module.irreps_out.dim, dtype=x.dtype), 0
    for path in module.instructions:
        a, b, c = (i[n] for i, n in zip((module.irreps_in1, module.irreps_in2, module.irreps_out), path, strict=False))
        alike = [count(module, other) for other in module.instructions if other.result == path.result]
        scale = {"component": c.size, "norm": a.size * b.size, "none": 1}[by_irrep]
        scale *= path.path_weight
        scale /= {"element": sum(alike), "path": count(module, path) * len(alike), "none": 1}[by_path]
        left = x[:, module.irreps_in1.slices()[path.first]].view(-1, a.mul, a.size)
        right = y[:, module.irreps_in2.slices()[path.second]].view(-1, b.mul, b.size)
        table = torch.tensor(clebsch_gordan(a.degree, b.degree, c.degree)).to(x.dtype) * math.sqrt(scale)
        products, shape = SUMS[path.mode].split(",")[0], SUMS[path.mode].split(",")[1].split("->")[0]
        if "q" in products:
            u, v = torch.triu_indices(a.mul, a.mul, 1)
            pairs = torch.einsum("bqi,bqj,ijk->bqk", left[:, u], right[:, v], table)
        else:
            pairs = torch.einsum(f"bui,b{'v' if 'v' in products else 'u'}j,ijk->{products}k", left, right, table)
        if path.has_weight:
            sizes = {"u": a.mul, "v": b.mul, "w": c.mul, "q": a.mul * (a.mul - 1) // 2}
            numel = math.prod(sizes[n] for n in shape)
            own = weight[:, begin : begin + numel].reshape(-1, *(sizes[n] for n in shape))
            begin += numel
            result = torch.einsum(f"{products}k,b{shape}->{SUMS[path.mode].split('>')[1]}k", pairs, own)
        else:
            result = torch.einsum(f"{products}k->{SUMS[path.mode].split('>')[1].replace('w', '')}k", pairs)
        out[:, module.irreps_out.slices()[path.result]] += result.reshape(len(x), -1)
    return out


def filled(*shape, seed=0, grad=False):
    found = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return found.requires_grad_(grad)


def operands(module, rows=5, nodes=None, grad=False):
    own = () if module.shared_weights else (rows,)
    x = filled(nodes or rows, module.irreps_in1.dim, seed=1, grad=grad)
    return (
        x,
        filled(rows, module.irreps_in2.dim, seed=2, grad=grad),
        filled(*own, module.weight_numel, seed=3, grad=grad),
    )


def paths(mode, has_weight=True):
    irreps = map(Irreps, SHAPES[mode])
    found = TensorProduct(*irreps, mode).instructions
    if not has_weight:
        found = [path for path in found if mode != "uuw" or Irreps(SHAPES[mode][2])[path.result].mul == 1]
    return [path._replace(has_weight=has_weight, path_weight=1.0 + n % 3) for n, path in enumerate(found)]


def derivatives(run, given):
    """The result, and derivatives of first to third order."""
    z = run(*given)
    found, total = [z], (z * _ramp(z)).sum()
    for _ in range(3):
        grads = torch.autograd.grad(total, given, create_graph=True, materialize_grads=True)
        found += grads
        total = sum((g * _ramp(g) * (1 + 0.1 * g.detach())).sum() for g in grads)
        if not total.requires_grad:
            break
    return found


def _ramp(x):
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per sample"])
@pytest.mark.parametrize("has_weight", [True, False], ids=["weighted", "bare"])
@pytest.mark.parametrize("mode", SHAPES)
def test_modes(mode, has_weight, shared):
    if mode in ("uvw", "u<vw") and not has_weight:
        return
    made = TensorProduct(*SHAPES[mode], paths(mode, has_weight), shared_weights=shared, internal_weights=False).double()
    x, y, weight = operands(made)
    expected = defined(made, x, y, weight.expand(5, -1))
    torch.testing.assert_close(made(x, y, weight), expected, atol=1e-12, rtol=0)
    assert expected.abs().max() > 0.1
    assert torch.equal(made.output_mask, (expected != 0).any(0).double())


@pytest.mark.parametrize("by_path", ["element", "path", "none"])
@pytest.mark.parametrize("by_irrep", ["component", "norm", "none"])
def test_normalizations(by_irrep, by_path):
    how = {"irrep_normalization": by_irrep, "path_normalization": by_path, "internal_weights": False}
    made = TensorProduct(*SHAPES["uvu"], paths("uvu"), **how).double()
    x, y, weight = operands(made)
    expected = defined(made, x, y, weight.expand(5, -1), by_irrep, by_path)
    torch.testing.assert_close(made(x, y, weight), expected, atol=1e-12, rtol=0)


def test_results_of_unit_variance_inputs_have_unit_variance():
    made = FullyConnectedTensorProduct("8x0e+8x1o+8x2e", "1x0e+1x1o+1x2e", "8x0e+8x1o+8x2e").double()
    x, y, _ = operands(made, 4000)
    torch.manual_seed(0)
    variance = torch.stack([made(x, y, torch.randn_like(made.weight)).var(0) for _ in range(20)]).mean(0)
    assert variance.sub(1).abs().max() < 0.4 and variance.mean().sub(1).abs() < 0.05


def test_channels_may_come_last():
    """Layout "ir_mul" is the same product of transposed features."""
    irreps = "3x0e+3x1o", "1x0e+1x1o", "3x0e+2x1o+3x1e"
    one, other = (FullyConnectedTensorProduct(*irreps, layout=name).double() for name in ("mul_ir", "ir_mul"))
    other.load_state_dict(one.state_dict())
    x, y, _ = operands(one)
    flipped = torch.cat([x[:, :3], x[:, 3:].view(5, 3, 3).mT.flatten(1)], 1)
    found, expected = other(flipped, y), one(x, y)
    parts = [expected[:, :3], expected[:, 3:9].view(5, 2, 3).mT.flatten(1), expected[:, 9:].view(5, 3, 3).mT.flatten(1)]
    torch.testing.assert_close(found, torch.cat(parts, 1), atol=1e-14, rtol=0)


@pytest.mark.parametrize("inverted", [False, True], ids=["turned", "inverted"])
def test_equivariance(inverted):
    made = FullyConnectedTensorProduct(
        "4x0e+4x1o+2x2e+3x1e", "1x0e+1x1o+1x2e+1x3o", "4x0e+4x1o+2x2e+1x0o+2x6o"
    ).double()
    x, y, _ = operands(made)
    found = made(turned(x, made.irreps_in1, AXIS, inverted), turned(y, made.irreps_in2, AXIS, inverted))
    torch.testing.assert_close(found, turned(made(x, y), made.irreps_out, AXIS, inverted), atol=1e-12, rtol=0)


def test_leading_axes_broadcast():
    made = TensorProduct(*SHAPES["uvw"], "uvw", shared_weights=False).double()
    x, y, weight = operands(made, 6)
    whole = made(x.view(2, 3, -1), y.view(2, 3, -1)[:, :1], weight.view(2, 3, -1))
    assert whole.shape == (2, 3, made.irreps_out.dim)
    torch.testing.assert_close(whole[1, 2], made(x[5], y[3], weight[5]))


# Derivatives
@pytest.mark.parametrize("mode, shared", [("uvw", True), ("uvw", False), ("uvu", False)])
def test_derivatives_of_three_orders(mode, shared):
    irreps = ("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o")
    made = TensorProduct(*irreps, mode, shared_weights=shared, internal_weights=False).double()
    given = operands(made, 3, grad=True)
    found = derivatives(made, given)
    expected = derivatives(lambda x, y, w: defined(made, x, y, w.expand(3, -1)), given)
    assert len(found) == len(expected) == 10
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)


# Edges
EDGES = torch.tensor([[0, 3, 1, 1, 2, -1, 0, 2], [2, 0, 0, 2, 2, 1, -1, 0]])


def by_edges(module, x, y, weight):
    """The sum of the messages, one at a time."""
    parts = [[torch.zeros(module.irreps_out.dim, dtype=x.dtype)] for _ in range(4)]
    for e, (source, target) in enumerate(EDGES.T.tolist()):
        if source >= 0 and target >= 0:
            own = weight if module.shared_weights else weight[e]
            parts[target].append(defined(module, x[source, None], y[e, None], own[None])[0])
    return torch.stack([torch.stack(part).sum(0) for part in parts])


@pytest.mark.parametrize("mode, shared", [("uvu", False), ("uvu", True), ("uvw", False), ("uvw", True)])
def test_messages_along_edges(mode, shared):
    irreps = ("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o")
    made = TensorProduct(*irreps, mode, shared_weights=shared, internal_weights=False).double()
    given = operands(made, 8, 4, grad=True)
    found = derivatives(lambda x, y, w: made(x, y, w, edges=EDGES), given)
    expected = derivatives(lambda x, y, w: by_edges(made, x, y, w), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)
    order = EDGES[1].argsort()
    x, y, w = given
    again = made(x, y[order], w if shared else w[order], edges=EDGES[:, order])
    torch.testing.assert_close(again, found[0], atol=1e-13, rtol=0)
    more = made(x, y, w, edges=EDGES, num_nodes=6)
    assert torch.equal(more[:4], found[0]) and not more[4:].any()
    assert not made(x, y[:0], w if shared else w[:0], edges=EDGES[:, :0]).any()


# Compiled, moved, saved
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    made = TensorProduct("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o", "uvu", shared_weights=False).double()
    given = operands(made, 8, 4, grad=True)

    def run(x, y, w):
        return made(x, y, w, edges=EDGES).square().sum()

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), run(*given))
    for one, other in zip(*(torch.autograd.grad(f(*given), given) for f in (compiled, run)), strict=True):
        torch.testing.assert_close(one, other)


def test_tables_are_rounded_once():
    made = FullyConnectedTensorProduct("2x0e+2x2e", "1x2e", "2x0e+2x2e")
    x, y, w = operands(made)
    exact = copy.deepcopy(made).double()(x, y, w)
    assert torch.equal(made.half().double()(x, y, w), exact)
    assert torch.equal(pickle.loads(pickle.dumps(made))(x, y, w), exact)
    assert made.bfloat16()(*(t.bfloat16() for t in (x, y, w))).dtype == torch.bfloat16


def test_autocast_keeps_a_table_of_its_dtype():
    made = FullyConnectedTensorProduct("4x0e+4x1o", "1x0e+1x1o", "4x0e+4x1o")
    x, y, _ = (t.float() for t in operands(made))
    expected = copy.deepcopy(made).bfloat16()(x.bfloat16(), y.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found, (table, _) = made(x, y), made._tables[torch.bfloat16][0]
        made(x, y)
        assert made._tables[torch.bfloat16][0][0] is table
        exact = made.double()(x.double(), y.double())
    assert torch.equal(found, expected) and found.dtype == torch.bfloat16 and exact.dtype == torch.float64


def test_state_of_e3nn_is_loaded():
    """Its keys are ours, and the tables of its generated code are passed over."""
    made = FullyConnectedTensorProduct("2x0e+2x1o", "1x0e+1x1o", "2x0e+2x1o")
    state = {"product.weight": torch.randn(made.weight_numel), "product.output_mask": torch.ones(8)}
    state["product._compiled_main_left_right._w3j_1_1_2"] = torch.randn(3, 3, 5)
    torch.nn.ModuleDict({"product": made}).load_state_dict(state)
    assert torch.equal(made.weight, state["product.weight"]) and set(made.state_dict()) == {"weight", "output_mask"}
    bare = TensorProduct("2x0e", "1x0e", "2x0e", "uvu", shared_weights=False)
    assert {name: tuple(x.shape) for name, x in bare.state_dict().items()} == {"weight": (0,), "output_mask": (2,)}


REFUSED = {
    "mode": ("2x0e", "1x0e", "2x0e", "uwu", "mode='uwu' is unknown; there are uvw"),
    "coupling": ("2x0e", "1x1o", "2x0e", [(0, 0, 0, "uvu", True)], "2x0e and 1x1o does not contain 2x0e"),
    "result": ("2x0e", "1x0e", "3x0e", [(0, 0, 0, "uvu", True)], "the result has 2 channels, 3x0e has 3"),
    "factors": ("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uuu", True)], "takes as many of both"),
    "weights": ("2x0e", "1x0e", "2x0e", [(0, 0, 0, "uvw", False)], "uvw has weights"),
    "weights of pairs": ("2x0e", "2x0e", "2x0e", [(0, 0, 0, "u<vw", False)], "u<vw has weights"),
    "pairs": ("3x0e", "3x0e", "4x0e", [(0, 0, 0, "uvu<v", False)], "the result has 3 channels, 4x0e has 4"),
    "one result": ("2x0e", "2x0e", "2x0e", [(0, 0, 0, "uuw", False)], "without weights uuw has one result"),
    "number": ("2x0e", "1x0e", "2x0e", [(0, 1, 0, "uvu", True)], "there are 1, 1, 1 irreps"),
    "unknown": ("2x0e", "1x0e", "2x0e", [(0, 0, 0, "v<uw", True)], "mode 'v<uw' is unknown"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    *given, text = REFUSED[case]
    with pytest.raises(OptionError, match=text.replace("<", ".")):
        TensorProduct(*given)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"layout": "ir"}, "layout='ir' is unknown"),
        ({"irrep_normalization": "unit"}, "'unit' is unknown; there are component"),
        ({"path_normalization": "unit"}, "'unit' is unknown; there are element"),
        ({"in2_var": [1.0, 2.0]}, "in2_var has one variance for each of 1x0e: expected 1, found 2"),
        ({"shared_weights": False, "internal_weights": True}, "shared by all samples"),
    ],
)
def test_refuses_options(options, text):
    with pytest.raises(OptionError, match=text):
        TensorProduct("2x0e", "1x0e", "2x0e", "uvu", **options)


def test_refuses_operands():
    made = TensorProduct("2x0e", "1x0e", "2x0e", "uvu", shared_weights=False)
    x, y, w = torch.ones(3, 2), torch.ones(3, 1), torch.ones(3, 2)
    with pytest.raises(ShapeError, match=r"x1 is of irreps 2x0e: expected \[..., 2\], found \[3, 3\]"):
        made(torch.ones(3, 3), y, w)
    with pytest.raises(ShapeError, match=r"weight is \[..., 2\], found \[3, 1\]"):
        made(x, y, w[:, :1])
    with pytest.raises(DtypeError, match="x2 is a tensor, found str"):
        made(x, "y", w)
    with pytest.raises(DtypeError, match="weight is a tensor, found float"):
        made(x, y, 1.0)
    with pytest.raises(ShapeError, match=r"broadcast; found \[3\], \[2\], \[3\]"):
        made(x, y[:2], w)
    with pytest.raises(ShapeError, match="along edges, x1 is"):
        made(x, y, w, edges=EDGES)


# e3nn
@pytest.fixture
def o3():
    found = pytest.importorskip("e3nn.o3")
    before = torch.get_default_dtype()
    # Its tables are buffers of the default dtype.
    torch.set_default_dtype(torch.float64)
    pytest.importorskip("e3nn").set_optimization_defaults(jit_mode="eager")
    yield found
    torch.set_default_dtype(before)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "per sample"])
@pytest.mark.parametrize("mode", SHAPES)
def test_e3nn_gives_the_same(o3, mode, shared):
    given = [tuple(path) for path in paths(mode)]
    theirs = o3.TensorProduct(*SHAPES[mode], given, shared_weights=shared)
    ours = TensorProduct(*SHAPES[mode], given, shared_weights=shared)
    ours.load_state_dict(theirs.state_dict())
    x, y, weight = operands(ours)
    weight = None if shared else weight
    torch.testing.assert_close(ours(x, y, weight), theirs(x, y, weight), atol=1e-12, rtol=0)


@pytest.mark.parametrize("by_path", ["element", "path"])
def test_variances_of_e3nn(o3, by_path):
    given = [tuple(path) for path in paths("uvw")]
    variances = [[0.5 + n for n in range(len(Irreps(irreps)))] for irreps in SHAPES["uvw"]]
    how = dict(zip(("in1_var", "in2_var", "out_var"), variances, strict=True), path_normalization=by_path)
    theirs, ours = o3.TensorProduct(*SHAPES["uvw"], given, **how), TensorProduct(*SHAPES["uvw"], given, **how)
    ours.load_state_dict(theirs.state_dict())
    x, y, _ = operands(ours)
    torch.testing.assert_close(ours(x, y), theirs(x, y), atol=1e-12, rtol=0)


def test_fully_connected_of_e3nn(o3):
    irreps = "4x0e+4x1o+2x2e", "1x0e+1x1o+1x2e", "4x0e+4x1o+2x2e"
    theirs, ours = o3.FullyConnectedTensorProduct(*irreps), FullyConnectedTensorProduct(*map(o3.Irreps, irreps))
    ours.load_state_dict(theirs.state_dict())
    x, y, _ = operands(ours)
    torch.testing.assert_close(ours(x, y), theirs(x, y), atol=1e-12, rtol=0)
    assert isinstance(ours, pm.nn.TensorProduct) and "11 paths" in repr(ours)
