"""pumice.testing: a comparison that can fail, clouds that are what they say, a reference that is the oracle."""

import math

import cases
import numpy as np
import oracle
import pytest
import torch

import pumice as pm
from pumice.errors import DtypeError, OptionError, ShapeError
from pumice.testing import TOLERANCES, assert_close, random_cloud, random_tensor, reference_conv

DTYPES = list(TOLERANCES)


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Assert_close
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_passes(dtype):
    want = numbers(200, 7)
    assert_close(want.to(dtype), want)
    assert_close(want, want.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_entry_fails(dtype):
    want = numbers(200, 7)
    got = want.to(dtype, copy=True)
    got[123, 4] += 10 * TOLERANCES[dtype][0] * max(1, want[123, 4].abs())
    with pytest.raises(AssertionError, match=r"1 of 1400 entries") as caught:
        assert_close(got, want)
    worst = str(caught.value).splitlines()[1]
    assert worst.strip().startswith("[123, 4]:")
    assert f"{got[123, 4].double().item():.9g}" in worst and f"{want[123, 4].item():.9g}" in worst


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_small_error_everywhere_fails(dtype):
    want = numbers(200, 7)
    largest, rms = TOLERANCES[dtype]
    with pytest.raises(AssertionError, match="0 of 1400 entries"):
        assert_close(want + (largest + rms) / 2, want, dtype=dtype)


def test_the_less_precise_dtype_counts():
    want = numbers(50)
    assert_close(want.half(), want.float())
    with pytest.raises(AssertionError, match="float32"):
        assert_close(want.half().float(), want)
    assert_close(want.half().float(), want, dtype=torch.float16)
    with pytest.raises(DtypeError, match="float8"):
        assert_close(want, want, dtype=torch.float8_e5m2)


def test_scale_is_for_sums_that_cancel():
    want = 1e-6 * numbers(50)
    got = want + 1e-8
    with pytest.raises(AssertionError):
        assert_close(got, want, dtype=torch.float32)
    assert_close(got, want, dtype=torch.float32, scale=1.0)


def test_zero_against_zero_and_not():
    assert_close(torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([0.0, 1e-30]), torch.zeros(2))
    assert_close(torch.zeros(0, 4), torch.zeros(0, 4))
    assert_close(1.0, 1.0)
    assert_close(np.arange(3), [0, 1, 2])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_must_be_at_the_same_place(bad):
    want = numbers(10)
    got = want.clone()
    got[3] = bad
    for pair in ((got, want), (want, got)):
        with pytest.raises(AssertionError, match=r"\[3\]"):
            assert_close(*pair)
    assert_close(got, got.clone())
    with pytest.raises(AssertionError):
        assert_close(-got if bad == bad else got.roll(1), got)


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"\[2, 3\], expected \[3, 2\]"):
        assert_close(torch.zeros(2, 3), torch.zeros(3, 2))


def test_sparse_tensors_compare_coordinates_too():
    x = random_tensor(20, 3)
    assert_close(x, pm.SparseTensor(x.feats, x.coords))
    turned = pm.SparseTensor(x.feats.flip(0), x.coords.flip(0))
    with pytest.raises(AssertionError, match="order differs from row 0"):
        assert_close(turned, x)
    moved = x.coords.clone()
    moved[5, 1] += 1000
    with pytest.raises(AssertionError, match="1 missing .* 1 not expected"):
        assert_close(pm.SparseTensor(x.feats, moved), x)
    feats = x.feats.clone()
    feats[7, 1] += 1
    with pytest.raises(AssertionError, match=r"of voxel \(0, \d+, \d+, \d+\)"):
        assert_close(x.replace(feats), x)
    with pytest.raises(ShapeError):
        assert_close(x, x.feats)


