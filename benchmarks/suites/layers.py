"""The study `layers` of the suites `conv-forward` and `conv-train`: single layers against peers, over all cells.

Scenes and recorded peers are those of the project's baselines on an H200 (2026-11-20: torch 2.11, events around the
call, flushed L2, host time included); spconv runs beside. The clock gpu is the device alone, the wall has the host in
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, measured, seconds_to_move, summarize, tuned, untuned
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.layers import CHANNELS, FORWARD, TRAINING, Cell, Choice, Pass, Trained, cells, layer_of

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


RECORDED: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]] = MappingProxyType(
    {FORWARD.name: _FORWARD, TRAINING.name: _TRAINING}
)
"""The best peer of each width by scene, for each pass."""
GOAL = 3.0  # times as fast as the best peer of a cell


def layers(setup: Setup, passed: Pass) -> Iterator[Row]:
    """Every cell: ours as it comes and tuned, spconv, and what was recorded."""
    done: list[Row] = []
    for cell in cells(setup, Choice(after=passed.name)):
        for made in _cell(setup, cell, passed):
            done.append(made)
            yield made
    summarize(setup, done, {"spconv": ("spconv",)})
    _say_best(setup, done)


def _cell(setup: Setup, cell: Cell, passed: Pass) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    call = partial(passed.run, layer)
    ours = [Way("default", lambda: untuned(call)), Way("tuned", lambda: tuned(call))]
    peers = [
        Way("spconv", partial(_spconv, layer, passed), spconv_peer.package(), slack=spconv_peer.slack(setup.device))
    ]
    bounds = {} if passed is TRAINING else {"bound": 1e3 * least(layer)}
    rows = list(measured(setup, Case(cell.case, setup.half, passed.exact(layer), bounds), ours, peers))
    yield from rows
    for peer in _known(cell.scene, cell.channels, passed):
        for own in {(r.case, r.clock): r for r in rows if r.clock == "gpu"}.values():
            yield replace(own, peer=peer.name, peer_value=peer.value, peer_source=peer.source)


def _known(scene: str, channels: int, passed: Pass) -> Iterator[Peer]:
    """What was recorded of a cell, and the goal that follows."""
    recorded = RECORDED[passed.name]
    if scene not in recorded or channels not in CHANNELS:
        return
    name, best = recorded[scene][CHANNELS.index(channels)]
    yield Peer(f"best recorded ({name})", best, "recorded")
    yield Peer("goal", best / GOAL, "goal")
    if passed is FORWARD and scene in _PROTOTYPE:
        yield Peer("prototype", _PROTOTYPE[scene][CHANNELS.index(channels)], "recorded")


def least(layer: Trained) -> float:
    """Seconds: every pair multiplied once; its row read from the cache; features in and out through memory once."""
    pairs, size = len(layer.found.pairs().inputs), layer.feats.element_size()
    (rows, inputs), (outputs, _, each) = layer.feats.shape, layer.weight.shape
    features = (rows * (inputs + outputs) + layer.weight.numel()) * size
    return seconds_to_move(cache=pairs * inputs * size, memory=features, flops=2.0 * pairs * outputs * each)


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
