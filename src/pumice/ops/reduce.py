"""Segment reductions: out[outputs[j]] reduces x[inputs[j]] over all j, by sum, mean, maximum or first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def maximum(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o, c] = x[w, c] with w the first listed input whose x[w, c] is the maximum over o's inputs; 0 without one."""
    if x.is_meta:  # `prepare`: shapes only
        return x.new_empty(rows, x.shape[1])
    with torch.no_grad():
        winner = _first_maximum(x[inputs], outputs, rows)
        found = winner < inputs.shape[0]
        source = torch.cat([inputs, inputs.new_zeros(1)])[winner]
    if torch.compiler.is_compiling():
        # The number of rows is symbolic and may be 0: append a row to index.
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    elif x.shape[0] == 0:
        return x.sum(dim=0).expand(rows, -1)  # zeros, with x's graph
    channels = torch.arange(x.shape[1], device=x.device)
    return torch.where(found, pick(x, (source, channels)), 0)


def _first_maximum(values: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """[rows, C]: list position of the first maximum per output and channel; the list's length if there is none."""
    places, channels = values.shape
    index = outputs[:, None].expand(-1, channels)
    top = values.new_full((rows, channels), -torch.inf).scatter_reduce(0, index, values, "amax")
    place = torch.arange(places, device=values.device)[:, None].expand(-1, channels)
    # NaN compares unequal to itself: count it as a maximum, so that it propagates.
    attains = (values == top[outputs]) | torch.isnan(values)
    candidate = torch.where(attains, place, places)
    first = torch.full((rows, channels), places, dtype=torch.int64, device=values.device)
    return first.scatter_reduce(0, index, candidate, "amin")


def pick(x: Tensor, index: Tensor | tuple[Tensor, ...]) -> Tensor:
    """x[index], with a gradient summed in at least float32 and in a fixed order, unlike gather and index_select."""
    return x.to(torch.promote_types(x.dtype, torch.float32))[index].to(x.dtype)


def total(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o] = sum of x[i] over o's inputs."""
    return _wide_sum(x, inputs, outputs, rows).to(x.dtype)


def mean(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o] = mean of x[i] over o's inputs; 0 if there are none."""
    counts = torch.bincount(outputs, minlength=rows).clamp(min=1)
    return (_wide_sum(x, inputs, outputs, rows) / counts[:, None]).to(x.dtype)


def first(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """out[o] = x[i] of the lowest i among o's inputs; every output has one."""
    lowest = outputs.new_full((rows,), len(x)).scatter_reduce(0, outputs, inputs, "amin")
    return x[lowest]


def _wide_sum(x: Tensor, inputs: Tensor, outputs: Tensor, rows: int) -> Tensor:
    """Sums in at least float32: sums of half precision may overflow."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros((rows, x.shape[1]), dtype=dtype).index_add(0, outputs, x[inputs].to(dtype))


REDUCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "mean": mean,
    "sum": total,
    "max": maximum,
    "first": first,
}
