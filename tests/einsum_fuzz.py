"""Random valid statements of the einsum language, with operands: the same case for the same seed everywhere.

Indices get their ranges first; every axis is then made as long as what stands on it needs. `features` names what a
case holds, so that a test can count them. `python tests/einsum_fuzz.py` evaluates the first thousand.
"""

import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

INDEX_NAMES = ("i", "j", "k", "p", "q", "row", "tap_1", "β", "n0", "Z")
ARRAY_NAMES = ("A", "B", "val", "Weights", "D", "x1", "_t", "E2", "λ", "Feature", "G", "H", "bias", "M", "U", "V")
MAP_NAMES = ("AK", "AM", "rows", "X", "Y", "col_of", "seg", "L", "X2", "Pos", "T", "W", "AI", "AJ", "AP", "AQ")
TARGETS = ("C", "Out", "y", "out_1")
SCALARS = ("alpha", "beta", "s0")
INTEGERS = ("STR", "d", "N")
OPERATORS = ("=", "=", "=", "+=", "+=", "+=", "max=", "min=", "mean=")
SIZES = (2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7)
FEW, MANY = 1_500, 7_000
DEPTH = 3


@dataclass(frozen=True)
class Case:
    """A statement and what it is called with: arrays (float64, int64), and Python ints for given integers."""

    text: str
    operands: dict[str, np.ndarray | int]
    features: frozenset[str]
    seed: int

    def __str__(self) -> str:
        return f"seed{self.seed}"


@dataclass(frozen=True)
class Index:
    """[start, stop). `kind` tells what fixes it: a bare axis, a window, a declared size or a declared span."""

    name: str
    start: int
    stop: int
    kind: str

    @property
    def declared(self) -> bool:
        return self.kind in ("size", "span")

    @property
    def empty(self) -> bool:
        return self.start == self.stop


@dataclass
class Draft:
    """A case in the making."""

    seed: int
    rng: random.Random
    numbers: np.random.Generator
    indices: list[Index] = field(default_factory=list)
    operands: dict[str, np.ndarray | int] = field(default_factory=dict)
    features: set[str] = field(default_factory=set)
    axes: dict[str, list[str]] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def note(self, feature: str) -> None:
        self.features.add(feature)

    def index(self, name: str) -> Index:
        return next(i for i in self.indices if i.name == name)


# Indices
def draw_indices(d: Draft) -> None:
    """Two to five indices; the product of their sizes stays below a limit that is usually small."""
    names = d.rng.sample(INDEX_NAMES, d.rng.choice((2, 2, 3, 3, 3, 4, 4, 5)))
    big = d.chance(0.04)
    limit = MANY if big else FEW
    sizes = [draw_size(d) * (d.rng.choice((2, 3)) if big else 1) for _ in names]
    while math.prod(max(size, 1) for size in sizes) > limit:
        largest = sizes.index(max(sizes))
        sizes[largest] //= 2
    if d.chance(0.3):
        sizes[1] = sizes[0]
    if math.prod(max(size, 1) for size in sizes) > limit:
        sizes[1] = sizes[0] = 2
    for name, size in zip(names, sizes, strict=True):
        kind = d.rng.choice(("bare", "bare", "bare", "bare", "window", "size", "size", "span"))
        kind = "bare" if size == 0 and kind != "size" else kind
        start = d.rng.randint(1, 3) if kind == "span" else 0
        d.indices.append(Index(name, start, start + size, kind))


def draw_size(d: Draft) -> int:
    at = d.rng.random()
    if at < 0.025:
        return 0
    return 1 if at < 0.1 else d.rng.choice(SIZES)


# One axis of an access: its text and how long the axis is, or at least how long
def span_of(parts: list[tuple[int, Index]]) -> tuple[int, int]:
    """Smallest and largest sum of coefficient * index, nothing being empty."""
    low = sum(min(c * i.start, c * (i.stop - 1)) for c, i in parts)
    return low, sum(max(c * i.start, c * (i.stop - 1)) for c, i in parts)


def bare_axis(d: Draft, index: Index) -> tuple[str, int]:
    d.settled.add(index.name)
    if index.kind == "span":
        d.note("span on a bare axis")
        return index.name, index.stop + d.rng.randint(0, 2)
    return index.name, index.stop


