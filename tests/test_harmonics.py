"""Irreps, Clebsch-Gordan coefficients, spherical harmonics: algebra, equivariance, and e3nn where it is installed."""

import math

import numpy as np
import pytest
import torch
from harmonics import generators, wigner

from pumice.errors import OptionError, ShapeError
from pumice.ops import Irreps, clebsch_gordan, spherical_harmonics

PATHS = [(a, b, c) for a in range(4) for b in range(4) for c in range(abs(a - b), min(a + b, 3) + 1)]
HIGH = [(6, 6, 6), (5, 3, 6), (2, 4, 5), (6, 1, 5), (4, 4, 0)]
AXES = [0.3, -1.1, 0.7]


def directions(count=7, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 3)))


# Coefficients
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(4))
def test_coefficients_of_two_degrees_are_an_orthogonal_matrix(a, b):
    parts = [clebsch_gordan(a, b, c) * np.sqrt(2 * c + 1) for c in range(abs(a - b), a + b + 1)]
    matrix = np.concatenate(parts, axis=2).reshape((2 * a + 1) * (2 * b + 1), -1)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-12)


@pytest.mark.parametrize("degree", range(1, 7))
def test_generators_are_those_of_rotations(degree):
    """The commutators of rotations, and l(l+1): of the coefficients of (l, 1, l), scaled by one sign."""
    x, y, z = generators(degree)
    np.testing.assert_allclose(x @ y - y @ x, z, atol=1e-12)
    np.testing.assert_allclose(z @ x - x @ z, y, atol=1e-12)
    np.testing.assert_allclose(-(x @ x + y @ y + z @ z), degree * (degree + 1) * np.eye(2 * degree + 1), atol=1e-11)


@pytest.mark.parametrize("path", PATHS + HIGH)
def test_every_path_is_equivariant(path):
    given, (a, b, c) = clebsch_gordan(*path), (wigner(degree, AXES) for degree in path)
    assert math.isclose((given**2).sum(), 1, rel_tol=1e-12) and not given.flags.writeable
    np.testing.assert_allclose(np.einsum("ijk,ix,jy,kz->xyz", given, a, b, c), given, atol=1e-11)


@pytest.mark.parametrize("path", [(1, 1, 3), (0, 2, 1), (-1, 0, 0)])
def test_degrees_that_do_not_couple_are_refused(path):
    with pytest.raises(OptionError, match=f"couple to .*, found {path[2]}"):
        clebsch_gordan(*path)


def test_recoupling_keeps_the_norm():
    """(a b) c and a (b c), each summed over what is between, are two orthonormal bases of the same couplings."""
    a, b, c, d = 1, 2, 1, 2
    left, right = [], []
    for e in range(abs(a - b), a + b + 1):
        if abs(e - c) <= d <= e + c:
            scale = math.sqrt((2 * e + 1) * (2 * d + 1))
            left.append(scale * np.einsum("ije,ekd->ijkd", clebsch_gordan(a, b, e), clebsch_gordan(e, c, d)))
    for f in range(abs(b - c), b + c + 1):
        if abs(a - f) <= d <= a + f:
            scale = math.sqrt((2 * f + 1) * (2 * d + 1))
            right.append(scale * np.einsum("jkf,ifd->ijkd", clebsch_gordan(b, c, f), clebsch_gordan(a, f, d)))
    overlap = np.einsum("eijkd,fijkd->ef", np.stack(left), np.stack(right)) / (2 * d + 1)
    assert len(left) == len(right) == 3
    np.testing.assert_allclose(overlap @ overlap.T, np.eye(3), atol=1e-12)


