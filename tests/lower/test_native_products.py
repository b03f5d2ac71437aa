"""C kernels for products of gathered rows agree with the plain twin, for any vector length and number of threads."""

import gc
import itertools
import os
import weakref

import pytest
import torch
from windows import RELATIONS

import pumice as pm
from benchmarks.harness.timing import on_threads
from pumice.coords import Geometry, KernelMap, Pairs, Relation, kernel_map
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import cpu, native_products, plan, reference
from pumice.ops.conv import conv_features
from pumice.runtime import native
from pumice.runtime.native import Compiler, NativeUnavailableError
from pumice.testing import random_cloud

CHANNELS = [(1, 1), (4, 32), (5, 7), (32, 48), (70, 64), (64, 33), (16, 80), (3, 130), (9, 270)]
needs_compiler = pytest.mark.skipif(isinstance(native.compiler(), str), reason=f"{native.compiler()}")


@pytest.fixture(scope="module")
def cloud() -> Geometry:
    cells = torch.tensor(list(itertools.product([0], range(14), range(14), range(14))), dtype=torch.int32)
    return Geometry.checked(cells[torch.rand(len(cells), generator=torch.Generator().manual_seed(0)) < 0.8])


def operands(found, channels, dtype=torch.float32, groups=1):
    torch.manual_seed(1)
    x, grad = torch.randn(found.num_inputs, groups, channels[0]), torch.randn(found.num_outputs, groups, channels[1])
    return x.to(dtype), (torch.randn(groups, channels[1], found.volume, channels[0]) / 27).to(dtype), grad.to(dtype)


def lists_of(pairs, rows, inputs):
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), pairs.sizes.cumsum(0)])
    return native_products.lists_of_pairs(run_of(torch.float32), pairs[:2], ends, (inputs, rows))


def run_of(dtype):
    return native_products.kernels(torch.float64 if dtype == torch.float64 else torch.float32)


