"""Kernels that other processes compile: Triton finds them in its cache and compiles nothing."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from pumice.language.bind import bind
from pumice.language.parse import parse
from pumice.lower import kernel as kernels
from pumice.lower.stamp import dynamic_rows
from pumice.runtime import compile as ahead
from pumice.runtime import launch
from pumice.schedule.tile import Tile

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
    launch = kernels.prepare(bound, operands, out, Tile(64, 32, 32))
    return launch, kernels._values(launch, operands, out, None)


def binaries(folder: Path) -> set[Path]:
    return set(folder.rglob("*.cubin"))


def test_a_worker_compiles_what_triton_then_finds(gpu):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    launch, values = generated()
    data = ahead.specialization(launch.kernel, values, launch.options)
    told = ahead.job(launch.kernel, launch.source.text, data)
    worker = ahead.Worker()
    assert worker.compile(told)
    (binary,) = binaries(gpu)
    # The same kernel here: of the same name in the cache, which nothing is added to.
    found = json.loads(data)
    constants, attributes = (
        dict(zip(map(tuple, found[f"{name}_keys"]), found[f"{name}_vals"], strict=True))
        for name in ("constant", "attrs")
    )
    before = binary.stat().st_mtime_ns
    source = ASTSource(launch.kernel, found["signature"], constants, attributes)
    made = compiled(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    assert binaries(gpu) == {binary} and binary.stat().st_mtime_ns == before and made.hash
    # A worker goes on after a kernel that does not compile.
    assert not worker.compile({**told, "text": told["text"].replace("tl.dot", "tl.no_such")})
    assert worker.compile(told)
    worker.close()


def test_a_hook_of_the_user_is_called_but_where_a_specialisation_is_asked_for(gpu):
    from triton import knobs

    seen = []
    knobs.runtime.jit_cache_hook = lambda **told: seen.append(told) or True
    launch, values = generated()
    assert ahead.specialization(launch.kernel, values, launch.options) and not seen
    assert launch.kernel.warmup(*values, grid=(1,), **launch.options) is None and len(seen) == 1


def test_nothing_is_compiled_ahead_outside_of_background_threads(gpu):
    launch, values = generated()
    ahead.compile_ahead(launch.kernel, launch.source.text, values, launch.options)
    assert not binaries(gpu)


def test_background_tasks_run_in_order_and_go_on_after_one_that_fails():
    done, ended = [], threading.Event()
    background = ahead.Background(1)
    for task in (lambda: done.append(1), lambda: 1 / 0, lambda: done.append(2), ended.set):
        background.submit(task)
    assert ended.wait(30) and done == [1, 2]


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
    code += "background.run([lambda: None])\nchild = os.fork()\nbackground.run([lambda: print('ran', flush=True)])\n"
    code += "os._exit(0) if not child else print(os.waitpid(child, 0)[1])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert sorted(found.stdout.split()) == ["0", "ran", "ran"]


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
    launch, values = generated()
    asked = []
    worker = types.SimpleNamespace(compile=lambda told: asked.append(told) or True)
    monkeypatch.setattr(ahead._THREAD, "worker", worker, raising=False)
    for _ in range(2):
        ahead.compile_ahead(launch.kernel, launch.source.text, values, launch.options)
    assert len(asked) == 1 and asked[0]["target"] == {"backend": "cuda", "arch": 90, "warp_size": 32}


def test_rows_that_vary_between_calls_are_those_of_leading_indices_and_of_gathers():
    shapes = {"x": (5, 4), "w": (8, 27, 4), "met": (9, 16), "rows": (3, 16), "tile": (9,), "k": (9,)}
    text = "y[rows[tile[e],b],n] = x[met[e,b],c] * w[n,k[e],c] ; tile:sorted, rows:distinct, rows:onto"
    bound = bind(parse(text), shapes, (7, 8))
    names = ("x", "w", "met", "rows", "tile", "k", "")
    assert dynamic_rows(bound, names) == [True, False, True, True, True, True, True]


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
    monkeypatch.setattr(ahead, "specialization", lambda *given: None)
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
