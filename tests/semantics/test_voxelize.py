"""From points to voxels, against the oracle."""

import cases
import numpy as np
import oracle
import pytest
import torch

import pumice as pm

REDUCE = ["mean", "sum", "max", "first"]


def points_of(count=60, dim=3, seed=0):
    """Points in a few hundred voxels of size 1/4, several to a voxel, mixed batches."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, dim)), rng.integers(0, 3, count), rng.normal(size=(count, 4))


def voxels_of(points, batch, size, origin, rounding):
    """(batch, voxel) of each point by the oracle."""
    return [(int(b), *oracle.voxel_of(p, size, origin, rounding)) for p, b in zip(points, batch, strict=True)]


@pytest.mark.parametrize("rounding", ["floor", "round"])
@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_voxelize_equals_the_oracle(dim, reduce, rounding, device):
    points, batch, feats = points_of(dim=dim)
    size, origin = (0.7, 0.45, 1.3, 0.9)[:dim], (0.05, -0.3, 0.0, 2.0)[:dim]
    leaf = torch.from_numpy(feats).to(device).requires_grad_()
    x = pm.voxelize(
        torch.from_numpy(points).to(device),
        leaf,
        size,
        torch.from_numpy(batch).to(device),
        origin,
        rounding,
        reduce,
        dim=dim,
    )
    coords, want, inverse = oracle.voxelise(voxels_of(points, batch, size, origin, rounding), feats, reduce)
    assert cases.tuples(x) == coords, cases.diff(cases.tuples(x), coords)
    assert x.inverse.dtype == torch.int64 and x.inverse.tolist() == inverse
    cases.assert_close(x.feats, want, torch.float64, "features")
    assert x.coords.dtype == torch.int32 and x.spatial_dim == dim


@pytest.mark.parametrize("reduce", REDUCE)
def test_gradient_of_voxelize(reduce, device):
    points, batch, feats = points_of(count=25)
    leaf = torch.from_numpy(feats).to(device).requires_grad_()
    x = pm.voxelize(torch.from_numpy(points).to(device), leaf, 1.0, torch.from_numpy(batch).to(device), reduce=reduce)
    dy = torch.randn(x.feats.shape, dtype=torch.float64).to(device)
    x.feats.backward(dy)
    members = {i: [p for p, j in enumerate(x.inverse.tolist()) if j == i] for i in range(len(x))}
    want = np.zeros_like(feats)
    for p, i in enumerate(x.inverse.tolist()):
        for c in range(feats.shape[1]):
            best = max(members[i], key=lambda q, c=c: feats[q, c])
            share = {
                "mean": 1 / len(members[i]),
                "sum": 1.0,
                "max": float(best == p),
                "first": float(members[i][0] == p),
            }[reduce]
            want[p, c] = share * dy[i, c].item()
    cases.assert_close(leaf.grad, want, torch.float64, "gradient")


def test_without_features_the_points_are_the_features():
    points, _, _ = points_of()
    x = pm.voxelize(torch.from_numpy(points), size=0.5)
    _, want, _ = oracle.voxelise(voxels_of(points, np.zeros(60), (0.5,) * 3, (0.0,) * 3, "floor"), points, "mean")
    cases.assert_close(x.feats, want, torch.float64, "features")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_points_on_voxel_faces_and_below_zero(dtype):
    """A face belongs to the voxel above it; -0.0 is 0; halves round up. All numbers are exact in fp32."""
    points = torch.tensor([[-1.0], [-0.75], [-0.5], [-0.25], [-0.0], [0.25], [0.5], [0.75], [1.0], [1.25]], dtype=dtype)
    x = pm.voxelize(points, size=0.5, dim=1)
    assert x.coords[x.inverse, 1].tolist() == [-2, -2, -1, -1, 0, 0, 1, 1, 2, 2]
    x = pm.voxelize(points, size=0.5, rounding="round", dim=1)
    assert x.coords[x.inverse, 1].tolist() == [-2, -1, -1, 0, 0, 1, 1, 2, 2, 3]


def test_every_float32_point_is_in_its_voxel():
    """Sizes like 0.1 are no float32 numbers: the voxel is that of the exact quotient of what was given."""
    rng = np.random.default_rng(9)
    points = (rng.integers(-4000, 4000, (3000, 1)) * 0.1).astype(np.float32)
    x = pm.voxelize(torch.from_numpy(points), size=0.1, dim=1)
    want = [oracle.voxel_of(p, (0.1,), (0.0,), "floor")[0] for p in points]
    assert x.coords[x.inverse, 1].tolist() == want


def test_origin_min_floor_starts_at_zero():
    points, _, _ = points_of()
    x = pm.voxelize(torch.from_numpy(points), size=0.5, origin="min")
    assert x.coords[:, 1:].min(0).values.tolist() == [0, 0, 0]
    low = tuple(points.min(0))
    coords, _, inverse = oracle.voxelise(voxels_of(points, np.zeros(60), (0.5,) * 3, low, "floor"), points, "mean")
    assert cases.tuples(x) == coords and x.inverse.tolist() == inverse


def test_origin_min_round_is_the_published_rule():
    """MinkUNet on SemanticKITTI: round(p / size), then subtract the smallest."""
    points, _, _ = points_of()
    x = pm.voxelize(torch.from_numpy(points), size=0.5, origin="min", rounding="round")
    whole = np.round(points / 0.5).astype(int)
    want = [(0, *map(int, v)) for v in whole - whole.min(0)]
    coords, _, inverse = oracle.voxelise(want, points, "mean")
    assert cases.tuples(x) == coords and x.inverse.tolist() == inverse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", REDUCE)
def test_voxelize_in_low_precision(dtype, reduce, device):
    points, batch, feats = points_of()
    low = torch.from_numpy(feats).to(dtype).to(device)
    x = pm.voxelize(torch.from_numpy(points).to(device), low, 1.0, torch.from_numpy(batch).to(device), reduce=reduce)
    _, want, _ = oracle.voxelise(voxels_of(points, batch, (1.0,) * 3, (0.0,) * 3, "floor"), cases.array(low), reduce)
    assert x.feats.dtype == dtype
    cases.assert_close(x.feats, want, dtype, "features")


def test_integer_points_and_features_that_are_no_floats():
    """The rows of points decide; what rides along may be labels kept with "first"."""
    points = torch.tensor([[0.1, 0.1], [0.2, 0.3], [5.0, 5.0]])
    x = pm.voxelize(points, torch.tensor([[3.0], [4.0], [5.0]]), size=1.0, reduce="first", dim=2)
    assert x.feats.flatten().tolist() == [3.0, 5.0]


def test_batch_size_is_kept_or_found():
    points, batch = torch.rand(6, 2), torch.tensor([0, 0, 2, 2, 2, 0])
    assert pm.voxelize(points, size=0.5, batch=batch, dim=2).batch_size == 3
    assert pm.voxelize(points, size=0.5, batch=batch, batch_size=5, dim=2).batch_size == 5
    assert pm.voxelize(points, size=0.5, dim=2).batch_size == 1


def test_points_outside_the_spatial_shape_are_left_out():
    points = torch.tensor([[0.5, 0.5], [2.5, 0.5], [-0.5, 0.5], [1.5, 1.5]])
    x = pm.voxelize(points, torch.arange(4.0)[:, None], size=1.0, spatial_shape=(2, 2), dim=2)
    assert x.spatial_shape == (2, 2)
    assert cases.tuples(x) == [(0, 0, 0), (0, 1, 1)]
    assert x.inverse.tolist() == [0, -1, -1, 1]


@pytest.mark.parametrize("reduce", REDUCE)
def test_no_point_and_one_point(reduce):
    x = pm.voxelize(torch.zeros(0, 3), torch.zeros(0, 2), size=1.0, reduce=reduce)
    assert len(x) == 0 and x.channels == 2 and x.spatial_dim == 3 and x.inverse.shape == (0,)
    x = pm.voxelize(torch.tensor([[0.5, 0.5, 0.5]]), torch.tensor([[7.0]]), size=1.0, reduce=reduce)
    assert cases.tuples(x) == [(0, 0, 0, 0)] and x.feats.tolist() == [[7.0]]


@pytest.mark.parametrize("form", [np.asarray, np.ndarray.tolist])
def test_points_features_and_items_may_be_arrays_or_lists(form):
    points, feats, batch = np.random.default_rng(0).random((9, 3)), np.ones((9, 2)), np.arange(9) % 2
    found = pm.voxelize(form(points), form(feats), 0.25, form(batch), spatial_shape=4)
    want = pm.voxelize(*map(torch.from_numpy, (points, feats)), 0.25, torch.from_numpy(batch), spatial_shape=(4, 4, 4))
    assert torch.equal(found.coords, want.coords) and found.spatial_shape == (4, 4, 4)


@pytest.mark.parametrize("size", [np.float64(0.5), torch.tensor(0.5), np.full(3, 0.5), torch.full((3,), 0.5)])
def test_sizes_of_other_libraries(size):
    points = torch.rand(9, 3)
    assert torch.equal(pm.voxelize(points, size=size).coords, pm.voxelize(points, size=0.5).coords)
