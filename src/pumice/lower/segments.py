"""Runs of equal values in a sorted index array, the longest first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pumice.coords.segments import WHOLE, Pieces, bounds_of, in_pieces, pieces_at_hand, segments_by_length
from pumice.runtime.cache import PERSISTENT, cached_per_tensor

_LONG_ARRAY = 1 << 17
"""Entries from which on the longest segments are looked at: below, the read would take longer than what it saves."""

_FAR = 4
"""How many times as long as the mean (and some more) a segment is far longer than the others."""

_LONG = 1536
"""The same of a stack's, in entries."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Entries starts[j] <= p < stops[j] hold the value rows[j]; of a stack the values rows[j] <= value < ends[j].

    int32 [n] each. apart: those far longer than the others, where there are any; they are not among these.
    Of pieces: where those of the same segment begin, and how many there are; 0 of what fills up the list.
    """

    rows: Tensor
    starts: Tensor
    stops: Tensor
    ends: Tensor | None = None
    apart: Segments | None = None
    firsts: Tensor | None = None
    pieces: Tensor | None = None

    def taken(self, which: slice | Tensor) -> Segments:
        """Some of them."""
        held = (self.rows, self.starts, self.stops, self.ends)
        return Segments(*(None if x is None else x[which].clone() for x in held))  # pyright: ignore[reportArgumentType]


@cached_per_tensor
def segments(array: Tensor, count: int, window: int = 0) -> Segments:
    """The segments of a sorted array for the values 0 to count - 1, empty ones too.

    Long ones come first, so that none starts late. With a window only those far above the mean do, and the others keep
    their neighbourhood, being sorted by length within so many of them: what they read is near, too. How many of those
    are so long that they would run on after all others is read from a device once for a long array, and put apart.
    Nothing else is read. The array may begin with -1.
    """
    if not window:
        found = pieces_at_hand(array, count, WHOLE)
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
    return replace(found.taken(slice(long, None)), apart=found.taken(slice(long)))


def pieces(array: Tensor, count: int, most: int) -> Segments:
    """The segments of a sorted array in pieces of about equal length, of at most so many entries each.

    The longest segments come first, the pieces of one side by side; an empty segment is one piece. The list is as long
    as it might have to be, so that nothing is read from a device.
    """
    found = pieces_at_hand(array, count, most)
    return _cut(array, count, most) if found is None else _of_pieces(found)


@cached_per_tensor
def _cut(array: Tensor, count: int, most: int) -> Segments:
    return _of_pieces(in_pieces(array, count, most))


def _of_pieces(found: Pieces) -> Segments:
    return Segments(found.values, found.starts, found.stops, firsts=found.firsts, pieces=found.numbers)


@cached_per_tensor
def stacks(array: Tensor, count: int, height: int) -> Segments:
    """Up to so many consecutive segments as one, those with the most entries first.

    The values 0 to count - 1 of a sorted array, which may begin with -1. Segments of thousands of entries would hold up
    their stack and all that wait for it: of a long array they are put apart, after one read.
    """
    bounds = bounds_of(array, count)
    places = torch.arange(count, device=array.device, dtype=torch.int32)
    if array.shape[0] < _LONG_ARRAY or not _readable(array):
        return _longest_first(_between(places[::height], bounds))
    long = bounds.diff() > max(_LONG, _FAR * (array.shape[0] // max(count, 1)))
    begins = (places % height == 0) | long
    # After a long one a stack begins, too.
    begins[1:] |= long[:-1]
    found = _longest_first(_between(places[begins], bounds))
    alone = long[found.rows]
    return replace(found.taken(~alone), apart=found.taken(alone)) if bool(alone.any()) else found


def _between(firsts: Tensor, bounds: Tensor) -> Segments:
    """Stacks that begin with these segments."""
    ends = torch.cat([firsts[1:], firsts.new_full((1,), len(bounds) - 1)])[: len(firsts)]
    return Segments(firsts, bounds[firsts], bounds[ends], ends)


def _longest_first(found: Segments) -> Segments:
    return found.taken((found.starts - found.stops).argsort(stable=True))


def _readable(array: Tensor) -> bool:
    """Whether its values are there and may be waited for."""
    if type(array) is not Tensor or array.is_meta or array in PERSISTENT:
        return False
    return not (array.is_cuda and torch.cuda.is_current_stream_capturing())


def _rank(lengths: Tensor, most: int, window: int) -> Tensor:
    """The place of each segment in the order: the long ones, and then window after window."""
    places = torch.arange(len(lengths), device=lengths.device) // window
    return torch.where(lengths > most, -lengths, places * (most + 1) + most - lengths)
