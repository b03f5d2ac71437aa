"""Statements over lists of entries as loop nests in C, for float32 and float64 on a CPU.

    T[t(e) + dense] += prod_f F_f[o_f(e) + dense]         entries e sorted by t: each result is written once (a segment)

What index arrays contribute to addresses is one offset per entry and access, computed once per index array. An operand
whose windows leave it is padded with zeros. The vector index is contiguous in the target, or in all factors (then it is
summed). For windows over the last one or two axes of an image, lanes of a vector run over blocks of the image, so that
every load is aligned: the image is copied to [..., y, x, lane], with its padding. Entries are visited in blocks of the
image's channels that fit the first-level cache.

Source: "Unified Convolution Framework", sections 3.2 and 4 (base variables, offsets, intervals, reorder). The lanes are
our own.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.errors import OptionError
from pumice.language.bind import BoundStatement
from pumice.language.nodes import Statement, arrays_of
from pumice.lower import nest_c
from pumice.lower.nest_c import FactorAccess, Nest
from pumice.lower.nest_form import MOST_ELEMENTS, Form, Fusing, NestAxis, View, entry_parts, normalized, padded_sizes
from pumice.runtime.cache import cached_per_tensor, cached_per_values
from pumice.runtime.native import cpu_name, l1_bytes, parallel_region
from pumice.runtime.repeat import Repeated
from pumice.runtime.workspace import SPARE
from pumice.schedule.loop_rule import PRESETS, ImageTiles, completed
from pumice.schedule.loops import Image, LoopSchedule, NestFacts
from pumice.schedule.tuned_loops import LoopKey, Records, half_octaves, loop_records

_TASKS = 8  # Tasks per thread
_WIDE = 64  # Points of a vector index from which its length no longer matters


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement is no loop nest here, or None."""
    if any(t.device.type != "cpu" for t in operands.values()):
        return "the operands are not on a CPU"
    if why := nest_c.unavailable():
        return why
    form = normalized(bound, tuple((name, tuple(t.shape)) for name, t in operands.items()))
    if isinstance(form, str):
        return form
    if any(not operands[view.name].is_floating_point() for view in form.views[1:]):
        return "a factor is not of a floating-point dtype"
    return None


class Wanted(NamedTuple):
    """The schedule of a nest: as far as it is given, or the name of a preset. lenient: the rule's if it is refused."""

    schedule: LoopSchedule = LoopSchedule()
    preset: str = ""
    lenient: bool = False

    @staticmethod
    def of(text: str, lenient: bool = False) -> Wanted:
        """That of a preset's name or of a schedule's text. Raises OptionError for other text."""
        named = text in PRESETS
        return Wanted(LoopSchedule() if named else LoopSchedule.parse(text), text if named else "", lenient)

    @property
    def fusing(self) -> Fusing:
        groups = self.schedule.fuse
        return Fusing(groups, frozenset(self.schedule.names()).difference(*groups))

    def complete(self, facts: NestFacts) -> LoopSchedule:
        """The whole schedule. Raises OptionError if the nest cannot have it."""
        try:
            return completed(PRESETS[self.preset](facts) if self.preset else self.schedule, facts)
        except OptionError:
            if not self.lenient:
                raise
            return completed(LoopSchedule(), facts)


