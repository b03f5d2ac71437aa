"""Loop nests in C agree with the oracle and with dense convolutions; other statements are refused with the reason."""

import json
import math
import random
import sys
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from wide import beyond

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.env import settings
from pumice.errors import OptionError
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import graph, nest, nest_c, plan
from pumice.runtime import native
from pumice.schedule.loop_rule import PRESETS
from pumice.schedule.loops import LoopSchedule
from pumice.schedule.tuned_loops import TunedLoops, loop_records

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


@pytest.fixture
def vectors(monkeypatch):
    """Sets the lanes of vectors and the registers for them: compilers emulate vectors that the processor lacks."""

    def to(lanes, registers):
        monkeypatch.setitem(vars(native.compiler()), "vector", (lanes, registers))
        nest_c._moves.cache_clear()
        nest_c.mover.cache_clear()

    yield to
    nest_c._moves.cache_clear()
    nest_c.mover.cache_clear()


@pytest.mark.parametrize("first", beyond(1, range(0, 1000, 200)))
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
        self.weight[..., : chance.choice((0, 0, self.kernel[-1] // 2))] = 0
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
@pytest.mark.parametrize("first", beyond(1, range(0, 160, 40)))
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


@pytest.mark.parametrize("first", beyond(1, range(0, 60, 20)))
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
def test_kinds_of_nests(text, shapes, kind, kinds, vectors):
    """With vectors of 8 lanes."""
    vectors(8, 16)
    torch.manual_seed(0)
    given, weight = torch.randn(shapes[0]), torch.randn(shapes[1]) * (torch.rand(shapes[1]) < 0.5)
    names = {"I": given, "B": given, "x": given, "z": torch.randn(shapes[1][0], shapes[0][-1])}
    operands = {name: x for name, x in names.items() if f"{name}[" in text}
    got = pm.einsum(text, F=pm.sparse(weight, "CSR"), lowering="nest", **operands)
    wanted = pm.einsum(text, F=weight, lowering="reference", **operands)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert kinds[kind] == 1


@pytest.mark.parametrize("vector", beyond(1, [(4, 32), (8, 16), (16, 32)]))
def test_vectors_of_other_processors(vector, vectors, kinds):
    vectors(*vector)
    for seed in range(200, 220):
        one = Convolution(seed)
        if one.weight.count_nonzero():
            got, near = pm.einsum(one.text, I=one.x, F=one.filter, lowering="nest"), 1e-4
            torch.testing.assert_close(got, one.dense(one.x), rtol=near, atol=near, msg=f"seed {seed}: {{}}".format)
    assert kinds["lanes"] and kinds["plain"]


@pytest.mark.parametrize("text", ["p+r+3] * F[m,c,r] ; p:37", "2*p+r+1] * F[m,c,r] ; p:20"])
def test_windows_with_an_offset_into_their_operand(text):
    torch.manual_seed(0)
    operands = {"I": torch.randn(1, 9, 42), "F": pm.sparse(torch.randn(8, 9, 3), "m:U (c r):C")}
    got, wanted = (pm.einsum(f"O[n,m,p] = I[n,c,{text}", lowering=name, **operands) for name in ("nest", "reference"))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["O[q,q] = I[c,q] * F[c]", "O[q,n,q] = I[n,c,q] * F[c]", "O[q,q] = I[c,q,q] * F[c]"])
def test_diagonals_of_the_target_are_no_images(text):
    """Neighbours along q are not neighbours in memory."""
    torch.manual_seed(0)
    shape = [{"n": 2, "c": 24, "q": 40}[name] for name in text.partition("I[")[2].partition("]")[0].split(",")]
    x, f = torch.randn(shape), torch.randn(24) * (torch.rand(24) < 0.5)
    got, wanted = pm.einsum(text, I=x, F=pm.sparse(f, "c:C"), lowering="nest"), pm.einsum(text, I=x, F=f)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_results_do_not_depend_on_the_number_of_threads():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 16, 30, 30), torch.randn(24, 16, 3, 3) * (torch.rand(24, 16, 3, 3) < 0.3)
    filter, text = pm.sparse(weight, "(m c r s):C"), "O[n,m,p,q] = I[n,c,p+r-1,q+s-1] * F[m,c,r,s] ; p:30, q:30"
    found = []
    for count in (1, 2, 3):
        with on_threads(count):
            found.append(pm.einsum(text, I=x, F=filter, lowering="nest"))
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


@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("taps", [[(2, 2)], [(1, 2), (2, 2)], [(0, 0)], [(0, 2), (2, 1)]])
def test_filters_without_some_taps(taps, padding):
    """What the packed image holds ends with the last tap, also if none is at its first pixel."""
    conv = torch.nn.Conv2d(8, 16, 3, padding=padding, bias=False).requires_grad_(False)
    mask = torch.zeros(16, 8, 3, 3)
    for r, s in taps:
        mask[:, :, r, s] = 1
    conv.weight.mul_(mask)
    x = torch.randn(1, 8, 28, 28)
    torch.testing.assert_close(pm.nn.PrunedConv2d.from_dense(conv)(x), conv(x), rtol=1e-5, atol=1e-5)
    row, kernel = torch.randn(107), torch.tensor([0.0, 0, 0, 2, 0, 1])
    wanted = functional.conv1d(row[None, None], kernel[None, None])[0, 0]
    got = pm.einsum("y[i] = a[i+k] * b[k]", a=row, b=pm.sparse(kernel, "k:C"))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


STRUCTURED = ["m:C c:C r:U s:U", "m:C c:U r:U s:U", "m:U (c r):C s:U", "c:C m:U r:U s:U", "r:C s:C m:U c:U"]


@pytest.mark.parametrize("form", STRUCTURED)
def test_dense_levels_of_windows_are_entries(form):
    chance = torch.Generator().manual_seed(0)
    dense = torch.randn(12, 9, 3, 3, generator=chance)
    dense = dense * (torch.rand(12, 9, 1, 1, generator=chance) < 0.3) * (torch.rand(3, 3, generator=chance) < 0.7)
    x = torch.randn(2, 9, 20, 24, generator=chance)
    text = "O[n,m,p,q] = I[n,c,p+r-1,q+s-1] * F[m,c,r,s] ; p:20, q:24"
    for lowering in ("nest", "nest/skimcaffe", "nest/xnnpack"):
        f = pm.compile_einsum(text, lowering=lowering)
        got = f(I=x, F=pm.sparse(dense, f"[m,c,r,s] {form}"))
        torch.testing.assert_close(got, functional.conv2d(x, dense, padding=1), rtol=1e-4, atol=1e-5)
    if not form.startswith("r"):
        assert "pack I" in f.explain(I=x, F=pm.sparse(dense, f"[m,c,r,s] {form}"))


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
        ("y[R[p]] max= v[p] + b[p] ; y:[4]", "it has several terms"),
        ("y[R[p]] max= 2 * v[p] ; y:[4]", "it is the maximum or minimum of a multiple"),
        ("y[R[p],i] mean= b[i-1] * v[p] ; y:[4,3], i:3", "a mean over windows"),
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
    got = nest.NestStep(bound, torch.float32)(operands)
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
    monkeypatch.setattr(native, "compiler", lambda: "no C compiler")
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


# Schedules


PRUNED = {
    "1x1": (12, 20, 28, 1, 1),
    "1x1, odd": (12, 20, 13, 1, 1),
    "1x1, strided": (12, 20, 28, 1, 2),
    "3x3": (12, 20, 28, 3, 1),
    "3x3, odd": (12, 20, 11, 3, 1),
    "3x3, strided": (12, 20, 31, 3, 2),
}


class Pruned:
    """A pruned convolution as a statement, and its dense result."""

    def __init__(self, inputs: int, outputs: int, size: int, kernel: int, stride: int) -> None:
        torch.manual_seed(0)
        pad, shape = kernel // 2, (outputs, inputs, kernel, kernel)
        weight, x = torch.randn(shape) * (torch.rand(shape) < 0.3), torch.randn(2, inputs, size, size)
        self.expected = functional.conv2d(x, weight, None, stride, pad)
        n = self.expected.shape[-1]
        places = f"{stride}*p+r-{pad},{stride}*q+s-{pad}" if kernel > 1 else f"{stride}*p,{stride}*q"
        taps = ",r,s" if kernel > 1 else ""
        self.text = f"O[n,m,p,q] = I[n,c,{places}] * F[m,c{taps}] ; p:{n}, q:{n}"
        form = "m:U (c r s):C" if kernel > 1 else "m:U c:C"
        self.operands = {"I": x, "F": pm.sparse(weight if kernel > 1 else weight[:, :, 0, 0], form)}

    def agrees(self, schedule: str) -> bool:
        """True if the statement has this schedule; then its result is checked."""
        try:
            got = pm.einsum(self.text, lowering=f"nest/{schedule}", **self.operands)
        except OptionError:
            return False
        torch.testing.assert_close(got, self.expected, rtol=1e-4, atol=1e-4, msg=f"{schedule}\n{{}}".format)
        return True

    def schedule(self, given: str = "") -> str:
        """The whole schedule that explain() shows."""
        lines = pm.compile_einsum(self.text, lowering=f"nest/{given}").explain(**self.operands).splitlines()
        return next(line.removeprefix("schedule ") for line in lines if line.startswith("schedule "))


@pytest.fixture
def records(monkeypatch, tmp_path):
    """An empty file of tuned schedules."""
    monkeypatch.setenv("PUMICE_CACHE", str(tmp_path))
    yield from fresh_settings()


def fresh_settings():
    settings.cache_clear()
    loop_records.cache_clear()
    yield loop_records()
    settings.cache_clear()
    loop_records.cache_clear()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layer", PRUNED)
def test_presets_compute_convolutions(layer, preset):
    one = Pruned(*PRUNED[layer])
    assert one.agrees(preset)
    assert one.schedule(one.schedule(preset)) == one.schedule(preset)


def test_presets_compute_sparse_activations_and_pairs():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 10, 9, 8), torch.randn(8, 24)
    x *= torch.rand(x.shape) < 0.3
    pairs = {"D": torch.tensor([0, 0, 2, 3, 3]), "S": torch.tensor([1, 0, 3, 2, 2]), "K": torch.tensor([0, 1, 1, 0, 2])}
    features, kernel = torch.randn(4, 5), torch.randn(3, 5, 24)
    wanted = pm.einsum(
        "y[D[e],m] = x[S[e],c] * W[K[e],c,m] ; y:[4,_]", lowering="reference", x=features, W=kernel, **pairs
    )
    for preset in PRESETS:
        got = pm.einsum(
            "O[n,p,q,m] = I[n,p,q,c] * F[c,m]", lowering=f"nest/{preset}", I=pm.sparse(x, "n:U h:U w:U c:C"), F=weight
        )
        torch.testing.assert_close(got, x @ weight, rtol=1e-4, atol=1e-4)
        text = "y[D[e],m] = x[S[e],c] * W[K[e],c,m] ; y:[4,_], D:sorted"
        got = pm.einsum(text, lowering=f"nest/{preset}", x=features, W=kernel, **pairs)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def random_schedule(chance: random.Random) -> str:
    """Some directives of a convolution's schedule, many of them illegal."""
    number = chance.choice((1, 2, 3, 4, 5, 7, 8, 14, 16, 28, 56))
    y, x = chance.choice(((1, 8), (2, 4), (4, 2), (8, 1), (3, 2)))
    parts = [
        ("order n p m e", "order m p", "order m n e", "order m p.q", "order q p", "order e m", "order m p q e"),
        (f"vector p {y} q {x}; pack I", "vector q", "vector q; pack I", "vector p.q", "vector p.q 8; pack I", "pack I"),
        (f"split(p, {chance.randint(1, 4)})", f"split(q, {number})", f"split(p.q, {number})", "vector p.q; pack I"),
        (f"split(c, {number})", f"split(r, {chance.randint(1, 3)})", f"split(c, {number}); split(s, 2)"),
        ("parallel m", f"parallel m chunk {number}", "parallel n", "parallel p", "parallel c"),
        (f"hold {chance.randint(1, 14)}", "unroll e 2", "unroll e 3", "fuse(p, q)"),
    ]
    return "; ".join(chance.choice(one) for one in chance.sample(parts, chance.randint(1, 4)))


