"""Sparse tensors in every format: round trips, arrays spelt out, group sizes by brute force, gradients, refusals."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wide import beyond

from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, ShapeError, StatementError
from pumice.language.formats import parse_format
from pumice.ops.einsum import compile_einsum
from pumice.ops.sparse import GROUP_SIZES, FormatBucket, Sparse, buckets, sparse, sparse_from_coords

# torch says once of each of its compressed layouts that it is new, and that it trusts its maker.
pytestmark = pytest.mark.filterwarnings("ignore:.*[Ss]parse.*:UserWarning")

FORMATS = {
    1: ["k:C", "k:U", "k:G", "k:C k:B3", "k:U k:B2"],
    2: [
        *["COO", "CSR", "CSC", "DCSR", "ELL", "BCSR", "GroupCOO", "BlockCOO", "BlockGroupCOO"],
        *["m:C k:G3", "m:C k:G*", "m:C k:G2,8", "m:U k:C m:B2 k:B3", "m:C k:G2 m:B2 k:B3", "m:C m:B2 k:G* k:B3"],
        *["m:U k:U", "m:U k:U m:B2 k:B4", "(m k):G", "m:C k:U", "k:C m:U", "[m,k] k:C m:U k:B2"],
        *["m:U k:G m:B3 k:B2", "[m,k] k:U m:C k:B2 m:B2", "m:U k:C k:B3", "p:C q:U", "m:C (k):G"],
    ],
    3: [
        *["(a b c):C", "a:U (b c):C", "a:C b:U c:C", "a:U b:C c:U", "a:C b:U c:G", "a:U b:U c:G", "(a b):C c:G"],
        *["a:C (b c):G*", "[a,b,c] c:C b:U a:G c:B2", "a:C b:G c:U a:B2 c:B2", "a:C b:C c:G2,4 b:B2"],
    ],
    4: ["m:U (c r s):C", "m:C c:C r:U s:U", "r:U s:U m:C c:C", "(m c):C r:G s:U m:B2"],
}
SHAPES = {
    1: [(0,), (1,), (13,)],
    2: [(0, 5), (5, 0), (1, 1), (1, 9), (7, 1), (5, 6), (33, 35)],
    3: [(3, 0, 2), (1, 1, 1), (5, 4, 7)],
    4: [(2, 0, 3, 1), (3, 4, 3, 2)],
}
CASES = [(ndim, text) for ndim, texts in FORMATS.items() for text in texts]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int8, torch.bool]
MATRIX = torch.tensor([[0, 7, 8, 9], [0, 0, 0, 0], [5, 0, 0, 0], [0, 1, 2, 0]], dtype=torch.float32)


def draw(shape, density, dtype=torch.float64, seed=0):
    chance = torch.Generator().manual_seed(seed)
    kept = torch.rand(shape, generator=chance) < density
    return (kept * torch.randint(1, 9, shape, generator=chance)).to(dtype)


@pytest.mark.parametrize(("ndim", "text"), CASES)
def test_round_trip(ndim, text):
    for shape, density in itertools.product(SHAPES[ndim], [0.0, 0.2, 1.0]):
        x = draw(shape, density)
        found = sparse(x, text)
        assert found.to_dense().equal(x)
        assert found.shape == shape and found.ndim == ndim and found.dtype == x.dtype
        assert found.nnz == int((x != 0).sum())
        assert found.to_torch().to_dense().equal(x)
        assert f"nnz={found.nnz}" in repr(found) and f"{found.nbytes} bytes" in repr(found)
        assert 0 <= found.padding <= 1


@pytest.mark.parametrize(("ndim", "text"), CASES)
def test_arrays_are_as_the_layout_says(ndim, text):
    for shape in SHAPES[ndim]:
        found = sparse(draw(shape, 0.3), text)
        assert parse_format(str(found.format)) == found.format
        for part in found.parts:
            sizes = {}
            assert part.values is not None and part.values.ndim == len(found.layout.values)
            sizes.update(zip(found.layout.values, part.values.shape, strict=True))
            assert set(part.coords) == {c.axis for c in found.layout.coordinates if c.array is not None}
            for c in found.layout.coordinates:
                if c.array is not None:
                    assert part.coords[c.axis].dtype == torch.int32
                    assert part.coords[c.axis].shape == tuple(sizes[symbol] for symbol in c.array)
            if found.format.grouped:
                group = found.format.grouped.sizes[found.parts.index(part)]
                assert sizes[found.layout.group] == group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", FORMATS[2])
def test_dtypes(text, dtype):
    x = draw((9, 11), 0.3, dtype)
    assert sparse(x, text).to_dense().equal(x)
    assert sparse(x, text).dtype == dtype


@pytest.mark.parametrize("source", FORMATS[2])
def test_from_one_format_to_another(source):
    x = draw((6, 9), 0.3)
    first = sparse(x, source)
    for target in FORMATS[2]:
        assert first.to_format(target).to_dense().equal(x), target
        assert sparse(first, target).to_dense().equal(x), target


@settings(max_examples=60)
@given(st.data())
def test_any_small_tensor_in_any_format(data):
    ndim, text = data.draw(st.sampled_from(CASES))
    shape = data.draw(st.tuples(*[st.integers(0, 6)] * ndim))
    x = draw(shape, data.draw(st.floats(0, 1)), seed=data.draw(st.integers(0, 99)))
    found = sparse(x, text, group=data.draw(st.sampled_from(sorted(GROUP_SIZES))))
    assert found.to_dense().equal(x)
    other = data.draw(st.sampled_from(FORMATS[ndim]))
    assert found.to_format(other).to_dense().equal(x)


def check(part: FormatBucket, values, **coords):
    assert {axis: array.tolist() for axis, array in part.coords.items()} == coords
    assert part.values is not None and part.values.tolist() == values


def test_group_coo_by_hand():
    found = sparse(MATRIX, "m:C k:G2")
    check(*found.parts, [[7, 8], [9, 0], [5, 0], [1, 2]], m=[0, 0, 2, 3], k=[[1, 2], [3, -1], [0, -1], [1, 2]])
    assert found.nnz == 6 and found.padding == 1 / 4
    assert found.nbytes == 4 * (4 + 8) + 4 * 8
    assert found.segments(found.parts[0]).tolist() == [0, 2, 2, 3, 4]
    assert repr(found) == ('Sparse("m:C k:G2", 4x4, nnz=6, 80 bytes, 25.0% padding, groups of 2, torch.float32)')


def test_buckets_by_hand():
    # Costs (1 + g) * ceil(n / g): a row of 3 costs 6 at 1 and 5 at 4, one of 1 costs 2 at 1, one of 2 costs 4 at 1.
    found = sparse(MATRIX, "m:C k:G1,4")
    single, four = found.parts
    check(single, [[5], [1], [2]], m=[2, 3, 3], k=[[0], [1], [1 + 1]])
    check(four, [[7, 8, 9, 0]], m=[0], k=[[1, 2, 3, -1]])
    assert found.nnz == 6
    assert found.segments(single).tolist() == [0, 0, 0, 1, 3] and found.segments(four).tolist() == [0, 1, 1, 1, 1]


def test_ties_take_less_padding():
    # A row of 3 costs 6 in groups of 1 and of 2.
    ones, twos = sparse(torch.ones(1, 3), "m:C k:G1,2").parts
    assert ones.coords["k"].shape == (3, 1) and twos.coords["k"].shape == (0, 2)
    # Groups of 4 would cost 5, and are longer than any row.
    assert str(sparse(torch.ones(2, 3), "GroupCOO").format) == "m:C k:G1"
    assert buckets([3, 3]) == (1,)


def test_ell_by_hand():
    found = sparse(MATRIX, "ELL")
    assert str(found.format) == "m:U k:G3"
    k = [[1, 2, 3], [-1, -1, -1], [0, -1, -1], [1, 2, -1]]
    check(*found.parts, [[7, 8, 9], [0, 0, 0], [5, 0, 0], [1, 2, 0]], k=k)
    assert found.nbytes == 4 * 12 + 4 * 12


def test_blocks_by_hand():
    found = sparse(MATRIX[:3], "m:U k:C m:B2 k:B2")  # three rows: the last block is half padding
    blocks = [[[0, 7], [0, 0]], [[8, 9], [0, 0]], [[5, 0], [0, 0]]]
    check(*found.parts, blocks, m=[0, 0, 1], k=[0, 1, 0])
    assert found.nnz == 4 and found.padding == 1 - 4 / 12
    grouped = sparse(MATRIX[:3], "m:C k:G2 m:B2 k:B2")
    check(*grouped.parts, [blocks[:2], [blocks[2], [[0, 0], [0, 0]]]], m=[0, 1], k=[[0, 1], [0, -1]])
    # The dimensions of the values follow the levels.
    swapped = sparse(MATRIX[:3], "m:U k:C k:B2 m:B2")
    assert swapped.parts[0].values.transpose(1, 2).tolist() == blocks


def test_dense_levels_by_hand():
    check(*sparse(MATRIX, "m:C k:U").parts, MATRIX[[0, 2, 3]].tolist(), m=[0, 2, 3])
    check(*sparse(MATRIX, "m:U k:U").parts, MATRIX.tolist())
    check(*sparse(MATRIX, "[m,k] k:C m:U").parts, MATRIX.t().tolist(), k=[0, 1, 2, 3])


@pytest.mark.parametrize(
    ("text", "words", "places"),
    [
        ("COO", 6 + 6, 6),
        ("CSR", 5 + 6, 6),
        ("CSC", 5 + 6, 6),
        ("DCSR", 3 + 4 + 6, 6),
        ("m:C k:U", 3, 12),
        ("m:U k:U", 0, 16),
        ("m:C k:G2", 4 + 8, 8),
        ("m:C k:G1,4", 3 + 3 + 1 + 4, 7),
        ("m:U k:C m:B2 k:B2", 3 + 4, 16),
        ("(m k):C m:B2 k:B2", 8, 16),
    ],
)
def test_bytes_by_hand(text, words, places):
    assert sparse(MATRIX, text).nbytes == 4 * words + 4 * places
    assert sparse(MATRIX.double(), text).nbytes == 4 * words + 8 * places
    pattern = pattern_of(sparse(MATRIX, text))
    assert pattern.nbytes == 4 * words


def test_bytes_of_three_levels():
    x = torch.zeros(3, 4, 5)
    x[0, 1, 2] = x[0, 1, 3] = x[2, 0, 0] = 1
    # Nodes: a 2; (a, b) 2 or, where all b are there, 8; (a, b, c) 3. Pointers: one more than the parents.
    assert sparse(x, "a:C b:C c:C").nbytes == 4 * (2 + 3 + 2 + 3 + 3) + 4 * 3
    assert sparse(x, "a:C b:U c:C").nbytes == 4 * (2 + 9 + 3) + 4 * 3
    assert sparse(x, "a:U (b c):C").nbytes == 4 * (4 + 6) + 4 * 3


def pattern_of(x: Sparse) -> Sparse:
    return x.with_values([None] * len(x.parts))


def test_storages_are_kept():
    found = sparse(MATRIX, "CSR")
    calls = []
    assert found.storage("mine", lambda x: calls.append(x) or 3) == 3
    assert found.storage("mine", lambda x: calls.append(x) or 4) == 3
    assert calls == [found]
    assert found.segments(found.parts[0]) is found.segments(found.parts[0])
    other = found.with_values([torch.ones(6)])
    assert other.segments(other.parts[0]) is found.segments(found.parts[0])
    assert other.to_dense().sum() == 6 and found.to_dense().equal(MATRIX)


def test_to():
    groups = sparse(MATRIX, "m:C k:G2")
    kept = groups.segments(groups.parts[0])
    found = groups.to(dtype=torch.float64)
    assert found.segments(found.parts[0]) is kept
    assert found.dtype == torch.float64 and found.to_dense().equal(MATRIX.double())
    assert found.to("cpu").device == torch.device("cpu")
    on_meta = found.to("meta")
    assert on_meta.device.type == "meta" and all(a.is_meta for a in on_meta.parts[0].coords.values())
    assert on_meta.segments(on_meta.parts[0]).is_meta


def test_patterns():
    for text in FORMATS[2]:
        found = sparse(MATRIX, text)
        ones = pattern_of(found)
        assert ones.dtype == torch.bool
        if not {"U", "B"} & {level.kind for level in found.format.levels[1:]} and text != "k:C m:U":
            assert ones.to_dense().equal(MATRIX != 0), text
            assert ones.to_format("GroupCOO").parts[0].values is None
            assert ones.to_format("ELL").parts[0].values is None
            assert ones.to_format("m:U k:C m:B3").to_dense().equal(MATRIX != 0)


def coo(indices, values, shape):
    return torch.sparse_coo_tensor(torch.tensor(indices), torch.tensor(values), shape)


def test_entries_of_a_sparse_input_stay():
    zeros = coo([[0, 1, 2], [1, 1, 0]], [0.0, 5.0, 0.0], (3, 2))
    assert sparse(zeros).nnz == 3 and sparse(zeros.to_sparse_csr(), "GroupCOO").nnz == 3
    assert sparse(sparse(zeros), "CSR").nnz == 3
    assert sparse(zeros.to_dense(), "CSR").nnz == 1
    blocks = sparse(zeros, "m:U k:C m:B3 k:B1")
    # What a block is padded with cannot be told from what it stores; without coordinates it is a dense tensor.
    assert blocks.nnz == 3 and blocks.to_format("COO").nnz == 6
    assert sparse(zeros, "m:U k:U").to_format("COO").nnz == 1


def test_duplicates_are_added():
    twice = coo([[0, 1, 0], [1, 1, 1]], [1.0, 5.0, 2.0], (2, 2))
    check(*sparse(twice).parts, [3, 5], m=[0, 1], k=[1, 1])


def test_nan_is_stored():
    x = torch.tensor([[0.0, math.nan], [-0.0, math.inf]])
    assert sparse(x).nnz == 2
    assert torch.equal(sparse(x, "ELL").to_dense().isnan(), x.isnan())


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("text", ["COO", "CSC", "GroupCOO", "m:U k:C m:B2 k:B2", "m:U k:U"])
def test_torch_inputs(layout, text):
    x = draw((6, 9), 0.3)
    blocks = {"blocksize": (2, 3)} if layout[0] == "b" else {}
    source = x.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **blocks)
    assert sparse(source, text).to_dense().equal(x)


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("CSR", torch.sparse_csr),
        ("CSC", torch.sparse_csc),
        ("m:U k:C m:B2 k:B3", torch.sparse_bsr),
        ("[m,k] k:U m:C m:B2 k:B3", torch.sparse_bsc),
        ("m:U k:C m:B4 k:B3", torch.sparse_coo),
        ("GroupCOO", torch.sparse_coo),
        ("[m,k] (k m):C", torch.sparse_coo),
    ],
)
def test_torch_outputs(text, layout):
    x = draw((6, 9), 0.3)
    found = sparse(x, text).to_torch()
    assert found.layout == layout and found.to_dense().equal(x)
    if layout not in (torch.sparse_coo, torch.sparse_bsr, torch.sparse_bsc):
        assert found.values().equal(x.to_sparse(layout=layout).values())
    assert sparse(found, "CSR").to_dense().equal(x)
    if layout == torch.sparse_coo:
        assert found.is_coalesced() == (text != "[m,k] (k m):C")
        order = torch.argsort(found.indices()[0] * 9 + found.indices()[1]) if found.is_coalesced() else None
        assert order is None or order.equal(torch.arange(len(order)))


class Triplets:
    """All that `sparse` asks of scipy's classes."""

    shape = (3, 4)
    coords = (np.array([2, 0, 2]), np.array([3, 1, 3]))
    data = np.array([1.0, 2.0, 4.0])

    def tocoo(self, copy):
        assert copy
        return self

    def sum_duplicates(self):
        self.coords, self.data = (np.array([0, 2]), np.array([1, 3])), np.array([2.0, 5.0])


