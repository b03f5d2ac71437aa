"""Schedules of loop nests on a CPU: immutable values, text such as "order m e; vector p; split(p, 7); hold 14".

    order n m e      loops, the outermost first; e: the entries of a segment (of one result of the index arrays)
    split(p, 7)      tiles of 7 outputs along p, of a lane or, where lanes are neighbours, of a vector, in registers;
                     split(c, 64): the entries are visited in blocks of 64 values of their coordinate c
    fuse(p, q)       p and q are one index, p.q
    parallel m chunk 8   tasks are 8 segments and one point of the loops around them; without chunk, by the threads
    vector p 2 q 4   lanes of a vector are 2 x 4 blocks of an image, or 8 of one axis, p 8; vector p: neighbours
    unroll e 2       the loop's body is repeated
    pack I           the image I is copied to [..., y, x, lane] with its padding, or to aligned tiles of neighbours
    locate I         of factors that meet, those that are not iterated but looked up
    hold 14          vectors of results that a tile may hold in registers

What a schedule does not say is left to the rule (loop_rule.py). Source: "Unified Convolution Framework", sections 2.3
(schedules apart from statements and formats) and 5 (base indices, offsets, reorder).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, NoReturn, TypeAlias

from pumice.errors import OptionError

MOST_TEXT = 2000  # Characters of a schedule
MOST_NUMBER = 1 << 20
MOST_UNROLL = 16

Names: TypeAlias = tuple[str, ...]
Pairs: TypeAlias = tuple[tuple[str, int], ...]

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_FORMS = {
    "order": (rf"order(?: {_NAME})+", "order m e"),
    "split": (rf"split ?\( ?{_NAME} ?, ?[0-9]+ ?\)", "split(p, 7)"),
    "fuse": (rf"fuse ?\( ?{_NAME}(?: ?, ?{_NAME})+ ?\)", "fuse(p, q)"),
    "parallel": (rf"parallel {_NAME}(?: chunk [0-9]+)?", "parallel m chunk 8"),
    "vector": (rf"vector {_NAME}(?: [0-9]+(?: {_NAME} [0-9]+)?)?", "vector p, vector p 8 or vector p 2 q 4"),
    "unroll": (rf"unroll {_NAME} [0-9]+", "unroll e 2"),
    "pack": (rf"pack {_NAME}", "pack I"),
    "locate": (rf"locate(?: {_NAME})+", "locate I"),
    "hold": (r"hold [0-9]+", "hold 14"),
}
_REPEATED = ("split", "fuse", "unroll")


@dataclass(frozen=True)
class LoopSchedule:
    """The directives of a schedule; see the module. Pairs are (index, number); the number 0 stands for none.

    Raises OptionError if its text does not stand for the same schedule: unknown forms, numbers out of range.
    """

    order: Names = ()
    split: Pairs = ()
    fuse: tuple[Names, ...] = ()
    parallel: Pairs = ()
    vector: Pairs = ()
    unroll: Pairs = ()
    pack: Names = ()
    locate: Names = ()
    hold: int = 0

    def __post_init__(self) -> None:
        if _directives(str(self)) != vars(self):
            raise OptionError(f"no schedule has the fields {vars(self)}")

    def __str__(self) -> str:
        parts = [f"fuse({', '.join(group)})" for group in self.fuse]
        parts += [f"{word} {' '.join(names)}" for word in ("order", "pack", "locate") if (names := getattr(self, word))]
        parts += [f"vector {_spoken(self.vector)}"] if self.vector else []
        parts += [f"split({name}, {size})" for name, size in self.split]
        parts += [f"parallel {_spoken([(n, 0)])}{f' chunk {size}' if size else ''}" for n, size in self.parallel]
        parts += [f"unroll {name} {count}" for name, count in self.unroll]
        return "; ".join([*parts, *([f"hold {self.hold}"] if self.hold else [])])

    @staticmethod
    def parse(text: str) -> LoopSchedule:
        """The schedule of a text. Raises OptionError for other text; numbers are from 1 to 2^20."""
        return LoopSchedule(**_directives(text))

    def sizes(self) -> dict[str, int]:
        """The splits by index."""
        return dict(self.split)

    def names(self) -> set[str]:
        """The indices that are named outside fuse."""
        pairs = (*self.split, *self.parallel, *self.vector, *self.unroll)
        return {*self.order, *(name for name, _ in pairs)}


def _spoken(pairs: Sequence[tuple[str, int]]) -> str:
    return " ".join(f"{name} {size}" if size else name for name, size in pairs)


def _directives(text: str) -> dict[str, Any]:
    """The fields of a LoopSchedule."""
    if len(text) > MOST_TEXT:
        raise OptionError(f"a schedule has at most {MOST_TEXT} characters, found {len(text)}")
    found: dict[str, Any] = {f.name: 0 if f.name == "hold" else () for f in fields(LoopSchedule)}
    for part in filter(None, (" ".join(part.split()) for part in text.split(";"))):
        word = part.partition("(")[0].partition(" ")[0]
        if word not in _FORMS:
            raise OptionError(f"unknown directive {part!r} of a schedule; there are {', '.join(_FORMS)}")
        if not re.fullmatch(_FORMS[word][0], part):
            raise OptionError(f"expected the directive {word} as in `{_FORMS[word][1]}`, found {part!r}")
        if found[word] and word not in _REPEATED:
            raise OptionError(f"the directive {word} is expected once, found {part!r} besides")
        found[word] += _value(word, part)
    for word in ("order", "split", "vector", "unroll", "locate", "fuse"):
        _check_distinct(word, found[word])
    return found


def _value(word: str, part: str) -> Any:
    tokens = re.findall(rf"{_NAME}|[0-9]+", part)[1:]
    names, numbers = [t for t in tokens if not t[0].isdigit()], [t for t in tokens if t[0].isdigit()]
    for number in numbers:
        most = MOST_UNROLL if word == "unroll" else MOST_NUMBER
        if len(number) > 9 or not 1 <= int(number) <= most:
            raise OptionError(f"{part!r}: expected numbers from 1 to {most}, found {number}")
    if word == "hold":
        return int(numbers[0])
    if word == "parallel":
        names = names[:1]
    if word == "fuse":
        return (tuple(names),)
    if word in ("order", "pack", "locate"):
        return tuple(names)
    return tuple(zip(names, map(int, numbers or ["0"]), strict=True))


def _check_distinct(word: str, found: Sequence[Any]) -> None:
    names = [n for each in found for n in (each if word == "fuse" else each[:1] if isinstance(each, tuple) else [each])]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError(f"{word}: {twice[0]} is named twice")


# Legality


class Image(NamedTuple):
    """An image whose lanes can be blocks: the last one or two axes of the target and of a factor.

    names, sizes: indices and outputs along them; steps: their coefficients in the factor's axes; spans: of 0 and the
    entries' parts there; bare: the last axis is one of the factor's as it is; values: of the factor and of the target;
    cut: the factor is part of an operand; most: values of an image in lanes; channel: the coordinate before the image,
    or "".
    """

    factor: str
    names: Names
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    spans: tuple[int, ...]
    bare: bool
    values: tuple[int, int]
    cut: bool
    most: int
    channel: str


@dataclass(frozen=True)
class NestFacts:
    """What schedules of a nest may name, and what they depend on.

    dense: extents of dense indices; reduced: those that are summed; segments: coordinates of the entries in the target;
    coordinates: their others, with extents; entries: name and number; results: number of segments; factors: names;
    windows: (factor, index, other indices of the same axis); vectors: indices along which all operands are contiguous
    or constant, the best first; images: with two axes first; processor: lanes of a vector, registers, bytes of a value
    and of the first-level cache.
    """

    dense: Mapping[str, int]
    reduced: Names
    segments: Names
    coordinates: Mapping[str, int]
    entries: tuple[str, int]
    results: int
    factors: Names
    windows: tuple[tuple[str, str, Names], ...]
    vectors: Names
    images: tuple[Image, ...]
    processor: tuple[int, int, int, int]

    @property
    def lanes(self) -> int:
        return self.processor[0]

    @property
    def outer(self) -> list[str]:
        """The target's dense indices."""
        return [name for name in self.dense if name not in self.reduced]

    def image(self, schedule: LoopSchedule) -> Image | None:
        """The image that the vector's indices span; None for a vector that moves along its index."""
        names = tuple(name for name, _ in schedule.vector)
        tiled = schedule.pack or any(n or name in schedule.sizes() for name, n in schedule.vector)
        return next((i for i in self.images if i.names == names), None) if tiled else None

    def loops(self, schedule: LoopSchedule) -> list[str]:
        """All loops in the order of the rule."""
        moving = [] if self.image(schedule) else [name for name, _ in schedule.vector]
        images = [name for name, _ in schedule.vector if name not in moving]
        free = [name for name in self.outer if name not in (*moving, *images)]
        summed = [name for name in self.reduced if name not in moving]
        last = [name for name in moving if name in self.reduced]
        held = [name for name in moving if name not in self.reduced]
        return [*free, *images, *self.segments, *held, self.entries[0], *summed, *last]