# Harmonics
def test_low_degrees_are_the_known_polynomials():
    x, y, z = (v := directions()).T
    expected = [torch.ones_like(x), *(math.sqrt(3) * v.T)]
    expected += [math.sqrt(15) * x * z, math.sqrt(15) * x * y, math.sqrt(5) * (y**2 - (x**2 + z**2) / 2)]
    expected += [math.sqrt(15) * y * z, math.sqrt(15) / 2 * (z**2 - x**2)]
    found = spherical_harmonics([0, 1, 2], v, False, "component")
    torch.testing.assert_close(found, torch.stack(expected, 1), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("degree", range(7))
def test_harmonics_turn_with_their_vectors(degree):
    v = directions()
    turned = v @ torch.from_numpy(wigner(1, AXES)).T
    expected = spherical_harmonics(degree, v, True) @ torch.from_numpy(wigner(degree, AXES)).T
    torch.testing.assert_close(spherical_harmonics(degree, turned, True), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("degree", range(1, 7))
def test_products_of_harmonics_are_harmonics(degree):
    v = directions()
    one, other = spherical_harmonics(degree, v, True, "norm"), spherical_harmonics(2, v, True, "norm")
    for result in range(abs(degree - 2), min(degree + 2, 6) + 1, 2):
        product = torch.einsum("vi,vj,ijk->vk", one, other, torch.tensor(clebsch_gordan(degree, 2, result)))
        product = product / product.norm(dim=1, keepdim=True)
        # Up to a sign, the same for all vectors.
        overlap = (product * spherical_harmonics(result, v, True, "norm")).sum(1)
        torch.testing.assert_close(overlap.abs(), torch.ones(len(v), dtype=v.dtype))
        assert len(overlap.sign().unique()) == 1


def test_normalizations():
    """The squared norms on the sphere, and orthonormality by a quadrature that is exact for these degrees."""
    v, degrees = directions(), list(range(7))
    for name, expected in (("component", lambda n: 2 * n + 1), ("norm", lambda n: 1)):
        parts = spherical_harmonics(degrees, 3 * v, True, name).split([2 * n + 1 for n in degrees], 1)
        for degree, part in zip(degrees, parts, strict=True):
            torch.testing.assert_close(part.square().sum(1), torch.full((7,), float(expected(degree))).double())
    nodes, weights = np.polynomial.legendre.leggauss(8)
    angles = np.arange(16) * 2 * np.pi / 16
    ring = np.sqrt(1 - nodes[:, None] ** 2)
    points = np.stack([ring * np.cos(angles), ring * np.sin(angles), nodes[:, None] + 0 * angles], -1).reshape(-1, 3)
    y = spherical_harmonics(degrees, torch.from_numpy(points), False, "integral").numpy()
    gram = np.einsum("p,pi,pj->ij", np.repeat(weights, 16) * 2 * np.pi / 16, y, y)
    np.testing.assert_allclose(gram, np.eye(49), atol=1e-12)


def test_degrees_may_be_irreps_in_any_order():
    v = directions()
    found = spherical_harmonics("2e + 2x1o", v, False)
    parts = [spherical_harmonics(degree, v, False) for degree in (2, 1, 1)]
    assert torch.equal(found, torch.cat(parts, 1)) and spherical_harmonics([], v, True).shape == (7, 0)


def test_harmonics_are_differentiable_twice_and_compiled():
    v = directions(3).requires_grad_()

    def run(v):
        return spherical_harmonics([0, 1, 2, 3], v, True, "component")

    assert torch.autograd.gradcheck(run, v) and torch.autograd.gradgradcheck(run, v)
    compiled = torch.compile(lambda v: run(v) + run(2 * v), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(v), 2 * run(v))
    assert run(v.detach().float()).dtype == torch.float32


@pytest.mark.parametrize(
    "given, error, text",
    [
        ((1, torch.ones(2), True), ShapeError, "vectors"),
        ((1, torch.ones(3), True, "unit"), OptionError, "'unit' is unknown; there are component"),
        (("1e", torch.ones(3), True), OptionError, "parity"),
    ],
)
def test_harmonics_refuse(given, error, text):
    with pytest.raises(error, match=text):
        spherical_harmonics(*given)


def test_gradients_after_inference_mode():
    # Degrees of no other test: tables are kept.
    v = directions().float()
    with torch.inference_mode():
        spherical_harmonics([8, 9], v, normalize=True)
    spherical_harmonics([8, 9], v.requires_grad_(), normalize=True).sum().backward()


# Irreps
def test_irreps_are_read_and_written():
    found = Irreps("16x0e + 8x1o+2e")
    assert str(found) == "16x0e+8x1o+1x2e" and found.dim == 16 + 24 + 5 and Irreps(str(found)) == found
    assert found.slices() == [slice(0, 16), slice(16, 40), slice(40, 45)] and repr(Irreps("")) == "Irreps('')"
    assert Irreps([(16, (0, 1)), (8, (1, -1)), (1, (2, 1))]) == found == Irreps(found)
    assert str(Irreps.harmonics(2)) == "1x0e+1x1o+1x2e"


@pytest.mark.parametrize("text", ["16x0", "x0e", "0e,1o", "0e++1o x", "-1x0e"])
def test_other_notations_are_refused(text):
    with pytest.raises(OptionError, match="16x0e"):
        Irreps(text)


# e3nn
def test_e3nn_has_the_same():
    o3 = pytest.importorskip("e3nn.o3")
    for path in PATHS + HIGH:
        np.testing.assert_allclose(clebsch_gordan(*path), o3.wigner_3j(*path, dtype=torch.float64).numpy(), atol=1e-14)
    v = directions()
    for normalization in ("component", "integral", "norm"):
        for normalize in (False, True):
            given = [*range(7)], v, normalize, normalization
            expected = o3.spherical_harmonics(*given)
            torch.testing.assert_close(spherical_harmonics(*given), expected, atol=1e-12, rtol=1e-11)
    assert Irreps(o3.Irreps("3x0e + 2x1o")) == Irreps("3x0e + 2x1o")
