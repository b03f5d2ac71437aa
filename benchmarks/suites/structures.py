"""The studies `structures`, `presets` and `crossing` of the suite `ucf`: one CPU thread, one image, float32; packing
and unpacking are in our time, and "oneDNN" is the fastest of its three forms (see `pruned`).

structures  layer C10 of the paper's table 3 with filters of six structures, each in its own format and as a list of
            entries (figures 7 to 9, with tuned schedules if thorough), at 80 % with the bytes of values and of
            coordinates (table 6); with two threads, shared by output channels or by rows of the image (figure 8)
presets     layers of a pruned ResNet-50 at 80 % by the rule, and by the schedules of SkimCaffe and XNNPACK (figure 10)
crossing    the share of zeros from which each layer, with a random pattern, is faster than oneDNN (figure 11)

Source: "Unified Convolution Framework", 6.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

import pumice as pm
from benchmarks.harness.results import geomean
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import cpu_clock, on_cpu, on_threads
from benchmarks.suites.pruned import Filter, conv_of, dense_ways, layers
from pumice.errors import OptionError
from pumice.nn import PrunedConv2d
from pumice.ops.sparse import Sparse

STRUCTURES: Mapping[str, str] = {
    "RS": "r:C s:C m:U c:U",
    "M": "m:C c:U r:U s:U",
    "MC": "m:C c:C r:U s:U",
    "MCR": "m:C c:C r:C s:U",
    "patterns": "m:C c:C (r s):C",
    "MCRS": "m:C c:C r:C s:C",
}
"""The format of each structure's own levels, outermost first. Letters: what is kept or not is drawn for each point of
these axes, for all points of the others: taps (RS), filters (M), kernels (MC; Wen et al., 2016), rows of kernels (MCR;
Mao et al., 2017), single weights (MCRS). patterns: kernels, each with one of eight shapes of four taps around its
centre (Niu et al., 2020)."""
LISTED = "m:U (c r s):C"
ZEROS = ("0.5", "0.8", "0.9", "0.95", "0.98")
GOAL, SPREAD = 3.5, 1.15
"""Times as fast as oneDNN at 80 %, and the slowest structure's time over the fastest one's."""
_SHAPES = ("0134", "1245", "3467", "4578", "1345", "1347", "1457", "3457")
TABLE6: Mapping[int, tuple[float, ...]] = {
    4: (1049, 983, 528, 262),
    3: (787, 720, 396, 196),
    2: (525, 458, 264, 131),
    1: (394, 327, 132, 65),
}
"""Kilobytes of C10's filter by taps kept, as published, in these formats:"""
_STORED = ("m:C c:C r:C s:C", "m:U c:U r:C s:C", "r:C s:C m:C c:C", "r:C s:C m:U c:U")
_TAPS = {4: (0, 1, 3, 6), 3: (0, 1, 3), 2: (0, 1), 1: (0,)}  # With the published numbers of rows: 3, 2, 1, 1
_RUNS = 15
_CROSSING = (0.2, 0.5, 0.7, 0.85)
_COMPARED = ("14x14/k1s1/1024to256", "28x28/k1s1/512to256")


def structures(setup: Setup) -> Iterator[Row]:
    """Every structure at every share of zeros, then the tables."""
    if not on_a_cpu(setup, "structures"):
        return
    with on_threads(1):
        for zeros in ("0.8",) if setup.quick else ZEROS:
            best = dict[str, Row]()
            for name in STRUCTURES:
                for row in _structure(setup, f"structures/{zeros}/{name}", name, float(zeros)):
                    best[name] = min(row, best.get(name, row), key=lambda r: r.value)
                    yield row
            yield from _summary(setup, f"structures/{zeros}", [*best.values()]) if zeros == "0.8" and best else ()
        yield from _storage(setup) if setup.wants("structures/storage") else ()
    with on_threads(2):
        for zeros in ("0.8",) if setup.quick else ZEROS[:-1]:
            yield from _shared(setup, f"structures/shared/{zeros}", float(zeros))


def on_a_cpu(setup: Setup, study: str) -> bool:
    """True on a CPU; elsewhere the study is reported as left out."""
    if setup.device.type != "cpu":
        setup.say(f"{study} is left out: it is of a CPU")
    return setup.device.type == "cpu"


