"""Tokenizer, token reader, and error messages that show a position in the text."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple, NoReturn

from pumice.errors import StatementError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f]+|\#[^\n]*)
    |(?P<name>[^\W\d]\w*)
    |(?P<number>(?:[0-9]+(?:\.(?!\.)[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |\*\*|//|\.\.|[-+*/=]=|[-+*/=()\[\],:;]
    |(?P<unknown>.)""",
    re.VERBOSE | re.DOTALL,
)
MOST_TOKENS = 20_000
MOST_LEVELS = 100  # of brackets; each takes four calls

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
    """kind: name, number, end, or the sign itself."""

    kind: str
    text: str
    start: int
    stop: int


def tokens(text: str) -> list[Token]:
    """The tokens of the text and a final one of kind `end`."""
    found: list[Token] = []
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "space":
            continue
        if kind == "unknown":
            raise complaint(text, match.start(), f"a character that is not part of the language: {match[0]!r}")
        if kind == "number" and match.end() - match.start() > _LONGEST_NUMBER:
            raise complaint(text, match.start(), f"a number has at most {_LONGEST_NUMBER} characters")
        if len(found) == MOST_TOKENS:
            raise complaint(text, match.start(), f"a statement has at most {MOST_TOKENS} tokens")
        found.append(Token(kind or match[0], match[0], match.start(), match.end()))
    stop = found[-1].stop if found else 0
    found.append(Token("end", "", stop, stop))
    return found if text.isascii() else [_normal(text, token) for token in found]


def _normal(text: str, token: Token) -> Token:
    """A name normalised (NFKC) as Python does for keyword arguments: µ has two code points, Python uses one."""
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
    """The position in words, with its line if the text has several."""
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
    """The tokens of a text and the current position."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokens(text)
        self.at = 0
        self.now = self.tokens[0]
        self.levels = 0

    def take(self) -> Token:
        token = self.now
        self.at += 1
        self.now = self.tokens[self.at]
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
        """Read the closing bracket; returns where it ends."""
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
