"""Kernels that other processes compile: Triton finds them in its cache and compiles nothing."""

import copy
import importlib.util
import io
import os
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from emulated import emulated
from torch.utils.weak import WeakIdKeyDictionary

import pumice as pm
from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import kernel as kernels
from pumice.ops import ahead as together
from pumice.ops.ahead import Calls, Compilation, CompiledTogether
from pumice.runtime import compile as ahead
from pumice.runtime import launch
from pumice.schedule.tile import Tile
from pumice.testing import random_cloud

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Driver:
    """What Triton asks of the driver of a GPU before it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that Triton compiles for, with an empty cache."""
    from triton import knobs
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(driver, "_active", Driver(), raising=False)
    return tmp_path


def generated():
    """A kernel, and what it is launched with, without memory."""
    operands = {"A": torch.empty(4096, 64, device="meta").half(), "B": torch.empty(64, 32, device="meta").half()}
    bound = bind(parse("C[m,n] = A[m,k] * B[k,n]"), {name: tuple(x.shape) for name, x in operands.items()})
    out = torch.empty(4096, 32, device="meta", dtype=torch.half)
    given = {**operands, "": out}
    launch = kernels.generated_kernel(bound, given, Tile(64, 32, 32), kernels.KernelOptions()).sized(given, None)
    return launch.generated, kernels._values(launch, operands, out, None)


def binaries(folder: Path) -> set[Path]:
    return set(folder.rglob("*.cubin"))


def job_of(monkeypatch, kernel, values, options) -> dict:
    """What a worker is told of a kernel."""
    told = []
    worker = types.SimpleNamespace(compile=lambda job: told.append(job) or False)
    with monkeypatch.context() as patch:
        patch.setattr(ahead._THREAD, "worker", worker, raising=False)
        patch.setattr(ahead.compile_worker, "build", lambda job, known: None)
        kernel.warmup(*values, grid=(1,), **options)
    return told[0]


def test_a_worker_compiles_what_is_then_found_without_parsing_it(gpu, monkeypatch):
    one, values = generated()
    worker = ahead.Worker()
    job = job_of(monkeypatch, one.kernel, values, one.triton_options)
    # A worker goes on after a kernel that does not compile.
    assert not worker.compile({**job, "text": job["text"].replace("tl.dot", "tl.no_such")})
    assert worker.compile(job)
    worker.close()
    (binary,) = binaries(gpu)
    monkeypatch.setattr(ahead.compile_worker, "build", None)
    kernels.loaded.cache_clear()
    fresh, values = generated()
    found = fresh.kernel.warmup(*values, grid=(1,), **fresh.triton_options)
    assert found.kernel == binary.read_bytes() and found.metadata.num_warps == fresh.triton_options["num_warps"]
    assert "function" not in vars(fresh.kernel)


@pytest.mark.parametrize("broken", ["", "{", '{"hash": "0", "name": "no.json"}', "[]"])
def test_a_mark_that_tells_nothing_is_made_anew(gpu, broken):
    one, values = generated()
    one.kernel.warmup(*values, grid=(1,), **one.triton_options)
    (mark,) = gpu.glob("pumice-*.json")
    good = mark.read_text()
    mark.write_text(broken)
    # As in another process.
    one.kernel._loaded.clear()
    assert one.kernel.warmup(*values, grid=(1,), **one.triton_options).kernel
    assert mark.read_text() == good


def test_a_kernel_that_several_ask_for_is_compiled_once(gpu, monkeypatch):
    kernels.loaded.cache_clear()
    one, values = generated()
    build, begun, go = ahead.compile_worker.build, [], threading.Event()

    def counted(job, function):
        begun.append(job["mark"])
        go.wait(20)
        return build(job, function)

    monkeypatch.setattr(ahead.compile_worker, "build", counted)
    made = []
    ask = [
        threading.Thread(target=lambda: made.append(one.kernel.warmup(*values, grid=(1,), **one.triton_options)))
        for _ in range(3)
    ]
    for thread in ask:
        thread.start()
    go.set()
    for thread in ask:
        thread.join(60)
    assert len(begun) == 1 and len(made) == 3 and made[0] is made[1] is made[2]
    # Other options are another kernel.
    one.kernel.warmup(*values, grid=(1,), **{**one.triton_options, "num_warps": 8})
    assert len(set(begun)) == 2


