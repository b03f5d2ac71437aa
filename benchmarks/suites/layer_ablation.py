"""The studies `ablation` and `default-tile` of the suites `conv-forward` and `conv-train`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.results import geomean
from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, goals_told, ready, timed, tuned, untuned
from benchmarks.scenes.layers import FORWARD, Cell, Choice, Pass, Trained, cells, exact, forward, layer_of, statement
from benchmarks.suites.layer_model import Step, Walk, in_turn, least, needs, walks
from pumice.lower import maps
from pumice.lower.dataflow import CONV
from pumice.lower.epilogue import Epilogue, applied
from pumice.ops import conv_features
from pumice.runtime.launch import has_triton, triton_unavailable_reason
from pumice.schedule.dataflow import split_dataflow
from pumice.schedule.predict import DEVICES
from pumice.schedule.tile import Tile

FORM = "compacted"
ALL_TAPS = "O[o,n] = x[R[o,k],c] * w[n,k,c]"
"""Computes all kernel offsets of every row, from the map's table; no form of a map does."""
ONLINE = "O[rows[tile[e],b],n] = x[R[rows[tile[e],b],k[e]],c] * w[n,k[e],c] ; tile:sorted, rows:distinct, rows:onto"
"""Reorders rows in the kernel: input rows are looked up in the table instead of being laid out in tiles."""
NO_FORM = (
    "compaction and reordering are measured against statements: no form of a map walks all taps of every row, and none "
    "looks up in the kernel what a row meets"
)
_SIZES = (10_000, 1_000_000)
"""Numbers of rows of a small and of a large layer."""
_KERNEL = 2e-6
"""Seconds of an elementwise kernel besides the time for its bytes."""
_APART = 46
"""Bytes per element that an unfused epilogue moves in half precision: six kernels, most of them in float32."""


@dataclass(frozen=True, eq=False)
class Idea:
    """A layer with an optimization and without it, its exact result, and the gain predicted by the model."""

    predicted: float
    has: Callable[[], Tensor]
    lacks: Callable[[], Tensor]
    truth: Tensor


@dataclass(frozen=True, eq=False)
class Subjected:
    """The layer of a cell with its float64 result."""

    layer: Trained
    truth: Tensor

    @property
    def kernels(self) -> bool:
        return has_triton(self.layer.feats)

    def idea(self, predicted: float, has: Callable[[], Tensor], lacks: Callable[[], Tensor]) -> Idea:
        return Idea(predicted, has, lacks, self.truth)

    def form(self, name: str) -> Callable[[], Tensor]:
        """The layer over its map in a given form."""
        return self.line(CONV, *maps.build_form(self.layer.found, name))

    def line(self, text: str, names: Sequence[str], arrays: Sequence[Tensor]) -> Callable[[], Tensor]:
        """A statement over features, weights and index arrays, by Triton if available."""
        return statement(self.layer, (names, arrays), text, "triton" if self.kernels else "")

    def seconds(self, walked: Sequence[Walk]) -> float:
        """Lower bound of the time of a kernel with the default tile over these walks."""
        return least(needs(self.layer, walked, Step.of(self.layer, FORM).default()))

    def compacted(self) -> float:
        return self.seconds(walks(self.layer.found, FORM))


def _row_order(cell: Subjected) -> Idea:
    predicted = cell.seconds(walks(cell.layer.found, "unsorted")) / cell.compacted()
    return cell.idea(predicted, cell.form(FORM), cell.form("unsorted"))


def _split(cell: Subjected, count: int) -> Idea:
    """Rows sorted in so many splits, all in one kernel, against rows sorted once."""
    return cell.idea(cell.compacted() / _splits_seconds(cell, count), _in_splits(cell, count), cell.form(FORM))


def _parallel_splits(cell: Subjected, count: int) -> Idea:
    """All splits in one kernel and the sum of their buffers, against a kernel for each that adds to the one before."""
    return cell.idea(1.0, _in_splits(cell, count), cell.form(split_dataflow(count).form))


def _splits_seconds(cell: Subjected, count: int) -> float:
    return cell.seconds(walks(cell.layer.found, split_dataflow(count).form))


def _in_splits(cell: Subjected, count: int) -> Callable[[], Tensor]:
    layer = cell.layer
    return torch.no_grad()(
        lambda: conv_features(layer.feats, layer.weight, layer.found, layer.rows, dataflow=split_dataflow(count))
    )


