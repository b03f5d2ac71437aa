"""Syntax tree of statements: frozen dataclasses; str() of each is normalised statement text.

    C[AM[p], n] += 2 * AV[p,q] * B[AK[p,q], n] ; p:10

    statement   target, whether it is overwritten ("=") or added to ("+="), reduction, terms, declarations
    term        a coefficient and factors that are multiplied
    factor      Access: a value of an operand.  Exists, Equal: conditions, 1 or 0
    access      an operand and one affine index expression for each axis of it
    affine      a constant and a sum of coefficient * atom; an atom is an index or an access to an integer operand

Semantics at each point of the index space: a term contributes nothing if it reads (at any depth) a negative entry of an
index array, or outside an operand. Under max, min and mean one such term excludes the point for all terms.
Under sum, each term runs over its own indices; under max, min and mean, over the indices of all terms that are not
`summed`. Each term is first summed over its summed indices; a sum without any point excludes the point around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

EVERY = ":"  # on an axis: all positions of a level

ANY = "*"  # the pattern of a target: what some product reaches

FACTS = ("sorted", "distinct", "onto")  # properties of index arrays that a statement may declare

REDUCTIONS = ("sum", "max", "min", "mean")  # of the values that belong to one target entry


@dataclass(frozen=True)
class Span:
    """Characters start..stop of the text that a node was read from."""

    start: int
    stop: int


_NOWHERE = Span(0, 0)


class _Hashed:
    """Mixin that caches a node's hash: nodes are keys of many caches."""

    def __init_subclass__(cls) -> None:
        cls.__hash__ = _Hashed.__hash__  # else dataclasses make their own

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, str(self)))


@dataclass(frozen=True)
class Index:
    """An index variable, which runs over the points of its range."""

    name: str
    span: Span = field(default=_NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Affine(_Hashed):
    """constant + sum of coefficient * atom. Coefficients are not 0 and no atom occurs twice; see `affine`."""

    terms: tuple[tuple[int, Index | Access], ...]
    constant: int = 0
    span: Span = field(default=_NOWHERE, compare=False, repr=False)

    @property
    def bare(self) -> str | None:
        """The index's name if the expression is a single index, else None."""
        if self.constant or len(self.terms) != 1:
            return None
        (coefficient, atom), *_ = self.terms
        return atom.name if coefficient == 1 and isinstance(atom, Index) else None

    @property
    def arrays(self) -> tuple[Access, ...]:
        """The index arrays read directly (not those inside them)."""
        return tuple(atom for _, atom in self.terms if isinstance(atom, Access))

    def __str__(self) -> str:
        text = ""
        for coefficient, atom in self.terms:
            sign = ("-" if coefficient < 0 else "+") if text or coefficient < 0 else ""
            text += sign + (f"{abs(coefficient)}*" if abs(coefficient) != 1 else "") + str(atom)
        if self.constant or not text:
            text += f"{self.constant:+d}" if text else str(self.constant)
        return text


@dataclass(frozen=True)
class Access(_Hashed):
    """A value of the operand `name`; a scalar has no indices."""

    name: str
    indices: tuple[Affine, ...] = ()
    span: Span = field(default=_NOWHERE, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.indices))}]" if self.indices else self.name


@dataclass(frozen=True)
class Exists(_Hashed):
    """1 if the access is inside its operand and reads no negative index; otherwise its term contributes nothing."""

    access: Access

    def __str__(self) -> str:
        return f"exists({self.access})"


@dataclass(frozen=True)
class Equal(_Hashed):
    """1 if the value of the access equals the sum of the terms, otherwise 0. Its derivative is 0."""

    access: Access
    terms: tuple[Term, ...]

    def __str__(self) -> str:
        return f"equal({self.access}, {_sum(self.terms)})"


Factor = Access | Exists | Equal


@dataclass(frozen=True)
class Term(_Hashed):
    """coefficient * the product of the factors."""

    factors: tuple[Factor, ...]
    coefficient: float = 1

    def __str__(self) -> str:
        parts = [str(factor) for factor in self.factors]
        if self.coefficient != 1 or not parts:
            parts.insert(0, repr(self.coefficient))
        return " * ".join(parts)


