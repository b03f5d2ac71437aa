"""Windows: which pairs of sparse factors are the two sides of a kernel map."""

import pytest

from pumice.language.bind import bind
from pumice.language.meet import StoredAxes, Window, window_of
from pumice.language.nodes import Range
from pumice.language.parse import parse


def found(text: str, **shapes: tuple[int, ...]) -> Window | None:
    """The window of a statement over sparse A and B with coordinates on all axes."""
    statement = parse(text)
    sparse = {name: StoredAxes(tuple(range(len(shapes[name]))), ()) for name in "AB"}
    return window_of(statement.terms[0], sparse, bind(statement, shapes).ranges, shapes)


def test_a_strided_window_with_a_batch():
    window = found("O[n,p] = A[n,p] * B[2*p+r-1,n] * F[r] ; p:4", A=(2, 4), B=(8, 2), F=(3,))
    assert window == Window(0, 1, ((0, 1), (1, 0)), (2,), (("r", Range(0, 3)),), ((-1,), (0,), (1,)))
    assert [window.role(source) for source in (0, 1, "r", "p", 2)] == ["o", "i", "k", "", ""]


def test_offsets_are_in_the_order_of_the_filter():
    window = found("O[p,q] = B[p+r,q+3*s] * F[s,r] * A[p,q]", A=(4, 4), B=(5, 7), F=(2, 2))
    assert window is not None
    assert (window.base, window.other, window.columns[0]) == (2, 0, (-1, -1))
    assert window.offsets == ((0, 0), (1, 0), (0, 3), (1, 3))


def test_a_range_that_does_not_start_at_0():
    window = found("O[p] = A[p] * B[p+r] ; p:4, r:1..4", A=(4,), B=(4,))
    assert window is not None and window.offsets == ((1,), (2,), (3,)) and window.role("r") == ""


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("O[a] = A[a,b,c,d,e] * B[a+r,b+r,c+r,d+r,e+r] ; r:2, a:2", {"A": (2,) * 5, "B": (3,) * 5}),
        ("O[p] = A[p] * B[p+r] ; r:5000, p:9", {"A": (9,), "B": (9,)}),
        ("O[p] = A[p] * B[1000000*p+r] ; r:2, p:10000", {"A": (10000,), "B": (9,)}),
        ("O[p] = A[p] * B[p+r] ; r:0, p:9", {"A": (9,), "B": (9,)}),
        ("O[p] = A[p,p] * B[p,p]", {"A": (9, 9), "B": (9, 9)}),
        ("O[m,n] = A[m,k] * B[k,n]", {"A": (9, 9), "B": (9, 9)}),
    ],
)
def test_no_window(text, shapes):
    assert found(text, **shapes) is None