def scaled(d: Draft, coefficient: int, atom: str) -> str:
    """coefficient * atom in one of its spellings, sign left out."""
    size = abs(coefficient)
    if size == 1:
        return atom
    name = given_integer(d, size)
    if name:
        return f"{name}*{atom}"
    return d.rng.choice((f"{size}*{atom}", f"{size}*{atom}", f"{atom}*{size}"))


def given_integer(d: Draft, value: int) -> str:
    """Sometimes the name of a given integer of this value."""
    names = [name for name in INTEGERS if d.operands.get(name, value) == value]
    if not names or not d.chance(0.2):
        return ""
    d.note("given integer")
    d.operands[names[0]] = value
    return names[0]


def affine_text(d: Draft, parts: list[tuple[int, str]], constant: int) -> str:
    coefficient = parts[0][0] if len(parts) == 1 else 0
    if coefficient > 1 and constant and constant % coefficient == 0 and d.chance(0.5):
        d.note("parenthesised index")
        return scaled(d, coefficient, f"({affine_text(d, [(1, parts[0][1])], constant // coefficient)})")
    pieces = [("-" if c < 0 else "+", scaled(d, c, atom)) for c, atom in parts]
    if constant:
        pieces.append(("-" if constant < 0 else "+", given_integer(d, abs(constant)) or str(abs(constant))))
    if len(pieces) > 1 and d.chance(0.3):
        d.rng.shuffle(pieces)
    if len(pieces) > 2 and d.chance(0.2):
        d.note("parenthesised index")
        return f"({joined(pieces[:2])}){joined(pieces[2:], first=False)}"
    return joined(pieces)


def joined(pieces: list[tuple[str, str]], first: bool = True) -> str:
    """Signs and pieces in a row; no plus in front of the first."""
    text = "".join(sign + piece for sign, piece in pieces)
    return text[1:] if first and text.startswith("+") else text


def window_axis(d: Draft, first: Index, side: str) -> tuple[str, int]:
    """An affine expression of one or two indices. `side` is read, or known or inferred for a target."""
    parts = [(d.rng.choice((1, 1, 1, 2, 2, 3)), first)]
    # The range of a window's index comes out right only when all others are fixed without it.
    others = [i for i in d.indices if i != first and not i.empty and (i.kind != "window" or side != "read")]
    if others and d.chance(0.6):
        parts.append((d.rng.choice((1, 1, 2, -1)), d.rng.choice(others)))
        d.note("window of two")
    if first.kind == "window" and first.name not in d.settled and side == "read":
        return settling_window(d, parts)
    if d.chance(0.12):
        parts[0] = (-parts[0][0], first)
    if any(c > 1 for c, _ in parts):
        d.note("stride")
    low, high = span_of(parts)
    # A window that an index has its range from stays inside, or it would give another range.
    giving = side == "read" and any(i.kind == "window" for _, i in parts)
    free = any(i.declared for _, i in parts) and side != "inferred" and not giving
    constant = -low + d.rng.choice((0, 0, 1))
    length = high + constant + 1 + (0 if side == "inferred" else d.rng.choice((0, 0, 1, 2)))
    if free and d.chance(0.75):
        shift = d.rng.randint(0, min(2, high - low))
        cut = d.rng.randint(0 if shift else 1, 2)
        constant, length = constant - shift, max(length - shift - cut, 1)
    # Without a constant it would be a bare axis.
    if len(parts) == 1 and parts[0][0] == 1 and constant == 0:
        constant, length = 1, length + 1
    if low + constant < 0 or high + constant >= length:
        d.note("window leaves" if side == "read" else "target window leaves")
    if constant < 0:
        d.note("negative offset")
    names = [(c, i.name) for c, i in parts]
    return affine_text(d, names, constant), length


