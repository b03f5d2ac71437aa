"""Codes along curves: their order, their inverses, their tables."""

import itertools

import pytest
import torch

import pumice as pm
from pumice.coords import CURVES, Bounds, CodeLayout, morton_argsort
from pumice.errors import CoordinateError

DIMS = [1, 2, 3, 4]
NARROW = {1: 31, 2: 24, 3: 16, 4: 12}
WIDE = {1: 31, 2: 31, 3: 31, 4: 27}


def box(low, high, batch, count=400, seed=0):
    """Random coordinates int32 [count, 1+D] of a box, its corners among them, with repeats."""
    draw = torch.Generator().manual_seed(seed)
    ends = zip((0, *low), (batch - 1, *high), strict=True)
    columns = [torch.randint(a, b + 1, (count,), generator=draw) for a, b in ends]
    coords = torch.stack(columns, dim=1)
    coords[0, 1:], coords[1, 1:] = torch.tensor(low), torch.tensor(high)
    return coords.int()


def cube(dim, depth):
    """Every cell of [0, 2**depth)**dim, batch 0."""
    cells = itertools.product(*[range(2**depth)] * dim)
    return torch.tensor([(0, *cell) for cell in cells], dtype=torch.int32)


def random_cells(dim, depth, batch, count=500):
    return box((0,) * dim, (2**depth - 1,) * dim, batch, count)


def lexicographic(codes):
    """Rows of codes [N, 2] in order, stable."""
    order = torch.argsort(codes[:, 1], stable=True)
    return order[torch.argsort(codes[order, 0], stable=True)]


BOXES = [
    ((0,), (0,)),
    ((-1,), (-1,)),
    ((5,), (5,)),
    ((-700,), (1 << 20,)),
    ((0, 0), (3, 100)),
    ((-5, 7), (-5, 7)),
    ((-9, 0), (2, 40)),
    ((0, 0, 0), (0, 0, 0)),
    ((-40, -300, 0), (70, 20, 5)),
    ((-40, 0, -1), (-30, 0, 0)),
    ((0, 0, 0), (2047, 2047, 127)),
    ((-1, 0, -8, 3), (0, 90, 7, 3)),
    ((-(2**12), 0, 0, 0), (2**12 - 1, 2**13 - 1, 2**13 - 1, 2**13 - 1)),
]


@pytest.mark.parametrize("batch", [1, 2, 300])
@pytest.mark.parametrize("low, high", BOXES)
def test_sums_of_tables_sort_as_morton_argsort(low, high, batch):
    coords, bounds = box(low, high, batch), Bounds(low, high, batch)
    layout = CodeLayout.of(bounds)
    tables = layout.tables("cpu")
    assert layout.bits + (batch - 1).bit_length() <= 62
    assert tables.dtype == torch.int64 and len(tables) == sum(1 << len(p) for p in layout.places)
    code = coords[:, 0].long() << layout.bits
    for axis, (start, bias) in enumerate(zip(layout.starts, layout.bias, strict=True)):
        code += tables[start + bias + coords[:, axis + 1].long()]
    assert torch.equal(torch.argsort(code, stable=True), morton_argsort(coords, bounds))
    assert torch.equal(code.unique(), code[morton_argsort(coords, bounds)].unique_consecutive())
    assert len(code.unique()) == len(coords.unique(dim=0))


@pytest.mark.parametrize("low, high", BOXES)
def test_places_are_a_permutation_of_the_bits(low, high):
    layout = CodeLayout.of(Bounds(low, high, 1))
    assert sorted(itertools.chain(*layout.places)) == list(range(layout.bits))
    for a, b, places, bias in zip(low, high, layout.places, layout.bias, strict=True):
        assert list(places) == sorted(places)
        assert a + bias >= 0 and b + bias < 1 << len(places)
        assert bias == 1 << (len(places) - 1) if a < 0 <= b else len(places) == (a ^ b).bit_length()


