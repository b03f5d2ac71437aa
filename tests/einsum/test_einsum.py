"""pm.einsum as an operator: compiled, under autocast, on any layout and dtype, and what the dispatcher is promised."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from einsum_oracle import evaluate
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

import pumice as pm
from pumice.ops.sparse import Sparse
from pumice.testing import assert_close

PRODUCT = "C[i,j] = A[i,k] * B[k,j]"
GATHER = "C[p,n] = B[X[p],n]"
SCATTER = "C[X[p],n] += A[p] * B[p,n]"


@pytest.fixture(autouse=True)
def _no_compiled_code_is_left():
    torch._dynamo.reset()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def holes(*shape: int, density: float = 0.4, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return normal(*shape, seed=seed) * (torch.rand(shape, generator=chance) < density)


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def close(got: object, wanted: object) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, normal(*out.shape, seed=8).to(out.dtype)))


# Compiled
def compiled(function, backend: object = "aot_eager", dynamic: bool | None = None):
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


def agree_compiled(function, *inputs: Tensor) -> None:
    """The compiled function gives the same value and gradients."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    floats = [x for x in leaves if x.is_floating_point()]
    wanted = function(*leaves)
    got = compiled(function)(*leaves)
    assert got.dtype == wanted.dtype
    close(got, wanted)
    if wanted.requires_grad:
        close(gradients(got, *floats), gradients(wanted, *floats))


