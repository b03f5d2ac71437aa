"""parse: what a text means, that it prints as it reads, and what it says of every text that is none."""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pumice.errors import StatementError
from pumice.language.nodes import (
    Access,
    Affine,
    Equal,
    Exists,
    Index,
    Range,
    Span,
    Statement,
    Term,
    affine,
    index,
    walk,
)
from pumice.language.parse import parse

INTEGERS = {"STR": 2, "PAD": 1, "P": 14, "MINUS": -3}


def right(text, integers=None):
    return parse(f"C[i] = {text}", integers).terms


def axis(text, integers=None):
    return parse(f"C[i] = A[{text}]", integers).terms[0].factors[0].indices[0]


def a(name, *names):
    return Access(name, tuple(map(index, names)))


def test_a_statement():
    text = "C[AM[p],n] += AV[p,q] * B[AK[p,q],n] ; p:10, C:[100,_]; q:2..5, AM:sorted, AM:distinct"
    want = Statement(
        Access("C", (affine([(1, a("AM", "p"))]), index("n"))),
        (Term((a("AV", "p", "q"), Access("B", (affine([(1, a("AK", "p", "q"))]), index("n"))))),),
        accumulate=True,
        ranges=(("p", Range(0, 10)), ("q", Range(2, 5))),
        shapes=(("C", (100, None)),),
        facts=(("AM", "sorted"), ("AM", "distinct")),
    )
    assert parse(text) == want and parse(text).text == text


@pytest.mark.parametrize(
    ("operator", "reduction", "accumulate"),
    [
        ("=", "sum", False),
        ("+=", "sum", True),
        ("max=", "max", False),
        ("min=", "min", False),
        ("mean =", "mean", False),
    ],
)
def test_operators(operator, reduction, accumulate):
    found = parse(f"C[i]{operator}A[i,k]")
    assert (found.reduction, found.accumulate) == (reduction, accumulate)
    assert parse(f"max {operator} A[k]").target == Access("max")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("A[i]*(B[i]-2*D[i])", [(1, "A B"), (-2, "A D")]),
        ("(A[i]+B[i])*D[i]*(A[i]-3)", [(1, "A D A"), (-3, "A D"), (1, "B D A"), (-3, "B D")]),
        ("-(A[i] - -B[i]) - 2*-D[i]", [(-1, "A"), (-1, "B"), (2, "D")]),
        ("2*A[i]*3", [(6, "A")]),
        ("-A[i]", [(-1, "A")]),
        ("(0.5)*A[i]*s*STR", [(0.5, "A s STR")]),
        ("0", []),
        ("0*A[i] + B[i]*(A[i]*0) - 0.0", []),
        ("7", [(7, "")]),
        (".5e+1 - 1e-3 + 2.", [(5.0, ""), (-0.001, ""), (2.0, "")]),
    ],
)
def test_sums_are_multiplied_out(text, want):
    terms = right(text, INTEGERS)
    assert [(t.coefficient, " ".join(f.name for f in t.factors)) for t in terms] == want
    assert [type(t.coefficient) for t in terms] == [type(c) for c, _ in want]


def test_functions():
    (term,) = right("exists(A[i,k]) * equal(D[i], -B[i]*(2+s))")
    assert term.factors == (
        Exists(a("A", "i", "k")),
        Equal(a("D", "i"), (Term((a("B", "i"),), -2), Term((a("B", "i"), Access("s")), -1))),
    )
    assert right("exists * equal[i]")[0].factors == (Access("exists"), a("equal", "i"))


@pytest.mark.parametrize(
    ("text", "terms", "constant"),
    [
        ("STR*p+r-PAD", [(2, "p"), (1, "r")], -1),
        ("-(p - 2*(r + 1))*3", [(-3, "p"), (6, "r")], 6),
        ("p*MINUS + p", [(-2, "p")], 0),
        ("2*3*p*STR", [(12, "p")], 0),
        ("4 - -P", [], 18),
        ("PAD2", [(1, "PAD2")], 0),
    ],
)
def test_index_expressions(text, terms, constant):
    assert axis(text, INTEGERS) == Affine(tuple((c, Index(name)) for c, name in terms), constant)