def check(schedule: LoopSchedule, facts: NestFacts) -> None:
    """Raise OptionError with the reason if the nest cannot have this schedule, as far as it says."""
    _check_names(schedule, facts)
    _check_vector(schedule, facts)
    _check_order(schedule, facts)
    _check_parallel(schedule, facts)
    _check_splits(schedule, facts)
    for name, _ in schedule.unroll:
        if name not in (facts.entries[0], *facts.reduced):
            _refuse(f"unroll {name}", f"expected the entries {facts.entries[0]} or a dense index that is summed")


def _refuse(directive: str, reason: str) -> NoReturn:
    raise OptionError(f"{directive}: {reason}")


def _check_names(schedule: LoopSchedule, facts: NestFacts) -> None:
    known = [*facts.dense, *facts.segments, *facts.coordinates, facts.entries[0]]
    for name in sorted(schedule.names()):
        if name not in known:
            _refuse(name, f"the nest has no such index; it has {', '.join(dict.fromkeys(known))}")
    for group in schedule.fuse:
        _check_fused(group, facts)
    for name in schedule.pack:
        if name not in facts.factors:
            _refuse(f"pack {name}", f"the nest has no such factor; it has {', '.join(facts.factors)}")
    for name in schedule.locate:
        _refuse(f"locate {name}", "the entries of this nest are iterated, and no factor is located")


