"""First and second derivatives against finite differences, in fp64."""

import cases
import pytest
import torch
from cases import Case

import pumice as pm


def gradcheck(function, leaves):
    """First derivatives along random directions; entry by entry they are compared with the oracle elsewhere."""
    return torch.autograd.gradcheck(function, leaves, fast_mode=True)


def gradgradcheck(function, leaves):
    """Second derivatives along random directions."""
    return torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


SMALL = {"voxels": 4, "channels": (2, 2)}

# One case per way a map is made and read.
CONVS = [
    Case("same", (3, 3), **SMALL),
    Case("same-even-dilated", (2,), dilation=(2,), **SMALL),
    Case("floor", (3,), stride=(2,), **SMALL),
    Case("floor-k2", (2, 2), stride=(2, 2), **SMALL),
    Case("support", (3,), stride=(2,), padding=(1,), **SMALL),
    Case("support-bounded", (2, 2), stride=(2, 2), padding=(1, 1), spatial=(4, 4), **SMALL),
    Case("given", (3,), "given", **SMALL),
    Case("transposed", (2,), "transposed", stride=(2,), **SMALL),
    Case("transposed-bounded", (3,), "transposed", stride=(2,), padding=(1,), spatial=(5,), **SMALL),
    Case("generative", (3,), "generative", stride=(2,), **SMALL),
    Case("inverse", (3,), "inverse", stride=(2,), **SMALL),
    Case("offsets", (3,), offsets=((0,), (2,), (-1,)), **SMALL),
    Case("groups", (3,), groups=2, voxels=4, channels=(4, 2)),
    Case("depthwise", (3,), groups=3, voxels=4, channels=(3, 3)),
    Case("nobias", (3,), bias=False, **SMALL),
    Case("four-dimensions", (1, 2, 1, 2), voxels=4, channels=(2, 1)),
]


def conv_of(case: Case):
    """(function of the leaves that gives features, leaves)."""
    ops = cases.operands(case)
    leaves = [t for t in (ops.feats, ops.weight, ops.bias) if t is not None]

    def function(feats, weight, bias=None):
        return cases.run(case, cases.Operands(ops.coords, feats, weight, bias)).feats

    return function, leaves


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_gradcheck_of_convolutions(case: Case):
    function, leaves = conv_of(case)
    assert gradcheck(function, leaves)


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_gradgradcheck_of_convolutions(case: Case):
    function, leaves = conv_of(case)
    assert gradgradcheck(function, leaves)


@pytest.mark.parametrize("mode", ["avg", "sum", "max"])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, None, None), (3, 2, 1), (3, 1, None)])
def test_gradcheck_of_pools(mode, kernel, stride, padding):
    ops = cases.operands(Case("pool", (kernel, kernel), voxels=6))

    def function(feats):
        x = cases.tensor(ops.coords, feats)
        return getattr(pm.ops, f"{mode}_pool")(x, kernel, stride=stride, padding=padding).feats

    assert gradcheck(function, [ops.feats])
    assert gradgradcheck(function, [ops.feats])


@pytest.mark.parametrize("mode", ["avg", "sum", "max"])
def test_gradcheck_of_global_pools(mode):
    ops = cases.operands(Case("pool", (1, 1), voxels=6))

    def function(feats):
        return getattr(pm.ops, f"global_{mode}_pool")(cases.tensor(ops.coords, feats, batch_size=3))

    assert gradcheck(function, [ops.feats])
    assert gradgradcheck(function, [ops.feats])


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_gradcheck_of_interpolation(mode, normalize):
    ops = cases.operands(Case("at", (1, 1), voxels=6))
    rng = torch.Generator().manual_seed(0)
    at = torch.cat(
        [
            torch.randint(0, 2, (8, 1), generator=rng).double(),
            torch.rand(8, 2, dtype=torch.float64, generator=rng) * 6 - 3,
        ],
        1,
    )

    def function(feats):
        return pm.interpolate(cases.tensor(ops.coords, feats), at, mode, normalize=normalize)

    assert gradcheck(function, [ops.feats])
    assert gradgradcheck(function, [ops.feats])


