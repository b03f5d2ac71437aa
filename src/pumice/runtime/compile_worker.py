"""A process that compiles Triton kernels into Triton's cache on disk. Run as a script, so that it imports no torch.

Each line of its input is a kernel as JSON (runtime.compile.job); it answers each with a line, empty or an error."""

import importlib
import json
import linecache
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any


def tuples(value: object) -> object:
    """JSON's lists as the tuples that they were."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def constant(value: object) -> object:
    """A compile-time constant; newer versions of Triton put those of its own type into an object."""
    return value["constexpr"] if isinstance(value, dict) else value


def function(job: dict) -> object:
    """The Triton function of a job, from its text or from its file."""
    if job["text"]:
        linecache.cache[job["file"]] = len(job["text"]), None, job["text"].splitlines(keepends=True), job["file"]
        module = ModuleType(job["module"])
        exec(compile(job["text"], job["file"], "exec"), vars(module))
    else:
        module = imported(job["module"], Path(job["file"]).parent)
    return getattr(module, job["name"])


def imported(name: str, folder: Path) -> ModuleType:
    """The module of that name in a folder, imported without its packages: those import torch."""
    *packages, _ = name.split(".")
    for count in range(len(packages), 0, -1):
        package = sys.modules.setdefault(".".join(packages[:count]), ModuleType(packages[count - 1]))
        package.__path__, folder = [str(folder)], folder.parent
    return importlib.import_module(name)


def build(job: dict) -> None:
    """Compile a job into the cache."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    data = json.loads(job["specialization"])
    constants = dict(zip(map(tuple, data["constant_keys"]), map(constant, data["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, data["attrs_keys"]), data["attrs_vals"], strict=True))
    signature = {name: tuples(kind) for name, kind in data["signature"].items()}
    source = ASTSource(function(job), signature, constants, attributes)
    target = GPUTarget(**job["target"])
    made = compiled(source, target=target, options={k: tuples(v) for k, v in data["options"].items()})
    launcher(target, made)


def launcher(target: Any, made: Any) -> None:
    """Compile what starts the kernel, in C, into the cache, as Triton does until 3.6; where this fails the process that
    starts the kernel does."""
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
    # The folder of this file: its modules are none that Triton imports.
    sys.path.pop(0)
    main()
