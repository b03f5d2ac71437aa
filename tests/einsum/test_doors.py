"""Every refusal of pm.einsum, compile_einsum and pm.sparse in einsums: its kind and what its message tells."""

from __future__ import annotations

import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from einsum_fuzz import random_case
from torch._subclasses.fake_tensor import FakeTensorMode
from wide import beyond

import pumice as pm
from pumice.errors import CoordinateError, DeviceError, DtypeError, OptionError, PumiceError, ShapeError, StatementError
from pumice.language.formats import NAMED
from pumice.lower import plan

A, B, V = torch.rand(3, 4), torch.rand(4, 5), torch.rand(5)
PRODUCT = "C[i,j] = A[i,k] * B[k,j]"
GATHER = "C[p] = V[X[p]]"


def ints(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


# (text, operands, error, pieces of its message)
DOORS = {
    "missing": (PRODUCT, {"A": A}, ShapeError, ["needs the operand B", "given are A", PRODUCT]),
    "missing all": (PRODUCT, {}, ShapeError, ["needs the operand A, B", "given are none"]),
    "missing array": (GATHER, {"V": V}, ShapeError, ["needs the operand X"]),
    "missing array of the target": ("C[X[p]] = V[p] ; C:[3]", {"V": V}, ShapeError, ["needs the operand X"]),
    "missing target": ("C[i,j] += A[i,j]", {"A": A}, ShapeError, ["needs the operand C", "given are A"]),
    "two sizes": (
        PRODUCT,
        {"A": A, "B": torch.rand(6, 5)},
        ShapeError,
        ["index k is 4 on axis 1 of A[i,k] and 6 on axis 0 of B[k,j]", PRODUCT],
    ),
    "two sizes on a diagonal": ("C[i] = A[i,i]", {"A": A}, ShapeError, ["index i is 3 on axis 0", "4 on axis 1"]),
    "two sizes in the target": (
        "C[i] = V[i]",
        {"V": V, "C": torch.rand(4)},
        ShapeError,
        ["index i is 5 on axis 0 of V[i] and 4 on axis 0 of C[i]"],
    ),
    "rank": (PRODUCT, {"A": A, "B": V}, ShapeError, ["B[k,j] has 2 indices", "B has 1 axes (shape [5])"]),
    "rank of a scalar": ("C[i,k] = A[i,k] * b", {"A": A, "b": V}, ShapeError, ["b has 0 indices", "shape [5]"]),
    "rank of the target": (
        "C[i] = V[i]",
        {"V": V, "C": A},
        ShapeError,
        ["C[i] has 1 indices, its operand has shape [3, 4]"],
    ),
    "a number with axes": ("C[i,k] = A[i,k]", {"A": 2.5}, ShapeError, ["A[i,k] has 2 indices", "0 axes"]),
    "window": (
        "C[p] = V[p+r] * W[r] * M[p]",
        {"V": V, "W": torch.rand(3), "M": torch.rand(4)},
        ShapeError,
        ["p+r runs from 0 to 5", "axis 0 of V[p+r] has extent 5", "; p:4"],
    ),
    "window to the left": ("C[i] = V[i-1] * V[i]", {"V": V}, ShapeError, ["i-1 runs from -1 to 3", "extent 5"]),
    "constant outside": ("C[i] = A[i,4]", {"A": A}, ShapeError, ["4 runs from 4 to 4", "extent 4"]),
    "window of the target": (
        "C[p+r] = W[r] * V[p]",
        {"W": torch.rand(3), "V": V, "C": torch.rand(6)},
        ShapeError,
        ["p+r writes to 0 up to 6", "axis 0 of C[p+r] has extent 6"],
    ),
    "undeclared": (
        "C[i] = V[X[p]+i]",
        {"V": V, "X": ints(1)},
        ShapeError,
        ["index i has no size", "declare it, for instance `; i:10`"],
    ),
    "undeclared broadcast": ("C[i,j] = V[i]", {"V": V}, ShapeError, ["index j has no size"]),
    "target through an array": (
        "C[X[p]] = V[p]",
        {"V": V, "X": ints(0, 1, 2, 0, 1)},
        ShapeError,
        ["axis 0 of C[X[p]] is addressed through X[p]", "pass C or declare it", "; C:[...]"],
    ),
    "declared range": ("C[i] = V[i] ; i:4", {"V": V}, ShapeError, ["index i is declared as 4", "has extent 5"]),
    "declared span": ("C[i] = V[i] ; i:2..7", {"V": V}, ShapeError, ["index i is declared as 2..7", "has extent 5"]),
    "declared target": (
        "C[i] = V[i] ; C:[4]",
        {"V": V, "C": torch.rand(5)},
        ShapeError,
        ["C is declared as [4], the operand has shape [5]"],
    ),
    "declared operand": ("C[i] = V[i] ; V:[4]", {"V": V}, ShapeError, ["V is declared as [4]", "shape [5]"]),
    "declared rank": ("C[i] = V[i] ; V:[5,_]", {"V": V}, (ShapeError, StatementError), ["V"]),
    "mixed dtypes": (
        PRODUCT,
        {"A": A, "B": B.double()},
        DtypeError,
        ["values are of one floating dtype", "A is torch.float32, B is torch.float64", "torch.autocast"],
    ),
    "mixed target": ("C[i,k] += A[i,k]", {"A": A, "C": A.half()}, DtypeError, ["C is torch.float16"]),
    "mixed sparse": (
        PRODUCT,
        {"A": pm.sparse(A.double()), "B": B},
        DtypeError,
        ["A is torch.float64, B is torch.float32"],
    ),
    "complex": ("C[i] = V[i]", {"V": V.to(torch.complex64)}, DtypeError, ["V is torch.complex64", "float16, bfloat16"]),
    "float8": ("C[i] = V[i]", {"V": V.to(torch.float8_e4m3fn)}, DtypeError, ["V is torch.float8_e4m3fn"]),
    "floats in an array": (GATHER, {"V": V, "X": V}, DtypeError, ["X is an index array", "torch.float32"]),
    "bytes in an array": (
        GATHER,
        {"V": V, "X": ints(1, dtype=torch.uint8)},
        DtypeError,
        ["int32 or int64", "torch.uint8"],
    ),
    "sparse array": (GATHER, {"V": V, "X": pm.sparse(V, "k:C")}, DtypeError, ["X is an index array", "found Sparse"]),
    "numpy": ("C[i] = V[i]", {"V": V.numpy()}, DtypeError, ["operand V should be a tensor", "found ndarray"]),
    "bool": ("C[i] = V[i] * b", {"V": V, "b": True}, DtypeError, ["operand b", "found bool"]),
    "complex number": ("C[i] = V[i] * b", {"V": V, "b": 1j}, DtypeError, ["operand b", "found complex"]),
    "none": ("C[i] = V[i]", {"V": None}, DtypeError, ["operand V", "found NoneType"]),
    "no tensor that is not used": ("C[i] = V[i]", {"V": V, "D": "x"}, DtypeError, ["operand D", "found str"]),
    "torch sparse": ("C[i,k] = A[i,k]", {"A": A.to_sparse()}, DtypeError, ["layout torch.sparse_coo", "pm.sparse(A)"]),
    "sparse target": (
        "C[i] += V[i]",
        {"V": V, "C": pm.sparse(V, "k:C")},
        OptionError,
        ["the target C is a dense tensor", "pm.sparse"],
    ),
    "an integer as an array": (GATHER, {"V": V, "X": 2}, StatementError, ["`X` is the integer 2"]),
    "sparse rank": (
        "C[i] = A[i,j,k]",
        {"A": pm.sparse(A)},
        ShapeError,
        ["A[i,j,k] has 3 indices", "2 axes"],
    ),
    "sparse size": (
        PRODUCT,
        {"A": pm.sparse(A, "CSR"), "B": torch.rand(6, 5)},
        ShapeError,
        ["index k is 4 on axis 1 of A[i,k] and 6 on axis 0 of B[k,j]"],
    ),
    "sparse under max": (
        "C[p] max= A[p,2*q+p] * W[q]",
        {"A": pm.sparse(A, "CSR"), "W": torch.rand(2)},
        OptionError,
        ["A is sparse", "cannot be solved for an index", "under max=", "pass it dense"],
    ),
    "buckets under mean": (
        "C[i,j] mean= A[i,k] * B[k,j]",
        {"A": pm.sparse(A, "m:C k:G1,2,4"), "B": B},
        OptionError,
        ["A is sparse and stored in 3 parts", "mean="],
    ),
}


@pytest.mark.parametrize("name", DOORS)
def test_doors(name):
    text, operands, error, pieces = DOORS[name]
    for run in (lambda: pm.einsum(text, **operands), lambda: pm.compile_einsum(text)(**operands)):
        with pytest.raises(error) as raised:
            run()
        assert isinstance(raised.value, PumiceError)
        assert all(piece in str(raised.value) for piece in pieces), str(raised.value)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None


# What index arrays hold
@pytest.mark.parametrize(
    ("text", "values", "found", "extent", "most"),
    [
        (GATHER, (1, 5), 5, 5, 4),
        (GATHER, (1, -2), -2, 5, 4),
        (GATHER, (1, 2**40), 2**40, 5, 4),
        ("C[p] = V[2*X[p]]", (1, 3), 3, 5, 2),
        ("C[p] = V[X[p]+1]", (1, 5), 5, 5, 4),
        ("C[p] = exists(V[X[p]])", (9,), 9, 5, 4),
        ("C[X[p]] = V[p] ; p:5, C:[3]", (0, 1, 2, 3, 0), 3, 3, 2),
        ("C[X[p],_1] = V[p] * V[_1] ; C:[3,_]", (0, 1, 2, 3, 0), 3, 3, 2),
        ("C[p] max= V[X[p]]", (5,), 5, 5, 4),
    ],
)
def test_values_of_index_arrays(text, values, found, extent, most):
    with pytest.raises(CoordinateError) as raised:
        pm.einsum(text, V=V, X=ints(*values))
    assert f"X[p] holds {found}" in str(raised.value) and f"has extent {extent}" in str(raised.value)
    assert f"-1 (nothing) or from 0 to {most}" in str(raised.value)


def test_values_of_a_nested_array():
    with pytest.raises(CoordinateError, match=r"Y\[p\] holds 2, but axis 0 of X\[Y\[p\]\] has extent 2"):
        pm.einsum("C[p] = V[X[Y[p]]]", V=V, X=ints(1, 2), Y=ints(0, 2))


def test_values_of_the_target_of_a_sum():
    with pytest.raises(CoordinateError, match=r"X\[p\] holds 3, but axis 0 of C\[X\[p\]\] has extent 3"):
        pm.einsum("C[X[p]] += V[p]", V=V[:2], X=ints(0, 3), C=torch.zeros(3))


def test_nothing_and_what_lies_around_are_no_errors():
    assert pm.einsum(GATHER, V=V, X=ints(-1, 4)).tolist() == [0, V[4].item()]
    assert pm.einsum("C[p] = V[X[p]+1]", V=V, X=ints(4, 0)).tolist() == [0, V[1].item()]
    assert pm.einsum(GATHER, V=V, X=ints()).shape == (0,)


@pytest.mark.parametrize("view", [False, True])
def test_arrays_that_change_are_looked_at_again(view):
    base = ints(1, 2)
    x = base[:] if view else base
    call = pm.compile_einsum(GATHER)
    for run in (call, lambda **operands: pm.einsum(GATHER, **operands)):
        assert run(V=V, X=x).tolist() == V[1:3].tolist()
        base[0] = 7
        with pytest.raises(CoordinateError, match="holds 7"):
            run(V=V, X=x)
        base[0] = -3
        with pytest.raises(CoordinateError, match="holds -3"):
            run(V=V, X=x)
        base[0] = 1
        assert run(V=V, X=x).tolist() == V[1:3].tolist()


def test_declared_facts():
    text = "C[X[p]] = V[p] ; C:[9], X:"
    for fact, good, bad in (
        ("sorted", (0, 0, 1, 3, 3), (0, 1, 3, 2, 3)),
        ("distinct", (4, -1, 1, -1, 0), (4, 1, 0, 1, 2)),
    ):
        wanted = torch.zeros(9).index_add(0, ints(*good).clamp(min=0), V.where(ints(*good) >= 0, 0))
        torch.testing.assert_close(pm.einsum(text + fact, V=V, X=ints(*good)), wanted)
        x = ints(*good)
        pm.einsum(text + fact, V=V, X=x)
        x[:] = ints(*bad)
        for _ in range(2):
            with pytest.raises(CoordinateError, match=f"X is declared {fact}, and is not"):
                pm.einsum(text + fact, V=V, X=x)


@pytest.mark.parametrize("text", ["garbage[[", "C[i = A[i]", "C[p] = A[2*p] ; q:3", ""])
def test_texts_are_checked_when_compiled(text):
    with pytest.raises(StatementError):
        pm.compile_einsum(text)


@pytest.mark.parametrize(
    "text",
    [
        "C[p] = A[S*p+r] ; p:14, r:R",
        "C[p] = A[S*p] * S ; p:3..P",
        "C[p] = A[p+S] ; p:P..9",
        "C[i] = A[i,N*k] * N # N[i]: N",
    ],
)
def test_integers_may_come_with_the_operands(text):
    assert pm.compile_einsum(text, {"A": "CSR" if "A[i," in text else "k:C"}).text == text


def test_formats_are_of_operands():
    with pytest.raises(OptionError, match="found a format of B, but .* reads A"):
        pm.compile_einsum("C[i] = A[i]", {"B": "k:C"})
    with pytest.raises(OptionError, match="the target C is a dense tensor"):
        pm.compile_einsum("C[i] += A[i]", {"C": "k:C"})


WRITES = {
    "numpy": lambda x, values: np.copyto(x.numpy(), values),
    "data": lambda x, values: x.data.copy_(torch.from_numpy(values)),
    "another storage": lambda x, values: setattr(x, "data", torch.from_numpy(values)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("text", ["y[R[p],n] = V[p] * B[K[p],n] ; y:[4,_]", "y[R[p],n] = B[p,n] ; y:[4,_], R:sorted"])
def test_an_index_array_written_where_no_version_counts(text, write):
    b = torch.rand(6, 3)
    r, given = (
        ints(0, 0, 1, 2, 2, 3),
        {"B": b, **({"V": torch.rand(6), "K": ints(5, 4, 3, 2, 1, 0)} if "V" in text else {})},
    )
    pm.einsum(text, R=r, **given)
    write(r, np.array([0, 1, 1, 1, 3, 3]))
    rows = given["V"][:, None] * b[given["K"]] if "V" in text else b
    wanted = torch.zeros(4, 3).index_add(0, ints(0, 1, 1, 1, 3, 3), rows)
    torch.testing.assert_close(pm.einsum(text, R=r, **given), wanted)
    write(r, np.array([0, 1, 1, 1, 3, 9]))
    with pytest.raises(CoordinateError, match="R.p. holds 9"):
        pm.einsum(text, R=r, **given)


def test_an_operand_that_shrinks_is_looked_at_again():
    x = ints(1, 4)
    assert pm.einsum(GATHER, V=V, X=x).shape == (2,)
    with pytest.raises(CoordinateError, match="holds 4, but axis 0 of V.X.p.. has extent 4"):
        pm.einsum(GATHER, V=V[:4], X=x)


# Calls that went well before say nothing of others
def test_good_calls_before_do_not_open_the_door():
    call = pm.compile_einsum(PRODUCT)
    call(A=A, B=B)
    call(A=A, B=B)
    for operands, error in (
        ({"A": A}, ShapeError),
        ({"A": A, "B": B.double()}, DtypeError),
        ({"A": A, "B": B.T}, ShapeError),
        ({"A": A.to_sparse(), "B": B}, DtypeError),
        ({"A": A.numpy(), "B": B}, DtypeError),
        ({"A": A, "B": B.to(torch.complex64)}, DtypeError),
    ):
        with pytest.raises(error):
            call(**operands)
    assert call(B=B, A=A).equal(call(A=A, B=B))


# Options
@pytest.mark.parametrize(
    "door", [lambda **o: pm.einsum(PRODUCT, A=A, B=B, **o), lambda **o: pm.compile_einsum(PRODUCT, **o)]
)
def test_unknown_lowerings(door):
    with pytest.raises(OptionError) as raised:
        door(lowering="cuda")
    assert "lowering='cuda' is unknown" in str(raised.value)
    assert all(name in str(raised.value) for name in plan.LOWERINGS)
    for lowering in (None, 3, A):
        with pytest.raises(OptionError, match=f"lowering is text, found {type(lowering).__name__}"):
            door(lowering=lowering)


def test_lowerings_that_refuse():
    with pytest.raises(OptionError, match="has no lowering here: triton: the operands are not on a GPU$"):
        pm.einsum(PRODUCT, A=A, B=B, lowering="triton")
    with pytest.raises(OptionError, match="has no lowering here: .*not each indexed by one index array"):
        pm.einsum(PRODUCT, A=A, B=B, lowering="gathered")


@pytest.mark.parametrize("text", [None, 3, b"C[i] = V[i]", ["C[i] = V[i]"]])
def test_a_statement_is_text(text):
    for door in (pm.einsum, pm.compile_einsum):
        with pytest.raises(DtypeError, match=f"a statement is text, found {type(text).__name__}"):
            door(text)


def test_formats():
    with pytest.raises(StatementError) as raised:
        pm.compile_einsum("C[i] = A[i,j]", {"A": "XXX"})
    assert all(name in str(raised.value) for name in NAMED)
    with pytest.raises(OptionError, match="a format is a text or a Format, found int"):
        pm.compile_einsum("C[i] = A[i,j]", {"A": 3})
    with pytest.raises(ShapeError, match="format 'k:C' has 1 axes, the tensor has 2"):
        pm.compile_einsum("C[i] = A[i]", {"A": "k:C"})(A=A)
    with pytest.raises(OptionError, match="sparse takes a dense torch tensor"):
        pm.compile_einsum("C[i] = A[i,j]", {"A": "CSR"})(A=A.to("meta"))
    with pytest.raises(ShapeError, match="holds 2 coordinates of k per row, the longest row has 4"):
        pm.compile_einsum("C[i] = A[i,j]", {"A": "m:U k:G2"})(A=A + 1)


# Devices
def test_two_devices():
    with FakeTensorMode(), pytest.raises(DeviceError) as raised:
        there = torch.empty(4, 5, device="cuda")
        pm.einsum(PRODUCT, A=torch.empty(3, 4), B=there)
    assert "operand B is on cuda:0, A is on cpu" in str(raised.value)


# out=
@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(4, 5), ShapeError, r"out has shape \[4, 5\], the result \[3, 5\]"),
        (torch.zeros(15), ShapeError, r"out has shape \[15\]"),
        (torch.zeros(3, 5).double(), DtypeError, "out is torch.float64, the result torch.float32"),
        (torch.zeros(3, 5, device="meta"), DeviceError, "out is on meta, the result on cpu"),
        (np.zeros((3, 5)), DtypeError, "out is a tensor, found ndarray"),
    ],
)
def test_out(out, error, message):
    with pytest.raises(error, match=message):
        pm.einsum(PRODUCT, A=A, B=B, out=out)