def check_of_levels(schedule: LoopSchedule, factors: Sequence[str]) -> None:
    """Raise OptionError with the reason if a nest over the levels of these sparse factors cannot have this schedule."""
    for word, given in vars(schedule).items():
        if given and word not in ("order", "vector", "locate"):
            _refuse(word, "a nest over the levels of sparse factors takes order, vector and locate")
    if unknown := [name for name in schedule.locate if name not in factors]:
        _refuse(f"locate {unknown[0]}", f"the sparse factors that meet are {', '.join(factors) or 'none'}")
    if schedule.locate and not {*factors} - {*schedule.locate}:
        _refuse(f"locate {' '.join(schedule.locate)}", "no sparse factor is left to be iterated")


def _check_fused(group: Names, facts: NestFacts) -> None:
    if ".".join(group) in facts.dense:
        return
    directive = f"fuse({', '.join(group)})"
    for factor, name, _ in facts.windows:
        if name in group:
            _refuse(directive, f"{factor} is read through a window along {name}, and not along a fused index")
    _refuse(directive, f"these are not neighbours in every access, or not all dense: {', '.join(facts.dense)} are")


def _check_vector(schedule: LoopSchedule, facts: NestFacts) -> None:
    names, directive = [name for name, _ in schedule.vector], f"vector {_spoken(schedule.vector)}"
    for name, blocks in schedule.vector:
        if name not in facts.dense:
            _refuse(directive, f"{name} is a compressed level: its entries are not neighbours in memory")
        if blocks > facts.dense[name]:
            _refuse(directive, f"{name} has {facts.dense[name]} points, for {blocks} blocks")
    if math.prod(blocks or 1 for _, blocks in schedule.vector) > facts.lanes:
        _refuse(directive, f"a vector has {facts.lanes} lanes")
    if names and facts.image(schedule) is None:
        if schedule.pack or any(blocks for _, blocks in schedule.vector):
            _refuse(f"pack {schedule.pack[0]}" if schedule.pack else directive, _no_image(names, facts))
        if names[0] not in facts.vectors:
            _refuse(directive, f"{names[0]} is not contiguous in some operand; along {_listed(facts.vectors)} all are")