def check(pairs, rows, x, weight, grad):
    lists, run, groups = lists_of(pairs, rows, len(x)), run_of(x.dtype), x.shape[1]
    y = native_products.products(run, x, native_products.packed(run, weight), weight.shape[1], lists, rows)
    dw = native_products.gradients(run, x, grad, lists)
    rtol = 1e-12 if x.dtype == torch.float64 else 1e-4
    x, weight, grad = x.double().flatten(1), weight.double().flatten(0, 1), grad.double().flatten(1)
    truth = reference.forward(x, weight, pairs, rows, groups)
    torch.testing.assert_close(y.double().flatten(1), truth, rtol=rtol, atol=rtol)
    truth = reference.weight_gradient(x, grad, pairs, groups)
    torch.testing.assert_close(dw.double().flatten(0, 1), truth, rtol=rtol, atol=10 * rtol)
    return y, dw


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", RELATIONS)
def test_products_and_gradients(cloud, name, channels, dtype):
    found, _ = kernel_map(cloud, RELATIONS[name])
    check(found.pairs(), found.num_outputs, *operands(found, channels, dtype))
    turned = found.transpose()
    check(turned.pairs(), turned.num_outputs, *operands(turned, channels, dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("groups", "channels"), [(2, (5, 7)), (3, (16, 16)), (7, (1, 3)), (4, (70, 20))])
def test_groups(cloud, groups, channels, dtype):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    check(found.pairs(), found.num_outputs, *operands(found, channels, dtype, groups))


@needs_compiler
def test_weights_of_any_strides_are_packed(cloud):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    weight, run = operands(found, (20, 21), groups=2)[1], run_of(torch.float32)
    for order in itertools.permutations(range(4)):
        other = weight.permute(order).contiguous().permute([order.index(axis) for axis in range(4)])
        assert torch.equal(native_products.packed(run, other), native_products.packed(run, weight))


@needs_compiler
def test_results_do_not_depend_on_the_number_of_threads(cloud):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    given, results = operands(found, (24, 80)), []
    for count in (1, 2, 5):
        with on_threads(count):
            results.append(check(found.pairs(), found.num_outputs, *given))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


@needs_compiler
@pytest.mark.parametrize("name", RELATIONS)
def test_lists_of_a_neighbour_table_are_those_of_its_pairs(cloud, name):
    whole, _ = kernel_map(cloud, RELATIONS[name])
    for found in (whole, whole.transpose()):
        lists, taps = native_products.lists_of_rows(run_of(torch.float32), found.rows())
        want = lists_of(found.pairs(), found.num_outputs, found.num_inputs)
        assert torch.equal(lists.starts, want.starts) and torch.equal(taps.long(), found.taps())
        # The order within a chunk is free.
        one, other = (torch.stack([taps, x.scatter, x.gather]).unique(dim=1) for x in (lists, want))
        assert torch.equal(one, other)


@pytest.mark.parametrize("available", [True, False])
def test_rows_of_a_table_beyond_the_inputs_are_not_read(monkeypatch, available):
    """As in a table from a file."""
    if not available:
        monkeypatch.setattr(native_products, "kernels", lambda dtype: None)
    rows = torch.full((5, 27), -1, dtype=torch.int32)
    rows[2, 3] = 10**8
    found = KernelMap.from_rows(Relation.of(3, 3), rows, 5)
    assert not conv_features(torch.ones(5, 4), torch.ones(6, 27, 4), found, 5).any()


@needs_compiler
def test_lists_do_not_keep_the_arrays_that_they_are_made_of():
    outputs, inputs, taps = (torch.arange(9).int() for _ in range(3))
    kept = cpu._lists(outputs, inputs, taps, (9, 9, 9))
    assert cpu._lists(outputs, inputs, taps, (9, 9, 9)) is kept
    gone = weakref.ref(outputs)
    del outputs
    assert gone() is None


@needs_compiler
def test_lists_without_pairs_and_outputs_without_pairs():
    empty = torch.zeros(0, dtype=torch.int64)
    nothing = Pairs(empty, empty, torch.zeros(3, dtype=torch.int64))
    x, weight, grad = torch.randn(4, 1, 5), torch.randn(1, 6, 3, 5), torch.randn(2000, 1, 6)
    y, dw = check(nothing, 2000, x, weight, grad)
    assert not y.any() and not dw.any()
    one = Pairs(torch.tensor([3]), torch.tensor([1999]), torch.tensor([0, 1, 0]))
    y, dw = check(one, 2000, x, weight, grad)
    assert not y[:1999].any() and not dw[:, :, ::2].any()
    run = run_of(torch.float32)
    packed = native_products.packed(run, weight)
    assert native_products.products(run, x, packed, 6, lists_of(nothing, 0, 4), 0).shape == (0, 1, 6)


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
    check(pairs, 40, x[:, None], w.permute(2, 0, 1)[None], grad[:, None])


@needs_compiler
@pytest.mark.parametrize(("lanes", "registers"), [(4, 16), (4, 32), (8, 16)])
def test_other_vector_lengths(cloud, monkeypatch, lanes, registers):
    """For CPUs with other registers; only the tiles differ."""
    found, _ = kernel_map(cloud, RELATIONS["support"])
    kernels = native_products.Kernels.compiled
    made = {dtype: kernels(native.compiler(), dtype, lanes, registers) for dtype in (torch.float32, torch.float64)}
    monkeypatch.setattr(native_products, "kernels", made.__getitem__)
    for channels, dtype in itertools.product(CHANNELS, made):
        check(found.pairs(), found.num_outputs, *operands(found, channels, dtype))


def trained(net, x):
    y = net(x).feats
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2])
def test_layers_run_them_where_there_is_a_compiler_and_torch_elsewhere(monkeypatch, groups, dtype):
    runs, call = [], native_products.Kernels.call

    def counted(self, name, *given):
        runs.append(name)
        return call(self, name, *given)

    monkeypatch.setattr(native_products.Kernels, "call", counted)
    coords, results = random_cloud(400, 3, extent=12, seed=0), []
    for available in (not isinstance(native.compiler(), str), False):
        if not available:
            monkeypatch.setattr(native_products, "kernels", lambda dtype: None)
        torch.manual_seed(0)
        layers = pm.nn.Conv3d(6, 16, 3, groups=groups), pm.nn.Conv3d(16, 10, 3, stride=2, padding=1, groups=groups)
        net = torch.nn.Sequential(*layers).to(dtype)
        results.append(trained(net, pm.SparseTensor(torch.randn(400, 6, dtype=dtype), coords)))
        # Two layers; the input of the first needs no gradient.
        kernels = ["gradients"] * 2 + ["pack"] * 3 + ["pairs"] * 4 + ["products"] * 3 + ["sort"] * 2
        assert sorted(runs) == kernels * available
        runs.clear()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_arrays_in_any_order_with_entries_of_nothing(monkeypatch, available, dtype):
    torch.manual_seed(0)
    if not available:
        monkeypatch.setattr(native_products, "kernels", lambda dtype: None)
    s, g, k = (torch.randint(-1, extent, (300,)).to(dtype) for extent in (8, 7, 6))
    x, w, y = torch.randn(7, 4), torch.randn(6, 4, 5), torch.randn(8, 5)
    for text, given in (
        ("Y[S[p],n] += X[G[p],c] * W[K[p],c,n]", {"W": w, "Y": y}),
        ("V[K[p],c,n] += X[G[p],c] * Y[S[p],n]", {"Y": y, "V": w}),
    ):
        got, want = (pm.einsum(text, X=x, S=s, G=g, K=k, **given, lowering=name) for name in ("gathered", "reference"))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_without_a_compiler_no_weight_is_gathered_per_pair(monkeypatch):
    """[pairs, C_in, C_out] would take 30 GB."""
    monkeypatch.setattr(native_products, "kernels", lambda dtype: None)
    x = pm.SparseTensor(torch.randn(9000, 128), random_cloud(9000, 3, extent=24, seed=0))
    trained(pm.nn.Conv3d(128, 128, 3), x)


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


