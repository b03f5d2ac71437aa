"""Pruned layers on a GPU, over entries and over blocks: equal to dense ones; captured graphs read values in place."""

import pytest
import torch
from torch import nn

import pumice as pm
from pumice.lower import block_sums

pytestmark = pytest.mark.gpu
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


BLOCKED = {
    "1x1": {"kernel_size": 1},
    "1x1, strided": {"kernel_size": 1, "stride": 2},
    "3x3": {"kernel_size": 3, "padding": 1},
    "3x3, strided": {"kernel_size": 3, "padding": 1, "stride": 2},
}
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def in_blocks(name, dtype, sides=(32, 32)):
    """(dense, pruned) of the same weights, in random blocks at each tap."""
    torch.manual_seed(0)
    conv = nn.Conv2d(128, 96, bias=False, **BLOCKED[name]).to("cuda", dtype)
    count, channels, *taps = conv.weight.shape
    kept = (torch.rand(count // sides[0], channels // sides[1], *taps) < 0.4).cuda()
    with torch.no_grad():
        conv.weight.mul_(kept.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1))
    layer = pm.nn.PrunedConv2d.from_dense(conv)
    assert layer.blocks == sides
    return conv, layer


@pytest.mark.parametrize("sides", [(16, 16), (32, 32), (16, 32)], ids=str)
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("name", BLOCKED)
def test_layers_in_blocks(name, dtype, sides):
    conv, layer = in_blocks(name, dtype, sides)
    conv.double()
    for images in (1, 5):
        x = torch.randn(images, 128, 14, 13, device="cuda", dtype=dtype, requires_grad=True)
        wanted = conv(x.double())
        with torch.no_grad():
            for _ in range(2):
                got = layer(x)
                assert got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last)
                assert (got.double() - wanted).abs().max() <= NEAR[dtype] * wanted.abs().max()
        grad = torch.randn_like(wanted).to(dtype)
        ours, mine = torch.autograd.grad(layer(x), [x, layer.values], grad)
        theirs, whole = torch.autograd.grad(wanted, [x, conv.weight], grad.double())
        assert (ours.double() - theirs).abs().max() <= NEAR[dtype] * theirs.abs().max()
        kept = layer.blocks.split(whole)[layer.blocks.split(layer.mask)]
        assert (mine.double() - kept).abs().max() <= 2 * NEAR[dtype] * kept.abs().max()


@torch.no_grad()
def test_layers_in_blocks_wait_for_what_they_read():
    """Kernels that start before those in front have ended: results and values of these are complete."""
    torch.manual_seed(0)
    conv = nn.Conv2d(256, 256, 3, padding=1, bias=False).half().cuda()
    kept = torch.rand(8, 8, 3, 3).lt(0.3).cuda()
    conv.weight.mul_(kept.repeat_interleave(32, 0).repeat_interleave(32, 1)).sign_().mul_(2.0**-4)
    layer, x = pm.nn.PrunedConv2d.from_dense(conv), torch.randn(8, 256, 28, 28, device="cuda").half()
    assert layer.blocks == (32, 32)
    layer(x)
    for factor in (1, -1, 2, -2) * 10:
        conv.weight.mul_(factor)
        layer.values.mul_(factor)
        got = layer(layer(x.neg()).clamp(-4, 4))
        wanted = conv(conv(x.neg()).clamp(-4, 4))
        assert (got - wanted).abs().max() <= 1e-2 * wanted.abs().max()
        conv.weight.div_(factor)
        layer.values.div_(factor)


def test_linear_layers_in_blocks():
    linear = nn.Linear(64, 48).cuda().half()
    with torch.no_grad():
        linear.weight.mul_((torch.rand(3, 2, device="cuda") < 0.5).repeat_interleave(16, 0).repeat_interleave(32, 1))
        linear.weight[:16, :32] = 1
    layer, x = pm.nn.PrunedLinear.from_dense(linear), torch.randn(9, 64, device="cuda").half()
    assert layer.blocks is not None
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["1x1", "3x3"])
def test_entries_are_the_default(name):
    _, layer = layers(name, torch.float32)
    x = torch.randn(1, 24, 16, 16, device="cuda")
    text = "O[n,m,p,q] = I[n,c,p,q] * F[m,c]" if name == "1x1" else "O[n,m,p,q] = I[n,c,p+r,q+s] * F[m,c,r,s]"
    told = pm.compile_einsum(text, {"F": "(m c):C" if name == "1x1" else "(m c r s):C"}).explain(I=x, F=layer._filter())
    assert ": entries, estimated" in told


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_are_the_default(name):
    _, layer = in_blocks(name, torch.float16)
    x, seen = torch.randn(1, 128, 14, 14, device="cuda").half(), []
    with pytest.MonkeyPatch.context() as patch:
        found = block_sums.BlockSums.run
        patch.setattr(block_sums.BlockSums, "run", lambda self, *given: seen.append(1) or found(self, *given))
        layer(x)
    assert seen


@pytest.mark.parametrize("make", [layers, in_blocks], ids=["entries", "blocks"])
@torch.no_grad()
def test_a_graph_reads_values_in_place(make):
    conv, layer = make("3x3", torch.float32)
    x = torch.randn(1, conv.in_channels, 14, 14, device="cuda")
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
