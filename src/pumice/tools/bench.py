"""Pumice against its peers in one run, as rows of the ledger.

A suite is a function that yields rows; nothing is timed that was not just checked against a float64 result. A row is
one JSON object: suite, case, metric, value (median), unit, p20, p80, lib, dtype, clock, peer, peer_value,
peer_source, device, versions, commit, date.
"""

from __future__ import annotations

import json
import math
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pumice.coords import KernelMap, Relation, kernel_map
from pumice.env import settings
from pumice.errors import FileError, OptionError, PumiceError
from pumice.lower import reference
from pumice.ops import SparseTensor, conv_features
from pumice.tools.info import distribution

Say = Callable[[str], object]


@dataclass(frozen=True)
class Row:
    """One line of the ledger; lower is better for times."""

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


@dataclass(frozen=True)
class Times:
    """Median and quantiles of a timed call, in milliseconds."""

    median: float
    p20: float
    p80: float


def run(suite: str, say: Say) -> Iterator[Row]:
    """The rows of a suite. Raises OptionError for one that is not known (the message lists them)."""
    if suite not in SUITES:
        raise OptionError(f"suite {suite!r} is unknown; there are {', '.join(SUITES)}")
    return SUITES[suite](say)


def append(ledger: Path, row: Row) -> None:
    """Add one row at the end of the ledger."""
    ledger.parent.mkdir(parents=True, exist_ok=True)
    with ledger.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def interleaved(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> tuple[Times, Times]:
    """Time two calls in turn, so that what disturbs one disturbs both; at least 7 runs of each."""
    for call in (ours, theirs, ours, theirs):
        call()
    spent: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    while len(spent[0]) < 7 or time.perf_counter() - start < seconds:
        for call, times in zip((ours, theirs), spent, strict=True):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    first, second = (Times(*np.quantile(times, (0.5, 0.2, 0.8)).tolist()) for times in spent)
    return first, second


def cpu_conv(say: Say) -> Iterator[Row]:
    """Submanifold 3x3x3 convolution, C to C, fp32, map at hand, on the CPU, against spconv's CPU build."""
    scene = "waymo_1f_10x10x15cm"
    coords = _scene(scene)
    spconv = _spconv()
    x = SparseTensor(torch.zeros(len(coords), 1), coords)
    found, _ = kernel_map(x.geometry, Relation.of(3, 3))
    say(f"{scene}: {found}; {torch.get_num_threads()} threads; milliseconds, median (20 %, 80 %)")
    ratios = []
    for channels in (16, 32, 64, 128):
        ours, theirs = _cpu_conv_pair(coords, found, channels, spconv, say)
        mine, peer = interleaved(ours, theirs, seconds=8.0)
        ratios.append(peer.median / mine.median)
        say(
            f"C={channels:<4} pumice {mine.median:7.2f} ({mine.p20:.2f}, {mine.p80:.2f})   "
            f"spconv {peer.median:7.2f} ({peer.p20:.2f}, {peer.p80:.2f})   {ratios[-1]:.2f}x"
        )
        case = f"{scene}/k3/C{channels}/fp32/fwd"
        yield _row("cpu-conv", case, mine, "fp32", "wall", ("spconv", peer.median, "same run"), ("spconv",))
    say(f"geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x")


SUITES: dict[str, Callable[[Say], Iterator[Row]]] = {"cpu-conv": cpu_conv}


def _cpu_conv_pair(
    coords: Tensor, found: KernelMap, channels: int, spconv: Any, say: Say
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Our call and spconv's of one layer, both checked against the float64 loop."""
    chance = torch.Generator().manual_seed(channels)
    feats = torch.randn(len(coords), channels, generator=chance)
    weight = torch.randn(channels, 27, channels, generator=chance) / math.sqrt(27 * channels)
    layer = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key="map")
    with torch.no_grad():
        layer.weight.copy_(weight.view_as(layer.weight))
    shape = (coords[:, 1:].amax(0) + 1).tolist()
    known = layer(spconv.SparseConvTensor(feats, coords, shape, 1)).indice_dict

    @torch.no_grad()
    def ours() -> Tensor:
        return conv_features(feats, weight, found, len(coords))

    @torch.no_grad()
    def theirs() -> Tensor:
        given = spconv.SparseConvTensor(feats, coords, shape, 1)
        given.indice_dict = known
        return layer(given).features

    truth = reference.forward(feats.double(), weight.double(), found.pairs(), len(coords), 1)
    errors = [float((call() - truth).norm() / truth.norm()) for call in (ours, theirs)]
    say(f"C={channels:<4} relative error: pumice {errors[0]:.1e}, spconv {errors[1]:.1e}")
    # spconv's threads add to one output at once and lose sums: exact with one thread, some rows wrong with two. It is
    # timed all the same, with the threads its users have; another mistake than that would show as an error near 1.
    for name, error, bound in zip(("pumice", "spconv"), errors, (1e-5, 0.2), strict=True):
        if not error < bound:
            raise PumiceError(f"{name} at C={channels}: relative error {error:.2g}, expected below {bound}: not timed")
    return ours, theirs


def _row(
    suite: str, case: str, times: Times, dtype: str, clock: str, peer: tuple[str, float, str], packages: Sequence[str]
) -> Row:
    names = ("pumice", "torch", "numpy", *packages)
    return Row(
        suite,
        case,
        "time",
        round(times.median, 4),
        "ms",
        round(times.p20, 4),
        round(times.p80, 4),
        dtype,
        clock,
        peer[0],
        round(peer[1], 4),
        peer[2],
        device_name(),
        {"python": platform.python_version(), **{name: distribution(name) or "from source" for name in names}},
        _commit(),
        date.today().isoformat(),
    )


def device_name() -> str:
    """The CPU's model and how many threads torch uses, or the GPU's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{model}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _scene(name: str) -> Tensor:
    folder = settings().data
    if folder is None:
        raise OptionError("this suite reads real scenes: set PUMICE_DATA to their folder")
    path = folder / "scenes" / f"{name}.npz"
    if not path.is_file():
        raise FileError(f"{path}: expected a scene of voxels, found no such file")
    coords = np.load(path)["coords"]
    return torch.from_numpy(np.concatenate([np.zeros((len(coords), 1), np.int32), coords], axis=1))


def _spconv() -> Any:
    try:
        return import_module("spconv.pytorch")
    except ImportError as error:
        raise OptionError(f"this suite measures spconv too: pip install pumice[bench] ({error})") from None


def _commit() -> str:
    """The commit of the source tree, "+dirty" if it was changed; "unknown" outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        state = subprocess.run(
            ["git", "status", "--porcelain", "--", ":/", ":!/bench/results.jsonl"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+dirty" if state.stdout.strip() else "")