CSR = pm.sparse(holes(6, 5), "CSR")
COMPILED = {
    "dense": (lambda a, b: pm.einsum(PRODUCT, A=a, B=b).relu(), (normal(3, 4), normal(4, 5))),
    "gather": (lambda b, x: pm.einsum(GATHER, B=b, X=x), (normal(4, 2), ints(0, 3, -1, 3))),
    "scatter": (
        lambda c, a, b, x: pm.einsum(SCATTER, C=c, A=a, B=b, X=x),
        (normal(3, 2), normal(4), normal(4, 2), ints(0, 2, -1, 2)),
    ),
    "window": (lambda x, w: pm.einsum("C[p] = X[2*p+r-1] * W[r] ; p:4", X=x, W=w), (normal(8), normal(3))),
    "max": (lambda a, c: pm.einsum("C[i] max= A[i,k]", A=a, C=c), (normal(3, 4), normal(3))),
    "mean": (lambda a: pm.einsum("C[i] mean= A[i,k]", A=a), (normal(3, 4),)),
    "float": (lambda a: pm.einsum("C[i,k] = A[i,k] * s", A=a, s=0.1), (normal(3, 4),)),
    "int": (lambda a: pm.einsum("C[i] = A[i,N*k] * N", A=a, N=2), (normal(3, 4),)),
    "halves and a float": (
        lambda a: pm.einsum("C[i,k] = A[i,k] * s", A=a, s=0.1),
        (normal(3, 4, dtype=torch.bfloat16),),
    ),
    "integers": (lambda a: pm.einsum("C[i] = A[i,k]", A=a), (torch.ones(3, 4, dtype=torch.int32),)),
    "bools": (lambda a: pm.einsum("C[i] = A[i,k]", A=a), (torch.ones(3, 4, dtype=torch.bool),)),
    "bools and floats": (lambda a, m: pm.einsum("C[i] = A[i,k] * M[i,k]", A=a, M=m), (normal(3, 4), holes(3, 4) != 0)),
    "sparse": (lambda b: pm.einsum(PRODUCT, A=CSR, B=b), (normal(5, 2),)),
    "values": (
        lambda v, b: pm.einsum(PRODUCT, A=CSR.with_values([v]), B=b),
        (CSR.parts[0].values, normal(5, 2)),
    ),
    "called": (lambda a, b: pm.compile_einsum(PRODUCT)(A=a, B=b), (normal(3, 4), normal(4, 5))),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    if name == "called" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("this torch cannot trace the making of a frozen dataclass; make the callable outside")
    function, inputs = COMPILED[name]
    agree_compiled(function, *inputs)


@pytest.mark.parametrize("form", ["COO", "GroupCOO", "ELL", "m:C k:G1,2", "m:U k:C m:B2 k:B2"])
def test_compiled_in_every_format(form):
    matrix = holes(6, 5)
    a = pm.sparse(matrix, form)

    def function(b: Tensor, *values: Tensor) -> Tensor:
        return pm.einsum(PRODUCT, A=a.with_values(list(values)), B=b)

    agree_compiled(function, normal(5, 2), *(part.values for part in a.parts))


def test_compiled_with_a_sparse_argument():
    def function(a: Sparse, b: Tensor) -> Tensor:
        return 2 * pm.einsum(PRODUCT, A=a, B=b)

    counter = CompileCounter()
    run = compiled(function, counter)
    # The first change makes sizes symbols; after it nothing is compiled again.
    for seed, density in enumerate((0.3, 0.5, 0.7, 0.9)):
        matrix = holes(16, 12, density=density, seed=seed)
        b = normal(12, 3)
        close(run(pm.sparse(matrix, "GroupCOO", group="count"), b), 2 * matrix @ b)
        close(run(pm.sparse(matrix, "CSR"), b), 2 * matrix @ b)
    assert counter.frame_count <= 6


def test_compiled_with_other_numbers_and_shapes():
    run = compiled(lambda a, n, s: pm.einsum("C[i] = A[n*i] * n * s", A=a, n=n, s=s))
    for n in (2, 3, 4, 2):
        close(run(normal(12), n, n / 7), normal(12)[::n] * n * (n / 7))
    run = compiled(lambda a, b: pm.einsum(PRODUCT, A=a, B=b))
    for n in (6, 9, 13, 14):
        matrix, b = holes(n, 12), normal(12, 3)
        close(run(pm.sparse(matrix, "CSR"), b), matrix @ b)


def test_other_numbers_of_stored_entries_compile_nothing():
    held = [pm.sparse(holes(16, 12, density=density), "CSR") for density in (0.3, 0.5, 0.7, 0.9)]
    counter = CompileCounter()

    def function(m: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return pm.einsum("C[M[p],n] = V[p] * B[K[p],n] ; C:[16,_]", M=m, K=k, V=v, B=b)

    run = compiled(function, counter)
    for place, a in enumerate(held):
        (part,) = a.parts
        arrays = [part.coords["m"], part.coords["k"], part.values]
        for array in arrays:
            torch._dynamo.mark_dynamic(array, 0)
        b = normal(12, 3 + place)
        torch._dynamo.mark_dynamic(b, 1)
        close(run(*arrays, b), a.to_dense() @ b)
    assert counter.frame_count == 1


def test_dynamic_sizes_with_gradients():
    counter = CompileCounter()
    run = compiled(lambda a, b: pm.einsum(PRODUCT, A=a, B=b), counter, dynamic=True)
    for n in (3, 7, 12):
        a, b = normal(n, 9).requires_grad_(), normal(9, n + 2).requires_grad_()
        out = run(a, b)
        close(gradients(out, a, b), gradients(a @ b, a, b))
    assert counter.frame_count == 1


def test_compiled_by_inductor():
    a, b = normal(3, 4).requires_grad_(), normal(4, 5).requires_grad_()
    out = compiled(lambda a, b: pm.einsum(PRODUCT, A=a, B=b).sin(), "inductor")(a, b)
    close(out, (a @ b).sin())
    close(gradients(out, a, b), gradients((a @ b).sin(), a, b))


# The dispatcher
@pytest.mark.parametrize(
    ("text", "names", "operands", "shape"),
    [
        (PRODUCT, "A|B", [normal(3, 4), normal(4, 5)], None),
        (PRODUCT, "A|B", [normal(3, 4), normal(4, 5)], [3, 5]),
        (SCATTER, "C|A|B|X", [normal(3, 2), normal(4), normal(4, 2), ints(0, 2, -1, 2)], None),
        ("C[i] max= A[i,k]", "A|C", [normal(3, 4), normal(3)], None),
        ("C[i] mean= A[i,k] * B[k]", "A|B", [normal(3, 4), normal(4)], None),
        ("C[i] = A[i,i]", "A", [normal(3, 3)], None),
        ("C[i] = A[i,k] * s", "A|s", [normal(3, 4), normal()], None),
        (
            PRODUCT,
            "A@m:U k:C@0@m|A@m:U k:C@0@k|A@m:U k:C@0@values|B;A=x6x5",
            [CSR.parts[0].coords["m"], CSR.parts[0].coords["k"], CSR.parts[0].values, normal(5, 2)],
            None,
        ),
    ],
)
def test_opcheck(text, names, operands, shape):
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in operands]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opcheck(torch.ops.pumice.einsum, (leaves, names, text, shape, ""))


def test_meta():
    out = pm.einsum(PRODUCT, A=normal(3, 4).to("meta"), B=normal(4, 5).to("meta"))
    assert out.is_meta and out.shape == (3, 5) and out.dtype == torch.float64
    x = torch.zeros(7, dtype=torch.int32, device="meta")
    out = pm.einsum(GATHER, B=normal(4, 2).half().to("meta"), X=x)
    assert out.is_meta and out.shape == (7, 2) and out.dtype == torch.float16
    out = pm.einsum(PRODUCT, A=CSR.to("meta"), B=normal(5, 2).to("meta"))
    assert out.is_meta and out.shape == (6, 2)
    assert pm.einsum("C[i] = A[i] * s", A=normal(3).to("meta"), s=2.0).is_meta


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out = pm.einsum(SCATTER, C=torch.empty(3, 2), A=torch.empty(4), B=torch.empty(4, 2), X=torch.empty(4).long())
        assert out.shape == (3, 2)


# Autocast
@pytest.mark.parametrize("trace", [False, True], ids=["eager", "compiled"])
def test_autocast(trace):
    a, b = normal(6, 5, dtype=torch.float32), normal(5, 3, seed=1, dtype=torch.float32)
    held = pm.sparse(holes(6, 5).float(), "CSR")

    def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = pm.einsum(PRODUCT, A=a, B=b), pm.einsum(PRODUCT, A=held, B=b), pm.einsum("C[i] = 2 * A[i,k]", A=a)
        return *inside, pm.einsum(PRODUCT, A=a, B=b)

    leaves = [a.requires_grad_(), b.requires_grad_()]
    dense, stored, single, outside = (compiled(function) if trace else function)(*leaves)
    rounded = [x.detach().bfloat16().double() for x in (a, b, held.to_dense())]
    assert dense.dtype == stored.dtype == single.dtype == torch.bfloat16 and outside.dtype == torch.float32
    assert_close(dense.detach(), rounded[0] @ rounded[1])
    assert_close(stored.detach(), rounded[2] @ rounded[1])
    assert_close(single.detach(), 2 * rounded[0].sum(1))
    assert_close(outside.detach(), a.detach().double() @ b.detach().double())
    grads = gradients(dense, *leaves)
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]
    assert_close(grads[0], normal(6, 3, seed=8).bfloat16().double() @ rounded[1].T, dtype=torch.bfloat16)


