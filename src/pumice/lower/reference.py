"""Plain torch references, on any device, for every statement of the einsum language and for convolution.

A statement is evaluated at every point of the grid of all indices of a term and of the target. Out-of-bounds accesses
read position 0, and their points are written to an extra slot after the target, which is dropped. Slow and large in
memory, but differentiable: tests compare kernels and their gradients with these references.

Convolution and its gradients are a loop over kernel offsets:

    forward          out[o, g, n]  += x[i, g, c] * w[k, g, c, n]
    input gradient   the forward loop with inputs and outputs exchanged and w transposed
    weight gradient  dw[k, g, c, n] += x[i, g, c] * dout[o, g, n]            for every pair (o, k, i)

in any floating dtype. Half precisions are accumulated in float32. Within one kernel offset an output occurs at most
once, so sums have a fixed order and the result is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pumice.coords import Pairs
from pumice.language.bind import BoundStatement
from pumice.language.nodes import (
    Access,
    Affine,
    Equal,
    Exists,
    Factor,
    Index,
    Range,
    Statement,
    Term,
    accesses_of,
    indices_of,
)

# Statements
POINTS = 1 << 22
"""Points evaluated at a time."""
MOST_POINTS = 1 << 36
"""Points of a term at which `refusal` refuses: some ten minutes on a CPU."""


WRAPS = 2.0**62
"""Index magnitude, in float64, from which int64 may overflow; such an index is out of bounds."""


class Written(NamedTuple):
    """The value of each grid point, and its entry in the flat target."""

    values: Tensor
    entries: Tensor


def run(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Evaluate any statement; a new tensor of `dtype`, differentiable by autograd."""
    statement = bound.statement
    wide = working_dtype(statement, dtypes_of(operands), dtype)
    if statement.reduction == "sum":
        parts = (part for term in statement.terms for part in _written(bound, operands, (term,), wide))
        flat = _sums(_start(bound, operands, wide), parts)
    elif statement.reduction == "mean":
        flat = _means(_start(bound, operands, wide), _written(bound, operands, statement.terms, wide))
    else:
        flat = _extremes(bound, operands, wide)
    return flat[:-1].reshape(bound.shape).to(dtype)


def refusal(statement: Statement, bound: BoundStatement, operands: Mapping[str, Tensor]) -> str | None:
    """The reason why the loops should not run on these operands, or None."""
    if bound.points(bound.ranges) <= MOST_POINTS:
        return None
    sums = [statement.terms] if statement.reduction != "sum" else [(term,) for term in statement.terms]
    points = max((bound.points(indices_of(statement.target, *terms)) for terms in sums), default=0)
    return f"a term has {points} points, the limit is {MOST_POINTS}" if points > MOST_POINTS else None


def working_dtype(statement: Statement, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype) -> torch.dtype:
    """The compute dtype: the widest of the values and of the result, at least float32; int64 if all are integers."""
    names = value_names(statement)
    kinds = [dtypes[name] for name in names] + [dtype]
    if all(not kind.is_floating_point for kind in kinds) and statement.reduction != "mean" and whole(statement.terms):
        return torch.int64
    return _widest(kinds)


def equals(value: Tensor, other: Tensor) -> Tensor:
    """Elementwise equality after a cast of `other` to the dtype of a floating-point `value`."""
    return value == (other.to(value.dtype) if value.dtype.is_floating_point else other)


