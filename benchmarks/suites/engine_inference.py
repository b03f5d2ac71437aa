"""The study `inference` of the suite `engine`: MinkUNet on six scenes, captured, eager, and in spconv's layers.

A call begins with coordinates and features on the device and ends with logits: maps are found in it. Every way's
result is held against a float64 run by plain gathers and products before it is timed.

    captured          fast(feats, coords): nothing is read or checked before
    captured-tensor   fast(SparseTensor(feats, coords)): the coordinates' box is read first
    eager             net(SparseTensor(feats, coords))
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Setup, Way, by_choice, ready
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.engine import INFERENCE, net_for, scenes
from benchmarks.scenes.workloads import Sample, fresh
from benchmarks.suites.engine_ways import CAPTURED, EAGER, SPCONV, Timed, by_scene, case_of
from benchmarks.suites.workloads import EXACT, Side
from pumice.engine import Captured, capture
from pumice.nn.conv import convolutions

SLACK = 4.0
"""Times the error of the dtype: of whole networks, whose roundings add up (bench_workloads.Mode)."""
_SECONDS = 4.0
"""Times those of other studies: a call of a millisecond needs many runs."""


def inference(setup: Setup) -> Iterator[Row]:
    """Every scene that is wanted and at hand."""
    return by_scene(setup, scenes(setup, INFERENCE), "inference", _scene)


def _scene(setup: Setup, sample: Sample) -> Timed | None:
    setup.say(f"{sample.name}: {len(sample)} voxels")
    net = net_for(setup, sample)
    told = Case(case_of(setup, sample.name, "inference"), setup.half, exact(net, sample))
    own, given = net.to(setup.half), replace(sample, feats=sample.feats.to(setup.half))
    made: list[Captured] = []
    ways = [one for one in (ready(setup, told, way, not way.package) for way in _ways(setup, own, given, made)) if one]
    if all(way.name == SPCONV for way in ways):
        return None

    def check() -> None:
        if made and made[0].fallbacks:
            # Captured calls must not be eager ones in disguise.
            setup.failed(f"{told.name}: captured calls ran eagerly: {dict(made[0].fallbacks)}")

    known = INFERENCE.get(sample.name)
    return Timed(setup, sample.name, "inference", ways, known, _SECONDS * setup.seconds, check)


def exact(net: nn.Module, sample: Sample) -> Any:
    """What the network gives in float64, rows by coordinates: (feats, coords)."""
    wide = copy.deepcopy(net).double()
    for layer in convolutions(wide):
        layer.dataflow = EXACT
    side = Side.ours(wide, replace(sample, feats=sample.feats.double()))
    with torch.no_grad():
        return side.result(side.net(side.tensor()))


def _ways(setup: Setup, net: nn.Module, sample: Sample, made: list[Captured]) -> Iterator[Way]:
    """made: where the captured network is put when it is needed first."""
    ours = Side.ours(net, sample)

    def fast() -> Captured:
        if not made:
            begin = time.perf_counter()
            made.append(by_choice(setup, lambda: capture(net, fresh(sample), max_voxels=len(sample)))())
            setup.say(f"  captured in {time.perf_counter() - begin:.1f} s")
        return made[0]

    eager = torch.no_grad()(lambda: net(ours.tensor()))
    yield Way(EAGER, lambda: by_choice(setup, eager), view=ours.result, slack=SLACK)
    yield Way(CAPTURED, lambda: partial(fast(), sample.feats, sample.coords), view=ours.result, slack=SLACK)
    yield Way(f"{CAPTURED}-tensor", lambda: _of_tensor(fast(), sample), view=ours.result, slack=SLACK)
    yield _spconv(setup, net, sample)


def _of_tensor(fast: Captured, sample: Sample) -> Callable[[], Any]:
    return lambda: fast(fresh(sample))


def _spconv(setup: Setup, net: nn.Module, sample: Sample) -> Way:
    sides: list[Side] = []

    def make() -> Callable[[], Any]:
        sides.append(Side.spconv(net, sample))
        side = sides[0]
        return torch.no_grad()(lambda: side.net(side.tensor()))

    slack = SLACK * (2.0 if setup.device.type == "cuda" else spconv_peer.slack(setup.device))
    return Way(SPCONV, make, spconv_peer.package(), lambda y: sides[0].result(y), slack)