@pytest.mark.parametrize("shift", [0, 5_000, 10**6, -(10**6), 2**31 - 300, -(2**31) + 9])
def test_far_from_the_origin_codes_are_short_and_the_order_is_the_same(shift):
    coords = torch.randint(0, 100, (500, 4), generator=torch.Generator().manual_seed(0))
    coords[:, 0] %= 3
    coords[:, 1:] += shift
    everything = Bounds((-(2**31),) * 3, (2**31 - 1,) * 3, 3)
    coords, bounds = coords.int(), Bounds.of(coords.int())
    assert torch.equal(morton_argsort(coords, bounds), morton_argsort(coords, everything))
    assert CodeLayout.of(bounds).bits <= 30


def test_layout_by_hand():
    layout = CodeLayout.of(Bounds((0, -1), (3, 0), 1))
    assert layout == CodeLayout(((0, 1), (2,)), (0, 1)) and hash(layout) == hash(CodeLayout(((0, 1), (2,)), (0, 1)))
    assert layout.bits == 3 and layout.starts == (0, 4)
    assert layout.tables("cpu").tolist() == [0, 1, 2, 3, 0, 4]
    assert CodeLayout.of(Bounds((0, 0), (0, 0), 1)).tables("cpu").tolist() == [0, 0]


def test_tables_are_kept():
    layout = CodeLayout.of(Bounds((0, -8), (9, 8), 1))
    assert layout.tables("cpu") is layout.tables(torch.device("cpu"))


def test_tables_too_large():
    assert len(CodeLayout.of(Bounds((0,), (2**22 - 1,), 1)).tables("cpu")) == 2**22
    with pytest.raises(CoordinateError, match=f"{2**23}.*{2**22}"):
        CodeLayout.of(Bounds((0, 0), (1, 2**22), 1)).tables("cpu")
    with pytest.raises(CoordinateError, match="64.*63"):
        CodeLayout.of(Bounds((0,) * 4, (2**16 - 1,) * 4, 1)).tables("cpu")


@pytest.mark.parametrize("order", CURVES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("batch", [1, 512])
def test_deserialize_undoes_serialize(dim, order, batch):
    coords = random_cells(dim, NARROW[dim], batch)
    codes = pm.serialize(coords, order)
    assert codes.dtype == torch.int64 and codes.shape == (len(coords),)
    assert torch.equal(pm.deserialize(codes, dim, order), coords)
    coords = random_cells(dim, WIDE[dim], batch)
    codes = pm.serialize(coords, order, wide=True)
    assert codes.dtype == torch.int64 and codes.shape == (len(coords), 2)
    assert torch.equal(pm.deserialize(codes, dim, order), coords)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("order", CURVES)
@pytest.mark.parametrize("dim", DIMS)
def test_every_depth_has_an_inverse(dim, order, wide):
    for depth in range(1, min(31, (126 if wide else 63) // dim) + 1):
        spare = min((126 if wide else 63) - dim * depth, 31)
        coords = random_cells(dim, depth, 1 << spare, 20)
        coords[0, 0] = (1 << spare) - 1
        codes = pm.serialize(coords, order, depth, wide=wide)
        assert bool((codes >= 0).all())
        assert torch.equal(pm.deserialize(codes, dim, order, depth), coords)


@pytest.mark.parametrize("order", CURVES)
@pytest.mark.parametrize("dim", DIMS)
def test_serialize_undoes_deserialize(dim, order):
    """Every number is the code of one cell: a full cube takes each of 0 to 2**(D * depth) - 1."""
    depth = 8 // dim
    codes = pm.serialize(cube(dim, depth), order, depth)
    assert sorted(codes.tolist()) == list(range(2 ** (dim * depth)))
    numbers = torch.arange(3 * 2 ** (dim * depth))
    assert torch.equal(pm.serialize(pm.deserialize(numbers, dim, order, depth), order, depth), numbers)


@pytest.mark.parametrize("dim, depth", [(2, 1), (2, 5), (3, 1), (3, 3), (4, 1), (4, 3)])
def test_neighbours_on_the_hilbert_curve_are_neighbours(dim, depth):
    walk = pm.deserialize(torch.arange(2 ** (dim * depth)), dim, "hilbert", depth)
    steps = (walk[1:] - walk[:-1]).abs()
    assert bool((steps.sum(dim=1) == 1).all())
    assert walk[0].tolist() == [0] * (1 + dim)


def test_the_smallest_hilbert_curve_by_hand():
    walk = pm.deserialize(torch.arange(4), 2, "hilbert", 1)
    assert walk[:, 1:].tolist() == [[0, 0], [0, 1], [1, 1], [1, 0]]


@pytest.mark.parametrize("order", CURVES)
def test_one_axis_is_its_own_curve(order):
    coords = random_cells(1, 31, 1)
    assert torch.equal(pm.serialize(coords, order), coords[:, 1].long())


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("dim", [2, 3, 4])
def test_the_hilbert_curve_fills_cube_after_cube(dim, depth):
    """The first bits of a code name the coarser cell, and it holds all codes that begin so."""
    walk = pm.deserialize(torch.arange(2 ** (dim * depth)), dim, "hilbert", depth)
    coarse = (walk[:, 1:] >> 1).reshape(-1, 2**dim, dim)
    assert bool((coarse == coarse[:, :1]).all())


@pytest.mark.parametrize("dim", DIMS)
def test_morton_codes_sort_as_morton_argsort(dim):
    for depth, wide in ((NARROW[dim], False), (WIDE[dim], True), (3, False)):
        coords = random_cells(dim, depth, 9)
        codes = pm.serialize(coords, depth=depth, wide=wide)
        order = lexicographic(codes) if wide else torch.argsort(codes, stable=True)
        assert torch.equal(order, morton_argsort(coords, Bounds.of(coords)))


def test_morton_codes_by_hand():
    coords = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 3, 1], [2, 0, 2]], dtype=torch.int32)
    assert pm.serialize(coords, depth=2).tolist() == [0, 1, 2, 0b1011, 0b100100]
    assert pm.serialize(coords, depth=3).tolist() == [0, 1, 2, 0b1011, 0b10000100]
    assert pm.serialize(coords[:, [0, 1, 2, 1]], depth=1, check=False)[1:3].tolist() == [0b010, 0b101]