# Text
@pytest.mark.parametrize("first", beyond(1, range(0, 300, 100)))
def test_malformed_text_gives_a_statement_error_and_nothing_else(first):
    pieces = [
        "",
        "[",
        "]",
        "(",
        ")",
        ",",
        ";",
        ":",
        "=",
        "+=",
        "max=",
        "*",
        "-",
        "+",
        "..",
        "C",
        "i",
        "7",
        "1e9",
        "_",
        "µ",
        "#",
        "\0",
        "$",
    ]
    refused = 0
    for seed in range(first, first + 100):
        case, chance = random_case(seed), random.Random(seed)
        operands = {n: v if isinstance(v, int) else torch.as_tensor(np.asarray(v)) for n, v in case.operands.items()}
        text = case.text
        for _ in range(4):
            place = chance.randrange(len(text) + 1)
            text = text[:place] + chance.choice(pieces) + text[place + chance.randrange(3) :]
            try:
                made = pm.compile_einsum(text)
                # A range may have become too large for this machine.
                made.explain()
                if "1e9" not in text and "77" not in text:
                    made(**operands)
            except StatementError as error:
                refused += 1
                assert "^" in str(error)
            except (ShapeError, DtypeError, CoordinateError, OptionError):
                pass
    assert refused > 50


# explain
def test_explain_without_operands():
    told = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", {"A": "GroupCOO"}).explain()
    assert "C[A_m[p],n] += A_values[p,q] * B[A_k[p,q],n]" in told.replace(" = ", " += ")
    assert "C[i] = V[i]" in pm.compile_einsum("C[i] = V[i]").explain()
    told = pm.compile_einsum("C[p] = A[2*p+r]", {"A": "k:C"}).explain()
    assert "A is used in dense form: `2*p+r` cannot be solved" in told