def equal_dtype(factor: Equal, dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype of the second argument of `equal`: int64 for integers, so that large labels differ."""
    kinds = [dtypes[access.name] for access in (factor.access, *factors_of(factor.terms))]
    if whole(factor.terms) and not any(kind.is_floating_point for kind in kinds):
        return torch.int64
    return _widest(kinds)


def dtypes_of(operands: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in operands.items()}


def tops_of(operands: Mapping[str, Tensor]) -> dict[str, int]:
    """The largest value of each index array's dtype."""
    return {name: torch.iinfo(x.dtype).max for name, x in operands.items() if x.dtype in (torch.int32, torch.int64)}


def value_names(statement: Statement) -> tuple[str, ...]:
    """The operands whose values are used: those of the right side, and the target if accumulated."""
    old = (statement.target.name,) if statement.accumulate else ()
    return tuple(dict.fromkeys((*(access.name for access in factors_of(statement.terms)), *old)))


def read_names(statement: Statement) -> tuple[str, ...]:
    """The operands that are read: the right side, the target's index arrays, and the target if accumulated."""
    right = (access.name for access in accesses_of(*statement.terms, *statement.target.indices))
    return tuple(dict.fromkeys((*right, *value_names(statement))))


def factors_of(terms: Iterable[Term]) -> tuple[Access, ...]:
    """The accesses among the factors."""
    return tuple(f for term in terms for f in term.factors if isinstance(f, Access))


def whole(terms: Iterable[Term]) -> bool:
    """True if all coefficients are integers."""
    return all(float(term.coefficient).is_integer() for term in terms)


EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)
"""Dtypes of quantized values, which torch does not promote; results are float32 (kernels sum int8 in int32)."""


def _widest(kinds: Iterable[torch.dtype]) -> torch.dtype:
    widest = torch.float32
    for kind in kinds:
        widest = widest if kind in EIGHT_BITS else torch.promote_types(widest, kind)
    return widest


def _start(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype, value: int | float = 0) -> Tensor:
    """The initial flat target, with an extra slot for out-of-bounds points."""
    statement = bound.statement
    if statement.accumulate:
        old = operands[statement.target.name].to(dtype).flatten()
        return torch.cat([old, old.new_zeros(1)])
    size = math.prod(bound.shape) + 1
    return torch.full((size,), value, dtype=dtype, device=_device(operands))


def _sums(start: Tensor, parts: Iterable[Written]) -> Tensor:
    for part in parts:
        start = start.index_add(0, part.entries, part.values)
    return start


def _means(start: Tensor, parts: Iterable[Written]) -> Tensor:
    count = torch.zeros_like(start)
    for part in parts:
        start = start.index_add(0, part.entries, part.values)
        count = count.index_add(0, part.entries, torch.ones_like(part.values))
    return start / count.clamp(min=1)


