"""Kernel compilation ahead of use, in worker processes, since Triton's compiler holds the GIL."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from functools import cached_property, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from threading import Lock, RLock, Semaphore, Thread, local
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from pumice.runtime import compile_worker

Task = Callable[[], object]
_WORKER = Path(__file__).with_name("compile_worker.py")
_PATIENCE = 1.0
"""Seconds of waiting between reports."""
NOW, NEXT, LATER = range(3)
"""Task priorities: a caller waits, a caller will wait soon, or none waits."""
LOADING = RLock()
"""Held while a binary may be loaded: Triton loads at the first launch, which is not thread-safe."""
_THREAD = local()
"""worker: of a background thread."""


_BESIDE: ContextVar[bool] = ContextVar("compiling_beside", default=False)


class CompilationPending(Exception):
    """`count` tasks are under way in the background; each releases `ended`."""

    def __init__(self, count: int, ended: Semaphore) -> None:
        super().__init__(f"{count} kernels are being compiled")
        self._left, self._ended = count, ended

    @property
    def done(self) -> bool:
        """True once all tasks have ended."""
        while self._left and self._ended.acquire(blocking=False):
            self._left -= 1
        return not self._left


@contextmanager
def compiling_beside() -> Iterator[None]:
    """Context in which waiting for compilation raises CompilationPending."""
    token = _BESIDE.set(True)
    try:
        yield
    finally:
        _BESIDE.reset(token)


class CompiledBeside:
    """Runs work without blocking on compilation: missing kernels compile in the background; a later call runs the
    work."""

    def __init__(self) -> None:
        self._pending: dict[Hashable, CompilationPending] = {}

    def run(self, key: Hashable, work: Task) -> bool:
        """True once `work` has run, False while its kernels compile; exceptions of `work` propagate. key: equal for
        work with the same kernels. A kernel that failed to compile in the background is compiled by the next call,
        which raises."""
        pending = self._pending.get(key)
        if pending is not None and not pending.done:
            return False
        try:
            with compiling_beside() if pending is None else nullcontext():
                work()
        except CompilationPending as more:
            self._pending[key] = more
            return False
        self._pending.pop(key, None)
        return True


class Background:
    """Runs tasks by priority in daemon threads, started with the first task. Each thread has a compiler process; a
    spare one serves other threads. The first kernel that is not on disk starts all processes, as others will follow:
    where all are, these would only slow the first calls. A failed task is dropped: the call that needs its result
    raises the error."""

    def __init__(self, threads: int) -> None:
        self._queue: PriorityQueue[tuple[int, int, Task]] = PriorityQueue()
        self._lock, self._count, self._numbers = Lock(), threads, count()
        self._threads: list[Thread] = []
        self._owner, self._closed = 0, False
        self._spare, self._of_spare = Worker(), Lock()
        self._not_started: list[Worker] = []

    def submit(self, task: Task, turn: int = LATER) -> None:
        """Run `task` in a copy of the caller's context. turn: NOW, NEXT or LATER; those of the first come first."""
        context = copy_context()
        self._start_threads()
        self._queue.put((turn, next(self._numbers), partial(context.run, task)))

    def _start_threads(self) -> None:
        with self._lock:
            # A forked process has none of its parent's threads.
            if (self._threads and self._owner == os.getpid()) or self._closed:
                return
            self._owner, self._queue = os.getpid(), PriorityQueue()
            workers = [Worker() for _ in range(self._count)]
            self._threads = [
                Thread(target=self._work, args=(one,), name="pumice-compile", daemon=True) for one in workers
            ]
            # A thread within the compiler while the interpreter ends would abort the process.
            atexit.register(self.close)
            for thread in self._threads:
                thread.start()
            self._spare, self._of_spare = Worker(), Lock()
            self._not_started = [*workers, self._spare]

    def compile(self, job: Mapping[str, Any]) -> bool:
        """Compile a kernel into the disk cache, in this thread's process or, for other threads, in the spare one. False
        if not done."""
        self._start_processes()
        worker = getattr(_THREAD, "worker", None)
        if worker is not None:
            return worker.compile(job)
        if self._owner != os.getpid() or self._closed or not self._of_spare.acquire(blocking=False):
            return False
        try:
            return self._spare.compile(job)
        finally:
            self._of_spare.release()

    def _start_processes(self) -> None:
        """Start the compiler processes, unless they were started; each takes half a second to be ready."""
        with self._lock:
            workers, self._not_started = self._not_started, []
            if self._owner != os.getpid() or self._closed:
                return
        for one in workers:
            with suppress(OSError):
                one.start()

    def run(self, tasks: Iterable[Task], meanwhile: Task | None = None) -> None:
        """Submit tasks as they are generated and wait for all, showing progress on a terminal; within
        `compiling_beside`, raise CompilationPending instead of waiting. Not to be called from a task: all threads could
        deadlock. meanwhile: run in the caller's thread before it waits."""
        ended, made = Semaphore(0), 0

        def ending(task: Task) -> None:
            try:
                task()
            finally:
                ended.release()

        for task in tasks:
            self.submit(partial(ending, task), NOW)
            made += 1
        if meanwhile is not None:
            meanwhile()
        if made and _BESIDE.get():
            raise CompilationPending(made, ended)
        begin, told = monotonic(), False
        for number in range(made):
            while not ended.acquire(timeout=_PATIENCE):
                if sys.stderr.isatty() and monotonic() - begin > _PATIENCE:
                    told = True
                    sys.stderr.write(f"\rpumice: {number} of {made} kernels compiled ")
                    sys.stderr.flush()
        if told:
            sys.stderr.write("\r\033[K")

    @property
    def left(self) -> int:
        """How many tasks have not ended."""
        return self._queue.unfinished_tasks

    def close(self) -> None:
        """Drop the tasks that have not begun, and wait for the others."""
        self._closed = True
        for _ in self._threads:
            self._queue.put((NOW, next(self._numbers), _nothing))
        for thread in self._threads:
            thread.join()
        with self._of_spare:
            self._spare.close()

    def _work(self, worker: Worker) -> None:
        _THREAD.worker = worker
        while (task := self._queue.get()[2]) and not self._closed:
            with suppress(Exception):
                task()
            self._queue.task_done()
        worker.close()


