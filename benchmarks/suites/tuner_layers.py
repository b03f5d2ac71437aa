"""The studies of the suite `tuner` about single convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.harness.rows import Peer, Row
from benchmarks.harness.study import Case, Setup, Way, ready
from benchmarks.harness.timing import Times, busy, together
from benchmarks.scenes.layers import Cell, Choice, Trained, cells, exact, layer_of
from benchmarks.scenes.network_layers import Fed, layers_of
from benchmarks.scenes.workloads import fresh
from benchmarks.suites.tuner_cases import Subjected, Writer, say_published, spent, spent_in_pieces, subjects
from pumice.coords import KernelMap
from pumice.coords.lookup import Neighbours
from pumice.errors import PumiceError
from pumice.lower import dataflow, movement, reference
from pumice.ops import Dataflow, conv_features
from pumice.schedule.dataflow import DATAFLOWS, Grouping, padding
from pumice.schedule.predict import DEVICES

NETWORKS = ("minkunet-kitti-1x", "minkunet-nuscenes-1f")
"""The networks of the studies movement and grouping, those of the papers' tables."""
EPSILONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # values tried by TorchSparse's tuner
SIZES = (0, *range(5_000, 25_001, 2_500))  # values of S tried by TorchSparse's tuner


def fed(setup: Setup, subject: Subjected) -> list[Fed]:
    """The convolutions of the subject's network on its first scan, with operands."""
    met = layers_of(subject.net(setup), fresh(subject.samples(setup)[0]))
    return [Fed.normal(one, subject.dtype) for one in met]


Run = Sequence[Callable[[], Tensor]]
"""A call per layer."""


def in_turn(layers: Sequence[Fed], flows: Sequence[str | Dataflow]) -> Run:
    """Calls of all layers in inference, each in its dataflow."""
    return [torch.no_grad()(partial(one.forward, flow)) for one, flow in zip(layers, flows, strict=True)]


def results(run: Run) -> list[Tensor]:
    """The results of all layers in order."""
    return [layer() for layer in run]


def checked(setup: Setup, case: str, dtype: torch.dtype, truths: Sequence[Tensor], runs: Mapping[str, Run]) -> bool:
    """True if all runs are right by the tolerance of the dtype; others are recorded as failures."""
    known = Case(case, dtype, truths)
    ways = [Way(name, lambda run=run: partial(results, run)) for name, run in runs.items()]
    return all(ready(setup, known, way, ours=True) for way in ways)


def products(layers: Sequence[Fed], groupings: Sequence[Grouping]) -> Run:
    """Calls of the matrix products only, on rows gathered beforehand."""
    made = []
    for one, grouping in zip(layers, groupings, strict=True):
        how = dataflow.layout(one.found, grouping)
        filters = reference.grouped(one.weight.contiguous(), 1)
        gathered = movement.gather_slots(one.feats, how.inputs)
        made.append(torch.no_grad()(partial(_multiplied, one.feats, gathered, filters, how)))
    return made


def _multiplied(x: Tensor, gathered: Tensor, filters: Tensor, how: dataflow.PairLayout) -> Tensor:
    """All products of a layer; that of the offset without movement reads the features."""
    dataflow.middle_product(x, filters, how)
    return dataflow.multiplied(gathered, filters, how)


# Grouping


def grouping(setup: Setup) -> Iterator[Row]:
    """Matrix products of all convolutions on gathered rows: each kernel offset alone, in pairs, in runs, and in groups
    tuned for each layer."""
    for subject in subjects(setup, "grouping", NETWORKS):
        say_published(setup, "grouping")
        yield from _groupings(setup, subject)


def _groupings(setup: Setup, subject: Subjected) -> Iterator[Row]:
    layers = fed(setup, subject)
    chosen = {
        **{kind: [Grouping(kind)] * len(layers) for kind in ("separate", "symmetric", "fixed", "adaptive")},
        "adaptive-tuned": _tuned(setup, layers),
    }
    truths = [one.exact()[0] for one in layers]
    runs = {name: _grouped(layers, how) for name, how in chosen.items()}
    if not checked(setup, subject.case("grouping", "all"), subject.dtype, truths, runs):
        return
    del truths
    times = spent_in_pieces(setup, {name: products(layers, how) for name, how in chosen.items()})
    yield from _grouping_rows(setup, subject, layers, chosen, times)


def _grouped(layers: Sequence[Fed], how: Sequence[Grouping]) -> Run:
    plain = DATAFLOWS["gather-gemm-scatter-fused-separate"]
    return in_turn(layers, [replace(plain, name="grouped", grouping=each) for each in how])


def _tuned(setup: Setup, layers: Sequence[Fed]) -> list[Grouping]:
    """For each layer the best epsilon and S among TorchSparse's; values that give the same groups are tried once."""
    known: dict[tuple[int, int, int], Grouping] = {}
    for one in layers:
        key = (id(one.found), one.met.inputs, one.met.outputs)
        if key not in known:
            known[key] = _best(setup, one)
    found = [known[id(one.found), one.met.inputs, one.met.outputs] for one in layers]
    told = sorted({str(how) for how in found})
    setup.say(f"  tuned for {len(known)} different layers: {', '.join(told)}")
    return found


