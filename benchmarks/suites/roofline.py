"""The studies `roofline`, `utilisation` and `redundancy` of the suite `conv-forward`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.harness.rows import ANY, Peer, Row
from benchmarks.harness.study import Case, Ready, Setup, Way, by_choice, ready, timed
from benchmarks.harness.timing import together
from benchmarks.scenes.clouds import layer_scenes
from benchmarks.scenes.layers import Choice, Trained, Width, cells, exact, forward, layer_of, layer_on, map_of
from benchmarks.scenes.network_layers import layers_of
from benchmarks.scenes.workloads import WORKLOADS, fresh, narrow, samples, stand_in
from benchmarks.suites.layer_model import Needs, Step, Walk, bounds, needs, walks, why
from pumice.coords import KernelMap, SortSpec
from pumice.errors import OptionError
from pumice.schedule.predict import DEVICES

FORM = "compacted"
"""The form of the map that a layer reads on a GPU."""
_CHECKED = 1024
"""Number of rows of a dense product that are checked."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A cell with its cost. spent: its seconds on the device, None if not measured."""

    case: str
    needed: Needs
    spent: float | None = None

    def rate(self, flops: float) -> float:
        """TFLOP/s."""
        return 1e-12 * flops / self.spent if self.spent else math.nan


def roofline(setup: Setup) -> Iterator[Row]:
    """Each cell against memory, L2, tensor cores and latency, with the default tile (thorough: the tuned one)."""
    found: list[Placed] = []
    floor = _floor(setup)
    for cell in cells(setup, Choice("roofline")):
        layer = layer_of(setup, cell)
        done = _checked(setup, cell.case, layer)
        needed = _needed(setup, layer)
        in_ms = {name: 1e3 * seconds for name, seconds in bounds(needed, floor).items()}
        rows = list(timed(setup, Case(cell.case, setup.half, layer.feats[:0], in_ms), [done], [])) if done else []
        yield from rows
        spent = next((1e-3 * r.value for r in rows if r.clock == "gpu"), None)
        found.append(Placed(cell.case, needed, spent))
        yield from _rates(setup, found[-1])
    _say_table(setup, found, floor)


def _checked(setup: Setup, case: str, layer: Trained) -> Ready | None:
    way = Way("tuned" if setup.thorough else "default", lambda: by_choice(setup, partial(forward, layer)))
    return ready(setup, Case(case, setup.half, exact(layer)), way, ours=True)


def _needed(setup: Setup, layer: Trained) -> Needs:
    """The cost of the kernel that was timed."""
    step = Step.of(layer, FORM)
    return needs(layer, walks(layer.found, FORM), step.best() if setup.thorough else step.default())


def _floor(setup: Setup) -> float:
    """Seconds of an almost empty kernel; 0 on a CPU."""
    if setup.device.type != "cuda":
        setup.say("shares of bounds are left out: the bounds are those of an H200")
        return 0.0
    one = torch.empty(1, device=setup.device)
    (times,) = together([one.zero_], setup.device, "gpu", setup.seconds)
    setup.say(f"an empty kernel takes {1e3 * times.median:.3g} us")
    return 1e-3 * times.median


def _rates(setup: Setup, placed: Placed) -> Iterator[Row]:
    """TFLOP/s, useful and with absent pairs, against the measured ceiling of dense products."""
    if placed.spent is None:
        return
    ceiling = Peer("dense ceiling", 1e-12 * DEVICES["cuda"].matrix, "recorded")
    for name, flops in (("useful", placed.needed.useful), ("padded", placed.needed.padded)):
        yield setup.row(placed.case, placed.rate(flops), "gpu", ceiling, name, "TFLOP/s")


def _say_table(setup: Setup, found: Sequence[Placed], floor: float) -> None:
    setup.say(
        "cell, ms, useful and padded TFLOP/s, share of the ceiling, MB from memory and from the L2, bound (ms, share)"
    )
    for placed in found:
        setup.say(_line(placed, floor))
        if placed.spent and max(bounds(placed.needed, floor).values()) < 0.5 * placed.spent:
            setup.say(f"    {_reasons(placed, floor)}")


