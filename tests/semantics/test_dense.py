"""The library against torch's dense convolutions wherever both are defined."""

import itertools

import cases
import pytest
import torch
import torch.nn.functional as F

import pumice as pm

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SHAPES = {1: (11,), 2: (7, 8), 3: (5, 6, 5)}


def sparse_image(shape, channels, fill=0.35, batches=2, seed=0):
    """A dense tensor [B, C, *shape] with whole voxels set to zero, and its SparseTensor."""
    rng = torch.Generator().manual_seed(seed)
    dense = torch.randn(batches, channels, *shape, dtype=torch.float64, generator=rng)
    dense *= torch.rand(batches, 1, *shape, generator=rng) < fill
    return dense, pm.from_dense(dense)


def dense_weight(w):
    """[C_out, *kernel, C] -> torch's [C_out, C, *kernel]."""
    return w.movedim(-1, 1)


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        (3, 1, 1, 1),
        (3, 1, 0, 1),
        (3, 2, 1, 1),
        (3, 2, 0, 1),
        (2, 2, 0, 1),
        (2, 1, 1, 1),
        (4, 2, 1, 1),
        (3, 3, 1, 1),
        (3, 1, 2, 2),
        (3, 2, 2, 2),
        (1, 1, 0, 1),
        (1, 2, 0, 1),
        (5, 2, 2, 1),
    ],
)
def test_support_is_dense(dim, kernel, stride, padding, dilation):
    dense, x = sparse_image(SHAPES[dim], 4)
    w = torch.randn(6, *[kernel] * dim, 2, dtype=torch.float64)
    y = pm.ops.conv(x, w, stride=stride, padding=padding, dilation=dilation, groups=2, out="support")
    want = CONVS[dim](dense, dense_weight(w), None, stride, padding, dilation, 2)
    assert y.spatial_shape == tuple(want.shape[2:])
    torch.testing.assert_close(y.to_dense(), want, atol=1e-10, rtol=0)
    ones = torch.ones(1, 1, *[kernel] * dim, dtype=torch.float64)
    active = CONVS[dim]((dense != 0).any(1, keepdim=True).double(), ones, None, stride, padding, dilation) > 0.5
    assert len(y) == int(active.sum())


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "extra"),
    [
        (2, 2, 0, 1, 0),
        (3, 2, 1, 1, 0),
        (3, 2, 1, 1, 1),
        (3, 1, 1, 1, 0),
        (4, 2, 1, 1, 0),
        (3, 3, 0, 1, 2),
        (3, 2, 2, 2, 1),
    ],
)
def test_transposed_is_dense(dim, kernel, stride, padding, dilation, extra):
    dense, x = sparse_image(SHAPES[dim], 3)
    w = torch.randn(4, *[kernel] * dim, 3, dtype=torch.float64)
    y = pm.ops.conv_transpose(x, w, stride=stride, padding=padding, dilation=dilation, output_padding=extra)
    want = TRANSPOSED[dim](dense, w.movedim(-1, 0), None, stride, padding, extra, 1, dilation)
    assert y.spatial_shape == tuple(want.shape[2:])
    torch.testing.assert_close(y.to_dense(), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_full_box_under_same_is_the_dense_convolution_with_bias(dim):
    dense, x = sparse_image(SHAPES[dim], 3, fill=2.0)
    w, b = torch.randn(4, *[3] * dim, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    want = CONVS[dim](dense, dense_weight(w), b, 1, 1)
    torch.testing.assert_close(pm.ops.conv(x, w, b).to_dense(), want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_gradients_are_dense(dim):
    dense, x = sparse_image(SHAPES[dim], 3)
    w = torch.randn(4, *[3] * dim, 3, dtype=torch.float64, requires_grad=True)
    v = w.detach().clone().requires_grad_()
    dense.requires_grad_()
    leaf = x.feats.detach().clone().requires_grad_()
    y = pm.ops.conv(x.replace(leaf), w, stride=2, padding=1).to_dense()
    want = CONVS[dim](dense, dense_weight(v), None, 2, 1)
    dy = torch.randn_like(want)
    (y * dy).sum().backward()
    (want * dy).sum().backward()
    torch.testing.assert_close(w.grad, v.grad, atol=1e-10, rtol=0)
    at = tuple(x.coords.long().T)
    torch.testing.assert_close(leaf.grad, dense.grad[(at[0], slice(None), *at[1:])], atol=1e-10, rtol=0)


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_pools_of_a_full_box_are_dense(mode):
    dense, x = sparse_image((6, 8), 3, fill=2.0)
    y = getattr(pm.ops, f"{mode}_pool")(x, 2)
    want = {"max": F.max_pool2d, "avg": F.avg_pool2d, "sum": lambda a, k: 4 * F.avg_pool2d(a, k)}[mode](dense, 2)
    torch.testing.assert_close(y.to_dense(), want, atol=1e-10, rtol=0)


def test_four_dimensions_by_summing_over_the_last_axis():
    """conv4d = sum over the last tap of conv3d: the only dense reference that torch has for D = 4."""
    shape = (3, 4, 3, 5)
    dense, x = sparse_image(shape, 2, fill=0.3)
    w = torch.randn(3, 3, 3, 3, 3, 2, dtype=torch.float64)
    y = pm.ops.conv(x, w, stride=(1, 1, 1, 2), padding=1).to_dense()
    padded = F.pad(dense, (1, 1))
    want = torch.zeros_like(y)
    for q, r in itertools.product(range(y.shape[-1]), range(3)):
        want[..., q] += F.conv3d(padded[..., 2 * q + r], dense_weight(w[:, :, :, :, r]), None, 1, 1)
    torch.testing.assert_close(y, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_less_exact_than_the_dense_operator(dtype):
    """Low precision is measured against fp64 on the same rounded operands, and may err twice as far as dense does."""
    dense, x = sparse_image((5, 6, 5), 32)
    w = (torch.randn(16, 3, 3, 3, 32, dtype=torch.float64) / 30).to(dtype)
    x = x.to(dtype)
    exact = F.conv3d(dense.to(dtype).double(), dense_weight(w.double()), None, 2, 1)
    ours = pm.ops.conv(x, w, stride=2, padding=1).to_dense().double()
    theirs = F.conv3d(dense.to(dtype), dense_weight(w), None, 2, 1).double()
    floor = cases.TOLERANCE[dtype] / 4 * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + floor