def test_autocast_mixes_dtypes_and_leaves_doubles():
    a, b = normal(3, 4, dtype=torch.float32), normal(4, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pm.einsum(PRODUCT, A=a, B=b.bfloat16()).dtype == torch.bfloat16
        assert pm.einsum(PRODUCT, A=a.double(), B=b).dtype == torch.float64
        assert pm.einsum("C[i] = A[i,k]", A=torch.ones(3, 4, dtype=torch.int32)).dtype == torch.int64
    with torch.autocast("cpu", enabled=False):
        assert pm.einsum(PRODUCT, A=a, B=b.float()).dtype == torch.float32


def test_calls_before_autocast_do_not_decide_calls_inside():
    a, b = normal(3, 4, dtype=torch.float32), normal(4, 5, dtype=torch.float32)
    for _ in range(2):
        assert pm.einsum(PRODUCT, A=a, B=b).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert pm.einsum(PRODUCT, A=a, B=b).dtype == torch.bfloat16


# Dtypes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "text",
    [PRODUCT, "C[i] mean= mean(k, j, A[i,k] * B[k,j])", "C[i] max= A[i,k]", "C[X[i],j] = A[i,k] * B[k,j] ; C:[4,_]"],
)
def test_narrow_dtypes(text, dtype):
    operands = {"A": normal(6, 64, dtype=dtype), "B": normal(64, 5, seed=1, dtype=dtype), "X": ints(0, 3, -1, 3, 2, 1)}
    used = {name: x for name, x in operands.items() if f"{name}[" in text}
    leaves = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in used.items()}
    wide = {n: x.detach().double().requires_grad_() if x.is_floating_point() else x for n, x in used.items()}
    out, wanted = pm.einsum(text, **leaves), pm.einsum(text, **wide)
    assert out.dtype == dtype
    assert_close(out.detach(), wanted.detach())
    up = normal(*out.shape, seed=8).to(dtype)
    got = torch.autograd.grad(out, [x for x in leaves.values() if x.requires_grad], up)
    expected = torch.autograd.grad(wanted, [x for x in wide.values() if x.requires_grad], up.double())
    if "max" not in text:  # two values that round to one share its gradient
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == dtype
            assert_close(mine, theirs)