def test_scipy_by_its_methods():
    check(*sparse(Triplets(), "CSR").parts, [2, 5], m=[0, 2], k=[1, 3])


def test_numpy():
    x = draw((5, 6), 0.4)
    assert sparse(x.numpy(), "CSR").to_dense().equal(x)
    assert sparse(np.asfortranarray(x.numpy())[::-1], "CSR").to_dense().equal(x.flip(0))


@pytest.mark.parametrize("shape", [(5, 7), (33, 20), (6, 9), (0, 3), (4, 0)])
def test_against_scipy(shape):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x = draw(shape, 0.3)
    for kind, text in [("csr", "CSR"), ("csc", "CSC")]:
        expected = getattr(scipy_sparse, f"{kind}_array")(x.numpy())
        found = sparse(x, text)
        (part,) = found.parts
        minor = part.coords["k" if kind == "csr" else "m"]
        assert np.array_equal(found.segments(part).numpy(), expected.indptr)
        assert np.array_equal(minor.numpy(), expected.indices)
        assert np.array_equal(part.values.numpy(), expected.data)
        out = found.to_scipy()
        assert out.format == kind and np.array_equal(out.toarray(), x.numpy())
        matrix = getattr(scipy_sparse, f"{kind}_matrix")(x.numpy())
        for source in (expected, expected.tocoo(), expected.tocsr(), matrix):
            assert sparse(source, text).to_dense().equal(x)
    assert sparse(x, "ELL").to_scipy().format == "coo"
    assert np.array_equal(sparse(x, "m:C k:G* m:B2 k:B2").to_scipy().toarray(), x.numpy())


