"""The study `sensitivity` of the suite `conv-forward`: a GPU with half of its bandwidth, or half of its arithmetic.

TorchSparse++ (section 6.3) asks it of an RTX 3090. No clock of a GPU halves one rate alone, so the answer is that of
the cost model: the layers' bound and what it leaves out (layer_model.why), summed, with the rates of an H200 and with
one of them halved. Nothing is timed, and any device gives the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from benchmarks.harness.rows import ANY, Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.peers.published import figure
from benchmarks.scenes.layers import Layer
from benchmarks.scenes.network_layers import Fed, layers_of
from benchmarks.scenes.workloads import WORKLOADS, Workload, fresh, narrow, samples, stand_in
from benchmarks.suites.layer_model import Needs, Step, bounds, needs, walks, why
from pumice.errors import OptionError
from pumice.schedule.predict import DEVICES, Device

NETWORKS = ("minkunet-kitti-1x", "centerpoint-waymo-1f")
FORM = "compacted"
_TINY = 150
"""Maximum voxels of a scan in a quick run."""
_H200 = DEVICES["cuda"]
HALVED: Mapping[str, Device] = {
    "memory": replace(_H200, memory=_H200.memory / 2),
    "arithmetic": replace(_H200, matrix=_H200.matrix / 2, plain=_H200.plain / 2),
    "cache": replace(_H200, cache=_H200.cache / 2),
}
"""By name, an H200 with one rate halved; memory: that of the paper, bandwidth off the chip."""
_TOLD = figure("TorchSparse++", "section 6.3").values
PUBLISHED: Mapping[str, float] = {"memory": _TOLD["memory bandwidth"][""], "arithmetic": _TOLD["arithmetic"][""]}
"""The paper's, on an RTX 3090."""


def sensitivity(setup: Setup) -> Iterator[Row]:
    """How many times as long the convolutions of a network take with one rate halved."""
    for name in NETWORKS[:1] if setup.quick else NETWORKS:
        workload = narrow(stand_in(WORKLOADS[name])) if setup.quick else WORKLOADS[name]
        case = f"{'tiny/' * setup.quick}sensitivity/{name}"
        if not setup.wants(case):
            continue
        try:
            found = _needed(setup, workload)
        except OptionError as reason:
            setup.say(f"{name} is left out: {reason}")
            continue
        whole = seconds(found, _H200)
        setup.say(f"{case}: {len(found)} layers, {1e3 * whole:.3g} ms by the model; limited by {_limits(found)}")
        for rate, gpu in HALVED.items():
            slower = seconds(found, gpu) / whole
            setup.say(f"  half of the {rate}: {slower:.3f} times as long")
            known = (
                Peer("TorchSparse++ (paper)", PUBLISHED[rate], "recorded")
                if rate in PUBLISHED
                else Peer("itself", slower)
            )
            made = setup.row(f"{case}/{rate}", slower, "count", known, "slowdown", "x", "fp16")
            yield replace(made, device=ANY)


def seconds(layers: list[Needs], gpu: Device) -> float:
    """Seconds of these layers one after the other: the largest bound of each, and what it leaves out."""
    return math.fsum(max(bounds(one, 0.0, gpu).values()) + sum(why(one, 0.0, gpu).values()) for one in layers)


def _needed(setup: Setup, workload: Workload) -> list[Needs]:
    """The cost of each convolution of a network in half precision, with default tiles."""
    (sample,) = samples(workload, setup.device, count=1, most=_TINY if setup.quick else 0)
    found = []
    for met in layers_of(workload.model().to(setup.device).eval(), fresh(sample)):
        fed = Fed.normal(met, torch.float16)
        layer = Layer(met.found, fed.feats, fed.weight, sample.coords.new_empty(met.found.num_outputs, 4))
        found.append(needs(layer, walks(met.found, FORM), Step.of(layer, FORM).default()))
    return found


def _limits(layers: list[Needs]) -> str:
    """What limits how many layers."""
    names = [max(held, key=held.__getitem__) for held in map(bounds, layers)]
    return ", ".join(f"{name} {names.count(name)}" for name in dict.fromkeys(names))