@dataclass(frozen=True)
class Range:
    """The points start <= i < stop of an index."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __str__(self) -> str:
        return f"{self.start}..{self.stop}" if self.start else str(self.stop)


@dataclass(frozen=True)
class Statement(_Hashed):
    """target (=, +=, max=, min=, mean=) the sum of the terms.

    accumulate: the target's old value is included (always for "+="; for max= and min= if the target is an operand).
    summed: indices that are summed before a max, min or mean is taken.
    positions: (index of the target, operand whose positions it runs over); only such a statement has axes `:`.
    pattern: the operand whose pattern the target has, ANY if it is computed; "" for a dense target.
    fused: (operand, number of indices on each of its axes), for operands read with groups `(n,p)` of indices; the
        accesses, and the text of a statement, have an axis for each index.
    ranges: declared (index, range). shapes: declared (operand, extents), None for undeclared extents. facts: declared
        (index array, fact): "sorted" (non-decreasing), "distinct" (no value but -1 occurs twice), "onto" (every
        position of the axis that the array addresses occurs).
    """

    target: Access
    terms: tuple[Term, ...]
    reduction: str = "sum"
    accumulate: bool = False
    ranges: tuple[tuple[str, Range], ...] = ()
    shapes: tuple[tuple[str, tuple[int | None, ...]], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    summed: tuple[str, ...] = ()
    positions: tuple[tuple[str, str], ...] = ()
    pattern: str = ""
    fused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    text: str = field(default="", compare=False, repr=False)

    @property
    def operator(self) -> str:
        if self.reduction == "sum":
            return "+=" if self.accumulate else "="
        return f"{self.reduction}="

    def declared(self, index: str) -> Range | None:
        return dict(self.ranges).get(index)

    def __str__(self) -> str:
        declarations = [f"{name}:{extent}" for name, extent in self.ranges]
        declarations += [f"{name}:[{','.join('_' if n is None else str(n) for n in s)}]" for name, s in self.shapes]
        declarations += [f"{name}:{fact}" for name, fact in self.facts]
        declarations += [f"{name}:pos({operand})" for name, operand in self.positions]
        declarations += [f"{self.target.name}:pattern({self.pattern})"] if self.pattern else []
        tail = f" ; {', '.join(declarations)}" if declarations else ""
        return f"{self.target} {self.operator} {self._right()}{tail}"

    def _right(self) -> str:
        """The right side; the indices of a max, min or mean are named where `default_sums` gives others."""
        found = default_sums(self.target, self.terms)
        if self.reduction == "sum" or found == (self.summed, ()):
            return _sum(self.terms)
        if self.summed:
            return " + ".join(_summed(term, self.summed) for term in self.terms)
        return f"{self.reduction}({', '.join(free_indices(self.target, self.terms))}, {_sum(self.terms)})"


Node = Statement | Term | Factor | Affine | Index


def affine(
    terms: list[tuple[int, Index | Access]] | tuple[tuple[int, Index | Access], ...],
    constant: int = 0,
    span: Span = _NOWHERE,
) -> Affine:
    """The expression with the coefficients of equal atoms added, and atoms of coefficient 0 removed."""
    joined: dict[Index | Access, int] = {}
    for coefficient, atom in terms:
        joined[atom] = joined.get(atom, 0) + coefficient
    return Affine(tuple((c, atom) for atom, c in joined.items() if c), constant, span)


def index(name: str) -> Affine:
    """The bare index `name` as an expression."""
    return Affine(((1, Index(name)),))


def children(node: Node) -> tuple[Node, ...]:
    """The direct child nodes; the target of a statement comes first."""
    match node:
        case Statement():
            return (node.target, *node.terms)
        case Term():
            return node.factors
        case Equal():
            return (node.access, *node.terms)
        case Exists():
            return (node.access,)
        case Access():
            return node.indices
        case Affine():
            return tuple(atom for _, atom in node.terms)
    return ()


def walk(node: Node) -> Iterator[Node]:
    """The node and all its descendants, parents first, in the order of the text."""
    yield node
    for child in children(node):
        yield from walk(child)


@lru_cache(maxsize=16384)
def indices_of(*nodes: Node) -> tuple[str, ...]:
    """The index variables in the nodes, at any depth, each once, in the order of first mention."""
    return tuple(dict.fromkeys(node.name for root in nodes for node in walk(root) if isinstance(node, Index)))


@lru_cache(maxsize=16384)
def accesses_of(*nodes: Node) -> tuple[Access, ...]:
    """Every access in the nodes, index arrays included, in the order of the text."""
    return tuple(node for root in nodes for node in walk(root) if isinstance(node, Access))


@lru_cache(maxsize=16384)
def arrays_of(*nodes: Node) -> tuple[Access, ...]:
    """Every access to an index array, at any depth, each once; an access comes after those in its indices."""
    found: dict[Access, None] = {}
    for root in nodes:
        for node in walk(root):
            if isinstance(node, Affine):
                for access in node.arrays:
                    found.update(dict.fromkeys((*arrays_of(access), access)))
    return tuple(found)


def free_indices(target: Access, terms: tuple[Term, ...]) -> tuple[str, ...]:
    """The indices of the terms that are not in the target."""
    kept = indices_of(target)
    return tuple(name for name in indices_of(*terms) if name not in kept)


def default_sums(target: Access, terms: tuple[Term, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(indices summed within a max, min or mean whose text names none, those for which that is ambiguous).

    Where several points write to one target entry, the reduction acts over these, and an index that several factors
    share, as the channels of a matrix product, is summed. Elsewhere it acts over all indices that the target lacks;
    these must be a single one, or none of them shared.
    """
    free = free_indices(target, terms)
    shared = [name for name in free if all(_is_shared(name, term) for term in terms if name in indices_of(term))]
    if any(expression.arrays or len(expression.terms) > 1 for expression in target.indices):
        return tuple(shared), tuple(name for name in free if name not in shared)
    return (), free if shared and len(free) > 1 else ()


