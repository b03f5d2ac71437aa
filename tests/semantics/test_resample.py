"""Space to channel, channel to space, nearest up-sampling and columns as channels, against loops over voxels."""

import itertools

import pytest
import torch

import pumice as pm
from pumice.errors import GeometryError, OptionError, ShapeError

pytestmark = pytest.mark.usefixtures("seeded")

FACTORS = [(1, 3), (2, 2), (3, (2, 1, 3))]


def cloud(dim: int, channels: int = 3, low: int = -4):
    cells = torch.randint(low, 7, (120, dim))
    coords = torch.unique(torch.cat([torch.randint(0, 2, (120, 1)), cells], 1), dim=0).int()
    coords = coords[torch.randperm(len(coords))]
    return pm.SparseTensor(torch.randn(len(coords), channels, dtype=torch.float64), coords, dim=dim)


def rows_of(x: pm.SparseTensor):
    return {tuple(c): f for c, f in zip(x.coords.tolist(), x.feats, strict=True)}


def of(factor, dim: int) -> tuple[int, ...]:
    return (factor,) * dim if isinstance(factor, int) else factor


@pytest.mark.parametrize(("dim", "factor"), FACTORS)
def test_space_to_channel(dim: int, factor):
    x, factors = cloud(dim), of(factor, dim)
    y = pm.ops.space_to_channel(x, factor)
    cells, found = rows_of(x), rows_of(y)
    assert found.keys() == {(b, *(c // f for c, f in zip(at, factors, strict=True))) for b, *at in cells}
    places = list(itertools.product(*(range(f) for f in factors)))
    for (b, *at), feats in found.items():
        inside = [(b, *(f * c + r for f, c, r in zip(factors, at, place, strict=True))) for place in places]
        assert torch.equal(feats, torch.cat([cells.get(cell, torch.zeros(3, dtype=torch.float64)) for cell in inside]))
    assert y.stride == factors
    back = pm.ops.channel_to_space(y, factor, x)
    assert torch.equal(back.feats, x.feats) and back.geometry is x.geometry


@pytest.mark.parametrize(("dim", "factor"), FACTORS)
def test_all_children(dim: int, factor):
    factors = of(factor, dim)
    places = list(itertools.product(*(range(f) for f in factors)))
    x = cloud(dim, 2 * len(places))
    finer, near = pm.ops.channel_to_space(x, factor), pm.ops.upsample_nearest(x, factor)
    shares, whole = rows_of(finer), rows_of(near)
    assert len(shares) == len(x) * len(places) and finer.geometry is near.geometry
    for (b, *at), feats in rows_of(x).items():
        for r, place in enumerate(places):
            cell = (b, *(f * c + p for f, c, p in zip(factors, at, place, strict=True)))
            assert torch.equal(shares[cell], feats[2 * r : 2 * r + 2]) and torch.equal(whole[cell], feats)


def test_given_outputs_and_absent_voxels():
    x = cloud(3)
    coarse = pm.ops.space_to_channel(x, 2)
    near = pm.ops.upsample_nearest(coarse, 2, x)
    values = rows_of(coarse)
    for cell, feats in rows_of(near).items():
        assert torch.equal(feats, values[(cell[0], *(c // 2 for c in cell[1:]))])
    # Coordinates that were made elsewhere: some of the targets have no voxel above them.
    apart = pm.SparseTensor(coarse.feats[::2], coarse.coords[::2].clone(), stride=2)
    near = rows_of(pm.ops.upsample_nearest(apart, 2, x))
    kept = rows_of(apart)
    for cell, feats in near.items():
        above = kept.get((cell[0], *(c // 2 for c in cell[1:])))
        assert torch.equal(feats, torch.zeros_like(feats) if above is None else above)


def test_gradients():
    x = cloud(2, 4)
    feats = x.feats.requires_grad_()
    for function in (
        lambda f: pm.ops.space_to_channel(x.replace(f), 2).feats,
        lambda f: pm.ops.channel_to_space(x.replace(f), 2).feats,
        lambda f: pm.ops.upsample_nearest(x.replace(f), (2, 1)).feats,
    ):
        assert torch.autograd.gradcheck(function, feats)


def test_layers():
    x = cloud(3, 8)
    down, up = pm.nn.SpaceToChannel(2), pm.nn.ChannelToSpace(2)
    assert torch.equal(up(down(x), x).feats, x.feats)
    assert pm.nn.UpsampleNearest(2)(x).channels == 8
    net = pm.nn.Sequential(pm.nn.Conv3d(8, 8, 3), pm.nn.ChannelToSpace(2), pm.nn.Conv3d(1, 4, 3)).eval().double()
    with torch.no_grad():
        torch.testing.assert_close(pm.compile(net)(x).feats, net(x).feats)


def test_refusals():
    x = cloud(3)
    with pytest.raises(ShapeError, match="a multiple of 8 channels, found 3"):
        pm.ops.channel_to_space(x, 2)
    with pytest.raises(OptionError, match="factor takes integers of at least 1, found 0"):
        pm.ops.space_to_channel(x, 0)
    with pytest.raises(GeometryError):
        pm.ops.upsample_nearest(pm.ops.space_to_channel(x, 2), 2, cloud(3))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_birds_eye_view(axis: int):
    x = cloud(3, low=0)
    y = pm.ops.to_bev(x, axis, (7, 8, 9))
    extents = [7, 8, 9]
    height = extents.pop(axis)
    assert y.shape == (2, 3 * height, *extents)
    expected = torch.zeros_like(y)
    for (b, *at), feats in rows_of(x).items():
        h = at.pop(axis)
        for c in range(3):
            expected[(b, c * height + h, *at)] = feats[c]
    assert torch.equal(y, expected)
    with pytest.raises(OptionError, match="axis is 0 to 2, found 3"):
        pm.ops.to_bev(x, 3)
