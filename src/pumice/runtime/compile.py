"""Kernels that are compiled before they are needed, in background threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from threading import Lock, Thread

Task = Callable[[], object]


class Background:
    """Runs tasks in order in daemon threads, which start with the first task. A task that fails is dropped: the call
    that needs its result will raise the error."""

    def __init__(self, threads: int) -> None:
        self._queue: SimpleQueue[Task] = SimpleQueue()
        self._lock, self._left = Lock(), threads

    def submit(self, task: Task) -> None:
        """Run `task` later, in a copy of the caller's context."""
        context = copy_context()
        self._queue.put(lambda: context.run(task))
        with self._lock:
            if self._left:
                self._left -= 1
                Thread(target=self._work, name="pumice-compile", daemon=True).start()

    def _work(self) -> None:
        while True:
            with suppress(Exception):
                self._queue.get()()


BACKGROUND = Background(max(1, min(8, (os.cpu_count() or 2) // 2)))
