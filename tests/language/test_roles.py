"""roles: which index is which in the contractions that the language is for."""

import pytest

from pumice.language.contraction import Segment, contraction_roles, segment_axis, stacked
from pumice.language.formats import parse_format
from pumice.language.nodes import indices_of
from pumice.language.parse import parse
from pumice.language.rewrite import StorageForm, lower_statement
from pumice.lower.dataflow import CONV as CONV_LINE
from pumice.lower.dataflow import GROUPED_CONV
from pumice.lower.maps import FORMS

LARGE = dict.fromkeys("ijk", 64)


def told(text, extents):
    """What is told, in short: product?, rows, columns, reduced, loops, batch, as strings of names."""
    found = contraction_roles(parse(text), extents)
    axes = (found.rows, found.columns, found.reduced, found.loops, found.batch)
    return (found.product, *(" ".join(names) for names in axes))


@pytest.mark.parametrize(
    ("text", "extents", "wanted"),
    [
        ("C[i,j] = A[i,k] * B[k,j]", LARGE, (True, "i", "j", "k", "", "")),
        ("C[j,i] = A[i,k] * B[k,j]", LARGE, (True, "j", "i", "k", "", "")),
        ("C[b,i,j] = A[b,i,k] * B[b,k,j]", {"b": 4, **LARGE}, (True, "i", "j", "k", "", "b")),
        # What is read most lies along the reduction.
        ("C[i,j] = A[i,k] * B[k,j]", {**LARGE, "j": 4}, (False, "i j", "k", "", "", "")),
        ("C[i,j] = A[i,k] * B[k,j]", {**LARGE, "k": 4}, (False, "i", "j", "", "k", "")),
        ("C[i,j] = A[i,k] * B[k,j]", dict.fromkeys("ijk", 4), (False, "i", "j", "", "k", "")),
        ("C[i,j] = A[i] * B[j]", LARGE, (False, "i", "j", "", "", "")),
        ("C[i,j] = A[i,k] * B[k,j] * exists(X[i])", LARGE, (False, "i j", "k", "", "", "")),
        ("C[i,j] = A[i,a,b] * B[a,b,j]", {**LARGE, "a": 3, "b": 4}, (True, "i", "j", "a b", "", "")),
        ("C[i,j] = A[i,a,b] * B[a,b,j]", {**LARGE, "a": 9, "b": 32}, (True, "i", "j", "b", "a", "")),
        ("C[i] = A[i,k]", LARGE, (False, "i", "k", "", "", "")),
        ("C[i,j] = A[j,i]", LARGE, (False, "i", "j", "", "", "")),
    ],
)
def test_dense(text, extents, wanted):
    assert told(text, extents) == wanted


def test_a_reduction_may_be_the_columns():
    assert contraction_roles(parse("C[i] = A[i,k]"), LARGE).folds
    assert not contraction_roles(parse("C[i,j] = A[i,j]"), LARGE).folds


def of(text, form, name="A"):
    """The only step of a statement with an operand in a format."""
    (step,) = lower_statement(parse(text), {name: StorageForm.of(parse_format(form))}).steps
    return step


PRODUCT = "C[m,n] = A[m,k] * B[k,n]"


def test_structured_products():
    step = of(PRODUCT, "BlockGroupCOO")
    found = contraction_roles(step, {"p": 100, "q": 4, "m_in": 32, "k_in": 32, "n": 64})
    assert found.product and (found.rows, found.columns, found.reduced) == (("m_in",), ("n",), ("k_in",))
    assert found.loops == ("p", "q") and found.batch == ("s",) and not found.atomic
    assert found.segment == Segment("A_m", "p", "s") and str(found.target) == "C[32*s+m_in,n]"
    assert segment_axis(found) == ("", 0, 32)


@pytest.mark.parametrize("form", ["COO", "CSR", "GroupCOO", "m:C k:G4"])
def test_unstructured_products(form):
    found = contraction_roles(of(PRODUCT, form), {"p": 100, "q": 4, "n": 64})
    assert not found.product and (found.rows, found.columns) == (("s",), ("n",))
    assert found.segment == Segment("A_m", "p", "s") and not found.atomic
    assert found.loops == (("p",) if form in ("COO", "CSR") else ("p", "q"))
    assert segment_axis(found) == ("", 0, 1)


