"""The oracle of the einsum language: what a statement means, as scalar loops over Python numbers.

It imports nothing of the library, has its own small reader of the text, and is slow on purpose. An operand is a table
from coordinates to a number, so a coordinate outside is simply not in the table. A point is a dict from index to
integer; whatever is missing at a point raises `Nothing`, and the point is skipped.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Number = int | float
Point = dict[str, int]
Tables = dict[str, dict[tuple[int, ...], Number]]


class OracleError(ValueError):
    """The statement, or what is passed to it, breaks a rule of the language."""


class Nothing(Exception):
    """Something read at this point is not there."""


# What a statement is made of
@dataclass(frozen=True)
class Affine:
    """constant + sum of coefficient * index + sum of coefficient * value of an index array."""

    constant: int
    indices: tuple[tuple[str, int], ...]
    reads: tuple[tuple[int, "Access"], ...]

    def bare(self) -> str | None:
        """The index that stands here alone, if that is all."""
        alone = self.constant == 0 and not self.reads and len(self.indices) == 1 and self.indices[0][1] == 1
        return self.indices[0][0] if alone else None


@dataclass(frozen=True)
class Access:
    name: str
    axes: tuple[Affine, ...]


@dataclass(frozen=True)
class Factor:
    """`kind` is read, exists or equal; `other` is the second argument of equal."""

    kind: str
    access: Access
    other: tuple["Term", ...] = ()


@dataclass(frozen=True)
class Term:
    """`summed`: the indices of the sum(...) around it."""

    coefficient: Number
    factors: tuple[Factor, ...]
    summed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Range:
    """[start, stop); `exact` for `p:14`, not for `p:2..5`."""

    start: int
    stop: int
    exact: bool = True


@dataclass(frozen=True)
class Statement:
    target: Access
    operator: str
    terms: tuple[Term, ...]
    ranges: dict[str, Range]
    shapes: dict[str, tuple[int | None, ...]]
    outer: tuple[str, ...] = ()

    def summed(self) -> set[str]:
        """What is summed before a max, min or mean: as the text says, else what products share below a scatter."""
        kept = set(indices_of([self.target, *inner_accesses(self.target)]))
        free = set(indices_of([a for term in self.terms for a in accesses(term)])) - kept
        said = {name for term in self.terms for name in term.summed}
        if self.outer or said:
            return free - set(self.outer) if self.outer else said
        shared = {name for name in free if all(is_shared(name, term) for term in self.terms)}
        if any(axis.reads or len(axis.indices) > 1 for axis in self.target.axes):
            if free != shared:
                raise OracleError(f"{free - shared} are summed or reduced: the text must say")
            return shared
        if shared and len(free) > 1:
            raise OracleError(f"{free} are summed or reduced: the text must say")
        return set()


def is_shared(name: str, term: Term) -> bool:
    count = sum(name in indices_of(list(accesses(Term(1, (factor,))))) for factor in term.factors)
    return count != 1 and (count > 1 or name not in indices_of(list(accesses(term))))


# The reader
TOKEN = re.compile(
    r"(?P<space>\s+|\#[^\n]*)|(?P<op>(?:max|min|mean)=|\+=|\.\.|[=+\-*()\[\],;:])"
    r"|(?P<number>(?:\d+(?:\.(?!\.)\d*)?|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[^\W\d]\w*)"
)
OPERATORS = ("=", "+=", "max=", "min=", "mean=")


def tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token, then ("end", "")."""
    found, place = [], 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise OracleError(f"cannot read {text[place:]!r}")
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match.group()))
        place = match.end()
    return [*found, ("end", "")]


