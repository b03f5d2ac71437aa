"""Tokenizer and parser of operands with index expressions, as `A[2*p + X[q] - 1, r]`; errors show the position."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from pumice.errors import StatementError
from pumice.language.nodes import EVERY, Access, Affine, Index, Span, affine

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f]+|\#[^\n]*)
    |(?P<name>[^\W\d]\w*)
    |(?P<number>(?:[0-9]+(?:\.(?!\.)[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |\*\*|//|\.\.|[-+*/=]=|[-+*/=()\[\],:;]
    |(?P<unknown>.)""",
    re.VERBOSE | re.DOTALL,
)
MOST_TOKENS = 20_000
MOST_LEVELS = 100  # of nested brackets; each takes four recursive calls

_LONGEST_NUMBER = 40
_LONGEST_LINE = 120
_LONGEST_QUOTE = 40

_REFUSED = {
    "==": "`==` is not part of the language: a statement has `=`, a comparison is equal(A[i], B[i])",
    "-=": "`-=` is not an operator of the language; write += and a minus before the right side",
    "*=": "`*=` is not an operator of the language; there are =, +=, max=, min= and mean=",
    "/=": "division is not part of the language; multiply by the reciprocal",
    "/": "division is not part of the language; multiply by the reciprocal",
    "//": "division is not part of the language; an index array can hold quotients",
    "**": "powers are not part of the language; multiply: A[i] * A[i]",
}


class Token(NamedTuple):
    """A token. kind: "name", "number", "end", or the text of a sign."""

    kind: str
    text: str
    start: int
    stop: int


def tokens(text: str) -> list[Token]:
    """The tokens of the text, then one of kind "end"."""
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "space":
            continue
        if kind == "unknown":
            raise complaint(text, match.start(), _of_unknown(text, match.start()))
        if kind == "number" and match.end() - match.start() > _LONGEST_NUMBER:
            raise complaint(text, match.start(), f"a number has at most {_LONGEST_NUMBER} characters")
        if len(found) == MOST_TOKENS:
            raise complaint(text, match.start(), f"a statement has at most {MOST_TOKENS} tokens")
        found.append(Token(kind or match[0], match[0], match.start(), match.end()))
    stop = found[-1].stop if found else 0
    found.append(Token("end", "", stop, stop))
    return found if text.isascii() else [_normal(text, token) for token in found]


def _of_unknown(text: str, place: int) -> str:
    """What is wrong with a character that no token begins with."""
    if text[max(0, place - 1) : place + 1] == "->":
        return "`->` of torch.einsum is not part of the language; write C[m,n] = A[m,k] * B[k,n], with operands by name"
    return f"a character that is not part of the language: {text[place]!r}"


def _normal(text: str, token: Token) -> Token:
    """The token with its name normalised (NFKC), as Python does for keyword arguments: µ has two code points."""
    if token.kind != "name" or token.text.isascii():
        return token
    for place, character in enumerate(token.text, token.start):
        if not ("_" + character).isidentifier():
            raise complaint(text, place, f"a character that is not part of the language: {character!r}")
    return token._replace(text=unicodedata.normalize("NFKC", token.text))


def quote(text: str) -> str:
    """A part of the text for a message, shortened if it is long."""
    return f"`{text}`" if len(text) <= _LONGEST_QUOTE else f"`{text[: _LONGEST_QUOTE - 3]}...`"


def where(text: str, place: int) -> str:
    """The position in words: column, and line if the text has several lines."""
    column = place - text.rfind("\n", 0, place)
    line = text.count("\n", 0, place) + 1
    return f"line {line}, column {column}" if "\n" in text else f"column {column}"


