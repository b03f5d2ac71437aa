"""Sizes and layouts at the edge: no voxel, one voxel, a missing batch item, odd channels, strided memory."""

import weakref

import cases
import oracle
import pytest
import torch
from cases import Case

import pumice as pm
from pumice.runtime.launch import without_collection


def ops_of(dim):
    """(name, function of (x, weight [C_out, 3.., C_in])) of every operator that takes a SparseTensor."""
    return {
        "same": lambda x, w: pm.ops.conv(x, w),
        "floor": lambda x, w: pm.ops.conv(x, w, stride=2),
        "support": lambda x, w: pm.ops.conv(x, w, stride=2, padding=1),
        "dilating": lambda x, w: pm.ops.conv(x, w, out="support"),
        "given": lambda x, w: pm.ops.conv(x, w, out=x),
        "transposed": lambda x, w: pm.ops.conv_transpose(x, w, stride=2),
        "generative": lambda x, w: pm.ops.conv_transpose(x, w, stride=2, padding=None, bounded=False),
        "inverse": lambda x, w: pm.ops.conv_inverse(pm.ops.max_pool(x, 3, stride=2), w, x, stride=2),
        "max_pool": lambda x, w: pm.ops.max_pool(x, 2),
        "avg_pool": lambda x, w: pm.ops.avg_pool(x, 2),
        "sum_pool": lambda x, w: pm.ops.sum_pool(x, 2),
    }


NAMES = list(ops_of(1))