@pytest.mark.parametrize("form", ["COO", "CSR", "GroupCOO", "m:C k:G4"])
def test_segments_stack_as_rows_of_a_product(form):
    """Entry by entry each row has a loop; stacked, the entries of all rows are one reduction."""
    statement, extents = of(PRODUCT, form), {"p": 100, "q": 4, "n": 64}
    found = stacked(contraction_roles(statement, extents), statement)
    assert found is not None and found.product and found.stacked and not found.laned
    assert found.reduced == (("p",) if form in ("COO", "CSR") else ("p", "q"))
    (left,), (right,) = found.left, found.right
    factors = statement.terms[0].factors
    assert "n" in indices_of(factors[right]) and "n" not in indices_of(factors[left])


def test_what_does_not_stack():
    texts = {
        "C[R[p],n] += V[p] * B[K[p],n]": "rows are not sorted",
        "C[R[p]] = V[p] * W[p] ; R:sorted": "no columns",
        "C[R[p],n] = V[p] * W[p] * B[K[p],n] ; R:sorted": "two factors on the left",
        "C[R[p],n] = D[p,n] * B[K[p],n] ; R:sorted": "two factors on the right",
    }
    for text in texts:
        statement = parse(text)
        assert stacked(contraction_roles(statement, {"p": 100, "n": 64}), statement) is None, texts[text]


def test_without_sorted_rows_results_are_added():
    found = contraction_roles(of(PRODUCT, "CSC"), {"p": 100, "n": 64})
    assert found.segment is None and found.atomic
    ell = contraction_roles(of(PRODUCT, "ELL"), {"m": 50, "q": 4, "n": 64})
    assert ell.segment is None and not ell.atomic and ell.rows == ("m",)


@pytest.mark.parametrize("axis", ["M[p]-r", "M[p]+r-1", "3*M[p]-1", "3*M[p]+q-r"])
def test_an_axis_with_a_negative_part_has_no_segments(axis):
    """Segments past the end of the axis would write to it."""
    text = f"C[{axis},n] = A[p,n,q,r] ; M:sorted, C:[6,_]"
    extents = {"p": 100, "n": 64, "q": 3, "r": 3}
    assert contraction_roles(parse(text), extents).segment is None
    assert contraction_roles(parse(text.replace("-", "+")), extents).segment is not None


def test_an_axis_that_runs_backwards_has_no_segments():
    """Segments count upwards from the first place of the axis."""
    text = "C[{}R[p],n] += V[p] * B[K[p],n] ; R:sorted"
    assert contraction_roles(parse(text.format("9-")), {"p": 100, "n": 64}).segment is None
    assert contraction_roles(parse(text.format("9+")), {"p": 100, "n": 64}).segment == Segment("R", "p", "s")


CONV = {
    "forward": "O[o,n] = map[o,k,i] * X[i,c] * W[n,k,c]",
    "dgrad": "D[i,c] = map[o,k,i] * G[o,n] * W[n,k,c]",
    "wgrad": "D[n,k,c] = map[o,k,i] * G[o,n] * X[i,c]",
}
SIZES = {"p": 1000, "e": 64, "b": 64, "g": 10, "q": 64, "n": 32, "c": 16}


@pytest.mark.parametrize(
    ("form", "pass_", "product", "axes", "segment", "adds"),
    [
        ("pairs", "forward", False, ("n", "c", ""), "", True),
        ("pairs", "dgrad", False, ("p", "c", ""), "", True),
        ("pairs", "wgrad", False, ("s", "c", ""), "map_k", False),
        ("compacted", "forward", True, ("b", "n", "c"), "map_tile", False),
        ("compacted", "dgrad", True, ("b", "c", "n"), "", True),
        ("compacted", "wgrad", True, ("n", "c", "b"), "", True),
        ("compacted_t", "forward", True, ("b", "n", "c"), "", True),
        ("compacted_t", "dgrad", True, ("b", "c", "n"), "map_tile", False),
        ("grouped", "forward", True, ("q", "n", "c"), "", True),
        ("grouped", "wgrad", True, ("n", "c", "q"), "", True),
    ],
)
def test_convolutions(form, pass_, product, axes, segment, adds):
    (step,) = lower_statement(parse(CONV[pass_]), {"map": FORMS[form].storage_form}).steps
    found = contraction_roles(step, SIZES)
    assert found.product == product and found.atomic == adds
    assert tuple(" ".join(names) for names in (found.rows, found.columns, found.reduced)) == axes
    assert (found.segment.array if found.segment else "") == segment


