"""The study `training` of the suite `engine`: whole steps of MinkUNet on batches of two scenes.

A step: new tensor, forward in mixed precision (autocast, float16), a loss over all voxels, backward, SGD. Maps are
found in it. Results and gradients of the first step are held against a float32 run by plain gathers and products. The
rate of learning is so small that what is timed stays what was checked.

    eager      the step as it is written
    captured   the same step as one CUDA graph, where pumice has `capture_step`
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import pumice
from pumice.nn.conv import convolutions
from pumice.tools import spconv_peer
from pumice.tools.bench_engine_ways import CAPTURED, EAGER, SPCONV, Reached, Timed, case_of, in_time
from pumice.tools.bench_workloads import EXACT, LOSS, Side
from pumice.tools.engine_scenes import TRAINING, net_for, scenes
from pumice.tools.ledger import Row
from pumice.tools.study import Case, Ready, Setup, Way, by_choice
from pumice.tools.whole_calls import checked
from pumice.tools.workloads import Sample

BATCH = 2
RATE = 1e-8 / LOSS
_SLACKS = (4.0, 80.0)
"""Times the error of the dtype: of results, and of all gradients together (bench_workloads.Mode)."""
_ON_CPU = (1.0, 100.0)
_SECONDS = 6.0

Step = Callable[[], Any]
"""It gives what the network gave, and leaves gradients in its parameters."""


def training(setup: Setup) -> Iterator[Row]:
    """Every scene that is wanted and at hand."""
    found = Reached()
    for sample in in_time(setup, scenes(setup, TRAINING, BATCH), "training"):
        for made in _scene(setup, sample):
            found.add(made)
            yield made
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()
    found.tell(setup)


def _scene(setup: Setup, sample: Sample) -> Iterator[Row]:
    setup.say(f"{sample.name}: {len(sample)} voxels in {sample.batch} items")
    net = net_for(setup, sample).train()
    truths = _truths(net, sample)
    known = [way for way in WAYS if way != CAPTURED or hasattr(pumice, "capture_step")]
    if CAPTURED not in known:
        setup.say("  captured steps are left out: pumice has no capture_step yet")
    ways = [one for one in (_checked(setup, way, sample, net, truths) for way in known) if one]
    if any(way.name == EAGER for way in ways):
        yield from Timed(setup, sample.name, "training", ways, TRAINING.get(sample.name)).rows(_SECONDS * setup.seconds)


def _truths(net: nn.Module, sample: Sample) -> tuple[Any, Tensor]:
    """(feats, coords) by coordinates, and all gradients."""
    wide = copy.deepcopy(net)
    for layer in convolutions(wide):
        layer.dataflow = EXACT
    side = Side.ours(wide, sample)
    y = step_of(side, None, mixed=False)()
    return side.result(y), side.gradients(y)


def _checked(setup: Setup, way: str, sample: Sample, net: nn.Module, truths: tuple[Any, Tensor]) -> Ready | None:
    sides: list[Side] = []

    def make() -> Step:
        made, step = WAYS[way](setup, copy.deepcopy(net), sample)
        sides.append(made)
        return step

    package, slack = "", 1.0
    if way == SPCONV:
        package, slack = spconv_peer.package(), spconv_peer.slack(setup.device)
    views = (lambda y: sides[0].result(y), lambda y: sides[0].gradients(y))
    slacks = _SLACKS if setup.device.type == "cuda" else _ON_CPU
    case = case_of(setup, sample.name, "training")
    cases = [
        (Case(case, setup.half, truth), Way("", make, view=view, slack=slack * own))
        for truth, view, own in zip(truths, views, slacks, strict=True)
    ]
    return checked(setup, Way(way, make, package), cases, ours=not package)


def _eager(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side = Side.ours(net, sample)
    return side, by_choice(setup, step_of(side, _sgd(net), setup.device.type == "cuda"))


def _spconv(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    side = Side.spconv(net, sample)
    return side, step_of(side, _sgd(side.net), setup.device.type == "cuda")


def _captured(setup: Setup, net: nn.Module, sample: Sample) -> tuple[Side, Step]:
    make: Any = pumice.capture_step  # pyright: ignore[reportAttributeAccessIssue]
    side = Side.ours(net, sample)
    fast = make(net, side.tensor(), _sgd(net), _loss, max_voxels=len(sample))
    return side, partial(fast, sample.feats, sample.coords)


WAYS: Mapping[str, Callable[[Setup, nn.Module, Sample], tuple[Side, Step]]] = MappingProxyType(
    {EAGER: _eager, CAPTURED: _captured, SPCONV: _spconv}
)
"""What makes a step of a network that is its own: its side, and the step."""


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), RATE)


def _loss(feats: Tensor) -> Tensor:
    return LOSS * feats.float().logsumexp(1).mean()


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
