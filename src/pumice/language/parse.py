"""Parser of statements, with one method for each rule of the grammar.

    text    := access op right [';' decl ((';' | ',') decl)*]      op := '=' | '+=' | 'max=' | 'min=' | 'mean='
    right   := sum | ('max' | 'min' | 'mean') '(' names ',' sum ')'         the function of max=, min= or mean=
    sum     := product (('+' | '-') product)*
    product := factor ('*' factor)*                                products of sums are multiplied out
    factor  := '-' factor | NUMBER | access | '(' sum ')' | 'exists' '(' access ')' | 'equal' '(' access ',' sum ')'
               | 'sum' '(' names ',' sum ')'
    names   := NAME (',' NAME)*                                    indices
    access  := NAME ['[' axis (',' axis)* ']']
    axis    := affine | ':' | '(' NAME (',' NAME)+ ')'             all positions of a level; indices fused to one axis
    affine  := sums and products as above, of integers, indices and accesses, at most one non-integer per product
    decl    := NAME ':' 'pos' '(' NAME ')' | NAME ':' 'pattern' '(' (NAME | '*') ')'
               | NAME ':' INT ['..' INT] | NAME ':' '[' (INT | '_') (',' (INT | '_'))* ']' | NAME ':' FACT

In `affine` and `decl` the name of a passed integer stands for its value. `#` starts a comment; white space is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from pumice.language.accesses import AccessReader, Token, Use, count_axes, quote, where
from pumice.language.nodes import (
    ANY,
    EVERY,
    FACTS,
    REDUCTIONS,
    Access,
    Equal,
    Exists,
    Factor,
    Range,
    Statement,
    Term,
    accesses_of,
    default_sums,
    free_indices,
    indices_of,
)

OPERAND_FACTS = ("pos", "pattern")  # of an index, of the target

MOST_TERMS = 1000  # terms of a sum when multiplied out
MOST_SIZE = 20_000  # tokens of a sum when multiplied out


class _Product(NamedTuple):
    """A term while it is read. size: its length in tokens; summed: the indices of `sum(...)` around its factors."""

    coefficient: float
    factors: tuple[Factor, ...] = ()
    size: int = 1
    summed: tuple[str, ...] = ()


_ONE = [_Product(1)]


def parse(text: str, integers: Mapping[str, int] | None = None) -> Statement:
    """The statement written in `text`. Raises StatementError, whose message shows the position. integers: by name, the
    constants in index expressions and declarations (`STR*p + r`, `p:P`)."""
    return _Parser(text, integers or {}).statement()


class _Parser(AccessReader):
    dropped = False  # True if a term had coefficient 0

    def statement(self) -> Statement:
        if self.now.kind == "end":
            self.fail("the text is empty; expected a statement such as C[i] = A[i,k] * B[k]", 0)
        if self.now.kind != "name":
            self.unexpected("the target, such as C[i]")
        target = self.access(self.take(), written=True)
        reduction, accumulate = self.operator()
        start = self.now.start
        named, products = self.right(reduction)
        terms = _terms(products)
        summed = self.summed(target, products, named, reduction, start)
        declared = self.declarations()
        if self.now.kind != "end":
            self.unexpected("an operator, `;` or the end of the text")
        if self.dropped:  # declarations of names that occur only in dropped terms do not apply
            left = {*indices_of(target, *terms), *(access.name for access in accesses_of(target, *terms))}
            declared = {key: value for key, value in declared.items() if key[0] in left}
        ranges = tuple((name, value) for (name, _), value in declared.items() if isinstance(value, Range))
        shapes = tuple((name, value) for (name, _), value in declared.items() if isinstance(value, tuple))
        facts = tuple((name, fact) for name, fact in declared if fact in FACTS)
        positions = tuple((name, str(value)) for (name, fact), value in declared.items() if fact == "pos")
        pattern = next((str(value) for (_, fact), value in declared.items() if fact == "pattern"), "")
        found = Statement(target, terms, reduction, accumulate, ranges, shapes, facts, summed, positions, pattern)
        self.check_positions(found, start)
        return replace(found, fused=tuple(self.fused.items()), text=self.text)

    def check_positions(self, found: Statement, start: int) -> None:
        """Fail unless the target of positions has no other axes, and `:` stands in operands with a position only."""
        placed = [operand for _, operand in found.positions]
        for access in accesses_of(found):
            if access.name not in placed and EVERY in indices_of(access):
                self.fail(f"`:` in {access}: declare a position of its levels, `i:pos({access.name})`", start)
        if found.pattern == ANY and found.operator != "=":
            self.fail(f"{found.target} with a computed pattern is written by `=`, found `{found.operator}`", start)
        if found.pattern not in ("", ANY) and (len(found.terms) != 1 or found.operator != "="):
            self.fail(f"the right side of {found.target} with a pattern is one product, after `=`", start)
        if not found.positions:
            return
        names = [expression.bare for expression in found.target.indices]
        factors = [str(getattr(f, "name", f)) for term in found.terms for f in term.factors]
        own = sorted(name for name, _ in found.positions)
        if sorted(map(str, names)) != own or set(own) & set(indices_of(*found.terms)) or found.operator != "=":
            self.fail(f"{found.target} {found.operator}: the axes of a target of positions are their indices", start)
        if len(found.terms) != 1 or sorted(factors) != sorted(placed) or found.terms[0].coefficient != 1:
            self.fail("a statement of positions is one product of operands, each with a position", start)

    def operator(self) -> tuple[str, bool]:
        """(reduction, True if the target's old value is included)."""
        if self.now.kind in ("=", "+="):
            return "sum", self.take().kind == "+="
        if self.now.text not in ("max", "min", "mean"):
            self.unexpected("=, +=, max=, min= or mean= after the target")
        reduction = self.take().text
        if self.now.kind != "=":
            self.unexpected(f"`=` after `{reduction}`")
        self.take()
        return reduction, False

    def right(self, reduction: str) -> tuple[tuple[str, ...], list[_Product]]:
        """(the indices that `max(...)` around the right side of max= names, the right side)."""
        if reduction == "sum" or self.now.text != reduction or self.tokens[self.at + 1].kind != "(":
            return (), self.sum()
        self.take()
        return self.named(reduction)

    def named(self, function: str) -> tuple[tuple[str, ...], list[_Product]]:
        """Read `(i, j, sum)` after the name of a function."""
        opened, names = self.open(), list[str]()
        while self.now.kind == "name" and self.tokens[self.at + 1].kind == ",":
            token = self.take()
            if token.text in self.integers or token.text in names:
                self.fail(f"expected the indices of {function}(...), each once, found {quote(token.text)}", token.start)
            self.use(token.text, None, token.start)
            names.append(token.text)
            self.take()
        if not names:
            self.unexpected(f"an index and `,`, as in {function}(i, A[i])")
        found = self.sum()
        self.close(opened, "an operator or ")
        for product in found:
            missing = [name for name in names if name not in indices_of(*product.factors)]
            if function == "sum" and missing:
                self.fail(f"{quote(missing[0])} does not occur in a term of this sum(...)", opened.start)
        return tuple(names), found

    def summed(
        self, target: Access, products: list[_Product], named: tuple[str, ...], reduction: str, start: int
    ) -> tuple[str, ...]:
        """The indices summed within a max, min or mean; fails where the text leaves them open."""
        terms = _terms(products)
        sums = dict.fromkeys(name for product in products for name in product.summed)
        free = free_indices(target, terms)
        if wrong := [name for name in (*sums, *named) if name not in free]:
            self.fail(f"{quote(wrong[0])} is not reduced: it is an index of the target, or in no term", start)
        if reduction == "sum":
            return ()
        left = [p for p in products if set(sums) & set(indices_of(*p.factors)) - set(p.summed)]
        if left or set(sums) & set(named):
            self.fail("an index of sum(...) is used outside it; rename one of them", start)
        if named:
            return tuple(name for name in free if name not in named)
        if sums:
            return tuple(sums)
        summed, unclear = default_sums(target, terms)
        if unclear:
            names = ", ".join(unclear)
            self.fail(
                f"{names}: summed before the {reduction}, or part of it? Write sum({names}, ...) or "
                f"{reduction}({names}, ...) around the terms",
                start,
            )
        return summed

    def sum(self) -> list[_Product]:
        start = self.now.start
        found = self.product()
        while self.now.kind in ("+", "-"):
            sign = 1 if self.take().kind == "+" else -1
            found += self.product(sign)
            self.bounded(len(found), 0, start)
        self.bounded(len(found), sum(product.size for product in found), start)
        return found

    def product(self, sign: int = 1) -> list[_Product]:
        start = self.now.start
        products, coefficient, factors, size = _ONE, sign, [], 1
        while True:
            sign = self.sign()
            inner = self.factor()
            if len(inner) == 1 and not inner[0].summed:
                coefficient = self.times(coefficient, sign * inner[0].coefficient, start)
                factors += inner[0].factors
                size += inner[0].size
            else:
                before = [_Product(sign * coefficient, tuple(factors), size)]
                products = self.distributed(self.distributed(products, before, start), inner, start)
                coefficient, factors, size = 1, [], 1
            if self.now.kind != "*":
                break
            self.take()
        if self.now.kind in ("name", "number", "("):
            self.unexpected("+, -, * or the end of the statement")
        products = self.distributed(products, [_Product(coefficient, tuple(factors), size)], start)
        kept = [product for product in products if product.coefficient]
        self.dropped = self.dropped or not kept or len(kept) < len(products)
        return kept

    def distributed(self, left: list[_Product], right: list[_Product], place: int) -> list[_Product]:
        """The product of two sums, multiplied out."""
        if left is _ONE:
            return right
        size = len(right) * sum(product.size for product in left) + len(left) * sum(product.size for product in right)
        self.bounded(len(left) * len(right), size, place)
        return [self.multiplied(a, b, place) for a in left for b in right]

    def multiplied(self, a: _Product, b: _Product, place: int) -> _Product:
        for one, other in ((a, b), (b, a)):
            if twice := set(one.summed).intersection(indices_of(*other.factors) if one.summed else ()):
                self.fail(f"{quote(min(twice))} is used inside and outside of sum(...); rename one of them", place)
        coefficient = self.times(a.coefficient, b.coefficient, place)
        return _Product(coefficient, a.factors + b.factors, a.size + b.size, a.summed + b.summed)

    def bounded(self, terms: int, size: int, place: int) -> None:
        if terms > MOST_TERMS:
            self.fail(f"multiplied out, this sum has {terms} terms; at most {MOST_TERMS} are taken", place)
        if size > MOST_SIZE:
            self.fail(f"multiplied out, this sum is {size} tokens long; at most {MOST_SIZE} are taken", place)

    def factor(self) -> list[_Product]:
        token, at = self.now, self.at
        if token.kind == "number":
            return [_Product(self.number())]
        if token.kind == "(":
            opened = self.open()
            inner = self.sum()
            self.close(opened, "an operator or ")
            return inner
        if token.kind != "name":
            self.unexpected("an operand, a number or `(`")
        self.take()
        if self.now.kind == "(":
            return self.function(token)
        return [_Product(1, (self.access(token),), self.at - at)]

    def function(self, name: Token) -> list[_Product]:
        """Read `exists(access)`, `equal(access, sum)` or `sum(names, sum)` after its name."""
        if name.text == "sum":
            names, found = self.named("sum")
            return [product._replace(summed=product.summed + names) for product in found]
        if name.text in REDUCTIONS:
            self.fail(f"{name.text}(...) is the whole right side of {name.text}=; use two statements", name.start)
        if name.text not in ("exists", "equal"):
            self.fail(f"{quote(name.text)} is not a function of the language; use exists, equal or sum", name.start)
        opened, at = self.open(), self.at
        usage = "exists(A[i])" if name.text == "exists" else "equal(A[i], B[i])"
        if self.now.kind != "name":
            self.unexpected(f"an access, as in {usage}")
        access = self.access(self.take())
        if name.text == "exists":
            self.close(opened, "")
            return [_Product(1, (Exists(access),), self.at - at)]
        if self.now.kind != ",":
            self.unexpected(f"`,` and what the access may equal, as in {usage}")
        size = self.at - at
        self.take()
        inner = self.sum()
        self.close(opened, "an operator or ")
        if any(product.summed for product in inner):
            self.fail("equal(...) compares values at one point; it holds no sum(...)", name.start)
        return [_Product(1, (Equal(access, _terms(inner)),), size + sum(product.size for product in inner))]

    def declarations(self) -> dict[tuple[str, str], object]:
        """The declarations by (name, fact); fact "" is a range or shape."""
        found: dict[tuple[str, str], object] = {}
        places: dict[tuple[str, str], int] = {}
        while self.now.kind == ";" or (found and self.now.kind == ","):
            self.take()
            token = self.now
            use = self.declared()
            fact = self.now.text if self.now.text in (*FACTS, *OPERAND_FACTS) else ""
            if (token.text, fact) in places:
                first = where(self.text, places[token.text, fact])
                self.fail(f"{quote(token.text)} is declared twice, first at {first}", token.start)
            known = self.of_operand if fact in OPERAND_FACTS else self.fact
            read = known if fact else self.shape if self.now.kind == "[" else self.range
            found[token.text, fact] = read(token.text, use)
            places[token.text, fact] = token.start
        return found

    def declared(self) -> Use:
        """Read a declared name and the colon; returns the name's first use in the statement."""
        token = self.now
        if token.kind != "name":
            self.unexpected("a declaration such as p:10 or C:[10,_]")
        self.take()
        if self.now.kind != ":":
            self.unexpected(f"`:` after the declared {quote(token.text)}")
        if token.text not in self.uses:
            self.fail(f"{quote(token.text)} is declared but is not an index or operand of the statement", token.start)
        self.take()
        return self.uses[token.text]

    def fact(self, name: str, use: Use) -> str:
        if not use.axes or name == self.target:
            self.fail(f"{quote(self.now.text)} applies to index arrays; {quote(name)} is not one")
        return self.take().text

    def of_operand(self, name: str, use: Use) -> str:
        """Read `pos(A)`, `pattern(A)` or `pattern(*)`; returns the operand or ANY."""
        token = self.take()
        if token.text == "pos" and use.axes is not None or token.text == "pattern" and name != self.target:
            kind = "an index of the target" if token.text == "pos" else "the target"
            self.fail(f"{token.text}(...) is declared of {kind}; {quote(name)} is not one", token.start)
        if self.now.kind != "(":
            self.unexpected(f"`(` and an operand, as in {token.text}(A)")
        opened = self.open()
        operand = self.take()
        if token.text == "pattern" and operand.kind == ANY:
            self.close(opened, "")
            return ANY
        if operand.text == self.target or not (known := self.uses.get(operand.text)) or not known.axes:
            self.fail(
                f"{token.text}(...) names an operand of the right side, found {quote(operand.text)}", operand.start
            )
        self.close(opened, "")
        return operand.text

    def range(self, name: str, use: Use) -> Range:
        if use.axes is not None:
            form = "its shape is declared as " + quote(f"{name}:[{','.join('_' * use.axes)}]")
            self.fail(f"{quote(name)} is an operand; {form if use.axes else 'it has no axes'}")
        place = self.now.start
        start, stop = 0, self.extent()
        if self.now.kind == "..":
            self.take()
            start, stop = stop, self.extent()
        if start > stop:
            self.fail(f"the range {start}..{stop} of {quote(name)} ends before it starts", place)
        return Range(start, stop)

    def shape(self, name: str, use: Use) -> tuple[int | None, ...]:
        if use.axes is None:
            self.fail(f"{quote(name)} is an index; its range is declared as {quote(name + ':10')}")
        opened = self.open()
        found = [self.open_extent()]
        while self.now.kind == ",":
            self.take()
            found.append(self.open_extent())
        self.close(opened, "`,` or ")
        if len(found) != use.axes:
            there = f"{count_axes(use.axes)} at {where(self.text, use.place)}"
            self.fail(f"{quote(name)} is declared with {count_axes(len(found))} and has {there}", opened.start)
        return tuple(found)

    def open_extent(self) -> int | None:
        if self.now.text != "_":
            return self.extent()
        self.take()
        return None

    def extent(self) -> int:
        place, sign = self.now.start, self.sign()
        if self.now.kind == "number":
            value = sign * self.integer("a declaration")
        elif self.now.text in self.integers:
            value = sign * self.integers[self.take().text]
        else:
            self.unexpected("an integer or the name of one that is passed")
        if value < 0:
            self.fail(f"an extent is at least 0, found {value}", place)
        return value


def _terms(products: list[_Product]) -> tuple[Term, ...]:
    return tuple(Term(product.factors, product.coefficient) for product in products)
