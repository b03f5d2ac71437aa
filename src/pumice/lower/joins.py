"""Sums, maxima and minima of gathered rows over sorted segments, in a fixed order.

    y[s, c] = join over the entries p of segment s of x[inputs[p], c] * factors[p]          0 for a segment without any

A kernel reads entries piece by piece: many short segments a program, long ones cut, whose parts a second launch joins.
Nothing is added by atomics: results are the same in every run. `join_torch` is the same in plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pumice.coords.segments import bounds_of
from pumice.runtime.launch import CompiledKernel, KernelLauncher, has_triton, kernel

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
    segments; parts: number of parts of segments that were cut; rest: the parts of each of these; launches: of joins
    that ran, by kind."""

    inputs: Tensor | None
    factors: Tensor | None
    outputs: Tensor
    sources: int
    count: int
    pieces: Cuts
    parts: int
    rest: Cuts
    launches: dict[Hashable, BoundJoin] = field(default_factory=dict)

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
    if not ties:
        _repeat(x.contiguous(), found, y, _How(how))
        return y, None
    met = torch.empty(y.shape, dtype=torch.float32, device=x.device)
    _run(x.contiguous(), found, (y, met), _How(how, True))
    return y, met


def add_join(x: Tensor, found: Joins, y: Tensor) -> None:
    """y += the sums of x, in place; y contiguous."""
    if runs(x):
        _repeat(x.contiguous(), found, y, _How("sum", adds=True))
    else:
        y += join_torch(x, found, "sum")[0]


def of_maxima(grad: Tensor, x: Tensor, y: Tensor, found: Joins) -> Tensor:
    """[sources, C]: the gradient of x, of a maximum y. grad: float32 [count, C], shared by the entries that attain it;
    found: the transposed of y's."""
    if not runs(x):
        return of_maxima_torch(grad, x, y, found)
    dx = torch.empty_like(x)
    _run(grad, found, (dx, dx), _How("share"), (x, y))
    return dx


class _How(NamedTuple):
    """What the kernel computes; see join_kernels.join."""

    how: str
    ties: bool = False
    adds: bool = False


def _repeat(x: Tensor, found: Joins, y: Tensor, how: _How) -> None:
    """Join into y, by the launches of an equal earlier call if there was one."""
    device = x.get_device()
    key = x.shape[1], x.dtype, y.dtype, how, device
    known = found.launches.get(key)
    if known is not None and device == torch._C._cuda_getDevice() and known(x, y):
        return
    _run(x, found, (y, y), how)
    if known is None and device >= 0 and (made := BoundJoin.of(x, y, found, how.how, how.adds)) is not None:
        found.launches[key] = made


def _run(x: Tensor, found: Joins, out: tuple[Tensor, Tensor], how: _How, known: Any = None) -> None:
    """Join into `out`, (rows, ties). known: (x, y) of a maximum, whose gradient is computed."""
    parts = part_ties = out[0]
    if found.parts:
        parts = torch.empty((found.parts, x.shape[1]), dtype=torch.float32, device=x.device)
        part_ties = torch.empty_like(parts) if how.ties else parts
    for step in _steps(x.shape[1], found, how):
        first = (parts, part_ties, parts, parts, parts) if step.folds else (x, *step.arrays(x), *(known or (x, x)))
        step.launch(step.programs, (*first, *step.cuts, *out, parts, part_ties), (step.count,), step.constants)


class _Step(NamedTuple):
    """A launch. given: inputs and factors, or None."""

    launch: KernelLauncher
    programs: int
    count: int
    cuts: Cuts
    given: tuple[Tensor | None, Tensor | None]
    constants: dict[str, Any]
    folds: bool

    def arrays(self, x: Tensor) -> Iterator[Tensor]:
        return (x if array is None else array for array in self.given)


def _steps(channels: int, found: Joins, how: _How) -> Iterator[_Step]:
    """The launch over pieces, and that over parts if segments were cut."""
    lanes = min(_LANES, max(1, 1 << (channels - 1).bit_length()))
    rows, launch = max(1, _VALUES // lanes), kernel("join_kernels.join", "lower")
    shape = {"C": channels, "ROWS": rows, "STEP": _STEP, "LANES": lanes}
    fold = "sum" if how.how == "share" else how.how
    every = (found.pieces, (found.inputs, found.factors), how.how, False), (found.rest, (None, None), fold, True)
    for cuts, given, name, folds in every[: 1 + bool(found.parts)]:
        count = len(cuts.owners)
        indexed, scaled = (array is not None for array in given)
        facts = {"HOW": name, "TIES": how.ties, "ADDS": how.adds}
        facts |= {"INDEXED": indexed, "SCALED": scaled, "FOLDS": folds}
        yield _Step(launch, -(-count // rows) * -(-channels // lanes), count, cuts, given, shape | facts, folds)


class BoundJoin(NamedTuple):
    """The launches of joins of one kind, with all arguments but the addresses of rows, results and parts. steps:
    (compiled kernel, programs, arguments, places of the rows' address, of the results', of the parts'); parts: shape of
    these, or None. Whoever calls it keeps the Joins, whose arrays are read."""

    steps: tuple[tuple[CompiledKernel, int, list[Any], tuple[tuple[int, ...], ...]], ...]
    parts: tuple[int, int] | None
    device: int

    @staticmethod
    def of(x: Tensor, y: Tensor, found: Joins, how: str, adds: bool) -> BoundJoin | None:
        """For rows and results like x and y. None until such a join has run, and for unaligned ones."""
        steps, parts = [], (found.parts, x.shape[1]) if found.parts else None
        like = y if parts is None else torch.empty(1, device=x.device)
        for step in _steps(x.shape[1], found, _How(how, False, adds)):
            if not step.programs:
                continue
            first = (like,) * 5 if step.folds else (x, *step.arrays(x), x, x)
            tensors = (*first, *step.cuts, y, y, like, like)
            bound = step.launch.bound(tensors, step.constants)
            compiled = bound.compiled(x.get_device(), [t.data_ptr() % 16 for t in tensors])
            if compiled is None or any(t.data_ptr() % 16 for t in tensors):
                return None
            places = [tuple(n for n, t in enumerate(tensors) if t is own) for own in (x, y, like)]
            values = [*(t.data_ptr() for t in tensors), step.count, *bound.constants]
            steps.append((compiled, step.programs, values, tuple(places)))
        return BoundJoin(tuple(steps), parts, x.get_device())

    def __call__(self, x: Tensor, y: Tensor) -> bool:
        """Join the rows of x into y, on the current device; False, with y unchanged, if one is not 16-byte aligned."""
        own = x.data_ptr(), y.data_ptr()
        if (own[0] | own[1]) & 15:
            return False
        # Keeps the memory until the launch.
        kept = None if self.parts is None else x.new_empty(self.parts, dtype=torch.float32)
        addresses = (*own, own[1] if kept is None else kept.data_ptr())
        for run, programs, values, places in self.steps:
            values = values.copy()
            for address, at in zip(addresses, places, strict=True):
                for place in at:
                    values[place] = address
            run(programs, values, self.device)
        return True


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
