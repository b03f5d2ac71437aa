"""Real spherical harmonics and the coefficients by which they couple.

Both are in e3nn's basis: the components of degree 1 are x, y, z. Of higher degrees, m = -l .. l are the usual real
harmonics about the y axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import factorial

import numpy as np
import torch
from torch import Tensor

from pumice.errors import OptionError, ShapeError
from pumice.ops.irreps import Irreps
from pumice.runtime.launch import cached_device_constant

NORMALIZATIONS = ("component", "integral", "norm")


def spherical_harmonics(
    degrees: int | Sequence[int] | str | Irreps, x: Tensor, normalize: bool, normalization: str = "integral"
) -> Tensor:
    """Real spherical harmonics of vectors: [..., 3] -> [..., sum of 2l+1], differentiable any number of times.

        Y_l = Y_(l-1) (x) Y_1, the coupling of highest degree, scaled;  |x|^l factors out unless x is normalized

    degrees: one, several, or irreps such as "1x0e + 1x1o". normalize: of x/|x|. normalization, on the unit sphere:
    "component": |Y_l|^2 = 2l+1; "norm": |Y_l| = 1; "integral": the integral of each squared component is 1.
    Raises OptionError for irreps that are no harmonics and unknown normalizations, ShapeError for other axes.

    Source: e3nn's conventions (Geiger and Smidt, section 4.2); the recursion is the coupling of the highest weight.
    """
    wanted = _degrees(degrees)
    OptionError.check("normalization", normalization, NORMALIZATIONS)
    if x.shape[-1:] != (3,):
        raise ShapeError(f"expected vectors [..., 3], found {list(x.shape)}")
    if normalize:
        x = torch.nn.functional.normalize(x, dim=-1)
    found = [torch.ones_like(x[..., :1])]
    for degree in range(1, max(wanted, default=0) + 1):
        pairs = (found[-1][..., :, None] * x[..., None, :]).flatten(-2)
        found.append(pairs @ _raising(degree, x.dtype, x.device) if degree > 1 else x)
    return torch.cat([x[..., :0], *(found[degree] * _scale(degree, normalization) for degree in wanted)], -1)


def _degrees(given: int | Sequence[int] | str | Irreps) -> list[int]:
    if isinstance(given, int):
        return [given]
    if not isinstance(given, str | Irreps):
        return [*given]
    irreps = Irreps(given)
    if any(each.parity != (-1) ** each.degree for each in irreps):
        raise OptionError(f"spherical harmonics of degree l have the parity (-1)^l, found {irreps}")
    return [each.degree for each in irreps for _ in range(each.mul)]


def _scale(degree: int, normalization: str) -> float:
    """The norm of Y_l on the unit sphere."""
    return {
        "norm": 1.0,
        "component": math.sqrt(2 * degree + 1),
        "integral": math.sqrt((2 * degree + 1) / (4 * math.pi)),
    }[normalization]


@cached_device_constant(64)
def _raising(degree: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[(2l-1) * 3, 2l+1]: Y_(l-1) (x) Y_1 -> Y_l, all of norm 1 on the unit sphere."""
    return torch.tensor(_raising_rows(degree), dtype=dtype, device=device)


def _raising_rows(degree: int) -> tuple[tuple[float, ...], ...]:
    table = clebsch_gordan(degree - 1, 1, degree)
    pole = np.array([0.0, 1.0, 0.0])
    before = pole
    for step in range(2, degree):
        before = _unit(np.einsum("i,j,ijk->k", before, pole, clebsch_gordan(step - 1, 1, step)))
    norm = np.linalg.norm(np.einsum("i,j,ijk->k", before, pole, table))
    return tuple(map(tuple, (table.reshape(-1, 2 * degree + 1) / norm).tolist()))


# A constant of compiled code: numpy is not traced.
_raising_rows._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


@lru_cache(maxsize=512)
def clebsch_gordan(a: int, b: int, c: int) -> np.ndarray:
    """The invariant tensor of three degrees in the real basis, float64 [2a+1, 2b+1, 2c+1], of norm 1.

        sum over x, y of clebsch_gordan(a, b, c)[x, y, z] * u[x] * v[y]      turns as degree c if u, v turn as a, b

    Raises OptionError if the product of degrees a and b does not contain c.

    Source: Racah's formula, with rational sums; the basis is e3nn's (its wigner_3j).
    """
    if min(a, b) < 0 or not abs(a - b) <= c <= a + b:
        raise OptionError(f"degrees {a} and {b} couple to {abs(a - b)} to {a + b}, found {c}")
    bases = [_real_basis(degree) for degree in (a, b, c)]
    found = np.einsum("xi,yj,zk,xyz->ijk", bases[0], bases[1], bases[2].conj(), _complex(a, b, c)).real
    # Rounding errors must not count as non-zeros.
    real = _unit(np.where(np.abs(found) < 1e-12, 0.0, found))
    real.flags.writeable = False
    return real


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
    scale = Fraction((2 * c + 1) * f(c + a - b) * f(c - a + b) * f(a + b - c), f(a + b + c + 1))
    scale *= f(c + total) * f(c - total) * f(a - m) * f(a + m) * f(b - n) * f(b + n)
    terms = Fraction(0)
    for k in range(a + b - c + 1):
        below = (k, a + b - c - k, a - m - k, b + n - k, c - b + m + k, c - a - n + k)
        if min(below) >= 0:
            terms += Fraction((-1) ** k, math.prod(map(f, below)))
    return math.sqrt(scale) * float(terms)