class NestStep:
    """A step of a plan: a statement that `refusal` accepts, for operands of the shapes of the first call. wanted: its
    schedule; None: the tuned one, or the rule's."""

    bound: BoundStatement
    dtype: torch.dtype
    wanted: Wanted | None

    def __init__(self, bound: BoundStatement, dtype: torch.dtype, wanted: Wanted | None = None) -> None:
        self.bound, self.dtype, self.wanted = bound, dtype, wanted
        self._known: tuple[Records, int, Wanted, Form] | None = None

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result, of `dtype`, added to that of the steps before."""
        bound, wide, statement = self.bound, _wide(self.dtype), self.bound.statement
        ready = self.prepared(operands)
        if ready is None:
            result = torch.zeros(bound.shape, dtype=wide, device="cpu")
        else:
            result = ready.run([operands[p.view.name].to(wide) for p in ready.placed[1:]])
            if statement.reduction == "mean":
                result /= ready.counts.clamp(min=1)
        if (coefficient := statement.terms[0].coefficient) != 1:
            result *= coefficient
        if statement.accumulate:
            result = _included(result.to(self.dtype), operands[statement.target.name].to(self.dtype), statement, ready)
        result = result.view(bound.shape).to(self.dtype)
        return result if before is None else before + result

    def prepared(self, operands: Mapping[str, Tensor]) -> Prepared | None:
        """The nest; None without entries. Raises OptionError if it cannot have the schedule."""
        records = loop_records()
        if self._known is None or self._known[:2] != (records, records.generation):
            wanted = self.wanted or _tuned(self.bound, self.dtype)
            form = normalized(
                self.bound, tuple([(name, tuple(t.shape)) for name, t in operands.items()]), wanted.fusing
            )
            assert isinstance(form, Form)
            self._known = records, records.generation, wanted, form
        _, _, wanted, form = self._known
        first, *others = [operands[name] for name in form.arrays]
        return prepared(first, form, _wide(self.dtype), wanted, *others)

    def repeated(self, operands: Mapping[str, Tensor], names: Sequence[str]) -> Repeated | None:
        """The step as a function of a factor of the same layout and dtype, the other operands being as they are now;
        None if more than the nest is to be done, or if there are several names."""
        statement, shape = self.bound.statement, self.bound.shape
        plain = statement.reduction == "sum" and statement.terms[0].coefficient == 1 and not statement.accumulate
        plain = plain and self.dtype == _wide(self.dtype) and len(names) == 1
        ready = self.prepared(operands) if plain else None
        if ready is None:
            return None
        given = [operands[p.view.name] for p in ready.placed[1:]]
        at = [n for n, p in enumerate(ready.placed[1:]) if p.view.name == names[0]]
        if len(at) != 1 or any(x.dtype != self.dtype for x in given):
            return None
        number = at[0]
        held = [ready.place(n, x) for n, x in enumerate(given, 1)]
        read, images = held[number]
        in_place, joined = read is given[number], ready.placed[0].view.shape != shape
        held[number] = read.new_empty(0), images

        def call(tensors: Sequence[Tensor]) -> Tensor:
            factors = held.copy()
            factors[number] = (tensors[0], images) if in_place else ready.place(number + 1, tensors[0])
            found = ready.run_placed(factors)
            return found.view(shape) if joined else found

        return call


def _included(result: Tensor, old: Tensor, statement: Statement, ready: Prepared | None) -> Tensor:
    """The result with the target's old values."""
    old = old.reshape(result.shape)
    if statement.reduction == "sum" or ready is None:
        return old + result
    join = torch.maximum if statement.reduction == "max" else torch.minimum
    return torch.where(ready.counts > 0, join(result, old), old)


def source_of(
    bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype, wanted: Wanted | None = None
) -> str:
    """Schedule, loop nest and C source of a statement that `refusal` accepts; "" without entries."""
    if (ready := NestStep(bound, dtype, wanted).prepared(operands)) is None:
        return ""
    return f"schedule {ready.schedule}\n{ready.nest}\n\n{nest_c.source(ready.nest)}"


def key_of(bound: BoundStatement, dtype: torch.dtype) -> LoopKey:
    """Key of a statement's tuned schedule."""
    sizes = tuple(half_octaves(extent) for _, extent in sorted(bound.extents.items()))
    statement = replace(bound.statement, ranges=())
    return LoopKey(cpu_name(), str(statement), str(_wide(dtype)).removeprefix("torch."), sizes)