def _mask(setup: Setup, name: str, zeros: float) -> np.ndarray | None:
    """[M, C, R, S] of C10; None if the structure cannot have this share of zeros."""
    chance, channels = np.random.default_rng(0), 16 if setup.quick else 128
    whole = (channels, channels, 3, 3)
    axes = "MC" if name == "patterns" else name
    drawn = tuple(size if axis in axes else 1 for size, axis in zip(whole, "MCRS", strict=True))
    count, kept = math.prod(drawn), (1 - zeros) * (9 / 4 if name == "patterns" else 1)
    chosen = round(kept * count)
    if not 0 < chosen <= count or abs(chosen / count / kept - 1) > 0.25:
        return None
    found = np.zeros(count, bool)
    found[chance.permutation(count)[:chosen]] = True
    found = np.array(np.broadcast_to(found.reshape(drawn), whole))
    if name != "patterns":
        return found
    shapes = np.array([[str(tap) in taps for tap in range(9)] for taps in _SHAPES]).reshape(-1, 3, 3)
    return found & shapes[chance.integers(len(shapes), size=whole[:2])]


def _statement(one: Filter) -> str:
    """The layer as an einsum; its stride is 1."""
    size, wide = one.size, one.conv.kernel_size[0] > 1
    at = "p+r-1,q+s-1" if wide else "p,q"
    return f"O[n,m,p,q] = I[n,c,{at}] * F[m,c{',r,s' if wide else ''}] ; p:{size}, q:{size}"


def _structure(setup: Setup, case: str, name: str, zeros: float) -> Iterator[Row]:
    if not setup.wants(case) or (mask := _mask(setup, name, zeros)) is None:
        return
    one = Filter(name, 12 if setup.quick else 28, conv_of(mask, (1, 1)))
    x = setup.random(1, one.conv.in_channels, one.size, one.size)
    calls = {form: _call(setup, one, x, form) for form in dict.fromkeys((STRUCTURES[name], LISTED))}
    yield from _beside_dense(setup, case, one, x, calls)


def _call(setup: Setup, one: Filter, x: Tensor, form: str, lowering: str = "") -> Callable[[], Tensor]:
    """The layer with its filter in a format, whose axes are m, c, r and s. In thorough runs the schedule is tuned."""
    axes = "m,c,r,s" if one.conv.kernel_size[0] > 1 else "m,c"
    weight = one.conv.weight.view([n for n in one.conv.weight.shape if n > 1 or axes == "m,c,r,s"])
    stored = pm.sparse(weight.detach(), f"[{axes}] {form}")
    statement = pm.compile_einsum(_statement(one), lowering=lowering)
    if setup.thorough:
        with suppress(OptionError):  # Some formats run in other ways, which have nothing to tune.
            statement.tune(I=x, F=stored, budget=20)
    return lambda: statement(I=x, F=stored)


@torch.no_grad()
def _beside_dense(
    setup: Setup, case: str, one: Filter, x: Tensor, calls: Mapping[str, Callable[[], Tensor]]
) -> Iterator[Row]:
    """A row for each call whose result is right, beside the fastest dense convolution of its turns."""
    wanted = one.conv(x)
    for way, call in calls.items():
        if not (wrong := float((call() - wanted).abs().max() / wanted.abs().max())) < 1e-5:
            setup.failed(f"{case}/{way}: error {wrong:.1e}")
            continue
        # Alone beside the dense ways: another way before it would leave its image in the cache.
        times, *others = on_cpu([call, *dense_ways(one.conv, x)], 3 if setup.quick else _RUNS)
        dense = Peer("oneDNN", min(other.p20 for other in others))
        told = f"{times.p20:.3f} ms, oneDNN {dense.value:.3f}: {dense.value / times.p20:.2f} times as fast"
        setup.say(f"{case}/{way}: {told}")
        yield setup.row(f"{case}/{way}", times, cpu_clock(), dense, dtype=torch.float32)


def _summary(setup: Setup, case: str, best: Sequence[Row]) -> Iterator[Row]:
    """The mean over structures, each in its fastest format, and how far they are apart, beside the goals."""
    mean, spread = geomean(row.ratio for row in best), max(r.value for r in best) / min(r.value for r in best)
    setup.say(f"{case}: {mean:.2f} times as fast as oneDNN, goal {GOAL}; slowest over fastest {spread:.2f}")
    for metric, value, goal in (("over oneDNN", mean, GOAL), ("slowest over fastest", spread, SPREAD)):
        yield setup.row(case, value, "cpu", Peer("goal", goal, "goal"), metric, "times", torch.float32)


