"""Sparse times dense over segments on a GPU: equal to float64, call after call, on other streams and in graphs."""

import pytest
import torch
from gpu.products import NEAR, TEXT, near, near_call_after_call, near_in_a_graph

import pumice as pm

pytestmark = pytest.mark.gpu


def made(dtype, longest=3000, width=128):
    """(dense, sparse, the other factor): rows of 0 to `longest` entries."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 20, (700,))
    lengths[5], lengths[300] = longest, longest // 9
    dense = torch.zeros(700, 4000, device="cuda")
    for row, length in enumerate(lengths.tolist()):
        dense[row, torch.randperm(4000)[:length]] = 1
    dense = (dense * torch.randn_like(dense)).to(dtype)
    return dense, pm.sparse(dense, "CSR"), torch.randn(4000, width, device="cuda", dtype=dtype)


@pytest.mark.parametrize("width", [128, 96, 72, 9])
@pytest.mark.parametrize("dtype", NEAR)
def test_calls_again_and_with_other_operands(dtype, width):
    dense, sparse, b = made(dtype, width=width)
    f = pm.compile_einsum(TEXT, {"A": "CSR"}, lowering="segments")
    near_call_after_call(f, sparse, dense, b)
    with torch.inference_mode():
        near(f(A=sparse, B=b), dense, b)


def test_values_are_read_where_they_are():
    dense, sparse, b = made(torch.float32)
    f = pm.compile_einsum(TEXT, {"A": "CSR"})
    for _ in range(3):
        f(A=sparse, B=b)
    sparse.parts[0].values.mul_(3)
    near(f(A=sparse, B=b), 3 * dense, b)


def test_gradients_after_plain_calls():
    dense, sparse, b = made(torch.float32)
    f = pm.compile_einsum(TEXT, {"A": "CSR"})
    for _ in range(3):
        f(A=sparse, B=b)
    b.requires_grad_()
    (grad,) = torch.autograd.grad(f(A=sparse, B=b).sum(), b)
    want = dense.double().sum(0)[:, None].expand(-1, b.shape[1])
    assert (grad.double() - want).abs().max() <= 1e-4 * want.abs().max()


def test_on_streams_and_in_a_graph():
    """Pieces of long rows are summed in a workspace of the stream, or of the graph."""
    dense, sparse, b = made(torch.float32)
    f = pm.compile_einsum(TEXT, {"A": "CSR"})
    for _ in range(3):
        f(A=sparse, B=b)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(f(A=sparse, B=b))
    torch.cuda.synchronize()
    for got in found:
        assert torch.equal(got, found[0])
    near(found[0], dense, b)
    near_in_a_graph(f, sparse, dense, b)
