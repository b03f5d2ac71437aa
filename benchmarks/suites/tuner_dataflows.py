"""The study `dataflows` of the suite `tuner`: one layer in every named dataflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row, Subject, row
from benchmarks.harness.study import DTYPES, Case, Setup, Way, ready
from benchmarks.harness.timing import Times, busy, together
from benchmarks.scenes.layers import Cell, Choice, Trained, cells, layer_of
from benchmarks.suites.einsum_conv import exact
from benchmarks.suites.tuner_cases import clock_of, say_published, spent
from pumice.coords import KernelMap
from pumice.coords.lookup import Neighbours
from pumice.errors import PumiceError
from pumice.ops import conv_features
from pumice.schedule.dataflow import DATAFLOWS

DEFAULT = "default"
"""The dataflow that the planner picks."""
WITH_FORM = "time with form"
"""The metric of a layer and of what lays its map out."""


def dataflows(setup: Setup) -> Iterator[Row]:
    """A layer in every dataflow on the map at hand, and from the bare map on: with what its form takes to make."""
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
    subject = Subject(setup.suite, "", DTYPES[setup.half], setup.device)
    for name in sorted(done, key=lambda name: whole[name].median):
        setup.say(f"{cell.case}/{name}: {_told(at_hand[name])}, with its form {_told(whole[name])}")
    for metric, times in (("time", at_hand), (WITH_FORM, whole)):
        default = Peer(DEFAULT, times[DEFAULT].median)
        for name in done:
            named = replace(subject, case=f"{cell.case}/{name}", metric=metric)
            yield row(named, times[name], clock_of(setup), default)


def _layer(layer: Trained, flow: str | None, found: KernelMap | None = None) -> Callable[[], Tensor]:
    run = partial(conv_features, layer.feats, layer.weight, found or layer.found, layer.rows, dataflow=flow)
    return torch.no_grad()(run)


def _anew(layer: Trained, flow: str | None) -> Callable[[], Tensor]:
    """The layer on the bare map, as it is found: rows and masks alone."""
    rows, masks = layer.found.rows(), layer.found.masks()

    def run() -> Tensor:
        return _layer(
            layer, flow, KernelMap.from_neighbours(layer.found.relation, Neighbours(rows, masks), layer.rows)
        )()

    return run


def _spent_anew(setup: Setup, call: Callable[[], Tensor]) -> Times:
    """What the device works on it: sizes of a form are waited for in the middle."""
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


def _told(times: Times) -> str:
    return f"{times.median:.4g} ms ({times.p20:.4g}, {times.p80:.4g})"
