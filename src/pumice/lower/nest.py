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
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Statement
from pumice.lower import nest_c
from pumice.lower.nest_c import FactorAccess, Nest
from pumice.lower.nest_form import MOST_ELEMENTS, EntryList, Form, NestAxis, View, normalized, padded_sizes
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.native import l1_bytes, parallel_region

_ACROSS = 4  # Vectors per tile along a vector index
_TILE = 14  # Accumulators of a tile over an image
_PAYS = 2  # Multiply-adds per copied value from which copying an image to lanes pays
_ALIGNS = 8  # Multiply-adds per value from which a copy that aligns vectors pays
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


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    statement, form, wide = bound.statement, _form(bound, operands), _wide(dtype)
    ready = prepared(*_arrays(form, operands, wide))
    if ready is None:
        result = torch.zeros(bound.shape, dtype=wide, device="cpu")
    else:
        result = ready.run([operands[view.name].to(wide) for view in form.views[1:]])
        if form.reduction == "mean":
            result /= ready.counts.clamp(min=1)
    if (coefficient := statement.terms[0].coefficient) != 1:
        result *= coefficient
    if not statement.accumulate:
        return result.view(bound.shape).to(dtype)
    old = operands[statement.target.name].to(dtype)
    if form.reduction == "sum" or ready is None:
        return old + result.view(bound.shape).to(dtype)
    join = torch.maximum if form.reduction == "max" else torch.minimum
    old = old.reshape(result.shape)
    return torch.where(ready.counts > 0, join(result.to(dtype), old), old).view(bound.shape)