@needs_compiler
def test_packed_weights_are_kept_until_they_are_written():
    """Also by writes through `.data`, which do not change a tensor's version."""
    x = pm.SparseTensor(torch.randn(400, 6), random_cloud(400, 3, extent=9, seed=0))
    layer, runs, call = pm.nn.Conv3d(6, 8, 3, bias=False), [], native_products.Kernels.call
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(
            native_products.Kernels, "call", lambda k, name, *given: runs.append(name) or call(k, name, *given)
        )
        before = [layer(x).feats for _ in range(3)][-1]
        assert runs.count("pack") == 1
        for write in (layer.weight.mul_, layer.weight.data.mul_):
            write(2)
            before = 2 * before
            torch.testing.assert_close(layer(x).feats, before)
        assert runs.count("pack") == 3


def test_one_plan_serves_scenes_of_other_sizes(monkeypatch):
    made, prepared = [], plan._prepared
    monkeypatch.setattr(plan, "_prepared", lambda *given: made.append(1) or prepared(*given))
    layer = pm.nn.Conv3d(6, 10, 3)
    for count in (300, 310, 320, 290):
        x = pm.SparseTensor(torch.randn(count, 6), random_cloud(count, 3, extent=9, seed=count))
        with torch.no_grad():
            y, rows = layer(x), kernel_map(x.geometry, layer.relation)[0]
        weight = layer.weight.detach().flatten(1, -2)
        want = reference.forward(x.feats, weight, rows.pairs(), count, 1) + layer.bias.detach()
        torch.testing.assert_close(y.feats, want, rtol=1e-4, atol=1e-4)
    assert len(made) == 1


def test_training_over_varying_scenes_keeps_nothing():
    net = pm.nn.Sequential(pm.nn.Conv3d(2, 4, 3, bias=False), pm.nn.Conv3d(4, 4, 3, bias=False))
    tables = []
    for seed in range(3):
        x = pm.SparseTensor(torch.randn(400, 2), random_cloud(400, seed=seed))
        net(x).feats.square().mean().backward()
        tables.append(weakref.ref(kernel_map(x.geometry, net[0].relation)[0].pairs().inputs))
    del x
    gc.collect()
    assert [table() for table in tables] == [None] * 3


def test_shapes_in_signatures_are_checked_under_test(cloud):
    found, _ = kernel_map(cloud, RELATIONS["same"])
    with pytest.raises(Exception, match="weight"):
        reference.forward(torch.zeros(len(cloud), 4), torch.zeros(8, 4), found.pairs(), len(cloud), 1)


def test_equal_statements_share_a_match():
    """Matches are cached by equality: the target of one statement is not that of an equal one, but has its place."""
    text = "O[o[e],n] = X[i[e],c] * W[k[e],c,n] ; k:sorted"
    given = {"o": torch.arange(5), "i": torch.arange(5), "k": torch.arange(5) // 2}
    given |= {"X": torch.randn(5, 4), "W": torch.randn(3, 4, 6)}
    results = []
    for _ in range(2):
        statement = parse(text)
        bound = bind(statement, {name: tuple(x.shape) for name, x in given.items()}, (5, 6))
        assert cpu.gathered_refusal(statement, bound, given) is None
        results.append(cpu.GatherExecutor(bound.statement, bound.shape, torch.float32)(given, None))
    wanted = torch.einsum("ec,ecn->en", given["X"], given["W"][given["k"]])
    torch.testing.assert_close(results, [wanted, wanted])
