"""The study `dataflows` of the suite `tuner`: one layer in every named dataflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pumice.coords import KernelMap
from pumice.ops import conv_features
from pumice.schedule.dataflow import DATAFLOWS
from pumice.tools.bench_conv import exact
from pumice.tools.bench_tuner_cases import clock_of, say_published, spent
from pumice.tools.layer_cells import Cell, Choice, Trained, cells, layer_of
from pumice.tools.ledger import Peer, Row, Subject, row
from pumice.tools.study import DTYPES, Case, Ready, Setup, Way, ready

DEFAULT = "default"
"""The dataflow that the planner picks."""


def dataflows(setup: Setup) -> Iterator[Row]:
    """A layer in every dataflow on the map at hand, and from the bare map on: with what its form takes to make."""
    say_published(setup, "dataflows")
    chosen = Choice("dataflows", scenes=("nuscenes_1f_10cm", "waymo_1f_5cm"), channels=(32, 128))
    for cell in cells(setup, chosen):
        yield from _cell(setup, cell)


def _cell(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case = Case(cell.case, setup.half, exact(layer))
    found = [_ready(setup, case, layer, flow) for flow in (None, *DATAFLOWS)]
    done = [one for one in found if one is not None]
    if not done or done[0].name != DEFAULT:
        return
    times = spent(setup, {one.name: one.call for one in done})
    subject = Subject(setup.suite, "", DTYPES[setup.half], setup.device)
    for name, own in sorted(times.items(), key=lambda item: item[1].median):
        setup.say(f"{cell.case}/{name}: {own.median:.4g} ms ({own.p20:.4g}, {own.p80:.4g})")
    default = Peer(DEFAULT, times[DEFAULT].median)
    for name, own in times.items():
        yield row(replace(subject, case=f"{cell.case}/{name}"), own, clock_of(setup), default)


def _ready(setup: Setup, case: Case, layer: Trained, flow: str | None) -> Ready | None:
    call = _layer(layer, flow, layer.found)
    return ready(setup, case, Way(flow or DEFAULT, lambda: call), ours=True)


def _layer(layer: Trained, flow: str | None, found: KernelMap) -> Callable[[], Tensor]:
    run = partial(conv_features, layer.feats, layer.weight, found, layer.rows, dataflow=flow)
    return torch.no_grad()(run)
