"""Statements in the form of a loop nest: dense indices, and entries, the points of all indices inside index arrays.

    O[n,M[e],p,q] = I[n,C[e],p+R[e]-1,q+S[e]-1] * V[e]        entry e: M[e]; C[e], R[e]-1, S[e]-1; e

Axes of the target get indices of their own (a target p+R[e]-1 becomes t, and p is t-R[e]+1); strided axes of operands
become views; indices that are adjacent in every access become one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.bind import BoundStatement
from pumice.language.derive import fresh, names_of
from pumice.language.nodes import Access, Affine, Index, Statement, affine, arrays_of, indices_of, substitute

MOST_ENTRIES = 1 << 26  # Joint points of the positions
MOST_ELEMENTS = 1 << 30  # Of an operand with its padding: offsets are 32-bit


class NestAxis(NamedTuple):
    """An axis of an access: dense indices with coefficients, and a constant or a part that depends on the entry."""

    dense: tuple[tuple[int, str], ...]
    constant: int
    entry: Affine | None

    def reach(self, extents: Mapping[str, int]) -> tuple[int, int]:
        """(minimum, maximum) that the dense indices add."""
        ends = [c * (extents[name] - 1) for c, name in self.dense]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0)

    def ends(self, part: Tensor | None) -> tuple[int, int]:
        """(minimum, maximum) of the entries' part, or of the constant if there is none."""
        return (self.constant, self.constant) if part is None else (int(part.min()), int(part.max()))

    def pads(self, part: Tensor | None, size: int, extents: Mapping[str, int]) -> tuple[int, int]:
        """(before, after): zeros around an axis of `size` points that its windows reach."""
        (before, after), (low, high) = self.reach(extents), self.ends(part)
        return max(0, -low - before), max(0, high + after - size + 1)

    @property
    def bare(self) -> str | None:
        """The only dense index, if there is nothing else."""
        plain = self.entry is None and not self.constant and len(self.dense) == 1 and self.dense[0][0] == 1
        return self.dense[0][1] if plain else None


@dataclass(frozen=True)
class View:
    """An access and how its operand is viewed. slices: (start, count, step) of the operand's axes, or None; pieces:
    shape of that part; shape: of the view, whose axes may join several of the operand's."""

    name: str
    axes: tuple[NestAxis, ...]
    slices: tuple[tuple[int, int, int] | None, ...]
    pieces: tuple[int, ...]
    shape: tuple[int, ...]

    def cut(self, x: Tensor) -> Tensor:
        """The operand's part that is read, before axes are joined."""
        if self.slices == (None,) * len(self.slices):
            return x
        return x[tuple(slice(None) if s is None else slice(s[0], s[0] + s[1] * s[2], s[2]) for s in self.slices)]


@dataclass(frozen=True, eq=False)
class Form:
    """A normalised statement: its accesses, the target's first; extents of dense indices and of positions; names of the
    index arrays; "sum", "max", "min" or "mean"."""

    views: tuple[View, ...]
    extents: tuple[tuple[str, int], ...]
    positions: tuple[tuple[str, int], ...]
    arrays: tuple[str, ...]
    reduction: str

    @property
    def reduced(self) -> list[str]:
        """Dense indices that the target lacks."""
        out = {name for axis in self.views[0].axes for _, name in axis.dense}
        return [name for name, _ in self.extents if name not in out]


class Fusing(NamedTuple):
    """Groups of dense indices that may be joined within themselves only, and those that are not joined at all. sliced:
    strided axes of operands become views."""

    groups: tuple[tuple[str, ...], ...] = ()
    apart: frozenset[str] = frozenset()
    sliced: bool = True

    def allows(self, joined: str) -> bool:
        names = joined.split(".")
        if any({*names} & {*group} for group in self.groups):
            return any({*names} <= {*group} for group in self.groups)
        return not self.apart & {*names}


FUSED = Fusing()  # As far as possible


