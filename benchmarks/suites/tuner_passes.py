"""Times of passes of a network: by way, as rows of the suite `tuner`, and layer by layer (its study `layers`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times, together
from benchmarks.scenes.network_layers import Met
from benchmarks.scenes.workloads import WORKLOADS, fresh
from benchmarks.suites.layer_model import walks
from benchmarks.suites.tuner_cases import ITSELF, Writer, subjects
from benchmarks.suites.tuner_networks import Network, Ran, checked
from pumice.engine.groups import observe
from pumice.engine.measure import by_part, profiled, segments
from pumice.engine.subject import subject as scenes_of
from pumice.errors import PumiceError
from pumice.nn.conv import Convolution
from pumice.ops import SparseTensor
from pumice.ops.conv import Flow, Target
from pumice.schedule.dataflow import split_dataflow
from pumice.schedule.tile import PROCESSORS

CONVOLUTIONS = "convolutions"
"""The metric of device time for convolutions including their maps and row orders."""
MAP, SORT, KERNEL, OTHER = "map", "sort", "kernel", "other"
PARTS: tuple[str, ...] = (MAP, SORT, KERNEL, OTHER)
"""Parts of device time: map: neighbour search; sort: sorting rows and laying out forms; kernel: convolution kernels,
matrix products, gathers and scatters (also those of a linear head); other: copies and the rest."""
CONVOLVING = (MAP, SORT, KERNEL)
_PART_OF = {"map": MAP, "sort": SORT, "conv": KERNEL, "product": KERNEL, "gather": KERNEL, "scatter": KERNEL}
"""The part of each part of engine.measure."""
_RUNS = 7


@dataclass(frozen=True)
class Taken:
    """Milliseconds of a pass: device time in total, of convolutions with maps, and by part; and wall time."""

    device: Times
    convolutions: Times
    parts: Mapping[str, Times]
    wall: Times


def compared(write: Writer, network: Network, ways: Mapping[str, Ran], against: str) -> Iterator[Row]:
    """The rows of the correct ways, each against the way `against`; none if that way is wrong."""
    right = checked(write.setup, network, ways, partial(write.subject.case, write.study))
    if against in right:
        yield from rows_of(write, taken(write.setup, network, right), against)


def taken(setup: Setup, network: Network, ways: Mapping[str, Ran]) -> dict[str, Taken]:
    """Times of a pass in each way; without a GPU by the wall clock only."""
    calls = {name: partial(network.run, ran) for name, ran in ways.items()}
    walls = together(list(calls.values()), setup.device, "wall", setup.seconds)
    found = {}
    for (name, call), wall in zip(calls.items(), walls, strict=True):
        if setup.device.type == "cuda":
            found[name] = _on_device(setup, call, wall)
        else:
            found[name] = Taken(wall, wall, {}, wall)
    return found


def _on_device(setup: Setup, call: Callable[[], object], wall: Times) -> Taken:
    call()
    try:
        told, _ = by_part([call] * _RUNS)
        each = [by_our_parts(parts) for parts in told]
    except PumiceError as reason:
        setup.say(f"  no parts, and times between events around a pass: {reason}")
        (whole,) = together([call], setup.device, "events", setup.seconds)
        return Taken(whole, whole, {}, wall)
    parts = {name: Times.of([one[name] for one in each]) for name in PARTS}
    whole = Times.of([sum(one.values()) for one in each])
    return Taken(whole, Times.of([sum(one[name] for name in CONVOLVING) for one in each]), parts, wall)


def by_our_parts(told: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by PARTS, from seconds by the parts of engine.measure."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, seconds in told.items():
        found[_PART_OF.get(name, OTHER)] += 1e3 * seconds
    return found


def rows_of(write: Writer, found: Mapping[str, Taken], against: str) -> Iterator[Row]:
    """The rows of every way against one of them."""
    peer = found[against]
    for name, own in found.items():
        if write.setup.device.type == "cuda":
            yield write.timed(name, own.convolutions, Peer(against, peer.convolutions.median), CONVOLUTIONS)
            yield write.timed(name, own.device, Peer(against, peer.device.median))
        for part, times in own.parts.items():
            yield write.timed(name, times, Peer(against, peer.parts[part].median), f"part:{part}")
        yield write.timed(name, own.wall, Peer(against, peer.wall.median), clock="wall")
        write.setup.say(f"{write.subject.case(write.study, name)}: {_told(own, peer)}")


def _told(own: Taken, peer: Taken) -> str:
    """A comparison of two ways in one line."""
    sides = {"convolutions and maps": (own.convolutions, peer.convolutions), "device": (own.device, peer.device)}
    sides = {**(sides if own.device is not own.wall else {}), "wall": (own.wall, peer.wall)}
    medians = {name: (mine.median, theirs.median) for name, (mine, theirs) in sides.items()}
    each = (f"{name} {mine:.4g} ms ({theirs / mine:.2f}x)" for name, (mine, theirs) in medians.items())
    parts = ", ".join(f"{name} {times.median:.4g}" for name, times in own.parts.items())
    return "   ".join(each) + (f"   of it {parts}" if parts else "")


def tile_facts(write: Writer, layers: Sequence[Met], ways: Mapping[str, int]) -> Iterator[Row]:
    """Costs and benefits of splits by way: rows multiplied per useful one, and tiles per layer."""
    for name, splits in ways.items():
        redundancy, count = tiles_of(layers, splits)
        yield write.counted(name, "fact:rows multiplied for a wanted one", redundancy, "rows")
        yield write.counted(name, "fact:tiles of a layer", count, "tiles", Peer("multiprocessors", PROCESSORS))
        write.setup.say(f"  {name}: {redundancy:.2f} rows multiplied for one that is wanted, {count:.0f} tiles a layer")


def tiles_of(layers: Sequence[Met], splits: int) -> tuple[float, float]:
    """Rows multiplied per useful row, and tiles per layer, with layers weighted by their products."""
    multiplied = wanted = weighed = 0.0
    known = {id(one.found): walks(one.found, split_dataflow(min(splits, one.found.volume)).form) for one in layers}
    for one in layers:
        walked, channels = known[id(one.found)], one.inputs * one.outputs
        multiplied += channels * sum(walk.entries * walk.block for walk in walked)
        weighed += channels * one.pairs * sum(walk.tiles for walk in walked)
        wanted += channels * one.pairs
    return (multiplied / wanted, weighed / wanted) if wanted else (0.0, 0.0)


# Layer by layer

BEFORE, BETWEEN = "00 before the first layer", "99 between layers"
DEFAULT = "default"
LAYERED: Mapping[str, Flow] = {DEFAULT: None, "unsorted": split_dataflow(0).name, "sorted": split_dataflow(1).name}
"""By way, the dataflow of all layers in `layers`."""
_ATTEMPTS = 3

Spans = list[Mapping[str, float]]
"""For each interval between marks, milliseconds by part."""


@dataclass
class Marks:
    """Names of the intervals after each mark of a run: a layer, or BETWEEN. make: sets a mark."""

    make: Callable[[], object]
    names: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.make()


def layers(setup: Setup) -> Iterator[Row]:
    """Every network, layer by layer: map building, row ordering, multiplying, and the rest; also over unsorted and over
    sorted rows."""
    for subject in subjects(setup, "layers", tuple(WORKLOADS)):
        network, write = Network.of(setup, subject), Writer(setup, subject, "layers")
        ways = {name: network.all_in(flow) for name, flow in LAYERED.items()}
        yield from by_layer(write, network, checked(setup, network, ways, partial(subject.case, "layers")))


def by_layer(write: Writer, network: Network, ways: Mapping[str, Ran]) -> Iterator[Row]:
    """The rows of checked ways, layer by layer."""
    for way, ran in ways.items():
        try:
            yield from _rows(write, way, layered(network, ran))
        except PumiceError as reason:
            write.setup.say(f"{write.subject.case(write.study, way)} is left out: {reason}")


def _rows(write: Writer, way: str, found: Mapping[str, Mapping[str, Times]]) -> Iterator[Row]:
    for label in sorted(found):
        told = ", ".join(f"{part} {times.median:.4g}" for part, times in found[label].items())
        write.setup.say(f"{write.subject.case(write.study, way)}/{label}: {told} ms")
        for part, times in found[label].items():
            yield write.timed(f"{way}/{label}", times, Peer(ITSELF, times.median), f"part:{part}")


def layered(network: Network, ran: Ran) -> dict[str, dict[str, Times]]:
    """Milliseconds of a pass by layer and part; parts that take no time are left out.

    Raises PumiceError if the profiler does not record every mark.
    """
    names, runs = (_by_profiler if _on_cuda(network) else _by_clock)(network, ran)
    labels = labels_of(network)
    spent: dict[tuple[str, str], list[float]] = {}
    for number, run in enumerate(runs):
        for name, parts in zip(names, run, strict=True):
            for part, milliseconds in parts.items():
                spent.setdefault((labels.get(name, name), part), [0.0] * len(runs))[number] += milliseconds
    found: dict[str, dict[str, Times]] = {}
    for (label, part), each in spent.items():
        if (times := Times.of(each)).median > 0:
            found.setdefault(label, {})[part] = times
    return found


def _on_cuda(network: Network) -> bool:
    return network.samples[0].coords.is_cuda


def labels_of(network: Network) -> dict[str, str]:
    """By layer name, a label with its number in the order of a pass, its map and its channels."""
    tensor = fresh(network.samples[0])
    groups = observe(scenes_of(network.net, [tensor], "inference")).groups
    maps = {name: group.name for group in groups for name in group.layers}
    with torch.no_grad(), marked(network.net, marks := Marks(lambda: None)):
        network.net(fresh(network.samples[0]))
    order = list(dict.fromkeys(name for name in marks.names if name != BETWEEN))
    modules = dict(network.net.named_modules())
    return {
        name: f"{number:02d} {maps[name]}, {modules[name].in_channels}-{modules[name].out_channels}"
        for number, name in enumerate(order, 1)
    }


@contextmanager
def marked(net: nn.Module, mark: Callable[[str], None]) -> Iterator[None]:
    """Within this context each convolution sets a mark before it, with its name, and one after it, BETWEEN."""
    known = {name: module for name, module in net.named_modules() if isinstance(module, Convolution)}

    def called(name: str, x: SparseTensor, target: Target = None) -> SparseTensor:
        mark(name)
        y = type(known[name]).convolve(known[name], x, target)
        mark(BETWEEN)
        return y

    for name, layer in known.items():
        layer.convolve = partial(called, name)
    try:
        yield
    finally:
        for layer in known.values():
            del layer.convolve


def _by_profiler(network: Network, ran: Ran) -> tuple[list[str], list[Spans]]:
    """The names of the intervals of a run, and for each run their milliseconds by part."""
    marks = Marks(lambda: torch.cuda._sleep(1))
    run = partial(network.run, ran)
    with marked(network.net, marks):
        run()
        for left in reversed(range(_ATTEMPTS)):
            marks.names.clear()
            events, _ = profiled([run] * _RUNS)
            spans: Spans = [by_our_parts(parts) for parts in segments(events)]
            each = 1 + len(marks.names) // _RUNS
            if len(spans) == each * _RUNS:
                names = [BEFORE, *marks.names[: each - 1]]
                return names, [spans[at : at + each] for at in range(0, len(spans), each)]
            if not left:
                raise PumiceError(f"the profiler recorded {len(spans)} marks, expected {each * _RUNS}")
    raise AssertionError("unreachable")


def _by_clock(network: Network, ran: Ran) -> tuple[list[str], list[Spans]]:
    """The same on a CPU by the wall clock, where all of a layer's time counts as kernel."""
    stamps: list[float] = []
    marks = Marks(lambda: stamps.append(time.perf_counter()))
    run = partial(network.run, ran)
    runs: list[Spans] = []
    with marked(network.net, marks):
        run()
        for _ in range(_RUNS):
            marks.names.clear()
            stamps[:] = [time.perf_counter()]
            run()
            stamps.append(time.perf_counter())
            runs.append(list(_between(stamps, [BEFORE, *marks.names])))
    return [BEFORE, *marks.names], runs


def _between(stamps: Sequence[float], names: Sequence[str]) -> Iterator[Mapping[str, float]]:
    for name, first, last in zip(names, stamps[:-1], stamps[1:], strict=True):
        yield {OTHER if name in (BEFORE, BETWEEN) else KERNEL: 1e3 * (last - first)}