def test_sums_of_several_steps_are_rounded_once():
    """2 ** 11 + 1 is no half."""
    A = pm.sparse(torch.tensor([[2048.0, 1.0]], dtype=torch.float16), "COO")
    B, D = torch.ones(2, dtype=torch.float16), torch.full((1,), -2048.0, dtype=torch.float16)
    got = pm.einsum("C[m] = A[m,k] * B[k] + D[m]", A=A, B=B, D=D)
    assert got.dtype == torch.float16 and got.item() == 1.0


def test_long_sums_are_not_rounded_on_the_way():
    ones = torch.ones(1, 5000, dtype=torch.bfloat16)
    assert pm.einsum("C[i] = A[i,k]", A=ones).item() == 4992  # 5000 as a bfloat16
    assert pm.einsum("C[i,j] = A[i,k] * B[k,j]", A=ones, B=ones.T).item() == 4992


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_are_values(dtype):
    whole, b = torch.randint(0, 2, (3, 4)).to(dtype), normal(4, 2)
    close(pm.einsum(PRODUCT, A=whole, B=b), whole.double() @ b)
    alone = pm.einsum("C[i] = A[i,k]", A=whole)
    assert alone.dtype == torch.int64 and alone.tolist() == whole.long().sum(1).tolist()
    assert pm.einsum("C[i] = A[i,k]", A=torch.tensor([[2**40, 1]])).tolist() == [2**40 + 1]


def test_an_index_array_as_a_value_too():
    x, b = ints(2, 0, -1), normal(3)
    close(pm.einsum("C[p] = X[p] * B[X[p]]", X=x, B=b), torch.stack([2 * b[2], 0 * b[0], 0 * b[0]]))


def test_python_numbers():
    a = normal(3, 4)
    close(pm.einsum("C[i,k] = s * A[i,k] + t", A=a, s=0.1, t=-2.0), 0.1 * a - 2)
    close(pm.einsum("C[i] = N * A[i,N*k]", A=a, N=2), 2 * a[:, ::2].sum(1))
    close(pm.einsum("C[i] = A[i,N]", A=a, N=2), a[:, 2])
    assert pm.einsum("C[i] = A[i] * s", A=torch.ones(2, dtype=torch.int64), s=0.5).dtype == torch.get_default_dtype()
    assert pm.einsum("C[i,k] = A[i,k] * s", A=a.bfloat16(), s=0.5).dtype == torch.bfloat16
    # The same statement with other numbers.
    for number in (2, 3, 2):
        close(pm.einsum("C[i,k] = N * A[i,k]", A=a, N=number), number * a)
        close(pm.einsum("C[i,k] = s * A[i,k]", A=a, s=number / 7), number / 7 * a)


def test_statements_without_tensors():
    assert pm.einsum("C[i] = 2 ; i:3").tolist() == [2, 2, 2]
    assert pm.einsum("C[i] = s ; i:1..3", s=2.5).tolist() == [0, 2.5, 2.5]


# Layouts and sizes
def test_any_layout():
    a, b = normal(3, 4), normal(4, 5)
    wanted = a @ b
    big = normal(6, 8)
    big[::2, 1::2] = a
    for x in (a.T.contiguous().T, big[::2, 1::2], a.clone().as_strided((3, 4), (4, 1))):
        close(pm.einsum(PRODUCT, A=x, B=b), wanted)
        close(pm.einsum(PRODUCT, A=x, B=b.T.contiguous().T), wanted)
    row = normal(1, 4).expand(3, 4)
    close(pm.einsum(PRODUCT, A=row, B=b), row @ b)
    x = ints(0, 9, 3, 9, -1, 9)[::2]
    close(pm.einsum(GATHER, B=b.T, X=x), torch.stack([b.T[0], b.T[3], 0 * b.T[0]]))
    leaf = row.detach().clone().requires_grad_()
    close(gradients(pm.einsum(PRODUCT, A=leaf[:1].expand(3, 4), B=b), leaf), gradients(leaf[:1].expand(3, 4) @ b, leaf))


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_sizes_of_nothing(shape):
    i, k, j = shape
    a, b = normal(i, k).requires_grad_(), normal(k, j).requires_grad_()
    for operand in (lambda: a, lambda: pm.sparse(a, "CSR"), lambda: pm.sparse(a, "m:C k:G2 m:B2 k:B2")):
        for lowering in ("", "graph", "reference"):
            out = pm.einsum(PRODUCT, A=operand(), B=b, lowering=lowering)
            assert out.shape == (i, j)
            close(out, a @ b)
            close(gradients(out, a, b), gradients(a @ b, a, b))