@lru_cache(maxsize=1024)
def normalized(
    bound: BoundStatement, shapes: tuple[tuple[str, tuple[int, ...]], ...], fusing: Fusing = FUSED
) -> Form | str:
    """The form of a statement, or the reason why it has none. shapes: of the operands; fusing: which adjacent dense
    indices become one."""
    statement, known = bound.statement, dict(shapes)
    if why := _unsupported(statement, bound):
        return why
    listed, extents = positions_of(statement), dict(bound.extents)
    statement = _with_target_indices(statement, extents, bound.shape, known)
    positions = (*listed, *_of_windows(statement, listed, extents))
    factors = statement.terms[0].factors
    accesses = [statement.target, *(f for f in factors if isinstance(f, Access))]
    given = [bound.shape, *(known[access.name] for access in accesses[1:])]
    views = [
        _view(a, s, axes_of(a, positions), extents if fusing.sliced else {})
        for a, s in zip(accesses, given, strict=True)
    ]
    if any(axis.bare is None and axis.dense for axis in axes_of(statement.target, positions)):
        return "the target is written through windows"
    if statement.reduction != "sum" and not (
        _is_filled(views[0], extents) and all(_is_inside(v, extents) for v in views)
    ):
        return f"a {statement.reduction} over windows, or into parts of the target"
    _join(views, extents, fusing)
    dense = {name for view in views for axis in view.axes for _, name in axis.dense}
    if max(math.prod(padded_sizes(view, extents)) for view in views) > MOST_ELEMENTS:
        return "an operand is too large with the zeros that its windows reach"
    places = tuple((name, extents[name]) for name in positions)
    arrays = tuple(dict.fromkeys(array.name for array in arrays_of(statement)))
    most = min(MOST_ENTRIES, 2 * sum(math.prod(known[name]) for name in arrays))
    if math.prod(extents[name] for name in listed) > most:
        return "index arrays of different positions meet"
    return Form(
        tuple(views), tuple((n, s) for n, s in extents.items() if n in dense), places, arrays, statement.reduction
    )


def _is_inside(view: View, extents: Mapping[str, int]) -> bool:
    """True if no index reaches beyond the view: zeros that a window reads there count only in sums."""
    axes = zip(view.axes, view.shape, strict=True)
    return all(not axis.dense or (axis.bare is not None and extents[axis.bare] <= size) for axis, size in axes)


def _is_filled(target: View, extents: Mapping[str, int]) -> bool:
    """True if dense indices reach all of the target's axes, one each."""
    axes = {axis.bare: size for axis, size in zip(target.axes, target.shape, strict=True) if axis.dense}
    return len(axes) == sum(map(bool, (a.dense for a in target.axes))) and all(
        extents[n or ""] == axes[n] for n in axes
    )


def padded_sizes(view: View, extents: Mapping[str, int]) -> Iterator[int]:
    """Upper bounds of the sizes of a view with its padding."""
    for axis, size in zip(view.axes, view.shape, strict=True):
        low, high = axis.reach(extents)
        # A window that meets the operand begins and ends within its length of it.
        yield size if axis.bare else size + 2 * (high - low) + abs(axis.constant)


def _unsupported(statement: Statement, bound: BoundStatement) -> str | None:
    if len(statement.terms) != 1:
        return "it has several terms"
    if statement.reduction in ("max", "min") and statement.terms[0].coefficient != 1:
        return "it is the maximum or minimum of a multiple"
    factors = statement.terms[0].factors
    if not factors or not all(isinstance(factor, Access) for factor in factors):
        return "it has conditions, or no factors"
    if not arrays_of(statement):
        return "it has no index arrays"
    if any(extent.start for extent in bound.ranges.values()):
        return "a range does not start at 0"
    return "it is empty" if 0 in bound.extents.values() or 0 in bound.shape else None