def test_blocks_against_scipy():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x = draw((6, 9), 0.1)
    expected = scipy_sparse.bsr_array(x.numpy(), blocksize=(2, 3))
    expected.sort_indices()
    found = sparse(x, "m:U k:C m:B2 k:B3")
    (part,) = found.parts
    assert np.array_equal(found.segments(part).numpy(), expected.indptr)
    assert np.array_equal(part.coords["k"].numpy(), expected.indices)
    assert np.array_equal(part.values.numpy(), expected.data)
    assert found.to_scipy().format == "bsr" and np.array_equal(found.to_scipy().toarray(), x.numpy())
    assert sparse(expected, "CSR").to_dense().equal(x)


def test_scipy_details():
    scipy_sparse = pytest.importorskip("scipy.sparse")
    twice = scipy_sparse.coo_array(([1.0, 5.0, 2.0, 0.0], ([0, 1, 0, 1], [1, 1, 1, 0])), shape=(2, 2))
    check(*sparse(twice).parts, [3, 0, 5], m=[0, 1, 1], k=[1, 0, 1])
    assert twice.nnz == 4  # the caller's array is as it was
    with pytest.raises(DtypeError, match="float32, float64, integers and bools, found torch.bfloat16"):
        sparse(MATRIX.bfloat16()).to_scipy()
    with pytest.raises(ShapeError, match="expected 2 axes, found 3"):
        sparse(torch.ones(2, 2, 2), "(a b c):C").to_scipy()


