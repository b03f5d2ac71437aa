"""pumice.compat.spconv against plain loops over voxels and taps, and against spconv itself where it is installed."""

import copy
import inspect
import itertools
import math
import pickle
import sys
import types
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import pumice as pm
import pumice.compat.spconv as spconv
from benchmarks.harness.timing import on_threads
from pumice.compat import install, spconv_utils, uninstall
from pumice.env import settings
from pumice.errors import CoordinateError, DtypeError, OptionError, PumiceError, ShapeError

DIMS = (1, 2, 3, 4)
SHAPES = {1: (23,), 2: (9, 7), 3: (6, 5, 7), 4: (4, 3, 5, 4)}


def cloud(dim=3, channels=4, voxels=40, items=2, seed=0, dtype=torch.float64, shape=None):
    """(features, indices, spatial shape): distinct voxels in random order."""
    made = torch.Generator().manual_seed(seed)
    shape = SHAPES[dim] if shape is None else shape
    cells = torch.cat([torch.randint(0, n, (voxels, 1), generator=made) for n in (items, *shape)], 1).unique(dim=0)
    indices = cells[torch.randperm(len(cells), generator=made)].int()
    return torch.randn(len(indices), channels, dtype=dtype, generator=made), indices, [*shape]


def tensor(dim=3, **more):
    features, indices, shape = cloud(dim, **more)
    return spconv.SparseConvTensor(features, indices, shape, more.get("items", 2))


