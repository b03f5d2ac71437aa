"""Storage formats of sparse tensors: levels, each of one or more axes, written as text.

m:U k:C             CSR: every m, and for each the k that occur
(m k):C             COO: the pairs that occur
[m,k] k:U m:C       CSC: stored by k, though the tensor's dimensions are m, k
m:C k:G4            groups: an m is stored once per 4 of its coordinates k; short groups are padded with -1
m:C k:G2,8,32       buckets: each m is stored with the group size that suits its number of k
m:U k:C m:B4 k:B4   blocks of 4 x 4: m:U and k:C run over block coordinates
m:U k:H             as C, and a coordinate is found by a hash instead of a search
(m k):C m:M4 k:M8   bricks of 4 x 8 that occur, each with a bitmap of its cells: only those that occur are stored
k:U16 m:U k:C       split: entries are sorted by k // 16, then m, then k

level    U: all coordinates, not stored.  C: coordinates that occur.  B: the position in a block.  G: groups of C.
         H: C with a hash.  M: the position in a brick, as bits.  U<n>: all multiples of n, split from a level below
format   the logical order of the axes, and the levels in storage order
layout   the arrays of a format; kernels depend on nothing else
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from pumice.errors import OptionError, StatementError

MOST_BITS = 64  # Of the bitmap of a brick


@dataclass(frozen=True)
class LevelKind:
    """What a level of a kind offers. stored: has coordinates of its own; locate: how the position of a coordinate below
    a position of the level above is found; fused: may be of several axes; sizes: it has.

    Source: "Unified Convolution Framework", 4.2 (level formats and their capabilities)."""

    stored: bool
    locate: str
    fused: bool = False
    sizes: tuple[int, ...] = (0,)  # Possible numbers of sizes; -1: any


KINDS: Mapping[str, LevelKind] = MappingProxyType(
    {
        "U": LevelKind(False, "multiply", sizes=(0, 1)),
        "C": LevelKind(True, "search", fused=True),
        "H": LevelKind(True, "hash", fused=True),
        "M": LevelKind(True, "search", sizes=(1,)),
        "B": LevelKind(False, "multiply", sizes=(1,)),
        "G": LevelKind(True, "search", fused=True, sizes=(-1,)),
    }
)
"""The kinds of levels."""

_LISTED = tuple(kind for kind, found in KINDS.items() if found.stored and kind != "G")  # one coordinate per entry

AUTOMATIC = (0,)  # `sizes` of a level G*: its buckets are chosen at conversion

NAMED: Mapping[str, str] = MappingProxyType(
    {
        "COO": "(m k):C",
        "CSR": "m:U k:C",
        "CSC": "[m,k] k:U m:C",
        "DCSR": "m:C k:C",
        "ELL": "m:U k:G",
        "BCSR": "m:U k:C m:B32 k:B32",
        "GroupCOO": "m:C k:G",
        "BlockCOO": "(m k):C m:B32 k:B32",
        "BlockGroupCOO": "m:C k:G m:B32 k:B32",
    }
)
"""Common names of formats of matrices [m, k]."""


@dataclass(frozen=True)
class Level:
    """A level. sizes: of the block, brick or split; group sizes of G, () if chosen at conversion; else ()."""

    axes: tuple[str, ...]
    kind: str
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        axes = self.axes[0] if len(self.axes) == 1 else f"({' '.join(self.axes)})"
        sizes = "*" if self.sizes == AUTOMATIC else ",".join(map(str, self.sizes))
        return f"{axes}:{self.kind}{sizes}"


@dataclass(frozen=True)
class Format:
    """A storage format. axes: names of the tensor's dimensions, in order. levels: outermost first."""

    axes: tuple[str, ...]
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise OptionError("a format has at least one level, found none")
        for _, problem in _problems(self.levels):
            raise OptionError(f"format {str(self)!r}: {problem}")
        if problem := _order_problem(self.axes, self.levels):
            raise OptionError(f"format {str(self)!r}: {problem}")
        # Computed here: torch.compile then sees a string, not numbers that it would treat as symbolic sizes.
        object.__setattr__(self, "_text", self._written())

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def grouped(self) -> Level | None:
        """The level of kind G, if there is one."""
        return next((level for level in self.levels if level.kind == "G"), None)

    @property
    def flattened(self) -> tuple[Level, ...]:
        """The levels up to the last one with a coordinate per entry, over which one position runs."""
        count = 0
        for place, level in enumerate(self.levels, 1):
            count = place if level.kind in _LISTED else count
        return self.levels[:count]

    @property
    def sorting(self) -> tuple[tuple[str, int], ...]:
        """(axis, divisor): entries are sorted by these quotients of their coordinates, the first one outermost."""
        bricks = {level.axes[0]: level.sizes[0] for level in self.levels if level.kind == "M"}
        found = []
        for level in self.flattened:
            own = level.sizes[0] if level.kind == "U" and level.sizes else 1
            found += [(a, own if level.kind in "UM" else bricks.get(a, 1)) for a in level.axes]
        return tuple(found)

    @property
    def coordinates(self) -> tuple[tuple[str, Level], ...]:
        """(axis, level) of every axis, outermost first, without blocks, bricks and splits."""
        found = (level for level in self.levels if level.kind not in "BM" and not (level.kind == "U" and level.sizes))
        return tuple((axis, level) for level in found for axis in level.axes)

    @property
    def parents(self) -> tuple[Level, ...]:
        """The levels above the grouped level, without blocks; () if no level is grouped."""
        above = self.levels[: self.levels.index(self.grouped)] if self.grouped else ()
        return tuple(level for level in above if level.kind != "B")

    def block(self, axis: str) -> int:
        """Extent of a block along the axis; 1 without blocks."""
        return next((level.sizes[0] for level in self.levels if level.kind == "B" and level.axes == (axis,)), 1)

    def with_sizes(self, sizes: Sequence[int]) -> Format:
        """The format with the sizes of its grouped level replaced."""
        levels = (replace(level, sizes=tuple(sizes)) if level.kind == "G" else level for level in self.levels)
        return Format(self.axes, tuple(levels))

    def __str__(self) -> str:
        return getattr(self, "_text", "") or self._written()

    def _written(self) -> str:
        text = " ".join(map(str, self.levels))
        return text if self.axes == _mentioned(self.levels) else f"[{','.join(self.axes)}] {text}"


