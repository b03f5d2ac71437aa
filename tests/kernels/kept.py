"""What was read from compiled kernels, kept between runs of the tests."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tests" / "kernels"
READERS = ("cross.py", "kept.py", "launches.py")
"""The files that say what is read: where one changes, nothing is known any more."""
Facts = dict[str, Any]


def facts_of(source: Any, target: str, options: Mapping[str, int], read: Callable[[Any, str], Facts]) -> Facts:
    """What `read` finds in what Triton makes of a source and in what ptxas says; compiled where it is not known."""
    path = FOLDER / f"{_digest(source, target, options)}.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    facts = read(*_compiled(source, target, options))
    _write(path, json.dumps(facts))
    return facts


def _digest(source: Any, target: str, options: Mapping[str, int]) -> str:
    from triton import __version__
    from triton.runtime.jit import JITCallable

    # Of the functions that the kernel calls too, of types, constants and alignments; not of the lines of the files
    # where they stand, so that edits elsewhere in these change nothing.
    with patch.object(JITCallable, "starting_line_number", property(lambda fn: 0), create=True):
        code = source.hash()
    whole = [code, target, sorted(options.items()), __version__, *_readers()]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


@lru_cache
def _readers() -> list[str]:
    return [Path(__file__).with_name(name).read_text(encoding="utf-8") for name in READERS]


def _compiled(source: Any, target: str, options: Mapping[str, int]) -> tuple[Any, str]:
    from triton.compiler import compile

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        compiled = compile(source, target=target_of(target), options=dict(options))
    return compiled, said.getvalue()


def target_of(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    targets = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
    return GPUTarget(*targets[name])


def _write(path: Path, text: str) -> None:
    """Whole or not at all: the other worker may do the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)