def pairs_of(indices, shape, layer, transposed=False):
    """{output: [(input row, tap)]} of a strided or transposed layer, by its rule alone; and the output's extent."""
    k, s, p, d = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    axes = range(len(shape))
    if transposed:
        extent = [(shape[a] - 1) * s[a] - 2 * p[a] + k[a] for a in axes]
    else:
        extent = [(shape[a] + 2 * p[a] - d[a] * (k[a] - 1) - 1) // s[a] + 1 for a in axes]
    found = {}
    for row, (item, *cell) in enumerate(indices.tolist()):
        for tap in itertools.product(*map(range, k)):
            if transposed:
                out = [cell[a] * s[a] - p[a] + tap[a] * d[a] for a in axes]
            else:
                ahead = [cell[a] + p[a] - tap[a] * d[a] for a in axes]
                if any(ahead[a] % s[a] for a in axes):
                    continue
                out = [ahead[a] // s[a] for a in axes]
            if all(0 <= out[a] < extent[a] for a in axes):
                found.setdefault((item, *out), []).append((row, tap))
    return found, extent


def submanifold_pairs(indices, layer):
    rows = {tuple(cell): row for row, cell in enumerate(indices.tolist())}
    found = {}
    for item, *cell in indices.tolist():
        for tap in itertools.product(*map(range, layer.kernel_size)):
            near = tuple(
                c + (t - k // 2) * d for c, t, k, d in zip(cell, tap, layer.kernel_size, layer.dilation, strict=True)
            )
            if (row := rows.get((item, *near))) is not None:
                found.setdefault((item, *cell), []).append((row, tap))
    return found


def summed(features, layer, pairs, order):
    """Rows in `order` of the sums over pairs, with the bias."""
    rows = []
    for cell in order:
        row = torch.zeros(layer.out_channels, dtype=features.dtype) if layer.bias is None else layer.bias
        for i, tap in pairs.get(cell, []):
            row = row + layer.weight[(slice(None), *tap)] @ features[i]
        rows.append(row)
    return torch.stack(rows)


def assert_same(layer, x, y, wanted):
    """Values, and gradients of a random projection by features and parameters."""
    torch.testing.assert_close(y.features, wanted)
    by = torch.randn_like(wanted)
    inputs = [x.features, *layer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad((y.features * by).sum(), inputs),
        torch.autograd.grad((wanted * by).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def cells_of(x):
    return [tuple(cell) for cell in x.indices.tolist()]


# Convolutions


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dilation", (1, 2))
def test_submanifold_convolution(dim, dilation):
    x = tensor(dim)
    x.features.requires_grad_()
    layer = getattr(spconv, f"SubMConv{dim}d")(4, 5, 3, stride=2, padding=7, dilation=dilation).double()
    y = layer(x)
    assert y.spatial_shape == x.spatial_shape and torch.equal(y.indices, x.indices)
    assert_same(layer, x, y, summed(x.features, layer, submanifold_pairs(x.indices, layer), cells_of(x)))


STRIDED = [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 1), (3, 1, 0, 1), (2, 1, 1, 2), (1, 2, 0, 1)]


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spread", STRIDED)
def test_strided_convolution(dim, spread):
    kernel, stride, padding, dilation = spread
    x = tensor(dim)
    x.features.requires_grad_()
    layer = getattr(spconv, f"SparseConv{dim}d")(4, 5, kernel, stride, padding, dilation).double()
    y = layer(x)
    pairs, extent = pairs_of(x.indices, x.spatial_shape, layer)
    assert y.spatial_shape == extent and sorted(pairs) == sorted(cells_of(y))
    assert_same(layer, x, y, summed(x.features, layer, pairs, cells_of(y)))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spread", ((2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), (3, 2, 1, 2)))
def test_transposed_convolution(dim, spread):
    kernel, stride, padding, dilation = spread
    x = tensor(dim, voxels=15)
    x.features.requires_grad_()
    layer = getattr(spconv, f"SparseConvTranspose{dim}d")(4, 5, kernel, stride, padding, dilation).double()
    y = layer(x)
    pairs, extent = pairs_of(x.indices, x.spatial_shape, layer, transposed=True)
    assert y.spatial_shape == extent and sorted(pairs) == sorted(cells_of(y))
    assert_same(layer, x, y, summed(x.features, layer, pairs, cells_of(y)))


def back_pairs(x, y, layer):
    """Pairs of the inverse of `layer`, which made y of x: by the same taps, not flipped."""
    forward, _ = pairs_of(x.indices, x.spatial_shape, layer, transposed=layer.transposed)
    places = {cell: row for row, cell in enumerate(cells_of(y))}
    found = {}
    for cell, pairs in forward.items():
        for i, tap in pairs:
            found.setdefault(cells_of(x)[i], []).append((places[cell], tap))
    return found


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spread", ((3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 1), (2, 1, 0, 2)))
def test_inverse_convolution_returns_to_the_rows_of_its_key(dim, spread):
    x = tensor(dim)
    down = getattr(spconv, f"SparseConv{dim}d")(4, 4, *spread, indice_key="down").double()
    y = down(x)
    y = y.replace_feature(y.features.detach().requires_grad_())
    layer = getattr(spconv, f"SparseInverseConv{dim}d")(4, 5, spread[0], "down").double()
    z = layer(y)
    assert z.spatial_shape == x.spatial_shape and torch.equal(z.indices, x.indices)
    assert_same(layer, y, z, summed(y.features, layer, back_pairs(x, y, down), cells_of(x)))


def test_inverse_of_a_transposed_convolution():
    x = tensor(3, voxels=12)
    up = spconv.SparseConvTranspose3d(4, 4, 2, 2, indice_key="up").double()
    y = up(x)
    y = y.replace_feature(y.features.detach().requires_grad_())
    layer = spconv.SparseInverseConv3d(4, 5, 2, "up").double()
    z = layer(y)
    assert torch.equal(z.indices, x.indices)
    assert_same(layer, y, z, summed(y.features, layer, back_pairs(x, y, up), cells_of(x)))


def test_unequal_sizes_per_axis():
    x = tensor(3)
    layer = spconv.SparseConv3d(4, 5, (3, 1, 2), stride=[2, 1, 1], padding=np.array([1, 0, 1])).double()
    y = layer(x)
    pairs, extent = pairs_of(x.indices, x.spatial_shape, layer)
    assert y.spatial_shape == extent
    torch.testing.assert_close(y.features, summed(x.features, layer, pairs, cells_of(y)))


@pytest.mark.parametrize("kind", ("SubMConv3d", "SparseConv3d", "SparseConvTranspose3d", "SparseInverseConv3d"))
def test_kernel_of_size_one_reads_the_weight_as_spconv_does(kind):
    x = tensor(3)
    x.features.requires_grad_()
    layer = getattr(spconv, kind)(4, 6, 1, indice_key="unused").double()
    y = layer(x)
    assert layer.weight.shape == (6, 1, 1, 1, 4) and torch.equal(y.indices, x.indices)
    assert_same(layer, x, y, x.features @ layer.weight.view(4, 6) + layer.bias)
    assert "unused" not in y.indice_dict


def test_strided_kernel_of_size_one_is_a_convolution():
    x = tensor(3)
    layer = spconv.SparseConv3d(4, 6, 1, 2, bias=False).double()
    y, rows = layer(x), {tuple(cell): row for row, cell in enumerate(x.indices.tolist())}
    wanted = [
        x.features[rows[(cell[0], *(2 * c for c in cell[1:]))]] @ layer.weight[:, 0, 0, 0].t() for cell in cells_of(y)
    ]
    torch.testing.assert_close(y.features, torch.stack(wanted))


def test_groups_are_an_extension():
    x = tensor(3)
    layer = spconv.SubMConv3d(4, 4, 1, groups=2, bias=False).double()
    y = layer(x).features
    for half in (slice(0, 2), slice(2, 4)):
        torch.testing.assert_close(y[:, half], x.features[:, half] @ layer.weight[half, 0, 0, 0].t())


@pytest.mark.parametrize(
    "make",
    (
        lambda: spconv.SubMConv3d(4, 4, 2),
        lambda: spconv.SubMConv3d(4, 4, (3, 2, 3)),
        lambda: spconv.SparseConv3d(4, 4, 1, padding=1),
        lambda: spconv.SparseConv3d(4, 4, 3, stride=0),
        lambda: spconv.SparseConv3d(4, 4, 3, padding=(1, 1)),
    ),
)
def test_windows_that_spconv_refuses(make):
    with pytest.raises((OptionError, ShapeError)):
        make()


def test_attributes_of_a_convolution():
    layer = spconv.SparseConv3d(
        4, 5, 3, (1, 2, 2), 1, bias=False, indice_key="k", algo=spconv.ConvAlgo.Native, name="n"
    )
    assert (layer.in_channels, layer.out_channels, layer.ndim, layer.groups) == (4, 5, 3, 1)
    assert (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == ([3] * 3, [1, 2, 2], [1] * 3, [1] * 3)
    assert (layer.subm, layer.inverse, layer.transposed, layer.conv1x1, layer.bias) == (False,) * 4 + (None,)
    assert (layer.indice_key, layer.algo, layer.name) == ("k", spconv.ConvAlgo.Native, "n")
    assert layer.weight.shape == (5, 3, 3, 3, 4) and layer.weight.abs().max() <= 1 / math.sqrt(4 * 27)
    assert layer.is_inverseable() and not spconv.SubMConv3d(4, 4, 3, indice_key="k").is_inverseable()
    assert isinstance(layer, spconv.conv.SparseConvolution) and isinstance(layer, spconv.SparseModule)
    assert isinstance(spconv.SubMConv2d(1, 1, 3), spconv.SubMConv2d) and not isinstance(layer, spconv.SubMConv3d)


def test_layers_pickle_and_copy():
    x = tensor(3)
    net = spconv.SparseSequential(
        spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="k"), nn.ReLU(), spconv.SparseInverseConv3d(4, 4, 3, "k")
    ).double()
    wanted = net(x).features
    torch.testing.assert_close(pickle.loads(pickle.dumps(net))(x).features, wanted, rtol=0, atol=0)


def test_add_input():
    x = tensor(3)
    layer = spconv.SubMConv3d(4, 4, 3).double()
    torch.testing.assert_close(layer(x, add_input=x).features, layer(x).features + x.features)


# Indice keys


def test_keys_hold_the_pairs_of_their_layer():
    x = tensor(3)
    layer = spconv.SparseConv3d(4, 5, 3, 2, 1, indice_key="down").double()
    y = layer(x)
    assert x.indice_dict == {} and list(y.indice_dict) == ["down"]
    data = y.find_indice_pair("down")
    assert data is y.indice_dict["down"] and y.find_indice_pair(None) is y.find_indice_pair("up") is None
    assert torch.equal(data.indices, x.indices) and torch.equal(data.out_indices, y.indices)
    assert (data.spatial_shape, data.out_spatial_shape) == (x.spatial_shape, y.spatial_shape)
    assert (data.ksize, data.stride, data.padding, data.dilation) == ([3] * 3, [2] * 3, [1] * 3, [1] * 3)
    pairs, numbers = data.indice_pairs, data.indice_pair_num
    assert pairs.shape == (2, 27, len(x.indices)) and pairs.dtype == numbers.dtype == torch.int32
    expected, _ = pairs_of(x.indices, x.spatial_shape, layer)
    wanted = {(i, cell, tap) for cell, each in expected.items() for i, tap in each}
    found = set()
    for place, tap in enumerate(itertools.product(range(3), repeat=3)):
        count = int(numbers[place])
        assert (pairs[:, place, count:] == -1).all()
        found |= {(i, cells_of(y)[o], tap) for i, o in pairs[:, place, :count].t().tolist()}
    assert found == wanted
    assert data[-2] is not None and torch.equal(data[-2], numbers) and data[4] == x.spatial_shape


def test_submanifold_layers_share_a_key():
    x = tensor(3)
    first, second = (spconv.SubMConv3d(4, 4, 3, indice_key="k").double() for _ in range(2))
    y = second(first(x))
    assert y.indice_dict["k"].is_subm and int(y.indice_dict["k"].indice_pair_num[13]) == len(x.indices)
    torch.testing.assert_close(
        y.features, summed(first(x).features, second, submanifold_pairs(x.indices, second), cells_of(x))
    )


def test_a_key_is_taken_up_by_equal_coordinates():
    x = tensor(3)
    layer = spconv.SubMConv3d(4, 4, 3, indice_key="k").double()
    y = layer(x)
    again = spconv.SparseConvTensor(y.features, y.indices.clone(), y.spatial_shape, 2, indice_dict=y.indice_dict)
    z = layer(again)
    assert z.sparse.geometry is x.sparse.geometry
    torch.testing.assert_close(z.features, layer(y).features)


def test_tensors_made_anew_of_known_indices_keep_their_maps():
    x = tensor(3)
    y = spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="k").double()(x)
    again = spconv.SparseConvTensor(y.features, y.indices, y.spatial_shape, y.batch_size, indice_dict=y.indice_dict)
    assert again.sparse.geometry is y.sparse.geometry
    other = spconv.SparseConvTensor(y.features, y.indices, [90, 90, 90], y.batch_size, indice_dict=y.indice_dict)
    assert other.sparse.geometry is not y.sparse.geometry and other.sparse.spatial_shape == (90, 90, 90)


def clashes():
    x = tensor(3)
    y = spconv.SubMConv3d(4, 4, 3, indice_key="k").double()(x)
    down = spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="d").double()(x)
    fewer = spconv.SparseConvTensor(y.features[1:], y.indices[1:], y.spatial_shape, 2, indice_dict=y.indice_dict)
    turned = spconv.SparseConvTensor(y.features, y.indices.flip(0), y.spatial_shape, 2, indice_dict=y.indice_dict)
    wide = spconv.SparseConvTensor(y.features, y.indices, [9, 9, 9], 2, indice_dict=y.indice_dict)
    short = spconv.SparseConvTensor(
        down.features[1:], down.indices[1:], down.spatial_shape, 2, indice_dict=down.indice_dict
    )
    yield "strided after submanifold", spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="k"), y
    yield "submanifold after strided", spconv.SubMConv3d(4, 4, 3, indice_key="d"), down
    yield "strided twice", spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="d"), down
    yield "another kernel", spconv.SubMConv3d(4, 4, 5, indice_key="k"), y
    yield "another dilation", spconv.SubMConv3d(4, 4, 3, dilation=2, indice_key="k"), y
    yield "fewer rows", spconv.SubMConv3d(4, 4, 3, indice_key="k"), fewer
    yield "other rows", spconv.SubMConv3d(4, 4, 3, indice_key="k"), turned
    yield "another extent", spconv.SubMConv3d(4, 4, 3, indice_key="k"), wide
    yield "inverse of nothing", spconv.SparseInverseConv3d(4, 4, 3, "none"), down
    yield "inverse of a submanifold layer", spconv.SparseInverseConv3d(4, 4, 3, "k"), y
    yield "inverse by another kernel", spconv.SparseInverseConv3d(4, 4, 2, "d"), down
    yield "inverse from fewer rows", spconv.SparseInverseConv3d(4, 4, 3, "d"), short
    yield (
        "inverse from the fine level",
        spconv.SparseInverseConv3d(4, 4, 3, "d"),
        spconv.SparseConvTensor(x.features, x.indices, x.spatial_shape, 2, indice_dict=down.indice_dict),
    )
    yield "pool of a known key", spconv.SparseMaxPool3d(3, 2, 1, indice_key="d"), down