# The clouds
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_a_cloud_is_distinct_and_balanced(dim):
    coords = random_cloud(50, dim, extent=20, batch_size=3)
    assert coords.dtype == torch.int32 and coords.shape == (50, 1 + dim)
    assert len(coords.unique(dim=0)) == 50
    assert coords[:, 0].bincount().tolist() == [17, 17, 16]
    assert coords[:, 1:].min() >= 0 and coords[:, 1:].max() < 20
    assert torch.equal(coords, random_cloud(50, dim, extent=20, batch_size=3))
    assert not torch.equal(coords, random_cloud(50, dim, extent=20, batch_size=3, seed=1))
    assert not torch.equal(coords, coords[coords[:, 0].argsort(stable=True)])


def test_the_default_box_has_neighbours():
    x = random_tensor(400, 1)
    found, _ = pm.kernel_map(x.geometry, pm.Relation.of(3, 3))
    assert 5 < found.counts().double().mean() < 20


def test_extents():
    assert random_cloud(8, 3, extent=2).shape == (8, 4)
    assert random_cloud(6, 2, extent=(1, 6))[:, 1].max() == 0
    assert random_cloud(5, 4, extent=30_000).shape == (5, 5)
    assert random_cloud(0, 3).shape == (0, 4)
    assert random_cloud(1, 3, batch_size=3)[:, 0].tolist() == [0]
    with pytest.raises(OptionError, match="9 distinct .* 8 cells"):
        random_cloud(9, 3, extent=2)
    with pytest.raises(ShapeError, match="2 entries, the cloud has 3"):
        random_cloud(9, 3, extent=(2, 2))


def test_features_are_the_same_numbers_in_every_dtype():
    want = random_tensor(30, 5, dtype=torch.float64, batch_size=2)
    assert want.batch_size == 2
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = random_tensor(30, 5, dtype=dtype, batch_size=2)
        assert x.dtype == dtype and torch.equal(x.feats, want.feats.to(dtype))
        assert torch.equal(x.coords, want.coords)


# The reference
@pytest.mark.parametrize("case", [*cases.SAME[:4], *cases.FLOOR[:2], *cases.SUPPORT[-6:-4], *cases.GIVEN[:2],
                                  *cases.OFFSETS[-2:], *cases.GROUPS[:3]], ids=str)  # fmt: skip
def test_the_reference_is_the_oracle(case):
    ops = cases.operands(case)
    x = cases.tensor(ops.coords, ops.feats, spatial_shape=case.spatial, batch_size=case.batches)
    out = {"default": None, "given": None}.get(case.policy, case.policy)
    if case.policy == "given":
        out = cases.given(case, ops, "cpu")
    window = {"stride": case.stride or 1, "dilation": case.dilation or 1}
    if case.offsets is None:
        window["padding"] = case.padding
    y = reference_conv(x, ops.weight, ops.bias, groups=case.groups, out=out, offsets=case.offsets, **window)
    outs = cases.outputs_of(case, ops.coords)
    assert cases.tuples(y) == outs
    pairs = cases.pairs_of(case, ops.coords, outs)
    feats, w = cases.array(ops.feats), cases.flat(ops.weight)
    assert_close(y.feats, oracle.conv(pairs, len(outs), feats, w, cases.array(ops.bias), case.groups))
    dy = numbers(*y.feats.shape)
    y.feats.backward(dy)
    dx, dw, db = oracle.conv_grads(pairs, feats, w, dy.numpy(), case.groups)
    assert_close(ops.feats.grad, dx)
    assert_close(ops.weight.grad, dw.reshape(ops.weight.shape))
    assert_close(ops.bias.grad, db)


def test_the_reference_finds_its_own_map():
    x = random_tensor(40, 3, dtype=torch.float32)
    w = torch.randn(4, 3, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    want = reference_conv(x, w)
    assert not x.geometry.maps and want.dtype == torch.float64
    assert_close(pm.ops.conv(x, w), want)
    ((key, (found, outputs)),) = x.geometry.maps.items()
    damaged = pm.KernelMap.from_rows(found.relation, found.rows().flip(1), len(x))
    x.geometry.maps[key] = (damaged, outputs)
    with pytest.raises(AssertionError):
        assert_close(pm.ops.conv(x, w), want)
    assert_close(reference_conv(x, w), want)
    assert_close(reference_conv(x, w, out=x), want)