@pytest.mark.parametrize("form", [None, "CSR", "m:C k:G2", "m:C k:G1,2,4", "m:C k:G2 m:B2 k:B2"])
def test_explain_with_operands(form):
    formats = {"A": form} if form else {}
    told = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", formats).explain(A=A, B=B)
    for piece in ("statement", "sizes", "m 3, k 4, n 5", "C [3, 5]", "steps", "roles", "kernel", "@triton.jit", " us"):
        assert piece in told, told
    assert all(name in told for name in plan.LOWERINGS) and "the operands are not on a GPU" in told
    if form:
        assert "A_values" in told and "A as " in told
    if form == "m:C k:G1,2,4":
        assert all(f"A_values_{part}[" in told for part in range(3))


def test_explain_refuses_what_a_call_refuses():
    with pytest.raises(ShapeError, match="needs the operand B"):
        pm.compile_einsum(PRODUCT).explain(A=A)
    with pytest.raises(StatementError):
        pm.compile_einsum("C[i = A[i]").explain()


def test_a_compiled_einsum_is_a_value():
    first, second = pm.compile_einsum(PRODUCT, {"A": "CSR"}), pm.compile_einsum(PRODUCT, {"A": "m:U k:C"})
    assert first == second and hash(first) == hash(second)
    with pytest.raises(FrozenInstanceError):
        first.text = "C[i] = A[i]"  # type: ignore[misc]