@pytest.mark.parametrize("case", range(len(list(clashes()))))
def test_clashes_of_keys_are_reported(case):
    told, layer, x = list(clashes())[case]
    with pytest.raises(PumiceError, match="indice key|needs the key"):
        layer.double()(x)
    assert told


def test_keys_of_a_branch_are_not_seen_by_others():
    x = tensor(3)
    layer = spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="k").double()
    assert torch.equal(layer(x).features, layer(x).features)


# Tensors


@pytest.mark.parametrize(
    "shape",
    ([6, 5, 7], (6, 5, 7), np.array([6, 5, 7]), torch.tensor([6, 5, 7]), [torch.tensor(n) for n in (6, 5, 7)]),
    ids=("list", "tuple", "array", "tensor", "0-d tensors"),
)
def test_spatial_shape_in_every_form(shape):
    features, indices, _ = cloud(3)
    for x in (
        spconv.SparseConvTensor(features, indices, shape, 2),
        spconv.SparseConvTensor(features=features, indices=indices.long(), spatial_shape=shape, batch_size=2),
    ):
        assert x.spatial_shape == [6, 5, 7] and all(type(n) is int for n in x.spatial_shape)
        assert x.indices.dtype == torch.int32 and x.spatial_size == 210 and x.batch_size == 2
        assert x.features is features


@pytest.mark.parametrize(
    "change, error",
    (
        (lambda f, i: (f[:, None], i, [6, 5, 7], 2), ShapeError),
        (lambda f, i: (f[1:], i, [6, 5, 7], 2), ShapeError),
        (lambda f, i: (f, i, [6, 5], 2), ShapeError),
        (lambda f, i: (f, i.double(), [6, 5, 7], 2), DtypeError),
        (lambda f, i: (f, i, [6, 5, 3], 2), CoordinateError),
        (lambda f, i: (f, i, [6, 5, 7], 1), CoordinateError),
        (lambda f, i: (torch.cat([f, f]), torch.cat([i, i]), [6, 5, 7], 2), CoordinateError),
    ),
)
def test_bad_tensors(change, error):
    features, indices, _ = cloud(3)
    with pytest.raises(error):
        spconv.SparseConvTensor(*change(features, indices))


def test_features_are_set_and_replaced():
    x = tensor(3)
    y = x.replace_feature(x.features * 2)
    assert type(y) is spconv.SparseConvTensor and y.indice_dict is x.indice_dict and y.indices is x.indices
    before = x.features
    x.features = x.features + 1  # as in spconv 1
    torch.testing.assert_close(x.features, before + 1)
    torch.testing.assert_close(y.features, before * 2)
    assert "replace_feature" in x.__dir__()
    torch.testing.assert_close(x.minus().features, -x.features)


def test_features_of_more_axes_are_kept():
    x = tensor(3)
    wide = torch.randn(len(x.indices), 2, 3, dtype=torch.float64)
    y = spconv.SparseConvTensor(wide.reshape(len(wide), -1), x.indices, x.spatial_shape, 2)
    y._features = wide
    assert y.features is wide and y._features is wide and torch.equal(y.indices, x.indices)
    z = y.replace_feature(wide.flatten(1)[:, :4])
    spconv.SubMConv3d(4, 4, 3).double()(z)
    with pytest.raises(ShapeError):
        spconv.SubMConv3d(4, 4, 3).double()(y)


