"""Kernels compiled before they are needed: by worker processes, since Triton's compiler holds Python's lock."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from threading import Lock, Semaphore, Thread, local
from time import monotonic
from typing import Any

Task = Callable[[], object]
_WORKER = Path(__file__).with_name("compile_worker.py")
_PATIENCE = 1.0
"""Seconds of waiting between reports."""
_THREAD = local()
"""worker: of a background thread; seen: specialisations that Triton's hook was told of within `specialization`."""


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
    """Within it, whoever would wait for compilation gets CompilationPending."""
    token = _BESIDE.set(True)
    try:
        yield
    finally:
        _BESIDE.reset(token)


class Background:
    """Runs tasks in order in daemon threads, which start with the first task, each with a process that compiles. A task
    that fails is dropped: the call that needs its result raises the error."""

    def __init__(self, threads: int) -> None:
        self._queue: PriorityQueue[tuple[bool, int, Task]] = PriorityQueue()
        self._lock, self._count, self._numbers = Lock(), threads, count()
        self._threads: list[Thread] = []
        self._owner, self._closed = 0, False

    def submit(self, task: Task, later: bool = True) -> None:
        """Run `task` in a copy of the caller's context; later: after those that are waited for."""
        context = copy_context()
        self.start()
        self._queue.put((later, next(self._numbers), lambda: context.run(task)))

    def start(self) -> None:
        """Start all threads and their processes, which take half a second to be ready."""
        with self._lock:
            # A forked process has none of its parent's threads.
            if (self._threads and self._owner == os.getpid()) or self._closed:
                return
            self._owner, self._queue = os.getpid(), PriorityQueue()
            self._threads = [Thread(target=self._work, name="pumice-compile", daemon=True) for _ in range(self._count)]
            # A thread within the compiler while the interpreter ends would abort the process.
            atexit.register(self.close)
            for thread in self._threads:
                thread.start()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run these tasks at once, and wait for all of them, of which a terminal is told how many are done; within
        `compiling_beside`, raise CompilationPending instead of waiting."""
        ended = Semaphore(0)

        def ending(task: Task) -> None:
            try:
                task()
            finally:
                ended.release()

        for task in tasks:
            self.submit(partial(ending, task), later=False)
        if tasks and _BESIDE.get():
            raise CompilationPending(len(tasks), ended)
        begin, told = monotonic(), False
        for number in range(len(tasks)):
            while not ended.acquire(timeout=_PATIENCE):
                if sys.stderr.isatty() and monotonic() - begin > _PATIENCE:
                    told = True
                    sys.stderr.write(f"\rpumice: {number} of {len(tasks)} kernels compiled ")
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
            self._queue.put((False, next(self._numbers), _nothing))
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        worker = _THREAD.worker = Worker()
        with suppress(OSError):
            worker.start()
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

    def compile(self, job: Mapping[str, Any]) -> bool:
        """True if the kernel is in the cache now."""
        try:
            process = self.start()
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            return process.stdout.readline() == "\n"
        except OSError:
            return False

    def start(self) -> subprocess.Popen[str]:
        """The process, which is started if there is none."""
        if self._process is None or self._process.poll() is not None:
            command, pipe = [sys.executable, str(_WORKER)], subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        return self._process

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()


def compile_ahead(kernel: Any, text: str, values: Sequence[Any], options: Mapping[str, int]) -> None:
    """In a background thread, compile a kernel for these arguments by the thread's process; elsewhere no effect.

    text: its source where it has no file. Triton then finds it in its cache on disk."""
    worker = getattr(_THREAD, "worker", None)
    if worker is None:
        return
    data = specialization(kernel, values, options)
    if data is None:
        return
    told = job(kernel, text, data)
    mark = _mark(kernel, told)
    # What a process has compiled before needs no other one.
    if not mark.exists() and worker.compile(told):
        with suppress(OSError):
            mark.touch()


def _mark(kernel: Any, told: Mapping[str, Any]) -> Path:
    """A file in Triton's cache which tells that the kernel of a job is there."""
    from triton import __version__, knobs

    facts = json.dumps([__version__, kernel.cache_key, told["specialization"], told["target"]])
    return Path(knobs.cache.dir) / f"pumice-{hashlib.sha256(facts.encode()).hexdigest()}"


def job(kernel: Any, text: str, data: str) -> dict[str, Any]:
    """What a worker is told of a kernel; data: of `specialization`."""
    from triton.runtime import driver

    code = kernel.fn.__code__
    return {
        "text": text,
        "file": code.co_filename,
        "module": kernel.fn.__module__,
        "name": kernel.fn.__name__,
        "specialization": data,
        # Triton 3.6 leaves it out of the specialisation.
        "target": vars(driver.active.get_current_target()),
    }


def specialization(kernel: Any, values: Sequence[Any], options: Mapping[str, int]) -> str | None:
    """JSON of the specialisation that Triton would compile for these arguments; None if it has it, or tells nothing."""
    from triton import knobs

    if getattr(knobs.runtime.jit_cache_hook, "func", None) is not _hook:
        knobs.runtime.jit_cache_hook = _Hook(knobs.runtime.jit_cache_hook)
    _THREAD.seen = []
    try:
        kernel.warmup(*values, grid=(1,), **options)
        return next(iter(_THREAD.seen), None)
    finally:
        _THREAD.seen = None


def _hook(before: Any, **told: Any) -> bool | None:
    """Triton calls it before it compiles, which True prevents."""
    seen = getattr(_THREAD, "seen", None)
    if seen is None:
        return before(**told) if before is not None else None
    seen.append(told["compile"]["specialization_data"])
    return True


class _Hook:
    """`_hook`, in front of the hook that was there before."""

    func = staticmethod(_hook)

    def __init__(self, before: Any) -> None:
        self._before = before

    def __call__(self, **told: Any) -> bool | None:
        return _hook(self._before, **told)


BACKGROUND = Background(max(1, min(12, (os.cpu_count() or 2) - 1)))
