"""The studies of the suite `tuner` about single convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, ready
from benchmarks.harness.timing import Times, busy, together
from benchmarks.scenes.layers import Cell, Choice, Trained, cells, exact, layer_of
from benchmarks.scenes.network_layers import Fed, Met, layers_of
from benchmarks.scenes.workloads import fresh
from benchmarks.suites.tuner_cases import Subjected, Writer, say_published, spent, spent_in_pieces, subjects
from pumice.coords import KernelMap
from pumice.coords.lookup import Neighbours
from pumice.engine.measure import by_part
from pumice.errors import PumiceError
from pumice.lower import dataflow, reference
from pumice.ops import Dataflow, conv_features
from pumice.schedule.dataflow import DATAFLOWS, Grouping

NETWORKS = ("minkunet-kitti-1x", "minkunet-nuscenes-1f")
"""The networks of the studies movement and grouping, those of the papers' tables."""
_L2 = 50e6
"""Bytes of an H200's L2 available to features."""
_RUNS = 5


def fed(setup: Setup, subject: Subjected) -> list[Fed]:
    """The convolutions of the subject's network on its first scan, with operands."""
    met = layers_of(subject.net(setup), fresh(subject.samples(setup)[0]))
    return [Fed.normal(one, subject.dtype) for one in met]


Run = Sequence[Callable[[], Tensor]]
"""A call per layer."""


def in_turn(layers: Sequence[Fed], flows: Sequence[str | Dataflow]) -> Run:
    """Calls of all layers in inference, each in its dataflow."""
    return [torch.no_grad()(partial(one.forward, flow)) for one, flow in zip(layers, flows, strict=True)]


def results(run: Run) -> list[Tensor]:
    """The results of all layers in order."""
    return [layer() for layer in run]


def checked(setup: Setup, case: str, dtype: torch.dtype, truths: Sequence[Tensor], runs: Mapping[str, Run]) -> bool:
    """True if all runs are right by the tolerance of the dtype; others are recorded as failures."""
    known = Case(case, dtype, truths)
    ways = [Way(name, lambda run=run: partial(results, run)) for name, run in runs.items()]
    return all(ready(setup, known, way, ours=True) for way in ways)


def products(layers: Sequence[Fed], groupings: Sequence[Grouping]) -> Run:
    """Calls of the matrix products only, on rows gathered beforehand."""
    made = []
    for one, grouping in zip(layers, groupings, strict=True):
        how = dataflow.layout(one.found, grouping)
        filters = reference.grouped(one.weight.contiguous(), 1)
        gathered = one.feats.index_select(0, how.gather)
        made.append(torch.no_grad()(partial(dataflow.multiplied, gathered, filters, how)))
    return made


# Movement

MOVEMENTS: Mapping[str, tuple[bool, str]] = {
    "fp32": (False, "vectorised"),
    "vectorised": (True, "vectorised"),
    "fused": (True, "fused"),
    "locality-aware": (True, "locality-aware"),
}
"""By name: whether in half precision, and the kind of data movement. torch always gathers and scatters vectorised, so
there is no scalar baseline."""


def data_movement(setup: Setup) -> Iterator[Row]:
    """Gather and scatter of all convolutions: in fp32, in half precision, fused, and in the order of the outputs."""
    for subject in subjects(setup, "movement", NETWORKS):
        say_published(setup, "movement")
        yield from _movements(setup, subject)


def _movements(setup: Setup, subject: Subjected) -> Iterator[Row]:
    half = fed(setup, subject)
    # The same values in both precisions, so that one reference serves both.
    full = [one.to(torch.float32) for one in half]
    sides = {True: half, False: full}
    names = {name: f"gather-gemm-scatter-{kind}-separate" for name, (_, kind) in MOVEMENTS.items()}
    runs = {
        name: in_turn(sides[narrow], [DATAFLOWS[names[name]]] * len(half)) for name, (narrow, _) in MOVEMENTS.items()
    }
    truths = [one.exact()[0] for one in half]
    if not checked(setup, subject.case("movement", "all"), subject.dtype, truths, runs):
        return
    del truths
    times = spent_in_pieces(setup, runs)
    moved = {name: _moved(setup, run, sides[MOVEMENTS[name][0]]) for name, run in runs.items()}
    yield from _movement_rows(setup, subject, half, times, moved)


