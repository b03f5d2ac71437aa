"""The suite `ranks`: training steps of 1, 2, 4, ... processes of one host, each on a GPU of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping

import torch

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from pumice.errors import PumiceError

_LIMIT = 1200  # Seconds of a group of processes
Found = Mapping[str, tuple[list[float], float]]
"""Milliseconds of the steps and voxels per second of all processes, by way."""


def training(setup: Setup) -> Iterator[Row]:
    """Steps of MinkUNet by every way, and voxels per second against as many single processes."""
    on_gpu, single = setup.device.type == "cuda", 0.0
    most = torch.cuda.device_count() if on_gpu else 2
    for ranks in (count for count in (1, 2, 4, 8) if count <= most):
        try:
            found = probed(setup, ranks)
        except PumiceError as reason:
            setup.failed(f"training/{ranks}: {reason}")
            continue
        single = single or found["one process"][1]
        for name, (spent, speed) in found.items():
            case, times = f"training/{ranks}/{name}", Times.of(spent)
            setup.say(f"{case}: {times} a step, {1e-3 * speed:.1f}k voxels/s, {speed / single / ranks:.2f} of {ranks}")
            # The same step without other processes.
            alone = Times.of(found["one process"][0]).median
            yield setup.row(case, times, "wall", Peer("one process", alone), dtype="bf16" if on_gpu else "")


def probed(setup: Setup, ranks: int) -> Found:
    """The output of probes/ranks.py. Raises PumiceError if it fails or takes more than _LIMIT seconds."""
    launcher = sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
    size = "quick" if setup.quick else "full"
    command = [*launcher, "-m", "benchmarks.probes.ranks", setup.device.type, size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise PumiceError(f"{ranks} processes ended with {error.returncode}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise PumiceError(f"{ranks} processes took more than {_LIMIT} s") from error
    return json.loads(done.stdout.strip().splitlines()[-1])