def _is_shared(name: str, term: Term) -> bool:
    return sum(name in indices_of(factor) for factor in term.factors) > 1


def substitute(node: Any, indices: dict[str, Affine]) -> Any:
    """The node with index variables replaced by expressions."""
    match node:
        case Statement():
            return replace(
                node,
                target=substitute(node.target, indices),
                terms=tuple(substitute(term, indices) for term in node.terms),
            )
        case Term():
            return replace(node, factors=tuple(substitute(factor, indices) for factor in node.factors))
        case Equal():
            return Equal(substitute(node.access, indices), tuple(substitute(t, indices) for t in node.terms))
        case Exists():
            return Exists(substitute(node.access, indices))
        case Access():
            return replace(node, indices=tuple(substitute(i, indices) for i in node.indices))
        case Affine():
            return _substituted(node, indices)
    raise TypeError(f"{type(node).__name__} holds no index expressions")


def _substituted(expression: Affine, indices: dict[str, Affine]) -> Affine:
    terms: list[tuple[int, Index | Access]] = []
    constant = expression.constant
    for coefficient, atom in expression.terms:
        if isinstance(atom, Access):
            terms.append((coefficient, substitute(atom, indices)))
        elif atom.name in indices:
            inner = indices[atom.name]
            terms += [(coefficient * c, a) for c, a in inner.terms]
            constant += coefficient * inner.constant
        else:
            terms.append((coefficient, atom))
    return affine(terms, constant, expression.span)


def _summed(term: Term, names: tuple[str, ...]) -> str:
    own = [name for name in names if name in indices_of(term)]
    return f"sum({', '.join(own)}, {term})" if own else str(term)


def _sum(terms: tuple[Term, ...]) -> str:
    return " + ".join(map(str, terms)) if terms else "0"