def test_operands_without_a_name_are_refused():
    with pytest.raises(OptionError, match="operands are given by name, as in einsum.*; found 2 without one"):
        pm.einsum(PRODUCT, A, A)


@pytest.mark.parametrize("name", ["self", "text", "operands", "tensors", "shape", "name", "out_", "lower", "unnamed"])
def test_operands_may_have_any_name(name):
    assert pm.einsum(f"C[i] = {name}[i]", **{name: V}).equal(V)


def test_an_array_declared_onto_reaches_every_place():
    x, text = torch.ones(3), "y[R[p]] = x[p] ; y:[3], R:onto"
    assert pm.einsum(text, R=torch.tensor([2, 0, 1]), x=x).tolist() == [1, 1, 1]
    with pytest.raises(CoordinateError, match="R is declared onto an axis of extent 3, and is not"):
        pm.einsum(text, R=torch.tensor([2, 0, 2]), x=x)


@pytest.mark.parametrize("text", ["y[R[p]] = A[R[p]] ; y:[5], R:onto", "y[p] = C[R[p]] * A[R[p]] ; R:onto"])
def test_an_array_declared_onto_reaches_every_axis(text):
    operands = {"R": torch.tensor([1, 0]), "A": torch.ones(2), **({"C": torch.ones(5)} if "C" in text else {})}
    with pytest.raises(CoordinateError, match="R is declared onto an axis of extent 5, and is not"):
        pm.einsum(text, **operands)