@pytest.mark.parametrize("operator", ["=", "+=", "max=", "min=", "mean="])
def test_index_arrays_of_nothing(operator):
    c, x = normal(3), torch.zeros(0, dtype=torch.int64)
    out = pm.einsum(f"C[X[p]] {operator} A[p]", C=c, X=x, A=normal(0))
    close(out, torch.zeros(3).double() if operator in ("=", "mean=") else c)


def test_scalars():
    a = normal(3)
    close(pm.einsum("C[0] = A[i] * A[i] ; C:[1]", A=a), (a @ a)[None])
    assert pm.einsum("C[i] = s ; i:2", s=torch.tensor(3.0)).tolist() == [3, 3]


# What is promised of every call
def test_out():
    a, b = normal(3, 4), normal(4, 5)
    out = torch.full((5, 3), 7.0, dtype=torch.float64).T
    got = pm.einsum(PRODUCT, A=a, B=b, out=out)
    assert got is out and out.stride() == (1, 3)
    close(out, a @ b)
    c = normal(3, 5)
    wanted = c + a @ b
    close(pm.einsum("C[i,j] += A[i,k] * B[k,j]", C=c, A=a, B=b, out=c), wanted)
    close(c, wanted)


def test_the_result_is_new_and_the_operands_stay():
    a, b, c, x = normal(3, 4), normal(4, 5), normal(3, 5), ints(2, 0, 1)
    before = [t.clone() for t in (a, b, c, x)]
    for text in (
        "C[i,j] = D[i,j]",
        "C[i,j] += A[i,k] * B[k,j]",
        "C[i,j] max= A[i,k] * B[k,j]",
        "C[X[i],j] += A[i,k] * B[k,j]",
        "C[i,j] += D[i,j] - D[i,j]",
    ):
        used = {n: t for n, t in {"A": a, "B": b, "C": c, "X": x, "D": c}.items() if f"{n}[" in text}
        got = pm.einsum(text, **used)
        got.fill_(7)
        assert all(map(torch.equal, (a, b, c, x), before)), text
    (part,) = CSR.parts
    kept = [part.coords["m"].clone(), part.coords["k"].clone(), part.values.clone()]
    pm.einsum(PRODUCT, A=CSR, B=normal(5, 2)).fill_(7)
    assert all(map(torch.equal, (part.coords["m"], part.coords["k"], part.values), kept))


def test_the_target_under_each_operator():
    a, c = normal(3, 4), normal(3)
    close(pm.einsum("C[i] = A[i,k]", A=a, C=c), a.sum(1))
    close(pm.einsum("C[i] += A[i,k]", A=a, C=c), c + a.sum(1))
    close(pm.einsum("C[i] max= A[i,k]", A=a, C=c), torch.maximum(c, a.amax(1)))
    close(pm.einsum("C[i] min= A[i,k]", A=a, C=c), torch.minimum(c, a.amin(1)))
    close(pm.einsum("C[i] mean= A[i,k]", A=a, C=c), a.mean(1))


def test_gradients_of_the_target():
    a, c = normal(3, 4).requires_grad_(), normal(3).requires_grad_()
    a.data[0, 1] = 9
    c.data[:] = torch.stack([c[0] * 0, c[1] * 0 + 9, a[2].max()]).detach()
    up = torch.tensor([1.0, 2, 4]).double()
    ga, gc = torch.autograd.grad(pm.einsum("C[i] max= A[i,k]", A=a, C=c), (a, c), up)
    assert gc.tolist() == [0, 2, 2] and ga.sum(1).tolist() == [1, 0, 2]
    for text, wanted in (("C[i] += A[i,k]", [1, 2, 4]), ("C[i] = A[i,k]", None), ("C[i] mean= A[i,k]", None)):
        (got,) = torch.autograd.grad(pm.einsum(text, A=a, C=c), [c], up, allow_unused=True)
        assert (got is None or not got.any()) if wanted is None else got.tolist() == wanted, text


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_gradients(mode):
    leaf = normal(3, 4).requires_grad_()
    with mode():
        x, b = ints(0, 3), normal(4, 5)
        out = pm.einsum(PRODUCT, A=leaf, B=b)
        assert not out.requires_grad
        close(out, leaf @ b)
        close(pm.einsum(GATHER, B=b, X=x), b[x])
        x[0] = 2
        close(pm.einsum(GATHER, B=b, X=x), b[x])
        close(pm.einsum(PRODUCT, A=CSR, B=normal(5, 2)), CSR.to_dense() @ normal(5, 2))


