"""Diagnostics: what this machine has, what pumice can use of it, and how to fix the rest."""

import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pumice.env import settings
from pumice.errors import OptionError
from pumice.runtime import native

if TYPE_CHECKING:
    from rich.console import Group

# In Triton's search order.
COMPILERS = ("gcc", "clang", "cc")
COMPILE_SECONDS = 30
LAUNCHER = "#include <Python.h>\nPyObject *probe(void) { return PyLong_FromLong(0); }\n"
GET_COMPILER = "install one, for instance: apt install gcc (conda: gcc_linux-64)"
GET_HEADERS = "install Python's headers, for instance: apt install python3-dev"
GET_GPU_TORCH = "install a CUDA or ROCm build of torch (pytorch.org says how)"


@dataclass(frozen=True)
class Check:
    """A line of the report: what was checked, if it is usable, what was found, and advice if not."""

    name: str
    usable: bool
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Info:
    """All lines of the report, by section. Text and booleans only: JSON preserves as_dict()."""

    versions: dict[str, str]
    devices: tuple[Check, ...]
    capabilities: tuple[Check, ...]
    packages: tuple[Check, ...]
    folders: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Package:
    """An optional package. try_import: import it as a check; False if that is slow."""

    module: str
    purpose: str
    install: str
    try_import: bool = True


PACKAGES = (
    Package("laspy", "reads .las and .laz", "pip install .[io] in a clone"),
    Package("lazrs", "reads compressed .laz", "pip install .[io] in a clone"),
    Package("pyarrow", "reads .feather and .parquet", "pip install .[io] in a clone"),
    Package("fsspec", "labels scans at URLs", "pip install .[io] in a clone"),
    Package("plotly", "interactive report", "pip install plotly"),
    Package("safetensors", "checkpoints", "pip install safetensors"),
    # Importing these would start or load much, so only their presence is checked.
    Package("ray", "labels scans on a cluster", "pip install .[ray] in a clone", try_import=False),
    Package("spconv", "peer of the benchmarks", "pip install .[bench] in a clone", try_import=False),
)


def collect() -> Info:
    """Check everything: compiles one tiny C file, needs no GPU, takes about a second. Missing parts raise no error."""
    compiler = _compiler()
    return Info(
        versions=_versions(),
        devices=(_cpu(), *_gpus()),
        capabilities=(*_cpu_libraries(), *_compilers(compiler), _cpu_kernels(), _triton(compiler)),
        packages=tuple(_package(package) for package in PACKAGES),
        folders=(_data_folder(), _cache_folder()),
    )


def render(info: Info) -> "Group":
    """The lines as rich tables; print them with rich.console.Console().print(render(info))."""
    from rich.console import Group
    from rich.table import Table

    versions = Table.grid(padding=(0, 2))
    for name, version in info.versions.items():
        versions.add_row(f"  {name}", version, style="bold" if name == "pumice" else "")
    parts: list[Any] = [_heading("Versions"), versions]
    for title in ("devices", "capabilities", "packages", "folders"):
        parts += [_heading(title.capitalize()), _check_table(getattr(info, title))]
    return Group(*parts)


def _heading(text: str) -> Any:
    from rich.text import Text

    return Text(f"\n{text}", style="bold cyan")