class Reader:
    """Recursive descent, one method per rule of the grammar. `integers` are the given ones, by name."""

    def __init__(self, text: str, integers: Mapping[str, int]):
        self.tokens, self.place, self.integers = tokens(text), 0, integers

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[min(self.place + ahead, len(self.tokens) - 1)][1]

    def kind(self) -> str:
        return self.tokens[self.place][0]

    def take(self, *wanted: str) -> str:
        """The next token, which must be one of `wanted`, or of one of these kinds."""
        kind, text = self.tokens[self.place]
        if wanted and text not in wanted and kind not in wanted:
            raise OracleError(f"expected {' or '.join(wanted)}, found {text or 'the end'!r}")
        self.place += 1
        return text

    def accept(self, *wanted: str) -> str:
        return self.take() if self.kind() == "op" and self.peek() in wanted else ""

    def statement(self) -> Statement:
        target = self.access(self.take("name"))
        operator = self.take(*OPERATORS)
        outer: tuple[str, ...] = ()
        if self.peek() + "=" == operator and self.peek(1) == "(":
            self.take()
            outer, terms = self.named()
        else:
            terms = self.expression()
        ranges: dict[str, Range] = {}
        shapes: dict[str, tuple[int | None, ...]] = {}
        more = self.accept(";")
        while more:
            self.declaration(ranges, shapes)
            more = self.accept(";", ",")
        self.take("end")
        return Statement(target, operator, terms, ranges, shapes, outer)

    def named(self) -> tuple[tuple[str, ...], tuple[Term, ...]]:
        """The indices and the terms in the parentheses of sum(...) or max(...)."""
        self.take("(")
        names = []
        while self.kind() == "name" and self.peek(1) == ",":
            names.append(self.take("name"))
            self.take(",")
        terms = self.expression()
        self.take(")")
        return tuple(names), terms

    def declaration(self, ranges: dict, shapes: dict) -> None:
        name = self.take("name")
        if name in ranges or name in shapes:
            raise OracleError(f"{name} is declared twice")
        self.take(":")
        if self.accept("["):
            shapes[name] = self.declared_shape()
            return
        first = self.integer()
        ranges[name] = Range(first, self.integer(), exact=False) if self.accept("..") else Range(0, first)
        if ranges[name].start > ranges[name].stop:
            raise OracleError(f"the range of {name} ends before it starts")

    def declared_shape(self) -> tuple[int | None, ...]:
        extents: list[int | None] = []
        while not extents or self.accept(","):
            if self.peek() == "_":
                self.take()
                extents.append(None)
            else:
                extents.append(self.integer())
        self.take("]")
        return tuple(extents)

    def integer(self) -> int:
        """An integer, or the name of a given one."""
        text = self.take("number", "name")
        if text in self.integers:
            return self.integers[text]
        if not text.isdecimal():
            raise OracleError(f"expected an integer, found {text!r}")
        return int(text)

    def expression(self) -> tuple[Term, ...]:
        terms: list[Term] = []
        sign = -1 if self.accept("-") else 1
        while True:
            terms += [Term(sign * t.coefficient, t.factors, t.summed) for t in self.product()]
            step = self.accept("+", "-")
            if not step:
                return tuple(terms)
            sign = -1 if step == "-" else 1

    def product(self) -> list[Term]:
        """The terms of a product: it distributes over the sums in parentheses."""
        terms = self.factor()
        while self.accept("*"):
            right = self.factor()
            pairs = itertools.product(terms, right)
            terms = [Term(a.coefficient * b.coefficient, a.factors + b.factors, a.summed + b.summed) for a, b in pairs]
        return terms

    def factor(self) -> list[Term]:
        if self.accept("("):
            inner = list(self.expression())
            self.take(")")
            return inner
        if self.kind() == "number":
            text = self.take()
            return [Term(int(text) if text.isdecimal() else float(text), ())]
        name = self.take("name")
        if name == "sum" and self.peek() == "(":
            names, inner = self.named()
            return [Term(t.coefficient, t.factors, t.summed + names) for t in inner]
        if name in ("exists", "equal") and self.peek() == "(":
            return [Term(1, (self.call(name),))]
        access = self.access(name) if self.peek() == "[" else Access(name, ())
        return [Term(1, (Factor("read", access),))]

    def call(self, kind: str) -> Factor:
        self.take("(")
        access = self.access(self.take("name"))
        other = ()
        if kind == "equal":
            self.take(",")
            other = self.expression()
        self.take(")")
        return Factor(kind, access, other)

    def access(self, name: str) -> Access:
        self.take("[")
        axes = [self.affine()]
        while self.accept(","):
            axes.append(self.affine())
        self.take("]")
        return Access(name, tuple(axes))

    def affine(self) -> Affine:
        total = Affine(0, (), ())
        sign = -1 if self.accept("-") else 1
        while True:
            total = added(total, self.affine_term(), sign)
            step = self.accept("+", "-")
            if not step:
                return total
            sign = -1 if step == "-" else 1

    def affine_term(self) -> Affine:
        left = Affine(self.integer(), (), ()) if self.kind() == "number" else self.atom()
        if not self.accept("*"):
            return left
        right = Affine(self.integer(), (), ()) if self.kind() == "number" else self.atom()
        number, atom = (left, right) if not (left.indices or left.reads) else (right, left)
        if number.indices or number.reads:
            raise OracleError("a product of two indices is not affine")
        return added(Affine(0, (), ()), atom, number.constant)

    def atom(self) -> Affine:
        if self.accept("("):
            inner = self.affine()
            self.take(")")
            return inner
        name = self.take("name")
        if self.peek() == "[":
            return Affine(0, (), ((1, self.access(name)),))
        if name in self.integers:
            return Affine(self.integers[name], (), ())
        return Affine(0, ((name, 1),), ())