@pytest.mark.parametrize("weights", ["W[l,u,w]", "W[b,l,u,w]"])
def test_tensor_products(weights):
    step = of(f"Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * {weights}", "(i j k l):C", "CG")
    found = contraction_roles(step, {"b": 128, "w": 16, "u": 16, "p": 40})
    assert found.segment == Segment("CG_i", "p", "s") and not found.atomic and str(found.target) == "Z[b,s,w]"
    if weights == "W[l,u,w]":
        assert found.product and (found.rows, found.columns, found.reduced) == (("b",), ("w",), ("u",))
        assert found.loops == ("p",) and found.batch == ("s",) and (found.left, found.right) == ((0, 1, 2), (3,))
    else:
        # Weights of each sample leave no index to the left side alone.
        assert not found.product and found.columns == ("w",) and set(found.loops) == {"p", "u"}


@pytest.mark.parametrize(
    ("text", "extents", "adds"),
    [
        ("C[2*i+j] = A[i,j]", {"i": 8, "j": 2}, False),
        ("C[2*i+j] = A[i,j]", {"i": 8, "j": 3}, True),
        # Not seen to be written once, which costs time and nothing else.
        ("C[i,i+j] = A[i,j]", {"i": 8, "j": 3}, False),
        ("C[X[p]] = A[p]", {"p": 8}, True),
        ("C[X[p]] = A[p] ; X:distinct", {"p": 8}, False),
        ("C[X[p]+1] = A[p] ; X:distinct", {"p": 8}, False),
        ("C[X[p],p] = A[p]", {"p": 8}, False),
        ("C[X[p]] = A[p,q] ; X:distinct", {"p": 8, "q": 3}, False),
        ("C[2] = A[p]", {"p": 8}, False),
    ],
)
def test_whether_entries_are_written_twice(text, extents, adds):
    assert contraction_roles(parse(text), extents).atomic == adds


def test_every_index_has_one_part():
    for text, extents in (
        ("C[b,i,j] = A[b,i,k] * B[b,k,j] * D[l]", {"b": 4, "l": 3, **LARGE}),
        ("C[X[p],i] = A[p,q] * B[Y[p,q],i] ; X:sorted", {"p": 9, "q": 8, "i": 64}),
        ("C[i] = A[i,k] * B[j]", LARGE),
    ):
        found = contraction_roles(parse(text), extents)
        parts = [*found.rows, *found.columns, *found.reduced, *found.loops, *found.batch]
        assert len(parts) == len(set(parts))
        assert set(parts) - {"s"} == set(indices_of(parse(text))) - ({"s"} if found.segment is None else set())


@pytest.mark.parametrize(
    ("sizes", "columns"),
    [({"n": 32, "c": 4}, ("n",)), ({"g": 64, "n": 1, "c": 1}, ("g", "n")), ({"g": 4, "n": 4, "c": 4}, ("g", "n"))],
)
def test_few_channels_leave_tiles_of_outputs(sizes, columns):
    """No matrix product is in them; the outputs of a tile of the map are the rows, and each program has one tile."""
    text = GROUPED_CONV if "g" in sizes else CONV_LINE
    (step,) = lower_statement(parse(text), {"map": FORMS["compacted"].storage_form}).steps
    found = contraction_roles(step, {"b": 128, "e": 900, **sizes})
    assert not found.product and not found.laned and not found.atomic
    assert (found.rows, found.columns, found.batch) == (("b",), columns, ("s",))
    assert found.loops == ("e", "c")


def test_an_index_that_stands_twice_is_one_column():
    assert contraction_roles(parse("T[i,X[j]] = A[j,j]"), {"i": 2, "j": 3}).columns == ("j",)