def _with_target_indices(
    statement: Statement, extents: dict[str, int], shape: Sequence[int], known: Mapping[str, tuple[int, ...]]
) -> Statement:
    """The statement with an index for each target axis that is written through a window: p+R[e]-1 becomes t."""
    inside = positions_of(statement)
    for number, axis in enumerate(statement.target.indices):
        single = [n for n in _single(axis) if n not in inside]
        index = next((n for n in single if _spans_axis(statement, n, extents[n], known)), None)
        if axis.bare is None and index is not None:
            rest = [(-c, atom) for c, atom in axis.terms if atom != Index(index)]
            name = fresh("t", names_of(statement))
            extents[name] = shape[number]
            moved = affine([(1, Index(name)), *rest], -axis.constant)
            statement = substitute(statement, {index: moved})
    return statement


def _of_windows(statement: Statement, listed: Sequence[str], extents: Mapping[str, int]) -> tuple[str, ...]:
    """The dense indices of stored values whose points are entries as well: those that are summed, if some are of
    windows, r in I[p+r], since vectors along a window are not aligned."""
    if statement.reduction != "sum":
        return ()
    accesses = [f for f in statement.terms[0].factors if isinstance(f, Access)]
    written = {*indices_of(statement.target)}
    stored = [{*indices_of(f)} for f in accesses if {*listed} & {*indices_of(f)} and not arrays_of(f)]
    summed = [name for name in indices_of(*accesses) if name not in (*written, *listed)]
    summed = [name for name in summed if any(name in names for names in stored)]
    axes = [{*indices_of(axis)} for access in accesses for axis in access.indices]
    windows = any(axis & written and axis & {*summed} for axis in axes)
    entries = math.prod(extents[name] for name in (*listed, *summed))
    return tuple(summed) if windows and entries <= MOST_ENTRIES else ()


def _single(axis: Affine) -> list[str]:
    return [atom.name for c, atom in axis.terms if c == 1 and isinstance(atom, Index)]


def _spans_axis(statement: Statement, index: str, extent: int, known: Mapping[str, tuple[int, ...]]) -> bool:
    """True if a factor has an axis of this index alone: beyond the index's range, the factor is zero."""
    return any(
        e.bare == index and known[f.name][n] == extent
        for f in statement.terms[0].factors
        if isinstance(f, Access)
        for n, e in enumerate(f.indices)
    )


def _view(access: Access, shape: Sequence[int], axes: Sequence[NestAxis], extents: Mapping[str, int]) -> View:
    slices = tuple(_slice(axis, size, extents) if extents else None for axis, size in zip(axes, shape, strict=True))
    sizes = tuple(size if found is None else found[1] for size, found in zip(shape, slices, strict=True))
    seen = tuple(
        a if s is None else NestAxis(((1, a.dense[0][1]),), 0, None) for a, s in zip(axes, slices, strict=True)
    )
    return View(access.name, seen, slices, sizes, sizes)


def _slice(axis: NestAxis, size: int, extents: Mapping[str, int]) -> tuple[int, int, int] | None:
    """(start, count, step) if the axis is a strided range within its operand."""
    if axis.entry is not None or len(axis.dense) != 1 or axis.bare:
        return None
    ((step, name),) = axis.dense
    inside = step > 0 and axis.constant >= 0 and axis.constant + step * (extents[name] - 1) < size
    return (axis.constant, extents[name], step) if inside else None


def _join(views: list[View], extents: dict[str, int], fusing: Fusing) -> None:
    """Join dense indices that are adjacent in every access that has one of them."""
    names = [axis.bare for axis in views[0].axes]
    for first, second in zip(names, names[1:], strict=False):
        joined = f"{first}.{second}"
        if not first or not second or first == second or not fusing.allows(joined):
            continue
        if all(_adjacent(view, first, second) for view in views):
            views[:] = [_joined(view, first, joined) for view in views]
            extents[joined] = extents.pop(first) * extents.pop(second)
            return _join(views, extents, fusing)
    return None


def _adjacent(view: View, first: str, second: str) -> bool:
    uses = [(n, axis.bare) for n, axis in enumerate(view.axes) for _, name in axis.dense if name in (first, second)]
    return not uses or ([b for _, b in uses] == [first, second] and uses[1][0] == uses[0][0] + 1)