def complaint(text: str, place: int, sentence: str) -> StatementError:
    """An error of three lines: the sentence, the line of the text, a caret under the position."""
    start = text.rfind("\n", 0, place) + 1
    line, column = text[start:].split("\n", 1)[0], place - start
    if len(line) > _LONGEST_LINE:
        first = max(0, column - _LONGEST_LINE // 2)
        before, after = "..." * (first > 0), "..." * (first + _LONGEST_LINE < len(line))
        line, column = before + line[first : first + _LONGEST_LINE] + after, column - first + len(before)
    shown = "".join(character if character.isprintable() else " " for character in line)
    if "\n" in text:
        sentence += f" ({where(text, place)})"
    return StatementError(f"{sentence}\n{shown}\n{' ' * column}^")


class TokenReader:
    """The tokens of a text, read one after the other."""

    at: int
    levels: int

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[Token] = tokens(text)
        self.at = 0
        self.now = self.tokens[0]
        self.levels = 0

    def take(self) -> Token:
        token = self.now
        self.at += 1
        self.now: Token = self.tokens[self.at]
        return token

    def fail(self, sentence: str, place: int | None = None) -> NoReturn:
        raise complaint(self.text, self.now.start if place is None else place, sentence)

    def unexpected(self, expected: str) -> NoReturn:
        found = "the end of the text" if self.now.kind == "end" else quote(self.now.text)
        self.fail(_REFUSED.get(self.now.kind) or f"expected {expected}, found {found}")

    def open(self) -> Token:
        if self.levels == MOST_LEVELS:
            self.fail(f"brackets are nested at most {MOST_LEVELS} levels deep")
        self.levels += 1
        return self.take()

    def close(self, opened: Token, expected: str) -> int:
        """Read the closing bracket; returns the position behind it."""
        bracket = "]" if opened.kind == "[" else ")"
        if self.now.kind != bracket:
            place = where(self.text, opened.start)
            self.unexpected(f"{expected}`{bracket}` to close the `{opened.kind}` at {place}")
        self.levels -= 1
        return self.take().stop

    def sign(self) -> int:
        sign = 1
        while self.now.kind == "-":
            self.take()
            sign = -sign
        return sign


MOST_AXES = 64  # of a torch tensor
_MOST_INTEGER = 2**63 - 1
_LIMITS = "integers have 64 bits, floats end at 1.8e308"


class Use(NamedTuple):
    """First use of a name: its number of axes (None: an index), and position."""

    axes: int | None
    place: int


Linear = tuple[list[tuple[int, Index | Access]], int]  # terms and constant of an index expression


class AccessReader(TokenReader):
    """Reads numbers and accesses; keeps the passed integers, the target and the names used so far."""

    indices: int

    def __init__(self, text: str, integers: Mapping[str, int]) -> None:
        super().__init__(text)
        self.integers = integers
        self.target = ""
        self.uses: dict[str, Use] = {}
        self.indices = 0
        self.fused: dict[str, tuple[int, ...]] = {}

    def number(self) -> float:
        token = self.take()
        value = int(token.text) if token.text.isdigit() else float(token.text)
        if too_large(value):
            self.fail(f"the number {quote(token.text)} is too large; {_LIMITS}", token.start)
        return value

    def integer(self, place: str) -> int:
        if not self.now.text.isdigit():
            self.fail(f"{place} holds integers only, found {quote(self.now.text)}")
        return int(self.number())

    def times(self, a: float, b: float, place: int) -> float:
        if too_large(a * b):
            self.fail(f"the coefficient {a} * {b} is too large; {_LIMITS}", place)
        return a * b

    def access(self, token: Token, written: bool = False) -> Access:
        """The operand named by `token`, with its indices. written: it is the target."""
        name, stop, found = token.text, token.stop, []
        if written:
            self.target: str = name
        elif name == self.target:
            self.fail(f"{quote(name)} is being written; read it under another name", token.start)
        if self.now.kind == "[":
            if name in self.integers:
                self.fail(f"{quote(name)} is the integer {self.integers[name]}, it has no axes", token.start)
            opened = self.open()
            if self.now.kind == "]":
                self.fail(f"{quote(name + '[]')} has no indices; a scalar is written without brackets", token.start)
            sizes = [self.axis(found)]
            while self.now.kind == ",":
                self.take()
                sizes.append(self.axis(found))
            stop = self.close(opened, "an operator, `,` or ")
            if max(sizes) > 1 or name in self.fused:
                self.fuse(name, tuple(sizes), token.start)
        self.use(name, len(found), token.start)
        return Access(name, tuple(found), Span(token.start, stop))

    def axis(self, found: list[Affine]) -> int:
        """Read an axis: an expression, `:`, or a group such as `(n,p)`, which adds each index; returns their number."""
        count = len(found)
        if self.now.kind == EVERY:
            token = self.take()
            found.append(Affine(((1, Index(EVERY, Span(token.start, token.stop))),)))
        elif self.now.kind == "(" and [token.kind for token in self.tokens[self.at + 1 : self.at + 3]] == ["name", ","]:
            opened = self.open()
            found.append(self.member())
            while self.now.kind == ",":
                self.take()
                found.append(self.member())
            self.close(opened, "`,` or ")
        else:
            found.append(self.linear(self.now.start, *self.linear_sum()))
        return len(found) - count

    def member(self) -> Affine:
        start = self.now.start
        found = self.linear(start, *self.linear_sum())
        if found.bare is None:
            self.fail(f"a group holds indices, as (n,p,q); found {quote(str(found))}", start)
        return found

    def fuse(self, name: str, sizes: tuple[int, ...], place: int) -> None:
        """Record the groups on the axes of an operand; fails if another access of it has others."""
        if self.fused.get(name) != sizes and name in self.uses:
            self.fail(f"{quote(name)} has other groups of indices here than where it occurs first", place)
        self.fused[name] = sizes

    def use(self, name: str, axes: int | None, place: int) -> None:
        """Record a use of a name; fails if its axes differ from those of the first use."""
        self.indices += axes is None and name not in self.uses
        first = self.uses.setdefault(name, Use(axes, place))
        if first.axes == axes:
            if max(self.indices, axes or 0) > MOST_AXES:
                self.fail(
                    f"an operand has at most {MOST_AXES} axes and a statement as many indices, as in torch", place
                )
            return
        there = where(self.text, first.place)
        if axes is None or first.axes is None:
            kinds = ("an index", "an operand") if axes is None else ("an operand", "an index")
            self.fail(f"{quote(name)} is {kinds[0]} here and {kinds[1]} at {there}; one name is one thing", place)
        self.fail(f"{quote(name)} has {count_axes(axes)} here and {count_axes(first.axes)} at {there}", place)

    def linear(self, start: int, terms: list[tuple[int, Index | Access]], constant: int) -> Affine:
        """The expression of these terms, read from `start` to the current position."""
        span = Span(start, self.tokens[self.at - 1].stop)
        if len(terms) == 1 and terms[0][0] == 1 and not constant:
            return Affine((terms[0],), 0, span)
        found = affine(terms, constant, span)
        if any(map(too_large, (constant, *(c for c, _ in terms), *(c for c, _ in found.terms)))):
            self.fail("an integer of this index expression has more than 64 bits", start)
        kept = {atom for _, atom in found.terms}
        for _, atom in terms:
            # Without this index there would be no sum over it: the meaning would change.
            if atom not in kept:
                self.fail(f"{quote(str(atom))} cancels out of this index expression; leave it out", atom.span.start)
        return found

    def linear_sum(self) -> Linear:
        terms, constant = self.linear_product(1)
        while self.now.kind in ("+", "-"):
            sign = 1 if self.take().kind == "+" else -1
            more, number = self.linear_product(sign)
            terms += more
            constant += number
        return terms, constant

    def linear_product(self, scale: int) -> Linear:
        start, terms, constant = self.now.start, [], 1
        while True:
            scale *= self.sign()
            more, number = self.linear_factor()
            if not more:
                scale = int(self.times(scale, number, start))
            elif terms:
                both = quote(" ".join(self.text[start : self.tokens[self.at - 1].stop].split()))
                rule = "an index expression is affine: coefficient * index"
                self.fail(f"{rule}; {both} multiplies two; pass one of them as an integer", start)
            else:
                terms, constant = more, number
            if self.now.kind != "*":
                break
            self.take()
        if self.now.kind == "/":
            self.fail("division is not part of the language; an index array can hold quotients")
        return (terms, constant * scale) if scale == 1 else ([(c * scale, atom) for c, atom in terms], constant * scale)

    def linear_factor(self) -> Linear:
        token = self.now
        if token.kind == "name":
            self.take()
            if self.now.kind == "[":
                return [(1, self.access(token))], 0
            if token.text in self.integers:
                return [], self.integers[token.text]
            self.use(token.text, None, token.start)
            return [(1, Index(token.text, Span(token.start, token.stop)))], 0
        if token.kind == "number":
            return [], self.integer("an index expression")
        if token.kind != "(":
            self.unexpected("an index, an integer or `(`")
        opened = self.open()
        inner = self.linear_sum()
        self.close(opened, "an operator or ")
        return inner


def count_axes(count: int) -> str:
    return "1 axis" if count == 1 else f"{count} axes"


def too_large(value: float) -> bool:
    return abs(value) > _MOST_INTEGER if isinstance(value, int) else math.isinf(value)
