"""MinkowskiEngine's stand-in against loops over voxels and kernel offsets, in its own coordinates and orders.

Rules: MinkowskiEngine 0.5.4. Coordinates are in finest units; offsets have the first axis fastest, odd sizes centred,
even ones from 0; a stride floors to its multiples.
"""

import builtins
import copy
import itertools
import math
import pickle
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pumice as pm
from pumice.compat import minkowski, minkowski_tensor
from pumice.errors import CoordinateError, GeometryError, OptionError, ShapeError
from pumice.testing import assert_close

ME = SimpleNamespace(**minkowski.MODULES["MinkowskiEngine"])
utils = SimpleNamespace(**minkowski.MODULES["MinkowskiEngine.utils"])
MODE = ME.SparseTensorQuantizationMode


def cloud(dim: int = 3, points: int = 60, extent: int = 6, seed: int = 0, items: int = 2) -> Tensor:
    """Distinct coordinates in an order of their own, some negative."""
    draw = torch.Generator().manual_seed(seed)
    coords = torch.randint(-2, extent - 2, (points, dim), generator=draw)
    coords = torch.cat([torch.randint(0, items, (points, 1), generator=draw), coords], 1).unique(dim=0).int()
    coords = torch.cat([coords, torch.tensor([[items - 1, *[extent] * dim]], dtype=torch.int32)])
    return coords[torch.randperm(len(coords), generator=draw)]


def tensor(dim: int = 3, channels: int = 3, seed: int = 0, **more: int) -> ME.SparseTensor:
    coords = cloud(dim, seed=seed, **more)
    draw = torch.Generator().manual_seed(seed)
    feats = torch.randn(len(coords), channels, generator=draw, dtype=torch.float64, requires_grad=True)
    return ME.SparseTensor(feats, coords)


# The rules


