"""The studies of the suite `tuner` about movement: gather and scatter alone, and their share of a network's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Setup
from benchmarks.harness.timing import Times
from benchmarks.scenes.network_layers import Fed
from benchmarks.scenes.workloads import fresh
from benchmarks.suites.tuner_cases import ITSELF, Subjected, Writer, say_published, spent_in_pieces, subjects
from benchmarks.suites.tuner_layers import NETWORKS, Run, checked, fed, in_turn
from benchmarks.suites.tuner_networks import Network, Ran
from benchmarks.suites.tuner_networks import checked as checked_networks
from pumice.engine.measure import by_part
from pumice.lower import dataflow, movement, reference
from pumice.lower.dataflow import PairLayout
from pumice.schedule.dataflow import DATAFLOWS, Grouping

# Gather and scatter alone

BASELINE = "fp32"
"""The way with which the others are compared: one element per access, the first row of TorchSparse's table 3."""
_L2 = 50e6
"""Bytes of an H200's L2 available to features."""
_SEPARATE = Grouping("separate")


@dataclass(frozen=True)
class Movement:
    """A way to move rows. half: in half precision; order: a movement of Dataflow; scalar: see lower.movement."""

    half: bool
    order: str
    scalar: bool = False

    def whole(self, layers: Sequence[Fed]) -> Run:
        """Calls of all layers."""
        if self.scalar:
            return [torch.no_grad()(partial(_scalar_layer, one)) for one in layers]
        return in_turn(layers, [DATAFLOWS[f"gather-gemm-scatter-{self.order}-separate"]] * len(layers))

    def gathers(self, layers: Sequence[Fed]) -> Run:
        """Calls that gather the rows of all pairs of a layer."""
        return [partial(self._gather, one.feats, dataflow.layout(one.found, _SEPARATE)) for one in layers]

    def scatters(self, layers: Sequence[Fed], products: Sequence[Tensor]) -> Run:
        """Calls that add the products of all pairs of a layer to what its outputs begin with, and store these in the
        layer's dtype."""
        layouts = [dataflow.layout(one.found, _SEPARATE) for one in layers]
        begun = [
            torch.zeros(how.outputs.count, one.met.outputs, dtype=self._sums(one.feats.dtype), device=one.feats.device)
            for one, how in zip(layers, layouts, strict=True)
        ]
        return [partial(self._scatter, *given) for given in zip(products, begun, layouts, strict=True)]

    def _sums(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of sums in memory; those of a stationary order are in registers."""
        return dtype if self.order == "locality-aware" else reference.accumulator(dtype)

    def _gather(self, x: Tensor, how: PairLayout) -> Tensor:
        if self.order == "locality-aware":
            return movement.gather_stationary(x, how.inputs)
        if self.order == "fused":
            return movement.gather_slots(x, how.inputs)
        found = x
        for block in how.blocks:
            found = movement.gather_slots(x, block.inputs, self.scalar)
        return found

    def _scatter(self, products: Tensor, begun: Tensor, how: PairLayout) -> Tensor:
        if self.order == "locality-aware":
            return movement.scatter_stationary(products, how.outputs, None if how.middle is None else begun)
        if self.order == "fused":
            movement.scatter_slots(begun, products, how.outputs)
            return begun.to(products.dtype)
        for block in how.blocks:
            movement.scatter_slots(begun, products[block.first : block.last], block.outputs, self.scalar)
        return begun.to(products.dtype)


MOVEMENTS: Mapping[str, Movement] = {
    BASELINE: Movement(False, "vectorised", scalar=True),
    "vectorised-fp32": Movement(False, "vectorised"),
    "scalar": Movement(True, "vectorised", scalar=True),
    "vectorised": Movement(True, "vectorised"),
    "fused": Movement(True, "fused"),
    "locality-aware": Movement(True, "locality-aware"),
}
"""The rows of TorchSparse's table 3, and vectors in fp32; each offset is multiplied by itself."""


def _scalar_layer(one: Fed) -> Tensor:
    how = dataflow.layout(one.found, _SEPARATE)
    return dataflow.forward_by_group(one.feats, one.weight, how, 1, scalar=True).to(one.feats.dtype)


def data_movement(setup: Setup) -> Iterator[Row]:
    """All convolutions of a network, and their gathers and scatters apart: one element per access in fp32 and in half
    precision, vectors, all offsets at once, and in the order of inputs and of outputs."""
    for subject in subjects(setup, "movement", NETWORKS):
        say_published(setup, "movement")
        yield from _movements(setup, subject)


def _movements(setup: Setup, subject: Subjected) -> Iterator[Row]:
    half = fed(setup, subject)
    # The same values in both precisions, so that one reference serves both.
    sides = {True: half, False: [one.to(torch.float32) for one in half]}
    runs = {name: way.whole(sides[way.half]) for name, way in MOVEMENTS.items()}
    truths = [one.exact()[0] for one in half]
    if not checked(setup, subject.case("movement", "all"), subject.dtype, truths, runs):
        return
    del truths
    products = {narrow: [_products(one) for one in layers] for narrow, layers in sides.items()}
    parts = {
        "time": runs,
        "part:gather": {name: way.gathers(sides[way.half]) for name, way in MOVEMENTS.items()},
        "part:scatter": {name: way.scatters(sides[way.half], products[way.half]) for name, way in MOVEMENTS.items()},
    }
    yield from _movement_rows(
        setup, subject, half, {part: spent_in_pieces(setup, each) for part, each in parts.items()}
    )


def _products(one: Fed) -> Tensor:
    """The products of all pairs of a layer, in their slots."""
    how = dataflow.layout(one.found, _SEPARATE)
    gathered = movement.gather_slots(one.feats, how.inputs)
    return dataflow.multiplied(gathered, reference.grouped(one.weight.contiguous(), 1), how)


def _movement_rows(
    setup: Setup, subject: Subjected, layers: Sequence[Fed], parts: Mapping[str, Mapping[str, Times]]
) -> Iterator[Row]:
    write = Writer(setup, subject, "movement")
    moved = {
        name: Times.exactly(sum(parts[part][name].median for part in ("part:gather", "part:scatter")))
        for name in MOVEMENTS
    }
    for name, way in MOVEMENTS.items():
        for metric, times in {**parts, "part:movement": moved}.items():
            yield write.timed(name, times[name], Peer(BASELINE, times[BASELINE].median), metric)
        volume = sum(_bytes(one, layers[0].feats.element_size() if way.half else 4) for one in layers)
        yield write.counted(name, "fact:bytes gathered and scattered", 1e-9 * volume, "GB")
        setup.say(f"{subject.case('movement', name)}: {_told(name, {**parts, 'part:movement': moved}, volume)}")
    largest = max(one.feats.numel() * one.feats.element_size() for one in layers)
    yield write.counted("locality-aware", "fact:largest features", 1e-6 * largest, "MB", Peer("L2", 1e-6 * _L2))


def _bytes(one: Fed, size: int) -> float:
    """Bytes that gather and scatter move without reuse: for each slot both rows, read and written."""
    slots = len(dataflow.layout(one.found, _SEPARATE).inputs.rows)
    return 2.0 * slots * (one.met.inputs + one.met.outputs) * size


def _told(name: str, parts: Mapping[str, Mapping[str, Times]], volume: float) -> str:
    """A way in one line: each time, how many times faster than the baseline it is, and the rate of movement."""
    told = []
    for part, times in parts.items():
        own, before = times[name].median, times[BASELINE].median
        told.append(f"{part.removeprefix('part:')} {own:.4g} ms" + (f" ({before / own:.2f}x)" if own else ""))
    own = parts["part:movement"][name].median
    return ", ".join(told) + (f"; {1e-9 * volume:.3g} GB at {1e-9 * volume / own:.3g} TB/s" if own else "")


# Their share of a network's time

MAPPING, GATHER, PRODUCT, SCATTER, OTHER = "mapping", "gather", "product", "scatter", "other"
PARTS = (MAPPING, GATHER, PRODUCT, SCATTER, OTHER)
"""Parts of a pass, as in TorchSparse's figure 4. mapping: what a pass with new maps takes longer than one over maps and
layouts at hand; product: matrix products, also those of kernels that gather themselves; other: what is left."""
_PART_OF = {"gather": GATHER, "scatter": SCATTER, "product": PRODUCT, "conv": PRODUCT}
"""The part of each part of engine.measure."""
BROKEN_DOWN = ("minkunet-kitti-1x", "centerpoint-waymo-3f", "centerpoint-waymo-1f")
"""Networks for segmentation and for detection."""
_RUNS = 7
_ALGORITHM_2 = "offset-by-offset"


def breakdown(setup: Setup) -> Iterator[Row]:
    """A network's time by part: offset by offset, fused and locality-aware in adaptive groups, and by default."""
    ways = {
        _ALGORITHM_2: "gather-gemm-scatter-vectorised-separate",
        "locality-aware": "gather-gemm-scatter-locality-aware-adaptive",
        "default": None,
    }
    for subject in subjects(setup, "breakdown", BROKEN_DOWN):
        say_published(setup, "breakdown")
        network, write = Network.of(setup, subject), Writer(setup, subject, "breakdown")
        asked = {name: network.all_in(flow) for name, flow in ways.items()}
        right = checked_networks(setup, network, asked, partial(subject.case, "breakdown"))
        if _ALGORITHM_2 in right:
            yield from _breakdown_rows(write, {name: broken_down(setup, network, ran) for name, ran in right.items()})


def _breakdown_rows(write: Writer, found: Mapping[str, Mapping[str, Times]]) -> Iterator[Row]:
    for name, parts in found.items():
        whole = sum(times.median for times in parts.values())
        peer = sum(times.median for times in found[_ALGORITHM_2].values())
        yield write.timed(name, Times.exactly(whole), Peer(_ALGORITHM_2, peer))
        for part, times in parts.items():
            yield write.timed(name, times, Peer(ITSELF, times.median), f"part:{part}")
            yield write.counted(name, f"fact:share of {part}", 100 * times.median / whole, "%")
        told = ", ".join(f"{part} {t.median:.4g} ({100 * t.median / whole:.0f} %)" for part, t in parts.items())
        write.setup.say(f"{write.subject.case(write.study, name)}: {whole:.4g} ms: {told}")


def broken_down(setup: Setup, network: Network, ran: Ran) -> dict[str, Times]:
    """Milliseconds of a pass by part; on a CPU, whose kernels have no names, only mapping and the rest."""
    sample = fresh(network.samples[0])

    def over_maps() -> Tensor:
        with torch.no_grad():
            return network.net(sample).feats

    with network.having(ran):
        over_maps()
        anew, known = (_spent(setup, call) for call in (partial(network.run, ran), over_maps))
    totals = [[sum(parts.values()) for parts in runs] for runs in (anew, known)]
    usual = Times.of(totals[1]).median
    found = {MAPPING: Times.of([max(0.0, total - usual) for total in totals[0]])}
    names = PARTS[1:] if setup.device.type == "cuda" else (OTHER,)
    return {**found, **{name: Times.of([parts.get(name, 0.0) for parts in known]) for name in names}}


def _spent(setup: Setup, call: Callable[[], object]) -> list[dict[str, float]]:
    """Milliseconds by part of each of several runs: device time of kernels by their names, without a GPU wall time."""
    call()
    if setup.device.type != "cuda":
        return [{OTHER: 1e3 * _on_wall(call)} for _ in range(_RUNS)]
    each, _ = by_part([call] * _RUNS)
    return [_by_our_parts(parts) for parts in each]


def _on_wall(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _by_our_parts(told: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds by PARTS, from seconds by the parts of engine.measure."""
    found: dict[str, float] = {}
    for name, seconds in told.items():
        part = _PART_OF.get(name, OTHER)
        found[part] = found.get(part, 0.0) + 1e3 * seconds
    return found