def _compaction(cell: Subjected) -> Idea:
    table = cell.layer.found.rows()
    all_taps = Walk.of_all_taps(cell.layer.found, maps.tile_rows_for(cell.layer.rows))
    dense = cell.line(ALL_TAPS, ["R"], [table])
    return cell.idea(cell.seconds([all_taps]) / cell.compacted(), cell.form(FORM), dense)


def _reordering(cell: Subjected) -> Idea:
    rows, tiles, taps, _ = maps.build_form(cell.layer.found, FORM)[1]
    online = cell.line(ONLINE, ["R", "rows", "tile", "k"], [cell.layer.found.rows(), rows, tiles, taps])
    # Measured on a first prototype: a chain of three dependent loads costs 1.3 to 1.5 times as much.
    return cell.idea(1.4, cell.form(FORM), online)


def _look_ahead(cell: Subjected, stages: int, predicted: float) -> Idea:
    """Index prefetching against dependent loads with `stages` stages; the prediction is a first prototype's gain."""
    step = Step.of(cell.layer, FORM)
    tile = step.default()
    ahead, chain = replace(tile, prefetch_indices=True, stages=3), replace(tile, prefetch_indices=False, stages=stages)
    return cell.idea(predicted, _by(step, ahead), _by(step, chain))


def _by(step: Step, tile: Tile) -> Callable[[], Tensor]:
    return lambda: step.by(tile)


def _switched(cell: Subjected, predicted: float, **off: Any) -> Idea | str:
    """The default tile against the same tile with options switched off."""
    step = Step.of(cell.layer, FORM)
    tile = step.default()
    if tile.packed:
        return "channels are few, and packs of entries have no such switch"
    return cell.idea(predicted, _by(step, tile), _by(step, replace(tile, **off)))


def _sharing(cell: Subjected) -> Idea | str:
    """Long segments shared by several programs, against one program per segment."""
    tile, walked = Step.of(cell.layer, FORM).default(), walks(cell.layer.found, FORM)
    if not tile.stream_k_chunk:
        return "there is work for all, and nothing is shared"
    alone = least(needs(cell.layer, walked, replace(tile, stream_k_chunk=0)))
    return _switched(cell, alone / least(needs(cell.layer, walked, tile)), stream_k_chunk=0)


def _tile_by_size(cell: Subjected) -> Idea:
    """The tile and block for the layer's size against those for another size: a large layer's for a small one, or vice
    versa."""
    layer = cell.layer
    own = maps.tile_rows_for(layer.rows)
    other = next(size for size in _SIZES if maps.tile_rows_for(size) != own)
    made: list[tuple[Step, Tile, float]] = []
    for size in (layer.rows, other):
        block = maps.tile_rows_for(size)
        step = Step.of(layer, FORM, block)
        tile = step.default(size / layer.rows)
        walk = Walk.of(*layer.found.compacted(block))
        made.append((step, tile, in_turn(needs(layer, [walk], tile))))
    (step, tile, fits), (strange, unfit, takes) = made
    return cell.idea(takes / fits, _by(step, tile), _by(strange, unfit))


def _epilogue(cell: Subjected) -> Idea:
    """Scale, shift, residual and ReLU fused into the layer's kernel, against torch operators after it."""
    layer = cell.layer
    scale, shift = layer.weight[:, 0, 0].abs() + 0.5, layer.weight[:, 1, 0]
    epilogue = Epilogue(scale, shift, layer.grad, "relu")
    in_double = Epilogue(scale.double(), shift.double(), layer.grad.double(), "relu")
    entries, memory = layer.feats.numel(), DEVICES["cuda"].memory
    alone = cell.compacted()
    apart = alone + entries * _APART / memory + 6 * _KERNEL
    fused = alone + entries * layer.feats.element_size() / memory
    return Idea(
        apart / fused,
        torch.no_grad()(lambda: conv_features(layer.feats, layer.weight, layer.found, layer.rows, 1, epilogue)),
        lambda: applied(forward(layer), epilogue),
        applied(cell.truth, in_double),
    )


