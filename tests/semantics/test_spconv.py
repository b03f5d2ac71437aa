"""The guide's table of other libraries' layers, checked against spconv itself where it is installed."""

import warnings

import pytest
import torch

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice import nn

SHAPE = (12, 12, 12)


@pytest.fixture(scope="module")
def spconv():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip("spconv.pytorch", reason="spconv is not installed: pip install pumice[bench]")
    with on_threads(1):  # With more, its CPU build loses sums
        yield found


@pytest.fixture
def inputs(spconv):
    chance = torch.Generator().manual_seed(0)
    cells = torch.unique(torch.randint(0, 12, (400, 3), generator=chance), dim=0)
    coords = torch.cat([torch.zeros(len(cells), 1), cells], dim=1).int()
    feats = torch.randn(len(coords), 4, generator=chance)
    return (
        pm.SparseTensor(feats, coords, spatial_shape=SHAPE),
        spconv.SparseConvTensor(feats, coords, list(SHAPE), 1),
    )


def copied(theirs, ours):
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.view_as(theirs.weight))
    return theirs


def assert_same(ours, theirs):
    """Equal voxels with equal features, in whatever order."""
    mine = {tuple(c): f for c, f in zip(ours.coords.tolist(), ours.feats.detach(), strict=True)}
    peer = {tuple(c): f for c, f in zip(theirs.indices.tolist(), theirs.features.detach(), strict=True)}
    assert mine.keys() == peer.keys()
    assert max(float((mine[c] - peer[c]).abs().max()) for c in mine) < 1e-5


@pytest.mark.parametrize("name, ours, options", [
    ("SubMConv3d", nn.Conv3d(4, 8, 3, bias=False), (3,)),
    ("SparseConv3d", nn.Conv3d(4, 8, 3, 2, padding=1, bias=False), (3, 2, 1)),
    ("SparseConv3d", nn.Conv3d(4, 8, 2, 2, padding=0, bias=False), (2, 2, 0)),
    ("SparseConv3d", nn.Conv3d(4, 8, 3, padding=1, bias=False, out="support"), (3, 1, 1)),
    ("SparseConv3d", nn.Conv3d(4, 8, (3, 1, 1), (2, 1, 1), padding=0, bias=False), ((3, 1, 1), (2, 1, 1), 0)),
    ("SparseConvTranspose3d", nn.ConvTranspose3d(4, 8, 3, 2, padding=1, bias=False), (3, 2, 1)),
])  # fmt: skip
def test_a_layer(spconv, inputs, name, ours, options):
    theirs = copied(getattr(spconv, name)(4, 8, *options, bias=False), ours)
    assert_same(ours(inputs[0]), theirs(inputs[1]))


def test_there_and_back(spconv, inputs):
    down, up = nn.Conv3d(4, 8, 3, 2, padding=1, bias=False), nn.InverseConv3d(8, 4, 3, 2, padding=1, bias=False)
    their_down = copied(spconv.SparseConv3d(4, 8, 3, 2, 1, bias=False, indice_key="k"), down)
    their_up = copied(spconv.SparseInverseConv3d(8, 4, 3, indice_key="k", bias=False), up)
    assert_same(up(down(inputs[0]), inputs[0]), their_up(their_down(inputs[1])))


def test_a_weight_of_kernel_size_1_is_converted_as_the_guide_says():
    """spconv's rule there, written out; it needs no spconv."""
    x = pm.SparseTensor(torch.randn(5, 4), torch.arange(5).view(5, 1).repeat(1, 4).int())
    theirs, ours = torch.randn(8, 1, 1, 1, 4), nn.Conv3d(4, 8, 1, bias=False)
    with torch.no_grad():
        ours.weight.copy_(theirs.reshape(4, 8).T.reshape(theirs.shape))
    torch.testing.assert_close(ours(x).feats, x.feats @ theirs.view(4, 8))
