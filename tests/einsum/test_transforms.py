"""torch.func and forward mode pass through einsums: they take the lowering that is made of torch's own operators."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import pumice as pm
from pumice.testing import random_tensor

A = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
B = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ONES = torch.ones_like(A)


def product(a):
    return pm.einsum("C[i,n] = A[i,k] * B[k,n]", A=a, B=B)


def test_jvp():
    value, tangent = torch.func.jvp(product, (A,), (ONES,))
    torch.testing.assert_close(value, A @ B)
    torch.testing.assert_close(tangent, ONES @ B)


def test_dual_numbers():
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(product(forward_ad.make_dual(A, ONES))).tangent
    torch.testing.assert_close(tangent, ONES @ B)


def test_grad_and_jacrev():
    grad = torch.func.grad(lambda a: product(a).square().sum())(A)
    torch.testing.assert_close(grad, 2 * (A @ B) @ B.t())
    assert torch.func.jacrev(product)(A).shape == (4, 3, 4, 5)


def test_vmap():
    batch = torch.stack([A, 2 * A])
    torch.testing.assert_close(torch.func.vmap(product)(batch), batch @ B)


@pytest.mark.parametrize("text", ["CSR", "m:C k:G2", "m:U k:C m:B2 k:B2"])
def test_grad_beside_a_sparse_operand(text):
    s = pm.sparse(A, text)
    grad = torch.func.grad(lambda b: pm.einsum("C[i,n] = A[i,k] * B[k,n]", A=s, B=b).sum())(B)
    torch.testing.assert_close(grad, A.sum(0)[:, None].expand(5, 3))


def test_the_tangent_of_a_convolution():
    x = random_tensor(40, 3, 3, dtype=torch.float64)
    weight = torch.randn(2, 3, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    step = torch.ones_like(weight)
    value, tangent = torch.func.jvp(lambda w: pm.ops.conv(x, w).feats, (weight,), (step,))
    torch.testing.assert_close(value, pm.ops.conv(x, weight).feats)
    torch.testing.assert_close(tangent, pm.ops.conv(x, step).feats)
