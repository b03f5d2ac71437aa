"""Rows of equal coordinates merged into one."""

import cases
import oracle
import pytest
import torch

import pumice as pm
from pumice.ops.pool import REDUCTIONS
from pumice.testing import random_cloud

COORDS = torch.tensor([[0, 2, 0], [1, 0, 0], [0, -1, 3], [0, 2, 0], [0, 0, 1], [0, 2, 0]], dtype=torch.int32)
FEATS = torch.tensor([[1.0, 8.0], [2.0, 7.0], [3.0, 6.0], [6.0, 2.0], [5.0, 4.0], [2.0, 5.0]])
# In (batch, Morton) order: (0, -1, 3), (0, 0, 1), (0, 2, 0), (1, 0, 0).
ROWS = [(0, -1, 3), (0, 0, 1), (0, 2, 0), (1, 0, 0)]
INVERSE = [2, 3, 0, 2, 1, 2]
MERGED = {"mean": [3.0, 5.0], "sum": [9.0, 15.0], "max": [6.0, 8.0], "first": [1.0, 8.0]}
# What of a gradient of one for the merged voxel reaches the rows 0, 3 and 5, per channel.
SHARES = {
    "mean": [[1 / 3, 1 / 3]] * 3,
    "sum": [[1.0, 1.0]] * 3,
    "max": [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]],
    "first": [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
}


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_values_by_hand(reduce, device):
    y = pm.coalesce(FEATS.to(device), COORDS.to(device), reduce, dim=2)
    assert cases.tuples(y) == ROWS and y.coords.dtype == torch.int32
    assert y.inverse.dtype == torch.int64 and y.inverse.tolist() == INVERSE
    want = torch.tensor([[3.0, 6.0], [5.0, 4.0], MERGED[reduce], [2.0, 7.0]])
    torch.testing.assert_close(y.feats.cpu(), want, rtol=0, atol=0)
    assert y.batch_size == 2 and y.stride == (1, 1) and y.spatial_shape is None


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_by_hand(reduce, device):
    leaf = FEATS.clone().to(device).requires_grad_()
    y = pm.coalesce(leaf, COORDS.to(device), reduce, dim=2)
    y.feats.backward(torch.tensor([[10.0], [20.0], [1.0], [30.0]]).expand(4, 2).to(device))
    want = torch.tensor([[0.0], [30.0], [10.0], [0.0], [20.0], [0.0]]).repeat(1, 2)
    want[[0, 3, 5]] = torch.tensor(SHARES[reduce])
    torch.testing.assert_close(leaf.grad.cpu(), want)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_coalesce_equals_the_oracle(dim, reduce, device):
    draw = torch.Generator().manual_seed(dim)
    coords = torch.randint(-3, 4, (200, 1 + dim), generator=draw).int()
    coords[:, 0] %= 3
    feats = torch.randn(200, 5, dtype=torch.float64, generator=draw)
    y = pm.coalesce(feats.to(device), coords.to(device), reduce, dim=dim)
    rows, want, inverse = oracle.voxelise([tuple(c) for c in coords.tolist()], feats.numpy(), reduce)
    assert cases.tuples(y) == rows and y.inverse.tolist() == inverse
    cases.assert_close(y.feats, want, torch.float64, "features")
    assert torch.equal(y.coords[y.inverse], coords.to(device))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradcheck(reduce):
    feats = torch.arange(12.0, dtype=torch.float64).view(6, 2).cos().requires_grad_()
    assert torch.autograd.gradcheck(lambda f: pm.coalesce(f, COORDS, reduce, dim=2).feats, feats)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_summed_wide(dtype):
    coords = torch.zeros(4096, 2, dtype=torch.int32)
    y = pm.coalesce(torch.full((4096, 1), 2.0, dtype=dtype), coords, "mean", dim=1)
    assert y.dtype == dtype and y.feats.tolist() == [[2.0]]
    assert pm.coalesce(torch.full((4096, 1), 2.0, dtype=dtype), coords, "sum", dim=1).feats.tolist() == [[8192.0]]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_no_row(reduce):
    leaf = torch.zeros(0, 3, requires_grad=True)
    y = pm.coalesce(leaf, torch.zeros(0, 4, dtype=torch.int32), reduce, batch_size=2)
    assert len(y) == 0 and y.channels == 3 and y.spatial_dim == 3 and y.batch_size == 2
    assert y.inverse.shape == (0,) and y.inverse.dtype == torch.int64
    y.feats.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == (0, 3)


def test_distinct_rows_are_sorted_only():
    coords = random_cloud(50, 3, batch_size=2)
    feats = torch.randn(50, 2)
    y = pm.coalesce(feats, coords)
    assert cases.tuples(y) == oracle.ordered([tuple(c) for c in coords.tolist()])
    assert torch.equal(y.feats[y.inverse], feats)


def test_the_site_is_what_was_given():
    y = pm.coalesce(torch.ones(2, 1), torch.zeros(2, 3, dtype=torch.int32), dim=2, stride=(2, 4), spatial_shape=(5, 6))
    assert y.stride == (2, 4) and y.spatial_shape == (5, 6) and y.batch_size == 1
    assert pm.coalesce(torch.ones(2, 1), torch.zeros(2, 3, dtype=torch.int32), batch_size=3, dim=2).batch_size == 3


def test_what_is_merged_is_a_tensor_to_compute_with():
    y = pm.coalesce(FEATS, COORDS, "sum", dim=2)
    again = pm.coalesce(y.feats, y.coords, "sum", dim=2)
    assert torch.equal(again.feats, y.feats) and again.inverse.tolist() == [0, 1, 2, 3]
    assert torch.equal(pm.devoxelize(y), y.feats[y.inverse])
    assert len(pm.ops.conv(y, torch.ones(3, 3, 3, 2))) == 4
    assert torch.equal(y.to_dense().sum(dim=(0, 2, 3)), FEATS.sum(dim=0))
