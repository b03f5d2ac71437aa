"""A process that compiles Triton kernels into Triton's cache on disk. Run as a script, so that it imports no torch.

Each line of its input is a kernel as JSON (runtime.compile.job); it answers each with a line, empty or an error."""

import importlib.util
import json
import linecache
import sys
from types import ModuleType


def tuples(value: object) -> object:
    """JSON's lists as the tuples that they were."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def function(job: dict) -> object:
    """The Triton function of a job, from its text or from its file."""
    if job["text"]:
        linecache.cache[job["file"]] = len(job["text"]), None, job["text"].splitlines(keepends=True), job["file"]
        module = ModuleType(job["module"])
        exec(compile(job["text"], job["file"], "exec"), vars(module))
    else:
        spec = importlib.util.spec_from_file_location(job["module"], job["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, job["name"])


def build(job: dict) -> None:
    """Compile a job into the cache."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    data = json.loads(job["specialization"])
    constants = dict(zip(map(tuple, data["constant_keys"]), data["constant_vals"], strict=True))
    attributes = dict(zip(map(tuple, data["attrs_keys"]), data["attrs_vals"], strict=True))
    signature = {name: tuples(kind) for name, kind in data["signature"].items()}
    source = ASTSource(function(job), signature, constants, attributes)
    compiled(source, target=GPUTarget(**data["target"]), options={k: tuples(v) for k, v in data["options"].items()})


def main() -> None:
    for line in sys.stdin:
        try:
            build(json.loads(line))
            answer = ""
        except Exception as problem:
            answer = f"{type(problem).__name__}: {problem}".replace("\n", " ")
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
