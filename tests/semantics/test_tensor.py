"""SparseTensor: sets of voxels (union, cat, prune), dense forms, batches, arithmetic, attributes."""

import cases
import numpy as np
import oracle
import pytest
import torch
from cases import compact, tensor, tuples

import pumice as pm
from pumice.errors import CoordinateError


def random_tensor(dim=3, channels=2, seed=0, batches=2, **more):
    """Random coordinates in random order, fp64 features."""
    coords = compact(dim, -3, 3, 15, batches, seed)
    rng = torch.Generator().manual_seed(seed)
    return tensor(coords, torch.randn(len(coords), channels, dtype=torch.float64, generator=rng), **more)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_attributes(dim):
    x = random_tensor(dim, 5, stride=2)
    assert (x.spatial_dim, x.channels, len(x), x.batch_size) == (dim, 5, x.coords.shape[0], 2)
    assert x.stride == (2,) * dim and x.spatial_shape is None
    assert x.dtype == torch.float64 and x.device == torch.device("cpu")
    assert x.coords.dtype == torch.int32 and x.geometry.coords is x.coords
    for word in (str(len(x)), "SparseTensor", "5"):
        assert word in repr(x)


def test_the_users_order_is_kept():
    coords = compact(2, -3, 3, 15)
    assert tuples(tensor(coords, torch.zeros(len(coords), 1))) == coords


def test_replace_shares_the_geometry():
    x = random_tensor()
    y = x.replace(torch.zeros(len(x), 9))
    assert y.geometry is x.geometry and y.channels == 9
    assert pm.same_geometry(x, y)


def test_same_geometry_is_identity_unless_checked():
    x, twin = random_tensor(), random_tensor()
    assert not pm.same_geometry(x, twin, check=False)
    assert pm.same_geometry(x, twin, check=True)
    assert not pm.same_geometry(x, random_tensor(seed=1), check=True)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_union_equals_the_oracle(dim):
    a, b = random_tensor(dim, seed=1), random_tensor(dim, seed=2)
    a, b = (t.replace(t.feats.clone().requires_grad_()) for t in (a, b))
    coords, want = oracle.union(tuples(a), cases.array(a.feats), tuples(b), cases.array(b.feats))
    got = pm.union(a, b)
    assert tuples(got) == coords
    cases.assert_close(got.feats, want, torch.float64, "features")
    dy = torch.randn_like(got.feats)
    got.feats.backward(dy)
    row = {c: i for i, c in enumerate(coords)}
    for t in (a, b):
        torch.testing.assert_close(t.feats.grad, dy[[row[c] for c in tuples(t)]])


def test_plus_is_the_union_of_different_geometries_and_a_sum_on_one():
    a, b = random_tensor(seed=1), random_tensor(seed=2)
    assert torch.equal((a + b).feats, pm.union(a, b).feats)
    twice = a + a.replace(a.feats * 2)
    assert twice.geometry is a.geometry and torch.equal(twice.feats, a.feats * 3)


def test_arithmetic():
    x = random_tensor()
    assert torch.equal((x + 1.5).feats, x.feats + 1.5)
    assert torch.equal((x * x).feats, x.feats * x.feats)
    assert torch.equal((x + torch.tensor([1.0, 2.0]).double()).feats, x.feats + torch.tensor([1.0, 2.0]).double())
    assert torch.equal((x * 2).feats, x.feats * 2)
    assert (x + 1.5).geometry is x.geometry


def test_cat_joins_channels():
    x = random_tensor()
    y = pm.cat([x, x.replace(torch.ones(len(x), 3, dtype=torch.float64))])
    assert y.geometry is x.geometry
    assert torch.equal(y.feats, torch.cat([x.feats, torch.ones(len(x), 3, dtype=torch.float64)], 1))


def test_prune_keeps_the_marked_voxels_in_morton_order():
    x = random_tensor()
    x = x.replace(x.feats.clone().requires_grad_())
    mask = torch.rand(len(x), generator=torch.Generator().manual_seed(3)) < 0.5
    y = x.prune(mask)
    kept = {c: x.feats[i].tolist() for i, c in enumerate(tuples(x)) if mask[i]}
    assert tuples(y) == oracle.ordered(kept)
    assert y.feats.tolist() == [kept[c] for c in tuples(y)]
    assert y.batch_size == x.batch_size and y.stride == x.stride
    y.feats.sum().backward()
    assert torch.equal(x.feats.grad, mask[:, None].double().expand(-1, 2))


