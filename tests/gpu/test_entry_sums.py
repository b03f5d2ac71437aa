"""Sums over entries on a GPU: pruned layers equal dense ones, and captured graphs read their values in place."""

import pytest
import torch
from torch import nn

import pumice as pm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False"),
]
LAYERS = {
    "1x1": ({"kernel_size": 1}, 16),
    "1x1, odd": ({"kernel_size": 1}, 7),
    "1x1, strided": ({"kernel_size": 1, "stride": 2}, 14),
    "3x3": ({"kernel_size": 3, "padding": 1}, 14),
    "3x3, strided": ({"kernel_size": 3, "padding": 1, "stride": 2}, 15),
    "7x7, dilated": ({"kernel_size": 7, "padding": 6, "dilation": 2}, 20),
    "9x9": ({"kernel_size": 9, "padding": 4}, 20),
}


def layers(name, dtype, share=0.1):
    """(dense, pruned) of the same weights."""
    torch.manual_seed(0)
    conv = nn.Conv2d(24, 40, bias=False, **LAYERS[name][0]).to("cuda", dtype)
    with torch.no_grad():
        conv.weight.mul_(torch.rand_like(conv.weight) < share)
    return conv, pm.nn.PrunedConv2d.from_dense(conv)


@pytest.mark.parametrize("images", [1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_pruned_layers(name, dtype, images):
    conv, layer = layers(name, dtype)
    x = torch.randn(images, 24, LAYERS[name][1], LAYERS[name][1], device="cuda", dtype=dtype, requires_grad=True)
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    wanted = conv.double()(x.double())
    got = layer(x)
    assert got.dtype == dtype
    assert (got.double() - wanted).abs().max() <= near * wanted.abs().max()
    if (dtype, images) != (torch.float32, 3):
        return
    grad = torch.randn_like(wanted).to(dtype)
    ours, mine = torch.autograd.grad(got, [x, layer.values], grad)
    theirs, whole = torch.autograd.grad(wanted, [x, conv.weight], grad.double())
    assert (ours.double() - theirs).abs().max() <= near * theirs.abs().max()
    assert (mine.double() - whole[layer.mask]).abs().max() <= 2 * near * whole.abs().max()


@pytest.mark.parametrize("name", ["1x1", "3x3"])
def test_entries_are_the_default(name):
    _, layer = layers(name, torch.float32)
    x = torch.randn(1, 24, 16, 16, device="cuda")
    text = "O[n,m,p,q] = I[n,c,p,q] * F[m,c]" if name == "1x1" else "O[n,m,p,q] = I[n,c,p+r,q+s] * F[m,c,r,s]"
    told = pm.compile_einsum(text, {"F": "(m c):C" if name == "1x1" else "(m c r s):C"}).explain(I=x, F=layer._filter())
    assert ": entries, estimated" in told


@torch.no_grad()
def test_a_graph_reads_values_in_place():
    conv, layer = layers("3x3", torch.float32)
    x = torch.randn(1, 24, 14, 14, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    layer.values.mul_(3)
    graph.replay()
    torch.testing.assert_close(y, 3 * conv.double()(x.double()).float(), rtol=1e-4, atol=1e-4)
