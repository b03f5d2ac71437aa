"""Pumice against its peers in one run, as rows of the ledger.

A suite is a function that yields rows; nothing is timed that was not just checked against a float64 result. A row is
one JSON object: suite, case, metric, value (median), unit, p20, p80, lib, dtype, clock, peer, peer_value,
peer_source, device, versions, commit, date.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row, Subject, append, row
from benchmarks.harness.study import Options, Say
from benchmarks.harness.timing import Times, interleaved
from benchmarks.peers import spconv as spconv_peer
from benchmarks.suites import layer_suites
from benchmarks.suites.einsum import einsum
from benchmarks.suites.engine import engine
from benchmarks.suites.maps import maps, picture
from benchmarks.suites.stream import stream
from benchmarks.suites.tuner import tuner
from benchmarks.suites.workloads import workloads
from pumice.coords import KernelMap, Relation, kernel_map
from pumice.env import settings
from pumice.errors import FileError, OptionError, PumiceError
from pumice.lower import reference
from pumice.ops import SparseTensor, conv_features

__all__ = ["SUITES", "Options", "Row", "Times", "append", "interleaved", "record", "run"]


def run(suite: str, say: Say, options: Options | None = None) -> Iterator[Row]:
    """The rows of a suite. Raises OptionError for one that is not known (the message lists them)."""
    if suite not in SUITES:
        raise OptionError(f"suite {suite!r} is unknown; there are {', '.join(SUITES)}")
    return SUITES[suite](say, options or Options())


def record(rows: Iterable[Row], ledger: Path | None, say: Say) -> None:
    """Add rows to the ledger as they come, if there is one, and draw beside it what they show."""
    done: list[Row] = []
    try:
        for found in rows:
            done.append(found)
            if ledger is not None:
                append(ledger, found)
    finally:
        if ledger is not None:
            _draw(ledger.with_name("maps_scaling.png"), done, say)


def _draw(path: Path, rows: Sequence[Row], say: Say) -> None:
    try:
        drawn = picture(path, rows)
    except ImportError as reason:
        say(f"no picture: {reason}")
        return
    if drawn is not None:
        say(f"picture {drawn}")


def cpu_conv(say: Say, options: Options) -> Iterator[Row]:
    """Submanifold 3x3x3 convolution, C to C, fp32, map at hand, on the CPU, against spconv's CPU build."""
    if options != Options():
        raise OptionError("the suite cpu-conv has one case and runs on the CPU: it takes no options but --out")
    scene = "waymo_1f_10x10x15cm"
    coords = _scene(scene)
    _need_spconv()
    x = SparseTensor(torch.zeros(len(coords), 1), coords)
    found, _ = kernel_map(x.geometry, Relation.of(3, 3))
    say(f"{scene}: {found}; {torch.get_num_threads()} threads; milliseconds, median (20 %, 80 %)")
    ratios = []
    for channels in (16, 32, 64, 128):
        ours, theirs = _cpu_conv_pair(coords, found, channels, say)
        mine, peer = interleaved(ours, theirs, seconds=8.0)
        ratios.append(peer.median / mine.median)
        say(
            f"C={channels:<4} pumice {mine.median:7.2f} ({mine.p20:.2f}, {mine.p80:.2f})   "
            f"spconv {peer.median:7.2f} ({peer.p20:.2f}, {peer.p80:.2f})   {ratios[-1]:.2f}x"
        )
        case = f"{scene}/k3/C{channels}/fp32/fwd"
        subject = Subject("cpu-conv", case, "fp32", torch.device("cpu"), ("spconv",))
        yield row(subject, mine, "wall", Peer("spconv", peer.median))
    say(f"geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x")


SUITES: dict[str, Callable[[Say, Options], Iterator[Row]]] = {
    "conv-forward": layer_suites.forward,
    "conv-train": layer_suites.training,
    "cpu-conv": cpu_conv,
    "einsum": einsum,
    "engine": engine,
    "maps": maps,
    "stream": stream,
    "tuner": tuner,
    "workloads": workloads,
}


def _cpu_conv_pair(
    coords: Tensor, found: KernelMap, channels: int, say: Say
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Our call and spconv's of one layer, both checked against the float64 loop."""
    chance = torch.Generator().manual_seed(channels)
    feats = torch.randn(len(coords), channels, generator=chance)
    weight = torch.randn(channels, 27, channels, generator=chance) / math.sqrt(27 * channels)
    _, run = spconv_peer.layer(feats, weight, coords)
    ours = torch.no_grad()(lambda: conv_features(feats, weight, found, len(coords)))
    theirs = torch.no_grad()(lambda: run(feats))
    truth = reference.forward(feats.double(), weight.double(), found.pairs(), len(coords), 1)
    errors = [float((call() - truth).norm() / truth.norm()) for call in (ours, theirs)]
    say(f"C={channels:<4} relative error: pumice {errors[0]:.1e}, spconv {errors[1]:.1e}")
    # spconv's threads add to one output at once and lose sums: exact with one thread, some rows wrong with two. It is
    # timed all the same, with the threads its users have; another mistake than that would show as an error near 1.
    for name, error, bound in zip(("pumice", "spconv"), errors, (1e-5, 0.2), strict=True):
        if not error < bound:
            raise PumiceError(f"{name} at C={channels}: relative error {error:.2g}, expected below {bound}: not timed")
    return ours, theirs


def _scene(name: str) -> Tensor:
    folder = settings().data
    if folder is None:
        raise OptionError("this suite reads real scenes: set PUMICE_DATA to their folder")
    path = folder / "scenes" / f"{name}.npz"
    if not path.is_file():
        raise FileError(f"{path}: expected a scene of voxels, found no such file")
    coords = np.load(path)["coords"]
    return torch.from_numpy(np.concatenate([np.zeros((len(coords), 1), np.int32), coords], axis=1))


def _need_spconv() -> None:
    try:
        import_module("spconv.pytorch")
    except ImportError as error:
        raise OptionError(f"this suite measures spconv too: pip install pumice[bench] ({error})") from None
