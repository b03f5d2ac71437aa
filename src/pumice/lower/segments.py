"""Runs of equal values in a sorted index array, the longest first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.lower.remember import per_tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of one launch: entries starts[j] <= p < stops[j] hold the value rows[j]. int32 [n] each.

    mean: entries of a segment on average, as far as it is known on the host.
    """

    rows: Tensor
    starts: Tensor
    stops: Tensor
    mean: float


@per_tensor
def segments(array: Tensor, count: int) -> tuple[Segments, ...]:
    """The segments of a sorted array for the values 0 to count - 1, empty ones too.

    Long ones come first, so that none starts late. Nothing is read from the device. The array may begin with -1.
    """
    ends = torch.arange(count + 1, device=array.device, dtype=array.dtype)
    bounds = torch.searchsorted(array, ends, out_int32=True)
    starts, stops = bounds[:-1], bounds[1:]
    order = (stops - starts).argsort(descending=True, stable=True)
    mean = array.shape[0] / max(count, 1)
    return (Segments(order.int(), starts[order], stops[order], mean),)