def test_rows_are_merged_by_setting_features_and_indices():
    """As detectors do that gather voxels of several levels: duplicates, until they are merged."""
    x = tensor(3)
    features = x.features
    y = x.replace_feature(torch.cat([features, features]))
    y.indices = torch.cat([x.indices, x.indices])
    assert y.features.shape == (2 * len(x.indices), 4) and len(y.indices) == 2 * len(x.indices)
    with pytest.raises(CoordinateError):
        spconv.SubMConv3d(4, 4, 3).double()(y)
    z = spconv.modules.RemoveDuplicate()(y)
    assert len(z.indices) == len(x.indices) and sorted(cells_of(z)) == sorted(cells_of(x))
    rows = {cell: row for row, cell in enumerate(cells_of(x))}
    torch.testing.assert_close(z.features, features[[rows[cell] for cell in cells_of(z)]])


def test_indices_written_in_place_are_not_searched():
    x = tensor(3)
    x.indices[:, 1:] *= 1
    assert len(x.indices)
    with pytest.raises(CoordinateError, match="in place"):
        spconv.SubMConv3d(4, 4, 3).double()(x)


def test_spatial_shape_and_batch_size_are_set():
    x = tensor(3)
    x.spatial_shape = torch.tensor([8, 8, 8])
    x.batch_size = 3
    assert x.dense().shape == (3, 4, 8, 8, 8) and x.spatial_shape == [8, 8, 8]


def test_dense_and_back():
    x = tensor(3)
    wanted = torch.zeros(2, *x.spatial_shape, 4, dtype=torch.float64)
    for row, cell in enumerate(cells_of(x)):
        wanted[cell] = x.features[row]
    assert torch.equal(x.dense(channels_first=False), wanted) and x.dense().is_contiguous()
    assert torch.equal(x.dense(), wanted.permute(0, 4, 1, 2, 3))
    assert torch.equal(spconv.ToDense()(x), x.dense())
    again = spconv.SparseConvTensor.from_dense(wanted)
    assert again.spatial_shape == x.spatial_shape and torch.equal(again.dense(False), wanted)


def test_selection_of_rows():
    x = spconv.SubMConv3d(4, 4, 3, indice_key="k").double()(tensor(3))
    mask = x.features[:, 0] > 0
    y = x.select_by_index(mask)
    assert torch.equal(y.indices, x.indices[mask]) and torch.equal(y.features, x.features[mask])
    assert y.indice_dict == {} and "k" in x.indice_dict
    spconv.SubMConv3d(4, 4, 3, indice_key="k").double()(y)


def test_arithmetic():
    x = tensor(3)
    y = x.replace_feature(x.features * 3)
    other = spconv.SparseConvTensor(x.features, x.indices.clone(), x.spatial_shape, 2)
    for z in (x + y, x + y.features, x.__radd__(y.features), other + y):
        torch.testing.assert_close(z.features, x.features * 4)
    before, kept = x.features, x
    x += y
    assert x is kept
    torch.testing.assert_close(x.features, before * 4)


def test_plain_attributes_are_kept():
    x = tensor(3)
    names = (
        "grid",
        "voxel_num",
        "benchmark",
        "benchmark_record",
        "thrust_allocator",
        "_timer",
        "force_algo",
        "int8_scale",
    )
    for name in names:
        assert hasattr(x, name)
        setattr(x, name, name)
    for y in (x.shadow_copy(), x.replace_feature(x.features), spconv.SubMConv3d(4, 4, 3).double()(x)):
        assert all(getattr(y, name) == name for name in names)
    assert not x.is_quantized and repr(x).startswith("SparseConvTensor[shape=")
    with pytest.raises(DtypeError):
        x.q_scale()


def test_parts_join_to_an_equal_tensor():
    x = tensor(3)
    y = spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="k").double()(x)
    leaves, spec = pytree.tree_flatten(y)
    z = pytree.tree_unflatten(leaves, spec)
    hash(y.parts()[1])
    assert torch.equal(z.features, y.features) and z.spatial_shape == y.spatial_shape and z.batch_size == 2
    back = spconv.SparseInverseConv3d(4, 4, 3, "k").double()
    assert torch.equal(back(z).features, back(y).features) and torch.equal(back(z).indices, x.indices)
    copied = pickle.loads(pickle.dumps(x))
    assert torch.equal(copied.features, x.features) and torch.equal(copied.indices, x.indices)


def test_empty_tensors():
    x = spconv.SparseConvTensor(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.int32), [4, 4, 4], 1)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), spconv.SparseConv3d(8, 8, 3, 2)
    )
    y = net(x)
    assert y.features.shape == (0, 8) and net[1].num_batches_tracked == 0


# Pools


def pooled(x, layer, reduce):
    pairs, _ = pairs_of(x.indices, x.spatial_shape, layer)
    return {cell: reduce(torch.stack([x.features[i] for i, _ in each])) for cell, each in pairs.items()}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spread", ((3, 2, 1), (2, None, 0), (3, 1, 1)))
def test_maximum_starts_from_zero(dim, spread):
    x = tensor(dim)
    layer = getattr(spconv, f"SparseMaxPool{dim}d")(*spread)
    y = layer(x)
    wanted = pooled(x, layer, lambda rows: rows.amax(0).clamp(min=0))
    assert y.spatial_shape == pairs_of(x.indices, x.spatial_shape, layer)[1] and sorted(wanted) == sorted(cells_of(y))
    torch.testing.assert_close(y.features, torch.stack([wanted[cell] for cell in cells_of(y)]))


@pytest.mark.parametrize("dim", (1, 2, 3))
def test_mean_is_over_inputs_that_exist(dim):
    x = tensor(dim)
    layer = getattr(spconv, f"SparseAvgPool{dim}d")(3, 2, 1)
    wanted, y = pooled(x, layer, lambda rows: rows.mean(0)), layer(x)
    torch.testing.assert_close(y.features, torch.stack([wanted[cell] for cell in cells_of(y)]))


def test_submanifold_maximum():
    x = tensor(2)
    layer = spconv.SparseMaxPool2d(3, 1, 1, subm=True, algo=spconv.ConvAlgo.Native, indice_key="pool")
    y = layer(x)
    near = submanifold_pairs(x.indices, layer)
    wanted = torch.stack([x.features[[i for i, _ in near[cell]]].amax(0).clamp(min=0) for cell in cells_of(x)])
    assert torch.equal(y.indices, x.indices) and y.spatial_shape == x.spatial_shape
    torch.testing.assert_close(y.features, wanted)