def added(a: Affine, b: Affine, scale: int) -> Affine:
    """a + scale * b, each index once, none with coefficient 0."""
    indices = dict(a.indices)
    for name, coefficient in b.indices:
        indices[name] = indices.get(name, 0) + scale * coefficient
    kept = tuple((name, c) for name, c in indices.items() if c != 0)
    return Affine(a.constant + scale * b.constant, kept, a.reads + tuple((scale * c, r) for c, r in b.reads))


# Walks
def inner_accesses(access: Access) -> Iterator[Access]:
    """The index arrays read in an access, at any depth."""
    for axis in access.axes:
        for _, read in axis.reads:
            yield read
            yield from inner_accesses(read)


def accesses(term: Term) -> Iterator[Access]:
    """Every access of a term, index arrays and the arguments of exists and equal included."""
    for factor in term.factors:
        yield factor.access
        yield from inner_accesses(factor.access)
        for other in factor.other:
            yield from accesses(other)


def indices_of(found: Sequence[Access]) -> list[str]:
    """The indices of these accesses, each once, in order of appearance."""
    return list(dict.fromkeys(name for access in found for axis in access.axes for name, _ in axis.indices))


# Sizes
@dataclass(frozen=True)
class Place:
    """One axis of one access: what stands there and how long the axis is."""

    name: str
    axis: Affine
    extent: int


@dataclass(frozen=True)
class Places:
    """`read` on the right side, `addressing` in index arrays of the target, `written` in a target of known shape."""

    read: list[Place]
    addressing: list[Place]
    written: list[Place]

    def all(self) -> list[Place]:
        return self.read + self.addressing + self.written


def known_shape(
    st: Statement, shapes: Mapping[str, tuple[int, ...]], given: Sequence[int | None] | None
) -> list[int | None]:
    """What is known of the target's shape before any inference."""
    rank = len(st.target.axes)
    declared = tuple(given) if given is not None else st.shapes.get(st.target.name, (None,) * rank)
    passed = shapes.get(st.target.name, declared)
    if not len(declared) == len(passed) == rank:
        raise OracleError(f"the target has {rank} axes, found shapes {declared} and {passed}")
    for a, b in zip(declared, passed, strict=True):
        if a is not None and a != b:
            raise OracleError(f"the target is declared {declared} and passed with {passed}")
    return list(passed)