EYE = torch.eye(3)
FAR = 1_000_000_000_000


@pytest.mark.parametrize(
    ("text", "operands", "error", "sentence"),
    [
        ("y[i] = V[i] * f", {"f": 10**400}, DtypeError, "operand f is an integer of 1330 bits, at most 64 are taken"),
        ("y[i] = V[i] * f", {"f": 2**63}, DtypeError, "operand f is an integer of 65 bits"),
        ("y[i] = V[i-1] ; i:n", {"n": 10**400}, DtypeError, "operand n is an integer of 1330 bits"),
        ("y[i] = V[i] * exists(f[i])", {"f": 1.5}, ShapeError, r"f\[i\] has 1 indices, the operand f has 0 axes"),
        ("y[i] = equal(V[i], V[i] * f[i])", {"f": 1.5}, ShapeError, r"f\[i\] has 1 indices"),
        (
            f"y[i] = V[i-1] ; i:{FAR}",
            {},
            ShapeError,
            f"{FAR} entries .*3725.3 GiB of torch.float32; the device cpu has",
        ),
        (f"y[{2**63 - 1}] = V[i]", {}, ShapeError, f"{2**63} entries .*, and is held 2 times; the device cpu has"),
        (f"y max= V[i-1] ; i:{FAR}", {}, OptionError, f"reference: a term has {FAR} points, the limit is {2**36}"),
        (f"y = V[i-1] * V[i-2] ; i:{FAR}", {}, OptionError, f"reference: a term has {FAR} points"),
    ],
)
def test_texts_exhaust_nothing(text, operands, error, sentence):
    with pytest.raises(error, match=sentence):
        pm.einsum(text, V=V, **operands)


