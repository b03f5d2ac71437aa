"""Time to the first run of a statement: with empty caches, and in a new process with filled caches on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from pumice.errors import PumiceError

STATEMENTS = ("structured", "unstructured", "conv", "tensor-product")
GOALS = {"cold": Peer("goal", 15e3, "goal"), "warm": Peer("goal", 50.0, "goal")}
INSUM = Peer("Insum on an RTX 3090 (paper)", 14.8e3, "recorded")
LIMIT = 300  # seconds per process


def compile_times(setup: Setup) -> Iterator[Row]:
    """The first call of each study's statement minus a later one, cold and warm."""
    wanted = [name for name in STATEMENTS if setup.wants(f"compile/{name}")]
    # One process per statement; in a quick run one for all.
    for names in [wanted] if setup.quick and wanted else [[name] for name in wanted]:
        try:
            found = first_calls(setup, names, 1 if setup.quick else 3)
        except PumiceError as reason:
            setup.failed(f"compile/{','.join(names)}: {reason}")
            continue
        for name, by_state in found.items():
            for state, times in by_state.items():
                yield from _rows(setup, name, state, times)


def _rows(setup: Setup, name: str, state: str, times: Times) -> Iterator[Row]:
    case = f"compile/{name}/{state}"
    setup.say(f"{case}: {times}")
    if name == "start":
        return
    dtype = "fp32" if name == "tensor-product" else ""
    for peer in (GOALS[state], *([INSUM] if (name, state) == ("conv", "cold") else [])):
        yield setup.row(case, times, "wall", peer, "compile", dtype=dtype)


def first_calls(setup: Setup, names: Sequence[str], warm: int) -> dict[str, dict[str, Times]]:
    """Milliseconds of compilation and tuning by statement and state: "cold" in one process, "warm" in `warm` processes.

    The statements include "start", the one-time costs of a process.
    """
    with tempfile.TemporaryDirectory(prefix="pumice-bench-") as folder:
        cold = _process(setup, names, Path(folder))
        again = [_process(setup, names, Path(folder)) for _ in range(warm)]
    states = {"cold": [cold], **({"warm": again} if again else {})}
    return {
        name: {state: Times.of([_spent(found[name]) for found in runs]) for state, runs in states.items()}
        for name in cold
    }


def _spent(calls: Sequence[float]) -> float:
    """Time of the first call minus that of a later one."""
    return max(calls[0] - calls[1], 1e-3)


def _process(setup: Setup, names: Sequence[str], caches: Path) -> dict[str, Sequence[float]]:
    """[first, later] milliseconds by statement, in a new process with these caches."""
    size = "quick" if setup.quick else "full"
    return probed((str(setup.device), size, ",".join(names)), caches)


def fresh_caches(folder: Path) -> list[str]:
    """The prefix of a command line that puts a program's caches into a folder."""
    variables = ("PUMICE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    return ["env", *(f"{name}={folder / name.lower()}" for name in variables)]


def probed(arguments: Sequence[str], caches: Path) -> Any:
    """The parsed output of probes/first_call.py, run in a new process with these caches.

    Raises PumiceError if the process fails or takes more than LIMIT seconds.
    """
    command = [*fresh_caches(caches), sys.executable, "-m", "benchmarks.probes.first_call", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise PumiceError(f"its process ended with {error.returncode}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise PumiceError(f"its process took more than {LIMIT} s") from error
    return json.loads(done.stdout.strip().splitlines()[-1])
