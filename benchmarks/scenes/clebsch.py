"""Clebsch-Gordan coefficients of real spherical harmonics, as one sparse tensor of a tensor product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from math import factorial

import numpy as np


@dataclass(frozen=True, eq=False)
class Table:
    """CG[i,j,k,l]: coefficient of component i of the result for j of the first and k of the second factor, on path l.

    values: float64 [D, D, D, P] with D = (l_max + 1)^2; component l * l + l + m is order m of degree l. paths: (first,
    second, result) degrees, ascending, in the order of e3nn's FullyConnectedTensorProduct.
    """

    values: np.ndarray
    paths: tuple[tuple[int, int, int], ...]

    def normalized(self, channels: int) -> np.ndarray:
        """Values in e3nn's normalization (component, element): results from `channels` inputs have unit variance."""
        scale = [math.sqrt((2 * c + 1) / (channels * self._into(c))) for _, _, c in self.paths]
        return self.values * np.array(scale)

    def _into(self, degree: int) -> int:
        return sum(path[2] == degree for path in self.paths)


@lru_cache(maxsize=8)
def table(highest: int, parity: str = "O3") -> Table:
    """The table of all degrees up to `highest`.

    parity "O3": degree l has parity (-1)^l, as spherical harmonics do, so the degrees of a path have an even sum;
    "even": all degrees have parity 1. The squared coefficients of a path sum to 1.
    """
    degrees = range(highest + 1)
    paths = tuple(
        (a, b, c)
        for a in degrees
        for b in degrees
        for c in degrees
        if abs(a - b) <= c <= a + b and (parity == "even" or (a + b + c) % 2 == 0)
    )
    size = (highest + 1) ** 2
    values = np.zeros((size, size, size, len(paths)))
    for number, (a, b, c) in enumerate(paths):
        values[_span(c), _span(a), _span(b), number] = np.moveaxis(coefficients(a, b, c), 2, 0)
    return Table(values, paths)


def _span(degree: int) -> slice:
    return slice(degree * degree, (degree + 1) ** 2)


@lru_cache(maxsize=128)
def coefficients(a: int, b: int, c: int) -> np.ndarray:
    """float64 [2a+1, 2b+1, 2c+1]: the invariant tensor of three degrees in the real basis, of norm 1."""
    bases = [_real_basis(degree) for degree in (a, b, c)]
    found = np.einsum("xi,yj,zk,xyz->ijk", bases[0], bases[1], bases[2].conj(), _complex(a, b, c))
    # In these bases the result is real; rounding errors must not count as non-zeros.
    real = np.where(np.abs(found.real) < 1e-12, 0.0, found.real)
    return real / np.linalg.norm(real)


def _real_basis(degree: int) -> np.ndarray:
    """[complex order, real order]: change of basis to real harmonics, with phases that keep products real."""
    basis = np.zeros((2 * degree + 1, 2 * degree + 1), dtype=complex)
    basis[degree, degree] = 1
    half = 1 / math.sqrt(2)
    for m in range(1, degree + 1):
        sign = (-1) ** m
        basis[degree - m, degree + m], basis[degree - m, degree - m] = half, -1j * half
        basis[degree + m, degree + m], basis[degree + m, degree - m] = sign * half, 1j * sign * half
    return (-1j) ** degree * basis


def _complex(a: int, b: int, c: int) -> np.ndarray:
    """<a m b n | c m+n> of complex harmonics, [2a+1, 2b+1, 2c+1]."""
    found = np.zeros((2 * a + 1, 2 * b + 1, 2 * c + 1))
    for m in range(-a, a + 1):
        for n in range(-b, b + 1):
            if abs(m + n) <= c:
                found[a + m, b + n, c + m + n] = _racah((a, m), (b, n), c)
    return found


def _racah(first: tuple[int, int], second: tuple[int, int], c: int) -> float:
    """One coefficient by Racah's formula."""
    (a, m), (b, n), f = first, second, factorial
    total = m + n
    scale = (2 * c + 1) * f(c + a - b) * f(c - a + b) * f(a + b - c) / f(a + b + c + 1)
    scale *= f(c + total) * f(c - total) * f(a - m) * f(a + m) * f(b - n) * f(b + n)
    terms = 0.0
    for k in range(a + b - c + 1):
        below = (k, a + b - c - k, a - m - k, b + n - k, c - b + m + k, c - a - n + k)
        if min(below) >= 0:
            terms += (-1) ** k / math.prod(map(f, below))
    return math.sqrt(scale) * terms
