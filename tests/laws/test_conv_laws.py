"""Laws that hold for every convolution, whatever its numbers: found by hypothesis, small sizes."""

import itertools

import cases
import oracle
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pumice as pm

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
DTYPE = torch.float64


@st.composite
def clouds(draw, dim=None, batches=2, low=-4, high=4, least=0):
    """Distinct coordinates (batch, axes...) in any order."""
    dim = dim or draw(st.integers(1, 3))
    axis = st.integers(low, high)
    voxel = st.tuples(st.integers(0, batches - 1), *[axis] * dim)
    return draw(st.lists(voxel, unique=True, min_size=least, max_size=14)), dim


@st.composite
def relations(draw, dim):
    """Keyword arguments of ops.conv, and the kernel size per axis."""
    kernel = draw(st.tuples(*[st.integers(1, 3)] * dim))
    stride = draw(st.tuples(*[st.integers(1, 3)] * dim))
    dilation = draw(st.tuples(*[st.integers(1, 2)] * dim))
    padding = draw(st.none() | st.tuples(*[st.integers(0, 2)] * dim))
    policy = draw(st.sampled_from([None, "support", "floor_unique"]))
    if set(stride) == {1} and policy is None:
        padding = None  # that of the window's centre alone keeps the coordinates
    return kernel, {"stride": stride, "dilation": dilation, "padding": padding, "out": policy}


@st.composite
def setups(draw, least=0):
    """(coords, dim, kernel, keywords)."""
    coords, dim = draw(clouds(least=least))
    return coords, dim, *draw(relations(dim))


def sparse(coords, dim, channels=2, seed=0, **more):
    """A SparseTensor with random features."""
    rng = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), channels, dtype=DTYPE, generator=rng)
    return cases.tensor(coords, feats, dim=dim, batch_size=2, **more)


def weight(kernel, c_in=2, c_out=3):
    """Random weight [C_out, *kernel, C_in]."""
    return torch.randn(c_out, *kernel, c_in, dtype=DTYPE, generator=torch.Generator().manual_seed(9))


def values(x):
    """{coordinate: features}; what remains of a tensor when its order is forgotten."""
    return dict(zip(cases.tuples(x), x.feats.tolist(), strict=True))


def assert_same(got, want):
    """Equal coordinates, features to rounding."""
    assert got.keys() == want.keys()
    for c in got:
        assert max(map(abs, (a - b for a, b in zip(got[c], want[c], strict=True))), default=0) < 1e-10, c


@FEW
@given(setups())
def test_any_convolution_equals_the_oracle(setup):
    coords, dim, kernel, keys = setup
    rel = oracle.relation(kernel, keys["stride"], keys["dilation"], keys["padding"])
    x, w = sparse(coords, dim), weight(kernel)
    y = pm.ops.conv(x, w, **keys)
    policy = keys["out"] or (
        "same" if set(keys["stride"]) == {1} else "floor_unique" if keys["padding"] is None else "support"
    )
    outs = {
        "same": lambda: coords,
        "support": lambda: oracle.support(coords, rel),
        "floor_unique": lambda: oracle.floor_unique(coords, rel.stride),
    }[policy]()
    assert cases.tuples(y) == outs
    pairs = oracle.forward_pairs(coords, outs, rel)
    want = oracle.conv(pairs, len(outs), cases.array(x.feats), cases.flat(w))
    cases.assert_close(y.feats, want, DTYPE, "features")


@FEW
@given(clouds(), st.randoms(use_true_random=False))
def test_permuting_rows_permutes_the_rows_of_a_same_convolution(cloud, rng):
    coords, dim = cloud
    order = list(range(len(coords)))
    rng.shuffle(order)
    x = sparse(coords, dim)
    shuffled = cases.tensor([coords[i] for i in order], x.feats[order], dim=dim, batch_size=2)
    w = weight((3,) * dim)
    torch.testing.assert_close(pm.ops.conv(shuffled, w).feats, pm.ops.conv(x, w).feats[order], atol=1e-12, rtol=0)


