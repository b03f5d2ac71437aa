"""The oracle itself, against torch's dense operators: no line of the library takes part."""

import itertools

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F

CONVS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

# (shape, kernel, stride, padding, dilation, groups)
DENSE = [
    ((9,), (3,), (1,), (1,), (1,), 1),
    ((10,), (4,), (3,), (2,), (2,), 1),
    ((7, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    ((7, 6), (3, 2), (2, 3), (0, 1), (2, 1), 2),
    ((5, 5), (2, 2), (2, 2), (0, 0), (1, 1), 1),
    ((5, 6, 4), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), 1),
    ((5, 6, 4), (3, 1, 2), (1, 2, 1), (1, 0, 1), (1, 1, 2), 2),
]


def full(shape, batches=2):
    """All coordinates of a box."""
    return [(b, *c) for b in range(batches) for c in itertools.product(*(range(n) for n in shape))]


def some(shape, seed=0, batches=2):
    """About a third of the coordinates of a box."""
    rng = np.random.default_rng(seed)
    return [c for c in full(shape, batches) if rng.random() < 0.35]


def scatter(coords, feats, shape, batches=2):
    """Dense torch tensor [B, C, *shape]."""
    return torch.from_numpy(oracle.dense(coords, feats, batches, shape, (0,) * len(shape)))


def values(coords, dense):
    """[N, C] read back from a dense tensor."""
    rows = [dense[(c[0], slice(None), *c[1:])] for c in coords]
    return torch.stack(rows).numpy()


def torch_weight(w, kernel):
    """[C_out, K, C] -> torch's [C_out, C, *kernel]."""
    return torch.from_numpy(w).reshape(w.shape[0], *kernel, w.shape[2]).movedim(-1, 1).contiguous()


@pytest.mark.parametrize("spec", DENSE, ids=str)
def test_conv_is_the_dense_convolution(spec):
    shape, kernel, stride, padding, dilation, groups = spec
    rel = oracle.relation(kernel, stride, dilation, padding)
    rng = np.random.default_rng(1)
    ins = some(shape)
    x, w = rng.normal(size=(len(ins), 4)), rng.normal(size=(6, len(rel.taps), 4 // groups))
    bias = rng.normal(size=6)
    dense_in = scatter(ins, x, shape).requires_grad_()
    weight, b = torch_weight(w, kernel).requires_grad_(), torch.from_numpy(bias).requires_grad_()
    want = CONVS[len(shape)](dense_in, weight, b, stride, padding, dilation, groups)
    size = oracle.conv_shape(shape, kernel, rel)
    assert tuple(want.shape[2:]) == size
    outs = oracle.support(ins, rel, size)
    pairs = oracle.forward_pairs(ins, outs, rel)
    got = oracle.conv(pairs, len(outs), x, w, bias, groups)
    np.testing.assert_allclose(got, values(outs, want.detach()), atol=1e-12)
    mask = CONVS[len(shape)](
        scatter(ins, np.ones((len(ins), 1)), shape), torch.ones(1, 1, *kernel).double(), None, stride, padding, dilation
    )
    assert {tuple(c) for c in mask[:, 0].nonzero().tolist()} == set(outs)
    dy = rng.normal(size=got.shape)
    want.backward(scatter(outs, dy, size))
    dx, dw, db = oracle.conv_grads(pairs, x, w, dy, groups)
    np.testing.assert_allclose(dx, values(ins, dense_in.grad), atol=1e-12)
    np.testing.assert_allclose(torch_weight(dw, kernel).numpy(), weight.grad.numpy(), atol=1e-12)
    np.testing.assert_allclose(db, b.grad.numpy(), atol=1e-12)


# torch wants output_padding below the stride or the dilation
PADDED = [
    (spec, extra)
    for spec in DENSE
    for extra in (0, 1)
    if all(extra < max(s, d) for s, d in zip(spec[2], spec[4], strict=True))
]


@pytest.mark.parametrize(("spec", "extra"), PADDED, ids=str)
def test_transposed_is_the_dense_transposed_convolution(spec, extra):
    shape, kernel, stride, padding, dilation, groups = spec
    rel = oracle.relation(kernel, stride, dilation, padding)
    rng = np.random.default_rng(2)
    ins = some(shape)
    x, w = rng.normal(size=(len(ins), 4)), rng.normal(size=(6, len(rel.taps), 4 // groups))
    by_group = torch_weight(w, kernel).reshape(groups, 6 // groups, 4 // groups, *kernel)
    weight = by_group.transpose(1, 2).reshape(4, 6 // groups, *kernel)
    want = TRANSPOSED[len(shape)](scatter(ins, x, shape), weight, None, stride, padding, extra, groups, dilation)
    size = oracle.transposed_shape(shape, kernel, rel, (extra,) * len(shape))
    assert tuple(want.shape[2:]) == size
    outs = oracle.transposed_support(ins, rel, size)
    got = oracle.conv(oracle.exchanged_pairs(ins, outs, rel), len(outs), x, w, None, groups)
    np.testing.assert_allclose(got, values(outs, want), atol=1e-12)
    assert oracle.dense(outs, got, 2, size, (0,) * len(shape)).sum() == pytest.approx(want.sum().item())


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_pools_of_a_full_box_are_the_dense_pools(mode):
    shape, kernel, stride = (6, 7), (2, 3), (2, 2)
    rel = oracle.relation(kernel, stride, (1, 1), (0, 0))
    x = np.random.default_rng(3).normal(size=(2 * 42, 3))
    outs = oracle.support(full(shape), rel, oracle.conv_shape(shape, kernel, rel))
    pairs = oracle.forward_pairs(full(shape), outs, rel)
    dense = scatter(full(shape), x, shape).requires_grad_()
    want = F.max_pool2d(dense, kernel, stride) if mode == "max" else F.avg_pool2d(dense, kernel, stride)
    want = want * 6 if mode == "sum" else want
    np.testing.assert_allclose(oracle.pool(pairs, len(outs), x, mode), values(outs, want.detach()), atol=1e-12)
    dy = np.random.default_rng(4).normal(size=(len(outs), 3))
    want.backward(scatter(outs, dy, tuple(want.shape[2:])))
    np.testing.assert_allclose(oracle.pool_grad(pairs, x, dy, mode), values(full(shape), dense.grad), atol=1e-12)


def test_interpolation_of_a_full_box_is_grid_sample():
    shape, stride = (5, 4, 6), (2, 2, 2)
    coords = full(shape, batches=1)
    rng = np.random.default_rng(5)
    x = rng.normal(size=(len(coords), 3))
    # positions well inside, so that all eight corners exist
    u = np.array(stride) * (0.5 + rng.random((9, 3)) * (np.array(shape) - 1))
    weights = oracle.interpolation_weights(coords, [(0, *p) for p in u], stride, "trilinear")
    where = torch.from_numpy(2 * u / (np.array(shape) * stride) - 1).flip(-1)  # grid_sample: last axis first
    want = F.grid_sample(scatter(coords, x, shape, 1), where[None, :, None, None], align_corners=False)
    np.testing.assert_allclose(oracle.matmul(weights, x), want[0, :, :, 0, 0].T.numpy(), atol=1e-12)
    nearest = oracle.interpolation_weights(coords, [(0, *p) for p in u], stride, "nearest")
    want = F.grid_sample(scatter(coords, x, shape, 1), where[None, :, None, None], "nearest", align_corners=False)
    np.testing.assert_allclose(oracle.matmul(nearest, x), want[0, :, :, 0, 0].T.numpy(), atol=1e-12)


def test_morton_order_by_hand():
    square = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert oracle.ordered([*reversed(square), (0, 0, 2), (0, -1, 0), (1, -9, -9)]) == [
        (0, -1, 0),
        *square,
        (0, 0, 2),
        (1, -9, -9),
    ]
    assert oracle.ordered([(0, 5), (0, -3), (0, 2), (0, 5)]) == [(0, -3), (0, 2), (0, 5)]


def test_relation_by_hand():
    rel = oracle.relation((3,), (2,), (1,), (1,))
    assert [q[1] for q in oracle.support([(0, 5)], rel)] == [2, 3]
    assert [q[1] for q in oracle.support([(0, 4)], rel)] == [2]
    assert oracle.floor_unique([(0, -1), (0, 0), (0, 5)], (2,)) == [(0, -1), (0, 0), (0, 2)]
    assert oracle.default_padding((3, 4, 5), (1, 2, 2)) == (1, 0, 4)
    assert oracle.voxel_of((0.5, -0.5, 0.49), (1.0,) * 3, (0.0,) * 3, "round") == (1, 0, 0)
    assert oracle.voxel_of((0.5, -0.5, -1.0), (0.5,) * 3, (0.0, 0.0, 0.1), "floor") == (1, -1, -3)