def places(st: Statement, shapes: Mapping[str, tuple[int, ...]], target: Sequence[int | None]) -> Places:
    def of(found: Sequence[Access]) -> list[Place]:
        listed = []
        for access in found:
            if len(access.axes) != len(shapes[access.name]):
                raise OracleError(f"{access.name} has shape {shapes[access.name]}, {len(access.axes)} axes are used")
            listed += [Place(access.name, a, n) for a, n in zip(access.axes, shapes[access.name], strict=True)]
        return listed

    pairs = zip(st.target.axes, target, strict=True)
    return Places(
        of([access for term in st.terms for access in accesses(term)]),
        of(list(inner_accesses(st.target))),
        [Place(st.target.name, axis, n) for axis, n in pairs if n is not None],
    )


def ranges_of(names: Sequence[str], st: Statement, found: Places) -> dict[str, Range]:
    """The range of each index: from bare axes, then windows, then declarations."""
    ranges: dict[str, Range] = {}
    for name in names:
        extents = {p.extent for p in found.all() if p.axis.bare() == name}
        if name in st.ranges:
            ranges[name] = st.ranges[name]
            stop = ranges[name].stop
            if any(n != stop if ranges[name].exact else n < stop for n in extents):
                raise OracleError(f"{name} is declared {ranges[name]}, its axes have {sorted(extents)}")
        elif len(extents) > 1:
            raise OracleError(f"the axes of {name} have different extents {sorted(extents)}")
        elif extents:
            ranges[name] = Range(0, extents.pop())
    fixed = dict(ranges)
    for name in names:
        if name not in fixed:
            ranges[name] = window_range(name, found.read, fixed)
    return ranges


def window_range(name: str, read: Sequence[Place], fixed: Mapping[str, Range]) -> Range:
    """The largest [0, n) that keeps every window of `name` inside; all other indices in them are fixed already."""
    windows = [p for p in read if not p.axis.reads and name in dict(p.axis.indices)]
    others = {other for p in windows for other, _ in p.axis.indices if other != name}
    if not windows or not others <= set(fixed):
        raise OracleError(f"the range of {name} is not determined: declare it")
    if any(fixed[other].start == fixed[other].stop for other in others):
        raise OracleError(f"the range of {name} is not determined, as another index of its window is empty: declare it")

    def inside(value: int) -> bool:
        trial = {**fixed, name: Range(value, value + 1)}
        return all(stays_inside(p, trial) for p in windows)

    # A window of nonzero coefficient leaves its operand at the latest after as many steps as the operand is long.
    longest = max(p.extent for p in windows)
    stop = next(n for n in range(longest + 1) if not inside(n))
    if stop == 0 and any(bounds(p.axis, {**fixed, name: Range(0, 1)})[0] < 0 for p in windows):
        raise OracleError(f"{name} = 0 is already left of a window: declare the range of {name}")
    return Range(0, stop)


def bounds(axis: Affine, ranges: Mapping[str, Range]) -> tuple[int, int]:
    """Smallest and largest value of an affine expression without index arrays; (0, -1) where a range is empty."""
    used = [(ranges[name], c) for name, c in axis.indices]
    if any(r.start >= r.stop for r, _ in used):
        return 0, -1
    ends = [sorted((c * r.start, c * (r.stop - 1))) for r, c in used]
    return axis.constant + sum(e[0] for e in ends), axis.constant + sum(e[1] for e in ends)


def stays_inside(place: Place, ranges: Mapping[str, Range]) -> bool:
    low, high = bounds(place.axis, ranges)
    return high < low or (low >= 0 and high < place.extent)


def check_windows(st: Statement, found: Places, ranges: Mapping[str, Range]) -> None:
    """A window leaves its operand only where an index of it is declared."""
    for p in found.all():
        declared = any(name in st.ranges for name, _ in p.axis.indices)
        if not p.axis.reads and not declared and not stays_inside(p, ranges):
            raise OracleError(f"an index of {p.name} spans {bounds(p.axis, ranges)}, the axis has {p.extent}")


