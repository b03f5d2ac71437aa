"""Conversion of a list of entries to the arrays of a format: one sort of one key, then cumulative sums and scatters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import combinations
from types import MappingProxyType

import torch
from torch import Tensor

from pumice.errors import CoordinateError, OptionError, ShapeError
from pumice.language.formats import AUTOMATIC, Format, FormatLayout, Level, layout
from pumice.runtime.workspace import require_memory

_LEAST_LIMIT = 4096  # a block or group may exceed its axis up to this
_KEYS = 2**62  # upper bound of the cells that int64 keys number, with a margin


@dataclass(frozen=True, eq=False)
class Entries:
    """Stored entries in any order. coords: int64, one [n] per axis, distinct cells; values: [n], None for ones."""

    coords: tuple[Tensor, ...]
    values: Tensor | None
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.coords[0].shape[0]


@dataclass(frozen=True, eq=False)
class FormatBucket:
    """One bucket of a sparse tensor; formats without buckets have one.

    coords: axis -> int32 coordinates (of blocks if the axis is blocked), shape by layout(); -1 is padding.
    values: shape by layout().values; None if every stored entry is 1.
    """

    coords: dict[str, Tensor]
    values: Tensor | None


@dataclass(frozen=True)
class RowStatistics:
    """Rows of a conversion: their number, total cells, cells of the longest, and the number of groups by group size."""

    rows: int
    cells: int
    longest: int
    groups: Mapping[int, int]

    def best(self, sizes: Sequence[int]) -> int:
        """The size of least cost, (1 + size) * groups; on ties the smallest."""
        return min(sizes, key=lambda size: ((1 + size) * self.groups[size], size))


def _by_count(found: RowStatistics) -> int:
    """The power of two with the fewest gathers + scatters, by exact count."""
    return found.best([size for size in found.groups if size <= max(1, found.longest)])


def _by_root(found: RowStatistics) -> int:
    """The cheaper power of two around the root of the mean row length, which minimises a bound of the count (Insum)."""
    return found.best(_around_root(found))


def _around_root(found: RowStatistics) -> tuple[int, int]:
    """The largest power of two strictly below the root of the mean row length, and the next one."""
    mean = found.cells / max(1, found.rows)
    if mean <= 1:
        return 2, 4
    lower = 2 ** (math.ceil(math.log2(math.sqrt(mean))) - 1)
    return lower, 2 * lower


GROUP_SIZES: Mapping[str, Callable[[RowStatistics], int]] = MappingProxyType(
    {
        "count": _by_count,
        "sqrt": _by_root,
        "below sqrt": lambda found: _around_root(found)[0],
        "above sqrt": lambda found: _around_root(found)[1],
    }
)
"""Strategies to choose a group size that the format does not fix."""


def buckets(occupancy: Tensor | Sequence[int], count: int = 3) -> tuple[int, ...]:
    """Up to `count` group sizes, powers of two, of least total cost for rows of these lengths; on ties the fewest."""
    lengths, often = torch.as_tensor(occupancy).cpu().unique(return_counts=True)
    lengths, often = lengths[lengths > 0], often[lengths > 0]
    if len(lengths) == 0:
        return (1,)
    sizes = _powers(int(lengths[-1]))
    cost = torch.stack([(1 + size) * _groups(lengths, size) for size in sizes])
    choices = [c for n in range(1, count + 1) for c in combinations(range(len(sizes)), n)]
    totals = [int((cost[list(choice)].amin(0) * often).sum()) for choice in choices]
    return tuple(sizes[place] for place in choices[totals.index(min(totals))])


def _groups(lengths: Tensor, size: int) -> Tensor:
    return (lengths + (size - 1)) // size


def _powers(longest: int) -> list[int]:
    """The powers of two up to the longest row."""
    return [2**power for power in range(max(1, longest).bit_length())]


def checked(shape: Sequence[int], format: Format) -> tuple[int, ...]:
    """The shape. Raises if it has another number of axes, or if extents, cells or group sizes are too large."""
    if len(shape) != format.ndim:
        order = " ".join(f"a{axis}" for axis in range(len(shape)))
        raise ShapeError(
            f"format {str(format)!r} has {format.ndim} axes, the tensor has {len(shape)}"
            + (f"; coordinates of {len(shape)} axes are '({order}):C'" if shape else "")
        )
    if max(shape) > 2**31:
        raise CoordinateError(f"int32 coordinates reach an extent of {2**31}, found shape {tuple(shape)}")
    cells = math.prod(_ceil(n, format.block(axis)) for n, axis in zip(shape, format.axes, strict=True))
    cells *= math.prod(map(format.block, format.axes))
    extents = dict(zip(format.axes, shape, strict=True))
    for level in format.levels:
        most = max(_LEAST_LIMIT, math.prod(extents[axis] for axis in level.axes))
        if level.sizes and max(level.sizes) > most:
            raise ShapeError(f"the size of {str(level)!r} is at most {most} for shape {tuple(shape)}: more is padding")
    if cells >= _KEYS:
        raise CoordinateError(f"shape {tuple(shape)} has {cells} cells; int64 keys number fewer than {_KEYS}")
    return tuple(shape)


def strategy(name: str) -> Callable[[RowStatistics], int]:
    OptionError.check("group", name, GROUP_SIZES)
    return GROUP_SIZES[name]


def arrange(entries: Entries, format: Format, group: str) -> tuple[Format, tuple[FormatBucket, ...]]:
    """(format with its group sizes, the entries in its arrays). At most one host synchronisation, for the number of
    positions and the row statistics."""
    choose = strategy(group)
    plan = _ConversionPlan.of(entries, format)
    grouped = format.grouped
    if grouped is None:
        return format, (plan.part(plan.positions()),)
    if not plan.splits:
        place = plan.fixed_groups(grouped)
        return format.with_sizes((place.group,)), (plan.part(place),)
    sizes, places = plan.split_groups(grouped, choose)
    return format.with_sizes(sizes), tuple(plan.part(place) for place in places)


@dataclass(frozen=True, eq=False)
class _Places:
    """Target of each sorted entry: position p < positions, slot q < group. here: mask of the entries in this part."""

    p: Tensor | None = None
    q: Tensor | None = None
    positions: int = 1
    group: int = 1
    here: Tensor | None = None


@dataclass(frozen=True, eq=False)
class _ConversionPlan:
    """Entries sorted by the coordinates of a format. outer, inner: per axis, block coordinate and position in it.
    Sorted keys: cell (parent and grouped axes), row (parent axes), position (flattened axes)."""

    entries: Entries
    format: Format
    layout: FormatLayout
    outer: dict[str, Tensor]
    inner: dict[str, Tensor]
    extents: dict[str, int]
    cell: Tensor
    row: Tensor
    position: Tensor

    @staticmethod
    def of(entries: Entries, format: Format) -> _ConversionPlan:
        blocks = {axis: format.block(axis) for axis in format.axes}
        coords = dict(zip(format.axes, entries.coords, strict=True))
        extents = {a: _ceil(n, blocks[a]) for a, n in zip(format.axes, entries.shape, strict=True)}
        outer = {axis: coords[axis] // n if n > 1 else coords[axis] for axis, n in blocks.items()}
        flattened = _axes(format.flattened)
        parents = _axes(format.parents) if format.grouped else flattened
        grouped = format.grouped.axes if format.grouped else ()
        keyed = tuple((axis, 1) for axis in (*parents, *grouped)) if format.grouped else format.sorting
        if keyed:
            lists = [outer[axis] if n == 1 else outer[axis] // n for axis, n in keyed]
            key = raveled(lists, [_ceil(extents[axis], n) for axis, n in keyed])
            # On a GPU, to ask would wait for it.
            sorted_already = key.device.type == "cpu" and bool((key[1:] >= key[:-1]).all())
            key, order = (key, slice(None)) if sorted_already else torch.sort(key)
            coords = {axis: c[order] for axis, c in coords.items()}
            outer = {axis: c[order] for axis, c in outer.items()}
            values = None if entries.values is None else entries.values[order]
            entries = replace(entries, coords=tuple(coords.values()), values=values)
        else:
            key = torch.zeros_like(entries.coords[0])
        inner = {axis: coords[axis] % n for axis, n in blocks.items() if n > 1}
        row = key // max(1, math.prod(extents[a] for a in grouped))
        above = row // max(1, math.prod(extents[a] for a in parents[len(flattened) :]))
        return _ConversionPlan(entries, format, layout(format), outer, inner, extents, key, row, above)

    @property
    def splits(self) -> bool:
        """True if a row may have several groups, which takes a position per group: not with dense parents."""
        return bool(self.format.flattened) and self.format.parents == self.format.flattened

    def positions(self) -> _Places:
        """Places in a format without groups."""
        if self.layout.position is None:
            return _Places()
        if self.layout.values == (self.layout.position,):
            return _Places(p=torch.arange(len(self.entries), device=self.cell.device), positions=len(self.entries))
        new = _starts(self.position)
        return _Places(p=_number(new), positions=int(new.sum()))

    def fixed_groups(self, grouped: Level) -> _Places:
        """Places if each row has one group, of the format's size or the length of the longest row."""
        new = _starts(self.position)
        rank = _rank(_starts(self.cell), _starts(self.row))
        positions, longest = torch.stack([new.sum(), _longest(rank)]).tolist()
        size = grouped.sizes[0] if grouped.sizes else max(1, longest)
        if longest > size:
            raise ShapeError(
                f"format {str(self.format)!r} holds {size} coordinates of {_text(grouped)} per row, "
                f"the longest row has {longest}"
            )
        if self.layout.position is None:
            return _Places(q=rank, group=size)
        return _Places(p=_number(new), q=rank, positions=positions, group=size)

    def split_groups(
        self, grouped: Level, choose: Callable[[RowStatistics], int]
    ) -> tuple[tuple[int, ...], list[_Places]]:
        """(group sizes, places by size) if a row has as many groups as it needs."""
        new_cell, new_row = _starts(self.cell), _starts(self.row)
        row, rank = _number(new_row), _rank(new_cell, new_row)
        # One length per entry, so that the number of rows is not read: the surplus rows are empty.
        lengths = torch.zeros_like(row).index_add_(0, row, new_cell.long())
        sizes, counts = self._sizes(grouped, choose, lengths, new_row)
        bucket = _cheapest(lengths, sizes)
        places = []
        for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            chosen = bucket == number
            groups = torch.where(chosen, _groups(lengths, size), 0)
            first = torch.cumsum(groups, 0) - groups
            here = chosen[row] if len(sizes) > 1 else None
            places.append(_Places(first[row] + rank // size, rank % size, count, size, here))
        return sizes, places

    def _sizes(
        self, grouped: Level, choose: Callable[[RowStatistics], int], lengths: Tensor, new_row: Tensor
    ) -> tuple[tuple[int, ...], list[int]]:
        """The group sizes and the number of groups of each: one host synchronisation."""
        if grouped.sizes == AUTOMATIC:
            lengths = lengths.cpu()
            sizes = buckets(lengths)
            return sizes, _bucket_groups(lengths, sizes).tolist()
        if grouped.sizes:
            return grouped.sizes, _bucket_groups(lengths, grouped.sizes).tolist()
        # No row is longer than its axes or than all entries; at least 4, as `sqrt` compares 2 and 4.
        bound = min(math.prod(self.extents[axis] for axis in grouped.axes), len(self.entries))
        powers = _powers(max(4, bound))
        numbers = [new_row.sum(), lengths.sum(), _longest(lengths - 1), *(_groups(lengths, g).sum() for g in powers)]
        rows, cells, longest, *groups = torch.stack(numbers).tolist()
        found = RowStatistics(rows, cells, longest, dict(zip(powers, groups, strict=True)))
        size = choose(found)
        return (size,), [found.groups[size]]

    def part(self, place: _Places) -> FormatBucket:
        """The arrays of one part."""
        sizes, index = dict(self.extents), dict(self.outer)
        if self.layout.position is not None and place.p is not None:
            sizes[self.layout.position], index[self.layout.position] = place.positions, place.p
        if self.layout.group is not None and place.q is not None:
            sizes[self.layout.group], index[self.layout.group] = place.group, place.q
        for c in self.layout.coordinates:
            if c.inner is not None:
                sizes[c.inner] = c.block
                index[c.inner] = self.inner.get(c.axis, torch.zeros_like(self.outer[c.axis]))

        # With one group per row store group-major (as ELL), so that neighbouring threads read neighbouring rows.
        first = "" if self.splits else self.layout.group

        def scatter(symbols: tuple[str, ...], source: Tensor, empty: int) -> Tensor:
            stored = sorted(symbols, key=lambda symbol: symbol != first)
            shape = [sizes[symbol] for symbol in stored]
            where = raveled([index[symbol] for symbol in stored], shape)
            return _scatter(where, source, shape, place.here, empty).permute([stored.index(s) for s in symbols])

        coords = {
            c.axis: scatter(c.array, self.outer[c.axis].int(), -1)
            for c in self.layout.coordinates
            if c.array is not None
        }
        return FormatBucket(coords, self._values(place, scatter))

    def _values(self, place: _Places, scatter: Callable[[tuple[str, ...], Tensor, int], Tensor]) -> Tensor | None:
        """The array of values; None for a pattern, unless some values have no coordinate of their own."""
        symbols, values = self.layout.values, self.entries.values
        if values is None:
            if set(symbols) <= {symbol for c in self.layout.coordinates for symbol in c.array or ()}:
                return None
            values = torch.ones_like(self.cell, dtype=torch.bool)
        # One entry per position: the sorted values are the array.
        if symbols == (self.layout.position,) and place.here is None:
            return values
        return scatter(symbols, values, 0)


def _cheapest(lengths: Tensor, sizes: Sequence[int]) -> Tensor:
    """Index of the cheapest size for each row, on ties the first."""
    best = torch.zeros_like(lengths)
    cost = (1 + sizes[0]) * _groups(lengths, sizes[0])
    for number, size in enumerate(sizes[1:], 1):
        other = (1 + size) * _groups(lengths, size)
        best = torch.where(other < cost, number, best)
        cost = torch.minimum(cost, other)
    return best


def _bucket_groups(lengths: Tensor, sizes: Sequence[int]) -> Tensor:
    """Number of groups of each size."""
    bucket = _cheapest(lengths, sizes)
    return torch.stack([(_groups(lengths, g) * (bucket == number)).sum() for number, g in enumerate(sizes)])


def _scatter(where: Tensor, source: Tensor, shape: Sequence[int], here: Tensor | None, empty: int) -> Tensor:
    """A tensor with source[i] at flat index where[i], for i in the mask `here`, and `empty` elsewhere."""
    cells = math.prod(shape)
    require_memory(shape, source.dtype, source.device, "an array of the format")
    if here is None:
        return source.new_full((cells,), empty).index_copy(0, where, source).view(tuple(shape))
    # Other entries go to an extra cell at the end: compaction would synchronise with the host.
    where = torch.where(here, where, cells)
    return source.new_full((cells + 1,), empty).index_copy(0, where, source)[:cells].view(tuple(shape))


def _starts(key: Tensor) -> Tensor:
    """True where a sorted key differs from the one before."""
    return torch.cat([torch.ones_like(key[:1], dtype=torch.bool), key[1:] != key[:-1]])


def _number(starts: Tensor) -> Tensor:
    return torch.cumsum(starts, 0) - 1


def _rank(new_cell: Tensor, new_row: Tensor) -> Tensor:
    """Index of each entry's cell within its row."""
    cell = _number(new_cell)
    if cell.shape[0] == 0:  # cummax has nothing to start from
        return cell
    return cell - torch.cummax(torch.where(new_row, cell, 0), 0).values


def _longest(rank: Tensor) -> Tensor:
    return rank.max() + 1 if rank.shape[0] else rank.sum()


def raveled(coords: Sequence[Tensor], extents: Sequence[int]) -> Tensor:
    """Row-major index of the coordinates."""
    return reduce(lambda key, axis: key * axis[1] + axis[0], zip(coords[1:], extents[1:], strict=True), coords[0])


def _axes(levels: Sequence[Level]) -> tuple[str, ...]:
    return tuple(axis for level in levels for axis in level.axes)


def _ceil(extent: int, block: int) -> int:
    return -(-extent // block)


def _text(level: Level) -> str:
    return level.axes[0] if len(level.axes) == 1 else f"({' '.join(level.axes)})"