IDEAS: Mapping[str, Callable[[Subjected], Idea | str]] = {
    "row-order": _row_order,
    "look-ahead": partial(_look_ahead, stages=3, predicted=1.13),
    "look-ahead-against-5-stages": partial(_look_ahead, stages=5, predicted=1.0),
    "compaction": _compaction,
    "reordering": _reordering,
    "tile-by-size": _tile_by_size,
    "sharing": _sharing,
    # Predicted from instruction counts of the loop, although other instructions bound it.
    "hoisting": partial(_switched, predicted=1.03, hoisted=False),
    "padding": partial(_switched, predicted=1.01, padded=False),
    "split2": partial(_split, count=2),
    "split3": partial(_split, count=3),
    "split2-in-parallel": partial(_parallel_splits, count=2),
    "split4-in-parallel": partial(_parallel_splits, count=4),
    "fused-epilogue": _epilogue,
}
"""Comparisons by name; a function returns a text if there is nothing to compare."""
TILED = {"look-ahead", "look-ahead-against-5-stages", "tile-by-size", "sharing", "hoisting", "padding"}
"""The ideas that compare tiles of kernels."""
NO_KERNELS = "tiles are those of kernels, and none run here"


def ablation(setup: Setup) -> Iterator[Row]:
    """Every idea in some cells with default tiles: the predicted gain, and the measured one."""
    chosen = Choice("ablation", scenes=("nuscenes_1f_10cm", "waymo_1f_5cm", "shell_256"), channels=(64, 128))
    gains: dict[str, list[tuple[float, float]]] = {}
    for cell in cells(setup, chosen):
        layer = layer_of(setup, cell)
        subjected = Subjected(layer, exact(layer))
        for name, make in IDEAS.items():
            found = make(subjected) if subjected.kernels or name not in TILED else NO_KERNELS
            if isinstance(found, str):
                setup.say(f"  {cell.case}/{name} is left out: {found}")
                continue
            for made in _compared(setup, cell, name, found):
                if made.metric == "gain" and made.clock == setup.clock:
                    gains.setdefault(name, []).append((made.peer_value, made.value))
                yield made
    _say_gains(setup, gains)


def _compared(setup: Setup, cell: Cell, name: str, idea: Idea) -> Iterator[Row]:
    """Rows of an idea: its time against the time without it, and the measured gain against the predicted one."""
    case = Case(f"{cell.case}/{name}", setup.half, idea.truth)
    has, lacks = (
        ready(setup, case, Way(text, partial(untuned, call)), ours=True)
        for text, call in (("with", idea.has), ("without", idea.lacks))
    )
    if has is None or lacks is None:
        return
    for made in timed(setup, case, [has], [lacks]):
        yield made
        predicted = Peer("predicted", idea.predicted, "model")
        yield setup.row(case.name, made.ratio, made.clock, predicted, "gain", "x")


def _say_gains(setup: Setup, gains: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    setup.say("idea, predicted gain (of an H200), measured gain (geometric means), measured least and most")
    for name, found in gains.items():
        predicted, measured = (geomean(side) for side in zip(*found, strict=True))
        ends = [gain for _, gain in found]
        setup.say(f"  {name:<28} {predicted:6.2f}x {measured:6.2f}x   {min(ends):.2f} to {max(ends):.2f}")
    setup.say(NO_FORM)


# The default tile against the best

WITHIN = 1.1
"""Goal for the default tile's time over the best tile's."""


def default_tile(setup: Setup, passed: Pass) -> Iterator[Row]:
    """Every cell with default tiles against tuned ones, the fastest of all candidates."""
    if why := triton_unavailable_reason(torch.empty(0, device=setup.device)):
        setup.say(f"default-tile is left out: tiles are those of kernels, and {why}")
        return
    ratios: dict[str, float] = {}
    for cell in cells(setup, Choice("default-tile", passed.name)):
        for made in _beside_best(setup, cell, passed):
            if made.clock == setup.clock:
                ratios[cell.case] = made.ratio
            yield made
    goals_told(setup, "best tile over default tile", ratios, 1 / WITHIN)


def _beside_best(setup: Setup, cell: Cell, passed: Pass) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case, call = Case(cell.case, setup.half, passed.exact(layer)), partial(passed.run, layer)
    best = ready(setup, case, Way("best", lambda: tuned(call)), ours=True)
    default = ready(setup, case, Way("default", lambda: untuned(call)), ours=True)
    if default is None or best is None:
        return
    if passed is FORWARD:
        step = Step.of(layer, FORM)
        setup.say(f"  default {step.default()}, best {step.best()}")
    yield from timed(setup, case, [default], [best])