def lengths_of(seed, rows=40):
    return torch.distributions.Pareto(1.0, 0.8).sample((rows,)).clamp(max=200).long() - seed % 2


def cost_of(lengths, size):
    return sum((1 + size) * math.ceil(n / size) for n in lengths)


def matrix_of(lengths):
    return (torch.arange(int(lengths.max()) + 1) < lengths[:, None]).float()


@pytest.mark.parametrize("seed", beyond(2, range(6)))
def test_group_sizes_by_brute_force(seed):
    torch.manual_seed(seed)
    lengths = lengths_of(seed)
    x, rows = matrix_of(lengths), [n for n in lengths.tolist() if n]
    powers = [2**p for p in range(9)]
    for size in (1, 2, 3, 8):
        groups = sum(math.ceil(n / size) for n in rows)
        half = sparse(x.half(), f"m:C k:G{size}")
        assert half.nbytes == 4 * groups + 6 * size * groups and half.parts[0].coords["m"].shape[0] == groups
    least = min((p for p in powers if p <= max(rows)), key=lambda p: cost_of(rows, p))
    assert sparse(x, "GroupCOO").format.grouped.sizes == (least,)
    root = math.sqrt(sum(rows) / len(rows))
    near = {2 ** math.floor(math.log2(root)), 2 ** math.ceil(math.log2(root))} if root > 1 else {2, 4}
    near |= {int(root) // 2} if root in powers and root > 1 else set()
    best = min(sorted(near), key=lambda p: cost_of(rows, p))
    assert sparse(x, "GroupCOO", group="sqrt").format.grouped.sizes == (best,)


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([1, 1, 1], 2),  # a mean up to 1 weighs 2 against 4
        ([0, 0], 2),
        ([3, 3, 3], 1),  # 1 and 2 cost the same
        ([4, 4], 2),  # the root is 2, which is weighed against 1
        ([16, 16, 16], 4),
        ([5], 2),  # 9 of 2, 10 of 4
        ([8, 8], 4),
    ],
)
def test_root_as_the_authors_round_it(lengths, size):
    found = sparse(matrix_of(torch.tensor(lengths)), "GroupCOO", group="sqrt")
    assert found.format.grouped.sizes == (size,)