def kernel_calls():
    """(kernel, arguments, options) of a generated one and of some in files."""
    one, values = generated()
    yield one.kernel, values, one.triton_options
    flat, wide = (torch.empty(64, dtype=kind, device="meta") for kind in (torch.int32, torch.int64))
    place = ahead.TritonKernel.of("pumice.coords.chain_kernels", "place")
    yield place, [flat, wide, *[flat] * 4, wide, flat, 1, 1 << 40, 3, 17, 64, False], {"num_warps": 4}


@pytest.mark.parametrize("number", [0, 1])
def test_arguments_are_specialised_as_triton_does(gpu, number):
    """Sizes of 1, of multiples of 16 and beyond 32 bits, arrays that are not aligned."""
    from triton import knobs

    kernel, values, options = [*kernel_calls()][number]
    told = []
    knobs.runtime.jit_cache_hook = lambda **seen: told.append(seen["compile"]) or True
    integers = [n for n, v in enumerate(values) if isinstance(v, int) and not kernel._parameters[n].is_constexpr]
    for size in (1, 2, 16, (1 << 31) - 1, 1 << 31, 1 << 40):
        given = [size if n in integers else v for n, v in enumerate(values)]
        kernel.function.warmup(*given, grid=(1,), **options)
        kinds, constants, aligned = ahead.specialised(kernel._parameters, given)
        wanted = told.pop()
        assert kinds == [*wanted["signature"].values()]
        assert {(place,): value for place, value in constants} == wanted["constants"]
        assert [(place,) for place in aligned] == [place for place, attrs in wanted["configs"][0].items() if attrs]


