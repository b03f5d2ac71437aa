"""The oracle of the einsum language against explicit loops, numpy and numbers done by hand; and the fuzz generator."""

import re
import subprocess
import sys
from pathlib import Path

import einsum_fuzz
import numpy as np
import pytest
from einsum_fuzz import random_case
from einsum_oracle import OracleError, evaluate

RNG = np.random.default_rng(7)


def normal(*shape):
    return RNG.normal(size=shape)


def ints(*values):
    return np.array(values, dtype=np.int64)


def close(found, expected):
    expected = np.asarray(expected, dtype=np.float64)
    assert found.dtype == np.float64 and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


# Dense, against np.einsum
@pytest.mark.parametrize(
    ("text", "subscripts", "shapes"),
    [
        ("C[i,j] = A[i,k] * B[k,j]", "ik,kj->ij", ((3, 4), (4, 2))),
        ("C[b,i,j] = A[b,i,k] * B[b,k,j]", "bik,bkj->bij", ((2, 3, 4), (2, 4, 2))),
        ("C[i,j] = A[i] * B[j]", "i,j->ij", ((3,), (4,))),
        ("C[i] = A[i,i]", "ii->i", ((4, 4),)),
        ("C[j,i] = A[i,j]", "ij->ji", ((3, 2),)),
        ("C[i,l] = A[i,j] * B[j,k] * D[k,l]", "ij,jk,kl->il", ((2, 3), (3, 4), (4, 2))),
        ("C[row] = A[row,col_1] # sums the columns\n", "ij->i", ((3, 4),)),
    ],
)
def test_dense_products_are_those_of_numpy(text, subscripts, shapes):
    arrays = [normal(*shape) for shape in shapes]
    close(evaluate(text, dict(zip("ABD", arrays, strict=False))), np.einsum(subscripts, *arrays))


def test_trace_and_diagonal_of_the_target():
    a = normal(3, 3)
    close(evaluate("C[0] = A[i,i]", {"A": a}), [np.trace(a)])
    close(evaluate("C[i,i] = A[i,i]", {"A": a}), np.diag(np.diag(a)))


# Windows
def test_convolution_without_padding():
    a, w = normal(7), normal(3)
    close(evaluate("C[p] = A[p+r]*W[r]", {"A": a, "W": w}), np.correlate(a, w, "valid"))


def test_convolution_with_padding():
    a, w = normal(7), normal(3)
    close(evaluate("C[p] = A[p+r-1]*W[r]; p:7", {"A": a, "W": w}), np.correlate(a, w, "same"))


@pytest.mark.parametrize("extent", [7, 8])
def test_strided_convolution_takes_every_output_that_fits(extent):
    a, w = normal(extent), normal(3)
    expected = [sum(a[2 * p + r] * w[r] for r in range(3)) for p in range(3)]
    close(evaluate("C[p] = A[STR*p+r]*W[r]", {"A": a, "W": w, "STR": 2}), expected)


def test_transposed_convolution_writes_through_a_window():
    close(evaluate("C[2*p+r] = A[p]*W[r]", {"A": ints(1, 2, 3), "W": ints(1, 10, 100)}), [1, 10, 102, 20, 203, 30, 300])


def test_several_windows_share_a_range():
    a, b = ints(1, 2, 3, 4, 5, 6), ints(1, 2, 3)
    close(evaluate("C[p] = A[2*p]*B[p+1]", {"A": a, "B": b}), [1 * 2, 3 * 3])


def test_a_window_fixes_one_index_when_the_other_is_declared():
    a = normal(5)
    close(evaluate("C[i] = A[i+r]; i:3", {"A": a}), [a[0:3].sum(), a[1:4].sum(), a[2:5].sum()])


def test_a_declared_span_starts_late():
    a = ints(1, 2, 3, 4, 5, 6, 7)
    close(evaluate("C[p] = A[p]; p:2..5", {"A": a}), [0, 0, 3, 4, 5])
    close(evaluate("C[0] = A[p]; p:2..5", {"A": a}), [12])