def _moved(setup: Setup, run: Run, layers: Sequence[Fed]) -> Times:
    """Time outside of matrix products: on a GPU by kernel, else the whole minus the products alone."""
    if setup.device.type == "cuda":
        try:
            each, _ = by_part([partial(results, run)] * _RUNS)
            return Times.of([1e3 * (sum(parts.values()) - parts.get("product", 0.0)) for parts in each])
        except PumiceError as reason:
            setup.say(f"  movement is the whole less the products alone: {reason}")
    alone = products(layers, [Grouping("separate")] * len(layers))
    times = spent_in_pieces(setup, {"whole": run, "products": alone})
    return Times.exactly(max(0.0, times["whole"].median - times["products"].median))


def _movement_rows(
    setup: Setup, subject: Subjected, layers: Sequence[Fed], times: Mapping[str, Times], moved: Mapping[str, Times]
) -> Iterator[Row]:
    write = Writer(setup, subject, "movement")
    before = moved["fp32"].median
    for name, (narrow, _) in MOVEMENTS.items():
        yield write.timed(name, times[name], Peer("fp32", times["fp32"].median))
        yield write.timed(name, moved[name], Peer("fp32", before), "part:movement")
        size, own = layers[0].feats.element_size() if narrow else 4, moved[name].median
        volume = sum(_bytes(one.met, size) for one in layers)
        yield write.counted(name, "fact:bytes gathered and scattered", 1e-9 * volume, "GB")
        setup.say(
            f"{subject.case('movement', name)}: {times[name].median:.4g} ms, of it movement {own:.4g} "
            f"({_times(before, own)} fp32), {1e-9 * volume:.3g} GB at {_rate(volume, own)}"
        )
    largest = max(one.feats.numel() * one.feats.element_size() for one in layers)
    yield write.counted("locality-aware", "fact:largest features", 1e-6 * largest, "MB", Peer("L2", 1e-6 * _L2))


def _bytes(met: Met, size: int) -> float:
    """Bytes that gather and scatter move at least: for each pair both rows, read and written."""
    return 2.0 * met.pairs * (met.inputs + met.outputs) * size


def _times(before: float, after: float) -> str:
    return f"{before / after:.2f}x" if after else "all of"


def _rate(volume: float, milliseconds: float) -> str:
    return f"{1e-9 * volume / milliseconds:.3g} TB/s" if milliseconds else "no time that can be told"


# Dataflows

DEFAULT = "default"
"""The name of the dataflow chosen by the planner."""
WITH_FORM = "time with form"
"""The metric of a layer's time including the layout of its map."""


def dataflows(setup: Setup) -> Iterator[Row]:
    """A layer in every dataflow, over a ready map, and over a bare map including the time to build its form."""
    say_published(setup, "dataflows")
    chosen = Choice("dataflows", scenes=("nuscenes_1f_10cm", "waymo_1f_5cm"), channels=(32, 128))
    for cell in cells(setup, chosen):
        yield from _cell(setup, cell)


def _cell(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case = Case(cell.case, setup.half, exact(layer))
    flows = {flow or DEFAULT: flow for flow in (None, *DATAFLOWS)}
    calls = {name: _layer(layer, flow) for name, flow in flows.items()}
    done = [name for name, call in calls.items() if ready(setup, case, Way(name, lambda call=call: call), ours=True)]
    if DEFAULT not in done:
        return
    at_hand = spent(setup, {name: calls[name] for name in done})
    whole = {name: _spent_anew(setup, _anew(layer, flows[name])) for name in done}
    for name in sorted(done, key=lambda name: whole[name].median):
        setup.say(f"{cell.case}/{name}: {at_hand[name]}, with its form {whole[name]}")
    for metric, times in (("time", at_hand), (WITH_FORM, whole)):
        default = Peer(DEFAULT, times[DEFAULT].median)
        for name in done:
            yield setup.row(f"{cell.case}/{name}", times[name], setup.clock, default, metric)


def _layer(layer: Trained, flow: str | None, found: KernelMap | None = None) -> Callable[[], Tensor]:
    run = partial(conv_features, layer.feats, layer.weight, found or layer.found, layer.rows, dataflow=flow)
    return torch.no_grad()(run)


def _anew(layer: Trained, flow: str | None) -> Callable[[], Tensor]:
    """A call of the layer over a new map of rows and masks only."""
    rows, masks = layer.found.rows(), layer.found.masks()

    def run() -> Tensor:
        return _layer(
            layer, flow, KernelMap.from_neighbours(layer.found.relation, Neighbours(rows, masks), layer.rows)
        )()

    return run


def _spent_anew(setup: Setup, call: Callable[[], Tensor]) -> Times:
    """Device time of a call that waits midway for the sizes of a form."""
    clock = "wall"
    if setup.device.type == "cuda":
        call()
        try:
            return busy(call)
        except PumiceError as reason:
            setup.say(f"  between events: {reason}")
            clock = "events"
    (times,) = together([call], setup.device, clock, setup.seconds)
    return times
