"""The suite `stream`: networks as users write them, over scenes without repetition, beside spconv in the same run.

A case is NET/MODE/WAY, such as unet/infer/eager or unet/infer-tf32/compiled (inference on a GPU is in fp16, where the
mode names no other precision), followed by `/repeated` for a second round over the same scenes. Each
way runs in its own process (probes/stream_way.py), so that its first call is the first of a process, and is rejected if
its results differ from spconv's. Metrics, by the wall clock and on a CPU also by processor time; only `first_call` and
`total` include the first call:

    p50, p90          ms per scene
    max_second_half   ms of the worst scene of the second half
    over_p50          max_second_half over p50
    first_call        ms of the first scene; first_call_cold: with empty caches on disk (--thorough)
    make              ms of capture or compilation before it
    total             ms of make and of all scenes
    scenes            number of scenes finished within the limit
    fallbacks         number of scenes that a captured network ran eagerly
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

import pumice as pm
from benchmarks.harness.rows import Peer, Row, device_name
from benchmarks.harness.study import Options, Say, Setup
from benchmarks.harness.timing import Times
from benchmarks.peers import spconv as spconv_peer
from benchmarks.probes import stream_way
from benchmarks.probes.stream_way import CLOCKS, MODES, WAYS, Asked, Seen
from benchmarks.scenes.stream import Source
from benchmarks.scenes.stream_nets import NETS
from benchmarks.suites.first_call import fresh_caches
from pumice.cli.segment import pick_device
from pumice.errors import OptionError

COUNT, TINY = 60, 6
"""Number of scenes, and the same in a quick run."""
FEW = 400
"""Maximum voxels of a scene in a quick run."""
GRACE = 30.0
"""Minimum seconds for comparisons after the limit, or half of the limit if longer; then the process is stopped."""
_UNITS = {"over_p50": "x", "scenes": "scenes", "fallbacks": "scenes"}

Figures = Mapping[tuple[str, str], Times]
"""Times by clock and metric; for most metrics all quantiles are equal."""


@dataclass(frozen=True)
class Stream:
    """A run of the suite. cold: processes start with empty caches on disk. inline: run in this process."""

    setup: Setup
    source: Source
    limit: float
    cold: bool
    inline: bool

    def asked(self, net: str, mode: str, way: str) -> Asked:
        count = self.setup.count or (TINY if self.setup.quick else COUNT)
        limit = self.limit or math.inf
        return Asked(net, mode, way, str(self.setup.device), count, self.source, limit, self.setup.quick)

    def name(self, net: str, mode: str, way: str) -> str:
        """The name of a case, which marks scenes that are generated or cropped."""
        cropped = f"most-{self.source.most}/" if self.source.most and not self.setup.quick else ""
        generated = "" if self.source.files() or self.setup.quick else "generated/"
        return f"{'tiny/' * self.setup.quick}{generated}{cropped}{net}/{mode}/{way}"


def stream(say: Say, options: Options) -> Iterator[Row]:
    """The rows of one network (the case), or of both. Raises PumiceError at the end if a result of ours was wrong.

    limit: seconds after which a way starts no further scene; its process is stopped after `_most(limit)` seconds.
    """
    if options.case and options.case not in NETS:
        raise OptionError(f"case {options.case!r} of stream is unknown; there are {', '.join(NETS)}")
    device = pick_device(options.device)
    setup = Setup(device, options.quick, say, options.only, options.thorough, "stream", count=options.count)
    source = Source(options.scenes, options.most or (FEW if options.quick else 0))
    run = Stream(setup, source, options.limit, options.thorough, options.inline)
    files = ", ".join(path.stem for path in source.files()) or "generated streets"
    clock = "the wall clock" if device.type == "cuda" else "the processor's time"
    say(f"{device_name(device)}, torch {torch.__version__}; {files}; milliseconds by {clock}")
    for net in [options.case] if options.case else list(NETS):
        for mode, how in MODES.items():
            if device.type == "cuda" or how.precision == "fp16":
                yield from _mode(run, net, mode)
    setup.settle()


def _mode(run: Stream, net: str, mode: str) -> Iterator[Row]:
    """The rows of our ways. spconv runs first, as the peer of the others."""
    setup = run.setup
    ways = [way for way in WAYS if way == "spconv" or setup.wants(run.name(net, mode, way))]
    if not hasattr(pm, "compile"):
        ways = [way for way in ways if way != "compiled"]
    rivals: Figures = {}
    for way in ways if len(ways) > 1 else []:
        seen = _seen(run, run.asked(net, mode, way))
        figures = _told(run, run.name(net, mode, way), way, seen)
        if way == "spconv":
            rivals = figures
        else:
            precision = MODES[mode].precision if setup.device.type == "cuda" else ""
            yield from _rows(setup, (run.name(net, mode, way), precision), figures, rivals)


def _seen(run: Stream, asked: Asked) -> Seen:
    """Run a way, and return what its process reported until its end."""
    seen = Seen()
    if run.inline:
        stream_way.run(asked, seen.add)
        return seen
    with TemporaryDirectory(prefix="pumice-stream-") as folder:
        said, errors = Path(folder) / "said", Path(folder) / "errors"
        caches = fresh_caches(Path(folder)) if run.cold else []
        command = [*caches, sys.executable, "-m", stream_way.__name__, json.dumps(asdict(asked))]
        ended = _ended(command, said, errors, _most(asked.limit))
        for line in said.read_text().splitlines():
            # Skip an incomplete line of a stopped process, and output of libraries.
            if line.startswith('["') and line.endswith("]"):
                seen.add(*json.loads(line))
        if ended and seen.wrong == Seen.wrong:
            last = (errors.read_text().strip().splitlines() or ["no message"])[-1]
            seen.wrong = f"{ended.format(last[-200:])} before its results were compared"
    return seen


def _most(limit: float) -> float | None:
    """Seconds after which a process is stopped even during a call; None: no limit."""
    return limit + max(GRACE, limit / 2) if limit < math.inf else None


def _ended(command: Sequence[str], said: Path, errors: Path, limit: float | None) -> str:
    """Run a program. Returns how it failed, "" if it did not; {} stands for the last line of its errors."""
    begin = time.perf_counter()
    with said.open("w") as out, errors.open("w") as err:
        try:
            code = subprocess.run(command, stdout=out, stderr=err, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {time.perf_counter() - begin:.0f} s"
    return f"ended with {code} ({{}})" if code else ""


def figures_of(times: Sequence[float], first: bool = True) -> dict[str, Times]:
    """Metrics of milliseconds in the order of calls. first: the first call counts as `first_call` only.

    p50, p90 and the worst of the second half require two further calls.
    """
    found = {"first_call": Times.exactly(times[0])} if first and len(times) else {}
    later = np.array(times[1:] if first else times)
    if len(later) >= 2:
        worst = float(later[len(later) // 2 :].max())
        found["p50"] = Times.of(later.tolist())
        found["p90"] = Times.exactly(float(np.quantile(later, 0.9)))
        found["max_second_half"] = Times.exactly(worst)
        found["over_p50"] = Times.exactly(worst / found["p50"].median)
    return found


def _told(run: Stream, name: str, way: str, seen: Seen) -> dict[tuple[str, str], Times]:
    """The metrics of a way, with the prefix "repeated/" for repeated scenes; only the number of scenes if results were
    wrong or not compared, and none if its library is absent."""
    setup, scenes = run.setup, {("count", "scenes"): Times.exactly(len(seen.calls))}
    if seen.absent:
        setup.say(f"{name} is left out: {seen.absent}")
        return {}
    setup.say(f"{name}: {_sentence(run, seen)}")
    if seen.wrong:
        setup.failed(f"{name}: {seen.wrong}") if way != "spconv" else setup.say(f"  refused: {seen.wrong}")
        return scenes
    more = {} if seen.fallbacks is None else {("count", "fallbacks"): Times.exactly(seen.fallbacks)}
    clocks = list(CLOCKS) if setup.device.type == "cpu" else ["wall"]
    by_clock = {
        (clock, metric): times
        for place, clock in enumerate(clocks)
        for metric, times in _by_clock(seen, place, run.cold).items()
    }
    return {**by_clock, **scenes, **more}


def _by_clock(seen: Seen, place: int, cold: bool) -> dict[str, Times]:
    calls = [spent[place] for spent in seen.calls]
    found = figures_of(calls)
    if cold and "first_call" in found:
        found["first_call_cold"] = found.pop("first_call")
    if seen.make is not None:
        found["make"] = Times.exactly(seen.make[place])
    found["total"] = Times.exactly(sum(calls) + (seen.make[place] if seen.make else 0.0))
    again = figures_of([spent[place] for spent in seen.again], first=False)
    return found | {f"repeated/{metric}": times for metric, times in again.items()}


def _sentence(run: Stream, seen: Seen) -> str:
    place = 0 if run.setup.device.type == "cuda" else 1
    calls, again = ([spent[place] for spent in found] for found in (seen.calls, seen.again))
    count = run.asked("", "", "").count
    parts = [f"{len(calls)} of {count} scenes, {seen.voxels[0]} to {seen.voxels[1]} voxels"]
    if seen.make is not None:
        parts.append(f"made in {seen.make[place] / 1e3:.2f} s")
    if calls:
        parts.append(f"first call {calls[0]:.4g}")
    for title, found in (("p50", figures_of(calls)), ("repeated p50", figures_of(again, first=False))):
        if "p50" in found:
            p50, p90, worst = (found[metric].median for metric in ("p50", "p90", "max_second_half"))
            parts.append(f"{title} {p50:.4g} (p90 {p90:.4g}, worst of the second half {worst:.4g})")
    if seen.fallbacks:
        parts.append(f"{seen.fallbacks} eagerly")
    parts += [f"error of the {name} {found:.1e}" for name, found in seen.errors.items()]
    return ", ".join(parts)


def _rows(setup: Setup, about: tuple[str, str], figures: Figures, rivals: Figures) -> Iterator[Row]:
    """The rows of a way. about: its case, and its precision, "" for the device's."""
    name, precision = about
    for key, times in figures.items():
        clock, (again, _, metric) = key[0], key[1].rpartition("/")
        peer = Peer("itself", times.median)
        if key in rivals and clock != "count":
            peer = Peer("spconv", rivals[key].median, package=spconv_peer.package())
        case = f"{name}/{again}" if again else name
        yield setup.row(case, times, clock, peer, metric, _UNITS.get(metric, "ms"), precision)
