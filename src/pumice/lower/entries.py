"""Entries of a statement: the points of all indices inside index arrays, as offsets into its operands.

    O[n,M[e],p,q] = I[n,C[e],p+R[e]-1,q+S[e]-1] * V[e]        entry e: M[e]; C[e], R[e]-1, S[e]-1; e

What index arrays contribute to an address is one sum per entry and access. The sums are computed once per index array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pumice.language.nodes import Access, Affine, Index, Statement, affine, arrays_of, indices_of

MOST_ENTRIES = 1 << 26


class Axis(NamedTuple):
    """An axis of an access: dense indices with coefficients, and a constant or a part that depends on the entry."""

    dense: tuple[tuple[int, str], ...]
    constant: int
    entry: Affine | None

    @property
    def bare(self) -> str | None:
        """The only dense index, if there is nothing else."""
        plain = self.entry is None and not self.constant and len(self.dense) == 1 and self.dense[0][0] == 1
        return self.dense[0][1] if plain else None


def axes_of(access: Access, positions: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of an access. positions: the indices inside index arrays."""
    return tuple(_axis(expression, positions) for expression in access.indices)


def _axis(expression: Affine, positions: Sequence[str]) -> Axis:
    dense, entry = [], []
    for coefficient, atom in expression.terms:
        if isinstance(atom, Index) and atom.name not in positions:
            dense.append((coefficient, atom.name))
        else:
            entry.append((coefficient, atom))
    if entry:
        return Axis(tuple(dense), 0, affine(entry, expression.constant))
    return Axis(tuple(dense), expression.constant, None)


def positions_of(statement: Statement) -> tuple[str, ...]:
    """The indices inside the index arrays of a statement."""
    return indices_of(*arrays_of(statement))


class Entries:
    """The entries of a statement's index arrays that read no negative index.

    extents: of the positions, by name. Each list below has one value per joint point of the positions.
    """

    def __init__(self, extents: Mapping[str, int], arrays: Mapping[str, Tensor]) -> None:
        self._arrays, sizes = arrays, tuple(extents.values())
        self.count = math.prod(sizes)
        self.kept = torch.ones(self.count, dtype=torch.bool)
        self._positions = {
            name: torch.arange(size).view([-1 if k == n else 1 for k in range(len(sizes))]).expand(sizes).reshape(-1)
            for n, (name, size) in enumerate(extents.items())
        }

    def values(self, expression: Affine, extent: int | None = None) -> Tensor:
        """int64 values of an expression. extent: entries outside of [0, extent) are not kept."""
        total = torch.full((self.count,), expression.constant)
        for coefficient, atom in expression.terms:
            found = self._positions[atom.name] if isinstance(atom, Index) else self._read(atom)
            total = total + coefficient * found
        if extent is not None:
            self.kept &= (total >= 0) & (total < extent)
        return total

    def _read(self, access: Access) -> Tensor:
        array = self._arrays[access.name]
        at = [self.values(e, size) for e, size in zip(access.indices, array.shape, strict=True)]
        # Entries that are not kept may point anywhere.
        at = [place.clamp(0, max(size - 1, 0)) for place, size in zip(at, array.shape, strict=True)]
        found = array[tuple(at)].long() if array.numel() else torch.full((self.count,), -1)
        self.kept &= found >= 0
        return found
