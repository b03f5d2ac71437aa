"""Every convolution of the table against the oracle: coordinates, their order, features and gradients."""

import copy
import pickle
import weakref

import cases
import oracle
import pytest
import torch
from cases import CASES, Case

import pumice as pm
from pumice.errors import GeometryError
from pumice.testing import random_cloud, random_tensor

# The families whose numbers differ in kind; low precision runs on these, the rest of the table in fp64.
LOW = [
    c
    for c in CASES
    if c.name
    in {
        "same-3d-k3",
        "same-2d-k5",
        "floor-3d-k2-s2",
        "floor-3d-k3-s2",
        "support-3d-k3-s2-p1",
        "given-2d-k3-s2",
        "transposed-3d-k2-s2",
        "inverse-3d-k2-s2",
        "groups-2",
        "depthwise",
        "channels-wide",
        "offsets-3d-cross",
        "same-4d-k3",
    }
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conv_equals_the_oracle(case: Case, device):
    """New coordinates come in (batch, Morton) order whatever the order of the input; given ones keep theirs."""
    cases.check(case, torch.float64, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LOW, ids=str)
def test_conv_in_low_precision(case: Case, dtype, device):
    cases.check(case, dtype, device)


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        (Case("down", (3, 3), stride=(2, 3)), (2, 3)),
        (Case("down", (3, 3), "support", stride=(2, 1), padding=(1, 1)), (2, 1)),
        (Case("same", (3, 3)), (1, 1)),
    ],
    ids=lambda v: str(v),
)
def test_cumulative_stride_is_multiplied(case: Case, factor):
    ops = cases.operands(case)
    x = cases.tensor(ops.coords, ops.feats, stride=(4, 6))
    y = pm.ops.conv(x, ops.weight, ops.bias, stride=case.stride or 1, padding=case.padding)
    assert y.stride == tuple(a * b for a, b in zip((4, 6), factor, strict=True))


def test_cumulative_stride_is_divided_by_transposed_and_inverse():
    case = Case("up", (2, 2), "transposed", stride=(2, 2))
    ops = cases.operands(case)
    x = cases.tensor(ops.coords, ops.feats, stride=(4, 2))
    assert pm.ops.conv_transpose(x, ops.weight, stride=2).stride == (2, 1)
    fine = cases.tensor(ops.coords, ops.feats)
    down = pm.ops.conv(fine, torch.randn(2, 2, 2, 2, dtype=torch.float64), stride=2)
    assert pm.ops.conv_inverse(down, ops.weight, fine, stride=2).stride == (1, 1)


@pytest.mark.parametrize(
    ("shape", "kernel", "stride", "padding", "want"),
    [
        ((7, 6), 3, 2, 1, (4, 3)),
        ((5, 5), 2, 2, 0, (2, 2)),
        ((9, 4), (3, 1), (3, 1), (0, 0), (3, 4)),
    ],
)
def test_spatial_shape_follows_the_dense_formula(shape, kernel, stride, padding, want):
    case = Case("shape", (kernel, kernel) if isinstance(kernel, int) else kernel, spatial=shape, voxels=9)
    ops = cases.operands(case)
    x = cases.tensor(ops.coords, ops.feats, spatial_shape=shape)
    assert pm.ops.conv(x, ops.weight, stride=stride, padding=padding).spatial_shape == want
    assert pm.ops.conv(x, ops.weight).spatial_shape == shape


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [5, 6, 7])
def test_outputs_lie_inside_their_spatial_shape(size, kernel, stride):
    """Whatever the rule by default, `to_dense` of the result must hold all of it."""
    ins = [(0, i, j) for i in range(size) for j in range(size)]
    x = cases.tensor(ins, torch.ones(len(ins), 1), spatial_shape=(size, size))
    y = pm.ops.conv(x, torch.ones(1, kernel, kernel, 1), stride=stride)
    assert all(oracle.inside(c, y.spatial_shape) for c in cases.tuples(y)), y.spatial_shape
    assert y.to_dense().sum().item() == pytest.approx(y.feats.sum().item())


