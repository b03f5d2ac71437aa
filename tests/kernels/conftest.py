"""Processes for what one process cannot do: Triton reads TRITON_INTERPRET once, and a compiler that crashes ends it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels.cross import Built, Job
from kernels.launches import Launch

HERE = Path(__file__).parent
ROOT = HERE.resolve().parents[1]
LIMIT = 600
"""Seconds that an answer may take on a busy machine."""
NARROW = 6
"""One in so many jobs of a kernel is not wide."""
CRASHES = 3
"""How many processes may end before no other is started."""
_FORGOTTEN = ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "PYTHONWARNINGS")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class EndedError(Exception):
    """The process ended, and how."""


class Server:
    """A process of `kernels.serve`, started when it is first asked; another one where it ended."""

    def __init__(self, folder: Path, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if name not in _FORGOTTEN}
        paths = [str(ROOT / "src"), str(ROOT / "tests")]
        caches = {"PUMICE_CACHE": str(folder / "pumice"), "TRITON_CACHE_DIR": str(folder / "triton")}
        # No GPU is asked for, even where there is one.
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        self._environment = {**kept, **caches, **alone, **environment}
        self._errors = folder / "stderr"
        self._process: subprocess.Popen[str] | None = None
        self._ended = ""
        self._crashes = 0

    def ask(self, module: str, request: object) -> Any:
        """What the module's `answer` gives; raises EndedError where the process ends over it."""
        if self._crashes > CRASHES:
            raise EndedError(self._ended)
        process = self._process = self._process or self._started()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(LIMIT, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps([module, request]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.stop()
            self._crashes += 1
            self._ended = f"exit status {process.returncode}\n{self._errors.read_text(errors='replace')[-3000:]}"
            raise EndedError(self._ended)
        return json.loads(line)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "-m", "kernels.serve"]
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                command,
                env=self._environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of a job follow each other, so that one worker compiles it and remembers what came out; of each kernel
    one in six of the jobs and of the checks is narrow."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ours = sorted((items[place] for place in places), key=lambda item: (_module_of(item), _job_of(item)))
    for place, item in zip(places, ours, strict=True):
        items[place] = item
    groups: dict[tuple[object, str], set[str]] = {}
    for item in ours:
        groups.setdefault(_group_of(item), set()).add(_job_of(item))
    narrow = {group: set(sorted(names, key=_digest)[: -(-len(names) // NARROW)]) for group, names in groups.items()}
    for item in ours:
        if _job_of(item) not in narrow[_group_of(item)]:
            item.add_marker(pytest.mark.wide)


def _params(item: pytest.Item) -> dict[str, Any]:
    spec = getattr(item, "callspec", None)
    return spec.params if spec else {}


def _job_of(item: pytest.Item) -> str:
    params = _params(item)
    return params["job"].name if "job" in params else params.get("name", "")


def _module_of(item: pytest.Item) -> tuple[str, str]:
    return item.path.name, _params(item).get("module", "")


def _group_of(item: pytest.Item) -> tuple[object, str]:
    params = _params(item)
    return _module_of(item), params["job"].kernel if "job" in params else params.get("group", "")


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


@pytest.fixture(scope="session", autouse=True)
def _triton() -> None:
    if not _HAS_TRITON:
        pytest.skip("triton is not installed")


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("interpreter"), TRITON_INTERPRET="1")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("compiler"), TRITON_DUMP_PTXAS_LOG="1")
    yield server
    server.stop()


@pytest.fixture
def interpreted(interpreter: Server) -> Callable[[str, str, str], str]:
    """How a check of a group of a module ended in the interpreter: "" where all is well."""

    def problem(module: str, group: str, name: str) -> str:
        try:
            return interpreter.ask(module, [group, name])
        except EndedError as error:
            return f"the process ended: {error}"

    return problem


@pytest.fixture(scope="session")
def _known() -> dict[Job | Launch, Built]:
    return {}


@pytest.fixture
def built(compiler: Server, _known: dict[Job | Launch, Built], job: Job | Launch) -> Built:
    """What the test's job became."""
    if job not in _known:
        try:
            _known[job] = Built.of_json(compiler.ask(type(job).__module__, job.to_json()))
        except EndedError as error:
            _known[job] = Built.of_error(f"the process ended: {error}")
    if _known[job].error:
        pytest.fail(_known[job].error, pytrace=False)
    return _known[job]
