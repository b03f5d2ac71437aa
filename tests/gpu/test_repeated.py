"""Calls of a statement that are repeated: past all checks, but never past a change."""

import threading

import pytest
import torch

import pumice as pm
from pumice.errors import CoordinateError, DeviceError, DtypeError, ShapeError

pytestmark = pytest.mark.gpu
SPMM = "C[m,n] = A[m,k] * B[k,n]"
FORMATS = ("CSR", "GroupCOO", "BCSR")


def matrix(rows, columns, density, dtype=torch.float32, seed=0):
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=chance)
    return (values * (torch.rand(rows, columns, generator=chance) < density)).to("cuda", dtype)


def near(y, want, dtype=torch.float32):
    error = {torch.float32: 1e-5, torch.float16: 3e-3}[dtype]
    assert y.shape == want.shape and float((y.double() - want.double()).norm()) <= error * float(want.double().norm())


def kept(a):
    return [call for calls in a.calls.values() for call in calls.kept]


def product(a, b):
    return a.to_dense().double() @ b.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_call_is_repeated_with_other_tensors_and_values(format, dtype):
    a = pm.sparse(matrix(300, 200, 0.1, dtype), format)
    f = pm.compile_einsum(SPMM, {"A": format})
    (values,) = (part.values for part in a.parts)
    for seed in range(5):
        b = matrix(200, 128, 1.0, dtype, seed)
        near(f(A=a, B=b), product(a, b), dtype)
        values.mul_(1.5)
    assert len(kept(a)) == 1
    values.data = torch.randn_like(values)
    near(f(A=a, B=b), product(a, b), dtype)
    other = pm.sparse(matrix(300, 200, 0.2, dtype, 9), format)
    near(f(A=other, B=b), product(other, b), dtype)
    near(f(B=b, A=a), product(a, b), dtype)


def test_what_differs_is_seen():
    a = pm.sparse(matrix(300, 200, 0.1), "CSR")
    f = pm.compile_einsum(SPMM, {"A": "CSR"})
    b = matrix(200, 128, 1.0)
    for _ in range(3):
        f(A=a, B=b)
    layouts = (
        b,
        matrix(200, 64, 1.0),
        matrix(128, 200, 1.0).t(),
        matrix(400, 128, 1.0)[::2],
        matrix(200, 129, 1.0)[:, 1:],
        torch.cat([b.new_zeros(1), b.reshape(-1)])[1:].view(200, 128),
    )
    for _ in range(3):
        for other in layouts:
            near(f(A=a, B=other), product(a, other))
    with pytest.raises(ShapeError):
        f(A=a, B=matrix(201, 128, 1.0))
    with pytest.raises(DtypeError):
        f(A=a, B=b.half())
    with pytest.raises(DeviceError):
        f(A=a, B=b.cpu())
    with pytest.raises(ShapeError):
        f(A=a)
    with torch.inference_mode():
        near(f(A=a, B=b), product(a, b))
    with torch.autocast("cuda", torch.float16):
        assert f(A=a, B=b).dtype == torch.float16
    (values,) = (part.values for part in a.parts)
    values.requires_grad_()
    torch.autograd.grad(f(A=a, B=b).sum(), values)
    with torch.no_grad():
        for _ in range(3):
            near(f(A=a, B=b), product(a, b))
    torch.autograd.grad(f(A=a, B=b).sum(), values)
    values.requires_grad_(False)
    g = torch.func.grad(lambda b: f(A=a, B=b).sum())(b)
    near(g, a.to_dense().double().sum(0)[:, None].expand_as(b))
    near(torch.vmap(lambda b: f(A=a, B=b))(torch.stack([b, b])), torch.stack([product(a, b)] * 2))


def test_index_arrays_are_compared():
    text = "C[D[y],x] += A[y,E[r]] * B[r,x]"
    chance = torch.Generator().manual_seed(0)
    d, e = (torch.randint(0, 50, (count,), generator=chance).cuda() for count in (90, 70))
    a, b, c = (matrix(*shape, 1.0, seed=n) for n, shape in enumerate(((90, 50), (70, 64), (50, 64))))
    f = pm.compile_einsum(text)

    def want():
        return c.double().index_add(0, d, a.double()[:, e] @ b.double())

    for _ in range(3):
        near(f(A=a, B=b, C=c, D=d, E=e), want())
        b = b + 1
    e.copy_(e.flip(0))
    near(f(A=a, B=b, C=c, D=d, E=e), want())
    d = d.flip(0).clone()
    for _ in range(3):
        near(f(A=a, B=b, C=c, D=d, E=e), want())
    d[0] = 50
    with pytest.raises(CoordinateError):
        f(A=a, B=b, C=c, D=d, E=e)


def test_gathered_rows_are_repeated():
    chance = torch.Generator().manual_seed(0)
    e, x = torch.randint(0, 50, (90,), generator=chance).cuda(), matrix(50, 64, 1.0)
    w = matrix(64, 32, 1.0)
    f = pm.compile_einsum("Y[p,n] = X[E[p],c] * W[c,n]")
    for _ in range(4):
        near(f(X=x, W=w, E=e), x.double()[e] @ w.double())
        x = x + 1
    e.copy_(e.flip(0))
    near(f(X=x, W=w, E=e), x.double()[e] @ w.double())


def test_other_streams_graphs_and_threads():
    dense = matrix(500, 300, 0.05)
    dense[7] = 1.0  # a row that is cut
    a, b = pm.sparse(dense, "CSR"), matrix(300, 128, 1.0)
    f = pm.compile_einsum(SPMM, {"A": "CSR"})
    want = product(a, b)
    for _ in range(3):
        f(A=a, B=b)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        near(f(A=a, B=b), want)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(A=a, B=b)
    b.mul_(2)
    graph.replay()
    near(y, 2 * want)
    b.mul_(0.5)
    torch.cuda.synchronize()
    found, errors = [], []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                found.extend(f(A=a, B=b) for _ in range(50))
                torch.cuda.current_stream().synchronize()
        except Exception as problem:
            errors.append(problem)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(found) == 200
    for y in found:
        near(y, want)


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("format", FORMATS)
def test_a_call_within_a_capture_is_not_kept(format, calls):
    """A launch is bound outside: within a capture it would be of the graph's memory."""
    a, b = pm.sparse(matrix(300, 200, 0.1), format), matrix(200, 128, 1.0)
    f = pm.compile_einsum(SPMM, {"A": format})
    for _ in range(calls):
        f(A=a, B=b)
    before, graph = kept(a), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(A=a, B=b)
    assert kept(a) == before
    b.mul_(2.0)
    graph.replay()
    near(y, product(a, b))
    for _ in range(3):
        near(f(A=a, B=b), product(a, b))
    assert [type(call._run).__name__ for call in kept(a)] == ["RepeatedLaunch"]


def test_several_dense_and_sparse_operands():
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(4, 4, 4, 5, generator=chance) * (torch.rand(4, 4, 4, 5, generator=chance) < 0.1)
    x, y, w = (matrix(*shape, 1.0, seed=n) for n, shape in enumerate(((160, 16), (40, 4), (80, 16))))
    x, w = x.view(40, 4, 16), w.view(5, 16, 16)
    text = "Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * W[l,u,w]"
    cg = pm.sparse(table.cuda(), "(i j k l):C")
    for factor in (1, 2, 3, 4):
        want = torch.einsum("ijkl,bju,bk,luw->biw", table.cuda().double(), x.double(), y.double() * factor, w.double())
        near(pm.einsum(text, CG=cg, X=x, Y=y * factor, W=w), want)
