"""pumice.compat.torchsparse against loops over voxels and taps, written from the rules of torchsparse 1.4 and 2.1."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import pumice as pm
import pumice.compat.torchsparse as ts
from pumice.compat import uninstall
from pumice.compat.__main__ import main
from pumice.errors import CoordinateError, DtypeError, GeometryError, OptionError, ShapeError

pytestmark = pytest.mark.usefixtures("seeded")

Cells = dict[tuple[int, ...], Tensor]
"""Features by (batch, x, y, z), divided by the stride."""


def taps_of(kernel: tuple[int, ...], start: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Offsets of the taps in the order of a kernel: x fastest if their number is odd, else z fastest."""
    axes = [[-s + i for i in range(k)] for k, s in zip(kernel, start, strict=True)]
    if math.prod(kernel) % 2:
        return [(x, y, z) for z in axes[2] for y in axes[1] for x in axes[0]]
    return list(itertools.product(*axes))


def times(stride: tuple[int, ...], cell: tuple[int, ...], tap: tuple[int, ...]) -> tuple[int, ...]:
    return (cell[0], *(s * c + t for s, c, t in zip(stride, cell[1:], tap, strict=True)))


def convolved(cells: Cells, outputs: set[tuple[int, ...]], kernel: Tensor, taps: list, stride: tuple) -> Cells:
    found = {}
    for out in outputs:
        total = torch.zeros(kernel.shape[2], dtype=kernel.dtype)
        for tap, weight in zip(taps, kernel, strict=True):
            given = cells.get(times(stride, out, tap))
            if given is not None:
                total = total + given @ weight
        found[out] = total
    return found


def inverted(cells: Cells, outputs: set[tuple[int, ...]], kernel: Tensor, taps: list, stride: tuple) -> Cells:
    found = {out: torch.zeros(kernel.shape[2], dtype=kernel.dtype) for out in outputs}
    for cell, given in cells.items():
        for tap, weight in zip(taps, kernel, strict=True):
            out = times(stride, cell, tap)
            if out in found:
                found[out] = found[out] + given @ weight
    return found