@dataclass(frozen=True)
class Coordinate:
    """The coordinate along an axis: block * (the index array at the symbols `array`, or else `position`) + inner."""

    axis: str
    array: tuple[str, ...] | None
    position: str | None
    block: int = 1
    inner: str | None = None


@dataclass(frozen=True)
class FormatLayout:
    """The arrays of a format, their dimensions named by symbols.

    values: symbols of the axes of the values array, in storage order. coordinates: one per axis, in logical order.
    position, group: symbols of the position in the flattened levels and in a group, if any: "p" and "q" unless a dense
    axis has that name.
    """

    values: tuple[str, ...]
    coordinates: tuple[Coordinate, ...]
    position: str | None = None
    group: str | None = None


@lru_cache(maxsize=256)
def layout(format: Format) -> FormatLayout:
    """The arrays of a format.

    CSR     values[p], coordinates m[p], k[p]
    ELL     values[m,q], k[m,q]; m is a dense axis
    blocks  BlockGroupCOO: values[p,q,m_in,k_in], m = 32 * m[p] + m_in, k = 32 * k[p,q] + k_in
    """
    flattened = format.flattened
    dense = [level.axes[0] for level in format.levels if level.kind == "U" and level not in flattened]
    taken = set(dense)
    position = _fresh("p", taken) if flattened else None
    group = _fresh("q", taken) if format.grouped else None
    inner = {level.axes[0]: _fresh(f"{level.axes[0]}_in", taken) for level in format.levels if level.kind == "B"}

    values = [position] if position else []
    arrays: dict[str, tuple[str, ...]] = {axis: tuple(values) for level in flattened for axis in level.axes}
    parents = list(values)
    for level in format.levels[len(flattened) :]:
        axis = level.axes[0]
        symbol = {"U": axis, "G": group, "B": inner.get(axis)}[level.kind]
        assert symbol is not None
        values.append(symbol)
        if level.kind != "B":
            parents.append(symbol)
        if level.kind == "G":
            arrays.update(dict.fromkeys(level.axes, tuple(parents)))
    coordinates = (
        Coordinate(axis, arrays.get(axis), None if axis in arrays else axis, format.block(axis), inner.get(axis))
        for axis in format.axes
    )
    return FormatLayout(tuple(values), tuple(coordinates), position, group)


