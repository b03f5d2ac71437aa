"""The study `channels` of the suite `conv-forward`: layers of odd and few channels, and of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor, no_grad

from benchmarks.harness.rows import Row
from benchmarks.harness.study import Case, Ready, Setup, Way, ready, summarize, timed, tuned, untuned
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.layers import Cell, Choice, Trained, Width, cells, forward, layer_of
from benchmarks.suites.einsum_conv import exact
from benchmarks.suites.layer_model import Step, bounds, needs, walks
from pumice.ops.conv import merge_small_groups

FORM = "compacted"
WIDTHS = (
    *(Width(1, 16), Width(3, 32), Width(4, 32), Width(5, 16), Width(16, 16), Width(17, 96)),
    *(Width(96, 96), Width(192, 96), Width(64, 1000)),
    *(Width(64, 64, 2), Width(128, 128, 4), Width(128, 128, 32), Width(64, 64, 64), Width(256, 256, 256)),
)
SCENES = ("waymo_1f_5cm", "nuscenes_1f_10cm")
DENSE = "one group"
"""Of a layer with groups: the layer of the same channels without, ours too."""


def channels(setup: Setup) -> Iterator[Row]:
    """Every width by default tiles (thorough: by tuned ones, too) against spconv or, where there are groups, against
    one group."""
    done: list[Row] = []
    setup.say("spconv is left out where there are groups: it has layers of one group only")
    for cell in cells(setup, Choice("channels", "fwd", SCENES, widths=WIDTHS)):
        for made in _cell(setup, cell):
            done.append(made)
            yield made
    summarize(setup, done, {"spconv": ("spconv",), DENSE: (DENSE,)})


def _cell(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case = Case(cell.case, setup.half, exact(layer), _bounds(layer))
    mine = [r for way in _ways(setup, layer) if (r := ready(setup, case, way, ours=True))]
    peer = _one_group(setup, cell) if cell.width.groups > 1 else _spconv(setup, case, layer)
    if mine:
        yield from timed(setup, case, mine, [peer] if peer else [])


def _ways(setup: Setup, layer: Trained) -> Iterator[Way]:
    call = partial(forward, layer)
    yield Way("default", lambda: untuned(call))
    if setup.thorough:
        yield Way("tuned", lambda: tuned(call))


def _bounds(layer: Trained) -> Mapping[str, float]:
    """Least milliseconds of the default tile; not of the longest program, whose latency is known of products only."""
    weight, _ = merge_small_groups(layer.feats, layer.weight, layer.groups)
    layer = replace(layer, weight=weight)
    needed = needs(layer, walks(layer.found, FORM), Step.of(layer, FORM).default())
    return {name: 1e3 * seconds for name, seconds in bounds(needed).items() if name != "latency"}


def _one_group(setup: Setup, cell: Cell) -> Ready | None:
    """Of other weights: it is checked against its own result."""
    dense = layer_of(setup, replace(cell, width=replace(cell.width, groups=1)))
    way = Way(DENSE, lambda: untuned(partial(forward, dense)))
    return ready(setup, Case(cell.case, setup.half, exact(dense)), way, ours=True)


def _spconv(setup: Setup, case: Case, layer: Trained) -> Ready | None:
    def make() -> Callable[[], Tensor]:
        _, run = spconv_peer.layer(layer.feats, layer.weight, layer.coords)
        return no_grad()(lambda: run(layer.feats))

    way = Way("spconv", make, spconv_peer.package(), slack=spconv_peer.slack(setup.device))
    return ready(setup, case, way, ours=False)