@pytest.mark.parametrize("lowering", ["", "graph", "reference"])
@pytest.mark.parametrize("number", [2, 2.0, torch.tensor(2)])
def test_scalars_are_compared(lowering, number):
    found = pm.einsum("y[i] = V[i] * equal(X[i], f) * exists(f)", V=V[:3], X=ints(1, 2, 2), f=number, lowering=lowering)
    assert found.equal(V[:3] * torch.tensor([0, 1, 1]))


def test_loops_take_many_short_indices(monkeypatch):
    monkeypatch.setattr(plan.loops, "POINTS", 8)
    names = [f"i{n}" for n in range(7)]
    text = f"y = V[{'+'.join(names)}] ; {', '.join(f'{n}:2' for n in names)}"
    assert pm.einsum(text, V=torch.ones(3), lowering="reference") == 1 + 7 + 21


def test_nested_arrays_are_looked_up_once():
    text = f"y[i] = V[{'X[' * 90}i{']' * 90}]"
    assert pm.einsum(text, V=V, X=torch.arange(5), lowering="reference").equal(V)


def test_long_names_are_read_once():
    assert pm.compile_einsum("y[i] = V[n*i] ; i:" + "m" * 100_000)


def test_an_operand_of_tune_may_be_named_self():
    with pytest.raises(OptionError, match="nothing to tune"):
        pm.compile_einsum("y[i] = self[i]").tune(self=V)