def test_index_arrays_nest():
    assert axis("2*X[Y[i]-1,k] - X[Y[i]-1,k] + 3") == affine(
        [(1, Access("X", (affine([(1, a("Y", "i"))], -1), index("k"))))], 3
    )


def test_declarations_take_integers():
    found = parse("C[p] = A[p,r] ; p:P, r:PAD..STR; A:[P,_]", INTEGERS)
    assert found.ranges == (("p", Range(0, 14)), ("r", Range(1, 2))) and found.shapes == (("A", (14, None)),)


def test_declarations_go_with_the_terms_that_are_zero():
    found = parse("C[i] = A[i] + 0*B[k] ; i:4, k:5, B:[5], A:[_]")
    assert found.ranges == (("i", Range(0, 4)),) and found.shapes == (("A", (None,)),)


def test_white_space_comments_and_unicode():
    text = "# product\n C[ι]\t=A [ι,k]*# left\r\n µ2[k] # C[i] +="
    assert parse(text) == parse("C[ι] = A[ι,k] * \u03bc2[k]")


def test_spans_are_the_source():
    text = "C[ i ] = 2*A[X[p] - 1, i]"
    spans = [text[n.span.start : n.span.stop] for n in walk(parse(text)) if isinstance(n, Access | Affine | Index)]
    assert spans == ["C[ i ]", "i", "i", "A[X[p] - 1, i]", "X[p] - 1", "X[p]", "p", "p", "i", "i"]


