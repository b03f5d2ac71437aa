"""The study `layers` of the suite `tuner`: where each layer of a network spends its time, untuned, in inference.

Between layers the device runs a kernel that does nothing, by which what it did is told apart. Maps that a network has
found for all of its layers at once stand at the first of them; norms and activations that are part of a convolution's
kernel are its own, the others stand between layers.
"""

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
from benchmarks.harness.timing import Times
from benchmarks.scenes.workloads import WORKLOADS, fresh
from benchmarks.suites.tuner_cases import ITSELF, Writer, subjects
from benchmarks.suites.tuner_networks import Network, checked
from benchmarks.suites.tuner_taken import KERNEL, OTHER, by_our_parts
from pumice.engine.groups import observe
from pumice.engine.measure import profiled, segments
from pumice.engine.subject import subject as scenes_of
from pumice.errors import PumiceError
from pumice.nn.conv import Convolution
from pumice.ops import Epilogue, SparseTensor
from pumice.ops.conv import Target

BEFORE, BETWEEN = "00 before the first layer", "99 between layers"
DEFAULT = "default"
_RUNS = 7
_ATTEMPTS = 3

Spans = list[Mapping[str, float]]
"""Milliseconds by part of what lies between marks."""


@dataclass
class Marks:
    """What is behind each mark of a run: a layer by its name, or BETWEEN. make: puts a mark."""

    make: Callable[[], object]
    names: list[str] = field(default_factory=list)

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.make()


def layers(setup: Setup) -> Iterator[Row]:
    """Every network, layer by layer: finding its map, ordering rows, multiplying, and the rest."""
    for subject in subjects(setup, "layers", tuple(WORKLOADS)):
        network, write = Network.of(setup, subject), Writer(setup, subject, "layers")
        right = checked(setup, network, {DEFAULT: network.all_in(None)}, partial(subject.case, "layers"))
        if not right:
            continue
        try:
            yield from _rows(write, layered(setup, network))
        except PumiceError as reason:
            setup.say(f"{subject.case('layers', DEFAULT)} is left out: {reason}")


def _rows(write: Writer, found: Mapping[str, Mapping[str, Times]]) -> Iterator[Row]:
    for label in sorted(found):
        told = ", ".join(f"{part} {times.median:.4g}" for part, times in found[label].items())
        write.setup.say(f"{write.subject.case('layers', DEFAULT)}/{label}: {told} ms")
        for part, times in found[label].items():
            yield write.timed(f"{DEFAULT}/{label}", times, Peer(ITSELF, times.median), f"part:{part}")


def layered(setup: Setup, network: Network) -> dict[str, dict[str, Times]]:
    """Milliseconds of a pass by layer and part; parts that take nothing are left out.

    Raises PumiceError where the profiler does not tell of every mark.
    """
    names, runs = (_by_profiler if setup.device.type == "cuda" else _by_clock)(network)
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


def labels_of(network: Network) -> dict[str, str]:
    """By name of a layer its number in the order of a pass, its map, and its channels."""
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
    """Within it every convolution of a layer has a mark before it, by its name, and one behind it: BETWEEN."""
    known = {name: module for name, module in net.named_modules() if isinstance(module, Convolution)}

    def finished(name: str, x: SparseTensor, epilogue: Epilogue | None, target: Target = None) -> SparseTensor:
        mark(name)
        y = type(known[name]).forward_with_epilogue(known[name], x, epilogue, target)
        mark(BETWEEN)
        return y

    for name, layer in known.items():
        layer.forward_with_epilogue = partial(finished, name)
    try:
        yield
    finally:
        for layer in known.values():
            del layer.forward_with_epilogue


def _by_profiler(network: Network) -> tuple[list[str], list[Spans]]:
    """What is behind the marks of a run, and of each run milliseconds by part."""
    marks = Marks(lambda: torch.cuda._sleep(1))
    run = partial(network.run, network.all_in(None))
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


def _by_clock(network: Network) -> tuple[list[str], list[Spans]]:
    """The same on a CPU, by the wall clock: a layer is its kernel."""
    stamps: list[float] = []
    marks = Marks(lambda: stamps.append(time.perf_counter()))
    run = partial(network.run, network.all_in(None))
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
