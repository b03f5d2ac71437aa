"""Point-cloud convolution, 3x3x3 submanifold, C = 128, over a ready kernel map in each of its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, eager, graph_of, inductor, kept, measured, summarize, tuned
from benchmarks.harness.timing import together
from benchmarks.peers import spconv as spconv_peer
from benchmarks.scenes.clouds import batched
from benchmarks.scenes.layers import Layer, Width, exact, layer_on, map_of, statement
from pumice.coords import KernelMap
from pumice.env import settings
from pumice.lower import maps
from pumice.lower.dataflow import CONV
from pumice.lower.graph import PreparedGraph
from pumice.ops import conv_features

FORMS = ("pairs", "grouped", "compacted", "split2")
INSUM_CONVERSION = Peer("Insum on an RTX 3090 (paper)", 0.55, "recorded")
# The scenes that Inductor runs on, since it compiles each for ten seconds.
FOR_INDUCTOR = ("random_", "waymo_1f_10x10x15cm", "lobby")
GROUP = 32  # pairs per group for Inductor, as in the recorded baselines


def conv(setup: Setup) -> Iterator[Row]:
    """Every scene: the planner's choice of a form, each form forced, peers, and the time to convert to a form."""
    done: list[Row] = []
    for name, coords in scenes(setup):
        case = f"conv/{name}/k3/C{_channels(setup)}"
        if not setup.wants(case):
            continue
        layer = layer_of(setup, coords)
        setup.say(f"{name}: {layer.found}")
        rows = list(_one(setup, case, name, layer))
        done += rows
        yield from kept(rows, FORMS)
        yield from conversions(setup, case, layer)
    summarize(setup, done, {name: (name,) for name in ("spconv", "Inductor", "Inductor native", "eager")})


def scenes(setup: Setup) -> Iterator[tuple[str, Tensor]]:
    """Names and coordinates int32 [N, 4] (batch first): a random scene, and those of PUMICE_DATA."""
    coords = _random(setup)
    yield f"random_{len(coords)}", coords
    folder = settings().data
    if setup.quick:
        return
    if folder is None:
        setup.say("PUMICE_DATA is not set: the random scene only")
        return
    paths = [*sorted((folder / "scenes").glob("*.npz")), *sorted((folder / "ucf_tns").glob("*.tns"))]
    if not paths:
        setup.say(f"no scene in {folder}: the random scene only")
    for path in paths:
        found = np.load(path)["coords"] if path.suffix == ".npz" else np.loadtxt(path, dtype=np.int32)
        yield path.stem, batched(found[:, :3])


def _random(setup: Setup) -> Tensor:
    """Voxels uniformly at random in a box, with 6.8 of 27 neighbours each on average."""
    side, count = (12, 400) if setup.quick else (76, 100_000)
    cells = np.sort(np.random.default_rng(5).permutation(side**3)[:count])
    return batched(np.stack([cells // side**2, cells // side % side, cells % side], axis=1))


def _channels(setup: Setup) -> int:
    return 16 if setup.quick else 128


def layer_of(setup: Setup, coords: Tensor) -> Layer:
    """The layer on these coordinates with normal random features and weights."""
    coords = coords.to(setup.device)
    return layer_on(setup, map_of(coords), coords, Width.square(_channels(setup)))


def _one(setup: Setup, case: str, name: str, layer: Layer) -> Iterator[Row]:
    ours = [planned(layer), *(Way(form, partial(forced, layer, form), optional=True) for form in FORMS)]
    made = partial(grouped_graph, layer)
    peers = [spconv_peer.way(layer)]
    if name.startswith(FOR_INDUCTOR):
        peers.append(eager("eager", made))
    if name.startswith(FOR_INDUCTOR) and not setup.quick:
        peers += [inductor("Inductor native", made, True), inductor("Inductor", made, False)]
    yield from measured(setup, Case(case, setup.half, exact(layer)), ours, peers)


def planned(layer: Layer) -> Way:
    """The layer in inference as pumice.nn runs it."""
    return Way("planned", lambda: tuned(lambda: conv_features(layer.feats, layer.weight, layer.found, layer.rows)))


def convert(layer: Layer) -> None:
    """Build the form of the map that `planned` reads."""
    maps.planner_operands(layer.found, differentiable=False)


def forced(layer: Layer, form: str) -> Callable[[], Tensor]:
    """The layer over its map in a given form."""
    return tuned(statement(layer, maps.build_form(layer.found, form)))


def grouped_graph(layer: Layer) -> PreparedGraph:
    """The layer as a graph of torch operators over groups of pairs."""
    taps, inputs, outputs = layer.found.grouped(GROUP)
    names = "x|w|map@grouped@0@o|map@grouped@0@k|map@grouped@0@i"
    shape = (layer.rows, layer.weight.shape[0])
    return graph_of([layer.feats, layer.weight, outputs, taps, inputs], names, CONV, shape)


def conversions(setup: Setup, case: str, layer: Layer) -> Iterator[Row]:
    """Wall time to convert rows into groups and into compacted tiles, which reads sizes from the device."""
    relation, rows = layer.found.relation, layer.found.rows()
    calls: dict[str, Callable[[], Any]] = {
        "grouped": lambda: (found := KernelMap.from_rows(relation, rows, len(rows))).grouped(maps.group_of(found)),
        "compacted": lambda: KernelMap.from_rows(relation, rows, len(rows)).compacted(maps.tile_rows_for(len(rows))),
    }
    for name, call in calls.items():
        if not _holds_all_pairs(name, call(), layer):
            setup.failed(f"{case}/to {name}: not every pair is there once")
            continue
        (times,) = together([call], setup.device, "wall", setup.seconds)
        setup.say(f"{case}: to {name} {times.median:.4g} ms, paper {INSUM_CONVERSION.value} ms")
        yield setup.row(f"{case}/to-{name}", times, "wall", INSUM_CONVERSION, "conversion")


def _holds_all_pairs(form: str, made: Any, layer: Layer) -> bool:
    """True if the form holds each pair of the map once."""
    if form == "grouped":
        taps, inputs, outputs = made.taps[:, None].expand_as(made.inputs), made.inputs, made.outputs
    else:
        taps, inputs, outputs = made.taps[:, None].expand_as(made.inputs), made.inputs, made.rows[made.tiles.long()]
    there = (inputs >= 0) & (outputs >= 0)
    found = _keys(inputs[there].long(), outputs[there].long(), taps[there].long(), layer)
    pairs = layer.found.pairs()
    known = _keys(pairs.inputs, pairs.outputs, layer.found.taps(), layer)
    return torch.equal(found.sort().values, known.sort().values)


def _keys(inputs: Tensor, outputs: Tensor, taps: Tensor, layer: Layer) -> Tensor:
    return (outputs * layer.found.volume + taps) * layer.rows + inputs
