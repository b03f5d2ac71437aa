"""Loop nests in C agree with the oracle and with dense convolutions; other statements are refused with the reason."""

import math
import random
import sys
from array import array
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import pumice as pm
from pumice.errors import OptionError
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import nest, nest_c
from pumice.runtime import native

sys.path.append(str(Path(__file__).parents[1] / "einsum"))
from test_fuzz import Call

needs_compiler = pytest.mark.skipif(isinstance(native.compiler(), str), reason=f"no C kernels: {native.compiler()}")
pytestmark = needs_compiler


@pytest.fixture
def kinds(monkeypatch):
    """Counts the kinds of nests that run."""
    found: Counter[str] = Counter()
    run = nest.Prepared.run_placed

    def counted(self, factors):
        moves = self.moves and ("lanes" if self.moves.out else "copied")
        found[moves or ("sums" if self.nest.sums else "in place" if self.nest.tiled else "plain")] += 1
        found["blocks"] += len(self.starts) - 1 > len(self.target_offsets)
        return run(self, factors)

    monkeypatch.setattr(nest.Prepared, "run_placed", counted)
    return found


@pytest.mark.parametrize("first", range(0, 1000, 200))
def test_random_statements(first):
    taken = 0
    for seed in range(first, first + 200):
        call = Call.of(seed)
        try:
            got = call.run("nest")
        except OptionError:
            continue
        torch.testing.assert_close(got, call.oracle(), rtol=1e-9, atol=1e-9, msg=call.complaint)
        taken += 1
    assert taken > 5