@pytest.mark.parametrize(("operator", "join"), [("max=", max), ("min=", min), ("mean=", np.mean)])
def test_pooling_skips_the_padding(operator, join):
    """Negative numbers: a zero of the padding would be the largest, and would pull the mean."""
    windows = [[-1], [-1, -5], [-5, -3], [-3, -2], [-2, -4], [-4], []]
    expected = [join(window) if window else 0 for window in windows]
    close(evaluate(f"C[p] {operator} A[p+r-1]; p:7, r:2", {"A": ints(-1, -5, -3, -2, -4)}), expected)


# Index arrays
def test_coo_matrix_product():
    a = np.array([[0, 2, 0], [0, 0, 0], [3, 0, 5]], dtype=np.float64)
    rows, cols = np.nonzero(a)
    b = normal(3, 4)
    found = evaluate("C[AM[p],n] = AV[p]*B[AK[p],n]; C:[3,_]", {"AM": rows, "AK": cols, "AV": a[rows, cols], "B": b})
    close(found, a @ b)


def test_coo_with_duplicates_adds_up():
    close(evaluate("C[I[p]] = A[p]", {"I": ints(1, 1, 0, 1), "A": ints(1, 2, 4, 8)}, shape=(3,)), [4, 11, 0])


def test_group_coo_with_padding():
    values, b = normal(2, 3), normal(4, 2)
    cols = np.array([[0, 2, -1], [3, -1, -1]], dtype=np.int64)
    expected = np.zeros((5, 2))
    expected[1] = values[0, 0] * b[0] + values[0, 1] * b[2]
    expected[4] = values[1, 0] * b[3]
    passed = {"AM": ints(1, 4), "AV": values, "AK": cols, "B": b, "C": np.zeros((5, 2))}
    close(evaluate("C[AM[p],n] += AV[p,q] * B[AK[p,q],n]", passed), expected)
    assert not passed["C"].any()


def test_a_negative_row_is_not_written():
    close(evaluate("C[I[p]] = A[p]; C:[2]", {"I": ints(-1, 0, -1), "A": ints(1, 2, 4)}), [2, 0])


def test_nested_gather():
    x, y, z = ints(2, -1, 0), ints(0, 1, 2, 2), ints(3, 0, -1)
    a = ints(10, 20, 30)
    close(evaluate("C[i] = A[X[Y[i]]]", {"A": a, "X": x, "Y": y}), [30, 0, 10, 10])
    # Z = 3, 0, -1; Y of it 2, 0, nothing; X of that 0, 2, nothing.
    close(evaluate("C[i] = A[X[Y[Z[i]]]]", {"A": a, "X": x, "Y": y, "Z": z}), [10, 30, 0])


def test_an_affine_expression_around_an_index_array():
    close(evaluate("C[p] = A[2*X[p]+r]; r:2", {"A": ints(1, 2, 4, 8, 16), "X": ints(0, -1, 2, 1)}), [3, 0, 16, 12])


def test_a_missing_index_stays_missing_with_an_offset():
    close(evaluate("C[p] = A[X[p]+1]", {"A": ints(5, 6), "X": ints(-1, 0)}), [0, 6])


# Sums, scalars, operators
def test_each_term_is_summed_over_its_own_indices():
    a, b, d = normal(3, 4), normal(4), normal(3)
    close(evaluate("C[i] = A[i,k]*B[k] + D[i]", {"A": a, "B": b, "D": d}), a @ b + d)
    close(evaluate("C[i] = D[i] * (B[k] - 2)", {"B": b, "D": d}), d * (b.sum() - 2))


def test_a_term_is_written_for_every_index_of_the_target():
    close(evaluate("C[I[p]] = A[p] + 1; C:[2]", {"I": ints(0, 0, 1), "A": ints(1, 2, 4)}), [5, 5])


