"""Einsums on a GPU: the kernels agree with the oracle and the other lowerings, can be captured, and are tuned."""

import numpy as np
import pytest
import torch
from einsum_fuzz import random_case
from einsum_oracle import evaluate
from modes import deterministic

import pumice as pm
from pumice.language.parse import parse
from pumice.lower import call, maps, plan
from pumice.lower import kernel as kernels
from pumice.lower.dataflow import CONV
from pumice.ops import autograd
from pumice.testing import assert_close, random_tensor, reference_conv

pytestmark = pytest.mark.gpu


def on_gpu(operands, dtype):
    def moved(x):
        if isinstance(x, int | float):
            return x
        x = torch.as_tensor(x)
        return x.to("cuda", dtype if x.is_floating_point() else x.dtype)

    return {name: moved(x) for name, x in operands.items()}


@pytest.mark.parametrize("lowering", ["", "triton/ieee", "graph"])
@pytest.mark.parametrize("block", range(10))
def test_fuzz(block, lowering):
    for seed in range(100 * block, 100 * block + 100):
        case = random_case(seed)
        operands = on_gpu(case.operands, torch.float32)
        integers = {name: x for name, x in case.operands.items() if isinstance(x, int)}
        if lowering.startswith("triton") and not kernel_takes(parse(case.text, integers)):
            continue
        expected = evaluate(case.text, case.operands)
        got = pm.einsum(case.text, lowering=lowering, **operands).double().cpu().numpy()
        scale = max(1.0, np.abs(expected).max(initial=0))
        assert np.abs(got - expected).max(initial=0) <= 3e-5 * scale, (seed, case.text)


def kernel_takes(statement):
    return statement.reduction == "sum" and all(
        "exists" not in str(term) and "equal" not in str(term) and term.factors for term in statement.terms
    )


def matrix(rows, columns, density, dtype, seed=0):
    chance = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=chance, dtype=torch.float64)
    return (values * (torch.rand(rows, columns, generator=chance) < density)).to("cuda", dtype)


FORMATS = ["COO", "CSR", "CSC", "ELL", "GroupCOO", "m:C k:G*", "BCSR", "BlockCOO", "BlockGroupCOO"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(130, 70, 128), (64, 96, 31), (300, 256, 256)])
@pytest.mark.parametrize("text", FORMATS)
def test_spmm(text, shape, dtype):
    a, b = matrix(shape[0], shape[1], 0.1, dtype), matrix(shape[1], shape[2], 1.0, dtype, 1)
    f = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", {"A": text})
    s = pm.sparse(a, text)
    b.requires_grad_()
    for _ in range(3):  # Triton's door, then the prepared launch.
        y = f(A=s, B=b)
    wide = b.detach().double()
    assert_close(y, a.double() @ wide, dtype=dtype, scale=float((a.double().abs() @ wide.abs()).mean()))
    (grad,) = torch.autograd.grad(y.float().sum(), b)
    expected = a.double().sum(0)[:, None].expand_as(b)
    assert_close(grad, expected, dtype=dtype, scale=float(a.double().abs().sum(0).mean()))


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "bf16x6", "bf16x3", "tf32"])
def test_precisions(precision):
    a, b = matrix(256, 512, 1.0, torch.float32), matrix(512, 128, 1.0, torch.float32, 1)
    y = pm.einsum("C[m,n] = A[m,k] * B[k,n]", lowering=f"triton/{precision}", A=a, B=b)
    error = (y.double() - a.double() @ b.double()).norm() / y.double().norm()
    assert error < {"ieee": 1e-6, "tf32x3": 3e-6, "bf16x6": 3e-6, "bf16x3": 3e-5, "tf32": 2e-3}[precision]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("text", ["(i j k l):C", "[i,j,k,l] l:U (i j k):G", "[i,j,k,l] l:C (i j k):G*"])