def _line(placed: Placed, floor: float) -> str:
    needed, held = placed.needed, bounds(placed.needed, floor)
    name = max(held, key=held.__getitem__)
    bytes_ = f"{needed.memory / 1e6:8.1f} {needed.cache / 1e6:8.1f} MB  {name} {1e3 * held[name]:.4g}"
    head = f"  {placed.case:<40}"
    if not placed.spent:
        return f"{head} {needed.useful / 1e9:8.3f} {needed.padded / 1e9:8.3f} GFLOP {bytes_}"
    useful, padded = placed.rate(needed.useful), placed.rate(needed.padded)
    share = 1e12 * useful / DEVICES["cuda"].matrix
    return (
        f"{head} {1e3 * placed.spent:8.4f} {useful:6.1f} {padded:6.1f} {share:6.1%} {bytes_} "
        f"({held[name] / placed.spent:.0%})"
    )


def _reasons(placed: Placed, floor: float) -> str:
    """The reasons why a cell takes more than twice its bound, as text."""
    assert placed.spent is not None
    left = why(placed.needed, floor)
    bound = max(bounds(placed.needed, floor).values())
    told = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in left.items() if seconds > 0)
    explained = (bound + sum(left.values())) / placed.spent
    return f"below 50 %: {told}; with the bound {explained:.0%} of {1e6 * placed.spent:.1f} us"


MINKUNET = "minkunet-kitti-1x"
"""The network whose layers are held against dense products, that of the paper."""
_TINY = 120
"""Maximum voxels of its scan in a quick run."""


@dataclass(frozen=True)
class Dense:
    """A product by torch.mm: [rows, inner] x [inner, outputs]."""

    rows: int
    inner: int
    outputs: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.outputs

    def way(self, setup: Setup, case: str) -> Ready | None:
        """The product, checked by its first rows."""
        a = setup.filled(self.rows, self.inner, dtype=setup.half)
        b = setup.filled(self.inner, self.outputs, dtype=setup.half, seed=2)
        truth = a[:_CHECKED].double() @ b.double()
        way = Way("torch.mm", lambda: partial(torch.mm, a, b), "torch", view=lambda y: y[:_CHECKED])
        return ready(setup, Case(case, setup.half, truth), way, ours=False)


def utilisation(setup: Setup) -> Iterator[Row]:
    """Layers against torch.mm: TorchSparse++ figure 8.

    Each cell has a product over its pairs, [pairs, C] x [C, C]; each submanifold layer of a MinkUNet, as in the paper,
    the product of equivalent size, [outputs, 27 C] x [27 C, C_out].
    """
    found: dict[str, Mapping[str, float]] = {}
    for cell in cells(setup, Choice("utilisation")):
        dense = Dense(len(cell.found.pairs().inputs), cell.channels, cell.channels)
        yield from _beside(setup, cell.case, layer_of(setup, cell), dense, found)
    for case, layer in _of_minkunet(setup):
        outputs, volume, inputs = layer.weight.shape
        yield from _beside(setup, case, layer, Dense(layer.rows, volume * inputs, outputs), found)
    _say_rates(setup, found)


def _beside(
    setup: Setup, case: str, layer: Trained, product: Dense, found: dict[str, Mapping[str, float]]
) -> Iterator[Row]:
    """Times and rates of a layer and of a dense product; the rates are kept in `found`."""
    done, dense = _checked(setup, case, layer), product.way(setup, case)
    if done is None or dense is None:
        return
    needed = _needed(setup, layer)
    rows = list(timed(setup, Case(case, setup.half, layer.feats[:0]), [done], [dense]))
    yield from rows
    for own in (r for r in rows if r.clock == setup.clock):
        rates = found[case] = _rates_beside(own, needed, product)
        for name in ("useful", "padded"):
            peer = Peer("torch.mm", rates["torch.mm"], package="torch")
            yield setup.row(own.case, rates[name], own.clock, peer, name, "TFLOP/s")