def _joined(view: View, first: str, joined: str) -> View:
    at = next((n for n, axis in enumerate(view.axes) if axis.bare == first), None)
    if at is None:
        return view

    axes = (*view.axes[:at], NestAxis(((1, joined),), 0, None), *view.axes[at + 2 :])
    return replace(view, axes=axes, shape=(*view.shape[:at], math.prod(view.shape[at : at + 2]), *view.shape[at + 2 :]))


def axes_of(access: Access, positions: Sequence[str]) -> tuple[NestAxis, ...]:
    """The axes of an access. positions: the indices inside index arrays."""
    return tuple(_axis(expression, positions) for expression in access.indices)


def _axis(expression: Affine, positions: Sequence[str]) -> NestAxis:
    dense, entry = [], []
    for coefficient, atom in expression.terms:
        if isinstance(atom, Index) and atom.name not in positions:
            dense.append((coefficient, atom.name))
        else:
            entry.append((coefficient, atom))
    if entry:
        return NestAxis(tuple(dense), 0, affine(entry, expression.constant))
    return NestAxis(tuple(dense), expression.constant, None)


def positions_of(statement: Statement) -> tuple[str, ...]:
    """The indices inside the index arrays of a statement."""
    return indices_of(*arrays_of(statement))


class EntryList:
    """The entries of a statement's index arrays that read no negative index.

    extents: of the positions, by name. `kept` and `values` have one value per joint
    point of the positions.
    """

    kept: Tensor

    def __init__(self, extents: Mapping[str, int], arrays: Mapping[str, Tensor]) -> None:
        self._arrays, sizes = arrays, tuple(extents.values())
        self.count: int = math.prod(sizes)
        self.kept = torch.ones(self.count, dtype=torch.bool, device="cpu")
        places = {
            name: torch.arange(size, device="cpu").view([-1 if k == n else 1 for k in range(len(sizes))])
            for n, (name, size) in enumerate(extents.items())
        }
        self._positions = {name: place.expand(sizes).reshape(-1) for name, place in places.items()}

    def values(self, expression: Affine, extent: int, reach: tuple[int, int] = (0, 0)) -> Tensor:
        """int64 values of an expression. Entries are kept if the value plus a number in `reach` is in [0, extent)."""
        total = torch.full((self.count,), expression.constant, device="cpu")
        for coefficient, atom in expression.terms:
            found = self._positions[atom.name] if isinstance(atom, Index) else self._read(atom)
            total = total + coefficient * found
        self.kept &= (total + reach[1] >= 0) & (total + reach[0] < extent)
        return total

    def _read(self, access: Access) -> Tensor:
        array = self._arrays[access.name]
        at = [self.values(e, size) for e, size in zip(access.indices, array.shape, strict=True)]
        # Entries that are not kept may point anywhere.
        at = [place.clamp(0, max(size - 1, 0)) for place, size in zip(at, array.shape, strict=True)]
        found = array[tuple(at)].long() if array.numel() else torch.full((self.count,), -1, device="cpu")
        self.kept &= found >= 0
        return found


EntryParts = list[Tensor | None]
"""Of an access: the part of each axis that depends on the entry, int64 [entries], None for axes without one."""


def entry_parts(form: Form, arrays: Mapping[str, Tensor]) -> list[EntryParts]:
    """The parts of all accesses, the target's first, over the entries of index arrays on the CPU. Entries whose windows
    are outside an operand everywhere are left out."""
    entries, extents = EntryList(dict(form.positions), arrays), dict(form.extents)

    def part(axis: NestAxis, size: int) -> Tensor | None:
        return None if axis.entry is None else entries.values(axis.entry, size, axis.reach(extents))

    found = [[part(axis, size) for axis, size in zip(v.axes, v.shape, strict=True)] for v in form.views]
    kept = entries.kept.nonzero()[:, 0]
    return [[None if x is None else x[kept] for x in each] for each in found]
