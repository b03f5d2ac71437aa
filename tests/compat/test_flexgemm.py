"""pumice.compat.flexgemm against loops over voxels, and the calls of both argument orders."""

import itertools

import pytest
import torch

from pumice.compat import install, uninstall
from pumice.compat.flexgemm import (
    Algorithm,
    decode_seq,
    encode_seq,
    grid_sample_3d,
    set_algorithm,
    set_hashmap_ratio,
    sparse_conv3d,
    sparse_submanifold_conv,
    sparse_submanifold_conv_any_offset,
)
from pumice.errors import DtypeError, OptionError, ShapeError

pytestmark = pytest.mark.usefixtures("seeded")

SHAPE = torch.Size([2, 5, 7, 8, 6])


def cloud(seed: int = 0):
    chance = torch.Generator().manual_seed(seed)
    cells = torch.stack([torch.randint(0, n, (150,), generator=chance) for n in (2, 7, 8, 6)], 1)
    coords = torch.unique(cells, dim=0).int()
    coords = coords[torch.randperm(len(coords), generator=chance)]
    return torch.randn(len(coords), 5, generator=chance, requires_grad=True), coords


def looped(feats, coords, weight, bias, outputs, stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1)):
    rows = {tuple(c): i for i, c in enumerate(coords.tolist())}
    found = []
    for b, *at in outputs.tolist():
        total = bias.clone() if bias is not None else torch.zeros(weight.shape[0])
        for tap in itertools.product(*(range(k) for k in weight.shape[1:-1])):
            cell = (o * s + t * d - p for o, s, t, d, p in zip(at, stride, tap, dilation, padding, strict=True))
            row = rows.get((b, *cell))
            if row is not None:
                total = total + weight[(slice(None), *tap)] @ feats[row]
        found.append(total)
    return torch.stack(found)


@pytest.mark.parametrize("dilation", [1, (2, 1, 3)])
def test_submanifold_convolution(dilation):
    feats, coords = cloud()
    weight, bias = torch.randn(4, 3, 1, 5, 5, requires_grad=True), torch.randn(4, requires_grad=True)
    found, cache = sparse_submanifold_conv(feats, coords, SHAPE, weight, bias, None, dilation)
    spread = (dilation,) * 3 if isinstance(dilation, int) else dilation
    centred = tuple(d * (k // 2) for d, k in zip(spread, (3, 1, 5), strict=True))
    expected = looped(feats, coords, weight, bias, coords, padding=centred, dilation=spread)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    given = (feats, weight, bias)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), given) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    # The cache serves other features; older forks pass it before the weight.
    again, same = sparse_submanifold_conv(feats * 2, coords, SHAPE, weight, None, cache, dilation)
    assert same is cache
    torch.testing.assert_close(again, 2 * (found - bias), rtol=1e-4, atol=1e-4)
    for first in (cache, None):
        old, _ = sparse_submanifold_conv(feats, coords, SHAPE, first, weight, bias, dilation)
        torch.testing.assert_close(old, found)


def test_even_kernels_are_refused():
    feats, coords = cloud()
    with pytest.raises(OptionError, match="odd kernels, found \\[2, 3, 3\\]"):
        sparse_submanifold_conv(feats, coords, SHAPE, torch.randn(4, 2, 3, 3, 5))