def floors(cells: Cells, stride: tuple[int, ...]) -> set[tuple[int, ...]]:
    return {(b, *(c // s for c, s in zip(at, stride, strict=True))) for b, *at in cells}


def supported(cells: Cells, kernel: tuple, stride: tuple, padding: tuple, box: tuple | None) -> set[tuple[int, ...]]:
    """Outputs of 2.1: those of the dense convolution, within 0 and the last window."""
    extents = box or tuple(max(at[axis] for at in cells) + 1 for axis in (1, 2, 3))
    shape = [(n + 2 * p - k) // s + 1 for n, k, s, p in zip(extents, kernel, stride, padding, strict=True)]
    found = set()
    for batch, *at in cells:
        for tap in itertools.product(*(range(k) for k in kernel)):
            moved = [c + p - t for c, p, t in zip(at, padding, tap, strict=True)]
            if all(m % s == 0 and 0 <= m // s < n for m, s, n in zip(moved, stride, shape, strict=True)):
                found.add((batch, *(m // s for m, s in zip(moved, stride, strict=True))))
    return found


def overlapping(cells: Cells, kernel: tuple, stride: tuple) -> set[tuple[int, ...]]:
    """Outputs of 1.4 where the stride is neither 1 nor the kernel size."""
    least = [min(at[axis] for at in cells) for axis in (1, 2, 3)]
    found = set()
    for batch, *at in cells:
        for tap in taps_of(kernel, tuple((k - 1) // 2 for k in kernel)):
            moved = [c + t for c, t in zip(at, tap, strict=True)]
            if all(m % s == 0 and m >= low for m, s, low in zip(moved, stride, least, strict=True)):
                found.add((batch, *(m // s for m, s in zip(moved, stride, strict=True))))
    return found


def cloud(mode: str, stride: int = 1, low: int = 0, box: tuple | None = None, seed: int = 0):
    """A tensor of a version, and its cells."""
    chance = torch.Generator().manual_seed(seed)
    cells = torch.randint(low, 9, (160, 3), generator=chance)
    items = torch.randint(0, 2, (160, 1), generator=chance)
    cells = torch.unique(torch.cat([items, cells], 1), dim=0).int()
    cells = cells[torch.randperm(len(cells), generator=chance)]
    feats = torch.randn(len(cells), 4, generator=chance)
    coords = cells if mode == "2.1" else torch.cat([cells[:, 1:] * stride, cells[:, :1]], 1)
    more = {} if box is None else {"spatial_range": box}
    x = ts.version(mode).SparseTensor(feats, coords, stride, **more)
    return x, dict(zip(map(tuple, cells.tolist()), feats, strict=True))


def cells_of(x) -> Cells:
    """The features of a result by cell."""
    coords = x.C
    if x.version == "1.4":
        assert (coords[:, :3] % torch.tensor(x.s) == 0).all()
        coords = torch.cat([coords[:, 3:], coords[:, :3] // torch.tensor(x.s)], 1)
    return dict(zip(map(tuple, coords.tolist()), x.F, strict=True))


def assert_cells(x, expected: Cells) -> None:
    found = cells_of(x)
    assert found.keys() == expected.keys()
    for cell, value in expected.items():
        torch.testing.assert_close(found[cell], value, rtol=1e-4, atol=1e-5)


def layer(mode: str, *args, **options):
    made = ts.version(mode).nn.Conv3d(*args, **options)
    return made, made.kernel.detach().reshape(-1, *made.kernel.shape[-2:])


KERNELS = [(3, 3, 3), (1, 1, 1), (5, 1, 3), (2, 2, 2), (3, 3, 2), (4, 1, 1)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_stride_one_keeps_the_coordinates(mode: str, kernel: tuple[int, ...]):
    x, cells = cloud(mode)
    conv, weight = layer(mode, 4, 6, kernel)
    centred = mode == "1.4" or math.prod(kernel) % 2
    taps = taps_of(kernel, tuple((k - 1) // 2 if centred else 0 for k in kernel))
    assert_cells(conv(x), convolved(cells, set(cells), weight, taps, (1, 1, 1)))
    assert conv(x).C is x.C


@pytest.mark.parametrize(("kernel", "stride"), [((2, 2, 2), (2, 2, 2)), ((3, 3, 3), (3, 3, 3)), ((3, 2, 1), (1, 2, 1))])
def test_floor_unique_of_14(kernel: tuple[int, ...], stride: tuple[int, ...]):
    x, cells = cloud("1.4", stride=2, low=-5)
    conv, weight = layer("1.4", 4, 6, kernel, stride)
    taps = taps_of(kernel, tuple((k - 1) // 2 for k in kernel))
    y = conv(x)
    assert y.s == tuple(2 * s for s in stride)
    assert_cells(y, convolved(cells, floors(cells, stride), weight, taps, stride))


@pytest.mark.parametrize("low", [0, 3, -4])
@pytest.mark.parametrize(("kernel", "stride"), [((3, 3, 3), (2, 2, 2)), ((3, 1, 3), (2, 1, 2)), ((4, 4, 4), (2, 2, 2))])
def test_overlapping_strides_of_14(kernel: tuple[int, ...], stride: tuple[int, ...], low: int):
    x, cells = cloud("1.4", low=low)
    conv, weight = layer("1.4", 4, 6, kernel, stride)
    taps = taps_of(kernel, tuple((k - 1) // 2 for k in kernel))
    assert_cells(conv(x), convolved(cells, overlapping(cells, kernel, stride), weight, taps, stride))


STRIDED = [
    ((2, 2, 2), (2, 2, 2), (0, 0, 0)),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    ((3, 3, 3), (2, 2, 2), (0, 0, 0)),
    ((3, 1, 2), (2, 1, 2), (1, 0, 0)),
    ((1, 1, 1), (2, 2, 2), (0, 0, 0)),
]


@pytest.mark.parametrize("box", [None, (2, 11, 10, 9)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), STRIDED)
def test_support_of_21(kernel: tuple, stride: tuple, padding: tuple, box: tuple | None):
    x, cells = cloud("2.1", box=box)
    conv, weight = layer("2.1", 4, 6, kernel, stride, padding)
    assert conv.kernel.ndim == 3
    # Axes of stride 1 and odd kernels are centred whatever is given.
    padding = conv.padding
    outputs = supported(cells, kernel, stride, padding, box and box[1:])
    y = conv(x)
    assert_cells(y, convolved(cells, outputs, weight, taps_of(kernel, padding), stride))
    extents = zip((box or (2, 0, 0, 0))[1:], kernel, stride, padding, strict=True)
    assert y.spatial_range == (box and (2, *((n + 2 * p - k) // s + 1 for n, k, s, p in extents)))


@pytest.mark.parametrize(
    ("downsample", "kernel", "stride"), [("spconv", 2, 2), ("minkowski", 3, 2), ("minkowski", 2, 2)]
)
def test_hashmap_mode_of_21(downsample: str, kernel: int, stride: int):
    x, cells = cloud("2.1")
    config = {"kmap_mode": "hashmap", "downsample_mode": downsample}
    conv, weight = layer("2.1", 4, 6, kernel, stride, config=config)
    taps = taps_of((kernel,) * 3, ((kernel - 1) // 2,) * 3)
    assert_cells(conv(x), convolved(cells, floors(cells, (stride,) * 3), weight, taps, (stride,) * 3))


@pytest.mark.parametrize(("mode", "kernel", "padding"), [("1.4", 2, 0), ("1.4", 3, 0), ("2.1", 2, 0), ("2.1", 3, 1)])
def test_transposed_finds_the_finer_coordinates(mode: str, kernel: int, padding: int):
    x, _ = cloud(mode)
    down, _ = layer(mode, 4, 6, kernel, 2, **({"padding": padding} if mode == "2.1" else {}))
    # Of a transposed convolution torchsparse uses kernel size and stride alone.
    up, weight = layer(mode, 6, 5, kernel, 2, bias=True, transposed=True)
    coarse = down(x)
    start = (kernel - 1) // 2 if mode == "1.4" else padding
    y = up(coarse)
    expected = inverted(cells_of(coarse), set(cells_of(x)), weight, taps_of((kernel,) * 3, (start,) * 3), (2, 2, 2))
    assert_cells(y, {cell: value + up.bias for cell, value in expected.items()})
    assert (y.C is x.C) and y.s == x.s


@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_transposed_of_stride_one_reverses_taps(mode: str):
    x, cells = cloud(mode)
    conv, weight = layer(mode, 4, 6, 3, 1, transposed=True)
    assert_cells(conv(x), inverted(cells, set(cells), weight, taps_of((3, 3, 3), (1, 1, 1)), (1, 1, 1)))


def test_transposed_of_stride_one_takes_odd_kernels():
    with pytest.raises(OptionError, match="takes odd kernels, found \\(2, 2, 2\\)"):
        ts.Conv3d14(4, 6, 2, 1, transposed=True)


def test_two_paddings_at_one_level():
    x, cells = cloud("2.1")
    for padding in (1, 0):
        conv, weight = layer("2.1", 4, 6, 3, 2, padding)
        outputs = supported(cells, (3,) * 3, (2,) * 3, (padding,) * 3, None)
        assert_cells(conv(x), convolved(cells, outputs, weight, taps_of((3,) * 3, (padding,) * 3), (2, 2, 2)))


def test_transposed_without_the_strided_one():
    x, _ = cloud("2.1", stride=2)
    with pytest.raises(GeometryError, match="kernel_size=\\(2, 2, 2\\), stride=\\(2, 2, 2\\)"):
        ts.Conv3d(4, 6, 2, 2, transposed=True)(x)


def test_dilation_has_no_effect_and_says_so():
    x, _ = cloud("1.4")
    plain = ts.Conv3d14(4, 6, 3)
    with pytest.warns(UserWarning, match="ignores dilation, found 2"):
        dilated = ts.Conv3d14(4, 6, 3, 1, 2)
    dilated.load_state_dict(plain.state_dict())
    assert torch.equal(dilated(x).F, plain(x).F)


def test_shared_caches_of_rebuilt_tensors():
    """point_to_voxel makes a tensor of other features at x's coordinates, and gives it x's caches afterwards."""
    for mode in ("1.4", "2.1"):
        v = ts.version(mode)
        x, _ = cloud(mode)
        coarse = v.nn.Conv3d(4, 6, 2, 2)(x)
        again = v.SparseTensor(torch.randn(len(coarse.F), 6), coarse.C, coarse.s)
        if mode == "1.4":
            again.cmaps, again.kmaps = coarse.cmaps, coarse.kmaps
        else:
            again._caches = coarse._caches
        assert again.sparse.geometry is coarse.sparse.geometry
        y = v.cat([v.nn.Conv3d(6, 5, 2, 2, transposed=True)(again), x])
        assert y.F.shape == (len(x.F), 9)


def test_coordinates_written_in_place_are_new_ones():
    x, _ = cloud("2.1")
    again = ts.SparseTensor(x.F, x.C)
    again._caches, _ = x._caches, x.sparse
    x.C[:, 1:] += 1
    assert torch.equal(again.sparse.coords[:, [0, 3, 2, 1]], x.C)


def test_two_strided_convolutions_of_one_input_add():
    x, _ = cloud("2.1")
    a, b = (ts.Conv3d(4, 6, 2, 2) for _ in range(2))
    y = a(x) + b(x)
    torch.testing.assert_close(y.F, a(x).F + b(x).F)
    assert y.C is a(x).C


def test_sums_are_row_by_row():
    for mode in ("1.4", "2.1"):
        x, _ = cloud(mode)
        y = type(x)(torch.randn(len(x.F), 4), x.C.flip(0))
        found = x + y
        assert torch.equal(found.F, x.F + y.F) and torch.equal(found.C, x.C)
        with pytest.raises(ShapeError, match="feats have 3 rows"):
            _ = x + type(x)(torch.randn(3, 4), x.C[:3])


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_no_voxels(mode: str, kernel: int, stride: int):
    x = ts.version(mode).SparseTensor(torch.zeros(0, 4), torch.zeros(0, 4).int())
    assert layer(mode, 4, 6, kernel, stride)[0](x).F.shape == (0, 6)


@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_wrong_inputs(mode: str):
    v = ts.version(mode)
    x, _ = cloud(mode)
    for coords, found in ((x.C + 0.5, "torch.float32 "), (x.C[:, :3], "torch.int32 .*, 3\\]"), (x.C.numpy(), "int32 ")):
        with pytest.raises(DtypeError, match=f"a tensor of integers \\[N, 4\\], found {found}"):
            v.nn.Conv3d(4, 6)(v.SparseTensor(x.F, coords))
    with pytest.raises(OptionError, match="channels are at least 1, found \\(0, 6\\)"):
        v.nn.Conv3d(0, 6)
    for kernel, stride, name in ((0, 1, "kernel_size"), (2.5, 1, "kernel_size"), (3, 0, "stride")):
        with pytest.raises(OptionError, match=f"{name} takes "):
            v.nn.Conv3d(4, 6, kernel, stride)


def test_gradients_arrive_in_kernels():
    x, cells = cloud("1.4")
    for kernel in (3, 2):
        conv, weight = layer("1.4", 4, 6, kernel)
        weight.requires_grad_()
        chance = torch.randn(len(x.F), 6)
        (conv(x).F * chance).sum().backward()
        taps = taps_of((kernel,) * 3, ((kernel - 1) // 2,) * 3)
        order = [tuple(row) for row in torch.cat([x.C[:, 3:], x.C[:, :3]], 1).tolist()]
        expected = convolved(cells, set(cells), weight, taps, (1, 1, 1))
        (torch.stack([expected[cell] for cell in order]) * chance).sum().backward()
        assert conv.kernel.grad is not None
        torch.testing.assert_close(conv.kernel.grad, weight.grad, rtol=1e-4, atol=1e-4)


def test_arguments_by_position():
    new = ts.Conv3d(3, 5, 3, 2, 1, 1, True)
    assert new.padding == (1, 1, 1) and new.bias is not None and ts.Conv3d(3, 5).bias is None
    old = ts.Conv3d14(3, 5, 3, 2, 1, True, False)
    assert old.bias is not None and not hasattr(old, "nothing") and old.kernel.shape == (27, 3, 5)
    assert {*new.state_dict()} == {"kernel", "bias"}
    assert ts.Conv3d(3, 5, 1).kernel.shape == ts.Conv3d14(3, 5, 1, 2).kernel.shape == (3, 5)
    with pytest.raises(OptionError, match="GenerativeConvTranspose3d"):
        ts.Conv3d(3, 5, 3, 2, transposed=True, generative=True)


def test_negative_coordinates_of_21():
    x, _ = cloud("2.1", low=-3)
    with pytest.raises(CoordinateError, match="loses negative coordinates"):
        ts.Conv3d(4, 6)(x)
    allow = ts.version("2.1").tensor.set_allow_negative_coordinates
    allow(True)
    try:
        x, _ = cloud("2.1", low=-3)
        assert ts.Conv3d(4, 6)(x).F.shape == (len(x.F), 6)
    finally:
        allow(False)


def test_tensors_change_in_place():
    x, _ = cloud("2.1", box=(2, 9, 9, 9))
    y = ts.Conv3d(4, 6)(x)
    y.F = y.F * 2
    y.feats = y.feats + 1
    assert torch.equal(y.sparse.feats, y.F)
    assert y.detach() is y and not y.F.requires_grad
    assert y.half() is y and y.F.dtype == torch.float16
    assert y.to("cpu") is y and y.cpu().stride == (1, 1, 1)
    assert torch.equal(x.dense()[tuple(x.C.long().unbind(1))], x.F)
    y.coords = y.coords.flip(0)
    assert torch.equal(y.C, x.C.flip(0)) and y.F.dtype == torch.float16
    copied = pickle.loads(pickle.dumps(x))
    assert torch.equal(copied.F, x.F) and torch.equal(copied.C, x.C)


def test_data_sets_hold_arrays():
    for mode in ("1.4", "2.1"):
        v = ts.version(mode)
        coords = [np.array([[0, 0, 1], [4, 2, 0]], np.int32), np.array([[1, 1, 1]], np.int32)]
        scenes = [{"x": v.SparseTensor(np.ones((len(c), 2), np.float32), c), "n": len(c), "p": c[0]} for c in coords]
        batch = v.utils.collate.sparse_collate_fn(scenes)
        column = batch["x"].C[:, 3 if mode == "1.4" else 0]
        assert column.tolist() == [0, 0, 1] and batch["n"] == [2, 1] and batch["p"].shape == (2, 3)
        assert isinstance(batch["x"], v.SparseTensor) and batch["x"].F.dtype == torch.float32


def test_sparse_quantize():
    points = np.random.default_rng(0).normal(size=(400, 3))
    quantize = ts.utils.quantize.sparse_quantize
    cells, index, inverse = quantize(points, 0.5, return_index=True, return_inverse=True)
    expected = np.floor(points / 0.5).astype(np.int32)
    assert np.array_equal(cells[inverse], expected) and np.array_equal(expected[index], cells)
    assert [tuple(c) for c in cells] == sorted({tuple(c) for c in expected.tolist()})
    assert np.array_equal(quantize(points, (0.5, 0.5, 0.5)), cells)


def fnv(values: list[int]) -> int:
    found = 14695981039346656037
    for value in values:
        found = (found ^ (value & 0xFFFFFFFF)) * 1099511628211 % 2**64
    return (found >> 60) ^ (found & (2**60 - 1))


def test_hash_and_query():
    F = ts.nn.functional
    coords = torch.randint(-50, 50, (40, 4)).int()
    assert F.sphash(coords).tolist() == [fnv(row) for row in coords.tolist()]
    offsets = ts.nn.utils.get_kernel_offsets(2, 4, 1)
    found = F.sphash(coords, offsets)
    assert found.shape == (8, 40)
    moved = [
        [fnv([*(a + b for a, b in zip(row, tap, strict=False)), row[3]]) for row in coords.tolist()]
        for tap in offsets.tolist()
    ]
    assert found.tolist() == moved
    references = torch.unique(F.sphash(coords))[::2]
    place = F.sphashquery(found, references)
    table = {value: i for i, value in enumerate(references.tolist())}
    assert place.tolist() == [[table.get(value, -1) for value in row] for row in found.tolist()]
    counts = F.spcount(place[0].int(), len(references))
    assert counts.dtype == torch.int32
    assert counts.tolist() == [place[0].tolist().count(i) for i in range(len(references))]


@pytest.mark.parametrize("size", [2, 3, (3, 3, 2), (5, 1, 3), 4])
def test_kernel_offsets(size):
    kernel = (size,) * 3 if isinstance(size, int) else size
    found = ts.nn.utils.get_kernel_offsets(size, (1, 2, 3))
    expected = taps_of(kernel, tuple((k - 1) // 2 for k in kernel))
    assert found.dtype == torch.int32
    assert found.tolist() == [[a * s for a, s in zip(tap, (1, 2, 3), strict=True)] for tap in expected]


def test_voxelize_and_devoxelize():
    F = ts.nn.functional
    feats = torch.randn(50, 3, requires_grad=True)
    place = torch.randint(-1, 12, (50,))
    counts = F.spcount(place.int(), 12)
    y = F.spvoxelize(feats, place, counts)
    for voxel in range(12):
        mine = feats[place == voxel]
        torch.testing.assert_close(y[voxel], mine.mean(0) if len(mine) else torch.zeros(3))
    y.sum().backward()
    assert feats.grad is not None and torch.equal(feats.grad[place < 0], torch.zeros(int((place < 0).sum()), 3))
    at, weights = torch.randint(-1, 12, (20, 8)), torch.rand(20, 8)
    voxels = y.detach().requires_grad_()
    found = F.spdevoxelize(voxels, at, weights)
    expected = torch.stack(
        [
            sum(w * voxels[i] for i, w in zip(row, ws, strict=True) if i >= 0)
            for row, ws in zip(at, weights, strict=True)
        ]
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), voxels)[0] for o in (found, expected)))


def test_trilinear_weights():
    scale = 4
    points = torch.rand(30, 4) * 20 - 8
    idx = torch.randint(-1, 5, (30, 8))
    found = ts.nn.functional.calc_ti_weights(points, idx, scale=scale)
    for point, row, weights in zip(points, idx, found, strict=True):
        ahead = [(v / scale) % 1 for v in point[:3].tolist()]
        plain = [
            math.prod(a if bit else 1 - a for a, bit in zip(ahead, corner, strict=True))
            for corner in itertools.product((0, 1), repeat=3)
        ]
        present = [w * (i >= 0) for w, i in zip(plain, row.tolist(), strict=True)]
        expected = torch.tensor([w / (sum(present) + 1e-8) for w in present])
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    # 1.4 lays them out by corner.
    old = ts.version("1.4").nn.functional.calc_ti_weights(points, idx.t(), scale=scale)
    assert torch.equal(old, found.t())


def test_hash_table_of_coordinates():
    target = torch.unique(torch.randint(0, 6, (60, 4)), dim=0).int()
    table = ts.backend.GPUHashTable(torch.zeros(1), torch.zeros(1))
    table.insert_coords(target)
    query = torch.randint(0, 6, (20, 4)).int()
    one = torch.ones(3, dtype=torch.int32)
    found = table.lookup_coords(query, torch.tensor([2, 2, 2]), one, 8)
    places = {tuple(row): i + 1 for i, row in enumerate(target.tolist())}
    for row, places_found in zip(query.tolist(), found.tolist(), strict=True):
        around = [(*(a + b for a, b in zip(row, tap, strict=False)), row[3]) for tap in taps_of((2, 2, 2), (0, 0, 0))]
        assert places_found == [places.get(cell, 0) for cell in around]


def test_norms_and_pools():
    x, cells = cloud("2.1")
    norm = ts.GroupNorm(2, 4)
    dense = {item: torch.stack([f for cell, f in cells.items() if cell[0] == item]) for item in (0, 1)}
    y = norm(x)
    for item, feats in dense.items():
        expected = torch.nn.functional.group_norm(feats.t()[None], 2)[0].t()
        torch.testing.assert_close(y.F[x.C[:, 0] == item], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ts.GlobalAvgPool()(x), torch.stack([f.mean(0) for f in dense.values()]))
    torch.testing.assert_close(ts.GlobalMaxPool()(x), torch.stack([f.amax(0) for f in dense.values()]))
    torch.testing.assert_close(ts.BatchNorm(4)(x).F, torch.nn.BatchNorm1d(4)(x.F))
    torch.testing.assert_close(ts.LeakyReLU(0.2)(x).F, torch.nn.functional.leaky_relu(x.F, 0.2))
    assert isinstance(ts.BatchNorm(4), torch.nn.BatchNorm1d) and isinstance(ts.ReLU(True), torch.nn.ReLU)
    torch.testing.assert_close(ts.nn.utils.fapply(x, torch.tanh).F, x.F.tanh())


class Encoder(torch.nn.Module):
    """A U-Net with one skip connection, as users write it."""

    def __init__(self, spnn) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.ReLU(True))
        self.down = torch.nn.Sequential(spnn.Conv3d(8, 8, 2, stride=2), spnn.BatchNorm(8), spnn.ReLU(True))
        self.deep = torch.nn.Sequential(spnn.Conv3d(8, 8, 3), spnn.BatchNorm(8))
        self.up = spnn.Conv3d(8, 8, 2, stride=2, transposed=True)
        self.head = spnn.Conv3d(16, 3, 1, bias=True)

    def forward(self, x):
        a = self.stem(x)
        b = self.down(a)
        return self.head(ts.cat([self.up(self.deep(b) + b), a]))


@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_programs(mode: str):
    """pm.compile runs an unchanged network."""
    net = Encoder(ts.version(mode).nn).eval()
    x, _ = cloud(mode, **({"box": (2, 9, 9, 9)} if mode == "2.1" else {}))
    with torch.no_grad():
        expected = net(x)
        program = pm.compile(net)
        for seed in (0, 1):
            x, _ = cloud(mode, seed=seed, **({"box": (2, 9, 9, 9)} if mode == "2.1" else {}))
            found, expected = program(x), net(x)
            torch.testing.assert_close(found.F, expected.F, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["1.4", "2.1"])
def test_on_a_gpu(mode: str):
    """Results and gradients of a GPU, and those of a program, are the CPU's."""
    net = Encoder(ts.version(mode).nn).eval()
    box = {"box": (2, 9, 9, 9)} if mode == "2.1" else {}
    expected = net(cloud(mode, **box)[0])
    expected.F.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    x = cloud(mode, **box)[0].to("cuda")
    found = net.cuda()(x)
    found.F.square().sum().backward()
    torch.testing.assert_close(found.F.cpu(), expected.F, rtol=1e-3, atol=1e-4)
    for parameter, grad in zip(net.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), grad, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        torch.testing.assert_close(pm.compile(net)(x).F, found.F, rtol=1e-3, atol=1e-4)


PROGRAM = """
import torch, torchsparse, torchsparse.nn as spnn, torchsparse.nn.functional as F
from torchsparse import SparseTensor, PointTensor
from torchsparse.nn.functional.devoxelize import calc_ti_weights
from torchsparse.nn.utils import get_kernel_offsets
from torchsparse.utils.quantize import sparse_quantize
from torchsparse.utils.collate import sparse_collate_fn
from torchsparse.utils import make_ntuple
x = SparseTensor(torch.ones(2, 3), torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]).int())
print(spnn.Conv3d(3, 4, 3, 1, 1, True)(x).F.shape, torchsparse.__version__)
"""


def test_run_in_a_mode(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    try:
        assert main(["run", "--only", "torchsparse=1.4", str(program)]) == 0
        assert capsys.readouterr().out.split() == ["torch.Size([2,", "4])", "1.4.0"]
        assert main(["run", "--only", "torchsparse=9", str(program)]) == 2
        assert "mode='9' is unknown; there are 1.4, 2.1" in capsys.readouterr().err
    finally:
        uninstall("torchsparse")


def test_points_and_voxels_side_by_side():
    """A point branch beside a voxel branch, at two strides, as point-voxel networks of 1.4 have it."""
    v = ts.version("1.4")
    F, spnn = v.nn.functional, v.nn
    points = torch.cat([torch.rand(300, 3) * 12 - 4, torch.randint(0, 2, (300, 1))], 1)
    feats = torch.randn(300, 4, requires_grad=True)
    hashed = F.sphash(torch.floor(points).int())
    cells = torch.unique(hashed)
    place = F.sphashquery(hashed, cells)
    counts = F.spcount(place.int(), len(cells))
    coords = torch.round(F.spvoxelize(torch.floor(points), place, counts)).int()
    assert torch.equal(coords[place], torch.floor(points).int())
    x = spnn.Conv3d(4, 6, 2, 2)(v.SparseTensor(F.spvoxelize(feats, place, counts), coords))
    corner = torch.cat([torch.floor(points[:, :3] / 2).int() * 2, points[:, 3:].int()], 1)
    around = F.sphashquery(F.sphash(corner, v.nn.utils.get_kernel_offsets(2, 2, 1)), F.sphash(x.C))
    # The voxel of each point is the first of the eight.
    assert torch.equal(x.C[around[0]], corner)
    weights = F.calc_ti_weights(points, around, scale=2)
    y = F.spdevoxelize(x.F, around.t().contiguous(), weights.t().contiguous())
    assert (weights.sum(0) <= 1 + 1e-5).all() and (weights.sum(0) > 0.9).all()
    y.square().sum().backward()
    assert feats.grad is not None and (feats.grad.abs().sum(1) > 0).all()


def test_trees():
    x, _ = cloud("2.1", box=(2, 9, 9, 9))
    leaves, spec = pytree.tree_flatten({"x": x})
    assert len(leaves) == 1 and leaves[0] is x.F
    again = pytree.tree_unflatten(leaves, spec)["x"]
    assert again.sparse.geometry is x.sparse.geometry and again.spatial_range == x.spatial_range
    assert ts.Conv3d(4, 4, 2, 2)(again).sparse.spatial_shape == (4, 4, 4)
    # Points, and scenes of data sets, stay as they are.
    points = ts.SparseTensor(torch.randn(5, 2), torch.rand(5, 4))
    assert [leaf.shape for leaf in pytree.tree_leaves(points)] == [(5, 2), (5, 4)]
    assert torch.equal(pytree.tree_map(lambda leaf: 2 * leaf, points).C, 2 * points.C)