def test_nothing_is_parsed_where_kernels_are_interpreted(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    one, values = generated()
    assert one.kernel.warmup(*values, grid=(1,), **one.triton_options) is None


def test_background_tasks_run_in_order_and_go_on_after_one_that_fails():
    done, ended = [], threading.Event()
    background = ahead.Background(1)
    for task in (lambda: done.append(1), lambda: 1 / 0, lambda: done.append(2), ended.set):
        background.submit(task)
    assert ended.wait(30) and done == [1, 2]


def test_what_somebody_waits_for_runs_first():
    begun, ends, done = threading.Event(), threading.Event(), []
    background = ahead.Background(1)
    background.submit(lambda: (begun.set(), ends.wait(30)), ahead.NOW)
    assert begun.wait(30)
    for turn in (ahead.LATER, ahead.NEXT, ahead.NOW):
        background.submit(partial(done.append, turn), turn)
    ended = threading.Event()
    background.submit(ended.set)
    ends.set()
    assert ended.wait(30) and done == [ahead.NOW, ahead.NEXT, ahead.LATER]
    background.close()


def test_a_task_begins_while_the_next_one_is_made():
    background, begun, told = ahead.Background(1), threading.Event(), []

    def tasks():
        yield begun.set
        assert begun.wait(30)
        yield lambda: told.append("second")

    background.run(tasks(), lambda: told.append("meanwhile"))
    assert sorted(told) == ["meanwhile", "second"]
    background.run(iter(()))
    background.close()


def test_tasks_that_have_not_begun_are_dropped_at_exit():
    begun, ends, done = threading.Event(), threading.Event(), []
    background = ahead.Background(1)
    background.submit(lambda: (begun.set(), ends.wait(30), done.append(1)))
    background.submit(lambda: done.append(2))
    assert begun.wait(30)
    closing = threading.Thread(target=background.close)
    closing.start()
    ends.set()
    closing.join(30)
    assert done == [1] and not any(thread.is_alive() for thread in background._threads)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_has_threads_of_its_own():
    code = "import os\nfrom pumice.runtime.compile import Background\nbackground = Background(1)\n"
    code += "background.run([lambda: None])\nchild = os.fork()\n"
    code += "background.run([lambda: print('ran ', end='', flush=True)])\n"
    code += "os._exit(0) if not child else print(os.waitpid(child, 0)[1])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert sorted(found.stdout.split()) == ["0", "ran", "ran"]


def test_processes_start_with_the_first_kernel_that_is_not_on_disk(monkeypatch):
    """In the thread that compiles and in others; where all kernels are on disk, none starts."""
    started, compiled = [], []
    monkeypatch.setattr(ahead.Worker, "start", lambda self: started.append(self))
    monkeypatch.setattr(ahead.Worker, "compile", lambda self, job: compiled.append((self, job)) or True)
    background = ahead.Background(3)
    try:
        background.run([lambda: None] * 5)
        assert not started
        background.run([lambda: background.compile({"job": 1})])
        assert len(started) == len({*started}) == 4 and len(compiled) == 1
        assert background.compile({"job": 2}) and compiled[1] == (background._spare, {"job": 2})
        assert compiled[0][0] is not background._spare and len(started) == 4
    finally:
        background.close()
    assert not background.compile({"job": 3}) and len(started) == 4


def test_kernels_import_no_packages_in_a_worker():
    """Those import torch, which takes seconds."""
    script = ahead._WORKER
    told = {"text": "", "module": "pumice.coords.chain_kernels", "name": "insert_cells"}
    told["file"] = str(script.parents[1] / "coords" / "chain_kernels.py")
    code = f"import sys; sys.path.insert(0, {str(script.parent)!r}); import compile_worker as worker; "
    code += f"worker.function({told!r}); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_what_was_compiled_before_needs_no_worker(gpu, monkeypatch):
    one, values = generated()
    asked = []
    worker = types.SimpleNamespace(compile=lambda job: asked.append(job) or False)
    monkeypatch.setattr(ahead._THREAD, "worker", worker, raising=False)
    for _ in range(2):
        assert one.kernel.warmup(*values, grid=(1,), **one.triton_options).kernel
    assert len(asked) == 1 and asked[0]["target"] == {"backend": "cuda", "arch": 90, "warp_size": 32}


class Kernel:
    """What Triton's JIT function is to a launcher."""

    def __init__(self):
        self.started, self.ahead = [], []

    def __getitem__(self, grid):
        return lambda *values, num_warps: self.started.append((grid, values))

    def warmup(self, *values, grid, num_warps):
        self.ahead.append((threading.current_thread().name, values, num_warps))
        return object()


def test_launches_are_compiled_together_and_not_started(monkeypatch):
    monkeypatch.setattr(launch, "CompiledKernel", lambda made: lambda programs, values, device: None)
    kernels_ = [Kernel(), Kernel()]
    launchers = [launch.KernelLauncher(kernel) for kernel in kernels_]
    x, y = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    with launch.compiling_launches():
        launchers[0](4, (x, y), (7,), {"BLOCK": 64}, 8)
        launchers[0](9, (x, y), (7,), {"BLOCK": 64}, 8)
        launchers[1](4, (y,), (), {"BLOCK": 128})
    assert not any(kernel.started for kernel in kernels_)
    ((name, (a, b, *rest), warps),) = kernels_[0].ahead
    assert name == "pumice-compile" and (a.dtype, b.dtype, *rest, warps) == (torch.int32, torch.int64, 7, 64, 8)
    assert a.is_meta and len(kernels_[1].ahead) == 1
    # What is known is compiled once.
    with launch.compiling_launches():
        launchers[1](4, (y,), (), {"BLOCK": 128})
        launchers[1](4, (y,), (), {"BLOCK": 256})
    assert len(kernels_[1].ahead) == 2


def test_a_terminal_is_told_how_many_kernels_are_compiled(monkeypatch):
    told = io.StringIO()
    told.isatty = lambda: True  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(sys, "stderr", told)
    monkeypatch.setattr(ahead, "_PATIENCE", 0.01)
    background, ends = ahead.Background(1), threading.Event()
    threading.Timer(0.2, ends.set).start()
    background.run([lambda: None, lambda: ends.wait(30)])
    background.close()
    assert "\rpumice: 1 of 2 kernels compiled" in told.getvalue() and told.getvalue().endswith("\r\033[K")


def test_a_launch_gives_triton_three_axes_and_all_arguments(gpu, monkeypatch):
    from triton.compiler import CompiledKernel

    started = []
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda self: None)
    monkeypatch.setattr(CompiledKernel, "run", property(lambda self: lambda *given: started.append(given)))
    monkeypatch.setattr(CompiledKernel, "function", None, raising=False)
    one, values = generated()
    one.kernel[(5,)](*values, **one.triton_options)
    ((*grid, _, _, _, _, _, _), given) = started[0][:9], started[0][9:]
    assert grid == [5, 1, 1] and [*given] == values


