"""Random statements over sparse operands against the oracle's loops, gradients against differences, and the generated C
under sanitizers."""

import pytest
import sanitized
import torch
from einsum_sparse_fuzz import check, check_gradients, differentiable, random_sparse_case
from wide import beyond

import pumice as pm

CASES = 60


@pytest.mark.parametrize("first", beyond(1, range(0, CASES, 30)))
def test_the_oracle_agrees(first):
    found = [check(random_sparse_case(seed)) for seed in range(first, first + 30)]
    assert found.count("right") > 18


def test_gradients_are_differences():
    cases = [case for case in map(random_sparse_case, range(1000, 1060)) if differentiable(case)]
    right = [case for case in cases[:8] if check(case) == "right"]
    assert len(right) > 2
    for case in right[:3]:
        check_gradients(case)


def test_a_product_of_sparse_operands_that_is_a_scalar():
    a, b = torch.rand(4, 3).double(), torch.rand(4, 3, 2).double()
    stored = {"A": pm.sparse(a, "m:U k:C"), "B": pm.sparse(b, "(m k n):C")}
    text = "O = A[m,k] * B[m,k,n] * D[m,n]"
    d = pm.sparse(torch.ones(4, 2).double(), "(m n):C")
    torch.testing.assert_close(pm.einsum(text, **stored, D=d), (a[..., None] * b).sum())


@pytest.mark.skipif(sanitized.runtime() is None, reason="gcc's AddressSanitizer is not here")
def test_sanitizers_report_nothing():
    assert sanitized.run(-1).returncode != 0, "a write after the end of a tensor is not seen"
    done = sanitized.run(60)
    assert done.returncode == 0, done.stderr[-3000:]