# The mark stands where the caret should.
ERRORS = [
    ("|", "the text is empty; expected a statement"),
    ("|  # nothing", "the text is empty"),
    ("C[i] = A[i] |? B[i]", "a character that is not part of the language: '?'"),
    ("C[i] = A|²[i]", "a character that is not part of the language: '²'"),
    ("mk,kn-|>mn", "`->` of torch.einsum is not part of the language; write C[m,n] = A[m,k] * B[k,n]"),
    ("C[i] = |" + "1" * 41, "a number has at most 40 characters"),
    ("C[i] = |1e999", "the number `1e999` is too large"),
    ("C[i] = |9223372036854775808", "is too large; integers have 64 bits"),
    ("C[i] = |9e300*9e300*A[i]", "the coefficient 9e+300 * 9e+300 is too large"),
    ("C[i] = A[|9223372036854775807*2*i]", "the coefficient 9223372036854775807 * 2 is too large"),
    ("C[i] = A[|9223372036854775807*i+i]", "an integer of this index expression has more than 64 bits"),
    ("|0 = A[i]", "expected the target, such as C[i], found `0`"),
    ("C[i]|", "expected =, +=, max=, min= or mean= after the target, found the end of the text"),
    ("C[i] max |A[i]", "expected `=` after `max`, found `A`"),
    ("C[i] |sum= A[i]", "expected =, +=, max=, min= or mean= after the target, found `sum`"),
    ("C[i] |== A[i]", "`==` is not part of the language: a statement has `=`"),
    ("C[i] |-= A[i]", "`-=` is not an operator of the language"),
    ("C[i] |*= A[i]", "`*=` is not an operator of the language"),
    ("C[i] |/= A[i]", "division is not part of the language"),
    ("C[i] = A[i] |/ 2", "division is not part of the language; multiply by the reciprocal"),
    ("C[i] = A[i]|**2", "powers are not part of the language"),
    ("C[i] = A[i|/2]", "division is not part of the language; an index array can hold quotients"),
    ("C[i] = A[i|//2]", "division is not part of the language; an index array can hold quotients"),
    ("C[i] =|", "expected an operand, a number or `(`, found the end of the text"),
    ("C[i] = A[i] * |* B[i]", "expected an operand, a number or `(`, found `*`"),
    ("C[i] = A[i] |B[i]", "expected +, -, * or the end of the statement, found `B`"),
    ("C[i] = 2|A[i]", "expected +, -, * or the end of the statement, found `A`"),
    ("C[i] = A[i]|(B[i])", "expected +, -, * or the end of the statement, found `(`"),
    ("C[i] = A[i] |] # more", "expected an operator, `;` or the end of the text, found `]`"),
    ("C[i] = A[i] |= B[i]", "expected an operator, `;` or the end of the text, found `=`"),
    ("C[i] = A[i] |, i:5", "expected an operator, `;` or the end of the text, found `,`"),
    ("C[i] = A[i]*(B[i]|", "`)` to close the `(` at column 13, found the end of the text"),
    ("C[i |= A[i]", "expected an operator, `,` or `]` to close the `[` at column 2, found `=`"),
    ("C[i] = A[2*(i+1|]", "expected an operator or `)` to close the `(` at column 12, found `]`"),
    ("C[i] = A[i |j]", "`]` to close the `[` at column 9, found `j`"),
    ("C[i] = A[i,|]", "expected an index, an integer or `(`, found `]`"),
    ("C[i] = |A[]", "`A[]` has no indices; a scalar is written without brackets"),
    ("C[i] = |STR[i]", "`STR` is the integer 2, it has no axes"),
    ("C[i] = A[i+|1.5]", "an index expression holds integers only, found `1.5`"),
    ("C[i] = A[|i*j]", "an index expression is affine: coefficient * index; `i*j` multiplies two; pass one of them"),
    ("C[i] = A[1+|X[i] * (i - 1)]", "`X[i] * (i - 1)` multiplies two"),
    ("C[i] = A[|k - k + i]", "`k` cancels out of this index expression"),
    ("C[i] = A[0*|i]", "`i` cancels out of this index expression"),
    ("C[i] = A[i]*|i", "`i` is an operand here and an index at column 3; one name is one thing"),
    ("C[i] = A*B[|A]", "`A` is an index here and an operand at column 8; one name is one thing"),
    ("C[i] = A[i]*|A[i,k]", "`A` has 2 axes here and 1 axis at column 8"),
    ("C[i] = A[i]*|A", "`A` has 0 axes here and 1 axis at column 8"),
    ("C[i] += A[i] - |C[i]", "`C` is being written; read it under another name"),
    ("C[i] = equal(|C[i], A[i])", "`C` is being written; read it under another name"),
    ("C[|C[i]] = A[i]", "`C` is being written; read it under another name"),
    ("C[i] = |sqrt(A[i])", "`sqrt` is not a function of the language; use exists, equal or sum"),
    ("C[i] = exists(|)", "expected an access, as in exists(A[i]), found `)`"),
    ("C[i] = exists(A[i]|, B[i])", "expected `)` to close the `(` at column 14, found `,`"),
    ("C[i] = equal(|2*A[i], B[i])", "expected an access, as in equal(A[i], B[i]), found `2`"),
    ("C[i] = equal(A[i]|)", "expected `,` and what the access may equal, as in equal(A[i], B[i]), found `)`"),
    ("C[i] = equal(A[i], B[i]|, 2)", "expected an operator or `)` to close the `(` at column 13, found `,`"),
    ("C[i] = A[i] ;|", "expected a declaration such as p:10 or C:[10,_], found the end of the text"),
    ("C[i] = A[i] ; i |= 5", "expected `:` after the declared `i`, found `=`"),
    ("C[i] = A[i] ; |k:5", "`k` is declared but is not an index or operand of the statement"),
    ("C[i] = A[i] ; i:5, |i:6", "`i` is declared twice, first at column 15"),
    ("C[i] = A[i] ; A:[5]; |A:[5]", "`A` is declared twice, first at column 15"),
    ("C[i] = A[X[i]] ; X:sorted, |X:sorted", "`X` is declared twice, first at column 18"),
    ("C[i] = A[i] ; i:|-5", "an extent is at least 0, found -5"),
    ("C[i] = A[i] ; i:|MINUS", "an extent is at least 0, found -3"),
    ("C[i] = A[i] ; i:|5..2", "the range 5..2 of `i` ends before it starts"),
    ("C[i] = A[i] ; i:|n", "expected an integer or the name of one that is passed, found `n`"),
    ("C[i] = A[i] ; i:|1.5", "a declaration holds integers only, found `1.5`"),
    ("C[i] = A[i] ; A:|5", "`A` is an operand; its shape is declared as `A:[_]`"),
    ("C[i] = s ; s:|5", "`s` is an operand; it has no axes"),
    ("C[i] = A[i] ; i:|[5]", "`i` is an index; its range is declared as `i:10`"),
    ("C[i] = A[i] ; C:|[5,_]", "`C` is declared with 2 axes and has 1 axis at column 1"),
    ("C[i] = A[i] ; A:[5|", "expected `,` or `]` to close the `[` at column 17, found the end of the text"),
    ("C[i] = A[i] ; i:|sorted", "`sorted` applies to index arrays; `i` is not one"),
    ("C[i] = A[i] ; C:|distinct", "`distinct` applies to index arrays; `C` is not one"),
]


