"""What it takes until a statement first runs: with empty caches, and in a new process that finds them on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pumice.errors import PumiceError
from pumice.tools.ledger import Peer, Row, Subject, row
from pumice.tools.study import DTYPES, Setup
from pumice.tools.timing import Times

STATEMENTS = ("structured", "unstructured", "conv", "tensor-product")
GOALS = {"cold": Peer("goal", 15e3, "goal"), "warm": Peer("goal", 50.0, "goal")}
INSUM = Peer("Insum on an RTX 3090 (paper)", 14.8e3, "recorded")
LIMIT = 300  # seconds for a process


def compile_times(setup: Setup) -> Iterator[Row]:
    """The first call of each study's statement less a later one, cold and warm."""
    for name in STATEMENTS:
        if not setup.wants(f"compile/{name}"):
            continue
        try:
            found = first_calls(setup, name, repeats=1 if setup.quick else 3)
        except PumiceError as reason:
            setup.failed(f"compile/{name}: {reason}")
            continue
        for state, times in found.items():
            case = f"compile/{name}/{state}"
            setup.say(f"{case}: {times.median:.4g} ms ({times.p20:.4g}, {times.p80:.4g})")
            dtype = "fp32" if name == "tensor-product" else DTYPES[setup.half]
            subject = Subject(setup.suite, case, dtype, setup.device, metric="compile")
            for peer in (GOALS[state], *([INSUM] if (name, state) == ("conv", "cold") else [])):
                yield row(subject, times, "wall", peer)


def first_calls(setup: Setup, statement: str, repeats: int) -> dict[str, Times]:
    """Milliseconds of compilation and tuning by state of the caches: "cold" and "warm"."""
    spent: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="pumice-bench-") as folder:
            for state in spent:
                first, later = _process(setup, statement, Path(folder))
                spent[state].append(max(first - later, 1e-3))
    return {state: Times.of(times) for state, times in spent.items()}


def _process(setup: Setup, statement: str, caches: Path) -> Sequence[float]:
    """[first, later] of one statement in a process of its own with these caches."""
    variables = ("PUMICE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    command = ["env", *(f"{name}={caches / name.lower()}" for name in variables)]
    size = "quick" if setup.quick else "full"
    command += [sys.executable, "-m", "pumice.tools.compile_probe", str(setup.device), size, statement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise PumiceError(f"the process for {statement} ended with {error.returncode}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise PumiceError(f"the process for {statement} took more than {LIMIT} s") from error
    return json.loads(done.stdout.strip().splitlines()[-1])[statement]