def _of_minkunet(setup: Setup) -> Iterator[tuple[str, Trained]]:
    """The submanifold layers of MinkUNet on a scan, numbered as in it; those of equal map and channels once."""
    workload = narrow(stand_in(WORKLOADS[MINKUNET])) if setup.quick else WORKLOADS[MINKUNET]
    try:
        (sample,) = samples(workload, setup.device, setup.half, count=1, most=_TINY if setup.quick else 0)
    except OptionError as reason:
        setup.say(f"{MINKUNET} is left out: {reason}")
        return
    net = workload.model().to(setup.device, setup.half).eval()
    seen: set[tuple[int, int, int]] = set()
    for number, met in enumerate(layers_of(net, fresh(sample)), 1):
        width = Width(met.inputs, met.outputs)
        case, key = f"utilisation/{MINKUNET}/{number:02d}/C{width}", (id(met.found), met.inputs, met.outputs)
        if met.found.relation.policy != "same" or key in seen or not setup.wants(case):
            continue
        seen.add(key)
        unread = sample.coords.new_empty(met.found.num_outputs, 4)
        yield case, layer_on(setup, met.found, unread, width)


def _rates_beside(own: Row, needed: Needs, product: Dense) -> Mapping[str, float]:
    """TFLOP/s: useful, padded, and of torch.mm."""
    return {
        "useful": 1e-9 * needed.useful / own.value,
        "padded": 1e-9 * needed.padded / own.value,
        "torch.mm": 1e-9 * product.flops / own.peer_value,
    }


def _say_rates(setup: Setup, found: Mapping[str, Mapping[str, float]]) -> None:
    setup.say("cell, useful TFLOP/s, padded TFLOP/s, TFLOP/s of torch.mm, useful share, padded share")
    for case, rates in found.items():
        dense = rates["torch.mm"]
        told = " ".join(f"{rate:8.2f}" for rate in rates.values())
        setup.say(f"  {case:<40} {told} {rates['useful'] / dense:7.1%} {rates['padded'] / dense:7.1%}")


# Redundant products # A tile of B outputs multiplies all of them by the weights of a kernel offset if any has an input
# there. For P pairs in tiles with E entries (tile, kernel offset) in total, redundancy = E * B / P. It is counted, not
# timed, and the same for every device, dtype and number of channels. The measure and splits of masks are
# TorchSparse++'s.

BLOCKS = (64, 128)
"""Rows of a tile."""
ALL_TAPS = "all-taps"
SPLITS: Mapping[str, int] = {"unsorted": 0, "sorted": 1, "split2": 2, "split3": 3, "split4": 4}
"""By name, the number of parts of the kernel offsets, each with its own order of rows; 0: rows unsorted."""


def redundancy(setup: Setup) -> Iterator[Row]:
    """Every scene: all kernel offsets of every row, unsorted tiles, and sorted tiles in one to four splits."""
    for scene, load in layer_scenes(setup):
        case = f"redundancy/{scene}/k3"
        if not setup.wants(case):
            continue
        found = map_of(load().coords)
        setup.say(f"{scene}: {found}")
        for block in BLOCKS:
            ratios = redundancies(found, block)
            setup.say(f"  tiles of {block:3} rows: " + ", ".join(f"{name} {x:.3f}" for name, x in ratios.items()))
            for name, ratio in ratios.items():
                peer = Peer("pairs", 1.0, "bound")
                made = setup.row(f"{case}/b{block}/{name}", ratio, "count", peer, "redundancy", "ratio", "int32")
                yield replace(made, device=ANY)


def redundancies(found: KernelMap, block: int) -> dict[str, float]:
    """Computed products over needed ones, by way, for tiles of `block` outputs."""
    pairs = max(1, int(found.counts().sum()))
    entries = {ALL_TAPS: Walk.of_all_taps(found, block).entries}
    entries |= {name: _entries(found, block, splits) for name, splits in SPLITS.items() if splits <= found.volume}
    return {name: count * block / pairs for name, count in entries.items()}


def _entries(found: KernelMap, block: int, splits: int) -> int:
    """Entries (tile, kernel offset) over all parts."""
    return sum(int(found.tiling(block, how).entries.sum()) for how in SortSpec.splits(found.volume, splits))