def test_vmap_over_an_index_array():
    x, R = torch.rand(6), torch.randint(0, 4, (3, 6))
    found = torch.func.vmap(lambda R: pm.einsum("y[R[p]] = x[p] ; y:[4]", x=x, R=R))(R)
    torch.testing.assert_close(found, torch.zeros(3, 4).scatter_add(1, R, x.expand(3, 6)))


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("m:U k:C m:B" + "9" * 5000, StatementError, "at most 2000 characters, found 5011"),
        ("m:U k:C m:B" + "9" * 500, StatementError, "a size of kind B is at most 2147483647"),
        (f"m:U k:C m:B{10**18} k:B4", StatementError, f"at most 2147483647, found {10**18}"),
        ("m:U k:C m:B100000000 k:B4", ShapeError, "the size of 'm:B100000000' is at most 4096 for shape"),
        ("m:C k:G2,100000000", ShapeError, "the size of 'k:G2,100000000' is at most 4096"),
        ("a:U b:U " * 300, StatementError, "at most 2000 characters"),
        ("m:U k:C m:B\u0663", StatementError, "unknown kind of level"),
    ],
)
def test_formats_exhaust_nothing(text, error, sentence):
    with pytest.raises(error, match=sentence):
        pm.sparse(EYE, text)


def test_an_array_of_a_format_fits_in_memory():
    with pytest.raises(ShapeError, match="an array of the format has .* entries .*; the device cpu has .* GiB"):
        pm.sparse(torch.ones(1, 1, 1, 1), "a:C b:C c:C d:C a:B4096 b:B4096 c:B4096 d:B4")