def _extremes(bound: BoundStatement, operands: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Largest or smallest values; 0 for entries without points unless the old target is included."""
    statement = bound.statement
    largest = statement.reduction == "max"
    found = _start(bound, operands, dtype, identity_value(dtype, largest))
    reached = torch.full_like(found, statement.accumulate, dtype=torch.bool)
    parts: Iterable[Written] = _written(bound, operands, statement.terms, dtype)
    if torch.is_grad_enabled() and any(t.requires_grad for t in operands.values()):
        parts = _joined(parts)  # ties share the gradient evenly across parts
    for part in parts:
        found = found.scatter_reduce(0, part.entries, part.values, "amax" if largest else "amin")
        reached = reached.index_fill(0, part.entries, True)
    return torch.where(reached, found, 0)


def identity_value(dtype: torch.dtype, largest: bool) -> int | float:
    """The identity of max (or min) in this dtype."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _joined(parts: Iterable[Written]) -> list[Written]:
    parts = list(parts)
    if not parts:
        return []
    return [Written(torch.cat([p.values for p in parts]), torch.cat([p.entries for p in parts]))]


def _written(
    bound: BoundStatement, operands: Mapping[str, Tensor], terms: Sequence[Term], dtype: torch.dtype
) -> Iterator[Written]:
    """The sum of the terms at every grid point (indices of terms and target), POINTS at a time."""
    target = bound.statement.target
    ranges = {name: bound.ranges[name] for name in indices_of(target, *terms)}
    for part in _parts(ranges):
        grid = _Grid(_points(part, _device(operands)), operands)
        place = grid.place(target, bound.shape)
        there = place.valid & grid.valid_mask(terms)
        values = torch.where(there, grid.sum(terms, there, dtype), 0)
        entries = torch.zeros((), dtype=torch.int64, device=there.device)
        for position, extent in zip(place.positions, bound.shape, strict=True):
            entries = entries * extent + position
        entries = torch.where(there, entries, math.prod(bound.shape))
        shape = tuple(len(r) for r in part.values())
        yield Written(values.expand(shape).flatten(), entries.expand(shape).flatten())


def _parts(ranges: dict[str, Range]) -> Iterator[dict[str, Range]]:
    """The index space cut along its longest index; no parts if it is empty."""
    size = math.prod(len(r) for r in ranges.values())
    if size <= POINTS:
        if size:
            yield ranges
        return
    longest = max(ranges, key=lambda name: len(ranges[name]))
    whole_range = ranges[longest]
    step = max(1, POINTS // (size // len(whole_range)))
    for start in range(whole_range.start, whole_range.stop, step):
        yield from _parts({**ranges, longest: Range(start, min(start + step, whole_range.stop))})


def _points(ranges: Mapping[str, Range], device: torch.device) -> dict[str, Tensor]:
    """The values of every index along its own axis of the grid."""
    points = {}
    for axis, (name, extent) in enumerate(ranges.items()):
        shape = [1] * len(ranges)
        shape[axis] = len(extent)
        points[name] = torch.arange(extent.start, extent.stop, device=device).reshape(shape)
    return points


def _device(operands: Mapping[str, Tensor]) -> torch.device:
    return next((t.device for t in operands.values()), torch.device("cpu"))


class _Place(NamedTuple):
    """Positions on each axis of an operand, and the mask `valid`; invalid ones are 0."""

    positions: tuple[Tensor, ...]
    valid: Tensor


@dataclass(frozen=True)
class _Grid:
    """Values over a part of the index space; all tensors broadcast to its shape."""

    points: Mapping[str, Tensor]
    operands: Mapping[str, Tensor]
    places: dict[tuple[Access, tuple[int, ...]], _Place] = field(default_factory=dict)

    def valid_mask(self, terms: Sequence[Term]) -> Tensor:
        """Mask of the points where all reads of the terms are in bounds; `exists` requires nothing."""
        conditions = [condition for term in terms for factor in term.factors for condition in self._required(factor)]
        return self._all(conditions)

    def sum(self, terms: Sequence[Term], there: Tensor, dtype: torch.dtype) -> Tensor:
        total = torch.zeros((), dtype=dtype, device=there.device)
        for term in terms:
            value = torch.full((), term.coefficient, dtype=dtype, device=there.device)
            for factor in term.factors:
                value = value * self._factor(factor, there).to(dtype)
            total = total + value
        return total

    def place(self, access: Access, shape: Sequence[int]) -> _Place:
        """The positions of the access in an operand of this shape."""
        if (access, tuple(shape)) not in self.places:
            found = [self._position(expression) for expression in access.indices]
            inside = [(p >= 0) & (p < extent) for (p, _), extent in zip(found, shape, strict=True)]
            there = self._all([*inside, *(t for _, t in found)])
            self.places[access, tuple(shape)] = _Place(tuple(torch.where(there, p, 0) for p, _ in found), there)
        return self.places[access, tuple(shape)]

    def _required(self, factor: Factor) -> list[Tensor]:
        if isinstance(factor, Exists):
            return []
        access = factor if isinstance(factor, Access) else factor.access
        own = self.place(access, self.operands[access.name].shape).valid
        return [own] if isinstance(factor, Access) else [own, self.valid_mask(factor.terms)]

    def _factor(self, factor: Factor, there: Tensor) -> Tensor:
        if isinstance(factor, Exists):
            return self.place(factor.access, self.operands[factor.access.name].shape).valid
        if isinstance(factor, Access):
            return self._read(factor, there)
        value = self._read(factor.access, there)
        return equals(value, self.sum(factor.terms, there, equal_dtype(factor, dtypes_of(self.operands))))

    def _read(self, access: Access, there: Tensor) -> Tensor:
        """The values of the access; 0, without gradient, for points outside `there`."""
        operand = self.operands[access.name]
        if not operand.numel():
            return torch.zeros((), dtype=operand.dtype, device=operand.device)
        positions = self.place(access, operand.shape).positions
        return torch.where(there, operand[positions] if positions else operand, 0)

    def _position(self, expression: Affine) -> tuple[Tensor, Tensor]:
        """The value of an index expression, and the mask of valid values of its index arrays."""
        total = torch.full((), expression.constant, dtype=torch.int64, device=_device(self.operands))
        about = total.double()
        conditions = []
        for coefficient, atom in expression.terms:
            if isinstance(atom, Index):
                value = self.points[atom.name]
            else:
                there = self.place(atom, self.operands[atom.name].shape).valid
                value = self._read(atom, there).long()
                conditions += [there, value >= 0]
            total, about = total + coefficient * value, about + coefficient * value.double()
        return total, self._all([*conditions, about.abs() < WRAPS])

    def _all(self, conditions: Sequence[Tensor]) -> Tensor:
        result = torch.ones((), dtype=torch.bool, device=_device(self.operands))
        for condition in conditions:
            result = result & condition
        return result


# Convolution
def forward(
    x: Float[Tensor, "inputs c_in"], weight: Float[Tensor, "c_out k c_group"], pairs: Pairs, rows: int, groups: int
) -> Float[Tensor, "{rows} c_out"]:
    """x [N_in, G*C], weight [G*N, K, C] -> out [rows, G*N], in x's dtype."""
    out = x.new_zeros((rows, weight.shape[0]), dtype=accumulator(x.dtype))
    taps = grouped(weight, groups)
    for tap, inputs, outputs in meetings(pairs):
        out.index_add_(0, outputs, products(x[inputs], taps[tap], out.dtype))
    return out.to(x.dtype)


def weight_gradient(
    x: Float[Tensor, "inputs c_in"], grad: Float[Tensor, "outputs c_out"], pairs: Pairs, groups: int
) -> Float[Tensor, "c_out k c_group"]:
    """x [N_in, G*C], grad [N_out, G*N] -> dw [G*N, K, C], in x's dtype."""
    channels, width = x.shape[1] // groups, grad.shape[1] // groups
    out = x.new_zeros((len(pairs.sizes), groups, channels, width), dtype=accumulator(x.dtype))
    for tap, inputs, outputs in meetings(pairs):
        left = x[inputs].view(-1, groups, channels).permute(1, 2, 0)
        right = grad[outputs].view(-1, groups, width).permute(1, 0, 2)
        out[tap] = torch.bmm(left.to(out.dtype), right.to(out.dtype))
    return out.permute(1, 3, 0, 2).reshape(grad.shape[1], -1, channels).to(x.dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The accumulator dtype: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def grouped(weight: Float[Tensor, "c_out k c_group"], groups: int) -> Float[Tensor, "k {groups} c_group n"]:
    """The view [K, G, C, N] of a weight [G*N, K, C]."""
    return weight.view(groups, -1, *weight.shape[1:]).permute(2, 0, 3, 1)


def transposed(weight: Float[Tensor, "c_out k c_group"], groups: int) -> Float[Tensor, "c_in k n"]:
    """The weight [G*C, K, N] of the input gradient from the forward weight [G*N, K, C]."""
    if groups == 1:
        return weight.transpose(0, 2)
    return grouped(weight, groups).permute(1, 2, 0, 3).flatten(0, 1)


def meetings(pairs: Pairs) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(kernel offset, inputs, outputs) of every kernel offset with pairs."""
    start = 0
    for tap, size in enumerate(pairs.sizes.tolist()):
        if size:
            yield tap, pairs.inputs[start : start + size], pairs.outputs[start : start + size]
        start += size


def products(
    x: Float[Tensor, "pairs c_in"], weight: Float[Tensor, "g c n"], dtype: torch.dtype
) -> Float[Tensor, "pairs c_out"]:
    """x [P, G*C] times weight [G, C, N] -> [P, G*N] in `dtype`."""
    groups, channels, width = weight.shape
    if groups == 1:
        return _matmul(x, weight[0], dtype)
    if channels == 1:
        return (x[:, :, None].to(dtype) * weight[:, 0].to(dtype)).flatten(1)
    left = x.view(-1, groups, channels).transpose(0, 1).to(dtype)
    return torch.bmm(left, weight.to(dtype)).transpose(0, 1).reshape(-1, groups * width)


def _matmul(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype == dtype:
        return x @ weight
    if x.is_cuda:
        return torch.mm(x, weight, out_dtype=dtype)
    return x.to(dtype) @ weight.to(dtype)