def target_shape(st: Statement, known: Sequence[int | None], ranges: Mapping[str, Range]) -> tuple[int, ...]:
    extents: list[int] = []
    for place, (axis, extent) in enumerate(zip(st.target.axes, known, strict=True)):
        name = axis.bare()
        if extent is None and axis.reads:
            raise OracleError(f"axis {place} of {st.target.name} is addressed by an index array: declare its shape")
        if extent is None and name is None and bounds(axis, ranges)[0] < 0:
            raise OracleError(f"axis {place} of {st.target.name} starts at {bounds(axis, ranges)[0]}")
        if extent is None:
            extent = ranges[name].stop if name is not None else bounds(axis, ranges)[1] + 1
        extents.append(extent)
    return tuple(extents)


# Values at one point
def value_at(access: Access, point: Point, tables: Tables) -> Number:
    where = tuple([position(axis, point, tables) for axis in access.axes])
    value = tables[access.name].get(where)
    if value is None:
        raise Nothing
    return value


def position(axis: Affine, point: Point, tables: Tables) -> int:
    total = axis.constant
    for name, coefficient in axis.indices:
        total += coefficient * point[name]
    for coefficient, read in axis.reads:
        value = value_at(read, point, tables)
        if value < 0:
            raise Nothing
        total += coefficient * int(value)
    return total


def exists(access: Access, point: Point, tables: Tables) -> int:
    try:
        value_at(access, point, tables)
    except Nothing:
        return 0
    return 1


def factor_at(factor: Factor, point: Point, tables: Tables) -> Number:
    if factor.kind == "exists":
        return exists(factor.access, point, tables)
    value = value_at(factor.access, point, tables)
    if factor.kind == "equal":
        return int(value == expression_at(factor.other, point, tables))
    return value


def term_at(term: Term, point: Point, tables: Tables) -> Number:
    value = term.coefficient
    for factor in term.factors:
        value *= factor_at(factor, point, tables)
    return value


def expression_at(terms: Sequence[Term], point: Point, tables: Tables) -> Number:
    return sum(term_at(term, point, tables) for term in terms)


# The loops
def written(
    target: Access, terms: Sequence[Term], ranges: Mapping[str, Range], tables: Tables, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], Number]]:
    """(entry, value of the terms together) at each point of their own nest where everything is there."""
    found = [target, *inner_accesses(target), *(access for term in terms for access in accesses(term))]
    names = indices_of(found)
    for values in itertools.product(*(range(ranges[name].start, ranges[name].stop) for name in names)):
        point = dict(zip(names, values, strict=True))
        try:
            entry = tuple([position(axis, point, tables) for axis in target.axes])
            value = expression_at(terms, point, tables)
        except Nothing:
            continue
        if all(0 <= at < extent for at, extent in zip(entry, shape, strict=True)):
            yield entry, value