def _no_image(names: Sequence[str], facts: NestFacts) -> str:
    for factor, name, others in facts.windows:
        if name in names and others:
            return f"{factor} is read at {name} + {others[0]}: the offset {others[0]} is inside its base index {name}"
    return f"no image has the axes {', '.join(names)}; {_listed([' '.join(i.names) for i in facts.images])} are images"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _check_order(schedule: LoopSchedule, facts: NestFacts) -> None:
    entries = facts.entries[0]
    zones = {name: 0 for name in (*facts.outer, *facts.segments)} | {entries: 2} | dict.fromkeys(facts.reduced, 3)
    if schedule.vector and not facts.image(schedule):
        moving = schedule.vector[0][0]
        zones[moving] = 4 if moving in facts.reduced else 1
    for name in schedule.order:
        if name not in zones:
            _refuse(f"order {name}", f"{name} is a coordinate of the entries, whose loop is {entries}")
    for outer, inner in zip(schedule.order, schedule.order[1:], strict=False):
        if zones[inner] < zones[outer]:
            _refuse(f"order {' '.join(schedule.order)}", _misplaced(outer, inner, facts))
    order = list(arranged(schedule, facts))
    segments = tuple(name for name in order if name in facts.segments)
    if segments != facts.segments:
        _refuse(f"order {' '.join(schedule.order)}", f"{segments[0]} is before its parent level {facts.segments[0]}")
    if segments and tuple(order[order.index(segments[0]) :][: len(segments)]) != segments:
        _refuse(f"order {' '.join(schedule.order)}", f"{', '.join(segments)} are one loop, of segments")


def _misplaced(outer: str, inner: str, facts: NestFacts) -> str:
    entries = facts.entries[0]
    if outer == entries and inner in facts.segments:
        return f"{entries} is before its parent level {inner}, whose entries it runs over"
    if outer in facts.reduced:
        return f"{outer} is summed, and runs inside {inner}"
    return f"the results along {inner} are held in registers while {outer} runs, so {inner} is outside it"


def _check_parallel(schedule: LoopSchedule, facts: NestFacts) -> None:
    for name, chunk in schedule.parallel:
        if name in (facts.entries[0], *facts.coordinates, *facts.reduced):
            _refuse(f"parallel {name}", f"{name} is summed: tasks would write the same results")
        if name in facts.dense and chunk:
            _refuse(f"parallel {name} chunk {chunk}", f"chunks are of segments, {' '.join(facts.segments)}")
        if name in facts.dense and facts.image(schedule) is None and name in dict(schedule.vector):
            _refuse(f"parallel {name}", f"{name} is the vector's index, which runs within a task")


def _check_splits(schedule: LoopSchedule, facts: NestFacts) -> None:
    sizes, image = schedule.sizes(), facts.image(schedule)
    tile = {name: size for name, size in sizes.items() if name not in facts.coordinates}
    most, each = facts.processor[1] - 2, 1 if any(blocks for _, blocks in schedule.vector) else facts.lanes
    held = -(-math.prod(tile.values()) // each) if schedule.vector else 0
    if held > most:
        told = " x ".join(map(str, tile.values()))
        _refuse(f"split {told}", f"{held} accumulators, but registers hold {most}")
    if schedule.hold > most:
        _refuse(f"hold {schedule.hold}", f"registers hold {most} accumulators besides two operands")
    for name, size in tile.items():
        if name not in facts.dense or (schedule.vector and (image is None or name not in image.names)):
            _refuse(f"split({name}, {size})", f"{name} is neither an axis of the vector's image nor a coordinate")
        if size > facts.dense[name]:
            _refuse(f"split({name}, {size})", f"{name} has {facts.dense[name]} points")


def arranged(schedule: LoopSchedule, facts: NestFacts) -> Iterator[str]:
    """All loops, the outermost first: those that the schedule orders take each other's places in the rule's order."""
    given = iter(schedule.order)
    return (next(given) if name in schedule.order else name for name in facts.loops(schedule))