def source_of(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """The loop nest of a statement that `refusal` accepts, and its C source; "" without entries."""
    ready = prepared(*_arrays(_form(bound, operands), operands, _wide(dtype)))
    return "" if ready is None else f"{ready.nest}\n\n{nest_c.source(ready.nest)}"


def _form(bound: BoundStatement, operands: Mapping[str, Tensor]) -> Form:
    found = normalized(bound, tuple([(name, tuple(t.shape)) for name, t in operands.items()]))
    assert isinstance(found, Form)
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _arrays(form: Form, operands: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `prepared`."""
    first, *others = [operands[name] for name in form.arrays]
    return (first, form, dtype, *others)


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


class Move(NamedTuple):
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


class Program(NamedTuple):
    """A call as the integers of nest_c.sequence. patches: (place, number of an address, bytes past it) of those that
    every call sets. Addresses are those of the target, of memory and of the factors."""

    numbers: array[int]
    patches: Sequence[tuple[int, int, int]]

    @staticmethod
    def of(steps: Sequence[tuple[Step, Sequence[tuple[int, int, int]]]]) -> Program:
        """steps: each with its patches."""
        numbers, patches, heads = list[int](), list[tuple[int, int, int]](), 2 * len(steps) + 1
        for (_, integers), own in steps:
            patches += [(heads + len(numbers) + place, *rest) for place, *rest in own]
            numbers += integers
        starts = accumulate((len(integers) for (_, integers), _ in steps), initial=heads)
        calls = [n for ((kernel, _), _), start in zip(steps, starts, strict=False) for n in (kernel, start)]
        return Program(array("q", (*calls, 0, *numbers)), patches)

    def run(self, threads: int, addresses: Sequence[int]) -> None:
        numbers = self.numbers[:]
        for place, which, past in self.patches:
            numbers[place] = addresses[which] + past
        nest_c.sequence()(parallel_region(), threads, numbers.buffer_info()[0])


class Images:
    """Where the images of an operand lie in memory. size: their rows and columns; pads: of the axes before these."""

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
        return x, self._known.setdefault(x.stride(), (images.storage_offset() - x.storage_offset(), *images.stride()))


class LaneCopies(NamedTuple):
    """Copies of images to lanes, with their padding, and back; out: None if the target is in place. factor: the one that is copied, whose
    images are `images`; parts: elements of that factor and of the target in lanes, with room between them."""

    factor: int
    images: Images
    into: Move
    out: Move | None
    parts: tuple[int, int]

    @property
    def room(self) -> int:
        """Elements that a thread needs besides."""
        return max(math.prod(move.room) for move in (self.into, self.out) if move is not None)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A nest with its sizes and offsets. begins, offsets: of each factor, by constants and by entry (None: none);
    whole: all results are written; outer: points of the outer loops; loops: integers of the outer and inner loops.
    A factor that has one value per entry is put in their order. counts: values reduced into each result, unless summed;
    kernel: address of the C function; programs: by threads and layout of the copied factor."""

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
    counts: Tensor
    programs: dict[tuple[Any, ...], Program] = field(default_factory=dict)

    def run(self, factors: Sequence[Tensor]) -> Tensor:
        """The target, of the shape of its view. factors: the whole operands."""
        return self.run_placed([self.place(n, x) for n, x in enumerate(factors, 1)])

    def run_placed(self, factors: Sequence[InMemory]) -> Tensor:
        """As `run`, of factors that `place` gave."""
        threads, like, moves = torch.get_num_threads(), factors[0][0], self.moves
        outside = moves is not None and moves.out is not None
        make = like.new_empty if self.whole else like.new_zeros
        out = (like.new_empty if outside else make)(self.placed[0].view.shape)
        memory = out if moves is None else make(sum(moves.parts) + threads * moves.room)
        key = threads, *[at for _, at in factors if at]
        program = self.programs.get(key) or self.programs.setdefault(key, self._program(threads, key[1:]))
        program.run(threads, [out.data_ptr(), memory.data_ptr(), *[x.data_ptr() for x, _ in factors]])
        return out

    def _program(self, threads: int, images: Sequence[Sequence[int]]) -> Program:
        """images: of the factor that is copied, see Images.of."""
        moves, size = self.moves, 4 if self.nest.real == "float" else 8
        begins = [(nest_c.HEADER + 2 * n, n + 2, begin * size) for n, begin in enumerate(self.begins)]
        fixed = [*self._tasks(threads), self.starts.data_ptr(), self.target_offsets.data_ptr(), 0]
        entries = [n for o in self.offsets for n in (0, 0 if o is None else o.data_ptr())]
        nest = (self.kernel, (*fixed, *entries, *self.loops))
        if moves is None:
            return Program.of([(nest, [(nest_c.TARGET, 0, 0), *begins])])
        inside, room = (sum(moves.parts[:n]) * size for n in (1, 2))
        target = (0, 0) if moves.out is None else (1, inside)
        begins = [(place, 1 if n == moves.factor + 1 else n, past) for place, n, past in begins]
        steps = [(nest, [(nest_c.TARGET, *target), *begins])]
        ((begin, each, *strides),) = images
        source, *places = nest_c.MOVED
        patches = [(source, moves.factor + 1, begin * size), *zip(places, (1, 1), (0, room), strict=True)]
        steps.insert(0, (moves.into.step(each, moves.into.elements, *strides), patches))
        if moves.out is not None:
            patches = [*zip(nest_c.MOVED, (1, 0, 1), (inside, 0, room), strict=True)]
            steps.append((moves.out.step(moves.out.elements, math.prod(moves.out.sizes[:2]), 0, 0), patches))
        return Program.of(steps)

    def _tasks(self, threads: int) -> list[int]:
        segments = len(self.target_offsets)
        wanted = -(-_TASKS * threads // self.outer) if threads > 1 else 1
        each = -(-segments // min(segments, wanted))
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
        ordered = offsets is not None and self.nest.factors[number - 1].entries == "order"
        return (_in_order(x, offsets) if ordered else _padded(x, placed.pads)), ()


InMemory = tuple[Tensor, tuple[int, ...]]
"""A factor, and where its images are if these are copied, see Images.of."""


def _padded(x: Tensor, pads: Sequence[tuple[int, int]]) -> Tensor:
    """x, contiguous, with zeros before and after its first axes."""
    if not any(map(any, pads)):
        return x.contiguous()
    pads = (*pads, *((0, 0),) * (x.ndim - len(pads)))
    return functional.pad(x, [n for pad in reversed(pads) for n in pad])


@cached_per_tensor
def _in_order(values: Tensor, offsets: Tensor) -> Tensor:
    return values.reshape(-1)[offsets[: -nest_c.AHEAD]]


def _moves(lanes: Lanes, placed: Sequence[Placed], real: str, count: int) -> LaneCopies | None:
    """Copies of the factor's images to lanes, and of the target's from them."""
    if not (lanes.moves(0) or lanes.moves(lanes.factor)):
        return None
    factor, target = placed[lanes.factor], placed[0].view.shape
    pads, shape = factor.pads, factor.view.shape
    images = Images(factor.view, _image(factor.view, lanes), pads[: -lanes.axes])
    number = math.prod(size + sum(pad) for size, pad in zip(shape[: -lanes.axes], pads, strict=False))
    elements = math.prod(lanes.read) * count
    if lanes.points:
        tiles = lanes.block[1] // lanes.tile[1]
        sizes = (*images.size, 0, 0, lanes.points, 0, tiles, count, 1, lanes.tile[1])
        into = Move(nest_c.mover("copy", real), number, elements, sizes, (1, shape[-1] + count))
        return LaneCopies(lanes.factor, images, into, None, (_aligned(number * elements), 0))
    before = [0] * (2 - lanes.axes) + [pad[0] for pad in pads[-lanes.axes :]]
    steps = [c * b for c, b in zip(lanes.steps, lanes.block, strict=True)]
    grid, rooms = (lanes.grid[1], math.prod(lanes.grid)), []
    for step, size in ((steps, lanes.read), (lanes.block, lanes.block)):
        rooms.append([(n - 1) * d + s for n, d, s in zip(lanes.grid, step, size, strict=True)])
        rooms[-1][1] += count
    into = Move(
        nest_c.mover("pack", real), number, elements, (*images.size, *before, *steps, *grid, *lanes.read), (*rooms[0],)
    )
    out = _image(placed[0].view, lanes)
    outputs, inside = math.prod(target[: -lanes.axes]), math.prod(lanes.block) * count
    back = Move(
        nest_c.mover("unpack", real), outputs, inside, (*out, 0, 0, *lanes.block, *grid, *lanes.block), (*rooms[1],)
    )
    # Squares of `count` vectors are read, also at the end of the last image.
    return LaneCopies(
        lanes.factor, images, into, back, (_aligned(number * elements), _aligned(outputs * inside + count * count))
    )


def _image(view: View, lanes: Lanes) -> tuple[int, int]:
    """(rows, columns) of the images that make up an operand: a joined axis may be both."""
    whole = math.prod(view.shape[-lanes.axes :])
    rows, columns = [1, *view.pieces][-2:]
    return (rows, columns) if rows * columns == whole else (1, whole)


def _aligned(elements: int) -> int:
    """At least so many elements, whole cache lines."""
    return -(-elements // 16) * 16


@cached_per_tensor
def prepared(first: Tensor, form: Form, dtype: torch.dtype, *others: Tensor) -> Prepared | None:
    """The nest of a form over these index arrays; None without entries."""
    entries = EntryList(dict(form.positions), dict(zip(form.arrays, (first, *others), strict=True)))
    part = partial(_entry_part, entries, dict(form.extents))
    values = [list(map(part, view.axes, view.shape)) for view in form.views]
    kept = entries.kept.nonzero()[:, 0]
    if not len(kept):
        return None
    values = [[None if v is None else v[kept] for v in each] for each in values]
    real, count = nest_c.lanes_of(dtype)
    pads = [_pads(view, each, dict(form.extents)) for view, each in zip(form.views, values, strict=True)]
    lanes = _lanes(form, values, len(kept), count)
    placed = [_placed(n, view, pads[n], lanes, count) for n, view in enumerate(form.views)]
    nest, outer, inner, length = _roles(form, placed, lanes, real, count)
    offsets = [p.offset(each) for p, each in zip(placed, values, strict=True)]
    targets, segment = _sorted_targets(offsets[0], len(kept))
    block, blocks = _blocks(form, values, lanes, nest, len(targets))
    key = block * len(targets) + segment
    order = key.argsort(stable=True)
    nest = replace(nest, factors=tuple(map(_with_entries, nest.factors, form.views[1:])))
    return Prepared(
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
        _counts(form, values[0], len(kept)),
    )


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


def _entry_part(entries: EntryList, extents: Mapping[str, int], axis: NestAxis, size: int) -> Tensor | None:
    """The entries' part of an axis; entries whose window is outside the operand everywhere are not kept."""
    return None if axis.entry is None else entries.values(axis.entry, size, axis.reach(extents))


def _with_room(offsets: Tensor) -> Tensor:
    """int32 offsets, followed by those that are read ahead."""
    return functional.pad(offsets, (0, nest_c.AHEAD)).int()


def _with_entries(factor: FactorAccess, view: View) -> FactorAccess:
    if all(axis.entry is None for axis in view.axes):
        return factor
    return factor._replace(entries="offset" if any(axis.dense for axis in view.axes) else "order")


def _sorted_targets(offset: Tensor | int, count: int) -> tuple[Tensor, Tensor]:
    """(distinct target offsets in ascending order, the number of each entry's)."""
    found = offset if isinstance(offset, Tensor) else torch.full((count,), offset, device="cpu")
    return found.unique(return_inverse=True)


def _pads(view: View, values: Sequence[Tensor | None], extents: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """(before, after): zeros that the windows of each axis reach."""
    found = []
    for axis, size, entry in zip(view.axes, view.shape, values, strict=True):
        before, after = axis.reach(extents)
        low, high = (axis.constant,) * 2 if entry is None else (int(entry.min()), int(entry.max()))
        found.append((max(0, -low - before), max(0, high + after - size + 1)))
    return tuple(found)


def _placed(number: int, view: View, pads: tuple[tuple[int, int], ...], lanes: Lanes | None, count: int) -> Placed:
    sizes = [size + sum(pad) for size, pad in zip(view.shape, pads, strict=True)]
    inner = 1
    if lanes is not None and lanes.moves(number):
        # [..., y, x, lane]
        sizes[-lanes.axes :] = (lanes.read if number else lanes.block)[-lanes.axes :]
        inner = count
    strides = accumulate([inner, *reversed(sizes[1:])], lambda a, b: a * b)
    return Placed(view, pads, tuple(strides)[: len(sizes)][::-1])


def _loops(names: Sequence[str], extents: Mapping[str, int], placed: Sequence[Placed]) -> list[tuple[int, ...]]:
    """(extent, stride in each operand) of these indices."""
    return [(extents[n], *(p.stride(n) for p in placed)) for n in names if extents[n] > 1]


Loop = tuple[int, ...]


def _roles(
    form: Form, placed: Sequence[Placed], lanes: Lanes | None, real: str, count: int
) -> tuple[Nest, list[Loop], list[Loop], int]:
    """(nest, its outer and inner loops, points of the vector index)."""
    extents = dict(form.extents)
    if lanes is None:
        vector = _vector_index(form, placed)
        moved, length = [vector], extents.get(vector, 1)
        across = range(min(_ACROSS, -(-length // count)))
        offsets = [tuple(count * k * p.stride(vector) for k in across) for p in placed]
        along, tiles = [p.stride(vector) == 1 for p in placed], list[Loop]()
    else:
        moved, length = [axis.bare for axis in form.views[0].axes[-lanes.axes :]], count
        offsets, tiles = _image_tiles(placed, lanes, count)
        along = [n in (0, lanes.factor) for n in range(len(placed))]
    free = [n for n in extents if n not in form.reduced and n not in moved]
    outer = _loops(free, extents, placed) + tiles
    inner = [(extent, *s) for extent, _, *s in _loops([n for n in form.reduced if n not in moved], extents, placed)]
    factors = [FactorAccess("", *each) for each in zip(along[1:], offsets[1:], strict=True)]
    sums = lanes is None and not along[0] and length > 1
    target = offsets[0] if not sums else (0,) * len(offsets[0])
    reduction = "sum" if form.reduction == "mean" else form.reduction
    return (
        Nest(real, count, target, tuple(factors), len(outer), len(inner), lanes is not None, sums, reduction),
        outer,
        inner,
        length,
    )


def _vector_index(form: Form, placed: Sequence[Placed]) -> str:
    """The longest index along which all operands are contiguous or constant; "" if there is none."""
    names = [n for n, _ in form.extents if all(p.stride(n) in (0, 1) for p in placed)]
    names = [n for n in names if any(p.stride(n) for p in placed[1:])]
    extents = dict(form.extents)
    return max(names, key=lambda n: (min(extents[n], _WIDE), placed[0].stride(n)), default="")


def _image_tiles(placed: Sequence[Placed], lanes: Lanes, count: int) -> tuple[list[tuple[int, ...]], list[Loop]]:
    """(offsets of a tile's outputs in each operand, loops over the tiles of a block)."""
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
    return offsets, [loop for loop in loops if loop[0] > 1]


def _lanes(form: Form, values: Sequence[Sequence[Tensor | None]], entries: int, count: int) -> Lanes | None:
    """Lanes over blocks of an image, if they pay."""
    target, extents = form.views[0], dict(form.extents)
    for axes in (2, 1):
        names = [axis.bare for axis in target.axes[-axes:]]
        found = [n for n, view in enumerate(form.views[1:], 1) if _reads_image(view, names)]
        others = [view for n, view in enumerate(form.views[1:], 1) if n not in found]
        read = {name for view in others for axis in view.axes for _, name in axis.dense}
        if len(names) < axes or None in names or len(found) != 1 or read & {*names}:
            continue
        sizes = [extents[name or ""] for name in names]
        view = form.views[found[0]]
        steps = [view.axes[n - axes].dense[0][0] for n in range(axes)]
        spans = [_span(values[found[0]][n - axes]) for n in range(axes)]
        bare = view.axes[-1].bare is not None
        image = Image(_two(sizes, 1), _two(steps, 1), _two(spans, 0), bare)
        lanes = _grid(found[0], image, count)
        fits = math.prod([*padded_sizes(view, extents)][:-axes]) * math.prod(lanes.read) * count <= MOST_ELEMENTS
        if not fits or math.prod(sizes) < count:
            continue
        reused = entries * math.prod(extents.values()) / math.prod(view.shape)
        if lanes.points:
            # Aligned vectors are read in place; parts of an operand are copied anyway.
            return lanes._replace(copied=any(view.slices) or (sizes[0] % count > 0 and reused >= _ALIGNS))
        if reused >= _PAYS * (1 + math.prod(target.shape) / math.prod(view.shape)):
            return lanes
    return None


class Image(NamedTuple):
    """An image along y and x: outputs, coefficients in the factor's axes, spans of the entries' parts there;
    bare: its x axis is that of the factor."""

    sizes: tuple[int, int]
    steps: tuple[int, int]
    spans: tuple[int, int]
    bare: bool


def _two(numbers: Sequence[int], default: int) -> tuple[int, int]:
    """Numbers along y and x from those of one or two axes."""
    first, second = [default, *numbers][-2:]
    return first, second


def _reads_image(view: View, names: Sequence[str | None]) -> bool:
    """True if these indices are those of the last axes, one each, and of no other axis."""
    ends = [axis.dense for axis in view.axes[-len(names) :]]
    before = {n for axis in view.axes[: -len(names)] for _, n in axis.dense}
    alone = all(len(e) == 1 and e[0][0] > 0 for e in ends) and [e[0][1] for e in ends] == [*names]
    return alone and not before & {*names}


def _span(entry: Tensor | None) -> int:
    return 0 if entry is None else int(entry.max() - entry.min())


def _grid(factor: int, image: Image, count: int) -> Lanes:
    """The grid of blocks that needs the fewest operations, then the one that reads least."""
    sizes, steps, spans, bare = image
    flat, best = sizes[0] == 1, dict[tuple[int, int], Lanes]()
    if flat and bare and (tiles := _neighbours(sizes[1], count)) is not None:
        best[tiles[0] * (tiles[1] + 1), 0] = _in_line(factor, sizes[1], tiles, count)
    for across in range(1, count + 1):
        grid = (1, count) if flat else (min(sizes[0], count // across), min(sizes[1], across))
        block = [-(-n // g) for n, g in zip(sizes, grid, strict=True)]
        width = _tile_length(block[1], _TILE)
        tile = _tile_length(block[0], _TILE // width), width
        numbers = [-(-b // t) for b, t in zip(block, tile, strict=True)]
        rows, columns = (n * t for n, t in zip(numbers, tile, strict=True))
        read, window = (_reach(outputs, steps, spans) for outputs in ((rows, columns), tile))
        found = Lanes(factor, 1 if flat else 2, grid, (rows, columns), tile, steps, read, window)
        best.setdefault((math.prod(numbers) * (math.prod(tile) + 1), math.prod(window)), found)
    return best[min(best)]


def _reach(outputs: Sequence[int], steps: Sequence[int], spans: Sequence[int]) -> tuple[int, int]:
    """Rows and columns that so many outputs read."""
    rows, columns = ((n - 1) * step + 1 + span for n, step, span in zip(outputs, steps, spans, strict=True))
    return rows, columns


def _tile_length(points: int, most: int) -> int:
    """Outputs of a tile along an axis of `points`: a tile takes about as long as one more output."""
    return min(range(1, min(points, most) + 1), key=lambda t: -(-points // t) * (t + 1))


def _neighbours(length: int, count: int) -> tuple[int, int] | None:
    """(equal tiles, vectors of a tile) of an axis, the last vector of a tile overlapping the one before; None if its
    length has no such divisor."""
    equal = [(n, -(-length // n // count)) for n in range(1, length // count + 1) if length % n == 0]
    return min((each for each in equal if each[1] <= _TILE), key=lambda e: e[0] * (e[1] + 1), default=None)


def _in_line(factor: int, length: int, tiles: tuple[int, int], count: int) -> Lanes:
    number, vectors = tiles
    block = 1, number * vectors
    return Lanes(factor, 1, (1, count), block, (1, vectors), (1, 1), block, (1, vectors), False, length // number)


def _blocks(
    form: Form, values: Sequence[Sequence[Tensor | None]], lanes: Lanes | None, nest: Nest, segments: int
) -> tuple[Tensor | int, int]:
    """(block of each entry, number of blocks): a block's part of the image stays in L1."""
    if lanes is None or len(values[lanes.factor]) <= lanes.axes:
        return 0, 1
    channel = values[lanes.factor][-1 - lanes.axes]
    if channel is None:
        return 0, 1
    size = math.prod(lanes.window) * nest.lanes * (4 if nest.real == "float" else 8)
    channel = channel - channel.min()
    channels = int(channel.max()) + 1
    # Every block reads and writes all results again.
    wanted = min(-(-channels * size // (l1_bytes() * 7 // 8)), max(1, len(channel) // (4 * segments)))
    each = -(-channels // wanted)
    return channel // each, -(-channels // each)