def _check_table(checks: tuple[Check, ...]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=3)
    table.add_column(min_width=16, no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = Text("  yes", style="green") if check.usable else Text("  no ", style="yellow")
        # Text, not markup: "pumice[io]" is not a style.
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", style="dim")
        table.add_row(mark, Text(check.name), found)
    return table


# Versions and devices
def _versions() -> dict[str, str]:
    return {
        "pumice": distribution("pumice") or "not installed (run from its sources)",
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": str(torch.__version__),
        "triton": _triton_version() or "none",
        "numpy": np.__version__,
        "cuda": torch.version.cuda or "none (this torch is built without it)",
        "hip": torch.version.hip or "none (this torch is built without it)",
    }


def distribution(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _module_version(module: str) -> str | None:
    """The version of the distribution that provides a module (spconv-cu120: spconv), or None."""
    if find_spec(module) is None:
        return None
    names = metadata.packages_distributions().get(module, ())
    return (distribution(names[0]) if names else None) or "version unknown"


def _triton_version() -> str | None:
    return _module_version("triton")


def _cpu() -> Check:
    level = torch.backends.cpu.get_cpu_capability()
    found = f"{native.cpu_name()}, {_usable_cores()} cores, {torch.get_num_threads()} torch threads, {level}"
    return Check("cpu", True, found)


def _usable_cores() -> int:
    """Cores this process may use, which a container or a batch system can restrict."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _gpus() -> tuple[Check, ...]:
    if torch.version.cuda is None and torch.version.hip is None:
        return (Check("gpu", False, "this torch is built for the CPU only", GET_GPU_TORCH),)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    reason = f": {str(caught[0].message).splitlines()[0]}" if caught else ""
    tool = "rocminfo" if torch.version.hip else "nvidia-smi"
    found = f"torch is built for {_platform_name()}, but finds no GPU{reason}"
    return (Check("gpu", False, found, f"check the driver: {tool} should list the device"),)


def _gpu(index: int) -> Check:
    try:
        properties = torch.cuda.get_device_properties(index)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Check(f"cuda:{index}", False, reason, "another process may hold it, or it has failed")
    capability = f"sm_{properties.major}{properties.minor}"
    facts = (
        properties.name,
        f"{properties.total_memory / 2**30:.0f} GiB",
        getattr(properties, "gcnArchName", capability) if torch.version.hip else capability,
        f"{properties.multi_processor_count} multiprocessors",
    )
    return Check(f"cuda:{index}", True, ", ".join(facts))


def _platform_name() -> str:
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


# Capabilities
def _cpu_libraries() -> tuple[Check, ...]:
    libraries: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("oneDNN", torch.backends.mkldnn.is_available),
        ("MKL", torch.backends.mkl.is_available),
    )
    return tuple(
        Check(name, True, "in this torch")
        if available()
        else Check(name, False, "not in this torch", "CPU layers use other kernels, perhaps slower")
        for name, available in libraries
    )


def _compiler() -> str | None:
    return next((path for path in map(shutil.which, COMPILERS) if path), None)


def _compilers(compiler: str | None) -> tuple[Check, ...]:
    if compiler is None:
        lost = "none found; torch operators replace generated C"
        return (
            Check("C compiler", False, lost, GET_COMPILER),
            Check("Triton launcher", False, "cannot be compiled without a C compiler", GET_COMPILER),
        )
    return Check("C compiler", True, _compiler_version(compiler)), _launcher(compiler)


def _compiler_version(compiler: str) -> str:
    """The first line of --version, without the path, which may identify the user."""
    done = _run([compiler, "--version"])
    first = done.stdout.splitlines() if done is not None and done.returncode == 0 else []
    return first[0] if first else f"{Path(compiler).name}, version unknown"


def _launcher(compiler: str) -> Check:
    """Compile what Triton 3.6 and 3.7 compile at the first launch: a C file that includes Python.h."""
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(LAUNCHER, encoding="utf-8")
        target = str(Path(folder, "probe.so"))
        # Python's symbols are resolved at load time; macOS needs a flag for that.
        late = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
        done = _run([compiler, str(source), "-shared", "-fPIC", f"-I{include}", *late, "-o", target])
    if done is not None and done.returncode == 0:
        return Check("Triton launcher", True, "compiles (a C compiler and Python.h are there)")
    if not Path(include, "Python.h").exists():
        return Check("Triton launcher", False, "Python.h is missing", GET_HEADERS)
    errors = [line for line in (done.stderr.splitlines() if done else []) if "error" in line]
    found = f"does not compile: {errors[0].replace(str(source), 'probe.c')}" if errors else "does not compile"
    return Check("Triton launcher", False, found, "compile a small C file by hand to find the error")


def _run(command: list[str]) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _cpu_kernels() -> Check:
    """Check that C kernels compile and compute correctly."""
    found = native.compiler()
    if isinstance(found, str):
        return Check("CPU kernels", False, f"{found}; convolutions run on torch's operators, slower", GET_COMPILER)
    return Check("CPU kernels", True, f"by {Path(found.command[0]).name}, vectors of {found.vector[0]} floats")


def _triton(compiler: str | None) -> Check:
    """Check that GPU kernels can run: Triton, a GPU, and a C compiler for the launcher."""
    version = _triton_version()
    if version is None:
        return Check("Triton kernels", False, "triton is not installed", f"it comes with torch: {GET_GPU_TORCH}")
    if not torch.cuda.is_available():
        return Check("Triton kernels", False, f"triton {version}, but no GPU", "the CPU path is used")
    if compiler is None:
        return Check("Triton kernels", False, f"triton {version}, but no C compiler", GET_COMPILER)
    return Check("Triton kernels", True, f"triton {version} on {_platform_name()}")


# Packages and folders
def _package(package: Package) -> Check:
    version = _module_version(package.module)
    if version is None:
        return Check(package.module, False, f"not installed ({package.purpose})", package.install)
    reason = _import_failure(package.module) if package.try_import else None
    if reason:
        return Check(package.module, False, f"{version}, but it does not import: {reason}", package.install)
    return Check(package.module, True, f"{version} ({package.purpose})")


def _import_failure(module: str) -> str | None:
    """Why the module cannot be imported. Loading third-party code may raise anything; all of it is reported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _data_folder() -> Check:
    try:
        folder = settings().data
    except OptionError as error:
        return Check("PUMICE_DATA", False, str(error), "set it to the folder of scans, or unset it")
    if folder is None:
        return Check("PUMICE_DATA", False, "not set", "set it to a folder of real scans for the tests on them")
    entries = sum(1 for _ in folder.iterdir())
    advice = "" if entries else "put scans into it"
    return Check("PUMICE_DATA", entries > 0, f"{_short(folder)}, {entries} entries", advice)


def _cache_folder() -> Check:
    try:
        folder = settings().cache
    except OptionError as error:
        return Check("cache", False, str(error), "set PUMICE_CACHE to a folder, or unset it")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Check("cache", False, f"{_short(folder)} cannot be written", "set PUMICE_CACHE to one that can")
    if not folder.exists():
        return Check("cache", True, f"{_short(folder)}, created on first use")
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 2**20
    return Check("cache", True, f"{_short(folder)}, {len(files)} files, {size:.1f} MiB")


def _short(path: Path) -> str:
    """The path with ~ for the home folder, so that a pasted report does not name its author."""
    return str(path).replace(str(Path.home()), "~", 1) if path.is_relative_to(Path.home()) else str(path)
