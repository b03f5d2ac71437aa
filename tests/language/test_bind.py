"""bind: the range of every index and the target's shape, rule by rule, and what does not fit."""

import pytest
from einsum_fuzz import random_case
from einsum_oracle import evaluate

from pumice.errors import ShapeError
from pumice.language.bind import bind, span_of
from pumice.language.nodes import Range
from pumice.language.parse import parse


def sizes(text, shape=None, strict=True, **shapes):
    """Ranges as (start, stop) by index, the target's shape, the indices that only windows or the text tell."""
    bound = bind(parse(text), shapes, shape, strict)
    return {name: (r.start, r.stop) for name, r in bound.ranges.items()}, bound.shape, set(bound.windowed)


SIZES = [
    # bare axes, of operands, of index arrays, of the target
    ("C[i,j] = A[i,k] * B[k,j]", {"A": (3, 4), "B": (4, 5)}, {"i": (0, 3), "k": (0, 4), "j": (0, 5)}, (3, 5), ""),
    ("C[p] = A[X[p]]", {"A": (9,), "X": (4,)}, {"p": (0, 4)}, (4,), ""),
    ("C[i] = A[i,i]", {"A": (3, 3)}, {"i": (0, 3)}, (3,), ""),
    ("C[i] = A[j]", {"A": (3,), "C": (5,)}, {"i": (0, 5), "j": (0, 3)}, (5,), ""),
    ("C[X[p]] += A[p]", {"A": (4,), "X": (4,), "C": (7,)}, {"p": (0, 4)}, (7,), ""),
    ("C[i] = A[i]", {"A": (0,)}, {"i": (0, 0)}, (0,), ""),
    ("C[i] = s * A[i]", {"A": (2,), "s": ()}, {"i": (0, 2)}, (2,), ""),
    # windows: the largest range from 0 that stays inside
    ("C[p] = A[2*p+r] * W[r]", {"A": (10,), "W": (3,)}, {"r": (0, 3), "p": (0, 4)}, (4,), "p"),
    ("C[p] = A[p+r] * W[r]", {"A": (2,), "W": (3,)}, {"r": (0, 3), "p": (0, 0)}, (0,), "p"),
    ("C[p] = A[3-p]", {"A": (9,)}, {"p": (0, 4)}, (4,), "p"),
    ("C[p] = A[2*p]", {"A": (7,)}, {"p": (0, 4)}, (4,), "p"),
    ("C[p] = A[p+1] * B[p+2]", {"A": (9,), "B": (5,)}, {"p": (0, 3)}, (3,), "p"),
    ("C[q] = A[p+q] * B[p+2]", {"A": (9,), "B": (5,)}, {"p": (0, 3), "q": (0, 7)}, (7,), "p q"),
    # declared
    ("C[p] = A[2*p+r-1] * W[r] ; p:5", {"A": (9,), "W": (3,)}, {"p": (0, 5), "r": (0, 3)}, (5,), "p"),
    ("C[p] = A[p] ; p:4", {"A": (4,)}, {"p": (0, 4)}, (4,), "p"),
    ("C[p] = A[p] ; p:1..3", {"A": (4,)}, {"p": (1, 3)}, (3,), "p"),
    ("C[p] = A[p] ; p:1..3, C:[9]", {"A": (4,)}, {"p": (1, 3)}, (9,), "p"),
    ("C[i,j] = A[i] ; j:3", {"A": (2,)}, {"i": (0, 2), "j": (0, 3)}, (2, 3), "j"),
    ("C[X[p],i] = A[p,i] ; C:[7,_]", {"A": (2, 3), "X": (2,)}, {"p": (0, 2), "i": (0, 3)}, (7, 3), ""),
    ("C[i] = A[i] ; A:[_], C:[3]", {"A": (3,)}, {"i": (0, 3)}, (3,), ""),
    # affine targets: the largest value + 1
    ("C[2*i+j] = A[i,j]", {"A": (3, 2)}, {"i": (0, 3), "j": (0, 2)}, (6,), ""),
    ("C[4-i] = A[i]", {"A": (3,)}, {"i": (0, 3)}, (5,), ""),
    ("C[3] = A[i]", {"A": (3,)}, {"i": (0, 3)}, (4,), ""),
    ("C[i+1] = A[i]", {"A": (0,)}, {"i": (0, 0)}, (0,), ""),
    ("C[i+1] = A[i]", {"A": (2,), "C": (9,)}, {"i": (0, 2)}, (9,), ""),
    ("C[i-1] = A[i] ; i:3", {"A": (3,)}, {"i": (0, 3)}, (2,), "i"),
]


