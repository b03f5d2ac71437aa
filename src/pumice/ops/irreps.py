"""Irreducible representations of O(3), in e3nn's notation: "16x0e + 8x1o" are 16 scalars and 8 vectors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from pumice.errors import OptionError, ShapeError

_ITEM = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*([eo])")


class Irrep(NamedTuple):
    """`mul` copies of the representation of degree l and parity +1 (e) or -1 (o). The components of a copy are the
    orders -l to l; of a vector (1o) x, y, z."""

    mul: int
    degree: int
    parity: int

    @property
    def size(self) -> int:
        """Components of one copy."""
        return 2 * self.degree + 1

    @property
    def dim(self) -> int:
        return self.mul * self.size

    def couples(self, other: Irrep, result: Irrep) -> bool:
        """True if the product of self and other contains result."""
        near = abs(self.degree - other.degree) <= result.degree <= self.degree + other.degree
        return near and self.parity * other.parity == result.parity

    def __str__(self) -> str:
        return f"{self.mul}x{self.degree}{'e' if self.parity == 1 else 'o'}"


class Irreps(tuple[Irrep, ...]):
    """A direct sum of representations, and the layout of the last axis of a tensor: one after the other, each as
    [mul, 2l+1] ("mul_ir").

        Irreps("16x0e + 8x1o") == Irreps([(16, (0, 1)), (8, (1, -1))])      Irreps.harmonics(2) is 1x0e+1x1o+1x2e

    Raises OptionError for text in another notation.

    Source: Geiger and Smidt, "e3nn: Euclidean Neural Networks" (section 3), for notation and layout.
    """

    def __new__(cls, given: str | Iterable[tuple[Any, ...]]) -> Irreps:
        return super().__new__(cls, _parsed(given) if isinstance(given, str) else [_item(each) for each in given])

    @classmethod
    def harmonics(cls, highest: int) -> Irreps:
        """The spherical harmonics of degrees 0 to `highest`."""
        return cls([Irrep(1, degree, (-1) ** degree) for degree in range(highest + 1)])

    @property
    def dim(self) -> int:
        return sum(each.dim for each in self)

    def slices(self) -> list[slice]:
        """Where each representation lies on the axis."""
        ends = [sum(each.dim for each in self[: n + 1]) for n in range(len(self))]
        return [slice(end - each.dim, end) for end, each in zip(ends, self, strict=True)]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise ShapeError unless the last axis of a tensor of this name and shape has these representations."""
        if not shape or shape[-1] != self.dim:
            raise ShapeError(f"{name} is of irreps {self}: expected [..., {self.dim}], found {list(shape)}")

    def __str__(self) -> str:
        return "+".join(map(str, self))

    def __repr__(self) -> str:
        return f"Irreps({str(self)!r})"


def _parsed(text: str) -> list[Irrep]:
    items = [_ITEM.fullmatch(part.strip()) for part in text.split("+") if text.strip()]
    if None in items:
        raise OptionError(f"irreps are written as '16x0e + 8x1o', found {text!r}")
    return [Irrep(int(m[1] or 1), int(m[2]), 1 if m[3] == "e" else -1) for m in items if m]


def _item(given: tuple) -> Irrep:
    """An Irrep, or e3nn's (mul, (degree, parity))."""
    if isinstance(given, Irrep):
        return given
    mul, (degree, parity) = given
    return Irrep(int(mul), int(degree), int(parity))
