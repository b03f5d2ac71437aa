"""Processes for what one process cannot do: Triton reads TRITON_INTERPRET once, and a compiler that crashes ends it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from kernels.cross import Built, Job
from kernels.launches import Launch

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 60
COMPILERS = 2
"""How many processes compile at once."""
INTERPRETERS = 2
"""How many processes interpret at once."""
CRASHES = 3
"""How many crashes of the compiler are gone behind."""
_FORGOTTEN = ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "PYTHONWARNINGS")


@pytest.fixture(scope="session", autouse=True)
def _triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


def _environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's, with caches of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in _FORGOTTEN}
    paths = [str(ROOT / "src"), str(ROOT / "tests")]
    caches = {"PUMICE_CACHE": str(folder / "pumice"), "TRITON_CACHE_DIR": str(folder / "triton")}
    # No GPU is asked for, even where there is one.
    alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    return {**kept, **caches, **alone, **more}


def _lines(module: str, *arguments: str, environment: Mapping[str, str], minutes: float) -> tuple[list[Any], str]:
    """What the module prints as JSON, and how it ended if not well."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, errors = process.communicate(timeout=minutes * MINUTES)
            ended = "" if process.returncode == 0 else f"exit status {process.returncode}\n{errors[-3000:]}"
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            ended = f"more than {minutes} minutes\n{errors[-3000:]}"
    return [json.loads(line) for line in out.splitlines() if line.endswith(("]", "}"))], ended


@pytest.fixture(scope="session")
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, str], Mapping[str, str]]]:
    """How the checks of a group of a module ended in the interpreter, by name: "" where all is well.

    All groups that tests ask for run side by side from the first question on.
    """

    def ended(module: str, group: str) -> Mapping[str, str]:
        environment = _environment(tmp_path_factory.mktemp("interpreted"), TRITON_INTERPRET="1")
        lines, end = _lines(module, group, environment=environment, minutes=10)
        return {"": end, **dict(lines)}

    with ThreadPoolExecutor(INTERPRETERS) as pool:

        @lru_cache
        def running(module: str) -> Mapping[str, Future[Mapping[str, str]]]:
            known = import_module(module).GROUPS
            asked = (getattr(item, "callspec", None) for item in request.session.items)
            groups = dict.fromkeys(spec.params.get("group") for spec in asked if spec is not None)
            return {group: pool.submit(ended, module, group) for group in groups if group in known}

        yield lambda module, group: running(module)[group].result()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Mapping[str, Built]]:
    """What jobs of a module became, by name."""

    @lru_cache
    def run(jobs: tuple[Job | Launch, ...], module: str = "kernels.cross") -> Mapping[str, Built]:
        folders = [tmp_path_factory.mktemp("compiled") for _ in range(COMPILERS)]
        shares = [jobs[n::COMPILERS] for n in range(COMPILERS)]
        with ThreadPoolExecutor(COMPILERS) as pool:
            parts = list(pool.map(partial(_compiled, module), shares, folders))
        return {name: built for part in parts for name, built in part.items()}

    return run


def _compiled(module: str, jobs: tuple[Job | Launch, ...], folder: Path) -> dict[str, Built]:
    path = folder / "jobs.json"
    path.write_text(json.dumps([job.to_json() for job in jobs]))
    environment = _environment(folder, TRITON_DUMP_PTXAS_LOG="1")
    found: dict[str, Built] = {}
    crashes = 0
    while len(found) < len(jobs):
        lines, ended = _lines(module, str(path), str(len(found)), environment=environment, minutes=3)
        found |= {job.name: Built.of_json(line) for job, line in zip(jobs[len(found) :], lines, strict=False)}
        # The job at which a process ended is to blame, and another process goes on behind it; not for ever.
        crashes += 1
        rest = jobs[len(found) :]
        blamed = rest if crashes > CRASHES else rest[:1]
        found |= {job.name: Built.of_error(f"the process ended: {ended}") for job in blamed}
    return found