@pytest.mark.parametrize("layer", PRUNED)
def test_random_schedules_compute_the_same(layer):
    one, chance, legal = Pruned(*PRUNED[layer]), random.Random(layer), set()
    for _ in range(60):
        text = random_schedule(chance)
        if len(legal) < 12 and one.agrees(text):
            legal.add(one.schedule(text))
    assert len(legal) >= 6


@pytest.mark.parametrize("count", [1, 2])
def test_orders_and_chunks_compute_the_same(count):
    one = Pruned(*PRUNED["3x3"])
    with on_threads(count):
        for order in ("n p m e", "m n p e", "n m p e", "p n m e", "m p n e"):
            for parallel in ("", "; parallel m chunk 3", "; parallel m chunk 500", "; parallel n"):
                assert one.agrees(f"order {order}; vector q{parallel}")


def test_orders_of_sums_and_unrolled_sums():
    torch.manual_seed(0)
    a, b, c = torch.eye(6).mul(torch.rand(6)), torch.randn(6, 3, 4), torch.randn(3, 4, 40)
    text, operands = "C[m,n] = A[m,k] * B[k,i,j] * D[i,j,n]", {"A": pm.sparse(a, "CSR"), "B": b, "D": c}
    wanted = torch.einsum("mk,kij,ijn->mn", a, b, c)
    for schedule in ("order m e i j", "order m e j i", "unroll i 2; unroll j 4", "vector n; hold 2; unroll e 4"):
        got = pm.einsum(text, lowering=f"nest/{schedule}", **operands)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    told = pm.compile_einsum(text, lowering="nest/order j i; unroll i 2").explain(**operands)
    assert " e j i; " in told and told.count('_Pragma("GCC unroll 2")') >= 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("order e m", "e is before its parent level m"),
        ("vector c", "c is a compressed level"),
        ("parallel c", "c is summed: tasks would write the same results"),
        ("fuse(p, q)", "I is read through a window along p"),
        ("pack I; vector p 2 q 2; split(p, 6); split(q, 7)", "42 accumulators, but registers hold"),
        ("order m x", "x: the nest has no such index; it has n, p, q, m, c, r, s, e"),
        ("locate F", "no factor is located"),
        ("hold 0", "expected numbers from 1"),
        ("tile 4", "unknown directive 'tile 4'"),
    ],
)
def test_illegal_schedules(text, reason):
    one = Pruned(*PRUNED["3x3"])
    with pytest.raises(OptionError, match=reason):
        pm.einsum(one.text, lowering=f"nest/{text}", **one.operands)