def test_any_offsets():
    feats, coords = cloud()
    offsets = torch.tensor([[0, 0, -2], [0, 0, 0], [0, 0, 2]])
    weight = torch.randn(4, 3, 5)
    found, _ = sparse_submanifold_conv_any_offset(feats, coords, offsets, weight)
    window = weight.view(4, 1, 1, 3, 5)
    expected = looped(feats, coords, window, None, coords, padding=(0, 0, 2), dilation=(1, 1, 2))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_strided_convolution():
    feats, coords = cloud()
    weight, bias = torch.randn(4, 3, 3, 2, 5), torch.randn(4)
    options = {"stride": (2, 1, 2), "padding": (1, 1, 0), "dilation": (1, 1, 1)}
    found, outputs, cache = sparse_conv3d(feats, coords, SHAPE, weight, bias, **options)
    torch.testing.assert_close(found, looped(feats, coords, weight, bias, outputs, **options), rtol=1e-4, atol=1e-5)
    dense = torch.zeros(2, 1, 7, 8, 6)
    b, x, y, z = coords.long().unbind(1)
    dense[b, 0, x, y, z] = 1
    active = torch.nn.functional.conv3d(dense, torch.ones(1, 1, 3, 3, 2), stride=(2, 1, 2), padding=(1, 1, 0))[:, 0]
    assert {*map(tuple, outputs.tolist())} == {*map(tuple, active.nonzero().tolist())}
    again, same, _ = sparse_conv3d(feats, coords, SHAPE, weight, bias, cache, **options)
    assert torch.equal(again, found) and torch.equal(same, outputs)
    given, at, _ = sparse_conv3d(feats, coords, SHAPE, weight, bias, None, outputs.flip(0), **options)
    assert torch.equal(at, outputs.flip(0))
    torch.testing.assert_close(given, found.flip(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_grid_sample(mode: str):
    feats, coords = cloud()
    grid = torch.rand(2, 30, 3) * torch.tensor([7.0, 8, 6])
    found = grid_sample_3d(feats, coords, torch.Size([2, 5, 7, 8, 6]), grid, mode=mode)
    rows = {tuple(c): i for i, c in enumerate(coords.tolist())}
    for item, point in itertools.product(range(2), range(30)):
        position, total, weight = grid[item, point].tolist(), torch.zeros(5), 0.0
        for cell in itertools.product(range(-1, 8), range(-1, 9), range(-1, 7)):
            if mode == "nearest":
                share = float(all(c <= p < c + 1 for c, p in zip(cell, position, strict=True)))
            else:
                near = [max(0.0, 1 - abs(c + 0.5 - p)) for c, p in zip(cell, position, strict=True)]
                share = near[0] * near[1] * near[2]
            row = rows.get((item, *cell))
            if row is not None and share:
                total, weight = total + share * feats[row], weight + share
        torch.testing.assert_close(found[item, point], total / max(weight, 1e-12), rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert feats.grad is not None and feats.grad.abs().sum() > 0


@pytest.mark.parametrize("shape", [(2, 1, 7, 8, 6), (3, 1, 3000, 10, 10)])
@pytest.mark.parametrize("mode", ["z_order", "hilbert"])
def test_serialized_coordinates(mode: str, shape: tuple[int, ...]):
    _, coords = cloud()
    codes = encode_seq(coords, torch.Size(shape), mode)
    bits = (max(shape[2:]) - 1).bit_length()
    assert codes.dtype == (torch.int32 if bits < 10 else torch.int64)
    assert torch.equal(decode_seq(codes, torch.Size(shape), mode), coords)
    if mode == "z_order":
        b, *at = coords[0].tolist()
        code = sum((v >> i & 1) << (3 * i + 2 - axis) for axis, v in enumerate(at) for i in range(bits))
        assert codes[0] == b << 3 * bits | code
    with pytest.raises(OptionError, match="mode='peano' is unknown; there are z_order, hilbert"):
        encode_seq(coords, shape, "peano")


def test_codes_of_32_bits():
    coords = torch.tensor([[3, 1023, 0, 9], [2, 0, 0, 0], [0, 1, 2, 3]]).int()
    codes = encode_seq(coords, (4, 1, 1024, 10, 10))
    assert codes.dtype == torch.int32 and codes[1] == -(2**31)
    assert torch.equal(decode_seq(codes, (4, 1, 1024, 10, 10)), coords)


def test_wrong_inputs():
    feats, coords = cloud()
    weight = torch.randn(4, 3, 3, 3, 5)
    for call in (
        lambda at: sparse_submanifold_conv(feats, at, SHAPE, weight),
        lambda at: sparse_conv3d(feats, at, SHAPE, weight),
        lambda at: sparse_conv3d(feats, coords, SHAPE, weight, None, None, at),
        lambda at: encode_seq(at, SHAPE),
    ):
        with pytest.raises(DtypeError, match="integers, found torch.float32"):
            call(coords + 0.5)
    _, cache = sparse_submanifold_conv(feats, coords, SHAPE, weight)
    with pytest.raises(OptionError, match="found one of a submanifold convolution"):
        sparse_conv3d(feats, coords, SHAPE, weight, None, cache)
    with pytest.raises(ShapeError, match="grid is \\[B, L, 3\\], found \\[2, 4\\]"):
        grid_sample_3d(feats, coords, SHAPE, torch.rand(2, 4))
    assert grid_sample_3d(feats, coords, SHAPE, torch.rand(2, 0, 3)).shape == (2, 0, 5)


def test_settings_and_import_names():
    set_hashmap_ratio(2.0)
    set_algorithm("masked_implicit_gemm_splitk")
    set_algorithm(Algorithm.EXPLICIT_GEMM)
    with pytest.raises(OptionError, match="algorithm='fast' is unknown"):
        set_algorithm("fast")
    install("flex_gemm")
    try:
        import flex_gemm  # pyright: ignore[reportMissingImports]
        from flex_gemm.ops.spconv import sparse_submanifold_conv3d  # pyright: ignore[reportMissingImports]

        assert sparse_submanifold_conv3d is sparse_submanifold_conv
        assert flex_gemm.ops.grid_sample.grid_sample_3d is grid_sample_3d
    finally:
        uninstall("flex_gemm")