def evaluate(
    text: str,
    operands: Mapping[str, np.ndarray | int | float],
    shape: Sequence[int | None] | None = None,
    sparse: Sequence[str] = (),
) -> np.ndarray:
    """The target of the statement, float64.

    `shape` stands for a declared shape of the target, None where an axis is inferred. Operands named in `sparse` have
    no entries where they are 0. Raises OracleError where the
    statement or the operands break a rule.
    """
    integers = {name: int(v) for name, v in operands.items() if isinstance(v, int | np.integer)}
    st = Reader(text, integers).statement()
    check_names(st, operands)
    arrays = {name: np.asarray(v) for name, v in operands.items()}
    check_declared_shapes(st, arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    known = known_shape(st, shapes, shape)
    found = places(st, shapes, known)
    names = indices_of([st.target, *inner_accesses(st.target), *(a for term in st.terms for a in accesses(term))])
    if set(st.ranges) - set(names):
        raise OracleError(f"{sorted(set(st.ranges) - set(names))} are declared and not used")
    ranges = ranges_of(names, st, found)
    check_windows(st, found, ranges)
    final = target_shape(st, known, ranges)
    tables = {name: dict(zip(np.ndindex(a.shape), a.ravel().tolist(), strict=True)) for name, a in arrays.items()}
    tables |= {name: {at: value for at, value in tables[name].items() if value} for name in sparse}
    old = arrays.get(st.target.name)
    loops = summed if st.operator in ("=", "+=") else joined
    values = loops(st, ranges, tables, final)
    result = np.zeros(final)
    if st.operator in ("+=", "max=", "min=") and old is not None:
        result = old.astype(np.float64)
    for entry, value in values.items():
        if st.operator in ("max=", "min=") and old is not None:
            value = JOINS[st.operator]([value, float(old[entry])])
        result[entry] = result[entry] + value if st.operator == "+=" else value
    return result


def summed(st: Statement, ranges: Mapping[str, Range], tables: Tables, shape: tuple[int, ...]) -> dict:
    """Each term over its own indices and the target's."""
    lists: dict[tuple[int, ...], list[Number]] = {}
    for term in st.terms:
        for entry, value in written(st.target, [term], ranges, tables, shape):
            lists.setdefault(entry, []).append(value)
    return {entry: sum(values) for entry, values in lists.items()}


def joined(st: Statement, ranges: Mapping[str, Range], tables: Tables, shape: tuple[int, ...]) -> dict:
    """The whole right side at each point of the nest of all indices but those that each term sums."""
    inner = st.summed()
    found = [st.target, *inner_accesses(st.target), *(access for term in st.terms for access in accesses(term))]
    names = [name for name in indices_of(found) if name not in inner]
    lists: dict[tuple[int, ...], list[Number]] = {}
    for values in itertools.product(*(range(ranges[name].start, ranges[name].stop) for name in names)):
        point = dict(zip(names, values, strict=True))
        try:
            entry = tuple([position(axis, point, tables) for axis in st.target.axes])
            value = sum(inner_sum(term, inner, point, ranges, tables) for term in st.terms)
        except Nothing:
            continue
        if all(0 <= at < extent for at, extent in zip(entry, shape, strict=True)):
            lists.setdefault(entry, []).append(value)
    return {entry: JOINS[st.operator](values) for entry, values in lists.items()}


def inner_sum(term: Term, inner: set[str], point: Point, ranges: Mapping[str, Range], tables: Tables) -> Number:
    """The term summed over its inner indices; Nothing where it is nothing for all of them."""
    names = [name for name in indices_of(list(accesses(term))) if name in inner]
    found = []
    for values in itertools.product(*(range(ranges[name].start, ranges[name].stop) for name in names)):
        try:
            found.append(term_at(term, {**point, **dict(zip(names, values, strict=True))}, tables))
        except Nothing:
            continue
    if not found:
        raise Nothing
    return sum(found)


JOINS = {"max=": max, "min=": min, "mean=": lambda values: sum(values) / len(values)}


# What is passed
def check_names(st: Statement, operands: Mapping[str, object]) -> None:
    """Every operand is passed, no name is an index and an operand, index arrays hold integers."""
    found = [a for term in st.terms for a in accesses(term)] + list(inner_accesses(st.target))
    for access in found:
        if access.name not in operands:
            raise OracleError(f"{access.name} is not passed")
    for name in indices_of([st.target, *found]):
        if name in operands or name == st.target.name:
            raise OracleError(f"{name} is an index and an operand")
    for access in [st.target, *found]:
        for read in inner_accesses(access):
            if np.asarray(operands[read.name]).dtype.kind not in "iu":
                raise OracleError(f"{read.name} is used in an index and does not hold integers")
    if st.operator == "+=" and st.target.name not in operands:
        raise OracleError(f"+= adds to {st.target.name}, which is not passed")


def check_declared_shapes(st: Statement, arrays: Mapping[str, np.ndarray]) -> None:
    for name, declared in st.shapes.items():
        if name == st.target.name:
            continue
        shape = arrays[name].shape if name in arrays else ()
        if len(shape) != len(declared) or any(d not in (None, n) for d, n in zip(declared, shape, strict=True)):
            raise OracleError(f"{name} is declared {declared}, found {shape}")