def _nothing() -> None: ...


class Worker:
    """A process that compiles one kernel after the other into Triton's cache on disk; it ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._starting = Lock()

    def compile(self, job: Mapping[str, Any]) -> bool:
        """True if the kernel is in the cache now."""
        try:
            process = self.start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            return process.stdout.readline() == "\n"
        except (OSError, TypeError):
            # No process, or a constant that JSON rejects.
            return False

    def start(self) -> subprocess.Popen[str]:
        """The process, which is started if there is none."""
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                command, pipe = [sys.executable, str(_WORKER)], subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            return self._process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()


class Parameter(NamedTuple):
    """A parameter of a kernel. annotated: the type that its annotation gives, or ""."""

    name: str
    is_constexpr: bool = False
    specialised: bool = True
    annotated: str = ""


class TritonKernel:
    """A Triton kernel that is loaded from Triton's disk cache without being parsed.

    Triton's JIT parses a kernel and all its callees before the cache lookup: about 10 ms of Python per kernel, which
    delay the thread that launches kernels. Here a mark file, named by the digest of source, types and options, records
    where in the cache the compiled kernel is.
    """

    def __init__(self, at: tuple[str, str, str], text: str, code: str, parameters: Sequence[Parameter]) -> None:
        """at: (module, file, name). text: the source, "" if in the module's file; code: digest of the source and its
        callees."""
        self._at, self._text, self._code, self._parameters = at, text, code, tuple(parameters)
        # By (device, mark): concurrent requests wait for one compilation.
        self._loaded: dict[tuple[int, str], Any] = {}
        self._locks: defaultdict[tuple[int, str], Lock] = defaultdict(Lock)

    @staticmethod
    def of(module: str, name: str) -> TritonKernel:
        """The kernel of a module's function (needs Triton)."""
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"no module {module}")
        code = _digest_beside(spec.origin)
        return TritonKernel((module, spec.origin, name), "", code, _parameters(module, code).get(name, ()))

    @cached_property
    def function(self) -> Any:
        """Triton's JIT function."""
        module, _, name = self._at
        return compile_worker.function(self._source()) if self._text else getattr(import_module(module), name)

    def _source(self) -> dict[str, str]:
        """Where the function is, and its text."""
        return dict(zip(("module", "file", "name", "text"), (*self._at, self._text), strict=True))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Launcher for a grid; returns the compiled kernel, None if interpreted."""

        def launch(*values: Any, **options: int) -> Any:
            made = self.warmup(*values, grid=grid, **options)
            with LOADING:
                if made is None:
                    self.function[grid](*values, **options)
                else:
                    made[(*grid, 1, 1)[:3]](*values)
            return made

        return launch

    def warmup(self, *values: Any, grid: tuple[int, ...], **options: int) -> Any:
        """Triton's compiled kernel for arguments like these (meta tensors count as aligned): from the disk cache, or
        compiled, in a worker process if possible. None in Triton's interpreter mode."""
        from triton import knobs

        if knobs.runtime.interpret:
            return None
        types, constants, aligned = specialised(self._parameters, values)
        job = {
            **self._source(),
            "signature": dict(zip([p.name for p in self._parameters], types, strict=True)),
            "constants": constants,
            "aligned": aligned,
            "options": options | ({"debug": True} if knobs.runtime.debug else {}),
            "target": vars(_target()),
        }
        mark = job["mark"] = str(Path(knobs.cache.dir) / f"pumice-{_digest(job, self._code)}.json")
        key = torch.cuda.current_device() if torch.cuda.is_initialized() else 0, mark
        with self._locks[key]:
            if key not in self._loaded:
                self._loaded[key] = self._kept(mark, job) or self._compiled(mark, job)
            return self._loaded[key]

    def _compiled(self, mark: str, job: dict[str, Any]) -> Any:
        found = self._kept(mark, job) if BACKGROUND.compile(job) else None
        return found or compile_worker.build(job, self.function)

    @staticmethod
    def _kept(mark: str, job: Mapping[str, Any]) -> Any:
        """The cached kernel of a mark, None if missing."""
        from triton import knobs
        from triton.compiler import CompiledKernel
        from triton.runtime.cache import get_cache_manager

        if knobs.compilation.always_compile or knobs.compilation.override:
            return None
        # A cache may have been cleared in part, or written by another version.
        with suppress(OSError, ValueError, KeyError, TypeError, StopIteration):
            told = json.loads(Path(mark).read_text())
            files = get_cache_manager(told["hash"]).get_group(told["name"]) or {}
            files = {name: path for name, path in files.items() if name.endswith(_READ)}
            return CompiledKernel(_Source(job), files, told["hash"]) if len(files) == 2 else None
        return None