def net_of_layers():
    """Without levels of a few voxels, whose kernels are others."""
    down, up = pm.nn.Conv3d(16, 32, 2, stride=2), pm.nn.InverseConv3d(32, 16, 2, stride=2)
    head = pm.nn.Conv3d(4, 16, 3, bias=False), pm.nn.BatchNorm(16), pm.nn.ReLU(), down, pm.nn.BatchNorm(32)
    return pm.nn.Sequential(*head, pm.nn.Conv3d(32, 32, 3), pm.nn.Linear(32, 32), up)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_kernels_of_layers_are_known_before_they_are_called(tmp_path, monkeypatch, training):
    """Their first calls need no others: those with other numbers of entries a piece share code."""
    made, generate = set(), kernels.KernelExecutor.generate

    def generated_too(self, given, tile, *how):
        layouts = frozenset((name, x.shape[1:], x.stride(), x.dtype) for name, x in given.items())
        made.add((str(self.bound.statement), layouts, tile))
        return generate(self, given, tile, *how)

    monkeypatch.setattr(kernels.KernelExecutor, "generate", generated_too)
    # Of larger scenes.
    monkeypatch.setattr(importlib.import_module("pumice.lower.maps").TILE_HEIGHTS, "compile", lambda *given: None)
    coords = random_cloud(2000, 3, extent=20, batch_size=1, seed=0)
    dtype = torch.float16
    x = pm.SparseTensor(torch.randn(len(coords), 4, dtype=dtype), coords)
    with emulated(tmp_path) as gpu, torch.set_grad_enabled(training):
        net = net_of_layers().to(dtype).train(training)
        for layer in net:
            if isinstance(layer, CompiledTogether):
                for one in together.compilations(layer, Calls(x.feats, len(x), training)):
                    one.run()
        known, norms = {*made}, [each.cache_info().misses for each in gpu.of_norms]
        assert len(known) >= 5 and not gpu.launches
        y = net(x)
        if training:
            y.feats.square().sum().backward()
        assert norms == [each.cache_info().misses for each in gpu.of_norms] and gpu.norms
    assert made == known


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_kernels_of_larger_scenes_are_compiled_in_the_background(tmp_path, monkeypatch, training):
    """Until they are there, maps have tiles of the height whose kernels are."""
    maps = importlib.import_module("pumice.lower.maps")
    heights, x = [], torch.zeros(9, 16, dtype=torch.float16)
    monkeypatch.setattr(maps.TILE_HEIGHTS, "compile", lambda height, task: heights.append(height) or task())
    for rows, later in ((2000, {128}), (60_000, set())):
        heights.clear()
        with emulated(tmp_path):
            layer = pm.nn.Conv3d(16, 16, 3).to(torch.float16)
            for one in together.compilations(layer, Calls(x, rows, training)):
                one.submit(one.run)
        assert {*heights} == later


def test_norms_alike_have_the_same_kernels(tmp_path):
    """Row strides of gradients are numbers: kernels are told what they are multiples of."""
    norm = importlib.import_module("pumice.lower.norm")
    with emulated(tmp_path):
        told = norm.Statistics(None, 1e-5), (True, True, False, True), torch.zeros(0, 48, dtype=torch.float16)
        first, other = (norm.NormKernels(*told, (torch.float32, torch.float32)) for _ in range(2))
        # Moments and normalise; products and gradient.
        assert len(first.compilations()) == 2 and len(first.gradient_compilations()) == 2
        assert other.compilations().keys() == first.compilations().keys()
        assert other.gradient_compilations((96, 144)).keys() == first.gradient_compilations().keys()
        assert len(other.gradient_compilations((100,))) == 4


