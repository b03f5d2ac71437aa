"""Statements over lists of entries on a GPU, each in one kernel: convolutions with sparse filters above all.

    T[t(s) + dense] = sum over entries e of segment s of v[e] * X[o(e) + dense]       s: the entries of one target

The dense indices of the target, flattened, run across lanes: what index arrays contribute to an address is one number
per entry, the same for all lanes. A program computes some of these points for a few segments; the entries of a segment
are dealt out to rows of the program, whose sums are added at the end, so that results do not depend on the order of
programs. Where windows leave the operand, one bit per point and distinct window tells; nothing is padded. The longest
segments start first.

One segment and one part per program, for all statements, is the fixed format and schedule of "Unified Convolution
Framework", section 6.2.4; parts, segments and points of a program are our own, as are the bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pumice.language.bind import BoundStatement
from pumice.language.nodes import Statement, indices_of
from pumice.lower.nest_form import Form, View, entry_parts, normalized
from pumice.runtime.cache import cached_per_tensor
from pumice.runtime.launch import keep_for_graph, kernel
from pumice.runtime.repeat import NewTensor, OpenArguments, Repeated, RepeatedLaunch
from pumice.schedule.predict import Work

OFFSET_BITS = 26  # Bits of a word for an entry's offset; the other 6 of its lower half are for its edge
_EDGES = 62  # Distinct windows across an edge that bits can tell
MOST_LOOPS = 4
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class EntryTile(NamedTuple):
    """points: of a program, along lanes; segments: targets of a program; parts: rows that share a segment's entries."""

    points: int
    segments: int
    parts: int
    warps: int

    @classmethod
    def default(cls, segments: int, points: int, longest: int, aligned: int) -> EntryTile:
        """The tile for so many segments of `points` results, the longest of which has so many entries.

        Measured on an H200 with the layers of a pruned ResNet-50. A program should have several loads under way, and
        no more rows than segments have entries. aligned: neighbours that are read at once, at most."""
        width = 1 << (min(points, 64) - 1).bit_length()
        programs, vectors = segments * -(-points // 64), aligned >= 4
        if vectors and programs >= _MANY and points >= 128:
            return cls(128, 16, 1, 4)
        if programs >= _SOME and vectors:
            parts, warps = 8, 1
        elif programs >= 2 * _SOME and points >= 128:
            width, parts, warps = 128, 8, 2
        elif programs >= _SOME and points >= 128:
            parts, warps = 16, 2
        else:
            parts, warps = (16, 4) if vectors or programs >= _FEW else (32, 4)
        parts = min(parts, 1 << max(1, longest // 4).bit_length() - 1)
        rows = max(4, parts)
        return cls(width, rows // parts, parts, min(warps, rows))


_FEW, _SOME, _MANY = 700, 1500, 16_000  # Programs with one segment each


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why a statement is no sum over entries here, or None."""
    form = normalized(bound, tuple((name, tuple(t.shape)) for name, t in operands.items()))
    if isinstance(form, str):
        return form
    if any(operands[view.name].dtype not in _TYPES for view in form.views[1:]):
        return "a factor is not of float32, float16 or bfloat16"
    return refused(form)


def refused(form: Form) -> str | None:
    """The reason why a form is no sum over entries here, or None."""
    if form.reduction != "sum":
        return f"it is a {form.reduction}"
    if form.reduced:
        return "a dense index is summed"
    dense = [view for view in form.views[1:] if _is_dense(view)]
    if len(dense) != 1:
        return f"one factor has dense indices, found {len(dense)}"
    strides, extents = _strides(dense[0].shape), dict(form.extents)
    reached = zip(dense[0].axes, dense[0].shape, strides, strict=True)
    if sum((size + 2 * axis.reach(extents)[1]) * s for axis, size, s in reached if not axis.bare) >> OFFSET_BITS:
        return "entries are too far apart in an operand"
    if len(_loops(form, strides)) > MOST_LOOPS:
        return f"more than {MOST_LOOPS} dense indices are left"
    return None


def work(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> Work:
    """The factor is read at every entry and point, through the second-level cache."""
    form, points = _form(bound, operands), bound.points(indices_of(statement))
    (dense,) = (view for view in form.views[1:] if _is_dense(view))
    size = operands[dense.name].element_size()
    # Entries of matrices may be spread unevenly, which kernels of products mind less.
    uneven = 1 if any(axis.dense for axis in dense.axes[:-1]) or dense.axes[-1].entry is not None else 4
    return Work(2 * points, cache=uneven * size * points)


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate a statement that `refusal` accepts; a new tensor of `dtype`."""
    form = _form(bound, operands)
    ready = keep_for_graph(prepared(*_arrays(form, operands)))
    if ready is None:
        return finished(bound, operands, dtype, None)
    x, values = _factors(form, ready, operands)
    return finished(bound, operands, dtype, lambda kind: ready.run(x, values, kind))


def finished(
    bound: BoundStatement,
    operands: Mapping[str, Tensor],
    dtype: torch.dtype,
    sums: Callable[[torch.dtype], Tensor] | None,
) -> Tensor:
    """The result of a statement of one product, of `dtype`. sums: of the products, in a dtype; None: there are none."""
    statement, coefficient = bound.statement, bound.statement.terms[0].coefficient
    wide = torch.float32 if statement.accumulate or coefficient != 1 else dtype
    if sums is None:
        result = torch.zeros(bound.shape, dtype=wide, device=next(iter(operands.values())).device)
    else:
        result = sums(wide).view(bound.shape)
    result = (result if coefficient == 1 else result * coefficient).to(dtype)
    return operands[statement.target.name] + result if statement.accumulate else result


class EntryStep:
    """A step of a plan: a statement that `refusal` accepts."""

    run: Callable[[BoundStatement, Mapping[str, Tensor], torch.dtype], Tensor] = staticmethod(run)
    bound: BoundStatement
    dtype: torch.dtype

    def __init__(self, bound: BoundStatement, dtype: torch.dtype) -> None:
        self.bound, self.dtype = bound, dtype

    def __call__(self, operands: Mapping[str, Tensor], before: Tensor | None = None) -> Tensor:
        """The result, of `dtype`, added to that of the steps before."""
        found = self.run(self.bound, operands, self.dtype)
        return found if before is None else before + found

    def repeated(self, operands: Mapping[str, Tensor], names: Sequence[str]) -> Repeated | None:
        """The step that ran as a function of the factor with dense indices, or of both, of the same layouts; None for
        others, and if entries have several values."""
        form, statement = _form(self.bound, operands), self.bound.statement
        dense, *others = sorted(form.views[1:], key=lambda view: not _is_dense(view))
        ready = prepared(*_arrays(form, operands))
        plain = statement.terms[0].coefficient == 1 and not statement.accumulate
        read = [dense.name, *(view.name for view in others)]
        if not plain or ready is None or ready.places is not None or dense.name not in names:
            return None
        x, values = _factors(form, ready, operands)
        launch = ready.repeated((x, values), self._result(ready, x), OpenArguments.of(names, read, 6))
        if launch is not None and not ready.pads and in_place((x, values), [operands[name] for name in read]):
            return launch
        fixed = {name: x for name, x in operands.items() if name not in names}
        return lambda tensors: self({**fixed, **dict(zip(names, tensors, strict=True))})

    def _result(self, sums: EntrySums, x: Tensor) -> NewTensor:
        """What a launch writes."""
        return NewTensor(self.bound.shape, self.dtype, x.device, not sums.whole)


def in_place(views: Sequence[Tensor], operands: Sequence[Tensor]) -> bool:
    """True if these contiguous views begin where their operands do: a kernel may be given the operands."""
    return all(
        [
            v.is_contiguous() and v.data_ptr() == x.data_ptr() and v.dtype == x.dtype
            for v, x in zip(views, operands, strict=True)
        ]
    )


def _form(bound: BoundStatement, operands: Mapping[str, Tensor]) -> Form:
    found = normalized(bound, tuple([(name, tuple(t.shape)) for name, t in operands.items()]))
    assert isinstance(found, Form)
    return found


def _arrays(form: Form, operands: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """The arguments of `prepared`."""
    first, *others = [operands[name] for name in form.arrays]
    return (first, form, *others)


def _is_dense(view: View) -> bool:
    return any(axis.dense for axis in view.axes)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate([1, *reversed(shape[1:])], lambda a, b: a * b))[: len(shape)][::-1]


def _factors(form: Form, ready: EntrySums, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(the factor with dense indices, the product of the others)."""
    held = [view.cut(operands[view.name]).reshape(view.shape) for view in form.views[1:]]
    (x,) = (t for t, view in zip(held, form.views[1:], strict=True) if _is_dense(view))
    others = [t.reshape(-1) for t, view in zip(held, form.views[1:], strict=True) if not _is_dense(view)]
    if ready.places is None:
        return x, others[0]
    values = x.new_ones(1)
    for other, places in zip(others, ready.places, strict=True):
        values = values * other[places]
    return x, values


# Preparation


class Loop(NamedTuple):
    """A dense index: its extent, its strides in the factor and in the target."""

    extent: int
    read: int
    write: int


@dataclass(frozen=True, eq=False)
class EntrySums:
    """The entries of a statement in the order in which a tile reads them, see entry_kernels.entry_sums.

    loops: dense indices, the innermost last; begin: offset of the factor's first element that is read; aligned: power
    of two that divides all offsets; pads: zeros around the factor, if bits cannot tell its edges; places: of each
    entry's values in the other factors if there are several, else None; whole: all results are written; launches: by
    what they depend on besides."""

    tile: EntryTile
    loops: tuple[Loop, ...]
    begin: int
    aligned: int
    words: Tensor
    starts: Tensor
    targets: Tensor
    edges: Tensor
    pads: tuple[int, ...]
    places: tuple[Tensor, ...] | None
    whole: bool
    shape: tuple[int, ...]
    launches: dict[Any, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def points(self) -> int:
        return math.prod(loop.extent for loop in self.loops)

    def run(self, x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The target in its view's shape. x: the factor with dense indices; values: of the entries."""
        x, values = (functional.pad(x, self.pads) if self.pads else x).contiguous(), values.contiguous()
        y = (torch.empty if self.whole else torch.zeros)(self.shape, dtype=dtype, device=x.device)
        size = max(x.element_size(), y.element_size())
        count, numbers, constants = self.launches.get(size) or self.launches.setdefault(size, self._launch(size))
        kernel("entry_kernels.entry_sums", "lower")(
            count, self._tensors(x, values, y), numbers, constants, self.tile.warps
        )
        return y

    def _tensors(self, x: Tensor, values: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """The tensors of a launch."""
        return (x, values, self.words, self.starts, self.targets, self.edges, y)

    def repeated(
        self, factors: tuple[Tensor, Tensor], result: NewTensor, open: OpenArguments | None
    ) -> RepeatedLaunch | None:
        """`run` of contiguous factors like these, if it has run."""
        y = factors[0].new_empty(0, dtype=result.dtype)
        found = self.launches.get(max(factors[0].element_size(), y.element_size()))
        if found is None or open is None:
            return None
        count, numbers, constants = found
        tensors = self._tensors(*factors, y)
        bound = kernel("entry_kernels.entry_sums", "lower").bound(tensors, constants, self.tile.warps)
        return RepeatedLaunch.of(bound, (count, tensors, numbers), open, result, self)

    def _launch(self, size: int) -> tuple[int, list[int], dict[str, Any]]:
        """(programs, integers, constants) of a launch. size: bytes of the larger element."""
        tile, points = self.tile, self.points
        vector = min(self.aligned, 16 // size, max(1, tile.points // 8))
        lanes, groups = min(tile.points, 32 * vector), len(self.starts) - 1
        constants = {
            "LOOPS": len(self.loops),
            "TURNS": tile.points // lanes,
            "LANES": lanes,
            "SEGMENTS": tile.segments,
            "PARTS": tile.parts,
            "VECTOR": vector,
            "EDGES": len(self.edges) > 0,
            "MISSING": missing_edge(self.edges.dtype),
            "OFFSET": OFFSET_BITS,
        }
        return groups * -(-points // tile.points), self.numbers(), constants

    def numbers(self) -> list[int]:
        """The integers of a launch."""
        loops = [*self.loops, *[Loop(1, 0, 0)] * (MOST_LOOPS - len(self.loops))]
        numbers = [self.points, len(self.starts) - 1, self.begin, max(1, len(self.edges))]
        numbers += [loop.extent for loop in loops[1:]]
        return [*numbers, *(loop.read for loop in loops), *(loop.write for loop in loops)]

    def run_torch(self, x: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """As run, in plain torch: one entry at a time."""
        x = (functional.pad(x, self.pads) if self.pads else x).reshape(-1).float()
        y = torch.zeros(self.shape, dtype=torch.float32, device=x.device).view(-1)
        grids = torch.meshgrid([torch.arange(n, device=x.device) for n, *_ in self.loops], indexing="ij")
        each = list(zip(grids, self.loops, strict=True))
        reads = sum((grid.reshape(-1) * loop.read for grid, loop in each), torch.zeros_like(grids[0].reshape(-1)))
        writes = sum((grid.reshape(-1) * loop.write for grid, loop in each), torch.zeros_like(reads))
        rows, parts = self.tile.segments * self.tile.parts, self.tile.parts
        inner = self.edges.repeat(self.points // max(1, len(self.edges)))
        for group, (first, end) in enumerate(zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True)):
            for place, word in enumerate(self.words[first * rows : end * rows].tolist()):
                edge, offset = (word & 0xFFFFFFFF) >> OFFSET_BITS, word & ((1 << OFFSET_BITS) - 1)
                if edge == missing_edge(self.edges.dtype):
                    continue
                there = ((inner >> edge) & 1).bool() if len(inner) else torch.ones_like(reads, dtype=torch.bool)
                target = int(self.targets[group * self.tile.segments + place % rows // parts])
                y[target + writes[there]] += values[word >> 32].float() * x[self.begin + offset + reads[there]]
        return y.to(dtype).view(self.shape)


def missing_edge(dtype: torch.dtype) -> int:
    """The edge of words that stand for no entry."""
    return 63 if dtype == torch.int64 else 31


@cached_per_tensor
def prepared(first: Tensor, form: Form, *others: Tensor, tile: EntryTile | None = None) -> EntrySums | None:
    """The sums of a form over these index arrays; None without entries. tile: default: by size."""
    arrays = [x.cpu() for x in (first, *others)]
    target, *parts = entry_parts(form, dict(zip(form.arrays, arrays, strict=True)))
    every = [x for each in (target, *parts) for x in each if x is not None]
    if not len(every) or not len(every[0]):
        return None
    number = next(n for n, view in enumerate(form.views[1:]) if _is_dense(view))
    window = Windows.of(form, form.views[1 + number], parts[number])
    offsets, edges = window.offsets(), window.edges
    begin = min(0, int(offsets.min()))
    segments = EntrySegments.of(form, target, len(every[0]))
    loops = tuple(_loops(form, window.strides))
    numbers = [*(n for loop in loops for n in loop[1:] if n != 1), *(n for n, *_ in loops[1:]), begin]
    aligned = _aligned([offsets, segments.targets, torch.tensor(numbers, device="cpu")], loops)
    points = math.prod(n for n, *_ in loops)
    tile = tile or EntryTile.default(len(segments.targets), points, segments.longest, aligned)
    values = [_offset(view, p) for n, (view, p) in enumerate(zip(form.views[1:], parts, strict=True)) if n != number]
    values = [v.expand(len(every[0])) for v in values]
    number_of = torch.arange(len(every[0]), device="cpu") if len(values) > 1 else torch.zeros_like(offsets)
    number_of = values[0] if len(values) == 1 else number_of
    low = (window.edge << OFFSET_BITS) | (offsets - begin)
    slots = segments.slots(tile)
    words = torch.full((slots.size,), missing_edge(edges.dtype) << OFFSET_BITS, device="cpu")
    words[slots.of_entry] = (number_of << 32) | low
    device = first.device
    return EntrySums(
        tile,
        loops,
        begin,
        aligned,
        words.to(device),
        slots.starts.int().to(device),
        slots.targets.int().to(device),
        edges.to(device),
        window.pads,
        None if len(values) == 1 else tuple(v.to(device) for v in values),
        len(segments.targets) * points == math.prod(form.views[0].shape),
        form.views[0].shape,
    )


def _aligned(numbers: Sequence[Tensor], loops: Sequence[Loop]) -> int:
    """The largest power of two up to 8 that divides these numbers, if neighbours of the innermost index are neighbours
    in memory."""
    if not loops or loops[-1][1:] != (1, 1):
        return 1
    extent = loops[-1].extent
    return next(n for n in (8, 4, 2, 1) if extent % n == 0 and not any((x % n).any() for x in numbers))


def _names(form: Form) -> list[str]:
    """The dense indices of the target, in its order."""
    extents = dict(form.extents)
    names = dict.fromkeys(axis.bare for axis in form.views[0].axes)
    return [name for name in names if name and extents[name] > 1]


def _loops(form: Form, strides: Sequence[int]) -> list[Loop]:
    """The loops over the dense indices, neighbours joined where one stride does for both."""
    extents, target = dict(form.extents), form.views[0]
    (dense,) = (view for view in form.views[1:] if _is_dense(view))
    found: list[Loop] = []
    for name in _names(form):
        loop = Loop(extents[name], _stride(dense, strides, name), _stride(target, _strides(target.shape), name))
        if found and found[-1][1:] == (loop.read * loop.extent, loop.write * loop.extent):
            loop = loop._replace(extent=found.pop().extent * loop.extent)
        found.append(loop)
    return found or [Loop(1, 1, 1)]


def _stride(view: View, strides: Sequence[int], name: str) -> int:
    axes = zip(view.axes, strides, strict=True)
    return sum(c * stride for axis, stride in axes for c, index in axis.dense if index == name)


def _offset(view: View, parts: Sequence[Tensor | None], strides: Sequence[int] = ()) -> Tensor:
    """Elements from the start of an operand, for each entry or, if all are the same, once."""
    total = torch.zeros(1, dtype=torch.int64, device="cpu")
    for axis, part, stride in zip(view.axes, parts, strides or _strides(view.shape), strict=True):
        total = total + (axis.constant if part is None else part) * stride
    return total


@dataclass(frozen=True)
class Windows:
    """What the entries read of the factor with dense indices. edge: of each entry, the number of its distinct window
    among those that leave the factor somewhere; edges: bits by point, see entry_kernels; pads: zeros instead."""

    view: View
    parts: Sequence[Tensor | None]
    edge: Tensor
    edges: Tensor
    pads: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, form: Form, view: View, parts: Sequence[Tensor | None]) -> Windows:
        extents = dict(form.extents)
        every = zip(view.axes, parts, view.shape, strict=True)
        pads = [axis.pads(part, size, extents) for axis, part, size in every]
        outside = [n for n, pad in enumerate(pads) if any(pad)]
        none = torch.zeros(0, dtype=torch.int32, device="cpu")
        strides = _strides(view.shape)
        if not outside:
            return cls(view, parts, torch.zeros(1, dtype=torch.int64, device="cpu"), none, (), strides)
        count = max([len(x) for x in parts if x is not None], default=1)
        known = [_constant(view.axes[n].constant) if parts[n] is None else parts[n] for n in outside]
        window, edge = torch.stack([x.expand(count) for x in known if x is not None]).unique(dim=1, return_inverse=True)
        if window.shape[1] <= _EDGES:
            return cls(view, parts, edge, _inside(form, view, outside, window), (), strides)
        sizes = [size + sum(pad) for size, pad in zip(view.shape, pads, strict=True)]
        flat = tuple(n for pad in reversed(pads) for n in pad)
        return cls(view, parts, torch.zeros(1, dtype=torch.int64, device="cpu"), none, flat, _strides(sizes))

    def offsets(self) -> Tensor:
        before = [self.pads[-2 - 2 * n] for n in range(len(self.strides))] if self.pads else [0] * len(self.strides)
        return _offset(self.view, self.parts, self.strides) + sum(
            b * s for b, s in zip(before, self.strides, strict=True)
        )


def _constant(number: int) -> Tensor:
    return torch.full((1,), number, device="cpu")


def _inside(form: Form, view: View, axes: Sequence[int], windows: Tensor) -> Tensor:
    """Bit k of a point: window k of windows [axes, distinct] is inside the factor. Points are those of the innermost
    dense indices of the target, from the first on that these axes have."""
    extents, names = dict(form.extents), _names(form)
    moving = {name for n in axes for _, name in view.axes[n].dense}
    names = names[next((n for n, name in enumerate(names) if name in moving), len(names)) :]
    grids = torch.meshgrid([torch.arange(extents[name], device="cpu") for name in names], indexing="ij")
    places = {name: grid.reshape(-1) for name, grid in zip(names, grids, strict=True)}
    count = math.prod(extents[name] for name in names)
    total = torch.zeros(count, dtype=torch.int64, device="cpu")
    for bit in range(windows.shape[1]):
        there = torch.ones(count, dtype=torch.bool, device="cpu")
        for n, at in zip(axes, windows[:, bit].tolist(), strict=True):
            place = at + sum(c * places[name] for c, name in view.axes[n].dense if name in places)
            there &= torch.as_tensor((place >= 0) & (place < view.shape[n]))
        total |= there.long() << bit
    return total if windows.shape[1] > missing_edge(torch.int32) else total.int()


class WordSlots(NamedTuple):
    """Places of words. size: of all, with one more step; of_entry: of each entry; starts: first step of each group of
    segments and the end; targets: of the segments in groups, -1 where there is none."""

    size: int
    of_entry: Tensor
    starts: Tensor
    targets: Tensor


@dataclass(frozen=True)
class EntrySegments:
    """Entries by target. targets: offsets of the segments; segment: of each entry; counts: of a segment's entries."""

    targets: Tensor
    segment: Tensor
    counts: Tensor

    @classmethod
    def of(cls, form: Form, parts: Sequence[Tensor | None], count: int) -> EntrySegments:
        """All targets are segments, unless there are many without entries."""
        view = form.views[0]
        offset = _offset(view, parts).expand(count)
        targets = offset.unique()
        sizes = [size for size, part in zip(view.shape, parts, strict=True) if part is not None]
        if math.prod(sizes) <= 2 * len(targets) + 64:
            axes = [
                None if p is None else torch.arange(n, device="cpu") for n, p in zip(view.shape, parts, strict=True)
            ]
            grids = iter(torch.meshgrid([x for x in axes if x is not None], indexing="ij")) if sizes else iter(())
            targets = _offset(view, [None if x is None else next(grids).reshape(-1) for x in axes])
        segment = torch.searchsorted(targets, offset.contiguous())
        return cls(targets, segment, torch.bincount(segment, minlength=len(targets)))

    @property
    def longest(self) -> int:
        return int(self.counts.max())

    def slots(self, tile: EntryTile) -> WordSlots:
        """The places of the entries: the longest segments first, in groups; entries of a segment across its parts."""
        rank = self.counts.argsort(descending=True, stable=True)
        groups = -(-len(rank) // tile.segments)
        targets = torch.full((groups * tile.segments,), -1, device="cpu")
        targets[: len(rank)] = self.targets[rank]
        steps = -(-self.counts[rank[:: tile.segments]] // tile.parts)
        starts = functional.pad(steps.cumsum(0), (1, 0))
        order = self.segment.argsort(stable=True)
        within = torch.empty_like(order)
        within[order] = (
            torch.arange(len(order), device="cpu") - (self.counts.cumsum(0) - self.counts)[self.segment[order]]
        )
        row = torch.empty_like(rank)
        row[rank] = torch.arange(len(rank), device="cpu")
        row = row[self.segment]
        step = starts[row // tile.segments] + within // tile.parts
        rows = tile.segments * tile.parts
        of_entry = step * rows + row % tile.segments * tile.parts + within % tile.parts
        return WordSlots((int(starts[-1]) + 1) * rows, of_entry, starts, targets)
