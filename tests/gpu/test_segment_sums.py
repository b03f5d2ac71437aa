"""Sparse times dense over segments on a GPU: equal to float64, call after call, on other streams and in graphs."""

import pytest
import torch

import pumice as pm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False"),
]
TEXT = "C[m,n] = A[m,k] * B[k,n]"
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


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


def near(got, dense, b, dtype):
    want = dense.double() @ b.double()
    assert (got.double() - want).abs().max() <= NEAR[dtype] * want.abs().max()


@pytest.mark.parametrize("width", [128, 96, 72, 9])
@pytest.mark.parametrize("dtype", NEAR)
def test_calls_again_and_with_other_operands(dtype, width):
    dense, sparse, b = made(dtype, width=width)
    f = pm.compile_einsum(TEXT, {"A": "CSR"}, lowering="segments")
    for factor in (b, b, 2 * b, torch.randn_like(b)):
        near(f(A=sparse, B=factor), dense, factor, dtype)
    # A layout of its own, and an address that is not aligned.
    near(f(A=sparse, B=b.t().contiguous().t()), dense, b, dtype)
    shifted = torch.empty(b.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(b).copy_(b)
    for _ in range(3):
        near(f(A=sparse, B=shifted), dense, b, dtype)
    with torch.inference_mode():
        near(f(A=sparse, B=b), dense, b, dtype)


def test_values_are_read_where_they_are():
    dense, sparse, b = made(torch.float32)
    f = pm.compile_einsum(TEXT, {"A": "CSR"})
    for _ in range(3):
        f(A=sparse, B=b)
    sparse.parts[0].values.mul_(3)
    near(f(A=sparse, B=b), 3 * dense, b, torch.float32)


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
    near(found[0], dense, b, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f(A=sparse, B=b)
    for scale in (1, 2):
        b.mul_(scale)
        graph.replay()
        near(out, dense, b, torch.float32)
