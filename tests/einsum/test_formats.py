"""The text of formats, the arrays that they stand for, and what is refused with its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pumice.errors import OptionError, StatementError
from pumice.language.formats import NAMED, Coordinate, Format, FormatLayout, Level, layout, parse_format


def C(axis, array=None, position=None, block=1, inner=None):
    return Coordinate(axis, tuple(array.split()) if array else None, position, block, inner)


LAYOUTS = {
    "COO": ("p", [C("m", "p"), C("k", "p")]),
    "CSR": ("p", [C("m", "p"), C("k", "p")]),
    "CSC": ("p", [C("m", "p"), C("k", "p")]),
    "DCSR": ("p", [C("m", "p"), C("k", "p")]),
    "ELL": ("m q", [C("m", position="m"), C("k", "m q")]),
    "BCSR": ("p m_in k_in", [C("m", "p", None, 32, "m_in"), C("k", "p", None, 32, "k_in")]),
    "GroupCOO": ("p q", [C("m", "p"), C("k", "p q")]),
    "BlockCOO": ("p m_in k_in", [C("m", "p", None, 32, "m_in"), C("k", "p", None, 32, "k_in")]),
    "BlockGroupCOO": ("p q m_in k_in", [C("m", "p", None, 32, "m_in"), C("k", "p q", None, 32, "k_in")]),
    "m:U (c r s):C": ("p", [C("m", "p"), C("c", "p"), C("r", "p"), C("s", "p")]),
    "k:C n:U": ("p n", [C("k", "p"), C("n", position="n")]),
    "m:C k:U n:C": ("p", [C("m", "p"), C("k", "p"), C("n", "p")]),
    "m:U k:U": ("m k", [C("m", position="m"), C("k", position="k")]),
    "m:U k:U m:B2 k:B3": ("m k m_in k_in", [C("m", None, "m", 2, "m_in"), C("k", None, "k", 3, "k_in")]),
    "b:U m:U k:G4": ("b m q", [C("b", position="b"), C("m", position="m"), C("k", "b m q")]),
    "m:C (k l):G4 n:U": ("p q n", [C("m", "p"), C("k", "p q"), C("l", "p q"), C("n", position="n")]),
    "m:C n:U k:G": ("p n q", [C("m", "p"), C("n", position="n"), C("k", "p n q")]),
    "k:G": ("q", [C("k", "q")]),
    # The dimensions of values in storage order, the coordinates still one per group.
    "m:C m:B2 k:G4 k:B3": ("p m_in q k_in", [C("m", "p", None, 2, "m_in"), C("k", "p q", None, 3, "k_in")]),
    # The axes of a convolution's output have the names of the symbols; dense ones keep theirs.
    "p:U q:C m:U": ("p m", [C("p", "p"), C("q", "p"), C("m", position="m")]),
    "q:C p:U k:G": ("p_ p q", [C("q", "p_"), C("p", position="p"), C("k", "p_ p q")]),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout(text):
    values, coordinates = LAYOUTS[text]
    found = layout(parse_format(text))
    assert found.values == tuple(values.split())
    assert found.coordinates == tuple(coordinates)
    assert isinstance(found, FormatLayout)
    assert found.position in (None, *found.values) and found.group in (None, *found.values)


@pytest.mark.parametrize("text", [*LAYOUTS, "m:C k:G2,8,32", "m:C k:G*", "[k,m] m:U k:C"])
def test_text_is_canonical(text):
    found = parse_format(text)
    assert parse_format(str(found)) == found
    assert str(parse_format(str(found))) == str(found)
    assert parse_format(found) is found


def test_what_a_text_says():
    assert parse_format("m:U  ( c r s ) :C ").levels == (Level(("m",), "U"), Level(("c", "r", "s"), "C"))
    assert parse_format(" [ m , k ] k:U\n m:C") == parse_format("CSC") == Format(("m", "k"), parse_format("CSC").levels)
    assert str(parse_format("CSC")) == "[m,k] k:U m:C"
    assert str(parse_format("[m,k] m:U k:C")) == "m:U k:C"
    assert parse_format("m:C k:G2,8,32").grouped == Level(("k",), "G", (2, 8, 32))
    assert parse_format("m:C k:G*").with_sizes((2, 4)) == parse_format("m:C k:G2,4")
    assert parse_format("m:C m:B4 k:U").block("m") == 4 and parse_format("m:C k:U").block("m") == 1
    assert str(parse_format("größe:C β_2:G4")) == "größe:C β_2:G4"


def test_names():
    assert {name: str(parse_format(name)) for name in NAMED} == dict(NAMED)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Format(("m",), (Level(("m",), "C"), Level(("m",), "B", (0,)))), r"kind B is at least 1, found 0"),
        (lambda: parse_format(3), r"a format is a text or a Format, found int"),
        (lambda: Format((), ()), r"at least one level, found none"),
        (lambda: Format(("m",), (Level(("m",), "X"),)), r"unknown kind of level 'X'; known: U, C, H, M, B, G"),
        (lambda: Format(("m",), (Level((), "C"),)), r"a level without an axis"),
        (lambda: Format(("m",), (Level(("m",), "C", (2,)),)), r"kind C has 0 sizes, found 1"),
        (lambda: Format(("m",), (Level(("m",), "C"), Level(("m",), "B"))), r"kind B has 1 sizes, found 0"),
        (lambda: Format(("m", "k"), (Level(("m",), "C"),)), r"axis 'k' has no level"),
        (lambda: parse_format("m:C k:G").with_sizes((4, 2)), r"bucket sizes rise, found 4,2"),
    ],
)
def test_options_that_are_refused(call, message):
    with pytest.raises(OptionError, match=message):
        call()


# The text, the message, and the characters that it points at.
REFUSED = [
    ("", "no levels", ""),
    ("CSS", "or a name: COO, CSR", "CSS"),
    ("m:X k:C", "unknown kind of level 'X'; known: U, U<size>, C, H", "X"),
    ("m:C k:B", "unknown kind of level 'B'", "B"),
    ("m:U4 k:C", "'m:U4' splits a level below it", "m:U4"),
    ("m:U k", "expected levels such as 'm:U'", "k"),
    ("m:U (k l:C", "expected levels such as 'm:U'", "(k l:C"),
    ("m:U m:C", "axis 'm' has two levels, 'm:U' and 'm:C'", "m:C"),
    ("(m m):C", "axis 'm' has two levels", "(m m):C"),
    ("k:C m:B4", "axis 'm' has a block and no other level", "m:B4"),
    ("m:B4 m:C", "comes before the level that it is a block of", "m:B4"),
    ("m:C m:B0", "a size of kind B is at least 1, found 0", "m:B0"),
    ("m:C m:B2 m:B3", "axis 'm' has two block levels", "m:B3"),
    ("(m k):U", "'(m k):U' is of 2 axes; only levels of kind C, H, G", "(m k):U"),
    ("m:C k:C (m k):B4", "'(m k):B4' is of 2 axes", "(m k):B4"),
    ("m:C k:G n:G2", "a second grouped level 'n:G2'", "n:G2"),
    ("m:C k:G4 n:C", "'n:C' comes after 'k:G4'", "n:C"),
    ("m:C m:B4 k:C", "'k:C' comes after 'm:B4'", "k:C"),
    ("m:C k:G0", "a size of kind G is at least 1, found 0", "G0"),
    ("m:C k:G0,4", "a size of kind G is at least 1, found 0", "k:G0,4"),
    ("m:C k:G8,2", "bucket sizes rise, found 8,2", "k:G8,2"),
    ("m:U k:G2,8", "'k:G2,8' has buckets; they need a compressed level right before", "k:G2,8"),
    ("m:C n:U k:G*", "'k:G*' has buckets", "k:G*"),
    ("[m,k] m:C", "axis 'k' has no level", "[m,k]"),
    ("[m] m:C k:C", "axis 'k' has a level and is not in the order [m]", "[m]"),
    ("[m,m] m:C", "the order [m,m] names an axis twice", "[m,m]"),
]


@pytest.mark.parametrize(("text", "message", "pointed"), REFUSED, ids=[case[0] for case in REFUSED])
def test_texts_that_are_refused(text, message, pointed):
    with pytest.raises(StatementError) as caught:
        parse_format(text)
    problem, shown, arrow = str(caught.value).split("\n")
    assert message in problem
    assert shown[2:] == text
    assert "".join(c for c, mark in zip(shown, arrow, strict=False) if mark == "^") == pointed


@given(st.text(alphabet="mk():UCBG4,*[] \n0", max_size=16))
def test_any_text_is_a_format_or_refused(text):
    try:
        found = parse_format(text)
    except StatementError:
        return
    assert parse_format(str(found)) == found
    assert {c.axis for c in layout(found).coordinates} == set(found.axes)