def settling_window(d: Draft, parts: list[tuple[int, Index]]) -> tuple[str, int]:
    """A window just long enough for the index that it gives its range to, parts[0]."""
    coefficient, first = parts[0]
    d.settled.add(first.name)
    low, high = span_of(parts)
    constant = -low + d.rng.choice((0, 0, 1, 2))
    if len(parts) == 1 and coefficient == 1 and constant == 0:
        constant = 1
    if coefficient > 1:
        d.note("stride")
    if constant < 0:
        d.note("negative offset")
    d.note("range from a window")
    names = [(c, i.name) for c, i in parts]
    return affine_text(d, names, constant), high + constant + 1 + d.rng.randrange(coefficient)


def mapped_axis(d: Draft, indices: list[Index], depth: int, extent: int | None = None) -> tuple[str, int]:
    """An axis addressed through an index array, perhaps with an affine expression around it."""
    extent = d.rng.choice((1, 2, 3, 3, 4, 5, 6)) if extent is None else extent
    bound, before, after = extent, "", ""
    if d.chance(0.3):
        coefficient = d.rng.choice((1, 2, 2, 3))
        bound = -(-extent // coefficient)
        others = [i for i in d.indices if i.declared or (i.kind == "bare" and i.name in d.settled)]
        parts = [(1, d.rng.choice(others).name)] if others and d.chance(0.7) else []
        constant = d.rng.choice((-1, 0, 1)) if parts else d.rng.choice((0, 1))
        if coefficient > 1 or parts or constant:
            d.note("affine around an index array")
        if constant < 0:
            d.note("negative offset")
        before = f"{coefficient}*" if coefficient > 1 else ""
        if coefficient > 1 and d.chance(0.3):
            before = ""
            after = f"*{coefficient}"
        tail = affine_text(d, parts, constant)
        after += tail if tail.startswith("-") or not tail else f"+{tail}"
    return before + map_access(d, indices, depth, bound) + after, extent


def map_access(d: Draft, indices: list[Index], depth: int, bound: int) -> str:
    """An index array with values below `bound`, perhaps one that is there already."""
    d.note(f"depth {depth}")
    known = [name for name in d.bounds if 0 < d.bounds[name] <= bound]
    if known and d.chance(0.25):
        d.note("index array used twice")
        again = d.rng.choice(known)
        return f"{again}[{','.join(d.axes[again])}]"
    count = 2 if len(indices) > 1 and d.chance(0.35) else 1
    texts, shape = [], []
    for index in d.rng.sample(indices, count):
        text, length = map_inner_axis(d, indices, index, depth)
        texts.append(text)
        shape.append(length)
    name = d.maps.pop()
    d.operands[name] = map_values(d, tuple(shape), bound)
    d.axes[name], d.bounds[name] = texts, bound
    return f"{name}[{','.join(texts)}]"


def map_inner_axis(d: Draft, indices: list[Index], index: Index, depth: int) -> tuple[str, int]:
    if depth < DEPTH and d.chance(0.3):
        return mapped_axis(d, indices, depth + 1)
    if d.chance(0.12) and not index.empty and index.kind != "window":
        return window_axis(d, index, "read")
    # An index that only a window can fix must not stand bare anywhere.
    if index.kind == "window":
        return window_axis(d, index, "read")
    return bare_axis(d, index)


def map_values(d: Draft, shape: tuple[int, ...], bound: int) -> np.ndarray:
    values = d.numbers.integers(0, bound, size=shape, dtype=np.int64)
    if values.size == 0:
        d.note("empty index array")
    elif d.chance(0.4):
        gone = d.numbers.random(shape) < 0.25
        values[gone] = -1
        d.features |= {"-1 in an index array"} if gone.any() else set()
    if len(np.unique(values)) < values.size:
        d.note("duplicates in an index array")
    return values


# Accesses of the right side
def draw_axis(d: Draft, index: Index) -> tuple[str, int]:
    at = d.rng.random()
    if at < 0.16 and not index.empty:
        if index.kind == "window" and index.name not in d.settled:
            return window_axis(d, index, "read")
        d.note("indirect factor")
        pool = [i for i in d.indices if i.kind != "window"] or [index]
        return mapped_axis(d, list(dict.fromkeys([index, *pool]))[:3], 1)
    if index.kind == "window" or (at < 0.36 and not index.empty):
        return window_axis(d, index, "read")
    return bare_axis(d, index)


def draw_access(d: Draft, wanted: list[Index]) -> str:
    """A new operand that meets each of `wanted`, or an operand that is there already."""
    if d.axes and d.chance(0.15):
        again = [name for name in d.axes if name not in d.bounds]
        if again:
            return again_access(d, d.rng.choice(again))
    texts, shape = [], []
    for index in wanted:
        text, length = draw_axis(d, index)
        texts.append(text)
        shape.append(length)
    repeat = [i for i in wanted if i.kind in ("bare", "size")]
    if repeat and d.chance(0.12):
        text, length = bare_axis(d, repeat[0])
        texts.append(text)
        shape.append(length)
    if d.chance(0.05):
        texts.append(str(d.rng.randint(0, 1)))
        shape.append(d.rng.randint(2, 3))
        d.note("constant index")
    plain = [t for t in texts if t.isidentifier()]
    if len(plain) > len(set(plain)):
        d.note("diagonal")
    name = d.names.pop()
    d.axes[name] = texts
    d.operands[name] = draw_values(d, tuple(shape))
    return f"{name}[{','.join(texts)}]"


def draw_values(d: Draft, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:
        d.note("zero-size operand")
    if 1 in shape:
        d.note("size-1 axis")
    return np.asarray(d.numbers.integers(-8, 9, size=shape) / 4 + d.numbers.normal(size=shape) / 8)


def again_access(d: Draft, name: str) -> str:
    """The same operand, with other indices where they fit."""
    d.note("operand used twice")
    array = d.operands[name]
    assert isinstance(array, np.ndarray)
    texts = []
    for text, length in zip(d.axes[name], array.shape, strict=True):
        fits = [i for i in d.indices if (i.kind in ("bare", "size") and i.stop == length)]
        fits += [i for i in d.indices if i.kind == "span" and i.stop <= length]
        pick = d.rng.choice(fits) if fits and d.chance(0.5) else None
        texts.append(bare_axis(d, pick)[0] if pick else text)
    return f"{name}[{','.join(texts)}]"


# Terms
def draw_term(d: Draft, operator: str) -> str:
    factors = [draw_factor(d, operator) for _ in range(d.rng.choice((1, 1, 2, 2, 2, 3, 4)))]
    d.note(f"{len(factors)} factors")
    if d.chance(0.15):
        factors.append(draw_scalar(d))
    if d.chance(0.25):
        d.note("coefficient")
        factors.insert(d.rng.randint(0, len(factors)), d.rng.choice(("2", "0.5", "3", "1.5e0", "25e-2", ".75")))
    if d.chance(0.12):
        d.note("parenthesised sum")
        sign = d.rng.choice("+-")
        factors.append(f"({draw_factor(d, operator)}{sign}{draw_factor(d, operator)})")
        d.rng.shuffle(factors)
    return "*".join(factors)


def draw_factor(d: Draft, operator: str) -> str:
    usable = [i for i in d.indices if i.kind != "window" or d.chance(0.6)] or d.indices
    wanted = d.rng.sample(usable, min(len(usable), d.rng.choice((1, 1, 2, 2, 3))))
    access = draw_access(d, wanted)
    # Under the other operators it would matter whether a point counts where nothing exists.
    if operator in ("=", "+=") and d.chance(0.06):
        d.note("exists")
        return f"exists({access})"
    return access


def draw_scalar(d: Draft) -> str:
    d.note("scalar operand")
    name = d.rng.choice(SCALARS)
    d.operands.setdefault(name, np.asarray(d.numbers.normal()))
    return name


def draw_equal(d: Draft) -> str:
    """1 where two labels agree, or a label and a number."""
    d.note("equal")
    other = draw_label(d) if d.chance(0.5) else str(d.rng.randint(0, 1))
    return f"equal({draw_label(d)},{other})"


def draw_label(d: Draft) -> str:
    index = d.rng.choice([i for i in d.indices if i.kind != "window"])
    text, length = bare_axis(d, index)
    name = d.maps.pop()
    d.operands[name] = d.numbers.integers(0, 2, size=(length,), dtype=np.int64)
    return f"{name}[{text}]"


def settle(d: Draft) -> str:
    """A last term, or nothing, so that every index has its range."""
    missing = [i for i in d.indices if i.name not in d.settled and not i.declared]
    if not missing:
        return ""
    texts, shape = [], []
    for index in missing:
        text, length = window_axis(d, index, "read") if index.kind == "window" else bare_axis(d, index)
        texts.append(text)
        shape.append(length)
    name = d.names.pop()
    d.axes[name], d.operands[name] = texts, draw_values(d, tuple(shape))
    return f"{name}[{','.join(texts)}]"


def draw_expression(d: Draft, operator: str) -> str:
    """One to three terms. Indices that nothing fixes yet come in through a last factor or the last term."""
    terms = [draw_term(d, operator) for _ in range(d.rng.choice((1, 1, 1, 2, 3)))]
    if any(i.kind != "window" for i in d.indices) and operator in ("=", "+=") and d.chance(0.05):
        terms[0] += f"*{draw_equal(d)}"
    if d.chance(0.1):
        d.note("term without an index")
        terms.insert(d.rng.randint(0, len(terms)), draw_scalar(d) if d.chance(0.5) else "0.5")
    last = settle(d)
    if last:
        terms[-1] += f"*{last}"
    d.note(f"{len(terms)} terms")
    text = "-" if d.chance(0.1) else ""
    for place, term in enumerate(terms):
        text += d.rng.choice("++-") + term if place else term
    return text


# The target
@dataclass(frozen=True)
class Target:
    """Its access, its shape, and for each axis whether the shape can be inferred there."""

    text: str
    shape: tuple[int, ...]
    inferable: tuple[bool, ...]


def draw_target(d: Draft, name: str, known: bool) -> Target:
    texts, shape, inferable = [], [], []
    for index in d.rng.sample(d.indices, min(len(d.indices), d.rng.choice((1, 1, 2, 2, 3)))):
        text, length, open_axis = target_axis(d, index, known)
        texts.append(text)
        shape.append(length)
        inferable.append(open_axis)
    if len(texts) < 3 and d.chance(0.1) and texts[0].isidentifier():
        d.note("diagonal of the target")
        for parts, first in ((texts, texts[0]), (shape, shape[0]), (inferable, inferable[0])):
            parts.append(first)
    return Target(f"{name}[{','.join(texts)}]", tuple(shape), tuple(inferable))


def target_axis(d: Draft, index: Index, known: bool) -> tuple[str, int, bool]:
    """Text, extent, whether the extent can be inferred."""
    at = d.rng.random()
    if known and at < 0.4 and not index.empty and index.kind != "window":
        before = set(d.features)
        d.features.discard("duplicates in an index array")
        text, length = mapped_axis(d, [index, *(i for i in d.indices if i.kind != "window" and i != index)][:3], 1)
        d.note("indirect target")
        if "duplicates in an index array" in d.features:
            d.note("duplicated scatter")
        d.features |= before
        return text, length, False
    if at < 0.55 and not index.empty:
        d.note("window in the target")
        text, length = window_axis(d, index, "known" if known else "inferred")
        return text, length, False
    if known and index.kind == "span":
        text, length = bare_axis(d, index)
        return text, length, length == index.stop
    return index.name, index.stop, True


def declare(d: Draft, name: str, target: Target, declared: bool, used: str) -> list[str]:
    """What follows the semicolon: the indices that are declared, and perhaps the target's shape."""
    parts = []
    for index in d.indices:
        if index.declared and re.search(rf"\b{index.name}\b", used):
            parts.append(f"{index.name}:{index.start}..{index.stop}" if index.kind == "span" else size_text(d, index))
            d.note(f"declared {index.kind}")
    if declared:
        extents = []
        for length, inferable in zip(target.shape, target.inferable, strict=True):
            extents.append("_" if inferable and d.chance(0.4) else str(length))
        if "_" in extents:
            d.note("target declared in part")
        parts.append(f"{name}:[{','.join(extents)}]")
        d.note("target declared")
    d.rng.shuffle(parts)
    return parts


def size_text(d: Draft, index: Index) -> str:
    return f"{index.name}:{given_integer(d, index.stop) or index.stop}"


def named_reduction(d: Draft, operator: str, target: str, right: str, nested: bool) -> str:
    """The right side; under max=, min= and mean= it names what is reduced: all that the target lacks. nested: a part of
    it, the rest being summed first."""
    free = [i for i in d.indices if re.search(rf"\b{i.name}\b", right) and not re.search(rf"\b{i.name}\b", target)]
    if operator not in ("max=", "min=", "mean=") or not free:
        return right
    outer = free
    if nested and len(free) > 1 and not any(i.empty for i in free):
        outer = d.rng.sample(free, d.rng.randint(1, len(free) - 1))
        d.note("nested reduction")
    return f"{operator[:-1]}({', '.join(i.name for i in outer)}, {right})"


# The text
PIECE = re.compile(r"(?:max|min|mean)=|\+=|\d+\.\.\d+|(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?|[^\W\d]\w*|\S")
SPACES = ("", "", "", "", " ", " ", "  ", "\n", "\t", " # a [note]; p:3 += \n")


def untidy(d: Draft, text: str) -> str:
    """The same statement, with spaces, line breaks and comments between its tokens."""
    d.note("odd whitespace")
    pieces = PIECE.findall(text)
    loose = "".join(piece + d.rng.choice(SPACES) for piece in pieces)
    if "#" in loose:
        d.note("comment")
    return loose


def random_case(seed: int, nested: bool = False) -> Case:
    """The case of this seed. nested: where a max, min or mean is over several indices, some are summed first."""
    d = Draft(seed, random.Random(seed), np.random.default_rng(seed))
    d.names, d.maps = d.rng.sample(ARRAY_NAMES, len(ARRAY_NAMES)), d.rng.sample(MAP_NAMES, len(MAP_NAMES))
    d.names = [f"Extra{n}" for n in range(30)] + d.names
    d.maps = [f"Map_{n}" for n in range(60)] + d.maps
    operator = d.rng.choice(OPERATORS)
    name = d.rng.choice(TARGETS)
    passed = operator == "+=" or d.chance(0.5 if operator in ("max=", "min=") else 0.3)
    declared = d.chance(0.45)
    draw_indices(d)
    spare = spare_index(d)
    right = draw_expression(d, operator)
    if spare is not None:
        d.indices.append(spare)
    target = draw_target(d, name, passed or declared)
    right = named_reduction(d, operator, target.text, right, nested)
    parts = declare(d, name, target, declared, target.text + right)
    if spare is not None and re.search(rf"\b{spare.name}\b", target.text):
        d.note("only in the target")
    if passed:
        d.operands[name] = 3 * draw_values(d, target.shape)
        d.note(f"passed under {operator}")
    d.note(operator)
    text = f"{target.text} {operator} {right}"
    if parts:
        text += f"; {d.rng.choice((', ', '; ')).join(parts)}"
    text = untidy(d, text) if d.chance(0.3) else text
    return Case(text, d.operands, frozenset(d.features), seed)


def spare_index(d: Draft) -> Index | None:
    """Sometimes an index with a declared size that the right side will not see."""
    if not d.chance(0.2):
        return None
    left = [name for name in INDEX_NAMES if name not in {i.name for i in d.indices}]
    return Index(left[0], 0, d.rng.choice((1, 2, 3)), "size")


def self_test(count: int) -> Counter:
    """How often each feature occurs in the first `count` cases, all of which must evaluate."""
    from einsum_oracle import evaluate

    found: Counter = Counter()
    for seed in range(count):
        case = random_case(seed)
        try:
            evaluate(case.text, case.operands)
        except Exception as error:
            shapes = {k: v if isinstance(v, int) else v.shape for k, v in case.operands.items()}
            raise AssertionError(f"seed {seed}: {case.text}\n{shapes}") from error
        unused = set(case.operands) - set(re.findall(r"[^\W\d]\w*", re.sub(r"#[^\n]*", "", case.text)))
        assert not unused, f"seed {seed}: {case.text} does not use {sorted(unused)}"
        found.update(case.features)
    return found


if __name__ == "__main__":
    for feature, times in sorted(self_test(1000).items()):
        print(f"{times:5d}  {feature}")