@pytest.mark.parametrize("spatial", [False, True], ids=["free", "bounded"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_no_voxel(dim, name, spatial, device):
    feats = torch.zeros(0, 2, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(2, *[3] * dim, 2, dtype=torch.float64, device=device, requires_grad=True)
    x = cases.tensor([], feats, dim=dim, batch_size=2, spatial_shape=(8,) * dim if spatial else None)
    y = ops_of(dim)[name](x, w)
    assert len(y) == 0 and y.channels == 2 and y.batch_size == 2 and y.spatial_dim == dim
    y.feats.sum().backward()
    assert feats.grad is not None and feats.grad.shape == (0, 2)
    if w.grad is not None:
        assert w.grad.abs().max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_empty_without_a_batch_size(name):
    x = cases.tensor([], torch.zeros(0, 2), dim=2)
    y = ops_of(2)[name](x, torch.randn(2, 3, 3, 2))
    assert len(y) == 0 and y.batch_size == x.batch_size


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "coords",
    [
        [(0, 3, 3)],
        [(0, 2, -5), (1, -1, 0), (2, 7, 7)],
        [(0, 0, 0), (2, 1, 1), (2, 0, 0)],
        [(3, 0, 0)],
    ],
    ids=["one", "one-per-batch", "missing-batch", "only-the-last"],
)
def test_few_voxels(coords, name, device):
    """Each operator on few voxels equals itself on each batch item alone."""
    feats = torch.randn(len(coords), 2, dtype=torch.float64, device=device)
    w = torch.randn(2, 3, 3, 2, dtype=torch.float64, device=device)
    y = ops_of(2)[name](cases.tensor(coords, feats, batch_size=4), w)
    assert y.batch_size == 4
    together = dict(zip(cases.tuples(y), y.feats.tolist(), strict=True))
    alone = {}
    for b in {c[0] for c in coords}:
        rows = [i for i, c in enumerate(coords) if c[0] == b]
        item = cases.tensor([(0, *coords[i][1:]) for i in rows], feats[rows])
        z = ops_of(2)[name](item, w)
        alone |= {(b, *c[1:]): f for c, f in zip(cases.tuples(z), z.feats.tolist(), strict=True)}
    assert together.keys() == alone.keys()
    for c, f in together.items():
        assert f == pytest.approx(alone[c], abs=1e-12)


@pytest.mark.parametrize(
    ("c_in", "c_out", "groups"),
    [(1, 1, 1), (1, 7, 1), (7, 1, 1), (3, 5, 1), (13, 11, 1), (33, 65, 1), (9, 3, 3), (15, 25, 5), (7, 7, 7)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_odd_channels(c_in, c_out, groups, dtype, device):
    cases.check(Case("odd", (3, 3), channels=(c_in, c_out), groups=groups, voxels=9), dtype, device)


def layouts(t):
    """The same numbers in other memory layouts: every second column, every second row, transposed, expanded rows."""
    wide = torch.zeros(t.shape[0], 2 * t.shape[1], dtype=t.dtype, device=t.device)
    wide[:, ::2] = t
    tall = torch.zeros(2 * t.shape[0], t.shape[1], dtype=t.dtype, device=t.device)
    tall[::2] = t
    offset = torch.cat([t.new_zeros(3), t.flatten()])[3:].view_as(t)
    return {"columns": wide[:, ::2], "rows": tall[::2], "transposed": t.t().contiguous().t(), "offset": offset}


@pytest.mark.parametrize("layout", ["columns", "rows", "transposed", "offset"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_features_need_not_be_contiguous(layout, dtype, device):
    ops = cases.operands(Case("layout", (3, 3)), dtype, device)
    want = pm.ops.conv(cases.tensor(ops.coords, ops.feats), ops.weight, ops.bias).feats
    (gx, gw) = torch.autograd.grad(want.pow(2).sum(), (ops.feats, ops.weight))
    strided = layouts(ops.feats.detach())[layout].requires_grad_()
    got = pm.ops.conv(cases.tensor(ops.coords, strided), ops.weight, ops.bias).feats
    (hx, hw) = torch.autograd.grad(got.pow(2).sum(), (strided, ops.weight))
    for a, b in ((got, want), (hx, gx), (hw, gw)):
        torch.testing.assert_close(a, b)


def test_weights_and_gradients_need_not_be_contiguous(device):
    ops = cases.operands(Case("layout", (3, 3)), device=device)
    x = cases.tensor(ops.coords, ops.feats)
    swapped = ops.weight.detach().movedim(-1, 1).contiguous().movedim(1, -1).requires_grad_()
    assert not swapped.is_contiguous()
    a, b = pm.ops.conv(x, ops.weight).feats, pm.ops.conv(x, swapped).feats
    torch.testing.assert_close(a, b)
    expanded = torch.ones(1, 1, dtype=torch.float64, device=device).expand_as(a)
    (ga,) = torch.autograd.grad(a, ops.weight, expanded)
    (gb,) = torch.autograd.grad(b, swapped, layouts(expanded.contiguous())["columns"])
    torch.testing.assert_close(ga, gb)


def test_coordinates_need_not_be_contiguous(device):
    ops = cases.operands(Case("layout", (3, 3)), device=device)
    matrix = cases.table(ops.coords, 2, device)
    strided = matrix.t().contiguous().t()
    want = pm.ops.conv(pm.SparseTensor(ops.feats, matrix, dim=2), ops.weight, stride=2)
    got = pm.ops.conv(pm.SparseTensor(ops.feats, strided, dim=2), ops.weight, stride=2)
    assert cases.tuples(got) == cases.tuples(want) and torch.equal(got.feats, want.feats)


def test_many_taps(device):
    """K = 125 and 343: more taps than a machine word has bits."""
    for size in (5, 7):
        case = Case("wide", (size,) * 3, channels=(1, 2), voxels=20)
        ops = cases.operands(case, device=device)
        y = cases.run(case, ops)
        pairs = oracle.forward_pairs(ops.coords, ops.coords, case.relation)
        want = oracle.conv(pairs, len(y), cases.array(ops.feats), cases.flat(ops.weight), cases.array(ops.bias))
        cases.assert_close(y.feats, want, torch.float64, "features")
        found, _ = pm.coords.kernel_map(y.geometry, pm.coords.Relation.of(3, size))
        bits = [[k for k in range(size**3) if word[k // 31] >> (k % 31) & 1] for word in found.masks().tolist()]
        assert bits == [sorted(k for k, _, o in pairs if o == row) for row in range(len(y))]


def test_results_do_not_depend_on_the_run(device):
    """Bitwise the same twice, forward and backward."""
    ops = cases.operands(Case("again", (3, 3, 3), channels=(8, 8)), torch.float32, device)

    def once():
        y = pm.ops.conv(cases.tensor(ops.coords, ops.feats), ops.weight, stride=2)
        return y.coords, y.feats, *torch.autograd.grad(y.feats.pow(2).sum(), (ops.feats, ops.weight))

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name):
    coords = cases.compact(2, -3, 3, 10)
    feats, w = torch.randn(len(coords), 2), torch.randn(2, 3, 3, 2)
    x = cases.tensor(coords, feats)
    before = [t.clone() for t in (x.feats, x.coords, w)]
    ops_of(2)[name](x, w)
    for a, b in zip(before, (x.feats, x.coords, w), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_of_many_low_precision_values(dtype, device):
    """Neither the sum nor the count of a mean has to fit the dtype of the result."""
    points = torch.rand(5000, 1, device=device)
    feats = torch.full((5000, 1), 30.0, dtype=dtype, device=device)
    assert pm.voxelize(points, feats, size=1.0, dim=1).feats.item() == 30.0
    coords = [(0, i) for i in range(5000)]
    x = cases.tensor(coords, feats)
    assert pm.ops.global_avg_pool(x).item() == 30.0


def test_means_of_values_whose_sum_overflows(device):
    """40000 eight times in fp16, which ends at 65504."""
    large = cases.tensor([(0, i) for i in range(8)], torch.full((8, 1), 40000.0, dtype=torch.float16, device=device))
    assert pm.ops.avg_pool(large, 8).feats.item() == 40000.0
    at = torch.tensor([[0, 3.0]], dtype=torch.float64, device=device)
    assert pm.interpolate(large, at, "trilinear").item() == 40000.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_many_low_precision_points_are_summed_wide(dtype, device):
    """A sum of ones in halves ends at 2048, in bfloat16 at 256."""
    x = pm.voxelize(torch.rand(4096, 1, device=device), size=1.0, dim=1)
    feats = torch.zeros(1, 1, dtype=dtype, device=device, requires_grad=True)
    pm.devoxelize(x.replace(feats)).sum(dtype=torch.float32).backward()
    assert feats.grad is not None and feats.grad.item() == 4096.0


def test_nan_is_seen_and_not_lost():
    """A NaN in the features reaches what depends on it and nothing else."""
    coords = [(0, 0), (0, 1), (0, 8)]
    x = cases.tensor(coords, torch.tensor([[1.0], [float("nan")], [2.0]]))
    for pool in (pm.ops.max_pool, pm.ops.avg_pool, pm.ops.sum_pool):
        y = pool(x, 2).feats
        assert y[0].isnan() and y[1] == 2.0
    assert pm.ops.global_max_pool(x).isnan().all()
    assert (
        pm.voxelize(torch.tensor([[0.1], [0.2]]), torch.tensor([[1.0], [float("nan")]]), size=1.0, reduce="max", dim=1)
        .feats.isnan()
        .all()
    )
    y = pm.ops.conv(x, torch.ones(1, 3, 1)).feats
    assert y[:2].isnan().all() and y[2] == 2.0
    dense = torch.tensor([[[0.0, float("nan"), 3.0]]])
    assert cases.tuples(pm.from_dense(dense)) == [(0, 1), (0, 2)]


def test_infinities_stay_where_they_are():
    """The pairs of a map are few; nothing is multiplied by zero instead of left out."""
    x = cases.tensor([(0, 0), (0, 8)], torch.tensor([[float("inf")], [2.0]]))
    assert pm.ops.conv(x, torch.ones(1, 3, 1)).feats[1] == 2.0
    assert pm.interpolate(x, torch.tensor([[0, 8.5]]), "trilinear").item() == 2.0


@pytest.mark.parametrize("name", NAMES)
def test_tensors_leave_no_cycle_behind(name):
    """Memory goes when the last reference goes, not when the garbage collector comes."""
    coords = cases.compact(2, -3, 3, 10)
    x = cases.tensor(coords, torch.randn(len(coords), 2, requires_grad=True))
    with without_collection():
        y = ops_of(2)[name](x, torch.randn(2, 3, 3, 2))
        y.feats.sum().backward()
        alive = weakref.ref(x.geometry), weakref.ref(y.geometry)
        del x, y
        assert [a() for a in alive] == [None, None]
