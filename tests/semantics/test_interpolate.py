"""Interpolation at continuous positions, and devoxelise, against the oracle."""

import cases
import numpy as np
import oracle
import pytest
import torch

import pumice as pm
from pumice.runtime import launch

MODES = ["nearest", "trilinear"]


def positions_near(coords, stride, count=25, seed=0):
    """[P, 1 + D]: in and around voxels (present and absent ones), on centres, on faces, far away, mixed batches."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(coords), count)
    batch = np.array([coords[i][0] for i in picks])
    base = np.array([coords[i][1:] for i in picks], dtype=np.float64)
    shift = rng.uniform(-1.0, 2.0, base.shape)
    shift[0], shift[1] = 0.5, 0.0  # the centre, a corner
    shift[2, 0] = 0.5  # on a centre plane of one axis
    base[3] += 500
    return np.concatenate([batch[:, None], (base + shift) * np.array(stride)], axis=1)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dim", "stride"), [(1, (1,)), (2, (2, 3)), (3, (1, 1, 1)), (3, (4, 4, 4)), (4, (2, 1, 1, 2))])
def test_interpolate_equals_the_oracle(dim, stride, mode, normalize, device):
    ins = cases.compact(dim, -4, 4, 14)
    feats = torch.randn(len(ins), 3, dtype=torch.float64).to(device).requires_grad_()
    x = cases.tensor(ins, feats, stride=stride)
    at = positions_near(ins, stride)
    got = pm.interpolate(x, torch.from_numpy(at).to(device), mode, normalize=normalize)
    weights = oracle.interpolation_weights(ins, at.tolist(), stride, mode, normalize)
    cases.assert_close(got, oracle.matmul(weights, cases.array(feats)), torch.float64, "values")
    dy = torch.randn(got.shape, dtype=torch.float64).to(device)
    got.backward(dy)
    want = oracle.matmul(np.ascontiguousarray(weights.T), cases.array(dy))
    cases.assert_close(feats.grad, want, torch.float64, "gradient")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_interpolate_in_low_precision(mode, dtype, device):
    ins = cases.compact(3, -4, 4, 14)
    feats = torch.randn(len(ins), 3).to(dtype).to(device)
    at = positions_near(ins, (2, 2, 2))
    got = pm.interpolate(cases.tensor(ins, feats, stride=2), torch.from_numpy(at).to(device), mode)
    weights = oracle.interpolation_weights(ins, at.tolist(), (2, 2, 2), mode)
    assert got.dtype == dtype
    cases.assert_close(got, oracle.matmul(weights, cases.array(feats)), dtype, "values")


@pytest.mark.parametrize("mode", MODES)
def test_at_a_voxel_centre_is_the_voxel(mode):
    ins = cases.compact(3, -4, 4, 14)
    feats = torch.randn(len(ins), 3, dtype=torch.float64)
    x = cases.tensor(ins, feats, stride=(2, 1, 3))
    at = torch.tensor([[c[0], *((a + 0.5) * t for a, t in zip(c[1:], (2, 1, 3), strict=True))] for c in ins])
    torch.testing.assert_close(pm.interpolate(x, at.double(), mode), feats, atol=1e-12, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_near_is_zero_not_nan(mode):
    x = cases.tensor([(0, 0, 0)], torch.ones(1, 2, dtype=torch.float64))
    got = pm.interpolate(x, torch.tensor([[0, 50.0, 50.0], [1, 0.5, 0.5]], dtype=torch.float64), mode)
    assert got.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_no_position_and_no_voxel(mode):
    x = cases.tensor([(0, 0, 0)], torch.ones(1, 2))
    assert pm.interpolate(x, torch.zeros(0, 3), mode).shape == (0, 2)
    empty = cases.tensor([], torch.zeros(0, 2), dim=2)
    assert pm.interpolate(empty, torch.zeros(4, 3), mode).tolist() == [[0.0, 0.0]] * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_devoxelize_at_points(mode, level, device):
    """Points in metres, a tensor at any level of a network that began with voxelize."""
    rng = np.random.default_rng(6)
    points = rng.uniform(-3, 3, (40, 3))
    batch = rng.integers(0, 2, 40)
    size, origin = (0.5, 0.25, 1.0), (0.1, -0.2, 0.3)
    x = pm.voxelize(
        torch.from_numpy(points).to(device), size=size, origin=origin, batch=torch.from_numpy(batch).to(device)
    )
    for _ in range(level):
        x = pm.ops.avg_pool(x, 2)
    got = pm.devoxelize(x, torch.from_numpy(points).to(device), torch.from_numpy(batch).to(device), mode=mode)
    units = np.concatenate([batch[:, None], (points - origin) / size], axis=1)
    weights = oracle.interpolation_weights(cases.tuples(x), units.tolist(), (2**level,) * 3, mode)
    cases.assert_close(got, oracle.matmul(weights, cases.array(x.feats)), torch.float64, "values")


def test_devoxelize_without_points_follows_the_inverse(device):
    points = torch.rand(50, 3, dtype=torch.float64).to(device)
    x = pm.voxelize(points, size=0.3)
    y = x.replace(torch.randn(len(x), 5, dtype=torch.float64).to(device))
    torch.testing.assert_close(pm.devoxelize(y), y.feats[y.inverse], atol=0, rtol=0)


def test_devoxelize_follows_the_rounding_of_voxelize():
    """Rounded voxels are centred on the lattice: nearest must still give each point its own voxel."""
    points = torch.rand(60, 3, dtype=torch.float64) * 4
    x = pm.voxelize(points, size=0.5, rounding="round")
    torch.testing.assert_close(pm.devoxelize(x, points), x.feats[x.inverse], atol=0, rtol=0)


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_what_each_axis_is_multiplied_by_is_at_hand_the_second_time(mode, monkeypatch):
    """Numbers on their way to a GPU would wait for it, and no CUDA graph could be captured."""
    points = 3 * torch.rand(40, 3)
    x = pm.voxelize(points, torch.randn(40, 2), size=0.25, origin=(0.1, 0.2, 0.3))
    want = pm.devoxelize(x, points, mode=mode)
    make = torch.tensor

    def refused(*given, **options):
        # What stays on the CPU waits for nothing.
        return make(*given, **options) if options.get("device") == "cpu" else pytest.fail("made anew")

    monkeypatch.setattr(torch, "tensor", refused)
    with torch.inference_mode():
        assert torch.equal(pm.devoxelize(x, points, mode=mode), want)


def test_constants_made_in_inference_serve_gradients():
    with torch.inference_mode():
        made = launch.vector((0.123, 4.0, 5.0), torch.float64, torch.device("cpu"))
    assert not made.is_inference() and launch.vector((0.123, 4.0, 5.0), torch.float64, torch.device("cpu")) is made
    assert torch.equal(made, torch.tensor([0.123, 4.0, 5.0], dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_the_last_cells_of_int32_are_found(mode):
    points = torch.tensor([[2**31 - 0.5, 0.5, 0.5], [-(2.0**31) + 0.5, 5.5, 5.5]], dtype=torch.float64)
    x = pm.voxelize(points, torch.tensor([[10.0], [20.0]]), size=1.0)
    assert pm.devoxelize(x, points, mode=mode).flatten().tolist() == [10, 20]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("far", [1e30, -1e30, float("inf"), -float("inf"), 2.0**31, -(2.0**31) - 512])
def test_positions_beyond_int32_meet_nothing(mode, far):
    x = pm.SparseTensor(
        torch.ones(3, 1), torch.tensor([[0, a, 0, 0] for a in (2**31 - 1, 2**31 - 512, -(2**31))]).int()
    )
    place = torch.tensor([[0.0, far, 0.5, 0.5]], dtype=torch.float64 if abs(far) < 1e10 else torch.float32)
    found = pm.interpolate(x, place + torch.tensor([0, 1.0, 0, 0]), mode)
    assert found.tolist() == [[0]]


@pytest.mark.parametrize("item", [-0.5, 1.0, 1e20])
def test_positions_of_other_batch_items_meet_nothing(item):
    x = pm.SparseTensor(torch.ones(1, 1), torch.zeros(1, 4, dtype=torch.int32))
    assert pm.interpolate(x, torch.tensor([[item, 0.5, 0.5, 0.5]])).item() == 0
