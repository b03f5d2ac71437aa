"""Operands and their index expressions: `A[2*p + X[q] - 1, r]`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from pumice.language.nodes import Access, Affine, Index, Span, affine
from pumice.language.tokens import Token, TokenReader, quote, where

MOST_AXES = 64  # of a torch tensor
_MOST_INTEGER = 2**63 - 1
_LIMITS = "integers have 64 bits, floats end at 1.8e308"


class Use(NamedTuple):
    """First use of a name, and its number of axes (None: as an index)."""

    axes: int | None
    place: int


Linear = tuple[list[tuple[int, Index | Access]], int]  # terms and constant of an index expression


class AccessReader(TokenReader):
    """Reads numbers and accesses; knows the named integers, the target and the names used so far."""

    def __init__(self, text: str, integers: Mapping[str, int]) -> None:
        super().__init__(text)
        self.integers = integers
        self.target = ""
        self.uses: dict[str, Use] = {}
        self.indices = 0

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
        """The operand named by `token`, with its indices."""
        name, stop, found = token.text, token.stop, []
        if written:
            self.target = name
        elif name == self.target:
            self.fail(f"{quote(name)} is being written; read it under another name", token.start)
        if self.now.kind == "[":
            if name in self.integers:
                self.fail(f"{quote(name)} is the integer {self.integers[name]}, it has no axes", token.start)
            opened = self.open()
            if self.now.kind == "]":
                self.fail(f"{quote(name + '[]')} has no indices; a scalar is written without brackets", token.start)
            found.append(self.linear(self.now.start, *self.linear_sum()))
            while self.now.kind == ",":
                self.take()
                found.append(self.linear(self.now.start, *self.linear_sum()))
            stop = self.close(opened, "an operator, `,` or ")
        self.use(name, len(found), token.start)
        return Access(name, tuple(found), Span(token.start, stop))

    def use(self, name: str, axes: int | None, place: int) -> None:
        """Record a use of a name; it must agree with the first one."""
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
        """The index expression read from `start` to the current position."""
        span = Span(start, self.tokens[self.at - 1].stop)
        if len(terms) == 1 and terms[0][0] == 1 and not constant:
            return Affine((terms[0],), 0, span)
        found = affine(terms, constant, span)
        if any(map(too_large, (constant, *(c for c, _ in terms), *(c for c, _ in found.terms)))):
            self.fail("an integer of this index expression has more than 64 bits", start)
        kept = {atom for _, atom in found.terms}
        for _, atom in terms:
            # Dropping it would drop the sum over it, which changes the meaning of the text.
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
