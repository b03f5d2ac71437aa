"""Joins of sparse operands: which of their entries meet.

    rows = every combination of one entry of each sparse factor, and indices, that satisfies all their coordinates

Where the entries of one factor lie in a window around those of another, the kernels of pumice.coords find them as a
kernel map. Other factors are joined one by one: the coordinates that are known by then are looked up by binary search
in the sorted entries of the next factor. An index that several coordinates leave open (the window of a convolution) is
either tried at each of its points, or solved for in each entry found, whichever makes fewer rows.

Maps and sorted entries are kept with the coordinates, for calls with other values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords import Geometry, KernelMap, Relation, kernel_map
from pumice.errors import CoordinateError, OptionError
from pumice.language.formats import Format, Level
from pumice.language.meet import Flattened, Source, Window
from pumice.language.nodes import Access, Affine, Index, Range, indices_of
from pumice.lower import maps
from pumice.ops.convert import raveled
from pumice.ops.sparse import Sparse
from pumice.runtime.cache import cached_per_tensor

MOST_ROWS = 1 << 26
"""Rows of a join at which it is refused: half a GiB for each index."""
MOST_NUMBERS = 1 << 29
"""Values of indices and positions of entries in all rows, at which it is refused, too."""

_NOWHERE = -(1 << 62)  # a position outside every operand


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a join. indices: by index, its value in each row; entries: by place of a factor, the entry's position;
    arrays: index arrays, by name."""

    count: int
    device: torch.device
    indices: Mapping[str, Tensor]
    entries: Mapping[int, Tensor]
    arrays: Mapping[str, Tensor]

    def taken(self, rows: Tensor) -> Rows:
        """The rows at these numbers, or where the mask is True."""
        indices = {name: x[rows] for name, x in self.indices.items()}
        entries = {place: x[rows] for place, x in self.entries.items()}
        count = len(rows) if rows.dtype != torch.bool else int(rows.sum())
        return Rows(count, self.device, indices, entries, self.arrays)

    def value(self, expression: Affine) -> Tensor:
        """The constant and the terms that are known in each row; _NOWHERE if an index array holds nothing there."""
        total = torch.full((self.count,), expression.constant, dtype=torch.int64, device=self.device)
        there = torch.ones_like(total, dtype=torch.bool)
        for coefficient, atom in expression.terms:
            if set(indices_of(atom)) <= self.indices.keys():
                value = self.indices[atom.name] if isinstance(atom, Index) else self.read(atom)
                total += coefficient * value
                there &= value >= 0
        return torch.where(there, total, _NOWHERE)

    def read(self, access: Access) -> Tensor:
        """The values of an index array in each row, -1 outside it."""
        array, there = self.arrays[access.name], torch.ones(self.count, dtype=torch.bool, device=self.device)
        positions = []
        for expression, extent in zip(access.indices, array.shape, strict=True):
            positions.append(self.value(expression))
            there &= (positions[-1] >= 0) & (positions[-1] < extent)
        if not array.numel():
            return torch.full_like(positions[0], -1)
        return torch.where(there, array[tuple(torch.where(there, p, 0) for p in positions)].long(), -1)

    def with_points(self, names: Sequence[str], ranges: Mapping[str, Range]) -> Rows:
        """Each row at every point of these indices."""
        every = math.prod(len(ranges[name]) for name in names)
        found = self.taken(torch.arange(self.count, device=self.device).repeat_interleave(every))
        indices, each = dict(found.indices), every
        for name in names:
            each //= max(1, len(ranges[name]))
            points = torch.arange(ranges[name].start, ranges[name].stop, device=self.device).repeat_interleave(each)
            indices[name] = points.repeat(found.count // max(1, len(points)))
        return replace(found, indices=indices)

    def of(self, source: Source, shapes: Mapping[str, Sequence[int]]) -> Tensor:
        """What each row is on an axis of a pattern. shapes: of the operands."""
        if isinstance(source, Flattened):
            extents = [shapes[source.name][axis] for axis in source.axes]
            return raveled([self.indices[name] for name in source.indices], extents)
        return self.entries[source] if isinstance(source, int) else self.indices[source]


@dataclass(frozen=True, eq=False)
class Side:
    """A sparse factor of a join: its coordinates, one list for each of `expressions`, and the extents of these axes."""

    place: int
    access: Access
    expressions: tuple[Affine, ...]
    coordinates: tuple[Tensor, ...]
    extents: tuple[int, ...]

    @property
    def entries(self) -> int:
        return self.coordinates[0].shape[0]

    def unknown(self, known: Mapping[str, Any]) -> tuple[str, ...]:
        """The indices that are not known and stand in a sum, so that no coordinate of this factor gives them."""
        bare = {e.bare for e in self.expressions}
        return tuple(name for name in indices_of(*self.expressions) if name not in known and name not in bare)

    def solvable(self, known: Mapping[str, Any]) -> bool:
        """True if each coordinate gives all unknown indices of its expression: at most one, not within an array."""
        unknown = set(self.unknown(known))
        return all(
            len(unknown.intersection(indices_of(e))) <= (not unknown.intersection(indices_of(*e.arrays)))
            for e in self.expressions
        )


def join(rows: Rows, sides: Sequence[Side], ranges: Mapping[str, Range]) -> Rows:
    """The rows with the entries of further factors. Raises OptionError if they are too many."""
    left = list(sides)
    _check_growth(left)
    while left:
        side = min(left, key=lambda s: (len(s.unknown(rows.indices)), 0 if rows.entries else s.entries))
        left.remove(side)
        rows = _joined(rows, side, ranges)
    return rows


def _joined(rows: Rows, side: Side, ranges: Mapping[str, Range]) -> Rows:
    """The rows with every entry of the factor that fits them."""
    tried = [name for name in side.unknown(rows.indices) if name in ranges]
    points = rows.count * math.prod(len(ranges[name]) for name in tried)
    found = _matches(rows, side) if side.solvable(rows.indices) else None
    if found is None or (tried and points < found.total):
        _check_rows(points, rows, side)
        rows = rows.with_points(tried, ranges)
        found = _matches(rows, side)
    _check_rows(found.total, rows, side)
    numbers = torch.arange(rows.count, device=rows.device).repeat_interleave(found.counts)
    rank = torch.arange(found.total, device=rows.device) - (found.counts.cumsum(0) - found.counts)[numbers]
    made = rows.taken(numbers)
    made = replace(made, entries={**made.entries, side.place: found.order[found.first[numbers] + rank]})
    return _solved(made, side, rows.indices, ranges)


_GROWING = 5  # Factors of a join whose rows are estimated beforehand
_CERTAIN = 64  # Times as many rows as there may be are refused on an estimate


def _check_growth(sides: Sequence[Side]) -> None:
    """Raise OptionError if many factors with bare coordinates will have far too many rows, if they were independent."""
    expressions = [e.bare for side in sides for e in side.expressions]
    if len(sides) < _GROWING or None in expressions:
        return
    extents = {e.bare: extent for side in sides for e, extent in zip(side.expressions, side.extents, strict=True)}
    rows = sum(math.log2(max(1, side.entries)) for side in sides)
    rows -= sum((expressions.count(name) - 1) * math.log2(max(1, extent)) for name, extent in extents.items())
    if rows > math.log2(_CERTAIN * MOST_ROWS):
        raise OptionError(
            f"{len(sides)} sparse operands meet in some {2.0 ** min(rows, 1000):.0e} combinations of entries, expected "
            f"at most {MOST_ROWS}; pass operands dense, or divide the statement"
        )


def _check_rows(count: int, rows: Rows, side: Side) -> None:
    most = min(MOST_ROWS, MOST_NUMBERS // (1 + len(rows.indices) + len(rows.entries)))
    if count > most:
        raise OptionError(
            f"{side.access} meets the other sparse operands in {count} combinations of entries, expected at most "
            f"{most}: too few of its coordinates are known from them; pass one of the operands dense"
        )


class _Matches(NamedTuple):
    """The entries of a factor that have the known coordinates of each row: `counts` from `first` on, in `order`."""

    order: Tensor
    first: Tensor
    counts: Tensor
    total: int


def _matches(rows: Rows, side: Side) -> _Matches:
    known = [n for n, e in enumerate(side.expressions) if set(indices_of(e)) <= rows.indices.keys()]
    extents = tuple(side.extents[n] for n in known)
    keys, order, distinct = _sorted_entries(*(side.coordinates[n] for n in known or (0,)), extents=extents)
    there = torch.ones(rows.count, dtype=torch.bool, device=rows.device)
    wanted = torch.zeros(rows.count, dtype=torch.int64, device=rows.device)
    for number, extent in zip(known, extents, strict=True):
        value = rows.value(side.expressions[number])
        there &= (value >= 0) & (value < extent)
        wanted = wanted * extent + value
    first = torch.searchsorted(keys, wanted)
    if distinct:
        counts = (there & (keys[first.clamp(max=len(keys) - 1)] == wanted)).long()
    else:
        counts = torch.where(there, torch.searchsorted(keys, wanted, right=True) - first, 0)
    return _Matches(order, first, counts, int(counts.sum()))


@cached_per_tensor
def _sorted_entries(*coordinates: Tensor, extents: tuple[int, ...]) -> tuple[Tensor, Tensor, bool]:
    """(sorted row-major keys of entries, their order, True if no key occurs twice). No extents: all keys are 0."""
    lists = [x.long() for x in coordinates]
    keys = raveled(lists, extents) if extents else torch.zeros_like(lists[0])
    keys, order = torch.sort(keys, stable=True)
    return keys, order, len(keys) > 0 and not bool((keys[1:] == keys[:-1]).any())


def _solved(rows: Rows, side: Side, known: Mapping[str, Any], ranges: Mapping[str, Range]) -> Rows:
    """The rows with the indices that the coordinates of their entries give, without those that contradict."""
    every = zip(side.expressions, side.coordinates, strict=True)
    for expression, coordinates in sorted(every, key=lambda each: each[0].bare is None):
        if set(indices_of(expression)) <= known.keys():
            continue
        rest = coordinates[rows.entries[side.place]].long() - rows.value(expression)
        left = [
            (c, atom.name) for c, atom in expression.terms if isinstance(atom, Index) and atom.name not in rows.indices
        ]
        if not left:
            rows = rows.taken(rest == 0)
            continue
        ((coefficient, name),) = left
        found = torch.div(rest, coefficient, rounding_mode="floor")
        fits = (found * coefficient == rest) & (found >= ranges[name].start) & (found < ranges[name].stop)
        rows = replace(rows, indices={**rows.indices, name: found}).taken(fits)
    return rows


# Kernel maps
@cached_per_tensor
def _geometry(*coordinates: Tensor, axes: tuple[int, ...], extents: tuple[int, ...]) -> Geometry | None:
    """The geometry of entries, with these of their coordinates (-1: none) as its columns; None if entries are equal."""
    none = torch.zeros_like(coordinates[0])
    columns = [none if axis < 0 else coordinates[axis] for axis in axes]
    items, *shape = (1 if axis < 0 else max(1, extents[axis]) for axis in axes)
    try:
        found = Geometry.checked(torch.stack(columns, 1).int(), spatial_shape=shape, batch_size=items)
        found.settle()
    except CoordinateError:
        return None
    return found


def map_of(window: Window, base: Side, other: Side) -> KernelMap | None:
    """The kernel map of a window: its outputs are the entries of `base`. None if it is too large, or entries equal."""
    if base.entries * len(window.offsets) > MOST_ROWS:
        return None
    return _kernel_map(*base.coordinates, *other.coordinates, window=window, extents=(base.extents, other.extents))


@cached_per_tensor
def _kernel_map(*coordinates: Tensor, window: Window, extents: tuple[tuple[int, ...], ...]) -> KernelMap | None:
    """As `map_of`, of the coordinates of both factors."""
    base, other = coordinates[: len(extents[0])], coordinates[len(extents[0]) :]
    own, others = zip(*window.columns, strict=True)
    inputs = outputs = _geometry(*other, axes=others, extents=extents[1])
    same = _equal([(base[n], other[m]) for n, m in window.columns if n >= 0])
    if not same:
        outputs = _geometry(*base, axes=own, extents=extents[0])
    if outputs is None or inputs is None:
        return None
    policy, target = ("same", None) if same and {*window.stride} == {1} else ("given", outputs)
    relation = _relation(window, policy)
    found, _ = kernel_map(inputs, relation, target)
    # The inputs would keep it, and the outputs, for longer than the outputs' coordinates are there.
    inputs.maps.pop((relation, target), None)
    return found


@lru_cache(maxsize=256)
def _relation(window: Window, policy: str) -> Relation:
    return Relation.of_offsets(len(window.stride), window.offsets, stride=window.stride, policy=policy).shared()


def _equal(lists: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """True if both lists of each pair are equal; at most one host synchronisation."""
    if any(a.shape != b.shape for a, b in lists):
        return False
    # The same memory is equal without being read.
    read = [(a, b) for a, b in lists if a.data_ptr() != b.data_ptr() or a.stride() != b.stride() or a.dtype != b.dtype]
    return not read or bool(torch.stack([(a == b).all() for a, b in read]).all())


def pairs_of(found: KernelMap, turned: bool = False) -> dict[str, Tensor]:
    """The lists o, k, i of the pairs of a map, by k and then outputs. turned: it is the transpose of map[o, k, i]."""
    return dict(zip("iko" if turned else "oki", maps.form_operands(found, "pairs")[1], strict=True))


def rows_of_map(found: KernelMap, window: Window, base: Side, arrays: Mapping[str, Tensor]) -> Rows:
    """The pairs of a map as rows of a join."""
    pairs = {role: x.long() for role, x in pairs_of(found).items()}
    every = zip(base.expressions, base.coordinates, strict=True)
    indices, rest = {str(e): x[pairs["o"]].long() for e, x in every}, pairs["k"]
    for name, points in reversed(window.taps):
        indices[name], rest = rest % len(points) + points.start, rest // len(points)
    return Rows(len(rest), found.device, indices, {window.base: pairs["o"], window.other: pairs["i"]}, arrays)


def stored(operands: Mapping[str, Any]) -> dict[str, Any]:
    """The operands, sparse ones in formats that give each entry its coordinates, or dense if all their levels are."""
    found = {name: _entrywise(x) if isinstance(x, Sparse) else x for name, x in operands.items()}
    return {name: x for name, x in found.items() if not isinstance(x, int)}


def _entrywise(x: Sparse) -> Sparse | Tensor:
    if x.layout.position is None and x.layout.group is None:
        return x.to_dense()
    if any(level.kind in "GB" for level in x.format.levels):
        return x.to_format(Format(x.format.axes, (Level(x.format.axes, "C"),)))
    return x
