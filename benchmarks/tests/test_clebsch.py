"""The table of Clebsch-Gordan coefficients: counts, orthogonality, equivariance, and e3nn where it is installed."""

import numpy as np
import pytest

from benchmarks.scenes import clebsch


@pytest.mark.parametrize(
    "parity, highest, paths, nnz",
    [("O3", 1, 4, 10), ("O3", 2, 11, 83), ("O3", 3, 23, 353), ("even", 1, 5, 16), ("even", 2, 15, 137)]
    + [("even", 3, 34, 611)],
)
def test_the_counts_are_the_known_ones(parity, highest, paths, nnz):
    found = clebsch.table(highest, parity)
    assert (len(found.paths), np.count_nonzero(found.values)) == (paths, nnz)
    assert found.values.shape == ((highest + 1) ** 2,) * 3 + (paths,)


@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_coefficients_of_two_degrees_are_an_orthogonal_matrix(a, b):
    parts = [clebsch.coefficients(a, b, c) * np.sqrt(2 * c + 1) for c in range(abs(a - b), a + b + 1)]
    matrix = np.concatenate(parts, axis=2).reshape((2 * a + 1) * (2 * b + 1), -1)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-12)


def harmonics(degree, points):
    """Real spherical harmonics up to scale, found from the table alone: the highest coupling of degree by degree."""
    linear = points[:, [1, 2, 0]]  # orders -1, 0, 1 are y, z, x
    found = np.ones((len(points), 1)) if degree == 0 else linear
    for step in range(2, degree + 1):
        found = np.einsum("pi,pj,ijk->pk", found, linear, clebsch.coefficients(step - 1, 1, step))
    return found


def rotation(degree, turn):
    """The matrix by which harmonics of the degree turn."""
    points = np.random.default_rng(degree).normal(size=(40, 3))
    before, after = harmonics(degree, points), harmonics(degree, points @ turn.T)
    return np.linalg.lstsq(before, after, rcond=None)[0].T


@pytest.mark.parametrize("path", clebsch.table(3, "even").paths)
def test_every_path_is_equivariant(path):
    turn, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))
    turn *= np.sign(np.linalg.det(turn))
    a, b, c = (rotation(degree, turn) for degree in path)
    given = clebsch.coefficients(*path)
    np.testing.assert_allclose(a @ a.T, np.eye(len(a)), atol=1e-9)
    np.testing.assert_allclose(np.einsum("ijk,ix,jy,kz->xyz", given, a, b, c), given, atol=1e-9)


def test_results_of_unit_variance_inputs_have_unit_variance():
    found = clebsch.table(2)
    power = np.einsum("ijkl->i", found.normalized(1) ** 2)
    np.testing.assert_allclose(power, 1, atol=1e-12)


@pytest.mark.parametrize("path", clebsch.table(3, "even").paths)
def test_e3nn_has_the_same_coefficients(path):
    o3 = pytest.importorskip("e3nn.o3")
    np.testing.assert_allclose(clebsch.coefficients(*path), o3.wigner_3j(*path).numpy(), atol=1e-6)
