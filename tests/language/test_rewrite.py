"""conscious: what becomes of a sparse operand in every named format, spelt out; simplify and single_terms."""

import pytest

from pumice.errors import OptionError, ShapeError
from pumice.language.formats import NAMED, parse_format
from pumice.language.parse import parse
from pumice.language.rewrite import Array, StorageForm, lower_statement, simplify, single_terms

PRODUCT = "C[m,n] = A[m,k] * B[k,n]"


def stored(form, parts=1, ones=False):
    return StorageForm.of(parse_format(form), parts, ones)


def steps(text, **forms):
    done = lower_statement(
        parse(text), {name: f if isinstance(f, StorageForm) else stored(f) for name, f in forms.items()}
    )
    assert not done.dense
    return [str(step) for step in done.steps]


PLAIN = "C[A_m[p],n] = A_values[p] * B[A_k[p],n] ; A_m:sorted"
GROUPED = "C[A_m[p],n] = A_values[p,q] * B[A_k[p,q],n] ; A_m:sorted"
BLOCKS = "C[32*A_m[p]+m_in,n] = A_values[p,m_in,k_in] * B[32*A_k[p]+k_in,n] ; A_m:sorted"
CONSCIOUS = {
    "COO": PLAIN,
    "CSR": PLAIN,
    "CSC": "C[A_m[p],n] = A_values[p] * B[A_k[p],n] ; A_k:sorted",
    "DCSR": PLAIN,
    "ELL": "C[m,n] = A_values[m,q] * B[A_k[m,q],n]",
    "BCSR": BLOCKS,
    "GroupCOO": GROUPED,
    "BlockCOO": BLOCKS,
    "BlockGroupCOO": "C[32*A_m[p]+m_in,n] = A_values[p,q,m_in,k_in] * B[32*A_k[p,q]+k_in,n] ; A_m:sorted",
    "m:C k:G2": GROUPED,
    "m:C k:U": "C[A_m[p],n] = A_values[p,k] * B[k,n] ; A_m:sorted",
    "m:U k:U": "C[m,n] = A_values[m,k] * B[k,n]",
    "(m k):G": "C[A_m[q],n] = A_values[q] * B[A_k[q],n]",
    "m:U k:U m:B2 k:B4": "C[2*m_+m_in,n] = A_values[m_,k_,m_in,k_in] * B[4*k_+k_in,n]",
}


def test_every_name_is_spelt_out():
    assert set(NAMED) <= set(CONSCIOUS)


@pytest.mark.parametrize("form", CONSCIOUS)
def test_formats(form):
    assert steps(PRODUCT, A=form) == [CONSCIOUS[form]]


def test_buckets_are_steps():
    done = lower_statement(parse(PRODUCT), {"A": stored("m:C k:G1,2", 2)})
    assert [str(step) for step in done.steps] == [
        f"C[A_m_{n}[p],n] = A_values_{n}[p,q] * B[A_k_{n}[p,q],n] ; A_m_{n}:sorted" for n in range(2)
    ]
    assert done.arrays["A_k_1"] == Array("A", 1, "k") and done.arrays["A_values_0"] == Array("A", 0, "values")
    assert len(done.arrays) == 6 and not done.dense


SOLVED = [
    ("C[m] = A[m,k] + D[m]", ["C[A_m[p]] = A_values[p] ; A_m:sorted", "C[m] = D[m]"]),
    ("C[m] += 2 * A[m,k] - D[m]", ["C[A_m[p]] += 2 * A_values[p] ; A_m:sorted", "C[m] += -1 * D[m]"]),
    ("C[m,n] = A[m,k] * B[k-1,n]", ["C[A_m[p],n] = A_values[p] * B[A_k[p]-1,n] ; A_m:sorted"]),
    ("C[m] = A[m-1,k] * B[m]", ["C[A_m[p]+1] = A_values[p] * B[A_m[p]+1] ; A_m:sorted"]),
    ("C[m,n] = A[m,X[k]-k] * B[k,n]", None),
    ("C[m] = A[m,k+2*X[j]] * B[k] * D[j]", ["C[A_m[p]] = A_values[p] * B[A_k[p]-2*X[j]] * D[j] ; A_m:sorted"]),
    ("C[m] = A[m,3-k] * B[k]", ["C[A_m[p]] = A_values[p] * B[-A_k[p]+3] ; A_m:sorted"]),
    ("C[m,n] = A[m,k] * B[k,n] ; k:5", [PLAIN]),
    ("C[m] = A[m,k] * equal(A[m,k], 2)", ["C[A_m[p]] = A_values[p] * equal(A_values[p], 2) ; A_m:sorted"]),
    ("C[m] = A[m,k] * exists(A[m,k])", ["C[A_m[p]] = A_values[p] ; A_m:sorted"]),
    ("C[m,n] max= A[m,k] * B[k,n]", ["C[A_m[p],n] max= A_values[p] * B[A_k[p],n] ; A_m:sorted"]),
    ("C[A_m] = A[A_m,p] * p_[A_m]", ["C[A_m_[p__]] = A_values[p__] * p_[A_m_[p__]] ; A_m_:sorted"]),
]