def test_inverse_goes_back_over_a_real_downsampling(device):
    """down then up: the up-sampled coordinates are the original ones, in the original order."""
    ins = cases.compact(3, -4, 4, 20)
    feats = torch.randn(len(ins), 2, dtype=torch.float64, device=device)
    x = cases.tensor(ins, feats)
    w = torch.randn(4, 3, 3, 3, 2, dtype=torch.float64, device=device)
    up = torch.randn(2, 3, 3, 3, 4, dtype=torch.float64, device=device)
    down = pm.ops.conv(x, w, stride=2, padding=1)
    back = pm.ops.conv_inverse(down, up, x, stride=2, padding=1)
    assert back.geometry is x.geometry
    rel = oracle.relation((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
    pairs = oracle.exchanged_pairs(cases.tuples(down), ins, rel)
    want = oracle.conv(pairs, len(ins), cases.array(down.feats), cases.flat(up))
    cases.assert_close(back.feats, want, torch.float64, "features")


def test_same_policy_keeps_the_geometry():
    ops = cases.operands(Case("same", (3, 3)))
    x = cases.tensor(ops.coords, ops.feats)
    assert pm.ops.conv(x, ops.weight).geometry is x.geometry


def test_a_geometry_is_a_target_as_good_as_a_tensor():
    case = Case("given", (3, 3), "given")
    ops = cases.operands(case)
    x, target = cases.tensor(ops.coords, ops.feats), cases.given(case, ops, "cpu")
    a = pm.ops.conv(x, ops.weight, out=target)
    b = pm.ops.conv(x, ops.weight, out=target.geometry)
    assert a.geometry is target.geometry and b.geometry is target.geometry
    assert torch.equal(a.feats, b.feats)


def test_operators_of_one_stride_share_their_outputs():
    """What reaches one set of coordinates by two ways can be added without a union."""
    ops = cases.operands(Case("down", (3, 3)))
    x = cases.tensor(ops.coords, ops.feats)
    a, b = pm.ops.conv(x, ops.weight, stride=2), pm.ops.max_pool(x, 2)
    assert a.geometry is b.geometry
    c = pm.ops.conv(x, ops.weight, stride=2, padding=1)
    assert c.geometry is pm.ops.conv(x, ops.weight * 2, stride=2, padding=1).geometry
    assert c.geometry is not a.geometry


def test_the_same_call_twice_gives_the_same_geometry_and_numbers():
    """Maps are cached on the geometry, and the result does not depend on who built them."""
    case = Case("down", (3, 3, 3), stride=(2, 2, 2))
    ops = cases.operands(case)
    x = cases.tensor(ops.coords, ops.feats)
    first, second = pm.ops.conv(x, ops.weight, stride=2), pm.ops.conv(x, ops.weight, stride=2)
    assert first.geometry is second.geometry
    assert torch.equal(first.feats, second.feats)


def test_maps_of_different_relations_do_not_mix():
    """One geometry, many relations in turn; each must equal a fresh computation."""
    base = cases.compact(2, -4, 4, 18)
    feats = torch.randn(len(base), 2, dtype=torch.float64)
    x = cases.tensor(base, feats)
    table = [(k, s, p, d) for k in (2, 3) for s in (1, 2) for p in (None, 0, 1) for d in (1, 2)]
    for kernel, stride, padding, dilation in table + table[::-1]:
        w = torch.randn(3, kernel, kernel, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(kernel))
        keys = {
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "out": None if padding is None else "support",
        }
        kept, fresh = pm.ops.conv(x, w, **keys), pm.ops.conv(cases.tensor(base, feats), w, **keys)
        assert cases.tuples(kept) == cases.tuples(fresh)
        assert torch.equal(kept.feats, fresh.feats)


def test_far_apart_coordinates(device):
    """Neighbours at both ends of a wide range; keys must not wrap."""
    far = 2**20 - 3
    ins = [
        (0, a + x, b - y, c)
        for a in (-far, far)
        for b in (-far, far)
        for c in (-far, far)
        for x in range(2)
        for y in range(2)
    ]
    feats = torch.randn(len(ins), 2, dtype=torch.float64, device=device)
    w = torch.randn(3, 3, 3, 3, 2, dtype=torch.float64, device=device)
    y = pm.ops.conv(cases.tensor(ins, feats), w)
    rel = oracle.relation((3, 3, 3), (1, 1, 1), (1, 1, 1))
    want = oracle.conv(oracle.forward_pairs(ins, ins, rel), len(ins), cases.array(feats), cases.flat(w))
    cases.assert_close(y.feats, want, torch.float64, "features")
    z = pm.ops.conv(cases.tensor(ins, feats), w, stride=2)
    assert cases.tuples(z) == oracle.floor_unique(ins, (2, 2, 2))


def test_the_ends_of_int32(device):
    """Coordinates at -2^31 and 2^31 - 1 have no neighbour beyond; nothing may wrap around."""
    low, high = -(2**31), 2**31 - 1
    ins = [(0, low), (0, low + 1), (0, high - 1), (0, high), (0, 0)]
    feats = torch.randn(5, 1, dtype=torch.float64, device=device)
    w = torch.randn(1, 3, 1, dtype=torch.float64, device=device)
    y = pm.ops.conv(cases.tensor(ins, feats), w)
    rel = oracle.relation((3,), (1,), (1,))
    want = oracle.conv(oracle.forward_pairs(ins, ins, rel), 5, cases.array(feats), cases.flat(w))
    cases.assert_close(y.feats, want, torch.float64, "features")
    assert cases.tuples(pm.ops.conv(cases.tensor(ins, feats), w, stride=2)) == oracle.floor_unique(ins, (2,))


@pytest.mark.parametrize("module", ["Conv2d", "ConvTranspose2d", "GenerativeConvTranspose2d", "InverseConv2d"])
def test_modules_are_their_functions(module):
    """A module adds parameters and nothing else; its initialisation is that of torch.nn.Conv."""
    torch.manual_seed(0)
    layer = getattr(pm.nn, module)(4, 6, (3, 2), stride=2, groups=2).double()
    assert layer.weight.shape == (6, 3, 2, 2) and layer.bias.shape == (6,)
    limit = 1 / (3 * 2 * 2) ** 0.5
    assert layer.weight.abs().max() <= limit and layer.bias.abs().max() <= limit
    assert layer.weight.std() > limit / 3
    fine = cases.tensor(cases.compact(2, 0, 6, 15), torch.randn(30, 4, dtype=torch.float64))
    x = pm.ops.conv(fine, torch.randn(4, 3, 2, 4, dtype=torch.float64), stride=2)
    w, b = layer.weight, layer.bias
    want = {
        "Conv2d": lambda: pm.ops.conv(x, w, b, stride=2, groups=2),
        "ConvTranspose2d": lambda: pm.ops.conv_transpose(x, w, b, stride=2, groups=2),
        "GenerativeConvTranspose2d": lambda: pm.ops.conv_transpose(
            x, w, b, stride=2, padding=None, groups=2, bounded=False
        ),
        "InverseConv2d": lambda: pm.ops.conv_inverse(x, w, fine, b, stride=2, groups=2),
    }[module]()
    got = layer(x, fine) if module == "InverseConv2d" else layer(x)
    assert cases.tuples(got) == cases.tuples(want)
    assert torch.equal(got.feats, want.feats)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
def test_offsets_may_be_a_list_or_a_tensor(kind):
    case = next(c for c in CASES if c.name == "offsets-3d-cross")
    ops = cases.operands(case)
    x = cases.tensor(ops.coords, ops.feats)
    y = pm.ops.conv(x, ops.weight, ops.bias, offsets=kind(case.offsets))
    assert torch.equal(y.feats, cases.run(case, ops).feats)


def test_a_map_that_was_met_in_inference_serves_training_afterwards():
    coords = list(cases.compact(3, 0, 6, 60))
    x = cases.tensor(coords, torch.randn(len(coords), 4))
    layers = pm.nn.Conv3d(4, 6, 3), pm.nn.Conv3d(6, 6, 2, stride=2)
    with torch.inference_mode():
        expected = layers[1](layers[0](x)).feats.clone()
    found = layers[1](layers[0](x)).feats
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    found.sum().backward()
    assert all(p.grad is not None for layer in layers for p in layer.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_used_map_can_be_copied(copied):
    x, weight = random_tensor(40, 4, 3), torch.randn(6, 27, 4)
    found, _ = pm.kernel_map(x.geometry, pm.coords.Relation.of(3, 3))
    for needed in (False, True):
        pm.ops.conv_features(x.feats.requires_grad_(needed), weight, found, 40)
    for one in (found, found.transpose()):
        again = copied(one)
        assert torch.equal(again.rows(), one.rows()) and again.table is not one.table
        y = pm.ops.conv_features(x.feats, weight, again, 40)
        assert torch.equal(y, pm.ops.conv_features(x.feats, weight, one, 40))


def cube(seed=0):
    coords = random_cloud(60, extent=7, seed=seed)
    return pm.SparseTensor(torch.randn(60, 2, generator=torch.Generator().manual_seed(seed)), coords)


@pytest.mark.parametrize("grad", [True, False])
def test_a_sequential_holds_the_way_there_and_back(grad):
    x = cube()
    there = pm.nn.Sequential(pm.nn.Conv3d(2, 4, 2, 2), pm.nn.BatchNorm(4), pm.nn.ReLU(), pm.nn.Conv3d(4, 4, 3, 2, 1))
    back = pm.nn.Sequential(pm.nn.InverseConv3d(4, 3, 3, 2, 1), pm.nn.ReLU(), pm.nn.InverseConv3d(3, 2, 2, 2))
    net = pm.nn.Sequential(there, back).eval()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            y = net(x)
        middle = there[:3](x)
        want = back[2](back[1](back[0](there(x), middle)), x)
    assert y.geometry is x.geometry
    torch.testing.assert_close(y.feats, want.feats)


def test_the_way_back_is_that_of_the_way_there():
    x, other, weight = cube(), cube(1), torch.ones(3, 2, 2, 2, 4)
    down = pm.nn.Conv3d(2, 4, 2, 2)(x)
    with pytest.raises(GeometryError, match=r"made by kernel_size=\(2, 2, 2\).*has kernel_size=\(3, 3, 3\)"):
        pm.nn.InverseConv3d(4, 3, 3, 2)(down, x)
    with pytest.raises(GeometryError, match=r"has kernel_size=\(2, 2, 2\), stride=\(2, 2, 2\), padding=\(1, 1, 1\)"):
        pm.ops.conv_inverse(down, weight, stride=2, padding=1)
    with pytest.raises(GeometryError, match="made from Geometry.*the target is Geometry"):
        pm.ops.conv_inverse(down, weight, other, stride=2)
    alone = pm.SparseTensor(down.feats, down.coords, stride=2)
    with pytest.raises(GeometryError, match="target"):
        pm.ops.conv_inverse(alone, weight, stride=2)
    assert torch.equal(
        pm.ops.conv_inverse(alone, weight, x, stride=2).feats, pm.ops.conv_inverse(down, weight, stride=2).feats
    )


def test_coordinates_do_not_keep_alive_what_they_were_made_from():
    x = cube()
    down, finer = pm.ops.max_pool(x, 2), weakref.ref(x.geometry)
    assert down.geometry.parent is x.geometry and down.cpu().geometry.parent is x.geometry
    del x
    assert finer() is None and down.geometry.parent is None
