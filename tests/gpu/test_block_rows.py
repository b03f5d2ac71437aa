"""Block-sparse times dense on a GPU: equal to float64 for all blocks and widths, call after call, and in graphs."""

import pytest
import torch
from gpu.products import TEXT, near, near_call_after_call, near_in_a_graph

import pumice as pm
from pumice.lower import block_rows

pytestmark = pytest.mark.gpu


def made(dtype, sides=(32, 32), width=512, kept=0.2, format="m:C k:G m:B{} k:B{}", size=1000):
    """(dense, sparse, the other factor): blocks of these sides, a row of blocks without any, sizes that cut blocks."""
    torch.manual_seed(0)
    height, depth = sides
    there = torch.rand(-(-size // height), -(-size // depth), device="cuda") < kept
    there[0] = False
    whole = there[:, None, :, None] * torch.randn(len(there), height, there.shape[1], depth, device="cuda")
    dense = whole.reshape(len(there) * height, -1)[:size, :size].to(dtype)
    return dense, pm.sparse(dense, format.format(*sides)), torch.randn(size, width, device="cuda", dtype=dtype)


@pytest.mark.parametrize("kept", [0.03, 0.3, 0.8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sides", [(32, 32), (32, 64), (32, 128)])
def test_blocks(sides, dtype, kept):
    dense, sparse, b = made(dtype, sides, kept=kept)
    near(pm.einsum(TEXT, A=sparse, B=b, lowering="block-rows"), dense, b)


@pytest.mark.parametrize("width", [8192, 600])
@pytest.mark.parametrize("cost", [0.0, 9.0])
def test_one_or_two_rows_of_blocks(monkeypatch, cost, width):
    """Whichever number of them a program takes."""
    monkeypatch.setattr(block_rows, "_COST_OF_TWO", cost)
    monkeypatch.setattr(block_rows, "PROCESSORS", 1)
    dense, sparse, b = made(torch.float16, width=width)
    near(pm.einsum(TEXT, A=sparse, B=b, lowering="block-rows"), dense, b)


@pytest.mark.parametrize("width", [4096, 1000, 300, 72, 33, 16])
def test_calls_again_and_with_other_operands(width):
    dense, sparse, b = made(torch.float16, width=width)
    f = pm.compile_einsum(TEXT, {"A": str(sparse.format)}, lowering="block-rows")
    near_call_after_call(f, sparse, dense, b)
    sparse.parts[0].values.mul_(3)
    with torch.inference_mode():
        near(f(A=sparse, B=b), 3 * dense, b)


def test_gradients_and_a_graph():
    """By default, too, blocks are multiplied so."""
    dense, sparse, b = made(torch.float16, format="m:U k:C m:B{} k:B{}")
    f = pm.compile_einsum(TEXT, {"A": str(sparse.format)})
    assert "block-rows" in str(f.explain(A=sparse, B=b)).split("estimated")[0]
    for _ in range(3):
        f(A=sparse, B=b)
    out = near_in_a_graph(f, sparse, dense, b)
    b.requires_grad_()
    weights = torch.randn_like(out)
    (grad,) = torch.autograd.grad((f(A=sparse, B=b) * weights).sum(), b)
    near(grad, dense.t(), weights)