def test_a_pool_is_inverted_by_its_key():
    x = tensor(3)
    pool = spconv.SparseMaxPool3d(3, 2, 1, indice_key="pool")
    y = pool(x)
    layer = spconv.SparseInverseConv3d(4, 5, 3, "pool").double()
    pool.transposed = False
    torch.testing.assert_close(layer(y).features, summed(y.features, layer, back_pairs(x, y, pool), cells_of(x)))


def test_global_pools():
    x = tensor(3)
    items = [x.features[x.indices[:, 0] == item] for item in range(2)]
    torch.testing.assert_close(spconv.SparseGlobalMaxPool()(x), torch.stack([rows.amax(0) for rows in items]))
    torch.testing.assert_close(spconv.SparseGlobalAvgPool()(x), torch.stack([rows.mean(0) for rows in items]))


# Containers


def test_sequential_passes_features_to_dense_modules():
    class Own(nn.Module):
        def forward(self, features):
            assert type(features) is torch.Tensor
            return features * 2

    x = tensor(3)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 4, 1, bias=False), Own(), nn.Sequential(nn.Linear(4, 3))
    ).double()
    wanted = net[2](2 * (x.features @ net[0].weight.view(4, 4)))
    torch.testing.assert_close(net(x).features, wanted)
    net.add(spconv.ToDense())
    assert len(net) == 4 and isinstance(net[-1], spconv.ToDense) and net(x).shape == (2, 3, 6, 5, 7)
    with pytest.raises(OptionError):
        net.add(nn.ReLU(), "0")


def test_sequential_takes_names():
    for net in (
        spconv.SparseSequential(OrderedDict(a=spconv.SubMConv3d(4, 4, 3), b=nn.ReLU())),
        spconv.SparseSequential(a=spconv.SubMConv3d(4, 4, 3), b=nn.ReLU()),
    ):
        assert [*dict(net.named_children())] == ["a", "b"] and (net.double()(tensor(3)).features >= 0).all()


def test_dense_modules_of_spconv():
    x = tensor(3)
    for layer in (spconv.SparseReLU(), spconv.SparseBatchNorm(4).double(), spconv.SparseIdentity()):
        torch.testing.assert_close(layer(x).features, layer(x.features))
    assert spconv.is_spconv_module(spconv.SparseReLU()) and not spconv.is_spconv_module(nn.ReLU())
    x.grid = torch.zeros(1)
    assert spconv.RemoveGrid()(x).grid is None and spconv.Identity()(x) is x
    net = spconv.SparseSequential(a=spconv.SubMConv3d(4, 4, 3))
    spconv.assign_name_for_sparse_modules(net)
    assert net[0]._sparse_unique_name == "a"


def test_tables():
    x = tensor(3)
    branches = spconv.ConcatTable().add(spconv.Identity()).add(spconv.SparseReLU())
    both = branches(x)
    torch.testing.assert_close(spconv.AddTable()(both).features, x.features + x.features.relu())
    assert spconv.JoinTable()(both).features.shape[1] == 8


def test_sum_over_the_union_of_indices():
    x, y = tensor(3), tensor(3, seed=1)
    for z in (spconv.functional.sparse_add(x, y), spconv.AddTableMisaligned()([x, y])):
        torch.testing.assert_close(z.dense(), x.dense() + y.dense())
        assert len(z.indices) == len({*cells_of(x), *cells_of(y)}) and z.indice_dict == {}
    coarse = spconv.SparseConv3d(4, 4, 3, 2, 1).double()(x)
    other = spconv.SparseConvTensor(coarse.features, coarse.indices, coarse.spatial_shape, 2)
    torch.testing.assert_close(spconv.functional.sparse_add(coarse, other).dense(), 2 * coarse.dense())
    with pytest.raises(ShapeError):
        spconv.functional.sparse_add(x, coarse)


# Checkpoints


@pytest.mark.parametrize("layout, axes", (("RSCK", (1, 2, 3, 4, 0)), ("RSKC", (1, 2, 3, 0, 4))))
def test_older_layouts_load(layout, axes):
    layer, other = (spconv.SparseConv3d(4, 5, 3, 2, bias=False) for _ in range(2))
    saved = layer.state_dict()
    assert saved._metadata[""]["version"] == 2 and [*saved] == ["weight"]
    other.load_state_dict({"weight": layer.weight.detach().permute(axes).contiguous()})
    assert torch.equal(layer.weight, other.weight), layout


def test_a_layout_that_two_fit_is_reported():
    layer = spconv.SubMConv3d(4, 4, 3, bias=False)
    with pytest.raises(RuntimeError, match="RSCK .* or RSKC"):
        layer.load_state_dict({"weight": torch.zeros(3, 3, 3, 4, 4)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": torch.zeros(3, 3, 3, 4, 7)})


def test_kernels_of_size_one_load_as_they_multiply():
    layer, saved = spconv.SubMConv3d(4, 6, 1, bias=False).double(), torch.randn(1, 1, 1, 4, 6, dtype=torch.float64)
    layer.load_state_dict({"weight": saved})
    x = tensor(3)
    torch.testing.assert_close(layer(x).features, x.features @ saved.view(4, 6))


@pytest.mark.parametrize("layout, axes", (("RSCK", (4, 0, 1, 2, 3)), ("RSKC", (3, 0, 1, 2, 4)), ("KRSC", None)))
def test_a_layout_named_by_the_environment(layout, axes, monkeypatch):
    monkeypatch.setenv("SPCONV_SAVED_WEIGHT_LAYOUT", layout)
    settings.cache_clear()
    layer = spconv.SubMConv3d(4, 4, 3, bias=False)
    saved = torch.randn(3, 3, 3, 4, 4) if axes else torch.randn(4, 3, 3, 3, 4)
    layer.load_state_dict({"weight": saved})
    assert torch.equal(layer.weight, saved.permute(axes) if axes else saved)
    monkeypatch.setenv("SPCONV_SAVED_WEIGHT_LAYOUT", "KCRS")
    settings.cache_clear()
    with pytest.raises(OptionError, match="KRSC, RSKC, RSCK"):
        settings()
    monkeypatch.delenv("SPCONV_SAVED_WEIGHT_LAYOUT")
    settings.cache_clear()


def test_loaders_of_others_convert_themselves(monkeypatch):
    """As mmdetection3d does, which replaces SparseModule's loader: weights of no version 2 are RSCK."""

    def load(self, state, prefix, metadata, strict, missing, unexpected, errors):
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state, prefix, metadata, strict, missing, unexpected, errors)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                saved = state[prefix + name]
                parameter.data.copy_(saved if metadata.get("version") == 2 else saved.movedim(-1, 0))

    monkeypatch.setattr(spconv.SparseModule, "_load_from_state_dict", load, raising=False)
    for inside, outside in ((4, 5), (4, 4)):
        layer = spconv.SparseConv3d(inside, outside, 3, bias=False)
        saved = torch.randn(3, 3, 3, inside, outside)
        layer.load_state_dict({"weight": saved})
        assert torch.equal(layer.weight, saved.permute(4, 0, 1, 2, 3))
        again = spconv.SparseConv3d(inside, outside, 3, bias=False)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again.weight, layer.weight)


