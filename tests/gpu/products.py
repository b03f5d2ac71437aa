"""Sparse times dense on a GPU, beside float64."""

import torch

TEXT = "C[m,n] = A[m,k] * B[k,n]"
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def near(got, dense, b):
    """Fail unless `got` is dense @ b."""
    want = dense.double() @ b.double()
    assert (got.double() - want).abs().max() <= NEAR[b.dtype] * want.abs().max()


def near_call_after_call(f, sparse, dense, b):
    """Fail unless f is the product for other values, a layout of its own, and an address that is not aligned."""
    for factor in (b, b, 2 * b, torch.randn_like(b), b.t().contiguous().t()):
        near(f(A=sparse, B=factor), dense, factor)
    shifted = torch.empty(b.numel() + 1, device="cuda", dtype=b.dtype)[1:].view_as(b).copy_(b)
    for _ in range(3):
        near(f(A=sparse, B=shifted), dense, b)


def near_in_a_graph(f, sparse, dense, b):
    """Fail unless f in a graph is the product for values that were written since. Returns the last."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f(A=sparse, B=b)
    for scale in (1, 2):
        b.mul_(scale)
        graph.replay()
        near(out, dense, b)
    return out
