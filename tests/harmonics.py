"""Rotations of irreps, by exponentials of generators."""

from collections.abc import Sequence

import numpy as np
import torch

from pumice.ops import Irreps, clebsch_gordan


def generators(degree: int) -> np.ndarray:
    """[3, 2l+1, 2l+1]: the generators about x, y, z. Those of degree 1 are the definition of rotations; the coupling
    (l, 1, l) fixes the others up to a factor, and l(l+1) that up to its sign."""
    if degree == 0:
        return np.zeros((3, 1, 1))
    found = clebsch_gordan(degree, 1, degree).transpose(1, 2, 0)
    found = found * np.sqrt(degree * (degree + 1) * (2 * degree + 1))
    x, y, z = found
    return found * np.sign(((x @ y - y @ x) * z).sum())


def wigner(degree: int, axis: Sequence[float]) -> np.ndarray:
    """The matrix of the rotation about an axis by its length, of a degree."""
    return torch.matrix_exp(torch.from_numpy(np.einsum("a,aij->ij", axis, generators(degree)))).numpy()


def turned(x: torch.Tensor, irreps: Irreps, axis: Sequence[float], inverted: bool) -> torch.Tensor:
    """Features [B, irreps.dim] of the rotated, and maybe inverted, world."""
    parts = []
    for each, place in zip(irreps, irreps.slices(), strict=True):
        matrix = torch.from_numpy(wigner(each.degree, axis)) * (each.parity if inverted else 1)
        parts.append((x[:, place].unflatten(1, (-1, each.size)) @ matrix.T).flatten(1))
    return torch.cat(parts, 1)
