"""Level formats: hashes, bitmaps of bricks, splits; all formats of one convolution give the same."""

import itertools

import pytest
import torch

import pumice as pm
from pumice.errors import CoordinateError, StatementError
from pumice.language.formats import KINDS, Format, Level, parse_format

FORMS = (
    "(m k):H",
    "m:U k:H",
    "m:H k:C",
    "[m,k] k:H m:H",
    "(m k):C m:M4 k:M8",
    "[m,k] k:C m:C m:M2 k:M4",
    "m:U k:C k:M4",
    "[m,k] k:U4 m:U k:C",
    "m:U2 (m k):C",
    "[m,k] k:U16 (m k):H m:M3",
    "m:U k:C",
    "(m k):C m:B2 k:B4",
    "m:C k:G2",
)


def matrix(rows=9, columns=11, seed=0):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=chance, dtype=torch.float64)
    return x * (torch.rand(rows, columns, generator=chance) < 0.3)


@pytest.mark.parametrize("form", FORMS)
def test_conversions_and_products(form):
    x = matrix()
    a = pm.sparse(x, form)
    assert str(parse_format(str(a.format))) == str(a.format)
    assert torch.equal(a.to_dense(), x)
    for other in FORMS:
        assert torch.equal(a.to_format(other).to_dense(), x), other
    b = torch.randn(11, 5, dtype=torch.float64)
    torch.testing.assert_close(pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=b), x @ b)
    for other in FORMS:
        y = pm.sparse(b, other.replace("m", "q").replace("k", "n").replace("q", "k"))
        torch.testing.assert_close(pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=a, B=y), x @ b)


@pytest.mark.parametrize("form", FORMS[:10])
def test_gradients_of_values(form):
    x, b = matrix().requires_grad_(), torch.randn(11, 5, dtype=torch.float64)
    pm.einsum("C[m,n] = A[m,k] * B[k,n]", A=pm.sparse(x, form), B=b).square().sum().backward()
    y = matrix().requires_grad_()
    ((y @ b).square().sum()).backward()
    torch.testing.assert_close(x.grad, y.grad * (x != 0))


def test_empty_tensors():
    for form in FORMS:
        a = pm.sparse(torch.zeros(4, 6), form)
        assert a.nnz == 0 and torch.equal(a.to_dense(), torch.zeros(4, 6))


def test_the_order_of_entries():
    x = torch.ones(4, 5)
    (part,) = pm.sparse(x, "[m,k] k:U2 m:U k:C").parts
    assert part.coords["k"].tolist() == [0, 1] * 4 + [2, 3] * 4 + [4] * 4
    (part,) = pm.sparse(x, "(m k):C m:M2 k:M4").parts
    assert [*zip(part.coords["m"].tolist(), part.coords["k"].tolist(), strict=True)][:9] == [
        *itertools.product((0, 1), range(4)),
        (0, 4),
    ]


def test_bytes_of_bricks_and_hashes():
    """Two bricks of 4 x 8 with 3 cells: coordinates 2 * 2 * 4, bitmaps 2 * 8, first positions 2 * 4; values 3 * 4."""
    x = torch.zeros(8, 16)
    x[0, 0] = x[0, 7] = x[7, 15] = 1
    assert pm.sparse(x, "(m k):C m:M4 k:M8").nbytes == 16 + 16 + 8 + 12
    assert pm.sparse(x, "(m k):H").nbytes == pm.sparse(x, "(m k):C").nbytes + 4 * 8


def test_formats_sorted_by_quotients_have_no_segments():
    a = pm.sparse(matrix(), "[m,k] k:U4 m:U k:C")
    with pytest.raises(CoordinateError, match="sorted by k // 4"):
        a.segments(a.parts[0])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("m:M4 k:C", "axis 'm' has a brick and no other level"),
        ("m:U k:C m:M4", "expected 'm:C' above, found 'm:U'"),
        ("(m k):C m:M16 k:M8", "at most 64 cells, found 128"),
        ("k:U0 k:C m:C", "at least 1, found 0"),
        ("k:U4 m:C k:U", "splits a level below it: expected 'k:C'"),
        ("m:C k:G4 m:M2", "comes after 'k:G4'"),
        ("m:U4 (m k):C k:B2", "expected either of them"),
        ("m:C k:C k:M4 k:M4", "two brick levels"),
        ("m:H m:C k:C", "has two levels"),
        ("m:C k:M", "unknown kind of level 'M'"),
    ],
)
def test_what_is_refused(form, message):
    with pytest.raises(StatementError, match=message):
        parse_format(form)


def test_kinds_tell_what_they_offer():
    assert KINDS["H"].locate == "hash" and KINDS["C"].locate == "search" and KINDS["U"].locate == "multiply"
    assert str(Format(("m", "k"), (Level(("m", "k"), "C"), Level(("m",), "M", (4,))))) == "(m k):C m:M4"


def test_over_a_hundred_formats_of_one_convolution_are_equal():
    """Paper, table 1: the number of formats of one convolution; filter and image in every one of these."""
    chance = torch.Generator().manual_seed(3)
    image = torch.randn(1, 6, 5, 3, generator=chance) * (torch.rand(1, 6, 5, 3, generator=chance) < 0.5)
    weight = torch.randn(3, 2, 3, 4, generator=chance) * (torch.rand(3, 2, 3, 4, generator=chance) < 0.4)
    text = "O[n,p,q,m] = I[n,p+r-1,q+s,c] * F[r,s,c,m] ; p:6, q:5"
    wanted = pm.einsum(text, I=image, F=weight)
    forms = filter_formats()
    assert len(forms) > 100
    for number, form in enumerate(forms):
        f = pm.sparse(weight, form)
        torch.testing.assert_close(
            pm.einsum(text, I=image, F=f), wanted, msg=lambda found, form=form: f"{form}\n{found}"
        )
        if number % 8 == 0:
            i = pm.sparse(image, ("n:U h:U w:U c:C", "(n h w):H c:U", "(n h w c):C")[number // 8 % 3])
            got = pm.einsum(text, I=i, F=f)
            torch.testing.assert_close(got, wanted, msg=lambda found, form=form: f"{form}\n{found}")


def filter_formats() -> list[str]:
    """Orders of the axes with kinds of levels, fused levels, groups, blocks, bricks and splits."""
    axes, found = "rscm", []
    for order in itertools.permutations(axes):
        for kinds in ("UUUC", "CCCC", "UCHC", "CCUU"):
            found.append(" ".join(f"{axis}:{kind}" for axis, kind in zip(order, kinds, strict=True)))
        found.append(f"({' '.join(order)}):C")
    for more in ("(r s c m):H", "(r s c):C m:G", "(r s):C c:C m:G2", "(r s c m):C c:B2 m:B2"):
        found.append(more)
    for more in (
        "(r s c m):C r:M4 s:M2 c:M2 m:M4",
        "c:U2 m:U (r s c):C",
        "m:U2 c:U2 (r s c m):C",
        "r:U s:U c:C m:C m:M4",
    ):
        found.append(more)
    return [f"[{','.join(axes)}] {form}" for form in found]