def _storage(setup: Setup) -> Iterator[Row]:
    """Bytes of values and of coordinates at 80 %; kilobytes of the published formats."""
    for name, own in STRUCTURES.items():
        mask = _mask(setup, name, 0.8)
        assert mask is not None
        for form in dict.fromkeys((own, LISTED)):
            stored = pm.sparse(torch.from_numpy(mask).float(), f"[m,c,r,s] {form}")
            case, values = f"structures/storage/{name}/{form}", _values(stored)
            setup.say(f"{case}: {values} bytes of values, {stored.nbytes - values} of coordinates")
            for metric, found in (("values", values), ("coordinates", stored.nbytes - values)):
                yield setup.row(case, found, "count", Peer("dense", 4.0 * mask.size), metric, "bytes", torch.float32)
    for taps, published in TABLE6.items() if not setup.quick else ():
        weight = torch.zeros(128, 128, 9)
        weight[:, :, _TAPS[taps]] = 1
        for form, size in zip(_STORED, published, strict=True):
            case, found = (
                f"structures/table6/{taps}/{form}",
                pm.sparse(weight.view(128, 128, 3, 3), f"[m,c,r,s] {form}"),
            )
            setup.say(f"{case}: {found.nbytes / 1e3:.1f} kB, published {size}")
            yield setup.row(case, found.nbytes / 1e3, "count", Peer("UCF", size, "recorded"), "storage", "kB", "fp32")


def _values(x: Sparse) -> int:
    return sum(part.values.numel() * part.values.element_size() for part in x.parts if part.values is not None)


def _shared(setup: Setup, case: str, zeros: float) -> Iterator[Row]:
    """Structure M on two threads: tasks of output channels, beside tasks of rows of the image."""
    if not setup.wants(case) or (mask := _mask(setup, "M", zeros)) is None:
        return
    one = Filter("M", 12 if setup.quick else 28, conv_of(mask, (1, 1)))
    x = setup.random(1, one.conv.in_channels, one.size, one.size)
    calls = {name: _call(setup, one, x, LISTED, f"nest/parallel {name}") for name in "mp"}
    channels, rows = on_cpu([*calls.values()], 3 if setup.quick else 2 * _RUNS)
    setup.say(f"{case}: {channels.p20:.3f} ms by output channels, {rows.p20:.3f} by rows of the image")
    yield setup.row(case, channels, cpu_clock(), Peer("by rows of the image", rows.p20), dtype=torch.float32)


def presets(setup: Setup) -> Iterator[Row]:
    """Layers of stride 1 by the rule, beside the presets of SkimCaffe and XNNPACK."""
    with on_threads(1):
        for one in layers(setup, "0.8") if on_a_cpu(setup, "presets") else ():
            compared = setup.quick or one.name.endswith(_COMPARED) or "k3s1" in one.name
            if compared and setup.wants(case := f"presets/{one.name}"):
                yield from _presets(setup, case, one)


def _presets(setup: Setup, case: str, one: Filter) -> Iterator[Row]:
    form, x = (
        LISTED if one.conv.kernel_size[0] > 1 else "m:U c:C",
        setup.random(1, one.conv.in_channels, one.size, one.size),
    )
    names = ("skimcaffe", "xnnpack")
    calls = [_call(setup, one, x, form, lowering) for lowering in ("nest", *(f"nest/{name}" for name in names))]
    ours, *others = on_cpu(calls, 3 if setup.quick else _RUNS)
    for name, times in zip(names, others, strict=True):
        setup.say(f"{case}: {ours.p20:.3f} ms, {name} {times.p20:.3f}: {times.p20 / ours.p20:.2f} times as fast")
        yield setup.row(case, ours, "cpu", Peer(f"{name} preset", times.p20), dtype=torch.float32)


def crossing(setup: Setup) -> Iterator[Row]:
    """The share of zeros at which each distinct layer takes oneDNN's time."""
    with on_threads(1):
        for one in layers(setup, "0.8") if on_a_cpu(setup, "crossing") else ():
            if setup.wants(case := f"crossing/{one.name}"):
                share = _crossing(setup, one)
                setup.say(f"{case}: as fast as oneDNN at {share:.0%} zeros")
                peer = Peer("most layers in UCF", 0.91, "recorded")
                yield setup.row(case, share, "cpu", peer, "crossing", "share of zeros", torch.float32)


@torch.no_grad()
def _crossing(setup: Setup, one: Filter) -> float:
    """By lines between the measured shares; beyond them, the line goes on."""
    x, chance = setup.random(1, one.conv.in_channels, one.size, one.size), np.random.default_rng(0)
    form, drawn = (one.conv.stride[0], int(one.conv.padding[0])), chance.random(one.conv.weight.shape)
    pruned = [PrunedConv2d.from_dense(conv_of(drawn >= zeros, form)) for zeros in _CROSSING]
    found = on_cpu([*((lambda p=p: p(x)) for p in pruned), *dense_ways(one.conv, x)], 3 if setup.quick else 7, 1)
    dense = min(times.p20 for times in found[len(pruned) :])
    slower = [math.log(times.p20 / dense) for times in found[: len(pruned)]]
    last = len(slower) - 2
    at = next((n for n in range(last) if slower[n + 1] < 0), last)
    (left, right), (high, low) = _CROSSING[at : at + 2], slower[at : at + 2]
    return min(1.0, max(0.0, left + (right - left) * high / max(high - low, 1e-9)))