@pytest.mark.parametrize(("text", "wanted"), SOLVED)
def test_solved(text, wanted):
    if wanted is None:
        assert "X[k]-k" in lower_statement(parse(text), {"A": stored("CSR")}).dense["A"]
    else:
        assert steps(text, A="CSR") == wanted


@pytest.mark.parametrize(
    ("text", "form", "reason"),
    [
        ("C[m,n] = A[m,k] * B[k,n] ; k:2..5", "CSR", "`k` cannot be solved for an index that is free there"),
        ("C[m,n] = A[m,k] * A[n,k]", "CSR", "`A_k[p]` cannot be solved"),
        ("C[m] = A[m,m]", "CSR", "`A_m[p]` cannot be solved"),
        ("C[m] = A[X[m],k]", "CSR", "`X[m]` cannot be solved"),
        ("C[m] = A[m,3]", "CSR", "`3` cannot be solved"),
        ("C[m] = exists(A[m,k])", "CSR", "`A[m,k]` is not a factor of a term"),
        ("C[m] = equal(A[m,k], 2)", "CSR", "`A[m,k]` is not a factor of a term"),
        ("C[p] = A[2*p+2*r] * W[r] * V[p]", "k:C", "`2*p+2*r` cannot be solved"),
        # The stored coordinate depends on the index that it would replace.
        ("C[m] = A[j,m,j]", "a:U b:U c:G", "`j` cannot be solved"),
        ("C[m] = A[m+1,m] * B[m]", "ELL", "`m` cannot be solved"),
    ],
)
def test_dense_where_it_cannot_be_solved(text, form, reason):
    done = lower_statement(parse(text), {"A": stored(form)})
    assert reason in done.dense["A"] and not done.arrays
    assert [str(step) for step in done.steps] == [str(step) for step in single_terms(parse(text))]


def test_two_sparse_operands():
    # One is taken apart first, and what it leaves cannot be solved for the other.
    done = lower_statement(parse(PRODUCT), {"A": stored("CSR"), "B": stored("CSR")})
    assert [str(step) for step in done.steps] == ["C[m,B_k[p]] = A[m,B_m[p]] * B_values[p] ; B_m:sorted"]
    assert list(done.dense) == ["A"] and set(done.arrays) == {"B_m", "B_k", "B_values"}
    # Axes that do not meet are solved each on its own.
    assert steps("C[i,j] = A[i] * B[j]", A="k:C", B="k:C") == [
        "C[A_k[p_],B_k[p]] = A_values[p_] * B_values[p] ; B_k:sorted, A_k:sorted"
    ]
    assert len(steps("C[i] = A[i] + B[i]", A="k:C", B="k:C")) == 2
    assert (
        len(steps("C[i,j] = A[i,k] * D[k] * B[j,l] * E[l]", A=stored("m:C k:G1,2", 2), B=stored("m:C k:G1,2", 2))) == 4
    )