def test_copies_load_for_themselves():
    layer = spconv.SubMConv3d(4, 6, 1, bias=False)
    other, before = copy.deepcopy(layer), layer.weight.detach().clone()
    other.load_state_dict({"weight": torch.ones(1, 1, 1, 4, 6)})
    assert torch.equal(layer.weight, before) and (other.weight == 1).all()
    x = tensor(3, dtype=torch.float32)
    torch.testing.assert_close(other(x).features, x.features.sum(1, keepdim=True).expand(-1, 6))


def test_recorded_voxel_counts_load_with_and_without():
    layer = spconv.SparseConv3d(4, 4, 3, 2, record_voxel_count=True)
    assert layer.get_max_num_voxels().dtype == torch.int32
    state = layer.state_dict()
    del state["max_num_voxels_during_training"]
    layer.load_state_dict(state)


# Voxelisers


def voxels_by_loop(points, size, low, cells, max_voxels, max_points):
    """(voxels, zyx indices, counts, voxel of each point) in the order of the points."""
    known, voxels, ids = {}, [], []
    for point in points:
        cell = [math.floor(np.float32(np.float32(p - a) / s)) for p, a, s in zip(point, low, size, strict=False)]
        if any(not 0 <= c < n for c, n in zip(cell, cells, strict=True)):
            ids.append(-1)
            continue
        key = tuple(cell[::-1])
        if key not in known and len(known) == max_voxels:
            ids.append(-1)
            continue
        place = known.setdefault(key, len(known))
        if place == len(voxels):
            voxels.append([])
        if len(voxels[place]) < max_points:
            voxels[place].append(point)
        ids.append(place)
    filled = np.zeros((len(voxels), max_points, points.shape[1]), np.float32)
    for place, rows in enumerate(voxels):
        filled[place, : len(rows)] = rows
    return filled, np.array([*known], np.int32), np.array([len(rows) for rows in voxels], np.int32), np.array(ids)


SIZE, SPAN = [0.5, 0.25, 0.5], [-2.0, -1.0, -1.0, 2.0, 1.0, 1.0]
LIMITS = (60, 3)


def scan(points=400, seed=0):
    return np.random.default_rng(seed).uniform(-2.2, 2.2, (points, 4)).astype(np.float32)


def by_loop(points):
    size, low = np.array(SIZE, np.float32), np.array(SPAN[:3], np.float32)
    return voxels_by_loop(points, size, low, [8, 8, 4], *LIMITS)


