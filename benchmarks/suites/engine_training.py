"""The study `training` of the suite `engine`: whole steps of MinkUNet on batches of two scenes.

A step: new tensor, forward in mixed precision (autocast, float16), a loss over all voxels, backward, SGD. Maps are
found in it. Results and gradients of the first step are held against a run by plain gathers and products, in float32
on a GPU, whose memory has no room for wider ones, and in float64 elsewhere; of a captured step, which gives no results,
its loss in their place. The rate of learning is so small that what is timed stays what was checked.

    eager      the step as it is written
    captured   the same step as CUDA graphs (pumice.capture_step)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Ready, Setup, Way, by_choice
from benchmarks.harness.whole import checked
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.engine import TRAINING, net_for, scenes
from benchmarks.scenes.workloads import Sample
from benchmarks.suites.engine_ways import CAPTURED, EAGER, SPCONV, Timed, by_scene, case_of
from benchmarks.suites.workloads import EXACT, LOSS, Side
from pumice.engine import capture_step
from pumice.nn.conv import convolutions
from pumice.ops import row_mean

BATCH = 2
RATE = 1e-8 / LOSS
_SLACKS = (4.0, 80.0)
"""Times the error of the dtype: of results, and of all gradients together (bench_workloads.Mode)."""
_ON_CPU = (1.0, 100.0)
_SECONDS = 6.0

Step = Callable[[], Any]
"""It gives what the network gave, or the loss of a captured step, and leaves gradients in its parameters."""


def training(setup: Setup) -> Iterator[Row]:
    """Every scene that is wanted and at hand."""
    return by_scene(setup, scenes(setup, TRAINING, BATCH), "training", _scene)


def _scene(setup: Setup, sample: Sample) -> Timed | None:
    setup.say(f"{sample.name}: {len(sample)} voxels in {sample.batch} items")
    net = net_for(setup, sample).train()
    truths = _truths(net, sample)
    ways = [one for one in (_checked(setup, way, sample, net, truths) for way in WAYS) if one]
    if all(way.name != EAGER for way in ways):
        return None
    known = TRAINING.get(sample.name)
    return Timed(setup, sample.name, "training", ways, known, _SECONDS * setup.seconds)


def _truths(net: nn.Module, sample: Sample) -> dict[str, Any]:
    """What views give of an exact step."""
    dtype = torch.float32 if sample.coords.is_cuda else torch.float64
    wide = copy.deepcopy(net).to(dtype)
    for layer in convolutions(wide):
        layer.dataflow = EXACT
    side = Side.ours(wide, replace(sample, feats=sample.feats.to(dtype)))
    y = step_of(side, None, mixed=False)()
    return {"result": side.result(y), "loss": _loss(y.feats).detach(), "gradients": side.gradients(y)}


VIEWS: Mapping[str, Callable[[Side, Any], Any]] = MappingProxyType(
    {
        "result": lambda side, y: side.result(y),
        "loss": lambda side, value: value,
        "gradients": lambda side, y: side.gradients(y),
    }
)
"""What is compared, of a side and what its step gives. result: (feats, coords) by coordinates."""


def _checked(setup: Setup, way: str, sample: Sample, net: nn.Module, truths: Mapping[str, Any]) -> Ready | None:
    sides: list[Side] = []

    def make() -> Step:
        made, step = WAYS[way](setup, copy.deepcopy(net), sample)
        sides.append(made)
        return step

    package, lent = "", 1.0
    if way == SPCONV:
        package, lent = spconv_peer.package(), spconv_peer.slack(setup.device)
    slacks = _SLACKS if setup.device.type == "cuda" else _ON_CPU
    case = case_of(setup, sample.name, "training")
    names = ("loss" if way == CAPTURED else "result", "gradients")
    cases = [
        (
            Case(case, setup.half, truths[name]),
            Way("", make, view=lambda y, name=name: VIEWS[name](sides[0], y), slack=slack * lent),
        )
        for name, slack in zip(names, slacks, strict=True)
    ]
    return checked(setup, Way(way, make, package), cases, ours=not package)


def _eager(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side = Side.ours(net, sample)
    return side, by_choice(setup, step_of(side, _sgd(net), setup.device.type == "cuda"))


def _spconv(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side = Side.spconv(net, sample)
    return side, step_of(side, _sgd(side.net), setup.device.type == "cuda")


def _captured(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side, device = Side.ours(net, sample), setup.device.type
    begin = time.perf_counter()
    with torch.autocast(device, torch.float16, enabled=device == "cuda"):
        made = partial(capture_step, net, _mean_loss, _sgd(net), side.tensor(), max_voxels=len(sample))
        fast = by_choice(setup, made)()
    setup.say(f"  captured in {time.perf_counter() - begin:.1f} s")
    return side, lambda: fast(side.tensor())


def _mean_loss(y: Any) -> Tensor:
    """The loss over the voxels that there are."""
    return LOSS * row_mean(y, y.feats.float().logsumexp(1))


WAYS: Mapping[str, Callable[[Setup, nn.Module, Sample], tuple[Side, Step]]] = MappingProxyType(
    {EAGER: _eager, CAPTURED: _captured, SPCONV: _spconv}
)
"""What makes a step of a network that is its own: its side, and the step."""


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), RATE)


def _loss(feats: Tensor) -> Tensor:
    wide = feats if feats.dtype == torch.float64 else feats.float()
    return LOSS * wide.logsumexp(1).mean()


def step_of(side: Side, optimizer: torch.optim.Optimizer | None, mixed: bool) -> Step:
    """Forward, backward, and one step of the optimizer if there is one; mixed: under autocast to float16."""
    device = next(side.net.parameters()).device.type

    def step() -> Any:
        side.net.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.float16, enabled=mixed):
            y = side.net(side.tensor())
        _loss(side.feats(y)).backward()
        if optimizer is not None:
            optimizer.step()
        return y

    return step