@pytest.mark.parametrize("operator", ["max=", "min=", "mean="])
def test_the_other_operators_refuse_what_has_no_form(operator):
    for right, form, reason in (
        ("A[m,m] * B[m,n]", "CSR", "cannot be solved"),
        ("A[m,k] * B[m,n]", "ELL", "its coordinate k appears nowhere else"),
        ("exists(A[m,k]) * B[k,n]", "CSR", "is not a factor of a term"),
    ):
        with pytest.raises(OptionError) as raised:
            lower_statement(parse(f"C[m,n] {operator} {right}"), {"A": stored(form)})
        assert reason in str(raised.value) and operator in str(raised.value) and "pass it dense" in str(raised.value)
    with pytest.raises(OptionError, match="stored in 2 parts"):
        lower_statement(parse(f"C[m,n] {operator} A[m,k] * B[k,n]"), {"A": stored("m:C k:G1,2", 2)})
    with pytest.raises(OptionError, match="`k`, in blocks, appears nowhere else"):
        lower_statement(parse(f"C[m] {operator} A[m,k]"), {"A": stored("m:U k:U k:B4")})


@pytest.mark.parametrize("operator", ["max=", "min=", "mean="])
def test_lists_without_padding_need_no_coordinate_to_tell_it(operator):
    found = "C[A_m[p]] {} A_values[p] ; A_m:sorted"
    assert steps(f"C[m] {operator} A[m,k]", A=stored("CSR")) == [found.format(operator)]
    for form in ("ELL", "GroupCOO", "BCSR"):
        with pytest.raises(OptionError, match="appears nowhere else"):
            lower_statement(parse(f"C[m] {operator} A[m,k]"), {"A": stored(form)})
    # Entries of ones are counted by a coordinate.
    assert steps(f"C[m] {operator} A[m,k] * B[m]", A=stored("CSR", ones=True)) == [
        f"C[A_m[p]] {operator} B[A_m[p]] ; A_m:sorted"
    ]
    with pytest.raises(OptionError, match="coordinate k appears nowhere else"):
        lower_statement(parse(f"s {operator} A[k]"), {"A": stored("k:C", ones=True)})


def test_patterns_have_no_values():
    assert steps(PRODUCT, A=stored("CSR", ones=True)) == ["C[A_m[p],n] = B[A_k[p],n] ; A_m:sorted"]
    done = lower_statement(parse("C[m] = A[m,k] * B[m]"), {"A": stored("GroupCOO", ones=True)})
    assert "its coordinate k appears nowhere else" in done.dense["A"]


def test_rank():
    with pytest.raises(ShapeError, match=r"A\[m\] has 1 indices, its format has 2 axes"):
        lower_statement(parse("C[m] = A[m]"), {"A": stored("CSR")})


def test_arrays_are_indexed_where_windows_lie():
    assert steps("C[k] = A[3*n+2,k]", A="ELL") == ["C[A_k[3*n+2,q]] = A_values[3*n+2,q]"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("C[i] = A[i] - A[i]", "C[i] = 0"),
        ("C[i] = A[i] + A[i]", "C[i] = 2 * A[i]"),
        ("C[i] max= A[i] + A[i]", "C[i] max= A[i] + A[i]"),
        ("C[i] = A[i] * exists(B[i])", "C[i] = A[i]"),
        ("C[i] = A[i] * exists(A[i]) * exists(B[2*i]) * exists(B[2*i])", "C[i] = A[i] * exists(B[2*i])"),
        # A condition over an index of its own counts: each of its points is one.
        ("C[i] = A[i] * exists(B[k])", "C[i] = A[i] * exists(B[k])"),
        ("C[i] = A[i] * exists(B[k]) ; k:4", "C[i] = A[i] * exists(B[k]) ; k:4"),
        ("C[i] = exists(A[k]) * exists(B[k]) * D[i]", "C[i] = D[i] * exists(B[k])"),
        # A condition tells the range that a window would not.
        ("C[i] = A[2*j] * exists(B[j])", "C[i] = A[2*j] * exists(B[j])"),
        ("C[i] mean= A[i,k] * exists(B[k])", "C[i] mean= A[i,k]"),
    ],
)
def test_simplify(text, wanted):
    assert str(simplify(parse(text))) == wanted


def test_single_terms():
    split = single_terms(parse("C[i] += 2 * A[i,k] - B[i,j] ; k:3, j:4, C:[5], A:[_,3]"))
    assert [step.ranges for step in split] == [(("k", split[0].declared("k")),), (("j", split[1].declared("j")),)]
    assert all(step.accumulate and len(step.terms) == 1 for step in split)
    whole = parse("C[i] max= A[i] + B[i]")
    assert single_terms(whole) == (whole,)