def test_points_are_grouped_in_their_order():
    points = scan()
    wanted = by_loop(points)
    made = spconv_utils.PointToVoxel(SIZE, SPAN, 4, *LIMITS, torch.device("cpu"))
    for ours, theirs in zip(made.generate_voxel_with_id(torch.from_numpy(points)), wanted, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    assert len(wanted[0]) == 60 and wanted[2].max() == 3 and (wanted[3] < 0).any()
    full, _, counts = made(torch.from_numpy(points), empty_mean=True)
    row = int((counts == 2).nonzero()[0, 0])
    torch.testing.assert_close(full[row, 2], full[row, :2].mean(0))
    assert made.grid_size == [4, 8, 8]


def test_voxelisers_of_every_version():
    points, wanted = scan(), by_loop(scan())
    generator = spconv_utils.Point2VoxelCPU3d(
        vsize_xyz=SIZE, coors_range_xyz=SPAN, num_point_features=4, max_num_voxels=60, max_num_points_per_voxel=3
    )
    for ours, theirs in zip(generator.point_to_voxel(torch.from_numpy(points)), wanted, strict=False):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    older = {"voxel_size": SIZE, "point_cloud_range": SPAN, "max_num_points": 3, "max_voxels": 60}
    for ours, theirs in zip(spconv_utils.VoxelGenerator(**older).generate(points), wanted, strict=False):
        np.testing.assert_array_equal(ours, theirs)
    found = spconv_utils.VoxelGeneratorV2(**older, full_mean=False, block_filtering=False).generate(points)
    np.testing.assert_array_equal(found["voxels"], wanted[0])
    np.testing.assert_array_equal(found["num_points_per_voxel"], wanted[2])
    assert found["voxel_num"] == 60
    assert len(spconv_utils.VoxelGenerator(**older).generate(points, max_voxels=7)[0]) == 7
    with pytest.raises(OptionError):
        spconv_utils.VoxelGeneratorV2(**older, block_filtering=True)


def test_no_points():
    made = spconv_utils.PointToVoxel(SIZE, SPAN, 4, *LIMITS)
    voxels, indices, counts, ids = made.generate_voxel_with_id(torch.zeros(0, 4))
    assert voxels.shape == (0, 3, 4) and indices.shape == (0, 3) and len(counts) == len(ids) == 0


def test_features_of_points():
    ids = torch.tensor([1, -1, 0])
    found = spconv_utils.gather_features_by_pc_voxel_id(torch.tensor([[1.0], [2.0]]), ids, 9)
    assert found.tolist() == [[2.0], [9.0], [1.0]]


def test_hash_table():
    table = spconv_utils.HashTable(torch.device("cpu"), torch.int32, torch.int64)
    table.insert(torch.tensor([5, 3, 7]).int(), torch.tensor([1, 6, 4]))
    table.insert(torch.tensor([3, 9]).int(), torch.tensor([8, 2]))
    values, absent = table.query(torch.tensor([9, 4, 3]).int())
    assert values[~absent].tolist() == [2, 8] and absent.tolist() == [False, True, False]
    assert table.insert_exist_keys(torch.tensor([5, 6]).int(), torch.tensor([11, 12])).tolist() == [0, 1]
    assert table.query(torch.tensor([5]).int())[0].item() == 11
    assert table.assign_arange_().item() == 4
    keys, values, count = table.items()
    assert sorted(keys.tolist()) == [3, 5, 7, 9] and sorted(values.tolist()) == [0, 1, 2, 3] and count.item() == 4


# Import names


@pytest.fixture
def installed(caplog):
    before = {path: module for path, module in sys.modules.items() if path.partition(".")[0] in ("spconv", "cumm")}
    install("spconv")
    yield
    uninstall("spconv")
    sys.modules.update(before)


@pytest.mark.usefixtures("installed")
def test_import_names():
    import cumm.tensorview as tv  # pyright: ignore
    import spconv as named  # pyright: ignore
    import spconv.pytorch as sp  # pyright: ignore
    from spconv.core import ConvAlgo  # pyright: ignore
    from spconv.modules import SparseModule  # pyright: ignore
    from spconv.pytorch import functional, ops  # pyright: ignore
    from spconv.pytorch.conv import SparseConvolution, SubMConv3d  # pyright: ignore
    from spconv.pytorch.hash import HashTable  # pyright: ignore
    from spconv.pytorch.modules import SparseSequential, is_spconv_module  # pyright: ignore
    from spconv.pytorch.utils import PointToVoxel, gather_features_by_pc_voxel_id  # pyright: ignore
    from spconv.utils import Point2VoxelCPU3d, VoxelGenerator, VoxelGeneratorV2  # pyright: ignore

    assert float(named.__version__[2:]) >= 2.2
    named.constants.SPCONV_USE_DIRECT_TABLE = False
    assert sp.SubMConv3d is SubMConv3d is spconv.SubMConv3d and issubclass(SubMConv3d, SparseConvolution)
    assert issubclass(SparseSequential, SparseModule) and is_spconv_module(sp.ToDense())
    assert sp.conv.SparseConvolution is SparseConvolution and sp.ConvAlgo is ConvAlgo
    assert ops.ConvAlgo is ConvAlgo
    assert tv.from_numpy(np.ones(2)).numpy().tolist() == [1, 1] and callable(functional.sparse_add)
    assert all(
        (HashTable, PointToVoxel, gather_features_by_pc_voxel_id, Point2VoxelCPU3d, VoxelGenerator, VoxelGeneratorV2)
    )
    with pytest.raises(AttributeError, match="stand-in for spconv.pytorch"):
        sp.NoSuchLayer  # noqa: B018
    with pytest.raises(ImportError):
        from spconv.pytorch import NoSuchLayer  # noqa: F401  # pyright: ignore
    for name in ("SpatialGroupConv3d", "FocalsConv3d"):
        with pytest.raises(OptionError, match="spconv-plus"):
            getattr(sp, name)(4, 4, kernel_size=3)
    from spconv.utils import rbbox_iou  # pyright: ignore

    with pytest.raises(OptionError, match="boxes"):
        rbbox_iou(1, 2, 3, 4)


class Registry:
    """What mmengine's and mmcv's registries have in common."""

    def __init__(self):
        self.layers = {}

    def register_module(self, name=None, force=False, module=None):
        assert force and isinstance(module, type)
        self.layers[name] = module


def other_package(monkeypatch, **modules):
    for path, names in modules.items():
        found = types.ModuleType(path.replace("_", "."))
        vars(found).update(names, __path__=[])
        monkeypatch.setitem(sys.modules, path.replace("_", "."), found)


def test_registries_hold_our_layers(monkeypatch):
    registry, older = Registry(), Registry()
    other_package(
        monkeypatch, mmengine={}, mmengine_registry={"MODELS": registry}, mmcv={}, mmcv_cnn={"CONV_LAYERS": older},
        mmcv_ops={"SubMConv3d": None, "nms": "theirs"},
    )  # fmt: skip
    install("spconv")
    from mmcv.ops import SubMConv3d, nms  # pyright: ignore

    uninstall("spconv")
    assert SubMConv3d is spconv.SubMConv3d and nms == "theirs"
    for each in (registry, older):
        assert each.layers["SubMConv3d"] is spconv.SubMConv3d and each.layers["SparseInverseConv3d"]
        assert "SparseConvTensor" not in each.layers


def test_without_mmcv_its_names_are_ours(monkeypatch):
    other_package(monkeypatch, mmdet3d={}, mmdet3d_ops={})
    install("spconv")
    from mmcv.ops import SparseConvTensor, SubMConv3d  # pyright: ignore
    from mmdet3d.ops import spconv as bundled  # pyright: ignore
    from mmdet3d.ops.spconv import SparseModule  # pyright: ignore

    assert SubMConv3d is bundled.SubMConv3d is spconv.SubMConv3d
    assert (SparseConvTensor, SparseModule) == (spconv.SparseConvTensor, spconv.SparseModule)
    uninstall("spconv")
    assert "mmcv" not in sys.modules and "mmdet3d.ops.spconv" not in sys.modules
    with pytest.raises(OptionError):
        install("spconv", mode="1.2")


# Programs


def networks_of(module):
    """The classes of tests/compat/networks.py over another module than the stand-in."""
    text = (Path(__file__).parent / "networks.py").read_text()
    names = {"spconv": module, "__name__": "networks_of_spconv"}
    exec(compile(text.replace("import pumice.compat.spconv as spconv\n", ""), "networks.py", "exec"), names)
    return types.SimpleNamespace(**names)


NETWORKS = ("SpUNet", "VoxelBackBone8x", "VoxelResBackBone8x", "Pillars")


def input_of(name, of, seed=0):
    dims = {"Pillars": {"channels": 8, "shape": (64, 64)}}.get(name, {})
    features, indices = networks_of(of).scene(**dims, seed=seed)
    return of.SparseConvTensor(features, indices, dims.get("shape", (41, 64, 64)), 2)


@pytest.mark.parametrize("name", NETWORKS)
def test_programs_equal_their_networks(name):
    torch.manual_seed(0)
    net = getattr(networks_of(spconv), name)().eval()
    program = pm.compile(net)
    with torch.no_grad():
        for seed in range(2):
            x = input_of(name, spconv, seed)
            y, wanted = program(x), net(x)
            if isinstance(wanted, torch.Tensor):
                torch.testing.assert_close(y, wanted)
            else:
                torch.testing.assert_close(y.features, wanted.features)
                assert torch.equal(y.indices, wanted.indices) and y.spatial_shape == wanted.spatial_shape
                assert {*y.indice_dict} <= {*wanted.indice_dict}
    assert "0 modules called as they are" in program.explain()


def test_results_of_a_program_are_inverted_by_their_keys():
    torch.manual_seed(0)
    down = spconv.SparseSequential(spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="d"), nn.BatchNorm1d(4), nn.ReLU())
    up = spconv.SparseInverseConv3d(4, 4, 3, "d")
    x = tensor(3, dtype=torch.float32)
    program = pm.compile(down.eval())
    with torch.no_grad():
        y = program(x)
        torch.testing.assert_close(up(y).features, up(down(x)).features)
        assert torch.equal(up(y).indices, x.indices)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(dtype):
    x, net = (
        tensor(3, dtype=torch.float32),
        spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3), spconv.SubMConv3d(8, 8, 1)),
    )
    wanted = net(x).features
    with torch.autocast("cpu", dtype):
        y = net(x).features
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), wanted, rtol=0.05, atol=0.05)


