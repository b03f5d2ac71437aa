"""Worker process that compiles Triton kernels into Triton's disk cache. Run as a script, so that it imports no torch.

Each input line is a kernel as JSON (the `job` of runtime.compile); each output line is empty, or an error."""

import importlib
import json
import linecache
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any


def function(job: dict[str, Any]) -> object:
    """The Triton function of a job, from its source text or its file."""
    if job["text"]:
        # `inspect` reads the text here: no file, writable by others, is run. Entries without an mtime are not checked.
        linecache.cache[job["file"]] = len(job["text"]), None, job["text"].splitlines(keepends=True), job["file"]
        module = ModuleType(job["module"])
        exec(compile(job["text"], job["file"], "exec"), vars(module))
    else:
        module = imported(job["module"], Path(job["file"]).parent)
    return getattr(module, job["name"])


def imported(name: str, folder: Path) -> ModuleType:
    """Import a module from a folder without running its packages, which import torch."""
    *packages, _ = name.split(".")
    for count in range(len(packages), 0, -1):
        package = sys.modules.setdefault(".".join(packages[:count]), ModuleType(packages[count - 1]))
        package.__path__, folder = [str(folder)], folder.parent
    return importlib.import_module(name)


def build(job: dict[str, Any], known: object = None) -> Any:
    """Compile a job's kernel into the cache; a mark file tells where it is. known: its Triton function, if loaded."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    constants = {(place,): value for place, value in job["constants"]}
    attributes = {(place,): [["tt.divisibility", 16]] for place in job["aligned"]}
    source = ASTSource(known or function(job), job["signature"], constants, attributes)
    target = GPUTarget(**job["target"])
    made = compiled(source, target=target, options=job["options"])
    launcher(target, made)
    name = next(name for name in made.metadata_group if name.endswith(".json"))
    with suppress(OSError):
        write(Path(job["mark"]), json.dumps({"hash": made.hash, "name": name}))
    return made


def write(path: Path, text: str) -> None:
    """Write a file atomically: another process may write it too."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(name, path)


def launcher(target: Any, made: Any) -> None:
    """Compile the C launcher of the kernel into the cache, as Triton does until 3.6. On failure the process that
    launches the kernel compiles it."""
    backend, name = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}[target.backend]
    with suppress(Exception):
        module = importlib.import_module(f"triton.backends.{backend}.driver")
        if hasattr(module, "make_launcher"):
            getattr(module, name)(made.src, made.metadata)


def main() -> None:
    importlib.import_module("triton.compiler")
    for line in sys.stdin:
        try:
            build(json.loads(line))
            answer = ""
        except Exception as problem:
            answer = f"{type(problem).__name__}: {problem}".replace("\n", " ")
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # Drop this file's folder: its modules could shadow modules that Triton imports.
    sys.path.pop(0)
    main()