def test_gradients_where_they_are_wanted():
    a, b = normal(3, 4).requires_grad_(), normal(4, 5)
    out = pm.einsum(PRODUCT, A=a, B=b)
    out.sum().backward()
    assert b.grad is None
    close(a.grad, b.sum(1).expand(3, 4))


def test_parameters_and_modules():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(normal(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return pm.einsum(PRODUCT, A=x, B=self.weight)

    layer = Layer()
    layer(normal(3, 4)).sum().backward()
    close(layer.weight.grad, normal(3, 4).sum(0)[:, None].expand(4, 5))


@pytest.mark.parametrize(
    "text", [PRODUCT, "C[X[i],j] = A[i,k] * B[k,j] ; C:[2,_]", "C[X[i],j] max= A[i,k] * B[k,j] ; C:[2,_]"]
)
def test_two_runs_are_equal_to_the_bit(text):
    operands = {"A": normal(64, 33, dtype=torch.float32), "B": normal(33, 9, dtype=torch.float32)}
    if "X" in text:
        operands["X"] = torch.randint(0, 2, (64,))
    runs = []
    for _ in range(2):
        leaves = {n: x.clone().requires_grad_() if x.is_floating_point() else x for n, x in operands.items()}
        out = pm.einsum(text, **leaves)
        runs.append([out, *gradients(out, leaves["A"], leaves["B"])])
    assert all(map(torch.equal, *runs))


def test_a_format_converts_a_dense_operand_on_every_call():
    call, b = pm.compile_einsum(PRODUCT, {"A": "CSR"}), normal(5, 2)
    for seed in range(3):
        matrix = holes(6, 5, seed=seed).requires_grad_()
        out = call(A=matrix, B=b)
        close(out, matrix @ b)
        close(gradients(out, matrix)[0], gradients(matrix @ b, matrix)[0] * (matrix != 0))
        close(call(A=pm.sparse(matrix, "COO"), B=b), matrix @ b)


def test_other_sizes_and_dtypes_after_a_first_call():
    call = pm.compile_einsum(PRODUCT)
    for n, dtype in ((3, torch.float64), (5, torch.float64), (5, torch.float32), (3, torch.float64)):
        a, b = normal(n, 4, dtype=dtype), normal(4, n + 1, dtype=dtype)
        torch.testing.assert_close(call(A=a, B=b), a @ b)
        torch.testing.assert_close(call(B=b, A=a), a @ b)


def test_the_same_text_over_other_formats():
    matrix, b = holes(6, 5), normal(5, 2)
    for form in ("CSR", "m:C k:G2", "CSR", "m:C k:G1,2,4", "m:C k:G2,8"):
        close(pm.einsum(PRODUCT, A=pm.sparse(matrix, form), B=b), matrix @ b)
    close(pm.einsum(PRODUCT, A=matrix, B=pm.sparse(b, "CSC")), matrix @ b)
    close(pm.einsum(PRODUCT, A=pm.sparse(matrix, "CSC"), B=pm.sparse(b, "CSR")), matrix @ b)


# The lines of the documentation
def test_the_examples_of_the_documentation():
    chance = np.random.default_rng(0)
    examples = {
        PRODUCT: {"A": (3, 4), "B": (4, 5)},
        "C[D[y],x] += A[y,E[r]] * B[r,x]": {"C": (3, 2), "D": [0, 2, 2], "A": (3, 4), "E": [1, 3], "B": (2, 2)},
        "O[p] = I[2*p+r-1] * F[r] ; p:14": {"I": (28,), "F": (3,)},
    }
    for text, shapes in examples.items():
        arrays = {n: chance.normal(size=s) if isinstance(s, tuple) else np.array(s) for n, s in shapes.items()}
        close(
            pm.einsum(text, **{n: torch.from_numpy(x) for n, x in arrays.items()}),
            torch.from_numpy(evaluate(text, arrays)),
        )


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_used_statement_can_be_copied(copied):
    f = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", {"A": "CSR"})
    a, b = torch.eye(4).roll(1, 0), torch.randn(4, 3)
    y = f(A=pm.sparse(a, "CSR"), B=b)
    again = copied(f)
    assert again == f and torch.equal(again(A=copied(pm.sparse(a, "CSR")), B=b), y)