@pytest.mark.parametrize(
    ("lengths", "sizes"), [([9, 9], (2, 4)), ([4, 4], (1, 2)), ([1, 1], (2, 4)), ([40, 60], (4, 8))]
)
@pytest.mark.parametrize("fast", [0, 1])
def test_the_faster_neighbour_of_the_root_is_taken(lengths, sizes, fast):
    """Both are timed on the statement; the result is that of any size."""
    x, b = matrix_of(torch.tensor(lengths)), torch.randn(matrix_of(torch.tensor(lengths)).shape[1], 8)
    f = compile_einsum("C[m,n] = A[m,k] * B[k,n]", {"A": "m:C k:G"})
    timed = []

    def measure(call):
        timed.append(call)
        return 1.0 if len(timed) == 1 + fast else 2.0

    found = f.grouped("A", A=x, B=b, measure=measure)
    assert found.format.grouped.sizes == (sizes[fast],) and len(timed) == 2
    for call in timed:
        torch.testing.assert_close(call(), x @ b)
    assert f.grouped("A", A=found, B=b).format.grouped.sizes[0] in sizes


def test_groups_to_time_are_those_of_a_format_that_leaves_them_open():
    x, b = torch.eye(4), torch.eye(4)
    text = "C[m,n] = A[m,k] * B[k,n]"
    for formats in ({}, {"A": "CSR"}, {"A": "m:C k:G4"}):
        with pytest.raises(OptionError, match="a group without a size"):
            compile_einsum(text, formats).grouped("A", A=x, B=b)
    ell = compile_einsum(text, {"A": "m:U k:G"}).grouped("A", A=x, B=b, measure=lambda call: 1 / 0)
    assert ell.format.grouped.sizes == (1,), "rows that cannot be split leave nothing to time"