def test_prune_all_and_none():
    x = random_tensor()
    nothing = x.prune(torch.zeros(len(x), dtype=torch.bool))
    assert len(nothing) == 0 and nothing.batch_size == 2 and nothing.channels == 2
    assert set(tuples(x.prune(torch.ones(len(x), dtype=torch.bool)))) == set(tuples(x))


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_to_dense_equals_the_oracle(dim):
    x = random_tensor(dim)
    got = x.to_dense(spatial_shape=(8,) * dim, origin=(-4,) * dim)
    want = oracle.dense(tuples(x), cases.array(x.feats), 2, (8,) * dim, (-4,) * dim)
    cases.assert_close(got, want, torch.float64, "dense")


def test_to_dense_takes_its_shape_from_the_tensor():
    coords = [(0, 1, 2), (1, 0, 0)]
    x = tensor(coords, torch.ones(2, 3), spatial_shape=(4, 5), batch_size=3)
    assert x.to_dense().shape == (3, 3, 4, 5)
    assert x.to_dense().sum() == 6


def test_to_dense_without_a_shape_holds_every_voxel():
    coords = [(0, -1, 2), (1, 3, 4)]
    x = tensor(coords, torch.ones(2, 1))
    assert x.to_dense().sum() == 2


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_from_dense_and_back(dim):
    rng = torch.Generator().manual_seed(0)
    dense = torch.randn(2, 3, *range(3, 3 + dim), dtype=torch.float64, generator=rng)
    dense *= torch.rand(2, 1, *range(3, 3 + dim), generator=rng) < 0.4
    x = pm.from_dense(dense)
    assert x.spatial_shape == tuple(dense.shape[2:]) and x.batch_size == 2
    assert torch.equal(x.to_dense(), dense)
    assert tuples(x) == oracle.ordered(tuples(x))
    assert len(x) == int((dense != 0).any(1).sum())


def test_from_dense_threshold_is_on_the_largest_magnitude():
    dense = torch.zeros(1, 2, 4)
    dense[0, :, 1] = torch.tensor([0.5, -2.0])
    dense[0, :, 2] = torch.tensor([1.0, -1.0])
    dense[0, :, 3] = torch.tensor([0.5, 0.1])
    assert [c[1] for c in tuples(pm.from_dense(dense, threshold=1.0))] == [1]
    assert [c[1] for c in tuples(pm.from_dense(dense, threshold=0.7))] == [1, 2]
    assert len(pm.from_dense(torch.zeros(2, 3, 4, 4))) == 0


def test_gradients_through_dense_forms():
    dense = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    dense[:, :, 1] = 0
    dense.requires_grad_()
    dy = torch.randn_like(dense)
    (pm.from_dense(dense).to_dense() * dy).sum().backward()
    assert torch.equal(dense.grad, torch.where((dense != 0).any(1, keepdim=True), dy, 0))


def test_collate_and_split_are_inverse():
    items = [random_tensor(seed=s, batches=1) for s in (1, 2, 3)]
    x = pm.collate(items)
    assert x.batch_size == 3 and len(x) == sum(map(len, items))
    assert set(tuples(x)) == {(b, *c[1:]) for b, item in enumerate(items) for c in tuples(item)}
    back = x.split()
    assert len(back) == 3
    for item, part in zip(items, back, strict=True):
        assert part.batch_size == 1
        values = dict(zip(tuples(item), item.feats.tolist(), strict=True))
        assert dict(zip(tuples(part), part.feats.tolist(), strict=True)) == values


def test_collate_of_batches_and_of_empty_items():
    a, b = random_tensor(batches=2, seed=1), tensor([], torch.zeros(0, 2, dtype=torch.float64), dim=3, batch_size=1)
    x = pm.collate([a, b, a])
    assert x.batch_size == 5
    assert {c[0] for c in tuples(x)} == {0, 1, 3, 4}
    assert [len(part) for part in x.split()] == [15, 15, 0, 15, 15]


def test_collate_leaves_points_without_a_voxel_without_one():
    x = pm.voxelize(torch.tensor([[0.5], [9.5], [1.5]]), size=1.0, spatial_shape=[4], dim=1)
    assert pm.collate([x, x]).inverse.tolist() == [0, -1, 1, 2, -1, 3]


