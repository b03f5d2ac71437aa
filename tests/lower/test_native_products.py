"""C kernels for products of gathered rows agree with the plain twin, for any vector length and number of threads."""

import itertools
import os
import weakref

import pytest
import torch
from windows import RELATIONS

import pumice as pm
from pumice.coords import Geometry, KernelMap, Pairs, Relation, kernel_map
from pumice.lower import native_products, reference
from pumice.ops.conv import conv_features
from pumice.runtime import native
from pumice.runtime.native import Compiler, NativeUnavailableError
from pumice.testing import random_cloud

CHANNELS = [(1, 1), (4, 32), (5, 7), (32, 48), (70, 64), (64, 33), (16, 80), (3, 130)]
needs_compiler = pytest.mark.skipif(isinstance(native.compiler(), str), reason=f"{native.compiler()}")


@pytest.fixture(scope="module")
def cloud() -> Geometry:
    cells = torch.tensor(list(itertools.product([0], range(14), range(14), range(14))), dtype=torch.int32)
    return Geometry.checked(cells[torch.rand(len(cells), generator=torch.Generator().manual_seed(0)) < 0.8])


def operands(found, channels, dtype=torch.float32):
    torch.manual_seed(1)
    x, grad = torch.randn(found.num_inputs, channels[0]), torch.randn(found.num_outputs, channels[1])
    return x.to(dtype), (torch.randn(channels[1], found.volume, channels[0]) / 27).to(dtype), grad.to(dtype)


def lists_of(pairs, rows):
    return native_products.pair_lists(pairs.outputs, pairs.inputs, pairs.sizes, rows)


def check(pairs, rows, x, weight, grad):
    lists = lists_of(pairs, rows)
    run = native_products.kernels()
    y, dw = native_products.products(run, x, weight, lists, rows), native_products.gradients(run, x, grad, lists)
    wide = [t.double() for t in (x, weight, grad)]
    torch.testing.assert_close(y.double(), reference.forward(*wide[:2], pairs, rows, 1), rtol=1e-4, atol=1e-4)
    truth = reference.weight_gradient(wide[0], wide[2], pairs, 1)
    torch.testing.assert_close(dw.double(), truth, rtol=1e-4, atol=1e-3)
    return y, dw


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", RELATIONS)
def test_products_and_gradients(cloud, name, channels, dtype):
    found, _ = kernel_map(cloud, RELATIONS[name])
    check(found.pairs(), found.num_outputs, *operands(found, channels, dtype))
    x, weight, grad = operands(found.transpose(), channels, dtype)
    check(found.transpose().pairs(), found.num_inputs, x, weight, grad)


@needs_compiler
def test_results_do_not_depend_on_the_number_of_threads(cloud):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    given, before, results = operands(found, (24, 80)), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(check(found.pairs(), found.num_outputs, *given))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


@needs_compiler
@pytest.mark.parametrize("name", RELATIONS)
def test_lists_of_a_neighbour_table_are_those_of_its_pairs(cloud, name):
    whole, _ = kernel_map(cloud, RELATIONS[name])
    for found in (whole, whole.transpose()):
        lists, taps = native_products.lists_of_rows(native_products.kernels(), found.rows())
        want = lists_of(found.pairs(), found.num_outputs)
        assert all(torch.equal(one, other) for one, other in zip(lists, want, strict=True))
        assert torch.equal(taps.long(), found.taps())


@needs_compiler
def test_rows_of_a_table_beyond_the_inputs_are_not_read():
    """As in a table from a file; they are ignored, as without a compiler."""
    rows = torch.full((5, 27), -1, dtype=torch.int32)
    rows[2, 3] = 10**8
    found = KernelMap.from_rows(Relation.of(3, 3), rows, 5)
    assert not conv_features(torch.ones(5, 4), torch.ones(6, 27, 4), found, 5).any()


@needs_compiler
def test_lists_do_not_keep_the_arrays_that_they_are_made_of():
    outputs, inputs, sizes = torch.arange(9).int(), torch.arange(9).int(), torch.tensor([4, 5])
    kept = native_products.pair_lists(outputs, inputs, sizes, 9)
    assert native_products.pair_lists(outputs, inputs, sizes, 9) is kept
    gone = weakref.ref(outputs)
    del outputs
    assert gone() is None


@needs_compiler
def test_lists_without_pairs_and_outputs_without_pairs():
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = Pairs(empty, empty, torch.zeros(3, dtype=torch.int64))
    x, weight, grad = torch.randn(4, 5), torch.randn(6, 3, 5), torch.randn(2000, 6)
    y, dw = check(nothing, 2000, x, weight, grad)
    assert not y.any() and not dw.any()
    one = Pairs(torch.tensor([3]), torch.tensor([1999]), torch.tensor([0, 1, 0]))
    y, dw = check(one, 2000, x, weight, grad)
    assert not y[:1999].any() and not dw[:, ::2].any()
    assert native_products.products(native_products.kernels(), x, weight, lists_of(nothing, 0), 0).shape == (0, 6)