class Convolution:
    """A random convolution of 1 to 3 axes with a sparse filter, as a statement and in torch."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        torch.manual_seed(seed)
        axes = chance.choice((1, 2, 2, 2, 3))
        self.kernel = [chance.choice((1, 1, 2, 3, 5)) for _ in range(axes)]
        self.stride = [chance.choice((1, 1, 2, 3)) for _ in range(axes)]
        self.dilation = [chance.choice((1, 1, 2)) for _ in range(axes)]
        spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        sizes = [span + chance.randint(1, 38 if axes < 3 else 9) for span in spans]
        self.padding = [chance.randint(0, span) for span in spans]
        self.dtype = chance.choice((torch.float64, torch.float32))
        channels, outputs = chance.randint(1, 9), chance.randint(1, 12)
        self.x = torch.randn(chance.choice((1, 2)), channels, *sizes, dtype=self.dtype)
        weight = torch.randn(outputs, channels, *self.kernel, dtype=self.dtype)
        self.weight = weight * (torch.rand(weight.shape) < chance.choice((0.05, 0.3, 0.8)))
        taps = "rst"[:axes]
        forms = (f"(m c {' '.join(taps)}):C", f"m:U (c {' '.join(taps)}):C", f"m:C (c {' '.join(taps)}):G4")
        self.filter = pm.sparse(self.weight, chance.choice(forms))
        shape = self.dense(self.x).shape[2:]
        each = zip(self.stride, "pqu", self.dilation, taps, self.padding, strict=False)
        places = ",".join(f"{s}*{p}+{d}*{r}-{pad}" for s, p, d, r, pad in each)
        ranges = ", ".join(f"{p}:{n}" for p, n in zip("pqu", shape, strict=False))
        outer = ",".join("pqu"[:axes])
        self.text = f"O[n,m,{outer}] = I[n,c,{places}] * F[m,c,{','.join(taps)}] ; {ranges}"

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[len(self.kernel) - 1]
        return convolve(x, self.weight, None, self.stride, self.padding, self.dilation)


@pytest.mark.parametrize("cache", [None, 2048], ids=["L1", "small L1"])
@pytest.mark.parametrize("first", range(0, 160, 40))
def test_convolutions_with_sparse_filters(first, cache, kinds, monkeypatch):
    if cache is not None:
        monkeypatch.setattr(nest, "l1_bytes", lambda: cache)
    for seed in range(first, first + 40):
        one = Convolution(seed)
        if not one.weight.count_nonzero():
            continue
        x = one.x.clone().requires_grad_()
        got, wanted = pm.einsum(one.text, I=x, F=one.filter, lowering="nest"), one.dense(x)
        near = 1e-9 if one.dtype == torch.float64 else 1e-4
        message = f"seed {seed}: {one.text}\n{{}}".format
        torch.testing.assert_close(got, wanted, rtol=near, atol=near, msg=message)
        grad = torch.randn_like(wanted)
        ours, theirs = (torch.autograd.grad(y, x, grad)[0] for y in (got, wanted))
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near, msg=message)
    assert kinds["lanes"] and kinds["plain"]
    assert cache is None or kinds["blocks"]


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_nothing_outside_the_operands_is_read_or_written(first, monkeypatch):
    """Inputs, results and buffers lie between NaNs, and begin as NaNs; inputs have any strides."""
    made = []

    def between(like):
        size = like.numel()
        made.append(torch.full((size + 2 * GUARD,), torch.nan, dtype=like.dtype))
        return made[-1][GUARD : GUARD + size].view(like.shape)

    take = nest.SPARE.take
    monkeypatch.setattr(torch, "empty_like", between)
    monkeypatch.setattr(nest.SPARE, "take", lambda size: poisoned(take(size)))
    for seed in range(1000 + first, 1020 + first):
        one, chance = Convolution(seed), random.Random(seed)
        if not one.weight.count_nonzero():
            continue
        order = [0, 1, *chance.sample(range(2, one.x.ndim), one.x.ndim - 2)]
        x = guarded(tuple(one.x.shape[k] for k in order), one.dtype).permute(sorted(order, key=order.__getitem__))
        got, wanted = pm.einsum(one.text, I=x, F=one.filter, lowering="nest"), one.dense(x)
        near = 1e-9 if one.dtype == torch.float64 else 1e-4
        message = f"seed {seed}: {one.text}\n{{}}".format
        torch.testing.assert_close(got, wanted, rtol=near, atol=near, msg=message)
        for whole in made:
            assert whole[:GUARD].isnan().all() and whole[-GUARD:].isnan().all(), message("")
        made.clear()


@pytest.mark.parametrize(
    ("text", "shapes", "kind"),
    [
        ("O[n,m,p,q] = I[n,c,p,q] * F[m,c]", ((2, 24, 16, 16), (20, 24)), "in place"),
        ("O[n,m,p,q] = I[n,c,p,q] * F[m,c]", ((1, 96, 7, 7), (90, 96)), "copied"),
        ("O[n,m,p] = I[n,c,2*p] * F[m,c]", ((1, 96, 100), (40, 96)), "copied"),
        ("C[m,n] = F[m,k] * B[k,n]", ((24, 70), (20, 24)), "copied"),
        ("C[m,n] = F[m,k] * B[k,n]", ((24, 127), (20, 24)), "lanes"),
        ("C[m,n] = F[m,k] * B[k,n]", ((24, 5), (20, 24)), "plain"),
        ("C[m] = F[m,k] * B[k]", ((24,), (20, 24)), "plain"),
        ("y[m] = F[m,c] * x[c,k] * z[m,k]", ((24, 70), (20, 24)), "sums"),
    ],
)
def test_kinds_of_nests(text, shapes, kind, kinds):
    torch.manual_seed(0)
    given, weight = torch.randn(shapes[0]), torch.randn(shapes[1]) * (torch.rand(shapes[1]) < 0.5)
    names = {"I": given, "B": given, "x": given, "z": torch.randn(shapes[1][0], shapes[0][-1])}
    operands = {name: x for name, x in names.items() if f"{name}[" in text}
    got = pm.einsum(text, F=pm.sparse(weight, "CSR"), lowering="nest", **operands)
    wanted = pm.einsum(text, F=weight, lowering="reference", **operands)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert kinds[kind] == 1


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 16, 30, 30), torch.randn(24, 16, 3, 3) * (torch.rand(24, 16, 3, 3) < 0.3)
    filter, text = pm.sparse(weight, "(m c r s):C"), "O[n,m,p,q] = I[n,c,p+r-1,q+s-1] * F[m,c,r,s] ; p:30, q:30"
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(pm.einsum(text, I=x, F=filter, lowering="nest"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def poisoned(buffer):
    buffer.memory.view(torch.float32).fill_(torch.nan)
    return buffer


def test_outputs_of_the_last_channels_alone_start_from_zero(kinds, monkeypatch):
    """A segment without entries in the first block of channels is written there all the same."""
    monkeypatch.setattr(nest, "l1_bytes", lambda: 2048)
    empty, take = torch.empty_like, nest.SPARE.take
    monkeypatch.setattr(torch, "empty_like", lambda x: empty(x).fill_(torch.nan))
    monkeypatch.setattr(nest.SPARE, "take", lambda size: poisoned(take(size)))
    torch.manual_seed(0)
    weight, x = torch.randn(4, 64, 3, 3), torch.randn(1, 64, 18, 18)
    weight[0, :60] = 0
    got = pm.einsum(
        "O[n,m,p,q] = I[n,c,p+r,q+s] * F[m,c,r,s]", I=x, F=pm.sparse(weight, "(m c r s):C"), lowering="nest"
    )
    torch.testing.assert_close(got, functional.conv2d(x, weight), rtol=1e-4, atol=1e-4)
    assert kinds["blocks"] == kinds["lanes"] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(dtype):
    torch.manual_seed(0)
    a, b = (torch.randn(20, 30) * (torch.rand(20, 30) < 0.4)).to(dtype), torch.randn(30, 40).to(dtype)
    got = pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=pm.sparse(a, "CSR"), B=b, lowering="nest")
    assert got.dtype == dtype and torch.equal(got, (a.float() @ b.float()).to(dtype))


def test_values_that_change_are_read_again():
    a, b = pm.sparse(torch.eye(3), "CSR"), torch.ones(3, 4)
    values = a.parts[0].values
    assert values is not None
    for factor in (1, 2):
        got = pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b, lowering="nest")
        assert got.eq(factor).all()
        values.mul_(2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("y[i] = a[i] * b[i]", "it has no index arrays"),
        ("y[R[p]] = v[p] ; y:[4], p:1..3", "a range does not start at 0"),
        ("y[R[p]] max= v[p] ; y:[4]", "it is not a sum of one term"),
        ("y[R[p]+i] = v[p] * b[2*i] ; y:[9], i:2", "the target is written through windows"),
        ("y[R[p]] = exists(v[R[p]]) ; y:[4]", "it has conditions, or no factors"),
    ],
)
def test_refusals(text, reason):
    numbers = torch.ones(4)
    operands = {n: numbers for n in "abv" if f"{n}[" in text} | {"R": torch.tensor([0, 1, 2, 3])}
    with pytest.raises(OptionError, match=reason):
        pm.einsum(text, lowering="nest", **{n: x for n, x in operands.items() if f"{n}[" in text})


def test_windows_far_outside_an_operand_take_no_memory():
    """However far index arrays point: entries that meet the operand nowhere are left out."""
    far = torch.tensor([0, 1, 1 << 40, -5, 2], dtype=torch.int64)
    x, v = torch.randn(6), torch.randn(5)
    operands = {"x": x, "v": v, "K": far}
    bound = bind(
        parse("y[p] = x[p+K[e]-1] * v[e] ; p:6"), {name: t.shape for name, t in operands.items()}, strict=False
    )
    assert nest.refusal(bound.statement, bound, operands) is None
    got = nest.run(bound, operands, torch.float32)
    wanted = sum(v[e] * functional.pad(x, (1, 2))[int(k) : int(k) + 6] for e, k in ((0, 0), (1, 1), (4, 2)))
    torch.testing.assert_close(got, wanted)


def test_operands_beyond_32_bit_offsets_are_refused():
    x, v, k = torch.empty(2, 1), torch.empty(2), torch.tensor([0, 1])
    with pytest.raises(OptionError, match="too large with the zeros that its windows reach"):
        pm.einsum("y[e] = x[p+K[e],q] * v[e] ; p:600000000, q:1", x=x, v=v, K=k, lowering="nest")


def test_another_default_device_changes_nothing():
    a, b = pm.sparse(torch.eye(40), "CSR"), torch.rand(40, 40)
    weight, x = torch.randn(8, 8, 3, 3), torch.randn(1, 8, 20, 20)
    filter = pm.sparse(weight, "(m c r s):C")
    with torch.device("meta"):
        got = pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b, lowering="nest")
        image = pm.einsum("O[n,m,p,q] = I[n,c,p+r,q+s] * F[m,c,r,s]", I=x, F=filter, lowering="nest")
    assert torch.equal(got, b)
    torch.testing.assert_close(image, functional.conv2d(x, weight), rtol=1e-4, atol=1e-4)


def test_without_a_compiler_statements_are_refused_and_run_elsewhere(monkeypatch):
    monkeypatch.setattr(nest_c, "compiler", lambda: "no C compiler")
    nest_c.unavailable.cache_clear()
    try:
        a, b = pm.sparse(torch.eye(3), "CSR"), torch.rand(3, 5)
        with pytest.raises(OptionError, match="no C compiler"):
            pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b, lowering="nest")
        assert torch.equal(pm.einsum("C[m,n] = A[m,k] * B[k,n] ; m:3", A=a, B=b), b)
    finally:
        nest_c.unavailable.cache_clear()


def test_index_arrays_of_different_positions_are_refused():
    rows, values = torch.arange(50) % 7, torch.ones(50, 50)
    with pytest.raises(OptionError, match="index arrays of different positions meet"):
        pm.einsum("y[R[p],S[q]] = v[p,q] ; y:[7,7]", R=rows, S=rows, v=values, lowering="nest")


def test_explain_shows_the_nest_and_its_source():
    a, b = pm.sparse(torch.eye(40), "CSR"), torch.ones(40, 40)
    text = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]").explain(A=a, B=b)
    assert "for entry e of s" in text and "void run(region parallel" in text


def moved(name, lanes, sizes, x, shape):
    """x moved by a C function to a new tensor of this shape, between NaNs. sizes: see nest_c.moves_source."""
    kernel = nest_c.address(nest_c.library(nest_c.moves_source("float", lanes)), name)
    out, room = torch.full((math.prod(shape) + 2 * GUARD,), torch.nan), torch.full((math.prod(sizes[-2:]),), torch.nan)
    target, rows = out[GUARD:-GUARD].view(shape), [1, *x.stride()][-2:]
    each = x.stride(0), target[0].numel()
    numbers = [0, x.shape[0], 0, x.data_ptr(), target.data_ptr(), *sizes, room.data_ptr(), *each, *rows]
    integers = array("q", (kernel, 3, 0, *numbers))
    nest_c.sequence()(0, 1, integers.buffer_info()[0])
    assert out[:GUARD].isnan().all() and out[-GUARD:].isnan().all()
    return target


GUARD = 256


def guarded(shape, dtype=torch.float32):
    """Random numbers of a shape between NaNs."""
    whole = torch.full((math.prod(shape) + 2 * GUARD,), torch.nan, dtype=dtype)
    return whole[GUARD:-GUARD].copy_(torch.randn(math.prod(shape))).view(shape)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_blocks_move_to_lanes_and_back(lanes):
    """For every vector length: compilers emulate vectors that the processor lacks."""
    x = guarded((3, 11, 13))
    grid, block = (2, lanes // 2), (6, -(-13 // (lanes // 2)))
    sizes = [11, 13, 0, 0, *block, grid[1], lanes, *block, grid[0] * block[0], grid[1] * block[1] + lanes]
    packed = moved("pack", lanes, sizes, x, (3, *block, lanes))
    whole = functional.pad(x, (0, grid[1] * block[1] - 13, 0, grid[0] * block[0] - 11))
    wanted = whole.view(3, grid[0], block[0], grid[1], block[1]).permute(0, 2, 4, 1, 3).reshape(packed.shape)
    assert torch.equal(packed, wanted)
    # Squares of vectors are read, past the last image too.
    room = functional.pad(packed.flatten(), (0, lanes * lanes))[: packed.numel()].view(packed.shape)
    assert torch.equal(moved("unpack", lanes, sizes, room, (3, 11, 13)), x)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    ("size", "tiles"), [((7, 7), 1), ((14, 14), 2), ((4, 28), 1), ((1, 32), 2), ((5, 18), 3)], ids=str
)
def test_images_are_copied_to_tiles_of_neighbouring_lanes(lanes, step, size, tiles):
    x = guarded((3, (size[0] - 1) * step + 1, (size[1] - 1) * step + 1))[:, ::step, ::step]
    assert x.shape[1:] == size
    points = math.prod(size) // tiles
    vectors = -(-points // lanes)
    sizes = [*size, 0, 0, points, 0, tiles, lanes, 1, vectors, 1, math.prod(size) + lanes]
    got = moved("copy", lanes, sizes, x, (3, tiles, vectors, lanes))
    begins = torch.arange(vectors).mul(lanes).clamp(max=points - lanes)
    assert torch.equal(got, x.reshape(3, tiles, points)[:, :, begins[:, None] + torch.arange(lanes)])