@pytest.mark.parametrize(("text", "shapes", "ranges", "shape", "windowed"), SIZES)
def test_sizes(text, shapes, ranges, shape, windowed):
    assert sizes(text, **shapes) == (ranges, shape, set(windowed.split()))


def test_a_shape_that_is_known_counts_as_an_operand():
    assert sizes("C[i,j] = A[i]", (2, 5), A=(2,)) == ({"i": (0, 2), "j": (0, 5)}, (2, 5), set())
    assert sizes("C[X[p]] = A[p]", (5,), A=(2,), X=(2,))[1] == (5,)


REFUSED = [
    ("C[i] = A[i] * B[i]", {"A": (3,), "B": (4,)}, "index i is 3 on axis 0 of A[i] and 4 on axis 0 of B[i]"),
    ("C[i] = A[i] * B[i]", {"A": (3,), "B": (1,)}, "index i is 3 on axis 0 of A[i] and 1 on axis 0 of B[i]"),
    ("C[i] = A[i] * B[i]", {"A": (3,)}, "no operand B is given"),
    ("C[i] = A[i]", {"A": (3, 2)}, "A[i] has 1 indices, the operand A has 2 axes"),
    ("C[i] = A[i]", {"A": (3,), "C": (3, 1)}, "C[i] has 1 indices, its operand has shape [3, 1]"),
    ("C[i] = A[i]", {"A": (3,), "C": (4,)}, "index i is 3 on axis 0 of A[i] and 4 on axis 0 of C[i]"),
    ("C[p] = A[p+q]", {"A": (3,)}, "index p has no size"),
    ("C[i,j] = A[i]", {"A": (3,)}, "index j has no size"),
    ("C[X[p]] = A[p]", {"A": (3,), "X": (3,)}, "axis 0 of C[X[p]] is addressed through X[p]"),
    ("C[i] = A[i] ; i:2", {"A": (3,)}, "index i is declared as 2, axis 0 of A[i] has extent 3"),
    ("C[i] = A[i] ; i:2..4", {"A": (3,)}, "index i is declared as 2..4, axis 0 of A[i] has extent 3"),
    ("C[i] = A[i] ; C:[2]", {"A": (3,), "C": (3,)}, "C is declared as [2], the operand has shape [3]"),
    ("C[i] = A[i] ; A:[2]", {"A": (3,)}, "A is declared as [2], the operand has shape [3]"),
    ("C[i] = A[i] * B[i+1]", {"A": (3,), "B": (3,)}, "i+1 runs from 1 to 3, but axis 0 of B[i+1] has extent 3"),
    ("C[i] = A[i] * B[i-1]", {"A": (3,), "B": (3,)}, "i-1 runs from -1 to 1"),
    ("C[i] = A[i,7]", {"A": (3, 2)}, "7 runs from 7 to 7, but axis 1 of A[i,7] has extent 2"),
    ("C[i-1] = A[i]", {"A": (3,)}, "i-1 writes to -1 up to 1"),
    ("C[i+1] = A[i]", {"A": (3,), "C": (3,)}, "i+1 writes to 1 up to 3, but axis 0 of C[i+1] has extent 3"),
]


@pytest.mark.parametrize(("text", "shapes", "message"), REFUSED)
def test_refused(text, shapes, message):
    with pytest.raises(ShapeError) as raised:
        sizes(text, **shapes)
    assert message in str(raised.value)


def test_what_the_library_derives_may_leave_its_operands():
    assert sizes("C[i] = A[i] * B[i+1]", None, False, A=(3,), B=(3,))[0] == {"i": (0, 3)}
    assert sizes("C[i-1] = A[i]", (2,), False, A=(3,))[1] == (2,)
    with pytest.raises(ShapeError, match="index i is 3"):
        sizes("C[i] = A[i] * B[i]", None, False, A=(3,), B=(4,))


def test_spans():
    (expression,) = parse("C[2*i-3*j+1] = A[i,j]").target.indices
    assert span_of(expression, {"i": Range(0, 4), "j": Range(1, 3)}) == (2 * 0 - 3 * 2 + 1, 2 * 3 - 3 * 1 + 1)


def test_an_extent_is_the_length_of_a_range():
    bound = bind(parse("C[p] = A[p] ; p:1..3"), {"A": (4,)})
    assert bound.extent("p") == 2


def test_shapes_are_those_of_the_oracle():
    for seed in range(200):
        case = random_case(seed)
        integers = {n: v for n, v in case.operands.items() if isinstance(v, int)}
        shapes = {n: v.shape for n, v in case.operands.items() if not isinstance(v, int)}
        assert bind(parse(case.text, integers), shapes).shape == evaluate(case.text, case.operands).shape, seed