@pytest.mark.parametrize("seed", beyond(2, range(6)))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_buckets_by_brute_force(seed, count):
    torch.manual_seed(seed)
    lengths = lengths_of(seed)
    rows = [n for n in lengths.tolist() if n]

    def total(sizes):
        return sum(min((1 + g) * math.ceil(n / g) for g in sizes) for n in rows)

    powers = [2**p for p in range(9) if 2**p <= max(rows)]
    least = min(total(c) for n in range(1, count + 1) for c in itertools.combinations(powers, n))
    found = buckets(lengths, count)
    assert total(found) == least and len(found) <= count and list(found) == sorted(found)
    if count == 3:
        automatic = sparse(matrix_of(lengths), "m:C k:G*")
        assert automatic.format.grouped.sizes == found
        scatters = sum(part.coords["m"].numel() for part in automatic.parts)
        gathers = sum(part.coords["k"].numel() for part in automatic.parts)
        assert gathers + scatters == least


def test_groups_of_nothing():
    assert buckets(torch.zeros(3, dtype=torch.int64)) == (1,) == buckets([])
    empty = torch.zeros(3, 4)
    assert str(sparse(empty, "GroupCOO").format) == "m:C k:G1" == str(sparse(empty, "m:C k:G*").format)
    assert str(sparse(empty, "ELL").format) == "m:U k:G1"


