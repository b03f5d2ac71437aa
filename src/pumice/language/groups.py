"""Groups of indices on one axis, `O[(n,p,q),m]`: the statement over operands that have an axis for each index."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from pumice.errors import ShapeError
from pumice.language.nodes import Statement, accesses_of


class Groups(NamedTuple):
    """text: the statement without groups. axes: by operand with groups, the indices on each of its axes, () on one that
    holds another expression. ranges: declared ends of ranges. places: (index, operand, axis) where an index is alone on
    an axis of an operand without groups."""

    text: str
    axes: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    ranges: tuple[tuple[str, int], ...]
    places: tuple[tuple[str, str, int], ...]

    @staticmethod
    def of(statement: Statement) -> Groups:
        fused, axes, places = dict(statement.fused), dict[str, tuple[tuple[str, ...], ...]](), []
        for access in accesses_of(statement):
            names = [expression.bare or "" for expression in access.indices]
            if access.name in fused and access.name not in axes:
                rest = iter(names)
                counted = [[next(rest) for _ in range(count)] for count in fused[access.name]]
                axes[access.name] = tuple(tuple(n for n in names if n) for names in counted)
            elif access.name not in fused:
                places += [(name, access.name, axis) for axis, name in enumerate(names) if name]
        ranges = tuple((name, extent.stop) for name, extent in statement.ranges)
        return Groups(str(replace(statement, fused=())), tuple(axes.items()), ranges, tuple(places))

    def extents(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The extent of each index in a group, from the shapes of operands. Raises ShapeError if they do not tell."""
        found = dict(self.ranges)
        found.update((name, shapes[operand][axis]) for name, operand, axis in self.places if operand in shapes)
        members = [(x, n, names) for x, axes in self.axes if x in shapes for n, names in enumerate(axes) if names]
        for _ in members:
            for operand, axis, names in members:
                left = [name for name in names if name not in found]
                if len(left) == 1:
                    known = math.prod([found[name] for name in names if name != left[0]])
                    found[left[0]] = shapes[operand][axis] // max(1, known)
        for operand, axis, names in members:
            self._check(found, names, f"axis {axis} of {operand}", shapes[operand][axis])
        return found

    def _check(self, found: Mapping[str, int], names: Sequence[str], where: str, extent: int) -> None:
        if left := [name for name in names if name not in found]:
            hint = f"declare it, for instance `; {left[0]}:10`"
            raise ShapeError(f"{', '.join(left)} in the group ({','.join(names)}) on {where} has no size; {hint}")
        product = math.prod([found[name] for name in names])
        if product != extent:
            sizes = " * ".join(f"{name} {found[name]}" for name in names)
            raise ShapeError(
                f"{where} has extent {extent}, expected {product}: the group ({','.join(names)}) has {sizes}"
            )

    def shape(self, operand: str, shape: Sequence[int], extents: Mapping[str, int]) -> list[int]:
        """The shape of an operand with an axis for each index."""
        axes = dict(self.axes)[operand]
        return [n for axis, names in enumerate(axes) for n in ([extents[x] for x in names] if names else [shape[axis]])]