def cube(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    ranges = [range(k) if k % 2 == 0 else range(-(k // 2), k // 2 + 1) for k in reversed(sizes)]
    return [tuple(reversed(offset)) for offset in itertools.product(*ranges)]


def cross(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    found = [(0,) * len(sizes)]
    for axis, k in enumerate(sizes):
        steps = [*range(1, k // 2 + 1), *range(-(k // 2), 0)]
        found += [tuple(step if at == axis else 0 for at in range(len(sizes))) for step in steps]
    return found


def moved(place: Sequence[int], offset: Sequence[int], step: Sequence[int]) -> tuple[int, ...]:
    return (place[0], *(p + o * s for p, o, s in zip(place[1:], offset, step, strict=True)))


def floored(coords: Tensor, stride: Sequence[int]) -> list[list[int]]:
    return sorted({(c[0], *(p // s * s for p, s in zip(c[1:], stride, strict=True))) for c in coords.tolist()})


def pairs(inputs: Tensor, outputs: Tensor, offsets: list[tuple[int, ...]], step: Sequence[int], back: bool = False):
    """(k, input row, output row): in = out + step * offset, or out = in + step * offset."""
    of, at = (inputs, outputs) if back else (outputs, inputs)
    rows = {tuple(c): row for row, c in enumerate(at.tolist())}
    for k, offset in enumerate(offsets):
        for row, place in enumerate(of.tolist()):
            other = rows.get(moved(place, offset, step))
            if other is not None:
                yield (k, row, other) if back else (k, other, row)


def sums(x: Tensor, kernel: Tensor, found, rows: int) -> Tensor:
    y = [torch.zeros(kernel.shape[-1], dtype=x.dtype) for _ in range(rows)]
    for k, i, o in found:
        y[o] = y[o] + x[i] @ kernel[k]
    return torch.stack(y)


# Convolutions

CONVOLUTIONS = {
    "odd": (3, {"kernel_size": 3}),
    "odd, dilated": (3, {"kernel_size": 3, "dilation": 2}),
    "even": (3, {"kernel_size": 2}),
    "odd, strided": (3, {"kernel_size": 3, "stride": 2}),
    "even, strided": (3, {"kernel_size": 2, "stride": 2, "bias": True}),
    "by axis": (3, {"kernel_size": [3, 1, 2], "stride": [1, 2, 3], "dilation": [1, 2, 1]}),
    "one axis": (1, {"kernel_size": 3, "stride": 2}),
    "two axes": (2, {"kernel_size": [5, 3], "bias": True}),
    "four axes": (4, {"kernel_size": [3, 3, 2, 3], "stride": [2, 2, 2, 1]}),
    "pointwise": (3, {"kernel_size": 1, "bias": True}),
    "pointwise, strided": (3, {"kernel_size": 1, "stride": 2}),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
@pytest.mark.parametrize("fine", [1, 2])
def test_convolution(case: str, fine: int):
    dim, options = CONVOLUTIONS[case]
    x = tensor(dim)
    x = ME.SparseTensor(x.F, x.C * torch.tensor([1, *[fine] * dim], dtype=torch.int32), tensor_stride=fine)
    layer = ME.MinkowskiConvolution(3, 4, dimension=dim, **options).double()
    y = layer(x)
    window = layer.kernel_generator
    stride = [fine * s for s in window.kernel_stride]
    assert y.tensor_stride == stride
    assert sorted(map(tuple, y.C.tolist())) == (
        floored(x.C, stride) if max(window.kernel_stride) > 1 else sorted(map(tuple, x.C.tolist()))
    )
    step = [fine * d for d in window.kernel_dilation]
    kernel = layer.kernel.view(-1, 3, 4)
    wanted = sums(x.F, kernel, pairs(x.C, y.C, cube(window.kernel_size), step), len(y))
    wanted = wanted if layer.bias is None else wanted + layer.bias
    assert_close(y.F, wanted)
    weights = torch.randn(y.F.shape, dtype=torch.float64)
    given = [x.F, *layer.parameters()]
    for found, expected in zip(
        torch.autograd.grad((y.F * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        assert_close(found, expected)


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_cross(dim: int):
    x, sizes = tensor(dim), [3, 5, 3, 1][:dim]
    generator = ME.KernelGenerator(sizes, 1, 1, region_type=ME.RegionType.HYPER_CROSS, axis_types=None, dimension=dim)
    layer = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=dim).double()
    assert layer.kernel.shape == (len(cross(sizes)), 3, 4) and generator.kernel_volume == len(cross(sizes))
    y = layer(x)
    assert_close(y.F, sums(x.F, layer.kernel, pairs(x.C, y.C, cross(sizes), [1] * dim), len(y)))
    with pytest.raises(OptionError, match=r"odd sizes.*\[2, 2\]"):
        ME.KernelGenerator(2, region_type=ME.RegionType.HYPER_CROSS, dimension=2)


def test_custom_region():
    x, offsets = tensor(3), [(0, 0, 0), (1, 0, -1), (0, 2, 0), (-1, -1, 0)]
    generator = ME.KernelGenerator(
        stride=2, region_type=ME.RegionType.CUSTOM, region_offsets=torch.tensor(offsets), dimension=3
    )
    layer = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=3).double()
    y = layer(x)
    assert sorted(map(tuple, y.C.tolist())) == floored(x.C, [2] * 3)
    assert_close(y.F, sums(x.F, layer.kernel, pairs(x.C, y.C, offsets, [1] * 3), len(y)))


def test_channelwise():
    x = tensor()
    layer = ME.MinkowskiChannelwiseConvolution(3, kernel_size=3, stride=2, bias=True, dimension=3).double()
    assert layer.kernel.shape == (27, 3)
    y = layer(x)
    kernel = torch.diag_embed(layer.kernel)
    assert_close(y.F, sums(x.F, kernel, pairs(x.C, y.C, cube([3] * 3), [1] * 3), len(y)) + layer.bias)
    y.F.sum().backward()
    assert layer.kernel.grad is not None


@pytest.mark.parametrize("how", ["tensor", "key", "coordinates", "another manager's"])
def test_convolution_onto(how: str):
    x, target = tensor(), cloud(seed=1)
    onto = {
        "tensor": lambda: ME.SparseTensor(target[:, :1].double(), target, coordinate_manager=x.coordinate_manager),
        "key": lambda: x.coordinate_manager.insert_and_map(target)[0],
        "coordinates": lambda: target,
        "another manager's": lambda: ME.SparseTensor(target[:, :1].double(), target),
    }[how]()
    layer = ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=3).double()
    y = layer(x, onto)
    assert torch.equal(y.C, target) and y.coordinate_map_key != x.coordinate_map_key
    assert_close(y.F, sums(x.F, layer.kernel, pairs(x.C, target, cube([3] * 3), [1] * 3), len(y)))
    coarse = ME.SparseTensor(torch.ones(1, 1), torch.zeros(1, 4).int(), tensor_stride=2)
    with pytest.raises(GeometryError, match=r"tensor stride \[1, 1, 1\], found coordinates of \[2, 2, 2\]"):
        layer(x, coarse)


def test_expanded_convolution():
    x = tensor()
    layer = ME.MinkowskiConvolution(3, 4, kernel_size=3, expand_coordinates=True, dimension=3).double()
    y = layer(x)
    reached = {moved(c, o, [1] * 3) for c in x.C.tolist() for o in cube([3] * 3)}
    assert sorted(map(tuple, y.C.tolist())) == sorted(reached)
    assert_close(y.F, sums(x.F, layer.kernel, pairs(x.C, y.C, cube([3] * 3), [1] * 3), len(y)))


# Transposed


@pytest.mark.parametrize(("down", "up"), [(2, 2), (3, 2), (3, 3), (2, 3)])
def test_transposed_to_known_coordinates(down: int, up: int):
    x = tensor()
    coarse = ME.MinkowskiConvolution(3, 4, kernel_size=down, stride=2, dimension=3).double()(x)
    layer = ME.MinkowskiConvolutionTranspose(4, 5, kernel_size=up, stride=2, bias=True, dimension=3).double()
    y = layer(coarse)
    assert torch.equal(y.C, x.C) and y.coordinate_map_key == x.coordinate_map_key
    found = pairs(coarse.C, x.C, cube([up] * 3), [1] * 3, back=True)
    assert_close(y.F, sums(coarse.F, layer.kernel, found, len(y)) + layer.bias)
    (y + x.with_features(x.F[:, :1])).F.sum().backward()
    assert layer.kernel.grad is not None


def test_transposed_through_two_levels():
    x = tensor()
    down = [ME.MinkowskiConvolution(3, 3, kernel_size=2, stride=2, dimension=3).double() for _ in range(2)]
    levels = [x, down[0](x)]
    levels.append(down[1](levels[1]))
    layer = ME.MinkowskiConvolutionTranspose(3, 3, kernel_size=4, stride=4, dimension=3).double()
    y = layer(levels[2])
    assert y.coordinate_map_key == x.coordinate_map_key
    found = pairs(levels[2].C, x.C, cube([4] * 3), [1] * 3, back=True)
    assert_close(y.F, sums(levels[2].F, layer.kernel, found, len(y)))
    # The level of stride 4 is also that of one step of stride 4 from the input.
    other = ME.MinkowskiConvolution(3, 3, kernel_size=1, stride=4, dimension=3).double()(x)
    assert other.coordinate_map_key == levels[2].coordinate_map_key and torch.equal(other.C, levels[2].C)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["MinkowskiConvolutionTranspose", "MinkowskiGenerativeConvolutionTranspose"])
def test_transposed_to_new_coordinates(kind: str, size: int):
    coords = cloud() * torch.tensor([1, 2, 2, 2], dtype=torch.int32)
    x = ME.SparseTensor(torch.randn(len(coords), 3, dtype=torch.float64), coords, tensor_stride=2)
    layer = getattr(ME, kind)(3, 4, kernel_size=size, stride=2, dimension=3).double()
    y = layer(x)
    assert y.tensor_stride == [1, 1, 1]
    reached = {moved(c, o, [1] * 3) for c in coords.tolist() for o in cube([size] * 3)}
    assert sorted(map(tuple, y.C.tolist())) == sorted(reached)
    wanted = sums(x.F, layer.kernel, pairs(coords, y.C, cube([size] * 3), [1] * 3, back=True), len(y))
    assert_close(y.F, wanted)
    with pytest.raises(OptionError, match=r"divides the tensor stride, found \[2, 2, 2\] for \[1, 1, 1\]"):
        layer(y.with_features(torch.zeros(len(y), 3, dtype=torch.float64)))


def test_generative_beside_known_coordinates_then_pruned():
    """As GSDN and PCGC: generated, pruned, and brought onto the coordinates of a target."""
    x = tensor()
    coarse = ME.MinkowskiConvolution(3, 4, kernel_size=2, stride=2, dimension=3).double()(x)
    layer = ME.MinkowskiGenerativeConvolutionTranspose(4, 3, kernel_size=2, stride=2, dimension=3).double()
    y = layer(coarse)
    assert y.coordinate_map_key != x.coordinate_map_key and y.tensor_stride == [1, 1, 1] and len(y) == 8 * len(coarse)
    wanted = sums(coarse.F, layer.kernel, pairs(coarse.C, y.C, cube([2] * 3), [1] * 3, back=True), len(y))
    assert_close(y.F, wanted)
    there = {tuple(c) for c in x.C.tolist()}
    mask = torch.tensor([tuple(c) in there for c in y.C.tolist()])
    kept = ME.MinkowskiPruning()(y, mask)
    assert {tuple(c) for c in kept.C.tolist()} == there
    assert kept.coordinate_map_key not in (x.coordinate_map_key, y.coordinate_map_key)
    assert_close(kept.F[order(kept.C)], y.F[mask][order(y.C[mask])])
    # A convolution of the generated tensor onto the target's key.
    onto = ME.MinkowskiConvolution(3, 2, kernel_size=3, dimension=3).double()
    z = onto(y, x.coordinate_map_key)
    assert torch.equal(z.C, x.C)
    assert_close(z.F, sums(y.F, onto.kernel, pairs(y.C, x.C, cube([3] * 3), [1] * 3), len(z)))
    # Levels below pruned coordinates are their own.
    below = ME.MinkowskiConvolution(3, 2, kernel_size=2, stride=2, dimension=3).double()(kept)
    assert below.coordinate_map_key.get_key() == ([2, 2, 2], kept.coordinate_map_key.get_key()[1])


def order(coords: Tensor) -> list[int]:
    return sorted(range(len(coords)), key=lambda row: coords[row].tolist())


def test_layers_share_a_generator():
    """A generative layer leaves other layers of its kernel generator as they are."""
    x, generator = tensor(), ME.KernelGenerator(2, 2, 1, dimension=3)
    up = ME.MinkowskiConvolutionTranspose(3, 3, kernel_generator=generator, dimension=3).double()
    wide = ME.MinkowskiGenerativeConvolutionTranspose(3, 3, kernel_generator=generator, dimension=3).double()
    coarse = ME.MinkowskiSumPooling(2, 2, dimension=3)(x)
    assert torch.equal(up(coarse).C, x.C) and len(wide(coarse)) == 8 * len(coarse)


# Pools


@pytest.mark.parametrize("kind", ["Max", "Avg", "Sum"])
@pytest.mark.parametrize(("size", "region"), [(2, "HYPER_CUBE"), (3, "HYPER_CUBE"), (3, "HYPER_CROSS")])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_pools(kind: str, size: int, region: str, stride: int):
    x = tensor()
    generator = ME.KernelGenerator(size, stride, 1, region_type=ME.RegionType[region], dimension=3)
    y = getattr(ME, f"Minkowski{kind}Pooling")(kernel_generator=generator, dimension=3)(x)
    offsets = (cube if region == "HYPER_CUBE" else cross)([size] * 3)
    if size == stride:
        # Their stride map: every input goes to its floor, whatever the region.
        offsets = [*itertools.product(range(size), repeat=3)]
    windows = [[] for _ in range(len(y))]
    for _, i, o in pairs(x.C, y.C, offsets, [1] * 3):
        windows[o].append(x.F[i])
    join = {"Max": lambda w: torch.stack(w).amax(0), "Avg": lambda w: torch.stack(w).mean(0), "Sum": builtin_sum}[kind]
    assert_close(y.F, torch.stack([join(w) if w else torch.zeros(3, dtype=torch.float64) for w in windows]))
    y.F.sum().backward()


def builtin_sum(window: list[Tensor]) -> Tensor:
    return torch.stack(window).sum(0)


@pytest.mark.parametrize("kind", ["MinkowskiPoolingTranspose", "MinkowskiAvgUnpooling"])
@pytest.mark.parametrize("size", [2, 3])
def test_unpooling(kind: str, size: int):
    x = tensor()
    coarse = ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=3)(x)
    y = getattr(ME, kind)(kernel_size=size, stride=2, dimension=3)(coarse)
    assert y.coordinate_map_key == x.coordinate_map_key
    ones = torch.eye(3, dtype=torch.float64).expand(size**3, 3, 3)
    found = [*pairs(coarse.C, x.C, cube([size] * 3), [1] * 3, back=True)]
    wanted = sums(coarse.F, ones, found, len(y))
    if kind == "MinkowskiAvgUnpooling":
        wanted = wanted / torch.bincount(torch.tensor([o for _, _, o in found]), minlength=len(y)).clamp(min=1)[:, None]
    assert_close(y.F, wanted)


@pytest.mark.parametrize("kind", ["Avg", "Sum", "Max"])
def test_global_pools_and_broadcasts(kind: str):
    x = tensor()
    pooled = getattr(ME, f"MinkowskiGlobal{kind}Pooling")()(x)
    join = {"Avg": lambda f: f.mean(0), "Sum": lambda f: f.sum(0), "Max": lambda f: f.amax(0)}[kind]
    assert_close(pooled.F, torch.stack([join(f) for f in x.decomposed_features]))
    assert pooled.C.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]] and pooled.tensor_stride == [0, 0, 0]
    spread = pooled.F[x.C[:, 0].long()]
    assert_close(ME.MinkowskiBroadcast()(x, pooled).F, spread)
    assert_close(ME.MinkowskiBroadcastAddition()(x, pooled).F, x.F + spread)
    assert_close(ME.MinkowskiBroadcastMultiplication()(x, pooled).F, x.F * spread)
    assert_close(ME.MinkowskiBroadcastConcatenation()(x, pooled).F, torch.cat([x.F, spread], 1))
    assert_close(ME.MinkowskiLinear(3, 2).double()(pooled + pooled).F.shape, torch.Size([2, 2]))
    field = ME.TensorField(x.F, x.C.double())
    assert_close(getattr(ME, f"MinkowskiGlobal{kind}Pooling")()(field).F, pooled.F)


# Tensors


def test_rows_keep_their_order():
    coords = cloud()
    x = ME.SparseTensor(coordinates=coords, features=torch.randn(len(coords), 2))
    assert torch.equal(x.C, coords) and torch.equal(x.inverse_mapping, torch.arange(len(coords)))
    assert x.C.dtype == torch.int32 and x.D == 3 and x.shape == (len(coords), 2) and x.size() == x.shape
    y = ME.SparseTensor(feats=x.F, coords_key=x.coords_key, coords_manager=x.coords_man)
    assert y.coordinate_map_key == x.coordinate_map_key and torch.equal(y.C, coords)
    assert {x.coordinate_map_key: 1}[y.coordinate_map_key] == 1
    with pytest.raises(ShapeError, match=r"\[N, 1\+D\].*found \[3\]"):
        ME.SparseTensor(x.F, torch.zeros(3))
    with pytest.raises(OptionError, match="found coordinatez"):
        ME.TensorField(x.F, coordinatez=coords)
    with pytest.raises(OptionError, match="found features_"):
        ME.SparseTensor(features_=x.F)
    with pytest.raises(OptionError, match="either coordinates, or"):
        ME.SparseTensor(x.F)


def groups(coords: Tensor) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for row, place in enumerate(coords.tolist()):
        found.setdefault(tuple(math.floor(p) for p in place), []).append(row)
    return found


JOINS = {
    "RANDOM_SUBSAMPLE": lambda rows: rows[0],
    "UNWEIGHTED_AVERAGE": lambda rows: rows.mean(0),
    "UNWEIGHTED_SUM": lambda rows: rows.sum(0),
    "MAX_POOL": lambda rows: rows.amax(0),
}


def points(count: int = 80) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    places = torch.rand(count, 3, generator=draw, dtype=torch.float64) * 6 - 2
    items = torch.arange(count)[:, None] % 2
    return torch.cat([items, places], 1), torch.randn(count, 4, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("mode", JOINS)
@pytest.mark.parametrize("kind", ["SparseTensor", "TensorField"])
def test_quantization(mode: str, kind: str):
    places, feats = points()
    feats.requires_grad_()
    made = getattr(ME, kind)(feats, places, quantization_mode=MODE[mode])
    x = made if kind == "SparseTensor" else made.sparse()
    found = groups(places)
    # In order of first occurrence.
    assert x.C.tolist() == [list(cell) for cell in found]
    wanted = torch.stack([JOINS[mode](feats[rows]) for rows in found.values()])
    assert_close(x.F, wanted)
    inverse = made.inverse_mapping if kind == "SparseTensor" else made.inverse_mapping(x.coordinate_map_key)
    assert torch.equal(x.C[inverse], places.floor().int())
    assert x.unique_index.tolist() == [rows[0] for rows in found.values()]
    grad, expected = (torch.autograd.grad((y**2).sum(), feats)[0] for y in (x.F, wanted))
    assert_close(grad, expected)


def test_no_quantization_of_duplicates():
    with pytest.raises(CoordinateError, match="duplicates"):
        ME.SparseTensor(torch.ones(2, 1), torch.zeros(2, 4).int(), quantization_mode=MODE.NO_QUANTIZATION)


@pytest.mark.parametrize("stride", [1, 2])
def test_fields(stride: int):
    places, feats = points()
    field = ME.TensorField(features=feats, coordinates=places, quantization_mode=MODE.UNWEIGHTED_AVERAGE)
    x = field.sparse(tensor_stride=stride)
    assert x.tensor_stride == [stride] * 3
    steps = torch.tensor([1, *[stride] * 3])
    rows = {tuple(c): row for row, c in enumerate(x.C.tolist())}
    own = [rows[tuple(c)] for c in ((places / steps).floor() * steps).int().tolist()]
    assert field.inverse_mapping(x.coordinate_map_key).tolist() == own
    y = ME.MinkowskiConvolution(4, 2, kernel_size=3, dimension=3).double()(x)
    back = y.slice(field)
    assert isinstance(back, ME.TensorField) and torch.equal(back.C, places)
    assert_close(back.F, y.F[own])
    assert_close(y.cat_slice(field).F, torch.cat([y.F[own], feats], 1))
    # A coarser level, and a field with other features on the same points.
    coarse = ME.MinkowskiConvolution(2, 2, kernel_size=2, stride=2, dimension=3).double()(y)
    twice = torch.tensor([1, *[2 * stride] * 3])
    cells = ((places / twice).floor() * twice).int().tolist()
    at = {tuple(c): row for row, c in enumerate(coarse.C.tolist())}
    assert_close(coarse.slice(back).F, coarse.F[[at[tuple(c)] for c in cells]])
    again = (back * 2).sparse(tensor_stride=stride)
    assert again.coordinate_map_key == x.coordinate_map_key
    assert_close(
        (again - ME.SparseTensor(again.F, coordinate_map_key=x.coordinate_key, coordinate_manager=x._manager))
        .F.abs()
        .max(),
        torch.tensor(0.0).double(),
    )
    onto = field.sparse(coordinate_map_key=coarse.coordinate_map_key)
    assert_close(
        onto.F, torch.stack([feats[[at[tuple(c)] == row for c in cells]].mean(0) for row in range(len(coarse))])
    )
    assert (
        ME.MinkowskiReLU()(ME.MinkowskiBatchNorm(4).double()(ME.MinkowskiLinear(4, 4).double()(field))).F.shape
        == feats.shape
    )


def test_fields_after_other_keys_of_their_stride():
    """Voxels of a field are its own, also when it has been sliced from other coordinates of the same tensor stride."""
    places, feats = points()
    field = ME.TensorField(feats, places)
    coarse = ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=3)(field.sparse())
    coarse.slice(field)
    x = field.sparse(tensor_stride=2)
    found = groups(places / torch.tensor([1, 2, 2, 2]))
    assert x.C.tolist() == [[item, *(2 * p for p in place)] for item, *place in found]
    assert_close(x.F, torch.stack([feats[rows].mean(0) for rows in found.values()]))
    assert_close(x.slice(field).F[found.popitem()[1][0]], x.F[-1])


def test_slice_of_a_tensor_of_points():
    places, feats = points()
    x = ME.SparseTensor(feats, places)
    y = ME.MinkowskiConvolution(4, 2, kernel_size=3, dimension=3).double()(x)
    found = y.slice(x)
    assert_close(found.F, y.F[x.inverse_mapping])
    assert torch.equal(found.C, places.floor().int())
    coarse = ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=3)(y)
    with pytest.raises(GeometryError, match=r"slice takes a tensor of .*2, 2, 2.*found .*1, 1, 1"):
        coarse.slice(x)


@pytest.mark.parametrize("stride", [1, 2])
def test_features_at_coordinates(stride: int):
    coords = cloud() * torch.tensor([1, *[stride] * 3], dtype=torch.int32)
    x = ME.SparseTensor(torch.randn(len(coords), 3, dtype=torch.float64), coords, tensor_stride=stride)
    places = torch.cat([points(30)[0] * torch.tensor([1, *[stride] * 3]), coords[:3].double()])
    rows = {tuple(c): row for row, c in enumerate(coords.tolist())}
    wanted = torch.zeros(len(places), 3, dtype=torch.float64)
    for at, (item, *place) in enumerate(places.tolist()):
        for side in itertools.product((0, 1), repeat=3):
            cell = [(math.floor(p / stride) + s) * stride for p, s in zip(place, side, strict=True)]
            share = math.prod(1 - abs(p - c) / stride for p, c in zip(place, cell, strict=True))
            if (int(item), *cell) in rows:
                wanted[at] += share * x.F[rows[(int(item), *cell)]]
    assert_close(x.features_at_coordinates(places), wanted)
    assert_close(ME.MinkowskiInterpolation()(x, places), wanted)
    assert_close(x.interpolate(ME.TensorField(places, places)).F, wanted)
    # Places beyond half precision, on half-precision features.
    half = ME.SparseTensor(torch.tensor([[1.0], [3.0]]).half(), torch.tensor([[0, 3001, 5, 5], [0, 3002, 5, 5]]))
    field = ME.TensorField(torch.ones(1, 1), torch.tensor([[0, 3001.25, 5, 5]]))
    assert half.interpolate(field).F.tolist() == [[1.5]]
    assert half.features_at_coordinates(torch.tensor([[0, 3002, 5, 5]])).tolist() == [[3.0]]


OPERATIONS = {
    "+": (lambda a, b: a + b, lambda a, b: a + b),
    "-": (lambda a, b: a - b, lambda a, b: a - b),
    "*": (lambda a, b: a * b, lambda a, b: a * b),
    "/": (lambda a, b: a / b, lambda a, b: a / b),
}


@pytest.mark.parametrize("sign", OPERATIONS)
def test_arithmetic_over_the_union(sign: str):
    function, rule = OPERATIONS[sign]
    x, other = tensor(), cloud(seed=1)
    feats = torch.rand(len(other), 3, dtype=torch.float64) + 1
    y = ME.SparseTensor(feats, other, coordinate_manager=x.coordinate_manager)
    assert y.coordinate_map_key != x.coordinate_map_key
    z = function(x, y)
    left, right = ({tuple(c): f for c, f in zip(t.C.tolist(), t.F, strict=True)} for t in (x, y))
    assert {tuple(c) for c in z.C.tolist()} == left.keys() | right.keys()
    zero = torch.zeros(3, dtype=torch.float64)
    for place, found in zip(z.C.tolist(), z.F, strict=True):
        a, b = left.get(tuple(place)), right.get(tuple(place))
        assert_close(found, rule(zero if a is None else a, b) if b is not None else a)
    assert z.coordinate_map_key not in (x.coordinate_map_key, y.coordinate_map_key)
    z.F.sum().backward()


def test_arithmetic_on_one_key():
    x = tensor()
    y = ME.MinkowskiConvolution(3, 3, kernel_size=3, dimension=3).double()(x)
    for function, rule in OPERATIONS.values():
        assert_close(function(x, y).F, rule(x.F, y.F))
        assert_close(function(x, y.F[:, :1]).F, rule(x.F, y.F[:, :1]))
    total, before = x, x.F
    total += y
    assert total is x
    assert_close(x.F, before + y.F)
    apart = tensor(seed=1)
    with pytest.raises(GeometryError, match="share a coordinate_manager"):
        x + apart
    beside = ME.SparseTensor(apart.F, apart.C, coordinate_manager=x.coordinate_manager)
    with pytest.raises(GeometryError, match="in-place forms a coordinate_map_key"):
        x += beside
    assert_close(ME.cat(x, y).F, torch.cat([x.F, y.F], 1))
    assert_close(ME.cat([x, y, y]).F, torch.cat([x.F, y.F, y.F], 1))
    assert_close(ME.sum(x, y).F, x.F + y.F)
    with pytest.raises(GeometryError):
        ME.cat(x, beside)


def test_dense_and_decomposed():
    coords = (cloud() + torch.tensor([0, 2, 2, 2], dtype=torch.int32)) * torch.tensor([1, 2, 2, 2], dtype=torch.int32)
    x = ME.SparseTensor(torch.randn(len(coords), 3), coords, tensor_stride=2)
    dense, least, stride = x.dense()
    wanted = torch.zeros(2, 3, *(coords[:, 1:].amax(0) // 2 + 1).tolist())
    for place, row in zip(coords.tolist(), x.F, strict=True):
        wanted[place[0], :, place[1] // 2, place[2] // 2, place[3] // 2] = row
    assert torch.equal(dense, wanted) and stride.tolist() == [2, 2, 2]
    assert least.tolist() == [coords[:, 1:].amin(0).tolist()]
    shape = torch.Size([3, 3, 12, 11, 13])
    dense, _, _ = x.dense(shape, min_coordinate=torch.IntTensor([-2, 0, -4]))
    assert dense.shape == shape
    assert torch.equal(dense[:2, :, 1 : 1 + wanted.shape[2], : wanted.shape[3], 2 : 2 + wanted.shape[4]], wanted)
    assert (dense != 0).sum() == (wanted != 0).sum()
    with pytest.raises(CoordinateError, match="min_coordinate"):
        tensor().dense()
    empty = ME.SparseTensor(torch.zeros(0, 3), torch.zeros(0, 4).int())
    assert empty.dense(shape)[0].shape == shape and not empty.dense(shape)[0].any()
    with pytest.raises(ShapeError, match="shape, found None"):
        empty.dense()
    places, feats = x.decomposed_coordinates_and_features
    for item in range(2):
        here = coords[:, 0] == item
        assert torch.equal(places[item], coords[here, 1:]) and torch.equal(feats[item], x.F[here])
        assert torch.equal(x.coordinates_at(item), places[item]) and torch.equal(x.features_at(item), feats[item])
    # Items that lose all voxels stay.
    kept = ME.MinkowskiPruning()(x, x.C[:, 0] == 0)
    assert [len(f) for f in kept.decomposed_features] == [len(feats[0]), 0] and len(
        ME.MinkowskiGlobalMaxPooling()(kept)
    ) == 2
    back = ME.to_sparse(wanted)
    assert torch.equal(back.dense(wanted.shape)[0], wanted)
    assert len(ME.to_sparse_all(wanted)) == wanted[:, 0].numel()
    assert torch.equal(ME.to_sparse_all(wanted).dense(wanted.shape)[0], wanted)


def test_coordinates_are_multiples_of_the_stride():
    with pytest.raises(CoordinateError, match=r"multiples"):
        ME.SparseTensor(torch.ones(1, 1), torch.tensor([[0, 1, 2, 3]]), tensor_stride=2)


# The manager


@pytest.mark.parametrize("back", [False, True])
def test_kernel_map(back: bool):
    x = tensor()
    manager = x.coordinate_manager
    coarse = manager.stride(x.coordinate_map_key, 2)
    assert coarse == manager.stride(x.coordinate_map_key, 2) and manager.size(coarse) == len(floored(x.C, [2] * 3))
    ends = (coarse, x.coordinate_map_key) if back else (x.coordinate_map_key, coarse)
    found = manager.kernel_map(*ends, stride=2, kernel_size=3, is_transpose=back)
    places = [manager.get_coordinates(key) for key in ends]
    wanted = {*pairs(*places, cube([3] * 3), [1] * 3, back=back)}
    assert {(k, i, o) for k, lists in found.items() for i, o in lists.t().tolist()} == wanted
    assert all(lists.shape[1] for lists in found.values())
    same = manager.get_kernel_map(1, 1, kernel_size=3, region_type=ME.RegionType.HYPER_CROSS)
    wanted = {*pairs(x.C, x.C, cross([3] * 3), [1] * 3)}
    assert {(k, i, o) for k, lists in same.items() for i, o in lists.t().tolist()} == wanted


def test_insert_and_map():
    manager, coords = ME.CoordinateManager(D=1), torch.IntTensor([[0, 2], [0, 0], [0, 2], [0, 1]])
    key, (unique, inverse) = manager.insert_and_map(coords, [1])
    assert torch.equal(coords[unique], manager.get_coordinates(key)) and torch.equal(coords[unique][inverse], coords)
    assert unique.tolist() == [0, 1, 3]
    again, _ = manager.insert_and_map(coords, [1])
    assert again != key and again.get_tensor_stride() == [1]
    assert len({key, again, *(manager.insert_and_map(coords, [1])[0] for _ in range(5))}) == 7
    with pytest.raises(GeometryError, match="none of CoordinateMapKey"):
        manager.get_coordinates(ME.CoordinateMapKey([7], ""))


def test_shared_manager():
    mode = ME.SparseTensorOperationMode
    ME.set_sparse_tensor_operation_mode(mode.SHARE_COORDINATE_MANAGER)
    try:
        x, y = tensor(), tensor(seed=1)
        assert x.coordinate_manager is y.coordinate_manager
        assert len(x + y) >= max(len(x), len(y))
        ME.clear_global_coordinate_manager()
        assert tensor().coordinate_manager is not x.coordinate_manager
    finally:
        ME.clear_global_coordinate_manager()
        ME.set_sparse_tensor_operation_mode(mode.SEPARATE_COORDINATE_MANAGER)
    assert tensor().coordinate_manager is not tensor().coordinate_manager


def test_parts_of_tensors():
    """What programs take apart and join: the tensor, and coordinates that layers go back to."""
    x = tensor()
    coarse = ME.MinkowskiConvolution(3, 3, kernel_size=2, stride=2, dimension=3).double()(x)
    up = ME.MinkowskiConvolutionTranspose(3, 2, kernel_size=2, stride=2, dimension=3).double()
    leaves, rest = coarse.parts()
    hash(rest)
    assert_close(up(ME.SparseTensor.joined(leaves, rest)).F, up(coarse).F)
    assert len(x.parts()[0]) == 1
    field = ME.TensorField(*reversed(points()))
    leaves, spec = torch.utils._pytree.tree_flatten(field)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert_close(again.sparse().F, field.sparse().F)


def test_pickled():
    """A tensor with its levels, as from a worker process; keys hash anew."""
    x = tensor()
    coarse = ME.MinkowskiConvolution(3, 3, kernel_size=2, stride=2, dimension=3).double()(x)
    again = pickle.loads(
        pickle.dumps(
            ME.SparseTensor(
                coarse.F.detach(),
                coordinate_map_key=coarse.coordinate_map_key,
                coordinate_manager=coarse.coordinate_manager,
            )
        )
    )
    assert again.coordinate_map_key == coarse.coordinate_map_key and torch.equal(again.C, coarse.C)
    up = ME.MinkowskiConvolutionTranspose(3, 2, kernel_size=2, stride=2, dimension=3).double()
    assert torch.equal(up(again).C, x.C)
    assert pickle.loads(pickle.dumps(ME.CoordinateMapKey([1, 2], "a"))).get_key() == ([1, 2], "a")


# Layers on rows, initialisation, checkpoints


def test_parameters_and_checkpoints():
    layer = ME.MinkowskiConvolution(3, 4, kernel_size=[3, 2, 1], bias=True, dimension=3)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {"kernel": (6, 3, 4), "bias": (1, 4)}
    one = ME.MinkowskiConvolution(3, 4, 1, 1, 1, True, dimension=3)
    assert {k: tuple(v.shape) for k, v in one.state_dict().items()} == {"kernel": (3, 4), "bias": (1, 4)}
    strided = ME.MinkowskiConvolution(3, 4, kernel_size=1, stride=2, has_bias=False, dimension=3)
    assert {k: tuple(v.shape) for k, v in strided.state_dict().items()} == {"kernel": (1, 3, 4)}
    assert {*ME.MinkowskiBatchNorm(2).state_dict()} >= {"bn.weight", "bn.bias", "bn.running_mean"}
    assert {*ME.MinkowskiLinear(2, 3).state_dict()} == {"linear.weight", "linear.bias"}
    other = ME.MinkowskiConvolution(3, 4, kernel_size=[3, 2, 1], bias=True, dimension=3)
    other.load_state_dict(layer.state_dict())
    x = ME.SparseTensor(torch.randn(4, 3), torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]))
    assert torch.equal(other(x).F, layer(x).F)
    nn.init.constant_(layer.bias, 3.0)
    assert torch.equal(layer.state_dict()["bias"], torch.full((1, 4), 3.0))
    # The bound of the uniform draw.
    assert layer.kernel.abs().max() <= 1 / math.sqrt(3 * 6) < 1.3 * layer.kernel.abs().max()
    up = ME.MinkowskiConvolutionTranspose(64, 4, kernel_size=2, stride=2, dimension=3)
    assert up.kernel.abs().max() <= 1 / math.sqrt(4 * 8) < 1.1 * up.kernel.abs().max()
    with torch.no_grad():
        utils.kaiming_normal_(up.kernel, mode="fan_out", nonlinearity="relu")
    assert up.kernel.detach().std().item() == pytest.approx(math.sqrt(2 / (8 * 4)), rel=0.1)
    with pytest.raises(OptionError, match="dimension"):
        ME.MinkowskiConvolution(3, 4, kernel_size=3)
    with pytest.raises(ShapeError, match="dimension=2"):
        ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2)(x)


def test_weights_follow_their_parameter():
    """Of the kernel as it is now: written, replaced, cast, copied and pickled."""
    x, layer = tensor(), ME.MinkowskiConvolution(3, 4, kernel_size=2, dimension=3).double()
    with torch.no_grad():
        y = layer(x).F
        layer.kernel.mul_(2)
        assert_close(layer(x).F, 2 * y)
        layer.kernel.data = layer.kernel / 2
        assert_close(layer(x).F, y)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            other.kernel.mul_(3)
            assert_close(other(x).F, 3 * y)
        assert_close(layer(x).F, y)
        assert layer.float()(x.with_features(x.F.float())).F.dtype == torch.float32
        layer.kernel = nn.Parameter(torch.zeros_like(layer.kernel))
        assert not layer(x.with_features(x.F.float())).F.any()
    layer.double()(x).F.sum().backward()
    assert layer.kernel.grad is not None


def test_layers_on_rows():
    x = tensor()
    for name, options in {"ReLU": {"inplace": True}, "PReLU": {}, "Softmax": {"dim": 1}, "GELU": {}, "ELU": {}}.items():
        own = getattr(nn, name)(**({} if name == "ReLU" else options)).double()
        assert_close(getattr(ME, f"Minkowski{name}")(**options).double()(x).F, own(x.F))
    named = minkowski.MODULES["MinkowskiEngine.MinkowskiFunctional"]
    assert_close(named["relu"](x, inplace=True).F, x.F.relu())
    assert_close(named["leaky_relu"](x, 0.3).F, nn.functional.leaky_relu(x.F, 0.3))
    assert_close(named["mse_loss"](x, x.F + 2), torch.tensor(4.0).double())
    assert_close(ME.MinkowskiDropout(0.5).eval()(x).F, x.F)
    layer = ME.MinkowskiSinusoidal(3, 5).double()
    assert_close(layer(x).F, torch.sin(x.F @ layer.kernel + layer.bias) * layer.coef)
    field = ME.TensorField(x.F, x.C.double())
    assert_close(ME.MinkowskiSyncBatchNorm(3).double()(field).F, nn.BatchNorm1d(3).double()(x.F))
    norm, own = ME.MinkowskiBatchNorm(3, momentum=0.3).double(), nn.BatchNorm1d(3, momentum=0.3).double()
    assert_close(norm(x).F, own(x.F))
    assert_close(norm.bn.running_var, own.running_var)
    y = ME.MinkowskiInstanceNorm(3).double()(x)
    for item in range(2):
        rows = x.F[x.C[:, 0] == item]
        wanted = (rows - rows.mean(0)) / (rows.var(0, unbiased=False) + 1e-8).sqrt()
        assert_close(y.F[x.C[:, 0] == item], wanted)
    stack = ME.MinkowskiStackSum(ME.MinkowskiReLU(), ME.MinkowskiToFeature(), ME.MinkowskiTanh())
    del stack[1]
    assert_close(stack(x).F, x.F.relu() + x.F.tanh())


def test_sync_batch_norm():
    net = nn.Sequential(ME.MinkowskiBatchNorm(3), nn.Sequential(ME.MinkowskiBatchNorm(2), ME.MinkowskiReLU()))
    made = ME.MinkowskiSyncBatchNorm.convert_sync_batchnorm(net)
    assert [*made.state_dict()] == [*nn.Sequential(ME.MinkowskiBatchNorm(3), net[1]).state_dict()]
    assert isinstance(made[0], ME.MinkowskiSyncBatchNorm) and isinstance(made[1][0].bn, pm.nn.SyncBatchNorm)


@pytest.mark.parametrize("kind", ["BasicBlock", "Bottleneck"])
def test_blocks(kind: str):
    names = minkowski.MODULES["MinkowskiEngine.modules.resnet_block"]
    width = 16 * names[kind].expansion
    down = nn.Sequential(
        ME.MinkowskiConvolution(3, width, kernel_size=1, stride=2, dimension=3), ME.MinkowskiBatchNorm(width)
    )
    block = names[kind](3, 16, stride=2, downsample=down, dimension=3).double()
    y = block(tensor())
    assert y.tensor_stride == [2, 2, 2] and y.F.shape[1] == width
    y.F.sum().backward()
    assert all(p.grad is not None for p in block.parameters())
    assert {"conv1.kernel", "norm2.bn.weight", "downsample.0.kernel"} <= {*block.state_dict()}


# Programs


class UNet(ME.MinkowskiNetwork):
    """Two levels with a skip, in the field's usual names."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.conv0 = ME.MinkowskiConvolution(3, 8, kernel_size=3, dimension=dim)
        self.bn0 = ME.MinkowskiBatchNorm(8)
        self.down = ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, bias=True, dimension=dim)
        self.block = minkowski.BasicBlock(8, 8, dimension=dim)
        self.up = ME.MinkowskiConvolutionTranspose(8, 8, kernel_size=2, stride=2, dimension=dim)
        self.final = ME.MinkowskiConvolution(16, 4, kernel_size=1, bias=True, dimension=dim)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x):
        fine = self.relu(self.bn0(self.conv0(x)))
        coarse = self.block(self.down(fine))
        return self.final(ME.cat(self.up(coarse), fine)), coarse


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_program(dim: int):
    net = UNet(dim).double().eval()
    program = pm.compile(net)
    with torch.no_grad():
        for seed in range(2):
            x, own = tensor(dim, seed=seed), tensor(dim, seed=seed)
            (y, coarse), (z, below) = net(x), program(own)
            assert_close(z.F, y.F)
            assert torch.equal(z.C, own.C) and z.coordinate_map_key == own.coordinate_map_key
            assert below.tensor_stride == [2] * dim and torch.equal(below.C, coarse.C)
            # The coordinates of the finer level come with a coarse result.
            assert torch.equal(net.up(below).C, own.C)
    text = program.explain()
    assert "0 modules called as they are" in text and "convolution + norm + relu" in text


def test_captured():
    net = UNet(3).double().eval()
    with torch.no_grad():
        captured = pm.capture(net, tensor(), max_voxels=200)
        for seed in range(2):
            (y, coarse), (z, below) = net(tensor(seed=seed)), captured(tensor(seed=seed))
            assert torch.equal(z.C, y.C) and torch.equal(below.C, coarse.C)
            assert_close(z.F, y.F)


def test_program_of_points():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = UNet(3)

        def forward(self, field):
            return self.net(field.sparse())[0].slice(field).F

    net = Net().double().eval()
    places, feats = points()
    with torch.no_grad():
        found = pm.compile(net)(ME.TensorField(feats[:, :3], places))
        assert_close(found, net(ME.TensorField(feats[:, :3], places)))


# Utilities


def test_sparse_quantize():
    places, feats = points()
    places, found = places[:, 1:].float(), groups(places[:, 1:].float() / 0.5)
    coords, index, inverse = utils.sparse_quantize(
        places, quantization_size=0.5, return_index=True, return_inverse=True
    )
    assert coords.tolist() == [list(cell) for cell in found] and coords.dtype == torch.int32
    assert index.tolist() == [rows[0] for rows in found.values()]
    assert torch.equal(coords[inverse], (places / 0.5).floor().int())
    assert torch.equal(utils.sparse_quantize(places, quantization_size=[0.5] * 3), coords)
    labels = torch.arange(len(places)) % 2
    own, values, joined = utils.sparse_quantize(places, feats, labels, ignore_label=-1, quantization_size=0.5)
    assert torch.equal(own, coords) and torch.equal(values, feats[index])
    wanted = [int(labels[rows[0]]) if len({*labels[rows].tolist()}) == 1 else -1 for rows in found.values()]
    assert joined.tolist() == wanted and -1 in wanted
    maps = utils.sparse_quantize(
        places, quantization_size=0.5, return_maps_only=True, return_index=True, return_inverse=True
    )
    assert torch.equal(maps[0], index) and torch.equal(maps[1], inverse)
    array = utils.sparse_quantize(places.numpy(), feats.numpy(), labels.numpy(), -1, quantization_size=0.5)
    assert all(isinstance(each, np.ndarray) for each in array) and array[2].tolist() == wanted
    assert isinstance(utils.sparse_quantize(places.numpy(), feats.numpy())[1], np.ndarray)
    # Multiples of a size in the precision of the coordinates: 1 / 0.05 is 20 in float64, less with 0.05 as a float32.
    for size in (0.05, [0.05] * 3):
        exact = utils.sparse_quantize(np.array([[1.0, 0.15, 0.35]]), quantization_size=size)
        assert exact.tolist() == np.floor(np.array([[1.0, 0.15, 0.35]]) / 0.05).astype(int).tolist() == [[20, 2, 6]]
    with pytest.raises(OptionError, match="return_index"):
        utils.sparse_quantize(places, return_inverse=True)


def test_collation():
    clouds = [np.random.default_rng(n).uniform(-3, 3, (5 + n, 3)) for n in range(3)]
    feats = [torch.randn(5 + n, 2) for n in range(3)]
    coords = utils.batched_coordinates(clouds)
    assert coords.dtype == torch.int32 and coords[:, 0].tolist() == [0] * 5 + [1] * 6 + [2] * 7
    assert torch.equal(coords[:, 1:], torch.cat([torch.from_numpy(c) for c in clouds]).floor().int())
    assert utils.batched_coordinates(clouds, dtype=torch.float32).dtype == torch.float32
    labels = [torch.arange(5 + n) for n in range(3)]
    found = utils.sparse_collate(clouds, feats, labels)
    assert torch.equal(found[0], coords) and torch.equal(found[1], torch.cat(feats)) and len(found[2]) == 18
    assert len(utils.sparse_collate(clouds, feats)) == 2
    data = [*zip(clouds, feats, labels, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(utils.batch_sparse_collate(data), found, strict=True))
    assert len(utils.SparseCollation(12)(data)[1]) == 11


def test_fnv_hash():
    """FNV-1 with a word for a byte."""
    found = utils.fnv_hash_vec(np.array([[1, 2], [-1, 0]]))
    for row, (a, b) in enumerate([(1, 2), (2**64 - 1, 0)]):
        value = 14695981039346656037
        for word in (a, b):
            value = (value * 1099511628211) % 2**64 ^ word
        assert int(found[row]) == value


def test_install():
    from pumice.compat import install, uninstall

    install("MinkowskiEngine")
    try:
        import MinkowskiEngine
        import MinkowskiEngine.MinkowskiFunctional as MF
        import MinkowskiEngine.MinkowskiOps as me
        from MinkowskiEngine.modules.resnet_block import BasicBlock
        from MinkowskiEngine.utils.quantization import sparse_quantize

        assert MinkowskiEngine.SparseTensor is minkowski_tensor.SparseTensor and me.cat is MinkowskiEngine.cat
        assert issubclass(MinkowskiEngine.MinkowskiNetwork, nn.Module) and MinkowskiEngine.MinkowskiFunctional is MF
        assert BasicBlock is MinkowskiEngine.modules.resnet_block.BasicBlock and sparse_quantize
        assert MinkowskiEngine.__version__ == "0.5.4"
    finally:
        uninstall("MinkowskiEngine")


@pytest.mark.gpu
def test_on_a_gpu():
    """A U-Net, generated and pruned coordinates, pools, fields and arithmetic as on the CPU."""
    coords, other, (places, feats) = cloud(points=400, extent=12), cloud(points=300, extent=12, seed=1), points(400)
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(len(c), 3, generator=draw, dtype=torch.float64) for c in (coords, other)]
    torch.manual_seed(0)
    net = nn.ModuleList(
        [UNet(3), ME.MinkowskiGenerativeConvolutionTranspose(8, 4, kernel_size=3, stride=2, dimension=3)]
    )
    net.double()
    found = []
    for device in ("cpu", "cuda"):
        net.to(device)
        x = ME.SparseTensor(values[0], coords, device=device)
        beside = ME.SparseTensor(values[1], other, device=device, coordinate_manager=x.coordinate_manager)
        y, coarse = net[0](x)
        wide = net[1](coarse)
        kept = ME.MinkowskiPruning()(wide, wide.F[:, 0] > 0)
        pooled = ME.MinkowskiPoolingTranspose(2, 2, dimension=3)(ME.MinkowskiMaxPooling(2, 2, dimension=3)(y))
        field = ME.TensorField(feats, places, device=device)
        results = [y, coarse, wide, kept, pooled, x + beside, x * beside, field.sparse()]
        rows = [net[0].conv0(field.sparse().with_features(field.sparse().F[:, :3])).slice(field).F]
        rows += [ME.MinkowskiGlobalMaxPooling()(y).F, x.features_at_coordinates(places.to(device))]
        loss = builtins.sum(r.F.square().mean() for r in results) + builtins.sum(r.square().mean() for r in rows)
        grads = torch.autograd.grad(loss, [*net.parameters()])
        placed = [(r.C[order(r.C.cpu())].cpu(), r.F[order(r.C.cpu())].cpu()) for r in results]
        found.append((placed, [r.cpu() for r in rows], [g.cpu() for g in grads]))
    (placed, rows, grads), (others, gpu_rows, gpu_grads) = found
    for (c, f), (d, g) in zip(placed, others, strict=True):
        assert torch.equal(c, d)
        assert_close(g, f)
    for a, b in zip([*rows, *grads], [*gpu_rows, *gpu_grads], strict=True):
        assert_close(b, a)
