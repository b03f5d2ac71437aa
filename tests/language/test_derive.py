"""derivative, count and declare: the texts of derived statements. Their values are checked in tests/einsum."""

import pytest

from pumice.language.derive import count, declare, derivative, fresh, gradient_name, names_of, result_name
from pumice.language.nodes import Range
from pumice.language.parse import parse


def derived(text, operand):
    return [str(new) for new in derivative(parse(text), operand)]


@pytest.mark.parametrize(
    ("text", "operand", "wanted"),
    [
        ("C[i,j] = A[i,k] * B[k,j]", "A", ["dA[i,k] = grad[i,j] * B[k,j]"]),
        ("C[i,j] = A[i,k] * B[k,j]", "B", ["dB[k,j] = A[i,k] * grad[i,j]"]),
        ("C[t] += 2 * A[t,k] * B[k]", "A", ["dA[t,k] = 2 * grad[t] * B[k]"]),
        ("C[t] += A[t]", "C", []),
        ("C[i] = A[i,k] * A[k,i]", "A", ["dA[i,k] = grad[i] * A[k,i]", "dA[k,i] = A[i,k] * grad[i]"]),
        ("C[i] = A[i,k] - 3 * A[k,i]", "A", ["dA[i,k] = grad[i]", "dA[k,i] = -3 * grad[i]"]),
        ("C[X[p],n] += A[p] * B[Y[p],n]", "B", ["dB[Y[p],n] = A[p] * grad[X[p],n]"]),
        ("C[p] = A[X[p]] * X[p]", "X", ["dX[p] = A[X[p]] * grad[p]"]),
        ("C[i] = A[2*i+r] * W[r] ; i:4", "A", ["dA[2*i+r] = grad[i] * W[r] ; i:4"]),
        ("C[i] = A[2*i+r] * W[r] ; i:4", "W", ["dW[r] = A[2*i+r] * grad[i] ; i:4"]),
        ("C[i] = s * A[i]", "s", ["ds = grad[i] * A[i]"]),
        ("C[i] = exists(A[i]) * B[i] + D[i]", "A", []),
        ("C[i] = equal(A[i], 2) * B[i]", "B", ["dB[i] = equal(A[i], 2) * grad[i]"]),
        ("C[A[p]] = B[p] * D[p] ; A:sorted, C:[4]", "B", ["dB[p] = grad[A[p]] * D[p] ; A:sorted"]),
        ("C[i] = grad[i] * dA[i] * A[i]", "A", ["dA_[i] = grad[i] * dA[i] * grad_[i]"]),
        # Under max and min the points that equal the result, under mean all; where all of the right side is there.
        ("C[i] max= A[i,k]", "A", ["dA[i,k] = grad[i] * equal(C_result[i], A[i,k])"]),
        (
            "C[i] min= A[i,k] + B[k]",
            "A",
            ["dA[i,k] = grad[i] * exists(B[k]) * equal(C_result[i], A[i,k] + B[k])"],
        ),
        ("C[i] mean= A[i,k] * B[k]", "B", ["dB[k] = A[i,k] * grad[i]"]),
        ("C[i] mean= A[i,k] + B[k]", "A", ["dA[i,k] = grad[i] * exists(B[k])"]),
    ],
)
def test_derivatives(text, operand, wanted):
    assert derived(text, operand) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("C[i] mean= A[i,k] * B[k]", "C[i] = exists(A[i,k]) * exists(B[k])"),
        ("C[X[p]] mean= A[p] + A[p] * B[p] ; C:[3]", "C[X[p]] = exists(A[p]) * exists(B[p]) ; C:[3]"),
        ("C[i] max= A[i,k]", "C[i] = equal(C_result[i], A[i,k])"),
        ("C[i] min= 2 * A[i,k] + B[k] ; k:3", "C[i] = equal(C_result[i], 2 * A[i,k] + B[k]) ; k:3"),
    ],
)
def test_counts(text, wanted):
    made = count(parse(text))
    assert str(made) == wanted and made.reduction == "sum" and not made.accumulate


def test_derivatives_of_derivatives():
    (first,) = derivative(parse("C[i] = A[i,k] * B[k]"), "A")
    assert [str(new) for new in derivative(first, gradient_name(parse("C[i] = A[i,k] * B[k]")))] == [
        "dgrad[i] = grad_[i,k] * B[k]"
    ]
    assert [str(new) for new in derivative(first, "B")] == ["dB[k] = grad[i] * grad_[i,k]"]


def test_declare():
    (new,) = derivative(parse("C[p] = A[2*p+r] * W[r]"), "A")
    ranges = {"p": Range(0, 4), "r": Range(0, 3)}
    assert declare(new, ranges) == new
    (new,) = derivative(parse("C[2*p+q] = A[p] * W[q+1]"), "A")
    assert str(new) == "dA[p] = grad[2*p+q] * W[q+1]"
    made = declare(new, {"p": Range(0, 4), "q": Range(0, 2)})
    assert str(made) == "dA[p] = grad[2*p+q] * W[q+1] ; q:2"
    assert declare(made, {"p": Range(0, 4), "q": Range(0, 9)}) == made


def test_names():
    statement = parse("C[i] = grad[i] * C_result[X[i]]")
    assert names_of(statement) == ("C", "grad", "C_result", "X", "i")
    assert gradient_name(statement) == "grad_" and result_name(statement) == "C_result_"
    assert fresh("a", ["b"]) == "a" and fresh("a", ["a", "a_"]) == "a__"


@pytest.mark.parametrize(
    "text", ["C[i] = A[i,k] * B[k]", "C[i] max= A[i,k] + B[k]", "C[X[p]] mean= A[Y[p]] ; C:[3], p:4"]
)
def test_derived_texts_read_as_they_print(text):
    for new in derivative(parse(text), "A"):
        assert parse(str(new)) == new