@pytest.mark.parametrize(("ndim", "text"), CASES)
def test_gradients(ndim, text):
    x = draw(SHAPES[ndim][-1] if ndim != 2 else (5, 6), 0.4).requires_grad_()
    kept = (x != 0).double()

    def through(x):
        # Squared, so that the second derivative is something; values of padding are 0 and stay so.
        found = sparse(x, text)
        return found.with_values([p.values**2 for p in found.parts if p.values is not None]).to_dense()

    through(x).sum().backward()
    assert x.grad is not None and x.grad.equal(2 * x.detach() * kept)
    if x.numel() < 40:
        # Entries that are 0 are left alone: a step would store them, which no derivative knows of.
        start = (x.detach() + 0.25).requires_grad_()
        assert torch.autograd.gradcheck(lambda v: through(torch.where(kept > 0, v, 0)), (start,))
        assert torch.autograd.gradgradcheck(lambda v: through(torch.where(kept > 0, v, 0)), (start,))


def test_gradients_reach_the_values_of_sparse_inputs():
    values = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    place = torch.tensor([[0, 2, 0], [1, 3, 1]])
    pointers, columns = torch.tensor([0, 2, 2, 3]), torch.tensor([1, 2, 0])

    def of_coo(values):
        return sparse(torch.sparse_coo_tensor(place, values, (3, 4)), "m:C k:G2").parts[0].values

    def of_csr(values):
        return sparse(torch.sparse_csr_tensor(pointers, columns, values, (3, 4)), "m:C k:G2").to_dense()

    def between(values):
        return sparse(torch.sparse_coo_tensor(place, values, (3, 4)), "m:U k:C m:B2 k:B2").to_format("ELL").to_dense()

    def to_torch(values):
        return sparse(torch.sparse_coo_tensor(place, values, (3, 4)), "m:C k:G*").to_torch().to_dense()

    for through in (of_coo, of_csr, between, to_torch):
        assert torch.autograd.gradcheck(through, (values,))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (
            ShapeError,
            r"'m:U k:C' has 2 axes, the tensor has 3; .*'\(a0 a1 a2\):C'",
            lambda: sparse(torch.ones(1, 2, 3), "CSR"),
        ),
        (ShapeError, r"'\(m k\):C' has 2 axes, the tensor has 0$", lambda: sparse(torch.tensor(1.0))),
        (
            ShapeError,
            r"'m:U k:G2' holds 2 coordinates of k per row, the longest row has 3",
            lambda: sparse(MATRIX, "m:U k:G2"),
        ),
        (
            ShapeError,
            r"'\(m k\):G5' holds 5 coordinates of \(m k\) per row, the longest row has 6",
            lambda: sparse(MATRIX, "(m k):G5"),
        ),
        (OptionError, r"group='best' is unknown; there are count, sqrt, ", lambda: sparse(MATRIX, "CSR", group="best")),
        (OptionError, r"sparse takes a dense torch tensor, a torch sparse.*; found list$", lambda: sparse([[1]])),
        (OptionError, r"; found torch.Tensor of layout torch.strided on meta", lambda: sparse(MATRIX.to("meta"))),
        (StatementError, r"unknown kind of level 'X'", lambda: sparse(MATRIX, "m:X k:C")),
        (DtypeError, r"torch has no dtype for numpy's <U1", lambda: sparse(np.array([["a"]]))),
        (
            CoordinateError,
            r"has 4611686018427387904 cells; int64 keys number fewer than 4611686018427387904",
            lambda: sparse(torch.sparse_coo_tensor(size=(2**31, 2**31))),
        ),
        (
            CoordinateError,
            r"int32 coordinates reach an extent of 2147483648, found shape \(2147483649, 1\)",
            lambda: sparse(torch.sparse_coo_tensor(size=(2**31 + 1, 1))),
        ),
        (
            ShapeError,
            r"all axes of a torch sparse tensor are sparse; found 1 dense ones",
            lambda: sparse(torch.ones(2, 3).to_sparse(1), "CSR"),
        ),
        (
            ShapeError,
            r"torch.sparse_csr tensor must have 2 axes, neither batched nor dense; found shape \[2, 3, 4\]",
            lambda: sparse(torch.ones(2, 3, 4).to_sparse_csr(), "(a b c):C"),
        ),
        (ShapeError, r"one tensor per part: expected 1, found 2", lambda: sparse(MATRIX).with_values([None, None])),
        (
            ShapeError,
            r"values\[p,q\] have shape \[4, 2\], found \[8\]",
            lambda: sparse(MATRIX, "m:C k:G2").with_values([torch.ones(8)]),
        ),
        (
            DeviceError,
            r"the coordinates are on cpu, the values on meta",
            lambda: sparse(MATRIX).with_values([torch.ones(6, device="meta")]),
        ),
        (
            CoordinateError,
            r"'m:U k:G3' has no compressed level, and so no segments",
            lambda: (lambda x: x.segments(x.parts[0]))(sparse(MATRIX, "ELL")),
        ),
    ],
)
def test_refusals(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_nothing_is_refused_that_fits():
    wide = torch.sparse_coo_tensor(torch.tensor([[2**31 - 1], [2**30 - 1]]), torch.ones(1), (2**31, 2**30))
    for text in ("COO", "GroupCOO", "DCSR"):
        assert [array.flatten().tolist() for array in sparse(wide, text).parts[0].coords.values()] == [
            [2**31 - 1],
            [2**30 - 1],
        ]


@pytest.mark.parametrize(
    "name", ["bcsstk13", "karate", "west0067", "LFAT5", "pushpull", "ani4", "mbeacxc", "cover", "bayer10", "4elt"]
)
def test_real_matrices(data_folder, name):
    path = data_folder / "matrices" / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"no matrices/{name}.npz in the data folder")
    stored = np.load(path)
    shape = tuple(int(n) for n in stored["shape"])
    pointers, columns = (torch.from_numpy(stored[key]).long() for key in ("indptr", "indices"))
    values = torch.from_numpy(stored["data"]).double()
    rows = torch.repeat_interleave(torch.arange(shape[0]), pointers.diff())
    entries = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, shape)
    truth = entries.coalesce()
    csr = sparse(entries, "CSR")
    assert csr.nnz == truth.values().numel()
    lengths = torch.bincount(truth.indices()[0], minlength=shape[0])
    assert csr.segments(csr.parts[0]).tolist() == [0, *lengths.cumsum(0).tolist()]
    texts = ("COO", "CSC", "DCSR", "GroupCOO", "m:C k:G*", "m:C k:G4 m:B4 k:B4")
    found = {text: csr.to_format(text) for text in texts}
    for text, made in found.items():
        difference = made.to_torch().to_sparse_coo() - truth
        assert difference.coalesce().values().abs().max() == 0, text
    automatic = found["m:C k:G*"].format.grouped.sizes
    single = found["GroupCOO"].format.grouped.sizes[0]
    gathered = sum(part.coords["m"].numel() + part.coords["k"].numel() for part in found["m:C k:G*"].parts)
    assert gathered <= cost_of(lengths.tolist(), single)
    assert automatic == buckets(lengths)