@pytest.mark.parametrize(("marked", "sentence"), ERRORS)
def test_errors_show_the_place(marked, sentence):
    text = marked.replace("|", "")
    with pytest.raises(StatementError) as caught:
        parse(text, INTEGERS)
    said, line, caret = str(caught.value).split("\n")
    assert sentence in said and line == text
    assert caret == " " * marked.index("|") + "^"


def test_errors_in_texts_of_several_lines():
    with pytest.raises(StatementError) as caught:
        parse("\n  C[i] =\n\tA[i]*(B[i\n    ) # more\n")
    assert str(caught.value).split("\n") == [
        "expected an operator, `,` or `]` to close the `[` at line 3, column 9, found `)` (line 4, column 5)",
        "    ) # more",
        "    ^",
    ]


@pytest.mark.parametrize("before", ["(", "A[", "A[(", "equal(a, ", "-(2*"])
def test_nesting_has_an_end(before):
    with pytest.raises(StatementError, match="brackets are nested at most 100 levels deep") as caught:
        parse("C[i] = " + before * 1500)
    assert max(map(len, str(caught.value).split("\n"))) < 130


@pytest.mark.parametrize(("before", "after"), [("(", ")"), ("A{}[", "]"), ("equal(B[i], ", ")"), ("A{}[1+(", ")]")])
def test_nesting_up_to_the_limit(before, after):
    levels = 100 // len(after) - 1
    text = "C[i] = " + "".join(before.format(n) for n in range(levels)) + "2" + after * levels
    assert parse(str(parse(text))) == parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("*".join(["(a+b)"] * 40), "has 1024 terms; at most 1000"),
        ("+".join(["a"] * 2000), "has 1001 terms; at most 1000"),
        ("(a+b)*(a+b)*(a+b)*(a+b)*(a+b)*(a+b)*(a+b)*(a+b)" + "*a" * 1000, "tokens long; at most 20000"),
        ("*".join(["(a+b)"] * 9) + "*equal(a, " + "*".join(["(a+b)"] * 9) + ")", "tokens long; at most 20000"),
    ],
)
def test_multiplying_out_has_an_end(text, sentence):
    with pytest.raises(StatementError, match=sentence):
        right(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("C[i] = A[i]" + " +" * 1_000_000, "at most 20000 tokens"),
        ("C[i] = A[i] ; " + ", ".join(["i:4"] * 20_000), "at most 20000 tokens"),
        ("C[i] = " + "*".join(f"a{n}" for n in range(5_000)) + " $", "not part of the language: '[$]'"),
        ("C = A[" + "+".join(f"i{n}" for n in range(65)) + "]", "at most 64 axes and a statement as many indices"),
        ("C = A[" + ",".join(["1"] * 65) + "]", "at most 64 axes and a statement as many indices"),
    ],
)
def test_texts_have_an_end(text, sentence):
    with pytest.raises(StatementError, match=sentence):
        parse(text)


