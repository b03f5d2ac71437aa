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
from benchmarks.scenes.network_layers import Fed, layers_of
from benchmarks.scenes.workloads import fresh
from benchmarks.suites.tuner_cases import Subjected, Writer, say_published, spent, spent_in_pieces, subjects
from pumice.coords import KernelMap
from pumice.coords.lookup import Neighbours
from pumice.errors import PumiceError
from pumice.lower import dataflow, movement, reference
from pumice.ops import Dataflow, conv_features
from pumice.schedule.dataflow import DATAFLOWS, Grouping

NETWORKS = ("minkunet-kitti-1x", "minkunet-nuscenes-1f")
"""The networks of the studies movement and grouping, those of the papers' tables."""


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
        gathered = movement.gather_slots(one.feats, how.inputs)
        made.append(torch.no_grad()(partial(_multiplied, one.feats, gathered, filters, how)))
    return made


def _multiplied(x: Tensor, gathered: Tensor, filters: Tensor, how: dataflow.PairLayout) -> Tensor:
    """All products of a layer; that of the offset without movement reads the features."""
    dataflow.middle_product(x, filters, how)
    return dataflow.multiplied(gathered, filters, how)


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
