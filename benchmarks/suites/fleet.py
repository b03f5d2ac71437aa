"""The suite `fleet`: `pumice label` over thousands of scans, killed in the middle and started again, against its
network alone.

Scans are those of PUMICE_DATA's kitti_seq00, or generated streets, turned, mirrored and thinned, each different, as
.bin files; a few files are bad. The network is MinkUNet at half width with random weights. Metrics:

    scan         ms per scan, from the first outputs to the last, of both runs, by the wall clock, and on a CPU also by
                 the time of the thread that runs the network; alone: the network from points on the device to classes
                 there, captured on a GPU and compiled on a CPU, one scan after the other
    growth       MiB of the processes around four fifths of the outputs over those around a fifth, of the longer run
    gpu_growth   the same of the GPU's memory

Fails if an output is missing or of another length than its scan, if one was written twice, or if the bad files are not
those that were reported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times, synchronize
from pumice.cli.label import SOME_FAILED
from pumice.data import SEMANTIC_KITTI, read_scan, street_scene
from pumice.env import settings
from pumice.label import checkpoint
from pumice.label.checkpoint import Task, network_inputs
from pumice.label.classify import Classifier

PUMICE = "from pumice.cli import start; start()"
COUNTS = {"cuda": 10_000, "cpu": 300}
KEPT = {"cuda": (0.7, 1.0), "cpu": (0.15, 0.25)}
ALONE = {"cuda": 24, "cpu": 6}
"""By device: numbers of scans, shares of their points, and scans of which the network alone is timed."""
QUICK, ROUNDS = 20, 3
BAD = ("empty.bin", "nan.bin", "short.npz", "text.npy")
_POLL = 0.2


@dataclass(frozen=True)
class Seen:
    """A moment of a run: seconds by the wall clock and of its first thread, outputs, MiB of its processes and of the
    GPU."""

    at: float
    thread: float
    done: int
    host: float
    gpu: float


def fleet(setup: Setup) -> Iterator[Row]:
    """The rows of one fleet."""
    kind = setup.device.type
    count = setup.count or (QUICK if setup.quick else COUNTS[kind])
    with TemporaryDirectory(prefix="pumice-fleet-") as name:
        folder = Path(name)
        begin = time.perf_counter()
        _make(folder / "scans", count, KEPT[kind])
        setup.say(f"{count} scans made in {time.perf_counter() - begin:.0f} s")
        net = _checkpoint(folder, setup.quick)
        before = _alone(setup, folder, net)
        killed = _labelled(setup, folder, net, stop=count // 2)
        first = _stamps(folder)
        resumed = _labelled(setup, folder, net, stop=None)
        alone = [*before, *_alone(setup, folder, net)]
        _check(setup, folder, first)
        yield from _rows(setup, killed, resumed, alone)


def _rows(setup: Setup, killed: Sequence[Seen], resumed: Sequence[Seen], alone: Sequence[Seen]) -> Iterator[Row]:
    case, steady = f"label/{_precision(setup)}", [_steady(killed), _steady(resumed)]
    scans = sum(part[-1].done - part[0].done for part in steady)
    for clock, of in (("wall", "at"), ("cpu", "thread"))[: 1 + (setup.device.type == "cpu")]:
        spent = 1e3 * sum(getattr(part[-1], of) - getattr(part[0], of) for part in steady) / max(1, scans)
        least = Times.of([1e3 * getattr(one, of) / one.done for one in alone])
        setup.say(f"{case}, {clock}: {spent:.3g} ms a scan; alone {least}: {least.median / spent:.2f} of its rate")
        yield setup.row(case, spent, clock, Peer("the network alone", least.median), "scan")
    longer = max(killed, resumed, key=len)
    for metric, of in (("growth", "host"), ("gpu_growth", "gpu")):
        start, end = (_around(longer, share, of) for share in (0.2, 0.8))
        setup.say(f"{case}: {metric} {end - start:.0f} MiB, from {start:.0f}")
        yield setup.row(case, max(end - start, 0.0), "count", Peer("none", 0.0, "goal"), metric, "MiB")


def _around(run: Sequence[Seen], share: float, of: str) -> float:
    """The median of a figure over a tenth of the outputs before and after a share of them."""
    first, count = run[0].done, max(1, run[-1].done - run[0].done)
    near = [getattr(seen, of) for seen in run if abs((seen.done - first) / count - share) <= 0.1]
    return float(np.median(near)) if near else 0.0


def _steady(run: Sequence[Seen]) -> list[Seen]:
    """The moments from a tenth of the outputs on."""
    least = run[0].done + max(1, (run[-1].done - run[0].done) // 10)
    return [seen for seen in run if seen.done >= least]


def _precision(setup: Setup) -> str:
    return "fp16" if setup.device.type == "cuda" else "fp32"


# Scans
def _make(folder: Path, count: int, kept: tuple[float, float]) -> None:
    folder.mkdir()
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.imap_unordered(partial(_make_one, folder, kept), range(count), chunksize=16):
            pass
    (folder / BAD[0]).touch()
    np.full((1000, 4), np.nan, np.float32).tofile(folder / BAD[1])
    (folder / BAD[2]).write_bytes(b"PK\x03\x04" + bytes(100))
    np.save(folder / BAD[3], np.array([["a", "b", "c"]]))


def _make_one(folder: Path, kept: tuple[float, float], number: int) -> None:
    chance = np.random.default_rng(number)
    points = _source(number)
    points = points[chance.random(len(points)) < chance.uniform(*kept)]
    angle, mirror = chance.uniform(0, 2 * np.pi), 1 if chance.random() < 0.5 else -1
    sine, cosine = np.sin(angle), np.cos(angle)
    turn = np.array([[cosine * mirror, -sine, 0], [sine * mirror, cosine, 0], [0, 0, 1]], np.float32)
    points[:, :3] = points[:, :3] @ turn.T
    points.astype("<f4").tofile(folder / f"{number:06d}.bin")


def _source(number: int) -> np.ndarray:
    """Points [P, 4] of a sweep, or of a street."""
    data = settings().data
    files = sorted((data / "kitti_seq00").glob("*.bin")) if data else []
    if files:
        return np.fromfile(files[number % len(files)], "<f4").reshape(-1, 4)
    scan = street_scene(number % 8, azimuths=720)
    return np.concatenate([scan.xyz, scan.feats[:, :1]], axis=1)


def _checkpoint(folder: Path, quick: bool) -> Path:
    torch.manual_seed(0)
    inputs = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    task = Task(SEMANTIC_KITTI.names, SEMANTIC_KITTI.colors, 0.1, 0.1 if quick else 0.5, *inputs)
    return checkpoint.save(folder / "net.safetensors", task.network(), task)


# Runs
def _alone(setup: Setup, folder: Path, path: Path) -> list[Seen]:
    """What the network alone took in each of some rounds over scans on the device."""
    net, task = checkpoint.load(path, setup.device)
    classifier = Classifier(net, task, setup.device, _precision(setup))
    files = sorted(folder.glob("scans/0*.bin"))[: ALONE[setup.device.type]]
    scans = [read_scan(file, False) for file in files]
    given = [(torch.from_numpy(scan.xyz), torch.from_numpy(network_inputs(scan, task))) for scan in scans]
    held = [(points.to(setup.device), feats.to(setup.device)) for points, feats in given]
    spent: list[Seen] = []
    for _ in range(2 + ROUNDS):
        synchronize(setup.device)
        begin, thread = time.perf_counter(), time.thread_time()
        for points, feats in held:
            classifier.classes(points, feats)
        synchronize(setup.device)
        spent.append(Seen(time.perf_counter() - begin, time.thread_time() - thread, len(held), 0.0, 0.0))
    return spent[2:]


def _labelled(setup: Setup, folder: Path, net: Path, stop: int | None) -> list[Seen]:
    """Run the command, and kill it at `stop` outputs (None: wait for its end); what was seen while it wrote."""
    words = ["label", folder / "scans", "--checkpoint", net, "--out", folder / "labels", "--device", setup.device]
    line = [sys.executable, "-c", PUMICE, *map(str, words), "--precision", _precision(setup)]
    seen = [Seen(0.0, 0.0, _done(folder), 0.0, 0.0)]
    with (folder / "said").open("w") as said, subprocess.Popen(line, stderr=said) as process:
        while process.poll() is None:
            time.sleep(_POLL)
            host, gpu = _host(process.pid), _gpu(setup.device)
            seen.append(Seen(time.perf_counter(), _thread(process.pid), _done(folder), host, gpu))
            if stop is not None and seen[-1].done >= stop:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
    code = -signal.SIGKILL if stop is not None else SOME_FAILED
    if process.returncode != code:
        setup.failed(f"exit code {process.returncode}: {(folder / 'said').read_text()[-300:]}")
    setup.say((folder / "said").read_text().strip().splitlines()[-1] if stop is None else f"killed at {seen[-1].done}")
    # Neither before the first output, nor while the process ended.
    begun = [one for one in seen if one.done > seen[0].done and one.host]
    if not begun:
        raise RuntimeError(f"nothing was labelled: {(folder / 'said').read_text()[-300:]}")
    last = next(i for i, one in enumerate(begun) if one.done == begun[-1].done)
    return begun[: last + 1]


def _done(folder: Path) -> int:
    labels = folder / "labels"
    return sum(entry.name.endswith(".label") for entry in os.scandir(labels)) if labels.is_dir() else 0


def _host(pid: int) -> float:
    """MiB of a process and of those that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        lines = [line for one in (pid, *children) for line in Path(f"/proc/{one}/status").read_text().splitlines()]
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def _thread(pid: int) -> float:
    """Seconds that the first thread of a process has run."""
    try:
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _gpu(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


# Checks
def _stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "labels").glob("*.label")}


def _check(setup: Setup, folder: Path, first: dict[str, int]) -> None:
    """first: when the outputs of the killed run were written."""
    after, scans = _stamps(folder), sorted((folder / "scans").glob("0*.bin"))
    missing = [path.stem for path in scans if f"{path.stem}.label" not in after]
    wrong = [path.stem for path in scans if path.stem not in missing and not _whole(folder, path)]
    again = [name for name, stamp in first.items() if after.get(name) != stamp]
    left = [path.name for path in (folder / "labels").glob(".*")]
    said = [line for line in (folder / "said").read_text().splitlines() if line.startswith("failed ")]
    told = {name for name in BAD if any(f"/{name}:" in line for line in said)}
    for what, found in (("missing", missing), ("of another length", wrong), ("written twice", again), ("left", left)):
        if found:
            setup.failed(f"{len(found)} outputs {what}, such as {found[0]}")
    if told != set(BAD) or len(said) != len(BAD):
        setup.failed(f"expected {len(BAD)} bad files, found {said}")


def _whole(folder: Path, scan: Path) -> bool:
    return (folder / "labels" / f"{scan.stem}.label").stat().st_size == scan.stat().st_size // 4