def test_a_missing_factor_takes_only_its_own_term():
    passed = {"A": ints(1, 2, 4), "X": ints(0, -1, 2), "B": ints(10, 20, 30)}
    close(evaluate("C[i] = A[X[i]] + B[i]", passed), [11, 20, 34])
    close(evaluate("C[i] max= A[X[i]] + B[i]", passed), [11, 0, 34])


def test_other_operators_see_the_whole_nest():
    a, d = ints(1, 5), ints(10, 20, 30)
    close(evaluate("C[i] max= D[i] + A[k]", {"A": a, "D": d}), [15, 25, 35])
    close(evaluate("C[i] mean= D[i] + A[k]", {"A": a, "D": d}), [13, 23, 33])


def test_min_plus_product():
    a, b = normal(3, 4), normal(4, 2)
    close(evaluate("C[i,j] min= A[i,k] + B[k,j]", {"A": a, "B": b}), (a[:, :, None] + b[None]).min(axis=1))


def test_coefficients_and_scalars():
    a = normal(4)
    passed = {"A": a, "alpha": 0.5, "beta": np.asarray(3.0)}
    close(evaluate("C[i] = -2*A[i]*alpha + .5e1 * beta - A[i]", passed), -2 * a + 15)


def test_what_is_passed_as_the_target():
    old = np.array([1.0, 1.0, 7.0])
    passed = {"I": ints(0, 1, 1), "A": ints(4, -3, -5), "C": old}
    close(evaluate("C[I[p]] = A[p]", passed), [4, -8, 0])
    close(evaluate("C[I[p]] += A[p]", passed), [5, -7, 7])
    close(evaluate("C[I[p]] max= A[p]", passed), [4, 1, 7])
    close(evaluate("C[I[p]] min= A[p]", passed), [1, -5, 7])
    close(evaluate("C[I[p]] mean= A[p]", passed), [4, -4, 0])
    close(old, [1, 1, 7])


def test_broadcast_to_indices_of_the_target_only():
    a = normal(3)
    close(evaluate("C[i,j] = A[i]; j:2", {"A": a}), np.repeat(a[:, None], 2, axis=1))
    close(evaluate("C[i,j] = A[i]; C:[_,2]", {"A": a}), np.repeat(a[:, None], 2, axis=1))
    close(evaluate("C[i,j] += A[i]", {"A": a, "C": np.ones((3, 2))}), 1 + np.repeat(a[:, None], 2, axis=1))


@pytest.mark.parametrize("operator", ["=", "max=", "min=", "mean="])
def test_nothing_gives_zeros(operator):
    empty = {"I": ints(), "A": np.zeros(0), "B": np.zeros((3, 0))}
    close(evaluate(f"C[I[p]] {operator} A[p]; C:[2]", empty), [0, 0])
    close(evaluate(f"C[i] {operator} B[i,k]", empty), [0, 0, 0])
    close(evaluate(f"C[k] {operator} A[k]", empty), np.zeros(0))


def test_exists_and_equal():
    passed = {"X": ints(1, -1, 0, -1), "A": ints(5, 6), "S": ints(0, 1, 1, 2), "B": ints(1, 2, 4, 8)}
    close(evaluate("C[0] = exists(X[i])", passed), [4])
    close(evaluate("C[i] = exists(A[X[i]])", passed), [1, 0, 1, 0])
    close(evaluate("C[i] = exists(A[i+j-1]); i:4, j:1", passed), [0, 1, 1, 0])
    close(evaluate("C[i] = B[i] * equal(S[i], 1)", passed), [0, 2, 4, 0])
    # S is 0, 1, 1, 2: rows i and columns j where S[i] = S[j] + 1.
    expected = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]]
    close(evaluate("C[i,j] = equal(S[i], S[j] + 1)", passed), expected)