@pytest.mark.parametrize("order", CURVES)
@pytest.mark.parametrize("dim", DIMS)
def test_wide_codes_are_the_same_numbers(dim, order):
    depth = NARROW[dim]
    coords = random_cells(dim, depth, 512)
    wide = pm.serialize(coords, order, depth, wide=True)
    assert torch.equal(wide[:, 1], pm.serialize(coords, order, depth)) and not bool(wide[:, 0].any())
    coords = random_cells(dim, WIDE[dim], 512)
    high, low = pm.serialize(coords, order, wide=True).unbind(1)
    numbers = [(h << 63) | a for h, a in zip(high.tolist(), low.tolist(), strict=True)]
    assert [n >> (dim * WIDE[dim]) for n in numbers] == coords[:, 0].tolist()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("order", CURVES)
@pytest.mark.parametrize("dim", DIMS)
def test_no_coordinates(dim, order, wide):
    codes = pm.serialize(torch.zeros(0, 1 + dim, dtype=torch.int32), order, wide=wide)
    assert codes.shape == ((0, 2) if wide else (0,)) and codes.dtype == torch.int64
    back = pm.deserialize(codes, dim, order)
    assert back.shape == (0, 1 + dim) and back.dtype == torch.int32


def test_tensors_and_geometries_are_taken():
    x = pm.SparseTensor(torch.ones(64, 1), cube(3, 2))
    codes = pm.serialize(x.coords, "hilbert")
    assert torch.equal(pm.serialize(x, "hilbert"), codes) and torch.equal(pm.serialize(x.geometry, "hilbert"), codes)


@pytest.mark.parametrize("order", CURVES)
def test_the_arguments_stay_as_they_are(order):
    coords = random_cells(3, 16, 5)
    kept = coords.clone()
    codes = pm.serialize(coords, order)
    held = codes.clone()
    pm.deserialize(codes, 3, order)
    assert torch.equal(coords, kept) and torch.equal(codes, held)


def test_without_a_check_nothing_is_read():
    """On a device of shapes only there is nothing to read."""
    coords = torch.empty(7, 4, dtype=torch.int32, device="meta")
    codes = pm.serialize(coords, "hilbert", check=False)
    assert codes.shape == (7,)
    assert pm.deserialize(codes, 3, "hilbert", check=False).shape == (7, 4)