@pytest.mark.parametrize("text", ["COO", "(i j k):C", "GroupCOO", "i:U (j k):C"])
def test_coordinates_become_a_tensor_and_duplicates_add_up(text):
    chance = torch.Generator().manual_seed(0)
    shape = (5, 7, 4) if " " in text else (5, 7)
    coords = torch.stack([torch.randint(0, n, (60,), generator=chance) for n in shape])
    values = torch.randn(60, dtype=torch.float64, generator=chance).requires_grad_()
    dense = torch.zeros(shape, dtype=torch.float64)
    for place, value in zip(coords.t().tolist(), values.tolist(), strict=True):
        dense[tuple(place)] += value
    made = sparse_from_coords(coords, values, shape, text)
    torch.testing.assert_close(made.to_dense(), dense)
    made.to_dense().square().sum().backward()
    torch.testing.assert_close(values.grad, torch.stack([2 * dense[tuple(c)] for c in coords.t().tolist()]))


def test_coordinates_that_do_not_fit_are_told():
    values = torch.ones(2)
    for coords, error in (
        (torch.tensor([[0, 5], [1, 1]]), CoordinateError),
        (torch.tensor([[0, -1], [1, 1]]), CoordinateError),
        (torch.tensor([[0, 1]]), ShapeError),
        (torch.tensor([[0.0, 1], [1, 1]]), DtypeError),
    ):
        with pytest.raises(error):
            sparse_from_coords(coords, values, (5, 7))