# spconv itself


def live_module():
    """spconv.pytorch, or the reason why it is not compared with."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import spconv.pytorch as live  # pyright: ignore
    except ImportError as error:
        return f"spconv is not installed ({error})"
    return live


@pytest.fixture(scope="module")
def live():
    found = live_module()
    if isinstance(found, str):
        pytest.skip(found)
    # With several threads spconv's CPU build loses sums.
    with on_threads(1):
        yield found


def assert_equal_tensors(ours, theirs):
    """Two results, by coordinates, to 1e-5 of the largest value."""
    assert ours.spatial_shape == theirs.spatial_shape and ours.batch_size == theirs.batch_size
    a, b = (sorted(range(len(x.indices)), key=list(map(tuple, x.indices.tolist())).__getitem__) for x in (ours, theirs))
    assert torch.equal(ours.indices[a], theirs.indices[b])
    largest = max(1.0, float(theirs.features.abs().max()))
    torch.testing.assert_close(ours.features[a], theirs.features[b], rtol=1e-5, atol=1e-5 * largest)


LAYERS = [
    *((f"SubMConv{dim}d", (4, 5, 3), {"padding": 1, "dilation": d}) for dim in DIMS for d in (1, 2)),
    *((f"SparseConv{dim}d", (4, 5, *spread), {}) for dim in DIMS for spread in STRIDED),
    *(
        (f"SparseConvTranspose{dim}d", (4, 5, *spread), {})
        for dim in DIMS
        for spread in ((2, 2), (3, 2, 1), (3, 1, 0, 2))
    ),
    *((f"{kind}{dim}d", (4, 5, 1), {}) for dim in DIMS for kind in ("SubMConv", "SparseConv", "SparseConvTranspose")),
    *((f"SparseMaxPool{dim}d", spread, {}) for dim in DIMS for spread in ((3, 2, 1), (2, 2))),
]


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: f"{case[0]}{case[1]}")
@pytest.mark.parametrize("bias", (True, False))
def test_layers_equal_spconv(live, case, bias):
    name, given, more = case
    more = more if "Pool" in name else {**more, "bias": bias}
    features, indices, shape = cloud(int(name[-2]), dtype=torch.float32)
    theirs, ours = getattr(live, name)(*given, **more), getattr(spconv, name)(*given, **more)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        wanted = theirs(live.SparseConvTensor(features, indices, shape, 2))
        assert_equal_tensors(ours(spconv.SparseConvTensor(features, indices, shape, 2)), wanted)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("spread", ((3, 2, 1), (2, 2, 0), (3, 1, 1)))
def test_inverses_equal_spconv(live, dim, spread):
    features, indices, shape = cloud(dim, dtype=torch.float32)

    def made(of):
        return of.SparseSequential(
            getattr(of, f"SubMConv{dim}d")(4, 4, 3, indice_key="s"),
            getattr(of, f"SparseConv{dim}d")(4, 5, *spread, indice_key="k"),
            getattr(of, f"SubMConv{dim}d")(5, 5, 3, indice_key="t"),
            getattr(of, f"SparseInverseConv{dim}d")(5, 6, spread[0], "k"),
        )

    theirs, ours = made(live), made(spconv)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        y, wanted = (
            net(of.SparseConvTensor(features, indices, shape, 2)) for net, of in ((ours, spconv), (theirs, live))
        )
    assert_equal_tensors(y, wanted)
    assert torch.equal(y.indices, indices) and {*y.indice_dict} == {*wanted.indice_dict} == {"s", "k", "t"}
    for key in ("s", "k"):
        a, b = y.indice_dict[key], wanted.indice_dict[key]
        assert a.indice_pairs.shape == b.indice_pairs.shape and a.is_subm == b.is_subm
        assert (a.ksize, a.spatial_shape, a.out_spatial_shape) == (b.ksize, b.spatial_shape, b.out_spatial_shape)
        # spconv lists the pairs of half the taps of a submanifold window.
        taps = slice(0, 3**dim // 2) if a.is_subm else slice(None)
        assert torch.equal(a.indice_pair_num[taps], b.indice_pair_num[taps])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_equal_spconv(live, name, training):
    torch.manual_seed(0)
    theirs, ours = (getattr(networks_of(of), name)().train(training) for of in (live, spconv))
    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm1d)):
        nn.init.uniform_(norm.running_var, 0.5, 2)
        nn.init.normal_(norm.running_mean)
    assert [*theirs.state_dict()] == [*ours.state_dict()]
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        y, wanted = ours(input_of(name, spconv)), theirs(input_of(name, live))
    if isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert_equal_tensors(y, wanted)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train(name):
    net = getattr(networks_of(spconv), name)()
    y = net(input_of(name, spconv))
    (y if isinstance(y, torch.Tensor) else y.features).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_voxelisers_equal_spconv(live):
    import cumm.tensorview as tv  # pyright: ignore
    from spconv.pytorch.utils import PointToVoxel  # pyright: ignore
    from spconv.utils import Point2VoxelCPU3d  # pyright: ignore

    assert live
    # Not empty_mean=True: spconv's CPU build adds the sums of earlier voxels to each mean.
    points, given = scan(3000), torch.from_numpy(scan(3000))
    ours, theirs = (kind(SIZE, SPAN, 4, *LIMITS) for kind in (spconv_utils.PointToVoxel, PointToVoxel))
    for a, b in zip(ours.generate_voxel_with_id(given), theirs.generate_voxel_with_id(given), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert (ours.grid_size, ours.vsize) == (theirs.grid_size, theirs.vsize)
    assert ours.coors_range == theirs.coors_range
    named = {
        "vsize_xyz": SIZE,
        "coors_range_xyz": SPAN,
        "num_point_features": 4,
        "max_num_points_per_voxel": 3,
        "max_num_voxels": 60,
    }
    found = Point2VoxelCPU3d(**named).point_to_voxel(tv.from_numpy(points))
    for a, b in zip(spconv_utils.Point2VoxelCPU3d(**named).point_to_voxel(points), found, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_signatures_equal_spconv(live):
    """Parameters of constructors: ours have spconv's names, in its order."""
    for name in (
        "SparseConvTensor",
        "SubMConv3d",
        "SparseConv2d",
        "SparseConvTranspose4d",
        "SparseInverseConv1d",
        "SparseMaxPool3d",
    ):
        ours, theirs = ([*inspect.signature(getattr(of, name).__init__).parameters] for of in (spconv, live))
        assert [each for each in ours if each in theirs] == theirs, name
    absent = [name for name in dir(live) if name[0].isupper() and not hasattr(spconv, name)]
    assert absent in ([], ["List", "Path", "Union"], ["Path", "Union"]), absent