def test_split_shows_missing_batch_items_as_empty():
    x = tensor([(0, 1), (2, 5)], torch.ones(2, 1), batch_size=4)
    assert [len(part) for part in x.split()] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32), ("double", torch.float64)],
)
def test_casts_keep_the_geometry(method, dtype):
    x = random_tensor()
    y = getattr(x, method)()
    assert y.dtype == dtype and y.geometry is x.geometry
    assert x.to(dtype).dtype == dtype and x.to(dtype).coords.dtype == torch.int32


def test_detach_and_requires_grad():
    x = random_tensor()
    assert x.requires_grad_() is x or x.requires_grad_().feats.requires_grad
    assert not x.detach().feats.requires_grad
    assert x.detach().geometry is x.geometry


def test_to_a_device_moves_coordinates_and_features(device):
    x = random_tensor().to(device)
    assert x.feats.device.type == device and x.coords.device.type == device and x.geometry.device.type == device
    assert x.cpu().device.type == "cpu"
    y = pm.ops.conv(x, torch.randn(2, 3, 3, 3, 2, dtype=torch.float64, device=device))
    assert y.device.type == device


def test_maps_survive_a_move_and_still_agree(device):
    x = random_tensor()
    w = torch.randn(2, 3, 3, 3, 2, dtype=torch.float64)
    before = pm.ops.conv(pm.ops.conv(x, w), w, stride=2)
    far = x.to(device)
    after = pm.ops.conv(pm.ops.conv(far, w.to(device)), w.to(device), stride=2)
    assert tuples(before) == tuples(after)
    np.testing.assert_allclose(cases.array(before.feats), cases.array(after.feats), atol=1e-12)


def test_sums_and_differences_of_different_geometries():
    a, b = random_tensor(seed=1), random_tensor(seed=2)
    assert torch.equal((a - b).feats, pm.union(a, b.replace(-b.feats)).feats)
    assert torch.equal((2.0 * a).feats, a.feats * 2) and torch.equal((a / 2).feats, a.feats / 2)


def test_union_of_dtypes_promotes():
    a, b = random_tensor(seed=1), random_tensor(seed=2).float()
    assert pm.union(a, b).dtype == torch.float64


def test_the_frame_of_voxelize_survives_sets_and_pools():
    points = torch.rand(40, 2, dtype=torch.float64) * 8
    x = pm.voxelize(points, size=0.5, dim=2)
    at = pm.devoxelize(x, points)
    torch.testing.assert_close(pm.devoxelize(x.prune(torch.ones(len(x), dtype=torch.bool)), points), at)
    torch.testing.assert_close(pm.devoxelize(pm.union(x, x * 0), points), at)
    both = pm.collate([x, x])
    torch.testing.assert_close(pm.devoxelize(both, points, torch.ones(40, dtype=torch.int64)), at)
    assert torch.equal(both.feats[both.inverse], torch.cat([x.feats[x.inverse]] * 2))


@pytest.mark.parametrize("written", ["in place", "data", "numpy"])
def test_the_callers_coordinates_may_be_written_afterwards(written):
    coords = torch.cartesian_prod(torch.zeros(1), *[torch.arange(3.0)] * 3).int()
    before, x = coords.clone(), pm.SparseTensor(torch.ones(27, 1), coords)
    {"in place": coords, "data": coords.data, "numpy": coords.numpy()}[written][:, 1:] *= 3
    assert torch.equal(x.coords, before)
    sums = pm.ops.conv(x, torch.ones(1, 3, 3, 3, 1)).feats
    assert sums.max() == 27 and sums.min() == 8


def test_coordinates_made_in_inference_serve_training():
    weight = torch.ones(1, 3, 3, 3, 1, requires_grad=True)
    with torch.inference_mode():
        coords = torch.zeros(1, 4, dtype=torch.int32)
        x = pm.SparseTensor(torch.ones(1, 1), coords)
    assert not x.coords.is_inference()
    pm.ops.conv(pm.SparseTensor(torch.ones(1, 1), x.geometry), weight).feats.sum().backward()


def test_cat_of_equal_coordinates_made_apart():
    x, twin = random_tensor(), random_tensor()
    assert torch.equal(pm.cat([x, twin]).feats, torch.cat([x.feats, twin.feats], dim=1))