def test_exists_is_a_number_under_every_operator():
    """exists(...) is 0 where nothing is there: the point counts all the same."""
    passed = {"X": ints(0, -1, 1, -1), "A": ints(5, 6), "B": ints(-1, -2, -4, -8)}
    close(evaluate("C[0] mean= B[i] * exists(A[X[i]])", passed), [-5 / 4])
    close(evaluate("C[0] max= B[i] * exists(A[X[i]])", passed), [0])


def test_space_comments_and_names():
    text = "out_1 [ β ,\n n0 ]  # what # is written\n += val[β,\tk1]*Wé[ k1 , n0 ] ;\n β : M # the rows\n"
    a, b = normal(2, 3), normal(3, 4)
    close(evaluate(text, {"val": a, "Wé": b, "out_1": np.zeros((2, 4)), "M": 2}), a @ b)


def test_parenthesised_indices():
    a = normal(9)
    close(evaluate("C[p] = A[2*(p+1)-(p-1)]; p:5", {"A": a}), a[3:8])


# What is refused
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("C[i] = A[i]*M[i,j]", "different extents"),
        ("C[i] = A[i+r]", "not determined"),
        ("C[i] = A[i-1]", "left of a window"),
        ("C[i] = A[i]; i:4", "declared"),
        ("C[i] = A[i]; i:2..6", "declared"),
        ("C[i] = A[i]; z:4", "not used"),
        ("C[X[i]] = A[i]", "declare its shape"),
        ("C[i,j] = A[i]", "not determined"),
        ("C[i] += A[i]", "not passed"),
        ("C[i] = B[i]", "not passed"),
        ("C[i] = M[i]", "axes are used"),
        ("C[A] = X[A]", "an index and an operand"),
        ("C[i] = X[A[i]]", "does not hold integers"),
        ("C[i-1] = A[i]", "starts at -1"),
        ("C[i] = A[7]; i:2", "spans"),
        ("C[i] = A[i*i]", "not affine"),
        ("C[i] = A[i", "expected"),
        ("C[i] = A[i] A[i]", "expected"),
        ("C[i] = A[i] ? 2", "cannot read"),
    ],
)
def test_what_is_refused(text, message):
    passed = {"A": normal(5), "M": normal(3, 5), "X": ints(0, 1, 2, 3, 4)}
    with pytest.raises(OracleError, match=message):
        evaluate(text, passed)


# The generator
COVERED = """1 factors;2 factors;3 factors;4 factors;1 terms;2 terms;3 terms;=;+=;max=;min=;mean=;coefficient;
scalar operand;given integer;stride;negative offset;window leaves;range from a window;indirect factor;
indirect target;depth 1;depth 2;depth 3;-1 in an index array;duplicates in an index array;
duplicated scatter;affine around an index array;diagonal;diagonal of the target;zero-size operand;
size-1 axis;empty index array;only in the target;operand used twice;passed under =;passed under max=;
passed under min=;passed under mean=;target declared;target declared in part;comment;odd whitespace;
declared size;declared span;window in the target;parenthesised sum;parenthesised index;exists;equal;
term without an index;constant index;target window leaves"""


@pytest.fixture(scope="module")
def counts():
    return einsum_fuzz.self_test(300)


@pytest.mark.parametrize("feature", re.split(r";\s*", COVERED))
def test_the_generator_covers(counts, feature):
    assert counts[feature] >= 5, feature


def test_the_generator_gives_the_same_everywhere():
    """In another process with another hash seed: the same texts and the same numbers."""
    code = "import einsum_fuzz as f; print([(c.text, sorted((k, str(v)) for k, v in c.operands.items()))" + (
        " for c in map(f.random_case, range(40))])"
    )
    folder = str(Path(einsum_fuzz.__file__).parent)
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env={"PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1


def test_a_case_has_the_promised_types():
    for seed in range(100):
        for value in random_case(seed).operands.values():
            assert isinstance(value, int) or value.dtype in (np.float64, np.int64)


def test_most_cases_write_something():
    cases = [random_case(seed) for seed in range(200)]
    assert sum(bool(evaluate(case.text, case.operands).any()) for case in cases) > 150