def test_long_texts_are_read():
    many = 2_000
    assert axis("+".join(["k"] * many)) == affine([(many, Index("k"))])
    assert len(right("*".join(["A[i]"] * many))[0].factors) == many
    assert right("*".join(["1"] * many)) == (Term(()),)
    with pytest.raises(StatementError) as caught:
        parse("C[i] = " + "A" * many + "[i")
    assert len(str(caught.value)) < 400


NAMES = st.sampled_from(["i", "j", "kk", "p_1"])
NUMBERS = st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False, width=32)


def spread(pieces, joint):
    return st.lists(pieces, min_size=1, max_size=3).map(joint.join)


def joined(pieces, *joints):
    return st.builds(lambda x, j, y: f"{x}{j}{y}", pieces, st.sampled_from(joints), pieces)


LINEAR = st.recursive(
    NAMES | st.integers(0, 9).map(str),
    lambda inner: (
        joined(inner, "+", " - ")
        | inner.map("X[{}]".format)
        | inner.map("2*({})".format)
        | joined(inner, ",").map("Y[{}]".format)
    ),
    max_leaves=5,
)
ACCESSES = LINEAR.map("A[{}]".format) | joined(LINEAR, ",").map("B[{}]".format)
RIGHT = st.recursive(
    ACCESSES | st.just("s") | NUMBERS.map(str) | ACCESSES.map("exists({})".format),
    lambda inner: (
        joined(inner, "+", " - ", "*", " * -")
        | inner.map("({})".format)
        | st.builds("equal({}, {})".format, ACCESSES, inner)
    ),
    max_leaves=6,
)
STATEMENTS = st.builds(
    "C[i,{}] {} {}{}".format,
    LINEAR,
    st.sampled_from(["=", "+=", "max=", "min=", "mean="]),
    RIGHT,
    st.sampled_from(["", "; i:4", " ; C:[_,3], i:2..5", "; i:0; C:[7,8], C:[_,_]"]),
)


def attempt(text):
    try:
        return parse(text, INTEGERS)
    except StatementError as error:
        assert len(str(error).split("\n")) == 3
        return None


@settings(max_examples=150)
@given(STATEMENTS)
def test_a_statement_prints_as_it_reads(text):
    found = attempt(text)
    if found is not None:
        assert parse(str(found)) == found
        assert str(parse(str(found))) == str(found)


@settings(max_examples=200)
@given(st.text() | st.text("AC[](),;:=+-*/. \n#_i0123456789e"))
def test_any_characters(text):
    attempt(text)
    attempt("C[i] = " + text)
    attempt("C[i] = A[" + text)


@settings(max_examples=200)
@given(STATEMENTS, st.randoms(use_true_random=False))
def test_mutations(text, rng: random.Random):
    letters = list(text)
    for _ in range(rng.randint(1, 4)):
        x, y = rng.randrange(len(letters)), rng.randrange(len(letters))
        match rng.randrange(3):
            case 0:
                letters[x], letters[y] = letters[y], letters[x]
            case 1:
                letters.insert(x, rng.choice("[]()*+-=,;:./#\n 07iA\u2028é"))
            case 2 if len(letters) > 1:
                del letters[x]
    found = attempt("".join(letters))
    assert found is None or parse(str(found)) == found


def test_spans_do_not_count():
    assert parse("C[i]=A[i]") == parse(" C[i] = A[ i ]") and Span(1, 2) != Span(1, 3)


def test_the_language_needs_no_torch():
    # The package's own door imports torch, so the files are loaded behind it.
    code = """
import sys, types, importlib, pathlib
package = types.ModuleType("pumice"); package.__path__ = [sys.argv[1]]; sys.modules["pumice"] = package
importlib.import_module("pumice.language.parse")
assert not {"torch", "numpy"} & set(sys.modules)
"""
    import pumice

    subprocess.run([sys.executable, "-c", code, pumice.__path__[0]], check=True)


def test_as_many_indices_as_torch_has_axes():
    statement = parse("y = " + " * ".join(f"x{n}[i{n}]" for n in range(64)))
    assert len(statement.terms[0].factors) == 64