def test_gradcheck_of_interpolation_by_position():
    x = cases.tensor(cases.compact(2, -3, 3, 20, 1), torch.randn(20, 2, dtype=torch.float64))
    at = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 4 - 2
    at.requires_grad_()

    def function(u):
        return pm.interpolate(x, torch.cat([torch.zeros(6, 1, dtype=torch.float64), u], 1), "trilinear")

    assert gradcheck(function, [at])


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "first"])
def test_gradcheck_of_voxelize(reduce):
    rng = torch.Generator().manual_seed(0)
    points = torch.rand(12, 2, dtype=torch.float64, generator=rng) * 3
    feats = torch.randn(12, 2, dtype=torch.float64, generator=rng, requires_grad=True)
    assert gradcheck(lambda f: pm.voxelize(points, f, size=1.0, reduce=reduce, dim=2).feats, [feats])
    assert gradgradcheck(lambda f: pm.voxelize(points, f, size=1.0, reduce=reduce, dim=2).feats, [feats])


def test_gradcheck_of_devoxelize_and_sets():
    points = torch.rand(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    x = pm.voxelize(points, size=1.0, dim=2)
    other = cases.tensor([(0, 0, 0), (0, 7, 7)], torch.ones(2, 2, dtype=torch.float64))
    feats = torch.randn(len(x), 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda f: pm.devoxelize(x.replace(f)), [feats])
    assert gradcheck(lambda f: pm.devoxelize(x.replace(f), points, mode="trilinear"), [feats])
    assert gradcheck(lambda f: pm.union(x.replace(f), other).feats, [feats])
    assert gradcheck(lambda f: pm.cat([x.replace(f), x.replace(f * f)]).feats, [feats])
    assert gradcheck(lambda f: x.replace(f).to_dense(), [feats])
    assert gradcheck(lambda f: x.replace(f).prune(torch.arange(len(x)) % 2 == 0).feats, [feats])


@pytest.mark.parametrize("needs", [(True, False), (False, True)], ids=["x-only", "w-only"])
def test_only_the_gradients_asked_for(needs):
    ops = cases.operands(Case("same", (3, 3)))
    feats, weight = (t.detach().requires_grad_(n) for t, n in zip((ops.feats, ops.weight), needs, strict=True))
    pm.ops.conv(cases.tensor(ops.coords, feats), weight).feats.sum().backward()
    assert (feats.grad is not None) == needs[0] and (weight.grad is not None) == needs[1]


def test_no_graph_where_none_is_needed():
    ops = cases.operands(Case("same", (3, 3)))
    with torch.no_grad():
        assert not pm.ops.conv(cases.tensor(ops.coords, ops.feats), ops.weight, ops.bias).feats.requires_grad
    y = pm.ops.conv(cases.tensor(ops.coords, ops.feats.detach()), ops.weight.detach())
    assert not y.feats.requires_grad


def test_third_derivatives():
    """Forward, dgrad and wgrad are closed under differentiation."""
    function, leaves = conv_of(Case("same", (3,), voxels=3, channels=(1, 1), bias=False))
    feats, weight = leaves
    y = (function(feats, weight) ** 3).sum()
    (g,) = torch.autograd.grad(y, feats, create_graph=True)
    (h,) = torch.autograd.grad((g**2).sum(), weight, create_graph=True)
    (third,) = torch.autograd.grad(h.sum(), feats)
    assert torch.isfinite(third).all() and third.abs().max() > 0
    step, eps = torch.randn_like(feats), 1e-6

    def second(f):
        y = (function(f, weight) ** 3).sum()
        (g,) = torch.autograd.grad(y, f, create_graph=True)
        return torch.autograd.grad((g**2).sum(), weight)[0].sum()

    ahead, behind = (second((feats.detach() + s * eps * step).requires_grad_()) for s in (1, -1))
    torch.testing.assert_close((third * step).sum(), (ahead - behind) / (2 * eps), rtol=1e-5, atol=1e-6)


def test_double_backward_as_a_gradient_penalty_uses_it():
    ops = cases.operands(Case("down", (3, 3), stride=(2, 2)))
    y = pm.ops.conv(cases.tensor(ops.coords, ops.feats), ops.weight, ops.bias, stride=2)
    (g,) = torch.autograd.grad(y.feats.pow(2).sum(), ops.feats, create_graph=True)
    g.pow(2).sum().backward()
    assert ops.weight.grad.abs().max() > 0 and ops.bias.grad.abs().max() > 0