@needs_compiler
def test_rows_that_occur_several_times_and_index_arrays_that_are_not_contiguous():
    """As in a graph with repeated edges."""
    torch.manual_seed(0)
    edges, x, w = torch.randint(0, 40, (500, 3), dtype=torch.int32), torch.randn(40, 6), torch.randn(4, 6, 9)
    k, grad = torch.randint(0, 4, (500,)).sort()[0].int(), torch.randn(40, 9)
    text = "Y[S[p],n] += X[G[p],c] * W[K[p],c,n] ; K:sorted"
    y = pm.einsum(text, Y=torch.zeros(40, 9), X=x, W=w, S=edges[:, 0], G=edges[:, 2], K=k)
    terms = torch.einsum("pc,pcn->pn", x[edges[:, 2].long()], w[k.long()])
    torch.testing.assert_close(y, torch.zeros(40, 9).index_add(0, edges[:, 0], terms), rtol=1e-4, atol=1e-4)
    pairs = Pairs(edges[:, 2], edges[:, 0], torch.bincount(k, minlength=4))
    check(pairs, 40, x, w.permute(2, 0, 1), grad)


@needs_compiler
@pytest.mark.parametrize(("lanes", "registers"), [(4, 16), (4, 32), (8, 16)])
def test_other_vector_lengths(cloud, monkeypatch, lanes, registers):
    """For CPUs with other registers; only the tiles differ."""
    found, _ = kernel_map(cloud, RELATIONS["support"])
    library = native.compiler().library(native_products.source(lanes, registers))
    monkeypatch.setattr(native_products, "kernels", lambda: native_products.Kernels(library, lanes))
    for channels in CHANNELS:
        check(found.pairs(), found.num_outputs, *operands(found, channels))


def trained(net, x):
    y = net(x).feats
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


def test_layers_run_them_where_there_is_a_compiler_and_torch_elsewhere(monkeypatch):
    """Also half precision, groups and float64, which torch computes."""
    runs, call = [], native_products.Kernels.call

    def counted(self, name, *given):
        runs.append(name)
        return call(self, name, *given)

    monkeypatch.setattr(native_products.Kernels, "call", counted)
    coords, results = random_cloud(400, 3, extent=12, seed=0), []
    for available in (not isinstance(native.compiler(), str), False):
        if not available:
            monkeypatch.setattr(native_products, "kernels", lambda: None)
        torch.manual_seed(0)
        net = torch.nn.Sequential(pm.nn.Conv3d(5, 16, 3), pm.nn.Conv3d(16, 7, 3, stride=2, padding=1))
        results.append(trained(net, pm.SparseTensor(torch.randn(400, 5), coords)))
        # Two layers; the input of the first needs no gradient.
        kernels = ["gradients"] * 2 + ["pairs"] * 4 + ["products"] * 3
        assert sorted(runs) == kernels * available
        runs.clear()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    x = pm.SparseTensor(torch.randn(400, 4, dtype=torch.float64), coords)
    trained(pm.nn.Conv3d(4, 4, 3).double(), x), trained(pm.nn.Conv3d(4, 4, 3, groups=2), x.float())
    assert not runs


@needs_compiler
def test_libraries_are_kept_on_disk_and_refused_if_others_can_write_them(tmp_path, monkeypatch):
    found = native.compiler()
    monkeypatch.setattr(native, "settings", lambda: type("S", (), {"cache": tmp_path})())
    source = "int answer(void) { return 42; }\n"
    assert found.library(source).answer() == 42
    (path,) = (tmp_path / "native").glob("*.so")
    stamp = path.stat().st_mtime_ns
    assert found.library(source).answer() == 42 and path.stat().st_mtime_ns == stamp
    for changed, mode in ((path, 0o722), (tmp_path / "native", 0o777)):
        os.chmod(changed, mode)
        with pytest.raises(NativeUnavailableError, match="other users"):
            found.library(source)
        os.chmod(changed, 0o700)
    with pytest.raises(NativeUnavailableError, match="does not compile"):
        found.library("int broken(")
    monkeypatch.setattr(Compiler, "_compile", lambda self, source, path: path.write_bytes(b"") or path.chmod(0o700))
    with pytest.raises(NativeUnavailableError):
        found.library("int other(void) { return 42; }\n")


@pytest.mark.parametrize(
    ("body", "reason"),
    [("exit 1", "no C compiler"), ("echo; exit 0", "")],
)
def test_a_compiler_that_fails_or_does_nothing_is_not_used(tmp_path, monkeypatch, body, reason):
    for name in ("cc", "gcc", "clang"):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(native, "settings", lambda: type("S", (), {"cache": tmp_path})())
    native.compiler.cache_clear()
    try:
        found = native.compiler()
        assert isinstance(found, str) and reason in found
    finally:
        native.compiler.cache_clear()


@needs_compiler
def test_a_compiler_that_ignores_vector_types_is_not_used(tmp_path, monkeypatch):
    """As tcc does, without a warning."""
    monkeypatch.setattr(native, "settings", lambda: type("S", (), {"cache": tmp_path})())
    monkeypatch.setattr(native, "_PROBE", "int probe(float *x) { x[0] = x[0] * x[0] + x[0]; return LANES; }\n")
    native.compiler.cache_clear()
    try:
        assert "wrongly" in native.compiler()
    finally:
        native.compiler.cache_clear()


def test_the_compiler_is_searched_for_in_the_ziglang_wheel(monkeypatch):
    commands = []
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: name == "ziglang")
    monkeypatch.setattr(native, "_run", lambda command: commands.append(command) or "#define __AVX2__ 1\n")
    found = Compiler.find()
    assert found.command[1:] == ("-m", "ziglang", "cc") and found.vector == (8, 16) and len(commands) == 1