def _tuned(bound: BoundStatement, dtype: torch.dtype) -> Wanted:
    """The tuned schedule of a statement, or the rule's."""
    found = loop_records().find(key_of(bound, dtype))
    return Wanted() if found is None else Wanted(found.schedule, lenient=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# Layout and offsets


class Lanes(NamedTuple):
    """Vector lanes over blocks of an image, the last `axes` (1 or 2) axes of the target and of factor `factor`.

    grid: blocks along y and x; block: outputs of one, in whole tiles; tile: outputs of a tile; steps: coefficients of
    y and x in the factor's axes; read, window: rows and columns of the factor that a block and a tile read. If axes is
    1, there is one row. points: of a tile if lanes are neighbours, else 0. Then x counts vectors, the last vector of a
    tile ends with it, and the target is in place; so is the factor unless it is copied.
    """

    factor: int
    axes: int
    grid: tuple[int, int]
    block: tuple[int, int]
    tile: tuple[int, int]
    steps: tuple[int, int]
    read: tuple[int, int]
    window: tuple[int, int]
    copied: bool = True
    points: int = 0

    def moves(self, number: int) -> bool:
        """True if operand `number` is in memory of its own, as [..., y, x, lane]."""
        return number == self.factor and self.copied if number else not self.points


class Placed(NamedTuple):
    """An operand in memory: (before, after) padding and stride of each axis, elements before its first index point."""

    view: View
    pads: tuple[tuple[int, int], ...]
    strides: tuple[int, ...]

    def stride(self, index: str) -> int:
        """Elements between neighbouring points of an index."""
        axes = zip(self.view.axes, self.strides, strict=True)
        return sum(c * stride for axis, stride in axes for c, name in axis.dense if name == index)

    def offset(self, values: Sequence[Tensor | None]) -> Tensor | int:
        """Offsets of the entries, padding and constants included. values: of the axes' entry parts, None without."""
        total: Tensor | int = 0
        for axis, (before, _), stride, found in zip(self.view.axes, self.pads, self.strides, values, strict=True):
            total = total + ((axis.constant if found is None else found) + before) * stride
        return total


class LaneMove(NamedTuple):
    """A C function that moves images to or from lanes. kernel: its address; elements: of an image in lanes; sizes,
    room: see nest_c.moves_source."""

    kernel: int
    images: int
    elements: int
    sizes: tuple[int, ...]
    room: tuple[int, int]

    def step(self, *strides: int) -> Step:
        """strides: from an image to the next in source and target, of rows and of columns in the source."""
        return self.kernel, (0, self.images, 0, 0, 0, *self.sizes, *self.room, 0, *strides)


Step = tuple[int, Sequence[int]]
"""Address of a C function, and its integers."""
Patch = tuple[int, int, int]
"""(place, number of an address, bytes past it): an integer that every call sets."""


class CallSequence(NamedTuple):
    """A call as the integers of nest_c.sequence. Addresses are those of the target, of memory and of the factors."""

    numbers: array[int]
    patches: Sequence[Patch]
    sequence: nest_c.Sequenced
    region: int

    @staticmethod
    def of(steps: Sequence[tuple[Step, Sequence[Patch]]]) -> CallSequence:
        """steps: each with its patches."""
        numbers, patches, heads = list[int](), list[Patch](), 2 * len(steps) + 1
        for (_, integers), own in steps:
            patches += [(heads + len(numbers) + place, which, past) for place, which, past in own]
            numbers += integers
        starts = accumulate((len(integers) for (_, integers), _ in steps), initial=heads)
        calls = [n for ((kernel, _), _), start in zip(steps, starts, strict=False) for n in (kernel, start)]
        return CallSequence(array("q", (*calls, 0, *numbers)), patches, nest_c.sequence(), parallel_region())

    def run(self, threads: int, addresses: Sequence[int]) -> None:
        numbers = self.numbers[:]
        for place, which, past in self.patches:
            numbers[place] = addresses[which] + past
        self.sequence(self.region, threads, numbers.buffer_info()[0])


class Images:
    """Where the images of an operand lie in memory. size: their rows and columns; pads: of the axes before these."""

    view: View
    size: tuple[int, int]
    pads: tuple[tuple[int, int], ...]

    def __init__(self, view: View, size: tuple[int, int], pads: tuple[tuple[int, int], ...]) -> None:
        self.view, self.size, self.pads, self._padded = view, size, pads, any(map(any, pads))
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def of(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """(x, or a copy that has padding and the images at equal distances; elements before the first image, from an
        image to the next, between rows and between columns)."""
        if (known := self._known.get(x.stride())) is not None and not self._padded:
            return x, known
        images = self.view.cut(x)
        if self._padded:
            images = _padded(images.reshape(self.view.shape), self.pads)
        images = images.reshape(-1, *self.size)
        if images.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            return images, (0, *images.stride())
        found = int(images.storage_offset() - x.storage_offset()), *images.stride()
        return x, self._known.setdefault(x.stride(), found)


class LaneCopies(NamedTuple):
    """Copies of images to lanes, with their padding, and back; out: None if the target is in place. factor: the one
    that is copied, whose images are `images`; parts: elements of that factor and of the target in lanes; room: that a
    thread needs besides."""

    factor: int
    images: Images
    into: LaneMove
    out: LaneMove | None
    parts: tuple[int, int]
    room: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A nest with its sizes and offsets. facts: what its schedule was made of; begins, offsets: of each factor, by
    constants and by entry (None: none); whole: all results are written; outer: points of the outer loops; loops:
    integers of the outer and inner loops. A factor that has one value per entry is put in their order. counts: values
    reduced into each result, unless summed; kernel: address of the C function; like: of the target's size, without
    memory; programs: by threads and layout of the copied factor."""

    facts: NestFacts
    schedule: LoopSchedule
    nest: Nest
    kernel: int
    placed: tuple[Placed, ...]
    moves: LaneCopies | None
    starts: Tensor
    target_offsets: Tensor
    begins: tuple[int, ...]
    offsets: tuple[Tensor | None, ...]
    whole: bool
    outer: int
    length: int
    loops: tuple[int, ...]
    like: Tensor
    counts: Tensor
    programs: dict[tuple[Any, ...], CallSequence] = field(default_factory=dict)

    def run(self, factors: Sequence[Tensor]) -> Tensor:
        """The target, of the shape of its view. factors: the whole operands."""
        return self.run_placed([self.place(n, x) for n, x in enumerate(factors, 1)])

    def run_placed(self, factors: Sequence[InMemory]) -> Tensor:
        """As `run`, of factors that `place` gave."""
        threads, moves = torch.get_num_threads(), self.moves
        outside = moves is not None and moves.out is not None
        out = torch.empty_like(self.like)
        if not (self.whole or outside):
            out.zero_()
        addresses = [out.data_ptr(), 0, *[x.data_ptr() for x, _ in factors]]
        images = () if moves is None else factors[moves.factor - 1][1]
        program = self.programs.get((threads, images)) or self._program(threads, images)
        if moves is None:
            program.run(threads, addresses)
            return out
        buffer = SPARE.take((4 if self.nest.real == "float" else 8) * (sum(moves.parts) + threads * moves.room))
        if outside and not self.whole:
            buffer.memory.zero_()
        addresses[1] = buffer.address
        program.run(threads, addresses)
        SPARE.give(buffer)
        return out

    def _program(self, threads: int, images: tuple[int, ...]) -> CallSequence:
        """images: of the factor that is copied, see Images.of."""
        made = CallSequence.of(self._steps(threads, images))
        return self.programs.setdefault((threads, images), made)

    def _steps(self, threads: int, images: Sequence[int]) -> list[tuple[Step, list[Patch]]]:
        """The C functions of a call: copy or pack, nest, unpack."""
        moves, size = self.moves, 4 if self.nest.real == "float" else 8
        begins: list[Patch] = [(nest_c.HEADER + 2 * n, n + 2, begin * size) for n, begin in enumerate(self.begins)]
        fixed = [*self._tasks(threads), self.starts.data_ptr(), self.target_offsets.data_ptr(), 0]
        entries = [n for o in self.offsets for n in (0, 0 if o is None else o.data_ptr())]
        nest = (self.kernel, (*fixed, *entries, *self.loops))
        if moves is None:
            return [(nest, [(nest_c.TARGET, 0, 0), *begins])]
        inside, room = (sum(moves.parts[:n]) * size for n in (1, 2))
        target = (nest_c.TARGET, 0, 0) if moves.out is None else (nest_c.TARGET, 1, inside)
        begins = [(place, 1 if n == moves.factor + 1 else n, past) for place, n, past in begins]
        steps: list[tuple[Step, list[Patch]]] = [(nest, [target, *begins])]
        begin, each, *strides = images
        source, *places = nest_c.MOVED
        patches = [(source, moves.factor + 1, begin * size), (places[0], 1, 0), (places[1], 1, room)]
        steps.insert(0, (moves.into.step(each, moves.into.elements, *strides), patches))
        if moves.out is not None:
            patches: list[Patch] = [(source, 1, inside), (places[0], 0, 0), (places[1], 1, room)]
            steps.append((moves.out.step(moves.out.elements, math.prod(moves.out.sizes[:2]), 0, 0), patches))
        return steps

    def _tasks(self, threads: int) -> list[int]:
        segments = len(self.target_offsets)
        name, chunk = next(iter(self.schedule.parallel), ("", 0))
        wanted = -(-_TASKS * threads // self.outer) if threads > 1 and name not in self.facts.dense else 1
        each = min(segments, chunk or -(-segments // min(segments, wanted)))
        chunks, blocks = -(-segments // each), (len(self.starts) - 1) // segments
        return [0, self.outer * chunks, chunks, segments, blocks, each, self.length]

    def place(self, number: int, x: Tensor) -> InMemory:
        """A factor as the nest reads it."""
        offsets, moves, placed = self.offsets[number - 1], self.moves, self.placed[number]
        if moves is not None and moves.factor == number:
            return moves.images.of(x)
        x = placed.view.cut(x)
        # The values of a filter stay the same tensor, by which their order is cached.
        x = x if x.shape == placed.view.shape else x.reshape(placed.view.shape)
        if offsets is not None and self.nest.factors[number - 1].entries == "order":
            return _in_order(x, offsets, x.data_ptr()), ()
        return _padded(x, placed.pads), ()


InMemory = tuple[Tensor, tuple[int, ...]]
"""A factor, and where its images are if these are copied, see Images.of."""


def _padded(x: Tensor, pads: Sequence[tuple[int, int]]) -> Tensor:
    """x, contiguous, with zeros before and after its first axes."""
    if not any(map(any, pads)):
        return x.contiguous()
    pads = (*pads, *((0, 0),) * (x.ndim - len(pads)))
    return functional.pad(x, [n for pad in reversed(pads) for n in pad]).contiguous()  # torch keeps channels last


@cached_per_values
def _in_order(values: Tensor, offsets: Tensor, address: int) -> Tensor:  # noqa: ARG001 (`.data` may be set)
    return values.reshape(-1)[offsets[: -nest_c.AHEAD]]


def _moves(lanes: Lanes, placed: Sequence[Placed], real: str, count: int) -> LaneCopies | None:
    """Copies of the factor's images to lanes, and of the target's from them."""
    if not (lanes.moves(0) or lanes.moves(lanes.factor)):
        return None
    factor, target = placed[lanes.factor], placed[0].view.shape
    pads, shape = factor.pads, factor.view.shape
    images = Images(factor.view, _rows_columns(factor.view, lanes), pads[: -lanes.axes])
    number = math.prod(size + sum(pad) for size, pad in zip(shape[: -lanes.axes], pads, strict=False))
    elements = math.prod(lanes.read) * count
    if lanes.points:
        tiles = lanes.block[1] // lanes.tile[1]
        sizes = (*images.size, 0, 0, lanes.points, 0, tiles, count, 1, lanes.tile[1])
        into = LaneMove(nest_c.mover("copy", real), number, elements, sizes, (1, shape[-1] + count))
        return LaneCopies(lanes.factor, images, into, None, (_aligned(number * elements), 0), into.room[1])
    before = [0] * (2 - lanes.axes) + [pad[0] for pad in pads[-lanes.axes :]]
    steps = [c * b for c, b in zip(lanes.steps, lanes.block, strict=True)]
    grid, rooms = (lanes.grid[1], math.prod(lanes.grid)), []
    for step, size in ((steps, lanes.read), (lanes.block, lanes.block)):
        rooms.append([(n - 1) * d + s for n, d, s in zip(lanes.grid, step, size, strict=True)])
        rooms[-1][1] += count
    into = LaneMove(
        nest_c.mover("pack", real), number, elements, (*images.size, *before, *steps, *grid, *lanes.read), (*rooms[0],)
    )
    out = _rows_columns(placed[0].view, lanes)
    outputs, inside = math.prod(target[: -lanes.axes]), math.prod(lanes.block) * count
    back = LaneMove(
        nest_c.mover("unpack", real), outputs, inside, (*out, 0, 0, *lanes.block, *grid, *lanes.block), (*rooms[1],)
    )
    # Squares of `count` vectors are read, also at the end of the last image.
    parts = _aligned(number * elements), _aligned(outputs * inside + count * count)
    return LaneCopies(lanes.factor, images, into, back, parts, max(math.prod(into.room), math.prod(back.room)))


def _rows_columns(view: View, lanes: Lanes) -> tuple[int, int]:
    """(rows, columns) of the images that make up an operand: a joined axis may be both where lanes are neighbours."""
    rows, columns = _two(view.pieces[-2:] if lanes.points else view.shape[-lanes.axes :])
    whole = math.prod(view.shape[-lanes.axes :])
    return (rows, columns) if rows * columns == whole else (1, whole)


def _aligned(elements: int) -> int:
    """At least so many elements, whole cache lines."""
    return -(-elements // 16) * 16


@cached_per_tensor
def prepared(first: Tensor, form: Form, dtype: torch.dtype, wanted: Wanted, *others: Tensor) -> Prepared | None:
    """The nest of a form over these index arrays; None without entries. Raises OptionError if it cannot have the wanted
    schedule."""
    values = entry_parts(form, dict(zip(form.arrays, (first, *others), strict=True)))
    kept = next(len(v) for each in values for v in each if v is not None)
    if not kept:
        return None
    real, count = nest_c.lanes_of(dtype)
    pads = [_pads(view, each, dict(form.extents)) for view, each in zip(form.views, values, strict=True)]
    plain = [_placed(n, view, pads[n], None, count) for n, view in enumerate(form.views)]
    zeros = form.reduction in ("sum", "mean")  # of no entries
    targets, segment = _sorted_targets(plain[0], plain[0].offset(values[0]), kept, zeros)
    facts = _facts(form, values, plain, (kept, len(targets)), (count, torch.finfo(dtype).bits // 8))
    schedule = wanted.complete(facts)
    tiles = ImageTiles.of(schedule, facts)
    lanes = None if tiles is None else _lanes(form, tiles, count)
    placed = plain if lanes is None else [_placed(n, v, pads[n], lanes, count) for n, v in enumerate(form.views)]
    nest, outer, inner, length = _roles(form, placed, lanes, schedule, facts, real)
    offsets = [p.offset(each) for p, each in zip(placed, values, strict=True)]
    if placed[0].strides != plain[0].strides:
        targets, segment = _sorted_targets(placed[0], offsets[0], kept, zeros)
    block, blocks = _blocks(form, values, schedule, facts)
    key = block * len(targets) + segment
    order = key.argsort(stable=True)
    nest = replace(nest, factors=tuple(map(_with_entries, nest.factors, form.views[1:])))
    return Prepared(
        facts,
        schedule,
        nest,
        nest_c.address(nest_c.library(nest_c.source(nest)), "run"),
        tuple(placed),
        None if lanes is None else _moves(lanes, placed, real, count),
        torch.searchsorted(key[order], torch.arange(blocks * len(targets) + 1, device="cpu")),
        targets,
        tuple(0 if isinstance(o, Tensor) else o for o in offsets[1:]),
        tuple(_with_room(o[order]) if isinstance(o, Tensor) else None for o in offsets[1:]),
        len(targets) * math.prod(size for name, size in form.extents if name not in form.reduced)
        == math.prod(form.views[0].shape),
        math.prod(extent for extent, *_ in outer),
        length,
        tuple(number for loop in (*outer, *inner) for number in loop),
        _without_memory(form.views[0].shape, dtype),
        _counts(form, values[0], kept),
    )


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor for torch.empty_like, which finds its way sooner than torch.empty."""
    found = torch.empty(shape, dtype=dtype, device="cpu")
    found.untyped_storage().resize_(0)
    return found


def _counts(form: Form, values: Sequence[Tensor | None], entries: int) -> Tensor:
    """The number of values that are reduced into each result, of length 1 along its dense axes; empty for sums.
    values: of the target's axes."""
    if form.reduction == "sum":
        return torch.empty(0, device="cpu")
    shape = [1 if v is None else size for v, size in zip(values, form.views[0].shape, strict=True)]
    place = torch.zeros((), dtype=torch.int64, device="cpu")
    for value, size in zip(values, shape, strict=True):
        place = place * size + (0 if value is None else value)
    each = math.prod(size for name, size in form.extents if name in form.reduced)
    return each * torch.bincount(place.expand(entries), minlength=math.prod(shape)).view(shape)


def _with_room(offsets: Tensor) -> Tensor:
    """int32 offsets, followed by those that are read ahead."""
    return functional.pad(offsets, (0, nest_c.AHEAD)).int()


def _with_entries(factor: FactorAccess, view: View) -> FactorAccess:
    if all(axis.entry is None for axis in view.axes):
        return factor
    return factor._replace(entries="offset" if any(axis.dense for axis in view.axes) else "order")


def _sorted_targets(target: Placed, offset: Tensor | int, count: int, zeros: bool) -> tuple[Tensor, Tensor]:
    """(distinct target offsets in ascending order, the number of each entry's). Those without entries are included if
    they are few and the nest makes them `zeros`, sooner than a pass of its own."""
    found = offset if isinstance(offset, Tensor) else torch.full((count,), offset, device="cpu")
    distinct, number = found.unique(return_inverse=True)
    axes = [(axis, *each) for axis, *each in zip(target.view.axes, target.view.shape, target.strides, strict=True)]
    fixed = [(size, stride) for axis, size, stride in axes if axis.bare is None]
    windows = any(axis.dense and axis.bare is None for axis, *_ in axes)
    if not zeros or windows or math.prod(size for size, _ in fixed) > 2 * len(distinct):
        return distinct, number
    every = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, stride in fixed:
        every = (every[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    every = every.sort().values
    return every, torch.searchsorted(every, found)


def _pads(view: View, values: Sequence[Tensor | None], extents: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """(before, after): zeros that the windows of each axis reach."""
    every = zip(view.axes, values, view.shape, strict=True)
    return tuple(axis.pads(part, size, extents) for axis, part, size in every)


def _placed(number: int, view: View, pads: tuple[tuple[int, int], ...], lanes: Lanes | None, count: int) -> Placed:
    sizes = [size + sum(pad) for size, pad in zip(view.shape, pads, strict=True)]
    inner = 1
    if lanes is not None and lanes.moves(number):
        # [..., y, x, lane]
        sizes[-lanes.axes :] = (lanes.read if number else lanes.block)[-lanes.axes :]
        inner = count
    strides = accumulate([inner, *reversed(sizes[1:])], lambda a, b: a * b)
    return Placed(view, pads, tuple(strides)[: len(sizes)][::-1])


def _loops(names: Sequence[str], extents: Mapping[str, int], placed: Sequence[Placed]) -> dict[str, Loop]:
    """(extent, stride in each operand) of these indices."""
    return {n: (extents[n], *(p.stride(n) for p in placed)) for n in names if extents[n] > 1}


Loop = tuple[int, ...]


def _roles(
    form: Form, placed: Sequence[Placed], lanes: Lanes | None, schedule: LoopSchedule, facts: NestFacts, real: str
) -> tuple[Nest, list[Loop], list[Loop], int]:
    """(nest, its outer and inner loops, points of the vector index)."""
    extents, count, moved = dict(form.extents), facts.lanes, [name for name, _ in schedule.vector]
    if lanes is None:
        vector = moved[0] if moved else ""
        length, along = extents.get(vector, 1), [p.stride(vector) == 1 for p in placed]
        offsets, tiles = [tuple(count * k * p.stride(vector) for k in range(schedule.hold)) for p in placed], {}
    else:
        offsets, tiles = _image_tiles(placed, lanes, moved, count)
        length, along = count, [n in (0, lanes.factor) for n in range(len(placed))]
    free = _loops([n for n in facts.outer if n not in moved], extents, placed) | tiles
    summed = _loops([n for n in form.reduced if n not in moved], extents, placed)
    order = [name for name in schedule.order if name in free or name in facts.segments[:1]]
    outer, inner = [free[n] for n in order if n in free], [n for n in schedule.order if n in summed]
    factors = [FactorAccess("", *each) for each in zip(along[1:], offsets[1:], strict=True)]
    sums = lanes is None and not along[0] and length > 1
    target = offsets[0] if not sums else (0,) * len(offsets[0])
    reduction = "sum" if form.reduction == "mean" else form.reduction
    nest = Nest(
        real, count, target, tuple(factors), len(outer), len(inner), lanes is not None, sums, reduction=reduction
    )
    around = next((k for k, name in enumerate(order) if name not in free), len(outer))
    unroll = dict(schedule.unroll)
    unrolled = tuple(unroll.get(name, 0) for name in (facts.entries[0], *inner))
    return (
        replace(nest, around=around, unroll=unrolled if any(unrolled) else ()),
        outer,
        [(summed[n][0], *summed[n][2:]) for n in inner],
        length,
    )


def _image_tiles(
    placed: Sequence[Placed], lanes: Lanes, names: Sequence[str], count: int
) -> tuple[list[tuple[int, ...]], dict[str, Loop]]:
    """(offsets of a tile's outputs in each operand, loops over the tiles of a block). names: of the image's axes."""
    height, width = lanes.tile
    offsets, strides = [], []
    for n, place in enumerate(placed):
        if lanes.moves(n):
            down, right = (1, 1) if n == 0 else lanes.steps
            rows = [0, *place.strides][-2] * down if lanes.axes == 2 else 0
            found, moved = (rows, right * count), (height * rows, width * right * count)
        else:
            # Neighbours in place, or the same for all lanes.
            found, moved = (0, count), (0, lanes.points)
        if n not in (0, lanes.factor):
            found = moved = 0, 0
        last = lanes.points - count if lanes.points and not lanes.moves(n) else math.inf
        offsets.append(tuple(int(min(y * found[0] + x * found[1], last)) for y in range(height) for x in range(width)))
        strides.append(moved)
    numbers = [b // t for b, t in zip(lanes.block, lanes.tile, strict=True)]
    loops = [(n, *(s[axis] for s in strides)) for axis, n in enumerate(numbers)]
    named = zip(names, loops[2 - lanes.axes :], strict=True)
    return offsets, {name: loop for name, loop in named if loop[0] > 1}


def _lanes(form: Form, tiles: ImageTiles, count: int) -> Lanes:
    axes = len(tiles.tile)
    (factor,) = _image_views(form, tiles.image.names)
    grid, block, tile, steps = (_two(n) for n in (tiles.grid or (count,), tiles.block, tiles.tile, tiles.image.steps))
    read, window = (_two(tiles.reads(outputs)) for outputs in (tiles.block, tiles.tile))
    return Lanes(factor, axes, grid, block, tile, steps, read, window, tiles.copied, tiles.points)


def _two(numbers: Sequence[int]) -> tuple[int, int]:
    """Numbers along y and x from those of one or two axes."""
    first, second = [1, *numbers][-2:]
    return first, second


def _image_views(form: Form, names: Sequence[str | None]) -> list[int]:
    """The factor that has these indices as an image; none if others read them, too."""
    found = [n for n, view in enumerate(form.views[1:], 1) if _reads_image(view, names)]
    others = {
        name for n, view in enumerate(form.views[1:], 1) if n not in found for a in view.axes for _, name in a.dense
    }
    return found if len(found) == 1 and not others & {*names} else []


def _reads_image(view: View, names: Sequence[str | None]) -> bool:
    """True if these indices are those of the last axes, one each, and of no other axis."""
    ends = [axis.dense for axis in view.axes[-len(names) :]]
    before = {n for axis in view.axes[: -len(names)] for _, n in axis.dense}
    alone = all(len(e) == 1 and e[0][0] > 0 for e in ends) and [e[0][1] for e in ends] == [*names]
    return alone and not before & {*names}


Values = Sequence[Sequence[Tensor | None]]


def _facts(
    form: Form, values: Values, placed: Sequence[Placed], entries: tuple[int, int], vector: tuple[int, int]
) -> NestFacts:
    """What a schedule may name. placed: in place; entries: numbers of entries and segments; vector: (lanes, bytes of a
    value)."""
    levels, sizes = _levels(form), dict(form.extents)
    extents = {name: sizes[name] for view in form.views for axis in view.axes for _, name in axis.dense}
    segments = tuple(dict.fromkeys(name for (n, _), name in levels.items() if n == 0))
    spans: dict[str, int] = {}
    for (n, k), name in levels.items():
        if name not in segments and (found := values[n][k]) is not None:
            spans.setdefault(name, int(found.max() - found.min()) + 1)
    taken = {*levels.values(), *(part for name in extents for part in name.split("."))}
    factors = form.views[1:]
    axes = [(view.name, [n for _, n in a.dense]) for view in factors for a in view.axes if a.dense and not a.bare]
    windows = [(factor, n, tuple(o for o in names if o != n)) for factor, names in axes for n in names]
    vectors = [
        n for n in extents if all(p.stride(n) in (0, 1) for p in placed) and any(p.stride(n) for p in placed[1:])
    ]
    vectors.sort(key=lambda n: (min(extents[n], _WIDE), placed[0].stride(n)), reverse=True)
    images = [image for axes in (2, 1) if (image := _image(form, values, levels, axes, vector[0]))]
    return NestFacts(
        extents,
        tuple(name for name in extents if name in form.reduced),
        segments,
        spans,
        ("entries" if "e" in taken else "e", entries[0]),
        entries[1],
        tuple(view.name for view in factors),
        tuple(windows),
        tuple(vectors),
        tuple(images),
        (vector[0], nest_c.registers(), vector[1], l1_bytes()),
    )


def _levels(form: Form) -> dict[tuple[int, int], str]:
    """Names of the axes, (number of view, of axis), with coordinates in an index array: F_c is c if that is free."""
    arrays = {
        (n, k): found[0].name
        for n, view in enumerate(form.views)
        for k, axis in enumerate(view.axes)
        if axis.entry is not None and (found := arrays_of(axis.entry))
    }
    tails = ((name, name.rpartition("_")[2]) for name in arrays.values())
    short = {name: tail if tail.isidentifier() else name for name, tail in tails}
    dense = [part for name, _ in form.extents for part in name.split(".")]
    names = [*dense, *short.values()]
    return {at: short[name] if names.count(short[name]) == 1 else name for at, name in arrays.items()}


def _image(form: Form, values: Values, levels: Mapping[tuple[int, int], str], axes: int, count: int) -> Image | None:
    """The image of the last one or two axes of the target, if a factor has it."""
    target, extents = form.views[0], dict(form.extents)
    names = tuple(axis.bare or "" for axis in target.axes[-axes:])
    sizes = tuple(extents.get(name, 1) for name in names)
    found = _image_views(form, names)
    if len({*names} - {""}) < axes or not found or not _reads_image(target, names) or (axes == 2 and sizes[0] == 1):
        return None
    number, view, own = found[0], form.views[found[0]], values[found[0]][-axes:]
    images = math.prod([*padded_sizes(view, extents)][:-axes]) * count
    channel = levels.get((number, len(view.axes) - axes - 1), "")
    written = [name for (n, _), name in levels.items() if n == 0]
    return Image(
        view.name,
        names,
        sizes,
        tuple(axis.dense[0][0] for axis in view.axes[-axes:]),
        tuple(map(_span, view.axes[-axes:], own)),
        view.axes[-1].bare is not None,
        (math.prod(view.shape), math.prod(target.shape)),
        any(view.slices),
        MOST_ELEMENTS // images,
        "" if channel in written else channel,
    )


def _span(axis: NestAxis, entry: Tensor | None) -> int:
    """How far the entries' parts of an axis reach past an image that begins at its first index, or at its padding."""
    low, high = axis.ends(entry)
    return high - min(low, 0)


def _blocks(form: Form, values: Values, schedule: LoopSchedule, facts: NestFacts) -> tuple[Tensor | int, int]:
    """(block of each entry, number of blocks)."""
    block, blocks = 0, 1
    for name, size in schedule.split:
        if name in facts.coordinates:
            found = next(values[n][k] for (n, k), level in _levels(form).items() if level == name)
            assert found is not None
            count = -(-facts.coordinates[name] // size)
            block, blocks = block * count + (found - found.min()) // size, blocks * count
    return block, blocks
