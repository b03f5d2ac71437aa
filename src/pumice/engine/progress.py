"""Progress bar of a search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pumice.errors import OptionError
from pumice.schedule.tuner import SearchProgress

Watch = Callable[[SearchProgress], object]


def told(step: SearchProgress) -> str:
    """Text of a step: the best time so far, and the candidate being measured."""
    what = f"{step.group}: {step.candidate}" if step.candidate is not None else step.group or "the default"
    share = step.before / step.best if 0 < step.best < float("inf") else 1.0
    return f"best {1e3 * step.best:.3f} ms ({share:.2f}x)  {what}"


@contextmanager
def watching(progress: Watch | bool | None) -> Iterator[Watch]:
    """Yield the callback for steps: the caller's function; a bar for True, or for None on a terminal; else a no-op.
    Raises OptionError for any other value."""
    if callable(progress):
        yield progress
    elif progress is True or (progress is None and sys.stderr.isatty()):
        with _bar() as watch:
            yield watch
    elif progress is None or progress is False:
        yield lambda step: None
    else:
        raise OptionError(f"progress takes a function of a step, True, False or None, found {progress!r}")


@contextmanager
def _bar() -> Iterator[Watch]:
    # Imported lazily, to keep `import pumice` fast.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = ("tune", BarColumn(bar_width=24), "{task.completed:.0f}/{task.total:.0f}", "{task.fields[left]}")
    shown: Any = Progress(*columns, TextColumn("{task.description}", markup=False), console=Console(stderr=True))
    with shown:
        task = shown.add_task("finding groups", total=1, left="")

        def watch(step: SearchProgress) -> None:
            left = f"{step.left // 60:.0f}:{step.left % 60:02.0f} left"
            shown.update(task, total=step.total, completed=step.done, description=told(step), left=left)

        yield watch