@FEW
@given(setups(), st.randoms(use_true_random=False))
def test_permuting_rows_changes_no_other_convolution(setup, rng):
    coords, dim, kernel, keys = setup
    order = list(range(len(coords)))
    rng.shuffle(order)
    x, w = sparse(coords, dim), weight(kernel)
    shuffled = cases.tensor([coords[i] for i in order], x.feats[order], dim=dim, batch_size=2)
    assert_same(values(pm.ops.conv(shuffled, w, **keys)), values(pm.ops.conv(x, w, **keys)))


@FEW
@given(setups(), st.lists(st.integers(-3, 3), min_size=3, max_size=3))
def test_translation_by_a_multiple_of_the_stride(setup, steps):
    coords, dim, kernel, keys = setup
    shift = steps[:dim]
    moved = [(c[0], *(a + t * s for a, t, s in zip(c[1:], shift, keys["stride"], strict=True))) for c in coords]
    x, w = sparse(coords, dim), weight(kernel)
    there = pm.ops.conv(cases.tensor(moved, x.feats, dim=dim, batch_size=2), w, **keys)
    back = {(c[0], *(a - t for a, t in zip(c[1:], shift, strict=True))): f for c, f in values(there).items()}
    assert_same(back, values(pm.ops.conv(x, w, **keys)))


@FEW
@given(setups())
def test_a_batch_is_its_items_one_by_one(setup):
    coords, dim, kernel, keys = setup
    x, w = sparse(coords, dim), weight(kernel)
    together, alone = values(pm.ops.conv(x, w, **keys)), {}
    for b in range(2):
        rows = [i for i, c in enumerate(coords) if c[0] == b]
        item = cases.tensor([(0, *coords[i][1:]) for i in rows], x.feats[rows], dim=dim, batch_size=1)
        y = values(pm.ops.conv(item, w, **keys))
        alone |= {(b, *c[1:]): f for c, f in y.items()}
    assert_same(together, alone)


