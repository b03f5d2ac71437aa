"""Tensor products on a GPU are those of the CPU in float64, with first and second derivatives, and unrolled kernels."""

import pytest
import torch

import pumice as pm

pytestmark = pytest.mark.gpu
IRREPS = ("32x0e+32x1o+32x2e", "0e+1o+2e", "32x0e+32x1o+32x2e")
NODES, EDGES = 60, 700


def operands(made):
    chance = torch.Generator().manual_seed(0)
    own = () if made.shared_weights else (EDGES,)
    shapes = (NODES, made.irreps_in1.dim), (EDGES, made.irreps_in2.dim), (*own, made.weight_numel)
    edges = torch.randint(-1, NODES - 1, (2, EDGES), generator=chance)
    return [torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes], edges


def derivatives(run, given):
    leaves = [x.detach().requires_grad_() for x in given]
    z = run(*leaves)
    first = torch.autograd.grad(z, leaves, torch.linspace(-1, 1, z.numel()).to(z).view(z.shape), create_graph=True)
    second = torch.autograd.grad(first, leaves, [torch.linspace(-1, 1, g.numel()).to(g).view(g.shape) for g in first])
    return [x.detach() for x in (z, *first, *second)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode, shared", [("uvu", False), ("uvu", True), ("uvw", True)])
def test_messages(mode, shared, dtype):
    made = pm.nn.TensorProduct(*IRREPS, mode, shared_weights=shared, internal_weights=False).double()
    given, edges = operands(made)
    given = [x.to(dtype).double() for x in given]
    expected = derivatives(lambda x, y, w: made(x, y, w, edges=edges), given)
    made, on = made.to("cuda", dtype), edges.cuda()
    found = derivatives(lambda x, y, w: made(x, y, w, edges=on), [x.to("cuda", dtype) for x in given])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(one.cpu(), other, atol=1e-9, rtol=1e-9)
        else:
            error = (one.cpu().double() - other).norm() / other.norm()
            assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def test_samples():
    made = pm.nn.FullyConnectedTensorProduct(*IRREPS, shared_weights=False)
    x, y, w = (torch.randn(40, n) for n in (made.irreps_in1.dim, made.irreps_in2.dim, made.weight_numel))
    expected = made.double()(x.double(), y.double(), w.double())
    with torch.no_grad():
        found = made.float().cuda()(x.cuda(), y.cuda(), w.cuda()).cpu().double()
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_messages_are_unrolled_and_captured():
    made = pm.nn.TensorProduct(*IRREPS, "uvu", shared_weights=False, layout="ir_mul").cuda()
    given, edges = operands(made)
    x, y, w = (t.float().cuda() for t in given)
    edges = edges.cuda()
    part = made._parts[0]
    line = pm.compile_einsum(part.along_edges[0], {"CG": part.split[0].format})
    held = {"X": x.view(NODES, -1, 32), "Y": y, "W": part.weight(w), "S": edges[0], "T": edges[1], "N": NODES}
    assert "unrolled, estimated" in line.explain(CG=made._tables[torch.float32][0][0], **held)
    with torch.no_grad():
        wanted = made(x, y, w, edges=edges)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            made(x, y, w, edges=edges)
        with torch.cuda.graph(graph, stream=stream):
            again = made(x, y, w, edges=edges)
        again.zero_()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again, wanted)