def _fresh(name: str, taken: set[str]) -> str:
    """The name with underscores appended until it is unused; adds it to `taken`."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def parse_format(text: str | Format) -> Format:
    """The format written as `text`, or called that ("CSR"). parse_format(str(f)) == f. Raises StatementError."""
    if isinstance(text, Format):
        return text
    if not isinstance(text, str):
        raise OptionError(f"a format is a text or a Format, found {type(text).__name__}")
    return _parse(NAMED.get(text.strip(), text))


_NAME = r"[^\W\d]\w*"
_PREFIX = re.compile(rf"\s*\[\s*({_NAME}(?:\s*,\s*{_NAME})*)\s*\]")
_LEVEL = re.compile(rf"\s*(?P<axes>{_NAME}|\(\s*{_NAME}(?:\s+{_NAME})*\s*\))\s*:\s*(?P<kind>[^\s\[\]():]+)")
_KIND = re.compile(r"(?P<kind>[UCH])|(?P<block>[BMU])(?P<size>[0-9]+)|(?P<group>G)(?P<sizes>\*|[0-9]+(?:,[0-9]+)*)?")
_LONGEST_TEXT = 2000
_LARGEST_SIZE = 2**31 - 1  # coordinates are int32


@lru_cache(maxsize=1024)
def _parse(text: str) -> Format:
    if len(text) > _LONGEST_TEXT:
        raise StatementError(f"format: a text has at most {_LONGEST_TEXT} characters, found {len(text)}")
    prefix = _PREFIX.match(text)
    place = prefix.end() if prefix else 0
    levels: list[Level] = []
    spans: list[tuple[int, int]] = []
    while text[place:].strip():
        found = _LEVEL.match(text, place)
        if found is None:
            raise _error(text, _next(text, place), len(text.rstrip()), _expected(text))
        levels.append(_level(text, found))
        spans.append((found.start("axes"), found.end("kind")))
        place = found.end()
    if not levels:
        raise _error(text, 0, len(text), f"no levels; {_expected(text)}")
    for level, problem in _problems(levels):
        raise _error(text, *spans[level], problem)
    axes = tuple(re.findall(_NAME, prefix[1])) if prefix else _mentioned(levels)
    if problem := _order_problem(axes, levels):
        raise _error(text, _next(text, 0), place if prefix is None else prefix.end(), problem)
    return Format(axes, tuple(levels))


def _level(text: str, found: re.Match[str]) -> Level:
    kind = _KIND.fullmatch(found["kind"])
    if kind is None:
        known = "U, U<size>, C, H, M<size>, B<size>, G, G<size>, G<size>,<size>,..., G*"
        raise _error(text, *found.span("kind"), f"unknown kind of level {found['kind']!r}; known: {known}")
    axes = tuple(re.findall(_NAME, found["axes"]))
    if kind["sizes"] == "*":
        return Level(axes, "G", AUTOMATIC)
    sizes = kind["size"] or kind["sizes"]
    if kind["sizes"] == "0":  # G0 would equal AUTOMATIC
        raise _error(text, *found.span("kind"), _size_problem("G", 0))
    return Level(axes, found["kind"][0], tuple(map(int, sizes.split(","))) if sizes else ())


def _problems(levels: Sequence[Level]) -> Iterator[tuple[int, str]]:
    """(number of the level, message) for every error in the levels."""
    seen: dict[str, int] = {}  # by axis, its level that is no part of another one
    inner: set[str] = set()  # axes with a block or a brick
    for place, level in enumerate(levels):
        if problem := _level_problem(level):
            yield place, problem
            continue
        above = levels[:place]
        if level.kind in "BM":
            if problem := _inner_problem(level, levels, seen, inner):
                yield place, problem
            inner.add(level.axes[0])
        elif level.kind == "U" and level.sizes:
            if problem := _split_problem(level, levels[place + 1 :]):
                yield place, problem
        else:
            for axis in level.axes:
                if axis in seen:
                    yield place, f"axis {axis!r} has two levels, {str(levels[seen[axis]])!r} and {str(level)!r}"
                seen[axis] = place
        if problem := _place_problem(level, above):
            yield place, problem
    bricks = [level for level in levels if level.kind == "M"]
    if (bits := math.prod(level.sizes[0] for level in bricks if len(level.sizes) == 1)) > MOST_BITS:
        place = max(number for number, level in enumerate(levels) if level.kind == "M")
        yield place, f"a brick has at most {MOST_BITS} cells, found {bits}"
    refined = [level for level in levels if level.kind == "M" or (level.kind == "U" and level.sizes)]
    other = next((level for level in levels if level.kind in "BG"), None)
    if refined and other:
        yield levels.index(refined[0]), f"{str(refined[0])!r} and {str(other)!r}: expected either of them"


def _inner_problem(level: Level, levels: Sequence[Level], seen: Mapping[str, int], inner: set[str]) -> str | None:
    """What is wrong with a block or a brick."""
    axis, word = level.axes[0], "block" if level.kind == "B" else "brick"
    if axis in inner:
        return f"axis {axis!r} has two {word} levels"
    if axis not in seen:
        return _stray_block(axis, levels, word)
    if level.kind == "M" and levels[seen[axis]].kind not in _LISTED:
        return f"{str(level)!r} is in bricks that occur: expected '{axis}:C' above, found {str(levels[seen[axis]])!r}"
    return None


def _split_problem(level: Level, below: Sequence[Level]) -> str | None:
    """What is wrong with a split level."""
    axis = level.axes[0]
    if any(axis in other.axes and other.kind in ("C", "H") for other in below):
        return None
    return f"{str(level)!r} splits a level below it: expected '{axis}:C' there"


def _place_problem(level: Level, above: Sequence[Level]) -> str | None:
    """What is wrong with a level below these."""
    kinds = [other.kind for other in above]
    if level.kind in _LISTED and ("G" in kinds or "B" in kinds):
        first = next(str(other) for other in above if other.kind in "GB")
        return f"{str(level)!r} comes after {first!r}; compressed levels come before groups and blocks"
    if level.kind == "G" and "G" in kinds:
        return f"a second grouped level {str(level)!r}; a format has at most one"
    if _bucketed(level) and _last_above(above) != "C":
        return f"{str(level)!r} has buckets; they need a compressed level right before, as in 'm:C k:G2,8'"
    return None


def _level_problem(level: Level) -> str | None:
    if level.kind not in KINDS:
        return f"unknown kind of level {level.kind!r}; known: {', '.join(KINDS)}"
    if not level.axes:
        return "a level without an axis"
    kind, count = KINDS[level.kind], len(level.sizes)
    if not kind.fused and len(level.axes) != 1:
        fused = ", ".join(name for name, other in KINDS.items() if other.fused)
        return f"{str(level)!r} is of {len(level.axes)} axes; only levels of kind {fused} can be fused"
    if -1 not in kind.sizes and count not in kind.sizes:
        return f"a level of kind {level.kind} has {' or '.join(map(str, kind.sizes))} sizes, found {count}"
    if level.kind == "G" and level.sizes == AUTOMATIC:
        return None
    if any(size < 1 for size in level.sizes):
        return _size_problem(level.kind, min(level.sizes))
    if any(size > _LARGEST_SIZE for size in level.sizes):
        return f"a size of kind {level.kind} is at most {_LARGEST_SIZE}, found {max(level.sizes)}"
    if list(level.sizes) != sorted(set(level.sizes)):
        return f"bucket sizes rise, found {','.join(map(str, level.sizes))}"
    return None


def _bucketed(level: Level) -> bool:
    return level.kind == "G" and (len(level.sizes) > 1 or level.sizes == AUTOMATIC)


def _last_above(levels: Sequence[Level]) -> str | None:
    """The kind of the last level that is not a block, or None."""
    return next((level.kind for level in reversed(levels) if level.kind != "B"), None)


def _size_problem(kind: str, size: int) -> str:
    return f"a size of kind {kind} is at least 1, found {size}"


def _stray_block(axis: str, levels: Sequence[Level], word: str) -> str:
    if any(axis in level.axes and level.kind not in "BM" for level in levels):
        return f"the {word} of axis {axis!r} comes before the level that it is a {word} of"
    kind = "B" if word == "block" else "M"
    return f"axis {axis!r} has a {word} and no other level; the {word}s need one, as in '{axis}:C {axis}:{kind}4'"


def _order_problem(axes: tuple[str, ...], levels: Sequence[Level]) -> str | None:
    mentioned = _mentioned(levels)
    if len(set(axes)) != len(axes):
        return f"the order [{','.join(axes)}] names an axis twice"
    if missing := [axis for axis in axes if axis not in mentioned]:
        return f"axis {missing[0]!r} has no level"
    if missing := [axis for axis in mentioned if axis not in axes]:
        return f"axis {missing[0]!r} has a level and is not in the order [{','.join(axes)}]"
    return None


def _mentioned(levels: Sequence[Level]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(axis for level in levels for axis in level.axes))


def _next(text: str, place: int) -> int:
    """The first position from `place` on that is not blank."""
    return place + len(text[place:]) - len(text[place:].lstrip())


def _expected(text: str) -> str:
    hint = "expected levels such as 'm:U' or '(m k):C'"
    return hint if ":" in text else f"{hint}, or a name: {', '.join(NAMED)}"


def _error(text: str, start: int, stop: int, problem: str) -> StatementError:
    """An error of three lines: problem, text, carets under characters start..stop."""
    shown = re.sub(r"\s", " ", text)
    return StatementError(f"format: {problem}\n  {shown}\n  {' ' * start}{'^' * max(1, stop - start)}")
