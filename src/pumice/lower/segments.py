"""Runs of equal values in a sorted index array, the longest first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pumice.lower.remember import per_tensor

_LONG_ARRAY = 1 << 17
"""Entries from which on the longest segments are looked at: below, the read would take longer than what it saves."""

_FAR = 4
"""How many times as long as the mean (and some more) a segment is far longer than the others."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Entries starts[j] <= p < stops[j] hold the value rows[j]. int32 [n] each.

    mean: entries of a segment on average, as far as it is known on the host.
    apart: the same in two, those far longer than the others and the rest, where there are both.
    """

    rows: Tensor
    starts: Tensor
    stops: Tensor
    mean: float
    apart: tuple[Segments, Segments] | None = None

    def split(self, first: int) -> Segments:
        """The same with the first ones apart."""
        if not 0 < first < len(self.rows):
            return self
        cuts = (slice(None, first), slice(first, None))
        head, rest = (
            Segments(self.rows[cut].clone(), self.starts[cut].clone(), self.stops[cut].clone(), self.mean)
            for cut in cuts
        )
        return replace(self, apart=(head, rest))


@per_tensor
def segments(array: Tensor, count: int, window: int = 0) -> Segments:
    """The segments of a sorted array for the values 0 to count - 1, empty ones too.

    Long ones come first, so that none starts late. With a window only those far above the mean do, and the others keep
    their neighbourhood, being sorted by length within so many of them: what they read is near, too. How many of those
    are so long that they would run on after all others is read from a device once for a long array, and put apart.
    Nothing else is read. The array may begin with -1.
    """
    ends = torch.arange(count + 1, device=array.device, dtype=array.dtype)
    bounds = torch.searchsorted(array.contiguous(), ends, out_int32=True)
    starts, stops = bounds[:-1], bounds[1:]
    mean = array.shape[0] / max(count, 1)
    order = _rank(stops - starts, 4 * int(mean) + 8, window).argsort(stable=True)
    found = Segments(order.int(), starts[order], stops[order], mean)
    if not window or array.shape[0] < _LONG_ARRAY or not _readable(array):
        return found
    return found.split(int((stops - starts > _FAR * int(mean) + 64).sum()))


def _readable(array: Tensor) -> bool:
    """Whether its values are there and may be waited for."""
    return (
        type(array) is Tensor and not array.is_meta and not (array.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _rank(lengths: Tensor, most: int, window: int) -> Tensor:
    """The place of each segment in the order: the longest first, or the long ones and then window after window."""
    if not window:
        return -lengths
    places = torch.arange(len(lengths), device=lengths.device) // window
    return torch.where(lengths > most, -lengths, places * (most + 1) + most - lengths)