def test_gradients_take_the_schedule_where_they_can():
    """The statement of a gradient has other indices: there the rule may take the schedule's place."""
    one = Pruned(*PRUNED["3x3"])
    x = one.operands["I"].clone().requires_grad_()
    found = [
        torch.autograd.grad(pm.einsum(one.text, I=x, F=one.operands["F"], lowering=name).square().sum(), x)[0]
        for name in ("nest/order m p e; vector q; split(c, 4)", "nest/skimcaffe", "reference")
    ]
    torch.testing.assert_close(found[0], found[2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[1], found[2], rtol=1e-3, atol=1e-3)


def test_images_of_one_row():
    """Their filter still has rows: the window along y is no part of a lane."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 64, 3, 34), torch.randn(64, 64, 3, 3) * (torch.rand(64, 64, 3, 3) < 0.5)
    filter, text = pm.sparse(weight, "(m c r s):C"), "O[n,m,p,q] = I[n,c,p+r,q+s] * F[m,c,r,s]"
    got = pm.einsum(text, I=x, F=filter, lowering="nest")
    torch.testing.assert_close(got, functional.conv2d(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(2, 127), (2, 131), (26, 31)])
def test_flat_images_without_equal_tiles(size):
    torch.manual_seed(0)
    x, weight = torch.randn(1, 32, *size), torch.randn(40, 32) * (torch.rand(40, 32) < 0.5)
    for lowering in ("nest", "nest/vector p.q 4; pack I"):
        got = pm.einsum("O[n,m,p,q] = I[n,c,p,q] * F[m,c]", I=x, F=pm.sparse(weight, "CSR"), lowering=lowering)
        torch.testing.assert_close(got, torch.einsum("mc,ncpq->nmpq", weight, x), rtol=1e-4, atol=1e-4)


def test_tuned_schedules_are_kept_and_used(records):
    one, steps = Pruned(*PRUNED["3x3"]), []
    told = pm.compile_einsum(one.text, lowering="nest").tune(
        budget=20, candidates=6, progress=steps.append, **one.operands
    )
    assert told.count(" ms  ") == 7 and steps[-1].done <= steps[-1].total
    ((key, tuned),) = records.all().items()
    assert key.dtype == "float32" and 0 < tuned.seconds <= tuned.rule
    # As if another schedule had been the fastest.
    records.keep(key, TunedLoops.now(LoopSchedule.parse("vector q; hold 2"), 1e-3, 2e-3))
    assert one.schedule().startswith("order n p m q e; vector q;") and one.agrees("")
    assert one.schedule("vector q; hold 1").endswith("hold 1")
    # In the same size class; the rule's where it is illegal.
    assert Pruned(12, 20, 31, 3, 1).schedule().endswith("hold 2")
    illegal = LoopSchedule.parse("pack I; vector p 2 q 2; split(p, 4); split(q, 28)")
    records.keep(key, TunedLoops.now(illegal, 1e-3, 2e-3))
    assert one.schedule() == one.schedule("parallel m") and one.agrees("")


@pytest.mark.parametrize("broken", ["order m; __import__", 7, "hold 99999999", None])
def test_corrupt_records_are_ignored(records, broken):
    one = Pruned(*PRUNED["1x1"])
    pm.compile_einsum(one.text, lowering="nest").tune(budget=1, candidates=1, **one.operands)
    found = json.loads(records.path.read_text())
    found["loops"][0]["schedule"] = broken
    records.path.write_text(json.dumps(found))
    loop_records.cache_clear()
    assert not loop_records().all()
    assert one.schedule() == one.schedule("parallel m") and one.agrees("")


def test_a_wrong_result_ends_the_tuner(records, monkeypatch):
    call = nest.NestStep.__call__
    wrong = lambda self, *args: call(self, *args) * (1 if self.wanted == nest.Wanted() else 2)  # noqa: E731
    monkeypatch.setattr(nest.NestStep, "__call__", wrong)
    one = Pruned(*PRUNED["1x1"])
    with pytest.raises(AssertionError, match="not close"):
        pm.compile_einsum(one.text, lowering="nest").tune(candidates=2, **one.operands)
    assert not records.all()


def test_statements_without_entries_have_nothing_to_tune(records):
    rows, values = torch.full((6,), -1), torch.ones(6, 3)
    told = pm.compile_einsum("y[R[e],n] = v[e,n] ; y:[4,_]", lowering="nest").tune(R=rows, v=values)
    assert " ms  " not in told and not records.all()


REDUCTIONS = (
    "C[D[e],c] {0}= X[S[e],c] ; C:[20,_]",
    "C[D[e],c] {0}= X[S[e],c] * V[e] ; C:[20,_]",
    "C[m,c] {0}= X[K[m,q],c]",
    "C[m] {0}= {0}(q,c, X[K[m,q],c])",
    "C[D[e]] {0}= {0}(c, X[S[e],c]) ; C:[20]",
    "C[b,D[e],c] {0}= Y[b,S[e],c] ; C:[_,20,_]",
    "C[c,D[e]] {0}= {0}(b, Y[b,S[e],c]) ; C:[_,20]",
    "C[b,D[e],c] {0}= Y[b,S[e],2*c] ; C:[_,20,_], c:2",
    "C[D[e],i,j] {0}= I[S[e],i,j] ; C:[20,_,_]",
    "C[D[e],c] {0}= sum(b, Y[b,S[e],c] * W[b,R[e]]) ; C:[20,_]",
)


@pytest.mark.parametrize("reduction", ["max", "min", "mean"])
@pytest.mark.parametrize("text", REDUCTIONS)
def test_maxima_minima_and_means(text, reduction, kinds):
    """NaN and infinities as in the reference; entries of nothing; targets without values, which are 0."""
    for seed, dtype in enumerate((torch.float64, torch.float32, torch.bfloat16)):
        torch.manual_seed(seed)
        entries, rows, channels = (1, 40, 500)[seed], (30, 7, 25)[seed], (4, 17, 70)[seed]
        x, y = torch.randn(rows, channels), torch.randn(3, rows, channels)
        x[torch.rand(x.shape) < 0.05], y[torch.rand(y.shape) < 0.02] = float("nan"), -float("inf")
        floats = {"X": x, "Y": y, "V": torch.randn(entries), "W": torch.randn(3, 9), "I": torch.randn(rows, 9, 11)}
        s, d, r = (torch.randint(-1, size, (entries,)) for size in (rows, 19, 9))
        given = {n: t.to(dtype) for n, t in floats.items()} | {"S": s, "D": d, "R": r}
        given = {n: t for n, t in (given | {"K": torch.randint(-1, rows, (6, 5))}).items() if f"{n}[" in text}
        text = text.format(reduction)
        # Which entries of a nested sum exist is found by "graph".
        got, want = (
            pm.einsum(text, **given, lowering=name) for name in ("" if "= sum(" in text else "nest", "reference")
        )
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert kinds


def test_what_exists_of_nested_sums_is_found_once(kinds, monkeypatch):
    runs, run = [], graph.run
    lowerings = dict(plan.LOWERINGS)
    counted = plan._function_of(lambda *given: runs.append(1) or run(*given))
    lowerings["graph"] = replace(lowerings["graph"], step=counted)
    monkeypatch.setattr(plan, "LOWERINGS", lowerings)
    x, s, d = torch.randn(3, 30, 32), torch.randint(-1, 30, (9000,)), torch.randint(-1, 19, (9000,))
    text = "C[D[e],c] max= sum(b, X[b,S[e],c]) ; C:[21,_]"
    for n in range(3):
        want = pm.einsum(text, X=x, S=s, D=d, lowering="reference")
        torch.testing.assert_close(pm.einsum(text, X=x, S=s, D=d), want)
        x = x + 1
        if n == 1:
            s[:100] = -1
    assert len(runs) == 2 and kinds


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_maxima_that_include_the_old_values(reduction):
    torch.manual_seed(0)
    given = {"X": torch.randn(9, 5), "S": torch.randint(-1, 9, (30,)), "D": torch.randint(-1, 12, (30,))}
    given["X"][3, 2] = float("nan")
    text, old = f"C[D[e],c] {reduction}= X[S[e],c]", torch.randn(14, 5)
    got, want = (pm.einsum(text, **given, C=old, lowering=name) for name in ("nest", "reference"))
    torch.testing.assert_close(got, want, equal_nan=True)
    given["S"] = torch.full((30,), -1)
    assert torch.equal(pm.einsum(text, **given, C=old, lowering="nest"), old)


def test_names_of_axes_that_end_in_numbers():
    a, v = torch.randn(5, 40) * (torch.rand(5, 40) < 0.4), torch.randn(40, 9)
    got = pm.einsum("y[i,n] = A[i,k] * v[k,n]", A=pm.sparse(a, "row_1:C tap_2:C"), v=v, lowering="nest")
    torch.testing.assert_close(got, a @ v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_images_with_channels_last_in_memory(kind):
    """torch.nn.functional.pad returns them in this layout, too."""
    image = torch.randn(2, 12, 1, 8, dtype=kind).to(memory_format=torch.channels_last)
    filter = pm.sparse(torch.randn(1, 3, 8, 8, dtype=kind), "(r s c m):C")
    text = "O[n,p,q,m] = I[n,p+r-1,q+s-1,c] * F[r,s,c,m] ; p:12, q:1"
    wanted = pm.einsum(text, I=image, F=filter.to_dense(), lowering="reference")
    torch.testing.assert_close(pm.einsum(text, I=image, F=filter, lowering="nest"), wanted)


@pytest.mark.parametrize("text", ["O[P[e],i] = x[P[e],i] ; O:[6,_]", "O[D[P[e]],i] = x[S[P[e]],i] ; O:[6,_]"])
def test_one_index_array_reads_and_writes(text):
    arrays = {"P": torch.tensor([3, 0, 5, 3]), "S": torch.tensor([1, 1, 2, 3, 0, 4]), "D": torch.arange(6)}
    operands = {"x": torch.randn(6, 33), **{name: array for name, array in arrays.items() if f"{name}[" in text}}
    wanted = pm.einsum(text, lowering="reference", **operands)
    torch.testing.assert_close(pm.einsum(text, lowering="nest", **operands), wanted)