def test_integers_of_other_libraries():
    x = random_tensor(3, 2)
    weight = torch.ones(1, 2, 2, 2, 2, dtype=torch.float64)
    strided = pm.ops.conv(x, weight, stride=np.int64(2))
    assert torch.equal(strided.feats, pm.ops.conv(x, weight, stride=2).feats)
    assert pm.nn.Conv3d(2, 4, np.int64(3)).weight.shape == (4, 3, 3, 3, 2)
    assert pm.SparseTensor(x.feats, x.coords, np.int64(2)).stride == (2, 2, 2)


SWAPPED = torch.cartesian_prod(torch.arange(150), torch.arange(0, 90, 30), torch.arange(0, 90, 30), torch.arange(2))


@pytest.mark.parametrize("make", [pm.SparseTensor, pm.coalesce])
@pytest.mark.parametrize(
    ("coords", "words"),
    [
        pytest.param(SWAPPED, ("150 batch items", "(61, 61, 2)", "(x, y, z, batch)"), id="batch last"),
        pytest.param(torch.tensor([[2**15, 5, 5, 5]]), ("32769 batch items",), id="coordinates first"),
    ],
)
def test_batch_columns_that_look_like_coordinates_warn(make, coords, words):
    with pytest.warns(UserWarning, match="batch_size") as caught:
        make(torch.ones(len(coords), 1), coords.int())
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(word in str(caught[0].message) for word in words), caught[0].message


def test_batches_that_are_meant_do_not_warn():
    feats = torch.ones(len(SWAPPED), 1)
    assert pm.SparseTensor(feats, SWAPPED.int(), batch_size=150).batch_size == 150
    flat = pm.SparseTensor(feats[:150], SWAPPED[::18].int() * torch.tensor([1, 0, 0, 0], dtype=torch.int32))
    assert flat.batch_size == 150
    assert pm.SparseTensor(feats[:1], torch.tensor([[2**15 - 1, 5, 5, 5]], dtype=torch.int32)).batch_size == 2**15
    blocks = torch.cartesian_prod(torch.arange(200), *[torch.arange(8)] * 3).int()
    assert pm.SparseTensor(torch.ones(len(blocks), 1), blocks).batch_size == 200


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_other_numbers_of_axes_are_named(dim):
    coords = torch.arange(9, dtype=torch.int32).view(9, 1).repeat(1, 1 + dim)
    assert pm.SparseTensor(torch.ones(9, 1), coords, dim=dim).spatial_dim == dim
    assert pm.coalesce(torch.ones(9, 1), coords, dim=dim).spatial_dim == dim
    assert pm.voxelize(torch.rand(9, dim), size=0.5, dim=dim).spatial_dim == dim
    net = pm.exportable(torch.nn.Identity(), dim=dim)
    assert torch.equal(net(coords, torch.ones(9, 1))[0], coords)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("before", [True, False])
def test_coordinates_written_in_place_are_refused(mode, before):
    with mode():
        layer = pm.nn.Conv3d(2, 2, 3)
        x = pm.SparseTensor(torch.rand(2, 2), torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.int32))
        if before:
            layer(x)
        x.coords[1, 1] += 5
        for use in (layer, lambda x: pm.interpolate(x, torch.rand(1, 4)), lambda x: x.to("meta")):
            with pytest.raises(CoordinateError, match="the 2 coordinates .* written to in place.*a new SparseTensor"):
                use(x)
        assert "2 voxels" in repr(x) and "2 voxels" in repr(x.geometry)
        layer(pm.SparseTensor(x.feats, x.coords))


def test_outputs_written_in_place_are_refused():
    down = pm.nn.Conv3d(2, 2, 2, stride=2)
    x = pm.SparseTensor(torch.rand(2, 2), torch.tensor([[0, 0, 0, 0], [0, 4, 0, 0]], dtype=torch.int32))
    down(x).coords[:, 2] += 1
    with pytest.raises(CoordinateError, match="written to in place"):
        down(x)


@pytest.mark.parametrize(("given", "device"), [((), "cuda"), ((1,), "cuda:1"), (("cuda:2",), "cuda:2")])
def test_cuda_takes_what_torch_takes(monkeypatch, given, device):
    asked = []
    monkeypatch.setattr(pm.SparseTensor, "to", lambda self, *args, **options: asked.append((*args, options)))
    random_tensor().cuda(*given, non_blocking=True)
    assert asked == [(torch.device(device), {"non_blocking": True})]
