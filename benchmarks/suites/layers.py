"""The studies `layers` and `gradients` of the suites `conv-forward` and `conv-train`; the suite `cpu-conv`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import (
    Case,
    Options,
    Say,
    Setup,
    Way,
    by_choice,
    goals_told,
    mean_told,
    measured,
    ready,
    seconds_to_move,
    summarize,
    timed,
    tuned,
    untuned,
)
from benchmarks.harness.whole import compared
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.layers import (
    CHANNELS,
    FORWARD,
    TRAINING,
    Cell,
    Choice,
    Pass,
    Trained,
    cells,
    exact,
    forward,
    layer_of,
)
from pumice.errors import OptionError
from pumice.ops import conv_features

# The best peer of each cell in fp16: (name, milliseconds) for 32, 64, 128 and 256 channels.
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
# Milliseconds of our first prototype of the forward kernel, the best of three tiles.
_PROTOTYPE = {
    "nuscenes_1f_10cm": (0.0156, 0.0174, 0.0349, 0.0725),
    "waymo_1f_10x10x15cm": (0.0242, 0.0386, 0.0983, 0.285),
    "waymo_1f_5cm": (0.0236, 0.0348, 0.0793, 0.242),
    "shell_256": (0.0535, 0.0927, 0.248, 0.865),
    "shell_512": (0.182, 0.331, 0.958, 3.67),
}


RECORDED: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]] = {FORWARD.name: _FORWARD, TRAINING.name: _TRAINING}
"""By pass and scene, the best peer for each of CHANNELS."""
GOAL = 3.0  # speedup over the best peer of a cell


def layers(setup: Setup, passed: Pass) -> Iterator[Row]:
    """Every cell: ours untuned and tuned, spconv, and recorded values."""
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
    peer = spconv_peer.way(layer, passed is TRAINING)
    bounds = {} if passed is TRAINING else {"bound": 1e3 * least(layer)}
    rows = list(measured(setup, Case(cell.case, setup.half, passed.exact(layer), bounds), ours, [peer]))
    yield from rows
    for known in _known(cell.scene, cell.channels, passed):
        for own in {(r.case, r.clock): r for r in rows if r.clock == "gpu"}.values():
            yield replace(own, peer=known.name, peer_value=known.value, peer_source=known.source)


def _known(scene: str, channels: int, passed: Pass) -> Iterator[Peer]:
    """The recorded peers of a cell, and the goal derived from them."""
    recorded = RECORDED[passed.name]
    if scene not in recorded or channels not in CHANNELS:
        return
    name, best = recorded[scene][CHANNELS.index(channels)]
    yield Peer(f"best recorded ({name})", best, "recorded")
    yield Peer("goal", best / GOAL, "goal")
    if passed is FORWARD and scene in _PROTOTYPE:
        yield Peer("prototype", _PROTOTYPE[scene][CHANNELS.index(channels)], "recorded")


def least(layer: Trained) -> float:
    """Lower bound in seconds: pairs multiplied once, rows read from L2; features in and out through memory once."""
    pairs, size = len(layer.found.pairs().inputs), layer.feats.element_size()
    (rows, inputs), (outputs, _, each) = layer.feats.shape, layer.weight.shape
    features = (rows * (inputs + outputs) + layer.weight.numel()) * size
    return seconds_to_move(cache=pairs * inputs * size, memory=features, flops=2.0 * pairs * outputs * each)


def _say_best(setup: Setup, rows: Sequence[Row]) -> None:
    """Report our speedups over the best recorded peer and over the prototype."""
    for way in ("default", "tuned"):
        own = [r for r in rows if r.clock == "gpu" and r.case.endswith(f"/{way}")]
        for beginning in ("best recorded", "prototype"):
            ratios = {r.case: r.ratio for r in own if r.peer.startswith(beginning)}
            if ratios:
                setup.say(f"{way} over {beginning}: {mean_told(ratios)}")


# Time of each gradient relative to the forward pass

_PARTS = ("forward", "dgrad", "wgrad")
WGRAD_GOALS = {64: 1.6, 128: 1.3, 256: 1.3}
"""Goals for wgrad's time over the forward pass, by channels."""


def gradients(setup: Setup) -> Iterator[Row]:
    """Every cell: forward, feature gradient and weight gradient, each alone, by default tiles.

    All three run under autograd. On the device's clock only kernels count.
    """
    ratios: dict[int, dict[str, float]] = {}
    for cell in cells(setup, Choice("gradients")):
        for made in _parts(setup, cell):
            if made.case.endswith("/wgrad") and made.clock == setup.clock:
                ratios.setdefault(cell.channels, {})[cell.case] = made.ratio
            yield made
    for channels, found in ratios.items():
        if channels in WGRAD_GOALS:
            goals_told(setup, f"forward over wgrad, C={channels}", found, 1 / WGRAD_GOALS[channels])


def _parts(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    truths = TRAINING.exact(layer)
    found = []
    for name, truth in zip(_PARTS, truths, strict=True):
        way = Way(name, lambda name=name: by_choice(setup, _call(layer, name)))
        found.append(ready(setup, Case(cell.case, setup.half, truth), way, ours=True))
    if None not in found:
        forward, *backward = (one for one in found if one)
        yield from timed(setup, Case(cell.case, setup.half, truths[0]), backward, [forward])


def _call(layer: Trained, name: str) -> Callable[[], Tensor]:
    """The call of one part. Only the wanted operand requires a gradient, since autograd computes all required ones."""
    wanted = {"dgrad": (0,), "wgrad": (1,)}.get(name, (0, 1))
    given = [x.detach().requires_grad_(n in wanted) for n, x in enumerate((layer.feats, layer.weight))]
    run = partial(conv_features, *given, layer.found, layer.rows)
    if name == "forward":
        return lambda: run().detach()
    kept: list[Tensor] = []

    def gradient() -> Tensor:
        # The forward pass runs within the first call, since a gradient uses the tuning mode of its forward pass.
        if not kept:
            kept.append(run())
        return torch.autograd.grad(kept[0], given[wanted[0]], layer.grad, retain_graph=True)[0]

    return gradient


# On a CPU


def cpu_conv(say: Say, options: Options) -> Iterator[Row]:
    """The suite `cpu-conv`: fp32 layers on the CPU over ready maps, against spconv's CPU build."""
    if options != Options():
        raise OptionError("the suite cpu-conv has one case and runs on the CPU: it takes no options but --out")
    setup, ratios = Setup(torch.device("cpu"), False, say, suite="cpu-conv"), {}
    for cell in cells(setup, Choice(after="fp32/fwd", scenes=("waymo_1f_10x10x15cm",), channels=(16, 32, 64, 128))):
        layer = layer_of(setup, cell)
        case = Case(cell.case, torch.float32, exact(layer))
        mine = ready(setup, case, Way("pumice", lambda layer=layer: partial(forward, layer), slack=0.1), ours=True)
        peer = ready(setup, case, spconv_peer.way(layer), ours=False)
        for made in compared(setup, cell.case, mine, [peer], seconds=8.0) if mine and peer else ():
            ratios[cell.case] = made.ratio
            yield made
    setup.say(f"over spconv: {mean_told(ratios)}" if ratios else "nothing was compared")
    setup.settle()
