"""The suites `conv-forward` and `conv-train`: one 3x3x3 submanifold layer, C to C, its map at hand.

Scenes and recorded peers are those of the project's baselines on an H200 (2026-11-20: torch 2.11, events around the
call, flushed L2, host time included); spconv runs beside. The clock gpu is the device alone, the wall has the host in
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pumice.coords import KernelMap, Relation, kernel_map
from pumice.errors import OptionError
from pumice.lower import reference
from pumice.ops import SparseTensor, conv_features
from pumice.tools import spconv_peer
from pumice.tools.bench_conv import Layer
from pumice.tools.job import pick_device
from pumice.tools.ledger import Peer, Row
from pumice.tools.map_scenes import Voxels, layer_scenes
from pumice.tools.study import Case, Options, Say, Setup, Way, measured, seconds_to_move, summarize, tuned, untuned

CHANNELS = (32, 64, 128, 256)
# The best peer of each cell, fp16, milliseconds: (name, time) for 32, 64, 128 and 256 channels.
_FORWARD = {
    "nuscenes_1f_10cm": (("torchsparse", 0.0278), ("torchsparse", 0.0395), ("flexgemm", 0.0695), ("spconv", 0.16)),
    "scannet_2cm": (("torchsparse", 0.0341), ("torchsparse", 0.0572), ("spconv", 0.104), ("spconv", 0.208)),
    "shell_128": (("torchsparse", 0.0667), ("torchsparse", 0.105), ("spconv", 0.188), ("spconv", 0.623)),
    "waymo_1f_10x10x15cm": (("torchsparse", 0.0852), ("spconv", 0.123), ("spconv", 0.25), ("spconv", 0.913)),
    "waymo_1f_5cm": (("torchsparse", 0.103), ("spconv", 0.188), ("spconv", 0.251), ("spconv", 0.811)),
    "shell_256": (("flexgemm", 0.167), ("flexgemm", 0.181), ("spconv", 0.572), ("spconv", 2.54)),
    "shell_512": (("flexgemm", 0.304), ("flexgemm", 0.688), ("flexgemm", 2.11), ("spconv", 10.4)),
}
_TRAINING = {
    "nuscenes_1f_10cm": (("torchsparse", 0.244), ("torchsparse", 0.244), ("torchsparse", 0.26), ("torchsparse", 0.671)),
    "scannet_2cm": (("torchsparse", 0.214), ("torchsparse", 0.271), ("torchsparse", 0.388), ("torchsparse", 0.944)),
    "shell_128": (("torchsparse", 0.359), ("torchsparse", 0.418), ("torchsparse", 0.937), ("spconv", 2.5)),
    "waymo_1f_10x10x15cm": (
        ("torchsparse", 0.349),
        ("torchsparse", 0.563),
        ("torchsparse", 1.29),
        ("torchsparse", 3.68),
    ),
    "waymo_1f_5cm": (("torchsparse", 0.549), ("torchsparse", 0.768), ("torchsparse", 1.51), ("torchsparse", 3.77)),
    "shell_256": (("flexgemm", 0.602), ("flexgemm", 1.12), ("flexgemm", 1.7), ("spconv", 9.25)),
    "shell_512": (("flexgemm", 1.38), ("flexgemm", 2.44), ("flexgemm", 6.2), ("spconv", 38.7)),
}
# Our first prototype of the forward kernel, the best of three tiles.
_PROTOTYPE = {
    "nuscenes_1f_10cm": (0.0156, 0.0174, 0.0349, 0.0725),
    "waymo_1f_10x10x15cm": (0.0242, 0.0386, 0.0983, 0.285),
    "waymo_1f_5cm": (0.0236, 0.0348, 0.0793, 0.242),
    "shell_256": (0.0535, 0.0927, 0.248, 0.865),
    "shell_512": (0.182, 0.331, 0.958, 3.67),
}


@dataclass(frozen=True)
class Pass:
    """What is timed of a layer. recorded: the best peer of each width by scene."""

    name: str
    recorded: Mapping[str, Sequence[tuple[str, float]]]


FORWARD = Pass("fwd", MappingProxyType(_FORWARD))
TRAINING = Pass("fwd+bwd", MappingProxyType(_TRAINING))
GOAL = 3.0  # times as fast as the best peer of a cell


@dataclass(frozen=True, eq=False)
class Trained(Layer):
    """A layer, and the gradient of its result."""

    grad: Tensor


def forward(say: Say, options: Options) -> Iterator[Row]:
    """The rows of the suite conv-forward. Raises PumiceError at the end if anything of ours was wrong."""
    return _suite(say, options, FORWARD, "conv-forward")


def training(say: Say, options: Options) -> Iterator[Row]:
    """The rows of the suite conv-train."""
    return _suite(say, options, TRAINING, "conv-train")


def _suite(say: Say, options: Options, passed: Pass, suite: str) -> Iterator[Row]:
    if options.case:
        raise OptionError(f"the suite {suite} has one study: choose cells by --only, found --case {options.case!r}")
    setup = Setup(pick_device(options.device), options.quick, say, options.only, options.thorough, suite)
    done: list[Row] = []
    for name, load in layer_scenes(setup):
        cells = [c for c in _channels(setup) if setup.wants(_case(name, c, passed))]
        if not cells:
            continue
        voxels = load()
        found, _ = kernel_map(
            SparseTensor(torch.zeros(len(voxels), 1, device=setup.device), voxels.coords).geometry, WINDOW
        )
        say(f"{name}: {found}")
        for channels in cells:
            for made in _cell(setup, (name, channels), (found, voxels), passed):
                done.append(made)
                yield made
    summarize(setup, done, {"spconv": ("spconv",)})
    _say_best(setup, done)
    setup.settle()


WINDOW = Relation.of(3, 3)


def _channels(setup: Setup) -> tuple[int, ...]:
    return (8, 16) if setup.quick else CHANNELS


def _case(scene: str, channels: int, passed: Pass) -> str:
    return f"{scene}/k3/C{channels}/{passed.name}"


def _cell(setup: Setup, cell: tuple[str, int], mapped: tuple[KernelMap, Voxels], passed: Pass) -> Iterator[Row]:
    """A scene with so many channels: ours as it comes and tuned, spconv, and what was recorded."""
    scene, channels = cell
    layer = _layer(setup, mapped, channels)
    call = {"fwd": _forward, "fwd+bwd": _both}[passed.name]
    ours = [Way("default", lambda: untuned(partial(call, layer))), Way("tuned", lambda: tuned(partial(call, layer)))]
    peers = [
        Way("spconv", partial(_spconv, layer, passed), spconv_peer.package(), slack=spconv_peer.slack(setup.device))
    ]
    bounds = {} if passed is TRAINING else {"bound": 1e3 * least(layer)}
    case = Case(_case(scene, channels, passed), setup.half, _truth(layer, passed), bounds)
    rows = list(measured(setup, case, ours, peers))
    yield from rows
    for peer in _known(scene, channels, passed):
        for own in {(r.case, r.clock): r for r in rows if r.clock == "gpu"}.values():
            yield replace(own, peer=peer.name, peer_value=peer.value, peer_source=peer.source)


def _known(scene: str, channels: int, passed: Pass) -> Iterator[Peer]:
    """What was recorded of a cell, and the goal that follows."""
    if scene not in passed.recorded or channels not in CHANNELS:
        return
    name, best = passed.recorded[scene][CHANNELS.index(channels)]
    yield Peer(f"best recorded ({name})", best, "recorded")
    yield Peer("goal", best / GOAL, "goal")
    if passed is FORWARD and scene in _PROTOTYPE:
        yield Peer("prototype", _PROTOTYPE[scene][CHANNELS.index(channels)], "recorded")


def _layer(setup: Setup, mapped: tuple[KernelMap, Voxels], channels: int) -> Trained:
    found, voxels = mapped
    rows = len(voxels)
    feats, grad = (setup.filled(rows, channels, dtype=setup.half, seed=seed) for seed in (6, 8))
    weight = setup.filled(channels, 27, channels, seed=7) / math.sqrt(7 * channels)
    return Trained(found, feats, weight.to(setup.half), voxels.coords, grad)


def _forward(layer: Trained) -> Tensor:
    with torch.no_grad():
        return conv_features(layer.feats, layer.weight, layer.found, layer.rows)


def _both(layer: Trained) -> tuple[Tensor, ...]:
    """The result, and the gradients of features and weights."""
    given = [x.detach().requires_grad_() for x in (layer.feats, layer.weight)]
    y = conv_features(given[0], given[1], layer.found, layer.rows)
    return y.detach(), *torch.autograd.grad(y, given, layer.grad)


def _truth(layer: Trained, passed: Pass) -> Tensor | Sequence[Tensor]:
    """In float64, by the loop over taps."""
    x, weight, pairs = layer.feats.double(), layer.weight.double(), layer.found.pairs()
    y = reference.forward(x, weight, pairs, layer.rows, 1)
    if passed is FORWARD:
        return y
    grad, back = layer.grad.double(), layer.found.transpose().pairs()
    dx = reference.forward(grad, reference.transposed(weight, 1), back, layer.rows, 1)
    return y, dx, reference.weight_gradient(x, grad, pairs, 1)


def least(layer: Trained) -> float:
    """Seconds: every pair multiplied once; its row read from the cache; features in and out through memory once."""
    pairs, channels, size = len(layer.found.pairs().inputs), layer.feats.shape[1], layer.feats.element_size()
    features = 2 * layer.feats.numel() * size + layer.weight.numel() * size
    return seconds_to_move(cache=pairs * channels * size, memory=features, flops=2.0 * pairs * channels**2)


def _spconv(layer: Trained, passed: Pass) -> Callable[[], Any]:
    module, run = spconv_peer.layer(layer.feats, layer.weight, layer.coords)

    @torch.no_grad()
    def forward() -> Tensor:
        return run(layer.feats)

    def both() -> tuple[Tensor, ...]:
        feats = layer.feats.detach().requires_grad_()
        y = run(feats)
        dx, dw = torch.autograd.grad(y, (feats, module.weight), layer.grad)
        return y.detach(), dx, dw.view_as(layer.weight)

    return forward if passed is FORWARD else both


def _say_best(setup: Setup, rows: Sequence[Row]) -> None:
    """Ours against the best peer recorded of each cell, and against the prototype."""
    for way in ("default", "tuned"):
        own = [r for r in rows if r.clock == "gpu" and r.case.endswith(f"/{way}")]
        for beginning in ("best recorded", "prototype"):
            ratios = {r.case: r.peer_value / r.value for r in own if r.peer.startswith(beginning)}
            if ratios:
                mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
                worst = min(ratios, key=ratios.__getitem__)
                setup.say(
                    f"{way} over {beginning}: {mean:.2f}x of {len(ratios)}, least {ratios[worst]:.2f}x at {worst}"
                )