_READ = (".json", ".cubin", ".hsaco")
"""Files read from the cache: no intermediate representations."""


class _Source:
    """Stand-in for ASTSource, with what Triton's launchers read."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.signature, self.name = job["signature"], job["name"]
        self.constants = {(place,): value for place, value in job["constants"]}
        self.fn = SimpleNamespace(arg_names=[*self.signature], launch_metadata=None)


def specialised(
    parameters: Sequence[Parameter], values: Sequence[Any]
) -> tuple[list[str], list[tuple[int, Any]], list[int]]:
    """(types, (position, value) of constants, positions divisible by 16) of these arguments, by the rules of Triton's
    JIT: constexprs, None, and 1 for a specialised integer are constants."""
    types, constants, aligned = [], [], []
    for place, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
        kind = "constexpr" if parameter.is_constexpr or value is None else _type_of(parameter, value)
        if kind != "constexpr" and not isinstance(value, float):
            address: Any = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if (parameter.specialised or isinstance(value, torch.Tensor)) and address % 16 == 0:
                aligned.append(place)
        if kind == "constexpr":
            constants.append((place, value))
        types.append(kind)
    return types, constants, aligned


def _type_of(parameter: Parameter, value: Any) -> str:
    from triton._utils import canonicalize_dtype

    if isinstance(value, torch.Tensor):
        return f"*{canonicalize_dtype(value.dtype)}"
    if isinstance(value, int) and not isinstance(value, bool) and parameter.specialised and value == 1:
        return parameter.annotated or "constexpr"
    if parameter.annotated:
        return parameter.annotated
    if isinstance(value, bool):
        return "u1"
    return "fp32" if isinstance(value, float) else "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _target() -> Any:
    from triton.runtime import driver

    return driver.active.get_current_target()


def _digest(job: Mapping[str, Any], code: str) -> str:
    from triton import __version__

    facts = [__version__, code, {name: value for name, value in job.items() if name not in ("file", "text")}]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def digest(text: str) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(maxsize=64)
def _digest_beside(file: str) -> str:
    """Digest of the kernels in the files of a folder, which call each other."""
    return digest("".join(path.read_text(encoding="utf-8") for path in sorted(Path(file).parent.glob("*_kernels.py"))))


def _parameters(module: str, code: str) -> Mapping[str, Sequence[Parameter]]:
    """The parameters of the kernels of a module by name, recorded on disk: Triton reads the source of each kernel, and
    of what it calls, when the module is imported, which takes 10 to 50 ms. code: digest of the sources.

    None are known in Triton's interpreter mode, in which kernels have none."""
    from triton import knobs

    if knobs.runtime.interpret:
        return {}
    record = Path(knobs.cache.dir) / f"pumice-{digest(module + code)}.json"
    with suppress(OSError, ValueError, TypeError):
        return {name: [Parameter(*each) for each in found] for name, found in json.loads(record.read_text()).items()}
    every = {name: x.params for name, x in vars(import_module(module)).items() if hasattr(x, "params")}
    found = {
        name: [Parameter(p.name, p.is_constexpr, not p.do_not_specialize, p.annotation_type) for p in params]
        for name, params in every.items()
    }
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        compile_worker.write(record, json.dumps(found))
    return found


BACKGROUND = Background(max(1, min(12, (os.cpu_count() or 2) - 1)))
