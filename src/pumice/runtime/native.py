"""C kernels for CPUs, compiled by the system's C compiler on first use and kept on disk.

Sources need no headers: vectors are GCC vector types, which gcc, clang and `zig cc` (the `ziglang` wheel) compile. A
library runs on the threads of the OpenMP runtime that torch has loaded, and so keeps to torch.set_num_threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from pumice.env import settings
from pumice.errors import OptionError

_FLAGS = ("-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
_SECONDS = 120  # Time limit of a compilation
_LANES = {"__AVX512F__": (16, 32), "__AVX2__": (8, 16), "__ARM_NEON": (4, 32)}
_PREAMBLE = """typedef long long i64;
typedef void (*region)(void (*)(void *), void *, unsigned, unsigned);
/* Runs work(data) on as many of torch's threads as there are tasks, at most `threads`. */
static inline void start(region parallel, int threads, i64 tasks, void (*work)(void *), void *data) {
    if (parallel && threads > 1 && tasks > 1) parallel(work, data, threads < tasks ? threads : tasks, 0);
    else work(data);
}
"""
_PROBE = """typedef float v __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
int probe(float *x) { v a = *(v *)x; *(v *)x = a * a + a; return LANES; }
"""


Made = TypeVar("Made")


class NativeUnavailableError(Exception):
    """C kernels cannot be compiled or loaded here; the message tells why."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler. command: its start; macros: those it defines for this CPU."""

    command: tuple[str, ...]
    macros: str

    @staticmethod
    def find() -> Compiler:
        """The first of cc, gcc, clang and the ziglang wheel. Raises NativeUnavailableError if there is none."""
        commands: list[tuple[str, ...]] = [(path,) for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
        if importlib.util.find_spec("ziglang"):
            commands.append((sys.executable, "-m", "ziglang", "cc"))
        for command in commands:
            found = _run([*command, "-march=native", "-dM", "-E", "-x", "c", os.devnull])
            if found is not None:
                return Compiler(command, found)
        raise NativeUnavailableError("no C compiler: install gcc or clang, or pip install ziglang")

    @cached_property
    def vector(self) -> tuple[int, int]:
        """(float32 lanes of a vector register, number of registers)."""
        return next((found for macro, found in _LANES.items() if f"#define {macro} " in self.macros), (4, 16))

    def library(self, source: str) -> ctypes.CDLL:
        """The library compiled from `source`, from the disk if it was compiled before. The source may use `i64`, and
        `start` to run a function on torch's threads.

        Raises NativeUnavailableError if the compiler fails, or if others can write the cache's folder."""
        source, folder = _PREAMBLE + source, settings().cache / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256("\0".join((source, *self.command, *_FLAGS, self.macros)).encode()).hexdigest()
        path = folder / f"{name}.so"
        require_private(folder)
        if path.exists():
            require_private(path)
        else:
            self._compile(source, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailableError(str(error)) from error

    def _compile(self, source: str, path: Path) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            text, made = Path(folder, "source.c"), Path(folder, "made.so")
            text.write_text(source, encoding="utf-8")
            if _run([*self.command, *_FLAGS, "-o", str(made), str(text)]) is None:
                raise NativeUnavailableError(f"{self.command[0]} does not compile the kernels")
            made.chmod(0o700)
            # Atomic: another process may compile it too.
            os.replace(made, path)


def require_private(path: Path) -> None:
    """Raise NativeUnavailableError if another user than this one or root owns a path or can write it."""
    found = path.stat()
    if hasattr(os, "getuid") and (found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022):
        raise NativeUnavailableError(f"{path.name} in the cache can be written by other users")


def _run(command: Sequence[str]) -> str | None:
    """Standard output of a command; None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


@lru_cache(maxsize=1)
def compiler() -> Compiler | str:
    """The C compiler, or the reason why there is none. A probe is run: some compilers ignore vector types."""
    try:
        found = Compiler.find()
        lanes = found.vector[0]
        library = found.library(f"#define LANES {lanes}\n{_PROBE}")
        values = (ctypes.c_float * (lanes + 1))(*range(1, lanes + 2))
        done = library.probe(values)
    except (NativeUnavailableError, OptionError, OSError) as error:
        return str(error)
    expected = [x * x + x if x <= lanes else x for x in range(1, lanes + 2)]
    return found if done == lanes and [*values] == expected else f"{found.command[0]} computes vectors wrongly"


def compiled_by(make: Callable[[Compiler], Made]) -> Made | str:
    """make(the C compiler), or the reason why kernels cannot be compiled or loaded here."""
    found = compiler()
    try:
        return found if isinstance(found, str) else make(found)
    except (NativeUnavailableError, OSError) as error:
        return str(error)


@lru_cache(maxsize=1)
def l1_bytes() -> int:
    """Size of a core's first-level data cache, 32 KiB if the system does not tell."""
    try:
        return int(Path("/sys/devices/system/cpu/cpu0/cache/index0/size").read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 10


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Model of the processor, its architecture if the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@lru_cache(maxsize=1)
def parallel_region() -> int:
    """Address of GOMP_parallel(function, data, threads, flags) in torch's OpenMP runtime; 0: run on one thread."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/lib*omp*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


def call(library: ctypes.CDLL | str, name: str, tensors: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> int:
    """Run name(parallel_region(), threads, addresses..., sizes...) on torch's threads. tensors: contiguous, of the
    dtypes that the kernel reads; None: a null pointer. Raises NativeUnavailableError for the reason why there is no
    library."""
    if isinstance(library, str):
        raise NativeUnavailableError(library)
    addresses = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    threads = ctypes.c_int(torch.get_num_threads())
    region = ctypes.c_void_p(parallel_region())
    return getattr(library, name)(region, threads, *addresses, *map(ctypes.c_int64, sizes))