def test_counts_and_status_words_are_aligned():
    """As kernels that are compiled ahead take them: others would be compiled in their place when they are called."""
    for rows in (0, 1, 300):
        cloud = pm.SparseTensor(torch.zeros(rows, 1), random_cloud(rows, 3, extent=20), batch_size=1).geometry.cloud
        assert int(cloud.count) == rows and int(cloud.status) == 0
        assert cloud.count.data_ptr() % 16 == cloud.status.data_ptr() % 16 == 0


def test_layers_are_compiled_together_once_for_each_kind_of_features(monkeypatch):
    asked, submitted = [], []

    class Layer(CompiledTogether, torch.nn.Module):
        operation, there, __hash__ = "nothing", True, None

        def __eq__(self, other):
            return True

    def find(layer, calls):
        asked.append((layer, calls.like.dtype, calls.rows))
        return [Compilation(object(), lambda: None)] * layer.there

    monkeypatch.setattr(together, "_LAYERS", WeakIdKeyDictionary())
    monkeypatch.setitem(together._COMPILATIONS, "nothing", find)
    monkeypatch.setattr(together.BACKGROUND, "submit", lambda task, turn: submitted.append(turn))
    first, other = Layer(), copy.deepcopy(Layer())
    other.there = False
    like = types.SimpleNamespace(is_cuda=True, dtype=torch.half, device="cuda")
    together.compile_layers(Calls(types.SimpleNamespace(is_cuda=False), 9))
    assert not asked
    for _ in range(2):
        together.compile_layers(Calls(like, 9))
    # One that has no kernel for these may have one when it is on their device.
    layers = [layer for layer, _, _ in asked]
    assert layers[0] is first and layers[1] is layers[2] is other and len(layers) == 3 and submitted == [ahead.NEXT]
    like.dtype = torch.float32
    del other.there, Layer.there
    together.compile_layers(Calls(like, 9))
    assert len(submitted) == 1
    Layer.there = True
    together.compile_layers(Calls(like, 9))
    assert len(submitted) == 3
    # What is one kernel of several layers is compiled once.
    monkeypatch.setitem(together._COMPILATIONS, "nothing", lambda layer, calls: [Compilation("alike", lambda: None)])
    like.dtype = torch.bfloat16
    together.compile_layers(Calls(like, 9))
    assert len(submitted) == 4
    del first, other, layers
    asked.clear()
    assert len(together._LAYERS) == 0


def test_work_goes_on_when_its_kernels_are_there():
    background, go, began = ahead.Background(2), threading.Event(), threading.Event()
    there, done = set(), []

    def compile_one(name):
        began.set()
        assert go.wait(60)
        if name != "broken":
            there.add(name)

    def work(*names):
        background.run([partial(compile_one, name) for name in names if name not in there])
        done.append(names)

    beside = ahead.CompiledBeside()
    try:
        assert not beside.run("a", partial(work, "a")) and began.wait(60)
        # Asked for once; what another key stands for is compiled beside, too.
        assert not beside.run("a", pytest.fail) and not beside.run("b", partial(work, "b", "broken")) and not done
        go.set()
        while not beside.run("a", partial(work, "a")):
            time.sleep(0.01)
        while not beside.run("b", partial(work, "b", "broken")):
            time.sleep(0.01)
        # What failed in the background is compiled within the second try.
        assert done == [("a",), ("b", "broken")] and beside._pending == {}
        assert not beside.run("c", partial(work, "c"))
    finally:
        go.set()
        background.close()


def test_work_that_fails_is_tried_again_and_waits():
    ended, beside, tries = threading.Semaphore(0), ahead.CompiledBeside(), []

    def work():
        tries.append(ahead._BESIDE.get())
        raise ahead.CompilationPending(1, ended) if tries[-1] else ValueError("it does not compile")

    assert not beside.run(0, work)
    ended.release()
    for _ in range(2):
        with pytest.raises(ValueError, match="does not compile"):
            beside.run(0, work)
    assert tries == [True, False, False]