def _best(setup: Setup, one: Fed) -> Grouping:
    counts = one.found.pairs().sizes.tolist()
    candidates = (Grouping("adaptive", epsilon=epsilon, size=size) for epsilon, size in product(EPSILONS, SIZES))
    distinct = {how.groups(counts): how for how in candidates}
    calls = {str(groups): products([one], [how])[0] for groups, how in distinct.items()}
    times = spent(setup, calls, seconds=1e-3)
    return distinct[min(distinct, key=lambda groups: times[str(groups)].median)]


def _grouping_rows(
    setup: Setup,
    subject: Subjected,
    layers: Sequence[Fed],
    chosen: Mapping[str, Sequence[Grouping]],
    times: Mapping[str, Times],
) -> Iterator[Row]:
    write = Writer(setup, subject, "grouping")
    useful = sum(one.met.flops for one in layers)
    ceiling = Peer("dense ceiling", 1e-12 * DEVICES["cuda"].matrix, "recorded")
    separate = Peer("separate", times["separate"].median)
    for name, how in chosen.items():
        rate = 1e-9 * useful / times[name].median
        share, multiplies = _padded(layers, how)
        yield write.timed(name, times[name], separate)
        yield write.row(name, rate, setup.clock, ceiling, "rate", "TFLOP/s")
        yield write.counted(name, "fact:padding", share, "share")
        yield write.counted(name, "fact:products", multiplies, "calls")
        gain = separate.value / times[name].median
        setup.say(
            f"{subject.case('grouping', name)}: {times[name].median:.4g} ms, {gain:.2f}x, {rate:.4g} TFLOP/s, "
            f"{share:.1%} of the rows padding, {multiplies} products"
        )
    least = 1e3 * sum(map(partial(_least, size=layers[0].feats.element_size()), layers))
    yield write.counted("separate", "fact:least", least, "ms", Peer("separate", separate.value))


def _padded(layers: Sequence[Fed], how: Sequence[Grouping]) -> tuple[float, int]:
    """The share of padding rows, weighted by work, and the number of matrix products."""
    work = filled = 0.0
    calls = 0
    for one, each in zip(layers, how, strict=True):
        counts, channels = one.found.pairs().sizes.tolist(), one.met.inputs * one.met.outputs
        for group in each.groups(counts):
            rows = sum(counts[tap] for tap in group.taps)
            if not rows:
                continue
            share = padding(counts, group.taps) if group.batched else 0.0
            calls += 1 if group.batched else sum(counts[tap] > 0 for tap in group.taps)
            work += rows / (1 - share) * channels
            filled += rows * share / (1 - share) * channels
    return (filled / work if work else 0.0), calls


def _least(one: Fed, size: int) -> float:
    """Lower bound on an H200 for a layer's products in seconds: multiplied, read and written once."""
    gpu = DEVICES["cuda"]
    moved = one.met.pairs * (one.met.inputs + one.met.outputs) * size + one.weight.numel() * size
    return max(one.met.flops / gpu.matrix, moved / gpu.memory)


# Dataflows

DEFAULT = "default"
"""The name of the dataflow chosen by the planner."""
WITH_FORM = "time with form"
"""The metric of a layer's time including the layout of its map."""


def dataflows(setup: Setup) -> Iterator[Row]:
    """A layer in every dataflow, over a ready map, and over a bare map including the time to build its form."""
    say_published(setup, "dataflows")
    chosen = Choice("dataflows", scenes=("nuscenes_1f_10cm", "waymo_1f_5cm"), channels=(32, 128))
    for cell in cells(setup, chosen):
        yield from _cell(setup, cell)


def _cell(setup: Setup, cell: Cell) -> Iterator[Row]:
    layer = layer_of(setup, cell)
    case = Case(cell.case, setup.half, exact(layer))
    flows = {flow or DEFAULT: flow for flow in (None, *DATAFLOWS)}
    calls = {name: _layer(layer, flow) for name, flow in flows.items()}
    done = [name for name, call in calls.items() if ready(setup, case, Way(name, lambda call=call: call), ours=True)]
    if DEFAULT not in done:
        return
    at_hand = spent(setup, {name: calls[name] for name in done})
    whole = {name: _spent_anew(setup, _anew(layer, flows[name])) for name in done}
    for name in sorted(done, key=lambda name: whole[name].median):
        setup.say(f"{cell.case}/{name}: {at_hand[name]}, with its form {whole[name]}")
    for metric, times in (("time", at_hand), (WITH_FORM, whole)):
        default = Peer(DEFAULT, times[DEFAULT].median)
        for name in done:
            yield setup.row(f"{cell.case}/{name}", times[name], setup.clock, default, metric)


def _layer(layer: Trained, flow: str | None, found: KernelMap | None = None) -> Callable[[], Tensor]:
    run = partial(conv_features, layer.feats, layer.weight, found or layer.found, layer.rows, dataflow=flow)
    return torch.no_grad()(run)


def _anew(layer: Trained, flow: str | None) -> Callable[[], Tensor]:
    """A call of the layer over a new map of rows and masks only."""
    rows, masks = layer.found.rows(), layer.found.masks()

    def run() -> Tensor:
        return _layer(
            layer, flow, KernelMap.from_neighbours(layer.found.relation, Neighbours(rows, masks), layer.rows)
        )()

    return run


def _spent_anew(setup: Setup, call: Callable[[], Tensor]) -> Times:
    """Device time of a call that waits midway for the sizes of a form."""
    clock = "wall"
    if setup.device.type == "cuda":
        call()
        try:
            return busy(call)
        except PumiceError as reason:
            setup.say(f"  between events: {reason}")
            clock = "events"
    (times,) = together([call], setup.device, clock, setup.seconds)
    return times