@FEW
@given(setups())
def test_backward_is_the_adjoint(setup):
    """<conv(x), y> = <x, dgrad(y)> = <w, wgrad(y)>."""
    coords, dim, kernel, keys = setup
    x, w = sparse(coords, dim), weight(kernel).requires_grad_()
    feats = x.feats.requires_grad_()
    out = pm.ops.conv(x.replace(feats), w, **keys).feats
    y = torch.randn(out.shape, dtype=DTYPE, generator=torch.Generator().manual_seed(5))
    left = (out * y).sum()
    dx, dw = torch.autograd.grad(left, (feats, w))
    torch.testing.assert_close(left.detach(), (feats * dx).sum().detach(), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(left.detach(), (w * dw).sum().detach(), atol=1e-10, rtol=1e-10)


@FEW
@given(setups())
def test_the_inverse_convolution_is_the_adjoint_too(setup):
    """With the weight's channels exchanged, conv_inverse is what backward does."""
    coords, dim, kernel, keys = setup
    keys = keys | {"padding": keys["padding"] or (0,) * dim, "out": keys["out"] or "support"}
    x, w = sparse(coords, dim), weight(kernel)
    feats = x.feats.requires_grad_()
    down = pm.ops.conv(x.replace(feats), w, **keys)
    y = torch.randn(down.feats.shape, dtype=DTYPE, generator=torch.Generator().manual_seed(5))
    (dx,) = torch.autograd.grad((down.feats * y).sum(), feats, allow_unused=True)
    keys.pop("out")
    assert down.stride == keys["stride"]
    up = pm.ops.conv_inverse(down.replace(y), w.movedim(-1, 0).movedim(1, -1).contiguous(), x, **keys)
    torch.testing.assert_close(up.feats, dx, atol=1e-10, rtol=0)


@FEW
@given(setups(), st.floats(-3, 3), st.floats(-3, 3))
def test_linear_in_features_and_in_weights(setup, a, b):
    coords, dim, kernel, keys = setup
    x, w, v = sparse(coords, dim), weight(kernel), weight(kernel).flip(0)
    z = x.replace(sparse(coords, dim, seed=1).feats)

    def conv(t, k):
        return pm.ops.conv(t, k, **keys).feats

    mixed = conv(x.replace(a * x.feats + b * z.feats), w)
    torch.testing.assert_close(mixed, a * conv(x, w) + b * conv(z, w), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(conv(x, a * w + b * v), a * conv(x, w) + b * conv(x, v), atol=1e-10, rtol=1e-10)


@FEW
@given(setups(), st.integers(1, 2))
def test_groups_are_convolutions_side_by_side(setup, share):
    coords, dim, kernel, keys = setup
    x = sparse(coords, dim, channels=4)
    w = weight(kernel, 2, 2 * share)
    both = pm.ops.conv(x, w, groups=2, **keys).feats
    halves = [
        pm.ops.conv(x.replace(x.feats[:, 2 * g : 2 * g + 2]), w[share * g : share * (g + 1)], **keys).feats
        for g in range(2)
    ]
    torch.testing.assert_close(both, torch.cat(halves, 1), atol=1e-12, rtol=0)


@FEW
@given(setups(least=1))
def test_offsets_are_a_kernel_written_out(setup):
    """Custom offsets that list the taps of a window give the convolution of that window."""
    coords, dim, kernel, keys = setup
    x, w = sparse(coords, dim), weight(kernel)
    padding = keys["padding"] or oracle.default_padding(kernel, keys["dilation"])
    taps = [
        [d * r - p for r, d, p in zip(tap, keys["dilation"], padding, strict=True)]
        for tap in itertools.product(*map(range, kernel))
    ]
    policy = keys["out"] or "floor_unique"
    want = pm.ops.conv(x, w, **(keys | {"out": policy}))
    got = pm.ops.conv(x, w.flatten(1, -2), stride=keys["stride"], offsets=taps, out=policy)
    assert_same(values(got), values(want))


def map_of(geometry, kernel, keys):
    """The kernel map of a convolution with these options, and its outputs."""
    options = {name: keys[name] for name in ("stride", "padding", "dilation")}
    return pm.coords.kernel_map(geometry, pm.coords.Relation.of(geometry.dim, kernel, **options, policy=keys["out"]))


@FEW
@given(setups())
def test_a_kernel_map_transposed_twice_is_itself(setup):
    coords, dim, kernel, keys = setup
    geometry = sparse(coords, dim).geometry
    found, outputs = map_of(geometry, kernel, keys)
    assert (found.num_inputs, found.num_outputs) == (len(geometry), len(outputs))
    once, twice = found.transpose(), found.transpose().transpose()
    assert (once.num_inputs, once.num_outputs) == (found.num_outputs, found.num_inputs)
    for a, b in zip(found.pairs(), twice.pairs(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found.pairs().inputs, once.pairs().outputs)
    assert torch.equal(found.rows(), twice.rows())


@FEW
@given(setups())
def test_every_storage_of_a_kernel_map_is_the_same_set_of_pairs(setup):
    coords, dim, kernel, keys = setup
    rel = oracle.relation(kernel, keys["stride"], keys["dilation"], keys["padding"])
    geometry = sparse(coords, dim).geometry
    found, outputs = map_of(geometry, kernel, keys)
    pairs = found.pairs()
    taps = [k for k, size in enumerate(pairs.sizes.tolist()) for _ in range(size)]
    got = sorted(zip(taps, pairs.inputs.tolist(), pairs.outputs.tolist(), strict=True))
    assert got == sorted(oracle.forward_pairs(coords, cases.tuples(outputs.coords), rel))
    rows = found.rows()
    assert sorted((k, i, o) for o, row in enumerate(rows.tolist()) for k, i in enumerate(row) if i >= 0) == got
    assert found.counts().tolist() == [sum(i >= 0 for i in row) for row in rows.tolist()]
    bits = [sum(1 << k for k, i in enumerate(row) if i >= 0) for row in rows.tolist()]
    assert [row[0] for row in found.masks().tolist()] == bits
