"""Kernels compiled before they are needed: by worker processes, since Triton's compiler holds Python's lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from threading import Lock, Semaphore, Thread, local
from typing import Any

Task = Callable[[], object]
_WORKER = Path(__file__).with_name("compile_worker.py")
_THREAD = local()
"""worker: of a background thread; seen: specialisations that Triton's hook was told of within `specialization`."""


class Background:
    """Runs tasks in order in daemon threads, which start with the first task, each with a process that compiles. A task
    that fails is dropped: the call that needs its result raises the error."""

    def __init__(self, threads: int) -> None:
        self._queue: PriorityQueue[tuple[bool, int, Task]] = PriorityQueue()
        self._lock, self._left, self._numbers = Lock(), threads, count()

    def submit(self, task: Task, later: bool = True) -> None:
        """Run `task` in a copy of the caller's context; later: after those that are waited for."""
        context = copy_context()
        self._queue.put((later, next(self._numbers), lambda: context.run(task)))
        with self._lock:
            if self._left:
                self._left -= 1
                Thread(target=self._work, name="pumice-compile", daemon=True).start()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run these tasks at once, and wait for all of them."""
        ended = Semaphore(0)

        def ending(task: Task) -> None:
            try:
                task()
            finally:
                ended.release()

        for task in tasks:
            self.submit(partial(ending, task), later=False)
        for _ in tasks:
            ended.acquire()

    def _work(self) -> None:
        _THREAD.worker = Worker()
        while True:
            with suppress(Exception):
                self._queue.get()[2]()


class Worker:
    """A process that compiles one kernel after the other into Triton's cache on disk; it ends with this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compile(self, job: Mapping[str, Any]) -> bool:
        """True if the kernel is in the cache now."""
        try:
            if self._process is None or self._process.poll() is not None:
                command, pipe = [sys.executable, str(_WORKER)], subprocess.PIPE
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return self._process.stdout.readline() == "\n"
        except OSError:
            return False

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
    if data is not None:
        worker.compile(job(kernel, text, data))


def job(kernel: Any, text: str, data: str) -> dict[str, str]:
    """What a worker is told of a kernel; data: of `specialization`."""
    code = kernel.fn.__code__
    return {
        "text": text,
        "file": code.co_filename,
        "module": kernel.fn.__module__,
        "name": kernel.fn.__name__,
        "specialization": data,
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


BACKGROUND = Background(max(1, min(8, (os.cpu_count() or 2) // 2)))