def test_tensor_product(text, shared):
    chance = torch.Generator().manual_seed(0)
    table = torch.randn(4, 4, 4, 5, generator=chance) * (torch.rand(4, 4, 4, 5, generator=chance) < 0.1)
    x, y = torch.randn(40, 4, 16, generator=chance), torch.randn(40, 4, generator=chance)
    w = torch.randn(*([] if shared else [40]), 5, 16, 16, generator=chance)
    weights = "W[l,u,w]" if shared else "W[b,l,u,w]"
    operands = {name: t.cuda().requires_grad_() for name, t in {"X": x, "Y": y, "W": w}.items()}
    z = pm.einsum(
        f"Z[b,i,w] = CG[i,j,k,l] * X[b,j,u] * Y[b,k] * {weights}", CG=pm.sparse(table.cuda(), text), **operands
    )
    doubles = {name: t.detach().double().requires_grad_() for name, t in operands.items()}
    subscripts = f"ijkl,bju,bk,{'luw' if shared else 'bluw'}->biw"
    expected = torch.einsum(subscripts, table.cuda().double(), doubles["X"], doubles["Y"], doubles["W"])
    assert_close(z.detach(), expected.detach(), scale=float(expected.detach().abs().max()))
    got = torch.autograd.grad(z.square().sum(), list(operands.values()))
    want = torch.autograd.grad(expected.square().sum(), list(doubles.values()))
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, scale=float(b.detach().abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kernel,stride", [(1, 1), (3, 1), (5, 1), (7, 1), (2, 2)])
def test_convolution(kernel, stride, dtype):
    x = random_tensor(3000, 32, 3, device="cuda", dtype=dtype)
    w = torch.randn(48, kernel, kernel, kernel, 32, device="cuda", dtype=dtype) / kernel**1.5
    feats = x.feats.clone().requires_grad_()
    w.requires_grad_()
    x = x.replace(feats)
    y = pm.ops.conv(x, w, stride=stride)
    expected = reference_conv(x, w, stride=stride)
    assert_close(y.feats, expected.feats, dtype=dtype, scale=float(expected.feats.detach().abs().mean()) * 4)
    got = torch.autograd.grad(y.feats.float().sum(), [feats, w])
    want = torch.autograd.grad(expected.feats.sum(), [feats, w])
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, dtype=dtype, scale=float(b.detach().double().abs().mean()) * 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [(4, 6), (32, 32), (64, 96), (128, 128)])
def test_an_epilogue(channels, groups, dtype):
    inputs, outputs = channels
    x = random_tensor(2000, inputs, 3, dtype=torch.float64)
    chance = torch.Generator().manual_seed(1)
    w, scale, shift, residual = (
        torch.randn(*shape, dtype=torch.float64, generator=chance)
        for shape in ((outputs, 3, 3, 3, inputs // groups), (outputs,), (outputs,), (2000, outputs))
    )
    x, w, residual = x.to(dtype), (w / inputs**0.5).to(dtype), residual.to(dtype)
    y = pm.ops.conv(x.to(torch.float64), w.double(), groups=groups).feats * scale + shift + residual
    epilogue = pm.ops.Epilogue(scale.float().cuda(), shift.float().cuda(), residual.cuda(), "relu")
    x, w = x.to("cuda"), w.cuda()
    for _ in range(3):  # Triton's door, then the prepared launch.
        got = pm.ops.conv(x, w, groups=groups, epilogue=epilogue)
    assert_close(got.feats, y.relu(), dtype=dtype, scale=float(y.abs().mean()) * 4)


SIZES = [
    (1, 3, 1),
    (3, 64, 1),
    (4, 5, 1),
    (17, 96, 1),
    (192, 4, 1),
    (5, 1000, 1),
    (12, 12, 12),
    (64, 128, 64),
    (96, 96, 3),
    (128, 128, 32),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_channels_and_groups(sizes, dtype):
    inputs, outputs, groups = sizes
    x = random_tensor(1500, inputs, 3, device="cuda", dtype=dtype)
    w = torch.randn(outputs, 3, 3, 3, inputs // groups, device="cuda", dtype=dtype).requires_grad_()
    expected = reference_conv(x, w, groups=groups)
    y = pm.ops.conv(x, w, groups=groups)
    assert_close(y.feats.detach(), expected.feats.detach(), dtype=dtype, scale=float(expected.feats.detach().std()) * 4)
    (got,), (want,) = (torch.autograd.grad(z.feats.float().square().mean(), w) for z in (y, expected))
    assert_close(got, want, dtype=dtype, scale=float(want.double().std()) * 16)


@pytest.mark.parametrize("strided", ["columns", "turned", "expanded", "rows"])
def test_features_of_any_strides(strided):
    x, wide = (
        random_tensor(1500, 32, 3, device="cuda", dtype=torch.float16),
        torch.randn(1500, 64, device="cuda").half(),
    )
    feats = {
        "columns": wide[:, ::2],
        "turned": torch.randn(32, 1500, device="cuda").half().t(),
        "expanded": wide[:1, :32].expand(1500, 32),
        "rows": torch.randn(3000, 32, device="cuda").half()[::2],
    }[strided]
    w = torch.randn(48, 3, 3, 3, 32, device="cuda").half() / 16
    for weight in (w, w.transpose(1, 3)):
        for _ in range(3):
            y = pm.ops.conv(x.replace(feats), weight).feats
        expected = pm.ops.conv(x.replace(feats.contiguous()), weight.contiguous()).feats
        assert_close(y, expected, dtype=torch.float16, scale=float(expected.float().std()) * 4)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("sizes", [(3, 16, 1), (16, 16, 1), (32, 48, 1), (64, 64, 2), (128, 128, 1)], ids=str)
def test_bytes(sizes, kind):
    inputs, outputs, groups = sizes
    x = random_tensor(3000, inputs, 3, device="cuda")
    w = torch.randn(outputs, 3, 3, 3, inputs // groups, device="cuda") / inputs**0.5
    (x8, sx), (w8, sw) = pm.ops.quantize(x.feats, kind), pm.ops.quantize(w, kind, 0)
    epilogue = pm.ops.Epilogue(scale=sx * sw, activation="relu", dtype=torch.float16)
    for _ in range(3):
        y = pm.ops.conv(x.replace(x8), w8, groups=groups, epilogue=epilogue).feats
    sums = reference_conv(x.replace(x8.double()), w8.double(), groups=groups).feats.cuda()
    exact = (sums * (sx * sw)).relu()
    assert y.dtype == torch.float16
    # fp8 is summed with 14 bits within one turn of the loop.
    assert_close(y, exact, dtype=torch.float16, scale=float(exact.std()) * (1 if kind == torch.int8 else 4))


@pytest.mark.parametrize("channels", [8, 32, 128])
@pytest.mark.parametrize("form", sorted(maps.FORMS))
def test_every_form_of_a_map_serves_a_convolution(form, channels):
    x = random_tensor(5000, channels, 3, device="cuda", dtype=torch.float16)
    found, _ = pm.kernel_map(x.geometry, pm.coords.Relation.of(3, 3))
    w = torch.randn(channels, 27, channels, device="cuda", dtype=torch.float16) / channels**0.5
    tokens, arrays = maps.build_form(found, form)
    y = autograd.einsum([x.feats, w, *arrays], "|".join(("x", "w", *tokens)), CONV, (len(x.feats), channels))
    expected = reference_conv(x, w.unflatten(1, (3, 3, 3)))
    assert_close(y, expected.feats, dtype=torch.float16, scale=float(expected.feats.detach().abs().mean()) * 4)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("text", ["CSR", "GroupCOO", "COO"])
def test_long_rows_and_what_is_not_finite(text, bad):
    a = matrix(300, 9000, 0.002, torch.float16)
    a[7], a[255, ::2] = 1.0, 0.5  # rows of 9,000 and 4,500 entries among rows of 18
    b = matrix(9000, 72, 1.0, torch.float16, 1) / 8
    f, s = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]"), pm.sparse(a, text)
    wide = a.double() @ b.double()
    for _ in range(3):
        y = f(A=s, B=b)
    assert_close(y, wide, dtype=torch.float16, scale=float((a.double().abs() @ b.double().abs()).mean()))
    b[4321] = bad
    hit = a[:, 4321] != 0
    y = f(A=s, B=b)
    assert torch.equal(~y.isfinite().any(1), hit) and torch.equal((~y.isfinite()).all(1), hit)


def test_more_than_2_to_31_elements():
    a = torch.zeros(1 << 16, (1 << 15) + 8, dtype=torch.float16, device="cuda")
    a[-1] = 1
    rows = torch.tensor([(1 << 16) - 1, -1, 0], device="cuda")
    y = pm.einsum("y[p,k] = A[R[p],k]", lowering="triton", A=a, R=rows)
    assert y.double().sum(1).tolist() == [(1 << 15) + 8, 0, 0]


def shared_layer(channels, dtype):
    """A layer whose segments are shared by many programs; its call, and what it is in float64."""
    x = random_tensor(6000, channels, 3, device="cuda", dtype=dtype)
    w = torch.randn(channels, 27, channels, device="cuda", dtype=dtype) / channels**0.5
    tokens, arrays = maps.build_form(pm.kernel_map(x.geometry, pm.coords.Relation.of(3, 3))[0], "compacted")
    operands = [x.feats, w, *arrays]
    ready = plan.plan_for(operands, "|".join(("x", "w", *tokens)), CONV, (len(x.feats), channels), "triton")
    (part,) = ready.steps
    tile = kernels.tiles.Tile(64, 64, 32, stages=3, prefetch_indices=True, stream_k_chunk=2)
    executor = kernels.runner(part.run.bound, dtype, tile)
    run = call.BoundExecutor(executor, {name: operands[place] for name, place in part.places})
    return lambda: run({}), reference_conv(x, w.unflatten(1, (3, 3, 3))).feats


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_shared_segments_sum_in_one_order(dtype):
    """Alone, on two streams at once, and in two graphs that run at once."""
    call, exact = shared_layer(64, dtype)
    first = call()
    assert_close(first, exact, dtype=dtype, scale=float(exact.abs().mean()) * 4)
    assert all(torch.equal(first, call()) for _ in range(20))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    assert all(torch.equal(first, y) for y in found)
    graphs, results = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph, stream=streams[0]):
            results.append([call() for _ in range(10)])
    for _ in range(20):
        for graph, stream, held in zip(graphs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                for y in held:
                    y.zero_()
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(first, y) for held in results for y in held)


def test_a_cuda_graph_holds_it():
    a, b = matrix(256, 128, 0.1, torch.float16), matrix(128, 64, 1.0, torch.float16, 1)
    s, f = pm.sparse(a, "GroupCOO"), pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]")
    f(A=s, B=b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f(A=s, B=b)
    b.normal_()
    graph.replay()
    assert_close(y, a.double() @ b.double(), dtype=torch.float16, scale=2.0)


@pytest.mark.parametrize("densities", [(0.02, 0.05, 0.08), (0.15, 0.3, 0.6)])
def test_no_kernel_is_made_for_another_number_of_entries(densities):
    """Rows of few entries and of many take different kernels; among either, one serves all."""
    b, f = matrix(128, 64, 1.0, torch.float16, 1), pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]")
    made = set()
    for seed, density in enumerate(densities):
        s = pm.sparse(matrix(256, 128, density, torch.float16, seed), "COO")
        f(A=s, B=b)
        made.add(kernels.loaded.cache_info().currsize)
    assert len(made) == 1


def test_tuning_keeps_the_fastest(monkeypatch, tmp_path):
    from pumice.schedule.tuned_tiles import Ledger

    own = Ledger(tmp_path / "tiles.json")
    monkeypatch.setattr(kernels, "ledger", lambda: own)
    a, b = matrix(256, 128, 0.1, torch.float16), matrix(128, 64, 1.0, torch.float16, 1)
    f = pm.compile_einsum("C[m,n] = A[m,k] * B[k,n]", lowering="triton")
    told = f.tune(A=pm.sparse(a, "GroupCOO"), B=b)
    assert "ms" in told and len(own.all()) == 1
    asked = []
    monkeypatch.setattr(own, "get", lambda key: asked.append(key) or kernels.tiles.Tile(16, 64, 128, stacked=True))
    for source, times in ((kernels.DEFAULT, 0), (kernels.LEDGER, 1)):
        with kernels.use_tuning_mode(source):
            y = f(A=pm.sparse(a, "GroupCOO"), B=b)
        assert_close(y, a.double() @ b.double(), dtype=torch.float16, scale=2.0)
        assert bool(asked) == bool(times)


def test_deterministic_when_asked():
    rows = torch.randint(0, 8, (5000,), device="cuda")
    x = torch.randn(5000, 16, device="cuda")
    with deterministic():
        first = pm.einsum("y[R[p],c] = x[p,c] ; y:[8,_]", R=rows, x=x)
        assert all(torch.equal(first, pm.einsum("y[R[p],c] = x[p,c] ; y:[8,_]", R=rows, x=x)) for _ in range(5))
