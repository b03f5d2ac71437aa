"""Processes for what one process cannot do: Triton reads TRITON_INTERPRET once, and a compiler that crashes ends it.

They work from the moment that the tests are chosen, and the tests that ask for what they found come last.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pytest
from kernels.cross import Built, Job
from kernels.launches import Launch

HERE = Path(__file__).parent
ROOT = HERE.resolve().parents[1]
MINUTES = 60
LIMIT = 30 * MINUTES
"""Seconds that a process may take, which others may keep waiting."""
PROCESSES = 2
"""How many work at once."""
NICENESS = 5
"""Of the processes: some of the tests that run meanwhile measure times."""
CRASHES = 3
"""How many crashes of the compiler are gone behind."""
_FORGOTTEN = ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE", "PYTHONWARNINGS")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class Work:
    """What the chosen tests ask for: groups of checks to interpret, jobs to compile."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._folder = TemporaryDirectory(prefix="pumice-kernels-")
        self._pool = ThreadPoolExecutor(PROCESSES)
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        params = [spec.params for item in items if (spec := getattr(item, "callspec", None)) and _is_ours(item)]
        groups = dict.fromkeys((p["module"], p["group"]) for p in params if "group" in p)
        jobs: dict[str, dict[Job | Launch, None]] = defaultdict(dict)
        for job in (p["job"] for p in params if "job" in p):
            jobs[type(job).__module__][job] = None
        self.groups = {group: self._pool.submit(self._interpreted, *group) for group in groups}
        self.jobs: dict[Job | Launch, Future[Mapping[str, Built]]] = {}
        for module, every in jobs.items():
            for share in (tuple(every)[n::PROCESSES] for n in range(PROCESSES)):
                self.jobs |= dict.fromkeys(share, self._pool.submit(self._compiled, module, share))

    def stop(self) -> None:
        """End what still works: a run may end before its last test."""
        self._stopped = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()
        self._pool.shutdown()
        self._folder.cleanup()

    def _interpreted(self, module: str, group: str) -> Mapping[str, str]:
        environment = self._environment(self._place(), TRITON_INTERPRET="1")
        lines, end = self._lines(module, group, environment=environment)
        return {"": end, **dict(lines)}

    def _compiled(self, module: str, jobs: tuple[Job | Launch, ...]) -> Mapping[str, Built]:
        folder = self._place()
        path = folder / "jobs.json"
        path.write_text(json.dumps([job.to_json() for job in jobs]))
        environment = self._environment(folder, TRITON_DUMP_PTXAS_LOG="1")
        found: dict[str, Built] = {}
        crashes = 0
        while len(found) < len(jobs):
            lines, ended = self._lines(module, str(path), str(len(found)), environment=environment)
            found |= {job.name: Built.of_json(line) for job, line in zip(jobs[len(found) :], lines, strict=False)}
            # The job at which a process ended is to blame, and another process goes on behind it; not for ever.
            crashes += 1
            rest = jobs[len(found) :]
            blamed = rest if crashes > CRASHES else rest[:1]
            found |= {job.name: Built.of_error(f"the process ended: {ended}") for job in blamed}
        return found

    def _place(self) -> Path:
        return Path(mkdtemp(dir=self._folder.name))

    @staticmethod
    def _environment(folder: Path, **more: str) -> dict[str, str]:
        """This process's, with caches of its own."""
        kept = {name: value for name, value in os.environ.items() if name not in _FORGOTTEN}
        paths = [str(ROOT / "src"), str(ROOT / "tests")]
        caches = {"PUMICE_CACHE": str(folder / "pumice"), "TRITON_CACHE_DIR": str(folder / "triton")}
        # No GPU is asked for, even where there is one.
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        return {**kept, **caches, **alone, **more}

    def _lines(self, module: str, *arguments: str, environment: Mapping[str, str]) -> tuple[list[Any], str]:
        """What the module prints as JSON, and how it ended if not well."""
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            self._running.add(process)
            if self._stopped:
                process.kill()
            try:
                out, errors = process.communicate(timeout=LIMIT)
                ended = "" if process.returncode == 0 else f"exit status {process.returncode}\n{errors[-3000:]}"
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = process.communicate()
                ended = f"more than {LIMIT // MINUTES} minutes\n{errors[-3000:]}"
            self._running.remove(process)
        return [json.loads(line) for line in out.splitlines() if line.endswith(("]", "}"))], ended


_WORK = pytest.StashKey[Work]()


def _is_ours(item: pytest.Item) -> bool:
    return HERE in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_ours)


def pytest_collection_finish(session: pytest.Session) -> None:
    if _HAS_TRITON and not session.config.option.collectonly and any(map(_is_ours, session.items)):
        session.config.stash[_WORK] = Work(session.items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    work = session.config.stash.get(_WORK, None)
    if work is not None:
        work.stop()


@pytest.fixture(scope="session", autouse=True)
def _triton() -> None:
    if not _HAS_TRITON:
        pytest.skip("triton is not installed")


@pytest.fixture
def interpreted(pytestconfig: pytest.Config) -> Callable[[str, str], Mapping[str, str]]:
    """How the checks of a group of a module ended in the interpreter, by name: "" where all is well."""
    work = pytestconfig.stash[_WORK]
    return lambda module, group: work.groups[module, group].result()


@pytest.fixture
def built(pytestconfig: pytest.Config, job: Job | Launch) -> Built:
    """What the test's job became."""
    found = pytestconfig.stash[_WORK].jobs[job].result()[job.name]
    if found.error:
        pytest.fail(found.error, pytrace=False)
    return found
