"""Laws of sets of voxels: round trips, union, order. Found by hypothesis, small sizes."""

import cases
import oracle
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pumice as pm

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
DTYPE = torch.float64


@st.composite
def tensors(draw, dim, low=-4, high=4, channels=2):
    """A SparseTensor of distinct coordinates in any order."""
    voxel = st.tuples(st.integers(0, 1), *[st.integers(low, high)] * dim)
    coords = draw(st.lists(voxel, unique=True, max_size=14))
    seed = draw(st.integers(0, 99))
    rng = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), channels, dtype=DTYPE, generator=rng)
    return cases.tensor(coords, feats, dim=dim, batch_size=2)


@st.composite
def pairs_of_tensors(draw):
    """Two tensors of one dimension."""
    dim = draw(st.integers(1, 4))
    return draw(tensors(dim)), draw(tensors(dim))


def values(x):
    """{coordinate: features}."""
    return dict(zip(cases.tuples(x), x.feats.tolist(), strict=True))


@FEW
@given(pairs_of_tensors())
def test_union_commutes_and_is_in_order(two):
    a, b = two
    one, other = pm.union(a, b), pm.union(b, a)
    assert cases.tuples(one) == cases.tuples(other) == oracle.ordered([*cases.tuples(a), *cases.tuples(b)])
    torch.testing.assert_close(one.feats, other.feats, atol=1e-14, rtol=0)


@FEW
@given(pairs_of_tensors())
def test_union_with_nothing_and_with_itself(two):
    a, _ = two
    nothing = a.prune(torch.zeros(len(a), dtype=torch.bool))
    assert values(pm.union(a, nothing)) == values(a)
    assert values(pm.union(a, a)) == {c: [2 * v for v in f] for c, f in values(a).items()}


@FEW
@given(st.integers(1, 4).flatmap(lambda d: tensors(d, 0, 4)))
def test_from_dense_of_to_dense(x):
    dense = x.to_dense(spatial_shape=(5,) * x.spatial_dim)
    back = pm.from_dense(dense)
    assert cases.tuples(back) == oracle.ordered(cases.tuples(x))
    assert values(back) == values(x)
    assert torch.equal(back.to_dense(), dense)


@FEW
@given(st.integers(1, 4).flatmap(tensors))
def test_to_dense_and_origin(x):
    dense = x.to_dense(spatial_shape=(9,) * x.spatial_dim, origin=(-4,) * x.spatial_dim)
    assert values(pm.from_dense(dense)) == {(c[0], *(a + 4 for a in c[1:])): f for c, f in values(x).items()}


@FEW
@given(st.integers(1, 4).flatmap(tensors))
def test_split_then_collate(x):
    back = pm.collate(x.split())
    assert values(back) == values(x) and back.batch_size == x.batch_size


@FEW
@given(st.integers(1, 4).flatmap(tensors), st.randoms(use_true_random=False))
def test_prune_parts_unite_to_the_whole(x, rng):
    mask = torch.tensor([rng.random() < 0.5 for _ in range(len(x))], dtype=torch.bool)
    assert values(pm.union(x.prune(mask), x.prune(~mask))) == values(x)


@st.composite
def point_clouds(draw):
    """Points on a lattice of 1/8 (every quotient below is exact), batch, dimension."""
    dim = draw(st.integers(1, 4))
    point = st.tuples(*[st.integers(-20, 20)] * dim)
    points = draw(st.lists(point, max_size=25))
    batch = draw(st.lists(st.integers(0, 2), min_size=len(points), max_size=len(points)))
    shaped = torch.tensor(points, dtype=DTYPE).reshape(-1, dim) / 8
    return shaped, torch.tensor(batch, dtype=torch.int64)


@FEW
@given(point_clouds(), st.sampled_from([0.125, 0.5, 1.0]), st.sampled_from(["floor", "round"]))
def test_each_point_finds_its_voxel_again(cloud, size, rounding):
    points, batch = cloud
    x = pm.voxelize(points, size=size, batch=batch, rounding=rounding, batch_size=3, dim=points.shape[1])
    rows = cases.tuples(x)
    assert rows == oracle.ordered(rows)
    whole = (points / size).floor() if rounding == "floor" else (points / size + 0.5).floor()
    want = [(b, *map(int, p)) for b, p in zip(batch.tolist(), whole.tolist(), strict=True)]
    assert [rows[i] for i in x.inverse.tolist()] == want
    assert set(rows) == set(want)


@FEW
@given(point_clouds())
def test_sums_are_kept_and_means_lie_between(cloud):
    points, batch = cloud
    feats = torch.sin(7 * points.sum(1, keepdim=True))
    keys = {"size": 1.0, "batch": batch, "batch_size": 3, "dim": points.shape[1]}
    torch.testing.assert_close(
        pm.voxelize(points, feats, reduce="sum", **keys).feats.sum(), feats.sum(), atol=1e-10, rtol=0
    )
    low, mean = -pm.voxelize(points, -feats, reduce="max", **keys).feats, pm.voxelize(points, feats, **keys).feats
    high = pm.voxelize(points, feats, reduce="max", **keys).feats
    assert bool((low <= mean + 1e-12).all()) and bool((mean <= high + 1e-12).all())


@FEW
@given(point_clouds())
def test_voxelise_then_devoxelise_is_a_projection(cloud):
    """The mean of a voxel, given back to its points, voxelises to itself."""
    points, batch = cloud
    feats = torch.cos(points.sum(1, keepdim=True))
    keys = {"size": 1.0, "batch": batch, "batch_size": 3, "dim": points.shape[1]}
    x = pm.voxelize(points, feats, **keys)
    per_point = pm.devoxelize(x)
    again = pm.voxelize(points, per_point, **keys)
    assert cases.tuples(again) == cases.tuples(x)
    torch.testing.assert_close(again.feats, x.feats, atol=1e-12, rtol=0)
    torch.testing.assert_close(pm.devoxelize(x, points, batch), per_point, atol=0, rtol=0)


@FEW
@given(
    st.lists(st.tuples(st.integers(0, 3), *[st.integers(-(2**31), 2**31 - 1)] * 4), unique=True, max_size=20),
    st.integers(1, 4),
)
def test_morton_order_over_the_whole_of_int32(rows, dim):
    coords = list(dict.fromkeys(r[: 1 + dim] for r in rows))
    matrix = cases.table(coords, dim)
    bounds = pm.coords.Bounds.of(matrix)
    order = pm.coords.morton_argsort(matrix, bounds)
    assert [coords[i] for i in order.tolist()] == oracle.ordered(coords)
    distinct, place = pm.coords.morton_unique(torch.cat([matrix, matrix]), bounds)
    assert cases.tuples(distinct) == oracle.ordered(coords)
    assert torch.equal(distinct[place], torch.cat([matrix, matrix]))
