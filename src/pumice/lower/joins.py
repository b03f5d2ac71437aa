"""Sums, maxima and minima of gathered rows over sorted segments, in a fixed order.

    y[s, c] = join over the entries p of segment s of x[inputs[p], c] * factors[p]          0 for a segment without any

A kernel reads entries piece by piece: many short segments a program, long ones cut, whose parts a second launch joins.
Nothing is added by atomics: results are the same in every run. `join_torch` is the same in plain torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords.segments import bounds_of
from pumice.runtime.launch import has_triton, kernel

_SHORT = 64
"""Entries up to which a segment is never cut."""
_VALUES, _STEP, _LANES = 512, 4, 64
"""Values and entries in flight of a program; its maximum channels."""


class Cuts(NamedTuple):
    """Pieces of segments, longest first, int32 [n] each: the entries starts[j] <= p < stops[j] of segment owners[j]. A
    piece of several is part slots[j] of those that a second launch joins; -1: the whole segment."""

    owners: Tensor
    slots: Tensor
    starts: Tensor
    stops: Tensor


@dataclass(frozen=True, eq=False)
class Joins:
    """Sorted segments as kernels read them. inputs: int32 [P], the row of x of each entry, None: the entry's own;
    factors: float32 [P] or None; outputs: int64 [P], ascending; sources, count: rows of x and of y. pieces: of all
    segments; parts: number of parts of segments that were cut; rest: the parts of each of these."""

    inputs: Tensor | None
    factors: Tensor | None
    outputs: Tensor
    sources: int
    count: int
    pieces: Cuts
    parts: int
    rest: Cuts

    @staticmethod
    def of(inputs: Tensor | None, outputs: Tensor, sizes: tuple[int, int], factors: Tensor | None = None) -> Joins:
        """inputs, outputs: of the entries, outputs ascending; sizes: rows of x and of y. Reads the host once."""
        found = _cut(bounds_of(outputs, sizes[1]))
        inputs = None if inputs is None else inputs.int()
        return Joins(inputs, None if factors is None else factors.float(), outputs, *sizes, *found)

    @cached_property
    def transposed(self) -> Joins:
        """The gradient's: the entries sorted by their rows of x."""
        if self.inputs is None:
            inputs, order = torch.arange(len(self.outputs), device=self.outputs.device), slice(None)
        else:
            inputs, order = self.inputs.long().sort(stable=True)
        factors = None if self.factors is None else self.factors[order]
        return Joins.of(self.outputs[order], inputs, (self.count, self.sources), factors)


