"""Rows of the results file: results as data, one JSON object a line."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.harness.timing import Times
from pumice.cli.info import distribution

ANY = "any"
"""The device of rows whose value is counted, and so the same on all devices."""


@dataclass(frozen=True)
class Row:
    """One line of the results file; lower is better for times."""

    suite: str
    case: str
    metric: str
    value: float
    unit: str
    p20: float
    p80: float
    dtype: str
    clock: str
    peer: str
    peer_value: float
    peer_source: str
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    lib: str = "pumice"

    @property
    def ratio(self) -> float:
        """The speedup over the peer."""
        return self.peer_value / self.value


@dataclass(frozen=True)
class Peer:
    """A value that a row is compared with, in the row's unit. package: the peer's distribution, whose version the row
    records."""

    name: str
    value: float
    source: str = "same run"
    package: str = ""


def append(ledger: Path, row: Row) -> None:
    """Add one row at the end of the results file."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def row_of(about: tuple[str, str, str, str, str], times: Times, clock: str, peer: Peer, device: torch.device) -> Row:
    """A measurement as a row. about: suite, case, metric, unit, dtype."""
    suite, case, metric, unit, dtype = about
    value, p20, p80 = (_rounded(value) for value in (times.median, times.p20, times.p80))
    against = peer.name, _rounded(peer.value), peer.source
    origin = device_name(device), versions((peer.package,) if peer.package else ()), commit()
    return Row(suite, case, metric, value, unit, p20, p80, dtype, clock, *against, *origin, date.today().isoformat())


def _rounded(value: float) -> float:
    """Round to four decimals, or to four digits below 0.1."""
    return round(value, 4) if value >= 0.1 else float(f"{value:.4g}")


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python, Pumice, torch, numpy and these packages; "from source" if a package is not installed."""
    found = {name: distribution(name) for name in packages}
    own = {name: distribution(name) or "from source" for name in ("pumice", "torch", "numpy")}
    peers = {name: version or "from source" for name, version in found.items()}
    return {"python": platform.python_version(), **own, **peers}


def device_name(device: torch.device | None = None) -> str:
    """The GPU's name, or the CPU's model, torch's threads and its instruction set. None: the GPU if there is one."""
    if (device is None and torch.cuda.is_available()) or (device is not None and device.type == "cuda"):
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{model}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


@lru_cache(maxsize=1)
def commit() -> str:
    """The commit of the source tree, with "+dirty" if the tree was changed; "unknown" outside a repository."""
    here = Path(__file__).parent
    try:
        head, state = (
            subprocess.run(["git", *command], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
            for command in (
                ("rev-parse", "--short=12", "HEAD"),
                ("status", "--porcelain", "--", ":/", ":!/bench/results.jsonl"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+dirty" if state else head
