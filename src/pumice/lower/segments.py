"""Segments (runs of equal values) of a sorted index array, longest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords.segments import WHOLE, Pieces, bounds_of, cached_pieces, segments_by_length, split_runs
from pumice.runtime.cache import PERSISTENT, cached_per_tensor

_LONG_ARRAY = 1 << 15
"""Minimum array length to look for outliers: below, the host synchronisation costs more than it saves."""

_FAR = 4
"""Segments longer than about this multiple of the mean are outliers."""

_LONG = 1536
"""Entries up to which a stacked segment is never an outlier."""

_WINDOW = 512
"""Segments per window that is sorted by length, if each lane of a program has its own segment."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Entries starts[j] <= p < stops[j] have the value rows[j]; in a stack the values rows[j] <= value < ends[j].

    int32 [n] each. outliers: long segments left out here, or None. firsts, pieces: in a list of pieces, index of the
    segment's first piece, and its number of pieces, 0 for padding.
    """

    rows: Tensor
    starts: Tensor
    stops: Tensor
    ends: Tensor | None = None
    outliers: Segments | None = None
    firsts: Tensor | None = None
    pieces: Tensor | None = None

    def select(self, which: slice | Tensor) -> Segments:
        arrays = (self.rows, self.starts, self.stops, self.ends)
        return Segments(*(None if x is None else x[which].clone() for x in arrays))  # pyright: ignore[reportArgumentType]


class SegmentRule(NamedTuple):
    """How a kernel's programs take segments. chunk: maximum entries of a piece, 0: not cut; stack: maximum segments per
    program, 0: not stacked; per_lane: each lane of a program has its own."""

    chunk: int
    stack: int
    per_lane: bool

    def find(self, array: Tensor, count: int) -> Segments:
        """The segments, pieces or stacks of a sorted array for the values 0 to count - 1."""
        if self.chunk:
            return pieces(array, count, self.chunk)
        return stacks(array, count, self.stack) if self.stack else segments(array, count, _WINDOW * self.per_lane)


_ARRAYS = ("rows", "starts", "stops", "ends", "firsts", "pieces")


class SegmentArgs(NamedTuple):
    """Segments as kernel arguments. count: of segments; addresses: of the arrays by name; kept: keeps these alive;
    one_kernel: False if outliers need a second kernel, or an array is not aligned to 16 bytes."""

    count: int
    addresses: Mapping[str, int]
    kept: Any
    one_kernel: bool = True

    @staticmethod
    def of(found: Segments) -> SegmentArgs:
        addresses = {name: x.data_ptr() for name in _ARRAYS if (x := getattr(found, name)) is not None}
        one_kernel = found.outliers is None and not any([address & 15 for address in addresses.values()])
        return SegmentArgs(found.rows.shape[0], addresses, found, one_kernel)


@cached_per_tensor
def segments(array: Tensor, count: int, window: int = 0) -> Segments:
    """The segments of a sorted array for the values 0 to count - 1, including empty ones. Leading -1s are skipped.

    The longest come first, so that no long one starts last. With a window only segments far above the mean come first;
    for locality, the others are sorted by length within windows of so many segments. Outliers of a long array are moved
    to `outliers`, with one host synchronisation.
    """
    if not window:
        found = cached_pieces(array, count, WHOLE)
        return Segments(*(segments_by_length(array, count) if found is None else found[:3]))
    bounds = bounds_of(array, count)
    starts, stops = bounds[:-1], bounds[1:]
    mean = array.shape[0] // max(count, 1)
    order = _rank(stops - starts, 4 * mean + 8, window).argsort(stable=True)
    found = Segments(order.int(), starts[order], stops[order])
    if array.shape[0] < _LONG_ARRAY or not _readable(array):
        return found
    long = int((stops - starts > _FAR * mean + 64).sum())
    if not 0 < long < count:
        return found
    return replace(found.select(slice(long, None)), outliers=found.select(slice(long)))


def pieces(array: Tensor, count: int, most: int) -> Segments:
    """The segments of a sorted array in pieces of about equal length, of at most `most` entries each.

    The longest segments come first, pieces of one segment are adjacent; an empty segment is one piece. The list is
    padded to an upper bound, without a host synchronisation.
    """
    found = cached_pieces(array, count, most)
    return _cut(array, count, most) if found is None else _of_pieces(found)


@cached_per_tensor
def _cut(array: Tensor, count: int, most: int) -> Segments:
    return _of_pieces(split_runs(array, count, most))


def _of_pieces(found: Pieces) -> Segments:
    return Segments(found.values, found.starts, found.stops, firsts=found.firsts, pieces=found.numbers)


@cached_per_tensor
def stacks(array: Tensor, count: int, height: int) -> Segments:
    """Stacks of up to `height` consecutive segments for the values 0 to count - 1, stacks with most entries first.

    Outliers of a long array, which would delay their stack, are moved to `outliers`, with one host synchronisation.
    """
    bounds = bounds_of(array, count)
    places = torch.arange(count, device=array.device, dtype=torch.int32)
    if array.shape[0] < _LONG_ARRAY or not _readable(array):
        return _longest_first(_between(places[::height], bounds))
    long = bounds.diff() > max(_LONG, _FAR * (array.shape[0] // max(count, 1)))
    begins = (places % height == 0) | long
    # A stack also begins after an outlier.
    begins[1:] |= long[:-1]
    found = _longest_first(_between(places[begins], bounds))
    outliers = long[found.rows]
    return replace(found.select(~outliers), outliers=found.select(outliers)) if bool(outliers.any()) else found


def _between(firsts: Tensor, bounds: Tensor) -> Segments:
    """The stacks with these first segments. bounds: of all segments."""
    ends = torch.cat([firsts[1:], firsts.new_full((1,), len(bounds) - 1)])[: len(firsts)]
    return Segments(firsts, bounds[firsts], bounds[ends], ends)


def _longest_first(found: Segments) -> Segments:
    return found.select((found.starts - found.stops).argsort(stable=True))


def _readable(array: Tensor) -> bool:
    """True if the host may read the array's values now."""
    if type(array) is not Tensor or array.is_meta or array in PERSISTENT:
        return False
    return not (array.is_cuda and torch.cuda.is_current_stream_capturing())


def _rank(lengths: Tensor, most: int, window: int) -> Tensor:
    """Sort key of segments: longer than `most` first, then by window, longest first."""
    places = torch.arange(len(lengths), device=lengths.device) // window
    return torch.where(lengths > most, -lengths, places * (most + 1) + most - lengths)