def _cut(bounds: Tensor) -> tuple[Cuts, int, Cuts]:
    """(pieces, number of parts, rest) of Joins. bounds: int32 [count + 1]."""
    lengths = bounds.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    # So few parts that two launches do.
    most = max(_SHORT, math.isqrt(longest) + 1)
    numbers = (-(-lengths // most)).clamp(min=1)
    whole = torch.arange(len(lengths), device=bounds.device)
    owners = whole if longest <= most else torch.repeat_interleave(whole, numbers)
    firsts = (numbers.cumsum(0) - numbers)[owners]
    starts = bounds[:-1][owners] + (torch.arange(len(owners), device=bounds.device) - firsts) * most
    stops = torch.minimum(starts + most, bounds[1:][owners])
    several = numbers[owners] > 1
    slots = torch.where(several, several.cumsum(0) - 1, -1)
    long = (numbers > 1).nonzero()[:, 0] if longest > most else whole[:0]
    ends = numbers[long].cumsum(0)
    rest = Cuts(long, torch.full_like(long, -1), ends - numbers[long], ends)
    return _sorted(Cuts(owners, slots, starts, stops)), int(ends[-1]) if len(ends) else 0, _sorted(rest)


def _sorted(cuts: Cuts) -> Cuts:
    order = (cuts.starts - cuts.stops).argsort(stable=True)
    return Cuts(*[x[order].int() for x in cuts])


def runs(x: Tensor) -> bool:
    """True if kernels run on these rows."""
    return x.dtype in (torch.float32, torch.float16, torch.bfloat16) and has_triton(x) and x.numel() > 0


def join(
    x: Tensor, found: Joins, how: str, ties: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """(y [count, C]; with `ties` the number of entries that attain each extreme, float32). x: [sources, C]; how: "sum",
    "max" or "min"; dtype: of sums, by default that of x, in float32 at least until rounded. A NaN is the maximum, and
    the minimum, attained by none."""
    if not runs(x):
        return join_torch(x, found, how, ties, dtype)
    y = x.new_empty((found.count, x.shape[1]), dtype=dtype or x.dtype)
    met = torch.empty(y.shape if ties else (1,), dtype=torch.float32, device=x.device)
    _run(x.contiguous(), found, (y, met), {"HOW": how, "TIES": ties})
    return y, met if ties else None


def of_maxima(grad: Tensor, x: Tensor, y: Tensor, found: Joins) -> Tensor:
    """[sources, C]: the gradient of x, of a maximum y. grad: float32 [count, C], shared by the entries that attain it;
    found: the transposed of y's."""
    if not runs(x):
        return of_maxima_torch(grad, x, y, found)
    dx = torch.empty_like(x)
    _run(grad, found, (dx, grad), {"HOW": "share", "TIES": False}, (x, y))
    return dx


def _run(x: Tensor, found: Joins, out: tuple[Tensor, Tensor], how: dict[str, Any], known: Any = None) -> None:
    """Join into `out`, (rows, ties). known: (x, y) of a maximum, whose gradient is computed."""
    channels, own = x.shape[1], x if known is None else known[0]
    lanes = min(_LANES, max(1, 1 << (channels - 1).bit_length()))
    shape = {"C": channels, "ROWS": max(1, _VALUES // lanes), "STEP": _STEP, "LANES": lanes}
    launch, sides = kernel("join_kernels.join", "lower"), -(-channels // lanes)
    parts, part_ties = out
    if found.parts:
        parts = torch.empty((2, found.parts, channels), dtype=torch.float32, device=x.device)
        parts, part_ties = parts.unbind()
    inputs, factors = found.inputs, found.factors
    facts = {"INDEXED": inputs is not None, "SCALED": factors is not None, "FOLDS": False}
    given = (x, x if inputs is None else inputs, x if factors is None else factors, own, known[1] if known else own)
    count = len(found.pieces.owners)
    launch(
        -(-count // shape["ROWS"]) * sides,
        (*given, *found.pieces, *out, parts, part_ties),
        (count,),
        shape | how | facts,
    )
    if found.parts:
        count, facts = len(found.rest.owners), {"INDEXED": False, "SCALED": False, "FOLDS": True}
        how = how | {"HOW": "sum" if how["HOW"] == "share" else how["HOW"]}
        given = (parts, part_ties, parts, parts, parts)
        launch(
            -(-count // shape["ROWS"]) * sides,
            (*given, *found.rest, *out, parts, part_ties),
            (count,),
            shape | how | facts,
        )


# In plain torch


def _entries(x: Tensor, found: Joins) -> Tensor:
    """[P, C]: the values of the entries."""
    rows = x if found.inputs is None else x.index_select(0, found.inputs.long())
    if found.factors is None:
        return rows
    return rows * found.factors[:, None].to(torch.promote_types(x.dtype, torch.float32))


def join_torch(
    x: Tensor, found: Joins, how: str, ties: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """As join, in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros((found.count, x.shape[1]), dtype=wide, device=x.device)
    if how == "sum":
        return y.index_add(0, found.outputs, _entries(x, found).to(wide)).to(dtype or x.dtype), None
    rows = _entries(x, found).to(x.dtype)
    every = found.outputs[:, None].expand_as(rows)
    y = y.to(x.dtype).scatter_reduce(0, every, rows, f"a{how}", include_self=False)
    met = (rows == y.index_select(0, found.outputs)).to(wide)
    return y, torch.zeros(y.shape, dtype=wide, device=x.device).index_add(0, found.outputs, met) if ties else None


def of_maxima_torch(grad: Tensor, x: Tensor, y: Tensor, found: Joins) -> Tensor:
    """As of_maxima, in plain torch; differentiable in grad."""
    assert found.inputs is not None
    factors = 1 if found.factors is None else found.factors[:, None].to(grad.dtype)
    inputs = found.inputs.long()
    met = (x.index_select(0, found.outputs) * factors).to(x.dtype) == y.index_select(0, inputs)
    rows = torch.where(met, grad.index_select(0, inputs), 0) * factors
    return grad.new_zeros(x.shape).index_add(0, found.outputs, rows).to(x.dtype)
